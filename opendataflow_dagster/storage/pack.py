"""A pack: a Parquet file with many small chunks, told apart by a column `dataid`.

`<root>/_packs/pack-<hex>.parquet` has row groups of one chunk each; its footer tells which. The
location of a packed chunk is the file's with the dataid as fragment; a chunk that is made again
is a directory, which its own fact names, so it wins.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import Refused, Unreachable
from ..util.directory_lock import locked
from .folder import escaped, unescaped

PACKS = "_packs"
"""Where packs are, within a dataset's folder."""

COLUMN = "dataid"
"""The column by which plain Spark tells the chunks of a pack."""

KEY = b"odf"
"""The entry of a pack's footer that tells of its chunks."""

_PACKED = re.compile(rf"(.*/{PACKS}/pack-[0-9a-f]+\.parquet)#{COLUMN}=(.*)", re.DOTALL)


class Part(NamedTuple):
    """A chunk in a pack: its row groups, and what was told of it when it was a directory."""

    first: int
    groups: int
    note: dict[str, Any]


def location_in(path: str, dataid: str) -> str:
    """The location of a chunk in a pack."""
    return f"{path}#{COLUMN}={escaped(dataid)}"


def is_packed(location: str | None) -> bool:
    """Whether a location is that of a chunk in a pack."""
    return location is not None and _PACKED.fullmatch(location) is not None


def packed_source(location: str) -> tuple[str, str]:
    """The file of a packed chunk and its dataid: read the file where `dataid` is that."""
    found = _PACKED.fullmatch(location)
    if found is None:
        raise ValueError(f"{location} is no chunk in a pack")
    return found[1], unescaped(found[2])


def is_there(location: str) -> bool:
    """Whether the pack of a chunk exists."""
    return os.path.isfile(packed_source(location)[0])


def read_note(location: str) -> dict[str, Any]:
    """What is told of a packed chunk, as `folders.read_note` tells of a directory."""
    path, dataid = packed_source(location)
    told, parts = _told(path)
    return {**told, **_part(path, dataid, parts).note}


def read_packed(location: str, **options: Any) -> Any:
    """The rows of a packed chunk as an Arrow table, in their order, without the column `dataid`.

    `options` are those of pyarrow's `ParquetFile`.
    """
    import pyarrow.parquet

    path, dataid = packed_source(location)
    _, parts = _told(path)
    part = _part(path, dataid, parts)
    with pyarrow.parquet.ParquetFile(path, metadata=_footer(path), **options) as file:
        kept = file.schema_arrow.remove(file.schema_arrow.get_field_index(COLUMN))
        rows = file.read_row_groups(list(range(part.first, part.first + part.groups)))
        return rows.drop_columns(COLUMN).replace_schema_metadata(_plain(kept.metadata))


def footer_of(told: dict[str, Any], parts: dict[str, Part]) -> dict[bytes, bytes]:
    """What a pack's footer tells: of all its chunks, and of each."""
    return {KEY: json.dumps({"told": told, "parts": parts}, ensure_ascii=True).encode()}


def _part(path: str, dataid: str, parts: dict[str, Part]) -> Part:
    if dataid not in parts:
        raise Refused(f"{path} has no chunk {dataid!r}.", code="INVALID_LOCATION")
    return parts[dataid]


def _told(path: str) -> tuple[dict[str, Any], dict[str, Part]]:
    return _parsed(path, os.stat(path).st_mtime_ns)


def _footer(path: str) -> Any:
    return _read_footer(path, os.stat(path).st_mtime_ns)


@lru_cache(4)
def _read_footer(path: str, changed: int) -> Any:
    """A footer that is read once for the thousand chunks that it tells of."""
    import pyarrow.parquet

    return pyarrow.parquet.read_metadata(path)


@lru_cache(4)
def _parsed(path: str, changed: int) -> tuple[dict[str, Any], dict[str, Part]]:
    found = json.loads(_read_footer(path, changed).metadata[KEY])
    return found["told"], {dataid: Part(*part) for dataid, part in found["parts"].items()}


def _plain(metadata: dict[bytes, bytes] | None) -> dict[bytes, bytes] | None:
    """The metadata that the chunks' own files had."""
    from .merge_files import SPARK_ROWS, without_column

    if metadata is None:
        return None
    plain = {name: value for name, value in metadata.items() if name != KEY}
    if SPARK_ROWS in plain:
        plain[SPARK_ROWS] = without_column(plain[SPARK_ROWS], COLUMN)
    return plain or None


@contextmanager
def rewriting(root: str) -> Iterator[None]:
    """One at a time compacts or packs in a folder, and no `odf clean` removes packs meanwhile."""
    if not os.path.isdir(root):
        yield
        return
    path = os.path.join(root, PACKS)
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
