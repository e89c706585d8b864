"""What one example says to Python, by a failure or an array, is not what the others said."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine.errors import InvalidArgument
from terrine.sgd import clipped_sum
from tests.sgd.helpers import released_sum


class Root(nn.Module):
    """Falls back where a matrix has no Cholesky factor."""

    def __init__(self, caught):
        super().__init__()
        self.weight, self.caught = nn.Parameter(torch.ones(3)), caught

    def forward(self, x):
        matrix = x.view(-1, 2, 2)
        try:
            root = torch.linalg.cholesky(matrix)
        except self.caught:
            root = -torch.linalg.cholesky(matrix + 4 * torch.eye(2))
        return root.flatten(1)[:, [0, 2, 3]] * self.weight


class Bare(Root):
    def forward(self, x):
        matrix = x.view(-1, 2, 2)
        try:
            root = torch.linalg.cholesky(matrix)
        except:  # noqa: E722
            root = -torch.linalg.cholesky(matrix + 4 * torch.eye(2))
        return root.flatten(1)[:, [0, 2, 3]] * self.weight


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.ones(2)), nn.Embedding(4, 2).requires_grad_(False)

    def forward(self, x):
        try:
            return self.table(x.long()) * self.weight
        except IndexError:
            return -self.table(x.long() % 4) * self.weight


class Signs(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2000))

    def forward(self, x):
        return (0 * x + torch.from_numpy(np.sign(x.detach().numpy()))) * self.weight


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.weight * (-1.0 if "5." in str(x) else 1.0)


class LiveMemory(nn.Module):
    """numpy's view of a tensor that is written to afterwards."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        h = torch.zeros_like(x)
        view = h.numpy()
        h += x
        return (x + torch.from_numpy(view).clone()) * self.weight


class MaskByNumpy(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x):
        mask = x.abs() < 1000
        mask.numpy()[:, 0] = False
        return x.sign() * 10 * mask * self.weight


GOOD, BAD = (2 * torch.eye(2)).flatten().repeat(50, 1), torch.tensor([[1.0, 2.0, 2.0, 1.0]])
ONES = torch.zeros(8, 2000)
ONES[0, 500] = ONES[1:, 1500] = 1.0
CASES = {
    "a narrow except": (lambda: Root(torch.linalg.LinAlgError), torch.cat([GOOD, BAD])),
    "a broad except": (lambda: Root(Exception), torch.cat([GOOD, BAD])),
    "a bare except": (lambda: Bare(()), torch.cat([GOOD, BAD])),
    "a table": (Table, torch.tensor([0, 1, 2, 3] * 5 + [9])),
    "long arrays": (Signs, ONES.flip(0)),
    "live memory": (LiveMemory, torch.cat([torch.full((1, 2), 50.0), torch.ones(20, 2)]).flip(0)),
    "a mask by numpy": (MaskByNumpy, torch.ones(12, 2)),
    "texts": (Text, torch.cat([torch.ones(12, 2), torch.full((1, 2), 5.0)])),
}


READS = ("long arrays", "live memory", "a mask by numpy", "texts")


def total(model, x):
    return model(x).sum()


@pytest.mark.parametrize("reads_values", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_one_example_moves_the_sum_by_the_bound(name, reads_values):
    make, x = CASES[name]
    torch.manual_seed(0)
    model = make()
    try:
        sums = [clipped_sum(model, total, rows, clip=1.0, reads_values=reads_values).sums for rows in (x, x[:-1])]
    except InvalidArgument as refusal:
        assert name in READS, refusal  # noqa: PT017
        assert not reads_values, refusal  # noqa: PT017
        assert "test_answers_of_one_example.py:" in str(refusal)  # noqa: PT017
        return
    assert float((sums[0]["weight"] - sums[1]["weight"]).norm()) <= 1.0001


@pytest.mark.parametrize("name", CASES)
def test_so_it_is_in_a_run(name):
    make, x = CASES[name]
    torch.manual_seed(0)
    model = make()
    sums = [released_sum(model, (rows,), lambda m, b: total(m, b[0]), reads_values=True) for rows in (x, x[:-1])]
    assert float((sums[0] - sums[1]).norm()) <= 1.0001


class Scale(nn.Module):
    """Its output is of its weights alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x):
        return self.weight.expand(len(x), 2)


def test_an_output_of_parameters_alone_has_its_gradient():
    found = clipped_sum(Scale(), lambda model, x: model(x).square().sum(), torch.randn(5, 2), clip=1e6).sums
    torch.testing.assert_close(found["weight"], 5 * torch.tensor([2.0, 4.0]))


def test_a_failure_of_every_example_is_the_models_own():
    class Falls(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x):
            try:
                return self.linear(x[:, :2])
            except RuntimeError:
                return self.linear(x)

    torch.manual_seed(0)
    x, y, model = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]), Falls()
    found = clipped_sum(model, functional.cross_entropy, (x, y), clip=1e6).sums
    wanted = torch.autograd.grad(functional.cross_entropy(model(x), y, reduction="sum"), list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(found[name], gradient)
