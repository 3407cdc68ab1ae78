"""From READY to the start of the next script, under `odf work`: `benchmarks/wake.py [--quick]`.

This process declares a chunk READY at random times, as another host would. `odf work` runs the job
that reads it, and then the job after that. The first delay is from this commit to the start of the
first script; the second, from the first job's READY to the start of the second script. In turns, in
the same run, another `odf work` polls each second: its database sends no notices. Exit code 0 if 95
of 100 wait at most 100 ms with notices.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from measure import concluded, progress  # noqa: E402
from product import add_job, open_store, ready  # noqa: E402
from report import FULL, QUICK, SLICE, TINY, Report, options  # noqa: E402

from tests.support.postgres import Server  # noqa: E402

CHUNKS = {FULL: 60, QUICK: 30, SLICE: 20, TINY: 2}
MOST_SECONDS = 0.1
"""The most seconds that 95 of 100 chunks may wait."""

LONGEST_GAP_SECONDS = 1.2
"""The most seconds between two chunks: a constant pause would be in step with the polling."""

FLOW = """
flow: wake
jobs:
  first: {in: raw, out: a, run: ./start.sh first}
  second: {in: a, out: b, run: ./start.sh second}
"""

SCRIPT = """#!/bin/sh
date +%s.%N > "$1-$dataid.new" && mv "$1-$dataid.new" "$1-$dataid"
"""

NO_NOTICES = "create or replace function dataflow.send_notice() returns void language sql as $$ $$"


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments)
    report = Report("wake", given, ("PostgreSQL",))
    chunks = CHUNKS[given.scale]
    report.say(f"{chunks} chunks, one at a time; `odf work --workers 4` on the same machine")
    with Server() as server, tempfile.TemporaryDirectory() as folder:
        ways = {
            "told": Host(server.create_database("told"), Path(folder, "told")),
            "polls each second": Host(
                server.create_database("polls"), Path(folder, "polls"), NO_NOTICES
            ),
        }
        try:
            delays = measure(ways, chunks)
        finally:
            for host in ways.values():
                host.close()
    rows = []
    for way, (first, second) in delays.items():
        for what, numbers in (("from another process", first), ("on the same host", second)):
            shown = [f"{1000 * share(numbers, part):.0f}" for part in (0.5, 0.95, 1.0)]
            rows.append([f"{way}, {what}", *shown])
            if way == "told":
                report.require(f"p95, {what}", [share(numbers, 0.95)], most=MOST_SECONDS, unit=" s")
    report.table("READY → the next script starts", ["p50, ms", "p95, ms", "longest, ms"], rows)
    return report.verdict()


class Host:
    """An `odf work` on a database of its own."""

    def __init__(self, url: str, folder: Path, change: str = "") -> None:
        self.folder = folder
        self.store = open_store(url)
        self.store.init()
        for jobid, source, made in (("first", "raw", "a"), ("second", "a", "b")):
            add_job(self.store, jobid, [source], [made])
        self.store.fill()
        if change:
            self.store.db.script(change)
        folder.mkdir()
        (folder / "flow.yml").write_text(FLOW)
        (folder / "start.sh").write_text(SCRIPT)
        (folder / "start.sh").chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "opendataflow_dagster.cli", "work", "--workers", "4"],
            cwd=folder,
            env={**os.environ, "DATAFLOW_URL": url, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )

    def delays(self, dataid: str) -> tuple[float, float]:
        """Declare a chunk READY; return the delays of the first script and of the second."""
        ready(self.store, "raw", [dataid])
        since = time.time()
        first, second = self._started("first", dataid), self._started("second", dataid)
        rows = self.store.db.query(
            "select extract(epoch from at) as at from dataevent where datasetid = 'a' "
            f"and dataid = '{dataid}' and status_after = 'READY'"
        )
        return max(0.0, first - since), second - float(rows[0]["at"])

    def _started(self, name: str, dataid: str) -> float:
        path = self.folder / f"{name}-{dataid}"
        until = time.monotonic() + 30
        while not path.exists():
            if time.monotonic() > until:
                raise RuntimeError(f"{name} of {dataid} wasn't started within 30 s")
            time.sleep(0.005)
        return float(path.read_text())

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
        self.store.close()


def measure(ways: dict[str, Host], chunks: int) -> dict[str, tuple[list[float], list[float]]]:
    """Return the delays of each variant, in turns: noise affects both."""
    delays: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
    for host in ways.values():
        host.delays("0")  # the first one includes connections and plans
    for number in range(1, chunks + 1):
        for way, host in ways.items():
            progress(f"{way}: {number} of {chunks}")
            time.sleep(random.uniform(0.05, LONGEST_GAP_SECONDS))
            for kept, delay in zip(delays[way], host.delays(str(number)), strict=True):
                kept.append(delay)
    return delays


def share(numbers: list[float], part: float) -> float:
    """Return the number that a given share of some numbers doesn't exceed."""
    return sorted(numbers)[max(0, -int(-part * len(numbers) // 1) - 1)]


if __name__ == "__main__":
    sys.exit(concluded(main))
