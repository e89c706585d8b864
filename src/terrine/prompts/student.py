"""The student: a prompt of public demonstrations, chosen by how well it answers other public texts.

The labels come from the teachers through noise and are paid for; whatever is done with them costs nothing more. A
candidate shows some of the labelled texts and is scored on the others:

    score  =  mean over texts not shown of P(label | prompt, text)       under one or more calibrations

Demonstrations are shown only where prompts with some lead the empty one on average, so that the student falls back on
the model's own knowledge and not on a lucky draw.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from terrine import check, files
from terrine.errors import InvalidArgument
from terrine.pate import ABSTAINED
from terrine.prompts.backend import Backend
from terrine.prompts.calibration import CONTENT_FREE, prior
from terrine.prompts.teachers import balanced
from terrine.prompts.template import Template

Floats = NDArray[np.float64]

_FORMAT = "terrine discrete prompt 1"

_EVEN = 3.0
"""How much even answers weigh in the student's calibration, where the labels bought weigh 1."""


@dataclass(frozen=True)
class DiscretePrompt:
    """Public demonstrations before a question, the prior that is taken out of the answers, and the privacy record."""

    template: Template
    demonstrations: tuple[tuple[str, int], ...] = ()
    prior: tuple[float, ...] | None = None
    privacy: Mapping[str, Any] | None = None

    @property
    def text(self) -> str:
        """What goes before a question."""
        return self.template.prompt(self.demonstrations)

    def log_probabilities(self, backend: Backend, texts: Sequence[str]) -> Floats:
        """Log-probabilities of the classes for each text, normalised, after the prior is taken out."""
        asked = [self.template.question(text) for text in texts]
        found = backend.log_probabilities(self.text, asked, self.template.words)
        return _normalised(found if self.prior is None else found - np.array(self.prior))

    def predict(self, backend: Backend, texts: Sequence[str]) -> NDArray[np.int64]:
        """The class of each text."""
        found: NDArray[np.int64] = self.log_probabilities(backend, texts).argmax(axis=1)
        return found

    def save(self, path: str | Path) -> None:
        """Write one JSON file."""
        record = {"format": _FORMAT, **dataclasses.asdict(self)}
        files.write(Path(path), json.dumps(record, indent=2, ensure_ascii=False) + "\n", private=False)

    @classmethod
    def load(cls, path: str | Path) -> DiscretePrompt:
        """Read what `save` wrote.

        Raises:
            InvalidArgument: it is another file.
        """
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            if record.pop("format") != _FORMAT:
                raise ValueError("another format")
            template = Template(**record.pop("template"))
            shown = tuple((str(text), int(label)) for text, label in record["demonstrations"])
            biases = None if record["prior"] is None else tuple(float(one) for one in record["prior"])
            return cls(template, shown, biases, record["privacy"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"{path}: not a discrete prompt ({error}); want one that Terrine saved") from None


class Scored(NamedTuple):
    """A prompt, and the probability that it gives to the label of each text that it does not show."""

    prompt: DiscretePrompt
    given: dict[str, float]


def calibrated(backend: Backend, prompt: DiscretePrompt, inputs: Sequence[str] = CONTENT_FREE) -> DiscretePrompt:
    """The same prompt with its prior on public `inputs` taken out."""
    asked = [prompt.template.question(text) for text in inputs]
    found = prior(backend.log_probabilities(prompt.text, asked, prompt.template.words))
    return dataclasses.replace(prompt, prior=tuple(found.tolist()))


def choose(
    backend: Backend,
    template: Template,
    texts: Sequence[str],
    labels: ArrayLike,
    *,
    shots: int = 4,
    candidates: int = 8,
    calibration: Sequence[str] = CONTENT_FREE,
    unlabelled: Sequence[str] = (),
    seed: int = 0,
    privacy: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DiscretePrompt:
    """The best of some prompts made from public `texts` and the `labels` bought for them.

    Each candidate is scored by the mean probability that it gives to the labels of the texts that it does not show: as
    it is, calibrated on content-free inputs, and calibrated on all texts, so that its answers are even, and a little
    by the labels (they are few). With `unlabelled` public texts there are enough for the last way,
    and it is not left to a few labels to choose among the three. A prompt with demonstrations is taken only if all
    those under its calibration lead the empty prompt, on average, by a standard error: the best of many noisy scores is
    otherwise a lucky one.

    Guarantee: post-processing of the labels; it costs nothing.

    Raises:
        InvalidArgument: labels and texts do not fit, or fewer than two labels were bought.
    """
    found = np.asarray(labels)
    if found.shape != (len(texts),):
        raise InvalidArgument(f"labels of shape {found.shape} for {len(texts)} texts: want one for each")
    known = [(texts[place], int(found[place])) for place in np.flatnonzero(found != ABSTAINED).tolist()]
    if len(known) < 2:
        raise InvalidArgument(f"{len(known)} labelled texts: want at least two to choose a prompt; buy more answers")
    sets = _candidates(known, check.whole("shots", shots), check.whole("candidates", candidates), seed)
    scored: list[list[Scored]] = []
    for shown in sets:
        prompt = DiscretePrompt(template, shown, None, privacy)
        scored.append(_scored(backend, prompt, known, calibration, unlabelled))
        if progress is not None:
            progress(len(scored), len(sets))
    return _best(scored[0], list(zip(*scored[1:], strict=True)))


def _best(empty: list[Scored], families: list[tuple[Scored, ...]]) -> DiscretePrompt:
    """The best of the family that leads most; the empty prompt where none leads. A family shares its calibration."""
    alone = max(empty, key=lambda one: _mean(one.given))
    ahead = [_ahead([one.given for one in family], alone.given) for family in families]
    if not ahead or max(ahead) <= 0:
        return alone.prompt
    family = families[int(np.argmax(ahead))]
    return max(family, key=lambda one: _mean(one.given) - _mean({text: alone.given[text] for text in one.given})).prompt


def _candidates(
    known: list[tuple[str, int]], shots: int, candidates: int, seed: int
) -> list[tuple[tuple[str, int], ...]]:
    generator = np.random.default_rng(seed)
    sets: list[tuple[tuple[str, int], ...]] = [()]
    shown = min(shots, len(known) // 2)  # the other half is there to score
    for _ in range(candidates):
        order = generator.permutation(len(known))
        drawn = tuple(balanced([known[place] for place in order], shown))
        sets.append(tuple(drawn[place] for place in generator.permutation(len(drawn))))
    return list(dict.fromkeys(sets))


def _scored(
    backend: Backend,
    prompt: DiscretePrompt,
    known: list[tuple[str, int]],
    calibration: Sequence[str],
    unlabelled: Sequence[str],
) -> list[Scored]:
    """The prompt under each calibration, with the probability of the label of each text that it does not show."""
    others = [one for one in known if one not in prompt.demonstrations]
    wanted = np.array([label for _, label in others])
    asked = [prompt.template.question(text) for text in [*(text for text, _ in others), *unlabelled, *calibration]]
    answered = backend.log_probabilities(prompt.text, asked, prompt.template.words)
    content, free = answered[: len(others) + len(unlabelled)], answered[len(others) + len(unlabelled) :]
    priors: list[Floats | None] = [_fitted(content[: len(others)], wanted, content)]
    if not len(unlabelled):
        priors += [None, *([prior(free)] if len(free) else [])]
    result = []
    for one in priors:
        scores = _normalised(content if one is None else content - one)
        given = np.exp(scores[np.arange(len(others)), wanted]).tolist()
        made = dataclasses.replace(prompt, prior=None if one is None else tuple(one.tolist()))
        result.append(Scored(made, dict(zip([text for text, _ in others], given, strict=True))))
    return result


def _fitted(labelled: Floats, labels: NDArray[np.int64], all_texts: Floats, rounds: int = 400) -> Floats:
    """What to take out so that the answers to labelled texts sum to the labels, and those to all texts are even.

    The two wishes are weighed 1 to `_EVEN` and met by proportional fitting. The labels are compared with the answers to
    the same texts, so that it does not matter how frequent each class happens to be among them.
    """
    classes, even = labelled.shape[1], _EVEN * len(labels)
    wanted = np.bincount(labels, minlength=classes) + even / classes
    found = np.zeros(classes)
    for _ in range(rounds):
        given = np.exp(_normalised(labelled - found)).sum(axis=0) + even * np.exp(prior(all_texts - found))
        found = found + np.log(given) - np.log(wanted)
    return found


def _ahead(family: Sequence[Mapping[str, float]], empty: Mapping[str, float]) -> float:
    """The lead over the empty prompt, a mean over prompts and then texts, less a standard error over texts."""
    of_texts = {text: [given[text] - one for given in family if text in given] for text, one in empty.items()}
    leads = np.array([np.mean(one) for one in of_texts.values() if one])
    return float(leads.mean() - leads.std(ddof=1) / math.sqrt(len(leads))) if len(leads) > 1 else 0.0


def _mean(given: Mapping[str, float]) -> float:
    return float(np.mean(list(given.values())))


def _normalised(scores: Floats) -> Floats:
    found: Floats = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    return found
