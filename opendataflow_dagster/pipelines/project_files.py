"""A project's files where its tasks run: in their place if they are there, else unpacked."""

import hashlib
import io
import os
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from ..config.settings import FILE_NAME as PROPERTIES
from ..errors import DataflowError
from .parcels import Parcel, Shipper
from .sandbox import LINK

MOST = 256 * 2**20
"""Bytes of a project that are sent to a cluster."""

LEFT_OUT = {"sources", "output"}
"""Folders of a project that its tasks are given the rows of, or don't read."""

NEVER = {"__pycache__", "node_modules"}

Listing = list[tuple[str, int, int]]


class Home(NamedTuple):
    """Where a project is, and what is in it."""

    root: str
    stamp: str
    """Changes when a file does."""
    content: str = ""
    archive: Parcel | None = None
    """What to unpack where the very same files aren't; None: they are there."""

    def settle(self) -> Path:
        """The project's folder, in a task."""
        root = Path(self.root)
        if self.archive is None or _content_of(root) == self.content:
            return root
        from pyspark import SparkFiles

        # Spark's own folder for files: it is nobody else's, and goes with the application.
        path = Path(SparkFiles.getRootDirectory()).resolve() / f"odf-project-{self.content}"
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as made:
                with zipfile.ZipFile(io.BytesIO(self.archive.open())) as packed:
                    packed.extractall(os.path.join(made, "project"))
                try:
                    os.rename(os.path.join(made, "project"), path)
                except OSError:
                    if not path.exists():  # else another task was faster
                        raise
        return path


class Homes:
    """The home of one project, as its files are now."""

    def __init__(self, root: Path, shipper: Shipper) -> None:
        self.root, self._shipper = root, shipper
        self._last: Home | None = None

    def now(self) -> Home:
        files = listing(self.root)
        stamp = _digest(repr(files).encode())
        if self._last is None or self._last.stamp != stamp:
            home = Home(str(self.root), stamp)
            if not self._shipper.local:
                archive = self._shipper.send(_packed(self.root, files))
                home = home._replace(content=_content(self.root, files), archive=archive)
            self._last = home
        return self._last


def listing(root: Path) -> Listing:
    """The project's files with their sizes and times; without environments and hidden folders.

    Of a copy of its code, too: the folders that it links to have none, and are in it all the same.
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
            each
            for each in folders
            if each not in NEVER
            and each[0] != "."
            and not (top and each in LEFT_OUT)
            and (home is None or _belongs(os.path.join(above, each), root, home))
        )
        for name in sorted(names):
            path = os.path.join(above, name)
            # What holds credentials stays here.
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
    """Whether a folder in a copy isn't one that the project itself only links to."""
    if not os.path.islink(folder):
        return True
    own = os.path.join(home, os.path.relpath(folder, root))
    return os.readlink(folder) == own and not os.path.islink(own)


_contents: dict[str, tuple[str, str]] = {}


def _content_of(root: Path) -> str:
    """What a folder here has, if it is there; read again only when a file has changed."""
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
    told = hashlib.sha256()
    for name, _, _ in files:
        inner = _digest((root / name).read_bytes())
        told.update(f"{name}\0{inner}\n".encode(errors="surrogateescape"))
    return told.hexdigest()[:32]


def _packed(root: Path, files: Listing) -> bytes:
    size = sum(each for _, each, _ in files)
    if size > MOST:
        large = max(files, key=lambda each: each[1])[0]
        raise DataflowError(
            f"Project {root} has {size >> 20} MB to send to the cluster, of at most "
            f"{MOST >> 20}; its largest file is {large}. Move data into sources/."
        )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, _, _ in files:
            archive.writestr(name, (root / name).read_bytes())
    return packed.getvalue()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
