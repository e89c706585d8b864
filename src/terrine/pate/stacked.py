"""Many small networks of one shape trained as one: parameters stacked, one batched computation for all of them.

A network that is an `nn.Sequential` of the layers below becomes one grouped network: convolutions with one group to a
model, linear layers as batched products. Any other module runs under `torch.func.vmap`. Models never mix: the
loss is a sum with one term to a model, and optimisers that work element by element treat each on its own.

    models = train(build, inputs, targets, parts, Recipe(epochs=20))     # parts: one index array to a model
    models.logits(x)                                                    # (models, examples, classes)

Any number of examples to a model: lots are drawn from shuffled epochs of the model's own part.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from safetensors.torch import save as as_bytes
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from terrine import check, files
from terrine.errors import InvalidArgument
from terrine.pate.moves import shifted, warped

Build = Callable[[], nn.Module]
Progress = Callable[[int, int], None]
Indices = NDArray[np.int64]

_POINTWISE = (nn.ReLU, nn.Tanh, nn.GELU, nn.SiLU, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Identity, nn.Dropout)
_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)


@dataclass(frozen=True)
class Recipe:
    """How each model is trained: Adam with a cosine schedule.

    Images may be shifted by up to `shift` pixels (a lot at a time) and warped (each image, anew every epoch): turned,
    scaled and sheared by up to `warp` x (15 degrees, 15%, 0.2).
    """

    epochs: int = 20
    batch: int = 16
    learning_rate: float = 2e-3
    weight_decay: float = 0.0
    shift: int = 0
    warp: float = 0.0

    def __post_init__(self) -> None:
        check.whole("epochs", self.epochs)
        check.whole("batch", self.batch)
        check.positive("learning_rate", self.learning_rate)
        check.not_negative("weight_decay", self.weight_decay)
        check.whole("shift", self.shift, at_least=0)
        check.not_negative("warp", self.warp)


class Stack:
    """Models of one shape with their parameters stacked: `parameters[name][i]` belongs to model i."""

    def __init__(self, template: nn.Module, parameters: dict[str, Tensor]) -> None:
        self.template = template
        self.parameters = parameters
        self.layers = _grouped_layers(template)

    @classmethod
    def fresh(cls, build: Build, seeds: Sequence[int]) -> Stack:
        """One newly initialised model to a seed; the same seed gives the same model alone or among others."""
        models = []
        for seed in seeds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                models.append(build())
        if any(True for _ in models[0].buffers()):
            raise InvalidArgument(
                f"{type(models[0]).__name__} has buffers (batch norm?): want parameters only; use GroupNorm"
            )
        names = [name for name, _ in models[0].named_parameters()]
        stacked = {name: torch.stack([dict(one.named_parameters())[name].detach() for one in models]) for name in names}
        return cls(models[0], stacked)

    def __len__(self) -> int:
        return len(next(iter(self.parameters.values())))

    def forward(self, x: Tensor) -> Tensor:
        """Logits (models, batch, classes) for inputs (models, batch, ...), each model on its own."""
        if self.layers is None:
            called = torch.func.vmap(self._call, randomness="different")
            result: Tensor = called(self.parameters, x)
            return result
        return _run(self.layers, self.parameters, x, len(self))

    @torch.no_grad()
    def logits(self, x: Tensor, chunk: int = 256) -> Tensor:
        """Logits (models, examples, classes) of every model on the same inputs."""
        was, _ = self.template.training, self.template.eval()
        try:
            parts = [self.forward(part.unsqueeze(0).expand(len(self), *part.shape)) for part in torch.split(x, chunk)]
        finally:
            self.template.train(was)
        return torch.cat(parts, dim=1)

    def predictions(self, x: Tensor, chunk: int = 256) -> Tensor:
        """The class that each model chooses for each input, (models, examples).

        Raises:
            InvalidArgument: a model's output is not a number.
        """
        found = []
        for part in torch.split(x, chunk):
            logits = self.logits(part, chunk)
            if not torch.isfinite(logits).all():
                broken = (~torch.isfinite(logits)).flatten(1).any(dim=1).nonzero().flatten().tolist()
                raise InvalidArgument(f"models {broken[:10]} give outputs that are not finite: train them again")
            found.append(logits.argmax(dim=2))
        return torch.cat(found, dim=1)

    def model(self, number: int) -> nn.Module:
        """Model `number` as an ordinary module."""
        one = copy.deepcopy(self.template)
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                parameter.copy_(self.parameters[name][number])
        return one

    def save(self, path: Path) -> None:
        """Write all parameters to one safetensors file; they were learned without noise, so it is the owner's."""
        tensors = {name: value.detach().contiguous() for name, value in self.parameters.items()}
        files.write(Path(path), as_bytes(tensors), private=True)

    @classmethod
    def load(cls, build: Build, path: Path) -> Stack:
        """Read what `save` wrote."""
        return cls(build(), load_file(str(path)))

    @classmethod
    def joined(cls, stacks: Sequence[Stack]) -> Stack:
        """All models of `stacks`, in order."""
        names = stacks[0].parameters
        return cls(stacks[0].template, {name: torch.cat([one.parameters[name] for one in stacks]) for name in names})

    def _call(self, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = functional_call(self.template, parameters, (x,))
        return result


def train(
    build: Build,
    inputs: Tensor,
    targets: Tensor,
    parts: Sequence[Indices],
    recipe: Recipe,
    *,
    seeds: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> Stack:
    """Train one model on each of `parts` (index arrays into `inputs`), all at once.

    Raises:
        InvalidArgument: a part is empty.
    """
    if empty := [number for number, part in enumerate(parts) if not len(part)]:
        raise InvalidArgument(f"models {empty[:10]} have no examples: want at least one each; use fewer models")
    seeds = list(range(len(parts))) if seeds is None else list(seeds)
    stack = Stack.fresh(build, seeds)
    for value in stack.parameters.values():
        value.requires_grad_(True)
    stack.template.train()
    optimiser = torch.optim.Adam(stack.parameters.values(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    generators = [np.random.default_rng([seed, 1]) for seed in seeds]
    shifts = np.random.default_rng([seeds[0], 2])
    steps = max(1, math.ceil(max(len(part) for part in parts) / recipe.batch))
    if recipe.warp:
        inputs, targets, parts = _compact(inputs, targets, parts)
    for epoch in range(recipe.epochs):
        order = torch.from_numpy(_shuffled(parts, generators, steps * recipe.batch))
        seen = warped(inputs, recipe.warp, shifts)
        for step in range(steps):
            share = (epoch * steps + step) / (recipe.epochs * steps)
            optimiser.param_groups[0]["lr"] = recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * share))
            chosen = order[:, step * recipe.batch : (step + 1) * recipe.batch]
            x = shifted(seen[chosen], recipe.shift, shifts)
            optimiser.zero_grad(set_to_none=True)
            _loss(stack.forward(x), targets[chosen]).backward()
            optimiser.step()
        if progress is not None:
            progress(epoch + 1, recipe.epochs)
    for value in stack.parameters.values():
        value.requires_grad_(False)
    return stack


def _compact(inputs: Tensor, targets: Tensor, parts: Sequence[Indices]) -> tuple[Tensor, Tensor, list[Indices]]:
    """Only the examples that some model uses, with `parts` renumbered."""
    used, place = np.unique(np.concatenate(parts), return_inverse=True)
    edges = np.cumsum([len(part) for part in parts])[:-1]
    chosen = torch.from_numpy(used)
    return inputs[chosen], targets[chosen], [np.asarray(one, dtype=np.int64) for one in np.split(place, edges)]


def _shuffled(parts: Sequence[Indices], generators: Sequence[np.random.Generator], length: int) -> Indices:
    """For each model, its examples in random order, again and again up to `length`."""
    rows = []
    for part, generator in zip(parts, generators, strict=True):
        rounds = [generator.permutation(part) for _ in range(math.ceil(length / len(part)))]
        rows.append(np.concatenate(rounds)[:length])
    return np.stack(rows)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    # Mean over each model's lot, then a sum: each model's gradient is what it would be alone.
    flat = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return flat / targets.shape[1]


def _grouped_layers(template: nn.Module) -> list[tuple[str, nn.Module]] | None:
    """The layers in order if all of them can be grouped, else None."""
    if not isinstance(template, nn.Sequential):
        return None
    layers: list[tuple[str, nn.Module]] = []
    for name, layer in template.named_children():
        simple_convolution = isinstance(layer, nn.Conv2d) and layer.padding_mode == "zeros"
        if not simple_convolution and not isinstance(layer, (*_POINTWISE, *_POOLS, nn.Linear, nn.Flatten)):
            return None
        layers.append((name, layer))
    return layers


def _run(layers: list[tuple[str, nn.Module]], parameters: dict[str, Tensor], x: Tensor, models: int) -> Tensor:
    batch = x.shape[1]
    grouped = x.dim() > 3  # images travel as (batch, models x channels, height, width), vectors as (models, batch, n)
    if grouped:
        x = x.transpose(0, 1).reshape(batch, models * x.shape[2], *x.shape[3:])
    for name, layer in layers:
        match layer:
            case nn.Conv2d():
                weight, bias = parameters[f"{name}.weight"], parameters.get(f"{name}.bias")
                x = functional.conv2d(
                    x,
                    weight.flatten(0, 1),
                    None if bias is None else bias.flatten(),
                    layer.stride,
                    layer.padding,
                    layer.dilation,
                    models * layer.groups,
                )
            case nn.Linear():
                weight, bias = parameters[f"{name}.weight"], parameters.get(f"{name}.bias")
                x = torch.bmm(x, weight.transpose(1, 2))
                x = x if bias is None else x + bias.unsqueeze(1)
            case nn.Flatten():
                if grouped:
                    x, grouped = x.reshape(batch, models, -1).transpose(0, 1), False
            case _:
                x = layer(x)
    return x
