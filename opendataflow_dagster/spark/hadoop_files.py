"""The files of a place that Spark writes to: through Hadoop, or Python's own for `file:` URLs."""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import Refused
from ..location import ObjectStore, address, path_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class File(NamedTuple):
    """A file, or on a disk also a directory, which has no bytes."""

    path: str
    bytes: int
    changed: float


class Files(Protocol):
    """What we need of a file system; paths are URLs."""

    def below(self, path: str) -> list[File]:
        """All that lies below a path, at whatever depth."""
        ...

    def read(self, path: str) -> bytes | None:
        """A small file, if it is there."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write a small file so that a reader sees the old one or the new one."""
        ...

    def remove(self, path: str) -> bool:
        """Remove a file, or a directory with all that is in it; whether it was there."""
        ...


def files_of(spark: "SparkSession | None", target: ObjectStore) -> Files:
    """The files of a remote place."""
    if path_of(address(target.root)) is not None:
        return LocalFiles()
    return HadoopFiles(spark, target)


class LocalFiles:
    """A file system that is mounted here."""

    def below(self, path: str) -> list[File]:
        found = []
        root = _local(path)
        for above, inner, names in os.walk(root):
            for each in (*inner, *names):
                whole = os.path.join(above, each)
                with suppress(FileNotFoundError):
                    told = os.stat(whole)
                    size = 0 if each in inner else told.st_size
                    url = path.rstrip("/") + whole[len(root.rstrip("/")) :]
                    found.append(File(url + "/" * (each in inner), size, told.st_mtime))
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
                f"{target.datasetid!r} is at {target.root}, whose files a session of Spark Connect "
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
            told = str(error.java_exception)
            if not any(each in told for each in _NO_CLASSES):
                raise
            raise Refused(
                f"{target.datasetid!r} is at {target.root}, and Spark has nothing here that reads "
                f"{root.partition(':')[0]} URLs. Configure its jars: spark.jars.packages in "
                "dataflow.properties.",
                code="INVALID_LOCATION",
            ) from None

    def below(self, path: str) -> list[File]:
        there = self._path(path)
        system = there.getFileSystem(self._conf)
        if not system.exists(there):
            return []
        prefix = system.makeQualified(there).toString().rstrip("/")
        found, each = [], system.listFiles(there, True)
        while each.hasNext():
            status = each.next()
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
        if system.getScheme() not in _RENAMING:
            # An object store shows an object when it is closed, whole.
            self._put(system, there, data)
            return
        aside = self._path(f"{path.rpartition('/')[0]}/_odf-{os.urandom(4).hex()}")
        self._put(system, aside, data)
        hadoop = self._jvm.org.apache.hadoop.fs
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


_NO_CLASSES = ("ClassNotFound", "NoClassDefFound", "No FileSystem for scheme")
_RENAMING = ("file", "hdfs", "viewfs", "webhdfs")


def text_of(told: Mapping[str, Any]) -> bytes:
    """What is told, as a small file has it."""
    return json.dumps(told, ensure_ascii=True).encode()


def loads(data: bytes | None) -> dict[str, Any]:
    """The same read, or nothing."""
    try:
        found = json.loads(data or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _local(url: str) -> str:
    return path_of(url) or url
