"""The tape: watches one forward and one backward pass and keeps what per-example gradients are made of.

While it is active, every torch function that receives a trained parameter is computed with the parameter
detached, so that autograd never forms a weight gradient; the function's output tells the tape its gradient
during the backward pass, and the function's rule turns inputs and output gradient into a `Contribution`.
Functions, not modules, are watched: tied weights, functional calls and raw parameters need nothing special.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.axis import FRONT, Unfollowed, Where, fits, follow, must_agree
from terrine.sgd.clipping.constants import MAKES, Constant
from terrine.sgd.clipping.contribution import Contribution, kept
from terrine.sgd.clipping.piece import Piece, is_view, merged, settle, shares_memory
from terrine.sgd.clipping.room import limit
from terrine.sgd.precision import exact, is_exact

log = logging.getLogger("terrine.sgd")


@dataclass(eq=False, slots=True)
class Use:
    """One call of a function with pieces of parameters among its arguments."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    pieces: dict[int | str, Piece]
    where: Where
    examples: int
    extra: Any = None
    heard: bool = False

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or by name, pieces as plain tensors."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def piece(self, position: int, name: str) -> Piece | None:
        """The piece given as this argument."""
        return self.pieces.get(position) or self.pieces.get(name)


Rule = Callable[[Use, Tensor], list[tuple[Piece, Contribution]]]
Forward = Callable[["Tape", Use], Any]

RULES: dict[Any, Rule] = {}
FORWARDS: dict[Any, Callable[..., Any]] = {}  # functions computed in another way while watched
PREPARE: dict[Any, Callable[[tuple[Any, ...]], tuple[Any, ...]]] = {}  # functions that like their arguments otherwise

COMPUTE: dict[Any, Callable[..., tuple[Tensor, Any] | None]] = {}  # output and what the rule wants to know, at once

FASTER: dict[Any, Callable[..., Tensor | None]] = {}  # functions without parameters: their output by another way


def rule_for(*functions: Any) -> Callable[[Rule], Rule]:
    """Make the decorated function the rule of these torch functions."""

    def keep(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(functions, rule))
        return rule

    return keep


class Tape(TorchFunctionMode):
    """Watches torch functions over a lot of `examples` examples.

    Per-example gradients are kept in memory up to `share` of the activations; beyond, norms take the way without.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        examples: int,
        share: float = math.inf,
        constants: Sequence[Constant] = (),
    ) -> None:
        self.parameters, self.examples, self.share = parameters, examples, share
        self._expected = constants
        self._constants: list[Constant] = []  # that are still to come in this pass, the last one first
        self.roots = {name: Piece(p.detach(), p, name) for name, p in parameters.items()}
        self._pieces: dict[int, Piece] = {id(root.graph): root for root in self.roots.values()}
        self._made: list[Piece] = []
        self.squares: dict[str, Tensor] = {}
        self.heard = False
        self.bytes = 0  # of activations and their gradients, about
        self.rows = 0  # of per-example gradients that are kept
        self.told: Callable[[str, Tensor], Any] | None = None  # who knows where the examples of a call's result lie
        self._key = object()
        self._sleeping = False
        self._exact = is_exact()

    def mark(self, lot: Any) -> None:
        """Say that these tensors, with which a pass begins, hold one example per index of their first dimension."""
        self._constants = list(reversed(self._expected))
        for tensor in _tensors(lot if isinstance(lot, tuple | list) else (lot,)):
            if tensor.dim() and tensor.shape[0] == self.examples:
                self.tag(tensor, FRONT)

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Let torch functions pass unwatched."""
        self._sleeping = True
        try:
            yield
        finally:
            self._sleeping = False

    def finish(self) -> tuple[dict[str, Contribution], dict[str, Tensor]]:
        """After the backward pass: every parameter's contribution and its squared norms."""
        with exact():
            return self._finished()

    def _finished(self) -> tuple[dict[str, Contribution], dict[str, Tensor]]:
        if self._made:
            settle(self._made, self.examples)
        contributions: dict[str, Contribution] = {}
        squares: dict[str, Tensor] = {}
        for name, root in self.roots.items():
            if root.contributions or (root.views and any(view.contributions for view in root.views)):
                contributions[name] = part = merged(root)
                known = self.squares.get(name)
                squares[name] = part.squares() if known is None else known
        for piece in (*self.roots.values(), *self._made):
            piece.contributions, piece.views = [], []  # whoever adds them up may let go of them one by one
        return contributions, squares

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name == "__get__":
            name = getattr(func.__self__, "__name__", "")
            if name not in _TURNS:
                return func(*args)
        kwargs = kwargs or {}
        if self._sleeping or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        given = _tensors(args)
        if kwargs:
            given += _tensors(kwargs.values())
        pieces = self._pieces
        for tensor in given:
            if id(tensor) in pieces:
                return self._use(func, name, args, kwargs, given)
        if func is functional.batch_norm:
            _refuse_statistics(*args, **kwargs)
        if name == "view" and not args[0].is_contiguous() and not isinstance(args[1], torch.dtype):
            func = Tensor.reshape  # channels may lie last in memory where the model does not expect it
        sources = self._sources(given)
        faster = FASTER.get(func) if sources and args else None
        result = None if faster is None else faster(*args, **kwargs)
        if result is None:
            result = func(*args, **kwargs)
        if name in MAKES and self._is_examples(name, result):
            return result
        if sources:
            for out in (result,) if isinstance(result, Tensor) else _tensors(result) if _is_list(result) else ():
                where = self._followed(name, sources, args, kwargs, out)
                if where != "lost" or name not in MAKES:
                    self.tag(out, where)
        return result

    def _is_examples(self, name: str, made: Tensor) -> bool:
        """Tag a constant of which the trial has told that it has a row for every example."""
        if not self._constants:
            return False
        expected = self._constants.pop()
        if not expected.is_like(name, tuple(made.shape), self.examples):
            self._constants.clear()  # another way through the model: nothing is known of it
            return False
        if expected.axis is not None:
            self.tag(made, Where(expected.axis))
        return expected.axis is not None

    # -- where the examples lie ------------------------------------------------------------------------

    def where(self, tensor: Tensor) -> Where | str | None:
        """Where the examples lie in `tensor`: None if it holds none, "lost" if nobody can tell."""
        tag = getattr(tensor, "_terrine_where", None)
        return tag[1] if tag is not None and tag[0] is self._key else None

    def tag(self, tensor: Tensor, where: Where | str) -> None:
        """Note where the examples lie in `tensor`."""
        tensor._terrine_where = (self._key, where)  # type: ignore[attr-defined]

    def followed(self, name: str, given: list[Tensor], out: Tensor, args: Any = (), kwargs: Any = None) -> Where:
        """Where the examples lie in `out`, for certain."""
        return self._certain(self._followed(name, self._sources(given), args, kwargs or {}, out), name, out)

    def _sources(self, given: list[Tensor]) -> list[tuple[Tensor, Where | str]]:
        """Those of the given tensors that hold examples, and where."""
        key = self._key
        found = []
        for tensor in given:
            tag = getattr(tensor, "_terrine_where", None)
            if tag is not None and tag[0] is key:
                found.append((tensor, tag[1]))
        return found

    def _followed(self, name: str, sources: list[Any], args: Any, kwargs: Any, out: Tensor) -> Where | str:
        examples = self.examples
        if examples == 1:
            return FRONT
        best: Where | None = None
        strict = len(sources) > 1 and must_agree(name)
        for tensor, where in sources:
            if isinstance(where, str):
                continue
            found = follow(name, tensor, where, args, kwargs, out, examples)
            if found is not None and not fits(out.shape, found, examples):
                found = None
            if strict and (found is None or (best is not None and found != best)):
                return "lost"
            if found is not None:
                if tensor.dim() == out.dim() and not strict:
                    return found
                best = best or found
        return best or "lost"

    def _certain(self, where: Where | str, name: str, out: Tensor) -> Where:
        if isinstance(where, str):
            raise Unfollowed(
                f"{name}: no dimension of {tuple(out.shape)} is known to hold the {self.examples} examples"
            )
        return where

    # -- an operation on a parameter -------------------------------------------------------------------

    def _use(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor]) -> Any:
        """Compute with plain tensors, and have the function's rule hear the output's gradient."""
        if func is functional.batch_norm:
            _refuse_statistics(*args, **kwargs)
        pieces = self._pieces
        if name in _EXPANDS and id(args[0]) in pieces:
            return self._expand(func, args, kwargs)
        sources = self._sources(given)
        if not sources:
            return self._derive(func, name, args, kwargs)
        if func in FORWARDS:
            return FORWARDS[func](self, *args, **kwargs)
        rule = RULES.get(func) or RULES.get(name) or _generic(name)
        found: dict[int | str, Piece] = {}
        given = []
        for place, value in enumerate(args):
            piece = pieces.get(id(value))
            if piece is None:
                given.append(self.plain(value) if type(value) in (list, tuple) else value)
            else:
                found[place] = piece
                given.append(piece.value)
        args = tuple(given)
        if kwargs:
            found.update({key: piece for key, value in kwargs.items() if (piece := pieces.get(id(value))) is not None})
            kwargs = {key: self.plain(value) for key, value in kwargs.items()}
        if not found:
            raise Unfollowed(f"{name}: a parameter inside a list")
        if func in PREPARE and len(args) > 1:
            args = PREPARE[func](args)
        computed = COMPUTE[func](*args, **kwargs) if func in COMPUTE else None
        out, extra = computed or (func(*args, **kwargs), None)
        if not isinstance(out, Tensor):
            raise Unfollowed(f"{name}: several outputs from one use of a parameter")
        told = None if self.told is None else self.told(name, out)
        where = told or self._certain(self._followed(name, sources, args, kwargs, out), name, out)
        return self.listen(out, Use(func, args, kwargs, found, where, self.examples, extra), rule)

    def piece(self, tensor: Tensor) -> Piece | None:
        """The piece that `tensor` is, if any."""
        return self._pieces.get(id(tensor))

    def listen(self, out: Tensor, use: Use, rule: Rule) -> Tensor:
        """Call `rule` with the gradient of `out`, once the backward pass knows it."""
        for piece in set(use.pieces.values()):
            piece.uses += 1
        self.bytes += 3 * out.numel() * out.element_size()
        versions = [(tensor, tensor._version) for tensor in _tensors(use.args) if tensor is not out]
        if out._is_view():  # changed in place, it would begin a history anew, and nobody would be heard
            out = _no_view(out, out.shape)
        hear = partial(self._hear, use, rule, versions)
        if out.requires_grad:
            _before(out, hear)
        else:
            out = _Anchored.apply(out, ANCHOR, hear)  # type: ignore[no-untyped-call]
        self.tag(out, use.where)
        return out

    def _hear(self, use: Use, rule: Rule, versions: list[tuple[Tensor, int]], gradient: Tensor) -> None:
        if use.heard:
            raise InvalidArgument("a second backward pass through one forward pass; want all losses in one backward")
        use.heard = True
        for tensor, version in versions:
            if tensor._version != version:
                raise Unfollowed("an input of a layer was changed in place after its use; use the out-of-place form")
        versions.clear()
        self.heard = True
        limit(max(_ROOM, self.share * self.bytes) - self.rows)
        kind = gradient.device.type
        try:
            if torch.is_grad_enabled() or torch.is_autocast_enabled(kind) or not self._exact:
                with torch.no_grad(), torch.autocast(kind, enabled=False), exact():
                    self._keep(rule(use, gradient))
            else:  # as a backward pass mostly is
                self._keep(rule(use, gradient))
        finally:
            limit(math.inf)
        use.args, use.extra = (), None

    def _keep(self, found: list[tuple[Piece, Contribution]]) -> None:
        for piece, contribution in found:
            piece.contributions.append(contribution)
            if piece.simple:
                self.squares[piece.name] = contribution.squares()
            self.rows += kept(contribution)

    def plain(self, value: Any) -> Any:
        """`value` with pieces replaced by what the forward pass computes with."""
        piece = self._pieces.get(id(value))
        if piece is not None:
            return piece.value
        return type(value)([self.plain(item) for item in value]) if type(value) in (list, tuple) else value

    # -- something made from parameters alone ----------------------------------------------------------

    def _expand(self, func: Any, args: Any, kwargs: Any) -> Any:
        source = self._pieces[id(args[0])]
        out = func(source.graph, *args[1:], **kwargs)
        plain = all(
            size == 1 or size == new
            for size, new in zip(reversed(source.value.shape), reversed(out.shape), strict=False)
        )
        piece = self._derived(out, (source,))
        if plain:
            piece.expanded_from = source.expanded_from or source
        return piece.value

    def _derive(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        found: list[Piece] = []

        def graph(value: Any) -> Any:
            if isinstance(value, Tensor):
                piece = self._pieces.get(id(value))
                if piece is not None:
                    found.append(piece)
                    return piece.graph
                if value.requires_grad:
                    raise Unfollowed(f"{name}: nobody can tell which examples one of its arguments holds")
                return value
            return type(value)(graph(item) for item in value) if type(value) in (list, tuple) else value

        out = func(*(graph(a) for a in args), **{k: graph(a) for k, a in kwargs.items()})
        parents = tuple(dict.fromkeys(found))
        if name == "embedding" and isinstance(out, Tensor) and len(parents) == 1 and kwargs.get("padding_idx") is None:
            piece = self._derived(out, parents)
            piece.tokens = args[0]
            return piece.value
        if isinstance(out, Tensor):
            return self._derived(out, parents).value if out.requires_grad else out
        if _is_list(out) and all(isinstance(item, Tensor) and item.requires_grad for item in out):
            return type(out)(self._derived(item, parents).value for item in out)
        return out

    def _derived(self, out: Tensor, parents: tuple[Piece, ...]) -> Piece:
        base = parents[0]
        root = base.parents[0] if is_view(base) else base
        piece = Piece(out.detach(), out, parents=parents)
        if len(parents) == 1 and root.name and shares_memory(out, root.value):
            piece.parents = (root,)
            root.views.append(piece)
        self._made.append(piece)
        self._pieces[id(piece.value)] = piece
        for parent in piece.parents:
            parent.uses += 2  # what is derived is settled at the end, with its cross terms
        return piece


class _Anchored(torch.autograd.Function):
    """Makes a tensor require grad without copying it; its gradient is heard, and goes nowhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, _anchor: Tensor, hear: Callable[[Tensor], None]) -> Tensor:
        ctx.mark_dirty(tensor)
        ctx.set_materialize_grads(False)
        ctx.hear = hear
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if gradients[0] is not None:
            ctx.hear(gradients[0])
        return None, None, None


def _before(out: Tensor, hear: Callable[[Tensor], None]) -> None:
    """Have `hear` called with the gradient of `out`, before the backward of what made it."""
    index = out.output_nr

    def hook(gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[index]
        if gradient is not None:
            hear(gradient)

    node = out.grad_fn
    if node is None:  # a leaf, such as an input that requires grad and was returned as it is
        out.register_hook(hear)
    else:
        node.register_prehook(hook)


_no_view = torch.ops.aten._unsafe_view.default  # the same memory and gradient, on its own

ANCHOR = torch.zeros((), requires_grad=True)
"""Where every watched backward pass ends; it never receives a gradient."""

_ROOM = 32 << 20  # bytes of per-example gradients that may always be kept

_EXPANDS = frozenset({"expand", "expand_as", "broadcast_to", "repeat"})
_TURNS = frozenset({"T", "mT", "H", "mH"})  # attributes that are functions of the tensor


def _generic(name: str) -> Rule:
    from terrine.sgd.clipping.rules.generic import masked

    if name.endswith("_") and name not in ("__add__",) and not name.startswith("__"):
        raise Unfollowed(f"{name}: an in-place operation on a parameter's result")
    if name not in _said:
        _said.add(name)
        log.warning("no clipping rule for %s on a parameter: exact, but one backward per example", name)
    return masked


_said: set[str] = set()


def _refuse_statistics(*args: Any, training: bool = False, **_: Any) -> None:
    if training or (len(args) > 5 and args[5]):
        raise InvalidArgument("batch normalisation mixes examples; sgd.fix(model) makes it group normalisation")


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """Every tensor among the values, and in lists and dicts among them."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _NESTS):
            found += _tensors(value.values() if isinstance(value, dict) else value)
    return found


_NESTS = (tuple, list, dict)
