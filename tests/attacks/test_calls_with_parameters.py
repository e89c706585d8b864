"""A call with a trained parameter computes what torch computes, and has the gradient that autograd has."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from terrine.errors import InvalidArgument
from terrine.sgd import clipped_sum


class Called(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.tensor([0.3, 0.55, 0.8]))
        self.call = call

    def forward(self, x):
        return self.call(self.w, self.b, x)


CALLS = {
    "addmm without its bias": lambda w, b, x: torch.addmm(b, x, w, beta=0.0, alpha=5.0),
    "addmm by name": lambda w, b, x: torch.addmm(input=b, mat1=x, mat2=w),
    "addmm, scaled": lambda w, b, x: torch.addmm(b, x, w, alpha=2.0),
    "a complex number of two": lambda w, b, x: (x[:, :3] * torch.complex(b, 2 * b)).abs(),
    "a view as complex": lambda w, b, x: (x[:, :2] * torch.view_as_complex(w.view(2, 3, 2)[:, 0])).abs(),
    "a filter of frequencies": lambda w, b, x: torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(w[:, 0]), n=4),
    "a complex product": lambda w, b, x: (x.to(torch.complex64) @ torch.complex(w, w.flip(0))).abs(),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_is_what_autograd_says(name):
    torch.manual_seed(0)
    model, x, y = Called(CALLS[name]), torch.randn(5, 4), torch.zeros(5)
    found = clipped_sum(model, lambda model, batch: model(batch[0]).square().sum(), (x, y), clip=1e9).sums
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()), allow_unused=True)
    for (key, parameter), gradient in zip(model.named_parameters(), wanted, strict=True):
        torch.testing.assert_close(found[key], torch.zeros_like(parameter) if gradient is None else gradient)


@pytest.mark.parametrize("table", [functional.embedding, lambda x, w, **more: functional.embedding_bag(x, w, **more)])
def test_tables_that_shorten_the_rows_they_read_are_refused(table):
    model = Called(lambda w, b, x: table(x, w, max_norm=0.1))
    tokens = torch.tensor([[0, 1], [2, 3]])
    with pytest.raises(InvalidArgument, match="max_norm"):
        clipped_sum(model, lambda model, batch: model(batch).square().sum(), tokens, clip=1.0)


class Forces(nn.Module):
    """A gradient inside the forward pass, and hooks on what may need none."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.linear(x).square()
        energy.register_hook(lambda gradient: gradient)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force


def test_gradients_inside_a_forward_pass_are_part_of_the_program():
    torch.manual_seed(0)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    model = Forces()
    wanted = torch.autograd.grad(functional.mse_loss(model(x), y), list(model.parameters()), allow_unused=True)
    found = clipped_sum(model, nn.MSELoss(), (x, y), clip=1e6).sums
    torch.testing.assert_close(found["linear.weight"] / 6, wanted[0])
