"""The data that a task receives, sent in the way that suits the session.

If tasks certainly run on this machine, it is a file; on a cluster, a broadcast; with a Spark
Connect server, an artifact. Small data travels inside the task itself.
"""

import atexit
import hashlib
import io
import os
import shutil
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..config.settings import FILE_NAME as PROPERTIES
from ..errors import DataflowError
from ..spark.session import is_remote
from ..spark.settings import is_local
from .sandbox import LINK

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


MAX_INLINE_BYTES = 512 * 1024
"""Bytes that travel inside the task; Spark would broadcast larger ones, and never remove them."""

DEFAULT_RESULT_BYTES = 256 * 2**20
"""Bytes of a result that goes through Java, if its free memory isn't known."""


class Parcel(Protocol):
    """Bytes on their way to a task."""

    def open(self) -> bytes:
        """Return the bytes, in the task."""
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
    """A folder of the driver: a task that can see it puts a large result there."""

    folder: str
    word: str
    room: int
    """The most bytes of a result that goes through Java."""

    def shared(self) -> bool:
        """Whether this machine is the driver's."""
        try:
            with open(os.path.join(self.folder, "word"), encoding="ascii") as file:
                return file.read() == self.word
        except OSError:
            return False


class Shipper:
    """Sends data to processes of this machine."""

    local = True
    """Whether the processes certainly see this machine's files."""

    def send(self, data: bytes) -> Parcel:
        """Return bytes that a task can open; they stay until they are dropped."""
        return Inline(data) if len(data) <= MAX_INLINE_BYTES else self._send_much(data)

    def _send_much(self, data: bytes) -> Parcel:
        handle, path = tempfile.mkstemp(dir=_folder()[0])
        with open(handle, "wb") as file:
            file.write(data)
        return OnDisk(path)


class SparkShipper(Shipper):
    """Sends data to the tasks of one session."""

    def __init__(self, spark: "SparkSession") -> None:
        self.spark = spark
        self.remote = is_remote(spark)
        self.local = not self.remote and is_local(spark.sparkContext.master or "")
        self.exchange = Exchange(*_folder(), self._room())
        self._sent: set[str] = set()

    def _send_much(self, data: bytes) -> Parcel:
        if self.local:
            return super()._send_much(data)
        if not self.remote:
            return Cast(self.spark.sparkContext.broadcast(data))
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
            return DEFAULT_RESULT_BYTES
        java: Any = self.spark.sparkContext._jvm
        # Spark copies it several times on the way, and a Java without memory ends with all its
        # jobs.
        return java.java.lang.Runtime.getRuntime().maxMemory() // 8


class _Known:
    lock = threading.Lock()
    folder: tuple[str, str] | None = None
    pid = 0


def _folder() -> tuple[str, str]:
    """Return this process's folder for data on its way, and the token in it that identifies it."""
    with _Known.lock:
        if _Known.folder is None or _Known.pid != os.getpid():
            path, word = tempfile.mkdtemp(prefix="odf-exchange-"), os.urandom(16).hex()
            with open(os.path.join(path, "word"), "w", encoding="ascii") as file:
                file.write(word)
            atexit.register(_remove, path, os.getpid())
            _Known.folder, _Known.pid = (path, word), os.getpid()
        return _Known.folder


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid:  # not in a process forked from this one
        shutil.rmtree(path, ignore_errors=True)


# --- a project's files: used in place if the task's machine has them, otherwise unpacked ---


MAX_PROJECT_BYTES = 256 * 2**20
"""The most bytes of a project that are sent to a cluster."""

DATA_FOLDERS = {"sources", "output"}
"""Folders of a project that tasks don't read themselves; sources reach them as rows."""

EXCLUDED_FOLDERS = {"__pycache__", "node_modules"}

Listing = list[tuple[str, int, int]]


class ProjectSnapshot(NamedTuple):
    """Where a project is, and what its files contain."""

    root: str
    stamp: str
    """Changes when a file does."""
    content: str = ""
    archive: Parcel | None = None
    """What to unpack on a machine that lacks these files; None: they are there."""

    def settle(self) -> Path:
        """Return the project's folder, in a task."""
        root = Path(self.root)
        if self.archive is None or _content_of(root) == self.content:
            return root
        from pyspark import SparkFiles

        # Spark's own folder for files: nobody else uses it, and it goes with the application.
        path = Path(SparkFiles.getRootDirectory()).resolve() / f"odf-project-{self.content}"
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
                with zipfile.ZipFile(io.BytesIO(self.archive.open())) as packed:
                    packed.extractall(os.path.join(temporary, "project"))
                try:
                    os.rename(os.path.join(temporary, "project"), path)
                except OSError:
                    if not path.exists():  # otherwise another task was faster
                        raise
        return path


class ProjectSnapshots:
    """The snapshots of one project: a new one when its files have changed."""

    def __init__(self, root: Path, shipper: Shipper) -> None:
        self.root, self._shipper = root, shipper
        self._last: ProjectSnapshot | None = None

    def now(self) -> ProjectSnapshot:
        files = listing(self.root)
        stamp = _digest(repr(files).encode())
        if self._last is None or self._last.stamp != stamp:
            snapshot = ProjectSnapshot(str(self.root), stamp)
            if not self._shipper.local:
                archive = self._shipper.send(_packed(self.root, files))
                snapshot = snapshot._replace(content=_content(self.root, files), archive=archive)
            self._last = snapshot
        return self._last


def listing(root: Path) -> Listing:
    """Return the project's files with sizes and times, without environments and hidden folders.

    For a copy of its code, too: the folders that it links to have none, but belong to it.
    """
    found: Listing = []
    home = os.readlink(root / LINK) if (root / LINK).is_symlink() else None
    secret = os.environ.get("PASSKEY_FILE")
    for above, folders, names in os.walk(root, followlinks=home is not None):
        top = Path(above) == root
        if not top and "pyvenv.cfg" in names:
            folders.clear()
            continue
        folders[:] = sorted(
            folder
            for folder in folders
            if folder not in EXCLUDED_FOLDERS
            and folder[0] != "."
            and not (top and folder in DATA_FOLDERS)
            and (home is None or _belongs(os.path.join(above, folder), root, home))
        )
        for name in sorted(names):
            path = os.path.join(above, name)
            # Files with credentials stay here.
            if name == PROPERTIES or (secret and os.path.abspath(secret) == path):
                continue
            try:
                seen = os.stat(path)
            except FileNotFoundError:
                continue
            if os.path.isfile(path):
                found.append((os.path.relpath(path, root), seen.st_size, seen.st_mtime_ns))
    return found


def _belongs(folder: str, root: Path, home: str) -> bool:
    """Whether a folder in a copy is the project's own, not one that the project links to."""
    if not os.path.islink(folder):
        return True
    own = os.path.join(home, os.path.relpath(folder, root))
    return os.readlink(folder) == own and not os.path.islink(own)


_contents: dict[str, tuple[str, str]] = {}


def _content_of(root: Path) -> str:
    """Return the content of a folder here, if it exists; read again only after a change."""
    if not root.is_dir():
        return ""
    files = listing(root)
    stamp = _digest(repr(files).encode())
    known = _contents.get(str(root))
    if known is None or known[0] != stamp:
        try:
            known = _contents[str(root)] = stamp, _content(root, files)
        except OSError:
            return ""
    return known[1]


def _content(root: Path, files: Listing) -> str:
    digest = hashlib.sha256()
    for name, _, _ in files:
        inner = _digest((root / name).read_bytes())
        digest.update(f"{name}\0{inner}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _packed(root: Path, files: Listing) -> bytes:
    size = sum(count for _, count, _ in files)
    if size > MAX_PROJECT_BYTES:
        large = max(files, key=lambda file: file[1])[0]
        raise DataflowError(
            f"Project {root} has {size >> 20} MB to send to the cluster, but the limit is "
            f"{MAX_PROJECT_BYTES >> 20} MB. Its largest file is {large}. Move data into sources/."
        )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, _, _ in files:
            archive.writestr(name, (root / name).read_bytes())
    return packed.getvalue()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
