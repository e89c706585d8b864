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
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_leaves

from terrine.errors import InvalidArgument
from terrine.sgd.sharding import is_part

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


def fix(model: nn.Module, *, example: Any = None) -> nn.Module:
    """A copy of `model` in which what has a standard replacement is replaced; each change is logged.

    Batch normalisation becomes group normalisation with the same scale and shift, of at least two values a group; an
    activation that a class computes with it stays. Running statistics of instance normalisation and sparse,
    renormalised or frequency-scaled embeddings are switched off. What is left is for `validate` to name.

    Args:
        model: The model; it stays as it is.
        example: Inputs of one example, as a batch of one: a tuple is positional arguments, a dict keyword arguments.
            One forward and one backward pass of the copy are tried on it.

    Returns:
        The copy. Where nothing had to be replaced it is equal to the model.

    Raises:
        InvalidArgument: Batch normalisation of a class that is not understood, or with too few channels to normalise
            over, by path; or a pass that fails on `example`.

    Example:
        >>> fixed = fix(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), example=torch.randn(1, 3, 9, 9))
        >>> fixed[1].num_groups
        4
    """
    model = copy.deepcopy(model)
    replacements: dict[nn.Module, nn.Module | None] = {}  # a module of several names stays one
    paths = [(path, module) for path, module in model.named_modules(remove_duplicate=False) if _fault(module)]
    refused = [f"{path or 'the model itself'}: {why}" for path, module in paths if (why := _refusal(module))]
    if refused:
        raise InvalidArgument(f"fix: {'; '.join(refused)}")
    for path, module in paths:
        if module not in replacements:
            replacements[module] = _replacement(module)
        replacement = replacements[module]
        if replacement is None:
            continue
        names = (" ".join(str(one).split()) for one in (module, replacement))
        log.warning("fix: %s: %s becomes %s", path or "the model itself", *names)
        if not path:
            model = replacement
            break
        above, _, name = path.rpartition(".")
        setattr(model.get_submodule(above), name, replacement)
    if example is not None:
        _try_passes(copy.deepcopy(model), example)
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


def _fault(module: nn.Module) -> str:
    kind: Any = type(module)
    if _is_suspect(kind) and (fault := _own_fault(module)):
        return fault
    if "_orig_mod" in module._modules:
        return "is the output of torch.compile, whose layers cannot be watched; give the model before compiling it"
    if kind.__name__ == "FullyShardedDataParallel":
        return "flattens parameters, whose examples cannot be told apart; use torch.distributed.fsdp.fully_shard"
    if any(map(is_part, module._parameters.values())):
        return "is sharded, so no process has an example's whole gradient; give it to private_steps, which gathers it"
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
        frozen = not module.training and module.running_mean is not None
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


def _refusal(module: nn.Module) -> str:
    """Why a module cannot be replaced though its fault is one that has a replacement; "" where it can."""
    name = type(module).__name__
    if not isinstance(module, _BatchNorm):
        known = type(module) in (*_INSTANCE_NORMS, *_TABLES) or not isinstance(module, (_InstanceNorm, *_TABLES))
        return "" if known else f"{name} is a class of its own, which is not understood; switch it off where it is made"
    if type(module) not in _NORMS and not _is_norm_and_activation(module):
        return (
            f"{name} is batch normalisation with a forward pass of its own, which is not understood; "
            "put nn.GroupNorm, and what else it does, in its place"
        )
    if isinstance(module, nn.BatchNorm1d) and module.num_features < 2:
        return f"{name} of one value: normalised within an example it is constant; remove it"
    return ""


def _replacement(module: nn.Module) -> nn.Module | None:
    if isinstance(module, _BatchNorm):
        group = _make_group_norm(module)
        parts = [group, *(part for part in module.children() if not isinstance(part, nn.Identity))]
        return group if len(parts) == 1 else nn.Sequential(*parts).train(module.training)
    if type(module) in _INSTANCE_NORMS:
        plain: Any = copy.deepcopy(module)
        plain.track_running_stats = False
        plain.running_mean = plain.running_var = plain.num_batches_tracked = None
        return plain  # type: ignore[no-any-return]
    if type(module) in _TABLES:
        table: Any = copy.deepcopy(module)
        table.max_norm, table.scale_grad_by_freq, table.sparse = None, False, False
        return table  # type: ignore[no-any-return]
    return None


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def _is_norm_and_activation(module: _BatchNorm) -> bool:
    """Whether a class is batch normalisation, then `drop`, then `act`, as timm's BatchNormAct2d: tried on random input.

    What it does in training mode may only differ by the statistics and by what is dropped.
    """
    names = [name for name, _ in module.named_children()]
    trial: Any = copy.deepcopy(module).eval()
    if names not in (["act"], ["drop", "act"]) or trial.running_mean is None:
        return False
    sizes = (2, module.num_features, *[4] * (1 if isinstance(module, nn.BatchNorm1d) else 2))
    given = torch.randn(sizes, generator=torch.Generator().manual_seed(0)).to(trial.running_mean)
    with torch.no_grad():
        plain = functional.batch_norm(
            given, trial.running_mean, trial.running_var, trial.weight, trial.bias, False, 0.0, trial.eps
        )
        try:
            return torch.allclose(trial(given), trial.act(plain), atol=1e-5)
        except Exception:  # whatever it is, it is not understood
            return False


def _make_group_norm(module: _BatchNorm) -> nn.GroupNorm:
    """Group normalisation of as many channels; the scale and shift that were learned stay."""
    channels = module.num_features
    result = nn.GroupNorm(_count_groups(module), channels, eps=module.eps, affine=module.affine)
    if module.affine:
        result.load_state_dict({"weight": module.weight.detach(), "bias": module.bias.detach()})
        result.weight.requires_grad_(module.weight.requires_grad)
        result.bias.requires_grad_(module.bias.requires_grad)
        result.to(module.weight.device, module.weight.dtype)
    return result.train(module.training)


def _count_groups(module: _BatchNorm) -> int:
    """At most 32 groups of at least two channels; of four where a channel may have but one value."""
    channels = module.num_features
    if isinstance(module, nn.BatchNorm1d):
        return max(
            groups for groups in range(1, 33) if groups == 1 or (channels % groups == 0 and channels >= 4 * groups)
        )
    groups = math.gcd(32, channels)
    while groups > 1 and channels < 2 * groups:
        groups //= 2
    return groups


def _try_passes(model: nn.Module, example: Any) -> None:
    """One forward and one backward pass on one example.

    Raises: InvalidArgument, with what failed.
    """
    arguments = example if isinstance(example, tuple) else ()
    named = example if isinstance(example, dict) else {}
    with torch.enable_grad():
        try:
            outputs = model(*arguments, **named) if arguments or named else model(example)
        except Exception as failure:
            raise InvalidArgument(f"fix: the forward pass of one example fails: {_first_line(failure)}") from failure
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if not leaves:
            raise InvalidArgument("fix: no output of the model depends on a trained parameter; want one that does")
        try:
            torch.autograd.backward(leaves, [torch.ones_like(leaf) for leaf in leaves])
        except Exception as failure:
            raise InvalidArgument(f"fix: the backward pass of one example fails: {_first_line(failure)}") from failure
    broken = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if broken:
        raise InvalidArgument(f"fix: the gradient of one example is not finite for {', '.join(broken)}")


def _first_line(failure: Exception) -> str:
    return next(iter(str(failure).splitlines()), "") or type(failure).__name__
