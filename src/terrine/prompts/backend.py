"""Who answers: anything that gives the log-probabilities of label words after a prompt and a question.

`LocalModel` runs a model here. The keys and values of a prompt are computed once and used for all its questions; those
asked lately stay in memory, so that a teacher that is asked again starts from its prompt's end. A model behind an API
or a local server is another class with the same one method.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from terrine import check
from terrine.errors import InvalidArgument
from terrine.prompts.batches import by_length, pack, pad, tokens_in_memory
from terrine.prompts.language import LanguageModel, Prefix
from terrine.prompts.template import word_ids

Floats = NDArray[np.float64]


class Backend(Protocol):
    """A language model that can be asked for label words."""

    def log_probabilities(self, prompt: str, questions: Sequence[str], words: Sequence[str]) -> Floats:
        """log P(word | prompt, question), (questions, words)."""
        ...


class LocalModel:
    """A causal Hugging Face model in this process; `keep` bytes of prompts' keys and values stay in memory.

    `reuse=False` reads the whole prompt again with every question: slower by its length, the same answers.

    Raises:
        InvalidArgument: the model is an encoder.
    """

    def __init__(
        self, language: LanguageModel, *, keep: int = 1 << 30, memory: int = 1 << 30, reuse: bool = True
    ) -> None:
        if not language.causal:
            raise InvalidArgument("an encoder does not go on from a prompt: want a causal language model")
        self.language, self.reuse = language, reuse
        self._keep = check.whole("keep", keep, at_least=0)
        # Nothing is kept for a backward pass: four times as many tokens as there would be with one.
        self._tokens = 4 * tokens_in_memory(language, check.whole("memory", memory))
        self._kept: OrderedDict[str, Prefix] = OrderedDict()

    @torch.no_grad()
    def log_probabilities(self, prompt: str, questions: Sequence[str], words: Sequence[str]) -> Floats:
        """log P(word | prompt, question), (questions, words).

        Raises:
            InvalidArgument: a word is several tokens, or prompt and question are longer than the context.
        """
        language, ids = self.language, word_ids(self.language, words)
        before = [*language.beginning, *(language.tokens(prompt) if prompt else [])]
        batch = pack(language, [language.tokens(one) for one in questions], [0] * len(questions))
        language.check_fits(len(before) + int(batch.lengths.max()), "prompt and question")
        prefix = self._prefix(prompt, before) if self.reuse and before else None
        found = torch.empty(len(questions), len(ids), dtype=torch.float64)
        for part in by_length(batch.lengths, len(before), self._tokens):
            rows = batch.take(part)
            repeated = language.embed(before).expand(len(part), -1, -1) if before and prefix is None else None
            padded = pad(language, rows.ids, rows.lengths, repeated)
            places = (padded.begins + rows.lengths - 1).to(language.device)
            logits = language.read(padded.vectors, padded.mask, places[:, None], prefix).logits
            assert logits is not None
            found[part] = logits[:, 0].double().log_softmax(dim=1)[:, ids].cpu()
        return found.numpy()

    def _prefix(self, prompt: str, ids: list[int]) -> Prefix:
        if prompt in self._kept:
            self._kept.move_to_end(prompt)
            return self._kept[prompt]
        made = self.language.prefix(self.language.embed(ids))
        self._kept[prompt] = made
        while self._kept and sum(one.size for one in self._kept.values()) > self._keep:
            self._kept.popitem(last=False)
        return made
