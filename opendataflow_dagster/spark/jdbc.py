"""Tables of any database that Java has a driver for: Spark reads and writes, JDBC publishes."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from ..errors import DataflowError, Refused
from ..location import Table
from ..storage.table import Bounds, strangers
from .jdbc_connection import Password, Place, need_classic
from .jdbc_loss import watched
from .row_hash import quoted
from .table_loss import refuse_losses

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STAGE = "odf_stage"

_NAME = re.compile(rf"{STAGE}_([0-9]+)_([0-9a-f]{{8}})_[0-9a-f]{{8}}_[0-9a-f]{{8}}")

_HURRY = 5
"""Seconds to wait for the staging table of an older claim, in which a zombie may be at work."""

_AT_ONCE = "10000"
"""Rows that a driver fetches in one go: many take all of a chunk into memory otherwise."""

_MOST_PARTS = 16
"""Connections to a database that one read opens by itself."""

_RANGED = ("tinyint", "smallint", "int", "bigint", "decimal", "date", "timestamp", "timestamp_ntz")


def read_rows(
    spark: "SparkSession",
    table: Table,
    dataid: str | None = None,
    bounds: Bounds | None = None,
    password: Password | None = None,
    *,
    parts: int | None = None,
) -> "DataFrame":
    """The rows of a chunk of a table, or of all of it.

    A range is read in `parts`, by default as many as are worked on at once: each has a moment of
    its own, and its connection.
    """
    from pyspark.sql import functions as F

    place = Place(table, dataid, bounds, password)
    reader = spark.read.format("jdbc").options(
        **place.options(spark, place.table), fetchsize=_AT_ONCE
    )
    try:
        whole = reader.load()
    except Exception as error:
        raise place.trouble(error) from error
    if dataid is None:
        return whole
    if table.column not in whole.columns:
        raise Refused(
            f"{table.location} has no column {table.column!r}, by which it is split.",
            code="INVALID_LOCATION",
        )
    type = whole.schema[table.column].dataType
    place.find(type)
    parts = _usual_parts(spark) if parts is None else parts
    is_cut = place.upper is not None and type.simpleString().split("(")[0] in _RANGED
    if is_cut and parts > 1:
        whole = reader.options(
            partitionColumn=place.quoted(table.column),
            lowerBound=place.lower,
            upperBound=place.upper,
            numPartitions=str(parts),
        ).load()
    column = whole[quoted(table.column)]

    def known(value: Any) -> Any:
        return F.lit(value).cast(type)

    if place.modulus is not None:
        return whole.where((column % F.lit(place.modulus)).isin(*place.remainders))
    if place.upper is not None:
        return whole.where((column >= known(place.lower)) & (column < known(place.upper)))
    return whole.where(column == known(place.lower))


def _usual_parts(spark: "SparkSession") -> int:
    from .session import is_remote

    return 1 if is_remote(spark) else min(_MOST_PARTS, spark.sparkContext.defaultParallelism)


class StagedRows:
    """A chunk in a staging table, written by Spark."""

    def __init__(self, spark: "SparkSession", place: "Place", name: str) -> None:
        self._spark, self._place, self.name, self.rows = spark, place, name, 0
        self._columns: list[str] = []

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
        """Load a frame into a new staging table beside the table."""
        from pyspark.sql import functions as F

        place = Place(table, dataid, bounds, password)
        need_classic(df.sparkSession, table)
        if table.column not in df.columns:
            if place.modulus is not None or place.upper is not None:
                raise Refused(
                    f"The rows for {table.location} have no column {table.column!r}, by which the "
                    "table is split. Return it too.",
                    code="NOT_VALIDATED",
                )
            df = df.withColumn(table.column, F.lit(dataid))
        name = f"{STAGE}_{generation}_{_marks(place)}_{os.urandom(4).hex()}"
        made = cls(df.sparkSession, place, name)
        made._sweep(generation)
        try:
            made._fill(df if parts is None else df.coalesce(parts))
            made._refuse_others()
        except BaseException:
            made.discard()
            raise
        return made

    def show(self, confirm: Callable[[], None]) -> int:
        """Put the rows in the place of the chunk's, all or none; how many they are."""
        place, names = self._place, self._names()
        with place.connected(self._spark) as connection:
            place.take_turn(connection)
            place.change(connection, "delete")
            moved = place.change(connection, "move", **names)
            self._compare(moved, place.number(connection, "count"))
            confirm()
            connection.commit()
        self.discard()
        return moved

    def discard(self) -> None:
        """Remove the staging table, if it is still there."""
        with suppress(DataflowError), self._place.connected(self._spark) as connection:
            self._place.change(connection, "unstage", stage=self._names()["stage"])
            connection.commit()

    def _sweep(self, generation: int) -> None:
        """Remove what older claims of the chunk have left, unless one is at work in it."""
        place = self._place
        with suppress(Exception), place.connected(self._spark) as connection:
            for name, older in _found(place, connection):
                if older < generation and _marks(place) in name:
                    place.change(connection, "unstage", _HURRY, stage=place.beside(name))
                    connection.commit()

    def frame(self) -> "DataFrame":
        """The rows as they were loaded."""
        stage = self._place.target._replace(name=self.name)
        return read_rows(self._spark, stage, password=self._place.password)

    def _refuse_others(self) -> None:
        """Refuse rows of other chunks, before anything of this one is shown."""
        with self._place.connected(self._spark) as connection:
            stage = self._names()["stage"]
            found = self._place.number(connection, "count", table=stage)
        self._compare(self.rows, found)

    def _compare(self, rows: int, found: int) -> None:
        place = self._place
        if rows != self.rows or found != rows:
            raise strangers(
                place.location, place.column, place.dataid, self.rows, found, split=place.split
            )

    def _names(self) -> dict[str, str]:
        columns = ", ".join(map(self._place.quoted, self._columns))
        return {"stage": self._place.beside(self.name), "columns": columns}

    def _fill(self, df: "DataFrame") -> None:
        place, self._columns = self._place, df.columns
        names = self._names()
        with place.connected(self._spark) as connection:
            place.change(connection, "stage", **names)
            digits = place.digits(connection, df.columns)
            connection.commit()
        options = place.options(self._spark, names["stage"])
        try:
            there = self._spark.read.format("jdbc").options(**options).load().schema
            place.find(there[place.column].dataType)
            checked, losses = watched(df, there, digits)
            checked.write.format("jdbc").options(**options).mode("append").save()
        except DataflowError:
            raise
        except Exception as error:
            raise place.trouble(error) from error
        with place.connected(self._spark) as connection:
            self.rows = place.number(connection, "count_all", table=names["stage"])
        refuse_losses(place.target, place.dataid, self.rows, losses())


def leftovers(
    table: Table, password: Password | None, spark: "SparkSession | None" = None
) -> list[tuple[str, int]]:
    """The staging tables of a table, each with its generation."""
    place = Place(table, None, None, password)
    with place.connected(_session(spark)) as connection:
        return _found(place, connection)


def _found(place: Place, connection: Any) -> list[tuple[str, int]]:
    schema = place.target.schema or connection.getSchema()
    rows = connection.getMetaData().getTables(connection.getCatalog(), schema, f"{STAGE}%", None)
    found = []
    while rows.next():
        name = rows.getString("TABLE_NAME")
        told = _NAME.fullmatch(name)
        if told and told[2] == _mark(place.table) and rows.getString("TABLE_TYPE") == "TABLE":
            found.append((name, int(told[1])))
    return sorted(found)


def _marks(place: Place) -> str:
    """What the names of a chunk's staging tables have in common: the table, and the chunk of it."""
    return f"{_mark(place.table)}_{_mark(place.dataid)}"


def _mark(text: str) -> str:
    return blake2b(text.encode(), digest_size=4).hexdigest()


def drop(
    table: Table,
    password: Password | None,
    names: Sequence[str],
    spark: "SparkSession | None" = None,
) -> None:
    """Remove staging tables."""
    place = Place(table, None, None, password)
    for name in names:
        if not name.startswith(STAGE + "_"):
            raise DataflowError(f"{name!r} is no staging table.")
    with place.connected(_session(spark)) as connection:
        for name in names:
            place.change(connection, "unstage", stage=place.beside(name))
        connection.commit()


def _session(spark: "SparkSession | None") -> "SparkSession":
    from .session import spark_session

    return spark or spark_session()
