"""Chunks by Spark: frames in, a chunk out, all or nothing, with its evidence."""

import datetime as dt
import json
import os
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from opendataflow_dagster.chunk import Chunk, Place, Result
from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.formats import FORMATS
from opendataflow_dagster.runner.run import Outcome
from opendataflow_dagster.spark.chunk_files import is_read_whole
from opendataflow_dagster.spark.chunks import lake_name
from opendataflow_dagster.spark.evidence import HIGH, LOW, ROWS, Evidence, LastChunks, Observed
from opendataflow_dagster.spark.job import spark_job
from opendataflow_dagster.storage import folder as folders
from opendataflow_dagster.storage.folder import NOTE, read_note
from tests.storage.test_publish import ODD
from tests.support.spark_line import Line, labels_of_jobs
from tests.support.store_fixtures import policy, put, sql, take

FORMATS_IN_SPARK = [each.name for each in FORMATS if each.in_spark and not each.is_lake]


def double(numbers: DataFrame) -> DataFrame:
    return numbers.withColumn("twice", F.col("n") * 2)


def numbers(spark: SparkSession, *values: int) -> DataFrame:
    return spark.createDataFrame([(each,) for each in values], "n long")


@pytest.fixture
def doubling(line: Line) -> Line:
    line.job("double", "numbers", "doubled")
    return line


# --- one chunk ---


def test_a_chunk_is_produced_with_its_evidence(doubling: Line, spark: SparkSession) -> None:
    doubling.arrive("numbers", _1=numbers(spark, 1, 2, 3))

    outcome = doubling.run("double", double)

    assert (outcome.code, outcome.done) == (0, 1)
    assert doubling.rows("doubled", "1") == [(1, 2), (2, 4), (3, 6)]
    fact = doubling.facts("doubled")["1"]
    path = doubling.folder / "doubled" / "dataid=1"
    assert fact["rows"] == 3
    assert fact["schema"] == "n:bigint,twice:bigint"
    assert fact["location"] == str(path)
    assert fact["bytes"] == sum(each.stat().st_size for each in path.glob("*.parquet"))
    assert fact["fingerprint"].startswith("3-")
    note = read_note(str(path))
    assert (note["generation"], note["fingerprint"]) == (fact["generation"], fact["fingerprint"])
    assert doubling.left() == []
    assert {each.name[0] for each in path.iterdir()} == {"p", "_"}  # data, and the note


def test_without_all_one_chunk_is_produced(doubling: Line, spark: SparkSession) -> None:
    doubling.arrive("numbers", _1=numbers(spark, 1), _2=numbers(spark, 2))

    assert doubling.run("double", double, all_chunks=False).done == 1
    assert list(doubling.facts("doubled")) == ["1"]


def test_the_same_rows_have_the_same_fingerprint_in_any_order_and_parts(
    doubling: Line, spark: SparkSession
) -> None:
    doubling.arrive(
        "numbers",
        _1=numbers(spark, *range(50)),
        _2=numbers(spark, *range(49, -1, -1)),
        _3=numbers(spark, *range(49), 48),
    )

    doubling.run("double", lambda numbers: double(numbers).repartition(3))

    one, two, three = doubling.fingerprints("doubled").values()
    assert one == two != three


@pytest.mark.parametrize("dataid", ODD)
def test_any_dataid_makes_a_chunk_that_plain_spark_reads_by_it(
    doubling: Line, spark: SparkSession, dataid: str
) -> None:
    doubling.arrived("numbers", dataid, numbers(spark, 7))

    outcome = doubling.run("double", double)

    assert outcome.done == 1, doubling.said
    assert doubling.rows("doubled") == [(7, 14, dataid)]


def test_a_script_s_files_are_read_by_their_looks(doubling: Line, tmp_path: Path) -> None:
    folder = doubling.folder / "numbers"
    folder.mkdir(parents=True)
    (folder / "1.csv").write_text('n,name\n1,"a ""quoted"" name\nin two lines"\n2,\n')
    (folder / "2.json").write_text('{"n": 5, "name": "json"}\n')
    for dataid in ("1", "2"):
        put(doubling.store, "numbers", dataid)

    doubling.run("double", lambda numbers: numbers.select(F.col("n").cast("long"), "name"))

    assert doubling.rows("doubled") == [
        (1, 'a "quoted" name\nin two lines', "1"),
        (2, None, "1"),
        (5, "json", "2"),
    ]


def test_the_function_may_ask_for_the_chunk_the_session_and_all_inputs(
    line: Line, spark: SparkSession
) -> None:
    line.job("join", ["a", "b"], ["c"])
    line.arrive("a", _1=numbers(spark, 1, 2))
    line.arrive("b", _1=numbers(spark, 2, 3))
    seen: list[Any] = []

    def join(inputs: Any, chunk: Chunk, spark: SparkSession) -> DataFrame:
        seen.extend([sorted(inputs), chunk.dataid, chunk.inputs["a"].generation, spark.version])
        return inputs["a"].join(inputs["b"], "n")

    line.run("join", join)

    assert line.rows("c", "1") == [(2,)]
    assert seen[:2] == [["a", "b"], "1"]


def test_several_outputs_become_ready_together(line: Line, spark: SparkSession) -> None:
    line.job("split", "numbers", ["even", "odd"])
    line.arrive("numbers", _1=numbers(spark, 1, 2, 3, 4, 5))

    def split(numbers: DataFrame) -> dict[str, Any]:
        return {"even": numbers.where("n % 2 = 0"), "odd": numbers.where("n % 2 = 1")}

    line.run("split", split)

    assert [line.facts(each)["1"]["rows"] for each in ("even", "odd")] == [2, 3]


def test_what_the_function_wrote_itself_is_accepted(doubling: Line, spark: SparkSession) -> None:
    doubling.arrive("numbers", _1=numbers(spark, 1))

    doubling.run("double", lambda numbers: Result(rows=41, location="/elsewhere"))

    fact = doubling.facts("doubled")["1"]
    assert (fact["rows"], fact["location"], fact["fingerprint"]) == (41, "/elsewhere", None)


@pytest.mark.parametrize("format", FORMATS_IN_SPARK)
def test_other_formats_come_back_as_they_were(line: Line, spark: SparkSession, format: str) -> None:
    line.dataset("texts")
    line.dataset("copies", format=format)
    line.job("copy", "texts", "copies")
    line.job("again", "copies", "more")
    rows = [
        (1, "plain", 1.5, dt.date(2026, 1, 2)),
        (2, "", None, None),
        (3, None, 0.1, None),
        (4, 'a "quoted", one\nwith lines\\n and \\ and é', -2.0, dt.date(1999, 12, 31)),
    ]
    schema = "n long, text string, x double, day date"
    line.arrive(
        "texts", _1=spark.createDataFrame(rows, schema), _2=spark.createDataFrame([], schema)
    )

    line.run("copy", lambda texts: texts)
    line.run("again", lambda copies: copies)

    assert line.rows("more", "1") == sorted(rows, key=repr)
    assert line.fingerprints("copies") == line.fingerprints("more")
    assert line.facts("more")["2"]["rows"] == 0


def test_a_table_of_sqlite_is_read_and_written(line: Line, spark: SparkSession) -> None:
    database = str(line.folder.parent / "shop.db")
    with sqlite3.connect(database) as connection:
        connection.execute("create table orders (day text, id integer, amount real)")
        connection.executemany(
            "insert into orders values (?, ?, ?)",
            [("mon", 1, 1.5), ("mon", 2, None), ("tue", 3, 2.5)],
        )
        connection.execute("create table sums (day text, orders integer, amount real)")
        connection.execute("insert into sums values ('mon', 99, 99), ('sun', 1, 1)")
    connection.close()
    for name in ("orders", "sums"):
        line.dataset(name, database=database, tablename=name, chunkcolumn="day")
    line.job("sum", "orders", "sums")
    for day in ("mon", "tue"):
        put(line.store, "orders", day)

    def sum_up(orders: DataFrame) -> DataFrame:
        return orders.groupBy().agg(F.count("*").alias("orders"), F.sum("amount").alias("amount"))

    assert line.run("sum", sum_up).done == 2

    with sqlite3.connect(database) as connection:
        found = connection.execute("select * from sums order by day").fetchall()
    connection.close()
    assert found == [("mon", 2, 1.5), ("sun", 1, 1.0), ("tue", 1, 2.5)]
    assert line.facts("sums")["mon"]["fingerprint"].startswith("1-")


@pytest.fixture
def lite(line: Line) -> Callable[..., sqlite3.Connection]:
    """A table of SQLite as input and another as output of a job; a person's connection."""
    database = str(line.folder.parent / "shop.db")

    def made(columns: str) -> sqlite3.Connection:
        connection = sqlite3.connect(database, isolation_level=None)
        for name in ("given", "kept"):
            connection.execute(f"create table {name} (day text, {columns})")
            line.dataset(name, database=database, tablename=name, chunkcolumn="day")
        line.job("copy", "given", "kept")
        line.job("store", "given", "files")
        return connection

    return made


def test_the_types_of_a_table_of_sqlite_are_the_declared_ones(
    line: Line, lite: Callable[..., sqlite3.Connection]
) -> None:
    connection = lite("id bigint, x double precision, t varchar(9), b blob, n numeric, any")
    connection.execute("insert into given values ('2', null, null, null, null, null, null)")
    connection.execute("insert into given values ('3', 7, 2, 'x', x'00', 1.5, 'a')")
    for dataid in "123":
        put(line.store, "given", dataid)

    assert line.run("store", spark_job(lambda given: given, schema="any")).done == 3

    for dataid in "12":
        assert line.facts("files")[dataid]["schema"] == (
            "day:string,id:bigint,x:double,t:string,b:binary,n:string,any:string"
        )
    assert line.facts("files")["3"]["schema"] == (
        "day:string,id:bigint,x:double,t:string,b:binary,n:double,any:string"
    )
    connection.close()


def test_values_of_a_column_of_sqlite_that_are_of_several_types_are_refused_by_its_name(
    line: Line, lite: Callable[..., sqlite3.Connection]
) -> None:
    connection = lite("n integer, other text")
    connection.execute("insert into given values ('1', 'seven', 8), ('1', 7, '9')")
    put(line.store, "given", "1")

    assert line.run("store", lambda given: given).failed == 1

    assert "Column 'n' of " in line.reason()
    assert "has values of several types in chunk '1'" in line.reason()
    assert "\n" not in line.reason()
    connection.close()


def test_values_that_sqlite_would_change_are_refused(
    line: Line, lite: Callable[..., sqlite3.Connection]
) -> None:
    connection = lite("r real, n numeric(30, 2), i integer, t text, f float, l real")
    put(line.store, "given", "1")
    lost = {
        "r": "12345678901234567.89BD",
        "n": "12345678901234567.89BD",
        "i": "12345678901234567.5BD",
        "f": "double('NaN')",
        "l": "9007199254740993L",
    }
    kept = {
        "r": "1.5BD",
        "n": "9223372036854775807BD",
        "i": "1.10BD",
        "f": "0.1D",
        "t": "12345678901234567.89BD",
        "l": "-3L",
    }

    def select(told: dict[str, str]) -> Any:
        return lambda spark: spark.sql(
            "select " + ", ".join(f"{each} {name}" for name, each in told.items())
        )

    assert line.run("copy", select(kept)).done == 1
    before = connection.execute("select * from kept").fetchall()
    assert before == [("1", 1.5, 9223372036854775807, 1.1, "12345678901234567.89", 0.1, -3.0)]
    for name, value in lost.items():
        sql(line.store, "update datastatus set status = 'RESUBMIT' where datasetid = 'kept'")
        assert line.run("copy", spark_job(select({name: value}), schema="any")).failed == 1
        assert f"'{name}' is " in line.reason()
        assert "can't store 1 of 1 values unchanged" in line.reason()
    assert connection.execute("select * from kept").fetchall() == before
    connection.close()


@pytest.mark.parametrize("format", ["delta", "iceberg"])
def test_a_table_format_without_its_jars_says_so_and_takes_rows_of_the_chunk_only(
    line: Line, spark: SparkSession, format: str
) -> None:
    """Everything that can be tested without their jars."""
    line.dataset("lake", hostname=str(line.folder / "lake"), format=format, chunkcolumn="day")
    line.job("fill", "numbers", "lake")
    put(line.store, "numbers", "mon")
    line.job("use", "lake", "end")
    put(line.store, "lake", "sun")

    line.run("fill", lambda spark: spark.sql("select 1 n, explode(array('mon', 'tue', null)) day"))
    assert (
        f"Only 1 of 3 rows for {line.folder}/lake have a 'day' of chunk 'mon'. "
        "Return rows of this chunk only." in line.reason()
    )
    sql(line.store, "update datastatus set status = 'RESUBMIT' where datasetid = 'lake'")
    for jobid, fn in (("fill", lambda spark: spark.sql("select 1 n")), ("use", lambda lake: lake)):
        sql(line.store, "update datastatus set status = 'READY' where dataid = 'sun'")
        line.run(jobid, fn)
        assert f"'lake' has the format '{format}', but Spark doesn't have its jars" in line.reason()
        assert "spark.jars.packages" in line.reason()
    assert not (line.folder / "lake").exists()


def test_a_table_format_is_known_by_its_name_in_a_catalog() -> None:
    def name(**columns: str | None) -> str | None:
        return lake_name(Place("lake", columns))

    assert name(tablename="t") == "`t`"
    assert name(database="cat", schemaname="s`x", tablename="t") == "`cat`.`s``x`.`t`"
    assert name(database="cat", schemaname=None, tablename="t") == "`cat`.`t`"
    assert name(hostname="s3a://b/t", tablename="t") is None
    assert name(hostname="/data/t") is None


def test_chunks_travel_through_tables_of_postgresql(
    line: Line, spark: SparkSession, postgres_url: str
) -> None:
    with psycopg.connect(postgres_url, autocommit=True) as person:
        for name in ("orders", "copies"):
            person.execute(
                f"create table {name} (id bigint primary key, day date, amount numeric(12, 2), "
                "at timestamptz, tags text[])"
            )
        person.execute(
            "insert into orders select n, date '2026-01-01' + n % 3, n / 7.0, now(), "
            "array['a', null] from generate_series(1, 3000) n"
        )
        info = person.info
        place = {
            "hostname": f"{info.host}:{info.port}",
            "database": info.dbname,
            "username": info.user,
            "chunkcolumn": "day",
        }
        line.dataset("orders", tablename="orders", **place)
        line.dataset("copies", tablename="copies", **place)
        line.job("unload", "orders", "lake")
        line.job("load", "lake", "copies")
        line.job("check", "copies", "again")
        for day in ("2026-01-01", "2026-01-02", "2026-01-03"):
            put(line.store, "orders", day)

        assert line.run("unload", lambda df: df.repartition(3)).done == 3, line.said
        assert line.run("load", spark_job(lambda df: df, expect={"unique": ["id"]})).done == 3
        assert line.run("check", lambda df: df).done == 3

        same = "select count(*) from (select * from orders except select * from copies) d"
        assert person.execute(same).fetchone() == (0,)
    assert line.fingerprints("lake") == line.fingerprints("copies") == line.fingerprints("again")
    assert line.facts("copies")["2026-01-02"]["rows"] == 1000


def test_wrongly_observed_rows_are_counted_again(
    doubling: Line, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    doubling.arrive("numbers", _1=numbers(spark, 1, 2, 3), _2=numbers(spark, 3, 2, 1))
    doubling.run("double", double, all_chunks=False)

    monkeypatch.setattr(Observed, "aggregates", lambda self: {ROWS: 7, HIGH: 1, LOW: 1})
    doubling.run("double", spark_job(double, expect={"range": {"n": (0, 3)}}))

    one, two = doubling.fingerprints("doubled").values()
    assert one == two


# --- shapes of chunks ---


def shapes(spark: SparkSession) -> dict[str, DataFrame]:
    nested = "id long, tags array<string>, point struct<x: double, y: double>, more map<string,int>"
    moment = dt.datetime(2026, 3, 29, 1, 30)
    return {
        "empty": spark.createDataFrame([], "n long, s string"),
        "one": numbers(spark, 1),
        "wide": spark.range(3).selectExpr(*(f"id + {at} as c{at}" for at in range(500))),
        "nested": spark.createDataFrame(
            [
                (1, ["a", None], (1.0, None), {"k": 1, "l": None}),
                (2, None, None, None),
                (3, [], (0.0, -0.0), {}),
            ],
            nested,
        ),
        "decimals": spark.createDataFrame(
            [(Decimal("12345678901234567890.123456789012345678"),), (Decimal("-0.1"),), (None,)],
            "d decimal(38,18)",
        ),
        "times": spark.createDataFrame(
            [(moment, moment, moment.date())], "at timestamp, local timestamp_ntz, day date"
        ),
        "nans": spark.createDataFrame(
            [(float("nan"),), (None,), (float("inf"),), (-0.0,)], "x double"
        ),
        "skewed": spark.range(20_000).selectExpr("if(id < 19990, 'hot', string(id)) as key", "id"),
        "odd names": spark.range(2).selectExpr(
            "id as `a b`", "id as `c.d`", "id as `e``f`", "id as `é`"
        ),
    }


@pytest.mark.parametrize(
    "shape",
    [
        "empty",
        "one",
        "wide",
        "nested",
        "decimals",
        "times",
        "nans",
        "skewed",
        "odd names",
    ],
)
def test_chunks_of_any_shape_come_back_the_same(
    line: Line, spark: SparkSession, shape: str
) -> None:
    df = shapes(spark)[shape]
    line.job("copy", "from", "to")
    line.job("again", "to", "more")
    line.arrived("from", "1", df)

    assert line.run("copy", lambda df: df.repartition(2)).done == 1, line.said
    assert line.run("again", lambda df: df).done == 1, line.said

    assert repr(line.rows("to", "1")) == repr(sorted(map(tuple, df.collect()), key=repr))
    assert line.facts("to")["1"]["rows"] == df.count()
    assert line.fingerprints("to") == line.fingerprints("more")


def test_a_schema_that_changes_between_chunks_is_refused_in_words(
    doubling: Line, spark: SparkSession
) -> None:
    doubling.arrive("numbers", _1=numbers(spark, 1), _2=spark.createDataFrame([("x",)], "n string"))

    outcome = doubling.run("double", lambda numbers: numbers)

    assert (outcome.done, outcome.failed) == (1, 1)
    assert doubling.status("doubled", "2", "double") == "FAILED"
    assert "column 'n' was bigint and is string" in doubling.reason()
    assert 'schema="merge"' in doubling.reason()
    assert not (doubling.folder / "doubled" / "dataid=2").exists()
    assert doubling.left() == []


def test_a_schema_may_be_merged_if_the_job_says_so(doubling: Line, spark: SparkSession) -> None:
    wider = spark.createDataFrame([(5, "new")], "n long, more string")
    doubling.arrive(
        "numbers",
        _1=spark.createDataFrame([(1,)], "n int"),
        _2=wider,
        _3=spark.createDataFrame([(3,)], "n int"),
        _4=spark.createDataFrame([("x",)], "n string"),
    )

    outcome = doubling.run("double", spark_job(lambda numbers: numbers, schema="merge"))

    assert (outcome.done, outcome.failed) == (3, 1)
    schemas = {each: fact["schema"] for each, fact in doubling.facts("doubled").items()}
    assert schemas["2"] == "n:bigint,more:string"
    assert schemas["3"] == "n:bigint,more:string"
    assert "can't be merged" in doubling.reason()


def test_a_schema_may_be_anything_if_the_job_says_so(doubling: Line, spark: SparkSession) -> None:
    doubling.arrive("numbers", _1=numbers(spark, 1), _2=spark.createDataFrame([("x",)], "n string"))

    assert doubling.run("double", spark_job(lambda numbers: numbers, schema="any")).done == 2


# --- what fails ---


def test_a_chunk_that_fails_is_failed_alone_with_the_reason_in_a_line(
    doubling: Line, spark: SparkSession
) -> None:
    doubling.arrive("numbers", _1=numbers(spark, 1), _2=numbers(spark, 0), _3=numbers(spark, 3))

    @F.udf("long", useArrow=False)
    def inverse(n: int) -> int:
        if n == 0:
            raise ValueError("there is no inverse of 0")
        return n

    outcome = doubling.run("double", lambda numbers: numbers.select(inverse("n")))

    assert (outcome.code, outcome.done, outcome.failed) == (1, 2, 1)
    assert doubling.reason() == "ValueError: there is no inverse of 0"
    assert doubling.left() == []
    assert any("Traceback" in line for line in doubling.said)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda numbers: numbers.select("nope"), "[UNRESOLVED_COLUMN"),
        (lambda numbers: numbers.selectExpr("1 / (n - n)"), "[DIVIDE_BY_ZERO]"),
        (lambda numbers: {}["missing"], "KeyError: 'missing'"),
        (lambda numbers: 5, "An int can't be published"),
        (lambda numbers: {"other": numbers}, "returned 'other', which job 'double' doesn't"),
    ],
)
def test_reasons_are_one_line(
    doubling: Line, spark: SparkSession, function: Any, said: str
) -> None:
    doubling.arrive("numbers", _1=numbers(spark, 1))

    assert doubling.run("double", function).failed == 1

    assert said in doubling.reason()
    assert "\n" not in doubling.reason()


def test_a_chunk_that_fails_again_leaves_the_old_one(doubling: Line, spark: SparkSession) -> None:
    doubling.arrive("numbers", _1=numbers(spark, 1))
    doubling.run("double", double)
    sql(doubling.store, "update datastatus set status = 'RESUBMIT' where datasetid = 'doubled'")

    doubling.run("double", lambda numbers: numbers.selectExpr("n", "1 / (n - n) as twice"))

    assert doubling.rows("doubled", "1") == [(1, 2)]
    assert doubling.status("doubled", "1", "double") == "FAILED"


def test_a_function_that_takes_what_isn_t_there_claims_nothing(doubling: Line) -> None:
    with pytest.raises(WrongUse, match="reads no dataset of that name"):
        doubling.run("double", lambda first, second: None)

    assert doubling.said == []


def test_an_input_without_its_files_fails_with_the_next_command(doubling: Line) -> None:
    put(doubling.store, "numbers", "1")

    doubling.run("double", double)

    assert doubling.reason().startswith("INVALID_LOCATION: 'numbers' is READY, but chunk")


@pytest.mark.parametrize("batch", [1, 2])
def test_an_input_replaced_while_it_is_read_fails_the_chunk(
    line: Line, spark: SparkSession, batch: int
) -> None:
    """By somebody whose publish isn't settled yet: the tables still name the old chunk."""
    line.job("copy", "numbers", "copies")
    line.job("double", "copies", "doubled")
    line.arrive("numbers", _1=numbers(spark, 1, 2, 3), _2=numbers(spark, 4))
    line.run("copy", lambda numbers: numbers)
    root = str(line.folder / "copies")

    def slow(copies: DataFrame) -> DataFrame:
        read = spark.createDataFrame(copies.collect(), copies.schema)
        folders.put(root, "1", 1000, lambda path: {"rows": 0}, confirm=lambda: None)
        return read

    outcome = line.run("double", spark_job(slow, batch=batch))

    assert (outcome.done, outcome.failed) == (1, 1)
    assert line.status("doubled", "2", "double") == "READY"
    told = next(each for each in line.said if "Reason: " in each)
    assert "DATA_NOT_READY: " in told
    assert batch > 1 or "chunk '1' of 'copies' was replaced while it was read" in told
    assert line.left() == []


# --- expectations ---


def test_an_expectation_that_fails_publishes_nothing(doubling: Line, spark: SparkSession) -> None:
    doubling.arrive("numbers", _1=numbers(spark, 1, 2, 2), _2=numbers(spark, 1, 2, 3))
    job = spark_job(double, expect={"unique": ["n"], "range": {"n": (0, 10)}})

    outcome = doubling.run("double", job)

    assert (outcome.done, outcome.failed) == (1, 1)
    assert doubling.reason().startswith("NOT_VALIDATED: unique_n: ")
    assert not (doubling.folder / "doubled" / "dataid=1").exists()
    assert doubling.left() == []
    facts = doubling.facts("doubled")
    assert (bool(facts["1"]["validated"]), bool(facts["2"]["validated"])) == (False, True)
    assert "unique_n failed" in facts["1"]["checks"]
    assert facts["2"]["checks"] == "unique_n passed; range_n passed"


def test_rows_are_compared_with_the_last_chunks(doubling: Line, spark: SparkSession) -> None:
    doubling.arrive(
        "numbers",
        **{f"_{at}": numbers(spark, *range(10)) for at in range(1, 4)},
        _4=numbers(spark, 1),
    )

    outcome = doubling.run("double", spark_job(double, expect={"rows": {"change": 0.5}}))

    assert (outcome.done, outcome.failed) == (3, 1)
    assert doubling.status("doubled", "4", "double") == "FAILED"


# --- many chunks ---


def even(numbers: DataFrame) -> DataFrame:
    return numbers.where("n % 2 = 0")


@pytest.mark.parametrize(
    ("declared", "dial", "given", "sizes"),
    [
        (3, None, None, [3, 3, 1]),
        (3, 5, None, [5, 2]),
        (3, 1, None, [1] * 7),
        (3, 5, 4, [4, 3]),
        (1, 5, None, [1] * 7),
    ],
)
def test_the_dial_says_how_many_chunks_go_through_one_job(
    line: Line,
    spark: SparkSession,
    declared: int,
    dial: int | None,
    given: int | None,
    sizes: list[int],
) -> None:
    """Batches never change what a function receives that wasn't written for them."""
    line.job("copy", "numbers", "copies")
    line.job("many", "copies", "batched")
    for at in range(7):
        line.arrived("numbers", str(at), numbers(spark, at))
    line.run("copy", lambda df: df)
    policy(line.store, "many", batch_size=dial)
    seen: list[int] = []
    held: list[int] = []

    def counted(copies: DataFrame) -> DataFrame:
        assert ("dataid" in copies.columns) == (declared > 1)
        seen.append(copies.count())
        live = "select count(*) from claim where owner is not null"
        held.append(sql(line.store, live)[0][0])
        return copies

    assert line.run("many", spark_job(counted, batch=declared), batch=given).done == 7

    assert seen == sizes
    assert max(held) == (given or dial or declared)


def test_a_stop_gives_back_the_chunks_of_a_batch(line: Line, spark: SparkSession) -> None:
    line.job("copy", "numbers", "copies")
    line.job("many", "copies", "batched")
    for at in range(4):
        line.arrived("numbers", str(at), numbers(spark, at))
    line.run("copy", lambda df: df)

    def stopped(copies: DataFrame) -> DataFrame:
        os.kill(os.getpid(), signal.SIGTERM)
        return copies

    outcome = line.run("many", spark_job(stopped, batch=4))

    assert outcome == Outcome(143)
    assert {line.status("batched", str(at), "many") for at in range(4)} == {"RESUBMIT"}
    assert {claim.attempts for claim in take(line.store, "many", k=4)} == {1}
    assert line.left() == []


def test_a_batch_gives_the_same_chunks_as_one_by_one(line: Line, spark: SparkSession) -> None:
    line.job("copy", "numbers", "copies")
    line.job("one", "copies", "single")
    line.job("many", "copies", "batched")
    line.job("apart", "copies", "threaded")
    for at in range(7):
        line.arrived("numbers", f"{at:03}", numbers(spark, *range(at, at * 10)))
    line.run("copy", lambda df: df)

    line.run("one", even)
    said = len(line.said)
    line.run("many", spark_job(even, batch=3))
    line.run("apart", spark_job(even, threads=2))

    assert line.fingerprints("single") == line.fingerprints("batched")
    assert line.fingerprints("single") == line.fingerprints("threaded")
    assert line.rows("single") == line.rows("batched")
    assert not any("one by one" in each for each in line.said[said:])
    assert line.facts("batched")["000"]["rows"] == 0
    notes = [read_note(str(each)) for each in (line.folder / "batched").iterdir()]
    assert {note["generation"] for note in notes} == {
        fact["generation"] for fact in line.facts("batched").values()
    }
    assert line.left() == []


def test_each_spark_job_is_labelled_with_its_chunk(doubling: Line, spark: SparkSession) -> None:
    doubling.arrive("numbers", _1=numbers(spark, 1), _2=numbers(spark, 2))
    both = threading.Barrier(2, timeout=30)

    def counted(numbers: DataFrame) -> DataFrame:
        both.wait()  # the threads have their labels at the same time
        assert numbers.count() == 1
        return double(numbers)

    with labels_of_jobs(spark) as labels:
        doubling.run("double", counted, workers=2)

    one, two = (labels.count((f"double {n}", f"odf double: chunk {n}")) for n in (1, 2))
    assert one == two == len(labels) / 2 > 1


def test_after_a_chunk_jobs_have_the_label_that_they_had_before(
    doubling: Line, spark: SparkSession
) -> None:
    doubling.arrive("numbers", _1=numbers(spark, 1))
    with labels_of_jobs(spark) as labels:
        spark.sparkContext.setJobGroup("mine", "my own")
        try:
            doubling.run("double", double)
            spark.range(1).count()
        finally:
            for name in ("spark.jobGroup.id", "spark.job.description"):
                spark.sparkContext.setLocalProperty(name, None)  # type: ignore[arg-type]
        spark.range(1).count()

    assert list(dict.fromkeys(labels)) == [
        ("double 1", "odf double: chunk 1"),
        ("mine", "my own"),
        (None, None),
    ]


def test_the_spark_job_of_a_batch_is_labelled_with_its_chunks(
    copied: Line, spark: SparkSession
) -> None:
    with labels_of_jobs(spark) as labels:
        copied.run("many", spark_job(lambda df: df, batch=5))

    assert set(labels) == {("many 1 and 4 more", "odf many: chunk 1 and 4 more")}


@pytest.fixture
def copied(line: Line, spark: SparkSession) -> Line:
    """Five chunks written by Spark, which a batch can read together; the third has a 0."""
    line.job("copy", "numbers", "copies")
    line.job("many", "copies", "batched")
    for at in range(1, 6):
        line.arrived("numbers", str(at), numbers(spark, *range(0 if at == 3 else 1, 4)))
    line.run("copy", lambda df: df)
    line.said.clear()
    return line


def test_a_bad_chunk_in_a_batch_fails_alone(copied: Line) -> None:
    outcome = copied.run("many", spark_job(lambda df: df.selectExpr("6 / n", "dataid"), batch=5))

    assert (outcome.done, outcome.failed) == (4, 1)
    assert copied.status("batched", "3", "many") == "FAILED"
    assert "DIVIDE_BY_ZERO" in copied.reason()
    assert any("one by one" in each for each in copied.said)
    assert copied.left() == []


@pytest.mark.parametrize("name", ["dataid", "DataID"])
def test_a_column_named_like_the_chunk_column_is_not_lost(
    line: Line, spark: SparkSession, name: str
) -> None:
    line.job("copy", "numbers", "copies")
    line.job("many", "copies", "batched")
    for at in ("1", "2", "3"):
        line.arrived("numbers", at, numbers(spark, 1).withColumn(name, F.lit("mine")))
    line.run("copy", lambda df: df)

    outcome = line.run("many", spark_job(lambda df: df, batch=3))

    assert (outcome.done, outcome.failed) == (0, 3)
    assert (
        f"'copies' has its own column '{name}', which a batch uses to identify its chunks. "
        "Rename it, or run the job without batch." in line.reason()
    )
    assert not (line.folder / "batched").exists()


def test_the_column_of_a_tables_chunks_may_tell_them_apart_in_a_batch(
    line: Line, tmp_path: Path
) -> None:
    database = str(tmp_path / "data.db")
    with sqlite3.connect(database) as connection:
        connection.execute("create table t as select '1' dataid, 7 n union all select '2', 8")
    line.dataset("given", database=database, tablename="t", chunkcolumn="dataid")
    line.job("many", "given", "batched")
    for dataid in "12":
        put(line.store, "given", dataid)

    line.run("many", spark_job(lambda df: df, batch=2))

    assert [line.rows("batched", each) for each in "12"] == [[(7,)], [(8,)]]


def test_an_expectation_in_a_batch_fails_its_chunk_alone(copied: Line) -> None:
    job = spark_job(lambda df: df, batch=5, expect={"range": {"n": (1, None)}})

    outcome = copied.run("many", job)

    assert (outcome.done, outcome.failed) == (4, 1)
    assert copied.reason().startswith("NOT_VALIDATED: range_n: ")
    assert not any("one by one" in each for each in copied.said)


def test_a_batch_whose_rows_lose_their_chunk_is_refused(copied: Line) -> None:
    outcome = copied.run("many", spark_job(lambda df: df.select("n"), batch=5))

    assert outcome.failed == 5
    assert "has no column 'dataid'" in copied.reason()


def test_a_batch_that_returns_unknown_chunks_runs_one_by_one(copied: Line) -> None:
    copied.run("many", spark_job(lambda df: df.selectExpr("n", "'x' as dataid"), batch=5))

    assert any("dataid=x, which isn't in the batch" in each for each in copied.said)


def test_chunks_of_several_schemas_make_several_batches(line: Line, spark: SparkSession) -> None:
    line.job("copy", "numbers", "copies")
    line.job("many", "copies", "batched")
    for at in range(1, 5):
        kind = "long" if at % 2 else "int"
        line.arrived("numbers", str(at), numbers(spark, at).selectExpr(f"cast(n as {kind}) as n"))
    line.run("copy", spark_job(lambda df: df, schema="any"))

    outcome = line.run("many", spark_job(lambda df: df, batch=4, schema="any"))

    assert outcome.done == 4
    assert {each: fact["schema"] for each, fact in line.facts("batched").items()} == {
        "1": "n:bigint",
        "2": "n:int",
        "3": "n:bigint",
        "4": "n:int",
    }


@pytest.mark.parametrize("together", [True, False])
def test_a_rule_about_the_column_of_a_batch_finds_none(copied: Line, together: bool) -> None:
    if not together:
        sql(copied.store, "delete from datastatus where dataid <> '1'")
    rules = {"sql": {"mine": "dataid is not null"}}

    outcome = copied.run("many", spark_job(lambda df: df, batch=5, expect=rules))

    assert outcome.done == 0
    assert "NOT_VALIDATED: mine: " in copied.reason()
    assert "`dataid` cannot be resolved" in copied.reason()


@pytest.mark.parametrize("way", [{"batch": 4}, {}])
def test_rows_are_compared_with_the_chunks_of_the_same_batch(
    line: Line, spark: SparkSession, way: dict[str, int]
) -> None:
    line.job("copy", "numbers", "copies")
    line.job("many", "copies", "batched")
    for at, rows in enumerate((10, 11, 3, 9), 1):
        line.arrived("numbers", str(at), numbers(spark, *range(rows)))
    line.run("copy", lambda df: df)

    outcome = line.run("many", spark_job(lambda df: df, expect={"rows": {"change": 0.5}}, **way))

    assert (outcome.done, outcome.failed) == (3, 1)
    assert line.reason().startswith("NOT_VALIDATED: rows: 3 rows, against 10 as the mean of the")
    assert not (line.folder / "batched" / "dataid=3").exists()
    assert line.left() == []


@pytest.fixture
def mixed(line: Line, spark: SparkSession) -> Line:
    """Chunks written by Spark, with alternating schemas."""
    line.job("copy", "numbers", "copies")
    line.job("many", "copies", "batched")
    for at in range(1, 5):
        more = "n, string(n) as s" if at % 2 == 0 else "n"
        line.arrived("numbers", str(at), numbers(spark, at).selectExpr(*more.split(", ")))
    line.run("copy", spark_job(lambda df: df, schema="any"))
    line.said.clear()
    return line


def schemas(line: Line) -> dict[str, str]:
    return {each: fact["schema"] for each, fact in line.facts("batched").items()}


def test_a_batch_of_several_schemas_is_refused_what_its_chunks_would_be_alone(mixed: Line) -> None:
    outcome = mixed.run("many", spark_job(lambda df: df, batch=4))

    assert (outcome.done, outcome.failed) == (2, 2)
    assert schemas(mixed) == {"1": "n:bigint", "3": "n:bigint"}
    assert "differs from its last chunk '3': column 's' is new" in mixed.reason()
    assert mixed.left() == []


def test_a_batch_of_several_schemas_is_merged_as_its_chunks_would_be_alone(mixed: Line) -> None:
    assert mixed.run("many", spark_job(lambda df: df, batch=4, schema="merge")).done == 4

    wide = "n:bigint,s:string"
    assert schemas(mixed) == {"1": "n:bigint", "2": wide, "3": wide, "4": wide}


def test_inputs_of_several_schemas_go_in_batches_if_what_becomes_of_them_is_alike(
    mixed: Line,
) -> None:
    assert mixed.run("many", spark_job(lambda df: df.select("n", "dataid"), batch=4)).done == 4

    assert not any("one by one" in each for each in mixed.said)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("same", "differs from its last chunk '2': column 's' is missing"),
        (
            "merge",
            "chunk '2' was published with other columns. Produce it again: odf resubmit many 1",
        ),
    ],
)
def test_of_two_parallel_chunks_the_second_fits_the_first(
    mixed: Line, rule: str, said: str
) -> None:
    sql(mixed.store, "delete from datastatus where dataid in ('3', '4')")
    both, published = threading.Barrier(2), mixed.folder / "batched" / "dataid=2"

    def staged(df: DataFrame, chunk: Chunk) -> bool:
        both.wait(60)
        while chunk.dataid == "1" and not published.exists():
            time.sleep(0.01)
        return True

    job = spark_job(lambda copies: copies, threads=2, schema=rule, expect={"function": staged})
    outcome = mixed.run("many", job)

    assert (outcome.done, outcome.failed) == (1, 1)
    assert said in mixed.reason()
    assert mixed.left() == []


def test_a_chunk_that_couldn_t_be_shown_isn_t_the_last_one(line: Line) -> None:
    last = LastChunks(line.store, "numbers")

    def show(dataid: str, schema: str, error: Exception | None = None) -> None:
        with last.next(dataid, Evidence(len(schema), "", schema), lambda: None):
            if error:
                raise error

    show("1", "n:int")
    with pytest.raises(OSError, match="full"):
        show("2", "n:bigint", OSError("full"))
    with pytest.raises(OSError, match="full"):
        show("1", "n:bigint", OSError("full"))

    assert last.schema("3") == ("1", "n:int")
    assert last.rows("3") == [5]


def test_the_last_chunks_are_followed_by_many_threads(line: Line) -> None:
    last = LastChunks(line.store, "numbers")
    last.rows("0")
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def show(thread: int) -> None:
        for at in range(2000):
            with last.next(f"{thread}-{at}", Evidence(at, "", "n:int"), lambda: None):
                assert len(last.rows("other")) <= 5

    try:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(show, range(4)))
    finally:
        sys.setswitchinterval(before)

    assert len(last.rows("other")) == 5


def test_leftovers_of_a_killed_batch_are_removed_by_the_next_chunk(
    copied: Line, spark: SparkSession
) -> None:
    left = copied.folder / "batched" / "_staging" / "_batch-1-0123abcd" / "dataid=1"
    left.mkdir(parents=True)
    (left / "part-0.parquet").write_text("half")

    copied.run("many", lambda df: df, all_chunks=False)

    assert copied.left() == []


def test_a_batch_is_limited_by_the_job_s_dial(copied: Line) -> None:
    policy(copied.store, "many", concurrency=2)

    assert copied.run("many", spark_job(lambda df: df, batch=5)).done == 5

    launched = [each for each in copied.said if "Launching" in each or "complete" in each]
    assert ["Launching" in each for each in launched[:4]] == [True, True, False, False]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(
    "name", ["with space", "a[b]*{c}?", "percent%20", "é", "a:b", "back\\slash"]
)
def test_a_folder_may_be_called_anything(
    line: Line, spark: SparkSession, name: str, batch: int
) -> None:
    line.folder /= name
    line.job("copy", "numbers", "copies")
    line.job("many", "copies", "batched")
    for at in ("1", "2"):
        line.arrive("numbers", **{at: numbers(spark, int(at))})
    line.run("copy", lambda df: df)

    assert line.run("many", spark_job(lambda df: df, batch=batch)).done == 2, line.reason()

    assert not any("one by one" in each for each in line.said), line.said
    assert line.fingerprints("batched") == line.fingerprints("copies")


def test_the_note_has_the_schema_also_in_a_batch(copied: Line) -> None:
    copied.run("many", spark_job(lambda df: df, batch=5))

    for each in (copied.folder / "batched").iterdir():
        note = json.loads(Path(each, NOTE).read_text())
        assert note["schema"]["fields"][0]["name"] == "n"
        told = ["jobid", "format", "rows", "bytes", "fingerprint", "schema"]
        assert sorted(note) == sorted(["dataid", "generation", "store", *told])
        assert os.path.basename(each) == f"dataid={note['dataid']}"


# --- what is returned ---


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize(
    ("function", "missing"),
    [
        (lambda copies: None, "'one', 'two'"),
        (lambda chunk, copies: None, "'one', 'two'"),
        (lambda copies: {}, "'one', 'two'"),
        (lambda copies: {"one": copies}, "'two'"),
        (lambda copies: {"two": copies, "one": None}, "'one'"),
    ],
)
def test_a_function_that_returns_nothing_for_an_output_fails_its_chunk(
    copied: Line, function: Any, missing: str, batch: int
) -> None:
    copied.job("forgets", "copies", ["one", "two"])
    job = spark_job(lambda copies: {"one": copies, "two": copies})
    copied.run("forgets", job, all_chunks=False)
    sql(copied.store, "update datastatus set status = 'RESUBMIT' where datasetid in ('one', 'two')")
    before = copied.rows("one")

    outcome = copied.run("forgets", spark_job(function, batch=batch))

    assert (outcome.done, outcome.failed) == (0, 5)
    assert copied.reason() == (
        f"<lambda> returned nothing for {missing}. Return a DataFrame, or a Result(…) if it wrote "
        "the chunk itself."
    )
    assert copied.status("one", "1", "forgets") == "FAILED"
    assert copied.rows("one") == before
    assert copied.left() == []


def test_a_result_says_that_the_function_wrote_a_chunk_itself(copied: Line) -> None:
    outcome = copied.run("many", spark_job(lambda copies: Result(), batch=5))

    assert outcome.done == 5, copied.said


@pytest.mark.parametrize("kind", ["string", "binary"])
def test_rows_of_other_chunks_are_refused_also_one_by_one(copied: Line, kind: str) -> None:
    def mixed(copies: DataFrame) -> DataFrame:
        other = F.when(F.col("dataid") == "2", F.lit("2")).when(F.col("n") > 1, F.lit("zzz"))
        return copies.withColumn("dataid", other.cast(kind))

    outcome = copied.run("many", spark_job(mixed, batch=7))

    assert (outcome.done, outcome.failed) == (1, 4)
    assert copied.reason() == (
        "mixed returned 3 rows for 'batched' whose 'dataid' isn't that of the chunk, '5'. Keep "
        "that column as it is, or group by it."
    )
    assert copied.rows("batched", "2") == [(1,), (2,), (3,)]
    assert list(copied.folder.glob("batched/*")) == [copied.folder / "batched" / "dataid=2"]


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("named", ["a", "A"])
def test_a_column_that_is_returned_twice_is_refused_by_its_name(
    copied: Line, named: str, batch: int
) -> None:
    def twice(copies: DataFrame) -> DataFrame:
        rest = ["dataid"] if batch > 1 else []
        return copies.selectExpr("n as a", f"n + 1 as {named}", *rest)

    assert copied.run("many", spark_job(twice, batch=batch)).failed == 5

    told = "'a'" if named == "a" else "'a' and 'A'"
    assert copied.reason() == (
        f"twice returned several columns {told} for 'batched'. Rename or drop all but one of them."
    )


# --- a folder and a table ---


@pytest.fixture(params=["sqlite", "postgres"])
def both(line: Line, request: pytest.FixtureRequest) -> Line:
    """A job that writes a folder and a table `ztab`, and has written chunk 1 to both."""
    if request.param == "sqlite":
        place = {"database": str(line.folder.parent / "shop.db")}
    else:
        url = request.getfixturevalue("postgres_url")
        with psycopg.connect(url) as person:
            info = person.info
            place = {
                "hostname": f"{info.host}:{info.port}",
                "database": info.dbname,
                "username": info.user,
            }
    line.dataset("ztab", tablename="ztab", chunkcolumn="day", **place)
    line.job("two", "numbers", ["fold", "ztab"])
    line.arrive("numbers", _1=numbers(line.spark, 1))
    of_table(line, request, "create table ztab (day text, v int)")

    assert line.run("two", folder_and_table).done == 1, line.said
    sql(line.store, "update datastatus set status = 'RESUBMIT' where datasetid in ('fold', 'ztab')")
    return line


def folder_and_table(numbers: DataFrame, day: str = "1", v: int = 1) -> dict[str, Any]:
    return {
        "fold": numbers.selectExpr(f"{v} as v"),
        "ztab": numbers.selectExpr(f"'{day}' as day", f"{v} as v"),
    }


def of_table(line: Line, request: pytest.FixtureRequest, text: str) -> list[tuple]:
    """Query the database with the table, which isn't the line's own."""
    if "sqlite" in request.node.callspec.id:
        with sqlite3.connect(line.folder.parent / "shop.db") as person:
            found = person.execute(text).fetchall()
        person.close()
        return found
    url = request.getfixturevalue("postgres_url")
    with psycopg.connect(url, autocommit=True) as person:
        cursor = person.execute(text)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []


def test_a_chunk_that_its_table_refuses_is_published_nowhere(
    both: Line, request: pytest.FixtureRequest
) -> None:
    def other(numbers: DataFrame) -> dict[str, Any]:
        return folder_and_table(numbers, "other", 2)

    assert both.run("two", other).failed == 1

    assert "Only 0 of 1 rows" in both.reason()
    assert both.rows("fold", "1") == [(1,)]
    assert of_table(both, request, "select * from ztab") == [("1", 1)]
    assert both.left() == []


def test_a_table_is_published_before_a_folder(both: Line, request: pytest.FixtureRequest) -> None:
    def small(numbers: DataFrame) -> dict[str, Any]:
        made = folder_and_table(numbers, "1", 2)
        return {"fold": made["fold"], "ztab": made["ztab"].toPandas().assign(day="other")}

    assert both.run("two", small).failed == 1

    assert both.rows("fold", "1") == [(1,)]
    assert of_table(both, request, "select * from ztab") == [("1", 1)]


def test_what_only_the_table_s_transaction_refuses_keeps_the_folder_too(
    both: Line, request: pytest.FixtureRequest
) -> None:
    if "sqlite" in request.node.callspec.id:
        of_table(
            both,
            request,
            "create trigger no before insert on ztab when new.v = 2 "
            "begin select raise(abort, 'two is no number'); end",
        )
    else:
        of_table(both, request, "alter table ztab add constraint no check (v <> 2)")

    assert both.run("two", lambda numbers: folder_and_table(numbers, "1", 2)).failed == 1

    assert both.rows("fold", "1") == [(1,)]
    assert of_table(both, request, "select * from ztab") == [("1", 1)]


# --- what a format can't hold, and texts that somebody else has written ---


@pytest.fixture
def through(line: Line) -> Line:
    """Rows go from a folder of Parquet to `copies`, and from there to `more`."""
    line.job("copy", "texts", "copies")
    line.job("again", "copies", "more")
    return line


def copied_as(through: Line, format: str, df: DataFrame) -> None:
    """Write these rows to `copies` in a format, and produce `more` from them."""
    sql(through.store, "update dataset set format = :f where datasetid = 'copies'", f=format)
    put(through.store, "texts", "1")
    through.run("copy", lambda spark: df)
    through.run("again", lambda copies: copies)


@pytest.mark.parametrize("lines", [True, False])
@pytest.mark.parametrize("told", [True, False], ids=["told", "found"])
def test_a_large_csv_with_line_breaks_has_as_many_rows_as_were_written(
    through: Line, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, lines: bool, told: bool
) -> None:
    monkeypatch.setattr("opendataflow_dagster.spark.chunk_files.WHOLE_FILE_BYTES", 10_000)
    breaks = "case id % 1000 when 0 then '\\nnew, ' when 1 then 'a\\rb' else ',' end"
    df = spark.range(0, 3000, 1, 2).selectExpr("id", f"repeat('x', 20) || {breaks} as t")
    if not lines:
        df = df.selectExpr("id", "translate(t, '\\n\\r', '') as t")
    sql(through.store, "update dataset set format = 'csv' where datasetid = 'copies'")
    put(through.store, "texts", "1")
    through.run("copy", lambda spark: df)
    path = through.folder / "copies" / "dataid=1" / NOTE
    note = json.loads(path.read_text())
    assert note.pop("lines") is lines
    if not told:
        path.write_text(json.dumps(note))
    parts: list[int] = []
    monkeypatch.setattr("opendataflow_dagster.spark.chunk_files._reader_options", spied(parts))

    through.run("again", lambda copies: copies)

    assert through.facts("more")["1"]["rows"] == 3000
    assert through.fingerprints("copies") == through.fingerprints("more")
    assert parts == [lines]


def spied(parts: list) -> Any:
    """Return the options of a reader, which show whether one task reads a file."""
    from opendataflow_dagster.spark.chunk_files import _reader_options

    def options(kind: str, path: str, note: Any) -> dict[str, str]:
        found = _reader_options(kind, path, note)
        if kind == "csv":
            parts.append(found["multiLine"] == "true")
        return found

    return options


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("a,b\n1,2\n", False),
        ("a,b\r\n1,2\r\n", False),
        ('a,b\n1,"2, ""3"""\n', False),
        ('a,b\n1,"2\n3"\n', True),
        ('a,b\n1,"2\r3"\n', True),
        ("a,b\r\n1,2\n", True),
        ('a,b\n1,x"\n2,"\n"\n', True),
        ('a,b\n1,"x"y\n2,z\n', True),
        ('a,b\n1,"x\n', True),
        ("a\nx\n \n", True),
        ("", True),
    ],
)
def test_a_large_csv_is_read_in_parts_only_if_each_line_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, whole: bool
) -> None:
    monkeypatch.setattr("opendataflow_dagster.spark.chunk_files.WHOLE_FILE_BYTES", -1)
    monkeypatch.setattr("opendataflow_dagster.spark.chunk_files._BLOCK_BYTES", 1)
    (tmp_path / "1.csv").write_bytes(text.encode())

    assert is_read_whole(str(tmp_path / "1.csv"), {}) is whole


@pytest.mark.parametrize(
    ("format", "select", "said"),
    [
        (
            "csv",
            "1 as id, X'00ff' as `b`",
            "Column 'b' is binary, which CSV can't hold. Return "
            "base64(`b`), or register the dataset with --format parquet.",
        ),
        (
            "csv",
            "explode(array('a', null)) as only",
            "the only column 'only' is NULL in 1 of 2 rows",
        ),
        (
            "csv",
            "1 as id, cast(X'41ff' as string) as t",
            "Column 't' has 1 row with a text that "
            "isn't UTF-8, which CSV can't hold. Return it as binary by base64(`t`), decode it as",
        ),
        ("json", "cast(X'ff' as string) collate UNICODE_CI as t", "Column 't' has 1 row with"),
        (
            "json",
            "'é' as a, struct(array(map('k', cast(X'ff' as string))) as x) as n",
            "Column 'n' has 1 row with a text that isn't UTF-8, which JSON can't hold",
        ),
        (
            "json",
            "map(1, 'x') as m",
            "Column 'm' has a map whose keys aren't strings, which JSON "
            "can't hold. Cast the keys to string, or register the dataset with --format",
        ),
        ("json", "map('k', array(named_struct('f', map(date'2026-01-01', 1)))) as m", "Column 'm'"),
        ("orc", "1 as `a``b`", "Column 'a`b' has a backtick"),
        ("orc", "map('k', array(named_struct('a`b', 1))) as m", "Column 'a`b' has a backtick"),
    ],
)
def test_values_that_a_format_would_change_are_refused_in_one_line(
    through: Line, spark: SparkSession, format: str, select: str, said: str
) -> None:
    copied_as(through, format, spark.sql(f"select {select}"))

    assert through.status("copies", "1", "copy") == "FAILED"
    assert said in through.reason()
    assert "\n" not in through.reason()
    assert through.left() == []


@pytest.mark.parametrize("format", FORMATS_IN_SPARK)
def test_old_times_come_back_to_the_microsecond(
    through: Line, spark: SparkSession, format: str
) -> None:
    """Before standard time zones, clocks were minutes and seconds away from UTC."""
    spark.conf.set("spark.sql.session.timeZone", "Europe/Paris")
    times = [
        "1900-01-01 00:00:00.000001",
        "1583-06-01 12:00:00",
        "1911-03-10 23:50:38.5",
        "2026-07-01 00:00:00",
    ]
    moments = [f"cast('{each}' as timestamp) as c{at}" for at, each in enumerate(times)]
    df = spark.sql(f"select {', '.join(moments)}")

    copied_as(through, format, df)

    more = through.rows("more", "1")
    assert more == [tuple(row) for row in df.collect()]
    assert through.fingerprints("copies") == through.fingerprints("more")


def test_a_text_that_isn_t_utf8_is_refused_also_if_spark_did_tasks_again(
    through: Line, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Observed, "aggregates", lambda self: {ROWS: 7, HIGH: 1, LOW: 1})

    copied_as(through, "json", spark.sql("select 'é' as a, cast(X'ff' as string) as t"))

    assert "Column 't' has 1 row with a text" in through.reason()


NESTED = (
    "array('a' collate UNICODE_CI) as l, named_struct('f', 'a' collate UTF8_LCASE) as s,"
    " map('k', array('a' collate UNICODE_CI)) as m, X'00ff' as b"
)


@pytest.mark.parametrize(
    ("format", "more"),
    [("csv", ""), ("json", NESTED), ("orc", NESTED), ("parquet", NESTED)],
)
def test_values_come_back_with_their_collation(
    through: Line, spark: SparkSession, format: str, more: str
) -> None:
    df = spark.sql(
        "select 1 as id, 'a' collate UNICODE_CI as `c.d`" + (more and f", '\\0' as nul, {more}")
    )
    copied_as(through, format, df)

    assert through.status("more", "1", "again") == "READY", through.said
    assert through.fingerprints("copies") == through.fingerprints("more")
    copies, more_ = (through.facts(each)["1"]["schema"] for each in ("copies", "more"))
    assert copies == more_
    assert "`c.d`:string collate UNICODE_CI" in copies


def test_collations_outlive_a_batch(line: Line, spark: SparkSession) -> None:
    line.job("copy", "texts", "copies")
    line.job("many", "copies", "batched")
    line.job("again", "batched", "more")
    for dataid in ("1", "2"):
        put(line.store, "texts", dataid)
    line.run("copy", lambda spark: spark.sql("select 'a' collate UNICODE_CI as c"))
    line.run("many", spark_job(lambda copies: copies, batch=2))
    line.run("again", lambda batched: batched)

    assert line.status("more", "1", "again") == "READY", line.said
    assert line.fingerprints("copies") == line.fingerprints("more")
    assert not any("one by one" in each for each in line.said)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "1.csv",
            "a,b\n1,2\n1,2,3\n",
            "1.csv has a row with more or fewer values than its header "
            "has columns: 1,2,3. Correct the file.",
        ),
        ("1.csv", "a,b\n1,2\n1\n", "its header has columns: 1. Correct the file."),
        ("1.json", '{"a": 1}\n{"a":\n', "1.json has a line that isn't a JSON object"),
        ("1.json", '{"a": 1}\n5\n', "1.json has a line that isn't a JSON object"),
        (
            "1.csv",
            "",
            "1.csv is empty, so its columns aren't known. Give it a header line.",
        ),
        ("1.json", "", "its columns aren't known. Give it rows."),
    ],
)
def test_a_text_of_others_that_isn_t_whole_is_refused_in_a_line(
    doubling: Line, name: str, text: str, said: str
) -> None:
    folder = doubling.folder / "numbers"
    folder.mkdir(parents=True)
    (folder / name).write_text(text)
    put(doubling.store, "numbers", "1")

    doubling.run("double", lambda numbers: numbers)

    assert doubling.status("doubled", "1", "double") == "FAILED"
    assert said in doubling.reason()
    assert str(folder) in doubling.reason()
    assert "\n" not in doubling.reason()


@pytest.mark.parametrize("select", ["a", "count(*) as n", "b"])
def test_a_ragged_row_is_noticed_by_every_query(doubling: Line, select: str) -> None:
    folder = doubling.folder / "numbers"
    folder.mkdir(parents=True)
    (folder / "1.csv").write_text("a,b\n1,2\n1,2,3\n")
    put(doubling.store, "numbers", "1")

    doubling.run("double", lambda numbers: numbers.selectExpr(select))

    assert "more or fewer values" in doubling.reason()


def test_two_files_of_one_chunk_are_refused_by_their_names(doubling: Line) -> None:
    folder = doubling.folder / "numbers"
    folder.mkdir(parents=True)
    for name in ("day1.csv", "day1.json", "day10.csv", "b.csv"):
        (folder / name).write_text("a\n1\n")
    for dataid in ("day1", "day10"):
        put(doubling.store, "numbers", dataid)

    outcome = doubling.run("double", lambda numbers: numbers)

    assert (outcome.done, outcome.failed) == (1, 1)
    assert doubling.status("doubled", "day10", "double") == "READY"
    assert f"{folder}/day1.csv, {folder}/day1.json. Move away" in doubling.reason()


def test_files_whose_whole_name_is_the_dataid_are_chunks_of_their_own(doubling: Line) -> None:
    folder = doubling.folder / "numbers"
    folder.mkdir(parents=True)
    (folder / "day1.csv").write_text("n\n1\n")
    (folder / "day1.json").write_text('{"n": 2}\n')
    for dataid in ("day1.csv", "day1.json"):
        put(doubling.store, "numbers", dataid)

    outcome = doubling.run("double", lambda numbers: numbers.selectExpr("int(n)"))

    assert outcome.done == 2, doubling.said
