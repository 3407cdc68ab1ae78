"""Writes a frame aside as a chunk, with its evidence, then publishes or discards it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..chunk import Chunk, ChunkFailed, Place, Result
from ..errors import DataflowError
from ..formats import format_of
from ..location import DEFAULT_FORMAT, Folder, ObjectStore, Table, chunk_place
from ..storage.folder import Staged
from ..storage.read import failing
from ..store.store import Store
from . import text_formats
from .chunk_files import count_rows, read_files, remove_markers, write_files
from .evidence import Evidence, IncompleteObservation, evidence_of_frame, observed
from .object_store import StagedRemote
from .progress import PROGRESS_SECONDS, SparkProgress, interrupting, working_on
from .read import not_in_spark
from .session import in_a_line
from .text_formats import line_aggregates, line_note
from .write_table import StagedLake, staged_rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


Confirm = Callable[[], None]


class StagedFrame(Protocol):
    """A chunk that is written and not yet published."""

    evidence: Evidence

    @property
    def bytes(self) -> int | None:
        """Bytes of its files, if it has any."""
        ...

    def show(self, confirm: Confirm) -> str:
        """Publish it, if the claim is still ours; returns its location."""
        ...

    def discard(self) -> None:
        """Remove it if it wasn't published, or else what it replaced."""
        ...

    def frame(self) -> "DataFrame":
        """The rows as they were written."""
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
    """Write a frame aside for the place that its dataset is registered with."""
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
    """The result of a staged chunk; with its location, once it is published."""
    evidence = staged.evidence
    return Result(
        evidence.rows, staged.bytes, evidence.fingerprint, location, schema=evidence.schema
    )


class StagedFolder:
    """A chunk of a folder in its staging directory."""

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
        texts = text_formats.loss_aggregates(df.schema, format)
        extra = [*extra, *line_aggregates(df.schema, format), *texts]
        frame, taken = observed(df, extra)
        write_files(frame, self.path, format)
        schema, rows = df.schema.jsonValue(), count_rows(self.path, format)
        try:
            evidence = taken(rows)
        except IncompleteObservation:  # tasks were repeated: the files on disk are the evidence
            one_column = format_of(format).is_delimited and len(df.columns) == 1
            if texts or one_column:  # the format may have lost some rows
                seen = evidence_of_frame(df, extra)
                text_formats.refuse_lossy(seen, df, format)
                line_note(seen, df.schema, format)
            note = {"format": format, "schema": schema}
            evidence = evidence_of_frame(read_files(self._spark, self.path, note, ""), extra)
            if rows not in (None, evidence.rows):
                raise _short(self.path, evidence.rows, rows) from None
        text_formats.refuse_lossy(evidence, df, format)
        self._lines = line_note(evidence, df.schema, format)
        self._tell(evidence, schema)

    def take(self, evidence: Evidence, schema: Mapping[str, Any]) -> None:
        """Verify what was written with other chunks, and let its note tell of it."""
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
    return DataflowError(f"Of {rows} rows that were written to {where}, {found} are there.")


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
    """Publish a frame of Spark as the chunk of a dataset, as `publish` does other objects.

    `say` is given how far a job is that takes long.
    """
    try:
        with failing():
            spark = df.sparkSession
            with working_on([chunk.claim]):
                with interrupting(spark), SparkProgress(spark, say, every=PROGRESS_SECONDS):
                    staged = stage(spark, store, chunk, place, df, (), format)
                try:
                    return result_of(staged, staged.show(lambda: store.confirm(chunk.claim)))
                finally:
                    staged.discard()
    except Exception as error:
        if (reason := in_a_line(error)) is None:
            raise
        raise ChunkFailed(reason) from error
