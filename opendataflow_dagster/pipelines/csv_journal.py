"""The journal beside a CSV file that is appended to, `.<name>.odf`: its lock, and the last batch.

A line is JSON: a batch, which is on the disk before its bytes are written to the file, or `done`,
once the tables know of it. What was appended is in the tables, by the journal's number, and the
journal is written anew before it grows. Those of earlier versions told of each part themselves.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any, NamedTuple

from ..errors import Refused

PATIENCE = 60.0
"""Seconds to wait for another process that writes to the file."""

LARGE = 16 * 1024
"""Bytes of a journal that are written anew as one line."""


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
    """Bytes that are about to be written: from where, after which bytes, and up to where.

    `token` is how the tables of `store` tell of it, and `items` how many chunks have bytes in the
    file then. Earlier versions told the parts instead.
    """

    at: int
    before: str
    end: int
    parts: tuple[Part, ...] = ()
    digest: str = ""
    token: str = ""
    store: str = ""
    items: int = 0


def digest(data: bytes) -> str:
    """A short name of some bytes."""
    return blake2b(data, digest_size=10).hexdigest()


def path_of(file: str) -> str:
    """Where the journal of a file is."""
    return os.path.join(os.path.dirname(file), f".{os.path.basename(file)}.odf")


class Journal:
    """The journal of one file."""

    def __init__(self, file: str) -> None:
        self.path = path_of(file)
        self._handle = -1
        self._forget()

    @property
    def held_items(self) -> int:
        """How many chunks have bytes in the file, as far as the journal knows."""
        return self.items + sum(any(part.length for part in each) for each in self.parts.values())

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
        """Tell that it is written, and that the tables know of it."""
        if self.batch:
            self._write(
                {
                    "done": self.batch.end,
                    "items": self.batch.items if self.batch.token else self.items,
                }
            )
            if self._end > LARGE and not self.parts:
                self.rewrite()

    def undone(self, *, never: bool) -> None:
        """Tell that it wasn't written; if not `never`, some of it may be there all the same."""
        if self.batch:
            self._write({"undone": never})

    def rewrite(self, *, items: int | None = None) -> None:
        """Write it anew as one line; with `items` 0 it forgets all, under a new number."""
        line = {"kept": [], "items": self.held_items if items is None else items}
        number = self.number if items != 0 else ""
        aside = f"{self.path}-{os.urandom(4).hex()}"
        handle = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _lock(handle, self.path, time.monotonic())
            held, self._handle = self._handle, handle
            self._forget()
            self.number = number or self.number
            self._write(line)
            os.fsync(handle)
            os.replace(aside, self.path)
            sync_folder(self.path)
            # Whoever waits for the old one sees then that it isn't the journal any more.
            os.dup2(handle, held)
            self._handle = held
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(aside)
            raise
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
        """Read all of it; of a line that isn't whole, nothing was done yet."""
        self._forget()
        size = os.fstat(self._handle).st_size
        for line in os.pread(self._handle, size, 0).splitlines(keepends=True):
            try:
                read = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                read = None
            if read is None:
                os.ftruncate(self._handle, self._end)
                break
            self._take(read)
            self._end += len(line)

    def _write(self, line: dict[str, Any]) -> None:
        line |= {"journal": self.number}
        data = json.dumps(line).encode() + b"\n"
        write_at(self._handle, data, self._end)
        self._end += len(data)
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        self.number = line.get("journal", self.number)
        if "done" in line:
            for part in self.batch.parts if self.batch else ():
                self.parts[part.dataid] = [part]
            self.items = line.get("items", self.items)
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
        if "kept" in line:
            self.items = line.get("items", 0)
        else:
            told: dict[str, Any] = {name: line[name] for name in Batch._fields if name in line}
            self.batch = Batch(**{**told, "parts": tuple(kept)})

    def _forget(self) -> None:
        self._end = 0
        self.number = os.urandom(16).hex()
        """How the tables tell what was appended to the file since the journal was begun."""
        self.items = 0
        """Chunks that have bytes in the file, of which the tables know."""
        self.parts: dict[str, list[Part]] = {}
        """By dataid, what an earlier version has told here; the next append tells it the tables."""
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
