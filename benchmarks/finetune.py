"""Private fine-tuning of a language model: LoRA on SST-2 and TREC by DP-SGD, and what a private step costs.

    python benchmarks/finetune.py sst2 trec --model MODEL --data DIR [--methods head lora] [--epsilon 1 3 8] [--seeds 0]
    python benchmarks/finetune.py sst2 --public --epsilon 8        tries settings out: measured on public texts
    python benchmarks/finetune.py step                             a private step against a plain LoRA step

MODEL is a folder or .gguf file (made for SmolLM2-135M-Instruct), by default smollm2/ in the data folder; DIR, or
$TERRINE_DATA, holds sst2.{train,dev,test}.txt and trec.{train,test}.txt in their published form, there or in folders
named after them.

    [instruction] [text]          read once by the frozen model, whose keys and values are kept
    [template] -> class           read by the frozen model (head) or with adapters (lora), then a linear head

The adapters act on the template behind the text, which is LoRA activated by an invocation [GLP25]: the text's keys and
values never change, so that a step costs the few tokens of the template instead of a whole text. The upper layers are
left out: what tells the classes apart is found in the middle of the network. Every text is its own example; what
frozen layers make of it depends on nothing else. Rows are kept in --folder as they are done, and not done again.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import peft
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import keeping
from terrine import datasets, sgd
from terrine.common.keys import Key
from terrine.events import Budget
from terrine.prompts import LanguageModel
from terrine.sgd.clipping import Clipped, Clipper
from terrine.sgd.release import StepRelease
from terrine.sgd.steps import start

DELTA = 1e-4
"""Below 1/N: there are 6,920 and 4,952 private texts."""
FIRST, LAYERS = 6, 18
"""Adapters are in layers 6 to 17, counted from 0; the others of the model's 30 are left out."""
PUBLIC = 500
"""TREC has no development set: so many of its training texts, the last ones, are public and not trained on."""
ROUNDED = 8
"""Texts are padded to a multiple of so many tokens, and those of one padded length go through the model together."""


@dataclass(frozen=True)
class Task:
    """A data set and the question asked about its texts."""

    name: str
    classes: tuple[str, ...]
    instruction: str
    template: str


TASKS = {
    "sst2": Task("sst2", ("0", "1"), "Is this movie review positive or negative?\n", " It was"),
    "trec": Task(
        "trec",
        ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
        "Type of answer: abbreviation, entity, description, person, location or number?\n",
        " Type:",
    ),
}


@dataclass(frozen=True)
class Alone:
    """How the head is trained before there are adapters: its part of epsilon, and its lots."""

    share: float = 0.4
    lot: int = 2048
    steps: int = 60
    clip: float = 1.0
    rate: float = 3.0


@dataclass(frozen=True)
class Settings:
    """How a row is trained."""

    rank: int = 4
    lot: int = 512
    steps: int = 10
    clip: float = 0.5
    rate: float = 6e-3
    plain_rate: float = 1.5e-3
    """Without noise: Adam's steps then all go one way."""
    head_rate: float = 1e-2
    whitening: float = 0.5
    targets: tuple[str, ...] = ("q_proj", "v_proj", "o_proj", "down_proj")
    alone: Alone = field(default_factory=Alone)


SETTINGS = {"sst2": Settings(), "trec": Settings(alone=Alone(clip=0.5, rate=10.0))}
"""Chosen on public texts: SST-2's development texts, and for the rate of TREC's head on its own."""


Frozen = tuple[Tensor, Tensor, Tensor]
"""Of a text: its keys and values (tokens, layers, 2, width), the template's states before the first adapted layer, and
what the template's last token becomes behind the last layer."""
Lot = tuple[Tensor, Tensor, Tensor]
"""The template's states at the first adapted layer, the texts' keys and values from there on, the texts' lengths."""


class Texts:
    """One data set: classes, and what the frozen model makes of each text and of the template behind it."""

    def __init__(self, task: Task, language: LanguageModel, data: Path, folder: Path) -> None:
        parts = {part: read(data, task, part) for part in ("train", "dev", "test") if found(data, task, part).exists()}
        self.task, self.template = task, language.tokens(task.template)
        self.labels = torch.tensor([label for pairs in parts.values() for _, label in pairs])
        rows = [language.tokens(text) for pairs in parts.values() for text, _ in pairs]
        self.lengths = torch.tensor([len(row) for row in rows])
        self._begins = (self.lengths.cumsum(0) - self.lengths).tolist()
        edges = np.cumsum([0, *map(len, parts.values())])
        self.private, *public, self.test = (torch.arange(*pair) for pair in itertools.pairwise(edges))
        self.public = public[0] if public else self.private[-PUBLIC:]
        self.private = self.private if public else self.private[:-PUBLIC]
        self.prefix = frozen(language, [language.beginning + language.tokens(task.instruction)], None, 0)[0][0]
        whole = folder / f"{task.name}-frozen"
        if not whole.exists():
            write_frozen(whole, language, rows, self.template, self.prefix)
        self._kept = np.load(whole / "texts.npy", mmap_mode="r")
        self._states, self.last = (torch.from_numpy(np.load(whole / f"{one}.npy")) for one in ("templates", "last"))
        self.prefix = self.prefix[:, FIRST:]

    def batches(self, places: Tensor) -> Iterator[tuple[Tensor, Lot]]:
        """Which of the places, and what is kept of them; texts of one padded length together."""
        padded = (self.lengths[places] + ROUNDED - 1) // ROUNDED * ROUNDED
        for longest in padded.unique().tolist():
            which = (padded == longest).nonzero()[:, 0]
            kept = np.zeros((len(which), longest, *self._kept.shape[1:]), self._kept.dtype)
            lengths = self.lengths[places[which]]
            for row, (place, length) in enumerate(zip(places[which].tolist(), lengths.tolist(), strict=True)):
                kept[row, :length] = self._kept[self._begins[place] : self._begins[place] + length]
            yield which, (self._states[places[which]], torch.from_numpy(kept), lengths)


def found(data: Path, task: Task, part: str) -> Path:
    """Where a part of a data set lies."""
    name = f"{task.name}.{part}.txt"
    return data / task.name / name if (data / task.name / name).exists() else data / name


def read(data: Path, task: Task, part: str) -> list[tuple[str, int]]:
    """Texts and classes of one part."""
    lines = found(data, task, part).read_text("latin-1" if task.name == "trec" else "utf-8").splitlines()
    pairs = [line.split(" ", 1) for line in lines if line.strip()]
    return [(text.strip(), task.classes.index(told.split(":")[0])) for told, text in pairs]


@torch.no_grad()
def frozen(language: LanguageModel, rows: list[list[int]], before: Tensor | None, template: int) -> list[Frozen]:
    """What the frozen model makes of every row, read behind `before`; the last `template` tokens are the template."""
    longest, heads = max(map(len, rows)), language.model.config.num_key_value_heads
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])  # no causal token sees the padding
    cache = DynamicCache()
    for layer in range(0 if before is None else LAYERS):
        one = before[:, layer].unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
        cache.update(*one.unsqueeze(1).expand(-1, len(rows), -1, -1, -1), layer)
    made = language.model.model(input_ids=ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
    states, last = made.hidden_states[FIRST], made.last_hidden_state
    held = torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])
    held = held[..., -longest:, :].permute(2, 4, 0, 1, 3, 5).flatten(4)
    ends = [(len(row) - template, len(row)) for row in rows]
    return [(held[row, :text], states[row, text:end], last[row, end - 1]) for row, (text, end) in enumerate(ends)]


def write_frozen(whole: Path, language: LanguageModel, rows: list[list[int]], template: list[int], before: Tensor,
                 tokens: int = 1500) -> None:  # fmt: skip
    """Keep what the frozen model makes of all rows: keys and values, one text behind the other, in half precision."""
    ends = np.cumsum([len(row) for row in rows])
    part = whole.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    shape = (int(ends[-1]), LAYERS - FIRST, *before.shape[2:])
    kept = np.lib.format.open_memmap(part / "texts.npy", "w+", np.float16, shape)
    states, last = torch.zeros(len(rows), len(template), language.width), torch.zeros(len(rows), language.width)
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
    while order:
        taken, order = order[: (many := max(1, tokens // len(rows[order[0]])))], order[many:]
        made = frozen(language, [rows[place] + template for place in taken], before, len(template))
        for place, (held, *others) in zip(taken, made, strict=True):
            kept[ends[place] - len(held) : ends[place]] = held[:, FIRST:].half().numpy()
            states[place], last[place] = others
        print(f"{whole.name}: {len(rows) - len(order)} of {len(rows)} texts are read", flush=True)
    kept.flush()
    np.save(part / "templates.npy", states.numpy())
    np.save(part / "last.npy", last.numpy())
    part.replace(whole)


class Behind:
    """What attention sees before the template: a cache that nothing is written to."""

    def __init__(self, held: Tensor) -> None:
        self.held = held  # (layers, 2, examples, heads, tokens, width of a head)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of a layer, with those of the template behind them."""
        before = self.held[layer - FIRST]
        return torch.cat([before[0], keys], -2), torch.cat([before[1], values], -2)


class Head(nn.Module):
    """Classes from what the last token becomes, centred and whitened by public texts; their classes are not used."""

    def __init__(self, texts: Texts, power: float) -> None:
        super().__init__()
        public = texts.last[texts.public]
        sizes, axes = torch.linalg.eigh(torch.cov(public.T))
        matrix = axes * (sizes.clamp(min=0) + 0.1 * sizes.mean()) ** (-power / 2)
        length = ((public - public.mean(0)) @ matrix).square().sum(1).mean().sqrt()
        self.register_buffer("centre", public.mean(0))
        self.register_buffer("matrix", matrix / length)
        self.linear = nn.Linear(public.shape[1], len(texts.task.classes))
        nn.init.zeros_(self.linear.weight), nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        return self.linear((states - self.centre) @ self.matrix)


class Classifier(nn.Module):
    """Reads the template behind a text by layers with adapters, and classifies what its last token becomes."""

    def __init__(self, language: LanguageModel, texts: Texts, settings: Settings) -> None:
        super().__init__()
        where = list(range(FIRST, LAYERS))
        config = peft.LoraConfig(
            r=settings.rank, lora_alpha=16, target_modules=list(settings.targets), layers_to_transform=where
        )
        trunk = peft.get_peft_model(language.model, config).get_base_model().model
        for name, one in trunk.named_parameters():
            one.requires_grad_("lora_B" in name)  # A stays as it was drawn: half the noise, and no product of noises
        self.layers, self.norm, self.rotary = trunk.layers[FIRST:], trunk.norm, trunk.rotary_emb
        self.heads = language.model.config.num_key_value_heads
        self.register_buffer("prefix", texts.prefix)
        self.head = Head(texts, settings.whitening)

    def forward(self, states: Tensor, kept: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.read(states, kept, lengths))

    def read(self, states: Tensor, kept: Tensor, lengths: Tensor) -> Tensor:
        """What the template's last token becomes behind the last layer."""
        rows, longest, reads = *kept.shape[:2], states.shape[1]
        before = self.prefix.expand(rows, *self.prefix.shape)
        held = torch.cat([before, kept.float()], 1).permute(2, 3, 0, 1, 4).unflatten(-1, (self.heads, -1))
        cache = Behind(held.transpose(3, 4))
        places = torch.arange(reads, device=kept.device)
        positions = len(self.prefix) + lengths[:, None] + places
        text = torch.arange(longest, device=kept.device) < lengths[:, None, None]
        mask = torch.cat(
            [
                text.new_ones(rows, reads, len(self.prefix)),
                text.expand(-1, reads, -1),
                (places <= places[:, None]).expand(rows, -1, -1),
            ],
            -1,
        )
        turned = self.rotary(states, positions)
        for layer in self.layers:
            states = layer(states, attention_mask=mask[:, None], position_embeddings=turned, past_key_values=cache)
        return self.norm(states[:, -1])

    def groups(self, settings: Settings, private: bool = True) -> list[dict[str, Any]]:
        """The adapters and the head, each with its rate."""
        adapters = [one for name, one in self.named_parameters() if one.requires_grad and "lora_" in name]
        return [
            {"params": adapters, "lr": settings.rate if private else settings.plain_rate},
            {"params": list(self.head.parameters()), "lr": settings.head_rate},
        ]

    @torch.no_grad()
    def accuracy(self, texts: Texts, places: Tensor) -> float:
        """The share of right answers."""
        right = sum(
            int((self(*given).argmax(1) == texts.labels[places[which]]).sum()) for which, given in texts.batches(places)
        )
        return right / len(places)


criterion = nn.CrossEntropyLoss(reduction="none")
LOOSE = {"clip": 1e9, "noise": 0.0, "delta": DELTA}
"""Neither clipped nor noised, for comparison."""


class TextClipper(Clipper):
    """Adds up clipped gradients of a batch of texts' places, those of one padded length after the other."""

    def __init__(self, model: Classifier, texts: Texts) -> None:
        super().__init__(model, criterion)
        self._texts = texts

    def try_out(self, batch: Any) -> None:
        """Nothing: places are no texts."""

    def add_up(self, batch: Any, rule: Any, rows: Any = None) -> Any:
        """The clipped sum, and the norms in the order of the lengths."""
        (places,) = batch
        parts = [
            super(TextClipper, self).add_up((given, self._texts.labels[places[which]]), rule, rows)
            for which, given in self._texts.batches(places)
        ]
        sums = {name: sum(part.sums[name] for part in parts) for name in self.parameters} if parts else {}
        return Clipped(sums, torch.cat([torch.zeros(0), *(part.norms for part in parts)]))


def train_head(head: Head, texts: Texts, plan: sgd.Plan, rate: float) -> None:
    """The head alone, on what the frozen model says: no text is read again."""
    optimizer = torch.optim.SGD(head.parameters(), lr=rate, momentum=0.9)
    private = (texts.last[texts.private], texts.labels[texts.private])
    sgd.Trainer(head, optimizer, criterion, plan, progress=False).fit(private)


def train(model: Classifier, texts: Texts, plan: sgd.Plan, settings: Settings) -> None:
    """Adapters and head, with Adam and a rate that falls to zero."""
    optimizer = torch.optim.Adam(model.groups(settings, plan.private))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / plan.steps)
    for _ in start(model.train(), optimizer, (texts.private,), plan, clipper=TextClipper(model, texts)):
        optimizer.step()
        schedule.step()


def planned(examples: int, settings: Settings, epsilon: float, seed: int) -> tuple[sgd.Plan, sgd.Plan]:
    """The plan of the head alone, and that of the adapters, whose budget pays for the head too."""
    first = head_plan(examples, settings, settings.alone.share * epsilon, 2 * seed, DELTA / 10)
    shape = {"examples": examples, "lot": settings.lot, "steps": settings.steps, "seed": 2 * seed + 1}
    if math.isinf(epsilon):
        return first, sgd.Plan(**shape, **LOOSE)
    return first, sgd.Plan(**shape, clip=settings.clip, budget=Budget(epsilon, DELTA), preparation=(first.event,))


def head_plan(examples: int, settings: Settings, epsilon: float, seed: int, delta: float = DELTA) -> sgd.Plan:
    """The plan of the head alone; an infinite epsilon is neither clipped nor noised."""
    alone = settings.alone
    shape = {"examples": examples, "lot": alone.lot, "steps": alone.steps, "seed": seed}
    if math.isinf(epsilon):
        return sgd.Plan(**shape, **LOOSE)
    return sgd.Plan(**shape, clip=alone.clip, budget=Budget(epsilon, delta))


def head_only(texts: Texts, settings: Settings, epsilon: float, seed: int, exam: Tensor) -> dict[str, Any]:
    """A row without adapters: the whole budget is the head's."""
    plan, head = head_plan(len(texts.private), settings, epsilon, seed), Head(texts, settings.whitening)
    train_head(head, texts, plan, settings.alone.rate)
    return told(head, plan, texts, exam, right(head, texts, exam))


def with_adapters(texts: Texts, language: LanguageModel, settings: Settings, epsilon: float, seed: int,
                  exam: Tensor) -> dict[str, Any]:  # fmt: skip
    """A row with adapters: the head first, then both."""
    torch.manual_seed(seed)
    first, plan = planned(len(texts.private), settings, epsilon, seed)
    model = Classifier(copy.deepcopy(language), texts, settings)
    train_head(model.head, texts, first, settings.alone.rate)
    before = right(model.head, texts, exam)
    train(model, texts, plan, settings)
    return told(model, plan, texts, exam, model.accuracy(texts, exam)) | {
        "head_before": before, "head_noise": first.noise,
    }  # fmt: skip


@torch.no_grad()
def right(head: Head, texts: Texts, exam: Tensor) -> float:
    """The share of right answers of a head on the frozen model."""
    return float((head(texts.last[exam]).argmax(1) == texts.labels[exam]).float().mean())


def told(model: nn.Module, plan: sgd.Plan, texts: Texts, exam: Tensor, accuracy: float) -> dict[str, Any]:
    """What is kept of a row."""
    return {
        "accuracy": accuracy, "texts": len(exam), "standard_error": (accuracy * (1 - accuracy) / len(exam)) ** 0.5,
        "epsilon": plan.epsilon if plan.private else None, "delta": DELTA, "noise": plan.noise,
        "private_texts": len(texts.private),
        "parameters": sum(one.numel() for one in model.parameters() if one.requires_grad),
    }  # fmt: skip


def step_times(texts: Texts, language: LanguageModel, settings: Settings, repeats: int = 3) -> dict[str, Any]:
    """A private step against a plain LoRA step on the same lot, in turn; processor time."""
    examples = settings.lot
    places = texts.private[:examples]
    model, tuned = (Classifier(copy.deepcopy(language), texts, settings) for _ in range(2))
    optimizer, moves = (torch.optim.Adam(one.groups(settings)) for one in (model, tuned))
    plan = sgd.Plan(examples=len(texts.private), lot=examples, steps=100, clip=1.0, noise=1.0, delta=DELTA)
    clipper = TextClipper(tuned, texts)
    release = StepRelease(clipper.parameters, plan, Key.fresh())

    def plain() -> None:
        optimizer.zero_grad()
        for which, given in texts.batches(places):
            (criterion(model(*given), texts.labels[places[which]]).sum() / examples).backward()
        optimizer.step()

    def private() -> None:
        release.add(clipper.add_up((places,), release.rule))
        release.release(moves)
        moves.step()

    times: dict[str, list[float]] = {"plain": [], "private": []}
    plain(), private()
    for turn in range(repeats):
        for name, act in (("plain", plain), ("private", private))[:: 1 if turn % 2 else -1]:
            began = time.process_time()
            act()
            times[name].append(time.process_time() - began)
    ratios = [one / other for one, other in zip(times["private"], times["plain"], strict=True)]
    return {name: statistics.median(found) for name, found in times.items()} | {
        "ratio": statistics.median(times["private"]) / statistics.median(times["plain"]), "ratios": ratios,
        "examples": examples,
    }  # fmt: skip


def loaded(path: Path) -> LanguageModel:
    """The model without the layers that are left out."""
    language = LanguageModel.load(path)
    language.model.model.layers = language.model.model.layers[:LAYERS]
    language.model.config.num_hidden_layers = LAYERS
    return language


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=[*TASKS, "step"])
    parser.add_argument("--data", type=Path, default=datasets.folder())
    parser.add_argument("--model", type=Path, help="Default: smollm2 in the data folder.")
    parser.add_argument("--folder", type=Path, help="Keeps rows and what frozen layers made; default: finetune in it.")
    parser.add_argument("--methods", nargs="+", choices=["head", "lora"], default=["head", "lora"])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[8.0, 3.0, 1.0, math.inf], help="inf: not private.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--public", action="store_true", help="Measure on public texts, never on the test texts.")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="Other settings, to try them out.")
    options = parser.parse_args()
    options.folder = options.folder or options.data / "finetune"
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    language = loaded(options.model or options.data / "smollm2")
    for name in options.what:
        task = "trec" if name == "step" else name
        texts = Texts(TASKS[task], language, options.data, options.folder)
        if name == "step":
            print(json.dumps(step_times(texts, language, changed(SETTINGS[task], options.set)), indent=2))
            continue
        for method, seed, epsilon in itertools.product(options.methods, options.seeds, options.epsilon):
            row(method, texts, language, epsilon, seed, options)


def row(method: str, texts: Texts, language: LanguageModel, epsilon: float, seed: int, options: Any) -> None:
    """One row, kept and printed."""
    settings = changed(SETTINGS[texts.task.name], options.set)
    exam, part = (texts.public, "public") if options.public else (texts.test, "test")
    name = "-".join([texts.task.name, method, f"epsilon-{epsilon:g}", f"seed-{seed}", part, *options.set])

    def made() -> dict[str, Any]:
        if method == "head":
            return head_only(texts, settings, epsilon, seed, exam)
        return with_adapters(texts, language, settings, epsilon, seed, exam)

    kept = asdict(settings) | {"first": FIRST, "layers": LAYERS}
    row = keeping.once(options.folder / f"{name}.json", kept, made)
    minutes = f"{row['cpu_seconds'] / 60:.1f} processor minutes"
    print(f"{name:<40} {100 * row['accuracy']:6.2f}% of {row['texts']} texts, {minutes}", flush=True)


def changed(settings: Settings, pairs: list[str]) -> Settings:
    """Settings with some of them replaced: lot=256."""
    given = dict(pair.split("=", 1) for pair in pairs)
    kinds = {name: type(value) for name, value in asdict(settings).items()}
    return replace(
        settings,
        **{name: tuple(told.split(",")) if kinds[name] is tuple else kinds[name](told) for name, told in given.items()},
    )


if __name__ == "__main__":
    main()
