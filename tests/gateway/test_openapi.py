"""The OpenAPI document is complete: what is not in it does not happen, whatever is sent. Fuzzed in process, bounded."""

import datetime
import json

import httpx
import pytest

schemathesis = pytest.importorskip("schemathesis")

from hypothesis import HealthCheck, Phase, assume, given, settings  # noqa: E402
from hypothesis.errors import Unsatisfiable  # noqa: E402
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.specs.openapi import checks  # noqa: E402

from tests.gateway import clinic as made  # noqa: E402
from tests.gateway.clinic import COUNT, VISITS, done, write_visits  # noqa: E402

_STATE: dict = {}
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.missing_required_header,
]


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzzed")
    write_visits(folder / "data", "others")
    limits = {"per_minute": 10**9, "failures_per_minute": 10**9}
    found = made.Clinic(folder, {"limits": limits})
    done(found.owner.post("/datasets/visits", json=VISITS))
    ann = found.lend("ann", allowance=0.5)
    _STATE["requests"] = [ann.post("/datasets/visits/ask", json=COUNT | {"reason": "x", "epsilon": 0.9}).json()]
    found.lend("eve", role="officer")
    _STATE["clinic"] = found
    document = json.loads(json.dumps(found.app.openapi()))
    there = _STATE["there"] = {"name": "visits", "request": _STATE["requests"][0]["request"]}
    for path, operations in document["paths"].items():
        for told in operations.values():
            told.pop("security", None)  # every call below has a token: the matrix of test_policy tries all others
            for parameter in told.get("parameters", []):
                if parameter["name"] in there and path != "/datasets/{name}":
                    parameter["schema"] = {"enum": [there[parameter["name"]]]}
    yield schemathesis.openapi.from_dict(document)
    found.close()


def test_the_document_is_there_and_says_who_may_do_what(api):
    document = _STATE["clinic"].plain.get("/openapi.json").json()
    assert document["info"]["title"] == "Terrine gateway"
    assert set(document["paths"]) >= {
        "/health",
        "/datasets",
        "/datasets/{name}/price",
        "/datasets/{name}/ask",
        "/budget",
    }
    for path, operations in document["paths"].items():
        for method, told in operations.items():
            if path != "/health":
                assert told["security"], (method, path)
                assert "401" in told["responses"], (method, path)


@pytest.mark.parametrize(
    ("mode", "examples"),
    [
        pytest.param(GenerationMode.POSITIVE, 2, id="fitting"),
        pytest.param(GenerationMode.POSITIVE, 60, id="fitting, more", marks=pytest.mark.slow),
        pytest.param(GenerationMode.NEGATIVE, 60, id="unfitting", marks=pytest.mark.slow),
    ],
)
def test_what_is_answered_is_what_is_declared(api, mode, examples):
    found = []
    bounded = settings(
        phases=[Phase.generate],
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
        derandomize=True,
    )
    for one in api.get_all_operations():
        operation = one.ok()
        run = bounded(given(case=operation.as_strategy(generation_mode=mode))(_try))
        try:
            run()
        except Unsatisfiable:  # nothing that does not fit: there is nothing to send
            continue
        except (Exception, ExceptionGroup) as error:
            found.append(f"{operation.label}: {error}")
    assert not found, "\n\n".join(found)


def _try(case):
    clinic, there, given_path = _STATE["clinic"], _STATE["there"], case.path_parameters or {}
    if case.path != "/datasets/{name}":  # elsewhere what is asked for exists, so that the rest of the call is judged
        assume(all(given_path[name] == there[name] for name in given_path.keys() & there.keys()))
    for name in ("owner", "ann", "eve"):
        told = case.as_transport_kwargs(base_url="http://testserver")
        told["headers"] = dict(told.get("headers") or {}) | {"authorization": f"Bearer {clinic.tokens[name]}"}
        told = {key: value for key, value in told.items() if value is not None and key != "cookies"}
        got = clinic.plain.request(**told)
        request = httpx.Request(told["method"], str(got.url), headers=told["headers"])
        answer = httpx.Response(got.status_code, headers=dict(got.headers), content=got.content, request=request)
        answer.elapsed = datetime.timedelta(0)
        case.validate_response(answer, checks=CHECKS)
