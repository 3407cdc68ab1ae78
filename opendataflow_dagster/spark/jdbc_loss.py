"""Values that a table behind Java's drivers would round: counted by Spark while it writes them.

What a database makes of a number is its own; whether the column's type has it, Spark can tell.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .schema import EXACT, WHOLE, quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

_MOST = {"float": "9223371487098961920", "double": "9223372036854774784"}
"""The largest number below 2^63 that a type has: the next is no bigint any more."""

_TIMES = ("timestamp", "timestamp_ntz")
_MICROSECONDS = 6

Losses = Callable[[], list[tuple[str, str, str, int]]]
"""Column, type in the frame, type in the table, how many values the latter hasn't."""


def watched(
    df: "DataFrame", there: "StructType", digits: Mapping[str, int]
) -> tuple["DataFrame", Losses]:
    """The frame as it is to be written into such a table, and what that will have lost."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as F

    from .evidence import Observed

    types = {field.name: field.dataType for field in there}
    sent, lost, told = [], [], []
    for field in df.schema:
        name, kind = quoted(field.name), field.dataType
        target, scale = types.get(field.name), digits.get(field.name, _MICROSECONDS)
        if target is not None and _is_rounded(kind, target):
            # Not left to the database, which may take fewer digits of a double than it has.
            cast = f"try_cast({name} as {target.simpleString()})"
            sent.append(f"{cast} as {name}")
            lost.append(_lost(name, cast, kind, target))
            told.append((field.name, kind.simpleString(), target.simpleString()))
            continue
        sent.append(name)
        if kind.simpleString() in _TIMES and scale < _MICROSECONDS:
            rest = f"unix_micros(cast({name} as timestamp)) % {10 ** (_MICROSECONDS - scale)}"
            lost.append(f"{rest} <> 0")
            told.append((field.name, kind.simpleString(), f"timestamp({scale})"))
    if not lost:
        return df, list
    observation: Any = Observation()
    counts = [F.expr(f"count_if({each}) as lost_{at}") for at, each in enumerate(lost)]
    taken = Observed(df, observation, "")

    def losses() -> list[tuple[str, str, str, int]]:
        seen = taken.told()
        return [(*each, seen.get(f"lost_{at}") or 0) for at, each in enumerate(told)]

    return df.observe(observation, *counts).selectExpr(*sent), losses


def _lost(name: str, cast: str, kind: "DataType", target: "DataType") -> str:
    """What is true of a value that isn't the same any more once it is cast there and back."""
    source, most = kind.simpleString(), _MOST.get(target.simpleString())
    if source not in WHOLE or most is None:
        return f"not ({name} <=> try_cast({cast} as {source}))"
    # The cast back takes what is too large by one for the largest.
    return f"({name} > {most}L or not (cast({name} as bigint) <=> try_cast({cast} as bigint)))"


def _is_rounded(kind: "DataType", target: "DataType") -> bool:
    """Whether a type hasn't every value of another that it takes."""
    source, into = (each.simpleString().partition("(")[0] for each in (kind, target))
    if source in _TIMES:
        return into == "date"
    numbers = (*WHOLE, "decimal", "float", "double")
    if kind == target or source not in numbers or into not in numbers:
        return False
    if into in WHOLE:
        return source not in WHOLE  # one that is too large is an error
    if into in EXACT:
        return source not in EXACT[into]
    if source in WHOLE:
        return False
    return source != "decimal" or getattr(kind, "scale", 0) > getattr(target, "scale", 0)
