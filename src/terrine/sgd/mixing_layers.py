"""What may not be trained privately: layers through which one example reaches another, or around the clipping.

Clipping bounds what one example adds to the sum only while an example's gradient depends on that example alone.
Batch statistics break this for every example of the lot; so does anything that rescales by how often other
examples use a row. All offenders are named in one error, by path.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from terrine.errors import InvalidArgument

log = logging.getLogger("terrine.sgd")


def validate(model: nn.Module) -> None:
    """Refuse a model that mixes examples.

    Raises: InvalidArgument naming every offender by path, with its remedy.
    """
    if not any(map(_fault, _modules(model))):  # every step asks: paths are for those who need them
        return
    found = [f"{path or 'the model itself'}: {fault}" for path, fault in faults(model)]
    if found:
        raise InvalidArgument(
            f"{len(found)} part{'s' * (len(found) > 1)} of the model cannot be trained privately: {'; '.join(found)}"
        )


def faults(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Every part that cannot be trained privately, as (path, what is wrong and what to do)."""
    for path, module in model.named_modules():
        fault = _fault(module)
        if fault:
            yield path, f"{type(module).__name__} {fault}"


def fix(model: nn.Module) -> nn.Module:
    """A copy of `model` in which what has a standard replacement is replaced; each change is logged.

    Batch normalisation becomes group normalisation with the same scale and shift; running statistics of instance
    normalisation and sparse, renormalised or frequency-scaled embeddings are switched off.
    """
    model = copy.deepcopy(model)
    made: dict[nn.Module, nn.Module | None] = {}  # a module of several names stays one
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module not in made:
            made[module] = _replacement(module)
        replacement = made[module]
        if replacement is None:
            continue
        log.warning("fix: %s: %s becomes %s", path or "the model itself", module, replacement)
        if not path:
            return replacement
        above, _, name = path.rpartition(".")
        setattr(model.get_submodule(above), name, replacement)
    return model


def _modules(model: nn.Module) -> list[nn.Module]:
    """Every module once, in no particular order."""
    found, seen = [model], {id(model)}
    for module in found:
        for child in module._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


def _is_sharded(parameter: nn.Parameter | None) -> bool:
    """Whether other processes hold a part of it: a DTensor, which lies on a mesh of devices."""
    return parameter is not None and hasattr(parameter, "device_mesh")


def _fault(module: nn.Module) -> str:
    kind: Any = type(module)
    if _is_suspect(kind) and (fault := _own_fault(module)):
        return fault
    if "_orig_mod" in module._modules:
        return "is the output of torch.compile, whose layers cannot be watched; give the model before compiling it"
    if kind.__name__ == "FullyShardedDataParallel" or any(map(_is_sharded, module._parameters.values())):
        return "is sharded (FSDP): no process has an example's whole gradient to clip; use DistributedDataParallel"
    if any(one is not None and nn.parameter.is_lazy(one) for one in module._parameters.values()):
        return "is not initialised yet; run it on one example first"
    if any(one is not None and one.is_complex() and one.requires_grad for one in module._parameters.values()):
        return "has complex parameters, whose gradients are not clipped; keep real and imaginary parts as two real ones"
    return ""


@lru_cache(maxsize=1024)
def _is_suspect(kind: type[nn.Module]) -> bool:
    return issubclass(kind, _SUSPECT)


_SUSPECT = (_BatchNorm, _InstanceNorm, nn.Embedding, nn.EmbeddingBag, torch.jit.ScriptModule, nn.DataParallel)


def _own_fault(module: nn.Module) -> str:
    """The fault of a module of a suspect class, if it has one."""
    if isinstance(module, _BatchNorm):
        frozen = not module.training and not any(p.requires_grad for p in module.parameters())
        return "" if frozen else "mixes examples; sgd.fix(model) makes it a GroupNorm"
    if isinstance(module, _InstanceNorm):
        tracks = module.track_running_stats
        return "keeps statistics of the examples; sgd.fix(model) switches them off" if tracks else ""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return _table_fault(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "is compiled where its layers cannot be watched; give the Python module"
    return "splits lots between devices; give the module inside"


def _table_fault(module: nn.Embedding | nn.EmbeddingBag) -> str:
    remedy = "; sgd.fix(model) switches it off"
    if module.max_norm is not None:
        return "changes its rows by max_norm without noise" + remedy
    if module.scale_grad_by_freq:
        return "scales gradients by how often other examples use a row" + remedy
    return "has sparse gradients, whose zeros show who was absent" + remedy if module.sparse else ""


def _replacement(module: nn.Module) -> nn.Module | None:
    if not _fault(module):
        return None
    if isinstance(module, _BatchNorm):
        return _grouped(module)
    if isinstance(module, _InstanceNorm):
        plain = copy.deepcopy(module)
        plain.track_running_stats = False
        plain.running_mean = plain.running_var = plain.num_batches_tracked = None
        return plain
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        plain_table = copy.deepcopy(module)
        plain_table.max_norm, plain_table.scale_grad_by_freq, plain_table.sparse = None, False, False
        return plain_table
    return None


def _grouped(module: _BatchNorm) -> nn.GroupNorm:
    """Up to 32 groups that divide the channels; the scale and shift that were learned stay."""
    channels = module.num_features
    result = nn.GroupNorm(math.gcd(32, channels), channels, eps=module.eps, affine=module.affine)
    if module.affine:
        result.load_state_dict({"weight": module.weight.detach(), "bias": module.bias.detach()})
        result.weight.requires_grad_(module.weight.requires_grad)
        result.bias.requires_grad_(module.bias.requires_grad)
        result.to(module.weight.device, module.weight.dtype)
    return result.train(module.training)
