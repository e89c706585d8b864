"""A gateway, as an analyst's or an officer's code sees it: every answer is checked before it is handed on."""

from __future__ import annotations

import io
import json
import time
import zipfile
from pathlib import Path
from typing import Any

import httpx

from terrine import check
from terrine.client.checking import checked
from terrine.client.values import Price, RemoteAnswer, RemoteTraining, Request
from terrine.errors import InvalidArgument, TerrineError
from terrine.events import from_json
from terrine.verify import Verification, verify
from terrine.verify.manifest import HANDED_ON, MANIFEST, MAY_BE_HANDED_ON, SIGNED

_FILES = frozenset({*HANDED_ON, *MAY_BE_HANDED_ON, MANIFEST, SIGNED})
_LARGEST = 1 << 30
_PLAIN = ("127.0.0.1", "localhost", "::1")
_ENDS = ("answered", "failed", "refused", "denied", "cancelled")


class GatewayRefused(TerrineError):
    """The gateway did not do what was asked; `status` is HTTP's."""

    def __init__(self, status: int, said: str, *, charged: bool | None = None) -> None:
        super().__init__(said)
        self.status, self.charged = status, charged


class BeyondAllowance(TerrineError):
    """The request waits for approval; nothing was charged. `Gateway.collect(request)` gives its answer later."""

    def __init__(self, request: str, said: str) -> None:
        super().__init__(said)
        self.request = request


class Gateway:
    """A gateway at `url`, asked with a token.

    An analyst's token is for one data set, which need not be named. `signed_by` is the file of the public key that must
    have signed every answer.

    Raises:
        InvalidArgument: `url` is no address; or not https, and not on this machine: a token would be sent in the clear.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        signed_by: str | Path | None = None,
        timeout: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        address = _address(url)
        if address.scheme != "https" and address.host not in _PLAIN:
            raise InvalidArgument(f"{check.shown(url)}: the token would be sent in the clear; want https://")
        self._signed_by = None if signed_by is None else Path(signed_by)
        self._scope: str | None = None
        headers = {"authorization": f"Bearer {token}", "accept": "application/json"}
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout, follow_redirects=False, transport=transport
        )

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()

    def datasets(self) -> list[dict[str, Any]]:
        """The data sets that are lent."""
        return self._told("GET", "/datasets")  # type: ignore[no-any-return]

    def dataset(self, name: str) -> dict[str, Any]:
        """One data set: schemas, bounds and made-up rows."""
        return self._told("GET", f"/datasets/{_name(name)}")  # type: ignore[no-any-return]

    def budget(self) -> list[dict[str, Any]]:
        """Of every data set: what everyone together spent, what is left, and one's own allowance."""
        return self._told("GET", "/budget")  # type: ignore[no-any-return]

    def price(self, sql: str, *, epsilon: float = 1.0, dataset: str | None = None, **options: Any) -> Price:
        """What a question would cost, and how good its answer would be: free."""
        found = self._told("POST", f"/datasets/{self._one(dataset)}/price", _question(sql, epsilon, options))
        return _price(found, found["half_widths"], found["in_archive"])

    def mock(
        self, sql: str, *, epsilon: float = 1.0, dataset: str | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """The answer on made-up rows: free, and about nobody."""
        answer = self._told("POST", f"/datasets/{self._one(dataset)}/mock", _question(sql, epsilon, options))["answer"]
        return [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]

    def ask(
        self,
        sql: str,
        *,
        epsilon: float,
        dataset: str | None = None,
        purpose: str = "",
        reason: str = "",
        fresh: bool = False,
        **options: Any,
    ) -> RemoteAnswer:
        """The answer to one SELECT, charged before any row is looked at; the same question again costs nothing.

        `options` are those of `terrine.queries.Session.sql`: delta, bounds, keys, bins, min_group.

        Raises:
            BeyondAllowance: it waits for approval, because `reason` was given; nothing was charged.
            GatewayRefused: it was not answered; `charged` says whether it was charged.
            InvalidArgument: what arrived does not follow the protocol, and is withheld.
        """
        body, name = _question(sql, epsilon, options), self._one(dataset)
        more = {"purpose": purpose, "reason": reason, "fresh": fresh}
        found = self._told("POST", f"/datasets/{name}/ask", body | {k: v for k, v in more.items() if v})
        if found["state"] == "waiting":
            raise BeyondAllowance(found["request"], found["said"])
        if found["dataset"] != name:
            raise InvalidArgument("the answer is about another data set")
        return self._answer(found, body)

    def collect(self, request: str) -> RemoteAnswer:
        """The answer to a request that was approved since, or whose answer was lost on the way: costs nothing."""
        return self._answer(self._told("GET", f"/requests/{_name(request)}/answer"), None)

    def train_price(self, *, dataset: str | None = None, **settings: Any) -> Price:
        """What a training would cost."""
        return _price(self._told("POST", f"/datasets/{self._one(dataset)}/trainings/price", settings), {}, False)

    def train(self, *, label: str, epsilon: float, dataset: str | None = None, **settings: Any) -> RemoteTraining:
        """Have the gateway train: `settings` are named, such as epochs, lot, clip, model. See `wait`, `download`."""
        told = {"label": label, "epsilon": epsilon, **settings}
        found = self._told("POST", f"/datasets/{self._one(dataset)}/trainings", told)
        return RemoteTraining(found["request"], found["dataset"], found["state"], found["said"])

    def requests(self, *, state: str | None = None, dataset: str | None = None) -> list[Request]:
        """One's requests, or all of a data set for those who watch it, the newest first."""
        wanted = {name: value for name, value in (("state", state), ("dataset", dataset)) if value is not None}
        return [_request(one) for one in self._told("GET", "/requests", params=wanted)]

    def request(self, request: str) -> Request:
        """One request."""
        return _request(self._told("GET", f"/requests/{_name(request)}"))

    def cancel(self, request: str) -> Request:
        """Take a request back, or end a training; what was charged stays charged."""
        return _request(self._told("POST", f"/requests/{_name(request)}/cancel"))

    def resume(self, request: str) -> Request:
        """Go on with a training that was charged and then ended, at no new cost."""
        return _request(self._told("POST", f"/requests/{_name(request)}/resume"))

    def approve(self, request: str, *, reason: str = "") -> Request:
        """As owner or officer: approve what waits. It is charged and answered now; its analyst collects it."""
        return self._decided(request, "approve", reason)

    def deny(self, request: str, *, reason: str = "") -> Request:
        """As owner or officer: deny what waits; nothing is charged."""
        return self._decided(request, "deny", reason)

    def spending(self, dataset: str | None = None) -> dict[str, Any]:
        """As owner or officer: who spent how much of a data set, and every charge, the newest first."""
        return self._told("GET", f"/datasets/{self._one(dataset)}/spending")  # type: ignore[no-any-return]

    def export(self, dataset: str | None = None) -> str:
        """As owner or officer: the data set's account as JSON Lines, for `terrine ledger verify`."""
        return self._sent("GET", f"/datasets/{self._one(dataset)}/export", None, None).text

    def wait(self, request: str, *, seconds: float = 86_400.0, every: float = 1.0) -> Request:
        """The request once it has ended.

        Raises:
            GatewayRefused: it has not within `seconds`.
        """
        ends = time.monotonic() + seconds
        while (found := self.request(request)).state not in _ENDS:
            if time.monotonic() > ends:
                raise GatewayRefused(408, f"the request is {found.state} ({found.progress}) after {seconds:g} s")
            time.sleep(every)
        return found

    def download(self, request: str, out: str | Path) -> Verification:
        """Unpack what is handed on of a finished training into the new folder `out`, and verify it.

        Raises:
            InvalidArgument: `out` is there already, or what arrived is no release, or lies.
        """
        folder = Path(out)
        if folder.exists():
            raise InvalidArgument(f"{folder}: is there already; want a new folder")
        response = self._sent("GET", f"/requests/{_name(request)}/result", None, None)
        _unpack(response.content, folder)
        found = verify(folder, signed_by=self._signed_by)
        if found.lie is not None:
            raise InvalidArgument(f"{folder}: does not verify: {found.lie.name}: {found.lie.detail}")
        return found

    def _one(self, dataset: str | None) -> str:
        """The data set that is meant: the token's, unless one is named."""
        if dataset is None:
            if self._scope is None:
                self._scope = str(self._told("GET", "/me")["dataset"])
            dataset = self._scope
        return _name(dataset)

    def _decided(self, request: str, how: str, reason: str) -> Request:
        return _request(self._told("POST", f"/requests/{_name(request)}/{how}", {"reason": reason}))

    def _answer(self, record: dict[str, Any], asked: dict[str, Any] | None) -> RemoteAnswer:
        event, signed = checked(record, asked=asked, signed_by=self._signed_by)
        answer, proof = record["answer"], record["proof"]
        return RemoteAnswer(
            request=record["request"],
            dataset=record["dataset"],
            columns=tuple(answer["columns"]),
            rows=tuple(tuple(row) for row in answer["rows"]),
            half_widths=answer["half_widths"],
            notes=tuple(answer["notes"]),
            event=event,
            epsilon=proof["price"]["epsilon"],
            delta=proof["price"]["delta"],
            charge=proof["charge"]["hash"],
            from_archive=bool(record["from_archive"]),
            signed=signed,
            record=record,
        )

    def _told(self, method: str, path: str, body: Any = None, params: Any = None) -> Any:
        response = self._sent(method, path, body, params)
        try:
            return response.json()
        except ValueError:
            raise GatewayRefused(response.status_code, f"{path}: not JSON; is a gateway there?") from None

    def _sent(self, method: str, path: str, body: Any, params: Any) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body, params=params)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            said = (
                f"{self._http.base_url}: cannot be reached ({error}); nothing was asked; is it the gateway's address?"
            )
            raise GatewayRefused(0, said, charged=False) from None
        except httpx.HTTPError as error:
            what = f"{type(error).__name__} {error}".strip()
            said = f"{self._http.base_url}: {what}; whether anything was charged, the list of your requests says"
            raise GatewayRefused(0, said) from None
        if response.is_success:
            return response
        try:
            told = response.json()
            said, charged = str(told["error"]), told.get("charged")
        except (ValueError, KeyError, TypeError, AttributeError):
            said, charged = f"{path}: status {response.status_code}; is a gateway there?", None
        raise GatewayRefused(response.status_code, said, charged=charged)


def _address(url: str) -> httpx.URL:
    try:
        found = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        found = httpx.URL("")
    if found.scheme not in ("http", "https") or not found.host:
        raise check.refuse("url", url, "a gateway's address, such as https://gateway.example")
    return found


def _question(sql: str, epsilon: float, options: dict[str, Any]) -> dict[str, Any]:
    told = {"sql": sql, "epsilon": epsilon, **{name: value for name, value in options.items() if value is not None}}
    try:
        return json.loads(json.dumps(told, allow_nan=False))  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"the question: {error}; want plain numbers, texts and lists") from None


def _price(found: dict[str, Any], widths: dict[str, float | None], archived: bool) -> Price:
    event = from_json(json.dumps(found["event"]))
    told = [found[name] for name in ("fits_budget", "fits_allowance", "allowance_left", "allowance_delta_left")]
    return Price(found["epsilon"], found["delta"], event, widths, archived, *told)


def _request(found: dict[str, Any]) -> Request:
    names = ("request", "dataset", "member", "kind", "state", "charged", "reason", "said", "progress")
    return Request(**{name: found[name] for name in names}, **found["price"], record=found)


def _name(given: str) -> str:
    if not isinstance(given, str) or not given or not all(one.isalnum() or one in "_-" for one in given):
        raise check.refuse("name", given, "the name of a data set or of a request")
    return given


def _unpack(content: bytes, folder: Path) -> None:
    """The files of a release, by their known names, and nothing else."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(content))
        names = archive.namelist()
        if len(set(names)) < len(names) or set(names) - _FILES:
            raise InvalidArgument("the archive holds files that are not of a release; nothing was unpacked")
        if sum(one.file_size for one in archive.infolist()) > _LARGEST:
            raise InvalidArgument(f"the archive unpacks to more than {_LARGEST} bytes; nothing was unpacked")
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).write_bytes(archive.read(name))
    except (zipfile.BadZipFile, OSError) as error:
        raise InvalidArgument(f"{folder}: could not be unpacked ({error})") from None
