"""A full disk, a database that is away, a clock that goes back, a server that is killed: clear errors, nothing lost."""

import threading

import pytest

from tests.benchmarks import load
from tests.gateway import clinic as made
from tests.gateway.clinic import COUNT, VISITS, done


def test_a_database_that_is_away_is_said_and_comes_back(clinic):
    ann = clinic.lend("ann")
    done(ann.post("/datasets/visits/price", json=COUNT))
    ledger = clinic.folder / "ledger.db"
    ledger.rename(clinic.folder / "moved.db")
    lost = ann.post("/datasets/visits/ask", json=COUNT)
    assert lost.status_code == 503
    assert "nothing was released" in lost.json()["error"]
    assert str(clinic.folder) not in lost.text
    assert clinic.plain.get("/health").status_code == 503
    (clinic.folder / "moved.db").rename(ledger)
    assert done(clinic.plain.get("/health"))["ok"]
    done(ann.post("/datasets/visits/ask", json=COUNT))
    assert clinic.spent() == 1


def test_a_full_disk_charges_nothing_and_answers_nothing(clinic):
    ann = clinic.lend("ann")
    done(ann.post("/datasets/visits/price", json=COUNT))
    store = clinic.gateway.database.store
    for one in list(store._idle):
        pages = one.cursor.execute("PRAGMA page_count").fetchone()[0]
        one.cursor.execute(f"PRAGMA max_page_count = {pages}")
    states = set()
    for number in range(1, 40):
        answer = ann.post("/datasets/visits/ask", json=COUNT | {"epsilon": 0.01 + number / 1e6})
        states.add(answer.status_code)
        if answer.status_code != 200:
            break
    assert states <= {200, 500, 503}
    assert states != {200}
    held = [one for one in done(ann.get("/requests")) if one["state"] == "answered"]
    charges = {one.hash for one in clinic.gateway.database.ledger.account("visits").history()}
    assert {one["charge"] for one in held} <= charges
    assert not clinic.gateway.database.ledger.verify()


def test_a_clock_that_goes_back_stops_charges_and_revives_no_token(tmp_path):
    now = [1_800_000_000.0]
    clinic = made.Clinic(tmp_path, {}, clock=lambda: now[0])
    try:
        done(clinic.owner.post("/datasets/visits", json=VISITS))
        ann = clinic.lend("ann")
        short = done(clinic.owner.post("/tokens", json={"member": "ann", "dataset": "visits", "days": 0.01}))
        clinic.tokens["short"] = short["secret"]
        now[0] += 3_600
        done(ann.post("/datasets/visits/ask", json=COUNT))
        assert clinic.client("short").get("/me").status_code == 401
        now[0] -= 3_500
        assert clinic.client("short").get("/me").status_code == 401
        refused = ann.post("/datasets/visits/ask", json=COUNT | {"epsilon": 0.2})
        assert refused.status_code == 503
        assert "clock" in refused.json()["error"]
        [mine] = done(ann.get("/budget"))
        assert mine["allowance_spent"] == pytest.approx(0.1)
        assert done(ann.post("/datasets/visits/ask", json=COUNT))["from_archive"]
    finally:
        clinic.close()


def test_two_requests_at_once_cannot_pass_an_allowance_together(clinic):
    ann = clinic.lend("ann", allowance=0.35)
    done(ann.post("/datasets/visits/price", json=COUNT))
    start, codes = threading.Barrier(8), []

    def ask():
        client = clinic.client("ann")
        start.wait()
        codes.append(client.post("/datasets/visits/ask", json=COUNT | {"fresh": True}).status_code)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200] * 3 + [403] * 5
    assert clinic.spent() == 3
    [mine] = done(ann.get("/budget"))
    assert mine["allowance_spent"] == pytest.approx(0.3)


def test_two_servers_on_one_postgresql_agree(postgresql, tmp_path):
    first = made.opened(tmp_path, ledger=postgresql, limits={"threads": 8})
    try:
        ann = first.lend("ann", allowance=0.35)
        second = made.Clinic.__new__(made.Clinic)
        second.folder, second.tokens = tmp_path, first.tokens
        second.app = made.create_app(first.configuration)
        with made.TestClient(second.app, raise_server_exceptions=False):
            bob = second.client("ann")
            answer = done(ann.post("/datasets/visits/ask", json=COUNT))
            again = done(bob.post("/datasets/visits/ask", json=COUNT))
            assert again["from_archive"]
            assert again["answer"] == answer["answer"]
            codes = []
            threads = [
                threading.Thread(
                    target=lambda one=one: codes.append(
                        one.client("ann").post("/datasets/visits/ask", json=COUNT | {"fresh": True}).status_code
                    )
                )
                for one in (first, second, first, second)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert sorted(codes) == [200, 200, 403, 403]
            assert first.spent() == 3
            token = done(first.owner.get("/tokens"))[-1]["token"]
            done(first.owner.delete(f"/tokens/{token}"))
            assert bob.get("/me").status_code == 401
            assert done(first.owner.get("/log"))["broken"] == ""
    finally:
        first.close()


@pytest.mark.slow
@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_a_killed_server_forgets_nothing(store, tmp_path, request):
    ledger = "ledger.db" if store == "sqlite" else request.getfixturevalue("postgresql")
    found = load("gateway").kills(tmp_path / "run", ledger, kills=3, training=False)
    assert found["kills"] == 3


@pytest.mark.slow
def test_a_budget_under_load_is_never_overspent(tmp_path):
    found = load("gateway").load(tmp_path / "run", "ledger.db", analysts=6, seconds=4.0, servers=1)
    assert found["other"] == 0
    assert found["answers"] > 0
