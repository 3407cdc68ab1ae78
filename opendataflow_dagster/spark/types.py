"""The types of columns in databases and in Spark, and the values that a table would cut."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DataflowError, Refused
from ..location import Table
from ..storage.table import Rows
from .evidence import Observed
from .schema import EXACT_IN_FLOATS, WHOLE_NUMBERS, quoted

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType


TEXT = "text"

SAME_TYPES = {
    "bool": "boolean",
    "int2": "smallint",
    "int4": "int",
    "int8": "bigint",
    "float4": "float",
    "float8": "double",
    "text": "string",
    "varchar": "string",
    "bpchar": "string",
    "name": "string",
    "bytea": "binary",
    "date": "date",
    "timestamp": "timestamp_ntz",
    "timestamptz": "timestamp",
}
"""Types that both have, and the driver too; all others are transferred as texts."""

_DAYS = (-2440588, 2145031948)
"""PostgreSQL's dates, in days from 1970; values outside mean infinity."""

_MOMENTS = (-210866803200000000, 9223371331199999999)
"""PostgreSQL's timestamps, in microseconds from 1970."""

DECIMAL_DIGITS, DECIMAL_SCALE = 38, 18


class Column(NamedTuple):
    """A column of a table; `base` is the built-in type below its domain, or ""."""

    name: str
    base: str
    element: str
    is_array: bool
    type: str
    modifier: int
    needed: bool
    generated: bool
    full: str
    """The built-in type with its length, or its digits."""

    @property
    def spark_type(self) -> str:
        """Return the Spark type that the column is read as."""
        if self.is_array:
            return f"array<{self._plain(self.element)}>"
        return self._plain(self.base)

    def travels(self) -> str | None:
        """Return the type to cast it to for the transfer to Spark, if that is needed."""
        if self.is_array:
            return None if self.element in SAME_TYPES else "text[]"
        if self.base == "oid":
            return "int8"
        return None if self.base in SAME_TYPES else TEXT

    def _plain(self, base: str) -> str:
        if base == "numeric":
            return "decimal({}, {})".format(*self.digits())
        return "bigint" if base == "oid" and not self.is_array else SAME_TYPES.get(base, "string")

    def digits(self) -> tuple[int, int]:
        """Return precision and scale of a NUMERIC, as near as Spark has them."""
        if self.modifier < 4:
            return DECIMAL_DIGITS, DECIMAL_SCALE
        precision, scale = (self.modifier - 4) >> 16 & 0xFFFF, (self.modifier - 4) & 0x7FF
        scale -= 2048 if scale > 1023 else 0
        if scale < 0:
            precision, scale = precision - scale, 0
        precision = max(precision, scale)
        return min(precision, DECIMAL_DIGITS), min(scale, DECIMAL_DIGITS)


def fitted(batch: "pyarrow.RecordBatch", schema: "pyarrow.Schema") -> "pyarrow.RecordBatch":
    """Convert a batch from PostgreSQL to the types that Spark expects."""
    import pyarrow

    arrays = [_fitted(array, field) for array, field in zip(batch.columns, schema, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _fitted(array: Any, field: "pyarrow.Field") -> Any:
    import pyarrow

    # The ADBC driver marks types that Arrow lacks as extension types. Arrow can't cast these, but
    # can cast their stored arrays.
    array = getattr(array, "storage", array)
    if array.type != field.type:
        try:
            # In a direct cast to 38 digits, numbers with more digits would overflow silently.
            array = array.cast(_wider(field.type)).cast(field.type)
        except pyarrow.ArrowInvalid as error:
            raise DataflowError(
                f"Column {field.name!r} has a value that Spark's {field.type} can't hold "
                f"({error}). Read it from a view that casts the column."
            ) from None
    inner = array.flatten() if pyarrow.types.is_list(field.type) else array
    if pyarrow.types.is_date(inner.type):
        _check_finite(inner.cast(pyarrow.int32()), _DAYS, field.name)
    elif pyarrow.types.is_timestamp(inner.type):
        _check_finite(inner.cast(pyarrow.int64()), _MOMENTS, field.name)
    return array


def _wider(type: "pyarrow.DataType") -> "pyarrow.DataType":
    import pyarrow

    if pyarrow.types.is_list(type):
        return pyarrow.list_(_wider(type.value_type))
    is_full = pyarrow.types.is_decimal128(type) and type.precision == DECIMAL_DIGITS
    return pyarrow.decimal256(76, type.scale) if is_full else type


def _check_finite(numbers: Any, limits: tuple[int, int], name: str) -> None:
    import pyarrow.compute as compute

    found = compute.call_function("min_max", [numbers]).as_py()
    if found["min"] is not None and (found["min"] < limits[0] or found["max"] > limits[1]):
        raise DataflowError(
            f"Column {name!r} has an infinite date, which Spark can't hold. Read it from a view "
            "that replaces infinity."
        )


def frame_schema(columns: Mapping[str, str]) -> "StructType":
    """Return the schema of a frame with these columns and types."""
    from pyspark.sql.types import StructType, _parse_datatype_string  # pyright: ignore

    schema = StructType()
    for name, type in columns.items():
        schema = schema.add(name, _parse_datatype_string(type))
    return schema


# --- types of SQLite, by which its columns are declared ---


INTEGER, SQLITE_TEXT, BLOB, REAL, NUMERIC = "integer", "text", "blob", "real", "numeric"

_AFFINITY_WORDS = {
    INTEGER: ("INT",),
    SQLITE_TEXT: ("CHAR", "CLOB", "TEXT"),
    BLOB: ("BLOB",),
    REAL: ("REAL", "FLOA", "DOUB"),
}
"""What SQLite searches a declared type for, in its order; everything else is numeric."""

_ARROW_TYPES = {
    INTEGER: ("int64", (int,)),
    SQLITE_TEXT: ("string", (str,)),
    BLOB: ("binary", (bytes,)),
    REAL: ("float64", (int, float)),
}


def affinity(declared: str) -> str:
    """Return the affinity that SQLite gives to a column of this declared type."""
    if not declared:
        return BLOB  # it stores values unchanged
    return next(
        (
            kind
            for kind, words in _AFFINITY_WORDS.items()
            if any(word in declared for word in words)
        ),
        NUMERIC,
    )


def arrow_of(rows: Rows) -> "pyarrow.Table":
    """Return the rows of a chunk, with the declared types whatever values they have."""
    import pyarrow

    names, found = rows.fetch()
    declared = rows.declared()
    columns = list(zip(*found, strict=True)) if found else [()] * len(names)
    arrays = [
        _array(rows, name, declared.get(name, ""), values)
        for name, values in zip(names, columns, strict=True)
    ]
    return pyarrow.table(arrays, names=names)


def _array(rows: Rows, name: str, declared: str, values: Sequence[Any]) -> Any:
    import pyarrow

    kind, fitting = _ARROW_TYPES.get(affinity(declared), ("", ())) if declared else ("", ())
    if kind and all(value is None or isinstance(value, fitting) for value in values):
        return pyarrow.array(values, kind)
    try:
        found = pyarrow.array(values)
    except pyarrow.ArrowException as error:
        raise Refused(
            f"Column {name!r} of {rows.table.location} has values of several types in chunk "
            f"{rows.dataid!r}: {error}. Convert them to one type there.",
            code="INVALID_LOCATION",
        ) from None
    # A column of NULLs has no type of its own, and Spark can't write that.
    return found.cast(pyarrow.string()) if found.type == pyarrow.null() else found


# Values that a table would silently round or cut are found, counted, and refused.

_WHOLE_TYPES = ("int2", "int4", "int8")
_FLOAT_TYPES = ("float4", "float8")
_TIME_TYPES = ("timestamp", "timestamptz", "time", "timetz")
_NUMERIC = "numeric"
_MICROSECONDS = 6

_LARGEST_BELOW_BIGINT = {"float4": "9223371487098961920", "float8": "9223372036854774784"}
"""The largest number below 2^63 that a type has: the next one doesn't fit a bigint."""

_EXACT = {
    "float4": ("int2", "float4"),
    "float8": ("int2", "int4", "float4", "float8"),
}
"""The types whose numbers a float can all represent."""


def value_loss(source: str, scale: int | None, target: Column) -> str | None:
    """The condition for a loss of a value transferred as `source`, of a decimal's `scale`."""
    base = target.base
    if _is_kept(source, scale, base, target):
        return None
    if base == _NUMERIC and source in _WHOLE_TYPES:
        return f"{{0}}::numeric is distinct from {{0}}::{target.full}"
    if base == _NUMERIC and source in _FLOAT_TYPES:
        # Spark's decimals have no NaN: the written value couldn't be read again.
        return (
            f"({{0}} in ('NaN', 'Infinity', '-Infinity') or "
            f"{{0}} is distinct from {{0}}::text::{target.full}::{source})"
        )
    if base in _FLOAT_TYPES and source == "int8":
        return f"{{0}} <> least({{0}}::{base}::float8, {_LARGEST_BELOW_BIGINT[base]})::int8"
    if base in _FLOAT_TYPES and source == _NUMERIC:
        # As text: the cast back to a numeric has fewer digits than the number.
        return f"{{0}} is distinct from {{0}}::{base}::float8::text::{_as(scale)}"
    if base in _FLOAT_TYPES:
        return f"{{0}}::float8 is distinct from {{0}}::{base}::float8"
    return f"{{0}} is distinct from {{0}}::{target.full}"


def array_loss(source: str, scale: int | None, target: Column) -> str | None:
    """Return the condition for a loss in an array with elements of type `source`."""
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
    """Return the condition for a loss in a text."""
    base = target.base
    if base == "name":
        return "{0} is distinct from {0}::name::text"
    if base == "varchar" and target.modifier >= 0:  # trailing spaces are cut silently
        full = f"{{0}}::{target.full}::text"
        return f"({{0}} <> {full} and rtrim({{0}}, ' ') = rtrim({full}, ' '))"
    if (base == _NUMERIC and target.modifier >= 0) or _is_cut(base, target):
        return f"{{0}}::{target.type} is distinct from {{0}}::{target.full}"
    return None


def _is_kept(source: str, scale: int | None, base: str, target: Column) -> bool:
    """Whether a column stores every value of a type exactly, or refuses it."""
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
    """Return a decimal of the frame, with room for one that was rounded up."""
    return f"numeric(100,{scale or 0})"


def _scale(target: Column) -> int:
    """Return the decimals that a NUMERIC keeps; below zero, it rounds before the point."""
    scale = (target.modifier - 4) & 0x7FF
    return scale - 2048 if scale > 1023 else scale


# --- the refusal ---


def refuse_losses(
    table: Table, dataid: str, rows: int, found: Sequence[tuple[str, str, str, int]]
) -> None:
    """Refuse a chunk if a column (name, type in the frame, type in the table) would lose values.

    The published values would differ from those that its fingerprint covers.
    """
    refusals = [
        f"{name!r} is {kind} in the frame but {there} in the table, which can't store {count} of "
        f"{rows} values unchanged"
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
"""The largest number below 2^63 that a type has: the next one doesn't fit a bigint."""

_SPARK_TIMES = ("timestamp", "timestamp_ntz")

Losses = Callable[[], list[tuple[str, str, str, int]]]
"""Column, type in the frame, type in the table, and how many values the latter lacks."""


def observed_losses(
    df: "DataFrame", there: "StructType", digits: Mapping[str, int]
) -> tuple["DataFrame", Losses]:
    """Return the frame to write into such a table, and an observation of what that loses."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    types = {field.name: field.dataType for field in there}
    sent, lost, columns = [], [], []
    for field in df.schema:
        name, kind = quoted(field.name), field.dataType
        target, scale = types.get(field.name), digits.get(field.name, _MICROSECONDS)
        if target is not None and _is_rounded(kind, target):
            # Cast here: the database may take fewer digits of a double than it has.
            cast = f"try_cast({name} as {target.simpleString()})"
            sent.append(f"{cast} as {name}")
            lost.append(_lost(name, cast, kind, target))
            columns.append((field.name, kind.simpleString(), target.simpleString()))
            continue
        sent.append(name)
        if kind.simpleString() in _SPARK_TIMES and scale < _MICROSECONDS:
            rest = f"unix_micros(cast({name} as timestamp)) % {10 ** (_MICROSECONDS - scale)}"
            lost.append(f"{rest} <> 0")
            columns.append((field.name, kind.simpleString(), f"timestamp({scale})"))
    if not lost:
        return df, list
    observation: Any = Observation()
    counts = [F.expr(f"count_if({condition}) as lost_{at}") for at, condition in enumerate(lost)]
    taken = Observed(df, observation, "")

    def losses() -> list[tuple[str, str, str, int]]:
        values = taken.aggregates()
        return [(*column, values.get(f"lost_{at}") or 0) for at, column in enumerate(columns)]

    return df.observe(observation, *counts).selectExpr(*sent), losses


def _lost(name: str, cast: str, kind: "DataType", target: "DataType") -> str:
    """Return the condition for a value that changes when it is cast there and back."""
    source, most = kind.simpleString(), _LARGEST_BY_SPARK_TYPE.get(target.simpleString())
    if source not in WHOLE_NUMBERS or most is None:
        return f"not ({name} <=> try_cast({cast} as {source}))"
    # The cast back turns what is too large by one into the largest.
    return f"({name} > {most}L or not (cast({name} as bigint) <=> try_cast({cast} as bigint)))"


def _is_rounded(kind: "DataType", target: "DataType") -> bool:
    """Whether a type accepts values of another that it can't represent."""
    source, into = (one.simpleString().partition("(")[0] for one in (kind, target))
    if source in _SPARK_TIMES:
        return into == "date"
    numbers = (*WHOLE_NUMBERS, "decimal", "float", "double")
    if kind == target or source not in numbers or into not in numbers:
        return False
    if into in WHOLE_NUMBERS:
        return source not in WHOLE_NUMBERS  # a number that is too large is an error
    if into in EXACT_IN_FLOATS:
        return source not in EXACT_IN_FLOATS[into]
    if source in WHOLE_NUMBERS:
        return False
    return source != "decimal" or getattr(kind, "scale", 0) > getattr(target, "scale", 0)


# --- tables of SQLite ---


def refuse_sqlite_losses(rows: Rows, data: "pyarrow.Table", schema: "StructType") -> None:
    """Refuse what SQLite would store as another value: NaN as NULL, long numbers as floats."""
    declared = {name.lower(): type for name, type in rows.declared().items()}
    found = []
    for field, column in zip(schema, data.columns, strict=True):
        declared_type = declared.get(field.name.lower(), "")
        frame_type = field.dataType.simpleString()
        if is_changed := _change_of(frame_type.partition("(")[0], affinity(declared_type)):
            count = sum(is_changed(value) for value in column.to_pylist() if value is not None)
            found.append((field.name, frame_type, declared_type or "of no type", count))
    refuse_losses(rows.table, rows.dataid, data.num_rows, found)


def _change_of(kind: str, there: str) -> Callable[[Any], bool] | None:
    """Return a test whether a value changes when stored in this column; None if none does."""
    if kind in ("float", "double"):
        return math.isnan
    if kind == "bigint" and there == REAL:
        return lambda value: int(float(value)) != value
    if kind == "decimal" and there in (REAL, NUMERIC, INTEGER):
        return lambda value: not _comes_back(str(value), there)
    return None


def _comes_back(text: str, there: str) -> bool:
    """Whether a decimal that SQLite gets as a text comes back with all its digits."""
    from decimal import Decimal

    if there != REAL and text.lstrip("-").isdigit() and -(2**63) <= int(text) < 2**63:
        return True
    return Decimal(repr(float(text))) == Decimal(text)
