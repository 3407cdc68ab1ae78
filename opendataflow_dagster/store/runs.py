"""Who is at work in which run, and what becomes of the claims of a run that is over."""

from ..model import HOLD, LEASE_SECONDS, MAX_LOSSES, Lost, Recovered
from .store import Store

MAX_SETTLE_RACES = 10
"""How often a settlement that met locked rows is tried again: for seconds, not for minutes."""


def begin_work(
    store: Store, owner: str, runid: str, jobid: str, lease: float = LEASE_SECONDS
) -> float:
    """Note that a worker is at work in a run, until its lease is over; return how long that is.

    It is what the job's policy says, or else `lease`.
    """
    rows, _ = store.db.insist(
        lambda: store.db.run("workers.begin", owner=owner, runid=runid, jobid=jobid, lease=lease)
    )
    return float(rows[0][0])


def beat(store: Store, owner: str, lease: float = LEASE_SECONDS) -> float | None:
    """Renew a worker's lease and return how long it is; None: the worker was given up for lost."""
    rows = store.db.run("workers.beat", owner=owner, lease=lease)
    return float(rows[0][0]) if rows else None


def lost_runs(store: Store, grace: float = 0.0) -> list[str]:
    """The runs that have workers, all of them lost for `grace` seconds."""
    rows, _ = store.db.insist(lambda: store.db.run("workers.lost_runs", grace=grace))
    return [runid for (runid,) in rows]


def runs_at_work(store: Store) -> list[str]:
    """The runs that hold claims or have workers: what an ended run has left is found by it."""
    return [runid for (runid,) in store.db.insist(lambda: store.db.run("workers.runs"))[0]]


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
    """Settle now what a run that is over still holds, and forget its workers.

    Claims of a canceled run are held; others are lost claims, which are made again, or held after
    too many losses. What finished meanwhile, or was taken over, isn't the run's and is left alone.
    Without `blame_together` only a claim that is lost alone is held: it has ended the run itself.
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
