"""Reads a chunk of a dataset as a DataFrame, wherever the chunk is."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..chunk import Chunk, ChunkFailed, Place
from ..errors import Refused, StaleClaim
from ..formats import format_of
from ..formats.csv_options import csv_options
from ..location import (
    DEFAULT_FORMAT,
    JDBC,
    SQLITE,
    ChunkPlace,
    Folder,
    ObjectStore,
    Table,
    chunk_place,
    is_packed,
)
from ..storage.compact import packed_source
from ..storage.read import located
from ..storage.table import Bounds, Rows
from ..util.text import printable
from . import jdbc, postgres
from .chunk_files import KnownSchema, escaped_path, read_files
from .object_store import read_version
from .schema import quoted
from .types import arrow_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


Password = Callable[[], str | None]


def read_chunk_frame(
    spark: "SparkSession",
    place: Place,
    dataid: str,
    password: Password,
    bounds: Callable[[], Bounds | None],
    format: str = DEFAULT_FORMAT,
    known: KnownSchema | None = None,
) -> "DataFrame":
    """The rows of a READY chunk; `known` tells the columns of files that are no chunks of ours."""
    target = chunk_place(place.datasetid, place.columns, format)
    if isinstance(target, Table):
        return read_table(spark, target, dataid, bounds(), password)
    if not isinstance(target, Folder | ObjectStore):
        raise not_in_spark(target)
    if format_of(target.format).is_lake:
        return _lake_table(spark, target, place).where(_equals(place, dataid))
    if isinstance(target, ObjectStore):
        return read_version(spark, target, dataid, place.location)
    if place.location and is_packed(place.location):
        return read_packed(spark, place.location)
    path, note = located(target, dataid, place.location, place.generation, store=place.store)
    options = csv_options(target.datasetid, target.options)
    return read_files(spark, path, note, target.format, options, known)


def not_in_spark(target: ChunkPlace) -> Refused:
    """The refusal of a kind of place that only Python reads and writes."""
    return Refused(
        f"{target.datasetid!r} is in a place that Spark neither reads nor writes. Use a DataFrame "
        "of pandas instead.",
        code="INVALID_LOCATION",
    )


def read_table(
    spark: "SparkSession", table: Table, dataid: str, bounds: Bounds | None, password: Password
) -> "DataFrame":
    """The rows of a table that are a chunk."""
    if table.dialect == SQLITE:
        found = arrow_of(Rows(table, dataid, bounds, password))
        return spark.createDataFrame(found)  # pyright: ignore
    read_rows = jdbc.read_rows if table.dialect == JDBC else postgres.read_rows
    return read_rows(spark, table, dataid, bounds, password)


def read_packed(spark: "SparkSession", location: str) -> "DataFrame":
    """A chunk that lies in one file with others."""
    path, dataid = packed_source(location)
    whole = spark.read.parquet(escaped_path(path))
    return whole.where(whole["dataid"] == dataid).drop("dataid")


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
    named = [part for part in parts if part]
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


# --- detecting inputs that are replaced while a job reads them ---


@contextmanager
def unchanged(chunks: Sequence[Chunk], datasetids: Sequence[str], format: str) -> Iterator[None]:
    """Fail what was made in the block of a folder's chunk that was replaced meanwhile.

    Spark passes over files that vanish while it lists them, so that such a chunk may look empty.
    """
    keys = [(chunk, datasetid) for chunk in chunks for datasetid in datasetids]
    before = [_version_of(chunk, each, format) for chunk, each in keys]
    try:
        yield
    except StaleClaim:
        raise
    except Exception as error:
        _compare(keys, before, format, error)
        raise
    _compare(keys, before, format, None)


def _compare(
    keys: Sequence[tuple[Chunk, str]], before: Sequence[Any], format: str, error: Exception | None
) -> None:
    for (chunk, datasetid), there in zip(keys, before, strict=True):
        if there is not None and _version_of(chunk, datasetid, format) != there:
            raise ChunkFailed(
                f"DATA_NOT_READY: chunk {printable(chunk.dataid)!r} of {datasetid!r} was made anew "
                "while it was read."
            ) from error


def _version_of(chunk: Chunk, datasetid: str, format: str) -> Any:
    """What changes with every publish of a chunk into a folder; None: it is somewhere else."""
    place = chunk.inputs[datasetid]
    try:
        target = chunk_place(datasetid, place.columns, format)
        if not isinstance(target, Folder) or format_of(target.format).is_lake:
            return None
        path, note = located(
            target, chunk.dataid, place.location, place.generation, store=place.store
        )
        return note.get("generation"), None if is_packed(path) else os.stat(path).st_ino
    except (Refused, FileNotFoundError):
        return None
