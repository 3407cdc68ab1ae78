"""A chunk of a dataset as a DataFrame, wherever it lies."""

import os
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from ..chunk import Place
from ..errors import Refused
from ..location import (
    DEFAULT_FORMAT,
    JDBC,
    SQLITE,
    Folder,
    ObjectStore,
    Table,
    chunk_place,
    is_packed,
)
from ..storage import csv_types, files
from ..storage.pack import packed_source
from ..storage.read import located
from ..storage.table import Bounds, Rows
from ..store.csv_options import UNDECLARED, CsvOptions, csv_options
from .foreign_files import Known, of_others
from .schema import quoted
from .text_formats import is_read_whole, restored, without_collations

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TABLE_FORMATS = ("delta", "iceberg")

CSV: Mapping[str, str] = {"header": "true", "escape": '"', "quote": '"'}
"""As everybody else writes CSV: a quote within quotes is doubled."""

NO_VALUE = "\x00nothing\x00"
"""What a reader of CSV takes nothing for: by default, that is an empty text, which is a value."""

Password = Callable[[], str | None]


def read_chunk_frame(
    spark: "SparkSession",
    place: Place,
    dataid: str,
    password: Password,
    bounds: Callable[[], Bounds | None],
    format: str = DEFAULT_FORMAT,
    known: Known | None = None,
) -> "DataFrame":
    """The rows of a READY chunk; `known` tells the columns of files that are no chunks of ours."""
    target = chunk_place(place.datasetid, place.columns, format)
    if isinstance(target, Table):
        return read_table(spark, target, dataid, bounds(), password)
    if target.format in TABLE_FORMATS:
        return _lake_table(spark, target, place).where(_equals(place, dataid))
    if isinstance(target, ObjectStore):
        from .object_store import read_version

        return read_version(spark, target, dataid, place.location)
    if place.location and is_packed(place.location):
        return read_packed(spark, place.location)
    path, note = located(target, dataid, place.location, place.generation, store=place.store)
    options = csv_options(target.datasetid, target.options)
    return read_files(spark, path, note, target.format, options, known)


def read_table(
    spark: "SparkSession", table: Table, dataid: str, bounds: Bounds | None, password: Password
) -> "DataFrame":
    """The rows of a table that are a chunk."""
    if table.dialect == SQLITE:
        from .sqlite_types import arrow_of

        found = arrow_of(Rows(table, dataid, bounds, password))
        return spark.createDataFrame(found)  # pyright: ignore
    if table.dialect == JDBC:
        from .jdbc import read_rows
    else:
        from .postgres_read import read_rows
    return read_rows(spark, table, dataid, bounds, password)


def read_files(
    spark: "SparkSession",
    path: str,
    note: Mapping[str, Any],
    format: str,
    options: CsvOptions = UNDECLARED,
    known: Known | None = None,
) -> "DataFrame":
    """The files of one chunk: with the schema that its note tells, or as Spark finds it."""
    kind = note.get("format") or files.SUFFIXES.get(os.path.splitext(path)[1].lower(), format)
    reader = spark.read.format(kind).options(**_options(kind, path, note))
    if schema := schema_of(note):
        reader = reader.schema(without_collations(schema) if kind == "orc" else schema)
        return restored(reader.load(literal(path)), schema, kind)
    if os.path.isdir(path) and not files.data_files(path):
        raise Refused(
            f"{path} has no files, so there is nothing to tell its columns by. Write an empty "
            "frame instead.",
            code="INVALID_LOCATION",
        )
    if kind in ("csv", "json") and (columns := note.get("columns")):
        schema = _as_pandas_had(reader, path, kind, columns)
        if kind == "csv" and len(columns) == 1 and _has_empty_lines(path):
            rows = files.read_table(path, kind, columns)
            return spark.createDataFrame(rows, schema)  # pyright: ignore
        reader = reader.schema(schema)
    elif kind in ("csv", "json"):
        return of_others(spark, reader, path, literal(path), kind, options, known)
    return reader.load(literal(path))


def _has_empty_lines(path: str) -> bool:
    """Whether a row of one column has no value: Spark takes its line for none."""
    for each in files.data_files(path):
        with open(each, "rb") as file:
            if b"\n" in file:
                return True
    return False


def _as_pandas_had(reader: Any, path: str, kind: str, columns: Mapping[str, str]) -> Any:
    """The schema of a frame of pandas, by its dtypes: in a text file, 007 may be a number.

    Of what dtypes don't tell, Spark looks into the file.
    """
    from pyspark.sql.types import StringType, StructType

    if kind == "csv" and csv_types.AS_READ in columns.values():
        columns = csv_types.resolved(files.data_files(path), columns)
    told = {name: _DTYPES.get(dtype.partition("[")[0]) for name, dtype in columns.items()}
    told |= {name: "timestamp" for name, dtype in columns.items() if "," in dtype}  # with its zone
    if kind == "json":  # an object may be a list, there
        told = {name: None if columns[name] == "object" else each for name, each in told.items()}
    seen = {}
    if None in told.values():
        seen = {each.name: each.dataType for each in reader.load(literal(path)).schema}
    schema = StructType()
    for name, each in told.items():
        schema.add(name, each or seen.get(name, StringType()))
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


def read_packed(spark: "SparkSession", location: str) -> "DataFrame":
    """A chunk that lies in one file with others."""
    path, dataid = packed_source(location)
    whole = spark.read.format("parquet").load(literal(path))
    return whole.where(whole["dataid"] == dataid).drop("dataid")


def schema_of(note: Mapping[str, Any]) -> Any:
    """The schema that a chunk was written with by Spark, if its note has it."""
    from pyspark.sql.types import StructType

    told = note.get("schema")
    # Of a copy: it removes from what it is given where collations come from.
    return StructType.fromJson(deepcopy(told)) if isinstance(told, dict) else None


def literal(path: str) -> str:
    """A path in which Spark sees no pattern."""
    return "".join(f"\\{each}" if each in "{}[]*?\\" else each for each in path)


def _options(kind: str, path: str, note: Mapping[str, Any]) -> dict[str, str]:
    if kind not in ("csv", "json"):
        return {}
    told = dict(CSV) if kind == "csv" else {}
    if kind == "csv":
        told["nullValue"] = NO_VALUE
        told["multiLine"] = str(is_read_whole(path, note)).lower()
    if schema_of(note) is None and kind == "csv":
        told["inferSchema"] = "true"
    return told


def _lake_table(spark: "SparkSession", target: Folder | ObjectStore, place: Place) -> "DataFrame":
    """A table that keeps its own versions; its format comes with jars of its own."""
    name = lake_name(place)
    try:
        return (
            spark.read.table(name) if name else spark.read.format(target.format).load(target.root)
        )
    except Exception as error:
        raise lake_trouble(target, error) from error


def lake_name(place: Place) -> str | None:
    """The name in Spark's catalog of a table, if it is registered with one."""
    parts = [place.columns.get(each) for each in ("database", "schemaname", "tablename")]
    named = [each for each in parts if each]
    if not place.columns.get("tablename") or place.columns.get("hostname"):
        return None
    return ".".join(map(quoted, named))


def lake_trouble(target: Folder | ObjectStore, error: Exception) -> Exception:
    """What says that a format's jars are missing, if they are."""
    if "DATA_SOURCE_NOT_FOUND" in str(error) or "Failed to find" in str(error):
        return Refused(
            f"{target.datasetid!r} has the format {target.format!r}, and Spark has no such format "
            f"here. Configure its jars: spark.jars.packages in dataflow.properties.",
            code="INVALID_LOCATION",
        )
    return error


def _equals(place: Place, dataid: str) -> Any:
    from pyspark.sql import functions as F

    column = place.columns.get("chunkcolumn") or "dataid"
    return F.col(quoted(column)).cast("string") == F.lit(dataid)
