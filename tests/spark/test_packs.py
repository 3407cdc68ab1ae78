"""Packed chunks are chunks for everybody: pandas, Arrow, Spark, `odf drift`, `odf compact`."""

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from opendataflow_dagster.errors import Refused
from opendataflow_dagster.spark.job import spark_job
from opendataflow_dagster.storage.audit import misplaced
from opendataflow_dagster.storage.compact_pack import pack
from opendataflow_dagster.storage.publish import read
from opendataflow_dagster.storage.read import ask, read_chunk
from tests.support.spark_line import Line


@pytest.fixture
def packed(line: Line, spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> Line:
    """Three chunks in one pack."""
    monkeypatch.setattr("opendataflow_dagster.storage.compact_pack.LINGER", 0.0)
    line.job("copy", "numbers", "copies")
    line.job("more", "copies", "after")
    for at in range(1, 4):
        df = spark.range(at * 10).selectExpr("id as n", "map('k', id) as m", "double(id) as x")
        line.arrived("numbers", str(at), df)
    line.run("copy", lambda df: df)
    told = list(pack(line.store, "copies"))
    assert [each.name for each in (line.folder / "copies").iterdir()] == ["_packs"], told
    return line


def test_pandas_and_arrow_read_a_packed_chunk(packed: Line) -> None:
    for kind, rows in (("pandas", 20), ("arrow", 20)):
        data, found = read_chunk(
            packed.store,
            "copies",
            "2",
            lambda reading, kind=kind: read(reading, reading.target("parquet"), kind),
            format="parquet",
        )
        assert len(data) == rows
        assert "dataid" not in (data.columns if kind == "pandas" else data.column_names)
        assert found.fact["rows"] == rows
    found = ask(packed.store, "copies", "2", "parquet")
    with pytest.raises(Refused, match="packed with others"):
        read(found, found.target("parquet"), "path")


@pytest.mark.parametrize("batch", [1, 3])
def test_spark_reads_packed_chunks(packed: Line, batch: int) -> None:
    outcome = packed.run("more", spark_job(lambda df: df, batch=batch))

    assert outcome.done == 3
    assert packed.fingerprints("after") == packed.fingerprints("copies")


def test_packed_data_isnt_missed_by_who_looks_at_the_disk(packed: Line) -> None:
    columns = {"hostname": str(packed.folder / "copies")}

    assert not list(misplaced(packed.store, "copies", columns))

    for each in (packed.folder / "copies" / "_packs").iterdir():
        each.unlink()
    assert [each.dataid for each in misplaced(packed.store, "copies", columns)] == ["1", "2", "3"]


def test_a_packed_chunk_can_be_made_again(packed: Line) -> None:
    from opendataflow_dagster.store.operations import resubmit

    resubmit(packed.store, "copy", ["2"])
    packed.run("copy", lambda df: df.withColumn("n", F.col("n") + 1))
    packed.run("more", lambda df: df)

    facts = packed.facts("after")
    assert facts["2"]["fingerprint"] == packed.facts("copies")["2"]["fingerprint"]
    assert facts["1"]["rows"] == 10


def test_all_chunks_are_there_for_plain_spark_in_two_places(
    packed: Line, spark: SparkSession
) -> None:
    whole: DataFrame = spark.read.parquet(str(packed.folder / "copies" / "_packs"))

    assert whole.groupBy("dataid").count().count() == 3
    assert whole.count() == 60
