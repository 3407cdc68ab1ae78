"""Pipeline runs started by `every_minutes`, and chunks that are offered by name."""

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from threading import Barrier

import pytest

from opendataflow_dagster.model import Plan
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.catalog import read_catalog
from opendataflow_dagster.store.claims import offer
from opendataflow_dagster.store.items import (
    ITEMS_ONLY,
    RUN_NAME_FORMAT,
    Post,
    accept,
    begin_due_runs,
    new_run,
    offer_run,
    without_items,
)
from opendataflow_dagster.store.registry import add_dataset, set_policy
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import (
    check,
    close,
    policy,
    put,
    register,
    sql,
    status,
    statuses,
    take,
)


@pytest.fixture
def daily(store: Store) -> Store:
    """A pipeline `daily` without upstream inputs, which writes `sums` every five minutes."""
    register(store, "daily", [], ["sums"])
    policy(store, "daily", every_minutes=5)
    return store


def ago(store: Store, minutes: float) -> str:
    """Return the dataid of a run that began so many minutes ago."""
    moment = datetime.fromtimestamp(store.now(), UTC) - timedelta(minutes=minutes)
    return moment.strftime(RUN_NAME_FORMAT)[:-4] + "Z"


def begun(store: Store) -> list[str]:
    found = begin_due_runs(store, ["daily", "other"])
    assert all(jobid == "daily" for jobid, _ in found)
    return [dataid for _, dataid in found]


def test_a_run_begins_at_once_and_then_after_every_so_many_minutes(daily: Store) -> None:
    [first] = begun(daily)
    assert (
        abs(datetime.strptime(first, RUN_NAME_FORMAT).replace(tzinfo=UTC).timestamp() - daily.now())
        < 60
    )
    assert statuses(daily) == {("sums", "daily", first): ("OUT", "PENDING")}
    [(who,)] = sql(daily, "select who from dataevent where status_after = 'PENDING'")
    assert who == "every_minutes"
    check(daily)
    assert begun(daily) == []  # it waits

    [claim] = take(daily, "daily")
    assert claim.dataid == first
    assert begun(daily) == []  # it is at work
    daily.finish(claim)
    assert begun(daily) == []  # it was just now
    check(daily)


@pytest.mark.parametrize("ended", ["READY", "FAILED", "HOLD"])
def test_a_run_is_due_however_the_last_one_ended(daily: Store, ended: str) -> None:
    put(daily, "sums", ago(daily, 4.9), ended, jobid="daily")
    assert begun(daily) == []
    set_policy(daily, "daily", {"every_minutes": "3"})
    assert len(begun(daily)) == 1


def test_resubmitted_runs_come_first(daily: Store) -> None:
    old = ago(daily, 60)
    put(daily, "sums", old, "RESUBMIT", jobid="daily")
    assert begun(daily) == []
    [claim] = take(daily, "daily")
    daily.finish(claim)
    assert len(begun(daily)) == 1


def test_without_the_dial_or_while_paused_no_run_begins(daily: Store) -> None:
    policy(daily, "daily", paused_until="2999-01-01 00:00:00")
    assert begun(daily) == []
    policy(daily, "daily", paused_until="2001-01-01 00:00:00")
    policy(daily, "daily", every_minutes=None)
    assert begun(daily) == []
    policy(daily, "daily", every_minutes=5)
    assert begin_due_runs(daily, ["other"]) == []
    policy(daily, "other", every_minutes=5)
    assert begin_due_runs(daily, ["other"]) == []  # it isn't registered
    assert len(begun(daily)) == 1


def test_of_several_sensors_one_begins_the_run(daily: Store, url: str) -> None:
    start = Barrier(6)
    stores = [open_store(url) for _ in range(6)]

    def ask(store: Store) -> list[tuple[str, str]]:
        start.wait()
        try:
            return begin_due_runs(store, ["daily"])
        finally:
            store.db.drop()

    with ThreadPoolExecutor(6) as pool:
        found = [each for some in pool.map(ask, stores) for each in some]
    for each in stores:
        close(each)
    assert len(found) == 1
    assert len(statuses(daily)) == 1


def test_chunks_of_other_names_and_items_dont_count(daily: Store) -> None:
    [accepted] = accept(daily, [Post("daily", ("{}", "{}"))])
    put(daily, "sums", "zulu", jobid="daily")
    [run] = begun(daily)
    assert begun(daily) == []
    assert run not in accepted.dataids  # type: ignore[union-attr]


def test_items_are_left_out_of_what_is_offered(daily: Store) -> None:
    nothing = offer(daily, "daily")
    assert without_items(daily, nothing) == nothing
    accept(daily, [Post("daily", ("{}", "{}"))])
    found = without_items(daily, offer(daily, "daily"))
    assert (found.first, found.claimable, found.obstacle) == (None, 0, ITEMS_ONLY)

    run = new_run(daily, "daily")
    found = without_items(daily, offer(daily, "daily"))
    assert (found.first, found.claimable, found.obstacle) == (run, 1, "")
    assert found.event > 0


def test_a_chunk_is_offered_by_its_name_unless_it_is_there(daily: Store) -> None:
    assert take(daily, "daily", only="mine") == []
    assert offer_run(daily, "daily", "mine", who="dagster run 1")
    assert not offer_run(daily, "daily", "mine", who="dagster run 2")
    assert [each.dataid for each in take(daily, "daily", only="mine")] == ["mine"]
    put(daily, "sums", "theirs", jobid="another")
    assert not offer_run(daily, "daily", "theirs", who="dagster run 1")
    assert status(daily, "sums", "theirs", "daily") is None
    check(daily)


def test_a_catalog_with_pipelines_is_what_it_is_once_they_are_registered(store: Store) -> None:
    add_dataset(store, "orders", hostname="there", tablename="orders")
    register(store, "load", [], ["orders"])
    plans = {
        "clean": Plan("clean", ("orders",), ("cleaned",), (("project", "shop"),), (), False),
        "report": Plan("report", ("cleaned",), ("report",), (("project", "shop"),), (), False),
        "daily": Plan("daily", (), ("daily",), (("project", "shop"),), (), False),
    }
    before = read_catalog(store)
    made = before.with_jobs(plans)
    assert before.with_jobs({}) == before
    for plan in plans.values():
        register(store, plan.jobid, plan.inputs, plan.outputs, project="shop")
    assert made == read_catalog(store)
    assert made.domains == {
        "orders": "orders",
        "cleaned": "orders",
        "report": "orders",
        "daily": "daily",
    }
