"""Data sets are read in their publishers' formats, and only the published files are."""

import hashlib
import struct

import numpy as np
import pytest

from terrine import datasets
from terrine.datasets import files, images, tables
from terrine.errors import InvalidArgument


def test_a_missing_or_changed_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("TERRINE_DATA", str(tmp_path))
    monkeypatch.setenv("TERRINE_MIRROR", "http://127.0.0.1:9")
    with pytest.raises(InvalidArgument, match="TERRINE_DATA names another folder"):
        datasets.mnist()
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte").write_bytes(b"changed")
    with pytest.raises(InvalidArgument, match="the published file"):
        datasets.mnist()


def test_idx_files_are_read(tmp_path, monkeypatch):
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    content = struct.pack(">HBB3I", 0, 8, 3, 2, 3, 3) + pixels.tobytes()
    assert (images._idx(content) == pixels).all()
    monkeypatch.setenv("TERRINE_DATA", str(tmp_path))
    (tmp_path / "x").write_bytes(content)
    assert files.read("x", hashlib.md5(content).hexdigest()) == content


def test_digits_need_no_files():
    found = datasets.digits()
    assert found.train.shape == (1437, 1, 8, 8)
    assert found.train.dtype == np.uint8


def test_an_adult_row_becomes_numbers_by_public_ranges_only():
    text = "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40,"
    row = (text + " United-States, <=50K").split(", ")
    found = tables._features(row)
    assert len(found) == len(tables._columns())
    named = dict(zip(tables._columns(), found, strict=True))
    assert named["age"] == pytest.approx((39 - 17) / 73)
    assert (named["State-gov"], named["Private"], named["Male"], named["Female"]) == (1, 0, 1, 0)
