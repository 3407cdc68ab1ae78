"""Reads a chunk as a DataFrame, wherever it is; and publishes a DataFrame as a chunk."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

from ..chunk import Chunk, ChunkFailed, Place, Result
from ..errors import DataflowError, Refused, StaleClaim
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
from ..storage.chunks import bounds_of, failing, located
from ..storage.compact import packed_source
from ..storage.folder import Staged
from ..storage.table import Bounds, Rows, strangers
from ..store.store import Store
from ..util.text import printable
from . import chunk_files, jdbc, postgres
from .chunk_files import (
    KnownSchema,
    count_rows,
    escaped_path,
    line_aggregates,
    line_note,
    read_files,
    remove_markers,
    write_files,
)
from .evidence import Evidence, IncompleteObservation, evidence_of_frame, observed
from .jdbc import StagedJdbcRows
from .object_store import StagedRemote, read_version
from .postgres_write import StagedRows
from .progress import SparkProgress, interrupting, working_on
from .schema import literal, quoted
from .session import in_a_line
from .types import arrow_of, refuse_sqlite_losses

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
    """Return the rows of a READY chunk; `known` is the schema of files that others wrote."""
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
    """Return the error for a place that Spark can't read or write."""
    return Refused(
        f"{target.datasetid!r} is in a location that Spark can't read or write. Use a pandas "
        "DataFrame instead.",
        code="INVALID_LOCATION",
    )


def read_table(
    spark: "SparkSession", table: Table, dataid: str, bounds: Bounds | None, password: Password
) -> "DataFrame":
    """Return the rows of a table that are a chunk."""
    if table.dialect == SQLITE:
        found = arrow_of(Rows(table, dataid, bounds, password))
        return spark.createDataFrame(found)  # pyright: ignore
    read_rows = jdbc.read_rows if table.dialect == JDBC else postgres.read_rows
    return read_rows(spark, table, dataid, bounds, password)


def read_packed(spark: "SparkSession", location: str) -> "DataFrame":
    """Return a chunk that is in one file with others."""
    path, dataid = packed_source(location)
    whole = spark.read.parquet(escaped_path(path))
    return whole.where(whole["dataid"] == dataid).drop("dataid")


def _lake_table(spark: "SparkSession", target: Folder | ObjectStore, place: Place) -> "DataFrame":
    """A chunk of a table that keeps its own versions; such formats need jars of their own."""
    name = lake_name(place)
    try:
        return (
            spark.read.table(name) if name else spark.read.format(target.format).load(target.root)
        )
    except Exception as error:
        raise lake_trouble(target, error) from error


def lake_name(place: Place) -> str | None:
    """Return a table's name in Spark's catalog, if it is registered with one."""
    parts = [place.columns.get(each) for each in ("database", "schemaname", "tablename")]
    named = [part for part in parts if part]
    if not place.columns.get("tablename") or place.columns.get("hostname"):
        return None
    return ".".join(map(quoted, named))


def lake_trouble(target: Folder | ObjectStore, error: Exception) -> Exception:
    """Return an error about missing jars of a format, if that is the cause."""
    if "DATA_SOURCE_NOT_FOUND" in str(error) or "Failed to find" in str(error):
        return Refused(
            f"{target.datasetid!r} has the format {target.format!r}, but Spark doesn't have its "
            f"jars. Configure spark.jars.packages in dataflow.properties.",
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
    """Fail the chunk if one of its inputs in a folder was replaced during the block.

    Spark ignores files that vanish while it lists them, so such an input may look empty.
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
                f"DATA_NOT_READY: chunk {printable(chunk.dataid)!r} of {datasetid!r} was replaced "
                "while it was read."
            ) from error


def _version_of(chunk: Chunk, datasetid: str, format: str) -> Any:
    """Return what changes whenever a chunk is published into a folder; None: it isn't in one."""
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


# Writes a frame as a chunk of files or of a table: staged, with its evidence, then published.


Confirm = Callable[[], None]


class StagedFrame(Protocol):
    """A chunk that is written but not yet published."""

    evidence: Evidence

    @property
    def bytes(self) -> int | None:
        """Return the bytes of its files, if it has any."""
        ...

    def show(self, confirm: Confirm) -> str:
        """Publish it, if the claim still holds; return its location."""
        ...

    def discard(self) -> None:
        """Remove it if it wasn't published, or else what it replaced."""
        ...

    def frame(self) -> "DataFrame":
        """Return the rows as they were written."""
        ...


def stage(
    spark: "SparkSession",
    store: Store,
    chunk: Chunk,
    place: Place,
    df: "DataFrame",
    extra: Sequence[str] = (),
    format: str = DEFAULT_FORMAT,
) -> StagedFrame:
    """Stage a frame for the place that its dataset is registered with."""
    target = chunk_place(place.datasetid, place.columns, format)
    if isinstance(target, Table):
        return staged_rows(spark, store, chunk, target, df, extra)
    if not isinstance(target, Folder | ObjectStore):
        raise not_in_spark(target)
    if format_of(target.format).is_lake:
        return StagedLake(spark, chunk, place, target, df, extra)
    if isinstance(target, Folder):
        return StagedFolder(spark, chunk, target, df, extra, store=store.id)
    return StagedRemote.write(spark, chunk, target, df, extra, store=store.id)


def result_of(staged: StagedFrame, location: str | None = None) -> Result:
    """Return the result of a staged chunk; with its location, once it is published."""
    evidence = staged.evidence
    return Result(
        evidence.rows, staged.bytes, evidence.fingerprint, location, schema=evidence.schema
    )


class StagedFolder:
    """A chunk of a folder, in its staging directory."""

    def __init__(
        self,
        spark: "SparkSession",
        chunk: Chunk,
        target: Folder,
        df: "DataFrame | None",
        extra: Sequence[str] = (),
        *,
        store: str,
    ) -> None:
        self._spark, self._target, self._jobid = spark, target, chunk.jobid
        self._staged = Staged(target.root, chunk.dataid, chunk.generation, store)
        self.path = self._staged.path
        self.bytes: int | None = None
        self._lines: Mapping[str, Any] = {}
        if df is None:
            return
        try:
            self._write(df, extra)
        except BaseException:
            self.discard()
            raise

    def _write(self, df: "DataFrame", extra: Sequence[str]) -> None:
        format = self._target.format
        texts = chunk_files.loss_aggregates(df.schema, format)
        extra = [*extra, *line_aggregates(df.schema, format), *texts]
        frame, taken = observed(df, extra)
        write_files(frame, self.path, format)
        schema, rows = df.schema.jsonValue(), count_rows(self.path, format)
        try:
            evidence = taken(rows)
        except IncompleteObservation:  # repeated tasks: the files on disk are the evidence
            one_column = format_of(format).is_delimited and len(df.columns) == 1
            if texts or one_column:  # the format may have lost some rows
                seen = evidence_of_frame(df, extra)
                chunk_files.refuse_lossy(seen, df, format)
                line_note(seen, df.schema, format)
            note = {"format": format, "schema": schema}
            evidence = evidence_of_frame(read_files(self._spark, self.path, note, ""), extra)
            if rows not in (None, evidence.rows):
                raise _short(self.path, evidence.rows, rows) from None
        chunk_files.refuse_lossy(evidence, df, format)
        self._lines = line_note(evidence, df.schema, format)
        self._tell(evidence, schema)

    def take(self, evidence: Evidence, schema: Mapping[str, Any]) -> None:
        """Verify what was written together with other chunks, and write the chunk's note."""
        rows = count_rows(self.path, self._target.format)
        if rows not in (None, evidence.rows):
            raise _short(self.path, rows, evidence.rows)
        self._tell(evidence, schema)

    def _tell(self, evidence: Evidence, schema: Mapping[str, Any]) -> None:
        self.evidence, self._schema = evidence, schema
        self.bytes = remove_markers(self.path)
        self._staged.tell(self.note())

    def note(self) -> dict[str, Any]:
        return {
            "jobid": self._jobid,
            "format": self._target.format,
            "rows": self.evidence.rows,
            "bytes": self.bytes,
            "fingerprint": self.evidence.fingerprint,
            "schema": self._schema,
            **self._lines,
        }

    def show(self, confirm: Confirm) -> str:
        return self._staged.show(confirm)

    def discard(self) -> None:
        self._staged.discard()

    def frame(self) -> "DataFrame":
        return read_files(self._spark, self.path, self.note(), self._target.format)


def _short(where: str, found: int | None, rows: int | None) -> DataflowError:
    return DataflowError(
        f"{rows} rows were written to {where}, but it has {found}. Run the chunk again."
    )


# --- one frame as one chunk, for a claim ---


def publish_frame(
    store: Store,
    place: Place,
    chunk: Chunk,
    df: "DataFrame",
    *,
    format: str = DEFAULT_FORMAT,
    say: Callable[[str], object] = lambda line: None,
) -> Result:
    """Publish a Spark frame as the chunk of a dataset, as `publish` does other objects.

    `say` gets the progress of a job that takes long.
    """
    try:
        with failing():
            spark = df.sparkSession
            with working_on([chunk.claim]):
                with interrupting(spark), SparkProgress(spark, say):
                    staged = stage(spark, store, chunk, place, df, (), format)
                try:
                    return result_of(staged, staged.show(lambda: store.confirm(chunk.claim)))
                finally:
                    staged.discard()
    except Exception as error:
        if (reason := in_a_line(error)) is None:
            raise
        raise ChunkFailed(reason) from error


# Writes a frame as a chunk of a table: into a staging table, or in one commit of a lake table.


_MINE = "odf_mine"


def staged_rows(
    spark: "SparkSession",
    store: Store,
    chunk: Chunk,
    table: Table,
    df: "DataFrame",
    extra: Sequence[str],
) -> "StagedSqliteTable | StagedDatabaseTable":
    """Stage a frame until it is published: in a table beside its own, or for SQLite in memory."""
    bounds = bounds_of(store, table.datasetid, chunk.dataid)
    password: Password = lambda: chunk.password(table.datasetid)  # noqa: E731
    if table.dialect == SQLITE:
        rows = Rows(table, chunk.dataid, bounds, password)
        return StagedSqliteTable(spark, table, rows, df, extra, rehearse=len(chunk.outputs) > 1)
    kind = StagedJdbcRows if table.dialect == JDBC else StagedRows
    frame, taken = observed(df, extra)
    staged = kind.write(frame, table, chunk.dataid, bounds, password, chunk.generation)
    return StagedDatabaseTable(spark, table, staged, taken)


class _Rehearsed(Exception):
    """A transaction succeeded up to its end, and is rolled back."""


def _rehearsed() -> None:
    raise _Rehearsed


class StagedSqliteTable:
    """A chunk of an SQLite table, kept on the driver until it is shown."""

    def __init__(
        self,
        spark: "SparkSession",
        table: Table,
        rows: Rows,
        df: "DataFrame",
        extra: Sequence[str] = (),
        *,
        rehearse: bool = False,
    ) -> None:
        frame, taken = observed(df, extra)
        self._table, self._rows, self._spark, self._schema = table, rows, spark, df.schema
        self._data = frame.toArrow()
        self.evidence, self.bytes = taken(self._data.num_rows), None
        refuse_sqlite_losses(rows, self._data, df.schema)
        if rehearse:  # find what the table refuses before another output is shown
            with suppress(_Rehearsed):
                self._replace(_rehearsed)

    def show(self, confirm: Confirm) -> str:
        self._replace(confirm)
        return self._table.location

    def _replace(self, confirm: Confirm) -> None:
        import pandas

        # By Arrow's own types: integers stay integers even if some are NULL.
        plain = self._data.to_pandas(types_mapper=pandas.ArrowDtype)
        self._rows.replace(plain, confirm)

    def discard(self) -> None:
        del self._data

    def frame(self) -> "DataFrame":
        return self._spark.createDataFrame(self._data, self._schema)


class StagedDatabaseTable:
    """A chunk of a table, in a staging table beside it."""

    def __init__(self, spark: "SparkSession", table: Table, staged: Any, taken: Any) -> None:
        self._spark, self._table, self._staged = spark, table, staged
        self.bytes = None
        try:
            self.evidence = taken(staged.rows)
        except BaseException:
            staged.discard()
            raise

    def show(self, confirm: Confirm) -> str:
        self._staged.show(confirm)
        return self._table.location

    def discard(self) -> None:
        self._staged.discard()

    def frame(self) -> "DataFrame":
        return self._staged.frame()


class StagedLake:
    """A chunk of a Delta or Iceberg table, replaced in one commit of that table."""

    def __init__(
        self,
        spark: "SparkSession",
        chunk: Chunk,
        place: Place,
        target: Any,
        df: "DataFrame",
        extra: Sequence[str] = (),
    ) -> None:
        from pyspark.sql import functions as F

        column = place.columns.get("chunkcolumn") or "dataid"
        if column not in df.columns:
            df = df.withColumn(column, F.lit(chunk.dataid))
        self._df, self._place, self._target, self._dataid = df, place, target, chunk.dataid
        self._column = column
        # The evidence is taken first, since the commit also shows the chunk.
        is_mine = f"cast({quoted(column)} as string) <=> {literal(chunk.dataid)}"
        frame, taken = observed(df.persist(), [*extra, f"count_if({is_mine}) as {_MINE}"])
        try:
            frame.write.format("noop").mode("overwrite").save()
            self.evidence, self.bytes = taken(), None
            rows, found = self.evidence.rows, self.evidence.extra[_MINE]
            if found != rows:
                where = lake_name(place) or target.root
                raise strangers(where, column, chunk.dataid, rows, found)
        except BaseException:
            self.discard()
            raise

    def show(self, confirm: Confirm) -> str:
        from pyspark.sql import functions as F

        column = quoted(self._column)
        confirm()
        name, target = lake_name(self._place), self._target
        try:
            if name:
                self._df.writeTo(name).overwrite(F.col(column) == F.lit(self._dataid))
            else:
                dataid = self._dataid.replace("\\", "\\\\").replace("'", "\\'")
                writer = self._df.write.format(target.format).mode("overwrite")
                writer.option("replaceWhere", f"{column} = '{dataid}'").save(target.root)
        except Exception as error:
            raise lake_trouble(target, error) from error
        return target.root if name is None else name

    def discard(self) -> None:
        self._df.unpersist()

    def frame(self) -> "DataFrame":
        return self._df
