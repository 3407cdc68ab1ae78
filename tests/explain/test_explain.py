"""Why a chunk may run or not: the answer agrees with what a claim does, and its advice helps."""

import json
import shlex
import shutil
import sqlite3
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from opendataflow_dagster.errors import LostRace, WrongUse
from opendataflow_dagster.explain import explain as explain_module
from opendataflow_dagster.explain.answers import Reason
from opendataflow_dagster.explain.explain import ADVICE, Explanation, explain
from opendataflow_dagster.model import Fact
from opendataflow_dagster.storage import presence
from opendataflow_dagster.storage.table import Rows
from opendataflow_dagster.store import operations
from opendataflow_dagster.store.registry import add_dataset, add_job, set_policy
from opendataflow_dagster.store.store import Store
from opendataflow_dagster.util.times import parse_time, to_table
from tests.support.store_fixtures import connect

D = "2026-03-01"


def job(store: Store, jobid: str, inputs: str, outputs: str) -> None:
    for itemtype, names in (("IN", inputs), ("OUT", outputs)):
        for name in names.split():
            store.db.execute(
                "insert into job (jobid, itemtype, datasetid) "
                f"values ('{jobid}', '{itemtype}', '{name}')",
                {},
            )
    store._plans.clear()


def put(
    store: Store,
    datasetid: str,
    status: str,
    *,
    jobid: str = "fetch",
    dataid: str = D,
    lock: str = "OUT",
) -> None:
    store.db.execute(
        "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
        f"values ('{datasetid}', '{jobid}', '{dataid}', '{lock}', '{status}') "
        "on conflict (datasetid, jobid, dataid) "
        "do update set locktype = excluded.locktype, status = excluded.status",
        {},
    )


@pytest.fixture
def line(store: Store) -> Store:
    """Two jobs in a row: fetch produces a; load reads it and produces b."""
    job(store, "fetch", "raw", "a")
    job(store, "load", "a", "b")
    return store


def follow(store: Store, action: str) -> None:
    """Run what an explanation advises."""
    for command in action.split(" && "):
        _, verb, *words = shlex.split(command)
        match verb:
            case "resubmit":
                operations.resubmit(store, words[0], words[1:])
            case "release":
                operations.release(store, words[0], words[1:])
            case "hold":
                operations.hold(store, words[0], words[1:])
            case "ready":
                operations.ready(store, words[0], words[1:])
            case "delete-run":
                operations.delete_run(store, *words)
            case "recover":
                store.recover(words[1])
                if "--older-than" in words:
                    operations.recover_abandoned(store, 0, jobid=words[1])
            case "policy":
                set_policy(store, words[0], dict([words[1].split("=")]))
            case "dml":
                store.db.execute(words[0], None)
            case "run":
                [claim] = store.claim(words[1], owner="advised", only=D)
                store.finish(claim)
            case _:
                raise AssertionError(action)


# --- the codes, one by one ---


def test_an_unregistered_job_is_explained(store: Store) -> None:
    found = explain(store, "nobody", D)
    assert (found.may_run, found.code) == (False, "NOT_REGISTERED")
    assert found.action == "odf job add nobody --in DATASET --out DATASET"
    assert explain(store, "nobody").code == "NOT_REGISTERED"


def test_a_claimable_chunk_is_explained(line: Store) -> None:
    put(line, "a", "READY")
    found = explain(line, "load", D)
    assert found.may_run
    assert found.reasons == []
    assert {answer.question: answer.ok for answer in found.answers} == {
        "ready": True,
        "right data": True,
        "location": None,
        "validated": None,
        "safe": True,
    }


def test_the_advice_names_a_missing_root(line: Store) -> None:
    found = explain(line, "load", D)
    assert (found.code, found.action) == ("DATA_NOT_READY", f"odf ready raw {D}")
    assert "'fetch' produces it, and may not run: 'raw' isn't there yet" in found.reasons[0].text


def test_the_advice_names_a_claimable_producer(line: Store) -> None:
    put(line, "raw", "READY", jobid="external")
    assert explain(line, "load", D).action == "odf run --job fetch SCRIPT"


def test_a_failed_input_is_explained_with_who_when_and_why(line: Store) -> None:
    put(line, "raw", "READY", jobid="external")
    [claim] = line.claim("fetch", owner="me")
    line.fail(claim, "exit code 3")
    found = explain(line, "load", D)
    assert (found.code, found.action) == ("DATA_NOT_READY", f"odf resubmit fetch {D}")
    assert "'a' is FAILED by 'fetch' since 20" in found.reasons[0].text
    assert "(exit code 3)" in found.reasons[0].text
    own = explain(line, "fetch", D)
    assert (own.code, own.action) == ("HELD", f"odf resubmit fetch {D}")


def test_an_input_on_hold_is_released(line: Store) -> None:
    put(line, "a", "CHECKME")
    assert explain(line, "load", D).action == f"odf release fetch {D}"


def test_a_running_chunk_is_explained_with_its_owner(line: Store) -> None:
    put(line, "a", "READY")
    line.claim("load", owner="me@here")
    found = explain(line, "load", D)
    assert (found.code, found.action) == ("LOCKED", "")
    assert "by me@here, with a lease until 20" in found.reasons[0].text
    safe = found.answers[-1]
    assert safe.ok is False
    assert {row["owner"] for row in safe.rows} == {"me@here"}
    assert explain(line, "fetch", D).answers[-1].ok is False, "what is read isn't made again"


def test_a_lease_that_ran_out_is_recovered(line: Store) -> None:
    put(line, "a", "READY")
    line.claim("load", owner="me", lease=0.01)
    time.sleep(0.1)
    assert explain(line, "load", D).action == "odf recover --job load"
    follow(line, explain(line, "load", D).action)
    assert explain(line, "load", D).may_run


def test_a_running_row_of_the_java_program_is_explained(line: Store) -> None:
    put(line, "a", "READY")
    put(line, "b", "RUNNING", jobid="load")
    found = explain(line, "load", D)
    assert (found.code, found.action) == ("LOCKED", "odf recover --job load --older-than 2h")


def test_a_finished_chunk_is_explained(line: Store) -> None:
    put(line, "a", "READY")
    put(line, "b", "READY", jobid="load")
    found = explain(line, "load", D)
    assert (found.code, found.action) == ("ALREADY_DONE", f"odf resubmit load {D}")


def test_a_job_held_back_by_its_dials_is_explained(line: Store) -> None:
    put(line, "a", "READY")
    put(line, "a", "READY", dataid="2")
    set_policy(line, "load", {"concurrency": "1"})
    assert explain(line, "load", D).may_run
    line.claim("load", owner="me", only="2")
    found = explain(line, "load", D)
    assert (found.code, found.action) == ("AT_CONCURRENCY", "odf policy load concurrency=2")
    set_policy(line, "load", {"paused_until": "forever"})
    found = explain(line, "load", D)
    assert (found.code, found.action) == ("PAUSED", "odf policy load paused_until=no")
    assert [reason.code for reason in found.reasons] == ["PAUSED", "AT_CONCURRENCY"]


def test_today_is_a_date_in_the_configured_zone(store: Store) -> None:
    job(store, "daily", "today", "report")
    today = store.today()
    assert explain(store, "daily", today).may_run
    assert explain(store, "daily").next_chunk == today
    found = explain(store, "daily", "1999-12-31")
    assert (found.code, found.may_run) == ("DATA_NOT_READY", False)
    store.timezone = "Pacific/Kiritimati"
    early = parse_time(store, "2026-05-01T00:30")
    store.db.execute("update registration set found = 1", {})  # as if it had always been there
    assert explain(store, "daily", "2026-05-01", early).may_run
    assert not explain(store, "daily", "2026-04-30", early).may_run


def test_quotes_in_an_id_stay_quotes_in_the_advice(store: Store) -> None:
    job(store, "lo''ad", 'a&b"', "c")
    dataid = "x'; rm -rf $HOME"
    [_, verb, *words] = shlex.split(explain(store, "lo'ad", dataid).action)
    assert (verb, words) == ("ready", ['a&b"', dataid])


def test_an_empty_id_is_wrong_use(store: Store) -> None:
    with pytest.raises(WrongUse):
        explain(store, "load", "")
    with pytest.raises(WrongUse):
        explain(store, "")


# --- right data, location, validation ---


def test_a_place_behind_a_broken_link_is_reported(line: Store, tmp_path: Path) -> None:
    (tmp_path / "volume").symlink_to("/nowhere/at/all")
    line.db.execute(
        f"insert into dataset (datasetid, hostname) values ('b', '{tmp_path}/volume/b')", {}
    )
    put(line, "a", "READY")
    [answer] = [each for each in explain(line, "load", D).answers if each.question == "location"]
    assert answer.ok is False
    assert "volume is a link to /nowhere/at/all, which isn't there" in answer.text


def made(store: Store, jobid: str, *facts: Fact) -> None:
    [claim] = store.claim(jobid, owner="me", only=D)
    store.finish(claim, facts)


def test_a_stale_output_is_reported(line: Store) -> None:
    put(line, "raw", "READY", jobid="external")
    made(line, "fetch", Fact("a", D, rows=10, fingerprint="abc"))
    made(line, "load")
    right = explain(line, "load", D).answers[1]
    assert right.ok is True
    assert right.rows[0]["generation"] == right.rows[0]["consumed"]
    assert (right.rows[0]["rows"], right.rows[0]["fingerprint"]) == (10, "abc")

    operations.resubmit(line, "fetch", [D])
    made(line, "fetch", Fact("a", D, rows=11, fingerprint="abd"))
    right = explain(line, "load", D).answers[1]
    assert right.ok is False
    assert "it is stale" in right.text
    assert right.rows[0]["consumed"] == right.rows[0]["generation"] - 1 or right.rows[0]["consumed"]


def test_a_stale_output_of_inputs_marked_by_hand_is_reported(line: Store) -> None:
    put(line, "a", "READY")
    made(line, "load")
    assert explain(line, "load", D).answers[1].ok is True
    time.sleep(0.05)
    put(line, "a", "FAILED")
    put(line, "a", "READY")
    assert explain(line, "load", D).answers[1].ok is False


def test_a_missing_or_moved_place_is_reported(line: Store, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    line.db.execute(f"insert into dataset (datasetid, hostname) values ('a', '{folder}')", {})
    put(line, "raw", "READY", jobid="external")
    made(line, "fetch", Fact("a", D, location=f"{folder}/{D}"))
    assert explain(line, "load", D).answers[2].ok is True

    folder.rename(tmp_path / "c")
    found = explain(line, "load", D)
    assert (found.code, found.may_run) == ("INVALID_LOCATION", True)
    assert "doesn't exist here" in found.reasons[0].text
    line.db.execute(f"update dataset set hostname = '{tmp_path / 'c'}'", {})
    found = explain(line, "load", D)
    assert found.code == "INVALID_LOCATION"
    assert f"was produced at {folder}/{D}" in found.reasons[0].text
    assert explain(line, "load").code == "INVALID_LOCATION", "and so for the job's next chunk"


def look(store: Store) -> tuple[bool | None, str, str, str]:
    """Return what `odf why load` says about its data's place: answer, text, code and action."""
    found = explain(store, "load", D, look=presence.look_at)
    return found.answers[2].ok, found.answers[2].text, found.code, found.action


def test_missing_files_of_a_chunk_are_noticed(line: Store, tmp_path: Path) -> None:
    add_dataset(line, "a", hostname=str(tmp_path / "a"))
    put(line, "raw", "READY", jobid="external")
    chunk = tmp_path / "a" / f"dataid={D}"
    chunk.mkdir(parents=True)
    (chunk / "part.parquet").touch()
    (chunk / "_odf.json").write_text('{"rows": 3}')
    made(line, "fetch", Fact("a", D, location=str(chunk), rows=3))
    assert look(line)[::2] == (True, "")
    again = ("INVALID_LOCATION", f"odf resubmit fetch {D}")

    (chunk / "part.parquet").unlink()
    assert look(line) == (
        False,
        f"a: {tmp_path}/a; the files of chunk '{D}' are gone from {chunk}; b: not registered",
        *again,
    )
    shutil.rmtree(chunk)
    assert f"chunk '{D}' has no data in {tmp_path}/a" in look(line)[1]
    assert look(line)[2:] == again
    assert explain(line, "load", D).answers[2].ok is True, "who claims a chunk doesn't look"
    assert explain(line, "load", look=presence.look_at).code == "INVALID_LOCATION"

    put(line, "b", "READY", jobid="load")
    add_dataset(line, "a", hostname="")
    assert look(line)[:3] == (
        False,
        f"a: registered without a place, made at {chunk}, which "
        "doesn't exist here; b: not registered",
        "ALREADY_DONE",
    )


def test_a_script_s_files_are_looked_for_by_name(line: Store, tmp_path: Path) -> None:
    add_dataset(line, "a", hostname=str(tmp_path))
    put(line, "a", "READY")
    put(line, "a", "READY", dataid="2026-03-02")
    (tmp_path / "all.txt").touch()
    assert look(line)[0] is None, "names tell nothing"
    (tmp_path / "day=2026-03-02.txt").touch()
    assert look(line)[::3] == (False, f"odf resubmit fetch {D}")
    (tmp_path / f"day={D}.txt").touch()
    assert look(line)[0] is True


def test_missing_rows_of_a_chunk_are_noticed(
    line: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(line, "raw", "READY", jobid="external")
    made(line, "fetch", Fact("a", D, rows=1))
    if line.db.dialect == "sqlite":
        where = {"database": str(tmp_path / "shop.db")}
        table = sqlite3.connect(tmp_path / "shop.db", isolation_level=None)
    else:
        parts = conninfo_to_dict(line.db.url)  # type: ignore[attr-defined]
        where = {
            "hostname": f"{parts['host']}:{parts['port']}",
            "database": parts["dbname"],
            "schemaname": "dataflow",
            "username": parts["user"],
        }
        table = connect(line)
    table.execute("create table shop (day text, n integer)")
    add_dataset(line, "a", tablename="shop", chunkcolumn="day", **where)
    assert look(line)[2:] == ("INVALID_LOCATION", f"odf resubmit fetch {D}")
    assert f"has no row of chunk '{D}'" in look(line)[1]
    table.execute(f"insert into shop values ('{D}', 1)")
    assert look(line)[::2] == (True, "")
    table.execute("drop table shop")
    assert look(line)[0] is False
    assert "there is no table" in look(line)[1]
    table.close()

    monkeypatch.setattr(presence, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(Rows, "is_there", lambda rows: time.sleep(1))
    before = time.monotonic()
    assert look(line)[::2] == (None, "")
    assert "can't be told from here: it didn't answer in time" in look(line)[1]
    assert time.monotonic() - before < 4


@pytest.mark.parametrize(
    "place",
    [
        {"hostname": "127.0.0.1:1", "tablename": "t", "chunkcolumn": "c"},
        {"hostname": "s3a://bucket/a"},
        {"hostname": "jdbc:db2://host/db", "tablename": "t", "chunkcolumn": "c"},
    ],
)
def test_a_place_that_cannot_be_reached_from_here_is_unknown(
    line: Store, place: dict[str, str]
) -> None:
    add_dataset(line, "a", **place)
    put(line, "a", "READY")
    assert look(line)[::2] == (None, "")
    assert "whether the chunk is there can't be told from here" in look(line)[1]


def test_an_input_that_failed_its_checks_is_reported(line: Store) -> None:
    put(line, "raw", "READY", jobid="external")
    made(line, "fetch", Fact("a", D, validated=False, checks="3 rows without a date"))
    found = explain(line, "load", D)
    assert (found.code, found.may_run) == ("NOT_VALIDATED", True)
    assert "3 rows without a date" in found.reasons[0].text
    assert found.answers[3].ok is False
    operations.resubmit(line, "fetch", [D])
    made(line, "fetch", Fact("a", D, validated=True))
    assert explain(line, "load", D).answers[3].ok is True


# --- the job as a whole ---


def test_a_job_is_explained_with_its_next_chunk_and_its_backlog(line: Store) -> None:
    for number in (2, 10, 9):
        put(line, "a", "READY", dataid=str(number))
    put(line, "b", "READY", jobid="load", dataid="2")
    put(line, "a", "FAILED", dataid="11")
    found = explain(line, "load")
    assert (found.may_run, found.next_chunk) == (True, "9")
    assert found.counts == {"": 2, "ALREADY_DONE": 1, "DATA_NOT_READY": 1}


def test_an_idle_job_is_explained_by_what_its_chunks_wait_for(line: Store) -> None:
    assert explain(line, "load").code == "DATA_NOT_READY"
    for number in range(5):
        put(line, "a", "READY", dataid=str(number))
        put(line, "b", "READY", jobid="load", dataid=str(number))
    for number in range(20, 8, -1):
        put(line, "a", "FAILED", dataid=str(number))
    put(line, "b", "FAILED", jobid="load", dataid="3")
    found = explain(line, "load")
    assert not found.may_run
    assert found.counts == {"ALREADY_DONE": 4, "DATA_NOT_READY": 12, "HELD": 1}
    assert [reason.code for reason in found.reasons] == ["HELD", "ALREADY_DONE", "DATA_NOT_READY"]
    assert found.action == "odf resubmit load 3"
    assert found.reasons[2].text.startswith(
        "12 chunks ('9', '10', '11', …): 'a' is FAILED by 'fetch'"
    )


def test_a_job_without_chunks_points_at_what_is_missing_and_not_at_itself(store: Store) -> None:
    job(store, "load", "a", "b")
    found = explain(store, "load")
    assert (found.code, found.action) == ("DATA_NOT_READY", "odf ready a DATAID")
    assert "No chunk of 'a' is known yet, and no registered job produces" in found.reasons[0].text

    job(store, "fetch", "raw", "a")
    found = explain(store, "load")
    assert found.action == "odf ready raw DATAID"
    assert "'fetch' produces it, and may not run: No chunk of 'raw' is" in found.reasons[0].text
    put(store, "raw", "READY", jobid="external")
    found = explain(store, "load")
    assert found.action == "odf run --job fetch SCRIPT"
    set_policy(store, "fetch", {"paused_until": "forever"})
    assert explain(store, "load").action == "odf policy fetch paused_until=no"

    job(store, "first", "y", "x")
    job(store, "second", "x", "y")
    found = explain(store, "first")
    assert found.action == "odf ready x DATAID"
    assert "waits for this job in turn" in found.reasons[0].text


def test_a_busy_job_is_explained_by_what_holds_back_the_rest(
    line: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(16):
        put(line, "a", "READY", dataid=str(number))
    for number in range(9):
        put(line, "b", "FAILED", jobid="load", dataid=str(number))
    put(line, "b", "READY", jobid="load", dataid="9")
    put(line, "a", "FAILED", dataid="16")
    found = explain(line, "load")
    assert (found.may_run, found.next_chunk, found.counts[""]) == (True, "10", 6)
    assert [reason.code for reason in found.reasons] == ["HELD", "DATA_NOT_READY"]
    assert found.reasons[0].text.startswith("9 chunks ('0', '1', '2', …): 'b' is FAILED")
    assert (found.code, found.action) == ("HELD", "odf resubmit load 0")

    monkeypatch.setattr(explain_module, "MAX_JUDGED_ROWS", 1)
    found = explain(line, "load")
    assert found.may_run
    assert "HELD" in {reason.code for reason in found.reasons}


def test_for_a_job_of_many_chunks_only_the_queue_and_examples_are_read(
    line: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain_module, "MAX_JUDGED_ROWS", 1)
    for dataid in ("1", "2"):
        put(line, "a", "READY", dataid=dataid)
    found = explain(line, "load")
    assert (found.may_run, found.next_chunk, found.counts) == (True, "1", {"": 2})
    assert "To count them: odf why load --all" in found.notes[-1]
    with pytest.raises(WrongUse, match="Name a chunk"):
        explain(line, "load", at=datetime.now(UTC))

    put(line, "b", "FAILED", jobid="load", dataid="1")
    put(line, "b", "READY", jobid="load", dataid="2")
    put(line, "a", "RUNNING", dataid="3")
    found = explain(line, "load")
    assert (found.may_run, found.counts) == (False, {})
    codes = {reason.code: reason for reason in found.reasons}
    assert set(codes) == {"HELD", "ALREADY_DONE", "DATA_NOT_READY"}
    assert codes["HELD"].text.startswith("chunk '1', for one: 'b' is FAILED")
    assert explain(line, "load", everything=True).counts == dict.fromkeys(codes, 1)


def test_a_paused_job_says_so_first(line: Store) -> None:
    put(line, "a", "READY")
    set_policy(line, "load", {"paused_until": "forever"})
    found = explain(line, "load")
    assert (found.may_run, found.code, found.next_chunk) == (False, "PAUSED", D)


def test_a_wrong_queue_is_noticed(line: Store) -> None:
    put(line, "a", "READY")
    line.fill()
    line.db.execute("delete from pending", {})
    assert explain(line, "load").notes == [
        "1 chunk could run, but the queue has 0: to repair it, run `odf init`."
    ]


# --- the past ---


def test_the_past_is_answered_from_history(line: Store) -> None:
    def moment() -> datetime:
        time.sleep(0.02)
        now = datetime.fromtimestamp(line.now(), UTC)
        time.sleep(0.02)
        return now

    before = moment()
    put(line, "a", "READY")
    waiting = moment()
    [claim] = line.claim("load", owner="me@here")
    running = moment()
    line.finish(claim, [Fact("b", D, rows=3)])
    done = moment()
    put(line, "a", "FAILED")
    later = moment()

    codes = [explain(line, "load", D, at).code for at in (before, waiting, running, done, later)]
    assert codes == ["DATA_NOT_READY", "", "LOCKED", "ALREADY_DONE", "ALREADY_DONE"]
    assert "by me@here" in explain(line, "load", D, running).reasons[0].text
    assert "History begins" in " ".join(explain(line, "load", D, before).notes)
    assert explain(line, "load", D, done).answers[0].ok is True
    assert explain(line, "load", D, later).answers[0].ok is False
    jobs = [explain(line, "load", None, at) for at in (before, waiting, running, done, later)]
    assert [each.counts for each in jobs] == [
        {},
        {"": 1},
        {"LOCKED": 1},
        {"ALREADY_DONE": 1},
        {"ALREADY_DONE": 1},
    ]
    assert [each.next_chunk for each in jobs] == [None, D, None, None, None]


# --- the verdict is what a claim does ---

WORDS = [
    "PENDING",
    "RUNNING",
    "READY",
    "FAILED",
    "ERROR",
    "RESUBMIT",
    "RERUN",
    "HOLD",
    "DONE",
    "CHECKME",
]
ROWS = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "x", "y"]),
        st.sampled_from(["J", "J", "J", "P", "R", "external"]),
        st.sampled_from(["OUT", "OUT", "OUT", "IN"]),
        st.sampled_from(WORDS),
    ),
    max_size=6,
    unique_by=lambda row: row[:2],
)
JOBS = st.sampled_from(
    [
        ("a", "x"),
        ("a b", "x"),
        ("a", "x y"),
        ("a b", "x y"),
        ("", "x"),
        ("", "x y"),
        ("a today", "x"),
        ("a x", "x"),
        ("a", ""),
    ]
)
DIALS = st.sampled_from([None, None, None, "paused", "past", "zero", "full", "one"])
LATE = st.booleans()


def fill(
    store: Store,
    shape: tuple[str, str],
    rows: list[tuple[str, str, str, str]],
    dial: str | None,
    late: bool,
    dataid: str,
) -> None:
    db = store.db
    for table in ("datastatus", "job", "jobpolicy", "claim", "pending", "dataevent", "chunkfact"):
        db.execute(f"delete from {table}", None)
    registered: list[Callable[[], None]] = [
        lambda: job(store, "J", *shape),
        lambda: job(store, "P", "raw", "a"),
        lambda: job(store, "R", "raw", "x"),
    ]
    if not late:
        for register in registered:
            register()
    # All sides of a state that a history of moves could have left, and then some.
    for datasetid, jobid, lock, word in rows:
        with db.transaction(who="test", act="claim" if word == "RUNNING" else ""):
            put(store, datasetid, word, jobid=jobid, lock=lock, dataid=dataid)
    if any(word == "RUNNING" for *_, word in rows):  # a claim takes its chunk off the queue itself
        db.execute(db.statement("claims.judge"), {"jobid": "J", "dataid": dataid})
    if late:
        for register in registered:
            register()
    if dial in ("paused", "past"):
        moment = datetime.now(UTC) + timedelta(hours=1 if dial == "paused" else -1)
        db.execute(
            db.translate("insert into jobpolicy (jobid, paused_until) values ('J', :at)"),
            {"at": to_table(store, moment)},
        )
    if dial in ("zero", "full", "one"):
        db.execute(
            f"insert into jobpolicy (jobid, concurrency) values ('J', {int(dial != 'zero')})", {}
        )
    if dial == "full":
        db.execute(
            "insert into claim (jobid, dataid, generation, owner) values ('J', 'other', 1, 'them')",
            {},
        )
    store._plans.clear()


def try_to_claim(store: Store, dataid: str) -> bool:
    try:
        return bool(store.claim("J", owner=f"o{time.monotonic_ns()}", only=dataid))
    except (operations.Refused, LostRace):
        return False


@pytest.fixture
def quick(store: Store) -> Store:
    """A store whose commits needn't be on disk, for tests that fill it hundreds of times."""
    store.db.execute(
        "pragma synchronous = off"
        if store.db.dialect == "sqlite"
        else "set synchronous_commit = off",
        None,
    )
    return store


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(shape=JOBS, rows=ROWS, dial=DIALS, late=LATE)
@example(  # a job that had made what it now reads
    shape=("a", "x"),
    rows=[("a", "P", "OUT", "READY"), ("a", "J", "OUT", "RUNNING")],
    dial=None,
    late=False,
)
def test_the_verdict_is_what_a_claim_does(
    quick: Store,
    shape: tuple[str, str],
    rows: list[tuple[str, str, str, str]],
    dial: str | None,
    late: bool,
) -> None:
    dataid = quick.today() if "today" in shape[0] else D
    fill(quick, shape, rows, dial, late, dataid)
    found = explain(quick, "J", dataid)
    whole = explain(quick, "J")

    assert found.may_run == (not [each for each in found.reasons if each.code not in ADVICE])
    blocks = [
        each.code
        for each in found.reasons
        if each.code not in ("PAUSED", "AT_CONCURRENCY", *ADVICE)
    ]
    mine = " ".join(shape).split()
    is_known = any("OUT" in row or "J" in row for row in rows if row[0] in mine)
    if is_known and "NOT_REGISTERED" not in blocks and "today" not in shape[0]:
        assert whole.counts == {blocks[0] if blocks else "": 1}
    assert whole.may_run == found.may_run
    assert try_to_claim(quick, dataid) == found.may_run


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(shape=JOBS, rows=ROWS, dial=DIALS, late=LATE)
def test_the_past_moment_before_now_gives_the_same_reasons(
    quick: Store,
    shape: tuple[str, str],
    rows: list[tuple[str, str, str, str]],
    dial: str | None,
    late: bool,
) -> None:
    fill(quick, shape, rows, dial, late, D)
    now = explain(quick, "J", D)
    then = explain(quick, "J", D, datetime.now(UTC) + timedelta(seconds=1))

    def codes(found: Explanation) -> list[str]:
        return [
            each.code
            for each in found.reasons
            if each.code not in ("PAUSED", "AT_CONCURRENCY", *ADVICE)
        ]

    if "today" not in shape[0]:
        assert codes(then) == codes(now)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(shape=JOBS, rows=ROWS, dial=DIALS, late=LATE)
def test_following_the_advice_makes_the_chunk_claimable(
    quick: Store,
    shape: tuple[str, str],
    rows: list[tuple[str, str, str, str]],
    dial: str | None,
    late: bool,
) -> None:
    mine = " ".join(shape).split()
    rows = [row for row in rows if row[1] != "J" or row[0] in mine]
    rows = [row for row in rows if row[1] == "J" or row[2] == "OUT"]
    fill(quick, shape, rows, dial, late, D)
    seen: list[Reason] = []
    for _ in range(15):
        found = explain(quick, "J", D)
        if found.may_run or found.code == "NOT_REGISTERED" or "today" in shape[0]:
            return
        assert found.action, found
        seen += found.reasons[:1]
        jobid = found.action.split()[2]
        try:
            follow(quick, found.action)
        except operations.Refused as refused:
            told = str(refused)
        else:
            continue
        assert f"odf recover --job {jobid} --older-than" in told, "it tells what to do first"
        operations.recover_abandoned(quick, 0, jobid=jobid)
    raise AssertionError(seen)


def test_registering_repairs_a_flawed_job(line: Store) -> None:
    job(line, "loop", "a", "a")
    found = explain(line, "loop", D)
    assert (found.code, found.action) == (
        "NOT_REGISTERED",
        "odf job add loop --in DATASET --out DATASET --replace",
    )
    add_job(line, "loop", ["a"], ["c"], replace=True)
    put(line, "a", "READY")
    assert explain(line, "loop", D).may_run


def test_an_explanation_is_json(line: Store) -> None:
    put(line, "a", "READY")
    line.claim("load", owner="me")
    found = explain(line, "load", D)
    assert json.dumps([answer._asdict() for answer in found.answers], default=str)
