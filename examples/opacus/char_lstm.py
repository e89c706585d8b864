"""The name classifier of Opacus' tutorial in Terrine: which language a surname is from, by torch's own LSTM.

    python examples/opacus/char_lstm.py --data FOLDER   # a text file for each language, a name on each line
    python examples/opacus/char_lstm.py --small         # names made of syllables, three languages: seconds

Names are padded to 15 letters, a public length: padded to the longest of their lot, every name would tell of another.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from terrine import sgd
from terrine.events import Budget

LENGTH, PADDING = 15, 256
Names = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """An embedding of bytes, an LSTM, and a linear layer on its last output."""

    def __init__(self, classes: int, embedding: int = 64, hidden: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(257, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.output = nn.Linear(hidden, classes)

    def forward(self, names: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(names))
        scores: Tensor = self.output(states[:, -1])
        return scores


def train(model: nn.Module, data: Names, lot: int, epochs: int, rate: float) -> sgd.Plan:
    """Train in place; return the plan that was kept."""
    budget = Budget(epsilon=12.0, delta=1e-5)
    plan = sgd.Plan(examples=len(data[0]), lot=lot, epochs=epochs, clip=1.5, budget=budget)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in sgd.private_steps(model, optimizer, data, plan, loss=nn.CrossEntropyLoss()):
        optimizer.step()
        if step.number % 100 == 0:
            print(f"step {step.number} of {plan.steps}: epsilon {step.epsilon:.2f} at delta {plan.delta}")
    return plan


def measure_accuracy(model: nn.Module, data: Names) -> float:
    """Return the share of right answers; on public data."""
    model.eval()
    with torch.no_grad():
        return float((model(data[0]).argmax(1) == data[1]).float().mean())


def encode_name(name: str) -> list[int]:
    """Return a name's bytes, padded in front to the public length."""
    letters = list(name.encode())[:LENGTH]
    return [PADDING] * (LENGTH - len(letters)) + letters


def split_names(names: Mapping[str, Sequence[str]], seed: int = 0) -> tuple[Names, Names]:
    """Return four fifths of the names to train on, and the others."""
    rows = [(encode_name(name), label) for label, language in enumerate(sorted(names)) for name in names[language]]
    random.Random(seed).shuffle(rows)
    x, y = torch.tensor([letters for letters, _ in rows]), torch.tensor([label for _, label in rows])
    cut = len(rows) * 4 // 5
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def read_names(folder: Path) -> dict[str, list[str]]:
    """Read a file of names for each language."""
    files = sorted(folder.glob("*.txt"))
    return {path.stem: [name for name in path.read_text(encoding="utf-8").split("\n") if name] for path in files}


def make_names(count: int = 700, seed: int = 0) -> dict[str, list[str]]:
    """Return made-up names of three languages."""
    syllables = {
        "harsh": ["kra", "tor", "grim", "vak", "dra", "zog"],
        "long": ["papa", "lala", "nopo", "dudu", "mimi", "koko"],
        "soft": ["lie", "sha", "mei", "fou", "wen", "yue"],
    }
    choose = random.Random(seed)
    return {
        language: ["".join(choose.choices(parts, k=choose.randint(1, 3))).title() for _ in range(count)]
        for language, parts in syllables.items()
    }


def main(arguments: Sequence[str] | None = None) -> float:
    """Train as the command line says; return the accuracy on names that were left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path)
    source.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    names = make_names() if options.small else read_names(options.data)
    training, test = split_names(names)
    if options.small:
        model, lot, epochs = Classifier(len(names), embedding=16, hidden=32), 200, 6
    else:
        model, lot, epochs = Classifier(len(names)), 800, 50
    plan = train(model, training, lot, epochs, rate=2.0)
    accuracy = measure_accuracy(model, test)
    print(f"accuracy {accuracy:.1%} at epsilon {plan.epsilon:.2f}, delta {plan.delta}")
    return accuracy


if __name__ == "__main__":
    main()
