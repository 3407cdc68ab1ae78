"""What a pipeline reads: each source as a frame of pandas or of Spark, wherever it lies."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..chunk import Place
from ..errors import Refused
from ..location import (
    BigQueryTable,
    CsvFile,
    Folder,
    ObjectStore,
    Table,
    chunk_place,
    is_relative,
    is_select,
    resolve,
)
from ..spark.read import read_chunk_frame
from ..spark.text_formats import WHOLE_FILE_BYTES
from ..storage import files
from ..storage.publish import read
from ..storage.read import Reading, bounds_of
from ..storage.table import Rows
from ..store.csv_options import CsvOptions, csv_options, read_pandas
from ..store.store import Store
from ..util.text import typed
from .datasets import Row, registered
from .jobs import makers_of
from .project import Project

if TYPE_CHECKING:
    from pandas import DataFrame as PandasFrame
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Source", "registered", "source_of"]


class Source:
    """A source of a pipeline, which is read when it is asked for."""

    location = ""
    """Where it is, for people."""

    def pandas(self) -> "PandasFrame":
        """All of it as a frame of pandas, which is the caller's own."""
        raise NotImplementedError

    def spark(self, spark: "SparkSession") -> "DataFrame":
        """All of it as a frame of Spark."""
        raise NotImplementedError

    def version(self) -> str | None:
        """What changes when the data does; None if only reading it again can tell."""
        return None

    def by_pandas(self) -> bool:
        """Whether the frame of Spark is that of pandas, converted; else Spark reads, and later."""
        return False


def source_of(
    store: Store, project: Project, slug: str, place: Place | None = None, dataid: str | None = None
) -> Source:
    """The source that a pipeline calls `slug`.

    `place` is that of a tracked input, whose chunk `dataid` is read; without it, the source is
    read as it stands.
    """
    row = registered(store, slug, project.root)
    if row is None:
        return _of_project(store, project, slug, place, dataid)
    where = resolve(slug, row.columns)
    if place is not None and place.location and is_relative(place.location):
        place = place._replace(location=os.path.normpath(project.root / place.location))
    if isinstance(where, CsvFile):
        return CsvSource(where.path, slug, csv_options(slug, where.options))
    if isinstance(where, BigQueryTable):
        from .bigquery import BigQuerySource

        return BigQuerySource(where, row.password)
    if isinstance(where, Table) and (not where.column or is_select(where.name)):
        from .sql_table import TableSource

        return TableSource(where, row.password)
    if place is not None and dataid is not None:
        return ChunkSource(store, row, where, place, dataid)
    if isinstance(where, Table):
        from .sql_table import TableSource

        return TableSource(where, row.password)
    if isinstance(where, ObjectStore):
        raise Refused(
            f"{slug!r} is in an object store, which is read chunk by chunk only. Let a job write "
            f"it, so that its chunks are tracked: see odf job list.",
            code="INVALID_LOCATION",
        )
    from .whole_folder import FolderSource

    return FolderSource(store, where)


def _of_project(
    store: Store, project: Project, slug: str, place: Place | None, dataid: str | None
) -> Source:
    if place is not None and place.location:
        if os.path.isfile(place.location):
            return CsvSource(place.location, slug)
        row = Row(slug, {"hostname": str(project.root / "output" / slug), "format": "csv"}, None)
        if dataid is not None:
            return ChunkSource(store, row, chunk_place(slug, row.columns), place, dataid)
    return _as_made(store, project, slug, makers_of(project, slug))


def _as_made(store: Store, project: Project, slug: str, makers: Sequence[str]) -> Source:
    """What pipelines have made last of a source, or its file in `sources/`."""
    from .whole_folder import NewestSource

    newest = NewestSource(store, Folder(slug, str(project.root / "output" / slug), "csv"))
    if makers and newest.is_there():
        return newest
    for each in makers:
        made = project.root / "output" / f"{each}.csv"
        if made.is_file():
            return CsvSource(str(made), slug)
    return CsvSource(str(project.source_file(slug)), slug, maker=next(iter(makers), ""))


class CsvSource(Source):
    """A CSV file, read as pandas reads it by default."""

    def __init__(
        self, path: str, slug: str, options: CsvOptions | None = None, *, maker: str = ""
    ) -> None:
        self.location, self._slug, self._maker = path, slug, maker
        self._options = options or CsvOptions(slug)

    def pandas(self) -> "PandasFrame":
        from .csv_file import whole

        pandas = files.need("pandas")
        try:
            with whole(self.location):
                return read_pandas(self.location, self._options)
        except FileNotFoundError:
            raise self._missing() from None
        except pandas.errors.EmptyDataError:
            raise self._refused("is empty: it has no line with the names of its columns") from None
        except (OSError, ValueError) as error:  # of pandas' own, and of Unicode, too
            line = " ".join(str(error).split())
            raise self._refused(f"can't be read as CSV: {line}") from error

    def spark(self, spark: "SparkSession") -> "DataFrame":
        from .csv_on_spark import read_csv

        if not os.path.isfile(self.location):
            raise self._missing()
        return read_csv(spark, self.location, self.pandas, self._options)

    def version(self) -> str | None:
        try:
            told = os.stat(self.location)
        except OSError:
            raise self._missing() from None
        return f"{told.st_ino}-{told.st_size}-{told.st_mtime_ns}"

    def by_pandas(self) -> bool:
        return os.path.isfile(self.location) and os.path.getsize(self.location) <= WHOLE_FILE_BYTES

    def _missing(self) -> Refused:
        if self._maker:
            return Refused(
                f"Source {self._slug!r} isn't there yet: pipeline {self._maker!r} makes it. "
                f"Run: odf pipeline run {typed(self._maker)}",
                code="INVALID_LOCATION",
            )
        return Refused(
            f"Source {self._slug!r} is {self.location}, which doesn't exist. Put the file there, "
            f"or run: odf dataset add {typed(self._slug)} --hostname /path/FILE.csv",
            code="INVALID_LOCATION",
        )

    def _refused(self, why: str) -> Refused:
        text = f"Source {self._slug!r}: {self.location} {why.rstrip('.')}. Correct the file."
        return Refused(text, code="INVALID_LOCATION")


class ChunkSource(Source):
    """A READY chunk that another pipeline or job has made."""

    def __init__(
        self, store: Store, row: Row, where: Folder | ObjectStore | Table, place: Place, dataid: str
    ) -> None:
        self._store, self._row, self._where = store, row, where
        self._place = place._replace(columns=row.columns)
        self._dataid = dataid
        self.location = place.location or ""

    def pandas(self) -> "PandasFrame":
        if isinstance(self._where, Table):
            return self._rows(self._where).read()
        found = Reading(
            self._row.datasetid,
            self._dataid,
            self._row.columns,
            self._row.encrypted,
            [],
            [],
            [],
            self._place.generation,
            fact={"location": self._place.location},
        )
        frame = read(found, self._where)
        return _as_csv(frame) if self._where.format == "csv" else frame

    def spark(self, spark: "SparkSession") -> "DataFrame":
        return read_chunk_frame(spark, self._place, self._dataid, self._row.password, self._bounds)

    def version(self) -> str | None:
        return f"{self._dataid} {self._place.generation}" if self._place.generation else None

    def _rows(self, table: Table) -> Rows:
        return Rows(table, self._dataid, self._bounds(), self._row.password)

    def _bounds(self) -> Any:
        return bounds_of(self._store, self._row.datasetid, self._dataid)


def _as_csv(frame: "PandasFrame") -> "PandasFrame":
    """The frame with NaN where a text is missing, as `read_csv` has it; a chunk has None there."""
    pandas = files.need("pandas")
    for at in range(len(frame.columns)):
        column = frame.iloc[:, at]
        if column.dtype == object and (gone := column.isna()).any():
            values = column.to_numpy(copy=True)
            values[gone] = float("nan")
            frame.isetitem(at, pandas.Series(values, index=frame.index, dtype=object))
    return frame
