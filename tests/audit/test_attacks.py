"""Attack signals against one-line formulas, and attacks that must find what was planted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import norm

from terrine import audit
from terrine.audit import attacks, lira, shokri
from terrine.errors import InvalidArgument

LOGITS = np.random.default_rng(0).normal(0, 3, (7, 4))
LABELS = np.array([0, 1, 2, 3, 0, 1, 2])


def test_signals_by_their_formulas() -> None:
    for row, label, *found in zip(
        LOGITS,
        LABELS,
        attacks.loss(LOGITS, LABELS),
        attacks.confidence(LOGITS, LABELS),
        attacks.margin(LOGITS, LABELS),
        attacks.entropy(LOGITS),
        attacks.modified_entropy(LOGITS, LABELS),
        strict=True,
    ):
        chances = softmax(row)
        own, others = chances[label], np.delete(chances, label)
        wanted = [
            math.log(own),
            math.log(own / (1 - own)),
            row[label] - np.delete(row, label).max(),
            sum(one * math.log(one) for one in chances),
            (1 - own) * math.log(own) + sum(one * math.log(1 - one) for one in others),
        ]
        assert found == pytest.approx(wanted, rel=1e-9)


def test_signals_of_many_models_at_once() -> None:
    stacked = np.stack([LOGITS, -LOGITS])
    for signal in (attacks.loss, attacks.confidence, attacks.margin, attacks.modified_entropy):
        both = signal(stacked, LABELS)
        assert both.shape == (2, 7)
        assert both[1] == pytest.approx(signal(-LOGITS, LABELS))


def test_confidence_of_a_certain_model_is_finite() -> None:
    assert attacks.confidence([[800.0, 0.0]], [0]) == pytest.approx([800.0])
    assert attacks.loss([[800.0, 0.0]], [1]) == pytest.approx([-800.0])
    assert np.isfinite(attacks.modified_entropy([[800.0, 0.0]], [0])).all()


def test_text_scores() -> None:
    texts = [np.log([0.5, 0.25]), np.log([0.1, 0.1, 0.1, 0.9, 0.9])]
    assert attacks.perplexity(texts) == pytest.approx([np.mean(texts[0]), np.mean(texts[1])])
    assert attacks.weakest(texts, share=0.4) == pytest.approx([math.log(0.25), math.log(0.1)])
    assert attacks.against(texts, texts) == pytest.approx([0, 0])
    plain, repeated = attacks.against([texts[0], texts[0]], ["a" * 1000, "qwfpluyzxcvbneio" * 2])
    assert plain != repeated


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: attacks.loss(LOGITS, LABELS[:3]), "labels"),
        (lambda: attacks.loss(LOGITS, LABELS + 1), r"want 0\.\.3"),
        (lambda: attacks.loss(LOGITS, LABELS.astype(float)), "whole numbers"),
        (lambda: attacks.loss([[1.0, math.nan]], [0]), "nan or infinite"),
        (lambda: attacks.entropy([1.0, 2.0]), "shape"),
        (lambda: attacks.perplexity([]), "empty"),
        (lambda: attacks.perplexity([[0.5]]), "text 0"),
        (lambda: attacks.against([[-1.0]], []), "reference"),
        (lambda: lira.online(np.zeros(3), np.zeros((4, 3)), np.ones((4, 3))), "all 4 shadows or in none"),
        (lambda: lira.offline(np.zeros(3), np.zeros((4, 3)), np.ones((4, 3))), "in all 4 shadows"),
        (lambda: lira.online(np.zeros(2), np.zeros((4, 3)), np.ones((4, 3))), r"target \(2,\)"),
        (lambda: lira.online(np.full(3, np.nan), np.zeros((4, 3)), np.ones((4, 3))), "nan or infinite"),
        (lambda: shokri.fit(np.zeros((2, 7, 4)), LABELS, np.ones((2, 7))), "one kind only"),
        (lambda: shokri.fit(np.zeros((2, 7, 4)), LABELS, np.ones((2, 6))), "want"),
    ],
)
def test_bad_input_is_refused(call: object, said: str) -> None:
    assert callable(call)
    with pytest.raises(InvalidArgument, match=said):
        call()


def planted(models: int, examples: int, gap: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Confidences of shadows: every example has a level of its own, members `gap` above it."""
    generator = np.random.default_rng(seed)
    included = generator.random((models, examples)).argsort(axis=0) < models // 2
    level = generator.normal(0, 5, examples)
    return level + gap * included + generator.normal(0, 1, (models, examples)), included


def test_lira_is_the_likelihood_ratio() -> None:
    shadows, included = planted(80, 5, 2.0)
    target = shadows[0] + 0.3
    for place in range(5):
        inside, outside = (shadows[flags, place] for flags in (included[:, place], ~included[:, place]))
        fits = [norm(one.mean(), one.std(ddof=1) + 1e-6) for one in (inside, outside)]
        wanted = fits[0].logpdf(target[place]) - fits[1].logpdf(target[place])
        assert lira.online(target, shadows, included)[place] == pytest.approx(wanted, rel=1e-9)
        assert lira.offline(target, shadows, included)[place] == pytest.approx(fits[1].logcdf(target[place]), rel=1e-9)


def test_lira_finds_members_that_a_threshold_cannot() -> None:
    shadows, included = planted(65, 2000, 2.0)
    target, truth = shadows[0], included[0]
    rest, flags = shadows[1:], included[1:]
    areas = {
        "threshold": audit.roc(audit.Scores.split(target, truth)).auc(),
        "offline": audit.roc(audit.Scores.split(lira.offline(target, rest, flags), truth)).auc(),
        "online": audit.roc(audit.Scores.split(lira.online(target, rest, flags), truth)).auc(),
    }
    best = norm.cdf(2 / math.sqrt(2))  # with known normals
    assert areas["threshold"] < 0.65
    assert best - 0.03 < areas["offline"] < best + 0.03
    assert best - 0.03 < areas["online"] < best + 0.03


def test_augmentations_help() -> None:
    generator = np.random.default_rng(1)
    shadows, included = planted(40, 1000, 1.0)
    clean = shadows - generator.normal(0, 1, shadows.shape)
    views = clean[..., None] + generator.normal(0, 2, (*clean.shape, 8))
    one, _ = lira.leave_one_out(views[..., 0], included, models=4)
    many, truth = lira.leave_one_out(views, included, models=4)
    single, several = (audit.roc(audit.Scores.split(found.ravel(), truth.ravel())).auc() for found in (one, many))
    assert several > single + 0.03


def test_few_shadows_share_a_variance() -> None:
    """With 4 shadows a side, variances of their own would drown the signal."""
    shadows, included = planted(9, 3000, 2.0)
    scores = lira.online(shadows[0], shadows[1:], included[1:])
    assert audit.roc(audit.Scores.split(scores, included[0])).auc() > 0.85


def test_shadow_attack_learns_what_members_look_like() -> None:
    """Members are predicted sharply whatever the class; a correct label says nothing here."""
    generator = np.random.default_rng(2)
    labels = generator.integers(0, 4, 500)
    included = generator.random((6, 500)) < 0.5
    logits = generator.normal(0, 1, (6, 500, 4)) * np.where(included, 6, 1)[..., None]
    model = shokri.fit(logits[1:], labels, included[1:])
    found = audit.Scores.split(model.score(logits[0], labels), included[0])
    assert audit.roc(found).auc() > 0.9
    loss = audit.Scores.split(attacks.loss(logits[0], labels), included[0])
    assert audit.roc(loss).auc() < 0.6
