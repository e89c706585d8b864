"""What has to fit before a private run begins: model, optimizer and mode, each mistake met in one sentence."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.functions import trained


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module itself, without what distributes or compiles it as a whole.

    Raises:
        InvalidArgument: it is no module, or a part of it is compiled, which hides what clipping needs to see.
    """
    if not isinstance(model, nn.Module):
        raise InvalidArgument(f"model: want a torch.nn.Module, got {type(model).__name__}; the model comes first")
    if isinstance(model, DistributedDataParallel | nn.DataParallel):
        model = model.module
    if type(model).__name__ == "OptimizedModule":
        model = model._orig_mod  # type: ignore[assignment]
    compiled = [path for path, part in model.named_modules() if getattr(part, "_compiled_call_impl", None) is not None]
    if compiled:
        raise InvalidArgument(f"{compiled[0] or 'model'}: compiled in place by .compile(); want it before that")
    return model


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """Return the optimizer itself, without what a library wraps it in.

    Refuse one that is not of the model's trained parameters.

    Raises: InvalidArgument
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        optimizer = inner  # such as accelerate's
    if not isinstance(optimizer, Optimizer):
        raise InvalidArgument(f"optimizer: want a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, LBFGS):
        raise InvalidArgument("LBFGS looks at a lot several times a step; want a first-order optimizer such as SGD")
    held = {id(one) for group in optimizer.param_groups for one in group["params"]}
    named = dict(model.named_parameters())
    own = {id(one) for one in named.values()}
    if not any(one.requires_grad for one in named.values()):
        raise InvalidArgument("the model has no parameter that requires a gradient: there is nothing to train")
    if strange := len(held - own):
        hint = "; sgd.fix(model) returns a copy: make the optimizer of that" if not held & own else ""
        raise InvalidArgument(
            f"the optimizer holds {strange} parameters that the model does not: want the model's own{hint}"
        )
    idle = [name for name, one in named.items() if one.requires_grad and id(one) not in held]
    if idle:
        raise InvalidArgument(
            f"the optimizer lacks {', '.join(idle[:5])}{' ...' if len(idle) > 5 else ''}: want every trained one; "
            "freeze the others with requires_grad_(False)"
        )
    return optimizer


def check_mode(model: nn.Module) -> None:
    """Refuse a model in eval mode: most often it was forgotten there.

    Raises: InvalidArgument
    """
    if not model.training:
        raise InvalidArgument("the model is in eval mode: want model.train() before the next step")


def check_parameters(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse a step where other parameters are trained than when the run began: they would have no gradient.

    Raises: InvalidArgument
    """
    present = trained(model)
    if {id(one) for one in present.values()} != {id(one) for one in parameters.values()}:
        changed = sorted({name for name, _ in set(parameters.items()) ^ set(present.items())})
        raise InvalidArgument(
            f"{', '.join(changed[:5])}{' ...' if len(changed) > 5 else ''}: added, replaced, frozen or unfrozen during "
            "the run; want the parameters that are trained settled before private_steps"
        )
