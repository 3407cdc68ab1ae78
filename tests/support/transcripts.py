"""Plays the commands of a page of documents, and compares what they print with what the page says.

In a block of `console`, `$` begins a command; what it prints follows. A line `…` stands for any
lines. `python -m tests.support.transcripts PAGE` plays a page and prints it with the new output.
"""

import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

BLOCK = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r"<<'?(\w+)'?")
PASSING = (
    (r"\b\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \w+ \d{4}\b", "(time)"),
    (r"\b20\d\d-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?Z?", "(time)"),
    (r"\bin [\d.]+ ?(s|ms|seconds)\b", "in (time)"),
    (r"\S+@\S+", "(who)"),
    (r"\b[0-9a-f]{12}\b", "(digest)"),
    (r"[ \t]+", " "),
)
"""What is another one each time, or depends on the machine."""


PROGRAMS = Path(sys.executable).parent


def play(page: Path, folder: Path, programs: Path = PROGRAMS) -> str:
    """Run the commands of a page in a folder; the page with what they have printed.

    `programs` is the folder of `odf` and Python: that of this environment, or of another one.
    """
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PWD_FILE": str(folder / ".where"),
        "COLUMNS": "100",
    }
    where = folder

    def played(block: re.Match[str]) -> str:
        nonlocal where
        lines = []
        for command, expected in commands(block[1]):
            script = f'{command}\ncode=$?; pwd > "$PWD_FILE"; exit $code'
            done = subprocess.run(
                ["bash", "-c", script],
                cwd=where,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            where = Path((folder / ".where").read_text().strip())
            lines += [
                "$ " + command,
                *_kept(expected, done.stdout.replace(str(folder), "~").splitlines()),
            ]
        return "\n".join(["```console", *lines, "```"])

    return BLOCK.sub(played, page.read_text(encoding="utf-8"))


def differences(page: Path, folder: Path, programs: Path = PROGRAMS) -> str:
    """What the commands of a page print now, where that isn't what the page says."""
    said = page.read_text(encoding="utf-8").splitlines()
    now = play(page, folder, programs).splitlines()
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
    """What was printed; as the page has it, if that leaves out lines and says the same."""
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
