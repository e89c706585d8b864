"""Pages without a browser: what roles see, CSRF, cookies, headers, escaping; every form does what the API does."""

import re

import pytest
from starlette.testclient import TestClient

from terrine.gateway.pages import wording
from tests.gateway import clinic as made
from tests.gateway.clinic import COUNT, VISITS, done, write_visits

HOSTILE = """"><script>alert(1)</script><img src=x onerror=alert(2)>'"""


def browser(clinic, name):
    """A client that is logged in as `name`, as a browser is."""
    client = TestClient(clinic.app, raise_server_exceptions=False, follow_redirects=False)
    assert client.post("/login", data={"token": clinic.tokens[name]}).status_code == 303
    return client


def csrf(client):
    return re.search('name="csrf" value="([0-9a-f]{64})"', client.get("/").text)[1]


def send(client, path, **fields):
    return client.post(path, data=fields | {"csrf": csrf(client)})


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    """One clinic for tests that only read."""
    found = made.opened(tmp_path_factory.mktemp("pages"))
    found.lend("ann")
    found.lend("bob", allowance=0.0)
    found.lend("eve", role="officer")
    done(found.client("ann").post("/datasets/visits/ask", json=COUNT | {"purpose": "weekly"}))
    told = COUNT | {"reason": "for the yearly report"}
    found.waits = found.client("bob").post("/datasets/visits/ask", json=told).json()["request"]
    yield found
    found.close()


FOREIGN = r"""<[^>]+\s(style|on\w+)=|<script(?! src="/static/)|<style|https?://"""
EVERYBODY = ("/", "/pages/datasets/visits", "/pages/requests")
WATCHERS = ("/pages/datasets/visits/spending", "/pages/datasets/visits/members", "/pages/log")


@pytest.mark.parametrize("name", ["ann", "eve", "owner"])
def test_a_role_sees_what_it_may_and_is_not_offered_the_rest(people, name):
    client = browser(people, name)
    pages = {path: client.get(path) for path in (*EVERYBODY, *WATCHERS)}
    for path in EVERYBODY:
        assert pages[path].status_code == 200, path
    for path in WATCHERS:
        assert pages[path].status_code == (403 if name == "ann" else 200), path
    assert client.get("/pages/datasets/visits/ask").status_code == (200 if name == "ann" else 403)
    assert client.get("/pages/register").status_code == (200 if name == "owner" else 403)
    assert ("/pages/log" in pages["/"].text) == (name != "ann")
    assert ("/ask" in pages["/"].text) == (name == "ann")
    assert ("Take back" in pages["/pages/datasets/visits/members"].text) == (name == "owner")


def test_an_analyst_sees_only_their_own_requests(people):
    ann, eve = browser(people, "ann"), browser(people, "eve")
    assert "bob" not in ann.get("/pages/requests").text
    assert ann.get(f"/pages/requests/{people.waits}").status_code == 404
    assert "bob" in eve.get("/pages/requests").text
    seen = eve.get(f"/pages/requests/{people.waits}").text
    assert "for the yearly report" in seen
    assert "Approve and charge 0.1" in seen
    assert "Your decision" not in browser(people, "bob").get(f"/pages/requests/{people.waits}").text


def test_answers_are_shown_to_their_analyst_alone(people):
    [mine] = done(people.client("ann").get("/requests"))
    assert "half-width" not in (text := browser(people, "ann").get(f"/pages/requests/{mine['request']}").text)
    assert "What was answered, with noise" in text
    for name in ("eve", "owner"):
        assert "What was answered" not in browser(people, name).get(f"/pages/requests/{mine['request']}").text


def test_without_a_login_pages_lead_to_it(people):
    client = TestClient(people.app, follow_redirects=False)
    for path in (*EVERYBODY, *WATCHERS, f"/pages/requests/{people.waits}"):
        answer = client.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login"), path
        assert "visits" not in answer.text


def test_pages_are_private_and_strict(people):
    client = browser(people, "owner")
    for path in (*EVERYBODY, *WATCHERS, "/pages/register", "/login"):
        answer = client.get(path)
        rule = answer.headers["content-security-policy"]
        assert "unsafe" not in rule
        assert "frame-ancestors 'none'" in rule
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-frame-options"] == "DENY"
        assert not re.search(r"""<[^>]+\s(style|on\w+)=|<script(?! src="/static/)|<style|https?://""", answer.text), (
            path
        )


def test_the_cookie_is_for_this_site_alone(people):
    client = TestClient(people.app, follow_redirects=False)
    answer = client.post("/login", data={"token": people.tokens["ann"]})
    said = answer.headers["set-cookie"].lower()
    assert "httponly" in said
    assert "samesite=strict" in said
    assert "secure" not in said  # loopback without TLS
    assert answer.headers["location"] == "/"


def every_form():
    from terrine.gateway import pages

    found = [one.path for one in pages.router.routes if "POST" in one.methods]
    return [one for one in found if one != "/login"]


@pytest.mark.parametrize("path", every_form())
def test_every_form_wants_the_token_of_its_login(people, path):
    """Made from the routes: a new form cannot be forgotten."""
    place = path.replace("{name}", "visits").replace("{request}", people.waits).replace("{member}", "ann")
    place = place.replace("{token}", "0" * 32)
    clients = {name: browser(people, name) for name in ("ann", "bob", "eve", "owner")}
    for name, client in clients.items():
        fields = {"reason": "x", "name": "new", "member": "ann", "role": "analyst", "confirm": "visits"}
        assert client.post(place, data=fields).status_code == 403, name
        other = csrf(clients["eve" if name != "eve" else "ann"])
        assert client.post(place, data=fields | {"csrf": other}).status_code == 403, name
        assert client.post(place, json=fields).status_code == 403, name
        assert client.post(place, data=fields | {"csrf": ""}).status_code == 403, name
        assert client.get("/").status_code == 200  # still logged in
    assert people.spent() == 1
    assert done(people.owner.get(f"/requests/{people.waits}"))["state"] == "waiting"
    members = {one["member"]: one for one in done(people.owner.get("/datasets/visits/members"))}
    assert members["ann"]["revoked"] == 0


QUESTION = {"sql": COUNT["sql"], "epsilon": "0.1", "keys": "region = N, S"}


def test_the_playground_prices_tries_and_asks(clinic):
    clinic.lend("ann")
    ann = browser(clinic, "ann")
    priced = send(ann, "/pages/datasets/visits/price", **QUESTION)
    assert "±&nbsp;150.4" in priced.text
    assert "52.5%" in priced.text  # how sure anyone can become, at epsilon 0.1
    part = ann.post(
        "/pages/datasets/visits/price", data=QUESTION | {"csrf": csrf(ann)}, headers={"x-fragment": "quote"}
    )
    assert "<html" not in part.text
    assert "±&nbsp;150.4" in part.text
    assert "Made-up rows" in send(ann, "/pages/datasets/visits/mock", **QUESTION).text
    assert clinic.spent() == 0
    asked = send(ann, "/pages/datasets/visits/ask", **QUESTION, purpose="weekly")
    assert asked.status_code == 303
    shown = ann.get(asked.headers["location"])
    assert "Charged, then answered" in shown.text
    assert "What was answered, with noise" in shown.text
    assert clinic.spent() == 1
    again = send(ann, "/pages/datasets/visits/ask", **QUESTION)
    assert "Nothing was charged now" in ann.get(again.headers["location"]).text
    assert clinic.spent() == 1
    assert send(ann, "/pages/datasets/visits/ask", **QUESTION, fresh="yes").status_code == 303
    assert clinic.spent() == 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"sql": "SELECT * FROM visits"}, "Not done"),
        ({"sql": ""}, "sql"),
        ({"epsilon": "much"}, "epsilon: is no number"),
        ({"epsilon": "-1"}, "epsilon"),
        ({"epsilon": "nan"}, "epsilon"),
        ({"keys": "region N S"}, "region = N, S"),
        ({"bounds": "cost = low, high"}, "cost = 0, 10000"),
        ({"bounds": "cost = 1"}, "cost = 0, 10000"),
        ({"bins": "cost = a"}, "want numbers"),
    ],
)
def test_what_is_wrong_with_a_question_is_said_beside_it(shared, fields, said):
    if "wrong-ann" not in shared.tokens:
        shared.lend("wrong-ann")
    ann = browser(shared, "wrong-ann")
    answer = send(ann, "/pages/datasets/visits/ask", **QUESTION | fields)
    assert answer.status_code == 422
    assert said in answer.text
    assert fields.get("sql", "SELECT region") in answer.text.replace("&lt;", "<")  # what was written is kept
    assert shared.spent() == 0


def test_beyond_the_allowance_it_waits_and_somebody_decides(clinic):
    clinic.lend("bob", allowance=0.0)
    clinic.lend("eve", role="officer")
    bob, eve = browser(clinic, "bob"), browser(clinic, "eve")
    refused = send(bob, "/pages/datasets/visits/ask", **QUESTION)
    assert refused.status_code == 403
    assert "allowance" in refused.text
    waits = send(bob, "/pages/datasets/visits/ask", **QUESTION, reason="yearly report").headers["location"]
    assert "waits for a decision" in bob.get(waits).text
    assert "1 request waits for your decision" in eve.get("/").text
    place = waits.partition("?")[0]
    unsaid = send(eve, f"{place}/approve", reason="  ")
    assert unsaid.status_code == 422
    assert "want a reason" in unsaid.text
    assert clinic.spent() == 0
    assert send(eve, f"{place}/approve", reason="agreed with the board").status_code == 303
    assert clinic.spent() == 1
    assert "agreed with the board" in bob.get(place).text
    assert "What was answered" in bob.get(place).text
    assert send(eve, f"{place}/deny", reason="changed my mind").status_code == 409
    second = send(bob, "/pages/datasets/visits/ask", **QUESTION | {"epsilon": "0.2"}, reason="more").headers["location"]
    assert send(eve, f"{second.partition('?')[0]}/deny", reason="not needed").status_code == 303
    third = send(bob, "/pages/datasets/visits/ask", **QUESTION | {"epsilon": "0.3"}, reason="more").headers["location"]
    assert send(bob, f"{third.partition('?')[0]}/cancel").status_code == 303
    assert clinic.spent() == 1


def test_the_owner_registers_lends_and_revokes(tmp_path):
    clinic = made.Clinic(tmp_path)
    write_visits(tmp_path / "data", "bloods")
    owner = browser(clinic, "owner")
    told = {"name": "bloods", "source": "bloods.parquet", "epsilon": "2", "delta": "1e-6", "table1": "bloods"}
    told |= {"person1": "patient_id", "rows1": "5", "about": "Blood values"}
    assert "bloods.parquet" in owner.get("/pages/register").text
    wrong = send(owner, "/pages/register", **told | {"person1": "nobody"})
    assert wrong.status_code == 422
    assert 'value="Blood values"' in wrong.text
    assert send(owner, "/pages/register", **told | {"name": "Bad Name"}).status_code == 422
    assert send(owner, "/pages/register", **told | {"source": "../../etc/passwd"}).status_code == 422
    assert send(owner, "/pages/register", **told).headers["location"] == "/pages/datasets/bloods?done=registered"
    members = "/pages/datasets/bloods/members"
    assert send(owner, members, member="ann", role="analyst", allowance="0.5").status_code == 303
    assert send(owner, members, member="ann", role="officer").status_code == 409
    assert send(owner, members, member="<b>", role="analyst").status_code == 422
    issued = send(owner, "/pages/datasets/bloods/tokens", member="ann", days="3")
    clinic.tokens["ann"] = re.search("terrine_[A-Za-z0-9_-]{43}", issued.text)[0]
    assert clinic.tokens["ann"] not in owner.get(members).text
    ann = browser(clinic, "ann")
    assert "0.5" in ann.get("/pages/datasets/bloods").text
    [token] = [one for one in done(clinic.owner.get("/tokens")) if one["member"] == "ann"]
    assert send(owner, f"/pages/datasets/bloods/tokens/{token['token']}/revoke").status_code == 303
    assert ann.get("/").headers["location"] == "/login"
    assert send(owner, f"{members}/ann/revoke").status_code == 303
    assert send(owner, "/pages/datasets/bloods/close", confirm="blood").status_code == 422
    assert send(owner, "/pages/datasets/bloods/close", confirm="bloods").status_code == 303
    assert "bloods" not in owner.get("/").text
    clinic.close()


def test_hostile_words_stay_words(tmp_path):
    clinic = made.Clinic(tmp_path)
    name = "x<script>alert(3)<"
    write_visits(tmp_path / "data", name)
    (tmp_path / "data" / f"{name}.parquet").rename(tmp_path / "data" / "plain.parquet")
    done(clinic.owner.post("/datasets/visits", json=VISITS | {"about": HOSTILE}))
    clinic.lend("ann", allowance=0.0)
    clinic.lend("eve", role="officer")
    ann, eve = browser(clinic, "ann"), browser(clinic, "eve")
    sql = f"SELECT COUNT(*) AS n FROM visits WHERE region = '{HOSTILE.replace(chr(39), '')}'"
    asked = send(ann, "/pages/datasets/visits/ask", sql=sql, epsilon="0.1", purpose=HOSTILE, reason=HOSTILE)
    assert asked.status_code == 303
    place = asked.headers["location"].partition("?")[0]
    assert send(eve, f"{place}/approve", reason=HOSTILE).status_code == 303
    wrong = send(ann, "/pages/datasets/visits/ask", sql=HOSTILE, epsilon=HOSTILE, bounds=HOSTILE, keys=HOSTILE)
    pages = [wrong.text, ann.get(place).text, ann.get("/pages/datasets/visits/ask").text, ann.get("/").text]
    pages += [eve.get(one).text for one in ("/", place, "/pages/requests", *WATCHERS, "/pages/datasets/visits")]
    pages += [ann.get(f"/pages/requests?state={HOSTILE}&dataset={HOSTILE}&done={HOSTILE}").text]
    pages += [browser(clinic, "owner").get(f"/{HOSTILE}", headers={"accept": "text/html"}).text]
    for page in pages:
        assert "<script>" not in page
        assert "<img" not in page
        assert "onerror=alert(2)>" not in page
    assert sum("&lt;script&gt;" in page for page in pages) >= 5
    clinic.close()


def test_numbers_in_words_are_bounds():
    assert wording.epsilon(0.1) == "0.1"
    assert wording.epsilon(0.100001) == "0.1001"
    assert wording.left(1.8999996) == "1.899"
    assert wording.surest(0.0) == "50%"
    assert wording.surest(1.0) == "73.2%"
    assert wording.surest(8.0) == "99.967%"
    assert wording.percent(0.001) == "1%"
    assert wording.percent(2.0) == "100%"
    assert wording.epsilon(float("inf")) == "unlimited"
