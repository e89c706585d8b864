"""Contextual calibration: take out what a prompt answers to inputs that say nothing [ZWF21].

    class = argmax_j  log P(word j | prompt, text) - log prior_j,    prior_j = mean over empty inputs of P(word j | ...)

A small model with demonstrations before it leans to one word whatever the text; without this it collapses to one class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from terrine.prompts.backend import Backend
from terrine.prompts.soft import CONTENT_FREE
from terrine.prompts.template import Template

Floats = NDArray[np.float64]

__all__ = ["CONTENT_FREE", "answers", "prior"]


def prior(log_probabilities: Floats) -> Floats:
    """The log of the mean class probabilities of some inputs (inputs, classes)."""
    shares = np.exp(log_probabilities - np.logaddexp.reduce(log_probabilities, axis=1, keepdims=True))
    found: Floats = np.log(np.maximum(shares.mean(axis=0), 1e-12))
    return found


def answers(
    backend: Backend, template: Template, prompt: str, texts: Sequence[str], calibration: Sequence[str] | None
) -> Floats:
    """Log-probabilities of the classes for each text, less the prior where `calibration` names inputs for it.

    Each text is asked once, also where it is in both lists: `calibration=texts` costs nothing more.
    """
    inputs = list(dict.fromkeys([*texts, *(calibration or ())]))
    places = {text: place for place, text in enumerate(inputs)}
    found = backend.log_probabilities(prompt, [template.question(text) for text in inputs], template.words)
    asked = found[[places[text] for text in texts]]
    if not calibration:
        return asked
    return asked - prior(found[[places[text] for text in calibration]])
