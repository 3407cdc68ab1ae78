"""Every command has help with a usage line and examples that parse; every listing has --json."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete, get_completion_class
from click.testing import CliRunner

from opendataflow_dagster.cli.app import COMMANDS, GROUPS, Commands, app
from opendataflow_dagster.store.store import Store
from tests.explain.test_explain import job
from tests.support.store_fixtures import sql

ROOT = Path(__file__).parents[2]
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


def help_of(*words: str) -> str:
    done = CliRunner().invoke(app, [*words, "--help"], prog_name="odf")
    assert done.exit_code == 0, repr(done.exception)
    return done.stdout


@pytest.mark.parametrize("name", commands())
def test_a_command_answers_help(name: str) -> None:
    lines = help_of(*name.split()).splitlines()
    assert lines[0].startswith(f"Usage: odf {name}")
    assert lines[2].strip(), "a sentence says what it does"
    assert lines[3] == "", "the first sentence fits a line of 80 columns"
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", sorted(LISTINGS))
def test_a_listing_has_json(name: str) -> None:
    assert "--json" in help_of(*name.split())


def lines_of(example: str) -> list[list[str]]:
    """Return the words of each command in a line of shell."""
    lexer = shlex.shlex(example, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    lines: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("();<>|&"):
            lines.append([])
        else:
            lines[-1].append(word)
    return lines


@pytest.mark.parametrize("name", commands())
def test_help_has_examples_that_parse(name: str) -> None:
    shown = help_of(*name.split()).replace("\\\n", "")
    examples = re.findall(r"^ +Example: (.*)$", shown, re.MULTILINE)
    typed = [words for example in examples for words in lines_of(example) if "odf" in words]
    assert any(f"odf {name}" in " ".join(words) for words in typed), "an example of this command"
    for words in typed:
        parse(words[words.index("odf") + 1 :])


def parse(arguments: list[str]) -> None:
    """Let the command read its arguments; nothing runs."""
    root = click.Context(app, info_name="odf")
    command, rest = app, arguments
    while isinstance(command, click.Group) and rest and rest[0] in command.list_commands(root):
        command, rest = command.get_command(root, rest[0]), rest[1:]
        assert command is not None
    assert command is not app or arguments[0].startswith("-"), f"no command {arguments[0]}"
    command.make_context(arguments[0], rest, parent=root)


PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*/*.md")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_commands_in_blocks_of_the_documents_parse(page: Path) -> None:
    """Tables of benchmarks begin with a command, too."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    for line in lines if page.stem != "benchmarks" else ():
        if line.startswith("odf ") and "…" not in line:
            for words in lines_of(re.sub(r"\d?>&?\s*[^\s;|&]+|<\s*\S+|\\$", "", line)):
                if words[:1] == ["odf"] and not words[1].startswith("-"):
                    parse(words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_commands_in_the_text_of_the_documents_parse(page: Path) -> None:
    """A text may name a command or an option without its values, or with a word in capitals."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`(odf [a-z][^`…]*)`", text):
        line = re.sub(r"\d?>&?\s*[^\s;|&]+|<\s*\S+", "", span.replace("\\|", "|"))
        for words in lines_of(line):
            if words[:1] == ["odf"] and len(words) > 1 and not words[1].startswith("-"):
                with suppress(click.MissingParameter, click.BadOptionUsage):
                    parse([re.sub(r"^N$", "1", word) for word in words[1:]])


def test_the_list_of_commands_has_them_all_in_groups() -> None:
    shown = help_of()
    for group, names in GROUPS.items():
        section = shown.split(f"\n{group}:\n")[1].split("\n\n")[0].splitlines()
        assert [line.split()[0] for line in section] == list(names), "a line for each"
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "incomplete", "found"),
    [
        (["why"], "l", ["load"]),
        (["status"], "", ["a", "b", "load", "raw"]),
        (["ready"], "r", ["raw"]),
        (["history", "--dataset"], "a", ["a"]),
        (["job", "add", "new", "--in"], "b", ["b"]),
        (["why", "load"], "", []),
    ],
)
def test_a_shell_completes_jobs_and_datasets(
    store: Store,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    incomplete: str,
    found: list[str],
) -> None:
    monkeypatch.setenv("DATAFLOW_URL", url)
    job(store, "load", "a", "b")
    sql(store, "insert into dataset (datasetid, hostname) values ('raw', '/tmp')")
    complete = ShellComplete(app, {}, "odf", "_ODF_COMPLETE")
    assert [item.value for item in complete.get_completions(words, incomplete)] == found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_line_of_a_shells_startup_file_is_documented(shell: str) -> None:
    kind = get_completion_class(shell)
    assert kind is not None
    source = kind(app, {}, "odf", "_ODF_COMPLETE").source()
    assert f"_ODF_COMPLETE={shell}_complete" in source
    page = (ROOT / "docs" / "configuration.md").read_text().replace("\\|", "|")
    [line] = re.findall(rf"`([^`]*_ODF_COMPLETE={shell}_source odf[^`]*)`", page)
    if shell == "bash":
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        script = f"{line}; complete -p odf"
        done = subprocess.run(["bash", "-ec", script], env={**os.environ, "PATH": path})
        assert done.returncode == 0


def test_completion_without_tables_is_silent_and_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    complete = ShellComplete(app, {}, "odf", "_ODF_COMPLETE")
    assert complete.get_completions(["why"], "") == []
    monkeypatch.setenv("DATAFLOW_TARGET", "nonesuch")
    assert complete.get_completions(["why"], "") == []
    assert os.listdir(tmp_path) == []
    assert capsys.readouterr() == ("", "")
