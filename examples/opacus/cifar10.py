"""The image classifier of Opacus' tutorial in Terrine: a residual network with batch norms, mended by `sgd.fix`.

    python examples/opacus/cifar10.py --data FOLDER   # CIFAR-10, binary version: data_batch_1.bin, ..., test_batch.bin
    python examples/opacus/cifar10.py --small         # scikit-learn's digits in three colours, a small network: seconds

The tutorial trains ResNet-18 with RMSprop, lots of 512 and a clipping bound of 1.2 to epsilon 50, which is no promise
to anybody: here it is 8.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from terrine import sgd
from terrine.events import Budget

MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of CIFAR-10's colours, as published
Images = tuple[Tensor, Tensor]


class Residual(nn.Module):
    """Two convolutions with batch norms, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)])
        self.around = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(h)) + self.around(x))


def make_network(widths: Sequence[int], blocks: int) -> nn.Module:
    """Return a residual network: a stage of so many blocks for every width; (64, 128, 256, 512), 2 is ResNet-18."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    width = widths[0]
    for stage, outputs in enumerate(widths):
        for block in range(blocks):
            layers.append(Residual(width, outputs, stride=2 if stage and not block else 1))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def train(model: nn.Module, data: Images, lot: int, epochs: int, rate: float) -> tuple[nn.Module, sgd.Plan]:
    """Train a copy without batch norms; return it and the plan that was kept."""
    budget = Budget(epsilon=8.0, delta=1e-5)
    plan = sgd.Plan(examples=len(data[0]), lot=lot, epochs=epochs, clip=1.2, budget=budget)
    model = sgd.fix(model)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=rate)
    for step in sgd.private_steps(model, optimizer, data, plan, loss=nn.CrossEntropyLoss(), memory=2e9):
        optimizer.step()
        if step.number % 200 == 0:
            print(f"step {step.number} of {plan.steps}: epsilon {step.epsilon:.2f} at delta {plan.delta}")
    return model, plan


def measure_accuracy(model: nn.Module, data: Images) -> float:
    """Return the share of right answers; on public data."""
    model.eval()
    with torch.no_grad():
        answers = torch.cat([model(x).argmax(1) for x in data[0].split(500)])
    return float((answers == data[1]).float().mean())


def read_cifar10(paths: Sequence[Path]) -> Images:
    """Read files of the binary version: each record is a label and 3 x 32 x 32 bytes."""
    records = np.concatenate([np.frombuffer(path.read_bytes(), np.uint8).reshape(-1, 3073) for path in paths])
    pixels = torch.from_numpy(records[:, 1:].astype(np.float32) / 255).view(-1, 3, 32, 32)
    images = (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1)
    return images, torch.from_numpy(records[:, 0].astype(np.int64))


def make_digits() -> tuple[Images, Images]:
    """Return scikit-learn's digits in three colours, 8 x 8: 1,500 to train on and 297 others."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = torch.tensor(digits.images / 8 - 1, dtype=torch.float32).unsqueeze(1)
    images, labels = torch.cat([grey, -grey, grey], dim=1), torch.tensor(digits.target)
    return (images[:1500], labels[:1500]), (images[1500:], labels[1500:])


def main(arguments: Sequence[str] | None = None) -> float:
    """Train as the command line says; return the accuracy on the test set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path)
    source.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    if options.small:
        training, test = make_digits()
        network, lot, epochs, rate = make_network((8, 16), blocks=1), 250, 12, 2e-2
    else:
        training = read_cifar10(sorted(options.data.glob("data_batch_*.bin")))
        test = read_cifar10([options.data / "test_batch.bin"])
        network, lot, epochs, rate = make_network((64, 128, 256, 512), blocks=2), 512, 20, 1e-3
    model, plan = train(network, training, lot, epochs, rate)
    accuracy = measure_accuracy(model, test)
    print(f"accuracy {accuracy:.1%} at epsilon {plan.epsilon:.2f}, delta {plan.delta}")
    return accuracy


if __name__ == "__main__":
    main()
