"""Leftovers of crashed publishes in object stores and databases, found through Spark or SQL."""

import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ..location import JDBC, ObjectStore, Table, address, path_of
from ..storage.cleanup import (
    GRACE,
    POINTER,
    SPARK,
    TABLE,
    VERSION,
    Leftover,
    Remove,
    is_written,
    live,
)
from ..storage.compact import Standing, all_standing, standing
from ..storage.folder import NOTE, directory, unescaped
from ..store.store import Store
from . import jdbc, postgres_write
from .object_store import Files, Version, files_of, from_json, to_json, versions

_ASIDE = re.compile(r"/dataid=([^/]+)/_odf-[0-9a-f]+$")
"""A pointer that was being written."""


def in_remote(
    store: Store,
    target: ObjectStore,
    session: Callable[[], Any],
    grace: float = GRACE,
    files: Files | None = None,
) -> Iterator[tuple[Leftover, Remove]]:
    """Versions of chunks that the tables don't tell of, and pointers that name another.

    A version that a pointer names stays until the pointer is right: there are readers who go by it.
    """
    is_local = path_of(address(target.root)) is not None
    files = files or files_of(None if is_local else session(), target)
    datasetid, known = target.datasetid, {"datasetid": target.datasetid}
    below = files.below(address(target.root))  # before the tables, as in a folder
    found = versions(below, target)
    alive = live(store, datasetid)
    kept = {row[2] for row in store.db.insist(lambda: store.db.run("cleaning.located", **known))[0]}
    locations = {each.location for each in found}
    chunks: dict[str, list[Version]] = {}
    for each in found:
        chunks.setdefault(each.dataid, []).append(each)
    for chunk in all_standing(store, datasetid):
        if chunk.location in locations and _pointed(files, target, chunk.dataid) != chunk.location:
            path = f"{target.root}/{directory(chunk.dataid)}/{NOTE}"
            row = Leftover(datasetid, chunk.dataid, chunk.generation, POINTER, path, None, None)
            yield row, lambda chunk=chunk, path=path: _correct(store, files, chunk, path)
    for each in below:
        aside, age = _ASIDE.search(each.path), max(0.0, time.time() - each.changed)
        if aside and age >= grace and not alive.has(dataid := unescaped(aside[1])):
            row = Leftover(datasetid, dataid, None, SPARK, each.path, each.bytes, age)
            yield row, lambda each=each: files.remove(each.path)
    for each in found:
        newer = [one.changed for one in chunks[each.dataid] if one.generation > each.generation]
        age = max(0.0, time.time() - max(each.changed, min(newer, default=0.0)))  # since replaced
        if each.location in kept or age < grace or each.generation in alive.generations:
            continue
        if _pointed(files, target, each.dataid) != each.location:
            row = Leftover(
                datasetid, each.dataid, each.generation, VERSION, each.location, each.bytes, age
            )
            yield row, lambda each=each: files.remove(address(each.location))


def in_table(
    store: Store, table: Table, password: Callable[[], str | None], session: Callable[[], Any]
) -> Iterator[tuple[Leftover, Remove]]:
    """Staging tables of a database whose claims are over; it doesn't tell their age."""
    if table.dialect == JDBC:
        if not is_written(store, table.datasetid):
            return  # so that Java isn't needed for it
        found = jdbc.leftovers(table, password, session())
        drop = partial(jdbc.drop, spark=session())
    else:
        found, drop = postgres_write.leftovers(table, password), postgres_write.drop
    alive = live(store, table.datasetid)
    for name, generation in found:
        if generation not in alive.generations:
            yield (
                Leftover(table.datasetid, "", generation, TABLE, name, None, None),
                lambda name=name: drop(table, password, [name]) is not False,
            )


def _pointed(files: Files, target: ObjectStore, dataid: str) -> str:
    """The version that a chunk's pointer names."""
    chunk = f"{target.root}/{directory(dataid)}"
    return f"{chunk}/{from_json(files.read(f'{address(chunk)}/{NOTE}')).get('version')}"


def _correct(store: Store, files: Files, chunk: Standing, path: str) -> bool:
    """Let a pointer name the version that the tables tell of, if they still do."""
    now = standing(store, chunk.datasetid, [chunk.dataid]).get(chunk.dataid)
    if now != chunk or chunk.location is None:
        return False
    version = chunk.location.rpartition("/")[2]
    pointer = {"version": version, "generation": chunk.generation, "store": store.id}
    files.write(address(path), to_json(pointer))
    return True
