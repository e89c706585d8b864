"""PromptPATE's teachers: disjoint sets of private demonstrations, each rendered into a prompt of its own [DDP23].

    vote of teacher t on text x  =  argmax_j log P(word j | prompt of t, x) - prior of t

A teacher is a prompt: nothing is trained. One private example is in one prompt and moves one vote, so the votes are
those of `terrine.pate`: its aggregators answer, its bill prices. Votes are private; they stay with the owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from terrine import check
from terrine.errors import InvalidArgument
from terrine.pate import Partition, Votes, count
from terrine.prompts.backend import Backend
from terrine.prompts.calibration import CONTENT_FREE, answers
from terrine.prompts.template import Template

Integers = NDArray[np.int64]


class Demonstration(NamedTuple):
    """A private text with its class."""

    text: str
    label: int


def vote(
    backend: Backend,
    template: Template,
    demonstrations: Sequence[tuple[str, int]],
    deal: Partition,
    texts: Sequence[str],
    *,
    shots: int = 4,
    calibration: Sequence[str] | None = CONTENT_FREE,
    progress: Callable[[int, int], None] | None = None,
) -> Votes:
    """Every teacher's vote on every public text.

    A teacher shows at most `shots` of its demonstrations, one class after another. `calibration` names public inputs
    whose answers are each teacher's prior; None leaves its answers as they are.

    Guarantee: one private example moves one teacher's votes, whatever the backend answers.

    Raises:
        InvalidArgument: a label is not a class, or the deal is of another number of examples.
    """
    rows = []
    for row in each_teacher(backend, template, demonstrations, deal, texts, shots=shots, calibration=calibration):
        rows.append(row)
        if progress is not None:
            progress(len(rows), deal.teachers)
    return count(np.array(rows), classes=template.classes, deal=deal)


def each_teacher(
    backend: Backend,
    template: Template,
    demonstrations: Sequence[tuple[str, int]],
    deal: Partition,
    texts: Sequence[str],
    *,
    shots: int = 4,
    calibration: Sequence[str] | None = CONTENT_FREE,
    first: int = 0,
) -> Iterator[Integers]:
    """The teachers' classes for the texts, one teacher after another from `first` on: private, for `vote`."""
    shots = check.whole("shots", shots)
    if not isinstance(deal, Partition):
        raise InvalidArgument(
            f"deal is a {type(deal).__name__}: want a Partition; teachers that share texts move together"
        )
    if len(demonstrations) != len(deal.assignment):
        raise InvalidArgument(
            f"{len(demonstrations)} demonstrations under a deal of {len(deal.assignment)}: want the deal of these"
        )
    if not len(texts):
        raise InvalidArgument("texts=[]: want at least one public text to vote on")
    for text, label in demonstrations:
        if not 0 <= label < template.classes:
            raise InvalidArgument(f"demonstration {text[:20]!r}... has label {label}: want 0 .. {template.classes - 1}")
    for part in deal.parts[first:]:
        shown = balanced([demonstrations[place] for place in part], shots)
        scores = answers(backend, template, template.prompt(shown), texts, calibration)
        yield scores.argmax(axis=1).astype(np.int64)


def balanced(demonstrations: Sequence[tuple[str, int]], shots: int) -> list[tuple[str, int]]:
    """At most `shots`, taking turns among the classes in the order given."""
    by_class: dict[int, list[tuple[str, int]]] = {}
    for one in demonstrations:
        by_class.setdefault(one[1], []).append(one)
    queues = [by_class[label] for label in sorted(by_class)]
    turns = [queue[turn] for turn in range(max(map(len, queues))) for queue in queues if turn < len(queue)]
    return turns[:shots]
