"""Claims out of the ordinary: one chunk by force, claims given back, work interrupted."""

from collections.abc import Callable, Sequence

from ..errors import LostRace, Refused
from ..ids import check_id
from ..model import HOLD, LEASE_SECONDS, RESUBMIT, Claim, Status, Stop
from ..util.text import tidy
from .database import briefly
from .store import Store, refuse_flawed, stale_claim

MAX_INTERRUPTIONS = 5
"""Interruptions in a row that put a chunk on HOLD: it may take longer than its machine lives."""

GiveBack = Callable[[Store, Sequence[Claim], str], None]


def give_back(store: Store, claims: Sequence[Claim], why: str) -> None:
    """Let others claim chunks as if these claims had never been: they count as no attempt.

    One that was taken over meanwhile is left alone.
    """
    store.db.insist(lambda: try_to_give_back(store, claims, why))


def give_back_soon(store: Store, claims: Sequence[Claim], why: str) -> None:
    """Give claims back by a new connection, after an error; within seconds, or else it raises."""
    if claims:
        # An exception may have interrupted the driver between a query and its answer: that
        # connection can't be used any more.
        store.db.drop()
        briefly(store.db, lambda: try_to_give_back(store, claims, why))


def try_to_give_back(store: Store, claims: Sequence[Claim], why: str) -> None:
    """Give claims back without waiting for a database that is away."""
    db = store.db
    for claim in claims:
        mine = {"jobid": claim.jobid, "dataid": claim.dataid, "generation": claim.generation}
        with db.transaction(who=claim.owner, why=tidy(why), act="finish"):
            if db.change("claims.give_back", owner=claim.owner, **mine):
                store.settle_outputs(claim, RESUBMIT)


def interrupt(store: Store, claim: Claim, stop: Stop) -> Status:
    """Settle a claim whose work was interrupted; return the chunk's status now.

    It is RESUBMIT, and counts as no attempt; HOLD if a person has terminated the work, or after
    `MAX_INTERRUPTIONS` in a row. Raises `StaleClaim` if the chunk was taken over.
    """
    status = store.db.insist(lambda: _interrupt(store, claim, stop))[0]
    if status is None:
        raise stale_claim([claim])
    return status


def interrupt_soon(store: Store, claims: Sequence[Claim], stop: Stop) -> None:
    """Settle interrupted claims by a new connection; within seconds, or else it raises.

    A claim that was taken over meanwhile is left alone.
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
            why, status = f"{why}: interruption {count} in a row, so it is on HOLD", HOLD
        db.sign(who=claim.owner, why=tidy(why), act="finish")
        return status if store.settle_outputs(claim, status) else None


def force(
    store: Store, jobid: str, dataid: str, *, owner: str, lease: float = LEASE_SECONDS
) -> Claim:
    """Claim one chunk of a job without the checks; only one that is being produced is refused."""
    check_id("dataid", dataid)
    claim, _ = store.db.insist(lambda: _force(store, jobid, dataid, owner, lease))
    if claim is None:
        raise _locked(store, jobid, dataid)
    return claim


def _force(store: Store, jobid: str, dataid: str, owner: str, lease: float) -> Claim | None:
    """The claim, or nothing when somebody else has the chunk.

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
        f"Chunk {dataid!r} of {jobid!r} is being produced by {holder}"
        f"{f' since {since[:19]}' if since else ''}. "
        "Wait for its end, or run `odf recover` if it is dead.",
        code="LOCKED",
    )
