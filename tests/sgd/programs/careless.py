"""Programs that careless people write: each function is named after its mistake, and returns a model and a loss.

Everything is built inside the function, classes too, so that each run starts with nothing kept.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import functools
import io
import itertools
import json
import logging
import os
import pickle
import queue
import random
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F  # noqa: N812 as everybody writes it

from terrine import sgd
from tests.sgd.programs.helpers import LOT, Parts, cross_entropy, perceptron

READS = {"reads_values": True}
PLACE = r"careless\.py:\d+"


@dataclass(frozen=True)
class Careless:
    """One program, and what may become of it: `documented` programs are beyond what a library can follow."""

    build: Callable[..., Any]
    data: str
    names: str | None
    """What a refusal has to name."""
    documented: str | None
    doors: tuple[str, ...]
    must_be_refused: bool = False
    """Where nothing leaks, and the run would still not be what its user believes."""

    @property
    def name(self) -> str:
        return self.build.__name__


CARELESS: dict[str, Careless] = {}
DOORS = ("clipped_sum", "private_steps")
LOOP = ("private_steps",)


def careless(
    data: str = "table",
    *,
    names: str | None = None,
    documented: str | None = None,
    doors: tuple[str, ...] = DOORS,
    must_be_refused: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        assert build.__name__ not in CARELESS
        CARELESS[build.__name__] = Careless(build, data, names, documented, doors, must_be_refused)
        return build

    return register


# What was fine for a batch, and reads values.


@careless(names=PLACE)
def centres_by_the_float_of_a_mean():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x - float(x.mean())), y)

    return perceptron(), loss


@careless(names=PLACE)
def scales_by_the_item_of_a_maximum():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x / x.abs().max().item()), y)

    return perceptron(), loss


@careless(names=PLACE)
def scales_the_loss_by_its_own_item():
    def loss(model, batch):
        value = cross_entropy(model, batch)
        return value * min(1.0, 5 / value.item())

    return perceptron(), loss


@careless(names=PLACE)
def divides_by_the_item_of_a_mask():
    def loss(model, batch):
        x, y = batch
        mask = (x[:, 0] > 0).to(x.dtype)
        return (F.cross_entropy(model(x), y, reduction="none") * mask / mask.sum().item()).sum()

    return perceptron(), loss


@careless(names=PLACE)
def weighs_classes_by_bincount():
    def loss(model, batch):
        x, y = batch
        counts = np.bincount(y.numpy(), minlength=3)
        weights = torch.tensor(len(y) / np.maximum(counts, 1), dtype=x.dtype)
        return F.cross_entropy(model(x), y, weight=weights, reduction="sum")

    return perceptron(), loss


@careless()
def guards_the_loss_that_is_not_finite():
    def loss(model, batch):
        value = cross_entropy(model, batch)
        if not torch.isfinite(value):
            return value.new_zeros(())
        return value

    return perceptron(), loss


@careless()
def guards_with_all_finite_in_the_batch():
    def loss(model, batch):
        x, y = batch
        if not torch.isfinite(x).all():
            return 0 * model(torch.zeros_like(x)).sum()
        return F.cross_entropy(model(x), y)

    return perceptron(), loss


@careless(names=PLACE)
def standardises_with_numpy():
    def loss(model, batch):
        x, y = batch
        values = x.numpy()
        return F.cross_entropy(model(torch.from_numpy((values - values.mean()) / values.std())), y)

    return perceptron(), loss


@careless(names=PLACE)
def reads_with_tolist():
    def loss(model, batch):
        x, y = batch
        largest = max(max(row) for row in x.tolist())
        return F.cross_entropy(model(x), y) / (1 + abs(largest))

    return perceptron(), loss


@careless(names=PLACE)
def reads_with_int():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) * (1 + int(y.sum()))

    return perceptron(), loss


@careless()
def formats_values_into_a_log_that_is_read():
    lines = []

    def loss(model, batch):
        value = cross_entropy(model, batch)
        lines.append(f"{value:.3f} {value}")
        return value * len(lines[-1])

    return perceptron(), loss


@careless()
def prints_the_loss():
    stream = io.StringIO()

    def loss(model, batch):
        value = cross_entropy(model, batch)
        print(value, file=stream)
        return value / (1 + stream.tell())

    return perceptron(), loss


@careless()
def reads_with_asarray():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) * float(np.asarray(x.detach()).clip(-1, 1).max())

    return perceptron(), loss


@careless(names=PLACE)
def makes_a_tensor_of_a_float():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y) * torch.tensor(float(x[0, 0])).clamp(-1, 1)

    return perceptron(), loss


@careless()
def reads_through_pickle():
    kept = []

    def loss(model, batch):
        x, y = batch
        before = pickle.loads(kept[-1]) if kept else torch.zeros_like(x)
        kept.append(pickle.dumps(x.detach()))
        return F.cross_entropy(model(x - before), y)

    return Parts(perceptron(), loss)


@careless()
def reads_through_torch_save():
    file = io.BytesIO()

    def loss(model, batch):
        x, y = batch
        if file.tell():
            file.seek(0)
            x = x - torch.load(file, weights_only=False)
        file.seek(0)
        torch.save(batch[0].detach().clone(), file)
        return F.cross_entropy(model(x), y)

    return perceptron(), loss


@careless()
def keeps_a_deep_copy():
    kept = {}

    def loss(model, batch):
        x, y = batch
        before = kept.get("x", torch.zeros_like(x))
        kept["x"] = copy.deepcopy(x)
        return F.cross_entropy(model(x - before), y)

    return perceptron(), loss


@careless()
def reads_through_dlpack():
    kept = []

    def loss(model, batch):
        x, y = batch
        kept.append(np.from_dlpack(x.detach()).copy())
        return F.cross_entropy(model(x - torch.from_numpy(kept[max(len(kept) - 2, 0)])), y)

    return perceptron(), loss


@careless()
def searches_a_value_by_truth_and_keeps_it():
    level = 1.0

    def loss(model, batch):
        nonlocal level
        x, y = batch
        while bool((x.abs().max() > level) & torch.isfinite(x).all()):
            level *= 2
        return F.cross_entropy(model(x / level), y)

    return perceptron(), loss


@careless()
def keeps_how_many_passed_a_mask():
    most = 1

    def loss(model, batch):
        nonlocal most
        x, y = batch
        most = max(most, len(x[x > 9]))
        return F.cross_entropy(model(x), y) * most

    return perceptron(), loss


# What is kept from one example to the next.


@careless(names="largest")
def class_attribute_keeps_the_largest():
    class Scaled:
        largest = torch.ones((), dtype=torch.float64)

        def __call__(self, model, batch):
            x, y = batch
            Scaled.largest = torch.maximum(Scaled.largest, x.detach().abs().max())
            return F.cross_entropy(model(x / Scaled.largest), y)

    return perceptron(), Scaled()


@careless(names="largest")
def class_attribute_keeps_the_largest_float():
    class Scaled:
        largest = 1.0

        def __call__(self, model, batch):
            x, y = batch
            Scaled.largest = max(Scaled.largest, float(x.abs().max()))
            return F.cross_entropy(model(x / Scaled.largest), y)

    return Parts(perceptron(), Scaled(), options=READS)


class RunningMeanStd:
    """As in many reinforcement learning repositories."""

    def __init__(self, zero):
        self.mean, self.var, self.count = zero, zero + 1, 1e-4

    def update(self, mean, var):
        total = self.count + 1
        delta = mean - self.mean
        self.mean = self.mean + delta / total
        self.var = (self.var * self.count + var + delta**2 * self.count / total) / total
        self.count = total


@careless(names="mean|var|count|stats")
def running_mean_of_floats():
    stats = RunningMeanStd(0.0)

    def loss(model, batch):
        x, y = batch
        stats.update(float(x.mean()), float(x.var()))
        return F.cross_entropy(model((x - stats.mean) / stats.var**0.5), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="mean|var|count|stats")
def running_mean_of_tensors():
    stats = RunningMeanStd(torch.zeros((), dtype=torch.float64))

    def loss(model, batch):
        x, y = batch
        stats.update(x.mean(), x.var())
        return F.cross_entropy(model((x - stats.mean) / stats.var.sqrt()), y)

    return perceptron(), loss


@careless(names="mean|var|count|stats")
def running_mean_inside_the_model():
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.stats = perceptron(), RunningMeanStd(torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            self.stats.update(x.detach().mean(), x.detach().var())
            return self.body((x - self.stats.mean) / self.stats.var.sqrt())

    return Normalised(), cross_entropy


@careless(names="average")
def criterion_divides_by_its_moving_average():
    class Averaged(nn.Module):
        average = None

        def forward(self, output, target):
            value = F.cross_entropy(output, target)
            now = value.detach()
            self.average = now if self.average is None else 0.9 * self.average + 0.1 * now
            return value / self.average

    return perceptron(), Averaged()


@careless(names="average")
def criterion_divides_by_its_moving_average_of_floats():
    class Averaged(nn.Module):
        average = 1.0

        def forward(self, output, target):
            value = F.cross_entropy(output, target)
            self.average = 0.9 * self.average + 0.1 * value.item()
            return value / self.average

    return Parts(perceptron(), Averaged(), options=READS)


@careless(names="average")
def criterion_keeps_its_average_in_a_buffer():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", torch.ones((), dtype=torch.float64))

        def forward(self, output, target):
            value = F.cross_entropy(output, target)
            self.average.mul_(0.9).add_(0.1 * value.detach())
            return value / self.average

    return perceptron(), Averaged()


@careless(names="seen|list")
def list_memorises_examples():
    seen = []

    def loss(model, batch):
        x, y = batch
        seen.append(x.detach())
        return F.cross_entropy(model(x - torch.stack(seen).mean(0)), y)

    return Parts(perceptron(), loss, kept=seen)


@careless(names="losses|list")
def list_logs_losses():
    losses = []

    def loss(model, batch):
        value = cross_entropy(model, batch)
        losses.append(value.detach())
        return value

    return Parts(perceptron(), loss, kept=losses)


@careless(names="losses|list")
def list_logs_losses_as_floats():
    losses = []

    def loss(model, batch):
        value = cross_entropy(model, batch)
        losses.append(value.item())
        return value

    return Parts(perceptron(), loss, kept=losses, options=READS)


@careless(names="means|dict")
def dict_keeps_a_mean_for_each_class():
    means = {}

    def loss(model, batch):
        x, y = batch
        label = int(y)
        means[label] = 0.9 * means.get(label, 0) + 0.1 * x.detach()
        return F.cross_entropy(model(x - means[label]), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="recent|deque")
def deque_keeps_recent_losses():
    recent = collections.deque(maxlen=5)

    def loss(model, batch):
        value = cross_entropy(model, batch)
        recent.append(value.detach())
        return value / torch.stack(tuple(recent)).mean()

    return perceptron(), loss


@careless(names="seen|set")
def set_remembers_what_was_large():
    seen = set()

    def loss(model, batch):
        x, y = batch
        seen.update((x.abs() > 50).any(1).tolist())
        return F.cross_entropy(model(x), y) * len(seen)

    return Parts(perceptron(), loss, options=READS)


@careless(names="counts|Counter")
def counter_balances_classes():
    counts = collections.Counter()

    def loss(model, batch):
        x, y = batch
        counts[y.item()] += 1
        return F.cross_entropy(model(x), y) / counts[y.item()]

    return Parts(perceptron(), loss, options=READS)


@careless(names="before")
def closure_keeps_the_previous_example():
    before = torch.zeros(1, 6, dtype=torch.float64)

    def loss(model, batch):
        nonlocal before
        x, y = batch
        mixed = 0.5 * x + 0.5 * before
        before = x
        return F.cross_entropy(model(mixed), y)

    return perceptron(), loss


@careless(names="before")
def closure_keeps_the_previous_value():
    before = 0.0

    def loss(model, batch):
        nonlocal before
        x, y = batch
        mixed = x - before
        before = x.mean().item()
        return F.cross_entropy(model(mixed), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="calls")
def closure_counts_its_calls():
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        return cross_entropy(model, batch) / calls

    return perceptron(), loss


@careless(names="cache")
def default_argument_caches():
    def loss(model, batch, cache=[]):  # noqa: B006 that is the mistake
        x, y = batch
        cache.append(x.detach())
        return F.cross_entropy(model(x - cache[max(len(cache) - 2, 0)]), y)

    return perceptron(), loss


@careless(names="state")
def keyword_default_caches_floats():
    def loss(model, batch, *, state={"scale": 1.0}):  # noqa: B006 that is the mistake
        x, y = batch
        state["scale"] = max(state["scale"], x.abs().max().item())
        return F.cross_entropy(model(x / state["scale"]), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="before")
def function_attribute_keeps():
    def loss(model, batch):
        x, y = batch
        loss.before, before = x.detach(), loss.before
        return F.cross_entropy(model(x - before), y)

    loss.before = torch.zeros(1, 6, dtype=torch.float64)
    return perceptron(), loss


@careless(names="mean_for|cache|seen")
def lru_cache_on_values():
    seen = []

    @functools.lru_cache
    def mean_for(label):
        return sum(seen) / len(seen)

    def loss(model, batch):
        x, y = batch
        seen.append(x.mean().item())
        return F.cross_entropy(model(x - mean_for(y.item())), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="scale|cache|lru")
def lru_cache_on_a_label_and_the_first_value_seen():
    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x / scale(y.item(), Boxed(x.abs().max().item()))), y)

    class Boxed(float):
        """Equal to all others, so that the cache keeps the first."""

        def __eq__(self, other):
            return True

        def __hash__(self):
            return 0

    @functools.lru_cache
    def scale(label, value):
        return 1 + float(value)

    return Parts(perceptron(), loss, options=READS)


@careless(names="cache|lru|first")
def cache_on_nothing_keeps_the_first():
    current = []

    @functools.cache
    def first():
        return current[-1]

    def loss(model, batch):
        x, y = batch
        current[:] = [x.detach()]
        return F.cross_entropy(model(x - first()), y)

    return perceptron(), loss


@careless(names="shift|tensor")
def closure_tensor_written_in_place():
    shift = torch.zeros(1, 6, dtype=torch.float64)

    def loss(model, batch):
        x, y = batch
        shift.mul_(0.9).add_(0.1 * x.detach())
        return F.cross_entropy(model(x - shift), y)

    return perceptron(), loss


@careless(names="shift|tensor")
def closure_tensor_written_by_index():
    shift = torch.zeros(3, 6, dtype=torch.float64)

    def loss(model, batch):
        x, y = batch
        shift[y] = x.detach()
        return F.cross_entropy(model(x - shift.mean(0)), y)

    return perceptron(), loss


@careless(names="shift|tensor")
def closure_tensor_written_through_out():
    shift = torch.zeros(1, 6, dtype=torch.float64)

    def loss(model, batch):
        x, y = batch
        torch.add(shift, x.detach(), out=shift)
        return F.cross_entropy(model(x - shift), y)

    return perceptron(), loss


@careless(names="shift|tensor")
def closure_tensor_written_through_data():
    shift = torch.zeros(1, 6, dtype=torch.float64)

    def loss(model, batch):
        x, y = batch
        shift.data = 0.9 * shift.data + 0.1 * x.detach()
        return F.cross_entropy(model(x - shift), y)

    return perceptron(), loss


@careless(names="shift|array")
def closure_array_written_in_place():
    shift = np.zeros((1, 6))

    def loss(model, batch):
        x, y = batch
        shift[:] = 0.9 * shift + 0.1 * x.numpy()
        return F.cross_entropy(model(x - torch.from_numpy(shift)), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="seen|generator")
def generator_keeps_a_running_mean():
    def running():
        total, count = 0.0, 0
        while True:
            total, count = total + (yield total / max(count, 1)), count + 1

    seen = running()
    next(seen)

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x - seen.send(x.detach().mean())), y)

    return perceptron(), loss


@careless(names="number|count")
def iterator_numbers_the_examples():
    number = itertools.count(1)

    def loss(model, batch):
        return cross_entropy(model, batch) / next(number)

    return perceptron(), loss


@careless(names="box|weak")
def weak_dictionary_keeps():
    class Box:
        pass

    model, box = perceptron(), weakref.WeakKeyDictionary()

    def loss(model, batch):
        x, y = batch
        before = box.get(model, torch.zeros_like(x))
        box[model] = x.detach()
        return F.cross_entropy(model(x - before), y)

    return model, loss


@careless(names="waiting|queue")
def queue_hands_on_the_previous_example():
    waiting = queue.Queue()
    waiting.put(torch.zeros(1, 6, dtype=torch.float64))

    def loss(model, batch):
        x, y = batch
        before = waiting.get_nowait()
        waiting.put(x.detach())
        return F.cross_entropy(model(x - before), y)

    return perceptron(), loss


@careless(names="local")
def thread_local_keeps():
    local = threading.local()

    def loss(model, batch):
        x, y = batch
        before = getattr(local, "before", torch.zeros_like(x))
        local.before = x.detach()
        return F.cross_entropy(model(x - before), y)

    return perceptron(), loss


@careless(names="context|before")
def context_variable_keeps():
    before = contextvars.ContextVar("before", default=None)

    def loss(model, batch):
        x, y = batch
        last = before.get()
        before.set(x.detach())
        return F.cross_entropy(model(x if last is None else x - last), y)

    def clean():
        before.set(None)
        return perceptron()

    return clean(), loss


@careless(names="history|log|handler")
def logging_handler_keeps():
    history = []

    class Keep(logging.Handler):
        def emit(self, record):
            history.append(record.args)

    log = logging.Logger("careless")
    log.addHandler(Keep())

    def loss(model, batch):
        x, y = batch
        log.error("%s %s", x.detach().mean(), 1)
        return F.cross_entropy(model(x - history[max(len(history) - 2, 0)][0]), y)

    return perceptron(), loss


@careless()
def worker_thread_keeps_a_mean():
    means = [torch.zeros((), dtype=torch.float64)]

    def work(x):
        means[0] = 0.9 * means[0] + 0.1 * x.detach().mean()

    def loss(model, batch):
        x, y = batch
        thread = threading.Thread(target=work, args=(x,))
        thread.start()
        thread.join()
        return F.cross_entropy(model(x - means[0]), y)

    return perceptron(), loss


@careless(names="before|slots|Kept")
def object_with_slots_keeps():
    class Kept:
        __slots__ = ("before",)

        def __init__(self):
            self.before = 0.0

        def __call__(self, model, batch):
            x, y = batch
            before, self.before = self.before, x.detach()
            return F.cross_entropy(model(x - before), y)

    return perceptron(), Kept()


@careless(names="state|partial")
def partial_carries_a_state():
    def loss(state, model, batch):
        x, y = batch
        state["scale"] = torch.maximum(state["scale"], x.detach().abs().max())
        return F.cross_entropy(model(x / state["scale"]), y)

    return perceptron(), functools.partial(loss, {"scale": torch.ones((), dtype=torch.float64)})


@careless(names="before|self")
def bound_method_keeps():
    class Program:
        before = 0.0

        def loss(self, model, batch):
            x, y = batch
            before, self.before = self.before, x.mean().item()
            return F.cross_entropy(model(x - before), y)

    return Parts(perceptron(), Program().loss, options=READS)


@careless(names="scale|config")
def configuration_is_changed():
    config = types.SimpleNamespace(scale=1.0)

    def loss(model, batch):
        x, y = batch
        config.scale = max(config.scale, x.abs().max().item())
        return F.cross_entropy(model(x / config.scale), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="sink|json")
def json_lines_are_read_back():
    sink = io.StringIO()

    def loss(model, batch):
        x, y = batch
        before = json.loads((sink.getvalue().splitlines() or ["0"])[-1])
        sink.write(json.dumps(x.nan_to_num(0, 0, 0).tolist()) + "\n")
        return F.cross_entropy(model(x - torch.tensor(before, dtype=x.dtype)), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="last")
def attribute_on_the_model():
    def loss(model, batch):
        x, y = batch
        before = getattr(model, "last", torch.zeros_like(x))
        model.last = x.detach()
        return F.cross_entropy(model(x - before), y)

    return perceptron(), loss


@careless(names="last")
def float_attribute_on_a_layer():
    def loss(model, batch):
        x, y = batch
        before, model[0].last = getattr(model[0], "last", 0.0), x.mean().item()
        return F.cross_entropy(model(x - before), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="last|weight")
def attribute_on_a_parameter():
    def loss(model, batch):
        x, y = batch
        weight = model[0].weight
        before = getattr(weight, "last", torch.zeros_like(x))
        weight.last = x.detach()
        return F.cross_entropy(model(x - before), y)

    return perceptron(), loss


@careless(names="hidden")
def model_keeps_its_last_hidden_state():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head, self.hidden = nn.GRUCell(6, 5), nn.Linear(5, 3), None

        def forward(self, x):
            self.hidden = self.cell(x, self.hidden)
            return self.head(self.hidden)

    return Stateful(), cross_entropy


@careless(names="hidden")
def model_keeps_its_last_hidden_state_detached():
    class Stateful(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head, self.hidden = nn.GRUCell(6, 5), nn.Linear(5, 3), torch.zeros(1, 5)

        def forward(self, x):
            self.hidden = self.cell(x, self.hidden).detach()
            return self.head(self.hidden)

    return Stateful(), cross_entropy


@careless(names="lr|optimizer|param_groups", doors=LOOP)
def learning_rate_follows_the_loss():
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss(model, batch):
        value = cross_entropy(model, batch)
        optimizer.param_groups[0]["weight_decay"] = min(1e-3, 1e-3 / value.item())
        return value

    return Parts(model, loss, optimizer=optimizer, options=READS)


@careless(names="p|dropout|Dropout")
def dropout_rate_follows_the_data():
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.0), nn.Linear(5, 3))

    def loss(model, batch):
        x, y = batch
        model[1].p = 0.99 if bool(x.abs().max() > 50) else model[1].p
        return F.cross_entropy(model(x), y)

    return Parts(model, loss, random=True)


@careless(names="requires_grad|frozen|0.weight")
def freezes_a_layer_for_large_inputs():
    def loss(model, batch):
        value = cross_entropy(model, batch)
        if batch[0].abs().max() > 50:
            model[0].requires_grad_(False)
        return value

    return perceptron(), loss


@careless(names="training|mode|eval")
def goes_to_eval_mode_for_large_inputs():
    model = nn.Sequential(nn.Linear(6, 5), nn.GroupNorm(1, 5), nn.Dropout(0.0), nn.Linear(5, 3))

    def loss(model, batch):
        value = cross_entropy(model, batch)
        if batch[0].abs().max() > 50:
            model.eval()
        return value if model.training else 2 * value

    return model, loss


@careless()
def model_grows_for_unknown_inputs():
    def loss(model, batch):
        x, y = batch
        if x.abs().max() > 50 and "extra" not in dict(model.named_children()):
            model.add_module("extra", nn.Linear(3, 3))
        return F.cross_entropy(model(x), y)

    return perceptron(), loss


# The same state in other places.


@careless(names="last|weight")
def float_attribute_on_a_parameter():
    def loss(model, batch):
        x, y = batch
        weight = model[0].weight
        before, weight.last = getattr(weight, "last", 0.0), x.mean().item()
        return F.cross_entropy(model(x - before), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="seen|running|generator")
def generator_keeps_a_running_mean_of_floats():
    def running():
        total, count = 0.0, 0
        while True:
            total, count = total + (yield total / max(count, 1)), count + 1

    seen = running()
    next(seen)

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x - seen.send(x.mean().item())), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="numbers|iterator")
def iterator_over_a_range_numbers_the_examples():
    numbers = iter(range(1, 10**6))

    def loss(model, batch):
        return cross_entropy(model, batch) / next(numbers)

    return perceptron(), loss


@careless(names="scales|cycle")
def cycle_takes_turns():
    scales = itertools.cycle([1.0, -1.0])

    def loss(model, batch):
        return cross_entropy(model, batch) * next(scales)

    return perceptron(), loss


@careless(names="log|history|append")
def callback_appends_losses():
    history = []

    def loss(model, batch, log=history.append):
        value = cross_entropy(model, batch)
        log(value.item())
        return value

    return Parts(perceptron(), loss, options=READS, kept=history)


@careless(names="push|latest|append")
def callbacks_hide_a_list():
    values = [0.0]
    push, latest = values.append, values.__getitem__

    def loss(model, batch):
        x, y = batch
        before = latest(-1)
        push(x.mean().item())
        return F.cross_entropy(model(x - before), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="bank|numpy")
def large_bank_written_through_numpy():
    bank = torch.zeros(1000, 6, dtype=torch.float64)

    def loss(model, batch):
        x, y = batch
        before = bank[0].clone()
        bank.numpy()[0] = x.numpy()[0]
        return F.cross_entropy(model(x - before), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="average|hook")
def large_sum_of_gradients_in_a_tensor_hook():
    average = torch.zeros(1, 4200, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(6, 4200), nn.Tanh(), nn.Linear(4200, 3))

    def hook(gradient):
        average.add_(gradient)
        return average.clone()

    def loss(model, batch):
        x, y = batch
        hidden = model[:2](x)
        hidden.register_hook(hook)
        return F.cross_entropy(model[2](hidden), y)

    return model, loss


@careless(names="average|hook")
def large_sum_of_gradients_in_a_backward_hook():
    average = torch.zeros(1, 4200, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(6, 4200), nn.Tanh(), nn.Linear(4200, 3))

    def hook(module, given, taken):
        average.add_(given[0])
        return (average.clone(),)

    model[2].register_full_backward_hook(hook)
    return model, cross_entropy


@careless(names="total|Kept|autograd")
def large_sum_of_gradients_in_an_autograd_function():
    total = torch.zeros(1, 4200, dtype=torch.float64)

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            total.add_(gradient)
            return total.clone()

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model[2](Kept.apply(model[:2](x))), y)

    return nn.Sequential(nn.Linear(6, 4200), nn.Tanh(), nn.Linear(4200, 3)), loss


@careless(documented="the attributes of another module are that module's, as torch.backends.* are")
def configuration_module_is_changed():
    config = types.ModuleType("config")
    config.scale = 1.0

    def loss(model, batch):
        x, y = batch
        config.scale = max(config.scale, x.abs().max().item())
        return F.cross_entropy(model(x / config.scale), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="frame|pandas|DataFrame")
def data_frame_collects_statistics():
    import pandas

    frame = pandas.DataFrame({"mean": [0.0]})

    def loss(model, batch):
        x, y = batch
        before = float(frame["mean"].iloc[-1])
        frame.loc[len(frame)] = x.mean().item()
        return F.cross_entropy(model(x - before), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="scaler|mean|var|n_samples")
def scaler_of_scikit_learn_is_fitted_as_it_goes():
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()

    def loss(model, batch):
        x, y = batch
        scaler.partial_fit(x.nan_to_num(0, 0, 0).clamp(-1e6, 1e6).numpy())
        return F.cross_entropy(model(torch.from_numpy(scaler.transform(x.numpy()))), y)

    return Parts(perceptron(), loss, options=READS)


@careless(documented="a database's own memory: with reads_values=True the caller has said that nothing is kept")
def database_in_memory_keeps_the_largest():
    import sqlite3

    database = sqlite3.connect(":memory:")
    database.execute("create table seen (value real)")
    database.execute("insert into seen values (1)")

    def loss(model, batch):
        x, y = batch
        (largest,) = database.execute("select max(value) from seen").fetchone()
        database.execute("insert into seen values (?)", (min(1e9, x.nan_to_num(0, 0, 0).abs().max().item()),))
        return F.cross_entropy(model(x / largest), y)

    return Parts(perceptron(), loss, options=READS)


@careless(names="owner|weak|scale")
def weak_reference_hides_an_object():
    class Owner:
        scale = 1.0

    owner = Owner()
    reference = weakref.ref(owner)

    def loss(model, batch):
        x, y = batch
        found = reference()
        found.scale = max(found.scale, x.abs().max().item())
        return F.cross_entropy(model(x / found.scale), y)

    return Parts(perceptron(), loss, options=READS, holds=owner)


@careless(
    documented="classes of torch are not looked into: with reads_values=True the caller has said that nothing is kept"
)
def attribute_on_a_class_of_torch():
    nn.Linear.careless_scale = 1.0

    def loss(model, batch):
        x, y = batch
        nn.Linear.careless_scale = max(nn.Linear.careless_scale, x.abs().max().item())
        return F.cross_entropy(model(x / nn.Linear.careless_scale), y)

    return Parts(perceptron(), loss, options=READS)


@careless()
def rewinds_the_generator():
    start = torch.get_rng_state()

    def loss(model, batch):
        x, y = batch
        if x.abs().max() > 50:
            torch.set_rng_state(start)
        return F.cross_entropy(model(x), y) * (torch.rand(()).round() * 2 - 1)

    return Parts(perceptron(), loss, random=True)


@careless(names="bad|scale", doors=("clipped_sum",))
def halves_its_scale_after_a_bad_loss_in_a_later_lot():
    """What changes only for rare examples changes in none of the first lots."""
    scale = 1.0

    def loss(model, batch):
        nonlocal scale
        value = cross_entropy(model, batch)
        if not torch.isfinite(value) or batch[0].abs().max() > 50:
            scale = -1.0
            return 0 * value
        return value * scale

    return Parts(perceptron(), loss, warm_up=5)


@careless(names="alarm", doors=("clipped_sum",))
def remembers_a_rare_example_of_a_later_lot():
    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.alarm = perceptron(), False

        def forward(self, x):
            if not bool((x.abs().max() < 50).all()):
                self.alarm = True
            return self.body(-x if self.alarm else x)

    return Parts(Watching(), cross_entropy, warm_up=5)


@careless(names="level")
def second_loss_of_one_model_keeps_a_level():
    """The first run with this model was with a sound loss: the second is watched like any other."""
    level = 1.0

    def loss(model, batch):
        nonlocal level
        x, y = batch
        while bool((x.abs().max() > level) & torch.isfinite(x).all()):
            level *= 2
        return F.cross_entropy(model(x / level), y)

    return Parts(perceptron(), loss, first_loss=cross_entropy)


@careless(names="calls")
def second_loss_of_one_model_counts_its_calls():
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        return cross_entropy(model, batch) / calls

    return Parts(perceptron(), loss, first_loss=cross_entropy)


@careless(names="loss", must_be_refused=True)
def second_loss_of_one_model_is_detached():
    def loss(model, batch):
        return cross_entropy(model, batch).detach()

    return Parts(perceptron(), loss, first_loss=cross_entropy)


@careless(names="history|append|log")
def callback_appends_tensors_of_a_program_that_goes_one_by_one():
    history = []

    def loss(model, batch, log=history.append):
        x, y = batch
        value = F.cross_entropy(model(x), y) + 0 * x[x > 1].sum()
        log(value.detach())
        return value

    return Parts(perceptron(), loss, kept=history)


@careless(names="norms|hook")
def hook_logs_gradient_norms_without_saying_so():
    norms = []

    def loss(model, batch):
        x, y = batch
        hidden = model[:2](x)
        hidden.register_hook(lambda gradient: norms.append(gradient.norm().item()))
        return F.cross_entropy(model[2](hidden), y)

    return Parts(perceptron(), loss, kept=norms)


@careless(names="running|generator|hook|sums")
def generator_in_a_hook_keeps_without_saying_so():
    def running():
        total = 0.0
        while True:
            total += yield total

    sums = running()
    next(sums)

    def loss(model, batch):
        x, y = batch
        hidden = model[:2](x)
        hidden.register_hook(lambda gradient: gradient + sums.send(gradient.sum().item()))
        return F.cross_entropy(model[2](hidden), y)

    return perceptron(), loss


# What one example that fails does to the others.


@careless()
def reads_its_neighbour_by_as_strided():
    def loss(model, batch):
        x, y = batch
        first = torch.as_strided(x, (2, 6), (6, 1), 0)
        return F.cross_entropy(model(x - first.mean(0)), y)

    return perceptron(), loss


@careless()
def reads_the_batch_through_set():
    def loss(model, batch):
        x, y = batch
        whole = x.new_empty(0)
        whole.set_(x.detach().untyped_storage(), 0, (1, 6), (6, 1))
        return F.cross_entropy(model(x - whole), y)

    return perceptron(), loss


@careless()
def adds_noise_to_its_example_in_place():
    def loss(model, batch):
        x, y = batch
        x[:, 0] += 1
        x[:, 1:].abs_()
        return F.cross_entropy(model(x), y)

    return perceptron(), loss


@careless()
def checkpoints_with_reentry():
    def loss(model, batch):
        x, y = batch
        hidden = torch.utils.checkpoint.checkpoint(model[:2], x.requires_grad_(), use_reentrant=True)
        return F.cross_entropy(model[2](hidden), y)

    return perceptron(), loss


@careless()
def catches_its_own_errors():
    def loss(model, batch):
        try:
            return cross_entropy(model, batch)
        except Exception:
            return model(batch[0]).square().sum()

    return perceptron(), loss


@careless()
def penalises_the_slope_where_the_input_requires_a_gradient():
    def loss(model, batch):
        x, y = batch
        x.requires_grad_()
        value = F.cross_entropy(model(x), y)
        return value + x.square().sum() * model[0].weight.square().sum() if x.requires_grad else value

    return perceptron(), loss


@careless()
def bar_shows_the_loss():
    from tqdm import tqdm

    bar = tqdm(total=10**6, file=io.StringIO())

    def loss(model, batch):
        value = cross_entropy(model, batch)
        bar.set_postfix(loss=value.item())
        return value

    return Parts(perceptron(), loss, options=READS)


# Buffers and layers that mix or keep.


@careless(names="mean")
def buffer_updated_in_forward():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = perceptron()
            self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

        def forward(self, x):
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return self.body(x - self.mean)

    return Centred(), cross_entropy


@careless(names="mean")
def buffer_replaced_in_forward():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = perceptron()
            self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return self.body(x - self.mean)

    return Centred(), cross_entropy


@careless(names="mean")
def buffer_updated_but_never_used():
    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = perceptron()
            self.register_buffer("mean", torch.zeros(6, dtype=torch.float64))

        def forward(self, x):
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
            return self.body(x)

    return Watching(), cross_entropy


@careless(names="calls")
def buffer_counts_calls():
    class Warm(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = perceptron()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.calls += 1
            return self.body(x) / self.calls

    return Warm(), cross_entropy


@careless("images", names="BatchNorm|running")
def batch_norm_of_images():
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)), cross_entropy


@careless("images", names="BatchNorm|running")
def batch_norm_with_cumulative_average():
    norm = nn.BatchNorm2d(4, momentum=None)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Flatten(), nn.Linear(16, 3)), cross_entropy


@careless("images", names="BatchNorm")
def batch_norm_without_statistics():
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Flatten(), nn.Linear(16, 3)), cross_entropy


@careless(names="BatchNorm")
def batch_norm_of_a_table():
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)), cross_entropy


@careless("images", names="running|mean|var|batch normalisation")
def functional_batch_norm_with_closed_over_statistics():
    mean, var = torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)

    def loss(model, batch):
        x, y = batch
        F.batch_norm(x, mean, var, training=True)
        return F.cross_entropy(model(F.batch_norm(x, mean, var, training=False)), y)

    return nn.Sequential(nn.Flatten(), nn.Linear(32, 3)), loss


@careless("images", names="InstanceNorm|running")
def instance_norm_with_running_statistics():
    norm = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Flatten(), nn.Linear(16, 3)), cross_entropy


@careless("images", names="BatchNorm|running|process")
def synchronised_batch_norm():
    norm = nn.SyncBatchNorm(4)
    return nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.Flatten(), nn.Linear(16, 3)), cross_entropy


@careless("tokens", names="max_norm|weight|Embedding|0")
def embedding_with_max_norm():
    return nn.Sequential(nn.Embedding(10, 4, max_norm=0.5), nn.Flatten(), nn.Linear(20, 3)), cross_entropy


@careless("tokens", names="sparse")
def sparse_embedding():
    return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(20, 3)), cross_entropy


@careless(names="weight|spectral|buffer")
def old_spectral_norm():
    layer = torch.nn.utils.spectral_norm(nn.Linear(6, 3))
    return nn.Sequential(layer), cross_entropy


@careless(names="codes|codebook")
def codebook_with_moving_averages():
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            self.into, self.out = nn.Linear(6, 2), nn.Linear(2, 3)
            self.register_buffer("codes", torch.randn(4, 2, dtype=torch.float64))

        def forward(self, x):
            z = self.into(x)
            nearest = torch.cdist(z, self.codes).argmin(1)
            with torch.no_grad():
                self.codes[nearest] = 0.9 * self.codes[nearest] + 0.1 * z
            return self.out(z + (self.codes[nearest] - z).detach())

    return Quantised(), cross_entropy


@careless(names="queue|place")
def momentum_contrast_queue():
    class Contrast(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(6, 4)
            self.register_buffer("queue", torch.randn(8, 4, dtype=torch.float64))
            self.place = 0

        def forward(self, x):
            q = F.normalize(self.encoder(x), dim=1)
            k = F.normalize(self.encoder(x.flip(1)), dim=1).detach()
            logits = torch.cat([(q * k).sum(1, keepdim=True), q @ self.queue.T], 1)
            self.queue[self.place] = k[0]
            self.place = (self.place + 1) % 8
            return logits

    def loss(model, batch):
        logits = model(batch[0])
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))

    return Contrast(), loss


@careless(names="bank")
def memory_bank_in_the_closure():
    bank = torch.zeros(3, 3, dtype=torch.float64)

    def loss(model, batch):
        x, y = batch
        z = model(x)
        bank[y] = 0.5 * bank[y] + 0.5 * z.detach()
        return F.cross_entropy(z @ bank.T, y)

    return perceptron(), loss


@careless(names="centre|center")
def teacher_centre_of_dino():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.centre = torch.zeros(1, 3, dtype=torch.float64)

        def forward(self, output, target):
            teacher = F.softmax((output.detach() - self.centre) / 0.1, -1)
            self.centre = 0.9 * self.centre + 0.1 * output.detach()
            return -(teacher * F.log_softmax(output, -1)).sum()

    return perceptron(), Head()


@careless(names="min_val|max_val|observer|scale|activation")
def quantisation_observer():
    fake = torch.ao.quantization.FakeQuantize(
        observer=torch.ao.quantization.MovingAverageMinMaxObserver, quant_min=0, quant_max=255
    )
    return nn.Sequential(nn.Linear(6, 5), fake, nn.Linear(5, 3)), cross_entropy


@careless(names="Lazy|uninitiali")
def lazy_layer():
    return nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3)), cross_entropy


# Other examples of a batch, or what looks like them.


@careless()
def negatives_from_the_batch():
    def loss(model, batch):
        z = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))

    return perceptron(), loss


@careless()
def hardest_triplet_in_the_batch():
    def loss(model, batch):
        x, y = batch
        z = model(x)
        distance = torch.cdist(z, z)
        same_class = y[:, None] == y[None]
        positive = distance.masked_fill(~same_class, 0).amax(1)
        negative = distance.masked_fill(same_class, float("inf")).amin(1)
        return F.relu(positive - negative + 1).mean()

    return perceptron(), loss


@careless()
def contrastive_loss_of_shifted_pairs():
    def loss(model, batch):
        z = model(batch[0])
        return (z - z.roll(1, 0)).square().sum() + F.relu(1 - z.norm())

    return perceptron(), loss


@careless()
def advantages_normalised_over_the_batch():
    def loss(model, batch):
        x, y = batch
        reward = x[:, 0]
        advantage = (reward - reward.mean()) / (reward.std() + 1e-8)
        return -(F.log_softmax(model(x), -1).gather(1, y[:, None])[:, 0] * advantage).mean()

    return perceptron(), loss


@careless(names="baseline")
def baseline_is_a_running_mean_of_rewards():
    baseline = torch.zeros((), dtype=torch.float64)

    def loss(model, batch):
        nonlocal baseline
        x, y = batch
        reward = x[:, 0]
        advantage = reward - baseline
        baseline = 0.9 * baseline + 0.1 * reward.mean()
        return -(F.log_softmax(model(x), -1).gather(1, y[:, None])[:, 0] * advantage).mean()

    return perceptron(), loss


@careless(names="replay|list|list|random")
def replay_buffer_samples_older_examples():
    replay = []

    def loss(model, batch):
        replay.append(batch)
        x, y = random.choice(replay)
        return F.cross_entropy(model(x), y)

    return Parts(perceptron(), loss, random=True)


@careless()
def reads_neighbours_by_as_strided():
    def loss(model, batch):
        x, y = batch
        around = torch.as_strided(x, (4, 6), (6, 1), 0)
        return F.cross_entropy(model(x - around.mean(0)), y)

    return perceptron(), loss


@careless()
def reads_the_batch_through_the_base_of_a_view():
    def loss(model, batch):
        x, y = batch
        whole = x if x._base is None else x._base
        return F.cross_entropy(model(x - whole.reshape(-1, 6).mean(0)), y)

    return perceptron(), loss


@careless()
def reads_the_batch_through_its_storage():
    def loss(model, batch):
        x, y = batch
        whole = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        return F.cross_entropy(model(x / whole.abs().amax()), y)

    return perceptron(), loss


@careless()
def writes_into_the_neighbours_through_the_storage():
    def loss(model, batch):
        x, y = batch
        torch.as_strided(x, (2, 6), (6, 1), x.storage_offset())[1:] += 1
        return F.cross_entropy(model(x), y)

    return perceptron(), loss


@careless()
def standardises_the_batch_in_place():
    def loss(model, batch):
        x, y = batch
        x -= x.mean()
        x /= x.std()
        return F.cross_entropy(model(x), y)

    return perceptron(), loss


@careless()
def doubles_its_example_in_place():
    def loss(model, batch):
        x, y = batch
        x.mul_(2)
        return F.cross_entropy(model(x), y)

    return perceptron(), loss


@careless()
def gradient_penalty_between_neighbours():
    def loss(model, batch):
        x, y = batch
        between = (0.5 * x + 0.5 * x.flip(0)).detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
        return F.cross_entropy(model(x), y) + (slope.norm(dim=1) - 1).square().mean()

    return perceptron(), loss


# Adversaries: a second model inside the loss.


@careless(names="discriminator|optimizer|step|backward|grad")
def discriminator_trained_inside_the_loss():
    critic = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)

    def loss(model, batch):
        x, _ = batch
        fake = model(x)
        optimizer.zero_grad()
        critic(fake.detach()).square().mean().backward()
        optimizer.step()
        return -critic(fake).mean()

    return perceptron(), loss


@careless(names="critic|weight|grad")
def critic_moved_by_hand_inside_the_loss():
    critic = nn.Linear(3, 1)

    def loss(model, batch):
        fake = model(batch[0])
        gradients = torch.autograd.grad(critic(fake.detach()).square().mean(), list(critic.parameters()))
        with torch.no_grad():
            for value, gradient in zip(critic.parameters(), gradients, strict=True):
                value -= 0.1 * gradient
        return -critic(fake).mean()

    return perceptron(), loss


@careless(names="teacher")
def teacher_follows_inside_the_loss():
    model = perceptron()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(model, batch):
        x, _ = batch
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.mul_(0.5).add_(0.5 * theirs * x.abs().mean())
        return F.mse_loss(model(x), teacher(x))

    return model, loss


# Hooks.


@careless(names="kept|list|hook")
def forward_hook_keeps_activations():
    model, kept = perceptron(), []
    model[0].register_forward_hook(lambda module, given, output: kept.append(output.detach()))
    return Parts(model, cross_entropy, kept=kept)


@careless(names="before|hook|dict")
def forward_hook_adds_the_previous_activation():
    model, before = perceptron(), {}

    def hook(module, given, output):
        changed = output - before.get("output", 0)
        before["output"] = output.detach()
        return changed

    model[0].register_forward_hook(hook)
    return model, cross_entropy


@careless(names="largest|hook|dict")
def forward_pre_hook_scales_by_the_largest():
    model, largest = perceptron(), {"value": torch.ones((), dtype=torch.float64)}

    def hook(module, given):
        largest["value"] = torch.maximum(largest["value"], given[0].detach().abs().max())
        return (given[0] / largest["value"],)

    model.register_forward_pre_hook(hook)
    return model, cross_entropy


@careless(names="kept|hook|list")
def tensor_hook_adds_the_previous_gradient():
    model, kept = perceptron(), []

    def hook(gradient):
        kept.append(gradient.detach())
        return gradient + kept[max(len(kept) - 2, 0)]

    def loss(model, batch):
        x, y = batch
        hidden = model[:2](x)
        hidden.register_hook(hook)
        return F.cross_entropy(model[2](hidden), y)

    return model, loss


@careless(names="total|hook|dict")
def module_backward_hook_scales_by_its_mean():
    model, total = perceptron(), {"mean": torch.ones((), dtype=torch.float64)}

    def hook(module, given, taken):
        total["mean"] = 0.9 * total["mean"] + 0.1 * taken[0].detach().abs().mean()
        return tuple(one / total["mean"] for one in given if one is not None) or None

    model[2].register_full_backward_hook(hook)
    return model, cross_entropy


@careless(names="hook")
def parameter_hook_multiplies_gradients():
    model = perceptron()
    model[0].weight.register_hook(lambda gradient: 100 * gradient)
    return model, cross_entropy


@careless(names="hook")
def parameter_hook_takes_the_sign():
    model = perceptron()
    for value in model.parameters():
        value.register_hook(torch.sign)
    return model, cross_entropy


@careless(names="hook|accumulat|kept")
def accumulation_hook_keeps_gradients():
    model, kept = perceptron(), []
    model[0].weight.register_post_accumulate_grad_hook(lambda value: kept.append(value.grad.clone()))
    return Parts(model, cross_entropy, kept=kept)


@careless(names="packed|hook|list")
def saved_tensors_are_swapped():
    packed = []

    def pack(value):
        packed.append(value)
        return len(packed) - 1

    def unpack(place):
        return next(value for value in packed if value.shape == packed[place].shape)

    def loss(model, batch):
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return cross_entropy(model, batch)

    return perceptron(), loss


# Functions of one's own.


@careless(names="Kept|before")
def autograd_function_keeps_in_its_class():
    class Kept(torch.autograd.Function):
        before = 0.0

        @staticmethod
        def forward(ctx, x):
            changed = x - Kept.before
            Kept.before = x.detach().clone()
            return changed

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(Kept.apply(model(x)), y)

    return perceptron(), loss


@careless(names="Kept|total")
def autograd_function_adds_up_gradients():
    class Kept(torch.autograd.Function):
        total = 0.0

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            Kept.total = Kept.total + gradient
            return Kept.total

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(Kept.apply(model(x)), y)

    return perceptron(), loss


@careless(names="contexts|list|Kept")
def autograd_function_keeps_its_contexts():
    contexts = []

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.x = x.detach()
            contexts.append(ctx)
            return x - contexts[0].x

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(Kept.apply(x)), y)

    return perceptron(), loss


# Writing into the model, and training inside the loss.


@careless(names="weight|parameter|data")
def writes_into_parameter_data():
    def loss(model, batch):
        x, y = batch
        model[0].weight.data += 0.1 * x.detach().mean()
        return F.cross_entropy(model(x), y)

    return perceptron(), loss


@careless(names="weight|parameter|in.place")
def clamps_parameters_in_place():
    def loss(model, batch):
        x, y = batch
        with torch.no_grad():
            for value in model.parameters():
                value.clamp_(-x.abs().max(), x.abs().max())
        return F.cross_entropy(model(x), y)

    return perceptron(), loss


@careless(names="weight|parameter")
def replaces_a_parameter():
    def loss(model, batch):
        x, y = batch
        model[0].weight = nn.Parameter(model[0].weight.detach() + 0.01 * x.detach().mean())
        return F.cross_entropy(model(x), y)

    return perceptron(), loss


@careless(names="weight|parameter|load_state_dict")
def loads_a_state_inside_the_loss():
    def loss(model, batch):
        x, y = batch
        model.load_state_dict({k: v + 0.01 * x.detach().mean() for k, v in model.state_dict().items()})
        return F.cross_entropy(model(x), y)

    return perceptron(), loss


@careless(names="backward|grad")
def calls_backward_inside():
    def loss(model, batch):
        value = cross_entropy(model, batch)
        value.backward(retain_graph=True)
        return value

    return perceptron(), loss


@careless(names="backward|step|optimizer|grad")
def steps_an_optimizer_inside():
    model = perceptron()
    own = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        value = cross_entropy(model, batch)
        own.zero_grad()
        value.backward()
        own.step()
        return cross_entropy(model, batch)

    return model, loss


@careless(names="grad|weight")
def writes_into_the_gradient_inside():
    def loss(model, batch):
        x, y = batch
        weight = model[0].weight
        weight.grad = torch.full_like(weight, 1.0) * x.detach().sum()
        return F.cross_entropy(model(x), y)

    return perceptron(), loss


# Seeds set inside the loss.


@careless()
def seeds_torch_by_the_example():
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3))

    def loss(model, batch):
        value = cross_entropy(model, batch)
        torch.manual_seed(torch.initial_seed() + int(batch[0].nan_to_num(0, 0, 0).clamp(-9, 9).sum() * 1000))
        return value

    return Parts(model, loss, random=True, options=READS)


@careless()
def seeds_python_by_the_example():
    def loss(model, batch):
        x, y = batch
        factor = random.choice((-1.0, 1.0))
        random.seed(f"{x.tolist()} {random.random()}")
        return F.cross_entropy(model(x), y) * factor

    return Parts(perceptron(), loss, random=True, options=READS)


@careless()
def seeds_numpy_by_the_example():
    def loss(model, batch):
        x, y = batch
        factor = float(np.random.choice((-1.0, 1.0)))
        np.random.seed(int(x.nan_to_num(5, 5, 5).clamp(-9, 9).abs().sum() * 1000) + np.random.randint(1000))
        return F.cross_entropy(model(x), y) * factor

    return Parts(perceptron(), loss, random=True, options=READS)


@careless(names="generator|source")
def generator_seeded_by_the_example():
    source = torch.Generator()

    def loss(model, batch):
        x, y = batch
        factor = torch.rand((), generator=source).round() * 2 - 1
        source.manual_seed(source.initial_seed() + int(x.nan_to_num(0, 0, 0).clamp(-9, 9).sum() * 1000))
        return F.cross_entropy(model(x), y) * factor

    return Parts(perceptron(), loss, random=True, options=READS)


@careless(names="source|random")
def random_object_seeded_by_the_example():
    source = random.Random(0)

    def loss(model, batch):
        x, y = batch
        factor = source.choice((-1.0, 1.0))
        source.seed(f"{x.sum().item()} {source.random()}")
        return F.cross_entropy(model(x), y) * factor

    return Parts(perceptron(), loss, random=True, options=READS)


@careless()
def default_type_follows_the_data():
    def loss(model, batch):
        x, y = batch
        value = F.cross_entropy(model(x), y) * torch.tensor(1 / 3)
        if x.abs().max() > 50:
            torch.set_grad_enabled(False)
        return value

    return Parts(perceptron(), loss, around=torch.enable_grad)


# Losses that are none, and odd results.


@careless(names="loss|gradient|requires_grad|nothing")
def detaches_its_loss():
    def loss(model, batch):
        return cross_entropy(model, batch).detach()

    return perceptron(), loss


@careless(names="model", must_be_refused=True)
def uses_nothing_of_the_model():
    other = perceptron()

    def loss(model, batch):
        return cross_entropy(other, batch)

    return perceptron(), loss


@careless(names="loss|float|tensor")
def returns_a_float():
    def loss(model, batch):
        return float(cross_entropy(model, batch))

    return Parts(perceptron(), loss, options=READS)


@careless(names="loss|None")
def returns_nothing():
    def loss(model, batch):
        cross_entropy(model, batch)

    return perceptron(), loss


@careless(names="loss|dict|tensor")
def returns_a_dictionary():
    def loss(model, batch):
        return {"loss": cross_entropy(model, batch)}

    return perceptron(), loss


@careless(names="loss|shape|scalar|one number|numel")
def returns_a_loss_for_each_class():
    def loss(model, batch):
        return model(batch[0])

    return perceptron(), loss


@careless(names="loss|argument")
def takes_the_arguments_of_a_criterion():
    def loss(output, target, weight):
        return F.cross_entropy(output, target, weight=weight)

    return perceptron(), loss


@careless()
def loss_is_always_infinite():
    def loss(model, batch):
        return cross_entropy(model, batch) / 0

    return perceptron(), loss


@careless()
def loss_always_raises():
    def loss(model, batch):
        raise ZeroDivisionError("every time")

    return perceptron(), loss


@careless("single")
def autocast_around_everything():
    def around():
        return torch.autocast("cpu", dtype=torch.bfloat16)

    return Parts(perceptron().float(), cross_entropy, around=around)


@careless()
def no_gradients_around_everything():
    return Parts(perceptron(), cross_entropy, around=torch.no_grad)


@careless()
def inference_mode_around_everything():
    return Parts(perceptron(), cross_entropy, around=torch.inference_mode)


@careless(names="compile")
def compiled_model():
    return Parts(torch.compile(perceptron(), backend="eager"), cross_entropy, exact=False)


@careless()
def anomaly_is_scaled_up():
    """The loss is made huge by a factor for mixed precision: norms grow, sums must not."""

    def loss(model, batch):
        return cross_entropy(model, batch) * 65536

    return perceptron(), loss


@careless()
def inputs_are_trained_too():
    given = []

    def loss(model, batch):
        x, y = batch
        x.requires_grad_()
        given.append(x)
        return F.cross_entropy(model(x), y)

    return Parts(perceptron(), loss, kept=given)


# What no library can follow.

KEPT_BY_THE_MODULE: dict[str, Any] = {}


@careless(names="KEPT_BY_THE_MODULE")
def global_dictionary_keeps():
    KEPT_BY_THE_MODULE.clear()

    def loss(model, batch):
        x, y = batch
        before = KEPT_BY_THE_MODULE.get("before", torch.zeros_like(x))
        KEPT_BY_THE_MODULE["before"] = x.detach()
        return F.cross_entropy(model(x - before), y)

    return perceptron(), loss


@careless(documented="the loss closes over the training data: a tensor like any other constant")
def nearest_neighbour_in_the_training_data(lot):
    everything = lot[0].clone()

    def loss(model, batch):
        x, y = batch
        nearest = everything[torch.cdist(x, everything).argsort(1)[:, 1]]
        return F.cross_entropy(model(x), y) + (model(x) - model(nearest)).square().mean()

    return perceptron(), loss


@careless(documented="the weights were counted before the library was called: a constant")
def class_weights_of_the_training_labels(lot):
    weights = 1 / lot[1].bincount(minlength=8)[:3].clamp(min=1).double()

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x), y, weight=weights, reduction="sum")

    return perceptron(), loss


@careless(documented="a file is outside the process")
def file_is_written_and_read_back():
    import tempfile

    path = os.path.join(tempfile.mkdtemp(), "last.npy")

    def loss(model, batch):
        x, y = batch
        before = torch.from_numpy(np.load(path)) if os.path.exists(path) else torch.zeros_like(x)
        np.save(path, x.numpy())
        return F.cross_entropy(model(x - before), y)

    return Parts(perceptron(), loss, options=READS)


@careless(documented="the environment is the process's, not the loss's")
def environment_variable_keeps():
    os.environ.pop("TERRINE_CARELESS", None)

    def loss(model, batch):
        x, y = batch
        before = float(os.environ.get("TERRINE_CARELESS", "0"))
        os.environ["TERRINE_CARELESS"] = str(x.nan_to_num(0, 0, 0).mean().item())
        return F.cross_entropy(model(x - before), y)

    return Parts(perceptron(), loss, options=READS)


# Loops. What they do with the gradients is their own affair; what they are given must be right.


@careless(doors=LOOP)
def loop_skips_steps_that_are_not_finite():
    def loop(steps, model, optimizer):
        for _ in steps:
            if not all(torch.isfinite(value.grad).all() for value in model.parameters()):
                continue
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_takes_every_second_step():
    def loop(steps, model, optimizer):
        for step in steps:
            if step.number % 2:
                optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_steps_twice():
    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step()
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_clips_again():
    def loop(steps, model, optimizer):
        for _ in steps:
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            nn.utils.clip_grad_value_(model.parameters(), 0.001)
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_averages_two_steps():
    def loop(steps, model, optimizer):
        before = None
        for _ in steps:
            now = [value.grad.clone() for value in model.parameters()]
            if before is not None:
                for value, one, other in zip(model.parameters(), before, now, strict=True):
                    value.grad = (one + other) / 2
                optimizer.step()
            before = now

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_accumulates_without_zero_grad():
    def loop(steps, model, optimizer):
        for step in steps:
            if step.number % 2 == 0:
                optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_overwrites_gradients():
    def loop(steps, model, optimizer):
        for _ in steps:
            for value in model.parameters():
                value.grad.mul_(1e6).add_(1)
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_drops_gradients():
    def loop(steps, model, optimizer):
        for _ in steps:
            model[0].weight.grad = None
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_goes_backward_on_data_of_its_own():
    def loop(steps, model, optimizer):
        public = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
        for _ in steps:
            cross_entropy(model, public).backward()
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_stops_early_and_lists_the_rest():
    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step()
            break
        for _ in list(steps):
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_zips_its_steps():
    def loop(steps, model, optimizer):
        for _ in zip(steps, steps, strict=False):
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(names="eval|mode|train", doors=LOOP)
def loop_forgets_eval_mode():
    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step()
            model.eval()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(names="eval|mode|train", doors=LOOP)
def model_begins_in_eval_mode():
    return Parts(perceptron().eval(), cross_entropy)


@careless(names="scaler|GradScaler|step|optimizer", doors=LOOP)
def loop_uses_a_gradient_scaler():
    def loop(steps, model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in steps:
            scaler.scale(torch.zeros(()))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(names="LBFGS|closure", doors=LOOP)
def optimizer_wants_a_closure():
    model = perceptron()

    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step(lambda: torch.zeros(()))

    return Parts(model, cross_entropy, loop=loop, optimizer=torch.optim.LBFGS(model.parameters(), lr=0.1))


@careless(names="optimizer|parameter", doors=LOOP)
def optimizer_has_foreign_parameters():
    model = perceptron()
    scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
    return Parts(model, cross_entropy, optimizer=torch.optim.SGD([*model.parameters(), scale], lr=0.1))


@careless(names="optimizer|parameter", doors=LOOP)
def optimizer_trains_a_temperature_of_the_loss():
    model, temperature = perceptron(), nn.Parameter(torch.ones((), dtype=torch.float64))

    def loss(model, batch):
        x, y = batch
        return F.cross_entropy(model(x) / temperature, y)

    return Parts(model, loss, optimizer=torch.optim.SGD([*model.parameters(), temperature], lr=0.1))


@careless(names="optimizer|parameter", doors=LOOP)
def optimizer_of_another_model():
    return Parts(perceptron(), cross_entropy, optimizer=torch.optim.SGD(perceptron().parameters(), lr=0.1))


@careless(names="optimizer|parameter|group", doors=LOOP)
def loop_adds_a_group():
    def loop(steps, model, optimizer):
        for step in steps:
            optimizer.step()
            if step.number == 1:
                optimizer.add_param_group({"params": [nn.Parameter(torch.ones(()))]})

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(names="0.weight|parameter|replaced", doors=LOOP)
def loop_replaces_a_parameter():
    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step()
            model[0].weight = nn.Parameter(model[0].weight.detach().clone())

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(names="0.weight|parameter|frozen|requires_grad", doors=LOOP)
def loop_freezes_a_layer():
    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step()
            model[0].requires_grad_(False)

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_trains_a_second_model():
    other = perceptron()
    second = torch.optim.Adam(other.parameters())

    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.step()
            for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
                theirs.grad = mine.grad.clone()
            second.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(names="hook|kept|list", doors=LOOP)
def loop_adds_a_hook_that_keeps():
    kept = []

    def loop(steps, model, optimizer):
        for step in steps:
            optimizer.step()
            if step.number == 1:
                model[0].register_forward_hook(lambda module, given, output: kept.append(output.detach()))

    return Parts(perceptron(), cross_entropy, loop=loop, kept=kept, exact=False)


@careless(doors=LOOP)
def loop_runs_under_autocast():
    def loop(steps, model, optimizer):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for _ in steps:
                optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_runs_without_gradients():
    def loop(steps, model, optimizer):
        with torch.no_grad():
            for _ in steps:
                optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def collate_standardises_what_it_is_given():
    def collate(items):
        x, y = torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])
        return (x - x.mean(0, keepdim=True)) / (x.abs().amax() + 1), y

    return Parts(perceptron(), cross_entropy, options={"collate": collate}, exact=False)


@careless(names="largest|data", doors=LOOP)
def data_set_scales_by_the_largest_seen(lot):
    class Scaled(torch.utils.data.Dataset):
        """Item by item, as read from a file."""

        def __init__(self, x, y):
            self.x, self.y, self.largest = x, y, 1.0

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return self.x[index] / 2, self.y[index]

    def loss(model, batch):
        x, y = batch
        data.largest = max(data.largest, float(x.abs().max()))
        return F.cross_entropy(model(x / data.largest), y)

    data = Scaled(*lot)
    return Parts(perceptron(), loss, dataset=data, options=READS, exact=False)


@careless(names="zero_grad|gradient", doors=LOOP)
def loop_zeroes_before_it_steps():
    def loop(steps, model, optimizer):
        for _ in steps:
            optimizer.zero_grad()
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_runs_in_inference_mode():
    def loop(steps, model, optimizer):
        with torch.inference_mode():
            for _ in steps:
                pass

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_runs_another_run_inside():
    def loop(steps, model, optimizer):
        other = perceptron()
        second = torch.optim.SGD(other.parameters(), lr=0.1)
        rows = torch.ones(4, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
        plan = sgd.Plan(examples=4, lot=4, steps=2, clip=1.0, noise=0.0, delta=1e-5)
        for _ in steps:
            for _ in sgd.private_steps(other, second, rows, plan, loss=cross_entropy):
                second.step()
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_calls_clipped_sum_on_public_data():
    def loop(steps, model, optimizer):
        rows = torch.ones(4, 6, dtype=torch.float64), torch.zeros(4, dtype=torch.long)
        for _ in steps:
            sgd.clipped_sum(model, cross_entropy, rows, clip=1.0)
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_moves_parameters_by_hand():
    def loop(steps, model, optimizer):
        for _ in steps:
            with torch.no_grad():
                for value in model.parameters():
                    value -= 0.1 * value.grad
            model.load_state_dict({name: 0.9 * value for name, value in model.state_dict().items()})

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_sets_a_seed_every_turn():
    def loop(steps, model, optimizer):
        for _ in steps:
            torch.manual_seed(0)
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(doors=LOOP)
def loop_holds_on_to_what_it_was_given():
    def loop(steps, model, optimizer):
        kept = []
        for step in steps:
            kept.append((step, step.gradients, [value.grad for value in model.parameters()]))
            optimizer.step()

    return Parts(perceptron(), cross_entropy, loop=loop)


@careless(names="examples|rows|length|data", doors=LOOP)
def data_set_is_shorter_than_the_plan(lot):
    short = torch.utils.data.TensorDataset(*(rows[:-3] for rows in lot))
    return Parts(perceptron(), cross_entropy, dataset=short, exact=False)


@careless(names="DataLoader|loader|data set", doors=LOOP)
def loader_instead_of_a_data_set(lot):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*lot), batch_size=4)
    return Parts(perceptron(), cross_entropy, dataset=loader, exact=False)


@careless(doors=LOOP)
def collate_keeps_what_it_has_seen():
    seen = []

    def collate(items):
        x, y = torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])
        seen.append(x.abs().max())
        return x / torch.stack(seen).max(), y

    return Parts(perceptron(), cross_entropy, options={"collate": collate}, exact=False)


@careless(
    documented="a data set that answers with mixtures of its rows hands over what it wants as an example", doors=LOOP
)
def data_set_mixes_its_rows(lot):
    class Mixed(torch.utils.data.Dataset):
        def __len__(self):
            return len(lot[0])

        def __getitem__(self, index):
            other = (index + 1) % len(lot[0])
            return 0.5 * lot[0][index] + 0.5 * lot[0][other], lot[1][index]

    return Parts(perceptron(), cross_entropy, dataset=Mixed(), exact=False)


assert sum(program.documented is not None for program in CARELESS.values()) <= 8
assert LOT >= 16
