"""Chunks in places without reliable renames: object stores, and URLs that begin with `remote+`.

A chunk is written to `<root>/dataid=<escaped>/v=<generation>-<8 hex>/`, and the fact of a READY
generation names the current version: readers who use the tables see the old one or the new
one. For all other readers, `<root>/dataid=<escaped>/_odf.json` names the version.
"""

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..chunk import Chunk
from ..errors import DataflowError, Refused
from ..location import JDBC, ObjectStore, Table, address, path_of
from ..storage.cleanup import (
    GRACE,
    POINTER,
    SPARK,
    TABLE,
    VERSION,
    Leftover,
    Live,
    Remove,
    is_written,
    live,
)
from ..storage.compact import Standing, all_standing, standing
from ..storage.folder import NOTE, directory, is_foreign, unescaped
from ..store.store import Store
from . import chunk_files, jdbc, postgres_write
from .chunk_files import (
    line_aggregates,
    line_note,
    noted_schema,
    read_files,
    spark_format,
    write_files,
)
from .evidence import Evidence, observed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


# --- files: through Hadoop, or by Python for `file:` URLs ---


class File(NamedTuple):
    """A file, or on a disk also a directory, which has no bytes."""

    path: str
    bytes: int
    changed: float


class Files(Protocol):
    """What we need of a file system; paths are URLs."""

    def below(self, path: str) -> list[File]:
        """Return everything below a path, at any depth."""
        ...

    def read(self, path: str) -> bytes | None:
        """Return the content of a small file, or None."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write a small file so that a reader sees the old one or the new one."""
        ...

    def remove(self, path: str) -> bool:
        """Remove a file, or a directory and its content; return whether it existed."""
        ...


def files_of(spark: "SparkSession | None", target: ObjectStore) -> Files:
    """Return the files of a remote place."""
    if path_of(address(target.root)) is not None:
        return LocalFiles()
    return HadoopFiles(spark, target)


class LocalFiles:
    """A file system that is mounted here."""

    def below(self, path: str) -> list[File]:
        found = []
        root = _local(path)
        for above, inner, names in os.walk(root):
            for name in (*inner, *names):
                whole = os.path.join(above, name)
                with suppress(FileNotFoundError):
                    status = os.stat(whole)
                    size = 0 if name in inner else status.st_size
                    url = path.rstrip("/") + whole[len(root.rstrip("/")) :]
                    found.append(File(url + "/" * (name in inner), size, status.st_mtime))
        return found

    def read(self, path: str) -> bytes | None:
        try:
            with open(_local(path), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, path: str, data: bytes) -> None:
        final = _local(path)
        os.makedirs(os.path.dirname(final), exist_ok=True)
        aside = os.path.join(os.path.dirname(final), f"_odf-{os.urandom(4).hex()}")
        try:
            with open(aside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, final)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(aside)

    def remove(self, path: str) -> bool:
        there = os.path.lexists(_local(path))
        if os.path.isdir(_local(path)):
            shutil.rmtree(_local(path), ignore_errors=True)
        elif there:
            os.unlink(_local(path))
        return there


class HadoopFiles:
    """A file system of Hadoop, such as `s3a:` or `hdfs:`, with the session's own settings."""

    def __init__(self, spark: "SparkSession | None", target: ObjectStore) -> None:
        jvm = getattr(spark, "_jvm", None)
        if jvm is None:
            raise Refused(
                f"{target.datasetid!r} is at {target.root}, whose files a Spark Connect session "
                "can't manage. Use one with spark.master, or the format delta or iceberg.",
                code="INVALID_LOCATION",
            )
        self._jvm: Any = jvm
        self._conf = spark._jsc.hadoopConfiguration()  # pyright: ignore
        self._look(target)

    def _look(self, target: ObjectStore) -> None:
        """Refuse a kind of place that Java has no classes for."""
        from py4j.protocol import Py4JJavaError

        root = address(target.root)
        try:
            self._path(root).getFileSystem(self._conf)
        except Py4JJavaError as error:
            message = str(error.java_exception)
            if not any(text in message for text in _MISSING_CLASS_MESSAGES):
                raise
            raise Refused(
                f"{target.datasetid!r} is at {target.root}, but Spark has no jars that read "
                f"{root.partition(':')[0]} URLs. Configure spark.jars.packages in "
                "dataflow.properties.",
                code="INVALID_LOCATION",
            ) from None

    def below(self, path: str) -> list[File]:
        there = self._path(path)
        system = there.getFileSystem(self._conf)
        if not system.exists(there):
            return []
        prefix = system.makeQualified(there).toString().rstrip("/")
        found, remaining = [], system.listFiles(there, True)
        while remaining.hasNext():
            status = remaining.next()
            url = path.rstrip("/") + status.getPath().toString().removeprefix(prefix)
            found.append(File(url, status.getLen(), status.getModificationTime() / 1000))
        return found

    def read(self, path: str) -> bytes | None:
        there = self._path(path)
        system = there.getFileSystem(self._conf)
        if not system.exists(there):
            return None
        stream = system.open(there)
        try:
            return bytes(self._jvm.org.apache.commons.io.IOUtils.toByteArray(stream))
        finally:
            stream.close()

    def write(self, path: str, data: bytes) -> None:
        there = self._path(path)
        system = there.getFileSystem(self._conf)
        if system.getScheme() not in _RENAMING_SCHEMES:
            # An object store shows an object only when it is closed, complete.
            self._put(system, there, data)
            return
        aside = self._path(f"{path.rpartition('/')[0]}/_odf-{os.urandom(4).hex()}")
        self._put(system, aside, data)
        hadoop = self._jvm.org.apache.hadoop.fs
        # FileSystem.rename refuses an existing target, and deleting it first would show nothing for
        # a moment. Only FileContext overwrites, with an array of options that py4j can't create.
        rename = getattr(hadoop, "Options$Rename")
        ways = self._jvm.java.lang.reflect.Array.newInstance(
            self._jvm.java.lang.Class.forName("org.apache.hadoop.fs.Options$Rename"), 1
        )
        ways[0] = rename.OVERWRITE
        hadoop.FileContext.getFileContext(there.toUri(), self._conf).rename(aside, there, ways)

    def remove(self, path: str) -> bool:
        there = self._path(path)
        return bool(there.getFileSystem(self._conf).delete(there, True))

    def _put(self, system: Any, path: Any, data: bytes) -> None:
        stream = system.create(path, True)
        try:
            stream.write(bytearray(data))
        finally:
            stream.close()

    def _path(self, url: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(url)


_MISSING_CLASS_MESSAGES = ("ClassNotFound", "NoClassDefFound", "No FileSystem for scheme")
_RENAMING_SCHEMES = ("file", "hdfs", "viewfs", "webhdfs")


def to_json(note: Mapping[str, Any]) -> bytes:
    """Return the content of a small file for a note."""
    return json.dumps(note, ensure_ascii=True).encode()


def from_json(data: bytes | None) -> dict[str, Any]:
    """Return the note in a small file, or an empty one."""
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _local(url: str) -> str:
    return path_of(url) or url


Confirm = Callable[[], None]

_VERSION = re.compile(r"v=([0-9]+)-[0-9a-f]+")
_CHUNK = re.compile(r"dataid=([^/]+)/(v=[0-9]+-[0-9a-f]+)/(.*)", re.DOTALL)


class Version(NamedTuple):
    """A version of a chunk in its place, visible or not."""

    dataid: str
    generation: int
    location: str
    bytes: int
    changed: float


class StagedRemote:
    """A staged chunk: a version that isn't read until the tables name it."""

    evidence: Evidence

    def __init__(
        self,
        spark: "SparkSession | None",
        target: ObjectStore,
        dataid: str,
        generation: int,
        store: str = "",
    ) -> None:
        self._store = store
        self._spark, self._target, self.generation = spark, target, generation
        self._files = files_of(spark, target)
        self.chunk = f"{target.root}/{directory(dataid)}"
        self.location = f"{self.chunk}/v={generation}-{os.urandom(4).hex()}"
        self.path = address(self.location)
        """Start a version that Spark will write; it doesn't exist yet."""
        self.bytes: int | None = None
        self._dataid, self._note, self._shown = dataid, {}, False

    @classmethod
    def write(
        cls,
        spark: "SparkSession",
        chunk: Chunk,
        target: ObjectStore,
        df: "DataFrame",
        extra: Sequence[str] = (),
        *,
        store: str = "",
    ) -> "StagedRemote":
        """Write a frame as a version of a chunk, and verify it."""
        staged = cls(spark, target, chunk.dataid, chunk.generation, store=store)
        try:
            texts = chunk_files.loss_aggregates(df.schema, target.format)
            frame, taken = observed(
                df, [*extra, *line_aggregates(df.schema, target.format), *texts]
            )
            write_files(frame, staged.path, target.format)
            staged.evidence = taken()
            chunk_files.refuse_lossy(staged.evidence, df, target.format)
            staged.tell(
                {
                    "jobid": chunk.jobid,
                    "format": target.format,
                    "rows": staged.evidence.rows,
                    "fingerprint": staged.evidence.fingerprint,
                    "schema": df.schema.jsonValue(),
                    **line_note(staged.evidence, df.schema, target.format),
                }
            )
            staged.verify(staged.evidence.rows)
        except BaseException:
            staged.discard()
            raise
        return staged

    def tell(self, facts: Mapping[str, Any]) -> None:
        """Write the note about what was written, once all of it exists."""
        found = self._files.below(self.path)
        if any("/_temporary/" in part.path for part in found):
            raise DataflowError(
                f"{self.path} is incomplete: Spark hasn't committed it. Run the chunk again."
            )
        data = [part for part in found if is_data(part.path)]
        self.bytes = sum(part.bytes for part in data)
        self._note = {
            "dataid": self._dataid,
            "generation": self.generation,
            "bytes": self.bytes,
            **facts,
            **({"store": self._store} if self._store else {}),
        }
        self._files.write(f"{self.path}/{NOTE}", to_json(self._note))

    def verify(self, rows: int) -> None:
        """Compare the rows found there with those that were counted."""
        found = self.frame().count()
        if found != rows:
            raise DataflowError(
                f"{rows} rows were written to {self.path}, but it has {found}. Run the chunk again."
            )

    def show(self, confirm: Confirm) -> str:
        """Return the location for the chunk's fact, if the claim still holds.

        From the commit of that fact on, the tables name this version. The pointer for other readers
        is overwritten now, as a folder's chunk would be.
        """
        confirm()
        self._shown = True
        self.point()
        return self.location

    def point(self) -> bool:
        """Point readers who don't use the tables to this version, unless a newer one is named."""
        return point(self._files, self.chunk, self.location, self.generation, self._store)

    def discard(self) -> None:
        """Remove what wasn't shown; `odf clean` removes what was replaced, after a grace period."""
        if not self._shown:
            self._files.remove(self.path)

    def frame(self) -> "DataFrame":
        return _read(self._spark, self.path, self._note, self._target.format)


def read_version(
    spark: "SparkSession", target: ObjectStore, dataid: str, location: str | None
) -> "DataFrame":
    """Return the rows of a chunk: of the version that its fact names, or else its pointer."""
    files = files_of(spark, target)
    location = chunk_version(files, target, dataid, location)
    if location is None:
        raise Refused(
            f"{target.datasetid!r} is READY, but {target.root} has no data of chunk {dataid!r}. "
            f"Produce it again: odf resubmit",
            code="INVALID_LOCATION",
        )
    note = from_json(files.read(f"{address(location)}/{NOTE}"))
    return _read(spark, address(location), note, target.format)


def chunk_version(
    files: Files, target: ObjectStore, dataid: str, location: str | None = None
) -> str | None:
    """Return where a chunk is: by its fact, by its pointer, or where a script would put it."""
    chunk = f"{target.root}/{directory(dataid)}"
    if location and location.rstrip("/") != target.root:
        return location
    named = from_json(files.read(f"{address(chunk)}/{NOTE}")).get("version")
    if isinstance(named, str) and _VERSION.fullmatch(named):
        return f"{chunk}/{named}"
    return chunk if files.below(address(chunk)) else None


def point(files: Files, chunk: str, location: str, generation: int, store: str = "") -> bool:
    """Let a chunk's pointer name a version, unless it names a newer generation of ours.

    Between the check and the write, a newer one can come; the pointer is then wrong until the next
    publish or `odf clean`. Readers who use the tables aren't affected.
    """
    path = f"{address(chunk)}/{NOTE}"
    there = from_json(files.read(path))
    if there.get("generation", 0) > generation and not is_foreign(there, store):
        return False
    version = location.rpartition("/")[2]
    if there.get("version") != version:
        named = {"version": version, "generation": generation}
        files.write(path, to_json(named | ({"store": store} if store else {})))
    return True


def versions(found_below: Sequence[File], target: ObjectStore) -> list[Version]:
    """Return every version of every chunk, given all files of a place."""
    found: dict[tuple[str, str], list] = {}
    root = address(target.root)
    for part in found_below:
        inner = _CHUNK.fullmatch(part.path.removeprefix(root).lstrip("/"))
        if inner:
            known = found.setdefault((inner[1], inner[2]), [0, 0.0])
            known[0] += part.bytes
            known[1] = max(known[1], part.changed)
    return [
        Version(
            unescaped(name),
            int(version.removeprefix("v=").partition("-")[0]),
            f"{target.root}/dataid={name}/{version}",
            *known,
        )
        for (name, version), known in sorted(found.items())
    ]


def is_data(path: str) -> bool:
    """Whether a path is a file with rows, not a directory or metadata."""
    return os.path.basename(path)[:1] not in ("", "_", ".")


def _read(spark: Any, path: str, note: Mapping[str, Any], format: str) -> "DataFrame":
    if noted_schema(note) is None:
        return spark.read.format(spark_format(note.get("format") or format).name).load(path)
    return read_files(spark, path, note, format)


_ASIDE = re.compile(r"/dataid=([^/]+)/_odf-[0-9a-f]+$")
"""A pointer that was being written."""


def in_remote(
    store: Store,
    target: ObjectStore,
    session: Callable[[], Any],
    grace: float = GRACE,
) -> Iterator[tuple[Leftover, Remove]]:
    """Return versions of chunks that the tables don't name, and pointers that name another.

    A version that a pointer names stays until the pointer is right: some readers use it.
    """
    is_local = path_of(address(target.root)) is not None
    files = files_of(None if is_local else session(), target)
    # Listed before the tables are read: a version that is published in between isn't in the list.
    # In the other order, it would be listed but in no row, and be removed.
    below = files.below(address(target.root))
    alive = live(store, target.datasetid)
    kept = {row[2] for row in store.db.fetch("cleaning.located", datasetid=target.datasetid)}
    found = versions(below, target)
    yield from _wrong_pointers(store, files, target, {version.location for version in found})
    yield from _unfinished_pointers(files, target, below, alive, grace)
    yield from _unread_versions(files, target, found, alive, kept, grace)


def _wrong_pointers(
    store: Store, files: Files, target: ObjectStore, locations: Collection[str]
) -> Iterator[tuple[Leftover, Remove]]:
    """Pointers that name another version than the tables; "removing" one corrects it."""
    for chunk in all_standing(store, target.datasetid):
        if chunk.location in locations and _pointed(files, target, chunk.dataid) != chunk.location:
            path = f"{target.root}/{directory(chunk.dataid)}/{NOTE}"
            row = Leftover(
                target.datasetid, chunk.dataid, chunk.generation, POINTER, path, None, None
            )
            yield row, lambda chunk=chunk, path=path: _correct(store, files, chunk, path)


def _unfinished_pointers(
    files: Files, target: ObjectStore, below: Sequence[File], alive: Live, grace: float
) -> Iterator[tuple[Leftover, Remove]]:
    """What is left of pointers that were being written when their writer died."""
    for file in below:
        aside, age = _ASIDE.search(file.path), max(0.0, time.time() - file.changed)
        if aside and age >= grace and not alive.has(dataid := unescaped(aside[1])):
            row = Leftover(target.datasetid, dataid, None, SPARK, file.path, file.bytes, age)
            yield row, lambda file=file: files.remove(file.path)


def _unread_versions(
    files: Files,
    target: ObjectStore,
    found: Sequence[Version],
    alive: Live,
    kept: Collection[str],
    grace: float,
) -> Iterator[tuple[Leftover, Remove]]:
    """Versions that no row, claim or pointer names, and that were replaced long enough ago."""
    chunks: dict[str, list[Version]] = {}
    for version in found:
        chunks.setdefault(version.dataid, []).append(version)
    for version in found:
        dataid, generation, location = version.dataid, version.generation, version.location
        newer = [later.changed for later in chunks[dataid] if later.generation > generation]
        # Its age counts from when it was replaced: until then, somebody may have begun to read it.
        age = max(0.0, time.time() - max(version.changed, min(newer, default=0.0)))
        if location in kept or age < grace or generation in alive.generations:
            continue
        if _pointed(files, target, dataid) != location:
            row = Leftover(
                target.datasetid, dataid, generation, VERSION, location, version.bytes, age
            )
            yield row, lambda location=location: files.remove(address(location))


def in_table(
    store: Store, table: Table, password: Callable[[], str | None], session: Callable[[], Any]
) -> Iterator[tuple[Leftover, Remove]]:
    """Return staging tables of a database whose claims have ended; their age isn't known."""
    if table.dialect == JDBC:
        if not is_written(store, table.datasetid):
            return  # so that Java isn't needed for it
        found = jdbc.leftovers(table, password, session())
        drop = partial(jdbc.drop, spark=session())
    else:
        found, drop = postgres_write.leftovers(table, password), postgres_write.drop
    alive = live(store, table.datasetid)
    for name, generation in found:
        if generation not in alive.generations:
            yield (
                Leftover(table.datasetid, "", generation, TABLE, name, None, None),
                lambda name=name: drop(table, password, [name]) is not False,
            )


def _pointed(files: Files, target: ObjectStore, dataid: str) -> str:
    """Return the version that a chunk's pointer names."""
    chunk = f"{target.root}/{directory(dataid)}"
    return f"{chunk}/{from_json(files.read(f'{address(chunk)}/{NOTE}')).get('version')}"


def _correct(store: Store, files: Files, chunk: Standing, path: str) -> bool:
    """Let a pointer name the version that the tables name, if they still do."""
    now = standing(store, chunk.datasetid, [chunk.dataid]).get(chunk.dataid)
    if now != chunk or chunk.location is None:
        return False
    version = chunk.location.rpartition("/")[2]
    pointer = {"version": version, "generation": chunk.generation, "store": store.id}
    files.write(address(path), to_json(pointer))
    return True
