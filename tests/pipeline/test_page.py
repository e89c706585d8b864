"""The report is a page that a browser draws: looked at in headless Chromium where there is one."""

import json
import struct
import subprocess
import zlib

import numpy as np
import pytest
from typer.testing import CliRunner

from terrine import pipeline
from terrine.cli.app import app
from terrine.events import Composed, Gaussian, PoissonSampled, Repeated
from terrine.pipeline import pages
from terrine.report.accountants import over_training, so_far
from terrine.report.page import rounded_up
from tests import chromium


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page") / "run"
    finished = pipeline.train(pipeline.Settings(epsilon=3.0, data="digits", model="linear", epochs=5), folder)
    pages.write(finished)
    return folder / "report.html"


def headless(folder):
    return [chromium.CHROMIUM, "--headless=new", *chromium.FLAGS, f"--user-data-dir={folder / 'profile'}"]


def pixels(path):
    """A PNG's pixels; enough of the format for a screenshot."""
    content = path.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", content[16:26])
    assert depth == 8
    channels = {2: 3, 6: 4}[kind]
    at, data = 8, b""
    while at < len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        if content[at + 4 : at + 8] == b"IDAT":
            data += content[at + 8 : at + 8 + size]
        at += 12 + size
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    return rows[:, 1:]


@chromium.wanted
def test_the_page_is_drawn_without_a_network(report, tmp_path):
    picture = tmp_path / "page.png"
    command = [*headless(tmp_path), "--hide-scrollbars", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--window-size=1000,2600"]
    subprocess.run([*command, f"--screenshot={picture}", report.as_uri()], check=True, capture_output=True, timeout=120)
    drawn = pixels(picture)
    assert len(drawn) == 2600
    bands = drawn[: 2600 // 10 * 10].reshape(10, -1)
    assert all(len(np.unique(band)) > 8 for band in bands[:8])  # there is something to see all the way down
    shown = subprocess.run(
        [*command, "--dump-dom", report.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    assert "Privacy report: digits" in shown.stdout


def test_the_page_says_the_claim_in_numbers_and_words(report):
    text = report.read_text()
    assert "epsilon 3 at delta 1e-05" in text
    assert "coin flip" in text
    assert "consistent with the claim" in text
    assert "the published test set, which needs no protection" in text


def test_the_page_and_the_command_say_the_same_of_the_best_attack(report, tmp_path):
    claim = json.loads((report.parent / "privacy.json").read_text())
    (tmp_path / "events.json").write_text(json.dumps(claim["events"]))
    said = CliRunner().invoke(
        app, ["epsilon", "--events", str(tmp_path / "events.json"), "--delta", str(claim["delta"])]
    )
    sentence = said.stdout[said.stdout.index("The best possible attack") :].strip()
    assert sentence in report.read_text()


def test_a_partial_run_costs_less_and_what_was_done_once_counts_whole():
    step = PoissonSampled(Gaussian(noise=2.0), rate=0.1)
    whole = Composed([Gaussian(noise=20.0), Repeated(step, 100)])
    assert so_far(whole, 0.25) == Composed([Gaussian(noise=20.0), Repeated(step, 25)])
    assert so_far(whole, 1.0) == whole
    shares, curves = over_training(whole, 1e-5, points=4)
    assert shares == [0.25, 0.5, 0.75, 1.0]
    assert {"tight", "renyi"} <= set(curves)
    assert all(values == sorted(values) for values in curves.values())
    assert all(curves["tight"][-1] <= values[-1] * (1 + 1e-9) for values in curves.values())


def test_a_printed_epsilon_is_never_below_the_true_one():
    for value in (2.9999985, 1.00001, 0.123451, 7.0, 123456.7):
        assert float(rounded_up(value)) >= value
    assert rounded_up(2.9999985) == "3"


ASKED_BY_A_REVIEWER = (
    "Who is protected?",
    "Against which difference?",
    "How much can be learned?",
    "Who has to be trusted?",
    "What was released, and what was not?",
    "What does it add to earlier releases?",
    "What was done to the data before?",
    "Was anything tuned on the data?",
    "Where does the randomness come from?",
    "What of floating point?",
    "What of timing and other side channels?",
    "Who ran it, and when?",
    "On which inputs?",
)


def test_the_page_answers_what_a_reviewer_asks_in_order(report):
    text = report.read_text()
    places = [text.index(question) for question in ASKED_BY_A_REVIEWER]
    assert places == sorted(places)
    assert "charged to no ledger" in text
    card = (report.parent / "model_card.md").read_text()
    assert all(f"**{question}**" in card for question in ASKED_BY_A_REVIEWER if question not in _FOR_THE_OWNER)


_FOR_THE_OWNER = ("What does it add to earlier releases?", "Who ran it, and when?", "On which inputs?")


@pytest.mark.parametrize(("lower", "upper"), [(2.0, 2.0), (1.9999999999, 2.0), (1.99, 2.0), (0.0, 1e-9)])
def test_the_enclosure_never_says_the_same_number_twice(lower, upper):
    said = pages._enclosed({"lower": lower, "upper": upper})
    numbers = [word.rstrip(".") for word in said.split() if word[0].isdigit()]
    assert len(set(numbers)) == len(numbers)


@chromium.wanted
def test_the_page_fits_a_phone_and_a4(report, tmp_path):
    """At 400 pixels nothing is wider than the window; printed, it is a PDF of A4 pages."""
    command = headless(tmp_path)
    narrow = tmp_path / "narrow.html"
    narrow.write_text(
        f"<iframe id=page src='{report.as_uri()}' width=400 height=900></iframe><p id=told></p><script>"
        "page.onload = () => {"
        "told.textContent = 'widest ' + page.contentDocument.documentElement.scrollWidth }</script>"
    )
    shown = subprocess.run(
        [*command, "--allow-file-access-from-files", "--virtual-time-budget=8000", "--dump-dom",
         narrow.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "widest 400" in shown.stdout or "widest 385" in shown.stdout, shown.stdout[-300:]
    printed = tmp_path / "page.pdf"
    subprocess.run(
        [*command, f"--print-to-pdf={printed}", report.as_uri()], check=True, capture_output=True, timeout=120
    )
    assert printed.read_bytes().startswith(b"%PDF")
    assert b"/MediaBox [0 0 594.95996 841.91998]" in printed.read_bytes() or b"841.9" in printed.read_bytes()
