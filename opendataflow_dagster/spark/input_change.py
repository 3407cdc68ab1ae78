"""Inputs that are made anew under the hands of who reads them."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..chunk import Chunk, ChunkFailed
from ..errors import Refused, StaleClaim
from ..location import Folder, chunk_place, is_packed
from ..storage.read import located
from ..util.text import printable
from .read import TABLE_FORMATS


@contextmanager
def unchanged(chunks: Sequence[Chunk], datasetids: Sequence[str], format: str) -> Iterator[None]:
    """Fail what was made in the block of a folder's chunk that was replaced meanwhile.

    Spark passes over files that vanish while it lists them, so that such a chunk may look empty.
    """
    keys = [(chunk, each) for chunk in chunks for each in datasetids]
    before = [_seen(chunk, each, format) for chunk, each in keys]
    try:
        yield
    except StaleClaim:
        raise
    except Exception as error:
        _compare(keys, before, format, error)
        raise
    _compare(keys, before, format, None)


def _compare(
    keys: Sequence[tuple[Chunk, str]], before: Sequence[Any], format: str, error: Exception | None
) -> None:
    for (chunk, datasetid), there in zip(keys, before, strict=True):
        if there is not None and _seen(chunk, datasetid, format) != there:
            raise ChunkFailed(
                f"DATA_NOT_READY: chunk {printable(chunk.dataid)!r} of {datasetid!r} was made anew "
                "while it was read."
            ) from error


def _seen(chunk: Chunk, datasetid: str, format: str) -> Any:
    """What changes with every publish of a chunk into a folder; None: it is somewhere else."""
    place = chunk.inputs[datasetid]
    try:
        target = chunk_place(datasetid, place.columns, format)
        if not isinstance(target, Folder) or target.format in TABLE_FORMATS:
            return None
        path, note = located(
            target, chunk.dataid, place.location, place.generation, store=place.store
        )
        return note.get("generation"), None if is_packed(path) else os.stat(path).st_ino
    except (Refused, FileNotFoundError):
        return None
