"""PromptDPSGD: a soft prompt trained by DP-SGD at the price of ordinary prompt tuning [DDP23] Algorithm 1.

    g_i = d loss_i / d (row i's own copy of the prompt)      one backward pass gives all of them

The frozen model turns no parameter into a gradient, so a private step does what a plain one does, plus clipping and
noise on a few thousand numbers. Lots, clipping, noise, event, charge and checkpoint are those of `terrine.sgd`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrine import check
from terrine.errors import InvalidArgument
from terrine.events import Neighbours, is_reproducible
from terrine.events.codec import to_dict
from terrine.prompts.batches import Encoded, by_length, tokens_in_memory
from terrine.prompts.language import LanguageModel
from terrine.prompts.soft import CONTENT_FREE, SoftPrompt
from terrine.receipts import Charged
from terrine.sgd import Plan, validate
from terrine.sgd.checkpoint import Checkpoint
from terrine.sgd.clipping import Clipped, ClippingRule
from terrine.sgd.clipping.sums import ClippedSums
from terrine.sgd.steps import start

MEMORY = 1 << 30
"""Bytes of activations that one part of a lot may keep, about."""

Progress = Callable[[int, int], None]


def tune(
    language: LanguageModel,
    prompt: SoftPrompt,
    texts: Sequence[str],
    labels: Sequence[int] | Sequence[str],
    plan: Plan,
    *,
    optimizer: Callable[[Any], Optimizer] | None = None,
    learning_rate: float = 0.05,
    account: Charged | None = None,
    checkpoint: Checkpoint | str | Path | None = None,
    memory: int = MEMORY,
    progress: Progress | None = None,
    purpose: str = "PromptDPSGD",
    by: str = "terrine.prompts",
) -> SoftPrompt:
    """A copy of `prompt`, trained on private texts and their classes (or, without label words, their answers).

    `learning_rate` is relative to the size of the model's own token vectors and falls to zero over the plan's steps;
    `optimizer` (parameters in, optimizer out) replaces Adam and its learning rate.

    Guarantee: the returned prompt costs at most `plan.event`, which the account is charged for before the first step.

    Raises:
        InvalidArgument: texts, labels, model, prompt or plan do not fit each other.
        BudgetExceeded: the account has not enough left; nothing was trained.
    """
    written = record(plan, before=prompt.privacy)
    validate(language.model)
    _check_apart(language, prompt)
    tuned = copy.deepcopy(prompt).to(language.device)
    data = tuned.encoded(language, texts, labels)
    moves = optimizer(tuned.parameters()) if optimizer is not None else _adam(language, tuned, learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(moves, lambda step: 1 - step / plan.steps)
    steps = start(
        tuned.train(), moves, tuple(data), plan, clipper=PromptClipper(language, tuned, memory=memory),
        account=account, checkpoint=checkpoint, purpose=purpose, by=by,
    )  # fmt: skip
    with closing(steps):
        if checkpoint is not None:
            steps.keep(schedule=schedule)
        for step in steps:
            moves.step()
            schedule.step()
            if progress is not None:
                progress(step.number, len(steps))
    tuned.privacy = written
    return tuned


class PromptClipper:
    """Adds up clipped gradients of a prompt, a few examples at a time, each by its own copy of the prompt."""

    def __init__(self, language: LanguageModel, prompt: SoftPrompt, *, memory: int = MEMORY) -> None:
        self.model: nn.Module = prompt
        self._prompt, self._language, self._memory = prompt, language, memory
        self.parameters = dict(prompt.named_parameters())
        self.losses, self.is_run = torch.zeros(0), False

    def try_out(self, batch: Any) -> None:
        """Nothing to find out: the program is this file's own."""

    def add_up(self, batch: Any, rule: ClippingRule, rows: Sequence[int] | None = None) -> Clipped:
        """Return the clipped sum of encoded texts, and each text's norm.

        Raises: InvalidArgument where texts are people's, which is not built.
        """
        if rows is not None:
            raise InvalidArgument("people= with a prompt: want examples=, one text each")
        lot = Encoded(*batch)
        sums, norms = ClippedSums(self.parameters), torch.zeros(len(lot.ids))
        self.losses = torch.zeros(len(lot.ids))
        before, tokens = self._prompt.before(self._language), tokens_in_memory(self._language, self._memory)
        for part in by_length(lot.lengths, before, tokens) if len(lot.ids) else ():
            gradients, losses = per_example_gradients(self._language, self._prompt, lot.take(part))
            norms[part] = sums.add_rows(gradients, rule).float().cpu()
            self.losses[part] = losses.float().cpu()
        return Clipped(sums.totals(), norms)

    def try_metric(self, _name: str, metric: Any, batch: Any, /) -> None:
        """Refuse a metric of its own: a prompt's loss is what can be bought.

        Raises: InvalidArgument
        """
        self.measure(metric, batch)

    def measure(self, _metric: Any, _batch: Any, /) -> Tensor:
        """Refuse it as `try_metric` does.

        Raises: InvalidArgument
        """
        raise InvalidArgument("metrics: of a prompt the loss alone can be bought; want sgd.Metric() without a function")


def per_example_gradients(
    language: LanguageModel, prompt: SoftPrompt, batch: Encoded
) -> tuple[dict[str, Tensor], Tensor]:
    """Return every example's gradient, (rows, *parameter), and loss: one copy of the prompt for each, one backward."""
    values = {name: copy.detach().clone().requires_grad_() for name, copy in prompt.copies(len(batch.ids)).items()}
    losses = prompt.losses(language, batch, values)
    gradients = torch.autograd.grad(losses.sum(), list(values.values()))
    return dict(zip(values, gradients, strict=True)), losses.detach()


def record(plan: Plan, *, before: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a prompt trained by `plan` says about its privacy. A prompt that was private before keeps its record.

    Raises:
        InvalidArgument: the prompt was trained before; its costs would have to be added up by a ledger.
    """
    if before is not None:
        raise InvalidArgument(
            "the prompt was trained before: want a fresh one, since this record would not hold what it already cost"
        )
    event = plan.event
    return {
        "method": "PromptDPSGD",
        "private": plan.private,
        "epsilon": plan.epsilon if plan.private else None,
        "delta": plan.delta if plan.private else None,
        "weak_guarantee": check.weakness(plan.epsilon, plan.delta, units=plan.examples) or None,
        "neighbours": (event.neighbours or Neighbours.ADD_REMOVE).value,
        "unit": "example",
        "reproducible_noise_for_tests_only": is_reproducible(event),
        "event": to_dict(event),
    }


def _check_apart(language: LanguageModel, prompt: SoftPrompt) -> None:
    """Two public inputs alone and together: one text's loss must not depend on another text."""
    answers: Any = [0, 0] if prompt.template.words else list(CONTENT_FREE[:2])
    both = prompt.encoded(language, CONTENT_FREE[:2], answers)
    with torch.no_grad():
        alone = torch.cat([prompt.losses(language, both.take(torch.tensor([row]))) for row in range(2)])
        together = prompt.losses(language, both)
    slack = 1e-3 if language.table.element_size() >= 4 else 5e-2  # half precision rounds by the shape of a batch
    if not torch.allclose(alone, together, rtol=slack, atol=slack, equal_nan=True):
        raise InvalidArgument(
            f"{language.name}: a text's loss changes in the company of another: the model mixes examples, so no"
            " clipping bounds one of them; want a model that treats each alone"
        )


def _adam(language: LanguageModel, prompt: SoftPrompt, learning_rate: float) -> Optimizer:
    """Adam, its learning rate relative to a token's vector; the output layer, nearly linear, takes larger steps."""
    learning_rate = check.positive("learning_rate", learning_rate)
    groups: list[dict[str, Any]] = [{"params": [prompt.tokens], "lr": learning_rate * _size(language.table)}]
    if prompt.weight is not None:
        groups.append({"params": [prompt.weight], "lr": 4 * learning_rate / language.width**0.5})
        groups.append({"params": [prompt.bias], "lr": 4 * learning_rate})
    return torch.optim.Adam(groups)


def _size(table: Tensor) -> float:
    """The root mean square of a table's entries."""
    found = float(table.detach().float().pow(2).mean().sqrt())
    return found if found > 0 else 1.0
