"""A finished run's model, read back: `load("run").predict(rows)`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import nn

from terrine import tables, verify
from terrine.common.targets import TargetBounds
from terrine.errors import InvalidArgument
from terrine.pipeline import whitened
from terrine.pipeline.folder import MODEL, PRIVACY, WEIGHTS, Folder
from terrine.pipeline.models import Architecture


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained model: inputs in, classes or their probabilities out. Predicting costs no privacy."""

    architecture: Architecture
    module: nn.Module
    classes: tuple[str, ...]
    schema: tables.Schema | None
    privacy: dict[str, Any]
    target: TargetBounds | None = None
    """The bounds of the number that is predicted; None where classes are."""

    @property
    def epsilon(self) -> float:
        """The certified epsilon that the model cost."""
        return float(self.privacy["epsilon"])

    def probabilities(self, inputs: Any, encoder: tables.Encoder | None = None) -> NDArray[np.float64]:
        """(rows, classes), from a table source, a `pyarrow.Table` or an array shaped as the training inputs were.

        `encoder` is the sentence encoder that the schema names, where it names one.
        """
        if self.target is not None:
            raise InvalidArgument("the model predicts a number, which has no classes: want predict")
        array = self._array(inputs, encoder)
        features = self.architecture.features(array)
        with torch.no_grad():
            parts = [self.module(part).double().softmax(dim=1) for part in torch.split(features, 1000)]
        found: NDArray[np.float64] = torch.cat(parts).numpy()
        return found

    def numbers(self, inputs: Any, encoder: tables.Encoder | None = None) -> NDArray[np.float64]:
        """The number that is predicted for each row, within its bounds."""
        if self.target is None:
            raise InvalidArgument("the model predicts classes, not numbers: want predict or probabilities")
        features = self.architecture.features(self._array(inputs, encoder))
        with torch.no_grad():
            parts = [self.module(part).double()[:, 0] for part in torch.split(features, 1000)]
        return self.target.unscaled(torch.cat(parts).numpy())

    def predict(self, inputs: Any, encoder: tables.Encoder | None = None) -> NDArray[Any]:
        """The likeliest class of each row, by name; or the number that is predicted for it."""
        if self.target is not None:
            return self.numbers(inputs, encoder)
        return np.asarray(np.array(self.classes)[self.probabilities(inputs, encoder).argmax(axis=1)])

    def accuracy(self, inputs: Any, labels: NDArray[np.int64]) -> float:
        """The share of rows whose likeliest class is theirs. Of private rows, this number is not paid for."""
        return float((self.probabilities(inputs).argmax(axis=1) == labels).mean())

    def _array(self, inputs: Any, encoder: tables.Encoder | None = None) -> NDArray[Any]:
        if hasattr(inputs, "column_names"):
            if self.schema is None:
                raise InvalidArgument("a table, but the model was trained on arrays: want inputs of the same kind")
            return self.schema.encode(inputs, encoder=encoder)
        array = np.asarray(inputs)
        if array.shape[1:] != self.architecture.shape:
            raise InvalidArgument(f"inputs of shape {array.shape}: want (rows, {_shown(self.architecture.shape)})")
        return array


def save(folder: Folder, architecture: Architecture, module: nn.Module, classes: tuple[str, ...], schema: Any) -> None:
    """Write the weights, the whitening with them, and how to build and feed the model."""
    whitened.save(folder, WEIGHTS, module.state_dict(), architecture.whitening)
    record = {
        "model": architecture.name,
        "shape": list(architecture.shape),
        "whitened": architecture.whitened,
        "length": architecture.length,
        "classes": list(classes),
        "schema": None if schema is None else schema.as_dict(),
    }
    folder.write(MODEL, record)


def load(path: str | Path) -> Trained:
    """The model of a finished run, whose folder is verified first.

    Raises:
        InvalidArgument: not the folder of a finished run, a damaged one, or one that lies.
    """
    folder = Folder(path)
    verify.refuse_lies(path)
    record, privacy = folder.read(MODEL), folder.read(PRIVACY)
    try:
        classes = tuple(record["classes"])
        weights, whitening = whitened.read(folder.path / WEIGHTS)
        is_whitened = record.get("whitened", False)
        if is_whitened != (whitening is not None):
            raise KeyError("whitening")
        architecture = Architecture(
            record["model"], tuple(record["shape"]), len(classes), is_whitened, whitening, record.get("length")
        )
        schema = None if record["schema"] is None else tables.Schema.from_dict(record["schema"], source=str(path))
        module = architecture.build()
        module.load_state_dict(weights)
    except (KeyError, TypeError, RuntimeError, OSError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidArgument(f"{path}: the model cannot be read ({reason}); the folder is damaged") from None
    number = None if schema is None or schema.target is None else schema.target
    target = None if number is None else TargetBounds(number.low, number.high)
    return Trained(architecture, module.eval(), classes, schema, privacy, target)


def _shown(shape: tuple[int, ...]) -> str:
    return ", ".join(str(size) for size in shape)
