"""`clipped_sum`: one forward and one backward over a lot, a few examples at a time.

Clipping is per example, so a lot may be taken in parts of any size with the same result: small enough for
activations to stay near the processor, large enough to keep it busy.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from terrine import check
from terrine.errors import InvalidArgument
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
from terrine.sgd.clipping.trial import misunderstood
from terrine.sgd.reduction import refuse_shared_denominator
from terrine.sgd.validate import validate

log = logging.getLogger("terrine.sgd")


@unwatched()
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
        """Forward and backward under the tape."""
        with torch.enable_grad():
            x = detached(x)
            tape.mark(x)
            with own_rules(self.model, tape), tape:
                output = call(self.model, x)
            loss = self.criterion(output, y)
            if not isinstance(loss, Tensor):
                raise InvalidArgument(f"criterion: want a tensor, got {type(loss).__name__}")
            if self.mean is None and tape.examples > 1:
                self.mean = is_mean(self.criterion, output, y, tape.examples)
            if not loss.requires_grad:
                raise Unfollowed("the loss does not depend on any parameter that was seen")
            each = torch.full_like(loss, tape.examples if self.mean else 1)  # what undoes a mean
            _, *leaked = torch.autograd.grad(loss, [ANCHOR, *self.parameters.values()], each, allow_unused=True)
        if any(gradient is not None for gradient in leaked):
            raise Unfollowed("a parameter was used where the tape cannot see it")


def _say(model: nn.Module, reason: str) -> None:
    key = (type(model), reason)
    if key not in _said:
        _said.add(key)
        log.warning("%s: per-example gradients by vmap, exact but slow (%s)", type(model).__name__, reason)


_said: set[tuple[type, str]] = set()
