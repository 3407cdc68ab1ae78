"""Whether the data of a chunk is in its place now: what a look from this machine finds."""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from ..errors import DataflowError, Refused
from ..explain.state import Look, State
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
from ..model import READY
from ..store.overview import truths
from ..store.store import Store
from ..util.text import first_line
from . import pack
from .audit import names_of
from .folder import find
from .read import located

LOOK_SECONDS = 3.0
"""For how long `odf why` looks at the places of one chunk."""

LISTED = 10_000
"""Entries of a folder above which their names aren't compared with a chunk's."""

CANT_TELL = "whether the chunk is there can't be told from here"

T = TypeVar("T")


def look_at(store: Store, state: State) -> dict[str, Look]:
    """Whether the READY data that a chunk is made from, and what was made, is where it should be.

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
        gone = not pack.is_there(where) if is_packed(where) else is_missing(where)
        return Look(not gone, f"{where} is gone" if gone else "")

    def _is_listed(self, folder: Folder, place: str) -> bool:
        """Whether the chunk is an entry of a folder that is here."""
        is_here = not is_relative(place) and os.path.isdir(folder.root)
        return is_here and not format_of(folder.format).is_lake

    def _rows(self, table: Table) -> Look:
        from ..config.credentials import password_of
        from .table import Rows

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
