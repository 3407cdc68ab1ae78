"""History: complete for every writer, and read by a cursor that misses nothing."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import psycopg
import pytest

from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.explain import self_check
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.history import (
    Event,
    LostCursor,
    end_of_log,
    events_after,
    history,
    runs,
    unread,
)
from opendataflow_dagster.store.store import Store
from tests.support.postgres import Server


def put(
    store: Store, dataid: str, status: str, *, jobid: str = "loadbob", dataset: str = "bobin"
) -> None:
    """Write a row by hand, as a person does."""
    store.db.execute(
        "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
        f"values ('{dataset}', '{jobid}', '{dataid}', 'OUT', '{status}') "
        "on conflict (datasetid, jobid, dataid) do update set status = excluded.status",
        {},
    )


def read_all(store: Store, cursor: str | None = None, limit: int = 3) -> tuple[list[Event], str]:
    found: list[Event] = []
    while True:
        events, cursor = events_after(store, cursor, limit)
        found += events
        if not events:
            return found, cursor


def test_the_log_is_read_page_by_page_and_each_change_once(store: Store) -> None:
    for number in range(10):
        put(store, str(number), "READY")
    put(store, "3", "FAILED")

    found, cursor = read_all(store)
    assert [(each.dataid, each.status_before, each.status_after) for each in found] == [
        *((str(number), None, "READY") for number in range(10)),
        ("3", "READY", "FAILED"),
    ]
    assert found[0].at is not None
    assert abs(found[0].at - datetime.now(UTC)) < timedelta(minutes=1)
    assert events_after(store, cursor) == ([], cursor)

    put(store, "4", "HOLD")
    [event], _ = events_after(store, cursor)
    assert event.status_after == "HOLD"


def test_an_empty_log_gives_a_cursor_that_works(store: Store) -> None:
    events, cursor = events_after(store, None)
    assert events == []
    put(store, "1", "READY")
    assert len(events_after(store, cursor)[0]) == 1


def test_following_begins_at_the_end(store: Store) -> None:
    put(store, "1", "READY")
    cursor = end_of_log(store)
    assert events_after(store, cursor)[0] == []
    put(store, "2", "READY")
    assert [event.dataid for event in events_after(store, cursor)[0]] == ["2"]


@pytest.mark.parametrize(
    "cursor", ["", "x", "1:2:3", "-1", "1:", "١", "9" * 40, "1:2'; drop table job"]
)
def test_an_invalid_cursor_is_refused(store: Store, cursor: str) -> None:
    with pytest.raises(WrongUse, match="isn't a cursor"):
        events_after(store, cursor)


def test_a_cursor_of_the_other_dialect_is_refused(store: Store) -> None:
    with pytest.raises(WrongUse, match="isn't a cursor"):
        events_after(store, "5:5" if store.db.dialect == "sqlite" else "5")


def test_a_listing_has_the_newest_last_and_is_filtered(store: Store) -> None:
    before = datetime.now(UTC) - timedelta(seconds=5)
    for number in range(5):
        put(store, str(number), "READY")
        put(store, str(number), "READY", jobid="other", dataset="elsewhere")
    assert [event.dataid for event in history(store, limit=3)] == ["3", "4", "4"]
    assert [event.dataid for event in history(store, jobid="loadbob")] == list("01234")
    assert [event.jobid for event in history(store, dataid="2")] == ["loadbob", "other"]
    assert len(history(store, datasetid="elsewhere")) == 5
    assert len(history(store, since=before)) == 10
    assert history(store, since=datetime.now(UTC) + timedelta(hours=1)) == []


def test_changes_behind_a_transaction_elsewhere_on_the_server_are_reported(
    postgres_url: str, postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(postgres_url)
    store.init()
    cursor = end_of_log(store)
    elsewhere = postgres_server.create_database("elsewhere")
    try:
        with psycopg.connect(elsewhere, application_name="nightly") as other:
            other.execute("create table big (n int)")
            put(store, "1", "READY")
            assert events_after(store, cursor)[0] == []
            assert unread(store) == ""
            late = unread(store, 0)
            assert "an older transaction (" in late
            assert f"process {other.info.backend_pid} of postgres (nightly) in database" in late
            monkeypatch.setattr(self_check, "unread", lambda store: unread(store, 0))
            assert late.split(" can't ")[1].rstrip(".") in self_check._log(store).detail
        assert unread(store, 0) == ""
        assert [event.dataid for event in events_after(store, cursor)[0]] == ["1"]
    finally:
        postgres_server.drop_database("elsewhere")
        store.close()


def test_runs_are_the_newest_outputs(store: Store) -> None:
    store.db.execute(
        "insert into job (jobid, itemtype, datasetid) values ('loadbob', 'OUT', 'bobin')", {}
    )
    for number in range(25):
        put(store, str(number), "PENDING")
        time.sleep(0.002)
    [claim] = store.claim("loadbob", owner="me", only="7")
    found = runs(store)
    assert len(found) == 20
    assert (found[0]["dataid"], found[0]["status"], found[0]["owner"]) == ("7", "RUNNING", "me")
    assert found[0]["generation"] == claim.generation
    assert found[0]["attempts"] == 1
    assert isinstance(found[0]["modified"], datetime)
    assert len(runs(store, limit=3)) == 3
    assert runs(store, jobid="other") == []


def test_times_are_in_the_configured_zone(url: str) -> None:
    store = open_store(url, timezone="Asia/Kolkata")
    store.init()
    put(store, "1", "READY")
    [event] = history(store)
    assert event.at is not None
    assert event.at.utcoffset() == timedelta(hours=5, minutes=30)
    assert abs(event.at - datetime.now(UTC)) < timedelta(minutes=1)
    store.close()


# --- PostgreSQL: transactions that commit late, and logs from elsewhere ---


@pytest.fixture
def postgres(postgres_url: str) -> Iterator[Store]:
    store = open_store(postgres_url)
    store.init()
    yield store
    store.close()


def test_a_change_that_commits_late_is_not_missed(postgres: Store, postgres_url: str) -> None:
    insert = (
        "insert into dataflow.datastatus (datasetid, jobid, dataid, locktype, status) "
        "values ('bobin', 'loadbob', 'late', 'OUT', 'READY')"
    )
    with psycopg.connect(postgres_url) as slow:
        slow.execute(insert)
        put(postgres, "early", "READY")
        events, cursor = events_after(postgres, None)
        assert events == [], "what follows an open transaction waits for it"
        slow.commit()
        events, cursor = events_after(postgres, cursor)
    assert [event.dataid for event in events] == ["late", "early"]
    assert events_after(postgres, cursor)[0] == []


def test_within_a_chunk_seq_gives_the_order(postgres: Store, postgres_url: str) -> None:
    put(postgres, "1", "READY")
    with psycopg.connect(postgres_url) as slow:
        slow.execute("insert into dataflow.job (jobid) values ('takes a transaction number')")
        put(postgres, "1", "FAILED")
        slow.execute("update dataflow.datastatus set status = 'HOLD' where dataid = '1'")
        slow.commit()
    found, _ = read_all(postgres, limit=1)
    assert [event.status_after for event in found] == ["READY", "HOLD", "FAILED"]
    assert [event.status_after for event in sorted(found)] == ["READY", "FAILED", "HOLD"]


def test_transactions_are_ordered_as_numbers(postgres: Store) -> None:
    for dataid in ("b", "a", "c"):
        put(postgres, dataid, "READY")
    for xid, dataid in ((9, "a"), (10, "b"), (100, "c")):
        postgres.db.execute(f"update dataevent set xid = '{xid}' where dataid = '{dataid}'", {})
    assert [event.dataid for event in read_all(postgres, limit=1)[0]] == ["a", "b", "c"]


def test_a_reader_beside_four_writers_sees_each_change_once(
    postgres: Store, postgres_url: str
) -> None:
    rounds = 60

    def write(number: int) -> None:
        with psycopg.connect(postgres_url) as mine:
            for turn in range(rounds):
                for part in range(3):
                    mine.execute(
                        "insert into dataflow.datastatus "
                        "(datasetid, jobid, dataid, locktype, status) "
                        "values ('bobin', %s, %s, 'OUT', 'READY')",
                        (f"w{number}", f"{turn}-{part}"),
                    )
                    time.sleep(0.001 * (number % 3))
                if turn % 10 == 9:
                    mine.rollback()
                mine.commit()

    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    seen: Counter[tuple[str, str]] = Counter()
    cursor = None
    while True:
        alive = any(writer.is_alive() for writer in writers)
        events, cursor = events_after(postgres, cursor, 7)
        seen.update((event.jobid, event.dataid) for event in events)
        if not events and not alive:
            break
    [(count,)] = postgres.db.execute("select count(*) from dataevent", {})[0]
    assert count == 4 * 3 * (rounds - rounds // 10)
    assert len(seen) == count
    assert set(seen.values()) == {1}


def test_a_log_restored_into_another_server_is_found_and_repaired(postgres: Store) -> None:
    put(postgres, "1", "READY")
    put(postgres, "2", "READY")
    _, old_cursor = events_after(postgres, None)
    # What a restore looks like: the rows have the other server's transaction numbers.
    postgres.db.execute("update dataevent set xid = '5000000000' where dataid = '2'", {})
    put(postgres, "3", "READY")

    with pytest.raises(WrongUse, match="odf init"):
        events_after(postgres, None)
    with pytest.raises(LostCursor):
        events_after(postgres, "5000000000:2")

    postgres.init()
    found, cursor = read_all(postgres, limit=2)
    assert [event.dataid for event in found] == ["1", "2", "3"]
    assert [event.seq for event in found] == sorted(event.seq for event in found)
    with pytest.raises(LostCursor, match="beginning"):
        events_after(postgres, old_cursor)
    put(postgres, "4", "READY")
    assert [event.dataid for event in events_after(postgres, cursor)[0]] == ["4"]

    postgres.init()
    assert events_after(postgres, cursor)[0], "another init doesn't renumber again"


def test_init_leaves_the_numbers_of_a_log_of_its_own(postgres: Store) -> None:
    put(postgres, "1", "READY")
    before = postgres.db.execute("select seq, xid::text from dataevent", {})[0]
    with postgres.db.transaction():
        put(postgres, "2", "READY")
        postgres.db.run("upgrade.rebase")
    assert set(before) < set(postgres.db.execute("select seq, xid::text from dataevent", {})[0])
    assert postgres.db.execute("select 1 from dataflow_meta where name = 'log'", {})[0] == []
