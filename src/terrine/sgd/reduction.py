"""What a loss does with its lot, found by trying: it adds its examples up, averages them, or mixes them.

On the first lot the model's outputs and the targets are handed out as tensors that remember what is done with them.
When `backward` is called, the same operations are run on two examples alone and on the whole lot, and the gradients
that reach those two outputs are compared: equal, the loss is a sum; smaller by the ratio of the sizes, a mean;
anything else means that one example's loss depends on another, and no clipping can bound what one example does.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from terrine.errors import InvalidArgument

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

    def loss(leaves: list[Any]) -> Tensor:
        rows = iter(leaves)
        return criterion(*tree_map(lambda _: next(rows), (output, target)))

    return _compare(loss, tree_flatten((output, target))[0], size, len(tree_flatten(output)[0]))


def of_model(model: nn.Module, args: Any, kwargs: Any, size: int) -> Reduction:
    """The reduction of a loss that the model itself returns, tried on two examples alone and together.

    Raises:
        InvalidArgument: the loss mixes examples.
    """
    with _evaluating(model), torch.no_grad():
        one, other, both = (_own_loss(model, args, kwargs, rows, size) for rows in (slice(1), slice(1, 2), slice(2)))
    for reduction, expected in ((Reduction.MEAN, (one + other) / 2), (Reduction.SUM, one + other)):
        if _close(both, expected):
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


def check_examples_apart(model: nn.Module, args: Any, kwargs: Any, size: int) -> None:
    """Run the model on two examples alone and in company; one example's output must not depend on another.

    Raises:
        InvalidArgument: it does.
    """
    alone, company = min(2, size - 1), min(8, size)
    with _evaluating(model):
        few, again, many = (_outputs(model, args, kwargs, count, size) for count in (alone, alone, company))
    pairs = zip(few, again, many, strict=False)  # outputs without the examples in front are refused when they are there
    if not all(_close(one, _rows(three, alone, company)) for one, two, three in pairs if torch.equal(one, two)):
        raise InvalidArgument(
            f"{type(model).__name__}: the output for {alone} examples changes in company: the model mixes "
            "examples, so no clipping bounds one of them; want a model that treats each alone"
        )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _outputs(model: nn.Module, args: Any, kwargs: Any, count: int, size: int) -> list[Tensor]:
    args, kwargs = tree_map(lambda leaf: _rows(leaf, count, size), (args, kwargs))
    with torch.no_grad():
        found = tree_flatten(model(*args, **kwargs))[0]
    return [leaf for leaf in found if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == count]


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

    def settle(self, loss: Tensor) -> None:
        """Find the reduction of `loss`, on which backward was called."""
        if self.size < 2 or self.found is not None or not self._outputs:
            return
        calls = list(self._calls)
        if loss.numel() == 1:
            used = {id(leaf) for _, args, kwargs, made in calls if made for leaf in tree_flatten((args, kwargs))[0]}
            others = [one for one in self._inputs[self._outputs :] if id(one) in used]
            inputs = self._inputs[: self._outputs] + others  # not what only the model saw
            self.found = _compare(
                lambda rows: self._replay(calls, inputs, rows, loss),
                [plain(one) for one in inputs],
                self.size,
                self._outputs,
            )
        else:
            self.found = Reduction.SUM

    def _replay(self, calls: list[Any], inputs: list[Tensor], rows: list[Any], loss: Tensor) -> Tensor:
        values = {id(watched): row for watched, row in zip(inputs, rows, strict=True)}
        count = len(rows[0])

        def now(leaf: Any) -> Any:
            if isinstance(leaf, Watched):
                return values[id(leaf)] if id(leaf) in values else plain(leaf)
            return leaf

        for function, args, kwargs, made in calls:
            divides = getattr(function, "__name__", "") in _DIVIDES
            given = tree_map(lambda leaf: count if divides and _is(leaf, self.size) else now(leaf), (args, kwargs))  # noqa: B023
            try:
                result = function(*given[0], **given[1])
            except RuntimeError:  # a shape that names the size of the lot
                given = tree_map(lambda leaf: count if _is(leaf, self.size) else now(leaf), (args, kwargs))
                result = function(*given[0], **given[1])
            for old, new in zip(made, tree_flatten(result)[0], strict=False):
                values[id(old)] = new
        replayed: Tensor = values[id(loss)]
        return replayed


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


def plain(value: Any) -> Any:
    """`value` with every watched tensor as an ordinary one."""
    return tree_map(lambda leaf: leaf.as_subclass(Tensor) if isinstance(leaf, Watched) else leaf, value)


def _is(leaf: Any, size: int) -> bool:
    return isinstance(leaf, int | float) and not isinstance(leaf, bool) and leaf == size


def _compare(loss: Callable[[list[Any]], Tensor], leaves: list[Any], size: int, outputs: int) -> Reduction:
    """`leaves` are the outputs, then everything else; rows of two examples alone against the same in the lot."""
    alone = min(2, size - 1)
    few = _gradients(loss, [_rows(leaf, alone, size) for leaf in leaves], outputs)
    many = [_rows(one, alone, size) for one in _gradients(loss, list(leaves), outputs)]
    for reduction, ratio in ((Reduction.SUM, 1.0), (Reduction.MEAN, size / alone)):
        if all(_close(one, other * ratio) for one, other in zip(few, many, strict=True)):
            return reduction
    raise InvalidArgument(
        f"the loss of {alone} examples changes in the company of {size - alone} others: it mixes examples, "
        "so no clipping bounds one of them; want a sum or a mean of per-example losses"
    )


def _gradients(loss: Callable[[list[Any]], Tensor], leaves: list[Any], outputs: int) -> list[Tensor]:
    leaves = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    floating = [
        leaf.requires_grad_() for leaf in leaves[:outputs] if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        value = loss(leaves)
        if not isinstance(value, Tensor) or value.dim() > 1:
            raise InvalidArgument(
                "the loss is not one number, nor one number per example; want criterion(output, target)"
            )
        found = torch.autograd.grad(value.sum(), floating, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(floating, found, strict=True)]


def _rows(leaf: Any, count: int, size: int) -> Any:
    return leaf[:count] if _has_rows(leaf, size) else leaf


def _has_rows(leaf: Any, size: int) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == size


def _close(one: Tensor, other: Tensor) -> bool:
    reach = max(float(one.abs().max()), float(other.abs().max()), 1e-30) if one.numel() else 1.0
    return bool(torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * reach, equal_nan=True))
