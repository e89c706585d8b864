"""What a newcomer sees: the order of commands, an example for each that parses, the unit in words."""

import shlex

import pytest
import typer.main
from typer.testing import CliRunner

from terrine import __version__
from terrine.cli.app import app
from terrine.cli.examples import EXAMPLES

ROOT = typer.main.get_command(app)


def commands(group, path=()):
    for name, command in group.commands.items():
        yield from commands(command, (*path, name)) if hasattr(command, "commands") else [((*path, name), command)]


EVERY = {" ".join(path): command for path, command in commands(ROOT)}


def test_every_command_has_an_example_and_no_example_is_stale():
    assert set(EXAMPLES) == set(EVERY)


@pytest.mark.parametrize("name", EVERY)
def test_the_example_parses(name):
    words = shlex.split(EXAMPLES[name])
    assert words[: 1 + len(name.split())] == ["terrine", *name.split()]
    EVERY[name].make_context(name, words[1 + len(name.split()) :])  # does not run it


@pytest.mark.parametrize("name", EVERY)
def test_help_shows_the_example_and_says_what_every_option_is(name):
    shown = CliRunner().invoke(app, [*name.split(), "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert "Example: terrine" in shown.output
    assert all(option.help for option in EVERY[name].params if option.param_type_name == "option")


def test_commands_come_in_the_order_of_a_newcomers_day():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).output
    wanted = ["schema", "train", "predict", "verify", "query", "ledger", "epsilon"]
    places = [shown.index(f"│ {name} ") for name in wanted]
    assert places == sorted(places)
    assert "hold for one unit" in shown


def test_version_and_completion():
    assert CliRunner().invoke(app, ["--version"]).output.strip() == __version__
    shown = CliRunner().invoke(app, ["--show-completion", "bash"], env={"SHELL": "/bin/bash"})
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).output
    assert shown.exit_code in (0, 1)  # 1 where the shell cannot be told
