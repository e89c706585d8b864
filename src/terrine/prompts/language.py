"""A frozen language model: tokens to vectors, vectors to what it says at chosen places.

    [beginning] [prompt] [text]      a causal model is read at its last token, an encoder at its mask token

The prompt stands before the text, after whatever token the tokenizer puts first. Only the chosen places go through the
output layer. A causal model's keys and values of a prefix can be computed once and used for many texts. Padding lies
after the text, whatever side the tokenizer likes: there no causal model sees it, not even through a sliding window.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from terrine.errors import InvalidArgument, MissingExtra


class Reading(NamedTuple):
    """At the chosen places: what enters the output layer, and what leaves it (None without such a layer)."""

    hidden: Tensor
    logits: Tensor | None


@dataclass(frozen=True, eq=False)
class Prefix:
    """Keys and values of every layer for one prefix, as the model's own cache of one row; bytes held."""

    cache: Any
    length: int
    size: int


class LanguageModel:
    """A Hugging Face causal language model or encoder with its tokenizer. The model is frozen and set to evaluate.

    Raises:
        InvalidArgument: it takes no `inputs_embeds`, it is an encoder-decoder, or the tokenizer has no padding token.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        accepted = inspect.signature(model.forward).parameters
        name = type(model).__name__
        if "inputs_embeds" not in accepted:
            raise InvalidArgument(f"{name} takes no inputs_embeds: want a model that does; prompts are vectors")
        if getattr(model.config, "is_encoder_decoder", False):
            raise InvalidArgument(f"{name} is an encoder-decoder: want a causal language model or an encoder")
        if tokenizer.pad_token_id is None:
            raise InvalidArgument(
                "the tokenizer has no padding token: want one, such as tokenizer.pad_token = tokenizer.eos_token"
            )
        self.model, self.tokenizer = model.eval().requires_grad_(False), tokenizer
        self.causal: bool = bool(model.can_generate())
        self.beginning, self.end = self._specials()
        self._takes_positions = self.causal and "position_ids" in accepted

    @classmethod
    def load(cls, path: str | Path, *, dtype: torch.dtype = torch.float32) -> LanguageModel:
        """A model from a local folder, or from one GGUF file; nothing is fetched.

        Raises:
            InvalidArgument: there is no such folder or file, or transformers cannot read it.
        """
        try:
            from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer
        except ImportError:
            raise MissingExtra("transformers", extra="llm") from None
        folder, where = _found(Path(path).expanduser())
        try:
            with _Quiet():
                tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **where)
                try:
                    kind = AutoModelForMaskedLM if _is_masked(folder, where) else AutoModelForCausalLM
                    model = kind.from_pretrained(folder, local_files_only=True, dtype=dtype, **where)
                except TypeError:  # before transformers 4.56 the argument has another name
                    model = kind.from_pretrained(folder, local_files_only=True, torch_dtype=dtype, **where)
        except (OSError, ValueError, ImportError) as error:
            raise InvalidArgument(f"{path}: not a language model ({_first_line(error)}); want a local folder") from None
        return cls(model, tokenizer)

    @property
    def width(self) -> int:
        """The length of one token's vector."""
        return int(self.table.shape[1])

    @property
    def table(self) -> Tensor:
        """The token embeddings (vocabulary, width)."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def context(self) -> int | None:
        """The most tokens that the model can read; None where it does not say."""
        config = self.model.config
        told = (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions"))
        known = [int(one) for one in told if isinstance(one, int) and one > 0]
        return min(known) if known else None

    @property
    def name(self) -> str:
        """The model's kind and shape; no path of this machine."""
        config = self.model.config
        layers = getattr(config, "num_hidden_layers", "?")
        return f"{config.model_type} of {layers} layers, width {self.width}, {len(self.table)} tokens"

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, without special ones."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def embed(self, ids: Tensor | Sequence[int]) -> Tensor:
        """The vectors of tokens, as the model's own input layer gives them."""
        found: Tensor = self.model.get_input_embeddings()(torch.as_tensor(ids, dtype=torch.long, device=self.device))
        return found

    @property
    def device(self) -> torch.device:
        """Where the model lies."""
        return self.table.device

    def check_fits(self, tokens: int, what: str) -> None:
        """Refuse a sequence that is longer than the context."""
        if self.context is not None and tokens > self.context:
            raise InvalidArgument(
                f"{what} of {tokens} tokens: want at most the model's context of {self.context}; use a shorter prompt,"
                " fewer demonstrations or shorter texts"
            )

    def read(self, vectors: Tensor, mask: Tensor, places: Tensor, prefix: Prefix | None = None) -> Reading:
        """What the model says at `places` (rows, places) of `vectors` (rows, length, width)."""
        rows, before = len(vectors), 0 if prefix is None else prefix.length
        whole = torch.cat([mask.new_ones(rows, before), mask], dim=1)
        options: dict[str, Any] = {"attention_mask": whole}
        if self._takes_positions:
            options["position_ids"] = (whole.cumsum(1) - 1).clamp(min=0)[:, before:]
        if prefix is not None:
            options["past_key_values"] = _repeated(prefix, rows)
        if self.causal:
            options["use_cache"] = prefix is not None
        return self._at(places, inputs_embeds=vectors, **options)

    @torch.no_grad()
    def prefix(self, vectors: Tensor) -> Prefix:
        """Keys and values of `vectors` (length, width), for `read` to start from."""
        if not self.causal:
            raise InvalidArgument("an encoder reads both ways: its prefix cannot be computed alone")
        last = torch.tensor([[len(vectors) - 1]], device=self.device)
        kept: dict[str, Any] = {}
        self._at(last, kept, inputs_embeds=vectors[None].to(self.table.dtype), use_cache=True)
        cache = getattr(kept["output"], "past_key_values", None)
        if not hasattr(cache, "batch_repeat_interleave"):
            raise InvalidArgument(
                f"{type(self.model).__name__} keeps no keys and values: want a model with attention and a dynamic cache"
            )
        return Prefix(cache, len(vectors), _bytes(cache))

    def _at(self, places: Tensor, kept: dict[str, Any] | None = None, **options: Any) -> Reading:
        """Run the model with only `places` going through its output layer."""
        output_layer, found = self.model.get_output_embeddings(), {}

        def choose(_module: Any, args: Any) -> Any:
            found["hidden"] = _taken(args[0], places)
            return (found["hidden"], *args[1:])

        hook = None if output_layer is None else output_layer.register_forward_pre_hook(choose)
        try:
            output = self.model(**options)
        finally:
            if hook is not None:
                hook.remove()
        if kept is not None:
            kept["output"] = output
        if output_layer is None:
            return Reading(_taken(output.last_hidden_state, places), None)
        return Reading(found["hidden"], output.logits)

    def _specials(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts before and after a text; a causal model gets none after."""
        body = self.tokens("a")
        whole = list(self.tokenizer("a")["input_ids"])
        at = next((k for k in range(len(whole)) if whole[k : k + len(body)] == body), 0)
        return whole[:at], [] if self.causal else whole[at + len(body) :]


def _taken(hidden: Tensor, places: Tensor) -> Tensor:
    return hidden.gather(1, places[:, :, None].expand(-1, -1, hidden.shape[-1]))


def _bytes(cache: Any) -> int:
    if hasattr(cache, "layers"):
        held = [one for layer in cache.layers for one in (layer.keys, layer.values)]
    else:  # before transformers 4.55
        held = [*cache.key_cache, *cache.value_cache]
    return sum(one.numel() * one.element_size() for one in held if isinstance(one, Tensor))


def _repeated(prefix: Prefix, rows: int) -> Any:
    """The prefix's cache once for every row, in a copy: the model writes into it."""
    cache = copy.deepcopy(prefix.cache)
    cache.batch_repeat_interleave(rows)
    return cache


def _found(path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder to read, and what names the file in it."""
    if path.is_file() and path.suffix == ".gguf":
        return path.parent, {"gguf_file": path.name}
    if path.is_dir():
        packed = sorted(path.glob("*.gguf"))
        return path, {"gguf_file": packed[0].name} if packed and not (path / "config.json").exists() else {}
    raise InvalidArgument(f"{path}: no such model; want a local folder or .gguf file, nothing is downloaded")


def _is_masked(folder: Path, where: dict[str, Any]) -> bool:
    if where:
        return False
    from transformers import AutoConfig

    names = getattr(AutoConfig.from_pretrained(folder, local_files_only=True), "architectures", None) or [""]
    return "MaskedLM" in names[0]


class _Quiet:
    """Without the bars that transformers prints while it loads."""

    def __enter__(self) -> None:
        from transformers.utils import logging

        self._shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging

        if self._shown:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
