"""What a hostile reader did to PrivateTrainer and PrivateStrategy: ordinary arguments, callbacks and overrides."""

from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Subset, TensorDataset

from terrine import sgd
from terrine.errors import InvalidArgument, OutOfOrder

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
lightning = pytest.importorskip("lightning")

from transformers import TrainerCallback  # noqa: E402

from terrine.integrations.huggingface import PrivateTrainer  # noqa: E402
from terrine.integrations.lightning import PrivateStrategy  # noqa: E402

from . import test_huggingface as hf  # noqa: E402
from . import test_lightning as pl  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


# -- transformers --------------------------------------------------------------------------------------


def test_a_callback_sees_gradients_after_the_noise_and_no_lot(tmp_path):
    seen = {"before": [], "after": [], "lots": []}

    class Spy(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            released = [one.clone() for one in model.parameters()]
            seen["before"] += [one.grad for one in model.parameters()]
            assert len(released) == len(found._loader.last.gradients)
            assert all(a.grad is b for a, b in zip(model.parameters(), found._loader.last.gradients, strict=True))

        def on_optimizer_step(self, args, state, control, model=None, **_):
            seen["after"] += [one.grad for one in model.parameters()]

    class Batches(PrivateTrainer):
        def get_batch_samples(self, *args):
            found = super().get_batch_samples(*args)
            seen["lots"] += [dict(one) for one in found[0]]
            assert found[1] is None  # the number of tokens drawn
            return found

    found = hf.trainer(tmp_path, kind=Batches, callbacks=[Spy()])
    found.train()
    assert all(one is not None for one in seen["before"] + seen["after"])
    assert seen["lots"] == [{"step": number} for number in range(1, 7)]


def test_several_steps_cannot_be_accumulated_into_one(tmp_path):
    """All but the last would be paid for and thrown away."""

    class Late(TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            args.gradient_accumulation_steps = 2

    with pytest.raises(OutOfOrder, match="several are accumulated"):
        hf.trainer(tmp_path, callbacks=[Late()]).train()


def test_a_step_is_not_released_twice(tmp_path):
    class Twice(PrivateTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            super().training_step(model, inputs)
            return super().training_step(model, inputs)

    with pytest.raises(OutOfOrder, match="one is used twice"):
        hf.trainer(tmp_path, kind=Twice).train()


def test_a_training_step_of_ones_own_holds_no_row(tmp_path):
    """What it does with the noisy gradient is its own affair."""

    class Own(PrivateTrainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            found = super().training_step(model, inputs)
            with pytest.raises((TypeError, ValueError)):
                self.compute_loss(model, inputs)
            assert not any(isinstance(one, torch.Tensor) for one in inputs.values())
            return found

    hf.trainer(tmp_path, kind=Own, optim="sgd", run=hf.plan(steps=1)).train()


def test_a_step_without_a_gradient_is_refused(tmp_path):
    class Stepping(TrainerCallback):
        def on_step_end(self, args, state, control, optimizer=None, **_):
            optimizer.step()

    with pytest.raises(OutOfOrder, match="the noisy gradient is gone"):
        hf.trainer(tmp_path, callbacks=[Stepping()]).train()


def test_a_loss_that_carries_one_example_to_the_next_is_refused(tmp_path):
    class Running(PrivateTrainer):
        running = 1.0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = model(**inputs).loss
            self.running = 0.9 * self.running + 0.1 * loss.detach()
            return loss / self.running

    with pytest.raises(InvalidArgument, match="changes running of Running"):
        hf.trainer(tmp_path, kind=Running).train()

    class Seen:
        def __init__(self):
            self.losses, self.mean = [], torch.zeros(())

        def append(self, outputs, labels, num_items_in_batch=None):
            self.losses.append(outputs.logits.mean())
            return sum(self.losses)

        def in_place(self, outputs, labels, num_items_in_batch=None):
            self.mean += outputs.logits.mean().detach()
            return outputs.logits.mean() * self.mean

    for loss in (Seen().append, Seen().in_place):
        with pytest.raises(
            InvalidArgument, match=r"of Seen, by which an example could reach another|a tensor that outlives it"
        ):
            hf.trainer(tmp_path, compute_loss_func=loss).train()


@pytest.mark.parametrize("where", ["own", "nested", "class", "closure", "default", "callback", "data"])
def test_a_loss_that_keeps_an_example_anywhere_is_refused(where, tmp_path, account):
    """Beside the trainer's attributes: in what they hold, in its class, and in whatever its code names."""
    outside, data = {"kept": []}, hf.texts()

    class Keeps(PrivateTrainer):
        largest = {}  # noqa: RUF012

        def __init__(self, *args, **others):
            super().__init__(*args, **others)
            self.stats = {"of": {"losses": []}}

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None, *, kept=[]):  # noqa: B006
            loss = model(**inputs).loss
            holder = {
                "nested": self.stats["of"]["losses"], "closure": outside["kept"], "default": kept, "callback": spy.kept,
            }.get(where)  # fmt: skip
            if where == "own":
                self.last = loss.detach()
            elif where == "class":
                self.largest[len(self.largest)] = loss.detach()
            elif where == "data":
                data[0]["note"] = loss.detach()
            else:
                holder.append(loss.detach())
            return loss

    class Spy(TrainerCallback):
        kept = []  # noqa: RUF012

    spy = Spy()
    with pytest.raises(InvalidArgument, match=r"changes last of Keeps|changed while examples ran|outlives"):
        hf.trainer(tmp_path, kind=Keeps, data=data, callbacks=[spy], account=account).train()
    assert not account.charges


@pytest.mark.parametrize("fails", [False, True])
def test_one_example_in_many_that_steers_the_run_is_noticed(fails, tmp_path):
    """Not by chance: the trainer's attributes are looked at whenever the loss runs, and where it fails."""
    data = [*hf.texts()[:-1], {"input_ids": [3] * 8, "labels": [3] * 8}]

    class Stops(PrivateTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if (inputs["input_ids"] == 3).all():
                self.control.should_training_stop = True
                if fails:
                    raise ValueError
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    run = hf.plan(steps=40, lot=12)
    with pytest.raises(InvalidArgument, match="changes should_training_stop of TrainerControl"):
        hf.trainer(tmp_path, kind=Stops, data=data, run=run).train()


@pytest.mark.parametrize("what", ["none", "nan", "error"])
def test_an_example_without_a_loss_adds_nothing(what, tmp_path):
    data = [*hf.texts()[:-1], {"input_ids": [3] * 8, "labels": [3] * 8}]

    class Skips(hf.Peeking):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            if not (inputs["input_ids"] == 3).all():
                return loss
            return {"none": lambda: None, "nan": lambda: loss * torch.nan, "error": lambda: 1 / 0}[what]()

    sums = []
    for count, kind in ((24, Skips), (23, hf.Peeking)):
        run = hf.plan(examples=count, lot=count, steps=1, sampling=sgd.FixedSize())
        found = hf.trainer(tmp_path / str(count), hf.gpt2().double(), kind=kind, data=data[:count], run=run)
        found.train()
        sums.append(found.peeked[0][1])
    for name, value in sums[0].items():
        torch.testing.assert_close(value, sums[1][name], rtol=1e-9, atol=1e-12)


def test_a_loss_may_read_what_the_run_does(tmp_path):
    """Rates, steps and arguments are public; and an example whose loss fails is no change of anything."""
    data = [*hf.texts()[:-1], {"input_ids": [WORDS_BEYOND] * 8, "labels": [3] * 8}]

    class Reads(PrivateTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            rate = self.optimizer.param_groups[0]["lr"]
            return loss * (1 + rate) / (1 + self.state.global_step) + 0 * self.args.learning_rate

    run = hf.plan(steps=3, lot=24, sampling=sgd.FixedSize())
    assert hf.trainer(tmp_path, kind=Reads, data=data, run=run).train().global_step == 3


WORDS_BEYOND = 1000


def test_what_a_loss_logs_of_an_example_is_not_logged(tmp_path):
    class Chatty(PrivateTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = model(**inputs).loss
            self.log({"raw": 1.0})
            return loss

    found = hf.trainer(tmp_path, kind=Chatty)
    found.train()
    assert not any("raw" in one for one in found.state.log_history)


def test_evaluating_on_the_training_data_is_refused(tmp_path):
    data = hf.texts()
    for private in (data, {"train": data}, Subset(data, [0, 1])):
        with pytest.raises(InvalidArgument, match="eval_dataset is train_dataset"):
            hf.trainer(tmp_path, data=data, eval_dataset=private)
    with pytest.raises(InvalidArgument, match="eval_dataset is train_dataset"):
        hf.trainer(tmp_path, data=data).evaluate(data)


def test_a_second_run_or_a_search_is_refused(tmp_path, account):
    found = hf.trainer(tmp_path, account=account)
    found.train()
    with pytest.raises(OutOfOrder, match="another run costs again"):
        found.train()
    with pytest.raises(OutOfOrder, match="draws its lots once"):
        found.get_train_dataloader()
    with pytest.raises(InvalidArgument, match="hyperparameter_search"):
        found.hyperparameter_search()
    with pytest.raises(InvalidArgument, match="trial"):
        hf.trainer(tmp_path).train(trial={"learning_rate": 1.0})
    with pytest.raises(InvalidArgument, match="model_init"):
        PrivateTrainer(
            None, hf.arguments(tmp_path), train_dataset=hf.texts(), plan=hf.plan(), model_init=lambda: hf.gpt2()
        )
    assert len(account.charges) == 1


def test_a_loader_of_the_trainers_own_cannot_train(tmp_path):
    class Own(PrivateTrainer):
        def get_train_dataloader(self):
            return DataLoader(self.train_dataset, batch_size=4, collate_fn=self._collate)

    with pytest.raises(OutOfOrder, match=r"not the one that waits|no run was begun"):
        hf.trainer(tmp_path, kind=Own).train()


def test_texts_beside_tensors_are_refused(tmp_path):
    """Every example would be given the texts of all."""

    class Named(PrivateTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            factor = len(inputs.pop("names"))
            return model(**inputs).loss * factor

    def collate(examples):
        made = transformers.default_data_collator([{"input_ids": one["input_ids"]} for one in examples])
        return {**made, "labels": made["input_ids"], "names": [str(one["input_ids"]) for one in examples]}

    with pytest.raises(InvalidArgument, match="a batch with str: every example would see those of all"):
        hf.trainer(tmp_path, kind=Named, data_collator=collate, remove_unused_columns=False).train()


def test_a_model_that_mixes_examples_gives_each_alone(tmp_path):
    """A difference from the mean over the batch is zero for a batch of one, whatever the lot."""
    sizes = set()

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.config = hf.gpt2(), hf.gpt2().config

        def forward(self, input_ids=None, attention_mask=None, labels=None):
            out = self.inner(input_ids=input_ids, attention_mask=attention_mask)
            sizes.add(len(out.logits))
            logits = 50 * (out.logits - out.logits.mean(0, keepdim=True).detach())
            return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}

    assert hf.trainer(tmp_path, Mixing(), run=hf.plan(steps=2)).train().global_step == 2
    assert sizes == {1}


@pytest.mark.parametrize(
    ("variable", "value"), [("ACCELERATE_MIXED_PRECISION", "fp16"), ("ACCELERATE_DYNAMO_BACKEND", "EAGER")]
)
def test_what_accelerate_launch_asks_for_is_refused_or_not_heard(variable, value, tmp_path, monkeypatch, account):
    """Environment variables reach the accelerator past every argument."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    def fresh():
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    fresh()
    monkeypatch.setenv(variable, value)
    found = None
    with suppress(InvalidArgument):
        found = hf.trainer(tmp_path, account=account)
    assert found is None or getattr(found.accelerator, "mixed_precision", "no") == "no"
    assert found is None or found.accelerator.state.dynamo_plugin.backend.value == "NO"
    assert not account.charges
    monkeypatch.undo()
    fresh()


def test_a_model_on_several_devices_is_refused(tmp_path):
    model = hf.gpt2()
    model.hf_device_map = {"transformer": "cuda:0", "lm_head": "cuda:1"}
    with pytest.raises(InvalidArgument, match="hf_device_map"):
        hf.trainer(tmp_path, model)


# -- Lightning -----------------------------------------------------------------------------------------


def test_lots_cannot_be_accumulated_by_a_callback(tmp_path):
    scheduler = lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 2})
    with pytest.raises(InvalidArgument, match="GradientAccumulationScheduler"):
        pl.fit(tmp_path, callbacks=[scheduler])

    class Late(lightning.Callback):
        def on_train_batch_start(self, trainer, *_):
            trainer.accumulate_grad_batches = 2

    with pytest.raises(InvalidArgument, match="accumulate_grad_batches=2"):
        pl.fit(tmp_path, callbacks=[Late()])


def test_a_learning_rate_finder_is_refused(tmp_path, account):
    strategy = PrivateStrategy(pl.plan(), pl.data(), account=account)
    tuner = lightning.pytorch.tuner.Tuner(pl.trainer(strategy, tmp_path))
    module = pl.Digits()
    module.lr = 0.1
    with pytest.raises(InvalidArgument, match="LearningRateFinder"):
        tuner.lr_find(module, train_dataloaders=strategy.lots)
    assert not account.charges


def test_callbacks_see_neither_lots_nor_the_loss_and_gradients_after_the_noise(tmp_path):
    seen, norms = [], []

    class Spy(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(dict(batch))

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            assert outputs.keys() == {"loss"}
            assert outputs["loss"].isnan()

        def on_before_backward(self, trainer, module, loss):
            assert loss.isnan()

        def on_after_backward(self, trainer, module):
            self.on_before_optimizer_step(trainer, module, None)

        def on_before_optimizer_step(self, trainer, module, optimizer):
            released = trainer.strategy.lots.last.gradients
            assert all(a.grad is b for a, b in zip(module.parameters(), released, strict=True))
            norms.append(float(torch.stack([one.grad.norm() for one in module.parameters()]).norm()))

    pl.fit(tmp_path, callbacks=[Spy()])
    assert seen == [{"step": number} for number in range(1, 7)]
    assert len(norms) == 12
    assert norms[::2] == norms[1::2]


def test_a_step_taken_twice_is_one_release(tmp_path):
    """A module may override optimizer_step: what it does with the noisy gradient is its own affair."""

    class Twice(pl.Digits):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure)
            optimizer.step(closure=lambda: None)

    _, found = pl.fit(tmp_path, Twice())
    assert found.strategy.lots.steps.number == found.global_step == 6

    class Again(pl.Digits):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(closure=optimizer_closure)
            optimizer.step(closure=optimizer_closure)

    with pytest.raises(OutOfOrder, match="one is used twice"):
        pl.fit(tmp_path, Again())


@pytest.mark.parametrize("how", ["list", "buffer", "attribute", "number"])
def test_a_module_that_carries_one_example_to_the_next_is_refused(how, tmp_path):
    class Keeps(pl.Digits):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))
            self.kept, self.last, self.number = [], torch.zeros(()), 0.0

        def training_step(self, batch, batch_idx):
            x, y = batch
            loss = functional.cross_entropy(self(x), y)
            if how == "list":
                self.kept.append(loss.detach())
            elif how == "buffer":
                self.mean += loss.detach()
            elif how == "attribute":
                self.last = loss.detach()
            else:
                self.number += loss.item()
            return loss * (1 + self.mean + self.last + self.number)

    with pytest.raises(InvalidArgument, match=r"of Keeps|a tensor that outlives it|reads|mean changed|want"):
        pl.fit(tmp_path, Keeps())


def test_texts_beside_tensors_are_refused_in_a_module_too(tmp_path):
    class Named(TensorDataset):
        def __getitem__(self, index):
            return (*super().__getitem__(index), f"example {index}")

    strategy = PrivateStrategy(pl.plan(), Named(*pl.data()))
    with pytest.raises(InvalidArgument, match="a batch with str: every example would see those of all"):
        pl.trainer(strategy, tmp_path).fit(pl.Digits(), strategy.lots)


def test_validating_on_the_training_data_is_refused(tmp_path, account):
    data = TensorDataset(*pl.data())
    strategy = PrivateStrategy(pl.plan(), data, account=account)
    with pytest.raises(InvalidArgument, match="val_dataloaders: the training data"):
        pl.trainer(strategy, tmp_path).fit(pl.Digits(), strategy.lots, DataLoader(data, batch_size=8))
    assert not account.charges


def test_a_compiled_module_is_refused(tmp_path, account):
    strategy = PrivateStrategy(pl.plan(), pl.data(), account=account)
    with pytest.raises(InvalidArgument, match=r"compile"):
        pl.trainer(strategy, tmp_path).fit(torch.compile(pl.Digits(), backend="eager"), strategy.lots)
    assert not account.charges


def test_lots_outside_a_fit_are_refused(account):
    with pytest.raises(OutOfOrder, match=r"given to Trainer.fit"):
        next(iter(PrivateStrategy(pl.plan(), pl.data(), account=account).lots))
    assert not account.charges
