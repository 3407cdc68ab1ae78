"""Claiming and settling for a program in another language, which does the work between the two."""

import os
from collections.abc import Mapping

from ..errors import Refused, StaleClaim, WrongUse
from ..model import FAILED, READY, RESUBMIT, Claim, Stop, new_owner
from ..store.claims import force, interrupt
from ..store.operations import refuse_unknown_job, resubmit
from ..store.store import Store
from ..util.text import printable, typed
from .environment import job_environment
from .run import facts, settled_line

EXTERNAL_LEASE_SECONDS = 24 * 3600.0
"""Seconds: nobody renews such a claim, so it lasts longer than any work."""

EXTERNAL_OWNER = "start:"
"""What the owner's name of such a claim begins with: others aren't ended by hand unawares."""


def start(
    store: Store,
    jobid: str,
    *,
    lease: float = EXTERNAL_LEASE_SECONDS,
    secrets: bool = False,
    environ: Mapping[str, str] = os.environ,
    forced: str | None = None,
) -> tuple[Claim, list[dict[str, str]]] | None:
    """Claim the next chunk of a job; return it with its context, or None if nothing is ready.

    With `forced`, that chunk whatever its inputs say.

    The context is the original's list of objects with one key each, without passwords unless
    `secrets` asks for them.
    """
    environment = job_environment(store, store.plan(jobid), environ, secrets=secrets)
    owner = EXTERNAL_OWNER + new_owner()
    if forced is not None:
        claims = [force(store, jobid, forced, owner=owner, lease=lease)]
    else:
        claims = store.claim_or_recover(jobid, owner=owner, lease=lease)
    if not claims:
        return None
    [claim] = claims
    # A policy's lease is for claims that are renewed, and nobody renews this one.
    if claim.lease != lease:
        claim = claim._replace(lease=lease)
        if store.heartbeat([claim]):
            raise StaleClaim(f"Chunk {claim.dataid!r} of {jobid!r} was taken over. Start again.")
    return claim, environment.context(claim, secrets=secrets)


def is_alive(
    store: Store,
    jobid: str | None = None,
    dataid: str | None = None,
    generation: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> bool:
    """Whether a claim holds; without arguments, the claim for which this script was started."""
    given = {
        "jobid": jobid or environ.get("dataflow_jobid"),
        "dataid": dataid or environ.get("dataid"),
        "generation": generation or environ.get("dataflow_generation"),
    }
    if not (given["jobid"] and given["dataid"] and str(given["generation"] or "").isdigit()):
        raise WrongUse(
            "No job runs here, so there is no claim to ask for. Name it: "
            "odf alive JOB DATAID --generation N."
        )
    given["generation"] = int(str(given["generation"]))
    rows = store.db.fetch("claims.alive", **given)
    return bool(rows)


def end(
    store: Store, jobid: str, dataid: str, status: str, *, generation: int | None = None
) -> str:
    """Settle a claim that `start` made, READY or FAILED; return the original's line about it.

    With `generation`, any claim of the chunk, and only that one. RESUBMIT gives a claim back, and
    sends back a chunk that isn't claimed.
    """
    if status not in (READY, FAILED, RESUBMIT):
        raise WrongUse(
            f"A chunk ends {READY}, {FAILED} or {RESUBMIT}, not {status!r}. See `odf end --help`."
        )
    rows = store.db.run("runjob.live_claim", jobid=jobid, dataid=dataid)
    if not rows and status == RESUBMIT and generation is None:
        moved = resubmit(store, jobid, [dataid], why="odf end")
        return (
            f"{len(moved.moves)} rows updated to {RESUBMIT} for {jobid} and {printable(dataid)} "
            "0 IN file-local locks released"
        )
    if not rows:
        refuse_unknown_job(store, jobid)
        raise Refused(
            f"Chunk {dataid!r} of {jobid!r} isn't claimed, so there is nothing to end. "
            f"Claim it with `odf start {typed(jobid)}`; see `odf history {typed(jobid)}`.",
            code="NOT_CLAIMED",
        )
    [(current, owner, attempts)] = rows
    if generation is None and not owner.startswith(EXTERNAL_OWNER):
        raise Refused(
            f"Chunk {dataid!r} of {jobid!r} is being run by {owner}, which will end it. "
            f"To end it all the same, add --generation {current}.",
            code="LOCKED",
        )
    if generation is not None:
        current = generation
    claim = Claim(jobid, dataid, current, owner, attempts, EXTERNAL_LEASE_SECONDS, None)
    environment = job_environment(store, store.plan(jobid), secrets=False)
    if status == READY:
        store.finish(claim, facts(claim, environment))
    elif status == RESUBMIT:
        status = interrupt(store, claim, Stop("odf end"))
    else:
        status = store.fail(claim, "odf end").status
    return settled_line(claim, environment.plan, status)
