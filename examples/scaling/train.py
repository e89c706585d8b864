"""DP-SGD on several processes: the digits of scikit-learn, a model as wide as you like, replicas or shards of it.

    torchrun --nproc-per-node 2 examples/scaling/train.py
    torchrun --nproc-per-node 2 examples/scaling/train.py --sharded --width 4096 --checkpoint run.pt
    python examples/scaling/train.py

Every process is given the whole data set and takes its share of each lot. Killed, the same command goes on.
"""

import argparse
import os
import resource
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from terrine import sgd
from terrine.events import Budget


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sharded", action="store_true", help="every process keeps a part of the model (FSDP2)")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lot", type=int, default=150)
    parser.add_argument("--memory", type=float, help="about how many bytes a microbatch may take")
    parser.add_argument("--checkpoint", help="where to keep the run")
    parser.add_argument("--seed", type=int, help="for comparisons: a seeded run says so of itself")
    return parser.parse_args()


def make_model(width: int, *, sharded: bool, together: bool) -> nn.Module:
    torch.manual_seed(0)  # the same replica in every process
    layers = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))
    if not together:
        return layers
    if not sharded:
        return DistributedDataParallel(layers)
    for layer in layers:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(layers)


def megabytes_of_state(optimizer: torch.optim.Optimizer) -> float:
    """Return how much of the optimizer's state this process has."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    local = [getattr(value, "to_local", lambda value=value: value)() for value in tensors]
    return sum(value.numel() * value.element_size() for value in local) / 1e6


def main() -> None:
    options = read_options()
    together = "RANK" in os.environ  # set by torchrun
    if together:
        torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    is_first = not together or torch.distributed.get_rank() == 0

    bunch = load_digits()
    x, y = torch.tensor(bunch.data / 16, dtype=torch.float32), torch.tensor(bunch.target)
    train, test = (x[:1500], y[:1500]), (x[1500:], y[1500:])
    plan = sgd.Plan(
        examples=1500, lot=options.lot, epochs=options.epochs, clip=0.5, budget=Budget(epsilon=3.0, delta=1e-5),
        seed=options.seed,
    )  # fmt: skip
    model = make_model(options.width, sharded=options.sharded, together=together)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 if options.width < 1000 else 0.001)
    steps = sgd.private_steps(
        model, optimizer, train, plan, loss=nn.CrossEntropyLoss(), memory=options.memory, checkpoint=options.checkpoint
    )
    if is_first:
        print(f"{len(steps) - steps.number} of {len(steps)} steps to take", flush=True)
    begun = time.perf_counter()
    taken = steps.number
    for _ in steps:
        optimizer.step()

    seconds = time.perf_counter() - begun
    with torch.no_grad():
        model.eval()
        right = float((model(test[0]).argmax(dim=1) == test[1]).float().mean())  # of a sharded model: by all processes
    if is_first:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"epsilon {plan.epsilon:.2f}, {right:.1%} of held-out digits right")
        step, held = 1000 * seconds / max(1, steps.number - taken), megabytes_of_state(optimizer)
        print(f"{step:.0f} ms a step, optimizer {held:.1f} MB here, peak {peak:.0f} MB")
    if together:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
