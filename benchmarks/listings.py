"""Listings of large tables: `python benchmarks/listings.py [--quick] [--only postgres|sqlite]`.

1,000,000 chunks and 3,000,000 rows of history: an input whose chunks are all READY, and an output
of which half is produced. Each command runs in its own process; measured are its seconds from the
start of the process to its end, and its peak memory. Finally a table is split into as many
chunks, which a job reads. Exit code 0 if every target is met.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lite import NUMBERS, opened  # noqa: E402
from measure import concluded, progress  # noqa: E402
from product import add_dataset, add_job, open_store  # noqa: E402
from report import FULL, QUICK, SLICE, TINY, Report, amount, options  # noqa: E402
from rivals import connect, settle  # noqa: E402

from tests.support.postgres import Server  # noqa: E402

SECONDS, MEGABYTES = 2.0, 150.0
"""The limit for a first screen."""

SPLIT = 62.0
"""Seconds in which a table must be split into 1,000,000 chunks: a third of what it once took."""

FOLDERS = 1_000
"""Chunks that have a directory, with two files each."""

CHUNKS = {FULL: 1_000_000, QUICK: 100_000, SLICE: 10_000, TINY: 2_000}
ROUNDS = {FULL: 3, QUICK: 2, SLICE: 1, TINY: 1}

RARE = 300
"""Of so many produced chunks, one is FAILED, one RUNNING, one on HOLD, one stale."""


class Cost(NamedTuple):
    """The cost of one command."""

    seconds: float
    megabytes: float
    lines: int


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments, only=("postgres", "sqlite"))
    report, chunks = Report("listings", given, ("PostgreSQL",)), CHUNKS[given.scale]
    with tempfile.TemporaryDirectory(prefix="odf-listings-") as folder:
        if given.only != "sqlite":
            with Server() as server:
                url = server.create_database("listings")
                fill_postgres(url, chunks, Path(folder))
                measure("PostgreSQL", url, chunks, Path(folder), ROUNDS[given.scale], report)
        if given.only != "postgres":
            path = Path(folder, "listings.db")
            # In its own process: a command's peak memory includes that of the process that starts
            # it.
            filling = get_context("spawn").Process(target=fill_sqlite, args=(path, chunks, folder))
            filling.start()
            filling.join()
            if filling.exitcode:
                raise RuntimeError(f"SQLite wasn't filled: {filling.exitcode}")
            measure(
                "SQLite", f"sqlite:///{path}", chunks, Path(folder), ROUNDS[given.scale], report
            )
    return report.verdict()


SCREENS = """
status
status --counts --json
status --grid
status --running
status --failed
status load
status raw
status load --status FAILED
status load --since 2026-01-05
runs
runs load
history
history load
history load 10
history --dataset raw
history nobody
why load
why blocked
why load 10
why load 10 --at 2026-01-01T06:00
drift --no-dagster
resubmit --stale --plan
resubmit load --failed --plan
resubmit --failed --plan
recover --plan
compact made --plan
clean --plan
doctor
""".strip().splitlines()
"""The listings as a person first types them."""

WHOLE = (
    "status load --all",
    "status load --json",
    "status --failed --all",
    "why load --all",
    "drift --no-dagster --all",
    "compact made --plan --all",
)
"""Listings of everything: their times are only reported, and only their memory is limited."""

FEW = ("status --grid", "status load", "why load")
"""The listings of the tiny form."""


def measure(title: str, url: str, chunks: int, folder: Path, rounds: int, report: Report) -> None:
    rows = []
    split = f"split new --column id --from 0 --to {chunks} --size 1"
    plan, again = f"{split} --plan", f"split new --from 0 --to {chunks} --size 1 --plan"
    most = dict.fromkeys((*SCREENS, plan, again), SECONDS) | {split: SPLIT * chunks / 1_000_000}
    listed = FEW if chunks == CHUNKS[TINY] else (*SCREENS, *WHOLE)
    for words in (*listed, plan, split, again):
        progress(f"{title}: odf {words}")
        costs = [run(url, folder, words) for _ in range(1 if words == split else rounds)]
        seconds, megabytes = [cost.seconds for cost in costs], [cost.megabytes for cost in costs]
        middle = f"{statistics.median(seconds):.2f}"
        rows.append([f"odf {words}", middle, f"{max(megabytes):.0f}", f"{costs[0].lines:,}"])
        if words in most:
            report.require(f"{title}: odf {words}", seconds, most=most[words], unit=" s")
        report.require(f"{title}: odf {words}, memory", megabytes, most=MEGABYTES, unit=" MB")
    report.table(f"{title}, {amount(chunks)} chunks", ["s", "MB", "lines"], rows)


def run(url: str, folder: Path, words: str) -> Cost:
    """Run one command to its end, and count the lines that it lists."""
    start = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "opendataflow_dagster.cli", *words.split()],
        env=os.environ | {"DATAFLOW_URL": url, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout
        assert process.stderr
        lines = sum(1 for _ in process.stdout)
        said = process.stderr.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1, 4) or "Traceback" in said:  # 4: the name is unknown
        raise RuntimeError(f"odf {words} ended with {process.returncode}: {said[-2000:]}")
    return Cost(time.perf_counter() - start, usage.ru_maxrss / 1024, lines)


def register(url: str, folder: Path, chunks: int) -> None:
    store = open_store(url)
    store.init()
    for datasetid in ("raw", "made", "absent", "never", "new"):
        add_dataset(store, datasetid, hostname=str(folder / datasetid))
    for number in range(chunks // 2, chunks // 2 - FOLDERS, -1):
        directory = folder / "made" / f"dataid={number}"
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("a.parquet", "b.parquet"):
            (directory / name).touch()
    add_job(store, "load", ["raw"], ["made"])
    add_job(store, "blocked", ["raw", "absent"], ["never"])
    add_job(store, "extract", ["new"], ["extracted"])
    store.close()


def fill_postgres(url: str, chunks: int, folder: Path) -> None:
    """Write what the triggers would have written, without them."""
    progress(f"PostgreSQL: {amount(chunks)} chunks")
    register(url, folder, chunks)
    moment = "timestamp '2026-01-01' + n * interval '1 second'"
    with connect(url, "dataflow") as connection:
        connection.execute("set session_replication_role = replica")
        connection.execute(
            "create temp table numbers as select n from generate_series(1, %s::int) as n", [chunks]
        )
        for statement in rows_of(chunks, moment, "lpad(cast(length({0}) as text), 3, '0') || {0}"):
            connection.execute(statement.encode())
        connection.execute("select setval('generation', %s)", [4 * chunks])
        settle(connection)


def fill_sqlite(path: Path, chunks: int, folder: str) -> None:
    """Do the same on SQLite, with its triggers removed meanwhile."""
    progress(f"SQLite: {amount(chunks)} chunks")
    register(f"sqlite:///{path}", Path(folder), chunks)
    moment = "strftime('%Y-%m-%d %H:%M:%f', '2026-01-01', n || ' seconds')"
    with opened(path) as connection:
        triggers = connection.execute(
            "select name, sql from sqlite_master where type = 'trigger' and tbl_name in "
            "('datastatus', 'dataevent', 'chunkfact', 'claim', 'pending')"
        ).fetchall()
        for name, _ in triggers:
            connection.execute(f"drop trigger {name}")
        connection.execute("create temp table numbers (n integer primary key)")
        connection.execute(f"insert into numbers {NUMBERS} select n from g", [chunks])
        for statement in rows_of(chunks, moment, "substr('00' || length({0}), -3) || {0}"):
            connection.execute(statement)
        connection.execute("update generation set last = ?", [4 * chunks])
        for _, text in triggers:
            connection.execute(text)
        connection.execute("analyze")
        connection.execute("pragma wal_checkpoint(truncate)")


def rows_of(chunks: int, moment: str, natural: str) -> Iterator[str]:
    """Return the statements that fill the tables from the numbers of the chunks."""
    half, dataid = chunks // 2, "cast(n as text)"
    made, every = f"from numbers where n <= {half}", "from numbers"
    word = (
        f"case n % {RARE} when 1 then 'FAILED' when 2 then 'RUNNING' when 3 then 'HOLD' "
        "else 'READY' end"
    )
    stale = f"case when n % {RARE} = 4 then {3 * chunks} + n else n end"
    for datasetid, jobid, locktype, status, generation, source in (
        ("raw", "external", "OUT", "'READY'", stale, every),
        ("made", "load", "OUT", word, f"{chunks} + n", made),
        ("raw", "load", "IN", "'RUNNING'", "n", f"{made} and n % {RARE} = 2"),
    ):
        yield (
            "insert into datastatus "
            "(datasetid, jobid, dataid, locktype, status, modified, generation) "
            f"select '{datasetid}', '{jobid}', {dataid}, '{locktype}', {status}, {moment}, "
            f"{generation} {source}"
        )
    yield (
        "insert into claim (jobid, dataid, generation, owner, started, heartbeat, lease_end) "
        f"select 'load', {dataid}, {chunks} + n, 'somebody', {moment}, {moment}, {moment} "
        f"{made} and n % {RARE} = 2"
    )
    for before, after, datasetid, jobid, locktype, source in (
        ("null", "'READY'", "raw", "external", "OUT", every),
        ("null", "'RUNNING'", "raw", "load", "IN", made),
        ("null", "'RUNNING'", "made", "load", "OUT", made),
        ("'RUNNING'", "null", "raw", "load", "IN", made),
        ("'RUNNING'", word, "made", "load", "OUT", made),
    ):
        yield (
            "insert into dataevent (at, datasetid, jobid, dataid, locktype, status_before, "
            f"status_after, generation, who) select {moment}, '{datasetid}', '{jobid}', {dataid}, "
            f"'{locktype}', {before}, {after}, n, 'somebody' {source}"
        )
    for datasetid, jobid, offset, inputs, source in (
        ("raw", "external", 0, "null", every),
        ("made", "load", chunks, f"'{{\"raw\": ' || {dataid} || '}}'", made),
    ):
        yield (
            "insert into chunkfact (datasetid, dataid, generation, location, rows, fingerprint, "
            f"jobid, at, inputs) select '{datasetid}', {dataid}, {offset} + n, "
            f"'/data/{datasetid}/' || {dataid}, 1000, {dataid}, '{jobid}', {moment}, {inputs} "
            f"{source}"
        )
    yield (
        "insert into pending (jobid, dataid, rank, sortkey) "
        f"select 'load', {dataid}, 1, {natural.format(dataid)} from numbers where n > {half}"
    )


if __name__ == "__main__":
    sys.exit(concluded(main))
