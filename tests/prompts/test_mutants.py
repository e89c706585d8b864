"""Known ways to lose the guarantee of a prompt, each built on purpose: the check must catch it.

Each check first passes on the real code: a check that always fails catches nothing.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional

from terrine import pate, sgd
from terrine.prompts import SoftPrompt, Template, teachers, tuning, vote
from terrine.prompts.batches import Encoded, by_length, pad

from . import tiny
from .test_discrete import PRIVATE, TEMPLATE, Server

BOUND = 1e-3


def largest_move(prompt, language, lot):
    """How far one example moves the clipped sum, at most, in units of the bound."""
    rows = torch.arange(len(lot.ids))
    whole = tiny.clipped_sum(language, prompt, lot, clip=sgd.Flat(BOUND)).sums["tokens"]
    moves = [
        (whole - tiny.clipped_sum(language, prompt, lot.take(rows[rows != one]), clip=sgd.Flat(BOUND)).sums["tokens"])
        for one in rows
    ]
    return max(float(move.norm()) for move in moves) / BOUND


def test_clipping_the_shared_prompts_gradient_is_caught(monkeypatch):
    language = tiny.language()
    prompt = SoftPrompt.from_text(language, tiny.CAUSAL, "the review is").double()
    lot = prompt.encoded(language, tiny.TEXTS, tiny.LABELS)
    assert largest_move(prompt, language, lot) <= 1 + 1e-6

    def unclipped(language, prompt, batch):
        """One gradient for the batch, dealt out evenly: each row's norm looks small."""
        (total,) = torch.autograd.grad(prompt.losses(language, batch).sum(), [prompt.tokens])
        even = total / total.norm() * BOUND
        return {"tokens": even.expand(len(batch.ids), *even.shape)}, torch.zeros(len(batch.ids))

    def mixed(language, prompt, batch):
        """Gradients of a loss in which every row also depends on its neighbours, as batch statistics make it."""
        rows = per_example(language, prompt, batch)[0]["tokens"]
        return {"tokens": rows + 5 * rows.mean(dim=0)}, torch.zeros(len(rows))

    per_example = tuning.per_example_gradients
    for mutant in (unclipped, mixed):
        monkeypatch.setattr(tuning, "per_example_gradients", mutant)
        assert largest_move(prompt, language, lot) > 1.05


def test_a_loss_divided_by_the_batchs_tokens_is_caught(monkeypatch):
    language = tiny.language()
    prompt = SoftPrompt.from_text(language, Template("{text} :"), "the review").double()
    answers = ["very good", "bad", "a great story of fun", "not good", "awful", "dull"]
    batch = prompt.encoded(language, tiny.TEXTS, answers)
    rows = torch.arange(len(answers))

    def company_matters():
        alone = prompt.losses(language, batch.take(rows[:1]))[0]
        return abs((prompt.losses(language, batch)[0] - alone).item()) > 1e-9

    assert not company_matters()
    real = SoftPrompt._answer_losses

    def divided_together(self, language, batch, values):
        tokens = (batch.lengths - batch.targets).to(torch.float64)
        return real(self, language, batch, values) * tokens / tokens.sum()

    monkeypatch.setattr(SoftPrompt, "_answer_losses", divided_together)
    assert company_matters()


def test_a_mask_that_lets_padding_in_is_caught(monkeypatch):
    language = tiny.language("bert")  # an encoder looks both ways; a causal model does not see padding on the right
    prompt = SoftPrompt.from_text(language, tiny.MASKED, "the review is").double()

    def company_matters():
        batch = prompt.encoded(language, tiny.TEXTS, tiny.LABELS)
        alone = prompt.losses(language, prompt.encoded(language, ["dull"], [1]))
        return abs((prompt.losses(language, batch)[1] - alone[0]).item()) > 1e-9

    assert not company_matters()
    monkeypatch.setattr(
        "terrine.prompts.soft.pad", lambda *given: (made := pad(*given))._replace(mask=torch.ones_like(made.mask))
    )
    assert company_matters()


def test_an_empty_lot_that_borrows_an_example_is_caught(monkeypatch):
    language = tiny.language()
    prompt = SoftPrompt.from_text(language, tiny.CAUSAL, "the review is").double()
    lot = prompt.encoded(language, tiny.TEXTS, tiny.LABELS)
    empty = Encoded(*(one[:0] for one in lot))
    assert not tiny.clipped_sum(language, prompt, empty, clip=sgd.Flat(1.0)).sums["tokens"].any()
    assert by_length(empty.lengths, 3, 100) == []


def test_teachers_that_share_a_demonstration_are_caught(monkeypatch):
    server, deal = Server(lean=3.0), pate.split(len(PRIVATE), 6, seed=0)
    queries = ["the film", "a movie", "it was"]

    def moved():
        other = [("fun", 0), *PRIVATE[1:]] if PRIVATE[0][1] else [("dull", 1), *PRIVATE[1:]]
        one, two = (vote(server, TEMPLATE, data, deal, queries, calibration=None).counts for data in (PRIVATE, other))
        return int(np.abs(one - two).sum(axis=1).max())

    assert moved() <= 2
    real = teachers.balanced
    known = {"first": None}

    def leaking(shown, shots):
        return [*real(shown, shots), known["first"]]

    monkeypatch.setattr(teachers, "balanced", leaking)
    counts = []
    for first in (("fun", 0), ("dull", 1)):
        known["first"] = first
        counts.append(vote(server, TEMPLATE, PRIVATE, deal, queries, calibration=None).counts)
    assert int(np.abs(counts[0] - counts[1]).sum(axis=1).max()) > 2


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_a_copy_that_is_scaled_is_caught(monkeypatch, wrong):
    """Centre and scale enter the gradient of the head: forgetting one would clip another length than is released."""
    language = tiny.language()
    prompt = SoftPrompt.from_text(language, tiny.CAUSAL, "the review", head=True).double()
    batch = prompt.encoded(language, tiny.TEXTS[:1], tiny.LABELS[:1])
    found = tuning.per_example_gradients(language, prompt, batch)[0]["weight"][0]
    hidden = prompt._read(language, batch, prompt.copies(1)).hidden[0, 0]

    def expected(scale, centre=prompt.centre):
        weight = prompt.weight.detach().clone().requires_grad_()
        scores = weight @ (hidden.detach() - centre) / scale + prompt.bias.detach()
        return torch.autograd.grad(functional.cross_entropy(scores[None], batch.targets), weight)[0]

    torch.testing.assert_close(found, expected(prompt.scale))
    assert not torch.allclose(found, expected(prompt.scale * wrong))
    assert not torch.allclose(found, expected(prompt.scale, 0 * prompt.centre))
