"""What happened: events of chunks, changes of registrations, and the steps of pipelines."""

import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from ..errors import WrongUse
from ..model import FAILED, RUNNING, WORDS, Plan, check_id
from ..util.text import tidy
from ..util.times import from_table, to_table
from .store import Store

LISTED_ROWS = 20
"""Rows of a listing by default: as many as in the original's `runs`."""

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
"""The columns of a listing of runs."""

LATE_SECONDS = 30
"""Seconds that a change may wait for older transactions before that is reported."""

_CURSOR = {
    "postgres": re.compile(r"(\d{1,19}):(\d{1,18})(?:@(\d{1,9}))?", re.ASCII),
    "sqlite": re.compile(r"(\d{1,18})", re.ASCII),
}


class Event(NamedTuple):
    """One change of a status. No status before: the row is new; none after: it was deleted."""

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
    """The version of the code that produced the READY chunk, if the listing wants it."""
    execution: str | None = None
    """What made the change of an output, such as one `odf run`."""


class LostCursor(WrongUse):
    """The log was replaced or renumbered since this cursor was returned: read it again."""


def events_after(store: Store, cursor: str | None, limit: int = 1000) -> tuple[list[Event], str]:
    """The next changes after a cursor (None: from the beginning), and the cursor after them.

    Each change comes exactly once, also one whose transaction commits late: on PostgreSQL a change
    waits until every older transaction has ended. They come in the order of transactions; of the
    changes of one chunk, `seq` tells the true order, so believe the highest.
    """
    place = _parse(store, cursor)
    if store.db.dialect == "sqlite":
        rows = store.db.run("history.after", seq=place[0], limit=limit)
        if not rows and store.db.run("history.end")[0][0] < place[0]:
            raise _lost(cursor)
        return [_event(store, row) for row in rows], str(rows[-1][0] if rows else place[0])

    [(_, newest, epoch)] = store.db.run("history.end")
    if cursor is not None and (place[2] != int(epoch) or place[0] > int(newest)):
        raise _lost(cursor)
    rows = store.db.run("history.after", xid=str(place[0]), seq=place[1], limit=limit)
    if len(rows) < limit and store.db.run("history.restored") == [(True,)]:
        raise WrongUse(
            f"The history in {store.db.where} was restored from a server with other "
            "transaction numbers, so new changes can't be told from old ones. "
            "Run `odf init` to repair it."
        )
    xid, seq = (rows[-1][-1], rows[-1][0]) if rows else place[:2]
    return [_event(store, row[:-1]) for row in rows], _cursor(xid, seq, epoch)


def _lost(cursor: str | None) -> LostCursor:
    return LostCursor(
        f"The cursor {cursor!r} is of another log: since then, the tables were restored from a "
        "backup or from another server. Read the log again from its beginning, without a cursor."
    )


def end_of_log(store: Store) -> str:
    """A cursor after everything that is settled now."""
    [found] = store.db.run("history.end")
    return str(found[0]) if store.db.dialect == "sqlite" else _cursor(found[0], 0, found[2])


def unread(store: Store, seconds: int = LATE_SECONDS) -> str:
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
    limit: int = LISTED_ROWS,
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
        "words": words_text(statuses),
    }


def words_text(statuses: Collection[str]) -> str | None:
    """The words of some statuses as a parameter; None takes all."""
    words = words_of(statuses)
    return json.dumps(words) if words else None


def runs(
    store: Store, *, jobid: str | None = None, limit: int = LISTED_ROWS
) -> list[dict[str, Any]]:
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
        "words": words_text(statuses),
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
            "Pass the cursor that the last call returned, or none to start from the beginning."
        )
    numbers = [int(part or 0) for part in found.groups()] + [0, 0]
    return numbers[0], numbers[1], numbers[2]


def _cursor(xid: Any, seq: Any, epoch: str) -> str:
    return f"{xid}:{seq}" + (f"@{epoch}" if epoch != "0" else "")


# What was registered at a moment in the past, and how that changed: places, jobs and dials.


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
        """What a job reads, writes and sets; for the past, without other writers of the same."""
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
    return [change for change in changes if since is None or (change.at and change.at >= since)]


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
        None if version is None else _columns(tablename, itemtype, version[7])
        for version in (gone, come)
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
    pairs = [
        f"{key}={columns[key]}" if key else str(columns[key]) for key in keys if key in columns
    ]
    return " ".join(pairs) if columns else REGISTERED


# --- the steps of pipelines: told for people, never asked by a claim ---


MAX_OUTPUT_BYTES = 64 * 1024
"""Bytes that are kept of what a step printed, and of its traceback."""

CLEANED_PAGE_ROWS = 5000
"""Rows that one transaction of a cleaning looks at."""

KEY_LIFETIME = timedelta(days=1)
"""How long an idempotency key is remembered at least: a client may still repeat itself."""


class Step(NamedTuple):
    """One transformation in one run; times are seconds since 1970, by the database's clock."""

    jobid: str
    dataid: str
    generation: int
    step: int
    transformation: str
    status: str
    started: float | None = None
    ended: float | None = None
    rows: int | None = None
    stdout: str | None = None
    traceback: str | None = None
    reason: str | None = None


class Cleaned(NamedTuple):
    """How much went, or would go: steps, payloads of items, and keys."""

    steps: int
    items: int
    keys: int


def record(store: Store, steps: Sequence[Step]) -> None:
    """Write steps over what was known of them; a start that is left out stays as it was."""
    if not steps:
        return
    last: dict[tuple, Step] = {}
    for step in steps:
        earlier = last.get(step[:4])
        began = step.started if step.started is not None or not earlier else earlier.started
        last[step[:4]] = step._replace(
            started=began,
            stdout=excerpt(step.stdout),
            traceback=excerpt(step.traceback),
            reason=None if step.reason is None else tidy(step.reason),
        )
    ended = json.dumps([step._asdict() for step in last.values()])
    store.db.insist(lambda: store.db.change("steps.record", steps=ended))


def steps(
    store: Store, jobid: str, dataid: str | None = None, limit: int = LISTED_ROWS
) -> list[dict[str, Any]]:
    """The steps of a pipeline's newest runs, or of one chunk's, the newest run first.

    A run that ended otherwise than READY, though no step of it failed, has a last row without a
    transformation, which tells why.
    """
    check_id("pipeline", jobid)
    if limit < 1:
        raise WrongUse("--limit must be at least 1.")
    with store.db.reading():
        if dataid is None:
            runs = store.db.records("steps.runs_of_job", jobid=jobid, limit=limit)
        else:
            runs = store.db.records("steps.runs_of_chunk", jobid=jobid, dataid=dataid, limit=limit)
        rows = [row for run in runs for row in _of_run(store, {"jobid": jobid} | run)]
    return [
        row | {name: from_table(store, row[name]) for name in ("started", "ended")} for row in rows
    ]


def clean(
    store: Store, jobid: str | None = None, days_old: float | None = None, plan: bool = False
) -> Cleaned:
    """Remove run history and payloads that are older than so many days; a plan only counts.

    Steps go of runs that are over. Payloads go of items that are READY, or whose run was deleted:
    any other could be run again. Keys go after their items, a day old at least.
    """
    if days_old is not None and not 0 <= days_old <= 36500:
        raise WrongUse("--days-old must be between 0 and 36500.")
    now = datetime.fromtimestamp(store.now(), UTC)
    before = now + timedelta(days=1) if days_old is None else now - timedelta(days=days_old)
    known = {"jobid": jobid, "before": to_table(store, before)}
    forgotten = to_table(store, min(before, now - KEY_LIFETIME))
    if plan:
        counts, _ = store.db.insist(lambda: _counted(store, known, forgotten))
        return counts
    keys = {"jobid": jobid, "forgotten": forgotten}
    return Cleaned(
        _paged(store, "steps", {"_job": "", "_number": -1, "": ""}, known),
        _paged(store, "items", {"_job": "", "": ""}, known),
        _paged(store, "keys", {"_job": "", "": ""}, keys),
    )


def excerpt(text: str | None) -> str | None:
    """A text as every database keeps it: without NUL; of a long one the beginning and the end."""
    if text is None:
        return None
    raw = text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace")
    if len(raw) <= MAX_OUTPUT_BYTES:
        return raw.decode()
    note = f"\n… {len(raw) - MAX_OUTPUT_BYTES} bytes left out …\n".encode()
    half = (MAX_OUTPUT_BYTES - len(note)) // 2
    return (raw[:half] + note + raw[-half:]).decode("utf-8", "ignore")


def _of_run(store: Store, run: dict[str, Any]) -> list[dict[str, Any]]:
    rows = store.db.records("steps.of_run", **run)
    if any(row["status"] == FAILED for row in rows):
        return rows
    for end in store.db.records("steps.end_of_run", **run):
        begun = [row for row in rows if row["status"] == RUNNING]
        for row in begun:  # its process ended with it
            row.update(end | {"status": FAILED})
        if not begun:
            rows.append(dict.fromkeys(Step._fields) | run | {"step": len(rows) + 1} | end)
    return rows


def _counted(store: Store, known: dict[str, Any], forgotten: Any) -> Cleaned:
    db = store.db
    with db.reading():
        return Cleaned(
            db.run("steps.count_steps", **known)[0][0],
            db.run("steps.count_items", **known)[0][0],
            db.run("steps.count_keys", forgotten=forgotten, **known)[0][0],
        )


def _paged(store: Store, what: str, key: dict[str, Any], known: dict[str, Any]) -> int:
    """Remove page by page, so that workers never wait for long; how many rows went.

    The `key` is that of before the first row: each part by its name in the statements.
    """
    db, removed, jobid = store.db, 0, known["jobid"]
    while True:
        first = {f"first{name}": value for name, value in key.items()}
        found, _ = db.insist(
            lambda first=first: db.run(
                f"steps.page_of_{what}", jobid=jobid, size=CLEANED_PAGE_ROWS, **first
            )
        )
        end = dict(zip(key, found[0], strict=True)) if found else key
        page = known | first | {f"last{name}": value for name, value in end.items()}
        page["last_page"] = not found
        removed += db.insist(lambda page=page: db.change(f"steps.remove_{what}", **page))[0]
        if not found:
            return removed
        key = end
