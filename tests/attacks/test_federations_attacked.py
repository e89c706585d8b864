"""Attacks on federated learning: colluders who open single clients, rounds that are not paid for, numbers that tell."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from terrine import audit, federated
from terrine.audit import one_run
from terrine.errors import InvalidArgument, OutOfOrder
from terrine.events import Gaussian, PureDP
from terrine.federated import secure
from terrine.federated.learning import Federation
from terrine.federated.simulation import SimulationSettings


def plan(**others):
    given = {"clients": 8, "per_round": 8, "rounds": 3, "clip": 1.0, "noise": 2.0, "delta": 1e-3}
    return federated.Plan(**given | others)


class Account:
    def __init__(self):
        self.charges = []

    def charge(self, event, *, purpose, by):
        self.charges.append(event)


def federation(account=None, **others):
    torch.manual_seed(0)
    rows = [(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(8)]
    return Federation(nn.Linear(3, 2), plan(**others), rows, account=account, full=False)


def test_so_many_colluders_that_they_open_single_clients_are_refused():
    vectors = [np.ones(4) / 4] * 8
    with pytest.raises(InvalidArgument, match="could open single clients"):
        secure.sum(vectors, plan(sums=federated.Skellam(bits=20, survivors=7, colluding=5)))
    assert len(secure.sum(vectors, plan(sums=federated.Skellam(bits=20, survivors=7, colluding=2)))) == 4


def test_a_round_by_hand_is_charged_for():
    account = Account()
    learning = federation(account)
    learning.round()
    assert account.charges == [learning.plan.event]
    learning.fit()
    assert len(account.charges) == 1


def test_a_central_servers_history_does_not_tell_how_many_were_drawn():
    found = federation(sums=federated.Central(), per_round=4, clients=8).fit()
    assert found.rounds == 3
    assert found.survivors == []


@pytest.mark.parametrize("vectors", [[np.ones(3) * 1j], [["1", "2"]], [[None, 1.0]], [[1.0]] * 9])
def test_vectors_that_are_none_are_refused(vectors):
    with pytest.raises(InvalidArgument):
        secure.sum(vectors, plan(sums=federated.Skellam(bits=20, survivors=7)))


@pytest.mark.parametrize(
    "wrong",
    [{"delta": 0.0}, {"per_round": 0}, {"survivors": 0}, {"server_learning_rate": -1.0},
     {"server_learning_rate": float("nan")}, {"dropping": float("nan")}, {"learning_rate": 0.0}],
)  # fmt: skip
def test_settings_of_a_simulation_are_checked_before_anything_is_charged(wrong):
    with pytest.raises(InvalidArgument):
        SimulationSettings(**{"data": "digits", "clients": 20, "rounds": 2, "epsilon": 8.0} | wrong)


def test_audits_of_narrow_claims_and_of_no_guesses():
    scores, flags = np.arange(100.0), np.arange(100) >= 50
    assert not audit.verdict(Gaussian(noise=0.05), one_run.guess(scores, flags)).violated
    with pytest.raises(InvalidArgument, match="guesses"):
        one_run.guess(scores, flags, guesses=[])
    assert one_run.guess(scores, flags, guesses=np.int64(50)).guesses[0].made == 50


# -- noise twice, noise nowhere, prices of one's own -------------------------------------------------------------------


def test_a_history_that_was_set_back_draws_no_noise_twice():
    """Rounds have their noise from the run's key: the same round twice would differ by updates alone."""
    learning = federation(sums=federated.Central())
    learning.round()
    before = learning._begun
    learning.history.rounds = 0
    learning.fit()
    assert learning._begun == before + 2
    with pytest.raises(OutOfOrder, match="over"):
        learning.round()


def test_copies_of_a_run_are_refused():
    """Both would open their next round with the same noise, on other clients' data where those were changed."""
    learning = federation()
    learning.round()
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(OutOfOrder, match="noise must not be used twice"):
            copied(learning)
    learning.fit()


def test_training_that_reaches_the_servers_model_is_refused():
    learning = federation()
    start = learning.model.weight.detach().clone()

    class Reaching(federated.Local):
        def train(self, model, rows, *, secret=None):
            with torch.no_grad():
                learning.model.weight.add_(rows[0].sum())

    learning._local = Reaching()
    with pytest.raises(InvalidArgument, match="server's model"):
        learning.round()
    assert (learning.model.weight == start).all()


def test_frozen_parameters_get_no_noise():
    torch.manual_seed(0)
    rows = [(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(8)]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    Federation(model, plan(), rows).fit()
    assert (model[0].weight == before).all()


class Cheap(federated.PoissonClients):
    def event(self, stages, *, examples, lot):
        return PureDP(epsilon=0.001)


class Quiet(federated.Central):
    def event(self, noise, per_round, dimension):
        return Gaussian(noise=100.0)


@pytest.mark.parametrize("changes", [{"sampling": Cheap()}, {"sums": Quiet()}])
def test_nobody_brings_a_price_of_their_own(changes):
    with pytest.raises(InvalidArgument, match="want federated"):
        plan(**changes)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1e38])
@pytest.mark.parametrize("sums", [federated.Central(), federated.Skellam(survivors=6)])
def test_clients_that_send_what_is_no_number_move_nothing(value, sums):
    learning = federation(sums=sums, rounds=1)
    start = learning.model.weight.detach().clone()

    class Wild(federated.Local):
        def train(self, model, rows, *, secret=None):
            with torch.no_grad():
                for one in model.parameters():
                    one.fill_(value)

    learning._local = Wild()
    learning.fit()
    assert (learning.model.weight - start).abs().max() < 3.0


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ((None,), {}), ((3.0,), {}), (([1j],), {}), ((np.ones((8, 2, 2)),), {}), (("text",), {}),
        (([np.ones(3)] * 8,), {"drop": 3}), (([np.ones(3)] * 8,), {"drop": [True]}),
        (([np.ones(3)] * 8,), {"drop": "1"}),
        (([np.ones(3)] * 8,), {"rng": 5}),
    ],
)  # fmt: skip
def test_sums_of_other_kinds_are_refused_in_one_line(arguments, changes):
    with pytest.raises(InvalidArgument) as refusal:
        secure.sum(*arguments, plan(sums=federated.Skellam(survivors=6)), **changes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["model", "plan", "clients", "local", "server", "account", "present", "checkpoint"])
@pytest.mark.parametrize("value", [7, "x", object(), federated.Plan])
def test_federations_of_other_kinds_are_refused_in_one_line(name, value):
    if (name, value) == ("checkpoint", "x") or (name == "present" and callable(value)):
        return
    rows = [(torch.randn(4, 3), torch.arange(4) % 2) for _ in range(8)]
    given = {"model": nn.Linear(3, 2), "plan": plan(sampling=federated.MinimumSeparation(1)), "clients": rows}
    with pytest.raises(InvalidArgument, match=name) as refusal:
        Federation(**given | {name: value})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: federated.Local(epochs=0), lambda: federated.Local(batch=2.5), lambda: federated.Local(loss=3),
        lambda: federated.FedAvg(learning_rate=float("nan")), lambda: federated.FedAvg(momentum=1.0),
        lambda: federated.FedAdam(betas=3), lambda: federated.FedAdam(eps=0), lambda: plan(dimension=10**400),
        lambda: federated.MinimumSeparation(0), lambda: federated.MinimumSeparation(2, turns=0),
    ],
)  # fmt: skip
def test_settings_of_other_kinds_are_refused_in_one_line(make):
    with pytest.raises(InvalidArgument) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def going_on(path):
    torch.manual_seed(0)
    clients = [(torch.randn(2, 3), torch.tensor([0, 1])) for _ in range(8)]
    return Federation(nn.Linear(3, 2), plan(sums=federated.Central()), clients, checkpoint=path)


@pytest.mark.parametrize("rounds", [0, 1])
def test_of_two_that_begin_or_go_on_at_one_path_one_runs(tmp_path, rounds):
    first = going_on(tmp_path / "run")
    for _ in range(rounds):
        first.round()
    with pytest.raises(OutOfOrder, match="one at a time"):
        going_on(tmp_path / "run")
    first.fit()
    assert first.history.rounds == 3


def test_paths_without_room_for_a_checkpoint_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing" / "run"):
        with pytest.raises(InvalidArgument, match="checkpoint="):
            going_on(path)


def test_refused_vectors_are_not_quoted():
    secret = np.full(5, 123456.0 + 1j)
    for vector in (secret, secret.astype(object), list(secret)):
        with pytest.raises(InvalidArgument, match="want real numbers") as refusal:
            secure.sum([vector] * 8, plan(sums=federated.Skellam(survivors=6)))
        assert "123456" not in str(refusal.value)


@pytest.mark.parametrize("bound", [1e-320, 1e-40, 1e38, 1e308])
def test_bounds_that_no_model_can_hold_are_refused_before_anything_is_paid(bound):
    with pytest.raises(InvalidArgument, match="clip="):
        plan(clip=bound)
    for name in ("initial", "learning_rate", "weight"):
        with pytest.raises(InvalidArgument, match=name):
            federated.AdaptiveClipping(**{name: bound})


def test_an_adaptive_bound_never_overflows():
    fast = federated.AdaptiveClipping(learning_rate=1e6)
    assert fast.following(1.0, 0.0) == 1e12
    assert fast.following(1.0, 1.0) == 1e-12
