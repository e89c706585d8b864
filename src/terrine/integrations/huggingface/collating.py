"""Texts in lots of one shape: each padded or cut to a public length, by itself.

A lot padded to its longest text tells every example of another, and a model that reads padding would mix them. So every
example is collated alone, and all must come out in one shape: that of the data, or `length`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import DataCollatorWithPadding

from terrine import check
from terrine.errors import InvalidArgument

_PADS = {"attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "labels": -100, "position_ids": 0}


@dataclass(frozen=True)
class Collating:
    """Collates examples by `collator`: without the columns that the model does not take, to a public length."""

    collator: Callable[[list[Any]], Any]
    columns: frozenset[str] | None
    length: int | None = None
    pad: int = 0

    @classmethod
    def of(cls, trainer: Any, length: int | None) -> Collating:
        """The collating of a trainer."""
        columns = _columns(trainer.model, trainer.label_names) if trainer.args.remove_unused_columns else None
        return cls(
            trainer.data_collator,
            columns,
            None if length is None else check.whole("length", length),
            _pad(trainer.model, trainer.processing_class),
        )

    def __call__(self, examples: list[Any]) -> Any:
        made = self.collator([self._prepared(example) for example in examples])
        return dict(made) if isinstance(made, Mapping) or hasattr(made, "keys") else made

    def _prepared(self, example: Any) -> Any:
        if not isinstance(example, Mapping):
            return example
        kept = {name: one for name, one in example.items() if self.columns is None or name in self.columns}
        return kept if self.length is None else _to_length(kept, self.length, self.pad)


def checked_collator(collator: Any) -> None:
    """Refuse a collator that pads a lot to its longest text, before anything is charged.

    Raises:
        InvalidArgument: it does.
    """
    if isinstance(collator, DataCollatorWithPadding) or hasattr(collator, "padding"):
        if getattr(collator, "padding", None) in ("max_length", False) and hasattr(collator, "max_length"):
            return
        raise InvalidArgument(
            f"data_collator={type(collator).__name__}: pads a lot to its longest text, which tells every example of "
            "another; want length=, to which each is padded by itself, or padding='max_length'"
        )


def _to_length(example: Mapping[str, Any], length: int, pad: int) -> dict[str, Any]:
    if "input_ids" not in example:
        raise InvalidArgument(f"length: an example of {', '.join(example)}; want input_ids among them")
    size, found = len(example["input_ids"]), dict(example)
    found.setdefault("attention_mask", [1] * size)
    for name, one in found.items():
        if (
            not isinstance(one, Sequence | Tensor)
            or isinstance(one, str)
            or (isinstance(one, Tensor) and not one.dim())
        ):
            continue
        if name not in _PADS and name != "input_ids":
            raise InvalidArgument(f"length: nobody knows how to pad {name}; want data of one length, and no length=")
        row = list(one.tolist() if isinstance(one, Tensor) else one)[:length]
        found[name] = row + [_PADS.get(name, pad)] * (length - len(row))
    return found


def _pad(model: Any, tokenizer: Any) -> int:
    config = getattr(model, "config", None)
    for holder in (tokenizer, config):
        if isinstance(found := getattr(holder, "pad_token_id", None), int):
            return found
    return 0  # which no model sees behind the attention mask


def _columns(model: Any, labels: Sequence[str]) -> frozenset[str]:
    inner = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    return frozenset(inspect.signature(inner.forward).parameters) | {"label", "label_ids", *labels}
