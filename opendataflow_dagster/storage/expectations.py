"""What a flow expects of a dataset's chunks: asked when one was made, before it becomes READY."""

import os
from collections.abc import Mapping
from itertools import islice
from typing import Any, NamedTuple

from ..chunk import Checked, Chunk, Unpublished
from ..errors import DataflowError
from ..location import JDBC, Folder, Table, chunk_place, is_packed, path_of
from ..util.text import first_line
from .audit import names_of
from .folder import find
from .table import Rows

LISTED_ENTRIES = 10_000
"""Entries of a folder above which their names aren't compared with a chunk's."""

EXISTS, ROWS = "exists", "rows"


class Expectation(NamedTuple):
    """One rule about the chunks of a dataset; called with a chunk, it answers as a check."""

    datasetid: str
    name: str
    least: int | None = None
    most: int | None = None

    @property
    def meaning(self) -> str:
        """What has to be true, in words."""
        if self.name == EXISTS:
            return "What the job was to write is in its place."
        return f"The chunk has {_span(self.least, self.most)} rows."

    def __call__(self, chunk: Chunk) -> Checked:
        try:
            fault = self.fault(chunk)
        except (DataflowError, OSError) as error:
            fault = f"it can't be told: {first_line(error)}"
        return Checked(self.name, self.datasetid, not fault, fault)

    def fault(self, chunk: Chunk) -> str:
        """What is wrong with a chunk; nothing if it is as expected."""
        if self.name == EXISTS:
            return _absence(chunk, self.datasetid)
        rows = chunk.results[self.datasetid].rows
        if rows is None:
            return "nobody has told how many there are"
        if (self.least is None or rows >= self.least) and (self.most is None or rows <= self.most):
            return ""
        return f"{rows:,}, where {_span(self.least, self.most)} are expected"


def expectations_of(datasetid: str, expect: Mapping[str, Any]) -> list[Expectation]:
    """The rules that `expect` of a dataset has, as a flow has checked it."""
    found = [Expectation(datasetid, EXISTS)] if expect.get(EXISTS) else []
    if rows := expect.get(ROWS):
        found.append(Expectation(datasetid, ROWS, rows.get("min"), rows.get("max")))
    return found


def _span(least: int | None, most: int | None) -> str:
    if most is None:
        return f"at least {least:,}"
    return f"at most {most:,}" if least is None else f"{least:,} to {most:,}"


def _absence(chunk: Chunk, datasetid: str) -> str:
    """What isn't where a job was to write its chunk; nothing if it is there, or still in hand."""
    result = chunk.results[datasetid]
    if isinstance(result, Unpublished):
        return ""
    place = chunk.outputs[datasetid]
    told = result.location if result.location != place.location else None
    if told and not is_packed(told) and (path := path_of(told)):
        return "" if _has_data(path) else f"{told} isn't there"
    target = chunk_place(datasetid, place.columns)
    if isinstance(target, Folder):
        return _absence_in_folder(target.root, chunk.dataid)
    if isinstance(target, Table) and target.dialect != JDBC:
        bounds = chunk.bounds(datasetid)
        if Rows(target, chunk.dataid, bounds, lambda: chunk.password(datasetid)).is_there():
            return ""
        return f"{target.location} has no row of chunk {chunk.dataid!r}"
    return f"whether it is there can't be asked of {place.location}: leave exists out"


def _absence_in_folder(root: str, dataid: str) -> str:
    if not os.path.isdir(root):
        return f"there is no folder {root}"
    if (path := find(root, dataid)) and _has_data(path):
        return ""
    with os.scandir(root) as entries:
        paths = [entry.path for entry in islice(entries, LISTED_ENTRIES)]
    if any(_is_named(path, dataid) and _has_data(path) for path in paths):
        return ""
    return f"nothing in {root} is named after chunk {dataid!r}"


def _is_named(path: str, dataid: str) -> bool:
    name = os.path.basename(path)
    return not name.startswith(("_", ".")) and dataid in names_of(name)


def _has_data(path: str) -> bool:
    """Whether a path is a file, or a folder that isn't empty."""
    if not os.path.isdir(path):
        return os.path.exists(path)
    with os.scandir(path) as entries:
        return any(not entry.name.startswith(("_", ".")) for entry in entries)
