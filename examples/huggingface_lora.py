"""LoRA with transformers' Trainer, privately: each text moves the adapters by a bounded step, under noise.

The model is tiny and has random weights, so that this runs in seconds and downloads nothing; with
`AutoModelForCausalLM.from_pretrained(...)` and a tokenizer, the rest stays as it is.

    python examples/huggingface_lora.py
"""

import logging
import tempfile

import peft
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from terrine import sgd
from terrine.events import Budget
from terrine.integrations.huggingface import PrivateTrainer

ALPHABET = " abcdefghijklmnopqrstuvwxyz"


def texts(count: int) -> list[dict[str, list[int]]]:
    """Made-up notes, of which the first word is given and the rest is to be learnt."""
    made = []
    for index in range(count):
        note = f"note {('cough', 'fever', 'a broken arm', 'no complaint')[index % 4]} today"
        ids = [ALPHABET.index(letter) for letter in note]
        made.append({"input_ids": ids, "labels": [-100] * 5 + ids[5:]})
    return made


def main() -> tuple[float, float]:
    """Fine-tune, and return the loss on public texts before and after."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(ALPHABET),
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", r=8, target_modules=["c_attn", "c_fc"], modules_to_save=["lm_head"], fan_in_fan_out=True
    )
    model = peft.get_peft_model(GPT2LMHeadModel(config), adapters)

    plan = sgd.Plan(examples=512, lot=128, epochs=8, clip=1.0, budget=Budget(epsilon=8.0, delta=1e-4))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, learning_rate=0.02, lr_scheduler_type="constant", report_to=[], use_cpu=True,
            save_strategy="no", logging_steps=8, disable_tqdm=True,
        )  # fmt: skip
        trainer = PrivateTrainer(
            model,
            args,
            train_dataset=texts(512),
            eval_dataset=texts(8),  # made up, so public
            plan=plan,
            length=32,
        )
        before = trainer.evaluate()["eval_loss"]
        output = trainer.train()
        after = trainer.evaluate()["eval_loss"]
    print(f"loss on public texts {before:.2f} before, {after:.2f} after")
    print(f"epsilon {output.metrics['epsilon']:.2f} at delta {output.metrics['delta']}")
    return before, after


if __name__ == "__main__":
    main()
