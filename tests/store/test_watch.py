"""Workers waiting for chunks learn of them at once, and cost nothing while nobody waits."""

import time

from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.claims import Watcher, look
from opendataflow_dagster.store.store import Store
from tests.support.pooler import Pooler, needs_pgbouncer
from tests.support.postgres import Server
from tests.support.store_fixtures import close, connect, policy, put, register, sql, take


def prepared(store: Store) -> Store:
    register(store, "job", ["a"], ["b"])
    register(store, "next", ["b"], ["c"])
    store.fill()
    return store


def heard(watcher: Watcher, seconds: float = 0.3) -> bool:
    """Whether it notices a change within so many seconds."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if watcher.wait(left, []):
            return True
    return False


def test_a_chunk_that_becomes_claimable_wakes_the_listener(url: str, store: Store) -> None:
    prepared(store)
    with Watcher(store) as watcher:
        heard(watcher, 0.1)
        put(store, "a", "1")
        assert heard(watcher)
        heard(watcher, 0.1)
        assert not heard(watcher)
        [claim] = take(store, "job")
        if store.db.dialect == "postgres":  # a file tells of any change
            assert not heard(watcher)
        other = open_store(url)
        other.finish(claim)
        other.close()
        assert heard(watcher)


def test_a_wake_file_wakes_the_listener_at_once(store: Store) -> None:
    from os import pipe, write

    bell, doorbell = pipe()
    write(doorbell, b".")
    with Watcher(store) as watcher:
        watcher.wait(0, [])
        since = time.monotonic()
        assert not watcher.wait(5, [bell])
        assert time.monotonic() - since < 1


def test_notices_are_sent_only_to_listeners_at_most_twenty_a_second(postgres_url: str) -> None:
    store = open_store(postgres_url)
    store.init()
    prepared(store)
    sent = "select is_called from dataflow.last_notice"
    put(store, "a", "0")
    assert sql(store, sent) == [(False,)]
    ear = connect(store)
    ear.execute("listen odf_claimable")  # as a person would: nobody knows of it
    put(store, "a", "1")
    assert sql(store, sent) == [(False,)]
    watcher = Watcher(store)
    watcher.wait(0, [])
    assert watcher.listens
    began = time.monotonic()
    for number in range(200):
        put(store, "a", f"many{number}")
    took = time.monotonic() - began
    notices = list(ear.notifies(timeout=0.3))
    assert 1 <= len(notices) <= 20 * took + 2
    assert {notice.payload for notice in notices} == {"dataflow"}
    watcher.close()
    [(last,)] = sql(store, "select last_value from dataflow.last_notice")
    time.sleep(0.1)
    put(store, "a", "after")
    assert sql(store, "select last_value from dataflow.last_notice") == [(last,)]
    ear.close()
    close(store)


def test_a_listener_that_lost_its_connection_listens_again(postgres_url: str) -> None:
    store = open_store(postgres_url)
    store.init()
    prepared(store)
    with Watcher(store) as watcher:
        watcher.wait(0, [])
        sql(
            store,
            "select pg_terminate_backend(pid) from pg_locks "
            "where locktype = 'advisory' and mode = 'ShareLock'",
        )
        assert heard(watcher)  # it may have missed something
        assert not watcher.listens
        watcher._again = 0.0
        watcher.wait(0, [])
        assert watcher.listens
        put(store, "a", "1")
        assert heard(watcher)
    close(store)


@needs_pgbouncer
def test_behind_a_pooler_no_worker_listens(postgres_server: Server, postgres_url: str) -> None:
    direct = open_store(postgres_url)
    direct.init()
    prepared(direct)
    pooler = Pooler(postgres_server, 3)
    try:
        store = open_store(pooler.url(postgres_url))
        with Watcher(store) as watcher:
            assert not watcher.wait(0.1, [])
            assert not watcher.listens
            put(direct, "a", "1")
            assert look(store.db, {"job": None})["job"].claimable == 1
        assert sql(direct, "select is_called from dataflow.last_notice") == [(False,)]
        store.close()
    finally:
        pooler.close()
    close(direct)


def test_the_outlook_says_what_each_job_waits_for(store: Store) -> None:
    prepared(store)
    policy(store, "job", concurrency=2, max_attempts=3, retry_delay=60, every_minutes=15)
    for dataid in "1234":
        put(store, "a", dataid)
    mine = take(store, "job", "worker of odf work")
    take(store, "job", "step", runid="run")
    assert look(store.db, {"job": None})["job"].of_work == 1
    store.fail(mine[0], "no luck")
    found = look(store.db, {"job": None, "next": None, "none": "2026-11-20"})
    job = found["job"]
    assert (job.claimable, job.live, job.of_runs, job.of_work, job.free) == (2, 1, 1, 0, 1)
    assert 50 < (job.retry_in or 0) <= 60
    assert 100 < (job.lease_in or 0) <= 120
    assert (job.held, job.every_minutes) == ("", 15)
    assert found["next"].free == found["none"].free == 0
    assert look(store.db, {"job": "3"})["job"].claimable == 1  # of a job that reads `today`
    policy(store, "job", concurrency=0)
    policy(store, "next", paused_until="9999-01-01 00:00:00")
    found = look(store.db, {"job": None, "next": None})
    assert [found["job"].held, found["next"].held] == ["concurrency 0", "paused"]
    assert found["job"].free == 0
