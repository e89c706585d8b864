"""A soft prompt: trained vectors before the text of a frozen model, and, if wanted, a small trained output layer.

    scores = logits of the label words + bias          or          weight . (hidden - centre) / scale + bias

Its parameters are given to `scores` one copy for each row, so that the gradient of the summed loss with respect to the
copies is the gradient of every example by itself. Where the output layer is trained it starts as the label words' rows.
Most of what enters it is the same for every text (of SmolLM2's norm of 44, all but 8): such a part says nothing, but
clipping would spend the bound on it. `centre` takes it out and `scale` brings the rest to norm 4, both measured on
public inputs, so that the gradients are about as long as those of the vectors and one clipping bound serves both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from terrine import check
from terrine.errors import InvalidArgument
from terrine.prompts import storage
from terrine.prompts.batches import Encoded, by_length, encode, pack, pad, question_ids, tokens_in_memory
from terrine.prompts.language import LanguageModel, Prefix, Reading
from terrine.prompts.template import Template, word_ids

CONTENT_FREE = ("N/A", "[MASK]", "...")
"""Inputs that say nothing: what a model answers to them is its prejudice [ZWF21]."""

_HIDDEN_NORM = 4.0
_EVALUATION_MEMORY = 1 << 30


class SoftPrompt(nn.Module):
    """`tokens` (count, width) before the text; `privacy` is the record of what it learned from, None if nothing.

    Raises:
        InvalidArgument: the vectors are not a table.
    """

    def __init__(
        self,
        tokens: Tensor,
        template: Template,
        *,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        centre: Tensor | None = None,
        scale: float = 1.0,
        privacy: Mapping[str, Any] | None = None,
        model: str = "",
    ) -> None:
        super().__init__()
        if tokens.dim() != 2 or not len(tokens):
            raise InvalidArgument(f"prompt vectors of shape {tuple(tokens.shape)}: want (tokens, width)")
        self.template, self.model_name, self.scale = template, model, float(scale)
        self.privacy = None if privacy is None else dict(privacy)
        self.tokens = nn.Parameter(_wide(tokens))
        self.bias: Tensor
        start = torch.zeros(template.classes) if bias is None else _wide(bias)
        self.weight = None if weight is None else nn.Parameter(_wide(weight))
        self.centre: Tensor
        if weight is None:
            self.register_buffer("bias", start)
        else:
            self.bias = nn.Parameter(start)
            self.register_buffer("centre", torch.zeros(tokens.shape[1]) if centre is None else _wide(centre))

    @classmethod
    def from_text(
        cls,
        language: LanguageModel,
        template: Template,
        text: str,
        *,
        count: int | None = None,
        head: bool = False,
        public: Sequence[str] = CONTENT_FREE,
        calibrated: bool = False,
    ) -> SoftPrompt:
        """Start as a text's own tokens, repeated or cut to `count`: training begins at what the text achieves.

        `head` trains an output layer as well, centred on `public` inputs: a few, without labels, the more like the
        private texts the better. `calibrated` starts with the bias that makes content-free inputs even.
        """
        found = language.tokens(text)
        if not found:
            raise InvalidArgument("text='': want some words to start from, or SoftPrompt.from_vocabulary")
        wanted = len(found) if count is None else check.whole("count", count)
        ids = [found[place % len(found)] for place in range(wanted)]
        return cls._started(language, template, language.embed(ids), head, public, calibrated)

    @classmethod
    def from_vocabulary(
        cls,
        language: LanguageModel,
        template: Template,
        count: int,
        *,
        seed: int = 0,
        head: bool = False,
        public: Sequence[str] = CONTENT_FREE,
        calibrated: bool = False,
    ) -> SoftPrompt:
        """Start as tokens drawn from the vocabulary by a public seed."""
        drawn = np.random.default_rng(seed).integers(0, len(language.table), check.whole("count", count))
        return cls._started(language, template, language.embed(drawn.tolist()), head, public, calibrated)

    @classmethod
    def _started(
        cls,
        language: LanguageModel,
        template: Template,
        tokens: Tensor,
        head: bool,
        public: Sequence[str],
        calibrated: bool,
    ) -> SoftPrompt:
        started = cls(tokens, template, model=language.name)
        if head:
            weight, bias = _output_rows(language, template)
            centre, scale = _middle(started._hidden(language, public))
            shift = weight.to(centre) @ centre
            started = cls(
                tokens, template, weight=weight * scale, bias=bias + shift.to(bias), centre=centre, scale=scale,
                model=language.name,
            )  # fmt: skip
        if calibrated:
            started.calibrate(language)
        return started

    @property
    def count(self) -> int:
        """How many virtual tokens there are."""
        return len(self.tokens)

    def calibrate(self, language: LanguageModel, inputs: Sequence[str] = CONTENT_FREE) -> None:
        """Move the bias so that public `inputs` which say nothing get even scores [ZWF21]."""
        with torch.no_grad():
            moved = torch.from_numpy(self.log_probabilities(language, inputs)).mean(dim=0)
            self.bias.sub_(moved.to(self.bias))

    def encoded(self, language: LanguageModel, texts: Sequence[str], targets: Sequence[int] | Sequence[str]) -> Encoded:
        """Examples ready for `losses`, checked to fit the model with the prompt before them."""
        found = encode(language, self.template, texts, targets)
        language.check_fits(self.before(language) + int(found.lengths.max()), "prompt and text")
        return found

    def before(self, language: LanguageModel) -> int:
        """How many tokens come before the text."""
        return len(language.beginning) + self.count

    def losses(self, language: LanguageModel, batch: Encoded, values: Mapping[str, Tensor] | None = None) -> Tensor:
        """The loss of every example; `values` hold each parameter once for every row."""
        given = self.copies(len(batch.ids)) if values is None else values
        if self.template.words:
            return functional.cross_entropy(
                self._scores(language, batch, given), batch.targets.to(language.device), reduction="none"
            )
        return self._answer_losses(language, batch, given)

    def copies(self, rows: int) -> dict[str, Tensor]:
        """Each parameter once for every row."""
        return {name: one.expand(rows, *one.shape) for name, one in self.named_parameters()}

    @torch.no_grad()
    def log_probabilities(
        self, language: LanguageModel, texts: Sequence[str], progress: Callable[[int, int], None] | None = None
    ) -> NDArray[np.float64]:
        """Log-probabilities of the classes for each text (texts, classes)."""
        self._check_words()
        rows = [question_ids(language, self.template, text) for text in texts]
        batch = pack(language, rows, [0] * len(rows))
        language.check_fits(self.before(language) + int(batch.lengths.max()), "prompt and text")
        prefix = language.prefix(self._beginning(language, self.tokens[None])[0]) if language.causal else None
        found, done = torch.empty(len(rows), self.template.classes, dtype=torch.float64), 0
        at_once = 4 * tokens_in_memory(language, _EVALUATION_MEMORY)  # nothing is kept for a backward pass
        for part in by_length(batch.lengths, self.before(language), at_once):
            scores = self._scores(language, batch.take(part), self.copies(len(part)), prefix)
            found[part] = scores.double().log_softmax(dim=1).cpu()
            done += len(part)
            if progress is not None:
                progress(done, len(rows))
        return found.numpy()

    def predict(self, language: LanguageModel, texts: Sequence[str]) -> NDArray[np.int64]:
        """The class of each text."""
        found: NDArray[np.int64] = self.log_probabilities(language, texts).argmax(axis=1)
        return found

    @torch.no_grad()
    def answer(self, language: LanguageModel, texts: Sequence[str], *, most: int = 32) -> list[str]:
        """The likeliest free answer to each text, token after token, at most `most` of them."""
        if not language.causal:
            raise InvalidArgument("an encoder does not write: want a causal language model for free answers")
        before, found = self._beginning(language, self.tokens[None])[0], []
        for text in texts:
            asked = language.embed(question_ids(language, self.template, text))
            vectors = torch.cat([before.to(asked.dtype), asked])[None]
            language.check_fits(vectors.shape[1] + check.whole("most", most), "prompt, text and answer")
            written = language.model.generate(
                inputs_embeds=vectors, attention_mask=vectors.new_ones(vectors.shape[:2], dtype=torch.long),
                max_new_tokens=most, do_sample=False, pad_token_id=language.tokenizer.pad_token_id,
            )  # fmt: skip
            found.append(str(language.tokenizer.decode(written[0], skip_special_tokens=True)))
        return found

    def save(self, path: str | Path) -> None:
        """One small safetensors file: the vectors, the template and the privacy record."""
        storage.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> SoftPrompt:
        """Read what `save` wrote.

        Raises:
            InvalidArgument: it is another file.
        """
        return cls(**storage.load(Path(path)))

    def as_peft(self, folder: str | Path) -> Path:
        """Write a folder that `peft.PeftModel.from_pretrained(model, folder)` reads, with the privacy record in it."""
        return storage.as_peft(self, Path(folder))

    def _scores(
        self, language: LanguageModel, batch: Encoded, values: Mapping[str, Tensor], prefix: Prefix | None = None
    ) -> Tensor:
        reading = self._read(language, batch, values, prefix)
        if self.weight is not None:
            hidden = (reading.hidden[:, 0].to(self.weight.dtype) - self.centre) / self.scale
            return torch.einsum("bw,bcw->bc", hidden, values["weight"]) + values["bias"]
        scores: Tensor = _words_of(reading, word_ids(language, self.template.words)) + self.bias
        return scores

    def _read(
        self, language: LanguageModel, batch: Encoded, values: Mapping[str, Tensor], prefix: Prefix | None = None
    ) -> Reading:
        """The model at the place of each row's answer."""
        before = None if prefix is not None else self._beginning(language, values["tokens"])
        padded = pad(language, batch.ids, batch.lengths, before)
        places = (padded.begins + _answer_place(language, batch)).to(language.device)
        return language.read(padded.vectors, padded.mask, places[:, None], prefix)

    @torch.no_grad()
    def _hidden(self, language: LanguageModel, texts: Sequence[str]) -> Tensor:
        """What enters the output layer at each text's answer (texts, width)."""
        rows = [question_ids(language, self.template, text) for text in texts]
        batch = pack(language, rows, [0] * len(rows))
        language.check_fits(self.before(language) + int(batch.lengths.max()), "prompt and text")
        found = torch.empty(len(rows), language.width, device=language.device)
        for part in by_length(batch.lengths, self.before(language), 4 * tokens_in_memory(language, _EVALUATION_MEMORY)):
            found[part] = self._read(language, batch.take(part), self.copies(len(part))).hidden[:, 0].float()
        return found

    def _answer_losses(self, language: LanguageModel, batch: Encoded, values: Mapping[str, Tensor]) -> Tensor:
        """The mean loss of an example's answer tokens, each read at the token before it."""
        padded = pad(language, batch.ids, batch.lengths, self._beginning(language, values["tokens"]))
        most = int((batch.lengths - batch.targets).max())
        offsets = batch.targets[:, None] + torch.arange(most)[None, :]
        inside = offsets < batch.lengths[:, None]
        offsets = torch.where(inside, offsets, batch.targets[:, None])
        wanted = batch.ids.gather(1, offsets).to(language.device)
        places = (padded.begins[:, None] + offsets - 1).to(language.device)
        logits = language.read(padded.vectors, padded.mask, places).logits
        if logits is None:
            raise InvalidArgument("the model has no output layer: want a causal language model for free answers")
        losses = functional.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
        kept = inside.to(losses)
        return (losses * kept).sum(dim=1) / kept.sum(dim=1)

    def _beginning(self, language: LanguageModel, tokens: Tensor) -> Tensor:
        if tokens.shape[-1] != language.width:
            raise InvalidArgument(f"prompt of width {tokens.shape[-1]}: want {language.width}, as {language.name} has")
        if not language.beginning:
            return tokens
        first = language.embed(language.beginning).to(tokens.dtype)
        return torch.cat([first.expand(len(tokens), -1, -1), tokens], dim=1)

    def _check_words(self) -> None:
        if not self.template.words:
            raise InvalidArgument("the template has no label words: want some to tell classes apart")


def _wide(values: Tensor) -> Tensor:
    """A copy in float32, or wider: noise and small steps need the digits."""
    return values.detach().to(torch.promote_types(values.dtype, torch.float32), copy=True)


def _middle(hidden: Tensor) -> tuple[Tensor, float]:
    """The mean of some rows, and what brings their distance from it to the norm wanted."""
    centre = hidden.mean(dim=0)
    away, whole = (float(one.norm(dim=1).mean()) for one in (hidden - centre, hidden))
    apart = away if away > 1e-3 * whole else whole  # one row, or all alike: their distance says nothing
    return centre, apart / _HIDDEN_NORM if apart > 0 else 1.0


def _answer_place(language: LanguageModel, batch: Encoded) -> Tensor:
    if language.causal:
        return batch.lengths - 1
    is_mask: Tensor = batch.ids == language.tokenizer.mask_token_id
    return is_mask.long().argmax(dim=1)


def _words_of(reading: Reading, ids: list[int]) -> Tensor:
    if reading.logits is None:
        raise InvalidArgument("the model has no output layer: want one, or SoftPrompt(..., head=True)")
    found: Tensor = reading.logits[:, 0, ids]
    return found


def _output_rows(language: LanguageModel, template: Template) -> tuple[Tensor, Tensor]:
    """The output layer's rows for the label words, to start from; zeros where the model has no such layer."""
    if not template.words:
        raise InvalidArgument("head=True without label words: want a template with words for its classes")
    layer = language.model.get_output_embeddings()
    if layer is None:
        return torch.zeros(template.classes, language.width), torch.zeros(template.classes)
    ids = word_ids(language, template.words)
    bias = getattr(layer, "bias", None)
    return layer.weight[ids], torch.zeros(len(ids)) if bias is None else bias[ids]
