"""Parameters as every example's own: copies of them, and what a program makes of parameters alone.

A copy is the parameter expanded, not copied in memory: its gradient is the example's by construction. What is made from
parameters and public tensors alone is computed once for all examples, and is a view of its own
(`parameter_view.py`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from terrine.sgd.clipping.contribution import Dense
from terrine.sgd.clipping.functions import tensors
from terrine.sgd.clipping.ghost import wide
from terrine.sgd.clipping.parameter_view import ParameterView, is_view, shares_memory
from terrine.sgd.clipping.use import Unfollowed, listen

if TYPE_CHECKING:
    from terrine.sgd.clipping.recording import Recording


def copy_parameters(recording: Recording, value: Any) -> Any:
    """Return `value` with parameters as the example's own copies."""
    if isinstance(value, Tensor):
        view = recording.views.get(id(value))
        return value if view is None else copy_view(recording, view)
    if type(value) not in (list, tuple):
        return value
    return type(value)([copy_parameters(recording, member) for member in value])


def copy_view(recording: Recording, view: ParameterView) -> Tensor:
    """Return the example's own copy of a parameter, or of what was made from some; small ones are copied together."""
    copies = recording.copies
    if id(view) not in copies:
        small = [root for root in recording.roots.values() if root.value.dim() < 2 and id(root) not in copies]
        views = [view, *(root for root in small if root is not view)] if view.value.dim() < 2 else [view]

        def compute(n: int, physical: list[Tensor], _: list[bool]) -> tuple[Tensor, ...]:
            return tuple(
                listen(value.expand(n, *value.shape), partial(_hear_copy, recording, one))
                for one, value in zip(views, physical, strict=True)
            )

        expanded: Any = recording.all_examples(compute, *[one.value for one in views])  # leaving vmap is dear: once
        copies.update({id(one): recording.tag_own(copy) for one, copy in zip(views, expanded, strict=True)})
    if id(view) not in recording.counted:
        recording.counted.add(id(view))
        view.uses += 1
    return copies[id(view)]


def _hear_copy(recording: Recording, view: ParameterView, gradient: Tensor) -> None:
    recording.add_contributions([(view, Dense(wide(gradient.detach())).of_units(recording.units))])


def derive(recording: Recording, func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Return what a function makes of parameters alone, each tensor as a view that its uses contribute to."""
    used: list[ParameterView] = []

    def graph(value: Any) -> Any:
        if isinstance(value, Tensor):
            view = recording.views.get(id(value))
            if view is not None:
                used.append(view)
                return view.graph
            return value
        return type(value)(graph(item) for item in value) if type(value) in (list, tuple) else value

    others = [tensor for tensor in tensors((*args, *kwargs.values())) if id(tensor) not in recording.views]
    if others and any(recording.batched(others)):
        raise Unfollowed(f"{name}: a parameter meets an example inside torch.func or a function of its own")
    out = func(*(graph(value) for value in args), **{key: graph(value) for key, value in kwargs.items()})
    if any(part.is_complex() and part.requires_grad for part in tensors((out,))):  # contributions are of real numbers
        return recording.call_with_copies(func, args, kwargs)
    parents = tuple(dict.fromkeys(used))
    if name == "embedding" and isinstance(out, Tensor) and len(parents) == 1 and kwargs.get("padding_idx") is None:
        view = _add_derived(recording, out, parents)
        view.tokens = args[0]
        return view.value
    if isinstance(out, Tensor):
        return _add_derived(recording, out, parents).value if out.requires_grad else out
    if isinstance(out, tuple | list) and all(isinstance(item, Tensor) and item.requires_grad for item in out):
        return type(out)(_add_derived(recording, item, parents).value for item in out)
    return out


def _add_derived(recording: Recording, out: Tensor, parents: tuple[ParameterView, ...]) -> ParameterView:
    base = parents[0]
    root = base.parents[0] if is_view(base) else base
    view = ParameterView(out.detach(), out, parents=parents)
    if len(parents) == 1 and root.name and shares_memory(out, root.value):
        view.parents = (root,)
        root.views.append(view)
    recording.derived.append(view)
    recording.views[id(view.value)] = view
    for parent in view.parents:
        parent.uses += 2  # what is derived is settled at the end, with its cross terms
    return view
