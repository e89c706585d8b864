"""What a reviewer asks of a release, and what this run answers.

The questions are those that NIST SP 800-226 (Guidelines for Evaluating Differential Privacy Guarantees, 2025) tells a
reviewer to ask, in our words: from the guarantee down to the data.
"""

from __future__ import annotations

from typing import Any

from terrine.rounding import up

Answers = list[tuple[str, str]]

_NEIGHBOURS = {
    "add-remove": "two data sets of which one holds one {unit} more, so whether somebody is in the data is protected",
    "replace-one": "two data sets that differ in what one {unit} holds, so that is protected; the number is public",
    "zero-out": "two data sets in one of which one {unit} is blank; the number is public",
}


def short(privacy: dict[str, Any], words: str) -> Answers:
    """The answers that follow from what is handed on."""
    relation = _NEIGHBOURS[privacy["neighbours"]].format(unit=privacy["unit"])
    return [
        ("Who is protected?", _unit(privacy)),
        ("Against which difference?", f"Neighbours ({privacy['neighbours']}) are {relation}."),
        ("How much can be learned?", f"{words[0].upper()}{words[1:]}"),
        ("Who has to be trusted?", _trust(privacy)),
        ("What was released, and what was not?", _RELEASED),
        ("What was done to the data before?", _processing(privacy)),
        ("Was anything tuned on the data?", _sentence(privacy.get("tuning") or _NOT_TUNED)),
        ("Where does the randomness come from?", _sentence(privacy["generator"])),
        ("What of floating point?", _FLOATS),
        ("What of timing and other side channels?", _TIMING),
    ]


def full(privacy: dict[str, Any], receipt: dict[str, Any], words: str) -> Answers:
    """The same, with what is for the owner and the officer alone."""
    answers = short(privacy, words)
    answers.insert(5, ("What does it add to earlier releases?", _composition(privacy, receipt)))
    who, when = receipt.get("by") or "", receipt.get("at") or privacy["made"]
    named = "Nobody said who (--by)" if who in ("", "terrine", "terrine.pipeline") else who
    answers.append(("Who ran it, and when?", f"{named}; {when} (UTC)."))
    mark = f"SHA-256 of these facts, which tells nothing of a row: {privacy['inputs_fingerprint']}."
    answers.append(("On which inputs?", f"{_sentence(privacy['public_facts'])} {mark}"))
    return answers


def _trust(privacy: dict[str, Any]) -> str:
    if "clients" not in privacy:
        return _CENTRAL
    own = up(privacy["epsilon_for_insiders"], 4)
    insiders = f"For whoever knows who took part in each round, epsilon is {own}."
    if "masked" not in privacy["sums"]:
        return f"The server: it sees every client's update and adds the noise. {insiders}"
    return (
        f"No single client, and the server only to follow the protocol: it sees masked updates and a sum that already "
        f"holds the noise. At most {privacy['colluding']} clients may tell others their share of it. {insiders}"
    )


_CENTRAL = (
    "Whoever ran the training: the raw rows were on that machine (the central model). Nobody who only has the files "
    "that are handed on."
)
_RELEASED = (
    "Released: the model, model.json, privacy.json, events.json, results.json and the model card. Not released: rows, "
    "gradients, losses, lots, noise and the key it came from, checkpoints, the audit's scores."
)
_NOT_TUNED = "no: settings follow from public numbers, or were given"
_FLOATS = (
    "Noisy sums are rounded to a public grid of about a thousandth of the noise, and counts have integer noise. The "
    "price is computed with all errors rounded outward, and a second accountant agrees with it."
)
_TIMING = (
    "How long a step takes depends on its lot. Nobody who has the files alone sees that; whoever can watch the machine "
    "while it trains can, and the claim does not cover it."
)


def _unit(privacy: dict[str, Any]) -> str:
    if privacy["unit"] == "client":
        return "One client of the federation, with all its data. Who knows which clients took part sees more (below)."
    if privacy["unit"] != "person":
        return (
            f"One {privacy['unit']}, which is one row of the data. Somebody with several rows is protected less, by "
            "about so many times epsilon; terrine train --person protects people."
        )
    most = privacy.get("rows_per_person")
    bound = f" At most {most} of them count at a time, chosen at random." if most else ""
    return f"One person, with all rows under its id, however many.{bound}"


def _processing(privacy: dict[str, Any]) -> str:
    found = "Rows were encoded by public facts alone: bounds of numbers, values of categories, classes (model.json)."
    return f"{found} Then {privacy['whitening']}." if "whitening" in privacy else found


def _composition(privacy: dict[str, Any], receipt: dict[str, Any]) -> str:
    if privacy["ledger"] is None:
        return "Nobody knows: it was charged to no ledger. Epsilons of releases about the same people add up."
    left = receipt.get("left")
    rest = "" if left is None else f" After it, one more release could have cost epsilon {left:.4g}."
    account, charge = receipt.get("account"), privacy["ledger"]["charge"]
    return (
        f"It was charged to the account {account!r} before the first look, as {charge}.{rest} terrine verify --ledger "
        "finds it there."
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
