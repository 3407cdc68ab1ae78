"""Whether chunks are in their places: for `odf why`, `odf drift`, and what a flow expects."""

import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from heapq import merge
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from ..chunk import Checked, Chunk, Unpublished
from ..errors import DataflowError, Refused
from ..explain.answers import Look, State
from ..formats import format_of
from ..location import (
    JDBC,
    Folder,
    Table,
    chunk_place,
    is_missing,
    is_packed,
    is_relative,
    path_of,
    place_of,
    place_to_look,
)
from ..model import PENDING, READY
from ..store.catalog import Catalog
from ..store.operations import unknown_dataset
from ..store.overview import Truth, facts, is_larger, newest, pages, truths
from ..store.store import Store
from ..util.text import first_line, typed
from . import compact
from .chunks import located
from .folder import find
from .table import Rows

LOOK_SECONDS = 3.0
"""For how long `odf why` looks at the places of one chunk."""

LISTED = 10_000
"""Entries of a folder above which their names aren't compared with a chunk's."""

CANT_TELL = "whether the chunk is there can't be told from here"

T = TypeVar("T")


def look_at(store: Store, state: State) -> dict[str, Look]:
    """Check whether a chunk's inputs and its own data are in their locations.

    It takes `LOOK_SECONDS` at most: a place that doesn't answer by then can't be told.
    """
    looks: dict[str, Look] = {}
    until = time.monotonic() + LOOK_SECONDS
    for datasetid in dict.fromkeys((*state.plan.reads, *state.plan.outputs)):
        if row := state.ready_row(datasetid):
            rows = store.db.records("state.dataset", datasetid=datasetid)
            columns = {name.lower(): value for name, value in (rows or [{}])[0].items()}
            bounds = store.db.run("reading.bounds", datasetid=datasetid, dataid=state.dataid)
            chunk = _Chunk(
                datasetid,
                state.dataid,
                columns,
                row.generation,
                state.fact(row),
                next(iter(bounds), None),
                store.id,
            )
            found = _in_time(chunk.look, until)
            looks[datasetid] = found if isinstance(found, Look) else _by_names(store, chunk, found)
    return looks


class _Chunk(NamedTuple):
    """A READY chunk, as the tables know it."""

    datasetid: str
    dataid: str
    columns: Mapping[str, Any]
    generation: int | None
    fact: Mapping[str, Any]
    bounds: tuple[str, str | None, int | None] | None
    store: str

    def look(self) -> "Look | list[str]":
        """What is found; of a folder in which it is called otherwise, the names of the entries."""
        told = {name: None if each is None else str(each) for name, each in self.columns.items()}
        produced, place = self.fact.get("location"), place_of(told)
        try:
            target = chunk_place(self.datasetid, told)
        except Refused:
            target = None
        if place and is_missing(place_to_look(place, produced) or place):
            return Look(True)  # that the place itself isn't there is told anyway
        if isinstance(target, Table) and target.dialect != JDBC:
            return self._rows(target)
        if isinstance(target, Folder) and self._is_listed(target, place or ""):
            return self._entry(target, produced)
        where = place_to_look(place, produced)
        if where is None or path_of(where) is None:
            return Look(None, CANT_TELL if where else "")
        gone = not compact.is_there(where) if is_packed(where) else is_missing(where)
        return Look(not gone, f"{where} is gone" if gone else "")

    def _is_listed(self, folder: Folder, place: str) -> bool:
        """Whether the chunk is an entry of a folder that is here."""
        is_here = not is_relative(place) and os.path.isdir(folder.root)
        return is_here and not format_of(folder.format).is_lake

    def _rows(self, table: Table) -> Look:
        from ..config.credentials import password_of

        encrypted = self.columns.get("encryptedpass")
        password = partial(password_of, self.datasetid, encrypted, os.environ)
        try:
            if Rows(table, self.dataid, self.bounds, password).is_there():
                return Look(True)
        except DataflowError as error:
            if type(error.__cause__).__name__ == "UndefinedTable" or "no such table" in str(error):
                return Look(False, f"there is no table {table.location}")
            return Look(None, f"{CANT_TELL}: {first_line(error)}")
        made = self.fact.get("rows")
        if made == 0:
            return Look(True)
        text = f"{table.location} has no row of chunk {self.dataid!r}"
        return Look(False, text) if made else Look(None, f"{text}, and no count tells of any")

    def _entry(self, folder: Folder, produced: str | None) -> "Look | list[str]":
        path = produced and os.path.normpath(path_of(produced) or produced)
        is_own = bool(path and path.startswith(folder.root + os.sep))
        try:
            there = is_own or find(folder.root, self.dataid)
        except Refused:  # a dataid that no entry is called after
            return Look(None, CANT_TELL)
        try:
            if there:
                located(folder, self.dataid, produced, self.generation, store=self.store)
                return Look(True)
        except Refused as error:
            if error.code != "INVALID_LOCATION":
                return Look(True)
            text = str(error).rstrip(".").partition("READY, but ")
            return Look(False, text[2] or text[0])
        with os.scandir(folder.root) as entries:
            names = [entry.name for entry in islice(entries, LISTED + 1)]
        return names if len(names) <= LISTED else Look(None, CANT_TELL)


def _in_time(look: Callable[[], T], until: float) -> "T | Look":
    """What a look finds; one that takes too long, as where a network is down, is left behind."""
    found: list[T | Look] = []

    def work() -> None:
        try:
            found.append(look())
        except Exception as error:  # a look fails nothing
            found.append(Look(None, f"{CANT_TELL}: {first_line(error)}"))

    # Nothing can interrupt a call to a network folder that is gone, so the thread is left behind.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(max(0.0, until - time.monotonic()))
    return found[0] if found else Look(None, f"{CANT_TELL}: it didn't answer in time")


def _by_names(store: Store, chunk: _Chunk, names: Sequence[str]) -> Look:
    """Whether one of a folder's entries is named after a chunk, if other entries are."""
    named = {
        dataid: name
        for name in names
        if not name.startswith(("_", "."))
        for dataid in names_of(name)
    }
    if chunk.dataid in named:
        return Look(True)
    others = truths(store, chunk.datasetid, named)
    if any(truth.status == READY for truth in others.values()):
        return Look(False, f"nothing in its folder is named after chunk {chunk.dataid!r}")
    return Look(None, CANT_TELL)


# --- all chunks of a dataset, compared with what the tables say ---


GONE, UNKNOWN, NO_FOLDER = "data is gone", "data of no known chunk", "folder is gone"

MANY, NEWEST = 100_000, 10_000
"""Rows above which a dataset is compared as a whole only if asked, and the chunks that are else."""

_COLUMN = re.compile(r"[^=/]+=(.*)", re.DOTALL)
_ESCAPE = re.compile("%([0-9A-Fa-f]{2})")
_PIECE = 1000


class Holding(NamedTuple):
    """One difference between a status and the data on the disk."""

    dataid: str
    status: str
    found: str
    place: str


class Drift(NamedTuple):
    """One chunk that isn't the same everywhere. `run`: what puts it right."""

    datasetid: str
    dataid: str
    tables: str
    dagster: str
    data: str
    run: str


def newest_of_large(store: Store, datasetids: Iterable[str]) -> dict[str, list[str]]:
    """The large ones of some datasets, with the chunks that a quick look compares."""
    large = [each for each in datasetids if is_larger(store, each, MANY)]
    return {each: newest(store, each, NEWEST) for each in large}


def drift_of_data(
    store: Store,
    catalog: Catalog,
    datasetid: str | None = None,
    some: Mapping[str, Sequence[str]] = {},
) -> Iterator[Drift]:
    """Compare the tables with the data on this machine, of one dataset or of all.

    Of a dataset in `some`, only those chunks.
    """
    if datasetid is not None and datasetid not in catalog.datasets:
        raise unknown_dataset(store, datasetid)
    for each in [datasetid] if datasetid is not None else list(catalog.domains):
        for held in misplaced(store, each, catalog.datasets[each].columns, some.get(each)):
            jobid = next(iter(catalog.producers(each)), None)
            made = [jobid, held.dataid] if jobid and held.dataid else None
            again = f"odf resubmit {typed(*made)}" if made and held.found == GONE else ""
            status = shown_word(held.status)
            yield Drift(each, held.dataid, status, "", f"{held.found}: {held.place}", again)


def shown_word(status: str) -> str:
    """A status, in the words of a comparison between tables, Dagster and data."""
    return status if status not in ("", PENDING) else "missing"


def misplaced(
    store: Store,
    datasetid: str,
    columns: Mapping[str, str | None],
    dataids: Sequence[str] | None = None,
) -> Iterator[Holding]:
    """The READY chunks of a dataset whose data is missing, and data without a chunk.

    Only where it can be told: a chunk's own recorded place, or a folder of this machine whose
    entries are named after chunks (`2026-11-18`, `2026-11-18.csv`, `day=2026-11-18`). Of some
    `dataids`, only their own places are looked at: a large folder isn't listed for a few chunks.
    All are compared some at a time, so that memory doesn't grow with them.
    """
    root = place_of(columns)
    path = path_of(root) if root else None

    def parts() -> Iterator[dict[str, Truth]]:
        some = _pieces(dataids) if dataids is not None else pages(store, datasetid)
        return (truths(store, datasetid, each) for each in some)

    if root and path is not None and is_missing(root):
        if any(_ready(there) for there in parts()):
            yield Holding("", READY, NO_FOLDER, path)
        return
    if dataids is not None or path is None or not os.path.isdir(path):
        for there in parts():
            yield from sorted(_own_gone(store, datasetid, _ready(there), root)[0].values())
        return
    with closing(_Folder(path)) as folder:
        is_named = False  # one whose entries are named otherwise tells nothing
        for there in parts():
            entries = folder.entries(there)
            folder.forget(entries.values())
            is_named = is_named or not _ready(there).keys().isdisjoint(entries)

        def gone() -> Iterator[Holding]:
            for there in parts():
                ready = _ready(there)
                found, own = _own_gone(store, datasetid, ready, root)
                # One with a place of its own, such as a pack, was looked at.
                named = folder.entries(ready).keys() | own if is_named else ready.keys()
                for each in ready.keys() - named:
                    found[each] = Holding(each, READY, GONE, os.path.join(path, each))
                yield from sorted(found.values())

        unknown = (
            Holding(dataid, PENDING, UNKNOWN, os.path.join(path, entry))
            for dataid, entry in (folder.rest() if is_named else ())
        )
        yield from merge(gone(), unknown)


def _ready(there: Mapping[str, Truth]) -> dict[str, Truth]:
    return {dataid: truth for dataid, truth in there.items() if truth.status == READY}


def _own_gone(
    store: Store, datasetid: str, ready: Mapping[str, Truth], root: str | None
) -> tuple[dict[str, Holding], set[str]]:
    """Of chunks with a recorded place on this machine of their own: whose is gone; and all."""
    found: dict[str, Holding] = {}
    own: set[str] = set()
    for dataid, fact in facts(store, datasetid, ready).items():
        recorded = fact["location"]
        place = path_of(recorded) if recorded and recorded != root else None
        if place is None:
            continue
        own.add(dataid)
        if not (compact.is_there(place) if is_packed(place) else os.path.exists(place)):
            found[dataid] = Holding(dataid, READY, GONE, place)
    return found, own


class _Folder:
    """The entries of a folder by the chunks that they may be named after, in a file, not memory."""

    def __init__(self, path: str) -> None:
        self._db = sqlite3.connect("", isolation_level=None)  # a temporary file
        self._db.execute("pragma journal_mode = off")
        self._db.execute("create table entry (name text primary key, likeliest text) without rowid")
        self._db.execute("create table named (dataid text primary key, name text) without rowid")
        with os.scandir(path) as entries:
            names = (each.name for each in entries if not each.name.startswith(("_", ".")))
            while some := list(islice(names, _PIECE)):
                self._add({name: names_of(name) for name in some})

    def _add(self, entries: dict[str, list[str]]) -> None:
        self._db.execute("begin")
        self._db.executemany(
            "insert into entry values (?, ?)",
            [(_bytes(name), _bytes(dataids[-1])) for name, dataids in entries.items()],
        )
        self._db.executemany(
            "insert or replace into named values (?, ?)",
            [(_bytes(each), _bytes(name)) for name, dataids in entries.items() for each in dataids],
        )
        self._db.execute("commit")

    def entries(self, dataids: Iterable[str]) -> dict[str, str]:
        """Those of some chunks that an entry is named after, with the entry."""
        found = {}
        for dataid in dataids:
            row = self._db.execute("select name from named where dataid = ?", [_bytes(dataid)])
            for (name,) in row:
                found[dataid] = os.fsdecode(name)
        return found

    def forget(self, names: Iterable[str]) -> None:
        """A chunk stands for these entries."""
        some = [[_bytes(name)] for name in names]
        self._db.execute("begin")
        self._db.executemany("delete from entry where name = ?", some)
        self._db.execute("commit")

    def rest(self) -> Iterator[tuple[str, str]]:
        """The entries that belong to no chunk, each with the chunk that it may be named after."""
        for dataid, name in self._db.execute(
            "select likeliest, name from entry order by likeliest, name"
        ):
            yield os.fsdecode(dataid), os.fsdecode(name)

    def close(self) -> None:
        self._db.close()


def _bytes(name: str) -> bytes:
    """A name as the file system has it: it may be no UTF-8."""
    return os.fsencode(name)


def _pieces(dataids: Sequence[str]) -> Iterator[Sequence[str]]:
    return (dataids[start : start + _PIECE] for start in range(0, len(dataids), _PIECE))


def names_of(entry: str) -> list[str]:
    """The chunks that a folder's entry may be named after; the likeliest last."""
    column = _COLUMN.fullmatch(entry)
    value = column[1] if column else entry
    plain = _ESCAPE.sub(lambda found: chr(int(found[1], 16)), value)
    stems = [value]
    while "." in stems[-1].lstrip("."):
        stems.append(stems[-1].rpartition(".")[0])
    return list(dict.fromkeys([*stems, plain]))


# --- what a flow expects of a chunk, asked before it becomes READY ---


EXISTS, ROWS = "exists", "rows"


class Expectation(NamedTuple):
    """One rule about the chunks of a dataset; called with a chunk, it answers as a check."""

    datasetid: str
    name: str
    least: int | None = None
    most: int | None = None

    @property
    def meaning(self) -> str:
        """What has to be true, in words."""
        if self.name == EXISTS:
            return "What the job was to write is in its place."
        return f"The chunk has {_span(self.least, self.most)} rows."

    def __call__(self, chunk: Chunk) -> Checked:
        try:
            fault = self.fault(chunk)
        except (DataflowError, OSError) as error:
            fault = f"it can't be told: {first_line(error)}"
        return Checked(self.name, self.datasetid, not fault, fault)

    def fault(self, chunk: Chunk) -> str:
        """What is wrong with a chunk; nothing if it is as expected."""
        if self.name == EXISTS:
            return _absence(chunk, self.datasetid)
        rows = chunk.results[self.datasetid].rows
        if rows is None:
            return "the number of rows is unknown"
        if (self.least is None or rows >= self.least) and (self.most is None or rows <= self.most):
            return ""
        return f"{rows:,}, where {_span(self.least, self.most)} are expected"


def expectations_of(datasetid: str, expect: Mapping[str, Any]) -> list[Expectation]:
    """The rules that `expect` of a dataset has, as a flow has checked it."""
    found = [Expectation(datasetid, EXISTS)] if expect.get(EXISTS) else []
    if rows := expect.get(ROWS):
        found.append(Expectation(datasetid, ROWS, rows.get("min"), rows.get("max")))
    return found


def _span(least: int | None, most: int | None) -> str:
    if most is None:
        return f"at least {least:,}"
    return f"at most {most:,}" if least is None else f"{least:,} to {most:,}"


def _absence(chunk: Chunk, datasetid: str) -> str:
    """What is missing where a job should have written its chunk; empty if nothing is."""
    result = chunk.results[datasetid]
    if isinstance(result, Unpublished):
        return ""
    place = chunk.outputs[datasetid]
    told = result.location if result.location != place.location else None
    if told and not is_packed(told) and (path := path_of(told)):
        return "" if _has_data(path) else f"{told} isn't there"
    target = chunk_place(datasetid, place.columns)
    if isinstance(target, Folder):
        return _absence_in_folder(target.root, chunk.dataid)
    if isinstance(target, Table) and target.dialect != JDBC:
        bounds = chunk.bounds(datasetid)
        if Rows(target, chunk.dataid, bounds, lambda: chunk.password(datasetid)).is_there():
            return ""
        return f"{target.location} has no row of chunk {chunk.dataid!r}"
    return f"whether it is there can't be asked of {place.location}: leave exists out"


def _absence_in_folder(root: str, dataid: str) -> str:
    if not os.path.isdir(root):
        return f"there is no folder {root}"
    if (path := find(root, dataid)) and _has_data(path):
        return ""
    with os.scandir(root) as entries:
        paths = [entry.path for entry in islice(entries, LISTED)]
    if any(_is_named(path, dataid) and _has_data(path) for path in paths):
        return ""
    return f"nothing in {root} is named after chunk {dataid!r}"


def _is_named(path: str, dataid: str) -> bool:
    name = os.path.basename(path)
    return not name.startswith(("_", ".")) and dataid in names_of(name)


def _has_data(path: str) -> bool:
    """Whether a path is a file, or a folder that isn't empty."""
    if not os.path.isdir(path):
        return os.path.exists(path)
    with os.scandir(path) as entries:
        return any(not entry.name.startswith(("_", ".")) for entry in entries)
