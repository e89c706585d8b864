"""PromptDPSGD: clipped one by one, noised once, charged first, resumed to the same prompt."""

import math

import pytest
import torch

from terrine import accounting, sgd
from terrine.errors import BudgetExceeded, InvalidArgument
from terrine.events import Budget, Unit
from terrine.events.codec import from_dict
from terrine.prompts import SoftPrompt, Template, tune
from terrine.prompts.batches import Encoded
from terrine.prompts.tuning import per_example_gradients
from terrine.sgd.checkpoint import Checkpoint

from . import tiny

TEXTS, LABELS = tiny.TEXTS * 10, tiny.LABELS * 10


def plan(**changes):
    asked = {"examples": len(TEXTS), "lot": 12, "steps": 6, "clip": 0.05, "noise": 1.0, "delta": 1e-3, "seed": 1}
    return sgd.Plan(**(asked | changes))


def started(language, **options):
    return SoftPrompt.from_text(language, tiny.CAUSAL, "the review is", **options).to(language.table.dtype)


class Account:
    def __init__(self, refuse=False):
        self.events, self.refuse = [], refuse

    def charge(self, event, *, purpose, by):
        if self.refuse:
            raise BudgetExceeded("nothing left")
        self.events.append((event, purpose, by))


@pytest.mark.parametrize("memory", [1, 60_000, 1 << 30], ids=["one by one", "a few", "all at once"])
@pytest.mark.parametrize("clip", [sgd.Flat(0.05), sgd.Automatic(0.05)], ids=["flat", "automatic"])
def test_the_clipped_sum_is_that_of_a_loop(memory, clip):
    language = tiny.language()
    prompt = started(language, head=True)
    lot = prompt.encoded(language, tiny.TEXTS, tiny.LABELS)
    found = tiny.clipped_sum(language, prompt, lot, clip=clip, memory=memory)
    expected = {name: torch.zeros_like(one) for name, one in prompt.named_parameters()}
    norms = []
    for place in range(len(tiny.TEXTS)):
        alone = prompt.encoded(language, tiny.TEXTS[place : place + 1], tiny.LABELS[place : place + 1])
        gradient = torch.autograd.grad(prompt.losses(language, alone).sum(), list(prompt.parameters()))
        norms.append(math.sqrt(sum(float(one.pow(2).sum()) for one in gradient)))
        bound = clip.bound
        factor = min(1.0, bound / norms[-1]) if isinstance(clip, sgd.Flat) else bound / (norms[-1] + 0.01)
        for name, one in zip(expected, gradient, strict=True):
            expected[name] += factor * one
    assert min(norms) < max(norms)
    for name, one in expected.items():
        torch.testing.assert_close(found.sums[name], one, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(found.norms, torch.tensor(norms), rtol=1e-5, atol=0)


def test_one_more_example_moves_the_sum_by_at_most_the_bound():
    language = tiny.language()
    prompt = started(language)
    bound = 1e-3
    whole = prompt.encoded(language, tiny.TEXTS, tiny.LABELS)
    everyone = tiny.clipped_sum(language, prompt, whole, clip=sgd.Flat(bound)).sums["tokens"]
    for place in range(len(tiny.TEXTS)):
        others = torch.tensor([one for one in range(len(tiny.TEXTS)) if one != place])
        without = tiny.clipped_sum(language, prompt, whole.take(others), clip=sgd.Flat(bound)).sums["tokens"]
        assert (everyone - without).norm() <= bound * (1 + 1e-9)
    # A wrong one: the gradient of the lot's mean, clipped as a whole, moves by more than its share of the bound.
    mean = per_example_gradients(language, prompt, whole)[0]["tokens"].sum(0)
    assert mean.norm() > bound


def test_a_lot_without_examples_adds_nothing():
    language = tiny.language()
    prompt = started(language)
    empty = Encoded(*(one[:0] for one in prompt.encoded(language, tiny.TEXTS, tiny.LABELS)))
    assert not tiny.clipped_sum(language, prompt, empty, clip=sgd.Flat(1.0)).sums["tokens"].any()
    rare = plan(lot=1, steps=12, seed=5)  # a third of such lots are empty
    tuned = tune(language, prompt, TEXTS, LABELS, rare)
    assert torch.isfinite(tuned.tokens).all()


def test_tuning_moves_a_copy_and_writes_down_what_it_cost():
    language = tiny.language()
    before = started(language)
    account = Account()
    kept = before.tokens.detach().clone()
    frozen = {name: one.clone() for name, one in language.model.state_dict().items()}
    tuned = tune(language, before, TEXTS, LABELS, plan(), account=account)
    assert torch.equal(before.tokens, kept)
    assert before.privacy is None
    assert not torch.equal(tuned.tokens, kept)
    assert all(torch.equal(one, frozen[name]) for name, one in language.model.state_dict().items())
    assert account.events == [(plan().event, "PromptDPSGD", "terrine.prompts")]
    assert tuned.privacy["epsilon"] == plan().epsilon
    assert tuned.privacy["reproducible_noise_for_tests_only"] is True
    stored = from_dict(tuned.privacy["event"])
    assert accounting.epsilon(stored, delta=1e-3) <= tuned.privacy["epsilon"] * (1 + 1e-9)
    with pytest.raises(InvalidArgument, match="trained before"):
        tune(language, tuned, TEXTS, LABELS, plan())


def test_without_noise_the_prompt_learns_and_says_that_it_is_not_private():
    language = tiny.language()
    before = started(language, head=True)
    bare = plan(noise=0.0, clip=1e9, lot=len(TEXTS), steps=30)
    tuned = tune(language, before, TEXTS, LABELS, bare, learning_rate=0.2)
    losses = [one.losses(language, one.encoded(language, tiny.TEXTS, tiny.LABELS)).mean() for one in (before, tuned)]
    assert losses[1] < losses[0] * 0.75
    assert tuned.privacy["private"] is False
    assert tuned.privacy["epsilon"] is None


def test_free_answers_are_learned_too():
    language = tiny.language()
    before = SoftPrompt.from_text(language, Template("{text} :"), "the review is a").double()
    answers = ["very good" if label == 0 else "bad" for label in LABELS]
    bare = plan(noise=0.0, clip=1e9, lot=len(TEXTS), steps=30)
    tuned = tune(language, before, TEXTS, answers, bare, learning_rate=0.2)
    losses = [one.losses(language, one.encoded(language, TEXTS, answers)).mean() for one in (before, tuned)]
    assert losses[1] < losses[0] * 0.8


def test_the_noise_on_the_sum_has_the_plans_deviation():
    """The released average less the clipped average, over 3,200 coordinates: its deviation is within 6% of the plan's.

    False alarm: the estimate's own deviation is 1.25%, so about 5 of them: one run in a million. Twice the noise, or
    noise divided by the drawn lot instead of the expected one, is off by more than 30% and must fail.
    """
    language = tiny.language()
    prompt = SoftPrompt.from_vocabulary(language, tiny.CAUSAL, 25)
    seen = []

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(self.param_groups[0]["params"][0].grad.clone())

    steps, lot = 8, 12
    asked = plan(steps=steps, lot=lot, noise=2.0, clip=1e-6)
    tune(language, prompt.double(), TEXTS, LABELS, asked, optimizer=lambda one: Recording(one, lr=0.0))
    spread = float(torch.stack(seen).std())
    expected = 2.0 * 1e-6 / lot
    assert abs(spread / expected - 1) < 0.06
    for wrong in (2 * expected, expected * 0.7):
        assert abs(spread / wrong - 1) > 0.06


def test_a_refused_charge_trains_nothing(monkeypatch):
    language = tiny.language()
    per_example = "terrine.prompts.tuning.per_example_gradients"
    monkeypatch.setattr(per_example, lambda *_: pytest.fail("the texts were read"))
    with pytest.raises(BudgetExceeded):
        tune(language, started(language), TEXTS, LABELS, plan(), account=Account(refuse=True))


@pytest.mark.parametrize("stop", [1, 4])
def test_an_interrupted_run_goes_on_after_what_it_released(tmp_path, stop):
    language, seen = tiny.language(), []

    def interrupt(done, _total):
        if done == stop:
            raise KeyboardInterrupt

    account, path = Account(), tmp_path / "run.pt"
    with pytest.raises(KeyboardInterrupt):
        tune(
            language, started(language, head=True), TEXTS, LABELS, plan(),
            account=account, checkpoint=Checkpoint(path, every=1), progress=interrupt,
        )  # fmt: skip
    again = tune(
        language, started(language, head=True), TEXTS, LABELS, plan(), account=account,
        checkpoint=Checkpoint(path, every=1), progress=lambda done, _total: seen.append(done),
    )  # fmt: skip
    assert seen == list(range(stop + 1, plan().steps + 1))
    assert all(torch.isfinite(parameter).all() for parameter in again.parameters())
    assert len(account.events) == 1
    assert path.stat().st_size < 60_000  # the prompt, not the model


def test_what_does_not_fit_the_plan_is_refused():
    language = tiny.language()
    with pytest.raises(InvalidArgument, match="plan's examples=60"):
        tune(language, started(language), TEXTS[:-1], LABELS[:-1], plan())
    with pytest.raises(InvalidArgument, match="59 labels"):
        tune(language, started(language), TEXTS, LABELS[:-1], plan())
    with pytest.raises(InvalidArgument, match="label 2"):
        tune(language, started(language), TEXTS, [2, *LABELS[1:]], plan())
    with pytest.raises(InvalidArgument, match="one example"):
        tune(language, started(language), TEXTS, LABELS, plan(unit=Unit.PERSON))


def test_a_model_of_half_the_digits_gets_a_prompt_of_all():
    language = tiny.language(dtype=torch.bfloat16)
    prompt = SoftPrompt.from_text(language, tiny.CAUSAL, "the review is", head=True, calibrated=True)
    tuned = tune(language, prompt, TEXTS, LABELS, plan(steps=2))
    assert {one.dtype for one in tuned.parameters()} == {torch.float32}
    assert torch.isfinite(torch.from_numpy(tuned.log_probabilities(language, tiny.TEXTS))).all()


def test_a_model_that_mixes_texts_is_refused():
    language = tiny.language()
    inner = language.model.model.norm
    language.model.model.norm = torch.nn.Sequential(inner, Centred())
    with pytest.raises(InvalidArgument, match="mixes examples"):
        tune(language, started(language), TEXTS, LABELS, plan())


class Centred(torch.nn.Module):
    """Takes out the mean over the batch: a layer that lets one text see another."""

    def forward(self, x):
        return x - x.mean(dim=0, keepdim=True) * 0.5


def test_a_budget_is_kept():
    budget = Budget(epsilon=1.0, delta=1e-3)
    asked = plan(noise=None, budget=budget, delta=None, seed=None)
    language = tiny.language()
    tuned = tune(language, started(language), TEXTS, LABELS, asked)
    assert tuned.privacy["epsilon"] <= 1.0
    assert tuned.privacy["reproducible_noise_for_tests_only"] is False
