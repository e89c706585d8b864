"""PrivateTrainer: the plan's lots, losses of one example, checkpoints that go on, and logs that are public."""

import math
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

from terrine import sgd
from terrine.errors import BudgetExceeded, InvalidArgument, OutOfOrder

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from transformers import TrainerCallback, TrainingArguments  # noqa: E402

from terrine.integrations.huggingface import PrivateTrainer  # noqa: E402

WORDS, LENGTH = 37, 8


def plan(**others):
    given = {"examples": 24, "lot": 6, "steps": 6, "clip": 0.3, "noise": 1.0, "delta": 1e-3, "seed": 5} | others
    return sgd.Plan(**given)


def gpt2(dropout=0.0):
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, loss_type="ForCausalLM",
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def bert():
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def texts(count=24):
    """Texts of 3 to 8 tokens, the first of which are no labels."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for index in range(count):
        ids = torch.randint(1, WORDS, (3 + index % 6,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": [-100, *ids[1:]], "note": "not for the model"})
    return made


def arguments(folder, **others):
    given = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no", "learning_rate": 0.05}
    return TrainingArguments(output_dir=str(folder), **(given | others))


def trainer(folder, model=None, *, kind=PrivateTrainer, data=None, run=None, account=None, length=LENGTH, **others):
    own = {name: others.pop(name) for name in list(others) if name in OWN}
    return kind(
        gpt2() if model is None else model,
        arguments(folder, **others),
        train_dataset=texts() if data is None else data,
        plan=run or plan(),
        account=account,
        length=length,
        **own,
    )


OWN = {"callbacks", "eval_dataset", "compute_loss_func", "optimizers", "data_collator", "memory"}


class Peeking(PrivateTrainer):
    """Keeps every lot and its clipped sums, as nobody else could."""

    def _begin(self):
        steps = super()._begin()
        self.peeked, add_part = [], steps._add_part

        def add(batch, part):
            add_part(batch, part)
            self.peeked.append((batch, {name: one.clone() for name, one in steps.release.sums.items()}))

        steps._add_part = add
        return steps


def loop(model, batch, clip, loss):
    """The clipped sum of a lot, one example after the other."""
    named = {name: one for name, one in model.named_parameters() if one.requires_grad}
    total = {name: torch.zeros_like(one) for name, one in named.items()}
    for index in range(len(batch["input_ids"])):
        one = {name: rows[index : index + 1] for name, rows in batch.items()}
        found = torch.autograd.grad(loss(model, one), list(named.values()), allow_unused=True)
        found = [torch.zeros_like(p) if g is None else g for g, p in zip(found, named.values(), strict=True)]
        norm = torch.sqrt(sum((g**2).sum() for g in found))
        for name, gradient in zip(named, found, strict=True):
            total[name] += min(1.0, clip / float(norm)) * gradient
    return total


def own_loss(model, batch):
    return model(**batch).loss


def adapted(config):
    model = peft.get_peft_model(gpt2(), config)
    for parameter in model.parameters():  # some begin at zero, where nothing can go wrong
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


MODELS = {
    "GPT-2": gpt2,
    "LoRA": lambda: adapted(
        peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    ),
    "DoRA": lambda: adapted(
        peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)
    ),
    "prompt tuning": lambda: adapted(peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
    "prefix tuning": lambda: adapted(peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
    "BERT": bert,
}


@pytest.mark.parametrize(("name", "clip"), [*((name, 0.3) for name in MODELS), ("GPT-2", 1e3), ("prompt tuning", 1e3)])
def test_a_step_is_the_clipped_sum_of_every_examples_own_loss(name, clip, tmp_path):
    """Texts of different lengths, padding, labels of -100: each example's mean over its own tokens, in float64."""
    model, data = MODELS[name]().double(), texts()
    if name == "BERT":
        data = [{"input_ids": one["input_ids"], "label": index % 3} for index, one in enumerate(data)]
    found = trainer(tmp_path, model, kind=Peeking, data=data, run=plan(steps=1, lot=12, clip=clip))
    before = {name: one.detach().clone() for name, one in model.named_parameters()}
    found.train()
    ((batch, sums),) = found.peeked
    after = {name: one.detach().clone() for name, one in model.named_parameters()}
    model.load_state_dict({**model.state_dict(), **before}, strict=False)
    expected = loop(model, batch, clip, own_loss)
    assert len(batch["input_ids"]) > 2
    assert sums.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(sums[key], value, rtol=1e-8, atol=1e-10)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    moved = {name for name, one in after.items() if not torch.equal(one, before[name])}
    assert moved == trained


def test_no_examples_loss_is_divided_by_anothers_tokens(tmp_path):
    """The Trainer's own loss is divided by the tokens of the whole batch, which is other people's data.

    The bound is so large that nothing is clipped: two runs differ by the one example in which their data differ.
    """
    ends = [{"input_ids": [3] * 8, "labels": [3] * 8}, {"input_ids": [3] * 4, "labels": [-100, -100, -100, 3]}]
    run = plan(steps=1, lot=24, clip=1e6, sampling=sgd.FixedSize())
    model, found = gpt2().double(), []
    for name, end in zip(("long", "short"), ends, strict=True):
        one = trainer(tmp_path / name, gpt2().double(), kind=Peeking, data=[*texts()[:-1], end], run=run)
        one.train()
        found.append(one.peeked[0])
    lots = [{name: rows[batch["labels"].ne(-100).sum(1) == many] for name, rows in batch.items()}
            for (batch, _), many in zip(found, (8, 1), strict=True)]  # fmt: skip
    alone = [loop(model, lot, 1e6, own_loss) for lot in lots]
    for name in alone[0]:
        expected, difference = alone[0][name] - alone[1][name], found[0][1][name] - found[1][1][name]
        torch.testing.assert_close(difference, expected, rtol=1e-7, atol=1e-9)


def test_label_smoothing_and_neftune_are_each_examples_own(tmp_path):
    """Also where two examples together, of different lengths, would have another mean than that of each."""
    model = gpt2().double()
    for parameter in model.parameters():
        parameter.data.mul_(20)  # losses far from each other
    found = trainer(tmp_path, model, kind=Peeking, run=plan(steps=1, lot=12), label_smoothing_factor=0.1)
    before = {name: one.detach().clone() for name, one in found.model.named_parameters()}
    found.train()
    ((batch, sums),) = found.peeked
    found.model.load_state_dict({**found.model.state_dict(), **before}, strict=False)
    smoothed = lambda model, one: found.compute_loss(model, dict(one))  # noqa: E731
    for key, value in loop(found.model, batch, 0.3, smoothed).items():
        torch.testing.assert_close(sums[key], value, rtol=1e-8, atol=1e-10)
    noisy = trainer(tmp_path / "neftune", neftune_noise_alpha=5.0, run=plan(steps=2))
    assert noisy.train().global_step == 2


def test_a_loss_of_ones_own_sees_one_example(tmp_path):
    seen = set()

    class Own(PrivateTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            seen.add((len(inputs["input_ids"]), num_items_in_batch))
            outputs = model(**inputs)
            return outputs.logits.mean() * outputs.logits.shape[0]

    Own(gpt2(), arguments(tmp_path), train_dataset=texts(), plan=plan(steps=2), length=LENGTH).train()
    assert seen == {(1, None)}


def test_the_account_is_charged_once_and_before_the_first_lot(tmp_path, account):
    looked = []

    class Data(list):
        def __getitem__(self, index):
            looked.append(len(account.charges))
            return super().__getitem__(index)

    found = trainer(tmp_path, data=Data(texts()), account=account)
    looked.clear()
    found.train()
    assert account.charges == [plan().event]
    assert looked.count(0) <= 10  # a few examples before, for their format
    assert set(looked) == {0, 1}


def test_a_run_that_is_refused_trains_nothing(tmp_path):
    class Empty:
        def charge(self, event, *, purpose, by):
            raise BudgetExceeded("nothing left")

    model = gpt2()
    before = [one.clone() for one in model.parameters()]
    with pytest.raises(BudgetExceeded):
        trainer(tmp_path, model, account=Empty()).train()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_logs_hold_epsilon_and_nothing_private(tmp_path):
    evaluated = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 3
    found = trainer(tmp_path, logging_steps=1, eval_strategy="epoch", eval_dataset=evaluated, save_strategy="epoch")
    output = found.train()
    history = found.state.log_history
    assert [one["epsilon_so_far"] for one in history if "learning_rate" in one] == [
        plan().epsilon_after(step) for step in range(1, 7)
    ]
    allowed = {"epsilon_so_far", "grad_norm", "learning_rate", "epoch", "step"}  # the norm is that after the noise
    assert all(name in allowed or name.startswith("eval_") for one in history for name in one)
    assert [one["epoch"] for one in history if "eval_loss" in one] == [1.0, 1.5]
    assert math.isnan(output.training_loss)
    assert output.metrics == {"epsilon": plan().epsilon, "delta": 1e-3}
    assert found.state.total_flos == 0
    files = ["_private_run.pt", "_private_run.pt.count", "checkpoint-4", "checkpoint-6"]
    assert sorted(one.name for one in tmp_path.iterdir()) == files
    assert "loss" not in (tmp_path / "checkpoint-6" / "trainer_state.json").read_text().replace("eval_loss", "")


def test_the_progress_bar_shows_epsilon(tmp_path, capsys):
    trainer(tmp_path, disable_tqdm=False).train()
    assert "epsilon <= " in capsys.readouterr().err


class Stop(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step >= self.at


@pytest.mark.parametrize("through", [True, "checkpoint-4"])
def test_a_stopped_run_goes_on_where_it_was(through, tmp_path):
    """With momentum and a schedule: a seeded run ends in the model that it would have had."""
    given = {"save_strategy": "steps", "save_steps": 2, "warmup_steps": 2, "run": plan(steps=7), "optim": "sgd"}
    cut = tmp_path / "cut"
    trainer(cut, callbacks=[Stop(4)], **given).train()
    resumed = trainer(cut, **given)
    resumed.train(resume_from_checkpoint=True if through is True else str(cut / through))
    whole = trainer(tmp_path / "whole", **given)
    whole.train()
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3)  # grid steps of the noisy sums
    assert resumed.state.epoch == whole.state.epoch == 7 / 4
    assert resumed.state.global_step == 7
    assert resumed._loader.steps.number == 7


def test_a_run_that_was_cut_off_goes_on_after_what_it_released(tmp_path, account):
    """Two steps were released after the last checkpoint: they are spent, and the newest model goes on."""

    class Crash(TrainerCallback):
        def __init__(self, at):
            self.at = at

        def on_step_end(self, args, state, control, **_):
            if state.global_step == self.at:
                raise KeyboardInterrupt

    given = {"save_strategy": "steps", "save_steps": 3, "account": account, "run": plan(seed=None, steps=9)}
    for at in (2, 5):  # before the first checkpoint, and after it
        with pytest.raises(KeyboardInterrupt):
            trainer(tmp_path, callbacks=[Crash(at)], **given).train(resume_from_checkpoint=at > 2)
    last = Stepped()
    found = trainer(tmp_path, callbacks=[last], **given)
    found.train(resume_from_checkpoint=True)
    assert last.steps == [6, 7, 8, 9]
    assert found.state.epoch == 9 / 4
    assert len(account.charges) == 1


class Stepped(TrainerCallback):
    def __init__(self):
        self.steps = []

    def on_step_end(self, args, state, control, **_):
        self.steps.append(state.global_step)


def test_a_folder_that_cannot_be_gone_on_from_is_refused(tmp_path):
    given = {"save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path, callbacks=[Stop(4)], **given).train()
    with pytest.raises(OutOfOrder, match="unfinished private run"):
        trainer(tmp_path, **given).train()
    with pytest.raises(InvalidArgument, match="another plan"):
        trainer(tmp_path, run=plan(noise=2.0), **given).train(resume_from_checkpoint=True)
    kept = tmp_path / "_private_run.pt"
    content = {name: (tmp_path / name).read_bytes() for name in ("_private_run.pt", "_private_run.pt.count")}
    other = tmp_path / "other"
    trainer(other, callbacks=[Stop(2)], **given).train()
    for name in content:
        (tmp_path / name).write_bytes((other / name).read_bytes())
    with pytest.raises(OutOfOrder, match="has seen 4 steps, and the private run has counted 2"):
        trainer(tmp_path, **given).train(resume_from_checkpoint=True)
    kept.unlink()
    with pytest.raises(InvalidArgument, match="is missing"):
        trainer(tmp_path, **given).train(resume_from_checkpoint=True)
    kept.write_bytes(b"else")
    with pytest.raises(InvalidArgument, match="not a private run"):
        trainer(tmp_path, **given).train()


def test_a_folder_of_a_finished_run_can_be_used_again(tmp_path, account):
    for _ in range(2):
        trainer(tmp_path, save_strategy="steps", save_steps=3, account=account).train()
    assert len(account.charges) == 2


def test_a_killed_run_goes_on_in_another_process(tmp_path):
    """Killed two steps after a checkpoint: those are spent, and no step is released twice."""
    program = Path(__file__).with_name("killed_trainer.py")

    def run(*given):
        command = [sys.executable, str(program), str(tmp_path), *given]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert run("kill").returncode == 9
    resumed = run("resume")
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.splitlines()[-1] == "steps 7 8 9"


@pytest.mark.parametrize("rule", [sgd.Adaptive(quantile=0.5), sgd.Automatic(1.0), "per layer"], ids=str)
def test_other_clipping_rules(rule, tmp_path):
    model = bert()
    data = [{"input_ids": one["input_ids"], "label": index % 3} for index, one in enumerate(texts())]
    if rule == "per layer":
        rule = sgd.PerLayer({name: 0.1 for name, _ in model.named_parameters()})
    assert trainer(tmp_path, model, data=data, run=plan(clip=rule, steps=3)).train().global_step == 3


REFUSED = {
    "gradient_accumulation_steps": 2,
    "fp16": True,
    "auto_find_batch_size": True,
    "torch_compile": True,
    "use_liger_kernel": True,
    "dataloader_drop_last": True,
    "train_sampling_strategy": "group_by_length",
    "group_by_length": True,
    "include_num_input_tokens_seen": "all",
    "skip_memory_metrics": False,
    "torch_empty_cache_steps": 1,
    "max_steps": 7,
    "num_train_epochs": 5,
    "per_device_train_batch_size": 16,
    "max_grad_norm": 0.5,
    "optim": "galore_adamw_layerwise",
    "bf16_full_eval": True,
    "optim_target_modules": "all-linear",
    "enable_jit_checkpoint": True,
    "accelerator_config": {"split_batches": True},
    "debug": "underflow_overflow",
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_contradict_the_plan_are_refused_by_name(name, tmp_path):
    if name not in {one.name for one in fields(TrainingArguments)}:
        pytest.skip("this version of transformers has none")
    with pytest.raises(InvalidArgument, match=name):
        trainer(tmp_path, **{name: REFUSED[name]})


def test_all_wrong_arguments_are_in_one_error(tmp_path):
    with pytest.raises(InvalidArgument, match=r"max_steps=7.*gradient_accumulation_steps=2: 16; want the plan's lot=6"):
        trainer(tmp_path, max_steps=7, gradient_accumulation_steps=2)


def test_accumulated_batches_are_microbatches_of_one_lot(tmp_path):
    """Three times two examples for a lot of six: one step, with the same clipped sum as in one piece."""
    sums = []
    for name, given in (("parts", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}), ("whole", {})):
        found = trainer(tmp_path / name, gpt2().double(), kind=Peeking, run=plan(steps=2), **given)
        assert found.train().global_step == 2
        sums.append(found.peeked[0][1])
    for name, value in sums[0].items():
        torch.testing.assert_close(value, sums[1][name], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("given", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpointing"])
def test_bfloat16_is_for_the_loss_alone(given, tmp_path):
    """Losses differ from float32, sums are of single precision, and no longer than the bound allows."""
    seen = set()

    class Typed(Peeking):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            seen.add(torch.is_autocast_enabled("cpu"))
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    found = trainer(tmp_path, kind=Typed, run=plan(steps=1, lot=24, sampling=sgd.FixedSize()), bf16=True, **given)
    found.train()
    ((batch, sums),) = found.peeked
    assert seen == {True}
    assert {value.dtype for value in sums.values()} == {torch.float32}
    expected = loop(gpt2(), batch, 0.3, own_loss)
    flat, wanted = (torch.cat([one.flatten() for one in each.values()]) for each in (sums, expected))
    assert 1e-6 < float((flat - wanted).norm() / wanted.norm()) < 0.1


def test_gradient_checkpointing_gives_the_same_sums(tmp_path):
    sums = []
    for name, given in (("with", {"gradient_checkpointing": True}), ("without", {})):
        found = trainer(tmp_path / name, gpt2().double(), kind=Peeking, run=plan(steps=1), **given)
        found.train()
        sums.append(found.peeked[0][1])
    for name, value in sums[0].items():
        torch.testing.assert_close(value, sums[1][name], rtol=1e-8, atol=1e-12)


def test_a_metric_that_the_plan_buys_is_logged(tmp_path):
    found = trainer(tmp_path, logging_steps=1, run=plan(metrics=(sgd.Metric(),), steps=3))
    found.train()
    losses = [one["loss"] for one in found.state.log_history if "loss" in one]
    assert len(losses) == 3
    assert losses[-1] == found._loader.last.metrics["loss"]


def test_a_trained_model_is_saved_as_any_other(tmp_path):
    found = trainer(tmp_path, run=plan(steps=2))
    found.train()
    found.save_model(str(tmp_path / "kept"))
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "kept")
    for a, b in zip(found.model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)


def test_several_devices_in_one_process_are_refused(tmp_path):
    class Two(TrainingArguments):
        n_gpu = 2

    with pytest.raises(InvalidArgument, match="n_gpu=2: DataParallel"):
        PrivateTrainer(gpt2(), Two(output_dir=str(tmp_path), use_cpu=True), train_dataset=texts(), plan=plan())


def test_an_unknown_argument_is_refused(tmp_path):
    """As a later version of the library may bring one."""
    from dataclasses import dataclass

    @dataclass
    class Later(TrainingArguments):
        share_gradients: bool = False

    args = Later(output_dir=str(tmp_path), use_cpu=True, share_gradients=True)
    with pytest.raises(InvalidArgument, match="share_gradients=True: not known"):
        PrivateTrainer(gpt2(), args, train_dataset=texts(), plan=plan())


def test_arguments_that_agree_with_the_plan_are_taken(tmp_path):
    found = trainer(
        tmp_path, max_steps=6, per_device_train_batch_size=6, max_grad_norm=0.0, optim="sgd",
        gradient_checkpointing=True, lr_scheduler_type="cosine", weight_decay=0.01, dataloader_num_workers=0,
    )  # fmt: skip
    assert found.train().global_step == 6
    assert trainer(tmp_path, num_train_epochs=1.5).args.max_steps == 6
    workers = trainer(tmp_path, run=plan(steps=2), dataloader_num_workers=1, optimizers=(None, None), memory=1e6)
    assert workers.train().global_step == 2


def test_collators_that_pad_to_the_longest_are_refused_before_the_charge(tmp_path, account):
    class Tokens:
        def pad(self, *_args, **_others):
            raise AssertionError

    with pytest.raises(InvalidArgument, match=r"DataCollatorWithPadding.*want length="):
        trainer(tmp_path, data_collator=transformers.DataCollatorWithPadding(Tokens()), length=None, account=account)
    assert not account.charges


def test_texts_without_a_public_length_are_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="padded to a public length"):
        trainer(tmp_path, length=None).train()


def test_examples_that_are_no_dictionaries_are_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="dictionaries"):
        trainer(tmp_path, data=(torch.zeros(24, 3), torch.zeros(24)))


def test_batch_norm_is_refused_before_the_charge(tmp_path, account):
    model = gpt2()
    model.norm = nn.BatchNorm1d(3)
    with pytest.raises(InvalidArgument, match="BatchNorm"):
        trainer(tmp_path, model, account=account)
    assert not account.charges
