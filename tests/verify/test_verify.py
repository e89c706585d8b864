"""`terrine verify`: every edit of every handed-on file is found, or is shown to be immaterial."""

import json
import re
import shutil
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from terrine import pipeline
from terrine.cli import app as command
from terrine.errors import InvalidArgument
from terrine.events import Budget
from terrine.ledger import Ledger
from terrine.verify import manifest, refuse_lies, signing, verify
from tests.pipeline.conftest import SCHEMA, write_table

FILES = (*manifest.HANDED_ON, *manifest.MAY_BE_HANDED_ON, manifest.MANIFEST)


def lie(folder, **given):
    found = verify(folder, **given)
    assert not found.ok
    return found.lie.name


def edit(folder, name, change):
    path = folder / name
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record, indent=2))


def forge(folder):
    """Make the manifest anew, as whoever can write the folder can."""
    manifest.write(folder)


def test_a_release_verifies_without_data_or_torch(release):
    found = verify(release)
    assert found.ok, found.lie
    assert {one.name for one in found.unchecked} == {"signature", "ledger", "audit"}
    code = "import sys; from terrine.verify import verify; assert verify(sys.argv[1]).ok and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(release)], check=True)


def test_the_owners_folder_verifies_with_its_audit(trained):
    found = verify(trained / "one")
    assert found.ok, found.lie
    assert "audit" in {one.name for one in found.checks}


def test_the_command(release):
    result = CliRunner().invoke(command.app, ["verify", str(release), "--json"])
    record = json.loads(result.output)
    assert result.exit_code == 0
    assert record["ok"] is True
    assert all({"name", "ok", "detail"} <= one.keys() and one["ok"] for one in record["checks"])
    privacy = (release / "privacy.json").read_text()
    (release / "privacy.json").write_text(re.sub(r'"epsilon": [0-9.]+', '"epsilon": 0.5', privacy))
    result = CliRunner().invoke(command.app, ["verify", str(release)])
    assert result.exit_code == 1
    assert "does NOT verify: manifest: privacy.json" in result.output
    assert json.loads(CliRunner().invoke(command.app, ["verify", str(release), "--json"]).output)["ok"] is False


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FILES), st.integers(0, 10**9), st.integers(0, 7))
def test_every_flipped_bit_is_found_or_immaterial(release, name, place, bit):
    """Immaterial is white space in the manifest, which is compared by what it says."""
    path = release / name
    before = path.read_bytes()
    changed = bytearray(before)
    changed[place % len(before)] ^= 1 << bit
    path.write_bytes(bytes(changed))
    try:
        found = verify(release)
        same = name == manifest.MANIFEST and _said(bytes(changed)) == _said(before)
        assert not found.ok or same
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_in_each_file_is_found(release, name):
    path = release / name
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(bytes(changed))
    assert not verify(release).ok or _said(bytes(changed)) == json.loads((release / manifest.MANIFEST).read_text())


def _said(content):
    try:
        return json.loads(content)
    except ValueError:
        return None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["cut", "empty", "longer", "absent", "other", "folder"])
def test_files_that_are_not_the_runs_own(release, trained, name, how):
    path, content = release / name, (release / name).read_bytes()
    path.unlink()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "longer":
        path.write_bytes(content + b"\n{}")
    elif how == "other":
        shutil.copy(trained / "dear" / name, path)
    elif how == "folder":
        path.mkdir()
    found = verify(release)
    may_be_absent = how in ("absent", "folder") and name in manifest.MAY_BE_HANDED_ON
    same = path.is_file() and path.read_bytes() == content  # two runs of one schema have one model.json
    assert found.ok == (may_be_absent or same), (found.lie, how)


def test_another_runs_model_of_the_same_plan_is_found(release, trained):
    shutil.copy(trained / "two" / "model.safetensors", release / "model.safetensors")
    assert lie(release) == "manifest"


def test_reordered_json_is_another_file(release):
    record = json.loads((release / "privacy.json").read_text())
    (release / "privacy.json").write_text(json.dumps(dict(reversed(record.items())), indent=2))
    assert lie(release) == "manifest"


# -- edits by somebody who makes the manifest anew: what contradicts the events is found all the same ----------


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda p: p.update(epsilon=0.5), "claim"),
        (lambda p: p.update(epsilon=20.0), "claim"),
        (lambda p: p.update(delta=0.1), "claim"),
        (lambda p: p.update(delta=1e-9), "claim"),
        (lambda p: p["epsilon_certified"].update(upper=0.1), "claim"),
        (lambda p: p.update(unit="person"), "unit"),
        (lambda p: p.update(neighbours="replace-one"), "unit"),
        (lambda p: p.update(noise=100.0), "facts"),
        (lambda p: p.update(steps=1), "facts"),
        (lambda p: p.update(examples=4_000_000), "facts"),
        (lambda p: p.update(lot=1), "facts"),
        (lambda p: p.update(rate=1e-6), "facts"),
        (lambda p: p.update(reproducible_noise_for_tests_only=True), "unit"),
        (lambda p: p.update(epsilon="2"), "card"),
        (lambda p: p.update(epsilon=None), "claim"),
        (lambda p: p.pop("delta"), "manifest"),
        (lambda p: p["events"].pop("event"), "claim"),
        (lambda p: p.update(method="magic"), "facts"),
        (lambda p: p.update(weak_guarantee="epsilon is above 20"), "facts"),
        (lambda p: p.update(people=400), "facts"),
        (lambda p: p.update(people=0), "facts"),
        (lambda p: p.update(examples=True), "facts"),
        (lambda p: p.update(examples=400.0), "facts"),
        (lambda p: p.update(examples=40_000, lot=10_000), "card"),
        (lambda p: p.update(epochs=0.001), "facts"),
        (lambda p: p.update(sampler="shuffled epochs"), "facts"),
        (lambda p: p.update(delta=str(p["delta"])), "claim"),
        (lambda p: p.update(generator="seed 7"), "card"),
        (lambda p: p.update(public_facts="nothing"), "card"),
        (lambda p: p.update(clip=0.0), "facts"),
        (lambda p: p.update(learning_rate=-1.0), "facts"),
    ],
)
def test_a_forged_claim_contradicts_its_events(release, change, name):
    edit(release, "privacy.json", change)
    try:
        forge(release)
    except InvalidArgument:
        assert name == "manifest"
    found = verify(release)
    assert not found.ok
    assert name in {one.name for one in found.checks if not one.ok}


def test_quieter_events_cost_more_than_the_claim(release):
    def quieter(record):
        text = json.dumps(record["events"])
        record["events"] = json.loads(re.sub(r'("noise": )([0-9.]+)', r"\g<1>0.4", text, count=1))

    edit(release, "privacy.json", quieter)
    (release / "events.json").unlink()
    forge(release)
    assert lie(release) == "claim"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: re.sub(r"epsilon [0-9.]+ at", "epsilon 0.1 at", text),
        lambda text: text + "\n - **Privacy**: epsilon 0.01 at delta 0\n",
        lambda text: text.replace("- **Privacy**", "<!--\n- **Privacy**"),
        lambda text: text.replace("400 private examples", "9,000,000 private examples"),
        lambda text: text.replace("One example", "Whole hospitals"),
        lambda text: re.sub(r"[0-9.]+%", "99.9%", text),
    ],
)
def test_a_forged_card_is_found(release, change):
    text = (release / "model_card.md").read_text()
    assert change(text) != text
    (release / "model_card.md").write_text(change(text))
    forge(release)
    assert lie(release) == "card"


@pytest.mark.parametrize(
    "change",
    [
        lambda a: a.update(epsilon=0.5),
        lambda a: a.update(seed=7),
        lambda a: a.update(person="pid"),
        lambda a: a.update(method="pate"),
        lambda a: a.update(epsilon="garbage"),
        lambda a: a.update(clip=7.5),
        lambda a: a.update(learning_rate=7.5),
        lambda a: a.pop("delta"),
    ],
)
def test_what_was_asked_for_must_fit(release, change):
    edit(release, "run.json", change)
    forge(release)
    assert lie(release) == "asked"


def test_an_accuracy_that_the_events_do_not_pay_for_is_found(release):
    def cheaper(record):
        event = record["events"]["event"]
        event["parts"] = [part for part in event["parts"] if "DiscreteLaplace" not in json.dumps(part)]

    edit(release, "privacy.json", cheaper)
    (release / "events.json").unlink()
    forge(release)
    assert "results" in {one.name for one in verify(release).checks if not one.ok}


def test_weights_that_are_none(release):
    path = release / "model.safetensors"
    before = path.read_bytes()
    length = int.from_bytes(before[:8], "little")
    for after in (
        before[: 8 + length] + b"\xff" * (len(before) - 8 - length),
        before.replace(b'"F32"', b'"I32"'),
        before.replace(b'"shape":[2]', b'"shape":[-2]'),
    ):
        path.write_bytes(after)
        forge(release)
        assert lie(release) == "model"


@pytest.mark.parametrize("which", [["classes"], ["schema", "label", "classes"]])
def test_classes_in_another_order_than_the_schemas_are_found(release, which):
    """Turned round, they turned every prediction round. Both at once nobody can see: that a signature binds."""

    def turned(record):
        for name in which[:-1]:
            record = record[name]
        record[which[-1]].reverse()

    edit(release, "model.json", turned)
    forge(release)
    assert lie(release) == "model"


def test_what_is_no_part_of_the_release_is_named(trained, release, tmp_path):
    """A rewritten report beside a signed release read as verified."""
    shutil.copytree(trained / "one", tmp_path / "run")
    (tmp_path / "run" / "report.html").write_text("epsilon 0.0001, certified")
    (tmp_path / "run" / "CERTIFICATE.md").write_text("epsilon 0.0001, certified")
    [told] = [one.detail for one in verify(tmp_path / "run").unchecked if one.name == "others"]
    assert "CERTIFICATE.md, report.html: no part of the release" in told
    assert "others" in {one.name for one in verify(release).checks}


def test_an_audit_that_cannot_be_read_is_a_lie_and_no_traceback(trained, tmp_path):
    shutil.copytree(trained / "one", tmp_path / "run")
    (tmp_path / "run" / "audit" / "canaries.npy").write_bytes(b"PK\x03\x04junk")
    assert lie(tmp_path / "run") == "audit"


def test_a_seeded_run_is_no_release(tmp_path):
    (tmp_path / "people.schema.toml").write_text(SCHEMA)
    table = write_table(tmp_path / "people.csv")
    asked = pipeline.Settings(epsilon=2.0, table=str(table), label="ill", epochs=2, lot=100, seed=1)
    pipeline.train(asked, tmp_path / "run")
    assert lie(tmp_path / "run") == "seed"
    refuse_lies(tmp_path / "run")  # it does not lie about it


# -- signatures ------------------------------------------------------------------------------------------------


def test_signed_releases(release, trained, tmp_path):
    private, public = signing.new_key(tmp_path / "mine")
    _, others = signing.new_key(tmp_path / "other")
    assert private.stat().st_mode & 0o077 == 0
    assert lie(release, signed_by=public) == "signature"
    signing.sign(release, signing.load_private(private))
    found = verify(release, signed_by=public)
    assert found.ok
    assert "signature" in {one.name for one in found.checks}
    assert lie(release, signed_by=others) == "signature"
    shutil.copy(trained / "two" / "model.safetensors", release / "model.safetensors")
    forge(release)
    assert lie(release) == "signature"  # the envelope is about another manifest, which needs no key to see
    (release / manifest.SIGNED).unlink()
    assert verify(release).ok  # nobody can tell without a signature
    assert lie(release, signed_by=public) == "signature"


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.update(payload=e["payload"][:-8]),
        lambda e: e.update(payloadType="text/plain"),
        lambda e: e.update(signatures=[]),
        lambda e: e["signatures"][0].update(sig="AAAA"),
        lambda e: e["signatures"][0].update(sig=5),
        lambda e: e.pop("payload"),
    ],
)
def test_forged_envelopes(release, tmp_path, change):
    private, public = signing.new_key(tmp_path / "mine")
    signing.sign(release, signing.load_private(private))
    edit(release, manifest.SIGNED, change)
    assert lie(release, signed_by=public) == "signature"


def test_keys_are_not_overwritten_and_must_be_keys(tmp_path):
    private, public = signing.new_key(tmp_path / "mine")
    with pytest.raises(InvalidArgument, match="there already"):
        signing.new_key(tmp_path / "mine")
    with pytest.raises(InvalidArgument, match="no private key"):
        signing.load_private(public)
    with pytest.raises(InvalidArgument, match="no public key"):
        signing.load_public(private)


def test_train_signs(tmp_path):
    (tmp_path / "people.schema.toml").write_text(SCHEMA)
    table = write_table(tmp_path / "people.csv")
    private, public = signing.new_key(tmp_path / "mine")
    asked = pipeline.Settings(epsilon=2.0, table=str(table), label="ill", epochs=2, lot=100)
    with pytest.raises(InvalidArgument, match="no private key"):
        pipeline.train(asked, tmp_path / "run", sign=public)
    assert not (tmp_path / "run").exists()
    pipeline.train(asked, tmp_path / "run", sign=private)
    assert verify(tmp_path / "run", signed_by=public).ok


# -- the ledger ------------------------------------------------------------------------------------------------


def test_the_charge_must_be_in_the_ledger(tmp_path):
    (tmp_path / "people.schema.toml").write_text(SCHEMA)
    table = write_table(tmp_path / "people.csv")
    asked = pipeline.Settings(epsilon=2.0, table=str(table), label="ill", epochs=2, lot=100)
    url, other = f"sqlite:///{tmp_path}/book.db", f"sqlite:///{tmp_path}/other.db"
    with Ledger.open(url) as book:
        account = book.account("patients", budget=Budget(20, 1e-3))
        pipeline.train(asked, tmp_path / "run", account=account, head=book.head)
        with (tmp_path / "export.jsonl").open("w") as file:
            book.export(file)
    with Ledger.open(other) as book:
        book.account("patients", budget=Budget(20, 1e-3))
    assert verify(tmp_path / "run", ledger=url).ok
    assert verify(tmp_path / "run", statement=tmp_path / "export.jsonl").ok
    assert lie(tmp_path / "run", ledger=other) == "ledger"
    edit(tmp_path / "run", "privacy.json", lambda p: p["ledger"].update(charge="0" * 64))
    forge(tmp_path / "run")
    assert lie(tmp_path / "run", ledger=url) == "ledger"
    with pytest.raises(InvalidArgument):
        verify(tmp_path / "nowhere")


def test_a_run_that_was_charged_to_nobody_is_in_no_ledger(release, tmp_path):
    url = f"sqlite:///{tmp_path}/book.db"
    with Ledger.open(url) as book:
        book.account("patients", budget=Budget(20, 1e-3))
    assert lie(release, ledger=url) == "ledger"


# -- nobody goes on with a folder that lies --------------------------------------------------------------------


@pytest.mark.parametrize("words", [["report"], ["predict", "new.csv"], ["audit", "run"]])
def test_report_predict_and_audit_verify_first(trained, tmp_path, words):
    folder = tmp_path / "run"
    shutil.copytree(trained / "one", folder)
    (tmp_path / "new.csv").write_text("name,age,city\na,95,south\n")
    text = (folder / "privacy.json").read_text()
    (folder / "privacy.json").write_text(re.sub(r'"epsilon": [0-9.]+', '"epsilon": 0.5', text))
    told = [words[0], *(["run"] if words[0] == "audit" else []), str(folder)]
    told += [str(tmp_path / "new.csv")] if words[0] == "predict" else []
    result = CliRunner().invoke(command.app, told)
    assert isinstance(result.exception, InvalidArgument)
    assert "does not verify: manifest: privacy.json" in str(result.exception)
    with pytest.raises(InvalidArgument, match="does not verify"):
        pipeline.load(folder)


def test_the_line_in_the_report_works_as_printed(trained, monkeypatch):
    folder = trained / "one"
    result = CliRunner().invoke(command.app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    page = (folder / "report.html").read_text()
    monkeypatch.chdir(folder)
    for line in re.findall(r"<code>(terrine [^<]*)</code>", page):
        result = CliRunner().invoke(command.app, line.split()[1:])
        assert result.exit_code == 0, (line, result.output)
    assert "lies between 2 and 2" not in page
