"""Schedules of jobs that read `today`: when they tick, and what they launch."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from opendataflow_dagster.dagster import launch as catch_up_sensor
from opendataflow_dagster.dagster import launch as schedules
from opendataflow_dagster.dagster import resources
from opendataflow_dagster.dagster.assets import dataflow_assets
from opendataflow_dagster.dagster.launch import cron, today_schedules, zone_name
from opendataflow_dagster.dagster.resources import DataflowResource
from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.store.catalog import read_catalog
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import policy, put, register, sql


class Daily:
    """A store with the job `daily`, and its schedule in a Dagster."""

    def __init__(self, store: Store, url: str, instance: dg.DagsterInstance) -> None:
        self.store, self.instance = store, instance
        self.dataflow = DataflowResource(url=url, timezone="Europe/Berlin")
        self.today = self.dataflow.store.today()
        self.made: list[str] = []
        self.define()

    def define(self) -> None:
        catalog = read_catalog(self.store)
        jobs: dict[str, catch_up_sensor.Target] = {
            jobid: dataflow_assets(job=jobid, dataflow=catalog)(
                lambda chunk: self.made.append(chunk.dataid)
            )
            for jobid in catalog.jobs
        }
        self.schedules = today_schedules(self.dataflow, jobs, catalog=catalog)
        self.definitions = dg.Definitions(
            assets=[*jobs.values()],  # type: ignore[arg-type]
            schedules=self.schedules,
            resources={"dataflow": self.dataflow},
        )

    def tick(self) -> dg.RunRequest | str:
        """Return the run that a tick requests, or why it requests none."""
        for store in resources._stores.values():
            store._plans.clear()
        context = dg.build_schedule_context(
            instance=self.instance, repository_def=self.definitions.get_repository_def()
        )
        said = self.schedules[0].evaluate_tick(context)
        return said.run_requests[0] if said.run_requests else said.skip_message

    def launch(self) -> dg.RunRequest:
        """Return the run that a tick requests, executed like by a run worker."""
        request = self.tick()
        assert isinstance(request, dg.RunRequest)
        job = self.definitions.resolve_implicit_global_asset_job_def()
        assert job.execute_in_process(
            instance=self.instance,
            asset_selection=list(request.asset_selection or ()),
            tags=request.tags,
        ).success
        return request


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as made:
        yield made


@pytest.fixture
def daily(store: Store, url: str, instance: dg.DagsterInstance) -> Iterator[Daily]:
    register(store, "daily", ["today"], ["report"])
    register(store, "loadbob", ["bobin"], ["bobout"])
    yield Daily(store, url, instance)
    instance.wipe()
    for opened in resources._stores.values():
        opened.close()
    resources._stores.clear()


def test_jobs_that_read_today_get_a_schedule_just_after_midnight(daily: Daily) -> None:
    [made] = daily.schedules
    assert made.name == "opendataflow_today_daily"
    assert made.cron_schedule == "1 0 * * *"
    assert made.execution_timezone == "Europe/Berlin"
    assert made.default_status == dg.DefaultScheduleStatus.STOPPED
    policy(daily.store, "daily", every_minutes=15)
    daily.define()
    assert daily.schedules[0].cron_schedule == "*/15 * * * *"


def test_today_is_launched_once_and_again_after_a_resubmit(daily: Daily) -> None:
    first = daily.launch()
    assert daily.made == [daily.today]
    assert daily.today in (first.run_key or "")
    assert first.tags["opendataflow/catch-up"] == "true"
    assert first.asset_selection == [dg.AssetKey("report")]
    assert daily.tick() == f"daily: today's chunk {daily.today} is READY."

    sql(daily.store, "update datastatus set status = 'RESUBMIT' where datasetid = 'report'")
    again = daily.launch()
    assert again.run_key != first.run_key
    assert daily.made == [daily.today] * 2


def test_chunks_on_hold_running_or_paused_are_not_launched(daily: Daily) -> None:
    request = daily.tick()
    assert isinstance(request, dg.RunRequest)
    run = daily.instance.create_run_for_job(
        daily.definitions.resolve_implicit_global_asset_job_def(),
        tags=request.tags,
        status=dg.DagsterRunStatus.STARTED,
    )
    assert daily.tick() == "daily: 1 claimable, 1 run at work."
    daily.instance.report_run_failed(run)

    policy(daily.store, "daily", paused_until="2099-01-01 00:00:00+00")
    assert str(daily.tick()).startswith("daily: paused until 2099-01-01")
    policy(daily.store, "daily", paused_until=None)

    [claim] = daily.dataflow.store.claim("daily", owner="somebody")
    assert daily.tick() == f"daily: today's chunk {daily.today} is RUNNING."
    daily.store.fail(claim, "no")
    assert daily.tick() == (
        f"daily: today's chunk {daily.today} is FAILED: `odf resubmit` makes it again."
    )
    sql(daily.store, "update datastatus set status = 'HOLD' where datasetid = 'report'")
    assert daily.tick() == f"daily: today's chunk {daily.today} is HOLD."


def test_today_waits_for_the_other_inputs(daily: Daily) -> None:
    register(daily.store, "daily", ["bobin"])
    daily.define()
    assert daily.tick() == f"daily: the inputs of today's chunk {daily.today} aren't READY."
    put(daily.store, "bobin", daily.today)
    put(daily.store, "bobin", "2001-01-01")
    daily.launch()
    assert daily.made == [daily.today]


def test_every_minutes_counts_from_the_last_launch(
    daily: Daily, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(daily.store, "daily", every_minutes=45)
    daily.define()
    daily.launch()
    sql(daily.store, "update datastatus set status = 'RESUBMIT' where datasetid = 'report'")
    assert str(daily.tick()).startswith("daily: 1 claimable, every 45 minutes, launched ")
    later = time.time() + 45 * 60
    monkeypatch.setattr(catch_up_sensor, "time", SimpleNamespace(time=lambda: later))
    assert isinstance(daily.tick(), dg.RunRequest)


def test_with_the_database_away_a_tick_says_so(daily: Daily, tmp_path: Path) -> None:
    assets: Any = daily.definitions.resolve_assets_def("report")
    away = DataflowResource(url=f"sqlite:///{tmp_path / 'away.db'}")
    daily.schedules = today_schedules(away, {"daily": assets}, catalog=read_catalog(daily.store))
    assert str(daily.tick()).startswith("The tables of OpenDataFlow can't be read: There is no")


@pytest.mark.parametrize(
    ("minutes", "zone", "expected"),
    [
        (None, "UTC", "1 0 * * *"),
        (None, None, "1 */1 * * *"),
        (1, "UTC", "*/1 * * * *"),
        (15, "UTC", "*/15 * * * *"),
        (45, "UTC", "*/15 * * * *"),
        (7, "UTC", "*/1 * * * *"),
        (60, "UTC", "1 */1 * * *"),
        (90, "UTC", "*/30 * * * *"),
        (360, None, "1 */6 * * *"),
        (1440, "UTC", "1 0 * * *"),
        (10080, "UTC", "1 0 * * *"),
        (1500, "UTC", "1 */1 * * *"),
    ],
)
def test_a_schedule_ticks_often_enough_for_the_dial(
    minutes: int | None, zone: str | None, expected: str
) -> None:
    assert cron(minutes, zone) == expected

    @dg.schedule(cron_schedule=expected, target=dg.AssetSelection.all())
    def valid() -> None:
        """Dagster takes it."""


def test_days_begin_in_the_machines_time_zone_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert zone_name("Asia/Tokyo") == "Asia/Tokyo"
    with pytest.raises(WrongUse):
        zone_name("Nowhere/Land")
    monkeypatch.setenv("TZ", ":Europe/Paris")
    assert zone_name(None) == "Europe/Paris"
    monkeypatch.setenv("TZ", "<+03>-3")
    assert zone_name(None) is None
    monkeypatch.delenv("TZ")
    monkeypatch.setattr(schedules.os.path, "realpath", lambda _: "/usr/share/zoneinfo/Asia/Seoul")
    assert zone_name(None) == "Asia/Seoul"
