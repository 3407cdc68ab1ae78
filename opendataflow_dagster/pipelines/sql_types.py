"""A frame's columns and values as a database keeps them."""

import json
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, time
from decimal import Decimal
from numbers import Integral
from string import ascii_lowercase, ascii_uppercase
from typing import Any
from uuid import UUID

from ..errors import Refused
from ..location import POSTGRES

_POSTGRES = {
    "integer": "bigint",
    "floating": "double precision",
    "boolean": "boolean",
    "date": "date",
    "datetime": "timestamp",
    "datetimetz": "timestamptz",
    "decimal": "numeric",
    "bytes": "bytea",
    "timedelta": "interval",
    "text": "text",
}
_SQLITE = {
    "integer": "integer",
    "floating": "real",
    "boolean": "boolean",
    "date": "date",
    "datetime": "timestamp",
    "datetimetz": "timestamp",
    "decimal": "numeric",
    "bytes": "blob",
    "timedelta": "text",
    "text": "text",
}

_SMALL = str.maketrans(ascii_uppercase, ascii_lowercase)

_WHOLE, _DOUBLE, _DATE = (20, 21, 23), 701, 1082
_JSON = (114, 3802)
_TEXTS = (25, 1042, 1043, *_JSON)
"""The numbers of PostgreSQL's types: whole numbers, others, dates; JSON, and all texts."""

_EXACT = 2**53
"""Up to here a floating-point number holds each whole one."""


def columns_for(frame: Any, dialect: str, *, items: bool = False) -> dict[str, str]:
    """Column → type, for a table that is to hold such frames.

    What one of `items` has as a whole number, the next may have as another: JSON has numbers only.
    """
    names = _POSTGRES if dialect == POSTGRES else _SQLITE
    mixed = items and dialect == POSTGRES  # SQLite's columns hold both
    only_once(frame.columns, dialect)
    return {str(name): names[_kind(column, mixed=mixed)] for name, column in frame.items()}


def only_once(columns: Iterable[Any], dialect: str) -> None:
    """Refuse columns of one name, of which SQLite would keep the first; A and a are one there."""
    seen: dict[str, str] = {}
    for name in map(str, columns):
        known = name if dialect == POSTGRES else name.translate(_SMALL)
        if known in seen:
            twice = f"two columns called {name!r}"
            if seen[known] != name:
                twice = f"columns {seen[known]!r} and {name!r}, which are one in SQLite"
            raise Refused(f"The frame has {twice}. Rename one of them.", code="NOT_VALIDATED")
        seen[known] = name


def writable(frame: Any, kinds: Sequence[int] | None) -> Iterator[tuple]:
    """The rows of a frame; `kinds` are the types of PostgreSQL's columns, None is for SQLite."""
    plain = frame.astype(object).where(frame.notna(), None)
    names = [str(each) for each in frame.columns]
    for row in plain.itertuples(index=False, name=None):
        if kinds is None:
            yield tuple(map(_for_sqlite, row))
        else:
            yield tuple(map(_for_postgres, row, kinds, names))


def _kind(column: Any, *, mixed: bool) -> str:
    from pandas.api import types

    dtype = column.dtype
    if types.is_bool_dtype(dtype):
        return "boolean"
    if types.is_integer_dtype(dtype):
        return _kind_of_numbers(column.dropna(), mixed=mixed)
    if types.is_float_dtype(dtype):
        return "floating"
    if types.is_timedelta64_dtype(dtype):
        return "timedelta"
    if types.is_datetime64_any_dtype(dtype):
        return "datetime" if getattr(dtype, "tz", None) is None else "datetimetz"
    told = types.infer_dtype(column, skipna=True)
    if told in ("integer", "mixed-integer-float"):
        whole = [each for each in column.dropna() if isinstance(each, Integral)]
        return _kind_of_numbers(whole, mixed=mixed or told != "integer")
    if told in ("date", "datetime"):  # a date too, if there are some of both
        return _kind_of_times([each for each in column.dropna() if isinstance(each, datetime)])
    return told if told in _POSTGRES else "text"


def _kind_of_numbers(whole: Any, *, mixed: bool) -> str:
    """What holds each of these whole numbers; if `mixed`, others too."""
    low, high = (int(min(whole)), int(max(whole))) if len(whole) else (0, 0)
    if mixed:
        return "floating" if low >= -_EXACT and high <= _EXACT else "decimal"
    return "integer" if low >= -(2**63) and high < 2**63 else "decimal"


def _kind_of_times(times: Sequence[datetime]) -> str:
    if not times:
        return "date"
    return "datetimetz" if any(each.tzinfo for each in times) else "datetime"


def _for_postgres(value: Any, kind: int, name: str) -> Any:
    value = _plain(value)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and kind in _WHOLE and value.is_integer():
        return int(value)  # a column of whole numbers and gaps is one of floats in pandas
    if isinstance(value, dict) or (isinstance(value, list | tuple) and kind in _TEXTS):
        return json.dumps(value, default=str)
    if kind in _JSON:
        is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
        return value if is_number else json.dumps(value, default=str)
    if kind in _TEXTS or isinstance(value, UUID):
        return str(value)  # as a CSV file has it: True, and a UUID with its dashes
    if kind == _DATE and isinstance(value, datetime) and value.time() != time.min:
        raise _lossy(name, f"dates, and {value} has a time", "timestamp")
    if kind == _DOUBLE and isinstance(value, int) and float(value) != value:
        raise _lossy(name, f"double precision, which would round {value}", "numeric")
    return list(value) if isinstance(value, tuple) else value


def _lossy(name: str, why: str, better: str) -> Refused:
    return Refused(
        f"Column {name!r} is of {why}. Change the value in the transformation, or make the column "
        f"{better}.",
        code="NOT_VALIDATED",
    )


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
