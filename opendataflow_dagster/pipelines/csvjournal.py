"""What was appended to a CSV file, and for which chunk: a journal beside it, `.<name>.odf`.

A line is JSON: a batch, which is on the disk before its bytes are written to the file; `done`, once
they are; or `kept`, what is left of older batches. Offsets are hints: the bytes of a part are known
by their digest, wherever a person's edit has moved them.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any, NamedTuple

from ..dataflow.errors import Refused

PATIENCE = 60.0
"""Seconds to wait for another process that writes to the file."""

TAIL = 256
"""Bytes by which a journal is known again: a new file may get the number of one that is gone."""


class Part(NamedTuple):
    """The bytes that one claim has appended."""

    dataid: str
    generation: int
    start: int
    length: int
    digest: str

    @property
    def end(self) -> int:
        return self.start + self.length


class Batch(NamedTuple):
    """Parts that are about to be written: from where, after which bytes, and up to where."""

    at: int
    before: str
    end: int
    parts: tuple[Part, ...]


def digest(data: bytes) -> str:
    """A short name of some bytes."""
    return blake2b(data, digest_size=10).hexdigest()


def path_of(file: str) -> str:
    """Where the journal of a file is."""
    return os.path.join(os.path.dirname(file), f".{os.path.basename(file)}.odf")


class Journal:
    """The journal of one file; what was read of it is kept for the next time that it is held."""

    def __init__(self, file: str) -> None:
        self.path = path_of(file)
        self._handle = -1
        self._forget()

    @contextmanager
    def held(self, *, make: bool = True) -> Iterator[bool]:
        """Hold its lock and know all of it; False if there is no journal, and none is made."""
        handle = self._locked(make)
        if handle is None:
            yield False
            return
        self._handle = handle
        try:
            self._read()
            yield True
        finally:
            self._handle = -1
            os.close(handle)

    def begin(self, batch: Batch) -> None:
        """Tell what is about to be written; it is on the disk when this returns."""
        self._write(batch._asdict())
        os.fsync(self._handle)

    def done(self) -> None:
        """Tell that it is written; if that is lost, the digests tell it too."""
        if self.batch:
            self._write({"done": self.batch.end})

    def undone(self, *, never: bool) -> None:
        """Tell that it wasn't written; if not `never`, some of it may be there all the same."""
        if self.batch:
            self._write({"undone": never})

    def rewrite(self, parts: Iterable[Part] = ()) -> None:
        """Forget all but these parts, since the file is about to be replaced."""
        aside = f"{self.path}-{os.urandom(4).hex()}"
        handle = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _lock(handle, self.path, time.monotonic())
            held, self._handle = self._handle, handle
            self._forget()
            self._write({"kept": list(parts)})
            os.fsync(handle)
            os.replace(aside, self.path)
            sync_folder(self.path)
            # Whoever waits for the old one sees then that it isn't the journal any more.
            os.dup2(handle, held)
            self._handle = held
        finally:
            os.close(handle)

    def remove(self) -> None:
        """Forget all, since the file was replaced: who waits for the lock makes a new journal."""
        os.unlink(self.path)
        self._forget()

    def _locked(self, make: bool) -> int | None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                handle = os.open(self.path, os.O_RDWR | (os.O_CREAT if make else 0), 0o666)
            except FileNotFoundError:
                if make:
                    raise
                return None
            try:
                _lock(handle, self.path, deadline)
                if os.path.samestat(os.fstat(handle), os.stat(self.path)):
                    return handle
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def _read(self) -> None:
        """Read what was added since; of a line that isn't whole, nothing was done yet."""
        told = os.fstat(self._handle)
        if not self._is_known(told):
            self._forget()
        at = self._seen[1]
        for line in os.pread(self._handle, told.st_size - at, at).splitlines(keepends=True):
            try:
                read = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                read = None
            if read is None:
                os.ftruncate(self._handle, at)
                break
            self._take(read)
            at += len(line)
            self._tail = (self._tail + line)[-TAIL:]
        self._seen = told.st_ino, at

    def _is_known(self, told: os.stat_result) -> bool:
        """Whether what is open goes on from what was read."""
        inode, at = self._seen
        if inode != told.st_ino or at > told.st_size:
            return False
        return os.pread(self._handle, len(self._tail), at - len(self._tail)) == self._tail

    def _write(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        write_at(self._handle, data, self._seen[1])
        self._seen = os.fstat(self._handle).st_ino, self._seen[1] + len(data)
        self._tail = (self._tail + data)[-TAIL:]
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "done" in line:
            for part in self.batch.parts if self.batch else ():
                self.parts[part.dataid] = [part]
            self.batch = None
            return
        if "undone" in line:
            for part in self.batch.parts if self.batch and line["undone"] else ():
                self.parts[part.dataid].remove(part)
            self.batch = None
            return
        kept = [Part(*each) for each in line.get("kept", line.get("parts", ()))]
        for part in kept:
            self.parts.setdefault(part.dataid, []).append(part)
        self.batch = None
        if "kept" not in line:
            self.batch = Batch(line["at"], line["before"], line["end"], tuple(kept))

    def _forget(self) -> None:
        self._seen = (0, 0)
        self._tail = b""
        self.parts: dict[str, list[Part]] = {}
        """By dataid, what was appended for it last; before that is done, what it replaces too."""
        self.batch: Batch | None = None
        """The last batch, if nothing tells that it was written."""


def write_at(handle: int, data: bytes, at: int) -> None:
    """Write all bytes at a place of a file."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, at)
        view, at = view[written:], at + written


def sync_folder(path: str) -> None:
    """Have it on the disk that a file was made or renamed."""
    handle = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lock(handle: int, path: str, deadline: float) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Refused(
                    f"Another process has been writing beside {path} for {PATIENCE:.0f} s. "
                    "If it hangs, end it; then let the chunk be made again.",
                    code="LOCKED",
                ) from None
            time.sleep(0.01)
        except OSError:
            return  # no locks in this file system
