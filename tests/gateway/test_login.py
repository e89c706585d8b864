"""Tokens, logins, cookies, CSRF, and what every answer's headers say."""

import re

import pytest
from starlette.testclient import TestClient

from terrine.gateway import schema, tokens
from tests.gateway.clinic import COUNT, done


def browser(clinic):
    return TestClient(clinic.app, raise_server_exceptions=False, follow_redirects=False)


def logged_in(clinic, name):
    client = browser(clinic)
    answer = client.post("/login", data={"token": clinic.tokens[name]})
    assert answer.status_code == 303
    return client, answer


def test_a_login_is_a_cookie_that_scripts_and_other_sites_cannot_use(shared):
    shared.lend("cookie-ann")
    client, answer = logged_in(shared, "cookie-ann")
    said = answer.headers["set-cookie"].lower()
    assert "httponly" in said
    assert "samesite=strict" in said
    assert done(client.get("/me"))["member"] == "cookie-ann"
    page = client.get("/")
    assert page.status_code == 200
    assert "visits" in page.text
    token = re.search('name="csrf" value="([0-9a-f]{64})"', page.text)[1]
    assert client.post("/datasets/visits/price", json=COUNT).status_code == 403
    other = tokens.csrf_of("somebody else's cookie")
    assert client.post("/datasets/visits/price", json=COUNT, headers={"x-csrf-token": other}).status_code == 403
    done(client.post("/datasets/visits/price", json=COUNT, headers={"x-csrf-token": token}))
    cookie = client.cookies["terrine_session"]
    assert client.post("/logout", data={"csrf": token}).status_code == 303
    client.cookies.set("terrine_session", cookie)
    assert client.get("/me").status_code == 401


def test_revoking_a_token_ends_its_logins(shared):
    shared.lend("gone-ann")
    client, _ = logged_in(shared, "gone-ann")
    [mine] = [one for one in done(shared.owner.get("/tokens")) if one["member"] == "gone-ann"]
    done(shared.owner.delete(f"/tokens/{mine['token']}"))
    assert client.get("/me").status_code == 401


def test_taking_a_loan_back_ends_its_tokens(shared):
    bob = shared.lend("gone-bob")
    done(bob.get("/me"))
    done(shared.owner.delete("/datasets/visits/members/gone-bob"))
    assert bob.get("/me").status_code == 401


def test_secrets_are_kept_as_hashes_and_nowhere_else(shared):
    shared.lend("hashed-ann")
    client, _ = logged_in(shared, "hashed-ann")
    with shared.gateway.database.read() as session:
        rows = [session.execute(table.select()).all() for table in (schema.TOKENS, schema.SESSIONS, schema.LOG)]
    assert shared.tokens["hashed-ann"] not in str(rows)
    assert client.cookies["terrine_session"] not in str(rows)


def test_logins_from_elsewhere_are_refused(shared):
    token = {"token": shared.tokens["owner"]}
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert browser(shared).post("/login", data=token, headers=headers).status_code == 403
    assert browser(shared).post("/login", json=token).status_code == 415


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Basic dXNlcjpwYXNz", "bearer x", "Bearer " + "x" * 5_000, "Bearer \u00e4"]
)
def test_odd_headers_are_refused(shared, header):
    answer = browser(shared).get("/me", headers={"authorization": header.encode("latin-1")})
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_every_answer_is_told_to_stay_private(shared):
    for path in ("/health", "/login", "/me", "/nowhere"):
        headers = browser(shared).get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_other_host_names_are_refused(shared):
    assert browser(shared).get("/health", headers={"host": "evil.example"}).status_code == 400


def test_the_first_owner_is_made_once(shared):
    with pytest.raises(Exception, match="first owner already"):
        shared.gateway.first_token()


def test_a_name_has_one_role(shared):
    shared.lend("one-role")
    told = {"role": "officer", "allowance": 0}
    assert shared.owner.put("/datasets/visits/members/one-role", json=told).status_code == 409
    assert shared.owner.put("/members/one-role", json=told).status_code == 409


def test_a_token_from_before_a_loan_was_taken_back_stays_dead(clinic):
    """Lent again, a data set was open to the token whose leak was the reason to take it back."""
    old = clinic.lend("leaky")
    done(old.get("/budget"))
    done(clinic.owner.delete("/datasets/visits/members/leaky"))
    new = clinic.lend("leaky")
    assert old.get("/budget").status_code == 401
    done(new.get("/budget"))
