"""Functions that are computed in another way under vmap, which has no rule for them, a slow one, or a wrong one.

A substitute is given the recording and the call, and returns what the call would have for this one example. Most leave
vmap for a moment (`Recording.all_examples`) and make one call on the tensors of all examples, in which no example
meets another: they are further images, rows or heads of one large lot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.errors import InvalidArgument
from terrine.sgd.clipping.functions import tensors
from terrine.sgd.clipping.state import caller

if TYPE_CHECKING:
    from terrine.sgd.clipping.recording import Recording


def _attention(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Scaled dot-product attention of all examples at once: vmap has no rule for it on every device."""
    places = tensor_places(args, kwargs)
    given = [argument_at(args, kwargs, place) for place in places]
    heads = [one for place, one in zip(places, given, strict=True) if place not in (3, "attn_mask")]
    if recording.is_alone or any(one.dim() != 4 for one in heads):
        return func(*args, **kwargs)
    lots = max(len(one) for one in heads)  # that every example has of its own, mostly one

    def compute(n: int, physical: list[Tensor], batched: list[bool]) -> Tensor:
        full = {}
        for place, one, own in zip(places, physical, batched, strict=True):
            one = one if own else one.unsqueeze(0)
            one = one.reshape(len(one), *[1] * (5 - one.dim()), *one.shape[1:])
            full[place] = one.expand(n, lots, *one.shape[2:]).flatten(0, 1)
        out: Tensor = func(
            *[full.get(place, value) for place, value in enumerate(args)],
            **{name: full.get(name, value) for name, value in kwargs.items()},
        ).unflatten(0, (n, lots))
        return out

    return recording.all_examples(compute, *given)


def _pooled(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Pooling of all examples' images at once, channels last in memory as convolutions left them."""
    if recording.is_alone or args[0].dim() != 4 or kwargs.get("return_indices") or len(args) > 6:
        return func(*args, **kwargs)

    def compute(n: int, physical: list[Tensor], batched: list[bool]) -> Tensor:
        images = physical[0] if batched[0] else physical[0].expand(n, *physical[0].shape)
        out: Tensor = func(images.flatten(0, 1), *args[1:], **kwargs).unflatten(0, (n, -1))
        return out

    return recording.all_examples(compute, args[0])


def _viewed(_recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """A view, or a copy where channels lie last in memory and the model does not expect it."""
    return func(*args, **kwargs) if isinstance(args[1], torch.dtype) or kwargs else Tensor.reshape(*args)


def _still_batched(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Under vmap `requires_grad_` is not allowed; activations require what they need already."""
    return func(*args, **kwargs) if recording.is_alone else args[0]


def _batch_norm(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Batch normalisation by statistics that are given; by those of examples it mixes them, by those of weights not."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    given = dict(zip(names, args, strict=False)) | kwargs
    if not recording.is_of_examples(tensors((*args, *kwargs.values()))):
        return func(*args, **kwargs)
    if given.get("training"):
        raise InvalidArgument(
            f"{caller()}: batch normalisation mixes examples; want group normalisation, which sgd.fix(model) makes of "
            "layers"
        )
    x, shape = given["input"], (1, -1, *[1] * (given["input"].dim() - 2))
    scale = torch.rsqrt(given["running_var"] + given.get("eps", 1e-5)).view(shape)
    out = (x - given["running_mean"].view(shape)) * scale
    for name, apply in (("weight", torch.mul), ("bias", torch.add)):
        if given.get(name) is not None:
            out = apply(out, given[name].view(shape))
    return out


def _group_norm(recording: Recording, func: Any, args: Any, kwargs: Any) -> Any:
    """Group normalisation of all examples at once, scaled and shifted after it; vmap does not know every layout."""
    given = dict(zip(("input", "num_groups", "weight", "bias", "eps"), args, strict=False)) | kwargs
    x, groups, eps = given["input"], given["num_groups"], given.get("eps", 1e-5)
    if recording.is_alone:
        return func(*args, **kwargs)

    def compute(n: int, physical: list[Tensor], batched: list[bool]) -> Tensor:
        images = physical[0] if batched[0] else physical[0].expand(n, *physical[0].shape)
        out: Tensor = functional.group_norm(images.flatten(0, 1), groups, None, None, eps).unflatten(0, (n, -1))
        return out

    out, places = recording.all_examples(compute, x), (-1, *[1] * (x.dim() - 2))
    for name, apply in (("weight", torch.mul), ("bias", torch.add)):
        if given.get(name) is not None:
            out = apply(out, given[name].reshape(places))
    return out


INSTEAD: dict[Any, Callable[[Recording, Any, Any, Any], Any]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.max_pool2d: _pooled,
    functional.avg_pool2d: _pooled,
    functional.adaptive_avg_pool2d: _pooled,
    functional.batch_norm: _batch_norm,
    functional.group_norm: _group_norm,
    Tensor.view: _viewed,
    Tensor.requires_grad_: _still_batched,
}


def tensor_places(args: Sequence[Any], kwargs: dict[str, Any]) -> list[int | str]:
    """Which arguments are tensors."""
    every: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return [place for place, value in every if isinstance(value, Tensor)]


def argument_at(args: Sequence[Any], kwargs: dict[str, Any], place: int | str) -> Any:
    return args[place] if isinstance(place, int) else kwargs[place]
