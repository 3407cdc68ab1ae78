"""What a job has made becomes the chunk: in its folder or its table, whole or not at all."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

from ..chunk import Chunk, Place, Result, Unpublished
from ..errors import Refused
from ..formats import format_of
from ..formats.csv_options import csv_options
from ..location import (
    DEFAULT_FORMAT,
    JDBC,
    Folder,
    ObjectStore,
    Table,
    chunk_place,
    is_packed,
)
from ..model import Claim
from ..store.store import Store
from . import folder as folders
from .compact import packed_source, read_packed
from .folder import put
from .read import Reading, bounds_of, failing
from .table import Rows


def publish(
    store: Store, place: Place, chunk: Chunk, obj: Any, *, format: str = DEFAULT_FORMAT
) -> Result:
    """Publish an object as the chunk of a dataset, for the claim in hand; it tells what it wrote.

    The object is a frame of pandas or Spark, or an Arrow table; for a folder also bytes, or the
    Path of a file or folder. Readers see the old chunk or the new one. The claim is asked for again
    right before: `StaleClaim` means that nothing was changed. `format` is for a folder that is
    registered without one.
    """

    def confirm() -> None:
        store.confirm(chunk.claim)

    with failing():
        target = chunk_place(place.datasetid, place.columns, format)
        if isinstance(target, Folder):
            if format_of(target.format).needs_spark:
                raise _spark_only(target, "written")
            return publish_to_folder(target, chunk.claim, obj, confirm, store.id)
        if isinstance(target, ObjectStore) or target.dialect == JDBC:
            raise _spark_only(target, "written")
        bounds = bounds_of(store, place.datasetid, chunk.dataid)
        rows = Rows(target, chunk.dataid, bounds, lambda: chunk.password(place.datasetid))
        frame = obj if folders.is_frame(obj) else folders.as_table(obj).to_pandas()
        return Result(rows.replace(frame, confirm), location=target.location)


def publish_to_folder(
    folder: Folder, claim: Claim, obj: Any, confirm: Callable[[], None], store: str
) -> Result:
    """Publish an object as a chunk of a folder of files.

    Args:
        folder: The place; its format is one that needs no Spark.
        claim: Which chunk, and for which generation.
        obj: What `folders.write` takes: a frame, an Arrow table, bytes, or a Path.
        confirm: Raises if the claim isn't ours any more; called right before the chunk appears.
        store: The id of the store whose generation it is.
    """
    note: dict[str, Any] = {}

    def write(path: str) -> dict[str, Any]:
        note.update(folders.write(obj, path, folder.format))
        return {"jobid": claim.jobid, **note}

    path = put(folder.root, claim.dataid, claim.generation, write, confirm=confirm, store=store)
    return Result(note.get("rows"), note["bytes"], location=path)


def publishing(
    store: Store, compute: Callable[[Chunk], Any], *, format: str = DEFAULT_FORMAT
) -> tuple[Callable[[Chunk], Any], Callable[[Chunk], dict[str, Result]]]:
    """A function in two for `produce`: what it returns besides `Result`s is published afterwards.

    It returns the object for a job's only output, or a dict: dataset → object. Several threads may
    use the pair, each for a chunk of its own.
    """
    kept = threading.local()

    def computed(chunk: Chunk) -> Any:
        kept.objects = {}
        returned = compute(chunk)
        if not isinstance(returned, Mapping):
            if returned is None or isinstance(returned, Result) or len(chunk.outputs) > 1:
                return returned
            returned = dict.fromkeys(chunk.outputs, returned)
        mine = {
            each: value
            for each, value in returned.items()
            if each in chunk.outputs and not (value is None or isinstance(value, Result))
        }
        kept.objects = mine
        return {
            each: Unpublished(rows_of(mine[each])) if each in mine else value
            for each, value in returned.items()
        }

    def published(chunk: Chunk) -> dict[str, Result]:
        return {
            each: publish(store, chunk.outputs[each], chunk, obj, format=format)
            for each, obj in kept.objects.items()
        }

    return computed, published


def rows_of(obj: Any) -> int | None:
    """How many rows an object has that is to be published; None if that isn't known yet."""
    if hasattr(obj, "num_rows"):  # a table of Arrow
        return obj.num_rows
    return len(obj) if hasattr(obj, "columns") and hasattr(obj, "__len__") else None


def read(found: Reading, target: Any, kind: str = "pandas") -> Any:
    """The data of a chunk as `pandas`, `arrow`, `bytes` or `path`; of a table, its frame."""
    if isinstance(target, ObjectStore):
        raise _spark_only(target, "read")
    if not isinstance(target, Folder):
        if kind == "path":
            return target.location
        if target.dialect == JDBC:
            raise _spark_only(target, "read")
        if kind == "bytes":
            raise Refused(
                f"{found.datasetid!r} is a table, so a chunk of it isn't bytes. Annotate the input "
                "as pandas.DataFrame.",
                code="INVALID_LOCATION",
            )
        frame = Rows(target, found.dataid, found.bounds, found.password).read()
        return folders.as_table(frame) if kind == "arrow" else frame
    path, note = found.located(target)
    if is_packed(path):
        return _packed(path, note, kind)
    if kind == "path":
        return path
    if kind == "bytes":
        return folders.read_bytes(path)
    format = note.get("format") or target.format
    if format_of(format).needs_spark:
        raise _spark_only(target._replace(format=format), "read")
    if isinstance(schema := note.get("schema"), dict):  # Spark wrote it
        return _as(kind, folders.read_with_schema(path, format, schema))
    way = folders.read_table if kind == "arrow" else folders.read_frame
    options = csv_options(found.datasetid, target.options)
    return way(path, format, note.get("columns"), options)


def _packed(location: str, note: Mapping[str, Any], kind: str) -> Any:
    """The same of a chunk that lies in one file with others."""
    if kind not in ("pandas", "arrow"):
        raise Refused(
            f"The chunk is packed with others into {packed_source(location)[0]}, so it is no file "
            "of its own. Annotate the input as a DataFrame, or as pyarrow.Table.",
            code="INVALID_LOCATION",
        )
    if isinstance(schema := note.get("schema"), dict):
        rows = read_packed(location, coerce_int96_timestamp_unit="us")
        return _as(kind, folders.conform(rows, folders.arrow_schema(schema)))
    rows = read_packed(location)
    if kind == "arrow":
        return rows
    return folders.typed_as(rows.to_pandas(), note.get("columns") or {})


def _as(kind: str, rows: Any) -> Any:
    return rows if kind == "arrow" else folders.nullable_frame(rows)


def _spark_only(target: Folder | ObjectStore | Table, how: str) -> Refused:
    kind = target.dialect if isinstance(target, Table) else target.format
    where = "an object store" if isinstance(target, ObjectStore) else f"the format {kind!r}"
    what = "Return" if how == "written" else "Annotate the input as"
    return Refused(
        f"{target.datasetid!r} is in {where}, which is {how} by Spark only. {what} a DataFrame of "
        "Spark.",
        code="INVALID_LOCATION",
    )
