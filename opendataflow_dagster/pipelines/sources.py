"""What a pipeline reads: each source as a pandas or Spark frame, wherever it is."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import reduce
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..chunk import Place
from ..errors import DataflowError, Refused
from ..formats import CSV, format_of
from ..formats.csv_options import CsvOptions, csv_options, read_pandas
from ..location import (
    BigQueryTable,
    ChunkPlace,
    CsvFile,
    Folder,
    Table,
    chunk_place,
    is_relative,
    is_select,
    resolve,
)
from ..model import natural_key
from ..spark.chunk_files import WHOLE_FILE_BYTES, csv_reader_options, escaped_path, read_files
from ..spark.chunks import read_chunk_frame
from ..storage import folder
from ..storage.chunks import Reading, bounds_of, read
from ..storage.table import Rows
from ..store.store import Store
from ..util.text import typed
from .bigquery import BigQuerySource
from .csv_file import held_for_reading
from .frames import DatasetRow, Source, as_pandas, from_pandas, registered
from .jobs import makers_of
from .project import Project
from .sql_table import TableSource
from .transformation import PANDAS, SPARK

if TYPE_CHECKING:
    from pandas import DataFrame as PandasFrame
    from pyspark.sql import DataFrame, SparkSession


def source_of(
    store: Store, project: Project, slug: str, place: Place | None = None, dataid: str | None = None
) -> Source:
    """Return the source that a pipeline calls `slug`.

    `place` is that of a tracked input, whose chunk `dataid` is read; without it, the source is
    read as it is.
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
        return BigQuerySource(where, row.password)
    if isinstance(where, Table) and (not where.column or is_select(where.name)):
        return TableSource(where, row.password)
    if place is not None and dataid is not None:
        return ChunkSource(store, row, where, place, dataid)
    if isinstance(where, Table):
        return TableSource(where, row.password)
    if not isinstance(where, Folder):
        raise Refused(
            f"{slug!r} is in an object store, which can only be read chunk by chunk. Let a job "
            f"write it, so that its chunks are tracked: see odf job list.",
            code="INVALID_LOCATION",
        )
    return FolderSource(store, where)


def _of_project(
    store: Store, project: Project, slug: str, place: Place | None, dataid: str | None
) -> Source:
    if place is not None and place.location:
        if os.path.isfile(place.location):
            return CsvSource(place.location, slug)
        row = DatasetRow(
            slug, {"hostname": str(project.root / "output" / slug), "format": CSV.name}, None
        )
        if dataid is not None:
            return ChunkSource(store, row, chunk_place(slug, row.columns), place, dataid)
    return _as_made(store, project, slug, makers_of(project, slug))


def _as_made(store: Store, project: Project, slug: str, makers: Sequence[str]) -> Source:
    """Return the last result of the pipelines that write a source, or its file in `sources/`."""
    newest = NewestSource(store, Folder(slug, str(project.root / "output" / slug), CSV.name))
    if makers and newest.is_there():
        return newest
    for maker in makers:
        output_file = project.root / "output" / f"{maker}.csv"
        if output_file.is_file():
            return CsvSource(str(output_file), slug)
    return CsvSource(str(project.source_file(slug)), slug, maker=next(iter(makers), ""))


class CsvSource(Source):
    """A CSV file, read as pandas reads it by default."""

    def __init__(
        self, path: str, slug: str, options: CsvOptions | None = None, *, maker: str = ""
    ) -> None:
        self.location, self._slug, self._maker = path, slug, maker
        self._options = options or CsvOptions(slug)

    def pandas(self) -> "PandasFrame":
        pandas = folder.need("pandas")
        try:
            with held_for_reading(self.location):
                return read_pandas(self.location, self._options)
        except FileNotFoundError:
            raise self._missing() from None
        except pandas.errors.EmptyDataError:
            raise self._refused("is empty: it has no header line") from None
        except (OSError, ValueError) as error:  # pandas' and Unicode's errors, too
            line = " ".join(str(error).split())
            raise self._refused(f"can't be read as CSV: {line}") from error

    def spark(self, spark: "SparkSession") -> "DataFrame":
        if not os.path.isfile(self.location):
            raise self._missing()
        return read_csv(spark, self.location, self.pandas, self._options)

    def version(self) -> str | None:
        try:
            about = os.stat(self.location)
        except OSError:
            raise self._missing() from None
        return f"{about.st_ino}-{about.st_size}-{about.st_mtime_ns}"

    def by_pandas(self) -> bool:
        return os.path.isfile(self.location) and os.path.getsize(self.location) <= WHOLE_FILE_BYTES

    def _missing(self) -> Refused:
        if self._maker:
            return Refused(
                f"Source {self._slug!r} doesn't exist yet: pipeline {self._maker!r} produces it. "
                f"Run: odf pipeline run {typed(self._maker)}",
                code="INVALID_LOCATION",
            )
        return Refused(
            f"Source {self._slug!r} is {self.location}, which doesn't exist. Put a file there, "
            f"or run: odf dataset add {typed(self._slug)} --hostname /path/FILE.csv",
            code="INVALID_LOCATION",
        )

    def _refused(self, why: str) -> Refused:
        text = f"Source {self._slug!r}: {self.location} {why.rstrip('.')}. Correct the file."
        return Refused(text, code="INVALID_LOCATION")


class ChunkSource(Source):
    """A READY chunk that another pipeline or job produced."""

    def __init__(
        self, store: Store, row: DatasetRow, where: ChunkPlace, place: Place, dataid: str
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
        return _as_csv(frame) if format_of(self._where.format).is_delimited else frame

    def spark(self, spark: "SparkSession") -> "DataFrame":
        return read_chunk_frame(spark, self._place, self._dataid, self._row.password, self._bounds)

    def version(self) -> str | None:
        return f"{self._dataid} {self._place.generation}" if self._place.generation else None

    def _rows(self, table: Table) -> Rows:
        return Rows(table, self._dataid, self._bounds(), self._row.password)

    def _bounds(self) -> Any:
        return bounds_of(self._store, self._row.datasetid, self._dataid)


def _as_csv(frame: "PandasFrame") -> "PandasFrame":
    """Return the frame with NaN for missing strings, as `read_csv` has it; a chunk has None."""
    pandas = folder.need("pandas")
    for at in range(len(frame.columns)):
        column = frame.iloc[:, at]
        if column.dtype == object and (gone := column.isna()).any():
            values = column.to_numpy(copy=True)
            values[gone] = float("nan")
            frame.isetitem(at, pandas.Series(values, index=frame.index, dtype=object))
    return frame


# All chunks of a folder as one source: the READY ones, or all files if nobody tracks it.


class Ready(NamedTuple):
    """A READY chunk, the job that produced it, and whether it is an item."""

    dataid: str
    generation: int | None
    location: str | None
    jobid: str
    is_item: bool


class FolderSource(Source):
    """A folder as it is, chunk after chunk in their natural order."""

    def __init__(self, store: Store, where: Folder) -> None:
        self._store, self._where, self.location = store, where, where.root

    def pandas(self) -> "PandasFrame":
        chunks = self._chunks()
        if chunks is None:
            return folder.read_frame(self._there(), self._where.format, None, self._options())
        frames = [read(self._reading(*chunk), self._where) for chunk in chunks]
        return folder.need("pandas").concat(frames, ignore_index=True)

    def spark(self, spark: "SparkSession") -> "DataFrame":
        chunks = self._chunks()
        if chunks is None:
            return read_files(spark, self._there(), {}, self._where.format, self._options())
        where = self._where
        columns = {"hostname": where.root, "format": where.format, "options": where.options}
        frames = [
            read_chunk_frame(
                spark,
                Place(self._where.datasetid, columns, location, generation, store=self._store.id),
                dataid,
                lambda: None,
                lambda: None,
            )
            for dataid, generation, location in chunks
        ]
        return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), frames)

    def version(self) -> str | None:
        chunks = self._chunks(insist=False)
        return None if chunks is None else sha256(repr(chunks).encode()).hexdigest()

    def _chunks(self, *, insist: bool = True) -> list[tuple[str, int | None, str | None]] | None:
        """Return dataid, generation and location of READY chunks; None if the tables have none."""
        rows = self._store.db.fetch("places.chunks", datasetid=self._where.datasetid)
        folded = list(self._folded({row[0] for row in rows}))
        if not rows and not folded:
            return None
        ready = [Ready(*row[:3], *row[4:]) for row in rows if row[3] == "READY"]
        ready = self._chosen([*ready, *folded])
        if insist and not ready:
            raise Refused(
                f"Source {self._where.datasetid!r} has no READY chunk. "
                f"Run: odf status {typed(self._where.datasetid)}",
                code="DATA_NOT_READY",
            )
        return [row[:3] for row in sorted(ready, key=lambda row: natural_key(row.dataid))]

    def _chosen(self, ready: list[Ready]) -> list[Ready]:
        return ready

    def _folded(self, known: set[str]) -> Iterator[Ready]:
        """Yield the chunks of folded items: only their directories are left."""
        datasetid, root = self._where.datasetid, self._where.root
        rows = self._store.db.fetch("folding.of_dataset", datasetid=datasetid)
        [(first, last)] = rows
        if first is None or not os.path.isdir(root):
            return
        for name in os.listdir(root):
            number = name.removeprefix("dataid=")
            if number.isdecimal() and number not in known and first <= int(number) <= last:
                yield Ready(number, None, os.path.join(root, name), "", is_item=True)

    def _reading(self, dataid: str, generation: int | None, location: str | None) -> Reading:
        fact: dict[str, Any] = {"location": location}
        return Reading(self._where.datasetid, dataid, {}, None, [], [], [], generation, fact=fact)

    def _options(self) -> CsvOptions:
        return csv_options(self._where.datasetid, self._where.options)

    def _there(self) -> str:
        if not os.path.exists(self.location):
            raise Refused(
                f"Source {self._where.datasetid!r} is {self.location}, which doesn't exist. Run: "
                f"odf dataset add {typed(self._where.datasetid)} --hostname /FOLDER",
                code="INVALID_LOCATION",
            )
        return self.location


class NewestSource(FolderSource):
    """The last results of pipelines in their folder: the newest run of each, and all items.

    That is what everybody else sees of them: each run replaces the one before.
    """

    def is_there(self) -> bool:
        """Whether this chunk exists."""
        return bool(self._chunks(insist=False))

    def _chosen(self, ready: list[Ready]) -> list[Ready]:
        root = self._where.root + os.sep
        mine = [row for row in ready if (row.location or "").startswith(root)]
        runs = [row for row in mine if not row.is_item]
        newest = {row.jobid: row for row in sorted(runs, key=lambda x: natural_key(x.dataid))}
        return [*newest.values(), *(row for row in mine if row.is_item)]


# A CSV file as a Spark frame, with the values and types that pandas gives it.


INFERENCE_ROWS = 200_000
"""Rows examined at a time, to find the types of a large file."""


def read_csv(
    spark: "SparkSession", path: str, by_pandas: Callable[[], Any], options: CsvOptions
) -> "DataFrame":
    """Return the frame that pandas reads, as Spark's; Spark's own tasks read a large file."""
    if os.path.getsize(path) <= WHOLE_FILE_BYTES:
        return from_pandas(spark, by_pandas())
    types = _types(path, options)
    if types is None:
        return from_pandas(spark, by_pandas())
    return _large(spark, path, *types, options)


def _types(path: str, options: CsvOptions) -> tuple[dict[str, str], bool] | None:
    """Return column → type, and whether values span lines; None: it isn't a plain table."""
    import pandas

    seen: dict[str, set[str]] = {}
    rows = 0
    options.checked(path)
    reader: Any = pandas.read_csv(path, chunksize=INFERENCE_ROWS, **options.for_pandas())
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
    """Read the file with Spark, as strings; what pandas reads as missing becomes NULL."""
    from pandas._libs.parsers import STR_NA_VALUES
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType, StructType

    schema = StructType()
    for at in range(len(types)):
        schema.add(f"c{at}", StringType())
    reader_options = {**CSV.spark_reading, "multiLine": str(lines).lower()}
    reader_options |= csv_reader_options(spark, options)
    nothing = ["", *filter(None, [options.null])] if options.typed else STR_NA_VALUES
    texts = spark.read.options(**reader_options).schema(schema).csv(escaped_path(path))
    found = []
    for at, (name, kind) in enumerate(types.items()):
        value = F.when(~F.col(f"c{at}").isin(*nothing), F.col(f"c{at}"))
        found.append(value.cast(kind).alias(name))
    return texts.select(*found)


# A source as one run sees it: as it was when first read, whichever steps read it.


class Shelf(Protocol):
    """Where a run keeps what it read of one source, for later steps."""

    @property
    def version(self) -> str | None:
        """Return the version of the source when it was first read."""

    @version.setter
    def version(self, version: str | None) -> None: ...

    def has(self, kind: str) -> bool:
        """Whether there is a frame of this engine."""
        ...

    def frame(self, kind: str) -> Any:
        """Return the frame of this engine."""
        ...

    def keep(self, kind: str, frame: Any) -> Any:
        """Keep a frame if a later step may need it; return the frame to use."""
        ...


class InMemory:
    """The shelf of a run whose steps all run in this process."""

    def __init__(self, *, again: bool) -> None:
        self.version: str | None = None
        self._again = again
        self._frames: dict[str, Any] = {}

    def has(self, kind: str) -> bool:
        return kind in self._frames

    def frame(self, kind: str) -> Any:
        return self._frames[kind]

    def keep(self, kind: str, frame: Any) -> Any:
        if not self._again:
            return frame
        if kind == SPARK:  # lazy: read it now, and not again for each step that uses it
            frame = frame.persist()
            frame.count()
        self._frames[kind] = frame
        return frame

    def clear(self) -> None:
        """Let Spark drop the kept frames."""
        if SPARK in self._frames:
            with suppress(Exception):  # the session may have ended
                self._frames[SPARK].unpersist()
        self._frames.clear()


class Once(Source):
    """A source that shows all steps of a run the same version.

    Pandas frames are kept, and so are rows without a known version. Files that Spark reads are
    large: they stay where they are, and are refused once they change.
    """

    def __init__(self, source: Source, shelf: Shelf) -> None:
        self._source, self._shelf, self.location = source, shelf, source.location
        self._converted: Any = None
        self._lazy: Any = None

    def pandas(self) -> Any:
        if self._shelf.has(PANDAS):
            return self._shelf.frame(PANDAS)
        if self._shelf.has(SPARK):
            return as_pandas(self._shelf.frame(SPARK))
        return self._shelf.keep(PANDAS, self._of_one_version(self._source.pandas))

    def spark(self, spark: "SparkSession") -> "DataFrame":
        if self._shelf.has(SPARK):
            return self._shelf.frame(SPARK)
        if self._source.by_pandas() or (self._shelf.has(PANDAS) and not self._is_the_same()):
            if self._converted is None:
                self._converted = from_pandas(spark, self.pandas())
            return self._converted
        if self._lazy is None:
            self._lazy = self._source.spark(spark)
        frame = self._of_one_version(lambda: self._lazy)
        return frame if self._shelf.version else self._shelf.keep(SPARK, frame)

    def version(self) -> str | None:
        return self._source.version()

    def by_pandas(self) -> bool:
        return self._source.by_pandas()

    def _of_one_version(self, read: Callable[[], Any]) -> Any:
        """Return what is read; `Refused` if it isn't what earlier steps saw."""
        if self._shelf.version is None:
            self._shelf.version = self._source.version()
            return read()
        frame = read()
        if not self._is_the_same():
            raise Refused(
                f"{self.location} has changed since this run began to read it, and it is too large "
                "to keep a copy. Nothing was published. Run it again when no program writes there.",
                code="INVALID_LOCATION",
            )
        return frame

    def _is_the_same(self) -> bool:
        try:
            now = self._source.version()
        except DataflowError:  # it is gone
            return False
        return now is not None and now == self._shelf.version
