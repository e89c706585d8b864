"""What a loss does with its lot, found by trying: it adds its examples up, averages them, or mixes them.

On the first lot the model's outputs and the targets are handed out as tensors that remember what is done with them.
When `backward` is called, the same operations are run on two examples alone and on the whole lot, and the gradients
that reach those two outputs are compared: equal, the loss is a sum; smaller by the ratio of the sizes, a mean;
anything else means that one example's loss depends on another, and no clipping can bound what one example does.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from terrine.errors import InvalidArgument, TerrineError

_TOLERANCE = 1e-3


class Reduction(enum.Enum):
    """How per-example losses become one number."""

    SUM = "sum"
    MEAN = "mean"

    def scale(self, size: int) -> float:
        """What undoes the reduction over `size` examples."""
        return float(size) if self is Reduction.MEAN else 1.0


def of_criterion(criterion: Callable[[Any, Any], Tensor], output: Any, target: Any, size: int) -> Reduction:
    """The reduction of `criterion`, tried on a lot of at least two examples.

    Raises:
        InvalidArgument: the loss mixes examples, or has no batch dimension.
    """

    refuse_shared_denominator(criterion, target)

    def loss(leaves: list[Any]) -> Tensor:
        rows = iter(leaves)
        return criterion(*tree_map(lambda _: next(rows), (output, target)))

    return _compare(loss, tree_flatten((output, target))[0], size, len(tree_flatten(output)[0]))


def refuse_shared_denominator(criterion: Any, target: Any) -> None:
    """Refuse a mean that is divided by more than the number of examples: every example moves every other's share."""
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) or criterion.reduction != "mean":
        return
    shared = "the weights of the whole lot's labels" if criterion.weight is not None else ""
    labels = isinstance(target, Tensor) and not target.is_floating_point() and target.numel() > 0
    if labels and int(target.min()) <= criterion.ignore_index and bool((target == criterion.ignore_index).any()):
        shared = f"the number of labels that are not ignore_index={criterion.ignore_index}"
    if shared:
        raise InvalidArgument(
            f"{type(criterion).__name__}: its mean is divided by {shared}, so it mixes examples; "
            'want reduction="sum" or "none"'
        )


def of_model(model: nn.Module, args: Any, kwargs: Any, size: int) -> Reduction:
    """The reduction of a loss that the model itself returns, tried on two examples alone and together.

    Raises:
        InvalidArgument: the loss mixes examples.
    """
    with _evaluating(model), torch.no_grad():
        one, other, both = (_own_loss(model, args, kwargs, rows, size) for rows in (slice(1), slice(1, 2), slice(2)))
    for reduction, expected in ((Reduction.MEAN, (one + other) / 2), (Reduction.SUM, one + other)):
        if close(both, expected):
            return reduction
    raise InvalidArgument(
        f"{type(model).__name__}: the loss it returns for two examples is neither their sum nor their mean; "
        "want one that is, or take its logits and compute the loss by example"
    )


def _own_loss(model: nn.Module, args: Any, kwargs: Any, rows: slice, size: int) -> Tensor:
    args, kwargs = tree_map(lambda leaf: leaf[rows] if _has_rows(leaf, size) else leaf, (args, kwargs))
    found: Tensor = next(leaf for leaf in tree_flatten(model(*args, **kwargs))[0] if is_loss(leaf))
    return found


def is_loss(leaf: Any) -> bool:
    """Whether an output is one number: a loss that the model computed itself."""
    return isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.is_floating_point()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Tape:
    """Remembers what is done with a lot and the model's outputs for it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.found: Reduction | None = None
        self._inputs: list[Tensor] = []
        self._outputs = 0
        self._calls: list[tuple[Any, Any, Any, list[Watched]]] = []

    def watch(self, value: Any, *, output: bool = False) -> Any:
        """`value` with every tensor in it remembering its use."""
        return tree_map(lambda leaf: self._watched(leaf, output) if isinstance(leaf, Tensor) else leaf, value)

    def _watched(self, leaf: Tensor, output: bool) -> Tensor:
        watched = leaf.as_subclass(Watched)
        watched.tape = self
        self._inputs.insert(0, watched) if output else self._inputs.append(watched)
        self._outputs += output
        return watched

    def record(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note one operation."""
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Watched)]
        for leaf in made:
            leaf.tape = self
        self._calls.append((function, args, kwargs, made))

    def check_inputs(self, given: Any) -> None:
        """Refuse what was made of several examples before the model saw it; random draws cannot be compared.

        Raises:
            InvalidArgument: a row of what the model is given depends on other rows of the lot.
        """
        whole, lot = [plain(one) for one in self._inputs], {id(one) for one in self._inputs}
        for leaf in tree_flatten(given)[0]:
            if self.size < 2 or not isinstance(leaf, Watched) or id(leaf) in lot or not _has_rows(leaf, self.size):
                continue
            calls = self._making(leaf)
            if any(_is_in_place(function) for function, *_ in calls):
                continue
            for rows in (slice(0, 1), slice(self.size - 1, self.size)):
                some = [_rows(one, rows, self.size) for one in whole]
                if not self._is_made_alone(calls, some, leaf, plain(leaf)[rows]):
                    raise InvalidArgument(
                        "the model's input for one example depends on others of the lot, so no clipping bounds one of "
                        "them; want what is done to the lot before the model to treat every example by itself"
                    )

    def _making(self, leaf: Watched) -> list[Any]:
        """The operations that `leaf` came from."""
        wanted, found = {id(leaf)}, []
        for call in reversed(self._calls):
            if any(id(made) in wanted for made in call[3]):
                found.append(call)
                wanted |= {id(one) for one in tree_flatten(call[1:3])[0] if isinstance(one, Watched)}
        return found[::-1]

    def _is_made_alone(self, calls: list[Any], rows: list[Any], leaf: Watched, wanted: Tensor) -> bool:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            try:
                found = self._replay(calls, self._inputs, rows, leaf)
            except (RuntimeError, ValueError, IndexError):
                return False
            drawn = not torch.equal(before, torch.get_rng_state())
        return drawn or (found.shape == wanted.shape and close(found, wanted))

    def settle(self, loss: Tensor) -> None:
        """Find the reduction of `loss`, on which backward was called."""
        if self.size < 2 or self.found is not None or not self._outputs:
            return
        calls = list(self._calls)
        used = {id(leaf) for _, args, kwargs, made in calls if made for leaf in tree_flatten((args, kwargs))[0]}
        others = [one for one in self._inputs[self._outputs :] if id(one) in used]
        inputs = self._inputs[: self._outputs] + others  # not what only the model saw
        self.found = _compare(
            lambda rows: self._replay(calls, inputs, rows, loss),
            [plain(one) for one in inputs],
            self.size,
            self._outputs,
        )

    def _replay(self, calls: list[Any], inputs: list[Tensor], rows: list[Any], loss: Tensor) -> Tensor:
        values = {id(watched): row for watched, row in zip(inputs, rows, strict=True)}
        count = len(rows[0])

        def now(leaf: Any) -> Any:
            if isinstance(leaf, Watched):
                return values[id(leaf)] if id(leaf) in values else plain(leaf)
            return leaf

        for call in calls:
            result = self._again(call, now, count)
            for old, new in zip(call[3], tree_flatten(result)[0], strict=False):
                values[id(old)] = new
        replayed: Tensor = values[id(loss)]
        return replayed

    def _again(self, call: Any, now: Callable[[Any], Any], count: int) -> Any:
        """The result of a call on `count` examples: of the numbers that name the lot's size, those follow that have to.

        Which ones tells the result's shape: `x.view(6, -1)` of six examples of six numbers each does not fail on one.
        """
        function, args, kwargs, made = call
        divides = getattr(function, "__name__", "") in _DIVIDES
        results, failures = [], []
        for many in (math.inf,) if divides else (0, 1, math.inf):
            left = many

            def given(leaf: Any) -> Any:
                nonlocal left
                if left > 0 and _is(leaf, self.size):
                    left -= 1
                    return count
                return now(leaf)

            try:
                results.append(function(*tree_map(given, args), **tree_map(given, kwargs)))
            except RuntimeError as failure:  # a shape that names the size of the lot
                failures.append(failure)
                continue
            if all(
                _is_shortened(*pair, self.size, count) for pair in zip(made, tree_flatten(results[-1])[0], strict=False)
            ):
                return results[-1]
        if not results:
            raise failures[0]
        return results[0]


def _is_shortened(whole: Any, some: Any, size: int, count: int) -> bool:
    """Whether a result has the shape of the whole lot's, but for the number of examples in front."""
    if not isinstance(whole, Tensor) or not isinstance(some, Tensor):
        return True
    return not _has_rows(whole, size) or some.shape == (count, *whole.shape[1:])


_DIVIDES = frozenset({"div", "div_", "true_divide", "__truediv__", "__itruediv__"})


class Watched(Tensor):
    """A tensor that tells its tape what is done with it."""

    tape: Tape | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tape = next(
            (one.tape for one in tree_flatten((args, kwargs))[0] if isinstance(one, Watched) and one.tape), None
        )
        if func is Tensor.backward and tape is not None:
            tape.settle(args[0])
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if tape is not None and func is not Tensor.backward:
            tape.record(func, args, kwargs, result)
        return result


def _is_in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))


def plain(value: Any) -> Any:
    """`value` with every watched tensor as an ordinary one."""
    return tree_map(lambda leaf: leaf.as_subclass(Tensor) if isinstance(leaf, Watched) else leaf, value)


def _is(leaf: Any, size: int) -> bool:
    return isinstance(leaf, int | float) and not isinstance(leaf, bool) and leaf == size


def _compare(loss: Callable[[list[Any]], Tensor], leaves: list[Any], size: int, outputs: int) -> Reduction:
    """`leaves` are the outputs, then everything else; two examples alone, twice, against the same in the lot."""
    many = min(2, size - 1)
    whole = _gradients(loss, list(leaves), outputs)
    left = [(Reduction.SUM, 1.0), (Reduction.MEAN, size / many)]
    for rows in (slice(0, many), slice(size - many, size)):
        try:
            alone = _gradients(loss, [_rows(leaf, rows, size) for leaf in leaves], outputs)
        except (RuntimeError, ValueError, IndexError) as failure:
            if isinstance(failure, TerrineError):
                raise
            raise InvalidArgument(f"{MIXED} (alone, it fails: {failure})") from failure
        pairs = [(one, _rows(other, rows, size)) for one, other in zip(alone, whole, strict=True)]
        left = [(kind, ratio) for kind, ratio in left if all(_fits(one, other, ratio) for one, other in pairs)]
    if not left:
        raise InvalidArgument(MIXED)
    return left[0][0]


MIXED = (
    "the loss of two examples changes in the company of others: it is neither a sum nor a mean of each one's own, so "
    "it mixes examples and no clipping bounds one of them; want a criterion that treats every example by itself"
)


def _gradients(loss: Callable[[list[Any]], Tensor], leaves: list[Any], outputs: int) -> list[Tensor]:
    leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    floating = [
        leaf.requires_grad_() for leaf in leaves[:outputs] if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        value = loss(leaves)
        if not isinstance(value, Tensor):
            raise InvalidArgument(f"criterion: want a tensor, got {type(value).__name__}")
        if not value.requires_grad:
            return [torch.zeros_like(leaf) for leaf in floating]
        found = torch.autograd.grad(value.sum(), floating, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(floating, found, strict=True)]


def _rows(leaf: Any, rows: slice, size: int) -> Any:
    return leaf[rows] if _has_rows(leaf, size) else leaf


def _has_rows(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size


def close(one: Tensor, other: Tensor, tolerance: float = _TOLERANCE) -> bool:
    """Whether two tensors are the same up to rounding, relative to the largest number that is finite."""
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return False
    one, other = torch.where(finite, one, 0.0), torch.where(finite, other, 0.0)
    reach = max(float(one.abs().max()), float(other.abs().max()), 1e-30) if one.numel() else 1.0
    return bool(torch.allclose(one, other, rtol=tolerance, atol=tolerance * reach))


def _fits(alone: Tensor, whole: Tensor, ratio: float) -> bool:
    half = alone.dtype in (torch.float16, torch.bfloat16)
    return close(alone, whole * ratio, 20 * _TOLERANCE if half else _TOLERANCE)
