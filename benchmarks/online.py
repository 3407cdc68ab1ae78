"""Claims while jobs are registered and tables upgraded: `benchmarks/online.py [--quick]`.

Eight workers claim and finish chunks of a large job, one by one. Meanwhile another job is added,
their job gets another output, a job is removed, `odf init` judges again what may be claimed, and a
table is split into a tenth as many chunks. The result is the longest time that a worker waited for
a claim. Exit code 0 if none waited too long.
"""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lite import LiteOurs  # noqa: E402
from measure import concluded, progress  # noqa: E402
from product import add_dataset, add_job, by_number, new_owner, open_store, split  # noqa: E402
from report import FULL, QUICK, SLICE, TINY, Report, options  # noqa: E402
from rivals import Ours, fact  # noqa: E402

from tests.support.postgres import Server  # noqa: E402

WORKERS = 8
LONGEST = {"PostgreSQL": 1.0, "SQLite": 5.0}
"""The most seconds that a claim may take."""

CHUNKS = {FULL: 1_000_000, QUICK: 100_000, SLICE: 2_000, TINY: 2_000}


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments, database=("postgres", "sqlite"))
    report = Report("online", given, ("PostgreSQL",))
    chunks = CHUNKS[given.scale]
    workers = 2 if given.scale == TINY else WORKERS
    report.say(f"{workers} workers, {chunks:,} chunks, half of them done")
    if given.database != "sqlite":
        with Server() as server:
            url = server.create_database("bench")
            progress("PostgreSQL: loading")
            Ours.load(url, chunks, chunks // 2)
            measure("PostgreSQL", url, chunks, workers, report)
    if given.database != "postgres":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "bench.db")
            progress("SQLite: loading")
            LiteOurs.load(path, chunks, chunks // 2)
            measure("SQLite", f"sqlite:///{path}", chunks, workers, report)
    return report.verdict()


def measure(database: str, url: str, chunks: int, workers: int, report: Report) -> None:
    """Time each change of the tables, and the claims during it."""
    store = open_store(url)
    rows = []
    with closing(Workers(url, workers)) as beside:
        for what, change in CHANGES.items():
            progress(f"{database}: {what}")
            beside.told()
            start = time.monotonic()
            change(store, chunks)
            took = time.monotonic() - start
            claims, claim, end = beside.told()
            rows.append([what, f"{took:.1f}", f"{claims:,}", f"{claim:.2f}", f"{end:.2f}"])
            report.require(
                f"{database}: longest claim, {what}", [claim], most=LONGEST[database], unit=" s"
            )
    if queued := store.unfilled():
        raise RuntimeError(f"{queued} aren't filled")
    columns = ["s", "claims meanwhile", "longest claim, s", "longest end, s"]
    report.table(database, columns, rows)
    store.close()


def job_added(store: Any, _: int) -> None:
    add_job(store, "copy", ["bench_in"], ["copies"])
    store.fill()


def output_added(store: Any, _: int) -> None:
    add_job(store, "bench", [], ["more"])
    store.fill()


def job_removed(store: Any, _: int) -> None:
    with store.db.transaction():
        store.db.change("registry.remove_job", jobid="copy")
    store.fill()


def table_split(store: Any, chunks: int) -> None:
    add_dataset(store, "table")
    add_job(store, "extract", ["table"], ["extracted"])
    split(store, "table", by_number(0, chunks // 10, size=1), column="id")
    store.fill()


CHANGES: dict[str, Callable[[Any, int], object]] = {
    "a job is added": job_added,
    "the job gets another output": output_added,
    "a job is removed": job_removed,
    "odf init": lambda store, _: store.init(),
    "a table is split": table_split,
}


class Workers:
    """Processes that claim and finish chunks until they are closed."""

    def __init__(self, url: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for _ in range(count):
            ours, theirs = context.Pipe()
            context.Process(target=work, args=(url, theirs), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)

    def told(self) -> tuple[int, float, float]:
        """Return the chunks since the last call, and the longest claim and finish in seconds."""
        for pipe in self._pipes:
            pipe.send("tell")
        answers = [pipe.recv() for pipe in self._pipes]
        return (
            sum(count for count, *_ in answers),
            max(claim for _, claim, _ in answers),
            max(end for *_, end in answers),
        )

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()


def work(url: str, pipe: Connection) -> None:
    """Claim and finish, and report the times on request."""
    store, owner = open_store(url), new_owner()
    store.finish(store.claim("bench", owner=owner))  # the first one includes connection and plans
    count, longest_claim, longest_end = 0, 0.0, 0.0
    while True:
        start = time.monotonic()
        claims = store.claim("bench", owner=owner)
        claimed = time.monotonic()
        if claims:
            store.finish(claims, [fact(claim.dataid) for claim in claims])
        count += len(claims)
        longest_claim = max(longest_claim, claimed - start)
        longest_end = max(longest_end, time.monotonic() - claimed)
        try:
            if pipe.poll():
                pipe.recv()
                pipe.send((count, longest_claim, longest_end))
                count, longest_claim, longest_end = 0, 0.0, 0.0
        except (EOFError, BrokenPipeError):
            store.close()
            return


if __name__ == "__main__":
    sys.exit(concluded(main))
