"""A few rows of a frame, on a line, for somebody who asks what is wrong with them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .row_hash import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField

ROWS, COLUMNS, LETTERS = 5, 4, 30


def of_rows(df: "DataFrame", condition: str, first: Sequence[str]) -> str:
    """Rows that meet a condition: the columns named first, then others, as far as there's room."""
    folded = {each.casefold() for each in first}
    fields = sorted(df.schema.fields, key=lambda each: each.name.casefold() not in folded)[:COLUMNS]
    rows = df.where(condition).limit(ROWS).selectExpr(*map(_text, fields)).collect()
    names = [each.name for each in fields]
    return ", ".join(_shown(names, row) for row in rows)


def of_keys(counted: "DataFrame", columns: Sequence[str], times: str) -> str:
    """The values that come most often, with how often they do."""
    fields = [each for each in counted.schema.fields if each.name != times]
    found = counted.orderBy(counted[times].desc()).limit(ROWS)
    rows = found.selectExpr(*map(_text, fields), times).collect()
    return ", ".join(f"{_shown(columns, row[:-1])} {row[-1]:,}×" for row in rows)


def _text(field: "StructField") -> str:
    """A value as a text, cut by Spark: what is large stays where it is."""
    from pyspark.sql import types

    name = quoted(field.name)
    if isinstance(field.dataType, types.BinaryType):
        return f"concat('0x', left(hex({name}), {LETTERS}))"
    text = f"left(cast({name} as string), {LETTERS + 1})"
    return f"concat('''', {text}, '''')" if isinstance(field.dataType, types.StringType) else text


def _shown(names: Sequence[str], values: Sequence[str | None]) -> str:
    told = (
        f"{name}={'NULL' if value is None else _short(value)}"
        for name, value in zip(names, values, strict=True)
    )
    return f"({', '.join(told)})"


def _short(text: str) -> str:
    return text if len(text) <= LETTERS + 2 else text[:LETTERS] + "…"
