"""Results of Spark's own frames, however large, aren't held in memory."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import pandas as pd
import pytest
from psycopg.conninfo import conninfo_to_dict
from pyspark.sql import SparkSession

from opendataflow_dagster.pipelines import frames as convert
from opendataflow_dagster.runner.run import Outcome
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.registry import add_dataset
from tests.pipelines.test_pipeline_run import Shop
from tests.support.store_fixtures import close, sql

ONE = "pipelines:\n  - {slug: big, transformations: [make]}\n"

MAKE = """
from pyspark.sql import DataFrame

def run(df: DataFrame) -> DataFrame:
    return df.sparkSession.range(0, 300_000, 1, 4).selectExpr("id", "repeat(uuid(), 3) as text")
"""

VALUES = """
from pyspark.sql import DataFrame

def run(df: DataFrame) -> DataFrame:
    rows = df.sparkSession.range(0, 60, 1, 3)
    return rows.selectExpr(
        "id", "if(id % 7 = 0, null, int(id)) as whole", "id / 3 as f",
        "if(id < 30, null, 'a,\\"' || id || '\\\\n') as text", "id % 2 = 0 as even",
        "if(id < 25, null, id > 40) as late", "date_add(date'2026-01-01', int(id)) as day",
        "cast(date_add(date'2026-01-01', int(id)) as timestamp_ntz) as midnight",
        "timestamp_ntz'2026-01-01 10:00:00' + make_interval(0, 0, 0, 0, 0, 0, id / 2) as half",
        "timestamp_micros(1767225600000000 + 86400000000 * id + if(id = 59, 1, 0)) as at",
        "cast(id as decimal(30, 2)) / 4 as price",
        "if(id = 59, cast(id as decimal(5, 1)), null) as one",
    )
"""


@pytest.fixture
def big(sqlite_url: str, tmp_path: Path, spark: SparkSession) -> Iterator[Shop]:
    """A pipeline of one native transformation, on SQLite."""
    root = tmp_path / "shop"
    root.mkdir()
    store = open_store(sqlite_url)
    store.init()
    shop = Shop(root, store, spark)
    shop.write("project.yml", ONE)
    shop.write("pipelines/big/make.py", VALUES)
    yield shop
    close(store)


def odf(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "opendataflow_dagster.cli", *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("place", ["output", "file", "table", "folder"])
def test_no_row_passes_java_on_its_way_into_its_place(tmp_path: Path, place: str) -> None:
    """With room for two megabytes of results, while 32 are produced."""
    root = tmp_path / "shop"
    (root / "pipelines" / "big").mkdir(parents=True)
    (root / "project.yml").write_text(ONE)
    (root / "pipelines" / "big" / "make.py").write_text(dedent(MAKE))
    (root / "dataflow.properties").write_text(
        "spark.master=local[2]\nspark.driver.memory=700m\nspark.driver.maxResultSize=2m\n"
    )
    told = {
        "output": [],
        "file": ["--hostname", "./big.csv"],
        "table": ["--format", "sqlite", "--hostname", "./big.db", "--table", "big"],
        "folder": ["--hostname", "./big", "--format", "parquet"],
    }[place]
    assert odf("pipeline", "list", cwd=root).returncode == 0
    if told:
        assert odf("init", cwd=root).returncode == 0
        added = odf("dataset", "add", "big", *told, cwd=root)
        assert added.returncode == 0, added.stderr

    done = odf("pipeline", "run", "big", cwd=root)

    assert done.returncode == 0, done.stderr
    if place == "table":
        with closing(sqlite3.connect(root / "big.db")) as there:
            assert there.execute("select count(*), max(id) from big").fetchone() == (
                300_000,
                299_999,
            )
    elif place == "folder":
        assert len(pd.read_parquet(root / "big")) == 300_000
    else:
        file = root / ("output/big.csv" if place == "output" else "big.csv")
        found = pd.read_csv(file)
        assert found["id"].tolist() == list(range(300_000))
        assert found["text"].str.len().eq(108).all()
    if place != "output":
        assert len(pd.read_csv(root / "output" / "big.csv")) == convert.MAX_COLLECTED_ROWS
        assert "output/big.csv has the first 10,000 of 300,000 rows" in done.stderr
    assert not list((root / ".dataflow").glob("work/big/*"))


def test_a_large_result_is_written_as_a_small_one(
    big: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert big.run("big") == Outcome(0, done=1)
    small = big.output("big")
    assert small.count("\n") > 60
    monkeypatch.setattr(convert, "MAX_COLLECTED_ROWS", 7)
    assert big.run("big") == Outcome(0, done=1)
    assert big.output("big") == small
    facts = sql(big.store, "select rows, bytes, fingerprint from chunkfact order by generation")
    assert facts[0] == facts[1]
    assert facts[0][:2] == (60, len(small.encode()))


def test_large_and_small_results_create_the_same_table(
    big: Shop, monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    told = conninfo_to_dict(postgres_url)
    big.write("dataflow.properties", "PASSKEY=00\n")
    frames = []
    for name, large in (("small", 10_000), ("large", 7)):
        monkeypatch.setattr(convert, "MAX_COLLECTED_ROWS", large)
        add_dataset(
            big.store,
            "big",
            hostname=f"{told['host']}:{told.get('port', 5432)}",
            database=told["dbname"],
            tablename=name,
            username=told.get("user"),
            format="postgresql",
        )
        assert big.run("big") == Outcome(0, done=1), big.said
        import psycopg

        with psycopg.connect(postgres_url) as there:
            cursor = there.execute(f"select * from {name} order by id")
            columns = [(each.name, each.type_code) for each in cursor.description]
            frames.append((columns, cursor.fetchall()))
    assert frames[0] == frames[1]
    assert len(frames[0][1]) == 60


def test_a_large_result_replaces_all_rows_or_none(
    big: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "MAX_COLLECTED_ROWS", 7)
    add_dataset(
        big.store,
        "big",
        hostname=str(big.root / "big.db"),
        tablename="big",
        format="sqlite",
        writemode="replace",
    )
    with closing(sqlite3.connect(big.root / "big.db")) as there, there:
        there.execute("create table big (id integer check (id < 50))")
        there.execute("insert into big values (1)")
    big.write(
        "pipelines/big/make.py",
        VALUES.partition("    return")[0] + "    return rows.select('id')\n",
    )

    assert big.run("big").failed == 1

    with closing(sqlite3.connect(big.root / "big.db")) as there, there:
        assert there.execute("select id from big").fetchall() == [(1,)]
        there.execute("drop table big")
    assert big.run("big") == Outcome(0, done=1)
    with closing(sqlite3.connect(big.root / "big.db")) as there:
        assert there.execute("select count(*) from big").fetchone() == (60,)


def test_two_columns_of_one_name_and_no_rows_at_all(
    big: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convert, "MAX_COLLECTED_ROWS", 7)
    big.write(
        "pipelines/big/make.py",
        VALUES.partition("    return")[0] + "    return rows.selectExpr('id', 'id + 1 as id')\n",
    )
    assert big.run("big") == Outcome(0, done=1), big.said
    assert big.output("big").startswith("id,id\n0,1\n1,2\n")
    big.write(
        "pipelines/big/make.py",
        VALUES.partition("    return")[0] + "    return rows.where('id < 0')\n",
    )
    assert big.run("big") == Outcome(0, done=1)
    assert big.output("big") == "id\n"


# --- memory ---


@pytest.mark.timeout(400)
def test_running_out_of_java_memory_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARK_SUBMIT_OPTS")  # the tests' options make do with less
    root = tmp_path / "shop"
    (root / "pipelines" / "big").mkdir(parents=True)
    (root / "project.yml").write_text(ONE)
    (root / "pipelines" / "big" / "make.py").write_text(
        dedent("""
        from pyspark.sql import DataFrame

        def run(df: DataFrame) -> DataFrame:
            rows = df.sparkSession.range(0, 4_000_000, 1, 8)
            rows.selectExpr("repeat(uuid(), 4) as text").toArrow()
            return rows
    """)
    )
    (root / "dataflow.properties").write_text(
        "spark.master=local[2]\nspark.driver.memory=500m\nspark.driver.maxResultSize=0\n"
    )

    done = odf("pipeline", "run", "big", cwd=root)

    assert done.returncode == 1
    [reason] = [each for each in done.stderr.splitlines() if "Reason: " in each]
    assert "memory" in reason
    assert "spark.driver.memory" in reason
    assert "refused" not in reason.lower()


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("halt(52)", "Java ran out of memory"),
        ("halt(1)", "Java ended with exit code 1"),
    ],
)
@pytest.mark.timeout(200)
def test_the_end_of_java_is_explained(tmp_path: Path, end: str, said: str) -> None:
    root = tmp_path / "shop"
    (root / "pipelines" / "big").mkdir(parents=True)
    (root / "project.yml").write_text(ONE)
    (root / "pipelines" / "big" / "make.py").write_text(
        dedent(f"""
        from pyspark.sql import DataFrame

        def run(df: DataFrame) -> DataFrame:
            try:
                df.sparkSession._jvm.java.lang.Runtime.getRuntime().{end}
            except Exception:
                pass
            return df.sparkSession.range(3)
    """)
    )
    (root / "dataflow.properties").write_text("spark.master=local[1]\nspark.driver.memory=500m\n")

    done = odf("pipeline", "run", "big", cwd=root)

    assert done.returncode == 1
    assert said in done.stderr
    assert "spark.driver.memory" in done.stderr
