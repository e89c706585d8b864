"""Recurrent layers, written out step by step: each step's maps are linear, and the uses of one map over time are
positions of one linear map, cross terms included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.use import COMPOSED, Unfollowed

if TYPE_CHECKING:
    from terrine.sgd.clipping.recording import Recording

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
        recording: Recording, x: Tensor, states: Any, weights: Any, biased: Any, layers: Any, dropout: Any,
        training: Any = None, bidirectional: Any = None, batch_first: Any = None,
    ) -> Any:  # fmt: skip
        if not isinstance(biased, bool):  # of a packed sequence, after its sizes and states, come the weights
            raise Unfollowed("recurrent layers on packed sequences have no rule")
        states = states if isinstance(states, list | tuple) else (states,)
        ways = 2 if bidirectional else 1
        each = len(weights) // (layers * ways)
        projected = cell is _lstm and each == (5 if biased else 3)
        lasts: list[State] = []
        with recording:
            x = x.transpose(0, 1) if batch_first else x
            for layer in range(layers):
                outs = []
                for way in range(ways):
                    index = layer * ways + way
                    start = tuple(state[index] for state in states)
                    own = weights[index * each : (index + 1) * each]
                    out, last = _layer(cell, x.flip(0) if way else x, start, own, projected)
                    outs.append(out.flip(0) if way else out)
                    lasts.append(last)
                x = torch.cat(outs, dim=-1) if ways > 1 else outs[0]
                x = functional.dropout(x, dropout) if dropout and training and layer < layers - 1 else x
            x = x.transpose(0, 1) if batch_first else x
            return (x, *(torch.stack(kind) for kind in zip(*lasts, strict=True)))

    return run


def _layer(cell: Cell, x: Tensor, state: State, weights: Sequence[Tensor], projected: bool) -> tuple[Tensor, State]:
    """One direction of one layer over (positions, examples, width)."""
    w_in, w_hidden, *rest = weights
    b_in, b_hidden = (rest[0], rest[1]) if len(rest) >= 2 else (None, None)
    outputs = []
    for step in functional.linear(x, w_in, b_in).unbind(0):
        state = cell(step, functional.linear(state[0], w_hidden, b_hidden), state)
        if projected:
            state = (functional.linear(state[0], weights[-1]), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs), state


COMPOSED[torch.lstm] = over_time(_lstm)
COMPOSED[torch.gru] = over_time(_gru)
COMPOSED[torch.rnn_tanh] = over_time(_tanh)
COMPOSED[torch.rnn_relu] = over_time(_relu)


def single(cell: Cell) -> Callable[..., Any]:
    """What stands for torch.lstm_cell, torch.gru_cell and the like."""

    def run(
        recording: Recording, x: Tensor, states: Any, w_in: Tensor, w_hidden: Tensor, b_in: Any = None,
        b_hidden: Any = None,
    ) -> Any:  # fmt: skip
        several = isinstance(states, list | tuple)
        state = tuple(states) if several else (states,)
        with recording:
            result = cell(functional.linear(x, w_in, b_in), functional.linear(state[0], w_hidden, b_hidden), state)
        return result if several else result[0]

    return run


COMPOSED[torch.lstm_cell] = single(_lstm)
COMPOSED[torch.gru_cell] = single(_gru)
COMPOSED[torch.rnn_tanh_cell] = single(_tanh)
COMPOSED[torch.rnn_relu_cell] = single(_relu)
