"""PrivateStrategy: an unchanged LightningModule by automatic optimisation, its checkpoints, its logs, and flags."""

import warnings
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from terrine import sgd
from terrine.errors import BudgetExceeded, InvalidArgument, OutOfOrder

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

from terrine.integrations.lightning import PrivateStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def plan(**others):
    given = {"examples": 24, "lot": 6, "steps": 6, "clip": 0.3, "noise": 1.0, "delta": 1e-3, "seed": 5} | others
    return sgd.Plan(**given)


def data():
    generator = torch.Generator().manual_seed(3)
    return 4 * torch.randn(24, 4, generator=generator), torch.randint(0, 3, (24,), generator=generator)


class Digits(lightning.LightningModule):
    """As tutorials write one: layers used in training_step, metrics, logs, momentum and a schedule."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.dropout = nn.Dropout(dropout)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.scores = torchmetrics.MetricCollection([torchmetrics.Accuracy(task="multiclass", num_classes=3)])
        self.validated = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def forward(self, x):
        return self.second(self.dropout(torch.tanh(self.first(x))))

    def training_step(self, batch, batch_idx):
        x, y = batch
        out = self(x)
        loss = functional.cross_entropy(out, y)
        self.accuracy(out, y)
        self.log("train_accuracy", self.accuracy)
        self.log_dict(self.scores(out, y) and {"train_loss": loss}, prog_bar=True)
        return {"loss": loss, "out": out}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.validated(self(x), y)
        self.log("validated", self.validated)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def trainer(strategy, folder, **others):
    given = {"max_steps": strategy.plan.steps, "logger": False, "enable_progress_bar": False}
    given |= {"enable_checkpointing": False, "enable_model_summary": False, "default_root_dir": folder}
    return lightning.Trainer(strategy=strategy, accelerator="cpu", **(given | others))


def fit(
    folder, module=None, run=None, *, loader=None, validation=None, account=None, checkpoint=None, ckpt=None, **others
):
    strategy = PrivateStrategy(run or plan(), data(), account=account, checkpoint=checkpoint)
    module = module or Digits()
    found = trainer(strategy, folder, **others)
    found.fit(module, loader or strategy.lots, validation, ckpt_path=ckpt)
    return module, found


def ordinary(run):
    """The same by hand."""
    module = Digits()
    model = nn.ModuleList([module.first, module.second])
    model.forward = lambda x: module.second(torch.tanh(module.first(x)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, lots = sgd.make_private(model, optimizer, data(), run)
    for x, y in lots:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return module


def test_an_unchanged_module_takes_the_steps_of_an_ordinary_private_loop(tmp_path, account):
    module, found = fit(tmp_path, account=account)
    for (name, one), other in zip(module.named_parameters(), ordinary(plan()).parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3, msg=name)  # grid steps of the noisy sums
    assert account.charges == [plan().event]
    assert (found.global_step, found.current_epoch) == (6, 2)


def test_what_a_training_step_logs_is_left_out_with_a_warning(tmp_path):
    validation = DataLoader(TensorDataset(*data()), batch_size=8)
    with pytest.warns(UserWarning, match="train_loss.*not logged"):
        module, found = fit(tmp_path, validation=validation, log_every_n_steps=1)
    assert set(found.callback_metrics) == {"epsilon", "epsilon_so_far", "validated"}
    assert float(found.callback_metrics["epsilon"]) == pytest.approx(plan().epsilon)
    assert module.accuracy._update_count == 0
    assert "log" not in vars(module)


def test_a_training_metric_in_the_loss_is_refused(tmp_path):
    class Wrong(Digits):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return functional.cross_entropy(self(x), y) + self.accuracy(self(x), y)

    with pytest.raises((InvalidArgument, TypeError)):
        fit(tmp_path, Wrong())


def test_a_resumed_run_ends_in_the_same_model(tmp_path):
    kept, every = tmp_path / "run.pt", lightning.pytorch.callbacks.ModelCheckpoint
    run = plan(seed=None, steps=7)

    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step >= 4

    saving = every(dirpath=tmp_path, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    _, found = fit(tmp_path, Digits(0.3), run, checkpoint=kept, enable_checkpointing=True, callbacks=[saving, Stop()])
    key = found.strategy.lots.lots.run.step.key
    assert kept.with_name("run.pt.key").exists()
    with pytest.raises(InvalidArgument, match="a checkpoint of step 2, and the private run was saved at 4"):
        fit(tmp_path, Digits(0.3), run, checkpoint=kept, ckpt=tmp_path / "step=2.ckpt")
    with pytest.raises(InvalidArgument, match="holds an unfinished run"):
        fit(tmp_path, Digits(0.3), run, checkpoint=kept)
    resumed, again = fit(tmp_path, Digits(0.3), run, checkpoint=kept, ckpt=tmp_path / "step=4.ckpt")
    assert again.strategy.lots.lots.run.step.key.secret == key.secret
    assert again.global_step == 7
    assert not kept.with_name("run.pt.key").exists()

    with pytest.raises(InvalidArgument, match="holds a finished run: want another path"):
        fit(tmp_path, Digits(0.3), run, checkpoint=kept)

    strategy, whole = PrivateStrategy(run, data(), checkpoint=tmp_path / "whole.pt"), Digits(0.3)
    begin = strategy.lots._begin

    def begun():
        lots = begin()
        lots.run.step.key = key
        return lots

    strategy.lots._begin = begun
    trainer(strategy, tmp_path).fit(whole, strategy.lots)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


def test_resuming_without_the_private_run_is_refused(tmp_path):
    _, found = fit(tmp_path)
    found.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(InvalidArgument, match=r"ckpt_path: no checkpoint= was given"):
        fit(tmp_path, ckpt=tmp_path / "last.ckpt")
    with pytest.raises(InvalidArgument, match=r"run.pt is missing"):
        fit(tmp_path, checkpoint=tmp_path / "run.pt", ckpt=tmp_path / "last.ckpt")


FLAGS = {
    "max_steps": 7,
    "max_epochs": 1,
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 1.0,
    "precision": "bf16-mixed",
    "limit_train_batches": 0.5,
    "overfit_batches": 1,
    "fast_dev_run": True,
}


@pytest.mark.parametrize("name", FLAGS)
def test_flags_that_contradict_the_plan_are_refused_by_name(name, tmp_path, account):
    with pytest.raises(InvalidArgument, match=f"{name}="):
        fit(tmp_path, account=account, **{name: FLAGS[name]})
    assert not account.charges


def test_a_loader_of_ones_own_is_refused(tmp_path, account):
    with pytest.raises(InvalidArgument, match=r"want fit\(module, strategy.lots\)"):
        fit(tmp_path, loader=DataLoader(TensorDataset(*data()), batch_size=6), account=account)
    assert not account.charges


def hooked(name, function=lambda self, *args, **others: args[0]):
    return type("Hooked", (Digits,), {name: function})()


@pytest.mark.parametrize(
    "name",
    [
        "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "backward",
        "configure_gradient_clipping", "on_after_backward", "on_before_optimizer_step",
    ],
)  # fmt: skip
def test_hooks_that_see_whole_lots_or_gradients_are_refused_by_name(name, tmp_path):
    with pytest.raises(InvalidArgument, match=f"Hooked.{name}"):
        fit(tmp_path, hooked(name))


def test_manual_optimisation_and_several_optimizers_are_refused(tmp_path):
    module = Digits()
    module.automatic_optimization = False
    with pytest.raises(InvalidArgument, match="automatic_optimization"):
        fit(tmp_path, module)

    def two(self):
        return [torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.first, self.second)]

    with pytest.raises((InvalidArgument, RuntimeError), match="optimizers"):
        fit(tmp_path, hooked("configure_optimizers", two))


def test_a_second_fit_and_a_refused_account(tmp_path):
    class Empty:
        def charge(self, event, *, purpose, by):
            raise BudgetExceeded("nothing left")

    with pytest.raises(BudgetExceeded):
        fit(tmp_path, account=Empty())
    strategy = PrivateStrategy(plan(), data())
    found = trainer(strategy, tmp_path)
    found.fit(Digits(), strategy.lots)
    with pytest.raises(OutOfOrder, match="has trained"):
        found.fit(Digits(), strategy.lots)


def test_a_step_with_two_examples_mixed_in_training_step_sees_one(tmp_path):
    """By construction: a mean over the batch in training_step is that of one example."""

    class Mixed(Digits):
        sizes = set()  # noqa: RUF012

        def training_step(self, batch, batch_idx):
            x, y = batch
            self.sizes.add(len(x))
            return functional.cross_entropy(self(x - x.mean(0)), y)

    with suppress(InvalidArgument):  # where the seat belt notices
        fit(tmp_path, Mixed())
    assert 1 in Mixed.sizes
    assert Mixed.sizes <= {1, 2}


def test_evaluation_needs_no_plan(tmp_path):
    strategy = PrivateStrategy(plan(), data())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trainer(strategy, tmp_path).validate(
            Digits(), DataLoader(TensorDataset(*data()), batch_size=8), verbose=False
        )
    assert "validated" in found[0]
