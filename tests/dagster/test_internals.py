"""What works in a Dagster that has changed its internals."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Namespace
from typing import Any

import dagster as dg
import dagster._serdes as serdes
import pytest
from dagster._core import events
from dagster._core.definitions.data_version import DATA_VERSION_TAG
from dagster._core.execution.plan import execute_step
from dagster._core.storage.event_log import schema as event_tables
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster._core.storage.runs import schema as run_tables
from dagster._core.storage.runs.sql_run_storage import SqlRunStorage

from opendataflow_dagster import DataflowResource, build_definitions, dataflow_assets
from opendataflow_dagster.cli.app import app
from opendataflow_dagster.dagster import internals
from opendataflow_dagster.dagster.drift import drift
from opendataflow_dagster.dagster.events import GENERATION_ENTRY, VERSION_TAG, OutsideOptions
from opendataflow_dagster.dagster.outside import OUTSIDE_TAG, OutsideRuns
from opendataflow_dagster.dagster.public_grid import PublicMirror
from opendataflow_dagster.dagster.reconcile import Reconciled, open_mirror, reconcile, repair
from opendataflow_dagster.model import FAILED, READY, RUNNING, new_owner
from opendataflow_dagster.store import operations
from tests.support.dagster_instances import NAMES, Grid, tick_of_reconcile

COPIES = dg.AssetKey(["copies"])
FOLDER = Path(internals.__file__).parent
NO_KEY = Namespace(c=Namespace(event_id=1, value=1))
"""A table that has lost a column."""

PRIVATE = re.compile(r"dagster(_\w+)?\._|dagster_shared")


@pytest.fixture
def change(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Remove a name from Dagster, or replace it."""

    def change(where: Any, name: str, other: Any = None) -> None:
        if other is None:
            monkeypatch.delattr(where, name)
        else:
            monkeypatch.setattr(where, name, other, raising=False)
        internals.flaws.cache_clear()

    yield change
    monkeypatch.undo()
    internals.flaws.cache_clear()


def tick(grid: Grid, mirror: PublicMirror | None = None, **options: Any) -> Reconciled:
    """Run one tick with what this Dagster allows."""
    mirror = mirror or open_mirror(grid.instance)
    done = reconcile(grid.store, mirror, NAMES, grid.cursor, **options)
    grid.cursor = done.cursor
    return done


def squares(grid: Grid, datasetid: str = "copies") -> dict[str, str]:
    drawn = PublicMirror(grid.instance).grid(
        NAMES.asset_key(datasetid), NAMES.partitions_def("orders")
    )
    return {NAMES.dataid(part): state for part, state in drawn.items()}


def test_this_dagster_has_all_that_the_mirror_uses() -> None:
    assert internals.degraded() == ""


def test_internals_are_imported_in_few_modules_and_all_are_checked() -> None:
    used: dict[str, set[str]] = {}
    for path in FOLDER.parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(map(PRIVATE.match, names)), f"{path} imports a private module"
            if isinstance(node, ast.ImportFrom) and PRIVATE.match(node.module or ""):
                found = {f"{node.module}:{alias.name}" for alias in node.names}
                used.setdefault(path.name, set()).update(found)
    assert sorted(used) == ["grid.py", "run_storage.py"]
    checked = {re.sub(r"(:\w+).*", r"\1", use.path) for use in internals.USES}
    assert set().union(*used.values()) <= checked


def test_the_tag_of_data_versions_is_dagsters() -> None:
    assert VERSION_TAG == DATA_VERSION_TAG


def test_each_part_says_what_is_lost_without_it() -> None:
    assert {use.part for use in internals.USES} == internals.LOST.keys()


@pytest.mark.parametrize(
    ("where", "name", "other", "told"),
    [
        (run_tables, "RunsTable", None, "no RunsTable"),
        (event_tables, "AssetEventTagsTable", NO_KEY, "no AssetEventTagsTable.c.key"),
        (events, "AssetMaterializationPlannedData", lambda key: None, "takes other parameters"),
        (serdes, "serialize_value", lambda val, how: "", "serialize_value takes other parameters"),
    ],
)
def test_without_the_grid_ready_chunks_are_reported(
    grid: Grid, change: Callable[..., None], where: Any, name: str, other: Any, told: str
) -> None:
    operations.ready(grid.store, "orders", ["1", "2", "3"])
    one, two, _ = (grid.store.claim("copy", owner=new_owner())[0] for _ in range(3))
    grid.store.finish(one)
    grid.store.fail(two, "no rows")
    change(where, name, other)
    mirror = open_mirror(grid.instance)
    assert type(mirror) is PublicMirror
    assert told in internals.degraded()
    done = tick(grid, mirror)
    assert (done.made, done.planned, done.cleared, done.runs, done.stuck) == (4, 0, 0, 0, 0)
    assert squares(grid, "orders") == {"1": READY, "2": READY, "3": READY}
    assert squares(grid) == {"1": READY}
    assert grid.keys() == ["1", "2", "3"]
    assert not [run for run in grid.instance.get_runs() if OUTSIDE_TAG in run.tags]
    assert tick(grid, mirror).writes == 0
    assert drift(grid.store, mirror) == []


@pytest.fixture
def public(grid: Grid, change: Callable[..., None]) -> PublicMirror:
    """The mirror of a Dagster that changed after everything was shown."""
    operations.ready(grid.store, "orders", ["1", "2", "3"])
    for _ in range(3):
        grid.store.finish(grid.store.claim("copy", owner=new_owner())[0])
    tick(grid)
    change(run_tables, "RunsTable")
    return open_mirror(grid.instance)


def test_a_square_that_cannot_be_corrected_is_reported_until_repaired(
    grid: Grid, public: PublicMirror
) -> None:
    tick(grid, public)
    operations.resubmit(grid.store, "copy", ["1", "2"])
    again = [grid.store.claim("copy", owner=new_owner(), only=each)[0] for each in ("1", "2")]
    done = tick(grid, public)
    assert (done.writes, done.stuck) == (0, 0), "what is made again is shown as it was"
    grid.store.fail(again[0], "no rows")
    done = tick(grid, public)
    assert (done.writes, done.stuck) == (0, 1)
    assert squares(grid) == {"1": READY, "2": READY, "3": READY}
    [found] = drift(grid.store, public)
    assert (found.dataid, found.tables, found.dagster) == ("1", FAILED, READY)
    repair(grid.store, grid.instance)
    assert squares(grid) == {"3": READY}, "of what is running nothing can be shown"
    assert drift(grid.store, public) == []
    grid.store.finish(again[1])
    assert tick(grid, public).made >= 1
    assert squares(grid) == {"2": READY, "3": READY}
    assert drift(grid.store, public) == []


def test_a_new_generation_is_reported(grid: Grid, public: PublicMirror) -> None:
    tick(grid, public)
    operations.resubmit(grid.store, "copy", ["2"])
    grid.store.finish(grid.store.claim("copy", owner=new_owner())[0])
    assert tick(grid, public).made == 1
    [newest] = grid.instance.fetch_materializations(COPIES, limit=1).records
    assert newest.partition_key == "2"


def test_partition_keys_are_added_and_removed(grid: Grid, public: PublicMirror) -> None:
    operations.ready(grid.store, "orders", ["1.5"])
    tick(grid, public)
    assert grid.keys() == ["1", "1.5", "2", "3"]
    grid.instance.delete_dynamic_partition(NAMES.partitions_name("orders"), "2")
    tick(grid, public)
    assert grid.keys() == ["1", "1.5", "2", "3"]


def test_a_wiped_asset_is_shown_again(grid: Grid, public: PublicMirror) -> None:
    tick(grid, public)
    grid.instance.wipe_assets([COPIES])
    assert tick(grid, public).made == 3
    assert squares(grid) == {"1": READY, "2": READY, "3": READY}


def test_runs_shown_by_an_earlier_dagster_are_ended_and_shown_again(
    grid: Grid, change: Callable[..., None]
) -> None:
    operations.ready(grid.store, "orders", ["1", "2"])
    one, two = (grid.store.claim("copy", owner=new_owner())[0] for _ in range(2))
    grid.store.fail(two, "no rows")
    tick(grid)
    assert squares(grid) == {"1": RUNNING, "2": FAILED}
    real = run_tables.RunsTable
    change(run_tables, "RunsTable")
    tick(grid)
    assert RUNNING not in squares(grid).values()
    assert not grid.instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.MANAGED]))
    grid.store.finish(one)
    tick(grid)
    assert squares(grid)["1"] == READY
    change(run_tables, "RunsTable", real)
    tick(grid)
    grid.agrees()
    assert squares(grid) == {"1": READY, "2": FAILED}


def test_without_batches_events_are_stored_one_by_one(
    grid: Grid, change: Callable[..., None]
) -> None:
    real = SqlEventLogStorage.store_asset_event_tags  # which Dagster may need itself
    name = "store_asset_event_tags"
    change(SqlEventLogStorage, name, lambda self, *given: real(self, *given))
    assert "one by one" in internals.degraded()
    operations.ready(grid.store, "orders", ["1", "2", "3"])
    one, two, _ = (grid.store.claim("copy", owner=new_owner())[0] for _ in range(3))
    grid.store.finish(one)
    grid.store.fail(two, "no rows")
    tick(grid)
    assert squares(grid) == {"1": READY, "2": FAILED, "3": RUNNING}
    grid.agrees()


def test_without_pages_a_run_has_its_log(grid: Grid, change: Callable[..., None]) -> None:
    change(SqlRunStorage, "add_execution_plan_snapshot", lambda self: None)
    operations.ready(grid.store, "orders", ["1"])
    [claim] = grid.store.claim("copy", owner=new_owner())
    grid.store.fail(claim, "no rows")
    tick(grid)
    [run] = [run for run in grid.outside() if run.job_name == "copy"]
    assert run.execution_plan_snapshot_id is None
    logs = grid.instance.all_logs(run.run_id)
    assert any("no rows" in each.user_message for each in logs)
    assert not any((each.dagster_event_type or "").startswith("STEP") for each in logs)
    grid.agrees()


def test_without_alerts_failure_sensors_hear_nothing(
    grid: Grid, change: Callable[..., None]
) -> None:
    change(events, "JobFailureData", lambda reason: None)
    operations.ready(grid.store, "orders", ["1"])
    [claim] = grid.store.claim("copy", owner=new_owner())
    grid.store.fail(claim, "no rows")
    mirror = open_mirror(grid.instance)
    tick(grid, runs=OutsideRuns(grid.store, mirror, options=OutsideOptions(alerts=True)))
    assert squares(grid) == {"1": FAILED}
    assert "run failure sensors" in internals.degraded()


def test_without_backfills_red_squares_are_cleared_at_once(
    grid: Grid, change: Callable[..., None]
) -> None:
    change(dg.DagsterInstance, "get_backfill", lambda self, one, more: None)
    assert not grid.mirror.is_open("any")
    assert "backfill" in internals.degraded()


def test_without_silent_outputs_nothing_is_logged_twice(change: Callable[..., None]) -> None:
    change(execute_step, "SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION", "__other__")
    dataflow = DataflowResource.ephemeral(ready={"sales": ["1", "2"]})

    @dataflow_assets(inputs=["sales"], outputs=["total"])
    def total(chunk: Any) -> bytes:
        return b"1"

    with dg.DagsterInstance.ephemeral() as instance:
        done = dataflow.materialize([total], "1", instance=instance)
        [made] = instance.fetch_materializations(dg.AssetKey(["total"]), limit=5).records
        messages = [each.user_message for each in instance.all_logs(done.run_id)]
    assert made.asset_materialization
    assert GENERATION_ENTRY in made.asset_materialization.metadata
    assert any("doesn't start the steps downstream" in each for each in messages)


def test_the_sensor_says_so_in_a_line(grid: Grid, change: Callable[..., None]) -> None:
    db: Any = grid.store.db
    url = db.url if db.dialect == "postgres" else f"sqlite:///{db.path}"
    defs = build_definitions(DataflowResource(url=url))
    assert "This mirror wasn't built for" not in tick_of_reconcile(defs, grid.instance)
    change(run_tables, "RunsTable")
    line = tick_of_reconcile(defs, grid.instance)
    assert "no RunsTable" in line
    assert "only READY chunks are shown" in line
    assert "\n" not in line


def test_doctor_reports_it_if_dagster_is_used(
    change: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    def told() -> str:
        return CliRunner().invoke(app, ["doctor"], prog_name="odf").output

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATAFLOW_URL", f"sqlite:///{tmp_path}/tables")
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    assert not re.search(r"^\w+ +dagster ", told(), re.MULTILINE)
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path))
    assert re.search(r"^ok +dagster +Dagster \d", told(), re.MULTILINE)
    change(SqlRunStorage, "connect")
    assert re.search(r"^warn +dagster .*no SqlRunStorage.connect", told(), re.MULTILINE)


def test_a_name_that_vanishes_before_loading_is_no_error(tmp_path: Path) -> None:
    program = """
import dagster as dg
import dagster._core.storage.runs.sqlite.sqlite_run_storage
from dagster._core.storage.runs import schema
del schema.RunsTable
from opendataflow_dagster import DataflowResource, build_definitions
defs = build_definitions(DataflowResource.ephemeral(ready={"sales": ["1"]}))
repository = defs.get_repository_def()
sensor = repository.get_sensor_def("opendataflow_reconcile")
with dg.DagsterInstance.ephemeral() as instance:
    with dg.build_sensor_context(instance=instance, repository_def=repository) as context:
        print(sensor.evaluate_tick(context).skip_message)
    print(instance.fetch_materializations(dg.AssetKey("sales"), limit=2).records[0].partition_key)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "no RunsTable" in done.stdout
    assert done.stdout.endswith("\n1\n")
