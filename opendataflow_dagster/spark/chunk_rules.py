"""The rules that a chunk has to meet as a whole: keys, how many rows, a function of its frame."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..chunk import ERROR, WARN, Checked, Chunk, reason_of
from ..util.text import tidy
from .error_text import in_a_line
from .evidence import Evidence
from .job import CHUNK, type_name
from .row_hash import quoted
from .row_rules import Frame, Rule
from .samples import of_keys

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

KNOWN = 5
"""Chunks that the number of rows is compared with."""


@dataclass(frozen=True)
class UniqueRule(Rule):
    """No two rows have the same values in these columns; as in SQL, a NULL equals nothing."""

    hint: str = ""
    """What follows a failure, where columns may be meant as one key."""

    def judge(
        self, prefix: str, evidence: Evidence, frame: Frame, last: Sequence[int], chunk: Chunk
    ) -> Checked:
        from pyspark.sql import functions as F

        df, told = frame(), None
        if told := self.wrong(df):
            return self.failed(told, rows=evidence.rows)
        whole = df.where(" and ".join(f"{quoted(each)} is not null" for each in self.columns))
        # By number: a column may be called as the count is.
        keys = [f"{quoted(each)} as c{at}" for at, each in enumerate(self.columns)]
        counted = whole.selectExpr(*keys).groupBy(*(f"c{at}" for at in range(len(keys))))
        twice = counted.agg(F.expr("count(1) as times")).where("times > 1")
        [(values, rows)] = twice.selectExpr("count(1)", "coalesce(sum(times), 0)").collect()
        if not values:
            return self.passed(rows=evidence.rows, violations=0)
        sample = of_keys(twice, self.columns, "times")
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
    """The number of rows, against bounds and against the last chunks."""

    is_late: ClassVar[bool] = True

    least: int | None = None
    most: int | None = None
    change: float | None = None

    def judge(
        self, prefix: str, evidence: Evidence, frame: Frame, last: Sequence[int], chunk: Chunk
    ) -> Checked:
        rows, known = evidence.rows, list(last)[-KNOWN:]
        told = f"{rows:,} {'row' if rows == 1 else 'rows'}"
        if self.least is not None and rows < self.least:
            return self.failed(f"{told}, expected at least {self.least:,}", rows=rows)
        if self.most is not None and rows > self.most:
            return self.failed(f"{told}, expected at most {self.most:,}", rows=rows)
        mean = sum(known) / len(known) if known else None
        if self.change is None or mean is None or abs(rows - mean) <= self.change * mean:
            return self.passed(rows=rows)
        by = f" ({(rows - mean) / mean:+.0%})" if mean else ""
        chunks = "the last chunk's" if len(known) == 1 else f"the mean of the last {len(known)}"
        return self.failed(
            f"{told}, against {mean:,.0f} as {chunks}{by}: at most ±{self.change:.0%} is expected",
            rows=rows,
            mean=mean,
        )


@dataclass(frozen=True)
class FunctionRule(Rule):
    """A function of the frame, which answers True, False, or what is wrong."""

    fn: Callable[..., Any] = bool

    def judge(
        self, prefix: str, evidence: Evidence, frame: Frame, last: Sequence[int], chunk: Chunk
    ) -> Checked:
        try:
            told = self.fn(frame(), chunk) if _takes_chunk(self.fn) else self.fn(frame())
        except Exception as error:
            return self.failed(f"it raised {in_a_line(error) or reason_of(error)}")
        if isinstance(told, str):
            return self.failed(told) if told else self.passed()
        if hasattr(told, "passed"):
            message = getattr(told, "message", None) or getattr(told, "description", None)
            asked = getattr(told, "severity", self.severity)
            severity = WARN if WARN in (getattr(asked, "value", asked), self.severity) else ERROR
            more = getattr(told, "metadata", None) or {}
            return Checked(
                self.name, self.datasetid, bool(told.passed), tidy(message or ""), more, severity
            )
        if isinstance(told, bool) or type(told).__name__ in ("bool", "bool_"):  # numpy's too
            return self.passed() if told else self.failed("it answered False")
        kind = type(told).__name__
        return self.failed(f"it returned a {kind}: return True, False, or what is wrong")


def _takes_chunk(fn: Callable[..., Any]) -> bool:
    """Whether the second parameter is for the chunk: one with a default has to say so."""
    try:
        signature = inspect.signature(fn)
        signature.bind(None, None)
    except (TypeError, ValueError):
        return False
    second = [*signature.parameters.values()][1:2]
    return all(
        each.default is each.empty or each.name == CHUNK or type_name(each) == Chunk.__name__
        for each in second
    )
