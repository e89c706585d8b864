"""The LoRA part of Opacus' text tutorial in Terrine: low-rank adapters by peft, everything else of BERT frozen.

    python examples/opacus/lora.py --data snli_1.0      # the folder of SNLI; fetches bert-base-cased from its hub
    python examples/opacus/lora.py --small              # made-up token ids, a small network of random weights: seconds

Texts, loss and training are those of `bert.py`: adapters are parameters as any other, and cost what they cost.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from bert import CLASSES, make_small_network, make_texts, measure_accuracy, read_snli, train
from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertForSequenceClassification, BertTokenizer


def add_adapters(model: Any, rank: int) -> Any:
    """Return the model with adapters beside its attention; they and the classifier are what is trained."""
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=rank, lora_alpha=rank, lora_dropout=0.05)
    return get_peft_model(model, config)


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
        rank, lot, epochs, rate = 4, 150, 6, 1e-2
    else:
        model = BertForSequenceClassification.from_pretrained("bert-base-cased", num_labels=len(CLASSES))
        tokenizer = BertTokenizer.from_pretrained("bert-base-cased", do_lower_case=False)
        training = read_snli(options.data / "snli_1.0_train.txt", tokenizer)
        test = read_snli(options.data / "snli_1.0_dev.txt", tokenizer)
        rank, lot, epochs, rate = 32, 32, 3, 5e-4
    model = add_adapters(model, rank)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    plan = train(model, training, lot, epochs, rate)
    accuracy = measure_accuracy(model, test)
    print(f"accuracy {accuracy:.1%} with {trained:,} trained numbers at epsilon {plan.epsilon:.2f}")
    return accuracy


if __name__ == "__main__":
    main()
