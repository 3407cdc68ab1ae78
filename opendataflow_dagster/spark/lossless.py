"""Values that a table would round or cut without an error: found, counted, and refused.

PostgreSQL finds them in the staging table, by conditions in SQL of `{}`, one of its columns (None:
the column keeps every value, or refuses it). Behind Java's drivers Spark counts them while it
writes. Of SQLite they are looked for in the rows themselves.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Refused
from ..location import Table
from ..storage.table import Rows
from .evidence import Observed
from .schema import EXACT_IN_FLOATS, WHOLE_NUMBERS, quoted
from .types import INTEGER, NUMERIC, REAL, Column, affinity

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType


_WHOLE_TYPES = ("int2", "int4", "int8")
_FLOAT_TYPES = ("float4", "float8")
_TIME_TYPES = ("timestamp", "timestamptz", "time", "timetz")
_NUMERIC = "numeric"
_MICROSECONDS = 6

_LARGEST_BELOW_BIGINT = {"float4": "9223371487098961920", "float8": "9223372036854774784"}
"""The largest number below 2^63 that a type has: the next is no bigint any more."""

_EXACT = {
    "float4": ("int2", "float4"),
    "float8": ("int2", "int4", "float4", "float8"),
}
"""The types of which a float has all numbers."""


def value_loss(source: str, scale: int | None, target: Column) -> str | None:
    """The same of a value that travels as `source`; `scale` is that of a decimal in the frame."""
    base = target.base
    if _is_kept(source, scale, base, target):
        return None
    if base == _NUMERIC and source in _WHOLE_TYPES:
        return f"{{0}}::numeric is distinct from {{0}}::{target.full}"
    if base == _NUMERIC and source in _FLOAT_TYPES:
        # Spark's decimals have no NaN: what was written couldn't be read again.
        return (
            f"({{0}} in ('NaN', 'Infinity', '-Infinity') or "
            f"{{0}} is distinct from {{0}}::text::{target.full}::{source})"
        )
    if base in _FLOAT_TYPES and source == "int8":
        return f"{{0}} <> least({{0}}::{base}::float8, {_LARGEST_BELOW_BIGINT[base]})::int8"
    if base in _FLOAT_TYPES and source == _NUMERIC:
        # By the text: the cast back to a numeric has fewer digits than the number.
        return f"{{0}} is distinct from {{0}}::{base}::float8::text::{_as(scale)}"
    if base in _FLOAT_TYPES:
        return f"{{0}}::float8 is distinct from {{0}}::{base}::float8"
    return f"{{0}} is distinct from {{0}}::{target.full}"


def array_loss(source: str, scale: int | None, target: Column) -> str | None:
    """The same of an array, whose elements are of the type `source`."""
    base = target.element
    if _is_kept(source, scale, base, target):
        return None
    if source == _NUMERIC and base in _FLOAT_TYPES:
        there = f"{{0}}::{base}[]::float8[]::text[]::{_as(scale)}[]"
    else:
        there = f"{{0}}::{target.full}::{source}[]"
    changed = f"{{0}}::{source}[] is distinct from {there}"
    if source in _FLOAT_TYPES and base == _NUMERIC:
        return f"({{0}}::{source}[] && '{{{{NaN,Infinity,-Infinity}}}}' or {changed})"
    return changed


def text_loss(target: Column) -> str | None:
    """The same of a text."""
    base = target.base
    if base == "name":
        return "{0} is distinct from {0}::name::text"
    if base == "varchar" and target.modifier >= 0:  # trailing spaces are cut without an error
        full = f"{{0}}::{target.full}::text"
        return f"({{0}} <> {full} and rtrim({{0}}, ' ') = rtrim({full}, ' '))"
    if (base == _NUMERIC and target.modifier >= 0) or _is_cut(base, target):
        return f"{{0}}::{target.type} is distinct from {{0}}::{target.full}"
    return None


def _is_kept(source: str, scale: int | None, base: str, target: Column) -> bool:
    """Whether a column keeps every value of a type that it doesn't refuse."""
    if base in _FLOAT_TYPES:
        return source in _EXACT[base] or source not in (*_WHOLE_TYPES, *_FLOAT_TYPES, _NUMERIC)
    if base == _NUMERIC and source in _FLOAT_TYPES:
        return False
    if base == _NUMERIC:
        return target.modifier < 0 or (scale or 0) <= _scale(target)
    return not _is_cut(base, target)


def _is_cut(base: str, target: Column) -> bool:
    """Whether a column has fewer digits of a second than a value may have."""
    return base in _TIME_TYPES and 0 <= target.modifier < _MICROSECONDS


def _as(scale: int | None) -> str:
    """A decimal of the frame, with room for one that was rounded up."""
    return f"numeric(100,{scale or 0})"


def _scale(target: Column) -> int:
    """The digits after the point that a NUMERIC keeps; below zero, it rounds before the point."""
    scale = (target.modifier - 4) & 0x7FF
    return scale - 2048 if scale > 1023 else scale


# --- the refusal ---


def refuse_losses(
    table: Table, dataid: str, rows: int, found: Sequence[tuple[str, str, str, int]]
) -> None:
    """Refuse a chunk if a column (its name, type in the frame, type in the table) would lose some.

    What is published would have other values than its fingerprint says.
    """
    refusals = [
        f"{name!r} is {kind} in the frame and {there} in the table, which can't keep {count} of "
        f"{rows} values as they are"
        for name, kind, there, count in found
        if count
    ]
    if refusals:
        raise Refused(
            f"Chunk {dataid!r} doesn't fit the table {table.location}: {'; '.join(refusals)}. "
            "Round or cast it in the job.",
            code="NOT_VALIDATED",
        )


# --- tables behind Java's drivers ---


_LARGEST_BY_SPARK_TYPE = {"float": "9223371487098961920", "double": "9223372036854774784"}
"""The largest number below 2^63 that a type has: the next is no bigint any more."""

_SPARK_TIMES = ("timestamp", "timestamp_ntz")

Losses = Callable[[], list[tuple[str, str, str, int]]]
"""Column, type in the frame, type in the table, how many values the latter hasn't."""


def observed_losses(
    df: "DataFrame", there: "StructType", digits: Mapping[str, int]
) -> tuple["DataFrame", Losses]:
    """The frame as it is to be written into such a table, and what that will have lost."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    types = {field.name: field.dataType for field in there}
    sent, lost, told = [], [], []
    for field in df.schema:
        name, kind = quoted(field.name), field.dataType
        target, scale = types.get(field.name), digits.get(field.name, _MICROSECONDS)
        if target is not None and _is_rounded(kind, target):
            # Not left to the database, which may take fewer digits of a double than it has.
            cast = f"try_cast({name} as {target.simpleString()})"
            sent.append(f"{cast} as {name}")
            lost.append(_lost(name, cast, kind, target))
            told.append((field.name, kind.simpleString(), target.simpleString()))
            continue
        sent.append(name)
        if kind.simpleString() in _SPARK_TIMES and scale < _MICROSECONDS:
            rest = f"unix_micros(cast({name} as timestamp)) % {10 ** (_MICROSECONDS - scale)}"
            lost.append(f"{rest} <> 0")
            told.append((field.name, kind.simpleString(), f"timestamp({scale})"))
    if not lost:
        return df, list
    observation: Any = Observation()
    counts = [F.expr(f"count_if({each}) as lost_{at}") for at, each in enumerate(lost)]
    taken = Observed(df, observation, "")

    def losses() -> list[tuple[str, str, str, int]]:
        values = taken.aggregates()
        return [(*each, values.get(f"lost_{at}") or 0) for at, each in enumerate(told)]

    return df.observe(observation, *counts).selectExpr(*sent), losses


def _lost(name: str, cast: str, kind: "DataType", target: "DataType") -> str:
    """What is true of a value that isn't the same any more once it is cast there and back."""
    source, most = kind.simpleString(), _LARGEST_BY_SPARK_TYPE.get(target.simpleString())
    if source not in WHOLE_NUMBERS or most is None:
        return f"not ({name} <=> try_cast({cast} as {source}))"
    # The cast back takes what is too large by one for the largest.
    return f"({name} > {most}L or not (cast({name} as bigint) <=> try_cast({cast} as bigint)))"


def _is_rounded(kind: "DataType", target: "DataType") -> bool:
    """Whether a type hasn't every value of another that it takes."""
    source, into = (each.simpleString().partition("(")[0] for each in (kind, target))
    if source in _SPARK_TIMES:
        return into == "date"
    numbers = (*WHOLE_NUMBERS, "decimal", "float", "double")
    if kind == target or source not in numbers or into not in numbers:
        return False
    if into in WHOLE_NUMBERS:
        return source not in WHOLE_NUMBERS  # one that is too large is an error
    if into in EXACT_IN_FLOATS:
        return source not in EXACT_IN_FLOATS[into]
    if source in WHOLE_NUMBERS:
        return False
    return source != "decimal" or getattr(kind, "scale", 0) > getattr(target, "scale", 0)


# --- tables of SQLite ---


def refuse_sqlite_losses(rows: Rows, data: "pyarrow.Table", schema: "StructType") -> None:
    """Refuse what SQLite would keep as another value: NaN as NULL, long numbers as floats."""
    declared = {name.lower(): type for name, type in rows.declared().items()}
    found = []
    for field, column in zip(schema, data.columns, strict=True):
        declared_type = declared.get(field.name.lower(), "")
        frame_type = field.dataType.simpleString()
        if is_changed := _change_of(frame_type.partition("(")[0], affinity(declared_type)):
            count = sum(is_changed(each) for each in column.to_pylist() if each is not None)
            found.append((field.name, frame_type, declared_type or "of no type", count))
    refuse_losses(rows.table, rows.dataid, data.num_rows, found)


def _change_of(kind: str, there: str) -> Callable[[Any], bool] | None:
    """What tells whether a value of a type becomes another in such a column, if any does."""
    if kind in ("float", "double"):
        return math.isnan
    if kind == "bigint" and there == REAL:
        return lambda value: int(float(value)) != value
    if kind == "decimal" and there in (REAL, NUMERIC, INTEGER):
        return lambda value: not _comes_back(str(value), there)
    return None


def _comes_back(text: str, there: str) -> bool:
    """Whether a decimal that SQLite is given as a text comes back with all its digits."""
    from decimal import Decimal

    if there != REAL and text.lstrip("-").isdigit() and -(2**63) <= int(text) < 2**63:
        return True
    return Decimal(repr(float(text))) == Decimal(text)
