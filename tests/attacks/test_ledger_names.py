"""Names that look like others, or that change what a reader sees around them, never enter the ledger."""

from __future__ import annotations

import io
import json
import unicodedata

import pytest
from typer.testing import CliRunner

from terrine.cli.app import app
from terrine.errors import InvalidArgument, LedgerDamaged
from terrine.events import Budget, PureDP
from terrine.ledger import Ledger, verify_export
from terrine.ledger.records import AccountRow, ChargeRow, digest

BUDGET = Budget(epsilon=1.0, delta=0.0)
TENTH = PureDP(epsilon=0.1)

WRONG = {
    "right-to-left override": "clinic\u202ecinilc",
    "isolate": "clinic\u2066x\u2069",
    "right-to-left mark": "clinic\u200f",
    "Arabic letter mark": "clinic\u061c",
    "zero-width space": "cli\u200bnic",
    "zero-width joiner": "cli\u200dnic",
    "zero-width non-joiner": "cli\u200cnic",
    "word joiner": "cli\u2060nic",
    "byte order mark": "\ufeffclinic",
    "soft hyphen": "cli\u00adnic",
    "combining grapheme joiner": "cli\u034fnic",
    "variation selector": "clinic\ufe0f",
    "variation selector supplement": "clinic\U000e0100",
    "tag": "clinic\U000e0041",
    "Hangul filler": "clinic\u3164",
    "halfwidth Hangul filler": "clinic\uffa0",
    "Hangul jamo filler": "clinic\u1160",
    "Mongolian selector": "clinic\u180b",
    "Khmer inherent vowel": "clinic\u17b4",
    "Braille blank": "clinic\u2800",
    "newline": "clinic\nsurvey",
    "tab": "clinic\tsurvey",
    "carriage return": "clinic\rsurvey",
    "escape": "clinic\x1b[31m",
    "null": "clinic\x00",
    "delete": "clinic\x7f",
    "next line": "clinic\x85",
    "line separator": "clinic\u2028",
    "no-break space": "clinic\u00a0",
    "ideographic space": "clinic\u3000",
    "surrogate": "clinic\ud800",
    "private use": "clinic\ue000",
    "unassigned": "clinic\U000eeeee",
    "space before": " clinic",
    "space after": "clinic ",
    "a mark on nothing": "\u0338clinic",
}
RIGHT = ["clinic", "Klinik Süd", "診療所", "עדה", "عيادة", "क्लिनिक", "คลินิก", "clinic 🏥", "a (b) [c] 'd'", "x" * 10_000]


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "ledger.db") as made:
        yield made


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_name_that_deceives_the_eye_is_refused_wherever_it_is_given(ledger, text):
    with pytest.raises(InvalidArgument) as refusal:
        ledger.account(text, budget=BUDGET)
    assert "\n" not in str(refusal.value)
    assert all(one.isprintable() for one in str(refusal.value))
    with pytest.raises(InvalidArgument):
        ledger.account("parts", budget=BUDGET, partitions=["a", text])
    account = ledger.account("main", budget=BUDGET, partitions=["a"])
    for options in ({"purpose": text}, {"by": text}, {"partition": text}):
        with pytest.raises(InvalidArgument):
            account.charge(TENTH, **options)
    assert list(account.history()) == []
    assert [one.name for one in ledger.accounts()] == ["main"]


@pytest.mark.parametrize("text", RIGHT, ids=lambda text: text[:10])
def test_names_of_every_script_are_taken(ledger, text):
    account = ledger.account(text, budget=BUDGET)
    account.charge(TENTH, purpose=text, by=text)
    charge = next(ledger.account(text).history())
    assert (charge.purpose, charge.by) == (text, text)


def test_two_ways_to_write_one_name_are_one_account(ledger):
    composed, apart = "Caf\u00e9", "Cafe\u0301"
    assert composed != apart
    account = ledger.account(composed, budget=BUDGET, partitions=["\u00e9", "f"])
    assert ledger.account(apart, partitions=["e\u0301", "f"]).name == composed
    ledger.account(apart).charge(TENTH, partition="e\u0301", by="Ame\u0301lie", purpose="\u212bngstro\u0308m")
    charge = next(account.history())
    assert (charge.partition, charge.by, charge.purpose) == ("\u00e9", "Am\u00e9lie", "\u00c5ngstr\u00f6m")
    assert all(unicodedata.is_normalized("NFC", one) for one in (charge.by, charge.purpose, charge.partition))
    with pytest.raises(InvalidArgument, match="different names"):
        ledger.account("other", budget=BUDGET, partitions=[composed, apart])
    assert [one.name for one in ledger.accounts()] == [composed]
    assert account.remaining(partition="e\u0301").epsilon == pytest.approx(0.9)
    assert account.would_cost(TENTH, partition="e\u0301").fits
    exported = io.StringIO()
    assert ledger.export(exported, account=apart) == 4


def test_the_command_line_knows_both_ways_too(tmp_path):
    def run(*arguments):
        return CliRunner().invoke(app, ["ledger", *map(str, arguments)])

    path, options = tmp_path / "ledger.db", ("--epsilon", 1, "--delta", 0)
    assert run("create", path, "-a", "Caf\u00e9", *options).exit_code == 0
    again = run("create", path, "-a", "Cafe\u0301", *options)
    assert isinstance(again.exception, InvalidArgument)
    assert "already" in str(again.exception)


@pytest.mark.parametrize("field", ["name", "partitions", "purpose", "by"])
def test_a_forged_export_does_not_bring_such_names_in(ledger, field, tmp_path):
    ledger.account("main", budget=BUDGET, partitions=["a"]).charge(TENTH, purpose="p", by="b")
    exported = io.StringIO()
    ledger.export(exported)
    lines = [json.loads(line) for line in exported.getvalue().splitlines()]
    wrong = "clinic\u202e"
    account, charge = AccountRow(**lines[1]["account"]), ChargeRow(**lines[2]["charge"])
    if field in ("name", "partitions"):
        account = account._replace(**{field: json.dumps([wrong]) if field == "partitions" else wrong})
    else:
        charge = charge._replace(**{field: wrong})
    account = account._replace(hash=digest(account))
    charge = charge._replace(previous=account.hash)
    charge = charge._replace(hash=digest(charge))
    lines[1:3] = [{"account": account._asdict()}, {"charge": charge._asdict()}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    assert any("U+202E" in str(one) for one in verify_export(io.StringIO(text)))
    with Ledger.open(tmp_path / "copy.db") as copy:
        with pytest.raises(LedgerDamaged):
            copy.import_(io.StringIO(text))
        assert copy.accounts() == []
