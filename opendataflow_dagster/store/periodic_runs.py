"""Runs of pipelines that wait for no other: begun every so many minutes, or by their name."""

import json
from collections.abc import Collection
from datetime import UTC, datetime

from ..model import PENDING
from ..util.times import from_table
from .claimable import MOST, Offer, newest
from .items import ACCEPT, begin_run
from .output_rows import Move, add_rows
from .store import Store

MOMENT = "%Y-%m-%dT%H%M%S.%fZ"
"""How the dataid of a run tells when it began."""

ITEMS_ONLY = "nothing claimable but items, which `odf serve` runs"


def begin_due_runs(
    store: Store, jobids: Collection[str], *, who: str = "every_minutes"
) -> list[tuple[str, str]]:
    """Begin a run of each job whose last one is older than its `every_minutes`: (jobid, dataid).

    A job without that dial, one that is paused, and one of which a run waits or is at work, begins
    none. Of several processes that ask at once, one begins it.
    """
    db = store.db
    dials, _ = db.insist(lambda: db.run("periodic.dials"))
    asked = [row for row in dials if row[0] in jobids]
    if not asked:
        return []
    now = datetime.fromtimestamp(store.now(), UTC)
    begun = []
    for jobid, every_minutes, paused_until in asked:
        until = from_table(store, paused_until)
        if until is None or until <= now:
            dataid, _ = db.insist(lambda job=jobid, n=every_minutes: _begin(store, job, n, who))
            begun += [(jobid, dataid)] if dataid else []
    return begun


def offer_run(store: Store, jobid: str, dataid: str, *, who: str) -> bool:
    """Offer one chunk of a job, unless it is there: what a job that waits for nothing may claim."""

    def work() -> bool:
        with store.db.transaction(who=who, act=ACCEPT):
            outputs = store.read_plan(jobid).outputs
            for each in outputs:
                store.db.run("items.turn", datasetid=each)
            if store.db.run("items.taken", dataid=dataid, datasetids=json.dumps(outputs)):
                return False
            rows = [Move(jobid, each, dataid, None, PENDING) for each in outputs]
            return add_rows(store, rows) > 0

    return store.db.insist(work)[0]


def next_runs(store: Store, jobid: str, most: int = MOST) -> list[str]:
    """The chunks of a job that may be claimed and are no items, the first ones first."""
    rows, _ = store.db.insist(lambda: store.db.run("periodic.next", jobid=jobid, most=most))
    return [dataid for (dataid,) in rows]


def without_items(store: Store, found: Offer) -> Offer:
    """What a job offers beside its items."""
    if found.first is None:
        return found
    runs = next_runs(store, found.jobid)
    if not runs:
        return found._replace(claimable=0, first=None, event=0, obstacle=ITEMS_ONLY)
    if runs[0] == found.first:
        return found._replace(claimable=len(runs))
    return found._replace(
        claimable=len(runs), first=runs[0], event=newest(store, found.jobid, runs[0])
    )


def _begin(store: Store, jobid: str, every_minutes: int, who: str) -> str | None:
    """Begin a run if it is time, by what is there now that it is our turn."""
    db = store.db
    with db.transaction(who=who, act=ACCEPT):
        outputs = store.read_plan(jobid).outputs
        for each in outputs:
            db.run("items.turn", datasetid=each)
        if not outputs or db.run("periodic.unfinished", jobid=jobid):
            return None
        last = [
            dataid
            for each in outputs
            for (dataid,) in db.run("periodic.newest", jobid=jobid, datasetid=each)
        ]
        if last:
            began = datetime.strptime(max(last), MOMENT).replace(tzinfo=UTC)
            if store.now() - began.timestamp() < every_minutes * 60:
                return None
        return begin_run(store, jobid)


def live_generations(store: Store, jobid: str) -> set[int]:
    """The generations of a job that somebody has in hand."""
    rows, _ = store.db.insist(lambda: store.db.run("periodic.live", jobid=jobid))
    return {generation for (generation,) in rows}
