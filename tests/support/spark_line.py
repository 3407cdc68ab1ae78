"""A line of datasets for Spark's tests: folders, chunks in them, and jobs run as `odf run` does."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from opendataflow_dagster.config.settings import load_settings
from opendataflow_dagster.runner.run import Outcome
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import close, put, register, sql, status

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@contextmanager
def labels_of_jobs(spark: "SparkSession") -> Iterator[list[tuple[str | None, str | None]]]:
    """Group and description of each Spark job in the block, as its UI has them."""
    context: Any = spark.sparkContext
    java = context._jsc.sc()

    def known() -> dict[int, tuple[str | None, str | None]]:
        java.listenerBus().waitUntilEmpty()
        jobs = java.statusStore().jobsList(None)
        found = [jobs.apply(at) for at in range(jobs.size())]
        return {
            job.jobId(): tuple(
                each.get() if each.isDefined() else None
                for each in (job.jobGroup(), job.description())
            )
            for job in found
        }

    before, labels = known(), []
    yield labels
    labels += [label for job, label in sorted(known().items()) if job not in before]


class Line:
    """A store and a folder, in which datasets are folders of their own."""

    def __init__(self, store: Store, spark: "SparkSession", folder: Path) -> None:
        self.store, self.spark, self.folder = store, spark, folder
        self.said: list[str] = []

    def dataset(self, datasetid: str, **told: Any) -> str:
        """Register a dataset; by default, a folder."""
        if "hostname" not in told and "database" not in told:
            told["hostname"] = str(self.folder / datasetid)
        add_dataset(self.store, datasetid, **told)
        return str(self.folder / datasetid)

    def job(self, jobid: str, ins: Any, outs: Any) -> None:
        """Register a job, and its datasets if they aren't registered."""
        known = {row[0] for row in sql(self.store, "select datasetid from dataset")}
        names = [[each] if isinstance(each, str) else list(each) for each in (ins, outs)]
        for each in names[0] + names[1]:
            if each not in known:
                self.dataset(each)
        register(self.store, jobid, *names)

    def arrive(self, datasetid: str, **chunks: "DataFrame") -> None:
        """Add READY chunks written by somebody else, one file each."""
        for name, df in chunks.items():
            self.arrived(datasetid, name.removeprefix("_"), df)

    def arrived(self, datasetid: str, dataid: str, df: "DataFrame") -> None:
        from opendataflow_dagster.storage.folder import chunk_path

        df.coalesce(1).write.parquet(chunk_path(str(self.folder / datasetid), dataid))
        put(self.store, datasetid, dataid)

    def run(
        self, jobid: str, fn: Callable[..., Any], all_chunks: bool = True, **more: Any
    ) -> Outcome:
        from opendataflow_dagster.spark.job import as_spark_job
        from opendataflow_dagster.spark.worker import run_spark_job

        self.store._plans.clear()
        return run_spark_job(
            self.store,
            jobid,
            jobid,
            as_spark_job(fn),
            load_settings(),
            say=self.said.append,
            environ=os.environ,
            session=lambda: self.spark,
            all_chunks=all_chunks,
            **more,
        )

    def status(self, datasetid: str, dataid: str, jobid: str) -> str | None:
        return status(self.store, datasetid, dataid, jobid)

    def facts(self, datasetid: str) -> dict[str, Mapping[str, Any]]:
        """Return dataid → the facts about its last generation."""
        names = (
            "dataid",
            "rows",
            "bytes",
            "fingerprint",
            "schema",
            "location",
            "validated",
            "checks",
            "generation",
            "inputs",
        )
        rows = sql(
            self.store,
            f"select {', '.join(names)} from chunkfact where datasetid = :d order by generation",
            d=datasetid,
        )
        return {row[0]: dict(zip(names, row, strict=True)) for row in rows}

    def fingerprints(self, datasetid: str) -> dict[str, str]:
        return {each: fact["fingerprint"] for each, fact in self.facts(datasetid).items()}

    def rows(self, datasetid: str, dataid: str | None = None) -> list[tuple]:
        """The rows of a dataset as plain Spark reads them."""
        key = "spark.sql.sources.partitionColumnTypeInference.enabled"
        self.spark.conf.set(key, "false")
        df = self.spark.read.parquet(str(self.folder / datasetid))
        if dataid is not None:
            df = df.where(df["dataid"] == dataid).drop("dataid")
        return sorted((tuple(row) for row in df.collect()), key=repr)

    def reason(self) -> str:
        """Return the last reason that was reported for a failure."""
        told = [line for line in self.said if "Reason: " in line]
        return told[-1].partition("Reason: ")[2] if told else ""

    def left(self) -> list[str]:
        """Return what is left over that isn't a chunk."""
        return [str(each) for each in self.folder.glob("*/_*/**")]


@pytest.fixture
def line(sqlite_url: str, spark: "SparkSession", tmp_path: Path) -> Iterator[Line]:
    """A line on SQLite."""
    store = open_store(sqlite_url)
    store.init()
    yield Line(store, spark, tmp_path / "data")
    close(store)
