"""Claims that are given back unsettled, for others or for later."""

from collections.abc import Sequence

from ..dataflow.model import RESUBMIT, RUNNING, Claim
from ..dataflow.store import MAX_LOSSES, Store


def give_back(store: Store, runid: str, claims: Sequence[Claim], why: str) -> None:
    """Let others claim again what a run has claimed and not settled; it doesn't count as a loss."""
    if not claims:
        return
    db = store.db
    wanted = {(claim.jobid, claim.dataid, claim.generation) for claim in claims}

    def work() -> None:
        with db.transaction(who=claims[0].owner, why=why, act="finish"):
            held = db.run("workers.claims", runid=runid, max_losses=MAX_LOSSES)
            for jobid, dataid, generation, _, losses, _ in held:
                if (jobid, dataid, generation) not in wanted:
                    continue
                db.change("claims.disown", jobid=jobid, dataid=dataid, losses=losses - 1)
                db.change("claims.release_inputs", jobid=jobid, dataid=dataid)
                db.change(
                    "claims.settle_outputs", jobid=jobid, dataid=dataid, generation=generation,
                    was=RUNNING, status=RESUBMIT,
                )  # fmt: skip

    db.insist(work)
