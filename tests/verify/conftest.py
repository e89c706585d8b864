"""A finished run whose parts can be edited: trained once, copied for every test."""

import shutil

import pytest

from terrine import pipeline
from tests.pipeline.conftest import SCHEMA, write_table


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Two finished runs of one command, and a third by PATE's cousin settings: other epsilon."""
    place = tmp_path_factory.mktemp("releases")
    (place / "people.schema.toml").write_text(SCHEMA)
    table = write_table(place / "people.csv")
    for name, epsilon in (("one", 2.0), ("two", 2.0), ("dear", 8.0)):
        settings = pipeline.Settings(
            epsilon=epsilon, table=str(table), label="ill", epochs=3, lot=100, accuracy_within=25
        )
        pipeline.train(settings, place / name)
    return place


@pytest.fixture
def release(trained, tmp_path):
    """What is handed on of a run."""
    target = tmp_path / "release"
    target.mkdir()
    for path in (trained / "one").iterdir():
        if path.is_file() and path.name != "report.html":
            shutil.copy(path, target / path.name)
    return target
