"""The journal beside a CSV file with appended rows, `.<name>.odf`: its lock, and the last batch.

A line is JSON: a batch, which is on disk before its bytes are written to the file, or `done`, once
the tables know of it. The tables list what was appended, by the journal's number, and the journal
is rewritten before it grows. Journals of earlier versions list the parts themselves.
"""

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any, NamedTuple

from ..errors import Refused
from ..model import Claim
from ..store.store import Store
from ..util.system import LOCK_WAIT_SECONDS, wait_for_lock

MAX_JOURNAL_BYTES = 16 * 1024
"""The size, in bytes, at which a journal is rewritten as one line."""


class FilePart(NamedTuple):
    """The bytes that one claim appended."""

    dataid: str
    generation: int
    start: int
    length: int
    digest: str

    @property
    def end(self) -> int:
        return self.start + self.length


class Batch(NamedTuple):
    """Bytes that are about to be written: where they start, what precedes them, where they end.

    `token` is the batch's name in the tables of `store`; `items` is how many chunks have bytes in
    the file afterwards. Earlier versions wrote the parts instead.
    """

    at: int
    before: str
    end: int
    parts: tuple[FilePart, ...] = ()
    digest: str = ""
    token: str = ""
    store: str = ""
    items: int = 0


def digest(data: bytes) -> str:
    """Return a short name of some bytes."""
    return blake2b(data, digest_size=10).hexdigest()


def path_of(file: str) -> str:
    """Return the path of a file's journal."""
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
        return self.items + sum(any(part.length for part in parts) for parts in self.parts.values())

    @contextmanager
    def held(self, *, make: bool = True) -> Iterator[bool]:
        """Hold the lock and read the journal; False if there is none and `make` is off."""
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
        """Write what is about to be appended; when this returns, it is on disk."""
        self._write(batch._asdict())
        os.fsync(self._handle)

    def done(self) -> None:
        """Note that the batch is in the file and in the tables."""
        if self.batch:
            self._write(
                {
                    "done": self.batch.end,
                    "items": self.batch.items if self.batch.token else self.items,
                }
            )
            if self._end > MAX_JOURNAL_BYTES and not self.parts:
                self.rewrite()

    def undone(self, *, never: bool) -> None:
        """Note that the batch isn't in the file; unless `never`, part of it may be."""
        if self.batch:
            self._write({"undone": never})

    def rewrite(self, *, items: int | None = None) -> None:
        """Replace the journal by one line; with `items=0`, start over under a new number."""
        line = {"kept": [], "items": self.held_items if items is None else items}
        number = self.number if items != 0 else ""
        aside = f"{self.path}-{os.urandom(4).hex()}"
        handle = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            wait_for_lock(handle, f"writing beside {self.path}", time.monotonic())
            held, self._handle = self._handle, handle
            self._forget()
            self.number = number or self.number
            self._write(line)
            os.fsync(handle)
            os.replace(aside, self.path)
            sync_folder(self.path)
            # A process that waits for the old journal then sees that it was replaced.
            os.dup2(handle, held)
            self._handle = held
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(aside)
            raise
        finally:
            os.close(handle)

    def remove(self) -> None:
        """Delete the journal, since the file was replaced: the next process starts a new one."""
        os.unlink(self.path)
        self._forget()

    def _locked(self, make: bool) -> int | None:
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        while True:
            try:
                handle = os.open(self.path, os.O_RDWR | (os.O_CREAT if make else 0), 0o666)
            except FileNotFoundError:
                if make:
                    raise
                return None
            try:
                wait_for_lock(handle, f"writing beside {self.path}", deadline)
                if os.path.samestat(os.fstat(handle), os.stat(self.path)):
                    return handle
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def _read(self) -> None:
        """Read the whole journal; an incomplete line means that its step hadn't begun."""
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
        kept = [FilePart(*values) for values in line.get("kept", line.get("parts", ()))]
        for part in kept:
            self.parts.setdefault(part.dataid, []).append(part)
        self.batch = None
        if "kept" in line:
            self.items = line.get("items", 0)
        else:
            known: dict[str, Any] = {name: line[name] for name in Batch._fields if name in line}
            self.batch = Batch(**{**known, "parts": tuple(kept)})

    def _forget(self) -> None:
        self._end = 0
        self.number = os.urandom(16).hex()
        """The name under which the tables list what was appended since the journal began."""
        self.items = 0
        """Chunks that have bytes in the file and that the tables know of."""
        self.parts: dict[str, list[FilePart]] = {}
        """By dataid, what an earlier version wrote here; the next append moves it to the tables."""
        self.batch: Batch | None = None
        """The last batch, unless the journal says that it was written."""


def write_at(handle: int, data: bytes, at: int) -> None:
    """Write all bytes at a position of a file."""
    view = memoryview(data)
    while view:
        written = os.pwrite(handle, view, at)
        view, at = view[written:], at + written


def sync_folder(path: str) -> None:
    """Sync a file's folder, so that a new name survives a crash."""
    handle = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- the parts of a CSV file: where they are, and what a killed process has left ---


CONTEXT_BYTES = 4096
"""Bytes before a batch that are compared, to see whether the file has changed since."""


def refuse_loss(path: str, instead: str) -> None:
    """Refuse to replace a file with rows that claims appended; `instead` is what to do."""
    path = os.path.realpath(path)
    if os.path.exists(path) and os.path.exists(path_of(path)):
        journal = Journal(path)
        with suppress(PermissionError), journal.held(make=False):  # replacing it will report that
            refuse_to_lose(path, journal, instead)


def refuse_to_lose(path: str, journal: Journal, instead: str) -> None:
    """The same with the lock held; what a killed process left doesn't count."""
    mend(path, journal)
    if not os.path.exists(path) or not os.path.getsize(path):
        return
    # A complete batch that the journal doesn't call done may be committed.
    if held := max(journal.held_items, journal.batch.items if journal.batch else 0):
        who = "1 item has" if held == 1 else f"{held} items have"
        raise Refused(
            f"{path} has rows that {who} appended, and this run would replace them. {instead}"
        )


def mend(path: str, journal: Journal, is_committed: Callable[[Batch], bool] | None = None) -> None:
    """Cut off what a killed process left at the end of the file, unless it was changed since.

    If no tables say whether a batch was committed, a complete one stays.
    """
    batch = journal.batch
    if batch is None:
        return
    if not os.path.exists(path):
        journal.undone(never=True)
        return
    with open(path, "rb+") as file:
        if batch.parts:
            is_whole = all(is_at(file, part, part.start) for part in batch.parts)
        else:
            file.seek(batch.at)
            is_whole = digest(file.read(batch.end - batch.at)) == batch.digest
        if is_whole and not batch.parts and is_committed is None:
            return
        if is_whole and (batch.parts or not is_committed or is_committed(batch)):
            journal.done()
            return
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, batch.at - CONTEXT_BYTES))
        untouched = digest(file.read(min(batch.at, CONTEXT_BYTES))) == batch.before
        if (untouched and batch.at < size <= batch.end) or (is_whole and size > batch.end):
            file.seek(batch.end)
            more = file.read()  # somebody appended to it meanwhile
            file.seek(batch.at)
            file.write(more)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
            size = batch.at
        journal.undone(never=untouched and size == batch.at)


def where(file: Any, part: FilePart, taken: Sequence[FilePart]) -> int | None:
    """Find the bytes of a part: where they were written, or where an edit has moved them.

    If two chunks have the same rows, each has its own copy: `taken` parts belong to others.
    """
    if not part.length:
        return None

    def is_free(start: int) -> bool:
        return all(start >= other.end or start + part.length <= other.start for other in taken)

    if is_at(file, part, part.start) and is_free(part.start):
        return part.start
    file.seek(0)
    data, at = file.read(), 0
    while at + part.length <= len(data):
        end = at + part.length
        if data[end - 1] == 10 and digest(data[at:end]) == part.digest and is_free(at):
            return at
        at = data.find(b"\n", at) + 1
        if not at:
            break
    return None


def is_at(file: Any, part: FilePart, start: int) -> bool:
    """Whether the bytes of a part are at a position of the file."""
    file.seek(start)
    return digest(file.read(part.length)) == part.digest


def part_of(claim: Claim, start: int, text: bytes) -> FilePart:
    """Return the part that describes some bytes of a claim."""
    return FilePart(claim.dataid, claim.generation, start, len(text), digest(text))


# --- what the tables know of a CSV file with appended rows: its length, and its parts ---


PAGE_PARTS = 1000
"""Parts of an old journal that one transaction writes."""


class Committed(NamedTuple):
    """The length of a file with everything committed, and the batch that was committed last."""

    length: int
    batch: str


class Ledger:
    """The rows of one journal, by its number; they change only under the journal's lock."""

    def __init__(self, store: Store) -> None:
        self._store, self._db = store, store.db

    @property
    def store(self) -> str:
        return self._store.id

    def committed(self, journal: str) -> Committed | None:
        """Return what was committed last, if anything."""
        rows = self._db.fetch("appends.committed", journal=journal)
        return Committed(*rows[0]) if rows else None

    def parts(self, journal: str, dataids: Sequence[str]) -> dict[str, list[FilePart]]:
        """Return what was appended for some chunks; parts being replaced come first."""
        asked = json.dumps(list(dataids))
        rows = self._db.fetch("appends.parts", journal=journal, dataids=asked)
        found: dict[str, list[FilePart]] = {}
        for row in rows:
            found.setdefault(row[0], []).append(FilePart(*row))
        return found

    def expect(self, journal: str, jobid: str, parts: Iterable[FilePart]) -> None:
        """Add parts that are about to replace others; the tables have both until the commit."""
        parts_text = json.dumps([part._asdict() for part in parts])
        self._db.insist(
            lambda: self._db.change("appends.add", journal=journal, jobid=jobid, parts=parts_text)
        )

    def commit(
        self,
        journal: str,
        location: str,
        jobid: str,
        last: Committed,
        parts: Sequence[FilePart],
        replaced: Sequence[str] = (),
        moves: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Commit parts that are on disk, in one transaction.

        Args:
            replaced: The chunks that had other parts.
            moves: Pairs, the last first: the position from which all parts moved, and by how many
                bytes.
        """
        parts_text = json.dumps([part._asdict() for part in parts])

        def work() -> None:
            known = {"journal": journal, "jobid": jobid}
            with self._db.transaction():
                if self._db.run("appends.is_last", journal=journal, batch=last.batch):
                    return  # the connection broke after the commit
                for start, by in moves:
                    self._db.change("appends.shift", journal=journal, start=start, by=by)
                self._db.change("appends.add", parts=parts_text, **known)
                if replaced:
                    self._db.change("appends.forget_older", parts=parts_text, journal=journal)
                self._db.change(
                    "appends.commit", journal=journal, location=location, **last._asdict()
                )

        self._db.insist(work)

    def take_over(
        self, journal: str, location: str, jobid: str, length: int, parts: Iterable[FilePart]
    ) -> None:
        """Copy the parts of a journal of an earlier version; doing so twice is safe."""
        parts = list(parts)
        for at in range(0, len(parts), PAGE_PARTS):
            self.expect(journal, jobid, parts[at : at + PAGE_PARTS])
        self._db.insist(
            lambda: self._db.change(
                "appends.commit", journal=journal, location=location, length=length, batch=""
            )
        )
