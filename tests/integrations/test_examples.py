"""The examples run as they stand, and are short."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lora_with_transformers(capsys):
    pytest.importorskip("transformers")
    before, after = runpy.run_path(str(EXAMPLES / "huggingface_lora.py"))["main"]()
    assert after < before - 1
    assert "epsilon 8.00 at delta 0.0001" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_digits_with_lightning(capsys):
    pytest.importorskip("lightning")
    assert runpy.run_path(str(EXAMPLES / "lightning_digits.py"))["main"]() > 0.75
    assert "epsilon 3.00" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["huggingface_lora.py", "lightning_digits.py"])
def test_an_example_is_under_80_lines(name):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 80
