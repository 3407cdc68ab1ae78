"""Writes version_3.sqlite.sql and version_3.postgres.sql: tables as version 3 left them.

It ran once, with the program of commit cff109c before all others on the path:

git worktree add V3 cff109c && PYTHONPATH=V3 python tests/frozen/make_version_3.py
"""

import sqlite3
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from opendataflow_dagster.dataflow import moves, steps, tokens
from opendataflow_dagster.dataflow.accepting import Post, accept
from opendataflow_dagster.dataflow.forcing import force
from opendataflow_dagster.dataflow.items import new_run
from opendataflow_dagster.dataflow.model import Fact
from opendataflow_dagster.dataflow.registry import (
    add_dataset,
    add_job,
    set_policy,
)
from opendataflow_dagster.dataflow.store import Store, open_store
from tests.java import Java
from tests.postgres import Server

HERE = Path(__file__).resolve().parent

ODD = """
insert into dataset (datasetid, hostname, encryptedpass) values
    ('bobin', 'again', 'ZpLfE+uTYE2mdmjOPrukol3yu+cpAHBnmL6trHa9PHGj'),
    (null, 'x', null), ('', '', ''),
    ('"quoted" ''twice'' %s :jobid; --', null, null);
insert into job (jobid, itemtype, datasetid, itemvalue, modified) values
    ('loadbob', 'IN', 'bobin', null, '2019-05-05 00:00:00'), (null, 'IN', 'bobin', null, null),
    ('half', 'OUT', null, null, null), ('half', null, 'bobin', null, null),
    ('half', 'in', 'bobin', null, null);
insert into datastatus (datasetid, jobid, dataid, locktype, status, modified) values
    ('bobin', 'other', '10', 'OUT', 'READY', null), ('', '', '', '', '', null),
    ('bobin', 'hand', '', 'OUT', 'READY', null), ('bobin', 'hand', 'odd', null, null, null),
    ('bobin', 'hand', 'none', 'OUT', null, null),
    ('bobout', 'loadbob', 'lower', 'out', 'ready', null),
    ('bobin', 'hand', 'word', 'OUT', 'ARCHIVED', '1969-01-01 00:00:00'),
    ('bobin', 'hand', 'line
break é 日本', 'OUT', 'READY', null),
    ('bobin', 'loadbob', 'done', 'IN', 'DONE', null),
    ('bobin', 'hand', 'done', 'OUT', 'READY', null),
    ('bobin', 'loadbob', 'gone', 'IN', 'RUNNING', '2020-01-01 00:00:00'),
    ('bobin', 'loadbob', 'orphan', 'IN', 'RUNNING', '2020-01-01 00:00:00'),
    ('bobin', 'hand', 'orphan', 'OUT', 'READY', null),
    ('bobout', 'loadbob', 'orphan', 'OUT', 'RUNNING', '2020-01-01 00:00:00');
"""
"""What people and the Java program left, orphaned IN rows among it."""

FOREVER = 1_000_000_000
"""Seconds of a lease that outlasts this repository."""


def fill(store: Store, sql: Any) -> None:
    """All that a program of version 3 keeps, by that program."""
    assert not hasattr(store, "version"), "this is another program than version 3's"
    store.init()
    add_dataset(store, "bobin", hostname="h", chunkcolumn="day", domain="d")
    for datasetid in ("bobout", "sums", "packed", "runs"):
        add_dataset(store, datasetid, format="parquet", writemode="append")
    add_job(store, "loadbob", inputs=["bobin"], outputs=["bobout"], environment={"MODE": "full"})
    add_job(store, "sums", inputs=["bobout"], outputs=["sums", "packed"])
    add_job(store, "items", outputs=["runs"])
    sql(ODD)
    set_policy(store, "loadbob", {"max_attempts": "3", "retry_delay": "1000000000"})
    set_policy(store, "loadbob", {"lease_seconds": str(FOREVER), "concurrency": "9"})
    set_policy(store, "items", {"every_minutes": "60", "lease_seconds": str(FOREVER)})
    moves.ready(store, "bobin", [str(n) for n in range(1, 13)], who="hand", why="a load")
    claims = store.claim("loadbob", owner="worker of 3", runid="run-1", k=5)
    store.finish(claims[0], [Fact("bobout", claims[0].dataid, rows=3, schema="n:bigint")])
    store.finish(claims[1])
    store.fail(claims[2], "it failed, and is tried later")
    store.fail(claims[3], "it failed for good", may_retry=False)
    force(store, "loadbob", "9", owner="forced of 3")
    made = store.claim("sums", owner="worker of 3", k=2)
    at = "/data/packed/_packs/pack-0123abcd.parquet#dataid="
    facts = [Fact("packed", claim.dataid, at + claim.dataid, rows=1, bytes=9) for claim in made]
    store.finish(made, facts)
    moves.hold(store, "loadbob", ["11"], who="hand", why="wait")
    moves.resubmit(store, "sums", [made[0].dataid], who="hand")
    posts = [Post("items", ('{"n": 1}', '{"n": 2}'), "key-1"), Post("items", ('{"n": 3}',))]
    accept(store, posts)
    [item] = store.claim("items", owner="items of 3")
    new_run(store, "items")
    tokens.new_token(store, "items")
    step = steps.Step("items", item.dataid, item.generation, 0, "tidy", "READY")
    steps.record(store, [step._replace(stdout="printed\n", rows=1)])
    sql(
        "insert into chunkrange (datasetid, dataid, lower_bound, upper_bound, modulus) "
        "values ('bobin', '1', '2024-01-01', '2024-02-01', null), ('bobin', '2', '0', null, 7)"
    )
    sql(
        "insert into worker (owner, runid, jobid, started, heartbeat, lease_end) values "
        "('worker of 3', 'run-1', 'loadbob', '2024-01-01', '2024-01-01', '2099-01-01 00:00:00')"
    )
    sql("insert into claim (jobid, dataid, generation, attempts) values ('gone', 'x', 1, 2)")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/dataflow.db"
        connection = sqlite3.connect(path, isolation_level=None)
        fill(open_store(f"sqlite:///{path}"), connection.executescript)
        (HERE / "version_3.sqlite.sql").write_text("\n".join(connection.iterdump()) + "\n")
    with Server() as server:
        url = server.create_database("frozen")
        options = "-c search_path=dataflow -c application_name=psql"
        with psycopg.connect(url, autocommit=True, options=options) as person:
            fill(open_store(url), person.execute)
            java = Java(url)
            java.claim("loadbob")  # and nobody ends it
            java.close()
            # In another server this one's transactions would be of the future.
            person.execute("update dataevent set xid = '3'")
        line = [str(server.bin / "pg_dump"), "--schema=dataflow", "--inserts", "--no-owner", url]
        dump = subprocess.run(line, capture_output=True, text=True, check=True).stdout
        kept = [row for row in dump.splitlines() if not row.startswith(("\\", "--")) and row]
        (HERE / "version_3.postgres.sql").write_text("\n".join(kept) + "\n")


if __name__ == "__main__":
    main()
