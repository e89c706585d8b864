"""Checks of the claim: its events priced anew, and everything that is said about them compared with them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from terrine import __version__, accounting, check
from terrine.accounting import Bounds
from terrine.errors import InvalidArgument, MissingExtra
from terrine.events import (
    DiscreteLaplace,
    Event,
    Gaussian,
    Laplace,
    PoissonSampled,
    RandomStopping,
    Skellam,
    SummedDiscreteGaussian,
    Unit,
    is_reproducible,
    leaves,
    settled_neighbours,
    settled_unit,
)
from terrine.events.codec import from_json
from terrine.report import card as model_card
from terrine.report.page import rounded_up
from terrine.rounding import down, up
from terrine.verify.manifest import ASKED, CARD, EVENTS, MODEL, PRIVACY, RESULTS, read_json, read_text
from terrine.verify.unchecked import Unchecked

_COUNTED = {Unit.EXAMPLE: "examples", Unit.PERSON: "people", Unit.CLIENT: "clients"}
_METHODS = {"sgd": ("DP-SGD", "one release"), "pate": ("PATE",), "federated": ("federated averaging",)}
_SAME = 1e-6  # relative: what an epsilon computed elsewhere may differ by, where nothing refutes it
_OLDER = 1e-3  # relative: by how much a bound of another version may have been wider, or the lower one higher


def claimed(folder: Path) -> tuple[dict[str, Any], Event]:
    """privacy.json, and the event in it."""
    privacy = read_json(folder / PRIVACY)
    return privacy, from_json(json.dumps(privacy["events"]))


def price(folder: Path) -> str:
    """The events cost what is claimed, by two witnesses."""
    privacy, event = claimed(folder)
    epsilon, delta = _number(privacy, "epsilon"), _number(privacy, "delta")
    found = accounting.bounds(event, delta=delta, witness=True)
    cost = f"its events cost {up(found.upper, 6)}, and at least {down(found.lower, 6)} is proven"
    if not max(found.lower, found.upper * (1 - _SAME)) <= epsilon < math.inf:
        raise InvalidArgument(f"{PRIVACY}: claims epsilon {epsilon:g} at delta {delta:g}; {cost}")
    if epsilon > found.upper * (1 + _OLDER) + _SAME:
        raise InvalidArgument(f"{PRIVACY}: claims epsilon {epsilon:g}; {cost}, so it is another's")
    _check_enclosure(privacy["epsilon_certified"], epsilon, found)
    if (folder / EVENTS).is_file() and from_json(json.dumps(read_json(folder / EVENTS))) != event:
        raise InvalidArgument(f"{EVENTS}: other events than those in {PRIVACY}")
    return f"epsilon {up(epsilon)} at delta {delta:g}: {cost}, by two witnesses"


def _check_enclosure(said: dict[str, Any], epsilon: float, found: Bounds) -> None:
    """The enclosure that is claimed overlaps the proven one, ends at the claim, and is no tighter than is proven."""
    lower, upper = said["lower"], said["upper"]
    numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (lower, upper))
    ordered = numbers and 0 <= lower <= upper <= epsilon * (1 + _SAME)
    if not (ordered and upper >= found.lower and lower <= min(found.upper, found.lower + _OLDER * found.upper)):
        proven = f"proven are {down(found.lower, 6)} and {up(found.upper, 6)}"
        raise InvalidArgument(f"{PRIVACY}: an enclosure of epsilon, {said}, that does not fit its events: {proven}")


def texts(folder: Path) -> str:
    """What is printed for people is of one line, and all of it is to be seen."""
    printed = {PRIVACY: read_json(folder / PRIVACY), RESULTS: read_json(folder / RESULTS)}
    printed[MODEL] = {"model": read_json(folder / MODEL)["model"]}
    found = [(name, text) for name, record in printed.items() for text in _strings(record)]
    for name, text in found:
        check.one_line(name, text)
    return f"{len(found)} texts, each of one line of printable characters"


def _strings(value: Any) -> Iterator[str]:
    """All texts in a JSON value, names included."""
    match value:
        case str():
            yield value
        case dict():
            for name, one in value.items():
                yield name
                yield from _strings(one)
        case list():
            for one in value:
                yield from _strings(one)


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
    name = _COUNTED[settled_unit(event)]
    if name not in privacy or any(other in privacy for other in _COUNTED.values() if other != name):
        raise InvalidArgument(f"{PRIVACY}: its events protect one {settled_unit(event).value}; want {name} alone")
    count = _whole(privacy, name)
    _check_weakness(privacy, count)
    if privacy["method"] == "one release":
        return _released(privacy, event)
    return _labels(privacy, event) if privacy["method"] == "PATE" else _trained(privacy, event, count)


def _check_weakness(privacy: dict[str, Any], count: int) -> None:
    """What means little is called weak, and nothing else; PATE may count one of each pair of audited rows alone."""
    told, most = privacy["weak_guarantee"], 2 * count if privacy["method"] == "PATE" else count
    said, at_most = (check.weakness(privacy["epsilon"], privacy["delta"], units=units) for units in (count, most))
    if (told or "") not in (said, at_most):
        raise InvalidArgument(f"{PRIVACY}: weak_guarantee says {told!r}; the numbers say {said!r}")


def _released(privacy: dict[str, Any], event: Event) -> str:
    """The release is there, once, and nothing was trained."""
    noise, features, targets = _number(privacy, "noise"), _whole(privacy, "features"), _whole(privacy, "targets")
    if _trainings(event) or any(name in privacy for name in ("lot", "steps", "rate", "epochs", "queries")):
        raise InvalidArgument(f"{PRIVACY}: one release, and its events or facts are those of a training")
    if not any(isinstance(part, Gaussian) and part.noise == noise and times == 1 for part, times in leaves(event)):
        raise InvalidArgument(f"{PRIVACY}: one release with noise {noise:.5g}: not in its events")
    if privacy["released_numbers"] != features * (features + 1) // 2 + features * targets:
        raise InvalidArgument(f"{PRIVACY}: {privacy['released_numbers']} numbers are not those of {features} features")
    most = f"at most {_whole(privacy, 'rows_per_person')} of a person's" if "people" in privacy else ""
    if most and most not in privacy["contribution"]:
        raise InvalidArgument(f"{PRIVACY}: contribution {privacy['contribution']!r} does not fit rows_per_person")
    return f"one release of {privacy['released_numbers']:,} numbers with noise {noise:.5g}, as in the events"


def _trained(privacy: dict[str, Any], event: Event, count: int) -> str:
    lot, steps = _whole(privacy, "lot"), _whole(privacy, "steps")
    wanted = (_number(privacy, "noise"), _number(privacy, "rate"), steps)
    words = f"noise {wanted[0]:.5g}, rate {wanted[1]:.5g}, {steps} steps"
    if wanted[1] != lot / count:
        raise InvalidArgument(f"{PRIVACY}: {words} are not lots of {lot} of {count}")
    if wanted not in _trainings(event):
        raise InvalidArgument(f"{PRIVACY}: {words}: not in its events")
    _number(privacy, "clip")
    if privacy["method"] == "federated averaging":
        return f"{words} (rounds), as in the events"
    _number(privacy, "learning_rate")
    if privacy["method"] != "DP-SGD" or steps != max(1, round(_number(privacy, "epochs") * count / lot)):
        raise InvalidArgument(f"{PRIVACY}: {words} are not {privacy['epochs']} epochs of {privacy['method']}")
    if privacy["sampler"] != f"Poisson: every {privacy['unit']} falls into each lot independently":
        raise InvalidArgument(f"{PRIVACY}: sampler {privacy['sampler']!r}; its events are of Poisson lots")
    if (
        "people" in privacy
        and f"at most {_whole(privacy, 'rows_per_person')} of a person's" not in privacy["contribution"]
    ):
        raise InvalidArgument(f"{PRIVACY}: contribution {privacy['contribution']!r} does not fit rows_per_person")
    return f"{words}, as in the events"


def asked(folder: Path) -> str:
    """What was asked for, where it was handed on, fits the claim."""
    if not (folder / ASKED).is_file():
        raise Unchecked(f"{ASKED} was not handed on")
    (privacy, event), told = claimed(folder), read_json(folder / ASKED)
    differs = {
        "epsilon": privacy["epsilon"] > _number(told, "epsilon") * (1 + _SAME),
        "delta": told["delta"] not in (None, privacy["delta"]),
        "person": (told.get("person") is not None) != (settled_unit(event) is Unit.PERSON),
        "seed": (told["seed"] is not None) != is_reproducible(event),
        **{name: _differs(privacy, told, name) for name in ("clip", "learning_rate", "rows_per_person")},
        "method": privacy["method"] not in _METHODS.get(told.get("method", "federated"), ()),
    }
    if wrong := [name for name, differing in differs.items() if differing]:
        raise InvalidArgument(
            f"{ASKED}: {wrong[0]}={told[wrong[0]]!r} was asked for, which is not what {PRIVACY} claims"
        )
    return "fits what was asked for"


def _differs(privacy: dict[str, Any], told: dict[str, Any], name: str) -> bool:
    """Whether a setting was asked for by value, and the claim has another."""
    wanted = told.get(name)
    return wanted is not None and told.get("tune") is None and privacy.get(name, wanted) != wanted


def _number(record: dict[str, Any], name: str) -> float:
    """A positive number of a record."""
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidArgument(f"{name} {value!r}: want a number above 0")
    return float(value)


def _whole(record: dict[str, Any], name: str) -> int:
    """A positive whole number of a record."""
    if type(record[name]) is not int or not 0 < record[name] < 2**53:
        raise InvalidArgument(f"{name} {record[name]!r}: want a whole number above 0")
    return int(record[name])


def _trainings(event: Event) -> list[tuple[float, float, int]]:
    """Noise, rate and steps of every stretch of Poisson-sampled Gaussian steps; those that tuning drew from as well."""
    found = []
    for part, times in leaves(event):
        match part:
            case PoissonSampled(event=Gaussian() | Skellam() | SummedDiscreteGaussian() as noisy, rate=rate):
                noise = noisy.noise
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
    """The card is the one that follows from the claim and the results; of another version, says the same epsilon."""
    privacy, _ = claimed(folder)
    text = read_text(folder / CARD)
    line = (
        f"- **Privacy**: epsilon {rounded_up(privacy['epsilon'])} at delta {privacy['delta']} for one "
        f"{privacy['unit']} ({privacy['neighbours']}), a proven upper bound"
    )
    if [one for one in text.splitlines() if "**Privacy**" in one] != [line]:
        raise InvalidArgument(f"{CARD}: says something else than {PRIVACY}; want the line {line!r}")
    if privacy["versions"]["terrine"] != __version__:
        raise Unchecked(
            f"made by Terrine {privacy['versions']['terrine']}: its line on privacy is right, the rest not seen"
        )
    try:
        made = model_card.text(privacy, read_json(folder / RESULTS))
    except MissingExtra as error:
        raise Unchecked(f"its line on privacy is right; {error} to check the rest") from None
    if made != text:
        raise InvalidArgument(f"{CARD}: not the card of this claim and these results")
    return "the card of this claim and these results"


def _check_width(off: Any, rows: int, event: Event) -> None:
    """A width is no less than what so many rows and the least noise of a count allow, with probability 0.95."""
    noise = min((part.noise for part, _ in leaves(event) if isinstance(part, DiscreteLaplace)), default=0.0)
    least = math.sqrt(1 / rows + (math.log(20) * noise / rows) ** 2)
    if isinstance(off, bool) or not isinstance(off, int | float) or not off >= least * (1 - 1e-6):
        raise InvalidArgument(f"{RESULTS}: off_by_at_most {off}; {rows} rows and this noise allow {least:.4g}")


def results(folder: Path) -> str:
    """An accuracy is one, and paid for where it says so."""
    (_, event), found = claimed(folder), read_json(folder / RESULTS)
    accuracy, where = found["accuracy"], found["measured_on"]
    paid = any(isinstance(part, DiscreteLaplace | Laplace | RandomStopping) for part, _ in leaves(event))
    if "paid for" in where and not paid:
        raise InvalidArgument(f"{RESULTS}: the accuracy is said to be paid for, and the events hold no noisy count")
    if found.get("target") is not None and "mean_absolute_error" in found:
        return _of_number(found)
    if accuracy is None:
        return f"no accuracy: measured on {where}"
    if isinstance(accuracy, bool) or not 0 <= accuracy <= 1:
        raise InvalidArgument(f"{RESULTS}: an accuracy of {accuracy}; want it between 0 and 1")
    if (off := found.get("off_by_at_most")) is not None:
        _check_width(off, _whole(found, "rows"), event)
    return f"accuracy {100 * accuracy:.2f}%, measured on {where}"


def _of_number(found: dict[str, Any]) -> str:
    """Errors of predictions of a number are errors within its bounds."""
    span = found["target"]["high"] - found["target"]["low"]
    errors = found["mean_absolute_error"], found["root_mean_squared_error"]
    if not all(isinstance(one, float) and 0 <= one <= span for one in errors):
        raise InvalidArgument(f"{RESULTS}: errors {errors} of a number within a range of {span:g}")
    if found["r2"] is not None and not -1 <= found["r2"] <= 1:
        raise InvalidArgument(f"{RESULTS}: R2 {found['r2']}: want it between -1 and 1")
    return f"mean absolute error {errors[0]:.4g}, measured on {found['measured_on']}"
