"""Trainings as jobs: priced, queued, charged once, handed on, cancelled, resumed."""

import io
import json
import time
import zipfile

import numpy as np
import pytest

from terrine import verify
from terrine.gateway import trainings
from tests.gateway import clinic as made
from tests.gateway.clinic import done

TRAIN = {"label": "urgent", "epsilon": 2.0, "delta": 1e-4, "epochs": 1, "audit": 0}
LENT = {
    "source": "visits.parquet",
    "tables": {"visits": {"person": "patient_id", "rows": 5}},
    "budget": {"epsilon": 6.0, "delta": 1e-3},
    "training": {"table": "patients.csv", "person": "patient_id", "labels": ["urgent"], "rows_per_person": 2},
}


def write_patients(folder):
    generator = np.random.default_rng(1)
    lines = ["patient_id,age,urgent"]
    for person in range(120):
        age = generator.integers(1, 99)
        lines.append(f"{person},{age},{'yes' if age > 50 else 'no'}")
    (folder / "patients.csv").write_text("\n".join(lines) + "\n")


@pytest.fixture
def lent(tmp_path, monkeypatch):
    from terrine import tables

    found = made.Clinic(tmp_path)
    write_patients(tmp_path / "data")
    columns = {"patient_id": tables.Ignored(), "age": tables.Number(0.0, 100.0)}
    facts = tables.Schema("urgent", ("no", "yes"), columns)
    (tmp_path / "data" / "patients.schema.toml").write_text(facts.to_toml())
    done(found.owner.post("/datasets/visits", json=LENT))
    yield found
    found.close()


def run_here(clinic, monkeypatch):
    """Workers run in this process, when asked: quick, and the same code."""
    from terrine.gateway import worker

    monkeypatch.chdir(clinic.folder)  # and back, wherever a worker goes
    monkeypatch.setattr(worker, "_Watch", lambda database, request: _Quiet())

    def start(row):
        worker.run(clinic.configuration, row["request"])

    monkeypatch.setattr(clinic.gateway.trainings, "_start", start)


class _Quiet:
    def stage(self, title):
        import contextlib

        return contextlib.nullcontext()


def until(client, request, *states, seconds=120.0):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        found = done(client.get(f"/requests/{request}"))
        if found["state"] in states:
            return found
        time.sleep(0.1)
    raise AssertionError(found)


def test_a_training_is_charged_once_and_its_folder_verifies(lent, monkeypatch, tmp_path):
    run_here(lent, monkeypatch)
    ann = lent.lend("ann", allowance=3.0)
    price = done(ann.post("/datasets/visits/trainings/price", json=TRAIN))
    assert price["epsilon"] == pytest.approx(2.0, rel=1e-3)
    assert lent.spent() == 0
    request = done(ann.post("/datasets/visits/trainings", json=TRAIN | {"purpose": "triage"}))["request"]
    found = until(ann, request, "answered", "failed", "refused")
    assert found["state"] == "answered", found
    assert lent.spent() == 1
    assert found["answer"]["privacy"]["unit"] == "person"
    got = ann.get(f"/requests/{request}/result")
    archive = zipfile.ZipFile(io.BytesIO(got.content))
    assert "privacy.json" in archive.namelist()
    assert not [name for name in archive.namelist() if name.startswith(("owner", "audit", "report", "/"))]
    assert str(tmp_path).encode() not in b"".join(archive.read(name) for name in archive.namelist())
    archive.extractall(tmp_path / "got")
    (tmp_path / "statement").write_text(lent.owner.get("/datasets/visits/export").text)
    checked = verify.verify(tmp_path / "got", statement=tmp_path / "statement")
    assert checked.ok, checked.lie
    assert ann.post("/datasets/visits/trainings", json=TRAIN).status_code == 403  # beyond the allowance now


def test_a_training_without_a_delta_takes_a_hundredth_of_the_data_sets(lent, monkeypatch):
    run_here(lent, monkeypatch)
    ann = lent.lend("ann", allowance=3.0)
    asked = {"label": "urgent", "epsilon": 1.0, "epochs": 1, "audit": 0}
    price = done(ann.post("/datasets/visits/trainings/price", json=asked))
    assert price["delta"] == LENT["budget"]["delta"] / 100
    request = done(ann.post("/datasets/visits/trainings", json=asked))["request"]
    found = until(ann, request, "answered", "failed", "refused")
    assert found["state"] == "answered", found
    assert found["answer"]["privacy"]["delta"] == price["delta"]


def test_settings_are_named_and_bounded(lent):
    ann = lent.lend("ann", allowance=3.0)
    bad = [
        {"table": "/etc/passwd"}, {"schema": "x.toml"}, {"test": "x"}, {"data": "digits"}, {"device": "cuda"},
        {"seed": 1}, {"weak_guarantee": True}, {"label": "age"}, {"rows_per_person": 3}, {"epochs": 1e9},
        {"model": "torch.load"}, {"method": "pate"}, {"epsilon": 21.0}, {"lot": True}, {"private_bounds": True},
    ]  # fmt: skip
    for one in bad:
        answer = ann.post("/datasets/visits/trainings", json=TRAIN | one)
        assert answer.status_code == 422, (one, answer.text)
        assert str(lent.folder) not in answer.text
    assert done(ann.get("/requests")) == []


def test_beyond_the_allowance_a_training_waits_and_can_be_taken_back(lent):
    ann, eve = lent.lend("ann", allowance=0.5), lent.lend("eve", role="officer")
    assert ann.post("/datasets/visits/trainings", json=TRAIN).status_code == 403
    request = done(ann.post("/datasets/visits/trainings", json=TRAIN | {"reason": "a study"}))["request"]
    done(ann.post(f"/requests/{request}/cancel"))
    assert eve.post(f"/requests/{request}/approve", json={}).status_code == 409
    assert lent.spent() == 0


def test_one_training_at_a_time_and_cancelling_gives_back_what_was_not_charged(lent, monkeypatch):
    monkeypatch.setattr(lent.gateway.trainings, "_start", lambda row: None)
    ann = lent.lend("ann", allowance=5.0)
    request = done(ann.post("/datasets/visits/trainings", json=TRAIN))["request"]
    assert ann.post("/datasets/visits/trainings", json=TRAIN).status_code == 429
    [mine] = done(ann.get("/budget"))
    assert mine["allowance_spent"] == pytest.approx(2.0, rel=1e-3)
    done(ann.post(f"/requests/{request}/cancel"))
    [mine] = done(ann.get("/budget"))
    assert mine["allowance_spent"] == 0.0
    assert ann.post(f"/requests/{request}/resume").status_code == 409
    assert lent.spent() == 0


def test_a_training_that_failed_after_its_charge_goes_on_by_the_same_receipt(lent, monkeypatch, capfd):
    from terrine.pipeline import job

    run_here(lent, monkeypatch)
    kept = job._keep

    def fails(*_):
        raise RuntimeError("Mrs Smith's row is odd")

    monkeypatch.setattr(job, "_keep", fails)
    ann = lent.lend("ann", allowance=5.0)
    request = done(ann.post("/datasets/visits/trainings", json=TRAIN))["request"]
    found = until(ann, request, "failed")
    assert "Smith" not in json.dumps(found)
    assert found["charged"]
    assert "stays charged" in found["said"]
    assert ann.get(f"/requests/{request}/result").status_code == 409
    monkeypatch.setattr(job, "_keep", kept)
    done(ann.post(f"/requests/{request}/resume"))
    until(ann, request, "answered")
    assert lent.spent() == 1


@pytest.mark.slow
def test_a_training_runs_in_a_process_of_its_own_and_stops_when_cancelled(lent):
    ann = lent.lend("ann", allowance=5.0)
    long = TRAIN | {"epochs": 1_000, "lot": 2}
    request = done(ann.post("/datasets/visits/trainings", json=long))["request"]
    until(ann, request, "charged")
    done(ann.post(f"/requests/{request}/cancel"))
    process = lent.gateway.trainings._running.get(request)
    if process is not None:
        assert process.wait(timeout=30) == 4
    found = done(ann.get(f"/requests/{request}"))
    assert found["state"] == "cancelled"
    assert found["charged"]
    assert lent.spent() == 1


def test_one_process_holds_a_training(tmp_path):
    with trainings.holding(tmp_path / "lock") as mine, trainings.holding(tmp_path / "lock") as other:
        assert mine
        assert not other
