"""Deep comparison of two tables, which tells the cells that differ.

The index of the rows and the order of the columns don't count; the order of the rows does. Anything
missing (None, NaN, NaT, NA) equals anything missing. 1 equals 1.0, but True isn't 1, a date isn't a
text, and a date isn't a moment.
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, datetime, timedelta
from decimal import Decimal
from math import isclose
from typing import Any, NamedTuple

from ..util.text import printable

TOLERANCE = 1e-12
SHORT = 1e-6
"""Of numbers that were kept in 32 bits."""
MAX_SHOWN_CHARACTERS = 80
SIMPLE = (str, int, float, bool)
"""Types of most cells, which are compared by a shorter way."""


class Difference(NamedTuple):
    """One cell that differs; or, without a row, a column or the number of rows."""

    column: Any
    row: int | None
    expected: Any
    got: Any
    what: str = ""

    def __str__(self) -> str:
        if self.what:
            return self.what
        place = f"column {_shown(self.column)}, row {self.row}"
        return f"{place}: expected {_shown(self.expected)}, got {_shown(self.got)}"

    def told(self) -> dict[str, Any]:
        """For JSON; a row counts from 0, as pandas does."""
        column = None if self.column is None else str(self.column)
        row = {"column": column, "row": self.row}
        return row | {
            "expected": _shown(self.expected),
            "got": _shown(self.got),
            "message": str(self),
        }


def differences(expected: Any, got: Any) -> Iterator[Difference]:
    """What of two DataFrames differs: columns first, then the number of rows, then cells."""
    wanted, found = _columns(expected), _columns(got)
    # `[]` can't say which columns there are.
    if wanted or len(got):
        for key, place in wanted.items():
            if key not in found:
                name = expected.columns[place]
                there = ", ".join(map(_shown, got.columns))
                what = f"column {_shown(name)} is missing; there are: {there or 'none'}"
                yield Difference(name, None, "a column", None, what)
        for key, place in found.items():
            if key not in wanted:
                name = got.columns[place]
                what = f"column {_shown(name)} isn't expected"
                yield Difference(name, None, None, "a column", what)
    if len(expected) != len(got):
        what = f"expected {_rows(len(expected))}, got {len(got)}"
        yield Difference(None, None, len(expected), len(got), what)
    for key, place in wanted.items():
        if key in found:
            cells = expected.iloc[:, place], got.iloc[:, found[key]]
            yield from _cells(expected.columns[place], *cells)


def identical(one: Any, other: Any) -> bool:
    """Whether nothing at all was done to a table: not even a column's type was changed."""
    first, second = _columns(one), _columns(other)
    if first.keys() != second.keys() or len(one) != len(other):
        return False
    for key, place in first.items():
        left, right = one.iloc[:, place], other.iloc[:, second[key]]
        if left.dtype != right.dtype:
            return False
        if not all(
            type(a) is type(b) and equal(a, b)
            for a, b in zip(map(_plain, left), map(_plain, right), strict=True)
        ):
            return False
    return True


def equal(expected: Any, got: Any, tolerance: float = TOLERANCE) -> bool:
    """Whether two values mean the same."""
    expected, got = _plain(expected), _plain(got)
    if _missing(expected) or _missing(got):
        return _missing(expected) and _missing(got)
    kind = _kind(expected)
    if kind != _kind(got):
        return False
    if kind == "number":
        return _same_number(expected, got, tolerance)
    if kind == "mapping":
        return expected.keys() == got.keys() and all(
            equal(value, got[key], tolerance) for key, value in expected.items()
        )
    if kind == "list":
        return len(expected) == len(got) and all(
            equal(a, b, tolerance) for a, b in zip(expected, got, strict=True)
        )
    try:
        return bool(expected == got)
    except Exception:  # the values are the user's: they may refuse to be compared
        return False


def _columns(frame: Any) -> dict[tuple[Any, int], int]:
    """Where each column is; of several of one name, the first, the second, and so on."""
    found: dict[tuple[Any, int], int] = {}
    for place, name in enumerate(map(_known, frame.columns)):
        turn = 0
        while (name, turn) in found:
            turn += 1
        found[name, turn] = place
    return found


_NAMELESS = object()


def _known(name: Any) -> Any:
    """The name of a column that equals others: NaN doesn't equal itself."""
    if isinstance(name, tuple):
        return tuple(map(_known, name))
    return _NAMELESS if _missing(name) else name


def _cells(column: Any, expected: Any, got: Any) -> Iterator[Difference]:
    small = {str(expected.dtype).lower(), str(got.dtype).lower()} & {"float16", "float32"}
    tolerance = SHORT if small else TOLERANCE
    for row, (a, b) in enumerate(zip(expected, got, strict=False)):
        if type(a) is type(b) and type(a) in SIMPLE and a == b:
            continue
        if not equal(a, b, tolerance):
            yield Difference(column, row, _plain(a), _plain(b))


def _same_number(one: Any, other: Any, tolerance: float) -> bool:
    if one == other:
        return True
    exact = isinstance(one, Decimal) and isinstance(other, Decimal)
    if exact or (_whole(one) and _whole(other)):
        return False  # an id with a digit that is wrong is another id, however long it is
    try:
        return isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)
    except (TypeError, OverflowError, ValueError):
        return False


def _whole(number: Any) -> bool:
    if isinstance(number, Decimal):
        return number == number.to_integral_value()
    return isinstance(number, int) or (isinstance(number, float) and number.is_integer())


def _kind(value: Any) -> str:
    # datetime is a date, and bool a number, to Python: the order counts.
    kinds = {
        "bool": bool,
        "number": (int, float, Decimal, complex),
        "text": str,
        "bytes": bytes | bytearray,
        "moment": datetime,
        "date": date,
        "duration": timedelta,
        "mapping": Mapping,
        "list": list | tuple,
        "set": AbstractSet,
    }
    return next((name for name, kind in kinds.items() if isinstance(value, kind)), "other")


def _plain(value: Any) -> Any:
    """What numpy's scalars and arrays are in Python."""
    import numpy
    import pandas

    if isinstance(value, numpy.datetime64):
        return pandas.Timestamp(value)
    if isinstance(value, numpy.timedelta64):
        return pandas.Timedelta(value)
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray | pandas.Series | pandas.Index):
        return value.tolist()
    return value


def _missing(value: Any) -> bool:
    import pandas

    if value is None or value is pandas.NA or value is pandas.NaT:
        return True
    return isinstance(value, float | Decimal) and bool(value != value)


def _shown(value: Any) -> str:
    text = printable(repr(value))
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[: MAX_SHOWN_CHARACTERS - 1]}…"


def _rows(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"
