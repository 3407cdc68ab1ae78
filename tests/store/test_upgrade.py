"""`init`: on a database of the original, on ours again, while workers run, twice at once."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import psycopg
import pytest

from opendataflow_dagster.model import Fact, new_owner
from opendataflow_dagster.store import open_store, postgres
from opendataflow_dagster.store.catalog import record_names
from opendataflow_dagster.store.items import new_run
from opendataflow_dagster.store.store import Store
from tests.support.original_program import DDL, Java
from tests.support.store_fixtures import (
    check,
    claimable,
    close,
    connect,
    everything,
    pending,
    put,
    register,
    sql,
    statuses,
    take,
)
from tests.support.table_dump import catalog

ROWS = """
insert into dataset values
    ('bobin', 'host', 'db', 's', 't', 'u', 'ZpLfE+uTYE2mdmjOPrukol3yu+cpAHBnmL6trHa9PHGj'),
    ('bobin', 'host', 'db', 's', 't', 'u', 'ZpLfE+uTYE2mdmjOPrukol3yu+cpAHBnmL6trHa9PHGj'),
    ('bobout', null, null, null, null, null, null), (null, 'x', null, null, null, null, null),
    ('', '', '', '', '', '', '');
insert into job values
    ('loadbob', 'IN', 'bobin', null, '2019-05-05'), ('loadbob', 'IN', 'bobin', null, null),
    ('loadbob', 'OUT', 'bobout', null, now()), ('loadbob', 'MODE', null, 'full', now()),
    (null, 'IN', 'bobin', null, null),
    ('half', 'OUT', null, null, null),
    ('half', null, 'bobin', null, null);
insert into datastatus values
    ('bobin', 'hand', '1.0', 'OUT', 'READY', '2019-05-05'),
    ('bobin', 'hand', '2', 'OUT', 'READY', null),
    ('bobin', 'hand', '10', 'OUT', 'READY', null), ('bobin', 'other', '10', 'OUT', 'READY', null),
    ('bobin', 'loadbob', '1.0', 'IN', 'DONE', null),
    ('bobout', 'loadbob', '1.0', 'OUT', 'READY', null),
    ('bobin', 'hand', '3', 'OUT', 'READY', null),
    ('bobout', 'loadbob', '3', 'OUT', 'FAILED', null),
    ('bobin', 'hand', '4', 'OUT', 'READY', null),
    ('bobout', 'loadbob', '4', 'OUT', 'RESUBMIT', null),
    ('bobin', 'hand', '5', 'OUT', 'READY', null),
    ('bobout', 'loadbob', '5', 'OUT', 'RUNNING', null),
    ('bobin', 'loadbob', '5', 'IN', 'RUNNING', null), ('bobin', 'hand', '', 'OUT', 'READY', null),
    ('', '', '', '', '', null), ('bobin', 'hand', 'odd', null, null, null),
    ('bobin', 'hand', '6', 'OUT', null, null), ('bobout', 'loadbob', '7', 'out', 'ready', null),
    ('bobin', 'hand', '7', 'OUT', 'READY', null),
    ('bobin', 'hand', '8', 'OUT', 'READY', '1969-01-01');
"""

OLD_COLUMNS = {
    "dataset": "datasetid, hostname, database, schemaname, tablename, username, encryptedpass",
    "job": "jobid, itemtype, datasetid, itemvalue, modified",
    "datastatus": "datasetid, jobid, dataid, locktype, status, modified",
}


def original(url: str) -> Store:
    """A database of the original with people's data; and a store that isn't initialized yet."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(DDL)
        connection.execute(ROWS)
    return open_store(url)


def old_rows(store: Store) -> dict[str, list[tuple]]:
    return {
        table: sorted(sql(store, f"select {columns} from {table}"), key=repr)
        for table, columns in OLD_COLUMNS.items()
    }


def test_init_keeps_every_row_of_the_original(postgres_url: str) -> None:
    store = original(postgres_url)
    before = old_rows(store)
    store.init()
    assert old_rows(store) == before
    assert pending(store) == {
        ("loadbob", "2"): 1,
        ("loadbob", "4"): 0,
        ("loadbob", "8"): 1,
        ("loadbob", "10"): 1,
    }
    check(store)
    assert {who for (who,) in sql(store, "select who from dataevent")} == {"odf init"}

    assert [claim.dataid for claim in take(store, "loadbob", k=9)] == ["4", "2", "8", "10"]
    sql(store, "update datastatus set status = 'RESUBMIT' where dataid = '5' and jobid = 'loadbob'")
    assert [claim.dataid for claim in take(store, "loadbob", "w2", k=9)] == ["5"]
    check(store)
    close(store)


def test_init_again_changes_nothing(store: Store) -> None:
    register(store, "job", ["a"], ["b"])
    for dataid in "1234":
        put(store, "a", dataid)
    claims = take(store, "job", k=2)
    store.finish(claims[0])
    store.fill()
    record_names(store)  # the first `odf init` after the first chunks
    before, queue = everything(store), pending(store)
    store.init()
    store.init()
    after = everything(store)
    assert after.pop("pending") or before.pop("pending")  # SQLite sorts it anew at the next claim
    assert after == {table: rows for table, rows in before.items() if table != "pending"}
    assert pending(store) == queue
    store.finish(claims[1])
    check(store)


def test_init_again_repairs_the_queue(store: Store) -> None:
    register(store, "job", ["a"], ["b"])
    for dataid in "12":
        put(store, "a", dataid)
    sql(store, "delete from pending where dataid = '1'")
    sql(store, "insert into pending (jobid, dataid, rank, sortkey) values ('job', '9', 1, '9')")
    store.init()
    check(store)


def test_an_upgrade_gives_the_same_tables_as_a_fresh_start(
    postgres_server: object, postgres_url: str
) -> None:
    upgraded = original(postgres_url)
    upgraded.init()
    fresh_url = postgres_server.create_database("fresh")  # type: ignore[attr-defined]
    fresh = open_store(fresh_url)
    fresh.init()
    assert catalog(upgraded) == catalog(fresh)
    upgraded.init()
    assert catalog(upgraded) == catalog(fresh)
    close(upgraded)
    close(fresh)
    postgres_server.drop_database("fresh")  # type: ignore[attr-defined]


def test_the_originals_statements_keep_working(postgres_url: str) -> None:
    store = original(postgres_url)
    store.init()
    for statement in (
        "insert into dataset values ('new', 'h', 'd', 's', 't', 'u', 'p')",
        "insert into job values ('newjob', 'IN', 'new', null, now())",
        "insert into job values ('newjob', 'OUT', 'newout', null, now())",
        "insert into datastatus values ('new', 'hand', '1', 'OUT', 'READY', now())",
        "delete from datastatus where dataid = ''",
        "update datastatus set status = 'READY' where datasetid = 'bobin'",
        "select * from datastatus where status = 'READY' order by modified desc",
    ):
        sql(store, statement)
    assert ("newjob", "1") in pending(store)
    check(store)
    java = Java(postgres_url)
    assert java.claim("loadbob") == "10"
    java.end("loadbob", "10")
    check(store)
    java.close()
    close(store)


@pytest.mark.parametrize("times", [1, 4])
def test_init_runs_while_workers_run(store: Store, times: int) -> None:
    """Nobody fails, nothing is done twice or missed: each machine of an upgrade runs init."""
    register(store, "job", ["a"], ["b"])
    chunks = [str(n) for n in range(300)]
    for dataid in chunks:
        put(store, "a", dataid)
    done: Counter[str] = Counter()
    started, over = threading.Event(), threading.Event()

    def work(number: int) -> None:
        owner = new_owner()
        while claims := store.claim("job", owner=owner):
            done.update(claim.dataid for claim in claims)
            store.finish(claims)
            started.set()
        store.db.drop()

    def upgrade(_: int) -> None:
        started.wait(30)
        for _ in range(2):
            store.init()
            if over.is_set():
                break
        store.db.drop()

    with ThreadPoolExecutor(8) as pool:
        workers = [pool.submit(work, number) for number in range(3)]
        upgrades = [pool.submit(upgrade, number) for number in range(times)]
        for worker in workers:
            worker.result()
        over.set()
        for each in upgrades:
            each.result()

    assert done == Counter(chunks)
    assert {row[1] for key, row in statuses(store).items() if key[0] == "b"} == {"READY"}
    check(store)


def test_many_inits_at_once_create_an_empty_database_once(url: str) -> None:
    start = threading.Barrier(6)

    def init(_: int) -> None:
        store = open_store(url)
        start.wait()
        store.init()
        close(store)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(init, range(6)))
    store = open_store(url)
    register(store, "job", ["a"], ["b"])
    put(store, "a", "1")
    store.finish(take(store, "job"))
    check(store)
    close(store)


def test_two_inits_at_once_upgrade_the_originals_database_once(postgres_url: str) -> None:
    stores = [original(postgres_url), open_store(postgres_url)]
    before = old_rows(stores[0])
    start = threading.Barrier(2)

    def init(store: Store) -> None:
        start.wait()
        store.init()
        store.db.drop()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(init, stores))
    assert old_rows(stores[0]) == before
    check(stores[0])
    assert sql(stores[0], "select count(*) from dataevent") == [(20,)]
    for store in stores:
        close(store)


def test_a_schema_may_have_any_name(postgres_url: str) -> None:
    store = open_store(postgres_url, schema='My "odd" schema, 100%')
    store.init()
    store.init()
    statements = (
        "insert into job (jobid, itemtype, datasetid) "
        "values ('job', 'IN', 'a'), ('job', 'OUT', 'b')",
        "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
        "values ('a', 'hand', '1', 'OUT', 'READY')",
    )
    for statement in statements:
        store.db.execute(statement, {})
    with psycopg.connect(postgres_url, autocommit=True) as other:  # with a search_path of its own
        other.execute(
            'insert into "My ""odd"" schema, 100%".datastatus '
            "values ('a', 'hand', '2', 'OUT', 'READY', now())"
        )
    claims = take(store, "job", k=5)
    assert [claim.dataid for claim in claims] == ["1", "2"]
    store.finish(claims)
    assert store.db.execute("select count(*) from datastatus where status = 'READY'", {})[0] == [
        (4,)
    ]
    close(store)


def test_the_oracle_reads_the_originals_rows(postgres_url: str) -> None:
    store = original(postgres_url)
    store.init()
    assert claimable(store) == pending(store) != {}
    close(store)


def without_registrations(store: Store) -> None:
    """Without their history, whose views know every column."""
    if store.db.dialect == "sqlite":
        for table, change in product(
            ("dataset", "job", "jobpolicy"), ("added", "changed", "removed")
        ):
            sql(store, f"drop trigger {table}_{change}")
        for view in ("record_dataset", "record_job", "unrecorded", "registered"):
            sql(store, f"drop view {view}")
        sql(store, "drop table registration")
    else:
        sql(store, "drop table registration cascade")
    sql(store, "drop table origin")
    sql(store, "drop table domainname")


def without_later_columns(store: Store) -> None:
    """Without what came by a migration after the baseline."""
    sql(store, "alter table jobpolicy drop column max_losses")
    sql(store, "alter table claim drop column interruptions")
    sql(store, "drop index chunkfact_replacing")
    for column in ("replaces", "metadata", "code"):
        sql(store, f"alter table chunkfact drop column {column}")
    sql(store, "alter table dataset drop column options")
    sql(store, "alter table jobpolicy drop column fold_after")
    sql(store, "alter table jobpolicy drop column on_stale")
    sql(store, "drop index dataevent_by_execution")
    if store.db.dialect == "sqlite":
        for kind in ("trigger", "view"):
            found = "select name from sqlite_master where type = :kind and sql like '%execution%'"
            for (name,) in sql(store, found, kind=kind):
                sql(store, f"drop {kind} {name}")
        sql(store, "alter table dataflow_context drop column execution")
    sql(store, "alter table dataevent drop column execution")
    sql(store, "drop index if exists streamitem_by_age")
    for table in ("streamfold", "csvfile", "csvpart"):
        sql(store, f"drop table {table}")
    if store.db.dialect == "sqlite":
        sql(store, "drop view rebuild")
        sql(store, "drop table fill")
    else:
        sql(store, "drop table fill cascade")
        sql(store, "drop sequence last_notice")


def test_tables_of_the_first_version_get_the_column_for_schemas(url: str) -> None:
    store = open_store(url)
    store.init()
    register(store, "job", ["a"], ["b"])
    put(store, "a", "1")
    store.finish(take(store, "job"), [Fact("b", "1", rows=3)])
    without_registrations(store)
    sql(store, "alter table chunkfact drop column schema")
    without_later_columns(store)
    sql(store, "delete from dataflow_meta where name <> 'schema'")
    sql(store, "update dataflow_meta set value = '1' where name = 'schema'")

    store.init()
    store.init()

    put(store, "a", "2")
    store.finish(take(store, "job"), [Fact("b", "2", schema="n:bigint")])
    found = sql(store, "select dataid, rows, schema from chunkfact where datasetid = 'b'")
    assert sorted(found) == [("1", 3, None), ("2", None, "n:bigint")]
    check(store)
    close(store)


def test_tables_of_the_second_version_get_what_pipelines_keep(url: str) -> None:
    store = open_store(url)
    store.init()
    register(store, "job", [], ["b"])
    sql(store, "insert into dataset (datasetid, domain) values ('b', 'kept')")
    for table in ("pipelinestep", "streamitem", "streamkey", "streamtoken"):
        sql(store, f"drop table {table}")
    without_registrations(store)
    sql(store, "alter table dataset drop column writemode")
    without_later_columns(store)
    sql(store, "drop index dataevent_of_failures")
    sql(store, "delete from dataflow_meta where name <> 'schema'")
    sql(store, "update dataflow_meta set value = '2' where name = 'schema'")

    store.init()
    store.init()

    assert sql(store, "select value from dataflow_meta where name = 'schema'") == [
        (str(store.version),)
    ]
    found = sql(store, "select datasetid, domain, writemode from dataset")
    assert found == [("b", "kept", None)]
    assert new_run(store, "job") in {dataid for _, dataid in pending(store)}
    for table in ("pipelinestep", "streamitem", "streamkey", "streamtoken"):
        assert sql(store, f"select count(*) from {table}") == [(0,)]
    check(store)
    close(store)


CLAIMS = ("select from fill", "select from claim", "delete from pending", "delete from claim")
FINISHES = ("delete from claim",)
BOTH = ("delete from datastatus", "select from claim_row", "delete from pending")


@pytest.mark.parametrize("held", [1, 2, 3])
@pytest.mark.parametrize("locks", [CLAIMS + BOTH, FINISHES + BOTH])
def test_init_takes_its_locks_in_the_order_of_the_workers(
    postgres_url: str, locks: tuple[str, ...], held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "UPGRADING", "set local lock_timeout = '20s'")
    store = open_store(postgres_url)
    store.init()
    tries, upgrading = [], store.db.upgrading
    store.db.upgrading = lambda: tries.append(1) or upgrading()  # type: ignore[method-assign]
    worker, init = connect(store), threading.Thread(target=store.init)
    worker.execute("begin")
    for each in locks[:held]:
        worker.execute(f"{each} where false")
    init.start()
    waiting = "select 1 from pg_locks where not granted"
    deadline = time.monotonic() + 20
    while not sql(store, waiting):
        assert time.monotonic() < deadline
    for each in locks[held:]:
        worker.execute(f"{each} where false")
    worker.execute("commit")
    init.join()
    worker.close()
    close(store)
    assert len(tries) == 1
