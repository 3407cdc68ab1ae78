"""`odf compact --pack`: the directories of many small chunks become a few large files.

A pack is written aside, put in its place, told to the tables in one transaction, and only then
the directories go: whatever is killed in between, each chunk is whole where its fact says.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

from ..location import Folder
from ..store.store import Store
from ..util.directory_lock import locked, turn
from ..util.text import first_line
from . import files
from . import folder as folders
from .compact import (
    LINGER,
    TARGET,
    Compacted,
    Standing,
    chosen,
    folder_of,
    in_order,
    own_directory,
    unreadable,
    why_left,
)
from .merge_files import (
    SPARK_ROWS,
    Unfit,
    batches,
    check_types,
    common_schema,
    keep_metadata,
    same,
    with_column,
    writing_options,
)
from .pack import (
    COLUMN,
    PACKS,
    Part,
    footer_of,
    is_packed,
    is_there,
    location_in,
    packed_source,
    read_packed,
    rewriting,
)

MOST = 2000
"""Chunks in one pack, whose footer tells of each: who reads one of them reads all of it."""

_OWN = ("dataid", "generation", "store", "rows", "bytes", "jobid", "fingerprint")
"""What a note tells of its chunk; the rest is the same for all chunks of a pack."""


class Member(NamedTuple):
    """A chunk that goes into a pack."""

    chunk: Standing
    path: str
    paths: list[str]
    size: int
    note: dict[str, Any]
    schema: Any = None
    options: dict[str, Any] = {}  # noqa: RUF012


def pack(
    store: Store,
    datasetid: str,
    dataids: Sequence[str] = (),
    *,
    target: int = TARGET,
    plan: bool = False,
    some: Sequence[str] | None = None,
) -> Iterator[Compacted]:
    """Pack the chunks of a folder that are smaller than half the target; one row for each."""
    folder = folder_of(store, datasetid, ("parquet",))
    with nullcontext() if plan else rewriting(folder.root):
        found, missing = chosen(store, datasetid, dataids, some)
        yield from missing
        wanted = in_order(found)  # neighbours come into one pack
        if not plan:
            # A packer may have been killed before it was done.
            packed = [chunk for chunk in wanted if is_packed(chunk.location)]
            _remove_later([set_aside(folder.root, chunk, store.id) for chunk in packed])
        alike: dict[tuple, list[Member]] = {}
        for chunk in wanted:
            member = _member(folder, chunk, target, store.id)
            if isinstance(member, Compacted):
                yield member
            elif member is not None:
                alike.setdefault(_kind(member), []).append(member)
        for members in alike.values():
            for portion in _portions(members, target):
                if len(portion) > 1:
                    yield from _planned(portion) if plan else _pack(store, folder, portion)


def set_aside(root: str, chunk: Standing, store: str) -> str | None:
    """Take away the directory of a chunk that its fact says is in a pack; where it is then."""
    final = folders.chunk_path(root, chunk.dataid)
    if not os.path.isdir(final) or not chunk.location or not is_there(chunk.location):
        return None
    staging = os.path.join(root, folders.STAGING, folders.directory(chunk.dataid))
    mine = folders.begin(staging, chunk.generation)
    try:
        with turn(staging):
            if os.path.isdir(final) and folders.is_outdated(final, chunk.generation, store):
                os.rename(final, mine)
                if folders.is_outdated(mine, chunk.generation, store):
                    return mine
                os.rename(mine, final)  # without locks, a newer one has come in between
    except BaseException:
        folders.discard(mine)
        raise
    folders.discard(mine)
    return None


def _remove_later(paths: Sequence[str | None]) -> None:
    """Remove directories that nobody can be listing any more: a half removed one looks whole."""
    if any(paths):
        time.sleep(LINGER)
    for path in filter(None, paths):
        folders.discard(path)


def _member(folder: Folder, chunk: Standing, target: int, store: str) -> Member | Compacted | None:
    if is_packed(chunk.location) or (path := own_directory(folder, chunk)) is None:
        return None
    paths = files.data_files(path)
    size = sum(map(os.path.getsize, paths))
    if size * 2 > target:
        return None
    note = folders.read_note(path)
    member = Member(chunk, path, paths, size, note)
    schema, options = None, {}
    left = why_left(path, paths, "parquet") or ("" if paths else "it has no files")
    if not chunk.told or not chunk.generation:
        left = "the tables know no place of it that could be changed: it was made by hand"
    elif folders.is_foreign(note, store):
        left = "another store has published it"
    elif note.get("generation", chunk.generation) != chunk.generation:
        left = "its directory is of another generation than the tables tell"
    elif not left:
        try:
            schema, options = common_schema(paths), writing_options(paths[0])
            if COLUMN in (name.lower() for name in schema.names):
                left = f"it has a column {COLUMN!r} of its own"
            elif not schema.names:
                left = "it has no columns"
        except (Unfit, *unreadable()) as error:
            left = first_line(error)
        except FileNotFoundError:
            left = "it was made anew meanwhile"
    return _row(member, 0, left) if left else member._replace(schema=schema, options=options)


def _kind(member: Member) -> tuple:
    """What chunks must have in common to be in one file."""
    told = {name: value for name, value in member.note.items() if name not in _OWN}
    metadata = tuple(sorted((member.schema.metadata or {}).items()))
    columns = tuple((each.name, str(each.type), each.nullable) for each in member.schema)
    return columns, metadata, repr(told), tuple(member.options.items())


def _portions(members: Sequence[Member], target: int) -> Iterator[list[Member]]:
    some: list[Member] = []
    size = 0
    for member in members:
        if some and (size + member.size > target or len(some) == MOST):
            yield some
            some, size = [], 0
        some.append(member)
        size += member.size
    if some:
        yield some


def _planned(members: Sequence[Member]) -> Iterator[Compacted]:
    return (_row(member, 0) for member in members)


def _pack(store: Store, folder: Folder, members: Sequence[Member]) -> Iterator[Compacted]:
    name = f"pack-{os.urandom(8).hex()}.parquet"
    aside = os.path.join(folder.root, folders.STAGING, folders.PACKING + name[5:21])
    final = os.path.join(folder.root, PACKS, name)
    left: dict[str, str] = {}
    os.makedirs(aside)
    try:
        with locked(aside):
            written, left = _write(os.path.join(aside, name), members)
            if not written:
                yield from (_row(each, 0, left[each.chunk.dataid]) for each in members)
                return
            folders.sync(aside)
            os.rename(os.path.join(aside, name), final)
            folders.sync_one(os.path.dirname(final))
            folders.sync_one(folder.root)
    finally:
        folders.remove(aside)
        with suppress(OSError):
            os.rmdir(os.path.dirname(aside))
    for member in written:
        location = location_in(final, member.chunk.dataid)
        if not same_rows(member.paths, location):
            left[member.chunk.dataid] = "its rows aren't the same after they were written anew"
    moved = _tell(store, final, [each for each in written if each.chunk.dataid not in left])
    if not moved:
        os.unlink(final)
    places = {each: location_in(final, each) for each in moved}
    _remove_later(
        [
            set_aside(
                folder.root, each.chunk._replace(location=places[each.chunk.dataid]), store.id
            )
            for each in members
            if each.chunk.dataid in moved
        ]
    )
    for member in members:
        chunk = member.chunk
        if chunk.dataid in moved:
            yield _row(member, 1)._replace(path=places[chunk.dataid])
        else:
            reason = left.get(chunk.dataid, "somebody has taken it, or made it anew, meanwhile")
            yield _row(member, 0, reason)


def _write(path: str, members: Sequence[Member]) -> tuple[list[Member], dict[str, str]]:
    """Write the chunks into one file, each in row groups of its own; those in it, those left."""
    import pyarrow
    import pyarrow.parquet

    first = members[0]
    schema, options = first.schema, first.options
    metadata = dict(schema.metadata or {})
    if SPARK_ROWS in metadata:
        metadata[SPARK_ROWS] = with_column(metadata[SPARK_ROWS], COLUMN)
    wide = schema.append(pyarrow.field(COLUMN, pyarrow.string(), nullable=True))
    parts: dict[str, Part] = {}
    groups, written, left = 0, [], {}
    with pyarrow.parquet.ParquetWriter(path, wide.with_metadata(metadata), **options) as writer:
        for member in members:
            try:
                tables = [table for each in member.paths for table in batches(each)]
            except (FileNotFoundError, *unreadable()) as error:
                left[member.chunk.dataid] = first_line(error)
                continue
            rows = pyarrow.concat_tables(tables) if tables else schema.empty_table()
            note = {name: member.note[name] for name in _OWN if name in member.note}
            note |= {"dataid": member.chunk.dataid, "generation": member.chunk.generation}
            parts[member.chunk.dataid] = Part(groups, 1 if rows.num_rows else 0, note)
            if rows.num_rows:
                column = pyarrow.repeat(member.chunk.dataid, rows.num_rows)
                whole = rows.append_column(wide.field(COLUMN), column)
                writer.write_table(
                    whole.replace_schema_metadata(metadata), row_group_size=rows.num_rows
                )
                groups += 1
            written.append(member)
        told = {name: value for name, value in first.note.items() if name not in _OWN}
        keep_metadata(writer, metadata, footer_of(told, parts))
    try:
        check_types(path, first.paths[0], (COLUMN,))
    except Unfit as error:
        return [], dict.fromkeys([each.chunk.dataid for each in members], str(error))
    return written, left


def same_rows(paths: Sequence[str], location: str) -> bool:
    """Whether the rows of a packed chunk are those of its files."""
    import pyarrow

    try:
        tables = [table for each in paths for table in batches(each)]
    except FileNotFoundError:
        return False
    packed = read_packed(location, coerce_int96_timestamp_unit="us")
    if not tables:
        return packed.num_rows == 0
    return same(pyarrow.concat_tables(tables).combine_chunks(), packed.combine_chunks())


def _tell(store: Store, final: str, members: Sequence[Member]) -> set[str]:
    """Let the tables say that the chunks are in the pack, all in one transaction; which are."""

    def work() -> set[str]:
        with store.db.transaction():
            return {
                member.chunk.dataid
                for member in members
                if store.db.change(
                    "packs.move",
                    datasetid=member.chunk.datasetid,
                    dataid=member.chunk.dataid,
                    generation=member.chunk.generation,
                    was=member.chunk.location,
                    location=location_in(final, member.chunk.dataid),
                )
            }

    return store.db.insist(work)[0]


def _row(member: Member, after: int, left: str = "") -> Compacted:
    chunk = member.chunk
    return Compacted(
        chunk.datasetid,
        chunk.dataid,
        chunk.generation,
        len(member.paths),
        after,
        member.size,
        None,
        member.path,
        left,
    )


def packs_in(root: str) -> list[str]:
    """The files of packs in a folder."""
    above = os.path.join(root, PACKS)
    with suppress(FileNotFoundError, NotADirectoryError):
        return sorted(os.path.join(above, each) for each in os.listdir(above))
    return []


def named(locations: Sequence[str | None]) -> set[str]:
    """The packs that locations lie in."""
    return {packed_source(each)[0] for each in locations if each is not None and is_packed(each)}
