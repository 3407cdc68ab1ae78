"""Two pipelines in a row: the second gets the first's result as `output/` would give it."""

import os
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from textwrap import dedent
from typing import Any

import pandas as pd
import pytest
from pyspark.sql import SparkSession

from opendataflow_dagster.config.settings import Settings
from opendataflow_dagster.pipelines.project import read_project
from opendataflow_dagster.pipelines.run import run_pipeline
from opendataflow_dagster.runner.run import Outcome
from opendataflow_dagster.spark.chunk_files import read_files
from opendataflow_dagster.storage import folder as folders
from opendataflow_dagster.storage.compact import compact
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, close, sql

PROJECT = """
name: Events
pipelines:
  - slug: clean
    sources: [events]
    destination: cleaned-events
    transformations: [step]
  - slug: merge
    sources: [cleaned-events]
    transformations: [step]
"""
EVENTS = "name,won,amount\nAda,True,1.10\nBob,,\nCy,False,2\n"
HEAD = "import numpy as np\nimport pandas as pd\n\n"
SAME = "def run(df):\n    return df\n"


class Chain:
    """A project of two pipelines, of which the second reads what the first writes."""

    def __init__(self, root: Path, store: Store, spark: SparkSession) -> None:
        self.root, self.store, self.spark = root, store, spark
        self.said: list[str] = []
        (root / "sources").mkdir(parents=True)
        (root / "sources" / "events.csv").write_text(EVENTS)
        (root / "project.yml").write_text(PROJECT)

    def write(self, slug: str, code: str) -> None:
        folder = self.root / "pipelines" / slug
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "step.py").write_text(HEAD + dedent(code))

    def run(self, slug: str) -> Outcome:
        spark = self.spark
        self.said = []
        return run_pipeline(
            self.store,
            read_project(self.root),
            slug,
            Settings(""),
            say=self.said.append,
            environ=os.environ,
            session=lambda: spark,
        )

    def both(self, first: str, second: str) -> str:
        """Return what the second writes for people, once both have run."""
        self.write("clean", first)
        self.write("merge", second)
        for slug in ("clean", "merge"):
            assert self.run(slug) == Outcome(0, done=1), self.said
        return self.output("merge")

    def output(self, slug: str) -> str:
        return (self.root / "output" / f"{slug}.csv").read_text()

    def chunk(self) -> tuple[str, dict[str, Any]]:
        """Return the chunk between them, and its note."""
        [(path,)] = sql(
            self.store, "select distinct location from chunkfact where datasetid = 'cleaned-events'"
        )
        return path, folders.read_note(path)


@pytest.fixture
def chain(sqlite_url: str, tmp_path: Path, spark: SparkSession) -> Iterator[Chain]:
    store = open_store(sqlite_url)
    store.init()
    yield Chain(tmp_path / "events", store, spark)
    check(store)
    close(store)


@pytest.fixture
def anywhere(store: Store, tmp_path: Path, spark: SparkSession) -> Iterator[Chain]:
    """The same on each database."""
    yield Chain(tmp_path / "events", store, spark)
    check(store)


def by_hand(first: str, second: str) -> str:
    """The same by plain pandas, with `output/<slug>.csv` between the two."""

    def run(code: str) -> Callable[[Any], Any]:
        names: dict[str, Any] = {}
        exec(HEAD + dedent(code), names)
        return names["run"]

    made = run(first)(pd.read_csv(StringIO(EVENTS))).to_csv(index=False)
    return run(second)(pd.read_csv(StringIO(made))).to_csv(index=False)


def made(expression: str) -> str:
    return f"def run(df):\n    return pd.DataFrame({expression})\n"


PRELUDE = """
from datetime import date, datetime, time
from decimal import Decimal
from uuid import UUID

"""
VALUES = """
def run(df):
    rows = [
        [str(name), type(value).__name__, str(value)]
        for name in df.columns for value in df[name].tolist()
    ]
    return pd.DataFrame(rows, columns=["column", "kind", "value"])
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SAME, 'def run(df):\n    return df[df["won"] == True]\n'),
        (SAME, VALUES),
        ("def run(df):\n    return df.replace(np.nan, 'Undefined', regex=True)\n", VALUES),
        (SAME, "def run(df):\n    return df.replace(np.nan, 'Undefined', regex=True)\n"),
    ],
)
def test_an_existing_project_gets_the_same_inputs_as_before(
    chain: Chain, first: str, second: str
) -> None:
    assert chain.both(first, second) == by_hand(first, second)


def test_values_reach_the_next_pipeline_as_from_a_csv(
    chain: Chain,
) -> None:
    first = PRELUDE + made(
        """{
            "truth": [True, None, False], "none": [None, None, None],
            "decimal": [Decimal("1.10"), None, Decimal("2")],
            "whole": pd.Series([1, None, 3], dtype=object), "mixed": [1.5, "NA", "x"],
            "list": [[1], None, []], "dict": [{"a": 1}, {}, None], "set": [{1}, None, {2}],
            "tuple": [(1, "a"), (), None], "bytes": [b"x", None, b""],
            "uuid": [UUID(int=1), None, UUID(int=2)], "big": [10**30, 1, None],
            "complex": [1j, 2, 3], "date": [date(2026, 1, 1), None, date(2026, 1, 2)],
            "moment": pd.Series([datetime(2026, 1, 1), None, "x"], dtype=object),
            "moments": pd.Series([date(2026, 1, 1), datetime(2026, 1, 1, 5), None], dtype=object),
            "self": [[1], [2], [3]],
            "time": [time(7), None, time(8)], "text": ["a\\nb", None, 'c,"d"'],
            "period": pd.period_range("2026-01", periods=3, freq="M"),
            "interval": pd.cut([1, 2, 3], 2), "category": pd.Categorical(["b", None, "a"]),
            "sparse": pd.arrays.SparseArray([0, 1, 0]),
            "unsigned": np.array([2**63 + 1] * 3, "uint64"),
            "real": [0.1, np.inf, None], "number": [1, 2, 3], "bool": [True, False, True],
        }"""
    )
    assert chain.both(first, VALUES) == by_hand(first, VALUES)


@pytest.mark.parametrize(
    "frame",
    [
        "[[1, 'x', None]], columns=['a', 'a', 'b']",
        "[[1, 2]], columns=pd.MultiIndex.from_tuples([('a', 'x'), ('a', 'y')])",
        "[[1, 2, 3]], columns=['', None, 7]",
        "[[1, 2]], columns=pd.to_datetime(['2026-01-01', '2026-01-02'])",
        "[[1], [None], [None]], columns=['only']",
        "[['x'], [None], ['y']], columns=['only']",
        "[[True], [None], [False]], columns=['only']",
        "{'a': [[1, 2]]}, index=pd.Index([5], name='key')",
    ],
)
def test_columns_are_called_and_rows_counted_as_the_csv_has_them(chain: Chain, frame: str) -> None:
    assert chain.both(made(frame), VALUES) == by_hand(made(frame), VALUES)


def test_texts_and_dates_stay_better_than_csv_tells(chain: Chain) -> None:
    first = made(
        """{
            "code": ["007", None], "empty": ["", "x"], "code2": pd.array(["007", None], "string"),
            "day": pd.to_datetime(["2026-01-01", None]), "kind": pd.Categorical(["007", "1"]),
        }"""
    )
    second = "def run(df):\n    return pd.DataFrame({n: [str(df[n].tolist())] for n in df})\n"
    assert pd.read_csv(StringIO(chain.both(first, second))).iloc[0].to_dict() == {
        "code": "['007', nan]",
        "empty": "['', 'x']",
        "code2": "['007', <NA>]",
        "day": "[Timestamp('2026-01-01 00:00:00'), NaT]",
        "kind": "['007', '1']",
    }
    assert chain.chunk()[1]["columns"] == {
        "code": "object",
        "empty": "object",
        "code2": "string",
        "day": "datetime64[ns]",
        "kind": "object",
    }


ODD = PRELUDE + made(
    """{
        "won": [True, None, False], "amount": [Decimal("1.10"), None, Decimal("2")],
        "mixed": [1.5, "Undefined", None], "list": [[1], [2], None],
        "day": ["2026-01-01", 5, None], "n": [1, 2, 3],
    }"""
)
SPARK = """
from pyspark.sql import DataFrame, functions as F

def run(df: DataFrame) -> DataFrame:
    kinds = ",".join(kind for _, kind in df.dtypes)
    return df.where("won").select(F.lit(kinds).alias("kinds"), "amount", "mixed", "list", "n")
"""


def test_spark_reads_it_with_the_types_that_pandas_tells(chain: Chain) -> None:
    assert chain.both(ODD, SPARK).splitlines()[1:] == [
        '"boolean,double,string,string,string,bigint",1.1,1.5,[1],1'
    ]


COUNT = """
from pyspark.sql import DataFrame

def run(df: DataFrame) -> DataFrame:
    return df.selectExpr("count(*) as n", "count(only) as there")
"""
COUNT_BY_PANDAS = """
def run(df):
    return pd.DataFrame([{"n": len(df), "there": df["only"].count()}])
"""
BY_SPARK = """
from pyspark.sql import DataFrame

def run(df: DataFrame) -> DataFrame:
    return df.selectExpr("amount as only")
"""


@pytest.mark.parametrize("second", [COUNT, COUNT_BY_PANDAS])
@pytest.mark.parametrize(
    ("first", "counted"),
    [
        (made("{'only': ['a', None, '', 'b']}"), "4,3"),
        (made("{'only': [1.5, None, None]}"), "3,1"),
        (made("{'only': [True, None, False]}"), "3,2"),
        (BY_SPARK, "3,2"),
    ],
)
def test_rows_without_a_value_are_rows(chain: Chain, first: str, second: str, counted: str) -> None:
    assert chain.both(first, second) == f"n,there\n{counted}\n"


def test_compacted_it_is_the_same(chain: Chain) -> None:
    chain.both(ODD, SAME)
    path, note = chain.chunk()
    [part] = folders.data_files(path)
    before = folders.read_frame(path, "csv", note["columns"])
    again = Path(path, "part-1.csv")
    again.write_bytes(Path(part).read_bytes())

    add_dataset(
        chain.store,
        "cleaned-events",
        hostname=str(chain.root / "output/cleaned-events"),
        format="csv",
    )
    [done] = compact(chain.store, "cleaned-events")

    assert (done.files_before, done.files_after, done.left) == (2, 1, "")
    found = folders.read_frame(path, "csv", note["columns"])
    pd.testing.assert_frame_equal(found, pd.concat([before, before], ignore_index=True))
    assert read_files(chain.spark, path, note, "csv").where("won").count() == 2


def test_a_string_that_isnt_unicode_is_reported_in_one_line(chain: Chain) -> None:
    chain.write("clean", made("{'a': ['\\ud800']}"))
    chain.write("merge", SAME)
    assert chain.run("clean") == Outcome(1, failed=1)
    assert any("isn't Unicode" in line for line in chain.said)


def test_a_file_ignored_in_favor_of_a_pipeline_is_reported(anywhere: Chain) -> None:
    anywhere.write("clean", SAME)
    anywhere.write("merge", SAME)
    line = (
        "sources/cleaned-events.csv isn't read: pipeline 'clean' produces it. "
        "Run: odf pipeline run clean"
    )
    anywhere.run("merge")
    assert "nothing claimable" in anywhere.said[0]
    assert not any("isn't read" in each for each in anywhere.said)

    (anywhere.root / "sources" / "cleaned-events.csv").write_text(EVENTS)
    assert anywhere.run("merge") == Outcome(0)
    assert anywhere.said[1].endswith(f": {line}")
    anywhere.run("clean")
    assert anywhere.run("merge") == Outcome(0, done=1)
    assert not any("isn't read" in each for each in anywhere.said)
