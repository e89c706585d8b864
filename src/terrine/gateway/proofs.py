"""What goes with every answer, so that whoever holds it can check it: event, price, charge, and the server's signature.

The charge is the ledger's own row: its hash covers the event, who paid, what for, and the hash of the charge before it.
Written down, it shows later whether the ledger was rolled back: `terrine ledger verify --against`.
"""

from __future__ import annotations

import json
from typing import Any

from terrine.client.checking import ANSWER_TYPE, payload
from terrine.ledger.records import ChargeRow
from terrine.verify import signing


def proof(row: dict[str, Any], charge: dict[str, Any], *, price: dict[str, float]) -> dict[str, Any]:
    """The proof of one answer: `charge` is the ledger's row."""
    return {
        "price": price,
        "event": json.loads(charge["event"]),
        "charge": {name: charge[name] for name in ChargeRow._fields},
        "head": charge["hash"],
        "request": row["request"],
    }


def signed(record: dict[str, Any], key: Any) -> dict[str, Any] | None:
    """The envelope that signs an answer; None without a key."""
    if key is None:
        return None
    return signing.envelope(ANSWER_TYPE, payload(record), key)
