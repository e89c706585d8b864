"""What a lot's tensors hold of its examples outside the model: every operation of the table, and losses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from terrine.errors import InvalidArgument
from terrine.sgd.isolation import LotTensor, Mixed, Rows, Total, handed, plain
from terrine.sgd.isolation.call import TABLE

N = 4


class Lot:
    """A lot that is out, as the tensors see it."""

    size, loss, number = N, None, 0

    def __init__(self):
        self.outputs = set()


def rows_of(tensor: Tensor, rows: Rows, example: int) -> Tensor:
    """All numbers of one example."""
    split = tensor.unflatten(rows.axis, (-1, N, rows.inner))
    return split.select(rows.axis + 1, example)


def given(change=0.0):
    """A lot of three numbers each, of which the first example may be another."""
    torch.manual_seed(0)
    x, lot = torch.rand(N, 3) + 0.1, Lot()
    x[0] += change
    y = torch.tensor([0, 1, 2, 1])
    y[0] = int(bool(change))
    return handed(x, lot, Rows(0)), handed(y, lot, Rows(0))


PUBLIC = torch.tensor([0.3, -0.2, 0.5])
CALLS = {
    "where": lambda x, y: torch.where(x > 0.5, x, PUBLIC),
    "lerp": lambda x, y: torch.lerp(x, 2 * x, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, x),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, x),
    "masked_fill": lambda x, y: x.masked_fill(x > 0.5, 0.0),
    "threshold": lambda x, y: functional.threshold(x, 0.5, 0.0),
    "clamp": lambda x, y: x.clamp(0.2, 0.5),
    "clip": lambda x, y: x.clip(0.2, 0.5),
    "type": lambda x, y: x.type(torch.float64),
    "clamp_min": lambda x, y: x.clamp_min(0.2),
    "clamp_max": lambda x, y: x.clamp_max(0.2),
    "to": lambda x, y: x.to(torch.float64),
    "type_as": lambda x, y: y.type_as(x),
    "full_like": lambda x, y: torch.full_like(x, 2.0),
    "data": lambda x, y: x.data,
    "randint_like": lambda x, y: torch.randint_like(x, 5),
    "zero": lambda x, y: x.clone().zero_(),
    "fill": lambda x, y: x.clone().fill_(2),
    "copy": lambda x, y: x.clone().copy_(2 * x),
    "normal": lambda x, y: x.clone().normal_(),
    "uniform": lambda x, y: x.clone().uniform_(),
    "random": lambda x, y: x.clone().random_(),
    "exponential": lambda x, y: x.clone().exponential_(),
    "real": lambda x, y: torch.real(x + 0j),
    "imag": lambda x, y: torch.imag(x + 1j),
    "requires_grad": lambda x, y: x.clone().requires_grad_(),
    "alias": lambda x, y: x.view_as(x),
    "view": lambda x, y: x.view(3 * N),
    "reshape": lambda x, y: x.reshape(N, 1, 3),
    "flatten": lambda x, y: x.unsqueeze(1).flatten(0, 1),
    "unflatten": lambda x, y: x.unflatten(1, (1, 3)),
    "ravel": lambda x, y: x.ravel(),
    "view_as": lambda x, y: x.view_as(x),
    "_unsafe_view": None,
    "Unflatten": None,
    "reshape_as": lambda x, y: x.reshape_as(x),
    "squeeze": lambda x, y: x[:, :1].squeeze(1),
    "unsqueeze": lambda x, y: x.unsqueeze(0),
    "T": lambda x, y: x.T,
    "mT": lambda x, y: x.mT,
    "H": lambda x, y: x.H,
    "mH": lambda x, y: x.mH,
    "transpose": lambda x, y: x.transpose(0, 1),
    "swapaxes": lambda x, y: x.swapaxes(0, 1),
    "swapdims": lambda x, y: x.swapdims(0, 1),
    "permute": lambda x, y: x[:, :, None].permute(2, 0, 1),
    "movedim": lambda x, y: x.movedim(0, 1),
    "moveaxis": lambda x, y: x.moveaxis(0, 1),
    "expand": lambda x, y: x.expand(2, N, 3),
    "expand_as": lambda x, y: x[:, :1].expand_as(x),
    "broadcast_to": lambda x, y: x.broadcast_to(2, N, 3),
    "repeat": lambda x, y: x.repeat(2, 2),
    "tile": lambda x, y: x.tile(2),
    "cat": lambda x, y: torch.cat([x, 2 * x], 1),
    "concat": lambda x, y: torch.concat([x, 2 * x]),
    "concatenate": lambda x, y: torch.concatenate([x, PUBLIC.expand(N, 3)], 1),
    "hstack_": None,
    "vstack_": None,
    "stack": lambda x, y: torch.stack([x, x]),
    "chunk": lambda x, y: x.chunk(3, 1)[1],
    "split": lambda x, y: x.split(2, 1)[0],
    "tensor_split": lambda x, y: x.tensor_split(2, 1)[0],
    "split_with_sizes": lambda x, y: x.split_with_sizes([1, 2], 1)[1],
    "unsafe_split": lambda x, y: x.unsafe_split(1, 1)[0],
    "unsafe_chunk": lambda x, y: x.unsafe_chunk(3, 1)[0],
    "unbind": lambda x, y: x.unbind(1)[0],
    "one_hot": lambda x, y: functional.one_hot(y, 4),
    "view_as_real": lambda x, y: torch.view_as_real(x + 1j),
    "view_as_complex": lambda x, y: torch.view_as_complex(torch.stack([x, x], 2)),
    "quantile": lambda x, y: x.quantile(0.5, 1),
    "nanquantile": lambda x, y: x.nanquantile(0.5, 1),
    "kthvalue": lambda x, y: x.kthvalue(2, 1)[0],
    "max": lambda x, y: x.max(1)[0],
    "min": lambda x, y: x.min(1)[1],
    "median": lambda x, y: x.median(1)[0],
    "mode": lambda x, y: x.mode(1)[0],
    "nanmedian": lambda x, y: x.nanmedian(1)[0],
    "aminmax": lambda x, y: x.aminmax(dim=1)[0],
    "var_mean": lambda x, y: torch.var_mean(x, 1)[0],
    "std_mean": lambda x, y: torch.std_mean(x, 1)[0],
    "norm": lambda x, y: x.norm(dim=1),
    "vector_norm": lambda x, y: torch.linalg.vector_norm(x, 2, 1),
    "linalg_vector_norm": lambda x, y: torch.linalg.vector_norm(x, 2, 1),
    "nanmean": lambda x, y: x.nanmean(1),
    "any": lambda x, y: (x > 0.5).any(1),
    "all": lambda x, y: (x > 0.5).all(1),
    "count_nonzero": lambda x, y: x.count_nonzero(1),
    "logsumexp": lambda x, y: x.logsumexp(1),
    "dropout": lambda x, y: functional.dropout(x, 0.5),
    "__getitem__": lambda x, y: x[torch.arange(N), y],
    "__setitem__": lambda x, y: written(x),
    "gaussian_nll_loss": lambda x, y: functional.gaussian_nll_loss(x, x, x, reduction="none"),
    "poisson_nll_loss": lambda x, y: functional.poisson_nll_loss(x, x, reduction="none"),
    "new_zeros": None,
    "new_ones": None,
    "new_full": None,
    "new_empty": None,
    "multi_margin_loss": lambda x, y: functional.multi_margin_loss(x, y, reduction="none"),
    "bernoulli": lambda x, y: torch.bernoulli(x.clamp(0, 1)),
    "multilabel_margin_loss": lambda x, y: functional.multilabel_margin_loss(
        x, functional.one_hot(y, 3), reduction="none"
    ),
    "poisson": None,
    "multilabel_soft_margin_loss": lambda x, y: functional.multilabel_soft_margin_loss(
        x, (x > 0.5).float(), reduction="none"
    ),
    "triplet_margin_loss": lambda x, y: functional.triplet_margin_loss(x, 2 * x, 3 * x, reduction="none"),
    "huber_loss": lambda x, y: functional.huber_loss(x, x, reduction="none"),
    "cosine_embedding_loss": lambda x, y: functional.cosine_embedding_loss(x, 2 * x, y.clamp(1, 1), reduction="none"),
    "margin_ranking_loss": lambda x, y: functional.margin_ranking_loss(x, 2 * x, x.sign(), reduction="none"),
    "pin_memory": None,
    "cuda": None,
    "binary_cross_entropy": lambda x, y: functional.binary_cross_entropy(x.sigmoid(), x.clamp(0, 1), reduction="none"),
    "empty_like": None,
    "log_sigmoid": None,
    "rrelu": lambda x, y: functional.rrelu(x),
    "isclose": lambda x, y: torch.isclose(x, PUBLIC),
    "alpha_dropout": lambda x, y: functional.alpha_dropout(x, 0.5),
    "kl_div": lambda x, y: functional.kl_div(x, x, reduction="none"),
    "__lshift__": lambda x, y: y << 1,
    "__rshift__": lambda x, y: y >> 1,
    "float_power": lambda x, y: x.float_power(2),
}
for name in (
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "soft_margin_loss",
    "hinge_embedding_loss",
    "binary_cross_entropy_with_logits",
):
    CALLS[name] = lambda x, y, name=name: getattr(functional, name)(x, 2 * x, reduction="none")


def written(x):
    made = x.clone()
    made[:, 1] = 0.5
    return made


def called(name, x, y):
    """The result of an operation by its name, with arguments that it takes."""
    if name in CALLS:
        return CALLS[name](x, y)
    function = getattr(Tensor, name, None) or getattr(torch, name, None) or getattr(functional, name)
    whole = name.strip("_") in ("and", "or", "xor", "rand", "ror", "rxor", "invert") and name.startswith("__")
    whole = whole or name.startswith(("logical", "bitwise"))
    one = (x > 0.5) if whole else x
    for arguments in ((one,), (one, one), (one, 0.5), (one, 1)):
        try:
            made = function(*arguments)
        except (TypeError, RuntimeError):
            continue
        if made is not NotImplemented:
            return made
    raise AssertionError(f"{name}: no call was found for it")


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_row_of_the_table_depends_on_its_example_alone(name):
    if name in CALLS and CALLS[name] is None:
        pytest.skip("needs another device, is public by definition, or is not the same twice")
    found = []
    for change in (0.0, 0.7):
        x, y = given(change)
        torch.manual_seed(1)
        found.append(called(name, x, y))
    status = found[0].status
    if status is None:
        return
    if isinstance(status, Total):
        assert name in ("sum", "mean", "nansum")
        return
    assert not isinstance(status, Mixed) or name in REDUCTIONS, status
    if isinstance(status, Rows):
        one, other = (plain(each) for each in found)
        for example in range(1, N):
            torch.testing.assert_close(rows_of(one, status, example), rows_of(other, status, example), equal_nan=True)


REDUCTIONS = {"amax", "amin", "argmax", "argmin", "logsumexp", "var", "std", "prod"}  # over all, by default


MIXING = {
    "a mean over the lot": lambda x, y: x - x.mean(0),
    "a norm of the lot": lambda x, y: x / x.norm(),
    "another order": lambda x, y: x[torch.tensor([1, 0, 3, 2])],
    "a part": lambda x, y: x[:2],
    "one example": lambda x, y: x[0],
    "shifted": lambda x, y: x.roll(1, 0),
    "sorted": lambda x, y: x.sort(0)[0],
    "products of examples": lambda x, y: x @ x.T,
    "by place": lambda x, y: x * torch.arange(N)[:, None],
    "over the lot": lambda x, y: x.softmax(0),
    "running sums": lambda x, y: x.cumsum(0),
    "against all": lambda x, y: x[:, None] - x[None],
    "a mask of examples": lambda x, y: x[x[:, 0] > 0.5],
    "unique": lambda x, y: y.unique(),
    "flattened and shifted": lambda x, y: x.flatten()[1:],
    "a total again": lambda x, y: x * x.sum(),
    "a total of totals": lambda x, y: x.sum() / x.mean(),
    "a squared total": lambda x, y: x.sum() ** 2,
    "weighted by the lot": lambda x, y: (x * x).sum() / x.sum(),
    "einsum": lambda x, y: torch.einsum("nd,md->nm", x, x),
    "distances": lambda x, y: torch.cdist(x, x),
    "a cumulative maximum": lambda x, y: x.cummax(0)[0],
    "padding beside": lambda x, y: functional.pad(x, (0, 0, 0, 1)),
    "random rows": lambda x, y: x + torch.randn(N, 3),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_never_goes_backward(name):
    x, y = given()
    x = handed(plain(x).clone().requires_grad_(), x.lot, Rows(0))
    try:
        found = MIXING[name](x, handed(plain(y), x.lot, Rows(0)))
    except InvalidArgument:
        return
    assert isinstance(found.status, Mixed), found.status
    with pytest.raises(InvalidArgument, match=r"mixes examples.*test_isolation\.py:\d+"):
        found.float().sum().backward()


APART = {
    "softmax": lambda x, y: x.softmax(1),
    "linear": lambda x, y: functional.linear(x, torch.ones(2, 3)),
    "a product": lambda x, y: x @ torch.ones(3, 2),
    "gather": lambda x, y: x.gather(1, y[:, None]),
    "sorted": lambda x, y: x.sort(1)[0],
    "layer norm": lambda x, y: functional.layer_norm(x, (3,)),
    "convolution": lambda x, y: functional.conv1d(x[:, None], torch.ones(1, 1, 2)),
    "weights of labels": lambda x, y: torch.tensor([1.0, 2.0, 3.0])[y],
    "labels of rows": lambda x, y: x[torch.arange(N), y],
    "cosine": lambda x, y: functional.cosine_similarity(x, x + 1, dim=1),
}


@pytest.mark.parametrize("name", APART)
def test_what_keeps_examples_apart_is_followed(name):
    x, y = given()
    found = APART[name](x, handed(plain(y), x.lot, Rows(0)))
    assert found.status == Rows(0)
    torch.testing.assert_close(plain(found), APART[name](plain(x), plain(y)))


def test_losses_are_totals():
    x, _ = given()
    y = handed(torch.tensor([0, 1, 2, 1]), x.lot, Rows(0))
    mean, total = functional.cross_entropy(x, y), functional.cross_entropy(x, y, reduction="sum")
    assert mean.status == (0.5 * mean + 1.0).status == sum([mean, mean]).status == Total(N, is_mean=True)
    assert total.status == Total(1.0, is_mean=False)
    assert (total / 7).status == Total(7.0, is_mean=True, divided=True)
    assert (total / 7 / 2).status == Total(14.0, is_mean=True, divided=True)
    assert isinstance((total + total / 7).status, Mixed)
    assert isinstance((total / 3 + total / 7).status, Mixed)
    assert torch.stack([mean, mean]).mean().status == mean.status
    assert isinstance((mean + total).status, Mixed)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.sub_(x.mean(0)),
        lambda x: x.__setitem__(0, 0.0),
        lambda x: x.as_subclass(Tensor),
        lambda x: x.register_hook(print),
        lambda x: torch.zeros(3).copy_(x.mean(0)),
        lambda x: torch.add(x, x, out=torch.zeros(N, 3)),
        lambda x: torch.autograd.grad(x.sum(), x),
        lambda x: setattr(x, "data", torch.zeros(N, 3)),
    ],
)
def test_what_leaves_the_path_is_refused(change):
    x, _ = given()
    with pytest.raises(InvalidArgument):
        change(x)


def test_changes_in_place_that_keep_examples_apart():
    x, _ = given()
    before = plain(x).clone()
    x += 1
    x[:, 0] = 0.0
    x[x > 1.5] = 2.0
    x.mul_(PUBLIC).clamp_(min=-1)
    assert isinstance(x, LotTensor)
    assert x.status == Rows(0)
    expected = before + 1
    expected[:, 0] = 0.0
    expected[expected > 1.5] = 2.0
    torch.testing.assert_close(plain(x), (expected * PUBLIC).clamp(min=-1))


def test_tensors_of_two_lots_never_go_backward_together():
    found = given()[0].sum() + given()[0].sum()
    assert isinstance(found.status, Mixed)
    with pytest.raises(InvalidArgument, match="two lots"):
        found.backward()
