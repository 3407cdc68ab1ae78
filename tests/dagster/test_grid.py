"""The grid of a Dagster instance, read and written through Dagster's internals."""

import time
from types import SimpleNamespace

import dagster as dg
import pytest

from opendataflow_dagster.dagster.events import VERSION_TAG
from opendataflow_dagster.dagster.grid import Mirror
from opendataflow_dagster.dagster.public_grid import our_run
from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.model import FAILED, READY, RUNNING

KEY = dg.AssetKey(["orders"])
PARTS = dg.DynamicPartitionsDefinition(name="d")


def made(*partitions: str, version: str = "1") -> list[dg.AssetMaterialization]:
    return [
        dg.AssetMaterialization(KEY, partition=each, tags={VERSION_TAG: version})
        for each in partitions
    ]


def show(mirror: Mirror, status: str, *partitions: str) -> str:
    """Show partitions by a run of ours; return its id."""
    run_id = our_run(status)
    if not mirror.instance.has_run(run_id):
        unfinished = status == RUNNING
        state = dg.DagsterRunStatus.MANAGED if unfinished else dg.DagsterRunStatus.FAILURE
        mirror.instance.add_run(dg.DagsterRun("job", run_id, status=state))
    mirror.plan(KEY, dict.fromkeys(partitions, (run_id, "job")))
    return run_id


@pytest.fixture
def mirror(instance: dg.DagsterInstance) -> Mirror:
    instance.add_dynamic_partitions("d", ["1", "2", "3"])
    return Mirror(instance)


def test_each_status_has_its_own_square(mirror: Mirror) -> None:
    mirror.make(made("1"))
    assert mirror.grid(KEY, PARTS) == {"1": READY}
    show(mirror, RUNNING, "2")
    show(mirror, FAILED, "3")
    assert mirror.grid(KEY, PARTS) == {"1": READY, "2": RUNNING, "3": FAILED}
    show(mirror, FAILED, "1", "2")
    mirror.forget_cache(KEY)
    assert mirror.grid(KEY, PARTS) == {"1": FAILED, "2": FAILED, "3": FAILED}
    mirror.make(made("1", "3", version="2"))
    assert mirror.grid(KEY, PARTS) == {"1": READY, "2": FAILED, "3": READY}


def test_the_stored_events_give_version_and_run(mirror: Mirror) -> None:
    mirror.make(made("1", "2", version="17"))
    red, blue = show(mirror, FAILED, "2"), show(mirror, RUNNING, "3")
    shown = mirror.shown(KEY, ["1", "2", "3", "never"])
    assert [(each.state, each.version, each.run_id, each.live) for each in shown.values()] == [
        (READY, "17", "", False),
        (FAILED, "17", red, False),
        (RUNNING, None, blue, False),
    ]
    assert mirror.shown(KEY) == shown


def test_a_square_can_be_made_missing_again(mirror: Mirror) -> None:
    mirror.make(made("1", "2"))
    show(mirror, FAILED, "3")
    assert len(mirror.grid(KEY, PARTS)) == 3
    mirror.clear(KEY, ["1", "3"])
    assert mirror.grid(KEY, PARTS) == {"2": READY}
    assert mirror.shown(KEY).keys() == {"2"}


def test_a_real_run_is_live_until_it_ends(mirror: Mirror, instance: dg.DagsterInstance) -> None:
    @dg.asset(partitions_def=PARTS, key=KEY)
    def orders() -> None:
        shown = mirror.shown(KEY, ["1"])["1"]
        assert (shown.state, shown.live) == (RUNNING, True)
        raise dg.Failure("as it was told", allow_retries=False)

    done = dg.materialize([orders], instance=instance, partition_key="1", raise_on_error=False)
    shown = mirror.shown(KEY, ["1"])["1"]
    assert (shown.state, shown.run_id) == (FAILED, done.run_id)
    assert mirror.unfinished({done.run_id}) == set()


def test_news_are_the_events_of_others(mirror: Mirror, instance: dg.DagsterInstance) -> None:
    start = mirror.newest()
    mirror.make(made("1", "2"))
    assert mirror.news(start, [KEY]).touched == {}
    instance.report_runless_asset_event(dg.AssetMaterialization(KEY, partition="2"))
    instance.report_runless_asset_event(dg.AssetMaterialization("other", partition="2"))
    assert mirror.news(start, [KEY]).touched == {KEY.to_string(): {"2"}}


def test_news_of_the_last_seconds_are_repeated_but_older_ones_are_not(
    mirror: Mirror, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance.report_runless_asset_event(dg.AssetMaterialization(KEY, partition="2"))
    first = mirror.news(0, [KEY])
    assert mirror.news(first.cursor, [KEY]).touched == first.touched
    now = time.time()
    clock = SimpleNamespace(time=lambda: now + 60)
    monkeypatch.setattr("opendataflow_dagster.dagster.grid.time", clock)
    later = mirror.news(first.cursor, [KEY])
    assert later.touched == first.touched
    assert mirror.news(later.cursor, [KEY]).touched == {}


def test_a_run_that_ended_touches_all_that_it_planned(
    mirror: Mirror, instance: dg.DagsterInstance
) -> None:
    @dg.asset(partitions_def=PARTS, key=KEY)
    def orders() -> None:
        raise dg.Failure("as it was told", allow_retries=False)

    dg.materialize([orders], instance=instance, partition_key="3", raise_on_error=False)
    planned = instance.event_log_storage.get_latest_planned_materialization_info(KEY)
    assert planned is not None
    assert mirror.news(planned.storage_id, [KEY]).touched == {KEY.to_string(): {"3"}}


def test_marks_change_when_events_vanish(mirror: Mirror, instance: dg.DagsterInstance) -> None:
    def marks() -> dict:
        return mirror.marks([KEY], ["d"])

    mirror.make(made("1"))
    show(mirror, FAILED, "2")
    seen = marks()
    assert marks() == seen
    instance.wipe_assets([KEY])
    assert marks()["assets"] != seen["assets"]
    instance.delete_dynamic_partition("d", "3")
    assert marks()["partitions"] != seen["partitions"]
    instance.add_dynamic_partitions("d", ["4"])
    assert marks()["partitions"] != seen["partitions"]
    assert not mirror.runs_were_deleted(*seen["runs"])
    show(mirror, RUNNING, "2")
    assert not mirror.runs_were_deleted(*seen["runs"])
    instance.delete_run(instance.get_runs()[-1].run_id)
    assert mirror.runs_were_deleted(*seen["runs"])


def test_a_wiped_asset_shows_nothing(mirror: Mirror, instance: dg.DagsterInstance) -> None:
    mirror.make(made("1"))
    show(mirror, FAILED, "2")
    instance.wipe_assets([KEY])
    assert mirror.shown(KEY) == {}
    assert mirror.grid(KEY, PARTS) == {}


def test_keys_are_replaced_atomically_and_never_duplicated(mirror: Mirror) -> None:
    mirror.replace_keys("d", ["2", "3"], ["1.5", "2", "3", "1"])
    assert mirror.keys("d") == ["1", "1.5", "2", "3"]
    assert mirror.last_keys("d", 2) == ["2", "3"]
    assert mirror.existing("d", ["1.5", "nope"]) == {"1.5"}


def test_thousands_of_events_are_written_in_batches(mirror: Mirror) -> None:
    many = [str(number) for number in range(2500)]
    mirror.replace_keys("d", ["1", "2", "3"], many)
    mirror.make(made(*many))
    assert len(mirror.grid(KEY, PARTS)) == 2500
    assert len(mirror.shown(KEY, many)) == 2500
    mirror.clear(KEY, many)
    assert mirror.grid(KEY, PARTS) == {}


def test_a_storage_that_cannot_be_mirrored_is_refused_in_one_line() -> None:
    class Other:
        event_log_storage = run_storage = object()

    with pytest.raises(WrongUse, match=r"in object, which can't show statuses .* dagster-postgres"):
        Mirror(Other())  # type: ignore[arg-type]


def test_events_after_a_cleared_square_are_seen(mirror: Mirror) -> None:
    mirror.make(made("1", "2"))
    assert len(mirror.grid(KEY, PARTS)) == 2, "and the cache knows of the newest event"
    mirror.clear(KEY, ["1", "2"])
    assert mirror.grid(KEY, PARTS) == {}
    mirror.make(made("3", version="2"))
    assert mirror.grid(KEY, PARTS) == {"3": READY}
    show(mirror, RUNNING, "1")
    assert mirror.grid(KEY, PARTS) == {"1": RUNNING, "3": READY}


def test_a_cleared_event_stays_in_the_log_of_its_run(
    mirror: Mirror, instance: dg.DagsterInstance
) -> None:
    @dg.asset(partitions_def=PARTS, key=KEY)
    def orders() -> None: ...

    done = dg.materialize([orders], instance=instance, partition_key="1")
    kinds = [each.dagster_event_type for each in instance.all_logs(done.run_id)]
    mirror.clear(KEY, ["1"])
    assert mirror.grid(KEY, PARTS) == {}
    assert [each.dagster_event_type for each in instance.all_logs(done.run_id)] == kinds


def test_events_after_a_removed_run_are_shown(mirror: Mirror) -> None:
    """SQLite would reuse the numbers of its events, and the cache would skip the new ones."""
    mirror.make(made("1"))
    for part in ("2", "3"):
        run_id = show(mirror, FAILED, part)
        assert mirror.grid(KEY, PARTS)[part] == FAILED
        mirror.remove_run(run_id)
        assert not mirror.instance.has_run(run_id)
        mirror.make(made(part), observed=False)
        assert mirror.grid(KEY, PARTS)[part] == READY
