"""The examples run, and print what they promise."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_survey():
    printed = run("survey.py")
    assert "1.0986 = ln 3" in printed
    assert "1.9459 = ln 7" in printed
    assert "about 10.0%" in printed


def test_first_names():
    assert "off by more than 12.2" in run("first_names.py")


def test_average_rating():
    assert "declared by the caller" in run("average_rating.py")


def test_private_median():
    assert "smooth sensitivity" in run("private_median.py")


def adult_like(path, rows=3000):
    """A small table in the official format; groups differ in size, and small ones often agree on the income."""
    draw = random.Random(0)
    lines = []
    for _ in range(rows):
        age = min(90, max(17, int(draw.gauss(38, 14))))
        sex, race = draw.choice(["Male", "Female"]), draw.choices(["White", "Black", "Other"], [85, 10, 5])[0]
        marital = draw.choice(["Never-married", "Married-civ-spouse", "Divorced", "Widowed"])
        income = ">50K" if draw.random() < (0.4 if marital == "Married-civ-spouse" else 0.06) else "<=50K"
        lines.append(
            f"{age}, Private, 77516, Bachelors, 13, {marital}, Sales, Husband, {race}, {sex}, "
            f"0, 0, 40, United-States, {income}"
        )
    path.write_text("\n".join(lines) + "\n\n")


def test_linkage_works_on_a_table_of_the_official_format(tmp_path):
    adult_like(tmp_path / "adult.data")
    printed = run("linkage.py", tmp_path / "adult.data")
    exposed = int(printed.split("agree: ")[1].split()[0].replace(",", ""))
    assert exposed > 20
    named = int(printed.split("income of ")[1].split(" of ")[0])
    assert named > 150
    assert "with DP, epsilon 1" in printed


def test_linkage_works_on_the_real_table():
    folder = Path(os.environ.get("TERRINE_DATA", "/nowhere"))
    found = [folder / name for name in ("adult.data", "adult.data.gz") if (folder / name).exists()]
    if not found:
        pytest.skip("no adult.data in $TERRINE_DATA")
    printed = run("linkage.py", found[0])
    assert "32,561 people" in printed
    assert int(printed.split("agree: ")[1].split()[0].replace(",", "")) > 500
