"""Items are processed in batches, in order; one that fails, fails alone; none comes twice."""

import csv
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from textwrap import dedent
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pandas as pd
import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from opendataflow_dagster.errors import Refused
from opendataflow_dagster.model import Fact
from opendataflow_dagster.pipelines.deployment import Current
from opendataflow_dagster.pipelines.engine import Engine, ItemRan, StepRan, Stopped
from opendataflow_dagster.pipelines.items import EngineGone, ItemLoop
from opendataflow_dagster.pipelines.project import read_project
from opendataflow_dagster.pipelines.transformation import TransformationError
from opendataflow_dagster.pipelines.worker import (
    FIRST_BATCH_ITEMS,
    MAX_BATCH_ITEMS,
    Consumer,
    Pace,
    QueuedItems,
    Turns,
    settle_lost,
)
from opendataflow_dagster.runner.heartbeat import Pulse
from opendataflow_dagster.store.claims import settle_run
from opendataflow_dagster.store.history import clean, steps
from opendataflow_dagster.store.item_folding import fold_items
from opendataflow_dagster.store.items import Post, accept, backlog, new_run, queue_head
from opendataflow_dagster.store.operations import resubmit
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.spark_line import labels_of_jobs
from tests.support.store_fixtures import check, expire, policy, sql, statuses, take

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

YML = """
name: shop
pipelines:
  - slug: live
    sources: [products]
    transformations: [price, total]
"""

PRICE = '''
import os
import pandas as pd

def run(products, stream=None):
    """The item with its price."""
    print("item", ascii(stream["name"]))
    if stream["name"] == "bad":
        raise ValueError("no good")
    if stream["name"] == "dies":
        os._exit(3)
    while stream["name"] == "endless":
        try:
            [].sort(key=len)
        except Exception:
            pass
    return pd.DataFrame([stream]).merge(products, on="product", how="left")
'''

TOTAL = """
def run(df):
    df["total"] = df["price"] * 2
    return df
"""

RUNID = "items test"


class Shop:
    """A project whose pipeline `live` takes items, and their consumer."""

    def __init__(self, store: Store, spark: "SparkSession", root: Path) -> None:
        self.store, self.spark, self.root = store, spark, root
        self.said: list[str] = []
        self.ended: list[str] = []
        self.write("project.yml", YML)
        self.write("pipelines/live/price.py", PRICE)
        self.write("pipelines/live/total.py", TOTAL)
        self.write("sources/products.csv", "product,price\n1,1.5\n2,2.5\n")
        self.project = read_project(root)
        self.engine = Engine(
            self.project,
            lambda: spark,
            say=self.said.append,
            stopping=lambda: self.ended[0] if self.ended else None,
        )
        self.current = Current(store, self.project, say=self.said.append)
        self.current.refresh()
        self.pulse = Pulse(store, "worker")
        self.consumer = self.made(self.engine)

    def made(self, engine: Engine, is_alive: bool = True) -> Consumer:
        return Consumer(
            self.store,
            self.current,
            engine,
            self.pulse,
            runid=RUNID,
            is_alive=lambda: is_alive,
            say=self.said.append,
        )

    def feeder(self, count: int) -> QueuedItems:
        """Return the next items of `live`, at most so many."""
        head = queue_head(self.store, "live", count)
        return QueuedItems(self.consumer, self.current.taking["live"], head, Pace())

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(dedent(text))

    def send(self, *names: Any) -> list[str]:
        """Accept items of these names, or the given items; return their dataids."""
        items = [each if isinstance(each, dict) else {"name": each, "product": 1} for each in names]
        posts = [Post("live", tuple(json.dumps(each) for each in items))]
        [accepted] = accept(self.store, posts)
        return list(accepted.dataids)  # type: ignore[union-attr]

    def consume(self) -> list[int]:
        """Work until nothing is left; return the sizes of the batches."""
        sizes = []
        while size := self.consumer.consume("live"):
            sizes.append(size)
        return sizes

    def status(self) -> list[str]:
        """Return the statuses of the chunks of `live`, in order."""
        found = {key[2]: row[1] for key, row in statuses(self.store).items()}
        return [found[each] for each in sorted(found, key=lambda each: (len(each), each))]

    def rows(self) -> list[dict[str, str]]:
        with (self.root / "output" / "live.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def names(self) -> list[str]:
        return [row["name"] for row in self.rows()]


@pytest.fixture
def shop(store: Store, spark: "SparkSession", tmp_path: Path) -> Iterator[Shop]:
    with (made := Shop(store, spark, tmp_path / "shop")).pulse:
        yield made
    made.engine.close()


@pytest.fixture
def lite(sqlite_url: str, spark: "SparkSession", tmp_path: Path) -> Iterator[Shop]:
    """The same on SQLite alone."""
    from opendataflow_dagster.store import open_store
    from tests.support.store_fixtures import close

    store = open_store(sqlite_url)
    store.init()
    with (made := Shop(store, spark, tmp_path / "shop")).pulse:
        yield made
    made.engine.close()
    close(store)


def test_items_become_rows_in_their_order(shop: Shop) -> None:
    ids = shop.send(*(f"item {each}" for each in range(50)))
    sizes = shop.consume()
    assert sizes[0] == FIRST_BATCH_ITEMS
    assert sum(sizes) == 50
    assert shop.names() == [f"item {each}" for each in range(50)]
    assert shop.rows()[0] == {"name": "item 0", "product": "1", "price": "1.5", "total": "3.0"}
    assert shop.status() == ["READY"] * 50
    found = steps(shop.store, "live", ids[7])
    assert [(row["step"], row["transformation"], row["status"], row["rows"]) for row in found] == [
        (1, "price", "READY", 1),
        (2, "total", "READY", 1),
    ]
    assert found[0]["stdout"] == "item 'item 7'\n"
    assert found[0]["started"] <= found[0]["ended"] <= found[1]["ended"]
    [(rows, location)] = sql(
        shop.store, "select rows, location from chunkfact where dataid = :d", d=ids[7]
    )
    assert (rows, location) == (1, str(shop.root / "output" / "live.csv"))
    assert sql(shop.store, "select * from claim") == []
    check(shop.store)


def test_a_failed_item_fails_alone_and_may_be_resubmitted(shop: Shop) -> None:
    ids = shop.send("a", "bad", "c", {"product": 1})
    shop.consume()
    assert shop.status() == ["READY", "FAILED", "READY", "FAILED"]
    assert shop.names() == ["a", "c"]
    [step] = steps(shop.store, "live", ids[1])
    assert step["reason"].startswith("ValueError: no good (pipelines/live/price.py:")
    assert "raise ValueError" in step["traceback"]
    assert step["stdout"] == "item 'bad'\n"
    why = sql(shop.store, "select why from dataevent where dataid = :d order by seq", d=ids[1])
    assert why[-1][0].startswith("price: ValueError: no good")
    shop.write("pipelines/live/price.py", PRICE.replace('== "bad"', '== "other"'))
    shop.current.refresh()
    resubmit(shop.store, "live", [ids[1]])
    shop.send("d")
    shop.consume()
    assert shop.status() == ["READY", "READY", "READY", "FAILED", "READY"]
    assert sorted(shop.names()) == ["a", "bad", "c", "d"]
    resubmit(shop.store, "live", [ids[0]])
    shop.consume()
    assert sorted(shop.names()) == ["a", "bad", "c", "d"]
    check(shop.store)


def test_an_item_that_crashes_its_process_fails_alone(lite: Shop) -> None:
    ids = lite.send("a", "b", "dies", "d")
    lite.consume()
    assert lite.status() == ["READY", "READY", "FAILED", "READY"]
    assert lite.names() == ["a", "b", "d"]
    [step] = steps(lite.store, "live", ids[2])
    assert "ended while it ran" in step["reason"]


def test_an_item_that_takes_too_long_fails_alone(lite: Shop) -> None:
    policy(lite.store, "live", time_limit=1)
    lite.send("a", "endless", "b")

    lite.consume()

    assert lite.status() == ["READY", "FAILED", "READY"]
    failed = next(each for each in steps(lite.store, "live") if each["status"] == "FAILED")
    assert failed["reason"] == "it took longer than its time_limit, see `odf policy`"


def test_an_item_that_keeps_spark_too_long_fails_alone(lite: Shop) -> None:
    lite.write(
        "pipelines/live/total.py",
        """
        import time
        from pyspark.sql import DataFrame, functions as F

        def run(df: DataFrame) -> DataFrame:
            wait = F.udf(lambda name: time.sleep(60 * (name == "slow")) or 2.0, "double")
            return df.withColumn("total", wait("name"))
    """,
    )
    policy(lite.store, "live", time_limit=20)
    lite.send("a", "slow", "b")

    lite.consume()

    assert lite.status() == ["READY", "FAILED", "READY"]
    failed = next(each for each in steps(lite.store, "live") if each["status"] == "FAILED")
    assert failed["transformation"] == "total"
    assert failed["reason"] == "it took longer than its time_limit, see `odf policy`"


def test_slow_code_on_the_driver_fails_with_that_reason(
    lite: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    lite.write(
        "pipelines/live/total.py",
        """
        import time
        from pyspark.sql import DataFrame

        def run(df: DataFrame) -> DataFrame:
            print("slowly")
            time.sleep(4)
            return df
    """,
    )
    frame = lite.spark.range(1)
    monkeypatch.setattr(lite.engine, "_computed", lambda *_: pytest.fail("it goes on"))
    with pytest.raises(TransformationError, match="time_limit") as told:
        lite.engine.run("live", "total", [frame], due=time.monotonic() + 3)
    assert told.value.printed == "slowly\n"


def test_a_file_that_cannot_be_loaded_fails_its_items_with_its_line(lite: Shop) -> None:
    lite.write("pipelines/live/total.py", "def run(df:\n")
    lite.send("a", "b")
    lite.consume()
    assert lite.status() == ["FAILED", "FAILED"]
    why = [row[0] for row in sql(lite.store, "select why from dataevent where why is not null")]
    assert any("total: SyntaxError" in each for each in why)


@pytest.mark.parametrize(
    "text",
    [
        "quotes \" ' ` and\nlines\r\n\tand; drop table dataset; --",
        '__import__("os").system("touch hacked") # {0} %s ${HOME} $(id)',
        "日本語 🙂 \u2028 \x7f",
    ],
)
def test_an_item_arrives_as_itself(lite: Shop, text: str) -> None:
    lite.send({"name": text, "product": 2, text: text})
    lite.consume()
    [row] = lite.rows()
    assert row["name"] == row[text] == text
    assert not list(lite.root.glob("**/hacked"))


def test_an_item_that_the_destination_refuses_fails_alone(lite: Shop) -> None:
    lite.send("a", "half \ud800", "c", {"name": "more", "product": 1, "unknown": 7})
    lite.consume()
    assert lite.status() == ["READY", "FAILED", "READY", "FAILED"]
    assert lite.names() == ["a", "c"]
    lite.write(
        "pipelines/live/total.py",
        "def run(df):\n    df['name'] = df['name'].map(ascii)\n"
        "    df['total'] = len(df['name'][0])\n    return df\n",
    )
    lite.current.refresh()
    lite.send("half \ud800", "nul \0")
    lite.consume()
    assert lite.names()[2:] == ["'half \\ud800'", "'nul \\x00'"]


def test_the_spark_job_of_a_batch_names_its_items(lite: Shop) -> None:
    ids = lite.send("a", "b", "c")
    with labels_of_jobs(lite.spark) as labels:
        lite.consume()
    assert set(labels) == {(f"live {ids[0]} and 2 more", f"odf live: chunk {ids[0]} and 2 more")}


def test_a_paused_pipeline_waits(shop: Shop) -> None:
    shop.send("a")
    policy(shop.store, "live", paused_until="2999-01-01 00:00:00")
    assert shop.consume() == []
    policy(shop.store, "live", paused_until=None)
    assert shop.consume() == [1]
    assert shop.status() == ["READY"]


def test_runs_are_left_to_odf_pipeline_run(shop: Shop) -> None:
    run = new_run(shop.store, "live")
    shop.send("a", "b")
    shop.consume()
    found = {key[2]: row[1] for key, row in statuses(shop.store).items()}
    assert found.pop(run) == "PENDING"
    assert set(found.values()) == {"READY"}
    [claim] = take(shop.store, "live", "person", only=run)
    shop.send("c")
    shop.consume()
    assert shop.names() == ["a", "b", "c"]
    shop.store.fail(claim, "no more")
    check(shop.store)


def test_items_are_processed_while_a_resubmitted_run_waits(shop: Shop) -> None:
    run = new_run(shop.store, "live")
    [claim] = take(shop.store, "live", "person", only=run)
    shop.store.fail(claim, "no good")
    resubmit(shop.store, "live", [run])
    shop.send(*"abc")
    pace = shop.consumer._paces["live"] = Pace()
    pace.size = 1

    sizes = shop.consume()

    assert sizes[0] == 1
    assert sum(sizes) == 3
    assert shop.names() == ["a", "b", "c"]
    assert statuses(shop.store)["live", "live", run] == ("OUT", "RESUBMIT")
    check(shop.store)


def test_items_wait_for_a_source_that_is_missing(lite: Shop) -> None:
    (lite.root / "sources" / "products.csv").unlink()
    lite.send("a", "b")
    for _ in range(7):  # more often than a claim may be lost
        assert lite.consume() == []
        lite.consumer._paces["live"].until = 0.0
    assert lite.status() == ["RESUBMIT", "RESUBMIT"]
    assert "which doesn't exist" in lite.said[0]
    lite.write("sources/products.csv", "product,price\n1,7\n")
    assert sum(lite.consume()) == 2
    assert lite.status() == ["READY", "READY"]
    assert lite.names() == ["a", "b"]
    assert lite.rows()[0]["total"] == "14"


def test_an_item_recovered_by_another_worker_is_not_published(shop: Shop) -> None:
    ids = shop.send("a", "b", "c")
    feeder = shop.feeder(3)
    claims = feeder.claim()
    expire(shop.store, claims[1])
    assert [each.dataid for each in shop.store.recover("live")] == [ids[1]]
    loop = ItemLoop(feeder)
    loop.work(claims)
    assert loop.unsettled == {}
    assert shop.names() == ["a", "c"]
    assert shop.status() == ["READY", "RESUBMIT", "READY"]
    shop.consume()
    assert shop.names() == ["a", "c", "b"]


def test_after_a_spark_crash_items_are_retried_one_by_one(lite: Shop) -> None:
    def gone() -> Any:
        raise ConnectionRefusedError("Java is gone")

    lite.send("a", "b")
    lite.consumer = lite.made(Engine(lite.project, gone), is_alive=False)
    with pytest.raises(EngineGone):
        lite.consume()
    assert lite.consume() == [], "this worker begins nothing more"
    settle_lost(lite.store, RUNID, "Spark has ended", say=lite.said.append)
    assert lite.status() == ["RESUBMIT", "RESUBMIT"]
    lite.consumer = lite.made(lite.engine)
    lite.send("c", "d")
    sizes = lite.consume()
    assert sizes[:2] == [1, 1]
    assert sum(sizes) == 4
    assert lite.names() == ["a", "b", "c", "d"]


class Halting(Engine):
    """An engine whose Java ends at an item of this name."""

    alive = True

    def run_items(self, slug: str, names: Any, sources: Any, items: Any, **how: Any) -> Any:
        if any(each["name"] == "halts" for each in items):
            self.alive = False
            raise ConnectionRefusedError("Java is gone")
        return super().run_items(slug, names, sources, items, **how)


def test_only_an_item_that_crashes_spark_repeatedly_is_held(shop: Shop) -> None:
    ids = shop.send("a", "b", "halts", "d", "e")
    sizes: list[int] = []

    def works_to_its_end() -> bool:
        engine = Halting(shop.project, lambda: shop.spark)
        consumer = shop.consumer = shop.made(engine)
        consumer.is_alive = lambda: engine.alive
        try:
            sizes.extend(shop.consume())
        except EngineGone as error:
            settle_lost(shop.store, RUNID, str(error), say=shop.said.append)
            return False
        return True

    assert [works_to_its_end() for _ in range(4)] == [False, False, False, True]
    assert sizes == [1, 1], "the last two, each by itself"
    assert shop.status() == ["READY", "READY", "HOLD", "READY", "READY"]
    assert shop.names() == ["a", "b", "d", "e"]
    assert f"run: odf resubmit live {ids[2]}" in shop.said[-1]
    assert [row["held"] for row in backlog(shop.store)] == [1]
    why = sql(shop.store, "select why from dataevent where dataid = :d order by seq", d=ids[2])
    assert why[-1][0].startswith("Spark has ended: Java is gone: worker lost claim 3 of 3")
    resubmit(shop.store, "live", [ids[2]])
    assert [row["held"] for row in backlog(shop.store)] == [0]
    assert [works_to_its_end() for _ in range(2)] == [False, False], "it has three tries again"
    assert shop.status()[2] == "RESUBMIT"
    check(shop.store)


def test_items_interrupted_by_a_spark_shutdown_are_retried(lite: Shop) -> None:
    class Ended(Engine):
        def run_items(self, slug: str, names: Any, sources: Any, items: Any, **how: Any) -> Any:
            reason = "ConnectionRefusedError: Connection refused (pipelines/live/price.py:9)"
            return [ItemRan(None, (StepRan("price", reason, "", "", None, 0),)) for _ in items]

    lite.send("a", "b")
    lite.consumer = lite.made(Ended(lite.project, lambda: lite.spark), is_alive=False)
    with pytest.raises(EngineGone, match="Spark has ended: price: ConnectionRefusedError"):
        lite.consume()
    settle_lost(lite.store, RUNID, "Spark has ended", say=lite.said.append)
    assert lite.status() == ["RESUBMIT", "RESUBMIT"]


def test_items_lost_together_are_never_held(shop: Shop) -> None:
    policy(shop.store, "live", max_losses=1)
    shop.send("a", "b")
    shop.feeder(2).claim()
    settle_lost(shop.store, RUNID, "the worker ended", say=shop.said.append)
    assert shop.status() == ["RESUBMIT", "RESUBMIT"]
    head = queue_head(shop.store, "live", 2)
    assert (len(head.dataids), head.alone) == (1, True)
    shop.feeder(2).claim()
    settle_lost(shop.store, RUNID, "the worker ended", say=shop.said.append)
    assert shop.status() == ["HOLD", "RESUBMIT"]
    assert shop.consume() == [1]


def test_a_suspect_item_runs_alone() -> None:
    turns, over = Turns(lambda: over.is_set()), Event()
    told: list[str] = []

    def work(name: str, alone: bool) -> Thread:
        def run() -> None:
            with turns.take(alone=alone) as ours:
                told.append(name if ours else f"no {name}")

        thread = Thread(target=run)
        thread.start()
        return thread

    with turns.take(alone=False), turns.take(alone=False) as ours:
        assert ours
        suspect = work("suspect", alone=True)
        while not turns._suspects_waiting:
            time.sleep(0.01)
        later = work("later", alone=False)
        time.sleep(0.05)
        assert told == []
    suspect.join()
    later.join()
    assert told == ["suspect", "later"]
    with turns.take(alone=True):
        waiting = [work("batch", alone=False), work("other", alone=True)]
        time.sleep(0.05)
        over.set()
        for each in waiting:
            each.join()
    assert sorted(told[2:]) == ["no batch", "no other"]


def test_unfinished_items_are_given_back_at_the_end(lite: Shop) -> None:
    lite.send("a", "b")
    lite.ended.append("the server's end")
    with pytest.raises(Stopped):
        lite.consume()
    assert lite.status() == ["RESUBMIT", "RESUBMIT"]
    lite.ended.clear()
    assert lite.consume() == [2]
    lite.send("c")
    lite.consumer.stopping = True
    assert lite.consume() == []


def test_items_of_a_killed_worker_are_processed_again_once(shop: Shop) -> None:
    shop.send("a", "b", "c")
    feeder = shop.feeder(2)
    claims = feeder.claim()
    results = ItemLoop(feeder)._transform(claims, feeder.decode(claims), feeder.sources(claims))
    frames = [result.ran.frame for result in results if result.ran]
    # Killed between the append and the settlement.
    feeder.destination().append(list(zip(claims, frames, strict=True)), lambda: None)
    settle_run(shop.store, RUNID, why="the worker ended", canceled=False)
    shop.consume()
    assert shop.status() == ["READY"] * 3
    assert sorted(shop.names()) == ["a", "b", "c"]
    check(shop.store)


def test_an_item_without_a_payload_fails_with_that_reason(lite: Shop) -> None:
    ids = lite.send("a", "b")
    lite.consume()
    clean(lite.store, "live")
    resubmit(lite.store, "live", ids)
    lite.send("c")
    lite.consume()
    assert lite.status() == ["FAILED", "FAILED", "READY"]
    why = sql(lite.store, "select why from dataevent where dataid = :d order by seq", d=ids[0])
    assert "cleaned away" in why[-1][0]


def test_items_go_to_a_registered_table(lite: Shop, tmp_path: Path) -> None:
    file = str(tmp_path / "sold.db")
    add_dataset(lite.store, "live", format="sqlite", database=file, tablename="sold")
    lite.send("a", "bad", "c")
    lite.consume()
    assert lite.status() == ["READY", "FAILED", "READY"]
    with closing(sqlite3.connect(file)) as connection:
        rows = connection.execute("select name, total from sold order by name").fetchall()
    assert rows == [("a", 3.0), ("c", 3.0)]


def test_an_older_item_doesnt_replace_a_newer_one(shop: Shop) -> None:
    file = shop.root / "live.csv"
    add_dataset(shop.store, "live", hostname=str(file), writemode="replace")
    first, bad, last = shop.send("first", "bad", "last")
    shop.consume()
    assert shop.status() == ["READY", "FAILED", "READY"]
    for older in (first, bad):
        with pytest.raises(Refused, match=f"holds the newer chunk '{last}'"):
            resubmit(shop.store, "live", [older])
    sql(shop.store, "update datastatus set status = 'RESUBMIT' where dataid = :d", d=first)
    [newest] = shop.send("newest")
    shop.consume()

    assert shop.status() == ["HOLD", "FAILED", "READY", "READY"]
    assert pd.read_csv(file)["name"].tolist() == ["newest"]
    resubmit(shop.store, "live", [newest])
    shop.consume()
    assert shop.status() == ["HOLD", "FAILED", "READY", "READY"]
    check(shop.store)


@pytest.mark.parametrize("written", ["the run", "the item"])
def test_a_run_and_an_item_are_compared_by_when_they_began(shop: Shop, written: str) -> None:
    """A run is named by a date, an item by a number: that doesn't say which is newer."""
    add_dataset(shop.store, "live", hostname=str(shop.root / "live.csv"), writemode="replace")
    run = new_run(shop.store, "live")
    [item] = shop.send("item")
    for dataid in (run, item) if written == "the item" else (item, run):
        [claim] = take(shop.store, "live", only=dataid)
        shop.store.finish(claim, [Fact("live", dataid, "live.csv", replaces=True)])

    if written == "the item":
        with pytest.raises(Refused, match=f"holds the newer chunk '{item}'"):
            resubmit(shop.store, "live", [run])
    else:  # which came before, but the item is the newer one
        resubmit(shop.store, "live", [item])


def test_a_file_that_was_moved_away_and_back_is_appended_to(lite: Shop, tmp_path: Path) -> None:
    lite.send("first")
    lite.consume()
    add_dataset(lite.store, "live", hostname=str(tmp_path / "other.csv"))
    lite.send("other")
    lite.consume()
    assert (tmp_path / "other.csv").read_text().splitlines()[1:] == ["other,1,1.5,3.0"]
    (tmp_path / "other.csv").unlink()
    (tmp_path / ".other.csv.odf").unlink()
    lite.send("once more")
    lite.consume()
    assert (tmp_path / "other.csv").read_text().splitlines()[1:] == ["once more,1,1.5,3.0"]
    assert lite.names() == ["first"]


def test_folding_leaves_the_file_unchanged(shop: Shop) -> None:
    ids = shop.send("a", "b", "bad")
    shop.consume()
    for table, column in (("streamitem", "received"), ("chunkfact", "at")):
        sql(shop.store, f"update {table} set {column} = '2026-01-01 00:00:00'")
    assert sql(shop.store, "select count(*) from csvpart") == [(2,)]
    assert fold_items(shop.store) == 2
    assert sql(shop.store, "select count(*) from csvpart") == [(0,)]
    assert [key[2] for key in statuses(shop.store)] == ids[2:]

    shop.send("c", "d")
    shop.consume()
    assert shop.names() == ["a", "b", "c", "d"]
    with pytest.raises(Refused, match="has rows that 4 items have appended"):
        shop.feeder(1).destination().refuse_loss()
    check(shop.store)


def test_a_destination_that_is_away_is_waited_for(lite: Shop, tmp_path: Path) -> None:
    folder = tmp_path / "away"
    folder.write_text("a file where a folder should be")
    add_dataset(lite.store, "live", hostname=str(folder / "sold.csv"))
    lite.send("a", "b", "c")
    assert lite.consume() == []
    assert lite.status() == ["RESUBMIT"] * 3
    assert "retried in 1 s" in lite.said[-1]
    said = len(lite.said)
    lite.consumer._paces["live"].until = 0.0
    assert lite.consume() == []
    assert len(lite.said) == said, "it is said once"
    folder.unlink()
    lite.consumer._paces["live"].until = 0.0
    assert sum(lite.consume()) == 3
    assert (folder / "sold.csv").read_text().splitlines()[1:] == [
        f"{each},1,1.5,3.0" for each in "abc"
    ]


def test_items_wait_for_a_table_of_chunks_that_is_away(lite: Shop, tmp_path: Path) -> None:
    file = str(tmp_path / "sold.db")
    add_dataset(
        lite.store, "live", format="sqlite", database=file, tablename="sold", chunkcolumn="run"
    )
    lite.send("a", "b")
    assert lite.consume() == []
    assert lite.status() == ["RESUBMIT"] * 2
    assert f"there is no file {file}" in lite.said[-1]
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("create table sold (name text, product, price, total, run text)")
    lite.consumer._paces["live"].until = 0.0
    assert sum(lite.consume()) == 2
    assert lite.status() == ["READY"] * 2


@pytest.mark.parametrize("place", ["parquet", "csv", "csvfile", "sqlite", "postgres"])
@pytest.mark.parametrize("bad", ["half \ud800", {}, ["x", "y"], 2**70, [{"a": {}}, "half \ud800"]])
def test_a_refused_item_doesnt_keep_others_from_the_destination(
    lite: Shop, place: str, bad: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if place == "postgres":
        columns = postgres_at(request) | {"tablename": "sold"}
    elif place == "sqlite":
        columns = {"database": str(tmp_path / "sold.db"), "tablename": "sold", "format": "sqlite"}
    elif place == "csvfile":
        columns = {"hostname": str(tmp_path / "sold.csv")}
    else:
        columns = {"hostname": str(tmp_path / "sold"), "format": place}
    add_dataset(lite.store, "live", **columns)
    for what in ({"k": 1}, bad, {"k": 2}):
        lite.send({"name": "a", "product": 1, "v": what})
    assert sum(lite.consume()) == 3
    lite.send("later")
    assert lite.consume() == [1]

    statuses = lite.status()
    assert [statuses[0], *statuses[2:]] == ["READY"] * 3
    if isinstance(bad, str):
        assert statuses[1] == "FAILED"
    if statuses[1] == "FAILED":
        assert re.search("[Cc]olumn '?v|bigint", lite.said[-1]), lite.said
    assert not [each for each in lite.said if "retried" in each]
    check(lite.store)


def test_when_a_batch_fails_as_a_whole_its_items_are_published_one_by_one(
    lite: Shop, request: pytest.FixtureRequest
) -> None:
    columns = postgres_at(request)
    with psycopg.connect(request.getfixturevalue("postgres_url")) as connection:
        connection.execute(
            "create table sold (name text unique deferrable initially deferred, product int, "
            "price float, total float)"
        )
    add_dataset(lite.store, "live", tablename="sold", **columns)
    lite.send("a", "twice", "twice", "bad", "c")
    assert lite.consume() == [5]
    assert lite.status() == ["READY", "READY", "FAILED", "FAILED", "READY"]
    assert any("duplicate key value" in each for each in lite.said)
    with psycopg.connect(request.getfixturevalue("postgres_url")) as connection:
        found = connection.execute("select name from sold order by 1").fetchall()
    assert found == [("a",), ("c",), ("twice",)]
    check(lite.store)


def postgres_at(request: pytest.FixtureRequest) -> dict[str, str]:
    """The columns of a dataset in an empty database of PostgreSQL."""
    parts = conninfo_to_dict(request.getfixturevalue("postgres_url"))
    host = f"{parts.get('host', '')}:{parts['port']}" if "port" in parts else parts["host"]
    return {
        "hostname": str(host),
        "database": str(parts["dbname"]),
        "username": str(parts.get("user", "")),
        "format": "postgresql",
    }


def test_a_slow_pipeline_takes_small_batches() -> None:
    pace = Pace()
    assert pace.size == FIRST_BATCH_ITEMS
    for _ in range(10):
        pace.adapt(pace.size, pace.size * 0.0005)
    assert pace.size == MAX_BATCH_ITEMS
    pace.adapt(MAX_BATCH_ITEMS, 1.0)
    assert pace.size == 250
    pace.adapt(20, 60.0)
    assert pace.size == 1
    assert [pace.back_off() for _ in range(7)] == [1, 2, 4, 8, 16, 30, 30]
    assert pace.until > time.monotonic() + 25


def test_the_history_of_each_item_has_its_logs(lite: Shop) -> None:
    lite.write(
        "pipelines/live/total.py",
        """
        import logging
        logging.basicConfig(level=logging.INFO)
        def run(df):
            logging.warning("total of %s", df["name"][0])
            return df
    """,
    )
    for names in ("ab", "c"):
        lite.send(*names)
        lite.consume()
    told = [row["stdout"] for row in steps(lite.store, "live") if row["transformation"] == "total"]
    assert sorted(told) == [f"WARNING:root:total of {name}\n" for name in "abc"]
