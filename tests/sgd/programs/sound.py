"""Sound programs: each must be accepted, and its clipped sum is that of one example after the other."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 as everybody writes it
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.sgd.programs.helpers import Parts, cross_entropy, images, perceptron, table, tokens

SOUND: dict[str, Callable[..., Any]] = {}
SIZE = 12


def sound(build: Callable[..., Any]) -> Callable[..., Any]:
    """Registers a program under its name."""
    assert build.__name__ not in SOUND
    SOUND[build.__name__] = build
    return build


def rows(kind: Callable[[], tuple[torch.Tensor, torch.Tensor]] = table) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = kind()
    return x[:SIZE], y[:SIZE]


def sequences(channels: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Five time steps each, and a class for every step."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(SIZE, 5, channels, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (SIZE, 5), generator=generator)


def normal(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(SIZE, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# How a model is called.


@sound
def encoder_then_head():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.Linear(5, 3)

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model.head(model.encoder(x)), y)

    return Both(), loss, rows()


@sound
def a_slice_of_the_layers():
    def loss(model, batch):
        x, y = batch
        hidden = model[:2](x)
        return F.cross_entropy(model[2](hidden), y) + 0.1 * hidden.square().sum()

    return perceptron(), loss, rows()


@sound
def two_calls_of_one_model():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) + 0.5 * F.cross_entropy(model(2 * x + 1), y)

    return perceptron(), loss, rows()


@sound
def several_losses_in_a_list():
    def loss(model, batch):
        x, y = batch
        output = model(x)
        losses = [F.cross_entropy(output, y), output.abs().mean(), output.logsumexp(1).square().sum()]
        return sum(losses)

    return perceptron(), loss, rows()


@sound
def parameters_used_by_name():
    def loss(model, batch):
        x, y = batch
        hidden = torch.tanh(F.linear(x, model[0].weight, model[0].bias))
        return F.cross_entropy(hidden @ model[2].weight.T + model[2].bias, y)

    return perceptron(), loss, rows()


@sound
def layer_called_and_its_weight_used_as_well():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) + (model[0].weight @ x.T).square().mean() + model[2].weight.norm()

    return perceptron(), loss, rows()


@sound
def penalty_on_the_weights():
    def loss(model, batch):
        return cross_entropy(model, batch) + 0.01 * sum(value.square().sum() for value in model.parameters())

    return perceptron(), loss, rows()


@sound
def functional_call():
    def loss(model, batch):
        x, y = batch
        halved = {name: 0.5 * value for name, value in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, halved, (x,)), y)

    return perceptron(), loss, rows()


@sound
def one_row_at_a_time():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x[0]), y[0])

    return perceptron(), loss, rows()


@sound
def example_folded_into_several_rows():
    def loss(model, batch):
        x, y = batch
        output = model(x.reshape(3, 2).repeat(1, 3))
        return F.cross_entropy(output, y.expand(3))

    return perceptron(), loss, rows()


@sound
def criterion_module():
    return perceptron(), nn.CrossEntropyLoss(label_smoothing=0.1), rows()


@sound
def criterion_that_sums():
    return perceptron(), nn.CrossEntropyLoss(reduction="sum"), rows()


@sound
def criterion_of_ones_own():
    class Focal(nn.Module):
        def forward(self, output, target):
            value = F.cross_entropy(output, target, reduction="none")
            return ((1 - torch.exp(-value)) ** 2 * value).mean()

    return perceptron(), Focal(), rows()


@sound
def partial_loss():
    def loss(model, batch, *, power):
        x, y = batch
        return F.cross_entropy(model(x), y) ** power

    return perceptron(), functools.partial(loss, power=1.5), rows()


@sound
def object_with_constants():
    class Weighted:
        def __init__(self, factor):
            self.factor, self.name = factor, "weighted"

        def __call__(self, model, batch):
            return self.factor * cross_entropy(model, batch)

    return perceptron(), Weighted(0.7), rows()


@sound
def bound_method_of_a_trainer():
    class Mine:
        smoothing = 0.1

        def compute(self, model, batch):
            x, y = batch
            return F.cross_entropy(model(x), y, label_smoothing=self.smoothing)

    return perceptron(), Mine().compute, rows()


# Batches.


@sound
def batch_of_three():
    def loss(model, batch):
        x, y, weight = batch
        return (F.cross_entropy(model(x), y, reduction="none") * weight).sum()

    return perceptron(), loss, (*rows(), normal().abs())


@sound
def batch_as_a_dict():
    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    x, y = rows()
    return perceptron(), loss, {"x": x, "y": y}


@sound
def nested_batch():
    def loss(model, batch):
        (left, right), target = batch["both"], batch["target"]["y"]
        return F.cross_entropy(model(left) - model(right), target)

    x, y = rows()
    return perceptron(), loss, {"both": (x, normal(6)), "target": {"y": y}}


@sound
def list_as_a_batch():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    return perceptron(), loss, list(rows())


# Choices that depend on the example.


@sound
def boolean_masks():
    def loss(model, batch):
        x, y = batch
        logits = model(x)
        kept = y >= 0
        return F.cross_entropy(logits[kept], y[kept], reduction="sum")

    x, y = sequences()
    y[::2, 1:3] = -1
    return nn.Linear(4, 3), lambda model, batch: loss(model, (batch[0], batch[1])), (x, y)


@sound
def masked_language_modelling():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.out = nn.Embedding(10, 4), nn.Linear(4, 10)

        def forward(self, ids):
            return self.out(torch.cumsum(self.words(ids), 1))

    def loss(model, batch):
        ids, keep = batch
        logits = model(ids.masked_fill(~keep, 9))
        return F.cross_entropy(logits[~keep], ids[~keep])

    ids, _ = rows(tokens)
    keep = normal(5) > 0
    keep[:, 0] = False
    return Small(), loss, (ids, keep)


@sound
def python_branch_on_a_sum():
    def loss(model, batch):
        x, y = batch
        if x.sum() > 0:
            return F.cross_entropy(model(x), y)
        return F.cross_entropy(model(-x), y) * 2

    return perceptron(), loss, rows()


@sound
def branch_in_the_forward_pass():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.one(x) if bool((x.mean() > 0).all()) else self.other(x)

    return Chosen(), cross_entropy, rows()


@sound
def loop_over_the_steps_of_a_sequence():
    def loss(model, batch):
        x, y = batch
        state = torch.zeros(len(x), 4, dtype=x.dtype)
        for now in range(x.shape[1]):
            state = torch.tanh(model(state + x[:, now]))
        return (state[:, :3].log_softmax(1) * F.one_hot(y[:, -1], 3)).sum().neg()

    return nn.Linear(4, 4), loss, sequences()


@sound
def loop_while_it_is_large():
    def loss(model, batch):
        x, y = batch
        while x.abs().max() > 2:
            x = x / 2
        return F.cross_entropy(model(x), y)

    return perceptron(), loss, rows()


@sound
def length_read_as_an_index():
    def loss(model, batch):
        x, length = batch
        return model(x[:, : length[0]]).square().sum()

    generator = torch.Generator().manual_seed(2)
    return nn.Linear(4, 3), loss, (sequences()[0], torch.randint(1, 5, (SIZE,), generator=generator))


@sound
def guard_of_a_loss_that_is_not_finite():
    def loss(model, batch):
        value = cross_entropy(model, batch)
        if not torch.isfinite(value):
            return 0 * model[2].bias.sum()
        return value

    x, y = rows()
    x[3, 2] = math.nan
    return perceptron(), loss, (x, y)


@sound
def some_examples_are_not_finite():
    x, y = rows()
    x[3, 2], x[5, 0] = math.nan, math.inf
    return perceptron(), cross_entropy, (x, y)


@sound
def some_examples_raise():
    x, y = rows()
    y = y.clone()
    y[4] = 17
    return perceptron(), cross_entropy, (x, y)


@sound
def reads_values_and_says_so():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model((x - float(x.mean())) / x.abs().max().item()), y) * (1 + int(y))

    return Parts(perceptron(), loss, rows(), options={"reads_values": True})


# Losses.


@sound
def ignored_labels():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)

    x, y = sequences()
    y[:, 3] = -100
    y[::3, 1] = -100
    return nn.Linear(4, 3), loss, (x, y)


@sound
def ignored_labels_and_class_weights():
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x).transpose(1, 2), y, weight=weights, ignore_index=-100)

    x, y = sequences()
    y[::2, :3] = -100
    return nn.Linear(4, 3), loss, (x, y)


@sound
def class_weights_that_sum():
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, weight=weights, reduction="sum")

    return perceptron(), loss, rows()


@sound
def mean_over_tokens():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x).transpose(1, 2), y, label_smoothing=0.05)

    return nn.Linear(4, 3), loss, sequences()


@sound
def mask_divided_by_its_sum():
    def loss(model, batch):
        x, y, mask = batch
        each = F.cross_entropy(model(x).transpose(1, 2), y, reduction="none")
        return (each * mask).sum() / mask.sum().clamp(min=1)

    return nn.Linear(4, 3), loss, (*sequences(), (normal(5) > 0).double())


@sound
def sum_divided_by_the_number_of_elements():
    def loss(model, batch):
        (x,) = batch
        return ((model(x) - x) ** 2).sum() / x.numel()

    return nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6)), loss, rows()[:1]


@sound
def connectionist_temporal_classification():
    def loss(model, batch):
        x, targets, lengths = batch
        steps = torch.full((len(x),), x.shape[1])
        return F.ctc_loss(model(x).log_softmax(2).transpose(0, 1), targets, steps, lengths, zero_infinity=True)

    generator = torch.Generator().manual_seed(8)
    targets = torch.randint(1, 3, (SIZE, 2), generator=generator)
    return nn.Linear(4, 3), loss, (sequences()[0], targets, torch.randint(1, 3, (SIZE,), generator=generator))


@sound
def huber_and_quantile():
    def loss(model, batch):
        x, target = batch
        error = target - model(x)[:, 0]
        return F.huber_loss(model(x)[:, 1], target) + torch.maximum(0.9 * error, -0.1 * error).sum()

    return perceptron(), loss, (rows()[0], normal())


@sound
def binary_cross_entropy():
    def loss(model, batch):
        x, y = batch
        wanted = F.one_hot(y, 3).to(x.dtype)
        both = F.binary_cross_entropy(torch.sigmoid(model(x)), wanted)
        return both + F.binary_cross_entropy_with_logits(model(x), wanted, pos_weight=torch.tensor([1.0, 2, 3]))

    return perceptron(), loss, rows()


@sound
def kullback_leibler_and_likelihood():
    def loss(model, batch):
        x, y, other = batch
        logs = F.log_softmax(model(x), -1)
        return F.nll_loss(logs, y) + F.kl_div(logs, F.softmax(other, -1), reduction="batchmean")

    return perceptron(), loss, (*rows(), normal(3))


@sound
def cosine_of_two_views():
    def loss(model, batch):
        x, other = batch
        return (1 - F.cosine_similarity(model(x), model(other))).mean()

    return perceptron(), loss, (rows()[0], normal(6))


@sound
def triplet_within_the_example():
    def loss(model, batch):
        anchor, positive, negative = batch
        return F.triplet_margin_loss(model(anchor), model(positive), model(negative), margin=2.0)

    return perceptron(), loss, (rows()[0], normal(6), normal(6, seed=9))


@sound
def contrast_with_negatives_of_its_own():
    def loss(model, batch):
        x, negatives = batch
        q, positive = F.normalize(model(x), dim=-1), F.normalize(model(x.flip(1)), dim=-1)
        others = F.normalize(model(negatives[0]), dim=-1)
        logits = torch.cat([q @ positive.T, q @ others.T], 1) / 0.5
        return F.cross_entropy(logits, torch.zeros(1, dtype=torch.long))

    return perceptron(), loss, (rows()[0], normal(4, 6))


@sound
def negative_log_likelihood_of_a_gaussian():
    def loss(model, batch):
        x, target = batch
        output = model(x)
        return F.gaussian_nll_loss(output[:, 0], target, F.softplus(output[:, 1]))

    return perceptron(), loss, (rows()[0], normal())


@sound
def distribution_objects():
    def loss(model, batch):
        x, target = batch
        output = model(x)
        return -torch.distributions.Normal(output[:, 0], output[:, 1].exp()).log_prob(target).mean()

    return perceptron(), loss, (rows()[0], normal())


@sound
def poisson_likelihood():
    def loss(model, batch):
        x, y = batch
        return F.poisson_nll_loss(model(x)[:, 0], y.to(x.dtype), full=False)

    return perceptron(), loss, rows()


@sound
def survival_with_a_weibull():
    def loss(model, batch):
        x, time, event = batch
        shape, scale = F.softplus(model(x)[:, 0]), F.softplus(model(x)[:, 1])
        hazard = (time / scale) ** shape
        return (hazard - event * (shape.log() - scale.log() + (shape - 1) * (time / scale).log())).sum()

    return perceptron(), loss, (rows()[0], normal().abs() + 0.1, (normal(seed=8) > 0).double())


@sound
def policy_gradient_with_given_returns():
    def loss(model, batch):
        x, action, gain = batch
        policy = torch.distributions.Categorical(logits=model(x))
        return -(policy.log_prob(action) * gain).mean() - 0.01 * policy.entropy().mean()

    return perceptron(), loss, (*rows(), normal())


@sound
def clipped_surrogate_of_a_policy():
    def loss(model, batch):
        x, action, gain, before = batch
        ratio = (model(x).log_softmax(-1).gather(1, action[:, None])[:, 0] - before).exp()
        return -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()

    return perceptron(), loss, (*rows(), normal(), -normal(seed=8).abs())


@sound
def distillation_from_a_frozen_teacher():
    teacher = perceptron().requires_grad_(False).eval()

    def loss(model, batch):
        x, _ = batch
        with torch.no_grad():
            wanted = F.softmax(teacher(x) / 2, -1)
        return F.kl_div(F.log_softmax(model(x) / 2, -1), wanted, reduction="batchmean")

    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    return model, loss, rows()


@sound
def stopped_gradients():
    def loss(model, batch):
        x, _ = batch
        z, other = model(x), model(x.flip(1))
        return F.mse_loss(z, other.detach()) + 0.5 * F.mse_loss(z.data, other)

    return perceptron(), loss, rows()


@sound
def multiplied_by_a_scale_of_mixed_precision():
    def loss(model, batch):
        return cross_entropy(model, batch) * 65536

    return perceptron(), loss, rows()


# Gradients inside the loss.


@sound
def gradient_penalty_by_inputs():
    def loss(model, batch):
        x, y = batch
        given = x.detach().clone().requires_grad_(True)
        output = model(given)
        (slope,) = torch.autograd.grad(output.sum(), given, create_graph=True)
        return F.cross_entropy(output, y) + (slope.norm() - 1) ** 2

    return perceptron(), loss, rows()


@sound
def energy_and_forces():
    def loss(model, batch):
        place, energy, force = batch
        place = place.clone().requires_grad_(True)
        given = model(place)[:, 0]
        (found,) = torch.autograd.grad(given.sum(), place, create_graph=True)
        return (given - energy).square().sum() + (found + force).square().mean()

    return perceptron(), loss, (rows()[0], normal(), normal(6))


@sound
def adversarial_training():
    def loss(model, batch):
        x, y = batch
        given = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(F.cross_entropy(model(given), y), given)
        return F.cross_entropy(model(x + 0.1 * slope.sign()), y)

    return perceptron(), loss, rows()


@sound
def functional_gradient_inside():
    def loss(model, batch):
        x, y = batch
        slope = torch.func.grad(lambda given: model(given).sum())(x)
        return F.cross_entropy(model(x), y) + slope.square().sum()

    return perceptron(), loss, rows()


@sound
def checkpointing_without_reentry():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model[2](checkpoint(model[:2], x, use_reentrant=False)), y)

    return perceptron(), loss, rows()


@sound
def checkpointing_with_reentry():
    """The reference is that of the same model without it: autograd.grad does not enter again."""

    def loss(model, batch):
        x, y = batch
        hidden = x.requires_grad_() * 1.0
        try:
            return F.cross_entropy(model[2](checkpoint(model[:2], hidden, use_reentrant=True)), y)
        except ZeroDivisionError:
            raise

    def plain(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y)

    return Parts(perceptron(), loss, rows(), plain=plain)


@sound
def autograd_function_of_ones_own():
    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model[2](Straight.apply(model[:2](x))), y)

    return perceptron(), loss, rows()


@sound
def autograd_function_that_saves():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            (x,) = ctx.saved_tensors
            return 2 * x * gradient

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(Square.apply(model(x)), y)

    return perceptron(), loss, rows()


@sound
def gradient_reversed_by_a_tensor_hook():
    def loss(model, batch):
        x, y = batch
        hidden = model[:2](x)
        hidden.register_hook(lambda gradient: -0.5 * gradient)
        return F.cross_entropy(model[2](hidden), y)

    return perceptron(), loss, rows()


@sound
def forward_hook_that_keeps_nothing():
    model = perceptron()
    model[0].register_forward_hook(lambda module, given, output: 2 * output)
    return model, cross_entropy, rows()


# Random numbers inside.


@sound
def dropout():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 3))
    return Parts(model, cross_entropy, rows(), random=True)


@sound
def augmentation_by_torch_rand():
    def loss(model, batch):
        x, y = batch
        x = x + 0.1 * torch.randn_like(x)
        x = torch.where(torch.rand(len(x), 1) < 0.5, x.flip(1), x)
        return F.cross_entropy(model(x), y)

    return Parts(perceptron(), loss, rows(), random=True)


@sound
def branch_on_a_coin():
    def loss(model, batch):
        x, y = batch
        if torch.rand(()) < 0.5:
            x = x.flip(1)
        return F.cross_entropy(model(x), y)

    return Parts(perceptron(), loss, rows(), random=True)


@sound
def variational_autoencoder():
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(6, 4), nn.Linear(2, 6)

        def forward(self, x):
            mean, log_var = self.into(x).chunk(2, -1)
            z = mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)
            return self.out(z), mean, log_var

    def loss(model, batch):
        (x,) = batch
        again, mean, log_var = model(x)
        return F.mse_loss(again, x, reduction="sum") - 0.5 * (1 + log_var - mean**2 - log_var.exp()).sum()

    return Parts(Small(), loss, rows()[:1], random=True)


@sound
def diffusion():
    keep = torch.linspace(0.99, 0.1, 10, dtype=torch.float64)

    def loss(model, batch):
        (x,) = batch
        t = torch.randint(0, 10, (len(x),))
        noise = torch.randn_like(x)
        noisy = keep[t][:, None].sqrt() * x + (1 - keep[t])[:, None].sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, t[:, None] / 10], 1)), noise)

    return Parts(nn.Sequential(nn.Linear(7, 5), nn.SiLU(), nn.Linear(5, 6)), loss, rows()[:1], random=True)


@sound
def mixup_with_its_own_flip():
    def loss(model, batch):
        x, y = batch
        share = torch.distributions.Beta(0.4, 0.4).sample()
        return F.cross_entropy(model(share * x + (1 - share) * x.flip(1)), y)

    return Parts(perceptron(), loss, rows(), random=True)


@sound
def stochastic_depth():
    def loss(model, batch):
        x, y = batch
        hidden = model[0](x) * torch.bernoulli(torch.full((len(x), 1), 0.5)) * 2
        return F.cross_entropy(model[2](hidden), y)

    return Parts(perceptron(), loss, rows(), random=True)


@sound
def gumbel_softmax():
    def loss(model, batch):
        x, y = batch
        chosen = F.gumbel_softmax(model(x), hard=True)
        return (chosen * F.one_hot(y, 3)).sum().neg()

    return Parts(perceptron(), loss, rows(), random=True)


# Parameters.


@sound
def frozen_parts():
    model = perceptron()
    model[0].requires_grad_(False)
    return model, cross_entropy, rows()


@sound
def frozen_parts_in_eval_mode():
    body = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).requires_grad_(False)

    class Tuned(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = body, nn.Linear(5, 3)

        def train(self, mode=True):
            super().train(mode)
            self.body.eval()
            return self

        def forward(self, x):
            return self.head(self.body(x))

    return Tuned().train(), cross_entropy, rows()


@sound
def tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.mix, self.out = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 10, bias=False)
            self.out.weight = self.words.weight

        def forward(self, ids):
            return self.out(torch.tanh(self.mix(self.words(ids))))

    def loss(model, batch):
        ids, _ = batch
        return F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])

    return Tied(), loss, rows(tokens)


@sound
def tied_layers():
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), layer), cross_entropy, rows()


@sound
def low_rank_adapters():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down = nn.Parameter(0.1 * torch.randn(2, base.in_features))
            self.up = nn.Parameter(0.1 * torch.randn(base.out_features, 2))

        def forward(self, x):
            return self.base(x) + x @ self.down.T @ self.up.T

    return nn.Sequential(Adapted(nn.Linear(6, 5)), nn.Tanh(), Adapted(nn.Linear(5, 3))), cross_entropy, rows()


@sound
def weight_norm():
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 5)), nn.Linear(5, 3)), cross_entropy, rows()


@sound
def orthogonal_weights():
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 3)), cross_entropy, rows()


@sound
def parametrisation_of_ones_own():
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

    layer = nn.Linear(6, 6)
    nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Linear(6, 3)), cross_entropy, rows()


@sound
def frozen_spectral_norm():
    """Its buffers are updated in training mode: in eval mode it is a parametrisation like any other."""
    layer = parametrizations.spectral_norm(nn.Linear(6, 5))
    layer.parametrizations.weight.eval()

    class Kept(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[0].parametrizations.weight.eval()
            return self

    return Kept(layer, nn.Linear(5, 3)).train(), cross_entropy, rows()


@sound
def weight_standardised_convolution():
    class Standard(nn.Conv2d):
        def forward(self, x):
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            weight = weight / (weight.std((1, 2, 3), keepdim=True) + 1e-3)
            return F.conv2d(x, weight, self.bias)

    return nn.Sequential(Standard(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)), cross_entropy, rows(images)


@sound
def weight_normalised_by_batch_norm():
    class Scaled(nn.Conv2d):
        """As in timm's nf_resnet."""

        def forward(self, x):
            weight = F.batch_norm(self.weight.reshape(1, len(self.weight), -1), None, None, training=True)
            return F.conv2d(x, weight.reshape_as(self.weight), self.bias)

    return nn.Sequential(Scaled(2, 4, 3), nn.Flatten(), nn.Linear(16, 3)), cross_entropy, rows(images)


@sound
def parameter_of_its_own():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = perceptron()
            self.scale, self.token = nn.Parameter(torch.ones(3)), nn.Parameter(torch.randn(1, 6))

        def forward(self, x):
            return self.scale * self.body(x + self.token.expand(len(x), -1))

    return Scaled(), cross_entropy, rows()


@sound
def parameter_that_some_examples_do_not_use():
    def loss(model, batch):
        x, y = batch
        head = model["even"] if y % 2 == 0 else model["odd"]
        return F.cross_entropy(head(x), y)

    return nn.ModuleDict({"even": nn.Linear(6, 3), "odd": nn.Linear(6, 3)}), loss, rows()


@sound
def parameter_that_nobody_uses():
    model = nn.ModuleDict({"used": nn.Linear(6, 3), "unused": nn.Linear(6, 3)})
    return model, lambda model, batch: F.cross_entropy(model["used"](batch[0]), batch[1]), rows()


@sound
def mixture_of_experts():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(6, 3)
            self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(3))

        def forward(self, x):
            weight, chosen = self.gate(x).softmax(-1).topk(2, -1)
            outputs = torch.stack([expert(x) for expert in self.experts], 1)
            return (outputs.gather(1, chosen[..., None].expand(-1, -1, 3)) * weight[..., None]).sum(1)

    return Routed(), cross_entropy, rows()


@sound
def experts_that_run_only_where_chosen():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 2)
            self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

        def forward(self, x):
            share = self.gate(x).softmax(-1)
            chosen = share.argmax(-1)
            out = x.new_zeros(*x.shape[:-1], 3)
            for number, expert in enumerate(self.experts):
                mine = chosen == number
                if mine.any():
                    out[mine] = expert(x[mine]) * share[mine][:, number : number + 1]
            return out

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x).transpose(1, 2), y)

    return Routed(), loss, sequences()


# Layers.


@sound
def attention():
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.out(self.attention(x, x, x)[0])

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return Attending(), loss, sequences()


@sound
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.out = nn.Linear(4, 3)

        def forward(self, x, padded):
            return self.out(self.encoder(x, src_key_padding_mask=padded).mean(1))

    def loss(model, batch):
        x, y, padded = batch
        return F.cross_entropy(model(x, padded), y[:, 0])

    padded = torch.zeros(SIZE, 5, dtype=torch.bool)
    padded[::2, 3:] = True
    return Classifier(), loss, (*sequences(), padded)


def recurrent(layer: nn.Module) -> Any:
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out = layer, nn.Linear(3, 3)

        def forward(self, x):
            return self.out(self.layer(x)[0])

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x).transpose(1, 2), y)

    return Tagger(), loss, sequences()


@sound
def long_short_term_memory():
    return recurrent(nn.LSTM(4, 3, batch_first=True))


@sound
def gated_recurrent_unit():
    return recurrent(nn.GRU(4, 3, batch_first=True))


@sound
def packed_sequences():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 3)

    def loss(model, batch):
        x, y, lengths = batch
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = model.layer(packed)
        return F.cross_entropy(model.out(hidden[-1]), y[:, 0])

    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(1, 6, (SIZE,), generator=generator)
    return Parts(Reader(), loss, (*sequences(), lengths), options={"reads_values": True})


@sound
def recurrent_cell_in_a_loop():
    def loss(model, batch):
        x, y = batch
        state = None
        for now in x.unbind(1):
            state = model["cell"](now, state)
        return F.cross_entropy(model["out"](state), y[:, -1])

    return nn.ModuleDict({"cell": nn.GRUCell(4, 3), "out": nn.Linear(3, 3)}), loss, sequences()


@sound
def convolutions_of_all_kinds():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=4, stride=2, padding=1)
            self.three, self.up = nn.Conv1d(4, 2, 2), nn.ConvTranspose2d(4, 2, 2, stride=2)
            self.deep, self.out = nn.Conv3d(1, 2, 2), nn.Linear(24, 3)

        def forward(self, x):
            x = F.relu(self.two(F.relu(self.one(x))))
            flat = self.three(x.flatten(2)).flatten(1)
            deep = self.deep(self.up(x)[:, None]).flatten(1)
            return self.out(torch.cat([flat, deep], 1))

    return Mixed(), cross_entropy, rows(images)


@sound
def group_norm_and_pooling():
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    return model, cross_entropy, rows(images)


@sound
def instance_norm_without_statistics():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(16, 3))
    return model, cross_entropy, rows(images)


@sound
def layer_norm_and_rms_norm():
    return nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5), nn.RMSNorm(5), nn.Linear(5, 3)), cross_entropy, rows()


@sound
def parametric_activation_and_bilinear():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.both = nn.PReLU(6), nn.Bilinear(6, 6, 3)

        def forward(self, x):
            return self.both(self.act(x), x.flip(1))

    return Pair(), cross_entropy, rows()


@sound
def embedding_with_padding():
    model = nn.Sequential(nn.Embedding(10, 4, padding_idx=0), nn.Flatten(), nn.Linear(20, 3))
    return model, cross_entropy, rows(tokens)


@sound
def embedding_bag():
    return nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 3)), cross_entropy, rows(tokens)


@sound
def rotary_positions_in_complex_numbers():
    turns = torch.polar(torch.ones(5, 2, dtype=torch.float64), torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1])))

    def loss(model, batch):
        x, y = batch
        q = torch.view_as_complex(model["q"](x).unflatten(-1, (2, 2))) * turns
        mixed = torch.view_as_real(q).flatten(-2)
        return F.cross_entropy(model["out"](mixed).transpose(1, 2), y)

    return nn.ModuleDict({"q": nn.Linear(4, 4), "out": nn.Linear(4, 3)}), loss, sequences()


@sound
def fourier_mixing():
    def loss(model, batch):
        x, y = batch
        mixed = torch.fft.irfft(torch.fft.rfft(model["one"](x), dim=1), n=5, dim=1)
        spectrum = torch.fft.fft2(mixed).abs().square().mean()
        return F.cross_entropy(model["out"](mixed).transpose(1, 2), y) + 0.01 * spectrum

    return nn.ModuleDict({"one": nn.Linear(4, 4), "out": nn.Linear(4, 3)}), loss, sequences()


# Operations.


@sound
def einsum_and_scan():
    def loss(model, batch):
        x, y = batch
        scores = torch.einsum("btc,dc->btd", x, model.weight)
        decay = torch.cumsum(scores, 1).cumprod(1).tanh()
        return F.cross_entropy(decay.transpose(1, 2), y)

    return nn.Linear(4, 3, bias=False), loss, sequences()


@sound
def sorts_and_largest_values():
    def loss(model, batch):
        x, _ = batch
        output = model(x)
        ordered = output.sort(-1).values
        best = output.topk(2, -1).values
        return F.relu(1 - (best[:, 0] - best[:, 1])).sum() + ordered[:, 0].abs().sum() + output.median(-1).values.sum()

    return perceptron(), loss, rows()


@sound
def scatter_and_index_add():
    def loss(model, batch):
        x, y = batch
        hidden = model(x)
        pooled = torch.zeros(len(x), 3, 3, dtype=x.dtype).scatter_add(
            1, y[:, :, None].expand(-1, -1, 3)[:, :3], hidden[:, :3]
        )
        summed = torch.zeros(3, 3, dtype=x.dtype).index_add(0, y[0], hidden[0])
        return pooled.square().sum() + summed.sin().sum()

    return nn.Linear(4, 3), loss, sequences()


@sound
def where_and_nan_to_num():
    def loss(model, batch):
        x, y = batch
        output = model(x)
        logs = torch.where(output > 0, output.clamp(min=1e-3).log(), output)
        return torch.nan_to_num(logs).square().sum() + F.cross_entropy(output, y)

    return perceptron(), loss, rows()


@sound
def in_place_on_its_own_tensors():
    def loss(model, batch):
        x, y = batch
        x = x.clone()
        x[:, 0] = 0
        x.mul_(0.5).clamp_(-2, 2)
        output = model(x)
        output[:, 1] += 1
        return F.cross_entropy(output, y)

    return perceptron(), loss, rows()


@sound
def linear_algebra():
    def loss(model, batch):
        x, _ = batch
        square = model(x) @ model(x).transpose(1, 2) + torch.eye(5, dtype=x.dtype)
        return torch.logdet(square).sum() + torch.linalg.solve(square, x).square().sum()

    return nn.Linear(4, 4), loss, sequences()


@sound
def unique_and_nonzero():
    def loss(model, batch):
        ids, y = batch
        seen = ids[0].unique()
        present = (ids[0] > 4).nonzero()[:, 0]
        return F.cross_entropy(model[2](model[0](seen).mean(0, keepdim=True)), y) + model[0](present).square().sum()

    return nn.Sequential(nn.Embedding(10, 4), nn.Identity(), nn.Linear(4, 3)), loss, rows(tokens)


@sound
def scaled_dot_product_attention():
    def loss(model, batch):
        x, y = batch
        q, k, v = model["qkv"](x).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        return F.cross_entropy(model["out"](mixed).transpose(1, 2), y)

    return nn.ModuleDict({"qkv": nn.Linear(4, 12), "out": nn.Linear(4, 3)}), loss, sequences()


@sound
def autocast_inside_the_loss():
    def loss(model, batch):
        x, y = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x)
        return F.cross_entropy(output.float(), y)

    x, y = rows()
    return Parts(perceptron().float(), loss, (x.float(), y), tolerance=3e-2)


@sound
def float32_throughout():
    x, y = rows()
    return Parts(perceptron().float(), cross_entropy, (x.float(), y), tolerance=1e-5)


# What models return.


@sound
def heads_in_a_dict():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.one, self.two = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 1)

        def forward(self, x):
            hidden = torch.relu(self.body(x))
            return {"classes": self.one(hidden), "values": [self.two(hidden)]}

    def loss(model, batch):
        x, y, value = batch
        output = model(x)
        return F.cross_entropy(output["classes"], y) + F.mse_loss(output["values"][0][:, 0], value)

    return Heads(), loss, (*rows(), normal())


@sound
def output_as_a_dataclass():
    @dataclass
    class Output:
        logits: torch.Tensor
        hidden: Any = None

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = perceptron()

        def forward(self, x):
            return Output(self.body(x), hidden=(x,))

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x).logits, y)

    return Named(), loss, rows()


@sound
def model_that_computes_its_own_loss():
    class Whole(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = perceptron()

        def forward(self, x, labels=None):
            logits = self.body(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    return (
        Whole(),
        lambda model, batch: model(batch["x"], labels=batch["labels"])["loss"],
        dict(zip(("x", "labels"), rows(), strict=True)),
    )


@sound
def loss_with_a_batch_axis():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="none")

    return perceptron(), loss, rows()


@sound
def buffers_that_are_constants():
    class Standard(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = perceptron()
            self.register_buffer("mean", torch.full((6,), 0.5))
            self.register_buffer("mask", torch.ones(5, 5).tril())

        def forward(self, x):
            return self.body(x - self.mean) * self.mask[-1, :3]

    return Standard(), cross_entropy, rows()


@sound
def batch_norm_with_given_statistics():
    norm = nn.BatchNorm2d(4)
    norm.running_mean.fill_(0.3)

    class Fixed(nn.Sequential):
        def train(self, mode=True):
            super().train(mode)
            self[1].eval()
            return self

    return Fixed(nn.Conv2d(2, 4, 3), norm, nn.Flatten(), nn.Linear(16, 3)).train(), cross_entropy, rows(images)


@sound
def a_cache_that_is_filled_once_by_shape():
    """A table of positions, made at the first call as many models do: it depends on shapes only."""

    @functools.lru_cache
    def positions(length):
        return torch.linspace(-1, 1, length, dtype=torch.float64)

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x + positions(x.shape[1])[:, None]).transpose(1, 2), y)

    return nn.Linear(4, 3), loss, sequences()


@sound
def positions_kept_by_the_model_at_its_first_call():
    """As rotary embeddings in many models: what is kept depends on a length only."""

    class Rotated(nn.Module):
        def __init__(self):
            super().__init__()
            self.out, self.kept = nn.Linear(4, 3), None

        def forward(self, x):
            if self.kept is None or len(self.kept) < x.shape[1]:
                self.kept = torch.linspace(-1, 1, x.shape[1], dtype=x.dtype)[:, None]
            return self.out(x * self.kept)

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x).transpose(1, 2), y)

    return Rotated(), loss, sequences()


@sound
def logging_of_shapes():
    import logging

    log = logging.getLogger("careful")

    def loss(model, batch):
        x, y = batch
        log.debug("a batch of %s", tuple(x.shape))
        return F.cross_entropy(model(x), y)

    return perceptron(), loss, rows()


# Loops of the user.


@sound
def loop_with_a_scheduler():
    def loop(steps, model, optimizer):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        for _ in steps:
            optimizer.step()
            scheduler.step()

    return Parts(perceptron(), cross_entropy, rows(), loop=loop)


@sound
def loop_with_two_groups():
    model = perceptron()
    groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}]

    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step()

    return Parts(model, cross_entropy, rows(), loop=loop, optimizer=torch.optim.AdamW(groups, lr=0.1))


@sound
def loop_with_two_optimizers():
    model = perceptron()
    first = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loop(steps, model, optimizer):
        second = torch.optim.Adam(model[2].parameters())
        for _ in steps:
            optimizer.step()
            second.step()

    return Parts(model, cross_entropy, rows(), loop=loop, optimizer=first)


@sound
def loop_that_clips_and_zeroes():
    def loop(steps, model, optimizer):
        for _ in steps:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            model.zero_grad(set_to_none=False)

    return Parts(perceptron(), cross_entropy, rows(), loop=loop)


@sound
def loop_with_averaged_weights():
    def loop(steps, model, optimizer):
        average = torch.optim.swa_utils.AveragedModel(model)
        mine = copy.deepcopy(model)
        for _ in steps:
            optimizer.step()
            average.update_parameters(model)
            with torch.no_grad():
                for kept, value in zip(mine.parameters(), model.parameters(), strict=True):
                    kept.lerp_(value, 0.1)

    return Parts(perceptron(), cross_entropy, rows(), loop=loop)


@sound
def loop_broken_off_and_taken_up():
    def loop(steps, model, optimizer):
        for step in steps:
            optimizer.step()
            if step.number >= 1:
                break
        for _ in steps:
            optimizer.step()

    return Parts(perceptron(), cross_entropy, rows(), loop=loop)


@sound
def loop_that_counts_and_logs():
    def loop(steps, model, optimizer):
        lines = []
        for place, step in enumerate(steps):
            optimizer.step()
            lines.append(f"{place} {step.number} {step.epsilon}")
        assert len(lines) == 3

    return Parts(perceptron(), cross_entropy, rows(), loop=loop)


@sound
def loop_that_evaluates_on_public_data():
    def loop(steps, model, optimizer):
        x, y = rows()
        for _ in steps:
            optimizer.step()
            model.eval()
            with torch.no_grad():
                assert torch.isfinite(F.cross_entropy(model(x), y))
            model.train()

    return Parts(perceptron(), cross_entropy, rows(), loop=loop)


@sound
def loop_that_saves_and_loads():
    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step()
            saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Parts(model, cross_entropy, rows(), loop=loop, optimizer=optimizer)


@sound
def loop_with_a_large_clip_of_foreach():
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, foreach=True, amsgrad=True)

    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step()
            optimizer.zero_grad()

    return Parts(model, cross_entropy, rows(), loop=loop, optimizer=optimizer)


@sound
def loop_over_a_dict_data_set():
    x, y = rows()

    class Named(torch.utils.data.Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, index):
            return {"x": x[index], "y": int(y[index])}

    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"])

    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step()

    return Parts(perceptron(), loss, {"x": x, "y": y}, loop=loop, dataset=Named())


@sound
def loop_in_microbatches():
    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step()

    return Parts(perceptron(), cross_entropy, rows(), loop=loop, options={"microbatch": 5})


@sound
def loop_over_a_subset():
    x, y = table()
    whole = torch.utils.data.TensorDataset(x, y)

    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step()

    return Parts(
        perceptron(), cross_entropy, rows(), loop=loop, dataset=torch.utils.data.Subset(whole, list(range(SIZE)))
    )


@sound
def loop_with_public_data_beside():
    def loop(steps, model, optimizer):
        x, y = (part[-4:] for part in table())
        public = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in steps:
            optimizer.step()
            public.zero_grad()
            F.cross_entropy(model(x), y).backward()
            public.step()

    return Parts(perceptron(), cross_entropy, rows(), loop=loop)
