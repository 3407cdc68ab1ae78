"""Why a job has nothing to claim, in a few words."""

from collections import Counter

from ..model import Effect
from ..store.claimable import NOTHING_CLAIMABLE, offer, offer_line
from ..store.store import Store
from ..util.text import typed

MAX_JUDGED_ROWS = 5_000
"""Rows of a job's datasets up to which all of its chunks are judged when none is claimable."""

RECENT_CHUNKS = 10
"""Chunks that are judged of a larger job: so many that changed last, and so many that failed."""

BLOCKED = {
    Effect.HELD: "FAILED or on HOLD",
    Effect.LOCKED: "being made or read",
    Effect.DATA_NOT_READY: "waiting for inputs",
    "": "not in the queue",
}
"""What keeps chunks from being claimed, in a few words."""


def why_nothing(store: Store, jobid: str) -> str:
    """Why a job has nothing to claim, in a few words: all is done, or what blocks how many chunks.

    It costs the same with any number of chunks.
    """
    found = offer(store, jobid)
    more = f"`odf why {typed(jobid)}` tells more"
    if found.obstacle not in ("", NOTHING_CLAIMABLE):
        return f"{found.obstacle}; {more}"
    if not found.obstacle:
        return f"{offer_line(found)} by now"
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
    from .explain import (
        explain_chunk,  # imported late: who has something to do needs none of it
        judge_chunks,
    )

    counts: Counter[str] = Counter()
    with store.db.reading():
        if store.db.run("why.size", jobid=jobid, now=1, most=MAX_JUDGED_ROWS + 1) <= [
            (MAX_JUDGED_ROWS,)
        ]:
            rows = judge_chunks(store, store.read_plan(jobid))
            counts.update({code: chunks for code, chunks, _ in rows})
            return counts, True
        for (dataid,) in store.db.run("offers.some", jobid=jobid, last=RECENT_CHUNKS):
            counts[explain_chunk(store, jobid, dataid, None).code] += 1
    return counts, False
