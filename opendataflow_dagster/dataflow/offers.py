"""What a job could do now, at a price that doesn't grow with the tables."""

from collections import Counter
from typing import NamedTuple

from .model import HOLD, PENDING, READY, RESUBMIT, RUNNING, Effect, read_status
from .names import typed
from .store import Store
from .times import from_table, shown

MOST = 1000
"""Up to how many claimable chunks are counted."""

NOTHING = "nothing claimable"

GLANCE = 5_000
"""Rows of a job's datasets up to which all of its chunks are judged when none is claimable."""

LAST = 10
"""Chunks that are judged of a larger job: so many that changed last, and so many that failed."""

BLOCKED = {
    Effect.HELD: "FAILED or on HOLD",
    Effect.LOCKED: "being made or read",
    Effect.DATA_NOT_READY: "waiting for inputs",
    "": "not in the queue",
}
"""What keeps chunks from being claimed, in a few words."""


class Offer(NamedTuple):
    """The chunks that a job may claim, the first of them, and what its dials allow."""

    jobid: str
    claimable: int = 0
    first: str | None = None
    event: int = 0
    """The last change of the first chunk: another one tells that something was done."""
    concurrency: int | None = None
    free: int | None = None
    """How many more claims the job's concurrency allows; None is no limit."""
    every_minutes: int | None = None
    obstacle: str = ""
    """What keeps the job from claiming, for a person; nothing if it may."""


def offer(store: Store, jobid: str, *, most: int = MOST) -> Offer:
    """What a job may claim now. It is a look, not a claim: others may be faster."""
    plan = store.plan(jobid)
    if plan.flaw:
        return Offer(jobid, obstacle=plan.flaw)
    today = store.today() if plan.today else None
    rows, _ = store.db.insist(
        lambda: store.db.run("offers.offer", jobid=jobid, only=today, most=most)
    )
    [(paused_until, every_minutes, concurrency, live, claimable, first)] = rows
    nothing = NOTHING
    if first is None and today is not None:
        words = _made(store, jobid, today)
        nothing = _unmade(today, words)
        # Nobody has judged today's chunk of a job that reads nothing else.
        if not plan.reads and words <= {PENDING, RESUBMIT}:
            claimable, first = 1, today
    free = None if concurrency is None else max(0, concurrency - live)
    if error := store.db.insist(store.unclaimable)[0]:
        obstacle = str(error)
    elif paused_until is not None:
        obstacle = f"paused until {shown(from_table(store, paused_until))}"
    elif first is None:
        obstacle = nothing
    elif free == 0:
        obstacle = f"{_counted(claimable, most)}, at its concurrency of {concurrency}"
    else:
        obstacle = ""
    event = 0 if first is None else newest(store, jobid, first)
    return Offer(jobid, claimable, first, event, concurrency, free, every_minutes, obstacle)


def why_nothing(store: Store, jobid: str) -> str:
    """Why a job has nothing to claim, in a few words: all is done, or what blocks how many chunks.

    It costs the same with any number of chunks.
    """
    found = offer(store, jobid)
    more = f"`odf why {typed(jobid)}` tells more"
    if found.obstacle not in ("", NOTHING):
        return f"{found.obstacle}; {more}"
    if not found.obstacle:
        return f"{told(found)} by now"
    counts, is_whole = store.db.insist(lambda: _codes(store, jobid))[0]
    done = counts[Effect.ALREADY_DONE]
    parts = [f"{counts[code]} {words}" for code, words in BLOCKED.items() if counts[code]]
    if parts:
        parts += [f"{done} done"] if done else []
        looked = "" if is_whole else f", of the {counts.total()} chunks that were looked at"
        return f"blocked: {', '.join(parts)}{looked}; {more}"
    if not done:
        return f"{'no chunk is known yet' if is_whole else 'no chunk changed lately'}; {more}"
    if not is_whole:
        return f"the {done} chunks that changed last are done; `odf status {typed(jobid)}` has all"
    return f"all done ({done} chunk{'s' * (done > 1)})"


def _codes(store: Store, jobid: str) -> tuple[Counter[str], bool]:
    """How many chunks of a job have which code of `odf why`; and whether these are all."""
    from .why import explain_chunk  # imported late: who has something to do needs none of it
    from .whyjob import judge_chunks

    counts: Counter[str] = Counter()
    with store.db.reading():
        if store.db.run("why.size", jobid=jobid, now=1, most=GLANCE + 1) <= [(GLANCE,)]:
            rows = judge_chunks(store, store.read_plan(jobid))
            counts.update({code: chunks for code, chunks, _ in rows})
            return counts, True
        for (dataid,) in store.db.run("offers.some", jobid=jobid, last=LAST):
            counts[explain_chunk(store, jobid, dataid, None).code] += 1
    return counts, False


def told(found: Offer, *, most: int = MOST) -> str:
    """An offer in a few words."""
    return found.obstacle or _counted(found.claimable, most)


def _counted(claimable: int, most: int) -> str:
    return f"{claimable} claimable" if claimable < most else f"{most} or more claimable"


def _made(store: Store, jobid: str, dataid: str) -> set[str]:
    rows, _ = store.db.insist(lambda: store.db.run("offers.made", jobid=jobid, dataid=dataid))
    return {read_status(word) for (word,) in rows}


def _unmade(today: str, words: set[str]) -> str:
    for word in (RUNNING, HOLD, READY):
        if word in words:
            return f"today's chunk {today} is {word}"
    if words <= {PENDING, RESUBMIT}:
        return f"the inputs of today's chunk {today} aren't READY"
    return f"today's chunk {today} is {min(words)}: `odf resubmit` makes it again"


def newest(store: Store, jobid: str, dataid: str) -> int:
    """The last change of a chunk, in the datasets of a job."""
    rows, _ = store.db.insist(lambda: store.db.run("offers.newest", jobid=jobid, dataid=dataid))
    return rows[0][0] or 0
