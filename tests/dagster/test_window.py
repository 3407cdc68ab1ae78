"""A grid with a window: the newest chunks, and all older ones that aren't READY."""

import random
from contextlib import suppress

from dagster._core.execution.backfill import BulkActionStatus, PartitionBackfill

from opendataflow_dagster.dagster.drift import drift
from opendataflow_dagster.dagster.reconcile import Reconciled, reconcile, repair
from opendataflow_dagster.dagster.translator import DataflowTranslator
from opendataflow_dagster.model import FAILED, READY, new_owner
from opendataflow_dagster.store import operations
from opendataflow_dagster.store.catalog import read_catalog
from tests.support.dagster_instances import Grid
from tests.support.store_fixtures import sql


class Newest(DataflowTranslator):
    window = 5


NEWEST = Newest()


def tick(grid: Grid) -> Reconciled:
    done = reconcile(grid.store, grid.mirror, NEWEST, grid.cursor)
    while done.more:
        done = reconcile(grid.store, grid.mirror, NEWEST, done.cursor)
    grid.cursor = done.cursor
    return done


def agrees(grid: Grid) -> None:
    assert drift(grid.store, grid.mirror, NEWEST) == []
    assert tick(grid).writes == 0


def add(grid: Grid, *numbers: int) -> None:
    """Add new chunks, READY in both datasets."""
    operations.ready(grid.store, "orders", [str(number) for number in numbers])
    grid.store.finish(grid.store.claim("copy", owner=new_owner(), k=len(numbers)))


def texts(first: int, last: int) -> list[str]:
    return [str(number) for number in range(first, last + 1)]


def shown(grid: Grid) -> list[str]:
    keys = grid.keys()
    for datasetid in ("orders", "copies"):
        assert grid.squares(datasetid).keys() >= set(keys)
    return keys


def test_the_newest_chunks_are_shown(grid: Grid) -> None:
    add(grid, *range(1, 21))
    tick(grid)
    assert shown(grid) == texts(16, 20)
    agrees(grid)
    add(grid, 21, 22)
    tick(grid)
    assert shown(grid) == texts(18, 22), "the oldest are pushed out"
    agrees(grid)
    operations.resubmit(grid.store, "copy", ["7"])
    grid.store.finish(grid.store.claim("copy", owner=new_owner()))
    tick(grid)
    assert shown(grid) == texts(18, 22), "what is old and READY again stays out"
    agrees(grid)


def test_unfinished_chunks_are_shown_however_old(grid: Grid) -> None:
    add(grid, *range(1, 21))
    tick(grid)
    operations.resubmit(grid.store, "copy", ["3"])
    operations.hold(grid.store, "external", ["4"])
    tick(grid)
    assert shown(grid) == ["3", "4", *texts(16, 20)]
    assert grid.squares("copies")["3"] == FAILED
    agrees(grid)
    [claim] = grid.store.claim("copy", owner=new_owner(), only="3")
    grid.store.finish(claim)
    tick(grid)
    assert grid.squares("copies")["3"] == READY, (
        "it goes when newer chunks come, not under the eyes"
    )
    agrees(grid)
    add(grid, 21)
    tick(grid)
    assert shown(grid) == ["4", *texts(17, 21)]
    agrees(grid)


def test_chunks_that_wait_for_a_job_are_shown(grid: Grid) -> None:
    operations.ready(grid.store, "orders", texts(1, 8))
    tick(grid)
    assert grid.keys() == texts(1, 8), "all can be claimed"
    agrees(grid)


def test_no_partition_is_removed_while_a_backfill_is_open(grid: Grid) -> None:
    add(grid, *range(1, 6))
    tick(grid)
    backfill = PartitionBackfill("b", BulkActionStatus.REQUESTED, False, {}, 0.0)
    grid.instance.add_backfill(backfill)
    add(grid, 6, 7)
    tick(grid)
    assert grid.keys() == texts(1, 7)
    agrees(grid)
    grid.instance.update_backfill(backfill.with_status(BulkActionStatus.COMPLETED))
    add(grid, 8)
    tick(grid)
    assert grid.keys() == texts(4, 8)
    agrees(grid)


def test_a_window_can_be_opened_and_closed(grid: Grid) -> None:
    add(grid, *range(1, 21))
    grid.tick()
    assert grid.keys() == texts(1, 20)
    repair(grid.store, grid.instance, NEWEST)
    assert grid.keys() == texts(16, 20)
    assert drift(grid.store, grid.mirror, NEWEST) == []
    assert len(drift(grid.store, grid.mirror)) > 0
    repair(grid.store, grid.instance)
    assert grid.keys() == texts(1, 20)
    assert drift(grid.store, grid.mirror) == []


def test_after_random_changes_window_and_tables_agree(grid: Grid) -> None:
    chance, ids = random.Random(3), texts(1, 30)
    held: list = []

    def one() -> list[str]:
        return [chance.choice(ids)]

    def settle() -> None:
        if held:
            finish = chance.choice([grid.store.finish, lambda claim: grid.store.fail(claim, "no")])
            finish(held.pop(chance.randrange(len(held))))

    changes = [
        lambda: operations.ready(grid.store, "orders", chance.sample(ids, 5)),
        lambda: held.extend(grid.store.claim("copy", owner=new_owner(), k=3)),
        settle,
        settle,
        settle,
        lambda: operations.resubmit(grid.store, "copy", one()),
        lambda: operations.hold(grid.store, "copy", one()),
        lambda: operations.release(grid.store, "copy", one()),
        lambda: sql(grid.store, f"delete from datastatus where dataid = '{one()[0]}'"),
        lambda: grid.instance.wipe_assets([NEWEST.asset_key("copies")]),
        lambda: grid.instance.add_dynamic_partitions("dataflow/orders", one()),
        lambda: tick(grid),
    ]
    for _ in range(120):
        with suppress(operations.Refused):
            chance.choice(changes)()
    tick(grid)
    agrees(grid)


def test_the_page_of_an_asset_says_so(grid: Grid) -> None:
    spec = NEWEST.spec(read_catalog(grid.store), "copies", "copy")
    assert "newest 5 chunks" in spec.metadata["opendataflow/window"]
    other = DataflowTranslator().spec(read_catalog(grid.store), "copies", "copy")
    assert "opendataflow/window" not in other.metadata
