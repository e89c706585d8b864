"""Models of the transformers library, tiny and with random weights, and peft's adapters: exact, and not one by one."""

from __future__ import annotations

import logging

import pytest
import torch
from oracle import assert_same, loop
from torch import nn

from terrine.sgd import clipped_sum

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

N, LENGTH, WORDS = 4, 7, 37
TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
CAUSAL = {**TEXT, "vocab_size": WORDS, "num_key_value_heads": 1, "max_position_embeddings": 16, "head_dim": 8}
PIXELS = {"num_channels": 3, "image_size": 8, "patch_size": 2}


def gpt2(**others):
    config = transformers.GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=2, n_head=2, **others)
    return transformers.GPT2LMHeadModel(config)


TEXTS = {
    "GPT-2": gpt2,
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**CAUSAL)),
    "Qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**CAUSAL, tie_word_embeddings=True)),
    "Gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**CAUSAL)),
    "BERT": lambda: transformers.BertForSequenceClassification(
        transformers.BertConfig(**TEXT, vocab_size=WORDS, max_position_embeddings=16, num_labels=3)
    ),
    "Mamba": lambda: transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, state_size=4)
    ),
    "LoRA": lambda: peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)),
    "DoRA": lambda: peft.get_peft_model(
        gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)
    ),
    "IA3": lambda: peft.get_peft_model(
        gpt2(), peft.IA3Config(target_modules=["c_attn", "c_fc"], feedforward_modules=["c_fc"], fan_in_fan_out=True)
    ),
}
IMAGES = {
    "ViT": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**TEXT, **PIXELS)),
    "ConvNeXt": lambda: transformers.ConvNextForImageClassification(
        transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2, image_size=8)
    ),
    "Swin": lambda: transformers.SwinForImageClassification(
        transformers.SwinConfig(**PIXELS, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=2)
    ),
}


def loss_of_logits(model, batch):
    x, y = batch
    flat = model(x).logits.flatten(1)
    weights = torch.linspace(-1, 1, flat.shape[1], dtype=flat.dtype)
    return (flat * weights).sum(1).tanh() * (1 + y) + flat.square().mean(1)


def check(model, loss, batch, caplog):
    """As one by one in float64, and not the slow way."""
    with caplog.at_level(logging.WARNING, "terrine.sgd"):
        found = clipped_sum(model, loss, batch, clip=0.3)
    assert not [record for record in caplog.records if record.name == "terrine.sgd"], "took the slow way"
    assert_same(found, loop(model, loss, batch, 0.3), 1e-8)


def check_logits(model, x, caplog):
    torch.manual_seed(1)
    for parameter in model.parameters():  # some begin at zero, where nothing can go wrong
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    check(model.double().eval(), loss_of_logits, (x, torch.linspace(0, 1, N).double()), caplog)


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name, caplog):
    torch.manual_seed(0)
    check_logits(TEXTS[name](), torch.randint(WORDS, (N, LENGTH)), caplog)


@pytest.mark.parametrize("name", IMAGES)
def test_images(name, caplog):
    torch.manual_seed(0)
    check_logits(IMAGES[name](), torch.randn(N, 3, 8, 8).double(), caplog)


def t5():
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def without_dropout(model):
    """Gradient checkpointing is for training, where dropout would draw."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.gradient_checkpointing_enable()
    return model.train()


LOSSES = {
    "GPT-2": lambda: gpt2().eval(),
    "GPT-2, checkpointed": lambda: without_dropout(gpt2()),
    "Llama": lambda: TEXTS["Llama"]().eval(),
    "Llama, checkpointed": lambda: without_dropout(TEXTS["Llama"]()),
    "BERT": lambda: TEXTS["BERT"]().eval(),
    "T5": lambda: t5().eval(),
    "LoRA": lambda: TEXTS["LoRA"]().eval(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_models_own_loss(name, caplog):
    """Texts of different lengths behind a mask, labels of -100: every example's own mean, and not the slow way."""
    torch.manual_seed(0)
    model = LOSSES[name]().double()
    ids, mask = torch.randint(WORDS, (N, LENGTH)), torch.ones(N, LENGTH, dtype=torch.long)
    mask[0, 4:], mask[2, 5:] = 0, 0
    labels = torch.tensor([0, 1, 2, 1]) if name == "BERT" else ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    check(model, lambda model, batch: model(**batch).loss, batch, caplog)
