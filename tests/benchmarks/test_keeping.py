"""What a benchmark measured is read back under the same settings, and measured again under others."""

import pytest

from tests.benchmarks import load

once = load("keeping").once


def test_it_is_measured_once_for_each_settings(tmp_path):
    path, asked = tmp_path / "study" / "point.json", []

    def make():
        asked.append(1)
        return {"accuracy": 0.5 + len(asked) / 10}

    first = once(path, {"clip": 1.0, "lots": (1, 2)}, make)
    assert first["accuracy"] == 0.6
    assert once(path, {"clip": 1.0, "lots": (1, 2)}, make) == first
    assert once(path, {"clip": 2.0, "lots": (1, 2)}, make)["accuracy"] == 0.7
    assert len(asked) == 2


def test_a_measurement_that_fails_leaves_what_was_kept(tmp_path):
    path = tmp_path / "point.json"
    kept = once(path, {"clip": 1.0}, lambda: {"accuracy": 0.9})
    with pytest.raises(ZeroDivisionError):
        once(path, {"clip": 2.0}, lambda: {"accuracy": 1 / 0})
    assert once(path, {"clip": 1.0}, lambda: pytest.fail("measured again")) == kept
