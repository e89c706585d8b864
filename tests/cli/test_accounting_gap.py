"""A bound that is far from its lower twin is printed as a range."""

from typer.testing import CliRunner

from terrine.cli.app import app


def said(*words: str) -> str:
    result = CliRunner().invoke(app, ["epsilon", *words])
    assert result.exit_code == 0
    return result.stdout


def test_a_wide_gap_is_said_and_a_narrow_one_is_not():
    assert "What is proven is a range" in said("--noise", "1", "--rate", "1e-3", "--steps", "1e18", "--delta", "1e-5")
    assert "range" not in said("--noise", "4", "--rate", "0.01", "--steps", "10000", "--delta", "1e-5")
