"""The client: asks, checks what arrives, and refuses what does not follow the protocol."""

import json

import httpx
import pytest

from terrine.client import BeyondAllowance, Gateway, GatewayRefused
from terrine.client import gateway as remote
from terrine.errors import InvalidArgument
from terrine.verify import signing
from tests.gateway import clinic as made
from tests.gateway.clinic import COUNT, done

SQL, KEYS = COUNT["sql"], COUNT["keys"]


class Bridge(httpx.BaseTransport):
    """Hands requests to the application in this process; `change` may lie about what it answers."""

    def __init__(self, client, change=None):
        self.client, self.change = client, change

    def handle_request(self, request):
        path = request.url.raw_path.decode()
        answer = self.client.request(request.method, path, content=request.read(), headers=dict(request.headers))
        lies = self.change is not None and path.endswith("/ask")
        body = answer.content if not lies else json.dumps(self.change(answer.json())).encode()
        return httpx.Response(answer.status_code, content=body)


@pytest.fixture(scope="module")
def signed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("signed")
    signing.new_key(folder / "gateway.key")
    found = made.opened(folder, key=folder / "gateway.key")
    yield found
    found.close()


def gateway_of(clinic, name, change=None, **options):
    if name not in clinic.tokens:
        clinic.lend(name, allowance=options.pop("allowance", 1.0))
    clinic.plain.headers["host"] = "testserver"
    bridge = Bridge(clinic.plain, change)
    return Gateway("https://testserver", clinic.tokens[name], transport=bridge, **options)


def test_an_analyst_sees_prices_asks_and_is_answered_from_the_archive(signed):
    gateway = gateway_of(signed, "ann", signed_by=signed.folder / "gateway.key.pub")
    assert [one["dataset"] for one in gateway.datasets()] == ["visits"]
    assert gateway.price(SQL, epsilon=0.1, keys=KEYS).epsilon == pytest.approx(0.1)
    assert gateway.mock(SQL, epsilon=0.1, keys=KEYS)[0]["region"] == "N"
    answer = gateway.ask(SQL, epsilon=0.1, keys=KEYS, purpose="a look")
    assert answer.signed
    assert answer.table[0]["region"] == "N"
    assert abs(answer.table[0]["n"] - 400) < 2_000
    assert (answer.cost, answer.epsilon) == (pytest.approx(0.1), pytest.approx(0.1))
    again = gateway.ask(SQL + "  ", epsilon=0.1, keys=KEYS)
    assert again.from_archive
    assert (again.cost, again.rows, again.charge) == (0.0, answer.rows, answer.charge)
    assert gateway.budget()[0]["allowance_spent"] == pytest.approx(0.1)
    assert [one.state for one in gateway.requests()] == ["answered"]
    assert gateway.collect(answer.request).rows == answer.rows


def test_gaussian_noise_and_private_keys_are_priced_anew(signed):
    gateway = gateway_of(signed, "gauss", allowance=5.0)
    gateway.ask(SQL, epsilon=0.1, delta=1e-7, keys=KEYS)
    gateway.ask(SQL, epsilon=0.1, keys="private")
    gateway.ask("SELECT AVG(cost) AS mean FROM visits", epsilon=0.1, delta=1e-7, bounds={"cost": [0, 500]})


def test_beyond_the_allowance_the_client_says_what_waits(signed):
    gateway = gateway_of(signed, "poor", allowance=0.0)
    with pytest.raises(GatewayRefused, match="allowance"):
        gateway.ask(SQL, epsilon=0.1, keys=KEYS)
    with pytest.raises(BeyondAllowance) as waits:
        gateway.ask(SQL, epsilon=0.1, keys=KEYS, reason="please")
    with pytest.raises(GatewayRefused, match="waiting"):
        gateway.collect(waits.value.request)
    done(signed.owner.post(f"/requests/{waits.value.request}/approve", json={}))
    assert gateway.collect(waits.value.request).epsilon == pytest.approx(0.1)


def at(record, path, value):
    *way, last = path.split(".")
    place = record
    for one in way:
        place = place[one]
    place[last] = value
    return record


LIES = {
    "a lower price": ("proof.price.epsilon", 0.01),
    "a larger delta": ("proof.price.delta", 0.5),
    "another event": ("proof.event", {"terrine-events": 1, "event": {"kind": "PureDP", "epsilon": 0.1}}),
    "no event": ("proof.event", {}),
    "another head": ("proof.head", "0" * 64),
    "an edited charge": ("proof.charge.purpose", "something else"),
    "another analyst": ("member", "bob"),
    "another request": ("request", "0" * 32),
    "another question": ("asked.epsilon", 0.2),
    "no proof": ("proof", None),
    "rows of another width": ("answer.rows", [["N"]]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_about_an_answer_is_refused(signed, lie):
    gateway = gateway_of(signed, "victim", change=lambda record: at(record, *LIES[lie]))
    with pytest.raises((InvalidArgument, GatewayRefused)):
        gateway.ask(SQL, epsilon=0.1, keys=KEYS)


def test_a_changed_number_is_found_by_the_signature(signed):
    gateway = gateway_of(
        signed,
        "numbers",
        change=lambda record: at(record, "answer.rows", [["N", 1, 1.0], ["S", 1, 1.0]]),
        signed_by=signed.folder / "gateway.key.pub",
    )
    with pytest.raises(InvalidArgument, match="signature"):
        gateway.ask(SQL, epsilon=0.1, keys=KEYS)


def test_an_unsigned_answer_is_refused_where_a_key_is_given(signed):
    gateway = gateway_of(
        signed,
        "bare",
        change=lambda record: at(record, "signature", None),
        signed_by=signed.folder / "gateway.key.pub",
    )
    with pytest.raises(InvalidArgument, match="not signed"):
        gateway.ask(SQL, epsilon=0.1, keys=KEYS)


def test_a_token_is_never_sent_in_the_clear():
    with pytest.raises(InvalidArgument, match="https"):
        Gateway("http://gateway.example", "terrine_x")


@pytest.mark.parametrize("name", ["../tokens", "a/b", "", "visits?x=1", "v%2f", 3])
def test_names_stay_names(signed, name):
    with pytest.raises(InvalidArgument):
        gateway_of(signed, "namer").price(SQL, epsilon=0.1, dataset=name)


def test_an_archive_with_other_files_is_not_unpacked(tmp_path):
    import io
    import zipfile

    for name in ("../evil", "/etc/evil", "owner/receipt.json", "evil.py"):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(name, "x")
        with pytest.raises(InvalidArgument, match="nothing was unpacked"):
            remote._unpack(file.getvalue(), tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(InvalidArgument):
        remote._unpack(b"no archive", tmp_path / "out")
