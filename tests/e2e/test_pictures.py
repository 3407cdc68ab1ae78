"""The pictures of Dagster in docs/images/: `make pictures` takes them again. Look at each."""

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from opendataflow_dagster.chunk import note_failed_checks
from opendataflow_dagster.flow.apply import apply_flow
from opendataflow_dagster.model import Claim, Fact
from opendataflow_dagster.store import open_store, operations
from opendataflow_dagster.store.store import Store
from tests.support.browser import SCROLL, UI
from tests.support.code_locations import pictured
from tests.support.dagster_servers import ROOT, Dagster
from tests.support.graphql_client import wait_for
from tests.support.store_fixtures import close, put

pytestmark = pytest.mark.pictures

IMAGES = ROOT / "docs" / "images"
MAX_BYTES = 150_000
WIDTH, MENU = 1280, 240
AGREES = "The grid agrees with the tables."
CHECKS_PASSED = "has_rows passed; has_prices passed"
RESUBMIT = """\
ops:
  opendataflow_resubmit_chunks:
    config:
      job: check
      chunks: ["2026-11-05"]
      downstream: true
      reason: north sent it again
      dry_run: true
"""


def day(number: int) -> str:
    return f"2026-11-{number:02}"


class Shop:
    """A month of the shop, made by the nightly run on a host of its own."""

    def __init__(self, store: Store, dagster: Dagster) -> None:
        self.store, self.client = store, dagster.client
        self.held: list[Claim] = []

    def claim(self, job: str, number: int, process: str = "4711:0a1b2c3d") -> Claim:
        owner = f"etl@night-1:{process}.1"
        [claim] = self.store.claim(job, owner=owner, only=day(number), lease=3600)
        return claim

    def fact(self, dataset: str, number: int, *, valid: bool = True, checks: str | None) -> Fact:
        place = f"{pictured.PLACE}/{dataset}/{day(number)}.csv"
        rows = 1000 + 37 * number if dataset == "checked" else 12
        return Fact(dataset, day(number), place, rows, 48 * rows, validated=valid, checks=checks)

    def make(self, job: str, dataset: str, numbers: range, **claim: str) -> None:
        checks = CHECKS_PASSED if job == "check" else None
        for number in numbers:
            fact = self.fact(dataset, number, checks=checks)
            self.store.finish(self.claim(job, number, **claim), [fact])

    def refuse(self, number: int, check: str, why: str, **claim: str) -> None:
        """A chunk that fails a check."""
        held = self.claim("check", number, **claim)
        line = f"has_rows passed; {check} failed: {why}"
        note_failed_checks(
            self.store, held, [self.fact("checked", number, valid=False, checks=line)]
        )
        self.store.fail(held, f"NOT_VALIDATED: {check}: {why}")

    def agrees(self) -> None:
        wait_for(
            lambda: self.client.next_tick("opendataflow_reconcile")["skipReason"],
            AGREES.__eq__,
            60,
            "the grid agrees",
        )


@pytest.fixture(scope="module")
def storage() -> str:
    return "sqlite"


@pytest.fixture(scope="module")
def shop(
    chromium: Any, start_dagster: Callable[..., Dagster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    url = f"sqlite:///{tmp_path_factory.mktemp('shop')}/tables.db"
    store = open_store(url)
    store.init()
    apply_flow(store, pictured.flow)
    operations.ready(store, "sales", [day(number) for number in range(1, 28)], who="tills@north")
    for number in range(28, 31):
        put(store, "sales", day(number), "PENDING", jobid="external")
    location, env = pictured.__name__, {"DATAFLOW_URL": url}
    shop = Shop(store, start_dagster(location, name="shop", env=env))
    shop.agrees()
    run = shop.client.launch(["checked"], day(1))
    assert shop.client.finished(run) == "SUCCESS"
    shop.make("check", "checked", range(2, 16))
    shop.refuse(16, "has_prices", "line 7 has no price")
    shop.refuse(17, "has_prices", "lines 12 and 13 have no price")
    shop.make("check", "checked", range(18, 19), process="4712:1b2c3d4e")
    shop.make("report", "report", range(1, 14), process="4713:2c3d4e5f")
    operations.resubmit(store, "external", [day(5)], who="tills@north", why="north sent it again")
    operations.ready(store, "sales", [day(5)], who="tills@north")
    shop.held = [shop.claim("check", number, "4714:3d4e5f60") for number in (19, 20)]
    shop.agrees()
    yield shop
    close(store)


@pytest.fixture
def ui(page: Page, shop: Shop) -> UI:
    page.set_viewport_size({"width": WIDTH, "height": 860})
    return UI(page, shop.client.url)


def shoot(ui: UI, name: str) -> None:
    """Keep a picture of what is to the right of the menu."""
    size = ui.page.viewport_size or {}
    ui.page.mouse.move(size["width"] - 1, 1)  # no tooltip
    ui.page.wait_for_timeout(2000)  # what is drawn slowly, such as plots
    clip = {"x": MENU, "y": 0, "width": size["width"] - MENU, "height": size["height"]}
    path = IMAGES / f"{name}.png"
    ui.page.screenshot(path=path, clip=clip)
    assert path.stat().st_size < MAX_BYTES, f"{name} is large: crop it"


def test_the_grid(shop: Shop, ui: UI) -> None:
    ui.open_partitions("checked")
    assert ui.counts() == {"green": 16, "red": 2, "blue": 2, "missing": 10}
    ui.choose(day(15))
    ui.page.get_by_text("odf why check").wait_for()
    ui.page.evaluate(SCROLL, 0.7)  # to where the colours are
    shoot(ui, "grid")


def test_the_run_of_a_red_square(shop: Shop, ui: UI) -> None:
    ui.open(f"/assets/checked?view=partitions&partition={day(17)}")
    told = ui.page.get_by_text("failed, and did not materialize this asset")
    expect(told).to_be_visible()
    ui.page.set_viewport_size({"width": WIDTH, "height": 760})
    ui.open(str(told.get_by_role("link").get_attribute("href")))
    ui.page.get_by_text("odf resubmit check 2026-11-16").wait_for()
    shoot(ui, "failed_run")


def test_the_launchpad(shop: Shop, ui: UI) -> None:
    ui.page.set_viewport_size({"width": WIDTH, "height": 760})
    setup = "/locations/shop/jobs/opendataflow_resubmit/playground/setup?config="
    ui.open(setup + quote(RESUBMIT))
    ui.page.get_by_text("No errors").wait_for()
    ui.page.get_by_text("downstream", exact=True).click()
    shoot(ui, "resubmit")


def test_checks_from_outside(shop: Shop, ui: UI) -> None:
    ui.page.set_viewport_size({"width": WIDTH, "height": 520})
    ui.open("/assets/checked?view=checks")
    ui.page.get_by_text("has_prices").first.click()
    expect(ui.page.get_by_text("lines 12 and 13 have no price")).to_be_visible()
    shoot(ui, "checks")


def test_the_lineage_of_a_stale_chunk(shop: Shop, ui: UI) -> None:
    """As nothing is running, nothing spins."""
    facts = [shop.fact("checked", number, checks=CHECKS_PASSED) for number in (19, 20)]
    shop.store.finish(shop.held, facts)
    shop.agrees()
    ui.page.set_viewport_size({"width": 1760, "height": 560})
    ui.open("/assets/report?view=lineage&lineageScope=upstream&lineageDepth=2")
    ui.page.get_by_text("2 / 3 Passed").wait_for()
    shoot(ui, "lineage")
