"""The slow obvious way: one example after the other, autograd, clip, add."""

from __future__ import annotations

import copy
import math

import torch
from torch.utils import _pytree as pytree

from terrine import sgd


def loop(model, criterion, x, y, clip):
    """Clipped sum and norms by a per-example loop."""
    model = copy.deepcopy(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    norms = []
    for i in range(len(pytree.tree_leaves(y)[0])):
        alone = pytree.tree_map(lambda t, i=i: t[i : i + 1], x)
        output = (
            model(*alone) if isinstance(alone, tuple) else model(**alone) if isinstance(alone, dict) else model(alone)
        )
        loss = criterion(output, pytree.tree_map(lambda t, i=i: t[i : i + 1], y)).sum()
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        grads = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), grads, strict=True)]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
        norms.append(norm)
        for name, g in zip(parameters, grads, strict=True):
            if math.isfinite(norm):
                sums[name] += g * min(1.0, clip / norm if norm else 1.0)
    return sums, torch.tensor(norms, dtype=torch.float64)


def recorded(model, loss, x, y, clip, turns=1, **settings):
    """Clipped sum and norms by an ordinary loop, all examples in one lot; `loss(model, x, y)` goes backward."""
    given = x if isinstance(x, tuple) else (x,)
    plan = sgd.Plan(examples=len(y), lot=len(y), steps=turns, clip=clip, noise=0.0, delta=1e-5)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
    model, optimizer, lots = sgd.make_private(model, optimizer, (*given, y), plan, **settings)
    found = None
    try:
        for *inputs, target in lots:
            loss(model, inputs[0] if len(inputs) == 1 else tuple(inputs), target).backward()
            found = lots.run._lot.clipped()
            found = found._replace(sums={name: one.clone() for name, one in found.sums.items()})
            optimizer.step()
    finally:
        lots.close()
    return found


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
