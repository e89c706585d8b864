"""The benchmark's shortcut is exact: texts read once, then the template behind them, is peft's activated LoRA."""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path

import pytest
import torch

from terrine.sgd import Flat

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("finetune")
    monkeypatch.setattr(module, "FIRST", 1)
    monkeypatch.setattr(module, "LAYERS", 3)
    yield module
    sys.modules.pop("finetune", None)


@pytest.fixture
def language(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "prompts"))
    from tiny import WORDS, tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    from terrine.prompts import LanguageModel

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(**shape, vocab_size=len(WORDS), num_key_value_heads=2, initializer_range=0.3)
    return LanguageModel(LlamaForCausalLM(config), tokenizer())


@pytest.fixture
def texts(bench, language, tmp_path):
    lines = ["1 the movie is fun", "0 dull", "1 it was a very great story of fun and fun and fun", "0 not a good film"]
    for part in ("train", "dev", "test"):
        (tmp_path / f"sst2.{part}.txt").write_text("\n".join(lines * 2) + "\n")
    return bench.Texts(bench.TASKS["sst2"], language, tmp_path, tmp_path)


def adapted(bench, language, texts):
    model = bench.Classifier(language, texts, bench.SETTINGS["sst2"])
    for name, one in model.named_parameters():
        if one.requires_grad:
            torch.nn.init.normal_(one, std=0.5 if "lora" in name else 1.0)
    return model


def test_without_adapters_it_is_the_frozen_model(bench, language, texts):
    model = bench.Classifier(language, texts, bench.SETTINGS["sst2"])
    with torch.no_grad():
        for which, given in texts.batches(texts.test):
            torch.testing.assert_close(model.read(*given), texts.last[texts.test[which]], rtol=0.0, atol=2e-2)


def test_it_is_pefts_activated_lora(bench, language, texts):
    settings = bench.SETTINGS["sst2"]
    config = peft.LoraConfig(
        r=settings.rank, lora_alpha=16, target_modules=list(settings.targets), layers_to_transform=[1, 2],
        task_type="CAUSAL_LM", alora_invocation_tokens=texts.template,
    )  # fmt: skip
    other = peft.get_peft_model(copy.deepcopy(language.model), config).eval()
    model = adapted(bench, language, texts)
    weights = {name: one for name, one in language.model.state_dict().items() if "lora" in name}
    own = other.get_base_model().state_dict()
    assert weights.keys() == {name for name in own if "lora" in name}
    other.get_base_model().load_state_dict(own | weights)
    before = language.beginning + language.tokens(texts.task.instruction)
    words = language.tokens("the movie is fun")
    with torch.no_grad():
        ids = torch.tensor([before + words + texts.template])
        whole = other(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
        ((_, given),) = texts.batches(texts.test[:1])
        torch.testing.assert_close(model.read(*given)[0], whole, rtol=0.0, atol=2e-2)
        assert (whole - texts.last[texts.test[0]]).abs().max() > 0.1  # the adapters do something


def test_one_clipped_sum_whatever_the_padding(bench, language, texts, caplog):
    model = adapted(bench, language, texts)
    clipper = bench.TextClipper(model, texts)
    found, *alone = (clipper.add_up((places,), Flat(0.3)) for places in (texts.private, *texts.private.split(1)))
    assert len(list(texts.batches(texts.private))) == 2
    assert "one example at a time" not in caplog.text
    for name, total in found.sums.items():
        torch.testing.assert_close(sum(one.sums[name] for one in alone), total, rtol=1e-3, atol=1e-4)
    assert all(float(one.norms) > 0 for one in alone)


def test_the_budget_pays_for_the_head_and_for_the_adapters(bench):
    first, whole = bench.planned(5000, bench.SETTINGS["sst2"], 3.0, 0)
    assert whole.epsilon <= 3.0
    assert whole.preparation == (first.event,)
    assert first.seed != whole.seed
