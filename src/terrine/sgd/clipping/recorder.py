"""The recorder: an ordinary loop stays an ordinary loop.

While it is attached, every forward pass of the model with gradients enabled runs under a tape; the user's own
`loss.backward()` fills it; `collect` turns it into the clipped sum. Forward passes before one backward look at
the same examples (two views of one lot); a forward pass after a backward begins another part of the lot.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from terrine.errors import InvalidArgument
from terrine.sgd.clipping import rules as _rules  # noqa: F401  registers every rule
from terrine.sgd.clipping.examples import trained
from terrine.sgd.clipping.policy import ClippingRule, as_rule
from terrine.sgd.clipping.registry import own_rules
from terrine.sgd.clipping.result import Clipped
from terrine.sgd.clipping.summing import Sums
from terrine.sgd.clipping.tape import Tape
from terrine.sgd.validate import validate

_SHARE = 0.2  # a recorded lot cannot be cut into parts: so much more memory may its per-example gradients take


class Recorder:
    """Watches an ordinary forward and backward pass, and turns what it saw into a clipped sum.

    `clip` may be set between steps: adaptive clipping is a flat bound that moves.
    """

    def __init__(self, model: nn.Module, *, clip: float | ClippingRule) -> None:
        validate(model)
        self.model = model
        self.clip: ClippingRule = as_rule(clip)
        self._tapes: list[Tape] = []
        self._open: list[ExitStack | None] = []
        self._leaked: set[str] = set()
        self.measured: tuple[float, float] | None = None  # bytes of one example's activations, and gradients kept
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
        tapes, leaked = [tape for tape in self._tapes if tape.heard], sorted(self._leaked)
        self.discard()
        if leaked:
            raise InvalidArgument(
                f"{', '.join(leaked)}: used outside the model's forward pass, or recomputed in the backward pass "
                "(checkpointing), where no gradient can be clipped; sgd.clipped_sum takes any model"
            )
        sums = Sums(trained(self.model))
        norms = [torch.zeros(0)]
        with torch.no_grad():
            for tape in tapes:
                self.measured = tape.bytes / tape.examples, tape.rows / tape.examples
                norms.append(sums.add(*tape.finish(), self.clip, scale))
        return Clipped(sums.totals(), torch.cat(norms[1:] or norms))

    def discard(self) -> None:
        """Forget what was recorded."""
        self._tapes.clear()
        self._leaked.clear()

    def close(self) -> None:
        """Detach from the model."""
        self.discard()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._open.append(None)
        if not torch.is_grad_enabled() or len(self._open) > 1:
            return
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        parameters = trained(module)
        if not leaves or not parameters:
            return
        tape = self._tape(int(leaves[0].shape[0]), parameters)
        tape.mark(leaves)
        watch = ExitStack()
        watch.enter_context(own_rules(module, tape))
        watch.enter_context(tape)
        self._open[-1] = watch

    def _tape(self, size: int, parameters: dict[str, nn.Parameter]) -> Tape:
        last = self._tapes[-1] if self._tapes else None
        if last is not None and not last.heard and last.examples == size:
            return last
        self._tapes = [tape for tape in self._tapes if tape.heard]
        self._tapes.append(Tape(parameters, size, _SHARE))
        return self._tapes[-1]

    def _leave(self, *_: Any) -> None:
        watch = self._open.pop() if self._open else None  # none where another hook failed before ours was called
        if watch is not None:
            watch.close()

    def _leak(self, name: str) -> Any:
        def hook(_: Tensor) -> None:
            self._leaked.add(name)

        return hook
