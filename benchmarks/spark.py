"""The cost of chunks on Spark: `python benchmarks/spark.py [--quick] [--only NAME]`.

files: 140 chunks of 50,000 rows from Parquet to Parquet: bare PySpark, our whole path (claim,
evidence, publish, settle) one by one, and in micro-batches, in turns of 20 chunks. noop: a chunk of
one row in a warm session, end to end. memory: the driver's, over 600 chunks. result: the driver's
memory while a pipeline writes a large result into one CSV file. The status tables are on
PostgreSQL. Exit code 0 if every target is met.
"""

import contextlib
import gc
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from measure import Samples, concluded, progress  # noqa: E402
from product import (  # noqa: E402
    Scripts,
    Settings,
    SparkRunner,
    Store,
    add_dataset,
    add_job,
    as_spark_job,
    new_owner,
    open_store,
    read_project,
    ready,
    run_pipeline,
    spark_job,
    spark_session,
)
from report import FULL, QUICK, SLICE, TINY, Report, options, spread  # noqa: E402

from tests.support.postgres import Server  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Setting(NamedTuple):
    """How many, and how large."""

    blocks: int
    """Rounds, after one that warms up."""

    block: int
    """Chunks per turn."""

    rows: int
    noops: int
    warm: int
    looks: int
    """How often memory is sampled."""

    every: int
    """Chunks between two samples."""

    result: int
    """Rows of a pipeline's result, of 120 characters each."""


SETTINGS = {
    FULL: Setting(7, 20, 50_000, 100, 30, 5, 120, 5_000_000),
    QUICK: Setting(3, 20, 50_000, 30, 10, 5, 60, 2_000_000),
    SLICE: Setting(3, 10, 50_000, 30, 10, 0, 0, 0),
    TINY: Setting(1, 2, 50, 2, 1, 2, 2, 20_000),
}
COLUMNS = (
    "id",
    "id % 97 as shop",
    "cast(rand(1) * 1000 as decimal(12, 2)) as amount",
    "cast(id as string) as name",
    "timestamp_seconds(id) as at",
    "rand(2) as x",
    "rand(3) as y",
    "sha1(cast(id as string)) as code",
)
BARE, OURS, BATCH = "bare PySpark", "one by one", "micro-batches"


def transformed(df: "DataFrame") -> "DataFrame":
    """Return what the job computes from a chunk, in every variant."""
    return df.where("x < 0.9").selectExpr("*", "amount * 2 as total")


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments, only=tuple(MEASURES))
    report = Report("spark", given, ("PostgreSQL", "pyspark"))
    with (
        tempfile.TemporaryDirectory(prefix="odf-spark-") as folder,
        contextlib.chdir(folder),
        Server() as server,
    ):
        conf = {"spark.master": "local[2]", "spark.driver.memory": "1g"}
        spark = spark_session(conf, short=given.scale == TINY)
        try:
            for name in [given.only] if given.only else MEASURES:
                bench = Bench(server.create_database(name), Path(folder, name), spark)
                MEASURES[name](bench, report, SETTINGS[given.scale])
                bench.store.close()
        finally:
            spark.stop()
    return report.verdict()


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
        """Mark the source's chunks as READY: the function that creates the input reads no files."""
        ready(self.store, "source", ids)

    def runner(self, jobid: str, fn: Callable[..., Any]) -> SparkRunner:
        return SparkRunner(
            self.store,
            jobid,
            jobid,
            as_spark_job(fn),
            lambda: self.spark,
            say=lambda line: None,
            environ=os.environ,
        )

    def run(self, runner: SparkRunner, chunks: int) -> None:
        """Produce so many chunks, like `odf run --all`."""
        owner, done = new_owner(), 0
        with Scripts() as scripts:
            while done < chunks and (taken := runner.claim(owner, at_once(runner))):
                for _, result in runner.run(*taken, scripts):
                    if result.code:
                        raise RuntimeError(result.reason)
                    done += 1
        if done != chunks:
            raise RuntimeError(f"{done} of {chunks} chunks were there")


def at_once(runner: SparkRunner) -> int:
    """Return how many chunks `odf run --all` would claim."""
    return runner.at_once() if hasattr(runner, "at_once") else 1  # older ones decide internally


def files(bench: Bench, report: Report, setting: Setting) -> None:
    """Measure chunks from Parquet to Parquet: ours against bare PySpark."""
    blocks, size, rows = setting.blocks, setting.block, setting.rows
    ids = [f"{at:04}" for at in range((blocks + 1) * size)]  # the first block warms up
    spark, samples = bench.spark, Samples()
    bench.arrive(ids)
    progress("making the input")
    bench.run(
        bench.runner("input", lambda chunk, spark: made(spark, int(chunk.dataid), rows)), len(ids)
    )
    one = bench.runner("one", transformed)
    many = bench.runner("many", spark_job(transformed, batch=size))

    def bare(block: list[str]) -> None:
        for dataid in block:
            df = spark.read.parquet(str(bench.folder / "input" / f"dataid={dataid}"))
            transformed(df).write.parquet(str(bench.folder / "bare" / f"dataid={dataid}"))

    for at in range(blocks + 1):
        block = ids[at * size : (at + 1) * size]
        ways: dict[str, Callable[[], object]] = {
            BARE: lambda block=block: bare(block),
            OURS: lambda: bench.run(one, size),
            BATCH: lambda: bench.run(many, size),
        }
        for name, way in ways.items():
            progress(f"block {at} of {blocks}: {name}")
            start = time.monotonic()
            way()
            if at:
                samples.add(name, 1000 * (time.monotonic() - start) / size)
    same(bench)
    report.table(
        f"Parquet to Parquet, {len(ids) - size} chunks × {rows:,} rows, ms per chunk",
        ["ms", "of bare"],
        [
            [name, spread(samples[name]), spread(samples.ratios(name, BARE))]
            for name in (BARE, OURS, BATCH)
        ],
    )
    report.require("our whole path of bare", samples.ratios(OURS, BARE), most=1.15)
    what = f"micro-batches of {size} of bare"
    report.require(what, samples.ratios(BATCH, BARE), most=0.6)
    for way in (OURS, BATCH):
        report.compare(f"{way} / {BARE}", samples.ratios(way, BARE), better="less")


def made(spark: "SparkSession", at: int, rows: int) -> "DataFrame":
    return spark.range(at * rows, (at + 1) * rows, numPartitions=1).selectExpr(*COLUMNS)


def same(bench: Bench) -> None:
    """Fail unless all variants wrote the same rows."""
    counts = {
        name: bench.spark.read.parquet(str(bench.folder / name))
        .selectExpr("count(*)", "sum(id)", "sum(total)", "count(distinct dataid)")
        .first()
        for name in ("bare", "one", "many")
    }
    if len(set(counts.values())) != 1:
        raise RuntimeError(f"The ways differ: {counts}")


def noop(bench: Bench, report: Report, setting: Setting) -> None:
    """Measure a chunk of one row, in a warm session."""
    count, warm = setting.noops, setting.warm
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


def memory(bench: Bench, report: Report, setting: Setting) -> None:
    """Measure what the driver holds at the first sample, and at the last."""
    count, every = setting.looks * setting.every, setting.every
    if not count:
        return
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
    report.require(
        "Java's heap at the end of that at the first look", [heaps[-1] / heaps[0]], most=1.15
    )
    report.require(
        "Python at the end of that at the first look", [pythons[-1] / pythons[0]], most=1.1
    )


RUN = """
from pyspark.sql import DataFrame

def run(df: DataFrame) -> DataFrame:
    rows = df.sparkSession.range(0, {rows}, 1, 8)
    return rows.selectExpr("id", "repeat(sha1(string(id)), 3) as text")
"""


def result(bench: Bench, report: Report, setting: Setting) -> None:
    """Measure the driver's peak while a pipeline writes a result larger than its memory."""
    if not setting.result:
        return
    root = bench.folder / "project"
    (root / "pipelines" / "big").mkdir(parents=True)
    (root / "project.yml").write_text("pipelines:\n  - {slug: big, transformations: [make]}\n")
    (root / "pipelines" / "big" / "make.py").write_text(RUN.format(rows=setting.result))
    before, peak, over = psutil.Process().memory_info().rss, 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(0.05):
            peak = max(peak, psutil.Process().memory_info().rss)

    progress(f"result: {setting.result:,} rows")
    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    try:
        outcome = run_pipeline(
            bench.store,
            read_project(root),
            "big",
            Settings(""),
            say=lambda line: None,
            environ=os.environ,
            session=lambda: bench.spark,
        )
    finally:
        over.set()
        watcher.join()
    if outcome.done != 1:
        raise RuntimeError("The pipeline's run failed")
    size = (root / "output" / "big.csv").stat().st_size / 2**20
    grown = max(0, peak - before) / 2**20
    report.table(
        f"A pipeline's result of {setting.result:,} rows into one CSV file, Java with 1 GB",
        ["MB of CSV", "s", "MB that Python grew by"],
        [["native Spark", f"{size:.0f}", f"{time.monotonic() - start:.1f}", f"{grown:.0f}"]],
    )
    report.require("Python's growth while a large result is written", [grown], most=200, unit=" MB")


def used(spark: "SparkSession") -> tuple[float, float]:
    """Return the MB that Java's heap holds after collection, and of this process."""
    gc.collect()
    jvm: Any = spark._jvm
    for _ in range(3):
        jvm.System.gc()
        time.sleep(0.3)
    runtime = jvm.Runtime.getRuntime()
    heap = (runtime.totalMemory() - runtime.freeMemory()) / 2**20
    return heap, psutil.Process().memory_info().rss / 2**20


MEASURES = {"files": files, "noop": noop, "memory": memory, "result": result}

if __name__ == "__main__":
    sys.exit(concluded(main))
