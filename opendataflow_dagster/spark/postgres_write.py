"""Writes a DataFrame as a chunk of a PostgreSQL table, through a staging table."""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import DataflowError, Refused
from ..location import Table
from ..storage.table import Bounds, strangers
from . import types
from .postgres import ROWS_PER_PART, Login, Password, PostgresRows, linked, read_rows
from .types import SAME_TYPES, TEXT, Column, refuse_losses

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType

STAGE_PREFIX = "odf_stage"
PARTS_SUFFIX = "_parts"
"""The suffix of the table that lists the complete parts of a staging table."""

_STAGED_TYPES = {
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
_WHOLE_TYPES = ("int2", "int4", "int8", "oid")
_FRACTIONS = ("float4", "float8", "numeric")
_DRIVER_HAS_NO_ARRAY_OF = ("numeric", "int2")
_JSON = ("json", "jsonb")


class ColumnLoad(NamedTuple):
    """How a column of a frame gets into a column of a table."""

    target: Column
    expression: str
    """Spark's expression for the column `{}` to transfer."""
    type: str
    """The type of the staging table's column."""
    cast: str | None
    """The type to cast it to for the table, unless PostgreSQL does it implicitly."""
    back: str
    """The expression that restores the frame's column from the staging table's."""
    lost: str | None
    """The condition for a value that the table would change, if that can happen."""
    frame_type: str
    """The type in the frame."""


class StagedRows:
    """A chunk in a staging table beside its table.

    Tasks can't share a transaction, and a repeated task would append its rows twice. So each task
    commits its part to a table that nobody reads, together with a mark that the part is there.
    One statement of the driver then moves all rows, in the transaction that confirms the claim.
    """

    def __init__(
        self, rows: PostgresRows, dataid: str, name: str, ways: Sequence[ColumnLoad], schema: str
    ) -> None:
        self._rows, self._dataid, self._ways, self._schema = rows, dataid, ways, schema
        self.name, self.rows = name, 0
        self._spark: SparkSession | None = None

    @classmethod
    def write(
        cls,
        df: "DataFrame",
        table: Table,
        dataid: str,
        bounds: Bounds | None,
        password: Password | None,
        generation: int,
        parts: int | None = None,
    ) -> "StagedRows":
        """Load a frame into a new staging table in the table's schema, one task per part."""
        rows = PostgresRows(table, dataid, bounds, password)
        marks = blake2b(f"{rows.name}\n{dataid}".encode(), digest_size=4).hexdigest()
        name = f"{STAGE_PREFIX}_{generation}_{marks}_{os.urandom(4).hex()}"
        with rows.connected() as connection:
            ways = _column_loads(rows, df, rows.columns(connection))
            rows.find(connection)
            schema = rows.layout(connection).schema
            staged = cls(rows, dataid, name, list(ways.values()), schema)
            left = [
                stage
                for stage, older in _staging_tables(rows, connection)
                if older < generation and stage.split("_")[3] == marks
            ]
            staged._create(connection)
            connection.commit()
        for stage in left:
            with suppress(DataflowError):  # a zombie is working in it: `odf clean` finds it later
                _drop(rows, schema, [stage], "hurry")
        try:
            staged._fill(df if parts is None else df.coalesce(parts), list(ways))
            staged._verify()
        except BaseException:
            staged.discard()
            raise
        return staged

    def show(self, confirm: Callable[[], None]) -> int:
        """Replace the chunk's rows, all or none; return the number of new rows.

        `confirm` raises if the claim is lost; it is called before the commit.
        """
        rows, table = self._rows, self._rows.table
        with rows.connected() as connection:
            rows.take_turn(connection)
            rows.run(connection, "delete")
            moved = rows.change(connection, "move", self._names() | self._moves())
            if moved != self.rows:
                raise DataflowError(
                    f"{self.rows} rows were loaded for chunk {self._dataid!r} of {table.location}, "
                    f"but {moved} are in the staging table {self.name}. Run the chunk again."
                )
            [(found,)] = rows.run(connection, "count")
            self._refuse_others(moved, found)
            rows.run(connection, "unstage", self._names())
            # As late as possible: a worker that lost its claim must not commit over its successor.
            confirm()
            connection.commit()
        return moved

    def discard(self) -> None:
        """Remove the staging table, if it still exists."""
        with suppress(DataflowError):  # if the database is away, `odf clean` finds it
            _drop(self._rows, self._schema, [self.name])

    def frame(self) -> "DataFrame":
        """Return the rows as they were loaded, with the columns and types of the frame."""
        assert self._spark is not None
        stage = self._rows.table._replace(schema=self._schema, name=self.name)
        parts = max(1, round(self.rows / ROWS_PER_PART))
        loaded = read_rows(self._spark, stage, password=self._rows.password, parts=parts)
        back = loaded.selectExpr(
            *(f"{way.back.format(f'c{at}')} as c{at}" for at, way in enumerate(self._ways))
        )
        return back.toDF(*(way.target.name for way in self._ways))

    def _verify(self) -> None:
        """Refuse values that the table would change, before anything of the chunk is shown."""
        rows, names = self._rows, self._names()
        ways = [(f"c{at}", way) for at, way in enumerate(self._ways)]
        lossy = [(name, way) for name, way in ways if way.lost]
        with rows.connected() as connection:
            for name, way in ways:
                if way.target.name == rows.table.column:
                    value = f"{name}::{way.cast or way.target.type}"
                    result = rows.run(connection, "members", names | {"value": value})
                    self._refuse_others(*result[0])
            if lossy:
                counts = [
                    rows.spell("loss", lost=(way.lost or "").format(name)) for name, way in lossy
                ]
                result = rows.run(connection, "losses", names | {"counts": ", ".join(counts)})
                refuse_losses(
                    rows.table,
                    self._dataid,
                    self.rows,
                    [
                        (way.target.name, way.frame_type, way.target.full, count)
                        for (_, way), count in zip(lossy, result[0], strict=True)
                    ],
                )

    def _refuse_others(self, rows: int, found: int) -> None:
        table = self._rows.table
        if found != rows:
            raise strangers(
                table.location, table.column, self._dataid, rows, found, split=self._rows.split
            )

    def _names(self) -> dict[str, str]:
        return _names(self._rows, self._schema, self.name)

    def _moves(self) -> dict[str, str]:
        """Return what goes where, in the last step."""
        rows = self._rows
        into = [rows.quoted(way.target.name) for way in self._ways]
        values = [
            f"c{at}::{way.cast}" if way.cast else f"c{at}" for at, way in enumerate(self._ways)
        ]
        if rows.table.column not in [way.target.name for way in self._ways]:
            into.append(rows.quoted(rows.table.column))
            values.append(rows.spell("the_value"))
        return {"columns": ", ".join(into), "values": ", ".join(values)}

    def _create(self, connection: Any) -> None:
        rows, names = self._rows, self._names()
        columns = ", ".join(f"c{at} {way.type}" for at, way in enumerate(self._ways))
        rows.run(connection, "stage", names | {"columns": columns})
        rows.run(connection, "stage_parts", names)
        text = rows.spelled(connection, "stage_note", names, note=_note(rows.name))
        connection.execute(text.encode())

    def _fill(self, df: "DataFrame", order: Sequence[int]) -> None:
        from pyspark.sql.types import LongType, StructType

        self._spark = df.sparkSession
        # Columns by number, since names may differ in case alone or have any character.
        numbered = df.toDF(*(f"f{at}" for at in range(len(df.columns))))
        sent = numbered.selectExpr(
            *(
                f"{way.expression.format(f'f{at}')} as c{number}"
                for number, (at, way) in enumerate(zip(order, self._ways, strict=True))
            )
        )
        names = self._names()
        load = _loader(
            self._rows.login(),
            self._schema,
            self.name,
            self._rows.plain("part_done", **names),
            self._rows.plain("part_rows", **names),
        )
        done = sent.mapInArrow(load, StructType().add("rows", LongType())).collect()
        self.rows = sum(count for (count,) in done)


def leftovers(table: Table, password: Password | None) -> list[tuple[str, int]]:
    """Return the staging tables beside a table, each with its generation."""
    rows = PostgresRows(table, None, None, password)
    with rows.connected() as connection:
        return _staging_tables(rows, connection)


def _staging_tables(rows: PostgresRows, connection: Any) -> list[tuple[str, int]]:
    found = rows.run(connection, "leftovers", name=rows.name, note=_note(rows.name))
    return [(name, int(name.split("_")[2])) for (name,) in found]


def drop(table: Table, password: Password | None, names: Sequence[str]) -> None:
    """Remove staging tables."""
    rows = PostgresRows(table, None, None, password)
    with rows.connected() as connection:
        schema = rows.layout(connection).schema
    _drop(rows, schema, names)


def _drop(
    rows: PostgresRows, schema: str, names: Sequence[str], patience: str = "patience"
) -> None:
    with rows.connected() as connection:
        rows.run(connection, patience)
        for name in names:
            if not name.startswith(STAGE_PREFIX + "_"):
                raise DataflowError(f"{name!r} isn't a staging table.")
            rows.run(connection, "unstage", _names(rows, schema, name))
        connection.commit()


def _names(rows: PostgresRows, schema: str, name: str) -> dict[str, str]:
    above = rows.quoted(schema)
    return {
        "stage": f"{above}.{rows.quoted(name)}",
        "parts": f"{above}.{rows.quoted(name + PARTS_SUFFIX)}",
    }


def _note(name: str) -> str:
    return json.dumps({"odf": "staging", "table": name})


def _column_loads(
    rows: PostgresRows, df: "DataFrame", columns: Sequence[Column]
) -> dict[int, ColumnLoad]:
    """Return how each column of a frame gets into the table, by its number in the frame."""
    known = {column.name: column for column in columns}
    table, present = rows.table, [field.name for field in df.schema]
    wrong = [f"the table has no column {name!r}" for name in present if name not in known]
    wrong += [
        f"{name!r} occurs {present.count(name)} times"
        for name in dict.fromkeys(present)
        if present.count(name) > 1
    ]
    wrong += [
        f"{name!r} is required but missing"
        for name, column in known.items()
        if column.needed and name not in present and name != table.column
    ]
    if table.column not in present and not rows.is_value:
        wrong.append(f"{table.column!r} is missing, which the table is split by")
    found: dict[int, ColumnLoad] = {}
    for at, field in enumerate(df.schema):
        target = known.get(field.name)
        if target is None or target.generated:
            continue
        way = column_load(field.name, field.dataType, target)
        if isinstance(way, str):
            wrong.append(way)
        else:
            found[at] = way
    if wrong:
        raise Refused(
            f"The frame doesn't fit the table {table.location}: {'; '.join(wrong)}. Select and "
            "cast its columns to the table's.",
            code="NOT_VALIDATED",
        )
    return found


def _loader(
    login: Login, schema: str, table: str, done: str, known: str
) -> Callable[[Iterator["pyarrow.RecordBatch"]], Iterator["pyarrow.RecordBatch"]]:
    """Return what a task does with its part: load it once, however often the task is tried."""

    def load(batches: Iterator["pyarrow.RecordBatch"]) -> Iterator["pyarrow.RecordBatch"]:
        import pyarrow
        from pyspark import TaskContext

        context = TaskContext.get()
        part = context.partitionId() if context else 0
        first = next(batches, None)
        if first is None:
            return
        with linked(login) as link:
            reader = pyarrow.RecordBatchReader.from_batches(first.schema, chain([first], batches))
            rows = link.load(schema, table, reader)
            rows = link.settle(done.format(part=part, rows=rows), known.format(part=part), rows)
        yield pyarrow.record_batch({"rows": [rows]})

    return load


# --- how a column of a frame gets into a column of the table ---


def column_load(name: str, type: "DataType", target: Column) -> ColumnLoad | str:
    """Return how to load a column, or why that is impossible."""
    frame_type, kind = type.simpleString(), _kind(type)
    natural = _STAGED_TYPES.get(kind)
    scale: int | None = getattr(type, "scale", None)

    def way(
        expression: str, staged: str, cast: str | None, back: str = "", lost: str | None = None
    ) -> ColumnLoad:
        return ColumnLoad(
            target,
            expression,
            staged,
            cast,
            back or f"cast({{}} as {frame_type})",
            lost,
            frame_type,
        )

    if kind == "variant" and target.base in _JSON:
        return way("to_json({})", TEXT, target.type, "parse_json({})")
    if kind in ("array", "map", "struct") and target.base in _JSON:
        schema = frame_type.replace("'", "\\'").replace("{", "{{").replace("}", "}}")
        return way("to_json({})", TEXT, target.type, f"from_json({{}}, '{schema}')")
    if kind == "array" and target.is_array:
        element = getattr(type, "elementType")  # noqa: B009
        natural = _STAGED_TYPES.get(_kind(element))
        if natural is not None:
            lost = types.array_loss(natural, getattr(element, "scale", None), target)
            if natural == target.element and natural not in _DRIVER_HAS_NO_ARRAY_OF:
                return way("{}", f"{natural}[]", None, lost=lost)
            return way("cast({} as array<string>)", "text[]", target.type, lost=lost)
    elif kind in ("void", "time") or "interval" in kind or natural == TEXT:
        lost = types.text_loss(target)
        return way(
            "cast({} as string)", TEXT, None if target.base in _TEXTS else target.type, lost=lost
        )
    elif {natural, target.base} == {"timestamp", "timestamptz"}:
        # With the zone of Spark's session: the server would use its own.
        lost = types.value_loss(target.base, None, target)
        return way(f"cast({{}} as {SAME_TYPES[target.base]})", target.base, None, lost=lost)
    elif natural is not None and _is_kept(natural, target):
        staged = frame_type.replace("decimal", "numeric") if natural == "numeric" else natural
        # PostgreSQL's own cast keeps 15 digits of a double; its text has all of them.
        cast = "text::numeric" if (natural[:5], target.base) == ("float", "numeric") else None
        expression = "cast({} as smallint)" if kind == "tinyint" else "{}"
        lost = types.value_loss(natural, scale, target)
        return way(expression, staged, cast, lost=lost)
    return f"{name!r} is {frame_type} in the frame but {target.type} in the table"


def _is_kept(natural: str, target: Column) -> bool:
    """Whether PostgreSQL casts values of a type to a column's type implicitly.

    `lossless` finds values of the frame that it would round.
    """
    base = target.base
    if natural == base or base in _TEXTS:
        return True
    if base in _WHOLE_TYPES:
        return natural in _WHOLE_TYPES  # a number that is too large is an error
    return base in _FRACTIONS and natural in (*_WHOLE_TYPES, *_FRACTIONS)


def _kind(type: "DataType") -> str:
    """Return the name of a type without its parameters."""
    kind = re.split(r"[(<]", type.simpleString())[0]
    return "string" if kind in ("varchar", "char") else kind
