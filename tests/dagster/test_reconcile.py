"""The grid shows what the tables say, whatever happened to either."""

import json
import random
import sqlite3
import time
from contextlib import closing, suppress
from pathlib import Path

import dagster as dg
import pytest
from sqlalchemy import event
from sqlalchemy.engine import Engine

from opendataflow_dagster.dagster.drift import drift
from opendataflow_dagster.dagster.grid import Mirror
from opendataflow_dagster.dagster.reconcile import reconcile, repair
from opendataflow_dagster.model import FAILED, READY, RUNNING, new_owner
from opendataflow_dagster.store import operations, registry
from opendataflow_dagster.store.item_folding import fold_items
from opendataflow_dagster.store.items import Accepted, Post, accept
from opendataflow_dagster.store.store import Store
from tests.support.dagster_instances import NAMES, Grid
from tests.support.store_fixtures import register, sql, take


class Killed(BaseException):
    """Ends a tick like a kill."""


WEEK = [f"2026-11-{day:02d}" for day in range(2, 9)]


def make(store: Store, *dataids: str, jobid: str = "copy", fail: bool = False) -> None:
    for dataid in dataids:
        [claim] = store.claim(jobid, owner=new_owner(), only=dataid)
        if fail:
            store.fail(claim, "as it was told")
        else:
            store.finish(claim)


def test_every_status_of_any_producer_has_its_square(grid: Grid) -> None:
    store = grid.store
    operations.ready(store, "orders", WEEK)
    make(store, *WEEK[:2])
    make(store, WEEK[2], fail=True)
    operations.hold(store, "copy", [WEEK[3]])
    store.claim("copy", owner=new_owner(), only=WEEK[4])
    sql(
        store,
        "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
        "values ('copies', 'java', 'by hand', 'OUT', 'READY')",
    )
    grid.tick()
    assert grid.squares("orders") == dict.fromkeys(WEEK, READY)
    assert grid.squares("copies") == {
        WEEK[0]: READY,
        WEEK[1]: READY,
        WEEK[2]: FAILED,
        WEEK[3]: FAILED,
        WEEK[4]: RUNNING,
        "by hand": READY,
    }
    assert grid.keys() == [*WEEK, "by hand"]
    grid.agrees()


def test_a_chunk_is_followed_through_its_life(grid: Grid) -> None:
    store = grid.store
    operations.ready(store, "orders", ["1"])
    [claim] = store.claim("copy", owner=new_owner())
    grid.tick()
    assert grid.squares("copies") == {"1": RUNNING}
    store.fail(claim, "no")
    grid.tick()
    assert grid.squares("copies") == {"1": FAILED}
    operations.resubmit(store, "copy", ["1"])
    grid.tick()
    assert grid.squares("copies") == {"1": FAILED}
    [claim] = store.claim("copy", owner=new_owner())
    grid.tick()
    assert grid.squares("copies") == {"1": RUNNING}
    store.finish(claim)
    grid.tick()
    assert grid.squares("copies") == {"1": READY}
    operations.resubmit(store, "copy", ["1"])
    make(store, "1")
    done = grid.tick()
    assert done.made == 1, "READY again is another generation: consumers may want to know"
    operations.resubmit(store, "copy", ["1"])
    operations.delete_run(store, "copy", "1")
    grid.tick()
    assert grid.squares("copies") == {}
    grid.agrees()


def test_a_materialization_has_the_facts_about_its_chunk(grid: Grid) -> None:
    from opendataflow_dagster.model import Fact

    operations.ready(grid.store, "orders", ["1"])
    [claim] = grid.store.claim("copy", owner=new_owner())
    grid.store.finish(claim, [Fact("copies", "1", location="/data/copies/1", rows=17, bytes=4)])
    grid.tick()
    [record] = grid.instance.fetch_materializations(NAMES.asset_key("copies"), limit=5).records
    event = record.asset_materialization
    assert event is not None
    told = {name: value.value for name, value in event.metadata.items()}
    assert told["opendataflow/rows"] == 17
    assert told["opendataflow/location"] == "/data/copies/1"
    assert told["opendataflow/generation"] == claim.generation
    assert told["opendataflow/job"] == "copy"
    [came] = grid.instance.fetch_materializations(NAMES.asset_key("orders"), limit=5).records
    assert event.tags == {
        "dagster/data_version": str(claim.generation),
        "dagster/code_version": "UNKNOWN",
        "dagster/input_data_version/orders": str(told["opendataflow/inputs"]["orders"]),
        "dagster/input_event_pointer/orders": str(came.storage_id),
    }


def test_chunks_can_be_deleted_and_renamed(grid: Grid) -> None:
    operations.ready(grid.store, "orders", WEEK)
    make(grid.store, *WEEK)
    grid.tick()
    sql(grid.store, f"delete from datastatus where dataid = '{WEEK[0]}'")
    sql(grid.store, f"update datastatus set dataid = 'renamed' where dataid = '{WEEK[1]}'")
    grid.tick()
    expected = {**dict.fromkeys(WEEK[2:], READY), "renamed": READY}
    assert grid.squares("orders") == grid.squares("copies") == expected
    assert grid.keys() == [*WEEK[2:], "renamed"]
    grid.agrees()


def test_folded_items_leave_the_grid(grid: Grid) -> None:
    register(grid.store, "live", [], ["sold"])
    [answer] = accept(grid.store, [Post("live", ("1", "2", "3"))])
    assert isinstance(answer, Accepted)
    for claim in take(grid.store, "live", k=2):
        grid.store.finish(claim)
    grid.tick()
    assert grid.squares("sold", "sold") == dict.fromkeys(answer.dataids[:2], READY)
    sql(grid.store, "update streamitem set received = '2026-01-01 00:00:00'")
    sql(grid.store, "update chunkfact set at = '2026-01-01 00:00:00'")

    assert fold_items(grid.store) == 2
    grid.tick()

    assert grid.keys("sold") == [answer.dataids[2]]
    assert grid.squares("sold", "sold") == {}
    assert grid.tick().writes == 0
    grid.agrees(folded=True)


def test_a_whole_dataset_can_be_renamed(grid: Grid) -> None:
    """The domain keeps its name, and so do the partitions of what is made from the dataset."""
    operations.ready(grid.store, "orders", WEEK)
    grid.tick()
    sql(grid.store, "update datastatus set datasetid = 'other' where datasetid = 'orders'")
    sql(grid.store, "update dataset set datasetid = 'other' where datasetid = 'orders'")
    sql(grid.store, "update job set datasetid = 'other' where datasetid = 'orders'")
    grid.tick()
    assert grid.squares("other") == dict.fromkeys(WEEK, READY)
    assert (grid.keys(), grid.keys("other")) == (WEEK, [])
    grid.agrees()


def test_keys_are_in_natural_order_whenever_they_are_added(grid: Grid) -> None:
    for dataids in (["2", "10"], ["9"], ["1", "11"], ["100", "3"]):
        operations.ready(grid.store, "orders", dataids)
        grid.tick()
    assert grid.keys() == ["1", "2", "3", "9", "10", "11", "100"]
    assert len(grid.squares("orders")) == 7


ODD = ["a,b", 'say "x"', "a\nb", "...", "[1...3]", " lead", "%41", "ünïcode", "x" * 500, "a/b", "*"]


def test_odd_ids_are_mirrored_as_they_are(grid: Grid) -> None:
    operations.ready(grid.store, "orders", ODD)
    grid.tick()
    assert grid.squares("orders") == dict.fromkeys(ODD, READY)
    grid.agrees()


def test_what_a_person_changed_in_the_grid_is_repaired(grid: Grid) -> None:
    operations.ready(grid.store, "orders", WEEK)
    make(grid.store, WEEK[0])
    make(grid.store, WEEK[1], fail=True)
    grid.tick()
    orders, copies = NAMES.asset_key("orders"), NAMES.asset_key("copies")
    expected = {WEEK[0]: READY, WEEK[1]: FAILED}

    grid.instance.report_runless_asset_event(dg.AssetMaterialization(copies, partition=WEEK[1]))
    grid.instance.report_runless_asset_event(dg.AssetMaterialization(copies, partition=WEEK[5]))
    grid.tick()
    assert grid.squares("copies") == expected

    grid.instance.wipe_assets([orders, copies])
    grid.tick()
    assert grid.squares("copies") == expected
    assert grid.squares("orders") == dict.fromkeys(WEEK, READY)

    name = NAMES.partitions_name("orders")
    grid.instance.delete_dynamic_partition(name, WEEK[3])
    grid.instance.add_dynamic_partitions(name, ["nobody knows"])
    grid.tick()
    assert grid.keys() == WEEK

    for run in grid.instance.get_runs():
        grid.instance.delete_run(run.run_id)
    grid.tick()
    assert grid.squares("copies") == expected
    grid.agrees()


def test_with_the_storage_wiped_the_grid_is_rebuilt(grid: Grid) -> None:
    operations.ready(grid.store, "orders", WEEK)
    make(grid.store, *WEEK[:3])
    make(grid.store, WEEK[3], fail=True)
    grid.tick()
    before = grid.squares("orders"), grid.squares("copies"), grid.keys()
    grid.instance.wipe()
    Mirror(grid.instance).replace_keys(NAMES.partitions_name("orders"), grid.keys(), [])
    assert (grid.squares("copies"), grid.keys()) == ({}, [])
    grid.tick()
    assert (grid.squares("orders"), grid.squares("copies"), grid.keys()) == before
    grid.agrees()


@pytest.mark.parametrize("cursor", ["", "no JSON", '{"log": "of another store"}', '{"new": 1}'])
def test_an_invalid_cursor_starts_from_the_beginning(grid: Grid, cursor: str) -> None:
    operations.ready(grid.store, "orders", WEEK)
    if "another" in cursor:
        cursor = json.dumps({"log": "99999999:9999", "layout": "x"})
        if grid.store.db.dialect == "sqlite":
            cursor = json.dumps({"log": None, "layout": "x"})
    grid.cursor = cursor
    grid.tick()
    assert grid.squares("orders") == dict.fromkeys(WEEK, READY)
    grid.agrees()


def test_the_next_tick_continues_one_that_ran_out_of_time(grid: Grid) -> None:
    many = [str(number) for number in range(3500)]
    operations.ready(grid.store, "orders", many)
    ticks = 1
    done = grid.tick(seconds=0.0)
    while done.more:
        done = grid.tick(seconds=0.0)
        ticks += 1
    assert ticks > 1
    assert len(grid.squares("orders")) == 3500
    grid.agrees()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("step", ["replace_keys", "make", "plan", "clear", "forget_cache"])
def test_after_a_kill_anywhere_the_next_tick_repairs(
    grid: Grid, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, real = grid.store, getattr(Mirror, step)
    operations.ready(store, "orders", WEEK)
    make(store, WEEK[0], WEEK[1])
    make(store, WEEK[2], WEEK[3], fail=True)
    grid.tick()
    for number, when in enumerate(("before", "after")):
        operations.ready(store, "orders", [f"2026-12-0{number + 1}"])
        make(store, WEEK[4 + number])
        operations.resubmit(store, "copy", [WEEK[number]])
        operations.delete_run(store, "copy", WEEK[2 + number])

        def dies(self: Mirror, *details: object, when: str = when, **more: object) -> None:
            if when == "after":
                real(self, *details, **more)
            raise Killed

        with monkeypatch.context() as patched:
            patched.setattr(Mirror, step, dies)
            with pytest.raises(Killed):
                grid.tick()
    grid.tick()
    assert grid.squares("copies") == {
        WEEK[0]: FAILED,
        WEEK[1]: FAILED,
        WEEK[4]: READY,
        WEEK[5]: READY,
    }
    assert grid.keys() == [*WEEK, "2026-12-01", "2026-12-02"]
    grid.agrees()


def test_a_live_run_is_left_to_report_its_end(grid: Grid) -> None:
    operations.ready(grid.store, "orders", WEEK)
    parts = NAMES.partitions_def("orders")
    grid.tick()
    seen: list[object] = []

    @dg.asset(key=NAMES.asset_key("copies"), partitions_def=parts)
    def copies() -> None:
        grid.tick()
        seen.append(grid.squares("copies"))
        seen.append(drift(grid.store, grid.mirror))
        raise dg.Failure("as it was told", allow_retries=False)

    dg.materialize([copies], instance=grid.instance, partition_key=WEEK[0], raise_on_error=False)
    assert seen == [{WEEK[0]: RUNNING}, []]
    assert grid.squares("copies") == {WEEK[0]: FAILED}
    grid.tick()
    assert grid.squares("copies") == {}, "the tables know of no attempt: the chunk is missing"
    grid.agrees()


def test_a_claim_of_a_live_run_leads_to_that_run(grid: Grid) -> None:
    operations.ready(grid.store, "orders", WEEK)
    grid.tick()

    @dg.op
    def works(context: dg.OpExecutionContext) -> None:
        owner = f"dagster:{context.run_id}"
        first, second = grid.store.claim("copy", owner=owner, k=2, runid=context.run_id)
        grid.tick()
        shown = grid.mirror.shown(NAMES.asset_key("copies"))
        assert {each.run_id for each in shown.values()} == {context.run_id}
        grid.store.fail(second, "no")
        grid.tick()
        assert grid.squares("copies") == {first.dataid: RUNNING, second.dataid: FAILED}
        grid.store.finish(first)

    @dg.job
    def catch_up() -> None:
        works()

    catch_up.execute_in_process(instance=grid.instance)
    grid.tick()
    assert grid.squares("copies") == {WEEK[0]: READY, WEEK[1]: FAILED}
    grid.agrees()


def test_two_reconcilers_at_once_agree_in_the_end(grid: Grid) -> None:
    from threading import Thread

    operations.ready(grid.store, "orders", [str(number) for number in range(300)])
    make(grid.store, *map(str, range(20)))

    def one() -> None:
        reconcile(grid.store, Mirror(grid.instance), NAMES)
        grid.store.db.drop()

    threads = [Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    grid.tick()
    assert len(grid.squares("orders")) == 300
    grid.agrees()


def test_registering_a_job_that_joins_domains_moves_the_keys(grid: Grid) -> None:
    registry.add_dataset(grid.store, "other")
    operations.ready(grid.store, "orders", WEEK)
    operations.ready(grid.store, "other", ["2026-11-01"])
    grid.tick()
    assert grid.keys("other") == ["2026-11-01"]
    registry.add_job(grid.store, "join", ["copies", "other"], ["joined"])
    grid.tick()
    assert grid.keys("orders") == ["2026-11-01", *WEEK]
    assert grid.squares("other") == {"2026-11-01": READY}


def test_repair_does_what_ticks_would(grid: Grid) -> None:
    operations.ready(grid.store, "orders", WEEK)
    make(grid.store, WEEK[0], fail=True)
    assert len(drift(grid.store, grid.mirror)) == 2 * len(WEEK) + 1
    done = repair(grid.store, grid.instance)
    assert (done.made, done.planned, done.keys, done.more) == (len(WEEK), 1, len(WEEK), False)
    assert drift(grid.store, grid.mirror) == []
    grid.tick()
    grid.agrees()


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_after_500_changes_from_all_sides_one_tick_agrees(grid: Grid, seed: int) -> None:
    chance = random.Random(seed)
    store, instance = grid.store, grid.instance
    registry.add_job(store, "again", ["copies"], ["more"])
    registry.add_dataset(store, "more")
    ids = [str(number) for number in range(40)]
    sets, jobs = ["orders", "copies", "more"], ["copy", "again"]
    parts = NAMES.partitions_name("orders")
    held: list = []

    def run(fail: bool) -> None:
        @dg.asset(
            key=NAMES.asset_key(chance.choice(sets)), partitions_def=NAMES.partitions_def("orders")
        )
        def some() -> None:
            if fail:
                raise dg.Failure("as it was told", allow_retries=False)

        keys = instance.get_dynamic_partitions(parts)
        if keys:
            dg.materialize(
                [some], instance=instance, partition_key=chance.choice(keys), raise_on_error=False
            )

    def die() -> None:
        """A process is killed at work, and its leases end."""
        store.claim(chance.choice(jobs), owner=new_owner(), k=2, lease=-1)
        store.recover()

    def killed_tick() -> None:
        """Run a tick that is killed before a statement that writes."""
        left = chance.randrange(1, 40)

        def count(_db: object, _cursor: object, statement: str, *_: object) -> None:
            nonlocal left
            left -= statement.lstrip().split()[0].upper() in ("INSERT", "UPDATE", "DELETE")
            if left < 0:
                raise Killed

        event.listen(Engine, "before_cursor_execute", count)
        try:
            with suppress(Killed):
                grid.tick()
        finally:
            event.remove(Engine, "before_cursor_execute", count)

    def settle(fail: bool) -> None:
        if held:
            claim = held.pop(chance.randrange(len(held)))
            tolerant(store.fail, claim, "no") if fail else tolerant(store.finish, claim)

    def tolerant(act: object, *details: object, **more: object) -> None:
        with suppress(operations.Refused):
            act(*details, **more)  # type: ignore[operator]

    def one() -> str:
        return chance.choice(ids)

    def unfinished() -> list[dg.DagsterRun]:
        return list(instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.MANAGED])))

    changes = [
        lambda: tolerant(operations.ready, store, chance.choice(sets), [one(), one()]),
        lambda: tolerant(operations.ready, store, "orders", chance.sample(ids, 5)),
        lambda: held.extend(store.claim(chance.choice(jobs), owner=new_owner(), k=2)),
        lambda: held.extend(store.claim(chance.choice(jobs), owner=new_owner(), k=3)),
        lambda: settle(fail=False),
        lambda: settle(fail=False),
        lambda: settle(fail=True),
        lambda: tolerant(operations.resubmit, store, chance.choice(jobs), [one()]),
        lambda: tolerant(operations.resubmit, store, chance.choice(jobs), failed=True),
        lambda: tolerant(operations.hold, store, chance.choice(jobs), [one()]),
        lambda: tolerant(operations.release, store, chance.choice(jobs), [one()]),
        lambda: tolerant(operations.delete_run, store, chance.choice([*jobs, "external"]), one()),
        lambda: sql(
            store,
            f"update datastatus set status = 'RESUBMIT' where dataid = '{one()}' "
            "and locktype = 'OUT'",
        ),
        lambda: sql(
            store,
            f"update datastatus set status = 'ERROR' where dataid = '{one()}' "
            "and locktype = 'OUT' and status = 'READY'",
        ),
        lambda: sql(store, f"delete from datastatus where dataid = '{one()}'"),
        lambda: instance.wipe_assets([NAMES.asset_key(chance.choice(sets))]),
        lambda: instance.report_runless_asset_event(
            dg.AssetMaterialization(NAMES.asset_key(chance.choice(sets)), partition=one())
        ),
        lambda: instance.delete_dynamic_partition(parts, one()),
        lambda: instance.add_dynamic_partitions(parts, [one(), f"new {one()}"]),
        lambda: [instance.delete_run(each.run_id) for each in instance.get_runs(limit=1)],
        lambda: [instance.report_run_canceled(each) for each in unfinished()[:1]],
        lambda: run(fail=True),
        lambda: run(fail=False),
        lambda: grid.tick(seconds=0.0),
        die,
        killed_tick,
        instance.wipe,
    ]
    weights = [4] * 15 + [0.3, 2, 2, 2, 0.3, 0.5, 0.5, 0.5, 1, 2, 1, 0.1]
    for _ in range(500):
        chance.choices(changes, weights)[0]()
    while grid.tick().more:
        pass
    assert drift(store, grid.mirror) == []
    grid.runs_agree()
    again = grid.tick()
    assert (again.writes, again.more) == (0, False)


def test_a_tick_with_nothing_new_writes_nothing(grid: Grid) -> None:
    operations.ready(grid.store, "orders", WEEK)
    grid.tick()
    started = time.time()
    newest = grid.mirror.newest()
    for _ in range(3):
        done = grid.tick()
        assert (done.writes, done.more) == (0, False)
    assert grid.mirror.newest() >= newest
    assert time.time() - started < 30


def test_a_stale_cache_restored_by_a_page_is_cleared_again(grid: Grid) -> None:
    operations.ready(grid.store, "orders", WEEK)
    make(grid.store, WEEK[0])
    grid.tick()
    key = NAMES.asset_key("copies")
    grid.squares("copies")
    old = grid.instance.get_asset_records([key])[0].asset_entry.cached_status
    operations.resubmit(grid.store, "copy", [WEEK[0]])
    operations.delete_run(grid.store, "copy", WEEK[0])
    grid.tick()
    grid.instance.update_asset_cached_status_data(key, old)
    assert grid.squares("copies") == {WEEK[0]: READY}, "a page was being drawn meanwhile"
    grid.tick()
    assert grid.squares("copies") == {}
    grid.agrees()


def test_a_chunk_that_a_page_drawn_meanwhile_missed_is_shown_again(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dagster looks for an asset's newest materialization, and then for its newest plan."""
    operations.ready(grid.store, "orders", WEEK)
    make(grid.store, WEEK[0])
    grid.tick()
    assert grid.squares("copies") == {WEEK[0]: READY}
    newest_plan = grid.instance.get_latest_planned_materialization_info

    def between_the_two(key: dg.AssetKey, partition: str | None = None) -> object:
        monkeypatch.undo()
        make(grid.store, WEEK[1])
        grid.tick()
        make(grid.store, WEEK[2], fail=True)
        grid.tick()
        return newest_plan(key, partition)

    monkeypatch.setattr(grid.instance, "get_latest_planned_materialization_info", between_the_two)
    grid.squares("copies")
    assert grid.squares("copies") == {WEEK[0]: READY, WEEK[2]: FAILED}, "Dagster missed one"
    grid.tick()
    assert grid.squares("copies") == {WEEK[0]: READY, WEEK[1]: READY, WEEK[2]: FAILED}
    grid.agrees()


def test_tables_restored_from_an_older_copy_are_compared_again(grid: Grid, tmp_path: Path) -> None:
    if grid.store.db.dialect != "sqlite":
        pytest.skip("on PostgreSQL, transactions have numbers: see tests/store/test_history.py")
    operations.ready(grid.store, "orders", WEEK[:1])
    grid.tick()
    tables, old = sqlite3.connect(grid.store.db.path), sqlite3.connect(tmp_path / "copy")
    with closing(tables), closing(old):
        tables.backup(old)
        operations.ready(grid.store, "orders", WEEK)
        grid.tick()
        assert grid.squares("orders") == dict.fromkeys(WEEK, READY)
        old.backup(tables)
    grid.tick()
    assert grid.squares("orders") == {WEEK[0]: READY}


def test_events_with_reused_numbers_are_news(grid: Grid) -> None:
    operations.ready(grid.store, "orders", WEEK)
    make(grid.store, WEEK[0])
    grid.tick()
    place = json.loads(grid.cursor or "")
    grid.cursor = json.dumps(place | {"events": place["marks"]["events"] + 1000})
    copies = NAMES.asset_key("copies")
    grid.instance.report_runless_asset_event(dg.AssetMaterialization(copies, partition=WEEK[1]))
    grid.tick()
    assert grid.squares("copies") == {WEEK[0]: READY}
    grid.agrees()
