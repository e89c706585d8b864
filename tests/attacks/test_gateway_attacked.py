"""What a hostile analyst, a hostile officer and somebody on the network did to a gateway; named after the attack."""

import json
import os
import threading

import pytest
from starlette.testclient import TestClient

from terrine.gateway import requests
from tests.gateway import clinic as made
from tests.gateway.clinic import COUNT, VISITS, done


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    limits = {"per_minute": 10**6, "failures_per_minute": 30}
    found = made.opened(tmp_path_factory.mktemp("attacked"), limits=limits)
    yield found
    found.close()


@pytest.fixture(scope="module")
def ann(clinic):
    return clinic.lend("ann", allowance=1.0)


def test_two_approvals_at_once_charge_once_and_lose_no_answer(clinic):
    """The second approval used to end the watch over the first, and the keeper took its answer for lost."""
    bob = clinic.lend("bob-approved", allowance=0.0)
    clinic.lend("eve-approves", role="officer")
    before = clinic.spent()
    request = bob.post("/datasets/visits/ask", json=COUNT | {"reason": "x", "epsilon": 0.05}).json()["request"]
    start, codes = threading.Barrier(5), []

    def approve():
        client = clinic.client("eve-approves")
        start.wait()
        codes.append(client.post(f"/requests/{request}/approve", json={}).status_code)

    threads = [threading.Thread(target=approve) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(codes) == [200, 409, 409, 409, 409]
    assert clinic.spent() == before + 1
    assert done(bob.get(f"/requests/{request}"))["state"] == "answered"


def test_the_keeper_leaves_what_began_while_it_was_reading(clinic, monkeypatch):
    """It used to note who was at work before it read what was begun: a request begun in between was settled."""
    clinic.lend("ann-kept")
    gateway = clinic.gateway
    row = requests.new(
        gateway.database,
        dataset="visits",
        member="ann-kept",
        kind="query",
        asked={},
        question="",
        epsilon=0.1,
        delta=0.0,
    )
    row |= {"state": "reserved", "server": gateway.presence.server}

    class Late:
        def __iter__(self):  # whoever looks now sees what was begun before the rows were read
            return iter({row["request"]})

    with gateway.database.write() as session:
        requests.add(session, row)
    gateway.asking.active.add(row["request"])
    assert requests.settle_abandoned(gateway.database, gateway.presence, Late()) == 0
    gateway.asking.active.discard(row["request"])
    assert requests.settle_abandoned(gateway.database, gateway.presence, set()) <= 1


def test_guessing_tokens_locks_nobody_out_and_fills_no_log(clinic, ann):
    """Failures from an address used to refuse tokens that count from the same address: on loopback, everybody's."""
    stranger = TestClient(clinic.app, raise_server_exceptions=False, follow_redirects=False)
    codes = [stranger.get("/me", headers={"authorization": "Bearer terrine_x"}).status_code for _ in range(60)]
    assert codes[0] == 401
    assert codes[-1] == 429
    assert {stranger.get("/me").status_code for _ in range(3)} == {429}
    done(ann.get("/me"))
    entries = done(clinic.owner.get("/log"))["entries"]
    assert sum(1 for one in entries if one["status"] == 401) <= 31


def test_half_a_character_is_refused_before_the_charge(clinic, ann):
    """A lone surrogate passed every check of keys and failed in the engine: charged for nothing."""
    before = clinic.spent()
    for told in ('{"region": ["\\ud800"]}', '{"region": ["N", "a\\udfffb"]}', '{"\\ud800": ["N"]}'):
        body = '{"sql": "SELECT region, COUNT(*) AS n FROM visits GROUP BY region", "epsilon": 0.01, "keys": KEYS}'
        body = body.replace("KEYS", told)
        answer = ann.post("/datasets/visits/ask", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 422, answer.text
    assert clinic.spent() == before


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 60_000,
        b'{"keys":' + b"[" * 3_000,
        ('{"keys":"\u2222"' + "[" * 3_000).encode("utf-16"),
        b'{"sql":"SELECT COUNT(*) FROM visits","epsilon":' + b"9" * 5_000 + b"}",
        b'{"sql":"SELECT COUNT(*) FROM visits","epsilon":1e999}',
        b'{"sql":"SELECT COUNT(*) FROM visits","epsilon":NaN}',
        b"\xff\xfe\xfa",
        b"",
    ],
    ids=["deep", "deep inside", "deep in UTF-16", "digits", "infinite", "nan", "no text", "nothing"],
)
def test_odd_bodies_are_refused(clinic, ann, body):
    answer = ann.post("/datasets/visits/ask", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (400, 422)


def test_huge_bodies_are_refused_whether_or_not_they_say_so(clinic, ann):
    assert ann.post("/datasets/visits/ask", content=b" " * 70_000).status_code == 413
    assert ann.post("/datasets/visits/ask", content=(b" " * 1_000 for _ in range(100))).status_code == 413
    assert ann.post("/datasets/visits/ask", content=b"{}", headers={"content-length": "-1"}).status_code == 413


@pytest.mark.parametrize(
    "path",
    [
        "/datasets/visits%0A", "/datasets/visits%00", "/datasets/VISITS", "/datasets/*", "/datasets/..%2fvisits",
        "/datasets//visits", "/static/..%2f..%2fserver.py", "/static/%2e%2e/server.py", "/requests/%2e%2e%2ftokens",
        "/requests/" + "0" * 32, "/requests/" + "0" * 32 + "/result",
    ],
)  # fmt: skip
def test_tricks_with_names_lead_nowhere(clinic, ann, path):
    assert ann.get(path).status_code == 404


def test_a_file_outside_the_data_folder_cannot_be_registered(clinic):
    os.symlink("/etc/passwd", clinic.folder / "data" / "passwd.csv")
    for source in ("passwd.csv", "../ledger.db", "..", "/etc/passwd", "a/../../ledger.db"):
        assert clinic.owner.post("/datasets/other", json=VISITS | {"source": source}).status_code == 422


def test_one_file_under_two_names_has_one_budget(clinic):
    """A hard link, registered as another table, used to have a budget of its own."""
    os.link(clinic.folder / "data" / "visits.parquet", clinic.folder / "data" / "linked.parquet")
    body = VISITS | {"source": "linked.parquet", "tables": {"linked": {"person": "patient_id", "rows": 5}}}
    assert clinic.owner.post("/datasets/other", json=body).status_code == 409


@pytest.mark.parametrize(
    "table",
    ["'/etc/passwd'", "read_csv('/etc/passwd')", "information_schema.tables", "gateway_tokens", "duckdb_secrets()"],
)
def test_sql_reaches_only_what_was_lent(clinic, ann, table):
    answer = ann.post("/datasets/visits/ask", json={"sql": f"SELECT COUNT(*) AS n FROM {table}", "epsilon": 0.01})
    assert answer.status_code == 422
    assert "nothing was charged" in answer.text or "registered" in answer.text or "sql:" in answer.text


def test_a_purpose_cannot_pose_as_another_requests_charge(clinic, ann):
    first = done(ann.post("/datasets/visits/ask", json=COUNT | {"epsilon": 0.011}))["request"]
    told = COUNT | {"epsilon": 0.012, "purpose": f"request {first}: mine"}
    second = done(ann.post("/datasets/visits/ask", json=told))["request"]
    with clinic.gateway.database.read() as session:
        found = {one: requests.charge_of(session, requests.find(session, one))["purpose"] for one in (first, second)}
    assert found[first] == f"request {first}:"
    assert found[second].startswith(f"request {second}: ")
    injected = COUNT | {"epsilon": 0.013, "purpose": "x\nrequest y"}
    assert ann.post("/datasets/visits/ask", json=injected).status_code == 422


def test_an_owner_of_one_data_set_gets_no_further(clinic):
    olga = clinic.lend("olga", role="owner")
    assert olga.post("/tokens", json={"member": "owner", "dataset": "*"}).status_code == 404
    assert olga.put("/members/friend", json={"role": "officer"}).status_code == 403
    assert olga.post("/datasets/mine", json=VISITS).status_code == 403
    [whole] = [one["token"] for one in done(clinic.owner.get("/tokens")) if one["dataset"] == "*"]
    assert olga.delete(f"/tokens/{whole}").status_code == 404
    assert "*" not in [one["dataset"] for one in done(olga.get("/tokens"))]


def test_tokens_and_cookies_are_not_taken_for_each_other(clinic, ann):
    browser = TestClient(clinic.app, raise_server_exceptions=False, follow_redirects=False)
    browser.post("/login", data={"token": clinic.tokens["ann"]})
    cookie = browser.cookies["terrine_session"]
    plain = TestClient(clinic.app, raise_server_exceptions=False)
    assert plain.get("/me", headers={"authorization": f"Bearer {cookie}"}).status_code in (401, 429)
    assert plain.get("/me", cookies={"terrine_session": clinic.tokens["ann"]}).status_code in (401, 429)
    bearer = {"authorization": "Bearer terrine_wrong"}  # whoever sends a header is not let in by the cookie
    assert browser.get("/me", headers=bearer).status_code in (401, 429)


def test_answers_of_others_stay_theirs(clinic, ann):
    request = done(ann.post("/datasets/visits/ask", json=COUNT | {"epsilon": 0.021}))["request"]
    mallory = clinic.lend("mallory")
    for path in (f"/requests/{request}", f"/requests/{request}/answer", f"/requests/{request}/result"):
        assert mallory.get(path).status_code == 404
    assert mallory.post(f"/requests/{request}/cancel").status_code == 404
    assert not done(mallory.post("/datasets/visits/ask", json=COUNT | {"epsilon": 0.021}))["from_archive"]
    officer = clinic.lend("nosy", role="officer")
    assert done(officer.get(f"/requests/{request}"))["answer"] is None
    assert json.dumps(done(officer.get("/requests"))).count('"rows"') == 0


def test_an_allowance_limits_delta_too(clinic):
    """Questions of epsilon 0.000001 and a large delta counted as nothing against an allowance, and spent the budget."""
    told = COUNT | {"epsilon": 1e-6, "delta": 0.12, "reason": "please"}
    greedy = clinic.lend("greedy", allowance=0.1)  # of 2: five hundredths of the delta, too
    before = clinic.spent()
    refused = greedy.post("/datasets/visits/ask", json=told)
    assert refused.status_code == 422
    assert "want at most 1e-06" in refused.text
    within = {"delta": 4e-8, "epsilon": 0.001, "keys": "private"}
    done(greedy.post("/datasets/visits/ask", json=COUNT | within))
    beyond = greedy.post("/datasets/visits/ask", json=COUNT | within | {"fresh": True})
    assert beyond.status_code == 403
    assert "delta 4e-08 is beyond what is left of your allowance (epsilon 0.099, delta 1e-08)" in beyond.text
    assert clinic.spent() == before + 1
    [mine] = done(greedy.get("/budget"))
    assert mine["allowance_delta_spent"] == pytest.approx(4e-8)
    price = done(greedy.post("/datasets/visits/price", json=COUNT | within))
    assert not price["fits_allowance"]
    assert price["allowance_delta_left"] == pytest.approx(1e-8)
    [sums] = [
        one for one in done(clinic.owner.get("/datasets/visits/spending"))["members"] if one["member"] == "greedy"
    ]
    assert sums == {"member": "greedy", "charges": 1, "epsilon": pytest.approx(0.001), "delta": pytest.approx(4e-8)}


def test_private_keys_are_not_used_up_by_one_analyst(clinic):
    """One question could take all of the delta that is set aside for private keys, at a negligible epsilon."""
    loud, quiet = clinic.lend("loud", allowance=0.2), clinic.lend("quiet", allowance=0.2)
    keys = COUNT | {"keys": "private", "epsilon": 0.01}
    assert loud.post("/datasets/visits/ask", json=keys | {"delta": 2.4e-7}).status_code == 403
    done(loud.post("/datasets/visits/ask", json=keys | {"delta": 1e-7}))
    done(quiet.post("/datasets/visits/ask", json=keys))
