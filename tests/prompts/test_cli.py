"""`terrine prompt tune|label|eval`: one folder with a tiny model, from private texts to an answer."""

import json

import pytest
import torch
from typer.testing import CliRunner

from terrine.cli.app import app, main
from terrine.events import Budget
from terrine.ledger import Ledger
from terrine.prompts import DiscretePrompt, LanguageModel, SoftPrompt

from . import tiny

ASK = ["--template", "{text} Mood :", "--words", " good, bad"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    language = tiny.language(dtype=torch.float32)
    language.model.save_pretrained(folder)
    language.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    """Sixty private texts as JSON lines, the same six as a test set, and six public ones."""
    pairs = [(text, ("good", "bad")[label]) for text, label in zip(tiny.TEXTS, tiny.LABELS, strict=True)]
    rows = [json.dumps({"text": text, "label": label}) for text, label in pairs]
    (tmp_path / "private.jsonl").write_text("\n".join(rows * 10) + "\n")
    (tmp_path / "test.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in pairs))
    (tmp_path / "public.txt").write_text("\n".join(tiny.TEXTS) + "\n")
    return tmp_path


def run(*arguments):
    done = CliRunner().invoke(app, ["prompt", *map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def tune(model, texts, *more):
    return run(
        "tune", "--model", model, "--data", texts / "private.jsonl", "--epsilon", 2, "--out", texts / "p.safetensors",
        "--lot", 12, "--steps", 3, "--start", "the review is", *ASK, *more,
    )  # fmt: skip


def test_tune_writes_a_prompt_with_its_cost_and_eval_reads_it(model, texts):
    with Ledger.open(f"sqlite:///{texts / 'book.db'}") as book:
        book.account("reviews", budget=Budget(5.0, 1e-2))
    charged = ["--ledger", f"sqlite:///{texts / 'book.db'}", "--account", "reviews"]
    shown = tune(model, texts, "--test", texts / "test.csv", "--calibrate", *charged)
    assert 0 < shown["epsilon"] <= 2
    assert shown["delta"] == 0.01  # the power of ten below 1/60
    assert shown["tokens"] == 3
    stored = SoftPrompt.load(texts / "p.safetensors")
    assert stored.privacy["epsilon"] == shown["epsilon"]
    with Ledger.open(f"sqlite:///{texts / 'book.db'}") as book:
        assert [charge.purpose for charge in book.account("reviews").history()] == ["PromptDPSGD"]
    measured = run("eval", "--model", model, "--data", texts / "test.csv", "--prompt", texts / "p.safetensors")
    assert measured["accuracy"] == shown["accuracy"]
    assert measured["epsilon"] == shown["epsilon"]


def test_tune_from_the_vocabulary_with_a_head_and_for_free_answers(model, texts):
    out = texts / "q.safetensors"
    base = ["tune", "--model", model, "--data", texts / "private.jsonl", "--epsilon", 2, "--out", out]
    base += ["--lot", 12, "--steps", 1]
    shown = run(*base, "--tokens", 4, "--head", *ASK, "--seed", 1)
    assert shown["tokens"] == 4
    assert shown["reproducible_noise_for_tests_only"] is True
    assert SoftPrompt.load(out).weight is not None
    assert run(*base, "--template", "{text} :")["tokens"] == 10
    assert SoftPrompt.load(out).template.words == ()


def test_a_new_line_may_be_written_in_every_text(model, texts):
    """The tokenizer splits at white space: a new line left as it was typed would be glued to its word."""
    tune(model, texts, "--start", r"the\nreview\nis", "--seed", 1)
    started = SoftPrompt.load(texts / "p.safetensors")
    assert started.count == 3


def test_public_texts_centre_the_head(model, texts):
    found = []
    for more in ([], ["--public", texts / "public.txt"]):
        tune(model, texts, "--head", "--seed", 1, *more)
        found.append(SoftPrompt.load(texts / "p.safetensors").centre)
    language = LanguageModel.load(model)
    started = SoftPrompt.from_text(language, tiny.CAUSAL, "the review is", head=True, public=tiny.TEXTS)
    torch.testing.assert_close(found[1], started.centre)
    assert not torch.allclose(found[0], found[1])


def test_label_buys_labels_and_chooses_a_student(model, texts):
    shown = run(
        "label", "--model", model, "--private", texts / "private.jsonl", "--public", texts / "public.txt",
        "--epsilon", 40, "--out", texts / "bought.jsonl", "--student", texts / "student.json", "--teachers", 12,
        "--shots", 2, "--threshold", 0.3, "--seed", 1, "--queries", 5, "--weak-guarantee", *ASK,
    )  # fmt: skip
    assert shown["asked"] == 5
    assert shown["epsilon"] <= 40
    bought = [json.loads(line) for line in (texts / "bought.jsonl").read_text().splitlines()]
    assert len(bought) == shown["answered"] >= 2
    assert {one["label"] for one in bought} <= {"good", "bad"}
    student = DiscretePrompt.load(texts / "student.json")
    assert student.privacy["epsilon"] == shown["epsilon"]
    measured = run("eval", "--model", model, "--data", texts / "test.csv", "--prompt", texts / "student.json")
    assert measured["texts"] == 6


@pytest.mark.parametrize("words", [("--epsilon", 40), ("--epsilon", 2, "--delta", 0.5)])
def test_a_guarantee_that_means_nothing_is_refused(model, texts, words):
    ways = (
        ("tune", "--data", texts / "private.jsonl"),
        ("label", "--private", texts / "private.jsonl", "--public", texts / "public.txt"),
    )
    for way in ways:
        given = ["prompt", *map(str, (*way, "--model", model, "--out", texts / "made" / "out", *words, *ASK))]
        done = CliRunner().invoke(app, given)
        assert "--weak-guarantee" in str(done.exception)
        assert not (texts / "made").exists()


def test_eval_of_the_model_alone(model, texts):
    plain = run("eval", "--model", model, "--data", texts / "test.csv", *ASK)
    even = run("eval", "--model", model, "--data", texts / "test.csv", "--calibrate", *ASK)
    assert 0 <= plain["accuracy"] <= 1
    assert even["texts"] == plain["texts"] == 6
    assert "epsilon" not in plain


def test_people_read_a_table(model, texts):
    arguments = ["prompt", "eval", "--model", str(model), "--data", str(texts / "test.csv"), *ASK]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.stdout.startswith("accuracy")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["eval", "--model", "MODEL", "--data", "test.csv"], "no label words"),
        (["eval", "--model", "nowhere", "--data", "test.csv", *ASK], "nothing is downloaded"),
        (["eval", "--model", "MODEL", "--data", "none.csv", *ASK], "not readable"),
        (["eval", "--model", "MODEL", "--data", "test.xlsx", *ASK], "ending in"),
        (["eval", "--model", "MODEL", "--data", "public.txt", *ASK], "want"),
        (["eval", "--model", "MODEL", "--data", "test.csv", "--classes", "a", *ASK], "names 1 for 2"),
        (
            ["eval", "--model", "MODEL", "--data", "test.csv", "--words", " very good, bad", "--classes", "good,bad"],
            "several tokens",
        ),
        (["eval", "--model", "MODEL", "--data", "test.csv", "--template", "none", *ASK[2:]], "want {text} in it"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model, texts, capsys, monkeypatch, arguments, said):
    known = {"MODEL": str(model)} | {
        name: str(texts / name) for name in ("test.csv", "none.csv", "test.xlsx", "public.txt")
    }
    monkeypatch.setattr("sys.argv", ["terrine", "prompt", *(known.get(one, one) for one in arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    error = capsys.readouterr().err.strip()
    assert said in error.splitlines()[-1]


@pytest.mark.parametrize("what", ["tune", "label"])
def test_what_cannot_be_kept_is_not_paid_for(model, texts, monkeypatch, capsys, what):
    """A result that has nowhere to go, or a test set that is not there, is told before the account is charged."""
    with Ledger.open(f"sqlite:///{texts / 'book.db'}") as book:
        book.account("reviews", budget=Budget(50.0, 1e-2))
    private, out = texts / "private.jsonl", texts / "public.txt" / "out"  # a file where a folder should be
    arguments = {
        "tune": ["--data", private, "--lot", 12, "--steps", 1],
        "label": ["--private", private, "--public", texts / "public.txt", "--teachers", 6, "--shots", 1],
    }[what]
    arguments += ["--model", model, "--epsilon", 2, "--out", out, *ASK]
    arguments += ["--ledger", f"sqlite:///{texts / 'book.db'}", "--account", "reviews"]
    wrong = [(arguments, "want a file")]
    if what == "tune":
        elsewhere = [texts / "made" / "p.safetensors" if one is out else one for one in arguments]
        wrong += [([*elsewhere, "--test", texts / "no.csv"], "not readable")]
    for given, said in wrong:
        monkeypatch.setattr("sys.argv", ["terrine", "prompt", what, *map(str, given)])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == 2
        assert said in capsys.readouterr().err
    with Ledger.open(f"sqlite:///{texts / 'book.db'}") as book:
        assert list(book.account("reviews").history()) == []


def test_a_ledger_that_has_too_little_leaves_no_prompt(model, texts, monkeypatch, capsys):
    with Ledger.open(f"sqlite:///{texts / 'book.db'}") as book:
        book.account("reviews", budget=Budget(0.5, 1e-2))
    out = texts / "none.safetensors"
    arguments = ["tune", "--model", model, "--data", texts / "private.jsonl", "--epsilon", 2, "--out", out]
    arguments += ["--lot", 12, "--steps", 1, "--ledger", f"sqlite:///{texts / 'book.db'}", "--account", "reviews", *ASK]
    monkeypatch.setattr("sys.argv", ["terrine", "prompt", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert not out.exists()
