"""The other libraries on the same tables at the same epsilon, each by its own accountant.

opacus        a DP-SGD training with `make_private_with_epsilon`
diffprivlib   logistic regression by objective perturbation, in an interpreter of its own: $DIFFPRIVLIB_PYTHON, because
              diffprivlib 0.6.6 needs scikit-learn below 1.8
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

Data = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Outcome:
    """One trained model. Epsilon is certified for ours, and what its own accountant says for a peer."""

    epsilon: float
    accuracy: float
    noise: float | None = None
    steps: int | None = None


@dataclass(frozen=True)
class Settings:
    """How a peer trains."""

    lot: int
    epochs: float
    learning_rate: float
    clip: float
    momentum: float


def opacus(
    build: Callable[[], nn.Module], data: Data, settings: Settings, epsilon: float, delta: float, seed: int
) -> Outcome:
    """DP-SGD by Opacus, as its tutorials write it."""
    from torch.utils.data import DataLoader

    from opacus import PrivacyEngine

    train, labels, test, truth = data
    torch.manual_seed(seed)
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.learning_rate, momentum=settings.momentum)
    loader = DataLoader(
        [(place,) for place in range(len(train))],  # type: ignore[arg-type]
        batch_size=settings.lot,
        collate_fn=lambda lot: (train[[place for (place,) in lot]], labels[[place for (place,) in lot]]),
    )
    epochs, steps = max(1, round(settings.epochs)), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = PrivacyEngine()
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader, target_epsilon=epsilon, target_delta=delta,
            epochs=epochs, max_grad_norm=settings.clip,
        )  # fmt: skip
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                steps += 1
        spent = float(engine.get_epsilon(delta))
    with torch.no_grad():
        accuracy = float((model(test).argmax(dim=1) == truth).double().mean())
    return Outcome(spent, accuracy, float(optimizer.noise_multiplier), steps)


_DIFFPRIVLIB = """
import json, sys, warnings
import numpy as np
from diffprivlib.models import LogisticRegression
warnings.simplefilter("ignore")
data = np.load(sys.argv[1])
model = LogisticRegression(epsilon=float(sys.argv[2]), data_norm=4.0, max_iter=1000, random_state=int(sys.argv[3]))
model.fit(data["train"], data["labels"])
print(json.dumps(float((model.predict(data["test"]) == data["truth"]).mean())))
"""
"""The norm bound is public: six numbers within [0, 1], seven categories and three flags are sixteen ones at most."""


def diffprivlib_python() -> str | None:
    """The interpreter that has diffprivlib."""
    return os.environ.get("DIFFPRIVLIB_PYTHON")


def diffprivlib(data: Data, epsilon: float, seed: int) -> Outcome:
    """Logistic regression by diffprivlib."""
    python = diffprivlib_python()
    assert python is not None
    with tempfile.TemporaryDirectory() as folder:
        held = dict(zip(("train", "labels", "test", "truth"), (one.numpy() for one in data), strict=True))
        np.savez(f"{folder}/data.npz", **held)
        command = [python, "-c", _DIFFPRIVLIB, f"{folder}/data.npz", str(epsilon), str(seed)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return Outcome(epsilon, float(json.loads(done.stdout)))
