"""Plays the commands of a page of documents, and compares what they print with what the page says.

In a block of `console`, `$` begins a command; what it prints follows. A line `…` stands for any
lines. Folder and variables last from one command to the next, as in a shell.
What a page needs before its reader's first command is such a block, too, in a comment of HTML;
`$CHECKOUT` is the folder of this repository.
`python -m tests.support.transcripts PAGE` plays a page and prints it with the new output.

A page may name a server and folders that a reader has: `stand_ins` gives those of the test instead.
"""

import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.postgres import Server

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r"<<'?(\w+)'?")
SHELL = """[ ! -e "$SHELL_STATE" ] || . "$SHELL_STATE"
set -a
{}
code=$?; {{ export -p; echo "cd '$PWD'"; }} > "$SHELL_STATE"; exit $code"""
SERVER = "db.example:5432"
INSTALLED = 'files("opendataflow_dagster")'
FOLDERS = ("/etc/odf", "/srv/shop")
PASSING = (
    (r"\b\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \w+ \d{4}\b", "(time)"),
    (r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?(\.\d+)?Z?", "(time)"),
    (r'"seconds": [\d.]+', '"seconds": (time)'),
    (r"\bin [\d.]+ ?(s|ms|seconds)\b", "in (time)"),
    (r"\S+@\S+", "(who)"),
    (r"\b[0-9a-f]{12}\b", "(digest)"),
    (r"[ \t]+", " "),
)
"""Parts that differ each time, or depend on the machine."""
PROGRAMS = Path(sys.executable).parent


@contextmanager
def stand_ins(text: str, folder: Path, programs: Path) -> Iterator[tuple[dict[str, str], str]]:
    """What takes the place of the server and folders that a page names, and where commands are."""
    places = {name: str(folder / name[1:]) for name in FOLDERS if name in text}
    for place in places.values():
        Path(place).mkdir(parents=True)
    places[INSTALLED] = f'"{ROOT}"'  # the wheel has sql/ inside of the package
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    if not any(SERVER in block for block in BLOCK.findall(text)):
        yield places, path
        return
    with Server() as server:
        yield places | {SERVER: f"127.0.0.1:{server.port}"}, f"{server.bin}{os.pathsep}{path}"


def play(
    page: Path,
    folder: Path,
    programs: Path = PROGRAMS,
    instead: Mapping[str, str] | None = None,
) -> str:
    """Run the commands of a page in a folder; the page with what they have printed.

    `programs` is the folder of `odf` and Python: that of this environment, or of another one.
    """
    text = page.read_text(encoding="utf-8")
    with stand_ins(text, folder, programs) as (places, path):
        places |= instead or {}
        for name, place in places.items():
            text = text.replace(name, place)
        text = _play(text, folder, path)
    for name, place in places.items():
        text = text.replace(place, name).replace(place.replace(str(folder), "~"), name)
    return text


def _play(text: str, folder: Path, path: str) -> str:
    environment = os.environ | {
        "PATH": path,
        "SHELL_STATE": str(folder / ".shell"),
        "COLUMNS": "100",
        "CHECKOUT": str(ROOT),
        "PIP_QUIET": "3",  # of this machine's index, no word
    }

    def played(block: re.Match[str]) -> str:
        lines = []
        for command, expected in commands(block[1]):
            done = subprocess.run(
                ["bash", "-c", SHELL.format(command)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            lines += [
                "$ " + command,
                *_kept(expected, done.stdout.replace(str(folder), "~").splitlines()),
            ]
        return "\n".join(["```console", *lines, "```"])

    return BLOCK.sub(played, text)


def differences(
    page: Path,
    folder: Path,
    programs: Path = PROGRAMS,
    instead: Mapping[str, str] | None = None,
) -> str:
    """What the commands of a page print now, where that isn't what the page says."""
    said = page.read_text(encoding="utf-8").splitlines()
    now = play(page, folder, programs, instead).splitlines()
    same = [_steady(line) for line in said] == [_steady(line) for line in now]
    return "" if same else "\n".join(difflib.unified_diff(said, now, "page", "played", lineterm=""))


def commands(block: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of a block, each with the lines that it should print."""
    lines = block.splitlines()
    while lines:
        command = lines.pop(0).removeprefix("$ ")
        if found := HEREDOC.search(command):
            while lines and command.splitlines()[-1] != found[1]:
                command += "\n" + lines.pop(0)
        printed = []
        while lines and not lines[0].startswith("$ "):
            printed.append(lines.pop(0))
        yield command, printed


def _kept(expected: list[str], printed: list[str]) -> list[str]:
    """Return what was printed, or the page's form of it if that only leaves out lines."""
    pattern = "\n".join(
        r"(?:.*\n)*?.*" if line == "…" else re.escape(_steady(line)) for line in expected
    )
    same = re.fullmatch(pattern, "\n".join(_steady(line) for line in printed))
    return expected if same else [line.rstrip() for line in printed]


def _steady(line: str) -> str:
    for pattern, word in PASSING:
        line = re.sub(pattern, word, line)
    return line.rstrip()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="odf-tutorial-") as here:
        print(play(Path(sys.argv[1]), Path(here)), end="")
