"""`terrine remote`, as an analyst and as an officer type it."""

import json
import re

import pytest
from typer.testing import CliRunner

from terrine.cli import remote
from terrine.errors import TerrineError
from terrine.ledger import verify_export
from tests.gateway.clinic import COUNT
from tests.gateway.test_client import gateway_of

QUESTION = ["--sql", COUNT["sql"], "--keys", "region=N,S"]


@pytest.fixture
def told(clinic, monkeypatch):
    """Run a command as somebody, and hand back what it prints."""
    clinic.lend("ann", allowance=0.15)
    clinic.lend("eve", role="officer")

    def run(name, *words):
        monkeypatch.setattr(remote, "_gateway", lambda *_: gateway_of(clinic, name))
        found = CliRunner().invoke(remote.app, list(words))
        if found.exception is not None and not isinstance(found.exception, SystemExit):
            raise found.exception
        assert found.exit_code == 0, found.output
        return found.output

    return run


def test_a_question_waits_is_shown_approved_collected_and_on_the_books(told, tmp_path):
    assert "BEYOND your allowance" in told("ann", "price", *QUESTION, "--epsilon", "0.5")
    assert "charged now" in told("ann", "ask", *QUESTION, "--epsilon", "0.1", "--purpose", "a look")
    with pytest.raises(TerrineError, match="waits") as waits:
        told("ann", "ask", *QUESTION, "--epsilon", "0.5", "--reason", "the yearly report")
    assert waits.value.request
    line = told("eve", "requests", "--state", "waiting")
    request = re.match("[0-9a-f]{32}", line)[0]
    assert "by ann on visits: waiting" in line
    shown = json.loads(told("eve", "show", request))
    assert (shown["asked"]["sql"], shown["reason"]) == (COUNT["sql"], "the yearly report")
    assert "answered" in told("eve", "approve", request, "--reason", "agreed")
    assert "it cost nothing now" in told("ann", "collect", request)
    spent = told("eve", "spending", "--export", str(tmp_path / "visits.jsonl"))
    assert re.match(r"visits: epsilon 0\.6\d* of 2 spent by all", spent)
    assert "ann: 2 charges" in spent
    assert "a look" in spent
    with (tmp_path / "visits.jsonl").open() as file:
        assert verify_export(file) == []


def test_a_denied_question_costs_nothing(told):
    with pytest.raises(TerrineError, match="waits"):
        told("ann", "ask", *QUESTION, "--epsilon", "0.5", "--reason", "please")
    request = told("eve", "requests").split()[0]
    assert "denied, epsilon 0.5 at delta 0 not charged" in told("eve", "deny", request, "--reason", "ask for less")
    assert json.loads(told("eve", "spending", "--json"))["charges"] == []
    assert "0 of 2 spent by all; of your allowance 0 of 0.15, and 0 of delta 7.5e-08" in told(
        "ann", "datasets"
    ).replace("\n", " ")


def test_refusals_of_a_question_name_options(told):
    with pytest.raises(TerrineError, match="want --bounds cost=LOW:HIGH"):
        told("ann", "price", "--sql", "SELECT AVG(cost) AS m FROM visits", "--epsilon", "0.1")
    with pytest.raises(TerrineError, match="want --keys region=A,B"):
        told("ann", "ask", "--sql", COUNT["sql"], "--epsilon", "0.1")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("foo", "want a gateway's address"),
        ("ftp://localhost", "want a gateway's address"),
        ("http://10.0.0.1", "in the clear"),
        ("http://127.0.0.1:9", "cannot be reached .* nothing was asked"),
    ],
)
def test_an_address_where_no_gateway_is(monkeypatch, address, said):
    monkeypatch.setenv("TERRINE_GATEWAY", address)
    monkeypatch.setenv("TERRINE_TOKEN", "terrine_x")
    found = CliRunner().invoke(remote.app, ["datasets"])
    assert isinstance(found.exception, TerrineError)
    assert re.search(said, str(found.exception))
