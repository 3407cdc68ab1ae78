"""A frame's columns and values as a database keeps them."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from ..dataflow.errors import Refused
from ..dataflow.targets import POSTGRES

_POSTGRES = {
    "integer": "bigint", "floating": "double precision", "boolean": "boolean", "date": "date",
    "datetime": "timestamp", "datetimetz": "timestamptz", "decimal": "numeric", "bytes": "bytea",
    "timedelta": "interval", "text": "text",
}  # fmt: skip
_SQLITE = {
    "integer": "integer", "floating": "real", "boolean": "boolean", "date": "date",
    "datetime": "timestamp", "datetimetz": "timestamp", "decimal": "numeric", "bytes": "blob",
    "timedelta": "text", "text": "text",
}  # fmt: skip

_WHOLE = (20, 21, 23)
_TEXTS = (25, 114, 1042, 1043, 3802)
"""The numbers of PostgreSQL's types: whole numbers; texts, and JSON."""


def columns_for(frame: Any, dialect: str) -> dict[str, str]:
    """Column → type, for a table that is to hold such frames."""
    names = _POSTGRES if dialect == POSTGRES else _SQLITE
    found: dict[str, str] = {}
    for name, column in frame.items():
        if str(name) in found:
            raise Refused(
                f"The frame has two columns called {str(name)!r}. Rename one of them.",
                code="NOT_VALIDATED",
            )
        found[str(name)] = names[_kind(column)]
    return found


def writable(frame: Any, kinds: Sequence[int] | None) -> Iterator[tuple]:
    """The rows of a frame; `kinds` are the types of PostgreSQL's columns, None is for SQLite."""
    plain = frame.astype(object).where(frame.notna(), None)
    for row in plain.itertuples(index=False, name=None):
        if kinds is None:
            yield tuple(map(_for_sqlite, row))
        else:
            yield tuple(map(_for_postgres, row, kinds))


def _kind(column: Any) -> str:
    from pandas.api import types

    dtype = column.dtype
    if types.is_bool_dtype(dtype):
        return "boolean"
    if types.is_integer_dtype(dtype):
        return "integer"
    if types.is_float_dtype(dtype):
        return "floating"
    if types.is_timedelta64_dtype(dtype):
        return "timedelta"
    if types.is_datetime64_any_dtype(dtype):
        return "datetime" if getattr(dtype, "tz", None) is None else "datetimetz"
    told = types.infer_dtype(column, skipna=True)
    return told if told in _POSTGRES else "text"


def _for_postgres(value: Any, kind: int) -> Any:
    value = _plain(value)
    if isinstance(value, float) and kind in _WHOLE and value.is_integer():
        return int(value)  # a column of whole numbers and gaps is one of floats in pandas
    if isinstance(value, dict) or (isinstance(value, list | tuple) and kind in _TEXTS):
        return json.dumps(value, default=str)
    return list(value) if isinstance(value, tuple) else value


def _for_sqlite(value: Any) -> Any:
    value = _plain(value)
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, default=str)
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    return str(value)  # times and decimals, of which it has no types


def _plain(value: Any) -> Any:
    """A value of Python's own, of what numpy has."""
    if hasattr(value, "tolist") and type(value).__module__ == "numpy":
        return value.tolist()
    return value
