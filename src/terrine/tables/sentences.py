"""A local sentence encoder: a folder of the transformers library, read offline, its last layer's mean over the words.

A text's vector depends on that text alone, and is scaled to length 1. The encoder is public: it was trained on other
data, and its SHA-256 hash is in the schema, so that predictions are made with the same one.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine.errors import InvalidArgument, MissingExtra

_MOST_WORDS = 256
_HASHED = ("*.json", "*.txt", "*.safetensors", "*.model")


@dataclass(frozen=True, eq=False)
class Encoder:
    """A loaded encoder."""

    name: str
    sha256: str
    dimensions: int
    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)

    def vectors(self, texts: list[str]) -> NDArray[np.float32]:
        """The vector of each text, (texts, dimensions)."""
        made = [self._vector(text) for text in texts]
        return np.stack(made) if made else np.zeros((0, self.dimensions), dtype=np.float32)

    def _vector(self, text: str) -> NDArray[np.float32]:
        """One text alone: beside others, it would be padded and rounded differently."""
        import torch

        tokens = self.tokenizer(text or " ", truncation=True, max_length=_MOST_WORDS, return_tensors="pt")
        if not tokens["input_ids"].shape[1]:
            return np.zeros(self.dimensions, dtype=np.float32)
        with torch.no_grad():
            last = self.model(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"]).last_hidden_state
        mean = last[0].float().mean(dim=0)
        found: NDArray[np.float32] = torch.nn.functional.normalize(mean, dim=0).nan_to_num(0.0).numpy()
        return found


def load(folder: str | Path) -> Encoder:
    """The encoder in a folder; nothing is fetched.

    Raises:
        InvalidArgument: it is no folder of an encoder with weights in the safetensors format.
        MissingExtra: transformers is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise MissingExtra("transformers", extra="llm") from None
    path = Path(folder)
    if not (path / "config.json").is_file() or not list(path.glob("*.safetensors")):
        raise InvalidArgument(f"{path}: want a folder with config.json, a tokenizer and weights in *.safetensors")
    noise = transformers.utils.logging
    noise.set_verbosity_error()
    with contextlib.suppress(AttributeError):
        noise.disable_progress_bar()
    try:
        offline: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **offline)
        model = transformers.AutoModel.from_pretrained(path, use_safetensors=True, **offline).eval()
    except Exception as error:  # the library raises what it likes
        reason = (str(error).splitlines() or ["unknown"])[0][:200]
        raise InvalidArgument(f"{path}: no sentence encoder that transformers can read ({reason})") from None
    return Encoder(path.resolve().name, _hash(path), int(model.config.hidden_size), model, tokenizer)


def _hash(path: Path) -> str:
    """A SHA-256 hash of the configuration, the tokenizer and the weights."""
    whole = hashlib.sha256()
    for file in sorted({one for pattern in _HASHED for one in path.glob(pattern)}):
        whole.update(file.name.encode() + b"\0")
        with file.open("rb") as opened:
            whole.update(hashlib.file_digest(opened, "sha256").digest())
    return whole.hexdigest()
