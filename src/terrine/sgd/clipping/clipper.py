"""The clipped sum of a batch: one forward and one backward pass, a microbatch at a time.

Clipping is per unit, so a batch may be taken in microbatches of any size with the same result: small enough for
activations to stay near the processor, large enough to keep it busy. A unit is an example, or a person with several
rows: the units of a microbatch have equally many.

    loss(model, batch of one)  ->  g_i  ->  g_i min(1, C / |g_i|)  ->  sum            [ACG16] Algorithm 1

An example whose program fails, or whose gradient is not finite, adds nothing.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine import check
from terrine.common import generators
from terrine.errors import InvalidArgument, TerrineError
from terrine.sgd.clipping import rules as _rules  # noqa: F401  registers every rule
from terrine.sgd.clipping.alone import (
    FIRST,
    cut,
    group_by_answer,
    is_out_of_memory,
    run_alone,
    run_each,
    run_together,
    take_gradients,
    way_of,
)
from terrine.sgd.clipping.batch import Rows, as_slice, check_people, flatten_batch, group_by_rows, make_up_rows
from terrine.sgd.clipping.functions import check_hooks, trained
from terrine.sgd.clipping.recording import Divided, Recording
from terrine.sgd.clipping.state import Reachable, Watch, caller, check_state
from terrine.sgd.clipping.sums import Clipped, ClippedSums, ClippingRule, as_rule
from terrine.sgd.clipping.use import ANCHOR, RefusedReading, Unfollowed
from terrine.sgd.devices import full_precision
from terrine.sgd.loss import Loss, as_loss


class Clipper:
    """Adds up clipped gradients of one loss of one model; `parameters` are those that it was made with.

    `losses` are those of the last batch's units, and `failure` what one of its examples raised: both are private.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        microbatch: int | None = None,
        memory: float | None = None,
        precision: str | None = None,
        reads_values: bool = False,
        roots: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self._loss, self.parameters = model, as_loss(loss), trained(model)
        self._most = None if microbatch is None else check.whole("microbatch", microbatch)
        self._memory = math.inf if memory is None else check.positive("memory", memory)
        if precision not in (None, "fp32", "bf16"):
            raise check.refuse("precision", precision, "None, 'fp32' or 'bf16'")
        self._half, self._reads_values = precision == "bf16", reads_values
        self._roots = {"model": model, "loss": loss} if roots is None else dict(roots)
        self._watch, self._is_trial = Watch(self._roots), True
        self.is_run = False  # in a run no example's failure or refusal may end it: it adds nothing
        check_hooks(self.parameters)
        self._way = way_of(model)
        self._device = next((parameter.device for parameter in self.parameters.values()), torch.device("cpu"))
        self.losses, self.failure = torch.zeros(0), None  # type: Tensor, Exception | None
        self._failed = self._units = self.calls = 0

    def try_out(self, batch: Any) -> None:
        """Run the loss once on made-up rows of a batch's shape, which tell nothing of it.

        What the program finds out at its first call, such as how it can be run, is found out here.

        Raises:
            InvalidArgument: the loss depends on no parameter of the model, or fails on made-up rows.
        """
        leaves, nesting, size = flatten_batch(batch)
        if self.calls or not size or not self.parameters:
            return
        self.calls = 1
        failures: list[Exception] = []
        with generators.seeded(secrets.token_bytes(32)):  # a program that seeds them itself is noticed
            for value in (0, 1):
                try:
                    self._try_out(Rows(make_up_rows(leaves, [value, value]), nesting))
                    return
                except TerrineError:
                    self.calls = 0
                    raise
                except Exception as failure:  # made-up rows may be none that the program takes
                    failures.append(failure)
        if not is_out_of_memory(failures[-1]):
            self.calls = 0
            reason = str(failures[-1]).splitlines()[0] if str(failures[-1]) else ""
            raise InvalidArgument(
                f"loss: {caller(failures[-1])} fails on a made-up example ({type(failures[-1]).__name__}: {reason}); "
                "want a function of (model, batch) for a batch of one, or a criterion, that takes rows of zeros or ones"
            ) from failures[-1]

    def try_metric(self, name: str, metric: Callable[[nn.Module, Any], Tensor], batch: Any) -> None:
        """Measure a metric on made-up rows.

        Raises: InvalidArgument where it gives no number.
        """
        leaves, nesting, size = flatten_batch(batch)
        with generators.seeded(secrets.token_bytes(32)):
            made_up = pytree.tree_unflatten(make_up_rows(leaves, [0, 1]), nesting)
            if size and not self.measure(metric, made_up).isfinite().any():
                raise InvalidArgument(
                    f"metric {name!r}: gives no number for made-up examples; want a function of (model, batch) for a "
                    "batch of one"
                )

    def _try_out(self, rows: Rows) -> None:
        self._check_loss(rows)
        for is_first in (True, False):  # in which a program may find something out, and keep that
            reachable = None if is_first else Reachable(self._roots)
            self._microbatch(rows, 1, ClippedSums(self.parameters), as_rule(1.0))
            if self.failure is not None:
                failure, self.failure, self._failed = self.failure, None, 0
                raise failure
            check_state(reachable)
        if self._way.one_by_one:
            self._way.warn(self._measure_slowdown(rows))

    def _measure_slowdown(self, rows: Rows) -> str:
        """How much longer examples take one by one than together in a plain step, in words; empty if that fails."""
        try:
            begun = time.perf_counter()
            take_gradients(lambda: self._loss(self.model, rows.nest_all()).sum(), list(self.parameters.values()))
            plain = time.perf_counter() - begun
            self._microbatch(rows, 1, ClippedSums(self.parameters), as_rule(1.0))
            return f", about {(time.perf_counter() - begun - plain) / plain:.1f} times a plain step of two examples"
        except Exception:  # a loss for one example may not take two
            return ""

    def _check_loss(self, rows: Rows) -> None:
        """Refuse a loss that is none, or that the model has no part in."""
        watch, before = Recording({}, 1, reads_values=True), generators.states(self._device)
        try:
            with torch.enable_grad():
                value = run_alone(partial(self._loss_of, rows), rows.take(0), watch)
            named = list(self.parameters.values())
            gradients = take_gradients(lambda: value, named) if value.requires_grad else []
        finally:
            watch.put_back()
            generators.restore(before, self._device)
        if all(gradient is None for gradient in gradients):
            raise InvalidArgument(
                "loss: uses no trained parameter of the model, so there is no gradient; want one that calls the model "
                "it is given, outside torch.no_grad()"
            )

    def add_up(self, batch: Any, rule: ClippingRule, rows: Sequence[int] | None = None) -> Clipped:
        """Return the clipped sum of a batch, and the units' norms.

        Raises: InvalidArgument where the program keeps something of an example.
        """
        leaves, nesting, size = flatten_batch(batch)
        people = None if rows is None else check_people(rows, size)
        units = size if people is None else len(people)
        sums = ClippedSums(self.parameters, units)
        self.losses = torch.zeros(units, device=self._device)
        self._units += units
        if not units or not self.parameters:
            return Clipped(sums.totals(), torch.zeros(units, device=self._device))
        self._is_trial = False
        self.calls += 1
        norms, losses, order = [], [], []
        with self._watch.watching(always=self._reads_values):
            for each, who, starts in group_by_rows(people, size):
                for some in self._cut(who, each, leaves, nesting):
                    which = (starts[some].unsqueeze(1) + torch.arange(each)).flatten()
                    part = self._microbatch(Rows(leaves, nesting, as_slice(which)), each, sums, rule)
                    norms.append(part[0])
                    losses.append(part[1])
                    order.append(who[some] if people is not None else some)
        place = torch.cat(order).argsort().to(self._device)
        self.losses = torch.cat(losses).index_select(0, place)
        return Clipped(sums.totals(), torch.cat(norms).index_select(0, place))

    def check_failures(self) -> None:
        """Forget failures since the last time; raise where every unit failed, since then it is not their numbers.

        Raises: what one of them raised.
        """
        failure, failed, units = self.failure, self._failed, self._units
        self.failure, self._failed, self._units = None, 0, 0
        if failure is not None and failed == units:
            raise failure

    def measure(self, metric: Callable[[nn.Module, Any], Tensor], batch: Any) -> Tensor:
        """Return a metric's value for every example alone, without gradients."""
        leaves, nesting, size = flatten_batch(batch)
        rows = Rows(leaves, nesting)
        with self._watch.watching(always=self._reads_values):
            values = [
                run_each(
                    lambda *row: torch.as_tensor(metric(self.model, rows.nest(row))).float().mean(),
                    Rows(leaves, nesting, slice(start, start + _AT_ONCE)).tensors,
                    reads_values=self._reads_values,
                )
                for start in range(0, size, _AT_ONCE)
            ]
        return torch.cat([torch.zeros(0, device=self._device), *values])

    def _cut(self, who: Tensor, each: int, leaves: list[Any], nesting: Any) -> Iterable[Tensor]:
        """Cut these units, of `each` rows, into microbatches: by what a few made-up rows take."""
        count = len(who)
        every = torch.arange(count)
        if count * each <= FIRST and self._most is None:
            return [every]
        sizes: int | list[int] = max(1, (self._most or 0) // each)
        if self._most is None:
            key = tuple(leaf.shape[1:] for leaf in leaves if isinstance(leaf, Tensor))
            if key not in self._way.costs and not self._way.one_by_one:
                self._measure_cost(leaves, nesting)
            activations, gradients = self._way.costs.get(key, (0.0, 0.0))
            sizes = cut(count, (activations * each, gradients * each), self.parameters, self._memory)
        return list(torch.split(every, sizes))

    def _measure_cost(self, leaves: list[Any], nesting: Any) -> None:
        """Find out on made-up rows what one row takes; nothing, where they fail."""
        made_up = make_up_rows(leaves, [0] * FIRST)
        before = self.failure, self._failed
        with generators.replayed(self._device), suppress(Exception):
            self._microbatch(Rows(made_up, nesting), 1, ClippedSums(self.parameters), as_rule(1.0))
        self.failure, self._failed = before

    def _microbatch(self, rows: Rows, each: int, sums: ClippedSums, rule: ClippingRule) -> tuple[Tensor, Tensor]:
        """Add the clipped gradients of these units, of `each` rows, to the sums; return their norms and losses.

        Where vmap fails for some, halves go on by themselves: an example that fails changes nothing for the others.
        """
        units = torch.arange(rows.size).split(each)
        if self._way.one_by_one:
            return _join([self._alone(rows.select(unit), sums, rule) for unit in units])
        before = generators.states(self._device)
        try:
            result = self._together(rows, each, sums, rule)
            self._way.refused = 0
            return result
        except Divided as divided:
            return self._apart(rows, *group_by_answer(divided.answers, each), each, sums, rule)
        except Exception as failure:  # whatever it is: what is wrong with an example, one by one will say
            generators.restore(before, self._device)
            again = not self._is_of_example(failure) and self._way.change(
                failure, is_trial=self._is_trial, is_single=len(units) == 1
            )
        if again or self._way.one_by_one:
            return self._microbatch(rows, each, sums, rule)
        if len(units) == 1:
            return self._alone(rows, sums, rule)
        half = len(units) // 2 * each
        parts = (rows.select(torch.arange(rows.size)[part]) for part in (slice(half), slice(half, None)))
        return _join([self._microbatch(part, each, sums, rule) for part in parts])

    def _together(self, rows: Rows, each: int, sums: ClippedSums, rule: ClippingRule) -> tuple[Tensor, Tensor]:
        size, way = rows.size, self._way
        recording = Recording(
            self.parameters, size, each=each, lifted=way.lifted, shielded=way.shielded, reads_values=self._reads_values
        )
        given = [tensor.clone() for tensor in rows.tensors] if way.writes_rows else rows.tensors
        try:
            with torch.enable_grad(), self._check_rows(given):
                losses = run_together(partial(self._loss_of, rows), given, recording)
                if losses.requires_grad:
                    found = torch.autograd.grad(losses.sum(), [ANCHOR, *self.parameters.values()], allow_unused=True)
                    if any(gradient is not None for gradient in found[1:]):
                        raise Unfollowed("a parameter where the recording cannot see it")
        finally:
            recording.put_back()
        with torch.no_grad(), full_precision(self._device):
            values = losses.detach().float().unflatten(0, (-1, each)).mean(1)
            contributions, squares = recording.finish()
            way.costs.setdefault(rows.key, (recording.bytes / size, recording.rows / size))
            if not squares:
                return torch.zeros(size // each, device=self._device), values
            return sums.add(contributions, squares, rule, 1.0 / each), values

    @contextmanager
    def _check_rows(self, given: list[Tensor]) -> Iterator[None]:
        """Notice a program that writes into its example: on made-up rows, so that later each has copies of its own.

        Raises: InvalidArgument where that is only noticed now.
        """
        versions = [tensor._version for tensor in given]
        try:
            yield
        finally:
            wrote = not self._way.writes_rows and versions != [tensor._version for tensor in given]
            self._way.writes_rows |= wrote
            if wrote and not self._is_trial:  # also where it fails afterwards: the rows are not what they were
                raise InvalidArgument(
                    "the loss or the model writes into its example; want a copy first, as by x = x.clone()"
                )

    def _apart(
        self, rows: Rows, parts: list[Tensor], alone: list[Tensor], each: int, sums: ClippedSums, rule: ClippingRule
    ) -> tuple[Tensor, Tensor]:
        """Units that answer Python's questions alike, group by group, and the others one by one."""
        results = [self._microbatch(rows.select(part), each, sums, rule) for part in parts]
        run = self._alone if each > 1 else partial(self._microbatch, each=1)
        results += [run(rows.select(unit), sums=sums, rule=rule) for unit in alone]
        place = torch.cat([*parts, *alone])[::each].argsort().to(self._device)
        norms, values = _join(results)
        return norms.index_select(0, place), values.index_select(0, place)

    def _alone(self, rows: Rows, sums: ClippedSums, rule: ClippingRule) -> tuple[Tensor, Tensor]:
        """Add one unit's clipped gradient, the mean over its rows, by plain autograd; return its norm and loss."""
        each, totals, values = rows.size, dict[str, Tensor](), list[Tensor]()
        before = generators.states(self._device)
        try:
            for index in range(each):
                for name, gradient in self._take_gradients(rows, index, values).items():
                    totals[name] = gradient if name not in totals else totals[name] + gradient
        except Exception as failure:
            refused = isinstance(failure, TerrineError) and not self._is_of_example(failure)
            if refused or is_out_of_memory(failure):
                raise
            generators.restore(before, self._device)
            self.failure, self._failed = failure, self._failed + 1
            nan = torch.full((1,), math.nan, device=self._device)
            return nan, nan
        gradients = {name: (total / each if each > 1 else total).unsqueeze(0) for name, total in totals.items()}
        with torch.no_grad(), full_precision(self._device):
            norm = sums.add_rows(gradients, rule) if gradients else torch.zeros(1, device=self._device)
        return norm, torch.stack(values[-each:]).mean(0, keepdim=True)

    def _is_of_example(self, failure: Exception) -> bool:
        """Whether a refusal is one example's own, which adds nothing: in a run, of what the trial did not refuse."""
        return self.is_run and not self._is_trial and isinstance(failure, RefusedReading)

    def _take_gradients(self, rows: Rows, index: int, values: list[Tensor]) -> dict[str, Tensor]:
        """One row's gradients by parameter name; its loss is appended to `values`."""
        watch, before = Recording({}, 1, reads_values=self._reads_values), generators.states(self._device)

        def rerun() -> Tensor:  # each time with the same random numbers
            watch.put_back()
            generators.restore(before, self._device)
            with torch.enable_grad():
                loss: Tensor = run_alone(partial(self._loss_of, rows), rows.take(index), watch)
            values.append(loss.detach().float())
            return loss

        try:
            gradients = take_gradients(rerun, list(self.parameters.values()))
        finally:
            watch.put_back()
        pairs = zip(self.parameters, gradients, strict=False)
        return {name: gradient for name, gradient in pairs if gradient is not None}

    def _loss_of(self, rows: Rows, *row: Tensor) -> Tensor:
        """The loss of a batch of one."""
        half = torch.autocast(self._device.type, dtype=torch.bfloat16) if self._half else nullcontext()
        with half:
            value = self._loss(self.model, rows.nest(row))
        if not isinstance(value, Tensor):
            raise TypeError(f"want a tensor for a batch of one, got {type(value).__name__}")
        return value.sum()


_AT_ONCE = 256  # examples that a metric is measured on at a time


def _join(results: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    norms, values = (torch.cat(column) for column in zip(*results, strict=True))
    return norms, values
