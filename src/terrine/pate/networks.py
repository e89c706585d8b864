"""Small networks for teachers and students, by the shape of their input."""

from __future__ import annotations

from torch import nn


def teacher(channels: int, size: int, classes: int) -> nn.Module:
    """A small convolutional network for square images, fast in a stack: strides instead of pooling."""
    kernel = 5 if size >= 20 else 3
    first = (size - kernel) // 2 + 1
    second = (first - 3) // 2 + 1
    return nn.Sequential(
        nn.Conv2d(channels, 8, kernel, stride=2),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * second * second, classes),
    )


def student(channels: int, size: int, classes: int) -> nn.Module:
    """A convolutional network for a student: wider than a teacher's."""
    final = ((size + 1) // 2 + 1) // 2
    return nn.Sequential(
        nn.Conv2d(channels, 24, 5, stride=2, padding=2),
        nn.LeakyReLU(0.1),
        nn.Conv2d(24, 48, 3, stride=2, padding=1),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        nn.Linear(48 * final * final, 128),
        nn.LeakyReLU(0.1),
        nn.Linear(128, classes),
    )


def perceptron(features: int, classes: int, width: int = 64) -> nn.Module:
    """One hidden layer, for tables."""
    return nn.Sequential(nn.Linear(features, width), nn.ReLU(), nn.Linear(width, classes))
