"""Tables as a database describes them, all their rows, and tables of an older version."""

import re
import sqlite3
from pathlib import Path
from typing import Any

import psycopg

from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import sql

FROZEN = Path(__file__).parents[1] / "frozen"

CATALOG = [
    "select table_name, column_name, ordinal_position, data_type, column_default, is_nullable "
    "from information_schema.columns where table_schema = 'dataflow'",
    "select tablename, indexname, indexdef from pg_indexes where schemaname = 'dataflow'",
    "select conrelid::regclass::text, conname, pg_get_constraintdef(oid) from pg_constraint "
    "where connamespace = 'dataflow'::regnamespace",
    "select tgrelid::regclass::text, tgname, pg_get_triggerdef(oid) from pg_trigger "
    "where not tgisinternal",
    "select proname, pg_get_functiondef(oid) from pg_proc "
    "where pronamespace = 'dataflow'::regnamespace",
    "select relname, relkind::text, reloptions from pg_class "
    "where relnamespace = 'dataflow'::regnamespace",
]


def catalog(store: Store) -> dict[str, list[Any]]:
    """Return what the tables are: columns, types, defaults, constraints, indexes, triggers."""
    if store.db.dialect == "postgres":
        return {query: sorted(sql(store, query), key=repr) for query in CATALOG}
    found: dict[str, list[Any]] = {}
    for kind, name, text in sql(store, "select type, name, sql from sqlite_master"):
        if kind != "table":
            found[f"{kind} {name}"] = [_normal(text or "")]
            continue
        found[f"table {name}"] = [
            sql(store, f"pragma table_info({name})"),
            [row for row in sql(store, "pragma table_list") if row[1] == name],
            sorted(row[1:] for row in sql(store, f"pragma index_list({name})")),
            sorted(re.findall(r"check \([^)]*\)|autoincrement", _normal(text))),
        ]
    return found


def rows(store: Store) -> dict[str, list[dict[str, Any]]]:
    """Return every row of every table, and the next unused numbers."""
    names = "select name from sqlite_master where type = 'table'"
    if store.db.dialect == "postgres":
        names = "select tablename from pg_tables where schemaname = 'dataflow'"
    found = {}
    for (name,) in sql(store, names):
        cursor = _cursor(store, f"select * from {name}")
        columns = [column[0] for column in cursor.description]
        dicts = [dict(zip(columns, row, strict=True)) for row in cursor.fetchall()]
        found[name] = sorted(dicts, key=repr)
    if store.db.dialect == "postgres":
        for name in ("generation", "dataevent_seq_seq"):
            found[name] = [{"last": sql(store, f"select last_value, is_called from {name}")}]
    return found


def restore(url: str, version: int = 3) -> Store:
    """Tables that programs of an older version filled; and a store that isn't initialized."""
    store = open_store(url)
    script = (FROZEN / f"version_{version}.{store.db.dialect}.sql").read_text()
    run_script(url, script)
    return store


def run_script(url: str, script: str) -> None:
    """Run a script as psql or sqlite3 would."""
    if url.startswith("sqlite:///"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
        connection.executescript(script)
        connection.close()
    else:
        with psycopg.connect(url, autocommit=True) as person:
            person.execute(script)


def _cursor(store: Store, text: str) -> Any:
    sql(store, "select 1")
    person = vars(store)["person"]
    # Not prepared: an upgrade may give a table another column.
    return (
        person.execute(text)
        if store.db.dialect == "sqlite"
        else person.execute(text, prepare=False)
    )


def _normal(text: str) -> str:
    return " ".join(re.sub(r"--.*", "", text).lower().replace('"', "").split())
