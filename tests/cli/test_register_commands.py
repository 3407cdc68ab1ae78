"""The commands that register, and those with which a person moves chunks."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from opendataflow_dagster.cli import operate
from opendataflow_dagster.cli import register as registering
from opendataflow_dagster.cli.app import app
from opendataflow_dagster.config.credentials import password_of
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, expire, put, sql, status, take

Odf = Callable[..., Result]


@pytest.fixture
def odf(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Odf]:
    """Run `odf` on the tables of `store`; each run has its own connection, closed after it."""
    monkeypatch.setenv("DATAFLOW_URL", url)

    def run(*words: str, code: int = 0, stdin: str | None = None) -> Result:
        result = CliRunner().invoke(app, list(words), input=stdin, prog_name="odf")
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, result.output
        if code in (1, 2, 4) and not result.stderr.startswith("Usage"):
            assert result.stderr.count("\n") == 1, result.stderr
            assert result.stderr.startswith("odf: ")
            assert result.stdout == ""
        return result

    yield run
    check(store)


def objects(result: Result) -> list[dict[str, Any]]:
    return json.loads(result.stdout)


def commands() -> list[tuple[str, click.Command]]:
    mine = [
        *(registering.dataset, registering.job, registering.policy, registering.split),
        *(operate.ready, operate.resubmit, operate.hold, operate.release),
        *(operate.delete_run, operate.recover),
    ]
    found = []
    for command in mine:
        found.append((command.name or "", command))
        if isinstance(command, click.Group):
            found += [(f"{command.name} {name}", each) for name, each in command.commands.items()]
    return found


@pytest.mark.parametrize(
    ("name", "command"), commands(), ids=lambda each: each if isinstance(each, str) else ""
)
def test_every_command_has_help_with_an_example(
    odf: Odf, name: str, command: click.Command
) -> None:
    shown = odf(*name.split(), "--help").stdout
    assert f"Example: odf {name.split()[0]}" in shown
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.name}"


def test_a_job_is_registered_run_and_run_again(odf: Odf, store: Store) -> None:
    odf("dataset", "add", "bobin", "--host", "db1", "--table", "bob")
    assert (
        "'bobout' isn't registered"
        in odf("job", "add", "loadbob", "--in", "bobin", "--out", "bobout").stderr
    )
    [row] = objects(odf("dataset", "list", "--json"))
    assert row == dict.fromkeys(row) | {"datasetid": "bobin", "hostname": "db1", "tablename": "bob"}
    assert [list(row.values())[:3] for row in objects(odf("job", "list", "loadbob", "--json"))] == [
        ["loadbob", "IN", "bobin"],
        ["loadbob", "OUT", "bobout"],
    ]
    assert "loadbob  IN        bobin" in odf("job", "list").stdout

    assert "2 chunks became READY" in odf("ready", "bobin", "1", "2", "--reason", "by mail").stderr
    claims = take(store, "loadbob", k=2)
    store.finish(claims[0])
    store.fail(claims[1], "boom")
    assert "1 chunk became RESUBMIT" in odf("resubmit", "loadbob", "--failed").stderr
    planned = objects(odf("resubmit", "loadbob", "1", "--plan", "--json"))
    assert planned == [
        {
            "jobid": "loadbob",
            "datasetid": "bobout",
            "dataid": "1",
            "status_before": "READY",
            "status_after": "RESUBMIT",
        }
    ]
    assert objects(odf("resubmit", "loadbob", "1", "--json")) == planned
    assert objects(odf("resubmit", "loadbob", "1", "--json", "--strict", code=3)) == []
    assert "by mail" in {why for (why,) in sql(store, "select why from dataevent")}


def test_a_password_comes_from_standard_input_only(
    odf: Odf, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "PASSKEY" in odf("dataset", "add", "bob", "--password", stdin="hunter2\n", code=4).stderr
    monkeypatch.setenv("PASSKEY", "plugh")
    result = odf("dataset", "add", "bob", "--password", stdin="hunter2\n")
    assert "hunter2" not in result.output
    shown = odf("dataset", "list").stdout
    assert "odf1.scryp..." in shown
    assert odf("dataset", "add", "bob", "--password", stdin="", code=2).stderr
    odf("dataset", "add", "bob", "--encryptedpass", "hunter2", code=2)


@pytest.mark.parametrize(
    ("stdin", "secret"),
    [
        ("hunter2\n", "hunter2"),
        ("hunter2", "hunter2"),
        ("hunter2\r\n\n", "hunter2"),
        (" hunter2 \n", " hunter2 "),
        ('{\n  "type": "service_account"\n}\n', '{\n  "type": "service_account"\n}'),
        ("a\nb\n\n", "a\nb\n"),
    ],
)
def test_a_password_is_all_of_standard_input(
    odf: Odf, store: Store, monkeypatch: pytest.MonkeyPatch, stdin: str, secret: str
) -> None:
    monkeypatch.setenv("PASSKEY", "plugh")
    odf("dataset", "add", "bob", "--password", stdin=stdin)
    [(stored,)] = sql(store, "select encryptedpass from dataset")
    assert password_of("bob", stored, {"PASSKEY": "plugh"}) == secret
    shown = odf("encrypt", "--dataset", "bob", stdin=secret + "\n").stdout.strip()
    assert password_of("bob", shown, {"PASSKEY": "plugh"}) == secret


def test_wrong_use_is_refused_in_one_line(odf: Odf) -> None:
    odf("job", "add", "j", "--in", "a", code=2)
    odf("job", "add", "j", "--in", "a", "--out", "a", code=2)
    odf("job", "add", "j", "--out", "a", "--env", "PATH=/tmp", code=2)
    odf("job", "add", "j", "--out", "a", "--env", "X", code=2)
    odf("job", "add", "", "--out", "a", code=2)
    odf("job", "add", "\udcff", "--out", "a", code=2)
    odf("job", "list", "\udcff", code=2)
    odf("dataset", "add", "today", code=2)
    odf("dataset", "add", "x" * 10_000, code=2)
    odf("ready", "a", "", code=2)
    odf("ready", "a", "1", "--reason", "\udcff", code=2)
    odf("resubmit", "nosuch", "1", code=4)
    odf("resubmit", "nosuch", code=2)
    odf("hold", "nosuch", "1", code=4)
    odf("release", "nosuch", "1", code=4)
    odf("delete-run", "nosuch", "1", code=4)
    odf("policy", "nosuch", code=4)
    odf("recover", "--older-than", "soon", code=2)
    odf("recover", "--job", "\udcff", code=2)
    odf("split", "nosuch", "--shards", "2", "--column", "c", code=4)
    odf("split", "nosuch", code=2)
    odf("split", "nosuch", "--shards", "2", "--size", "2", code=2)
    odf("split", "nosuch", "--shards", "2", "--from", "2", code=2)
    odf("split", "nosuch", "--size", "2", "--from", "2", code=2)
    odf("split", "nosuch", "--size", "2", "--from", "a", "--to", "b", code=2)
    assert "Run `odf job add`" in odf("job", "list").stderr
    assert "Run `odf dataset add`" in odf("dataset", "list").stderr


def test_without_tables_it_says_what_to_run(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAFLOW_URL", url)
    for words in (
        ["job", "list"],
        ["job", "add", "j", "--out", "b"],
        ["resubmit", "j", "1"],
        ["recover"],
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 1
        assert "odf init" in result.stderr
        assert result.stderr.count("\n") == 1


def test_dials_are_set_and_listed(odf: Odf) -> None:
    odf("job", "add", "j", "--out", "b")
    assert "the number of workers" in odf("policy", "j").stdout
    assert (
        "seconds without a heartbeat"
        in odf("policy", "j", "concurrency=4", "retry_delay=5m").stdout
    )
    [row] = objects(odf("policy", "j", "paused_until=forever", "--json"))
    assert (row["concurrency"], row["retry_delay"], row["paused_until"]) == (4, 300, "forever")
    assert (
        objects(odf("policy", "j", "paused_until=", "concurrency=none", "--json"))[0]["concurrency"]
        is None
    )
    assert "concurrency, max_attempts" in odf("policy", "j", "speed=9", code=2).stderr
    odf("policy", "j", "concurrency", code=2)


def test_a_table_is_split_and_split_again(odf: Odf, store: Store) -> None:
    odf("dataset", "add", "orders")
    words = [
        "split",
        "orders",
        "--column",
        "day",
        "--from",
        "2026-01-01",
        "--to",
        "2026-12-31",
        "--by",
        "month",
    ]
    planned = odf(*words, "--plan")
    assert planned.stderr == (
        "12 chunks of 'orders' would be registered as READY; 0 of 12 existed already.\n"
    )
    assert [line.split()[1] for line in planned.stdout.splitlines()[1:]] == [
        "2026-01",
        "2026-02",
        "2026-03",
        "2026-10",
        "2026-11",
        "2026-12",
    ]
    assert sql(store, "select count(*) from datastatus") == [(0,)]
    rows = objects(odf(*words, "--json"))
    assert len(rows) == 12
    assert rows[1] == {
        "datasetid": "orders",
        "dataid": "2026-02",
        "lower_bound": "2026-02-01",
        "upper_bound": "2026-03-01",
        "modulus": None,
    }
    assert objects(odf(*words, "--json")) == []
    odf("split", "orders", "--by", "year", "--from", "2026-01-01", "--to", "2026-12-31", code=4)

    for name, ways in {
        "a": ["--from", "-10", "--to", "90", "--size", "10"],
        "b": ["--from", "0", "--to", "1000", "--chunks", "10"],
        "c": ["--shards", "10"],
        "d": ["--values", "a,b,c,d,e,f,g,h,i,j", "--pending"],
        "e": ["--values", "-"],
    }.items():
        odf("dataset", "add", name)
        done = odf(
            "split",
            name,
            "--column",
            "c",
            *ways,
            stdin="\n".join(["with, comma", "b", "c", "d", "e", "f", "g", "h", "i", "j"]),
        )
        assert done.stderr.startswith("10 chunks"), name
        assert done.stdout == ""
    assert status(store, "a", "-10", "split") == "READY"
    assert status(store, "d", "a", "split") == "PENDING"
    assert status(store, "e", "with, comma", "split") == "READY"


def test_a_chunk_is_held_and_released(odf: Odf, store: Store) -> None:
    odf("job", "add", "load", "--in", "a", "--out", "b")
    odf("ready", "a", "1")
    odf("hold", "load", "1", "--reason", "bad source")
    assert take(store, "load") == []
    assert (
        "1 chunk already on HOLD: nothing to do"
        in odf("hold", "load", "1", "--strict", code=3).stderr
    )
    assert objects(odf("release", "load", "1", "--json"))[0]["status_after"] == "PENDING"
    odf("release", "load", "1", "--strict", code=3)
    assert ("HOLD", "bad source") in sql(store, "select status_after, why from dataevent")
    [claim] = take(store, "load", owner="alice")
    assert "alice" in odf("hold", "load", "1", code=4).stderr
    assert "alice" in odf("delete-run", "load", "1", code=4).stderr
    store.finish(claim)
    assert "1 row of job 'load'" in odf("delete-run", "load", "1").stderr


def test_downstream_lists_the_chunks_that_it_skipped(odf: Odf, store: Store) -> None:
    odf("job", "add", "load", "--in", "a", "--out", "b")
    odf("job", "add", "report", "--in", "b", "--out", "c")
    odf("ready", "a", "1", "2")
    store.finish(take(store, "load", k=2))
    [claim] = take(store, "report", only="1")
    shown = odf("resubmit", "load", "1", "2", "--downstream").stderr
    assert "2 chunks became RESUBMIT" in shown
    assert (
        "Skipped: '1' of 'report' is RUNNING. When it has ended, run: odf resubmit report 1"
        in shown
    )
    store.finish(claim)


def test_recover_settles_lost_claims(odf: Odf, store: Store) -> None:
    odf("job", "add", "load", "--in", "a", "--out", "b")
    odf("ready", "a", "1", "2")
    assert odf("recover", "--strict", code=3).stderr == "0 chunks recovered.\n"
    take(store, "load", owner="alice", only="1")
    expire(store)
    put(store, "b", "2", "RUNNING", jobid="load")

    planned = objects(odf("recover", "--plan", "--json"))
    assert [(row["dataid"], row["status"]) for row in planned] == [
        ("1", "RESUBMIT"),
        ("2", "RUNNING"),
    ]
    assert status(store, "b", "1", "load") == "RUNNING"
    done = odf("recover", "--job", "load")
    assert "alice didn't come back" in done.stdout
    assert "1 chunk RUNNING without a claim" in done.stderr
    assert "--older-than" in done.stderr
    assert status(store, "b", "2", "load") == "RUNNING"

    assert objects(odf("recover", "--older-than", "1h", "--json")) == []
    assert objects(odf("recover", "--older-than", "0", "--plan", "--json"))[0]["dataid"] == "2"
    assert list(objects(odf("recover", "--older-than", "0s", "--json"))[0]) == [
        "jobid",
        "dataid",
        "status",
        "why",
    ]
    assert status(store, "b", "2", "load") == "RESUBMIT"


def test_an_unknown_dataset_needs_the_option_new(odf: Odf, store: Store) -> None:
    odf("job", "add", "loadbob", "--in", "bobin", "--out", "bobout")
    for name in ("bobbin", "loadbob"):
        for plan in ([], ["--plan"]):
            told = odf("ready", name, "1", *plan, code=4).stderr
            assert ("Did you mean 'bobin'?" in told) == (name == "bobbin")
            assert f"odf ready --new {name} DATAID" in told
    assert sql(store, "select * from datastatus") == []
    odf("ready", "bobin", "1")  # a job reads it
    odf("ready", "--new", "bobbin", "1")
    odf("ready", "bobbin", "2")  # it has chunks
    odf("dataset", "add", "other")
    odf("ready", "other", "1")


def test_a_job_is_removed_and_its_chunks_stay(odf: Odf, store: Store) -> None:
    odf("dataset", "add", "bobin", "--host", "db1")
    odf("job", "add", "loadbob", "--in", "bobin", "--out", "bobout", "--env", "A=1")
    odf("job", "add", "sumbob", "--in", "bobout", "--out", "sums")
    odf("policy", "loadbob", "concurrency=2")
    odf("ready", "bobin", "1", "2", "3")
    [claim] = take(store, "loadbob")
    refused = odf("job", "remove", "loadbob", code=4).stderr
    assert "is running on 1 chunk" in refused
    store.finish(claim)

    planned = odf("job", "remove", "loadbob", "--plan", "--json")
    assert [(row["what"], row["rows"]) for row in objects(planned)] == [
        ("items of the job", 3),
        ("dials", 1),
        ("chunks that may be claimed", 2),
        ("chunks of 'bobout' that are READY", 1),
        ("chunks of 'sumbob' that may be claimed", 1),
    ]
    assert "no job can claim them any more" in odf("job", "remove", "loadbob", "--plan").stdout
    assert "loadbob" in odf("job", "list").stdout

    assert "odf job remove loadbob" in odf("dataset", "remove", "bobin", code=4).stderr
    assert "Job 'loadbob' is removed" in odf("job", "remove", "loadbob").stderr
    assert "loadbob" not in odf("job", "list").stdout
    assert status(store, "bobout", "1", "loadbob") == "READY"
    assert sql(store, "select jobid from pending") == [("sumbob",)]
    assert sql(store, "select * from jobpolicy") == []

    [row, chunks] = objects(odf("dataset", "remove", "bobin", "--plan", "--json"))
    assert (row["rows"], chunks["what"], chunks["rows"]) == (
        1,
        "chunks of 'bobin' that are READY",
        3,
    )
    assert "Dataset 'bobin' is removed" in odf("dataset", "remove", "bobin").stderr
    assert sql(store, "select * from dataset") == []
    assert status(store, "bobin", "3", "external") == "READY"
    odf("dataset", "remove", "bobin", code=4)
    assert "Did you mean 'sumbob'" in odf("job", "remove", "sumbobb", code=4).stderr


def test_a_circle_of_jobs_is_refused(odf: Odf, store: Store) -> None:
    odf("job", "add", "one", "--in", "a", "--in", "other", "--out", "b")
    odf("job", "add", "side", "--in", "b", "--out", "d")
    odf("job", "add", "two", "--in", "b", "--out", "c")
    before = sql(store, "select jobid, itemtype, datasetid from job")
    for words in (["three", "--in", "c", "--out", "a"], ["one", "--in", "c"]):
        told = odf("job", "add", *words, code=2).stderr
        circle = ["three → a → one → b → two → c → three", "one → b → two → c → one"]
        assert circle[words[0] == "one"] in told
    assert sql(store, "select jobid, itemtype, datasetid from job") == before
    odf("job", "add", "three", "--in", "c", "--in", "today", "--out", "e")

    sql(store, "insert into job (jobid, itemtype, datasetid) values ('three', 'OUT', 'a')")
    odf("job", "add", "two", "--env", "A=1")  # that adds no link
    odf("job", "add", "two", "--in", "a", "--out", "c", code=2)
    odf("job", "add", "three", "--in", "c", "--out", "e", "--replace")
    odf("job", "add", "two", "--in", "a", "--out", "c")


def test_an_unregistered_dataset_is_noted(odf: Odf) -> None:
    assert "odf dataset add a" in odf("ready", "--new", "a", "1").stderr
    odf("dataset", "add", "a")
    assert "dataset add" not in odf("ready", "a", "2").stderr
