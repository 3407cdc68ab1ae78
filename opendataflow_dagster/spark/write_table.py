"""Writes a frame as a chunk of a table: into a staging table, or in one commit of a lake table."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..chunk import Chunk, Place
from ..location import JDBC, SQLITE, Table
from ..storage.read import bounds_of
from ..storage.table import Rows, strangers
from ..store.store import Store
from .evidence import observed
from .jdbc import StagedJdbcRows
from .postgres_write import StagedRows
from .read import Password, lake_name, lake_trouble
from .schema import literal, quoted
from .types import refuse_sqlite_losses

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Confirm = Callable[[], None]

_MINE = "odf_mine"


def staged_rows(
    spark: "SparkSession",
    store: Store,
    chunk: Chunk,
    table: Table,
    df: "DataFrame",
    extra: Sequence[str],
) -> "StagedSqliteTable | StagedDatabaseTable":
    """Load a frame beside a table, or keep it, until it is shown."""
    bounds = bounds_of(store, table.datasetid, chunk.dataid)
    password: Password = lambda: chunk.password(table.datasetid)  # noqa: E731
    if table.dialect == SQLITE:
        rows = Rows(table, chunk.dataid, bounds, password)
        return StagedSqliteTable(spark, table, rows, df, extra, rehearse=len(chunk.outputs) > 1)
    kind = StagedJdbcRows if table.dialect == JDBC else StagedRows
    frame, taken = observed(df, extra)
    staged = kind.write(frame, table, chunk.dataid, bounds, password, chunk.generation)
    return StagedDatabaseTable(spark, table, staged, taken)


class _Rehearsed(Exception):
    """A transaction went well as far as its end, and is rolled back."""


def _rehearsed() -> None:
    raise _Rehearsed


class StagedSqliteTable:
    """A chunk of a table of SQLite, kept on the driver until it is shown."""

    def __init__(
        self,
        spark: "SparkSession",
        table: Table,
        rows: Rows,
        df: "DataFrame",
        extra: Sequence[str] = (),
        *,
        rehearse: bool = False,
    ) -> None:
        frame, taken = observed(df, extra)
        self._table, self._rows, self._spark, self._schema = table, rows, spark, df.schema
        self._data = frame.toArrow()
        self.evidence, self.bytes = taken(self._data.num_rows), None
        refuse_sqlite_losses(rows, self._data, df.schema)
        if rehearse:  # what the table refuses is to be known before another output is shown
            with suppress(_Rehearsed):
                self._replace(_rehearsed)

    def show(self, confirm: Confirm) -> str:
        self._replace(confirm)
        return self._table.location

    def _replace(self, confirm: Confirm) -> None:
        import pandas

        # By Arrow's own types: integers stay integers also where some are NULL.
        plain = self._data.to_pandas(types_mapper=pandas.ArrowDtype)
        self._rows.replace(plain, confirm)

    def discard(self) -> None:
        del self._data

    def frame(self) -> "DataFrame":
        return self._spark.createDataFrame(self._data, self._schema)


class StagedDatabaseTable:
    """A chunk of a table in a staging table beside it."""

    def __init__(self, spark: "SparkSession", table: Table, staged: Any, taken: Any) -> None:
        self._spark, self._table, self._staged = spark, table, staged
        self.bytes = None
        try:
            self.evidence = taken(staged.rows)
        except BaseException:
            staged.discard()
            raise

    def show(self, confirm: Confirm) -> str:
        self._staged.show(confirm)
        return self._table.location

    def discard(self) -> None:
        self._staged.discard()

    def frame(self) -> "DataFrame":
        return self._staged.frame()


class StagedLake:
    """A chunk of a table of Delta or Iceberg, which replaces it in one commit of its own."""

    def __init__(
        self,
        spark: "SparkSession",
        chunk: Chunk,
        place: Place,
        target: Any,
        df: "DataFrame",
        extra: Sequence[str] = (),
    ) -> None:
        from pyspark.sql import functions as F

        column = place.columns.get("chunkcolumn") or "dataid"
        if column not in df.columns:
            df = df.withColumn(column, F.lit(chunk.dataid))
        self._df, self._place, self._target, self._dataid = df, place, target, chunk.dataid
        self._column = column
        # Taken before, since the commit is at once what shows it.
        is_mine = f"cast({quoted(column)} as string) <=> {literal(chunk.dataid)}"
        frame, taken = observed(df.persist(), [*extra, f"count_if({is_mine}) as {_MINE}"])
        try:
            frame.write.format("noop").mode("overwrite").save()
            self.evidence, self.bytes = taken(), None
            rows, found = self.evidence.rows, self.evidence.extra[_MINE]
            if found != rows:
                where = lake_name(place) or target.root
                raise strangers(where, column, chunk.dataid, rows, found)
        except BaseException:
            self.discard()
            raise

    def show(self, confirm: Confirm) -> str:
        from pyspark.sql import functions as F

        column = quoted(self._column)
        confirm()
        name, target = lake_name(self._place), self._target
        try:
            if name:
                self._df.writeTo(name).overwrite(F.col(column) == F.lit(self._dataid))
            else:
                dataid = self._dataid.replace("\\", "\\\\").replace("'", "\\'")
                writer = self._df.write.format(target.format).mode("overwrite")
                writer.option("replaceWhere", f"{column} = '{dataid}'").save(target.root)
        except Exception as error:
            raise lake_trouble(target, error) from error
        return target.root if name is None else name

    def discard(self) -> None:
        self._df.unpersist()

    def frame(self) -> "DataFrame":
        return self._df
