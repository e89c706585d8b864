"""The authorisation matrix, made from the routes: a new one cannot be forgotten."""

import itertools

import pytest
from fastapi import APIRouter
from starlette.testclient import TestClient

from terrine.gateway.policy import ROLES, GuardedRoute, Where, allow
from tests.gateway import clinic as made
from tests.gateway.clinic import COUNT, VISITS, done, write_visits

OTHER = VISITS | {"source": "others.parquet", "tables": {"others": {"person": "patient_id", "rows": 5}}}
KINDS = ("none", "nobody", "expired", "revoked", "wrong data set", "whole", "right")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two data sets, and a token of every kind for every role; a request of the right analyst waits."""
    now = [1_800_000_000.0]
    folder = tmp_path_factory.mktemp("world")
    write_visits(folder / "data", "others")
    found = made.Clinic(folder, {"limits": {"per_minute": 10**6, "failures_per_minute": 10**6}}, clock=lambda: now[0])
    done(found.owner.post("/datasets/visits", json=VISITS))
    done(found.owner.post("/datasets/others", json=OTHER))
    found.tokens["none"] = ""
    found.tokens["nobody"] = "terrine_" + "A" * 43
    for role, dataset in itertools.product(ROLES, ("visits", "others")):
        name = f"{role}-{dataset}"
        found.lend(name, role, dataset, allowance=0.0)
        for kind in ("expired", "revoked"):
            days = 0.001 if kind == "expired" else 90
            told = {"member": name, "dataset": dataset, "days": days}
            token = done(found.owner.post("/tokens", json=told))
            found.tokens[f"{kind} {name}"] = token["secret"]
            if kind == "revoked":
                done(found.owner.delete(f"/tokens/{token['token']}"))
    done(found.owner.put("/members/watcher", json={"role": "officer"}))
    found.tokens["watcher"] = done(found.owner.post("/tokens", json={"member": "watcher", "dataset": "*"}))["secret"]
    now[0] += 3_600.0
    waits = found.client("analyst-visits").post("/datasets/visits/ask", json=COUNT | {"reason": "matrix"})
    found.request = waits.json()["request"]
    yield found
    found.close()


def routes():
    from terrine.gateway.server import ROUTERS

    return [
        (method, route) for router in ROUTERS for route in router.routes for method in sorted(route.methods - {"HEAD"})
    ]


ALL_ROUTES = routes()


def token_of(role, kind):
    name = f"{role}-visits"
    return {
        "none": "none",
        "nobody": "nobody",
        "expired": f"expired {name}",
        "revoked": f"revoked {name}",
        "wrong data set": f"{role}-others",
        "whole": {"owner": "owner", "officer": "watcher", "analyst": ""}[role],
        "right": name,
    }[kind]


def wanted(route, role, kind):
    """Which statuses a caller may get: refused ones by number, or None for 'let in'."""
    policy = route.policy
    if policy.where is Where.OPEN:
        return None
    if kind in ("none", "nobody", "expired", "revoked"):
        return {303} if policy.page and route.path != "/login" else {401}
    if policy.where is Where.WHOLE and kind != "whole":
        return {403}
    if policy.where in (Where.DATASET, Where.REQUEST) and kind == "wrong data set":
        return {404}
    return None if role in policy.roles else {403}


@pytest.mark.parametrize(("method", "route"), ALL_ROUTES, ids=[f"{m} {r.path}" for m, r in ALL_ROUTES])
def test_a_route_lets_in_whom_its_policy_names_and_nobody_else(world, method, route):
    path = route.path.replace("{name}", "visits").replace("{request}", world.request).replace("{member}", "zoe")
    path = path.replace("{token}", "0" * 32).replace("{file}", "nothing.css")
    assert "{" not in path, "a new path parameter: say here what stands for it"
    for role, kind in itertools.product(ROLES, KINDS):
        if not (name := token_of(role, kind)):
            continue
        headers = {"authorization": f"Bearer {world.tokens[name]}"} if kind != "none" else {}
        client = TestClient(world.app, headers=headers, raise_server_exceptions=False, follow_redirects=False)
        # a body that no handler takes: who is let in gets 422 at the most, and changes nothing
        told = {"json": {"not": "a field"}} if method in ("POST", "PUT") else {}
        if method == "DELETE" and wanted(route, role, kind) is None:
            continue  # it would do it
        if route.path.endswith("/cancel") and wanted(route, role, kind) is None:
            continue
        status = client.request(method, path, **told).status_code
        refused = wanted(route, role, kind)
        if refused is not None:
            assert status in refused, (role, kind, status)
        else:
            assert status not in (401, 403, 500), (role, kind, status)


def test_every_route_is_guarded_and_in_the_table(world):
    assert {id(one) for one in world.app.routes} == {id(route) for _, route in ALL_ROUTES}
    assert all(isinstance(one, GuardedRoute) for one in world.app.routes)


def test_a_route_without_a_policy_cannot_be_made():
    router = APIRouter(route_class=GuardedRoute)
    with pytest.raises(TypeError, match="no policy"):

        @router.get("/forgotten")
        def forgotten() -> None: ...


def test_a_policy_names_known_roles():
    with pytest.raises(AssertionError):
        allow("admin")


def test_what_is_elsewhere_answers_as_what_is_not_there(world):
    ann = world.client("analyst-visits")
    there = ann.get("/datasets/others")
    nowhere = ann.get("/datasets/nowhere")
    assert (there.status_code, there.json()) == (nowhere.status_code, nowhere.json())
