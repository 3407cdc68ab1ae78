"""Expectations: what passes, what fails with which message, and what is refused early."""

import datetime as dt
import re
import runpy
from collections.abc import Mapping, Sequence
from decimal import Decimal, localcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pyspark.sql import DataFrame, SparkSession

from opendataflow_dagster.chunk import ERROR, WARN, Checked, Chunk
from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.spark.evidence import Evidence, evidence_by_group, observed
from opendataflow_dagster.spark.expectations import rules_of
from tests.support.spark_line import Line

CHUNK = cast(Chunk, SimpleNamespace(dataid="2026-11-18"))
ROWS = (
    "select id, id % 3 as shop, concat('n', id) as name, if(id = 4, null, id * 10) as amount,"
    " date_add(date'2026-11-01', int(id)) as day, cast(id as decimal(10,2)) as price,"
    " double(id) as share from range(10)"
)


def judged(
    df: DataFrame, expect: Mapping[str, Any], last: Sequence[int] = ()
) -> dict[str, Checked]:
    """Return the results of the rules for a frame that is written, as the engine applies them."""
    rules = rules_of(expect, ["out"])
    extra = [each for rule in rules if not rule.wrong(df) for each in rule.observes("r_")]
    seen, told = observed(df, extra)
    seen.write.format("noop").mode("overwrite").save()
    evidence = told()
    found = [rule.judge("r_", evidence, lambda: df, last, CHUNK) for rule in rules]
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def no_frame() -> DataFrame:
    raise AssertionError("the rows were asked for")


@pytest.fixture
def df(spark: SparkSession) -> DataFrame:
    return spark.sql(ROWS)


PASSING = [
    {"not_null": ["id", "name"]},
    {"not_null": "id"},
    {"unique": ["id", ["shop", "name"]]},
    {"unique": ["amount"]},
    {"range": {"amount": (0, 90)}},
    {"range": {"amount": (None, 90)}},
    {"range": {"share": (0, None)}},
    {"range": {"price": (Decimal("0.00"), Decimal(9))}},
    {"range": {"day": (dt.date(2026, 11, 1), dt.date(2026, 11, 10))}},
    {"range": {"name": ("n", "n9")}},
    {"range": {"id": (-(10**30), 10**30)}},
    {"range": {"price": (-(10**30), 1e300)}},
    {"rows": {"min": 10, "max": 10}},
    {"rows": {"change": 0.5}},
    {"sql": {"shop": "shop = id % 3", "name": "name like 'n%' -- so"}},
    {"function": [lambda df: True, lambda df, chunk: chunk.dataid == "2026-11-18", lambda df: ""]},
]


@pytest.mark.parametrize("expect", PASSING, ids=lambda each: "-".join(each))
def test_rules_that_hold_pass(df: DataFrame, expect: dict[str, Any]) -> None:
    assert [each for each in judged(df, expect).values() if not each.passed] == []


def test_observed_rules_that_pass_dont_read_the_rows_again(df: DataFrame) -> None:
    rules = rules_of(
        {"not_null": ["id"], "range": {"id": (0, 9)}, "rows": {"min": 1}, "sql": {"s": "id >= 0"}},
        ["out"],
    )
    seen, told = observed(df, [each for rule in rules for each in rule.observes("p")])
    seen.write.format("noop").mode("overwrite").save()
    assert all(rule.judge("p", told(), no_frame, [], CHUNK).passed for rule in rules)


@pytest.mark.parametrize(
    ("expect", "name", "message"),
    [
        (
            {"not_null": ["amount"]},
            "not_null_amount",
            "1 of 10 rows have no amount, such as (amount=NULL, id=4, shop=1, name='n4')",
        ),
        (
            {"unique": ["shop"]},
            "unique_shop",
            "10 of 10 rows share shop with another (3 values), such as (shop=0) 4×, ",
        ),
        ({"unique": [["shop", "day"], ["shop", "amount"], "shop"]}, "unique_shop", "10 of 10"),
        (
            {"range": {"amount": (10, 70)}},
            "range_amount",
            "3 of 10 rows are outside 10≤amount≤70, such as (amount=0, id=0, shop=0, name='n0'), "
            "(amount=80, ",
        ),
        (
            {"range": {"day": (dt.date(2026, 11, 2), None)}},
            "range_day",
            "1 of 10 rows are outside 2026-11-02≤day, such as (day=2026-11-01, ",
        ),
        ({"range": {"NAME": ("n1", None)}}, "range_NAME", "1 of 10 rows"),
        ({"rows": {"min": 11}}, "rows", "10 rows, expected at least 11"),
        ({"rows": {"max": 9}}, "rows", "10 rows, expected at most 9"),
        (
            {"sql": {"big one!": "amount > 20"}},
            "big_one",
            "4 of 10 rows don't meet `amount > 20`, such as (amount=0, id=0, ",
        ),
        ({"sql": {"s": "share / (id - 2) > -100"}}, "s", "1 of 10 rows don't meet"),
        ({"sql": {"s": "id * 9223372036854775807 >= 0"}}, "s", "8 of 10 rows don't meet"),
        ({"sql": {"s": "int(name) > 0"}}, "s", "10 of 10 rows don't meet `int(name) > 0`"),
        ({"sql": {"s": "raise_error('boo') is null"}}, "s", "10 of 10 rows don't meet"),
        ({"sql": {"s": "null"}}, "s", "10 of 10 rows don't meet"),
        ({"function": lambda df: f"{df.count()} is odd"}, "lambda", "10 is odd"),
        ({"function": [len]}, "len", "it raised TypeError: object of type 'DataFrame' has no"),
        ({"function": [lambda df: df]}, "lambda", "it returned a DataFrame: return True, False"),
        ({"function": [lambda df: False]}, "lambda", "it returned False"),
        ({"function": [lambda df: df.where("nope > 1")]}, "lambda", "it raised [UNRESOLVED_COLUMN"),
        ({"function": [lambda df: Checked("x", "y", False, "so")]}, "lambda", "so"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_rules_that_fail_are_reported_with_a_sample(
    df: DataFrame, expect: dict[str, Any], name: str, message: str
) -> None:
    told = judged(df, expect)[name]
    assert not told.passed
    assert told.message.startswith(message)
    assert "\n" not in told.message
    assert (told.datasetid, told.severity) == ("out", ERROR)


def test_columns_are_separate_keys_and_a_list_of_them_is_one_key(spark: SparkSession) -> None:
    df = spark.sql(
        "select id % 3 as shop, id % 2 as even, id div 2 as odf_times, int(null) as gone"
        " from range(10)"
    )
    told = judged(df, {"unique": [["shop", "even"], ("shop", "gone")]})
    assert {name: each.passed for name, each in told.items()} == {
        "unique_shop_even": False,
        "unique_shop_gone": True,
    }
    message = told["unique_shop_even"].message
    assert message.startswith(
        "8 of 10 rows share shop, even with another (4 values), such as (shop="
    )

    told = judged(df, {"unique": ["odf_times", "even"]})
    assert {name: each.passed for name, each in told.items()} == {
        "unique_odf_times": False,
        "unique_even": False,
    }
    assert all(
        each.message.endswith("; one key of several columns is [['odf_times', 'even']]")
        for each in told.values()
    )


LONG = Decimal("123456789012.12345678")


@pytest.mark.parametrize(
    ("kind", "bound", "step"),
    [
        ("bigint", 10**18, 1),
        ("bigint", 2**63 - 2, 1),
        ("bigint", -(10**18), 1),
        ("decimal(20,8)", LONG, Decimal("1e-8")),
        ("decimal(20,8)", -LONG, Decimal("1e-8")),
        ("decimal(38,0)", 10**37, 1),
        ("decimal(38,18)", Decimal("1e19"), Decimal("1e-18")),
        ("decimal(38,0)", Decimal("1.00"), 1),
        ("decimal(36,2)", Decimal("0.5"), 1),
    ],
)
def test_a_bound_of_many_digits_is_exact(
    spark: SparkSession, kind: str, bound: Any, step: Any
) -> None:
    with localcontext(prec=60):
        texts = [format(Decimal(bound) + step * at, "f") for at in (-1, 0, 1)]
    df = spark.createDataFrame([(each,) for each in texts], "x string")
    df = df.selectExpr(f"cast(x as {kind}) as x")

    told = judged(df, {"range": {"x": (bound, bound)}})["range_x"]

    assert told.metadata["violations"] == 2


@pytest.mark.parametrize(
    ("expect", "message"),
    [
        (
            {"not_null": ["amuont"]},
            "there is no column 'amuont' (there are: id, shop, name, amount,"
            " day, price, share). Did you mean 'amount'?",
        ),
        ({"unique": [["id", "zzzzz"]]}, "there is no column 'zzzzz'"),
        ({"range": {"name": (1, 2)}}, "the column 'name' is string, but its bounds are numbers"),
        ({"range": {"id": ("a", None)}}, "the column 'id' is bigint, but its bounds are texts"),
        (
            {"range": {"long": (Decimal("0.5"), None)}},
            "the column 'long' is decimal(38,0), for "
            "which Spark rounds a bound with 1 decimals: round it, or give it as a float",
        ),
        ({"sql": {"s": "amount >"}}, "Syntax error at or near"),
        (
            {"sql": {"s": "ammount > 1"}},
            "A column, variable, or function parameter with name"
            " `ammount` cannot be resolved. Did you mean",
        ),
        ({"sql": {"s": "amount * 2"}}, "`amount * 2` is bigint, not true or false"),
        ({"sql": {"s": "sum(amount) > 1"}}, "`sum(amount) > 1` can't be checked row by row"),
        ({"sql": {"s": "id in (select 1)"}}, "`id in (select 1)` can't be checked row by row"),
        ({"sql": {"s": "nope(id)"}}, "Cannot resolve routine `nope`"),
    ],
    ids=lambda each: "" if isinstance(each, dict) else each[:30],
)
def test_a_rule_that_doesnt_fit_the_frame_fails_and_the_chunk_is_still_written(
    df: DataFrame, expect: dict[str, Any], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    df = df.withColumn("long", df["id"].cast("decimal(38,0)")) if "long" in message else df

    [told] = judged(df, expect).values()
    assert not told.passed
    assert told.message.startswith(message)
    assert capfd.readouterr().err == ""


NOBODY = cast(Chunk, None)


def of_a_chunk(df: DataFrame, chunk: Any = None) -> bool:
    return chunk is CHUNK


def of_one_by_its_type(df: DataFrame, c: "Chunk" = NOBODY) -> bool:
    return c is CHUNK


def of_a_number(df: DataFrame, least: int = 3) -> bool:
    return least == 3


def test_a_function_s_default_isn_t_replaced_by_the_chunk(df: DataFrame) -> None:
    fns = [of_a_chunk, of_one_by_its_type, of_a_number]
    assert all(each.passed for each in judged(df, {"function": fns}).values())


def test_two_rules_that_raise_on_one_expression_fail_alone(df: DataFrame) -> None:
    """Spark would compute their common part once, before either could catch its error."""
    rules = {"a": "cast(name as int) > 0", "b": "cast(name as int) < 9", "c": "id < 9"}
    told = judged(df, {"sql": rules, "range": {"id": (0, 9)}})
    assert {name: each.metadata["violations"] for name, each in told.items()} == {
        "a": 10,
        "b": 10,
        "c": 1,
        "range_id": 0,
    }


def test_a_range_without_end_refuses_nan(spark: SparkSession) -> None:
    df = spark.sql("select double('NaN') as x union all select 1e300 union all select null")
    assert judged(df, {"range": {"x": (0, None)}})["range_x"].metadata["violations"] == 1
    assert judged(df, {"range": {"x": (0, 1e301)}})["range_x"].metadata["violations"] == 1
    assert judged(df, {"range": {"x": (None, 1)}})["range_x"].metadata["violations"] == 2


def test_timestamps_are_compared_with_and_without_a_zone(spark: SparkSession) -> None:
    df = spark.sql("select timestamp'2026-11-18 12:00:00+00:00' as at, timestamp_ntz'2026-11-18' n")
    noon = dt.datetime(2026, 11, 18, 13, tzinfo=dt.timezone(dt.timedelta(hours=1)))
    late = dt.datetime(2026, 11, 18, 12, 0, 1)
    assert judged(df, {"range": {"at": (noon, noon), "n": (None, late)}})["range_at"].passed
    assert not judged(df, {"range": {"n": (late, None)}})["range_n"].passed


@pytest.mark.parametrize(
    ("rows", "last", "change", "passed"),
    [
        (10, [], 0.5, True),
        (10, [20], 0.5, True),
        (10, [21], 0.5, False),
        (10, [6], 0.5, False),
        (10, [1, 10, 10, 10, 10, 10], 0, True),
        (0, [0], 0.5, True),
        (10, [0], 0.5, False),
        (0, [5], 1, True),
        (0, [5], 0.9, False),
    ],
)
def test_rows_are_compared_with_the_last_five_chunks(
    rows: int, last: list[int], change: float, passed: bool
) -> None:
    [rule] = rules_of({"rows": {"change": change}}, ["out"])
    told = rule.judge("", Evidence(rows, "", ""), no_frame, last, CHUNK)
    assert told.passed == passed
    if last == [6]:
        assert (
            told.message
            == "10 rows, against 6 as the last chunk's (+67%): at most ±50% is expected"
        )


def test_a_warning_is_reported_as_a_warning(df: DataFrame) -> None:
    told = judged(
        df, {"not_null": ["id"], "warn": {"not_null": ["id", "amount"], "rows": {"min": 99}}}
    )
    assert {name: (each.passed, each.severity) for name, each in told.items()} == {
        "not_null_id": (True, ERROR),
        "not_null_id_2": (True, WARN),
        "not_null_amount": (False, WARN),
        "rows": (False, WARN),
    }


def test_a_job_with_several_outputs_has_rules_for_each() -> None:
    rules = rules_of(
        {"a": {"not_null": ["x"]}, "b": {"not_null": ["x"], "rows": {"min": 1}}}, ["a", "b", "c"]
    )
    assert [(each.name, each.datasetid) for each in rules] == [
        ("not_null_x", "a"),
        ("not_null_x_2", "b"),
        ("rows", "b"),
    ]
    assert rules_of({"out": {"rows": {"min": 1}}}, ["out"])[0].datasetid == "out"
    assert rules_of({"rows": {"min": 1}}, ["rows"])[0].name == "rows"
    assert rules_of({}, ["a", "b"]) == rules_of(None, []) == []


def test_names_are_identifiers_and_differ() -> None:
    rules = rules_of(
        {
            "not_null": ["a b", "a.b", "ünï", "`"],
            "sql": {"1st": "true", "rows": "true"},
            "rows": {"min": 1},
            "unique": [["a", "b"], "a_b"],
        },
        ["out"],
    )
    names = [each.name for each in rules]
    assert len(set(names)) == len(names) == 9
    assert all(re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", each) for each in names)


def test_odd_column_names_are_quoted(spark: SparkSession) -> None:
    df = spark.sql("select null as `a.b`, 1 as `x y`, 2 as `q``q`, 3 as `it's`")
    told = judged(
        df,
        {
            "not_null": ["a.b", "x y", "q`q", "it's"],
            "range": {"x y": (2, None)},
            "unique": ["x y", ["q`q", "it's"]],
        },
    )
    assert [name for name, each in told.items() if not each.passed] == ["not_null_a_b", "range_x_y"]
    assert told["not_null_a_b"].message.startswith(
        "1 of 1 rows have no a.b, such as (a.b=NULL, x y=1"
    )


def test_a_truncated_sample_shows_values_of_all_types(spark: SparkSession) -> None:
    df = spark.sql(
        "select repeat('x', 1000) as long, X'00ff' as bin, map('k', array(1)) as m,"
        " interval 1 year as y"
    )
    message = judged(df, {"sql": {"s": "long = bin and m is null and y is null"}})["s"].message
    assert message.endswith(
        f"such as (long='{'x' * 29}…, bin=0x00FF, m={{k -> [1]}}, y=INTERVAL '1' YEAR)"
    )


def test_an_empty_chunk_meets_all_but_the_number_of_rows(df: DataFrame) -> None:
    told = judged(
        df.where("id < 0"),
        {
            "not_null": ["id"],
            "unique": ["id"],
            "range": {"id": (5, 6)},
            "sql": {"s": "id = 77"},
            "rows": {"min": 1},
        },
    )
    assert [name for name, each in told.items() if not each.passed] == ["rows"]
    assert told["rows"].message == "0 rows, expected at least 1"


def test_chunks_of_one_frame_are_judged_apart(df: DataFrame) -> None:
    [rule] = rules_of({"range": {"id": (0, 8)}}, ["out"])
    found = evidence_by_group(df, "shop", rule.observes("r0_"))
    passed = {
        shop: rule.judge("r0_", each, lambda shop=shop: df.where(f"shop = {shop}"), [], CHUNK)
        for shop, each in found.items()
    }
    assert {shop: each.passed for shop, each in passed.items()} == {
        "0": False,
        "1": True,
        "2": True,
    }
    assert passed["0"].message.startswith("1 of 4 rows are outside 0≤id≤8, such as (id=9, ")


def test_a_sample_that_cant_be_read_doesnt_hide_the_answer(df: DataFrame) -> None:
    [rule] = rules_of({"not_null": ["amount"]}, ["out"])
    evidence = Evidence(10, "", "", {"rnot_null_amount": 2})
    df = df.selectExpr("id").groupBy("id").count()  # without that, Spark still finds the column
    told = rule.judge("r", evidence, lambda: df.select("id"), [], CHUNK)
    assert (told.passed, told.message) == (False, "2 of 10 rows have no amount")


@pytest.mark.parametrize(
    ("expect", "outputs", "message"),
    [
        (
            [1],
            ["a"],
            r"expect is \[1\]\. Give \{kind: what\}, of the kinds not_null, unique",
        ),
        (
            {"notnull": ["x"]},
            ["a"],
            "isn't a kind of rule. Choose from not_null, .*mean 'not_null'",
        ),
        ({"a": {"uniqe": ["x"]}}, ["a", "b"], "'uniqe', which isn't a kind.*Did you mean 'unique'"),
        ({"rows": {"min": 1}}, ["a", "b"], "`expect` names no dataset.*expect={'a': {…}}"),
        (
            {"c": {"rows": {"min": 1}}},
            ["a", "b"],
            "'c', which isn't a kind.*or a dataset: 'a', 'b'",
        ),
        ({"a": {"rows": {"min": 1}}, "rows": {"min": 1}}, ["a"], "both datasets and kinds"),
        ({"rows": {"min": 1}}, [], "writes no dataset"),
        ({"not_null": []}, ["a"], r"expect of 'a', not_null is \[\]. Give a list of columns"),
        ({"not_null": [1]}, ["a"], "not_null is 1. Give a column's name"),
        ({"unique": [[]]}, ["a"], "Give a column, or a list of columns"),
        ({"unique": {"x": 1}}, ["a"], "Give a list of columns, or of lists"),
        ({"unique": [["x", "y", "X"]]}, ["a"], r"is \['x', 'y', 'X'\]\. Give each column once"),
        ({"unique": [["x", ["y"]]]}, ["a"], r"unique is \['y'\]\. Give a column's name"),
        ({"unique": []}, ["a"], r"unique is \[\]\. Give a list of columns, or of lists of them"),
        ({"range": {"x": 1}}, ["a"], r"range of 'x' is 1\. Give \(least, most\)"),
        ({"range": {"x": (None, None)}}, ["a"], "at most one of them None"),
        ({"range": {"x": (1, "b")}}, ["a"], "Give two numbers, dates or texts"),
        ({"range": {"x": (float("nan"), 1)}}, ["a"], "Give two numbers"),
        ({"range": {"x": (True, False)}}, ["a"], "Give two numbers"),
        ({"range": {"x": (2, 1)}}, ["a"], "the minimum is above the maximum. Swap them"),
        ({"range": {"x": (dt.date(2026, 1, 1), dt.datetime(2026, 1, 1))}}, ["a"], "of one type"),
        ({"range": ["x"]}, ["a"], r"Give \{column: \(least, most\)\}"),
        ({"rows": {"mim": 1}}, ["a"], "rows has 'mim'. Choose from min, max, change.*mean 'min'"),
        ({"rows": {"min": -1}}, ["a"], "rows, min is -1. Give a number of rows"),
        ({"rows": {"min": 1.5}}, ["a"], "rows, min is 1.5. Give a number of rows"),
        ({"rows": {"change": True}}, ["a"], "rows, change is True. Give a share"),
        ({"rows": {"min": 2, "max": 1}}, ["a"], "above its max of 1"),
        ({"rows": {}}, ["a"], "Give at least one of min, max, change"),
        ({"sql": ["x > 1"]}, ["a"], "Give {name: an expression"),
        ({"sql": {"x": " "}}, ["a"], "sql of 'x' is ' '. Give an expression"),
        ({"sql": {1: "x"}}, ["a"], "Give a name for each expression"),
        ({"function": ["x"]}, ["a"], "function is 'x'. Give a list of functions"),
        ({"warn": {"warn": {}}}, ["a"], "'warn' within 'warn'"),
        ({"warn": {"rowz": {}}}, ["a"], "warn has 'rowz', which isn't a kind.*mean 'rows'"),
        ({"warn": 3}, ["a"], "warn is 3"),
    ],
    ids=lambda each: None if isinstance(each, str) else "",
)
def test_malformed_expectations_are_refused_in_one_line(
    expect: Any, outputs: list[str], message: str
) -> None:
    with pytest.raises(WrongUse, match=message) as refused:
        rules_of(expect, outputs)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("amount", "reason"), [(5, ""), (0, "a sale of nothing")])
def test_the_example_of_the_page(line: Line, amount: int, reason: str) -> None:
    page = Path(__file__).parents[1] / "projects" / "spark_page"
    columns = "id int, shop string, day date, amount int, comment string"
    rows = [(1, "a", dt.date(2026, 11, 1), amount, None)] * 2
    line.job("check", "sales", "checked")
    line.arrive("sales", _1=line.spark.createDataFrame(rows, columns))

    line.run("check", runpy.run_path(str(page / "expectations.py"))["checked"])

    assert reason in line.reason()
    if not reason:
        assert line.rows("checked", "1") == [rows[0]]
