"""Multi-head attention, computed so that its projections are seen as the linear maps they are.

softmax(Q K^T / sqrt(d) + mask) V itself holds no parameter. `torch.nn.functional.multi_head_attention_forward`
hides its projections from whoever watches torch functions, so it is written out here, in the same order.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.use import COMPOSED

if TYPE_CHECKING:
    from terrine.sgd.clipping.recording import Recording


def attention(
    recording: Recording,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _width: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    _static_k: Tensor | None = None,
    _static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    **_ignored: Any,
) -> Any:
    """The same arguments and results as the function it stands for; inputs are (positions, examples, width)."""
    with recording:
        query, key, value = _examples_first(query, key, value)
        if in_proj_weight is not None and not use_separate_proj_weight:
            q, k, v = _packed(query, key, value, in_proj_weight, in_proj_bias)
        else:
            biases = in_proj_bias.chunk(3) if in_proj_bias is not None else (None, None, None)
            pairs = ((query, q_proj_weight), (key, k_proj_weight), (value, v_proj_weight))
            q, k, v = (functional.linear(x, w, b) for (x, w), b in zip(pairs, biases, strict=True))  # type: ignore[arg-type]
        if bias_k is not None and bias_v is not None:
            n = query.shape[0]
            k, v = torch.cat([k, bias_k.expand(n, 1, -1)], 1), torch.cat([v, bias_v.expand(n, 1, -1)], 1)
        q, k, v = (_heads(x, num_heads) for x in (q, k, v))
        if add_zero_attn:
            k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
        mask = _mask(attn_mask, key_padding_mask, q, k)
        mixed, weights = _mixed(q, k, v, mask, dropout_p if training else 0.0, need_weights)
        joined = mixed.transpose(1, 2).flatten(2)  # (examples, positions, width)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        return functional.linear(joined, out_proj_weight, out_proj_bias).transpose(0, 1), weights


COMPOSED[functional.multi_head_attention_forward] = attention


def _mixed(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """The values by their weights, and the weights where they are wanted."""
    if not need_weights:
        return functional.scaled_dot_product_attention(q, k, v, mask, rate), None
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
    weights = functional.dropout(weights, rate) if rate else weights
    return weights @ v, weights


def _examples_first(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All three with examples first, the same tensors still the same."""
    moved = {id(tensor): tensor for tensor in (query, key, value)}
    moved = {place: tensor.transpose(0, 1) for place, tensor in moved.items()}
    return moved[id(query)], moved[id(key)], moved[id(value)]


def _packed(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    if query is key and key is value:
        return functional.linear(query, weight, bias).chunk(3, dim=-1)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    parts = zip((query, key, value), weight.chunk(3), biases, strict=True)
    return tuple(functional.linear(x, w, b) for x, w, b in parts)


def _heads(x: Tensor, heads: int) -> Tensor:
    """(examples, positions, width) as (examples, heads, positions, width / heads)."""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(1, 2)


def _mask(attention: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """One additive mask from both, as wide as the keys (a bias key or a zero key is always seen)."""
    total: Tensor | None = None
    for mask, shape in ((attention, None), (padding, (q.shape[0], 1, 1, -1))):
        if mask is None:
            continue
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf) if mask.dtype == torch.bool else mask
        if shape is not None:
            mask = mask.reshape(shape)
        elif mask.dim() == 3:
            mask = mask.reshape(q.shape[0], -1, *mask.shape[1:])
        mask = functional.pad(mask, (0, k.shape[2] - mask.shape[-1]))
        total = mask if total is None else total + mask
    return total
