"""One private step: clipped sums come in, one noisy average goes out into the parameters' gradients.

    gradient = (sum of clipped gradients + N(0, (noise reach C)^2 I)) / expected lot size

The noise goes once onto the sum of the whole lot, whatever microbatches or processes it came in, and the noisy sum is
rounded to a public grid of 2^-10 of the noise's deviation, which hides the last bits of the floating-point sum. With
a plan whose noise is correlated, the noise is that of `correlated` instead. Metrics that the plan pays for are sums of
clamped numbers, released in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrine.common.correlated import CorrelatedNoise
from terrine.common.keys import Key, Purpose
from terrine.errors import InvalidArgument
from terrine.sgd import distributed, sharding
from terrine.sgd.clipping import Clipped, ClippingRule
from terrine.sgd.clipping.ghost import widest
from terrine.sgd.clipping.sums import LARGE_LOT, refuse_strange
from terrine.sgd.plan import Adaptive, Plan


class StepRelease:
    """The state of a run between its steps: how many are released, the present bound, and the sum so far."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], plan: Plan, key: Key, *, limit: int | None = None, taken: int = 0
    ) -> None:
        self.parameters, self.plan, self.key = parameters, plan, key
        self.limit = plan.steps if limit is None else min(limit, plan.steps)
        self.taken, self.bound = taken, plan.first_bound
        refuse_strange(self.rule, parameters)
        self._correlated: CorrelatedNoise | None = None
        if plan.correlated is not None and plan.correlated.bands > 1 and plan.private:
            self._correlated = CorrelatedNoise(plan.correlated, key, parameters.values(), first=taken)
        self.sums: dict[str, Tensor] = {}
        self.norm: Tensor | None = None  # of the last noisy gradient, where each process has a part of it
        self._within = 0.0
        self._measured = torch.zeros(len(plan.metrics), dtype=torch.float64)

    @property
    def rule(self) -> ClippingRule:
        """The clipping rule of the present step."""
        return self.plan.clip_at(self.taken, self.bound)

    def add(self, clipped: Clipped, people: int | None = None, measured: Tensor | None = None) -> None:
        """Take in the clipped sum of a part of the lot, of so many people, and its metrics' clamped sums.

        Raises:
            InvalidArgument: the lot is of people, and something else was clipped.
        """
        if people is not None and len(clipped.norms) != people:
            found = f"{len(clipped.norms)} clipped gradients for {people} people"
            raise InvalidArgument(f"{found}: want each person's rows clipped as one, by clipped_sum(rows=...)")
        is_large = self.plan.lot > LARGE_LOT
        for name, value in clipped.sums.items():
            part = value.to(widest(value)) if is_large else value
            self.sums[name] = self.sums[name].add_(part) if name in self.sums else part
        if measured is not None:
            self._measured += measured
        if isinstance(self.plan.rule, Adaptive):
            # One count per example, +1/2 within the bound and -1/2 beyond (or not finite): it moves it by 1/2.
            self._within += float((clipped.norms <= self.bound).sum()) - 0.5 * len(clipped.norms)

    def release(self, optimizer: Optimizer) -> dict[str, float]:
        """Put the noisy average into the gradients and end the step; return the noisy metrics."""
        deviation = self.plan.deviation_at(self.taken, self.rule.bound)
        totals = [distributed.summed(self._total(name, one)) for name, one in self.parameters.items()]
        if self._correlated is None or not deviation:
            self.key.draw(Purpose.NOISE, self.taken).protect(totals, deviation, over=self.plan.lot)
        else:
            self._correlated.protect(totals, self.taken, deviation, over=self.plan.lot)
        is_sharded = any(map(sharding.is_part, self.parameters.values()))
        self.norm = join_norms(totals) if is_sharded else None
        for parameter, total in zip(self.parameters.values(), totals, strict=True):
            total = total if total.dtype is parameter.dtype else total.to(parameter.dtype)
            parameter.grad = sharding.take_part(total, parameter)
        for group in optimizer.param_groups:
            if "noise_variance" in group:  # DP-AdamBC takes out what the noise adds to its second moment
                group["noise_variance"] = self._variance(deviation / self.plan.lot)
        metrics = self._release_metrics()
        if isinstance(self.plan.rule, Adaptive):
            self._adapt(self.plan.rule)
        self.taken += 1
        self.clear()
        return metrics

    def clear(self) -> None:
        """Forget the sum so far."""
        self.sums, self._within = {}, 0.0
        self._measured = torch.zeros_like(self._measured)

    def _total(self, name: str, parameter: nn.Parameter) -> Tensor:
        total = self.sums.get(name)
        if total is None:
            dtype = torch.promote_types(parameter.dtype, torch.float32)
            return torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        return total if total.is_contiguous() else total.contiguous()

    def _variance(self, deviation: float) -> float:
        banded = self.plan.correlated
        if banded is None or self._correlated is None:
            return deviation**2
        return deviation**2 * banded.variance_at(self.taken - self._correlated.first)

    def _release_metrics(self) -> dict[str, float]:
        """Means over the expected lot of what was measured, noisy."""
        if not self.plan.metrics:
            return {}
        sums = distributed.summed(self._measured.clone())
        values = {}
        for place, metric in enumerate(self.plan.metrics):
            noise = metric.noise_for(self.plan.lot) * self.plan.sampling.reach if self.plan.private else 0.0
            total = sums[place : place + 1].float()
            self.key.draw(Purpose.METRIC, self.taken, place).protect(total, noise * metric.radius)
            values[metric.name] = metric.middle + float(total) / self.plan.lot
        return values

    def _adapt(self, rule: Adaptive) -> None:
        count = distributed.summed(torch.tensor(self._within, dtype=torch.float64))
        deviation = rule.count_noise(self.plan.lot) * self.plan.sampling.reach / 2 if self.plan.private else 0.0
        self.key.draw(Purpose.QUANTILE, self.taken).protect(count.view(1), deviation)
        self.bound = rule.following(self.bound, float(count) / self.plan.lot + 0.5)


def join_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of gradients as one long vector."""
    norm: Tensor = torch.stack([gradient.norm().float() for gradient in gradients]).norm()
    return norm
