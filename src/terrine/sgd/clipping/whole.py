"""The seam, with the slow exact way behind it."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.fallback import Criterion, Lot, examples, per_example_gradients, trained
from terrine.sgd.clipping.policy import ClippingRule, Flat, as_rule
from terrine.sgd.clipping.result import Clipped


def clipped_sum(model: nn.Module, criterion: Criterion, x: Lot, y: Lot, *, clip: float | ClippingRule) -> Clipped:
    """The sum over the lot of clipped per-example gradients, and the norms before clipping."""
    if examples(x) == 0:
        return nothing(model)
    return clip_gradients(per_example_gradients(model, criterion, x, y), as_rule(clip))


def nothing(model: nn.Module) -> Clipped:
    """The clipped sum of an empty lot."""
    sums = {name: torch.zeros_like(p, dtype=wide(p.dtype)).detach() for name, p in trained(model).items()}
    return Clipped(sums, torch.zeros(0))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type sums are kept in: float32, or wider where the parameter is."""
    return torch.promote_types(dtype, torch.float32)


def clip_gradients(gradients: dict[str, Tensor], rule: ClippingRule) -> Clipped:
    """Clip and add up gradients that lie in memory example by example."""
    gradients = {name: g.to(wide(g.dtype)) for name, g in gradients.items()}
    squares = {name: g.flatten(1).square().sum(1) for name, g in gradients.items()}
    norms = torch.stack(list(squares.values())).sum(0).sqrt()
    sound = torch.isfinite(norms)
    sums = {}
    for name, factor in rule.factors(squares).items():
        rows = gradients[name][sound].flatten(1)
        sums[name] = (factor[sound].to(rows.dtype) @ rows).reshape(gradients[name].shape[1:])
    return Clipped(sums, norms)


class Recorder:
    """Watches an ordinary forward and backward pass, and turns what it saw into a clipped sum."""

    def __init__(self, model: nn.Module, *, clip: float | ClippingRule) -> None:
        self.model = model
        self.clip: ClippingRule = as_rule(clip)
        self._calls: list[list[Any]] = []
        self._hook = model.register_forward_hook(self._record)

    def collect(self, *, scale: float = 1.0) -> Clipped:
        """Consume what was recorded; `scale` undoes a mean reduction: the lot size for mean, 1 for sum."""
        parts = [self._clip(inputs, output, scale) for inputs, output in self._calls]
        self.discard()
        if not parts:
            return nothing(self.model)
        sums = {name: sum((p.sums[name] for p in parts[1:]), parts[0].sums[name]) for name in parts[0].sums}
        return Clipped(sums, torch.cat([p.norms for p in parts]))

    def discard(self) -> None:
        """Forget what was recorded."""
        self._calls.clear()

    def close(self) -> None:
        """Detach from the model."""
        self.discard()
        self._hook.remove()

    def _record(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if torch.is_grad_enabled() and module.training:
            output.retain_grad()
            self._calls.append([inputs, output])

    def _clip(self, inputs: Any, output: Tensor, scale: float) -> Clipped:
        gradient = output.grad
        if gradient is None:
            raise InvalidArgument("Recorder.collect: loss.backward() has not run since the last forward pass")
        self._hook.remove()
        try:
            gradients = per_example_gradients(
                self.model, lambda out, g: (out * g * scale).sum(), tuple(inputs), gradient.detach()
            )
        finally:
            self._hook = self.model.register_forward_hook(self._record)
        return clip_gradients(gradients, self.clip)


def reduction_scale(alone: tuple[Clipped, Clipped], together: Clipped) -> str:
    """Tell "mean" from "sum" by two examples alone (unclipped, scale 1) against the same two in one lot.

    Raises: InvalidArgument where neither explains the lot: the model or the loss mixes examples.
    """
    expected = {name: alone[0].sums[name] + alone[1].sums[name] for name in together.sums}
    norms = torch.cat([alone[0].norms, alone[1].norms])
    for reduction, scale in (("sum", 1.0), ("mean", 2.0)):
        close = torch.allclose(together.norms * scale, norms, rtol=1e-2, atol=1e-6)
        if close and all(torch.allclose(together.sums[n] * scale, e, rtol=1e-2, atol=1e-4) for n, e in expected.items()):
            return reduction
    raise InvalidArgument("the loss of two examples is neither the sum nor the mean of each alone: examples are mixed")


UNCLIPPED = Flat(math.inf)
