"""The MNIST example of Opacus in Terrine: its network, lot, noise, clipping bound and learning rate.

    python examples/opacus/mnist.py --data FOLDER     # the four published files, unpacked: train-images-idx3-ubyte ...
    python examples/opacus/mnist.py --small           # scikit-learn's digits, enlarged: seconds

As there: lots of 64, noise 1, a clipping bound of 1, a learning rate of 0.1, ten epochs.
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

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels, as everybody publishes them
Images = tuple[Tensor, Tensor]


def make_network() -> nn.Module:
    """Two convolutions and two linear layers, for images of 28 x 28."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def train(model: nn.Module, data: Images, lot: int, epochs: int, rate: float) -> sgd.Plan:
    """Train in place; return the plan that was kept."""
    plan = sgd.Plan(examples=len(data[0]), lot=lot, epochs=epochs, noise=1.0, clip=1.0, delta=1e-5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in sgd.private_steps(model, optimizer, data, plan, loss=nn.CrossEntropyLoss()):
        optimizer.step()
        if step.number % 100 == 0:
            print(f"step {step.number} of {plan.steps}: epsilon {step.epsilon:.2f} at delta {plan.delta}")
    return plan


def measure_accuracy(model: nn.Module, data: Images) -> float:
    """Return the share of right answers; on public data."""
    model.eval()
    with torch.no_grad():
        answers = torch.cat([model(x).argmax(1) for x in data[0].split(1000)])
    return float((answers == data[1]).float().mean())


def read_mnist(folder: Path, part: str) -> Images:
    """Read images and labels from the published format."""
    images = np.frombuffer((folder / f"{part}-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    labels = np.frombuffer((folder / f"{part}-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    pixels = torch.from_numpy(images.astype(np.float32) / 255).view(-1, 1, 28, 28)
    return (pixels - MEAN) / DEVIATION, torch.from_numpy(labels.astype(np.int64))


def make_digits() -> tuple[Images, Images]:
    """Return scikit-learn's digits, enlarged from 8 x 8 to 28 x 28: 1,500 to train on and 297 others."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    images, labels = functional.interpolate(pixels, size=28, mode="bilinear"), torch.tensor(digits.target)
    images = (images - MEAN) / DEVIATION
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
        lot, epochs, rate = 150, 10, 1.0
    else:
        training, test = read_mnist(options.data, "train"), read_mnist(options.data, "t10k")
        lot, epochs, rate = 64, 10, 0.1
    model = make_network()
    plan = train(model, training, lot, epochs, rate)
    accuracy = measure_accuracy(model, test)
    print(f"accuracy {accuracy:.1%} at epsilon {plan.epsilon:.2f}, delta {plan.delta}")
    return accuracy


if __name__ == "__main__":
    main()
