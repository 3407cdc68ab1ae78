"""The rules of claims and statuses on SQLite and on PostgreSQL."""

import itertools
import random
import sqlite3
import time
from contextlib import suppress
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opendataflow_dagster.errors import DataflowError, Refused, StaleClaim
from opendataflow_dagster.model import MAX_ID_BYTES, Claim, Fact, natural_key, new_owner
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store import store as store_module
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import (
    check,
    claimable,
    close,
    everything,
    expire,
    pending,
    policy,
    put,
    register,
    replayed,
    sql,
    status,
    statuses,
    take,
)

DONE_WORDS = ["READY", "FAILED", "ERROR", "RUNNING", "HOLD", "VALIDATED", "ready", "", None]
FREE_WORDS = ["PENDING", "RESUBMIT", "RERUN"]


def ids(claims: list[Claim]) -> list[str]:
    return [claim.dataid for claim in claims]


def one(store: Store, jobid: str = "job", owner: str = "worker", **more: object) -> Claim:
    """Claim the only chunk that can be claimed."""
    [claim] = take(store, jobid, owner, **more)
    return claim


def simple(store: Store, *dataids: str) -> None:
    """A job that reads `a` and writes `b`, and READY chunks of `a`."""
    register(store, "job", ["a"], ["b"])
    for dataid in dataids:
        put(store, "a", dataid)


# What may be claimed


def test_a_claim_locks_inputs_and_outputs_and_a_finish_settles_both(store: Store) -> None:
    register(store, "job", ["a", "b"], ["x", "y"])
    put(store, "a", "1")
    assert take(store, "job") == []
    put(store, "b", "1")

    claim = one(store)
    mine = {key[0]: row for key, row in statuses(store).items() if key[1] == "job"}
    assert mine == {
        "a": ("IN", "RUNNING"),
        "b": ("IN", "RUNNING"),
        "x": ("OUT", "RUNNING"),
        "y": ("OUT", "RUNNING"),
    }
    assert take(store, "job", "other") == []
    check(store)

    store.finish(claim, [Fact("x", "1", location="/x/1", rows=3)])
    mine = {key[0]: row for key, row in statuses(store).items() if key[1] == "job"}
    assert mine == {"x": ("OUT", "READY"), "y": ("OUT", "READY")}
    assert take(store, "job", "other") == []
    facts = "select datasetid, rows from chunkfact where jobid = 'job' order by datasetid"
    assert sql(store, facts) == [
        ("x", 3),
        ("y", None),
    ]
    check(store)


@pytest.mark.parametrize(
    "word",
    [
        None,
        "",
        "PENDING",
        "RUNNING",
        "FAILED",
        "ERROR",
        "RESUBMIT",
        "RERUN",
        "HOLD",
        "DONE",
        "ready",
        "VALIDATED",
    ],
)
def test_an_input_is_readable_only_while_it_is_ready(store: Store, word: str | None) -> None:
    simple(store, "1")
    put(store, "a", "1", word)
    assert pending(store) == {}
    assert take(store, "job") == []
    put(store, "a", "1", "READY")
    assert pending(store) == {("job", "1"): 1}
    check(store)


def test_an_input_that_another_job_rewrites_is_not_readable(store: Store) -> None:
    simple(store, "1")
    put(store, "a", "1", "RUNNING", jobid="second loader")
    assert take(store, "job") == []
    put(store, "a", "1", "FAILED", jobid="second loader")
    check(store)
    assert ids(take(store, "job")) == ["1"]


def test_an_input_by_a_ready_in_row_is_not_an_input(store: Store) -> None:
    simple(store)
    put(store, "a", "1", "READY", locktype="IN", jobid="someone")
    assert take(store, "job") == []
    check(store)


@pytest.mark.parametrize("rival", ["job", "other"])
@pytest.mark.parametrize("word", [*DONE_WORDS, *FREE_WORDS])
def test_an_output_is_free_only_if_pending_or_resubmit(
    store: Store, word: str | None, rival: str
) -> None:
    simple(store, "1")
    put(store, "b", "1", word, jobid=rival)
    check(store)
    assert ids(take(store, "job")) == (["1"] if word in FREE_WORDS else [])
    check(store)


@pytest.mark.parametrize("word", ["RUNNING", "HOLD", "odd", "", None, "DONE", "READY", "PENDING"])
def test_a_live_in_row_of_the_job_holds_the_chunk(store: Store, word: str | None) -> None:
    simple(store, "1")
    put(store, "a", "1", word, jobid="job", locktype="IN")
    check(store)
    assert take(store, "job") == []


@pytest.mark.parametrize("word", ["FAILED", "ERROR", "RESUBMIT", "RERUN"])
def test_a_spent_in_row_of_the_job_is_no_lock(store: Store, word: str) -> None:
    simple(store, "1")
    put(store, "a", "1", word, jobid="job", locktype="IN")
    check(store)
    claim = one(store)
    assert statuses(store)["a", "job", "1"] == ("IN", "RUNNING")
    store.finish(claim)
    assert ("a", "job", "1") not in statuses(store)
    check(store)


@pytest.mark.parametrize("word", ["RUNNING", "DONE", "HOLD", "odd", None])
def test_an_in_row_of_another_job_is_no_lock(store: Store, word: str | None) -> None:
    simple(store, "1")
    put(store, "a", "1", word, jobid="other", locktype="IN")
    assert ids(take(store, "job")) == ["1"]
    check(store)


def test_a_done_row_keeps_the_chunk_done_until_resubmit(store: Store) -> None:
    simple(store, "1")
    put(store, "a", "1", "DONE", jobid="job", locktype="IN")
    put(store, "b", "1", "PENDING", jobid="job")
    assert take(store, "job") == []
    put(store, "b", "1", "RESUBMIT", jobid="job")
    check(store)
    store.finish(one(store))
    assert status(store, "b", "1", "job") == "READY"
    check(store)


def test_a_job_without_inputs_needs_rows_of_its_own(store: Store) -> None:
    register(store, "job", [], ["b"])
    put(store, "b", "1", "PENDING", jobid="other")
    assert take(store, "job") == []
    put(store, "b", "2", "PENDING", jobid="job")
    put(store, "b", "3", "RERUN", jobid="job")
    check(store)
    claims = take(store, "job", k=9)
    assert ids(claims) == ["3", "2"]
    check(store)
    store.finish(claims)
    check(store)


def test_a_dataset_registered_twice_counts_once(store: Store) -> None:
    register(store, "job", ["a", "a"], ["b", "b"])
    put(store, "a", "1")
    store.finish(one(store))
    assert status(store, "b", "1", "job") == "READY"
    check(store)


def test_odd_rows_of_job_are_no_inputs(store: Store) -> None:
    register(store, "job", ["a"], ["b"], BATCH="7")
    sql(store, "insert into job (jobid, itemtype, datasetid) values ('job', 'in', 'c')")
    sql(store, "insert into job (jobid, itemtype, datasetid) values ('job', null, 'c')")
    sql(store, "insert into job (jobid, itemtype, datasetid) values ('job', 'OUT', null)")
    sql(store, "insert into job (jobid, itemtype, datasetid) values (null, 'IN', 'a')")
    put(store, "a", "1")
    check(store)
    store.finish(one(store))
    check(store)


@pytest.mark.parametrize(("ins", "outs"), [(["a"], []), (["a"], ["a"]), (["a", "b"], ["c", "b"])])
def test_a_job_that_would_run_for_ever_is_refused(
    store: Store, ins: list[str], outs: list[str]
) -> None:
    register(store, "job", ins, outs)
    put(store, "a", "1")
    put(store, "b", "1")
    with pytest.raises(Refused) as refused:
        take(store, "job")
    assert refused.value.code == "NOT_REGISTERED"
    with pytest.raises(Refused):
        take(store, "nobody")
    check(store)


# Rival producers


def test_of_two_producers_of_a_chunk_one_gets_it(store: Store) -> None:
    for jobid in ("job", "rival"):
        register(store, jobid, ["a"], ["b"])
    put(store, "a", "1")
    assert len(pending(store)) == 2
    claim = one(store, "rival")
    assert take(store, "job") == []
    check(store)
    store.fail(claim, "no")
    assert take(store, "job") == []
    put(store, "b", "1", "RESUBMIT", jobid="rival")
    check(store)
    assert ids(take(store, "job")) == ["1"]
    assert take(store, "rival") == []
    check(store)


def test_a_rival_that_is_ready_is_superseded_only_after_resubmit(store: Store) -> None:
    for jobid in ("job", "rival"):
        register(store, jobid, ["a"], ["b"])
    put(store, "a", "1")
    store.finish(one(store, "rival"))
    assert take(store, "job") == []
    put(store, "b", "1", "RESUBMIT", jobid="rival")
    store.finish(one(store, "job"))
    check(store)
    assert pending(store) == {}


# Order


def test_resubmit_comes_first_then_natural_order(store: Store) -> None:
    simple(store, "10", "9", "2", "2024-01-10", "2024-01-9", "2023-12-31", "b10", "b9", "B1", "é")
    put(store, "b", "b9", "RESUBMIT", jobid="job")
    put(store, "b", "9", "RERUN", jobid="job")
    taken = [ids(take(store, "job", f"w{n}", k=1))[0] for n in range(10)]
    assert taken[:2] == ["9", "b9"]
    assert taken[2:] == sorted(taken[2:], key=lambda dataid: (natural_key(dataid).encode(), dataid))
    assert [each for each in taken[2:] if each[0] == "2"] == [
        "2",
        "2023-12-31",
        "2024-01-9",
        "2024-01-10",
    ]


def test_dates_are_taken_as_dates(store: Store) -> None:
    days = [str(datetime(2024, 1, 1) + timedelta(n))[:10] for n in range(0, 700, 23)]
    simple(store, *random.Random(1).sample(days, len(days)))
    assert [one(store, owner=str(n)).dataid for n in range(len(days))] == days


def test_a_batch_comes_in_order(store: Store) -> None:
    simple(store, *map(str, range(30, 0, -1)))
    assert ids(take(store, "job", k=12)) == [str(n) for n in range(1, 13)]
    assert ids(take(store, "job", "other", k=12)) == [str(n) for n in range(13, 25)]
    assert ids(take(store, "job", "third", k=12)) == [str(n) for n in range(25, 31)]
    check(store)


# What a PostgreSQL text can hold, and an id may be: no NUL, no surrogate, not empty.
DATAIDS = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12
)
DIGITS = st.text("0123456789a-./é\n", min_size=1, max_size=12)


def test_both_backends_take_any_ids_in_the_same_order(sqlite_url: str, postgres_url: str) -> None:
    both = [open_store(sqlite_url), open_store(postgres_url)]
    for each in both:
        each.init()
        register(each, "job", ["a"], ["b"])

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.one_of(DATAIDS, DIGITS), min_size=1, max_size=20, unique=True))
    def run(dataids: list[str]) -> None:
        taken = []
        for each in both:
            sql(each, "delete from datastatus")
            for dataid in dataids:
                put(each, "a", dataid)
            each._idle.clear()
            claims = [take(each, "job", f"w{n}")[0] for n in range(len(dataids))]
            taken.append(ids(claims))
            for claim in claims:
                each.finish(claim)
            check(each)
        assert taken[0] == taken[1]
        assert sorted(taken[0]) == sorted(dataids)
        assert taken[0] == sorted(
            dataids, key=lambda each: (natural_key(each).encode(), each.encode())
        )

    run()
    for each in both:
        close(each)


# Dials


def test_a_paused_job_claims_nothing(store: Store) -> None:
    simple(store, "1")
    policy(store, "job", paused_until="2999-01-01 00:00:00")
    assert take(store, "job") == []
    policy(store, "job", paused_until="2001-01-01 00:00:00")
    assert ids(take(store, "job")) == ["1"]


def test_the_concurrency_dial_is_turned_while_everything_runs(store: Store) -> None:
    simple(store, *map(str, range(1, 11)))
    policy(store, "job", concurrency=2)
    held = take(store, "job", "w1", k=5)
    assert ids(held) == ["1", "2"]
    assert take(store, "job", "w2", k=5) == []
    policy(store, "job", concurrency=3)
    held += take(store, "job", "w2", k=5)
    assert ids(held) == ["1", "2", "3"]
    policy(store, "job", concurrency=1)
    assert take(store, "job", "w3") == []
    for claim in held[:2]:
        store.finish(claim)
    assert take(store, "job", "w3") == []
    store.fail(held[2], "no")
    assert ids(take(store, "job", "w3", k=5)) == ["4"]
    policy(store, "job", concurrency=0)
    assert take(store, "job", "w4") == []
    policy(store, "job", concurrency=None)
    assert len(take(store, "job", "w4", k=99)) == 6
    check(store)


def test_a_claim_whose_lease_ran_out_counts_until_it_is_recovered(store: Store) -> None:
    simple(store, "1", "2")
    policy(store, "job", concurrency=1)
    one(store)
    expire(store)
    assert take(store, "job", "w2") == []
    store.recover()
    assert len(take(store, "job", "w2", k=2)) == 1


def test_the_argument_only_selects_the_chunk(store: Store) -> None:
    simple(store, "1", "2", "3")
    assert ids(take(store, "job", only="2", k=5)) == ["2"]
    assert take(store, "job", "other", only="2") == []
    assert take(store, "job", "other", only="99") == []
    check(store)


def test_an_idle_worker_notices_new_chunks(store: Store) -> None:
    simple(store)
    assert store.claim("job", owner="w") == []
    assert store.claim("job", owner="w") == []
    put(store, "a", "1")
    assert ids(store.claim("job", owner="w")) == ["1"]


# today


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Etc/GMT+12", "UTC"])
def test_today_is_the_date_in_the_configured_zone(
    url: str, zone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "Etc/GMT+6")
    time.tzset()
    store = open_store(url, timezone=zone)
    store.init()
    register(store, "job", ["today", "a"], ["b"])
    noon = datetime.now(ZoneInfo(zone))
    for days in (-2, -1, 0, 1, 2):
        put(store, "a", str(noon + timedelta(days))[:10])
    today = str(datetime.now(ZoneInfo(zone)))[:10]
    claims = take(store, "job", k=9)
    if today == str(datetime.now(ZoneInfo(zone)))[:10]:  # else midnight passed
        assert ids(claims) == [today] == [store.today()]
        assert [key for key in statuses(store) if key[0] == "today"] == []
        store.finish(claims)
        assert take(store, "job", k=9) == []
        assert take(store, "job", only=str(noon - timedelta(1))[:10]) == []
    close(store)
    monkeypatch.undo()
    time.tzset()


def test_today_alone_makes_one_chunk_a_day(store: Store) -> None:
    register(store, "job", ["today"], ["b"])
    claim = one(store)
    assert claim.dataid == store.today()
    assert take(store, "job", "other") == []
    store.fail(claim, "no")
    assert take(store, "job") == []
    put(store, "b", claim.dataid, "RESUBMIT", jobid="job")
    store.finish(one(store))
    assert take(store, "job") == []


def test_today_waits_for_the_other_inputs_of_that_date(store: Store) -> None:
    register(store, "job", ["today", "a"], ["b"])
    yesterday = (datetime.fromisoformat(store.today()) - timedelta(1)).date().isoformat()
    put(store, "a", yesterday)
    assert take(store, "job") == []
    put(store, "a", store.today())
    assert one(store).dataid == store.today()


# Failure and retries


def test_a_failure_blocks_until_resubmit(store: Store) -> None:
    simple(store, "1")
    failure = store.fail(one(store), "exit code 1")
    assert failure == ("FAILED", None)
    assert statuses(store)["b", "job", "1"] == ("OUT", "FAILED")
    assert ("a", "job", "1") not in statuses(store)
    assert take(store, "job") == []
    assert sql(store, "select who, why from dataevent where status_after = 'FAILED'") == [
        ("worker", "exit code 1")
    ]
    put(store, "b", "1", "RESUBMIT", jobid="job")
    store.finish(one(store))
    check(store)


def test_the_policy_grants_retries_without_delay(store: Store) -> None:
    simple(store, "1")
    policy(store, "job", max_attempts=3)
    for attempt in (1, 2):
        claim = one(store)
        assert claim.attempts == attempt
        assert store.fail(claim, "no") == ("RESUBMIT", 0)
        check(store)
    claim = one(store)
    assert claim.attempts == 3
    assert store.fail(claim, "no") == ("FAILED", None)
    assert take(store, "job") == []
    put(store, "b", "1", "RESUBMIT", jobid="job")
    assert one(store).attempts == 1
    check(store)


def test_a_retry_that_the_caller_forbids_is_not_granted(store: Store) -> None:
    simple(store, "1")
    policy(store, "job", max_attempts=3)
    assert store.fail(one(store), "ended by hand", may_retry=False) == ("FAILED", None)
    assert sql(store, "select * from claim") == []


def test_the_policy_grants_retries_with_a_delay(store: Store) -> None:
    simple(store, "1")
    policy(store, "job", max_attempts=2, retry_delay=3600)
    assert store.fail(one(store), "no") == ("FAILED", 3600)
    assert status(store, "b", "1", "job") == "FAILED"
    assert store.recover() == []
    assert take(store, "job") == []
    assert 3590 < (store.next_change("job") or 0) < 3600.1

    sql(store, "update claim set retry_at = '2001-01-01 00:00:00'")
    assert store.next_change("job") == 0
    assert [(each.dataid, each.status) for each in store.recover()] == [("1", "RESUBMIT")]
    check(store)
    claim = one(store)
    assert claim.attempts == 2
    assert store.fail(claim, "no") == ("FAILED", None)
    assert sql(store, "select * from claim") == []
    assert store.recover() == []
    check(store)


@pytest.mark.parametrize("word", ["HOLD", "READY", "RESUBMIT", None])
def test_a_delayed_retry_yields_to_a_person(store: Store, word: str | None) -> None:
    simple(store, "1")
    policy(store, "job", max_attempts=2, retry_delay=3600)
    store.fail(one(store), "no")
    if word:
        sql(store, "update datastatus set status = :s where datasetid = 'b'", s=word)
    else:
        sql(store, "delete from datastatus where datasetid = 'b'")
    sql(store, "update claim set retry_at = '2001-01-01 00:00:00'")
    before = statuses(store)
    assert store.recover() == []
    assert statuses(store) == before
    check(store)


def test_a_poisoned_chunk_is_held_and_the_others_continue(store: Store) -> None:
    simple(store, "1", "2")
    for loss in range(1, store_module.MAX_LOSSES + 1):
        claim = one(store)
        assert (claim.dataid, claim.attempts) == ("1", loss)
        expire(store)
        [settled] = store.recover()
        last = loss == store_module.MAX_LOSSES
        assert (settled.dataid, settled.status) == ("1", "HOLD" if last else "RESUBMIT")
        check(store)
    assert sql(store, "select why from dataevent where status_after = 'HOLD'")[0][0]
    assert one(store).dataid == "2"
    put(store, "b", "1", "RESUBMIT", jobid="job")
    assert one(store, owner="other").attempts == 1


def test_the_policy_says_how_many_losses_are_too_many(store: Store) -> None:
    simple(store, "1")
    policy(store, "job", max_losses=2)
    for word in ("RESUBMIT", "HOLD"):
        one(store)
        expire(store)
        assert [each.status for each in store.recover()] == [word]


# Leases and fencing


def test_the_lease_comes_from_the_policy_and_a_heartbeat_renews_it(store: Store) -> None:
    simple(store, "1", "2")
    policy(store, "job", lease_seconds=40, time_limit=7)
    claim = one(store, lease=5)
    assert (claim.lease, claim.time_limit) == (40, 7)
    left = store.next_change("job", leases=True)
    assert left is not None
    assert 38 < left < 40.1
    assert store.next_change("job") is None
    expire(store)
    assert store.heartbeat([claim]) == []
    assert store.recover() == []
    left = store.next_change("job", leases=True)
    assert left is not None
    assert 38 < left < 40.1


def test_only_the_lost_claims_are_recovered(store: Store) -> None:
    register(store, "job", ["a"], ["b"])
    register(store, "second", ["a"], ["c"])
    for dataid in "12":
        put(store, "a", dataid)
    lost, other, live = one(store), one(store, "second"), one(store, owner="other")
    expire(store, lost)
    expire(store, other)
    assert [(each.jobid, each.dataid) for each in store.recover("second")] == [("second", "1")]
    assert [(each.jobid, each.dataid) for each in store.recover()] == [("job", "1")]
    assert store.recover() == []
    store.finish(live)
    check(store)


def zombies(store: Store, claim: Claim) -> None:
    """Whatever the holder of a lost claim does, it changes nothing at all."""
    before = everything(store)
    with pytest.raises(StaleClaim):
        store.finish(claim, [Fact("b", claim.dataid, location="/zombie", rows=9)])
    with pytest.raises(StaleClaim):
        store.fail(claim, "zombie")
    assert store.heartbeat([claim]) == [claim]
    for impostor in (
        claim._replace(owner="impostor"),
        claim._replace(generation=claim.generation + 1),
        claim._replace(generation=claim.generation - 1),
        claim._replace(dataid="99"),
    ):
        with pytest.raises(StaleClaim):
            store.finish(impostor)
    assert everything(store) == before


@pytest.mark.parametrize("then", ["nothing", "claimed", "finished", "failed", "held", "deleted"])
@pytest.mark.parametrize("way", ["lease", "resubmit"])
def test_a_zombie_changes_nothing(store: Store, then: str, way: str) -> None:
    simple(store, "1")
    zombie = one(store)
    if way == "lease":
        expire(store)
        store.recover()
    else:
        sql(store, "update datastatus set status = 'RESUBMIT' where datasetid = 'b'")
    if then in ("claimed", "finished", "failed"):
        new = one(store, owner="heir")
        assert new.generation > zombie.generation
    if then == "finished":
        store.finish(new)
    elif then == "failed":
        store.fail(new, "no")
    elif then == "held":
        sql(store, "update datastatus set status = 'HOLD' where datasetid = 'b'")
    elif then == "deleted":
        sql(store, "delete from datastatus where datasetid = 'b'")
    zombies(store, zombie)
    if then == "claimed":
        store.finish(new)
        assert status(store, "b", "1", "job") == "READY"
    check(store)


def test_the_same_owner_with_a_newer_claim_is_told_from_itself(store: Store) -> None:
    simple(store, "1")
    old = one(store)
    expire(store)
    store.recover()
    new = one(store)
    assert new.generation > old.generation
    with pytest.raises(StaleClaim):
        store.finish(old)
    with pytest.raises(StaleClaim):
        store.fail(old, "no")
    assert store.heartbeat([old]) == [old]
    assert status(store, "b", "1", "job") == "RUNNING"
    store.finish(new)
    check(store)


def test_of_a_batch_the_stale_are_named_and_the_others_settled(store: Store) -> None:
    simple(store, "1", "2", "3")
    claims = take(store, "job", k=3)
    put(store, "b", "2", "RESUBMIT", jobid="job")
    assert store.heartbeat(claims) == [claims[1]]
    with pytest.raises(StaleClaim, match="'2'") as stale:
        store.finish(claims)
    assert "'1'" not in str(stale.value)
    assert [status(store, "b", dataid, "job") for dataid in "123"] == ["READY", "RESUBMIT", "READY"]
    check(store)


def test_a_finish_twice_is_stale(store: Store) -> None:
    simple(store, "1")
    claim = one(store)
    store.finish(claim)
    zombies(store, claim)


def test_generations_grow_and_never_repeat(store: Store) -> None:
    simple(store, "1", "2", "3")
    seen: list[int] = []
    for turn in range(6):
        claims = take(store, "job", f"w{turn}", k=3)
        assert sorted(ids(claims)) == ["1", "2", "3"]
        assert min(claim.generation for claim in claims) > max(seen, default=0)
        seen += [claim.generation for claim in claims]
        sql(store, "update datastatus set status = 'RESUBMIT' where datasetid = 'b'")
    assert len(set(seen)) == 18


def test_an_owner_that_lost_its_connection_gets_its_claims(store: Store) -> None:
    simple(store, "1", "2")
    claim = one(store)
    assert store._adopt("job", "worker", 120.0)[0][:4] == claim[:4]
    assert store._adopt("job", "somebody", 120.0) == []


def test_owners_are_never_the_same() -> None:
    assert len({new_owner() for _ in range(1000)}) == 1000


# A hand-made RESUBMIT is all that a person needs

RESUBMITS = {
    "all by job and chunk": (
        "update datastatus set status = 'RESUBMIT' where jobid = 'job' and dataid = '1'"
    ),
    "the outputs": (
        "update datastatus set status = 'RESUBMIT' "
        "where jobid = 'job' and dataid = '1' and locktype = 'OUT'"
    ),
    "one of two outputs": (
        "update datastatus set status = 'RESUBMIT' where datasetid = 'y' and dataid = '1'"
    ),
    "in old words": "update datastatus set status = 'RERUN' where datasetid = 'x' and dataid = '1'",
}


@pytest.mark.parametrize("statement", RESUBMITS.values(), ids=RESUBMITS.keys())
@pytest.mark.parametrize(
    "situation",
    ["running", "failed", "ready", "hold", "error", "lost", "java", "java killed", "retry"],
)
def test_resubmit_by_hand_in_every_situation(store: Store, situation: str, statement: str) -> None:
    register(store, "job", ["a", "b"], ["x", "y"])
    put(store, "a", "1")
    put(store, "b", "1")
    claim = None
    if situation.startswith("java"):
        for datasetid, locktype in (("a", "IN"), ("b", "IN"), ("x", "OUT"), ("y", "OUT")):
            put(store, datasetid, "1", "RUNNING", jobid="job", locktype=locktype)
        if situation == "java":
            sql(
                store,
                "update datastatus set status = 'FAILED' where jobid = 'job' and locktype = 'OUT'",
            )
            sql(store, "delete from datastatus where jobid = 'job' and locktype = 'IN'")
    else:
        if situation == "retry":
            policy(store, "job", max_attempts=3, retry_delay=3600)
        claim = one(store)
        if situation in ("failed", "retry"):
            store.fail(claim, "no")
        elif situation == "ready":
            store.finish(claim)
        elif situation in ("hold", "error"):
            store.finish(claim)
            sql(store, "update datastatus set status = :s where jobid = 'job'", s=situation.upper())
        elif situation == "lost":
            expire(store)
            store.recover()
    check(store)

    sql(store, statement)
    check(store)
    again = {row[1] for key, row in statuses(store).items() if key[0] in "xy"}
    if (
        situation == "hold"
        and statement != RESUBMITS["all by job and chunk"]
        and again - {"RESUBMIT", "RERUN"}
    ):
        assert take(store, "job", "again") == []  # a person holds the other output
        return
    new = one(store, owner="again")
    check(store)
    if claim:
        assert new.generation > claim.generation
        zombies(store, claim)
    store.finish(new)
    assert {row for key, row in statuses(store).items() if key[0] in "xy"} == {("OUT", "READY")}
    assert not [key for key in statuses(store) if key[1] == "job" and key[0] in "ab"]
    check(store)


def test_resubmit_of_a_producer_stops_its_consumers_until_it_is_ready(store: Store) -> None:
    register(store, "first", ["a"], ["b"])
    register(store, "second", ["b"], ["c"])
    put(store, "a", "1")
    store.finish(one(store, "first"))
    assert pending(store) == {("second", "1"): 1}
    put(store, "b", "1", "RESUBMIT", jobid="first")
    assert pending(store) == {("first", "1"): 0}
    claim = one(store, "first")
    assert pending(store) == {}
    store.finish(claim)
    assert pending(store) == {("second", "1"): 1}
    check(store)


def test_a_chunk_made_ready_by_hand_while_its_producer_fails_is_readable(store: Store) -> None:
    """A person marks as READY what a running job is about to fail on: its readers must notice."""
    register(store, "first", ["a"], ["b"])
    register(store, "second", ["b"], ["c"])
    put(store, "a", "1")
    claim = one(store, "first")
    put(store, "b", "1", "READY", jobid="person")
    assert take(store, "second") == []
    store.fail(claim, "no")
    check(store)
    assert ids(take(store, "second")) == ["1"]


def test_a_chunk_made_ready_by_hand_while_its_producer_is_lost_is_readable(store: Store) -> None:
    register(store, "first", ["a"], ["b"])
    register(store, "second", ["b"], ["c"])
    put(store, "a", "1")
    one(store, "first")
    put(store, "b", "1", "READY", jobid="person")
    expire(store)
    store.recover()
    check(store)
    assert ids(take(store, "second")) == ["1"]


def test_a_row_of_history_says_when_a_hand_changed_it(store: Store) -> None:
    simple(store, "1")
    sql(store, "update datastatus set modified = '2001-01-01 00:00:00'")
    sql(store, "update datastatus set status = 'HOLD' where datasetid = 'a'")
    [(modified,)] = sql(store, "select cast(modified as text) from datastatus")
    assert modified[:4] >= "2025"
    sql(
        store,
        "update datastatus set status = 'READY', modified = '2002-02-02 00:00:00' "
        "where datasetid = 'a'",
    )
    [(modified,)] = sql(store, "select cast(modified as text) from datastatus")
    assert modified[:4] == "2002"


# Rows that people change, delete, rename, replace


def test_deleting_rows_by_hand_frees_the_chunk(store: Store) -> None:
    simple(store, "1", "2", "3")
    done, running = one(store), one(store, owner="w2")
    store.finish(done)
    sql(store, "delete from datastatus where datasetid = 'b' and dataid = '1'")
    assert pending(store) == {("job", "1"): 1, ("job", "3"): 1}
    sql(store, "delete from datastatus where datasetid = 'a' and dataid = '3'")
    assert pending(store) == {("job", "1"): 1}
    sql(store, "delete from datastatus where datasetid = 'b' and dataid = '2'")
    check(store)
    assert pending(store) == {("job", "1"): 1, ("job", "2"): 1}
    zombies(store, running)
    assert [claim.dataid for claim in take(store, "job", "w3", k=5)] == ["1", "2"]
    sql(store, "delete from datastatus")
    assert pending(store) == {}
    check(store)


def test_one_of_two_running_outputs_deleted_by_hand_frees_the_chunk(store: Store) -> None:
    register(store, "job", ["a"], ["x", "y"])
    put(store, "a", "1")
    claim = one(store)
    sql(store, "delete from datastatus where datasetid = 'x'")
    check(store)
    zombies(store, claim)
    new = one(store, owner="again")
    store.finish(new)
    assert {row[1] for key, row in statuses(store).items() if key[0] in "xy"} == {"READY"}
    check(store)


def test_deleting_in_rows_of_a_running_chunk_by_hand_is_safe(store: Store) -> None:
    simple(store, "1")
    claim = one(store)
    sql(store, "delete from datastatus where locktype = 'IN'")
    check(store)
    assert take(store, "job", "other") == []
    store.finish(claim)
    assert status(store, "b", "1", "job") == "READY"
    check(store)


@pytest.mark.parametrize("end", ["finish", "fail", "recover", "nothing"])
@pytest.mark.parametrize("word", ["HOLD", "READY", "FAILED"])
def test_pending_by_hand_after_another_word_frees_the_chunk(
    store: Store, word: str, end: str
) -> None:
    simple(store, "1")
    claim = one(store)
    for each in (word, "PENDING"):
        sql(store, "update datastatus set status = :s where datasetid = 'b'", s=each)
        check(store)
    if end == "recover":
        expire(store)
        store.recover()
    elif end != "nothing":
        with pytest.raises(StaleClaim):
            store.finish(claim) if end == "finish" else store.fail(claim, "no")
    check(store)
    store.finish(one(store, owner="again"))
    check(store)


@pytest.mark.parametrize("word", ["READY", "FAILED", "HOLD", "odd", None])
def test_an_output_settled_by_hand_while_it_runs_stays_settled(
    store: Store, word: str | None
) -> None:
    simple(store, "1")
    claim = one(store)
    sql(store, "update datastatus set status = :s where datasetid = 'b'", s=word)
    check(store)
    with pytest.raises(StaleClaim):
        store.finish(claim)
    assert status(store, "b", "1", "job") == word
    check(store)
    sql(store, "update datastatus set status = 'RESUBMIT' where datasetid = 'b'")
    store.finish(one(store, owner="again"))
    check(store)


def test_renaming_a_dataid_by_hand_moves_the_chunk(store: Store) -> None:
    simple(store, "1", "2")
    sql(store, "update datastatus set dataid = '7' where datasetid = 'a' and dataid = '1'")
    assert pending(store) == {("job", "2"): 1, ("job", "7"): 1}
    check(store)
    store.finish(one(store))
    sql(store, "update datastatus set dataid = '8' where datasetid = 'b'")
    assert pending(store) == {("job", "2"): 1, ("job", "7"): 1}
    check(store)
    sql(store, "update datastatus set dataid = dataid || '9'")
    check(store)


def test_a_running_chunk_renamed_by_hand_is_free_under_its_old_name(store: Store) -> None:
    simple(store, "1")
    claim = one(store)
    sql(store, "update datastatus set dataid = 'aside' where datasetid = 'b'")
    check(store)
    zombies(store, claim)
    store.finish(one(store, owner="again"))
    check(store)


def test_changing_a_key_or_locktype_by_hand_is_followed(store: Store) -> None:
    simple(store, "1")
    for change in (
        "locktype = 'IN'",
        "locktype = 'OUT'",
        "jobid = 'other'",
        "datasetid = 'b'",
        "datasetid = 'a', status = 'HOLD'",
        "status = 'READY', dataid = '5'",
        "locktype = null",
        "locktype = 'OUT'",
    ):
        sql(store, f"update datastatus set {change}")
        check(store)


def test_any_status_may_be_written_over_any_other(store: Store) -> None:
    simple(store, "1")
    words = [*DONE_WORDS, *FREE_WORDS]
    for datasetid, jobid, locktype in (
        ("a", "loader", "OUT"),
        ("b", "job", "OUT"),
        ("a", "job", "IN"),
    ):
        for before, after in itertools.permutations(words, 2):
            put(store, datasetid, "1", before, jobid=jobid, locktype=locktype)
            put(store, datasetid, "1", after, jobid=jobid, locktype=locktype)
        check(store)


def test_many_rows_may_change_in_one_statement(store: Store) -> None:
    register(store, "job", ["a", "b"], ["x", "y"])
    numbers = (
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < 500) "
        "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
    )
    for datasetid in "ab":
        sql(
            store,
            f"{numbers} select '{datasetid}', 'loader', cast(i as varchar(9)), 'OUT', 'READY' "
            "from n",
        )
    assert len(pending(store)) == 500
    claims = take(store, "job", k=200)
    check(store)
    store.finish(claims)
    check(store)
    sql(store, "update datastatus set status = 'RESUBMIT' where jobid = 'job' and datasetid = 'x'")
    check(store)
    assert len(pending(store)) == 500
    sql(store, "update datastatus set status = 'RESUBMIT' where jobid = 'loader'")
    assert pending(store) == {}
    check(store)
    sql(store, "delete from datastatus")
    check(store)


def test_insert_or_replace_on_sqlite_is_followed(sqlite_url: str) -> None:
    store = open_store(sqlite_url)
    store.init()
    register(store, "job", ["a"], ["b"])
    replace = (
        "insert or replace into datastatus (datasetid, jobid, dataid, locktype, status) "
        "values (:d, :j, '1', :l, :s)"
    )
    for word in ("READY", "FAILED", "READY", "RUNNING", "READY", "HOLD", None, "READY"):
        sql(store, replace, d="a", j="loader", l="OUT", s=word)
        check(store)
    claim = one(store)
    sql(store, replace, d="b", j="job", l="OUT", s="RESUBMIT")
    check(store)
    zombies(store, claim)
    claim = one(store, owner="again")
    sql(store, replace, d="b", j="job", l="OUT", s="READY")
    check(store)
    with pytest.raises(StaleClaim):
        store.finish(claim)
    sql(store, replace, d="b", j="job", l="IN", s="READY")
    check(store)
    close(store)


def test_truncate_on_postgresql_is_followed(postgres_url: str) -> None:
    store = open_store(postgres_url)
    store.init()
    simple(store, "1", "2")
    claim = one(store)
    sql(store, "truncate datastatus")
    check(store)
    zombies(store, claim)
    put(store, "a", "3")
    assert pending(store) == {("job", "3"): 1}
    sql(store, "truncate job")
    check(store)
    register(store, "job", ["a"], ["b"])
    check(store)
    close(store)


@pytest.mark.parametrize("k", [1, 9])
@pytest.mark.parametrize(
    "row",
    [
        None,
        ("a", "loader", "FAILED"),
        ("a", "loader", "RUNNING"),
        ("b", "job", "READY"),
        ("b", "job", "HOLD"),
        ("b", "job", "RUNNING"),
    ],
)
def test_triggers_that_were_off_cost_a_retry_and_no_double_claim(
    store: Store, row: tuple[str, str, str] | None, k: int
) -> None:
    """The queue says that 0 and 00 may be claimed, but datastatus says that they may not."""
    simple(store, "1", "2", "3")
    for dataid in ("0", "00"):
        if row:
            put(store, "a", dataid)
            put(store, row[0], dataid, row[2], jobid=row[1])
        sql(
            store,
            "insert into pending (jobid, dataid, rank, sortkey) values ('job', :d, 1, '000')",
            d=dataid,
        )
    before = statuses(store, "0")
    assert [ids(take(store, "job", str(n), k=k)) for n in range(4)] == (
        [["1", "2", "3"], [], [], []] if k == 9 else [["1"], ["2"], ["3"], []]
    )
    assert statuses(store, "0") == before
    check(store)


def test_a_finish_settles_only_what_its_claim_wrote(store: Store) -> None:
    """A row of the same job and chunk that somebody else made RUNNING isn't its own to end."""
    simple(store, "1")
    claim = one(store)
    register(store, "job", [], ["c", "d"])
    put(store, "c", "1", "RUNNING", jobid="job")
    put(store, "d", "1", "FAILED", jobid="job")
    store.finish(claim)
    assert [status(store, datasetid, "1", "job") for datasetid in "bcd"] == [
        "READY",
        "RUNNING",
        "FAILED",
    ]
    put(store, "b", "1", "RESUBMIT", jobid="job")
    check(store)


# Jobs that change while chunks are pending


def test_a_job_is_changed_while_chunks_are_pending(store: Store) -> None:
    for dataid in "123":
        put(store, "a", dataid)
        put(store, "c", dataid, "READY" if dataid == "1" else "FAILED")
    simple(store)
    check(store)
    assert len(pending(store)) == 3
    register(store, "job", ["c"])
    assert pending(store) == {("job", "1"): 1}
    check(store)
    sql(store, "update job set datasetid = 'd' where datasetid = 'c'")
    assert pending(store) == {}
    sql(store, "delete from job where datasetid = 'd'")
    assert len(pending(store)) == 3
    sql(store, "update job set jobid = 'renamed'")
    assert {jobid for jobid, _ in pending(store)} == {"renamed"}
    check(store)
    sql(store, "update job set itemtype = 'BATCH' where itemtype = 'OUT'")
    check(store)
    sql(store, "delete from job")
    assert pending(store) == {}


def test_an_output_added_while_a_chunk_runs_makes_nothing_ready_that_was_not_made(
    store: Store,
) -> None:
    simple(store, "1", "2")
    claim = one(store)
    register(store, "job", [], ["c"])
    store._plans.clear()
    store.finish(claim)
    assert status(store, "b", "1", "job") == "READY"
    assert status(store, "c", "1", "job") is None
    check(store)


def test_an_input_added_or_removed_while_a_chunk_runs_leaves_no_lock(store: Store) -> None:
    register(store, "job", ["a", "c"], ["b"])
    put(store, "a", "1")
    put(store, "c", "1")
    claim = one(store)
    sql(store, "delete from job where datasetid = 'c'")
    register(store, "job", ["d"])
    store.finish(claim)
    assert [key for key, row in statuses(store).items() if row[0] == "IN"] == []
    check(store)


def test_an_output_removed_while_a_chunk_runs_does_not_stay_running(store: Store) -> None:
    register(store, "job", ["a"], ["b", "c"])
    put(store, "a", "1")
    claim = one(store)
    sql(store, "delete from job where datasetid = 'c'")
    store._plans.clear()
    store.finish(claim)
    assert status(store, "c", "1", "job") != "RUNNING"
    check(store)


@pytest.mark.parametrize(
    ("datasetid", "locktype", "word"),
    [
        ("b", "IN", "DONE"),
        ("b", "IN", "FAILED"),
        ("b", "IN", "READY"),
        ("b", None, "READY"),
        ("b", "out", "READY"),
        ("a", "OUT", "READY"),
        ("a", "OUT", "FAILED"),
        ("a", None, "DONE"),
        ("b", "IN", "RESUBMIT"),
        ("a", "OUT", "RESUBMIT"),
        ("b", "IN", None),
    ],
)
def test_a_key_taken_by_another_lock_of_the_job_doesnt_hold_up_the_others(
    store: Store, datasetid: str, locktype: str | None, word: str | None
) -> None:
    """A row from when the job read what it now writes, or wrote what it now reads."""
    simple(store, "1", "2")
    put(store, datasetid, "1", word, jobid="job", locktype=locktype)
    check(store)
    taken = []
    for number in range(3):
        taken += ids(take(store, "job", f"w{number}"))
    assert taken == (["1", "2"] if word == "RESUBMIT" else ["2"])
    check(store)


# Ids


ODD_IDS = [
    "a b",
    "a,b",
    "'; drop table job; --",
    'say "hi"',
    "line\nbreak",
    "tab\there",
    "../../etc",
    "$(x)",
    "%s %(x)s %",
    ":dataid",
    "{}",
    "\\",
    "\\n",
    "🐘",
    "\u00e9",
    "e\u0301",
    "ABC",
    "abc",
    "null",
    "NULL",
    "-1",
    "1e3",
    "١٢",
    "०१",
    " 1",
    "1 ",
    "\x7f",
    "\u200b",
    "ﬁ",
    "0" * 300,
]


def test_odd_ids_are_kept_exactly(store: Store) -> None:
    for datasetid in ODD_IDS:
        register(store, f"job {datasetid}", [datasetid], [f"out {datasetid}"])
        for dataid in (datasetid, "1"):
            put(store, datasetid, dataid)
    for datasetid in ODD_IDS:
        claims = take(store, f"job {datasetid}", k=9)
        assert sorted(ids(claims)) == sorted([datasetid, "1"])
        assert store.heartbeat(claims) == []
        store.finish(claims[0])
        store.fail(claims[1], "no")
    check(store)
    assert len(statuses(store)) == 4 * len(ODD_IDS)


def test_ids_of_the_greatest_length_are_kept(store: Store) -> None:
    """Ids that don't compress, with as many runs of digits as there can be."""
    dice = random.Random(2)
    letters = [chr(n) for n in range(33, 127) if not chr(n).isdigit()]
    odd = "".join(
        dice.choice("0123456789") + dice.choice(letters) for _ in range(MAX_ID_BYTES // 2)
    )
    jobid, datasetid = ("".join(dice.choices(letters, k=MAX_ID_BYTES)) for _ in range(2))
    register(store, jobid, [datasetid], ["out"])
    put(store, datasetid, odd)
    check(store)
    store.finish(one(store, jobid))
    check(store)


def test_a_signature_does_not_leak_to_other_writers(store: Store) -> None:
    """A transaction's signature ends with it."""
    simple(store, "1", "2")

    def interrupted() -> None:
        with store.db.transaction(who="alice", why="because", act="claim"):
            store.db.execute("update datastatus set status = 'HOLD' where dataid = '1'", {})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interrupted()
    assert status(store, "a", "1", "loader") == "READY"
    with store.db.transaction(who="alice", why="because"):
        store.db.execute("update datastatus set status = 'HOLD' where dataid = '1'", {})
    put(store, "a", "2", "HOLD")
    rows = sql(
        store, "select dataid, who, why from dataevent where status_after = 'HOLD' order by seq"
    )
    assert rows[0] == ("1", "alice", "because")
    assert rows[1][1] != "alice"
    assert rows[1][2] is None
    check(store)


# The clock


def test_only_the_clock_of_the_database_counts(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    simple(store, "1")
    monkeypatch.setattr(time, "time", lambda: 0.0)
    claim = one(store)
    assert store.now() > 1_700_000_000
    monkeypatch.setattr(time, "time", lambda: 9e9)
    assert store.recover() == []
    store.finish(claim)


def test_a_short_lease_runs_out_by_itself(store: Store) -> None:
    simple(store, "1")
    claim = one(store, lease=2)
    assert store.recover() == []
    time.sleep(2.1)
    assert [each.status for each in store.recover()] == ["RESUBMIT"]
    zombies(store, claim)


# Many statements at random


@pytest.mark.parametrize("seed", range(6))
def test_the_queue_is_right_after_any_change_by_hand(store: Store, seed: int) -> None:
    dice = random.Random(seed)
    register(store, "j1", ["a"], ["b"])
    register(store, "j2", ["a", "b"], ["c", "d"])
    register(store, "j3", [], ["a"])
    register(store, "j4", ["c"], ["e"])
    register(store, "j5", ["a"], ["b", "e"])
    words = [
        "READY",
        "READY",
        "RUNNING",
        "FAILED",
        "ERROR",
        "RESUBMIT",
        "RERUN",
        "HOLD",
        "PENDING",
        "DONE",
        "odd",
        None,
    ]
    held: list[Claim] = []
    for _ in range(120):
        move = dice.choice(
            [
                "put",
                "put",
                "put",
                "update",
                "delete",
                "claim",
                "claim",
                "finish",
                "fail",
                "recover",
                "rename",
                "job",
            ]
        )
        where = dice.choice(
            [
                "dataid = '1'",
                "dataid = '2'",
                "datasetid = 'b'",
                "jobid = 'j2'",
                "locktype = 'IN'",
                "locktype = 'OUT' and dataid = '2'",
            ]
        )
        if move == "put":
            put(
                store,
                dice.choice("abcde"),
                dice.choice("12"),
                dice.choice(words),
                jobid=dice.choice(["j1", "j2", "j3", "j4", "j5", "hand"]),
                locktype=dice.choice(["OUT", "OUT", "OUT", "IN"]),
            )
        elif move == "update":
            sql(store, f"update datastatus set status = :s where {where}", s=dice.choice(words))
        elif move == "delete":
            sql(store, f"delete from datastatus where {where}")
        elif move == "claim":
            held += take(
                store,
                dice.choice(["j1", "j2", "j3", "j4", "j5"]),
                new_owner(),
                k=dice.choice([1, 3]),
            )
        elif move in ("finish", "fail") and held:
            claim = held.pop(dice.randrange(len(held)))
            with suppress(StaleClaim):
                store.finish(claim) if move == "finish" else store.fail(claim, "no")
        elif move == "recover" and held:
            expire(store, dice.choice(held))
            store.recover()
        elif move == "rename":
            with suppress(sqlite3.IntegrityError, psycopg.errors.UniqueViolation):
                sql(store, f"update datastatus set dataid = '3' where {where}")
        elif move == "job":
            sql(store, "delete from job where jobid = 'j5'")
            check(store)
            register(store, "j5", ["a"], ["b", "e"])
        check(store)


def test_the_errors_have_one_base() -> None:
    assert issubclass(StaleClaim, Refused)
    assert issubclass(Refused, DataflowError)


def test_the_oracle_disagrees_with_a_wrong_queue(store: Store) -> None:
    """The checks of this file can fail."""
    simple(store, "1")
    sql(store, "delete from pending")
    assert pending(store) != claimable(store)
    sql(store, "delete from dataevent")
    assert replayed(store) != statuses(store)
