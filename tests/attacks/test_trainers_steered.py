"""Attack: steer a run of transformers or Lightning by one example, past the noise, or report too small a cost."""

import pytest
import torch
from torch.nn import functional

from terrine import sgd
from terrine.errors import InvalidArgument

transformers = pytest.importorskip("transformers")
lightning = pytest.importorskip("lightning")

from terrine.integrations.huggingface import PrivateTrainer  # noqa: E402
from terrine.integrations.lightning import PrivateStrategy  # noqa: E402
from tests.integrations.test_huggingface import arguments, gpt2, texts  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def plan():
    return sgd.Plan(examples=24, lot=6, steps=3, clip=0.3, noise=1.0, delta=1e-3, seed=5)


STEERING = {
    "lr": lambda t, loss: t.optimizer.param_groups[0].update(lr=1000.0),
    "stop": lambda t, loss: setattr(t.control, "should_training_stop", True),
    "save": lambda t, loss: setattr(t.control, "should_save", True),
    "state": lambda t, loss: setattr(t.state, "best_metric", loss.detach()),
    "history": lambda t, loss: t.state.log_history.append({"loss": loss.detach()}),
    "args": lambda t, loss: setattr(t.args, "foo", 1),
    "config": lambda t, loss: setattr(t.model.config, "foo", 1),
}


@pytest.mark.parametrize("name", STEERING)
def test_a_loss_that_steers_transformers_trainer_is_refused(tmp_path, name):
    class Steered(PrivateTrainer):
        def compute_loss(self, model, inputs, *args, **others):
            loss = super().compute_loss(model, inputs, *args, **others)
            STEERING[name](self, loss)
            return loss

    trainer = Steered(gpt2(), arguments(tmp_path), train_dataset=texts(), plan=plan(), length=8)
    with pytest.raises(InvalidArgument, match="decide what the run does"):
        trainer.train()


def test_the_training_data_is_not_evaluated_by_another_door(tmp_path):
    data = texts()
    trainer = PrivateTrainer(gpt2(), arguments(tmp_path), train_dataset=data, plan=plan(), length=8)
    with pytest.raises(InvalidArgument, match="eval_dataset is train_dataset"):
        trainer.predict(data)
    trainer.eval_dataset = data
    with pytest.raises(InvalidArgument, match="eval_dataset is train_dataset"):
        trainer.evaluate()


def test_a_run_that_is_stopped_has_cost_the_whole_plan(tmp_path):
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = True

    trainer = PrivateTrainer(
        gpt2(), arguments(tmp_path), train_dataset=texts(), plan=plan(), length=8, callbacks=[Stop()]
    )
    assert trainer.train().metrics["epsilon"] == plan().epsilon > plan().epsilon_after(1)


class Linear(lightning.LightningModule):
    def __init__(self, steer=lambda module, loss: None):
        super().__init__()
        self.layer, self._steer = torch.nn.Linear(4, 3), steer

    def training_step(self, batch, batch_idx):
        loss = functional.cross_entropy(self.layer(batch[0]), batch[1])
        self._steer(self, loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def fit(tmp_path, module, **others):
    strategy = PrivateStrategy(plan(), (torch.randn(24, 4), torch.arange(24) % 3))
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=3, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path, **others,
    )  # fmt: skip
    trainer.fit(module, strategy.lots)
    return trainer


@pytest.mark.parametrize(
    "steer",
    [
        lambda module, loss: setattr(module.trainer, "should_stop", True),
        lambda module, loss: module.optimizers().param_groups[0].update(lr=1e4),
        lambda module, loss: module.trainer.callback_metrics.update(leak=loss.detach()),
    ],
)
def test_a_training_step_that_steers_lightning_is_refused(tmp_path, steer):
    with pytest.raises(InvalidArgument, match=r"decide what the run does|callback_metrics|changed while"):
        fit(tmp_path, Linear(steer))


def test_a_lightning_run_that_is_stopped_has_cost_the_whole_plan(tmp_path):
    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, *_):
            trainer.should_stop = True

    found = fit(tmp_path, Linear(), callbacks=[Stop()], min_steps=1)
    assert float(found.callback_metrics["epsilon"]) == pytest.approx(plan().epsilon)
