"""Texts as padded tokens, read a few at a time: alike in length, and no more than memory holds.

A lot is cut into parts of texts of about the same length, longest last. How the lot is cut depends on the private
texts, but no sum does: each example's gradient is its own, whatever part it comes in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from terrine.errors import InvalidArgument
from terrine.prompts.language import LanguageModel
from terrine.prompts.template import Template


class Encoded(NamedTuple):
    """Texts as tensors, one row each, padded on the right.

    `targets` are classes; where answers are free text, how many tokens of the question come before the answer.
    """

    ids: Tensor
    lengths: Tensor
    targets: Tensor

    def take(self, rows: Tensor) -> Encoded:
        """Some of the rows, without padding that none of them needs."""
        lengths = self.lengths[rows]
        return Encoded(self.ids[rows][:, : int(lengths.max())], lengths, self.targets[rows])


class Padded(NamedTuple):
    """What the model reads: vectors and their mask, and the column at which each row's text begins."""

    vectors: Tensor
    mask: Tensor
    begins: Tensor


def encode(
    language: LanguageModel, template: Template, texts: Sequence[str], targets: Sequence[int] | Sequence[str]
) -> Encoded:
    """Questions with their classes, or, for a template without words, with the answers they are to get."""
    if len(texts) != len(targets):
        raise InvalidArgument(f"{len(texts)} texts with {len(targets)} labels: want one for each")
    rows = [question_ids(language, template, text) for text in texts]
    if template.words:
        wrong = [one for one in targets if not (isinstance(one, int) and 0 <= one < template.classes)]
        if wrong:
            raise InvalidArgument(f"label {wrong[0]!r}: want a class number 0 .. {template.classes - 1}")
        numbers = [int(one) for one in targets]
    else:
        numbers = [len(row) for row in rows]
        rows = [row + language.tokens(str(answer)) for row, answer in zip(rows, targets, strict=True)]
        if any(len(row) == number for row, number in zip(rows, numbers, strict=True)):
            raise InvalidArgument("an answer has no tokens: want at least one for each text")
    return pack(language, rows, numbers)


def pack(language: LanguageModel, rows: Sequence[list[int]], targets: Sequence[int]) -> Encoded:
    """Token lists as one tensor."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
    if not len(rows) or int(lengths.min()) == 0:
        raise InvalidArgument("a text without tokens: want texts and a template that give at least one")
    ids = torch.full((len(rows), int(lengths.max())), language.tokenizer.pad_token_id, dtype=torch.long)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = torch.tensor(row)
    return Encoded(ids, lengths, torch.tensor(targets, dtype=torch.long))


def question_ids(language: LanguageModel, template: Template, text: str) -> list[int]:
    """The tokens of one question, with what an encoder puts at the end."""
    asked = template.question(text)
    if "{mask}" not in template.text:
        if not language.causal:
            raise InvalidArgument(f"template {template.text!r} for an encoder: want {{mask}} where it is to fill in")
        return language.tokens(asked)
    if language.causal or language.tokenizer.mask_token is None:
        raise InvalidArgument(f"template {template.text!r}: {{mask}} is for encoders; a causal model reads to the end")
    before, after = template.text.split("{mask}")
    parts = [part.replace("{text}", text) for part in (before, after)]
    return [*language.tokens(parts[0]), language.tokenizer.mask_token_id, *language.tokens(parts[1]), *language.end]


def pad(language: LanguageModel, ids: Tensor, lengths: Tensor, before: Tensor | None) -> Padded:
    """The rows' vectors behind `before` (rows, tokens, width), padded on the right."""
    count, longest = ids.shape
    mask = (torch.arange(longest)[None, :] < lengths[:, None]).to(language.device).long()
    vectors, begins = language.embed(ids), torch.zeros_like(lengths)
    if before is None:
        return Padded(vectors, mask, begins)
    vectors = torch.cat([before.to(vectors.dtype), vectors], dim=1)
    return Padded(vectors, torch.cat([mask.new_ones(count, before.shape[1]), mask], dim=1), begins + before.shape[1])


def by_length(lengths: Tensor, before: int, tokens: int) -> list[Tensor]:
    """Rows in groups of about one length, each at most `tokens` with padding and what comes before; at least a row."""
    order = torch.argsort(lengths, stable=True)
    groups: list[Tensor] = []
    start = 0
    for stop in range(1, len(order) + 1):
        following = int(lengths[order[stop]]) + before if stop < len(order) else 0
        if stop == len(order) or following * (stop + 1 - start) > tokens:
            groups.append(order[start:stop])
            start = stop
    return groups


def tokens_in_memory(language: LanguageModel, memory: int) -> int:
    """How many tokens a forward and backward pass through the frozen model can take in `memory` bytes, about.

    A layer keeps some nine vectors of its width and three of its inner width for a token: measured on a Llama.
    """
    config = language.model.config
    layers: int = getattr(config, "num_hidden_layers", None) or 12
    inner: int = getattr(config, "intermediate_size", None) or 4 * language.width
    kept = layers * (9 * language.width + 3 * inner) * language.table.element_size()
    return max(1, memory // max(kept, 1))
