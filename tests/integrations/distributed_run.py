"""One of two processes that train one model, through accelerate or transformers: run by the tests."""

import os

import torch
from torch import nn

from terrine import sgd


def plan():
    return sgd.Plan(examples=12, lot=6, steps=4, clip=0.7, noise=1.0, delta=1e-3, seed=2)


def data():
    generator = torch.Generator().manual_seed(3)
    return 4 * torch.randn(12, 4, generator=generator), torch.randint(0, 3, (12,), generator=generator)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Notes:
    name = "notes"

    def __init__(self):
        self.charges = 0

    def charge(self, event, *, purpose, by):
        self.charges += 1


def accelerated():
    """The parameters after a run, and how often its account was charged."""
    from accelerate import Accelerator

    from terrine.integrations.accelerate import prepare

    torch.set_num_threads(1)
    accelerator, account, model = Accelerator(cpu=True), Notes(), network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, steps = prepare(
        accelerator, model, optimizer, data(), plan(), loss=nn.CrossEntropyLoss(), account=account
    )
    for _ in steps:
        optimizer.step()
    return [one.detach().clone() for one in accelerator.unwrap_model(model).parameters()], account.charges


def transformed(folder):
    """The same of a small language model."""
    import transformers

    from terrine.integrations.huggingface import PrivateTrainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    texts = [{"input_ids": (torch.arange(5) * k % 11).tolist(), "labels": [k % 11] * 5} for k in range(12)]
    args = transformers.TrainingArguments(
        output_dir=f"{folder}/out", use_cpu=True, report_to=[], disable_tqdm=True, save_steps=2,
        optim="sgd", learning_rate=0.1, ddp_backend="gloo" if "RANK" in os.environ else None,
    )  # fmt: skip
    account, model = Notes(), transformers.GPT2LMHeadModel(config)
    PrivateTrainer(model, args, train_dataset=texts, plan=plan(), account=account).train()
    return [one.detach().clone() for one in model.parameters()], account.charges


def process(kind, rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)  # noqa: F821  set by who runs this file
    found = accelerated() if kind == "accelerate" else transformed(folder)
    torch.save(found, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    process(KIND, RANK, FOLDER)  # noqa: F821
