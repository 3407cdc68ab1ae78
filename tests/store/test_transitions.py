"""The rule of who may claim, and the table of transitions: every copy of them says the same."""

from collections.abc import Callable
from contextlib import suppress
from itertools import product

import pytest

from opendataflow_dagster.cli.status import STATUS_SQUARES
from opendataflow_dagster.errors import DataflowError
from opendataflow_dagster.explain.explain import CODES
from opendataflow_dagster.model import (
    ABSENT,
    BLOCKING,
    RUNNING,
    STRENGTH,
    TRANSITIONS,
    URGENCY,
    WORDS,
    Claim,
    Effect,
    Status,
    Stop,
    effect,
    read_status,
)
from opendataflow_dagster.store import operations
from opendataflow_dagster.store.claims import MAX_INTERRUPTIONS, force, give_back, interrupt
from opendataflow_dagster.store.items import offer_run
from opendataflow_dagster.store.split import by_date
from opendataflow_dagster.store.split import split as split_table
from opendataflow_dagster.store.store import MAX_LOSSES, Store
from tests.support.store_fixtures import expire, policy, put, register, sql, store, take, url

__all__ = ["store", "url"]

ANY_WORD = [*WORDS, "DONE", "ready", "WAITING", "", None]
LOCKTYPES = ["OUT", "IN", "out", None]


def test_the_rule_is_the_same_in_the_tables_and_in_python(store: Store) -> None:
    register(store, "J", ["a", "today"], ["b"])
    cases = list(product([True, False], "ab", LOCKTYPES, ANY_WORD))
    for number, (own, datasetid, locktype, word) in enumerate(cases):
        jobid = "J" if own else "other"
        put(store, datasetid, str(number), word, jobid=jobid, locktype=locktype)
    put(store, "today", "0", jobid="other")
    rows = sql(store, "select dataid, itemtype, own, effect from claim_row where jobid = 'J'")

    found = {int(dataid): (itemtype, bool(own), word) for dataid, itemtype, own, word in rows}
    for number, (own, datasetid, locktype, word) in enumerate(cases):
        itemtype = "IN" if datasetid == "a" else "OUT"
        expected = effect(itemtype, own, locktype, word)
        row = "free" if expected == Effect.READ else expected  # who reads, makes nothing of it
        assert found[number] == (itemtype, own, row), (itemtype, own, locktype, word)
        asked = store.db.execute(
            store.db.translate(
                "select claim_effect(cast(:i as text), :own, cast(:l as text), cast(:w as text))"
            ),
            {"i": itemtype, "own": own, "l": locktype, "w": word},
        )[0]
        assert asked == [(expected,)]


def test_every_effect_comes_from_some_row_and_every_code_has_its_place() -> None:
    found = {effect(*each) for each in product(["IN", "OUT"], [True, False], LOCKTYPES, ANY_WORD)}
    assert found == set(Effect)
    assert set(BLOCKING) == {each for each in Effect if each.isupper()}
    assert set(BLOCKING) <= set(CODES)


def test_every_status_is_shown_counted_and_reached() -> None:
    assert set(STRENGTH) == set(Status)
    assert set(URGENCY) == {*Status, ABSENT} == set(STATUS_SQUARES)
    reached = {after for act in TRANSITIONS.values() for after in act}
    left = {
        before for act in TRANSITIONS.values() for befores in act.values() for before in befores
    }
    assert reached == set(Status)
    assert left == {*Status, ABSENT}


# What each act does to a chunk of `J` (in: a, out: b), whatever its status


def _claimed(store: Store, dataid: str, was: str) -> Claim:
    """A live claim of a chunk whose output row has been moved beneath it."""
    [claim] = take(store, "J", only=dataid)
    if was != RUNNING:
        with store.db.transaction(who="test", act="claim"):
            _write(store, dataid, was, claim.generation)
    return claim


def _write(store: Store, dataid: str, was: str, generation: int | None = None) -> None:
    if was == ABSENT:
        text = "delete from datastatus where datasetid = 'b' and dataid = :i"
    else:
        text = (
            "insert into datastatus (datasetid, jobid, dataid, locktype, status, generation) "
            "values ('b', 'J', :i, 'OUT', :s, :g) on conflict (datasetid, jobid, dataid) "
            "do update set status = excluded.status, generation = excluded.generation"
        )
    store.db.execute(store.db.translate(text), {"i": dataid, "s": was, "g": generation})


def _standing(store: Store, dataid: str, was: str) -> None:
    if was != ABSENT:
        put(store, "b", dataid, was, jobid="J")


def claim(store: Store, dataid: str, was: str) -> None:
    _standing(store, dataid, was)
    take(store, "J", only=dataid)


def forced(store: Store, dataid: str, was: str) -> None:
    _standing(store, dataid, was)
    force(store, "J", dataid, owner="me")


def finish(store: Store, dataid: str, was: str) -> None:
    store.finish(_claimed(store, dataid, was))


def fail(store: Store, dataid: str, was: str) -> None:
    store.fail(_claimed(store, dataid, was), "no")


def fail_with_attempts_left(store: Store, dataid: str, was: str) -> None:
    policy(store, "J", max_attempts=9)
    fail(store, dataid, was)


def given_back(store: Store, dataid: str, was: str) -> None:
    give_back(store, [_claimed(store, dataid, was)], "no Java")


def interrupted(store: Store, dataid: str, was: str) -> None:
    interrupt(store, _claimed(store, dataid, was), Stop("stopped by SIGTERM"))


def interrupted_too_often(store: Store, dataid: str, was: str) -> None:
    claim = _claimed(store, dataid, was)
    sql(store, "update claim set interruptions = :n", n=MAX_INTERRUPTIONS - 1)
    interrupt(store, claim, Stop("stopped by SIGTERM"))


def terminated(store: Store, dataid: str, was: str) -> None:
    claim = _claimed(store, dataid, was)
    interrupt(store, claim, Stop("terminated by a person in Dagster", hold=True))


def lose(store: Store, dataid: str, was: str) -> None:
    expire(store, _claimed(store, dataid, was))
    store.recover()


def lose_too_often(store: Store, dataid: str, was: str) -> None:
    expire(store, _claimed(store, dataid, was))
    sql(store, "update claim set losses = :n", n=MAX_LOSSES)
    store.recover()


def retry(store: Store, dataid: str, was: str) -> None:
    _claimed(store, dataid, was)
    sql(store, "update claim set owner = null, lease_end = null, retry_at = '2001-01-01 00:00:00'")
    store.recover()


def recover(store: Store, dataid: str, was: str) -> None:
    _standing(store, dataid, was)
    sql(store, "update dataevent set at = '2001-01-01 00:00:00'")
    operations.recover_abandoned(store, 0)


def split(store: Store, dataid: str, was: str) -> None:
    _standing(store, dataid, was)
    split_table(store, "b", by_date(dataid, dataid, "day"))


def split_as_pending(store: Store, dataid: str, was: str) -> None:
    _standing(store, dataid, was)
    split_table(store, "b", by_date(dataid, dataid, "day"), pending=True, jobid="J")


def offer(store: Store, dataid: str, was: str) -> None:
    _standing(store, dataid, was)
    offer_run(store, "J", dataid, who="me")


def ready(store: Store, dataid: str, was: str) -> None:
    _standing(store, dataid, was)
    operations.ready(store, "b", [dataid])


def resubmit(store: Store, dataid: str, was: str) -> None:
    _standing(store, dataid, was)
    operations.resubmit(store, "J", [dataid])


def hold(store: Store, dataid: str, was: str) -> None:
    _standing(store, dataid, was)
    operations.hold(store, "J", [dataid])


def release(store: Store, dataid: str, was: str) -> None:
    """Return the earlier status of a held chunk; nothing for others."""
    word, _, before = was.partition("<")
    _standing(store, dataid, before or word)
    if before:
        put(store, "b", dataid, word, jobid="J")
    operations.release(store, "J", [dataid])


Act = Callable[[Store, str, str], None]

ACTS: dict[str, list[Act]] = {
    "claim": [claim],
    "force": [forced],
    "finish": [finish],
    "fail": [fail, fail_with_attempts_left],
    "give back": [given_back],
    "interrupt": [interrupted, interrupted_too_often],
    "terminate": [terminated],
    "lose": [lose, lose_too_often],
    "retry": [retry],
    "recover": [recover],
    "offer": [offer],
    "split": [split, split_as_pending],
    "ready": [ready],
    "resubmit": [resubmit],
    "hold": [hold],
    "release": [release],
}


def test_every_act_of_the_table_is_tested() -> None:
    assert ACTS.keys() == TRANSITIONS.keys()


@pytest.mark.parametrize("act", ACTS)
def test_an_action_makes_exactly_its_transitions(store: Store, act: str) -> None:
    register(store, "J", ["a"], ["b"])
    sql(store, "insert into dataset (datasetid, chunkcolumn) values ('b', 'day')")
    befores = [ABSENT, *Status]
    if act == "release":
        befores += [f"HOLD<{each}" for each in Status if each not in (RUNNING, "HOLD")]
    found: dict[str, set[str]] = {}
    for day, (way, before) in enumerate(product(ACTS[act], befores)):
        dataid = f"2026-{day // 28 + 1:02}-{day % 28 + 1:02}"
        put(store, "a", dataid)
        sql(store, "delete from jobpolicy")
        store._plans.clear()
        was = before.partition("<")[0]
        with suppress(DataflowError):  # refused: whether it was without effect is seen below
            way(store, dataid, before)
        after = _output(store, dataid)
        if after != was:
            found.setdefault(after, set()).add(was)
    assert found == {after: set(befores) for after, befores in TRANSITIONS[act].items()}


def _output(store: Store, dataid: str) -> str:
    """How the output stands, whoever made it: the row that counts of several."""
    rows = sql(
        store,
        "select status from datastatus where datasetid = 'b' and dataid = :i and locktype = 'OUT'",
        i=dataid,
    )
    found = [read_status(word) for (word,) in rows]
    return max(found, key=STRENGTH.index) if found else ABSENT
