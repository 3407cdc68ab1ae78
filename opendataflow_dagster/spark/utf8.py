"""Texts that aren't UTF-8, as a cast from binary makes them: CSV and JSON would change them."""

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

from ..dataflow.errors import WrongUse
from .evidence import Evidence
from .hashing import literal, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

BROKEN = "odf_broken"


def asked(schema: "StructType", format: str) -> list[str]:
    """The aggregate that counts, while a frame is written, its rows with such a text."""
    broken = list(_broken_of(schema).values()) if format in ("csv", "json") else []
    return [f"count_if({' or '.join(broken)}) as {BROKEN}"] if broken else []


def refuse(evidence: Evidence, df: "DataFrame", format: str) -> None:
    """Refuse a frame that has such a text."""
    if not evidence.told.get(BROKEN):
        return
    counts = [f"count_if({each})" for each in _broken_of(df.schema).values()]
    found = zip(_broken_of(df.schema), df.selectExpr(*counts).collect()[0], strict=True)
    name, rows = next(((name, rows) for name, rows in found if rows), ("?", 0))
    raise WrongUse(
        f"Column {name!r} has {rows:,} {'row' if rows == 1 else 'rows'} with a text that isn't "
        f"UTF-8, which {format.upper()} can't hold. Return it as binary by base64({quoted(name)}), "
        "decode it as what it is, or register the dataset with --format parquet."
    )


def _broken_of(schema: "StructType") -> dict[str, str]:
    """Column → what is true of a row with such a text."""
    names = count()
    found = {each.name: _broken(quoted(each.name), each.dataType, names) for each in schema.fields}
    return {name: sql for name, sql in found.items() if sql}


def _broken(sql: str, kind: "DataType", names: Iterator[int]) -> str:
    from pyspark.sql import types

    match kind:
        case types.StringType() | types.CharType() | types.VarcharType():
            return f"not is_valid_utf8({sql})"
        case types.StructType():
            fields = (_broken(f"{sql}[{literal(each.name)}]", each.dataType, names)
                      for each in kind.fields)  # fmt: skip
            return " or ".join(filter(None, fields))
        case types.ArrayType():
            element = f"t{next(names)}"
            inner = _broken(element, kind.elementType, names)
            return inner and f"exists({sql}, {element} -> {inner})"
        case types.MapType():
            parts = {f"map_keys({sql})": kind.keyType, f"map_values({sql})": kind.valueType}
            found = (_broken(each, types.ArrayType(part), names) for each, part in parts.items())
            return " or ".join(filter(None, found))
        case _:
            return ""
