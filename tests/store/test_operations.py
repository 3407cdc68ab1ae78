"""What a person moves by hand, on both databases."""

import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from opendataflow_dagster.errors import Refused, StaleClaim, WrongUse
from opendataflow_dagster.model import MAX_ID_BYTES, READY, RESUBMIT
from opendataflow_dagster.store import operations, registry
from opendataflow_dagster.store.operations import Move
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import (
    check,
    everything,
    expire,
    pending,
    policy,
    put,
    register,
    sql,
    status,
    statuses,
    take,
)


@pytest.fixture
def load(store: Store) -> Store:
    """`load` reads `a`, writes `b` and `c`; chunks 1 to 3 of `a` are READY."""
    register(store, "load", ["a"], ["b", "c"])
    for dataid in "123":
        put(store, "a", dataid)
    return store


def done(store: Store, jobid: str, *dataids: str) -> None:
    """Let a job produce chunks."""
    for dataid in dataids:
        [claim] = take(store, jobid, only=dataid)
        store.finish(claim)


def failed(store: Store, jobid: str, *dataids: str) -> None:
    for dataid in dataids:
        [claim] = take(store, jobid, only=dataid)
        store.fail(claim, "boom")


def refused(code: str, act, *words: str) -> str:
    with pytest.raises(Refused) as caught:
        act()
    text = str(caught.value)
    assert caught.value.code == code, text
    assert caught.value.exit_code == 4
    assert "\n" not in text
    assert re.search(r"(`|[Rr]un: )odf ", text), "what to run next"
    for word in words:
        assert word in text
    return text


# --- resubmit


def test_a_ready_chunk_is_produced_again_with_all_its_outputs(load: Store) -> None:
    done(load, "load", "1", "2")
    moved = operations.resubmit(load, "load", ["1"], who="bob", why="the source changed")

    assert moved.moves == [
        Move("load", "b", "1", "READY", "RESUBMIT"),
        Move("load", "c", "1", "READY", "RESUBMIT"),
    ]
    assert moved.chunks == 1
    assert (status(load, "b", "2", "load"), status(load, "b", "1", "load")) == (READY, RESUBMIT)
    assert pending(load) == {("load", "1"): 0, ("load", "3"): 1}
    generations = "select distinct generation from datastatus where status = 'RESUBMIT'"
    assert sql(load, generations) == [(None,)]
    assert sql(
        load,
        "select distinct status_before, who, why from dataevent where status_after = 'RESUBMIT'",
    ) == [("READY", "bob", "the source changed")]
    assert [claim.dataid for claim in take(load, "load")] == ["1"]
    check(load)


def test_dont_copy_17_one_of_two_outputs_by_hand_reruns_both(load: Store) -> None:
    done(load, "load", "1")
    sql(load, "update datastatus set status = 'RESUBMIT' where datasetid = 'b' and dataid = '1'")
    assert pending(load)["load", "1"] == 0
    assert status(load, "c", "1", "load") == RESUBMIT
    assert operations.resubmit(load, "load", ["1"]).same == ["1"]
    check(load)


@pytest.mark.parametrize("word", ["FAILED", "ERROR", "HOLD", "WAITING", "ready", ""])
def test_any_word_but_running_can_be_resubmitted(load: Store, word: str) -> None:
    put(load, "b", "1", word, jobid="load")
    moved = operations.resubmit(load, "load", ["1"])
    assert [move.status_before for move in moved.moves] == [word]
    assert ("load", "1") in pending(load)
    check(load)


def test_a_row_without_a_status_can_be_resubmitted(load: Store) -> None:
    put(load, "b", "1", None, jobid="load")
    assert operations.resubmit(load, "load", ["1"]).chunks == 1
    assert status(load, "b", "1", "load") == RESUBMIT


def test_a_chunk_already_in_resubmit_stays_unchanged(load: Store) -> None:
    put(load, "b", "1", "RERUN", jobid="load")
    put(load, "b", "2", "PENDING", jobid="load")
    before = everything(load)
    moved = operations.resubmit(load, "load", ["1", "2", "2"])
    assert (moved.moves, moved.same) == ([], ["1", "2"])
    assert everything(load) == before


def test_a_running_chunk_is_refused_with_its_holder_and_nothing_changes(load: Store) -> None:
    done(load, "load", "1")
    [claim] = take(load, "load", owner="alice@host:1:x")
    before = everything(load)
    refused(
        "LOCKED",
        lambda: operations.resubmit(load, "load", ["1", "2"]),
        "'2'",
        "alice@host:1:x",
        "since 20",
        "lease until 20",
        "odf recover --job load",
    )
    assert everything(load) == before
    expire(load)
    refused("LOCKED", lambda: operations.resubmit(load, "load", ["2"]), "lease has expired")
    store_finishes_once(load, claim)


def store_finishes_once(store: Store, claim) -> None:
    store.finish(claim)
    with pytest.raises(StaleClaim):
        store.finish(claim)


def test_a_running_chunk_of_the_java_program_is_refused_with_the_command_to_run(
    load: Store,
) -> None:
    put(load, "b", "1", "RUNNING", jobid="load")
    refused(
        "LOCKED", lambda: operations.resubmit(load, "load", ["1"]), "since 20", "--older-than 2h"
    )


def test_an_unknown_chunk_or_job_is_refused(load: Store) -> None:
    done(load, "load", "1")
    refused(
        "UNKNOWN_CHUNK",
        lambda: operations.resubmit(load, "load", ["1", "99"]),
        "'99'",
        "odf runs load",
    )
    assert status(load, "b", "1", "load") == READY
    refused("NOT_REGISTERED", lambda: operations.resubmit(load, "nosuch", ["1"]), "odf job list")
    refused("NOT_REGISTERED", lambda: operations.resubmit(load, "nosuch", failed=True))
    with pytest.raises(WrongUse, match="--failed"):
        operations.resubmit(load, "load")


def test_failed_chunks_are_resubmitted_and_no_others(load: Store) -> None:
    failed(load, "load", "1", "2")
    done(load, "load", "3")
    put(load, "b", "4", "ERROR", jobid="load")
    moved = operations.resubmit(load, "load", failed=True)
    assert {move.dataid for move in moved.moves} == {"1", "2", "4"}
    assert status(load, "b", "3", "load") == READY
    assert operations.resubmit(load, "load", failed=True).moves == []
    failed(load, "load", "1", "2")
    assert operations.resubmit(load, "load", ["2", "3"], failed=True).chunks == 1
    check(load)


def test_failed_chunks_of_all_jobs_are_resubmitted_upstream_first(load: Store) -> None:
    register(load, "again", ["b"], ["d"])
    register(load, "apart", ["a"], ["e"])
    done(load, "load", "1", "2")
    failed(load, "again", "1", "2")
    failed(load, "apart", "1")
    failed(load, "load", "3")
    put(load, "d", "4", "HOLD", jobid="again")
    before = everything(load)

    planned = operations.resubmit(load, None, failed=True, plan=True)
    assert everything(load) == before
    moved = operations.resubmit(load, None, failed=True, who="ann")

    assert moved == planned
    chunks = dict.fromkeys((move.jobid, move.dataid) for move in moved.moves)
    assert list(chunks) == [("apart", "1"), ("load", "3"), ("again", "1"), ("again", "2")]
    assert (moved.left, moved.same, moved.cut) == ([], [], False)
    assert status(load, "d", "4", "again") == "HOLD"
    assert set(sql(load, "select who from dataevent where status_after = 'RESUBMIT'")) == {("ann",)}
    assert operations.resubmit(load, None, failed=True).moves == []
    check(load)


def test_failures_of_all_jobs_are_filtered_by_time_and_name(load: Store) -> None:
    register(load, "again", ["b"], ["d"])
    done(load, "load", "1", "2")
    failed(load, "again", "1", "2")
    sql(load, "update datastatus set modified = '2026-01-01 00:00:00' where dataid = '2'")
    new = datetime(2026, 1, 2, tzinfo=UTC)
    assert failed_chunks(load, since=new) == [("again", "1")]
    assert failed_chunks(load, since=datetime(2025, 1, 1, tzinfo=UTC)) == [
        ("again", "1"),
        ("again", "2"),
    ]
    assert failed_chunks(load, "again", since=new) == [("again", "1")]
    assert failed_chunks(load, "load") == []
    assert failed_chunks(load, None, ["2", "3"]) == [("again", "2")]
    assert operations.resubmit(load, None, failed=True, plan=True, most=1).cut

    sql(load, "update datastatus set status = 'FAILED' where jobid = 'load' and dataid = '1'")
    put(load, "d", "3", "HOLD", jobid="again")
    below = operations.resubmit(load, None, failed=True, downstream=True)
    chunks = dict.fromkeys((move.jobid, move.dataid) for move in below.moves)
    assert list(chunks) == [("load", "1"), ("again", "1"), ("again", "2")]
    assert below.left == []
    check(load)


def test_of_two_at_once_each_failure_is_resubmitted_by_one(load: Store) -> None:
    register(load, "again", ["b"], ["d"])
    done(load, "load", "1", "2", "3")
    failed(load, "again", "1", "2", "3")
    start = threading.Barrier(2)

    def resubmit(who: str) -> int:
        start.wait()
        return operations.resubmit(load, None, failed=True, who=who).chunks

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(resubmit, ["ann", "bob"])) == [0, 3]
    signed = "select count(*), count(distinct who) from dataevent where status_after = 'RESUBMIT'"
    assert sql(load, signed) == [(3, 1)]
    check(load)


def failed_chunks(
    store: Store,
    jobid: str | None = None,
    dataids: Sequence[str] = (),
    since: datetime | None = None,
) -> list[tuple[str, str]]:
    planned = operations.resubmit(store, jobid, dataids, failed=True, since=since, plan=True)
    return list(dict.fromkeys((move.jobid, move.dataid) for move in planned.moves))


def test_a_chunk_that_waits_for_its_retry_starts_over(load: Store) -> None:
    policy(load, "load", max_attempts=3, retry_delay=3600)
    failed(load, "load", "1")
    assert sql(load, "select count(*) from claim") == [(1,)]
    operations.resubmit(load, "load", failed=True)
    [claim] = take(load, "load", only="1")
    assert claim.attempts == 1


def test_a_plan_changes_nothing(load: Store) -> None:
    done(load, "load", "1")
    before = everything(load)
    assert operations.resubmit(load, "load", ["1"], plan=True).chunks == 1
    assert operations.hold(load, "load", ["1", "9"], plan=True).chunks == 2
    assert operations.ready(load, "a", ["1", "9"], plan=True).chunks == 1
    put(load, "b", "1", "HOLD", jobid="load")
    before = everything(load)
    assert operations.release(load, "load", ["1"], plan=True).moves[0].status_after == READY
    assert everything(load) == before


# --- downstream


@pytest.fixture
def chain(load: Store) -> Store:
    """load → report → mail, and load → stats; `apart` reads none of it; `back` closes a cycle."""
    register(load, "report", ["b"], ["d"])
    register(load, "mail", ["d", "today"], ["e"])
    register(load, "stats", ["c", "b"], ["f"])
    register(load, "apart", ["a"], ["g"])
    register(load, "back", ["f"], ["h"])
    register(load, "again", ["h"], ["k"])
    register(load, "stats", [], ["h2"])
    return load


def test_dont_copy_18_downstream_chunks_are_produced_again_too(chain: Store) -> None:
    for jobid in ("load", "apart", "report", "stats", "back"):
        done(chain, jobid, "1", "2")
    put(chain, "e", "1", "READY", jobid="mail")
    before = everything(chain)
    planned = operations.resubmit(chain, "load", ["1"], downstream=True, plan=True)
    assert everything(chain) == before

    moved = operations.resubmit(chain, "load", ["1"], downstream=True)
    assert moved == planned
    assert {move.jobid for move in moved.moves} == {"load", "report", "mail", "stats", "back"}
    assert {move.dataid for move in moved.moves} == {"1"}
    assert status(chain, "g", "1", "apart") == READY
    # Each waits for what it reads; nothing else runs.
    assert [key for key in pending(chain) if key[1] == "1"] == [("load", "1")]
    for jobid in ("load", "report", "stats", "back"):
        done(chain, jobid, "1")
    check(chain)


def test_running_and_held_downstream_chunks_are_left_and_reported(chain: Store) -> None:
    done(chain, "load", "1", "2")
    done(chain, "stats", "1")
    failed(chain, "report", "2")
    [claim] = take(chain, "report", only="1")
    operations.hold(chain, "stats", ["1"])

    moved = operations.resubmit(chain, "load", ["1", "2"], downstream=True)
    assert [(row.jobid, row.dataid, row.status_before) for row in moved.left] == [
        ("report", "1", "RUNNING"),
        ("stats", "1", "HOLD"),
        ("stats", "1", "HOLD"),
    ]
    assert {(move.jobid, move.dataid) for move in moved.moves} == {
        ("load", "1"),
        ("load", "2"),
        ("report", "2"),
    }
    chain.finish(claim)
    check(chain)


def test_a_circle_of_jobs_ends(store: Store) -> None:
    register(store, "one", ["y"], ["x"])
    register(store, "two", ["x"], ["y"])
    put(store, "x", "1", jobid="one")
    put(store, "y", "1", jobid="two")
    assert {
        move.jobid for move in operations.resubmit(store, "one", ["1"], downstream=True).moves
    } == {
        "one",
        "two",
    }


# --- hold and release


def test_a_held_chunk_is_neither_produced_nor_read_until_release(load: Store) -> None:
    register(load, "report", ["b"], ["d"])
    done(load, "load", "1")
    assert pending(load)["report", "1"] == 1
    held = operations.hold(load, "load", ["1", "2"], who="bob", why="bad source")

    assert [(move.dataid, move.status_before) for move in held.moves] == [
        ("1", "READY"),
        ("1", "READY"),
        ("2", None),
        ("2", None),
    ]
    assert pending(load) == {("load", "3"): 1}
    assert operations.hold(load, "load", ["1"]).same == ["1"]
    generation = sql(
        load, "select generation from datastatus where datasetid = 'b' and dataid = '1'"
    )

    moved = operations.release(load, "load", ["1", "2"], who="bob", why="mended")
    assert {(move.dataid, move.status_after) for move in moved.moves} == {
        ("1", "READY"),
        ("2", "PENDING"),
    }
    assert pending(load) == {("load", "2"): 1, ("load", "3"): 1, ("report", "1"): 1}
    assert generation == sql(
        load, "select generation from datastatus where datasetid = 'b' and dataid = '1'"
    )
    assert ("HOLD", "READY", "bob", "mended") in sql(
        load, "select status_before, status_after, who, why from dataevent"
    )
    check(load)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("PENDING", "PENDING"),
        ("RESUBMIT", "RESUBMIT"),
        ("RERUN", "RESUBMIT"),
        ("FAILED", "FAILED"),
        ("ERROR", "FAILED"),
        ("READY", "READY"),
        ("RUNNING", "RESUBMIT"),
    ],
)
def test_a_released_chunk_is_what_it_was(load: Store, was: str, becomes: str) -> None:
    put(load, "b", "1", was, jobid="load")
    put(load, "b", "1", "HOLD", jobid="load")
    assert [move.status_after for move in operations.release(load, "load", ["1"]).moves] == [
        becomes
    ]
    assert status(load, "b", "1", "load") == becomes
    check(load)


def test_a_hold_of_a_hold_is_looked_through(load: Store) -> None:
    put(load, "b", "1", "READY", jobid="load")
    for word in ("HOLD", "WAITING", "HOLD"):
        put(load, "b", "1", word, jobid="load")
    assert operations.release(load, "load", ["1"]).moves[0].status_after == READY


def test_a_word_that_was_there_before_history_is_resubmitted(load: Store) -> None:
    put(load, "b", "1", "WAITING", jobid="load")
    sql(load, "delete from dataevent")
    load.init()
    moved = operations.release(load, "load", ["1"])
    assert [(move.status_before, move.status_after) for move in moved.moves] == [
        ("WAITING", "RESUBMIT")
    ]


def test_a_poisoned_chunk_is_released_with_its_losses_forgotten(load: Store) -> None:
    policy(load, "load", max_losses=1)
    take(load, "load", only="1")
    expire(load)
    assert [each.status for each in load.recover()] == ["HOLD"]
    operations.release(load, "load", ["1"])
    assert sql(load, "select count(*) from claim") == [(0,)]
    take(load, "load", only="1")
    check(load)


def test_hold_and_release_refuse_what_they_cannot_do(load: Store) -> None:
    take(load, "load", only="1")
    refused("LOCKED", lambda: operations.hold(load, "load", ["1", "2"]), "'1'")
    assert status(load, "b", "2", "load") is None
    refused("UNKNOWN_CHUNK", lambda: operations.release(load, "load", ["2"]))
    refused("NOT_REGISTERED", lambda: operations.hold(load, "nosuch", ["2"]))
    assert operations.release(load, "load", ["1"]).same == ["1"]
    with pytest.raises(WrongUse):
        operations.hold(load, "load", [])


def test_a_hold_and_a_claim_race_has_one_winner(load: Store) -> None:
    """A hold and a claim of one chunk at once: one of them gets it, never both."""
    for n in range(20):
        put(load, "a", f"race{n}")
    start = threading.Barrier(2)
    won: list[str] = []

    def holder() -> None:
        for n in range(20):
            start.wait()
            try:
                operations.hold(load, "load", [f"race{n}"])
                won.append("hold")
            except Refused as error:
                won.append(error.code)
        load.db.drop()

    thread = threading.Thread(target=holder)
    thread.start()
    claims = []
    for n in range(20):
        start.wait()
        claims += load.claim("load", owner="w", only=f"race{n}")
    thread.join()
    assert set(won) <= {"hold", "LOCKED"}
    assert len(won) == 20
    assert won.count("LOCKED") == len(claims)
    load.finish(claims) if claims else None
    check(load)


# --- ready


def test_a_chunk_from_outside_is_ready_and_read(store: Store) -> None:
    register(store, "load", ["a"], ["b"])
    moved = operations.ready(store, "a", ["1", "2", "1"], who="bob")
    assert moved.chunks == 2
    assert statuses(store) == {
        ("a", "external", "1"): ("OUT", "READY"),
        ("a", "external", "2"): ("OUT", "READY"),
    }
    assert len(pending(store)) == 2
    assert operations.ready(store, "a", ["1"]).same == ["1"]
    facts = sql(
        store,
        "select f.generation = d.generation "
        "from chunkfact f join datastatus d using (datasetid, dataid)",
    )
    assert len(facts) == 2
    assert all(same for (same,) in facts)
    check(store)


@pytest.mark.parametrize("word", ["PENDING", "RESUBMIT", "RERUN", "FAILED", "ERROR"])
def test_a_chunk_without_a_producer_can_be_marked_ready(load: Store, word: str) -> None:
    put(load, "b", "1", word, jobid="load")
    operations.ready(load, "b", ["1"])
    assert status(load, "b", "1", "load") == READY
    assert ("b", "external", "1") not in statuses(load)
    assert sql(load, "select count(*) from chunkfact where datasetid = 'b' and jobid = 'load'") == [
        (1,)
    ]
    check(load)


def test_each_time_it_is_another_generation(store: Store) -> None:
    operations.ready(store, "a", ["1"])
    operations.resubmit(store, "external", ["1"])
    operations.ready(store, "a", ["1"])
    numbers = [n for (n,) in sql(store, "select generation from chunkfact order by generation")]
    assert len(set(numbers)) == 2
    assert sql(store, "select generation from datastatus") == [(numbers[-1],)]


def test_ready_refuses_what_runs_or_is_held(load: Store) -> None:
    take(load, "load", only="1", owner="alice")
    refused("LOCKED", lambda: operations.ready(load, "b", ["9", "1"]), "alice")
    operations.hold(load, "load", ["2"])
    refused("HELD", lambda: operations.ready(load, "b", ["9", "2"]), "odf release load 2")
    assert status(load, "b", "9", "external") is None
    check(load)


def test_ids_that_cannot_be_kept_are_refused(store: Store) -> None:
    for dataid in ("", "x" * 10_000, "a\0b", "\udcff"):
        for act in (operations.ready, operations.hold, operations.release, operations.resubmit):
            with pytest.raises(WrongUse) as caught:
                act(store, "a", ["1", dataid])
            assert "\n" not in str(caught.value)
        with pytest.raises(WrongUse):
            operations.delete_run(store, "a", dataid)
    for datasetid in ("today", "", "a=b", "x\n"):
        with pytest.raises(WrongUse):
            operations.ready(store, datasetid, ["1"])
    with pytest.raises(WrongUse):
        operations.ready(store, "a", [])
    assert statuses(store) == {}


def test_odd_chunks_are_moved_exactly(store: Store) -> None:
    odd = [
        "a,b",
        "it's",
        'q"',
        "new\nline",
        "../x",
        "$(x)",
        "😀",
        "e\u0301",
        "\u00e9",
        "A",
        "a",
        "007",
        "7",
        "x" * MAX_ID_BYTES,
    ]
    register(store, "load", ["in"], ["out"])
    assert operations.ready(store, "in", odd).chunks == len(odd)
    claims = take(store, "load", k=99)
    assert sorted(claim.dataid for claim in claims) == sorted(odd)
    store.finish(claims)
    for dataid in odd:
        assert [move.dataid for move in operations.resubmit(store, "load", [dataid]).moves] == [
            dataid
        ]
        assert len(take(store, "load", owner=dataid[:20])) == 1
    check(store)


# --- delete-run


def test_dont_copy_7_only_the_jobs_own_rows_go(load: Store) -> None:
    register(load, "report", ["b"], ["d"])
    done(load, "load", "1")
    done(load, "report", "1")
    put(load, "b", "1", "DONE", jobid="report", locktype="IN")

    assert operations.delete_run(load, "report", "1", who="bob") == 2
    assert set(statuses(load, "1")) == {
        ("a", "loader", "1"),
        ("b", "load", "1"),
        ("c", "load", "1"),
    }
    assert pending(load)["report", "1"] == 1
    assert ("READY", None, "bob") in sql(
        load, "select status_before, status_after, who from dataevent"
    )
    check(load)


def test_a_running_run_is_not_deleted(load: Store) -> None:
    [claim] = take(load, "load", only="1", owner="alice")
    refused("LOCKED", lambda: operations.delete_run(load, "load", "1"), "alice")
    load.fail(claim, "boom")
    assert operations.delete_run(load, "load", "1") == 2
    refused("UNKNOWN_CHUNK", lambda: operations.delete_run(load, "load", "1"))
    put(load, "b", "2", "RUNNING", jobid="load")
    refused("LOCKED", lambda: operations.delete_run(load, "load", "2"), "--older-than")
    check(load)


def test_a_deleted_run_forgets_its_attempts(load: Store) -> None:
    policy(load, "load", max_attempts=3, retry_delay=3600)
    failed(load, "load", "1")
    operations.delete_run(load, "load", "1")
    assert sql(load, "select count(*) from claim") == [(0,)]
    assert take(load, "load", only="1")[0].attempts == 1


# --- what was killed


def java_claims(store: Store, dataid: str) -> None:
    """The rows of the Java program's claim."""
    for datasetid in "bc":
        put(store, datasetid, dataid, "RUNNING", jobid="load")
    put(store, "a", dataid, "RUNNING", jobid="load", locktype="IN")


def age(store: Store, dataid: str, hours: int) -> None:
    """Let what happened to a chunk have happened this long ago."""
    if store.db.dialect == "sqlite":
        when = f"strftime('%Y-%m-%d %H:%M:%f', 'now', '-{hours} hours')"
    else:
        when = f"now() - interval '{hours} hours'"
    sql(store, f"update datastatus set modified = {when} where dataid = :d", d=dataid)
    sql(store, f"update dataevent set at = {when} where dataid = :d", d=dataid)


def test_old_chunks_of_the_java_program_are_resubmitted(load: Store) -> None:
    java_claims(load, "1")
    java_claims(load, "2")
    age(load, "1", 3)
    take(load, "load", only="3")
    found = operations.unclaimed(load, older_than=7200)
    assert [(row.datasetid, row.dataid, row.due) for row in found] == [
        ("b", "1", True),
        ("c", "1", True),
        ("b", "2", False),
        ("c", "2", False),
    ]

    before = everything(load)
    assert operations.recover_abandoned(load, 7200, plan=True).chunks == 1
    assert everything(load) == before
    assert operations.recover_abandoned(load, 7200, jobid="other").chunks == 0
    moved = operations.recover_abandoned(load, 7200)
    assert {move.dataid for move in moved.moves} == {"1"}
    assert statuses(load, "1") == {
        ("a", "loader", "1"): ("OUT", "READY"),
        ("b", "load", "1"): ("OUT", "RESUBMIT"),
        ("c", "load", "1"): ("OUT", "RESUBMIT"),
    }
    assert pending(load) == {("load", "1"): 0}
    assert status(load, "b", "3", "load") == "RUNNING"
    assert [claim.dataid for claim in take(load, "load", owner="w2")] == ["1"]
    with pytest.raises(WrongUse):
        operations.recover_abandoned(load, -1)
    check(load)


def test_an_old_modified_does_not_make_a_young_run_old(load: Store) -> None:
    """Java sets `modified` at the first claim and never again (COMPAT 15)."""
    java_claims(load, "1")
    old = "2001-01-01 00:00:00"
    sql(load, "update datastatus set modified = :old where dataid = '1'", old=old)
    assert operations.recover_abandoned(load, 3600).moves == []
    # What ran before history began is as old as it says.
    sql(load, "delete from dataevent")
    load.init()
    assert operations.recover_abandoned(load, 3600).chunks == 1
    check(load)


def test_a_live_claim_is_never_abandoned(load: Store) -> None:
    [claim] = take(load, "load", only="1")
    age(load, "1", 100)
    assert operations.unclaimed(load) == []
    assert operations.recover_abandoned(load, 0).moves == []
    load.finish(claim)


def test_recover_with_plan_lists_what_it_would_do(load: Store) -> None:
    take(load, "load", only="1")
    expire(load)
    policy(load, "load", max_attempts=3, retry_delay=60)
    failed(load, "load", "2")
    sql(load, "update claim set retry_at = '2001-01-01 00:00:00' where dataid = '2'")
    planned = operations.due(load)
    assert operations.due(load, "other") == []
    assert load.recover() == planned
    assert [(each.dataid, each.status) for each in planned] == [("1", RESUBMIT), ("2", RESUBMIT)]
    assert operations.due(load) == []


# --- size


def test_ten_thousand_chunks_move_in_seconds(store: Store) -> None:
    registry.add_job(store, "load", ["a"], ["b", "c"])
    registry.add_job(store, "report", ["b"], ["d"])
    ids = [str(n) for n in range(10_000)]
    operations.ready(store, "a", ids)
    sql(
        store,
        "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
        "select k.d, k.j, s.dataid, 'OUT', k.s from datastatus s cross join ("
        "select 'b' as d, 'load' as j, 'FAILED' as s union all select 'c', 'load', 'READY' "
        "union all select 'd', 'report', 'READY') as k where s.datasetid = 'a'",
    )
    times = {}

    def timed(name: str, act) -> None:
        began = time.monotonic()
        moved = act()
        times[name] = round(time.monotonic() - began, 2)
        assert moved.chunks >= 10_000

    timed(
        "plan", lambda: operations.resubmit(store, "load", failed=True, downstream=True, plan=True)
    )
    timed("failed", lambda: operations.resubmit(store, "load", failed=True))
    timed("hold", lambda: operations.hold(store, "load", ids))
    timed("release", lambda: operations.release(store, "load", ids))
    timed("ready", lambda: operations.ready(store, "b", ids))
    timed("downstream", lambda: operations.resubmit(store, "load", ids, downstream=True))
    print(store.db.dialect, times)
    assert max(times.values()) < 30
    check(store)
