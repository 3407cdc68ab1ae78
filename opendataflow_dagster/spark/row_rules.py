"""The rules that each row of a chunk has to meet: counted while it is written."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ..chunk import Checked, Chunk, reason_of
from ..util.text import meant, tidy
from .error_text import in_a_line
from .evidence import Evidence
from .samples import of_rows
from .schema import MOST_DIGITS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Frame = Callable[[], "DataFrame"]


@dataclass(frozen=True)
class Rule:
    """What has to be true of a chunk of a dataset; `name` is safe as an identifier."""

    is_late: ClassVar[bool] = False
    """Whether it is asked right before the chunk is published, of what was published before."""

    name: str
    datasetid: str
    severity: str
    columns: tuple[str, ...] = ()
    _seen: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)

    def missing(self, columns: Sequence[str]) -> str | None:
        """What is wrong with a frame of these columns, if one isn't there that the rule names."""
        folded = {each.casefold() for each in columns}
        for name in self.columns:
            if name.casefold() not in folded:
                known = ", ".join(columns[:20]) + (", …" if len(columns) > 20 else "")
                return f"there is no column {name!r} (there are: {known}){meant(name, columns)}"
        return None

    def wrong(self, df: "DataFrame") -> str | None:
        """What keeps the rule from being asked of a frame, if anything does; asked first."""
        from pyspark.errors import PySparkException

        columns = df.columns
        if told := self.missing(columns):
            return told
        key = repr(df.dtypes) if len(columns) <= 100 else str(hash(repr(df.dtypes)))
        if key not in self._seen:
            try:
                told = self._analyze(df)
            except PySparkException as error:
                told = line_of(error)
            if len(self._seen) > 100:
                self._seen.clear()
            self._seen[key] = told
        return self._seen[key]

    def observes(self, prefix: str) -> list[str]:
        """Aggregates with an alias that the pass which writes the chunk is to take."""
        return []

    def judge(
        self, prefix: str, evidence: Evidence, frame: Frame, last: Sequence[int], chunk: Chunk
    ) -> Checked:
        """The answer, from what was observed; from the rows themselves only where it has to."""
        raise NotImplementedError

    def failed(self, message: str, **metadata: Any) -> Checked:
        return Checked(self.name, self.datasetid, False, tidy(message), metadata, self.severity)

    def passed(self, **metadata: Any) -> Checked:
        return Checked(self.name, self.datasetid, True, "", metadata, self.severity)

    def _analyze(self, df: "DataFrame") -> str | None:
        """Raise or tell what is wrong, without running anything."""
        return None


@dataclass(frozen=True)
class RowRule(Rule):
    """Each row meets it or not: `violation` is SQL, NULL where a row doesn't violate it."""

    violation: str = ""
    says: str = ""
    """What the rows that violate it do, as in "3 of 10 rows …"."""

    def observes(self, prefix: str) -> list[str]:
        return [f"count_if({self.violation}) as {prefix}{self.name}"]

    def judge(
        self, prefix: str, evidence: Evidence, frame: Frame, last: Sequence[int], chunk: Chunk
    ) -> Checked:
        from pyspark.errors import PySparkException

        count = evidence.told.get(prefix + self.name)
        if count is None:  # it couldn't be in the pass
            try:
                if told := self.wrong(frame()):
                    return self.failed(told, rows=evidence.rows)
                count = frame().selectExpr(*self.observes(prefix)).collect()[0][0]
            except PySparkException as error:
                return self.failed(f"it can't be asked: {line_of(error)}", rows=evidence.rows)
        if not count:
            return self.passed(rows=evidence.rows, violations=0)
        message, more = f"{count:,} of {evidence.rows:,} rows {self.says}", {}
        with suppress(PySparkException):  # the answer stands without a sample
            more["sample"] = of_rows(frame(), self.violation, self.columns or self._named(frame()))
            message += f", such as {more['sample']}"
        return self.failed(message, rows=evidence.rows, violations=count, **more)

    def _named(self, df: "DataFrame") -> tuple[str, ...]:
        """The columns that the rule speaks of: they come first in a sample."""
        return tuple(each for each in df.columns if each in self.violation)

    def _analyze(self, df: "DataFrame") -> str | None:
        _observable(df, self.observes(""))
        return None


@dataclass(frozen=True)
class RangeRule(RowRule):
    """A column lies within bounds."""

    bounds: str = ""
    """What they are: number, date or text."""
    decimals: int = 0
    """Digits after the point of a bound."""

    def _analyze(self, df: "DataFrame") -> str | None:
        from pyspark.sql import types

        name = self.columns[0]
        column = next(each for each in df.schema if each.name.casefold() == name.casefold())
        fits = {
            "number": types.NumericType,
            "date": (types.DateType, types.TimestampType, types.TimestampNTZType),
            "text": types.StringType,
        }
        if not isinstance(column.dataType, fits[self.bounds]):
            return (
                f"the column {name!r} is {column.dataType.simpleString()}, and its bounds are "
                f"{self.bounds}s"
            )
        if isinstance(column.dataType, types.DecimalType):
            whole = column.dataType.precision - column.dataType.scale
            if self.decimals > max(column.dataType.scale, MOST_DIGITS - whole):
                return (
                    f"the column {name!r} is {column.dataType.simpleString()}, beside which Spark "
                    f"rounds a bound with {self.decimals} decimals: round it, or give it as a float"
                )
        return super()._analyze(df)


@dataclass(frozen=True)
class SqlRule(RowRule):
    """An expression of the user's is true for every row."""

    sql: str = ""

    def _analyze(self, df: "DataFrame") -> str | None:
        from pyspark.errors import AnalysisException

        [told] = df.selectExpr(f"(\n{self.sql}\n) as told").schema
        if told.dataType.typeName() not in ("boolean", "void"):
            return f"{shown(self.sql)} is {told.dataType.simpleString()}, not true or false"
        try:
            return super()._analyze(df)
        except AnalysisException:
            return (
                f"{shown(self.sql)} can't be asked row by row: it has an aggregate, a window, a "
                "subquery or a Python function. Write a rule of the kind function instead"
            )


def anyway(sql: str) -> str:
    """An expression that is NULL where computing the user's condition would raise.

    An overflow or a malformed cast would else fail the job, and not the rule. Spark has no `try`
    for any expression: `try_to_binary` is one, for whatever stands in it. The lambda keeps Spark
    from computing what two rules have in common before, where nothing would catch it.
    """
    inner = f"exists(array(0), odf_one -> (\n{sql}\n))"
    return f"(try_to_binary(if({inner}, '01', '00'), 'hex') = X'01')"


def _observable(df: "DataFrame", aggregates: Sequence[str]) -> None:
    """Raise what Spark would if these were observed."""
    from pyspark.sql import functions as F

    # Spark Connect knows the schema of what is observed without asking its server; not so of more.
    _ = df.observe("odf_asked", *map(F.expr, aggregates)).selectExpr("1").schema


def line_of(error: BaseException) -> str:
    """The reason, without Spark's codes."""
    line = in_a_line(error) or reason_of(error)
    if line.startswith("["):
        line = line.partition("] ")[2] or line
    return line.partition(" SQLSTATE:")[0].rstrip(".")


def shown(sql: str) -> str:
    text = " ".join(sql.split())
    return f"`{text if len(text) <= 80 else text[:79] + '…'}`"
