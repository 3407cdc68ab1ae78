"""The SQL text that hashes a row of any types, the same for every way to store the row."""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructField, StructType

END = "5138008317640127543L"
"""Hashed after each value: Spark's hash skips a NULL, and (NULL, 'a') would equal ('a', NULL).

A number that no data has. Booleans for what is NULL would do as well, but a chunk of usual size
costs more to plan than to hash: what counts is how few expressions there are.
"""


def row_hash(schema: "StructType", without: Iterable[str] = ()) -> str:
    """An expression: 64 bits of a row, of what its columns are called, and of their kinds.

    The order of the columns doesn't count.
    """
    left_out, names = set(without), count()
    fields = sorted(
        (each for each in schema.fields if each.name not in left_out),
        key=lambda each: (each.name.casefold(), each.name),
    )
    parts = (
        part
        for each in fields
        for part in _parts(quoted(each.name), each.dataType, each.nullable, names)
    )
    return _hash([f"{_number(columns(fields))}L", *parts])


def columns(fields: "Iterable[StructField]") -> str:
    """The names and kinds of columns, the same for every way to store them.

    Without them, 1.23, 12.3 and 123 would hash alike: Spark hashes a decimal without its scale.
    Databases fold the case of names.
    """
    return ",".join(f"{quoted(each.name.casefold())}:{_kind(each.dataType)}" for each in fields)


def quoted(name: str) -> str:
    """A column's name in SQL."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """A text in SQL."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _number(text: str) -> int:
    """64 bits of a text, as Spark has them."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


_KINDS = {"byte": "int", "short": "int", "integer": "int", "char": "string", "varchar": "string"}
"""Types whose values hash alike, and which a place may keep as each other."""


def _kind(type: "DataType") -> str:
    from pyspark.sql import types

    match type:
        case types.StructType():
            return f"struct<{columns(type.fields)}>"
        case types.ArrayType():
            return f"array<{_kind(type.elementType)}>"
        case types.MapType():
            return f"map<{_kind(type.keyType)},{_kind(type.valueType)}>"
        case types.DecimalType():
            return f"decimal({type.scale})"
        case types.StringType():
            return "string"
        case types.UserDefinedType():
            return _kind(type.sqlType())
        case _:
            name = type.typeName().partition("(")[0]
            return _KINDS.get(name, name)


def _hash(parts: Iterable[str]) -> str:
    return f"xxhash64({', '.join(parts)})"


def _parts(sql: str, kind: "DataType", nullable: bool, names: Iterator[int]) -> list[str]:
    """What of a value is hashed: by its type alone, as read back from a file all may be NULL.

    No two values give the same sequence, nor one that is the beginning of another's.
    """
    from pyspark.sql import types

    match kind:
        case types.NullType():
            return [END]
        case types.StructType():
            parts = [f"{sql} is null" if nullable else "false"]
            for each in kind.fields:
                # Not `a`.`b`: of a frame with the alias `a`, that would be the column `b`.
                field = f"{sql}[{literal(each.name)}]"
                parts += _parts(field, each.dataType, nullable or each.nullable, names)
            return parts
        case types.MapType():
            entry = f"e{next(names)}"
            key = _parts(f"{entry}['key']", kind.keyType, False, names)
            value = _parts(f"{entry}['value']", kind.valueType, True, names)
            hashes = f"transform(map_entries({sql}), {entry} -> {_hash(key + value)})"
            # Sorted, as the order of its entries says nothing about a map.
            return [_size(sql), f"sort_array({hashes})"]
        case types.ArrayType() if _plain(kind.elementType):
            # The elements at once, not one by one: the quick way for the usual array. It skips
            # those that are NULL, so where they stand is hashed beside.
            element, gaps = f"e{next(names)}", "0L"
            if kind.containsNull:
                where = f"{element} -> {element} is null"
                gaps = f"if(exists({sql}, {where}), xxhash64(transform({sql}, {where})), 0L)"
            return [_size(sql), f"xxhash64({_leaf(sql, kind.elementType)})", gaps]
        case types.ArrayType():
            element = f"e{next(names)}"
            inner = _hash(_parts(element, kind.elementType, True, names))
            return [_size(sql), f"transform({sql}, {element} -> {inner})"]
        case types.VariantType():
            # Its text has no types: a date looks like a string.
            return [f"to_json({sql})", f"schema_of_variant({sql})", END]
        case _:
            return [_leaf(sql, kind), END]


def _size(sql: str) -> str:
    """Without it, [1, 2] beside [3] would hash like [1] beside [2, 3]; of NULL it's always -1."""
    return f"coalesce(size({sql}), -1)"


def _plain(kind: "DataType") -> bool:
    """Whether an array of it can be hashed at once."""
    from pyspark.sql import types

    nested = (types.StructType, types.MapType, types.ArrayType, types.VariantType, types.NullType)
    return not isinstance(kind, nested) and _leaf("x", kind) == "x"


def _leaf(sql: str, kind: "DataType") -> str:
    from pyspark.sql import types

    if isinstance(kind, types.StringType) and not kind.isUTF8BinaryCollation():
        return f"({sql} collate UTF8_BINARY)"  # else 'a' is 'A' where the collation says so
    if kind.typeName() in ("geometry", "geography"):
        return f"st_asbinary({sql})"
    return sql
