"""Tables of any database with a Java driver: Spark reads and writes rows, JDBC publishes them."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from ..errors import DataflowError, Refused
from ..location import Table
from ..storage.table import Bounds, no_split_column, not_split, split_command, strangers
from ..store.database import named_statements
from .schema import quoted
from .session import in_a_line, is_remote, mask_logs, spark_session
from .types import observed_losses, refuse_losses

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# --- a table: its name, its chunk, and a connection to it ---


Password = Callable[[], str | None]

DRIVERS = {
    "postgresql": "org.postgresql.Driver",
    "mysql": "com.mysql.cj.jdbc.Driver",
    "mariadb": "org.mariadb.jdbc.Driver",
    "oracle": "oracle.jdbc.OracleDriver",
    "sqlserver": "com.microsoft.sqlserver.jdbc.SQLServerDriver",
    "db2": "com.ibm.db2.jcc.DB2Driver",
    "h2": "org.h2.Driver",
}
"""Java doesn't find drivers from a session's jars by itself: they have to be named."""

_BACKTICKS = ("mysql", "mariadb", "databricks", "hive2")
_SERIALIZABLE = 8

_TIMESTAMPS = (93, 2014)
"""Java's numbers for a timestamp, without and with a zone."""

_NOT_PREPARED = {"postgresql": {"prepareThreshold": "0"}}
"""Behind a pooler, prepared statements would stay in a session that another client gets next."""

_DATES = ("date", "timestamp", "timestamp_ntz")
_DATE = r"\d+-\d+-\d+"
_NUMBERS = ("tinyint", "smallint", "int", "bigint", "decimal", "float", "double")
_NUMBER = r"[-+]?\.?\d[\d.]*([eE][-+]?\d+)?$"

_TELL_DIGITS = ("postgresql",)
"""The drivers known to report the digits of a second; others say 0."""


class JdbcTable:
    """A table of a database, and the rows in it that are a chunk."""

    def __init__(
        self, table: Table, dataid: str | None, bounds: Bounds | None, password: Password | None
    ) -> None:
        self.target, self.dataid, self.password = table, dataid or "", password
        self.location, self.column = table.location, table.column
        self.lower, self.upper, self.modulus = bounds or (self.dataid, None, None)
        self.is_split = bounds is not None
        self.kind = table.host.removeprefix("jdbc:").partition(":")[0].lower()
        self.table = self.beside(table.name)
        self._statements = named_statements("jdbc", "spark")
        way, self._values = "value", [self.lower]
        if self.modulus is not None:
            way, self._values = "remainder", [self.modulus, *self.remainders]
        elif self.upper is not None:
            way, self._values = "range", [self.lower, self.upper]
        self._chunk = self._spelled(way, column=self.quoted(table.column))

    @property
    def split(self) -> str:
        """Return the command that splits the table by ranges, unless it is split."""
        return "" if self.is_split else split_command(self.target.datasetid, self.dataid)

    def find(self, type: Any) -> None:
        """Refuse a dataid that no row can have in a column of this Spark type.

        Spark would read part of a date as its first day, and Java's error would name its classes.
        """
        kind = type.simpleString().partition("(")[0]
        form = _DATE if kind in _DATES else _NUMBER if kind in _NUMBERS else ""
        if not self.is_split and not re.match(form, self.dataid):
            raise not_split(self.target, self.dataid, f"it is {kind}")

    @property
    def remainders(self) -> tuple[int, int]:
        """Return the remainders of the chunk's numbers; the second one is for negative numbers."""
        return int(self.lower), int(self.lower) - (self.modulus or 0)

    def quoted(self, name: str) -> str:
        mark = "`" if self.kind in _BACKTICKS else '"'
        return mark + name.replace(mark, mark * 2) + mark

    def beside(self, name: str) -> str:
        """Return the name of a table in the same schema."""
        return ".".join(self.quoted(part) for part in (self.target.schema, name) if part)

    def options(self, spark: "SparkSession", table: str) -> dict[str, str]:
        """Return the options with which Spark opens a table, including the password."""
        # Java's drivers take the password only from the options. Spark redacts them in plans and in
        # its UI, but logs them at DEBUG.
        password = self.password() if self.password else None
        if password:
            _keep_from_logs(spark)
        options = {
            "url": self.target.host,
            "dbtable": table,
            "user": self.target.user,
            "password": password,
            "driver": DRIVERS.get(self.kind),
        } | _NOT_PREPARED.get(self.kind, {})
        return {name: value for name, value in options.items() if value}

    @contextmanager
    def connected(self, spark: "SparkSession") -> Iterator[Any]:
        """Yield a Java connection for one transaction, rolled back unless it is committed."""
        from py4j.protocol import Py4JError

        need_classic(spark, self.target)
        java: Any = spark._jvm
        try:
            jdbc = java.org.apache.spark.sql.execution.datasources.jdbc
            scala_options = java.PythonUtils.toScalaMap(self.options(spark, self.table))
            options = jdbc.JDBCOptions(scala_options)
            dialect = java.org.apache.spark.sql.jdbc.JdbcDialects.get(self.target.host)
            connection = dialect.createConnectionFactory(options).apply(-1)
            try:
                connection.setAutoCommit(False)
                yield connection
            finally:
                with suppress(Py4JError):
                    connection.rollback()
                connection.close()
        except Py4JError as error:
            raise self.trouble(error) from error

    def take_turn(self, connection: Any) -> None:
        """Keep two publishes of a chunk from interleaving, as far as the database can.

        Without serializable transactions, both could delete the old rows and append their own.
        """
        if connection.getMetaData().supportsTransactionIsolationLevel(_SERIALIZABLE):
            connection.setTransactionIsolation(_SERIALIZABLE)

    def change(self, connection: Any, statement: str, seconds: int = 0, /, **names: str) -> int:
        """Run a statement that writes, with an optional time limit; return the rows it wrote."""
        prepared = self._prepared(connection, statement, **names)
        try:
            if seconds:
                prepared.setQueryTimeout(seconds)
            return prepared.executeUpdate()
        finally:
            prepared.close()

    def number(self, connection: Any, statement: str, **names: str) -> int:
        """Return the single number that a query selects."""
        prepared = self._prepared(connection, statement, **names)
        try:
            rows = prepared.executeQuery()
            rows.next()
            return rows.getLong(1)
        finally:
            prepared.close()

    def digits(self, connection: Any, columns: Sequence[str]) -> dict[str, int]:
        """Return how many digits of a second the columns have, as far as the driver reports it."""
        if self.kind not in _TELL_DIGITS:
            return {}
        names = ", ".join(map(self.quoted, columns))
        text = self._spelled("look", columns=names, table=self.table)
        prepared = connection.prepareStatement(text)
        try:
            metadata = prepared.executeQuery().getMetaData()
            return {
                name: metadata.getScale(at)
                for at, name in enumerate(columns, 1)
                if metadata.getColumnType(at) in _TIMESTAMPS
            }
        finally:
            prepared.close()

    def trouble(self, error: Exception) -> Exception:
        """An error that says in a line, without secrets, why the database refused, or `error`."""
        cause = getattr(error, "java_exception", None)
        message = cause.getMessage() if cause is not None else in_a_line(error)
        if message is None:
            return error
        line = next((line.strip() for line in message.splitlines() if line.strip()), "")
        if "No suitable driver" in message or "ClassNotFoundException" in str(error):
            line = "Java has no driver for it: name its jar in spark.jars"
        return DataflowError(f"{self.location}: {line}")

    def _prepared(self, connection: Any, statement: str, **names: str) -> Any:
        known = {"table": self.table, "chunk": self._chunk} | names
        prepared = connection.prepareStatement(self._spelled(statement, **known))
        if statement in ("delete", "count"):
            kind = self._column_type(connection)
            for at, value in enumerate(self._values, 1):
                prepared.setObject(at, value, kind)
        return prepared

    def _column_type(self, connection: Any) -> int:
        """Return the type of the chunk's column, with which a text is passed to the database."""
        text = self._spelled("look", columns=self.quoted(self.column), table=self.table)
        prepared = connection.prepareStatement(text)
        try:
            return prepared.executeQuery().getMetaData().getColumnType(1)
        finally:
            prepared.close()

    def _spelled(self, statement: str, **names: str) -> str:
        found = self._statements.get(f"{statement}_{self.kind}", self._statements[statement])
        return found.partition("\n")[2].strip().format(**names)


_PROVIDERS = "org.apache.spark.sql.execution.datasources.jdbc.connection"
_LOGS_PROPERTIES = (_PROVIDERS, f"{_PROVIDERS}.BasicConnectionProvider")
"""Spark's loggers that log all properties of a connection at DEBUG, including the password."""


def _keep_from_logs(spark: "SparkSession") -> None:
    """Keep passwords out of DEBUG logs, whoever started the session.

    A driver gets its password only from Spark's options: no other way works for all drivers.
    """
    mask_logs()
    if is_remote(spark):
        return
    java: Any = spark._jvm
    log4j = java.org.apache.logging.log4j
    for name in _LOGS_PROPERTIES:
        if log4j.LogManager.getLogger(name).isDebugEnabled():
            log4j.core.config.Configurator.setLevel(name, log4j.Level.INFO)


def need_classic(spark: "SparkSession", table: Table) -> None:
    """Refuse a session without its own Java."""
    if is_remote(spark):
        raise Refused(
            f"{table.location} is published by JDBC, from a process with Java, which a Spark "
            "Connect session doesn't have. Set spark.master instead of spark.remote.",
            code="INVALID_LOCATION",
        )


STAGE_PREFIX = "odf_stage"

_STAGE_NAME = re.compile(rf"{STAGE_PREFIX}_([0-9]+)_([0-9a-f]{{8}})_[0-9a-f]{{8}}_[0-9a-f]{{8}}")

_SWEEP_SECONDS = 5
"""Seconds to wait for the staging table of an older claim, in which a zombie may be working."""

_FETCH_ROWS = "10000"
"""Rows that a driver fetches at a time: many load a whole chunk into memory otherwise."""

_MAX_CONNECTIONS = 16
"""Connections to a database that one read opens by default."""

_RANGE_TYPES = (
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "decimal",
    "date",
    "timestamp",
    "timestamp_ntz",
)


def read_rows(
    spark: "SparkSession",
    table: Table,
    dataid: str | None = None,
    bounds: Bounds | None = None,
    password: Password | None = None,
    *,
    parts: int | None = None,
) -> "DataFrame":
    """Return the rows of a chunk of a table, or of all of it.

    A range is read in `parts`, by default as many as run in parallel: each has its own snapshot and
    its own connection.
    """
    place = JdbcTable(table, dataid, bounds, password)
    reader = spark.read.format("jdbc").options(
        **place.options(spark, place.table), fetchsize=_FETCH_ROWS
    )
    try:
        whole = reader.load()
    except Exception as error:
        raise place.trouble(error) from error
    if dataid is None:
        return whole
    if table.column not in whole.columns:
        raise Refused(
            f"{table.location} has no column {table.column!r}, which splits it into chunks.",
            code="INVALID_LOCATION",
        )
    type = whole.schema[table.column].dataType
    place.find(type)
    parts = _usual_parts(spark) if parts is None else parts
    is_cut = place.upper is not None and type.simpleString().split("(")[0] in _RANGE_TYPES
    if is_cut and parts > 1:
        whole = reader.options(
            partitionColumn=place.quoted(table.column),
            lowerBound=place.lower,
            upperBound=place.upper,
            numPartitions=str(parts),
        ).load()
    return _rows_of(place, whole, table.column)


def _rows_of(place: JdbcTable, whole: "DataFrame", name: str) -> "DataFrame":
    """The rows of a table that are in the range of a chunk, or among its remainders."""
    from pyspark.sql import functions as F

    type, column = whole.schema[name].dataType, whole[quoted(name)]

    def typed(value: Any) -> Any:
        return F.lit(value).cast(type)

    if place.modulus is not None:
        return whole.where((column % F.lit(place.modulus)).isin(*place.remainders))
    if place.upper is not None:
        return whole.where((column >= typed(place.lower)) & (column < typed(place.upper)))
    return whole.where(column == typed(place.lower))


def _usual_parts(spark: "SparkSession") -> int:
    return 1 if is_remote(spark) else min(_MAX_CONNECTIONS, spark.sparkContext.defaultParallelism)


class StagedJdbcRows:
    """A chunk in a staging table, written by Spark."""

    def __init__(self, spark: "SparkSession", place: "JdbcTable", name: str) -> None:
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
    ) -> "StagedJdbcRows":
        """Load a frame into a new staging table beside the table."""
        from pyspark.sql import functions as F

        place = JdbcTable(table, dataid, bounds, password)
        need_classic(df.sparkSession, table)
        if table.column not in df.columns:
            if place.modulus is not None or place.upper is not None:
                raise no_split_column(table)
            df = df.withColumn(table.column, F.lit(dataid))
        name = f"{STAGE_PREFIX}_{generation}_{_stage_mark(place)}_{os.urandom(4).hex()}"
        staged = cls(df.sparkSession, place, name)
        staged._sweep(generation)
        try:
            staged._fill(df if parts is None else df.coalesce(parts))
            staged._refuse_others()
        except BaseException:
            staged.discard()
            raise
        return staged

    def show(self, confirm: Callable[[], None]) -> int:
        """Replace the chunk's rows, all or none; return the number of new rows."""
        place, names = self._place, self._names()
        with place.connected(self._spark) as connection:
            place.take_turn(connection)
            place.change(connection, "delete")
            moved = place.change(connection, "move", **names)
            self._compare(moved, place.number(connection, "count"))
            # As late as possible: a worker that lost its claim must not commit over its successor.
            confirm()
            connection.commit()
        self.discard()
        return moved

    def discard(self) -> None:
        """Remove the staging table, if it still exists."""
        with suppress(DataflowError), self._place.connected(self._spark) as connection:
            self._place.change(connection, "unstage", stage=self._names()["stage"])
            connection.commit()

    def _sweep(self, generation: int) -> None:
        """Remove what older claims of the chunk have left, unless one is working in it."""
        place = self._place
        with suppress(Exception), place.connected(self._spark) as connection:
            for name, older in _staging_tables(place, connection):
                if older < generation and _stage_mark(place) in name:
                    place.change(connection, "unstage", _SWEEP_SECONDS, stage=place.beside(name))
                    connection.commit()

    def frame(self) -> "DataFrame":
        """Return the rows as they were loaded."""
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
            table_schema = self._spark.read.format("jdbc").options(**options).load().schema
            place.find(table_schema[place.column].dataType)
            checked, losses = observed_losses(df, table_schema, digits)
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
    """Return the staging tables of a table, each with its generation."""
    place = JdbcTable(table, None, None, password)
    with place.connected(_session(spark)) as connection:
        return _staging_tables(place, connection)


def _staging_tables(place: JdbcTable, connection: Any) -> list[tuple[str, int]]:
    schema = place.target.schema or connection.getSchema()
    rows = connection.getMetaData().getTables(
        connection.getCatalog(), schema, f"{STAGE_PREFIX}%", None
    )
    found = []
    while rows.next():
        name = rows.getString("TABLE_NAME")
        match = _STAGE_NAME.fullmatch(name)
        if match and match[2] == _digest(place.table) and rows.getString("TABLE_TYPE") == "TABLE":
            found.append((name, int(match[1])))
    return sorted(found)


def _stage_mark(place: JdbcTable) -> str:
    """Return the common part of a chunk's staging tables' names: the table, and the chunk."""
    return f"{_digest(place.table)}_{_digest(place.dataid)}"


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=4).hexdigest()


def drop(
    table: Table,
    password: Password | None,
    names: Sequence[str],
    spark: "SparkSession | None" = None,
) -> None:
    """Remove staging tables."""
    place = JdbcTable(table, None, None, password)
    for name in names:
        if not name.startswith(STAGE_PREFIX + "_"):
            raise DataflowError(f"{name!r} isn't a staging table.")
    with place.connected(_session(spark)) as connection:
        for name in names:
            place.change(connection, "unstage", stage=place.beside(name))
        connection.commit()


def _session(spark: "SparkSession | None") -> "SparkSession":
    return spark or spark_session()
