"""Reads and publishes chunks: whether one may be read, its data, and what a job produced."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from ..chunk import Chunk, ChunkFailed, Place, Result, Unpublished
from ..errors import DataflowError, Overtaken, Refused, SessionError, StaleClaim
from ..explain.answers import Answer, Reason, five_answers, read_state
from ..explain.explain import explain_chunk, in_order
from ..explain.reasons import advice, hindrances
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
    path_of,
    place_of,
)
from ..model import Claim, Plan, check_id
from ..store.store import Store
from ..util.text import typed
from . import folder as folders
from .compact import is_there, packed_source, read_packed
from .compact import read_note as packs_note
from .folder import alike, data_files, find, is_foreign, put, read_note
from .table import Rows

T = TypeVar("T")

TRIES = 5
"""How often a chunk is read again if it was replaced meanwhile."""

READER = ""
"""The job of a reader that isn't a job: it has no rows."""


class Reading(NamedTuple):
    """A chunk's state, why it shouldn't be read, and where it is."""

    datasetid: str
    dataid: str
    columns: Mapping[str, str | None]
    encrypted: str | None
    seen: list[tuple]
    reasons: list[Reason]
    answers: list[Answer]
    generation: int | None = None
    maker: str = ""
    fact: Mapping[str, Any] = {}
    bounds: tuple[str, str | None, int | None] | None = None
    store: str = ""

    def insist(self) -> None:
        """Raise the first refusal, if there is any."""
        if self.reasons:
            first = self.reasons[0]
            action = next((reason.action for reason in self.reasons if reason.action), "")
            raise refusal(first.code, first.text, action)

    def password(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The password of the dataset, decrypted now."""
        from ..config.credentials import password_of

        return password_of(self.datasetid, self.encrypted, environ)

    def target(self, format: str) -> Folder | ObjectStore | Table:
        """The place of the dataset."""
        return chunk_place(self.datasetid, self.columns, format)

    def located(self, folder: Folder) -> tuple[str, dict[str, Any]]:
        """The chunk's file or directory, according to the tables, and its note."""
        again = f"odf resubmit {typed(self.maker, self.dataid)}"
        where = self.fact.get("location")
        return located(folder, self.dataid, where, self.generation, again, store=self.store)


def located(
    folder: Folder,
    dataid: str,
    produced: str | None,
    generation: int | None,
    again: str = "",
    *,
    store: str = "",
) -> tuple[str, dict[str, Any]]:
    """Where a READY chunk of a folder is, and its note; refused if it doesn't match the tables.

    `again` is the command that produces it again. What another store published isn't compared with
    the tables of this one: `odf ready` said that it exists.
    """
    if produced and is_packed(produced):
        if not is_there(produced):
            text = f"{folder.datasetid!r} is READY, but the pack of chunk {dataid!r} is gone"
            raise refusal("INVALID_LOCATION", f"{text}: {produced}", again)
        return produced, packs_note(produced)
    found = find(folder.root, dataid, produced)
    if found is None:
        text = f"{folder.datasetid!r} is READY, but chunk {dataid!r} has no data"
        raise refusal("INVALID_LOCATION", f"{text} in {folder.root}", again)
    others = alike(found, dataid)
    if len(others) > 1 and (path_of(produced or "") or produced) not in others:
        text = f"{folder.datasetid!r} has several files for chunk {dataid!r}: {', '.join(others)}"
        raise refusal("INVALID_LOCATION", f"{text}. Move away the wrong ones")
    note = read_note(found)
    if note.get("rows") and not data_files(found):
        text = f"{folder.datasetid!r} is READY, but the files of chunk {dataid!r} are gone"
        raise refusal("INVALID_LOCATION", f"{text} from {found}", again)
    there = note.get("generation")
    # Whoever published it was killed before it settled the claim: the tables tell of the chunk
    # before, which isn't there any more.
    if generation and there and there > generation and not is_foreign(note, store):
        text = f"{found} is of generation {there}, but the tables say {generation}"
        raise refusal("DATA_NOT_READY", f"{text}: it was published but not settled", again)
    return found, note


def refusal(code: str, text: str, action: str = "") -> Refused:
    """A refusal in one line: what is in the way, and the smallest way out of it."""
    return Refused(f"{text}." + (f" Run: {action}" if action else ""), code=code)


def with_code(error: Exception) -> str:
    """What an error says, led by its code if it is a refusal with one."""
    code = error.code if isinstance(error, Refused) else Refused.code
    return str(error) if code == Refused.code else f"{code}: {error}"


@contextmanager
def failing() -> Iterator[None]:
    """Turn an error that tells a person what to do into the reason of a chunk's failure.

    A missing Spark session isn't turned: no chunk is to blame for that.
    """
    try:
        yield
    except (StaleClaim, Overtaken, ChunkFailed, SessionError):
        raise
    except DataflowError as error:
        raise ChunkFailed(with_code(error)) from error


def ask(store: Store, datasetid: str, dataid: str, format: str) -> Reading:
    """Ask the five questions about one chunk of a dataset, for a reader."""
    check_id("datasetid", datasetid)
    check_id("dataid", dataid)
    mine = store.id

    def work() -> Reading:
        with store.db.reading():
            return _ask(store, datasetid, dataid, format)._replace(store=mine)

    return store.db.insist(work)[0]


def read_chunk(
    store: Store, datasetid: str, dataid: str, read: Callable[[Reading], T], *, format: str
) -> tuple[T, Reading]:
    """Read a chunk by `read`, and what it was then: it was READY before and after, and the same."""
    gone: FileNotFoundError | None = None
    # Readers lock nothing, since one that dies would hold up the producers. Instead, the rows that
    # decide are the same before and after, or the chunk is read again.
    for _ in range(TRIES):
        found = ask(store, datasetid, dataid, format)
        found.insist()
        try:
            data = read(found)
        except FileNotFoundError as error:
            gone = error
            continue  # a publish or a compaction moved it while its files were listed
        except Exception:
            if _seen(store, datasetid, dataid) != found.seen:
                continue  # it was replaced under our hands
            raise
        if _seen(store, datasetid, dataid) == found.seen:
            return data, found
    if gone:
        raise gone
    raise refusal(
        "DATA_NOT_READY", f"{datasetid!r} was replaced each of the {TRIES} times that it was read"
    )


def producers(store: Store, datasetid: str) -> list[str]:
    """The jobs that write a dataset."""
    rows = store.db.fetch("state.producers", datasetid=datasetid)
    return [jobid for (jobid,) in rows]


def bounds_of(
    store: Store, datasetid: str, dataid: str
) -> tuple[str, str | None, int | None] | None:
    """Which rows of a table a chunk is, if it has been split."""
    known = {"datasetid": datasetid, "dataid": dataid}
    rows = store.db.fetch("reading.bounds", **known)
    return rows[0] if rows else None


def _ask(store: Store, datasetid: str, dataid: str, format: str) -> Reading:
    db, known = store.db, {"datasetid": datasetid, "dataid": dataid}
    registered = db.records("state.dataset", datasetid=datasetid)
    columns = {name.lower(): value for name, value in (registered or [{}])[0].items()}
    encrypted = columns.pop("encryptedpass", None)
    columns = {name: None if each is None else str(each) for name, each in columns.items()}
    if not registered:
        action = f"odf dataset add {typed(datasetid)} --hostname /FOLDER"
        text = f"dataset {datasetid!r} isn't registered"
        reasons = [Reason("NOT_REGISTERED", text, action)]
        return Reading(datasetid, dataid, columns, None, [], reasons, [])

    # The rows that decide, as for a job that reads this dataset and writes nothing.
    seen = db.run("state.rows", **known)
    state = read_state(store, Plan(READER, (datasetid,), (), (), (), False), dataid)
    state = state._replace(places={datasetid: _checkable(datasetid, columns, format)})

    def above(producer: str) -> Reason | None:
        found = explain_chunk(store, producer, dataid, None)
        if found.may_run:
            return None
        return found.reasons[0]._replace(action=found.action)

    reasons = in_order([*hindrances(state, above), *advice(state)])
    made, fact = next(state.inputs(), (None, {}))
    return Reading(
        datasetid,
        dataid,
        columns,
        encrypted,
        seen,
        reasons,
        five_answers(state),
        made.generation if made else None,
        made.jobid if made else "",
        fact,
        next(iter(db.run("reading.bounds", **known)), None),
    )


def _checkable(datasetid: str, columns: Mapping[str, str | None], format: str) -> str | None:
    """The location, if it is a folder; whether a table exists, its database knows."""
    try:
        target = chunk_place(datasetid, columns, format)
    except Refused:
        return place_of(columns)
    return place_of(columns) if isinstance(target, Folder) else None


def _seen(store: Store, datasetid: str, dataid: str) -> list[tuple]:
    known = {"datasetid": datasetid, "dataid": dataid}
    return store.db.fetch("state.rows", **known)


# What a job has made becomes the chunk: in its folder or its table, whole or not at all.


def publish(
    store: Store, place: Place, chunk: Chunk, obj: Any, *, format: str = DEFAULT_FORMAT
) -> Result:
    """Publish an object as the chunk of a dataset, for the current claim; return its facts.

    The object is a pandas or Spark frame, or an Arrow table; for a folder also bytes, or the Path
    of a file or folder. Readers see the old chunk or the new one. The claim is checked right
    before: `StaleClaim` means that nothing was changed. `format` is for a folder that is registered
    without one.
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
                f"{found.datasetid!r} is a table, so a chunk of it isn't bytes. Annotate the "
                "input as pandas.DataFrame.",
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
    """The same for a chunk that shares a file with others."""
    if kind not in ("pandas", "arrow"):
        raise Refused(
            f"The chunk is packed with others into {packed_source(location)[0]}, so it "
            "isn't a file of its own. Annotate the input as a DataFrame, or as "
            "pyarrow.Table.",
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
    verb, what = ("write", "Return") if how == "written" else ("read", "Annotate the input as")
    return Refused(
        f"{target.datasetid!r} is in {where}, which only Spark can {verb}. {what} a Spark "
        "DataFrame.",
        code="INVALID_LOCATION",
    )
