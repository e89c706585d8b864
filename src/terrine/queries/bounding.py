"""Contribution bounds, inside the engine: what one person can add to any aggregate, however many rows they own.

Weights. A person with n rows, of which at most k may count, gives every row the weight min(1, k / n): in whole numbers

    w = UNIT if n <= k else floor(k UNIT / n),      so that  n w <= k UNIT,  exactly.

No row is chosen, so there is no choice to keep secret, and no window over rows to sort. For values of at most V steps,

    sum over a person's rows of |value| w  <=  k UNIT V         in l1, and so in l2, over all groups together.

People in groups. A person who is in m groups, of which at most g may count, has the weight min(1, g / m) in each:

    l1:  m w <= g UNIT        l2:  sqrt(m) w <= g UNIT / sqrt(m) <= sqrt(g) UNIT   (m >= g; else sqrt(m) UNIT)

Choosing groups. Where group keys are selected privately, a person must be in at most g groups outright, because delta
counts the keys that only one person has. Which g is random: by a hash of person and key under a secret of this question
alone. The bound holds for any order; the secret makes the choice fair and unpredictable.

Every sum is of whole numbers: at most 2^32 steps times UNIT = 2^20 for a row, so below 2^53, added up in 128 bits or in
decimals; 2^73 rows could not overflow them. Whole numbers have one sum, whatever the order of the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ibis

UNIT = 2**20
"""The weight of a row that counts in full."""
PERSON = "person"
_WEIGHT, _OWNED = "weight", "owned"


@ibis.udf.scalar.builtin  # type: ignore[untyped-decorator]
def md5(text: str) -> str:
    """The engines' own, under the same name on all of them."""
    raise NotImplementedError(text)


def weighted(rows: Any, most: int) -> Any:
    """`rows` with a column `weight`: the weights of one person's rows add up to at most `most` UNIT.

    Only people above the bound are joined back; the others weigh UNIT. Their number changes the time, not the answer.
    """
    heavy = _above(rows, most)
    joined = rows.left_join(heavy, rows[PERSON] == heavy["heavy"])
    weight = joined[_WEIGHT].fill_null(UNIT)
    return joined.select(*rows.columns, **{_WEIGHT: weight})


def weighted_pairs(rows: Any, keys: Sequence[str], most: int | None) -> Any:
    """Each person once in each group, with a weight: at most `most` UNIT for one person over all groups.

    `most` is None where there are no more groups than a person may be in.
    """
    pairs = rows.select(PERSON, *keys).distinct()
    if most is None:
        return pairs.mutate(**{_WEIGHT: ibis.literal(UNIT, type="int64")})
    return weighted(pairs, most)


def chosen_pairs(rows: Any, keys: Sequence[str], most: int, secret: str) -> Any:
    """Each person once in each of at most `most` groups, which are chosen by a hash under `secret`."""
    pairs = rows.select(PERSON, *keys).distinct()
    heavy = _above(pairs, most)
    light = pairs.anti_join(heavy, pairs[PERSON] == heavy["heavy"])
    many = pairs.semi_join(heavy, pairs[PERSON] == heavy["heavy"])
    text = ibis.literal(secret)
    for column in (PERSON, *keys):
        text = text + "|" + many[column].cast("string")
    rank = ibis.row_number().over(group_by=many[PERSON], order_by=[md5(text), *(many[key] for key in keys)])
    kept = many.mutate(rank=rank).filter(lambda table: table["rank"] < most).select(*pairs.columns)
    return light.union(kept)


def summed(rows: Any, keys: Sequence[str], columns: Mapping[str, Any], *, wide: bool) -> Any:
    """Per group, the exact sums of whole-number `columns`.

    `wide`: the engine adds 64-bit numbers up in 64 bits (Spark), so they become decimals first.
    """
    sums = {}
    for name, column in columns.items():
        value = column.cast("int64")
        value = value.cast("decimal(19, 0)") if wide else value
        sums[name] = value.sum().cast("decimal(38, 0)")
    return rows.group_by(list(keys)).aggregate(**sums) if keys else rows.aggregate(**sums)


def _above(rows: Any, most: int) -> Any:
    """The people who own more than `most` of `rows`, and the weight of each of their rows.

    Engines divide whole numbers in doubles; one step down mends a quotient that was rounded up.
    """
    owned = rows.group_by(heavy=rows[PERSON]).aggregate(**{_OWNED: rows.count()})
    owned = owned.filter(owned[_OWNED] > most)
    whole = most * UNIT
    share = (ibis.literal(whole, type="int64") / owned[_OWNED]).floor().cast("int64")
    weight = ibis.ifelse(share * owned[_OWNED] > whole, share - 1, share)
    return owned.select("heavy", **{_WEIGHT: weight})
