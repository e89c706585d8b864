"""One private step: clipped sums come in, one noisy average goes out into the parameters' gradients.

    gradient = (sum of clipped gradients + N(0, (noise reach C)^2 I)) / expected lot size

The noise goes once onto the sum of the whole lot, whatever pieces or processes it came in, and the noisy sum is
rounded to a public grid of 2^-10 of the noise's deviation, which hides the last bits of the floating-point sum. With
a plan whose noise is correlated, the noise is that of `correlated_noise` instead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from terrine.common.keys import Key, Purpose
from terrine.errors import InvalidArgument
from terrine.sgd import distributed
from terrine.sgd.clipping import Clipped, ClippingRule
from terrine.sgd.clipping.examples import trained
from terrine.sgd.clipping.policy import refuse_strange
from terrine.sgd.correlated_noise import CorrelatedNoise
from terrine.sgd.plan import Plan
from terrine.sgd.schedules import Adaptive


class Step:
    """The state of a run between its steps: how many are taken, the present bound, and the sum so far."""

    def __init__(self, model: nn.Module, plan: Plan, key: Key, limit: int | None = None) -> None:
        self.model, self.plan, self.key = model, plan, key
        self.limit = plan.steps if limit is None else min(limit, plan.steps)
        self.taken = 0
        self.bound = plan.first_bound
        self.parameters = trained(model)
        refuse_strange(self.rule, self.parameters)
        self._correlated: CorrelatedNoise | None = None
        if plan.correlated is not None and plan.correlated.bands > 1 and plan.private:
            self._correlated = CorrelatedNoise(plan.correlated, key, self.parameters.values())
        self._sums: dict[str, Tensor] = {}
        self._within = 0.0
        self._open = False  # a lot is handed out, and not used up
        self._units: int | None = None  # people in the piece that is out; None where a lot is of examples

    @property
    def rule(self) -> ClippingRule:
        """The clipping rule of the present step."""
        return self.plan.clip_at(self.taken, self.bound)

    def begin(self) -> None:
        """A lot is about to be handed out: nothing is left of one before."""
        self._clear()
        self._open = True

    def expect(self, people: int | None) -> None:
        """The next clipped sum has to be of so many people; None: of examples."""
        self._units = people

    def add(self, clipped: Clipped | None) -> None:
        """Take in the clipped sum of one piece; None for a piece without examples.

        Raises:
            InvalidArgument: the lot is of people, and something else was clipped.
        """
        if clipped is None:
            return
        if self._units is not None and len(clipped.norms) != self._units:
            found = f"{len(clipped.norms)} clipped gradients for {self._units} people"
            raise InvalidArgument(f"{found}: want each person's rows clipped as one, by clipped_sum(rows=...)")
        if not self._sums:
            self._sums = dict(clipped.sums)
        else:
            for name, value in clipped.sums.items():
                if name in self._sums:
                    self._sums[name] += value
                else:
                    self._sums[name] = value
        if isinstance(self.plan.rule, Adaptive):
            # One count per example, +1/2 within the bound and -1/2 beyond (or not finite): it moves it by 1/2.
            self._within += float((clipped.norms <= self.bound).sum()) - 0.5 * len(clipped.norms)

    def check_parameters(self, optimizer: Optimizer) -> None:
        """Refuse to step where other parameters are trained than when the run began: nothing clips their gradients.

        Raises:
            InvalidArgument: a parameter was added to the optimizer or the model, replaced, frozen or unfrozen.
        """
        own = {id(one) for one in self.parameters.values()}
        present = trained(self.model)
        if {id(one) for one in present.values()} != own:
            known, found = set(self.parameters.items()), set(present.items())
            changed = sorted({name for name, _ in known ^ found})
            raise InvalidArgument(
                f"{', '.join(changed[:5])}{' ...' if len(changed) > 5 else ''}: added, replaced, frozen or unfrozen "
                "during the run; want the parameters that are trained settled before make_private"
            )
        held = [one for group in optimizer.param_groups for one in group["params"]]
        if strange := sum(id(one) not in own and (one.requires_grad or one.grad is not None) for one in held):
            raise InvalidArgument(
                f"the optimizer holds {strange} more parameters than when the run began, and nothing clips their "
                "gradients; want them to be the model's, before make_private"
            )

    def release(self, optimizer: Optimizer) -> None:
        """Put the noisy average into the gradients and end the step."""
        deviation = self.plan.deviation_at(self.taken, self.rule.bound)
        totals = [self._total(name, parameter) for name, parameter in self.parameters.items()]
        if distributed.share()[1] > 1:
            totals = [distributed.summed(total) for total in totals]
        if self._correlated is None or not deviation:
            self.key.draw(Purpose.NOISE, self.taken).protect(totals, deviation, over=self.plan.lot)
        else:
            self._correlated.protect(totals, self.taken, deviation, over=self.plan.lot)
        for parameter, total in zip(self.parameters.values(), totals, strict=True):
            parameter.grad = total if total.dtype is parameter.dtype else total.to(parameter.dtype)
        for group in optimizer.param_groups:
            if "noise_variance" in group:  # DP-AdamBC takes out what the noise adds to its second moment
                group["noise_variance"] = self.plan.variance_at(self.taken, deviation / self.plan.lot)
        if isinstance(self.plan.rule, Adaptive):
            self._adapt(self.plan.rule)
        self._next()

    def withhold(self) -> None:
        """Leave the optimizer nothing to act on: the lot has more pieces."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def skip(self) -> None:
        """End a step that was not taken, if a lot was handed out for it: that is used up, and nothing was released."""
        if self._open:
            self._next()

    def _total(self, name: str, parameter: nn.Parameter) -> Tensor:
        total = self._sums.get(name)
        if total is None:
            return torch.zeros_like(parameter, dtype=torch.promote_types(parameter.dtype, torch.float32))
        return total if total.is_contiguous() else total.contiguous()

    def _adapt(self, rule: Adaptive) -> None:
        count = distributed.summed(torch.tensor(self._within, dtype=torch.float64))
        deviation = rule.count_noise(self.plan.lot) * self.plan.sampling.reach / 2 if self.plan.private else 0.0
        self.key.draw(Purpose.QUANTILE, self.taken).protect(count.view(1), deviation)
        self.bound = rule.following(self.bound, float(count) / self.plan.lot + 0.5)

    def _next(self) -> None:
        self.taken += 1
        self._clear()

    def _clear(self) -> None:
        self._sums, self._within, self._open = {}, 0.0, False
