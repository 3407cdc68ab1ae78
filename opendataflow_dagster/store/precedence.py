"""Which chunk a place holds that keeps one state: an older one must not take its place."""

from collections.abc import Iterable
from typing import NamedTuple

from ..errors import Overtaken
from ..ids import natural_key
from ..util.text import typed
from .output_rows import Move
from .store import Store


class Holder(NamedTuple):
    """The chunk whose rows a place holds."""

    dataid: str
    jobid: str
    location: str | None


def refuse_older(store: Store, datasetid: str, jobid: str, dataid: str) -> None:
    """Raise `Overtaken` if a chunk that replaces all of its dataset would replace a newer one."""
    holder, _ = store.db.insist(
        lambda: newer(store, datasetid, jobid, dataid, _holder(store, datasetid, any_ready=True))
    )
    if holder:
        raise _overtaken(datasetid, dataid, holder, "nothing was published")


def overtaken(store: Store, rows: Iterable[Move]) -> list[tuple[Move, Holder]]:
    """Those rows whose chunk isn't in its place any more, since a newer one is."""
    holders: dict[str, Holder | None] = {}
    found = []
    for row in rows:
        if row.datasetid not in holders:
            holders[row.datasetid] = _holder(store, row.datasetid)
        held = newer(store, row.datasetid, row.jobid, row.dataid, holders[row.datasetid])
        if held:
            found.append((row, held))
    return found


def refuse_overtaken(found: Iterable[tuple[Move, Holder]]) -> None:
    """Refuse to make chunks again that a newer one has taken the place of; name the first."""
    for row, holder in found:
        raise _overtaken(row.datasetid, row.dataid, holder, "nothing was changed")


def newer(
    store: Store, datasetid: str, jobid: str, dataid: str, holder: Holder | None
) -> Holder | None:
    """The holder of a place, if it is newer than a chunk: by name, or an item by its arrival."""
    if holder is None or holder.dataid == dataid:
        return None

    def began(jobid: str, dataid: str) -> tuple[int | None, bool]:
        [(seq, items)] = store.db.run(
            "precedence.began", datasetid=datasetid, jobid=jobid, dataid=dataid
        )
        return seq, bool(items)

    mine, is_item = began(jobid, dataid)
    other, is_other_item = began(holder.jobid, holder.dataid)
    if is_item or is_other_item:  # an item's name is a number, which no date compares with
        older = mine is not None and other is not None and mine < other
    else:
        older = natural_key(dataid) < natural_key(holder.dataid)
    return holder if older else None


def _holder(store: Store, datasetid: str, *, any_ready: bool = False) -> Holder | None:
    """The chunk that a place holds; with `any_ready` also one whose fact doesn't tell so.

    Before version 5 no fact told whether its chunk replaces all others.
    """
    rows = store.db.run("precedence.holder", datasetid=datasetid)
    if not rows and any_ready:
        rows = store.db.run("precedence.last_ready", datasetid=datasetid)
    return Holder(*rows[0]) if rows else None


def _overtaken(datasetid: str, dataid: str, holder: Holder, what: str) -> Overtaken:
    newest = typed(holder.jobid, holder.dataid)
    return Overtaken(
        f"{holder.location or datasetid} holds the newer chunk {holder.dataid!r}, and "
        f"{dataid!r} would take its place: {what}. To make the newer one again, run: "
        f"odf resubmit {newest}. If the older one is wanted, run first: odf hold {newest}"
    )
