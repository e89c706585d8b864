"""Checks of the claim: its events priced anew, and everything that is said about them compared with them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from terrine import accounting
from terrine.accounting import witness
from terrine.errors import InvalidArgument
from terrine.events import (
    Event,
    Gaussian,
    PoissonSampled,
    RandomStopping,
    is_reproducible,
    leaves,
    settled_neighbours,
    settled_unit,
)
from terrine.events.codec import from_json
from terrine.rounding import up
from terrine.verify.manifest import CARD, EVENTS, PRIVACY, RESULTS, read_json

_SAME = 1e-6  # relative: what an epsilon computed elsewhere may differ by


def claimed(folder: Path) -> tuple[dict[str, Any], Event]:
    """privacy.json, and the event in it."""
    privacy = read_json(folder / PRIVACY)
    return privacy, from_json(json.dumps(privacy["events"]))


def price(folder: Path) -> str:
    """The events cost what is claimed, by two witnesses."""
    privacy, event = claimed(folder)
    epsilon, delta = float(privacy["epsilon"]), float(privacy["delta"])
    found = accounting.epsilon(event, delta=delta)
    least = witness.least_epsilon(event, delta=delta)
    if not (math.isfinite(epsilon) and max(found * (1 - _SAME), least) <= epsilon):
        raise InvalidArgument(
            f"{PRIVACY}: claims epsilon {epsilon:g} at delta {delta:g}; its events cost {found:.6g} "
            f"(a second witness: at least {least:.6g})"
        )
    if epsilon > found * (1 + _SAME) + _SAME:
        raise InvalidArgument(f"{PRIVACY}: claims epsilon {epsilon:g}; its events cost {found:.6g}, so it is another's")
    said = privacy["epsilon_certified"]
    if not (0 <= said["lower"] <= said["upper"] <= epsilon * (1 + _SAME) and said["upper"] >= least):
        raise InvalidArgument(f"{PRIVACY}: an enclosure of epsilon, {said}, that does not fit its events")
    if (folder / EVENTS).is_file() and from_json(json.dumps(read_json(folder / EVENTS))) != event:
        raise InvalidArgument(f"{EVENTS}: other events than those in {PRIVACY}")
    enclosed = f"the events cost {found:.6g}, and at least {least:.6g} by a second witness"
    return f"epsilon {up(epsilon)} at delta {delta:g}: {enclosed}"


def unit(folder: Path) -> str:
    """Unit, neighbours and whether there was a seed are those of the events."""
    privacy, event = claimed(folder)
    found = {
        "unit": settled_unit(event).value,
        "neighbours": settled_neighbours(event).value,
        "reproducible_noise_for_tests_only": is_reproducible(event),
    }
    for name, value in found.items():
        if privacy[name] is not value and privacy[name] != value:
            raise InvalidArgument(f"{PRIVACY}: {name} {privacy[name]!r}; its events say {value!r}")
    return f"one {found['unit']}, {found['neighbours']} neighbours"


def seed(folder: Path) -> str:
    """The noise came from no seed."""
    if is_reproducible(claimed(folder)[1]):
        raise InvalidArgument("the noise came from a seed: a test, NOT private, and no release")
    return "none: the noise is the operating system's, or under its key"


def facts(folder: Path) -> str:
    """Noise, sampling rate, steps and counts are those of the events."""
    privacy, event = claimed(folder)
    if privacy["method"] != "DP-SGD":
        return _labels(privacy, event)
    count = privacy["people"] if "people" in privacy else privacy["examples"]
    if not math.isclose(privacy["rate"], privacy["lot"] / count, rel_tol=1e-12):
        raise InvalidArgument(f"{PRIVACY}: rate {privacy['rate']:g} is not {privacy['lot']} of {count}")
    wanted = (privacy["noise"], privacy["rate"], privacy["steps"])
    if wanted not in _trainings(event):
        said = f"noise {wanted[0]:g}, rate {wanted[1]:g}, {wanted[2]} steps"
        raise InvalidArgument(f"{PRIVACY}: {said}: not in its events")
    return f"noise {wanted[0]:.5g}, rate {wanted[1]:.5g}, {wanted[2]} steps, as in the events"


def _trainings(event: Event) -> list[tuple[float, float, int]]:
    """Noise, rate and steps of every stretch of Poisson-sampled Gaussian steps; those that tuning drew from as well."""
    found = []
    for part, times in leaves(event):
        match part:
            case PoissonSampled(event=Gaussian(noise=noise), rate=rate):
                found.append((noise, rate, times))
            case RandomStopping(event=inner):
                for one in getattr(inner, "parts", (inner,)):
                    found += _trainings(one)
    return found


def _labels(privacy: dict[str, Any], event: Event) -> str:
    answers = sum(times for _, times in leaves(event))
    if privacy["queries"] != answers or privacy["answered"] > answers:
        raise InvalidArgument(f"{PRIVACY}: {privacy['queries']} labels were bought; its events pay for {answers}")
    return f"{answers} labels, as in the events"


def card(folder: Path) -> str:
    """The card says what the claim says."""
    privacy, _ = claimed(folder)
    text = (folder / CARD).read_text(encoding="utf-8")
    line = (
        f"- **Privacy**: epsilon {up(privacy['epsilon'])} at delta {privacy['delta']} for one {privacy['unit']} "
        f"({privacy['neighbours']}), a proven upper bound"
    )
    if [one for one in text.splitlines() if one.startswith("- **Privacy**")] != [line]:
        raise InvalidArgument(f"{CARD}: says something else than {PRIVACY}; want the line {line!r}")
    return "says what the claim says"


def results(folder: Path) -> str:
    """An accuracy is one."""
    found = read_json(folder / RESULTS)
    accuracy = found["accuracy"]
    if accuracy is not None and not 0 <= accuracy <= 1:
        raise InvalidArgument(f"{RESULTS}: an accuracy of {accuracy}; want it between 0 and 1")
    return "no accuracy" if accuracy is None else f"accuracy {100 * accuracy:.2f}%, measured on {found['measured_on']}"
