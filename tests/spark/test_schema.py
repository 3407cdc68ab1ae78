"""Schemas as texts: read back, compared, merged, and frames that are fitted to them."""

import pytest
from pyspark.sql import SparkSession, types

from opendataflow_dagster.errors import DataflowError
from opendataflow_dagster.spark.schema import compare, fitted, merged, schema_of, schema_text

ALL = (
    "id:bigint,b:binary,t:boolean,s:smallint,y:tinyint,i:int,f:float,d:double,m:decimal(38,18),"
    "x:string,c:string collate UNICODE_CI,at:timestamp,nt:timestamp_ntz,on:date,v:variant,n:void,"
    "iv:interval,ym:interval year to month,ye:interval year,dt:interval day to second,"
    "hm:interval hour to minute,tm:time(6),g:geometry(4326),gg:geography(4326),"
    "a:array<array<string>>,k:map<string,map<date,int>>,"
    "st:struct<x:int,`y z`:array<struct<`a``b`:decimal(3,2)>>>,e:struct<>"
)


@pytest.mark.parametrize(
    "text", ["", "id:bigint", ALL, "`a.b`:int,`x,y:z`:string,`q``q`:int,`ünï`:int,`<>`:int"]
)
def test_a_schema_is_read_back_from_its_text(text: str) -> None:
    assert schema_text(schema_of(text)) == text


def test_a_schema_of_many_columns_isnt_truncated() -> None:
    schema = types.StructType(
        [types.StructField(f"column_{at}", types.LongType()) for at in range(500)]
    )
    assert schema_of(schema_text(schema)) == schema


@pytest.mark.parametrize(
    "text", ["id", "id:", "id:what", "id:int,", "id:array<int", "id:int>", ":"]
)
def test_an_invalid_schema_is_refused_in_one_line(text: str) -> None:
    if text == "id:int,":
        assert schema_of(text).names == ["id"]  # a comma at the end does no harm
        return
    with pytest.raises(DataflowError, match="can't be read at character"):
        schema_of(text)


def test_differences_are_described_in_words() -> None:
    assert compare("id:bigint,x:int", "x:int,id:bigint") == []
    assert compare("amount:bigint,y:int", "x:int,amount:string") == [
        "column 'amount' was bigint and is string",
        "column 'y' is missing",
        "column 'x' is new",
    ]
    assert compare("a:struct<x:int>", "a:struct<x:int,y:int>") == [
        "column 'a' was struct<x:int> and is struct<x:int,y:int>"
    ]


@pytest.mark.parametrize(
    ("was", "now", "both"),
    [
        ("a:int", "a:int", "a:int"),
        ("a:int", "b:int", "a:int,b:int"),
        ("a:int,b:int", "b:bigint", "a:int,b:bigint"),
        ("a:bigint", "a:int", "a:bigint"),
        ("a:float", "a:double", "a:double"),
        ("a:int", "a:double", "a:double"),
        ("a:int", "a:float", "a:double"),
        ("a:bigint", "a:double", None),  # a double hasn't that many digits
        ("a:decimal(10,2)", "a:decimal(8,4)", "a:decimal(12,4)"),
        ("a:decimal(10,2)", "a:int", "a:decimal(12,2)"),
        ("a:bigint", "a:decimal(38,18)", "a:decimal(38,18)"),
        ("a:bigint", "a:decimal(38,19)", None),
        ("a:decimal(38,0)", "a:decimal(38,18)", None),
        ("a:decimal(10,2)", "a:double", None),
        ("a:int", "a:string", None),
        ("a:timestamp", "a:timestamp_ntz", None),
        ("a:date", "a:timestamp", None),
        ("a:void", "a:array<int>", "a:array<int>"),
        ("a:array<int>", "a:array<bigint>", "a:array<bigint>"),
        ("a:array<int>", "a:array<string>", None),
        ("a:map<string,int>", "a:map<string,double>", "a:map<string,double>"),
        ("a:map<int,int>", "a:map<bigint,int>", None),
        ("a:struct<x:int>", "a:struct<y:int,x:bigint>", "a:struct<x:bigint,y:int>"),
        ("a:int", "A:int", None),
    ],
)
def test_schemas_merge_where_nothing_is_lost(was: str, now: str, both: str | None) -> None:
    assert merged(was, now) == both


def test_a_frame_is_fitted_to_a_wider_schema(spark: SparkSession) -> None:
    df = spark.sql(
        "select 1 as a, 1.5 as m, named_struct('x', 1) as s,"
        " array(named_struct('x', 1), null) as l, map('k', named_struct('x', 1)) as k,"
        " cast(null as struct<x:int>) as no"
    )
    schema = (
        "new:array<int>,a:bigint,m:decimal(12,4),s:struct<y:string,x:bigint>,"
        "l:array<struct<x:bigint,y:int>>,k:map<string,struct<y:int,x:int>>,no:struct<x:int,y:int>,"
        "`odd ``name`:double"
    )
    found = fitted(df, schema)
    assert schema_text(found.schema) == schema
    [row] = found.collect()
    assert (row["new"], row["a"], str(row["m"]), row["no"]) == (None, 1, "1.5000", None)
    assert row["s"].asDict() == {"y": None, "x": 1}
    assert [each and each.asDict() for each in row["l"]] == [{"x": 1, "y": None}, None]
    assert row["k"]["k"].asDict() == {"y": None, "x": 1}


def test_a_frame_that_has_more_than_the_schema_is_refused(spark: SparkSession) -> None:
    with pytest.raises(DataflowError, match="column 'b'"):
        fitted(spark.sql("select 1 as a, 2 as b"), "a:int")


def test_a_merged_schema_fits_both_frames(spark: SparkSession) -> None:
    one = spark.sql("select 1 as id, 2.50 as amount")
    other = spark.sql("select 3000000000 as id, 'x' as name")
    both = merged(schema_text(one.schema), schema_text(other.schema))
    assert both == "id:bigint,amount:decimal(3,2),name:string"
    rows = fitted(one, both).unionByName(fitted(other, both)).orderBy("id").collect()
    assert [tuple(map(str, row)) for row in rows] == [
        ("1", "2.50", "None"),
        ("3000000000", "None", "x"),
    ]
