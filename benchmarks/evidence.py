"""The cost of a chunk's evidence: `python benchmarks/evidence.py [--quick]`.

20 chunks of 50,000 rows × 8 columns, from Parquet to Parquet. First our whole path, claim to
READY, with evidence and without: the target is for this. Then Spark's write alone: bare, with
rows, fingerprint and schema collected in the same pass, and with rules as well. The variants take
turns chunk by chunk, and each ratio is that of a round's medians. Exit code 0 if the target is met.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from measure import Samples, concluded, progress  # noqa: E402
from product import (  # noqa: E402
    Evidence,
    observed,
    rules_of,
    schema_text,
    spark_session,
    writing,
)
from report import FULL, QUICK, SLICE, TINY, Report, options, spread  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Setting(NamedTuple):
    """How many chunks, and how large."""

    chunks: int
    rounds: int
    rows: int


SETTINGS = {
    FULL: Setting(20, 5, 50_000),
    QUICK: Setting(10, 2, 50_000),
    SLICE: Setting(10, 2, 50_000),
    TINY: Setting(1, 1, 50),
}
COLUMNS = (
    "id",
    "id % 97 as shop",
    "cast(rand(1) * 1000 as decimal(12, 2)) as amount",
    "cast(id as string) as name",
    "timestamp_seconds(id) as at",
    "rand(2) as x",
    "rand(3) as y",
    "if(id % 7 = 0, null, sha1(cast(id as string))) as code",
)
EXPECT = {"not_null": ["id", "name"], "range": {"amount": (0, 1000)}, "sql": {"x": "x < 1"}}

Write = Callable[["DataFrame", str, int], None]


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments)
    spark = spark_session({"spark.master": "local[2]"}, short=given.scale == TINY)
    report = Report("evidence", given, ("pyspark",))
    try:
        with tempfile.TemporaryDirectory(prefix="odf-evidence-") as folder:
            paths(spark, Path(folder, "paths"), SETTINGS[given.scale], report)
            measure(spark, Path(folder), SETTINGS[given.scale], report)
    finally:
        spark.stop()
    return report.verdict()


def paths(spark: "SparkSession", folder: Path, setting: Setting, report: Report) -> None:
    """Measure claim to READY, with evidence and without."""
    from spark import Bench

    chunks, rounds, size = setting
    module = writing()
    store = f"sqlite:///{folder / 'dataflow.db'}"
    folder.mkdir()
    bench = Bench(store, folder, spark)
    ids = [f"{at:04}" for at in range(chunks * (rounds + 1))]
    bench.arrive(ids)

    def made(chunk: Any, spark: Any) -> "DataFrame":
        at = int(chunk.dataid)
        return spark.range(at * size, (at + 1) * size, numPartitions=1).selectExpr(*COLUMNS)

    progress("making the input")
    bench.run(bench.runner("input", made), len(ids))
    ways = {
        "with": bench.runner("one", lambda df: df),
        "without": bench.runner("many", lambda df: df),
    }
    samples, medians = Samples(), Samples()
    for turn in range(rounds + 1):  # the first one warms up
        progress(f"whole path, round {turn} of {rounds}")
        for chunk in range(chunks):
            for name in list(ways)[:: 1 if chunk % 2 else -1]:
                module.observed = observed if name == "with" else unobserved
                start = time.perf_counter()
                bench.run(ways[name], 1)
                samples.add((turn, name), (time.perf_counter() - start) * 1000)
        module.observed = observed
        for name in ways:
            if turn:
                medians.add(name, statistics.median(samples[turn, name]))
    rows = [[f"{name} evidence", spread(medians[name])] for name in ways]
    report.table(f"Claim to READY, {setting.rows:,} rows × {len(COLUMNS)} columns", ["ms"], rows)
    ratios = medians.ratios("with", "without")
    report.require("with evidence of without, claim to READY", ratios, most=1.10)
    report.compare("with evidence / without, claim to READY", ratios, better="less")
    bench.store.close()


def unobserved(df: "DataFrame", extra: Sequence[str] = ()) -> tuple["DataFrame", Any]:
    """Replace `observed` by something that observes nothing."""
    schema = schema_text(df.schema)
    return df, lambda rows: Evidence(rows, "", schema)


def measure(spark: "SparkSession", folder: Path, setting: Setting, report: Report) -> None:
    chunks, rounds, size = setting
    progress("making the chunks")
    for chunk in range(chunks):
        frame = spark.range(chunk * size, (chunk + 1) * size, numPartitions=1)
        frame.selectExpr(*COLUMNS).write.parquet(str(folder / "in" / str(chunk)))
    schema = spark.read.parquet(str(folder / "in" / "0")).schema
    ways: dict[str, Write] = {"bare": bare, "with evidence": told, "and four rules": judged}
    samples, medians = Samples(), Samples()
    for turn in range(rounds + 1):  # the first one warms up
        progress(f"round {turn} of {rounds}")
        for chunk in range(chunks):
            # The order changes: a file that was just read is read faster.
            names = list(ways)[chunk % 3 :] + list(ways)[: chunk % 3]
            for name in names:
                frame = spark.read.schema(schema).parquet(str(folder / "in" / str(chunk)))
                start = time.perf_counter()
                ways[name](frame, str(folder / "out" / f"{turn}-{chunk}-{name[:4]}"), size)
                samples.add((turn, name), (time.perf_counter() - start) * 1000)
        for name in ways:
            if turn:
                medians.add(name, statistics.median(samples[turn, name]))
    rows = [[name, spread(medians[name])] for name in ways]
    report.table(f"A chunk of {setting.rows:,} rows × {len(COLUMNS)} columns", ["ms"], rows)
    ratios = medians.ratios("with evidence", "bare")
    report.say(f"  with evidence of bare: {spread(ratios)}")


def bare(frame: "DataFrame", place: str, rows: int) -> None:
    frame.write.parquet(place)


def told(frame: "DataFrame", place: str, rows: int) -> None:
    seen, evidence = observed(frame)
    seen.write.parquet(place)
    evidence(rows=rows)  # fails if it saw another number of rows


def judged(frame: "DataFrame", place: str, rows: int) -> None:
    rules = rules_of(EXPECT, ["out"])
    extra = [column for rule in rules for column in rule.observes("r")]
    seen, evidence = observed(frame, extra)
    seen.write.parquet(place)
    evidence(rows=rows)  # fails if it saw another number of rows


if __name__ == "__main__":
    sys.exit(concluded(main))
