"""What is recorded of a chunk, taken while it is written: rows, fingerprint, schema."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from ..errors import DataflowError
from .row_hash import quoted, row_hash
from .schema import schema_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation

__all__ = ["Evidence", "Observed", "observed", "of_groups", "schema_text"]

ROWS, HIGH, LOW = "odf_rows", "odf_high", "odf_low"
PATIENCE = 60.0
"""Seconds that Spark may take after a job to tell what it observed: a lost event is never told."""


class Evidence(NamedTuple):
    """What is known of a chunk's rows; `told` is what the extra expressions gave."""

    rows: int
    fingerprint: str
    schema: str
    told: Mapping[str, Any] = {}


class Unseen(DataflowError):
    """What Spark observed isn't what was written."""


class Observed:
    """What a frame's first action saw of its rows: call it after that action."""

    def __init__(self, frame: "DataFrame", observation: "Observation", schema: str) -> None:
        self._frame, self._observation, self._schema = frame, observation, schema

    def __call__(self, rows: int | None = None) -> Evidence:
        """The evidence, once Spark has told it; `rows` is the count of what was written: give it.

        After a job that failed, or one that had to do tasks again, Spark tells of part of the rows,
        or of some twice: it doesn't say so, only another count does.
        """
        told = self.told()
        seen = told.get(ROWS)
        if rows is None and seen == 0 and not self._frame.isEmpty():
            rows = -1
        if seen is None or (rows is not None and rows != seen):
            saw = "nothing" if seen is None else f"{seen:,} rows"
            there = "others are there" if rows is None or rows < 0 else f"{rows:,} are there"
            raise Unseen(
                f"Spark observed {saw} of this chunk, but {there}: its job has failed, or did tasks"
                " again. Nothing of it may be recorded: run the chunk again."
            )
        return _evidence(told, self._schema)

    def told(self) -> dict[str, Any]:
        """What Spark has told of the aggregates; nothing if it lost them."""
        from pyspark.errors import PySparkException

        waiting = getattr(self._observation, "_jo", None)  # there is none on Spark Connect
        if waiting is not None:
            until, pause, future = time.monotonic() + PATIENCE, 0.0005, waiting.future()
            while not future.isCompleted():
                if time.monotonic() > until:
                    raise DataflowError(
                        f"Spark didn't tell within {PATIENCE:.0f} s what it observed of this chunk:"
                        " it was never written, or Spark dropped the event. Run the chunk again."
                    )
                time.sleep(pause)
                pause = min(pause * 2, 0.05)
        try:
            return self._observation.get
        except PySparkException:
            return {}


def observed(df: "DataFrame", extra: Sequence[str] = ()) -> tuple["DataFrame", Observed]:
    """The frame, and what its first action will have seen of it; `extra` are aggregates with alias.

    The fingerprint of more than 2^31 rows overflows, which Spark tells as an error.
    """
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    schema = df.schema
    observation = Observation(f"odf_{uuid4().hex}")
    seen = df.observe(observation, *map(F.expr, [*_aggregates(row_hash(schema)), *extra]))
    return seen, Observed(df, observation, schema_text(schema))


def of_frame(df: "DataFrame", extra: Sequence[str] = ()) -> Evidence:
    """The evidence of a frame's rows, in a pass of its own."""
    from pyspark.sql import functions as F

    schema = df.schema
    told = df.agg(*map(F.expr, [*_aggregates(row_hash(schema)), *extra])).collect()[0]
    return _evidence(told.asDict(recursive=False), schema_text(schema))


def of_groups(df: "DataFrame", column: str, extra: Sequence[str] = ()) -> dict[str, Evidence]:
    """The evidence of each chunk of a frame of many, by the column that holds the dataid."""
    from pyspark.sql import functions as F

    kept = [each for each in df.schema.fields if each.name != column]
    schema = schema_text(type(df.schema)(kept))
    aggregates = [*_aggregates(row_hash(df.schema, without=[column])), *extra]
    key = F.expr(f"{quoted(column)} as odf_key")
    rows = df.groupBy(key).agg(*map(F.expr, aggregates)).collect()
    told = [each.asDict(recursive=False) for each in rows]
    return {str(each.pop("odf_key")): _evidence(each, schema) for each in told}


def _aggregates(hash_of_row: str) -> list[str]:
    """A sum of 64-bit numbers overflows where ANSI is on: two sums of their halves don't."""
    return [
        f"count(1) as {ROWS}",
        f"sum(shiftright({hash_of_row}, 32)) as {HIGH}",
        f"sum({hash_of_row} & 4294967295L) as {LOW}",
    ]


def _evidence(told: Mapping[str, Any], schema: str) -> Evidence:
    rows = told[ROWS]
    total = ((told[HIGH] or 0) << 32) + (told[LOW] or 0)
    others = {name: value for name, value in told.items() if name not in (ROWS, HIGH, LOW)}
    return Evidence(rows, f"{rows}-{total % 2**64:016x}", schema, others)
