"""A frame in the schema of its dataset, as far as who makes it has declared how to get there."""

from typing import TYPE_CHECKING

from ..dataflow.chunk import ChunkFailed
from ..dataflow.names import printable
from .evidence import schema_text
from .jobs import ANY, MERGE
from .last import Last
from .schemas import compare, fitted, merged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["fit"]


def fit(df: "DataFrame", last: Last, dataid: str, rule: str, declared: str) -> "DataFrame":
    """The frame, or `ChunkFailed` if its columns aren't those of the last chunk.

    `rule` says what to do then; `declared`, how a rule is declared, with a `{}` for it.
    """
    if rule == ANY:
        return df
    was, now = last.schema(dataid), schema_text(df.schema)
    if was is None or not (differences := compare(was[1], now)):
        return df
    told = f"{last.datasetid!r} differs from its last chunk {printable(was[0])!r}: " + "; ".join(
        differences
    )
    if rule == MERGE:
        if (both := merged(was[1], now)) is not None:
            return fitted(df, both)
        raise ChunkFailed(f"NOT_VALIDATED: the schema of {told}, which can't be merged.")
    raise ChunkFailed(
        f"NOT_VALIDATED: the schema of {told}. If it is meant so: {declared.format(MERGE)}, "
        f'or "{ANY}".'
    )
