"""Work done outside is a run in Dagster, with its reasons and its end."""

import json

import dagster as dg
import pytest
from dagster._core.storage.dagster_run import DagsterRunStatus

from opendataflow_dagster.dagster.events import OutsideOptions
from opendataflow_dagster.dagster.outside import FIRST_RUNS, KIND_TAG, OUTSIDE_TAG, OutsideRuns
from opendataflow_dagster.dagster.sensors import settle
from opendataflow_dagster.model import FAILED, READY, RUNNING, Fact, new_owner
from opendataflow_dagster.store import operations
from tests.support.dagster_instances import NAMES, Grid
from tests.support.store_fixtures import sql

COPIES = NAMES.asset_key("copies")


def of_job(grid: Grid, jobid: str) -> list[dg.DagsterRun]:
    return [run for run in grid.outside() if run.job_name == jobid]


def log(grid: Grid, run: dg.DagsterRun) -> str:
    return "\n".join(each.user_message for each in grid.instance.all_logs(run.run_id))


def test_a_process_is_one_run_from_its_first_chunk_to_its_last(grid: Grid) -> None:
    operations.ready(grid.store, "orders", ["1", "2", "3"])
    one, other = (grid.store.claim("copy", owner=new_owner())[0] for _ in range(2))
    grid.tick()
    [run] = of_job(grid, "copy")
    assert run.status == DagsterRunStatus.MANAGED
    assert (run.tags[OUTSIDE_TAG], run.tags[KIND_TAG]) == ("true", "process")
    assert run.tags["dagster/max_retries"] == "0"
    assert run.tags["opendataflow/host"] in one.owner
    grid.store.fail(one, "no rows")
    grid.tick()
    assert grid.squares("copies") == {"1": FAILED, "2": RUNNING}, "red at once, by a run beside it"
    red = grid.mirror.shown(COPIES)["1"].run_id
    assert red != run.run_id
    assert "no rows" in "".join(each.user_message for each in grid.instance.all_logs(red))
    grid.agrees()
    grid.store.finish(other)
    grid.tick()
    assert grid.squares("copies") == {"1": FAILED, "2": READY}
    [run] = of_job(grid, "copy")
    assert run.status == DagsterRunStatus.FAILURE
    assert grid.mirror.shown(COPIES)["1"].run_id == run.run_id
    assert not grid.instance.has_run(red)
    assert "copies 1: FAILED, no rows" in log(grid, run)
    [failure] = [
        event.dagster_event.step_failure_data.error.message
        for event in grid.instance.all_logs(run.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
        if event.dagster_event
    ]
    kinds = [each.dagster_event_type for each in grid.instance.all_logs(run.run_id)]
    ends = [dg.DagsterEventType.STEP_FAILURE, dg.DagsterEventType.RUN_FAILURE]
    assert kinds[-2:] == ends, "its page shows the end"
    assert dg.DagsterEventType.RUN_START in kinds, "its page draws when it was at work"
    assert failure.splitlines()[-2:] == [
        "To learn more: odf why copy 1",
        "To produce them again: odf resubmit copy 1",
    ]
    made = grid.instance.fetch_materializations(COPIES, limit=1).records[0]
    assert made.run_id == run.run_id
    stats = grid.instance.get_run_record_by_id(run.run_id)
    assert stats is not None
    assert stats.start_time is not None
    assert stats.end_time is not None
    grid.agrees()


def test_its_page_has_a_plan(grid: Grid) -> None:
    operations.ready(grid.store, "orders", ["1"])
    grid.tick()
    [run] = of_job(grid, "external")
    assert run.status == DagsterRunStatus.SUCCESS
    assert run.execution_plan_snapshot_id
    plan = grid.instance.get_execution_plan_snapshot(run.execution_plan_snapshot_id)
    assert [step.key for step in plan.steps] == ["opendataflow"]
    kinds = [each.dagster_event_type for each in grid.instance.all_logs(run.run_id)]
    assert dg.DagsterEventType.STEP_SUCCESS in kinds
    assert dg.DagsterEventType.ASSET_MATERIALIZATION in kinds


@pytest.mark.parametrize("harm", ["cancel", "delete", "wipe"])
def test_the_next_tick_repairs_whatever_was_done_to_a_run(grid: Grid, harm: str) -> None:
    operations.ready(grid.store, "orders", ["1", "2"])
    one, other = (grid.store.claim("copy", owner=new_owner())[0] for _ in range(2))
    grid.store.fail(one, "no")
    grid.tick()
    [run] = of_job(grid, "copy")
    if harm == "cancel":
        grid.instance.report_run_canceled(run)
    elif harm == "delete":
        grid.instance.delete_run(run.run_id)
    else:
        grid.instance.wipe()
    assert settle(grid.store, grid.instance) == [], "a live script keeps its claim"
    grid.tick()
    assert grid.squares("copies") == {"1": FAILED, "2": RUNNING}
    grid.agrees()
    grid.store.finish(other)
    grid.tick()
    grid.agrees()


def test_runs_of_the_first_versions_are_replaced(grid: Grid) -> None:
    operations.ready(grid.store, "orders", ["1", "2"])
    one, _ = (grid.store.claim("copy", owner=new_owner())[0] for _ in range(2))
    grid.store.fail(one, "no")
    grid.tick()
    sql(grid.store, "update dataevent set execution = null")
    statuses = [DagsterRunStatus.MANAGED] + [DagsterRunStatus.FAILURE] * 3
    for run in grid.outside():
        grid.instance.delete_run(run.run_id)
    for run_id, status in zip(FIRST_RUNS, statuses, strict=True):
        grid.instance.add_run(dg.DagsterRun("elsewhere", run_id, status=status))
    grid.mirror.plan(COPIES, {"1": (FIRST_RUNS[1], "elsewhere"), "2": (FIRST_RUNS[0], "elsewhere")})
    grid.tick()
    assert grid.squares("copies") == {"1": FAILED, "2": RUNNING}
    assert not any(map(grid.instance.has_run, FIRST_RUNS))
    assert {run.job_name for run in grid.outside()} == {"copy"}
    assert grid.tick().writes == 0


@pytest.mark.parametrize("alerts", [False, True])
def test_an_option_notifies_run_failure_sensors(grid: Grid, alerts: bool) -> None:
    operations.ready(grid.store, "orders", ["1"])
    [claim] = grid.store.claim("copy", owner=new_owner())
    grid.store.fail(claim, "no rows")
    grid.tick(runs=OutsideRuns(grid.store, grid.mirror, options=OutsideOptions(alerts=alerts)))
    grid.tick(runs=OutsideRuns(grid.store, grid.mirror, options=OutsideOptions(alerts=alerts)))
    changes = grid.instance.fetch_run_status_changes(dg.DagsterEventType.RUN_FAILURE, limit=10)
    assert len(changes.records) == int(alerts)
    changes = grid.instance.fetch_run_status_changes(dg.DagsterEventType.RUN_START, limit=10)
    assert not changes.records


def test_checks_from_outside_are_on_the_checks_tab(grid: Grid) -> None:
    operations.ready(grid.store, "orders", ["1"])
    [claim] = grid.store.claim("copy", owner=new_owner())
    line = "has_rows passed; not_null failed: 3 rows; of 7"
    grid.store.finish(claim, [Fact("copies", "1", checks=line, validated=True)])
    grid.tick()
    check = dg.AssetCheckKey(COPIES, "not_null")
    [found] = grid.instance.event_log_storage.get_asset_check_execution_history(check, limit=5)
    assert found.event is not None
    assert found.event.dagster_event is not None
    told = found.event.dagster_event.asset_check_evaluation_data
    assert (told.passed, told.description) == (False, "3 rows; of 7")
    [made] = grid.instance.fetch_materializations(COPIES, limit=5).records
    assert told.target_materialization_data.storage_id == made.storage_id, "else: not evaluated"


def test_old_runs_are_removed_unless_a_square_links_to_them(grid: Grid) -> None:
    operations.ready(grid.store, "orders", ["1", "2"])
    one, other = (grid.store.claim("copy", owner=new_owner())[0] for _ in range(2))
    grid.store.finish(one)
    grid.store.fail(other, "no")
    grid.tick()
    before = grid.squares("orders"), grid.squares("copies")
    newest = grid.mirror.newest()
    place = json.loads(grid.cursor or "")
    grid.cursor = json.dumps(place | {"cleaned": 0})
    grid.tick(runs=OutsideRuns(grid.store, grid.mirror, options=OutsideOptions(keep_days=0)))
    assert [run.job_name for run in grid.outside()] == ["copy"], "a red square leads to it"
    assert (grid.squares("orders"), grid.squares("copies")) == before
    done = grid.tick(runs=OutsideRuns(grid.store, grid.mirror, options=OutsideOptions(keep_days=0)))
    assert (done.writes, grid.mirror.newest() >= newest) == (0, True)
    [made] = grid.instance.fetch_materializations(
        dg.AssetRecordsFilter(NAMES.asset_key("orders"), asset_partitions=["1"]), limit=5
    ).records
    assert made.run_id == ""
