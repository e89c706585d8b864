"""Why k-anonymity is not enough: a table made 5-anonymous still tells an attacker who earns what.

    python examples/linkage.py path/to/adult.data     (or adult.data.gz; or its directory in $TERRINE_DATA)

The Adult census table is generalised until every combination of age band, sex, race and marital status is shared by at
least 5 people; smaller groups are dropped. The attacker knows these four facts about a neighbour. Two attacks work:
groups whose incomes all agree (homogeneity), and two tables published at different times (differencing).
"""

import csv
import gzip
import itertools
import os
import sys
from collections import Counter, defaultdict
from pathlib import Path

from terrine.mechanisms import Histogram

K = 5
AGE, MARITAL, RACE, SEX, INCOME = 0, 5, 8, 9, 14
# The code book is public, so its cells may be used; cells read off the table would already leak.
RACES = "White Black Asian-Pac-Islander Amer-Indian-Eskimo Other".split()  # noqa: SIM905
STATES = "Never-married Married-civ-spouse Married-AF-spouse Married-spouse-absent Separated Divorced Widowed".split()  # noqa: SIM905
CODES = (range(10, 100, 10), ["Female", "Male"], RACES, STATES, ["<=50K", ">50K"])


def main(arguments: list[str]) -> None:
    people = read(find(arguments))
    table = published(people)
    print(f"{len(people):,} people; {len(table):,} groups of at least {K} are published")

    exposed = [rows for rows in table.values() if len(set(rows)) == 1]
    print(f"homogeneity: in {len(exposed):,} groups all incomes agree: {sum(map(len, exposed)):,} people are exposed")

    targets, found = people[:: max(1, len(people) // 200)][:200], 0
    for person in targets:
        later, group = published(people, without=person), generalised(person)  # after this person left
        found += Counter(table.get(group, ())) - Counter(later.get(group, ())) == Counter([person[INCOME]])
    print(f"differencing: two {K}-anonymous tables gave away the income of {found} of {len(targets)} people who left")

    cells = {cell: place for place, cell in enumerate(itertools.product(*CODES))}
    counts = [0] * len(cells)
    for person in people:
        counts[cells[*generalised(person), person[INCOME]]] += 1
    noisy = Histogram(epsilon=1, bins=len(cells)).release(counts).value
    rich = sum(count for cell, count in zip(cells, noisy, strict=True) if cell[-1] == ">50K")
    print(f"with DP, epsilon 1, all {len(cells):,} cells: {rich / noisy.sum():.1%} earn more than 50K", end="; ")
    print(f"true {sum(person[INCOME] == '>50K' for person in people) / len(people):.1%}")
    print("whoever leaves, no answer becomes more than e = 2.72 times as likely: both attacks end there")


def published(people: list[list[str]], without: list[str] | None = None) -> dict[tuple[object, ...], list[str]]:
    groups = defaultdict(list)
    for person in people:
        if person is not without:
            groups[generalised(person)].append(person[INCOME])
    return {group: rows for group, rows in groups.items() if len(rows) >= K}


def generalised(person: list[str]) -> tuple[object, ...]:
    return int(person[AGE]) // 10 * 10, person[SEX], person[RACE], person[MARITAL]


def find(arguments: list[str]) -> Path:
    folder = Path(os.environ.get("TERRINE_DATA", "."))
    places = [Path(arguments[0])] if arguments else [folder / "adult.data", folder / "adult.data.gz"]
    found = [place for place in places if place.exists()]
    return found[0] if found else sys.exit(f"linkage: no {places[0]}; give its path")


def read(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [[cell.strip() for cell in row] for row in csv.reader(lines) if len(row) == 15]


if __name__ == "__main__":
    main(sys.argv[1:])
