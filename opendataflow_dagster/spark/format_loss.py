"""Values that a format of files would change: seen while a frame is written, and refused."""

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from ..errors import WrongUse
from .evidence import Evidence
from .row_hash import literal, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

BROKEN = "odf_broken"


class Rule(NamedTuple):
    """Values of some types that come back as others; `{}` stands for the value, or the column."""

    kinds: tuple[str, ...]
    wrong: str
    what: str
    cure: str


_TEXTS = ("string", "char", "varchar")
_NOT_UTF8 = Rule(
    _TEXTS,
    "not is_valid_utf8({})",
    "a text that isn't UTF-8",
    "Return it as binary by base64({}), decode it as what it is",
)
_NUL = Rule(
    _TEXTS,
    "contains({} collate UTF8_BINARY, chr(0))",
    "a NUL character",
    "Remove it by replace({}, chr(0))",
)
_SECOND = "a time within the last second before 1970"
_ROUND = "Round it by date_trunc('second', {})"
RULES = {
    "csv": (_NOT_UTF8, _NUL),
    "json": (_NOT_UTF8,),
    "orc": (
        Rule(("timestamp",), "unix_micros({}) between -999999 and -1", _SECOND, _ROUND),
        Rule(
            ("timestamp_ntz",),
            "{0} > timestamp_ntz'1969-12-31 23:59:59' and {0} < timestamp_ntz'1970-01-01 00:00:00'",
            _SECOND,
            _ROUND,
        ),
    ),
}
"""Of each format, the values that it can't hold."""


def asked(schema: "StructType", format: str) -> list[str]:
    """The aggregate that counts, while a frame is written, its rows with such a value."""
    broken = [sql for _, _, sql in _broken_of(schema, format)]
    return [f"count_if({' or '.join(broken)}) as {BROKEN}"] if broken else []


def refuse(evidence: Evidence, df: "DataFrame", format: str) -> None:
    """Refuse a frame that has such a value."""
    if not evidence.told.get(BROKEN):
        return
    asked = _broken_of(df.schema, format)
    counts = df.selectExpr(*(f"count_if({sql})" for _, _, sql in asked)).collect()[0]
    found = ((name, rule, rows) for (name, rule, _), rows in zip(asked, counts, strict=True))
    name, rule, rows = next((each for each in found if each[2]), (*asked[0][:2], 0))
    raise WrongUse(
        f"Column {name!r} has {rows:,} {'row' if rows == 1 else 'rows'} with {rule.what}, which "
        f"{format.upper()} can't hold. {rule.cure.format(quoted(name))}, or register the dataset "
        "with --format parquet."
    )


def _broken_of(schema: "StructType", format: str) -> list[tuple[str, Rule, str]]:
    """Column, rule, and what is true of a row that breaks it."""
    names = count()
    found = [
        (each.name, rule, _broken(quoted(each.name), each.dataType, rule, names))
        for each in schema.fields
        for rule in RULES.get(format, ())
    ]
    return [each for each in found if each[2]]


def _broken(sql: str, kind: "DataType", rule: Rule, names: Iterator[int]) -> str:
    from pyspark.sql import types

    match kind:
        case types.StructType():
            fields = (
                _broken(f"{sql}[{literal(each.name)}]", each.dataType, rule, names)
                for each in kind.fields
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
