"""`odf status`, `runs`, `history`, `why`, `sql` and `dml`: what is printed, and where."""

import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from datetime import date, timedelta
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from opendataflow_dagster.cli import operate
from opendataflow_dagster.cli import status as cli_look
from opendataflow_dagster.cli.app import app
from opendataflow_dagster.cli.status import draw
from opendataflow_dagster.store import operations, overview
from opendataflow_dagster.store.database import Database
from opendataflow_dagster.store.overview import Strip
from opendataflow_dagster.store.store import Store
from tests.explain.test_explain import job, put
from tests.support.store_fixtures import sql


@pytest.fixture
def line(store: Store, url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("DATAFLOW_URL", url)
    job(store, "fetch", "raw", "a")
    job(store, "load", "a", "b")
    for dataid in ("2", "10", "9"):
        put(store, "a", "READY", dataid=dataid)
    put(store, "b", "FAILED", jobid="load", dataid="9")
    return store


def odf(*words: str) -> Result:
    return CliRunner().invoke(app, list(words), prog_name="odf")


ONE_IS = "update datastatus set status = '{}' where datasetid = 'a' and dataid = '7'"


def objects(*words: str) -> list[dict]:
    done = odf(*words, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


def test_status_has_a_line_for_each_job(line: Store) -> None:
    lines = odf("status").stdout.splitlines()
    assert lines[0].split() == [
        "jobid",
        "datasetid",
        "claimable",
        "running",
        "ready",
        "failed",
        "resubmit",
        "hold",
        "pending",
        "stale",
        "note",
    ]
    assert [each.split()[:5] for each in lines[1:]] == [
        ["fetch", "a", "0", "0", "3"],
        ["load", "b", "2", "0", "0"],
    ]
    assert [row["claimable"] for row in objects("status", "--counts")] == [0, 2]


def test_status_of_one_job_lists_its_rows(line: Store) -> None:
    assert [row["dataid"] for row in objects("status", "a")] == ["2", "9", "10"]
    assert objects("status", "load")[0]["status"] == "FAILED"
    assert (
        "T" in objects("status", "load")[0]["modified"]
        if objects("status", "load")[0]["modified"]
        else True
    )


def test_an_unknown_name_is_refused_alike_by_all_commands(line: Store) -> None:
    sql(line, "insert into dataset (datasetid, hostname) values ('load', '/tmp'), ('a', '/tmp')")
    for words in (
        "run --job laod true",
        "run --all --job laod true",
        "force laod 1 true",
        "start laod",
        "end laod 1 READY",
        "resubmit laod 1",
        "resubmit laod --failed",
        "resubmit laod --stale",
        "hold laod 1",
        "release laod 1",
        "delete-run laod 1",
        "recover --job laod",
        "recover --job laod --plan",
        "status laod",
        "status laod --running",
        "status laod --failed",
        "status laod --counts",
        "status laod --grid",
        "runs laod",
        "history laod",
        "history laod --json",
        "history laod --all",
        "history --dataset laod --all",
        "history --dataset laod",
        "why laod",
        "why laod 1",
        "policy laod",
        "policy laod concurrency=1",
        "job list laod",
        "split a --column x --values 1 --pending --job laod",
        "token laod",
        "history --pipeline laod",
        "compact laod",
        "clean laod",
        "split laod --column x --values 1",
    ):
        done = odf(*words.split())
        assert (words, done.exit_code) == (words, 4), done.output
        assert "'laod'" in done.output
        assert "Did you mean 'load'?" in done.output, words
        assert done.output.count("\n") == (3 if words.startswith("why") else 1)


def test_the_name_of_a_dataset_in_place_of_a_job_is_recognized(line: Store) -> None:
    sql(line, "insert into dataset (datasetid, hostname) values ('a', '/tmp')")
    why = "Job 'a' isn't registered, but a dataset of that name is"
    assert odf("hold", "a", "9").stderr.startswith(f"odf: {why}. See `odf job list`")
    told = odf("why", "a", "9")
    assert (told.exit_code, told.stdout.splitlines()[1:]) == (
        4,
        [f"  NOT_REGISTERED: {why}", "    → odf job list"],
    )

    for kind in ("IN", "OUT"):  # a job of that name, which reads what it writes
        sql(line, f"insert into job (jobid, itemtype, datasetid) values ('a', '{kind}', 'a')")
    assert odf("why", "a", "9").stdout.splitlines()[2].endswith("--out DATASET --replace")


def test_a_misspelled_command_gets_a_suggestion() -> None:
    for words, like in ("stauts", "status"), ("job lst", "list"), ("delete_run", "delete-run"):
        done = odf(*words.split())
        assert done.exit_code == 2
        assert f"Did you mean {like!r}?" in done.stderr
    assert "Did you mean" not in odf("xyz").stderr


def test_a_long_listing_shows_its_first_rows_and_how_to_see_more(line: Store) -> None:
    ids = [str(number) for number in range(1, 1102)]
    operations.ready(line, "a", ids)
    line.db.execute(ONE_IS.format("ERROR"), {})

    done = odf("status", "a")
    assert [text.split()[2] for text in done.stdout.splitlines()[1:]] == ids[:1000]
    assert done.stderr.startswith("The first 1,000 rows: --limit or --all shows more")
    done = odf("status", "a", "--limit", "3")
    assert [text.split()[2] for text in done.stdout.splitlines()[1:]] == ids[:3]
    assert done.stderr.startswith("The first 3 rows")
    done = odf("status", "a", "--all")
    assert [text.split()[2] for text in done.stdout.splitlines()[1:]] == ids
    assert done.stderr == ""
    assert [row["dataid"] for row in objects("status", "a")] == ids
    assert [row["dataid"] for row in objects("status", "a", "--limit", "2")] == ids[:2]
    assert [row["dataid"] for row in objects("status", "a", "--status", "failed")] == ["7"]
    assert odf("status", "a", "--status", "HOLD").stderr == "'a' has no such chunks.\n"
    assert objects("status", "a", "--since", "2100-01-01") == []
    assert len(objects("status", "--since", "2020-01-01")) > 1000


def test_one_command_lists_all_failures_and_one_resubmits_them(line: Store) -> None:
    job(line, "also", "a", "c")
    for claim in line.claim("also", owner="me", k=2):
        line.fail(claim, "no network\nfor 2 minutes")

    shown = odf("status", "--failed").stdout.splitlines()
    assert shown[0].split() == ["jobid", "dataid", "modified", "why", "retry_at"]
    assert sorted(text.split()[:2] for text in shown[1:]) == [
        ["also", "2"],
        ["also", "9"],
        ["load", "9"],
    ]
    assert "no network" in shown[1]
    assert [row["why"] for row in objects("status", "--failed", "--limit", "1")] == [
        "no network\nfor 2 minutes"
    ]
    assert odf("status", "--failed", "--limit", "2").stderr.startswith("The first 2 rows")
    assert len(odf("status", "load", "--failed", "--all").stdout.splitlines()) == 2
    assert odf("status", "fetch", "--failed").stderr == "Nothing has failed.\n"
    assert odf("status", "--failed", "--since", "2100-01-01").stderr == "Nothing has failed.\n"

    plan = odf("resubmit", "--failed", "--plan")
    assert "3 chunks of 2 jobs would become RESUBMIT." in plan.stderr
    assert [text.split()[:3] for text in plan.stdout.splitlines()[1:]] == [
        ["also", "c", "2"],
        ["also", "c", "9"],
        ["load", "b", "9"],
    ]
    assert objects("resubmit", "--failed", "--since", "2100-01-01", "--plan") == []
    assert "3 chunks of 2 jobs became RESUBMIT." in odf("resubmit", "--failed").stderr
    assert odf("resubmit", "--failed", "--strict").exit_code == 3


def test_history_is_filtered_by_status_or_complete(line: Store) -> None:
    ids = [str(number) for number in range(1, 1102)]
    operations.ready(line, "a", ids)
    line.db.execute(ONE_IS.format("ERROR"), {})

    assert len(odf("history").stdout.splitlines()) == 101
    failed = objects("history", "--dataset", "a", "--status", "FAILED")
    assert [(row["dataid"], row["status_after"]) for row in failed] == [("7", "ERROR")]
    assert objects("history", "--dataset", "a", "--status", "HOLD") == []
    whole = objects("history", "--all")
    assert len(whole) == 1103
    assert [row["seq"] for row in whole] == sorted(row["seq"] for row in whole)
    done = odf("history", "--all")
    assert len(done.stdout.splitlines()) == 1104
    assert odf("history", "--all", "--follow").exit_code == 2


def test_a_long_plan_shows_only_its_first_rows(line: Store) -> None:
    operations.ready(line, "a", [str(number) for number in range(100, 1101)])
    plan = ("resubmit", "external", *map(str, range(100, 1101)), "--plan")

    done = odf(*plan)
    assert len(done.stdout.splitlines()) == 1001
    assert done.stderr.startswith("The first 1,000 rows: --json lists all.")
    assert len(objects(*plan)) == 1001


@pytest.mark.parametrize("which", ["--failed", "--stale"])
def test_a_plan_of_very_many_chunks_checks_only_the_first_ones(
    line: Store, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.setattr(operate, "PLANNED_CHUNKS", 2)
    operations.ready(line, "a", ["x1", "x2", "x3"])
    for claim in line.claim("load", owner="me", k=9):
        if which == "--failed":
            line.fail(claim, "broken")
        else:
            line.finish(claim)
    if which == "--stale":
        operations.resubmit(line, "external", ["x1", "x2", "x3"])
        operations.ready(line, "a", ["x1", "x2", "x3"])
    everything = len(objects("resubmit", "load", which, "--plan"))

    plan = odf("resubmit", "load", which, "--plan")

    assert (everything > 2, len(plan.stdout.splitlines())) == (True, 3)
    assert "The plan covers only 2 chunks: --json covers all." in plan.stderr
    assert f"{everything} chunks became RESUBMIT" in odf("resubmit", "load", which).stderr


def test_contradicting_options_of_a_listing_are_refused(line: Store) -> None:
    for words, why in (
        (("a", "--limit", "1", "--all"), "Use --limit or --all, not both."),
        (("a", "--status", "BAD"), "'BAD' isn't a status."),
        (("a", "--status", "HOLD", "--grid"), "--status and --since list chunks"),
        (("--failed", "--status", "HOLD"), "Use --failed with --since"),
        (("--failed", "--grid"), "Use --failed with --since"),
    ):
        done = odf("status", *words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert done.stderr.startswith(f"odf: {why}")
    assert "use it with --failed" in odf("resubmit", "--stale", "--since", "2026-01-01").stderr
    assert "--failed or --stale" in odf("resubmit").stderr


def test_the_grid_of_many_chunks_is_a_sample_with_every_failure(
    line: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli_look.SAMPLED_ABOVE_CHUNKS is overview.SAMPLED_ABOVE_CHUNKS
    monkeypatch.setattr(overview, "SAMPLED_ABOVE_CHUNKS", 50)
    monkeypatch.setattr(overview, "SAMPLE_CHUNKS", 40)
    operations.ready(line, "a", [str(number) for number in range(1, 401)])
    line.db.execute(ONE_IS.format("FAILED"), {})

    strips = {strip[:2]: strip for strip in overview.grid(line, most=20)}
    raw, made = strips["external", "a"], strips["load", "b"]

    assert (raw.chunks, made.chunks) == (397, 399)
    assert 1 < len(raw.squares) <= 20
    assert raw.each == -(-397 // len(raw.squares))
    assert raw.squares.count("FAILED") == made.squares.count("FAILED") == 1


def test_status_says_who_runs_what(line: Store) -> None:
    assert odf("status", "--running").stdout == ""
    line.claim("load", owner="me")
    [row] = objects("status", "--running")
    assert (row["owner"], row["dataid"]) == ("me", "2")


def test_the_grid_uses_letters_without_colours(line: Store) -> None:
    lines = odf("status", "--grid").stdout.splitlines()
    assert lines[:4] == [
        "                     2",
        "fetch → a: 3 chunks  RRR",
        "load → b: 3 chunks   .F.",
        "R READY   F FAILED   . may be claimed",
    ]


def test_the_grid_has_dates_above_its_squares_and_wraps_at_the_width(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = date(2026, 1, 20)
    days = [str(first + timedelta(days=number)) for number in range(45)]
    strips = [
        Strip("j", "d", 45, 1, ["READY"] * 45, days),
        Strip("later", "e", 1, 1, [None] * 44 + ["FAILED"], days),
        Strip("other", "f", 2, 2, ["READY"], ["1"]),
    ]
    draw(strips, width=62)
    assert capsys.readouterr().out.splitlines() == [
        "                                 2026-01-20  2026-02-01",
        "j → d: 45 chunks                 RRRRRRRRRRRRRRRRRRRRRRRRRRRRR",
        "later → e: 1 chunk",
        "                                 2026-02-18    2026-03-04",
        "j → d                            RRRRRRRRRRRRRRRR",
        "later → e                                       F",
        "                                 1",
        "other → f: 2 chunks, 2 per square",
        "                                 R",
        "R READY   F FAILED",
        "",
    ]


def test_strips_of_dates_stand_below_one_another(store: Store) -> None:
    job(store, "fetch", "raw", "a")
    job(store, "month", "a", "b")
    for day in range(1, 31):
        put(store, "a", "READY", dataid=f"2026-04-{day:02d}", jobid="fetch")
    put(store, "b", "FAILED", jobid="month", dataid="2026-04-30")
    strips = {strip.jobid: strip for strip in overview.grid(store)}
    assert strips["month"].starts == strips["fetch"].starts
    assert strips["month"].squares[-1] == "FAILED"


def on_a_terminal(*words: str, lines: int = 0, **env: str) -> str:
    """Return what a command prints to a terminal of 80 columns, with as many lines if given."""
    reader, writer = pty.openpty()
    if lines:
        ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", lines, 80, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-m", "opendataflow_dagster.cli", *words],
        stdout=writer,
        stdin=writer,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"TERM": "xterm"} | env,
    )
    os.close(writer)
    found = b""
    while True:
        try:
            piece = os.read(reader, 65536)
        except OSError:
            break
        if not piece:
            break
        found += piece
    os.close(reader)
    assert child.wait() == 0
    return found.decode()


def test_on_a_terminal_the_squares_are_coloured(line: Store) -> None:
    shown = on_a_terminal("status")
    assert "\x1b[31m■" in shown, "FAILED is red"
    assert "\x1b[36m□" in shown
    plain = on_a_terminal("status", NO_COLOR="1")
    assert "\x1b[31m" not in plain
    assert "  .F." in plain


def test_a_long_listing_on_a_terminal_goes_through_the_pager(line: Store) -> None:
    operations.ready(line, "a", [str(number) for number in range(100)])
    numbered = "sed s/^/|/"
    assert on_a_terminal("runs", "--all", lines=10, ODF_PAGER=numbered).startswith("|")
    assert on_a_terminal("runs", "--all", lines=10, PAGER=numbered).startswith("|")
    for words, env in (
        (("runs", "--limit", "3"), {"ODF_PAGER": numbered}),
        (("runs", "--all", "--json"), {"ODF_PAGER": numbered}),
        (("runs", "--all"), {"ODF_PAGER": "", "PAGER": numbered}),
        (("runs", "--all"), {"PAGER": "no-such-pager"}),
        (("runs", "--all"), {"PAGER": numbered, "TERM": "dumb"}),
    ):
        shown = on_a_terminal(*words, lines=10, **env)
        assert "READY" in shown
        assert "|" not in shown, (words, env)
    assert "READY" in on_a_terminal("runs", "--all", lines=10, PAGER="head -2"), "left early"


def test_tables_fit_80_columns_and_lose_no_id(line: Store) -> None:
    line.db.execute("update datastatus set modified = '2026-01-01 00:00:00'", {})
    sql(line, "insert into jobpolicy (jobid, concurrency) values ('load', 3)")
    path = "/a folder/" + "and one in it/" * 20
    sql(line, f"insert into dataset (datasetid, hostname) values ('a', '{path}')")
    for words in (
        ("status",),
        ("status", "a"),
        ("status", "--failed"),
        ("runs",),
        ("history",),
        ("policy", "load"),
        ("job", "list"),
        ("why", "load", "9"),
    ):
        shown = on_a_terminal(*words, lines=200, NO_COLOR="1")
        plain = [re.sub(r"\x1b\[[0-9;]*m", "", text) for text in shown.splitlines()]
        assert max(map(len, plain)) <= 80, (words, shown)
    long = "2026-01-01T00:00:00.000000+00:00-of-a-very-long-name"
    put(line, "b", "FAILED", jobid="load", dataid=long)
    assert long in on_a_terminal("status", "b", lines=200)
    assert "2026-01-01 00:00:00" in odf("status", "a").stdout, "pipes get whole rows"


def test_runs_are_limited_and_filtered_like_other_listings(line: Store) -> None:
    for number in range(30):
        put(line, "a", "READY", dataid=str(number))
    sql(line, "update datastatus set modified = '2020-01-01'")
    sql(line, "update datastatus set modified = '2026-01-01' where dataid in ('7', '9')")
    assert len(objects("runs")) == 20
    assert len(objects("runs", "--all")) == 31
    since = objects("runs", "--since", "2021-01-01")
    assert sorted(row["dataid"] for row in since) == ["7", "9", "9"]
    [failed] = objects("runs", "--status", "failed")
    assert (failed["jobid"], failed["dataid"]) == ("load", "9")
    assert objects("runs", "load", "--status", "READY") == []
    assert odf("runs", "--status", "HOLD").stderr == "There are no such outputs.\n"
    for words in (("--limit", "1", "--all"), ("--status", "BAD"), ("--since", "soon")):
        assert odf("runs", *words).exit_code == 2


def test_a_name_is_looked_up_once(line: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    run = type(line.db).run

    def counted(db: Database, name: str, /, **params: Any) -> list[tuple]:
        looked.append(name)
        return run(db, name, **params)

    monkeypatch.setattr(type(line.db), "run", counted)
    for words in ("load", "raw", "laod", "raw --counts", "raw --running", "raw --grid"):
        looked.clear()
        odf("status", *words.split())
        assert looked.count("look.known") <= 1, words


def test_runs_and_history_list_what_happened(line: Store) -> None:
    assert len(objects("runs")) == 4
    assert [row["jobid"] for row in objects("runs", "load")] == ["load"]
    assert objects("runs", "--limit", "1")[0].keys() >= {
        "datasetid",
        "jobid",
        "dataid",
        "status",
        "modified",
        "owner",
    }

    events = objects("history")
    assert [each["dataid"] for each in events] == ["2", "10", "9", "9"]
    assert list(events[0]) == [
        "seq",
        "at",
        "datasetid",
        "jobid",
        "dataid",
        "locktype",
        "status_before",
        "status_after",
        "generation",
        "who",
        "why",
        "code",
        "execution",
    ]
    assert all(each["execution"] for each in events if each["locktype"] == "OUT")
    assert "execution" not in odf("history").stdout, "to a person, who did it is enough"
    assert "execution" not in odf("history", "--all").stdout
    assert len(objects("history", "load", "9")) == 1
    assert len(objects("history", "--dataset", "a", "--limit", "2")) == 2
    assert objects("history", "--since", "2999-01-01") == []
    done = odf("history", "--since", "yesterday")
    assert (done.exit_code, done.stdout) == (2, "")
    nothing = odf("history", "load", "nothing")
    assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (
        0,
        "",
        "No changes are recorded.\n",
    )


def test_a_job_named_clean_is_selected_by_an_option(line: Store) -> None:
    put(line, "z", "READY", jobid="clean", dataid="1")
    cleaned = odf("history", "clean")
    assert (cleaned.exit_code, cleaned.stdout) == (0, "")
    assert len(objects("history", "--job", "clean")) == 1
    assert len(objects("history", "--job", "clean", "1")) == 1
    assert objects("history", "--job", "clean", "2") == []
    assert odf("history", "--job", "clean", "1", "2").exit_code == 2


def test_history_follow_prints_new_changes(line: Store, tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "opendataflow_dagster.cli", "history", "load", "--follow", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout
    assert json.loads(child.stdout.readline())["status_after"] == "FAILED"
    put(line, "a", "HOLD", dataid="2")
    put(line, "b", "RESUBMIT", jobid="load", dataid="9")
    began = time.monotonic()
    assert json.loads(child.stdout.readline())["status_after"] == "RESUBMIT"
    assert time.monotonic() - began < 20
    child.send_signal(signal.SIGINT)
    child.stdout.close()
    assert child.wait(20) != 0


def test_why_explains_to_people(line: Store) -> None:
    lines = odf("why", "load", "9").stdout.splitlines()
    assert lines[0] == "load 9 may not run: HELD"
    assert lines[1].startswith("  HELD: 'b' is FAILED since 20")
    assert lines[2] == "    → odf resubmit load 9"
    assert [each.split("?")[0] for each in lines[4:]] == [
        "ready",
        "right data",
        "location",
        "validated",
        "safe",
    ]
    assert odf("why", "load", "10").stdout.startswith("load 10 may run.\n")
    first, claimable, held, action, *_ = odf("why", "load").stdout.splitlines()
    assert (first, claimable) == ("load may run.", "  2 chunks may be claimed; the next is '2'")
    assert held.startswith("  HELD: 1 chunk ('9'): 'b' is FAILED since 20")
    assert action == "    → odf resubmit load 9"
    assert odf("why", "fetch").stdout.startswith("fetch has nothing to run: ALREADY_DONE\n")
    sql(line, "update registration set found = 1")  # as if it had always been there
    past = odf("why", "load", "9", "--at", "2001-01-01")
    assert past.stdout.startswith("load 9 could not run at 2001-01-01 00:00:00: DATA_NOT_READY")
    assert "→" not in past.stdout
    assert "History begins at" in past.stderr


def test_why_explains_to_programs_as_json(line: Store) -> None:
    [found] = objects("why", "load", "9")
    assert (found["may_run"], found["code"], found["action"]) == (
        False,
        "HELD",
        "odf resubmit load 9",
    )
    assert set(found["answers"]) == {"ready", "right_data", "location", "validated", "safe"}
    [found] = objects("why", "load")
    assert (found["next_chunk"], found["counts"]) == ("2", {"CLAIMABLE": 2, "HELD": 1})


def test_sql_prints_rows_and_changes_nothing(line: Store) -> None:
    found = objects(
        "sql", "select dataid, status, 1 as dataid from datastatus where datasetid = 'b'"
    )
    assert found == [{"dataid": "9", "status": "FAILED", "dataid_2": 1}]
    assert (
        odf("sql", "select dataid from datastatus where dataid like '%0'").stdout == "dataid\n10\n"
    )
    assert odf("sql", "select 1 where 1 = 2").stderr == "No rows.\n"
    for statement in (
        "delete from datastatus",
        "select 1; delete from datastatus",
        "commit; delete from datastatus",
        "drop table job",
        "create table x (y text)",
    ):
        done = odf("sql", statement)
        assert (done.exit_code, done.stdout) == (1, ""), statement
        assert len(done.stderr.splitlines()) == 1
    assert len(objects("sql", "select * from datastatus")) == 4
    assert "use `odf dml`" in odf("sql", "delete from datastatus").stderr
    assert "nothere" in odf("sql", "select * from nothere").stderr


def test_dml_changes_rows_and_is_signed(line: Store) -> None:
    assert (
        odf("dml", "update datastatus set status = 'RESUBMIT' where jobid = 'load'").stdout
        == "1 rows affected\n"
    )
    [event] = objects("history", "load", "--limit", "1")
    assert (event["status_after"], event["why"]) == ("RESUBMIT", "odf dml")
    assert "@" in event["who"]
    assert (
        odf("dml", "update datastatus set status = 'x' where dataid = 'nope%'").stdout
        == "0 rows affected\n"
    )
    for statement in (
        "update nothing set x = 1",
        "nonsense",
        "delete from job; delete from datastatus",
    ):
        done = odf("dml", statement)
        assert (done.exit_code, done.stdout) == (1, "")
        assert len(done.stderr.splitlines()) == 1
        assert done.stderr.startswith("odf: ")
    assert len(objects("sql", "select * from job")) == 4


@pytest.mark.parametrize(
    "words",
    [
        ["status"],
        ["runs"],
        ["history"],
        ["why", "j"],
        ["why", "j", "1"],
        ["sql", "select * from job"],
    ],
)
def test_without_tables_every_command_says_so_in_one_line(
    url: str, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setenv("DATAFLOW_URL", url)
    done = odf(*words)
    assert (done.exit_code, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
