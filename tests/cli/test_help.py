"""Every command has help with a usage line and an example, and every listing has --json."""

import click
import pytest
from click.testing import CliRunner

from opendataflow_dagster.cli.app import COMMANDS, Commands, app

LISTINGS = {
    "doctor",
    "status",
    "runs",
    "history",
    "history clean",
    "why",
    "drift",
    "sql",
    "dataset list",
    "job list",
    "clean",
    "compact",
    "validate",
}


def commands() -> list[str]:
    found = []
    for name in COMMANDS:
        command = Commands().get_command(click.Context(app), name)
        if isinstance(command, click.Group):
            found += [f"{name} {sub}" for sub in command.commands]
        found.append(name)
    return found


@pytest.mark.parametrize("name", commands())
def test_a_command_answers_help(name: str) -> None:
    done = CliRunner().invoke(app, [*name.split(), "--help"], prog_name="odf")
    assert done.exit_code == 0, repr(done.exception)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"Usage: odf {name}")
    assert len(lines) > 3
    assert lines[2].strip(), "a sentence says what it does"


@pytest.mark.parametrize("name", sorted(LISTINGS))
def test_a_listing_has_json(name: str) -> None:
    assert "--json" in CliRunner().invoke(app, [*name.split(), "--help"], prog_name="odf").stdout


@pytest.mark.parametrize(
    "name",
    ["status", "runs", "history", "why", "sql", "dml", "doctor", "encrypt", "decrypt", "rotate"],
)
def test_help_has_an_example(name: str) -> None:
    assert "Example: " in (
        done := CliRunner().invoke(app, [name, "--help"], prog_name="odf").stdout
    )
    assert f"odf {name}" in done.split("Example: ")[1]


def test_the_list_of_commands_has_them_all() -> None:
    shown = CliRunner().invoke(app, ["--help"], prog_name="odf").stdout
    listed = {line.split()[0] for line in shown.split("Commands:")[1].splitlines() if line.strip()}
    assert set(COMMANDS) <= listed
