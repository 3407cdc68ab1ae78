"""How the types of PostgreSQL and of Spark become each other."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DataflowError
from . import lossless

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import DataType, StructType

TEXT = "text"

_SAME = {
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

_NATURAL = {
    "boolean": "bool",
    "tinyint": "int2",
    "smallint": "int2",
    "int": "int4",
    "bigint": "int8",
    "float": "float4",
    "double": "float8",
    "string": "text",
    "binary": "bytea",
    "date": "date",
    "timestamp_ntz": "timestamp",
    "timestamp": "timestamptz",
    "decimal": "numeric",
}
"""The type in which a column of Spark is loaded."""

_TEXTS = ("text", "varchar", "bpchar", "name")
_WHOLE = ("int2", "int4", "int8", "oid")
_FRACTIONS = ("float4", "float8", "numeric")
_DRIVER_HAS_NO_ARRAY_OF = ("numeric", "int2")
_JSON = ("json", "jsonb")

_DAYS = (-2440588, 2145031948)
"""The dates that PostgreSQL has, in days from 1970: what is outside means infinity."""

_MOMENTS = (-210866803200000000, 9223371331199999999)
"""The same of timestamps, in microseconds."""

MOST_DIGITS, DIGITS_AFTER = 38, 18


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
            return None if self.element in _SAME else "text[]"
        if self.base == "oid":
            return "int8"
        return None if self.base in _SAME else TEXT

    def _plain(self, base: str) -> str:
        if base == "numeric":
            return "decimal({}, {})".format(*self.digits())
        return "bigint" if base == "oid" and not self.is_array else _SAME.get(base, "string")

    def digits(self) -> tuple[int, int]:
        """Precision and scale of a NUMERIC, as near as Spark has them."""
        if self.modifier < 4:
            return MOST_DIGITS, DIGITS_AFTER
        precision, scale = (self.modifier - 4) >> 16 & 0xFFFF, (self.modifier - 4) & 0x7FF
        scale -= 2048 if scale > 1023 else 0
        if scale < 0:
            precision, scale = precision - scale, 0
        precision = max(precision, scale)
        return min(precision, MOST_DIGITS), min(scale, MOST_DIGITS)


def fitted(batch: "pyarrow.RecordBatch", schema: "pyarrow.Schema") -> "pyarrow.RecordBatch":
    """A batch from PostgreSQL in the types that Spark expects."""
    import pyarrow

    arrays = [_fitted(array, field) for array, field in zip(batch.columns, schema, strict=True)]
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def _fitted(array: Any, field: "pyarrow.Field") -> Any:
    import pyarrow

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
    is_full = pyarrow.types.is_decimal128(type) and type.precision == MOST_DIGITS
    return pyarrow.decimal256(76, type.scale) if is_full else type


def _check_finite(numbers: Any, limits: tuple[int, int], name: str) -> None:
    import pyarrow.compute as compute

    found = compute.call_function("min_max", [numbers]).as_py()
    if found["min"] is not None and (found["min"] < limits[0] or found["max"] > limits[1]):
        raise DataflowError(
            f"Column {name!r} has an infinite date, which Spark can't hold. Read it from a view "
            "that replaces infinity."
        )


class Loaded(NamedTuple):
    """How a column of a frame gets into a column of a table."""

    target: Column
    expression: str
    """What Spark makes of the column `{}` for the way."""
    type: str
    """The type of the staging table's column."""
    cast: str | None
    """The type to cast it to for the table, if PostgreSQL doesn't do it by itself."""
    back: str
    """What makes the frame's column of the staging table's again."""
    lost: str | None
    """What is true of a value that the table wouldn't keep as it is, if there may be one."""
    told: str
    """The type in the frame."""


def loaded(name: str, type: "DataType", target: Column) -> Loaded | str:
    """How to load a column, or what is in the way."""
    told, kind = type.simpleString(), _kind(type)
    natural = _NATURAL.get(kind)
    scale: int | None = getattr(type, "scale", None)

    def way(
        expression: str, staged: str, cast: str | None, back: str = "", lost: str | None = None
    ) -> Loaded:
        return Loaded(target, expression, staged, cast, back or f"cast({{}} as {told})", lost, told)

    if kind == "variant" and target.base in _JSON:
        return way("to_json({})", TEXT, target.type, "parse_json({})")
    if kind in ("array", "map", "struct") and target.base in _JSON:
        schema = told.replace("'", "\\'").replace("{", "{{").replace("}", "}}")
        return way("to_json({})", TEXT, target.type, f"from_json({{}}, '{schema}')")
    if kind == "array" and target.is_array:
        element = getattr(type, "elementType")  # noqa: B009
        natural = _NATURAL.get(_kind(element))
        if natural is not None:
            lost = lossless.of_array(natural, getattr(element, "scale", None), target)
            if natural == target.element and natural not in _DRIVER_HAS_NO_ARRAY_OF:
                return way("{}", f"{natural}[]", None, lost=lost)
            return way("cast({} as array<string>)", "text[]", target.type, lost=lost)
    elif kind in ("void", "time") or "interval" in kind or natural == TEXT:
        lost = lossless.of_text(target)
        return way("cast({} as string)", TEXT, _from_text(target), lost=lost)
    elif {natural, target.base} == {"timestamp", "timestamptz"}:
        # By the zone of Spark's session: the server would take its own.
        lost = lossless.of_value(target.base, None, target)
        return way(f"cast({{}} as {_SAME[target.base]})", target.base, None, lost=lost)
    elif natural is not None and _is_kept(natural, target):
        staged = told.replace("decimal", "numeric") if natural == "numeric" else natural
        # PostgreSQL's own cast keeps 15 digits of a double, its text all of them.
        cast = "text::numeric" if (natural[:5], target.base) == ("float", "numeric") else None
        expression = "cast({} as smallint)" if kind == "tinyint" else "{}"
        lost = lossless.of_value(natural, scale, target)
        return way(expression, staged, cast, lost=lost)
    return f"{name!r} is {told} in the frame and {target.type} in the table"


def _is_kept(natural: str, target: Column) -> bool:
    """Whether PostgreSQL puts a value of a type into a column by itself.

    What it would round is told by `postgres_loss`, of the values at hand.
    """
    base = target.base
    if natural == base or base in _TEXTS:
        return True
    if base in _WHOLE:
        return natural in _WHOLE  # one that is too large is an error
    return base in _FRACTIONS and natural in (*_WHOLE, *_FRACTIONS)


def _kind(type: "DataType") -> str:
    """The name of a type without what it is made of."""
    kind = re.split(r"[(<]", type.simpleString())[0]
    return "string" if kind in ("varchar", "char") else kind


def _from_text(target: Column) -> str | None:
    return None if target.base in _TEXTS else target.type


def schema_of(columns: Mapping[str, str]) -> "StructType":
    """The schema of a frame with these columns and types."""
    from pyspark.sql.types import StructType, _parse_datatype_string  # pyright: ignore

    made = StructType()
    for name, type in columns.items():
        made = made.add(name, _parse_datatype_string(type))
    return made
