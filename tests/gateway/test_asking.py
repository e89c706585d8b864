"""Asking: price, charge, answer, archive, allowance, approval."""

import json

import pytest

from terrine.gateway import requests
from tests.gateway.clinic import COUNT, VISITS, done


def test_an_answer_is_charged_and_carries_its_proof(clinic):
    ann = clinic.lend("ann")
    found = done(ann.post("/datasets/visits/ask", json=COUNT | {"purpose": "weekly count"}))
    charges = list(clinic.gateway.database.ledger.account("visits").history())
    assert [one.by for one in charges] == ["ann"]
    assert charges[0].purpose == f"request {found['request']}: weekly count"
    assert found["proof"]["head"] == charges[0].hash
    assert found["proof"]["price"] == {"epsilon": pytest.approx(0.1), "delta": 0.0}
    assert not found["from_archive"]
    assert [row[0] for row in found["answer"]["rows"]] == ["N", "S"]


def test_a_price_looks_at_nothing_and_costs_nothing(clinic):
    ann = clinic.lend("ann")
    found = done(ann.post("/datasets/visits/price", json=COUNT))
    assert found["epsilon"] == pytest.approx(0.1)
    assert found["fits_budget"]
    assert found["fits_allowance"]
    assert not found["in_archive"]
    assert clinic.spent() == 0


def test_the_same_question_is_answered_from_the_archive_for_nothing(clinic):
    ann, bob = clinic.lend("ann"), clinic.lend("bob")
    first = done(ann.post("/datasets/visits/ask", json=COUNT))
    again = done(ann.post("/datasets/visits/ask", json=COUNT | {"sql": COUNT["sql"].replace(" FROM", "\n  FROM")}))
    assert again["from_archive"]
    assert again["cost"] == {"epsilon": 0.0, "delta": 0.0}
    assert again["answer"] == first["answer"]
    assert clinic.spent() == 1
    assert not done(bob.post("/datasets/visits/ask", json=COUNT))["from_archive"]
    assert not done(ann.post("/datasets/visits/ask", json=COUNT | {"epsilon": 0.11}))["from_archive"]
    assert not done(ann.post("/datasets/visits/ask", json=COUNT | {"fresh": True}))["from_archive"]
    assert clinic.spent() == 4


def test_all_analysts_spend_from_one_account(clinic):
    for name in ("ann", "bob"):
        client = clinic.lend(name, allowance=5.0)
        done(client.post("/datasets/visits/ask", json=COUNT | {"epsilon": 0.9}))
    refused = client.post("/datasets/visits/ask", json=COUNT | {"epsilon": 0.5})
    assert refused.status_code == 409
    assert "budget" in refused.json()["error"]
    [mine] = done(client.get("/budget"))
    assert mine["allowance_spent"] == pytest.approx(0.9)  # what was refused is given back
    assert mine["spent"] == pytest.approx(1.8)
    assert clinic.spent() == 2


def test_beyond_the_allowance_it_waits_for_approval(clinic):
    ann, eve = clinic.lend("ann", allowance=0.05), clinic.lend("eve", role="officer")
    refused = ann.post("/datasets/visits/ask", json=COUNT)
    assert refused.status_code == 403
    assert "reason" in refused.json()["error"]
    waits = ann.post("/datasets/visits/ask", json=COUNT | {"reason": "for the yearly report"})
    assert waits.status_code == 202
    request = waits.json()["request"]
    assert clinic.spent() == 0
    assert ann.get(f"/requests/{request}/answer").status_code == 409
    [seen] = done(eve.get("/requests", params={"state": "waiting"}))
    assert seen["reason"] == "for the yearly report"
    approved = done(eve.post(f"/requests/{request}/approve", json={"reason": "agreed"}))
    assert approved["state"] == "answered"
    assert approved["answer"] is None  # the officer watches, and does not read answers
    assert clinic.spent() == 1
    found = done(ann.get(f"/requests/{request}/answer"))
    assert found["answer"]["columns"][:2] == ["region", "n"]
    assert eve.post(f"/requests/{request}/approve", json={}).status_code == 409
    assert clinic.spent() == 1


def test_a_denied_request_is_never_charged(clinic):
    ann, eve = clinic.lend("ann", allowance=0.0), clinic.lend("eve", role="officer")
    request = ann.post("/datasets/visits/ask", json=COUNT | {"reason": "please"}).json()["request"]
    done(eve.post(f"/requests/{request}/deny", json={"reason": "no need"}))
    assert eve.post(f"/requests/{request}/approve", json={}).status_code == 409
    assert done(ann.get(f"/requests/{request}"))["decision"] == "no need"
    assert clinic.spent() == 0


def test_a_failure_after_the_charge_stays_charged_and_says_so(clinic, monkeypatch):
    ann = clinic.lend("ann")
    done(ann.post("/datasets/visits/mock", json=COUNT))
    opened = clinic.gateway.datasets.open("visits")

    def fails(*_):
        raise RuntimeError("row of Mrs Smith is odd")

    monkeypatch.setattr(opened.session, "_looked", fails)
    lost = ann.post("/datasets/visits/ask", json=COUNT)
    assert lost.status_code == 500
    assert lost.json()["charged"]
    assert "Smith" not in lost.text
    assert clinic.spent() == 1
    [seen] = done(ann.get("/requests"))
    assert seen["state"] == "failed"
    assert seen["charged"]
    [mine] = done(ann.get("/budget"))
    assert mine["allowance_spent"] == pytest.approx(0.1)


def test_what_a_dead_server_left_is_settled_by_the_ledger(clinic):
    ann = clinic.lend("ann")
    found = done(ann.post("/datasets/visits/ask", json=COUNT))
    database = clinic.gateway.database
    with database.write() as session:  # as it stood before the answer was kept
        row = requests.find(session, found["request"])
        session.execute(
            requests.REQUESTS.update()
            .where(requests.REQUESTS.c.request == row["request"])
            .values(state="reserved", answer="", charge="", server="f" * 32)
        )
        other = row | {"request": "e" * 32, "state": "reserved", "answer": "", "charge": "", "server": "f" * 32}
        requests.add(session, other)
        assert requests.members.reserve(session, row)
    requests.settle_abandoned(database, clinic.gateway.presence, set())
    states = {one["request"]: one for one in done(ann.get("/requests"))}
    assert states[found["request"]]["state"] == "failed"
    assert states["e" * 32]["state"] == "refused"
    [mine] = done(ann.get("/budget"))
    assert mine["allowance_spent"] == pytest.approx(0.1)
    assert clinic.spent() == 1


def test_refused_questions_are_not_charged(clinic):
    ann = clinic.lend("ann")
    for sql in ("DROP TABLE visits", "SELECT * FROM visits", "SELECT COUNT(*) FROM secrets", "SELECT 1; SELECT 2"):
        refused = ann.post("/datasets/visits/ask", json={"sql": sql, "epsilon": 0.1})
        assert refused.status_code == 422, sql
    assert ann.post("/datasets/visits/ask", json=COUNT | {"epsilon": 21}).status_code == 422
    assert ann.post("/datasets/visits/ask", json=COUNT | {"rows": 10**6}).status_code == 422
    assert clinic.spent() == 0
    assert done(ann.get("/requests")) == []


def test_schemas_and_made_up_rows_are_shown(clinic):
    ann = clinic.lend("ann")
    found = done(ann.get("/datasets/visits"))
    [table] = found["schemas"]
    assert [one["name"] for one in table["columns"]] == ["patient_id", "region", "cost"]
    assert table["example"][0] == [1, "alpha", 1.5]
    answer = done(ann.post("/datasets/visits/mock", json=COUNT))
    assert answer["mock"]
    assert clinic.spent() == 0


def test_one_table_has_one_budget(clinic):
    refused = clinic.owner.post("/datasets/again", json=VISITS)
    assert refused.status_code == 409
    assert "visits" in refused.json()["error"]
    same = clinic.owner.post("/datasets/visits", json=VISITS)
    assert same.status_code == 201
    other = clinic.owner.post("/datasets/visits", json=VISITS | {"budget": {"epsilon": 9.0, "delta": 1e-6}})
    assert other.status_code == 409


def test_the_officer_sees_everything_and_the_log_is_whole(clinic):
    ann, eve = clinic.lend("ann"), clinic.lend("eve", role="officer")
    done(ann.post("/datasets/visits/ask", json=COUNT | {"purpose": "a study"}))
    found = done(eve.get("/datasets/visits/spending"))
    assert found["members"] == [{"member": "ann", "charges": 1, "epsilon": pytest.approx(0.1), "delta": 0.0}]
    assert "a study" in found["charges"][0]["purpose"]
    log = done(eve.get("/log"))
    assert log["broken"] == ""
    assert "POST /datasets/{name}/ask" in [one["action"] for one in log["entries"]]
    assert clinic.tokens["ann"] not in json.dumps(log)
    exported = eve.get("/datasets/visits/export")
    assert exported.text.count("\n") == 4
