"""A DataFrame on its way to be a chunk of a table of PostgreSQL: through a staging table."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..errors import DataflowError, Refused
from ..location import Table
from ..storage.table import Bounds, strangers
from .postgres import Login, Password, PostgresRows, linked
from .postgres_read import ROWS_OF_A_PART, read_rows
from .table_loss import refuse_losses
from .types import Column, Loaded, loaded

if TYPE_CHECKING:
    import pyarrow
    from pyspark.sql import DataFrame, SparkSession

STAGE = "odf_stage"
PARTS = "_parts"
"""What the name of the table has at its end that tells which parts of a staging table are whole."""


class StagedRows:
    """A chunk in its staging table, which is as fast to fill as nobody reads it."""

    def __init__(
        self, rows: PostgresRows, dataid: str, name: str, ways: Sequence[Loaded], schema: str
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
        """Load a frame into a new staging table in the table's schema, a task for each part."""
        rows = PostgresRows(table, dataid, bounds, password)
        marks = blake2b(f"{rows.name}\n{dataid}".encode(), digest_size=4).hexdigest()
        name = f"{STAGE}_{generation}_{marks}_{os.urandom(4).hex()}"
        with rows.connected() as connection:
            ways = _ways(rows, df, rows.columns(connection))
            rows.find(connection)
            schema = rows.layout(connection).schema
            made = cls(rows, dataid, name, list(ways.values()), schema)
            left = [
                each
                for each, older in _found(rows, connection)
                if older < generation and each.split("_")[3] == marks
            ]
            made._create(connection)
            connection.commit()
        for each in left:
            with suppress(DataflowError):  # a zombie is at work in it: `odf clean` finds it later
                _drop(rows, schema, [each], "hurry")
        try:
            made._fill(df if parts is None else df.coalesce(parts), list(ways))
            made._verify()
        except BaseException:
            made.discard()
            raise
        return made

    def show(self, confirm: Callable[[], None]) -> int:
        """Put the rows in the place of the chunk's, all or none; how many they are.

        `confirm` raises if the claim isn't ours any more; it is asked before the transaction ends.
        """
        rows, table = self._rows, self._rows.table
        with rows.connected() as connection:
            rows.take_turn(connection)
            rows.run(connection, "delete")
            moved = rows.change(connection, "move", self._names() | self._moves())
            if moved != self.rows:
                raise DataflowError(
                    f"Of {self.rows} rows for chunk {self._dataid!r} of {table.location}, {moved} "
                    f"are in the staging table {self.name}. Let the chunk be made again."
                )
            [(found,)] = rows.run(connection, "count")
            self._refuse_others(moved, found)
            rows.run(connection, "unstage", self._names())
            confirm()
            connection.commit()
        return moved

    def discard(self) -> None:
        """Remove the staging table, if it is still there."""
        with suppress(DataflowError):  # without a database now: `odf clean` finds it
            _drop(self._rows, self._schema, [self.name])

    def frame(self) -> "DataFrame":
        """The rows as they were loaded, with the columns and types that the frame had."""
        assert self._spark is not None
        stage = self._rows.table._replace(schema=self._schema, name=self.name)
        parts = max(1, round(self.rows / ROWS_OF_A_PART))
        loaded = read_rows(self._spark, stage, password=self._rows.password, parts=parts)
        back = loaded.selectExpr(
            *(f"{way.back.format(f'c{at}')} as c{at}" for at, way in enumerate(self._ways))
        )
        return back.toDF(*(way.target.name for way in self._ways))

    def _verify(self) -> None:
        """Refuse what the table wouldn't take as it is, before anything of the chunk is shown."""
        rows, names = self._rows, self._names()
        ways = [(f"c{at}", way) for at, way in enumerate(self._ways)]
        lossy = [(name, way) for name, way in ways if way.lost]
        with rows.connected() as connection:
            for name, way in ways:
                if way.target.name == rows.table.column:
                    value = f"{name}::{way.cast or way.target.type}"
                    told = rows.run(connection, "members", names | {"value": value})
                    self._refuse_others(*told[0])
            if lossy:
                counts = [
                    rows.spell("loss", lost=(way.lost or "").format(name)) for name, way in lossy
                ]
                told = rows.run(connection, "losses", names | {"counts": ", ".join(counts)})
                refuse_losses(
                    rows.table,
                    self._dataid,
                    self.rows,
                    [
                        (way.target.name, way.told, way.target.full, count)
                        for (_, way), count in zip(lossy, told[0], strict=True)
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
        """What goes where, in the last step."""
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
    """The staging tables beside a table, each with its generation."""
    rows = PostgresRows(table, None, None, password)
    with rows.connected() as connection:
        return _found(rows, connection)


def _found(rows: PostgresRows, connection: Any) -> list[tuple[str, int]]:
    told = rows.run(connection, "leftovers", name=rows.name, note=_note(rows.name))
    return [(name, int(name.split("_")[2])) for (name,) in told]


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
            if not name.startswith(STAGE + "_"):
                raise DataflowError(f"{name!r} is no staging table.")
            rows.run(connection, "unstage", _names(rows, schema, name))
        connection.commit()


def _names(rows: PostgresRows, schema: str, name: str) -> dict[str, str]:
    above = rows.quoted(schema)
    return {
        "stage": f"{above}.{rows.quoted(name)}",
        "parts": f"{above}.{rows.quoted(name + PARTS)}",
    }


def _note(name: str) -> str:
    return json.dumps({"odf": "staging", "table": name})


def _ways(rows: PostgresRows, df: "DataFrame", columns: Sequence[Column]) -> dict[int, Loaded]:
    """How each column of a frame gets into the table, by its number in the frame."""
    known = {column.name: column for column in columns}
    table, told = rows.table, [field.name for field in df.schema]
    wrong = [f"the table has no column {name!r}" for name in told if name not in known]
    wrong += [
        f"{name!r} is there {told.count(name)} times"
        for name in dict.fromkeys(told)
        if told.count(name) > 1
    ]
    wrong += [
        f"{name!r} is needed and missing"
        for name, column in known.items()
        if column.needed and name not in told and name != table.column
    ]
    if table.column not in told and not rows.is_value:
        wrong.append(f"{table.column!r} is missing, by which the table is split")
    found: dict[int, Loaded] = {}
    for at, field in enumerate(df.schema):
        target = known.get(field.name)
        if target is None or target.generated:
            continue
        way = loaded(field.name, field.dataType, target)
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
    """What a task does with its part: load it once, however often the task is tried."""

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
