"""A table behind Java's drivers: its name, its chunk, and a connection to it."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..errors import DataflowError, Refused
from ..location import Table
from ..storage.table import Bounds, not_split, split_command
from ..store.database import named_statements

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
"""Java finds no driver by itself that came with a session's jars: it has to be named."""

_BACKTICKS = ("mysql", "mariadb", "databricks", "hive2")
_SERIALIZABLE = 8

_TIMESTAMPS = (93, 2014)
"""Java's numbers for a timestamp, without and with its zone."""

_NOT_PREPARED = {"postgresql": {"prepareThreshold": "0"}}
"""What is prepared behind a pooler stays with a session that is another client's next."""

_DATES = ("date", "timestamp", "timestamp_ntz")
_DATE = r"\d+-\d+-\d+"
_NUMBERS = ("tinyint", "smallint", "int", "bigint", "decimal", "float", "double")
_NUMBER = r"[-+]?\.?\d[\d.]*([eE][-+]?\d+)?$"

_TELL_DIGITS = ("postgresql",)
"""The drivers of which it is known that they tell the digits of a second; others say 0."""


class Place:
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
        """The command that splits the table by ranges, unless it is split."""
        return "" if self.is_split else split_command(self.target.datasetid, self.dataid)

    def find(self, type: Any) -> None:
        """Refuse a dataid that no row can have in a column of this type of Spark's.

        Spark would take a part of a date for the first day, and Java tell of its classes.
        """
        kind = type.simpleString().partition("(")[0]
        form = _DATE if kind in _DATES else _NUMBER if kind in _NUMBERS else ""
        if not self.is_split and not re.match(form, self.dataid):
            raise not_split(self.target, self.dataid, f"it is {kind}")

    @property
    def remainders(self) -> tuple[int, int]:
        """What a number of the chunk leaves when it is divided: of a negative one, the second."""
        return int(self.lower), int(self.lower) - (self.modulus or 0)

    def quoted(self, name: str) -> str:
        mark = "`" if self.kind in _BACKTICKS else '"'
        return mark + name.replace(mark, mark * 2) + mark

    def beside(self, name: str) -> str:
        """The name of a table in the same schema."""
        return ".".join(self.quoted(each) for each in (self.target.schema, name) if each)

    def options(self, spark: "SparkSession", table: str) -> dict[str, str]:
        """What Spark opens a table with; the password is in them."""
        password = self.password() if self.password else None
        if password:
            _keep_from_logs(spark)
        told = {
            "url": self.target.host,
            "dbtable": table,
            "user": self.target.user,
            "password": password,
            "driver": DRIVERS.get(self.kind),
        } | _NOT_PREPARED.get(self.kind, {})
        return {name: value for name, value in told.items() if value}

    @contextmanager
    def connected(self, spark: "SparkSession") -> Iterator[Any]:
        """A connection of Java for one transaction, rolled back unless it is committed."""
        from py4j.protocol import Py4JError

        need_classic(spark, self.target)
        java: Any = spark._jvm
        try:
            jdbc = java.org.apache.spark.sql.execution.datasources.jdbc
            told = java.PythonUtils.toScalaMap(self.options(spark, self.table))
            options = jdbc.JDBCOptions(told)
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
        """Let two publishes of a chunk not interleave, as far as the database can."""
        if connection.getMetaData().supportsTransactionIsolationLevel(_SERIALIZABLE):
            connection.setTransactionIsolation(_SERIALIZABLE)

    def change(self, connection: Any, statement: str, seconds: int = 0, /, **names: str) -> int:
        """Run a statement that writes, if need be within some seconds; how many rows it wrote."""
        prepared = self._prepared(connection, statement, **names)
        try:
            if seconds:
                prepared.setQueryTimeout(seconds)
            return prepared.executeUpdate()
        finally:
            prepared.close()

    def number(self, connection: Any, statement: str, **names: str) -> int:
        """The one number that a query tells."""
        prepared = self._prepared(connection, statement, **names)
        try:
            rows = prepared.executeQuery()
            rows.next()
            return rows.getLong(1)
        finally:
            prepared.close()

    def digits(self, connection: Any, columns: Sequence[str]) -> dict[str, int]:
        """How many digits of a second the columns have, as far as the driver tells it."""
        if self.kind not in _TELL_DIGITS:
            return {}
        names = ", ".join(map(self.quoted, columns))
        text = self._spelled("look", columns=names, table=self.table)
        prepared = connection.prepareStatement(text)
        try:
            told = prepared.executeQuery().getMetaData()
            return {
                name: told.getScale(at)
                for at, name in enumerate(columns, 1)
                if told.getColumnType(at) in _TIMESTAMPS
            }
        finally:
            prepared.close()

    def trouble(self, error: Exception) -> Exception:
        """What says in a line why the database refused, without a secret; else the error itself."""
        from .error_text import in_a_line

        cause = getattr(error, "java_exception", None)
        told = cause.getMessage() if cause is not None else in_a_line(error)
        if told is None:
            return error
        line = next((each.strip() for each in told.splitlines() if each.strip()), "")
        if "No suitable driver" in told or "ClassNotFoundException" in str(error):
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
        """The type of the chunk's column, as which a text is given to the database."""
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
"""Spark's loggers that have all properties of a connection at DEBUG, the password among them."""


def _keep_from_logs(spark: "SparkSession") -> None:
    """Keep passwords out of what is logged at DEBUG, whoever has made the session.

    A driver gets its password from Spark's options only: there is no other way for all of them.
    """
    from .session import is_remote, mask_logs

    mask_logs()
    if is_remote(spark):
        return
    java: Any = spark._jvm
    log4j = java.org.apache.logging.log4j
    for name in _LOGS_PROPERTIES:
        if log4j.LogManager.getLogger(name).isDebugEnabled():
            log4j.core.config.Configurator.setLevel(name, log4j.Level.INFO)


def need_classic(spark: "SparkSession", table: Table) -> None:
    """Refuse a session without Java at hand."""
    from .session import is_remote

    if is_remote(spark):
        raise Refused(
            f"{table.location} is published by JDBC from the process that has Java, and a session "
            "of Spark Connect has none. Set spark.master instead of spark.remote.",
            code="INVALID_LOCATION",
        )
