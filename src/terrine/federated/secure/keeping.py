"""A client between two messages: its secrets of the round as text, for runtimes that keep no objects."""

from __future__ import annotations

import json
from typing import Any

from terrine.federated.secure.rounds import Advertised, Round, Unmasking


def round_to_dict(round_: Round) -> dict[str, Any]:
    """A round as JSON holds it."""
    return {
        "name": round_.name.hex(),
        "clients": round_.clients,
        "givers": sorted(round_.givers),
        "survivors": round_.survivors,
        "length": round_.length,
        "bits": round_.bits,
        "seed": round_.seed,
        "degree": round_.degree,
        "colluding": round_.colluding,
    }


def round_from_dict(record: dict[str, Any]) -> Round:
    """The round again."""
    return Round(**record | {"name": bytes.fromhex(record["name"]), "givers": frozenset(record["givers"])})


def keys_to_dict(one: Advertised) -> dict[str, Any]:
    """Advertised keys as JSON holds them."""
    named = {"sealing": one.sealing, "masking": one.masking, "signature": one.signature}
    return {"client": one.client} | {name: value.hex() for name, value in named.items()}


def keys_from_dict(record: dict[str, Any]) -> Advertised:
    """Advertised keys again."""
    return Advertised(record["client"], *(bytes.fromhex(record[name]) for name in ("sealing", "masking", "signature")))


def unmasking_to_dict(one: Unmasking) -> dict[str, Any]:
    """Shares as JSON holds them."""
    return {"client": one.client, "own": hexed(one.own), "pairwise": hexed(one.pairwise)}


def unmasking_from_dict(record: dict[str, Any]) -> Unmasking:
    """Shares again."""
    return Unmasking(record["client"], unhexed(record["own"]), unhexed(record["pairwise"]))


def hexed(texts: dict[int, bytes]) -> dict[str, str]:
    """Bytes by client as JSON holds them."""
    return {str(one): text.hex() for one, text in texts.items()}


def unhexed(texts: dict[str, str]) -> dict[int, bytes]:
    """Bytes by client again."""
    return {int(one): bytes.fromhex(text) for one, text in texts.items()}


def dump(record: dict[str, Any]) -> str:
    """One line of JSON."""
    return json.dumps(record, allow_nan=False)
