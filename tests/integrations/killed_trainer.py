"""A run of PrivateTrainer in a process of its own: up to a kill, or on from there, printing its steps."""

import os
import sys

import torch
import transformers

from terrine import sgd
from terrine.integrations.huggingface import PrivateTrainer


class Steps(transformers.TrainerCallback):
    """Which steps were taken."""

    def __init__(self):
        self.taken = []

    def on_step_end(self, args, state, control, **_):
        self.taken.append(state.global_step)


class Kill(transformers.TrainerCallback):
    """As the system would: nothing is cleaned up."""

    def on_step_end(self, args, state, control, **_):
        if state.global_step == 6:
            os._exit(9)


def main(folder, how):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)  # with dropout
    texts = [{"input_ids": (torch.arange(5) * k % 11).tolist(), "labels": [k % 11] * 5} for k in range(12)]
    plan = sgd.Plan(examples=12, lot=6, steps=9, clip=0.7, noise=1.0, delta=1e-3, seed=4)
    args = transformers.TrainingArguments(
        output_dir=folder, use_cpu=True, report_to=[], disable_tqdm=True, save_steps=4, learning_rate=0.05
    )  # fmt: skip
    steps = Steps()
    callbacks = [Kill()] if how == "kill" else [steps]
    trainer = PrivateTrainer(model, args, train_dataset=texts, plan=plan, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=how == "resume")
    print("steps", *steps.taken)


if __name__ == "__main__":
    main(*sys.argv[1:])
