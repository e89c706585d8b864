"""A federation that was killed goes on after what it may have opened, is not charged again, and uses no noise twice."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from terrine import federated, sgd
from terrine.errors import BudgetExceeded, InvalidArgument, OutOfOrder, TerrineError
from terrine.federated import learning
from tests.federated.conftest import small_plan

SCRIPT = Path(__file__).with_name("killed_federation.py")
ROUNDS = 6


@pytest.mark.parametrize(
    "kind",
    [
        "separated",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("cyclic", "by round", "adaptive", "in order")),
    ],
)
def test_killed_twenty_times_no_round_is_opened_twice_or_unpaid(tmp_path, kind):
    command = [sys.executable, SCRIPT, tmp_path, kind, "20"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert sum(run["killed"] for run in runs) >= 20
    noises = Counter(words[2] for run in runs for words in run["log"] if words[0] == "opened")
    assert set(noises.values()) == {1}
    for run in runs:
        check_log(run["log"], kind)
        assert run["history"]["rounds"] == ROUNDS
        assert run["history"]["closed"] + run["history"]["lost"] + len(run["history"]["clips"]) == ROUNDS


def check_log(log, kind):
    """Every round is opened once at most, in order, after it was paid for; turns and groups stay as they are."""
    paid, opened, turns = 0, [], {}
    for word, *facts in log:
        if word == "charged":
            paid += 1 if kind == "by round" else ROUNDS
            continue
        number, _, clients = facts
        assert len(opened) < paid
        assert number not in opened
        assert opened == sorted(opened)
        opened.append(number)
        for client in clients:
            turns.setdefault(client, []).append(number)
    for rounds in turns.values():
        if kind == "separated":
            assert all(later - earlier >= 3 for earlier, later in pairwise(rounds))
        if kind == "cyclic":
            assert len({number % 3 for number in rounds}) == 1
        if kind == "in order":
            assert len({number % 4 for number in rounds}) == 1


class Account:
    def __init__(self, name="clients"):
        self.name, self.charges = name, []

    def charge(self, event, *, purpose, by):
        self.charges.append(event)


def clients(shift=0.0):
    torch.manual_seed(0)
    return [(torch.randn(4, 3) + shift, torch.arange(4) % 2) for _ in range(40)]


def federation(path, *, data=None, plan=None, outputs=2, **changes):
    torch.manual_seed(1)
    given = {"full": False, "checkpoint": path} | changes
    return federated.Federation(nn.Linear(3, outputs), plan or small_plan(), data or clients(), **given)


def begun(path, rounds=2, **changes):
    """A run after so many rounds, and closed."""
    found = federation(path, **changes)
    for _ in range(rounds):
        found.round()
    found.close()
    return found


def weights(found):
    return torch.cat([one.detach().flatten() for one in found.model.parameters()])


class Killed(BaseException):
    pass


def kill_after(found, method):
    """Run one round, of which nothing more happens after `method`, not even a save."""
    called = getattr(found, method)

    def dying(*arguments):
        called(*arguments)
        raise Killed

    setattr(found, method, dying)
    with pytest.raises(Killed):
        found.round()


# -- what goes on, and after what --------------------------------------------------------------------------------------


def test_a_run_goes_on_from_its_model_with_fresh_noise(tmp_path):
    first = begun(tmp_path / "a")
    shutil.copytree(tmp_path, tmp_path.with_name("copy"))
    again, other = federation(tmp_path / "a"), federation(tmp_path.with_name("copy") / "a")
    assert (weights(again) == weights(first)).all()
    assert again.history == first.history
    again.fit()
    other.fit()
    assert (weights(again) != weights(other)).any()
    assert again.history.lost == 0


@pytest.mark.parametrize(("method", "lost"), [("_pay", 0), ("_updates", 0), ("_count", 1), ("_sum", 1), ("_step", 1)])
def test_a_round_that_may_have_been_opened_is_spent(tmp_path, method, lost):
    begun(tmp_path / "a")
    kill_after(federation(tmp_path / "a"), method)
    again = federation(tmp_path / "a")
    assert (again.history.rounds, again.history.lost) == (2 + lost, lost)
    numbers = []
    again.fit(after=numbers.append)
    assert numbers == list(range(3 + lost, 6))
    assert len(again.history.clips) == 5 - lost


def test_a_seeded_run_is_the_same_from_end_to_end_with_a_checkpoint_and_without(tmp_path):
    inside = sgd.Plan(examples=4, lot=2, steps=2, clip=1.0, noise=2.0, delta=1e-2)
    for local in (None, federated.Local(private=inside)):
        runs = [
            federation(path, plan=small_plan(seed=3), local=local) for path in (None, None, tmp_path / str(local)[:9])
        ]
        for run in runs:
            run.fit()
        assert (weights(runs[0]) == weights(runs[1])).all()
        assert (weights(runs[0]) == weights(runs[2])).all()
    assert inside.seed is None


def test_a_run_that_is_over_stays_as_it_is(tmp_path):
    found = federation(tmp_path / "a")
    found.fit()
    again, account = federation(tmp_path / "a", account=Account()), Account()
    again.fit()
    assert (weights(again) == weights(found)).all()
    with pytest.raises(OutOfOrder, match="over"):
        again.round()
    assert account.charges == []


def test_groups_of_clients_stay_as_they_are(tmp_path, monkeypatch):
    drawn = {}

    def noting(*arguments, **named):
        found = learning_draw(*arguments, **named)
        for client in found.contributing:
            drawn.setdefault(client, []).append(named["round_"] % 4)
        return found

    learning_draw = learning.draw
    monkeypatch.setattr(learning, "draw", noting)
    plan = small_plan(sampling=sgd.CyclicPoisson(4), rounds=24, sums=federated.Central())
    for _ in range(6):
        begun(tmp_path / "a", 4, plan=plan)
    assert sum(map(len, drawn.values())) > 100
    assert all(len(set(groups)) == 1 for groups in drawn.values())


def test_correlated_noise_begins_a_new_block(tmp_path):
    """What was released last is not taken back: z of a run that is over with its process is on no disk."""
    plan = small_plan(sums=federated.Central(), correlated=sgd.Banded(4), sampling=federated.MinimumSeparation(5))
    silent = {"silent": range(40), "outputs": 3000, "plan": plan}
    before = begun(tmp_path / "a", 2, **silent)
    again = federation(tmp_path / "a", **silent)
    start = weights(again)
    again.round()
    change = weights(again) - start
    deviation = plan.deviation * plan.correlated.sensitivity / plan.per_round
    assert float(change.std()) == pytest.approx(deviation, rel=0.05)
    torch.manual_seed(1)
    initial = torch.cat([one.detach().flatten() for one in nn.Linear(3, 3000).parameters()])
    both = torch.stack([weights(before) - initial, change])
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.05


# -- who pays ----------------------------------------------------------------------------------------------------------


def test_a_run_that_goes_on_is_not_charged_again_and_another_account_pays_anew(tmp_path):
    first, other = Account("first"), Account("other")
    for account in (first, first, other):
        begun(tmp_path / "a", 1, account=account)
    assert [len(first.charges), len(other.charges)] == [1, 1]


def test_rounds_that_a_crash_took_are_paid_for_one_by_one(tmp_path):
    account = Account()
    kill_after(federation(tmp_path / "a", account=account, by_round=True), "_sum")
    kill_after(federation(tmp_path / "a", account=account, by_round=True), "_updates")
    federation(tmp_path / "a", account=account, by_round=True).fit()
    assert account.charges == [small_plan().round_event] * 5


def test_a_refused_charge_leaves_nothing(tmp_path):
    class Empty(Account):
        def charge(self, event, *, purpose, by):
            raise BudgetExceeded("nothing is left")

    with pytest.raises(BudgetExceeded):
        federation(tmp_path / "a", account=Empty()).fit()
    assert list(tmp_path.iterdir()) == []


# -- one at a time -----------------------------------------------------------------------------------------------------


def test_a_second_process_is_refused(tmp_path):
    found = federation(tmp_path / "a", account=Account())
    found.round()
    child = os.fork()
    if child == 0:
        try:
            federation(tmp_path / "a", account=Account())
        except OutOfOrder:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    found.fit()
    assert found.history.rounds == 5


def test_one_that_was_closed_or_failed_lets_others_go_on_and_does_not_itself(tmp_path):
    closed = begun(tmp_path / "a", 1)
    failed = federation(tmp_path / "a")
    failed._updates = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        failed.fit()
    again = federation(tmp_path / "a")
    for found in (closed, failed):
        with pytest.raises(OutOfOrder, match="was closed"):
            found.round()
    assert again.fit().rounds == 5
    assert again.history.lost == 0


# -- other files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"plan": small_plan(noise=0.9)}, "plan"),
        ({"outputs": 3}, "model"),
        ({"server": federated.FedAdam()}, "optimizer"),
    ],
)
def test_another_plan_model_or_server_is_refused(tmp_path, changes, why):
    begun(tmp_path / "a")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InvalidArgument, match=why) as refusal:
        federation(tmp_path / "a", **changes)
    assert "\n" not in str(refusal.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    federation(tmp_path / "a").fit()


def test_other_data_may_be_gone_on_with_as_the_noise_is_fresh(tmp_path):
    account = Account()
    begun(tmp_path / "a", account=account)
    begun(tmp_path / "a", account=account, data=clients(0.5))
    assert len(account.charges) == 1


def test_an_older_count_beside_a_newer_model_is_refused(tmp_path):
    begun(tmp_path / "a", 1)
    older = (tmp_path / "a.count").read_bytes()
    begun(tmp_path / "a", 1)
    (tmp_path / "a.count").write_bytes(older)
    with pytest.raises(InvalidArgument, match="older copy"):
        federation(tmp_path / "a")


def test_an_older_model_beside_a_newer_count_costs_its_rounds(tmp_path):
    begun(tmp_path / "a", 1)
    older = (tmp_path / "a").read_bytes()
    begun(tmp_path / "a", 2)
    (tmp_path / "a").write_bytes(older)
    again = federation(tmp_path / "a")
    assert (again.history.rounds, again.history.lost) == (3, 2)
    assert len(again.fit().clips) == 3


def test_an_older_model_that_does_not_know_the_turns_of_clients_is_refused(tmp_path):
    plan = small_plan(sampling=federated.MinimumSeparation(4))
    begun(tmp_path / "a", 1, plan=plan)
    older = (tmp_path / "a").read_bytes()
    begun(tmp_path / "a", 1, plan=plan)
    (tmp_path / "a").write_bytes(older)
    with pytest.raises(InvalidArgument, match="rounds 2 to 2"):
        federation(tmp_path / "a", plan=plan)


@pytest.mark.parametrize("name", ["a", "a.count"])
def test_without_one_of_its_files_or_with_anothers_it_is_refused(tmp_path, name):
    for run in ("a", "b"):
        begun(tmp_path / run)
    kept = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes((tmp_path / name.replace("a", "b", 1)).read_bytes())
    with pytest.raises(InvalidArgument, match="another run's"):
        federation(tmp_path / "a")
    (tmp_path / name).unlink()
    with pytest.raises(InvalidArgument, match="missing"):
        federation(tmp_path / "a")
    (tmp_path / name).write_bytes(kept)
    federation(tmp_path / "a").fit()


def flipped(content, place):
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("a", lambda _: b""), ("a", lambda _: b"nonsense"), ("a", lambda content: content[:-100]),
        ("a.count", lambda _: b""), ("a.count", lambda content: content[:-1]),
        *[("a.count", lambda content, place=place: flipped(content, place)) for place in (3, 20, 50)],
    ],
)  # fmt: skip
def test_files_that_were_changed_are_refused(tmp_path, name, change):
    begun(tmp_path / "a")
    (tmp_path / name).write_bytes(change((tmp_path / name).read_bytes()))
    with pytest.raises(TerrineError) as refusal:
        federation(tmp_path / "a")
    assert "\n" not in str(refusal.value)
