"""A table without chunks, in PostgreSQL or SQLite: read, appended to, replaced."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import datetime, time
from decimal import Decimal
from numbers import Integral
from string import ascii_lowercase, ascii_uppercase
from typing import TYPE_CHECKING, Any
from uuid import UUID

from ..chunk import Chunk, Result
from ..errors import DataflowError, Refused
from ..location import JDBC, POSTGRES, SQLITE, Table, is_select
from ..model import Claim
from ..spark.session import is_spark_frame
from ..storage.folder import need
from ..storage.table import Rows, is_outage
from ..store.database import named_statements
from ..util.text import first_line, typed
from .frames import (
    REPLACE,
    Confirm,
    Destination,
    Parts,
    Source,
    Spill,
    Verdict,
    fault,
    from_pandas,
    is_to_blame,
    one,
    pieces_of,
    whole_pandas,
)

if TYPE_CHECKING:
    from pandas import DataFrame as PandasFrame
    from pyspark.sql import DataFrame, SparkSession


Password = Callable[[], str | None]

_TIMESTAMPTZ = 1184
"""The number of that type in PostgreSQL."""


class TableSource(Source):
    """A table, or the result of a SELECT; it can't be written through this."""

    def __init__(self, table: Table, password: Password) -> None:
        self._rows = WholeTable(table, password)
        self.location = table.location

    def pandas(self) -> "PandasFrame":
        names, rows = self._rows.look()
        # Like pandas.read_sql: decimals become numbers for calculations.
        return need("pandas").DataFrame.from_records(rows, columns=names, coerce_float=True)

    def spark(self, spark: "SparkSession") -> "DataFrame":
        if self.by_pandas():
            return from_pandas(spark, self.pandas())
        from ..spark.postgres import read_rows

        return read_rows(spark, self._rows.table, password=self._rows.password)

    def by_pandas(self) -> bool:
        table = self._rows.table
        return table.dialect != POSTGRES or is_select(table.name)


class TableDestination(Destination):
    """A table that rows are appended to, or whose rows are replaced if its writemode says so."""

    def __init__(self, table: Table, password: Password, mode: str) -> None:
        self._rows = WholeTable(table, password, may_make=True)
        self._items = WholeTable(table, password, may_make=True, items=True)
        self._mode, self.location = mode, table.location

    def replaces(self, *, items: bool = False) -> bool:
        return self._mode == REPLACE

    def publish(self, frame: Any, chunk: Chunk, confirm: Confirm) -> Result:
        # Spark's timestamps keep their zone where the table has such a column.
        moments = self._rows.moments() if is_spark_frame(frame) else ()
        with self.rows(frame, chunk, moments) as rows:
            return one(self._write(self._rows, [(chunk.claim, rows)], confirm))

    def append(self, parts: Parts, confirm: Confirm) -> list[Verdict]:
        converted = [(claim, whole_pandas(frame)) for claim, frame in parts]
        return self._write(self._items, converted, confirm)

    def _write(self, rows: "WholeTable", parts: Parts, confirm: Confirm) -> list[Verdict]:
        return rows.write(parts, confirm, replace=self.replaces())


class WholeTable(Rows):
    """All rows of a table."""

    def __init__(
        self, table: Table, password: Password, *, may_make: bool = False, items: bool = False
    ) -> None:
        if table.dialect == JDBC:
            raise Refused(
                f"{table.datasetid!r} is reached by JDBC, which reads and writes only chunks. "
                f"Run: odf dataset add {typed(table.datasetid)} --chunkcolumn COLUMN",
                code="INVALID_LOCATION",
            )
        super().__init__(table, "", None, password)
        self._may_make, self._of_items = may_make, items
        self._statements = self._statements | named_statements(table.dialect, "sqltable")

    @property
    def password(self) -> Password:
        return self._password

    def moments(self) -> list[str]:
        """Return the columns of PostgreSQL's type `timestamptz`."""
        if self.table.dialect != POSTGRES:
            return []
        with self._connected() as connection:
            found = self._columns(connection)
        return [name for name, kind in found.items() if kind == _TIMESTAMPTZ]

    def look(self) -> tuple[list[str], list[tuple]]:
        """Return the column names and the rows, over a connection that can't write."""
        with self._connected() as connection:
            if self.table.dialect == SQLITE:
                self._execute(connection, "look_only")
                cursor = connection.execute(self._query())
            else:
                connection.read_only = True
                # A pipeline refuses a second statement behind the first, whatever it says.
                with connection.pipeline():
                    cursor = connection.execute(self._query().encode())
            return [column[0] for column in cursor.description], cursor.fetchall()

    def write(
        self, parts: Sequence[tuple[Claim, Any]], confirm: Confirm, *, replace: bool
    ) -> list[Verdict]:
        """Write the rows of each claim in one transaction, leaving out those that can't be written.

        With `replace`, all other rows of the table are deleted, even those of all claims but the
        last.
        """
        with self._connected() as connection:
            if self.table.dialect == SQLITE or replace or not self._is_there(connection):
                self._take_turn(connection)
            frames = [frame for _, frame in parts]
            columns, verdicts = self._prepared(connection, frames), []
            for frame in frames:
                verdicts.append(self._part(connection, columns, frame, replace))
                columns = columns or self._columns(connection)
            confirm()
            connection.commit()
        return verdicts

    def _prepared(self, connection: Any, frames: Sequence[Any]) -> dict[str, int]:
        """Return the table's columns; create a missing table for the frame that says most about it.

        A frame that can't be written creates no table, since the others might not fit it.
        """
        if len(frames) > 1 and not self._is_there(connection):
            with_columns = [frame for frame in frames if len(frame.columns)]
            for frame in sorted(with_columns, key=len, reverse=True):
                if isinstance(self._part(connection, {}, frame, False), Result):
                    self._execute(connection, "empty")
                    break
        return self._columns(connection)

    def _part(self, connection: Any, columns: dict[str, int], frame: Any, replace: bool) -> Verdict:
        self._execute(connection, "save")
        try:
            columns = columns or self._made(connection, frame)
            if replace and columns:
                self._execute(connection, "empty")
            self._insert(connection, columns, frame)
        except Exception as error:
            if not self._is_of_the_rows(connection, error):
                raise
            self._execute(connection, "undo")
            return self._verdict(error, frame)
        self._execute(connection, "keep")
        return Result(len(frame), location=self.table.location)

    def _verdict(self, error: Exception, frame: Any) -> DataflowError:
        if isinstance(error, _drivers()):
            return DataflowError(f"{self.table.location}: {first_line(error)}")
        seen = frame.typical() if isinstance(frame, Spill) else frame
        return fault(error, seen, self.table.location)

    def _insert(self, connection: Any, columns: dict[str, int], frame: Any) -> None:
        names = [str(name) for name in frame.columns]
        only_once(names, self.table.dialect)
        known = set(columns) if self.table.dialect == POSTGRES else {c.lower() for c in columns}
        for name in names:
            if (name if self.table.dialect == POSTGRES else name.lower()) not in known:
                raise Refused(
                    f"{self.table.location} has no column {name!r}: it has "
                    f"{', '.join(columns)}. Leave the column out of the result, or add "
                    "it to the table.",
                    code="NOT_VALIDATED",
                )
        if not names or not len(frame):
            return
        column_list = ", ".join(map(self._quoted, names))
        if self.table.dialect == POSTGRES:
            kinds = [columns[name] for name in names]
            # Without parameters: otherwise the second of two % would be removed.
            statement = self._statement("copy", columns=column_list).replace("%%", "%")
            with connection.cursor().copy(statement) as copy:
                for piece in pieces_of(frame):
                    for row in writable(piece, kinds):
                        copy.write_row(row)
            return
        insert = self._statement("insert", columns=column_list, values=", ".join("?" * len(names)))
        for piece in pieces_of(frame):
            connection.executemany(insert, writable(piece, None))

    def _made(self, connection: Any, frame: Any) -> dict[str, int]:
        """The table's columns, after creating it for a frame; an empty frame creates none."""
        if len(frame.columns) and not self._is_there(connection):
            seen = frame.typical() if isinstance(frame, Spill) else frame
            kinds = columns_for(seen, self.table.dialect, items=self._of_items)
            columns = ", ".join(f"{self._quoted(name)} {kind}" for name, kind in kinds.items())
            connection.execute(self._statement("create", columns=columns), self._known)
        return self._columns(connection)

    def _is_there(self, connection: Any) -> bool:
        name = self.table.name
        if self.table.dialect == POSTGRES:
            name = self._names["table"].replace("%%", "%")
        found = connection.execute(self._statement("is_there"), {"name": name})
        return bool(found.fetchall())

    def _columns(self, connection: Any) -> dict[str, int]:
        """Return column → number of its type in PostgreSQL; empty while there is no table."""
        if not self._is_there(connection):
            return {}
        described = self._execute(connection, "columns").description
        return {column[0]: column[1] for column in described}

    def _query(self) -> str:
        if is_select(self.table.name):
            return self.table.name.strip().rstrip(";")
        return self._statement("all").replace("%%", "%")

    def _is_of_the_rows(self, connection: Any, error: Exception) -> bool:
        """Whether the rows caused the error, not the connection or the database."""
        if not (is_to_blame(error) or isinstance(error, _drivers())) or is_outage(error):
            return False
        if self.table.dialect == POSTGRES:
            return not connection.closed
        return connection.in_transaction

    def _sqlite(self) -> Any:
        """A connection to an SQLite file; for writing, the file is created if it is missing."""
        import sqlite3

        path = self.table.database
        if not os.path.exists(path) and self._may_make and os.path.isdir(os.path.dirname(path)):
            with closing(sqlite3.connect(path)):
                pass
        return super()._sqlite()


def _drivers() -> tuple[type[Exception], ...]:
    import sqlite3

    import psycopg

    return psycopg.Error, sqlite3.Error


# A frame's columns and values as a database stores them.


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
"""The numbers of PostgreSQL's types: integers, others, dates; JSON, and all strings."""

_EXACT = 2**53
"""Up to here, a floating-point number holds every integer."""


def columns_for(frame: Any, dialect: str, *, items: bool = False) -> dict[str, str]:
    """Return column → type, for a table that is to hold such frames.

    An integer in one of `items` may be a fraction in the next: JSON knows only numbers.
    """
    names = _POSTGRES if dialect == POSTGRES else _SQLITE
    mixed = items and dialect == POSTGRES  # SQLite's columns hold both
    only_once(frame.columns, dialect)
    return {str(name): names[_kind(column, mixed=mixed)] for name, column in frame.items()}


def only_once(columns: Iterable[Any], dialect: str) -> None:
    """Refuse columns with one name: SQLite, where A equals a, would keep only the first."""
    seen: dict[str, str] = {}
    for name in map(str, columns):
        known = name if dialect == POSTGRES else name.translate(_SMALL)
        if known in seen:
            twice = f"two columns called {name!r}"
            if seen[known] != name:
                twice = f"columns {seen[known]!r} and {name!r}, which are the same in SQLite"
            raise Refused(f"The frame has {twice}. Rename one of them.", code="NOT_VALIDATED")
        seen[known] = name


def writable(frame: Any, kinds: Sequence[int] | None) -> Iterator[tuple]:
    """Yield the rows of a frame; `kinds` are the types of PostgreSQL's columns; None is SQLite."""
    plain = frame.astype(object).where(frame.notna(), None)
    names = [str(name) for name in frame.columns]
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
    inferred = types.infer_dtype(column, skipna=True)
    if inferred in ("integer", "mixed-integer-float"):
        whole = [value for value in column.dropna() if isinstance(value, Integral)]
        return _kind_of_numbers(whole, mixed=mixed or inferred != "integer")
    if inferred in ("date", "datetime"):  # "date" even if some are timestamps
        return _kind_of_times([value for value in column.dropna() if isinstance(value, datetime)])
    return inferred if inferred in _POSTGRES else "text"


def _kind_of_numbers(whole: Any, *, mixed: bool) -> str:
    """Return the type that holds all these integers; if `mixed`, fractions too."""
    low, high = (int(min(whole)), int(max(whole))) if len(whole) else (0, 0)
    if mixed:
        return "floating" if low >= -_EXACT and high <= _EXACT else "decimal"
    return "integer" if low >= -(2**63) and high < 2**63 else "decimal"


def _kind_of_times(times: Sequence[datetime]) -> str:
    if not times:
        return "date"
    return "datetimetz" if any(value.tzinfo for value in times) else "datetime"


def _for_postgres(value: Any, kind: int, name: str) -> Any:
    value = _plain(value)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, float) and kind in _WHOLE and value.is_integer():
        return int(value)  # in pandas, a column of integers and gaps has floats
    if isinstance(value, dict) or (isinstance(value, list | tuple) and kind in _TEXTS):
        return json.dumps(value, default=str)
    if kind in _JSON:
        is_number = isinstance(value, int | float | Decimal) and not isinstance(value, bool)
        return value if is_number else json.dumps(value, default=str)
    if kind in _TEXTS or isinstance(value, UUID):
        return str(value)  # as in a CSV file: True, and a UUID with its dashes
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
    return str(value)  # times and decimals, for which SQLite has no types


def _plain(value: Any) -> Any:
    """Convert numpy's value to Python's own."""
    if hasattr(value, "tolist") and type(value).__module__ == "numpy":
        return value.tolist()
    return value
