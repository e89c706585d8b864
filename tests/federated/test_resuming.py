"""A federation that was killed goes on to the same model, is not charged again, and never uses noise twice."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from terrine import federated, sgd
from terrine.errors import InvalidArgument, OutOfOrder, TerrineError
from tests.federated.conftest import small_plan

SCRIPT = Path(__file__).with_name("killed_federation.py")


@pytest.mark.parametrize(
    "kind",
    [
        "cyclic",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("shares", "adaptive", "fixed order", "separated")),
    ],
)
def test_killed_at_any_moment_it_goes_on_to_the_same_model(tmp_path, kind):
    done = subprocess.run([sys.executable, SCRIPT, tmp_path, kind], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole, *found = map(json.loads, done.stdout.splitlines())
    assert [one["moment"] for one in found] == ["charged", "noted", "opened", "saved"]
    assert [one["begun"] for one in found] == [0, 1, 2, 4]
    for one in found:
        assert one["weights"] == whole["weights"], one["moment"]
        assert one["history"] == whole["history"]
        assert one["charges"] == (5 if kind == "shares" else 1)
        assert one["secrets"] == []


def clients(shift=0.0):
    torch.manual_seed(0)
    return [(torch.randn(4, 3) + shift, torch.arange(4) % 2) for _ in range(40)]


def federation(path, *, data=None, plan=None, **changes):
    torch.manual_seed(1)
    given = {"full": False, "checkpoint": path} | changes
    return federated.Federation(nn.Linear(3, 2), plan or small_plan(), data or clients(), **given)


def begun(path, rounds=2, **changes):
    found = federation(path, **changes)
    for _ in range(rounds):
        found.round()
    return found


def weights(found):
    return torch.cat([one.detach().flatten() for one in found.model.parameters()])


def test_a_run_without_a_seed_goes_on_with_the_noise_it_would_have_had(tmp_path):
    whole = begun(tmp_path / "a")
    for name in ("a", "a.key"):
        shutil.copy(tmp_path / name, tmp_path / name.replace("a", "b", 1))
    other = federation(tmp_path / "b")
    whole.fit()
    other.fit()
    assert (weights(whole) == weights(other)).all()
    assert whole.history == other.history
    fresh = federation(tmp_path / "c")
    fresh.fit()
    assert (weights(fresh) != weights(whole)).any()


def test_a_run_that_is_over_stays_as_it_is(tmp_path):
    found = federation(tmp_path / "a")
    found.fit()
    again = federation(tmp_path / "a")
    again.fit()
    assert (weights(again) == weights(found)).all()
    assert not (tmp_path / "a.key").exists()
    with pytest.raises(OutOfOrder, match="over"):
        again.round()


def test_clients_that_train_with_noise_of_their_own_are_the_same_when_repeated(tmp_path):
    inside = sgd.Plan(examples=4, lot=2, steps=2, clip=1.0, noise=2.0, delta=1e-2)
    found = begun(tmp_path / "a", local=federated.Local(private=inside))
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    again = federation(tmp_path.with_name("copy") / "a", local=federated.Local(private=inside))
    found.round()
    again.round()
    assert (weights(found) == weights(again)).all()
    assert inside.seed is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"data": clients(0.01)}, "data"),
        ({"plan": small_plan(noise=0.9)}, "plan"),
        ({"local": federated.Local(epochs=2)}, "local training"),
        ({"local": federated.Local(lambda ps: torch.optim.SGD(ps, lr=0.2))}, "local training"),
        ({"server": federated.FedAvg(learning_rate=2.0)}, "server"),
        ({"server": federated.FedAdam()}, "server"),
        ({"silent": [3]}, "silent"),
        ({"dropping": 0.1}, "dropout rate"),
        ({"full": True}, "way of adding"),
        ({"by_round": True}, "way of charging"),
    ],
)
def test_its_noise_falls_on_nothing_else(tmp_path, changes, why):
    begun(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(InvalidArgument, match=why) as refusal:
        federation(tmp_path / "a", **changes)
    assert "\n" not in str(refusal.value)
    assert (tmp_path / "a").read_bytes() == before


def test_a_repeated_round_with_other_updates_is_refused(tmp_path, monkeypatch):
    """Killed after the sum was noted; whoever goes on changes what a client sends in a way no fingerprint shows."""
    found = begun(tmp_path / "a")
    monkeypatch.setattr(found, "_save", lambda: None)
    found.round()
    again = federation(tmp_path / "a")
    honest = again._updates
    monkeypatch.setattr(again, "_updates", lambda those: {one: 0.5 * two for one, two in honest(those).items()})
    with pytest.raises(InvalidArgument, match="noise must not be used twice"):
        again.round()


@pytest.mark.parametrize("name", ["a", "a.key"])
def test_files_that_were_changed_are_refused(tmp_path, name):
    begun(tmp_path / "a")
    flipped = bytearray((tmp_path / name).read_bytes())
    flipped[len(flipped) // 2] ^= 1
    for content in (b"", b"nonsense", flipped):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TerrineError):
            federation(tmp_path / "a")


def test_another_account_pays_anew(tmp_path):
    class Account:
        def __init__(self, name):
            self.name, self.charges = name, []

        def charge(self, event, *, purpose, by):
            self.charges.append(event)

    begun(tmp_path / "a")
    one, other = Account("one"), Account("other")
    federation(tmp_path / "a", account=one).round()
    federation(tmp_path / "a", account=one).round()
    federation(tmp_path / "a", account=other).round()
    assert [len(one.charges), len(other.charges)] == [1, 1]


def test_another_accounts_charge_does_not_undo_what_was_noted_of_a_round(tmp_path, monkeypatch):
    """The charge is saved, and that save once dropped the note of the round that is about to be repeated."""

    class Account:
        name = "other"

        def charge(self, event, *, purpose, by):
            pass

    found = begun(tmp_path / "a")
    monkeypatch.setattr(found, "_save", lambda: None)
    found.round()
    again = federation(tmp_path / "a", account=Account())
    honest = again._updates
    monkeypatch.setattr(again, "_updates", lambda those: {one: 0.5 * two for one, two in honest(those).items()})
    with pytest.raises(InvalidArgument, match="noise must not be used twice"):
        again.round()


def test_a_federation_that_is_overtaken_is_not_charged(tmp_path):
    class Account:
        name, charges = "clients", 0

        def charge(self, event, *, purpose, by):
            self.charges += 1

    account, slow = Account(), federation(tmp_path / "a", account=(other := Account()))
    begun(tmp_path / "a", account=account)
    with pytest.raises(OutOfOrder, match="one at a time"):
        slow.round()
    assert (account.charges, other.charges) == (1, 0)
