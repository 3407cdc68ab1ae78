"""The state of jobs: rows in natural order, counts by the database, squares."""

import time
from datetime import UTC, datetime, timedelta

import pytest

from opendataflow_dagster.errors import Refused
from opendataflow_dagster.explain.explain import explain
from opendataflow_dagster.store.history import history, runs
from opendataflow_dagster.store.overview import failures, grid, running, status, summary
from opendataflow_dagster.store.registry import set_policy
from opendataflow_dagster.store.store import Store
from tests.explain.test_explain import job, put
from tests.support.store_fixtures import sql


@pytest.fixture
def line(store: Store) -> Store:
    job(store, "fetch", "raw", "a")
    job(store, "load", "a", "b c")
    return store


def test_rows_are_in_natural_order(line: Store) -> None:
    for dataid in ("10", "9", "2", "x1"):
        put(line, "a", "READY", dataid=dataid)
    assert [row["dataid"] for row in status(line, "fetch")] == ["2", "9", "10", "x1"]
    assert [row["dataid"] for row in status(line, "a")] == ["2", "9", "10", "x1"]
    assert len(list(status(line))) == 4
    [row, *_] = status(line, "a")
    assert list(row) == [
        "datasetid",
        "jobid",
        "dataid",
        "locktype",
        "status",
        "modified",
        "generation",
    ]
    assert list(status(line, "load")) == []
    with pytest.raises(Refused, match="no job or dataset 'nobody'"):
        list(status(line, "nobody"))


def test_times_mean_the_same_on_both(line: Store) -> None:
    put(line, "a", "FAILED")
    put(line, "a", "READY")
    [row] = status(line)
    assert abs(row["modified"] - datetime.now(UTC)) < timedelta(minutes=1)


def test_failures_are_chunks_the_last_first_with_their_reasons(line: Store) -> None:
    set_policy(line, "load", {"max_attempts": "2", "retry_delay": "3600"})
    for dataid in ("2", "10", "9"):
        put(line, "a", "READY", dataid=dataid)
    for claim in line.claim("load", owner="me", k=9):
        if claim.dataid == "9":
            line.finish(claim)
        else:
            line.fail(claim, f"no disk for {claim.dataid}")
    put(line, "a", "ERROR", dataid="x")
    for dataid, modified in (("x", "2026-01-01"), ("2", "2026-01-02"), ("10", "2026-01-03")):
        sql(line, f"update datastatus set modified = '{modified}' where dataid = '{dataid}'")

    found = list(failures(line))
    assert [(row["jobid"], row["dataid"], row["why"]) for row in found] == [
        ("load", "10", "no disk for 10"),
        ("load", "2", "no disk for 2"),
        ("fetch", "x", None),
    ]
    assert [list(row) for row in found] == [["jobid", "dataid", "modified", "why", "retry_at"]] * 3
    assert found[2]["retry_at"] is None
    for row in found[:2]:
        assert row["retry_at"] - datetime.now(UTC) < timedelta(hours=1)
        assert row["retry_at"] - datetime.now(UTC) > timedelta(minutes=59)
    assert [row["dataid"] for row in failures(line, limit=1)] == ["10"]
    assert [row["dataid"] for row in failures(line, "a")] == ["x"]
    assert [row["dataid"] for row in failures(line, "c")] == ["10", "2"]
    assert len(list(failures(line, since=datetime(2026, 1, 2, 12, tzinfo=UTC)))) == 1


def test_chunks_are_counted_by_status(line: Store) -> None:
    words = {
        "READY": 3,
        "FAILED": 2,
        "ERROR": 1,
        "HOLD": 1,
        "CHECKME": 1,
        "RERUN": 1,
        "PENDING": 1,
        "RUNNING": 1,
    }
    number = 0
    for word, times in words.items():
        for _ in range(times):
            put(line, "a", word, dataid=str(number))
            number += 1
    put(line, "b", "READY", jobid="load", dataid="0")
    rows = {(row["jobid"], row["datasetid"]): row for row in summary(line)}
    assert list(rows) == [("fetch", "a"), ("load", "b"), ("load", "c")]
    assert rows["fetch", "a"] == {
        "jobid": "fetch",
        "datasetid": "a",
        "claimable": 0,
        "running": 1,
        "ready": 3,
        "failed": 3,
        "resubmit": 1,
        "hold": 2,
        "pending": 1,
        "stale": 0,
        "note": "",
    }
    assert rows["load", "b"]["claimable"] == 2
    assert [row["jobid"] for row in summary(line, "fetch")] == ["fetch"]
    assert [row["jobid"] for row in summary(line, "b")] == ["load"]


def test_notes_mention_the_dials(line: Store) -> None:
    set_policy(line, "load", {"paused_until": "forever"})
    set_policy(line, "fetch", {"concurrency": "3"})
    notes = {row["jobid"]: row["note"] for row in summary(line)}
    assert notes == {
        "load": "paused until further notice",
        "fetch": "at most 3 at once",
    } or notes["load"].startswith("paused until 99")


def test_rows_of_unregistered_jobs_count_too(line: Store) -> None:
    put(line, "z", "READY", jobid="external")
    assert summary(line, "external")[0]["ready"] == 1


def test_of_a_job_that_reads_today_only_today_may_be_claimed(store: Store) -> None:
    job(store, "daily", "today a", "report")
    for dataid in ("1999-12-31", store.today()):
        put(store, "a", "READY", dataid=dataid)
    assert summary(store, "daily")[0]["claimable"] == 1
    [strip] = grid(store, "daily")
    assert strip.squares == [""]


def test_running_chunks_are_listed_with_their_owners(line: Store) -> None:
    put(line, "a", "READY", dataid="1")
    put(line, "a", "READY", dataid="2")
    line.claim("load", owner="me", only="1", lease=50)
    [row] = running(line)
    assert (row["jobid"], row["dataid"], row["owner"], row["attempts"]) == ("load", "1", "me", 1)
    assert timedelta(seconds=45) < row["lease_end"] - datetime.now(UTC) <= timedelta(seconds=51)
    assert running(line, "fetch") == []


def test_squares_show_what_waits_too(line: Store) -> None:
    for number in (1, 2, 10):
        put(line, "a", "READY", dataid=str(number))
    put(line, "b", "FAILED", jobid="load", dataid="2")
    strips = {(strip.jobid, strip.datasetid): strip for strip in grid(line)}
    assert strips["fetch", "a"].squares == ["READY"] * 3
    assert strips["load", "b"].squares == ["", "FAILED", ""]
    assert strips["load", "c"].squares == ["", None, ""]


def test_a_square_may_stand_for_several_and_shows_the_most_urgent(line: Store) -> None:
    for number in range(25):
        put(line, "a", "FAILED" if number == 13 else "READY", dataid=str(number))
    [strip] = grid(line, "fetch", most=10)
    assert (strip.chunks, strip.each, len(strip.squares)) == (25, 3, 9)
    assert [word for word in strip.squares if word != "READY"] == ["FAILED"]
    assert strip.squares[4] == "FAILED"


@pytest.mark.soak
def test_a_million_chunks_are_counted_at_once(line: Store) -> None:
    numbers = (
        "with recursive n(x) as (select 1 union all select x + 1 from n where x < 1000000) "
        "select {} from n"
        if line.db.dialect == "sqlite"
        else "select {} from generate_series(1, 1000000) as n(x)"
    )
    with line.db.transaction(act="claim"):
        line.db.execute(
            "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
            + numbers.format(
                "'a', 'fetch', cast(x as text), 'OUT', "
                "case when mod(x, 100) = 0 then 'FAILED' else 'READY' end"
            ),
            {},
        )
        line.db.run("upgrade.rebuild")
    if line.db.dialect == "postgres":
        line.db.execute("analyze", {})
    began = time.monotonic()
    [row] = summary(line, "fetch")
    assert (row["ready"], row["failed"]) == (990_000, 10_000)
    assert time.monotonic() - began < 3, time.monotonic() - began
    began = time.monotonic()
    found = explain(line, "load")
    assert (found.counts, found.notes) == ({"": 990_000, "DATA_NOT_READY": 10_000}, [])
    assert time.monotonic() - began < 15, time.monotonic() - began
    began = time.monotonic()
    assert len(runs(line)) == 20
    assert len(history(line, jobid="fetch")) == 20
    assert time.monotonic() - began < 3, time.monotonic() - began
