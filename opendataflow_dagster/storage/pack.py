"""Chunks in packs, which `odf compact --pack` of earlier versions wrote: read and unpack them.

`<root>/_packs/pack-<hex>.parquet` has row groups of one chunk each and a column `dataid`; its
footer says which row groups are which chunk. The location of a packed chunk is the file's with the
dataid as fragment. The next version reads no packs: this module goes then.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import DataflowError, Refused
from ..formats import PARQUET
from ..formats.format import Unfit, new_file
from ..formats.parquet_format import SPARK_ROWS, check_types, keep_metadata, same, writing_options
from ..location import PACKED_CHUNK, Folder, is_packed
from ..store.store import Store
from ..util.text import first_line
from . import folder as folders
from .compact import (
    Compacted,
    Replaced,
    Standing,
    chosen,
    folder_of,
    rewrite_each,
    rewriting,
    still,
    unreadable,
)

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
    with pyarrow.parquet.ParquetFile(path, metadata=_footer(path), **options) as file:
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


def _footer(path: str) -> Any:
    return _read_footer(path, os.stat(path).st_mtime_ns)


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
            raise Unfit("somebody has claimed it, or published it again, meanwhile")
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
            raise Unfit("its rows aren't the same after they were written to a file")


def _record(store: Store, chunk: Standing, path: str, size: int) -> bool:
    values: dict[str, Any] = chunk._asdict()
    values |= {"was": values.pop("location"), "location": path, "bytes": size}
    return bool(store.db.insist(lambda: store.db.change("compact.unpack", **values))[0])
