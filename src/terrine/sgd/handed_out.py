"""The lot that a loop has been given: its forward passes, its loss, and the clipped sum they come to.

A forward pass takes the lot in microbatches that do not meet before their outputs are joined; autograd goes back
through one after the other, and what a microbatch recorded is clipped, added up and forgotten as soon as it has heard
all its gradients. Where the lot is of people, a microbatch holds people with equally many rows, all rows of each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine.common import generators
from terrine.errors import InvalidArgument
from terrine.sgd.clipping.alone import CHECKED_EVERY, Way, check_company, groups, together, way_of
from terrine.sgd.clipping.microbatches import FIRST, Cost, cut_loop
from terrine.sgd.clipping.one_by_one import Recomputed, recomputed
from terrine.sgd.clipping.recording import Divided, Recording
from terrine.sgd.clipping.state import ModuleState, untouched
from terrine.sgd.clipping.summing import Clipped, ClippedSums
from terrine.sgd.clipping.use import Unfollowed
from terrine.sgd.isolation import LotTensor, Mixed, Rows, Total, handed, plain
from terrine.sgd.isolation.totals import mean
from terrine.sgd.lots import Piece
from terrine.sgd.step import Step

_COUNT = itertools.count()


class HandedOut:
    """A piece of a lot of `size` examples, from the moment it is handed out to its step."""

    def __init__(self, step: Step, piece: Piece) -> None:
        self.size, self.loss = piece.size, None  # type: int, Callable[[], Tensor] | None
        self.people = piece.people
        self.number = next(_COUNT)
        self.outputs: set[Any] = set()  # the autograd nodes of the model's outputs
        self.measured: Cost | None = None
        self._step = step
        self._divisor: float | None = None  # of the loss that went backward
        self._running = False  # a backward pass from a total
        self._calls = 0
        self._parts: list[_Part] = []
        self._norms: dict[int, Tensor] = {}  # of microbatches that were clipped, by their place
        self._sums = ClippedSums(step.parameters)
        self._modules = tuple(step.model.modules())

    # -- the model -------------------------------------------------------------------------------------

    def forward(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The outputs of the model, whose own forward method is `original`, for every example alone."""
        call = _Call(original, *pytree.tree_flatten((args, kwargs)), self.size)
        self._state = ModuleState(self._modules)  # as the loop has left them
        records = torch.is_grad_enabled()
        if records:
            self._calls += 1
            if self._norms:
                raise InvalidArgument(
                    "the model is called again after the lot's backward pass: each example may count once; want one "
                    "backward pass for all losses of an example"
                )
        outputs = self._passed(call) if records else [self._run(call, slice(None), {})[0]]
        leaves, nesting = call.joined(outputs, self._order() if records else None)
        if self._step.taken % CHECKED_EVERY == 0 and self._calls <= 1:
            call.check_company(self._modules)
        made = [self._given(leaf, call) for leaf in leaves]
        return pytree.tree_unflatten(made, nesting)

    def _passed(self, call: _Call) -> list[Any]:
        """The outputs of every microbatch; a first forward pass decides what they are."""
        if self._parts:
            return [self._again(call, part.which, part.made) for part in self._parts]
        outputs = []
        for which, each in self._cut(call):
            for part, found in self._divided(call, which, each):
                part.made.through = partial(self._through, len(self._parts))
                part.made.allowed = self._check_allowed
                self._parts.append(part)
                outputs.append(found)
        return outputs

    def _divided(self, call: _Call, which: Tensor, each: int) -> list[tuple[_Part, Any]]:
        try:
            found, made = self._run(call, which, self._step.parameters, each)
            return [(_Part(which, each, made), found)]
        except Divided as divided:
            together, alone = groups(divided.answers, each)
            parts = [one for group in together for one in self._divided(call, which[group], each)]
            for unit in (which[one] for one in alone):
                rows, own = call.rows(unit), self._step.parameters
                found, made = recomputed(call.alone, rows, own, state=self._state, each=each)
                parts.append((_Part(unit, each, made), found))
            return parts

    def _run(self, call: _Call, which: Any, parameters: Any, each: int = 1) -> tuple[Any, Any]:
        """One microbatch of units of `each` examples: its outputs, and what recorded them."""
        way, rows = way_of(self._step.model), call.rows(which)
        before = generators.states(rows[0].device)
        while not way.one_by_one:
            made = Recording(parameters, len(rows[0]), each=each, lifted=way.lifted, shielded=way.shielded)
            try:
                return together(call.alone, rows, made, self._modules, self._state), made
            except Divided:
                if not parameters:
                    way = Way(one_by_one=True)
                    break
                raise
            except Exception as failure:  # whatever it is: what is wrong with the model itself, one by one will say
                way.give_way(self._step.model, failure)
                generators.restore(before, rows[0].device)
        return recomputed(call.alone, rows, parameters, state=self._state, each=each)

    def _again(self, call: _Call, which: Tensor, made: Recording | Recomputed) -> Any:
        """A further forward pass of a microbatch, on the same recording."""
        if isinstance(made, Recomputed):
            found, _ = recomputed(call.alone, call.rows(which), self._step.parameters, made, self._state)
            return found
        try:
            return together(call.alone, call.rows(which), made, self._modules, self._state)
        except Divided as divided:
            raise InvalidArgument(
                "a second forward pass on one lot asks its examples a question that they answer differently; want one "
                "forward pass for all views, or sgd.Trainer"
            ) from divided

    def _cut(self, call: _Call) -> list[tuple[Tensor, int]]:
        """The examples of each microbatch, and how many each unit has, by what a few take that count for nothing."""
        every, way = torch.arange(self.size), way_of(self._step.model)
        if self.people is None and self.size <= FIRST:
            return [(every, 1)]
        if call.key not in way.costs and not way.one_by_one and self.size > FIRST:
            with generators.replayed(call.device), suppress(Divided):
                (leaves, _), made = self._run(call, torch.arange(FIRST), self._step.parameters)
                way.costs[call.key] = made.bytes / FIRST, 0.0
                if isinstance(made, Recording) and self._reaches(leaves):
                    way.lifted = True
                    way.give_way(self._step.model, Unfollowed("a parameter was used where the recording cannot see it"))
        activations, alone = way.costs.get(call.key, (0.0, 0.0))[0], way_of(self._step.model).one_by_one
        found, start = [], 0
        for each, units in itertools.groupby([1] * self.size if self.people is None else self.people):
            many = len(list(units))
            sizes = [1] * many if alone else cut_loop(many, (activations * each, 0.0), self._step.parameters)
            own = every[start : start + many * each]
            found += [(some, each) for some in own.split([each * size for size in sizes])]
            start += many * each
        return found

    def _reaches(self, leaves: list[Any]) -> bool:
        """Whether autograd would take a gradient of the whole lot to a parameter, as of a scripted function."""
        own, seen = {id(one) for one in self._step.parameters.values()}, set()
        left = [leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor)]
        while left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if id(getattr(node, "variable", None)) in own:
                return True
            left += [one for one, _ in node.next_functions]
        return False

    def _order(self) -> Tensor | None:
        """What puts the microbatches' examples back in order; None where they are."""
        every = torch.cat([part.which for part in self._parts])
        return None if torch.equal(every, torch.arange(self.size)) else every.argsort()

    def _given(self, leaf: Any, call: _Call) -> Any:
        """One output as a tensor of the lot; a number for each example is the model's own loss."""
        if not isinstance(leaf, Tensor):
            return leaf
        self.outputs.add(leaf.grad_fn)
        if call.is_loss(leaf, self._modules):
            loss, status = mean(leaf, self.size)
            return handed(loss, self, status)
        return handed(*call.placed(leaf, self))

    # -- the loss --------------------------------------------------------------------------------------

    @contextmanager
    def backward(self, totals: Sequence[Total]) -> Iterator[None]:
        """Within, gradients are taken in: a backward pass from these totals.

        Raises: InvalidArgument where they, or another one before, are of another kind.
        """
        if len({self._divisor, *(total.divisor for total in totals)} - {None}) != 1:
            raise InvalidArgument("backward passes of one lot from a mean and from a sum; want one kind of loss")
        self._divisor, self._running = totals[0].divisor, True
        try:
            yield
        finally:
            self._running = False

    def _check_allowed(self) -> None:
        if not self._running:
            raise InvalidArgument(
                "the loss could not be followed from the model's output to loss.backward(): it left torch, or went "
                "through a torch.autograd.Function or torch.func; want make_private(..., criterion=criterion)"
            )

    def _through(self, place: int) -> None:
        """A microbatch has heard all its gradients; where nothing follows, it makes room for the next."""
        if self._calls == 1:
            self._clip(place)

    def _clip(self, place: int) -> None:
        if place in self._norms:
            return
        which, each, made = self._parts[place]
        self.measured = made.bytes / len(which), made.rows / len(which)
        with torch.no_grad():
            contributions, squares = made.finish()
            rule = self._step.rule
            none = torch.zeros(len(which) // each, device=next(iter(self._step.parameters.values())).device)
            self._norms[place] = self._sums.add(contributions, squares, rule, 1 / each) if squares else none

    def clipped(self) -> Clipped:
        """The clipped sum of the whole piece."""
        for place in range(len(self._parts)):
            self._clip(place)
        if not self._parts:
            return Clipped(self._sums.totals(), torch.zeros(0))
        norms = torch.cat([self._norms[place] for place in range(len(self._parts))])
        order = torch.cat([part.which[:: part.each] for part in self._parts]).argsort().to(norms.device)
        return Clipped(self._sums.totals(), norms[order])


class _Part(NamedTuple):
    """A microbatch: which examples, how many each unit has, and what they did."""

    which: Tensor
    each: int
    made: Recording | Recomputed


class _Call:
    """One call of the model with tensors of a lot of `n` examples."""

    def __init__(self, forward: Callable[..., Any], leaves: list[Any], nesting: Any, n: int) -> None:
        self._forward, self._leaves, self._nesting, self._n = forward, leaves, nesting, n
        self._places: list[tuple[int, Rows, int]] = []  # of tensors with examples: where they lie, how often the lot
        self._physical: list[Tensor] = []
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, LotTensor):
                self._add(place, leaf)
            elif isinstance(leaf, Tensor) and leaf.requires_grad:
                raise InvalidArgument("the model is given a tensor that requires a gradient and is not of the lot")
        _, rows, self._outer = self._places[0]
        self._axis, self._inner = rows.axis, rows.inner
        self.key = tuple(tuple(one.shape[1:]) for one in self._physical)
        self.device = self._physical[0].device

    def _add(self, place: int, leaf: LotTensor) -> None:
        if leaf.status is None:
            self._leaves[place] = plain(leaf)
            return
        if not isinstance(leaf.status, Rows):
            what = leaf.status if isinstance(leaf.status, Mixed) else "a total over the examples"
            raise InvalidArgument(
                f"the model's input mixes examples, so no clipping bounds one of them: {what}; want what is done to "
                "the lot before the model to treat every example by itself"
            )
        rows, tensor = leaf.status, plain(leaf).detach()
        outer = tensor.shape[rows.axis] // (self._n * rows.inner)
        self._places.append((place, rows, outer))
        if outer == rows.inner == 1:
            self._physical.append(tensor.movedim(rows.axis, 0))
        else:
            split = tensor.unflatten(rows.axis, (outer, self._n, rows.inner)).movedim(rows.axis + 1, 0)
            self._physical.append(split.flatten(rows.axis + 1, rows.axis + 2))

    def rows(self, which: Any) -> list[Tensor]:
        """These examples of every tensor, examples first."""
        if isinstance(which, Tensor) and len(which) == self._n:
            which = slice(None)
        elif isinstance(which, Tensor) and int(which[-1]) - int(which[0]) == len(which) - 1:
            which = slice(int(which[0]), int(which[-1]) + 1)
        return [one[which] for one in self._physical]

    def alone(self, *row: Tensor) -> Any:
        """The model on a lot of one; what it returns but tensors and what holds them stays inside."""
        leaves = list(self._leaves)
        for (place, rows, outer), one in zip(self._places, row, strict=True):
            leaves[place] = one.unsqueeze(rows.axis) if outer == rows.inner == 1 else one
        args, kwargs = pytree.tree_unflatten(leaves, self._nesting)
        return pytree.tree_map(_withheld, self._forward(*args, **kwargs))

    def joined(self, outputs: list[Any], order: Tensor | None) -> tuple[list[Any], Any]:
        """The outputs of all microbatches, examples first and in order."""
        nesting = outputs[0][1]
        joined = []
        for leaves in zip(*(leaves for leaves, _ in outputs), strict=True):
            if not isinstance(leaves[0], Tensor):
                joined.append(leaves[0])
                continue
            whole = torch.cat(leaves) if len(leaves) > 1 else leaves[0]
            joined.append(whole if order is None else whole.index_select(0, order.to(whole.device)))
        return joined, nesting

    def is_loss(self, leaf: Tensor, modules: Sequence[nn.Module]) -> bool:
        """Whether an output, examples first, is one number each: a loss, if two examples together have one as well."""
        return leaf.dim() == 1 and leaf.is_floating_point() and self._is_total(modules)

    def _is_total(self, modules: Sequence[nn.Module]) -> bool:
        """Whether the model makes one number of two examples; tried on zeros, which tell nothing of the lot."""
        zeros = [one.new_zeros(2, *one.shape[1:]) for one in self._physical]
        try:
            with torch.no_grad(), generators.replayed(self.device), untouched(modules):
                found = self._whole(zeros)
        except Exception:  # a model that does not take zeros: what it says of one example is a loss
            return True
        return any(leaf.dim() == 0 and leaf.is_floating_point() for leaf in found if isinstance(leaf, Tensor))

    def _whole(self, rows: list[Tensor]) -> list[Any]:
        """The model on several examples at once, as a plain call has it; examples first."""
        leaves = list(self._leaves)
        for (place, where, outer), one in zip(self._places, rows, strict=True):
            if outer == where.inner == 1:
                leaves[place] = one.movedim(0, where.axis)
            else:
                split = one.unflatten(where.axis + 1, (outer, where.inner)).movedim(0, where.axis + 1)
                leaves[place] = split.flatten(where.axis, where.axis + 2)
        args, kwargs = pytree.tree_unflatten(leaves, self._nesting)
        return pytree.tree_leaves(pytree.tree_map(_withheld, self._forward(*args, **kwargs)))

    def placed(self, leaf: Tensor, lot: HandedOut) -> tuple[Tensor, HandedOut, Rows]:
        """An output, examples first, with its examples where the model's own outputs have them."""
        many = self._outer * self._inner
        axis = self._axis if leaf.dim() > self._axis + 1 and leaf.shape[self._axis + 1] == many else 0
        if leaf.dim() == 1 or leaf.shape[axis + 1] != many:
            if many > 1:
                raise InvalidArgument(
                    f"the model's output has shape {tuple(leaf.shape[1:])} for {many} rows of one example"
                )
            return leaf, lot, Rows(0)  # one that has no dimension for the examples, where there is one of them
        if many == 1:
            return leaf.squeeze(axis + 1).movedim(0, axis), lot, Rows(axis)
        split = leaf.unflatten(axis + 1, (self._outer, self._inner)).movedim(0, axis + 1)
        return split.flatten(axis, axis + 2), lot, Rows(axis, self._inner)

    def check_company(self, modules: Sequence[nn.Module]) -> None:
        """Try two examples together.

        Raises: InvalidArgument where the model gives them other outputs than alone.
        """
        if all(outer == rows.inner == 1 for _, rows, outer in self._places):
            check_company(self._whole, self.alone, self._physical, modules)


class Withheld:
    """Something that a model returned and that is no tensor, such as a cache: it stays inside the forward pass."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise InvalidArgument(f"{self._kind} of the model's output: not available in a private run; want its tensors")


def _withheld(leaf: Any) -> Any:
    return leaf if isinstance(leaf, Tensor | int | float | str | bool | None) else Withheld(type(leaf).__name__)
