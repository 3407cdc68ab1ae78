"""What each transformation of a pipeline's run did: told for people, never asked by a claim."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from ..errors import WrongUse
from ..ids import check_id
from ..model import FAILED, READY, RUNNING
from ..util.text import tidy
from ..util.times import from_table, to_table
from .history import LISTED_ROWS
from .store import Store

__all__ = [
    "FAILED",
    "READY",
    "RUNNING",
    "Cleaned",
    "Step",
    "clean",
    "excerpt",
    "record",
    "steps",
]

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
        raise WrongUse("--limit is at least 1.")
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
        raise WrongUse("--days-old is between 0 and 36500.")
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
