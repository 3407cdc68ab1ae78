"""The classes of Spark in an archive that Java maps into memory: each start takes half the time.

`make test` writes it once into .venv; without it, the tests only take longer.
"""

import os
import sys
from pathlib import Path

ARCHIVE = Path(sys.prefix) / "spark-classes.jsa"
QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xlog:disable -Xlog:all=error:stderr"


def options() -> str:
    """Java's options for tests: they start it often, and none runs for long."""
    return f"{QUICK} -XX:SharedArchiveFile={ARCHIVE}" if ARCHIVE.exists() else QUICK


def write() -> None:
    """Start Spark, do a bit of what tests do, and let Java write the archive when it ends."""
    import subprocess
    import tempfile

    new = ARCHIVE.with_suffix(".new")
    os.environ["SPARK_SUBMIT_OPTS"] = f"{QUICK} -XX:ArchiveClassesAtExit={new}"
    from pyspark.sql import functions as F

    from opendataflow_dagster.spark.session import spark_session

    with tempfile.TemporaryDirectory() as folder:
        spark = spark_session({"spark.master": "local[2]"}, app="archive")
        java: subprocess.Popen[bytes] = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
        frame = spark.range(100).withColumn("at", F.current_timestamp())
        frame = frame.join(spark.range(10), "id", "left").groupBy("at").agg(F.sum("id").alias("n"))
        for kind in ("parquet", "csv", "json", "orc"):
            frame.write.format(kind).save(f"{folder}/{kind}")
            spark.read.format(kind).load(f"{folder}/{kind}").distinct().toPandas()
        frame.mapInPandas(lambda parts: parts, frame.schema).collect()
        spark.stop()
        java.stdin.close()  # type: ignore[union-attr]  # then Java ends by itself
        java.wait(60)
    new.replace(ARCHIVE)


if __name__ == "__main__":
    try:
        write()
    except Exception as error:
        why = str(error).partition("\n")[0]
        print(f"Tests of Spark take longer, without an archive: {why}", file=sys.stderr)
