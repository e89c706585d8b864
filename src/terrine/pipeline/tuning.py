"""A run that tunes its settings: the best of a secret, random number of DP-SGD runs [PS22].

    draw K;  K times: draw settings from a public grid, train, count right answers on held-out rows with noise;
    keep the model with the best noisy count, and forget the others and K.

The bill is one event, `RandomStopping`: K is logarithmic, at least 1 and as often expected as asked for. Each run's
training and noisy count are its inner event: one of several, by the lot that was drawn, each with noise such that one
run alone keeps the same smaller budget, and the whole, tuning included, the budget asked for.

K and the runs that lost are not covered by the bill. Until the run is over they lie in `owner/`; then they are gone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from terrine import accounting, mechanisms, sgd
from terrine.accounting.calibration import Search
from terrine.errors import InvalidArgument
from terrine.events import Budget, Composed, Event, NegativeBinomialCount, OneOf, RandomStopping
from terrine.mechanisms.exact import below
from terrine.mechanisms.stopping import draw_count
from terrine.pipeline import by_sgd, coins, measuring, recipes
from terrine.pipeline.folder import Folder
from terrine.pipeline.learned import Learned
from terrine.pipeline.material import Material, Opened
from terrine.pipeline.models import Architecture
from terrine.pipeline.settings import Settings
from terrine.receipts import Receipt
from terrine.rng import SYSTEM, Seeded, Source
from terrine.sgd.checkpoint import Checkpoint

_STATE, _HELD = "owner/tuning.json", "owner/held.npy"
_SHARE_FOR_SCORES = 0.1
_LEAST_HELD = 20


@dataclass(frozen=True, eq=False)
class Tuning:
    """The best of several runs by DP-SGD, planned."""

    event: Event
    """What the whole run costs."""
    plans: dict[int, sgd.Plan]
    """For every lot, the plan of one of the runs."""
    count: NegativeBinomialCount
    scored: mechanisms.Counts
    usual: recipes.Defaults


@dataclass(frozen=True, eq=False)
class _Tuned:
    """All that every run of the tuning shares."""

    folder: Folder
    settings: Settings
    tuning: Tuning
    architecture: Architecture
    features: Tensor
    material: Material
    taught: NDArray[np.int64]
    """The labels that runs learn: wrong for canaries."""
    silent: NDArray[np.int64]
    """The units that no run learns from."""
    held: NDArray[np.int64]
    """The units that candidates are measured on."""
    receipt: Receipt
    quiet: bool


def planned(settings: Settings, opened: Opened, architecture: Architecture, before: tuple[Event, ...]) -> Tuning:
    """The tuning of about `settings.tune` runs that keeps the settings' budget together with what comes `before` it.

    Raises:
        InvalidArgument: there are too few rows to measure candidates on.
    """
    assert settings.tune is not None
    total = opened.units.count
    if (held := _held_units(settings, total)) < _LEAST_HELD:
        what = "rows" if opened.units.people is None else "people"
        raise InvalidArgument(f"--tune: {held} {what} to measure candidates on; want at least {_LEAST_HELD}")
    usual = recipes.recipe(settings, architecture.kind, total)
    scored = mechanisms.Counts(epsilon=_SHARE_FOR_SCORES * settings.epsilon, unit=opened.units.unit)
    budget = Budget(settings.epsilon, recipes.delta(settings, total))
    count = NegativeBinomialCount.of_mean(settings.tune, shape=0.0)

    def plans(once: float) -> dict[int, sgd.Plan]:
        """For every lot, the plan of one run that alone would cost `once`."""
        return {
            lot: sgd.Plan(
                **opened.units.planned, lot=lot, epochs=usual.epochs, clip=usual.clip,
                budget=Budget(once, budget.delta), preparation=(scored.event,), seed=settings.seed,
            )
            for lot in recipes.lots(settings, usual)
        }  # fmt: skip

    def whole(once: float) -> Event:
        runs = [plan.event for plan in plans(once).values()]
        best = RandomStopping(runs[0] if len(runs) == 1 else OneOf(runs), count)
        return Composed([*before, best]) if before else best

    once = accounting.calibrate(whole, budget, over=_once(settings.epsilon))
    return Tuning(whole(once), plans(once), count, scored, usual)


def learn(
    tuning: Tuning,
    folder: Folder,
    settings: Settings,
    material: Material,
    architecture: Architecture,
    features: Tensor,
    receipt: Receipt,
    *,
    quiet: bool,
) -> Learned:
    """Train the best of about `settings.tune` candidates, or go on where the run stopped."""
    receipt.covers(tuning.event)
    total = material.units.count
    tossed = coins.of_run(folder.owner, settings, total)
    held = _held(folder, settings, total, tossed)
    silent = np.concatenate([tossed.out, held])
    canaries = tossed.canaries(recipes.canaries(settings, total))
    taught = coins.mislabelled(material, canaries.units)
    tuned = _Tuned(folder, settings, tuning, architecture, features, material, taught, silent, held, receipt, quiet)
    state = _begun(tuned)
    place = _best_place(tuned, state)
    module, candidate = _trained(tuned, state, place)
    return Learned(
        module,
        by_sgd.scores(module, features, taught, material.units, canaries.units) if len(canaries.units) else None,
        canaries.heads if len(canaries.units) else None,
        facts=_facts(tuned, candidate) | by_sgd.in_words(canaries, material.units),
        accuracy=_accuracy(tuned, state["scores"][place]) if material.test is None else None,
    )


def forget(folder: Folder) -> None:
    """Remove what the bill does not cover: how many runs there were, and all but the best."""
    for path in [folder.path / _STATE, folder.path / _HELD, *folder.owner.glob("candidate-*")]:
        path.unlink(missing_ok=True)


def _once(epsilon: float) -> Search:
    """Where to look for the epsilon of one run: above what its count costs, below the whole."""
    return Search(low=1.5 * _SHARE_FOR_SCORES * epsilon, high=epsilon, start=0.5 * epsilon, private_end_is_high=False)


def _held_units(settings: Settings, total: int) -> int:
    """How many units candidates are measured on: a fifth, none of them audited."""
    return min(total // 5, total - recipes.audited(settings, total))


def _held(folder: Folder, settings: Settings, total: int, tossed: coins.Coins) -> NDArray[np.int64]:
    """The units to measure candidates on; which ones may be known."""
    path = folder.path / _HELD
    if not path.exists():
        others = np.setdiff1d(np.arange(total), tossed.units)
        drawn = np.random.default_rng(settings.seed).permutation(others)[: _held_units(settings, total)]
        with folder.written(_HELD) as file:
            np.save(file, np.sort(drawn).astype(np.int64))
    found: NDArray[np.int64] = np.load(path, allow_pickle=False)
    return found


def _begun(tuned: _Tuned) -> dict[str, Any]:
    """What was drawn for this run: read where it was begun before; otherwise drawn and kept."""
    if tuned.folder.has(_STATE):
        return tuned.folder.read(_STATE)
    rng = _source(tuned.settings, 0)
    noises = {lot: plan.noise for lot, plan in tuned.tuning.plans.items()}
    grid = recipes.candidates(tuned.settings, tuned.architecture.kind, tuned.tuning.usual, noises=noises)
    drawn = [below(len(grid), rng) for _ in range(draw_count(tuned.tuning.count, rng))]
    state = {"candidates": [list(grid[place]) for place in drawn], "scores": []}
    tuned.folder.write(_STATE, state)
    return state


def _best_place(tuned: _Tuned, state: dict[str, Any]) -> int:
    """Train what has not been trained, score each run once; the place of the best."""
    scores: list[int] = state["scores"]
    for place in range(len(scores), len(state["candidates"])):
        module, _ = _trained(tuned, state, place)
        right = measuring.right_answers(module, tuned.features, tuned.material, tuned.held)
        noisy = tuned.tuning.scored.release(right, rng=_source(tuned.settings, place + 1)).value
        scores.append(int(np.asarray(noisy).reshape(-1)[0]))
        tuned.folder.write(_STATE, state)
        best = scores.index(max(scores))
        for other in range(place + 1):
            if other != best:
                _remove_checkpoint(_checkpoint(tuned, other))
    return scores.index(max(scores))


def _trained(tuned: _Tuned, state: dict[str, Any], place: int) -> tuple[nn.Module, recipes.Candidate]:
    """One run, trained to its end; read back where it was trained before."""
    candidate = recipes.Candidate(*state["candidates"][place])
    seed = None if tuned.settings.seed is None else tuned.settings.seed + 1000 * (place + 1)
    plan = replace(tuned.tuning.plans[candidate.lot], clip=candidate.clip, epochs=None, budget=None, seed=seed)
    tuned.receipt.covers(plan.event)
    units = tuned.material.units
    labels = by_sgd.silenced(tuned.taught, units.all_rows(tuned.silent))
    module = by_sgd.built(tuned.architecture, tuned.settings)
    trainer = by_sgd.trainer(
        _checkpoint(tuned, place), module, plan, candidate.learning_rate, tuned.tuning.usual,
        by_sgd.criterion(tuned.settings), tuned.quiet, device=tuned.settings.device,
    )  # fmt: skip
    trainer.fit((tuned.features, labels), person=units.ids)
    return module.cpu(), candidate


def _checkpoint(tuned: _Tuned, place: int) -> Checkpoint:
    return Checkpoint(tuned.folder.owner / f"candidate-{place}.pt")


def _remove_checkpoint(checkpoint: Checkpoint) -> None:
    for path in (checkpoint.path, checkpoint.count_path):
        path.unlink(missing_ok=True)


def _source(settings: Settings, place: int) -> Source:
    return SYSTEM if settings.seed is None else Seeded(settings.seed + place)


def _accuracy(tuned: _Tuned, score: int) -> dict[str, Any]:
    held = len(tuned.held)
    return {
        "accuracy": min(max(score / held, 0.0), 1.0),
        "rows": held,
        "measured_on": f"{measuring.of_each(tuned.material.units)} not trained on; the noisy count that chose among "
        "the candidates, so rather high; paid for",
        "off_by_at_most": recipes.off_by(held, tuned.tuning.scored.epsilon),
    }


def _facts(tuned: _Tuned, candidate: recipes.Candidate) -> dict[str, Any]:
    usual, count = replace(tuned.tuning.usual, clip=candidate.clip), tuned.tuning.count
    return by_sgd.facts(tuned.tuning.plans[candidate.lot], candidate.learning_rate, usual) | {
        "tuning": f"the best of a secret number of runs, {count.mean:g} expected (logarithmic), by a noisy count of "
        f"right answers on {len(tuned.held)} held-out private "
        f"{'rows' if tuned.material.units.people is None else 'people'}; learning rate, clip and lot drawn at random",
        "tuned_runs_expected": count.mean,
    }
