"""Claims: what a job may claim now, claims by force, and claims that are given back or lost."""

import json
import select
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

from ..errors import LostRace, NoDatabase, Refused
from ..model import (
    HOLD,
    LEASE_SECONDS,
    MAX_LOSSES,
    PENDING,
    READY,
    RESUBMIT,
    RUNNING,
    Claim,
    Lost,
    Recovered,
    Status,
    Stop,
    check_id,
    read_status,
)
from ..util.text import tidy
from ..util.times import from_table, shown
from .database import briefly
from .store import Store, refuse_flawed, stale_claim

MAX_INTERRUPTIONS = 5
"""Interruptions in a row that put a chunk on HOLD: it may take longer than its machine lives."""

GiveBack = Callable[[Store, Sequence[Claim], str], None]


def give_back(store: Store, claims: Sequence[Claim], why: str) -> None:
    """Give claims back as if they had never existed: they don't count as attempts.

    A claim that another worker has recovered meanwhile is skipped.
    """
    store.db.insist(lambda: try_to_give_back(store, claims, why))


def give_back_soon(store: Store, claims: Sequence[Claim], why: str) -> None:
    """Give claims back on a new connection after an error; raise if it takes more than seconds."""
    if claims:
        # An exception may have interrupted the driver between a query and its answer: that
        # connection can't be used any more.
        store.db.drop()
        briefly(store.db, lambda: try_to_give_back(store, claims, why))


def try_to_give_back(store: Store, claims: Sequence[Claim], why: str) -> None:
    """Give claims back, without waiting for a database that is down."""
    db = store.db
    for claim in claims:
        mine = {"jobid": claim.jobid, "dataid": claim.dataid, "generation": claim.generation}
        with db.transaction(who=claim.owner, why=tidy(why), act="finish"):
            if db.change("claims.give_back", owner=claim.owner, **mine):
                store.settle_outputs(claim, RESUBMIT)


def interrupt(store: Store, claim: Claim, stop: Stop) -> Status:
    """Settle a claim whose work was interrupted, and return the chunk's new status.

    It is RESUBMIT, and doesn't count as an attempt; or HOLD if a person terminated the work, or
    after `MAX_INTERRUPTIONS` in a row. Raises `StaleClaim` if the claim was lost.
    """
    status = store.db.insist(lambda: _interrupt(store, claim, stop))[0]
    if status is None:
        raise stale_claim([claim])
    return status


def interrupt_soon(store: Store, claims: Sequence[Claim], stop: Stop) -> None:
    """Settle interrupted claims on a new connection; raise if it takes more than seconds.

    A claim that another worker has recovered meanwhile is skipped.
    """
    if claims:
        store.db.drop()  # for the same reason as in `give_back_soon`
    for claim in claims:
        briefly(store.db, lambda claim=claim: _interrupt(store, claim, stop))


def _interrupt(store: Store, claim: Claim, stop: Stop) -> Status | None:
    db = store.db
    mine = {"jobid": claim.jobid, "dataid": claim.dataid, "generation": claim.generation}
    with db.transaction(who=claim.owner, act="finish"):
        rows = db.run("claims.interrupt", owner=claim.owner, **mine)
        if not rows:
            return None
        [(count,)] = rows
        why, status = stop.why, HOLD if stop.hold else RESUBMIT
        if count >= MAX_INTERRUPTIONS and not stop.hold:
            why, status = f"{why}: interrupted {count} times in a row, so it is on HOLD", HOLD
        db.sign(who=claim.owner, why=tidy(why), act="finish")
        return status if store.settle_outputs(claim, status) else None


def force(
    store: Store, jobid: str, dataid: str, *, owner: str, lease: float = LEASE_SECONDS
) -> Claim:
    """Claim one chunk of a job without the checks; refuse only a chunk that is running."""
    check_id("dataid", dataid)
    claim, _ = store.db.insist(lambda: _force(store, jobid, dataid, owner, lease))
    if claim is None:
        raise _locked(store, jobid, dataid)
    return claim


def _force(store: Store, jobid: str, dataid: str, owner: str, lease: float) -> Claim | None:
    """The claim, or None if another worker has the chunk.

    Rows are locked in the order in which claimers lock them: outputs, pending, claim, datastatus.
    """
    db = store.db
    chunk = {"jobid": jobid, "dataid": dataid}
    with db.transaction(who=owner, why="forced", act="force"):
        plan = store.read_plan(jobid)
        refuse_flawed(store, plan)
        store.refuse_unclaimable(now=True)
        # Another order than the claimers' could deadlock with them.
        for datasetid in plan.outputs:
            db.run("forcing.take_turns", datasetid=datasetid)
        db.change("forcing.unqueue", **chunk)
        holders = db.run("forcing.holders", **chunk)
        if any(holder != owner for holder, _, _ in holders):
            return None
        [(lease, time_limit)] = db.run("forcing.dial", jobid=jobid, lease=lease)
        if holders:  # ours: the connection was lost just after the commit
            [(generation, _, attempts)] = db.run("runjob.live_claim", **chunk)
            return Claim(jobid, dataid, generation, owner, attempts, float(lease), time_limit, True)
        [(generation,)] = db.run("forcing.number")
        opened = db.run("forcing.claim", generation=generation, owner=owner, lease=lease, **chunk)
        locked = db.change("forcing.lock", generation=generation, **chunk)
        if not opened or locked < len(plan.reads) + len(plan.outputs):
            raise LostRace(f"Chunk {dataid!r} of {jobid!r} was claimed at the same moment.")
        return Claim(jobid, dataid, generation, owner, opened[0][1], float(lease), time_limit, True)


def _locked(store: Store, jobid: str, dataid: str) -> Refused:
    holders = store.db.run("forcing.holders", jobid=jobid, dataid=dataid)
    _, since, holder = holders[0] if holders else ("", None, "another process")
    return Refused(
        f"Chunk {dataid!r} of {jobid!r} is being produced by "
        f"{holder}{f' since {since[:19]}' if since else ''}. Wait until it ends, or run "
        "`odf recover` if it is dead.",
        code="LOCKED",
    )


# --- what a job may claim now ---


MAX_COUNTED_CHUNKS = 1000
"""Up to how many claimable chunks are counted."""

NOTHING_CLAIMABLE = "nothing claimable"


class Offer(NamedTuple):
    """The chunks that a job may claim, the first of them, and what its dials allow."""

    jobid: str
    claimable: int = 0
    first: str | None = None
    event: int = 0
    """The last change of the first chunk: if it differs, something was done."""
    concurrency: int | None = None
    free: int | None = None
    """How many more claims the job's concurrency allows; None is no limit."""
    every_minutes: int | None = None
    obstacle: str = ""
    """What keeps the job from claiming, for a person; nothing if it may."""


def offer(store: Store, jobid: str, *, most: int = MAX_COUNTED_CHUNKS) -> Offer:
    """Look up what a job may claim now, without claiming: others may be faster."""
    plan = store.plan(jobid)
    if plan.flaw:
        return Offer(jobid, obstacle=plan.flaw)
    today = store.today() if plan.today else None
    rows = store.db.fetch("offers.offer", jobid=jobid, only=today, most=most)
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
    rows = store.db.fetch("offers.made", jobid=jobid, dataid=dataid)
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
    rows = store.db.fetch("offers.newest", jobid=jobid, dataid=dataid)
    return rows[0][0] or 0


MAX_BATCH_CHUNKS = 1000
"""Chunks that a worker claims at once, at most: it holds their claims all the while."""


def dial(store: Store, jobid: str, name: str) -> Any:
    """What a dial of a job says now; None: it isn't set, and its default holds."""
    rows = store.db.fetch(f"dials.{name}", jobid=jobid)
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
    rows = store.db.fetch("runjob.left", jobid=jobid, today=today)
    return rows[0][0]


def dial_at_zero(store: Store, jobid: str) -> str:
    """The dial that keeps a job from claiming anything until somebody sets it, in words."""
    rows = store.db.fetch("dials.stopped", jobid=jobid)
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


# --- a watcher: hears within milliseconds that chunks may have become claimable ---


FILE_CHECK_SECONDS = 0.05
"""Seconds between two checks whether somebody has written to a SQLite file."""

LISTEN_AGAIN_SECONDS = 5.0
"""Seconds until a watcher without a connection tries to listen again."""

MAX_OFFERED_CHUNKS = 100
"""Up to how many claimable chunks of a job are counted at one look."""


class Outlook(NamedTuple):
    """What one job could claim now, and what it waits for."""

    jobid: str
    claimable: int
    is_queued: bool
    """Whether some of what it may claim is still to be judged."""
    live: int
    """Its claims, of any owner."""
    of_runs: int
    """Those of them that runs of Dagster hold."""
    of_work: int
    """Those that `odf work` holds, on any host."""
    retry_in: float | None
    lease_in: float | None
    is_paused: bool
    concurrency: int | None
    every_minutes: int | None

    @property
    def free(self) -> int:
        """How many chunks its dials let it claim."""
        if self.is_paused:
            return 0
        room = self.claimable if self.concurrency is None else self.concurrency - self.live
        return max(0, min(self.claimable, room))

    @property
    def held(self) -> str:
        """The dial that keeps it from claiming until somebody sets it, in words."""
        if self.is_paused:
            return "paused"
        return "concurrency 0" if self.concurrency == 0 else ""


def look(db: Any, jobs: Mapping[str, str | None]) -> dict[str, Outlook]:
    """How some jobs stand, by one statement that doesn't wait for a database that is away.

    Args:
        db: The database.
        jobs: The jobs; of each that reads `today`, the date.
    """
    asked = json.dumps([{"jobid": jobid, "today": today} for jobid, today in jobs.items()])
    rows = db.run("work.outlook", jobs=asked, most=MAX_OFFERED_CHUNKS)
    found = [Outlook(*row) for row in rows]
    # SQLite has numbers for what is true.
    return {
        job.jobid: job._replace(is_queued=bool(job.is_queued), is_paused=bool(job.is_paused))
        for job in found
    }


class Watcher:
    """Waits until something may have become claimable; used by one thread.

    On PostgreSQL it listens, by a connection of its own, unless a pooler is in between. On SQLite
    it asks whether the file has changed. What it hears is a hint: behind a pooler, or while a
    connection is broken, it hears nothing, so its host looks once a second whatever it heard.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._connection: Any = None
        self._again = 0.0
        self._version: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def listens(self) -> bool:
        """Whether notices come by themselves."""
        return self._connection is not None

    def wait(self, seconds: float, wakeups: Iterable[int]) -> bool:
        """Wait so long, or until one of the files of `wakeups` can be read; whether to look.

        True means that somebody has changed what may be claimed.
        """
        if self.store.db.path:
            return self._watch_file(seconds, wakeups)
        self._listen()
        return self._hear(seconds, wakeups)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _listen(self) -> None:
        """Open a connection that listens, unless there is one or it was tried just now."""
        db, now = self.store.db, time.monotonic()
        if self._connection is not None or now < self._again or db.pooled:
            return
        self._again = now + LISTEN_AGAIN_SECONDS
        try:
            self._connection = db.listen()
        except (NoDatabase, *db.failures):
            return  # the looks tell of an outage

    def _hear(self, seconds: float, wakeups: Iterable[int]) -> bool:
        files = list(wakeups)
        if self._connection is not None:
            files.append(self._connection.fileno())
        ready = _readable(files, seconds)
        if self._connection is None or self._connection.fileno() not in ready:
            return False
        try:
            notices = list(self._connection.notifies(timeout=0))
        except self.store.db.failures:
            self.close()  # the server has gone
            return True
        return any(notice.payload == self.store.db.schema for notice in notices)

    def _watch_file(self, seconds: float, wakeups: Iterable[int]) -> bool:
        until = time.monotonic() + seconds
        files = list(wakeups)
        while True:
            if self._has_changed():
                return True
            left = until - time.monotonic()
            if left <= 0 or _readable(files, min(left, FILE_CHECK_SECONDS)):
                return False

    def _has_changed(self) -> bool:
        """Whether another connection has written to the file since this one looked last."""
        try:
            [(version,)] = self.store.db.run("work.changes")
        except Exception:  # the looks tell of it
            return False
        before, self._version = self._version, version
        return before != version


def _readable(files: list[int], seconds: float) -> list[int]:
    """Which of some files can be read, at the latest after so many seconds."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(max(0.0, seconds) * 1000)]


# --- workers of runs, and what becomes of the claims of a run that is over ---


MAX_SETTLE_RACES = 10
"""How often a settlement that met locked rows is tried again: for seconds, not for minutes."""


def begin_work(
    store: Store, owner: str, runid: str, jobid: str, lease: float = LEASE_SECONDS
) -> float:
    """Record that a worker is running until its lease ends; return the length of the lease.

    It is what the job's policy says, or else `lease`.
    """
    rows = store.db.fetch("workers.begin", owner=owner, runid=runid, jobid=jobid, lease=lease)
    return float(rows[0][0])


def beat(store: Store, owner: str, lease: float = LEASE_SECONDS) -> float | None:
    """Renew a worker's lease and return its length; None if the worker was given up as lost."""
    rows = store.db.run("workers.beat", owner=owner, lease=lease)
    return float(rows[0][0]) if rows else None


def lost_runs(store: Store, grace: float = 0.0) -> list[str]:
    """The runs that have workers, all of them lost for `grace` seconds."""
    rows = store.db.fetch("workers.lost_runs", grace=grace)
    return [runid for (runid,) in rows]


def runs_at_work(store: Store) -> list[str]:
    """The runs that hold claims or have workers: what an ended run has left is found by it."""
    return [runid for (runid,) in store.db.fetch("workers.runs")]


def settle_run(
    store: Store,
    runid: str,
    *,
    why: str,
    canceled: bool,
    who: str = "dagster",
    max_losses: int = MAX_LOSSES,
    blame_together: bool = True,
) -> list[Recovered]:
    """Settle now what an ended run still holds, and remove its workers.

    Claims of a canceled run are put on HOLD. Others count as lost claims: their chunks run again,
    or are put on HOLD after too many losses. What finished meanwhile, or was recovered by another
    worker, is skipped. Without `blame_together`, only a claim that is lost alone is put on HOLD,
    since it ended the run itself.
    """
    return store.db.insist(
        lambda: _settle(store, runid, why, canceled, who, max_losses, blame_together),
        races=MAX_SETTLE_RACES,
        wait=False,
    )[0]


def _settle(
    store: Store,
    runid: str,
    why: str,
    canceled: bool,
    who: str,
    max_losses: int,
    blame_together: bool,
) -> list[Recovered]:
    db = store.db
    with db.transaction(who=who, why=why, act="finish"):
        # Claims, not chunks, are settled: one that a worker of this run has finished, or lost to
        # another run, has no claim of this run any more.
        rows = db.run("workers.claims", runid=runid, max_losses=max_losses)
        held = [Lost(*row) for row in rows]
        if canceled:
            done = []
            for claim in held:
                key = {"jobid": claim.jobid, "dataid": claim.dataid}
                db.change("workers.close", generation=claim.generation, **key)
                if store.settle_outputs(claim, HOLD):
                    done.append(Recovered(claim.jobid, claim.dataid, HOLD, why))
        else:
            to_blame = blame_together or len(held) == 1
            done = store.settle_lost(held, who=who, why=why, may_hold=to_blame)
        db.change("workers.end_run", runid=runid)
    return done
