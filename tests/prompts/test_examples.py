"""Texts in files: every format says the same; what is wrong is said with its line."""

import pytest

from terrine.errors import InvalidArgument
from terrine.prompts import examples

CONTENT = {
    "a.jsonl": '{"text": "dull, long", "label": "bad"}\n\n{"text": "fun", "label": "good"}\n',
    "a.csv": 'text,label\n"dull, long",bad\nfun,good\n',
    "a.tsv": "label\ttext\nbad\tdull, long\ngood\tfun\n",
    "a.txt": "bad dull, long\ngood fun\n",
}


@pytest.mark.parametrize("name", CONTENT)
def test_every_format_says_the_same(tmp_path, name):
    (tmp_path / name).write_text(CONTENT[name])
    assert examples.read(tmp_path / name, ["good", "bad"]) == (["dull, long", "fun"], [1, 0])
    assert examples.read_pairs(tmp_path / name) == (["dull, long", "fun"], ["bad", "good"])
    if name != "a.txt":
        assert examples.read_texts(tmp_path / name) == ["dull, long", "fun"]


def test_numbers_stand_for_classes_and_lines_for_texts(tmp_path):
    (tmp_path / "n.txt").write_text("1 dull\n0 fun\n")
    assert examples.read(tmp_path / "n.txt", ["good", "bad"]) == (["dull", "fun"], [1, 0])
    assert examples.read_texts(tmp_path / "n.txt") == ["1 dull", "0 fun"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("b.jsonl", '{"text": "dull"}\n', "line 1: lacks label"),
        ("b.jsonl", "dull\n", "line 1: not JSON"),
        ("b.jsonl", "[1]\n", "lacks text, label"),
        ("b.csv", "words,label\ndull,bad\n", "line 2: lacks text"),
        ("b.txt", "good fun\ndull\n", "line 2: want a label, a space and a text"),
        ("b.txt", "\n", "no texts"),
        ("b.txt", "ugly dull\n", "label 'ugly': want one of good, bad"),
        ("b.doc", "x", "ending in"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidArgument, match=said) as refusal:
        examples.read(tmp_path / name, ["good", "bad"])
    assert "\n" not in str(refusal.value)


def test_other_encodings_are_refused(tmp_path):
    (tmp_path / "c.txt").write_bytes(b"good caf\xe9 x\n")
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        examples.read(tmp_path / "c.txt", ["good", "bad"])
