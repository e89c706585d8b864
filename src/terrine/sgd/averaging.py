"""The average of the weights along the way: post-processing that costs nothing and smooths the noise.

average <- decay average + (1 - decay) theta,    decay at most (1 + t)/(10 + t) while the run is young
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from terrine import check


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
