"""The first lot's trial: two examples alone against the same two in company, their gradients included.

    alone       the gradient of <v_i, model(x_i)> by plain autograd, for a fixed random v_i
    followed    what the tape makes of it in company: its norm and the gradient itself
    together    the plain gradient of sum_i <v_i, model(x)_i>

Where followed = alone, the model may be clipped by what the tape sees. Where it is not, but together = sum of alone,
examples are apart and the tape misunderstood an operation: such a model is clipped the slow, exact way. Anything else
mixes examples, and no clipping of it is private.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointError

from terrine.errors import InvalidArgument, TerrineError
from terrine.sgd import generators, pages
from terrine.sgd.clipping import constants
from terrine.sgd.clipping.axis import Unfollowed
from terrine.sgd.clipping.constants import Constant
from terrine.sgd.clipping.contribution import Contribution
from terrine.sgd.clipping.examples import tensors
from terrine.sgd.clipping.registry import own_rules
from terrine.sgd.clipping.tape import ANCHOR, Tape
from terrine.sgd.reduction import close

COMPANY = 6
"""Examples that are tried together."""
CLOSE, ROUGH = 0.02, 0.2
"""What rounding may change in a gradient, in single precision and in half."""
NEAR = 1e-3
"""What it may change in an output in single precision."""
FOUND = 1e-6
"""How much of a gradient may belong to parameters of which nothing was seen: however small, they would never learn."""

_seen: weakref.WeakKeyDictionary[nn.Module, dict[Any, str]] = weakref.WeakKeyDictionary()


def misunderstood(model: nn.Module, parameters: dict[str, nn.Parameter], args: Any, kwargs: Any, size: int) -> str:
    """What the tape does not understand of the model, or ""; tried once for each of its modes, on two or more examples.

    Raises: InvalidArgument where one example's output or gradient depends on another, or where the model keeps
        something of the examples.
    """
    known = _seen.setdefault(model, {})
    key = model.training, len(parameters), torch.is_autocast_enabled("cpu")
    if key not in known:
        if size < 2 or not parameters or not _can_be_cut(model, (args, kwargs), size):
            return ""
        many = min(size, COMPANY)
        with pages.aside(), _steady(model), torch.enable_grad():
            known[key] = _tried(model, parameters, _picked((args, kwargs), size, many), many)
    return known[key]


def compared(model: nn.Module, parameters: dict[str, nn.Parameter], args: Any, kwargs: Any, size: int) -> bool:
    """Whether a few examples of this lot could be compared, alone against in company, and are the same.

    Raises: InvalidArgument where they are not.
    """
    if size < 2 or not _can_be_cut(model, (args, kwargs), size):
        return False
    many = min(size, COMPANY)
    with pages.aside(), _steady(model), torch.enable_grad():
        return _Trial(model, parameters, _picked((args, kwargs), size, many), many).result() is not None


def _tried(model: nn.Module, parameters: dict[str, nn.Parameter], given: Any, many: int) -> str:
    """The trial's result; where it is not good, that of a trial in double precision, if the model can do that."""
    try:
        result = _Trial(model, parameters, given, many).result()
    except InvalidArgument as refusal:
        result = _in_double(model, parameters, given, many)
        if result is None:
            raise refusal from None
    else:
        if result:
            precise = _in_double(model, parameters, given, many)
            result = result if precise is None else precise
    return result or ""


def _in_double(model: nn.Module, parameters: dict[str, nn.Parameter], given: Any, many: int) -> str | None:
    """The result with all numbers in double precision: rounding is no mixing. None where that cannot be done."""

    def double(leaf: Any) -> Any:
        return leaf.detach().double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    if all(one.dtype is torch.float64 for one in parameters.values()) or torch.is_autocast_enabled("cpu"):
        return None
    wide = {name: nn.Parameter(double(one), requires_grad=name in parameters) for name, one in model.named_parameters()}
    buffers = {name: double(one) for name, one in model.named_buffers()}
    with _reparametrize_module(model, {**wide, **buffers}, tie_weights=True):
        return _Trial(model, {name: wide[name] for name in parameters}, pytree.tree_map(double, given), many).result()


def _can_be_cut(model: nn.Module, given: Any, size: int) -> bool:
    """Whether rows are examples, and not bags between offsets."""
    leaves = [leaf for leaf in tensors(given) if leaf.dim()]
    flat = [leaf for leaf in leaves if leaf.dim() == 1 and not leaf.is_floating_point()]
    bags = any(len(leaf) != size or torch.equal(leaf, torch.arange(size).to(leaf)) for leaf in flat)
    bags = bags and any(isinstance(module, nn.EmbeddingBag) for module in model.modules())
    return not bags and any(len(leaf) == size for leaf in leaves)


def _picked(given: Any, size: int, many: int) -> Any:
    """A few examples from all over the lot."""
    places = torch.linspace(0, size - 1, many).round().long()
    return pytree.tree_map(lambda leaf: leaf.detach()[places] if _has_rows(leaf, size) else leaf, given)


def _has_rows(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size


class _Incomparable(Exception):
    """So few examples give nothing that could be compared."""


class _Trial:
    """The model on a few examples."""

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter], given: Any, many: int) -> None:
        self._model, self._parameters, self._given, self._many = model, parameters, given, many
        self._buffers = {name: one.detach().clone() for name, one in model.named_buffers()}
        self._kept: dict[str, Tensor] | None = None
        self._together: list[Tensor] = []
        self._towards: list[Tensor] = []

    def result(self) -> str | None:
        """What the tape does not understand, if anything; None where nothing can be compared."""
        before = torch.get_rng_state()
        company, alone = constants.Noted(), constants.Noted()
        try:
            with company:
                self._together = self._outputs(self._given, self._many)
        except _Incomparable:
            return None  # not for so few; what is wrong with it shows when the lot runs
        if not self._together or not torch.equal(before, torch.get_rng_state()):
            return None  # a loss of its own, which is tried elsewhere; or draws of its own, which differ in company
        numbers = torch.Generator().manual_seed(7)
        self._towards = [torch.randn(out.shape, generator=numbers).to(out) for out in self._together]
        try:
            with alone:
                self._alone(0)
            self._alone(self._many - 1)
            made = constants.told_apart(company.made, alone.made, self._many)
            constants.keep(self._model, made)
            contributions, squares = self._followed(made)
        except _Incomparable:
            return None
        except (Unfollowed, CheckpointError) as reason:
            return str(reason).splitlines()[0]
        if all(self._is_same(i, contributions, float(squares[i])) for i in (0, self._many - 1)):
            return ""
        del contributions
        if not self._is_apart():
            raise self._mixes("gradients")
        return "its gradients are not what was seen of them"

    def _outputs(self, given: Any, many: int) -> list[Tensor]:
        """What the model gives for every example; hooks of its own are not run, buffers are put back."""
        try:
            leaves = pytree.tree_leaves(self._model.forward(*given[0], **given[1]))
        except (RuntimeError, ValueError, IndexError) as failure:
            if isinstance(failure, TerrineError | CheckpointError):
                raise
            raise _Incomparable from failure
        self._put_back()
        real = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim()]
        if many > 1 and real and not any(many in leaf.shape for leaf in real):
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in real)
            raise InvalidArgument(
                f"the model's output for {many} examples has shape {shapes}: want them as its first dimension"
            )
        return [leaf for leaf in leaves if _has_rows(leaf, many) and leaf.is_floating_point() and leaf.requires_grad]

    def _put_back(self) -> None:
        """Put buffers back.

        Raises: InvalidArgument where they are not what they were after the pass before: what they keep is data.
        """
        now = {name: one for name, one in self._model.named_buffers() if name in self._buffers}
        kept = {
            name: one.detach().clone()
            for name, one in now.items()
            if one.is_floating_point() and not torch.equal(one, self._buffers[name])
        }
        with torch.no_grad():
            for name, one in now.items():
                if not torch.equal(one, self._buffers[name]):
                    one.copy_(self._buffers[name])
        before, self._kept = self._kept, kept
        strange = [name for name, one in kept.items() if before is not None and not _equal(before.get(name), one)]
        if strange:
            raise InvalidArgument(
                f"{', '.join(strange)}: a buffer that keeps something of the examples, which no noise protects; "
                "want a model whose forward pass leaves its buffers alone"
            )

    def _alone(self, i: int) -> list[Tensor]:
        """The outputs of example i.

        Raises: InvalidArgument where they are others than in company.
        """
        row = pytree.tree_map(lambda leaf: leaf[i : i + 1] if _has_rows(leaf, self._many) else leaf, self._given)
        alone = self._outputs(row, 1)
        if [out.shape[1:] for out in alone] != [out.shape[1:] for out in self._together]:
            raise _Incomparable
        for one, out in zip(alone, self._together, strict=True):
            if not close(one.detach(), out.detach()[i : i + 1], ROUGH if _is_half(one) else NEAR):
                raise self._mixes("outputs")
        return alone

    def _gradient(self, i: int | None = None) -> list[Tensor | None]:
        """The gradient of example i, or of all together, by plain autograd."""
        outputs = self._together if i is None else self._alone(i)
        towards = self._towards if i is None else [v[i : i + 1] for v in self._towards]
        return list(torch.autograd.grad(outputs, list(self._parameters.values()), towards, allow_unused=True))

    def _followed(self, made: tuple[Constant, ...]) -> tuple[dict[str, Contribution], Tensor]:
        """What the tape has of all examples, and their squared norms."""
        tape = Tape(self._parameters, self._many, constants=made)
        tape.mark(tensors(self._given))
        with own_rules(self._model, tape), tape:
            outputs = self._outputs(self._given, self._many)
        if len(outputs) != len(self._together):
            raise Unfollowed("an operation that takes its result out of sight")
        found = torch.autograd.grad(outputs, [ANCHOR, *self._parameters.values()], self._towards, allow_unused=True)
        if any(gradient is not None for gradient in found[1:]):
            raise Unfollowed("a parameter was used where the tape cannot see it")
        with torch.no_grad():
            contributions, squares = tape.finish()
            norms = torch.zeros(self._many) if not squares else torch.stack(list(squares.values())).sum(0)
            broken = ~torch.isfinite(norms)
            if broken.any():
                contributions = {name: part.drop(broken) for name, part in contributions.items()}
        return contributions, norms

    def _is_same(self, i: int, parts: dict[str, Contribution], found: float) -> bool:
        """Whether example i's norm and gradient were followed, but for rounding; what is not finite is not compared."""
        only = torch.zeros(self._many)
        only[i] = 1.0
        norm = difference = lost = 0.0
        gradients = self._gradient(i)
        owners = Counter(_memory(one) for one in gradients if one is not None)
        for (name, parameter), gradient in zip(self._parameters.items(), gradients, strict=True):
            rest = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
            rest = rest.clone() if owners[_memory(rest)] > 1 else rest
            rest = rest.to(torch.promote_types(rest.dtype, torch.float32))
            square = _square(rest)
            norm += square
            if name in parts:
                parts[name].add_to(rest, -only.to(rest))
            else:
                lost += square
            difference += _square(rest)
        if not math.isfinite(norm + found):
            return True
        reach = self._close() * math.sqrt(norm) + 1e-20
        if math.sqrt(lost) > FOUND * math.sqrt(norm):
            return False
        return found >= 0.0 and abs(math.sqrt(found) - math.sqrt(norm)) <= reach and math.sqrt(difference) <= reach

    def _is_apart(self) -> bool:
        """Whether the gradient of all examples together is the sum of each one's alone."""
        pairs = zip(self._parameters.values(), self._gradient(), strict=True)
        rest = [torch.zeros_like(parameter) if one is None else one for parameter, one in pairs]
        size = math.sqrt(sum(map(_square, rest)))
        for i in range(self._many):
            for one, gradient in zip(rest, self._gradient(i), strict=True):
                _ = one if gradient is None else one.sub_(gradient)
        return math.sqrt(sum(map(_square, rest))) <= self._many * self._close() * size + 1e-20

    def _close(self) -> float:
        return ROUGH if any(_is_half(out) for out in self._together) else CLOSE

    def _mixes(self, what: str) -> InvalidArgument:
        return InvalidArgument(
            f"{type(self._model).__name__}: the {what} for one example change in company: the model mixes examples, so "
            "no clipping bounds one of them; look for statistics or comparisons over the first dimension"
        )


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))) ** 2


def _is_half(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _equal(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and one.shape == other.shape and torch.allclose(one, other, equal_nan=True)


@contextmanager
def _steady(model: nn.Module) -> Iterator[None]:
    """Within, nothing is left out at random, and no draw is missed afterwards."""
    still = [module for module in model.modules() if isinstance(module, _DROPPING) and module.training]
    for module in still:
        module.training = False
    try:
        with generators.untouched(), _Undropped():
            yield
    finally:
        for module in still:
            module.training = True


_DROPPING = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.RNNBase)


class _Undropped(TorchFunctionMode):
    """Dropout passes everything on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if "dropout" in name and not name.startswith("_"):
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            args, kwargs = (
                (args, {**kwargs, "dropout_p": 0.0}) if len(args) < 5 else ((*args[:4], 0.0, *args[5:]), kwargs)
            )
        return func(*args, **kwargs)
