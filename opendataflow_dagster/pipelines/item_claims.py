"""The next items of a pipeline, claimed in their order."""

from itertools import takewhile
from typing import Any, NamedTuple

from ..model import Claim
from ..store.claims import give_back
from ..store.items import payloads
from ..store.store import Store


class Heads(NamedTuple):
    """The items at the head of a queue, and whether something that is no item is among them.

    An item that was in hand when a worker was lost is a suspect, and goes `alone`.
    """

    dataids: tuple[str, ...]
    strangers: bool
    alone: bool = False


def heads(store: Store, slug: str, most: int) -> Heads:
    """The next items, at most so many; what isn't an item is for `odf pipeline run`."""
    db = store.db
    db.insist(lambda: db.run("consuming.sort", jobid=slug))
    rows, _ = db.insist(lambda: db.run("consuming.heads", jobid=slug, k=most))
    strangers = bool(rows and rows[0][2])
    free = tuple(row[0] for row in takewhile(lambda row: not row[1], rows))
    if rows and not free:
        return Heads((rows[0][0],), strangers, alone=True)
    return Heads(free, strangers)


def claim_items(store: Store, slug: str, found: Heads, **how: Any) -> list[Claim]:
    """Claim the items that were found at the head."""
    dataids = found.dataids
    if not (found.strangers or found.alone):
        claims = store.claim(slug, k=len(dataids), **how) if dataids else []
    else:  # no other may come in its place; a batch run that waits isn't ours
        claims = [each for one in dataids for each in store.claim(slug, only=one, **how)]
    known = {*dataids, *payloads(store, slug, [each.dataid for each in claims])}
    strangers = [claim for claim in claims if claim.dataid not in known]
    if strangers:
        give_back(store, strangers, "it is for `odf pipeline run`")
    return [claim for claim in claims if claim.dataid in known]
