"""`clipped_sum`: one forward and one backward pass over a lot, a microbatch at a time.

Clipping is per unit, so a lot may be taken in microbatches of any size with the same result: small enough for
activations to stay near the processor, large enough to keep it busy. A unit is an example, or a person with several
rows: the units of a microbatch have equally many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine import check
from terrine.common import generators
from terrine.errors import InvalidArgument
from terrine.sgd.clipping import rules as _rules  # noqa: F401  registers every rule
from terrine.sgd.clipping.alone import CHECKED_EVERY, Way, check_company, groups, one_alone, together, way_of
from terrine.sgd.clipping.examples import Criterion, Lot, bags, call, check_rows, count, trained, unwatched
from terrine.sgd.clipping.microbatches import FIRST, Cost, cut
from terrine.sgd.clipping.one_by_one import gradients
from terrine.sgd.clipping.policy import ClippingRule, as_rule, refuse_strange
from terrine.sgd.clipping.recording import Divided, Recording
from terrine.sgd.clipping.state import ModuleState
from terrine.sgd.clipping.summing import Clipped, ClippedSums
from terrine.sgd.clipping.use import ANCHOR, Unfollowed
from terrine.sgd.layers import validate


@unwatched()
def clipped_sum(
    model: nn.Module,
    criterion: Criterion,
    x: Lot,
    y: Lot,
    *,
    clip: float | ClippingRule,
    chunk: int | None = None,
    memory: float | None = None,
    rows: Sequence[int] | None = None,
) -> Clipped:
    """The sum over the lot of clipped per-example gradients, and the norms before clipping.

    An example's gradient is that of `criterion(model(x), y)` for a lot of this example alone; a tuple `x` is positional
    arguments, a dict keyword arguments, and every tensor's first dimension counts the examples. `chunk` examples are
    in memory at a time; by default as many as are fastest and, where `memory` is given, about fit into so many bytes.
    With `rows`, the examples are people's rows: the first `rows[0]` are one person's, the next `rows[1]` another's. A
    person's gradient is the mean over its rows, and is clipped as one.

    Guarantee: adding or removing one example, or person, moves the sums by at most the rule's bound in L2 norm.
    Raises: InvalidArgument where the model keeps something of one example for the next.
    """
    rule, size = as_rule(clip), count(y)
    validate(model)
    raw = bags(x, size)
    check_rows(() if raw else x, size)
    parameters = trained(model)
    refuse_strange(rule, parameters)
    sums = ClippedSums(parameters)
    people = None if rows is None else _people(rows, size, raw)
    if size == 0 or not parameters:
        home = next(iter(parameters.values())).device if parameters else None
        return Clipped(sums.totals(), torch.zeros(size if people is None else len(people), device=home))
    work = _Work(model, criterion, parameters, rule, sums, way_of(model), *pytree.tree_flatten((x, y)))
    room = math.inf if memory is None else check.positive("memory", memory)
    work.modules = (*model.modules(), *(criterion.modules() if isinstance(criterion, nn.Module) else ()))
    work.state = ModuleState(work.modules)
    if raw:
        norms = work.bags(raw)
        return Clipped(sums.totals(), norms)
    work.check_company()
    if people is not None:
        norms = work.people(people, room, chunk)
        return Clipped(sums.totals(), norms)
    parts, start = [], 0
    for many in work.cut(size, room) if chunk is None else _of(size, chunk):
        parts.append(work.microbatch(work.rows(slice(start, start + many))))
        start += many
    return Clipped(sums.totals(), torch.cat(parts) if len(parts) > 1 else parts[0])


@dataclass
class _Work:
    """What stays the same from one microbatch of a lot to the next."""

    model: nn.Module
    criterion: Criterion
    parameters: dict[str, nn.Parameter]
    rule: ClippingRule
    sums: ClippedSums
    way: Way
    leaves: list[Any]
    nesting: Any
    cost: Cost = (0.0, 0.0)  # of one example in the last microbatch
    modules: tuple[nn.Module, ...] = ()
    state: ModuleState = field(default_factory=ModuleState)
    whole: int = 0  # how many of the first tensors are an example's as they are, without a dimension of examples

    def check_company(self) -> None:
        """At the first lot and every hundredth: whether the model treats two examples together as it does alone."""
        if self.way.steps % CHECKED_EVERY == 0:
            check_company(
                self._outputs,
                lambda *row: self._outputs([one.unsqueeze(0) for one in row]),
                self.rows(slice(None)),
                self.modules,
            )
        self.way.steps += 1

    def bags(self, lengths: list[int]) -> Tensor:
        """Add the clipped gradients of bags of so many tokens, those of one length together; their norms."""
        tokens, offsets, *others = self.rows(slice(None))
        self.whole, starts = 2, offsets.tolist()
        norms, order = [], []
        for length in dict.fromkeys(lengths):
            which = [index for index, one in enumerate(lengths) if one == length]
            runs = torch.stack([tokens[starts[index] : starts[index] + length] for index in which])
            rest = [other[torch.tensor(which, device=other.device)] for other in others]
            norms.append(self.microbatch([runs, offsets.new_zeros(len(which), 1), *rest]))
            order += which
        return torch.cat(norms).index_select(0, torch.tensor(order, device=norms[0].device).argsort())

    def people(self, rows: Sequence[int], room: float, chunk: int | None) -> Tensor:
        """Add the clipped gradients of people with so many rows each, those with equally many together; their norms."""
        counts = torch.tensor(rows)
        starts, norms, order = counts.cumsum(0) - counts, [], []
        for each in dict.fromkeys(rows):
            who = (counts == each).nonzero().flatten()
            sizes = self.cut(len(who), room, each) if chunk is None else _of(len(who), max(1, chunk // each))
            for some in who.split(sizes):
                which = (starts[some].unsqueeze(1) + torch.arange(each)).flatten()
                norms.append(self.microbatch(self.rows(_as_slice(which)), each))
            order.append(who)
        place = torch.cat(order).argsort().to(norms[0].device)
        return torch.cat(norms).index_select(0, place)

    def rows(self, which: slice | Tensor) -> list[Tensor]:
        """These examples of every tensor of the lot."""
        held = [leaf.detach() for leaf in self.leaves if isinstance(leaf, Tensor)]
        return [leaf[which if isinstance(which, slice) else which.to(leaf.device)] for leaf in held]

    def cut(self, size: int, memory: float, each: int = 1) -> list[int]:
        """The sizes of the lot's microbatches, in units of `each` examples, by what a few examples take.

        Those that are tried count for nothing.
        """
        key = tuple(leaf.shape[1:] for leaf in self.leaves if isinstance(leaf, Tensor))
        if size * each <= FIRST:
            return [size]
        if key not in self.way.costs:
            trial = replace(self, sums=ClippedSums(self.parameters))
            with generators.replayed(self._device), suppress(Divided):
                trial.microbatch(self.rows(slice(FIRST)))
            self.way.costs[key] = trial.cost
        activations, gradients = self.way.costs[key]
        return cut(size, (activations * each, gradients * each), self.parameters, memory)

    def microbatch(self, rows: list[Tensor], each: int = 1) -> Tensor:
        """Add the clipped gradients of these units, of `each` examples, to the sums; their norms."""
        before = self._states
        while not self.way.one_by_one:
            try:
                return self._together(rows, each)
            except Divided as divided:
                return self._apart(rows, *groups(divided.answers, each), each)
            except Exception as failure:  # whatever it is: what is wrong with the model itself, one by one will say
                self.way.give_way(self.model, failure)
                generators.restore(before, self._device)
        return torch.cat([self._alone(list(unit)) for unit in zip(*(row.split(each) for row in rows), strict=True)])

    def _together(self, rows: list[Tensor], each: int) -> Tensor:
        size = len(rows[0])
        recording = Recording(self.parameters, size, each=each, lifted=self.way.lifted, shielded=self.way.shielded)
        with torch.enable_grad():
            (losses,), _ = together(self._loss, rows, recording, self.modules, self.state)
            if losses.requires_grad:
                _, *leaked = torch.autograd.grad(losses.sum(), [ANCHOR, *self.parameters.values()], allow_unused=True)
                if any(gradient is not None for gradient in leaked):
                    raise Unfollowed("a parameter was used where the recording cannot see it")
        with torch.no_grad():
            contributions, squares = recording.finish()
            self.cost = recording.bytes / size, recording.rows / size
            if not squares:
                return torch.zeros(size // each, device=losses.device)
            return self.sums.add(contributions, squares, self.rule, 1.0 / each)

    def _apart(self, rows: list[Tensor], parts: list[Tensor], alone: list[Tensor], each: int) -> Tensor:
        """Units that answer Python's questions alike, group by group, and the others one by one."""
        norms = [self.microbatch([row[part.to(row.device)] for row in rows], each) for part in parts]
        norms += [self._alone([row[unit.to(row.device)] for row in rows]) for unit in alone]
        order = torch.cat([*parts, *alone])[::each].to(norms[0].device)
        return torch.cat(norms).index_select(0, order.argsort())

    def _alone(self, rows: list[Tensor]) -> Tensor:
        """Add one unit's clipped gradient, the mean over its rows, by plain autograd."""
        each, totals = len(rows[0]), dict[str, Tensor]()
        for index in range(each):
            found = gradients(
                partial(self._rerun, [row[index] for row in rows], self._states), list(self.parameters.values())
            )
            for name, one in zip(self.parameters, found, strict=False):
                if one is not None:
                    totals[name] = one if name not in totals else totals[name] + one
        made = {name: (one / each if each > 1 else one).unsqueeze(0) for name, one in totals.items()}
        with torch.no_grad():
            return self.sums.add_rows(made, self.rule) if made else torch.zeros(1, device=self._device)

    def _rerun(self, row: list[Tensor], before: Any) -> tuple[list[Tensor], list[Tensor]]:
        """The loss of one example, each time with the same random numbers."""
        generators.restore(before, self._device)
        with torch.enable_grad():
            loss = one_alone(self._loss, row, self.state)
        return ([loss], [torch.ones_like(loss)]) if loss.requires_grad else ([], [])

    def _loss(self, *row: Tensor) -> Tensor:
        """The loss of a lot of one."""
        _, loss = self._outputs([*row[: self.whole], *(one.unsqueeze(0) for one in row[self.whole :])])
        if not isinstance(loss, Tensor):
            raise InvalidArgument(f"criterion: want a tensor, got {type(loss).__name__}")
        return loss.sum()

    def _outputs(self, rows: Sequence[Tensor]) -> tuple[Any, Any]:
        """The model's outputs for these examples, and the criterion's."""
        given = iter(rows)
        lot = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        x, y = pytree.tree_unflatten(lot, self.nesting)
        output = call(self.model, x)
        return output, self.criterion(output, y)

    @property
    def _states(self) -> Any:
        return generators.states(self._device)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.parameters.values())).device


def _people(rows: Sequence[int], size: int, raw: list[int]) -> list[int]:
    """How many rows each person has.

    Raises: InvalidArgument where they are not those of the lot.
    """
    counts = [check.whole("rows", one) for one in rows]
    if sum(counts) != size:
        raise InvalidArgument(f"rows: {sum(counts)} in all for a lot of {size}; want every row to be somebody's")
    if raw:
        raise InvalidArgument("rows with bags between offsets: want people's bags padded, as rows of a matrix")
    return counts


def _as_slice(which: Tensor) -> slice | Tensor:
    """Indices that follow each other as a slice, which copies nothing."""
    first, last = int(which[0]), int(which[-1])
    return slice(first, last + 1) if last - first == len(which) - 1 and bool((which.diff() == 1).all()) else which


def _of(size: int, most: int) -> list[int]:
    return [min(most, size - start) for start in range(0, size, most)]
