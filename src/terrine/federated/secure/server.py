"""The server's side of a secure sum: it passes messages on, adds up masked vectors, and takes the masks off the sum."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from terrine.errors import InvalidArgument
from terrine.federated.secure import keys, shamir
from terrine.federated.secure.keys import Words
from terrine.federated.secure.rounds import Advertised, Round, Unmasking


class TooFewSurvivors(InvalidArgument):
    """Fewer clients are left than the noise was sized for: the sum stays masked for ever."""


class Server:
    """One round."""

    def __init__(self, round_: Round) -> None:
        self.round = round_
        self.total: Words = np.zeros(round_.length, dtype=np.uint32)
        self._advertised: dict[int, Advertised] = {}
        self._sealed: dict[int, dict[int, bytes]] = {}
        self._survivors: set[int] = set()

    def advertised(self, keys_: Iterable[Advertised]) -> None:
        """Take the keys of those who answered."""
        self._advertised = {one.client: one for one in keys_}
        self.demand(self._advertised)

    def keys_for(self, client: int) -> list[Advertised]:
        """The keys of a client's neighbours."""
        return [self._advertised[one] for one in self.round.neighbours(client) if one in self._advertised]

    def shared(self, sealed: Mapping[int, Mapping[int, bytes]]) -> None:
        """Take the sealed shares of those who answered."""
        self._sealed = {client: dict(shares) for client, shares in sealed.items()}
        self.demand(self._sealed)

    def shares_for(self, client: int) -> dict[int, bytes]:
        """What a client's neighbours sealed for it."""
        return {one: shares[client] for one, shares in self._sealed.items() if client in shares}

    def add(self, client: int, masked: Words) -> None:
        """Add a masked vector to the sum.

        Raises:
            InvalidArgument: it is not of this round, or came twice.
        """
        if client not in self._sealed or client in self._survivors or masked.shape != self.total.shape:
            raise InvalidArgument(f"client {client}: a vector that is not expected; want one of {self.round.length}")
        np.add(self.total, masked, out=self.total)
        self._survivors.add(client)

    @property
    def survivors(self) -> list[int]:
        """Who sent a masked vector.

        Raises:
            TooFewSurvivors: the sum must not be opened.
        """
        self.demand(self._survivors)
        return sorted(self._survivors)

    def open(self, answers: Iterable[Unmasking]) -> NDArray[np.int64]:
        """The sum, modulo 2^bits, as whole numbers around 0.

        Raises:
            TooFewSurvivors: too few answered; the sum stays masked.
        """
        own: dict[int, dict[int, bytes]] = {one: {} for one in self.survivors}
        pairwise: dict[int, dict[int, bytes]] = {one: {} for one in self._sealed if one not in self._survivors}
        for answer in answers:
            for kind, shares in ((own, answer.own), (pairwise, answer.pairwise)):
                for one, share in shares.items():
                    if one in kind:
                        kind[one][answer.client + 1] = share
        needed = {one: shares for one, shares in pairwise.items() if self._masked_with(one)}
        for one, shares in (own | needed).items():
            if len(shares) < self.round.threshold:
                raise TooFewSurvivors(
                    f"client {one}: {len(shares)} shares of its masks came back, want {self.round.threshold}; the sum "
                    "stays masked"
                )
        for shares in own.values():
            keys.add_mask(self.total, shamir.join(shares, self.round.threshold), negative=True)
        for one, shares in needed.items():
            self._remove(one, shamir.join(shares, self.round.threshold))
        return centred(self.total, self.round.bits)

    def _masked_with(self, gone: int) -> list[int]:
        """The survivors whose vectors hold a mask shared with a client who dropped out."""
        return [one for one in self._sealed[gone] if one in self._survivors]

    def _remove(self, gone: int, private: bytes) -> None:
        agreeing = keys.Agreeing(private)
        for one in self._masked_with(gone):
            purpose = self.round.about("mask", *sorted((gone, one)))
            key = agreeing.agreed(self._advertised[one].masking, purpose)
            keys.add_mask(self.total, key, negative=one < gone)

    def demand(self, present: Iterable[int]) -> None:
        """Refuse to go on with too few.

        Raises:
            TooFewSurvivors: the noise was sized for more.
        """
        found = set(present)
        if not self.round.enough(found):
            raise TooFewSurvivors(
                f"{len(self.round.givers & found)} clients with noise are left, want {self.round.survivors}: "
                "nothing is opened"
            )


def centred(total: Words, bits: int) -> NDArray[np.int64]:
    """Numbers modulo 2^bits as whole numbers from -2^(bits-1) to 2^(bits-1) - 1."""
    half = 1 << (bits - 1)
    inside = (total & np.uint32((1 << bits) - 1)).astype(np.int64)
    return ((inside + half) & ((1 << bits) - 1)) - half
