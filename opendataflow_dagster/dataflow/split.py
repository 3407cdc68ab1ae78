"""The chunks of a large table: by calendar, by number, by remainder, or by value."""

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, timedelta
from itertools import islice, pairwise
from typing import Any, NamedTuple

from .errors import Refused, WrongUse
from .model import PENDING, READY
from .moves import is_registered
from .names import check_id, check_text, typed
from .outputs import Move, add_rows, person
from .refusals import refuse_unknown_job, unknown_dataset
from .registry import SPLIT
from .store import Store

MOST = 1_000_000
"""Chunks that one split may register."""

AT_ONCE = 10_000
"""Rows that one statement writes."""

PERIODS = ("day", "week", "month", "year")


class Chunk(NamedTuple):
    """A chunk of a table, and which rows are in it.

    `lower_bound` <= column < `upper_bound`; without an upper bound, column = `lower_bound`; with a
    `modulus`, column modulo modulus = `lower_bound`.
    """

    dataid: str
    lower_bound: str
    upper_bound: str | None = None
    modulus: int | None = None


class Split(NamedTuple):
    """The chunks that a table has by now, and those of them that are new."""

    chunks: list[Chunk]
    new: list[Chunk]
    status: str


def by_date(first: str, last: str, period: str) -> list[Chunk]:
    """A chunk for each whole period from the one of `first` to the one of `last`, both included.

    The dataid is 2026-01-05 for a day and for the week from that Monday, 2026-01, or 2026.
    """
    if period not in PERIODS:
        raise WrongUse(f"There are no chunks by {period!r}. Choose from {', '.join(PERIODS)}.")
    begin, end = _date(first), _date(last)
    if end < begin:
        raise WrongUse(f"--to {last} is before --from {first}. Swap them.")
    try:
        return _limited(_periods(_start(begin, period), end, period))
    except OverflowError:
        raise WrongUse(
            f"--to {last} is at the end of the calendar. Choose an earlier date."
        ) from None


def by_number(
    lower: int, upper: int, *, size: int | None = None, count: int | None = None
) -> list[Chunk]:
    """Chunks from `lower` up to, not including, `upper`: of `size` numbers, or `count` of them.

    The dataid is the lower bound, so that a table that grew is split on from where it ended.
    """
    width = upper - lower
    if width <= 0:
        raise WrongUse(f"--to {upper} isn't above --from {lower}, so there is nothing to split.")
    if (size is None) == (count is None):
        raise WrongUse("Say either --size, numbers per chunk, or --chunks, how many chunks.")
    if size is not None:
        if size < 1:
            raise WrongUse("--size is at least 1.")
        return _limited(_between([*range(lower, upper, size)[: MOST + 1], upper]))
    if not count or not 1 <= count <= width:
        raise WrongUse(f"--chunks is between 1 and the {width} numbers that there are.")
    return _limited(
        _between([lower + width * at // count for at in range(min(count, MOST + 1) + 1)])
    )


def by_shards(count: int) -> list[Chunk]:
    """A chunk for each remainder of the column divided by `count`; the dataid is the remainder."""
    if count < 1:
        raise WrongUse("--shards is at least 1.")
    return _limited(Chunk(str(shard), str(shard), None, count) for shard in range(count))


def by_value(values: Iterable[str]) -> list[Chunk]:
    """A chunk for each value; the dataid is the value."""
    return _limited(Chunk(check_id("dataid", value), value) for value in dict.fromkeys(values))


def split(
    store: Store,
    datasetid: str,
    chunks: Sequence[Chunk],
    *,
    column: str | None = None,
    pending: bool = False,
    jobid: str | None = None,
    plan: bool = False,
    who: str | None = None,
) -> Split:
    """Register the chunks of a table; those that are there already stay as they are.

    They are READY, since the table's data is there; with `pending` PENDING, for `jobid` to produce.
    """
    check_id("datasetid", datasetid)
    check_text("column", column)
    if not chunks:
        raise WrongUse(f"There is no chunk to split {datasetid!r} into. Name some values.")
    if jobid and not pending:
        raise WrongUse("--job names who is to produce the chunks: use it with --pending.")
    status = PENDING if pending else READY

    def work() -> Split:
        db = store.db
        with db.transaction(who=who or person(), why="odf split"):
            db.run("registry.lock_datasets")
            kept = [Chunk(*row) for row in db.run("split.ranges", datasetid=datasetid)]
            _check_dataset(store, datasetid, column, kept)
            _check_job(store, datasetid, jobid)
            _check_overlap(datasetid, kept, chunks)
            ranged = {chunk.dataid for chunk in kept}
            known = {dataid for (dataid,) in db.run("split.known", datasetid=datasetid)}
            new = [
                chunk for chunk in chunks if chunk.dataid not in known or chunk.dataid not in ranged
            ]
            if not plan:
                if column:
                    db.change("split.set_column", datasetid=datasetid, column=column)
                for some in _batches([chunk for chunk in new if chunk.dataid not in ranged]):
                    rows = json.dumps([chunk._asdict() for chunk in some])
                    db.change("split.add_ranges", datasetid=datasetid, rows=rows)
                for some in _batches([chunk for chunk in new if chunk.dataid not in known]):
                    rows = [
                        Move(jobid or SPLIT, datasetid, chunk.dataid, None, status)
                        for chunk in some
                    ]
                    add_rows(store, rows)
            return Split(list(chunks), new, status)

    return store.db.insist(work)[0]


def _check_dataset(store: Store, datasetid: str, column: str | None, kept: Sequence[Chunk]) -> None:
    if not is_registered(store, datasetid):
        raise unknown_dataset(
            store, datasetid,
            f"First run `odf dataset add {typed(datasetid)}`, with the place of the table.",
        )  # fmt: skip
    columns = [name for (name,) in store.db.run("split.column", datasetid=datasetid) if name]
    if not (column or columns):
        raise WrongUse(f"By which column is {datasetid!r} split? Say --column NAME.")
    if column and kept and columns and column not in columns:
        raise Refused(
            f"Dataset {datasetid!r} is split by {columns[0]!r} already: chunks by {column!r} would "
            "hold the same rows again. Register the table as another dataset to split it so.",
            code="OVERLAP",
        )


def _check_job(store: Store, datasetid: str, jobid: str | None) -> None:
    if jobid and datasetid not in store.read_plan(jobid).outputs:
        refuse_unknown_job(store, jobid)
        raise Refused(
            f"Job {jobid!r} isn't registered to write {datasetid!r}. "
            f"Run `odf job add {typed(jobid)} --out {typed(datasetid)}`.",
            code="NOT_REGISTERED",
        )


def _check_overlap(datasetid: str, kept: Sequence[Chunk], chunks: Sequence[Chunk]) -> None:
    """Refuse a chunk that shares rows with another, or that has other bounds than before."""
    before = {chunk.dataid: chunk for chunk in kept}
    for chunk in chunks:
        old = before.get(chunk.dataid, chunk)
        if old != chunk:
            raise _overlap(datasetid, old, chunk)
    for old in kept[:1]:
        for chunk in chunks:
            if _kind(old) != _kind(chunk):
                raise _overlap(datasetid, old, chunk)
    ranges = [chunk for chunk in {*kept, *chunks} if chunk.upper_bound is not None]
    ranges.sort(key=lambda chunk: (_bound(chunk.lower_bound), _bound(chunk.upper_bound)))
    for one, next_one in pairwise(ranges):
        if _bound(next_one.lower_bound) < _bound(one.upper_bound):
            old, new = (one, next_one) if one in kept else (next_one, one)
            raise _overlap(datasetid, old, new)


def _overlap(datasetid: str, old: Chunk, new: Chunk) -> Refused:
    return Refused(
        f"Dataset {datasetid!r} has chunk {old.dataid!r} with {_shown(old)}; chunk {new.dataid!r} "
        f"with {_shown(new)} would hold rows of it again. Nothing was registered. Use the same "
        "bounds, or register the table as another dataset.",
        code="OVERLAP",
    )


def _kind(chunk: Chunk) -> tuple[Any, ...]:
    if chunk.modulus is not None:
        return ("shard", chunk.modulus)
    if chunk.upper_bound is None:
        return ("value",)
    return ("range", type(_bound(chunk.lower_bound)))


def _bound(text: str | None) -> Any:
    """A bound that sorts: a number as a number; dates sort as they are."""
    try:
        return int(text or "")
    except ValueError:
        return text or ""


def _shown(chunk: Chunk) -> str:
    if chunk.modulus is not None:
        return f"remainder {chunk.lower_bound} of {chunk.modulus}"
    if chunk.upper_bound is None:
        return f"value {chunk.lower_bound!r}"
    return f"bounds {chunk.lower_bound} to {chunk.upper_bound}"


def _date(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise WrongUse(f"{text!r} isn't a date. Write it like 2026-01-31.") from None


def _start(day: date, period: str) -> date:
    if period == "week":
        return day - timedelta(days=day.weekday())
    if period == "month":
        return day.replace(day=1)
    return day.replace(month=1, day=1) if period == "year" else day


def _next(start: date, period: str) -> date:
    steps = {"day": 1, "week": 7, "month": 31, "year": 366}
    return _start(start + timedelta(days=steps[period]), period)


def _periods(start: date, end: date, period: str) -> Iterator[Chunk]:
    length = {"month": 7, "year": 4}.get(period, 10)
    while start <= end:
        following = _next(start, period)
        yield Chunk(start.isoformat()[:length], start.isoformat(), following.isoformat())
        start = following


def _between(edges: Sequence[int]) -> Iterator[Chunk]:
    return (Chunk(str(low), str(low), str(high)) for low, high in pairwise(edges))


def _limited(chunks: Iterable[Chunk]) -> list[Chunk]:
    found = list(islice(chunks, MOST + 1))
    if len(found) > MOST:
        raise WrongUse(f"That is more than {MOST:,} chunks. Make them larger.")
    return found


def _batches(items: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    for at in range(0, len(items), AT_ONCE):
        yield items[at : at + AT_ONCE]
