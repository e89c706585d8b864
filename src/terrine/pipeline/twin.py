"""A twin of a run by DP-SGD, with gradient canaries: the strongest attack that the claim has to withstand [SNJ23].

The same plan trains once more on the same rows, with canaries that an attacker watches at every step. The twin's model
is thrown away and its scores stay with the owner, as all of the audit does, so it costs nothing and changes nothing
that is handed on; it takes as long as the training. What it says is about the procedure, not about this one model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from terrine import sgd
from terrine.audit.canaries import Canaries


def attacked(
    module: nn.Module,
    plan: sgd.Plan,
    rows: tuple[Tensor, Tensor],
    *,
    count: int,
    learning_rate: float,
    momentum: float,
    criterion: nn.Module,
    person: Any = None,
    seed: int | None = None,
) -> Canaries:
    """Train `module` as planned with `count` gradient canaries among `rows`, at most one to a coordinate."""
    optimizer = torch.optim.SGD(module.parameters(), lr=learning_rate, momentum=momentum)
    trainer = sgd.Trainer(module, optimizer, criterion, plan, progress=False)
    most = sum(one.numel() for one in module.parameters() if one.requires_grad)
    return Canaries.fit(trainer, rows, count=min(count, most), person=person, seed=seed)[1]
