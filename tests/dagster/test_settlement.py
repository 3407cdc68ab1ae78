"""How the chunks of Dagster runs that ended, were canceled, or died are settled."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from opendataflow_dagster.dagster import resources
from opendataflow_dagster.dagster.resources import DataflowResource
from opendataflow_dagster.dagster.sensors import (
    end_lost_runs,
    settle_ended_runs,
    settlement_sensor,
)
from opendataflow_dagster.model import Recovered
from opendataflow_dagster.store.claims import begin_work
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, everything, put, register, sql, status, take

RUN = "7c0e2a44-0000-4000-8000-00000000000"
State = dg.DagsterRunStatus


@dg.job
def anything() -> None:
    """A job whose runs alone matter."""


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as made:
        yield made


@pytest.fixture
def job(store: Store) -> Store:
    """A store with a job that has three chunks to produce."""
    register(store, "job", ["a"], ["b"])
    for dataid in "123":
        put(store, "a", dataid)
    return store


def begin(
    store: Store,
    instance: dg.DagsterInstance,
    state: State = State.STARTED,
    *,
    owner: str = "w1",
    worker: bool = True,
    **tags: str,
) -> dg.DagsterRun:
    """A run in some state that has a worker and holds a chunk."""
    tags = {name.replace("_", "/", 1).replace("_", "-"): value for name, value in tags.items()}
    run = instance.create_run_for_job(anything, status=state, tags=tags)
    if worker:
        begin_work(store, owner, run.run_id, "job", 60)
        take(store, "job", owner, runid=run.run_id)
    return run


def lose(store: Store, owner: str = "w1") -> None:
    """Let the lease of a worker, and of its claims, have expired long ago."""
    for table in ("worker", "claim"):
        sql(
            store,
            f"update {table} set lease_end = '2001-01-01 00:00:00' where owner = :owner",
            owner=owner,
        )


def state(instance: dg.DagsterInstance, run: dg.DagsterRun) -> State:
    found = instance.get_run_by_id(run.run_id)
    assert found is not None
    return found.status


def unchanged(store: Store, work: Any) -> bool:
    """Whether some work settles nothing and writes nothing."""
    before = everything(store), sql(store, "select * from worker")
    return work() == [] and (everything(store), sql(store, "select * from worker")) == before


@pytest.mark.parametrize(
    ("ended", "after", "why"),
    [
        (State.CANCELED, "HOLD", "terminated by a person in Dagster: run {}"),
        (State.FAILURE, "RESUBMIT", "run {} failed: w1 lost claim 1 of 5"),
        (
            State.SUCCESS,
            "RESUBMIT",
            "run {} ended without settling its chunks: w1 lost claim 1 of 5",
        ),
    ],
)
def test_the_chunks_of_an_ended_run_are_settled(
    job: Store, instance: dg.DagsterInstance, ended: State, after: str, why: str
) -> None:
    run = begin(job, instance, ended)
    other = begin(job, instance, owner="w2")
    assert settle_ended_runs(job, instance) == [
        Recovered("job", "1", after, why.format(run.run_id))
    ]
    assert status(job, "b", "1", "job") == after
    assert sql(job, "select runid from worker") == [(other.run_id,)]
    assert unchanged(job, lambda: settle_ended_runs(job, instance))
    check(job)


def test_active_runs_and_runs_of_another_dagster_are_left_alone(
    job: Store, instance: dg.DagsterInstance
) -> None:
    assert unchanged(job, lambda: settle_ended_runs(job, instance))
    for number, each in enumerate((State.STARTED, State.STARTING)):
        begin(job, instance, each, owner=f"w{number}")
    take(job, "job", "stranger", runid=RUN + "9")
    assert unchanged(job, lambda: settle_ended_runs(job, instance))
    assert unchanged(job, lambda: end_lost_runs(job, instance))


def test_a_run_without_live_workers_is_ended(job: Store, instance: dg.DagsterInstance) -> None:
    run = begin(job, instance)
    assert end_lost_runs(job, instance) == []
    lose(job)
    assert end_lost_runs(job, instance, grace=10**9) == []
    assert state(instance, run) == State.STARTED
    why = f"the workers of run {run.run_id} are gone: w1 lost claim 1 of 5"
    assert end_lost_runs(job, instance) == [Recovered("job", "1", "RESUBMIT", why)]
    assert state(instance, run) == State.FAILURE
    assert unchanged(job, lambda: end_lost_runs(job, instance))
    assert unchanged(job, lambda: settle_ended_runs(job, instance))
    check(job)


def test_a_run_that_died_while_it_was_canceled_is_canceled(
    job: Store, instance: dg.DagsterInstance
) -> None:
    run = begin(job, instance, State.CANCELING)
    lose(job)
    [settled] = end_lost_runs(job, instance)
    assert settled.status == "HOLD"
    assert settled.reason == f"terminated by a person in Dagster: run {run.run_id}"
    assert state(instance, run) == State.CANCELED


def test_a_run_with_one_live_worker_continues(job: Store, instance: dg.DagsterInstance) -> None:
    run = begin(job, instance)
    begin_work(job, "w2", run.run_id, "job", 60)
    lose(job)
    assert unchanged(job, lambda: end_lost_runs(job, instance))
    assert state(instance, run) == State.STARTED


def test_the_lost_worker_of_an_unknown_run_is_settled_by_its_lease(
    job: Store, instance: dg.DagsterInstance
) -> None:
    begin_work(job, "w1", RUN + "8", "job", 60)
    take(job, "job", "w1", runid=RUN + "8")
    lose(job)
    [settled] = end_lost_runs(job, instance)
    assert settled.status == "RESUBMIT"
    assert sql(job, "select * from worker") == []


def test_a_run_of_another_dagster_is_left_to_it_for_a_while(
    job: Store, instance: dg.DagsterInstance
) -> None:
    begin_work(job, "w1", RUN + "7", "job", 0)
    take(job, "job", "w1", runid=RUN + "7")
    assert unchanged(job, lambda: end_lost_runs(job, instance))
    assert [each.status for each in end_lost_runs(job, instance, silence=-60)] == ["RESUBMIT"]


def test_a_kill_between_the_runs_end_and_settlement_is_repaired(
    job: Store, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begin(job, instance)
    lose(job)
    with monkeypatch.context() as patched:
        patched.setattr("opendataflow_dagster.dagster.sensors.settle_run", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            end_lost_runs(job, instance)
    assert state(instance, run) == State.FAILURE
    [settled] = settle_ended_runs(job, instance)
    assert settled.status == "RESUBMIT"


def test_a_run_that_died_without_a_worker_is_ended_after_a_while(
    job: Store, instance: dg.DagsterInstance
) -> None:
    ours = {"opendataflow_catch_up": "true"}
    dead = begin(job, instance, worker=False, **ours)
    busy = begin(job, instance, **ours)
    theirs = begin(job, instance, worker=False)
    assert end_lost_runs(job, instance) == []
    assert state(instance, dead) == State.STARTED
    assert end_lost_runs(job, instance, silence=-60) == []
    assert state(instance, dead) == State.FAILURE
    assert state(instance, busy) == state(instance, theirs) == State.STARTED
    instance.report_run_canceled(busy)


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_locked_claim_does_not_delay_others(job: Store, instance: dg.DagsterInstance) -> None:
    begin(job, instance, State.FAILURE)
    begin(job, instance, State.FAILURE, owner="w2")
    sql(job, "begin")
    sql(job, "select 1 from claim where dataid = '1' for update")
    assert [each.dataid for each in settle_ended_runs(job, instance)] == ["2"]
    sql(job, "rollback")
    assert [each.dataid for each in settle_ended_runs(job, instance)] == ["1"]


def test_the_sensor_settles_and_says_when_it_cannot(
    job: Store, url: str, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    sensor = settlement_sensor(DataflowResource(url=url))
    begin(job, instance, State.CANCELED)
    assert said_by(sensor, instance) == "1 chunk of ended runs settled."
    assert status(job, "b", "1", "job") == "HOLD"
    assert said_by(sensor, instance) == "No ended run holds a chunk."

    away = settlement_sensor(DataflowResource(url=f"sqlite:///{tmp_path / 'away.db'}"))
    line = said_by(away, instance)
    assert line.startswith("The tables of OpenDataFlow can't be read: There is no dat")
    assert line.endswith("Nothing is settled.")
    for opened in resources._stores.values():
        opened.close()
    resources._stores.clear()


def said_by(sensor: dg.SensorDefinition, instance: dg.DagsterInstance) -> str:
    """What a tick of a sensor says."""
    with dg.build_sensor_context(instance=instance) as context:
        return sensor.evaluate_tick(context).skip_message or ""
