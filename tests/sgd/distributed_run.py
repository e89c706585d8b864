"""What one of several processes does, or the only one: run by the tests of several processes.

A scenario is a function of (rank, folder); it returns what the test looks at. What it raises is looked at, too.
"""

import os
import signal
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from terrine import sgd
from terrine.common.release_count import ReleaseCount
from terrine.errors import BudgetExceeded, TerrineError
from terrine.sgd.checkpoint import Checkpoint


def plan(**options):
    return sgd.Plan(
        **{"examples": 12, "lot": 6, "steps": 6, "clip": 0.7, "noise": 1.0, "delta": 1e-5, "seed": 2} | options
    )


PLANS = {
    "plain": plan(),
    "fresh": plan(seed=None),
    "people": plan(examples=None, people=6, rows_per_person=2, lot=3),
    "correlated": plan(correlated=sgd.Banded(2)),
    "adaptive": plan(clip=sgd.Adaptive(initial=1.0), metrics=(sgd.Metric(), sgd.Metric.accuracy())),
    "small lots": plan(lot=1),  # often empty, or of one process alone
}


def data():
    generator = torch.Generator().manual_seed(3)
    return 4 * torch.randn(12, 4, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(dropout), nn.Tanh(), nn.Linear(5, 3))


class Account:
    name = "account"

    def __init__(self, left=9):
        self.left, self.charges = left, 0

    def charge(self, event, *, purpose, by):
        if not self.left:
            raise BudgetExceeded("nothing left")
        self.charges += 1


def begin(*, name="plain", model=None, wrap=None, rows=None, account=None, optimizer=torch.optim.Adam, **options):
    torch.set_num_threads(1)
    model = network() if model is None else model
    chosen = options.pop("plan", PLANS[name])
    person = None if chosen.people is None else torch.arange(12) // 2
    made = optimizer(model.parameters(), lr=0.05)
    return sgd.private_steps(
        model if wrap is None else wrap(model), made, data() if rows is None else rows, chosen,
        **{"loss": nn.CrossEntropyLoss(), "person": person, "account": account} | options,
    )  # fmt: skip


def take(steps, count=99):
    """Take so many steps; return the gradients of each, what was measured, and the bound."""
    results = []
    for step in steps:
        steps.optimizer.step()
        results.append((step.gradient_norm, [one.clone() for one in step.gradients], step.metrics, steps.release.bound))
        if step.number == count:
            break
    return results


def train(name, **options):
    account = Account()
    return take(begin(name=name, account=account, **options)), account.charges


def refuse(run):
    """Return what it is refused with, and after how many seconds."""
    begun = time.monotonic()
    try:
        run()
    except TerrineError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    except Exception as error:
        return type(error).__name__, repr(error), time.monotonic() - begun
    return "nothing", "", 0.0


def go_on(rank, folder):
    """A run that is closed after three steps and goes on, with a schedule that is kept."""
    results = []
    for stop in (3, 99):
        model = network(dropout=0.5)
        steps = begin(name="fresh", model=model, checkpoint=f"{folder}/run.pt", loss=nn.CrossEntropyLoss())
        schedule = torch.optim.lr_scheduler.ExponentialLR(steps.optimizer, 0.5)
        steps.keep(schedule=schedule)
        for step in steps:
            steps.optimizer.step()
            schedule.step()
            results.append(step.number)
            if step.number == stop:
                break
        steps.close()
    return results, schedule.get_last_lr(), model.state_dict()


def shard(rank, folder):
    """Each process has an own half of twice as many rows, as DistributedSampler would deal them out."""
    x, y = data()
    account = Account()
    found = refuse(lambda: begin(rows=(x + rank, y), account=account))
    return *found, account.charges


def skip_a_step(rank, folder):
    steps = begin()

    def run():
        for step in steps:
            if not (rank == 1 and step.number == 3):
                steps.optimizer.step()

    return refuse(run), steps.number


def fail_once(rank, folder, model=None):
    """The loss breaks in one process, in the middle of the run."""
    fails = []

    def loss(model, batch):
        if fails:
            raise MemoryError("no room")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    steps = begin(loss=loss, model=model)

    def run():
        for step in steps:
            steps.optimizer.step()
            if rank == 1 and step.number == 2:
                fails.append(True)

    return refuse(run), steps.number


def fill_the_disk(rank, folder):
    """The count cannot be written by the first process: nobody releases."""
    steps = begin(name="fresh", checkpoint=Checkpoint(f"{folder}/full.pt"))
    take(steps, 2)
    before = [parameter.grad.clone() for parameter in steps.release.parameters.values()]
    write, os.pwrite = os.pwrite, _full
    try:
        found = refuse(lambda: next(steps))
    finally:
        os.pwrite = write
    after = [parameter.grad for parameter in steps.release.parameters.values()]
    return found, all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def _full(*_):
    raise OSError(28, os.strerror(28))


def refuse_a_second_run(rank, folder):
    """The first process finds that another run holds the checkpoint."""
    held = ReleaseCount(Checkpoint(f"{folder}/held.pt").count_path) if rank == 0 else None
    found = refuse(lambda: begin(checkpoint=f"{folder}/held.pt"))
    if held is not None:
        held.close()
    return found


SCENARIOS = {
    **{name: lambda rank, folder, name=name: train(name) for name in PLANS if name != "fresh"},
    "wrapped": lambda rank, folder: train("plain", wrap=DistributedDataParallel),
    "fresh": lambda rank, folder: train("fresh"),
    "dropout": lambda rank, folder: train("plain", model=network(dropout=0.5)),
    "go on": go_on,
    "shards": shard,
    "a smaller data set": lambda rank, folder: refuse(lambda: begin(rows=tuple(t[: 12 - rank] for t in data()))),
    "another model": lambda rank, folder: refuse(lambda: begin(model=_seeded(rank))),
    "another plan": lambda rank, folder: refuse(lambda: begin(plan=plan(noise=1.0 + rank))),
    "no account left": lambda rank, folder: refuse(lambda: begin(account=Account(left=0))),
    "a skipped step": skip_a_step,
    "a failing loss": fail_once,
    "a full disk": fill_the_disk,
    "a second run": refuse_a_second_run,
    "plain again": lambda rank, folder: train("plain"),  # the processes are still in step with each other
}


def _seeded(seed):
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def process(rank, folder, scenarios=SCENARIOS):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    results = {}
    for name, scenario in scenarios.items():
        try:
            results[name] = scenario(rank, folder)
        except Exception as error:
            results[name] = repr(error)
        torch.distributed.barrier()
    torch.save(results, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def die(rank, folder, meet, dies_at):
    """The second process is killed in the middle of a run; what the first one says goes into a file."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/{meet}", rank=rank, world_size=2)
    steps = begin(name="fresh", checkpoint=Checkpoint(f"{folder}/run.pt", every=1))
    numbers = []

    def run():
        for step in steps:
            steps.optimizer.step()
            numbers.append(step.number)
            if rank == 1 and step.number == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.save((refuse(run), numbers), f"{folder}/{rank}.pt")
