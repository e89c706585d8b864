"""The text classifier of Opacus' tutorial in Terrine: BERT's upper layers, tuned to tell whether sentences entail.

    python examples/opacus/bert.py --data snli_1.0      # the folder of SNLI; fetches bert-base-cased from its hub
    python examples/opacus/bert.py --small              # made-up token ids, a small network of random weights: seconds

The tutorial takes 1 / (number of batches) for delta, which is 32 times 1 / (number of examples): with it a run may
publish 32 of the texts. Here it is a tenth of 1 / (number of examples).
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

from terrine import sgd
from terrine.events import Budget

CLASSES = ("contradiction", "entailment", "neutral")
LENGTH = 128
Texts = tuple[Tensor, Tensor, Tensor, Tensor]


def freeze_lower_layers(model: Any) -> None:
    """Leave the last layer, the pooler and the classifier to be trained."""
    model.requires_grad_(False)
    for part in (model.bert.encoder.layer[-1], model.bert.pooler, model.classifier):
        part.requires_grad_(True)


def compute_loss(model: nn.Module, batch: Texts) -> Tensor:
    """Return the loss of one text: the batch has one row."""
    ids, mask, types, labels = batch
    loss: Tensor = model(input_ids=ids, attention_mask=mask, token_type_ids=types, labels=labels).loss
    return loss


def train(model: nn.Module, data: Texts, lot: int, epochs: int, rate: float) -> sgd.Plan:
    """Train in place; return the plan that was kept."""
    budget = Budget(epsilon=7.5, delta=0.1 / len(data[0]))
    plan = sgd.Plan(examples=len(data[0]), lot=lot, epochs=epochs, clip=0.1, budget=budget)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    model.train()  # transformers' models come in eval mode
    for step in sgd.private_steps(model, optimizer, data, plan, loss=compute_loss, memory=4e9):
        optimizer.step()
        if step.number % 1000 == 0:
            print(f"step {step.number} of {plan.steps}: epsilon {step.epsilon:.2f} at delta {plan.delta:.1e}")
    return plan


def measure_accuracy(model: nn.Module, data: Texts) -> float:
    """Return the share of right answers; on public data."""
    model.eval()
    right = 0.0
    with torch.no_grad():
        for ids, mask, types, labels in zip(*(part.split(64) for part in data), strict=True):
            logits = model(input_ids=ids, attention_mask=mask, token_type_ids=types).logits
            right += float((logits.argmax(1) == labels).sum())
    return right / len(data[0])


def read_snli(path: Path, tokenizer: Any) -> Texts:
    """Read pairs of sentences whose label the annotators agreed on, padded to a public length."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    rows = [row for row in rows if row["gold_label"] in CLASSES]
    pairs = [row["sentence1"] for row in rows], [row["sentence2"] for row in rows]
    tokens = tokenizer(*pairs, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    labels = torch.tensor([CLASSES.index(row["gold_label"]) for row in rows])
    return tokens["input_ids"], tokens["attention_mask"], tokens["token_type_ids"], labels


def make_texts(count: int, vocabulary: int = 30, length: int = 12, seed: int = 0) -> Texts:
    """Return made-up texts: random tokens, the first of which says what they are."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, len(CLASSES), (count,), generator=generator)
    ids = torch.randint(len(CLASSES) + 1, vocabulary, (count, length), generator=generator)
    ids[:, 0] = labels + 1
    return ids, torch.ones_like(ids), torch.zeros_like(ids), labels


def make_small_network() -> Any:
    """Return a small BERT of random weights."""
    config = BertConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=16, num_labels=len(CLASSES),
    )  # fmt: skip
    return BertForSequenceClassification(config)


def main(arguments: Sequence[str] | None = None) -> float:
    """Train as the command line says; return the accuracy on public texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path)
    source.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    transformers.logging.set_verbosity_error()
    if options.small:
        model, training, test = make_small_network(), make_texts(1200), make_texts(200, seed=1)
        lot, epochs, rate = 150, 6, 5e-3
    else:
        model = BertForSequenceClassification.from_pretrained("bert-base-cased", num_labels=len(CLASSES))
        tokenizer = BertTokenizer.from_pretrained("bert-base-cased", do_lower_case=False)
        training = read_snli(options.data / "snli_1.0_train.txt", tokenizer)
        test = read_snli(options.data / "snli_1.0_dev.txt", tokenizer)
        lot, epochs, rate = 32, 3, 5e-4
    freeze_lower_layers(model)
    plan = train(model, training, lot, epochs, rate)
    accuracy = measure_accuracy(model, test)
    print(f"accuracy {accuracy:.1%} at epsilon {plan.epsilon:.2f}, delta {plan.delta:.1e}")
    return accuracy


if __name__ == "__main__":
    main()
