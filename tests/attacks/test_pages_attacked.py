"""Attacks on the gateway's pages: scripts in words, forms of other sites, old logins, frames, caches, addresses."""

import re

import pytest
from starlette.testclient import TestClient

from terrine.gateway.pages.rendering import see
from tests.gateway import clinic as made
from tests.gateway.clinic import COUNT, VISITS, done
from tests.gateway.test_pages import browser, csrf, send


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    found = made.opened(tmp_path_factory.mktemp("attacked"))
    found.lend("ann", allowance=0.5)
    found.lend("eve", role="officer")
    yield found
    found.close()


def test_a_cookie_planted_before_the_login_is_worth_nothing_after_it(clinic):
    """Session fixation: the attacker knows the cookie with which the victim came."""
    victim = TestClient(clinic.app, follow_redirects=False)
    victim.cookies.set("terrine_session", "planted")
    victim.post("/login", data={"token": clinic.tokens["ann"]})
    attacker = TestClient(clinic.app, follow_redirects=False)
    attacker.cookies.set("terrine_session", "planted")
    assert attacker.get("/").headers["location"] == "/login"


def test_a_second_login_ends_the_first(clinic):
    ann = browser(clinic, "ann")
    before = ann.cookies["terrine_session"]
    ann.post("/login", data={"token": clinic.tokens["eve"]})
    old = TestClient(clinic.app, follow_redirects=False, cookies={"terrine_session": before})
    assert old.get("/").headers["location"] == "/login"


@pytest.mark.parametrize("address", ["//evil.example", "https://evil.example", "/\\evil.example", "%2f%2fevil.example"])
def test_a_login_leads_nowhere_else(clinic, address):
    """Open redirect: whatever the address of the login says, one lands on the first page."""
    client = TestClient(clinic.app, follow_redirects=False)
    for name in ("next", "done", "return", "url"):
        answer = client.post("/login", params={name: address}, data={"token": clinic.tokens["ann"], name: address})
        assert answer.headers["location"] == "/"
        client.cookies.clear()


def test_pages_go_to_pages_of_ours_only():
    for path in ("//evil.example", "https://evil.example", ""):
        with pytest.raises(AssertionError):
            see(path)


def test_words_in_an_address_are_never_shown(clinic):
    """A link cannot make the gateway say what its sender wants said."""
    ann = browser(clinic, "ann")
    for word in ("Your account is locked, call 555", "zz<b>zz", "approved<script>"):
        for path in ("/", "/pages/requests", "/pages/datasets/visits", "/login"):
            page = ann.get(path, params={"done": word, "said": word, "state": word, "dataset": word, "problem": word})
            assert word not in page.text
            assert "555" not in page.text


@pytest.mark.parametrize("kind", ["multipart/form-data; boundary=x", "text/plain", "application/json", ""])
def test_a_form_in_another_dress_is_refused(clinic, kind):
    """CSRF by a body that needs no preflight, with the token where only JSON would have it."""
    ann = browser(clinic, "ann")
    body = f'csrf={csrf(ann)}&sql=SELECT+COUNT(*)+FROM+visits&epsilon=0.1&x="'
    answer = ann.post("/pages/datasets/visits/ask", content=body, headers={"content-type": kind})
    assert answer.status_code in (403, 415)
    assert clinic.spent() == 0


def test_a_token_of_a_form_given_twice_is_refused(clinic):
    ann = browser(clinic, "ann")
    body = f"csrf={csrf(ann)}&csrf=x&sql=SELECT+COUNT(*)+FROM+visits&epsilon=0.1"
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert ann.post("/pages/datasets/visits/ask", content=body, headers=headers).status_code in (403, 422)
    assert clinic.spent() == 0


def test_the_token_of_a_form_is_in_no_address_and_changes_with_the_login(clinic):
    first, second = csrf(browser(clinic, "ann")), csrf(browser(clinic, "ann"))
    assert first != second
    ann = browser(clinic, "ann")
    for path in ("/", "/pages/requests", "/pages/datasets/visits/ask"):
        page = ann.get(path).text
        assert not re.search(rf'(href|src|action)="[^"]*{csrf(ann)}', page)
        assert all(
            "/pages/" in one or "/login" in one or "/logout" in one for one in re.findall('action="([^"]*)"', page)
        )
    # a form that is sent by GET has no token
    assert "csrf" not in re.search("<form[^>]*method=.get.*?</form>", ann.get("/pages/requests").text, re.DOTALL)[0]


def test_a_get_changes_nothing(clinic):
    """An image or a link cannot decide: what changes something is POST, and nothing else."""
    told = COUNT | {"epsilon": 0.9, "reason": "attack"}
    request = done(clinic.client("ann").post("/datasets/visits/ask", json=told))["request"]
    eve, owner = browser(clinic, "eve"), browser(clinic, "owner")
    for what in ("approve", "deny", "cancel", "resume"):
        for client in (eve, owner):
            assert client.get(f"/pages/requests/{request}/{what}?reason=x&csrf={csrf(client)}").status_code == 405
    for path in ("/pages/datasets/visits/close", "/pages/datasets/visits/members/ann/revoke", "/logout"):
        assert owner.get(path).status_code == 405
    assert done(owner.get(f"/requests/{request}"))["state"] == "waiting"
    done(clinic.client("ann").post(f"/requests/{request}/cancel"))


def test_nobody_frames_or_keeps_a_private_page(clinic):
    eve = browser(clinic, "eve")
    paths = ["/", "/pages/requests", "/pages/log", "/pages/datasets/visits/spending", "/datasets/visits/export"]
    for path in [*paths, "/pages/datasets/nowhere", "/pages/requests/" + "0" * 32, "/nowhere"]:
        headers = eve.get(path, headers={"accept": "text/html"}).headers
        assert headers["cache-control"] == "no-store", path
        assert headers["x-frame-options"] == "DENY", path
        assert "frame-ancestors 'none'" in headers["content-security-policy"], path
        assert "etag" not in headers, path
    assert "no-store" not in eve.get("/static/style.css").headers["cache-control"]


@pytest.mark.parametrize("name", ["..%2fserver.py", "../server.py", "%2e%2e/server.py", "style.css%00", "style.css/"])
def test_styles_lead_to_no_other_file(clinic, name):
    assert browser(clinic, "ann").get(f"/static/{name}").status_code == 404


def test_another_analysts_request_is_as_one_that_is_not_there(clinic):
    told = COUNT | {"epsilon": 0.8, "reason": "mine"}
    request = done(clinic.client("ann").post("/datasets/visits/ask", json=told))["request"]
    clinic.lend("mallory")
    mallory = browser(clinic, "mallory")
    there, nowhere = mallory.get(f"/pages/requests/{request}"), mallory.get("/pages/requests/" + "0" * 32)
    assert (there.status_code, there.text) == (nowhere.status_code, nowhere.text)
    for what in ("cancel", "resume"):
        assert send(mallory, f"/pages/requests/{request}/{what}").status_code == 404
    assert done(clinic.owner.get(f"/requests/{request}"))["state"] == "waiting"
    done(clinic.client("ann").post(f"/requests/{request}/cancel"))


def test_a_question_cannot_hide_from_whoever_decides(clinic):
    """Trojan source: characters that turn the line round, or are not seen, and what is pushed out of sight."""
    sql = "SELECT COUNT(*) AS n FROM visits WHERE region = 'N\u202e\u2066 S\u200b'" + "\n" * 500 + " AND cost > 1"
    told = {"sql": sql, "epsilon": 0.7, "reason": "plain"}
    request = done(clinic.client("ann").post("/datasets/visits/ask", json=told))["request"]
    eve = browser(clinic, "eve")
    page = eve.get(f"/pages/requests/{request}").text
    for hidden in ("\u202e", "\u2066", "\u200b"):
        assert hidden not in page
        assert hidden not in eve.get("/pages/requests").text
        assert f"[U+{ord(hidden):04X}]" in page
    assert "cost &gt; 1" in page
    assert 'class="whole"' in page  # not in a box that scrolls
    done(clinic.client("ann").post(f"/requests/{request}/cancel"))


def test_one_owner_cannot_reach_another_owners_tokens(tmp_path):
    """The address names my data set, the token belongs to another one."""
    clinic = made.opened(tmp_path)
    made.write_visits(tmp_path / "data", "others")
    other = VISITS | {"source": "others.parquet", "tables": {"others": {"person": "patient_id", "rows": 5}}}
    done(clinic.owner.post("/datasets/others", json=other))
    clinic.lend("ann")
    clinic.lend("olaf", role="owner", dataset="others")
    [token] = [one for one in done(clinic.owner.get("/tokens")) if one["member"] == "ann"]
    olaf = browser(clinic, "olaf")
    assert send(olaf, f"/pages/datasets/others/tokens/{token['token']}/revoke").status_code == 404
    assert send(olaf, "/pages/datasets/others/tokens", member="ann", days="9").status_code == 422
    assert send(olaf, "/pages/register", name="mine").status_code == 403
    people = olaf.get("/pages/datasets/others/members").text
    assert ">ann<" not in people
    assert ">owner of everything<" not in people
    assert "visits" not in olaf.get("/").text
    assert "visits" not in olaf.get("/pages/requests").text
    done(clinic.client("ann").get("/me"))
    clinic.close()
