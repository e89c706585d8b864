"""Loading and refusing models; prefixes read once."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from terrine.errors import InvalidArgument
from terrine.prompts import LanguageModel, LocalModel, SoftPrompt, Template
from terrine.prompts.template import word_ids

from . import tiny


def test_a_tokenizer_without_padding_is_refused():
    with pytest.raises(InvalidArgument, match=r"no padding token: want one, such as tokenizer\.pad_token"):
        LanguageModel(tiny.model("llama"), tiny.tokenizer(pad=None))


def test_a_model_without_vectors_is_refused():
    class Plain(torch.nn.Module):
        def forward(self, input_ids):
            return input_ids

    with pytest.raises(InvalidArgument, match="Plain takes no inputs_embeds"):
        LanguageModel(Plain(), tiny.tokenizer())


def test_an_encoder_decoder_is_refused():
    config = T5Config(vocab_size=len(tiny.WORDS), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    with pytest.raises(InvalidArgument, match="encoder-decoder"):
        LanguageModel(T5ForConditionalGeneration(config), tiny.tokenizer())


def test_label_words_are_one_token_each():
    language = tiny.language()
    assert word_ids(language, (" good", " bad")) == [tiny.WORDS.index("good"), tiny.WORDS.index("bad")]
    with pytest.raises(InvalidArgument, match=r"several tokens: ' very good' \(2 tokens\)"):
        word_ids(language, (" very good", " bad"))
    with pytest.raises(InvalidArgument, match="same token"):
        word_ids(language, (" good", "good"))


def test_a_prompt_longer_than_the_context_is_refused():
    language = tiny.language(context=12)
    prompt = SoftPrompt.from_vocabulary(language, tiny.CAUSAL, 9)
    with pytest.raises(InvalidArgument, match="of 15 tokens: want at most the model's context of 12"):
        prompt.encoded(language, ["the movie is fun"], [0])
    with pytest.raises(InvalidArgument, match="context of 12"):
        prompt.log_probabilities(language, ["the movie is fun"])
    with pytest.raises(InvalidArgument, match="context of 12"):
        LocalModel(language).log_probabilities("good " * 10, ["the movie :"], tiny.CAUSAL.words)


@pytest.mark.parametrize(
    ("text", "words"), [("no place", ()), ("{text}{text}", ()), ("{text}", ("one",)), ("{text}", ("one", "one"))]
)
def test_templates_that_make_no_sense_are_refused(text, words):
    with pytest.raises(InvalidArgument, match="want"):
        Template(text, words)


def test_masks_belong_to_encoders():
    encoder, causal = tiny.language("bert"), tiny.language()
    with pytest.raises(InvalidArgument, match="for an encoder"):
        SoftPrompt.from_text(encoder, tiny.CAUSAL, "the").log_probabilities(encoder, ["dull"])
    with pytest.raises(InvalidArgument, match="is for encoders"):
        SoftPrompt.from_text(causal, tiny.MASKED, "the").log_probabilities(causal, ["dull"])
    with pytest.raises(InvalidArgument, match="causal language model"):
        LocalModel(encoder)
    with pytest.raises(InvalidArgument, match="reads both ways"):
        encoder.prefix(encoder.embed([1, 2]))


def test_a_template_without_words_tells_no_classes():
    language = tiny.language()
    free = SoftPrompt.from_text(language, Template("{text} :"), "the")
    with pytest.raises(InvalidArgument, match="no label words"):
        free.log_probabilities(language, ["dull"])
    with pytest.raises(InvalidArgument, match="without label words"):
        SoftPrompt.from_text(language, Template("{text} :"), "the", head=True)
    with pytest.raises(InvalidArgument, match="no tokens"):
        free.encoded(language, ["dull"], [""])


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_saved_folder_is_loaded_frozen(tmp_path, kind):
    language = tiny.language(kind, dtype=torch.float32)
    language.model.save_pretrained(tmp_path)
    language.tokenizer.save_pretrained(tmp_path)
    loaded = LanguageModel.load(tmp_path)
    assert type(loaded.model) is type(language.model)
    assert loaded.causal is (kind != "bert")
    assert not loaded.model.training
    assert not any(one.requires_grad for one in loaded.model.parameters())
    assert torch.equal(loaded.table, language.table)


def test_nothing_is_looked_for_elsewhere(tmp_path):
    with pytest.raises(InvalidArgument, match="nothing is downloaded"):
        LanguageModel.load("gpt2")
    with pytest.raises(InvalidArgument, match="not a language model"):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_prefix_read_once_answers_as_if_read_each_time(kind, side):
    language = tiny.language(kind, side)
    questions = [tiny.CAUSAL.question(text) for text in tiny.TEXTS]
    prompt = "the movie is good and "
    once = LocalModel(language).log_probabilities(prompt, questions, tiny.CAUSAL.words)
    again = LocalModel(language, reuse=False).log_probabilities(prompt, questions, tiny.CAUSAL.words)
    words = word_ids(language, tiny.CAUSAL.words)
    for place, question in enumerate(questions):
        ids = torch.tensor([language.tokens(prompt + question)])
        expected = language.model(input_ids=ids).logits[0, -1].log_softmax(0)[words]
        torch.testing.assert_close(torch.from_numpy(once[place]), expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.from_numpy(again[place]), expected, rtol=0, atol=1e-10)


def test_prefixes_stay_until_there_is_no_room():
    language = tiny.language()
    backend, calls = LocalModel(language), []
    language.prefix, real = lambda vectors: calls.append(len(vectors)) or real(vectors), language.prefix
    for prompt in ("good film", "bad film", "good film"):
        backend.log_probabilities(prompt, ["dull :"], (" good", " bad"))
    assert calls == [2, 2]
    small = LocalModel(language, keep=0)
    for _ in range(2):
        small.log_probabilities("good film", ["dull :"], (" good", " bad"))
    assert calls == [2, 2, 2, 2]


def test_transformers_is_imported_only_when_needed():
    code = "import sys, terrine.cli.app; early = 'torch' in sys.modules; import terrine.prompts; "
    code += "sys.exit(early or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_sliding_window_sees_tokens_and_no_padding(side):
    """A window of four tokens: what a text gets does not depend on its company, nor on reading the prompt once."""
    torch.manual_seed(1)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    made = MistralForCausalLM(
        MistralConfig(
            vocab_size=len(tiny.WORDS), num_key_value_heads=1, sliding_window=4, initializer_range=0.5, **shape
        )
    )
    language = LanguageModel(made.double(), tiny.tokenizer(side))
    words, prompt = tiny.CAUSAL.words, "it was a very great story "
    asked = [tiny.CAUSAL.question(text) for text in tiny.TEXTS]
    alone = []
    for one in asked:
        ids = torch.tensor([language.tokens(prompt + one)])
        with torch.no_grad():
            alone.append(made(input_ids=ids).logits[0, -1].log_softmax(0)[word_ids(language, words)].numpy())
    for reuse in (True, False):
        np.testing.assert_allclose(
            LocalModel(language, reuse=reuse).log_probabilities(prompt, asked, words), alone, atol=1e-5
        )


def test_a_model_without_keys_and_values_is_refused():
    made = MambaForCausalLM(MambaConfig(vocab_size=len(tiny.WORDS), hidden_size=8, num_hidden_layers=1, state_size=2))
    backend = LocalModel(LanguageModel(made, tiny.tokenizer()))
    with pytest.raises(InvalidArgument, match="MambaForCausalLM keeps no keys and values"):
        backend.log_probabilities("the", ["fun"], tiny.CAUSAL.words)
