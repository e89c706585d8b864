"""The demonstration: every row is real, audited, and on the page."""

import pytest

from terrine.pipeline import demo
from terrine.pipeline.job import _silent
from terrine.verify import verify


@pytest.mark.slow
def test_the_demonstration_attacks_charges_verifies_and_writes_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "EPSILONS", (8.0,))
    shown = demo.demonstrate(tmp_path / "demo", progress=_silent, quiet=True)
    rows = shown.rows
    assert [row.name for row in rows] == ["not private", "DP-SGD"]
    assert [row.epsilon is None or row.epsilon <= 8 for row in rows] == [True] * 2
    assert rows[1].verdict == "consistent"
    assert rows[0].accuracy > 0.9
    assert rows[1].accuracy > 0.8
    assert rows[0].model_audit > 2  # without privacy the leak is proven ...
    assert rows[0].area > 0.95
    assert rows[1].model_audit < 1  # ... and with it, next to nothing is
    assert 0 < rows[1].canary_audit < 8  # the canaries see something, and no more than was claimed
    page = (tmp_path / "demo" / "report.html").read_text()
    assert page.count("<svg") == 2
    assert "1. The attack, before and after" in page
    assert "refused" in page
    assert (tmp_path / "demo" / "runs" / "sgd-8" / "report.html").exists()


def test_the_clinic_shares_one_budget_and_a_forged_claim_is_found(tmp_path):
    found = demo.clinic(tmp_path, progress=_silent, quiet=True)
    assert [entry.epsilon for entry in found.entries] == pytest.approx([0.5, 2.0], rel=1e-3)
    assert found.entries[0].left > found.entries[1].left > 0
    assert "nothing was charged" in found.refused
    assert not (tmp_path / "clinic" / "another").exists()
    assert found.accuracy > 0.7
    ledger = f"sqlite:///{tmp_path / 'clinic' / 'budget.db'}"
    assert verify(found.folder.path, ledger=ledger).ok
    forged = demo.forgery(found.folder, tmp_path / "forged")
    assert forged.check == "claim"
    assert forged.forged < forged.claimed / 9
