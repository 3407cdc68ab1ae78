"""Files written by others: read as declared or like the chunk before, or refused in a line."""

import datetime as dt
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.errors import Refused, WrongUse
from opendataflow_dagster.formats.csv_options import (
    CsvOptions,
    csv_options,
    read_pandas,
    refuse_undecodable,
)
from opendataflow_dagster.spark.job import spark_job
from opendataflow_dagster.storage import folder
from opendataflow_dagster.store.registry import add_dataset
from tests.support.spark_line import Line
from tests.support.store_fixtures import put, sql


@pytest.fixture
def copying(line: Line) -> Line:
    """A job that copies what others put into `given`."""
    line.job("copy", "given", "copied")
    return line


def arrive(line: Line, dataid: str, data: str | bytes, name: str = "{}.csv") -> Path:
    file = line.folder / "given" / name.format(dataid)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data.encode() if isinstance(data, str) else data)
    put(line.store, "given", dataid)
    return file


def copy(given: DataFrame) -> DataFrame:
    return given


def declare(line: Line, options: str) -> None:
    add_dataset(line.store, "given", options=options)


# --- bytes that are no text ---


@pytest.mark.parametrize("name", ["{}.csv", "{}.json"])
def test_a_file_in_another_encoding_is_refused_where_it_begins(copying: Line, name: str) -> None:
    text = '{"a": "x"}\n{"a": "Müller"}\n' if "json" in name else "id,name\n1,Anna\n2,Müller\n"
    file = arrive(copying, "1", text.encode("latin-1"), name)

    copying.run("copy", copy)

    assert copying.status("copied", "1", "copy") == "FAILED"
    at = "line 2, column 9" if "json" in name else "line 3, column 4"
    assert f"{file} isn't utf-8 at {at}: the byte 0xfc" in copying.reason()
    if "csv" in name:
        told = """odf dataset add given --options '{"encoding": "cp1252"}'"""
        assert told in copying.reason()
    with pytest.raises(Refused, match=f"isn't utf-8 at {at}"):
        folder.read_frame(str(file), name[3:])


def test_the_position_of_a_byte_is_right_across_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a block ends, even within a character."""
    good = "aé\n日本\n\nb€"
    file = tmp_path / "a.csv"
    file.write_bytes(good.encode() + b"x\xff")
    for size in range(1, len(good.encode()) + 3):
        monkeypatch.setattr("opendataflow_dagster.formats.csv_options.SAMPLE_BYTES", size)
        with pytest.raises(Refused, match="line 4, column 4: the byte 0xff"):
            refuse_undecodable(str(file), "utf-8")
    file.write_bytes(good.encode() + b"\n1\0")
    with pytest.raises(Refused, match="NUL character at line 5, column 2"):
        refuse_undecodable(str(file), "utf-8")
    file.write_bytes(good.encode() + "日".encode()[:2])
    with pytest.raises(Refused, match="line 4, column 3: the byte 0xe6"):
        refuse_undecodable(str(file), "utf-8")


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-8"])
def test_a_declared_encoding_is_read(copying: Line, encoding: str) -> None:
    file = arrive(copying, "1", 'id;name\r\n1;"Mü;ller"\r\n2;é\r\n'.encode(encoding))
    declare(copying, f'{{"encoding": "{encoding}", "delimiter": ";"}}')

    copying.run("copy", copy)

    assert copying.status("copied", "1", "copy") == "READY", "\n".join(copying.said)
    assert copying.rows("copied", "1") == [(1, "Mü;ller"), (2, "é")]
    options = csv_options("given", f'{{"encoding": "{encoding}", "delimiter": ";"}}')
    assert read_pandas(str(file), options)["name"].tolist() == ["Mü;ller", "é"]


# --- what is declared ---


def test_another_delimiter_is_reported_with_how_to_declare_it(copying: Line) -> None:
    for dataid, mark in (("1", ";"), ("2", "\t"), ("3", "|")):
        arrive(copying, dataid, f"id{mark}name\n1{mark}x\n")

    copying.run("copy", copy)

    said = "\n".join(copying.said)
    for mark in (";", "\\t", "|"):
        assert f"""odf dataset add given --options '{{"delimiter": "{mark}"}}'""" in said
    assert copying.facts("copied") == {}
    with pytest.raises(Refused, match="has one column, 'id;name'"):
        folder.read_frame(str(copying.folder / "given" / "1.csv"), "csv")

    declare(copying, '{"delimiter": ";"}')
    sql(
        copying.store,
        "update datastatus set status = 'RESUBMIT' where dataid = '1' and datasetid = 'copied'",
    )
    copying.run("copy", copy)
    assert copying.rows("copied", "1") == [(1, "x")]


def test_a_column_may_be_called_by_a_delimiter_if_that_is_declared(copying: Line) -> None:
    arrive(copying, "1", "id;name\nx\n")
    declare(copying, '{"delimiter": ","}')

    copying.run("copy", copy)

    assert copying.rows("copied", "1") == [("x",)]


ALL = (
    '{"delimiter": "|", "quote": "\'", "header": false, "encoding": "latin-1", "null": "NULL", '
    '"schema": {"id": "bigint", "zip": "string", "day": "date", "price": "decimal(6,2)", '
    '"ok": "boolean"}}'
)
ROWS = "1|01234|2026-01-02|1.50|true\nNULL|'a|ü'|NULL|NULL|false\n3|NA|2026-01-03|2|NULL\n"


def test_everything_that_can_be_declared_is_read_by_both_engines(copying: Line) -> None:
    file = arrive(copying, "1", ROWS.encode("latin-1"))
    declare(copying, ALL)

    copying.run("copy", copy)

    from decimal import Decimal

    assert copying.status("copied", "1", "copy") == "READY", "\n".join(copying.said)
    assert copying.facts("copied")["1"]["schema"] == (
        "id:bigint,zip:string,day:date,price:decimal(6,2),ok:boolean"
    )
    expected = [
        (1, "01234", dt.date(2026, 1, 2), Decimal("1.50"), True),
        (None, "a|ü", None, None, False),
        (3, "NA", dt.date(2026, 1, 3), Decimal("2.00"), None),
    ]
    assert copying.rows("copied", "1") == sorted(expected, key=repr)
    frame = read_pandas(str(file), csv_options("given", ALL))
    found = [
        tuple(None if pd.isna(each) else each for each in row)
        for row in frame.astype(object).itertuples(index=False)
    ]
    assert found == expected
    assert str(frame["id"].dtype) == "Int64"


def test_what_isn_t_as_declared_is_refused(copying: Line) -> None:
    declare(copying, '{"schema": {"id": "bigint", "name": "string"}}')
    arrive(copying, "1", "id,name\nx1,a\n")
    arrive(copying, "2", "id,surname\n1,a\n")
    arrive(copying, "3", "id,name,more\n1,a,b\n")
    arrive(copying, "4", "name,id\na,1\n")

    copying.run("copy", copy)

    assert {each: copying.status("copied", each, "copy") for each in "1234"} == {
        "1": "FAILED",
        "2": "FAILED",
        "3": "FAILED",
        "4": "READY",
    }
    said = "\n".join(copying.said)
    assert "has no column 'name', which is declared" in said
    assert "has a column 'more', which isn't declared" in said
    assert copying.rows("copied", "4") == [("a", 1)]
    options = csv_options("given", '{"schema": {"id": "bigint", "name": "string"}}')
    with pytest.raises(Refused, match=r"a value in column 'id' that isn't bigint .*'x1'"):
        read_pandas(str(copying.folder / "given" / "1.csv"), options)


@pytest.mark.parametrize("strings", ["true", '["zip"]'])
def test_texts_stay_texts(copying: Line, strings: str) -> None:
    file = arrive(copying, "1", "id,zip\n1,01234\n2,NA\n")
    declare(copying, f'{{"strings": {strings}}}')

    copying.run("copy", lambda given: given.select("zip"))

    assert copying.rows("copied", "1") == [("01234",), ("NA",)]
    frame = read_pandas(str(file), csv_options("given", f'{{"strings": {strings}}}'))
    assert frame["zip"].tolist() == ["01234", "NA"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{", "isn't JSON"),
        ("[1]", "isn't an object of JSON"),
        ('{"delimeter": ";"}', "there is no option 'delimeter'. The options are delimiter, quote,"),
        ('{"delimiter": ";;"}', "`delimiter` must be one character, not ';;'"),
        ('{"delimiter": ""}', "`delimiter` must be one character"),
        ('{"quote": 1}', "`quote` must be a text"),
        ('{"header": "no"}', "`header` must be true or false"),
        ('{"header": false}', "`schema` must name the columns"),
        ('{"encoding": "utf-9"}', "the encoding 'utf-9' isn't known"),
        ('{"encoding": "rot13"}', "the encoding 'rot13' isn't known"),
        ('{"schema": {"id": "number"}}', "the type 'number' for 'id'. There are string, "),
        ('{"schema": {"id": "decimal(2,3)"}}', "the type 'decimal(2,3)'"),
        ('{"schema": ["id"]}', "`schema` must be an object"),
        ('{"strings": "zip"}', "`strings` must be true, or a list of columns"),
        ('{"strings": ["a"], "schema": {"a": "int"}}', "are both given"),
    ],
)
def test_invalid_options_are_refused_in_one_line(
    sqlite_url: str, monkeypatch: pytest.MonkeyPatch, options: str, said: str
) -> None:
    monkeypatch.setenv("DATAFLOW_URL", sqlite_url)
    CliRunner().invoke(app, ["init"])
    ran = CliRunner().invoke(app, ["dataset", "add", "given", "--options", options])
    assert ran.exit_code == 2, ran.output
    assert said in ran.output
    assert len(ran.output.strip().splitlines()) == 1
    with pytest.raises(WrongUse):
        csv_options("given", options)
    assert CliRunner().invoke(app, ["dataset", "list", "--json"]).stdout.strip() == "[]"


# --- the chunk before ---


def test_the_next_chunk_is_read_with_the_types_of_the_one_before(copying: Line) -> None:
    arrive(copying, "1", "id,zip,at\n1,K1A,2.5\n")
    arrive(copying, "2", "id,zip,at\n2,01234,3\n")
    arrive(copying, "3", "zip,id,at\n00001,,\n")

    copying.run("copy", lambda given: given.select("id", "zip", "at"))

    assert [copying.rows("copied", each) for each in "123"] == [
        [(1, "K1A", 2.5)],
        [(2, "01234", 3.0)],
        [(None, "00001", None)],
    ]


def test_a_chunk_that_differs_from_the_one_before_is_refused(copying: Line) -> None:
    """Also by a job that takes only unchanged schemas, or that casts them."""
    arrive(copying, "1", "id,zip\n1,12345\n")
    arrive(copying, "2", "id,zip\n2,K1A\n")
    arrive(copying, "3", "id,zip,more\n2,12346,x\n")
    arrive(copying, "4", "id\n2\n")

    copying.run("copy", lambda given: given.selectExpr("id", "'x' as same"))

    assert {each: copying.status("copied", each, "copy") for each in "1234"} == {
        "1": "READY",
        "2": "FAILED",
        "3": "FAILED",
        "4": "FAILED",
    }
    said = "\n".join(copying.said)
    assert "differs from chunk '1' of 'given', which was read before" in said
    assert "column 'zip' was int and is string" in said
    assert """odf dataset add given --options '{"strings": ["zip"]}'""" in said
    assert "column 'more' is new" in said
    assert "column 'zip' is missing" in said

    declare(copying, '{"strings": ["zip"]}')
    sql(
        copying.store,
        "update datastatus set status = 'RESUBMIT' where dataid in ('1', '2') "
        "and datasetid = 'copied'",
    )
    copying.run("copy", lambda given: given.selectExpr("id", "'x' as same"))
    assert copying.status("copied", "2", "copy") == "READY", copying.said


def test_a_job_that_merges_takes_each_chunk_as_it_is(copying: Line) -> None:
    arrive(copying, "1", "id,zip\n1,12345\n")
    arrive(copying, "2", "id,zip\n2,K1A\n")

    for schema in ("any", "merge"):
        sql(copying.store, "delete from datastatus where datasetid = 'copied'")
        copying.run("copy", spark_job(lambda given: given.select("id"), schema=schema))
        assert copying.status("copied", "2", "copy") == "READY", copying.said


# --- values ---


def texts(rng: random.Random) -> str:
    marks = [
        "a",
        "é",
        "日",
        '"',
        "'",
        "\\",
        ",",
        ";",
        "\n",
        "\r",
        "\t",
        " ",
        "#",
        "\x00",
        "\x01",
        "\ufeff",
        "\u2028",
        "\x7f",
        "{",
        "}",
        "NULL",
        "null",
        "NaN",
        "007",
        "-",
        "\U0001f600",
        "\x85",
        "\ufffd",
    ]
    return "".join(rng.choice(marks) for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 9])))


def moment(rng: random.Random) -> dt.datetime:
    around = rng.choice([-62_000_000_000, -5_000_000_000, -2, -1, 0, 1, 1_800_000_000])
    micros = rng.choice([0, 0, 1, 999_999, 500_000, rng.randrange(10**6)])
    return dt.datetime(1970, 1, 1) + dt.timedelta(seconds=around, microseconds=micros)


def value(rng: random.Random) -> tuple[Any, ...]:
    def some(one: Any) -> Any:
        return None if rng.random() < 0.1 else one

    numbers = [0.0, -0.0, 1e308, 5e-324, float("nan"), float("inf"), -float("inf"), 0.1]
    day = dt.date(rng.choice([1, 1582, 1900, 1969, 1970, 2026, 9999]), rng.choice([1, 12]), 31)
    return (
        rng.randrange(10**9),
        some(texts(rng)),
        some(moment(rng)),
        some(moment(rng)),
        some(day),
        some(rng.choice(numbers)),
        some(rng.choice([-(2**63), 2**63 - 1, 0])),
        some([texts(rng), None]),
        some(bytes(rng.randrange(256) for _ in range(3))),
    )


COLUMNS = (
    "id long, t string, at timestamp, ntz timestamp_ntz, day date, f double, l long, "
    "ts array<string>, b binary"
)


@pytest.mark.parametrize("zone", ["UTC", "America/St_Johns"])
@pytest.mark.parametrize("format", ["csv", "json", "orc", "parquet"])
def test_any_value_comes_back_as_it_was_or_is_refused(
    line: Line, spark: SparkSession, format: str, zone: str
) -> None:
    """Four thousand random rows: those that a format can't hold fail alone."""
    line.job("write", "seed", "written")
    line.job("again", "written", "more")
    sql(line.store, "update dataset set format = :f where datasetid = 'written'", f=format)
    rng = random.Random(format)
    spark.conf.set("spark.sql.session.timeZone", zone)
    df = spark.createDataFrame([value(rng) for _ in range(4000)], COLUMNS)
    if format == "csv":
        df = df.drop("ts", "b")
    bad = {
        "csv": "contains(t, chr(0))",
        "orc": "unix_micros(at) between -999999 and -1 or (ntz > timestamp_ntz'1969-12-31 "
        "23:59:59' and ntz < timestamp_ntz'1970-01-01')",
    }.get(format, "false")
    bad = f"coalesce({bad}, false)"
    frames = {"1": df.where(f"not ({bad})"), "2": df.where(bad).limit(1)}
    for dataid in frames:
        put(line.store, "seed", dataid)

    line.run("write", lambda chunk: frames[chunk.dataid])
    line.run("again", lambda written: written)

    assert line.status("more", "1", "again") == "READY", line.said
    assert line.fingerprints("written")["1"] == line.fingerprints("more")["1"]
    refused = line.status("written", "2", "write") == "FAILED"
    assert refused is (format in ("csv", "orc"))
    if refused:
        assert "can't hold" in line.reason()


@pytest.mark.parametrize(
    ("format", "select", "said"),
    [
        ("csv", "1 as id, 'a\\0b' as t", "Column 't' has 1 row with a NUL character"),
        ("orc", "array(timestamp'1969-12-31 23:59:59.5 UTC') as n", "Column 'n' has 1 row"),
        ("orc", "map('k', timestamp_ntz'1969-12-31 23:59:59.000001') as n", "Column 'n' has 1"),
    ],
)
def test_a_refusal_names_the_column(
    line: Line, spark: SparkSession, format: str, select: str, said: str
) -> None:
    line.job("write", "seed", "written")
    sql(line.store, "update dataset set format = :f where datasetid = 'written'", f=format)
    put(line.store, "seed", "1")

    line.run("write", lambda spark: spark.sql(f"select {select}"))

    assert said in line.reason()
    assert line.left() == []


def test_a_batch_refuses_the_same_files(line: Line, spark: SparkSession) -> None:
    """The chunk that has such a value fails alone."""
    line.job("write", "seed", "written")
    line.job("many", "written", "batched")
    sql(line.store, "update dataset set format = 'orc' where datasetid = 'batched'")
    times = {"1": "1969-12-31 23:59:58.5", "2": "1969-12-31 23:59:59.5", "3": "2026-01-01"}
    for dataid in times:
        put(line.store, "seed", dataid)
    line.run(
        "write",
        lambda chunk, spark: spark.sql(f"select timestamp_ntz'{times[chunk.dataid]}' as at"),
    )

    line.run("many", spark_job(lambda written: written, batch=3))

    assert {each: line.status("batched", each, "many") for each in times} == {
        "1": "READY",
        "2": "FAILED",
        "3": "READY",
    }
    assert "Column 'at' has 1 row with a time within the last second before 1970" in line.reason()


def test_reading_with_pandas_refuses_the_same_files(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="Column 't' has a NUL character"):
        folder.write(pd.DataFrame({"t": ["a\0b"]}), str(tmp_path), "csv")


def test_options_are_of_others_files_only(copying: Line) -> None:
    """Files that a job writes describe how they are to be read."""
    add_dataset(copying.store, "copied", format="csv", options='{"delimiter": ";"}')
    copying.job("more", "copied", "again")
    arrive(copying, "1", "id,name\n1,a;b\n")

    copying.run("copy", copy)
    copying.run("more", lambda copied: copied.withColumn("n", F.lit(1)))

    assert copying.rows("again", "1") == [(1, "a;b", 1)], copying.said


def test_without_options_files_are_read_as_pandas_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("id,name\n1,NA\n")
    assert read_pandas(str(file), CsvOptions("")).equals(pd.read_csv(file))
