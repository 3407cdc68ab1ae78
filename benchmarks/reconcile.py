"""The cost of the reconcile sensor: `benchmarks/reconcile.py [--quick] [--database sqlite]`.

On PostgreSQL for the tables and for Dagster's storage (or both on SQLite): 10,000 new READY chunks
through the sensor's ticks; a tick without news on 100,000 chunks; ticks with 1,000 to 8,000
changes; the first ticks over 20,000 chunks of 100 datasets, in a window. In the same run, Dagster's
own public way of reporting a materialization, one by one. Exit code 0 if every target
is met.
"""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dagster as dg  # noqa: E402
from measure import concluded, progress  # noqa: E402
from product import (  # noqa: E402
    DataflowTranslator,
    Mirror,
    Store,
    add_dataset,
    add_job,
    differences,
    hold,
    open_store,
    ready,
    reconcile,
    release,
)
from report import FULL, QUICK, SLICE, TINY, Report, options, spread  # noqa: E402

from tests.support.postgres import Server  # noqa: E402

NAMES = DataflowTranslator()
PORTION = 10_000
EXECUTIONS = 100
SETTLE_SECONDS = 11
"""A tick reads the events of the last ten seconds again: only then is it without news."""
DATASETS, WIDE_CHUNKS, WIDE_WINDOW = 100, 20_000, 500
"""A domain with many datasets, and how many of its chunks the grid shows."""

SCALES = {FULL: 1, QUICK: 10, SLICE: 10, TINY: 1000}
"""The factor by which everything is smaller."""

STORAGE = """
storage:
  postgres:
    postgres_url: {url}
telemetry: {{enabled: false}}
"""


class Windowed(DataflowTranslator):
    window = WIDE_WINDOW


class Ticker:
    """The sensor's ticks, with the cursor that it would keep."""

    def __init__(self, store: Store, mirror: Mirror, names: DataflowTranslator = NAMES) -> None:
        self.store, self.mirror, self.names = store, mirror, names
        self.cursor: str | None = None
        self.written = 0

    def tick(self) -> tuple[float, bool]:
        """Return the duration of a tick, and whether it left something to do."""
        start = time.perf_counter()
        done = reconcile(self.store, self.mirror, self.names, self.cursor)
        self.cursor, self.written = done.cursor, done.writes
        return time.perf_counter() - start, done.more

    def until_done(self) -> list[float]:
        seconds = []
        while True:
            spent, more = self.tick()
            seconds.append(spent)
            if not more:
                return seconds


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments, database=("postgres", "sqlite"), part=("changes", "wide"))
    report = Report("reconcile", given, ("PostgreSQL", "dagster"))
    with places(given.database == "sqlite") as (url, settings), tempfile.TemporaryDirectory() as at:
        Path(at, "dagster.yaml").write_text(settings)
        with dg.DagsterInstance.from_config(at) as instance:
            if given.part != "wide":
                measure(url, instance, SCALES[given.scale], report)
            if given.part != "changes":
                wide(url, instance, SCALES[given.scale], report)
    return report.verdict()


@contextmanager
def places(sqlite: bool) -> Iterator[tuple[str, str]]:
    """Yield the address of the tables, and the text of a dagster.yaml."""
    if sqlite:
        with tempfile.TemporaryDirectory() as folder:
            yield f"sqlite:///{folder}/flow.db", "telemetry: {enabled: false}\n"
    else:
        with Server() as server:
            server.create_database("flow")
            server.create_database("dagster")
            yield server.url("flow"), STORAGE.format(url=server.url("dagster"))


def measure(url: str, instance: dg.DagsterInstance, scale: int, report: Report) -> None:
    store, mirror = open_store(url), Mirror(instance)
    store.init()
    add_dataset(store, "orders")
    add_dataset(store, "copies")
    add_job(store, "copy", ["orders"], ["copies"])
    ticker = Ticker(store, mirror)
    ticker.until_done()

    new = PORTION // scale
    progress(f"{new} new READY chunks")
    chunks, each = [str(number) for number in range(new)], max(1, new // EXECUTIONS)
    for start in range(0, new, each):  # each in its own transaction, and so a run
        ready(store, "orders", chunks[start : start + each])
    began = time.process_time()
    ticks = ticker.until_done()
    cpu = time.process_time() - began
    report.require(
        f"{new:,} new READY chunks of {EXECUTIONS} runs mirrored, all ticks",
        [sum(ticks)],
        most=12.0 / scale,
        unit=" s",
    )
    report.require("the longest of these ticks", [max(ticks)], most=20.0, unit=" s")
    disagree(store, mirror)
    per_run = cost_of_runs(store, ticker, sum(ticks), new)

    one_by_one = public_way(instance, 300 // min(scale, 30))
    report.compare(
        "new READY chunks mirrored / reported one by one",
        [sum(ticks) / new / one_by_one],
        better="less",
    )
    report.table(
        "New READY chunks",
        ["ms per chunk"],
        [
            ["reconcile", f"{sum(ticks) / new * 1000:.2f}"],
            ["report_runless_asset_event, one by one", f"{one_by_one * 1000:.2f}"],
        ],
    )
    report.say(
        f"CPU of the sensor for these {new:,} chunks: {cpu:.2f} s. Each run adds {per_run:.1f} ms."
    )

    progress("100,000 chunks")
    for start in range(new, 10 * new, new):
        ready(store, "orders", [str(number) for number in range(start, start + new)])
    filling = ticker.until_done()
    time.sleep(SETTLE_SECONDS if scale < 1000 else 0)
    ticker.tick()
    idle = []
    for _ in range(30 if scale < 1000 else 3):
        idle.append(ticker.tick()[0] * 1000)
        if ticker.written:
            raise RuntimeError(f"A tick with nothing new wrote {ticker.written}")
    report.require(f"a tick with nothing new, {10 * new:,} chunks", idle, most=50.0, unit=" ms")
    report.require("the longest tick of the first filling", [max(filling)], most=20.0, unit=" s")

    rows, per_change = [], {}
    for changes in [times * 1000 // scale for times in (1, 2, 4, 8)]:
        progress(f"{changes} changes")
        chunks = [str(number) for number in range(changes)]
        hold(store, "external", chunks)
        held = sum(ticker.until_done())
        release(store, "external", chunks)
        released = sum(ticker.until_done())
        per_change[changes] = (held + released) / (2 * changes) * 1000
        rows.append(
            [
                f"{changes:,} to HOLD, and back",
                f"{held:.2f}",
                f"{released:.2f}",
                f"{per_change[changes]:.2f}",
            ]
        )
    report.table(f"Changes among {10 * new:,} chunks", ["s", "s back", "ms per change"], rows)
    small, large = min(per_change), max(per_change)
    growth = per_change[large] / per_change[small]
    report.require("ms per change, 8 times as many changes, ratio", [growth], most=1.5)
    disagree(store, mirror)
    report.say(
        f"First filling of {9 * new:,} chunks: {spread(filling, ' s')} per tick, "
        f"{sum(filling):.1f} s in all"
    )
    store.close()


def cost_of_runs(store: Store, ticker: Ticker, seconds: float, chunks: int) -> float:
    """Return the milliseconds per run: from as many runs as chunks, of one chunk each.

    Args:
        seconds: How long `chunks` chunks of few runs took.
        chunks: Their number.
    """
    runs = max(1, chunks // 10)
    for number in range(runs):
        ready(store, "copies", [f"alone {number}"])
    alone = sum(ticker.until_done())
    # a chunks + b runs = seconds; a + b = alone / runs
    return (alone / runs - seconds / chunks) / (1 - EXECUTIONS / chunks) * 1000


def wide(url: str, instance: dg.DagsterInstance, scale: int, report: Report) -> None:
    """Mirror many chunks of many datasets that share partitions, in a window."""
    store, mirror = open_store(url), Mirror(instance)
    store.init()
    names = [f"wide{number:03d}" for number in range(max(2, DATASETS // scale))]
    for name in names:
        add_dataset(store, name)
    for source, output in pairwise(names):
        add_job(store, f"to {output}", [source], [output])
    chunks = [str(number) for number in range(WIDE_CHUNKS // scale)]
    for name in reversed(names):  # so that no job can claim a chunk in between
        progress(f"{len(chunks):,} chunks of {name}")
        ready(store, name, chunks)
    ticker = Ticker(store, mirror, Windowed())
    first = ticker.until_done()
    told = f"{len(chunks):,} chunks × {len(names)} datasets, window of {WIDE_WINDOW}"
    report.require(f"{told}: first ticks, all", [sum(first)], most=60.0, unit=" s")
    ready(store, names[0], ["new"])
    later = [*ticker.until_done(), *ticker.until_done()]
    report.require(f"{told}: the longest tick", [max(first + later)], most=20.0, unit=" s")
    store.close()


def public_way(instance: dg.DagsterInstance, events: int) -> float:
    """Return the seconds per materialization, reported as Dagster's documentation says."""
    start = time.perf_counter()
    for number in range(events):
        instance.report_runless_asset_event(
            dg.AssetMaterialization("elsewhere", partition=str(number), metadata={"rows": 1})
        )
    return (time.perf_counter() - start) / events


def disagree(store: Store, mirror: Mirror) -> None:
    for datasetid in ("orders", "copies"):
        if found := differences(store, mirror, NAMES, datasetid):
            raise RuntimeError(f"{len(found)} chunks of {datasetid} disagree: {found[0]}")


if __name__ == "__main__":
    os.environ.setdefault("DAGSTER_DISABLE_TELEMETRY", "1")
    sys.exit(concluded(main))
