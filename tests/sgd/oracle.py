"""The slow obvious way: one example after the other, autograd, clip, add."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.utils import _pytree as pytree


def loop(model, loss, batch, clip):
    """Clipped sum and norms by a per-example loop; `loss` is a function of (model, batch), or a criterion."""
    model = copy.deepcopy(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    norms = []
    for i in range(len(pytree.tree_leaves(batch)[0])):
        example = pytree.tree_map(lambda t, i=i: t[i : i + 1], batch)
        model.zero_grad()
        value(loss, model, example).backward()  # autograd.grad would skip what reentrant checkpointing recomputes
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        norms.append(norm)
        for name, g in zip(parameters, grads, strict=True):
            if math.isfinite(norm):
                sums[name] += g * min(1.0, clip / norm if norm else 1.0)
    return sums, torch.tensor(norms, dtype=torch.float64)


def value(loss, model, example):
    """The loss of a batch of one."""
    if not isinstance(loss, nn.Module) and not loss.__module__.startswith("torch.nn"):
        return loss(model, example).sum()
    x, y = example
    output = model(*x) if isinstance(x, tuple) else model(**x) if isinstance(x, dict) else model(x)
    return loss(output, y).sum()


def assert_same(clipped, expected, tolerance=1e-9):
    """Sums and norms agree, relative to the largest entry."""
    sums, norms = expected
    assert set(clipped.sums) == set(sums)
    torch.testing.assert_close(clipped.norms.double(), norms.double(), rtol=tolerance, atol=tolerance)
    for name, total in sums.items():
        size = float(total.abs().max())
        torch.testing.assert_close(
            clipped.sums[name].to(total.dtype),
            total,
            rtol=tolerance,
            atol=tolerance * (1 + size),
            msg=lambda m, name=name: f"{name}: {m}",
        )
