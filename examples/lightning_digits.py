"""An ordinary LightningModule, trained privately on the scikit-learn digits by a strategy.

python examples/lightning_digits.py
"""

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

from terrine import sgd
from terrine.events import Budget
from terrine.integrations.lightning import PrivateStrategy


class Digits(lightning.LightningModule):
    """Nothing here knows of privacy."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
        self.accuracy = Accuracy(task="multiclass", num_classes=10)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.cross_entropy(self.layers(x), y)
        self.log("train_loss", loss)  # private: it is left out of the logs, with a warning
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.accuracy(self.layers(x), y)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.0)


def main() -> float:
    """Train, and return the accuracy on digits that were held out."""
    torch.manual_seed(0)
    bunch = load_digits()
    x, y = torch.tensor(bunch.data / 16, dtype=torch.float32), torch.tensor(bunch.target)
    plan = sgd.Plan(examples=1500, lot=150, epochs=10, clip=1.0, budget=Budget(epsilon=3.0, delta=1e-5))

    strategy = PrivateStrategy(plan, (x[:1500], y[:1500]))
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=plan.steps, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    held_out = DataLoader(TensorDataset(x[1500:], y[1500:]), batch_size=99)
    trainer.fit(Digits(), strategy.lots, held_out)
    found = float(trainer.callback_metrics["accuracy"])
    print(f"accuracy {found:.3f} at epsilon {plan.epsilon:.2f}, delta {plan.delta}")
    return found


if __name__ == "__main__":
    main()
