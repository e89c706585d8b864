"""Adam without the bias that private noise puts into its second moment [TL24].

The noisy gradient's square has the noise's variance on top, and Adam divides by its root: with much noise every
coordinate is scaled alike and Adam becomes momentum. The correction takes the known variance out again:

    theta <- theta - rate m / sqrt(max(v - variance, floor^2)),     m, v Adam's bias-corrected moments.

Where the variance differs from step to step, as with stages or correlated noise, what is taken out is its average with
the weights of v. The variance is public, so this is post-processing: it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from terrine import check


class CorrectedAdam(Optimizer):
    """Adam whose second moment has the noise's variance removed; `make_private` tells it the variance."""

    def __init__(
        self,
        parameters: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        floor: float = 1e-4,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": check.positive("lr", lr),
            "betas": tuple(check.half_open_unit("beta", beta) for beta in betas),
            "floor": check.positive("floor", floor),
            "weight_decay": check.not_negative("weight_decay", weight_decay),
            "noise_variance": 0.0,
        }
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient; a closure is not called, as it would look at the data again."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(step=0, first=torch.zeros_like(parameter), second=torch.zeros_like(parameter))
        early, late = group["betas"]
        noise = state.get("noise", group["noise_variance"] * (1 - late ** state["step"]))
        state["noise"] = late * noise + (1 - late) * group["noise_variance"]
        state["step"] += 1
        state["first"].lerp_(gradient, 1 - early)
        state["second"].mul_(late).addcmul_(gradient, gradient, value=1 - late)
        first = state["first"] / (1 - early ** state["step"])
        second = (state["second"] - state["noise"]) / (1 - late ** state["step"])
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(first, second.clamp_(min=group["floor"] ** 2).sqrt_(), value=-group["lr"])
