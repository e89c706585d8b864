"""PrivateStrategy: an unchanged LightningModule by automatic optimisation, its checkpoints, its logs, and flags."""

import warnings

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
    for _ in sgd.private_steps(model, optimizer, data(), run, loss=nn.CrossEntropyLoss()):
        optimizer.step()
        schedule.step()
    return module


def test_an_unchanged_module_takes_the_steps_of_an_ordinary_private_loop(tmp_path, account):
    module, found = fit(tmp_path, account=account)
    for (name, one), other in zip(module.named_parameters(), ordinary(plan()).parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-3, msg=name)  # grid steps of the noisy sums
    assert account.charges == [plan().event]
    assert (found.global_step, found.current_epoch) == (6, 2)


def test_what_a_training_step_logs_is_left_out_with_one_warning(tmp_path):
    validation = DataLoader(TensorDataset(*data()), batch_size=8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, found = fit(tmp_path, validation=validation, log_every_n_steps=1)
    (warning,) = [str(one.message) for one in caught if "not logged" in str(one.message)]
    assert "log('train_accuracy')" in warning
    assert set(found.callback_metrics) == {"epsilon", "epsilon_so_far", "validated"}
    assert float(found.callback_metrics["epsilon"]) == pytest.approx(plan().epsilon)
    assert module.accuracy._update_count == 0
    assert "log" not in vars(module)


def test_a_metric_that_the_plan_buys_is_logged(tmp_path):
    _, found = fit(tmp_path, run=plan(metrics=(sgd.Metric(),)))
    assert float(found.callback_metrics["loss"]) == pytest.approx(found.strategy.lots.last.metrics["loss"])


def test_bfloat16_is_for_the_loss_alone(tmp_path):
    class Typed(Digits):
        seen = None

        def training_step(self, batch, batch_idx):
            type(self).seen = torch.is_autocast_enabled("cpu")
            return super().training_step(batch, batch_idx)

    Typed.seen = True  # as it will be, so that it is no change
    module, _ = fit(tmp_path, Typed(), precision="bf16-mixed")
    assert Typed.seen
    expected, _ = fit(tmp_path)
    for one, other in zip(module.parameters(), expected.parameters(), strict=True):
        assert one.dtype is torch.float32
        torch.testing.assert_close(one, other, rtol=0, atol=2e-2)


def test_a_training_metric_in_the_loss_is_refused(tmp_path):
    class Wrong(Digits):
        def training_step(self, batch, batch_idx):
            x, y = batch
            return functional.cross_entropy(self(x), y) + self.accuracy(self(x), y)

    with pytest.raises(InvalidArgument, match=r"fails on a made-up example \(TypeError"):
        fit(tmp_path, Wrong())


def kept_run(folder, run, stop_at=None, crash_at=None, ckpt=None, account=None):
    """A run that is kept, with Lightning's checkpoints after every second step."""

    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = trainer.global_step == stop_at
            if trainer.global_step == crash_at:
                raise KeyboardInterrupt

    every = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder, every_n_train_steps=2, save_top_k=-1, filename="{step}"
    )
    return fit(
        folder, run=run, checkpoint=folder / "run.pt", ckpt=ckpt, enable_checkpointing=True, callbacks=[every, Stop()],
        account=account,
    )  # fmt: skip


@pytest.mark.parametrize("ckpt", ["step=4.ckpt", "step=2.ckpt", None])
def test_a_stopped_run_goes_on_where_it_was(ckpt, tmp_path):
    """From its newest model, whichever checkpoint is named: a seeded run ends in the model that it would have had."""
    run = plan(steps=7)
    kept_run(tmp_path, run, stop_at=4)
    resumed, again = kept_run(tmp_path, run, ckpt=None if ckpt is None else tmp_path / ckpt)
    assert again.strategy.lots.steps.number == again.global_step == 7
    again.save_checkpoint(tmp_path / "after.ckpt")
    (tmp_path / "whole").mkdir()
    whole, _ = kept_run(tmp_path / "whole", run)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-3)
    with pytest.raises(InvalidArgument, match="finished run: want another path"):
        kept_run(tmp_path, run)


def test_a_run_that_was_cut_off_goes_on_after_what_it_released(tmp_path, account):
    run, numbers = plan(steps=9, seed=None), []

    class Count(lightning.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            numbers.append(batch["step"])

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        kept_run(tmp_path, run, crash_at=5, account=account)
    _, found = fit(
        tmp_path, run=run, checkpoint=tmp_path / "run.pt", ckpt=tmp_path / "step=4.ckpt", callbacks=[Count()],
        account=account,
    )  # fmt: skip
    assert numbers == [6, 7, 8, 9]
    assert found.global_step == 9
    assert len(account.charges) == 1


def test_resuming_without_the_private_run_is_refused(tmp_path, account):
    _, found = fit(tmp_path)
    found.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(InvalidArgument, match=r"ckpt_path: no checkpoint= was given"):
        fit(tmp_path, ckpt=tmp_path / "last.ckpt", account=account)
    with pytest.raises(InvalidArgument, match=r"run.pt is missing"):
        fit(tmp_path, checkpoint=tmp_path / "run.pt", ckpt=tmp_path / "last.ckpt", account=account)
    assert not account.charges


FLAGS = {
    "max_steps": 7,
    "max_epochs": 1,
    "accumulate_grad_batches": 2,
    "gradient_clip_val": 1.0,
    "precision": "bf16-true",
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
    ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "backward"],
)
def test_hooks_on_batches_of_rows_are_refused_by_name(name, tmp_path):
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


def test_a_noisy_gradient_may_be_clipped_again(tmp_path):
    class Clips(Digits):
        norms = ()

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            nn.utils.clip_grad_norm_(self.parameters(), 1e-3)

    before, (after, _) = Digits(), fit(tmp_path, Clips(), plan(steps=1))
    moved = [a - b for a, b in zip(after.parameters(), before.parameters(), strict=True)]
    assert float(torch.stack([one.norm() for one in moved]).norm()) == pytest.approx(0.5e-3, rel=1e-3)


def test_a_step_with_examples_mixed_in_training_step_sees_one(tmp_path):
    """By construction: a mean over the batch in training_step is that of one example."""

    class Mixed(Digits):
        def training_step(self, batch, batch_idx):
            x, y = batch
            assert len(x) == 1
            return functional.cross_entropy(self(x - x.mean(0)), y)

    _, found = fit(tmp_path, Mixed())
    assert found.global_step == 6


def test_evaluation_needs_no_plan(tmp_path):
    strategy = PrivateStrategy(plan(), data())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = trainer(strategy, tmp_path).validate(
            Digits(), DataLoader(TensorDataset(*data()), batch_size=8), verbose=False
        )
    assert "validated" in found[0]
