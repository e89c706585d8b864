"""Attacks on federated learning: colluders who open single clients, rounds that are not paid for, numbers that tell."""

import numpy as np
import pytest
import torch
from torch import nn

from terrine import audit, federated
from terrine.audit import one_run
from terrine.errors import InvalidArgument
from terrine.events import Gaussian
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
