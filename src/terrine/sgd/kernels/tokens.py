"""Tokens put in order by counting, and how often bags have them: what the norms and sums of a table need to know."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from terrine.sgd.kernels.team import FIRST, Kernel, numbers

TOKENS, SIZE, ORDER, MANY, ENDS, STRANGE = range(FIRST, FIRST + 6)
BAGS, FOUND = MANY, ENDS


def in_order(tokens: Tensor, many: int) -> tuple[Tensor, Tensor]:
    """The places of tokens 0 ... many - 1 in their order, equal ones as they come, and where each token's places end.

    Raises: IndexError for any other token.
    """
    tokens = tokens.contiguous()
    order, ends, strange = torch.empty_like(tokens), torch.empty(many, dtype=torch.int64), array("q", [0])
    _in_order.work(1, tokens.data_ptr(), len(tokens), order.data_ptr(), many, ends.data_ptr(), strange.buffer_info()[0])
    if strange[0]:
        raise IndexError(f"a token that is no row of a table of {many}")
    return order, ends


@Kernel
def _in_order(job: Any) -> None:
    tokens, order, ends = numbers(job[TOKENS]), numbers(job[ORDER]), numbers(job[ENDS])
    many, strange = job[MANY], numbers(job[STRANGE])
    for token in range(many):
        ends[token] = 0
    for place in range(job[SIZE]):
        token = tokens[place]
        if token < 0 or token >= many:
            strange[0] = 1
            return
        ends[token] += 1
    before = 0
    for token in range(many):
        count = ends[token]
        ends[token] = before
        before += count
    for place in range(job[SIZE]):
        token = tokens[place]
        order[ends[token]] = place
        ends[token] += 1


def squared_counts(tokens: Tensor, order: Tensor, bags: Tensor, examples: int) -> Tensor:
    """For each bag, the squares of how often it has each of its tokens, added up; bags in the order of the places."""
    found = torch.zeros(examples, dtype=torch.int64)
    tokens, bags = tokens.contiguous(), bags.contiguous()
    _squared_counts.work(1, tokens.data_ptr(), len(tokens), order.data_ptr(), bags.data_ptr(), found.data_ptr())
    return found


@Kernel
def _squared_counts(job: Any) -> None:
    tokens, order, bags, found = numbers(job[TOKENS]), numbers(job[ORDER]), numbers(job[BAGS]), numbers(job[FOUND])
    last = whose = -1
    times = 0  # that the bag has had the token before
    for i in range(job[SIZE]):
        place = order[i]
        token, bag = tokens[place], bags[place]
        times = times + 1 if token == last and bag == whose else 0
        found[bag] += 2 * times + 1  # (t + 1)^2 - t^2
        last, whose = token, bag
