"""What a job's dials say to a worker between two chunks."""

from .store import Store

MAX_BATCH_CHUNKS = 1000
"""Chunks that a worker claims at once, at most: it holds their claims all the while."""


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
