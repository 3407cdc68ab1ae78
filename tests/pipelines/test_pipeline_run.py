"""`odf pipeline run`: runs and items are chunks, with a status, a history, and RESUBMIT."""

import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from textwrap import dedent
from typing import Any

import pandas as pd
import psutil
import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.config.settings import Settings
from opendataflow_dagster.errors import Refused, WrongUse
from opendataflow_dagster.explain.explain import explain
from opendataflow_dagster.model import Fact
from opendataflow_dagster.pipelines.items import claim_new_items
from opendataflow_dagster.pipelines.jobs import register as register_pipeline
from opendataflow_dagster.pipelines.project import read_project
from opendataflow_dagster.pipelines.run import run_pipeline, run_project
from opendataflow_dagster.pipelines.transformation import TransformationError
from opendataflow_dagster.runner.run import Outcome
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.history import clean, steps
from opendataflow_dagster.store.items import Post, accept
from opendataflow_dagster.store.operations import hold, resubmit
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.spark_line import labels_of_jobs
from tests.support.store_fixtures import check, close, expire, policy, register, sql, statuses, take

SHOP = """
name: Shop
pipelines:
  - slug: daily
    sources: [orders, products]
    destination: sales
    transformations: [clean, total]
  - slug: report
    sources: [sales]
    transformations: [summary]
  - slug: signups
    sources: [people]
    transformations: [join, mark]
"""
CLEAN = """
import pandas as pd

def run(df, products):
    print("cleaning", len(df))
    df = pd.merge(df, products, on="product", how="left")
    df.loc[df["qty"] < 0, "qty"] = 0
    return df
"""
TOTAL = """
def run(df):
    df["total"] = df["qty"] * df["price"]
    return df
"""
SUMMARY = """
import pandas as pd

def run(df):
    return pd.DataFrame([{"rows": len(df), "total": df["total"].sum()}])
"""
JOIN = """
import pandas as pd

def run(df, stream=None):
    if stream is None:
        return df.assign(name=df["name"].str.strip())
    if stream["name"] == "bad":
        raise ValueError("no such person")
    return pd.concat([df, pd.DataFrame([stream])], ignore_index=True)
"""
MARK = """
def run(df, stream=None):
    print("marking", stream)
    df["rows"] = len(df)
    return df
"""


class Shop:
    """A project in the test's folder, with everything that its pipelines read."""

    def __init__(self, root: Path, store: Store, spark: SparkSession | None) -> None:
        self.root, self.store, self.spark = root, store, spark
        self.said: list[str] = []
        self.place = ""
        self.write("project.yml", SHOP)
        for slug, name, text in (
            ("daily", "clean", CLEAN),
            ("daily", "total", TOTAL),
            ("report", "summary", SUMMARY),
            ("signups", "join", JOIN),
            ("signups", "mark", MARK),
        ):
            self.write(f"pipelines/{slug}/{name}.py", text)
        self.write("sources/orders.csv", "product,qty\nA,2\nB,-1\n")
        self.write("sources/products.csv", "product,price\nA,10\nB,5\n")
        self.write("sources/people.csv", "name\nAda\n")

    def write(self, path: str, text: str) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text).lstrip("\n"))
        return file

    def run(self, slug: str, stream: str | None = None, **more: Any) -> Outcome:
        assert self.spark is not None
        spark, self.said = self.spark, []
        return run_pipeline(
            self.store,
            read_project(self.root),
            slug,
            Settings(""),
            say=self.said.append,
            environ=os.environ,
            session=lambda: spark,
            stream_file=None if stream is None else self.root / stream,
            **more,
        )

    def output(self, slug: str) -> str:
        return (self.root / "output" / f"{slug}.csv").read_text()

    def outs(self, slug: str) -> dict[str, str]:
        """Return dataid → status of a pipeline's chunks, in the order of their start."""
        found = statuses(self.store)
        mine = {key[2]: row[1] for key, row in found.items() if key[1] == slug and row[0] == "OUT"}
        return dict(sorted(mine.items(), key=lambda item: (len(item[0]), item[0])))


@pytest.fixture
def shop(store: Store, tmp_path: Path, spark: SparkSession) -> Iterator[Shop]:
    root = tmp_path / "shop"
    root.mkdir()
    made = Shop(root, store, spark)
    yield made
    check(store)


@pytest.fixture
def own(sqlite_url: str, tmp_path: Path, spark: SparkSession) -> Iterator[Shop]:
    """The same on SQLite alone: for tests that don't depend on the database."""
    root = tmp_path / "shop"
    root.mkdir()
    store = open_store(sqlite_url)
    store.init()
    yield Shop(root, store, spark)
    check(store)
    close(store)


# --- runs ---------------------------------------------------------------------------------------


def test_two_runs_in_a_row_are_two_chunks(shop: Shop) -> None:
    assert shop.run("daily") == Outcome(0, done=1)
    shop.write("sources/orders.csv", "product,qty\nA,3\n")
    assert shop.run("daily") == Outcome(0, done=1)

    first, second = shop.outs("daily")
    assert shop.outs("daily") == {first: "READY", second: "READY"}
    assert first < second
    assert first.startswith("20")
    assert first.endswith("Z")
    assert shop.output("daily") == "product,qty,price,total\nA,3,10,30\n"
    facts = sql(shop.store, "select datasetid, rows from chunkfact order by dataid")
    assert facts == [("sales", 2), ("sales", 1)]
    assert "Launching daily with dataid" in shop.said[0]
    assert any("Step 1 of 2, clean: 1 row in" in line for line in shop.said)
    assert "    cleaning 1" in shop.said


def test_a_run_has_a_step_for_each_transformation(shop: Shop) -> None:
    shop.run("daily")

    found = steps(shop.store, "daily")
    assert [(each["step"], each["transformation"], each["status"]) for each in found] == [
        (1, "clean", "READY"),
        (2, "total", "READY"),
    ]
    assert [each["rows"] for each in found] == [2, 2]
    assert found[0]["stdout"] == "cleaning 2\n"
    assert found[0]["started"] <= found[0]["ended"] <= found[1]["started"]


def test_a_failing_transformation_is_reported_and_run_again(shop: Shop) -> None:
    broken = "def run(df):\n    print('so far')\n    return df['nothing']\n"
    shop.write("pipelines/daily/total.py", broken)
    assert shop.run("daily") == Outcome(1, failed=1)

    [dataid] = shop.outs("daily")
    assert shop.outs("daily") == {dataid: "FAILED"}
    found = steps(shop.store, "daily", dataid)
    assert [each["status"] for each in found] == ["READY", "FAILED"]
    assert found[1]["stdout"] == "so far\n"
    assert "KeyError: 'nothing'" in found[1]["traceback"]
    assert found[1]["reason"].startswith("KeyError: 'nothing' (pipelines/daily/total.py:3)")
    [(why,)] = sql(shop.store, "select why from dataevent where status_after = 'FAILED'")
    assert why == f"total: {found[1]['reason']}"
    assert not (shop.root / "output").exists()

    shop.write("pipelines/daily/total.py", TOTAL)
    resubmit(shop.store, "daily", [dataid])
    assert shop.run("daily") == Outcome(0, done=1)
    assert shop.outs("daily") == {dataid: "READY"}
    again = steps(shop.store, "daily", dataid)
    assert [each["status"] for each in again] == ["READY", "READY", "READY", "FAILED"]
    assert again[0]["generation"] > found[0]["generation"]

    shop.run("daily")
    assert len(shop.outs("daily")) == 2


def test_a_downstream_pipeline_waits_and_then_runs_with_the_same_dataid(shop: Shop) -> None:
    assert shop.run("report", all_chunks=True) == Outcome(0)
    assert "nothing claimable" in shop.said[0]

    shop.run("daily")
    shop.write("sources/orders.csv", "product,qty\nA,1\n")
    shop.run("daily")
    first, second = shop.outs("daily")
    assert shop.run("report") == Outcome(0, done=1)
    assert shop.outs("report") == {first: "READY"}
    assert shop.output("report") == "rows,total\n2,20\n"
    assert shop.run("report", all_chunks=True) == Outcome(0, done=1)
    assert shop.outs("report") == {first: "READY", second: "READY"}
    assert shop.output("report") == "rows,total\n1,10\n"
    assert shop.run("report") == Outcome(0)

    resubmit(shop.store, "daily", [first])
    assert shop.run("report") == Outcome(0)
    [(inputs,)] = sql(
        shop.store,
        "select inputs from chunkfact where datasetid = 'report' and dataid = :d",
        d=second,
    )
    [(made,)] = sql(
        shop.store,
        "select generation from chunkfact where datasetid = 'sales' and dataid = :d",
        d=second,
    )
    assert json.loads(inputs) == {"sales": made}


# --- sources that have no run in common ---


JOINED = """
pipelines:
  - {slug: report, sources: [sales, clean_people, signed_up], transformations: [step]}
  - {slug: copies, sources: [sales], transformations: [step]}
  - {slug: daily, sources: [orders, products], destination: sales, transformations: [clean, total]}
  - {slug: people, sources: [people], destination: clean_people, transformations: [step]}
  - {slug: signups, sources: [nobody], destination: signed_up, transformations: [join]}
"""
COUNTS = """
import pandas as pd

def run(*frames):
    return pd.DataFrame([[len(frame) for frame in frames]])
"""
PASS = "def run(df):\n    return df\n"


@pytest.fixture
def joined(own: Shop) -> Shop:
    """A foreign project: a pipeline that joins two others and one that takes items."""
    shop = own
    shop.write("project.yml", JOINED)
    shop.write("sources/nobody.csv", "name\n")
    shop.write("pipelines/report/step.py", COUNTS)
    shop.write("pipelines/copies/step.py", PASS)
    shop.write("pipelines/people/step.py", PASS)
    shop.write("one.csv", "name\nBob\n")
    return shop


def post(shop: Shop, *names: str) -> None:
    """Let items of a pipeline be produced, each appended."""
    register_pipeline(shop.store, read_project(shop.root), "signups")
    for name in names:
        [accepted] = accept(shop.store, [Post("signups", (json.dumps({"name": name}),))])
        assert not isinstance(accepted, Refused)
    assert shop.run("signups", all_chunks=True).failed == 0


def test_a_pipeline_that_joins_others_reads_their_last_results(joined: Shop) -> None:
    for slug, source in (("sales", "daily"), ("clean_people", "people"), ("signed_up", "signups")):
        with pytest.raises(Refused, match=rf"Source '{slug}' .* Run: odf pipeline run {source}"):
            joined.run("report")
        if source == "signups":
            post(joined, "Bob", "Cy", "Di")
        else:
            joined.run(source)
    joined.write("sources/orders.csv", "product,qty\nA,3\n")
    joined.run("daily")

    assert joined.run("report") == Outcome(0, done=1)
    assert joined.output("report") == "0,1,2\n1,1,3\n"
    post(joined, "Eve")
    assert joined.run("report") == Outcome(0, done=1)
    assert joined.output("report") == "0,1,2\n1,1,4\n"
    assert list(joined.outs("report").values()) == ["READY", "READY"]
    # One that reads a single source waits for its runs, as before.
    assert joined.run("copies", all_chunks=True) == Outcome(0, done=2)


def run_all(shop: Shop) -> dict[str, Outcome]:
    session = shop.spark
    shop.said = []
    return dict(
        run_project(
            shop.store,
            read_project(shop.root),
            Settings(""),
            say=shop.said.append,
            environ=os.environ,
            session=lambda: session,
        )
    )


def test_all_pipelines_run_in_the_order_of_their_sources(joined: Shop) -> None:
    post(joined, "Bob")
    done = Outcome(0, done=1)
    assert list(run_all(joined).items()) == [
        ("daily", done),
        ("people", done),
        ("signups", Outcome(0)),
        ("report", done),
        ("copies", done),
    ]
    assert joined.output("report") == "0,1,2\n2,1,1\n"

    joined.write("pipelines/people/step.py", "def run(df):\n    return 1 / 0\n")
    found = run_all(joined)
    assert [slug for slug, each in found.items() if each.code] == ["people", "report"]
    assert found["copies"] == done
    assert "report: not run, because pipeline 'people' failed." in joined.said
    assert len(joined.outs("report")) == 1


def test_the_option_all_runs_all_pipelines(joined: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(joined.root)
    ran = CliRunner().invoke(app, ["pipeline", "run"])
    assert ran.exit_code == 2
    assert "Name a pipeline, or --all for all of them. Its pipelines: report, copies" in ran.output


def test_the_exit_code_of_several_runs_is_the_worst_one() -> None:
    assert Outcome(0, 1).and_then(Outcome(1, failed=1)) == Outcome(1, 1, 1)
    assert Outcome(3).and_then(Outcome(1)) == Outcome(1)
    assert Outcome(1).and_then(Outcome(130)) == Outcome(130)
    assert Outcome(0).and_then(Outcome(0)).idle


# --- one state: a file, or a table that is replaced ---


ONE_PIPELINE = """
pipelines:
  - {slug: daily, sources: [orders, products], destination: sales, transformations: [clean, total]}
"""
ONE_STATE = {
    "the file for people": None,
    "a file": {"hostname": "./sales.csv"},
    "a file that is replaced": {"hostname": "./sales.csv", "writemode": "replace"},
    "a table that is replaced": {
        "format": "sqlite",
        "hostname": "./shop.db",
        "tablename": "sales",
        "writemode": "replace",
    },
}


@pytest.fixture(params=ONE_STATE)
def one(shop: Shop, request: pytest.FixtureRequest) -> Shop:
    """A pipeline whose destination has the rows of one run, and which has run twice."""
    shop.write("project.yml", ONE_PIPELINE)
    if columns := ONE_STATE[request.param]:
        add_dataset(shop.store, "sales", **columns)
    shop.place = request.param
    shop.run("daily")
    shop.write("sources/orders.csv", "product,qty\nA,3\n")
    shop.run("daily")
    assert held(shop) == [3]
    return shop


def held(shop: Shop) -> list[int]:
    """Return the quantities in the destination."""
    if "table" in shop.place:
        with closing(sqlite3.connect(shop.root / "shop.db")) as connection:
            return [row[0] for row in connection.execute("select qty from sales order by qty")]
    file = "output/daily.csv" if shop.place == "the file for people" else "sales.csv"
    return sorted(pd.read_csv(shop.root / file)["qty"])


def test_an_older_run_is_not_resubmitted_over_a_newer_one(one: Shop) -> None:
    first, second = one.outs("daily")

    for more in ({}, {"plan": True}, {"downstream": True}):
        with pytest.raises(Refused) as refused:
            resubmit(one.store, "daily", [first], **more)
        assert refused.value.code == "NEWER_THERE"
        assert f"holds the newer chunk '{second}'" in str(refused.value)
        assert f"odf hold daily {second}" in str(refused.value)
    with pytest.raises(Refused):
        resubmit(one.store, "daily", [first, second])
    assert set(one.outs("daily").values()) == {"READY"}

    resubmit(one.store, "daily", [second])
    one.write("sources/orders.csv", "product,qty\nA,4\n")
    assert one.run("daily") == Outcome(0, done=1)
    assert held(one) == [4]
    with pytest.raises(Refused, match=second):
        resubmit(one.store, "daily", [first])


def test_an_older_run_resubmitted_by_sql_is_held_before_publishing(one: Shop) -> None:
    first, second = one.outs("daily")
    one.write("sources/orders.csv", "product,qty\nB,9\n")
    sql(one.store, "update datastatus set status = 'RESUBMIT' where dataid = :d", d=first)

    assert one.run("daily", all_chunks=True).failed == 1

    assert one.outs("daily") == {first: "HOLD", second: "READY"}
    assert held(one) == [3]
    [(why,)] = sql(one.store, "select why from dataevent where status_after = 'HOLD'")
    assert f"holds the newer chunk '{second}'" in why
    assert "nothing was published" in why
    assert (one.root / "output" / "daily.csv").read_text().endswith("\nA,3,10,30\n")
    ran = [each for each in steps(one.store, "daily", first) if each["transformation"]]
    assert len(ran) == 2  # those of its first run: it isn't even begun


def test_a_failed_run_is_not_produced_after_a_newer_one(own: Shop) -> None:
    own.write("project.yml", ONE_PIPELINE)
    own.write("pipelines/daily/total.py", "def run(df):\n    return df['nothing']\n")
    own.run("daily")
    own.write("pipelines/daily/total.py", TOTAL)
    own.run("daily")
    first, second = own.outs("daily")

    with pytest.raises(Refused, match=f"holds the newer chunk '{second}'"):
        resubmit(own.store, "daily", [first])
    moved = resubmit(own.store, "daily", failed=True)
    assert [row.dataid for row in moved.left] == [first]
    assert moved.moves == []
    assert own.outs("daily") == {first: "FAILED", second: "READY"}

    # What isn't the state that is wanted is held, and then an older one may take its place.
    hold(own.store, "daily", [second])
    resubmit(own.store, "daily", failed=True)
    assert own.run("daily") == Outcome(0, done=1)
    assert own.outs("daily") == {first: "READY", second: "HOLD"}
    resubmit(own.store, "daily", [second])
    assert own.run("daily") == Outcome(0, done=1)
    with pytest.raises(Refused, match=second):
        resubmit(own.store, "daily", [first])


def test_a_run_that_is_overtaken_while_it_works_publishes_nothing(own: Shop) -> None:
    """It began first, but is slower than the run that began after it."""
    own.write("project.yml", ONE_PIPELINE)
    own.write(
        "pipelines/daily/total.py",
        f"""
        import pathlib, time

        def run(df):
            if df["qty"].max() == 1:
                pathlib.Path({str(own.root / "begun")!r}).touch()
                while not pathlib.Path({str(own.root / "go")!r}).exists():
                    time.sleep(0.05)
            df["total"] = 0
            return df
        """,
    )
    own.write("sources/orders.csv", "product,qty\nA,1\n")
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(own.run, "daily")
        try:
            while not (own.root / "begun").exists():
                assert not slow.done()
                time.sleep(0.05)
            own.write("sources/orders.csv", "product,qty\nA,2\n")
            assert own.run("daily") == Outcome(0, done=1)
        finally:
            (own.root / "go").touch()
        assert slow.result(60).failed == 1
    assert list(own.outs("daily").values()) == ["HOLD", "READY"]
    assert own.output("daily") == "product,qty,price,total\nA,2,10,0\n"


def test_upgraded_tables_keep_the_newer_run_too(one: Shop) -> None:
    """Their facts don't yet say that a run has replaced everything."""
    first, second = one.outs("daily")
    sql(one.store, "update chunkfact set replaces = null")
    sql(one.store, "update datastatus set status = 'RESUBMIT' where dataid = :d", d=first)

    assert one.run("daily", all_chunks=True).failed == 1
    assert one.outs("daily") == {first: "HOLD", second: "READY"}
    assert held(one) == [3]


def test_where_rows_are_appended_any_run_may_be_produced_again(own: Shop) -> None:
    own.write("project.yml", ONE_PIPELINE)
    add_dataset(own.store, "sales", hostname="./sales.csv", writemode="append")
    own.run("daily")
    own.write("sources/orders.csv", "product,qty\nA,3\n")
    own.run("daily")
    first, second = own.outs("daily")

    own.write("sources/orders.csv", "product,qty\nA,5\n")
    resubmit(own.store, "daily", [first])
    assert own.run("daily") == Outcome(0, done=1)
    assert own.outs("daily") == {first: "READY", second: "READY"}
    assert sorted(pd.read_csv(own.root / "sales.csv")["qty"]) == [3, 5]


def test_with_all_a_pipeline_without_upstream_inputs_runs_once(shop: Shop) -> None:
    assert shop.run("daily", all_chunks=True) == Outcome(0, done=1)
    assert len(shop.outs("daily")) == 1


def test_a_paused_pipeline_keeps_its_run_for_later(shop: Shop) -> None:
    shop.run("daily")
    policy(shop.store, "daily", paused_until="2100-01-01 00:00:00")
    for _ in range(3):
        assert shop.run("daily").idle
    assert "paused until" in "".join(shop.said)
    assert sorted(shop.outs("daily").values()) == ["PENDING", "READY"]

    policy(shop.store, "daily", paused_until=None)
    assert shop.run("daily") == Outcome(0, done=1)
    assert list(shop.outs("daily").values()) == ["READY", "READY"]


def test_two_at_once_are_two_chunks(shop: Shop) -> None:
    start, ended = threading.Barrier(2), []
    spark, project = shop.spark, read_project(shop.root)
    assert spark is not None
    shop.run("daily")  # registered

    def run() -> None:
        start.wait()
        ended.append(
            run_pipeline(
                shop.store,
                project,
                "daily",
                Settings(""),
                say=lambda line: None,
                environ=os.environ,
                session=lambda: spark,
            )
        )
        shop.store.db.drop()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert ended == [Outcome(0, done=1)] * 2
    assert list(shop.outs("daily").values()) == ["READY"] * 3
    assert shop.output("daily").startswith("product,qty,price,total\n")


def test_a_lost_runs_chunk_is_produced_again(shop: Shop) -> None:
    shop.run("daily")
    shop.store._plans.clear()
    sql(
        shop.store,
        "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
        "values ('sales', 'daily', 'lost', 'OUT', 'PENDING')",
    )
    [claim] = shop.store.claim("daily", owner="gone", only="lost")
    expire(shop.store, claim)

    assert shop.run("daily") == Outcome(0, done=1)
    assert shop.outs("daily")["lost"] == "READY"
    assert len(shop.outs("daily")) == 2


def test_a_run_that_takes_too_long_is_ended(own: Shop) -> None:
    own.run("daily")
    policy(own.store, "daily", time_limit=1)
    slow = "import time\n\ndef run(df):\n    time.sleep(60)\n"
    own.write("pipelines/daily/total.py", slow)
    start = time.monotonic()
    assert own.run("daily") == Outcome(1, failed=1)
    assert time.monotonic() - start < 20
    [step] = [each for each in steps(own.store, "daily") if each["status"] == "FAILED"]
    assert step["reason"] == "stopped by its time limit of 1 s"


def test_an_empty_source_gives_an_empty_result(own: Shop) -> None:
    own.write("sources/orders.csv", "product,qty\n")
    assert own.run("daily") == Outcome(0, done=1)
    assert own.output("daily") == "product,qty,price,total\n"


def test_a_pipeline_without_sources_begins_with_nothing(own: Shop) -> None:
    own.write("project.yml", "pipelines:\n- slug: made\n  transformations: [make]\n")
    own.write(
        "pipelines/made/make.py",
        "import pandas as pd\n\ndef run(df):\n"
        "    assert df.empty\n    return pd.DataFrame({'a': [1]})\n",
    )
    assert own.run("made") == Outcome(0, done=1)
    assert own.output("made") == "a\n1\n"


def test_a_missing_source_is_refused_before_anything_is_claimed(own: Shop) -> None:
    (own.root / "sources" / "products.csv").unlink()
    with pytest.raises(Refused, match=r"products\.csv, which doesn't exist") as refused:
        own.run("daily")
    assert refused.value.code == "INVALID_LOCATION"
    assert own.outs("daily") == {}


def test_a_missing_transformation_is_refused_before_anything_is_claimed(own: Shop) -> None:
    (own.root / "pipelines" / "daily" / "total.py").unlink()
    with pytest.raises(TransformationError, match=r"pipelines/daily/total.py doesn't exist"):
        own.run("daily")
    assert own.outs("daily") == {}


def test_a_missing_input_fails_the_chunk_with_its_code(own: Shop) -> None:
    own.run("report")
    own.run("daily")
    [dataid] = own.outs("daily")
    shutil.rmtree(own.root / "output" / "sales")
    assert own.run("report") == Outcome(1, failed=1)
    assert own.outs("report") == {dataid: "FAILED"}
    [step] = steps(own.store, "report")
    assert (step["status"], step["reason"][:17]) == ("FAILED", "INVALID_LOCATION:")


@pytest.mark.parametrize("slug", ["naïve 数 100%", "x" * 200, "it's; $(touch owned)", "-rf"])
def test_pipelines_with_odd_slugs_run(own: Shop, slug: str) -> None:
    own.write(
        "project.yml",
        f'pipelines:\n- slug: "{slug}"\n  sources: [people]\n  transformations: [go]\n',
    )
    own.write(f"pipelines/{slug}/go.py", "def run(df):\n    return df.assign(n=1)\n")
    assert own.run(slug) == Outcome(0, done=1)
    assert own.output(slug) == "name,n\nAda,1\n"
    assert not (own.root / "owned").exists()


def test_a_slug_that_cant_be_a_file_name_is_refused_in_one_line(own: Shop) -> None:
    slug = "x" * 300
    own.write("project.yml", f"pipelines:\n- slug: {slug}\n  transformations: [go]\n")
    with pytest.raises(TransformationError, match=r"doesn't exist, but project\.yml names it"):
        own.run(slug)


def test_spark_transformations_go_to_the_same_places(own: Shop) -> None:
    own.write(
        "pipelines/daily/total.py",
        """
        from pyspark.sql import DataFrame, functions as F

        def run(df: DataFrame):
            return df.withColumn("total", F.col("qty") * F.col("price"))
    """,
    )
    add_dataset(own.store, "sales", hostname=str(own.root / "sales.csv"), format="csv")
    assert own.spark is not None
    with labels_of_jobs(own.spark) as labels:
        assert own.run("daily") == Outcome(0, done=1)

    [dataid] = own.outs("daily")
    assert set(labels) == {(f"daily {dataid}", f"odf daily: chunk {dataid}")}
    expected = "product,qty,price,total\nA,2,10,20\nB,0,5,0\n"
    assert own.output("daily") == (own.root / "sales.csv").read_text() == expected


def test_a_registered_table_gets_the_rows_of_each_run(own: Shop) -> None:
    place = own.root / "sales.db"
    add_dataset(own.store, "sales", hostname=str(place), tablename="sales", format="sqlite")
    own.run("daily")
    own.run("daily")

    with closing(sqlite3.connect(place)) as there:
        assert there.execute("select count(*), sum(total) from sales").fetchall() == [(4, 40)]
    assert own.output("daily").count("\n") == 3


def rows_of(place: Path) -> int:
    with closing(sqlite3.connect(place)) as there:
        return there.execute("select count(*) from sales").fetchone()[0]


def test_without_the_file_for_people_nothing_is_published_twice(own: Shop) -> None:
    place, output = own.root / "sales.db", own.root / "output"
    add_dataset(own.store, "sales", hostname=str(place), tablename="sales", format="sqlite")
    assert own.run("daily") == Outcome(0, done=1)
    shutil.rmtree(output)
    output.write_text("a file in the place of the folder")
    assert own.run("daily") == Outcome(1, failed=1)
    assert rows_of(place) == 2
    [reason] = [each["reason"] for each in steps(own.store, "daily") if each["reason"]]
    told = f"{output}/daily.csv can't be written: "
    assert told in reason


def test_a_published_chunk_is_ready_even_if_the_file_for_people_fails(
    own: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, rename = own.root / "sales.db", os.replace
    add_dataset(own.store, "sales", hostname=str(place), tablename="sales", format="sqlite")

    def refused(source: Any, target: Any) -> None:
        if str(target).endswith("output/daily.csv"):
            raise OSError(28, "No space left on device", str(target))
        rename(source, target)

    monkeypatch.setattr(os, "replace", refused)
    assert own.run("daily") == Outcome(0, done=1)
    assert rows_of(place) == 2
    warning = f"Warning: {own.root}/output/daily.csv still has the previous run's rows: OSError: "
    assert [each for each in own.said if each.startswith(warning)]
    assert list((own.root / "output").glob("*daily.csv-*")) == []


# --- items --------------------------------------------------------------------------------------


def test_each_row_of_a_stream_is_a_chunk_and_the_last_frame_holds_all(shop: Shop) -> None:
    name = """it's "quoted"; {stream} ' + __import__('os').getcwd() + '"""
    rows = "name\nGrace\nbad\n" + '"' + name.replace('"', '""') + '"\n'
    shop.write("items.csv", rows)
    assert shop.run("signups", stream="items.csv") == Outcome(1, done=2, failed=1)

    assert list(shop.outs("signups").values()) == ["READY", "FAILED", "READY"]
    import pandas as pd

    made = pd.read_csv(shop.root / "output" / "signups.csv")
    assert list(made["name"]) == ["Ada", "Grace", name]
    assert list(made["rows"]) == [3, 3, 3]
    _, bad, _ = shop.outs("signups")
    [(why,)] = sql(shop.store, "select why from dataevent where status_after = 'FAILED'")
    assert why.startswith("join: ValueError: no such person")
    found = {
        (each["dataid"], each["step"]): each["status"] for each in steps(shop.store, "signups")
    }
    assert len(found) == 5
    assert found[bad, 1] == "FAILED"
    facts = sql(shop.store, "select rows from chunkfact order by generation")
    assert facts == [(2,), (3,)]
    assert any(f"Item {bad} failed: join: ValueError" in line for line in shop.said)


def test_a_failed_item_is_run_again_as_an_item(shop: Shop) -> None:
    shop.write("items.csv", "name\nbad\n")
    assert shop.run("signups", stream="items.csv") == Outcome(1, failed=1)
    assert not (shop.root / "output").exists()
    shop.write("pipelines/signups/join.py", JOIN.replace('== "bad"', '== "worse"'))
    [dataid] = shop.outs("signups")
    resubmit(shop.store, "signups", [dataid])

    assert shop.run("signups") == Outcome(0, done=1)
    assert shop.outs("signups") == {dataid: "READY"}
    assert shop.output("signups") == "name,rows\nAda,2\nbad,2\n"


def test_an_item_that_waits_for_the_server_is_left_to_it_unless_all_is_asked_for(
    shop: Shop,
) -> None:
    shop.run("signups")
    assert shop.output("signups") == "name,rows\nAda,1\n"
    [accepted] = accept(shop.store, [Post("signups", ('{"name": "Grace"}',))])
    assert not isinstance(accepted, Refused)
    shop.run("signups")
    assert shop.outs("signups")[accepted.dataids[0]] == "PENDING"

    assert shop.run("signups", all_chunks=True) == Outcome(0, done=1)
    assert shop.outs("signups")[accepted.dataids[0]] == "READY"
    assert shop.output("signups").endswith("Grace,2\n")


def test_items_of_a_killed_stream_are_produced_one_by_one(shop: Shop) -> None:
    shop.run("signups")
    claims = claim_new_items(
        shop.store, "signups", ['{"name": "Grace"}', '{"name": "Hedy"}'], "gone"
    )
    assert shop.run("signups", all_chunks=True) == Outcome(0, done=1)  # nobody else has them
    assert [shop.outs("signups")[claim.dataid] for claim in claims] == ["RUNNING"] * 2
    expire(shop.store)

    assert shop.run("signups", all_chunks=True) == Outcome(0, done=2)
    assert set(shop.outs("signups").values()) == {"READY"}
    assert shop.output("signups").splitlines()[-3:] == ["Grace,2", "Ada,2", "Hedy,2"]


def test_a_run_that_would_lose_items_is_refused_and_nothing_is_lost(
    own: Shop, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own.run("signups")
    [accepted] = accept(own.store, [Post("signups", ('{"name": "Grace"}',))])
    assert not isinstance(accepted, Refused)
    own.run("signups", all_chunks=True)
    own.write("items.csv", "name\nHedy\n")
    before, chunks = own.output("signups"), own.outs("signups")
    assert before.endswith("Grace,2\n")

    for more in ({}, {"all_chunks": True}, {"stream": "items.csv"}):
        with pytest.raises(Refused, match="has rows that 1 item has appended, and this run would"):
            own.run("signups", **more)  # type: ignore[arg-type]
        assert own.outs("signups") == chunks
        assert own.output("signups") == before

    [_, first] = chunks
    resubmit(own.store, "signups", [first])
    assert own.run("signups") == Outcome(1, failed=1)  # before its transformations run
    assert [each["step"] for each in steps(own.store, "signups", first)] == [1, 1, 2]
    [(why,)] = sql(own.store, "select why from dataevent where status_after = 'FAILED'")
    assert "has rows that 1 item has appended" in why
    assert own.output("signups") == before

    monkeypatch.setenv("DATAFLOW_URL", sqlite_url)
    words = shlex.split(why.partition("run: odf ")[2].partition(". ")[0])
    assert words[-2:] == ["--writemode", "append"]
    assert CliRunner().invoke(app, words).exit_code == 0
    resubmit(own.store, "signups", [first])
    assert own.run("signups") == Outcome(0, done=1)
    assert own.run("signups", stream="items.csv") == Outcome(0, done=1)
    kept = own.output("signups")
    assert kept.startswith(before)
    assert kept[len(before) :] == "Ada,1\nAda,2\nHedy,2\n"


def test_items_are_processed_where_a_run_is_refused(own: Shop) -> None:
    own.run("signups")
    posts = [Post("signups", ('{"name": "Grace"}', '{"name": "bad"}'))]
    [accepted] = accept(own.store, posts)
    assert not isinstance(accepted, Refused)
    assert own.run("signups", all_chunks=True) == Outcome(1, done=1, failed=1)
    own.write("pipelines/signups/join.py", JOIN.replace('== "bad"', '== "worse"'))
    resubmit(own.store, "signups", [accepted.dataids[1]])
    assert own.run("signups") == Outcome(0, done=1)
    assert own.output("signups").splitlines()[-3:] == ["Grace,2", "Ada,2", "bad,2"]


def test_why_says_where_an_unregistered_destination_is(own: Shop) -> None:
    own.run("daily")
    [dataid] = own.outs("daily")
    told = explain(own.store, "daily", dataid)
    [answer] = [each for each in told.answers if each.question == "location"]
    made = sql(own.store, "select location from chunkfact")[0][0]
    assert (answer.ok, answer.text) == (True, f"sales: not registered, made at {made}")
    assert answer.rows[0]["produced"] == made

    shutil.rmtree(own.root / "output")
    told = explain(own.store, "daily", dataid)
    [answer] = [each for each in told.answers if each.question == "location"]
    assert (answer.ok, answer.text) == (
        False,
        f"sales: not registered, made at {made}, which doesn't exist here",
    )


def test_a_missing_value_of_a_row_is_none(own: Shop) -> None:
    own.write(
        "pipelines/signups/join.py",
        """
        import pandas as pd

        def run(df, stream=None):
            types = " ".join(type(each).__name__ for each in stream.values())
            return pd.DataFrame([{"types": types}])
    """,
    )
    own.write("items.csv", "name,age,height,yes\n,3,1.5,True\n")
    own.run("signups", stream="items.csv")
    assert own.output("signups").startswith("types,rows\nNoneType int float bool,")


@pytest.mark.parametrize(
    ("slug", "text", "said"),
    [
        ("daily", "a\n1\n", "Pipeline 'daily' accepts no items"),
        ("signups", None, "There is no file"),
        ("signups", "", "can't be read as CSV"),
        ("signups", "a\n1\n1,2,3\n", "can't be read as CSV"),
        ("signups", "a\ninf\n", "'a' of row 1 is infinite"),
    ],
)
def test_an_invalid_stream_is_refused(own: Shop, slug: str, text: str | None, said: str) -> None:
    if text is not None:
        own.write("items.csv", text)
    with pytest.raises(WrongUse, match=said):
        own.run(slug, stream="items.csv")
    assert own.outs(slug) == {}


def test_a_stream_without_rows_is_nothing_to_do(own: Shop) -> None:
    own.write("items.csv", "name\n")
    assert own.run("signups", stream="items.csv").idle


def test_a_paused_pipeline_takes_no_stream(own: Shop) -> None:
    own.run("signups")
    own.write("items.csv", "name\nGrace\n")
    policy(own.store, "signups", paused_until="2100-01-01 00:00:00")
    with pytest.raises(Refused, match="can't run now: paused until"):
        own.run("signups", stream="items.csv")
    assert len(own.outs("signups")) == 1


def test_items_whose_result_can_not_be_published_fail_with_the_reason(own: Shop) -> None:
    own.write("items.csv", "name\nGrace\nbad\n")
    (own.root / "output").write_text("a file in the place of the folder")
    assert own.run("signups", stream="items.csv") == Outcome(1, failed=2)
    assert list(own.outs("signups").values()) == ["FAILED", "FAILED"]
    [(one,), (two,)] = sql(
        own.store, "select why from dataevent where status_after = 'FAILED' order by dataid"
    )
    assert "output" in one
    assert two.startswith("join: ValueError")
    last = [each for each in steps(own.store, "signups") if each["status"] == "FAILED"]
    assert [(each["transformation"], each["reason"]) for each in last] == [
        ("join", two.removeprefix("join: ")),
        (None, one),
    ]


def test_a_run_whose_result_can_not_be_published_tells_why_in_history(own: Shop) -> None:
    (own.root / "output").write_text("a file in the place of the folder")
    assert own.run("daily") == Outcome(1, failed=1)
    found = [(each["transformation"], each["status"]) for each in steps(own.store, "daily")]
    assert found == [("clean", "READY"), ("total", "READY"), (None, "FAILED")]
    assert "output" in steps(own.store, "daily")[-1]["reason"]


def test_a_lost_process_is_noticed_before_other_work_begins(own: Shop) -> None:
    own.write("items.csv", "name\nHedy\n")
    for slug in ("daily", "report", "daily", "signups"):
        own.run(slug)
    [lost] = take(own.store, "report", "gone")
    [item] = claim_new_items(own.store, "signups", ['{"name": "Grace"}'], "gone")
    own.run("daily")
    expire(own.store)

    own.run("report")
    assert list(own.outs("report").values()) == ["READY", "READY"]
    assert own.outs("report")[lost.dataid] == "READY"
    assert own.run("signups", stream="items.csv") == Outcome(0, done=1)
    assert own.outs("signups")[item.dataid] == "RESUBMIT"


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def typed(tmp_path: Path) -> Iterator[Shop]:
    """A project whose tables are the embedded default, for commands in processes of their own."""
    root = tmp_path / "shop"
    root.mkdir()
    store = open_store(f"sqlite:///{root}/.dataflow/dataflow.db")
    yield Shop(root, store, None)
    close(store)


def odf(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "opendataflow_dagster.cli", *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False)


def started(*words: str, cwd: Path) -> subprocess.Popen[str]:
    line = [sys.executable, "-m", "opendataflow_dagster.cli", *words]
    return subprocess.Popen(line, cwd=cwd, stderr=subprocess.PIPE, text=True)


def wait_for(file: Path, child: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 90
    while not file.exists():
        assert time.monotonic() < until
        assert child.poll() is None, child.stderr and child.stderr.read()
        time.sleep(0.1)


SLOW = "import time\n\ndef run(df{more}):\n    open({file!r}, 'w').close()\n    time.sleep(90)\n"


def test_a_new_project_validates_and_runs(tmp_path: Path) -> None:
    assert odf("new", "shop", cwd=tmp_path).returncode == 0
    shop = tmp_path / "shop"
    for words in (["status"], ["history"], ["history", "--pipeline", "clean_contacts"]):
        early = odf(*words, cwd=shop / "sources")
        assert (early.returncode, early.stdout) == (1, "")
        assert "Nothing has run yet" in early.stderr
        assert "`odf pipeline run`" in early.stderr
        assert not list(tmp_path.rglob(".dataflow"))
    assert odf("validate", cwd=shop).returncode == 0
    done = odf("pipeline", "run", "clean_contacts", cwd=shop)

    assert done.returncode == 0, done.stderr
    assert "WARN" not in done.stderr
    assert done.stdout == ""
    made = (shop / "output" / "clean_contacts.csv").read_text().splitlines()
    assert made[0] == "name,email,country,country_name"
    assert len(made) == 4
    assert {each.name for each in shop.iterdir() if each.name[0] == "."} == {
        ".dataflow",
        ".github",
        ".gitignore",
    }
    assert not list(shop.rglob("__pycache__"))
    for folder in (shop, shop / "sources"):
        history = odf("history", "--pipeline", "clean_contacts", "--json", cwd=folder)
        assert [each["status"] for each in json.loads(history.stdout)] == ["READY"] * 3
    wrong = odf("history", "--pipeline", "nosuch", cwd=shop)
    assert wrong.returncode == 4
    assert wrong.stderr.endswith("It has: clean_contacts\n")


def test_failures_are_reported_on_the_terminal_and_in_history(typed: Shop) -> None:
    typed.write("pipelines/daily/total.py", "def run(df):\n    return df['nothing']\n")
    done = odf("pipeline", "run", "daily", "--project", "shop", cwd=typed.root.parent)

    assert done.returncode == 1
    assert "Reason: total: KeyError: 'nothing' (pipelines/daily/total.py:2)" in done.stderr
    [dataid] = typed.outs("daily")
    assert done.stderr.splitlines()[-2:] == [
        f"What failed: cd {typed.root} && odf history --pipeline daily",
        f"Once it is repaired: cd {typed.root} && odf resubmit daily {dataid} && "
        "odf pipeline run daily",
    ]
    told = odf("history", "--pipeline", "daily", cwd=typed.root)
    assert told.returncode == 0, told.stderr
    assert "total" in told.stdout
    assert "FAILED" in told.stdout
    assert "KeyError" in told.stdout


def test_a_killed_run_is_produced_again(typed: Shop) -> None:
    flag = typed.root / "at-work"
    typed.write("pipelines/daily/total.py", SLOW.format(more="", file=str(flag)))
    child = started("pipeline", "run", "daily", cwd=typed.root)
    try:
        wait_for(flag, child)
        below = psutil.Process(child.pid).children(recursive=True)
    finally:
        child.kill()
        child.communicate()
    _, alive = psutil.wait_procs(below, 30)
    for each in alive:
        each.kill()
    [dataid] = typed.outs("daily")
    assert typed.outs("daily") == {dataid: "RUNNING"}
    expire(typed.store)

    typed.write("pipelines/daily/total.py", TOTAL)
    done = odf("pipeline", "run", "daily", cwd=typed.root)
    assert done.returncode == 0, done.stderr
    assert typed.outs("daily") == {dataid: "READY"}
    assert typed.output("daily").startswith("product,qty,price,total\n")
    assert not alive


@pytest.mark.parametrize("stream", [False, True])
def test_ctrl_c_gives_back_what_runs_and_publishes_nothing(typed: Shop, stream: bool) -> None:
    flag, slug, words = typed.root / "at-work", "daily", []
    if stream:
        slug, words = "signups", ["--stream", "items.csv"]
        typed.write("items.csv", "name\nGrace\nHedy\n")
    last = "mark" if stream else "total"
    more = ", stream=None" if stream else ""
    typed.write(f"pipelines/{slug}/{last}.py", SLOW.format(more=more, file=str(flag)))
    child = started("pipeline", "run", slug, *words, cwd=typed.root)
    try:
        wait_for(flag, child)
        below = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=40)
    finally:
        child.kill()

    assert child.returncode == 130, said
    assert "Traceback" not in said
    assert set(typed.outs(slug).values()) == {"RESUBMIT"}
    assert len(typed.outs(slug)) == (2 if stream else 1)
    assert {row[0] for row in sql(typed.store, "select attempts from claim")} == {0}
    assert "stopped by SIGINT" in said
    assert not (typed.root / "output").exists()
    _, alive = psutil.wait_procs(below, 30)
    assert not alive


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nothing"], 4, "There is no pipeline 'nothing'"),
        (["daily", "--stream", "items.csv", "--all"], 2, "Use --all without --stream"),
        (["daily", "--stream", "items.csv"], 2, "accepts no items"),
        (["signups", "--stream", "items.csv"], 2, "There is no file items.csv"),
        (["report", "--strict"], 3, "nothing claimable"),
        (["report"], 0, "nothing claimable"),
    ],
)
def test_a_pipeline_that_cant_run_is_refused_in_one_line(
    typed: Shop, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int, said: str
) -> None:
    monkeypatch.chdir(typed.root)
    done = CliRunner().invoke(app, ["pipeline", "run", *words], prog_name="odf")
    assert done.exit_code == code, done.output
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_another_job_of_that_name_is_left_alone(
    typed: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(typed.root)
    assert CliRunner().invoke(app, ["init"]).exit_code == 0
    register(typed.store, "daily", ["bobin"], ["bobout"])
    done = CliRunner().invoke(app, ["pipeline", "run", "daily"], prog_name="odf")
    assert done.exit_code == 4
    assert "a job that isn't a pipeline has that name" in done.stderr


def test_pipelines_are_listed_without_making_tables(
    typed: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(typed.root / "sources")
    done = CliRunner().invoke(app, ["pipeline", "list", "--json"], prog_name="odf")
    assert done.exit_code == 0, done.output
    assert [each["waits_for"] for each in json.loads(done.stdout)] == [[], ["sales"], []]
    assert [each["items"] for each in json.loads(done.stdout)] == [False, False, True]
    assert not (typed.root / ".dataflow").exists()
    shown = CliRunner().invoke(app, ["pipeline", "list"], prog_name="odf").stdout
    assert shown.splitlines()[1].split() == [
        "daily",
        "orders,",
        "products",
        "clean,",
        "total",
        "sales",
    ]


def test_the_tables_are_in_the_project_unless_something_names_others(
    typed: Shop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from opendataflow_dagster.pipelines.project import project_settings

    root = typed.root
    assert project_settings(root).url == f"sqlite:///{root}/.dataflow/dataflow.db"
    (root / "dataflow.properties").write_text("url=sqlite:///mine.db\n")
    assert project_settings(root).url == f"sqlite:///{root}/mine.db"
    (tmp_path / "dataflow.properties").write_text("url=sqlite:///here.db\n")
    assert project_settings(root).url == f"sqlite:///{tmp_path}/here.db"
    (tmp_path / "other.properties").write_text("url=sqlite:///other.db\n")
    assert project_settings(root, "other.properties").url == f"sqlite:///{tmp_path}/other.db"
    monkeypatch.setenv("DATAFLOW_URL", "sqlite:////else/where.db")
    assert project_settings(root).url == "sqlite:////else/where.db"


def test_a_new_project_has_a_name_that_can_be_typed(tmp_path: Path) -> None:
    for empty in ("", " "):
        refused = odf("new", empty, cwd=tmp_path)
        assert refused.returncode == 2
        assert "The project has no name. Name its folder, as in: odf new shop" in refused.stderr
    assert list(tmp_path.iterdir()) == []
    assert "Next: cd ./-x && " in odf("new", "--", "-x", cwd=tmp_path).stderr
    assert (tmp_path / "-x" / "project.yml").exists()


def test_a_pipeline_that_has_not_run_yet_is_known_as_one(
    typed: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed.store.init()
    (typed.root / "sub").mkdir()
    monkeypatch.chdir(typed.root / "sub")
    monkeypatch.setenv("DATAFLOW_URL", f"sqlite:///{typed.root}/.dataflow/dataflow.db")

    def told(*words: str) -> str:
        done = CliRunner().invoke(app, words)
        assert "odf job add" not in done.output
        return done.output

    for words in (
        ["why", "daily"],
        ["why", "daily", "x"],
        ["resubmit", "daily", "--failed"],
        ["hold", "daily", "x"],
        ["release", "daily", "x"],
        ["job", "list", "daily"],
        ["delete-run", "daily", "x"],
    ):
        assert "odf pipeline run daily" in told(*words), words
    dials = [line.split()[:2] for line in told("policy", "daily", "every_minutes=15").splitlines()]
    assert ["every_minutes", "15"] in dials
    plans = register_pipeline(typed.store, read_project(typed.root), "daily")
    assert typed.store.plan("daily").outputs == plans["daily"].outputs == ("sales",)
    other = CliRunner().invoke(app, ["policy", "nobody"])
    assert "run: odf job add nobody --in DATASET --out DATASET" in other.output


def test_no_advice_to_resubmit_an_item_without_payload(typed: Shop) -> None:
    store = typed.store
    store.init()
    register_pipeline(store, read_project(typed.root), "signups")
    [accepted] = accept(store, [Post("signups", ('{"name": "Bob"}',))])
    [item] = accepted.dataids  # type: ignore[union-attr]
    [claim] = take(store, "signups")
    store.finish(claim, [Fact("signups", item, str(typed.root), 1)])
    assert clean(store).items == 1
    resubmit(store, "signups", [item], who="someone")

    done = odf("pipeline", "run", "signups", cwd=typed.root)

    assert done.returncode == 1, done.stderr
    assert "its payload was cleaned away: post the item again" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Post it again")
    assert "odf resubmit" not in done.stderr
