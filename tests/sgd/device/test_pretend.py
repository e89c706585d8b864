"""The pretend device: what it refuses, and that whatever else it runs gives the CPU's results."""

import copy
import gc
import io
import operator

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from . import pretend


def rows(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def words(*shape, below=7):
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(0))


def assert_same(here, there):
    """The same numbers, and the second ones on the device."""
    there = list(there) if isinstance(there, tuple | list) else [there]
    here = list(here) if isinstance(here, tuple | list) else [here]
    assert all(one.device.type == pretend.NAME for one in there)
    torch.testing.assert_close([one.cpu() for one in there], here, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------------------------- mixed devices

MIXED = {
    "sum": lambda a, c: a + c,
    "sum, the other way": lambda a, c: c + a,
    "in place": lambda a, c: a.add_(c),
    "in place, on the cpu": lambda a, c: c.add_(a),
    "a number of the cpu in place": lambda a, c: c.sum().add_(a.sum()),
    "product": lambda a, c: a @ c,
    "product, the other way": lambda a, c: c @ a,
    "linear": lambda a, c: functional.linear(a, a, c[0]),
    "einsum": lambda a, c: torch.einsum("ij,jk->ik", a, c),
    "convolution": lambda a, c: functional.conv1d(a[None], c[None]),
    "cat": lambda a, c: torch.cat([a, c]),
    "stack": lambda a, c: torch.stack([c, a]),
    "out": lambda a, c: torch.mul(a, a, out=c),
    "where": lambda a, c: torch.where(a > 0, a, c),
    "masked_fill": lambda a, c: a.masked_fill(c > 0, 0.0),
    "index_select": lambda a, c: a.index_select(0, torch.tensor([1])),
    "index_select by a number": lambda a, c: a.index_select(0, torch.tensor(1)),
    "index_add": lambda a, c: a.index_add(0, torch.tensor([0]), a[:1]),
    "scatter": lambda a, c: a.scatter(0, torch.tensor([[0]]), 1.0),
    "index": lambda a, c: a[torch.tensor([0, 1])],
    "put": lambda a, c: operator.setitem(a, c > 0, 0.0),
    "embedding": lambda a, c: functional.embedding(torch.tensor([1]), a),
    "cross_entropy": lambda a, c: functional.cross_entropy(a, torch.tensor([0, 1, 2])),
    "layer_norm": lambda a, c: functional.layer_norm(a, (3,), c[0]),
    "equal": torch.equal,
    "foreach": lambda a, c: torch._foreach_add([a], [c]),
    "vmap": lambda a, c: vmap(torch.mul)(a, c),
    "vmap of dot": lambda a, c: vmap(torch.dot)(a, c),
    "generator": lambda a, c: a.normal_(generator=torch.Generator()),
}


@pytest.mark.parametrize("mix", MIXED.values(), ids=MIXED.keys())
def test_tensors_of_two_devices_are_refused(there, mix):
    with pytest.raises(RuntimeError, match=r"[Ee]xpected"):
        mix(rows(3, 3).to(there), rows(3, 3))


def test_numbers_of_the_cpu_are_taken_where_torch_takes_them(there):
    a, two = rows(3, 3).to(there), torch.tensor(2.0)
    for made in (a + two, two * a, a.sum() + two, torch.where(a > 0, a, two), a.masked_fill(a > 0, two), a + 1, 2 / a):
        assert made.device.type == pretend.NAME
    a.mul_(two)
    a[0, 0] = two
    a[a < 0] = two
    assert float(a.min()) >= 0
    assert float(a[0, 0]) == 2


# ----------------------------------------------------------------------------------------------- modules, as on the CPU

MODULES = {
    "linear": (lambda: nn.Linear(4, 3), rows(5, 4)),
    "conv2d": (lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), rows(5, 2, 6, 6)),
    "conv1d in groups": (lambda: nn.Conv1d(4, 4, 3, groups=2, bias=False), rows(5, 4, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 4, 3, stride=2), rows(5, 2, 4, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 4), rows(5, 4, 3, 3)),
    "layer norm": (lambda: nn.LayerNorm(4), rows(5, 4)),
    "embedding": (lambda: nn.Embedding(7, 4), words(5, 3)),
    "embedding bag": (lambda: nn.EmbeddingBag(7, 4, mode="sum"), words(5, 3)),
    "lstm": (lambda: nn.LSTM(4, 3, num_layers=2, batch_first=True), rows(5, 6, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), rows(5, 6, 4)),
    "softmax": (lambda: nn.Sequential(nn.Linear(4, 3), nn.GELU(), nn.Dropout(0.0), nn.Softmax(-1)), rows(5, 4)),
}


def output(module, *inputs, parameters=None):
    made = functional_call(module, parameters or {}, inputs)
    return made[0] if isinstance(made, tuple) else made


def backward(module, x):
    made = output(module, x)
    return [made, *torch.autograd.grad((made**2).sum(), list(module.parameters()))]


def per_example(module, x):
    """Gradients of every example, under vmap."""

    def loss(parameters, one):
        return (output(module, one.unsqueeze(0), parameters=parameters) ** 2).sum()

    parameters = {name: one.detach() for name, one in module.named_parameters()}
    return list(vmap(grad(loss), in_dims=(None, 0), randomness="different")(parameters, x).values())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("gradients", [backward, per_example])
@pytest.mark.parametrize(("make", "x"), MODULES.values(), ids=MODULES.keys())
def test_modules_give_the_results_of_the_cpu(there, make, x, gradients):
    module = make()
    moved = copy.deepcopy(module).to(there)
    assert_same(gradients(module, x), gradients(moved, x.to(there)))


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_other_recurrent_networks(there, kind):  # torch has no vmap for these on any device
    module, x = kind(4, 3, batch_first=True), rows(5, 6, 4)
    assert_same(backward(module, x), backward(copy.deepcopy(module).to(there), x.to(there)))


def test_attention_without_gradients_takes_its_fast_path(there):
    layer, x = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval(), rows(5, 6, 4)
    with torch.inference_mode():
        assert_same(layer(x), copy.deepcopy(layer).to(there)(x.to(there)))


# ----------------------------------------------------------------------------------------------------------- operations

OPERATIONS = {
    "cross_entropy": lambda x, n: functional.cross_entropy(x, n[:4] % 5),
    "einsum": lambda x, n: torch.einsum("ij,kj->ik", x, x),
    "bmm": lambda x, n: x.view(2, 2, 5).bmm(x.view(2, 5, 2)),
    "addmm": lambda x, n: torch.addmm(x[:, :4], x, x.t()),
    "index_select": lambda x, n: x.index_select(1, n % 5),
    "index": lambda x, n: x[n[:3] % 4, n[:3] % 5],
    "sort": lambda x, n: x.sort(dim=1),
    "argsort": lambda x, n: n.argsort(stable=True),
    "bincount": lambda x, n: n.bincount(minlength=9),
    "cumsum": lambda x, n: x.cumsum(0),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, -1.0),
    "nonzero": lambda x, n: (x > 0).nonzero(),
    "unique": lambda x, n: n.unique(return_inverse=True),
    "repeat_interleave": lambda x, n: x.repeat_interleave(n[:4], dim=0),
    "index_add": lambda x, n: torch.zeros_like(x).index_add_(0, n[:4] % 4, x),
    "as_strided": lambda x, n: x.as_strided((3, 2), (1, 2), 1),
    "unfold": lambda x, n: functional.unfold(x.view(1, 1, 4, 5), 2),
    "norms": lambda x, n: torch.linalg.vector_norm(x, dim=1),
    "topk": lambda x, n: x.topk(2),
    "arange": lambda x, n: torch.arange(3, device=x.device) + torch.tril_indices(3, 3, device=x.device)[:, :3],
    "conv2d_weight": lambda x, n: nn.grad.conv2d_weight(x.view(1, 1, 4, 5), (1, 1, 2, 2), x[:3, :4].view(1, 1, 3, 4)),
    "svd": lambda x, n: torch.linalg.svdvals(x),
    "complex": lambda x, n: torch.fft.fft(x).conj().imag.clone(),
}


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS.keys())
def test_operations_give_the_results_of_the_cpu(there, operation):
    x, n = rows(4, 5), words(6)
    assert_same(operation(x, n), operation(x.to(there), n.to(there)))


class Scaled(torch.autograd.Function):
    """A function of somebody's own, with a rule for vmap."""

    @staticmethod
    def forward(x, by):
        return x * by

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.by = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.by, None

    @staticmethod
    def vmap(info, in_dims, x, by):
        return Scaled.apply(x, by), in_dims[0]


def test_functions_of_ones_own_hooks_and_batches_of_gradients(there):
    x = rows(3, 2).to(there).requires_grad_()
    made = Scaled.apply(x, 3.0)
    seen = []
    made.grad_fn.register_prehook(lambda gradients: seen.append(gradients[0].device.type))
    made.sum().backward()
    assert seen == [pretend.NAME]
    assert_same(torch.full((3, 2), 3.0), x.grad)
    assert_same(torch.full((3, 2), 3.0), vmap(grad(lambda one: Scaled.apply(one, 3.0).sum()))(x.detach()))
    chosen = torch.eye(6, device=there).view(6, 3, 2)
    (jacobian,) = torch.autograd.grad(x**2, x, chosen, is_grads_batched=True)
    assert_same(2 * (x * chosen).detach().cpu(), jacobian)
    assert_same(torch.full((3, 2), 6.0), torch.autograd.grad((x**3).sum(), x, create_graph=True)[0].detach() * 2 / x**2)


# --------------------------------------------------------------------------------------------------------------- memory


def test_views_share_memory_and_outlive_their_base(there):
    base = torch.zeros(4, 3, device=there)
    view = base.t()[1:]
    view.add_(1.0)
    assert view._base is base
    assert view.untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert base.sum().item() == 8
    del base
    gc.collect()
    assert view.sum().item() == 8


def test_sizes_change_only_where_they_are_changed(there):
    x = rows(2, 3).t().to(there)
    before, place = x.clone(), x.data_ptr()
    x.resize_(x.shape)
    assert (x.data_ptr(), x.stride()) == (place, (1, 3))
    assert_same(before.cpu(), x)
    y = torch.arange(3.0, device=there)
    y.resize_(1000)
    assert_same(torch.arange(3.0), y[:3])
    made = torch.empty(0, device=there)
    torch.mul(before, 2.0, out=made.resize_(before.shape))
    assert_same(2 * before.cpu(), made)
    made.set_(before)
    assert made.data_ptr() == before.data_ptr()
    y.untyped_storage().resize_(0)
    assert y.untyped_storage().nbytes() == 0


def test_memory_is_given_back(there):
    import resource

    x = torch.zeros(1 << 20, device=there)
    for _ in range(20):
        (x + 1).resize_(1 << 21).mul_(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(60):
        (x + 1).resize_(1 << 21).mul_(2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60 * 4096 // 4  # a quarter of what was made


# ------------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_optimizers_take_the_steps_of_the_cpu(there, kind, foreach):
    here = nn.Linear(4, 3)
    moved = copy.deepcopy(here).to(there)
    for module, x in ((here, rows(5, 4)), (moved, rows(5, 4).to(there))):
        optimizer = kind(module.parameters(), lr=0.1, weight_decay=0.1, foreach=foreach)
        for _ in range(3):
            optimizer.zero_grad()
            (module(x) ** 2).sum().backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
    assert_same([one.detach() for one in here.parameters()], [one.detach() for one in moved.parameters()])


def test_modules_that_move_keep_their_parameters(there):
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    before = list(module.parameters())
    assert all(one is two for one, two in zip(before, module.to(there).parameters(), strict=True))
    assert module[1].weight is module[0].weight
    assert {one.device.type for one in before} == {pretend.NAME}


def test_models_are_saved_and_loaded(there):
    module = nn.Linear(4, 3).to(there)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    for place, kind in ((None, pretend.NAME), ("cpu", "cpu"), (there, pretend.NAME)):
        file.seek(0)
        state = torch.load(file, map_location=place)
        assert state["weight"].device.type == kind
        torch.testing.assert_close(state["weight"].cpu(), module.weight.detach().cpu())
    fresh = nn.Linear(4, 3)
    fresh.load_state_dict(state)
    torch.testing.assert_close(fresh.weight, module.weight.cpu())
    assert nn.Linear(4, 3, device=there).weight.device.type == pretend.NAME


# ----------------------------------------------------------------------------------------------------------- randomness

DRAWS = {
    "randn": lambda on: torch.randn(5, device=on),
    "randint": lambda on: torch.randint(0, 1000, (5,), device=on),
    "randperm": lambda on: torch.randperm(50, device=on),
    "rand_like": lambda on: torch.rand_like(torch.zeros(5, device=on)),
    "bernoulli": lambda on: torch.full((50,), 0.5, device=on).bernoulli(),
    "multinomial": lambda on: torch.ones(50, device=on).multinomial(5),
    "dropout": lambda on: functional.dropout(torch.ones(50, device=on)),
    "in place": lambda on: torch.zeros(5, device=on).normal_().exponential_(),
    "initial weights": lambda on: nn.Linear(4, 3, device=on).weight.detach(),
    "vmap": lambda on: vmap(functional.dropout, randomness="different")(torch.ones(5, 9, device=on)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())
def test_draws_come_from_the_devices_own_generator(there, draw):
    module = torch.get_device_module(there)
    here, before = torch.get_rng_state(), module.get_rng_state(there)
    one, two = draw(there), draw(there)
    assert not torch.equal(one, two)
    assert torch.equal(here, torch.get_rng_state())
    module.set_rng_state(before, there)
    assert_same(one.cpu(), draw(there))
    torch.manual_seed(7)
    one = draw(there)
    torch.manual_seed(7)
    assert_same(one.cpu(), draw(there))


def test_other_generators(there):
    one, two = (torch.Generator(device=there).manual_seed(3) for _ in range(2))
    before = torch.get_device_module(there).get_rng_state()
    assert torch.equal(torch.randn(5, device=there, generator=one), torch.randn(5, device=there, generator=two))
    assert torch.equal(before, torch.get_device_module(there).get_rng_state())
    with torch.random.fork_rng(device_type=pretend.NAME):
        torch.randn(5, device=there)
    assert torch.equal(before, torch.get_device_module(there).get_rng_state())


# -------------------------------------------------------------------------------------------------------------- float64

DOUBLES = {
    "made": lambda x: torch.zeros(3, dtype=torch.float64, device=x.device),
    "converted": lambda x: x.double(),
    "moved": lambda x: torch.zeros(3, dtype=torch.float64).to(x.device),
    "summed": lambda x: x.sum(dtype=torch.float64),
    "seen": lambda x: x.view(torch.float64),
    "copied": lambda x: x.new_tensor([1.0], dtype=torch.float64),
    "norm": lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
}


@pytest.mark.parametrize("make", DOUBLES.values(), ids=DOUBLES.keys())
def test_float64_can_be_refused(there, make):
    x = rows(4).to(there)
    assert make(x).dtype is torch.float64
    with pretend.without_float64():
        with pytest.raises(TypeError, match="no float64"):
            make(x)
        assert_same(2.5 * x.cpu() + 1, 2.5 * x + torch.tensor(1.0, dtype=torch.float64))
        assert_same([torch.tensor([1.5])], [torch.zeros(1, device=there).copy_(torch.tensor([1.5]).double())])
    assert make(x).dtype is torch.float64


def test_what_torch_asks_of_the_module(there):
    module = torch.get_device_module(there)
    assert module is torch.pretend
    assert (module.is_available(), module.device_count(), module.current_device()) == (True, 1, 0)
    assert torch.zeros(1, device=there).device == torch.device("pretend", 0)
    assert "device='pretend:0'" in repr(torch.zeros(2, device=there))


def test_autocast_rounds_products_and_keeps_losses(there):
    module, x = nn.Linear(4, 3, device=there), rows(2, 4).to(there)
    with torch.autocast(pretend.NAME, dtype=torch.bfloat16):
        made = module(x)
        loss = functional.cross_entropy(made, words(2, below=3).to(there))
    assert (made.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    loss.backward()
    assert module.weight.grad.dtype is torch.float32
