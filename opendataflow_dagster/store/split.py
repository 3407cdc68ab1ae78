"""The chunks of a large table: by calendar, by number, by remainder, or by value."""

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from datetime import date
from typing import Any, NamedTuple, overload

from ..errors import LostRace, Refused, WrongUse
from ..model import PENDING, READY, check_id, check_text
from ..util.text import typed
from .items import ACCEPT
from .moves import Move, add_rows, as_json, generations, person
from .operations import refuse_unknown_job, unknown_dataset
from .overview import known
from .registry import SPLIT
from .store import Store, is_registered

MAX_CHUNKS = 1_000_000
"""Chunks that one split may register."""

CHUNKS_PER_TRANSACTION = 2_000
"""Chunks that one transaction registers: on SQLite, others wait for its end."""

PERIODS = ("day", "week", "month", "year")


class SplitChunk(NamedTuple):
    """A chunk of a table, and which rows are in it.

    `lower_bound` <= column < `upper_bound`; without an upper bound, column = `lower_bound`; with a
    `modulus`, column modulo modulus = `lower_bound`.
    """

    dataid: str
    lower_bound: str
    upper_bound: str | None = None
    modulus: int | None = None


class Series(Sequence[SplitChunk]):
    """An ordered sequence of chunks, each computed on access: a million of them cost nothing.

    Args:
        places: The numbers of the chunks.
        chunk: The chunk of a number.
        place: The number of the chunk that has a lower bound in it; one that is no place if none.
    """

    def __init__(
        self, places: Sequence[int], chunk: Callable[[int], SplitChunk], place: Callable[[str], int]
    ) -> None:
        self.places, self.chunk, self.place = places, chunk, place

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, at: int) -> SplitChunk: ...
    @overload
    def __getitem__(self, at: slice) -> "Series": ...
    def __getitem__(self, at: int | slice) -> "SplitChunk | Series":
        if isinstance(at, slice):
            return Series(self.places[at], self.chunk, self.place)
        return self.chunk(self.places[at])


class Split(NamedTuple):
    """The chunks that a table has now, and which of them are new."""

    chunks: Series
    new: Series
    status: str


def by_date(first: str, last: str, period: str) -> Series:
    """A chunk for each whole period from the one of `first` to the one of `last`, both included.

    The dataid is 2026-01-05 for a day and for the week from that Monday, 2026-01, or 2026.
    """
    if period not in PERIODS:
        raise WrongUse(f"There are no chunks by {period!r}. Use one of {', '.join(PERIODS)}.")
    begin, end = _number(_date(first), period), _number(_date(last), period)
    if _date(last) < _date(first):
        raise WrongUse(f"--to {last} is before --from {first}. Swap them.")
    length = {"month": 7, "year": 4}.get(period, 10)

    def chunk(number: int) -> SplitChunk:
        start = _start(number, period).isoformat()
        return SplitChunk(start[:length], start, _start(number + 1, period).isoformat())

    try:
        _start(end + 1, period)  # where the last chunk ends
    except (OverflowError, ValueError):
        raise WrongUse(
            f"--to {last} is at the end of the calendar. Choose an earlier date."
        ) from None
    return _limited(
        Series(
            range(begin, end + 1),
            chunk,
            lambda bound: _number(date.fromisoformat(bound), period),
        )
    )


def by_number(
    lower: int, upper: int, *, size: int | None = None, count: int | None = None
) -> Series:
    """Chunks from `lower` up to, not including, `upper`: of `size` numbers, or `count` of them.

    The dataid is the lower bound, so a later split continues where a table that grew had ended.
    """
    width = upper - lower
    if width <= 0:
        raise WrongUse(
            f"--to {upper} isn't greater than --from {lower}, so there is nothing to split."
        )
    if (size is None) == (count is None):
        raise WrongUse("Use either --size, numbers per chunk, or --chunks, the number of chunks.")
    if size is not None and size < 1:
        raise WrongUse("--size must be at least 1.")
    if count is not None and not 1 <= count <= width:
        raise WrongUse(
            f"--chunks must be between 1 and {width}, as there are only {width} numbers."
        )
    # Chunk n begins at lower + n * step / parts, rounded down.
    step, parts = (size, 1) if size is not None else (width, count or 1)

    def chunk(number: int) -> SplitChunk:
        low = str(lower + step * number // parts)
        return SplitChunk(low, low, str(min(upper, lower + step * (number + 1) // parts)))

    return _limited(
        Series(
            range(-(-width * parts // step)),
            chunk,
            lambda bound: ((int(bound) - lower + 1) * parts - 1) // step,
        )
    )


def by_shards(count: int) -> Series:
    """A chunk for each remainder of the column divided by `count`; the dataid is the remainder."""
    if count < 1:
        raise WrongUse("--shards must be at least 1.")
    return _limited(
        Series(range(count), lambda shard: SplitChunk(str(shard), str(shard), None, count), int)
    )


def by_value(values: Iterable[str]) -> Series:
    """A chunk for each value; the dataid is the value."""
    names = list(dict.fromkeys(check_id("dataid", value) for value in values))
    places = {name: place for place, name in enumerate(names)}
    return _limited(
        Series(
            range(len(names)),
            lambda place: SplitChunk(names[place], names[place]),
            lambda value: places.get(value, -1),
        )
    )


def split(
    store: Store,
    datasetid: str,
    chunks: Series,
    *,
    column: str | None = None,
    pending: bool = False,
    jobid: str | None = None,
    plan: bool = False,
    who: str | None = None,
) -> Split:
    """Register the chunks of a table; those that are there already stay as they are.

    They are READY, since the table's data is there; with `pending` PENDING, for `jobid` to produce.
    Many are registered in one short transaction after another: what is killed goes on when it is
    run again.
    """
    check_id("datasetid", datasetid)
    check_text("column", column)
    if not chunks:
        raise WrongUse(f"There is nothing to split {datasetid!r} into. Name some values.")
    if jobid and not pending:
        raise WrongUse("--job names the job that will produce the chunks: use it with --pending.")
    status = PENDING if pending else READY
    new, mark = store.db.insist(lambda: _compared(store, datasetid, chunks, column, jobid))[0]
    if plan:
        return Split(chunks, new, status)
    row, left = Move(jobid or SPLIT, datasetid, "", None, status), new
    while True:
        some = left[:CHUNKS_PER_TRANSACTION]
        after = store.db.insist(
            lambda some=some, mark=mark: _register(store, row, some, column, mark, who or person())
        )[0]
        if after is None:  # another split of the dataset has come in between
            left, mark = store.db.insist(
                lambda: _compared(store, datasetid, chunks, column, jobid)
            )[0]
            continue
        left, mark = left[CHUNKS_PER_TRANSACTION:], after
        if not left:
            return Split(chunks, new, status)
        store.give_way(len(some))


def _compared(
    store: Store, datasetid: str, chunks: Series, column: str | None, jobid: str | None
) -> tuple[Series, str]:
    """Those chunks that aren't registered yet, and a mark that another split would change.

    Refuses a chunk that shares rows with one that is there, or that has other bounds than before.
    """
    db, chunk, place = store.db, chunks.chunk, chunks.place
    first, count = chunks.places[0], len(chunks)
    there: bytearray | None = None
    with db.reading(), closing(db.stream("split.ranges", datasetid=datasetid)) as rows:
        [(mark,)] = db.run("split.mark", datasetid=datasetid)
        for row in rows:
            if there is None:
                there = bytearray(count)
                _check_dataset(store, datasetid, column, is_split=True)
                _check_job(store, datasetid, jobid)
                if _kind(SplitChunk(*row[:4])) != _kind(chunks[0]):
                    raise _overlap(datasetid, SplitChunk(*row[:4]), chunks[0])
            at = place(row[1]) - first
            if 0 <= at < count and chunk(first + at) == row[:4]:
                there[at] = bool(row[4])
            elif _share_rows(
                old := SplitChunk(*row[:4]), new := chunks[min(max(at, 0), count - 1)]
            ):
                raise _overlap(datasetid, old, new)
        if there is None:
            _check_dataset(store, datasetid, column, is_split=False)
            _check_job(store, datasetid, jobid)
            return chunks, mark
    missing = array("q", (first + at for at, is_there in enumerate(there) if not is_there))
    return Series(missing, chunks.chunk, chunks.place), mark


def _register(
    store: Store, row: Move, chunks: Series, column: str | None, mark: str, who: str
) -> str | None:
    """Register some chunks if the mark holds, and give the next one."""
    db, datasetid = store.db, row.datasetid
    with db.transaction(who=who, why="odf split", act=ACCEPT):
        # Compared again under the lock: if another split has registered chunks since, this one's
        # may share rows with them, and the caller looks at all of them anew.
        db.run("registry.lock_datasets")
        if db.run("split.overtaken", datasetid=datasetid, mark=mark):
            return None
        db.change("split.set_column", datasetid=datasetid, column=column)
        ranges = json.dumps([chunk._asdict() for chunk in chunks])
        db.change("split.add_ranges", datasetid=datasetid, rows=ranges)
        names = [chunk.dataid for chunk in chunks]
        old = known(store, [datasetid], names)
        rows = [row._replace(dataid=name) for name in names if name not in old]
        numbers: dict[str, int] = {}
        if row.status_after == READY:
            fresh = generations(store, len(rows))
            numbers = {row.dataid: number for row, number in zip(rows, fresh, strict=True)}
        if add_rows(store, rows, numbers) < len(rows):
            raise LostRace("Another process registered a chunk meanwhile.")
        if numbers:
            db.change("split.note", rows=as_json(rows, numbers))
        db.run("split.sort_pending", datasetid=datasetid)
        return db.run("split.mark", datasetid=datasetid)[0][0]


def _check_dataset(store: Store, datasetid: str, column: str | None, *, is_split: bool) -> None:
    if not is_registered(store, datasetid):
        raise unknown_dataset(
            store,
            datasetid,
            f"First run `odf dataset add {typed(datasetid)}`, with the location of the table.",
        )
    columns = [name for (name,) in store.db.run("split.column", datasetid=datasetid) if name]
    if not (column or columns):
        raise WrongUse(f"Which column splits {datasetid!r}? Name it with --column NAME.")
    if column and is_split and columns and column not in columns:
        raise Refused(
            f"Dataset {datasetid!r} is already split by {columns[0]!r}: chunks by "
            f"{column!r} would contain the same rows again. To split by another column, "
            "register the table as another dataset.",
            code="OVERLAP",
        )


def _check_job(store: Store, datasetid: str, jobid: str | None) -> None:
    if jobid and datasetid not in store.read_plan(jobid).outputs:
        refuse_unknown_job(store, jobid)
        raise Refused(
            f"Job {jobid!r} isn't registered to write {datasetid!r}. Run: odf job add "
            f"{typed(jobid)} --out {typed(datasetid)}",
            code="NOT_REGISTERED",
        )


def _share_rows(old: SplitChunk, new: SplitChunk) -> bool:
    """Whether two chunks of one kind have rows in common."""
    if old.upper_bound is None or new.upper_bound is None:
        return old.dataid == new.dataid or old.lower_bound == new.lower_bound
    low, high = (_bound(old.lower_bound), _bound(old.upper_bound))
    return low < _bound(new.upper_bound) and _bound(new.lower_bound) < high


def _overlap(datasetid: str, old: SplitChunk, new: SplitChunk) -> Refused:
    return Refused(
        f"Dataset {datasetid!r} has chunk {old.dataid!r} with {_shown(old)}; chunk "
        f"{new.dataid!r} with {_shown(new)} would contain some of its rows. Nothing "
        "more was registered. Use the same bounds, or register the table as another "
        "dataset.",
        code="OVERLAP",
    )


def _kind(chunk: SplitChunk) -> tuple[Any, ...]:
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


def _shown(chunk: SplitChunk) -> str:
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


def _number(day: date, period: str) -> int:
    """The number of the period that a day is in: whole periods are counted from the year 1."""
    if period == "year":
        return day.year
    if period == "month":
        return day.year * 12 + day.month - 1
    return day.toordinal() if period == "day" else (day.toordinal() - 1) // 7


def _start(number: int, period: str) -> date:
    """The first day of a period."""
    if period == "year":
        return date(number, 1, 1)
    if period == "month":
        return date(number // 12, number % 12 + 1, 1)
    return date.fromordinal(number if period == "day" else number * 7 + 1)


def _limited(chunks: Series) -> Series:
    if len(chunks) > MAX_CHUNKS:
        raise WrongUse(f"That is more than {MAX_CHUNKS:,} chunks. Use larger ones.")
    return chunks
