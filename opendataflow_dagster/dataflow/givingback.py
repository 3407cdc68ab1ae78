"""Claims that are given back because no chunk can be made now."""

from collections.abc import Sequence

from .chunk import tidy
from .model import RESUBMIT, Claim
from .store import Store


def give_back(store: Store, claims: Sequence[Claim], why: str) -> None:
    """Let others claim chunks as if these claims had never been: they count as no attempt.

    One that was taken over meanwhile is left alone.
    """
    db = store.db

    def work() -> None:
        for claim in claims:
            mine = {"jobid": claim.jobid, "dataid": claim.dataid, "generation": claim.generation}
            with db.transaction(who=claim.owner, why=tidy(why), act="finish"):
                if db.change("claims.give_back", owner=claim.owner, **mine):
                    store.settle_outputs(claim, RESUBMIT)

    db.insist(work)
