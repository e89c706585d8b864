"""One call of a torch function, as the rules of the table see it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from terrine.sgd.isolation.status import Drawn, Made, Mixed, Rows, Status, Total, is_constant


class Mixes(Exception):
    """The call lets examples meet; says why."""


@dataclass(slots=True)
class Call:
    """A function, its arguments, and what is known of the tensors among them."""

    func: Callable[..., Any]
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    n: int
    given: list[tuple[Tensor, Status | None]] = field(default_factory=list)

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """An argument by position or by name."""
        if len(self.args) > position:
            return self.args[position]
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return default

    def status(self, tensor: Any) -> Status | None:
        """What is known of one of the given tensors."""
        for one, status in self.given:
            if one is tensor:
                return status
        return None

    def rows(self, tensor: Any) -> Rows | None:
        """Where the examples lie in a tensor that is given; None in one that is public.

        Raises: Mixes where it holds a total or mixed examples.
        """
        status = self.status(tensor)
        if status is None or isinstance(status, Drawn | Made):
            return None
        if isinstance(status, Rows):
            return status
        raise Mixes(
            "a total over the examples" if isinstance(status, Total) else "a tensor that has no row per example"
        )

    def public(self, *tensors: Any) -> None:
        """Refuse examples where the operation knows none, such as a weight."""
        for tensor in tensors:
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


def rule(names: str) -> Callable[[Rule], Rule]:
    """Make the decorated function the rule of these operations."""

    def keep(found: Rule) -> Rule:
        TABLE.update(dict.fromkeys(names.split(), found))
        return found

    return keep


def broadcast(call: Call, operands: Iterable[Tensor], shape: Any) -> Rows | Drawn | None:
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
        if shape[here.axis] != operand.shape[rows.axis] and call.n > 1:
            raise Mixes("examples that are repeated against others")
        found = here
    if found is None:
        drawn = any(isinstance(call.status(one), Drawn) for one in others)
        alike = all(isinstance(call.status(one), Drawn) or one.numel() == 1 for one in others)
        return Drawn() if drawn and alike else None
    for operand in others:
        check_alike(call, operand, found, shape)
    return found


def check_alike(call: Call, operand: Tensor, rows: Rows, shape: Any) -> None:
    """Refuse a public operand that differs from example to example."""
    axis = rows.axis - len(shape) + operand.dim()
    if axis < 0 or operand.shape[axis] == 1 or isinstance(call.status(operand), Drawn):
        return
    if rows.inner == 1 and operand.shape[axis] == call.n:
        alike = is_constant(operand, axis)
    else:  # blocks: the same in every example's
        outer = operand.shape[axis] // (call.n * rows.inner)
        alike = is_constant(operand.unflatten(axis, (outer, call.n, rows.inner)), axis + 1)
    if not alike:
        raise Mixes("a public tensor that differs from one place in the lot to the next")


def tensors(values: Iterable[Any]) -> list[Tensor]:
    """Every tensor among the values, and in lists and dicts among them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += tensors(value)
        elif isinstance(value, dict):
            found += tensors(value.values())
    return found


__all__ = ["TABLE", "Call", "Mixed", "Mixes", "Rule", "broadcast", "check_alike", "rule", "tensors"]
