"""The rows of docs/architecture.md are the layers that import-linter checks, and every package has its row."""

import re
import tomllib
from pathlib import Path

import pytest

import terrine

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (\d+) \| ([^|]*) \| ", re.MULTILINE)


@pytest.fixture(scope="module")
def rows():
    """Names by row, from 0 on."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    text = text[text.index("| row | package |") :].partition("\n\n")[0]
    found: dict[int, set[str]] = {}
    for number, names in ROW.findall(text):
        found.setdefault(int(number), set()).update(
            name.removesuffix("/").removesuffix(".py") for name in re.findall(r"`([^`]+)`", names)
        )
    return [found[number] for number in sorted(found)]


def test_rows_are_the_layers(rows):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    assert rows == [set(re.findall(r"terrine\.(\w+)", layer)) for layer in reversed(layers)]


def test_every_package_has_a_row(rows):
    source = ROOT / "src" / "terrine"
    modules = {path.stem for path in source.glob("*.py")} | {path.parent.name for path in source.glob("*/__init__.py")}
    assert set().union(*rows) == modules - {"__init__", "__main__"}


def test_every_public_package_is_in_the_api_reference():
    shown = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    wanted = set(terrine.__all__) - {"__version__"}
    assert {name for name in wanted if not re.search(rf"^::: terrine\.{name}\b", shown, re.MULTILINE)} == set()
