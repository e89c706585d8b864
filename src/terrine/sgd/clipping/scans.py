"""Recurrent layers over time, forward and backward: everything that does not wait for the step before is done at once.

    tanh, relu   h = f(a),  a = x + U h' + b
    lstm         c = s(f) c' + s(i) tanh(g),  h = s(o) tanh(c)                 i, f, g, o = x + U h' + b
    gru          h = n + s(z) (h' - n),  n = tanh(x_n + s(r) u_n)              r, z = x + u,  u = U h' + b

Going back, what multiplies the gradient of h or c in each gate is known before the first step, so that a step is one
product with U and a few multiplications. Nothing flows back to U and b: theirs is the rule of a linear map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from terrine.sgd import kernels

State = tuple[Tensor, ...]

_CACHED = 1 << 18  # numbers of a weight that stays in a core's cache

_sigmoid = torch.ops.aten.sigmoid_backward.grad_input  # gradient * s * (1 - s)
_tanh = torch.ops.aten.tanh_backward.grad_input  # gradient * (1 - t^2)


def scan(
    kind: str, inputs: Tensor, first: State, weight: Tensor, bias: Tensor | None, hidden: list[Tensor]
) -> tuple[Tensor, State, Tensor]:
    """Outputs (time, n, width), the last state, and h' of every step.

    `inputs` (time, n, gates) is x of all steps, contiguous, and overwritten; `first` the state before the first, one or
    two of (n, width). The backward pass puts the gradient of U h' + b into `hidden`.
    """
    made = _Scan.apply(_KINDS[kind], weight, bias, hidden, inputs, *first)  # type: ignore[no-untyped-call]
    outputs, before, *last = made
    return outputs, tuple(last), before


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: Any, weight: Tensor, bias: Any, hidden: Any, inputs: Tensor, *first: Tensor) -> Any:
        outputs, last, ctx.back = kind(inputs, first, weight, bias)
        ctx.before = torch.cat([first[0].unsqueeze(0), outputs[:-1]])  # outputs may be changed in place
        ctx.mark_non_differentiable(ctx.before)
        ctx.hidden = hidden
        return (outputs, ctx.before, *last)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs, hidden, first = ctx.back(ctx.before, gradients[0], gradients[2:])
        ctx.hidden.append(hidden)
        ctx.back = ctx.before = None
        return (None, None, None, None, inputs, *first)


def _plain(squash: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor]) -> Any:
    def run(inputs: Tensor, first: State, weight: Tensor, bias: Tensor | None) -> Any:
        outputs, across = inputs.clone() if bias is None else inputs + bias, weight.t()
        (state,) = first
        for step in outputs.unbind(0):
            state = squash(step.addmm_(state, across))
        end = state.clone()

        def back(before: Tensor, gradient: Tensor, last: State) -> Any:
            through = slope(torch.cat([before[1:], end.unsqueeze(0)]))
            state = last[0].clone()
            for step, out in zip(reversed(through.unbind(0)), reversed(gradient.unbind(0)), strict=True):
                state = torch.mm(step.mul_(state.add_(out)), weight)
            return through, through, (state,)

        return outputs, (end.clone(),), back

    return run


def _lstm(inputs: Tensor, first: State, weight: Tensor, bias: Tensor | None) -> Any:
    gates, across = inputs if bias is None else inputs.add_(bias), weight.t()
    if kernels.take(gates, weight, *first) and weight.numel() <= _CACHED:
        return _lstm_by_kernels(gates, first[0].contiguous(), first[1].contiguous(), weight.contiguous())
    outputs, cells, bent = (inputs.new_empty(*inputs.shape[:2], weight.shape[1]) for _ in range(3))
    state, cell = first
    enter, forget, new, leave = gates.chunk(4, dim=-1)
    both = gates.narrow(-1, 0, 2 * weight.shape[1])
    views = (gates, both, enter, forget, new, leave, outputs, cells, bent)
    for all_gates, two, i, f, g, o, out, c, t in zip(*(view.unbind(0) for view in views), strict=True):
        all_gates.addmm_(state, across)
        two.sigmoid_()
        g.tanh_()
        o.sigmoid_()
        cell = torch.mul(f, cell, out=c).addcmul_(i, g)
        state = torch.mul(o, torch.tanh(cell, out=t), out=out)

    def back(_: Tensor, gradient: Tensor, last: State) -> Any:
        return _lstm_back(gates, cells, bent, first[1], weight, gradient, last)

    return outputs, (state.clone(), cell.clone()), back


def _lstm_by_kernels(gates: Tensor, state: Tensor, cell: Tensor, weight: Tensor) -> Any:
    steps = kernels.stepping()
    outputs, cells, bent = steps.there(gates, (state, cell), weight)

    def back(_: Tensor, gradient: Tensor, last: State) -> Any:
        before = last[0].clone(), last[1].clone()
        made = steps.back(gates, cells, bent, cell, weight, gradient.contiguous(), *before)
        return made, made, before

    return outputs, (outputs[-1].clone(), cells[-1].clone()), back


def _lstm_back(
    gates: Tensor, cells: Tensor, bent: Tensor, first: Tensor, weight: Tensor, gradient: Tensor, last: State
) -> tuple[Tensor, Tensor, State]:
    width = bent.shape[-1]
    enter, forget, new, leave = gates.chunk(4, dim=-1)
    made = torch.empty_like(gates)  # what the gradient of c (i, f, g) or h (o) is multiplied with
    i, f, g, o = made.chunk(4, dim=-1)
    _sigmoid(new, enter, grad_input=i)
    _tanh(enter, new, grad_input=g)
    _sigmoid(bent, leave, grad_input=o)
    _sigmoid(first, forget[0], grad_input=f[0])
    _sigmoid(cells[:-1], forget[1:], grad_input=f[1:])
    down = _tanh(leave, bent, grad_input=bent)  # from h to c; nobody needs tanh(c) any more
    state, cell = last[0].clone(), last[1].clone()
    by_cell = made.narrow(-1, 0, 3 * width).unflatten(-1, (3, width))
    steps = zip(*(v.unbind(0) for v in (made, by_cell, o, down, forget, gradient)), strict=True)
    for all_gates, three, one, bend, keep, out in reversed(list(steps)):
        state.add_(out)
        cell.addcmul_(state, bend)
        three.mul_(cell.unsqueeze(1))
        one.mul_(state)
        torch.mm(all_gates, weight, out=state)
        cell.mul_(keep)
    return made, made, (state, cell)


def _gru(inputs: Tensor, first: State, weight: Tensor, bias: Tensor | None) -> Any:
    width = weight.shape[1]
    outputs, hidden = (inputs.new_empty(*inputs.shape[:2], width) for _ in range(2))  # of u, only u_n is needed again
    across, across_new = weight.t().split([2 * width, width], dim=1)
    shift, shift_new = (weight.new_zeros(3 * width) if bias is None else bias).split([2 * width, width])
    two = inputs.narrow(-1, 0, 2 * width).add_(shift)
    r, z, new = inputs.chunk(3, dim=-1)  # overwritten with the gates
    (state,) = first
    parts = (hidden, outputs, two, r, z, new)
    for new_u, out, both, reset, update, fresh in zip(*(part.unbind(0) for part in parts), strict=True):
        torch.addmm(shift_new, state, across_new, out=new_u)
        both.addmm_(state, across).sigmoid_()
        fresh.addcmul_(reset, new_u).tanh_()
        state = torch.lerp(fresh, state, update, out=out)

    def back(before: Tensor, gradient: Tensor, last: State) -> Any:
        return _gru_back(inputs, hidden, before, weight, gradient, last)

    return outputs, (state.clone(),), back


def _gru_back(
    gates: Tensor, hidden: Tensor, before: Tensor, weight: Tensor, gradient: Tensor, last: State
) -> tuple[Tensor, Tensor, State]:
    time, n, width = before.shape
    r, z, new = gates.chunk(3, dim=-1)
    made = gates.new_empty(time, n, 4 * width)  # of x_n, r, z, u_n: what the gradient of h is multiplied with
    of_new, of_r, of_z, of_u = made.chunk(4, dim=-1)
    _tanh(torch.sub(z.new_ones(()), z, out=of_new), new, grad_input=of_new)
    torch.mul(of_new, r, out=of_u)
    _sigmoid(hidden, r, grad_input=of_r).mul_(of_new)
    _sigmoid(torch.sub(before, new, out=of_z), z, grad_input=of_z)
    of_hidden = made.narrow(-1, width, 3 * width)
    state = last[0].clone()
    steps = zip(*(v.unbind(0) for v in (made.unflatten(-1, (4, width)), of_hidden, z, gradient)), strict=True)
    for four, u, keep, out in reversed(list(steps)):
        state.add_(out)
        four.mul_(state.unsqueeze(1))
        state.mul_(keep).addmm_(u, weight)
    inputs = torch.cat([of_r, of_z, of_new], dim=-1, out=gates.detach())  # nobody needs the gates any more
    return inputs, of_hidden, (state,)


_KINDS: dict[str, Any] = {
    "tanh": _plain(Tensor.tanh_, lambda out: 1 - out.square()),
    "relu": _plain(Tensor.relu_, lambda out: (out > 0).to(out.dtype)),
    "lstm": _lstm,
    "gru": _gru,
}
