"""The model families of `zoo.py`: each built from a configuration with random weights, at real but small shapes.

A family is a model, a batch (a dict whose "labels" are what is predicted), and a function of both that returns
logits (n, ..., classes); the loss is the cross-entropy, a mean over what an example has several of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import without_torchvision

Batch = dict[str, Tensor]
Forward = Callable[[nn.Module, Batch], Tensor]

WORDS = 500


@dataclass(frozen=True)
class Family:
    """`build` makes a model, `batch` examples for it, and `forward` their logits."""

    about: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    forward: Forward


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of every example, (n,)."""
    each = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return each.view(len(labels), -1).mean(1)


# -- batches and the way a model is called ---------------------------------------------------------------


def images(pixels: int, examples: int = 16) -> Callable[[], Batch]:
    return lambda: {"x": torch.randn(examples, 3, pixels, pixels), "labels": torch.randint(10, (examples,))}


def tokens(length: int, examples: int, words: int, classes: int) -> Callable[[], Batch]:
    return lambda: {"x": torch.randint(words, (examples, length)), "labels": torch.randint(classes, (examples,))}


def texts(length: int = 64, examples: int = 16) -> Batch:
    """Tokens, and the token that follows each."""
    found = torch.randint(3, WORDS, (examples, length + 1))
    return {"x": found[:, :-1].contiguous(), "labels": found[:, 1:].contiguous()}


def call(model: nn.Module, batch: Batch) -> Tensor:
    """A model that returns logits."""
    logits: Tensor = model(batch["x"])
    return logits


def call_words(model: nn.Module, batch: Batch) -> Tensor:
    """A language model of transformers."""
    logits: Tensor = model(input_ids=batch["x"], use_cache=False).logits
    return logits


def call_classifier(model: nn.Module, batch: Batch) -> Tensor:
    """A classifier of texts of transformers."""
    logits: Tensor = model(input_ids=batch["x"], attention_mask=torch.ones_like(batch["x"])).logits
    return logits


def call_pixels(model: nn.Module, batch: Batch) -> Tensor:
    """A classifier of images of transformers."""
    logits: Tensor = model(pixel_values=batch["x"]).logits
    return logits


def call_t5(model: nn.Module, batch: Batch) -> Tensor:
    """An encoder and a decoder of the same tokens."""
    logits: Tensor = model(input_ids=batch["x"], decoder_input_ids=batch["x"], use_cache=False).logits
    return logits


def call_clip(model: nn.Module, batch: Batch) -> Tensor:
    """Which of ten words an image shows, by the products of their embeddings."""
    picture = model.get_image_features(pixel_values=batch["x"])  # type: ignore[operator]
    words = model.get_text_features(input_ids=batch["words"])  # type: ignore[operator]
    picture, words = (getattr(one, "pooler_output", one) for one in (picture, words))
    logits: Tensor = torch.cat([picture * words, picture], -1)[:, :10]
    return logits


def call_whisper(model: nn.Module, batch: Batch) -> Tensor:
    """What is said in a recording."""
    logits: Tensor = model(input_features=batch["x"], decoder_input_ids=batch["words"], use_cache=False).logits
    return logits


# -- models ----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Words, a recurrent layer, and a linear one on its last output."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(2_000, 64), kind(64, 128, batch_first=True), nn.Linear(128, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.words(x))[0][:, -1])


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


def words() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(20_000, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        without_torchvision.install()
        import timm

        model: nn.Module = timm.create_model(name, num_classes=10, **options)
        return model

    return build


def swin() -> nn.Module:
    without_torchvision.install()
    from timm.models.swin_transformer import SwinTransformer

    model: nn.Module = SwinTransformer(
        img_size=32, patch_size=2, num_classes=10, embed_dim=48, depths=(2, 2), num_heads=(3, 6), window_size=4,
        drop_path_rate=0.0,
    )  # fmt: skip
    return model


def vit() -> nn.Module:
    without_torchvision.install()
    from timm.models.vision_transformer import VisionTransformer

    model: nn.Module = VisionTransformer(img_size=32, patch_size=4, num_classes=10, embed_dim=192, depth=4, num_heads=3)
    return model


def hugging(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    """A class of transformers with a configuration's class, nothing dropped out."""

    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**options)
        for part in (made, *(getattr(made, name, None) for name in ("text_config", "vision_config"))):
            for name in vars(part) if part is not None else ():
                if "drop" in name and isinstance(getattr(part, name), float):
                    setattr(part, name, 0.0)
        built: nn.Module = getattr(transformers, model)(made)
        return built

    return build


def lora() -> nn.Module:
    """The query and value maps of a GPT-2 adapted at rank 8, all else frozen."""
    import peft

    return peft.get_peft_model(  # type: ignore[return-value]
        GPT2(), peft.LoraConfig(r=8, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    )


BERT = {"vocab_size": WORDS, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 512, "max_position_embeddings": 80, "num_labels": 5}  # fmt: skip
LLAMA = {"vocab_size": WORDS, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 344, "max_position_embeddings": 80,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
GPT2 = hugging("GPT2LMHeadModel", "GPT2Config", vocab_size=WORDS, n_positions=80, n_embd=128, n_layer=2, n_head=4)


def sentences() -> Batch:
    return {"x": torch.randint(3, WORDS, (16, 64)), "labels": torch.randint(5, (16,))}


def captions() -> Batch:
    captions = torch.randint(3, WORDS - 1, (16, 16))
    captions[:, -1] = WORDS - 1  # the end, where CLIP reads
    return {"x": torch.randn(16, 3, 32, 32), "words": captions, "labels": torch.randint(10, (16,))}


def speech() -> Batch:
    text = torch.randint(3, WORDS, (8, 17))
    return {"x": torch.randn(8, 40, 128), "words": text[:, :-1].contiguous(), "labels": text[:, 1:].contiguous()}


def image_family(name: str, pixels: int, **options: Any) -> Family:
    return Family(f"timm {name}, {pixels} pixels", timm_model(name, **options), images(pixels), call)


def language_family(model: str, config: str, **options: Any) -> Family:
    return Family(f"{model}, 2 layers, 128 wide, 64 tokens", hugging(model, config, **options), texts, call_words)


FAMILIES: dict[str, Family] = {
    "resnet": image_family("resnet18", 32),
    "resnet64": image_family("resnet18", 64),
    "resnetv2": image_family("resnetv2_18", 32),
    "convnext": image_family("convnext_atto", 32),
    "vit": Family("timm VisionTransformer, 4 layers, 192 wide, 32 pixels", vit, images(32), call),
    "swin": Family("timm SwinTransformer, 2 stages, 48 wide, 32 pixels", swin, images(32), call),
    "efficientnet": image_family("efficientnet_b0", 64),
    "mobilenet": image_family("mobilenetv3_small_100", 64),
    "regnet": image_family("regnetx_002", 32),
    "densenet": image_family("densenet121", 32, growth_rate=16, block_config=(4, 8, 8)),
    "nf_resnet": image_family("nf_resnet26", 32),
    "unet": Family("UNet, 32 pixels", UNet, images(32), call),
    "bert": Family("BERT classifier", hugging("BertForSequenceClassification", "BertConfig", **BERT),
                   sentences, call_classifier),
    "roberta": Family("RoBERTa classifier", hugging("RobertaForSequenceClassification", "RobertaConfig", **BERT),
                      sentences, call_classifier),
    "deberta": Family("DeBERTa v2 classifier",
                      hugging("DebertaV2ForSequenceClassification", "DebertaV2Config", **BERT, relative_attention=True,
                              pos_att_type=["p2c", "c2p"]), sentences, call_classifier),
    "albert": Family("ALBERT classifier",
                     hugging("AlbertForSequenceClassification", "AlbertConfig", **BERT, embedding_size=64),
                     sentences, call_classifier),
    "gpt2": Family("GPT2LMHeadModel, 2 layers, 128 wide, 64 tokens", GPT2, texts, call_words),
    "llama": language_family("LlamaForCausalLM", "LlamaConfig", **LLAMA),
    "qwen": language_family("Qwen2ForCausalLM", "Qwen2Config", **LLAMA),
    "mistral": language_family("MistralForCausalLM", "MistralConfig", **LLAMA),
    "gemma": language_family("GemmaForCausalLM", "GemmaConfig", **LLAMA, head_dim=32),
    "phi": language_family("PhiForCausalLM", "PhiConfig", **LLAMA),
    "opt": language_family("OPTForCausalLM", "OPTConfig", vocab_size=WORDS, hidden_size=128, num_hidden_layers=2,
                           ffn_dim=512, num_attention_heads=4, max_position_embeddings=80, word_embed_proj_dim=128,
                           pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "bloom": language_family("BloomForCausalLM", "BloomConfig", vocab_size=WORDS, hidden_size=128, n_layer=2, n_head=4,
                             pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "mixtral": language_family("MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=4),
    "mamba": language_family("MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=64, state_size=8,
                             num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "t5": Family("T5, 2 + 2 layers, 128 wide, 64 tokens",
                 hugging("T5ForConditionalGeneration", "T5Config", vocab_size=WORDS, d_model=128, d_kv=32, d_ff=512,
                         num_layers=2, num_heads=4, dropout_rate=0.0), texts, call_t5),
    "hf_vit": Family("ViT of transformers, 4 layers, 128 wide, 32 pixels",
                     hugging("ViTForImageClassification", "ViTConfig", hidden_size=128, num_hidden_layers=4,
                             num_attention_heads=4, intermediate_size=512, image_size=32, patch_size=4, num_labels=10),
                     images(32), call_pixels),
    "clip": Family("CLIP, 2 + 2 layers, 128 wide, 32 pixels, 16 tokens",
                   hugging("CLIPModel", "CLIPConfig", projection_dim=64,
                           text_config={"vocab_size": WORDS, "hidden_size": 128, "num_hidden_layers": 2,
                                        "num_attention_heads": 4, "intermediate_size": 512,
                                        "max_position_embeddings": 16, "eos_token_id": WORDS - 1},
                           vision_config={"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
                                          "intermediate_size": 512, "image_size": 32, "patch_size": 8}),
                   captions, call_clip),
    "whisper": Family("Whisper, 2 + 2 layers, 128 wide, 128 frames, 16 tokens",
                      hugging("WhisperForConditionalGeneration", "WhisperConfig", vocab_size=WORDS, d_model=128,
                              encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
                              encoder_ffn_dim=512, decoder_ffn_dim=512, num_mel_bins=40, max_source_positions=64,
                              max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                              decoder_start_token_id=1, begin_suppress_tokens=None, suppress_tokens=None),
                      speech, call_whisper),
    "lstm": Family("LSTM 64-128, 50 tokens", lambda: Recurrent(nn.LSTM), tokens(50, 64, 2_000, 5), call),
    "gru": Family("GRU 64-128, 50 tokens", lambda: Recurrent(nn.GRU), tokens(50, 64, 2_000, 5), call),
    "bags": Family("EmbeddingBag 20,000 x 64 and an MLP, 40 tokens", words, tokens(40, 256, 20_000, 4), call),
    "lora": Family("LoRA (peft) of rank 8 on GPT-2", lora, texts, call_words),
}  # fmt: skip


def make_model(family: Family) -> nn.Module:
    """The family's model with nothing dropped out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = family.build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()
