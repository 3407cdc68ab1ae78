"""A chunk isn't produced again while it is read; a changed input ends in RESUBMIT."""

import pytest

from opendataflow_dagster import location
from opendataflow_dagster.errors import InputsChanged, Refused
from opendataflow_dagster.explain.explain import explain
from opendataflow_dagster.model import FAILED, HOLD, READY, RESUBMIT, RUNNING, Claim, Fact
from opendataflow_dagster.store import operations
from opendataflow_dagster.store.claims import force, give_back
from opendataflow_dagster.store.store import MAX_LOSSES, Store
from tests.support.store_fixtures import (
    check,
    expire,
    pending,
    policy,
    put,
    register,
    sql,
    status,
    store,
    take,
    url,
)

__all__ = ["store", "url"]


@pytest.fixture
def chain(store: Store) -> Store:
    """`up` produces a, `down` reads it: a/1 is READY with a fingerprint."""
    register(store, "up", [], ["a"])
    register(store, "down", ["a"], ["b"])
    put(store, "a", "1", "PENDING", jobid="up")
    make(store, "up", "one")
    return store


def make(store: Store, jobid: str, fingerprint: str | None = None) -> int:
    """Let a job produce chunk 1 of its output; return the generation."""
    [claim] = take(store, jobid)
    output = store.plan(jobid).outputs[0]
    store.finish(claim, [Fact(output, "1", fingerprint=fingerprint)])
    return claim.generation


def anew(store: Store, fingerprint: str | None = None) -> None:
    """Produce a/1 again while it is being read."""
    put(store, "a", "1", "RESUBMIT", jobid="up")
    claim = force(store, "up", "1", owner="force")
    store.finish(claim, [Fact("a", "1", fingerprint=fingerprint)])


def last_reason(store: Store, datasetid: str = "b") -> str:
    rows = sql(
        store,
        "select why from dataevent where datasetid = :d and locktype = 'OUT' "
        "order by seq desc limit 1",
        d=datasetid,
    )
    return rows[0][0] or ""


# The lock


def test_a_producer_waits_for_the_readers_of_its_chunk(chain: Store) -> None:
    [reader] = take(chain, "down")
    operations.resubmit(chain, "up", ["1"])
    check(chain)
    assert take(chain, "up") == []
    assert take(chain, "up", only="1") == []

    found = explain(chain, "up", "1")
    assert (found.may_run, found.code) == (False, "LOCKED")
    assert "'a' is being read by 'down'" in found.reasons[0].text
    assert "worker" in found.reasons[0].text
    assert "lease until" in found.reasons[0].text
    assert explain(chain, "up").code == "LOCKED"
    safe = next(answer for answer in found.answers if answer.question == "safe")
    assert safe.ok is False
    assert "down" in safe.text

    chain.finish(reader)  # what was read is whole: RESUBMIT alone is no change
    assert status(chain, "b", "1", "down") == READY
    check(chain)
    assert [claim.dataid for claim in take(chain, "up")] == ["1"]


@pytest.mark.parametrize("end", ["fail", "give back", "lose", "delete"])
def test_the_producer_may_run_when_the_reader_ends(chain: Store, end: str) -> None:
    [reader] = take(chain, "down")
    operations.resubmit(chain, "up", ["1"])
    assert ("up", "1") not in pending(chain)
    if end == "fail":
        chain.fail(reader, "no")
    elif end == "give back":
        give_back(chain, [reader], "no Java")
    elif end == "lose":
        expire(chain, reader)
        chain.recover("up")  # its own claims, and those that it waits for
    else:
        sql(chain, "delete from datastatus where jobid = 'down'")
    check(chain)
    assert ("up", "1") in pending(chain)


def test_an_upstream_in_resubmit_admits_no_new_readers(chain: Store) -> None:
    register(chain, "late", ["a"], ["c"])
    take(chain, "down")
    operations.resubmit(chain, "up", ["1"])
    assert take(chain, "late") == []


def test_rows_that_the_original_leaves_behind_are_no_readers(chain: Store) -> None:
    put(chain, "a", "1", "RUNNING", jobid="java", locktype="IN")
    put(chain, "c", "1", "RUNNING", jobid="java")
    operations.resubmit(chain, "up", ["1"])
    check(chain)
    found = explain(chain, "up", "1")
    assert found.code == "LOCKED"
    assert found.action == "odf recover --job java --older-than 2h"

    put(chain, "c", "1", "READY", jobid="java")  # its IN row stays RUNNING
    check(chain)
    assert explain(chain, "up", "1").may_run
    assert len(take(chain, "up")) == 1


def test_a_reader_by_hand_is_one_in_whichever_order_its_rows_come(chain: Store) -> None:
    operations.resubmit(chain, "up", ["1"])
    assert ("up", "1") in pending(chain)
    put(chain, "c", "1", "RUNNING", jobid="java")
    put(chain, "a", "1", "RUNNING", jobid="java", locktype="IN")
    check(chain)
    assert ("up", "1") not in pending(chain)


# What changed


def lost(store: Store, claim: Claim) -> None:
    with pytest.raises(InputsChanged, match="'a'"):
        store.finish(claim, [Fact("b", "1", fingerprint="torn")])


def test_a_replaced_input_resubmits_the_output(chain: Store) -> None:
    [reader] = take(chain, "down")
    anew(chain, "two")
    lost(chain, reader)
    assert status(chain, "b", "1", "down") == RESUBMIT
    assert "'a' was made again" in last_reason(chain)
    assert sql(chain, "select losses, owner from claim where jobid = 'down'") == [(1, None)]
    assert sql(chain, "select count(*) from chunkfact where datasetid = 'b'") == [(0,)]
    check(chain)
    assert make(chain, "down") > 0
    assert status(chain, "b", "1", "down") == READY


def test_a_running_input_resubmits_the_output(chain: Store) -> None:
    [reader] = take(chain, "down")
    operations.resubmit(chain, "up", ["1"])
    force(chain, "up", "1", owner="force")
    lost(chain, reader)
    assert "'a' is being made again" in last_reason(chain)


def test_it_ends_on_hold_after_too_many_changes(chain: Store) -> None:
    for number in range(MAX_LOSSES):
        [reader] = take(chain, "down")
        anew(chain, f"again {number}")
        lost(chain, reader)
    assert status(chain, "b", "1", "down") == HOLD


def test_the_same_data_produced_again_is_no_change(chain: Store) -> None:
    [reader] = take(chain, "down")
    anew(chain, "one")
    chain.finish(reader)
    assert status(chain, "b", "1", "down") == READY


@pytest.mark.parametrize("word", ["RESUBMIT", "HOLD", "FAILED"])
def test_a_resubmitted_or_held_input_is_no_change(chain: Store, word: str) -> None:
    [reader] = take(chain, "down")
    put(chain, "a", "1", word, jobid="up")
    chain.finish(reader)
    assert status(chain, "b", "1", "down") == READY


def test_what_others_write_is_numbered_so_that_it_can_be_compared(chain: Store) -> None:
    register(chain, "reads", ["x"], ["y"])
    put(chain, "x", "1", "READY", jobid="java")
    [[generation]] = sql(chain, "select generation from datastatus where datasetid = 'x'")
    assert sql(chain, "select generation, jobid from chunkfact where datasetid = 'x'") == [
        (generation, "java")
    ]
    assert sql(chain, "select generation from dataevent where datasetid = 'x'") == [(generation,)]
    [reader] = take(chain, "reads")
    put(chain, "x", "1", "RESUBMIT", jobid="java")
    put(chain, "x", "1", "RUNNING", jobid="java")
    put(chain, "x", "1", "READY", jobid="java")
    with pytest.raises(InputsChanged):
        chain.finish(reader)
    check(chain)


def test_a_held_chunk_that_is_released_keeps_its_generation(chain: Store) -> None:
    where = "select generation from datastatus where datasetid = 'a' and locktype = 'OUT'"
    before = sql(chain, where)
    operations.hold(chain, "up", ["1"])
    operations.release(chain, "up", ["1"])
    assert status(chain, "a", "1", "up") == READY
    assert sql(chain, where) == before
    assert len(sql(chain, "select * from chunkfact")) == 1


def test_a_failed_chunk_that_is_declared_ready_gets_a_number(chain: Store) -> None:
    operations.resubmit(chain, "up", ["1"])
    [claim] = take(chain, "up")
    chain.fail(claim, "no")
    put(chain, "a", "1", "READY", jobid="up")
    [[generation]] = sql(chain, "select generation from datastatus where datasetid = 'a'")
    assert generation > claim.generation
    assert (generation,) in sql(chain, "select generation from chunkfact where datasetid = 'a'")


def test_of_what_others_make_ready_no_failed_attempt_is_left(chain: Store) -> None:
    policy(chain, "up", max_attempts=3)
    operations.resubmit(chain, "up", ["1"])
    [claim] = take(chain, "up")
    chain.fail(claim, "no")
    assert sql(chain, "select attempts, owner from claim") == [(1, None)]
    put(chain, "a", "1", "READY", jobid="up")
    assert sql(chain, "select * from claim") == []


def test_a_batch_is_compared_chunk_by_chunk(chain: Store) -> None:
    for dataid in "23":
        put(chain, "a", dataid, "PENDING", jobid="up")
        [claim] = take(chain, "up", only=dataid)
        chain.finish(claim)
    claims = take(chain, "down", k=3)
    anew(chain)
    with pytest.raises(InputsChanged, match="'1'"):
        chain.finish(claims)
    assert [status(chain, "b", each, "down") for each in "123"] == [RESUBMIT, READY, READY]


def test_nothing_is_published_from_an_input_that_changed(chain: Store) -> None:
    [reader] = take(chain, "down")
    anew(chain)
    with pytest.raises(InputsChanged):
        chain.confirm(reader)
    assert status(chain, "b", "1", "down") == RESUBMIT


def test_work_that_failed_while_its_input_changed_is_done_again(chain: Store) -> None:
    [reader] = take(chain, "down")
    anew(chain)
    assert chain.fail(reader, "File not found").status == RESUBMIT
    assert "File not found" in last_reason(chain)
    assert "'a' was made again" in last_reason(chain)


def test_a_forced_run_passes_readers_and_accepts_what_changes(chain: Store) -> None:
    [reader] = take(chain, "down")
    claim = force(chain, "up", "1", owner="force")  # though it is read
    lost(chain, reader)
    chain.finish(claim)
    [down] = take(chain, "down")
    give_back(chain, [down], "another way")
    down = force(chain, "down", "1", owner="force")
    anew(chain)
    chain.finish(down)
    assert status(chain, "b", "1", "down") == READY
    assert "forced" in last_reason(chain)
    assert "'a' was made again" in last_reason(chain)


def test_a_claim_from_older_tables_has_no_number_to_compare(chain: Store) -> None:
    sql(chain, "update datastatus set generation = null where datasetid = 'a'")
    [reader] = take(chain, "down")
    chain.finish(reader)
    assert status(chain, "b", "1", "down") == READY
    operations.resubmit(chain, "down", ["1"])
    [reader] = take(chain, "down")
    anew(chain)
    lost(chain, reader)


# What is stale


def test_stale_chunks_are_counted_and_produced_again(chain: Store) -> None:
    from opendataflow_dagster.store.overview import summary

    def stale() -> dict[str, int]:
        return {row["jobid"]: row["stale"] for row in summary(chain)}

    make(chain, "down")
    assert stale() == {"up": 0, "down": 0}
    anew(chain, "one")
    assert stale() == {"up": 0, "down": 0}
    anew(chain, "two")
    assert stale() == {"up": 0, "down": 1}
    found = explain(chain, "down", "1")
    assert "stale" in next(each for each in found.answers if each.question == "right data").text

    told = operations.resubmit(chain, "down", stale=True, plan=True)
    assert [move.dataid for move in told.moves] == ["1"]
    assert status(chain, "b", "1", "down") == READY
    operations.resubmit(chain, None, stale=True)
    assert status(chain, "b", "1", "down") == RESUBMIT
    make(chain, "down")
    assert stale() == {"up": 0, "down": 0}
    assert operations.resubmit(chain, None, stale=True).moves == []


def test_stale_of_an_unknown_job_is_refused(chain: Store) -> None:
    with pytest.raises(Refused):
        operations.resubmit(chain, "nobody", stale=True)


def test_lost_readers_count_in_the_policy_of_their_job(chain: Store) -> None:
    policy(chain, "down", max_losses=1)
    [reader] = take(chain, "down")
    anew(chain)
    lost(chain, reader)
    assert status(chain, "b", "1", "down") == HOLD
    assert FAILED not in {row[0] for row in sql(chain, "select status_after from dataevent")}
    assert status(chain, "a", "1", "up") != RUNNING


# Places that keep a version for their readers


def test_locations_with_versions_need_no_waiting(chain: Store) -> None:
    sql(chain, "insert into dataset (datasetid, hostname) values ('a', 's3a://bucket/a')")
    [reader] = take(chain, "down")
    operations.resubmit(chain, "up", ["1"])
    check(chain)
    found = explain(chain, "up", "1")
    assert found.may_run
    assert found.answers[-1].ok is True
    assert explain(chain, "up").may_run
    make(chain, "up", "two")
    chain.confirm(reader)
    chain.finish(reader)
    assert status(chain, "b", "1", "down") == READY
    [[stale]] = sql(chain, "select count(*) from stale_chunk")
    assert stale == 1
    check(chain)


def test_python_and_sql_agree_which_places_keep_versions(store: Store) -> None:
    places = ["/data", "s3://b", "postgres", "", "remote+file:///mnt", "file:///x", "S3A://b"]
    places += [f"{scheme}://b/x" for scheme in location._REMOTE_SCHEMES]
    for number, place in enumerate(places):
        for format in ("", "parquet", "delta", "iceberg"):
            sql(
                store,
                "insert into dataset (datasetid, hostname, database, format) "
                "values (:d, :h, :b, :f)",
                d=f"{number}{format}",
                h=place if number % 2 else "",
                f=format,
                b="" if number % 2 else place,
            )
    rows = sql(store, "select datasetid, hostname, database, format from dataset")
    kept = {
        row[0]
        for row in rows
        if location.keeps_versions(
            dict(zip(("hostname", "database", "format"), row[1:], strict=True))
        )
    }
    assert {row[0] for row in sql(store, "select datasetid from versioned_dataset")} == kept
    assert len(kept) == 2 * (len(location._REMOTE_SCHEMES) + 2)
