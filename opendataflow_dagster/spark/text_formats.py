"""What a format of files can't hold: refused when it is written, or put in another way."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import WrongUse
from .row_hash import quoted
from .schema_text import schema_of, schema_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


def check(schema: "StructType", format: str) -> None:
    """Refuse a frame that Spark would write, and whose values would come back as others."""
    from pyspark.sql.types import BinaryType, MapType, StringType

    for each in schema.fields:
        if format == "json" and any(
            isinstance(kind, MapType) and not isinstance(kind.keyType, StringType)
            for kind in _within(each.dataType)
        ):
            raise WrongUse(
                f"Column {each.name!r} has a map whose keys aren't texts, and in JSON nobody could "
                "read it. Cast the keys to string, or register the dataset with --format parquet."
            )
        if format == "csv" and isinstance(each.dataType, BinaryType):
            raise WrongUse(
                f"Column {each.name!r} is binary, which CSV can't hold. Return "
                f"base64({quoted(each.name)}), or register the dataset with --format parquet."
            )
        if format == "orc" and (odd := next((name for name in _names(each) if "`" in name), None)):
            raise WrongUse(
                f"A column is called {odd!r}, and in ORC Spark finds no values of a name with a "
                "backtick. Rename it, or register the dataset with --format parquet."
            )


def storable(df: "DataFrame", format: str) -> "DataFrame":
    """The frame as a format holds it: ORC knows no collations."""
    return _cast(df, plain(df.schema)) if format == "orc" else df


def restored(df: "DataFrame", schema: "StructType", format: str) -> "DataFrame":
    """The frame that was written, of what the format held of it."""
    return _cast(df, schema) if format == "orc" else df


def plain(kind: Any) -> Any:
    """A type whose texts have no collation."""
    from pyspark.sql import types

    return retyped(
        kind, lambda leaf: types.StringType() if isinstance(leaf, types.StringType) else leaf
    )


def retyped(kind: Any, change: Callable[[Any], Any]) -> Any:
    """A type, with what `change` makes of each type within it that holds no others."""
    from pyspark.sql import types

    def inner(kind: Any) -> Any:
        return retyped(kind, change)

    match kind:
        case types.StructType():
            return types.StructType(
                [
                    types.StructField(each.name, inner(each.dataType), each.nullable, each.metadata)
                    for each in kind.fields
                ]
            )
        case types.ArrayType():
            return types.ArrayType(inner(kind.elementType), kind.containsNull)
        case types.MapType():
            return types.MapType(inner(kind.keyType), inner(kind.valueType), kind.valueContainsNull)
        case _:
            return change(kind)


def _cast(df: "DataFrame", schema: "StructType") -> "DataFrame":
    from pyspark.sql import functions as F

    if plain(schema) == schema and plain(df.schema) == df.schema:
        return df
    wanted = schema_of(schema_text(schema))  # whose parts may be NULL: of a file, all may be
    return df.select(
        *(F.col(quoted(each.name)).cast(each.dataType).alias(each.name) for each in wanted.fields)
    )


def _names(field: Any) -> Iterator[str]:
    """A column's name, and those of the fields within it."""
    yield field.name
    for kind in _within(field.dataType):
        yield from (each.name for each in getattr(kind, "fields", ()))


def _within(kind: Any) -> Iterator[Any]:
    """A type, and those of which it consists."""
    kinds = [kind]
    while kinds:
        yield (kind := kinds.pop())
        kinds += [
            getattr(kind, each)
            for each in ("elementType", "keyType", "valueType")
            if hasattr(kind, each)
        ]
        kinds += [each.dataType for each in getattr(kind, "fields", ())]
