"""Packed chunks of the previous version are readable; unpacked, Spark finds the same rows."""

import json
from typing import Any

import pytest
from pyspark.sql import SparkSession

from opendataflow_dagster.errors import Refused
from opendataflow_dagster.location import is_packed
from opendataflow_dagster.spark.chunks import read_files, read_packed
from opendataflow_dagster.spark.evidence import observed
from opendataflow_dagster.spark.job import spark_job
from opendataflow_dagster.storage.chunks import ask, read, read_chunk
from opendataflow_dagster.storage.compact import unpack
from opendataflow_dagster.storage.folder import chunk_path, read_note
from opendataflow_dagster.storage.presence import misplaced
from tests.support.packs import put_packed
from tests.support.spark_line import Line
from tests.support.store_fixtures import put

WRITTEN = ["spark_zoned_int96", "spark_local_timestamp_micros"]


@pytest.fixture(params=WRITTEN)
def packed(line: Line, request: pytest.FixtureRequest) -> tuple[Line, list[dict[str, Any]]]:
    """Two chunks in one pack, and their facts."""
    line.job("copy", "numbers", "copies")
    line.job("more", "copies", "after")
    for dataid in ("1", "a/b"):
        put(line.store, "numbers", dataid)
    return line, put_packed(line.store, "copy", "copies", line.folder / "copies", request.param)


def evidence(df: Any) -> Any:
    """Return rows, fingerprint and the rest, as `facts.json` has them."""
    frame, taken = observed(df)
    frame.write.format("noop").mode("overwrite").save()
    return json.loads(json.dumps(taken(), default=str))


def test_pandas_and_arrow_read_a_packed_chunk(packed: tuple[Line, list[dict]]) -> None:
    line, chunks = packed
    for chunk in chunks:
        for kind in ("pandas", "arrow"):
            data, found = read_chunk(
                line.store,
                "copies",
                chunk["dataid"],
                lambda reading, kind=kind: read(reading, reading.target("parquet"), kind),
                format="parquet",
            )
            assert len(data) == chunk["rows"]
            assert "dataid" not in (data.columns if kind == "pandas" else data.column_names)
            assert found.fact["rows"] == chunk["rows"]
    found = ask(line.store, "copies", "1", "parquet")
    with pytest.raises(Refused, match="packed with others"):
        read(found, found.target("parquet"), "path")


@pytest.mark.parametrize("batch", [1, 3])
def test_spark_jobs_read_packed_chunks(packed: tuple[Line, list[dict]], batch: int) -> None:
    line, chunks = packed
    outcome = line.run("more", spark_job(lambda df: df, batch=batch))

    assert outcome.done == len(chunks)
    assert {d: fact["rows"] for d, fact in line.facts("after").items()} == {
        chunk["dataid"]: chunk["rows"] for chunk in chunks
    }


def test_spark_reads_the_same_before_and_after_unpacking(
    packed: tuple[Line, list[dict]], spark: SparkSession
) -> None:
    line, chunks = packed
    for chunk in chunks:
        assert is_packed(chunk["location"])
        assert evidence(read_packed(spark, chunk["location"])) == chunk["evidence"]

    assert {row.left for row in unpack(line.store, "copies")} == {""}

    for chunk in chunks:
        path = chunk_path(str(line.folder / "copies"), chunk["dataid"])
        assert evidence(read_files(spark, path, read_note(path), "parquet")) == chunk["evidence"]
        plain = spark.read.parquet(path)  # by what its footer says, without a note
        assert [list(column) for column in plain.dtypes] == chunk["dtypes"]


def test_packed_data_is_found_on_disk(packed: tuple[Line, list[dict]]) -> None:
    line, _ = packed
    columns = {"hostname": str(line.folder / "copies")}

    assert not list(misplaced(line.store, "copies", columns))

    for path in (line.folder / "copies" / "_packs").iterdir():
        path.unlink()
    gone = [held.dataid for held in misplaced(line.store, "copies", columns)]
    assert gone == ["1", "a/b"]
