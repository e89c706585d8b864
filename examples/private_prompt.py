"""Both private prompts on a tiny random model, in seconds; with a folder or .gguf file as argument, on a real one."""

import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from terrine import pate, prompts, sgd
from terrine.events import Budget
from terrine.prompts.voting import confident, record
from terrine.rounding import up

GOOD = ["a moving film", "great fun", "the best story of the year", "funny and warm", "a great cast", "I loved it"]
BAD = ["a dull film", "no fun at all", "the worst story of the year", "long and cold", "a poor cast", "I hated it"]


def tiny() -> prompts.LanguageModel:
    """A random model that knows the words above, one token each."""
    words = [
        "[PAD]",
        "[UNK]",
        "negative",
        "positive",
        "Mood:",
        *sorted({w for text in GOOD + BAD for w in text.split()}),
    ]
    tokens = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(words), initializer_range=0.4, **shape)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="[PAD]", unk_token="[UNK]")
    return prompts.LanguageModel(LlamaForCausalLM(config), tokenizer)


def main() -> None:
    language = prompts.LanguageModel.load(sys.argv[1]) if len(sys.argv) > 1 else tiny()
    texts, labels = (GOOD + BAD) * 20, ([1] * len(GOOD) + [0] * len(BAD)) * 20
    template = prompts.Template("{text} Mood:", (" negative", " positive"), separator=" ")

    # A soft prompt by DP-SGD: what leaves is the prompt, and it says what it cost.
    plan = sgd.Plan(examples=len(texts), lot=80, steps=20, clip=1.0, budget=Budget(epsilon=8.0, delta=1e-3))
    start = prompts.SoftPrompt.from_text(language, template, "the story of", head=True, calibrated=True)
    tuned = prompts.tune(language, start, texts, labels, plan, learning_rate=0.3)
    tuned.save(Path(tempfile.gettempdir()) / "prompt.safetensors")
    public = ["great story", "dull story", "warm and funny", "cold and long", "I loved the cast", "worst film"]
    right = (tuned.predict(language, public) == [1, 0, 1, 0, 1, 0]).sum()
    print(f"soft prompt: epsilon {up(tuned.privacy['epsilon'], 4)}, {right} of {len(public)} public texts right")

    # A discrete prompt by PATE: forty prompts of private texts vote on public ones, noise hides one vote.
    backend = prompts.LocalModel(language)
    deal = pate.split(len(texts), 40, seed=0)
    votes = prompts.vote(backend, template, list(zip(texts, labels, strict=True)), deal, public, shots=4)
    rule = confident(Budget(epsilon=2.0, delta=1e-3), teachers=40, queries=len(public), agreement=0.4)
    bought = rule.answer(votes)
    print(f"labels: {bought.labels.tolist()} (-1: the teachers did not agree), noise {rule.noise:.1f} votes")
    if len(bought.answered) >= 2:
        student = prompts.choose(backend, template, public, bought.labels, shots=2, privacy=record(bought, 1e-3))
        print(f"student shows {len(student.demonstrations)} public texts, epsilon {up(student.privacy['epsilon'], 4)}")


if __name__ == "__main__":
    main()
