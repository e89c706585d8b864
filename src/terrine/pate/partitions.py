"""Who teaches whom: examples dealt out to teachers so that one unit of private data reaches one teacher.

A `Partition` names one teacher for each example, so teachers cannot overlap; dealt by person, all of a person's
examples go to the same teacher. The deal depends on public things alone (the number of units, of teachers, and a seed):
replacing one unit by another changes the data of exactly one teacher. That is why PATE's events are stated under
replace-one. `Subsampled` is M_samp's deal [BTT18]: every teacher draws its own random part, and no example may fall
into more than 2 x rate x teachers of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from terrine import check, files
from terrine.errors import InvalidArgument
from terrine.events import Unit
from terrine.rng import SYSTEM, Source

Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Partition:
    """One teacher for each example.

    Guarantee: teachers share no example, and no person where the unit is the person.
    """

    assignment: Indices
    teachers: int
    people: Indices | None = None
    """Whose each example is, where people are protected: all of a person's are with one teacher."""
    seed: int | None = None

    def __post_init__(self) -> None:
        assignment = np.ascontiguousarray(self.assignment, dtype=np.int64)
        check.whole("teachers", self.teachers)
        if assignment.ndim != 1 or not assignment.size:
            raise InvalidArgument(f"assignment has shape {assignment.shape}: want one teacher for each example")
        if assignment.min() < 0 or assignment.max() >= self.teachers:
            raise InvalidArgument(f"assignment names a teacher outside 0 .. {self.teachers - 1}")
        idle = np.setdiff1d(np.arange(self.teachers), assignment)
        if idle.size:
            raise InvalidArgument(f"teachers {idle[:10].tolist()} have no examples: want at least one each; use fewer")
        object.__setattr__(self, "assignment", assignment)
        if self.people is not None:
            object.__setattr__(self, "people", _undivided(np.asarray(self.people, dtype=np.int64), assignment))

    @property
    def unit(self) -> Unit:
        """Whom the deal protects: a person only where it is known whose each example is."""
        return Unit.EXAMPLE if self.people is None else Unit.PERSON

    @property
    def parts(self) -> list[Indices]:
        """The examples of each teacher."""
        order = np.argsort(self.assignment, kind="stable")
        edges = np.cumsum(np.bincount(self.assignment, minlength=self.teachers))[:-1]
        return [np.asarray(part, dtype=np.int64) for part in np.split(order, edges)]

    @property
    def digest(self) -> str:
        """A fingerprint that votes carry, so that they are billed under the deal they were cast under."""
        text = f"{self.teachers} {self.unit.value} ".encode() + self.assignment.astype("<i8").tobytes()
        return hashlib.sha256(text).hexdigest()

    @property
    def most_parts(self) -> int:
        """How many teachers one unit can reach."""
        return 1

    def record(self) -> dict[str, Any]:
        """What votes need to know of the deal."""
        return {
            "kind": "disjoint",
            "teachers": self.teachers,
            "unit": self.unit.value,
            "most_parts": 1,
            "digest": self.digest,
        }

    def save(self, path: Path) -> None:
        """Write the deal; it stays on the data owner's side."""
        people = None if self.people is None else self.people.tolist()
        record = self.record() | {"seed": self.seed, "assignment": self.assignment.tolist(), "people": people}
        files.write(Path(path), json.dumps(record) + "\n", private=True)

    @classmethod
    def load(cls, path: Path) -> Partition:
        """Read a deal and check it against its own fingerprint."""
        try:
            record = json.loads(Path(path).read_text())
            found = cls(np.array(record["assignment"]), record["teachers"], record["people"], record["seed"])
        except (KeyError, ValueError, TypeError, json.JSONDecodeError) as error:
            raise InvalidArgument(f"{path}: not a partition ({error}); make it with terrine pate split") from None
        if found.digest != record.get("digest"):
            raise InvalidArgument(f"{path}: the assignment does not fit its fingerprint; split and train again")
        return found

    @classmethod
    def of_parts(cls, parts: Sequence[ArrayLike], *, examples: int | None = None) -> Partition:
        """A deal given as one list of examples to a teacher, checked.

        Raises:
            InvalidArgument: an example is in two parts, or in none.
        """
        arrays = [np.asarray(part, dtype=np.int64) for part in parts]
        size = examples or 1 + max((int(part.max()) for part in arrays if part.size), default=-1)
        assignment = np.full(size, -1, dtype=np.int64)
        for teacher, part in enumerate(arrays):
            taken = part[assignment[part] >= 0]
            if taken.size or len(np.unique(part)) < len(part):
                first = int(taken[0]) if taken.size else int(part[0])
                other = int(assignment[first]) if taken.size else teacher
                raise InvalidArgument(
                    f"example {first} is with teachers {other} and {teacher}: want disjoint teachers; one person could"
                    " then move many votes"
                )
            assignment[part] = teacher
        if (assignment < 0).any():
            raise InvalidArgument(f"example {int(np.argmin(assignment))} is with no teacher: want a teacher for each")
        return cls(assignment, len(arrays))


def split(examples: int, teachers: int, *, seed: int, groups: Sequence[Any] | NDArray[Any] | None = None) -> Partition:
    """Deal examples (or, with `groups`, people) to teachers, evenly, by a public seed.

    Raises:
        InvalidArgument: more teachers than examples or people.
    """
    examples = check.whole("examples", examples)
    teachers = check.whole("teachers", teachers, at_least=2)
    check.whole("seed", seed, at_least=0)
    if groups is None:
        _enough(examples, teachers, "examples")
        return Partition(_dealt(examples, teachers, seed), teachers, seed=seed)
    if len(groups) != examples:
        raise InvalidArgument(f"groups has {len(groups)} entries for {examples} examples: want one for each")
    # People are numbered by first appearance, so that another name for one of them moves nobody else.
    numbers: dict[Any, int] = {}
    people = np.array([numbers.setdefault(group, len(numbers)) for group in np.asarray(groups).tolist()])
    _enough(len(numbers), teachers, "people")
    return Partition(_dealt(len(numbers), teachers, seed)[people], teachers, people, seed)


@dataclass(frozen=True)
class Subsampled:
    """M_samp's deal: each of `teachers` teachers takes each example with probability `rate`."""

    rate: float
    teachers: int

    def __post_init__(self) -> None:
        check.rate("rate", self.rate)
        check.whole("teachers", self.teachers, at_least=2)

    @property
    def most_parts(self) -> int:
        """The cap 2 x rate x teachers on the parts that one example may fall into."""
        return int(2 * self.rate * self.teachers)

    def draw(self, examples: int, *, rng: Source = SYSTEM) -> Membership:
        """Draw the parts. The draw is secret.

        Raises:
            InvalidArgument: an example fell into too many parts; then M_samp fails for every question.
        """
        threshold = np.uint64(min(int(self.rate * 2.0**64), 2**64 - 1))
        words = rng.words(check.whole("examples", examples) * self.teachers).reshape(self.teachers, examples)
        return Membership(words < threshold, self)


@dataclass(frozen=True, eq=False)
class Membership:
    """Which teacher took which example, (teachers, examples), and the deal it came from."""

    taken: NDArray[np.bool_]
    deal: Subsampled

    def __post_init__(self) -> None:
        most = int(self.taken.sum(axis=0).max())
        if most > self.deal.most_parts:
            raise InvalidArgument(
                f"an example fell into {most} parts: M_samp fails above 2 x rate x teachers = {self.deal.most_parts};"
                " use more teachers"
            )
        if not self.taken.any(axis=1).all():
            raise InvalidArgument("a teacher drew no example: want a higher rate")

    @property
    def parts(self) -> list[Indices]:
        """The examples of each teacher."""
        return [np.flatnonzero(row).astype(np.int64) for row in self.taken]

    @property
    def digest(self) -> str:
        """A fingerprint that votes carry, so that they are billed under the deal they were cast under."""
        return hashlib.sha256(np.packbits(self.taken).tobytes()).hexdigest()

    def record(self) -> dict[str, Any]:
        """What votes need to know of the deal."""
        return {
            "kind": "subsampled",
            "teachers": self.deal.teachers,
            "unit": Unit.EXAMPLE.value,
            "most_parts": self.deal.most_parts,
            "digest": self.digest,
        }

    def save(self, path: Path) -> None:
        """Write the draw; it is secret and stays on the data owner's side."""
        with files.written(Path(path), private=True) as file:
            np.savez_compressed(file, taken=np.packbits(self.taken), shape=self.taken.shape, rate=self.deal.rate)

    @classmethod
    def load(cls, path: Path) -> Membership:
        """Read what `save` wrote."""
        try:
            with np.load(path, allow_pickle=False) as stored:
                teachers, examples = (int(size) for size in stored["shape"])
                bits = np.unpackbits(stored["taken"], count=teachers * examples).astype(bool)
                rate = float(stored["rate"])
        except (OSError, KeyError, ValueError) as error:
            raise InvalidArgument(f"{path}: not a draw of subsets ({error}); make it with terrine pate split") from None
        return cls(bits.reshape(teachers, examples), Subsampled(rate, teachers))


def _undivided(people: Indices, assignment: Indices) -> Indices:
    """`people`, if each of them is with one teacher."""
    if people.shape != assignment.shape:
        raise InvalidArgument(
            f"people has shape {people.shape}: want one person for each of {assignment.size} examples"
        )
    pairs = np.unique(np.stack([people, assignment]), axis=1)[0]
    if divided := np.flatnonzero(pairs[1:] == pairs[:-1]).tolist():
        raise InvalidArgument(
            f"person {int(pairs[divided[0]])} is with several teachers: want all of a person's examples with one"
        )
    return people


def _enough(units: int, teachers: int, what: str) -> None:
    if teachers > units:
        raise InvalidArgument(f"teachers={teachers}: want at most one for each of the {units} {what}")


def _dealt(units: int, teachers: int, seed: int) -> Indices:
    cards = np.arange(units, dtype=np.int64) % teachers
    return np.random.default_rng(seed).permutation(cards)
