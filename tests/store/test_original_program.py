"""The original program's statements on our tables while our workers run: both sides stay right."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from opendataflow_dagster.errors import StaleClaim
from opendataflow_dagster.model import new_owner
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.store import Store
from tests.support.original_program import DDL, Java
from tests.support.store_fixtures import (
    check,
    close,
    connect,
    expire,
    pending,
    put,
    register,
    sql,
    status,
    statuses,
    take,
)


@pytest.fixture
def shared(postgres_url: str) -> Iterator[Store]:
    """A database of the original, upgraded: `job` reads a and b, and writes c."""
    store = open_store(postgres_url)
    with connect(store) as connection:
        connection.execute(DDL)
    store.init()
    register(store, "job", ["a", "b"], ["c"])
    register(store, "after", ["c"], ["d"])
    sql(store, "insert into dataset (datasetid) values ('a'), ('b'), ('c'), ('d')")
    yield store
    close(store)


@pytest.fixture
def java(shared: Store, postgres_url: str) -> Iterator[Java]:
    program = Java(postgres_url)
    yield program
    program.close()


def ready(store: Store, *dataids: str) -> None:
    for dataid in dataids:
        put(store, "a", dataid)
        put(store, "b", dataid)


def test_both_work_at_once_and_nothing_is_done_twice_or_missed(
    shared: Store, postgres_url: str
) -> None:
    chunks = [str(n) for n in range(120)]
    ready(shared, *chunks)
    done: Counter[tuple[str, str, str]] = Counter()
    counting = threading.Lock()

    def ours(_: int) -> None:
        owner, empty = new_owner(), 0
        while empty < 100:
            claims = [claim for jobid in ("job", "after") for claim in take(shared, jobid, owner)]
            empty = 0 if claims else empty + 1
            for claim in claims:
                with counting:
                    done["ours", claim.jobid, claim.dataid] += 1
                shared.finish(claim)
            if not claims:
                time.sleep(0.02)
        shared.db.drop()

    def original(_: int) -> None:
        program = Java(postgres_url)
        for _ in range(12):
            for jobid in ("job", "after"):
                dataid = program.claim(jobid)
                if dataid:
                    with counting:
                        done["java", jobid, dataid] += 1
                    program.end(jobid, dataid)
            time.sleep(0.05)
        program.close()

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(ours, n) for n in range(3)] + [
            pool.submit(original, n) for n in range(3)
        ]:
            future.result()

    assert {who for who, _, _ in done} == {"ours", "java"}
    made = Counter((jobid, dataid) for _, jobid, dataid in done.elements())
    assert made == Counter((jobid, dataid) for jobid in ("job", "after") for dataid in chunks)
    assert {row for key, row in statuses(shared).items() if key[1] != "loader"} == {
        ("OUT", "READY")
    }
    check(shared)


def test_our_claims_wait_for_the_originals_table_lock_and_continue(
    shared: Store, java: Java
) -> None:
    ready(shared, "1", "2")
    with ThreadPoolExecutor(1) as pool, java.claiming("job") as dataid:
        assert dataid == "1"
        claimed = pool.submit(lambda: (take(shared, "job"), shared.db.drop())[0])
        time.sleep(1)
        assert not claimed.done()
    assert [claim.dataid for claim in claimed.result(10)] == ["2"]
    check(shared)


def test_our_finish_waits_for_the_originals_table_lock(shared: Store, java: Java) -> None:
    ready(shared, "1", "2")
    [claim] = take(shared, "job")
    with ThreadPoolExecutor(1) as pool, java.claiming("job") as dataid:
        assert dataid == "2"
        finished = pool.submit(lambda: (shared.finish(claim), shared.db.drop()))
        time.sleep(0.5)
        assert not finished.done()
    finished.result(10)
    assert status(shared, "c", "1", "job") == "READY"
    check(shared)


def test_the_original_leaves_our_running_chunks_alone(shared: Store, java: Java) -> None:
    ready(shared, "1")
    [claim] = take(shared, "job")
    assert java.claim("job") is None
    shared.finish(claim)
    assert java.claim("job") is None
    assert java.claim("after") == "1"
    assert take(shared, "after") == []
    java.end("after", "1")
    check(shared)


def test_only_a_person_settles_chunks_that_the_original_left_running(
    shared: Store, java: Java
) -> None:
    ready(shared, "1")
    assert java.claim("job") == "1"
    before = statuses(shared)
    expire(shared)
    assert shared.recover() == []
    assert statuses(shared) == before
    assert take(shared, "job") == []

    sql(shared, "update datastatus set status = 'RESUBMIT' where jobid = 'job' and dataid = '1'")
    check(shared)
    [claim] = take(shared, "job")
    shared.finish(claim)
    assert status(shared, "c", "1", "job") == "READY"
    check(shared)


def test_a_failure_of_the_original_blocks_us_until_resubmit(shared: Store, java: Java) -> None:
    ready(shared, "1")
    assert java.claim("job") == "1"
    java.end("job", "1", "FAILED")
    assert take(shared, "job") == []
    put(shared, "c", "1", "RESUBMIT", jobid="job")
    assert java.claim("job") == "1"
    java.end("job", "1")
    assert pending(shared) == {("after", "1"): 1}
    check(shared)


def test_the_original_dies_between_the_two_halves_of_its_end(shared: Store, java: Java) -> None:
    ready(shared, "1")
    java.claim("job")
    java.end_outputs("job", "1", "READY")
    check(shared)
    assert [claim.dataid for claim in take(shared, "after")] == ["1"]
    assert take(shared, "job") == []
    sql(shared, "update datastatus set status = 'RESUBMIT' where datasetid = 'c' and dataid = '1'")
    [claim] = take(shared, "job")
    shared.finish(claim)
    check(shared)


def test_deleterun_of_the_original_works_on_our_tables(shared: Store, java: Java) -> None:
    ready(shared, "1", "2")
    first, second = take(shared, "job", k=2)
    shared.finish(first)
    java.deleterun("job", "1")
    assert pending(shared) == {}
    check(shared)
    java.deleterun("job", "2")
    check(shared)
    with pytest.raises(StaleClaim):
        shared.finish(second)
    assert statuses(shared) == {}
    ready(shared, "2")
    assert [claim.dataid for claim in take(shared, "job")] == ["2"]
    check(shared)


def test_a_zombie_of_the_original_costs_us_a_stale_claim_and_nothing_else(
    shared: Store, java: Java
) -> None:
    """It knows no generation, so its late end settles our chunk: our own end is refused."""
    ready(shared, "1")
    java.claim("job")
    sql(shared, "update datastatus set status = 'RESUBMIT' where jobid = 'job'")
    [claim] = take(shared, "job")
    java.end("job", "1")
    check(shared)
    with pytest.raises(StaleClaim):
        shared.finish(claim)
    assert sql(shared, "select count(*) from claim") == [(0,)]
    check(shared)


def test_a_zombie_of_ours_changes_nothing_that_the_original_claimed(
    shared: Store, java: Java
) -> None:
    ready(shared, "1")
    [zombie] = take(shared, "job")
    expire(shared)
    shared.recover()
    assert java.claim("job") == "1"
    before = statuses(shared)
    with pytest.raises(StaleClaim):
        shared.finish(zombie)
    with pytest.raises(StaleClaim):
        shared.fail(zombie, "no")
    assert shared.recover() == []
    assert statuses(shared) == before
    java.end("job", "1")
    check(shared)


def test_history_knows_the_original(shared: Store, java: Java) -> None:
    ready(shared, "1")
    java.claim("job")
    java.end("job", "1")
    rows = sql(
        shared,
        "select datasetid, locktype, status_before, status_after, who from dataevent "
        "where jobid = 'job' order by seq",
    )
    assert sorted(rows[:3]) == [
        ("a", "IN", None, "RUNNING", "postgres (java)"),
        ("b", "IN", None, "RUNNING", "postgres (java)"),
        ("c", "OUT", None, "RUNNING", "postgres (java)"),
    ]
    assert rows[3][:4] == ("c", "OUT", "RUNNING", "READY")
    assert sorted(row[:4] for row in rows[4:]) == [
        ("a", "IN", "RUNNING", None),
        ("b", "IN", "RUNNING", None),
    ]
