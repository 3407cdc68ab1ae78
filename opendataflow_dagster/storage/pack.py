"""Chunks in packs, which `odf compact --pack` of earlier versions wrote: how to read them.

`<root>/_packs/pack-<hex>.parquet` has row groups of one chunk each and a column `dataid`; its
footer says which row groups are which chunk. The location of a packed chunk is the file's with the
dataid as fragment. The next version reads no packs: this module and `unpack` go then.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from ..errors import Refused
from ..location import PACKED_CHUNK, is_packed
from .folder import DATAID_COLUMN, unescaped
from .merge_files import SPARK_ROWS

PACKS = "_packs"
"""The directory of packs in a dataset's folder."""

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
    return found[1], unescaped(found[2])


def is_there(location: str) -> bool:
    """Whether the pack of a chunk exists."""
    return os.path.isfile(packed_source(location)[0])


def packs_in(root: str) -> list[str]:
    """The files of packs in a folder."""
    above = os.path.join(root, PACKS)
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
        kept = file.schema_arrow.remove(file.schema_arrow.get_field_index(DATAID_COLUMN))
        rows = file.read_row_groups(list(range(part.first, part.first + part.groups)))
        return rows.drop_columns(DATAID_COLUMN).replace_schema_metadata(_plain(kept.metadata))


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
        columns["fields"] = [x for x in columns["fields"] if x["name"] != DATAID_COLUMN]
        text = json.dumps(columns, separators=(",", ":"), ensure_ascii=False)
        plain[SPARK_ROWS] = text.encode()
    return plain or None
