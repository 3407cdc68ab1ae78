"""Connections to PostgreSQL, and reading a chunk of a table as a DataFrame, without a Java driver.

The driver has one connection for queries; each task has one for Arrow data.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DataflowError, Refused, WrongUse
from ..location import Table
from ..storage.table import Bounds, Rows
from ..store.database import named_statements
from .session import mask_logs
from .types import Column, fitted, frame_schema

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession


Password = Callable[[], str | None]


class Login:
    """The credentials of a database: tasks receive them pickled, and nothing prints them."""

    __slots__ = ("_conninfo",)

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo

    def __repr__(self) -> str:
        return "Login(…)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Login) and other._conninfo == self._conninfo

    def __hash__(self) -> int:
        return hash(self._conninfo)

    def reveal(self) -> str:
        """Return the connection string, including the password."""
        return self._conninfo


class Layout(NamedTuple):
    """How a table is stored in its database."""

    kind: str
    schema: str
    blocks: int
    indexed: bool
    foreign: bool


class PostgresRows(Rows):
    """The rows of a table that are one chunk, or all of them."""

    def __init__(
        self, table: Table, dataid: str | None, bounds: Bounds | None, password: Password | None
    ) -> None:
        super().__init__(table, dataid or "", bounds, password or (lambda: None))
        self._statements = self._statements | named_statements(table.dialect, "spark")

    @property
    def is_value(self) -> bool:
        return self._is_value

    @property
    def is_range(self) -> bool:
        return not self._is_value and self._known["modulus"] is None

    @property
    def name(self) -> str:
        """The table's name, quoted."""
        return self._names["table"].replace("%%", "%")

    def columns(self, connection: Any) -> list[Column]:
        """Return the columns of the table; raise a refusal if there is no table."""
        found = self.run(connection, "columns", name=self.name)
        if not found:
            raise Refused(
                f"There is no table {self.table.location}. Create it, or list what is registered: "
                "odf dataset list",
                code="INVALID_LOCATION",
            )
        return [Column(*row) for row in found]

    def layout(self, connection: Any) -> Layout:
        rows = self.run(connection, "layout", name=self.name, column=self.table.column)
        return Layout(*rows[0])

    def run(
        self, connection: Any, statement: str, names: dict[str, str] | None = None, **params: Any
    ) -> list[tuple]:
        """Run a statement; return its rows, if it has any."""
        text = self._statement(statement, **(names or {}))
        cursor = connection.execute(text, self._known | params)
        return cursor.fetchall() if cursor.description else []

    def find(self, connection: Any) -> int:
        """Return how many rows the planner expects in the chunk; refuse one that can't have any."""
        with self._finding():
            [(plan,)] = self.run(connection, "expected_of_chunk")
        return plan[0]["Plan"]["Plan Rows"]

    def spelled(self, connection: Any, statement: str, names: dict[str, str], **params: Any) -> str:
        """Return a statement with its values quoted in it, for connections without parameters."""
        from psycopg import ClientCursor

        text = self._statement(statement, **names)
        return ClientCursor(connection).mogrify(text.encode(), self._known | params)

    def spell(self, statement: str, **names: Any) -> str:
        """Return a piece of a statement with these names in it."""
        return self._statement(statement, **names)

    def plain(self, statement: str, **names: Any) -> str:
        """Return the same without parameters; the task fills in `{part}` and `{rows}`."""
        left = {"part": "{part}", "rows": "{rows}"}
        escaped = {
            name: value.replace("{", "{{").replace("}", "}}") for name, value in names.items()
        }
        return self._statement(statement, **(escaped | left)).replace("%%", "%")

    def change(self, connection: Any, statement: str, names: dict[str, str]) -> int:
        """Run a statement that writes; return how many rows it wrote."""
        return connection.execute(self._statement(statement, **names), self._known).rowcount

    def quoted(self, name: str) -> str:
        """Quote a name for a statement."""
        return self._quoted(name)

    @property
    def password(self) -> Password:
        return self._password

    @property
    def edges(self) -> tuple[Any, Any]:
        """Return the bounds of a range."""
        return self._known["lower"], self._known["upper"]

    def connected(self) -> Any:
        """Open a connection for one transaction, which is rolled back unless it is committed."""
        return self._connected()

    def open(self) -> Any:
        """Open a connection that the caller closes."""
        return self._postgres()

    def telling(self) -> AbstractContextManager[None]:
        """Report in a line what the database refuses."""
        return self._telling()

    def take_turn(self, connection: Any) -> None:
        self._take_turn(connection)

    def login(self) -> Login:
        """Return what a task needs to connect, including the password."""
        from psycopg.conninfo import make_conninfo

        mask_logs()  # the password goes into the function that the tasks run
        host, _, port = self.table.host.partition(":")
        table = self.table
        parts = {"host": host, "port": port, "dbname": table.database, "user": table.user}
        given: Any = {name: value for name, value in parts.items() if value}
        return Login(
            make_conninfo(
                **given,
                password=self._password(),
                connect_timeout=10,
                client_encoding="UTF8",
                application_name="odf",
            )
        )


@contextmanager
def linked(login: Login) -> Iterator["Link"]:
    """Yield a task's connection, in a transaction that is rolled back unless it is committed."""
    import adbc_driver_manager

    try:
        try:
            connection = adbc_driver_manager.AdbcConnection(_database(login))
        except adbc_driver_manager.Error:
            _database.cache_clear()  # the server may have restarted since
            connection = adbc_driver_manager.AdbcConnection(_database(login))
        with connection:
            connection.set_autocommit(False)
            yield Link(connection)
    except adbc_driver_manager.Error as error:
        raise DataflowError(_tidy(error)) from None


class Link:
    """What tasks do with a connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def batches(self, query: str) -> Iterator["pyarrow.RecordBatch"]:
        """Yield the rows of a query, by COPY, in batches."""
        import adbc_driver_manager
        import pyarrow

        with adbc_driver_manager.AdbcStatement(self._connection) as statement:
            statement.set_sql_query(query)
            stream, _ = statement.execute_query()
            with pyarrow.RecordBatchReader._import_from_c(stream.address) as reader:
                yield from reader

    def run(self, statement: str) -> None:
        import adbc_driver_manager

        with adbc_driver_manager.AdbcStatement(self._connection) as made:
            made.set_sql_query(statement)
            made.execute_update()

    def load(self, schema: str, table: str, reader: "pyarrow.RecordBatchReader") -> int:
        """Append a reader's rows to a table, by COPY; return how many rows that were."""
        import adbc_driver_manager

        with adbc_driver_manager.AdbcStatement(self._connection) as statement:
            statement.set_options(
                **{
                    "adbc.ingest.target_table": table,
                    "adbc.ingest.target_db_schema": schema,
                    "adbc.ingest.mode": "adbc.ingest.mode.append",
                }
            )
            handle = adbc_driver_manager.ArrowArrayStreamHandle()
            reader._export_to_c(handle.address)
            statement.bind_stream(handle)
            return statement.execute_update()

    def settle(self, done: str, known: str, rows: int) -> int:
        """Commit, and mark the part as complete; if another try already did, return its rows."""
        import adbc_driver_manager

        try:
            self.run(done)
            self._connection.commit()
        except adbc_driver_manager.IntegrityError:
            self._connection.rollback()
            [batch] = self.batches(known)
            [rows] = batch.column(0).to_pylist()
        return rows


# On opening a database, the driver reads all of its types: once per process is enough.
@lru_cache(maxsize=4)
def _database(login: Login) -> Any:
    """Return what the driver reads of a database once: its types. No connection stays open."""
    import adbc_driver_postgresql

    return adbc_driver_postgresql.connect(login.reveal())


def _tidy(error: BaseException) -> str:
    """Return the driver's message, in a line, without the operation."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = next((line for line in lines if "ERROR:" in line or "FATAL:" in line), lines[0])
    message = re.sub(r"^.*?(?:ERROR|FATAL):\s*", "", message)
    more = [line for line in lines if line.startswith(("CONTEXT:", "DETAIL:"))]
    return "; ".join([message, *more[:1]])


def snapshot_statements(rows: PostgresRows, snapshot: str | None) -> list[str]:
    """Return what a task runs first, so that it sees the same snapshot as the others."""
    if snapshot is None:
        return []
    if not re.fullmatch(r"[0-9A-Fa-f-]+", snapshot):
        raise DataflowError(f"PostgreSQL returned an invalid snapshot name: {snapshot!r}.")
    return [rows.spell("look_begin"), rows.spell("look_as", snapshot=snapshot)]


ROWS_PER_PART, MAX_PARTS = 250_000, 16

_snapshots: ContextVar[dict[Any, Any] | None] = ContextVar("looks", default=None)


def read_rows(
    spark: "SparkSession",
    table: Table,
    dataid: str | None = None,
    bounds: Bounds | None = None,
    password: Password | None = None,
    *,
    parts: int | None = None,
) -> "DataFrame":
    """Return the rows of a chunk of a table, or of all of it, read in parallel parts.

    Within `looking()`, all parts see the same snapshot. Outside of it, a chunk is read in one part,
    which is one snapshot, too, unless `parts` says otherwise.
    """
    if parts is not None and parts < 1:
        raise WrongUse(f"`parts` is {parts}. Give 1 or more.")
    rows = PostgresRows(table, dataid, bounds, password)
    with _connection_for(rows) as (connection, snapshot):
        columns = rows.columns(connection)
        alone = snapshot is None and dataid is not None and parts is None
        queries = _queries(rows, connection, columns, dataid is None, 1 if alone else parts)
        first = snapshot_statements(rows, snapshot)
    schema = frame_schema({column.name: column.spark_type for column in columns})
    count = len(queries)
    return spark.range(0, count, 1, count).mapInArrow(
        _reader(rows.login(), first, queries, schema), schema
    )


@contextmanager
def looking() -> Iterator[None]:
    """Read everything in this block from one snapshot per database, even in several parts.

    A connection holds the snapshot until the block ends; by then, results must be
    computed.
    """
    held: dict[Any, Any] = {}
    token = _snapshots.set(held)
    try:
        yield
    finally:
        _snapshots.reset(token)
        for connection, _ in held.values():
            connection.close()


@contextmanager
def _connection_for(rows: PostgresRows) -> Iterator[tuple[Any, str | None]]:
    """Yield a connection for queries, and the name of the snapshot that it holds, if any."""
    held, table = _snapshots.get(), rows.table
    if held is None:
        with rows.connected() as connection:
            yield connection, None
        return
    key = table.host, table.database, table.user
    if key not in held:
        connection = rows.open()
        held[key] = connection, None
        rows.run(connection, "look_begin")
        [(snapshot,)] = rows.run(connection, "snapshot")
        held[key] = connection, snapshot
    with rows.telling():
        yield held[key]


def _queries(
    rows: PostgresRows, connection: Any, columns: Sequence[Column], whole: bool, parts: int | None
) -> list[str]:
    """Return a query for each part; together, they return every row once."""
    selected = ", ".join(_selected(rows, column) for column in columns)
    statement = "part_of_all" if whole else "part_of_chunk"

    def query(part: str = "true", **params: Any) -> str:
        return rows.spelled(connection, statement, {"columns": selected, "part": part}, **params)

    expected = None if whole else rows.find(connection)
    layout = rows.layout(connection)
    if layout.kind not in ("r", "m", "p") or layout.foreign or parts == 1:
        return [query()]
    if parts is None:
        if expected is None:
            [(plan,)] = rows.run(connection, "expected_of_all")
            expected = plan[0]["Plan"]["Plan Rows"]
        parts = min(MAX_PARTS, max(1, round(expected / ROWS_PER_PART)))
    if parts == 1:
        return [query()]
    if not whole and layout.indexed:
        column = next(candidate for candidate in columns if candidate.name == rows.table.column)
        if rows.is_range and (cuts := _cuts(rows, connection, column, parts)):
            return [
                query(rows.spell("between"), first=first, last=last)
                for first, last in pairwise(cuts)
            ]
        shares = (rows.spell("share", parts=parts, part=part) for part in range(parts))
        return [query(share) for share in shares]
    step = max(1, -(-layout.blocks // parts))
    starts = range(0, max(layout.blocks, 1), step)
    return [
        query(rows.spell("blocks", first=start, last=start + step))
        if start + step < layout.blocks
        else query(rows.spell("last_blocks", first=start))
        for start in starts
    ]


def _cuts(rows: PostgresRows, connection: Any, column: Column, parts: int) -> list[str] | None:
    """Return the bounds of a range and the cuts between parts, if its type is numeric or a time."""
    whole = column.base in ("int2", "int4", "int8")
    if not whole and column.base not in ("numeric", "date", "timestamp", "timestamptz"):
        return None
    names = {"type": column.type, "wide": "::numeric" if whole else ""}
    found = rows.run(connection, "cuts", names, parts=parts)
    lower, upper = rows.edges
    return [lower, *dict.fromkeys(cut for cut, _ in found), upper]


def _selected(rows: PostgresRows, column: Column) -> str:
    name = rows.quoted(column.name)
    if column.is_array:
        kind = column.travels() or column.type
        name = rows.spell("no_dimensions", value=name, type=column.type)
        return f"({name})::{kind} as {rows.quoted(column.name)}"
    return f"{name}::{kind} as {name}" if (kind := column.travels()) else name


def _reader(
    login: Login, first: list[str], queries: list[str], schema: Any
) -> Callable[[Iterator["pyarrow.RecordBatch"]], Iterator["pyarrow.RecordBatch"]]:
    def postgres(parts: Iterator["pyarrow.RecordBatch"]) -> Iterator["pyarrow.RecordBatch"]:
        from pyspark.sql.pandas.types import to_arrow_schema

        expected = to_arrow_schema(schema, timezone="UTC")
        for batch in parts:
            for part in batch.column(0).to_pylist():
                with linked(login) as link:
                    for statement in first:
                        link.run(statement)
                    for found in link.batches(queries[part]):
                        yield fitted(found, expected)

    return postgres
