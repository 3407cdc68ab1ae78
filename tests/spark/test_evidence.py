"""Evidence: equal rows have equal fingerprints, different rows don't, for all types."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from opendataflow_dagster.errors import DataflowError
from opendataflow_dagster.spark.evidence import Evidence, evidence_by_group, observed


def evidence(df: DataFrame, extra: Sequence[str] = ()) -> Evidence:
    seen, told = observed(df, extra)
    seen.write.format("noop").mode("overwrite").save()
    return told()


def stored(df: DataFrame, tmp_path: Path) -> tuple[Evidence, Evidence]:
    """Return the evidence of a frame while it is written to Parquet, and of what is read back."""
    seen, told = observed(df)
    path = str(tmp_path / f"p{random.random()}")
    seen.write.parquet(path)
    return told(), evidence(df.sparkSession.read.parquet(path))


def fingerprint(spark: SparkSession, sql: str) -> str:
    return evidence(spark.sql(sql)).fingerprint


ROWS = "select id, id % 7 as shop, cast(id as string) as name from range(1000)"


def test_the_order_of_rows_columns_and_parts_doesnt_matter(spark: SparkSession) -> None:
    df = spark.sql(ROWS)
    want = evidence(df)
    assert (want.rows, want.schema) == (1000, "id:bigint,shop:bigint,name:string")
    rows = df.collect()
    random.Random(4).shuffle(rows)
    others = [
        df.repartition(7),
        df.orderBy(df["name"].desc()),
        df.select("name", "id", "shop"),
        spark.createDataFrame(rows, df.schema),
    ]
    assert {evidence(each).fingerprint for each in others} == {want.fingerprint}


@pytest.mark.parametrize(
    "other",
    [
        ROWS.replace("cast(id as string)", "if(id = 500, 'five hundred', cast(id as string))"),
        ROWS.replace("id % 7 as", "if(id = 999, null, id % 7) as"),
        f"{ROWS} where id > 0",
        f"{ROWS} union all select 5, 5, '5'",
        f"{ROWS} where id <> 5 union all select 6, 6, '6'",
        ROWS.replace("id % 7 as shop", "id as shop").replace("select id,", "select id % 7 as id,"),
    ],
    ids=["a value", "a null", "dropped", "doubled", "one for another", "columns swapped"],
)
def test_other_rows_have_another_fingerprint(spark: SparkSession, other: str) -> None:
    assert fingerprint(spark, other) != fingerprint(spark, ROWS)


PAIRS = {
    "null and value swapped": ("null as a, 'x' as b", "'x' as a, null as b"),
    "null and zero": ("cast(null as int) as a", "0 as a"),
    "null and empty text": ("cast(null as string) as a", "'' as a"),
    "border of texts": ("'ab' as a, 'c' as b", "'a' as a, 'bc' as b"),
    "border of arrays": ("array(1, 2) as a, array(3) as b", "array(1) as a, array(2, 3) as b"),
    "null in an array": ("array(1, null) as a", "array(null, 1) as a"),
    "null for an element": ("array(cast(null as int)) as a", "array(1) as a"),
    "one null more": ("array(1, null) as a", "array(1) as a"),
    "no array": ("cast(null as array<int>) as a", "cast(array() as array<int>) as a"),
    "nested arrays": ("array(array(1), array(2)) as a", "array(array(1, 2)) as a"),
    "null in a struct": (
        "named_struct('x', null, 'y', 1) as a",
        "named_struct('x', 1, 'y', null) as a",
    ),
    "no struct": ("cast(null as struct<x:int>) as a", "cast(struct(null) as struct<x:int>) as a"),
    "a map's value": ("map('k', 1, 'l', 2) as a", "map('k', 2, 'l', 1) as a"),
    "a map's null": ("map('k', 1, 'l', null) as a", "map('k', null, 'l', 1) as a"),
    "no map": ("cast(null as map<string,int>) as a", "cast(map() as map<string,int>) as a"),
    "a map in a map": ("map('k', map('l', 1)) as a", "map('k', map('l', 2)) as a"),
    "a map in an array": ("array(map('l', 1)) as a", "array(map('l', 2)) as a"),
    "a map in a struct": ("struct(map('l', 1) as x) as a", "struct(map('l', 2) as x) as a"),
    "variant": ("parse_json('[1]') as a", "parse_json('[2]') as a"),
    "variant's type": (
        "cast(date'2020-01-01' as variant) as a",
        "cast('2020-01-01' as variant) as a",
    ),
    "variant's null": ("parse_json('null') as a", "cast(null as variant) as a"),
    "decimal": ("1.50 as a", "1.51 as a"),
    "long decimal": ("cast(1e30 as decimal(38,2)) as a", "cast(2e30 as decimal(38,2)) as a"),
    "timestamp": ("timestamp'2020-01-01' as a", "timestamp'2020-01-01 00:00:00.000001' as a"),
    "timestamp without zone": ("timestamp_ntz'2020-01-01' as a", "timestamp_ntz'2020-01-02' as a"),
    "date": ("date'2020-01-01' as a", "date'2020-01-02' as a"),
    "binary": ("X'00' as a", "X'0000' as a"),
    "months": ("interval 1 year as a", "interval 2 year as a"),
    "seconds": ("interval 1 day as a", "interval 2 day as a"),
    "letter case of a collation": ("'a' collate UNICODE_CI as a", "'A' collate UNICODE_CI as a"),
    "collated in an array": (
        "array('a' collate UNICODE_CI) as a",
        "array('A' collate UNICODE_CI) as a",
    ),
    "boolean": ("true as a", "false as a"),
    "a column's name": ("1 as a", "1 as b"),
    "a name with a comma": ("1 as `a,b`, 2 as c", "1 as a, 2 as `b,c`"),
    "a decimal's point": ("cast(1.23 as decimal(10,2)) as a", "cast(12.3 as decimal(10,1)) as a"),
    "decimal and bigint": ("cast(1.23 as decimal(10,2)) as a", "123L as a"),
    "date and number": ("date'1970-01-02' as a", "1 as a"),
    "boolean and number": ("true as a", "1 as a"),
    "moment and number": ("timestamp_micros(1) as a", "1L as a"),
    "moments with zones and without": (
        "timestamp'1970-01-01' as a",
        "timestamp_ntz'1970-01-01' as a",
    ),
    "text and binary": ("'a' as a", "X'61' as a"),
    "a field's name": ("named_struct('x', 1) as a", "named_struct('y', 1) as a"),
    "a field's kind": ("array(named_struct('x', 1)) as a", "array(named_struct('x', true)) as a"),
    "a key's kind": ("map(1, 'v') as a", "map(true, 'v') as a"),
    "an element's kind": ("array(date'1970-01-02') as a", "array(1) as a"),
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_that_look_alike_are_distinguished(spark: SparkSession, name: str) -> None:
    one, other = PAIRS[name]
    assert fingerprint(spark, f"select {one}") != fingerprint(spark, f"select {other}")


SAME = {
    "NaN": ("double('NaN') as a", "-double('NaN') as a"),
    "zero": ("double('0.0') as a", "double('-0.0') as a"),
    "zero in a struct": ("struct(float('0.0') as x) as a", "struct(float('-0.0') as x) as a"),
    "order in a map": ("map('k', 1, 'l', null) as a", "map('l', null, 'k', 1) as a"),
    "order in nested maps": (
        "map(1, map('k', 1, 'l', 2)) as a",
        "map(1, map('l', 2, 'k', 1)) as a",
    ),
    "letter case of a name": ("1 as a, 2 as b", "2 as B, 1 as a"),
    "short numbers": ("tinyint(1) as a, smallint(2) as b", "int(1) as a, int(2) as b"),
    "decimals with more digits": (
        "cast(1.5 as decimal(10,2)) as a",
        "cast(1.5 as decimal(12,2)) as a",
    ),
    "a text of a collation": ("'a' collate UNICODE_CI as a", "'a' as a"),
    "order in a variant": (
        """parse_json('{"a": 1, "b": 2}') as a""",
        """parse_json('{"b": 2, "a": 1}') as a""",
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_values_that_are_equal_have_one_fingerprint(spark: SparkSession, name: str) -> None:
    one, other = SAME[name]
    assert fingerprint(spark, f"select {one}") == fingerprint(spark, f"select {other}")


EVERYTHING = (
    "select id, cast(id as int) i, float(id) f, double('NaN') n, id / 3 d, interval 1 day e,"
    " if(id % 2 = 0, null, cast(id as string)) s, timestamp_seconds(id) t, date'2020-01-01' o,"
    " cast(cast(id as string) as binary) b, interval 1 year y, timestamp_ntz'2020-01-01' u,"
    " cast(id as decimal(38,9)) m,"
    " parse_json(concat('{\"a\":', id, '}')) v, array(id, null, 2) a, array('x', 'y') l,"
    " map('k', map(id, null), 'z', null) p, struct(id as x, cast(null as string) as y) q,"
    " array(struct(id as x, map('k', array(id)) as m), null) r, 'a' collate UNICODE_CI c,"
    " id `a.b`, id `x y`, id `q``q`, id `\"`, id `'`, id `ünï`, id `\\\\`,"
    " named_struct('it''s', id, 'a.b', id) z, id % 2 = 0 w from range(50)"
)


def test_read_back_from_parquet_it_is_the_same(spark: SparkSession, tmp_path: Path) -> None:
    written, read = stored(spark.sql(EVERYTHING), tmp_path)
    assert written == read
    assert written.rows == 50


def test_a_frame_of_five_hundred_columns_has_evidence(spark: SparkSession, tmp_path: Path) -> None:
    kinds = ["bigint", "string", "double", "decimal(10,2)", "int"]
    columns = [
        f"cast(if(id % 9 = {at % 9}, null, id + {at}) as {kinds[at % 5]}) as c{at}"
        for at in range(500)
    ]
    df = spark.range(20).selectExpr(*columns)
    written, read = stored(df, tmp_path)
    assert written == read
    changed = [*columns[:-1], "if(id = 7, null, 1) as c499"]
    assert evidence(spark.range(20).selectExpr(*changed)).fingerprint != written.fingerprint


def test_frames_of_no_rows_one_row_and_no_columns_have_evidence(
    spark: SparkSession, tmp_path: Path
) -> None:
    written, read = stored(spark.sql(ROWS).where("id < 0"), tmp_path)
    assert written == read == Evidence(0, "0-0000000000000000", written.schema)
    written, read = stored(spark.sql(ROWS).where("id = 3"), tmp_path)
    assert written == read
    assert written.rows == 1
    assert evidence(spark.range(3).select()).rows == 3


def test_a_column_isnt_confused_with_a_field_of_an_alias(spark: SparkSession) -> None:
    one = spark.sql("select named_struct('b', 1) as a, 7 as b").alias("a")
    other = spark.sql("select named_struct('b', 2) as a, 7 as b").alias("a")
    assert evidence(one).fingerprint != evidence(other).fingerprint


def test_extra_aggregates_come_with_the_evidence(spark: SparkSession) -> None:
    told = evidence(spark.sql(ROWS), ["max(id) as most", "count_if(shop is null) as none"]).extra
    assert told == {"most": 999, "none": 0}


def test_each_chunk_of_a_frame_of_many_has_what_it_has_alone(spark: SparkSession) -> None:
    df = spark.sql(ROWS)
    found = evidence_by_group(
        df.selectExpr("*", "concat('d', shop) as dataid"), "dataid", ["max(id) as m"]
    )
    assert sorted(found) == [f"d{shop}" for shop in range(7)]
    for shop in range(7):
        assert found[f"d{shop}"] == evidence(df.where(f"shop = {shop}"), ["max(id) as m"])


def failing(spark: SparkSession, when: str) -> DataFrame:
    return spark.range(0, 100, 1, 4).selectExpr(f"if({when}, raise_error('no'), id) as id")


@pytest.mark.parametrize(
    ("when", "written", "seen"), [("id = 99", 100, 75), ("true", None, 0), ("true", 100, 0)]
)
def test_observations_of_a_failed_job_arent_evidence(
    spark: SparkSession, when: str, written: int | None, seen: int
) -> None:
    df, told = observed(failing(spark, when))
    with pytest.raises(PySparkException):
        df.write.format("noop").mode("overwrite").save()
    with pytest.raises(DataflowError, match=f"observed {seen} rows of this chunk, but"):
        told(rows=written)


def test_a_frame_never_written_is_reported_after_a_while(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendataflow_dagster.spark.evidence.OBSERVATION_SECONDS", 0.1)
    _, told = observed(spark.sql(ROWS))
    with pytest.raises(DataflowError, match="never written"):
        told()


def test_random_rows_differ_wherever_one_value_does(spark: SparkSession) -> None:
    """Small values of all kinds, which reveal a hash that mixes up columns or NULLs."""
    chance = random.Random(7)
    schema = "a int, b int, c string, d array<int>, e struct<x:int,y:int>, f map<string,int>"

    def some(of: Sequence[Any]) -> Any:
        return chance.choice([*of, None])

    def row() -> tuple[Any, ...]:
        number = (0, 1, 2)
        return (
            some(number),
            some(number),
            some(["", "0", "1"]),
            some([[], [some(number)], [some(number), some(number)]]),
            some([(some(number), some(number))]),
            some([{}, {"k": some(number)}, {"k": some(number), "l": some(number)}]),
        )

    rows = [row() for _ in range(3000)]
    distinct = {repr((*each[:5], each[5] and sorted(each[5].items()))) for each in rows}
    df = spark.createDataFrame([(at, *each) for at, each in enumerate(rows)], f"k int, {schema}")
    found = evidence_by_group(df, "k")
    assert len({each.fingerprint for each in found.values()}) == len(distinct)
