"""Workers of runs, and the settlement of runs that ended, on both databases."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from opendataflow_dagster.errors import StaleClaim
from opendataflow_dagster.model import Recovered
from opendataflow_dagster.store.claims import beat, begin_work, lost_runs, runs_at_work, settle_run
from opendataflow_dagster.store.operations import release
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import (
    check,
    everything,
    policy,
    put,
    register,
    sql,
    status,
    statuses,
    take,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def job(store: Store) -> Store:
    """A store with a job that has four chunks to produce."""
    register(store, "job", ["a"], ["b", "c"])
    for dataid in "1234":
        put(store, "a", dataid)
    return store


def gone(store: Store, owner: str = "w1") -> None:
    """Let a worker's lease have expired a minute ago."""
    sql(store, "update worker set lease_end = '2001-01-01 00:00:00' where owner = :o", o=owner)


def workers(store: Store) -> list[tuple]:
    return sql(store, "select owner, runid, jobid from worker order by owner")


def test_the_table_is_documented(store: Store) -> None:
    statement = "select * from worker"
    columns = [column[0] for column in store.db.execute(statement, {})[1].description]
    page = (ROOT / "docs" / "tables.md").read_text()
    assert re.findall(r"^\| `worker` \| (.*) \|$", page, re.MULTILINE) == [", ".join(columns)]


def test_an_older_database_gets_the_table_on_init(store: Store) -> None:
    store.db.execute("drop table worker", {})
    store.init()
    begin_work(store, "w1", "run", "job", 60)
    store.init()
    assert workers(store) == [("w1", "run", "job")]


def test_a_worker_begins_beats_and_ends_with_its_run(store: Store) -> None:
    begin_work(store, "w1", "run", "job", 60)
    begin_work(store, "w1", "run", "job", 60)
    begin_work(store, "w2", "other run", "job", 60)
    assert beat(store, "w1", 60)
    assert lost_runs(store) == []
    settle_run(store, "run", why="it is over", canceled=False)
    settle_run(store, "run", why="it is over", canceled=False)
    assert workers(store) == [("w2", "other run", "job")]
    assert not beat(store, "w1", 60)


def test_a_workers_lease_is_that_of_its_jobs_policy(store: Store) -> None:
    assert begin_work(store, "w1", "run", "job", 60) == pytest.approx(60, abs=0.01)
    policy(store, "job", lease_seconds=7)
    assert beat(store, "w1", 60) == pytest.approx(7, abs=0.01)
    assert begin_work(store, "w2", "run", "job", 60) == pytest.approx(7, abs=0.01)
    assert begin_work(store, "w3", "run", "other", 60) == pytest.approx(60, abs=0.01)


def test_a_worker_is_lost_when_its_lease_is_over_and_back_when_it_beats(store: Store) -> None:
    begin_work(store, "w1", "run", "job", 0)
    begin_work(store, "w2", "other run", "job", 60)
    store.db.run("claims.now")
    assert lost_runs(store, grace=3600) == []
    gone(store)
    assert lost_runs(store, grace=3600) == ["run"] == lost_runs(store)
    assert beat(store, "w1", 60)
    assert lost_runs(store) == []


def test_active_runs_are_those_with_claims_or_workers(job: Store) -> None:
    assert runs_at_work(job) == []
    take(job, "job", "w1", runid="r1", k=2)
    take(job, "job", "odf")
    begin_work(job, "w2", "r2", "job", 60)
    assert runs_at_work(job) == ["r1", "r2"]


def test_the_chunks_of_a_lost_run_are_produced_again(job: Store) -> None:
    begin_work(job, "w1", "r1", "job", 60)
    mine = take(job, "job", "w1", k=2, runid="r1")
    other = take(job, "job", "w2", k=1, runid="r2")
    begin_work(job, "w2", "r2", "job", 60)

    settled = settle_run(job, "r1", why="the run failed", canceled=False)

    reason = "the run failed: w1 lost claim 1 of 5"
    assert settled == [Recovered("job", dataid, "RESUBMIT", reason) for dataid in "12"]
    assert workers(job) == [("w2", "r2", "job")]
    assert [status(job, "b", dataid, "job") for dataid in "123"] == [
        "RESUBMIT",
        "RESUBMIT",
        "RUNNING",
    ]
    assert not [row for key, row in statuses(job, "1").items() if row[0] == "IN"]
    told = sql(
        job, "select who, why from dataevent where dataid = '1' and status_after = 'RESUBMIT'"
    )
    assert told == [("dagster", reason)] * 2
    assert sql(job, "select losses, owner from claim where dataid = '1'") == [(1, None)]
    with pytest.raises(StaleClaim):
        job.finish(mine)
    job.finish(other)
    assert [claim.dataid for claim in take(job, "job", "w3", k=2)] == ["1", "2"]
    check(job)


def test_a_chunk_that_is_lost_too_often_is_held(job: Store) -> None:
    policy(job, "job", max_losses=2)
    for expected in ("RESUBMIT", "HOLD"):
        take(job, "job", "w1", only="1", runid="r1")
        [settled] = settle_run(job, "r1", why="the run failed", canceled=False)
        assert settled.status == expected == status(job, "b", "1", "job")
    check(job)


def test_the_claims_of_a_canceled_run_are_held_until_release(job: Store) -> None:
    policy(job, "job", max_attempts=5)
    take(job, "job", "w1", k=2, runid="r1")
    begin_work(job, "w1", "r1", "job", 60)
    settled = settle_run(job, "r1", why="the run was canceled", canceled=True)
    assert settled == [Recovered("job", each, "HOLD", "the run was canceled") for each in "12"]
    assert sql(job, "select * from claim") == [] == workers(job)
    assert {row for _, row in statuses(job).items() if row[0] == "IN"} == set()
    told = sql(
        job,
        "select distinct who, why, status_after from dataevent where status_before = 'RUNNING'"
        " and locktype = 'OUT'",
    )
    assert told == [("dagster", "the run was canceled", "HOLD")]
    assert [claim.dataid for claim in take(job, "job", "w2", k=9)] == ["3", "4"]
    release(job, "job", ["1", "2"])
    assert [claim.dataid for claim in take(job, "job", "w3", k=9)] == ["1", "2"]
    check(job)


@pytest.mark.parametrize("canceled", [True, False])
def test_settling_again_changes_nothing(job: Store, canceled: bool) -> None:
    take(job, "job", "w1", k=2, runid="r1")
    settle_run(job, "r1", why="it ended", canceled=canceled)
    before = everything(job)
    assert settle_run(job, "r1", why="it ended", canceled=canceled) == []
    assert settle_run(job, "nobody", why="it ended", canceled=canceled) == []
    assert everything(job) == before


def test_chunks_recovered_by_another_run_are_left_alone(job: Store) -> None:
    take(job, "job", "w1", only="1", runid="r1")
    sql(job, "update datastatus set status = 'RESUBMIT' where datasetid = 'b' and dataid = '1'")
    [claim] = take(job, "job", "w2", only="1", runid="r2")
    assert settle_run(job, "r1", why="it ended", canceled=False) == []
    job.finish(claim)
    check(job)


@pytest.mark.parametrize("canceled", [True, False])
def test_settling_beside_finishers_and_heartbeats_loses_and_doubles_nothing(
    job: Store, canceled: bool
) -> None:
    for number in range(5, 65):
        put(job, "a", str(number))
    claims = take(job, "job", "w1", k=64, runid="r1")
    begin_work(job, "w1", "r1", "job", 60)
    start = threading.Barrier(4)

    def finish() -> set[str]:
        done = set()
        for claim in claims:
            try:
                job.finish(claim)
            except StaleClaim:
                continue
            done.add(claim.dataid)
        return done

    def settle() -> set[str]:
        return {each.dataid for each in settle_run(job, "r1", why="x", canceled=canceled)}

    def heart() -> set[str]:
        for _ in range(10):
            job.heartbeat(claims)
        return set()

    def at_once(work: Callable[[], set[str]]) -> set[str]:
        start.wait()
        try:
            return work()
        finally:
            job.db.drop()

    with ThreadPoolExecutor(4) as pool:
        finished, one, two, _ = pool.map(at_once, [finish, settle, settle, heart])
    assert finished | one | two == {claim.dataid for claim in claims}
    assert not (finished & (one | two))
    assert not (one & two)
    after = "HOLD" if canceled else "RESUBMIT"
    for claim in claims:
        expected = "READY" if claim.dataid in finished else after
        for datasetid in "bc":
            assert status(job, datasetid, claim.dataid, "job") == expected
    assert workers(job) == [] == sql(job, "select 1 from claim where owner is not null")
    check(job)


def test_of_claims_that_are_lost_together_none_is_held(store: Store) -> None:
    register(store, "lone", [], ["made"])
    for dataid in "12":
        put(store, "made", dataid, "PENDING", jobid="lone")
    for count, told in ((2, "RESUBMIT"), (1, "RESUBMIT"), (1, "HOLD")):
        take(store, "lone", k=count, runid="r1")
        settled = settle_run(
            store,
            "r1",
            why="it ended",
            canceled=False,
            max_losses=3,
            blame_together=False,
        )
        assert [each.status for each in settled] == [told] * count
    check(store)
