"""The past: what was registered at a given time, its changes, and what `odf why --at` says."""

import json
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner, Result

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.explain.explain import explain
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.history import Registration, registrations
from opendataflow_dagster.store.registry import (
    add_dataset,
    add_job,
    remove_dataset,
    remove_job,
    set_policy,
)
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, close, connect, put, register, sql, take
from tests.support.table_dump import restore

D = "2026-03-01"


def now() -> datetime:
    """Return a time after everything so far, and before everything later."""
    time.sleep(0.003)
    found = datetime.now(UTC)
    time.sleep(0.003)
    return found


def odf(url: str, *words: str) -> Result:
    return CliRunner().invoke(app, words, env={"DATAFLOW_URL": url})


def told(store: Store, **of: Any) -> list[tuple[str | None, ...]]:
    """Which lock, what before and after: of each change of a registration."""
    return [
        (event.locktype, event.status_before, event.status_after)
        for event in registrations(store, **of)
    ]


def test_why_at_judges_by_what_was_registered_then(store: Store) -> None:
    add_dataset(store, "a", hostname="/old")
    add_job(store, "load", ["a"], ["b"])
    set_policy(store, "load", {"paused_until": "2099-01-01"})
    put(store, "a", D)
    paused = now()
    set_policy(store, "load", {"paused_until": "no"})
    free = now()
    add_dataset(store, "a", hostname="/new")
    add_job(store, "load", ["a", "c"], ["b"])
    needs_c = now()
    remove_job(store, "load")
    remove_dataset(store, "a")
    gone = now()

    found = explain(store, "load", D, paused)
    assert (found.code, found.may_run) == ("PAUSED", False)
    found = explain(store, "load", D, free)
    assert found.may_run
    assert "a: /old" in found.answers[2].text
    found = explain(store, "load", D, needs_c)
    assert found.code == "DATA_NOT_READY"
    assert "'c' isn't there yet" in found.reasons[0].text
    assert "a: /new" in found.answers[2].text
    for at in (gone, paused - timedelta(days=1)):
        found = explain(store, "load", D, at)
        assert (found.code, found.action) == ("NOT_REGISTERED", "")
        assert found.reasons[0].text == "Job 'load' wasn't registered then"


def test_a_job_as_a_whole_is_judged_by_the_past_too(store: Store) -> None:
    add_job(store, "load", ["a"], ["b"])
    for dataid in ("1", "2"):
        put(store, "a", dataid)
    before = now()
    add_job(store, "load", ["a", "c"], ["b"])
    after = now()
    assert explain(store, "load", at=before).counts == {"": 2}
    assert explain(store, "load", at=after).counts == {"DATA_NOT_READY": 2}
    remove_job(store, "load")
    assert explain(store, "load", at=before).counts == {"": 2}


def test_a_reader_locks_by_the_place_of_that_time(store: Store) -> None:
    """A reader in a place that keeps versions doesn't hold up the chunk's producer."""
    add_dataset(store, "a", hostname="remote+file:///tmp/x")
    add_job(store, "make", ["raw"], ["a"])
    add_job(store, "read", ["a"], ["b"])
    put(store, "raw", D)
    put(store, "a", D, "READY", jobid="make")
    take(store, "read")
    put(store, "a", D, "RESUBMIT", jobid="make")
    kept = now()
    add_dataset(store, "a", hostname="/tmp/x")
    not_kept = now()
    for dataid in (D, None):
        assert explain(store, "make", dataid, kept).may_run
        assert explain(store, "make", dataid, not_kept).code == "LOCKED"


def test_a_dial_of_the_past_counts_what_was_running_then(store: Store) -> None:
    add_job(store, "load", ["a"], ["b"])
    set_policy(store, "load", {"concurrency": "1"})
    put(store, "a", "1")
    put(store, "a", "2")
    idle = now()
    [claim] = take(store, "load", "me@here")
    busy = now()
    store.finish(claim)
    done = now()
    assert explain(store, "load", "2", idle).may_run
    found = explain(store, "load", "2", busy)
    assert found.code == "AT_CONCURRENCY"
    assert "me@here holds one" in found.reasons[0].text
    assert explain(store, "load", "2", done).may_run


def test_every_change_of_a_registration_is_recorded(store: Store) -> None:
    register(store, "load", ["a"], ["b"], REGION="north")
    sql(store, "insert into dataset (datasetid, hostname) values ('a', '/old')")
    sql(store, "update dataset set hostname = '/new', format = 'csv' where datasetid = 'a'")
    sql(store, "update dataset set hostname = '/new' where datasetid = 'a'")
    sql(store, "update job set itemvalue = 'south' where itemtype = 'REGION'")
    sql(store, "insert into jobpolicy (jobid, concurrency) values ('load', 2)")
    sql(store, "update jobpolicy set concurrency = 0")
    sql(store, "delete from job where datasetid = 'a'")
    sql(store, "delete from dataset")
    assert told(store, datasetid="a") == [
        ("IN", None, "registered"),
        ("dataset", None, "hostname=/old"),
        ("dataset", "hostname=/old", "format=csv hostname=/new"),
        ("IN", "registered", None),
        ("dataset", "format=csv hostname=/new", None),
    ]
    assert told(store, jobid="load") == [
        ("IN", None, "registered"),
        ("OUT", None, "registered"),
        ("REGION", None, "north"),
        ("REGION", "north", "south"),
        ("dials", None, "concurrency=2"),
        ("dials", "concurrency=2", "concurrency=0"),
        ("IN", "registered", None),
    ]
    assert {event.who for event in registrations(store, jobid="load")} == {
        "sql" if store.db.dialect == "sqlite" else "postgres (psql)"
    }
    check(store)


def test_what_is_registered_again_as_it_was_is_no_change(store: Store) -> None:
    for _ in range(2):
        add_job(store, "load", ["a"], ["b"], {"REGION": "north"}, replace=True)
    assert len(registrations(store, jobid="load")) == 3
    [(rows,)] = sql(store, "select count(*) from registration")
    assert rows == 3


def test_of_a_password_only_a_digest_is_kept(store: Store) -> None:
    sql(store, "insert into dataset (datasetid, encryptedpass) values ('a', 'geheimnis-1')")
    sql(store, "update dataset set encryptedpass = 'geheimnis-2'")
    sql(store, "update dataset set encryptedpass = 'geheimnis-1'")
    rows = sql(store, "select content from registration where n > 0 order by seq")
    first, second, third = (json.loads(row)["encryptedpass"] for (row,) in rows)
    assert first == third != second
    assert all(each.startswith("digest ") and len(each) == 15 for each in (first, second))
    assert "geheim" not in repr(sql(store, "select * from registration"))
    # What SQLite makes it of doesn't stumble over any value.
    for odd in ("", "x", "ü" * 3000, "\U0001f600", None):
        sql(store, "update dataset set encryptedpass = :odd", odd=odd)
    check(store)


def test_rows_that_are_exchanged_or_emptied_are_known(store: Store) -> None:
    register(store, "load", ["a"], ["b"])
    register(store, "load", ["a"])  # the same row a second time
    sql(store, "insert into jobpolicy (jobid, concurrency) values ('load', 2)")
    if store.db.dialect == "sqlite":
        sql(store, "insert or replace into jobpolicy (jobid, concurrency) values ('load', 3)")
        sql(store, "update job set jobid = 'other', datasetid = datasetid || '2'")
        assert Registration(store, now()).plan("other").inputs == ("a2",)
        sql(store, "delete from job")
        sql(store, "delete from jobpolicy")
    else:
        sql(store, "update job set jobid = 'other', datasetid = datasetid || '2'")
        assert Registration(store, now()).plan("other").inputs == ("a2",)
        sql(store, "truncate job, jobpolicy")
    assert Registration(store, now()).plan("other").flaw
    assert Registration(store, now()).dials("load") == (None, None)
    check(store)


def test_registrations_older_than_history_get_a_note(url: str) -> None:
    store = restore(url)
    store.init()
    check(store)
    [(before,)] = sql(store, "select count(*) from registration where found = 1")
    assert before
    long_ago = now() - timedelta(days=300)
    found = explain(store, "loadbob", at=long_ago)
    assert found.code != "NOT_REGISTERED"
    assert any("Registrations are recorded since" in note for note in found.notes)
    assert not any(
        "Registrations are" in note for note in explain(store, "loadbob", at=now()).notes
    )

    # What others write while the triggers are off is found by the next init, as a change of then.
    with closing(connect(store)) as other:
        if store.db.dialect == "sqlite":
            other.execute("drop trigger dataset_added")
        else:
            other.execute("set session_replication_role = replica")
        other.execute("insert into dataset (datasetid, hostname) values ('late', '/here')")
    store.init()
    assert told(store, datasetid="late") == [("dataset", None, "hostname=/here")]
    check(store)
    close(store)


def test_history_shows_the_changes_of_a_dataset_among_those_of_its_chunks(url: str) -> None:
    store = open_store(url)
    store.init()
    add_dataset(store, "a", hostname="/old")
    now()
    put(store, "a", D)
    start = now()
    add_dataset(store, "a", hostname="/new")
    add_job(store, "load", ["a"], ["b"])
    close(store)

    rows = json.loads(odf(url, "history", "--dataset", "a", "--json").stdout)
    assert [(row["locktype"], row["status_after"]) for row in rows] == [
        ("dataset", "hostname=/old"),
        ("OUT", "READY"),
        ("dataset", "hostname=/new"),
        ("IN", "registered"),
    ]
    assert json.loads(odf(url, "history", "--dataset", "a", "--all", "--json").stdout) == rows
    assert (
        json.loads(odf(url, "history", "--dataset", "a", "--limit", "2", "--json").stdout)
        == (rows[2:])
    )
    since = odf(url, "history", "--dataset", "a", "--since", start.isoformat(), "--json").stdout
    assert json.loads(since) == rows[2:]
    assert "READY" in odf(url, "history", "--dataset", "a", "--status", "READY").stdout
    assert "/new" not in odf(url, "history", "--dataset", "a", "--status", "READY").stdout

    shown = odf(url, "history", "--policy", "load").stdout
    assert [line.split()[4:] for line in shown.splitlines()[1:]]
    assert "registered" in shown
    for words, code, says in (
        (("--policy", "laod"), 4, "Did you mean 'load'?"),
        (("load", "--policy", "load"), 2, "Use --policy only with --since"),
    ):
        refused = odf(url, "history", *words)
        assert (refused.exit_code, says in refused.stderr) == (code, True), refused.output
    at = odf(url, "why", "load", D, "--at", start.isoformat())
    assert at.exit_code == 4
    assert "wasn't registered then" in at.stdout


@pytest.mark.parametrize("dials", [{"paused_until": "forever"}, {"concurrency": "0"}])
def test_dials_of_the_past_are_read_as_they_were_set(store: Store, dials: dict[str, str]) -> None:
    add_job(store, "load", ["a"], ["b"])
    set_policy(store, "load", dials)
    assert explain(store, "load", at=now()).may_run is False
    concurrency, until = Registration(store, now()).dials("load")
    assert concurrency == (0 if "concurrency" in dials else None)
    assert (until is not None and until.year == 9999) == ("paused_until" in dials)
