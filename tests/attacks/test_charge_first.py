"""Attack: make a refused run leave something behind, look before it pays, or pay once and draw twice."""

import json
import shutil

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from terrine import datasets, sgd
from terrine.cli.app import app
from terrine.errors import BudgetExceeded, InvalidArgument, TerrineError
from terrine.events import Budget, Neighbours, from_json
from terrine.ledger import Ledger
from terrine.pate import teachers
from terrine.pate.run import RunFolder
from terrine.pipeline import bounds, tuning, whitened
from terrine.pipeline.models import Architecture
from terrine.prompts import tuning as prompt_tuning
from terrine.tables import Schema
from tests.pipeline.conftest import SCHEMA, write_table
from tests.prompts import tiny

UNSURE = SCHEMA.replace("high = 100", "high = 100\nconfirmed = false")
TABLE = ("train", "people.csv", "--label", "ill", "--epsilon", 8, "--out", "run", "--epochs", 2, "--lot", 100)
RELEASE = ("train", "people.csv", "--label", "ill", "--epsilon", 8, "--out", "run", "--model", "least-squares")
DIGITS = ("train", "--data", "digits", "--epsilon", 8, "--out", "run", "--epochs", 1)
PROMPT = ("--model", "model", "--epsilon", 2, "--template", "{text} Mood :", "--words", " good, bad", "--seed", 1)
RUNS = {
    "private bounds": (*TABLE, "--private-bounds"),
    "accuracy": (*TABLE, "--accuracy-within", 5),
    "one release": (*RELEASE, "--private-bounds", "--accuracy-within", 5),
    "tuning": (*TABLE, "--private-bounds", "--tune", 3),
    "whitening": (*DIGITS, "--model", "scatter-linear"),
    "tuning of whitened features": (*DIGITS, "--model", "scatter-linear", "--tune", 2),
    "teachers": ("train", "--data", "digits", "--method", "pate", "--epsilon", 8, "--teachers", 12, "--out", "run"),
    "a whole PATE run": ("pate", "run", "pate.toml"),
    "a soft prompt": (
        "prompt", "tune", "--data", "texts.jsonl", "--out", "out/p.safetensors", "--steps", 2, "--lot", 12, *PROMPT,
    ),
    "bought labels": (
        "prompt", "label", "--private", "texts.jsonl", "--public", "public.txt", "--out", "out/l.jsonl",
        "--teachers", 12, "--shots", 2, *PROMPT,
    ),
}  # fmt: skip
REPLACED = {"teachers", "a whole PATE run", "bought labels"}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with private tables, arrays and texts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "people.schema.toml").write_text(UNSURE)
    write_table(tmp_path / "people.csv", rows=5000)
    digits = datasets.digits()
    flat = digits.train.reshape(len(digits.train), -1) / 255
    np.savez(tmp_path / "private.npz", x=flat[:1000], y=digits.train_labels[:1000])
    np.savez(tmp_path / "public.npz", x=flat[1000:])
    (tmp_path / "pate.toml").write_text(
        """
        run = "run"
        data = "private.npz"
        public = "public.npz"
        [split]
        teachers = 20
        classes = 10
        [train]
        model = "logistic"
        [label]
        noise = 8.0
        queries = 20
        [bill]
        delta = 1e-5
        [student]
        model = "logistic"
        """
    )
    return tmp_path


@pytest.fixture
def language(place):
    made = tiny.language(dtype=torch.float32)
    made.model.save_pretrained(place / "model")
    made.tokenizer.save_pretrained(place / "model")
    pairs = zip(tiny.TEXTS, tiny.LABELS, strict=True)
    rows = [json.dumps({"text": text, "label": ("good", "bad")[label]}) for text, label in pairs]
    (place / "texts.jsonl").write_text("\n".join(rows * 20) + "\n")
    (place / "public.txt").write_text("\n".join(tiny.TEXTS) + "\n")
    return made


def give(words, *more):
    """The result of a command; an error of ours is its `exception`, any other is raised."""
    done = CliRunner().invoke(app, [str(word) for word in (*words, *more)])
    if done.exception is not None and not isinstance(done.exception, TerrineError | SystemExit):
        raise done.exception
    return done


def account(place, budget, name):
    relation = Neighbours.REPLACE_ONE if name in REPLACED else Neighbours.ADD_REMOVE
    with Ledger.open(place / "book.db") as book:
        book.account("patients", budget=budget, neighbours=relation)
    return ("--ledger", place / "book.db", "--account", "patients")


def confirmed(place, name):
    """Only the private bounds want a schema that nobody has confirmed."""
    if name == "accuracy":
        (place / "people.schema.toml").write_text(SCHEMA)


def everything(place):
    return {path: path.stat().st_mtime_ns for path in place.rglob("*") if "book.db" not in path.name}


@pytest.mark.parametrize("name", RUNS)
def test_a_refused_run_leaves_nothing(place, language, name):
    confirmed(place, name)
    charge = account(place, Budget(0.01, 1e-5), name)
    before = everything(place)
    done = give(RUNS[name], *charge)
    assert isinstance(done.exception, BudgetExceeded), done.output
    assert everything(place) == before


class Looked(Exception):
    """Private rows were looked at."""


def refuse_to_look(*_, **__):
    raise Looked


@pytest.mark.parametrize("name", RUNS)
def test_nothing_is_looked_at_before_the_charge(place, language, name, monkeypatch):
    """Every door to the rows is shut: an account that refuses is heard first, one that pays hears of the look."""
    confirmed(place, name)
    doors = [
        (Schema, "encode"), (Schema, "labels"), (bounds, "find"), (whitened, "private_whitening"),
        (Architecture, "features"), (sgd.Trainer, "fit"),
        (RunFolder, "split"), (RunFolder, "train"), (RunFolder, "vote"),
        (teachers, "train_estimators"), (prompt_tuning.PromptClipper, "add_up"), (tuning, "draw_count"),
    ]  # fmt: skip
    for owner, door in doors:
        monkeypatch.setattr(owner, door, refuse_to_look)
    monkeypatch.setattr("terrine.prompts.vote", refuse_to_look)
    assert isinstance(give(RUNS[name], *account(place, Budget(0.01, 1e-5), name)).exception, BudgetExceeded)
    (place / "book.db").unlink()
    with pytest.raises(Looked):
        give(RUNS[name], *account(place, Budget(60.0, 1e-3), name))
    with Ledger.open(place / "book.db") as book:
        assert len(list(book.account("patients").history())) == 1


@pytest.mark.parametrize("name", ["private bounds", "tuning", "whitening", "teachers", "a whole PATE run"])
def test_a_run_that_goes_on_is_charged_once_and_draws_nothing_again(place, name, monkeypatch):
    """It ends wherever it likes after its first release; the second start finds the receipt and the release."""
    charge = account(place, Budget(60.0, 1e-3), name)
    kept = {"private bounds": "bounds.json", "tuning": "bounds.json", "whitening": "whitening.safetensors"}
    fresh = {
        "private bounds": (bounds, "find"),
        "tuning": (bounds, "find"),
        "whitening": (whitened, "private_whitening"),
    }
    with monkeypatch.context() as patched:
        stop = {"a whole PATE run": (RunFolder, "label"), "teachers": (RunFolder, "label")}.get(
            name, (sgd.Trainer, "fit")
        )
        patched.setattr(*stop, refuse_to_look)
        with pytest.raises(Looked):
            give(RUNS[name], *charge)
    first = (place / "run" / "owner" / kept[name]).read_bytes() if name in kept else b""
    if name in fresh:
        monkeypatch.setattr(*fresh[name], refuse_to_look)
    done = give(RUNS[name], *charge)
    assert done.exit_code == 0, done.output
    if name in kept:
        assert (place / "run" / "owner" / kept[name]).read_bytes() == first
    with Ledger.open(place / "book.db") as book:
        assert len(list(book.account("patients").history())) == 1


def test_what_is_charged_is_what_the_folder_claims(place):
    charge = account(place, Budget(60.0, 1e-3), "private bounds")
    assert give(RUNS["private bounds"], *charge).exit_code == 0
    claim = json.loads((place / "run" / "privacy.json").read_text())
    with Ledger.open(place / "book.db") as book:
        assert [one.event for one in book.account("patients").history()] == [from_json(json.dumps(claim["events"]))]


def test_a_receipt_does_not_pay_for_another_run(place):
    """The table grew after the charge: other rows, another event, another price."""
    charge = account(place, Budget(60.0, 1e-3), "private bounds")
    (place / "people.csv").write_text((place / "people.csv").read_text().replace(",yes", ",maybe"))
    done = give(RUNS["private bounds"], *charge)
    assert "maybe" in str(done.exception)
    write_table(place / "people.csv", rows=5001)
    done = give(RUNS["private bounds"], *charge)
    assert isinstance(done.exception, InvalidArgument)
    assert "something else" in str(done.exception)
    write_table(place / "people.csv", rows=5000)
    assert give(RUNS["private bounds"], *charge).exit_code == 0
    with Ledger.open(place / "book.db") as book:
        assert len(list(book.account("patients").history())) == 1


@pytest.mark.parametrize("name", ["private bounds", "a whole PATE run", "a soft prompt", "bought labels"])
def test_the_charge_says_who_and_what_for(place, language, name):
    charge = account(place, Budget(60.0, 1e-1), name)
    done = give(RUNS[name], *charge, "--by", "ann", "--purpose", "ward study 7")
    assert done.exit_code == 0, done.output
    with Ledger.open(place / "book.db") as book:
        assert [(one.by, one.purpose) for one in book.account("patients").history()] == [("ann", "ward study 7")]
    lonely = give((*RUNS[name], "--by", "ann"))
    assert "want --ledger and --account" in str(lonely.exception)


def test_the_ledgers_head_is_printed_and_reported(place):
    charge = account(place, Budget(60.0, 1e-3), "private bounds")
    done = give(RUNS["private bounds"], *charge)
    with Ledger.open(place / "book.db") as book:
        head = book.head()
    assert head in done.output
    assert head in (place / "run" / "report.html").read_text()
    assert json.loads((place / "run" / "privacy.json").read_text())["ledger"]["head"] == head


def test_a_copied_receipt_does_not_pay_for_a_second_run(place, monkeypatch):
    """Two folders, each with draws of its own: two runs. A folder that was moved is still the one that was paid for."""
    words, charge = RUNS["private bounds"], account(place, Budget(60.0, 1e-3), "private bounds")
    with monkeypatch.context() as patched:
        patched.setattr(bounds, "find", refuse_to_look)
        with pytest.raises(Looked):
            give(words, *charge)
    shutil.copytree(place / "run", place / "copy")
    (place / "run").rename(place / "moved")

    def charges(folder):
        assert give([folder if word == "run" else word for word in words], *charge).exit_code == 0
        with Ledger.open(place / "book.db") as book:
            return len(list(book.account("patients").history()))

    assert charges("moved") == 1
    assert charges("copy") == 2


def test_the_receipt_of_a_run_that_is_over_pays_for_nothing_more(place):
    """Without its results and its draws, the folder of a finished run gave a second model for nothing."""
    charge = account(place, Budget(60.0, 1e-3), "private bounds")
    assert give(RUNS["private bounds"], *charge).exit_code == 0
    assert "nothing" in give(RUNS["private bounds"], *charge).output
    with Ledger.open(place / "book.db") as book:
        assert len(list(book.account("patients").history())) == 1
    for path in (place / "run").rglob("*"):
        if path.is_file() and path.name not in ("run.json", "receipt.json"):
            path.unlink()
    write_table(place / "people.csv", rows=5000, seed=1)
    assert give(RUNS["private bounds"], *charge).exit_code == 0
    with Ledger.open(place / "book.db") as book:
        assert len(list(book.account("patients").history())) == 2
