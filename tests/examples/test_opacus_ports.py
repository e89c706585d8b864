"""Opacus' five tutorials in Terrine: each trains at small size and learns, and reads the files it says it reads."""

import ast
import importlib.util
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "opacus"
LEAST = {"mnist": 0.5, "cifar10": 0.4, "char_lstm": 0.7, "bert": 0.7, "lora": 0.7}  # chance: 0.1, 0.1, 0.33, 0.33, 0.33


@pytest.fixture
def load(monkeypatch):
    """A function that imports one of the examples."""
    monkeypatch.syspath_prepend(str(FOLDER))  # lora.py imports bert.py

    def load_example(name):
        if name in ("bert", "lora"):
            pytest.importorskip("transformers")
        if name == "lora":
            pytest.importorskip("peft")
        spec = importlib.util.spec_from_file_location(f"opacus_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load_example


@pytest.mark.parametrize("name", LEAST)
def test_a_port_learns_at_small_size(name, load, capsys):
    torch.manual_seed(0)
    assert load(name).main(["--small"]) > LEAST[name]
    assert "epsilon" in capsys.readouterr().out


def count_statements(name):
    """The statements of an example's training part: without docstrings, what is printed, and the plan's return."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))
    count = 0
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name in ("train", "compute_loss"):
            stack = function.body[1:]
            while stack:
                statement = stack.pop()
                is_result = isinstance(statement, ast.Return) and function.name == "train"
                if not isinstance(statement, ast.If) and not is_result:
                    count += 1
                    stack += getattr(statement, "body", [])
    return count


def test_the_page_counts_the_statements_that_are_there():
    page = (FOLDER.parents[1] / "docs" / "from-opacus.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| [^|]* \| `(\w+)\.py` \| \d+ \| (\d+) \|", page, re.MULTILINE)
    counted = {name: count_statements("bert" if name == "lora" else name) for name in LEAST}
    assert {name: int(count) for name, count in table} == counted  # lora.py trains by bert.py


def test_mnist_reads_the_published_files(load, tmp_path):
    images, labels = np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8), np.array([7, 3], np.uint8)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(struct.pack(">4I", 2051, 2, 28, 28) + images.tobytes())
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 2049, 2) + labels.tobytes())
    x, y = load("mnist").read_mnist(tmp_path, "train")
    assert x.shape == (2, 1, 28, 28)
    assert x[0, 0, 0, 1] == pytest.approx((1 / 255 - 0.1307) / 0.3081)
    assert y.tolist() == [7, 3]


def test_cifar10_reads_the_binary_version(load, tmp_path):
    records = np.zeros((3, 3073), np.uint8)
    records[:, 0], records[1, 1] = [9, 1, 4], 255  # the red of the second picture's first pixel
    (tmp_path / "data_batch_1.bin").write_bytes(records.tobytes())
    x, y = load("cifar10").read_cifar10([tmp_path / "data_batch_1.bin"])
    assert x.shape == (3, 3, 32, 32)
    assert x[1, 0, 0, 0] == pytest.approx((1 - 0.4914) / 0.2023)
    assert y.tolist() == [9, 1, 4]


def test_names_are_padded_to_a_public_length(load, tmp_path):
    (tmp_path / "Czech.txt").write_text("Novák\nDvořák\n", encoding="utf-8")
    (tmp_path / "Long.txt").write_text("A" * 40 + "\nBo\n" * 2, encoding="utf-8")
    example = load("char_lstm")
    training, test = example.split_names(example.read_names(tmp_path))
    assert len(training[0]) + len(test[0]) == 5  # an empty line is no name
    assert training[0].shape[1] == test[0].shape[1] == 15


def test_snli_keeps_pairs_whose_label_is_agreed_on(load, tmp_path):
    rows = ["gold_label\tsentence1\tsentence2", 'entailment\tA "man\tA man', "-\tx\ty", "neutral\tp\tq"]
    (tmp_path / "snli.txt").write_text("\n".join(rows), encoding="utf-8")
    asked = []

    def tokenize(first, second, **options):
        asked.append((first, second, options["padding"], options["max_length"]))
        return {name: torch.zeros(len(first), 128) for name in ("input_ids", "attention_mask", "token_type_ids")}

    *_, labels = load("bert").read_snli(tmp_path / "snli.txt", tokenize)
    assert asked == [(['A "man', "p"], ["A man", "q"], "max_length", 128)]
    assert labels.tolist() == [1, 2]
