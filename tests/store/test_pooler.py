"""Behind pgbouncer in transaction mode, clients of several schemas share a few sessions."""

import json
import re
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas
import psycopg
import pytest
from click.testing import CliRunner
from psycopg.conninfo import conninfo_to_dict

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.errors import DataflowError, NoDatabase
from opendataflow_dagster.location import Table
from opendataflow_dagster.pipelines.sql_table import TableSource
from opendataflow_dagster.spark.postgres import looking, read_rows
from opendataflow_dagster.spark.postgres_write import StagedRows, leftovers
from opendataflow_dagster.storage.table import Rows
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.database import SQL_FOLDER, named_statements
from opendataflow_dagster.store.operations import change_rows, select_rows
from opendataflow_dagster.store.store import Store
from tests.support.pooler import Pooler, needs_pgbouncer
from tests.support.store_fixtures import close

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = needs_pgbouncer
Pool = Callable[..., Pooler]

SCHEMAS = ("east", "west")
CHUNKS = 60


def stores(url: str) -> list[Store]:
    """Two schemas of one database, with the same job: only the numbers of the chunks differ."""
    found = []
    for offset, schema in enumerate(SCHEMAS):
        store = open_store(url, schema=schema)
        store.init()
        with store.db.transaction(who="hand", why="test"):
            store.db.one(
                "insert into job (jobid, itemtype, datasetid) "
                "values ('copy', 'IN', 'raw'), ('copy', 'OUT', 'clean')"
            )
            store.db.one(
                "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
                f"select 'raw', 'hand', cast({offset * CHUNKS} + n as varchar), 'OUT', 'READY' "
                f"from generate_series(0, {CHUNKS - 1}) n"
            )
        found.append(store)
    return found


@pytest.mark.parametrize(("size", "mode"), [(1, "transaction"), (3, "transaction"), (3, "session")])
def test_each_runner_works_on_its_own_schema(
    pool: Pool, postgres_url: str, size: int, mode: str
) -> None:
    for store in stores(postgres_url):
        close(store)
    through = pool(size, mode=mode).url(postgres_url)
    pooled = [open_store(through, schema=schema) for schema in SCHEMAS]
    drain(pooled)
    assert_each_did_its_own(postgres_url)


def drain(stores: list[Store], while_at_it: Callable[[], None] = lambda: None) -> None:
    """Run a runner for each store in parallel, until nothing can be claimed."""
    start = threading.Barrier(len(stores) + 1)
    errors: list[BaseException] = []

    def work(store: Store) -> None:
        try:
            start.wait(60)
            owner = f"runner of {store.db.schema}"  # type: ignore[attr-defined]
            while claims := store.claim("copy", owner=owner):
                store.confirm(claims[0])
                store.finish(claims)
        except BaseException as error:
            errors.append(error)
        finally:
            store.close()

    threads = [threading.Thread(target=work, args=[store]) for store in stores]
    for thread in threads:
        thread.start()
    start.wait(60)
    while_at_it()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []


def assert_each_did_its_own(postgres_url: str) -> None:
    """Every chunk of each schema was produced and signed by that schema's runner, once."""
    for offset, schema in enumerate(SCHEMAS):
        store = open_store(postgres_url, schema=schema)
        with store.db.reading():
            made, _ = store.db.one(
                "select dataid from datastatus where datasetid = 'clean' and status = 'READY'"
            )
            signed, _ = store.db.one(
                "select who, min(status_after), count(*) from dataevent "
                "where locktype = 'OUT' and jobid = 'copy' group by who"
            )
        first = offset * CHUNKS
        assert {int(dataid) for (dataid,) in made} == set(range(first, first + CHUNKS))
        assert signed == [(f"runner of {schema}", "READY", 2 * CHUNKS)]
        close(store)


@pytest.mark.parametrize("size", [1, 3])
def test_tables_are_created_and_changed_through_the_pool(
    pool: Pool, postgres_url: str, size: int
) -> None:
    through = stores(pool(size).url(postgres_url))
    for offset, store in enumerate(through):
        rows = select_rows(store, "select min(cast(dataid as integer)) as first from datastatus")
        assert rows == [{"first": offset * CHUNKS}]
        assert (
            change_rows(
                store, "update datastatus set status = 'HOLD' where dataid like '%9'", who="hand"
            )
            == 6
        )
        with pytest.raises(DataflowError, match="multiple commands"):
            change_rows(store, "commit; delete from datastatus", who="hand")
        again = store.init()
        assert again.version == store.version
    drain(through)


def test_a_session_of_the_pool_is_left_as_it_was(pool: Pool, postgres_url: str) -> None:
    """Other programs use it next, including older ones and Java's."""
    look = (
        "select name, setting from pg_settings "
        "where source = 'session' and name <> 'application_name'"  # which pgbouncer sets
    )
    url = pool(1).url(postgres_url)
    with closing(psycopg.connect(url, autocommit=True)) as other:
        before = other.execute(look).fetchall()
        drain(stores(url))
        prepared = other.execute("select count(*) from pg_prepared_statements").fetchone()
        assert other.execute(look).fetchall() == before
        assert prepared == (0,)


@pytest.mark.parametrize("size", [1, 3])
def test_sessions_that_are_killed_are_waited_for(pool: Pool, postgres_url: str, size: int) -> None:
    for store in stores(postgres_url):
        close(store)
    through = pool(size).url(postgres_url)

    def kill() -> None:
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            for _ in range(4):
                time.sleep(0.1)
                admin.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity "
                    "where datname = current_database() and pid <> pg_backend_pid()"
                )

    drain([open_store(through, schema=schema) for schema in SCHEMAS], kill)
    assert_each_did_its_own(postgres_url)


def test_no_statement_needs_a_search_path(postgres_url: str) -> None:
    store = open_store(postgres_url)
    store.init()
    files = [*Path(SQL_FOLDER, "shared").glob("*.sql")]
    files += Path(SQL_FOLDER, "postgres").glob("*.sql")
    scripts, of_other_tables = {"schema", "triggers", "upgrade"}, {"tables", "sqltable", "spark"}
    topics = {file.stem for file in files} - scripts - of_other_tables
    asked = 0
    for topic in sorted(topics):
        for text in named_statements("postgres", topic).values():
            first = re.sub(r"(?m)^--.*\n", "", text).split()[0]
            if first not in ("select", "insert", "update", "delete", "with"):
                continue
            nothing = dict.fromkeys(re.findall(r"(?<!:):([a-z_]+)", text))
            with store.db.reading():
                store.db.script("set local search_path = ''")
                store.db.execute("explain " + store.db.translate(text), nothing)
            asked += 1
    assert asked > 100
    store.close()


def test_doctor_reports_a_pooler(pool: Pool, postgres_url: str) -> None:
    for store in stores(postgres_url):
        close(store)
    pooler = pool(1)
    assert "pooler" not in doctor(postgres_url)
    assert doctor(pooler.url(postgres_url))["pooler"] == {
        "check": "pooler",
        "result": "ok",
        "detail": "there is one; table names are qualified, nothing is prepared",
        "action": "",
    }


def test_doctor_finds_settings_that_another_client_left_in_the_pool(
    pool: Pool, postgres_url: str
) -> None:
    for store in stores(postgres_url):
        close(store)
    url = pool(1).url(postgres_url)
    with psycopg.connect(url, autocommit=True) as older:
        older.execute("set search_path = west")
    found = doctor(url)["pooler"]
    assert (found["result"], found["action"][:8]) == ("warn", "Upgrade ")
    assert "search_path" in found["detail"]


def test_a_pooler_that_refuses_transactions_is_named(pool: Pool, postgres_url: str) -> None:
    for store in stores(postgres_url):
        close(store)
    url = pool(1, mode="statement").url(postgres_url)
    store = open_store(url, schema="east")
    with (
        pytest.raises(NoDatabase, match="pool_mode = transaction"),
        store.db.transaction(who="hand"),
    ):
        pass
    store.close()
    assert doctor(url)["pooler"]["result"] == "fail"


def table(url: str, name: str) -> Table:
    """A registered table of a database, split by its column `id`."""
    info = conninfo_to_dict(url)
    where = f"{info['host']}:{info['port']}"
    return Table(
        "orders",
        f"{where}/{name}",
        "postgres",
        str(info["dbname"]),
        where,
        "public",
        name,
        "id",
        "postgres",
    )


@pytest.mark.parametrize("size", [1, 3])
def test_chunks_of_tables_are_read_and_replaced(pool: Pool, postgres_url: str, size: int) -> None:
    with psycopg.connect(postgres_url) as person:
        person.execute("create table mine (id int, n int)")
        person.execute("create table other (n int, id int)")
    url = pool(size).url(postgres_url)
    frames = {
        name: pandas.DataFrame({"id": [7] * 20, "n": range(20)}, columns=columns)
        for name, columns in (("mine", ["id", "n"]), ("other", ["n", "id"]))
    }
    rows = {name: Rows(table(url, name), "7") for name in frames}
    for _ in range(3):
        for name, frame in frames.items():
            assert rows[name].replace(frame, lambda: None) == 20
    for name, frame in frames.items():
        assert rows[name].read().equals(frame)


def test_a_select_as_a_source_stays_one_statement(pool: Pool, postgres_url: str) -> None:
    url = pool(1).url(postgres_url)
    with psycopg.connect(url, autocommit=True) as other:
        other.execute("select 2", prepare=True)
    for _ in range(2):
        source = TableSource(table(url, "select 1 as id"), lambda: None)
        assert source.pandas().to_dict() == {"id": {0: 1}}
        two = TableSource(table(url, "select 1; create table left_over (n int)"), lambda: None)
        with pytest.raises(DataflowError, match="multiple commands"):
            two.pandas()


def test_spark_reads_and_writes_tables(
    pool: Pool, postgres_url: str, spark: "SparkSession"
) -> None:
    with psycopg.connect(postgres_url) as person:
        person.execute("create table mine (id int, n bigint)")
        person.execute("insert into mine select i % 2, i from generate_series(0, 9999) i")
    mine = table(pool(4).url(postgres_url), "mine")
    for _ in range(3):
        with looking():
            frame = read_rows(spark, mine, "1", parts=2).selectExpr("id", "n + 2 as n")
            staged = StagedRows.write(frame, mine, "1", None, None, 7)
        assert staged.show(lambda: None) == 5000
    total = read_rows(spark, mine).selectExpr("count(*)", "sum(n)").collect()[0]
    assert tuple(total) == (10_000, sum(range(10_000)) + 3 * 5000 * 2)
    assert leftovers(mine, None) == []


def doctor(url: str) -> dict[str, Any]:
    """The checks of `odf doctor` by name."""
    environ = {"DATAFLOW_URL": url, "DATAFLOW_SCHEMA": "east"}
    done = CliRunner().invoke(app, ["doctor", "--json"], env=environ, prog_name="odf")
    return {check["check"]: check for check in json.loads(done.stdout)}
