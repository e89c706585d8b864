"""Image sets: MNIST and Fashion-MNIST (IDX files), CIFAR-10 (binary records), scikit-learn's digits."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from terrine.datasets.files import read
from terrine.errors import InvalidArgument, MissingExtra

_IDX = {
    "mnist": (
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
    "fashion-mnist": (
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
}
_IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
_CIFAR = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels (examples, channels, height, width) as bytes, and labels 0 .. 9, for training and for testing."""

    train: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test: NDArray[np.uint8]
    test_labels: NDArray[np.int64]


def mnist() -> Images:
    """MNIST: 60,000 and 10,000 handwritten digits of 28 x 28 pixels, from `mnist/` in the data folder."""
    return _idx_set("mnist")


def fashion_mnist() -> Images:
    """Fashion-MNIST: 60,000 and 10,000 pieces of clothing of 28 x 28 pixels, from `fashion-mnist/`."""
    return _idx_set("fashion-mnist")


def cifar10() -> Images:
    """CIFAR-10: 50,000 and 10,000 colour images of 32 x 32 pixels, from `cifar-10/`."""
    pixels, labels = [], []
    for name, md5 in _CIFAR.items():
        records = np.frombuffer(read(f"cifar-10/{name}", md5), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        labels.append(records[:, 0].astype(np.int64))
        pixels.append(records[:, 1:].reshape(-1, 3, 32, 32))
    return Images(np.concatenate(pixels[:5]), np.concatenate(labels[:5]), pixels[5], labels[5])


def digits(test: int = 360) -> Images:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, the last `test` of them for testing; needs no files."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("scikit-learn", extra="pate") from None
    loaded = load_digits()
    pixels = (loaded.images * 15.9375).astype(np.uint8)[:, None]
    labels = loaded.target.astype(np.int64)
    return Images(pixels[:-test], labels[:-test], pixels[-test:], labels[-test:])


def _idx_set(name: str) -> Images:
    parts = [_idx(read(f"{name}/{file}", md5)) for file, md5 in zip(_IDX_NAMES, _IDX[name], strict=True)]
    return Images(parts[0][:, None], parts[1].astype(np.int64), parts[2][:, None], parts[3].astype(np.int64))


def _idx(content: bytes) -> NDArray[np.uint8]:
    zero, kind, axes = struct.unpack(">HBB", content[:4])
    if zero or kind != 8:
        raise InvalidArgument("not an IDX file of bytes: want the published file")
    shape = struct.unpack(f">{axes}I", content[4 : 4 + 4 * axes])
    return np.frombuffer(content, np.uint8, offset=4 + 4 * axes).reshape(shape)
