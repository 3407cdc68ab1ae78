"""What a task is given besides its arguments: data, by the way that suits the session.

Where tasks surely run on this machine, that is a file; on a cluster, a broadcast; and with a
server of Spark Connect, an artifact. Little data goes with the task itself.
"""

import atexit
import hashlib
import os
import shutil
import tempfile
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..spark.session import is_remote
from ..spark.settings import is_local

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LITTLE = 512 * 1024
"""Bytes that go with the task; a larger one would be broadcast by Spark, and never removed."""

ROOM = 256 * 2**20
"""Bytes of a result that goes through Java, if how much room it has can't be told."""


class Parcel(Protocol):
    """Bytes on their way to a task."""

    def open(self) -> bytes:
        """The bytes, in the task."""
        ...

    def drop(self) -> None:
        """Remove them, on the driver: no task needs them any more."""
        ...


class Inline(NamedTuple):
    data: bytes

    def open(self) -> bytes:
        return self.data

    def drop(self) -> None:
        pass


class OnDisk(NamedTuple):
    path: str

    def open(self) -> bytes:
        with open(self.path, "rb") as file:
            return file.read()

    def drop(self) -> None:
        if os.path.exists(self.path):
            os.unlink(self.path)


class Cast(NamedTuple):
    broadcast: Any

    def open(self) -> bytes:
        return self.broadcast.value

    def drop(self) -> None:
        self.broadcast.destroy()


class Artifact(NamedTuple):
    name: str

    def open(self) -> bytes:
        from pyspark import SparkFiles

        with open(SparkFiles.get(self.name), "rb") as file:
            return file.read()

    def drop(self) -> None:
        pass  # the server removes it with the session


class Exchange(NamedTuple):
    """A folder of the driver's: a task that sees it leaves a large result there."""

    folder: str
    word: str
    room: int
    """Bytes that a result may have that goes through Java."""

    def shared(self) -> bool:
        """Whether this machine is the driver's."""
        try:
            with open(os.path.join(self.folder, "word"), encoding="ascii") as file:
                return file.read() == self.word
        except OSError:
            return False


class Shipper:
    """Sends data to the tasks of one session."""

    def __init__(self, spark: "SparkSession") -> None:
        self.spark = spark
        self.remote = is_remote(spark)
        self.local = not self.remote and is_local(spark.sparkContext.master or "")
        self.exchange = Exchange(*_folder(), self._room())
        self._sent: set[str] = set()

    def send(self, data: bytes) -> Parcel:
        """Bytes that a task can open; they stay until they are dropped."""
        if len(data) <= LITTLE:
            return Inline(data)
        if not self.local and not self.remote:
            return Cast(self.spark.sparkContext.broadcast(data))
        if self.local:
            handle, path = tempfile.mkstemp(dir=self.exchange.folder)
            with open(handle, "wb") as file:
                file.write(data)
            return OnDisk(path)
        name = f"odf-{hashlib.sha256(data).hexdigest()}"
        if name not in self._sent:
            path = os.path.join(self.exchange.folder, name)
            with open(path, "wb") as file:
                file.write(data)
            try:
                self.spark.addArtifact(path, file=True)
            finally:
                os.unlink(path)
            self._sent.add(name)
        return Artifact(name)

    def _room(self) -> int:
        if self.remote:
            return ROOM
        java: Any = self.spark.sparkContext._jvm
        # Spark has it several times on its way, and a Java that is full ends with all its jobs.
        return java.java.lang.Runtime.getRuntime().maxMemory() // 8


class _Known:
    lock = threading.Lock()
    folder: tuple[str, str] | None = None
    pid = 0


def _folder() -> tuple[str, str]:
    """This process's folder for what is on its way, and the word in it that tells it apart."""
    with _Known.lock:
        if _Known.folder is None or _Known.pid != os.getpid():
            path, word = tempfile.mkdtemp(prefix="odf-exchange-"), os.urandom(16).hex()
            with open(os.path.join(path, "word"), "w", encoding="ascii") as file:
                file.write(word)
            atexit.register(_remove, path, os.getpid())
            _Known.folder, _Known.pid = (path, word), os.getpid()
        return _Known.folder


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid:  # not a process that was forked from this one
        shutil.rmtree(path, ignore_errors=True)
