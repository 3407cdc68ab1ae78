"""Frames from one engine to another: pandas, Spark, and pandas-on-Spark."""

import warnings
from typing import TYPE_CHECKING, Any

from .annotation import ON_SPARK, PANDAS, SPARK
from .transformation import TransformationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def kind_of(frame: Any) -> str | None:
    """The engine whose frame this is; None if it is something else."""
    module, _, name = type(frame).__module__, 0, type(frame).__name__
    if module.startswith("pyspark.pandas."):
        return ON_SPARK if name in ("DataFrame", "CachedDataFrame") else None
    if module.startswith("pyspark.sql."):
        return SPARK if name == "DataFrame" else None
    import pandas

    return PANDAS if isinstance(frame, pandas.DataFrame) else None


def as_pandas(frame: Any) -> Any:
    """A frame of pandas with all the rows; what is one already stays the same object."""
    kind = kind_of(frame)
    if kind == PANDAS:
        return frame
    if kind == ON_SPARK:
        with warnings.catch_warnings(action="ignore"):  # it advises against what is wanted here
            return frame.to_pandas()
    if kind == SPARK:
        return frame.toPandas()
    return frame.pandas()


def as_spark(frame: Any, spark: "SparkSession") -> Any:
    """A frame of Spark; an index isn't a column, and is left out."""
    kind = kind_of(frame)
    if kind == SPARK:
        return frame
    if kind == ON_SPARK:
        with warnings.catch_warnings(action="ignore"):
            return frame.to_spark()
    if kind == PANDAS:
        return _sent(frame, spark)
    return frame.spark(spark)


def as_on_spark(frame: Any, spark: "SparkSession") -> Any:
    """A frame of pandas-on-Spark that is the caller's own."""
    import pyspark.pandas as ps

    kind = kind_of(frame)
    if kind == ON_SPARK:
        return frame.copy()
    if kind == PANDAS:
        return ps.from_pandas(frame)
    return as_spark(frame, spark).pandas_api()


def _sent(frame: Any, spark: "SparkSession") -> Any:
    import pyarrow
    from pyspark.sql.types import StructType

    if not len(frame.columns):
        return spark.createDataFrame([()] * len(frame), StructType())
    names, columns = [str(each) for each in frame.columns], []
    for at, name in enumerate(names):
        try:
            column = pyarrow.Array.from_pandas(frame.iloc[:, at])
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
            kinds = sorted({type(each).__name__ for each in frame.iloc[:, at]})
            raise TransformationError(
                f"Column {name!r} can't go to Spark: it has {', '.join(kinds)}. Give its values "
                "one type in the transformation before."
            ) from None
        columns.append(_known_to_spark(column))
    return spark.createDataFrame(pyarrow.table(columns, names=names))  # pyright: ignore


def _known_to_spark(column: Any) -> Any:
    """The column with a type that Spark has."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        return _known_to_spark(column.cast(kind.value_type))
    if pyarrow.types.is_null(kind):
        return column.cast(pyarrow.string())
    if pyarrow.types.is_timestamp(kind) and kind.unit != "us":
        return column.cast(pyarrow.timestamp("us", kind.tz), safe=False)
    if pyarrow.types.is_duration(kind) and kind.unit != "us":
        return column.cast(pyarrow.duration("us"), safe=False)
    if pyarrow.types.is_unsigned_integer(kind):
        wider = {8: pyarrow.int16(), 16: pyarrow.int32(), 32: pyarrow.int64()}
        return column.cast(wider.get(kind.bit_width, pyarrow.decimal128(20, 0)))
    return column
