"""OUT rows that a person moves: read under a lock, and moved all together or not at all."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from ..errors import LostRace, Overtaken
from ..model import TRANSITIONS, check_text, natural_key, read_status
from ..util.text import typed
from .store import Store

_Done = TypeVar("_Done")


class Move(NamedTuple):
    """An OUT row, and what it became, would become, or stays."""

    jobid: str
    datasetid: str
    dataid: str
    status_before: str | None
    status_after: str | None


class Moved(NamedTuple):
    """What was moved; what was left alone though it matters; which chunks needed nothing.

    A plan that is `cut` has the first chunks only.
    """

    moves: list[Move]
    left: list[Move]
    same: list[str]
    cut: bool = False

    @property
    def chunks(self) -> int:
        return len({(move.jobid, move.dataid) for move in self.moves})


def person() -> str:
    """The signature of changes by hand: the user and the host."""
    return f"{os.environ.get('USER') or os.getuid()}@{os.uname().nodename}"


def in_transaction(store: Store, work: Callable[[], _Done], who: str | None, why: str) -> _Done:
    """Do `work` in one transaction, signed but without an act: the triggers see a person."""
    check_text("reason", why)

    def once() -> _Done:
        with store.db.transaction(who=who or person(), why=why):
            return work()

    return store.db.insist(once)[0]


def outputs_of(store: Store, jobids: Iterable[str], dataids: Iterable[str]) -> list[Move]:
    """The OUT rows of jobs for chunks, locked until the transaction ends."""
    jobids, dataids = sorted(jobids), sorted(dataids)
    if not (jobids and dataids):
        return []
    return as_moves(
        store.db.run("moves.outputs", jobids=json.dumps(jobids), dataids=json.dumps(dataids))
    )


def outputs_of_dataset(store: Store, datasetid: str, dataids: Iterable[str]) -> list[Move]:
    """The OUT rows of a dataset for chunks, of any job, locked until the transaction ends."""
    wanted = json.dumps(sorted(dataids))
    return as_moves(store.db.run("moves.produced", datasetid=datasetid, dataids=wanted))


def as_moves(rows: Iterable[Sequence[str]]) -> list[Move]:
    """Rows of (jobid, datasetid, dataid, status) as moves that lead nowhere yet, in order."""
    return _in_order(Move(row[0], row[1], row[2], row[3], None) for row in rows)


def moves_to(after: str, rows: Iterable[Move], act: str) -> list[Move]:
    """The moves of those rows that `act` may make `after`."""
    return [
        row._replace(status_after=after) for row in rows if status(row) in TRANSITIONS[act][after]
    ]


def status(row: Move) -> str:
    """How a row reads that is there: an empty word isn't absence, it holds the chunk."""
    return read_status(row.status_before or None)


def carry_out(
    store: Store,
    moves: Sequence[Move],
    *,
    new: Sequence[Move] = (),
    left: Sequence[Move] = (),
    wanted: Sequence[str] = (),
    plan: bool = False,
) -> Moved:
    """Move existing rows, and write the new ones: all of them or none. A plan changes nothing."""
    if not plan:
        # Each row is changed only if it still has the status that was read. PostgreSQL locked it,
        # but not a row that didn't exist: if another transaction wrote that, all is rolled back.
        changed = store.db.change("moves.move", rows=as_json(moves)) if moves else 0
        if changed + add_rows(store, new) < len(moves) + len(new):
            raise LostRace("A row changed while it was being moved.")
    done = _in_order([*moves, *new])
    touched = {move.dataid for move in (*done, *left)}
    return Moved(done, list(left), [dataid for dataid in wanted if dataid not in touched])


def add_rows(store: Store, rows: Sequence[Move], numbers: dict[str, int] | None = None) -> int:
    """Write OUT rows that aren't there yet; how many weren't."""
    return store.db.change("moves.add", rows=as_json(rows, numbers)) if rows else 0


def generations(store: Store, count: int) -> list[int]:
    """As many fresh generations, growing."""
    return sorted(json.loads(store.db.run("moves.generations", count=count)[0][0])) if count else []


def as_json(rows: Iterable[Move], numbers: dict[str, int] | None = None) -> str:
    numbers = numbers or {}
    return json.dumps([row._asdict() | {"generation": numbers.get(row.dataid)} for row in rows])


def _in_order(rows: Iterable[Move]) -> list[Move]:
    return sorted(
        rows, key=lambda row: (row.jobid, natural_key(row.dataid), row.dataid, row.datasetid)
    )


# Which chunk a place holds that keeps one state: an older one must not take its place.


class Holder(NamedTuple):
    """The chunk whose rows a file or table holds."""

    dataid: str
    jobid: str
    location: str | None


def refuse_older(store: Store, datasetid: str, jobid: str, dataid: str) -> None:
    """Raise `Overtaken` if a chunk that replaces all of its dataset would replace a newer one."""
    holder, _ = store.db.insist(
        lambda: newer_holder(
            store, datasetid, jobid, dataid, _holder(store, datasetid, any_ready=True)
        )
    )
    if holder:
        raise _overtaken_error(datasetid, dataid, holder, "nothing was published")


def replaced_by_newer(store: Store, rows: Iterable[Move]) -> list[tuple[Move, Holder]]:
    """The rows whose chunk a newer one has replaced in its file or table."""
    holders: dict[str, Holder | None] = {}
    found = []
    for row in rows:
        if row.datasetid not in holders:
            holders[row.datasetid] = _holder(store, row.datasetid)
        held = newer_holder(store, row.datasetid, row.jobid, row.dataid, holders[row.datasetid])
        if held:
            found.append((row, held))
    return found


def refuse_overtaken(found: Iterable[tuple[Move, Holder]]) -> None:
    """Refuse to produce chunks again that a newer one has replaced; name the first."""
    for row, holder in found:
        raise _overtaken_error(row.datasetid, row.dataid, holder, "nothing was changed")


def newer_holder(
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
    """The newest chunk of a location; with `any_ready`, even if its fact doesn't say so.

    Before version 5, no fact said whether its chunk replaces all others.
    """
    rows = store.db.run("precedence.holder", datasetid=datasetid)
    if not rows and any_ready:
        rows = store.db.run("precedence.last_ready", datasetid=datasetid)
    return Holder(*rows[0]) if rows else None


def _overtaken_error(datasetid: str, dataid: str, holder: Holder, what: str) -> Overtaken:
    newest = typed(holder.jobid, holder.dataid)
    return Overtaken(
        f"{holder.location or datasetid} holds the newer chunk {holder.dataid!r}, and "
        f"{dataid!r} would replace it: {what}. To run the newer one again: odf resubmit "
        f"{newest}. If you want the older one, first run: odf hold {newest}"
    )
