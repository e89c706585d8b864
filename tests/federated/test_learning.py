"""The engine in this process, `terrine federated simulate` and `terrine sums`."""

import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from terrine import federated, sgd
from terrine.cli.app import app
from terrine.errors import BudgetExceeded, InvalidArgument
from terrine.events import Reproducible
from terrine.federated import comparison
from terrine.federated.simulation import SimulationSettings, cut, simulate
from tests.federated.conftest import small_plan

CLIENTS = 40


def blobs(seed=0):
    """Two classes that a line tells apart, dealt to clients."""
    torch.manual_seed(seed)
    found = []
    for _ in range(CLIENTS):
        y = torch.arange(8) % 2
        found.append((torch.randn(8, 3) * 0.3 + (2.0 * y[:, None] - 1), y))
    return found


def federation(plan, **changes):
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    return federated.Federation(model, plan, blobs(), **{"full": False} | changes)


def right(model):
    x, y = (torch.cat(parts) for parts in zip(*blobs(5), strict=True))
    return float((model(x).argmax(dim=1) == y).float().mean())


SUMS = {
    "central": federated.Central(),
    "skellam": federated.Skellam(survivors=6),
    "discrete gaussian": federated.DiscreteGaussian(survivors=6),
}


@pytest.mark.parametrize("sums", SUMS.values(), ids=SUMS)
@pytest.mark.parametrize("server", [federated.FedAvg(), federated.FedAdam(learning_rate=0.1)])
def test_it_learns_with_noise(sums, server):
    found = federation(small_plan(sums=sums, rounds=12, seed=3), server=server)
    history = found.fit()
    assert right(found.model) > 0.8  # the seed is fixed, but not what floats make of it elsewhere
    assert history.rounds == 12
    assert history.closed == 0


def test_the_full_protocol_and_the_short_way_agree():
    """By the same seed neither noise nor drawing agree, so by the mean of several runs without much noise."""
    plan = small_plan(noise=0.1, rounds=3)
    weights = {}
    for full in (True, False):
        runs = []
        for _ in range(2):
            one = federation(plan, full=full)
            one.fit()
            runs.append(one.model.weight.detach().numpy())
        weights[full] = np.mean(runs, axis=0)
    assert np.abs(weights[True] - weights[False]).max() < 0.6


def test_rounds_with_too_few_survivors_are_paid_for_and_open_nothing():
    found = federation(small_plan(), dropping=0.9)
    before = found.model.weight.detach().clone()
    history = found.fit()
    assert history.closed == 5
    assert (found.model.weight == before).all()


def test_the_account_is_charged_first():
    class Empty:
        def charge(self, event, *, purpose, by):
            raise BudgetExceeded("nothing is left")

    for by_round in (False, True):
        found = federation(small_plan(), account=Empty(), by_round=by_round)
        found._update = lambda _: pytest.fail("a client was asked")
        with pytest.raises(BudgetExceeded):
            found.fit()


def test_by_round_or_for_the_plan():
    charged = []

    class Account:
        def charge(self, event, *, purpose, by):
            charged.append(event)

    plan = small_plan()
    federation(plan, account=Account()).fit()
    federation(plan, account=Account(), by_round=True).fit()
    assert charged == [plan.event] + 5 * [plan.round_event]


def test_the_clipping_bound_follows_the_updates():
    clip = federated.AdaptiveClipping(initial=1e-3, learning_rate=1.0, weight=0.5)
    found = federation(small_plan(clip=clip, rounds=15, noise=0.3, sums=federated.Central()))
    history = found.fit()
    assert history.clips[-1] > 3e-3
    assert np.all(np.isfinite(history.clips))


def test_local_steps_may_be_private_by_themselves():
    inside = sgd.Plan(examples=8, lot=4, steps=2, clip=1.0, noise=2.0, delta=1e-3)
    local = federated.Local(private=inside)
    found = federation(small_plan(rounds=1), local=local)
    found.fit()
    assert found.example_event.event == inside.event
    assert found.plan.event.unit is not inside.event.unit
    seeded = federation(small_plan(rounds=1, seed=1), local=local)
    assert seeded.example_event == Reproducible(found.example_event)  # whoever knows the seed knows all noise


def test_a_loss_is_a_criterion_or_a_function_of_model_and_batch_inside_the_clients_too():
    inside = sgd.Plan(examples=8, lot=8, steps=2, clip=1e3, noise=1e-9, delta=1e-3, sampling=sgd.FixedOrder())
    seen = []
    for loss in (
        nn.CrossEntropyLoss(),
        nn.functional.cross_entropy,
        lambda model, batch: -model(batch[0]).log_softmax(1).gather(1, batch[1].unsqueeze(1)).mean(),
    ):
        model = nn.Linear(3, 2)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        federated.Local(loss=loss, private=inside).train(model, blobs()[0], secret=bytes(32))
        seen.append(model.weight.detach())
    plain = nn.Linear(3, 2)
    nn.init.zeros_(plain.weight), nn.init.zeros_(plain.bias)
    federated.Local(epochs=2).train(plain, blobs()[0])
    for weight in seen:
        assert torch.allclose(weight, plain.weight, atol=1e-5)


def test_a_silent_client_contributes_nothing():
    plan = small_plan(per_round=40, survivors=40, noise=0.05, rounds=1)
    found = federation(plan, silent=range(CLIENTS))
    before = found.model.weight.detach().clone()
    found.fit()
    assert (found.model.weight - before).abs().max() < 0.05


def test_clients_that_are_not_those_of_the_plan_are_refused():
    with pytest.raises(InvalidArgument, match="40"):
        federated.Federation(nn.Linear(3, 2), small_plan(), blobs()[:7])
    with pytest.raises(InvalidArgument, match="dimension"):
        federation(small_plan(dimension=9))


# -- the commands ------------------------------------------------------------------------------------------------------


def test_rows_are_dealt_once():
    labels = np.arange(600) % 10
    for classes in (None, 2):
        parts = cut(labels, 50, classes)
        assert sorted(np.concatenate(parts)) == list(range(600))
    assert max(len(np.unique(labels[part])) for part in parts) <= 4


def asked(*extra):
    return [
        "federated", "simulate", "--data", "digits", "--clients", "60", "--rounds", "4", "--epsilon", "8",
        "--per-round", "10", *extra,
    ]  # fmt: skip


@pytest.mark.slow
def test_simulate_makes_a_folder_that_reports_and_audits(tmp_path):
    out = tmp_path / "run"
    done = CliRunner().invoke(app, [*asked("--out", str(out), "--dropping", "0.05", "--json")])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["unit"] == "client"
    assert 7.99 < told["epsilon"] <= 8
    assert told["results"]["accuracy"] > 0.2
    assert all(lower <= upper <= 8 for lower, upper in told["dropouts"].values())
    assert told["epsilon_for_insiders"] > 8
    page = (out / "report.html").read_text()
    assert "terrine federated simulate" in page
    assert CliRunner().invoke(app, ["report", str(out)]).exit_code == 0
    assert CliRunner().invoke(app, ["audit", "run", str(out)]).exit_code == 0
    again = CliRunner().invoke(app, [*asked("--out", str(out), "--dropping", "0.05", "--json")])
    assert json.loads(again.output)["finished_before"]


class CutOff(Exception):
    pass


def test_a_simulation_that_was_cut_off_goes_on_to_the_same_model(tmp_path):
    settings = SimulationSettings(data="digits", clients=60, rounds=3, epsilon=8.0, quick=True, seed=4)

    def cut_off(done):
        if done == 2:
            raise CutOff

    with pytest.raises(CutOff):
        simulate(settings, tmp_path / "a", after=cut_off)
    assert not (tmp_path / "a" / "privacy.json").exists()
    rounds = []
    weights = [simulate(settings, tmp_path / name, after=rounds.append).path / "model.safetensors" for name in "ab"]
    assert rounds == [3, 1, 2, 3]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not list((tmp_path / "a" / "owner").glob("federation*"))
    assert json.loads((tmp_path / "a" / "privacy.json").read_text())["reproducible_noise_for_tests_only"]


def test_a_weak_guarantee_must_be_asked_for(tmp_path):
    with pytest.raises(InvalidArgument, match="weak-guarantee"):
        simulate(SimulationSettings(data="digits", clients=60, rounds=2, epsilon=30.0), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_sums_compares_every_way():
    found = CliRunner().invoke(app, ["sums", "--parties", "6", "--length", "40", "--json"])
    assert found.exit_code == 0, found.output
    told = json.loads(found.output)
    assert [one["way"] for one in told["rows"]] == list(comparison.WAYS)
    for one in told["rows"]:
        if one["skipped"]:
            assert "terrine[crypto]" in one["skipped"]
            continue
        assert one["client_ms"] >= 0
        assert one["bytes"] > 0
        noisy = "people" in one["protects"]
        assert (one["error"] > 0.5) if noisy else (one["error"] < 1e-3)
    local, central = (
        next(one for one in told["rows"] if one["way"] == name) for name in ("local noise", told["rows"][0]["way"])
    )
    assert math.isclose(local["error"] / central["error"], 2 * math.sqrt(6), rel_tol=0.5)


def test_what_is_not_installed_is_skipped(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "phe", None)
    found = {one.way: one for one in comparison.compare(4, 8)}
    assert "pip install 'terrine[crypto]'" in found["Paillier, packed"].skipped
