"""What SQLite's columns are declared as: it tells what a chunk's types are, and what they keep."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import Refused
from ..storage.table import Rows
from .table_loss import refuse_losses

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql.types import StructType

INTEGER, TEXT, BLOB, REAL, NUMERIC = "integer", "text", "blob", "real", "numeric"

_WORDS = {
    INTEGER: ("INT",),
    TEXT: ("CHAR", "CLOB", "TEXT"),
    BLOB: ("BLOB",),
    REAL: ("REAL", "FLOA", "DOUB"),
}
"""What SQLite looks for in a declared type, in its order; all else is numeric."""

_FITTING = {
    INTEGER: ("int64", (int,)),
    TEXT: ("string", (str,)),
    BLOB: ("binary", (bytes,)),
    REAL: ("float64", (int, float)),
}


def affinity(declared: str) -> str:
    """What SQLite makes of values in a column that is declared so."""
    if not declared:
        return BLOB  # it keeps them as they are
    return next(
        (kind for kind, words in _WORDS.items() if any(each in declared for each in words)), NUMERIC
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

    kind, fitting = _FITTING.get(affinity(declared), ("", ())) if declared else ("", ())
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


def refuse_changes(rows: Rows, data: "pyarrow.Table", schema: "StructType") -> None:
    """Refuse what SQLite would keep as another value: NaN as NULL, long numbers as floats."""
    declared = {name.lower(): type for name, type in rows.declared().items()}
    found = []
    for field, column in zip(schema, data.columns, strict=True):
        there = declared.get(field.name.lower(), "")
        told = field.dataType.simpleString()
        if is_changed := _change_of(told.partition("(")[0], affinity(there)):
            count = sum(is_changed(each) for each in column.to_pylist() if each is not None)
            found.append((field.name, told, there or "of no type", count))
    refuse_losses(rows.table, rows.dataid, data.num_rows, found)


def _change_of(kind: str, there: str) -> Callable[[Any], bool] | None:
    """What tells whether a value of a type becomes another in such a column, if any does."""
    if kind in ("float", "double"):
        return math.isnan
    if kind == "bigint" and there == REAL:
        return lambda value: int(float(value)) != value
    if kind == "decimal" and there in (REAL, NUMERIC, INTEGER):
        return lambda value: not _is_kept(str(value), there)
    return None


def _is_kept(text: str, there: str) -> bool:
    """Whether a decimal that SQLite is given as a text comes back with all its digits."""
    from decimal import Decimal

    if there != REAL and text.lstrip("-").isdigit() and -(2**63) <= int(text) < 2**63:
        return True
    return Decimal(repr(float(text))) == Decimal(text)
