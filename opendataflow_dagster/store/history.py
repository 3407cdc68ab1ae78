"""What happened, from the log that the triggers write: listings, and a cursor without gaps."""

import json
import re
from collections.abc import Collection, Iterator
from contextlib import closing
from datetime import datetime
from typing import Any, NamedTuple

from ..errors import WrongUse
from ..model import WORDS
from ..util.times import from_table, to_table
from .store import Store

NEWEST = 20
"""Rows of a listing, unless told otherwise: as many as the original's `runs`."""

RUNS = (
    "datasetid",
    "jobid",
    "dataid",
    "locktype",
    "status",
    "modified",
    "generation",
    "attempts",
    "owner",
)
"""What a listing of runs tells."""

LATE = 30
"""Seconds that a change may wait for older transactions before that is reported."""

_CURSOR = {
    "postgres": re.compile(r"(\d{1,19}):(\d{1,18})(?:@(\d{1,9}))?", re.ASCII),
    "sqlite": re.compile(r"(\d{1,18})", re.ASCII),
}


class Event(NamedTuple):
    """One change of a status. No status before: the row is new; none after: it's gone."""

    seq: int
    at: datetime | None
    datasetid: str
    jobid: str
    dataid: str
    locktype: str
    status_before: str | None
    status_after: str | None
    generation: int | None
    who: str | None
    why: str | None
    code: str | None = None
    """Which code made the chunk that became READY, where a listing asks for it."""


class LostCursor(WrongUse):
    """The log was renumbered since this cursor was given out: read it again from its beginning."""


def events_after(store: Store, cursor: str | None, limit: int = 1000) -> tuple[list[Event], str]:
    """The next changes after a cursor (None: from the beginning), and the cursor after them.

    Each change comes exactly once, also one whose transaction commits late: on PostgreSQL a change
    waits until every older transaction has ended. They come in the order of transactions; of the
    changes of one chunk, `seq` tells the true order, so believe the highest.
    """
    place = _parse(store, cursor)
    if store.db.dialect == "sqlite":
        rows = store.db.run("history.after", seq=place[0], limit=limit)
        return [_event(store, row) for row in rows], str(rows[-1][0] if rows else place[0])

    [(_, newest, epoch)] = store.db.run("history.end")
    if cursor is not None and (place[2] != int(epoch) or place[0] > int(newest)):
        raise LostCursor(
            f"The cursor {cursor!r} is of a log that was restored from another server since. "
            "Read the log again from its beginning, without a cursor."
        )
    rows = store.db.run("history.after", xid=str(place[0]), seq=place[1], limit=limit)
    if len(rows) < limit and store.db.run("history.restored") == [(True,)]:
        raise WrongUse(
            f"The history in {store.db.where} was restored from another server, which numbered "
            "its transactions otherwise, so new changes can't be told from old ones. "
            "Run `odf init` to mend it."
        )
    xid, seq = (rows[-1][-1], rows[-1][0]) if rows else place[:2]
    return [_event(store, row[:-1]) for row in rows], _cursor(xid, seq, epoch)


def end_of_log(store: Store) -> str:
    """A cursor after everything that is settled now."""
    [found] = store.db.run("history.end")
    return str(found[0]) if store.db.dialect == "sqlite" else _cursor(found[0], 0, found[2])


def unread(store: Store, seconds: int = LATE) -> str:
    """What keeps readers of the log from changes that are older than `seconds`; '' if nothing does.

    On PostgreSQL a change is read after every older transaction that writes has ended, in all
    databases of the server.
    """
    if store.db.dialect == "sqlite":
        return ""
    for age, xid in store.db.run("history.waiting"):
        if age >= seconds:
            who = [name for (name,) in store.db.run("history.blocker", xid=xid)]
            return (
                f"Changes of the last {age} s can't be read from the history yet: an older "
                f"transaction ({xid}) is still open on the server, by "
                f"{who[0] if who else 'another user (only a superuser sees which)'}."
            )
    return ""


def history(
    store: Store,
    *,
    jobid: str | None = None,
    dataid: str | None = None,
    datasetid: str | None = None,
    since: datetime | None = None,
    statuses: Collection[str] = (),
    limit: int = NEWEST,
) -> list[Event]:
    """The newest changes that match, the newest last; `statuses` are what chunks became."""
    chosen = _chosen(store, jobid, dataid, datasetid, since, statuses)
    with store.db.reading():
        rows = store.db.run("history.listing", **chosen, limit=limit)
    return sorted((_event(store, row) for row in rows), key=lambda event: event.seq)


def whole_history(
    store: Store,
    *,
    jobid: str | None = None,
    dataid: str | None = None,
    datasetid: str | None = None,
    since: datetime | None = None,
    statuses: Collection[str] = (),
) -> Iterator[Event]:
    """All changes that match, one by one, the newest last."""
    chosen = _chosen(store, jobid, dataid, datasetid, since, statuses)
    with store.db.reading(), closing(store.db.stream("history.whole", **chosen)) as rows:
        for row in rows:
            yield _event(store, row)


def words_of(statuses: Collection[str]) -> list[str]:
    """The words in the tables that are read as one of these statuses."""
    return [word for word, read in WORDS.items() if read in statuses]


def _chosen(
    store: Store,
    jobid: str | None,
    dataid: str | None,
    datasetid: str | None,
    since: datetime | None,
    statuses: Collection[str],
) -> dict[str, Any]:
    return {
        "jobid": jobid,
        "dataid": dataid,
        "datasetid": datasetid,
        "since": to_table(store, since),
        "words": _words(statuses),
    }


def _words(statuses: Collection[str]) -> str | None:
    """The words of some statuses as a parameter; None takes all."""
    words = words_of(statuses)
    return json.dumps(words) if words else None


def runs(store: Store, *, jobid: str | None = None, limit: int = NEWEST) -> list[dict[str, Any]]:
    """The outputs that changed last, the newest first: the original's `runs`."""
    return list(whole_runs(store, jobid=jobid, limit=limit))


def whole_runs(
    store: Store,
    *,
    jobid: str | None = None,
    statuses: Collection[str] = (),
    since: datetime | None = None,
    limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The outputs that match, one by one, those that changed last first.

    Args:
        jobid: The job; None takes all.
        statuses: Only those that are read as one of these.
        since: Only those that changed since then.
        limit: At most so many; None reads on to the end.
    """
    chosen = {
        "jobid": jobid,
        "words": _words(statuses),
        "since": to_table(store, since),
        "limit": limit,
    }
    with store.db.reading(), closing(store.db.stream("history.runs", **chosen)) as rows:
        for row in rows:
            found = dict(zip(RUNS, row, strict=True))
            yield found | {"modified": from_table(store, found["modified"])}


def _event(store: Store, row: tuple) -> Event:
    return Event(row[0], from_table(store, row[1]), *row[2:])


def _parse(store: Store, cursor: str | None) -> tuple[int, int, int]:
    if cursor is None:
        return 0, 0, 0
    found = _CURSOR[store.db.dialect].fullmatch(cursor)
    if not found:
        raise WrongUse(
            f"{cursor[:60]!r} isn't a cursor into the history in {store.db.where}. "
            "Pass on the one that was returned, or none to begin at the beginning."
        )
    numbers = [int(part or 0) for part in found.groups()] + [0, 0]
    return numbers[0], numbers[1], numbers[2]


def _cursor(xid: Any, seq: Any, epoch: str) -> str:
    return f"{xid}:{seq}" + (f"@{epoch}" if epoch != "0" else "")
