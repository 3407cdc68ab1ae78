"""Items: durable before they are acknowledged, each once, in order, and chunks like any other."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from opendataflow_dagster.errors import LostRace, Refused
from opendataflow_dagster.model import Fact
from opendataflow_dagster.store import items, open_store
from opendataflow_dagster.store.history import Step, clean, record
from opendataflow_dagster.store.items import (
    Accepted,
    Post,
    accept,
    backlog,
    cleaned_away,
    is_item,
    item_status,
    new_run,
    payloads,
)
from opendataflow_dagster.store.operations import resubmit
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, close, pending, put, register, sql, take


@pytest.fixture(autouse=True)
def pipeline(store: Store) -> None:
    register(store, "orders", [], ["sold"])


def accepted(store: Store, *texts: str, key: str | None = None, jobid: str = "orders") -> Accepted:
    [answer] = accept(store, [Post(jobid, texts, key)])
    assert isinstance(answer, Accepted), answer
    return answer


def test_an_item_is_a_chunk_that_may_be_claimed_when_it_is_acknowledged(store: Store) -> None:
    first = accepted(store, '{"n": 1}')
    both = accepted(store, '{"n": 2}', '{"n": 3}')

    assert first.dataids == tuple(map(str, first.generations))
    assert not first.again
    dataids = [*first.dataids, *both.dataids]
    assert pending(store) == {("orders", dataid): 1 for dataid in dataids}
    assert payloads(store, "orders", [*dataids, "other"]) == {
        dataids[0]: '{"n": 1}',
        dataids[1]: '{"n": 2}',
        dataids[2]: '{"n": 3}',
    }
    assert is_item(store, "orders", dataids[0])
    assert not is_item(store, "orders", "2026-11-18")
    check(store)


def test_another_connection_sees_it(store: Store, url: str) -> None:
    [dataid] = accepted(store, "{}").dataids
    other = open_store(url)
    assert payloads(other, "orders", [dataid]) == {dataid: "{}"}
    assert [claim.dataid for claim in take(other, "orders")] == [dataid]
    close(other)


def test_it_is_durable_where_other_transactions_are_not(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(postgres_url)
    store.init()
    register(store, "orders", [], ["sold"])
    sql(store, "alter role current_user set synchronous_commit = off")
    store.db.drop()
    told: list[str] = []
    change = store.db.change

    def asked(name: str, /, **params: Any) -> int:
        told.append(f"{name} {store.db.execute('show synchronous_commit', None)[0][0][0]}")
        return change(name, **params)

    monkeypatch.setattr(store.db, "change", asked)
    try:
        accepted(store, "{}")
        assert "items.add on" in told
        assert store.db.execute("show synchronous_commit", None)[0] == [("off",)]
    finally:
        sql(store, "alter role current_user reset synchronous_commit")
        close(store)


def test_items_are_claimed_in_the_order_in_which_they_came(store: Store) -> None:
    came = [accepted(store, "{}").dataids[0] for _ in range(12)]
    assert [claim.dataid for claim in take(store, "orders", k=99)] == came


@pytest.mark.parametrize(
    "payload",
    [
        json.dumps({"a": 'it\'s "quoted"\n; drop table job; -- \\ \0 \ud800 日本 🎉'}),
        json.dumps("import os; os.system('x')"),
        "null",
        json.dumps("x" * 900_000),
    ],
    ids=["letters", "code", "null", "long"],
)
def test_a_payload_arrives_as_itself(store: Store, payload: str) -> None:
    [dataid] = accepted(store, payload).dataids
    assert payloads(store, "orders", [dataid]) == {dataid: payload}


def test_the_same_key_is_answered_as_before(store: Store) -> None:
    first = accepted(store, "1", "2", key="k")
    again = accepted(store, "1", "2", key="k")
    assert again == first._replace(again=True)
    assert len(pending(store)) == 2
    register(store, "other", [], ["elsewhere"])
    assert not accepted(store, "1", "2", key="k", jobid="other").again, "keys are a pipeline's own"


@pytest.mark.parametrize("texts", [("2",), ("1", "1"), (), ("1 ",)])
def test_the_same_key_with_other_items_is_refused(store: Store, texts: tuple[str, ...]) -> None:
    accepted(store, "1", key="k")
    [answer] = accept(store, [Post("orders", texts, "k")])
    assert isinstance(answer, Refused)
    assert (answer.code, "'k'" in str(answer)) == ("KEY_REUSED", True)
    assert len(pending(store)) == 1


def test_posts_of_one_call_are_answered_one_by_one(store: Store) -> None:
    told = accept(
        store,
        [
            Post("orders", ("1",), "k"),
            Post("nobody", ("1",), None),
            Post("orders", ("1",), "k"),
            Post("orders", ("2",), "k"),
            Post("orders", (), None),
            Post("orders", ("1",), None),
        ],
    )
    first, unknown, same, reused, empty, last = told
    assert isinstance(first, Accepted)
    assert same == first._replace(again=True)
    assert isinstance(unknown, Refused)
    assert isinstance(reused, Refused)
    assert (unknown.code, reused.code) == ("NOT_REGISTERED", "KEY_REUSED")
    assert empty == Accepted((), (), False)
    assert isinstance(last, Accepted)
    assert set(pending(store)) == {("orders", first.dataids[0]), ("orders", last.dataids[0])}
    assert accept(store, []) == []


def test_of_many_with_one_key_one_brings_the_item(store: Store, url: str) -> None:
    start = Barrier(6)

    def post(_: int) -> Accepted | Refused:
        mine = open_store(url)
        start.wait()
        [answer] = accept(mine, [Post("orders", ("1",), "k")])
        close(mine)
        return answer

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(post, range(6)))
    assert len({each.dataids for each in answers if isinstance(each, Accepted)}) == 1
    assert (
        sorted(each.again for each in answers if isinstance(each, Accepted)) == [False] + [True] * 5
    )
    assert len(pending(store)) == 1


def test_many_at_once_lose_none_and_make_none_twice(store: Store, url: str) -> None:
    def post(worker: int) -> list[str]:
        mine = open_store(url)
        posts = [Post("orders", (json.dumps([worker, n]),), f"{worker}-{n}") for n in range(40)]
        answers = [accept(mine, posts[at : at + 8]) for at in range(0, 40, 8)]
        close(mine)
        return [each.dataids[0] for some in answers for each in some if isinstance(each, Accepted)]

    with ThreadPoolExecutor(4) as pool:
        came = [dataid for some in pool.map(post, range(4)) for dataid in some]
    assert len(came) == len(set(came)) == 160
    kept = payloads(store, "orders", came)
    assert sorted(map(json.loads, kept.values())) == [[w, n] for w in range(4) for n in range(40)]
    assert len(pending(store)) == 160
    check(store)


def test_a_connection_lost_after_the_commit_duplicates_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who lost the connection can't know whether it was committed: the work is done again.
    accepted(store, "0")
    insist = store.db.insist

    def unsure(work: Callable[[], Any], **options: Any) -> tuple[Any, bool]:
        insist(work, **options)
        return insist(work, **options)

    monkeypatch.setattr(store.db, "insist", unsure)
    [answer] = accept(store, [Post("orders", ("1", "2"), None)])
    monkeypatch.undo()
    assert isinstance(answer, Accepted)
    assert payloads(store, "orders", answer.dataids) == dict(zip(answer.dataids, "12", strict=True))
    assert len(pending(store)) == 3


def test_a_number_that_is_a_chunk_already_is_passed_over(store: Store) -> None:
    [dataid] = accepted(store, "0").dataids
    taken = str(int(dataid) + 1)
    put(store, "sold", taken, "READY", jobid="orders")
    answer = accepted(store, "1")
    assert taken not in answer.dataids
    assert payloads(store, "orders", [taken]) == {}
    for number in range(int(taken), int(taken) + 30):
        put(store, "sold", str(number), "READY", jobid="orders")
    assert len(accepted(store, "1", "2").dataids) == 2
    check(store)


def test_a_post_is_stored_whole_or_not_at_all(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError("the disk is full")

    monkeypatch.setattr(items, "add_rows", full)
    with pytest.raises(OSError, match="full"):
        accept(store, [Post("orders", ("1",), "k")])
    monkeypatch.undo()
    for table in ("streamitem", "streamkey", "pending"):
        assert sql(store, f"select count(*) from {table}") == [(0,)]
    assert not accepted(store, "1", key="k").again


def test_a_failed_item_is_resubmitted_and_becomes_ready(store: Store) -> None:
    [dataid] = accepted(store, "1").dataids
    assert item_status(store, "orders", "none") is None
    waiting = item_status(store, "orders", dataid)
    assert waiting is not None
    assert (waiting["status"], waiting["generation"]) == ("PENDING", int(dataid))
    assert waiting["received"] <= waiting["modified"] or waiting["modified"] is not None

    [claim] = take(store, "orders")
    record(
        store,
        [
            Step("orders", dataid, claim.generation, 1, "tidy", "READY"),
            Step("orders", dataid, claim.generation, 2, "price", "FAILED"),
        ],
    )
    store.fail(claim, "price: KeyError: 'sku'")
    failed = item_status(store, "orders", dataid)
    assert failed is not None
    assert (failed["status"], failed["reason"]) == ("FAILED", "price: KeyError: 'sku'")
    assert (failed["transformation"], failed["generation"]) == ("price", claim.generation)
    if store.db.dialect == "sqlite":
        [(modified,)] = sql(store, "select modified from datastatus where status = 'FAILED'")
        assert len(modified) == len("2026-03-01 14:30:00.123")

    resubmit(store, "orders", [dataid])
    [again] = take(store, "orders")
    store.finish(again, [Fact("sold", dataid, rows=3, location="/tmp/sold.csv")])
    ready = item_status(store, "orders", dataid)
    assert ready is not None
    assert (ready["status"], ready["rows"], ready["location"]) == ("READY", 3, "/tmp/sold.csv")
    assert (ready["reason"], ready["transformation"]) == (None, None)
    check(store)


def test_the_backlog_counts_waiting_items(store: Store) -> None:
    assert backlog(store) == []
    dataids = accepted(store, *"12345").dataids
    register(store, "quiet", [], ["silence"])
    accepted(store, "{}", jobid="quiet")
    claims = take(store, "orders", k=3)
    store.fail(claims[0], "no")
    store.finish(claims[1])
    sql(
        store,
        "update streamitem set received = '2020-01-01 00:00:00' where dataid = :d",
        d=dataids[4],
    )

    found = {row["jobid"]: row for row in backlog(store)}
    assert set(found) == {"orders", "quiet"}
    orders = found["orders"]
    assert (orders["waiting"], orders["running"], orders["failed"]) == (2, 1, 1)
    assert orders["oldest_seconds"] > 86400
    assert 0 <= found["quiet"]["oldest_seconds"] < 60

    assert (orders["held"], found["quiet"]["held"]) == (0, 0)
    run = new_run(store, "orders")
    store.fail(take(store, "orders", only=run)[0], "a run is no item")
    assert {row["jobid"]: row["failed"] for row in backlog(store)} == {"orders": 1, "quiet": 0}

    resubmit(store, "orders", failed=True)
    assert {row["jobid"]: row["failed"] for row in backlog(store)} == {"orders": 0, "quiet": 0}


def test_an_item_without_a_payload_is_still_an_item(store: Store) -> None:
    [dataid] = accepted(store, "1").dataids
    store.finish(take(store, "orders"))
    assert clean(store).items == 1
    assert payloads(store, "orders", [dataid]) == {}
    assert cleaned_away(store, "orders", [dataid, "2026-11-18"]) == {dataid}
    assert is_item(store, "orders", dataid)


def test_two_hundred_items_at_once_take_milliseconds(store: Store) -> None:
    posts = [Post("orders", (json.dumps({"n": n}),), f"key {n}") for n in range(200)]
    accept(store, posts[:1])
    seconds = []
    for some in range(5):
        fresh = [post._replace(key=f"{post.key} {some}") for post in posts]
        start = time.perf_counter()
        accept(store, fresh)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.3, "it takes 5 to 10 ms where nobody else is at work"


def test_a_run_is_named_by_its_start_time_and_names_differ(store: Store, url: str) -> None:
    register(store, "rival", [], ["sold"])

    def begin(worker: int) -> list[str]:
        mine = open_store(url)
        names = [new_run(mine, ("orders", "rival")[worker % 2]) for _ in range(10)]
        close(mine)
        return names

    with ThreadPoolExecutor(4) as pool:
        names = [name for some in pool.map(begin, range(4)) for name in some]
    assert len(set(names)) == 40
    assert all(len(name) == 22 and name[10] == "T" and name.endswith("Z") for name in names)
    assert {dataid for _, dataid in pending(store)} == set(names)
    [claim] = store.claim("orders", owner="me", only=names[0])
    store.finish(claim)
    check(store)


def test_a_run_of_a_pipeline_that_is_not_registered_is_refused(store: Store) -> None:
    with pytest.raises(Refused, match="isn't registered") as refused:
        new_run(store, "nobody")
    assert refused.value.code == "NOT_REGISTERED"


def test_a_race_that_never_ends_is_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "add_rows", lambda *_: 0)
    with pytest.raises(LostRace):
        accept(store, [Post("orders", ("1",), None)])
    assert sql(store, "select count(*) from streamitem") == [(0,)]
