"""What a PATE run reads: private inputs with labels and perhaps people, public inputs, a student's probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from terrine.errors import InvalidArgument


@dataclass(frozen=True, eq=False)
class Data:
    """Inputs and, for private data, labels and perhaps people."""

    inputs: NDArray[np.float32]
    labels: NDArray[np.int64] | None = None
    groups: NDArray[Any] | None = None

    @property
    def units(self) -> int:
        """How many examples are dealt, or people where it is known whose each is."""
        return len(self.inputs) if self.groups is None else len(set(self.groups.tolist()))

    @classmethod
    def read(cls, source: str, *, public: bool = False) -> Data:
        """From an .npz file with `x` (and `y`, `groups`), or one of mnist, fashion-mnist, digits, adult.

        A named set gives its training part as private data and its test part as public inputs, without labels.
        """
        if source in ("mnist", "fashion-mnist", "digits", "adult"):
            from terrine import datasets

            loaded: Any = getattr(datasets, source.replace("-", "_"))()
            inputs = loaded.test if public else loaded.train
            scale = np.float32(255 if inputs.dtype == np.uint8 else 1)
            return cls(inputs.astype(np.float32) / scale, None if public else loaded.train_labels)
        try:
            with np.load(source, allow_pickle=False) as stored:
                arrays = {name: stored[name] for name in stored.files}
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"{source}: want an .npz file with x (and y, groups), or mnist, digits, ... ({error})"
            ) from None
        if "x" not in arrays or (not public and "y" not in arrays):
            raise InvalidArgument(f"{source} holds {sorted(arrays)}: want arrays named x{'' if public else ' and y'}")
        if not np.isfinite(arrays["x"]).all():
            raise InvalidArgument(f"{source}: x holds values that are not finite: want numbers; fill gaps first")
        labels = None if public else arrays["y"].astype(np.int64)
        return cls(arrays["x"].astype(np.float32), labels, arrays.get("groups"))


def probabilities(path: Path) -> NDArray[np.float64]:
    """A student's class probabilities, from a .npy file.

    Raises:
        InvalidArgument: the file does not hold them.
    """
    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: want a .npy file of class probabilities, one row a query ({error})") from None
    if not isinstance(found, np.ndarray):
        raise InvalidArgument(f"{path} holds several arrays: want a .npy file of class probabilities")
    return found.astype(np.float64)
