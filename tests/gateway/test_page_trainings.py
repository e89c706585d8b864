"""A training on pages: its price, submitted, its report for those who watch, its model for its analyst."""

import re

import pytest

from tests.gateway.clinic import done
from tests.gateway.test_pages import browser, send
from tests.gateway.test_trainings import lent, run_here, until

__all__ = ["lent"]
TRAIN = {"label": "urgent", "epsilon": "2", "delta": "1e-4", "epochs": "1"}


def test_a_training_is_priced_and_queued(lent):
    lent.lend("ann", allowance=3.0)
    ann = browser(lent, "ann")
    assert "Train a model" in ann.get("/pages/datasets/visits").text
    assert "urgent" in ann.get("/pages/datasets/visits/train").text
    assert "88.1%" in send(ann, "/pages/datasets/visits/train/price", **TRAIN).text
    wrong = send(ann, "/pages/datasets/visits/train", **TRAIN | {"label": "age"})
    assert wrong.status_code == 422
    assert "want one of urgent" in wrong.text
    place = send(ann, "/pages/datasets/visits/train", **TRAIN, purpose="triage").headers["location"]
    assert "queued" in ann.get(place).text
    ended = send(ann, f"{place.partition('?')[0]}/cancel")
    assert "nothing was charged" in ann.get(ended.headers["location"]).text
    assert lent.spent() == 0


def test_a_data_set_that_is_not_lent_for_trainings_has_no_such_page(shared):
    shared.lend("no-training")
    assert browser(shared, "no-training").get("/pages/datasets/visits/train").status_code == 404


@pytest.mark.slow
def test_a_finished_training_has_a_report_and_a_download(lent, monkeypatch):
    run_here(lent, monkeypatch)
    lent.lend("ann", allowance=3.0)
    lent.lend("eve", role="officer")
    ann, eve = browser(lent, "ann"), browser(lent, "eve")
    place = send(ann, "/pages/datasets/visits/train", **TRAIN).headers["location"].partition("?")[0]
    request = place.rpartition("/")[2]
    assert until(lent.client("ann"), request, "answered", "failed", "refused")["state"] == "answered"
    page = ann.get(place).text
    assert "Download the model and its proof" in page
    assert ann.get(f"/requests/{request}/result").headers["content-disposition"].startswith("attachment")
    assert ann.get(f"{place}/report").status_code == 403  # it says what an audit found
    assert "Read the run" in eve.get(place).text
    report = eve.get(f"{place}/report")
    assert "Privacy report" in report.text
    rule = report.headers["content-security-policy"]
    assert re.search("style-src 'unsafe-hashes' 'sha256-[A-Za-z0-9+/]{43}='", rule)
    assert "sandbox" in rule
    assert "unsafe-inline" not in rule
    assert len(rule) < 8_000
    log = done(lent.owner.get("/log"))
    assert "GET /pages/requests/{request}/report" in [one["action"] for one in log["entries"]]
