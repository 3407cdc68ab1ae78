"""Convert frames between the engines: pandas and Spark."""

from collections.abc import Container, Sequence
from typing import TYPE_CHECKING, Any

from ..spark.text_formats import retyped
from .transformation import PANDAS, SPARK, TransformationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def kind_of(frame: Any) -> str | None:
    """The engine whose frame this is; None if it is something else."""
    module, name = type(frame).__module__, type(frame).__name__
    if module.startswith("pyspark.sql."):
        return SPARK if name == "DataFrame" else None
    import pandas

    return PANDAS if isinstance(frame, pandas.DataFrame) else None


def as_pandas(frame: Any) -> Any:
    """A frame of pandas with all the rows; what is one already stays the same object."""
    kind = kind_of(frame)
    if kind == PANDAS:
        return frame
    if kind == SPARK:
        return by_the_clock(frame).toPandas()
    return frame.pandas()


def as_spark(frame: Any, spark: Any = None) -> Any:
    """A frame of Spark; an index isn't a column, and is left out.

    One that isn't Spark's already needs the session.
    """
    kind = kind_of(frame)
    if kind == SPARK:
        return frame
    if kind == PANDAS:
        names = [str(name) for name in frame.columns]
        columns = [_as_arrow(name, frame.iloc[:, at]) for at, name in enumerate(names)]
        return sent(spark, names, columns, len(frame))
    return frame.spark(spark)


def by_the_clock(frame: Any, but: Container[str] = ()) -> Any:
    """A frame of Spark whose moments have become the times that the session's clock shows.

    Spark casts them, as it has read them: the zones that it knows and those of pandas differ, and
    what they say of times before 1900. Columns called as in `but` stay as they are.
    """
    fields = frame.schema.fields
    plain = frame.toDF(*(str(at) for at in range(len(fields))))  # two may have one name
    columns, changed = [], False
    for at, field in enumerate(fields):
        column, kind = plain[str(at)], _without_zone(field.dataType)
        if kind != field.dataType and field.name not in but:
            column, changed = column.cast(kind), True
        columns.append(column.alias(field.name))
    return plain.select(*columns) if changed else frame


def _without_zone(kind: Any) -> Any:
    from pyspark.sql import types

    return retyped(
        kind,
        lambda leaf: types.TimestampNTZType() if isinstance(leaf, types.TimestampType) else leaf,
    )


# --- from pandas to Spark ---

_REFUSALS = (ValueError, TypeError, OverflowError, AttributeError)
"""What Arrow raises, besides its own, for values that it doesn't know what to do with."""


def sent(spark: "SparkSession", names: Sequence[str], columns: Sequence[Any], rows: int) -> Any:
    """A frame of Spark with such columns of Arrow; a time without a zone stays one."""
    import pyarrow
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructType

    if not columns:
        return spark.createDataFrame([()] * rows, StructType())
    table = pyarrow.table(list(columns), names=list(names))
    return spark.createDataFrame(table, from_arrow_schema(table.schema))


def arrow(column: Any) -> Any:
    """A column of pandas as one of Arrow, of a type that Spark has; TypeError: there is none."""
    import pyarrow
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_type

    if str(getattr(column.dtype, "tz", None) or "UTC") != "UTC":  # Arrow doesn't know all zones
        column = column.dt.tz_convert("UTC")
    try:
        made = _known_to_spark(pyarrow.Array.from_pandas(column))
        from_arrow_type(made.type)
    except (pyarrow.ArrowException, PySparkException, *_REFUSALS) as error:
        raise TypeError(str(error)) from None
    return made


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
    return sent(spark, [str(name) for name in frame.columns], columns, len(frame))


def _as_arrow(name: str, column: Any) -> Any:
    """The column as one of Arrow, or an error that names the column and its types."""
    try:
        return arrow(column)
    except TypeError:
        kinds = ", ".join(sorted({type(cell).__name__ for cell in column}))
        raise TransformationError(
            f"Column {name!r} can't go to Spark: it has {kinds}. Give its values one type, which "
            "Spark has, in the transformation before."
        ) from None


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
    if pyarrow.types.is_float16(kind):
        return column.cast(pyarrow.float32())
    if pyarrow.types.is_decimal256(kind):  # which fails beyond the 38 digits that Spark has
        return column.cast(pyarrow.decimal128(kind.precision, kind.scale))
    if pyarrow.types.is_unsigned_integer(kind):
        wider = {8: pyarrow.int16(), 16: pyarrow.int32(), 32: pyarrow.int64()}
        return column.cast(wider.get(kind.bit_width, pyarrow.decimal128(20, 0)))
    return column
