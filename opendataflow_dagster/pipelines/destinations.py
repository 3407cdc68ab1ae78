"""Where a pipeline's result goes: a CSV file, a chunk of a folder or table, rows, BigQuery."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from ..chunk import Chunk, Place, Result, reason_of
from ..errors import DataflowError, Refused
from ..formats import CSV, Format, format_of
from ..formats.csv_options import csv_options
from ..location import JDBC, BigQueryTable, CsvFile, Folder, Table, is_select, resolve
from ..model import Claim, Plan, Say
from ..spark.chunks import publish_frame
from ..spark.session import is_spark_frame
from ..storage.chunks import bounds_of, publish, publish_to_folder
from ..storage.table import Rows
from ..store import moves
from ..store.store import Store
from ..util.text import typed
from . import csv_file, csv_journal, frames
from .bigquery import BigQueryDestination
from .frames import (
    REPLACE,
    Confirm,
    DatasetRow,
    Destination,
    Parts,
    Verdict,
    judged,
    kind_of,
    one,
    registered,
    whole_pandas,
    write_mode,
)
from .project import WORK_FOLDER, Pipeline, Project
from .sql_table import TableDestination, only_once
from .transformation import SPARK


def destination_of(
    store: Store,
    project: Project,
    pipeline: Pipeline,
    plan: Plan,
    *,
    read_by_others: bool,
    say: Say = lambda line: None,
) -> Destination:
    """Return the destination of a pipeline: as it is registered, or else a file in `output/`.

    `read_by_others` says that another pipeline reads it: then, without a registration, it is a
    folder of chunks.
    """
    found = _destination_of(store, project, pipeline, plan, read_by_others, say)
    found.work = str(project.root / WORK_FOLDER / pipeline.slug)
    return found


def _destination_of(
    store: Store, project: Project, pipeline: Pipeline, plan: Plan, read_by_others: bool, say: Say
) -> Destination:
    [slug] = plan.outputs
    row = registered(store, slug, project.root)
    if row is None:
        if not read_by_others:
            path = output_file(project, pipeline.slug)
            dataset = f"{typed(slug)} --hostname {typed(path)}"
            return CsvDestination(csv_file.CsvAppender(path, store, say), path, "", dataset)
        folder = str(project.root / "output" / slug)
        row = DatasetRow(slug, {"datasetid": slug, "hostname": folder, "format": CSV.name}, None)
    where, mode = resolve(slug, row.columns), write_mode(row)
    if isinstance(where, BigQueryTable | Table) and is_select(where.name):
        raise Refused(
            f"{slug!r} is a SELECT, which can't be written to. "
            f"Run: odf dataset add {typed(slug)} --tablename TABLE",
            code="INVALID_LOCATION",
        )
    if isinstance(where, CsvFile):
        if csv_options(slug, where.options).declared:
            raise Refused(
                f"{slug!r} has options, which describe files written by others; a pipeline writes "
                "commas and UTF-8. Register another dataset as the destination, or run: "
                f"odf dataset add {typed(slug)} --options ''",
                code="INVALID_LOCATION",
            )
        appender = csv_file.CsvAppender(where.path, store, say)
        return CsvDestination(appender, where.path, mode, typed(slug))
    if isinstance(where, BigQueryTable):
        return BigQueryDestination(where, row.password, mode)
    if isinstance(where, Table) and not where.column:
        return TableDestination(where, row.password, mode)
    return ChunkDestination(store, row)


def publish_result(
    store: Store,
    project: Project,
    pipeline: Pipeline,
    destination: Destination,
    frame: Any,
    chunk: Chunk,
    *,
    is_item: bool,
    say: Callable[[str], Any] = lambda line: None,
) -> Result:
    """Publish the result of a run or an item; refuse to replace a newer one."""

    def confirm() -> None:
        # The place is locked here: no newer run can publish in between.
        store.confirm(chunk.claim)
        refuse_older(store, destination, chunk, is_item=is_item)

    if is_item:
        confirm()
        result = one(destination.append([(chunk.claim, frame)], confirm))
    else:
        result = publish_with_output(project, pipeline, destination, frame, chunk, confirm, say)
    return result._replace(replaces=destination.replaces(items=is_item) or None)


def refuse_older(
    store: Store, destination: Destination, chunk: Chunk, *, is_item: bool = False
) -> None:
    """Refuse a chunk that would replace a newer one."""
    if destination.replaces(items=is_item):
        for datasetid in chunk.outputs:
            moves.refuse_older(store, datasetid, chunk.jobid, chunk.dataid)


def publish_with_output(
    project: Project,
    pipeline: Pipeline,
    destination: Destination,
    frame: Any,
    chunk: Chunk,
    confirm: Confirm,
    say: Callable[[str], Any] = lambda line: None,
) -> Result:
    """Publish a frame as a chunk of the destination, and write it for people into output/.

    The file is ready before the destination has the rows: what is published must become READY,
    since a table would get it twice. If the file can't be replaced then, a warning says so.
    """
    refuse_loss(project, pipeline, destination)
    path = output_file(project, pipeline.slug)
    if is_output(project, pipeline, destination):
        return destination.publish(frame, chunk, confirm)
    with ExitStack() as stack:
        with csv_file.refused_if_unwritable(path):
            shown, note = _for_people(frame, path, destination)
            show = stack.enter_context(
                csv_file.write_beside(path, shown, instead=_moved(path), for_people=True)
            )
        result = destination.publish(frame, chunk, confirm)
        try:
            show()
        except (OSError, DataflowError) as error:
            say(f"Warning: {path} still has the previous run's rows: {reason_of(error)}")
        else:
            if note:
                say(note)
    return result


def _for_people(frame: Any, path: str, destination: Destination) -> tuple[Any, str]:
    """Return what people see of a frame: the first rows of a large Spark frame, and a note.

    Only as many rows as fit pass through Java and this process.
    """
    if kind_of(frame) != SPARK:
        return whole_pandas(frame), ""
    rows = frame.count()
    if rows <= frames.MAX_COLLECTED_ROWS:
        return whole_pandas(frame), ""
    head = frame.limit(frames.MAX_COLLECTED_ROWS)
    note = f"{path} has the first {frames.MAX_COLLECTED_ROWS:,} of {rows:,} rows; all are in "
    return whole_pandas(head), note + f"{destination.location}"


def refuse_loss(project: Project, pipeline: Pipeline, destination: Destination) -> None:
    """Refuse a batch run that would delete what items appended to a file."""
    destination.refuse_loss()
    if not is_output(project, pipeline, destination):
        path = output_file(project, pipeline.slug)
        csv_journal.refuse_loss(path, _moved(path))


def is_output(project: Project, pipeline: Pipeline, destination: Destination) -> bool:
    """Whether a destination is itself the file for people."""
    path = output_file(project, pipeline.slug)
    return os.path.realpath(destination.location) == os.path.realpath(path)


def _moved(path: str) -> str:
    return f"Move it away: mv -n {typed(path, path.removesuffix('.csv') + '-items.csv')}"


def output_file(project: Project, slug: str) -> str:
    return str(project.root / "output" / f"{slug}.csv")


class CsvDestination(Destination):
    """A CSV file: a batch run replaces it, items are appended, unless `mode` says otherwise.

    Rows that items appended are replaced only if `mode` says so; errors show `dataset` to set it.
    """

    def __init__(self, appender: csv_file.CsvAppender, path: str, mode: str, dataset: str) -> None:
        self._appender, self.location, self._mode = appender, path, mode
        self._instead = (
            ""
            if mode
            else (
                f"To append to it, run: odf dataset add {dataset} --writemode append. "
                f"To let each run and each item replace it: --writemode replace."
            )
        )

    def refuse_loss(self) -> None:
        if self._instead:
            csv_journal.refuse_loss(self.location, self._instead)

    def replaces(self, *, items: bool = False) -> bool:
        return self._mode == REPLACE or not (self._mode or items)

    def publish(self, frame: Any, chunk: Chunk, confirm: Confirm) -> Result:
        with self.rows(frame, chunk) as rows, csv_file.refused_if_unwritable(self.location):
            if self.replaces():
                return csv_file.replace(self.location, rows, confirm, instead=self._instead)
            return one(self._appender.append([(chunk.claim, whole_pandas(rows))], confirm))

    def append(self, parts: Parts, confirm: Confirm) -> list[Verdict]:
        with csv_file.refused_if_unwritable(self.location):
            if not self.replaces(items=True):
                return self._appender.append(
                    [(claim, whole_pandas(f)) for claim, f in parts], confirm
                )
            return [self._instead_of_all(whole_pandas(frame), confirm) for _, frame in parts]

    def _instead_of_all(self, frame: Any, confirm: Confirm) -> Verdict:
        path = self.location
        return judged(lambda: csv_file.replace(path, frame, confirm), frame, path)


class ChunkDestination(Destination):
    """A folder or a table with chunks: each chunk replaces only itself."""

    def __init__(self, store: Store, row: DatasetRow) -> None:
        self._store, self._row, self._where = store, row, resolve(row.datasetid, row.columns)
        self.location = getattr(self._where, "root", "") or getattr(self._where, "location", "")
        self._place = Place(row.datasetid, row.columns, self.location)

    def publish(self, frame: Any, chunk: Chunk, confirm: Confirm) -> Result:
        confirm()
        if is_spark_frame(frame) and self._is_kept_by_spark(frame):
            return publish_frame(self._store, self._place, chunk, frame)
        return publish(self._store, self._place, chunk, self._plain(frame))

    def _is_kept_by_spark(self, frame: Any) -> bool:
        """Whether Spark writes all rows: in CSV, it omits empty ones of a single column."""
        format = self._format
        if format is None or not (format.is_delimited and len(frame.columns) == 1):
            return format is None or format.in_spark
        return frame.where(frame[0].isNull()).isEmpty()

    def append(self, parts: Parts, confirm: Confirm) -> list[Verdict]:
        return [self._one(claim, whole_pandas(frame), confirm) for claim, frame in parts]

    def _one(self, claim: Claim, frame: Any, confirm: Confirm) -> Verdict:
        return judged(
            lambda: self._written(claim, self._plain(frame), confirm), frame, self.location
        )

    def _written(self, claim: Claim, frame: Any, confirm: Confirm) -> Result:
        where = self._where
        if isinstance(where, Folder):
            return publish_to_folder(where, claim, frame, confirm, self._store.id)
        if isinstance(where, Table) and where.dialect != JDBC:
            bounds = bounds_of(self._store, self._row.datasetid, claim.dataid)
            only_once(frame.columns, where.dialect)
            rows = Rows(where, claim.dataid, bounds, self._row.password)
            return Result(rows.replace(frame, confirm), location=where.location)
        return publish(self._store, self._place, Chunk(claim, {}, {}, {}), frame)

    def _plain(self, frame: Any) -> Any:
        """Return a pandas frame without its index; in CSV, with the names that pandas reads."""
        frame = whole_pandas(frame).reset_index(drop=True)
        return self._format.headed(frame) if self._format else frame

    @property
    def _format(self) -> Format | None:
        """The format of a folder's files."""
        return format_of(self._where.format) if isinstance(self._where, Folder) else None
