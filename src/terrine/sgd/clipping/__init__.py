"""Per-example gradient clipping: exact, on any model, at about the cost of the plain step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from terrine.common import generators
from terrine.sgd.clipping.alone import way_of
from terrine.sgd.clipping.clipper import Clipper
from terrine.sgd.clipping.sums import Automatic, Clipped, ClippingRule, Flat, PerLayer, as_rule, refuse_strange
from terrine.sgd.layers import validate
from terrine.sgd.loss import Loss

__all__ = ["Automatic", "Clipped", "Clipper", "ClippingRule", "Flat", "PerLayer", "clipped_sum"]


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batch: Any,
    *,
    clip: float | ClippingRule,
    rows: Sequence[int] | None = None,
    memory: float | None = None,
    microbatch: int | None = None,
    precision: str | None = None,
    reads_values: bool = False,
) -> Clipped:
    """Return the sum over a batch of clipped per-example gradients, and the norms before clipping.

    Args:
        model: The module whose trained parameters the gradients are of.
        loss: A function of (model, batch), run for every example as a batch of one; or a criterion, an `nn.Module`
            that stands for `criterion(model(x), y)`.
        batch: Tensors, in tuples, lists or dicts, whose first dimension counts the examples.
        clip: The bound, or a clipping rule.
        rows: The examples are people's rows: the first `rows[0]` are one person's, the next `rows[1]` another's. A
            person's gradient is the mean over its rows, and is clipped as one.
        memory: About how many bytes the activations and gradients in memory may take.
        microbatch: How many examples are in memory at a time, instead of as many as are fastest.
        precision: "bf16" runs the loss under autocast; norms and sums are single precision in any case.
        reads_values: The program may read numbers of its example into Python, and keeps nothing of them.

    Returns:
        `Clipped`: `.sums` by parameter name, in float32 or wider, and `.norms` of the units.

    Raises:
        InvalidArgument: The program mixes examples or keeps something of one, or the batch is no batch.

    Guarantee:
        Adding or removing one example, or person, moves the sums by at most the rule's bound in L2 norm.
    """
    validate(model)
    clipper = Clipper(model, loss, microbatch=microbatch, memory=memory, precision=precision, reads_values=reads_values)
    rule = as_rule(clip)
    refuse_strange(rule, clipper.parameters)
    sums, program = way_of(model).sums, getattr(loss, "__code__", type(loss))
    clipper.calls = sums.get(program, 0)  # what was tried for one batch need not be tried for the next
    clipper.try_out(batch)
    # Seeded anew, so that no state of a generator that the program has kept is the present one.
    seed = torch.randint(256, (32,), dtype=torch.uint8, device="cpu")
    with generators.seeded(seed.numpy().tobytes()):
        clipped = clipper.add_up(batch, rule, rows)
    clipper.check_failures()
    sums[program] = clipper.calls
    return clipped
