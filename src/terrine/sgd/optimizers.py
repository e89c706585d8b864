"""What is done with a noisy gradient: Adam without the noise's bias, and averages of the weights; both cost nothing.

Adam without the bias that private noise puts into its second moment [TL24].

The noisy gradient's square has the noise's variance on top, and Adam divides by its root: with much noise every
coordinate is scaled alike and Adam becomes momentum. The correction takes the known variance out again:

    theta <- theta - rate m / sqrt(max(v - variance, floor^2)),     m, v Adam's bias-corrected moments.

Where the variance differs from step to step, as with stages or correlated noise, what is taken out is its average with
the weights of v. The variance is public, so this is post-processing.

The average of the weights along the way smooths the noise:

    average <- decay average + (1 - decay) theta,    decay at most (1 + t)/(10 + t) while the run is young
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrine import check


class CorrectedAdam(Optimizer):
    """Adam whose second moment has the noise's variance removed; `private_steps` tells it the variance."""

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


class Average:
    """An exponential moving average of a model's trained parameters."""

    def __init__(self, decay: float = 0.99) -> None:
        self.decay = check.half_open_unit("decay", decay)
        self._weights: dict[str, Tensor] = {}
        self._steps = 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights after a step."""
        self._steps += 1
        decay = min(self.decay, (1 + self._steps) / (10 + self._steps))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                if name in self._weights:
                    self._weights[name] = self._weights[name].to(parameter.device).lerp_(parameter.detach(), 1 - decay)
                else:
                    self._weights[name] = parameter.detach().clone()

    @torch.no_grad()
    def exchange(self, model: nn.Module) -> None:
        """Swap the model's weights and the averaged ones; a second call swaps them back."""
        for name, parameter in model.named_parameters():
            if name in self._weights:
                present = parameter.detach().clone()
                parameter.copy_(self._weights[name])
                self._weights[name] = present

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"weights": dict(self._weights), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what a checkpoint kept."""
        self._weights, self._steps = dict(state["weights"]), state["steps"]
