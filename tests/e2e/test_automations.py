"""Automation conditions in a real daemon: what is stale is made again, and what isn't is skipped.

The tests share one running Dagster, and follow one another.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from opendataflow_dagster.dagster.outside import OUTSIDE_TAG
from opendataflow_dagster.explain.explain import staleness
from opendataflow_dagster.store import open_store, operations, registry
from opendataflow_dagster.store.store import Store
from tests.support.browser import UI
from tests.support.dagster_servers import Dagster
from tests.support.graphql_client import Client, wait_for
from tests.support.store_fixtures import close, statuses

pytestmark = pytest.mark.timeout(300)  # runs of their own processes, and a minute's cron

READERS = {"report": "reports", "changes": "changed", "first": "firsts", "minutely": "minutes"}


class Automatic:
    """`orders` come from outside; `clean` reads them, and four jobs read its output."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.url = folder, f"sqlite:///{folder / 'dataflow.db'}"
        self.store: Store = open_store(self.url)
        self.store.init()
        registry.add_job(self.store, "clean", ["orders"], ["cleaned"])
        for jobid, datasetid in READERS.items():
            registry.add_job(self.store, jobid, ["cleaned"], [datasetid])
        self.has("one")

    dagster: Dagster

    @property
    def client(self) -> Client:
        return self.dagster.client

    def has(self, content: str) -> None:
        """Return what `clean` finds in the orders."""
        (self.folder / "content").write_text(content)

    def arrive(self, day: str) -> None:
        """Write orders, for the first time or again."""
        if ("orders", operations.EXTERNAL, day) in statuses(self.store, day):
            operations.resubmit(self.store, operations.EXTERNAL, [day])
        operations.ready(self.store, "orders", [day])

    def made(self) -> Counter[str]:
        path = self.folder / "produced"
        lines = path.read_text().splitlines() if path.exists() else []
        return Counter(line.split()[0] for line in lines)

    def becomes(self, **made: int) -> None:
        """Wait until jobs have produced so many chunks in total."""
        wait_for(
            lambda: {jobid: self.made()[jobid] for jobid in made},
            made.__eq__,
            60,
            f"made are {made}",
        )

    def told(self, dataset: str, day: str) -> list[bool]:
        """Return, for each materialization of a chunk in order, whether it was skipped."""
        events = self.client.materializations(dataset, day)
        return [bool(each.metadata.get("opendataflow/skipped")) for each in reversed(events)]

    def calms_down(self) -> Counter[str]:
        """Wait until nothing more is launched; return what was produced by then."""
        while (before := self.ended()) is None or self.looked() or before != self.ended():
            time.sleep(0.2)
        return self.made()

    def ended(self) -> int | None:
        """Return how many runs there are; None while one of them hasn't ended."""
        # A tick may see a chunk between READY and RUNNING, and show that by a run, too.
        runs = [run for run in self.client.runs() if OUTSIDE_TAG not in run["tags"]]
        return len(runs) if all(run["status"] == "SUCCESS" for run in runs) else None

    def looked(self) -> None:
        """Wait until the mirror has read the tables, and the conditions everything it reported."""
        for sensor in ("opendataflow_reconcile", "automation", "automation"):
            self.client.next_tick(sensor)

    def agrees(self, day: str) -> None:
        """Dagster calls stale what the tables call stale."""
        for jobid, dataset in ({"clean": "cleaned"} | READERS).items():
            if statuses(self.store, day).get((dataset, jobid, day), (None, ""))[1] == "READY":
                stale = bool(staleness(self.store, jobid, day).line)
                shown = self.client.stale_status(dataset, day)
                assert (dataset, shown) == (dataset, "STALE" if stale else "FRESH")


@pytest.fixture(scope="module")
def automatic(
    start_dagster: Callable[..., Dagster], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Automatic]:
    made = Automatic(tmp_path_factory.mktemp("automatic"))
    made.dagster = start_dagster(
        "tests.support.code_locations.automatic",
        name="automatic",
        env={"DATAFLOW_URL": made.url, "FLOW_FOLDER": str(made.folder)},
    )
    yield made
    made.dagster.close()
    close(made.store)


@pytest.fixture(scope="module", params=["sqlite"])
def storage(request: pytest.FixtureRequest) -> str:
    """One Dagster: conditions are evaluated alike on the other storage."""
    return request.param


DAY = "2026-11-01"


def test_new_data_flows_through_all_eager_assets(automatic: Automatic) -> None:
    automatic.arrive(DAY)
    automatic.becomes(clean=1, report=1, changes=1, first=1)
    automatic.calms_down()
    assert automatic.made() - Counter({"minutely": 9}) == dict(
        clean=1, report=1, changes=1, first=1
    )
    automatic.agrees(DAY)


def test_producing_the_same_data_again_ends_in_skips(automatic: Automatic) -> None:
    before = {dataset: automatic.told(dataset, DAY) for dataset in READERS.values()}
    automatic.arrive(DAY)
    automatic.becomes(clean=2)
    made = automatic.calms_down()
    assert (made["report"], made["changes"], made["first"]) == (1, 1, 1)
    assert automatic.told("reports", DAY) == [*before["reports"], True], "eager looked in vain"
    assert automatic.told("changed", DAY) == before["changed"], "launched for the same data"
    assert automatic.told("firsts", DAY) == before["firsts"]
    automatic.agrees(DAY)


def test_producing_other_data_updates_downstream_assets(automatic: Automatic) -> None:
    automatic.has("two")
    automatic.arrive(DAY)
    automatic.becomes(clean=3, report=2, changes=2)
    made = automatic.calms_down()
    assert (made["clean"], made["report"], made["changes"]) == (3, 2, 2)
    assert made["first"] == 1, "it isn't missing"
    assert automatic.client.stale_status("firsts", DAY) == "STALE"
    automatic.agrees(DAY)


def test_the_page_of_a_stale_partition_says_so(automatic: Automatic, page: Any) -> None:
    ui = UI(page, automatic.dagster.url)
    ui.open(f"/assets/firsts?view=partitions&partition={DAY}")
    expect(page.get_by_text("Unsynced")).to_be_visible()
    ui.shoot("stale")
    ui.open("/assets/firsts?view=checks")
    expect(
        page.get_by_text(f"1 chunk is stale: {DAY}. Run: odf resubmit first --stale")
    ).to_be_visible()


def test_a_cron_condition_runs_once_a_minute_at_most(automatic: Automatic) -> None:
    before = automatic.made()["minutely"]
    minute = time.time() // 60
    wait_for(lambda: time.time() // 60, lambda now: now > minute, 61, "a minute begins", 0.5)
    time.sleep(2)  # an evaluation sees it before the input comes
    automatic.has("three")
    automatic.arrive(DAY)
    automatic.becomes(minutely=before + 1)
    automatic.calms_down()
    assert automatic.made()["minutely"] == before + 1
    automatic.agrees(DAY)
