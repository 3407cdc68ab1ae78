"""Tables of one version and programs of another: migrations, upgrades that are killed, refusals."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner, Result
from psycopg.sql import Identifier

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.errors import NoDatabase
from opendataflow_dagster.model import Claim
from opendataflow_dagster.store import history, open_store, upgrade
from opendataflow_dagster.store.catalog import record_names
from opendataflow_dagster.store.claims import force, offer
from opendataflow_dagster.store.database import (
    SQL_FOLDER,
    TooOld,
    Versions,
    migration_files,
    program_version,
    trigger_script,
)
from opendataflow_dagster.store.items import backlog, has_token, new_run
from opendataflow_dagster.store.store import Store
from tests.store.test_upgrade import ROWS
from tests.support.original_program import DDL
from tests.support.postgres import Server
from tests.support.store_fixtures import check, close, pending, put, register, sql, status, take
from tests.support.table_dump import catalog, restore, rows, run_script

NOW = program_version("sqlite")
ODD = 'My "odd" schema, 100% o\'clock :x'


@pytest.fixture(params=["sqlite", "postgres"])
def urls(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[tuple[str, str]]:
    """The URLs of two empty databases of one kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/one.db", f"sqlite:///{tmp_path}/two.db"
        return
    server: Server = request.getfixturevalue("postgres_server")
    one = request.getfixturevalue("postgres_url")
    yield one, server.create_database("other")
    server.drop_database("other")


def odf(url: str, *words: str) -> Result:
    return CliRunner().invoke(app, words, env={"DATAFLOW_URL": url})


def stamp(store: Store, **numbers: int) -> None:
    """What the tables say about themselves, as another program would write it."""
    for name, number in numbers.items():
        sql(
            store,
            f"insert into dataflow_meta (name, value) values ('{name}', '{number}') "
            "on conflict (name) do update set value = excluded.value",
        )


LATER = (
    "max_losses",
    "interruptions",
    "options",
    "replaces",
    "fold_after",
    "on_stale",
    "metadata",
    "code",
    "execution",
)
"""Columns that version 3 didn't have."""

NEW = (
    "dataflow_meta",
    "fill",
    "streamfold",
    "csvfile",
    "csvpart",
    "registration",
    "origin",
    "domainname",
)
"""Tables that version 3 didn't have, and the one with the versions."""


def kept(found: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """The rows that no upgrade may change; and of the queue, what it promises.

    Columns that came since hold nothing yet.
    """
    found = {name: of_table for name, of_table in found.items() if name not in NEW}
    queue = [{**row, "sortkey": None} for row in found["pending"]]
    found |= {"pending": sorted(queue, key=repr)}
    return {
        name: [{column: row[column] for column in row if column not in LATER} for row in of_table]
        for name, of_table in found.items()
    }


def test_the_migrations_give_the_tables_of_the_schema(urls: tuple[str, str]) -> None:
    whole, summed = open_store(urls[0]), open_store(urls[1])
    whole.init()
    db = summed.db
    with db.of_any_version(), db.upgrading():
        for text in upgrade.missing_migrations(db, Versions(), set()):
            db.script(text)
        db.script(trigger_script(db.dialect))
    assert catalog(summed) == catalog(whole)
    found, wanted = rows(summed), rows(whole)
    for seeded in ("generation", "dataflow_context"):
        assert found.get(seeded) == wanted.get(seeded)
    stamps = [row for row in wanted["dataflow_meta"] if row["name"] == "oldest_client"]
    assert found["dataflow_meta"] == stamps
    close(whole)
    close(summed)


def test_both_databases_have_the_same_migrations() -> None:
    found = {
        dialect: [
            (number, os.path.basename(path)) for number, path in migration_files(dialect).items()
        ]
        for dialect in ("sqlite", "postgres")
    }
    assert found["sqlite"] == found["postgres"]
    assert [number for number, _ in found["sqlite"]] == list(range(3, NOW + 1))
    shared, own = (
        {path.name for path in Path(SQL_FOLDER, folder, "migrations").glob("*.sql")}
        for folder in ("shared", "sqlite")
    )
    assert len(shared | own) == len(shared) + len(own) == NOW - 2


def test_an_upgrade_of_version_3_keeps_every_row(urls: tuple[str, str]) -> None:
    old, fresh = restore(urls[0]), open_store(urls[1])
    before = rows(old)
    assert all(before[name] for name in before), "every table has something to lose"
    assert old.init() == Versions(3, 0, 3)
    after = rows(old)
    assert kept(after) == kept(before)
    assert {row["name"]: row["value"] for row in after["dataflow_meta"]} == {
        "version": str(NOW),
        "schema": str(NOW),
        "oldest_client": "3",
        "store": old.id,
    }
    assert len(old.id) == 32
    fresh.init()
    assert catalog(old) == catalog(fresh)
    check(old)
    close(old)
    close(fresh)


def test_claims_of_version_3_are_settled_by_this_version(url: str) -> None:
    store = restore(url)
    store.init()
    held = [
        Claim(*row, 120.0, None)
        for row in sql(
            store,
            "select jobid, dataid, generation, owner, attempts from claim where owner is not null",
        )
    ]
    assert sorted(claim.jobid for claim in held) == ["items", "loadbob", "loadbob"]
    for claim in held:
        assert store.heartbeat([claim]) == []
        store.finish(claim)
    assert status(store, "bobout", "5", "loadbob") == "READY"
    assert has_token(store, "items")
    assert [row["waiting"] for row in backlog(store)] == [2]
    assert [claim.dataid for claim in take(store, "sums", k=9)] == ["1", "5", "9"]
    check(store)
    close(store)


def test_tables_of_version_3_are_refused_in_a_line_until_init(url: str) -> None:
    close(restore(url))
    for command in (["status"], ["start", "loadbob"], ["sql", "select 1"], ["runs"]):
        done = odf(url, *command)
        assert done.exit_code == 1, done.output
        [line] = done.stderr.splitlines()
        assert f"have version 3, and this program needs version {NOW}. Run `odf init`" in line
    assert odf(url, "doctor").stdout.count("→ odf init") == 1
    assert odf(url, "init").exit_code == 0
    assert odf(url, "status").exit_code == 0


def test_two_upgrades_at_once_take_turns(url: str) -> None:
    stores = [restore(url), open_store(url)]
    before, start = rows(stores[0]), threading.Barrier(2)

    def init(store: Store) -> Versions:
        start.wait()
        try:
            return store.init()
        finally:
            store.db.drop()

    with ThreadPoolExecutor(2) as pool:
        found = sorted(pool.map(init, stores))
    assert found == [Versions(3, 0, 3), Versions(NOW, 3, NOW)]
    assert kept(rows(stores[0])) == kept(before)
    check(stores[0])
    for store in stores:
        close(store)


INIT = """
import os, signal, sys
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.upgrade import upgrade

store, deadly = open_store(sys.argv[1]), int(sys.argv[2])
plain, count = store.db.execute, 0

def execute(text, params):
    global count
    count += 1
    if count == deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(text, params)

store.db.execute = execute
upgrade(store.db)
print(count)
"""


def init_elsewhere(url: str, deadly: int = 0) -> subprocess.Popen[str]:
    """A process that runs `odf init`, and kills itself before a statement."""
    if not url.startswith("sqlite"):
        url += "?application_name=doomed"
    line = [sys.executable, "-c", INIT, url, str(deadly)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)


def test_an_upgrade_of_sqlite_that_is_killed_has_changed_nothing(tmp_path: Any) -> None:
    whole = f"sqlite:///{tmp_path}/whole.db"
    close(restore(whole))
    count = int(init_elsewhere(whole).communicate()[0])
    url = f"sqlite:///{tmp_path}/killed.db"
    store = restore(url)
    before = rows(store), catalog(store)
    for deadly in (count // 8, count // 2, count - 13, count - 3, count - 2):
        process = init_elsewhere(url, deadly)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert (rows(store), catalog(store)) == before, f"killed at {deadly} of {count}"
    upgraded = open_store(whole)
    upgraded.fill()
    store.init()
    assert (kept(rows(store)), catalog(store)) == (kept(rows(upgraded)), catalog(upgraded))
    assert kept(rows(store)) == kept(before[0])
    close(store)
    close(upgraded)


OBSTACLES = {
    "at the migration": "lock table dataflow_meta in exclusive mode",
    "at a later migration": "lock table jobpolicy in row exclusive mode",
    "at the triggers": "lock table datastatus in row exclusive mode",
    "at the stamp": "select * from dataflow_meta where name = 'schema' for update",
}


@contextmanager
def obstacle(url: str, statement: str) -> Iterator[None]:
    """A person's transaction that holds locks."""
    with psycopg.connect(url, options="-c search_path=dataflow") as person:
        person.execute(statement)
        yield


def until(done: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"nothing after {seconds} s"
        time.sleep(0.02)


def test_an_upgrade_of_postgresql_that_is_killed_has_changed_nothing(postgres_url: str) -> None:
    store = restore(postgres_url)
    before = rows(store), catalog(store)
    waiting = "select wait_event_type from pg_stat_activity where application_name = 'doomed'"
    for where, statement in OBSTACLES.items():
        with obstacle(postgres_url, statement):
            process = init_elsewhere(postgres_url)
            until(lambda: sql(store, waiting) == [("Lock",)])
            process.kill()
            process.communicate()
        until(lambda: sql(store, waiting) == [])
        assert (rows(store), catalog(store)) == before, where
    store.init()
    assert kept(rows(store)) == kept(before[0])
    check(store)
    close(store)


@pytest.mark.parametrize("start", ["nothing", "java", "version 3"])
def test_the_printed_plan_does_what_init_does(urls: tuple[str, str], start: str) -> None:
    if start == "java" and urls[0].startswith("sqlite"):
        pytest.skip("the Java program keeps its tables in PostgreSQL or H2")
    for url in urls:
        if start == "version 3":
            close(restore(url))
        elif start == "java":
            run_script(url, DDL + ROWS)
    planned, done = open_store(urls[0]), open_store(urls[1])
    printed = odf(urls[0], "init", "--plan")
    assert printed.exit_code == 0
    assert odf(urls[0], "init", "--plan").stdout == printed.stdout, "it changed something"
    run_script(urls[0], printed.stdout)
    done.init()
    assert catalog(planned) == catalog(done)
    planned.fill()
    record_names(planned)  # a sensor does, or the next registration
    found, wanted = rows(planned), rows(done)
    for table in (found, wanted):
        for row in table["registration"]:
            row.pop("at")
            row.pop("seq")
        table["registration"].sort(key=repr)
        for row in table["dataevent"]:  # of the rows that were found on init
            row.pop("xid", None)
            if start == "java":
                row.pop("at")
                row.pop("seq")
        for name in ("job", "datastatus"):
            for row in table[name] if start == "java" else ():
                row.pop("modified")  # written just now
        for name in table:
            table[name] = sorted(table[name], key=repr)
        for row in table["dataflow_meta"]:
            if row["name"] == "store":
                assert len(row.pop("value")) == 32  # each has its own
    assert found == wanted
    check(planned)
    again = odf(urls[0], "init", "--plan")
    assert (again.stdout, again.exit_code) == ("", 0)
    assert again.stderr == f"Nothing to do: the tables are of version {NOW}.\n"
    close(planned)
    close(done)


@pytest.mark.parametrize(
    ("start", "schema"),
    [
        ("nothing", "dataflow"),
        ("version 3", "dataflow"),
        ("nothing", ODD),
    ],
)
def test_psql_running_the_printed_plan_equals_init(
    postgres_server: Server, tmp_path: Path, start: str, schema: str
) -> None:
    """With a file as psql reads it: its variables, its errors, its rights."""
    plan, dumps = tmp_path / "upgrade.sql", []

    def call(program: str, *words: str) -> str:
        line = [str(postgres_server.bin / program), *words]
        done = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert not re.sub(r".*NOTICE: .*skipping\n", "", done.stderr)
        return done.stdout

    for way in ("init", "plan"):
        url = postgres_server.create_database(f"by_{way}")
        try:
            if start == "version 3":
                close(restore(url))
            words = ["init", "--plan"] if way == "plan" else ["init"]
            env = {"DATAFLOW_URL": url, "DATAFLOW_SCHEMA": schema}
            done = CliRunner().invoke(app, words, env=env)
            assert done.exit_code == 0
            if way == "plan":
                plan.write_text(done.stdout)
                call("psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", str(plan), url)
            dump = call("pg_dump", "--schema-only", url)
            dumps.append(re.sub(r"(?m)^\\(un)?restrict .*", "", dump))
        finally:
            postgres_server.drop_database(f"by_{way}")
    assert dumps[0] == dumps[1]
    assert (
        f"CREATE SCHEMA {Identifier(schema).as_string() if schema == ODD else schema};" in dumps[0]
    )


def test_a_plan_on_sqlite_creates_no_file(sqlite_url: str, tmp_path: Any) -> None:
    assert "create table if not exists claim" in odf(sqlite_url, "init", "--plan").stdout
    assert list(tmp_path.iterdir()) == []


def test_the_originals_tables_on_sqlite_are_upgraded(sqlite_url: str) -> None:
    run_script(
        sqlite_url,
        "create table dataset (datasetid varchar, hostname varchar, database varchar, "
        "schemaname varchar, tablename varchar, username varchar, encryptedpass varchar, extra);"
        "create table job (jobid varchar, itemtype varchar, datasetid varchar, itemvalue varchar, "
        "modified timestamp);"
        "create table datastatus (datasetid varchar, jobid varchar, dataid varchar, "
        "locktype varchar, status varchar, modified timestamp, format varchar, "
        "primary key (datasetid, jobid, dataid));"
        "insert into job values ('j', 'IN', 'a', null, null), ('j', 'OUT', 'b', null, null), "
        "('j', 'IN', 'a', null, null);"
        "insert into dataset (datasetid, extra) values ('a', 1), ('a', 2);"
        "insert into datastatus values ('a', 'x', '1', 'OUT', 'READY', null, 'f'), "
        "('a', 'x', '', null, null, null, null);",
    )
    store = open_store(sqlite_url)
    store.init()
    store.init()
    assert sql(store, "select datasetid, extra, writemode from dataset order by extra") == [
        ("a", 1, None),
        ("a", 2, None),
    ]
    store.finish(take(store, "j"))
    assert status(store, "b", "1", "j") == "READY"
    check(store)
    close(store)


def test_a_dropped_table_is_created_again(store: Store, url: str) -> None:
    sql(store, "drop table chunkrange")
    assert "create table if not exists chunkrange" in odf(url, "init", "--plan").stdout
    store.init()
    assert sql(store, "select count(*) from chunkrange") == [(0,)]


@pytest.fixture
def busy(store: Store) -> Store:
    """A job with two chunks, and connections that were opened before the tables changed."""
    register(store, "job", ["a"], ["b"])
    register(store, "root", [], ["c"])
    put(store, "a", "1")
    put(store, "a", "2")
    return store


def test_a_program_that_is_too_old_settles_but_claims_nothing(busy: Store, url: str) -> None:
    [claim] = take(busy, "job")
    stamp(busy, version=NOW + 2, schema=NOW + 2, oldest_client=NOW + 2)

    with pytest.raises(
        TooOld, match=rf"has version {NOW}, .* need at least version {NOW + 2}. Upgrade"
    ):
        busy.claim("job", owner="w")
    with pytest.raises(TooOld):
        take(busy, "job", only="2")
    with pytest.raises(TooOld):
        force(busy, "job", "2", owner="w")
    with pytest.raises(TooOld):
        new_run(busy, "root")
    assert "Upgrade opendataflow-dagster" in offer(busy, "job").obstacle
    assert status(busy, "b", "2", "job") is None
    assert sql(busy, "select count(*) from datastatus where datasetid = 'c'") == [(0,)]

    busy.confirm(claim)
    busy.finish(claim)
    assert status(busy, "b", "1", "job") == "READY"
    assert busy.recover() == []
    assert [row["dataid"] for row in history.runs(busy, jobid="job")] == ["1"]
    for command in (["status"], ["runs"], ["history", "job"], ["why", "job"], ["doctor"]):
        assert odf(url, *command).exit_code == (1 if command == ["doctor"] else 0)
    for words in (
        "start job",
        "force job 2 true",
        "run --job job true",
        "init",
        "init --plan",
    ):
        done = odf(url, *words.split())
        assert done.exit_code == 4, done.output
        assert [done.stdout, len(done.stderr.splitlines())] == ["", 1]

    stamp(busy, oldest_client=3)
    assert [each.dataid for each in take(busy, "job")] == ["2"]


def test_an_idle_worker_learns_that_it_is_too_old(busy: Store) -> None:
    busy.finish(take(busy, "job", k=2))
    assert busy.claim("job", owner="w") == []
    stamp(busy, oldest_client=NOW + 1)
    assert busy.claim("job", owner="w") == [], "there is nothing to claim for anybody"
    put(busy, "a", "3")
    with pytest.raises(TooOld):
        busy.claim("job", owner="w")


def test_newer_tables_that_this_program_may_use_are_left_alone(busy: Store, url: str) -> None:
    stamp(busy, version=NOW + 1, schema=NOW + 1)
    before = rows(busy), catalog(busy)
    for words in (["init"], ["init", "--plan"]):
        done = odf(url, *words)
        assert (done.exit_code, done.stdout) == (0, "")
        assert done.stderr == (
            f"The tables are of version {NOW + 1}, newer than this program ({NOW}), "
            "which works with them: nothing was changed.\n"
        )
    assert (rows(busy), catalog(busy)) == before
    busy.finish(take(busy, "job", k=2))
    assert odf(url, "doctor").exit_code == 0


def test_the_init_of_an_older_program_is_noticed_and_repaired(busy: Store, url: str) -> None:
    [claim] = take(busy, "job")
    stamp(busy, schema=3)
    other = open_store(url)
    with pytest.raises(NoDatabase, match=r"version 3 has rewritten .* Run `odf init`"):
        other.claim("job", owner="w")
    other.finish(claim)
    assert odf(url, "start", "job").exit_code == 1
    assert "create trigger" in odf(url, "init", "--plan").stdout.replace("or replace ", "")
    assert odf(url, "init").exit_code == 0
    assert [each.dataid for each in other.claim("job", owner="w")] == ["2"]
    close(other)

    stamp(busy, version=NOW + 1)
    done = odf(url, "init")
    assert done.exit_code == 1
    assert f"whose program is of version {NOW + 1} or newer" in done.stderr


def test_history_is_listed_of_newer_tables(busy: Store) -> None:
    stamp(busy, version=NOW + 1, schema=NOW + 1, oldest_client=NOW + 1)
    assert len(history.history(busy)) == 2
    assert pending(busy) == {("job", "1"): 1, ("job", "2"): 1}


WORKER = """
import json, sys
from opendataflow_dagster.model import new_owner
from opendataflow_dagster.store import open_store

store, owner, held = open_store(sys.argv[1]), new_owner(), []
for line in sys.stdin:
    try:
        if line.strip() == "claim":
            claims = store.claim("job", owner=owner)
            held += claims
            answer = [claim.dataid for claim in claims]
        elif line.strip() == "renew":
            answer = [claim.dataid for claim in store.heartbeat(held)]
        else:
            store.finish(held)
            answer, held = [claim.dataid for claim in held], []
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), flush=True)
"""


class Program:
    """A version of this package in a folder: its commands, and a worker that stays connected."""

    def __init__(self, folder: Path, url: str) -> None:
        self.environment = {**os.environ, "PYTHONPATH": str(folder), "DATAFLOW_URL": url}
        line = [sys.executable, "-c", WORKER, url]
        self.worker = subprocess.Popen(
            line, env=self.environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "opendataflow_dagster.cli", *words]
        return subprocess.run(line, env=self.environment, capture_output=True, text=True)

    def ask(self, word: str) -> Any:
        """Return what the worker answers to `claim`, `renew` or `finish`."""
        assert self.worker.stdin
        assert self.worker.stdout
        self.worker.stdin.write(word + "\n")
        self.worker.stdin.flush()
        return json.loads(self.worker.stdout.readline())

    def close(self) -> None:
        self.worker.communicate()


@pytest.fixture(scope="module")
def folders(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """This version's program, the next one's with one more column, and one that ends them."""
    found = [tmp_path_factory.mktemp(name) for name in ("this", "next", "later")]
    for folder in found:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    for dialect in ("sqlite", "postgres"):
        for folder in found[1:]:
            _edit(folder, dialect, r"(modulus \w+,)", r"\1 fancy text,")
            text = "alter table chunkrange add column fancy text;\n"
            _migration(folder, dialect, NOW + 1).write_text(text)
        _edit(found[2], dialect, "'oldest_client', '3'", f"'oldest_client', '{NOW + 2}'")
        text = f"update dataflow_meta set value = '{NOW + 2}' where name = 'oldest_client';\n"
        _migration(found[2], dialect, NOW + 2).write_text(text)
    return found


@pytest.fixture
def programs(folders: list[Path], url: str) -> Iterator[list[Program]]:
    found = [Program(folder, url) for folder in folders]
    yield found
    for program in found:
        program.close()


def _migration(folder: Path, dialect: str, number: int) -> Path:
    name = f"{number:03d}_more.sql"
    return folder / "opendataflow_dagster" / "sql" / dialect / "migrations" / name


def _edit(folder: Path, dialect: str, pattern: str, text: str) -> None:
    path = folder / "opendataflow_dagster" / "sql" / dialect / "schema.sql"
    edited, count = re.subn(pattern, text, path.read_text())
    assert count == 1
    path.write_text(edited)


def test_programs_of_several_versions_share_the_tables(
    busy: Store, programs: list[Program]
) -> None:
    for dataid in "3456":
        put(busy, "a", dataid)
    this, following, later = programs
    assert this.ask("claim") == ["1"]
    assert f"have version {NOW}, and this program needs version {NOW + 1}" in following.ask("claim")
    assert following("status").returncode == 1

    assert following("init").returncode == 0
    assert [this.ask("claim"), following.ask("claim")] == [["2"], ["3"]]
    assert [this.ask("renew"), this.ask("finish")] == [[], ["1", "2"]]
    assert following.ask("finish") == ["3"]
    for words in (["status"], ["runs"], ["init"], ["doctor"]):
        done = this(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert this.ask("claim") == ["4"]
    assert json.loads(this("start", "job").stdout)[0]["dataid"] == "5"

    assert later("init").returncode == 0
    for program in (this, following):
        assert program.ask("claim").startswith("TooOld: ")
    assert [this.ask("renew"), this.ask("finish")] == [[], ["4"]]
    for words in (["start", "job"], ["run", "--job", "job", "true"], ["init"]):
        done = this(*words)
        assert (done.returncode, done.stdout) == (4, "")
        [line] = done.stderr.splitlines()
        assert f"This program has version {NOW}, " in line
        assert f"need at least version {NOW + 2}. Upgrade opendataflow-dagster on this host" in line
    for words in (["end", "job", "5", "READY"], ["status"], ["history", "job"], ["recover"]):
        done = this(*words)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [later.ask("claim"), later.ask("finish")] == [["6"], ["6"]]
    assert [status(busy, "b", each, "job") for each in "123456"] == ["READY"] * 6
    assert sql(busy, "select fancy from chunkrange") == []
    check(busy)


def test_a_user_that_may_not_read_the_version_is_told_what_to_grant(postgres_url: str) -> None:
    store = open_store(postgres_url)
    store.init()
    sql(store, "create role worker login")
    sql(store, "grant usage on schema dataflow to worker")
    done = odf(postgres_url.replace("//postgres@", "//worker@"), "status")
    assert done.exit_code == 1
    [line] = done.stderr.splitlines()
    assert 'run: grant select on "dataflow".dataflow_meta to "worker";' in line
    sql(store, "drop owned by worker")
    sql(store, "drop role worker")
    close(store)
