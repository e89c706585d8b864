"""`clipped_sum`: one forward and one backward over a lot, a few examples at a time.

Clipping is per example, so a lot may be taken in parts of any size with the same result: small enough for
activations to stay near the processor, large enough to keep it busy.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from terrine import check
from terrine.errors import InvalidArgument
from terrine.sgd import pages
from terrine.sgd.clipping import constants
from terrine.sgd.clipping import rules as _rules  # noqa: F401  registers every rule
from terrine.sgd.clipping.axis import Unfollowed
from terrine.sgd.clipping.chunks import FIRST, stops
from terrine.sgd.clipping.contribution import Contribution
from terrine.sgd.clipping.examples import (
    Criterion,
    Lot,
    arguments,
    call,
    count,
    detached,
    part,
    trained,
    unwatched,
)
from terrine.sgd.clipping.fallback import per_example_gradients
from terrine.sgd.clipping.policy import ClippingRule, as_rule, refuse_strange
from terrine.sgd.clipping.reduction import is_mean
from terrine.sgd.clipping.registry import own_rules
from terrine.sgd.clipping.result import Clipped
from terrine.sgd.clipping.summing import Sums
from terrine.sgd.clipping.tape import ANCHOR, Tape
from terrine.sgd.clipping.trial import compared, misunderstood
from terrine.sgd.isolation import Isolation, Mixed, Rows, Total, aside, own_function, totals
from terrine.sgd.reduction import of_criterion, refuse_shared_denominator
from terrine.sgd.validate import validate

log = logging.getLogger("terrine.sgd")


@unwatched()
@aside()
def clipped_sum(
    model: nn.Module,
    criterion: Criterion,
    x: Lot,
    y: Lot,
    *,
    clip: float | ClippingRule,
    chunk: int | None = None,
    memory: float | None = None,
) -> Clipped:
    """The sum over the lot of clipped per-example gradients, and the norms before clipping.

    `criterion(model(x), y)` may be a mean, a sum or one loss per example; a tuple `x` is positional arguments, a
    dict keyword arguments. `chunk` examples are in memory at a time; by default as many as are fastest and, where
    `memory` is given, about fit into so many bytes.

    Guarantee: adding or removing one example moves the sums by at most the rule's bound in L2 norm.
    Raises: InvalidArgument where the model or the loss mixes examples.
    """
    rule, size = as_rule(clip), count(y)
    pages.keep()
    validate(model)
    refuse_shared_denominator(criterion, y)
    parameters = trained(model)
    refuse_strange(rule, parameters)
    sums = Sums(parameters)
    if size == 0 or not parameters:
        return Clipped(sums.totals(), torch.zeros(size))
    work = _Work(model, criterion, parameters, rule, sums)
    work.slow = misunderstood(model, parameters, *arguments(x), size)
    if count(x) != size:  # bags between offsets, or inputs that all examples share: not to be cut
        whole = work.part(x, y)
        return Clipped(sums.totals(), whole)
    norms: list[Tensor] = []
    start = 0
    room = math.inf if memory is None else check.positive("memory", memory)
    for stop in stops(model, parameters, x, size, chunk, lambda: work.tried(x, y), room):
        norms.append(work.part(part(x, start, stop), part(y, start, stop)) if stop - start < size else work.part(x, y))
        start = stop
    return Clipped(sums.totals(), torch.cat(norms) if len(norms) > 1 else norms[0])


@lru_cache(maxsize=1)
def load() -> None:
    """A lot for nobody: what every step runs is in memory before the first one."""
    with torch.random.fork_rng(devices=[]):
        clipped_sum(nn.Linear(2, 2), nn.CrossEntropyLoss(), torch.ones(3, 2), torch.ones(3, dtype=torch.long), clip=1.0)


@dataclass
class _Work:
    """What stays the same from one part of a lot to the next."""

    model: nn.Module
    criterion: Criterion
    parameters: dict[str, nn.Parameter]
    rule: ClippingRule
    sums: Sums
    mean: bool | None = None
    slow: str = ""  # why every example has to go alone
    bytes: float = 0.0  # one example's activations, in the last part
    rows: float = 0.0  # one example's gradients that were kept

    def tried(self, x: Lot, y: Lot) -> tuple[float, float]:
        """Bytes of one example's activations and kept gradients, from a few examples that count for nothing."""
        trial = replace(self)
        with torch.random.fork_rng(devices=[]), torch.no_grad(), suppress(Unfollowed, CheckpointError):
            trial._watched(part(x, 0, FIRST), part(y, 0, FIRST))
        return trial.bytes, trial.rows

    def part(self, x: Lot, y: Lot) -> Tensor:
        """Add one part's clipped gradients to the sums; its norms."""
        try:
            if self.slow:
                raise Unfollowed(self.slow)
            with torch.no_grad():
                contributions, squares = self._watched(x, y)
                return self.sums.add(contributions, squares, self.rule) if squares else torch.zeros(count(y))
        except (Unfollowed, CheckpointError) as reason:
            _say(self.model, str(reason).splitlines()[0])
            gradients = per_example_gradients(self.model, self.criterion, x, y)
            with torch.no_grad():
                return self.sums.add_rows(gradients, self.rule)

    def _watched(self, x: Lot, y: Lot) -> tuple[dict[str, Contribution], dict[str, Tensor]]:
        """What every parameter's uses contribute, and its squared norms."""
        size = count(y)
        tape = Tape(self.parameters, size, constants=constants.of(self.model))
        self._run(tape, x, y)
        found = tape.finish()
        self.bytes, self.rows = tape.bytes / size, tape.rows / size
        return found

    def _run(self, tape: Tape, x: Lot, y: Lot) -> None:
        """Forward and backward under the tape, while the isolation check follows every call."""
        isolation = Isolation(tape.examples, self.model)
        with torch.enable_grad():
            x = detached(x)
            tape.mark(x)
            isolation.mark((x, y))
            try:
                isolation.recorder, tape.told = tape, isolation.tell
                with own_rules(self.model, tape), tape, isolation:
                    output = call(self.model, x)
                isolation.recorder = None
                with isolation:
                    loss = self.criterion(output, y)
                if not isinstance(loss, Tensor):
                    raise InvalidArgument(f"criterion: want a tensor, got {type(loss).__name__}")
                self._settle(isolation, loss, x, output, y)
            finally:
                isolation.unmark()
            if not loss.requires_grad:
                raise Unfollowed("the loss does not depend on any parameter that was seen")
            each = torch.full_like(loss, tape.examples if self.mean else 1)  # what undoes a mean
            _, *leaked = torch.autograd.grad(loss, [ANCHOR, *self.parameters.values()], each, allow_unused=True)
        if any(gradient is not None for gradient in leaked):
            raise Unfollowed("a parameter was used where the tape cannot see it")

    def _settle(self, isolation: Isolation, loss: Tensor, x: Lot, output: Lot, y: Lot) -> None:
        """Whether the loss is a mean.

        Raises: Unfollowed where the examples are not apart in it: the slow way takes each alone.
        """
        status = isolation.status(loss)
        if isinstance(status, Mixed):
            self._refuse_mixing(status, x, output, y)
        if not isinstance(status, Rows | Total):
            raise Unfollowed(f"{status}" if isinstance(status, Mixed) else "the loss does not come from the lot")
        own = own_function(loss)
        if own:
            raise Unfollowed(f"{own}: a torch.autograd.Function, whose backward pass is not followed")
        if isolation.n == 1:
            return
        mean = isinstance(status, Total) and totals.is_mean(status, isolation.n)
        if (
            mean and isinstance(status, Total) and not status.mean
        ):  # divided by a multiple of so many: of the lot's size?
            mean = is_mean(self.criterion, output, y, isolation.n)
        if self.mean not in (None, mean):
            raise InvalidArgument("criterion: a mean over some examples, and a sum over others; want one of them")
        self.mean = mean

    def _refuse_mixing(self, status: Mixed, x: Lot, output: Lot, y: Lot) -> None:
        """Each example alone would be private all the same, but not what was asked for, unless nothing changes."""
        if not status.known:
            return
        of_criterion(self.criterion, output, y, count(y))
        if not compared(self.model, self.parameters, *arguments(x), count(y)):
            raise InvalidArgument(f"the loss mixes examples, so no clipping bounds one of them: {status}")


def _say(model: nn.Module, reason: str) -> None:
    key = (type(model), reason)
    if key not in _said:
        _said.add(key)
        log.warning("%s: per-example gradients by vmap, exact but slow (%s)", type(model).__name__, reason)


_said: set[tuple[type, str]] = set()
