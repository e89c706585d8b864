"""A client's side of a secure sum: four answers, each given once. [BIK17], with neighbours as in [BBGLR20]

    advertise    keys for this round, signed by the client's lasting identity
    share        shares of its two secrets, sealed for its neighbours
    mask         its whole numbers (noise included), plus an own mask and one with every neighbour
    agree        its signature under the list of survivors that the server names
    unmask       of every neighbour one share: of the own mask if it survived, of the masking key if it did not

A server that held both kinds of shares of one client could unmask that client alone. Here a client answers for one list
of survivors only, names every neighbour once, and only after more than half of those who hold a secret signed the same
list: no two lists can both be answered by enough clients.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from terrine.errors import InvalidArgument, OutOfOrder
from terrine.federated.secure import keys, shamir
from terrine.federated.secure.keeping import dump, keys_from_dict, keys_to_dict
from terrine.federated.secure.keys import Identity, Words
from terrine.federated.secure.rounds import Advertised, Round, Unmasking
from terrine.rng import SYSTEM, Source

_STAGES = ("advertise", "share", "mask", "agree", "unmask")


class Client:
    """One client in one round."""

    def __init__(
        self, index: int, round_: Round, identity: Identity, identities: Mapping[int, bytes], *, rng: Source = SYSTEM
    ) -> None:
        self.index, self.round = index, round_
        self._identity, self._identities, self._rng = identity, identities, rng
        self._sealing, self._masking = (keys.Agreeing(keys.secret(rng)) for _ in range(2))
        self._own = keys.secret(rng)
        self._others: dict[int, Advertised] = {}
        self._held: dict[int, tuple[bytes, bytes]] = {}
        self._survivors: tuple[int, ...] = ()
        self._done = 0

    def advertise(self) -> Advertised:
        """Keys for this round."""
        self._enter("advertise")
        sealing, masking = self._sealing.public, self._masking.public
        signature = self._identity.sign(Advertised.text(self.round, self.index, sealing, masking))
        return Advertised(self.index, sealing, masking, signature)

    def share(self, advertised: Iterable[Advertised]) -> dict[int, bytes]:
        """Sealed shares for the neighbours that advertised keys.

        Raises:
            InvalidArgument: a signature is not that of the client it names, or too few neighbours are there.
        """
        self._enter("share")
        mine = set(self.round.neighbours(self.index))
        for one in advertised:
            if one.client in mine:
                self._check(one)
                self._others[one.client] = one
        holders = [self.index, *sorted(self._others)]
        if len(holders) < self.round.threshold:
            raise InvalidArgument(f"{len(self._others)} neighbours: want {self.round.threshold - 1} or more")
        points, least = [one + 1 for one in holders], self.round.threshold
        own = shamir.split(self._own, points, least, self._rng)
        masking = shamir.split(self._masking.private, points, least, self._rng)
        self._held[self.index] = own[self.index + 1], masking[self.index + 1]
        both = {other: own[other + 1] + masking[other + 1] for other in self._others}
        return {
            other: keys.sealed(self._sealing_key(self.index, other), text, self._route(self.index, other))
            for other, text in both.items()
        }

    def mask(self, values: NDArray[np.int64], sealed: Mapping[int, bytes]) -> Words:
        """`values` modulo 2^32, masked; `sealed` are the shares from neighbours, who all get a mask.

        Raises:
            InvalidArgument: shares that were changed on the way, or too few of them.
        """
        self._enter("mask")
        for other, text in sealed.items():
            if other in self._others:
                opened = keys.opened(self._sealing_key(other, self.index), text, self._route(other, self.index))
                self._held[other] = opened[: shamir.SHARE_BYTES], opened[shamir.SHARE_BYTES :]
        if len(self._held) < self.round.threshold:
            raise InvalidArgument(f"{len(self._held) - 1} neighbours: want {self.round.threshold - 1} or more")
        total: Words = (values & 0xFFFFFFFF).astype(np.uint32)
        keys.add_mask(total, self._own)
        for other in self._held:
            if other != self.index:
                keys.add_mask(total, self._mask_key(other), negative=self.index > other)
        total &= np.uint32((1 << self.round.bits) - 1)
        return total

    def agree(self, survivors: Iterable[int]) -> bytes:
        """A signature under the list of survivors.

        Raises:
            OutOfOrder: another list was agreed to before.
            InvalidArgument: this client is not on it, or it holds less noise than was billed.
        """
        listed = tuple(survivors)
        self._enter("agree")
        if self.index not in listed or len(set(listed)) != len(listed):
            raise InvalidArgument("a list of survivors without this client, or with one twice: nothing is unmasked")
        if not self.round.enough(listed):
            raise InvalidArgument(
                f"{len(self.round.givers & set(listed))} survivors with noise: want {self.round.survivors} or more; "
                "nothing is unmasked"
            )
        self._survivors = tuple(sorted(listed))
        return self._identity.sign(self.round.about("survivors", self._survivors))

    def unmask(self, survivors: Iterable[int], signatures: Mapping[int, bytes]) -> Unmasking:
        """One share for every neighbour, of one kind.

        Raises:
            OutOfOrder: this was answered before.
            InvalidArgument: another list than was agreed to, or too few neighbours agreed to it.
        """
        listed = tuple(sorted(survivors))
        self._enter("unmask")
        if listed != self._survivors:
            raise InvalidArgument("another list of survivors than was agreed to: nothing is unmasked")
        text = self.round.about("survivors", listed)
        holders = (one for one in self._held if self._signed(one, signatures.get(one, b""), text))
        agreed = len(list(itertools.islice(holders, self.round.threshold)))
        if agreed < self.round.threshold:
            raise InvalidArgument(
                f"{agreed} of {len(self._held)} holders agreed to the list of survivors: want "
                f"{self.round.threshold}; nothing is unmasked"
            )
        alive = set(listed)
        own = {one: held[0] for one, held in self._held.items() if one in alive}
        pairwise = {one: held[1] for one, held in self._held.items() if one not in alive}
        return Unmasking(self.index, own, pairwise)

    def kept(self) -> str:
        """This client with its secrets, as text for its own disk."""
        return dump(
            {
                "secrets": [one.hex() for one in (self._sealing.private, self._masking.private, self._own)],
                "others": [keys_to_dict(one) for one in self._others.values()],
                "held": {str(one): [first.hex(), second.hex()] for one, (first, second) in self._held.items()},
                "survivors": list(self._survivors),
                "done": self._done,
            }
        )

    def restore(self, kept: str) -> None:
        """Go on where `kept` was written."""
        record = json.loads(kept)
        sealing, masking, self._own = (bytes.fromhex(one) for one in record["secrets"])
        self._sealing, self._masking = keys.Agreeing(sealing), keys.Agreeing(masking)
        self._others = {one["client"]: keys_from_dict(one) for one in record["others"]}
        held = {int(one): [bytes.fromhex(text) for text in both] for one, both in record["held"].items()}
        self._held = {one: (first, second) for one, (first, second) in held.items()}
        self._survivors, self._done = tuple(record["survivors"]), record["done"]

    def _enter(self, stage: str) -> None:
        place = _STAGES.index(stage)
        if place != self._done:
            raise OutOfOrder(f"{stage}: want {_STAGES[min(self._done, 4)]} first, and each once in a round")
        self._done += 1

    def _check(self, one: Advertised) -> None:
        text = Advertised.text(self.round, one.client, one.sealing, one.masking)
        if not self._signed(one.client, one.signature, text):
            raise InvalidArgument(f"client {one.client}: its keys are not signed by its identity; nothing is sent")

    def _signed(self, client: int, signature: bytes, text: bytes) -> bool:
        return client in self._identities and keys.is_signed(self._identities[client], signature, text)

    def _sealing_key(self, sender: int, receiver: int) -> bytes:
        """One for each direction, because each seals one message."""
        other = receiver if sender == self.index else sender
        return self._sealing.agreed(self._others[other].sealing, self.round.about("sealing", sender, receiver))

    def _mask_key(self, other: int) -> bytes:
        purpose = self.round.about("mask", *sorted((self.index, other)))
        return self._masking.agreed(self._others[other].masking, purpose)

    def _route(self, sender: int, receiver: int) -> bytes:
        return self.round.about("share", sender, receiver)
