"""Workers, connections and servers that die at the worst time: the next run converges."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from opendataflow_dagster.errors import LostRace, StaleClaim
from opendataflow_dagster.model import new_owner
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.store import Store
from tests.support.crash_worker import POINTS
from tests.support.postgres import Server
from tests.support.store_fixtures import (
    check,
    close,
    connect,
    everything,
    expire,
    put,
    register,
    sql,
    status,
    statuses,
    take,
)

ROOT = Path(__file__).parents[2]


def doomed(url: str, point: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.crash_worker", url, point],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def prepare(store: Store, chunks: int) -> list[str]:
    """`job` reads a and b, and writes c and d; so many chunks are READY."""
    register(store, "job", ["a", "b"], ["c", "d"])
    dataids = [str(n) for n in range(1, chunks + 1)]
    for dataid in dataids:
        put(store, "a", dataid)
        put(store, "b", dataid)
    return dataids


def catch_up(store: Store) -> None:
    """Run again, as often as cron would."""
    store.recover()
    while claims := take(store, "job", new_owner()):
        store.finish(claims)


def converged(store: Store, dataids: list[str]) -> None:
    """Every output is READY, by one end each; no lock and no claim is left."""
    outputs = {key[0] + key[2]: row for key, row in statuses(store).items() if key[1] == "job"}
    assert outputs == {out + dataid: ("OUT", "READY") for out in "cd" for dataid in dataids}
    ends = sql(
        store,
        "select datasetid, dataid from dataevent where jobid = 'job' "
        "and status_before = 'RUNNING' and status_after = 'READY'",
    )
    assert Counter(out + dataid for out, dataid in ends) == Counter(outputs.keys())
    facts = sql(store, "select datasetid, dataid from chunkfact where jobid = 'job'")
    assert Counter(out + dataid for out, dataid in facts) == Counter(outputs.keys())
    assert sql(store, "select count(*) from claim") == [(0,)]
    check(store)


@pytest.mark.parametrize("point", POINTS)
def test_after_a_worker_is_killed_anywhere_the_next_run_converges(
    store: Store, url: str, point: str
) -> None:
    dataids = prepare(store, 3)
    child = doomed(url, point)
    _, err = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, err
    check(store)
    if point in ("before claim", "claim begun", "claim written"):
        assert sql(store, "select count(*) from claim") == [(0,)]
    expire(store)
    store.recover()
    assert not [row for row in statuses(store).values() if row[1] == "RUNNING"]
    check(store)
    if point == "after fail":
        assert status(store, "c", "1", "job") == "FAILED"
        sql(
            store,
            "update datastatus set status = 'RESUBMIT' where datasetid = 'c' and dataid = '1'",
        )
    catch_up(store)
    converged(store, dataids)


def test_a_worker_stopped_past_its_lease_changes_nothing_when_it_wakes(
    store: Store, url: str
) -> None:
    dataids = prepare(store, 1)
    sql(store, "insert into jobpolicy (jobid, lease_seconds) values ('job', 1)")
    child = doomed(url, "stop")
    assert child.stdout is not None
    assert child.stdout.readline() == "claimed\n"
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    wait_until(lambda: bool(store.recover()))
    catch_up(store)
    converged(store, dataids)

    before = everything(store)
    os.kill(child.pid, signal.SIGCONT)
    out, err = child.communicate("go\n", timeout=30)
    assert (out, child.returncode) == ("stale\n", 0), err
    assert everything(store) == before


def test_a_worker_stopped_within_its_lease_continues(store: Store, url: str) -> None:
    dataids = prepare(store, 1)
    child = doomed(url, "stop")
    assert child.stdout is not None
    child.stdout.readline()
    os.kill(child.pid, signal.SIGSTOP)
    assert store.recover() == []
    os.kill(child.pid, signal.SIGCONT)
    assert child.communicate("go\n", timeout=30)[0] == "settled\n"
    converged(store, dataids)


@pytest.mark.parametrize("batch", [1, 7])
def test_a_server_that_crashes_under_four_workers(
    postgres_server: Server, postgres_url: str, batch: int
) -> None:
    store = open_store(postgres_url)
    store.init()
    dataids = prepare(store, 400)
    done: Counter[str] = Counter()
    counting = threading.Lock()

    def work(_: int) -> None:
        owner = new_owner()
        while claims := store.claim("job", owner=owner, k=batch):
            with counting:
                done.update(claim.dataid for claim in claims)
            time.sleep(0.005)
            store.finish(claims)
        store.db.drop()

    with ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(work, number) for number in range(4)]
        for crash in range(3):
            wait_until(lambda part=crash: done.total() > (part + 1) * 80)
            postgres_server.stop("immediate")
            time.sleep(0.3)
            postgres_server.start()
        for worker in workers:
            worker.result(60)

    vars(store).pop("person").close()
    catch_up(store)
    assert done == Counter(dataids)
    converged(store, dataids)
    close(store)


def test_a_server_that_restarts_under_a_recovery(
    postgres_server: Server, postgres_url: str
) -> None:
    store = open_store(postgres_url)
    store.init()
    dataids = prepare(store, 2)
    take(store, "job", k=2)
    expire(store)
    vars(store).pop("person").close()
    postgres_server.restart("immediate")
    assert len(store.recover()) == 2
    catch_up(store)
    converged(store, dataids)
    close(store)


def test_an_open_select_delays_no_claim(store: Store) -> None:
    """COMPAT 12: the original waits until every reader is done."""
    dataids = prepare(store, 40)
    reader = connect(store)
    reader.execute("begin")
    assert reader.execute("select count(*) from datastatus").fetchone() == (80,)
    slowest = 0.0
    while True:
        started = time.monotonic()
        claims = take(store, "job")
        if not claims:
            break
        store.finish(claims)
        slowest = max(slowest, time.monotonic() - started)
    assert slowest < 20  # who waits for a reader here waits for ever
    reader.execute("commit")
    reader.close()
    converged(store, dataids)


def aside(store: Store, work: Callable[[], Any]) -> Any:
    """Do some work in another thread, and leave no connection behind."""

    def run() -> Any:
        try:
            return work()
        finally:
            store.db.drop()

    return ThreadPoolExecutor(1).submit(run)


def test_a_finish_waits_for_a_person_who_has_the_row_and_then_is_stale(postgres_url: str) -> None:
    """For longer than all races together take; the person isn't the victim of a deadlock."""
    store = open_store(postgres_url)
    store.init()
    prepare(store, 1)
    [claim] = take(store, "job")
    person = connect(store)
    person.execute("begin")
    person.execute(
        "update datastatus set status = 'RESUBMIT' where datasetid = 'd' and locktype = 'OUT'"
    )
    finished = aside(store, lambda: store.finish(claim))
    time.sleep(3)
    assert not finished.done()
    person.execute("update datastatus set status = 'HOLD' where datasetid = 'c'")
    person.execute("commit")
    with pytest.raises(StaleClaim):
        finished.result(20)
    assert (status(store, "c", "1", "job"), status(store, "d", "1", "job")) == ("HOLD", "RESUBMIT")
    check(store)
    person.close()
    close(store)


def test_our_finish_gives_way_to_a_person(postgres_url: str) -> None:
    """The person waits first, so that PostgreSQL would cancel their statement, and not ours."""
    store = open_store(postgres_url)
    store.init()
    prepare(store, 1)
    [claim] = take(store, "job")
    other, person = connect(store), connect(store)
    other.execute("begin")
    other.execute("select * from datastatus where datasetid = 'd' for update")
    waiting = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
    finished = aside(store, lambda: store.finish(claim))  # has its claim, and waits for d
    wait_until(lambda: sql(store, waiting) == [(1,)])
    sent = "update datastatus set status = 'RESUBMIT' where datasetid = 'c' and locktype = 'OUT'"
    sending = ThreadPoolExecutor(1).submit(person.execute, sent)  # has c, and waits for the claim
    wait_until(lambda: sql(store, waiting) == [(2,)])
    other.execute("rollback")  # now our finish wants c
    assert sending.result(20).rowcount == 1
    with suppress(StaleClaim):  # or it was done before
        finished.result(20)
    assert {row[1] for key, row in statuses(store).items() if key[0] in "cd"} == {"RESUBMIT"}
    check(store)
    other.close()
    person.close()
    close(store)


@pytest.mark.timeout(180)
def test_a_finish_waits_longer_than_any_number_of_races(postgres_url: str) -> None:
    store = open_store(postgres_url)
    store.init()
    prepare(store, 1)
    [claim] = take(store, "job")
    person = connect(store)
    person.execute("begin")
    person.execute("select * from datastatus where datasetid = 'c' for update")
    finished = aside(store, lambda: store.finish(claim))
    time.sleep(13)  # 50 races of 0.2 s, and their pauses
    assert not finished.done()
    person.execute("rollback")
    finished.result(20)
    converged(store, ["1"])
    person.close()
    close(store)


def test_a_claim_skips_a_chunk_that_a_person_has_locked(postgres_url: str) -> None:
    store = open_store(postgres_url)
    store.init()
    dataids = prepare(store, 3)
    put(store, "c", "2", "PENDING", jobid="job")
    person = connect(store)
    person.execute("begin")
    person.execute("select * from datastatus where datasetid = 'c' for update")
    claimed = aside(store, lambda: [take(store, "job", str(n))[0] for n in range(2)])
    claims = claimed.result(20)
    assert sorted(claim.dataid for claim in claims) == ["1", "3"]
    person.execute("commit")
    person.close()
    for claim in claims:
        store.finish(claim)
    catch_up(store)
    converged(store, dataids)
    close(store)


def test_a_claim_waits_for_another_writer_on_sqlite(sqlite_url: str) -> None:
    store = open_store(sqlite_url)
    store.init()
    dataids = prepare(store, 1)
    person = connect(store)
    person.execute("begin immediate")
    claimed = aside(store, lambda: take(store, "job"))
    time.sleep(0.5)
    assert not claimed.done()
    person.execute("rollback")
    store.finish(claimed.result(20))
    person.close()
    converged(store, dataids)
    close(store)


@pytest.mark.parametrize("isolation", ["serializable", "repeatable read"])
def test_serialization_errors_are_retried(postgres_url: str, isolation: str) -> None:
    """A database whose administrator chose another isolation level for everybody."""
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        name = admin.info.dbname
        admin.execute(f"alter database {name} set default_transaction_isolation = '{isolation}'")
    store = open_store(postgres_url)
    store.init()
    dataids = prepare(store, 150)
    done: Counter[str] = Counter()
    counting = threading.Lock()

    def work(number: int) -> None:
        owner, empty = new_owner(), 0
        while empty < 20:
            claims = store.claim("job", owner=owner, k=1 + number)
            empty = 0 if claims else empty + 1
            with counting:
                done.update(claim.dataid for claim in claims)
            if claims:
                store.finish(claims)
            else:
                time.sleep(0.02)
        store.db.drop()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert done == Counter(dataids)
    converged(store, dataids)
    close(store)


def test_deadlocks_are_retried_but_not_forever(postgres_url: str) -> None:
    store = open_store(postgres_url)
    store.init()
    prepare(store, 1)
    plain, errors = store.db.execute, iter([psycopg.errors.DeadlockDetected("one")] * 3)

    def unlucky(text: str, params: Any) -> Any:
        for error in errors:
            raise error
        return plain(text, params)

    store.db.execute = unlucky  # type: ignore[method-assign]
    store._plans.clear()
    [claim] = store.claim("job", owner="w")
    errors = iter([psycopg.errors.SerializationFailure("two")] * 5)
    store.finish(claim)
    converged(store, ["1"])
    errors = iter([psycopg.errors.DeadlockDetected("for ever")] * 1000)
    with pytest.raises(LostRace):
        store.recover()
    close(store)


def test_a_child_of_a_fork_doesnt_share_the_connection(store: Store) -> None:
    """Two processes that talk on one connection would get each other's answers."""
    dataids = prepare(store, 20)
    catch_up_some = take(store, "job", "parent")
    store.finish(catch_up_some)
    child = os.fork()
    if child == 0:
        try:
            while claims := store.claim("job", owner="child"):
                store.finish(claims)
        finally:
            os._exit(0)
    while claims := store.claim("job", owner="parent"):
        store.finish(claims)
    os.waitpid(child, 0)
    catch_up(store)
    converged(store, dataids)


def wait_until(done: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until `done` returns true; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"nothing after {seconds} s"
        time.sleep(0.02)
