"""Plans for people in the loops of other libraries: one step without noise is the sum over people, clipped as one."""

import numpy as np
import pytest
import torch

from terrine import sgd
from terrine.errors import InvalidArgument
from terrine.sgd import clipped_sum

lightning = pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")

from terrine.integrations.huggingface import PrivateTrainer  # noqa: E402
from terrine.integrations.lightning import PrivateStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
WHOSE, ROWS = np.repeat(np.arange(4), [1, 2, 3, 3]), [1, 2, 3, 3]


def plan(**others):
    given = {"people": 4, "lot": 4, "rows_per_person": 3, "steps": 1, "clip": 0.2, "noise": 0.0, "delta": 1e-3}
    return sgd.Plan(**given | others)


class Linear(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layer = torch.nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def test_lightning(tmp_path):
    x, y = 3 * torch.randn(9, 4), torch.arange(9) % 3
    module = Linear()
    before = module.layer.weight.detach().clone()
    wanted = clipped_sum(module.layer, torch.nn.CrossEntropyLoss(), (x, y), clip=0.2, rows=ROWS).sums["weight"]
    strategy = PrivateStrategy(plan(), (x, y), person=WHOSE)
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", max_steps=1, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, strategy.lots)
    assert torch.allclose(before - module.layer.weight, wanted / 4, atol=1e-6)


def small():
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=37, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


@pytest.mark.parametrize("person", [WHOSE, None])
def test_transformers(tmp_path, person):
    texts = [{"input_ids": [1 + place, 2, 3], "labels": place % 3} for place in range(9)]
    model = small()
    before = model.classifier.weight.detach().clone()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", learning_rate=1.0,
        optim="sgd", lr_scheduler_type="constant",
    )  # fmt: skip
    ids, labels = torch.tensor([one["input_ids"] for one in texts]), torch.tensor([one["labels"] for one in texts])

    def loss(model, batch):
        return model(input_ids=batch[0], labels=batch[1]).loss

    sums = clipped_sum(model, loss, (ids, labels), clip=0.2, rows=ROWS).sums
    trainer = PrivateTrainer(model, arguments, train_dataset=texts, plan=plan(), person=person, length=3)
    if person is None:
        with pytest.raises(InvalidArgument, match="want person="):
            trainer.train()
        return
    trainer.train()
    moved = before - model.classifier.weight
    assert torch.allclose(moved, sums["classifier.weight"] / 4, atol=1e-6)
