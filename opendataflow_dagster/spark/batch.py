"""Many small chunks in one Spark job: read, computed and written together, published one by one."""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..chunk import Chunk, ChunkFailed, Place
from ..errors import DataflowError, SessionError
from ..formats import format_of
from ..location import Folder, Table, chunk_place, is_packed
from ..model import Claim
from ..storage.chunks import located
from ..storage.folder import BATCH, DATAID_COLUMN, STAGING, directory
from ..storage.table import Bounds
from ..store.store import Store
from . import chunk_files
from .chunk_files import escaped_path, noted_schema, write_files
from .chunks import StagedFolder, StagedFrame, unchanged
from .evidence import ROWS, evidence_by_group, observed
from .job import SparkJob
from .schema import ANY, compare, quoted, schema_text

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class BatchInput(NamedTuple):
    """The directory of an input's chunk, and how to read it together with others."""

    path: str
    root: str
    format: str
    schema: Any


BatchInputs = Mapping[str, BatchInput]
"""The inputs of one chunk, by dataset."""


class BatchWork(Protocol):
    """What a batch needs of the work on a job (`SparkWork`)."""

    store: Store
    job: SparkJob
    format: str
    say: Callable[[str], Any]

    @property
    def takes_chunk(self) -> bool: ...
    def spark(self) -> "SparkSession": ...
    def inputs_of(self, chunk: Chunk) -> list[str]: ...
    def watched(self, chunks: Sequence[Chunk]) -> AbstractContextManager[None]: ...
    def call(self, chunk: Chunk | None, frames: Mapping[str, "DataFrame"]) -> dict[str, Any]: ...
    def fit(self, datasetid: str, dataid: str, df: "DataFrame") -> "DataFrame": ...
    def extra(self, datasetid: str, df: "DataFrame") -> list[str]: ...
    def keep(self, chunk: Chunk, datasetid: str, staged: StagedFrame) -> None: ...
    def forget(self, claim: Claim) -> None: ...
    def sweep(self, place: Place) -> None: ...
    def why_stopping(self) -> str | None: ...


class ChunkBatch:
    """Claimed chunks of a job, as far as one Spark job can compute them together.

    Small chunks cost Spark more for planning and starting than for computing. A chunk that can't be
    combined (another schema, no directory, a table as output), or that fails, is left out here; it
    then runs by itself.
    """

    def __init__(self, work: BatchWork, chunks: Sequence[Chunk]) -> None:
        self.work, self.chunks = work, chunks
        self._schemas: dict[str, str] = {}

    def make(self) -> None:
        for alike in self._alike():
            if len(alike) > 1 and not self.work.why_stopping():
                chunks = [chunk for chunk, _ in alike]
                try:
                    with self.work.watched(chunks):
                        self._make(chunks, [sources for _, sources in alike])
                except SessionError:
                    raise
                except Exception as error:
                    self._left_alone(chunks, error)

    def _alike(self) -> list[list[tuple[Chunk, BatchInputs]]]:
        """Group the chunks whose inputs can be read together: with the same schemas and formats."""
        if not all(
            self._is_folder(self.chunks[0], datasetid) for datasetid in self.chunks[0].outputs
        ):
            return []
        # Such a function is called once for each chunk: there is none that is the batch's.
        if self.work.takes_chunk:
            return []
        found: dict[Any, list[tuple[Chunk, BatchInputs]]] = {}
        for chunk in self.chunks:
            with suppress(DataflowError):  # the chunk fails with it when it runs by itself
                inputs = self.work.inputs_of(chunk)
                sources = {
                    datasetid: source
                    for datasetid in inputs
                    if (source := self._source(chunk, datasetid))
                }
                if len(sources) == len(inputs):
                    key = tuple(
                        (name, source.root, source.format, source.schema.json())
                        for name, source in sources.items()
                    )
                    found.setdefault(key, []).append((chunk, sources))
        return list(found.values())

    def _make(self, chunks: Sequence[Chunk], sources: Sequence[BatchInputs]) -> None:
        work, spark = self.work, self.work.spark()
        inputs = list(sources[0])
        with unchanged(chunks, inputs, work.format):
            frames = {name: _read(spark, [one[name] for one in sources]) for name in inputs}
            returned = work.call(None, frames)
            for datasetid, df in returned.items():
                self._write(chunks, datasetid, df)

    def _write(self, chunks: Sequence[Chunk], datasetid: str, df: "DataFrame") -> None:
        """Write an output of all chunks in one job, and stage each chunk's files separately."""
        work, spark = self.work, self.work.spark()
        target = self._folder(chunks[0], datasetid)
        work.sweep(chunks[0].outputs[datasetid])
        path = create_folder(target.root, [chunk.generation for chunk in chunks])
        try:
            df = self._fitted(datasetid, chunks[0].dataid, df)
            checked_frame = FormatCheck(df, target.format)
            write_files(checked_frame.frame, path, target.format, by=DATAID_COLUMN)
            schema = {
                "type": "struct",
                "fields": [
                    field
                    for field in df.schema.jsonValue()["fields"]
                    if field["name"] != DATAID_COLUMN
                ],
            }
            directories = {
                folder for folder in os.listdir(path) if folder.startswith(f"{DATAID_COLUMN}=")
            }
            mine = {directory(chunk.dataid): chunk for chunk in chunks}
            if strangers := sorted(directories - set(mine)):
                raise ChunkFailed(
                    f"{work.job.name} returned rows for {strangers[0]}, which isn't in the batch."
                )
            typed = noted_schema({"schema": schema}).add(DATAID_COLUMN, "string")
            # The evidence is of what was read back: `observe` sums over the whole pass, and a batch
            # needs a sum for each chunk.
            written = spark.read.format(target.format).schema(typed).load(escaped_path(path))
            extra = work.extra(datasetid, df.drop(DATAID_COLUMN))
            evidence = evidence_by_group(written, DATAID_COLUMN, extra) if directories else {}
            checked_frame.check(sum(found.rows for found in evidence.values()))
            for name in directories:  # an empty chunk has no directory, and runs by itself
                self._stage(mine[name], datasetid, os.path.join(path, name), evidence, schema)
        finally:
            remove_folder(path)

    def _fitted(self, datasetid: str, dataid: str, df: "DataFrame") -> "DataFrame":
        """Return the frame with the dataset's schema; the column that identifies chunks is last."""
        rest = [column for column in df.columns if column != DATAID_COLUMN]
        kept = df.select(*map(quoted, rest), quoted(DATAID_COLUMN))
        fitted = self.work.fit(datasetid, dataid, kept.drop(DATAID_COLUMN))
        if fitted.columns != rest or fitted.schema != kept.drop(DATAID_COLUMN).schema:
            raise ChunkFailed("its schema has to be merged with the last chunk's")
        schema = schema_text(fitted.schema)
        before = self._schemas.setdefault(datasetid, schema)
        if self.work.job.schema != ANY and compare(before, schema):
            raise ChunkFailed("its schema has to be compared with that of earlier chunks")
        return kept

    def _stage(
        self,
        chunk: Chunk,
        datasetid: str,
        path: str,
        evidence: Mapping[str, Any],
        schema: Mapping[str, Any],
    ) -> None:
        work = self.work
        place = chunk.outputs[datasetid]
        target = self._folder(chunk, datasetid)
        staged = StagedFolder(work.spark(), chunk, target, None, store=work.store.id)
        try:
            for name in os.listdir(path):
                os.rename(os.path.join(path, name), os.path.join(staged.path, name))
            staged.take(evidence[chunk.dataid], schema)
        except BaseException:
            staged.discard()
            raise
        work.keep(chunk, place.datasetid, staged)

    def _left_alone(self, chunks: Sequence[Chunk], error: Exception) -> None:
        """Drop what the batch has staged, so that each chunk is produced by itself."""
        for chunk in chunks:
            self.work.forget(chunk.claim)
        if self.work.why_stopping():
            return
        reason = str(error).strip().partition("\n")[0]
        self.work.say(
            f"A batch of {len(chunks)} chunks can't run as one job ({reason}): running one by one"
        )

    def _source(self, chunk: Chunk, datasetid: str) -> BatchInput | None:
        """Return the directory of a chunk that can be read with others, if it is one."""
        place = chunk.inputs[datasetid]
        target = chunk_place(datasetid, place.columns, self.work.format)
        if not isinstance(target, Folder) or format_of(target.format).is_lake:
            return None
        if place.location and is_packed(place.location):
            return None
        path, note = located(
            target, chunk.dataid, place.location, place.generation, store=place.store
        )
        schema = noted_schema(note)
        root, name = os.path.split(path.rstrip("/"))
        if schema is None or name != directory(chunk.dataid) or dataid_column(schema.names):
            return None
        if not is_combinable(note["format"]):
            return None
        return BatchInput(path, root, note["format"], schema)

    def _is_folder(self, chunk: Chunk, datasetid: str) -> bool:
        target = chunk_place(datasetid, chunk.outputs[datasetid].columns, self.work.format)
        return isinstance(target, Folder) and is_combinable(target.format)

    def _folder(self, chunk: Chunk, datasetid: str) -> Folder:
        target = chunk_place(datasetid, chunk.outputs[datasetid].columns, self.work.format)
        assert isinstance(target, Folder)
        return target


def is_combinable(name: str) -> bool:
    """Whether the files of many chunks can be read and written in one job.

    Text formats can't: they store no types, and no schema of an empty chunk.
    """
    format = format_of(name)
    return format.in_spark and not (format.is_text or format.is_lake)


class FormatCheck:
    """Counts a batch's rows with values that its format changes: the files wouldn't show them."""

    def __init__(self, df: "DataFrame", format: str) -> None:
        self.frame, self._taken = df, None
        if aggregates := chunk_files.loss_aggregates(df.schema, format):
            self.frame, self._taken = observed(df, aggregates)

    def check(self, rows: int) -> None:
        """Raise if there is such a value, or if Spark's count isn't reliable."""
        values = self._taken.aggregates() if self._taken else {}
        if self._taken and (values.get(ROWS) != rows or values.get(chunk_files.BROKEN)):
            raise ChunkFailed("a value may be one that its format can't hold")


def dataid_column(names: Sequence[str]) -> str | None:
    """Return the input's own column that a batch would mistake for its column of dataids."""
    return next((name for name in names if name.lower() == DATAID_COLUMN), None)


def with_dataid(
    df: "DataFrame", dataid: str, place: Place, bounds: Bounds | None, format: str
) -> "DataFrame":
    """Return an input for a batch, with a column that identifies its chunk; none is replaced."""
    from pyspark.sql import functions as F

    target = chunk_place(place.datasetid, place.columns, format)
    is_table = isinstance(target, Table) or format_of(target.format).is_lake
    is_by_value = bounds is None or bounds[1:] == (None, None)
    key = place.columns.get("chunkcolumn") or DATAID_COLUMN
    if (name := dataid_column(df.columns)) and not (is_table and is_by_value and name == key):
        raise ChunkFailed(
            f"{place.datasetid!r} has its own column {name!r}, which a batch uses to identify "
            "its chunks. Rename it, or run the job without batch."
        )
    return df.drop(name or DATAID_COLUMN).withColumn(DATAID_COLUMN, F.lit(dataid))


def _read(spark: Any, sources: Sequence[BatchInput]) -> "DataFrame":
    """Read an input's chunks as one frame, identified by a column."""
    first = sources[0]
    schema = type(first.schema)(list(first.schema)).add(DATAID_COLUMN, "string")
    reader = spark.read.format(first.format).schema(schema).option("basePath", first.root)
    return reader.load([escaped_path(source.path) for source in sources])


def create_folder(root: str, generations: Sequence[int]) -> str:
    """Create a directory for many chunks, named by the last of their generations."""
    path = os.path.join(root, STAGING, f"{BATCH}{max(generations)}-{os.urandom(4).hex()}")
    os.makedirs(path)
    return path


def sweep_folders(store: Store, root: str) -> None:
    """Remove the directories of killed batches: those without a living claim."""
    with suppress(FileNotFoundError):
        left = [
            folder for folder in os.listdir(os.path.join(root, STAGING)) if folder.startswith(BATCH)
        ]
        alive = store.db.fetch("cleaning.live") if left else []
        generations = {str(row[0]) for row in alive}
        for name in left:
            if name.removeprefix(BATCH).partition("-")[0] not in generations:
                remove_folder(os.path.join(root, STAGING, name))


def remove_folder(path: str) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # another batch is using it
        os.rmdir(os.path.dirname(path))
