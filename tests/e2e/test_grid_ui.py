"""The grid of the tables in Dagster's UI, viewed and clicked in a real browser."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from opendataflow_dagster.model import Fact
from opendataflow_dagster.store import open_store, operations, registry
from opendataflow_dagster.store.store import Store
from tests.support.browser import UI
from tests.support.dagster_servers import Dagster
from tests.support.graphql_client import wait_for
from tests.support.store_fixtures import close, put, sql, statuses

RECONCILE = "opendataflow_reconcile"
AGREES = "The grid agrees with the tables."
COLOURS = {"READY": "green", "FAILED": "red", "RESUBMIT": "red", "RUNNING": "blue"}


class Shop:
    """The tables of the shop, its Dagster, and the days that are broken or slow."""

    def __init__(self, store: Store, dagster: Dagster, folder: Path) -> None:
        self.store, self.dagster, self.folder = store, dagster, folder
        self.client = dagster.client

    def arrive(self, first: int, last: int, *, late: int = 0) -> list[str]:
        """Add days of November with sales, and `late` more that are announced."""
        days = [day(number) for number in range(first, last + 1)]
        operations.ready(self.store, "sales", days)
        expected = [day(last + 1 + number) for number in range(late)]
        for each in expected:
            put(self.store, "sales", each, "PENDING", jobid="external")
        wait_for(
            lambda: self.client.partitions("checked"), (days + expected).__eq__, 30, "they are keys"
        )
        return days + expected

    def mark(self, broken: Sequence[str] = (), slow: Sequence[str] = ()) -> None:
        """Set which days fail and which take long; all others succeed from now on."""
        (self.folder / "broken").write_text("\n".join(broken))
        (self.folder / "slow").write_text("\n".join(slow))

    def hold(self, dataid: str) -> Any:
        """Claim a chunk outside of Dagster."""
        [claim] = self.store.claim("check", owner=f"cron@db1:{dataid}", only=dataid, lease=600)
        return claim

    def produce(self, *dataids: str) -> None:
        """Produce chunks outside of Dagster, like `odf run` in a cron line."""
        for each in dataids:
            rows = 1000 + int(each[-2:])
            place = f"s3://shop/checked/{each}.csv"
            self.store.finish(self.hold(each), [Fact("checked", each, place, rows=rows)])

    def fail(self, *dataids: str) -> None:
        """Do the same, but fail."""
        for each in dataids:
            self.store.fail(self.hold(each), "line 7 has no price")

    def colours(self) -> dict[str, str]:
        """Return what the squares of `checked` have to be, from the tables alone."""
        found = {dataid: "missing" for name, _, dataid in statuses(self.store) if name == "sales"}
        for (datasetid, _, dataid), (locktype, word) in statuses(self.store).items():
            if (datasetid, locktype) == ("checked", "OUT"):
                found[dataid] = COLOURS.get(word, "missing")
        return found

    def words(self, *dataids: str) -> list[str | None]:
        """The status of chunks of `checked`, in the tables."""
        rows = dict(
            sql(self.store, "select dataid, status from datastatus where datasetid = 'checked'")
        )
        return [rows.get(each) for each in dataids]

    def agrees(self) -> None:
        """Wait until the reconcile sensor finds nothing more to do."""
        wait_for(
            lambda: self.client.next_tick(RECONCILE)["skipReason"], AGREES.__eq__, 30, "it agrees"
        )


def day(number: int) -> str:
    return f"2026-11-{number:02}"


@pytest.fixture(scope="module")
def storage() -> str:
    """The browser sees the same on every storage: SQLite is enough."""
    return "sqlite"


@pytest.fixture(scope="module")
def world(
    chromium: Any, start_dagster: Callable[..., Dagster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    """The shop, served for all tests of this module."""
    folder = tmp_path_factory.mktemp("shop")
    url = f"sqlite:///{folder}/tables.db"
    store = open_store(url)
    store.init()
    registry.add_dataset(store, "sales", hostname="s3://shop/sales")
    registry.add_dataset(store, "checked", hostname="s3://shop/checked")
    registry.add_job(store, "check", ["sales"], ["checked"])
    env = {
        "DATAFLOW_URL": url,
        "SHOP_BROKEN": str(folder / "broken"),
        "SHOP_SLOW": str(folder / "slow"),
    }
    dagster = start_dagster("tests.support.code_locations.shop", name="shop", env=env)
    yield Shop(store, dagster, folder)
    close(store)


@pytest.fixture
def shop(world: Shop) -> Iterator[Shop]:
    """The shop before any day has arrived, and a Dagster that knows it."""
    if world.client.sensors()[RECONCILE] == "STOPPED":
        world.client.start_sensor(RECONCILE)
    for table in ("datastatus", "claim", "chunkfact"):
        sql(world.store, f"delete from {table} where dataid like '2026-%'")
    world.mark()
    wait_for(lambda: world.client.partitions("checked"), lambda keys: not keys, what="it is empty")
    world.agrees()
    yield world
    world.mark()


@pytest.fixture
def ui(page: Any, world: Shop) -> UI:
    """A tab of the browser."""
    return UI(page, world.dagster.url)


def looks_right(shop: Shop, ui: UI) -> dict[str, str]:
    """The grid comes to match the tables, square by square, and so do its counts."""
    shop.agrees()
    wanted = shop.colours()
    ui.open_partitions("checked")
    seen = ui.see(wanted.__eq__, f"the grid is {wanted}")
    assert {each: n for each, n in ui.counts().items() if n} == Counter(wanted.values())
    return seen


def metadata(ui: UI, dataid: str) -> dict[str, str]:
    """Return what the partitions page of an asset shows for one of them."""
    ui.choose(dataid)
    ui.page.get_by_role("row", name="opendataflow/safe").wait_for()
    rows = ui.page.locator("table tr").all_inner_texts()
    return {name.strip(): value.strip() for name, value, *_ in (row.split("\t") for row in rows)}


def test_the_grid_shows_what_the_tables_say(shop: Shop, ui: UI) -> None:
    days = shop.arrive(1, 27, late=3)
    shop.mark(broken=[day(4)])
    run = shop.client.launch(["checked"], day(1), through=day(8))  # Dagster makes some
    assert shop.client.finished(run) == "FAILURE"
    shop.produce(*days[8:16])  # and others don't
    shop.fail(day(17), day(18))
    operations.resubmit(shop.store, "check", [day(18)])
    claims = [shop.hold(day(19)), shop.hold(day(20))]
    assert shop.words(*days[:22]) == [
        *["READY"] * 3,
        "FAILED",
        *["READY"] * 12,
        "FAILED",
        "RESUBMIT",
        "RUNNING",
        "RUNNING",
        None,
        None,
    ]

    ui.page.set_viewport_size({"width": 1400, "height": 1110})
    squares = looks_right(shop, ui)

    assert list(squares) == days
    assert ui.counts() == {"green": 15, "red": 3, "blue": 2, "missing": 10}
    assert metadata(ui, day(8))["opendataflow/rows"] == "1008"
    ui.shoot("ui_grid")
    shop.store.finish(claims)


def test_materialize_runs_one_chunk(shop: Shop, ui: UI) -> None:
    first, second = shop.arrive(1, 2)
    shop.mark(slow=[second])

    ui.materialize("checked", second)

    wanted = {first: "missing", second: "blue"}
    ui.see(wanted.__eq__, "it is in progress")
    wait_for(lambda: shop.words(first, second), [None, "RUNNING"].__eq__, what="it is RUNNING")
    ui.shoot("ui_materialize")
    shop.mark()
    ui.see({**wanted, second: "green"}.__eq__, "it is green")
    assert shop.words(first, second) == [None, "READY"]
    assert shop.client.latest("checked")[second].metadata["opendataflow/rows"] == 1002
    looks_right(shop, ui)


def test_a_backfill_runs_failed_and_missing_chunks(shop: Shop, ui: UI) -> None:
    days = shop.arrive(1, 9, late=1)
    shop.produce(day(1), day(2))
    shop.fail(day(3), day(4), day(5))
    claim = shop.hold(day(6))
    shop.mark(broken=[day(8)])
    moved = operations.resubmit(shop.store, "check", failed=True)
    assert sorted(each.dataid for each in moved.moves) == [day(3), day(4), day(5)]
    looks_right(shop, ui)
    assert ui.counts() == {"green": 2, "red": 3, "blue": 1, "missing": 4}
    before = dict(sql(shop.store, "select dataid, generation from chunkfact"))

    assert ui.backfill("checked", "Failed and missing") == 7

    wait_for(
        lambda: shop.words(*days),
        [*["READY"] * 5, "RUNNING", "READY", "FAILED", "READY", None].__eq__,
        30,
        "what can be made is READY",
    )
    wait_for(lambda: shop.client.runs("QUEUED", "STARTING", "STARTED"), lambda runs: not runs)
    seen = looks_right(shop, ui)
    assert [seen[each] for each in days] == [
        *["green"] * 5,
        "blue",
        "green",
        "red",
        "green",
        "missing",
    ]
    ui.shoot("ui_backfill")
    after = dict(sql(shop.store, "select dataid, generation from chunkfact"))
    assert {each: after[each] for each in before} == before, "what was READY is made again"
    shop.store.finish(claim)


def test_the_sensors_page_shows_its_ticks(shop: Shop, ui: UI) -> None:
    first, second = shop.arrive(1, 2)
    shop.agrees()

    ui.switch_sensor("shop", RECONCILE, on=False)
    wait_for(shop.client.sensors, lambda found: found[RECONCILE] == "STOPPED", what="it is off")
    shop.produce(first, second)
    ui.page.wait_for_timeout(1500)
    assert shop.client.grid("checked").missing == {first, second}

    ui.switch_sensor("shop", RECONCILE, on=True)
    wait_for(lambda: shop.client.grid("checked").green, {first, second}.__eq__, what="it is on")
    shop.agrees()
    shop.client.stop_sensor(RECONCILE)  # now the page stands still
    reasons = [tick["skipReason"] for tick in shop.client.ticks(RECONCILE)]
    told = "2 chunks mirrored: 2 ready, grid agrees."
    ui.page.reload()
    ui.page.get_by_text("0 runs requested").first.hover()
    expect(ui.page.get_by_text(AGREES)).to_be_visible()
    ui.shoot("ui_sensor")
    ticks = ui.page.get_by_role("row").filter(has=ui.page.get_by_role("button", name="View logs"))
    ticks.nth(reasons.index(told)).get_by_text("0 runs requested").last.click()
    expect(ui.dialog().get_by_text(f"Skip reason: {told}")).to_be_visible()
    ui.shoot("ui_tick")


def test_a_chunks_page_shows_its_facts(shop: Shop, ui: UI) -> None:
    here, elsewhere = shop.arrive(1, 2)
    shop.produce(elsewhere)
    assert shop.client.finished(shop.client.launch(["checked"], here)) == "SUCCESS"
    shop.agrees()
    facts = sql(
        shop.store,
        "select dataid, generation, rows, location from chunkfact where datasetid = 'checked'",
    )
    ui.open_partitions("checked")
    assert {each for each, *_ in facts} == {here, elsewhere}

    for each, generation, rows, location in facts:
        told = metadata(ui, each)
        ui.shoot(f"ui_chunk_{each}")
        assert told["opendataflow/generation"] == str(generation)
        assert told["opendataflow/rows"] == told["dagster/row_count"] == str(rows)
        assert told["opendataflow/location"] == location == f"s3://shop/checked/{each}.csv"
        assert '"sales"' in told["opendataflow/inputs"]
        assert "sales: generation" in told["opendataflow/right"]
        assert ("opendataflow/log" in told) == (each == here)
