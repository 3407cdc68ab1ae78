"""What lies where a dataset's chunks should be, compared with what the tables say is there."""

import os
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from heapq import merge
from itertools import islice
from typing import NamedTuple

from ..location import is_missing, is_packed, path_of, place_of
from ..model import PENDING, READY
from ..store.catalog import Catalog
from ..store.operations import unknown_dataset
from ..store.overview import Truth, facts, is_larger, newest, pages, truths
from ..store.store import Store
from ..util.text import typed
from . import pack

GONE, UNKNOWN, NO_FOLDER = "data is gone", "data of no known chunk", "folder is gone"

MANY, NEWEST = 100_000, 10_000
"""Rows above which a dataset is compared as a whole only if asked, and the chunks that are else."""

_COLUMN = re.compile(r"[^=/]+=(.*)", re.DOTALL)
_ESCAPE = re.compile("%([0-9A-Fa-f]{2})")
_PIECE = 1000


class Holding(NamedTuple):
    """One disagreement between a status and what lies on the disk."""

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
    """A status as it is told where tables, Dagster and data are compared."""
    return status if status not in ("", PENDING) else "missing"


def misplaced(
    store: Store,
    datasetid: str,
    columns: Mapping[str, str | None],
    dataids: Sequence[str] | None = None,
) -> Iterator[Holding]:
    """The READY chunks of a dataset whose data isn't there, and data that no chunk stands for.

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
        if not (pack.is_there(place) if is_packed(place) else os.path.exists(place)):
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
        """The entries that no chunk stands for, each with the chunk that it may be named after."""
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
