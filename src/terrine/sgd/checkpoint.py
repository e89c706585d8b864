"""Checkpoints: a run that was killed at any moment goes on to the same final model, and is never billed less.

The file (`sealed.py`) holds the model, the optimizer, the steps taken, and, sealed, the key that lots, noise and the
seeds of the global generators come from. Whoever could read the key could subtract the noise. Steps that are repeated
after a crash draw the same lots and the same noise: they release nothing new. That argument needs the same gradients,
so a run that is kept seeds the global generators at every lot (`generators.py`), and refuses to go on with other data,
as far as `RowReader.fingerprint` tells them apart, with another model, loss, optimizer or schedule, as far as
`fingerprint.py` does, with sums in another order, or with a step that comes out otherwise than it did before
(`redone.py`).

The first checkpoint is written after the account was charged and before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from terrine import check
from terrine.errors import InvalidArgument
from terrine.events import Event
from terrine.sgd import distributed
from terrine.sgd.lots import RowReader
from terrine.sgd.plan import Plan
from terrine.sgd.sealed import Loaded, SealedFile

if TYPE_CHECKING:
    from terrine.sgd.run import PrivateRun

_FIELDS = {"charged_to", "limit", "taken", "bound", "order", "model", "optimizer", "others"}


@dataclass
class Checkpoint:
    """Where to keep a run, and how often to save it; `seal` is a 32-byte key for what must stay secret."""

    path: Path
    every: int = 100
    seal: bytes | None = field(default=None, repr=False)
    _others: dict[str, Any] = field(default_factory=dict, repr=False)
    _constant: dict[str, Any] = field(default_factory=dict, repr=False)
    _restored: dict[str, Any] = field(default_factory=dict, repr=False)
    _prints: dict[str, str] = field(default_factory=dict, repr=False)
    _saved_at: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        self.every = check.whole("every", self.every)
        if self.seal is not None and len(self.seal) != 32:
            raise InvalidArgument(f"seal of {len(self.seal)} bytes: want 32, such as os.urandom(32)")
        self._file = SealedFile(self.path, _FIELDS, self.seal)

    def open(
        self,
        plan: Plan,
        source: RowReader,
        bound: Mapping[str, str],
        *,
        piece: int | None = None,
        memory: float | None = None,
    ) -> Loaded | None:
        """What is there to go on from; None where nothing is. `bound` are fingerprints of all that decides gradients.

        Raises:
            InvalidArgument: the file is of another plan, of other data, of another model, loss or setting, of a run
                that adds up in another order, or cannot be unsealed.
            OutOfOrder: nothing can be written there.
        """
        self._constant, self._prints = {"piece": piece, "memory": memory}, dict(bound)
        if distributed.is_first():
            self._file.demand_room()
        loaded = self._file.load(repr(plan))
        if loaded is None:
            return None
        if loaded.key is None:
            taken, limit = (loaded.record[name] for name in ("taken", "limit"))
            if taken < limit:
                raise InvalidArgument(
                    f"{self.path}: its secrets are gone after {taken} of {limit} steps, so the run cannot go on; "
                    "choose another path"
                )
            self._file.clear()
        else:
            self._check_order(loaded.record["order"])
            self._prints["data set"] = source.fingerprint(loaded.key.secret)
            self._file.demand_same(loaded, self._prints)
        return loaded

    def attach(
        self,
        run: PrivateRun,
        source: RowReader,
        saved: Loaded | None,
        *,
        charged_to: str | None,
        looks: Event | None = None,
    ) -> None:
        """Bring `run` to where it was saved, and keep it from now on."""
        self._constant |= {
            "plan": repr(run.step.plan),
            "charged_to": charged_to,
            "limit": run.step.limit,
            "looks": repr(looks),
        }
        if saved is not None:
            self._restore(run, saved.record)
        if distributed.is_first() and (saved is None or saved.key is not None):
            self._file.take_over(run.step.taken)
        if saved is None:
            self._prints["data set"] = source.fingerprint(run.step.key.secret)
            self.save(run)

    def keep(self, others: Mapping[str, Any]) -> None:
        """Save these too, and restore them now where a run goes on."""
        for name, one in others.items():
            self._others[name] = one
            if name in self._restored:
                one.load_state_dict(self._restored[name])

    def before_release(self, run: PrivateRun) -> None:
        """Note what a step is about to release; refuse a repeated one that comes out otherwise than it did.

        Raises:
            InvalidArgument: it does.
            OutOfOrder: the note cannot be written, or another run went on from here; nothing was released.
        """
        if self._file.held:
            self._file.before_release(run.step.taken, run.step._sums)

    def after_step(self, run: PrivateRun) -> None:
        """Save every so many steps."""
        if run.step.taken % self.every == 0 and run.step.taken != self._saved_at:
            self.save(run)

    def after_run(self, run: PrivateRun) -> None:
        """Save what is final, without the secrets, and remove their key."""
        if self._file.held:
            self._file.finish(self._record(run))

    def save(self, run: PrivateRun) -> None:
        """Write everything, in one rename; does nothing in a process that does not hold the file.

        Raises:
            OutOfOrder: it cannot be written, or another run went on from the same checkpoint.
        """
        self._saved_at = run.step.taken
        if self._file.held:
            self._file.save(self._record(run), run.step.taken, run.step.key, self._prints)

    def _restore(self, run: PrivateRun, record: dict[str, Any]) -> None:
        try:
            run.step.model.load_state_dict(record["model"])
            run.optimizer.load_state_dict(record["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise InvalidArgument(f"{self.path}: a run of another model or optimizer ({reason})") from None
        run.step.taken, run.step.bound = record["taken"], record["bound"]
        self._restored = record["others"]
        self._saved_at = run.step.taken

    def _record(self, run: PrivateRun) -> dict[str, Any]:
        return {
            **{name: self._constant[name] for name in ("plan", "charged_to", "limit", "looks")},
            "taken": run.step.taken,
            "bound": run.step.bound,
            "order": self._order(),
            "model": run.step.model.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "others": {name: one.state_dict() for name, one in self._others.items()},
        }

    def _order(self) -> dict[str, Any]:
        """What decides the order in which a lot is added up and drawn for: a repeated step must keep it."""
        order = {"threads": torch.get_num_threads(), "processes": distributed.share()[1]}
        return order | {name: self._constant[name] for name in ("piece", "memory")}

    def _check_order(self, before: dict[str, Any]) -> None:
        for name, now in self._order().items():
            if now != (was := before.get(name)):
                how = f"torch.set_num_threads({was})" if name == "threads" else f"{name}={was}"
                raise InvalidArgument(
                    f"{self.path}: a run of {name}={was}, here {now}: its steps would come out otherwise; want {how}"
                )
