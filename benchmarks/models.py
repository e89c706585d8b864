"""What a private step costs on other models than those of `sgd.py`, measured in the same way.

python benchmarks/models.py                 all of them
python benchmarks/models.py lstm lm         some
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

import sgd
from sgd import Workload, images, tokens


class Recurrent(nn.Module):
    """Words, a recurrent layer, and a linear one on its last output."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(2_000, 64), kind(64, 128, batch_first=True), nn.Linear(128, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.words(x))[0][:, -1])


class Tied(nn.Module):
    """A transformer whose two ends share a table; one prediction for a text, or one for each of its words."""

    def __init__(self, width: int, layers: int, words: int, length: int, *, each: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Parameter(torch.zeros(1, length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight, self.each = self.words.weight, each

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.layers(self.words(x) + self.places))
        return found.movedim(-1, 1) if self.each else found.mean(1)


class UNet(nn.Module):
    """Down, up again, and what was there before joined to it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU())
        self.down = nn.Sequential(nn.Conv2d(32, 64, 3, 2, 1), nn.GroupNorm(8, 64), nn.ReLU())
        self.deep = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(64, 32, 2, 2)
        self.last = nn.Sequential(nn.Conv2d(64, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 10, 1))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        found: Tensor = self.last(torch.cat([first, self.up(self.deep(self.down(first)))], 1))
        return found.mean((2, 3))


class Words(nn.Module):
    """A tiny model of the transformers library, with random weights: the next word, or the same one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers

        self.kind = kind
        if kind == "t5":
            config = transformers.T5Config(vocab_size=500, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
            self.model = transformers.T5ForConditionalGeneration(config).eval()
            return
        config = transformers.GPT2Config(vocab_size=500, n_positions=64, n_embd=64, n_layer=4, n_head=4)
        self.model = transformers.GPT2LMHeadModel(config).eval()
        if kind == "checkpointed":
            self.model.gradient_checkpointing_enable()
            self.model.train()

    def forward(self, x: Tensor) -> Tensor:
        given = (
            {"decoder_input_ids": x, "attention_mask": (x > 10).long()} if self.kind == "t5" else {"use_cache": False}
        )
        found: Tensor = self.model(input_ids=x, **given).logits
        return found.movedim(-1, 1)


def mlp(*widths: int) -> nn.Module:
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip


def depthwise() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU()]
    for channels, width, stride in ((32, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2)):
        layers += [nn.Conv2d(channels, channels, 3, stride, 1, groups=channels), nn.GroupNorm(8, channels), nn.ReLU()]
        layers += [nn.Conv2d(channels, width, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def series() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(8, 64, 7, padding=3), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(64, 128, 5, padding=2), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(128, 6),
    )  # fmt: skip


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    for channels, width in ((3, 48), (48, 96)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1)]
        layers += [nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(96 * 64, 100))


def words() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(20_000, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def text() -> tuple[Tensor, Tensor]:
    """Texts of 30,000 words, and the word that follows each."""
    found = torch.randint(30_000, (16, 65))
    return found[:, :-1], found[:, 1:]


def short() -> tuple[Tensor, Tensor]:
    """Texts of 500 words, and the word that follows each."""
    found = torch.randint(500, (16, 33))
    return found[:, :-1], found[:, 1:]


sgd.WORKLOADS = (
    Workload("gpt2", "GPT-2 of transformers, d 64, 4 layers, length 32, lot 16", lambda: Words("gpt2"), short),
    Workload("checkpointed", "the same with gradient checkpointing", lambda: Words("checkpointed"), short),
    Workload("t5", "T5 of transformers with a mask, d 64, 2 + 2 layers, length 32, lot 16", lambda: Words("t5"), short),
    Workload("lenet", "LeNet, lot 128", lenet, images(128, 1, 28, 28)),
    Workload("mlp", "MLP 784-256-128-10, lot 256", lambda: mlp(784, 256, 128, 10), images(256, 784)),
    Workload("deep", "MLP of 6 layers of 512, lot 512", lambda: mlp(*[512] * 6, 10), images(512, 512)),
    Workload("tiny", "MLP 20-32-2, lot 128", lambda: mlp(20, 32, 2), images(128, 20, classes=2)),
    Workload("lstm", "LSTM 64-128, length 50, lot 64", lambda: Recurrent(nn.LSTM), tokens(64, 50, 2_000, 5)),
    Workload("gru", "GRU 64-128, length 50, lot 64", lambda: Recurrent(nn.GRU), tokens(64, 50, 2_000, 5)),
    Workload("gpt", "tied, d 128, 3 layers, 1,000 words, length 64, lot 16",
             lambda: Tied(128, 3, 1_000, 64, each=False), tokens(16, 64, 1_000, 10)),
    Workload("lm", "tied, d 256, 2 layers, 30,000 words, length 64, lot 16",
             lambda: Tied(256, 2, 30_000, 64, each=True), text),
    Workload("unet", "UNet, 32x32, lot 16", UNet, images(16, 3, 32, 32)),
    Workload("depthwise", "depthwise convolutions, 64x64, lot 32", depthwise, images(32, 3, 64, 64)),
    Workload("series", "Conv1d, length 128, lot 128", series, images(128, 8, 128, classes=6)),
    Workload("vgg", "VGG-like 48-96, 32x32, lot 32", vgg, images(32, 3, 32, 32, classes=100)),
    Workload("words", "EmbeddingBag 20,000 x 64 and an MLP, lot 256", words, tokens(256, 40, 20_000, 4)),
)  # fmt: skip


if __name__ == "__main__":
    sgd.main()
