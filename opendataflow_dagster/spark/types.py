"""The types of columns of PostgreSQL and SQLite, and those that Spark reads them as."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DataflowError, Refused
from ..storage.table import Rows

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType


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
"""Types that both have, and the driver too; all others travel as texts."""

_DAYS = (-2440588, 2145031948)
"""The dates that PostgreSQL has, in days from 1970: what is outside means infinity."""

_MOMENTS = (-210866803200000000, 9223371331199999999)
"""The same of timestamps, in microseconds."""

DECIMAL_DIGITS, DECIMAL_SCALE = 38, 18


class Column(NamedTuple):
    """A column of a table: `base` is the built-in type below its domain, "" if it is none."""

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
        """The type of Spark that the column is read as."""
        if self.is_array:
            return f"array<{self._plain(self.element)}>"
        return self._plain(self.base)

    def travels(self) -> str | None:
        """The type to cast it to for the way to Spark, if it doesn't travel as it is."""
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
        """Precision and scale of a NUMERIC, as near as Spark has them."""
        if self.modifier < 4:
            return DECIMAL_DIGITS, DECIMAL_SCALE
        precision, scale = (self.modifier - 4) >> 16 & 0xFFFF, (self.modifier - 4) & 0x7FF
        scale -= 2048 if scale > 1023 else 0
        if scale < 0:
            precision, scale = precision - scale, 0
        precision = max(precision, scale)
        return min(precision, DECIMAL_DIGITS), min(scale, DECIMAL_DIGITS)


def fitted(batch: "pyarrow.RecordBatch", schema: "pyarrow.Schema") -> "pyarrow.RecordBatch":
    """A batch from PostgreSQL in the types that Spark expects."""
    import pyarrow

    arrays = [_fitted(array, field) for array, field in zip(batch.columns, schema, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _fitted(array: Any, field: "pyarrow.Field") -> Any:
    import pyarrow

    # The ADBC driver marks types that Arrow lacks as extension types, which Arrow can't cast. What
    # such an array stores, it can.
    array = getattr(array, "storage", array)
    if array.type != field.type:
        try:
            # Straight to 38 digits, Arrow lets a number with more of them run over silently.
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
    """The schema of a frame with these columns and types."""
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
"""What SQLite looks for in a declared type, in its order; all else is numeric."""

_ARROW_TYPES = {
    INTEGER: ("int64", (int,)),
    SQLITE_TEXT: ("string", (str,)),
    BLOB: ("binary", (bytes,)),
    REAL: ("float64", (int, float)),
}


def affinity(declared: str) -> str:
    """What SQLite makes of values in a column that is declared so."""
    if not declared:
        return BLOB  # it keeps them as they are
    return next(
        (
            kind
            for kind, words in _AFFINITY_WORDS.items()
            if any(each in declared for each in words)
        ),
        NUMERIC,
    )


def arrow_of(rows: Rows) -> "pyarrow.Table":
    """The rows of a chunk, of the same types whatever is in it, as far as they are declared."""
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
            f"{rows.dataid!r}: {error}. Make them one type there.",
            code="INVALID_LOCATION",
        ) from None
    # A column of NULLs has no type of its own, and Spark writes none without.
    return found.cast(pyarrow.string()) if found.type == pyarrow.null() else found
