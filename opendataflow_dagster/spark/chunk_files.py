"""The files of a chunk, as Spark writes and reads them."""

import os
import shutil
from collections.abc import Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ..errors import Refused
from ..formats import Format, format_of, format_of_file
from ..formats.csv_options import UNDECLARED, CsvOptions
from ..formats.format import data_files
from ..storage import files
from .foreign_files import KnownSchema, read_foreign_files
from .progress import ending
from .text_formats import (
    WHOLE_FILE_BYTES,
    is_read_whole,
    restored,
    storable,
    without_collations,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_files(
    spark: "SparkSession",
    path: str,
    note: Mapping[str, Any],
    format: str,
    options: CsvOptions = UNDECLARED,
    known: KnownSchema | None = None,
) -> "DataFrame":
    """The files of one chunk: with the schema that its note tells, or as Spark finds it."""
    kind = note.get("format") or format_of_file(path, format).name
    found = spark_format(kind)
    reader = spark.read.format(kind).options(**_reader_options(kind, path, note))
    if schema := noted_schema(note):
        reader = reader.schema(schema if found.has_collations else without_collations(schema))
        return restored(reader.load(escaped_path(path)), schema, kind)
    if os.path.isdir(path) and not data_files(path):
        raise Refused(
            f"{path} has no files, so there is nothing to tell its columns by. Write an empty "
            "frame instead.",
            code="INVALID_LOCATION",
        )
    if found.is_text and (columns := note.get("columns")):
        schema = _as_pandas_had(reader, path, found, columns)
        if found.is_delimited and len(columns) == 1 and _has_empty_lines(path):
            rows = files.read_table(path, kind, columns)
            return spark.createDataFrame(rows, schema)  # pyright: ignore
        reader = reader.schema(schema)
    elif found.is_text:
        return read_foreign_files(spark, reader, path, escaped_path(path), kind, options, known)
    return reader.load(escaped_path(path))


def _has_empty_lines(path: str) -> bool:
    """Whether a row of one column has no value: Spark takes its line for none."""
    for each in data_files(path):
        with open(each, "rb") as file:
            if b"\n" in file:
                return True
    return False


def _as_pandas_had(reader: Any, path: str, format: Format, columns: Mapping[str, str]) -> Any:
    """The schema of a frame of pandas, by its dtypes: in a text file, 007 may be a number.

    Of what dtypes don't tell, Spark looks into the file.
    """
    from pyspark.sql.types import StringType, StructType

    columns = format.dtypes(data_files(path), columns)
    types = {name: _DTYPES.get(dtype.partition("[")[0]) for name, dtype in columns.items()}
    types |= {name: "timestamp" for name, dtype in columns.items() if "," in dtype}  # with its zone
    if not format.is_delimited:  # an object may be a list, there
        types = {name: None if columns[name] == "object" else each for name, each in types.items()}
    inferred = {}
    if None in types.values():
        inferred = {field.name: field.dataType for field in reader.load(escaped_path(path)).schema}
    schema = StructType()
    for name, each in types.items():
        schema.add(name, each or inferred.get(name, StringType()))
    return schema


_DTYPES = {
    "int8": "byte",
    "int16": "short",
    "int32": "integer",
    "int64": "long",
    "Int64": "long",
    "float32": "float",
    "float64": "double",
    "bool": "boolean",
    "boolean": "boolean",
    "object": "string",
    "string": "string",
    "datetime64": "timestamp_ntz",
}
"""A dtype of pandas and the type of Spark that its values in a text file have."""


def noted_schema(note: Mapping[str, Any]) -> Any:
    """The schema that a chunk was written with by Spark, if its note has it."""
    from pyspark.sql.types import StructType

    schema = note.get("schema")
    # Of a copy: it removes from what it is given where collations come from.
    return StructType.fromJson(deepcopy(schema)) if isinstance(schema, dict) else None


def escaped_path(path: str) -> str:
    """A path in which Spark sees no pattern."""
    return "".join(f"\\{each}" if each in "{}[]*?\\" else each for each in path)


def _reader_options(kind: str, path: str, note: Mapping[str, Any]) -> dict[str, str]:
    format = format_of(kind)
    options = dict(format.spark_reading)
    if format.is_delimited:
        options["multiLine"] = str(is_read_whole(path, note)).lower()
        if noted_schema(note) is None:
            options["inferSchema"] = "true"
    return options


def spark_format(name: str) -> Format:
    """The format of a name, if Spark reads and writes it."""
    format = format_of(name)
    if not format.in_spark:
        raise Refused(
            f"Spark has no format {name!r}. Use a DataFrame of pandas instead, or register the "
            "dataset with --format parquet.",
            code="INVALID_LOCATION",
        )
    return format


def write_files(df: "DataFrame", path: str, format: str, by: str | None = None) -> None:
    """Write a frame's files into an empty directory; of many chunks, by their column."""
    found = spark_format(format)
    found.refuse_schema(df.schema.jsonValue())
    writer = storable(df, format).write.format(format).mode("append")
    writer = writer.options(**found.spark_writing)
    with ending(df.sparkSession):
        (writer.partitionBy(by) if by else writer).save(path)


def remove_markers(path: str) -> int:
    """Remove what Spark leaves beside the data; the bytes of the data."""
    total = 0
    for above, folders, names in os.walk(path):
        for name in names:
            each = os.path.join(above, name)
            if name == "_SUCCESS" or (name.startswith(".") and name.endswith(".crc")):
                os.unlink(each)
            elif name[0] not in "_.":
                total += os.path.getsize(each)
        if "_temporary" in folders:
            shutil.rmtree(os.path.join(above, "_temporary"), ignore_errors=True)
            folders.remove("_temporary")
    return total


def count_rows(path: str, format: str) -> int | None:
    """How many rows the files of a chunk have; None: a text file would have to be read whole."""
    kind, total = format_of(format), 0
    for file in data_files(path):
        if kind.is_text and os.path.getsize(file) > WHOLE_FILE_BYTES:
            return None
        rows = kind.count(file)
        if rows is None:
            return None
        total += rows
    return total
