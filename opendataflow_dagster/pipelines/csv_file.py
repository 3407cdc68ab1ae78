"""One CSV file as a destination: replaced whole, or appended to, each chunk once."""

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import StringIO
from typing import Any, NamedTuple

from ..chunk import Result
from ..errors import DataflowError, Refused
from ..model import Claim, Say
from ..store.store import Store
from .csv_journal import (
    CONTEXT_BYTES,
    Batch,
    Committed,
    FilePart,
    Journal,
    Ledger,
    digest,
    mend,
    part_of,
    path_of,
    refuse_to_lose,
    sync_folder,
    where,
    write_at,
)
from .frames import Confirm, Spill, column_to_blame, fault

# --- the lines of a CSV file: its header, and frames as more of them ---


class Head(NamedTuple):
    """How a file's lines are written: its columns, and what must come before the next line."""

    columns: list[str]
    lead: bytes
    ending: str

    def lines(self, frame: Any, path: str) -> bytes:
        """Return a frame's lines; columns match by name, and missing ones stay empty."""
        names = [str(name) for name in frame.columns]
        if names and not self.columns:
            _header_of(frame)  # raises why no file can begin with this frame
            lines_of(frame, names, header=False)
        unknown = [name for name in names if name not in self.columns]
        if unknown:
            raise Refused(
                f"{path} has no column {unknown[0]!r}: its first line names "
                f"{', '.join(self.columns)}. Leave the column out of the result, or add it "
                "to the file.",
                code="NOT_VALIDATED",
            )
        if names != self.columns:
            _only_once(names)
            frame = frame.set_axis(names, axis=1).reindex(columns=self.columns)
        return lines_of(frame, self.columns, header=False, ending=self.ending)


def head_of(path: str, frames: Sequence[Any]) -> Head:
    """Return how lines are appended to a file: as its header says, or as the first frame needs.

    A frame that can't be written itself is skipped.
    """
    with suppress(FileNotFoundError), open(path, "rb") as file:
        text = file.readline()
        while text and text.count(b'"') % 2:  # a name contains a line break
            more = file.readline()
            text += more
            if not more:
                break
        if text.strip():
            ending = "\r\n" if text.endswith(b"\r\n") else "\n"
            try:
                [columns] = csv.reader(StringIO(text.decode("utf-8-sig"), newline=""))
            except (UnicodeDecodeError, ValueError, csv.Error):
                raise Refused(
                    f"The first line of {path} can't be read as column names. Correct it.",
                    code="INVALID_LOCATION",
                ) from None
            file.seek(-1, os.SEEK_END)
            return Head(columns, b"" if file.read() == b"\n" else ending.encode(), ending)
    for frame in frames:
        columns = [str(name) for name in frame.columns]
        if not columns:
            continue
        with suppress(Exception):  # `lines` raises it again, as the verdict on this frame
            lead = _header_of(frame)
            if len(frames) > 1:
                lines_of(frame, columns, header=False)
            return Head(columns, lead, "\n")
    return Head([], b"", "\n")


def _header_of(frame: Any) -> bytes:
    """Return the line with a frame's columns."""
    columns = [str(name) for name in frame.columns]
    _only_once(columns)
    return lines_of(frame.iloc[:0].set_axis(columns, axis=1), columns, header=True)


def _only_once(names: Sequence[str]) -> None:
    twice = next((name for name in names if list(names).count(name) > 1), None)
    if twice is not None:
        raise Refused(
            f"The frame has two columns called {twice!r}. Rename one of them.",
            code="NOT_VALIDATED",
        )


def all_lines_of(frame: Any, *, for_people: bool = False) -> Iterator[bytes]:
    """Yield a frame, or a spill piece by piece, as CSV with its header."""
    if not isinstance(frame, Spill):
        yield lines_of(frame, list(frame.columns), header=True, nul=for_people)
        return
    times = frame.times()
    yield lines_of(frame.typical().iloc[:0], frame.columns, header=True)
    for piece in frame.pieces():
        for at, digits in times.items():
            pattern = "%Y-%m-%d" + " %H:%M:%S" * (digits >= 0) + ".%f" * (digits > 0)
            texts = piece.iloc[:, at].dt.strftime(pattern)
            piece.isetitem(at, texts.str[:-3] if digits == 3 else texts)
        yield lines_of(piece, frame.columns, header=False, nul=for_people)


def lines_of(
    frame: Any, columns: Sequence[Any], *, header: bool, ending: str = "\n", nul: bool = False
) -> bytes:
    """Return a frame as CSV, without its index.

    Args:
        nul: Whether NUL characters are allowed, which no reader gives back.
    """
    if not len(columns):
        return b""
    try:
        text = frame.to_csv(index=False, header=header, lineterminator=ending).encode()
        if b"\0" in text and not nul:
            raise Refused(
                f"{_with_nul(frame)} has a NUL character, which CSV can't hold. Remove it.",
                code="NOT_VALIDATED",
            )
        return text
    except UnicodeEncodeError as error:
        blame = column_to_blame(error, frame) or "the frame has a string that isn't Unicode"
        raise Refused(
            f"{blame[0].upper()}{blame[1:]}, so it can't be written as UTF-8. Correct it.",
            code="NOT_VALIDATED",
        ) from None


def _with_nul(frame: Any) -> str:
    """Return the column whose text, or whose name, has a NUL character."""
    for at, name in enumerate(frame.columns):
        if any("\0" in str(value) for value in frame.iloc[:, at]):
            return f"Column {name!r}"
    return "The name of a column"


KnownParts = dict[str, list[FilePart]]


def replace(path: str, frame: Any, confirm: Confirm = lambda: None, *, instead: str = "") -> Result:
    """Replace the file by a frame, in one step: readers see the old file or the new one.

    Args:
        instead: What a person can do instead, if a file with appended items must not be replaced.
    """
    with write_beside(path, frame, instead=instead) as show:
        return show(confirm)


@contextmanager
def write_beside(
    path: str, frame: Any, *, instead: str = "", for_people: bool = False
) -> Iterator[Callable[..., Result]]:
    """Write a frame beside the file; the yielded function moves it there."""
    path = os.path.realpath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    pieces = _Digested(all_lines_of(frame, for_people=for_people))
    with _file_beside(path, pieces) as rename:

        def show(confirm: Confirm = lambda: None) -> Result:
            journal = Journal(path)
            with journal.held():
                if instead:
                    refuse_to_lose(path, journal, instead)
                confirm()
                if journal.held_items:
                    journal.rewrite(items=0)
                rename()
                journal.remove()
            fingerprint = f"sha256:{pieces.digest.hexdigest()}"
            return Result(len(frame), pieces.bytes, fingerprint, location=path)

        yield show


class _Digested:
    """Yields the pieces of a file, and updates `digest` and `bytes` as they are read."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self.digest, self.bytes = pieces, sha256(), 0

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self.digest.update(piece)
            self.bytes += len(piece)
            yield piece


@contextmanager
def refused_if_unwritable(path: str) -> Iterator[None]:
    """Turn a system error into the refusal that the file can't be written."""
    try:
        yield
    except OSError as error:
        raise Refused(
            f"{path} can't be written: {error.strerror or error}. Make room there, or make the "
            "file and its folder writable.",
            code="INVALID_LOCATION",
        ) from error


@contextmanager
def held_for_reading(path: str) -> Iterator[None]:
    """Keep others from appending while a file is read; cut off what a killed process left."""
    path = os.path.realpath(path)
    if not os.path.exists(path_of(path)):
        yield
        return
    try:
        journal = Journal(path)
        with journal.held(make=False):
            mend(path, journal)
            yield
    except PermissionError:  # a process that may only read can't repair the file
        yield


class CsvAppender:
    """Appends the frames of claims to a file, and removes rows that older claims appended for them.

    The tables have the file's committed length: what a killed process wrote beyond it is cut off.
    """

    def __init__(self, path: str, store: Store, say: Say = lambda line: None) -> None:
        self.path, self._say = os.path.realpath(path), say
        self._journal, self._ledger = Journal(self.path), Ledger(store)

    def append(
        self, parts: Sequence[tuple[Claim, Any]], confirm: Confirm
    ) -> list[Result | DataflowError]:
        """Append each claim's frame, or return why it can't be; then everything is on disk.

        If the process is killed at any moment, the file has all frames or none. A chunk that is
        appended again replaces its rows.
        """
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with self._journal.held():
            self._recover(parts[0][0].jobid if parts else "")
            dataids = [claim.dataid for claim, _ in parts]
            known = self._ledger.parts(self._journal.number, dataids)
            head = head_of(self.path, [frame for _, frame in parts])
            rendered = [self._render(head, claim, frame, known) for claim, frame in parts]
            texts = {
                claim: text
                for (claim, _), text in zip(parts, rendered, strict=True)
                if isinstance(text, bytes)
            }
            confirm()
            if texts:
                self._write(head, texts, known)
        return [
            Result(len(frame), len(text), location=self.path) if isinstance(text, bytes) else text
            for text, (_, frame) in zip(rendered, parts, strict=True)
        ]

    def _recover(self, jobid: str) -> None:
        """Cut off what was written and not committed; report a file that somebody has changed."""
        journal, ledger = self._journal, self._ledger
        interrupted = journal.batch is not None

        def is_committed(batch: Batch) -> bool:
            last = ledger.committed(journal.number)
            return batch.store != ledger.store or (last is not None and last.batch == batch.token)

        mend(self.path, journal, is_committed)
        size = os.path.getsize(self.path) if os.path.exists(self.path) else None
        if journal.parts:
            old = [part for parts in journal.parts.values() for part in parts]
            ledger.take_over(journal.number, self.path, jobid, size or 0, old)
            journal.rewrite()
        elif (last := ledger.committed(journal.number)) and not interrupted and size != last.length:
            self._say(_change_line(self.path, size, last.length))

    def _render(
        self, head: Head, claim: Claim, frame: Any, known: KnownParts
    ) -> bytes | DataflowError:
        for part in known.get(claim.dataid, ()):
            if part.generation > claim.generation:
                return Refused(
                    f"{self.path} has chunk {claim.dataid!r} of generation {part.generation}, but "
                    f"this claim has {claim.generation}: an older one can't replace a newer one.",
                    code="INVALID_LOCATION",
                )
        try:
            return head.lines(frame, self.path)
        except Exception as error:
            return fault(error, frame, self.path)

    def _write(self, head: Head, texts: dict[Claim, bytes], known: KnownParts) -> None:
        present: dict[Claim, FilePart] = {}
        if known:
            with suppress(FileNotFoundError), open(self.path, "rb") as file:
                present = _locate(file, texts, known)
        more = sum(
            bool(text) - any(part.length for part in known.get(claim.dataid, ()))
            for claim, text in texts.items()
        )
        batch = Batch(
            0,
            "",
            0,
            token=os.urandom(8).hex(),
            store=self._ledger.store,
            items=self._journal.items + more,
        )
        addition = _Addition(head, texts, present, list(known), batch)
        if any(old.digest != digest(texts[claim]) for claim, old in present.items()):
            self._rewrite(addition)
        else:
            self._write_at_end(addition)

    def _write_at_end(self, addition: "_Addition") -> None:
        """Write the missing rows; rows that the file already has now belong to the new claim."""
        head, texts, present, _, batch = addition
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            at = os.fstat(handle).st_size
            new = b"".join(text for claim, text in texts.items() if claim not in present)
            lead = head.lead if new or not at else b""
            parts, end = [], at + len(lead)
            for claim, text in texts.items():
                if old := present.get(claim):
                    parts.append(old._replace(generation=claim.generation))
                    continue
                parts.append(part_of(claim, end, text))
                end += len(text)
            before = os.pread(handle, min(at, CONTEXT_BYTES), max(0, at - CONTEXT_BYTES))
            self._journal.begin(
                batch._replace(at=at, before=digest(before), end=end, digest=digest(lead + new))
            )
            write_at(handle, lead + new, at)
            os.fsync(handle)
        finally:
            os.close(handle)
        if not at:
            sync_folder(self.path)
        self._commit(addition, end, parts)

    def _rewrite(self, addition: "_Addition") -> None:
        """Write the whole file again, with new rows instead of those of the same chunks."""
        head, texts, present, _, batch = addition
        with open(self.path, "rb") as file:
            data = file.read()
        pieces, parts, moves, at, end = [], [], [], 0, 0
        for claim, old in sorted(present.items(), key=lambda item: item[1].start):
            pieces += [data[at : old.start], texts[claim]]
            end += old.start - at
            parts.append(part_of(claim, end, texts[claim]))
            end += len(texts[claim])
            moves.append((old.end, len(texts[claim]) - old.length))
            at = old.end
        pieces.append(data[at:])
        end += len(data) - at
        new = {claim: text for claim, text in texts.items() if claim not in present}
        if new:
            pieces.append(head.lead)
            end += len(head.lead)
        for claim, text in new.items():
            pieces.append(text)
            parts.append(part_of(claim, end, text))
            end += len(text)
        with _file_beside(self.path, pieces) as show:
            # The rename is one step: whichever file is there then, its parts are known.
            self._ledger.expect(self._journal.number, addition.jobid, parts)
            self._journal.begin(batch._replace(at=end, end=end, digest=digest(b"")))
            show()
        self._commit(addition, end, parts, moves[::-1])

    def _commit(
        self,
        addition: "_Addition",
        end: int,
        parts: Sequence[FilePart],
        moves: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._ledger.commit(
            self._journal.number,
            self.path,
            addition.jobid,
            Committed(end, addition.batch.token),
            parts,
            addition.known,
            moves,
        )
        self._journal.done()


class _Addition(NamedTuple):
    """Rows that are about to be written to a file, by claim."""

    head: Head
    texts: dict[Claim, bytes]
    present: dict[Claim, FilePart]
    """What the file has of the same chunks."""
    known: list[str]
    """The dataids whose parts the tables know."""
    batch: Batch

    @property
    def jobid(self) -> str:
        return next(iter(self.texts)).jobid


def _locate(file: Any, texts: dict[Claim, bytes], known: KnownParts) -> dict[Claim, FilePart]:
    """Return what the file has of the same chunks, where it is now."""
    present: dict[Claim, FilePart] = {}
    for claim in texts:
        for part in reversed(known.get(claim.dataid, ())):
            start = where(file, part, list(present.values()))
            if start is not None:
                present[claim] = part._replace(start=start)
                break
    return present


def _change_line(path: str, size: int | None, length: int) -> str:
    """Return the line about a file whose length isn't what was committed."""
    if size is None:
        return f"{path} was removed since it was appended to: a new file begins"
    by = f"{abs(size - length):,} bytes {'shorter' if size < length else 'longer'}"
    return (
        f"{path} is {by} than what was appended to it: something else has changed it. It stays "
        "unchanged, and new rows follow at its end. If that was a mistake, stop `odf serve` and "
        "put a copy back"
    )


@contextmanager
def _file_beside(path: str, pieces: Iterable[bytes]) -> Iterator[Callable[[], None]]:
    """Write a file beside `path`; the yielded function moves it to `path`."""
    aside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}-{os.urandom(4).hex()}")
    try:
        with open(aside, "xb") as file:
            with suppress(FileNotFoundError):
                before = os.stat(path)
                os.fchmod(file.fileno(), before.st_mode & 0o7777)
                with suppress(OSError):  # only root can change a file's owner
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())

        def show() -> None:
            os.replace(aside, path)
            sync_folder(path)

        yield show
    finally:
        with suppress(OSError):
            os.unlink(aside)
