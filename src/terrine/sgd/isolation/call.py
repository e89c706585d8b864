"""What tensors of a lot hold of its examples, and calls of torch functions on them as the rules of the table see them.

Rows     index i along one axis depends on example (i // inner) mod n alone
Total    a sum, or a mean, over the examples of what each gives alone, with public coefficients: a loss
Mixed    anything else; it remembers the operation and the line of code that mixed the examples first
None     nothing: public
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from terrine.sgd.clipping.examples import tensors


class Rows(NamedTuple):
    """Index i along `axis` depends on example (i // inner) mod n alone."""

    axis: int
    inner: int = 1


@dataclass(frozen=True)
class Total:
    """A linear combination over the examples, whose gradient is that of every example's own loss.

    `divisor` is the number of examples of a mean, 1 of a sum, and of a sum that was divided by a number, that number:
    gradients are not divided by it, for the size of a lot must not decide how long one example's is. Other coefficients
    are part of the loss.
    """

    divisor: float
    is_mean: bool
    divided: bool = False


@dataclass(frozen=True)
class Mixed:
    """Several examples meet, in a way that no clipping of one of them bounds."""

    operation: str
    place: str
    why: str

    def __str__(self) -> str:
        return f"{self.operation} ({self.why}) at {self.place}"


Status: TypeAlias = Rows | Total | Mixed | None


def holds(shape: Sequence[int], rows: Rows, n: int) -> bool:
    """Whether a tensor of this shape can hold `n` examples so."""
    return 0 <= rows.axis < len(shape) and (shape[rows.axis] % (n * rows.inner) == 0 if n else not shape[rows.axis])


def is_plain(tensor: Tensor, rows: Rows, n: int) -> bool:
    """Whether every index along the axis is one example's, in order."""
    return rows.inner == 1 and tensor.shape[rows.axis] == n


def is_constant(tensor: Tensor, axis: int) -> bool:
    """Whether a public tensor is the same at every index along `axis`: its numbers may be looked at."""
    if tensor.shape[axis] == 1 or tensor.stride(axis) == 0 or tensor.numel() == 0:
        return True
    return bool((tensor.detach() == tensor.detach().narrow(axis, 0, 1)).all())


class Mixes(Exception):
    """The call lets examples meet; says why."""


@dataclass(slots=True)
class Call:
    """A function, its arguments, and what is known of the tensors among them; `n` examples are in the lot."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    n: int
    known: dict[int, Status]  # by the tensor's id

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by position or by name."""
        if len(self.args) > position:
            return self.args[position]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    @property
    def operands(self) -> list[Tensor]:
        """Every tensor among the arguments."""
        return tensors((*self.args, *self.kwargs.values()))

    def rows(self, tensor: Any) -> Rows | None:
        """Where the examples lie in a tensor that is given; None in one that is public.

        Raises: Mixes where it holds a total or mixed examples.
        """
        status = self.known.get(id(tensor))
        if isinstance(status, Total | Mixed):
            raise Mixes("a total over the examples" if isinstance(status, Total) else "a tensor without rows")
        return status

    def public(self, *given: Any) -> None:
        """Refuse examples where the operation knows none, such as a weight."""
        for tensor in given:
            if isinstance(tensor, Tensor) and self.rows(tensor) is not None:
                raise Mixes("examples among its weights")

    def axes(self, position: int, dims: int, *names: str, default: Any = None) -> list[int] | None:
        """The dimensions that an argument names, counted from the front; None where it names none."""
        given = self.argument(position, *(names or ("dim", "axis")), default=default)
        several = given if isinstance(given, tuple | list) else (given,)
        if not several or not all(isinstance(axis, int) for axis in several):
            return None
        return [axis % max(dims, 1) for axis in several]


Rule = Callable[[Call, Any], Any]
"""Gives the status of a call's result, or a list of them where it is several tensors; raises Mixes."""

TABLE: dict[str, Rule] = {}


def names(listed: str) -> frozenset[str]:
    """The names in a list, separated by white space."""
    return frozenset(listed.split())


def rule(listed: str) -> Callable[[Rule], Rule]:
    """Make the decorated function the rule of these operations."""

    def keep(found: Rule) -> Rule:
        TABLE.update(dict.fromkeys(names(listed), found))
        return found

    return keep


def broadcast(call: Call, operands: Iterable[Tensor], shape: Any) -> Rows | None:
    """The status of an elementwise result: all examples along one axis, and nothing public that tells them apart.

    A public operand that differs from index to index would give an example a weight by its place in the lot, which
    changes when another one is taken out.
    """
    found: Rows | None = None
    others: list[Tensor] = []
    for operand in operands:
        rows = call.rows(operand)
        if rows is None:
            others.append(operand)
            continue
        here = Rows(rows.axis + len(shape) - operand.dim(), rows.inner)
        if found is not None and here != found:
            raise Mixes("examples along different axes")
        if shape[here.axis] != operand.shape[rows.axis]:
            raise Mixes("examples that are repeated against others")
        found = here
    if found is not None:
        for operand in others:
            check_alike(call, operand, found, shape)
    return found


def check_alike(call: Call, operand: Tensor, rows: Rows, shape: Any) -> None:
    """Refuse a public operand that differs from example to example."""
    axis = rows.axis - len(shape) + operand.dim()
    if axis < 0 or operand.shape[axis] == 1 or not call.n:
        return
    outer = operand.shape[axis] // (call.n * rows.inner)
    if not is_constant(operand.unflatten(axis, (outer, call.n, rows.inner)), axis + 1):
        raise Mixes(
            "a public tensor that differs from one place in the lot to the next; want torch.randn_like for draws"
        )
