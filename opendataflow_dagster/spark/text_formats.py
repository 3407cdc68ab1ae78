"""What CSV, JSON and ORC can't hold: refused, counted, or written in another way."""

import csv
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

from ..errors import WrongUse
from ..formats import format_of
from ..formats.format import LossyValue, data_files
from .evidence import Evidence
from .schema import literal, quoted, schema_of, schema_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType


def storable(df: "DataFrame", format: str) -> "DataFrame":
    """The frame as a format holds it, maybe without its collations."""
    return df if format_of(format).has_collations else _cast(df, without_collations(df.schema))


def restored(df: "DataFrame", schema: "StructType", format: str) -> "DataFrame":
    """The frame that was written, of what the format held of it."""
    return df if format_of(format).has_collations else _cast(df, schema)


def without_collations(kind: Any) -> Any:
    """A type whose texts have no collation."""
    from pyspark.sql import types

    return retyped(
        kind, lambda leaf: types.StringType() if isinstance(leaf, types.StringType) else leaf
    )


def retyped(kind: Any, change: Callable[[Any], Any]) -> Any:
    """A type, with what `change` makes of each type within it that holds no others."""
    from pyspark.sql import types

    def inner(kind: Any) -> Any:
        return retyped(kind, change)

    match kind:
        case types.StructType():
            return types.StructType(
                [
                    types.StructField(
                        field.name, inner(field.dataType), field.nullable, field.metadata
                    )
                    for field in kind.fields
                ]
            )
        case types.ArrayType():
            return types.ArrayType(inner(kind.elementType), kind.containsNull)
        case types.MapType():
            return types.MapType(inner(kind.keyType), inner(kind.valueType), kind.valueContainsNull)
        case _:
            return change(kind)


def _cast(df: "DataFrame", schema: "StructType") -> "DataFrame":
    from pyspark.sql import functions as F

    if without_collations(schema) == schema and without_collations(df.schema) == df.schema:
        return df
    wanted = schema_of(schema_text(schema))  # whose parts may be NULL: of a file, all may be
    return df.select(
        *(
            F.col(quoted(field.name)).cast(field.dataType).alias(field.name)
            for field in wanted.fields
        )
    )


# --- rows of CSV with line breaks: one task has to read the whole file ---


WHOLE_FILE_BYTES = 64 * 2**20
"""Bytes of a text file that one task may read, so that a value may have several lines."""

LINES, NULLS = "odf_lines", "odf_nothing"
_BLOCK_BYTES = 2**20


def line_aggregates(schema: "StructType", format: str) -> list[str]:
    """The aggregates that tell, while a frame is written, how its files are to be read."""
    from pyspark.sql import types

    if not format_of(format).is_delimited:
        return []
    kinds = (types.StringType, types.CharType, types.VarcharType)
    texts = [
        f"({quoted(field.name)} collate UTF8_BINARY)"
        for field in schema.fields
        if isinstance(field.dataType, kinds)
    ]
    found = []
    if texts:
        text = f"concat_ws('', {', '.join(texts)})"
        breaks = " or ".join(f"contains({text}, chr({each}))" for each in (10, 13))
        found.append(f"count_if({breaks}) as {LINES}")
    if len(schema.fields) == 1:
        found.append(f"count_if({quoted(schema.fields[0].name)} is null) as {NULLS}")
    return found


def line_note(evidence: Evidence, schema: "StructType", format: str) -> dict[str, Any]:
    """What a chunk's note tells of it; a frame whose rows CSV would lose is refused."""
    if not format_of(format).is_delimited:
        return {}
    if evidence.extra.get(NULLS):
        raise WrongUse(
            f"In CSV, a row without a value is an empty line, which Spark passes over: of the only "
            f"column {schema.names[0]!r}, {evidence.extra[NULLS]:,} values are NULL. Return "
            "another column beside it, or register the dataset with --format parquet."
        )
    if len(schema.fields) == 1:  # a blank text would be a blank line, which tasks pass over
        return {"lines": True}
    named = any(each in name for name in schema.names for each in "\r\n")
    return {"lines": named or bool(evidence.extra.get(LINES))}


def is_read_whole(path: str, note: Mapping[str, Any]) -> bool:
    """Whether one task has to read a whole CSV file: always correct, but slow for a large one.

    Files that others wrote are looked into: tasks would take a line within quotes for a row.
    """
    if (note.get("bytes") or WHOLE_FILE_BYTES + 1) <= WHOLE_FILE_BYTES:
        return True
    if isinstance(lines := note.get("lines"), bool):
        return lines
    if not os.path.exists(path):  # it isn't on this machine
        return True
    found = data_files(path)
    return all(os.path.getsize(each) <= WHOLE_FILE_BYTES for each in found) or any(
        map(_has_lines, found)
    )


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
        while block := file.read(_BLOCK_BYTES):
            quotes = quotes or b'"' in block
            lines += block.count(b"\n")
            returns += block.count(b"\r")
            both += block.count(b"\r\n") + (last == b"\r" and block[:1] == b"\n")
            last = block[-1:]
    return quotes, not returns or returns == lines == both


# --- values that a format would change: counted while a frame is written ---


BROKEN = "odf_broken"


def loss_aggregates(schema: "StructType", format: str) -> list[str]:
    """The aggregate that counts, while a frame is written, its rows with such a value."""
    broken = [sql for _, _, sql in _broken_of(schema, format)]
    return [f"count_if({' or '.join(broken)}) as {BROKEN}"] if broken else []


def refuse_lossy(evidence: Evidence, df: "DataFrame", format: str) -> None:
    """Refuse a frame that has such a value."""
    if not evidence.extra.get(BROKEN):
        return
    broken = _broken_of(df.schema, format)
    counts = df.selectExpr(*(f"count_if({sql})" for _, _, sql in broken)).collect()[0]
    found = ((name, rule, rows) for (name, rule, _), rows in zip(broken, counts, strict=True))
    name, rule, rows = next((each for each in found if each[2]), (*broken[0][:2], 0))
    raise WrongUse(
        f"Column {name!r} has {rows:,} {'row' if rows == 1 else 'rows'} with {rule.what}, which "
        f"{format_of(format).title} can't hold. {rule.cure.format(quoted(name))}, or register the "
        "dataset with --format parquet."
    )


def _broken_of(schema: "StructType", format: str) -> list[tuple[str, LossyValue, str]]:
    """Column, rule, and what is true of a row that breaks it."""
    names = count()
    found = [
        (field.name, rule, _broken(quoted(field.name), field.dataType, rule, names))
        for field in schema.fields
        for rule in format_of(format).lossy
    ]
    return [each for each in found if each[2]]


def _broken(sql: str, kind: "DataType", rule: LossyValue, names: Iterator[int]) -> str:
    from pyspark.sql import types

    match kind:
        case types.StructType():
            fields = (
                _broken(f"{sql}[{literal(field.name)}]", field.dataType, rule, names)
                for field in kind.fields
            )
            return " or ".join(filter(None, fields))
        case types.ArrayType():
            element = f"t{next(names)}"
            inner = _broken(element, kind.elementType, rule, names)
            return inner and f"exists({sql}, {element} -> {inner})"
        case types.MapType():
            parts = {f"map_keys({sql})": kind.keyType, f"map_values({sql})": kind.valueType}
            found = (
                _broken(each, types.ArrayType(part), rule, names) for each, part in parts.items()
            )
            return " or ".join(filter(None, found))
        case _:
            is_of = kind.typeName().partition("(")[0] in rule.kinds
            return f"({rule.wrong.format(sql)})" if is_of else ""
