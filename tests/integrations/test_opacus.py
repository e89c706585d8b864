"""The same model both ways: Opacus' bill beside ours, and the calls of docs/from-opacus.md that are named there."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from terrine import accounting, sgd
from terrine.events import Budget

opacus = pytest.importorskip("opacus")

PAGE = Path(__file__).parents[2] / "docs" / "from-opacus.md"
NOISE, CLIP, EPOCHS, LOT, DELTA = 1.1, 1.0, 3, 50, 1e-4


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 8, generator=generator)
    return x, (x[:, 0] + x[:, 1] > 0).long()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def by_opacus(accountant):
    """The engine and the model after a run, and how many steps it took."""
    model = network()
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.5), nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(*data()), batch_size=LOT)
    engine = opacus.PrivacyEngine(accountant=accountant)
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=NOISE, max_grad_norm=CLIP
    )
    steps = 0
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            steps += 1
    return engine, model, steps


def by_terrine():
    model = network()
    optimizer, criterion = torch.optim.SGD(model.parameters(), lr=0.5), nn.CrossEntropyLoss()
    plan = sgd.Plan(examples=500, lot=LOT, epochs=EPOCHS, noise=NOISE, clip=CLIP, delta=DELTA)
    for _ in (steps := sgd.private_steps(model, optimizer, data(), plan, loss=criterion)):
        optimizer.step()
    return steps, model, plan


def accuracy(model):
    x, y = data()
    with torch.no_grad():
        return float((model(x).argmax(1) == y).float().mean())


@pytest.mark.filterwarnings("ignore")
def test_the_same_run_is_billed_alike():
    """Ours is certified on both sides: Opacus' bounds lie above our lower bound, and not below the truth."""
    ours_steps, ours, plan = by_terrine()
    found = accounting.bounds(plan.event, delta=DELTA)
    assert ours_steps.epsilon == pytest.approx(found.upper)
    for accountant, excess in (("rdp", 0.6), ("prv", 0.1)):
        engine, theirs, steps = by_opacus(accountant)
        assert steps == plan.steps
        bill = engine.get_epsilon(DELTA)
        assert found.lower <= bill <= (1 + excess) * found.upper, (accountant, bill, found)
        assert min(accuracy(ours), accuracy(theirs)) > 0.7
    engine, _, _ = by_opacus("gdp")
    assert engine.get_epsilon(DELTA) < found.lower  # an estimate, printed as epsilon


@pytest.mark.filterwarnings("ignore")
def test_the_noise_for_a_budget_is_no_larger_than_opacus():
    plan = sgd.Plan(examples=500, lot=LOT, epochs=EPOCHS, clip=CLIP, budget=Budget(epsilon=2.0, delta=DELTA))
    model = network()
    _, optimizer, _ = opacus.PrivacyEngine(accountant="rdp").make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(TensorDataset(*data()), batch_size=LOT),
        target_epsilon=2.0,
        target_delta=DELTA,
        epochs=EPOCHS,
        max_grad_norm=CLIP,
    )
    assert plan.noise < optimizer.noise_multiplier


def public(module):
    return {name for name in vars(module) if not name.startswith("_") and callable(getattr(module, name))}


def test_every_public_call_of_opacus_is_on_the_page():
    import opacus.accountants as accountants
    import opacus.data_loader as data_loader
    import opacus.distributed as distributed
    import opacus.layers as layers
    import opacus.optimizers as optimizers
    import opacus.schedulers as schedulers
    import opacus.utils.batch_memory_manager as memory
    from opacus.validators import ModuleValidator

    wanted = public(opacus.PrivacyEngine) | {f"ModuleValidator.{name}" for name in public(ModuleValidator)}
    for module in (opacus, accountants, layers, optimizers, schedulers):
        wanted |= {
            name for name, one in vars(module).items() if isinstance(one, type) and one.__module__.startswith("opacus")
        }
    wanted |= {"DPDataLoader", "DifferentiallyPrivateDistributedDataParallel", "BatchMemoryManager"}
    assert data_loader.DPDataLoader
    assert distributed.DifferentiallyPrivateDistributedDataParallel
    assert memory.BatchMemoryManager
    page = PAGE.read_text(encoding="utf-8")
    missing = sorted(name for name in wanted if not name.startswith("_") and not re.search(rf"\b{name}\b", page))
    assert not missing
