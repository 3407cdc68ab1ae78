"""`odf compact`: chunks of many small files become chunks of few, and stay what they are."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

from ..errors import DataflowError, Refused, Unreachable
from ..formats import FORMATS, format_of, format_of_file
from ..formats.format import Format, Unfit, data_files
from ..location import Folder, ObjectStore, Table, chunk_place, is_packed
from ..model import READY, RUNNING
from ..store.operations import unknown_dataset
from ..store.overview import pages
from ..store.store import Store
from ..util.system import locked
from ..util.text import first_line, typed
from . import folder as folders

MERGEABLE = tuple(format for format in FORMATS if format.can_merge)

TARGET = 128 * 2**20
"""Bytes of a file that is large enough."""


LINGER = 1.0
"""Seconds between taking a directory away and removing it: who is listing it gets all its names.

Opened by name they are gone then, which is an error; a list cut short would pass for the chunk.
"""


Replaced = list[tuple[float, folders.Staged]]
"""Directories that were replaced, and when."""


class Standing(NamedTuple):
    """A READY chunk of a folder that nobody has in hand, and where it is."""

    datasetid: str
    dataid: str
    generation: int
    location: str | None


class Compacted(NamedTuple):
    """What was done with a chunk, or would be; or why it is left."""

    datasetid: str
    dataid: str
    generation: int | None
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int | None
    path: str
    left: str = ""


def folder_of(store: Store, datasetid: str, formats: Sequence[Format] = MERGEABLE) -> Folder:
    """The folder of a dataset whose chunks are files of one of some formats."""
    found = store.db.records("state.dataset", datasetid=datasetid)
    if not found:
        action = f"Run: odf dataset add {typed(datasetid)} --hostname /FOLDER"
        raise unknown_dataset(store, datasetid, action)
    columns = {name.lower(): value for name, value in found[0].items()}
    target = chunk_place(datasetid, columns)
    what = ""
    if isinstance(target, Table):
        what = "is a table, whose database keeps its rows together"
    elif isinstance(target, ObjectStore):
        what = "is where nothing can be replaced in one step: let its chunks be made again"
    elif not isinstance(target, Folder):
        what = "isn't a folder"
    elif format_of(target.format) not in formats:
        names = ", ".join(format.name for format in formats)
        what = f"has the format {target.format}, and only {names} can be rewritten"
    if not isinstance(target, Folder) or what:
        raise Refused(f"{datasetid!r} {what}: nothing to compact.", code="INVALID_LOCATION")
    return target


def standing(store: Store, datasetid: str, dataids: Iterable[str]) -> dict[str, Standing]:
    """Those of some chunks that are READY and in nobody's hands; by dataid."""
    asked = json.dumps(list(dataids))
    rows, _ = store.db.insist(
        lambda: store.db.run("compact.chunks", datasetid=datasetid, dataids=asked)
    )
    found: dict[str, Standing] = {}
    busy = set()
    for each, _, locktype, status, generation, location in rows:
        if locktype == "OUT" and status == READY:
            if each not in found or (generation or 0) > found[each].generation:
                found[each] = Standing(datasetid, each, generation or 0, location)
        elif locktype == "OUT" or status == RUNNING:
            busy.add(each)
    return {each: chunk for each, chunk in found.items() if each not in busy}


def all_standing(store: Store, datasetid: str) -> Iterator[Standing]:
    """All chunks of a dataset that are READY and in nobody's hands, as they are read."""
    for dataids in pages(store, datasetid):
        yield from in_order(standing(store, datasetid, dataids).values())


def chosen(
    store: Store, datasetid: str, dataids: Sequence[str], some: Sequence[str] | None
) -> tuple[Iterable[Standing], list[Compacted]]:
    """The chunks to compact, and those named that can't be now.

    Args:
        store: The tables.
        datasetid: The dataset.
        dataids: Only these; none takes all, or those of `some`.
        some: What a quick plan looks at.
    """
    if not dataids:
        if some is None:
            return all_standing(store, datasetid), []
        return in_order(standing(store, datasetid, some).values()), []
    there = standing(store, datasetid, dataids)
    missing = [
        Compacted(datasetid, each, None, 0, 0, 0, None, "", "it isn't READY, or somebody has it")
        for each in dataids
        if each not in there
    ]
    return in_order(there.values()), missing


def in_order(chunks: Iterable[Standing]) -> list[Standing]:
    """Chunks in their natural order."""
    from ..ids import natural_key

    return sorted(chunks, key=lambda chunk: natural_key(chunk.dataid))


def compact(
    store: Store,
    datasetid: str,
    dataids: Sequence[str] = (),
    *,
    target: int = TARGET,
    plan: bool = False,
    some: Sequence[str] | None = None,
) -> Iterator[Compacted]:
    """Rewrite the chunks of a folder that have more files than their bytes need, one by one."""
    folder = folder_of(store, datasetid)
    with nullcontext() if plan else rewriting(folder.root):
        wanted, missing = chosen(store, datasetid, dataids, some)
        yield from missing
        yield from rewrite_each(
            wanted, lambda chunk, replaced: _one(store, folder, chunk, target, plan, replaced)
        )


@contextmanager
def rewriting(root: str) -> Iterator[None]:
    """One process at a time rewrites a folder's chunks, and no `odf clean` removes packs meanwhile.

    The lock is that of `_packs`, on which earlier versions agree.
    """
    if not os.path.isdir(root):
        yield
        return
    path = os.path.join(root, folders.PACKS)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise Unreachable(
            f"{path} can't be made: {error.strerror}. Correct that, and run it again."
        ) from None
    with locked(path) as mine:
        if not mine:
            raise Refused(
                f"Another process is compacting or cleaning {root}. Wait until it is done.",
                code="LOCKED",
            )
        try:
            yield
        finally:
            with suppress(OSError):  # there are packs in it
                os.rmdir(path)


def rewrite_each(
    chunks: Iterable[Standing], rewrite: Callable[[Standing, Replaced], Compacted | None]
) -> Iterator[Compacted]:
    """Rewrite chunks one by one, and remove what was replaced when nobody lists it any more."""
    replaced: Replaced = []
    try:
        for chunk in chunks:
            if done := rewrite(chunk, replaced):
                yield done
            while replaced and replaced[0][0] < time.monotonic() - LINGER:
                replaced.pop(0)[1].discard()
    finally:
        if replaced:
            time.sleep(LINGER)
        for _, staged in replaced:
            staged.discard()


def own_directory(folder: Folder, chunk: Standing) -> str | None:
    """The chunk's directory, if it is one of ours and has data files directly in it."""
    try:
        path = folders.chunk_path(folder.root, chunk.dataid)
    except Refused:
        return None
    if not os.path.isdir(path) or folders.find(folder.root, chunk.dataid, chunk.location) != path:
        return None
    return path


def why_left(path: str, paths: Sequence[str], name: str) -> str:
    """Why the files of a chunk can't be rewritten, if so."""
    if any(os.path.dirname(each) != path for each in paths):
        return "it has folders of its own"
    odd = [file for file in paths if format_of_file(file, "").name != name]
    return f"{os.path.basename(odd[0])} isn't called .{name}" if odd else ""


def unreadable() -> tuple[type[Exception], ...]:
    """What is raised for a file that isn't what its name says."""
    import pyarrow

    return (pyarrow.ArrowException,)


def still(store: Store, chunk: Standing) -> Callable[[], None]:
    """Asks whether a chunk is as it was when it was chosen."""

    def confirm() -> None:
        now = standing(store, chunk.datasetid, [chunk.dataid]).get(chunk.dataid)
        if now != chunk:
            raise Unfit("somebody has taken it, or made it anew, meanwhile")

    return confirm


def _one(
    store: Store,
    folder: Folder,
    chunk: Standing,
    target: int,
    plan: bool,
    replaced: Replaced,
) -> Compacted | None:
    path = None if is_packed(chunk.location) else own_directory(folder, chunk)
    if path is None:
        return None
    paths = data_files(path)
    size = sum(map(os.path.getsize, paths))
    needed = max(1, -(-size // max(1, target)))
    if len(paths) <= needed:
        return None
    found = Compacted(
        chunk.datasetid, chunk.dataid, chunk.generation, len(paths), needed, size, None, path
    )
    kind = folders.read_note(path).get("format") or folder.format
    left = why_left(path, paths, kind)
    if plan or left or not format_of(kind).can_merge:
        return found._replace(left=left or ("" if plan else f"its format is {kind}"))
    try:
        staged, count, size = _rewrite(store, folder, chunk, path, kind, target)
        replaced.append((time.monotonic(), staged))
    except (Unfit, FileNotFoundError, DataflowError, *unreadable()) as error:
        gone = isinstance(error, FileNotFoundError)
        reason = "it was made anew meanwhile" if gone else first_line(error)
        return found._replace(files_after=len(paths), left=reason)
    return found._replace(files_after=count, bytes_after=size)


def _rewrite(
    store: Store, folder: Folder, chunk: Standing, path: str, kind: str, target: int
) -> tuple[folders.Staged, int, int]:
    """Write a chunk's rows anew and put them in the place of the old: what it was; files; bytes."""
    note = folders.read_note(path)
    if folders.is_foreign(note, store.id):
        raise Unfit("another store has published it")
    if note.get("generation", chunk.generation) != chunk.generation:
        raise Unfit("its directory is of another generation than the tables tell")
    paths = data_files(path)
    staged = folders.Staged(folder.root, chunk.dataid, chunk.generation, store.id)
    try:
        format = format_of(kind)
        format.merge(paths, staged.path, target)
        written = data_files(staged.path)
        size = sum(map(os.path.getsize, written))
        rows = None if format.is_text else sum(format.count(file) or 0 for file in written)
        if rows is not None and note.get("rows") not in (None, rows):
            raise Unfit(f"it has {rows} rows, and its note tells of {note['rows']}")
        told = {name: value for name, value in note.items() if name not in ("dataid", "generation")}
        staged.tell({**told, **({"bytes": size} if "bytes" in told else {})})

        def confirm() -> None:
            still(store, chunk)()
            # Of the same generation: another compaction may have been faster.
            if data_files(path) != paths:
                raise Unfit("it was compacted meanwhile")

        staged.replace(confirm)
    except BaseException:
        staged.discard()
        raise
    told_of: dict[str, Any] = {"dataid": chunk.dataid, "generation": chunk.generation}
    store.db.insist(
        lambda: store.db.change("compact.resize", datasetid=chunk.datasetid, bytes=size, **told_of)
    )
    return staged, len(written), size
