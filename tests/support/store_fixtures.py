"""The two stores that every test of the tables runs on, and a person's connection to them."""

import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

import psycopg
import pytest

from opendataflow_dagster.location import keeps_versions
from opendataflow_dagster.model import Claim
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.store import Store

TABLES = (
    "dataset",
    "job",
    "datastatus",
    "jobpolicy",
    "claim",
    "chunkfact",
    "chunkrange",
    "pending",
    "fill",
    "dataevent",
    "dataflow_meta",
    "pipelinestep",
    "streamitem",
    "streamkey",
    "streamtoken",
    "streamfold",
    "csvfile",
    "csvpart",
    "registration",
    "origin",
    "domainname",
)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty database: the test runs once on each kind."""
    return request.getfixturevalue(f"{request.param}_url")


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """A store with its tables; on PostgreSQL they came with the copy, see `postgres_url`."""
    made = open_store(url)
    if made.db.dialect == "sqlite":
        made.init()
    yield made
    close(made)


def close(store: Store) -> None:
    """Close a store, and the connection of the person beside it."""
    store.close()
    if "person" in vars(store):
        vars(store).pop("person").close()


def connect(store: Store) -> Any:
    """A plain connection, as psql or sqlite3 would open it: without anything of ours."""
    if store.db.dialect == "sqlite":
        path = store.db.path  # type: ignore[attr-defined]
        return sqlite3.connect(path, timeout=60, isolation_level=None)
    return psycopg.connect(
        store.db.url,  # type: ignore[attr-defined]
        autocommit=True,
        prepare_threshold=None,  # nor does psql: an upgrade may change what `select *` gives
        options="-c search_path=dataflow -c application_name=psql",
    )


def sql(store: Store, text: str, **params: Any) -> list[tuple]:
    """Run a statement as a person would, by a connection of their own."""
    if "person" not in vars(store):
        vars(store)["person"] = connect(store)
    cursor = vars(store)["person"].execute(store.db.translate(text), params)
    return cursor.fetchall() if cursor.description else []


def register(
    store: Store, jobid: str, ins: Iterable[str] = (), outs: Iterable[str] = (), **environment: str
) -> None:
    """Register a job: what it reads, what it writes, and what it sets."""
    rows = [("IN", each, None) for each in ins] + [("OUT", each, None) for each in outs]
    rows += [(name, None, value) for name, value in environment.items()]
    for itemtype, datasetid, value in rows:
        sql(
            store,
            "insert into job (jobid, itemtype, datasetid, itemvalue) values (:j, :t, :d, :v)",
            j=jobid,
            t=itemtype,
            d=datasetid,
            v=value,
        )


def put(
    store: Store,
    datasetid: str,
    dataid: str,
    status: str | None = "READY",
    *,
    jobid: str = "loader",
    locktype: str | None = "OUT",
) -> None:
    """Write one row of datastatus over whatever is there."""
    sql(
        store,
        "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
        "values (:d, :j, :i, :l, :s) "
        "on conflict (datasetid, jobid, dataid) do update "
        "set locktype = excluded.locktype, status = excluded.status",
        d=datasetid,
        j=jobid,
        i=dataid,
        l=locktype,
        s=status,
    )


def policy(store: Store, jobid: str, **dials: Any) -> None:
    """Set dials of a job, and let this process see them at once."""
    sql(store, "insert into jobpolicy (jobid) values (:j) on conflict do nothing", j=jobid)
    for name, value in dials.items():
        sql(
            store,
            f"update jobpolicy set {name} = :value where jobid = :jobid",
            value=value,
            jobid=jobid,
        )
    store._plans.clear()


def take(store: Store, jobid: str, owner: str = "worker", **more: Any) -> list[Claim]:
    """Claim with the registrations of this moment, not of a second ago."""
    store._plans.clear()
    return store.claim(jobid, owner=owner, **more)


def expire(store: Store, claim: Claim | None = None) -> None:
    """Let a claim's lease, or all of them, have expired long ago."""
    if claim is None:
        sql(store, "update claim set lease_end = '2001-01-01 00:00:00' where owner is not null")
    else:
        sql(
            store,
            "update claim set lease_end = '2001-01-01 00:00:00' where jobid = :j and dataid = :d",
            j=claim.jobid,
            d=claim.dataid,
        )


def statuses(
    store: Store, dataid: str | None = None
) -> dict[tuple[str, str, str], tuple[str, str]]:
    """(datasetid, jobid, dataid) → (locktype, status) of every row."""
    rows = sql(store, "select datasetid, jobid, dataid, locktype, status from datastatus")
    return {row[:3]: row[3:] for row in rows if dataid in (None, row[2])}


def status(store: Store, datasetid: str, dataid: str, jobid: str) -> str | None:
    """The status of one row, or None."""
    return statuses(store).get((datasetid, jobid, dataid), (None, None))[1]


def everything(store: Store) -> dict[str, list[tuple]]:
    """Every row of every table."""
    return {table: sorted(sql(store, f"select * from {table}"), key=repr) for table in TABLES}


def pending(store: Store) -> dict[tuple[str, str], int]:
    """Return (jobid, dataid) → rank of what may be claimed by the triggers, without `today`."""
    rows = sql(
        store,
        "select jobid, dataid, rank from pending p where not exists ("
        "select 1 from job j "
        "where j.jobid = p.jobid and j.itemtype = 'IN' and j.datasetid = 'today')",
    )
    return {(jobid, dataid): rank for jobid, dataid, rank in rows}


def claimable(store: Store) -> dict[tuple[str, str], int]:
    """Return what `pending` has to be: the rules of a claim, from the tables alone."""
    jobs: dict[str, dict[str, set[str]]] = {}
    for jobid, itemtype, datasetid in sql(store, "select jobid, itemtype, datasetid from job"):
        if itemtype in ("IN", "OUT") and jobid is not None and datasetid is not None:
            jobs.setdefault(jobid, {"IN": set(), "OUT": set()})[itemtype].add(datasetid)
    chunks: dict[str, list[tuple]] = {}
    for row in sql(store, "select datasetid, jobid, dataid, locktype, status from datastatus"):
        chunks.setdefault(row[2], []).append(row)
    versioned = {
        row[0]
        for row in sql(store, "select datasetid, hostname, database, format from dataset")
        if keeps_versions(dict(zip(("hostname", "database", "format"), row[1:], strict=True)))
    }
    found = {}
    for jobid, items in jobs.items():
        if "today" not in items["IN"]:
            for dataid, rows in chunks.items():
                mine = [
                    row
                    for row in rows
                    if row[0] not in versioned or row[3] != "IN" or row[1] == jobid
                ]
                rank = _rank(jobid, items["IN"], items["OUT"], mine)
                if dataid and rank is not None:
                    found[jobid, dataid] = rank
    return found


def _rank(jobid: str, ins: set[str], outs: set[str], rows: list[tuple]) -> int | None:
    """0 or 1 when a job may claim the chunk that has these rows, in this order; else None."""
    again = ("RESUBMIT", "RERUN")
    if not outs or ins & outs:
        return None
    for datasetid in ins:
        made = [row[4] for row in rows if row[0] == datasetid and row[3] == "OUT"]
        if "READY" not in made or "RUNNING" in made:
            return None
    if any(
        row[0] in outs and row[3] == "OUT" and row[4] not in ("PENDING", *again) for row in rows
    ):
        return None
    making = {row[1] for row in rows if row[3] == "OUT" and row[4] == "RUNNING"}
    if any(
        row[0] in outs and row[3:] == ("IN", "RUNNING") and row[1] in making - {jobid}
        for row in rows
    ):
        return None  # somebody reads what would be made again
    own = [row for row in rows if row[1] == jobid]
    rank = 1
    if any(row[0] in outs and row[3] == "OUT" and row[4] in again for row in own):
        rank = 0
    for datasetid, _, _, locktype, word in own:
        if datasetid in ins and locktype == "IN":
            if word not in ("DONE", "FAILED", "ERROR", *again) or (word == "DONE" and rank):
                return None
        elif datasetid in ins and word not in again:
            return None  # the key of the IN row is taken by another lock of this job
        elif datasetid in outs and locktype != "OUT" and word not in ("PENDING", *again):
            return None  # the key of the OUT row is
    if not ins and not any(row[0] in outs and row[3] == "OUT" for row in own):
        return None
    return rank


def replayed(store: Store) -> dict[tuple[str, str, str], tuple[str, str]]:
    """Return what datastatus must have, given its whole history; rows without a status aside."""
    rows: dict[tuple[str, str, str], tuple[str, str]] = {}
    for *key, locktype, after in sql(
        store, "select datasetid, jobid, dataid, locktype, status_after from dataevent order by seq"
    ):
        where = (key[0], key[1], key[2])
        if after is not None:
            rows[where] = (locktype, after)
        elif rows.get(where, (locktype,))[0] == locktype:
            rows.pop(where, None)
    return rows


def check(store: Store) -> None:
    """What holds after any change, by anybody: the queue is right and history is complete.

    While a job is in `fill`, its part of the queue may lack chunks, and have some that are stale.
    """
    queued = {jobid for (jobid,) in sql(store, "select jobid from fill")}
    waiting, right = pending(store), claimable(store)
    for jobid, dataid in waiting.keys() | right.keys():
        if jobid not in queued:
            key = (jobid, dataid)
            assert (key, waiting.get(key)) == (key, right.get(key))
    assert replayed(store) == {
        key: row for key, row in statuses(store).items() if row[1] is not None
    }
    named = "case tablename when 'dataset' then datasetid else jobid end is not null"
    assert not sql(store, f"select * from unrecorded where {named}")
