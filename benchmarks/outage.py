"""The end of an outage: `python benchmarks/outage.py [--quick] [--only postgres|sqlite]`.

100 chains of 7 jobs each; the first job of 95 chains failed, and the jobs below wait. Measured is
what a person types until everything has run: a command that lists the failures, one that resubmits
them, one that runs everything. For comparison, a command per job, measured on some of the
chains and extrapolated to the others. Exit code 0 if every target is met.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from measure import concluded, progress  # noqa: E402
from product import open_store, ready  # noqa: E402
from report import FULL, QUICK, SLICE, TINY, Report, amount, options  # noqa: E402

from tests.support.postgres import Server  # noqa: E402

JOBS = 7
"""Jobs per chain."""

SOUND = 5
"""Of a hundred chains, those whose first job didn't fail."""

DATAID = "2026-03-01"

SCRIPT = """#!/bin/sh
[ ! -e "down/$dataflow_jobid" ]
"""

RUN_ALL = ("work", "--until-idle")
"""The command that runs everything."""

TIMES_FASTER = 3.0
"""The least factor by which this is faster than a command per job."""


class Size(NamedTuple):
    """How many chains there are, and how many of them are repaired job by job."""

    chains: int
    sample: int


SIZES = {FULL: Size(100, 5), QUICK: Size(40, 3), SLICE: Size(4, 1), TINY: Size(2, 1)}


class Step(NamedTuple):
    """A command that a person types, and its cost."""

    words: tuple[str, ...]
    seconds: float
    lines: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments, only=("postgres", "sqlite"))
    report, size = Report("outage", given, ("PostgreSQL",)), SIZES[given.scale]
    with tempfile.TemporaryDirectory(prefix="odf-outage-") as folder:
        if given.only != "sqlite":
            with Server() as server:
                measure("PostgreSQL", server.create_database("outage"), folder, size, report)
        if given.only != "postgres":
            measure("SQLite", f"sqlite:///{folder}/outage.db", folder, size, report)
    return report.verdict()


def measure(title: str, url: str, folder: str, size: Size, report: Report) -> None:
    """End an outage with three commands, and some chains of another one job by job."""
    home = Path(folder, title)
    broken = [f"c{chain}_1" for chain in range(size.chains - max(1, size.chains * SOUND // 100))]
    progress(f"{title}: {size.chains * JOBS} jobs")
    declare(url, home, size.chains)
    run = Odf(url, home)
    break_down(home, run, broken)

    progress(f"{title}: {len(broken)} failures, three commands")
    steps = [run("status", "--failed"), run("resubmit", "--failed"), run(*RUN_ALL)]
    failures = len(steps[0].lines) - 1
    refuse_other_count("failures listed", failures, len(broken))
    refuse_other_count("chunks READY", ready_chunks(run), size.chains * JOBS)

    progress(f"{title}: {size.sample} chains job by job")
    sample = broken[: size.sample]
    for jobid in sample:
        run("resubmit", jobid, "--downstream", DATAID)
    break_down(home, run, sample)
    singly = [run(*words) for jobid in sample for words in one_by_one(jobid)]
    refuse_other_count("chunks READY", ready_chunks(run), size.chains * JOBS)

    chunks = len(broken) * JOBS
    times = len(broken) / len(sample)
    seconds = [sum(step.seconds for step in each) for each in (steps, singly)]
    rows = [[f"odf {' '.join(step.words)}", "1", f"{step.seconds:.1f}", ""] for step in steps]
    rows.append(["all three", str(len(steps)), f"{seconds[0]:.1f}", amount(chunks)])
    rows.append(
        [
            f"job by job, {len(sample)} chains",
            str(len(singly)),
            f"{seconds[1]:.1f}",
            amount(len(sample) * JOBS),
        ]
    )
    rows.append(
        [
            f"extrapolated to {len(broken)} chains",
            f"{len(singly) * times:.0f}",
            f"{seconds[1] * times:.0f}",
            amount(chunks),
        ]
    )
    heading = f"{title}, {size.chains * JOBS} jobs, of which {failures} failed"
    report.table(heading, ["commands", "s", "chunks"], rows)
    report.require(f"{title}: commands until all has run", [len(steps)], most=3)
    report.require(
        f"{title}: times faster than job by job",
        [seconds[1] * times / seconds[0]],
        least=TIMES_FASTER,
    )


class Odf:
    """`odf` on some tables, each command in its own process, as a person runs it."""

    def __init__(self, url: str, home: Path) -> None:
        self._environment = os.environ | {"DATAFLOW_URL": url, "PYTHONPATH": str(ROOT)}
        self._home = home

    def __call__(self, *words: str, code: int = 0) -> Step:
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "opendataflow_dagster.cli", *words],
            cwd=self._home,
            env=self._environment,
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - start
        if done.returncode != code:
            raise RuntimeError(
                f"odf {' '.join(words)} ended with {done.returncode}: {done.stderr[-2000:]}"
            )
        return Step(words, seconds, done.stdout.splitlines())


def declare(url: str, home: Path, chains: int) -> None:
    """Register the chains by a flow.yml; the first input of each has a READY chunk."""
    (home / "down").mkdir(parents=True)
    (home / "job.sh").write_text(SCRIPT)
    (home / "job.sh").chmod(0o755)
    lines = ["flow: outage", "jobs:"]
    for chain in range(chains):
        for job in range(1, JOBS + 1):
            lines.append(
                f"  c{chain}_{job}: {{in: d{chain}_{job - 1}, out: d{chain}_{job}, run: ./job.sh}}"
            )
    (home / "flow.yml").write_text("\n".join(lines) + "\n")
    store = open_store(url)
    store.init()
    Odf(url, home)("apply", "--yes")
    for chain in range(chains):
        ready(store, f"d{chain}_0", [DATAID])
    store.close()


def break_down(home: Path, run: Odf, jobids: Sequence[str]) -> None:
    """Let some jobs fail while everything that can run is run."""
    for jobid in jobids:
        (home / "down" / jobid).touch()
    run("run", "--all-jobs", code=1)
    for jobid in jobids:
        (home / "down" / jobid).unlink()


def one_by_one(jobid: str) -> Iterator[tuple[str, ...]]:
    """Yield what a person types for a chain with one command per job."""
    yield "resubmit", jobid, "--failed"
    chain = jobid.removesuffix("_1")
    for job in range(1, JOBS + 1):
        yield "run", "--all", "--job", f"{chain}_{job}", "./job.sh"


def ready_chunks(run: Odf) -> int:
    """Return how many chunks of jobs are READY."""
    where = "locktype = 'OUT' and status = 'READY' and jobid <> 'external'"
    return int(run("sql", f"select count(*) from datastatus where {where}").lines[-1])


def refuse_other_count(what: str, found: int, expected: int) -> None:
    if found != expected:
        raise RuntimeError(f"{found} {what}, not {expected}: this measured something else.")


if __name__ == "__main__":
    sys.exit(concluded(main))
