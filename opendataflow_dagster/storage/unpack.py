"""`odf compact --unpack`: each chunk in a pack gets its own directory again."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from ..errors import DataflowError
from ..location import Folder, is_packed
from ..store.store import Store
from ..util.text import first_line
from . import folder as folders
from . import pack
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
from .files import new_file
from .merge_files import Unfit, check_types, keep_metadata, same, writing_options


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
    folder = folder_of(store, datasetid, ("parquet",))
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
    if not pack.is_there(location):
        return row._replace(files_before=0, files_after=0, left="its pack is gone")
    try:
        row = row._replace(bytes_before=pack.read_note(location).get("bytes") or 0)
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
        file = new_file(staged.path, ".parquet")
        _write_file(file, location)
        size = os.path.getsize(file)
        note = pack.read_note(location)
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

    source, _ = pack.packed_source(location)
    rows = pack.read_packed(location, coerce_int96_timestamp_unit="us")
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
