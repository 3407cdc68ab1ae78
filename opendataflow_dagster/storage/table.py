"""A chunk of a table, in PostgreSQL or SQLite: read by its bounds, replaced in one transaction."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import date
from typing import Any

from ..errors import DataflowError, Refused, Unreachable
from ..location import POSTGRES, Table
from ..store.database import named_statements
from ..util.text import first_line, typed
from .folder import flat, need

Bounds = tuple[str, str | None, int | None]
"""Lower and upper bound, and modulus, as `odf split` keeps them."""

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")
_PATIENCE = 60.0


class Rows:
    """The rows of a table that are one chunk."""

    _hurried = False
    """Whether a connection is waited for only shortly."""

    def __init__(
        self,
        table: Table,
        dataid: str,
        bounds: Bounds | None = None,
        password: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.table, self.dataid, self.bounds, self._password = table, dataid, bounds, password
        lower, upper, modulus = bounds or (dataid, None, None)
        self._is_value = modulus is None and upper is None
        way = "value" if self._is_value else "range" if modulus is None else "remainder"
        self._known = {"lower": lower, "upper": upper, "modulus": modulus}
        if modulus is not None:
            self._known["lower"] = int(lower)
        self._statements = named_statements(table.dialect, "tables")
        self._names = {
            "table": ".".join(self._quoted(each) for each in (table.schema, table.name) if each),
            "column": self._quoted(table.column),
        }
        self._names["chunk"] = self._statement(way)

    def read(self) -> Any:
        """The rows as a frame."""
        pandas = need("pandas")
        names, rows = self.fetch()
        return pandas.DataFrame.from_records(rows, columns=names)

    def fetch(self) -> tuple[list[str], list[tuple]]:
        """The names of the columns, and the rows."""
        with self._connected() as connection:
            cursor = self._execute(connection, "rows")
            return [column[0] for column in cursor.description], cursor.fetchall()

    def is_there(self) -> bool:
        """Whether the chunk has any row, by a quick look."""
        self._hurried = True
        with self._connected() as connection:
            if self.table.dialect == POSTGRES:
                self._execute(connection, "hurry")
            return bool(self._execute(connection, "some").fetchall())

    def declared(self) -> dict[str, str]:
        """The types that the columns of a table of SQLite are declared with, in capitals."""
        known = {"name": self.table.name, "schema": self.table.schema or "main"}
        with self._connected() as connection:
            found = connection.execute(self._statement("declared"), known).fetchall()
        return {name: type.upper() for name, type in found}

    def replace(self, frame: Any, confirm: Callable[[], None]) -> int:
        """Put the rows of a frame in the place of the chunk's, all or none; how many they are.

        `confirm` raises if the claim isn't ours any more; it is asked before the transaction ends.
        """
        frame = self._whole(flat(frame))
        names = ", ".join(map(self._quoted, frame.columns))
        with self._connected() as connection:
            self._take_turn(connection)
            self._execute(connection, "delete")
            mark = "%s" if self.table.dialect == POSTGRES else "?"
            statement = self._statement(
                "insert", columns=names, values=", ".join([mark] * len(frame.columns))
            )
            connection.cursor().executemany(statement, list(self._values(frame)))
            [(found,)] = self._execute(connection, "count").fetchall()
            if found != len(frame):
                raise strangers(
                    self.table.location,
                    self.table.column,
                    self.dataid,
                    len(frame),
                    found,
                    split=self.split,
                )
            confirm()
            connection.commit()
        return len(frame)

    def _whole(self, frame: Any) -> Any:
        """The frame with the chunk's column added, if the dataid is its value."""
        if self.table.column in frame.columns:
            return frame
        if not self._is_value:
            raise no_split_column(self.table)
        return frame.assign(**{self.table.column: self._known["lower"]})

    def _values(self, frame: Any) -> Iterator[Sequence[Any]]:
        # To a driver, NaN is a number, and NaT and NA are nothing that it knows: only None is NULL.
        plain = frame.astype(object).where(frame.notna(), None)
        rows = plain.itertuples(index=False, name=None)
        return rows if self.table.dialect == POSTGRES else (tuple(map(_of_sqlite, r)) for r in rows)

    def _take_turn(self, connection: Any) -> None:
        # Of two publishes of one chunk, each would delete only the rows that it sees, and both
        # would insert. So they take turns by a lock of the table and the dataid; other chunks don't
        # wait.
        if self.table.dialect == POSTGRES:
            self._execute(connection, "patience")
            key = f"{self._names['table']}\n{self.dataid}"
            connection.execute(self._statement("turn"), {"key": key})
        elif self._execute(connection, "is_ours").fetchall():
            raise Unreachable(
                f"{self.table.database} has the tables of OpenDataFlow itself, which the claim "
                "needs while the data is written. Put the data into another file."
            )
        else:
            self._execute(connection, "turn")

    @property
    def split(self) -> str:
        """The command that splits the table by ranges, unless it is split."""
        return split_command(self.table.datasetid, self.dataid) if self.bounds is None else ""

    def _execute(self, connection: Any, name: str) -> Any:
        with self._finding():
            return connection.execute(self._statement(name), self._known)

    @contextmanager
    def _finding(self) -> Iterator[None]:
        """Refuse a dataid that its column can't have; no other value is in the statement."""
        import psycopg

        try:
            yield
        except psycopg.DataError as error:
            if self.bounds is not None:
                raise
            raise not_split(self.table, self.dataid, first_line(error)) from error

    def _statement(self, name: str, **names: str) -> str:
        text = self._statements[name].partition("\n")[2]
        if self.table.dialect == POSTGRES:
            text = _PARAMETER.sub(r"%(\1)s", text.replace("%", "%%"))
        return text.format(**self._names, **names) if name != "turn" else text

    def _quoted(self, name: str) -> str:
        quoted = '"' + name.replace('"', '""') + '"'
        return quoted.replace("%", "%%") if self.table.dialect == POSTGRES else quoted

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """A connection for one transaction, which is rolled back unless it is committed."""
        import sqlite3

        import psycopg

        connect = self._postgres if self.table.dialect == POSTGRES else self._sqlite
        try:
            connection = connect()
        except (psycopg.Error, sqlite3.Error) as error:
            raise Unreachable(
                f"{self.table.datasetid!r} is registered at {self.table.location}, which can't be "
                f"opened: {first_line(error)}. Run: odf dataset list"
            ) from None
        with self._telling(), closing(connection):
            yield connection

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Say in a line what the database refuses, and where."""
        import sqlite3

        import psycopg

        try:
            yield
        except (psycopg.Error, sqlite3.Error) as error:
            kind = Unreachable if is_outage(error) else DataflowError
            raise kind(f"{self.table.location}: {first_line(error)}") from error

    def _postgres(self) -> Any:
        import psycopg

        host, _, port = self.table.host.partition(":")
        told = {"host": host, "port": port, "dbname": self.table.database, "user": self.table.user}
        given: Any = {name: value for name, value in told.items() if value}
        # Behind a pooler, what is prepared stays with a session that is another client's next.
        return psycopg.connect(
            **given,
            password=self._password(),
            connect_timeout=2 if self._hurried else 10,
            prepare_threshold=None,
        )

    def _sqlite(self) -> Any:
        import sqlite3

        table = self.table
        if not os.path.isfile(table.database):  # it would be made, empty
            raise Unreachable(
                f"{table.datasetid!r} is registered at {table.location}, but there is no file "
                f"{table.database}. Run: odf dataset add {typed(table.datasetid)} --database FILE"
            )
        patience = 2.0 if self._hurried else _PATIENCE
        return sqlite3.connect(table.database, timeout=patience, isolation_level=None)


def _of_sqlite(value: Any) -> Any:
    """A value as SQLite can keep it: times and decimals as texts."""
    if hasattr(value, "isoformat") or type(value).__name__ == "Decimal":
        return str(value)
    return value


def strangers(
    where: str, column: str, dataid: str, rows: int, found: int, *, split: str = ""
) -> Refused:
    """What refuses rows of other chunks: so many of them are the chunk's, by its column.

    `split` is the command for a table that isn't split: a chunk of it may be meant as a range.
    """
    more = f"; if the chunk is a range, run: {split}" if split else "."
    return Refused(
        f"Only {found} of {rows} rows for {where} have a {column!r} of chunk {dataid!r}. Return "
        f"rows of this chunk only{more}",
        code="NOT_VALIDATED",
    )


def no_split_column(table: Table) -> Refused:
    """What refuses rows that don't tell which chunk of a split table they are of."""
    return Refused(
        f"The rows for {table.location} have no column {table.column!r}, which splits the table "
        "into chunks. Return that column too.",
        code="NOT_VALIDATED",
    )


def not_split(table: Table, dataid: str, why: str) -> Refused:
    """What refuses a dataid that no row can have in the column, of a table that isn't split."""
    return Refused(
        f"{table.location} isn't split, so chunk {dataid!r} has the rows whose {table.column!r} "
        f"has that value, and no row can have it ({why}). "
        f"Run: {split_command(table.datasetid, dataid)}",
        code="INVALID_LOCATION",
    )


def split_command(datasetid: str, dataid: str) -> str:
    """Return the command that registers this dataid as a range of a table, if it is known."""
    try:
        period = {4: "year", 7: "month"}[len(dataid)]
        first = date.fromisoformat(dataid + "-01-01"[len(dataid) - 4 :])
    except (KeyError, ValueError):
        return "odf split --help"
    return f"odf split {typed(datasetid)} --pending --by {period} --from {first} --to {first}"


# Which errors of a database tell that it can't be used now, and which are about the rows.


_AWAY = ("08", "25006", "40", "42501", "53", "55", "57P", "58")
"""How PostgreSQL's codes begin: connection, standby, races, rights, space, locks, stop, disk."""

_ROWS = (1, 18, 19, 20, 25)
"""SQLite's codes for what is said or given: a statement, a size, a constraint, a type, a range."""


def is_outage(error: BaseException) -> bool:
    """Whether a driver's error would meet any rows, so that trying again later may help."""
    import sqlite3

    import psycopg

    if isinstance(error, sqlite3.Error):
        code = getattr(error, "sqlite_errorcode", None)  # the module's own errors have none
        return code is not None and code & 0xFF not in _ROWS
    if not isinstance(error, psycopg.Error):
        return False
    state = error.sqlstate
    if state is None:
        return isinstance(error, psycopg.OperationalError)
    return state.startswith(_AWAY)
