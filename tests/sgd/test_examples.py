"""The examples run as they stand."""

import runpy
import sys
from pathlib import Path

import numpy as np

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_digits():
    assert runpy.run_path(str(EXAMPLES / "sgd_digits.py"))["main"]() > 0.75


def test_mnist_reads_the_published_format(tmp_path, monkeypatch, capsys):
    """On a handful of made-up images: the format, the features, the training and the report."""
    random = np.random.default_rng(0)
    for part, count in (("train", 64), ("t10k", 8)):
        images, labels = random.integers(0, 256, (count, 784), np.uint8), random.integers(0, 10, count, np.uint8)
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(bytes(16) + images.tobytes())
        (tmp_path / f"{part}-labels-idx1-ubyte").write_bytes(bytes(8) + labels.tobytes())
    script = runpy.run_path(str(EXAMPLES / "sgd_mnist.py"))
    script["MODELS"]["scatter"].update(lot=32, epochs=1)
    monkeypatch.setattr(sys, "argv", ["sgd_mnist.py", "--data", str(tmp_path)])
    script["main"]()
    assert "test accuracy" in capsys.readouterr().out
