"""What torch's functions do, by their names: who reads, who writes, who draws, who keeps what it sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from terrine.errors import InvalidArgument


def tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return every tensor among the values, and in lists, tuples and dicts among them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors(value)
        elif isinstance(value, dict):
            found += tensors(value.values())
    return found


def keeps_what_it_sees(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return what a function of torch's writes by itself, into a table or running statistics; "" for nothing.

    Neither is written to in the call's name, so nothing else would tell.
    """
    if name in ("embedding", "embedding_bag"):
        return "max_norm changes the rows that are read" if _argument(args, kwargs, 3, "max_norm") is not None else ""
    if name not in ("batch_norm", "instance_norm") or _argument(args, kwargs, 1, "running_mean") is None:
        return ""
    is_batch = name == "batch_norm"
    learns = _argument(args, kwargs, 5, "training" if is_batch else "use_input_stats", not is_batch)
    return "running statistics are kept" if learns else ""


def _argument(args: Sequence[Any], kwargs: Mapping[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)


def check_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that somebody listens to: a hook would see, and could change, single examples' gradients.

    Raises: InvalidArgument
    """
    heard = [name for name, parameter in parameters.items() if getattr(parameter, "_backward_hooks", None)]
    if heard:
        raise InvalidArgument(
            f"{heard[0]}: a hook on the parameter would see single examples' gradients; want it removed, and the noisy "
            "gradient read from .grad"
        )


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, each once, by its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def return_same(tensor: Tensor) -> Tensor:
    """Return the tensor itself."""
    return tensor


def is_matrix(params: Mapping[Any, Any]) -> bool:
    """Whether every parameter of a call but the first argument is a matrix, and there are two of them at most."""
    return all(view.value.dim() == 2 for place, view in params.items() if place != 0) and len(params) <= 2


def shares_older_memory(result: Any, given: list[Tensor], key: object) -> bool:
    """Whether a result lies in the memory of a tensor that was given and that this program has not made."""
    older = [tensor for tensor in given if getattr(tensor, MADE, None) is not key]
    return any(new is tensor or _storage(new) is _storage(tensor) for new in tensors((result,)) for tensor in older)


def _storage(tensor: Tensor) -> Any:
    """The memory of a tensor; None of sparse ones, and of those inside the transforms of torch.func."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def is_transformed(tensor: Tensor) -> bool:
    """Whether a tensor is one that a transform of torch.func, inside the program, has made."""
    return tensor.layout is torch.strided and _storage(tensor) is None


def writes_in_place(name: str) -> bool:
    plain = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    return plain or name == "__setitem__" or name.startswith("__i")


TAG, MADE = "_terrine_examples", "_terrine_made"
TURNS = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})  # attributes that are functions of the tensor
METADATA = frozenset({"dim", "size", "__len__", "stride", "numel", "is_contiguous", "is_floating_point", "ndimension"})
HOOKS = frozenset({"register_hook", "retain_grad", "register_post_accumulate_grad_hook"})
PRODUCTS = frozenset({"matmul", "__matmul__", "mm", "addmm"})
MEMORY = frozenset({"numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "__reduce_ex__"})
MEMORY |= {"as_strided", "as_strided_", "as_strided_scatter", "set_"}
TRUTHS = frozenset({"__bool__", "__index__", "__contains__", "equal", "allclose", "is_nonzero"})
VALUES = frozenset({"item", "tolist", "__float__", "__int__", "__complex__", "__repr__", "__format__", "numpy"})
VALUES |= {"__array__", "__dlpack__", "__reduce_ex__"}
SPOKEN = {
    "__float__": "float()",
    "__int__": "int()",
    "__complex__": "complex()",
    "__array__": "numpy",
    "numpy": "numpy",
}
SPOKEN |= {"__repr__": "printing", "__format__": "printing", "__dlpack__": "dlpack", "__reduce_ex__": "pickling"}
DRAWS = frozenset(
    {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "rand_like", "randn_like", "randint_like"}
    | {"uniform", "exponential", "geometric", "cauchy", "log_normal", "random", "poisson", "multinomial"}
)
FACTORIES = (
    DRAWS | {"zeros", "ones", "full", "empty", "tensor"} | {"zeros_like", "ones_like", "full_like", "empty_like"}
)
FACTORIES |= {"new_zeros", "new_ones", "new_full", "new_empty", "clone"}
