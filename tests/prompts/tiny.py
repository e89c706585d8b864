"""Tiny random transformers and a tokenizer of some words, built here: nothing is downloaded."""

import logging

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from terrine.prompts import LanguageModel, Template
from terrine.prompts.tuning import PromptClipper

logging.getLogger("transformers").setLevel(logging.ERROR)

WORDS = [
    "[PAD]",
    "[UNK]",
    "[MASK]",
    "[CLS]",
    "[SEP]",
    "<s>",
    "good",
    "bad",
    "fine",
    "the",
    "movie",
    "film",
    "is",
    "was",
]
WORDS += ["it", "a", "fun", "dull", "story", "of", "and", "not", "very", "great", "awful", "long", "short", "Mood", ":"]
WORDS += ["N/A", "...", "review"]
TEXTS = [
    "the movie is fun",
    "dull",
    "it was a very great story of fun and fun",
    "not a good film",
    "awful",
    "long and dull",
]
LABELS = [0, 1, 0, 1, 1, 1]
CAUSAL = Template("{text} Mood :", (" good", " bad"))
MASKED = Template("{text} Mood : {mask}", (" good", " bad"))


def tokenizer(side="right", *, special="", pad="[PAD]"):
    """Words by white space; `special` puts <s>, or [CLS] and [SEP], around a text."""
    numbers = {word: place for place, word in enumerate(WORDS)}
    made = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        used = [(word, numbers[word]) for word in special.split() if word != "$A"]
        made.post_processor = processors.TemplateProcessing(single=special, special_tokens=used)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, unk_token="[UNK]", mask_token="[MASK]", padding_side=side
    )


def model(kind, *, context=64):
    torch.manual_seed(7)
    sizes = {"vocab_size": len(WORDS), "bos_token_id": 5, "eos_token_id": 4}
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**sizes, n_embd=16, n_layer=2, n_head=2, n_positions=context))
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if kind == "bert":
        return BertForMaskedLM(BertConfig(**sizes, **shape, max_position_embeddings=context))
    return LlamaForCausalLM(LlamaConfig(**sizes, **shape, num_key_value_heads=1, max_position_embeddings=context))


def language(kind="llama", side="right", *, dtype=torch.float64, context=64, special=None):
    """A tiny model with larger weights than usual, so that what it says depends on what it reads."""
    made = model(kind, context=context)
    with torch.no_grad():
        for one in made.parameters():
            if one.dim() > 1:
                one.mul_(8.0)
    around = ("[CLS] $A [SEP]" if kind == "bert" else "") if special is None else special
    return LanguageModel(made.to(dtype), tokenizer(side, special=around))


def template(kind):
    return MASKED if kind == "bert" else CAUSAL


def clipped_sum(language, prompt, lot, *, clip, memory=1 << 30):
    """The clipped sum of a lot's gradients, as a run adds it up."""
    return PromptClipper(language, prompt, memory=memory).add_up(tuple(lot), clip)
