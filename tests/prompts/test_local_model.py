"""SmolLM2, where it is present: $TERRINE_DATA/smollm2 holds the GGUF file or a folder."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from terrine import sgd
from terrine.prompts import DiscretePrompt, LanguageModel, LocalModel, SoftPrompt, Template, tune

FOLDER = Path(os.environ.get("TERRINE_DATA", "nowhere")) / "smollm2"
TEMPLATE = Template("{text}\nThe review is", (" negative", " positive"), "Is the review positive or negative?", "\n")
TEXTS = ["a wonderful, moving film", "dull and far too long", "the best comedy of the year", "a waste of time"]

pytestmark = [pytest.mark.local_model, pytest.mark.slow]


@pytest.fixture(scope="module")
def language():
    if not FOLDER.is_dir():
        pytest.skip("no smollm2 in $TERRINE_DATA")
    torch.set_num_threads(1)
    return LanguageModel.load(FOLDER)


def test_it_tells_good_from_bad(language):
    backend = LocalModel(language)
    scores = DiscretePrompt(TEMPLATE).log_probabilities(backend, TEXTS)
    lean = scores[:, 1] - scores[:, 0]
    assert min(lean[0], lean[2]) > max(lean[1], lean[3])
    again = DiscretePrompt(TEMPLATE).log_probabilities(LocalModel(language, reuse=False), TEXTS)
    np.testing.assert_allclose(again, scores, atol=1e-3)


def test_a_private_step_runs(language):
    prompt = SoftPrompt.from_text(language, TEMPLATE, "Is the review positive or negative?\n", head=True)
    plan = sgd.Plan(examples=4, lot=4, steps=1, clip=1.0, noise=1.0, delta=0.1, seed=0)
    tuned = tune(language, prompt, TEXTS, [1, 0, 1, 0], plan)
    assert torch.isfinite(tuned.tokens).all()
    assert not torch.equal(tuned.tokens, prompt.tokens)
