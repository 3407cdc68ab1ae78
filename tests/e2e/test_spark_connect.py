"""The same jobs on a server of Spark Connect, where there is no Java in the driver's process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opendataflow_dagster.store import open_store
from tests.support.store_fixtures import close, put, register, sql

JOBS = """
from pyspark.sql import DataFrame, functions as F
from opendataflow_dagster import spark_job


def copies(numbers: DataFrame):
    return numbers.withColumn("twice", F.col("n") * 2)


@spark_job(batch=3, expect={"range": {"n": (0, 40)}, "unique": ["n"]})
def batched(copies: DataFrame):
    return copies.withColumn("more", F.col("twice") + 1)


def failing(copies: DataFrame):
    return copies.selectExpr("1 / (n - n) as x")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / ".dataflow").mkdir()
    (tmp_path / "numbers").mkdir()
    (tmp_path / "jobs.py").write_text(JOBS)
    store = open_store(f"sqlite:///{tmp_path}/.dataflow/dataflow.db")
    store.init()
    for name in ("numbers", "copies", "batched", "failing"):
        sql(
            store,
            "insert into dataset (datasetid, hostname) values (:d, :h)",
            d=name,
            h=f"{tmp_path}/{name}",
        )
    for name, reads in (("copies", "numbers"), ("batched", "copies"), ("failing", "copies")):
        register(store, name, [reads], [name])
    for at in range(1, 6):
        rows = "\n".join(map(str, range(at * 10, at * 10 + 5)))
        (tmp_path / "numbers" / f"{at}.csv").write_text(f"n\n{rows}\n")
        put(store, "numbers", str(at))
    close(store)
    return tmp_path


RUN = """
import sys
from opendataflow_dagster.config.settings import load_settings
from opendataflow_dagster.store import open_from
from opendataflow_dagster.spark.job import load_job
from opendataflow_dagster.spark.worker import run_spark_job
from opendataflow_dagster.spark.session import is_remote, spark_session

settings = load_settings()
session, store = spark_session(settings=settings), open_from(settings)
print("Connect" if is_remote(session) else "classic")
for name in ("copies", "batched", "failing"):
    run_spark_job(store, name, name, load_job(f"jobs.py:{name}")[0], settings, say=print,
                  environ={}, all_chunks=True, session=lambda: session)
session.stop()
"""


def run(**environ: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", RUN],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env=os.environ | environ,
    ).stdout


def facts(folder: Path) -> list[tuple]:
    store = open_store(f"sqlite:///{folder}/.dataflow/dataflow.db")
    try:
        return sql(
            store,
            "select datasetid, dataid, rows, fingerprint, schema, checks from chunkfact "
            "where rows is not null order by 1, 2, generation",
        )
    finally:
        close(store)


@pytest.mark.timeout(240)
def test_the_same_chunks_come_out_of_a_server(folder: Path, connect_url: str) -> None:
    said = run(DATAFLOW_SPARK_REMOTE=connect_url)
    there = facts(folder)

    assert said.startswith("Connect\n")
    assert "one by one" not in said
    assert said.count("Reason: NOT_VALIDATED: range_n: ") == 2  # 41 to 44, and 50 to 54
    assert said.count("Reason: [DIVIDE_BY_ZERO]") == 5
    assert [row[2] for row in there if row[0] == "copies"] == [5] * 5
    assert not list(folder.glob("*/_staging"))

    store = open_store(f"sqlite:///{folder}/.dataflow/dataflow.db")
    sql(
        store,
        "update datastatus set status = 'RESUBMIT' where status in ('READY', 'FAILED') "
        "and datasetid <> 'numbers'",
    )
    sql(store, "delete from chunkfact")
    close(store)
    assert run().startswith("classic\n")
    assert facts(folder) == there
