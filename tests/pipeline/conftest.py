"""Small private tables and a door to the command line."""

import json
from contextlib import contextmanager

import numpy as np
import pytest
from typer.testing import CliRunner

from terrine import sgd
from terrine.cli import app as command
from terrine.errors import TerrineError

SCHEMA = """
[label]
name = "ill"
classes = ["no", "yes"]
[columns.age]
kind = "number"
low = 0
high = 100
[columns.city]
kind = "category"
values = ["north", "south"]
[columns.name]
kind = "ignored"
"""


def write_table(path, rows=400, seed=0):
    generator = np.random.default_rng(seed)
    age = generator.integers(0, 100, rows)
    city = generator.choice(["north", "south", "east"], rows)
    ill = np.where(age + 15 * (city == "south") > 55, "yes", "no")
    lines = [f"p{place},{age[place]},{city[place]},{ill[place]}" for place in range(rows)]
    path.write_text("name,age,city,ill\n" + "\n".join(lines) + "\n")
    return path


@pytest.fixture
def dying_at(monkeypatch):
    """Training that is interrupted at a step, inside a `with` block."""

    @contextmanager
    def interrupted(at):
        steps, add_up = [], sgd.PrivateSteps._add_up

        def add_up_or_die(self):
            steps.append(1)
            if len(steps) == at:
                raise KeyboardInterrupt
            add_up(self)

        with monkeypatch.context() as patched:
            patched.setattr(sgd.PrivateSteps, "_add_up", add_up_or_die)
            with pytest.raises(BaseException):  # noqa: B017, PT011
                yield

    return interrupted


@pytest.fixture
def table(tmp_path):
    (tmp_path / "people.schema.toml").write_text(SCHEMA)
    return write_table(tmp_path / "people.csv")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Give a command; its result has `said`, one line on refusal, and `read()` for JSON."""
    monkeypatch.chdir(tmp_path)

    def given(*words, stdin=None):
        result = CliRunner().invoke(command.app, [str(word) for word in words], input=stdin)
        error = result.exception
        if error is not None and not isinstance(error, TerrineError | OSError | SystemExit):
            raise error
        result.said = str(error) if isinstance(error, TerrineError | OSError) else result.output
        result.read = lambda: json.loads(result.output.splitlines()[-1])
        return result

    return given
