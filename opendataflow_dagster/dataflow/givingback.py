"""Claims that are given back since nothing was begun with them, or no chunk can be made now."""

from collections.abc import Callable, Sequence

from .chunk import tidy
from .model import RESUBMIT, Claim
from .pulse import briefly
from .store import Store

GiveBack = Callable[[Store, Sequence[Claim], str], None]


def give_back(store: Store, claims: Sequence[Claim], why: str) -> None:
    """Let others claim chunks as if these claims had never been: they count as no attempt.

    One that was taken over meanwhile is left alone.
    """
    store.db.insist(lambda: try_to_give_back(store, claims, why))


def give_back_soon(store: Store, claims: Sequence[Claim], why: str) -> None:
    """Give claims back by a new connection, after an error; within seconds, or else it raises."""
    if claims:
        store.db.drop()  # the old one may have been cut off in mid-word
        briefly(store.db, lambda: try_to_give_back(store, claims, why))


def try_to_give_back(store: Store, claims: Sequence[Claim], why: str) -> None:
    """Give claims back without waiting for a database that is away."""
    db = store.db
    for claim in claims:
        mine = {"jobid": claim.jobid, "dataid": claim.dataid, "generation": claim.generation}
        with db.transaction(who=claim.owner, why=tidy(why), act="finish"):
            if db.change("claims.give_back", owner=claim.owner, **mine):
                store.settle_outputs(claim, RESUBMIT)
