"""Reads a chunk of a PostgreSQL table as a DataFrame, by Arrow and without a Java driver."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ..errors import WrongUse
from ..location import Table
from ..storage.table import Bounds
from .postgres import Login, Password, PostgresRows, linked, snapshot_statements
from .types import Column, fitted, frame_schema

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

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
    """The rows of a chunk of a table, or of all of it, read in parallel parts.

    Several parts see the same moment within `looking()`. Outside of it a chunk is read in one
    part, which is one moment too, unless `parts` says otherwise.
    """
    if parts is not None and parts < 1:
        raise WrongUse(f"There are no {parts} parts. Say 1 or more.")
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
    """Let all that is read within be of one moment for each database, also in several parts.

    The moment is held by a connection of its own until the end, which is when results have to be
    there.
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
    """A connection to ask by, and the name of the moment that it holds, if it does."""
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
    """A query for each part; together they have every row once."""
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
        column = next(each for each in columns if each.name == rows.table.column)
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
    """The bounds of a range and what cuts it into parts, if its type can be reckoned with."""
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
