"""Attacks that look at a model's outputs: logits and labels in, one score for each example out.

Higher always means "more likely a member". With p the softmax of the logits and y the label:

    loss               ln p_y                                          [YGFJ18]
    confidence         ln p_y - ln(1 - p_y), the stabilised odds       [CCN22]
    margin             logit_y - the largest other logit
    entropy            sum of p ln p, blind to the label               [SSSS17]
    modified_entropy   (1 - p_y) ln p_y + sum over others of p ln(1-p) [SM21]

For text, from the log-probability that a model gave to each token:

    perplexity         mean log-probability, which orders as minus perplexity [CTW21]
    weakest            mean of the lowest share of log-probabilities          [SAX24]
    against            log-probability beyond a reference model's, or beyond what zlib needs
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import log_softmax, logsumexp

from terrine import check
from terrine.audit.scores import Floats
from terrine.errors import InvalidArgument


def loss(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """Minus the cross-entropy loss: members are fitted better."""
    table, chosen = _outputs(logits, labels)
    return _of_label(log_softmax(table, axis=-1), chosen)


def confidence(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """The log odds of the label, which are close to normal over retrained models."""
    table, chosen = _outputs(logits, labels)
    others = table.copy()
    np.put_along_axis(others, np.broadcast_to(chosen, table.shape[:-1])[..., None], -np.inf, axis=-1)
    result: Floats = _of_label(table, chosen) - logsumexp(others, axis=-1)
    return result


def margin(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """How far the label's logit is above all others."""
    table, chosen = _outputs(logits, labels)
    others = table.copy()
    np.put_along_axis(others, np.broadcast_to(chosen, table.shape[:-1])[..., None], -np.inf, axis=-1)
    result: Floats = _of_label(table, chosen) - others.max(axis=-1)
    return result


def entropy(logits: ArrayLike) -> Floats:
    """Minus the entropy of the prediction; the label is not needed."""
    table = _logits(logits)
    logs = log_softmax(table, axis=-1)
    result: Floats = (np.exp(logs) * logs).sum(axis=-1)
    return result


def modified_entropy(logits: ArrayLike, labels: ArrayLike) -> Floats:
    """Minus the entropy that also says whether the prediction is right."""
    table, chosen = _outputs(logits, labels)
    logs = log_softmax(table, axis=-1)
    chances = np.exp(logs)
    rest = np.log(np.maximum(-np.expm1(logs), 1e-300))
    elsewhere = chances * rest
    own = _of_label(chances, chosen)
    result: Floats = (1 - own) * _of_label(logs, chosen) + elsewhere.sum(axis=-1) - _of_label(elsewhere, chosen)
    return result


def perplexity(log_probabilities: Sequence[ArrayLike]) -> Floats:
    """The mean log-probability of each text's tokens."""
    return np.array([float(one.mean()) for one in _texts(log_probabilities)])


def weakest(log_probabilities: Sequence[ArrayLike], *, share: float = 0.2) -> Floats:
    """The mean log-probability of each text's least likely `share` of tokens: an unseen text has a few hard ones."""
    share = check.rate("share", share)
    return np.array(
        [float(np.sort(one)[: max(1, round(share * one.size))].mean()) for one in _texts(log_probabilities)]
    )


def against(log_probabilities: Sequence[ArrayLike], reference: Sequence[ArrayLike] | Sequence[str]) -> Floats:
    """How much likelier each text is than a reference expects: another model's tokens, or the text itself for zlib."""
    texts = _texts(log_probabilities)
    if len(reference) != len(texts):
        raise InvalidArgument(f"reference: {len(reference)} entries for {len(texts)} texts; want one each")
    if all(isinstance(one, str) for one in reference):
        bits = [8 * len(zlib.compress(str(one).encode())) for one in reference]
        return np.array([float(one.sum()) / size for one, size in zip(texts, bits, strict=True)])
    others = _texts([np.asarray(one) for one in reference])
    return np.array([float(one.mean() - other.mean()) for one, other in zip(texts, others, strict=True)])


def _outputs(logits: ArrayLike, labels: ArrayLike) -> tuple[Floats, NDArray[np.int64]]:
    """Logits (..., examples, classes) with a label for each example."""
    table, chosen = _logits(logits), np.asarray(labels)
    if chosen.dtype.kind not in "iu" or chosen.shape != table.shape[-2:-1]:
        raise InvalidArgument(f"labels: {chosen.dtype} {chosen.shape}; want {table.shape[-2]} whole numbers")
    if chosen.size and not (chosen.min() >= 0 and chosen.max() < table.shape[-1]):
        raise InvalidArgument(f"labels: {chosen.min()}..{chosen.max()}; want 0..{table.shape[-1] - 1}")
    return table, chosen.astype(np.int64)


def _logits(logits: ArrayLike) -> Floats:
    table = np.asarray(logits, dtype=np.float64)
    if table.ndim < 2 or table.shape[-1] < 2 or not table.size:
        raise InvalidArgument(f"logits: shape {table.shape}; want (..., examples, classes) with at least 2 classes")
    if not np.isfinite(table).all():
        raise InvalidArgument("logits: nan or infinite; want finite numbers (did training diverge?)")
    return table


def _of_label(table: Floats, labels: NDArray[np.int64]) -> Floats:
    index = np.broadcast_to(labels, table.shape[:-1])[..., None]
    return np.take_along_axis(table, index, axis=-1)[..., 0]


def _texts(log_probabilities: Sequence[ArrayLike]) -> list[Floats]:
    texts = [np.asarray(one, dtype=np.float64) for one in log_probabilities]
    if not texts:
        raise InvalidArgument("log_probabilities: empty; want one array of token log-probabilities to a text")
    for place, one in enumerate(texts):
        if one.ndim != 1 or not one.size or np.isnan(one).any() or one.max() > 1e-6:
            raise InvalidArgument(f"log_probabilities of text {place}: want a list of numbers <= 0, one to a token")
    return texts
