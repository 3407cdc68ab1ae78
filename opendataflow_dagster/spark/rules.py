"""The rules of `expect={…}`: for each row, for a chunk as a whole, and functions of its frame."""

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from ..chunk import ERROR, WARN, Checked, Chunk, reason_of
from ..util.text import did_you_mean, tidy
from .evidence import Evidence
from .job import CHUNK, type_name
from .schema import DECIMAL_DIGITS, quoted
from .session import in_a_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField


Frame = Callable[[], "DataFrame"]


@dataclass(frozen=True)
class Rule:
    """What must hold for a chunk of a dataset; `name` is safe as an identifier."""

    is_late: ClassVar[bool] = False
    """Whether it is checked right before publishing, against what was published before."""

    name: str
    datasetid: str
    severity: str
    columns: tuple[str, ...] = ()
    _seen: dict[str, str | None] = field(default_factory=dict, repr=False, compare=False)

    def missing(self, columns: Sequence[str]) -> str | None:
        """Return what is wrong with a frame of these columns, if the rule names a missing one."""
        folded = {column.casefold() for column in columns}
        for name in self.columns:
            if name.casefold() not in folded:
                known = ", ".join(columns[:20]) + (", …" if len(columns) > 20 else "")
                return (
                    f"there is no column {name!r} (there are: {known}){did_you_mean(name, columns)}"
                )
        return None

    def wrong(self, df: "DataFrame") -> str | None:
        """Return why the rule can't be applied to a frame, if so; checked first."""
        from pyspark.errors import PySparkException

        columns = df.columns
        if fault := self.missing(columns):
            return fault
        key = repr(df.dtypes) if len(columns) <= 100 else str(hash(repr(df.dtypes)))
        if key not in self._seen:
            try:
                fault = self._analyze(df)
            except PySparkException as error:
                fault = error_line(error)
            if len(self._seen) > 100:
                self._seen.clear()
            self._seen[key] = fault
        return self._seen[key]

    def observes(self, prefix: str) -> list[str]:
        """Return aggregates, with aliases, to collect in the pass that writes the chunk."""
        return []

    def judge(
        self, prefix: str, evidence: Evidence, frame: Frame, last: Sequence[int], chunk: Chunk
    ) -> Checked:
        """Return the result from what was observed; read the rows themselves only if needed."""
        raise NotImplementedError

    def failed(self, message: str, **metadata: Any) -> Checked:
        return Checked(self.name, self.datasetid, False, tidy(message), metadata, self.severity)

    def passed(self, **metadata: Any) -> Checked:
        return Checked(self.name, self.datasetid, True, "", metadata, self.severity)

    def _analyze(self, df: "DataFrame") -> str | None:
        """Raise or return what is wrong, without running anything."""
        return None


@dataclass(frozen=True)
class RowRule(Rule):
    """Each row meets it or not: `violation` is SQL, NULL where a row doesn't violate it."""

    violation: str = ""
    says: str = ""
    """What violating rows do, as in "3 of 10 rows …"."""

    def observes(self, prefix: str) -> list[str]:
        return [f"count_if({self.violation}) as {prefix}{self.name}"]

    def judge(
        self, prefix: str, evidence: Evidence, frame: Frame, last: Sequence[int], chunk: Chunk
    ) -> Checked:
        from pyspark.errors import PySparkException

        count = evidence.extra.get(prefix + self.name)
        if count is None:  # it couldn't be part of the pass
            try:
                if fault := self.wrong(frame()):
                    return self.failed(fault, rows=evidence.rows)
                count = frame().selectExpr(*self.observes(prefix)).collect()[0][0]
            except PySparkException as error:
                return self.failed(f"it can't be checked: {error_line(error)}", rows=evidence.rows)
        if not count:
            return self.passed(rows=evidence.rows, violations=0)
        message, more = f"{count:,} of {evidence.rows:,} rows {self.says}", {}
        with suppress(PySparkException):  # the result is valid without a sample
            more["sample"] = sample_rows(
                frame(), self.violation, self.columns or self._named(frame())
            )
            message += f", such as {more['sample']}"
        return self.failed(message, rows=evidence.rows, violations=count, **more)

    def _named(self, df: "DataFrame") -> tuple[str, ...]:
        """Return the columns that the rule names: they come first in a sample."""
        return tuple(column for column in df.columns if column in self.violation)

    def _analyze(self, df: "DataFrame") -> str | None:
        _observable(df, self.observes(""))
        return None


@dataclass(frozen=True)
class RangeRule(RowRule):
    """A column's values are within bounds."""

    bounds: str = ""
    """The kind of bounds: number, date or text."""
    decimals: int = 0
    """Digits after the decimal point of a bound."""

    def _analyze(self, df: "DataFrame") -> str | None:
        from pyspark.sql import types

        name = self.columns[0]
        column = next(field for field in df.schema if field.name.casefold() == name.casefold())
        fits = {
            "number": types.NumericType,
            "date": (types.DateType, types.TimestampType, types.TimestampNTZType),
            "text": types.StringType,
        }
        if not isinstance(column.dataType, fits[self.bounds]):
            return (
                f"the column {name!r} is {column.dataType.simpleString()}, but its bounds are "
                f"{self.bounds}s"
            )
        if isinstance(column.dataType, types.DecimalType):
            whole = column.dataType.precision - column.dataType.scale
            if self.decimals > max(column.dataType.scale, DECIMAL_DIGITS - whole):
                return (
                    f"the column {name!r} is {column.dataType.simpleString()}, for which Spark "
                    f"rounds a bound with {self.decimals} decimals: round it, or give it as a float"
                )
        return super()._analyze(df)


@dataclass(frozen=True)
class SqlRule(RowRule):
    """A user's expression is true for every row."""

    sql: str = ""

    def _analyze(self, df: "DataFrame") -> str | None:
        from pyspark.errors import AnalysisException

        [answer] = df.selectExpr(f"(\n{self.sql}\n) as answer").schema
        if answer.dataType.typeName() not in ("boolean", "void"):
            kind = answer.dataType.simpleString()
            return f"{abbreviated_sql(self.sql)} is {kind}, not true or false"
        try:
            return super()._analyze(df)
        except AnalysisException:
            return (
                f"{abbreviated_sql(self.sql)} can't be checked row by row: it has an aggregate, a "
                "window, a subquery or a Python function. Write a rule of the kind function instead"
            )


def null_on_error(sql: str) -> str:
    """Return an expression that is NULL where computing the user's condition would raise.

    Otherwise an overflow or a malformed cast would fail the job, and not the rule. Spark has no
    general `try`: `try_to_binary` catches errors of anything inside it. The lambda keeps Spark from
    computing common parts of two rules in advance, where nothing would catch the error.
    """
    inner = f"exists(array(0), odf_one -> (\n{sql}\n))"
    return f"(try_to_binary(if({inner}, '01', '00'), 'hex') = X'01')"


def _observable(df: "DataFrame", aggregates: Sequence[str]) -> None:
    """Raise what Spark would raise if these were observed."""
    from pyspark.sql import functions as F

    # Spark Connect knows the schema of observations without asking its server, but not of more.
    _ = df.observe("odf_asked", *map(F.expr, aggregates)).selectExpr("1").schema


def error_line(error: BaseException) -> str:
    """Return the reason, without Spark's codes."""
    line = in_a_line(error) or reason_of(error)
    if line.startswith("["):
        line = line.partition("] ")[2] or line
    return line.partition(" SQLSTATE:")[0].rstrip(".")


def abbreviated_sql(sql: str) -> str:
    text = " ".join(sql.split())
    return f"`{text if len(text) <= 80 else text[:79] + '…'}`"


# --- rules for a chunk as a whole: keys, number of rows, a function of its frame ---


COMPARED_CHUNKS = 5
"""Chunks that the number of rows is compared with."""


@dataclass(frozen=True)
class UniqueRule(Rule):
    """No two rows have the same values in these columns; as in SQL, a NULL equals nothing."""

    hint: str = ""
    """Follows a failure, where columns may be meant as one key."""

    def judge(
        self, prefix: str, evidence: Evidence, frame: Frame, last: Sequence[int], chunk: Chunk
    ) -> Checked:
        from pyspark.sql import functions as F

        df, fault = frame(), None
        if fault := self.wrong(df):
            return self.failed(fault, rows=evidence.rows)
        whole = df.where(" and ".join(f"{quoted(column)} is not null" for column in self.columns))
        # By number: a column may have the name of the count.
        keys = [f"{quoted(name)} as c{at}" for at, name in enumerate(self.columns)]
        counted = whole.selectExpr(*keys).groupBy(*(f"c{at}" for at in range(len(keys))))
        twice = counted.agg(F.expr("count(1) as times")).where("times > 1")
        [(values, rows)] = twice.selectExpr("count(1)", "coalesce(sum(times), 0)").collect()
        if not values:
            return self.passed(rows=evidence.rows, violations=0)
        sample = sample_keys(twice, self.columns, "times")
        return self.failed(
            f"{rows:,} of {evidence.rows:,} rows share {', '.join(self.columns)} with another"
            f" ({values:,} {'values' if values > 1 else 'value'}), such as {sample}{self.hint}",
            rows=evidence.rows,
            violations=rows,
            sample=sample,
        )

    def _analyze(self, df: "DataFrame") -> str | None:
        return str(df.groupBy(*map(quoted, self.columns)).count().schema) and None


@dataclass(frozen=True)
class RowsRule(Rule):
    """The number of rows, compared with limits and with the last chunks."""

    is_late: ClassVar[bool] = True

    least: int | None = None
    most: int | None = None
    change: float | None = None

    def judge(
        self, prefix: str, evidence: Evidence, frame: Frame, last: Sequence[int], chunk: Chunk
    ) -> Checked:
        rows, known = evidence.rows, list(last)[-COMPARED_CHUNKS:]
        count = f"{rows:,} {'row' if rows == 1 else 'rows'}"
        if self.least is not None and rows < self.least:
            return self.failed(f"{count}, expected at least {self.least:,}", rows=rows)
        if self.most is not None and rows > self.most:
            return self.failed(f"{count}, expected at most {self.most:,}", rows=rows)
        mean = sum(known) / len(known) if known else None
        if self.change is None or mean is None or abs(rows - mean) <= self.change * mean:
            return self.passed(rows=rows)
        by = f" ({(rows - mean) / mean:+.0%})" if mean else ""
        chunks = "the last chunk's" if len(known) == 1 else f"the mean of the last {len(known)}"
        return self.failed(
            f"{count}, against {mean:,.0f} as {chunks}{by}: at most ±{self.change:.0%} is expected",
            rows=rows,
            mean=mean,
        )


@dataclass(frozen=True)
class FunctionRule(Rule):
    """A function of the frame, which returns True, False, or what is wrong."""

    fn: Callable[..., Any] = bool

    def judge(
        self, prefix: str, evidence: Evidence, frame: Frame, last: Sequence[int], chunk: Chunk
    ) -> Checked:
        try:
            answer = self.fn(frame(), chunk) if _takes_chunk(self.fn) else self.fn(frame())
        except Exception as error:
            return self.failed(f"it raised {in_a_line(error) or reason_of(error)}")
        if isinstance(answer, str):
            return self.failed(answer) if answer else self.passed()
        if hasattr(answer, "passed"):
            message = getattr(answer, "message", None) or getattr(answer, "description", None)
            given = getattr(answer, "severity", self.severity)
            severity = WARN if WARN in (getattr(given, "value", given), self.severity) else ERROR
            more = getattr(answer, "metadata", None) or {}
            return Checked(
                self.name, self.datasetid, bool(answer.passed), tidy(message or ""), more, severity
            )
        if isinstance(answer, bool) or type(answer).__name__ in ("bool", "bool_"):  # numpy's, too
            return self.passed() if answer else self.failed("it returned False")
        kind = type(answer).__name__
        return self.failed(f"it returned a {kind}: return True, False, or what is wrong")


def _takes_chunk(fn: Callable[..., Any]) -> bool:
    """Whether the second parameter is for the chunk: one with a default must be named for it."""
    try:
        signature = inspect.signature(fn)
        signature.bind(None, None)
    except (TypeError, ValueError):
        return False
    second = [*signature.parameters.values()][1:2]
    return all(
        value.default is value.empty or value.name == CHUNK or type_name(value) == Chunk.__name__
        for value in second
    )


# --- samples of rows that break a rule ---


SAMPLE_ROWS, SAMPLE_COLUMNS, SAMPLE_LETTERS = 5, 4, 30


def sample_rows(df: "DataFrame", condition: str, first: Sequence[str]) -> str:
    """Return rows that meet a condition: the columns named first, then others, as space allows."""
    folded = {name.casefold() for name in first}
    fields = sorted(df.schema.fields, key=lambda field: field.name.casefold() not in folded)[
        :SAMPLE_COLUMNS
    ]
    rows = df.where(condition).limit(SAMPLE_ROWS).selectExpr(*map(_text, fields)).collect()
    names = [field.name for field in fields]
    return ", ".join(_row_text(names, row) for row in rows)


def sample_keys(counted: "DataFrame", columns: Sequence[str], times: str) -> str:
    """Return the most frequent values, with their counts."""
    fields = [field for field in counted.schema.fields if field.name != times]
    found = counted.orderBy(counted[times].desc()).limit(SAMPLE_ROWS)
    rows = found.selectExpr(*map(_text, fields), times).collect()
    return ", ".join(f"{_row_text(columns, row[:-1])} {row[-1]:,}×" for row in rows)


def _text(field: "StructField") -> str:
    """Return a value as text, cut by Spark: large values stay where they are."""
    from pyspark.sql import types

    name = quoted(field.name)
    if isinstance(field.dataType, types.BinaryType):
        return f"concat('0x', left(hex({name}), {SAMPLE_LETTERS}))"
    text = f"left(cast({name} as string), {SAMPLE_LETTERS + 1})"
    return f"concat('''', {text}, '''')" if isinstance(field.dataType, types.StringType) else text


def _row_text(names: Sequence[str], values: Sequence[str | None]) -> str:
    pairs = (
        f"{name}={'NULL' if value is None else _short(value)}"
        for name, value in zip(names, values, strict=True)
    )
    return f"({', '.join(pairs)})"


def _short(text: str) -> str:
    return text if len(text) <= SAMPLE_LETTERS + 2 else text[:SAMPLE_LETTERS] + "…"
