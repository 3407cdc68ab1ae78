"""Chunks of tables of PostgreSQL as frames of Spark: types, parts, publishing, and secrets."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas
import psycopg
import pytest
from psycopg import sql

from opendataflow_dagster.errors import DataflowError, Refused, StaleClaim, WrongUse
from opendataflow_dagster.location import Table
from opendataflow_dagster.spark.postgres import looking, read_rows
from opendataflow_dagster.spark.postgres_write import StagedRows, drop, leftovers
from opendataflow_dagster.spark.session import in_a_line
from opendataflow_dagster.storage.table import Rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    Target = Callable[..., Table]

ROOT = Path(__file__).parents[2]
SECRET = "tr0ub4dor&3 'quoted"


@pytest.fixture
def base(postgres_url: str) -> Iterator[psycopg.Connection]:
    """A person's connection to the database, without any of our schemas in its path."""
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def at(base: psycopg.Connection) -> "Target":
    """A table of that database, by its name and the column of its chunks."""

    def made(name: str, column: str, schema: str = "") -> Table:
        info = base.info
        return Table(
            "orders",
            f"{info.dbname}/{name}",
            "postgres",
            info.dbname,
            f"{info.host}:{info.port}",
            schema,
            name,
            column,
            info.user,
        )

    return made


def ours() -> None:
    """A claim that is ours."""


def write(
    df: "DataFrame", table: Table, dataid: str, bounds: Any = None, **more: Any
) -> StagedRows:
    return StagedRows.write(df, table, dataid, bounds, None, 7, **more)


def publish(df: "DataFrame", table: Table, dataid: str, bounds: Any = None) -> int:
    return write(df, table, dataid, bounds).show(ours)


def tables(base: psycopg.Connection) -> list[str]:
    found = base.execute(
        "select relname from pg_class where relname like 'odf%' and relkind = 'r' order by 1"
    )
    return [name for (name,) in found]


def ids(df: "DataFrame") -> list[int]:
    return sorted(row["id"] for row in df.select("id").collect())


# --- types ---

TYPES = """
c text, b bool, i2 smallint, i4 int, i8 bigint, f4 real, f8 float8, n numeric, n2 numeric(10,2),
n3 numeric(3,5), n4 numeric(38,10), n5 numeric(4,-2), t text, v varchar(5), ch char(4), by bytea,
d date, ts timestamp, tz timestamptz, ti time, tiz timetz, iv interval, u uuid, j json, jb jsonb,
ip inet, ci cidr, mac macaddr, m mood, p few, o oid, ai int[], ai2 smallint[], at text[],
an numeric(6,2)[], ats timestamptz[], ab bytea[], ad date[], abo bool[], af float8[], au uuid[],
am mood[], mo money, bi bit(3), r int4range, nm name, pt point"""

VALUES = [
    "'A'",
    "true",
    "-5",
    "6",
    "9223372036854775807",
    "1.5",
    "'NaN'",
    "1234567.123456789012345678",
    "-12345678.90",
    "0.00123",
    "12345678901234567890.0123456789",
    "1200",
    "e'é日\"\\'\\n\\\\\\t'",
    "'abc'",
    "'xy'",
    "'\\x00ff'",
    "'0044-03-15 BC'",
    "'2026-01-01 12:00:00.123456'",
    "'2026-03-29 02:30:00+02'",
    "'12:30:01.5'",
    "'12:30+02'",
    "'1 year 2 days 03:00'",
    "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'",
    "'{\"a\": [1,  2]}'",
    "'{\"b\": 1}'",
    "'10.0.0.1/8'",
    "'10.0.0.0/8'",
    "'08:00:2b:01:02:03'",
    "'happy'",
    "12.5",
    "42",
    "'{1,NULL,3}'",
    "'{1,2}'",
    '\'{"a,b",NULL,"c\\"d"}\'',
    "'{1.50,NULL}'",
    "'{2026-01-01 00:00+00}'",
    "'{\"\\\\x01\"}'",
    "'{2026-01-01,NULL}'",
    "'{t,f,NULL}'",
    "'{1.5,NaN,Infinity}'",
    "'{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}'",
    "'{1,2}'",
    "'{sad,NULL}'",
    "'$12.50'",
    "'101'",
    "'[1,5)'",
    "'nm'",
    "'(1,2)'",
]


def test_every_type_goes_to_spark_and_back_as_it_was(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create type mood as enum ('sad', 'happy')")
    base.execute("create domain few as numeric(5,1) check (value > 0)")
    values = [each for each in VALUES if each != "'{1,2}'"]
    values.insert(values.index('\'{"a,b",NULL,"c\\"d"}\''), "'{1,2}'")
    for name in ("one", "two"):
        base.execute(f"create table {name} ({TYPES})")  # type: ignore[arg-type]
    base.execute(f"insert into one values ({', '.join(values)})")  # type: ignore[arg-type]
    base.execute("insert into one (c) values ('A')")

    frame = read_rows(spark, at("one", "c"), "A")
    staged = write(frame, at("two", "c"), "A")
    again = staged.frame()

    types = dict(frame.dtypes)
    assert types["n"] == "decimal(38,18)"
    assert types["n2"] == "decimal(10,2)"
    assert types["an"] == "array<decimal(6,2)>"
    assert (types["tz"], types["ts"]) == ("timestamp", "timestamp_ntz")
    assert again.schema == frame.schema
    assert again.exceptAll(frame).count() == frame.exceptAll(again).count() == 0
    assert staged.show(ours) == 2
    rows = "select row_to_json(whole)::text from {} whole order by c, b"
    assert (
        base.execute(rows.format("two")).fetchall() == base.execute(rows.format("one")).fetchall()
    )


def test_frames_of_spark_fit_columns_of_other_types_where_nothing_is_lost(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute(
        "create table t (day text, small bigint, wide jsonb, many jsonb, moment timestamp, "
        "zoned timestamptz, amount numeric(10,2), note varchar(20), whole numeric, late time)"
    )
    frame = spark.sql(
        "select cast(3 as tinyint) small, named_struct('a', 1, 'b', array('x')) wide, "
        "map('k', 1.5D) many, timestamp'2026-07-01 12:00:00' moment, "
        "timestamp_ntz'2026-07-01 12:00:00' zoned, cast(1.25 as decimal(20,2)) amount, "
        "cast(5 as int) note, cast(7 as bigint) whole, cast('10:00:00' as string) late"
    )
    spark.conf.set("spark.sql.session.timeZone", "Europe/Berlin")

    staged = write(frame, at("t", "day"), "2026-07-01")

    assert staged.frame().schema.simpleString() == frame.schema.simpleString()
    assert staged.frame().select("wide", "many").collect() == frame.select("wide", "many").collect()
    assert staged.show(ours) == 1
    base.execute("set timezone to 'UTC'")
    [row] = base.execute(
        "select day, small, wide, many, moment::text, zoned::text, amount, note, whole, late::text "
        "from t"
    ).fetchall()
    # `timestamp'…'` was parsed in UTC, and read by a clock in Berlin; zoned is what Berlin means.
    assert row == (
        "2026-07-01",
        3,
        {"a": 1, "b": ["x"]},
        {"k": 1.5},
        row[4],
        row[5],
        Decimal("1.25"),
        "5",
        7,
        "10:00:00",
    )
    assert row[5] == "2026-07-01 10:00:00+00"


@pytest.mark.parametrize(
    ("type", "value", "message"),
    [
        ("date", "'infinity'", "'v' has an infinite date"),
        ("timestamp", "'-infinity'", "'v' has an infinite date"),
        ("timestamptz[]", "'{infinity}'", "'v' has an infinite date"),
        ("numeric", "'NaN'", "'v' has a value that Spark's"),
        ("numeric", "'1e30'", "'v' has a value that Spark's"),
        ("numeric", "'1e-30'", "'v' has a value that Spark's"),
        ("int[]", "'{{1,2},{3,4}}'", "an array of 2 dimensions"),
    ],
)
def test_values_that_spark_cant_hold_are_errors(
    spark: "SparkSession",
    base: psycopg.Connection,
    at: "Target",
    type: str,
    value: str,
    message: str,
) -> None:
    base.execute(f"create table t (c text, v {type})")  # type: ignore[arg-type]
    base.execute(f"insert into t values ('A', {value}), ('B', null)")  # type: ignore[arg-type]

    with pytest.raises(Exception) as caught:
        read_rows(spark, at("t", "c"), "A").collect()

    assert message in (in_a_line(caught.value) or "")
    assert read_rows(spark, at("t", "c"), "B").count() == 1


def test_reading_a_few_rows_of_a_large_table_doesnt_read_all(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create table n (id int, c text)")
    base.execute("insert into n select i, 'A' from generate_series(1, 600000) i")

    assert len(read_rows(spark, at("n", "c")).take(3)) == 3
    assert len(read_rows(spark, at("n", "c"), "A").limit(5).collect()) == 5
    base.execute("drop table n")  # nobody holds it


def test_no_rows_are_a_frame_with_columns_and_a_chunk_without_rows(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create table t (c text, v numeric(5,1))")
    table = at("t", "c")

    assert read_rows(spark, table).dtypes == [("c", "string"), ("v", "decimal(5,1)")]
    assert read_rows(spark, table, parts=4).count() == 0
    assert read_rows(spark, table, "A", parts=2).count() == 0

    base.execute("insert into t values ('A', 1), ('B', 2)")
    assert publish(read_rows(spark, table, "A").where("v > 5"), table, "A") == 0
    assert base.execute("select * from t").fetchall() == [("B", Decimal("2.0"))]


# --- which rows ---


@pytest.fixture
def numbers(base: psycopg.Connection, at: "Target") -> "Target":
    """A table of 20,000 rows, with an index on `id` and none on `shop`."""
    base.execute(
        "create table n (id bigint primary key, shop int, day date, at timestamptz, x text, "
        "below int generated always as (10000 - id) stored)"
    )
    base.execute(
        "insert into n select i, i % 7, date '2026-01-01' + i / 1000, "
        "timestamptz '2026-01-01 00:00+00' + i * interval '1 minute', repeat('x', i % 50) "
        "from generate_series(1, 20000) i"
    )
    base.execute("insert into n values (0, null, null, null, null)")
    base.execute("create index on n (day)")
    base.execute("create index on n (at)")
    base.execute("analyze n")
    return at


@pytest.mark.parametrize("parts", [None, 1, 2, 3, 7])
@pytest.mark.parametrize(
    ("column", "dataid", "bounds", "where"),
    [
        ("id", "whole", None, "true"),
        ("shop", "3", None, "shop = 3"),
        ("day", "2026-01-05", None, "day = '2026-01-05'"),
        ("id", "5000", ("5000", "9001", None), "id >= 5000 and id < 9001"),
        ("id", "1", ("1", "3", None), "id >= 1 and id < 3"),
        ("id", "-5", ("-5", "2", None), "id >= -5 and id < 2"),
        ("shop", "2", ("2", "5", None), "shop >= 2 and shop < 5"),
        (
            "day",
            "m",
            ("2026-01-03", "2026-01-10", None),
            "day between '2026-01-03' and '2026-01-09'",
        ),
        (
            "at",
            "w",
            ("2026-01-02", "2026-01-03 01:00+00", None),
            "at >= '2026-01-02 00:00+00' and at < '2026-01-03 01:00+00'",
        ),
        ("id", "3", ("3", None, 16), "id % 16 = 3"),
        ("shop", "1", ("1", None, 4), "shop % 4 = 1"),
        ("below", "1", ("1", None, 4), "((below % 4) + 4) % 4 = 1"),
    ],
)
def test_a_chunk_in_any_number_of_parts_is_its_rows_once(
    spark: "SparkSession",
    base: psycopg.Connection,
    numbers: "Target",
    column: str,
    dataid: str,
    bounds: Any,
    where: str,
    parts: int | None,
) -> None:
    base.execute(f"alter database {base.info.dbname} set timezone to 'UTC'")  # type: ignore
    expected = base.execute(f"select id from n where {where} order by 1").fetchall()  # type: ignore

    found = read_rows(
        spark, numbers("n", column), None if dataid == "whole" else dataid, bounds, parts=parts
    )

    assert ids(found) == [id for (id,) in expected]
    if parts and len(expected) > 1000:
        assert found.rdd.getNumPartitions() == parts


def test_large_tables_and_chunks_are_read_in_parts_by_themselves(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create table n (id int, c text)")
    base.execute("insert into n select i, 'A' from generate_series(1, 600000) i")
    base.execute("analyze n")
    table = at("n", "c")

    assert read_rows(spark, table).rdd.getNumPartitions() > 1
    assert read_rows(spark, table, "A").rdd.getNumPartitions() == 1
    with looking():
        frame = read_rows(spark, table, "A")
        assert frame.rdd.getNumPartitions() > 1
        assert frame.selectExpr("count(distinct id)", "count(*)").collect() == [(600000, 600000)]


def test_partitioned_tables_and_views_are_tables_too(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create table n (id int, c text) partition by list (c)")
    for each in "AB":
        base.execute(f"create table n_{each} partition of n for values in ('{each}')")  # type: ignore
    base.execute(
        "insert into n select i, case when i % 2 = 0 then 'A' else 'B' end "
        "from generate_series(1, 5000) i"
    )
    base.execute("create view v as select id, c from n where id <= 100")

    assert ids(read_rows(spark, at("n", "c"), parts=3)) == list(range(1, 5001))
    assert len(ids(read_rows(spark, at("n", "c"), "A", parts=3))) == 2500
    assert len(ids(read_rows(spark, at("v", "c"), "B", parts=3))) == 50
    assert publish(spark.range(3).selectExpr("cast(id as int) id"), at("n", "c"), "A") == 3
    assert len(ids(read_rows(spark, at("n", "c")))) == 2503


ODD = [
    "it's",
    'a"b',
    "100%",
    "%s",
    "%(lower)s",
    ":lower",
    "{chunk}",
    "a\nb",
    "\\",
    "日本 é",
    "; --",
    "$1",
    "' or '1'='1",
]


@pytest.mark.parametrize("odd", ODD)
def test_names_and_dataids_are_never_read_as_statements(
    spark: "SparkSession", base: psycopg.Connection, at: "Target", odd: str
) -> None:
    name = odd[:40]
    table = at(name, name, name)
    made = sql.Identifier(name, name)
    base.execute(sql.SQL("create schema {}").format(sql.Identifier(name)))
    base.execute(sql.SQL("create table {} ({} text, id int)").format(made, sql.Identifier(name)))
    base.execute(sql.SQL("create index on {} ({})").format(made, sql.Identifier(name)))
    base.execute(
        sql.SQL(
            "insert into {} select v, i from unnest({}::text[]) v, generate_series(1, 9) i"
        ).format(made, sql.Literal(ODD))
    )

    found = read_rows(spark, table, odd, parts=2)
    assert ids(found) == list(range(1, 10))
    assert {row[0] for row in found.collect()} == {odd}
    between = read_rows(spark, table, "x", (odd, odd + "x", None), parts=2)
    assert set(ids(between)) >= set(range(1, 10))

    staged = write(found.where("id < 4"), table, odd)
    assert leftovers(table, None) == [(staged.name, 7)]
    assert staged.frame().count() == 3
    assert staged.show(ours) == 3
    assert publish(spark.range(2).selectExpr("cast(id as int) id"), table, odd) == 2
    [(total,)] = base.execute(sql.SQL("select count(*) from {}").format(made)).fetchall()
    assert total == 9 * (len(ODD) - 1) + 2


# --- one moment ---


def test_parts_within_one_block_see_the_same_snapshot(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create table n (id int, c text)")
    base.execute("insert into n select i, 'A' from generate_series(1, 1000) i")
    table = at("n", "c")

    with looking():
        frame = read_rows(spark, table, "A", parts=4)
        publish(spark.range(5).selectExpr("cast(-id as int) id"), table, "A")
        assert ids(frame) == ids(read_rows(spark, table, "A", parts=2)) == list(range(1, 1001))
    assert len(ids(read_rows(spark, table, "A"))) == 5
    [(open,)] = base.execute(
        "select count(*) from pg_stat_activity "
        "where state like 'idle in%' and datname = current_database()"
    ).fetchall()
    assert open == 0


def test_a_reader_in_a_loop_sees_the_old_chunk_or_the_new_one(
    spark: "SparkSession", base: psycopg.Connection, at: "Target", postgres_url: str
) -> None:
    base.execute("create table n (id int, c text)")
    table, sizes, seen, over = at("n", "c"), [1000, 400, 1700, 1], set(), threading.Event()
    publish(spark.range(sizes[-1]).selectExpr("cast(id as int) id"), table, "A")

    def look() -> None:
        with psycopg.connect(postgres_url, autocommit=True) as reader:
            while not over.is_set():
                [row] = reader.execute("select count(*) from n where c = 'A'").fetchall()
                seen.add(row[0])

    with ThreadPoolExecutor(1) as pool:
        looks = pool.submit(look)
        for size in sizes * 2:
            publish(spark.range(size).selectExpr("cast(id as int) id"), table, "A")
        over.set()
        looks.result()

    assert seen <= set(sizes)
    assert len(seen) > 1
    assert tables(base) == []


# --- publishing ---


def test_a_zombie_changes_nothing_and_leaves_nothing(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create table n (id int, c text)")
    table = at("n", "c")
    publish(spark.range(3).selectExpr("cast(id as int) id"), table, "A")
    staged = write(spark.range(9).selectExpr("cast(id as int) id"), table, "A")

    def lost() -> None:
        raise StaleClaim("taken over")

    with pytest.raises(StaleClaim):
        staged.show(lost)
    assert ids(read_rows(spark, table, "A")) == [0, 1, 2]
    assert tables(base) == [staged.name, f"{staged.name}_parts"]
    staged.discard()
    staged.discard()
    assert tables(base) == []


def test_two_chunks_of_a_table_at_once_dont_disturb_each_other(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create table n (id int, c text)")
    table = at("n", "c")

    def make(dataid: str, rows: int) -> int:
        return publish(spark.range(rows).selectExpr("cast(id as int) id"), table, dataid)

    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            assert list(pool.map(make, "ABCD", [10, 2000, 0, 1])) == [10, 2000, 0, 1]
    found = base.execute("select c, count(*) from n group by c order by c").fetchall()
    assert found == [("A", 10), ("B", 2000), ("D", 1)]


def test_two_publishes_of_one_chunk_leave_the_rows_of_one(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create table n (id int, c text)")
    table, start = at("n", "c"), threading.Barrier(2)
    made = [
        write(spark.range(rows).selectExpr("cast(id as int) id"), table, "A") for rows in (5, 8)
    ]

    def show(staged: StagedRows) -> int:
        start.wait()
        return staged.show(ours)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(show, made)) == [5, 8]
    assert len(ids(read_rows(spark, table, "A"))) in (5, 8)


def test_rows_of_another_chunk_are_refused(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create table n (id int, c text)")
    base.execute("insert into n values (1, 'A')")

    with pytest.raises(Refused, match=r"Only 1 of 2 rows for .* have a 'c' of chunk 'A'"):
        write(spark.sql("select 1 id, 'A' c union all select 2, 'B'"), at("n", "c"), "A")
    with pytest.raises(Refused, match=r"Only 0 of 1 rows for .* of chunk '5'"):
        write(spark.sql("select 10 id, 'A' c"), at("n", "id"), "5", ("5", "10", None))

    assert base.execute("select * from n").fetchall() == [(1, "A")]
    assert tables(base) == []


@pytest.mark.parametrize(
    ("type", "dataid", "command"),
    [
        (
            "date",
            "2026-02",
            "odf split orders --pending --by month --from 2026-02-01 --to 2026-02-01",
        ),
        (
            "timestamptz",
            "2026",
            "odf split orders --pending --by year --from 2026-01-01 --to 2026-01-01",
        ),
        ("bigint", "shop 7", "odf split --help"),
        ("smallint", "70000", "odf split --help"),
    ],
)
def test_a_chunk_of_a_table_that_is_not_split_says_what_to_run(
    spark: "SparkSession",
    base: psycopg.Connection,
    at: "Target",
    type: str,
    dataid: str,
    command: str,
) -> None:
    base.execute(f"create table n (id int, c {type})")  # type: ignore[arg-type]
    table = at("n", "c")
    rows = Rows(table, dataid)

    def looked() -> None:
        with looking():
            read_rows(spark, table, dataid)

    for work in (
        lambda: write(spark.sql("select 1 id"), table, dataid),
        looked,
        lambda: read_rows(spark, table, dataid),
        rows.read,
        lambda: rows.replace(pandas.DataFrame({"id": [1]}), ours),
    ):
        with pytest.raises(Refused) as refused:
            work()
        told = str(refused.value)
        assert told.startswith(
            f"{table.location} isn't split, so chunk {dataid!r} has the rows whose "
        )
        assert told.endswith(f"). Run: {command}")
        assert "\n" not in told
    assert tables(base) == []


def test_rows_of_a_range_in_a_table_that_is_not_split_say_what_to_run(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create table n (id int, c date)")
    week = spark.sql("select 1 id, date '2026-01-05' c union all select 2, date '2026-01-07'")
    rows = Rows(at("n", "c"), "2026-01-05")
    for work in (
        lambda: write(week, at("n", "c"), "2026-01-05"),
        lambda: rows.replace(week.toPandas(), ours),
    ):
        with pytest.raises(Refused, match=r"only; if the chunk is a range, run: odf split --help"):
            work()


def test_rows_that_the_table_itself_gives_to_another_chunk_are_refused(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create table n (id int, c text)")
    base.execute("insert into n values (1, 'A')")
    base.execute(
        "create function b() returns trigger language plpgsql as "
        "$$ begin new.c := 'B'; return new; end $$"
    )
    base.execute("create trigger t before insert on n for each row execute function b()")
    staged = write(spark.sql("select 2 id"), at("n", "c"), "A")

    with pytest.raises(Refused, match=r"Only 0 of 1 rows for .* of chunk 'A'"):
        staged.show(ours)

    assert base.execute("select * from n").fetchall() == [(1, "A")]


@pytest.mark.parametrize(
    ("type", "dataid", "bounds"),
    [
        ("char(4)", "A", None),
        ('text collate "C"', "z", ("B", "a", None)),
        ("few", "7", None),
        ("date", "2026-01-02", None),
        ("varchar(3)", "abc", None),
        ("numeric(5,1)", "1.50", None),
        ("mood", "sad", None),
        ("int", "1", ("1", None, 4)),
    ],
)
def test_rows_are_counted_as_the_table_compares_them(
    spark: "SparkSession",
    base: psycopg.Connection,
    at: "Target",
    type: str,
    dataid: str,
    bounds: Any,
) -> None:
    value = {"z": "Z", "1": "5"}.get(dataid, dataid)
    base.execute("create type mood as enum ('sad', 'happy')")
    base.execute("create domain few as numeric(5,1) check (value > 0)")
    base.execute(f"create table n (id int, c {type})")  # type: ignore[arg-type]

    if type.startswith(("text", "char", "varchar")):
        base.execute("insert into n values (0, %s)", [value])
        frame = read_rows(spark, at("n", "c"), dataid, bounds)
    else:
        frame = spark.sql(f"select 0 id, '{value}' c")

    assert publish(frame, at("n", "c"), dataid, bounds) == 1
    assert base.execute("select count(*) from n").fetchall() == [(1,)]


# --- values that a table would round ---

KEPT = [
    ("numeric(10,2)", "double", ["1.23", "-0.1", "1e7", "null", "0"]),
    ("numeric", "double", ["0.30000000000000004", "1e-7", "123456789012345.67"]),
    ("numeric(12,3)", "float", ["1234567", "0.125"]),
    ("numeric(10,2)", "decimal(20,11)", ["1.23", "null"]),
    ("numeric(6,1)", "bigint", ["12345"]),
    ("numeric(4,-2)", "int", ["1200"]),
    ("real", "int", ["16777216", "-2147483648"]),
    ("real", "bigint", ["16777216", "9223371487098961920", "-9223372036854775808"]),
    ("real", "double", ["0.5", "'NaN'", "'-Infinity'", "null"]),
    ("real", "decimal(10,2)", ["1.23", "null"]),
    ("float8", "bigint", ["9007199254740992", "9223372036854774784", "-9223372036854775808"]),
    ("float8", "decimal(20,11)", ["1.23456789012"]),
    ("float8", "float", ["0.1", "'NaN'"]),
    ("timestamp(0)", "timestamp_ntz", ["'2020-01-01 00:00:01'", "null"]),
    ("timestamptz(3)", "timestamp", ["'2020-01-01 00:00:01.123'"]),
    ("timestamp(3)", "timestamp", ["'2020-01-01 00:00:01.123'"]),
    ("numeric(10,2)", "string", ["'1.2'", "null"]),
    ("varchar(3)", "string", ["'abc'", "'a  '", "''"]),
    ("name", "string", ["'abc'"]),
    ("numeric(6,2)[]", "array<double>", ["array(1.5D, null)", "null"]),
    ("real[]", "array<int>", ["array(16777216, null)"]),
    ("float8[]", "array<decimal(20,11)>", ["array(1.23456789012)"]),
]

LOST = [
    ("numeric(10,2)", "double", ["1.23456", "'NaN'", "9.999"]),
    ("numeric", "double", ["'NaN'", "'Infinity'"]),
    ("numeric(12,3)", "float", ["0.1234"]),
    ("numeric(5,1)", "decimal(10,2)", ["1.26"]),
    ("numeric(4,-2)", "int", ["1234"]),
    ("real", "int", ["16777217", "2147483647"]),
    ("real", "bigint", ["9007199254740993", "9223372036854775807", "9223372036854774784"]),
    ("real", "double", ["0.1"]),
    ("real", "decimal(20,11)", ["1.23456789012"]),
    ("float8", "bigint", ["9007199254740993", "9223372036854775807"]),
    ("float8", "decimal(38,18)", ["1.234567890123456789"]),
    ("timestamp(0)", "timestamp_ntz", ["'2020-01-01 00:00:00.6'"]),
    ("timestamptz(3)", "timestamp", ["'2020-01-01 00:00:00.0006'"]),
    ("timestamp(0)", "timestamp", ["'2020-01-01 00:00:00.6'"]),
    ("numeric(10,2)", "string", ["'1.239'"]),
    ("time(0)", "string", ["'10:00:00.6'"]),
    ("varchar(3)", "string", ["'abc  '"]),
    ("name", "string", ["repeat('x', 64)"]),
    ("numeric(6,2)[]", "array<double>", ["array(1.239D)", "array(double('NaN'))"]),
    ("numeric(6,1)[]", "array<decimal(10,2)>", ["array(1.26BD, null)"]),
    ("real[]", "array<int>", ["array(16777217, null)"]),
    ("timestamp(0)[]", "array<timestamp_ntz>", ["array(timestamp_ntz'2020-01-01 00:00:00.6')"]),
]


def columns(spark: "SparkSession", cases: list[tuple[str, str, list[str]]]) -> "DataFrame":
    """A column for each case, a row for each value, and NULL below them."""
    rows = max(len(told) for *_, told in cases) + 1
    return spark.sql(
        " union all ".join(
            f"select {row} id, "
            + ", ".join(
                f"cast({(told + ['null'] * rows)[row]} as {type}) v{at}"
                for at, (_, type, told) in enumerate(cases)
            )
            for row in range(rows)
        )
    )


def table_of(base: psycopg.Connection, cases: list[tuple[str, str, list[str]]]) -> None:
    names = ", ".join(f"v{at} {there}" for at, (there, *_) in enumerate(cases))
    base.execute(f"create table n (c text, id int, {names})")  # type: ignore[arg-type]
    base.execute("insert into n values ('A', 1)")


def test_values_that_a_column_can_keep_come_back_as_they_were(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    table_of(base, KEPT)
    frame = columns(spark, KEPT)

    assert publish(frame, at("n", "c"), "A") == frame.count()

    back = read_rows(spark, at("n", "c"), "A").selectExpr(
        "id", *(f"cast(v{at} as {type}) v{at}" for at, (_, type, _) in enumerate(KEPT))
    )
    texts = [
        f"v{at}"
        for at, (there, type, _) in enumerate(KEPT)
        if type == "string" and there.startswith("numeric")
    ]
    for name in frame.columns:
        pair = [
            each.selectExpr("id", f"double({name})" if name in texts else name)
            for each in (frame, back)
        ]
        found, made = (sorted(map(repr, each.collect())) for each in reversed(pair))
        assert found == made, name


def test_values_that_a_column_would_round_are_refused_with_their_number(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    table_of(base, LOST)
    frame = columns(spark, LOST)

    with pytest.raises(Refused) as caught:
        write(frame, at("n", "c"), "A")

    message = str(caught.value)
    assert caught.value.code == "NOT_VALIDATED"
    for number, (_, type, told) in enumerate(LOST):
        found = message.partition(f"'v{number}' is {type} in the frame but ")[2].partition(";")[0]
        assert f"can't store {len(told)} of 4 values unchanged" in found, LOST[number]
    assert "Round or cast it in the job" in message
    assert "\n" not in message
    assert base.execute("select c, id from n").fetchall() == [("A", 1)]
    assert tables(base) == []


def test_a_frame_that_doesnt_fit_is_refused_in_one_line_with_all_that_is_wrong(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute(
        "create table n (id int, c text, at date, needed int not null, d text default 'd')"
    )
    frame = spark.sql("select 1.5D id, timestamp'2026-01-01 10:00:00' at, 1 other, 2 other")

    with pytest.raises(Refused) as caught:
        write(frame, at("n", "c"), "A")

    assert caught.value.code == "NOT_VALIDATED"
    for each in (
        "the table has no column 'other'",
        "'other' occurs 2 times",
        "'needed' is required but missing",
        "'id' is double in the frame but integer in the table",
        "'at' is timestamp in the frame but date in the table",
    ):
        assert each in str(caught.value)
    with pytest.raises(Refused, match="'id' is missing, which the table is split by"):
        write(spark.sql("select 1 needed"), at("n", "id"), "1", ("1", "5", None))
    assert tables(base) == []


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select 1 id, 'a\\u0000b' v", "0x00"),
        ("select 3000000000L id, 'v' v", "integer out of range"),
        ("select 1 id, 'much too long' v", "value too long for type character varying(5)"),
        ("select 1 id, 'v' v, 'no number' j", "invalid input syntax for type json"),
        ("select cast(null as int) id, 'v' v", "null value in column"),
    ],
)
def test_rows_that_the_table_refuses_are_one_error_line_and_nothing_is_left(
    spark: "SparkSession", base: psycopg.Connection, at: "Target", query: str, message: str
) -> None:
    base.execute("create table n (c text, id int not null, v varchar(5), j jsonb)")

    def try_it() -> None:
        staged = write(spark.sql(query), at("n", "c"), "A")
        try:
            staged.show(ours)
        finally:
            staged.discard()

    with pytest.raises(Exception) as caught:
        try_it()

    told = in_a_line(caught.value) or str(caught.value)
    assert message in told
    assert "\n" not in told
    assert tables(base) == []
    assert base.execute("select * from n").fetchall() == []


def test_generated_identity_and_default_columns_stay_the_tables_own(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute(
        "create table n (key int generated always as identity, id int, c text not null, "
        "twice int generated always as (id * 2) stored, at text default 'now')"
    )
    table = at("n", "c")

    publish(spark.sql("select 4 id"), table, "A")
    again = read_rows(spark, table, "A").selectExpr("key", "id + 1 id", "c", "twice")
    publish(again, table, "A")

    assert base.execute("select * from n").fetchall() == [(1, 5, "A", 10, "now")]


def test_a_retried_part_is_loaded_once(base: psycopg.Connection, at: "Target") -> None:
    import pyarrow

    from opendataflow_dagster.spark.postgres import PostgresRows
    from opendataflow_dagster.spark.postgres_write import _loader, _names

    base.execute("create table n (id int, c text)")
    base.execute("create unlogged table stage (c0 int)")
    base.execute("create unlogged table stage_parts (part int primary key, rows bigint)")
    rows = PostgresRows(at("n", "c"), "A", None, None)
    names = _names(rows, "public", "stage")
    load = _loader(
        rows.login(),
        "public",
        "stage",
        rows.plain("part_done", **names),
        rows.plain("part_rows", **names),
    )

    counts = []
    for size in (3, 5):
        batch = pyarrow.record_batch({"c0": pyarrow.array(range(size), pyarrow.int32())})
        counts += [told.column(0).to_pylist() for told in load(iter([batch]))]

    assert counts == [[3], [3]]
    assert base.execute("select count(*) from stage").fetchall() == [(3,)]


DOOMED = """
import os, sys, threading, time
from opendataflow_dagster.location import Table
from opendataflow_dagster.spark.postgres_write import StagedRows
from opendataflow_dagster.spark.session import spark_session
point, table = sys.argv[1], Table(*eval(sys.argv[2]))
spark = spark_session({"spark.master": "local[2]"}, short=True)
def slow(batches):
    for batch in batches:
        time.sleep(0.2)
        yield batch
frame = spark.range(200000).selectExpr("cast(id as int) id")
if point == "write":
    frame = frame.mapInArrow(slow, "id int")
    print("at it", flush=True)
staged = StagedRows.write(frame, table, "A", None, None, 12)
def confirm():
    print("at it", flush=True)
    time.sleep(60)
staged.show(confirm)
"""


@pytest.mark.parametrize("point", ["write", "show"])
def test_a_kill_leaves_the_old_chunk_and_a_staging_table_that_is_found(
    spark: "SparkSession", base: psycopg.Connection, at: "Target", point: str
) -> None:
    base.execute("create table n (id int, c text)")
    base.execute("create table other (id int, c text)")
    base.execute("insert into n values (1, 'A')")
    table = at("n", "c")
    doomed = subprocess.Popen(
        [sys.executable, "-c", DOOMED, point, repr(tuple(table))],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == "at it\n"
        deadline = time.monotonic() + 30
        while not tables(base) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
    finally:
        os.killpg(doomed.pid, signal.SIGKILL)
        doomed.communicate()

    deadline = time.monotonic() + 30
    while _busy(base) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert base.execute("select * from n").fetchall() == [(1, "A")]
    [(name, generation)] = leftovers(table, None)
    assert generation == 12
    assert leftovers(at("other", "c"), None) == []
    drop(table, None, [name])
    assert tables(base) == leftovers(table, None) == []
    assert publish(spark.range(2).selectExpr("cast(id as int) id"), table, "A") == 2


def test_the_next_publish_of_a_chunk_removes_what_older_claims_have_left(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    base.execute("create table n (id int, c text)")
    base.execute("create table m (id int, c text)")
    rows, table = spark.range(2).selectExpr("cast(id as int) id"), at("n", "c")
    held = write(rows, table, "A")
    left = [write(rows, table, "A"), write(rows, table, "B"), write(rows, at("m", "c"), "A")]
    newer = StagedRows.write(rows, table, "A", None, None, 9)
    assert [name for name, _ in leftovers(table, None)] == sorted([left[1].name, newer.name])
    held.discard()
    zombie = write(rows, table, "A")

    with psycopg.connect(base.info.dsn) as busy:  # by which it can't be removed
        busy.execute(f"select * from {zombie.name}")  # type: ignore[arg-type]
        assert StagedRows.write(rows, table, "A", None, None, 8).show(ours) == 2

    assert zombie.name in [name for name, _ in leftovers(table, None)]
    assert newer.show(ours) == 2
    for each in (zombie, *left):
        each.discard()
    assert tables(base) == []


def _busy(base: psycopg.Connection) -> bool:
    found = base.execute(
        "select count(*) from pg_stat_activity where datname = current_database() "
        "and pid <> pg_backend_pid()"
    ).fetchall()
    return found != [(0,)]


def test_only_staging_tables_are_dropped(base: psycopg.Connection, at: "Target") -> None:
    base.execute("create table n (id int, c text)")
    with pytest.raises(DataflowError, match="'n' isn't a staging table"):
        drop(at("n", "c"), None, ["n"])
    with pytest.raises(WrongUse, match="`parts` is 0"):
        read_rows(None, at("n", "c"), parts=0)  # type: ignore[arg-type]


def test_a_missing_table_or_database_is_reported(
    spark: "SparkSession", base: psycopg.Connection, at: "Target"
) -> None:
    with pytest.raises(Refused, match=r"There is no table .*nothing.*odf dataset list"):
        read_rows(spark, at("nothing", "c"), "A")
    away = at("n", "c")._replace(host="127.0.0.1:1", user="me")
    with pytest.raises(Refused, match="can't be opened") as caught:
        read_rows(spark, away, "A", None, lambda: SECRET)
    assert SECRET not in str(caught.value)


# --- secrets ---

TELLTALE = """
import sys
from opendataflow_dagster.location import Table
from opendataflow_dagster.spark.postgres import read_rows
from opendataflow_dagster.spark.postgres_write import StagedRows
from opendataflow_dagster.spark.session import spark_session
folder, table, secret = sys.argv[1], Table(*eval(sys.argv[2])), sys.stdin.read()
spark = spark_session({"spark.master": "local[1]", "spark.eventLog.enabled": "true",
    "spark.eventLog.dir": "file://" + folder, "spark.eventLog.compress": "false",
    "spark.log.level": "DEBUG", "spark.sql.planChangeLog.level": "ERROR"}, short=True)
frame = read_rows(spark, table, "A", None, lambda: secret, parts=2)
frame.explain(True); frame.explain("formatted"); frame.show()
staged = StagedRows.write(frame, table, "A", None, lambda: secret, 1)
print(staged.frame()._jdf.queryExecution().toString()); print(staged.show(lambda: None))
print(vars(staged), staged._rows.login())
frame.rdd.getNumPartitions()
try:
    read_rows(spark, table._replace(database="nothing"), "A", None, lambda: secret)
except Exception as error:
    print("refused", error)
try:
    from opendataflow_dagster.spark import postgres as postgres_link
    login = postgres_link.PostgresRows(
        table._replace(database="nothing"), "A", None, lambda: secret).login()
    spark.range(1).mapInArrow(lambda b: postgres_link.linked(login).__enter__(), "id long").show()
except Exception as error:
    print("failed", error)
spark.stop()
"""


def test_a_password_is_in_no_plan_no_log_and_no_event(
    base: psycopg.Connection, at: "Target", tmp_path: Path
) -> None:
    base.execute("create table n (id int, c text)")
    base.execute("insert into n values (1, 'A')")
    table = at("n", "c")
    events = tmp_path / "events"
    events.mkdir()

    done = subprocess.run(
        [sys.executable, "-c", TELLTALE, str(events), repr(tuple(table))],
        input=SECRET,
        text=True,
        capture_output=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert "refused" in done.stdout
    assert "failed" in done.stdout
    written = b"".join(each.read_bytes() for each in events.rglob("*") if each.is_file())
    assert b"MapInArrow" in written
    for form in (SECRET, json.dumps(SECRET)[1:-1], "tr0ub4dor"):
        assert form not in done.stdout + done.stderr
        assert form.encode() not in written
