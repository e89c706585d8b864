"""MNIST at epsilon 2.93, delta 1e-5: a linear model on scattering features, or a CNN with bounded activations.

    python examples/sgd_mnist.py --data ~/.cache/terrine/mnist --model scatter

`--data` is a folder with the four published files, unpacked (train-images-idx3-ubyte, ...).
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from terrine import sgd
from terrine.events import Budget
from terrine.features import architectures

MODELS = {
    "scatter": {"lot": 8192, "epochs": 30, "lr": 8.0},
    "cnn": {"lot": 1024, "epochs": 20, "lr": 1.0},
}


def read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Images in 0 ... 1 and labels, from the published format."""
    images = np.frombuffer((folder / f"{part}-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    labels = np.frombuffer((folder / f"{part}-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    pixels = torch.from_numpy(images.astype(np.float32) / 255).view(-1, 1, 28, 28)
    return pixels, torch.from_numpy(labels.astype(np.int64))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="scatter")
    parser.add_argument("--epsilon", type=float, default=2.93)
    chosen = parser.parse_args()
    choice = MODELS[chosen.model]
    train, test = read(chosen.data, "train"), read(chosen.data, "t10k")

    started = time.perf_counter()
    model: nn.Module = architectures.tempered_cnn()
    if chosen.model == "scatter":
        train, test = ((architectures.scatter_features(x), y) for x, y in (train, test))
        model = architectures.scatter_linear()
        print(f"features of 70,000 images: {time.perf_counter() - started:.0f} s")

    budget = Budget(epsilon=chosen.epsilon, delta=1e-5)
    plan = sgd.Plan(examples=len(train[1]), lot=choice["lot"], epochs=choice["epochs"], clip=0.1, budget=budget)
    optimizer = torch.optim.SGD(model.parameters(), lr=choice["lr"], momentum=0.9)
    trainer = sgd.Trainer(model, optimizer, nn.CrossEntropyLoss(), plan)
    history = trainer.fit(train)
    result = trainer.evaluate(test)
    print(
        f"{chosen.model}: epsilon <= {history.epsilon:.2f} at delta 1e-5, {history.steps} steps, noise {plan.noise:.2f}"
    )
    print(f"test accuracy {result.accuracy:.2%} ({time.perf_counter() - started:.0f} s)")


if __name__ == "__main__":
    main()
