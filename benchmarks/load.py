"""The cost of loading a code location: `python benchmarks/load.py [--quick]`.

200 jobs of a flow.yml, while the database is away: a new process imports everything, builds the
definitions and loads them all, as a code server does when it starts. In alternation, plain Dagster
loads 200 assets with the same dependencies. Then `dg check defs` has to pass, also while the
database is away. Exit code 0 if every target is met.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from measure import concluded, progress
from report import FULL, QUICK, SLICE, TINY, Report, options, spread

HERE = Path(__file__).resolve().parent
JOBS = {FULL: 200, QUICK: 200, SLICE: 200, TINY: 7}
ROUNDS = {FULL: 7, QUICK: 3, SLICE: 3, TINY: 1}
CHAIN_JOBS = 5
"""Jobs in a row, each of which reads what the previous one writes."""

NOWHERE = "postgresql://etl@nowhere.invalid/etl"

LOAD = """\
from locations.{module} import defs
repository = defs.get_repository_def()
repository.load_all_definitions()
print(len(repository.asset_graph.materializable_asset_keys))
"""

OURS = """\
from product import build_definitions
defs = build_definitions(flow="flow.yml")
"""

PLAIN = """\
import dagster as dg

partitions = dg.DynamicPartitionsDefinition(name="days")


def asset(name, deps):
    @dg.asset(name=name, deps=deps, partitions_def=partitions, description=name)
    def made() -> None: ...

    return made


defs = dg.Definitions(assets=[
    asset(f"made{{n}}", [f"made{{n - 1}}"] if n % {chain} else [])
    for n in range({jobs})
])
"""

PROJECT = """\
[project]
name = "locations"
version = "1"

[tool.dg]
directory_type = "project"

[tool.dg.project]
root_module = "locations"
code_location_target_module = "locations.ours"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments)
    report = Report("load", given, ("dagster",))
    jobs, rounds = JOBS[given.scale], ROUNDS[given.scale]
    with tempfile.TemporaryDirectory() as folder:
        write_project(Path(folder), jobs)
        times: dict[str, list[float]] = {"ours": [], "plain": []}
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for module, seconds in times.items():
                seconds.append(loaded(Path(folder), module, jobs))
        progress("dg check defs")
        checked = checks(Path(folder))
    tell(report, jobs, times, checked)
    return report.verdict()


def write_project(folder: Path, jobs: int) -> None:
    """Write a flow.yml of jobs in chains, with its script, and as many assets of plain Dagster."""
    lines = ["flow: load", "jobs:"]
    for number in range(jobs):
        source = f"made{number - 1}" if number % CHAIN_JOBS else f"came{number}"
        lines.append(
            f"  job{number}: {{in: [{source}], out: [made{number}], run: ./job.sh, "
            f"description: Makes {number}, owners: [team:data], policy: {{max_attempts: 3}}}}"
        )
    (folder / "flow.yml").write_text("\n".join(lines) + "\n")
    (folder / "job.sh").write_text("#!/bin/sh\n")
    (folder / "job.sh").chmod(0o755)
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "locations" / "defs").mkdir(parents=True)
    (folder / "locations" / "__init__.py").write_text("")
    (folder / "locations" / "ours.py").write_text(OURS)
    plain = PLAIN.format(jobs=jobs, chain=CHAIN_JOBS)
    (folder / "locations" / "plain.py").write_text(plain)


def loaded(folder: Path, module: str, jobs: int) -> float:
    """Return the seconds in which a new process loads the definitions."""
    line = [sys.executable, "-c", LOAD.format(module=module)]
    start = time.perf_counter()
    done = subprocess.run(line, cwd=folder, env=environment(folder), capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode or int(done.stdout) != jobs:
        raise RuntimeError(f"{module} isn't loaded: {done.stdout}{done.stderr[-2000:]}")
    return seconds


def checks(folder: Path) -> int:
    """Return the exit code of `dg check defs`."""
    line = [str(Path(sys.executable).with_name("dg")), "check", "defs"]
    done = subprocess.run(line, cwd=folder, env=environment(folder), capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], file=sys.stderr)
    return done.returncode


def environment(folder: Path) -> dict[str, str]:
    folders = [str(folder), str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, folders))
    return os.environ | {"DATAFLOW_URL": NOWHERE, "PYTHONPATH": path, "DAGSTER_HOME": str(folder)}


def tell(report: Report, jobs: int, times: dict[str, list[float]], checked: int) -> None:
    ours, plain = times["ours"], times["plain"]
    ratios = [mine / bare for mine, bare in zip(ours, plain, strict=True)]
    report.table(
        f"Loading {jobs} jobs, the database away",
        ["s", "of plain Dagster"],
        [
            ["ours, of a flow.yml", spread(ours), spread(ratios)],
            [f"plain Dagster, {jobs} assets", spread(plain), ""],
        ],
    )
    report.require(f"{jobs} jobs, the database away", ours, most=3, unit=" s")
    report.require("exit code of `dg check defs`, the database away", [checked], most=0)
    report.compare("loading: of plain Dagster", ratios, better="less")


if __name__ == "__main__":
    sys.exit(concluded(main))
