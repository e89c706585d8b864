"""The student: a prompt of public demonstrations, chosen by how well it answers other public texts.

The labels come from the teachers through noise and are paid for; whatever is done with them costs nothing more. A
candidate shows some of the labelled texts and is scored on the others. The prompt without demonstrations is always a
candidate, so the student does not fall far behind the model's own knowledge.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from terrine import check
from terrine.errors import InvalidArgument
from terrine.pate import ABSTAINED
from terrine.prompts.backend import Backend
from terrine.prompts.calibration import CONTENT_FREE, prior
from terrine.prompts.teachers import balanced
from terrine.prompts.template import Template

Floats = NDArray[np.float64]

_FORMAT = "terrine discrete prompt 1"


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
        Path(path).write_text(json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

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
    seed: int = 0,
    privacy: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DiscretePrompt:
    """The best of some prompts made from public `texts` and the `labels` bought for them.

    Each candidate is scored by the mean probability that it gives to the labels of the texts that it does not show: as
    it is, calibrated on content-free inputs, and calibrated to the labels' own frequencies. A prompt with
    demonstrations is taken only if it leads the empty one, on the same texts, by two standard errors: the best of many
    noisy scores is otherwise a lucky one.

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
    best, lead = DiscretePrompt(template, (), None, privacy), 0.0
    empty: dict[str, float] = {}
    for place, shown in enumerate(sets):
        scored = _scored(backend, DiscretePrompt(template, shown, None, privacy), known, calibration)
        if not shown:
            best, empty = max(scored, key=lambda one: float(np.mean(list(one[1].values()))))
        for prompt, given in scored:
            ahead = _ahead(given, empty)
            if ahead > lead:
                best, lead = prompt, ahead
        if progress is not None:
            progress(place + 1, len(sets))
    return best


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
    backend: Backend, prompt: DiscretePrompt, known: list[tuple[str, int]], calibration: Sequence[str]
) -> list[tuple[DiscretePrompt, dict[str, float]]]:
    """The prompt under each calibration, with the probability of the label of each text that it does not show."""
    others = [one for one in known if one not in prompt.demonstrations]
    wanted = np.array([label for _, label in others])
    asked = [prompt.template.question(text) for text in [*(text for text, _ in others), *calibration]]
    answered = backend.log_probabilities(prompt.text, asked, prompt.template.words)
    free, answered = answered[len(others) :], answered[: len(others)]
    counts = np.bincount([label for _, label in known], minlength=prompt.template.classes) + 1.0
    priors: list[Floats | None] = [prior(answered) - np.log(counts / counts.sum()), None]
    if len(free):
        priors.insert(0, prior(free))
    result = []
    for one in priors:
        scores = _normalised(answered if one is None else answered - one)
        given = np.exp(scores[np.arange(len(others)), wanted]).tolist()
        made = dataclasses.replace(prompt, prior=None if one is None else tuple(one.tolist()))
        result.append((made, dict(zip([text for text, _ in others], given, strict=True))))
    return result


def _ahead(given: dict[str, float], empty: dict[str, float]) -> float:
    """The mean lead over the empty prompt on the same texts, less two standard errors."""
    leads = np.array([one - empty[text] for text, one in given.items()])
    return float(leads.mean() - 2 * leads.std(ddof=1) / math.sqrt(len(leads))) if len(leads) > 1 else 0.0


def _normalised(scores: Floats) -> Floats:
    found: Floats = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    return found
