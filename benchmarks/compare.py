"""Is NEW slower than OLD? `python benchmarks/compare.py OLD NEW PROGRAM [the program's options]`.

OLD and NEW are commits. The package and the SQL of each are checked out into a folder of their own;
both are measured by the same programs: those of the checkout that this is started in. OLD, NEW and
OLD again take turns, nine times. Each turn is a short run of PROGRAM (`--slice`), on a database of
its own, which compares with a rival that no commit changes. The result is the median of NEW's
ratios relative to OLD's in the same round, beside the difference of OLD from itself.

Exit code 0 if nothing is slower: by at most 5%, or by no more than OLD differs from itself.

    python benchmarks/compare.py main HEAD claims
    python benchmarks/compare.py main HEAD runjob --only cold
    python benchmarks/compare.py HEAD $(git stash create) claims --only sqlite
"""

import argparse
import compileall
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import venv
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

from measure import concluded, progress  # noqa: E402
from report import aligned, spread  # noqa: E402

ROUNDS = 9
TOLERATED = 0.05
OLD, NEW, AGAIN = "old", "new", "old again"

SCRIPT = """#!{python}
import sys
from {module} import {function}
sys.exit({function}())
"""


class Side(NamedTuple):
    """A commit, and what runs its code."""

    commit: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / ".venv" / "bin" / "python"


class Change(NamedTuple):
    """How NEW's speed compares with OLD's, for one comparison with the rival."""

    what: str
    rivals: list[float]
    """Ours relative to the rival, of OLD."""

    changes: list[float]
    """NEW's speed relative to OLD's, for each round."""

    noise: list[float]
    """OLD's speed relative to OLD's, for each round."""

    @property
    def change(self) -> float:
        return statistics.median(self.changes)

    @property
    def spread(self) -> float:
        """Return how much OLD differs from itself, in half of the rounds."""
        return statistics.median(max(ratio, 1 / ratio) - 1 for ratio in self.noise)

    @property
    def verdict(self) -> str:
        off = max(self.change, 1 / self.change) - 1
        if off <= TOLERATED:
            return f"within {TOLERATED:.0%}"
        if off <= self.spread:
            return "within the spread"
        return "faster" if self.change > 1 else "SLOWER"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"at least {ROUNDS}")
    parser.add_argument("--tiny", action="store_true", help="one round, in seconds; no verdict")
    parser.add_argument("old", metavar="OLD")
    parser.add_argument("new", metavar="NEW")
    parser.add_argument("program", metavar="PROGRAM", help="such as claims or runjob")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of the program")
    given = parser.parse_args(arguments)
    program = given.program.removesuffix(".py")
    if given.rounds < ROUNDS:
        parser.error(f"fewer than {ROUNDS} rounds say nothing")
    if not (HERE / f"{program}.py").exists():
        parser.error(f"there is no {HERE / program}.py")
    words = [program, "--tiny" if given.tiny else "--slice", *given.options]
    with tempfile.TemporaryDirectory(prefix="odf-compare-") as folder:
        old = checked_out(given.old, Path(folder, "old"))
        new = checked_out(given.new, Path(folder, "new"))
        print(
            f"OLD is {named(old)}, NEW is {named(new)}; {program}.py is this checkout's", flush=True
        )
        measured = measure(old, new, words, 1 if given.tiny else given.rounds)
    found = changes(measured)
    show(found, judged=not given.tiny)
    return int(not given.tiny and any(change.verdict == "SLOWER" for change in found))


# --- two commits, side by side ---


def checked_out(commit: str, folder: Path) -> Side:
    """Check out a commit's package and SQL beside our programs, with a Python that imports them."""
    folder.mkdir()
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True)
    if packed.returncode:
        raise SystemExit(f"{commit} isn't a commit here: {packed.stderr.decode().strip()}")
    subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)
    for name in ("benchmarks", "tests"):
        shutil.rmtree(folder / name, ignore_errors=True)
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    side = Side(commit, folder)
    make_environment(side)
    compileall.compile_dir(folder / "opendataflow_dagster", quiet=1)
    imported = subprocess.check_output(
        [side.python, "-c", "import opendataflow_dagster as package; print(package.__file__)"],
        cwd=folder / "benchmarks",
        env=environment(),
        text=True,
    )
    if not imported.startswith(str(folder)):
        raise RuntimeError(f"{commit} would be measured with the package of {imported.strip()}")
    return side


def named(side: Side) -> str:
    """Return the commit as given, and its hash."""
    line = ["git", "rev-parse", "--short", side.commit]
    return f"{side.commit} ({subprocess.check_output(line, cwd=ROOT, text=True).strip()})"


def make_environment(side: Side) -> None:
    """Create a virtual environment with the packages of this one, except the side's package.

    Its commands belong to the side, too: those of this environment import what is installed here.
    A folder that a .pth file names isn't searched for .pth files, so an editable install of the
    package isn't seen.
    """
    home = side.folder / ".venv"
    venv.create(home, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    paths = dict.fromkeys([str(side.folder), *map(sysconfig.get_path, ("purelib", "platlib"))])
    (home / "lib" / version / "site-packages" / "side.pth").write_text("\n".join(paths) + "\n")
    commands = {entry.name: entry.value for entry in entry_points(group="console_scripts")}
    project = tomllib.loads((side.folder / "pyproject.toml").read_text())["project"]
    for name, place in {**commands, **project["scripts"]}.items():
        module, _, function = place.partition(" ")[0].partition(":")
        script = home / "bin" / name
        if function.isidentifier() and not script.exists():
            text = SCRIPT.format(python=side.python, module=module, function=function)
            script.write_text(text)
            script.chmod(0o755)


def environment() -> dict[str, str]:
    """Return our environment without variables that would lead Python to another package."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


# --- turns ---


def measure(old: Side, new: Side, words: Sequence[str], rounds: int) -> list[dict[str, list[dict]]]:
    """Return the ratios of each side by round; the order changes from round to round."""
    turns = [(OLD, old), (NEW, new), (AGAIN, old)]
    measured, start = [], time.monotonic()
    for number in range(rounds):
        taken = {}
        first = number % len(turns)
        for name, side in turns[first:] + turns[:first]:
            minutes = (time.monotonic() - start) / 60
            progress(f"round {number + 1} of {rounds}: {name}, {minutes:.1f} min")
            taken[name] = turn(side, words)
        measured.append(taken)
    progress("")
    return measured


def turn(side: Side, words: Sequence[str]) -> list[dict]:
    """Run the program once, briefly, on the code of a side; return its ratios."""
    program, *options = words
    file = side.folder / "ratios.json"
    line = [side.python, side.folder / "benchmarks" / f"{program}.py", *options, "--json", file]
    done = subprocess.run(line, cwd=side.folder, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{program}.py failed on {side.commit}:\n{(done.stdout + done.stderr)[-4000:]}"
        )
    return json.loads(file.read_text())["ratios"]


# --- the result ---


def changes(measured: list[dict[str, list[dict]]]) -> list[Change]:
    """Return how much faster NEW is than OLD, and OLD than OLD, for each comparison."""
    found = []
    for at, first in enumerate(measured[0][OLD]):
        rivals, ratios, noise = [], [], []
        for taken in measured:
            one, other, again = (
                statistics.median(taken[name][at]["ratios"]) for name in (OLD, NEW, AGAIN)
            )
            sign = 1 if first["better"] == "more" else -1
            rivals += [one, again]
            ratios.append((other / math.sqrt(one * again)) ** sign)
            noise.append((again / one) ** sign)
        found.append(Change(first["what"], rivals, ratios, noise))
    return found


def show(found: Sequence[Change], *, judged: bool) -> None:
    columns = ["OLD's ratio", "NEW's speed to OLD's", "OLD's to OLD's", "spread", ""]
    rows = [
        [
            change.what,
            spread(change.rivals),
            spread(change.changes),
            spread(change.noise),
            f"±{change.spread:.1%}",
            change.verdict if judged else "not judged",
        ]
        for change in found
    ]
    print("\nMedian of the rounds (least–most); a speed above 1 is faster")
    print("\n".join(aligned(columns, rows)))


if __name__ == "__main__":
    sys.exit(concluded(main))
