"""Values that a table would round in silence: they are refused, by column and count."""

from collections.abc import Sequence

from ..errors import Refused
from ..location import Table


def refuse_losses(
    table: Table, dataid: str, rows: int, found: Sequence[tuple[str, str, str, int]]
) -> None:
    """Refuse a chunk if a column (its name, type in the frame, type in the table) would lose some.

    What is published would have other values than its fingerprint says.
    """
    told = [
        f"{name!r} is {kind} in the frame and {there} in the table, which can't keep {count} of "
        f"{rows} values as they are"
        for name, kind, there, count in found
        if count
    ]
    if told:
        raise Refused(
            f"Chunk {dataid!r} doesn't fit the table {table.location}: {'; '.join(told)}. Round or "
            "cast it in the job.",
            code="NOT_VALIDATED",
        )
