"""What a module may log during a private run: nothing that is computed from a lot, for which no plan pays."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torchmetrics import Metric, MetricCollection

from terrine.sgd.handed_out import Withheld


class PublicLog:
    """What stands for a module's `log` during a private run: training values are left out, with one warning."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer, self._module, self.public = trainer, module, module.log
        self._dropped: set[str] = set()
        module.log = self

    def __call__(self, name: str, *args: Any, **others: Any) -> None:
        if not self._trainer.training:
            self.public(name, *args, **others)
        elif name not in self._dropped:
            self._dropped.add(name)
            warnings.warn(
                f"log({name!r}): not logged; what is computed from a lot is private and no plan pays for it",
                stacklevel=2,
            )

    def remove(self) -> None:
        """Give the module its own back."""
        vars(self._module).pop("log", None)

    @contextmanager
    def removed(self) -> Iterator[None]:
        """Within, the module has its own."""
        self.remove()
        try:
            yield
        finally:
            self._module.log = self


@contextmanager
def unmetered(module: nn.Module) -> Iterator[None]:
    """Within, torchmetrics of the module take nothing in and give nothing out."""
    metrics = [one for one in module.modules() if isinstance(one, Metric | MetricCollection)]
    before = [(one, {name: vars(one)[name] for name in _METERED if name in vars(one)}) for one in metrics]
    try:
        for one in metrics:
            vars(one).update(dict.fromkeys(_METERED, _nothing))
        yield
    finally:
        for one, own in before:
            for name in _METERED:
                vars(one).pop(name, None)
            vars(one).update(own)


_METERED = ("forward", "update", "compute")


def _nothing(*_: Any, **__: Any) -> Any:
    return Withheld("a training metric")
