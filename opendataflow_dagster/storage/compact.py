"""`odf compact`: chunks of many small files become chunks of few; and packs of earlier versions."""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import DataflowError, Refused, Unreachable
from ..formats import FORMATS, PARQUET, format_of, format_of_file
from ..formats.format import Format, Unfit, data_files, new_file
from ..formats.parquet_format import SPARK_ROWS, check_types, keep_metadata, same, writing_options
from ..location import PACKED_CHUNK, Folder, ObjectStore, Table, chunk_place, is_packed
from ..model import READY, RUNNING, natural_key
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
"""Seconds between taking a directory away and removing it: a reader that lists it gets all names.

Files opened by name are gone then, which is an error; a shortened list would pass for the chunk.
"""


Replaced = list[tuple[float, folders.Staged]]
"""Directories that were replaced, and when."""


class Standing(NamedTuple):
    """A READY chunk of a folder without a live claim, and where it is."""

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
        what = "is in a location where nothing can be replaced in one step: run its chunks again"
    elif not isinstance(target, Folder):
        what = "isn't a folder"
    elif format_of(target.format) not in formats:
        names = ", ".join(format.name for format in formats)
        what = f"has the format {target.format}, and only {names} can be rewritten"
    if not isinstance(target, Folder) or what:
        raise Refused(f"{datasetid!r} {what}: nothing to compact.", code="INVALID_LOCATION")
    return target


def standing(store: Store, datasetid: str, dataids: Iterable[str]) -> dict[str, Standing]:
    """Those of some chunks that are READY and unclaimed, by dataid."""
    asked = json.dumps(list(dataids))
    rows = store.db.fetch("compact.chunks", datasetid=datasetid, dataids=asked)
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
    """All chunks of a dataset that are READY and unclaimed, one by one."""
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
        Compacted(datasetid, each, None, 0, 0, 0, None, "", "it isn't READY, or it is claimed")
        for each in dataids
        if each not in there
    ]
    return in_order(there.values()), missing


def in_order(chunks: Iterable[Standing]) -> list[Standing]:
    """Chunks in their natural order."""
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
            f"Can't create {path}: {error.strerror}. Correct that, and run the command again."
        ) from None
    with locked(path) as mine:
        if not mine:
            raise Refused(
                f"Another process is compacting or cleaning {root}. Wait until it has ended.",
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
    """Rewrite chunks one by one, and remove the old files once no reader lists them."""
    replaced: Replaced = []
    try:
        for chunk in chunks:
            if done := rewrite(chunk, replaced):
                yield done
            while replaced and replaced[0][0] < time.monotonic() - LINGER:
                replaced.pop(0)[1].discard()
    finally:
        # A reader has listed the old files before it opens them. They stay for as long as that may
        # take.
        if replaced:
            time.sleep(LINGER)
        for _, staged in replaced:
            staged.discard()


def own_directory(folder: Folder, chunk: Standing) -> str | None:
    """The chunk's directory, if this package wrote it and it directly contains data files."""
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
        return "it has subfolders"
    odd = [file for file in paths if format_of_file(file, "").name != name]
    return f"the name of {os.path.basename(odd[0])} doesn't end in .{name}" if odd else ""


def unreadable() -> tuple[type[Exception], ...]:
    """What is raised for a file that isn't what its name says."""
    import pyarrow

    return (pyarrow.ArrowException,)


def still(store: Store, chunk: Standing) -> Callable[[], None]:
    """Checks whether a chunk is unchanged since it was chosen."""

    def confirm() -> None:
        now = standing(store, chunk.datasetid, [chunk.dataid]).get(chunk.dataid)
        if now != chunk:
            raise Unfit("it was claimed or replaced meanwhile")

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
        reason = "it was replaced meanwhile" if gone else first_line(error)
        return found._replace(files_after=len(paths), left=reason)
    return found._replace(files_after=count, bytes_after=size)


def _rewrite(
    store: Store, folder: Folder, chunk: Standing, path: str, kind: str, target: int
) -> tuple[folders.Staged, int, int]:
    """Rewrite a chunk's rows and replace the old files: what it was, files, bytes."""
    note = folders.read_note(path)
    if folders.is_foreign(note, store.id):
        raise Unfit("another store published it")
    if note.get("generation", chunk.generation) != chunk.generation:
        raise Unfit("its directory has another generation than the tables say")
    paths = data_files(path)
    staged = folders.Staged(folder.root, chunk.dataid, chunk.generation, store.id)
    try:
        format = format_of(kind)
        format.merge(paths, staged.path, target)
        written = data_files(staged.path)
        size = sum(map(os.path.getsize, written))
        rows = None if format.is_text else sum(format.count(file) or 0 for file in written)
        if rows is not None and note.get("rows") not in (None, rows):
            raise Unfit(f"it has {rows} rows, but its note says {note['rows']}")
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


# --- packs, which `odf compact --pack` of earlier versions wrote ---

# `<root>/_packs/pack-<hex>.parquet` has row groups of one chunk each and a column `dataid`; its
# footer says which row groups are which chunk. The location of a packed chunk is the file's with
# the dataid as fragment. The next version reads no packs: this part goes then.

_FOOTER_KEY = b"odf"
"""The entry of a pack's footer that describes its chunks."""


class Part(NamedTuple):
    """A chunk in a pack: its row groups, and the note that its directory had."""

    first: int
    groups: int
    note: dict[str, Any]


def packed_source(location: str) -> tuple[str, str]:
    """The file of a packed chunk and its dataid: read the file where `dataid` is that."""
    found = PACKED_CHUNK.fullmatch(location)
    if found is None:
        raise ValueError(f"{location} is no chunk in a pack")
    return found[1], folders.unescaped(found[2])


def is_there(location: str) -> bool:
    """Whether the pack of a chunk exists."""
    return os.path.isfile(packed_source(location)[0])


def packs_in(root: str) -> list[str]:
    """The files of packs in a folder."""
    above = os.path.join(root, folders.PACKS)
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.path.join(above, name) for name in os.listdir(above))
    return []


def packs_of(locations: Iterable[str | None]) -> set[str]:
    """The packs that chunks at some locations are in."""
    return {packed_source(place)[0] for place in locations if place and is_packed(place)}


def read_note(location: str) -> dict[str, Any]:
    """The note of a packed chunk, as `folder.read_note` reads that of a directory."""
    path, dataid = packed_source(location)
    shared, parts = _contents(path)
    return {**shared, **_part(path, dataid, parts).note}


def read_packed(location: str, **options: Any) -> Any:
    """The rows of a packed chunk as an Arrow table, in their order, without the column `dataid`.

    `options` are those of pyarrow's `ParquetFile`.
    """
    import pyarrow.parquet

    path, dataid = packed_source(location)
    _, parts = _contents(path)
    part = _part(path, dataid, parts)
    footer = _read_footer(path, os.stat(path).st_mtime_ns)
    with pyarrow.parquet.ParquetFile(path, metadata=footer, **options) as file:
        kept = file.schema_arrow.remove(file.schema_arrow.get_field_index(folders.DATAID_COLUMN))
        rows = file.read_row_groups(list(range(part.first, part.first + part.groups)))
        return rows.drop_columns(folders.DATAID_COLUMN).replace_schema_metadata(
            _plain(kept.metadata)
        )


def _part(path: str, dataid: str, parts: dict[str, Part]) -> Part:
    if dataid not in parts:
        raise Refused(f"{path} has no chunk {dataid!r}.", code="INVALID_LOCATION")
    return parts[dataid]


def _contents(path: str) -> tuple[dict[str, Any], dict[str, Part]]:
    return _parsed(path, os.stat(path).st_mtime_ns)


@lru_cache(4)
def _read_footer(path: str, changed: int) -> Any:
    """A footer that is read once for the thousand chunks that it describes."""
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(path)


@lru_cache(4)
def _parsed(path: str, changed: int) -> tuple[dict[str, Any], dict[str, Part]]:
    found = json.loads(_read_footer(path, changed).metadata[_FOOTER_KEY])
    return found["told"], {dataid: Part(*part) for dataid, part in found["parts"].items()}


def _plain(metadata: dict[bytes, bytes] | None) -> dict[bytes, bytes] | None:
    """The metadata that the chunks' own files had."""
    if metadata is None:
        return None
    plain = {name: value for name, value in metadata.items() if name != _FOOTER_KEY}
    if SPARK_ROWS in plain:
        columns = json.loads(plain[SPARK_ROWS])
        columns["fields"] = [x for x in columns["fields"] if x["name"] != folders.DATAID_COLUMN]
        text = json.dumps(columns, separators=(",", ":"), ensure_ascii=False)
        plain[SPARK_ROWS] = text.encode()
    return plain or None


# --- `odf compact --unpack`: each chunk in a pack gets its own directory again ---


def unpack(
    store: Store,
    datasetid: str,
    dataids: Sequence[str] = (),
    *,
    plan: bool = False,
    some: Sequence[str] | None = None,
) -> Iterator[Compacted]:
    """Give packed chunks their own directories, one by one; `odf clean` removes the packs.

    Killed anywhere, each chunk is whole where the tables say, and the next call does the rest.
    """
    folder = folder_of(store, datasetid, [PARQUET])
    with nullcontext() if plan else rewriting(folder.root):
        wanted, missing = chosen(store, datasetid, dataids, some)
        yield from missing
        yield from rewrite_each(
            wanted, lambda chunk, replaced: _unpack(store, folder, chunk, plan, replaced)
        )


def _unpack(
    store: Store, folder: Folder, chunk: Standing, plan: bool, replaced: Replaced
) -> Compacted | None:
    location = chunk.location
    if location is None or not is_packed(location):
        return None
    row = Compacted(chunk.datasetid, chunk.dataid, chunk.generation, 1, 1, 0, None, location)
    if not is_there(location):
        return row._replace(files_before=0, files_after=0, left="its pack is gone")
    try:
        row = row._replace(bytes_before=read_note(location).get("bytes") or 0)
        if plan:
            return row
        path, size = _write(store, folder.root, chunk, location, replaced)
        return row._replace(bytes_after=size, path=path)
    except (Unfit, FileNotFoundError, DataflowError, *unreadable()) as error:
        return row._replace(left=first_line(error))


def _write(
    store: Store, root: str, chunk: Standing, location: str, replaced: Replaced
) -> tuple[str, int]:
    """Write a chunk to a directory, then record in the tables that it is there; path and bytes.

    In this order, the tables name a whole chunk at every moment: until the record is changed,
    readers use the pack.
    """
    staged = folders.Staged(root, chunk.dataid, chunk.generation, store.id)
    had_directory = os.path.isdir(staged.final)  # of an unpack, or a packer, that was killed
    try:
        file = new_file(staged.path, PARQUET.suffix)
        _write_file(file, location)
        size = os.path.getsize(file)
        note = read_note(location)
        note = {name: value for name, value in note.items() if name not in ("dataid", "generation")}
        staged.tell({**note, **({"bytes": size} if "bytes" in note else {})})
        staged.replace(still(store, chunk))
        if not _record(store, chunk, staged.final, size):
            raise Unfit("it was claimed or published again meanwhile")
    finally:
        if had_directory:
            replaced.append((time.monotonic(), staged))
        else:
            staged.discard()
    return staged.final, size


def _write_file(path: str, location: str) -> None:
    """Write the rows of a packed chunk to a file as they were before they were packed."""
    import pyarrow.parquet

    source, _ = packed_source(location)
    rows = read_packed(location, coerce_int96_timestamp_unit="us")
    with pyarrow.parquet.ParquetWriter(path, rows.schema, **writing_options(source)) as writer:
        if rows.num_rows:
            writer.write_table(rows)
        keep_metadata(writer, rows.schema.metadata)
    check_types(path, source, without=(folders.DATAID_COLUMN,))
    with pyarrow.parquet.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
        if not same(file.read(), rows):
            raise Unfit("its rows differ after they were written to a file")


def _record(store: Store, chunk: Standing, path: str, size: int) -> bool:
    values: dict[str, Any] = chunk._asdict()
    values |= {"was": values.pop("location"), "location": path, "bytes": size}
    return bool(store.db.insist(lambda: store.db.change("compact.unpack", **values))[0])
