"""The catch-up sensor: which runs it launches, when it doesn't, and that Dagster runs them."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from opendataflow_dagster.dagster import launch as launching
from opendataflow_dagster.dagster import resources
from opendataflow_dagster.dagster.assets import dataflow_assets
from opendataflow_dagster.dagster.launch import catch_up_sensor
from opendataflow_dagster.dagster.resources import DataflowResource
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.catalog import read_catalog
from opendataflow_dagster.store.store import Store
from tests.support.dagster_servers import Dagster, Ticker
from tests.support.graphql_client import wait_for
from tests.support.postgres import Server
from tests.support.store_fixtures import close, expire, policy, put, register, sql, status, take

ROOT = Path(__file__).parents[2]

one_store = pytest.mark.parametrize("url", ["sqlite"], indirect=True)
"""For tests about Dagster, not the store."""


class World:
    """A store with the job `loadbob`, a Dagster with its assets, and the sensor at work on both."""

    def __init__(self, store: Store, url: str, instance: dg.DagsterInstance) -> None:
        self.store, self.instance = store, instance
        self.dataflow = DataflowResource(url=url)
        self.made: list[str] = []
        self.define()

    def define(self, **options: Any) -> None:
        """Define assets and sensor by what is registered now."""
        catalog = read_catalog(self.store)
        self.jobs: dict[str, launching.Target] = {
            jobid: dataflow_assets(job=jobid, dataflow=catalog)(self.compute)
            for jobid in catalog.jobs
        }
        sensor = catch_up_sensor(self.dataflow, self.jobs, **options)
        self.definitions = dg.Definitions(
            assets=[*self.jobs.values()],  # type: ignore[arg-type]
            sensors=[sensor],
            resources={"dataflow": self.dataflow},
        )
        self.ticker = Ticker(sensor, self.instance, self.definitions)

    def compute(self, chunk: Any) -> None:
        self.made.append(chunk.dataid)

    def tick(self) -> list[dg.RunRequest]:
        """Return the runs that a tick requests."""
        self.store._plans.clear()
        for store in resources._stores.values():
            store._plans.clear()
        self.said = self.ticker.tick()
        return list(self.said.run_requests or ())

    def why(self) -> str:
        """Return why a tick requests nothing."""
        assert self.tick() == []
        return self.said.skip_message

    def run(self, request: dg.RunRequest) -> dg.ExecuteInProcessResult:
        """Execute what was requested, like a run worker."""
        job = self.definitions.resolve_implicit_global_asset_job_def()
        return job.execute_in_process(
            instance=self.instance,
            asset_selection=list(request.asset_selection or ()),
            tags={**request.tags, "dagster/run_key": request.run_key or ""},
            raise_on_error=False,
        )

    def begin(self, request: dg.RunRequest, state: dg.DagsterRunStatus) -> dg.DagsterRun:
        """Create a run of that request in some state, without executing anything."""
        job = self.definitions.resolve_implicit_global_asset_job_def()
        return self.instance.create_run_for_job(
            job.get_subset(asset_selection=set(request.asset_selection or ())),
            tags=request.tags,
            status=state,
        )


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as made:
        yield made


@pytest.fixture
def instance(storage: dg.DagsterInstance) -> Iterator[dg.DagsterInstance]:
    """A Dagster without runs: creating a new one takes longer than most tests."""
    yield storage
    storage.wipe()


@pytest.fixture
def world(store: Store, url: str, instance: dg.DagsterInstance) -> Iterator[World]:
    register(store, "loadbob", ["bobin"], ["bobout"])
    yield World(store, url, instance)
    for opened in resources._stores.values():
        opened.close()
    resources._stores.clear()


def test_claimable_chunks_are_launched_unless_a_run_is_active(world: World) -> None:
    assert world.why() == "nothing claimable: loadbob."
    for dataid in "123":
        put(world.store, "bobin", dataid)
    [request] = world.tick()
    assert request.asset_selection == [dg.AssetKey("bobout")]
    assert request.partition_key is None
    assert request.tags["opendataflow/catch-up"] == "true"
    assert request.tags["opendataflow/catch-up-job"] == "loadbob"
    assert request.tags["opendataflow/batch"] == "500"
    assert [again.run_key for again in world.tick()] == [request.run_key]

    run = world.begin(request, dg.DagsterRunStatus.STARTING)
    assert world.why() == "loadbob: 3 claimable, 1 run at work."
    world.instance.report_run_failed(run)


def test_a_job_that_odf_work_is_working_on_is_left_to_it(world: World) -> None:
    for dataid in "12":
        put(world.store, "bobin", dataid)
    [claim] = take(world.store, "loadbob", "ada@host:1:ab of odf work")
    assert world.why() == "loadbob: 1 claimable, `odf work` is working on 1."
    world.store.finish(claim)
    [request] = world.tick()
    assert request.tags["opendataflow/catch-up-job"] == "loadbob"


def test_a_run_without_partitions_produces_what_is_offered(world: World) -> None:
    # The input has been materialized: without the tags of a partition, Dagster fails the step.
    world.instance.report_runless_asset_event(dg.AssetMaterialization("bobin", partition="1"))
    for dataid in ("2026-01-01", "2026-01-02", "odd,one"):
        put(world.store, "bobin", dataid)
    [request] = world.tick()
    result = world.run(request)
    assert result.success
    assert world.made == ["2026-01-01", "2026-01-02", "odd,one"]
    assert world.instance.get_materialized_partitions(dg.AssetKey("bobout")) == {
        "2026-01-01",
        "2026-01-02",
        "odd%2Cone",
    }
    kinds = {event.event_type_value for event in result.all_events}
    assert "ASSET_MATERIALIZATION_PLANNED" not in kinds
    assert world.why() == "nothing claimable: loadbob."


def test_a_resubmit_launches_again_and_so_does_a_killed_run(world: World) -> None:
    put(world.store, "bobin", "1")
    [first] = world.tick()
    world.run(first)
    sql(world.store, "update datastatus set status = 'RESUBMIT' where datasetid = 'bobout'")
    [second] = world.tick()
    assert second.run_key != first.run_key

    run = world.begin(second, dg.DagsterRunStatus.STARTED)
    [claim] = world.store.claim("loadbob", owner="killed", runid=run.run_id)
    assert world.why() == "loadbob: nothing claimable, 1 run at work."
    world.instance.report_run_failed(run)
    expire(world.store, claim)
    world.store.recover()
    [third] = world.tick()
    assert third.run_key not in (first.run_key, second.run_key)
    world.run(third)
    assert world.made == ["1", "1"]


@one_store
def test_a_run_that_was_created_but_not_launched_is_requested_again(world: World) -> None:
    put(world.store, "bobin", "1")
    [request] = world.tick()
    world.begin(request, dg.DagsterRunStatus.NOT_STARTED)
    assert [again.run_key for again in world.tick()] == [request.run_key]


@one_store
def test_runs_that_change_nothing_are_launched_less_and_less_often(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(world.store, "bobin", "1")
    now = 0.0
    monkeypatch.setattr(launching, "time", SimpleNamespace(time=lambda: now))
    [request] = world.tick()
    for wait in (20, 40, 80, 160, 320, 640, 1280, 2560, 3600, 3600):
        run = world.begin(request, dg.DagsterRunStatus.STARTED)
        world.instance.report_run_failed(run)
        record = world.instance.get_run_record_by_id(run.run_id)
        assert record is not None
        now = (record.end_time or 0) + wait - 1
        assert "changed nothing" in world.why()
        now += 2
        [request] = world.tick()
    monkeypatch.undo()
    assert world.why() == (
        f"loadbob: 1 claimable, its last 10 runs changed nothing ({run.run_id[:8]}: FAILURE), the "
        "next comes in 60 min."
    )

    sql(world.store, "update datastatus set status = 'FAILED' where datasetid = 'bobin'")
    sql(world.store, "update datastatus set status = 'READY' where datasetid = 'bobin'")
    assert len(world.tick()) == 1


@one_store
def test_a_run_that_failed_after_some_work_is_followed_at_once(world: World) -> None:
    for dataid in "12":
        put(world.store, "bobin", dataid)
    world.define(batch=1)
    for number in (1, 2):
        [request] = world.tick()
        assert request.tags["opendataflow/batch"] == "1"
        world.run(request)
        assert len(world.made) == number


def test_pause_and_concurrency_limit_the_launches(world: World) -> None:
    for dataid in "1234":
        put(world.store, "bobin", dataid)
    world.define(runs_per_job=3, batch=2)
    requests = world.tick()
    assert len({request.run_key for request in requests}) == 2  # two are enough for four

    policy(world.store, "loadbob", concurrency=1)
    assert len(world.tick()) == 1
    [claim] = take(world.store, "loadbob")
    assert world.why() == "loadbob: 3 claimable, at its concurrency of 1."
    world.store.finish(claim)
    assert len(world.tick()) == 1

    policy(world.store, "loadbob", paused_until="2099-01-01 00:00:00+00")
    assert world.why().startswith("loadbob: paused until 2099-01-01")
    policy(world.store, "loadbob", paused_until=None)
    assert len(world.tick()) == 1


@one_store
def test_every_minutes_limits_how_often_a_job_is_launched(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(world.store, "bobin", "1")
    policy(world.store, "loadbob", every_minutes=30)
    [request] = world.tick()
    world.run(request)
    put(world.store, "bobin", "2")
    assert world.why().startswith("loadbob: 1 claimable, every 30 minutes, launched ")
    later = time.time() + 1800
    monkeypatch.setattr(launching, "time", SimpleNamespace(time=lambda: later))
    assert len(world.tick()) == 1


@one_store
def test_a_job_has_as_many_runs_as_allowed(world: World) -> None:
    for dataid in range(5):
        put(world.store, "bobin", str(dataid))
    world.define(runs_per_job=2, batch=2)
    one, two = world.tick()
    assert one.run_key != two.run_key
    runs = [world.begin(each, dg.DagsterRunStatus.STARTED) for each in (one, two)]
    assert world.why() == "loadbob: 5 claimable, 2 runs at work."
    world.run(one)
    world.instance.report_run_failed(runs[0])
    [three] = world.tick()
    assert three.run_key not in (one.run_key, two.run_key)


def test_each_job_is_reported_and_an_unregistered_one_holds_up_no_other(world: World) -> None:
    register(world.store, "after", ["bobout"], ["end"])
    register(world.store, "other", ["x"], ["y"])
    world.define()
    put(world.store, "bobin", "1")
    put(world.store, "x", "9")
    assert {request.tags["opendataflow/catch-up-job"] for request in world.tick()} == {
        "loadbob",
        "other",
    }
    sql(world.store, "delete from job where jobid = 'other'")
    [request] = world.tick()
    world.run(request)
    [request] = world.tick()
    assert request.asset_selection == [dg.AssetKey("end")]
    world.run(request)
    assert world.why() == "other: Job 'other' isn't registered; nothing claimable: after, loadbob."


def test_today_is_launched_once(world: World) -> None:
    register(world.store, "daily", ["today"], ["report"])
    world.define()
    today = world.store.today()
    [request] = world.tick()
    world.run(request)
    assert world.made == [today]
    assert f"daily: today's chunk {today} is READY" in world.why()
    sql(world.store, "update datastatus set status = 'RESUBMIT' where datasetid = 'report'")
    [again] = world.tick()
    assert again.run_key != request.run_key
    sql(world.store, "update datastatus set status = 'FAILED' where datasetid = 'report'")
    assert f"daily: today's chunk {today} is FAILED: `odf resubmit`" in world.why()


@one_store
def test_a_selection_of_assets_runs_a_job_too(world: World) -> None:
    put(world.store, "bobin", "1")
    assets = world.jobs["loadbob"]
    assert isinstance(assets, dg.AssetsDefinition)
    sensor = catch_up_sensor(world.dataflow, {"loadbob": dg.AssetSelection.assets("bobout")})
    world.definitions = dg.Definitions(
        assets=[assets], sensors=[sensor], resources={"dataflow": world.dataflow}
    )
    world.ticker = Ticker(sensor, world.instance, world.definitions)
    [request] = world.tick()
    assert request.tags["dagster/asset_partition_range_start"] == "1"
    assert world.run(request).success


@one_store
def test_without_jobs_no_runs_are_launched(
    store: Store, url: str, instance: dg.DagsterInstance
) -> None:
    sensor = catch_up_sensor(DataflowResource(url=url), {})
    said = Ticker(sensor, instance, dg.Definitions(sensors=[sensor])).tick()
    assert said.skip_message == "There is no job to launch."


def test_with_the_database_away_a_tick_says_so_and_the_cursor_stays(
    tmp_path: Path, instance: dg.DagsterInstance
) -> None:
    dataflow = DataflowResource(url=f"sqlite:///{tmp_path / 'away.db'}")
    sensor = catch_up_sensor(dataflow, {"loadbob": dg.AssetSelection.assets("bobout")})
    ticker = Ticker(sensor, instance, dg.Definitions(sensors=[sensor]))
    ticker.cursor = "here"
    said = ticker.tick()
    assert said.skip_message.startswith("The tables of OpenDataFlow can't be read: There is no dat")
    assert "\n" not in said.skip_message
    assert said.cursor == "here"


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_an_outage_is_one_line_and_launching_resumes_after_it(
    world: World, postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "DATABASE_WAIT_SECONDS", 0.1)
    put(world.store, "bobin", "1")
    [request] = world.tick()
    vars(world.store).pop("person").close()
    postgres_server.stop("immediate")
    assert world.why().startswith("The tables of OpenDataFlow can't be read: ")
    assert "\n" not in world.why()
    postgres_server.start()
    assert [again.run_key for again in world.tick()] == [request.run_key]


def test_the_daemon_launches_a_run_that_produces_what_is_offered(
    sqlite_url: str, tmp_path: Path
) -> None:
    store = open_store(sqlite_url)
    store.init()
    register(store, "loadbob", ["bobin"], ["bobout"])
    for dataid in ("1", "2", "odd,one"):
        put(store, "bobin", dataid)

    def made(dataid: str) -> bool:
        return status(store, "bobout", dataid, "loadbob") == "READY"

    location = ROOT / "tests" / "support" / "code_locations" / "catching.py"
    with Dagster(
        location, env={"DATAFLOW_URL": sqlite_url}, servers=("code_server", "daemon")
    ) as dagster:
        wait_for(lambda: made("odd,one"), bool, 40, "what there was is made")
        key = dg.AssetKey("bobout")
        wait_for(
            lambda: dagster.instance.get_materialized_partitions(key),
            lambda found: found == {"1", "2", "odd%2Cone"},
            10,
            "it is shown",
        )
        # Now the input has been materialized too, which is what Dagster asks about.
        for dataid in ("1", "3"):
            dagster.instance.report_runless_asset_event(
                dg.AssetMaterialization("bobin", partition=dataid)
            )
        put(store, "bobin", "3")
        wait_for(lambda: made("3"), bool, 40, "what came is made")
        wait_for(
            lambda: [run.status.value for run in dagster.instance.get_runs()],
            lambda found: found == ["SUCCESS", "SUCCESS"],
            20,
            "one run each",
        )

        put(store, "bobin", "slow")
        wait_for(
            lambda: status(store, "bobout", "slow", "loadbob"), lambda s: s == "RUNNING", 40, "slow"
        )
        dagster.kill("run_workers")
        wait_for(
            lambda: sql(store, "select losses from claim where dataid = 'slow'"),
            lambda found: found == [(1,)],
            40,
            "the killed run is settled",
        )
        [killed] = dagster.instance.get_runs(
            filters=dg.RunsFilter(statuses=[dg.DagsterRunStatus.FAILURE])
        )
        wait_for(
            lambda: sql(store, "select runid, owner from claim where dataid = 'slow'"),
            lambda found: found and found[0][1] and found[0][0] != killed.run_id,
            40,
            "again",
        )
    close(store)


def test_a_run_that_died_before_it_began_soon_stops_blocking_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from opendataflow_dagster.dagster import launch as launching
    from opendataflow_dagster.store import open_store
    from opendataflow_dagster.store.claims import begin_work

    store = open_store(f"sqlite:///{tmp_path}/flow.db")
    store.init()
    with dg.DagsterInstance.ephemeral() as instance:
        run = dg.DagsterRun(
            "any", status=dg.DagsterRunStatus.STARTED, tags={launching.JOB_TAG: "loadbob"}
        )
        instance.add_run(run)
        launcher = launching.Launcher(instance)
        assert len(launcher.at_work(["loadbob"], store)["loadbob"]) == 1
        monkeypatch.setattr(launching, "WORKER_START_SECONDS", -1.0)
        assert launcher.at_work(["loadbob"], store)["loadbob"] == []
        begin_work(store, "somebody", run.run_id, "loadbob")
        assert len(launcher.at_work(["loadbob"], store)["loadbob"]) == 1
    store.close()
