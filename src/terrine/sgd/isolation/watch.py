"""The isolation check: every torch call from the moment a lot is handed out to the end of its backward pass.

Every tensor that descends from the lot has a status (status.py); the table of operations (call.py and the files that
fill it) gives a result's status from its arguments'. An operation that is not in the table is computed by `vmap` over
the examples, which cannot mix them, or its result counts as mixed. A backward pass is allowed from a total over the
examples, or from one loss per example; from anything else it is refused, with the operation that mixed them first.

What is not followed: numbers that are read into Python (`item`, `bool`, `numpy`), which is logged once per place.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from terrine.errors import InvalidArgument
from terrine.sgd.isolation import contractions, elementwise, indexing, structure, totals  # noqa: F401  fill the table
from terrine.sgd.isolation.alone import one_by_one
from terrine.sgd.isolation.call import TABLE, Call, Mixes, check_alike, tensors
from terrine.sgd.isolation.losses import COMPUTED
from terrine.sgd.isolation.status import DRAWN, MADE, PACKED, Drawn, Made, Mixed, Rows, Status, Total, holds

log = logging.getLogger("terrine.sgd")


class Isolation(TorchFunctionMode):
    """Follows a lot of `n` examples through every torch call while it is entered.

    A `recorder` of per-example gradients is told where the examples lie; one that disagrees is not believed.
    """

    def __init__(self, n: int, model: nn.Module | None = None) -> None:
        super().__init__()
        self.n = n
        self.mean: bool | None = None  # of the losses that went backward
        self.running = False  # an allowed backward pass is under way
        self.recorder: Any = None  # of per-example gradients: `where`, `tag` and `piece`
        self._model = model
        self._known: dict[int, Status] = {}
        self._last = 0
        self._busy = self._left = False
        self._written: dict[int, tuple[int, Tensor]] = {}  # memory that changed hands: when, and what keeps it
        self._marked: list[tuple[Tensor, Any]] = []
        self._parts: list[Isolation] = []
        self._call: Call | None = None  # that is being computed

    # -- what is known of tensors ---------------------------------------------------------------------

    def mark(self, lot: Any) -> None:
        """Say that these tensors hold one example per index of their first dimension; others are packed."""
        for tensor in held(lot):
            self._marked.append((tensor, getattr(tensor, _TAG, None)))
            self.tag(tensor, Rows(0) if tensor.dim() and tensor.shape[0] == self.n else PACKED)

    def unmark(self) -> None:
        """Leave the tensors that the lot began with as they were: they are the caller's."""
        for tensor, tag in reversed(self._marked):
            setattr(tensor, _TAG, tag) if tag is not None else vars(tensor).pop(_TAG, None)
        self._marked.clear()

    def status(self, tensor: Tensor) -> Status | None:
        """What is known of a tensor; None for one that is public."""
        tag = getattr(tensor, _TAG, None)
        if self._written and (tag is None or tag in self._known):
            at = self._written.get(tensor.untyped_storage().data_ptr()) if tensor.layout is torch.strided else None
            if at is not None and (tag is None or tag < at[0]):
                return Mixed("a write in place", "another name of the same memory")
        if tag is None:
            return None
        found = self._known.get(tag)
        return Mixed("a value of an earlier lot", "this one") if found is None and tag % 2 else found

    def tag(self, tensor: Tensor, status: Status) -> None:
        """Note the status of a tensor: by a number, which is saved and loaded with it as any other; even for public."""
        self._last = 2 * next(_COUNT) + (not isinstance(status, Made | Drawn))
        self._known[self._last] = status
        setattr(tensor, _TAG, self._last)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, torch calls are not followed."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before

    def __enter__(self) -> Isolation:
        super().__enter__()  # type: ignore[no-untyped-call]
        _active().append(self)
        self._left = False
        return self

    def __exit__(self, *raised: Any) -> None:
        active = _active()
        if active and active[-1] is self:
            active.pop()
            super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._left = self not in active or active[-1] is not self
        while active and active[-1]._left:  # loops that were left while a newer one ran
            active.pop()
            super().__exit__(*raised)  # type: ignore[no-untyped-call]

    # -- a recorder of per-example gradients ----------------------------------------------------------

    def is_allowed(self) -> bool:
        """Whether an allowed backward pass is under way."""
        return self.running

    def tell(self, name: str, out: Tensor) -> Rows | None:
        """Where the examples lie in the result of the call under way; None where that is not known."""
        if self._call is None or self._call.name != name or self.n == 1 or name not in TABLE:
            return None
        status = self._ruled(self._call, out)
        return status if isinstance(status, Rows) and holds(out.shape, status, self.n) else None

    @contextmanager
    def following(self, recorder: Any, given: list[Tensor], whole: list[Tensor]) -> Iterator[None]:
        """Within, calls come here before they come to `recorder`; `given` is a part of the lot's `whole`."""
        if recorder.examples == self.n:
            before, self.recorder, self._busy = self.recorder, recorder, False
            recorder.told = self.tell
            try:
                with self:
                    yield
            finally:
                self.recorder = before
            return
        part = Isolation(recorder.examples, self._model)
        part.recorder = recorder
        recorder.told = part.tell
        for one, all_of_it in zip(given, whole, strict=True):
            status = self.status(all_of_it)
            if status is not None:
                part.tag(one, status if isinstance(status, Mixed) or status == Rows(0) else _uncut(status))
        with part:
            yield
        self._parts.append(part)

    def join(self, whole: Any, outputs: list[Any]) -> None:
        """Outputs of consecutive parts are the lot's: where each has its examples in front, so has the whole."""
        parts, self._parts = self._parts[-len(outputs) :], []
        for place, tensor in enumerate(tensors((whole,))):
            found = [part.status(tensors((output,))[place]) for part, output in zip(parts, outputs, strict=True)]
            strange = next((status for status in found if status != Rows(0)), Rows(0))
            self.tag(tensor, strange if isinstance(strange, Mixed | Rows) else _uncut(strange))

    # -- every call -----------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._busy or self._left or _active()[-1] is not self:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
            if name not in _READ:
                return func(*args, **kwargs)
            name = f".{name}" if name == "grad" else name
        elif name in _METADATA:
            return func(*args, **kwargs)
        self._busy = True
        try:
            return self._followed(func, name.partition(".")[0] or name, args, kwargs)
        finally:
            self._busy = False

    def _followed(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        given = []
        known = False
        for tensor in tensors(args) + tensors(kwargs.values()) if kwargs else tensors(args):
            status = self.status(tensor)
            known = known or status is not None
            given.append((tensor, status))
        if name == "__getitem__" or name == "__setitem__":
            given += [(one, self.status(one)) for one in tensors((args[1],))]
            known = known or any(status is not None for _, status in given)
        if not known:
            return self._public(func, name, args, kwargs, given)
        if name in _SPECIAL:
            return _SPECIAL[name](self, func, name, args, kwargs)
        if name in _NEW:
            return self._public(func, name, args, kwargs, [])
        if name in _READS:
            self._say_read(name, given)
            return func(*args, **kwargs)
        call = Call(func, name, args, kwargs, self.n, given)
        if all(status is None or isinstance(status, Made | Drawn) for _, status in given):
            return self._made(call)
        if kwargs.get("out") is not None:
            result = func(*args, **kwargs)
            self._write((kwargs["out"], result), self._mixed(call, "out="))
            return result
        base = _written_to(name)
        return self._in_place(call, base) if base else self._computed(call)

    def _computed(self, call: Call) -> Any:
        """An ordinary call on something of the lot."""
        mixed = next((status for _, status in call.given if isinstance(status, Mixed)), None)
        if mixed is not None:
            return self._keep(call, call.func(*call.args, **call.kwargs), mixed)
        summed = any(isinstance(status, Total) for _, status in call.given)
        if call.name in COMPUTED and not summed:
            try:
                return self._keep(call, *COMPUTED[call.name](call))
            except Mixes as why:
                return self._keep(call, call.func(*call.args, **call.kwargs), self._mixed(call, str(why)))
        if not summed and call.name not in TABLE:
            return self._unknown(call)
        self._call = call
        try:
            result = call.func(*call.args, **call.kwargs)
        finally:
            self._call = None
        return self._keep(call, result, self._ruled(call, result))

    def _ruled(self, call: Call, result: Any) -> Any:
        """What the table says; arguments that a rule does not understand count as mixing."""
        try:
            if any(isinstance(status, Total) for _, status in call.given):
                return totals.linear(call)
            return TABLE[call.name](call, result)
        except Mixes as why:
            return self._mixed(call, str(why))
        except (IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            return self._mixed(call, f"arguments that were not understood: {error}", known=False)

    def _unknown(self, call: Call) -> Any:
        """An operation that nobody knows: by `vmap`, or mixed."""
        plain = not any(tensor.requires_grad and status is None for tensor, status in call.given)
        found = one_by_one(call) if plain and self.n > 1 else None
        if found is not None:
            result, axis = found
            return self._keep(call, result, Rows(axis))
        result = call.func(*call.args, **call.kwargs)
        why = "an operation that is not known to keep examples apart"
        return self._keep(call, result, self._mixed(call, why, known=False))

    def _in_place(self, call: Call, base: str) -> Any:
        """A call that writes to its first argument."""
        target: Any = call.args[0] if call.args else call.kwargs.get("input")
        before = call.status(target)
        mixed = next((status for _, status in call.given if isinstance(status, Mixed)), None)
        status: Status | None = mixed
        if mixed is None:
            whole = Call(call.func, base, call.args, call.kwargs, call.n, call.given)
            found = (
                self._ruled(whole, target)
                if base in TABLE
                else self._mixed(call, "an operation that is not known", known=False)
            )
            status = found[0] if isinstance(found, list) else found
            if isinstance(status, Rows) and not holds(target.shape, status, self.n):
                status = self._mixed(call, "examples that do not fit")
        if before is None and status is not None:
            status = self._mixed(call, "written to a tensor that was there before the lot")
            self._refuse_buffer(target, call.name)
        result = call.func(*call.args, **call.kwargs)
        if status is not None:
            self._write(target, status, moved=status != before)
            if isinstance(result, Tensor) and result is not target:
                self.tag(result, status)
        return result

    def _write(self, target: Any, status: Status, *, moved: bool = True) -> None:
        for tensor in tensors((target,)):
            self.tag(tensor, status)
            if moved and tensor.layout is torch.strided:
                self._written[tensor.untyped_storage().data_ptr()] = (self._last, tensor)

    def _refuse_buffer(self, target: Tensor, name: str) -> None:
        for path, one in [] if self._model is None else [*self._model.named_buffers(), *self._model.named_parameters()]:
            if one is target or (
                one.numel() and one.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
            ):
                raise InvalidArgument(
                    f"{path}: a buffer that keeps something of the examples, which no noise protects ({name} at "
                    f"{place()}); want a model whose forward pass leaves its buffers alone"
                )

    def _public(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Any]) -> Any:
        result = func(*args, **kwargs)
        if not given or name in _COPIES:
            for one in tensors((result,)):
                self.tag(one, DRAWN if name in _DRAWS else MADE)
        return self._agreed(result, given)

    def _made(self, call: Call) -> Any:
        """A call on public tensors, some of them made while the lot is out."""
        result = call.func(*call.args, **call.kwargs)
        status: Status = DRAWN if _stays_drawn(call, result) else MADE
        for one in tensors((result,)):
            self.tag(one, status)
        return self._agreed(result, call.given)

    def _keep(self, call: Call, result: Any, found: Any) -> Any:
        """Tag what came out."""
        results = tensors((result,))
        several = found if isinstance(found, list) else [found] * len(results)
        for one, status in zip(results, several, strict=False):
            if isinstance(status, Rows) and not holds(one.shape, status, self.n):
                status = self._mixed(call, "a result that does not hold the examples")
            if self.recorder is not None and self.n > 1:
                status = self._agreement(call, one, status)
            self.tag(one, MADE if status is None else status)
        return result

    def _agreement(self, call: Call, out: Tensor, status: Any) -> Any:
        """The recorder reads examples where they are; where it has read them elsewhere, nothing is certain."""
        if not isinstance(status, Rows):
            return status
        read = self.recorder.where(out)
        if read == tuple(status):
            return status
        if read is not None and any(self.recorder.piece(one) is not None for one, _ in call.given):
            return self._mixed(call, "examples that the recorder read along another axis", known=False)
        self.recorder.tag(out, status)
        return status

    def _agreed(self, result: Any, given: list[Any]) -> Any:
        """A constant that the recorder takes for one row per example is followed as such: other uses will mix."""
        if self.recorder is not None and self.n > 1:
            for one in tensors((result,)):
                read = self.recorder.where(one)
                if isinstance(read, tuple):
                    self.tag(one, Rows(*read))
        return result

    def _mixed(self, call: Call, why: str, *, known: bool = True) -> Status:
        if self.n == 1:  # nobody is there to be mixed with
            return Rows(0)
        return Mixed(call.name, place(), why, known)

    def _say_read(self, name: str, given: list[Any]) -> None:
        where = place()
        if (name, where) not in _said:
            _said.add((name, where))
            log.warning("%s at %s: a number of the lot is read into Python, where nobody follows it", name, where)

    # -- the backward pass ----------------------------------------------------------------------------

    def _backward(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """Allowed from totals, and from one loss per example."""
        outputs = tensors((args[0] if args else kwargs.get("tensors", kwargs.get("outputs")),))
        for output in outputs:
            self.allow(output, args, kwargs)
        self.running = True
        try:
            result = func(*args, **kwargs)
        finally:
            self.running = False
        for one in tensors((result,)):
            self.tag(one, Mixed(name, place(), "a gradient of the lot's loss"))
        return result

    def allow(self, output: Tensor, args: Any = (), kwargs: Any = None) -> None:
        """Check that a backward pass from `output` leaves examples apart, and note whether it is a mean.

        Raises: InvalidArgument where it does not.
        """
        status = self.status(output)
        if status is None or isinstance(status, Made | Drawn):
            return
        if isinstance(status, Mixed):
            raise InvalidArgument(
                f"the loss mixes examples, so no clipping bounds one of them: {status}; want a sum or mean over the "
                "examples of what each gives alone"
            )
        own = own_function(output)
        if own:
            raise InvalidArgument(
                f"{own}: a torch.autograd.Function, whose backward pass may mix examples; sgd.Trainer and "
                "sgd.clipped_sum clip such a model slowly, but exactly"
            )
        if isinstance(status, Rows):
            for one in tensors((args[1:2], (kwargs or {}).values())):
                if one is not output and one.shape == output.shape and not isinstance(self.status(one), Rows):
                    try:
                        check_alike(Call(print, "backward", (), {}, self.n), one, status, output.shape)
                    except Mixes as why:
                        raise InvalidArgument(f"backward(gradient): {why}; want ones, which treat all alike") from why
        mean = isinstance(status, Total) and totals.is_mean(status, self.n)
        if self.n > 1 and self.mean not in (None, mean):
            raise InvalidArgument("two backward passes of one lot, from a mean and from a sum; want one kind of loss")
        self.mean = mean

    def _of_leaf(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            self.tag(result, Mixed("grad", place(), "a gradient of the lot's loss"))
        return result

    def _hooked(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        raise InvalidArgument(
            f"{name} at {place()}: a hook may mix the gradients of examples; want none on what comes from a lot"
        )

    def _assigned(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        status = self.status(args[1]) if len(args) > 1 and isinstance(args[1], Tensor) else None
        if status is not None:
            self._write(args[0], status)
        return result


@contextmanager
def aside() -> Iterator[None]:
    """Within, no torch call is followed by whoever does outside."""
    active = _active()
    if not active:
        yield
        return
    with active[-1].paused():
        yield


def own_function(output: Tensor) -> str:
    """A backward pass that somebody wrote, on the way to `output`: it is not followed. "" if there is none."""
    seen: set[Any] = set()
    left: list[Any] = [output.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BackwardCFunction):
            written = getattr(type(node), "_forward_cls", type(node))
            if not written.__module__.startswith("terrine.sgd."):
                return str(written.__name__)
        left += [one for one, _ in node.next_functions]
    return ""


def held(lot: Any) -> list[Tensor]:
    """Every tensor in a lot, however it is nested."""
    if isinstance(lot, Tensor):
        return [lot]
    if isinstance(lot, Mapping):
        return held(list(lot.values()))
    if isinstance(lot, tuple | list):
        return [tensor for one in lot for tensor in held(one)]
    return held(list(vars(lot).values())) if hasattr(lot, "__dict__") and not isinstance(lot, nn.Module | type) else []


def _uncut(status: Status | None) -> Mixed:
    return Mixed("a part of the lot", "the model's call", f"{status}, which has no row per example")


def _active() -> list[Isolation]:
    """The isolations that are entered in this thread, the newest last; only that one looks."""
    if not hasattr(_here, "active"):
        _here.active = []
    found: list[Isolation] = _here.active
    return found


_here = threading.local()


def place() -> str:
    """The line of code outside torch and this package that is being run."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)


def _written_to(name: str) -> str:
    """The operation that a call in place does, by its name out of place; "" for one that writes nothing."""
    if name == "__setitem__":
        return name
    if name.startswith("__i") and name in _AUGMENTED:
        return f"__{name[3:]}"
    return name[:-1] if name.endswith("_") and not name.endswith("__") else ""


def _stays_drawn(call: Call, result: Any) -> bool:
    """Whether independent draws are still that."""
    base = call.name.rstrip("_") if not call.name.startswith("__") else call.name
    if base in _DRAWS and not tensors(call.args[1:]):
        return True
    if not isinstance(result, Tensor) or not any(isinstance(status, Drawn) for _, status in call.given):
        return False
    if TABLE.get(base) is elementwise.elementwise:
        return all(isinstance(status, Drawn) or one.numel() == 1 for one, status in call.given)
    if base in ("expand", "expand_as"):
        return True
    spread = any(
        not stride and size > 1 for one, _ in call.given for stride, size in zip(one.stride(), one.shape, strict=True)
    )
    return base in ("view", "reshape", "unsqueeze", "squeeze", "transpose", "permute") and not spread


_TAG = "_terrine_status"
_COUNT = itertools.count(secrets.randbits(60))  # not what another process has counted
_READ = frozenset({"T", "mT", "H", "mH", "data", "real", "imag", "grad"})  # attributes that hold numbers
_METADATA = frozenset(
    """
    dim ndimension size __len__ stride numel nelement element_size is_contiguous is_floating_point is_complex is_signed
    get_device storage_offset data_ptr untyped_storage __hash__ __repr__ __format__ _is_view is_set_to has_names
    is_same_size is_conj is_neg result_type can_cast promote_types is_tensor has_torch_function
    """.split()  # noqa: SIM905
)
_READS = frozenset(
    """
    item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__ equal allclose is_nonzero
    """.split()  # noqa: SIM905
)
_COPIES = frozenset(
    """
    clone zeros_like ones_like full_like empty_like rand_like randn_like new_zeros new_ones new_full new_empty
    new_tensor bernoulli normal
    """.split()  # noqa: SIM905
)
_NEW = frozenset({"new_zeros", "new_ones", "new_full", "new_empty"})  # of which the tensor gives its type alone
_DRAWS = frozenset(
    """
    rand randn randint normal bernoulli uniform exponential random geometric log_normal cauchy rand_like
    randn_like randint_like empty new_empty empty_like poisson
    """.split()  # noqa: SIM905
)
_AUGMENTED = frozenset(
    """
    __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ __iand__ __ior__ __ixor__ __ifloordiv__ __imod__
    """.split()  # noqa: SIM905
)
_Special = Callable[[Isolation, Any, str, Any, Any], Any]
_SPECIAL: dict[str, _Special] = {
    "backward": Isolation._backward,
    "grad": Isolation._backward,
    ".grad": Isolation._of_leaf,
    "register_hook": Isolation._hooked,
    "__set__": Isolation._assigned,
}
_said: set[tuple[str, str]] = set()
