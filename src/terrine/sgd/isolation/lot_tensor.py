"""Tensors of a lot: each says what it holds of the examples, and its loss goes backward only if it is a total.

The model itself runs every example alone (`clipping/alone.py`). What an ordinary loop does outside it, before the
model and on the way to the loss, is followed call by call: by descent from the lot, never by a length that happens to
fit. Operations of the table pass it on; any other is computed under `torch.vmap` over the examples, and counts as
mixing where that is not what it gives for the lot. What is read into Python, or copied into a plain tensor by numpy or
`torch.tensor`, is not followed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils import _pytree as pytree

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.examples import keeps_what_it_sees, tensors
from terrine.sgd.isolation import operations  # noqa: F401  fills the table
from terrine.sgd.isolation.call import TABLE, Call, Mixed, Mixes, Rows, Status, Total, holds, is_plain, names
from terrine.sgd.isolation.losses import COMPUTED
from terrine.sgd.isolation.totals import combined, is_ours, linear

log = logging.getLogger("terrine.sgd")


class Out(Protocol):
    """The lot that is handed out; `loss` is its loss by a criterion that was given beforehand."""

    size: int
    number: int  # a later lot's is larger
    loss: Any
    outputs: set[Any]  # the autograd nodes of the model's outputs

    def backward(self, totals: Sequence[Total]) -> AbstractContextManager[None]:
        """Within, gradients are taken in: a backward pass from these totals."""
        ...


class LotTensor(Tensor):
    """A tensor that descends from a lot."""

    lot: Out
    status: Status

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
            if name not in _VALUES:
                return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if name in _METADATA:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return _followed(func, name, args, kwargs)

    def as_subclass(self, _cls: Any) -> Any:
        """Refused: what is not followed could let examples meet."""
        raise InvalidArgument(
            "as_subclass: a tensor of a private lot stays one; want operations that keep examples apart"
        )

    def __copy__(self) -> LotTensor:
        return handed(plain(self), self.lot, self.status)

    def __deepcopy__(self, _memo: Any) -> LotTensor:
        return handed(plain(self).detach().clone(), self.lot, self.status)

    def __reduce_ex__(self, _protocol: Any) -> Any:
        raise InvalidArgument(
            "a tensor of a private lot is not saved or sent; what is read of it would not be followed"
        )

    def __format__(self, form: str) -> str:
        _say_read("format")
        return str(plain(self).detach().__format__(form))


def handed(tensor: Tensor, lot: Out, status: Status) -> LotTensor:
    """`tensor` as one of the lot."""
    made = tensor.as_subclass(LotTensor)
    made.lot, made.status = lot, status
    return made


def plain(tensor: Tensor) -> Tensor:
    """The same as an ordinary tensor."""
    return Tensor.as_subclass(tensor, Tensor) if isinstance(tensor, LotTensor) else tensor


def _followed(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    given = tensors((*args, *kwargs.values()))
    lots = [one for one in given if isinstance(one, LotTensor)]
    lot = max((one.lot for one in lots), key=lambda lot: lot.number)
    if name == "__set__":
        attribute = getattr(func.__self__, "__name__", "")
        if attribute == "_backward_hooks" and args[1] is None:  # torch's own, of what was written to in place
            return None
        if attribute != "requires_grad":
            raise InvalidArgument(f"an attribute set at {place()}: the tensors of a lot stay what they are")
        return func(plain(args[0]), *args[1:])
    if name in _REFUSED or keeps_what_it_sees(name, args, kwargs):
        raise InvalidArgument(f"{name} at {place()}: {_REFUSED.get(name, _STATISTICS)}")
    bare = {id(one): plain(one) for one in lots}
    known: dict[int, Status] = {id(bare[id(one)]): one.status for one in lots}
    own, options = pytree.tree_map(lambda leaf: bare.get(id(leaf), leaf), (tuple(args), kwargs))
    if name == "backward":
        return _backward(func, lots, lot, own, options)
    if name in _READS:
        _say_read(name)
        return func(*own, **options)
    call = Call(func, name, own, options, lot.size, known)
    if any(one.lot is not lot for one in lots):
        known.update(dict.fromkeys(known, _mixed(call, "tensors of two lots meet; want numbers kept by .item()")))
    if options.get("out") is not None:
        raise InvalidArgument(f"{name}(out=) at {place()}: want a result of its own; the lot's are followed")
    if base := _written_to(name):
        return _write(call, base, args[0])
    public = [(one, one._version) for one in call.operands if id(one) not in known]
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):  # nobody else's, which could mix what is saved
        result, status = _computed(call)
    if any(one._version != version for one, version in public):
        raise InvalidArgument(f"{name} at {place()}: {_STATISTICS}")
    several = status if isinstance(status, list) else None
    place_of = iter(several) if several is not None else None

    def tag(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        found = next(place_of) if place_of is not None else status
        if isinstance(found, Rows) and not holds(leaf.shape, found, lot.size):
            found = _mixed(call, "a result that does not hold the examples")
        return handed(leaf, lot, found)

    return pytree.tree_map(tag, result)


def _computed(call: Call) -> tuple[Any, Any]:
    """The result of a call, and what it holds of the examples."""
    for status in call.known.values():
        if isinstance(status, Mixed):
            return call.func(*call.args, **call.kwargs), status
    if torch.is_grad_enabled() and any(one.requires_grad and id(one) not in call.known for one in call.operands):
        why = "a parameter outside the model's forward pass; want it inside, or frozen by requires_grad_(False)"
        return call.func(*call.args, **call.kwargs), _mixed(call, why)
    summed = any(isinstance(status, Total) for status in call.known.values())
    try:
        if summed:
            return combined(call)
        if call.name in COMPUTED:
            return COMPUTED[call.name](call)
    except Mixes as why:
        return call.func(*call.args, **call.kwargs), _mixed(call, str(why))
    except _NOT_UNDERSTOOD as error:
        return call.func(*call.args, **call.kwargs), _mixed(call, f"arguments that were not understood: {error}")
    if call.name not in TABLE:
        return _one_by_one(call)
    result = call.func(*call.args, **call.kwargs)
    return result, _ruled(call, result)


def _ruled(call: Call, result: Any) -> Any:
    """What the table says; arguments that a rule does not understand count as mixing."""
    try:
        return TABLE[call.name](call, result)
    except Mixes as why:
        return _mixed(call, str(why))
    except _NOT_UNDERSTOOD as error:
        return _mixed(call, f"arguments that were not understood: {error}")


def _one_by_one(call: Call) -> tuple[Any, Any]:
    """An operation that no rule knows, for every example as a lot of one; mixing where the lot's result is another."""
    result = call.func(*call.args, **call.kwargs)
    places = {status.axis for status in call.known.values() if isinstance(status, Rows)}
    rows = [(one, call.known.get(id(one))) for one in call.operands]
    plainly = all(is_plain(one, status, call.n) for one, status in rows if isinstance(status, Rows))
    outputs, form = pytree.tree_flatten(result)
    expected = [one for one in outputs if one is not None]
    if len(places) != 1 or not plainly or not all(isinstance(one, Tensor) for one in expected):
        return result, _mixed(call, "an operation that is not known to keep examples apart; want it inside the model")
    axis = places.pop()
    leaves, nesting = pytree.tree_flatten((call.args, call.kwargs))
    held = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and call.known.get(id(leaf))]

    def alone(*row: Tensor) -> list[Tensor]:
        given = list(leaves)
        for place, one in zip(held, row, strict=True):
            given[place] = one.unsqueeze(axis)
        args, kwargs = pytree.tree_unflatten(given, nesting)
        return [one for one in pytree.tree_leaves(call.func(*args, **kwargs)) if one is not None]

    rows_of = [leaves[place].movedim(axis, 0) for place in held]
    try:
        apart = torch.vmap(alone, randomness="different")(*rows_of)
    except Exception:  # what vmap cannot do, one example after the other may
        try:
            apart = [torch.stack(several) for several in zip(*map(alone, *rows_of), strict=True)]
        except Exception as failure:
            why = f"for one example alone it fails: {str(failure).splitlines()[0]}; want it inside the model"
            return result, _mixed(call, why)
    joined, statuses = [], []
    for one, whole in zip(apart, expected, strict=True):
        fitting = [at for at in range(one.dim() - 1) if _joined_shape(one, at) == whole.shape]
        at = axis if axis in fitting or not fitting else fitting[0]
        made = one.squeeze(at + 1).movedim(0, at) if fitting else one
        if not fitting or not _is_same(made, whole):
            return result, _mixed(call, "an example alone has another result")
        joined.append(made)
        statuses.append(Rows(at))
    made_of = iter(joined)
    return pytree.tree_unflatten([one if one is None else next(made_of) for one in outputs], form), statuses


def _joined_shape(one: Tensor, axis: int) -> Any:
    """The shape of results (n, ...) of lots of one, side by side along an axis; none where there is not one of it."""
    shape = one.shape[1:]
    return torch.Size((*shape[:axis], len(one), *shape[axis + 1 :])) if shape[axis] == 1 else None


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and _close(one.detach(), other.detach())


def _close(one: Tensor, other: Tensor) -> bool:
    finite = torch.isfinite(one) & torch.isfinite(other)
    one, other = torch.where(finite, one, 0), torch.where(finite, other, 0)
    return bool(torch.allclose(one, other, 1e-3, 1e-5 * max(1.0, float(other.abs().max()) if other.numel() else 1.0)))


def _write(call: Call, base: str, target: Any) -> Any:
    """A call that writes to its first argument, which must hold the same of the examples afterwards."""
    if not isinstance(target, LotTensor):
        raise InvalidArgument(
            f"{call.name} at {place()}: an example is written to a tensor that is not of the lot, where it is not "
            "followed; want a result of its own"
        )
    whole = Call(call.func, base, call.args, call.kwargs, call.n, call.known)
    mixed = next((status for status in call.known.values() if isinstance(status, Mixed)), None)
    summed = any(isinstance(status, Total) for status in call.known.values())
    found: Any = mixed
    if mixed is None and summed:
        found = _total_after(whole)
    elif mixed is None:
        found = _ruled(whole, plain(target)) if base in TABLE else _mixed(call, "an operation that is not known")
    if found != target.status:
        raise InvalidArgument(f"{found if isinstance(found, Mixed) else call.name}: written in place; {_WANTED}")
    with torch.autograd.graph.saved_tensors_hooks(_same, _same):
        call.func(*call.args, **call.kwargs)
    return None if call.name == "__setitem__" else target


def _total_after(call: Call) -> Any:
    """What a total is after a call wrote to it."""
    try:
        return linear(call)
    except Mixes as why:
        return _mixed(call, str(why))


def _backward(func: Any, losses: list[LotTensor], lot: Out, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """`loss.backward()` or `torch.autograd.backward(losses)`, from totals alone."""
    if lot.loss is not None:
        with lot.backward([Total(1.0, is_mean=False)]):
            lot.loss().backward()
        return
    for loss in losses:
        if not isinstance(loss.status, Total):
            what = "it has a number for every example" if isinstance(loss.status, Rows) else loss.status
            raise InvalidArgument(f"the loss mixes examples, so no clipping bounds one of them: {what}; {_WANTED}")
        if own := _own_function(plain(loss).grad_fn, lot.outputs):
            raise InvalidArgument(
                f"{own}: a torch.autograd.Function between the model and the loss, whose backward pass may mix "
                "examples; want it inside the model, or make_private(..., criterion=criterion)"
            )
    further = [value for value in (*args[1:2], kwargs.get("gradient"), kwargs.get("inputs")) if value is not None]
    if further or kwargs.get("create_graph") or (len(args) > 3 and args[3]):
        raise InvalidArgument("backward(gradient=, inputs=, create_graph=): want loss.backward() alone")
    with lot.backward([loss.status for loss in losses if isinstance(loss.status, Total)]):
        func(*args, **kwargs)


def _own_function(node: Any, outputs: set[Any]) -> str:
    """The name of a backward pass that somebody wrote between the loss and the model's outputs; "" for none."""
    seen: set[Any] = set()
    left = [node]
    while left:
        node = left.pop()
        if node is None or node in seen or node in outputs:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction) and not is_ours(node):
            return type(node).__name__.removesuffix("Backward")
        left += [one for one, _ in node.next_functions]
    return ""


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _mixed(call: Call, why: str) -> Mixed:
    return Mixed(call.name, place(), why)


def _say_read(name: str) -> None:
    where = place()
    if (name, where) not in _said:
        _said.add((name, where))
        log.info("%s at %s: a number of the lot is read into Python, where it is not followed", name, where)


def place() -> str:
    """The line of code outside torch and this package that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _written_to(name: str) -> str:
    """The operation that a call in place does, by its name out of place; "" for one that writes nothing."""
    if name == "__setitem__":
        return name
    if name in _AUGMENTED:
        return f"__{name[3:]}"
    return name[:-1] if name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_",) else ""


_NOT_UNDERSTOOD = (IndexError, TypeError, ValueError, AttributeError, RuntimeError)
_WANTED = "want a sum or mean over the examples of what each gives alone"
_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_VALUES = frozenset({"T", "mT", "H", "mH", "data", "real", "imag", "grad", "grad_fn"})  # attributes that hold numbers
_METADATA = names(
    """
    dim ndimension size __len__ stride numel nelement element_size is_contiguous is_floating_point is_complex
    is_signed get_device storage_offset untyped_storage __hash__ __repr__ __format__ _is_view is_set_to
    has_names is_same_size is_conj is_neg result_type can_cast promote_types is_shared is_pinned requires_grad_
    is_inference
    """
)
_READS = names(
    """
    item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__ equal allclose
    is_nonzero __dlpack__ __dlpack_device__
    """
)
_AUGMENTED = names(
    """
    __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ __iand__ __ior__ __ixor__ __ifloordiv__ __imod__
    """
)
_STATISTICS = "it writes what it sees of the lot into a tensor that is not of the lot; want that tensor left as it is"
_REFUSED = {
    "grad_fn": "a hook on it may mix the gradients of examples; want none on what comes from a lot",
    "register_hook": "a hook may mix the gradients of examples; want none on what comes from a lot",
    "register_post_accumulate_grad_hook": "a hook may mix the gradients of examples; want none",
    "retain_grad": "gradients of the lot's tensors are private; want none kept",
    "grad": "gradients of the lot's tensors are private, and taken once, by loss.backward()",
    "set_": "the tensors of a lot stay what they are",
}
_said: set[tuple[str, str]] = set()
