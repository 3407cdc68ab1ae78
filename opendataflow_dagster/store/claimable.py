"""What a job could claim now, and what its dials allow, whatever the size of the tables."""

from typing import Any, NamedTuple

from ..model import HOLD, PENDING, READY, RESUBMIT, RUNNING, read_status
from ..util.times import from_table, shown
from .store import Store

MAX_COUNTED_CHUNKS = 1000
"""Up to how many claimable chunks are counted."""

NOTHING_CLAIMABLE = "nothing claimable"


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


def offer(store: Store, jobid: str, *, most: int = MAX_COUNTED_CHUNKS) -> Offer:
    """What a job may claim now. It is a look, not a claim: others may be faster."""
    plan = store.plan(jobid)
    if plan.flaw:
        return Offer(jobid, obstacle=plan.flaw)
    today = store.today() if plan.today else None
    rows, _ = store.db.insist(
        lambda: store.db.run("offers.offer", jobid=jobid, only=today, most=most)
    )
    [(paused_until, every_minutes, concurrency, live, claimable, first)] = rows
    nothing = NOTHING_CLAIMABLE
    if first is None and today is not None:
        words = _statuses(store, jobid, today)
        nothing = _why_not_today(today, words)
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
        obstacle = f"{_count_line(claimable, most)}, at its concurrency of {concurrency}"
    else:
        obstacle = ""
    event = 0 if first is None else last_event(store, jobid, first)
    return Offer(jobid, claimable, first, event, concurrency, free, every_minutes, obstacle)


def offer_line(found: Offer, *, most: int = MAX_COUNTED_CHUNKS) -> str:
    """An offer in a few words."""
    return found.obstacle or _count_line(found.claimable, most)


def _count_line(claimable: int, most: int) -> str:
    return f"{claimable} claimable" if claimable < most else f"{most} or more claimable"


def _statuses(store: Store, jobid: str, dataid: str) -> set[str]:
    rows, _ = store.db.insist(lambda: store.db.run("offers.made", jobid=jobid, dataid=dataid))
    return {read_status(word) for (word,) in rows}


def _why_not_today(today: str, words: set[str]) -> str:
    for word in (RUNNING, HOLD, READY):
        if word in words:
            return f"today's chunk {today} is {word}"
    if words <= {PENDING, RESUBMIT}:
        return f"the inputs of today's chunk {today} aren't READY"
    return f"today's chunk {today} is {min(words)}: `odf resubmit` makes it again"


def last_event(store: Store, jobid: str, dataid: str) -> int:
    """The last change of a chunk, in the datasets of a job."""
    rows, _ = store.db.insist(lambda: store.db.run("offers.newest", jobid=jobid, dataid=dataid))
    return rows[0][0] or 0


MAX_BATCH_CHUNKS = 1000
"""Chunks that a worker claims at once, at most: it holds their claims all the while."""


def dial(store: Store, jobid: str, name: str) -> Any:
    """What a dial of a job says now; None: it isn't set, and its default holds."""
    rows, _ = store.db.insist(lambda: store.db.run(f"dials.{name}", jobid=jobid))
    return rows[0][0] if rows else None


def batch_size(store: Store, jobid: str) -> int | None:
    """How many chunks of a job a worker claims at once; None: the dial isn't set.

    It is what the dial said a second ago at most.
    """
    found = store.plan(jobid).batch_size
    return None if found is None else min(found, MAX_BATCH_CHUNKS)


def chunks_left(store: Store, jobid: str) -> int:
    """How many chunks of a job could be claimed, if its dials let them."""
    today = store.today() if store.plan(jobid).today else None
    rows, _ = store.db.insist(lambda: store.db.run("runjob.left", jobid=jobid, today=today))
    return rows[0][0]


def dial_at_zero(store: Store, jobid: str) -> str:
    """The dial that keeps a job from claiming anything until somebody turns it, in words."""
    rows, _ = store.db.insist(lambda: store.db.run("dials.stopped", jobid=jobid))
    for paused, concurrency in rows:
        if paused:
            return "the job is paused"
        if concurrency == 0:
            return "its concurrency is 0"
    return ""


def held_back(store: Store, jobid: str, waiting: int) -> tuple[int, str]:
    """How many of the claims that wait for their turn have to be given back now, and why."""
    rows = store.db.run("dials.held_back", jobid=jobid)
    paused, surplus = rows[0] if rows else (False, 0)
    if paused:
        return waiting, "the job is paused"
    if surplus > 0:
        return min(waiting, surplus), "the job's concurrency was lowered"
    return 0, ""
