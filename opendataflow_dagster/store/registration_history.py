"""What was registered at a moment in the past, and how that changed: places, jobs and dials."""

import json
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple

from ..model import Plan
from ..util.times import from_table, to_table
from .history import Event
from .store import Store

REGISTERED = "registered"
"""What history says of a dataset that a job reads or writes."""


class Registered(NamedTuple):
    """A row of `dataset`, `job` or `jobpolicy` as it was."""

    tablename: str
    jobid: str | None
    datasetid: str | None
    itemtype: str | None
    columns: dict[str, Any]


class Registration:
    """What is registered now or, with `at`, was at a moment in the past."""

    def __init__(self, store: Store, at: datetime | None = None) -> None:
        self._store = store
        self._at = to_table(store, at)

    def datasets(self, datasetid: str) -> list[dict[str, Any]]:
        """The rows of a dataset."""
        if self._at is None:
            return self._store.db.records("state.dataset", datasetid=datasetid)
        return [row.columns for row in self._rows("dataset", datasetid=datasetid)]

    def producers(self, datasetid: str) -> list[str]:
        """The jobs that write a dataset."""
        if self._at is None:
            now = self._store.db.run("state.producers", datasetid=datasetid)
            return [jobid for (jobid,) in now]
        rows = self._rows("job", datasetid=datasetid)
        return sorted({row.jobid for row in rows if row.jobid and row.itemtype == "OUT"})

    def plan(self, jobid: str) -> Plan:
        """What a job reads, writes and sets; of the past, not who else wrote the same."""
        if self._at is None:
            return self._store.read_plan(jobid)
        rows = self._rows("job", jobid=jobid)
        return Plan.of_rows(
            jobid, [(row.itemtype, row.datasetid, row.columns.get("itemvalue")) for row in rows]
        )

    def dials(self, jobid: str) -> tuple[int | None, datetime | None]:
        """How many chunks of a job might run at once in the past, and until when it was paused."""
        for row in self._rows("jobpolicy", jobid=jobid):
            concurrency, until = (row.columns.get(key) for key in ("concurrency", "paused_until"))
            return None if concurrency is None else int(concurrency), from_table(self._store, until)
        return None, None

    def unknown_until(self) -> datetime | None:
        """When history began to know of what was registered before, if that was later."""
        [(since,)] = self._store.db.run("past.found", at=self._at)
        return from_table(self._store, since)

    def _rows(
        self, tablename: str, *, jobid: str | None = None, datasetid: str | None = None
    ) -> list[Registered]:
        rows = self._store.db.run(
            "past.then", tablename=tablename, jobid=jobid, datasetid=datasetid, at=self._at
        )
        return [
            Registered(table, job, dataset, itemtype, json.loads(content))
            for table, job, dataset, itemtype, content in rows
        ]


def registrations(
    store: Store,
    *,
    jobid: str | None = None,
    datasetid: str | None = None,
    since: datetime | None = None,
) -> list[Event]:
    """How a job's or a dataset's registration changed, the newest last.

    As an event: `locktype` tells what changed ("dataset", "dials", "IN", "OUT" or a variable), and
    the two statuses what of it was before and after.
    """
    with store.db.reading():
        rows = store.db.run("past.changes", jobid=jobid, datasetid=datasetid)
    changes = [_change(store, gone, come) for gone, come in _at_once(rows)]
    return [each for each in changes if since is None or (each.at and each.at >= since)]


def in_time(registered: Iterable[Event], events: Iterable[Event]) -> Iterator[Event]:
    """Changes of registrations among the others, by their times."""
    waiting = deque(registered)
    for event in events:
        while waiting and waiting[0].at and event.at and waiting[0].at <= event.at:
            yield waiting.popleft()
        yield event
    yield from waiting


def _at_once(rows: Iterable[tuple]) -> Iterator[tuple[tuple | None, tuple | None]]:
    """What went together with what came in its place, if anything did."""
    gone: tuple | None = None
    for row in rows:
        if gone and (row[6] < 0 or row[1:6] != gone[1:6]):
            yield gone, None
            gone = None
        if row[6] < 0:
            gone = row
        else:
            yield gone, row
            gone = None
    if gone:
        yield gone, None


def _change(store: Store, gone: tuple | None, come: tuple | None) -> Event:
    row = come or gone
    assert row is not None
    seq, at, tablename, jobid, datasetid, itemtype, _, _, _, who, why = row
    before, after = (
        None if each is None else _columns(tablename, itemtype, each[7]) for each in (gone, come)
    )
    differing = sorted(
        key
        for key in {**(before or {}), **(after or {})}
        if before is None or after is None or before.get(key) != after.get(key)
    )
    what = {"dataset": "dataset", "jobpolicy": "dials"}.get(tablename) or itemtype or ""
    return Event(
        seq,
        from_table(store, at),
        datasetid,
        jobid,
        "",
        what,
        _text(before, differing),
        _text(after, differing),
        None,
        who,
        why,
    )


def _columns(tablename: str, itemtype: str, content: str) -> dict[str, Any]:
    columns = json.loads(content)
    if tablename != "job":
        return columns
    return {"": REGISTERED if itemtype in ("IN", "OUT") else columns.get("itemvalue", "")}


def _text(columns: dict[str, Any] | None, keys: Iterable[str]) -> str | None:
    if columns is None:
        return None
    told = [f"{key}={columns[key]}" if key else str(columns[key]) for key in keys if key in columns]
    return " ".join(told) if columns else REGISTERED
