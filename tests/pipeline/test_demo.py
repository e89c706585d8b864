"""The demonstration: every row is real, audited, and on the page."""

from terrine.pipeline import demo
from terrine.pipeline.job import _silent


def test_the_demonstration_trains_audits_and_writes_its_page(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "EPSILONS", (8.0,))
    rows = demo.demonstrate(tmp_path / "demo", progress=_silent, quiet=True)
    assert [row.name for row in rows] == ["not private", "DP-SGD", "PATE"]
    assert [row.epsilon is None or row.epsilon <= 8 for row in rows] == [True] * 3
    assert {row.verdict for row in rows[1:]} == {"consistent"}
    baseline, sgd, pate = (row.accuracy for row in rows)
    assert baseline > 0.9
    assert sgd > 0.8
    assert pate > 0.4
    assert rows[0].model_audit > 2  # without privacy the leak is proven ...
    assert rows[0].area > 0.95
    assert max(row.model_audit for row in rows[1:]) < 1  # ... and with it, next to nothing is
    assert 0 < rows[1].canary_audit < 8  # the canaries see something, and no more than was claimed
    page = (tmp_path / "demo" / "report.html").read_text()
    assert page.count("<tr>") == 4
    assert page.count("<svg") == 2
    assert "The same attack on two models" in page
    assert (tmp_path / "demo" / "runs" / "sgd-8" / "report.html").exists()
