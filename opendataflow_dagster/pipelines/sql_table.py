"""A table that isn't kept by chunks, in PostgreSQL or SQLite: read, appended to, replaced."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ..chunk import Chunk, Result
from ..errors import DataflowError, Refused
from ..location import JDBC, POSTGRES, SQLITE, Table, is_select
from ..model import Claim
from ..spark.session import is_spark_frame
from ..storage.files import need
from ..storage.table import Rows, is_outage
from ..store.database import named_statements
from ..util.text import first_line, typed
from .csv_on_spark import from_pandas
from .datasets import REPLACE
from .destinations import Confirm, Destination, Parts, as_pandas, one
from .sources import Source
from .spill import Spill, pieces_of
from .sql_types import columns_for, only_once, writable
from .write_errors import Verdict, fault, is_to_blame

if TYPE_CHECKING:
    from pandas import DataFrame as PandasFrame
    from pyspark.sql import DataFrame, SparkSession

Password = Callable[[], str | None]

_TIMESTAMPTZ = 1184
"""The number of that type in PostgreSQL."""


class TableSource(Source):
    """A table, or what a SELECT finds; nothing can be written by it."""

    def __init__(self, table: Table, password: Password) -> None:
        self._rows = WholeTable(table, password)
        self.location = table.location

    def pandas(self) -> "PandasFrame":
        names, rows = self._rows.look()
        # As pandas.read_sql has it: decimals are numbers to reckon with.
        return need("pandas").DataFrame.from_records(rows, columns=names, coerce_float=True)

    def spark(self, spark: "SparkSession") -> "DataFrame":
        if self.by_pandas():
            return from_pandas(spark, self.pandas())
        from ..spark.postgres_read import read_rows

        return read_rows(spark, self._rows.table, password=self._rows.password)

    def by_pandas(self) -> bool:
        table = self._rows.table
        return table.dialect != POSTGRES or is_select(table.name)


class TableDestination(Destination):
    """A table that rows are appended to; or replaced, if its writemode says so."""

    def __init__(self, table: Table, password: Password, mode: str) -> None:
        self._rows = WholeTable(table, password, may_make=True)
        self._items = WholeTable(table, password, may_make=True, items=True)
        self._mode, self.location = mode, table.location

    def replaces(self, *, items: bool = False) -> bool:
        return self._mode == REPLACE

    def publish(self, frame: Any, chunk: Chunk, confirm: Confirm) -> Result:
        # The moments of Spark stay moments where the table has a place.
        moments = self._rows.moments() if is_spark_frame(frame) else ()
        with self.rows(frame, chunk, moments) as rows:
            return one(self._write(self._rows, [(chunk.claim, rows)], confirm))

    def append(self, parts: Parts, confirm: Confirm) -> list[Verdict]:
        made = [(claim, as_pandas(frame)) for claim, frame in parts]
        return self._write(self._items, made, confirm)

    def _write(self, rows: "WholeTable", parts: Parts, confirm: Confirm) -> list[Verdict]:
        return rows.write(parts, confirm, replace=self.replaces())


class WholeTable(Rows):
    """All rows of a table."""

    def __init__(
        self, table: Table, password: Password, *, may_make: bool = False, items: bool = False
    ) -> None:
        if table.dialect == JDBC:
            raise Refused(
                f"{table.datasetid!r} is reached by JDBC, where only chunks are read and written. "
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
        """The columns of PostgreSQL's `timestamptz`."""
        if self.table.dialect != POSTGRES:
            return []
        with self._connected() as connection:
            found = self._columns(connection)
        return [name for name, kind in found.items() if kind == _TIMESTAMPTZ]

    def look(self) -> tuple[list[str], list[tuple]]:
        """The names of the columns, and the rows, by a connection that can't write."""
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
        """Write the rows of each claim, in one transaction; one that can't be written is left out.

        With `replace`, all other rows of the table go, also those of the claims before the last.
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
        """The table's columns; if it isn't there, of the frame that has the most to tell.

        A frame that can't be written itself makes no table, which the others might not fit into.
        """
        if len(frames) > 1 and not self._is_there(connection):
            told = [frame for frame in frames if len(frame.columns)]
            for frame in sorted(told, key=len, reverse=True):
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
            return self._told(error, frame)
        self._execute(connection, "keep")
        return Result(len(frame), location=self.table.location)

    def _told(self, error: Exception, frame: Any) -> DataflowError:
        if isinstance(error, _drivers()):
            return DataflowError(f"{self.table.location}: {first_line(error)}")
        seen = frame.typical() if isinstance(frame, Spill) else frame
        return fault(error, seen, self.table.location)

    def _insert(self, connection: Any, columns: dict[str, int], frame: Any) -> None:
        names = [str(each) for each in frame.columns]
        only_once(names, self.table.dialect)
        known = set(columns) if self.table.dialect == POSTGRES else {c.lower() for c in columns}
        for name in names:
            if (name if self.table.dialect == POSTGRES else name.lower()) not in known:
                raise Refused(
                    f"{self.table.location} has no column {name!r}: it has "
                    f"{', '.join(columns)}. Leave the column out, or add it to the table.",
                    code="NOT_VALIDATED",
                )
        if not names or not len(frame):
            return
        told = ", ".join(map(self._quoted, names))
        if self.table.dialect == POSTGRES:
            kinds = [columns[each] for each in names]
            # Without parameters: nothing takes the second of two % away.
            statement = self._statement("copy", columns=told).replace("%%", "%")
            with connection.cursor().copy(statement) as copy:
                for piece in pieces_of(frame):
                    for row in writable(piece, kinds):
                        copy.write_row(row)
            return
        insert = self._statement("insert", columns=told, values=", ".join("?" * len(names)))
        for piece in pieces_of(frame):
            connection.executemany(insert, writable(piece, None))

    def _made(self, connection: Any, frame: Any) -> dict[str, int]:
        """The table's columns, once it is made as a frame needs it; one without makes nothing."""
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
        """Column → number of its type in PostgreSQL; nothing as long as there is no table."""
        if not self._is_there(connection):
            return {}
        described = self._execute(connection, "columns").description
        return {column[0]: column[1] for column in described}

    def _query(self) -> str:
        if is_select(self.table.name):
            return self.table.name.strip().rstrip(";")
        return self._statement("all").replace("%%", "%")

    def _is_of_the_rows(self, connection: Any, error: Exception) -> bool:
        """Whether the rows are wrong, and not the connection or the database."""
        if not (is_to_blame(error) or isinstance(error, _drivers())) or is_outage(error):
            return False
        if self.table.dialect == POSTGRES:
            return not connection.closed
        return connection.in_transaction

    def _sqlite(self) -> Any:
        """A connection to a file of SQLite; one that is to be written is made if it isn't there."""
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
