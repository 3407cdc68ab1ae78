"""Rows of CSV that have several lines: a file that has one is read by one task, not in parts."""

import csv
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import WrongUse
from ..storage import files
from .evidence import Evidence
from .row_hash import quoted

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

WHOLE = 64 * 2**20
"""Bytes of a text file that one task may read, so that a value may have several lines."""

LINES, NOTHING = "odf_lines", "odf_nothing"
_BLOCK = 2**20


def asked(schema: "StructType", format: str) -> list[str]:
    """The aggregates that tell, while a frame is written, how its files are to be read."""
    from pyspark.sql import types

    if format != "csv":
        return []
    kinds = (types.StringType, types.CharType, types.VarcharType)
    texts = [
        f"({quoted(each.name)} collate UTF8_BINARY)"
        for each in schema.fields
        if isinstance(each.dataType, kinds)
    ]
    found = []
    if texts:
        text = f"concat_ws('', {', '.join(texts)})"
        breaks = " or ".join(f"contains({text}, chr({each}))" for each in (10, 13))
        found.append(f"count_if({breaks}) as {LINES}")
    if len(schema.fields) == 1:
        found.append(f"count_if({quoted(schema.fields[0].name)} is null) as {NOTHING}")
    return found


def answered(evidence: Evidence, schema: "StructType", format: str) -> dict[str, Any]:
    """What a chunk's note tells of it; a frame whose rows CSV would lose is refused."""
    if format != "csv":
        return {}
    if evidence.told.get(NOTHING):
        raise WrongUse(
            f"In CSV, a row without a value is an empty line, which Spark passes over: of the only "
            f"column {schema.names[0]!r}, {evidence.told[NOTHING]:,} values are NULL. Return "
            "another column beside it, or register the dataset with --format parquet."
        )
    if len(schema.fields) == 1:  # a blank text would be a blank line, which tasks pass over
        return {"lines": True}
    named = any(each in name for name in schema.names for each in "\r\n")
    return {"lines": named or bool(evidence.told.get(LINES))}


def in_one_piece(path: str, note: Mapping[str, Any]) -> bool:
    """Whether each file of CSV is to be read by one task: always right, but slow for a large one.

    A file of somebody else's is asked: Spark's tasks would take a line within quotes for a row.
    """
    if (note.get("bytes") or WHOLE + 1) <= WHOLE:
        return True
    if isinstance(lines := note.get("lines"), bool):
        return lines
    if not os.path.exists(path):  # it isn't on this machine
        return True
    found = files.data_files(path)
    return all(os.path.getsize(each) <= WHOLE for each in found) or any(map(_has_lines, found))


def _has_lines(path: str) -> bool:
    """Whether a row may have several lines, or its lines aren't those that Spark's tasks see."""
    quotes, ends = _marks(path)
    if not ends:
        return True
    with open(path, encoding="latin-1", newline="") as file:  # bytes as they are
        rows = csv.reader(file, strict=True)
        try:
            if len(next(rows, [])) < 2:  # a blank text of an only column is a blank line
                return True
            return quotes and any(rows.line_num != at for at, _ in enumerate(rows, 2))
        except csv.Error:  # quotes that aren't as they should be: or one that doesn't end
            return True


def _marks(path: str) -> tuple[bool, bool]:
    """Whether a file has quotes, and whether all its lines end alike, by `\\n` or by `\\r\\n`."""
    quotes, lines, returns, both, last = False, 0, 0, 0, b""
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            quotes = quotes or b'"' in block
            lines += block.count(b"\n")
            returns += block.count(b"\r")
            both += block.count(b"\r\n") + (last == b"\r" and block[:1] == b"\n")
            last = block[-1:]
    return quotes, not returns or returns == lines == both
