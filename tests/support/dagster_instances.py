"""Dagster instances for tests of the grid, and what the grid looks like from outside."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from opendataflow_dagster.dagster.drift import drift
from opendataflow_dagster.dagster.grid import Mirror
from opendataflow_dagster.dagster.outside import BESIDE_TAG, EXECUTION_TAG, OUTSIDE_TAG
from opendataflow_dagster.dagster.reconcile import Reconciled, reconcile
from opendataflow_dagster.dagster.translator import DataflowTranslator
from opendataflow_dagster.model import PENDING, READY, RUNNING, read_status
from opendataflow_dagster.store import open_store, registry
from opendataflow_dagster.store.history import Event, events_after
from opendataflow_dagster.store.store import Store
from tests.support.postgres import Server
from tests.support.store_fixtures import close

NAMES = DataflowTranslator()

POSTGRES = """
storage:
  postgres:
    postgres_url: {url}
telemetry: {{enabled: false}}
"""


@pytest.fixture(scope="session")
def postgres_instance(postgres_server: Server) -> Iterator[dg.DagsterInstance]:
    """One instance for the session: creating its tables takes seconds."""
    url = postgres_server.create_database("dagster_grid")
    with tempfile.TemporaryDirectory() as home:
        Path(home, "dagster.yaml").write_text(POSTGRES.format(url=url))
        with dg.DagsterInstance.from_config(home) as instance:
            yield instance


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of database that holds both the tables and Dagster's storage."""
    return request.param


@pytest.fixture
def instance(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[dg.DagsterInstance]:
    """An empty instance on each storage."""
    if kind == "sqlite":
        home = tmp_path / "dagster"
        home.mkdir()
        (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
        with dg.DagsterInstance.from_config(str(home)) as made:
            yield made
    else:
        server = request.getfixturevalue("postgres_server")
        if not server.is_running():
            server.start()
        made = request.getfixturevalue("postgres_instance")
        yield made
        made.wipe()
        for name in {"dataflow/orders", "dataflow/copies", "dataflow/other", "dataflow/sold", "d"}:
            Mirror(made).replace_keys(name, made.get_dynamic_partitions(name), [])


class Grid:
    """The tables of a store and the grid of an instance, side by side."""

    def __init__(self, store: Store, instance: dg.DagsterInstance) -> None:
        self.store, self.instance = store, instance
        self.cursor: str | None = None

    @property
    def mirror(self) -> Mirror:
        return Mirror(self.instance)

    def tick(self, **options: object) -> Reconciled:
        """One tick of the sensor, with the cursor that it would keep."""
        done = reconcile(self.store, self.mirror, NAMES, self.cursor, **options)  # type: ignore[arg-type]
        self.cursor = done.cursor
        return done

    def squares(self, datasetid: str, domain: str = "orders") -> dict[str, str]:
        """Return the state of each chunk as the UI gets it, by dataid; without missing ones."""
        drawn = self.mirror.grid(NAMES.asset_key(datasetid), NAMES.partitions_def(domain))
        return {NAMES.dataid(part): state for part, state in drawn.items()}

    def keys(self, domain: str = "orders") -> list[str]:
        keys = self.instance.get_dynamic_partitions(NAMES.partitions_name(domain))
        return [NAMES.dataid(key) for key in keys]

    def outside(self) -> list[dg.DagsterRun]:
        """Return the runs that show work done outside, without those of failures so far."""
        runs = self.instance.get_runs(dg.RunsFilter())
        return [run for run in runs if OUTSIDE_TAG in run.tags and BESIDE_TAG not in run.tags]

    def runs_agree(self) -> None:
        """Every execution in the change log has one run, with its end and its reasons."""
        expected: dict[tuple[str, str], dict[tuple[str, str], Event]] = {}
        times: dict[tuple[str, str], list[float]] = {}
        acted: set[tuple[str, str]] = set()
        for event in sorted(
            events_after(self.store, None, 1_000_000)[0], key=lambda each: each.seq
        ):
            if event.locktype != "OUT" or not event.execution:
                continue
            execution = event.execution, event.jobid
            expected.setdefault(execution, {})[event.datasetid, event.dataid] = event
            assert event.at is not None
            times.setdefault(execution, []).append(event.at.timestamp())
            if event.status_before == RUNNING or event.status_after not in (None, "PENDING"):
                acted.add(execution)
        ends = {
            execution: end
            for execution, chunks in expected.items()
            if (end := _end({each.status_after for each in chunks.values()}, execution in acted))
        }
        runs = self.outside()
        found = {(run.tags[EXECUTION_TAG], run.job_name): run for run in runs}
        assert len(found) == len(runs), "no execution has two runs"
        assert {execution: run.status for execution, run in found.items()} == ends
        for execution, run in found.items():
            record = self.instance.get_run_record_by_id(run.run_id)
            assert record is not None
            assert record.start_time == pytest.approx(min(times[execution]), abs=0.01)
            is_over = run.status != dg.DagsterRunStatus.MANAGED
            ended = pytest.approx(max(times[execution]), abs=0.01) if is_over else None
            assert record.end_time == ended
            log = "\n".join(each.user_message for each in self.instance.all_logs(run.run_id))
            for event in expected[execution].values():
                status = event.status_after and read_status(event.status_after)
                if status not in (None, READY, PENDING):
                    why = f", {event.why}" if event.why else ""
                    assert f"{event.datasetid} {event.dataid}: {status}{why}" in log
        left = {run.run_id for run in self.instance.get_runs(dg.RunsFilter())}
        for run in self.instance.get_runs(dg.RunsFilter()):
            if beside := run.tags.get(BESIDE_TAG):
                assert beside in left

    def agrees(self, folded: bool = False) -> None:
        """Nothing differs, and another tick has nothing to write; folding deletes history."""
        assert drift(self.store, self.mirror) == []
        if not folded:
            self.runs_agree()
        again = self.tick()
        assert (again.writes, again.more) == (0, False)


def _end(words: set[str | None], acted: bool) -> dg.DagsterRunStatus | None:
    """Return how a run ends whose execution left chunks like this."""
    if "RUNNING" in words:
        return dg.DagsterRunStatus.MANAGED
    if words - {"READY", "PENDING", None}:
        return dg.DagsterRunStatus.FAILURE
    if "READY" in words:
        return dg.DagsterRunStatus.SUCCESS
    return dg.DagsterRunStatus.CANCELED if acted else None


@pytest.fixture
def grid(kind: str, instance: dg.DagsterInstance, request: pytest.FixtureRequest) -> Iterator[Grid]:
    """`orders` is read by the job `copy`, which writes `copies`."""
    store = open_store(request.getfixturevalue(f"{kind}_url"))
    store.init()
    registry.add_dataset(store, "orders")
    registry.add_dataset(store, "copies")
    registry.add_job(store, "copy", ["orders"], ["copies"])
    yield Grid(store, instance)
    close(store)


def shown_assets(defs: dg.Definitions) -> dict[str, bool]:
    """Return asset → whether something in the definitions produces it."""
    graph = defs.resolve_asset_graph()
    return {
        key.to_user_string(): graph.get(key).is_materializable for key in graph.get_all_asset_keys()
    }


def tick_of_reconcile(defs: dg.Definitions, instance: dg.DagsterInstance) -> str:
    """Return what the page of the reconcile sensor says after a tick."""
    repository = defs.get_repository_def()
    sensor = repository.get_sensor_def("opendataflow_reconcile")
    with dg.build_sensor_context(instance=instance, repository_def=repository) as context:
        return sensor.evaluate_tick(context).skip_message or ""
