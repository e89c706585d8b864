"""The recorder: an ordinary loop stays an ordinary loop.

While it is attached, every forward pass of the model with gradients enabled runs under a tape; the user's own
`loss.backward()` fills it; `collect` turns it into the clipped sum. Forward passes before one backward look at
the same examples (two views of one lot); a forward pass after a backward begins another part of the lot.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from terrine.errors import InvalidArgument
from terrine.sgd import pages
from terrine.sgd.clipping import constants
from terrine.sgd.clipping import rules as _rules  # noqa: F401  registers every rule
from terrine.sgd.clipping.axis import Unfollowed
from terrine.sgd.clipping.chunks import FIRST, bytes_of, recorded
from terrine.sgd.clipping.examples import is_unwatched, tensors, trained
from terrine.sgd.clipping.parts import Part, can_be_cut, can_be_joined, cut, joined
from terrine.sgd.clipping.policy import ClippingRule, as_rule
from terrine.sgd.clipping.registry import own_rules
from terrine.sgd.clipping.result import Clipped
from terrine.sgd.clipping.summing import Sums
from terrine.sgd.isolation import Isolation
from terrine.sgd.validate import validate

_SHARE = 0.2  # so much of the memory of its activations may a recorded part's per-example gradients take


class Recorder:
    """Watches an ordinary forward and backward pass, and turns what it saw into a clipped sum.

    `clip` may be set between steps: adaptive clipping is a flat bound that moves. Where `scale()` knows before the
    backward pass what `collect` will be told, a large lot is taken in parts, see `parts.py`.
    """

    def __init__(self, model: nn.Module, *, clip: float | ClippingRule) -> None:
        pages.keep()
        validate(model)
        self.model = model
        self.clip: ClippingRule = as_rule(clip)
        self.scale: Callable[[], float | None] = _unknown
        self.isolation: Isolation | None = None  # which follows the lot that is out
        self.measured: tuple[float, float] | None = None  # bytes of one example's activations, and gradients kept
        self._lots: list[list[Part]] = []  # the parts of every lot that went forward
        self._open: list[_Pass | None] = []
        self._leaked: set[str] = set()
        self._sums: Sums | None = None
        self._each: dict[Any, float] = {}  # bytes of one example's activations, by its shape; 0: not to be cut
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._enter, with_kwargs=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]
        for name, parameter in trained(model).items():
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._leak(name)))

    def collect(self, *, scale: float = 1.0) -> Clipped:
        """Consume what was recorded; `scale` undoes a mean reduction: the lot size for mean, 1 for sum.

        Raises: InvalidArgument where a gradient reached a parameter around the recorder.
        """
        parts, leaked = self._heard(), sorted(self._leaked)
        sums = self._sums or Sums(parts[0].parameters if parts else trained(self.model))
        self.discard()
        if leaked:
            raise InvalidArgument(
                f"{', '.join(leaked)}: used outside the model's forward pass, or recomputed in the backward pass "
                "(checkpointing), where no gradient can be clipped; sgd.clipped_sum takes any model"
            )
        for part in parts:
            self._add(part, sums, scale)
        norms = [part.norms for part in parts if part.norms is not None]
        return Clipped(sums.totals(), torch.cat(norms) if norms else torch.zeros(0))

    def discard(self) -> None:
        """Forget what was recorded."""
        self._lots.clear()
        self._leaked.clear()
        self._sums = None

    def close(self) -> None:
        """Detach from the model."""
        self.discard()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __deepcopy__(self, _memo: Any) -> Recorder:
        """Itself: hooks are copied with a model, and do nothing for the copy."""
        return self

    def _heard(self) -> list[Part]:
        return [part for lot in self._lots for part in lot if part.heard]

    def _add(self, part: Part, sums: Sums, scale: float) -> None:
        """Clip a part and add it up, unless that has been done."""
        if part.norms is not None:
            if part.scale != scale:
                raise InvalidArgument(f"scale={scale}: want {part.scale}, by which a part of the lot was clipped")
            return
        self.measured = part.bytes / part.examples, part.rows / part.examples
        with torch.no_grad():
            part.norms, part.scale = sums.add(*part.finish(), self.clip, scale), scale

    def _through(self, part: Part) -> None:
        """A part has heard all its gradients; where others follow, it makes room for theirs."""
        scale = self.scale()
        lot = next((lot for lot in self._lots if part in lot), [])
        if len(lot) > 1 and scale is not None:
            self._sums = self._sums or Sums(part.parameters)
            self._add(part, self._sums, scale)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._open.append(None)
        if not torch.is_grad_enabled() or len(self._open) > 1 or module is not self.model or is_unwatched():
            return None
        leaves = [leaf for leaf in tensors((args, kwargs)) if leaf.dim()]
        parameters = trained(module)
        if not leaves or not parameters:
            return None
        with self._aside():
            return self._begin_pass(module, (args, kwargs), leaves[0], parameters)

    def _begin_pass(self, module: nn.Module, given: Any, x: Tensor, parameters: dict[str, nn.Parameter]) -> Any:
        """Run all parts of a lot but the last; what the model is then called with."""
        size = int(x.shape[0])
        lot = self._begun(size) or self._begin(self._sizes(module, given, x, parameters), parameters)
        outputs, start = [], 0
        for part in lot[:-1]:
            some = cut(given, size, start, start + part.examples)
            with self._watching(part, some, given):
                outputs.append(module.forward(*some[0], **some[1]))
            start += part.examples
        last = cut(given, size, start, size) if start else given
        self._open[-1] = _Pass(self._watching(lot[-1], last, given), outputs)
        return last

    def _leave(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        here = self._open.pop() if self._open else None  # none where another hook failed before ours was called
        if here is None:
            return None
        here.watch.close()
        if not here.outputs or output is None:
            return None
        with self._aside():
            whole = joined([*here.outputs, output])
        if self.isolation is not None:
            self.isolation.join(whole, [*here.outputs, output])
        return whole

    def _watching(self, part: Part, given: Any, whole: Any) -> ExitStack:
        """What is computed until it is closed, from this part of the lot, is on the tape."""
        part.mark(tensors(given))
        watch = ExitStack()
        watch.enter_context(own_rules(self.model, part))
        watch.enter_context(part)
        if self.isolation is not None:
            part.allowed = self.isolation.is_allowed
            watch.enter_context(self.isolation.following(part, tensors(given), tensors(whole)))
        return watch

    def _unfollowed(self, part: Part, given: Any) -> ExitStack:
        """The same for a trial, which counts for nothing."""
        before, self.isolation = self.isolation, None
        try:
            return self._watching(part, given, given)
        finally:
            self.isolation = before

    def _aside(self) -> AbstractContextManager[None]:
        return nullcontext() if self.isolation is None else self.isolation.paused()

    def _begun(self, size: int) -> list[Part] | None:
        """The lot that went forward last, if it still waits for its backward pass: the same examples again."""
        last = self._lots[-1] if self._lots else []
        begun = last and not any(part.heard for part in last) and sum(part.examples for part in last) == size
        return last if begun else None

    def _begin(self, sizes: list[int], parameters: dict[str, nn.Parameter]) -> list[Part]:
        self._lots = [lot for lot in self._lots if any(part.heard for part in lot)]
        made = constants.of(self.model)
        self._lots.append([Part(parameters, size, _SHARE, made, self._through) for size in sizes])
        return self._lots[-1]

    def _sizes(self, module: nn.Module, given: Any, x: Tensor, parameters: dict[str, nn.Parameter]) -> list[int]:
        """The examples of each part."""
        size, key = len(x), x.shape[1:]
        each = self._each.get(key)
        if size <= FIRST or (each is None and not can_be_cut(module, given)):
            return [size]
        if each is None:
            each = self._each[key] = self._tried(module, cut(given, size, 0, FIRST), parameters)
        sizes = recorded(each, size, bytes_of(parameters))
        return sizes if len(sizes) == 1 or can_be_cut(module, given) else [size]

    def _tried(self, module: nn.Module, given: Any, parameters: dict[str, nn.Parameter]) -> float:
        """What one example's activations take, tried on a few; 0.0 for a model that is not to be cut.

        The trial is not part of the lot: a run that is resumed cuts its lots as it would have without a break.
        """
        part = Part(parameters, FIRST, _SHARE, constants.of(module), lambda _: None)
        try:
            with torch.random.fork_rng(devices=[]), self._unfollowed(part, given):
                output = module.forward(*given[0], **given[1])
        except (RuntimeError, ValueError, Unfollowed):
            return 0.0  # not for so few; what is wrong with it shows when the lot runs
        return part.bytes / FIRST if can_be_joined(module, output, FIRST) else 0.0

    def _leak(self, name: str) -> Any:
        def hook(_: Tensor) -> None:
            self._leaked.add(name)

        return hook


class _Pass(NamedTuple):
    """A forward pass under way: how to end it, and the outputs of the parts before its last."""

    watch: ExitStack
    outputs: list[Any]


def _unknown() -> float | None:
    return None
