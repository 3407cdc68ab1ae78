"""Chunks of pipelines that wait for no other: items that came over HTTP, and runs begun by hand."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from ..model import PENDING
from ..util.times import from_table
from .item_posts import ACCEPT, Accepted, Post, accept, links, unregistered
from .output_rows import Move, add_rows
from .store import Store

__all__ = [
    "Accepted",
    "Post",
    "accept",
    "backlog",
    "cleaned_away",
    "is_item",
    "item_status",
    "new_run",
    "payloads",
]


def payloads(store: Store, jobid: str, dataids: Sequence[str]) -> dict[str, str]:
    """The payloads of those chunks that are items and haven't been cleaned, by dataid."""
    return {dataid: text for dataid, text in _items(store, jobid, dataids) if text is not None}


def cleaned_away(store: Store, jobid: str, dataids: Sequence[str]) -> set[str]:
    """Those chunks that were items, and whose payload `odf history clean` has removed."""
    return {dataid for dataid, text in _items(store, jobid, dataids) if text is None}


def is_item(store: Store, jobid: str, dataid: str) -> bool:
    """Whether a chunk came over HTTP, be its payload there or cleaned away."""
    return bool(_items(store, jobid, [dataid]))


def item_status(store: Store, jobid: str, dataid: str) -> dict[str, Any] | None:
    """How a chunk of a pipeline stands: status, times, what it made or why and where it failed."""
    found, _ = store.db.insist(lambda: store.db.records("items.status", jobid=jobid, dataid=dataid))
    if not found:
        return None
    [row] = found
    return row | {name: from_table(store, row[name]) for name in ("received", "modified")}


def backlog(store: Store) -> list[dict[str, Any]]:
    """Of each job that takes items: how many wait and for how long, run, failed and are held."""
    db = store.db

    def work() -> list[dict[str, Any]]:
        rows = []
        for (jobid,) in db.run("items.jobs"):
            [(waiting, oldest)] = db.run("items.waiting", jobid=jobid)
            [(running,)] = db.run("items.running", jobid=jobid)
            [(failed,)] = db.run("items.failed", jobid=jobid)
            [(held,)] = db.run("items.held", jobid=jobid)
            rows.append(
                {
                    "jobid": jobid,
                    "waiting": waiting,
                    "oldest_seconds": max(0.0, float(oldest or 0)),
                    "running": running,
                    "failed": failed,
                    "held": held,
                }
            )
        return rows

    return db.insist(work)[0]


def new_run(store: Store, jobid: str) -> str:
    """Offer a new run of a job that waits for no other; its dataid is the moment, in milliseconds.

    No two runs on one dataset get the same, whichever processes begin them.
    """

    def work() -> str:
        with store.db.transaction(who="odf pipeline run", act=ACCEPT):
            return begin_run(store, jobid)

    return store.db.insist(work)[0]


def begin_run(store: Store, jobid: str) -> str:
    """What `new_run` does, as a part of the caller's transaction."""
    outputs = [datasetid for _, datasetid in links(store, [jobid])]
    if not outputs:
        raise unregistered(jobid)
    store.refuse_unclaimable(now=True)  # a run that can't be claimed isn't begun
    for datasetid in outputs:
        store.db.run("items.turn", datasetid=datasetid)
    moment = datetime.fromtimestamp(float(store.db.run("claims.now")[0][0]), UTC)
    named = json.dumps(outputs)
    while store.db.run("items.taken", dataid=_named(moment), datasetids=named):
        moment += timedelta(milliseconds=1)
    add_rows(store, [Move(jobid, each, _named(moment), None, PENDING) for each in outputs])
    return _named(moment)


def _items(store: Store, jobid: str, dataids: Sequence[str]) -> list[tuple[str, str | None]]:
    if not dataids:
        return []
    asked = json.dumps(list(dataids))
    return store.db.insist(lambda: store.db.run("items.payloads", jobid=jobid, dataids=asked))[0]


def _named(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H%M%S}.{moment.microsecond // 1000:03d}Z"
