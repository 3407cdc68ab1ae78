"""PostgreSQL in Spark, with and without JDBC: `python benchmarks/spark_postgres.py [--quick]`.

A table of 2 million rows × 8 columns is read into Parquet, whole in 4 parts and by chunks of
100,000, and written back as a chunk: by us, and by Spark's own JDBC reader and writer with the
machine's jar, in turns. Each required ratio is the median of the rounds' own ratios. Exit code 0
if all are met.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psycopg  # noqa: E402
from measure import Samples, concluded, progress  # noqa: E402
from product import StagedRows, Table, looking, read_rows, spark_session  # noqa: E402
from report import FULL, QUICK, SLICE, TINY, Report, options, spread  # noqa: E402

from tests.support.postgres import Server  # noqa: E402

JAR = os.environ.get("POSTGRESQL_JAR", "/usr/share/java/postgresql.jar")
SETTINGS = {FULL: (2_000_000, 5), QUICK: (400_000, 3), SLICE: (400_000, 2), TINY: (200, 1)}
"""Rows, and rounds."""

CHUNK = 100_000

MAKE = """
create table source (id bigint primary key, shop int, amount numeric(12,2), name text,
    at timestamptz, x float8, day date, u uuid);
insert into source
    select i, i % 97, i % 100000 / 7.0, 'name ' || i, timestamptz '2026-01-01' + i * interval '1 s',
        i / 3.0, date '2026-01-01' + i / {chunk}, gen_random_uuid()
    from generate_series(0, {rows} - 1) i;
create index on source (day);
create table target (like source);
alter table target add chunk text;
create table plain (like source);
vacuum analyze source;
checkpoint;
"""


def chunk_of(rows: int) -> int:
    """Return the number of rows per chunk."""
    return min(CHUNK, rows // 4)


class Contest:
    """The same rows, read and written by us and by JDBC."""

    def __init__(
        self, spark: Any, base: psycopg.Connection, rows: int, folder: str, jar: bool
    ) -> None:
        self.spark, self.base, self.rows, self.folder = spark, base, rows, folder
        info = base.info
        self._url = f"jdbc:postgresql://127.0.0.1:{info.port}/{info.dbname}"
        self._host, self._database = f"127.0.0.1:{info.port}", info.dbname
        self._day, self.chunk = 0, chunk_of(rows)
        self.jar = jar
        whole = self._jdbc("source", 2) if jar else read_rows(spark, self._table("source", "day"))
        self._frame = whole.persist()
        self._frame.count()

    def ours_whole(self) -> int:
        self._to_parquet(read_rows(self.spark, self._table("source", "day"), parts=4))
        return self.rows

    def jdbc_whole(self) -> int:
        self._to_parquet(self._jdbc("source", 4))
        return self.rows

    def ours_chunk(self) -> int:
        day = self._next()
        self._to_parquet(
            read_rows(self.spark, self._table("source", "day"), f"2026-01-{day + 1:02}")
        )
        return self.chunk

    def ours_chunk_in_two(self) -> int:
        day = self._next()
        with looking():
            table = self._table("source", "day")
            self._to_parquet(read_rows(self.spark, table, f"2026-01-{day + 1:02}", parts=2))
        return self.chunk

    def jdbc_chunk(self) -> int:
        day = self._next()
        query = f"(select * from source where day = '2026-01-{day + 1:02}') q"
        self._to_parquet(self._jdbc(query, 2, day * self.chunk, (day + 1) * self.chunk))
        return self.chunk

    def ours_write(self) -> int:
        table = self._table("target", "chunk")
        return StagedRows.write(self._frame, table, "all", None, None, 1).show(lambda: None)

    def jdbc_write(self, more: str = "") -> int:
        options = self._options("plain", f"?stringtype=unspecified{more}")
        self._frame.write.format("jdbc").options(**options).mode("append").save()
        return self.rows

    def jdbc_write_rewritten(self) -> int:
        return self.jdbc_write("&reWriteBatchedInserts=true")

    def _to_parquet(self, frame: Any) -> None:
        frame.write.mode("overwrite").parquet(self.folder + "/rows")

    def check(self, way: str) -> None:
        """Fail if a write lost rows, or wrote them twice."""
        if way.endswith("write"):
            table = "target" if way.startswith("ours") else "plain"
            found = self.base.execute(f"select count(*), count(distinct id) from {table}".encode())
            if found.fetchone() != (self.rows, self.rows):
                raise RuntimeError(f"{way} didn't write {self.rows} rows")

    def clear(self) -> None:
        """Empty the tables, so that a write doesn't slow down the next one."""
        self.base.execute("truncate target, plain")
        self.base.execute("checkpoint")

    def _next(self) -> int:
        self._day = (self._day + 1) % (self.rows // self.chunk)
        return self._day

    def _table(self, name: str, column: str) -> Table:
        return Table(
            "x", name, "postgres", self._database, self._host, "", name, column, "postgres"
        )

    def _options(self, table: str, more: str = "") -> dict[str, Any]:
        return {
            "url": self._url + more,
            "dbtable": table,
            "user": "postgres",
            "fetchsize": 10_000,
            "driver": "org.postgresql.Driver",
        }

    def _jdbc(self, table: str, parts: int, lower: int = 0, upper: int | None = None) -> Any:
        bounds = {"lowerBound": lower, "upperBound": upper or self.rows, "numPartitions": parts}
        options = self._options(table) | bounds | {"partitionColumn": "id"}
        return self.spark.read.format("jdbc").options(**options).load()


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments)
    report = Report("spark_postgres", given, ("PostgreSQL", "pyspark"))
    jar = os.path.exists(JAR)
    if not jar:
        report.absent(
            f"No JDBC driver at {JAR}: install libpostgresql-jdbc-java, or set POSTGRESQL_JAR=PATH"
        )
    if jar or given.scale == TINY:
        with Server() as server:
            measure(server, report, *SETTINGS[given.scale], jar)
    return report.verdict()


def measure(server: Server, report: Report, rows: int, rounds: int, jar: bool) -> None:
    """Measure everything; without the jar, only ours."""
    spark = spark_session(
        {
            "spark.master": "local[2]",
            "spark.driver.memory": "2g",
            **({"spark.jars": JAR} if jar else {}),
        },
        short=rounds == 1,
    )
    samples = Samples()
    with (
        psycopg.connect(server.create_database("bench"), autocommit=True) as base,
        tempfile.TemporaryDirectory(prefix="odf-postgres-") as folder,
    ):
        progress(f"loading {rows:,} rows")
        for statement in MAKE.format(rows=rows, chunk=chunk_of(rows)).split(";"):
            base.execute(statement)  # type: ignore[arg-type]
        compare(Contest(spark, base, rows, folder, jar), rounds, samples)
    spark.stop()
    judge(samples, rows, report)


def compare(contest: Contest, rounds: int, samples: Samples) -> None:
    """Run all in turns; every other round in the opposite order; the first one doesn't count."""
    chunks = 6 if rounds > 1 else 1
    ways: list[tuple[Callable[[], int], int]] = [
        (contest.ours_whole, 1),
        (contest.jdbc_whole, 1),
        (contest.ours_chunk, chunks),
        (contest.ours_chunk_in_two, chunks),
        (contest.jdbc_chunk, chunks),
        (contest.ours_write, 1),
        (contest.jdbc_write, 1),
        (contest.jdbc_write_rewritten, 1),
    ]
    if not contest.jar:
        ways = [(way, times) for way, times in ways if "jdbc" not in way.__name__]
    for number in range(rounds + 1):
        for way, times in ways[:: 1 if number % 2 else -1]:
            progress(f"round {number} of {rounds}: {way.__name__}")
            if "write" in way.__name__:
                contest.clear()
            start, done = time.perf_counter(), 0
            for _ in range(times):
                done += way()
            seconds = time.perf_counter() - start
            contest.check(way.__name__)
            if number:
                samples.add(way.__name__, done / seconds / 1000)
    progress("")


def judge(samples: Samples, rows: int, report: Report) -> None:
    size = f"{chunk_of(rows):,} rows"
    names = {
        "ours_whole": "ours, whole in 4 parts",
        "jdbc_whole": "JDBC, whole in 4 parts",
        "ours_chunk": f"ours, chunk of {size}",
        "ours_chunk_in_two": "ours, chunk in 2 parts",
        "jdbc_chunk": "JDBC, chunk in 2 parts",
        "ours_write": "ours, written and published",
        "jdbc_write": "JDBC writer",
        "jdbc_write_rewritten": "JDBC writer, reWriteBatchedInserts",
    }
    report.table(
        f"PostgreSQL, {rows:,} rows × 8 columns: thousand rows per second",
        ["median (least–most)"],
        [[told, spread(samples[name])] for name, told in names.items() if samples.get(name)],
    )
    if not samples.get("jdbc_whole"):
        return
    for what, one, other, least in (
        ("read whole: ours / JDBC", "ours_whole", "jdbc_whole", 1.0),
        ("read by chunks: ours / JDBC", "ours_chunk", "jdbc_chunk", 0.75),
        ("write: ours / JDBC writer", "ours_write", "jdbc_write", 1.3),
    ):
        report.require(what, samples.ratios(one, other), least=least)
        report.compare(what, samples.ratios(one, other), better="more")
    for what, one, other in (
        ("chunk in 2 parts / JDBC", "ours_chunk_in_two", "jdbc_chunk"),
        ("write: ours / JDBC with reWriteBatchedInserts", "ours_write", "jdbc_write_rewritten"),
    ):
        report.say(f"For the record: {what}: {spread(samples.ratios(one, other))}")


if __name__ == "__main__":
    sys.exit(concluded(main))
