"""Private prompts on a real language model: accuracy on SST-2 and TREC, and what privacy costs in time.

python benchmarks/prompts.py --model MODEL --data DIR --out DIR [--rows sst2-dpsgd-8,...] [--json FILE]

MODEL is a folder or .gguf file (made for SmolLM2-135M-Instruct); DATA holds sst2/sst2.{train,dev,test}.txt and
trec/trec.{train,test}.txt in their published form. Every row is written to OUT when it is done and not done again; an
interrupted row goes on from its checkpoint. Without --rows, all of them, most wanted first.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from terrine import pate, prompts, sgd
from terrine.common.keys import Key
from terrine.events import Budget
from terrine.prompts.batches import by_length, tokens_in_memory
from terrine.prompts.student import calibrated
from terrine.prompts.teachers import each_teacher
from terrine.prompts.tuning import MEMORY, PromptClipper
from terrine.prompts.voting import confident, record
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.release import StepRelease

DELTA = 1e-4
"""Below 1/N: there are at most 6,920 and 5,452 private texts."""

FIRST = {"sst2": 200, "trec": 500}
"""The teachers' ensemble is asked about so many of the test texts; other rows say how they did on the same ones."""


PUBLIC = 500
"""TREC has no development set: so many of its training texts are public and not trained on."""


@dataclass(frozen=True)
class Task:
    """A data set, the question asked about its texts, and how it is trained."""

    name: str
    classes: tuple[str, ...]
    soft: prompts.Template
    start: str
    discrete: prompts.Template
    longest: int
    clip: float
    rate: float
    lot: int
    steps: int
    teachers: int
    shots: int
    queries: int


TASKS = {
    "sst2": Task(
        name="sst2",
        classes=("0", "1"),
        soft=prompts.Template("{text}\nThe sentiment of this review is", (" negative", " positive")),
        start="Is this movie review positive or negative?\n",
        discrete=prompts.Template(
            "{text}\nThe sentiment of this review is",
            (" negative", " positive"),
            "Is this movie review positive or negative?",
            "\n",
        ),
        longest=24,
        clip=1.0,
        rate=0.1,
        lot=128,
        steps=14,
        teachers=100,
        shots=2,
        queries=24,
    ),
    "trec": Task(
        name="trec",
        classes=("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
        soft=prompts.Template(
            "{text} Type:", (" abbreviation", " entity", " description", " person", " location", " number")
        ),
        start="Classify the question.\n",
        discrete=prompts.Template(
            "{text} Type:",
            (" abbreviation", " entity", " description", " person", " location", " number"),
            "Type of answer: abbreviation, entity, description, person, location or number?",
            "\n",
        ),
        longest=100,
        clip=1.0,
        rate=0.1,
        lot=96,
        steps=16,
        teachers=100,
        shots=6,
        queries=24,
    ),
}

Row = Callable[["Bench"], dict[str, Any]]


class Bench:
    """The model, the data, and where rows are kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, Path(options.out)
        self.out.mkdir(parents=True, exist_ok=True)
        self.language = prompts.LanguageModel.load(options.model)
        self.backend = prompts.LocalModel(self.language)

    def texts(self, task: Task, part: str) -> tuple[list[str], list[int]]:
        """Texts and classes of one part."""
        lines = (Path(self.options.data) / task.name / f"{task.name}.{part}.txt").read_text(
            "latin-1" if task.name == "trec" else "utf-8"
        )
        pairs = [line.split(" ", 1) for line in lines.splitlines() if line.strip()]
        return [text.strip() for _, text in pairs], [task.classes.index(told.split(":")[0]) for told, _ in pairs]

    def exam(self, task: Task) -> tuple[list[str], list[int]]:
        """The test texts, or as many of them as --exam says, drawn by a fixed seed."""
        texts, labels = self.texts(task, "test")
        drawn = np.random.default_rng(0).permutation(len(texts))[: self.options.exam]
        return [texts[place] for place in drawn], [labels[place] for place in drawn]

    def accuracy(self, task: Task, predicted: Any) -> dict[str, Any]:
        """The share of right answers, with its standard error."""
        _, labels = self.exam(task)
        hits = np.asarray(predicted) == np.array(labels)
        right = float(hits.mean())
        return {
            "accuracy": right, "exam": len(labels), "standard_error": (right * (1 - right) / len(labels)) ** 0.5,
            "accuracy_first": float(hits[: FIRST[task.name]].mean()),
        }  # fmt: skip

    def asked(self, task: Task, prompt: prompts.DiscretePrompt) -> Any:
        """What a prompt says of the test texts; asked once, also where several rows come to the same words."""
        name = hashlib.sha256(f"{prompt.text}{task.discrete.text}{self.options.exam}".encode()).hexdigest()[:12]
        path = self.out / f"{task.name}-answers-{name}.npy"
        if not path.exists():
            plain = dataclasses.replace(prompt, prior=None)
            np.save(path, plain.log_probabilities(self.backend, self.exam(task)[0]))
        return np.load(path) - (0.0 if prompt.prior is None else np.array(prompt.prior))

    def private(self, task: Task) -> tuple[list[str], list[int]]:
        """The training texts that are short enough: each is kept or left for its own sake."""
        pairs = list(zip(*self.texts(task, "train"), strict=True))[: -PUBLIC if task.name == "trec" else None]
        kept = [(text, label) for text, label in pairs if len(self.language.tokens(text)) <= task.longest]
        return [text for text, _ in kept], [label for _, label in kept]


def zero_shot(task: Task) -> Row:
    """The model with the instruction alone, as it is and calibrated."""

    def row(bench: Bench) -> dict[str, Any]:
        prompt = prompts.DiscretePrompt(task.discrete)
        scores = bench.asked(task, prompt)
        even = np.array(calibrated(bench.backend, prompt).prior)
        found = bench.accuracy(task, scores.argmax(axis=1))
        again = bench.accuracy(task, (scores - even).argmax(axis=1))
        return found | {
            "accuracy_calibrated": again["accuracy"],
            "accuracy_calibrated_first": again["accuracy_first"],
        }

    return row


def few_shot(task: Task, seed: int, even: bool) -> Row:
    """Demonstrations drawn from the private texts, shown as they are: not private."""

    def row(bench: Bench) -> dict[str, Any]:
        texts, labels = bench.texts(task, "train")
        drawn = np.random.default_rng(seed).permutation(len(texts))[:200]
        shown = prompts.teachers.balanced([(texts[place], labels[place]) for place in drawn], max(4, len(task.classes)))
        prompt = prompts.DiscretePrompt(task.discrete, tuple(shown))
        used = calibrated(bench.backend, prompt) if even else prompt
        return bench.accuracy(task, bench.asked(task, used).argmax(axis=1)) | {"private": False}

    return row


def soft(task: Task, epsilon: float | None, seed: int, head: bool = True) -> Row:
    """PromptDPSGD; without epsilon, the same steps with neither clipping nor noise."""

    def row(bench: Bench) -> dict[str, Any]:
        texts, labels = bench.private(task)
        shape: dict[str, Any] = {"examples": len(texts), "lot": task.lot, "steps": task.steps, "seed": seed}
        if epsilon is None:
            plan = sgd.Plan(**shape, clip=1e9, noise=0.0, delta=DELTA)
        else:
            plan = sgd.Plan(**shape, clip=task.clip, budget=Budget(epsilon, DELTA))
        begun = prompts.SoftPrompt.from_text(
            bench.language, task.soft, task.start, head=head, public=public_texts(bench, task)[0][:16], calibrated=True
        )
        name = f"{task.name}-{epsilon}-{seed}-{head}"
        tuned = prompts.tune(
            bench.language, begun, texts, labels, plan,
            learning_rate=task.rate, checkpoint=Checkpoint(bench.out / f"{name}.pt", every=1), progress=shown(name),
        )  # fmt: skip
        tuned.save(bench.out / f"{name}.safetensors")
        found = bench.accuracy(task, tuned.predict(bench.language, bench.exam(task)[0]))
        return found | {
            "epsilon": None if epsilon is None else plan.epsilon, "delta": DELTA, "noise": plan.noise, "lot": plan.lot,
            "steps": plan.steps, "private_texts": len(texts), "virtual_tokens": tuned.count, "head": head, "seed": seed,
        }  # fmt: skip

    return row


def by_votes(task: Task, epsilon: float, queries: int, seed: int) -> Row:
    """PromptPATE: the student's accuracy, and the labels' own."""

    def row(bench: Bench) -> dict[str, Any]:
        votes, public, truth = voted(bench, task)
        unlabelled = public[len(votes) :]
        votes, public, truth = votes.take(range(queries)), public[:queries], truth[:queries]
        rule = confident(Budget(epsilon, DELTA), teachers=task.teachers, queries=queries, agreement=0.5)
        bought = rule.answer(votes, rng=_seeded(seed))
        student = prompts.choose(
            bench.backend, task.discrete, public, bought.labels,
            shots=2 * len(task.classes), candidates=6, unlabelled=unlabelled, seed=seed, privacy=record(bought, DELTA),
        )  # fmt: skip
        student.save(bench.out / f"{task.name}-pate-{epsilon}-{seed}.json")
        given = bought.answered
        found = bench.accuracy(task, bench.asked(task, student).argmax(axis=1))
        return found | {
            "epsilon": record(bought, DELTA)["epsilon"], "delta": DELTA, "noise": rule.noise,
            "teachers": task.teachers, "shots": task.shots, "asked": bought.asked, "answered": len(given),
            "labels_right": float((bought.labels[given] == np.array(truth)[given]).mean()),
            "student_shows": len(student.demonstrations), "seed": seed,
        }  # fmt: skip

    return row


def ensemble(task: Task, teachers: int) -> Row:
    """The plurality, without noise, of some of the teachers on some test texts, and of all on the public ones."""

    def row(bench: Bench) -> dict[str, Any]:
        asked, labels = (part[: FIRST[task.name]] for part in bench.exam(task))
        rows, _ = collected(bench, task, asked, "exam", teachers)
        truth, deciding = np.array(labels), plurality(rows, task)
        public_votes, _, public_truth = voted(bench, task)
        public = float((public_votes.counts.argmax(axis=1) == np.array(public_truth)[: len(public_votes)]).mean())
        return {
            "accuracy": float((deciding == truth).mean()), "exam": len(labels), "teachers": len(rows),
            "one_teacher": float((rows == truth).mean()), "on_public_texts": public, "private": False,
        }  # fmt: skip

    return row


def plurality(rows: Any, task: Task) -> Any:
    """The class that most teachers name."""
    return np.array([np.bincount(column, minlength=len(task.classes)).argmax() for column in rows.T])


def voted(bench: Bench, task: Task, more: int = 60) -> tuple[pate.Votes, list[str], list[int]]:
    """Votes on the first public texts drawn, and `more` texts without votes."""
    texts, labels = public_texts(bench, task)
    drawn = np.random.default_rng(1).permutation(len(texts))[: task.queries + more]
    public = [texts[place] for place in drawn]
    rows, deal = collected(bench, task, public[: task.queries], "public", task.teachers)
    return pate.count(rows, classes=len(task.classes), deal=deal), public, [labels[place] for place in drawn]


def public_texts(bench: Bench, task: Task) -> tuple[list[str], list[int]]:
    """SST-2's development set, and the end of TREC's training set."""
    if task.name == "sst2":
        return bench.texts(task, "dev")
    texts, labels = bench.texts(task, "train")
    return texts[-PUBLIC:], labels[-PUBLIC:]


def collected(bench: Bench, task: Task, asked: list[str], name: str, teachers: int) -> tuple[Any, pate.Partition]:
    """The classes that the first teachers give (teachers, texts), kept teacher by teacher; and the deal."""
    texts, labels = bench.texts(task, "train")
    private = list(zip(texts, labels, strict=True))[: -PUBLIC if task.name == "trec" else None]
    deal = pate.split(len(private), task.teachers, seed=0)
    path = bench.out / f"{task.name}-votes-{name}-{task.teachers}-{len(asked)}.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    report = shown(f"{task.name} teachers")
    voting = each_teacher(
        bench.backend, task.discrete, private, deal, asked, shots=task.shots, calibration=asked, first=len(rows)
    )
    while len(rows) < teachers:
        rows.append(next(voting).tolist())
        written(path, rows)
        report(len(rows), teachers)
    return np.array(rows), deal


def step_times(task: Task, repeats: int = 5) -> Row:
    """A private step against a plain soft-prompt step on the same texts, in turn; processor time."""

    def row(bench: Bench) -> dict[str, Any]:
        language = bench.language
        texts, labels = bench.texts(task, "train")
        prompt = prompts.SoftPrompt.from_text(language, task.soft, task.start)
        lot = prompt.encoded(language, texts[:24], labels[:24])
        optimizer = torch.optim.Adam([prompt.tokens], lr=1e-3)

        def plain() -> None:
            optimizer.zero_grad()
            for part in by_length(lot.lengths, prompt.before(language), tokens_in_memory(language, MEMORY)):
                (prompt.losses(language, lot.take(part)).sum() / len(lot.ids)).backward()
            optimizer.step()

        plan = sgd.Plan(examples=1000, lot=24, steps=100, clip=1.0, noise=1.0, delta=1e-4)
        tuned = prompts.SoftPrompt.from_text(language, task.soft, task.start)
        moves = torch.optim.Adam([tuned.tokens], lr=1e-3)
        clipper = PromptClipper(language, tuned)
        release = StepRelease(clipper.parameters, plan, Key.fresh())

        def private() -> None:
            release.add(clipper.add_up(tuple(lot), release.rule))
            release.release(moves)
            moves.step()

        times: dict[str, list[float]] = {"plain": [], "private": []}
        plain(), private()
        for turn in range(repeats):
            for name, act in (("plain", plain), ("private", private))[:: 1 if turn % 2 else -1]:
                start = time.process_time()
                act()
                times[name].append(time.process_time() - start)
        ratios = [one / other for one, other in zip(times["private"], times["plain"], strict=True)]
        return {
            "plain_seconds": statistics.median(times["plain"]), "private_seconds": statistics.median(times["private"]),
            "ratio": statistics.median(times["private"]) / statistics.median(times["plain"]),
            "ratios": ratios, "texts": len(lot.ids),
        }  # fmt: skip

    return row


def cache_rate(task: Task, questions: int = 24) -> Row:
    """Queries per second of one teacher with four demonstrations, with its prefix read once and read each time."""

    def row(bench: Bench) -> dict[str, Any]:
        texts, labels = bench.texts(task, "train")
        shown_ones = prompts.teachers.balanced(list(zip(texts, labels, strict=True))[:40], 4)
        prompt = task.discrete.prompt(shown_ones)
        asked = [task.discrete.question(text) for text in texts[100 : 100 + questions]]
        rates: dict[bool, list[float]] = {True: [], False: []}
        for reuse in (True, False, True):
            backend = prompts.LocalModel(bench.language, reuse=reuse)
            start = time.process_time()
            backend.log_probabilities(prompt, asked, task.discrete.words)
            rates[reuse].append(questions / (time.process_time() - start))
        return {
            "queries_per_second": statistics.median(rates[True]), "without_cache": rates[False][0],
            "ratio": statistics.median(rates[True]) / rates[False][0],
            "prompt_tokens": len(bench.language.tokens(prompt)), "texts": questions,
        }  # fmt: skip

    return row


def _seeded(seed: int) -> Any:
    from terrine.rng import Seeded

    return Seeded(seed)


def rows() -> dict[str, Row]:
    """Every row by name, most wanted first."""
    sst2, trec = TASKS["sst2"], TASKS["trec"]
    found: dict[str, Row] = {
        "step-time": step_times(trec),
        "cache": cache_rate(sst2),
        "trec-zero-shot": zero_shot(trec),
        "trec-dpsgd-8": soft(trec, 8.0, 0),
        "sst2-zero-shot": zero_shot(sst2),
        "sst2-dpsgd-8": soft(sst2, 8.0, 0),
        "sst2-pate-1": by_votes(sst2, 0.99, 24, 0),
        "sst2-pate-0.5": by_votes(sst2, 0.49, 12, 0),
        "sst2-ensemble": ensemble(sst2, 20),
        "trec-pate-1": by_votes(trec, 0.99, 24, 0),
        "trec-dpsgd-3": soft(trec, 3.0, 0),
        "trec-dpsgd-1": soft(trec, 1.0, 0),
        "trec-soft": soft(trec, None, 0),
        "sst2-few-shot": few_shot(sst2, 0, False),
        "sst2-dpsgd-3": soft(sst2, 3.0, 0),
        "sst2-dpsgd-1": soft(sst2, 1.0, 0),
        "sst2-soft": soft(sst2, None, 0),
        "trec-pate-0.5": by_votes(trec, 0.49, 12, 0),
        "trec-ensemble": ensemble(trec, 20),
        "trec-few-shot": few_shot(trec, 0, False),
    }
    for seed in (1, 2):
        found |= {
            f"trec-dpsgd-8-seed-{seed}": soft(trec, 8.0, seed),
            f"sst2-dpsgd-8-seed-{seed}": soft(sst2, 8.0, seed),
        }
        found |= {f"sst2-pate-1-seed-{seed}": by_votes(sst2, 0.99, 24, seed)}
    return found


def shown(name: str) -> Callable[[int, int], None]:
    """Progress on stderr."""
    return lambda done, total: print(f"{name}: {done}/{total}", file=sys.stderr, flush=True)


def written(path: Path, value: Any) -> None:
    """Write all or nothing."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(value) + "\n")
    beside.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--rows", help="Names, separated by commas; default: all.")
    parser.add_argument("--exam", type=int, help="Only so many test texts.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = rows()
    wanted = options.rows.split(",") if options.rows else list(known)
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"--rows {unknown[0]}: want some of {', '.join(known)}")
    bench: Bench | None = None
    found: dict[str, Any] = {}
    for name in wanted:
        path = Path(options.out) / f"row-{name}.json"
        if not path.exists():
            bench = bench or Bench(options)
            start = time.process_time()
            written(path, known[name](bench) | {"processor_minutes": (time.process_time() - start) / 60})
        found[name] = json.loads(path.read_text())
        print_row(name, found[name])
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def print_row(name: str, row: dict[str, Any]) -> None:
    """One line of the table."""
    if "accuracy" in row:
        cost = f"epsilon {row['epsilon']:.3f}" if row.get("epsilon") else ""
        cost += f"calibrated {100 * row['accuracy_calibrated']:.2f}%" if "accuracy_calibrated" in row else ""
        print(f"{name:<28} {100 * row['accuracy']:6.2f}%  of {row['exam']:>5} texts  {cost}", flush=True)
    else:
        print(f"{name:<28} ratio {row['ratio']:.3f}", flush=True)


if __name__ == "__main__":
    main()
