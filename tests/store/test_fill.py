"""What a job may claim is judged in small steps: nothing is missed, nobody waits."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from click.testing import CliRunner

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.errors import Refused
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store import store as stores
from opendataflow_dagster.store.registry import add_job
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import (
    check,
    close,
    connect,
    pending,
    put,
    register,
    sql,
    status,
    take,
)

MANY = 1200
"""Chunks: more than are judged as a registration commits, and more than one batch."""


@pytest.fixture
def full(store: Store) -> Store:
    """Many chunks of `a` that no job knows."""
    many(store, "a", MANY)
    return store


def many(store: Store, datasetid: str, count: int, jobid: str = "loader") -> None:
    """Many chunks that are READY."""
    sql(
        store,
        "with recursive g(n) as (select 1 union all select n + 1 from g where n < :count) "
        "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
        "select :d, :j, cast(n as varchar(9)), 'OUT', 'READY' from g",
        count=count,
        d=datasetid,
        j=jobid,
    )


@contextmanager
def person(store: Store) -> Iterator[psycopg.Connection]:
    """A person's transaction that stays open, and is rolled back unless committed."""
    connection = connect(store)
    connection.autocommit = False
    try:
        yield connection
    finally:
        connection.rollback()
        connection.close()


def on_postgres(store: Store) -> None:
    if store.db.dialect == "sqlite":
        pytest.skip("one writer at a time: an open transaction is the only one")


def test_a_job_of_many_chunks_is_claimable_at_once_and_whole_in_the_end(full: Store) -> None:
    register(full, "job", ["a"], ["b"])
    assert 0 < len(pending(full)) < MANY, "a registration judges the first chunks alone"
    assert full.unfilled() == ["job"]
    assert take(full, "job")
    while len(take(full, "job", k=1000)):
        pass
    assert full.unfilled() == []
    assert sql(full, "select count(*) from claim") == [(MANY,)]
    check(full)


def test_recover_fills_queues_that_no_worker_claims(full: Store) -> None:
    register(full, "job", ["a"], ["b"])
    full.recover()
    assert len(pending(full)) == MANY
    check(full)


@pytest.mark.parametrize("commits", [True, False])
def test_workers_do_not_wait_for_an_open_registration(store: Store, commits: bool) -> None:
    on_postgres(store)
    register(store, "job", ["a"], ["b"])
    put(store, "a", "1")
    with person(store) as other:
        other.execute("set lock_timeout = '5s'")
        other.execute("insert into job values ('new', 'IN', 'a'), ('new', 'OUT', 'c')")
        sql(store, "set lock_timeout = '2s'")
        put(store, "a", "2")
        store.finish(take(store, "job", k=2))
        if commits:
            other.commit()
    if commits:
        assert len(take(store, "new", k=9)) == 2
    else:
        assert "new" not in store.unfilled()
    check(store)


def test_chunks_that_a_transaction_was_writing_before_are_not_missed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_postgres(store)
    monkeypatch.setattr(stores, "FILL_STALL_SECONDS", 0.2)
    put(store, "a", "1")
    with person(store) as other:
        other.execute("insert into datastatus values ('a', 'hand', '2', 'OUT', 'READY', now())")
        sql(store, "set lock_timeout = '2s'")
        register(store, "new", ["a"], ["c"])
        store.finish(take(store, "new", k=9))
        with pytest.raises(Refused, match=r"aren't known yet. .* \(process \d+ of .*\(psql\)"):
            take(store, "new")
        other.commit()
    assert [claim.dataid for claim in take(store, "new", k=9)] == ["2"]
    check(store)


def test_transactions_that_begin_later_are_not_waited_for(full: Store) -> None:
    on_postgres(full)
    register(full, "job", ["a"], ["b"])
    full._fill_batch("job")
    with person(full) as other:
        other.execute("insert into datastatus values ('x', 'hand', '1', 'OUT', 'READY', now())")
        assert full.fill() == []
        other.execute("insert into datastatus values ('a', 'hand', 'z', 'OUT', 'READY', now())")
        other.commit()
    assert len(pending(full)) == MANY + 1
    check(full)


def test_what_was_pending_before_a_job_changed_is_not_claimed_wrongly(full: Store) -> None:
    register(full, "job", ["a"], ["b"])
    full.fill()
    many(full, "c", MANY - 1, "other")  # so that only the last chunk is to be made
    add_job(full, "job", [], ["c"])
    assert full.unfilled() == ["job"] or full.db.dialect == "sqlite"
    assert [claim.dataid for claim in take(full, "job", k=MANY)] == [str(MANY)]
    full.fill()
    check(full)


def test_a_changed_job_keeps_its_queue_while_it_is_judged_again(full: Store) -> None:
    register(full, "job", ["a"], ["b"])
    full.fill()
    put(full, "c", "1", jobid="other")
    add_job(full, "job", [], ["c"])
    assert len(pending(full)) >= MANY - 1, "nobody waits until it is filled again"
    assert full.unfilled() == ["job"]
    assert [claim.dataid for claim in take(full, "job")] == ["2"], "another job has made chunk 1"
    full.fill()
    assert len(pending(full)) == MANY - 2
    check(full)


def test_a_repeated_fill_lets_waiting_writers_go_first(sqlite_url: str) -> None:
    store = open_store(sqlite_url)
    store.init()
    turns, ended = 0, threading.Event()

    def begin_again_and_again() -> None:
        nonlocal turns
        while turns < 200 and not ended.is_set():
            with store.db.transaction():
                turns += 1
                time.sleep(0.003)

    eager = threading.Thread(target=begin_again_and_again)
    eager.start()
    try:
        while not turns:
            time.sleep(0.001)
        before = turns
        with store.db.transaction():
            assert turns - before < 10, "SQLite itself lets the eager one have nearly all turns"
    finally:
        ended.set()
        eager.join()
        close(store)


def test_a_killed_fill_is_continued_by_another_process(full: Store, url: str) -> None:
    register(full, "job", ["a"], ["b"])
    program = (
        "import sys, time\n"
        "from opendataflow_dagster.store import open_store, sqlite, store as stores\n"
        "stores.FILL_BATCH_ROWS, sqlite.TURN_SECONDS = 50, 0\n"
        "store = open_store(sys.argv[1])\n"
        "store.fill(narrate=lambda line: (print('filled', flush=True), time.sleep(0.02)))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, url], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(14):
        process.stdout.readline()
    process.kill()
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert full.unfilled() == ["job"]
    assert full.fill() == []
    check(full)


def test_several_fill_at_once_while_others_work(full: Store, url: str) -> None:
    register(full, "job", ["a"], ["b"])
    register(full, "second", ["a"], ["c"])
    failures: list[BaseException] = []

    def guarded(work: object) -> None:
        store = open_store(url)
        try:
            work(store)  # type: ignore[operator]
        except BaseException as error:
            failures.append(error)
        finally:
            store.close()

    def claim(store: Store) -> None:
        for _ in range(20):
            store.finish(store.claim("job", owner=f"w{threading.get_ident()}"))

    works = [lambda store: store.fill(), lambda store: store.fill(), claim, claim]
    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    full.fill()
    assert len(pending(full)) == 2 * MANY - 40
    check(full)


def test_a_locked_chunk_does_not_delay_others(full: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    on_postgres(full)
    register(full, "job", ["a"], ["b"])
    monkeypatch.setattr(stores, "FILL_STALL_SECONDS", 0.1)
    with person(full) as other:
        other.execute(
            "update datastatus set status = 'HOLD' where datasetid = 'a' and dataid = '9'"
        )
        assert full.fill() == ["job"]
        assert take(full, "job")
        other.commit()
    assert full.fill() == []
    check(full)


def test_init_does_not_keep_workers_waiting_behind_a_transaction(store: Store, url: str) -> None:
    on_postgres(store)
    register(store, "job", ["a"], ["b"])
    for dataid in "123456789":
        put(store, "a", dataid)
    again = open_store(url)
    upgrade = threading.Thread(target=again.init)
    with person(store) as other:
        other.execute("insert into datastatus values ('x', 'hand', '1', 'OUT', 'READY', now())")
        upgrade.start()
        longest = 0.0
        for _ in range(9):
            start = time.monotonic()
            store.finish(take(store, "job"))
            longest = max(longest, time.monotonic() - start)
            time.sleep(0.05)
        other.commit()
    upgrade.join(30)
    assert not upgrade.is_alive()
    close(again)
    assert longest < 1
    assert status(store, "b", "9", "job") == "READY"
    check(store)


def test_a_job_that_is_removed_has_nothing_pending(full: Store) -> None:
    register(full, "job", ["a"], ["b"])
    full.fill()
    sql(full, "delete from job where jobid = 'job'")
    full.fill()
    assert sql(full, "select count(*) from pending") == [(0,)]


def test_a_registration_again_that_changes_nothing_judges_nothing(full: Store) -> None:
    add_job(full, "job", ["a"], ["b"], {"MODE": "fast"})
    full.fill()
    for _ in range(2):
        add_job(full, "job", ["a"], ["b"], {"MODE": "slow"}, replace=True)
        assert full.unfilled() == []
    assert ("MODE", None, "slow") in full.db.run("registry.items", jobid="job")
    check(full)


def test_odf_job_remove_leaves_nothing_pending(full: Store, url: str) -> None:
    register(full, "job", ["a"], ["b"])
    full.fill()

    removed = CliRunner().invoke(
        app, ["job", "remove", "job"], env={"DATAFLOW_URL": url}, catch_exceptions=False
    )

    assert (removed.exit_code, full.unfilled()) == (0, [])
    assert sql(full, "select count(*) from pending") == [(0,)]
