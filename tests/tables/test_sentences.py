"""A local sentence encoder: read offline, the same one for training and predicting, each text by itself."""

import json

import numpy as np
import pyarrow as pa
import pytest

from terrine import tables
from terrine.errors import InvalidArgument
from terrine.tables import Schema, Text

transformers = pytest.importorskip("transformers")


def made(folder, seed=0):
    """A tiny encoder with random weights."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(seed)
    words = {word: place for place, word in enumerate(["[UNK]", "[PAD]", "fever", "pain", "no", "yes"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]"
    ).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=6, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def encoder(folder):
    return tables.load_encoder(folder)


def test_each_text_is_encoded_by_itself_to_length_one(encoder):
    texts = ["fever", "no fever and pain", "", None, "fever"]
    schema = Schema("y", ("a", "b"), {"note": Text(encoder=encoder.name, sha256=encoder.sha256, dimensions=8)})
    made = schema.encode(pa.table({"note": texts}), encoder=encoder)
    assert made.shape == (5, 9)
    assert np.linalg.norm(made[:, :8], axis=1) == pytest.approx([1, 1, 0, 0, 1], abs=1e-5)
    assert made[:, 8].tolist() == [0, 0, 1, 1, 0]
    for place, text in enumerate(texts):
        alone = schema.encode(pa.table({"note": pa.array([text], pa.string())}), encoder=encoder)
        assert np.array_equal(alone[0], made[place])


def test_none_or_another_encoder_is_refused(encoder, tmp_path):
    schema = Schema("y", ("a", "b"), {"note": Text(encoder=encoder.name, sha256=encoder.sha256, dimensions=8)})
    with pytest.raises(InvalidArgument, match="want --text-model with its folder"):
        schema.encode(pa.table({"note": ["x"]}))
    other = tables.load_encoder(made(tmp_path / "other", seed=1))
    with pytest.raises(InvalidArgument, match="another encoder"):
        schema.encode(pa.table({"note": ["x"]}), encoder=other)


@pytest.mark.parametrize("files", [(), ("config.json",), ("config.json", "model.safetensors")])
def test_a_folder_that_is_no_encoder_is_one_line(tmp_path, files):
    for name in files:
        (tmp_path / name).write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(InvalidArgument) as caught:
        tables.load_encoder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_run_from_schema_to_predictions(folder, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from terrine.cli import app

    monkeypatch.chdir(tmp_path)
    notes = [f"{word} case {place} {word} seen" for place in range(60) for word in ("fever", "pain")]
    lines = [f"{note},{'yes' if 'fever' in note else 'no'}" for note in notes]
    (tmp_path / "t.csv").write_text("\n".join(["note,ill", *lines]) + "\n")

    def run(*words):
        told = CliRunner().invoke(app.app, [str(word) for word in words])
        return str(told.exception or told.output)

    assert "taken from the rows" in run("schema", "t.csv", "--text-model", folder, "--accept-guesses")
    schema = Schema.load("t.schema.toml")
    assert schema.width == 9
    assert str(folder.parent) not in (tmp_path / "t.schema.toml").read_text()
    asked = ("train", "t.csv", "--label", "ill", "--epsilon", 8, "--epochs", 2, "--lot", 40, "--out", "run")
    assert "want --text-model" in run(*asked)
    assert not (tmp_path / "run").exists()
    assert "epsilon 8" in run(*asked, "--text-model", folder)
    assert "want --text-model" in run("predict", "run", "t.csv")
    assert run("predict", "run", "t.csv", "--text-model", folder, "--keep", "note").startswith("note,prediction")
