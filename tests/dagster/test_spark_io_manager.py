"""Frames of Spark in plain assets: read by annotation, published with their evidence."""

import datetime as dt
import json
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import udf

from opendataflow_dagster import DataflowIOManager, DataflowResource
from opendataflow_dagster.formats import FILE_FORMATS
from opendataflow_dagster.spark import chunks, progress
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.dagster.test_io_manager import Ran, asset, dataflow, instance, run, url  # noqa: F401
from tests.support.spark_line import labels_of_jobs
from tests.support.store_fixtures import check, register, sql, status

# Dagster's own, of any resource in another: it replaces its config by what it deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:InitResourceContext.dagster_run is deprecated")

Run = Callable[..., Ran]


@pytest.fixture
def store(dataflow: DataflowResource, spark: SparkSession) -> Store:
    """The tables, with a Spark session in this process for reading."""
    return dataflow.store


def schema_of(event: dg.AssetMaterialization) -> dict[str, str]:
    told = event.metadata["dagster/column_schema"].value
    assert isinstance(told, dg.TableSchema)
    return {each.name: each.type for each in told.columns}


def writer(df: Callable[[DataFrame], Any], **more: Any) -> dg.AssetsDefinition:
    """An asset that produces `bobout` from a chunk of `bobin`, with Spark."""

    def bobout(bobin: DataFrame) -> Any:
        return df(bobin)

    return asset(bobout, **more)


def reader(annotation: Any, seen: list[Any]) -> dg.AssetsDefinition:
    def looked(bobout) -> None:
        seen.append(bobout)

    looked.__annotations__["bobout"] = annotation
    return asset(looked)


def test_a_frame_of_spark_is_read_and_published_with_its_evidence(
    store: Store,
    run: Run,
    spark: SparkSession,
    tmp_path: Path,
) -> None:
    with labels_of_jobs(spark) as labels:
        ran = run(writer(lambda df: df.selectExpr("name", "amount * 2 as twice")), "1")

    assert ran.success
    assert ("loadbob 1", "odf loadbob: chunk 1") in labels
    assert status(store, "bobout", "1", "loadbob") == "READY"
    [fact] = sql(
        store, "select generation, rows, bytes, fingerprint, schema from chunkfact where rows = 1"
    )
    told = ran.metadata()
    assert (told["generation"], told["rows"], told["bytes"], told["fingerprint"]) == fact[:4]
    assert fact[1] == 1
    assert fact[3].startswith("1-")
    assert fact[4] == "name:string,twice:int"
    assert schema_of(ran.made["bobout", "1"]) == {"name": "string", "twice": "int"}
    assert ran.loaded()["dataset"] == "bobin"
    assert not list(tmp_path.glob("*/_*"))
    check(store)


def test_the_read_generation_and_fingerprint_are_logged(store: Store, run: Run) -> None:
    first = run(writer(lambda df: df), "1").metadata()

    ran = run(reader(DataFrame, []), "1")

    told = ran.loaded()
    assert (told["generation"], told["rows"]) == (first["generation"], 1)
    assert told["fingerprint"] == first["fingerprint"]
    assert f"generation {first['generation']}" in told["right"]


def test_other_columns_than_the_last_chunks_are_refused_unless_declared(
    store: Store,
    run: Run,
) -> None:
    assert run(writer(lambda df: df), "1").success
    more = "*", "1 as more"

    ran = run(writer(lambda df: df.selectExpr(*more)), "2")
    assert ran.reason.startswith(
        "FAILED: NOT_VALIDATED: the schema of 'bobout' differs from its last chunk '1': column "
        "'more' is new. If that is intended: give the asset the metadata "
        """{"opendataflow/schema": "merge"}, or "any"."""
    )
    assert status(store, "bobout", "2", "loadbob") == "FAILED"

    how = {"opendataflow/schema": "other"}
    ran = run(writer(lambda df: df.selectExpr(*more), metadata=how), "2", resubmit="true")
    assert "'other': choose from 'same', 'merge', 'any'" in ran.reason

    how = {"opendataflow/schema": "merge"}
    ran = run(writer(lambda df: df.selectExpr(*more), metadata=how), "2", resubmit="true")
    assert ran.success
    assert schema_of(ran.made["bobout", "2"]) == {"name": "string", "amount": "int", "more": "int"}
    check(store)


def test_several_partitions_are_joined_and_published_one_by_one(
    store: Store,
    run: Run,
    spark: SparkSession,
) -> None:
    seen: list[DataFrame] = []

    def bobout(bobin: DataFrame) -> dict[str, DataFrame]:
        seen.append(bobin)
        return {key: bobin.where(f"amount = {key}") for key in ("1", "2")}

    ran = run(asset(bobout), "1", "2")

    assert ran.success
    assert sorted(map(tuple, seen[0].collect())) == [("x", 1), ("x", 2)]
    assert [ran.metadata(key=key)["rows"] for key in ("1", "2")] == [1, 1]
    again: list[Any] = []
    assert run(reader(dict[str, DataFrame], again), "1", "2").success
    assert {key: each.collect()[0].amount for key, each in again[0].items()} == {"1": 1, "2": 2}


def test_partitions_of_a_merged_schema_are_joined(store: Store, run: Run) -> None:
    merge = {"opendataflow/schema": "merge"}
    run(writer(lambda df: df.selectExpr("name", "1 as n")), "1")
    run(writer(lambda df: df.selectExpr("name", "2L as n", "'x' as more"), metadata=merge), "2")
    seen: list[Any] = []

    assert run(reader(DataFrame, seen), "1", "2").success

    [df] = seen
    assert [each.simpleString() for each in df.schema] == ["name:string", "n:bigint", "more:string"]
    assert sorted(map(tuple, df.select("n", "more").collect())) == [(1, None), (2, "x")]


def test_partitions_that_have_nothing_in_common_are_refused_by_name(
    store: Store,
    run: Run,
) -> None:
    run(writer(lambda df: df.selectExpr("1 as n")), "1")
    run(writer(lambda df: df.selectExpr("'x' as n"), metadata={"opendataflow/schema": "any"}), "2")

    ran = run(reader(DataFrame, []), "1", "2")

    assert not ran.success
    assert "can't be combined: in chunk '2', column 'n' was int and is string. Annot" in ran.reason


def test_a_frame_computed_from_replaced_data_is_refused(
    store: Store,
    run: Run,
    tmp_path: Path,
) -> None:
    assert run(writer(lambda df: df), "1").success
    register(store, "sum", ["bobout"], ["total"])
    add_dataset(store, "total", hostname=str(tmp_path / "total"))

    def total(bobout: DataFrame) -> DataFrame:
        more = writer(lambda df: df.union(df))
        assert run(more, "1", resubmit="true").success
        return bobout.groupBy().sum("amount")  # computed when it is written

    ran = run(asset(total), "1")

    assert ran.reason.startswith("DATA_NOT_READY: 'bobout' was replaced while this chunk was")
    assert status(store, "total", "1", "sum") is None
    assert not (tmp_path / "total").exists()
    check(store)


def test_sparks_error_about_a_bad_frame_is_one_line_and_nothing_is_left(
    store: Store,
    run: Run,
    tmp_path: Path,
) -> None:
    ran = run(writer(lambda df: df.selectExpr("1 / (amount - amount) as x")), "1")

    assert ran.reason.startswith("FAILED: [DIVIDE_BY_ZERO]")
    assert "\n" not in ran.reason
    assert status(store, "bobout", "1", "loadbob") == "FAILED"
    assert not list((tmp_path / "bobout").iterdir())


def test_a_long_job_logs_its_progress(
    store: Store,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "PROGRESS_SECONDS", 0.3)

    @udf("long", useArrow=False)
    def slow(n: int) -> int:
        time.sleep(1)
        return n

    def rows(df: DataFrame) -> DataFrame:
        return df.sparkSession.range(0, 6, 1, 6).select(slow("id").alias("id"))

    assert run(writer(rows), "1").success
    told = [each for each in capsys.readouterr().err.splitlines() if "stage " in each]
    assert 1 <= len(told) <= 4
    assert all("bobout - stage 1 of 1: " in each for each in told)


# --- Spark's chunks for pandas, and the other way round ---


MOMENT = dt.datetime(2026, 3, 29, 1, 30, 0, 123456)
LONG_AGO = dt.datetime(1066, 10, 14, 9, 0)
SCHEMA = (
    "id bigint, small int, text string, d decimal(20,4), day date, at timestamp, "
    "local timestamp_ntz, yes boolean, x double"
)
ROWS: list[tuple[Any, ...]] = [
    (
        2**60 + 1,
        1,
        "007",
        Decimal("1234567890123456.0001"),
        dt.date(2026, 3, 29),
        MOMENT,
        MOMENT,
        True,
        0.1,
    ),
    (None, None, None, None, None, None, None, None, None),
    (
        3,
        3,
        ' "quoted", one\nof two lines ',
        Decimal("-0.0001"),
        dt.date(1066, 10, 14),
        LONG_AGO,
        LONG_AGO,
        False,
        float("nan"),
    ),
    (4, 4, "", Decimal(0), dt.date(9999, 12, 31), MOMENT, MOMENT, False, float("-inf")),
    (5, 5, "NULL", Decimal(0), dt.date(9999, 12, 31), MOMENT, MOMENT, False, 1e300),
]


@pytest.fixture
def spark_wrote(
    store: Store,
    run: Run,
    spark: SparkSession,
) -> Callable[..., None]:
    """A chunk of `bobout` that Spark wrote in two files, in a format."""

    def wrote(rows: list[tuple[Any, ...]], schema: str, format: str = "parquet") -> None:
        sql(store, "update dataset set format = :f where datasetid = 'bobout'", f=format)
        df = spark.createDataFrame(rows, schema)
        assert run(writer(lambda _: df.repartition(2)), "1").success

    return wrote


@pytest.mark.parametrize("format", [each.name for each in FILE_FORMATS if each.in_spark])
def test_pandas_reads_what_spark_wrote(
    run: Run,
    spark_wrote: Callable[..., None],
    format: str,
) -> None:
    spark_wrote(ROWS, SCHEMA, format)
    seen: list[Any] = []

    assert run(reader(pd.DataFrame, seen), "1").success
    assert run(reader(pa.Table, seen), "1").success

    frame, table = seen
    frame = frame.sort_values("small", na_position="first").reset_index(drop=True)
    assert frame["id"].tolist() == [pd.NA, 2**60 + 1, 3, 4, 5]
    assert frame["small"].tolist() == [pd.NA, 1, 3, 4, 5]
    texts = [None, "007", ' "quoted", one\nof two lines ', "", "NULL"]
    assert frame["text"].tolist() == texts
    assert frame["d"].tolist()[1:3] == [Decimal("1234567890123456.0001"), Decimal("-0.0001")]
    assert frame["day"].tolist()[1:4] == [row[4] for row in (ROWS[0], *ROWS[2:4])]
    assert frame["local"].tolist()[1:3] == [MOMENT, LONG_AGO]
    assert frame["at"].tolist()[1:3] == [each.replace(tzinfo=dt.UTC) for each in (MOMENT, LONG_AGO)]
    assert frame["yes"].tolist() == [None, True, False, False, False]
    assert repr(frame["x"].tolist()[1:]) == "[0.1, nan, -inf, 1e+300]"
    assert table.schema.field("at").type == pa.timestamp("us", "UTC")
    assert table.schema.field("d").type == pa.decimal128(20, 4)
    assert table.num_rows == 5


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_pandas_reads_what_is_nested(
    run: Run,
    spark_wrote: Callable[..., None],
    format: str,
) -> None:
    schema = (
        "tags array<string>, point struct<x: double, at: timestamp>, more map<string,array<int>>,"
        " raw binary"
    )
    spark_wrote([(["a", None], (0.5, MOMENT), {"k": [1, None]}, b"\x00\xff")], schema, format)
    seen: list[Any] = []

    assert run(reader(Any, seen), "1").success

    [row] = seen[0].to_dict("records")
    assert list(row["tags"]) == ["a", None]
    assert row["point"] == {"x": 0.5, "at": MOMENT.replace(tzinfo=dt.UTC)}
    assert list(row["more"]) == ["k"]
    assert row["raw"] == b"\x00\xff"


def test_an_empty_chunk_of_spark_has_its_columns_in_pandas(
    run: Run,
    spark_wrote: Callable[..., None],
) -> None:
    spark_wrote([], SCHEMA)
    seen: list[Any] = []

    assert run(reader(pd.DataFrame, seen), "1").success

    assert seen[0].empty
    assert str(seen[0]["at"].dtype) == "datetime64[us, UTC]"
    assert seen[0]["id"].dtype == np.int64


def test_reading_orc_without_spark_fails_with_that_reason(
    run: Run,
    spark_wrote: Callable[..., None],
) -> None:
    spark_wrote([(1,)], "n int", "orc")

    ran = run(reader(pd.DataFrame, []), "1")

    assert "'bobout' is in the format 'orc', which only Spark can read" in ran.reason
    seen: list[Any] = []
    assert run(reader(DataFrame, seen), "1").success
    assert seen[0].collect()[0].n == 1


@pytest.mark.parametrize("format", [each.name for each in FILE_FORMATS if each.in_spark])
def test_spark_reads_what_pandas_wrote(store: Store, run: Run, format: str) -> None:
    sql(store, "update dataset set format = :f where datasetid = 'bobout'", f=format)
    frame = pd.DataFrame(
        {
            "code": ["007", "", None, ' a "b",\nc '],
            "n": [1, 2, 3, 4],
            "x": [0.5, None, 1.0, 2.0],
            "yes": [True, False, True, True],
            "at": pd.to_datetime(["2026-03-29 01:30:00.123456"] * 4),
            "utc": pd.to_datetime(["2026-03-29 01:30:00"] * 4, utc=True),
        }
    )

    def bobout() -> pd.DataFrame:
        return frame

    seen: list[DataFrame] = []
    assert run(asset(bobout), "1").success
    assert run(reader(DataFrame, seen), "1").success

    types = dict(seen[0].dtypes)
    assert types == {
        "code": "string",
        "n": "bigint",
        "x": "double",
        "yes": "boolean",
        "at": "timestamp_ntz",
        "utc": "timestamp",
    }
    rows = sorted((tuple(row) for row in seen[0].collect()), key=lambda row: row[1])
    assert [row[0] for row in rows] == ["007", "", None, ' a "b",\nc ']
    assert [row[2] for row in rows] == [0.5, None, 1.0, 2.0]
    assert rows[0][4] == MOMENT
    assert rows[0][5] == dt.datetime(2026, 3, 29, 1, 30)


def test_spark_reads_an_empty_frame_of_pandas(store: Store, run: Run) -> None:
    for format in ("parquet", "csv", "json"):
        sql(store, "update dataset set format = :f where datasetid = 'bobout'", f=format)

        def bobout() -> pd.DataFrame:
            return pd.DataFrame({"n": pd.Series([], dtype="int64"), "s": pd.Series([], dtype=str)})

        seen: list[DataFrame] = []
        assert run(asset(bobout), "1", resubmit="true").success
        assert run(reader(DataFrame, seen), "1").success
        assert seen[0].columns == ["n", "s"]
        assert seen[0].count() == 0


# --- the session ---


def test_the_session_is_that_of_the_resource_if_there_is_one(
    store: Store,
    run: Run,
    dataflow: DataflowResource,
    spark: SparkSession,
) -> None:
    asked: list[int] = []

    class Sessions:
        @property
        def spark_session(self) -> SparkSession:
            asked.append(1)
            return spark

    manager = DataflowIOManager(dataflow=dataflow, pyspark=Sessions())

    assert run(writer(lambda df: df), "1", manager=manager).success
    assert len(asked) == 1

    assert run(reader(pd.DataFrame, []), "1", manager=manager).success
    assert len(asked) == 1  # who wants no frame of Spark starts none


def test_a_chunks_note_has_its_schema(spark_wrote: Callable[..., None], tmp_path: Path) -> None:
    spark_wrote([(1,)], "n int")

    note = json.loads((tmp_path / "bobout" / "dataid=1" / "_odf.json").read_text())
    assert [each["name"] for each in note["schema"]["fields"]] == ["n"]


def test_a_zombie_publishes_nothing(
    store: Store,
    run: Run,
    tmp_path: Path,
    spark: SparkSession,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another worker produces the chunk while this one writes it."""
    plain = chunks.stage

    def slow(*given: Any) -> Any:
        staged = plain(*given)
        monkeypatch.setattr(chunks, "stage", plain)
        sql(store, "update datastatus set status = 'RESUBMIT' where datasetid = 'bobout'")
        assert run(writer(lambda df: df.union(df)), "1").success
        return staged

    monkeypatch.setattr(chunks, "stage", slow)

    ran = run(writer(lambda df: df), "1")

    assert ran.reason.startswith("LOST: Chunk '1' of 'loadbob' was claimed by another worker")
    assert spark.read.parquet(str(tmp_path / "bobout" / "dataid=1")).count() == 2
    assert [each.name for each in (tmp_path / "bobout").iterdir()] == ["dataid=1"]
    check(store)


@pytest.fixture(autouse=True)
def _spark_settings(spark: SparkSession) -> Iterator[None]:
    """The times here are in UTC."""
    before = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    yield
    spark.conf.set("spark.sql.session.timeZone", str(before))
