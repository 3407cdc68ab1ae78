"""What chunks cost on Spark: `python benchmarks/spark.py [--quick] [--only files|postgres|…]`.

files: 200 chunks of 50,000 rows from Parquet to Parquet: bare PySpark, our whole path (claim,
evidence, publish, settle) one by one, and in micro-batches, in turns of 20 chunks. postgres: a
table of 2 million rows read and written, against Spark's own JDBC (benchmarks/spark_postgres.py).
noop: a chunk of one row in a warm session, end to end. memory: of the driver over 1,000 chunks.
The status tables are on PostgreSQL. Exit code 0 if every target is met.
"""

import argparse
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
import spark_postgres  # noqa: E402
from measure import Report, Samples, concluded, progress, spread  # noqa: E402

from opendataflow_dagster.dataflow.moves import ready  # noqa: E402
from opendataflow_dagster.dataflow.process import Scripts  # noqa: E402
from opendataflow_dagster.dataflow.registry import add_dataset, add_job  # noqa: E402
from opendataflow_dagster.dataflow.store import Store, new_owner, open_store  # noqa: E402
from opendataflow_dagster.spark.jobs import as_spark_job, spark_job  # noqa: E402
from opendataflow_dagster.spark.runs import SparkRunner  # noqa: E402
from opendataflow_dagster.spark.session import spark_session  # noqa: E402
from tests.postgres import Server  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 50_000
COLUMNS = (
    "id", "id % 97 as shop", "cast(rand(1) * 1000 as decimal(12, 2)) as amount",
    "cast(id as string) as name", "timestamp_seconds(id) as at", "rand(2) as x", "rand(3) as y",
    "sha1(cast(id as string)) as code",
)  # fmt: skip
BLOCK = 20
BARE, OURS, BATCH = "bare PySpark", "one by one", "micro-batches of 20"


def transformed(df: "DataFrame") -> "DataFrame":
    """What the job does with a chunk, whoever runs it."""
    return df.where("x < 0.9").selectExpr("*", "amount * 2 as total")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer chunks and rows")
    parser.add_argument("--only", choices=("files", "postgres", "noop", "memory"))
    options = parser.parse_args()
    report = Report()
    parts = [options.only] if options.only else list(MEASURES)
    with tempfile.TemporaryDirectory(prefix="odf-spark-") as folder, Server() as server:
        os.chdir(folder)
        if options.only == "postgres":
            spark_postgres.measure(server, report, options.quick)
        else:
            spark = spark_session({"spark.master": "local[2]", "spark.driver.memory": "1g"})
            try:
                for name in parts:
                    bench = Bench(server.create_database(name), Path(folder, name), spark)
                    MEASURES[name](bench, report, options.quick)
            finally:
                spark.stop()
    missed = report.verdict()
    sys.stdout.flush()
    if not options.only:  # a process of its own: Java looks for a driver's jar when it starts
        quick = ["--quick"] if options.quick else []
        missed |= subprocess.run([sys.executable, spark_postgres.__file__, *quick]).returncode
    return missed


class Bench:
    """A store, a folder, and jobs on datasets in it."""

    def __init__(self, url: str, folder: Path, spark: "SparkSession") -> None:
        self.store: Store = open_store(url)
        self.store.init()
        self.folder, self.spark = folder, spark
        for name in ("source", "input", "one", "many", "bare"):
            add_dataset(self.store, name, hostname=str(folder / name))
        for name, reads in (("input", "source"), ("one", "input"), ("many", "input")):
            add_job(self.store, name, inputs=[reads], outputs=[name])

    def arrive(self, ids: list[str]) -> None:
        """Let the source's chunks be READY: what makes the input of them needs no files."""
        ready(self.store, "source", ids)

    def runner(self, jobid: str, fn: Callable[..., Any]) -> SparkRunner:
        return SparkRunner(
            self.store, jobid, jobid, as_spark_job(fn), lambda: self.spark, say=lambda line: None,
            environ=os.environ,
        )  # fmt: skip

    def run(self, runner: SparkRunner, chunks: int) -> None:
        """Make so many chunks as `odf run --all` does."""
        owner, done = new_owner(), 0
        with Scripts() as scripts:
            while done < chunks and (taken := runner.claim(owner)):
                for _, result in runner.run(*taken, scripts):
                    if result.code:
                        raise RuntimeError(result.reason)
                    done += 1
        if done != chunks:
            raise RuntimeError(f"{done} of {chunks} chunks were there")


def files(bench: Bench, report: Report, quick: bool) -> None:
    """Chunks from Parquet to Parquet: ours against bare PySpark."""
    blocks = 3 if quick else 10
    ids = [f"{at:04}" for at in range((blocks + 1) * BLOCK)]  # the first block warms up
    spark, samples = bench.spark, Samples()
    bench.arrive(ids)
    progress("making the input")
    bench.run(bench.runner("input", lambda chunk, spark: made(spark, int(chunk.dataid))), len(ids))
    one = bench.runner("one", transformed)
    many = bench.runner("many", spark_job(transformed, batch=BLOCK))

    def bare(block: list[str]) -> None:
        for each in block:
            df = spark.read.parquet(str(bench.folder / "input" / f"dataid={each}"))
            transformed(df).write.parquet(str(bench.folder / "bare" / f"dataid={each}"))

    for at in range(blocks + 1):
        block = ids[at * BLOCK : (at + 1) * BLOCK]
        ways: dict[str, Callable[[], object]] = {
            BARE: lambda block=block: bare(block),
            OURS: lambda: bench.run(one, BLOCK),
            BATCH: lambda: bench.run(many, BLOCK),
        }
        for name, way in ways.items():
            progress(f"block {at} of {blocks}: {name}")
            start = time.monotonic()
            way()
            if at:
                samples.add(name, 1000 * (time.monotonic() - start) / BLOCK)
    same(bench)
    report.table(
        f"Parquet to Parquet, {len(ids) - BLOCK} chunks × {ROWS:,} rows, ms per chunk",
        ["ms", "of bare"],
        [
            [name, spread(samples[name]), spread(samples.ratios(name, BARE))]
            for name in (BARE, OURS, BATCH)
        ],
    )
    report.require("our whole path of bare", samples.ratios(OURS, BARE), most=1.15)
    report.require("micro-batches of bare", samples.ratios(BATCH, BARE), most=0.6)


def made(spark: "SparkSession", at: int) -> "DataFrame":
    return spark.range(at * ROWS, (at + 1) * ROWS, numPartitions=1).selectExpr(*COLUMNS)


def same(bench: Bench) -> None:
    """Fail unless all ways have made the same rows."""
    counts = {
        name: bench.spark.read.parquet(str(bench.folder / name)).selectExpr(
            "count(*)", "sum(id)", "sum(total)", "count(distinct dataid)"
        ).first()
        for name in ("bare", "one", "many")
    }  # fmt: skip
    if len(set(counts.values())) != 1:
        raise RuntimeError(f"The ways differ: {counts}")


def noop(bench: Bench, report: Report, quick: bool) -> None:
    """A chunk of one row, in a session that is warm."""
    count, warm = (30, 10) if quick else (100, 30)
    ids = [f"{at:04}" for at in range(count + warm)]
    bench.arrive(ids)
    bench.run(bench.runner("input", lambda chunk, spark: spark.range(1)), len(ids))
    runner = bench.runner("one", lambda df: df)
    bench.run(runner, warm)
    taken = []
    for _ in range(count):
        start = time.monotonic()
        bench.run(runner, 1)
        taken.append(1000 * (time.monotonic() - start))
    late = statistics.quantiles(taken, n=20)[-1]
    report.table(
        f"A chunk of one row, claim to READY, {count} times",
        ["ms", "95 of 100 under"],
        [["warm session", spread(taken), f"{late:.0f}"]],
    )
    report.require("no-op chunk", taken, most=300, unit=" ms")


def memory(bench: Bench, report: Report, quick: bool) -> None:
    """What the driver keeps, after 200 chunks and after 1,000."""
    count, every = (300, 60) if quick else (1000, 200)
    ids = [f"{at:04}" for at in range(count)]
    bench.arrive(ids)
    runner = bench.runner("input", lambda chunk, spark: spark.range(100))
    rows, heaps, pythons = [], [], []
    for done in range(every, count + 1, every):
        progress(f"memory: {done} of {count} chunks")
        bench.run(runner, every)
        heap, python = used(bench.spark)
        heaps.append(heap)
        pythons.append(python)
        rows.append([f"{done} chunks", f"{heap:.1f}", f"{python:.1f}"])
    report.table("Memory of the driver, MB", ["Java's heap after collection", "Python"], rows)
    report.require("Java's heap at the end of that at the first look", [heaps[-1] / heaps[0]],
                   most=1.15)  # fmt: skip
    report.require("Python at the end of that at the first look", [pythons[-1] / pythons[0]],
                   most=1.1)  # fmt: skip


def used(spark: "SparkSession") -> tuple[float, float]:
    """MB that Java's heap holds after collection, and of this process."""
    gc.collect()
    jvm: Any = spark._jvm
    for _ in range(3):
        jvm.System.gc()
        time.sleep(0.3)
    runtime = jvm.Runtime.getRuntime()
    heap = (runtime.totalMemory() - runtime.freeMemory()) / 2**20
    return heap, psutil.Process().memory_info().rss / 2**20


MEASURES = {"files": files, "noop": noop, "memory": memory}

if __name__ == "__main__":
    sys.exit(concluded(main))
