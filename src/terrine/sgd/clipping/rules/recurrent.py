"""Recurrent layers: the input projection of all steps is one linear map; the recurrent one is used at every step, and
its uses over time are positions of one linear map, cross terms included. Cells, projections, mixed precision and
trained first states are computed step by step under the tape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.axis import FRONT, Unfollowed, Where
from terrine.sgd.clipping.parameter_view import ParameterView
from terrine.sgd.clipping.tape import FORWARDS, RULES, Tape, Use

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]  # input part, recurrent part, state -> state


def _lstm(inputs: Tensor, hidden: Tensor, state: State) -> State:
    i, f, g, o = (inputs + hidden).chunk(4, dim=-1)
    cell = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell


def _gru(inputs: Tensor, hidden: Tensor, state: State) -> State:
    reset_in, update_in, new_in = inputs.chunk(3, dim=-1)
    reset_h, update_h, new_h = hidden.chunk(3, dim=-1)
    update = torch.sigmoid(update_in + update_h)
    new = torch.tanh(new_in + torch.sigmoid(reset_in + reset_h) * new_h)
    return (new + update * (state[0] - new),)


def _tanh(inputs: Tensor, hidden: Tensor, _: State) -> State:
    return (torch.tanh(inputs + hidden),)


def _relu(inputs: Tensor, hidden: Tensor, _: State) -> State:
    return (torch.relu(inputs + hidden),)


def over_time(cell: Cell) -> Callable[..., Any]:
    """What stands for torch.lstm, torch.gru and the like on padded sequences."""

    def run(
        tape: Tape, x: Tensor, states: Any, weights: Any, biased: Any, layers: Any, dropout: Any,
        training: Any = None, bidirectional: Any = None, batch_first: Any = None,
    ) -> Any:  # fmt: skip
        if not isinstance(biased, bool):  # of a packed sequence, after its sizes and states, come the weights
            raise Unfollowed("recurrent layers on packed sequences have no rule")
        states = states if isinstance(states, list | tuple) else (states,)
        for state in states:
            if tape.where(state) is None and tape.parameter(state) is None:
                tape.tag(state, Where(1))
        ways = 2 if bidirectional else 1
        each = len(weights) // (layers * ways)
        projected = cell is _lstm and each == (5 if biased else 3)
        lasts: list[State] = []
        with tape:
            x = x.transpose(0, 1) if batch_first else x
        for layer in range(layers):
            outs = []
            for way in range(ways):
                index = layer * ways + way
                with tape:
                    start = tuple(state[index] for state in states)
                    turned = x.flip(0) if way else x
                out, last = _layer(tape, cell, turned, start, weights[index * each : (index + 1) * each], projected)
                with tape:
                    outs.append(out.flip(0) if way else out)
                lasts.append(last)
            with tape:
                x = torch.cat(outs, dim=-1) if ways > 1 else outs[0]
                x = functional.dropout(x, dropout) if dropout and training and layer < layers - 1 else x
        with tape:
            x = x.transpose(0, 1) if batch_first else x
            return (x, *(torch.stack(kind) for kind in zip(*lasts, strict=True)))

    return run


def _layer(
    tape: Tape, cell: Cell, x: Tensor, state: State, weights: Sequence[Tensor], projected: bool
) -> tuple[Tensor, State]:
    """One direction of one layer over (positions, examples, width)."""
    w_in, w_hidden, *rest = weights
    b_in, b_hidden = (rest[0], rest[1]) if len(rest) >= 2 else (None, None)
    with tape:
        inputs = functional.linear(x.contiguous(), w_in, b_in)
    where = tape.where(inputs)
    trained_state = any(tape.parameter(part) is not None for part in state)
    alike = {part.dtype for part in (inputs, w_hidden, *state)} == {inputs.dtype}
    if isinstance(where, Where) and where.axis == 1 and alike and not projected and not trained_state:
        return _unrolled(tape, cell, inputs, where, state, w_hidden, b_hidden)
    outputs = []
    with tape:
        for step in inputs.unbind(0):
            state = cell(step, functional.linear(state[0], w_hidden, b_hidden), state)
            if projected:
                state = (functional.linear(state[0], weights[-1]), *state[1:])
            outputs.append(state[0])
        return torch.stack(outputs), state


def _unrolled(
    tape: Tape, cell: Cell, inputs: Tensor, where: Where, state: State, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, State]:
    """All steps by plain autograd; the recurrent map's output gradients are those of zeros added to its outputs."""
    args = tape.plain(weight), tape.plain(bias)
    params: dict[int | str, ParameterView] = {}
    for place, tensor in ((1, weight), (2, bias)):
        param = None if tensor is None else tape.parameter(tensor)
        if param is not None:
            params[place] = param
    use = Use(functional.linear, (), {}, params, where, tape.examples)
    zeros = torch.zeros_like(inputs)
    zeros = tape.listen(zeros, use, RULES[functional.linear]) if params else zeros
    before, outputs = [], []
    for step, zero in zip(inputs.unbind(0), zeros.unbind(0), strict=True):
        before.append(state[0].detach())
        state = cell(step, functional.linear(state[0], *args) + zero, state)
        outputs.append(state[0])
    use.args = (torch.stack(before), *args)
    made = torch.stack(outputs)
    tape.tag(made, where)
    for part in state:
        tape.tag(part, Where(0, where.inner))
    return made, state


FORWARDS[torch.lstm] = over_time(_lstm)
FORWARDS[torch.gru] = over_time(_gru)
FORWARDS[torch.rnn_tanh] = over_time(_tanh)
FORWARDS[torch.rnn_relu] = over_time(_relu)


def single(cell: Cell) -> Callable[..., Any]:
    """What stands for torch.lstm_cell, torch.gru_cell and the like."""

    def run(
        tape: Tape, x: Tensor, states: Any, w_in: Tensor, w_hidden: Tensor, b_in: Any = None, b_hidden: Any = None
    ) -> Any:
        several = isinstance(states, list | tuple)
        state = tuple(states) if several else (states,)
        for part in state:
            if tape.where(part) is None and tape.parameter(part) is None:
                tape.tag(part, FRONT)
        with tape:
            result = cell(functional.linear(x, w_in, b_in), functional.linear(state[0], w_hidden, b_hidden), state)
        return result if several else result[0]

    return run


FORWARDS[torch.lstm_cell] = single(_lstm)
FORWARDS[torch.gru_cell] = single(_gru)
FORWARDS[torch.rnn_tanh_cell] = single(_tanh)
FORWARDS[torch.rnn_relu_cell] = single(_relu)
