"""A whole PATE run that a file describes: planned and charged before anything is looked at, then done step by step.

    labels + the release of the sanitised number, where it is asked for  ->  one event, charged first

The event depends on how many queries there are, not on how the teachers vote: what is charged is public.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrine import accounting, check, files
from terrine.errors import InvalidArgument
from terrine.events import Budget, Composed, Event, Reproducible, Unit
from terrine.pate.answering import Aggregator, AnswerPlan, planned
from terrine.pate.data import Data, probabilities
from terrine.pate.named import MODELS, made, methods
from terrine.pate.partitions import Subsampled
from terrine.pate.run import RunFolder
from terrine.pate.sanitised import planned_release
from terrine.receipts import Payment, Receipt, paid
from terrine.rng import SYSTEM, Seeded, Source

Progress = Callable[[int, int], None]
_STUDENT = {"model": "network", "method": "consistency", "steps": 1500}
_ABOUT_LABELS = {"aggregator", "queries", "most", "student", "budget", "seed"}
_STEPS = {
    "split": {"teachers", "classes", "seed", "rate"},
    "train": {"model", "epochs", "jobs", "backend"},
    "bill": {"delta", "sanitise", "order", "seed"},
    "student": {"model", "method", "steps", "seed"},
}


@dataclass(frozen=True, eq=False)
class Job:
    """A run's data, opened and not looked at, and what each step is asked to do.

    Raises:
        InvalidArgument: a step is asked for something it does not know.
    """

    data: Data
    public: Data
    source: str
    """What the private data is called in run.json."""
    split: Mapping[str, Any]
    train: Mapping[str, Any]
    label: Mapping[str, Any]
    bill: Mapping[str, Any]
    student: Mapping[str, Any]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Job:
        """The job that a file describes: run, data, public and a table for each step."""
        for name, known in _STEPS.items():
            if strange := sorted(set(record.get(name, {})) - known):
                raise InvalidArgument(f"[{name}] {strange[0]}: want one of {', '.join(sorted(known))}")
        job = cls(
            Data.read(record["data"]),
            Data.read(record["public"], public=True),
            record["data"],
            split={"classes": 10} | record["split"],
            train=record.get("train", {"model": "network"}),
            label={"aggregator": "gaussian"} | record.get("label", {}),
            bill={"delta": 1e-5, "sanitise": True} | record.get("bill", {}),
            student=_STUDENT | record.get("student", {}),
        )
        job._check()
        return job

    @property
    def queries(self) -> int:
        """How many public inputs are put to the teachers."""
        return min(len(self.public.inputs), check.whole("queries", self.label.get("queries", len(self.public.inputs))))

    @property
    def asked(self) -> dict[str, Any]:
        """The choices that shape what is released."""
        return {"split": self.split, "train": self.train, "label": self.label, "bill": self.bill}

    @property
    def unit(self) -> Unit:
        """Whom the deal protects."""
        return Unit.EXAMPLE if self.data.groups is None else Unit.PERSON

    @property
    def fields(self) -> dict[str, Any]:
        """The aggregator's own fields."""
        return {name: value for name, value in self.label.items() if name not in _ABOUT_LABELS}

    @property
    def rule(self) -> Aggregator:
        """The aggregator."""
        return made(self.label["aggregator"], self.fields, queries=self.queries)

    @property
    def plan(self) -> AnswerPlan:
        """How many queries may be asked and answered."""
        budget = budget_of(self.label.get("budget"))
        return planned(self.rule, self.queries, unit=self.unit, budget=budget, most=self.label.get("most"))

    @property
    def event(self) -> Event:
        """What the whole run costs, whatever the teachers say."""
        plan = self.plan
        labels = self.rule.event(plan.queries, plan.answers, unit=self.unit)
        parts = [Reproducible(labels) if self._seeded else labels]
        release = planned_release(
            self.rule, queries=plan.queries, answers=plan.answers, classes=self.split["classes"],
            delta=self.bill["delta"], order=self.bill.get("order"), unit=self.unit, sanitise=self.bill["sanitise"],
        )  # fmt: skip
        if self.bill["sanitise"] and release is not None:
            parts.append(Reproducible(release.event) if "seed" in self.bill else release.event)
        return parts[0] if len(parts) == 1 else Composed(parts)

    @property
    def _seeded(self) -> bool:
        """Whether labels can be computed again: their noise is seeded, or the teachers' secret subsets are."""
        return "seed" in self.label or ("rate" in self.split and "seed" in self.split)

    def _check(self) -> None:
        """Whatever can be refused is refused before it is paid for."""
        teachers, rate = check.whole("teachers", self.split.get("teachers"), at_least=2), self.split.get("rate")
        check.whole("classes", self.split["classes"], at_least=2)
        check.open_unit("delta", self.bill["delta"])
        if rate is None and teachers > self.data.units:
            raise InvalidArgument(f"teachers={teachers}: want at most one for each of {self.data.units}")
        drawn = None if rate is None else Subsampled(rate, teachers)
        kind = {"kind": "disjoint", "most_parts": 1}
        self.rule.require(kind if drawn is None else {"kind": "subsampled", "most_parts": drawn.most_parts})
        told = self.label.get("student")
        predicted = None if told is None else probabilities(Path(told))[: self.queries]
        self.rule.predictions(predicted, (self.queries, self.split["classes"]))
        for name in (self.train.get("model", "network"), self.student["model"]):
            if name not in MODELS:
                raise check.refuse("model", name, f"one of {', '.join(MODELS)}")
        if self.student["method"] not in (known := methods()):
            raise check.refuse("method", self.student["method"], f"one of {', '.join(known)}")


def carry_out(
    job: Job, folder: Path, payment: Payment, *, weak_guarantee: bool = False, progress: Progress | None = None
) -> tuple[dict[str, Any], Path]:
    """Do every step; steps already done are not done again. The bill as it may be printed, and the student's path.

    Guarantee: answers, bill and student cost at most `job.event`, charged before a private row is looked at.

    Raises:
        InvalidArgument: the guarantee would mean nothing, or the folder holds a run that was charged for another event.
        BudgetExceeded: the account has not enough left; nothing was done, and nothing is left behind.
    """
    run, event = RunFolder(folder), job.event
    _check_meaning(job, event, weak_guarantee)
    with files.unmade_if_refused(run.owner):
        if not run.owner.exists():
            files.private_folder(run.folder)
        receipt = paid(run.owner / "receipt.json", event, payment, settings=job.asked)
    _buy(job, run, receipt, progress)
    priced = {name: value for name, value in job.bill.items() if name != "seed"}
    shown = run.bill(receipt=receipt, rng=_source(job.bill), **priced)
    _, path = run.student(job.public, **job.student, progress=progress)
    return shown, path


def budget_of(told: Any) -> Budget | None:
    """A budget from two numbers, or from text such as `2,1e-5`.

    Raises:
        InvalidArgument: it is neither.
    """
    if told is None:
        return None
    try:
        epsilon, delta = (float(part) for part in (told.split(",") if isinstance(told, str) else told))
    except (TypeError, ValueError):
        raise InvalidArgument(f"budget={told!r}: want EPSILON,DELTA, as in 2,1e-5") from None
    return Budget(epsilon, delta)


def _check_meaning(job: Job, event: Event, weak_guarantee: bool) -> None:
    delta = job.bill["delta"]
    weakness = check.weakness(accounting.epsilon(event, delta=delta), delta, units=job.data.units)
    if weakness and not weak_guarantee:
        raise InvalidArgument(f"{weakness}; want more noise, fewer queries or a smaller delta, or --weak-guarantee")


def _buy(job: Job, run: RunFolder, receipt: Receipt, progress: Progress | None) -> None:
    """Deal, train, vote and label, where that was not done."""
    if not run.has("run.json"):
        run.split(job.data, source=job.source, **job.split)
    if not run.has("owner/votes.npz"):
        run.vote(run.train(job.data, **{"model": "network", **job.train}, progress=progress), job.public)
    if not run.has("labels.json"):
        told = {name: job.label[name] for name in ("queries", "most", "student") if name in job.label}
        run.label(
            aggregator=job.label["aggregator"], fields=job.fields, budget=budget_of(job.label.get("budget")),
            receipt=receipt, rng=_source(job.label), **told,
        )  # fmt: skip


def _source(step: Mapping[str, Any]) -> Source:
    return Seeded(step["seed"]) if "seed" in step else SYSTEM
