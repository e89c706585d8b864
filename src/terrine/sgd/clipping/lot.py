"""`clipped_sum`: one forward and one backward pass over a lot, a microbatch at a time.

Clipping is per example, so a lot may be taken in microbatches of any size with the same result: small enough for
activations to stay near the processor, large enough to keep it busy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine import check
from terrine.errors import InvalidArgument
from terrine.sgd import generators
from terrine.sgd.clipping import rules as _rules  # noqa: F401  registers every rule
from terrine.sgd.clipping.alone import CHECKED_EVERY, Attributes, Way, check_company, groups, together, way_of
from terrine.sgd.clipping.examples import Criterion, Lot, bags, call, check_rows, count, trained, unwatched
from terrine.sgd.clipping.microbatches import FIRST, Cost, cut
from terrine.sgd.clipping.one_by_one import gradients
from terrine.sgd.clipping.policy import ClippingRule, as_rule, refuse_strange
from terrine.sgd.clipping.recording import Divided, Recording
from terrine.sgd.clipping.summing import Clipped, Sums
from terrine.sgd.clipping.use import ANCHOR, Unfollowed
from terrine.sgd.validate import validate


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
) -> Clipped:
    """The sum over the lot of clipped per-example gradients, and the norms before clipping.

    An example's gradient is that of `criterion(model(x), y)` for a lot of this example alone; a tuple `x` is positional
    arguments, a dict keyword arguments, and every tensor's first dimension counts the examples. `chunk` examples are
    in memory at a time; by default as many as are fastest and, where `memory` is given, about fit into so many bytes.

    Guarantee: adding or removing one example moves the sums by at most the rule's bound in L2 norm.
    Raises: InvalidArgument where the model keeps something of one example for the next.
    """
    rule, size = as_rule(clip), count(y)
    validate(model)
    raw = bags(x, size)
    check_rows(() if raw else x, size)
    parameters = trained(model)
    refuse_strange(rule, parameters)
    sums = Sums(parameters)
    if size == 0 or not parameters:
        home = next(iter(parameters.values())).device if parameters else None
        return Clipped(sums.totals(), torch.zeros(size, device=home))
    work = _Work(model, criterion, parameters, rule, sums, way_of(model), *pytree.tree_flatten((x, y)))
    room = math.inf if memory is None else check.positive("memory", memory)
    work.modules = tuple(model.modules())
    work.attributes = Attributes(work.modules)
    if raw:
        norms = work.bags(raw)
        return Clipped(sums.totals(), norms)
    work.check_company()
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
    sums: Sums
    way: Way
    leaves: list[Any]
    nesting: Any
    cost: Cost = (0.0, 0.0)  # of one example in the last microbatch
    modules: tuple[nn.Module, ...] = ()
    attributes: Attributes = field(default_factory=lambda: Attributes(()))
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

    def rows(self, which: slice | Tensor) -> list[Tensor]:
        """These examples of every tensor of the lot."""
        return [leaf.detach()[which] for leaf in self.leaves if isinstance(leaf, Tensor)]

    def cut(self, size: int, memory: float) -> list[int]:
        """The sizes of the lot's microbatches, by what a few examples take that count for nothing."""
        key = tuple(leaf.shape[1:] for leaf in self.leaves if isinstance(leaf, Tensor))
        if size <= FIRST:
            return [size]
        if key not in self.way.costs:
            trial = replace(self, sums=Sums(self.parameters))
            with generators.replayed(self._device), suppress(Divided):
                trial.microbatch(self.rows(slice(FIRST)))
            self.way.costs[key] = trial.cost
        return cut(size, self.way.costs[key], self.parameters, memory)

    def microbatch(self, rows: list[Tensor]) -> Tensor:
        """Add the clipped gradients of these examples to the sums; their norms."""
        before = generators.states(self._device)
        while not self.way.one_by_one:
            try:
                return self._together(rows)
            except Divided as divided:
                parts = groups(divided.answers)
                if 2 * len(parts) > len(rows[0]):
                    break
                return self._apart(rows, parts)
            except Exception as failure:  # whatever it is: what is wrong with the model itself, one by one will say
                self.way.give_way(self.model, failure)
                generators.restore(before, self._device)
        return torch.cat([self._alone([row[index] for row in rows]) for index in range(len(rows[0]))])

    def _together(self, rows: list[Tensor]) -> Tensor:
        size = len(rows[0])
        recording = Recording(self.parameters, size, lifted=self.way.lifted, shielded=self.way.shielded)
        with torch.enable_grad():
            (losses,), _ = together(self._loss, rows, recording, self.modules, self.attributes)
            if losses.requires_grad:
                _, *leaked = torch.autograd.grad(losses.sum(), [ANCHOR, *self.parameters.values()], allow_unused=True)
                if any(gradient is not None for gradient in leaked):
                    raise Unfollowed("a parameter was used where the recording cannot see it")
        with torch.no_grad():
            contributions, squares = recording.finish()
            self.cost = recording.bytes / size, recording.rows / size
            if not squares:
                return torch.zeros(size, device=losses.device)
            return self.sums.add(contributions, squares, self.rule)

    def _apart(self, rows: list[Tensor], parts: list[Tensor]) -> Tensor:
        """Examples that answer Python's questions alike, group by group."""
        norms = [self.microbatch([row[part.to(row.device)] for row in rows]) for part in parts]
        order = torch.cat(parts).to(norms[0].device)
        return torch.cat(norms).index_select(0, order.argsort())

    def _alone(self, row: list[Tensor]) -> Tensor:
        """Add one example's clipped gradient, by plain autograd."""
        before = generators.states(self._device)

        def run() -> tuple[list[Tensor], list[Tensor]]:
            generators.restore(before, self._device)
            watch = Recording({}, 1)
            watch.begin(None, row)
            self.attributes.restore()
            with watch, torch.enable_grad():
                loss = self._loss(*row)
            self.attributes.check(watch)
            return ([loss], [torch.ones_like(loss)]) if loss.requires_grad else ([], [])

        found = gradients(run, list(self.parameters.values()))
        made = {name: one.unsqueeze(0) for name, one in zip(self.parameters, found, strict=False) if one is not None}
        with torch.no_grad():
            return self.sums.add_rows(made, self.rule) if made else torch.zeros(1, device=self._device)

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
    def _device(self) -> torch.device:
        return next(iter(self.parameters.values())).device


def _of(size: int, most: int) -> list[int]:
    return [min(most, size - start) for start in range(0, size, most)]
