"""What everyone knows about a round of a secure sum, and the messages that are sent in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from terrine import check
from terrine.federated.secure import graph


@dataclass(frozen=True)
class Round:
    """Public facts, fixed by the server before any client answers."""

    name: bytes
    """Never used twice with the same identities."""
    clients: int
    givers: frozenset[int]
    """Those who add a share of noise."""
    survivors: int
    """The fewest of the givers with which a sum is opened."""
    length: int
    bits: int
    seed: int = 0
    """Of the graph of neighbours."""
    degree: int | None = None
    """How many neighbours each has; None chooses by how many may drop out."""
    colluding: int = 0
    """How many clients may tell the server all they know: fewer than open a secret."""

    def __post_init__(self) -> None:
        if not self.givers <= set(range(self.clients)):
            raise check.refuse("givers", sorted(self.givers), f"clients, from 0 to {self.clients - 1}")
        if self.colluding and self.colluding >= self.threshold:
            hint = f"so many could open single clients: {self.threshold} shares open a secret"
            raise check.refuse("colluding", self.colluding, f"at most {self.threshold - 1} in a round like this", hint)

    @cached_property
    def _neighbours(self) -> list[list[int]]:
        dropping = max(1 - self.survivors / max(len(self.givers), 1), 0.0)
        each = graph.degree(self.clients, dropping) if self.degree is None else self.degree
        return graph.neighbours(self.clients, each, self.seed)

    def neighbours(self, one: int) -> list[int]:
        """With whom `one` has masks, and who hold shares of its secrets."""
        return self._neighbours[one]

    @cached_property
    def threshold(self) -> int:
        """How many shares open a secret."""
        return max(2, min(graph.threshold(len(self._neighbours[0])), self.survivors))

    def enough(self, survivors: Iterable[int]) -> bool:
        """Whether these suffice for the sum to be opened: as many shares of noise as were billed."""
        return len(self.givers & set(survivors)) >= self.survivors

    def about(self, *what: object) -> bytes:
        """A text that stands for `what` in this round and no other: two clients who were told different facts about it
        do not accept each other's signatures."""
        return hashlib.sha256(self._facts + repr(what).encode()).digest()

    @cached_property
    def _facts(self) -> bytes:
        told = (self.clients, sorted(self.givers), self.survivors, self.length, self.bits, self.seed, self.degree)
        return hashlib.sha256(repr((self.name, *told, self.colluding)).encode()).digest()


@dataclass(frozen=True)
class Advertised:
    """A client's keys for one round, signed."""

    client: int
    sealing: bytes
    masking: bytes
    signature: bytes

    @staticmethod
    def text(round_: Round, client: int, sealing: bytes, masking: bytes) -> bytes:
        """What is signed."""
        return round_.about("keys", client, sealing, masking)


@dataclass(frozen=True)
class Unmasking:
    """A client's answer to the last question: shares by whose they are."""

    client: int
    own: dict[int, bytes]
    """Of the own masks of clients who survived."""
    pairwise: dict[int, bytes]
    """Of the masking keys of clients who dropped out."""
