"""Recurrent layers, written out step by step for all examples at once: each step's maps are linear, and the uses of
one map over time are positions of one linear map, cross terms included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from terrine.sgd.clipping.derived import copy_parameters
from terrine.sgd.clipping.parameter_view import ParameterView
from terrine.sgd.clipping.use import COMPOSED, RULES, Unfollowed, Use

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
        params, batched = recording.find_parameters(tuple(weights), {})
        if batched:
            raise Unfollowed("recurrent layers whose weights are made from examples have no rule")
        ways = 2 if bidirectional else 1
        layer = len(weights) // (layers * ways)
        given = [copy_parameters(recording, tensor) for tensor in (x, *states)]
        values = [params[place].value if place in params else weight for place, weight in enumerate(weights)]

        def compute(n: int, physical: list[Tensor], batched: list[bool]) -> tuple[Tensor, ...]:
            own = [one if has else one.expand(n, *one.shape) for one, has in zip(physical, batched, strict=True)]
            x, *states = [one.transpose(1, 2).flatten(0, 1) for one in own[: len(given)]]  # (sequences, ...)
            x = own[0].flatten(0, 1) if batch_first else x
            maps = _Maps(recording, physical[len(given) :], params, layer, biased)
            lasts: list[State] = []
            for index in range(layers):
                outs = []
                for way in range(ways):
                    place = index * ways + way
                    start = tuple(state[:, place] for state in states)
                    out, last = maps.run(cell, x.flip(1) if way else x, start, place)
                    outs.append(out.flip(1) if way else out)
                    lasts.append(last)
                x = torch.cat(outs, dim=-1) if ways > 1 else outs[0]
                if dropout and training and index < layers - 1:
                    with recording:
                        x = functional.dropout(x, dropout)
            ends = [torch.stack(kind, 1).unflatten(0, (n, -1)).transpose(1, 2) for kind in zip(*lasts, strict=True)]
            x = x.unflatten(0, (n, -1))
            return (x if batch_first else x.transpose(1, 2), *ends)

        return recording.all_examples(compute, *given, *values)

    return run


@dataclass
class _Maps:
    """The linear maps of a recurrent layer, each use of which is recorded; `each` weights for a direction."""

    recording: Recording
    weights: list[Tensor]
    params: dict[int | str, ParameterView]
    each: int
    biased: bool

    def run(self, cell: Cell, x: Tensor, state: State, direction: int) -> tuple[Tensor, State]:
        """One direction of one layer over (sequences, positions, width): its outputs and last state."""
        w_in, w_hidden = direction * self.each, direction * self.each + 1
        b_in, b_hidden = (w_in + 2, w_in + 3) if self.biased else (None, None)
        projection = w_in + self.each - 1 if self.each == (5 if self.biased else 3) else None
        outputs = []
        for step in self._apply(x, w_in, b_in).unbind(1):
            state = cell(step, self._apply(state[0], w_hidden, b_hidden), state)
            if projection is not None:
                state = (self._apply(state[0], projection, None), *state[1:])
            outputs.append(state[0])
        return torch.stack(outputs, 1), state

    def _apply(self, x: Tensor, weight: int, bias: int | None) -> Tensor:
        args = (x, self.weights[weight], None if bias is None else self.weights[bias])
        params: dict[int | str, ParameterView] = {}
        for position, place in ((1, weight), (2, bias)):
            if place is not None and place in self.params:
                params[position] = self.params[place]
        use = Use(functional.linear, args, {}, params, self.recording.units)
        out = functional.linear(*args)
        return self.recording.record_output(out, use, RULES[functional.linear]) if params else out


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
