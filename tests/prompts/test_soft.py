"""Soft prompts: the gradient of one's own copy is one's own gradient; padding changes nothing; files come back."""

import itertools
import json

import numpy as np
import pytest
import torch
from torch.nn import functional

from terrine.errors import InvalidArgument
from terrine.prompts import SoftPrompt, Template
from terrine.prompts.batches import by_length, tokens_in_memory
from terrine.prompts.tuning import per_example_gradients

from . import tiny

KINDS = list(itertools.product(["llama", "gpt2", "bert"], ["left", "right"]))
each_model = pytest.mark.parametrize(("kind", "side"), KINDS, ids=["-".join(one) for one in KINDS])


def started(language, kind="llama", **options):
    return SoftPrompt.from_text(language, tiny.template(kind), "the movie review is", **options).double()


def obvious_loss(language, prompt, template, text, label):
    """One example by itself, no padding, no hooks, the whole output layer."""
    tokenizer = language.tokenizer
    asked = template.question(text).replace("{mask}", "[MASK]")
    ids = tokenizer(asked, add_special_tokens=False)["input_ids"]
    at = ids.index(tokenizer.mask_token_id) - len(ids) if not language.causal else -1
    ids, at = (ids, at) if language.causal else ([*ids, tokenizer.convert_tokens_to_ids("[SEP]")], at - 1)
    table = language.model.get_input_embeddings().weight
    first = [] if language.causal else [tokenizer.convert_tokens_to_ids("[CLS]")]
    vectors = torch.cat([table[first], prompt.tokens, table[ids]])[None]
    logits = language.model(inputs_embeds=vectors).logits[0, at]
    words = [tokenizer.convert_tokens_to_ids(word.strip()) for word in template.words]
    return functional.cross_entropy(logits[words][None], torch.tensor([label]))


@each_model
def test_every_copy_has_the_gradient_of_its_example_alone(kind, side):
    language = tiny.language(kind, side)
    prompt = started(language, kind)
    found = per_example_gradients(language, prompt, prompt.encoded(language, tiny.TEXTS, tiny.LABELS))[0]["tokens"]
    for place, (text, label) in enumerate(zip(tiny.TEXTS, tiny.LABELS, strict=True)):
        loss = obvious_loss(language, prompt, tiny.template(kind), text, label)
        (expected,) = torch.autograd.grad(loss, prompt.tokens)
        assert expected.norm() > 1e-6
        torch.testing.assert_close(found[place], expected, rtol=1e-9, atol=1e-12)


@each_model
def test_the_head_starts_as_the_label_words_and_has_gradients_of_its_own(kind, side):
    language = tiny.language(kind, side)
    plain, headed = started(language, kind), started(language, kind, head=True)
    np.testing.assert_allclose(
        headed.log_probabilities(language, tiny.TEXTS), plain.log_probabilities(language, tiny.TEXTS), atol=1e-9
    )
    found = per_example_gradients(language, headed, headed.encoded(language, tiny.TEXTS, tiny.LABELS))[0]
    assert set(found) == {"tokens", "weight", "bias"}
    for place in range(len(tiny.TEXTS)):
        alone = headed.encoded(language, tiny.TEXTS[place : place + 1], tiny.LABELS[place : place + 1])
        expected = torch.autograd.grad(headed.losses(language, alone).sum(), list(headed.parameters()))
        for name, one in zip(dict(headed.named_parameters()), expected, strict=True):
            torch.testing.assert_close(found[name][place], one, rtol=1e-9, atol=1e-12)


@each_model
def test_losses_and_answers_do_not_depend_on_the_company(kind, side):
    language = tiny.language(kind, side)
    prompt = started(language, kind)
    together = prompt.losses(language, prompt.encoded(language, tiny.TEXTS, tiny.LABELS))
    asked = prompt.log_probabilities(language, tiny.TEXTS)
    for place, (text, label) in enumerate(zip(tiny.TEXTS, tiny.LABELS, strict=True)):
        expected = obvious_loss(language, prompt, tiny.template(kind), text, label)
        assert together[place].item() == pytest.approx(expected.item(), abs=1e-10)
        assert -asked[place, label] == pytest.approx(expected.item(), abs=1e-10)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_free_answers_are_scored_token_by_token(kind, side):
    language = tiny.language(kind, side)
    prompt = SoftPrompt.from_text(language, Template("{text} :"), "the review").double()
    answers = ["very good", "bad", "a great story of fun", "not good", "awful", "dull"]
    batch = prompt.encoded(language, tiny.TEXTS, answers)
    found, gradients = prompt.losses(language, batch), per_example_gradients(language, prompt, batch)[0]["tokens"]
    table = language.model.get_input_embeddings().weight
    for place, (text, answer) in enumerate(zip(tiny.TEXTS, answers, strict=True)):
        asked, told = language.tokens(f"{text} :"), language.tokens(answer)
        vectors = torch.cat([prompt.tokens, table[asked + told]])[None]
        logits = language.model(inputs_embeds=vectors).logits[0, -len(told) - 1 : -1]
        expected = functional.cross_entropy(logits, torch.tensor(told))
        assert found[place].item() == pytest.approx(expected.item(), abs=1e-10)
        (gradient,) = torch.autograd.grad(expected, prompt.tokens)
        torch.testing.assert_close(gradients[place], gradient, rtol=1e-9, atol=1e-12)


def test_answers_are_written_token_by_token():
    language = tiny.language()
    prompt = SoftPrompt.from_text(language, Template("{text} :"), "the review").double()
    table = language.model.get_input_embeddings().weight
    for text, found in zip(tiny.TEXTS[:3], prompt.answer(language, tiny.TEXTS[:3], most=4), strict=True):
        ids, told = language.tokens(f"{text} :"), []
        while len(told) < 4 and 4 not in told:  # token 4 ends an answer
            logits = language.model(inputs_embeds=torch.cat([prompt.tokens, table[ids + told]])[None]).logits[0, -1]
            told.append(int(logits.argmax()))
        assert found == language.tokenizer.decode(told, skip_special_tokens=True)
    with pytest.raises(InvalidArgument, match="does not write"):
        started(tiny.language("bert"), "bert").answer(tiny.language("bert"), ["dull"])


def test_a_first_token_stays_first():
    language = tiny.language("llama", special="<s> $A")
    assert language.beginning == [tiny.WORDS.index("<s>")]
    prompt = started(language)
    table = language.model.get_input_embeddings().weight
    ids = language.tokens("dull Mood :")
    vectors = torch.cat([table[[5]], prompt.tokens, table[ids]])[None]
    logits = language.model(inputs_embeds=vectors).logits[0, -1][language.tokens("good bad")]
    np.testing.assert_allclose(
        prompt.log_probabilities(language, ["dull"])[0], logits.log_softmax(0).detach(), atol=1e-10
    )


def test_starts_from_text_and_from_the_vocabulary():
    language = tiny.language()
    text = SoftPrompt.from_text(language, tiny.CAUSAL, "good film", count=5)
    assert torch.equal(text.tokens, language.embed(language.tokens("good film good film good")))
    drawn = SoftPrompt.from_vocabulary(language, tiny.CAUSAL, 7, seed=3)
    assert drawn.count == 7
    assert all(any(torch.equal(row, one) for one in language.table) for row in drawn.tokens)
    assert torch.equal(drawn.tokens, SoftPrompt.from_vocabulary(language, tiny.CAUSAL, 7, seed=3).tokens)
    with pytest.raises(InvalidArgument, match="want some words"):
        SoftPrompt.from_text(language, tiny.CAUSAL, "")


def test_the_head_reads_what_differs_from_the_middle_of_public_inputs():
    """Of what enters the output layer, the part that all texts share is taken out; answers stay as they were."""
    language = tiny.language()
    headed = SoftPrompt.from_text(language, tiny.CAUSAL, "the review", head=True, public=tiny.TEXTS)
    alone = [headed._hidden(language, [text])[0] for text in tiny.TEXTS]  # oracle: one text at a time
    torch.testing.assert_close(headed.centre, sum(alone) / len(alone))
    lengths = [float((one - headed.centre).norm()) / headed.scale for one in alone]
    assert sum(lengths) / len(lengths) == pytest.approx(4.0, rel=1e-4)
    plain = SoftPrompt.from_text(language, tiny.CAUSAL, "the review")
    np.testing.assert_allclose(
        headed.log_probabilities(language, tiny.TEXTS), plain.log_probabilities(language, tiny.TEXTS), atol=1e-5
    )
    one = SoftPrompt.from_text(language, tiny.CAUSAL, "the review", head=True, public=["fun"])  # no distance to measure
    np.testing.assert_allclose(one.predict(language, tiny.TEXTS), plain.predict(language, tiny.TEXTS))


@pytest.mark.parametrize("head", [False, True])
def test_calibrated_means_even_answers_to_empty_inputs(head):
    language = tiny.language()
    prompt = started(language, head=head)
    assert abs(np.diff(prompt.log_probabilities(language, ["N/A"]))) > 0.01
    prompt.calibrate(language, ["N/A"])
    np.testing.assert_allclose(prompt.log_probabilities(language, ["N/A"]), np.log(0.5), atol=1e-9)


@pytest.mark.parametrize("head", [False, True])
def test_a_saved_prompt_comes_back_with_its_record(tmp_path, head):
    language = tiny.language()
    prompt = started(language, head=head, calibrated=True)
    prompt.privacy = {"epsilon": 2.0, "delta": 1e-5, "event": {"kind": "x"}}
    prompt.save(tmp_path / "deep" / "prompt.safetensors")
    back = SoftPrompt.load(tmp_path / "deep" / "prompt.safetensors")
    assert back.privacy == prompt.privacy
    assert back.template == prompt.template
    assert back.model_name == language.name
    assert [name for name, _ in back.named_parameters()] == [name for name, _ in prompt.named_parameters()]
    np.testing.assert_array_equal(
        back.log_probabilities(language, tiny.TEXTS), prompt.log_probabilities(language, tiny.TEXTS)
    )
    assert [one.name for one in (tmp_path / "deep").iterdir()] == ["prompt.safetensors"]


def test_what_is_not_a_prompt_is_refused(tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "noise.safetensors").write_bytes(b"nothing of the kind")
    save_file({"tokens": torch.zeros(1, 2)}, tmp_path / "other.safetensors")
    for name, wanted in (("noise", "not a safetensors"), ("other", "not a soft prompt"), ("none", "no such file")):
        with pytest.raises(InvalidArgument, match=wanted):
            SoftPrompt.load(tmp_path / f"{name}.safetensors")


def test_peft_reads_the_prompt_and_says_the_same(tmp_path):
    peft = pytest.importorskip("peft")
    language = tiny.language(dtype=torch.float32)
    prompt = SoftPrompt.from_text(language, tiny.CAUSAL, "the movie review is")
    prompt.privacy = {"epsilon": 3.0}
    folder = prompt.as_peft(tmp_path / "adapter")
    assert json.loads((folder / "privacy.json").read_text()) == {"epsilon": 3.0}
    wrapped = peft.PeftModel.from_pretrained(tiny.language(dtype=torch.float32).model, folder)
    ids = torch.tensor([language.tokens("dull Mood :")])
    with torch.no_grad():
        logits = wrapped(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, -1, language.tokens("good bad")]
    np.testing.assert_allclose(prompt.log_probabilities(language, ["dull"])[0], logits.log_softmax(0), atol=1e-5)
    with pytest.raises(InvalidArgument, match="output layer"):
        SoftPrompt.from_text(language, tiny.CAUSAL, "the", head=True).as_peft(tmp_path / "headed")


def test_a_prompt_of_another_model_is_refused():
    language = tiny.language()
    with pytest.raises(InvalidArgument, match="width 3: want 16"):
        SoftPrompt(torch.zeros(2, 3), tiny.CAUSAL).log_probabilities(language, ["dull"])


def test_rows_are_grouped_by_length_within_the_limit():
    lengths = torch.tensor([9, 2, 2, 30, 3, 9, 1])
    groups = by_length(lengths, before=4, tokens=26)
    assert sorted(torch.cat(groups).tolist()) == list(range(7))
    assert len(groups[-1]) == 1
    for group in groups:
        assert len(group) == 1 or len(group) * (int(lengths[group].max()) + 4) <= 26
    edges = [(int(lengths[group].min()), int(lengths[group].max())) for group in groups]
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(edges))
    language = tiny.language()
    assert tokens_in_memory(language, 1 << 20) < tokens_in_memory(language, 1 << 21)
    assert tokens_in_memory(language, 1) == 1
