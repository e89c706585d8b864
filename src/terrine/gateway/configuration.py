"""What `gateway.toml` may say: strict, so that a misspelt line is an error and not a default.

The server listens on loopback. Anywhere else it wants TLS, its own or that of a proxy in front (`behind_proxy`).
Paths are relative to the file. `ledger` may be left out and given as $TERRINE_GATEWAY_LEDGER, to keep a password out.
"""

from __future__ import annotations

import ipaddress
import os
import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from terrine import check
from terrine.errors import InvalidArgument
from terrine.gateway.bodies import DatasetBody, DatasetName

LEDGER = "TERRINE_GATEWAY_LEDGER"


class Strict(BaseModel):
    """Unknown names, nan and infinity are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Limits(Strict):
    """What one caller may ask of the server."""

    body: int = Field(65_536, ge=1_024, le=2**24)
    """Bytes of a request."""
    depth: int = Field(16, ge=4, le=100)
    """How deep JSON may nest."""
    per_minute: int = Field(600, ge=1)
    """Requests of one token."""
    failures_per_minute: int = Field(20, ge=1)
    """Refused logins and tokens from one address."""
    trainings_per_analyst: int = Field(1, ge=0)
    """Trainings of one analyst that are queued or running."""
    trainings: int = Field(1, ge=0)
    """Trainings that run at a time."""
    waiting_per_analyst: int = Field(20, ge=0)
    """Requests of one analyst that wait for approval."""
    threads: int = Field(16, ge=2, le=200)
    """Requests that are worked on at a time; each may hold one connection to the database."""
    session_hours: float = Field(12.0, gt=0, le=24 * 30)
    """How long a login lasts."""


class Configuration(Strict):
    """One gateway."""

    folder: Path = Path()
    """What paths are relative to."""
    ledger: str
    """A file or a database URL."""
    data: Path = Path("data")
    """Where tables lie that may be registered by name."""
    jobs: Path = Path("jobs")
    """Where trainings keep their folders."""
    host: str = "127.0.0.1"
    port: int = Field(8787, ge=0, le=65_535)
    behind_proxy: bool = False
    """A proxy in front speaks TLS and sets X-Forwarded-For and X-Forwarded-Proto."""
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")
    """The names by which the server may be called."""
    key: Path | None = None
    """An Ed25519 key of `terrine keys new`, which signs answers and releases."""
    tick: float = Field(0.0, ge=0, le=3_600)
    """Answers leave at whole multiples of so many seconds; 0 is at once."""
    sources: dict[str, str] = {}
    """Databases that may be registered by name, so that their passwords stay here."""
    limits: Limits = Field(default_factory=lambda: Limits.model_validate({}))
    datasets: dict[DatasetName, DatasetBody] = {}
    """Data sets that are registered when the server starts."""

    @model_validator(mode="after")
    def _reachable(self) -> Configuration:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key: want both, or neither")
        if not (_loopback(self.host) or self.behind_proxy or self.tls_key):
            raise ValueError(
                f"host={self.host!r} can be reached from elsewhere: want behind_proxy = true (a proxy that speaks TLS "
                "stands in front), or tls_certificate and tls_key"
            )
        return self

    @property
    def encrypted(self) -> bool:
        """Whether callers reach the server by TLS, so that cookies may insist on it."""
        return self.behind_proxy or self.tls_key is not None

    def path(self, one: Path) -> Path:
        """A path of the file, absolute."""
        return (self.folder / one).absolute()

    @property
    def database(self) -> str:
        """The ledger's URL; a file's path made absolute."""
        if "://" in self.ledger:
            return self.ledger
        return str(self.path(Path(self.ledger)))


def load(path: Path) -> Configuration:
    """The configuration in a file.

    Raises:
        InvalidArgument: it is not there, or says something that is not understood.
    """
    try:
        with path.open("rb") as file:
            told: dict[str, Any] = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f"{path}: {error}; want a gateway.toml, such as docs/gateway.md shows") from None
    if "folder" in told:
        raise InvalidArgument(f"{path}: folder is that of the file; leave it out")
    if LEDGER in os.environ:
        told["ledger"] = os.environ[LEDGER]
    return read(told | {"folder": path.absolute().parent}, str(path))


def read(told: dict[str, Any], name: str = "gateway") -> Configuration:
    """The configuration in a dict, or one clear line.

    Raises:
        InvalidArgument: it says something that is not understood.
    """
    try:
        return Configuration.model_validate(told)
    except ValidationError as error:
        raise InvalidArgument(f"{name}: {problems(error.errors())}") from None


def problems(errors: Any) -> str:
    """What pydantic found, in one line that repeats no value."""
    found = []
    for one in list(errors)[:5]:
        where = ".".join(str(part) for part in one["loc"] if part not in ("body", "path", "query"))
        said = one["msg"].removeprefix("Value error, ")
        found.append(f"{check.shown(where, 80, written=str)}: {said}" if where else said)
    return "; ".join(found)


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
