"""A run's whole plan: everything it will do to its private rows, fixed by public facts, and what all of it costs.

    bounds of numbers + whitening + training (or tuning, or bought labels) + accuracy  ->  one event, charged first

Nothing here can look at a row: there are none among its arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from terrine import accounting, check
from terrine.errors import InvalidArgument
from terrine.events import Budget, Event
from terrine.pipeline import bounds, by_pate, by_release, by_sgd, measuring, recipes, tuning, whitened
from terrine.pipeline.material import Opened
from terrine.pipeline.models import Architecture
from terrine.pipeline.settings import LEAST_SQUARES, Settings

Method = by_sgd.Training | tuning.Tuning | by_pate.Labelling | by_release.Releasing


@dataclass(frozen=True, eq=False)
class RunPlan:
    """What a run will do; its `event` is what is charged."""

    settings: Settings
    architecture: Architecture
    budget: Budget
    bounds: Event | None
    """What finding bounds costs, where any are to be found."""
    whitening: Event | None
    """What whitening the features costs, where they are."""
    method: Method
    """How it learns; its event holds the two above."""
    weakness: str = ""
    """Why the guarantee means little, in words; empty where it means something."""
    unmeasured: str = ""
    """Why no accuracy will be measured, in words; empty where one will be, or none is wanted."""
    guessed: tuple[str, ...] = ()
    """The columns whose public facts were taken from the rows and accepted all the same."""
    fingerprint: str = ""
    """A SHA-256 hash of the public facts about the inputs: how many there are, their shape, the schema."""

    @property
    def event(self) -> Event:
        """What the whole run does to the private rows."""
        return self.method.event

    @property
    def name(self) -> str:
        """What the method is called."""
        if isinstance(self.method, by_pate.Labelling):
            return "PATE"
        return "one release" if isinstance(self.method, by_release.Releasing) else "DP-SGD"

    @property
    def held(self) -> int:
        """About how many units are left out, so that accuracy is measured on them."""
        return measuring.held(getattr(self.method, "measured", None))

    @cached_property
    def epsilon(self) -> float:
        """The certified epsilon of the whole, which the noise was chosen to keep within the budget."""
        return accounting.epsilon(self.event, delta=self.budget.delta)

    @property
    def generator(self) -> str:
        """What makes the run's noise."""
        seeded = self.settings.seed is not None
        direct = "Philox from a seed" if seeded else "the operating system's generator"
        if isinstance(self.method, by_pate.Labelling):
            words = f"{direct} (noise on the votes)"
        else:
            key = "made from a seed" if seeded else "from the operating system's generator"
            words = f"AES-256 in counter mode under a key {key} (lots, and noise of training and whitening)"
            if isinstance(self.method, by_release.Releasing):
                words = f"{direct} (noise of the release)" + (f"; {words}" if self.whitening else "")
            if self.bounds or isinstance(self.method, tuning.Tuning) or self.method.measured:
                words += f"; {direct} (noise on bounds and counts)"
        return f"SEEDED, FOR TESTS ONLY, NOT PRIVATE: {words}" if seeded else words


def plan(settings: Settings, opened: Opened) -> RunPlan:
    """The run that the settings ask for, on data of which only the public facts are known.

    Raises:
        InvalidArgument: the settings do not fit the data, or ask for a guarantee that means nothing.
        BudgetExceeded: no noise keeps the budget.
    """
    budget = Budget(settings.epsilon, recipes.delta(settings, opened.units.count))
    weakness = check.weakness(budget.epsilon, budget.delta, units=opened.units.count)
    if weakness and not settings.weak_guarantee:
        raise InvalidArgument(
            f"{weakness}; want epsilon at most {check.LARGEST_EPSILON:g} and delta below 1/rows, or --weak-guarantee "
            "to go on all the same"
        )
    architecture = _architecture(settings, opened)
    found = white = None
    if opened.unbounded:
        bounds.check_units(opened.units, opened.unbounded, settings.epsilon)
        found = bounds.event(opened.unbounded, settings.epsilon, opened.units.unit)
    if architecture.whitened:
        white = whitened.event(settings, architecture, opened.units)
    before = tuple(event for event in (found, white) if event is not None)
    method = _method(settings, opened, architecture, before)
    return RunPlan(
        settings,
        architecture,
        budget,
        found,
        white,
        method,
        weakness,
        _unmeasured(settings, opened),
        () if opened.schema is None else opened.schema.guessed,
        opened.fingerprint,
    )


def _unmeasured(settings: Settings, opened: Opened) -> str:
    if opened.tested or settings.method == "pate" or settings.tune is not None or settings.accuracy_within == 0:
        return ""
    return "" if measuring.planned(settings, opened) else measuring.too_few(settings, opened)


def _method(settings: Settings, opened: Opened, architecture: Architecture, before: tuple[Event, ...]) -> Method:
    if settings.method == "pate":
        return by_pate.planned(settings, opened)
    if architecture.name == LEAST_SQUARES:
        return by_release.planned(settings, opened, architecture, before)
    way = by_sgd.planned if settings.tune is None else tuning.planned
    return way(settings, opened, architecture, before)


def _architecture(settings: Settings, opened: Opened) -> Architecture:
    """The model asked for, or the usual one."""
    count = opened.units.count
    name = settings.model or recipes.model(settings, opened.shape, opened.classes, count)
    if settings.method == "pate" and name == LEAST_SQUARES:
        raise InvalidArgument(f"--model {LEAST_SQUARES}: want --method sgd; PATE's student is trained")
    whitens = opened.target is None and recipes.whitens(settings, name, opened.shape, count)
    return Architecture(name, opened.shape, opened.classes, whitened=whitens, length=opened.length)
