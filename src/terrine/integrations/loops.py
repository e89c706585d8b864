"""What the loops of other libraries share: a loader of steps instead of rows, and a watch over the loss of one example.

A library's loop asks a loader for batches, a function for the loss and an optimizer for the step. Here the loader hands
out the numbers of steps; where the loop would compute a loss and its gradients, the next private step is released into
the parameters' gradients; and the loop's own optimizer steps. Whatever the loop, its callbacks and loggers see and do
is post-processing. The library's loss is run for every example alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from terrine.errors import InvalidArgument, OutOfOrder
from terrine.sgd.loss import Loss
from terrine.sgd.plan import Plan
from terrine.sgd.run import PrivateStep, PrivateSteps

log = logging.getLogger("terrine.integrations")


class StepToken(dict[str, int]):
    """What a loop gets for a batch: the number of the step, and no row."""


class StepLoader:
    """The steps of one run, an epoch at a time, for loops that count epochs; a run that goes on begins inside one.

    `begin` starts the run at the first loop over it, when the library has made everything else ready.
    """

    def __init__(self, begin: Callable[[], PrivateSteps], plan: Plan) -> None:
        self._begin, self._per_epoch = begin, min(steps_per_epoch(plan), plan.steps)
        self.steps: PrivateSteps | None = None
        self.last: PrivateStep | None = None
        self._waiting: StepToken | None = None
        self._has_ended = False

    def __len__(self) -> int:
        return self._per_epoch

    def __iter__(self) -> Iterator[StepToken]:
        if self.steps is None:
            self.steps = self._begin()
        steps = self.steps
        for _ in range(min(self._per_epoch - steps.number % self._per_epoch, len(steps) - steps.number)):
            self._waiting = StepToken(step=steps.number + 1)
            yield self._waiting

    def release(self, token: Any) -> PrivateStep:
        """Release the step that a token stands for: its noisy gradient is in `.grad` then.

        Raises:
            OutOfOrder: it is no token of this loader's, or was used: every step that is released has been paid for.
        """
        if self.steps is None or token is None or token is not self._waiting:
            raise OutOfOrder(
                "training step: the batch is not the one that waits, as where several are accumulated or one is used "
                "twice; want one training step for each that this run's loader yields"
            )
        self._waiting = None
        self.last = next(self.steps)
        return self.last

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the private run keeps where it is itself."""
        return {}

    def load_state_dict(self, _: Any) -> None:
        """Do nothing."""

    def save(self) -> None:
        """Save the model where the run is kept, until it ends."""
        if self.steps is not None and not self._has_ended:
            self.steps.save()

    def end(self) -> None:
        """Finish the run where all its steps are released, or leave it to be gone on with."""
        if self.steps is None or self._has_ended:
            return
        self._has_ended = True
        if self.steps.number < len(self.steps):
            self.steps.close()
        else:
            next(self.steps, None)


def steps_per_epoch(plan: Plan) -> int:
    """Return how many lots are drawn until, on average, every example was."""
    return plan.sampling.steps(1.0, examples=plan.population, lot=plan.lot)


def withhold_loss(device: torch.device | None = None) -> Tensor:
    """Return what a loop is told for the loss of a lot, which is private: nan."""
    return torch.full((), torch.nan, device=device)


# -- the loss ------------------------------------------------------------------------------------------


def watch_loss(loss: Loss, holders: Callable[[], Sequence[Any]]) -> Loss:
    """Return the loss, refused where it changes an attribute of a holder: what steers the loop, or keeps an example."""

    def watched(model: nn.Module, batch: Any) -> Tensor:
        present = [holder for holder in holders() if hasattr(holder, "__dict__")]
        before = [_describe_attributes(holder) for holder in present]
        try:
            return loss(model, batch)
        finally:  # also where it fails, as it may for an example that was to steer the run
            for holder, attributes in zip(present, before, strict=True):
                _check_attributes(holder, attributes)

    return watched


def _check_attributes(holder: Any, before: dict[str, Any]) -> None:
    """Refuse a holder whose attributes are not what they were.

    Raises: InvalidArgument
    """
    now = _describe_attributes(holder)
    if changed := sorted(name for name in {*before, *now} if before.get(name) != now.get(name)):
        raise InvalidArgument(
            f"the loss changes {changed[0]} of {type(holder).__name__}, by which an example could reach another, or "
            "decide what the run does; want a loss that keeps nothing and steers nothing"
        )


def _describe_attributes(holder: Any) -> dict[str, Any]:
    """By what an attribute that was replaced, added to or written into is known, and an optimizer's settings."""
    groups = getattr(holder, "param_groups", ())
    settings = {
        f"param_groups[{index}]": repr({name: value for name, value in group.items() if name != "params"})
        for index, group in enumerate(groups)
    }
    return settings | {
        name: (
            value if isinstance(value, bool | int | float | str) else id(value),
            len(value) if isinstance(value, list | dict | set) else 0,
            value._version if isinstance(value, Tensor) else 0,
        )
        for name, value in vars(holder).items()
        if name not in _FOUND_OUT
    }


_FOUND_OUT = ("problem_type",)  # by transformers' models, from the type of labels: the same for all examples


# -- a run on disk -------------------------------------------------------------------------------------


def read_progress(path: Path) -> tuple[int, int] | None:
    """Return how many steps the model kept at `path` has seen, and how many its run has; None where there is none.

    Raises:
        InvalidArgument: what lies there is no run.
    """
    try:
        record = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        return int(record["taken"]), int(record["limit"])
    except FileNotFoundError:
        return None
    except Exception as error:
        raise InvalidArgument(f"{path}: not a private run ({type(error).__name__}); want another path") from None


def check_progress(steps: PrivateSteps, path: Path | None, position: int) -> None:
    """Refuse to go on where a library's checkpoint has seen more steps than were counted; say where the run goes on.

    Raises:
        OutOfOrder: it has; the run is closed.
    """
    if position > steps.number:
        steps.close()
        raise OutOfOrder(
            f"the checkpoint has seen {position} steps, and the private run has counted {steps.number}: an older copy, "
            "after which steps would be released twice; want the run's newest files"
        )
    kept = None if path is None else read_progress(path)
    if kept is not None and {kept[0], position} != {steps.number}:
        log.warning("the private run goes on after step %d, from the model of step %d", steps.number, kept[0])


__all__ = [
    "StepLoader",
    "StepToken",
    "check_progress",
    "read_progress",
    "steps_per_epoch",
    "watch_loss",
    "withhold_loss",
]
