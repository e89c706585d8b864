r"""Private prompts for a frozen language model: soft ones by DP-SGD, discrete ones by PATE [DDP23].

    language = prompts.LanguageModel.load("folder-or-file.gguf")
    template = prompts.Template("{text}\nSentiment:", words=(" negative", " positive"))
    prompt = prompts.SoftPrompt.from_text(language, template, "Is the review positive or negative?")
    prompt = prompts.tune(language, prompt, texts, labels, plan)

    votes = prompts.vote(prompts.LocalModel(language), template, demonstrations, deal, public_texts)

The model stays as it is: what is released is a prompt, or words.
"""

from __future__ import annotations

from terrine.errors import MissingExtra

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingExtra("torch", extra="llm") from error

from terrine.prompts.backend import Backend, LocalModel
from terrine.prompts.language import LanguageModel
from terrine.prompts.soft import SoftPrompt
from terrine.prompts.student import DiscretePrompt, choose
from terrine.prompts.teachers import Demonstration, vote
from terrine.prompts.template import Template
from terrine.prompts.tuning import tune

__all__ = [
    "Backend",
    "Demonstration",
    "DiscretePrompt",
    "LanguageModel",
    "LocalModel",
    "SoftPrompt",
    "Template",
    "choose",
    "tune",
    "vote",
]
