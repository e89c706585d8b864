"""One charge, several models: a receipt whose run.json was edited to ask for something else."""

import json
import shutil

import pytest

from terrine import pipeline
from terrine.errors import BudgetExceeded
from terrine.events import Budget
from terrine.ledger import Ledger


def settings(**other):
    return pipeline.Settings(epsilon=2.0, delta=1e-5, data="digits", model="linear", epochs=1, audit=0, **other)


def test_an_old_receipt_does_not_pay_for_another_learning_rate(tmp_path):
    with Ledger.open(tmp_path / "ledger.db") as ledger:
        account = ledger.account("p", budget=Budget(2.0, 1e-5))
        folder = tmp_path / "run"
        pipeline.train(settings(), folder, account=account)
        for name in ("model.safetensors", "model.json", "privacy.json", "results.json"):
            (folder / name).unlink()
        asked = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps(asked | {"learning_rate": 9.0}))
        shutil.rmtree(folder / "owner" / "checkpoint", ignore_errors=True)
        with pytest.raises(
            BudgetExceeded, match="nothing was charged"
        ):  # the receipt of a run that is over pays no more
            pipeline.train(settings(learning_rate=9.0), folder, account=account)
        assert len(list(account.history())) == 1
