"""A CSV file as a frame of Spark, with the values and types that pandas gives it."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..spark.foreign_files import declared
from ..spark.read import CSV, NO_VALUE, literal
from ..spark.text_formats import WHOLE_FILE_BYTES
from ..store.csv_options import CsvOptions
from .convert import arrow, sent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS = 200_000
"""Rows that are looked at at once, to find the types of a large file."""


def read_csv(
    spark: "SparkSession", path: str, by_pandas: Callable[[], Any], options: CsvOptions
) -> "DataFrame":
    """The frame that pandas reads, as one of Spark; a large file is read by Spark's own tasks."""
    if os.path.getsize(path) <= WHOLE_FILE_BYTES:
        return from_pandas(spark, by_pandas())
    types = _types(path, options)
    if types is None:
        return from_pandas(spark, by_pandas())
    return _large(spark, path, *types, options)


def from_pandas(spark: "SparkSession", frame: Any) -> "DataFrame":
    """A frame of pandas as one of Spark; what Spark has no type for becomes texts."""
    import pyarrow

    columns = []
    for _, column in frame.items():
        try:
            columns.append(arrow(column))
        except TypeError:
            texts = column.map(str, na_action="ignore")
            columns.append(pyarrow.array(texts, pyarrow.string(), from_pandas=True))
    return sent(spark, [str(each) for each in frame.columns], columns, len(frame))


def _types(path: str, options: CsvOptions) -> tuple[dict[str, str], bool] | None:
    """Column → type, and whether some values have several lines; None: it isn't a plain table."""
    import pandas

    seen: dict[str, set[str]] = {}
    rows = 0
    options.checked(path)
    reader: Any = pandas.read_csv(path, chunksize=ROWS, **options.for_pandas())
    with reader as parts:
        for part in parts:
            if not isinstance(part.index, pandas.RangeIndex):  # its lines are longer than the first
                return None
            rows += len(part)
            for name, column in part.items():
                kinds = seen.setdefault(str(name), set())
                if column.notna().any():
                    kinds.add(_kind(column))
    with open(path, "rb") as file:
        lines = sum(bool(line.strip()) for line in file)
    kinds = {name: _type(kinds) for name, kinds in seen.items()}
    return kinds | options.kinds(kinds), lines != rows + options.header


def _kind(column: Any) -> str:
    from pandas.api.types import infer_dtype

    kind = str(column.dtype)
    return "bool" if kind == "object" and infer_dtype(column, skipna=True) == "boolean" else kind


def _type(kinds: set[str]) -> str:
    if kinds <= {"float64"}:
        return "double"
    if kinds == {"int64"}:
        return "bigint"
    if kinds <= {"int64", "uint64", "float64"}:
        return "double" if "float64" in kinds else "decimal(20,0)"
    return "boolean" if kinds == {"bool"} else "string"


def _large(
    spark: "SparkSession", path: str, types: dict[str, str], lines: bool, options: CsvOptions
) -> "DataFrame":
    """The file by Spark: read as texts, of which pandas' words for nothing are NULL."""
    from pandas._libs.parsers import STR_NA_VALUES
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructType

    schema = StructType()
    for at in range(len(types)):
        schema.add(f"c{at}", StringType())
    told = {**CSV, "nullValue": NO_VALUE, "multiLine": str(lines).lower()}
    told |= declared(spark, options)
    nothing = ["", *filter(None, [options.null])] if options.typed else STR_NA_VALUES
    texts = spark.read.options(**told).schema(schema).csv(literal(path))
    found = []
    for at, (name, kind) in enumerate(types.items()):
        value = F.when(~F.col(f"c{at}").isin(*nothing), F.col(f"c{at}"))
        found.append(value.cast(kind).alias(name))
    return texts.select(*found)
