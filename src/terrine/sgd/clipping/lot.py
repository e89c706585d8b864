"""`clipped_sum`: one forward and one backward over a lot, a few examples at a time.

Clipping is per example, so a lot may be taken in parts of any size with the same result: small enough for
activations to stay near the processor, large enough to keep it busy.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from terrine.errors import InvalidArgument
from terrine.sgd.clipping import rules as _rules  # noqa: F401  registers every rule
from terrine.sgd.clipping.examples import Criterion, Lot, call, chunks, count, part, trained
from terrine.sgd.clipping.fallback import per_example_gradients
from terrine.sgd.clipping.policy import ClippingRule, as_rule
from terrine.sgd.clipping.reduction import output_reduction
from terrine.sgd.clipping.result import Clipped
from terrine.sgd.clipping.summing import add_clipped, clip_rows, zeros
from terrine.sgd.clipping.tape import Tape, Unfollowed

log = logging.getLogger("terrine.sgd")


def clipped_sum(
    model: nn.Module, criterion: Criterion, x: Lot, y: Lot, *, clip: float | ClippingRule, chunk: int | None = None
) -> Clipped:
    """The sum over the lot of clipped per-example gradients, and the norms before clipping.

    `criterion(model(x), y)` may be a mean, a sum or one loss per example; a tuple `x` is positional arguments, a
    dict keyword arguments. `chunk` examples are in memory at a time; by default as many as are fastest.

    Guarantee: adding or removing one example moves the sums by at most the rule's bound in L2 norm.
    Raises: InvalidArgument where the loss mixes examples.
    """
    rule, size = as_rule(clip), count(y)
    parameters = trained(model)
    sums = zeros(parameters)
    if size == 0 or not parameters:
        return Clipped(sums, torch.zeros(size))
    per_chunk = size if count(x) != size else min(size, chunk or 64)
    norms = [
        _part(model, criterion, part(x, start, stop) if per_chunk < size else x, part(y, start, stop), rule, sums)
        for start, stop in chunks(size, per_chunk)
    ]
    return Clipped(sums, torch.cat(norms))


def _part(model: nn.Module, criterion: Criterion, x: Lot, y: Lot, rule: ClippingRule, sums: dict[str, Tensor]) -> Tensor:
    parameters = trained(model)
    try:
        tape = Tape(parameters, count(y))
        scale = _run(tape, model, criterion, x, y, list(parameters.values()))
        with torch.no_grad():
            contributions, squares = tape.finish()
            if not squares:
                return torch.zeros(count(y))
            return add_clipped(sums, contributions, squares, rule, scale)
    except Unfollowed as reason:
        _say(model, reason)
        gradients = per_example_gradients(model, criterion, x, y)
        with torch.no_grad():
            return clip_rows(sums, gradients, rule)


def _run(tape: Tape, model: nn.Module, criterion: Criterion, x: Lot, y: Lot, parameters: list[Any]) -> float:
    """Forward and backward under the tape; returns what undoes a mean."""
    with torch.enable_grad():
        tape.mark(x)
        with tape:
            output = call(model, x)
        loss = criterion(output, y)
        if not isinstance(loss, Tensor):
            raise InvalidArgument(f"criterion: want a tensor, got {type(loss).__name__}")
        scale = output_reduction(criterion, output, y, loss)
        total = loss.sum()
        if not total.requires_grad:
            return scale
        _, *leaked = torch.autograd.grad(total, [tape.anchor, *parameters], allow_unused=True)
    if any(gradient is not None for gradient in leaked):
        raise Unfollowed("a parameter was used where the tape cannot see it")
    return scale


def _say(model: nn.Module, reason: Unfollowed) -> None:
    key = (type(model), str(reason))
    if key not in _said:
        _said.add(key)
        log.warning("%s: per-example gradients by vmap, exact but slow (%s)", type(model).__name__, reason)


_said: set[tuple[type, str]] = set()
