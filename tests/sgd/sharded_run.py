"""What one of two processes does with a sharded model, or one alone with a plain one: run by the tests of sharding."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from terrine import sgd
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.optimizers import Average

from . import distributed_run
from .distributed_run import Account, begin, data, plan, refuse


class Network(nn.Module):
    """Sizes that two do not divide, a frozen layer, and one weight used twice."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 5), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))
        self.tied = nn.Linear(7, 7, bias=False)
        self.frozen = nn.Linear(7, 3).requires_grad_(False)
        self.last = nn.Linear(7, 3)

    def forward(self, x):
        x = self.second(self.first(x))
        x = torch.tanh(self.tied(torch.tanh(self.tied(x))))
        return self.last(x) + self.frozen(x)


def network():
    torch.manual_seed(0)
    return Network()


def shard(model, *, parts=True, **options):
    if parts:
        for part in (model.first, model.second):
            fully_shard(part, **options)
    return fully_shard(model, **options)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def train(rank, model, name="plain", **options):
    """The gradients of all steps, and the model after them, whole; how much of Adam's state is here; the charges."""
    account, model = Account(), network() if model is None else model
    options = {
        "optimizer": lambda parameters, lr: torch.optim.Adam([p for p in parameters if p.requires_grad], lr)
    } | options
    steps = begin(name=name, model=model, account=account, **options)
    gradients = []
    for step in steps:
        steps.optimizer.step()
        norm = step.gradient_norm if rank == 0 else 0.0  # asked for by one of them alone
        gradients.append((norm, [whole(one) for one in step.gradients]))
    here = [state["exp_avg"] for state in steps.optimizer.state.values()]
    numbers = sum((one.to_local() if isinstance(one, DTensor) else one).numel() for one in here)
    return gradients, {key: whole(value) for key, value in model.state_dict().items()}, numbers, account.charges


def submodules(model, batch):
    """A loss that never calls the model itself."""
    x, y = batch
    return nn.functional.cross_entropy(model.last(model.second(model.first(x))), y)


def go_on(rank, folder):
    """Three steps; then what is there before, and what a run that goes on begins with."""
    numbers, states = [], []
    for _ in range(2):
        model = shard(network())
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
        keep = Checkpoint(f"{folder}/run.pt", every=100)
        steps = sgd.private_steps(
            model, optimizer, data(), plan(seed=None), loss=nn.CrossEntropyLoss(), checkpoint=keep
        )
        numbers.append(steps.number)
        if not steps.number:
            for step in steps:
                optimizer.step()
                if step.number == 3:
                    break
        moments = [whole(state["exp_avg"]) for state in optimizer.state.values()]
        states.append(({key: whole(value) for key, value in model.state_dict().items()}, moments))
        steps.close()
    return numbers, states


def use_afterwards(rank, folder):
    """Its own forward and backward pass work before and after a run, as they did."""
    model = shard(network())
    results = []
    for _ in range(2):
        model.zero_grad()
        model(data()[0]).sum().backward()
        results.append([whole(one.grad) for one in model.parameters() if one.requires_grad])
        train(
            rank,
            model,
            optimizer=lambda parameters, lr: torch.optim.Adam([p for p in parameters if p.requires_grad], 0.0),
        )
    states = [type(module).__name__ for module in model.modules() if isinstance(module, FSDPModule)]
    return results, states, all(isinstance(one, DTensor) for one in model.parameters())


def in_tensor_parallel(rank, folder):
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    return refuse(lambda: begin(model=model))


def on_a_mesh(rank, folder):
    """Replicas of shards."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "parts"))
    return train(rank, shard(network(), mesh=mesh))


def fit(rank, folder):
    """A trainer's whole fit, with public validation and averaged weights; its checkpoint cannot hold these."""
    results = []
    for keep in (None, f"{folder}/trainer.pt"):
        model = shard(network())
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
        trainer = sgd.Trainer(
            model, optimizer, nn.CrossEntropyLoss(), plan(), validation=sgd.PublicValidation(data(), every=3),
            average=Average(0.5), checkpoint=keep, progress=False,
        )  # fmt: skip
        if keep is None:
            results.append((trainer.fit(data()).scores, trainer.evaluate(data()).loss))
        else:
            results.append(refuse(lambda trainer=trainer: trainer.fit(data())))
    return results


def keep_an_average(rank, folder):
    model, average = shard(network()), Average(0.5)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    steps = sgd.private_steps(
        model, optimizer, data(), plan(), loss=nn.CrossEntropyLoss(), checkpoint=f"{folder}/average.pt"
    )
    steps.keep(average=average)

    def run():
        for _ in steps:
            optimizer.step()
            average.update(model)

    return refuse(run)


SCENARIOS = {
    "fit": fit,
    "an average": keep_an_average,
    "plain": lambda rank, folder: train(rank, shard(network())),
    "as a whole": lambda rank, folder: train(rank, shard(network(), parts=False)),
    "hybrid": on_a_mesh,
    "people": lambda rank, folder: train(rank, shard(network()), "people"),
    "correlated": lambda rank, folder: train(rank, shard(network()), "correlated"),
    "adaptive": lambda rank, folder: train(rank, shard(network()), "adaptive"),
    "small lots": lambda rank, folder: train(rank, shard(network()), "small lots"),
    "submodules": lambda rank, folder: train(rank, shard(network()), loss=submodules),
    "go on": go_on,
    "use afterwards": use_afterwards,
    "mixed precision": lambda rank, folder: refuse(
        lambda: train(rank, shard(network(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))
    ),
    "tensor parallel": in_tensor_parallel,
    "clipped_sum": lambda rank, folder: refuse(
        lambda: sgd.clipped_sum(shard(network()), nn.CrossEntropyLoss(), data(), clip=1.0)
    ),
    "a failing loss": lambda rank, folder: distributed_run.fail_once(rank, folder, shard(network())),
    "again": lambda rank, folder: train(rank, shard(network())),
}


def process(rank, folder):
    distributed_run.process(rank, folder, SCENARIOS)
