"""A release whose manifest and card were made anew by the attacker: bounds shaved, texts that draw on the verifier."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from terrine import accounting, pipeline
from terrine.cli import app as command
from terrine.events.codec import from_json
from terrine.report import card
from terrine.verify import manifest, verify
from tests.pipeline.conftest import SCHEMA, write_table


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = tmp_path_factory.mktemp("release")
    (place / "people.schema.toml").write_text(SCHEMA)
    table = write_table(place / "people.csv")
    pipeline.train(pipeline.Settings(epsilon=2.0, table=str(table), label="ill", epochs=2, lot=100), place / "run")
    return place / "run"


@pytest.fixture
def release(trained, tmp_path):
    target = tmp_path / "release"
    target.mkdir()
    for name in (*manifest.HANDED_ON, *manifest.MAY_BE_HANDED_ON):
        shutil.copy(trained / name, target / name)
    return target


def forged(folder, privacy=None, results=None):
    """The first lie in the folder after these edits, with card and manifest to match; None where there is none."""
    records = []
    for name, change in (("privacy.json", privacy or {}), ("results.json", results or {})):
        records.append(json.loads((folder / name).read_text()) | change)
        (folder / name).write_text(json.dumps(records[-1]))
    (folder / "model_card.md").write_text(card.text(*records), encoding="utf-8")
    manifest.write(folder)
    return verify(folder).lie


@pytest.fixture
def proven(release):
    privacy = json.loads((release / "privacy.json").read_text())
    event = from_json(json.dumps(privacy["events"]))
    return accounting.bounds(event, delta=privacy["delta"], witness=True)


def test_the_untouched_release_made_anew_verifies(release):
    assert forged(release) is None


def test_an_epsilon_a_millionth_below_the_proven_one_is_found(release, proven):
    for epsilon in (proven.lower * (1 - 1e-12), proven.upper * (1 - 9.9e-7)):
        said = {"lower": 0.0, "upper": epsilon}
        if epsilon < proven.lower:
            assert forged(release, {"epsilon": epsilon, "epsilon_certified": said}).name == "claim"


def test_an_enclosure_that_ends_below_the_proven_one_is_found(release, proven):
    for upper in (proven.lower * (1 - 1e-9), proven.lower * (1 - 2e-4)):
        assert forged(release, {"epsilon_certified": {"lower": 0.0, "upper": upper}}).name == "claim"


def test_an_enclosure_tighter_than_what_is_proven_is_found(release, proven):
    epsilon = json.loads((release / "privacy.json").read_text())["epsilon"]
    wide = {"lower": proven.lower * 1.01, "upper": epsilon}
    assert forged(release, {"epsilon_certified": wide | {"lower": True}}).name == "claim"
    assert forged(release, {"epsilon_certified": {"lower": "0", "upper": epsilon}}).name == "claim"
    assert forged(release, {"epsilon_certified": wide}).name == "claim"


def test_an_older_releases_wider_bounds_still_verify(release, proven):
    wider = proven.upper * 1.0005
    said = {"lower": proven.lower * 0.9, "upper": wider}
    lie = forged(release, {"epsilon": wider, "epsilon_certified": said})
    assert lie is None or lie.name == "asked"  # more than was asked for


@pytest.mark.parametrize("method", ["PATE", "DP-SGD"])
def test_another_methods_name_hides_no_weak_guarantee(release, method):
    privacy = json.loads((release / "privacy.json").read_text())
    event = from_json(json.dumps(privacy["events"]))
    found = accounting.bounds(event, delta=0.01)
    weak = {
        "method": method,
        "delta": 0.01,
        "epsilon": found.upper,
        "epsilon_certified": {"lower": found.lower, "upper": found.upper},
        "weak_guarantee": None,
        "queries": 1,
        "answered": 1,
    }
    forged(release, weak)
    facts = next(one for one in verify(release).checks if one.name == "facts")
    assert not facts.ok
    assert "weak_guarantee" in facts.detail


DRAWN = [
    "x\u001b[2J\u001b[H",
    "nothing\n claim  epsilon 0.001",
    "nothing\r claim",
    "\ud800",
    "left\u202eright",
    "hidden\u200btext",
    "\x7f",
    "line\u2028line",
]


@pytest.mark.parametrize("text", DRAWN)
def test_texts_that_draw_on_the_terminal_are_found_and_never_printed(release, text):
    lie = forged(release, results={"measured_on": text})
    assert lie.name == "texts"
    done = CliRunner().invoke(command.app, ["verify", str(release)])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert text not in done.output
    assert all(one.isprintable() or one == "\n" for one in done.output)


@pytest.mark.parametrize("place", ["privacy", "name", "model"])
def test_such_texts_are_found_wherever_they_stand(release, place):
    if place == "privacy":
        assert forged(release, {"generator": "safe\u001b[1A"}).name == "texts"
    elif place == "name":
        assert forged(release, {"safe\u001b[1A": 1}).name == "texts"
    else:
        record = json.loads((release / "model.json").read_text()) | {"model": "linear\u001b[1A"}
        (release / "model.json").write_text(json.dumps(record))
        assert forged(release, results={"model": "linear\u001b[1A"}).name == "texts"


def test_the_names_of_other_files_and_keys_are_printed_harmlessly(release):
    forged(release)
    (release / "manifest.signed.json").write_text(json.dumps({"signatures": [{"keyid": "\u001b[2Jby me\n"}]}))
    done = CliRunner().invoke(command.app, ["verify", str(release)])
    assert "\u001b[2J" not in done.output


def test_nothing_in_a_card_is_markup(release):
    script = "<script>alert(1)</script> [free](http://x) **Privacy**: epsilon 0.001 `code`"
    forged(release, results={"measured_on": script})
    text = (release / "model_card.md").read_text()
    assert "<script>" not in text
    assert "[free](" not in text
    assert "**Privacy**: epsilon 0.001" not in text
    assert "\\[free\\]" in text
