"""`odf clean`: leftovers of crashed publishes, as opposed to data that is being written."""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..errors import Refused
from ..store.store import Store
from ..util.system import locked, publish_lock
from ..util.times import from_table
from . import folder
from .compact import packs_in, packs_of

GRACE = 3600.0
"""Seconds for which nothing is touched after a change, by default."""

STAGED, BATCH = "unfinished chunk", "unfinished batch"
OLD, BACK, SPARK = "replaced chunk", "put back", "unfinished files"
PACK = "pack that nothing is in"
VERSION, TABLE, POINTER = "old version", "staging table", "pointer"

_NAME = re.compile(r"([0-9]+)-[0-9a-f]+(\.old)?")
_PREFIX = "dataid="
_SPARKS = "_temporary"


class Leftover(NamedTuple):
    """What to remove or restore; bytes and age (in seconds) as far as known."""

    datasetid: str
    dataid: str
    generation: int | None
    what: str
    path: str
    bytes: int | None
    age: float | None


Remove = Callable[[], bool]
"""Removes or restores it, and returns whether there was something left to do."""


class Live(NamedTuple):
    """What live claims hold: generations, the chunks by dataid, and since when, by job."""

    generations: set[int]
    dataids: set[str]
    since: float | None

    def has(self, dataid: str) -> bool:
        return dataid in self.dataids


def live(store: Store, datasetid: str) -> Live:
    """The live claims, of all jobs by generation, and of the producers of a dataset by chunk."""
    claims = store.db.fetch("cleaning.live")
    makers = _makers(store, datasetid)
    mine = [claim for claim in claims if claim[2] in makers]
    times = [moment.timestamp() for claim in mine if (moment := from_table(store, claim[3]))]
    return Live(
        {claim[0] for claim in claims}, {claim[1] for claim in mine}, min(times, default=None)
    )


def is_written(store: Store, datasetid: str) -> bool:
    """Whether any job is to write a dataset."""
    return bool(_makers(store, datasetid))


def _makers(store: Store, datasetid: str) -> set[str]:
    known = {"datasetid": datasetid}
    rows = store.db.fetch("cleaning.producers", **known)
    return {job for (job,) in rows}


def in_folder(
    store: Store, datasetid: str, root: str, grace: float = GRACE
) -> Iterator[tuple[Leftover, Remove]]:
    """What crashes left in a folder, each with its removal.

    The disk is read before the tables: a writer claims first, so anything on the disk that belongs
    to no live claim is a leftover.
    """
    entries = list(_staged(datasetid, root))
    sparks = list(_spark_files(datasetid, root))
    packs = packs_in(root)
    alive = live(store, datasetid)
    for entry in entries:
        if not _is_young(entry, grace) and not _is_live(entry, alive):
            yield entry, _remover(root, entry)
    for entry in sparks:
        if not _is_young(entry, grace) and not alive.has(entry.dataid):
            yield entry, lambda entry=entry: _removed(entry.path)
    if packs:
        yield from _of_packs(store, datasetid, root, packs, grace)


def age_of(path: str) -> float:
    """Seconds since anything below a path was changed."""
    newest = 0.0
    for each in _below(path):
        with suppress(FileNotFoundError):
            newest = max(newest, os.lstat(each).st_mtime)
    return max(0.0, time.time() - newest)


def size_of(path: str) -> int:
    """The bytes of the files below a path."""
    total = 0
    for each in _below(path):
        with suppress(FileNotFoundError):
            total += os.lstat(each).st_size if not os.path.isdir(each) else 0
    return total


def shared_packs(store: Store, datasetids: Sequence[str]) -> set[str]:
    """The packs that any chunk of some datasets is in."""
    found: set[str] = set()
    for datasetid in datasetids:
        known = {"datasetid": datasetid}
        rows, _ = store.db.insist(lambda known=known: store.db.run("cleaning.located", **known))
        found |= packs_of(location for _, _, location in rows)
    return found


def _staged(datasetid: str, root: str) -> Iterator[Leftover]:
    """Everything in a folder's staging that belongs to no claim, and what it is."""
    above = os.path.join(root, folder.STAGING)
    for name in _names(above):
        path = os.path.join(above, name)
        if name.startswith("_"):
            yield _entry(datasetid, "", _last(name), BATCH, path)
        elif name.startswith(_PREFIX):
            dataid = folder.unescaped(name.removeprefix(_PREFIX))
            final = os.path.join(root, name)
            old = [each for each in _names(path) if each.endswith(".old")]
            back = (
                max(
                    old, key=lambda each: folder.generation_of(os.path.join(path, each)), default=""
                )
                if not os.path.lexists(final)
                else ""
            )
            for each in _names(path):
                if found := _NAME.fullmatch(each):
                    what = BACK if each == back else OLD if found[2] else STAGED
                    where = os.path.join(path, each)
                    yield _entry(datasetid, dataid, int(found[1]), what, where)


def _spark_files(datasetid: str, root: str) -> Iterator[Leftover]:
    """What a Spark that was killed left in the directories of chunks, written by a script."""
    for name in _names(root):
        path = os.path.join(root, name, _SPARKS)
        if name.startswith(_PREFIX) and os.path.isdir(path):
            dataid = folder.unescaped(name.removeprefix(_PREFIX))
            yield _entry(datasetid, dataid, None, SPARK, path)


def _of_packs(
    store: Store, datasetid: str, root: str, packs: Sequence[str], grace: float
) -> Iterator[tuple[Leftover, Remove]]:
    sharing = _sharing(store, datasetid, root)
    used = shared_packs(store, sharing)
    for path in packs:
        entry = _entry(datasetid, "", None, PACK, path)
        if path not in used and not _is_young(entry, grace):
            yield entry, lambda path=path: _remove_pack(store, root, sharing, path)


def _remove_pack(store: Store, root: str, sharing: Sequence[str], path: str) -> bool:
    """Remove a pack, unless it is being unpacked or still has a chunk."""
    with locked(os.path.join(root, folder.PACKS)) as mine:
        if not mine or path in shared_packs(store, sharing):
            return False
        return _removed(path)


def _sharing(store: Store, datasetid: str, root: str) -> list[str]:
    """The datasets whose chunks are in a folder: usually one."""
    from ..location import Folder

    return [
        name
        for name, columns, _ in registered(store)
        if name == datasetid
        or (isinstance(target := _target(name, columns), Folder) and target.root == root)
    ]


def registered(store: Store) -> list[tuple[str, dict[str, str | None], str | None]]:
    """Every dataset: its id, its columns, and its password as it is encrypted."""
    found: dict[str, tuple[str, dict[str, str | None], str | None]] = {}
    for row in store.db.fetch_records("cleaning.datasets"):
        columns = {
            name.lower(): None if value is None else str(value) for name, value in row.items()
        }
        encrypted = columns.pop("encryptedpass", None)
        found.setdefault(row["datasetid"], (row["datasetid"], columns, encrypted))
    return list(found.values())


def _target(datasetid: str, columns: Mapping[str, str | None]) -> Any:
    from ..location import chunk_place

    try:
        return chunk_place(datasetid, columns)
    except Refused:
        return None


def _entry(datasetid: str, dataid: str, generation: int | None, what: str, path: str) -> Leftover:
    return Leftover(datasetid, dataid, generation, what, path, size_of(path), age_of(path))


def _is_young(entry: Leftover, grace: float) -> bool:
    # What is to be put back keeps its time when it is moved aside, so that its age tells nothing.
    return entry.what != BACK and entry.age is not None and entry.age < grace


def _is_live(entry: Leftover, alive: Live) -> bool:
    if entry.what == BACK:
        return alive.has(entry.dataid) or entry.generation in alive.generations
    if entry.what == BATCH:
        # A batch is of many claims: any that is as old as its last change may be at work in it.
        changed = time.time() - (entry.age or 0.0)
        at_work = alive.since is not None and alive.since <= changed
        return at_work or entry.generation in alive.generations
    return entry.generation in alive.generations


def _remover(root: str, entry: Leftover) -> Remove:
    if entry.what == BACK:
        return lambda: _put_back(root, entry)
    if entry.what in (STAGED, OLD):
        return lambda: _removed(entry.path, folder.remove_staged)
    return lambda: _removed(entry.path)


def _put_back(root: str, entry: Leftover) -> bool:
    """Restore the only complete copy of a chunk."""
    staging, final = os.path.dirname(entry.path), folder.chunk_path(root, entry.dataid)
    # The lock of a publish: else one that comes now would be replaced by the older chunk.
    with publish_lock(staging):
        if os.path.lexists(final) or not os.path.isdir(entry.path):
            return False
        os.rename(entry.path, final)
        folder.sync_one(root)
    _tidy(staging)
    return True


def _removed(path: str, remove: Callable[[str], None] = folder.remove) -> bool:
    there = os.path.lexists(path)
    with suppress(FileNotFoundError):
        remove(path)
    _tidy(os.path.dirname(path))
    return there and not os.path.lexists(path)


def _tidy(above: str) -> None:
    """Remove directories of staging, or of packs, in which nothing is left."""
    for _ in range(2):
        name = os.path.basename(above)
        if not name.startswith((_PREFIX, folder.STAGING, folder.PACKS)):
            return
        staged = os.path.basename(os.path.dirname(above)) == folder.STAGING
        if name.startswith(_PREFIX) and not staged:
            return  # a chunk that is empty is a chunk
        with suppress(OSError):
            os.rmdir(above)
        above = os.path.dirname(above)


def _last(name: str) -> int | None:
    found = re.match(r"_[a-z]+-([0-9]+)-", name)
    return int(found[1]) if found else None


def _names(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _below(path: str) -> Iterator[str]:
    yield path
    for above, inner, names in os.walk(path):
        yield from (os.path.join(above, each) for each in (*inner, *names))
