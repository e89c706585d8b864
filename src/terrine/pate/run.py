"""A PATE run as a folder: each step reads what the one before wrote.

run.json                 what was asked for (public)
owner/                   partition, teachers, votes: private, never leaves the owner's side
labels.json              the answers, with their event and how they were given (public)
bill.json                the printed bill; its sanitised number is released once and kept (public)
student.*                the student, with a copy of the bill beside it (public)
predictions.npy          the student's class probabilities on the public inputs, for another run's
                         interactive aggregator (public)
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.errors import InvalidArgument
from terrine.events import Budget
from terrine.events.codec import from_dict, to_dict
from terrine.pate.aggregators import ConfidentGaussianMax, GaussianMax, InteractiveGaussianMax, LaplaceMax
from terrine.pate.answering import Account, Aggregator, Answers
from terrine.pate.bill import bill
from terrine.pate.split import Membership, Partition, Subsampled, split
from terrine.pate.stability import SparseVectorMax, StableMax, SubsampleAggregate
from terrine.pate.votes import Votes
from terrine.rng import SYSTEM, Source

Progress = Callable[[int, int], None]
AGGREGATORS: dict[str, type[Aggregator]] = {
    "laplace": LaplaceMax,
    "gaussian": GaussianMax,
    "confident": ConfidentGaussianMax,
    "interactive": InteractiveGaussianMax,
    "stable": StableMax,
    "subsample": SubsampleAggregate,
    "sparse": SparseVectorMax,
}
MODELS = ("network", "logistic", "forest", "boosting")


@dataclass(frozen=True, eq=False)
class Data:
    """Inputs and, for private data, labels and perhaps people."""

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64] | None = None
    groups: NDArray[Any] | None = None

    @classmethod
    def read(cls, source: str, *, public: bool = False) -> Data:
        """From an .npz file with `x` (and `y`, `groups`), or one of mnist, fashion-mnist, digits, adult.

        A named set gives its training part as private data and its test part as public inputs, without labels.
        """
        if source in ("mnist", "fashion-mnist", "digits", "adult"):
            from terrine import datasets

            loaded: Any = getattr(datasets, source.replace("-", "_"))()
            inputs = loaded.test if public else loaded.train
            scale = np.float32(255 if inputs.dtype == np.uint8 else 1)
            return cls(inputs.astype(np.float32) / scale, None if public else loaded.train_labels)
        try:
            with np.load(source, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"{source}: want an .npz file with x (and y, groups), or mnist, digits, ... ({error})"
            ) from None
        if "x" not in arrays or (not public and "y" not in arrays):
            raise InvalidArgument(f"{source} holds {sorted(arrays)}: want arrays named x{'' if public else ' and y'}")
        if not np.isfinite(arrays["x"]).all():
            raise InvalidArgument(f"{source}: x holds values that are not finite: want numbers; fill gaps first")
        labels = None if public else arrays["y"].astype(np.int64)
        return cls(arrays["x"].astype(np.float32), labels, arrays.get("groups"))


class Run:
    """One run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.owner = self.folder / "owner"

    def split(
        self,
        data: Data,
        *,
        source: str,
        teachers: int,
        classes: int,
        seed: int = 0,
        rate: float | None = None,
        rng: Source = SYSTEM,
    ) -> Partition | Membership:
        """Deal the private data to teachers; with a `rate`, each teacher draws its own part in secret (M_samp)."""
        if (self.folder / "run.json").exists():
            raise InvalidArgument(f"{self.folder} already holds a run: want a new folder")
        if rate is not None and data.groups is not None:
            raise InvalidArgument("rate with groups: want either; subsampled teachers protect examples, not people")
        classes = check.whole("classes", classes, at_least=2)
        deal: Partition | Membership
        if rate is None:
            deal = split(len(data.inputs), teachers, seed=seed, groups=data.groups)
        else:
            deal = Subsampled(rate, teachers).draw(len(data.inputs), rng=rng)
        self.owner.mkdir(parents=True, exist_ok=True)
        self.owner.chmod(0o700)
        deal.save(self.owner / ("partition.json" if rate is None else "subsets.npz"))
        self._write("run.json", {"data": source, "teachers": teachers, "classes": classes, "seed": seed, "rate": rate})
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
            rate=3e-3,
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
        fields: dict[str, float],
        student: Path | None = None,
        queries: int | None = None,
        most: int | None = None,
        budget: Budget | None = None,
        account: Account | None = None,
        rng: Source = SYSTEM,
    ) -> Answers:
        """Answer queries with noise. A run is labelled once: a second time would be a second cost.

        `student` is a file of class probabilities for the public inputs, for the interactive aggregator.
        """
        if (self.folder / "labels.json").exists():
            raise InvalidArgument(f"{self.folder} is labelled already: want a new run; each labelling costs")
        votes = self._votes(queries)
        rule = made(aggregator, fields, queries=len(votes))
        predicted = None if student is None else _probabilities(student)[: len(votes)]
        answers = rule.answer(votes, student=predicted, most=most, rng=rng, account=account, budget=budget)
        record = {
            "aggregator": aggregator,
            "fields": {one.name: getattr(rule, one.name) for one in dataclasses.fields(kind_of(aggregator))},
            "labels": answers.labels.tolist(),
            "asked": answers.asked,
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
        account: Account | None = None,
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
        priced = bill(votes, answers, rule, delta=delta, sanitise=sanitise, order=order, account=account, rng=rng)
        self._write("bill.json", priced.as_json())
        return priced.as_json()

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
        np.save(self.folder / "predictions.npy", predicted)
        return found, path

    def answers(self) -> Answers:
        """The answers on disk."""
        record = self._read("labels.json")
        return Answers(np.array(record["labels"]), from_dict(record["event"]), record["asked"], record["stopped"])

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
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.folder / f".{name}.part"
        part.write_text(json.dumps(record, indent=2) + "\n")
        part.replace(self.folder / name)


def kind_of(aggregator: str) -> Any:
    """The class of the aggregator of that name.

    Raises:
        InvalidArgument: an unknown name.
    """
    if aggregator not in AGGREGATORS:
        raise check.refuse("aggregator", aggregator, f"one of {', '.join(AGGREGATORS)}")
    return AGGREGATORS[aggregator]


def made(aggregator: str, fields: dict[str, Any], *, queries: int) -> Aggregator:
    """The aggregator of that name.

    Raises:
        InvalidArgument: an unknown name, or fields it does not have or lacks.
    """
    kind = kind_of(aggregator)
    wanted = {one.name: one.default is dataclasses.MISSING for one in dataclasses.fields(kind)}
    given = {name: value for name, value in fields.items() if value is not None}
    if kind is SparseVectorMax:
        given.setdefault("queries", queries)
    if missing := [name for name, needed in wanted.items() if needed and name not in given]:
        raise InvalidArgument(f"{aggregator}: {', '.join(missing)} missing: want {', '.join(wanted)}")
    if strange := [name for name in given if name not in wanted]:
        raise InvalidArgument(f"{aggregator} has no {', '.join(strange)}: want {', '.join(wanted)}")
    made_one: Aggregator = kind(**given)
    return made_one


def estimator(model: str) -> Any:
    """A scikit-learn classifier by its short name."""
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.linear_model import LogisticRegression

    known: dict[str, Callable[[], Any]] = {
        "logistic": lambda: LogisticRegression(max_iter=500),
        "forest": lambda: RandomForestClassifier(100, random_state=0),
        "boosting": lambda: HistGradientBoostingClassifier(random_state=0),
    }
    if model not in known:
        raise check.refuse("model", model, f"one of {', '.join(MODELS)}")
    return known[model]()


def builder(shape: tuple[int, ...], classes: int, *, student: bool) -> Any:
    """A function that builds a network for inputs of this shape."""
    from terrine.pate import networks

    if len(shape) == 1:
        return functools.partial(networks.perceptron, shape[0], classes)
    if len(shape) != 3 or shape[1] != shape[2]:
        raise InvalidArgument(f"inputs have shape {shape}: want a vector or square images (channels, size, size)")
    return functools.partial(networks.student if student else networks.teacher, shape[0], shape[1], classes)


def methods() -> dict[str, Any]:
    """The ways a network student learns, by name."""
    from terrine.pate import student

    return {
        "supervised": student.Supervised(),
        "consistency": student.Consistency(),
        "vat": student.VirtualAdversarial(),
        "gan": student.FeatureMatching(),
    }


def _probabilities(path: Path) -> NDArray[np.float64]:
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: want a .npy file of class probabilities, one row a query ({error})") from None
    if not isinstance(found, np.ndarray):
        raise InvalidArgument(f"{path} holds several arrays: want a .npy file of class probabilities")
    return found.astype(np.float64)
