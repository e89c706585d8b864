"""A PATE run as a folder: each step reads what the one before wrote.

run.json                 what was asked for (public)
owner/                   receipt, partition, teachers, votes: private, never leaves the owner's side
labels.json              the answers, with their event and how they were given (public)
bill.json                the printed bill; its sanitised number is released once and kept (public)
student.*                the student, with a copy of the bill beside it (public)
predictions.npy          the student's class probabilities on the public inputs, for another run's
                         interactive aggregator (public)

Public files are 0644 and may be handed on, private ones 0600; the folder and owner/ are 0700.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from terrine import check, files
from terrine.errors import InvalidArgument
from terrine.events import Budget
from terrine.events.codec import from_dict, to_dict
from terrine.pate.answering import AnswerPlan, Answers
from terrine.pate.billing import bill
from terrine.pate.data import Data, probabilities
from terrine.pate.named import builder, estimator, kind_of, made, methods
from terrine.pate.partitions import Membership, Partition, Subsampled, split
from terrine.pate.votes import Votes
from terrine.receipts import Charged, Receipt
from terrine.rng import SYSTEM, Seeded, Source

Progress = Callable[[int, int], None]


class RunFolder:
    """One run folder; `private` is for one that lies in another's private part, where nothing is handed on."""

    def __init__(self, folder: Path, *, private: bool = False) -> None:
        self.folder = Path(folder)
        self.owner = self.folder / "owner"
        self.private = private

    def has(self, name: str) -> bool:
        """Whether the file is there."""
        return (self.folder / name).exists()

    def split(
        self,
        data: Data,
        *,
        source: str,
        teachers: int,
        classes: int,
        seed: int | None = None,
        rate: float | None = None,
    ) -> Partition | Membership:
        """Deal the private data to teachers, by a public `seed`.

        With a `rate`, each teacher draws its own part in secret (M_samp); a `seed` is then for tests only.
        """
        if (self.folder / "run.json").exists():
            raise InvalidArgument(f"{self.folder} already holds a run: want a new folder")
        if rate is not None and data.groups is not None:
            raise InvalidArgument("rate with groups: want either; subsampled teachers protect examples, not people")
        classes = check.whole("classes", classes, at_least=2)
        deal: Partition | Membership
        if rate is None:
            deal = split(len(data.inputs), teachers, seed=seed or 0, groups=data.groups)
        else:
            deal = Subsampled(rate, teachers).draw(len(data.inputs), rng=SYSTEM if seed is None else Seeded(seed))
        files.private_folder(self.folder)
        files.private_folder(self.owner)
        deal.save(self.owner / ("partition.json" if rate is None else "subsets.npz"))
        record = {"data": source, "teachers": teachers, "classes": classes, "seed": seed, "rate": rate}
        self._write("run.json", record | {"units": data.units})
        return deal

    def train(
        self,
        data: Data,
        *,
        model: str,
        epochs: int = 40,
        jobs: int = 1,
        backend: str | None = None,
        progress: Progress | None = None,
    ) -> Any:
        """Train the teachers, or take up where a run stopped."""
        record = self._read("run.json")
        deal = self.deal()
        dealt = len(deal.assignment) if isinstance(deal, Partition) else deal.taken.shape[1]
        if data.labels is None or len(data.inputs) != dealt:
            raise InvalidArgument(f"{len(data.inputs)} examples: the split was made for {dealt}; use the same data")
        from terrine.pate import teachers

        folder, classes = self.owner / "teachers", int(record["classes"])
        self._write("run.json", record | {"model": model, "epochs": epochs})
        if model != "network":
            flat = data.inputs.reshape(len(data.inputs), -1)
            return teachers.train_estimators(
                estimator(model), flat, data.labels, deal,
                classes=classes, folder=folder, jobs=jobs, backend=backend, progress=progress,
            )  # fmt: skip
        import torch

        from terrine.pate.stacked import Recipe

        images = data.inputs.ndim == 4
        recipe = Recipe(
            epochs=epochs,
            learning_rate=3e-3,
            shift=min(2, data.inputs.shape[-1] // 9) if images else 0,
            warp=1.0 if images else 0.0,
        )
        x, y = torch.from_numpy(data.inputs), torch.from_numpy(data.labels)
        return teachers.train_modules(
            builder(data.inputs.shape[1:], classes, student=False), x, y, deal, recipe,
            classes=classes, folder=folder, jobs=jobs, progress=progress,
        )  # fmt: skip

    def vote(self, trained: Any, public: Data) -> Votes:
        """The teachers' votes on public inputs; they stay in owner/."""
        classes = int(self._read("run.json")["classes"])
        if self._read("run.json").get("model") == "network":
            import torch

            votes: Votes = trained.votes(torch.from_numpy(public.inputs), classes=classes)
        else:
            votes = trained.votes(public.inputs.reshape(len(public.inputs), -1), classes=classes)
        votes.save(self.owner / "votes.npz")
        return votes

    def label(
        self,
        *,
        aggregator: str,
        fields: Mapping[str, Any],
        student: Path | None = None,
        queries: int | None = None,
        most: int | None = None,
        budget: Budget | None = None,
        account: Charged | None = None,
        receipt: Receipt | None = None,
        purpose: str = "pate: labels",
        by: str = "",
        rng: Source = SYSTEM,
    ) -> Answers:
        """Answer queries with noise. A run is labelled once: a second time would be a second cost.

        `student` is a file of class probabilities for the public inputs, for the interactive aggregator.
        """
        if (self.folder / "labels.json").exists():
            raise InvalidArgument(f"{self.folder} is labelled already: want a new run; each labelling costs")
        votes = self._votes(queries)
        rule = made(aggregator, fields, queries=len(votes))
        predicted = None if student is None else probabilities(student)[: len(votes)]
        answers = rule.answer(
            votes, student=predicted, most=most, rng=rng, account=account, receipt=receipt, budget=budget,
            purpose=purpose, by=by,
        )  # fmt: skip
        record = {
            "aggregator": aggregator,
            "fields": {one.name: getattr(rule, one.name) for one in dataclasses.fields(kind_of(aggregator))},
            "labels": answers.labels.tolist(),
            "asked": answers.asked,
            "planned": [answers.plan.queries, answers.plan.answers],
            "stopped": answers.stopped,
            "event": to_dict(answers.event),
        }
        self._write("labels.json", record)
        return answers

    def bill(
        self,
        *,
        delta: float,
        sanitise: bool = True,
        order: float | None = None,
        account: Charged | None = None,
        receipt: Receipt | None = None,
        purpose: str = "pate: sanitised bill",
        by: str = "pate.bill",
        rng: Source = SYSTEM,
    ) -> dict[str, Any]:
        """The bill that may be printed. The sanitised number is released once and then read back."""
        kept = self.folder / "bill.json"
        if kept.exists():
            stored = self._read("bill.json")
            if stored["delta"] == delta and (stored["epsilon_sanitised"] is not None or not sanitise):
                return stored
            if stored["epsilon_sanitised"] is not None:
                raise InvalidArgument(
                    f"the bill was released at delta {stored['delta']}: want that one; again would cost again"
                )
        record = self._read("labels.json")
        answers = self.answers()
        rule = made(record["aggregator"], record["fields"], queries=len(answers.labels))
        votes = self._votes(len(answers.labels))
        priced = bill(
            votes, answers, rule, delta=delta, sanitise=sanitise, order=order, account=account, receipt=receipt,
            purpose=purpose, by=by, rng=rng,
        )  # fmt: skip
        units = self._read("run.json")["units"]
        shown = priced.as_json() | {"weak_guarantee": check.weakness(priced.epsilon, delta, units=units) or None}
        self._write("bill.json", shown)
        return shown

    def student(
        self, public: Data, *, model: str, method: str, steps: int, seed: int = 0, progress: Progress | None = None
    ) -> tuple[Any, Path]:
        """Train the student on public inputs and the answers."""
        if not (self.folder / "bill.json").exists():
            raise InvalidArgument(
                f"{self.folder} has no bill: want terrine pate bill first, so that the student carries it"
            )
        classes = int(self._read("run.json")["classes"])
        labels = self.answers().labels
        if len(public.inputs) < len(labels):
            raise InvalidArgument(
                f"{len(public.inputs)} public inputs for {len(labels)} answers: want the ones voted on"
            )
        every = np.full(len(public.inputs), -1, dtype=np.int64)
        every[: len(labels)] = labels
        from terrine.pate import student

        if model == "network":
            import torch

            build = builder(public.inputs.shape[1:], classes, student=True)
            course = student.Course(steps=steps)
            found: Any = student.train(
                build, torch.from_numpy(public.inputs), every, methods()[method], course, seed=seed, progress=progress
            )
            path, predicted = (
                self.folder / "student.safetensors",
                student.probabilities(found, torch.from_numpy(public.inputs)),
            )
        else:
            known = np.flatnonzero(every >= 0)
            if not known.size:
                raise InvalidArgument("no query was answered: want labels; ask for more, or with less noise")
            flat = public.inputs.reshape(len(every), -1)
            found = estimator(model).fit(flat[known], every[known])
            path, predicted = self.folder / "student.skops", student.estimated(found, flat, classes)
        student.save(found, path, bill=self._read("bill.json"))
        with files.written(self.folder / "predictions.npy", private=self.private) as file:
            np.save(file, predicted)
        return found, path

    def answers(self) -> Answers:
        """The answers on disk."""
        record = self._read("labels.json")
        plan = AnswerPlan(*record["planned"])
        return Answers(np.array(record["labels"]), from_dict(record["event"]), record["asked"], plan, record["stopped"])

    def votes(self) -> Votes:
        """The votes on disk: private."""
        return Votes.load(self.owner / "votes.npz")

    def deal(self) -> Partition | Membership:
        """Who teaches whom: private."""
        drawn = self.owner / "subsets.npz"
        return Membership.load(drawn) if drawn.exists() else Partition.load(self.owner / "partition.json")

    def _votes(self, queries: int | None) -> Votes:
        votes = self.votes()
        if votes.deal["digest"] != self.deal().digest:
            raise InvalidArgument("the votes were cast under another split: want the teachers of this one; vote again")
        return votes if queries is None else votes.take(np.arange(min(queries, len(votes))))

    def _read(self, name: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / name).read_text())
        except FileNotFoundError:
            before = {"run.json": "split", "labels.json": "label", "bill.json": "bill"}[name]
            raise InvalidArgument(f"{self.folder / name} is missing: want terrine pate {before} first") from None
        return found

    def _write(self, name: str, record: dict[str, Any]) -> None:
        files.write(self.folder / name, json.dumps(record, indent=2) + "\n", private=self.private)
