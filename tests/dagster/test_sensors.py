"""The reconcile sensor: a tick as Dagster runs it, and one while the tables are away."""

import json
import time
from pathlib import Path

import dagster as dg
import psycopg
import pytest

from opendataflow_dagster.dagster import sensors
from opendataflow_dagster.dagster.resources import DataflowResource
from opendataflow_dagster.dagster.sensors import reconcile_sensor
from opendataflow_dagster.model import READY, RESUBMIT, RUNNING, new_owner
from opendataflow_dagster.store import operations
from opendataflow_dagster.store.history import unread
from opendataflow_dagster.store.overview import truths
from tests.support.dagster_instances import NAMES, Grid
from tests.support.postgres import Server
from tests.support.store_fixtures import sql

DAYS = ["2026-11-02", "2026-11-03"]


def resource(grid: Grid) -> DataflowResource:
    db = grid.store.db
    return DataflowResource(
        url=db.url if db.dialect == "postgres" else f"sqlite:///{db.path}"  # type: ignore[attr-defined]
    )


def tick(
    sensor: dg.SensorDefinition, instance: dg.DagsterInstance, cursor: str | None = None
) -> tuple[str, str | None]:
    """Return what the daemon would get from a tick: its reason, and the new cursor."""
    with dg.build_sensor_context(instance=instance, cursor=cursor) as context:
        data = sensor.evaluate_tick(context)
        assert not data.run_requests
        return data.skip_message or "", context.cursor


def test_a_tick_mirrors_and_keeps_its_cursor(grid: Grid) -> None:
    sensor = reconcile_sensor(resource(grid))
    operations.ready(grid.store, "orders", DAYS)
    first, cursor = tick(sensor, grid.instance)
    assert first == "2 chunks mirrored: 2 ready, 2 partition keys changed, grid agrees."
    assert grid.squares("orders") == dict.fromkeys(DAYS, READY)
    again, kept = tick(sensor, grid.instance, cursor)
    assert again == "The grid agrees with the tables."
    assert json.loads(kept or "")["log"] == json.loads(cursor or "")["log"]


def test_a_tick_counts_by_status_and_names_failing_jobs(grid: Grid) -> None:
    sensor = reconcile_sensor(resource(grid))
    operations.ready(grid.store, "orders", ["1", "2", "3", "4"])
    _, cursor = tick(sensor, grid.instance)
    for claim in grid.store.claim("copy", owner=new_owner(), k=2):
        grid.store.fail(claim, "no rows")
    [claim] = grid.store.claim("copy", owner=new_owner())
    grid.store.finish(claim, [])
    [claim] = grid.store.claim("copy", owner=new_owner())
    line, cursor = tick(sensor, grid.instance, cursor)
    assert line == "4 chunks mirrored: 1 ready, 2 failed (copy), 1 running (copy), grid agrees."
    sql(grid.store, "delete from datastatus where datasetid = 'copies' and status = 'FAILED'")
    line, _ = tick(sensor, grid.instance, cursor)
    assert line == "2 chunks mirrored: 2 missing, grid agrees."


def test_a_tick_says_that_changes_can_not_be_read_yet(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    if grid.store.db.dialect == "sqlite":
        pytest.skip("on SQLite nothing holds back the log")
    monkeypatch.setattr(sensors, "unread", lambda store: unread(store, 0))
    with psycopg.connect(grid.store.db.url) as other:  # type: ignore[attr-defined]
        other.execute("create table public.big (n int)")
        operations.ready(grid.store, "orders", DAYS)
        reason, _ = tick(reconcile_sensor(resource(grid)), grid.instance)
        other.rollback()
    assert "an older transaction (" in reason


def test_a_tick_recovers_leases_that_ran_out(grid: Grid) -> None:
    sensor = reconcile_sensor(resource(grid))
    operations.ready(grid.store, "orders", DAYS)
    grid.store.claim("copy", owner=new_owner(), lease=0.2, only=DAYS[0])
    time.sleep(0.4)
    reason, _ = tick(sensor, grid.instance)
    assert "1 chunk settled" in reason
    assert truths(grid.store, "copies")[DAYS[0]].status == RESUBMIT


def test_missing_tables_are_reported_in_one_line(
    instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    sensor = reconcile_sensor(DataflowResource(url=f"sqlite:///{tmp_path}/none/at/all.db"))
    reason, cursor = tick(sensor, instance, "kept")
    assert "can't be read" in reason
    assert len(reason.splitlines()) == 1
    assert cursor == "kept"


def test_an_outage_settles_nothing_and_gives_workers_time(
    postgres_instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opendataflow_dagster.store import open_store, registry

    monkeypatch.setattr("opendataflow_dagster.dagster.sensors.DATABASE_WAIT_SECONDS", 0.3)
    with Server() as server, dg.DagsterInstance.ephemeral() as instance:
        store = open_store(server.url())
        store.init()
        registry.add_job(store, "copy", ["orders"], ["copies"])
        operations.ready(store, "orders", DAYS)
        store.claim("copy", owner=new_owner(), only=DAYS[0])
        sensor = reconcile_sensor(DataflowResource(url=server.url()))
        _, cursor = tick(sensor, instance)
        assert truths(store, "copies")[DAYS[0]].status == RUNNING
        store.db.execute("update claim set lease_end = now() where owner is not null", None)
        server.stop()
        reason, kept = tick(sensor, instance, cursor)
        assert "can't be read" in reason
        assert len(reason.splitlines()) == 1
        assert kept == cursor
        server.start()
        store.db.drop()
        reason, cursor = tick(sensor, instance, cursor)
        assert reason == "The grid agrees with the tables."
        assert truths(store, "copies")[DAYS[0]].status == RUNNING, "its worker may be back yet"
        with monkeypatch.context() as patched:
            patched.setitem(sensors._renewal_ends, store.db.where, 0.0)
            tick(sensor, instance, cursor)
        assert truths(store, "copies")[DAYS[0]].status == RESUBMIT
        store.close()


def test_a_dagster_that_cannot_be_read_is_not_taken_for_an_outage(
    grid: Grid, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("Dagster's own storage")

    monkeypatch.setattr("opendataflow_dagster.dagster.grid.Mirror.news", broken)
    with pytest.raises(RuntimeError, match="Dagster's own"):
        tick(reconcile_sensor(resource(grid)), grid.instance)


def test_a_sensor_may_have_another_name(grid: Grid) -> None:
    class House(type(NAMES)):
        def asset_key(self, datasetid: str) -> dg.AssetKey:
            return dg.AssetKey(["house", datasetid])

    operations.ready(grid.store, "orders", DAYS)
    tick(reconcile_sensor(resource(grid), translator=House()), grid.instance)
    event = grid.instance.get_latest_materialization_event(dg.AssetKey(["house", "orders"]))
    assert event is not None
