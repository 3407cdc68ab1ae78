"""A frame in the schema of its dataset, as far as who makes it has declared how to get there."""

from typing import TYPE_CHECKING

from ..chunk import ChunkFailed
from ..util.text import printable, typed
from .evidence import schema_text
from .job import ANY, MERGE
from .last_chunk import Last
from .schema import compare, fitted, merged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["confirm", "fit"]


def fit(df: "DataFrame", last: Last, dataid: str, rule: str, declared: str) -> "DataFrame":
    """The frame, or `ChunkFailed` if its columns aren't those of the last chunk.

    `rule` says what to do then; `declared`, how a rule is declared, with a `{}` for it.
    """
    schema = _wanted(schema_text(df.schema), last, dataid, rule, declared)
    return df if schema is None else fitted(df, schema)


def confirm(schema: str, last: Last, dataid: str, rule: str, declared: str, *, jobid: str) -> None:
    """`ChunkFailed` if a chunk that was written with this schema isn't right as it is any more."""
    both = _wanted(schema, last, dataid, rule, declared)
    if both is not None and compare(both, schema):
        was = last.schema(dataid)
        raise ChunkFailed(
            f"NOT_VALIDATED: while this chunk of {last.datasetid!r} was made, chunk "
            f"{printable(was[0] if was else '')!r} was published with columns that this one hasn't."
            f" Make it again: odf resubmit {typed(jobid, dataid)}"
        )


def _wanted(schema: str, last: Last, dataid: str, rule: str, declared: str) -> str | None:
    """The schema that a chunk is to be given; None if its own will do."""
    if rule == ANY:
        return None
    was = last.schema(dataid)
    if was is None or not (differences := compare(was[1], schema)):
        return None
    told = f"{last.datasetid!r} differs from its last chunk {printable(was[0])!r}: " + "; ".join(
        differences
    )
    if rule == MERGE:
        if (both := merged(was[1], schema)) is not None:
            return both
        raise ChunkFailed(f"NOT_VALIDATED: the schema of {told}, which can't be merged.")
    raise ChunkFailed(
        f"NOT_VALIDATED: the schema of {told}. If it is meant so: {declared.format(MERGE)}, "
        f'or "{ANY}".'
    )
