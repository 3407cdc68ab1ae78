"""Claiming a chunk whatever its inputs say: `odf force`."""

from ..errors import LostRace, Refused
from ..ids import check_id
from ..model import Claim
from .refusals import refuse_flawed
from .store import LEASE, Store


def force(store: Store, jobid: str, dataid: str, *, owner: str, lease: float = LEASE) -> Claim:
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
