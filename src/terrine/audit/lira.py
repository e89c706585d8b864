"""LiRA: for each example, is the target model more like models that saw it, or like models that did not? [CCN22]

With the confidence phi = ln(p_y / (1 - p_y)) of shadow models, normal fits N(m_in, s_in) and N(m_out, s_out) for
each example, and the target's own phi,

    online   ln N(phi; m_in, s_in) - ln N(phi; m_out, s_out)
    offline  ln Phi((phi - m_out) / s_out)                     no shadow need have seen the example

Over augmentations of an example, log-likelihoods are averaged. Few shadows make poor variances, so up to `FEW` of
them one variance serves all examples.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import log_ndtr

from terrine.audit.scores import Flags, Floats
from terrine.errors import InvalidArgument

FEW = 32
"""With fewer shadows than this on a side, all examples share one variance."""
_LEAST = 1e-6


def online(target: ArrayLike, shadows: ArrayLike, included: ArrayLike) -> Floats:
    """Scores of each example, from shadows that saw it and shadows that did not.

    `target` (examples[, augmentations]), `shadows` (models, examples[, augmentations]), `included` (models, examples).

    Raises:
        InvalidArgument: shapes differ, or some example was seen by all shadows or by none.
    """
    own, others, flags = _checked(target, shadows, included)
    seen = flags.sum(axis=0)
    if wrong := np.flatnonzero((seen == 0) | (seen == len(flags))).tolist():
        raise InvalidArgument(
            f"included: {len(wrong)} examples (first: {wrong[0]}) are in all {len(flags)} shadows or in none; "
            "want both kinds for each; lira.offline needs only shadows that left it out"
        )
    inside, outside = _normal(others, flags), _normal(others, ~flags)
    return _averaged(_log_density(own, *inside) - _log_density(own, *outside))


def offline(target: ArrayLike, shadows: ArrayLike, included: ArrayLike | None = None) -> Floats:
    """Scores of each example from shadows that did not see it; without `included`, none of them saw any."""
    table = np.asarray(shadows, dtype=np.float64)
    unseen = np.zeros(table.shape[:2], dtype=np.bool_) if included is None else included
    own, others, flags = _checked(target, table, unseen)
    if wrong := np.flatnonzero(flags.all(axis=0)).tolist():
        raise InvalidArgument(f"included: example {wrong[0]} is in all {len(flags)} shadows; want some without it")
    mean, deviation = _normal(others, ~flags)
    return _averaged(log_ndtr((own - mean) / deviation))


def leave_one_out(shadows: ArrayLike, included: ArrayLike, *, models: int | None = None) -> tuple[Floats, Flags]:
    """Attack each of the first `models` shadows with all others: scores and truth, (models, examples).

    Retraining is paid for once: every shadow serves as a target too.
    """
    table, flags = np.asarray(shadows, dtype=np.float64), np.asarray(included, dtype=np.bool_)
    count = len(table) if models is None else models
    scores = [online(table[one], np.delete(table, one, axis=0), np.delete(flags, one, axis=0)) for one in range(count)]
    return np.stack(scores), flags[:count]


def _checked(target: ArrayLike, shadows: ArrayLike, included: ArrayLike) -> tuple[Floats, Floats, Flags]:
    """All with a last axis for augmentations."""
    own, others = np.asarray(target, dtype=np.float64), np.asarray(shadows, dtype=np.float64)
    flags = np.asarray(included)
    if others.ndim not in (2, 3) or own.shape != others.shape[1:] or flags.shape != others.shape[:2]:
        raise InvalidArgument(
            f"target {own.shape}, shadows {others.shape}, included {flags.shape}: want (examples[, augmentations]), "
            "(models, examples[, augmentations]), (models, examples)"
        )
    if len(others) < 2 or not own.size:
        raise InvalidArgument(f"shadows: {others.shape}; want at least 2 models and 1 example")
    if not (np.isfinite(own).all() and np.isfinite(others).all()):
        raise InvalidArgument("confidences: nan or infinite; want finite numbers; attacks.confidence gives them")
    if others.ndim == 2:
        own, others = own[..., None], others[..., None]
    return own, others, flags.astype(np.bool_)


def _normal(values: Floats, used: Flags) -> tuple[Floats, Floats]:
    """Mean and deviation for each example over the models that are `used` for it."""
    weight = used[..., None].astype(np.float64)
    count = weight.sum(axis=0)
    mean = (values * weight).sum(axis=0) / count
    squares = ((values - mean) ** 2 * weight).sum(axis=0)
    if count.min() < FEW:  # one variance for all, freed of the means that were fitted
        free = max(1.0, float((count - 1).clip(min=0).sum()))
        pooled = squares.sum(axis=0, keepdims=True) / free
        return mean, np.sqrt(np.broadcast_to(pooled, mean.shape)) + _LEAST
    return mean, np.sqrt(squares / (count - 1)) + _LEAST


def _log_density(value: Floats, mean: Floats, deviation: Floats) -> Floats:
    return -0.5 * ((value - mean) / deviation) ** 2 - np.log(deviation)


def _averaged(values: Floats) -> Floats:
    result: Floats = values.mean(axis=-1)
    return result
