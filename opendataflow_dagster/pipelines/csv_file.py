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
    NEAR,
    Batch,
    Committed,
    Journal,
    Ledger,
    Part,
    digest,
    mend,
    part_of,
    path_of,
    refuse_to_lose,
    sync_folder,
    where,
    write_at,
)
from .endpoints import Confirm, column_to_blame, fault
from .spill import Spill

# The lines of a CSV file: its header as it stands, and frames as more of them.


class Head(NamedTuple):
    """How a file's lines are written: its columns, and what has to come before the next line."""

    columns: list[str]
    lead: bytes
    ending: str

    def lines(self, frame: Any, path: str) -> bytes:
        """A frame's lines; its columns go by their names, and what it hasn't is left empty."""
        names = [str(each) for each in frame.columns]
        if names and not self.columns:
            _header_of(frame)  # it tells why no file can begin with this frame
            lines_of(frame, names, header=False)
        unknown = [each for each in names if each not in self.columns]
        if unknown:
            raise Refused(
                f"{path} has no column {unknown[0]!r}: its first line names "
                f"{', '.join(self.columns)}. Leave the column out, or add it to the file.",
                code="NOT_VALIDATED",
            )
        if names != self.columns:
            _only_once(names)
            frame = frame.set_axis(names, axis=1).reindex(columns=self.columns)
        return lines_of(frame, self.columns, header=False, ending=self.ending)


def head_of(path: str, frames: Sequence[Any]) -> Head:
    """How lines are appended to a file: as its first line says, or as the first frame needs it.

    A frame that can't be written itself has no say in it.
    """
    with suppress(FileNotFoundError), open(path, "rb") as file:
        text = file.readline()
        while text and text.count(b'"') % 2:  # a name has a line break
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
                    f"The first line of {path} can't be read as names of columns. Correct it.",
                    code="INVALID_LOCATION",
                ) from None
            file.seek(-1, os.SEEK_END)
            return Head(columns, b"" if file.read() == b"\n" else ending.encode(), ending)
    for frame in frames:
        columns = [str(each) for each in frame.columns]
        if not columns:
            continue
        with suppress(Exception):  # it is the verdict on this frame, if it comes again
            lead = _header_of(frame)
            if len(frames) > 1:
                lines_of(frame, columns, header=False)
            return Head(columns, lead, "\n")
    return Head([], b"", "\n")


def _header_of(frame: Any) -> bytes:
    """The line with a frame's columns."""
    columns = [str(each) for each in frame.columns]
    _only_once(columns)
    return lines_of(frame.iloc[:0].set_axis(columns, axis=1), columns, header=True)


def _only_once(names: Sequence[str]) -> None:
    twice = next((each for each in names if list(names).count(each) > 1), None)
    if twice is not None:
        raise Refused(
            f"The frame has two columns called {twice!r}. Rename one of them.",
            code="NOT_VALIDATED",
        )


def all_lines_of(frame: Any, *, for_people: bool = False) -> Iterator[bytes]:
    """A frame, or a spill piece by piece, as CSV with its header."""
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
    """A frame as CSV, without its index; with NUL characters, which no reader gives back, if so."""
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
        found = column_to_blame(error, frame) or "the frame has a text that isn't Unicode"
        raise Refused(
            f"{found[0].upper()}{found[1:]}, so it can't be written as UTF-8. Correct it.",
            code="NOT_VALIDATED",
        ) from None


def _with_nul(frame: Any) -> str:
    """The column whose text has a NUL character, or its name."""
    for at, name in enumerate(frame.columns):
        if any("\0" in str(value) for value in frame.iloc[:, at]):
            return f"Column {name!r}"
    return "The name of a column"


Known = dict[str, list[Part]]


def replace(path: str, frame: Any, confirm: Confirm = lambda: None, *, instead: str = "") -> Result:
    """Put a frame in the place of the file, in one step; readers see the old one or the new one.

    With `instead`, a file that holds what claims have appended is refused; that is what to do then.
    """
    with written_aside(path, frame, instead=instead) as show:
        return show(confirm)


@contextmanager
def written_aside(
    path: str, frame: Any, *, instead: str = "", for_people: bool = False
) -> Iterator[Callable[..., Result]]:
    """Write a frame beside the file, in whose place the function that this gives puts it."""
    path = os.path.realpath(path)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    seen = _Seen(all_lines_of(frame, for_people=for_people))
    with _aside(path, seen) as rename:

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
            fingerprint = f"sha256:{seen.digest.hexdigest()}"
            return Result(len(frame), seen.bytes, fingerprint, location=path)

        yield show


class _Seen:
    """Pieces of a file, and what is known of those that were asked for."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces, self.digest, self.bytes = pieces, sha256(), 0

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._pieces:
            self.digest.update(piece)
            self.bytes += len(piece)
            yield piece


@contextmanager
def told(path: str) -> Iterator[None]:
    """Tell in a line that the file can't be written."""
    try:
        yield
    except OSError as error:
        raise Refused(
            f"{path} can't be written: {error.strerror or error}. Make room there, or make the "
            "file and its folder writable.",
            code="INVALID_LOCATION",
        ) from error


@contextmanager
def whole(path: str) -> Iterator[None]:
    """Read a file while nobody appends to it, without what a killed process has left at its end."""
    path = os.path.realpath(path)
    if not os.path.exists(path_of(path)):
        yield
        return
    try:
        journal = Journal(path)
        with journal.held(make=False):
            mend(path, journal)
            yield
    except PermissionError:  # who may only read doesn't mend
        yield


class CsvAppender:
    """Appends the frames of claims to a file; what a claim of the same chunk appended goes.

    How long the file is with all that is committed is told by the tables: what a killed process has
    written beyond that is cut off.
    """

    def __init__(self, path: str, store: Store, say: Say = lambda line: None) -> None:
        self.path, self._say = os.path.realpath(path), say
        self._journal, self._ledger = Journal(self.path), Ledger(store)

    def append(
        self, parts: Sequence[tuple[Claim, Any]], confirm: Confirm
    ) -> list[Result | DataflowError]:
        """Append each claim's frame, or tell why it can't be; when this returns, it is on the disk.

        Killed at any moment, the file has all of it or none; what comes again isn't there twice.
        """
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with self._journal.held():
            self._recover(parts[0][0].jobid if parts else "")
            dataids = [claim.dataid for claim, _ in parts]
            known = self._ledger.parts(self._journal.number, dataids)
            head = head_of(self.path, [frame for _, frame in parts])
            made = [self._made(head, claim, frame, known) for claim, frame in parts]
            texts = {i: each for i, each in enumerate(made) if isinstance(each, bytes)}
            confirm()
            if texts:
                self._write(head, {parts[i][0]: text for i, text in texts.items()}, known)
        return [
            Result(len(frame), len(each), location=self.path) if isinstance(each, bytes) else each
            for each, (_, frame) in zip(made, parts, strict=True)
        ]

    def _recover(self, jobid: str) -> None:
        """Cut off what was written and not committed; tell if somebody has changed the file."""
        journal, ledger = self._journal, self._ledger
        interrupted = journal.batch is not None

        def is_committed(batch: Batch) -> bool:
            last = ledger.committed(journal.number)
            return batch.store != ledger.store or (last is not None and last.batch == batch.token)

        mend(self.path, journal, is_committed)
        size = os.path.getsize(self.path) if os.path.exists(self.path) else None
        if journal.parts:
            old = [part for each in journal.parts.values() for part in each]
            ledger.take_over(journal.number, self.path, jobid, size or 0, old)
            journal.rewrite()
        elif (last := ledger.committed(journal.number)) and not interrupted and size != last.length:
            self._say(_changed(self.path, size, last.length))

    def _made(self, head: Head, claim: Claim, frame: Any, known: Known) -> bytes | DataflowError:
        for part in known.get(claim.dataid, ()):
            if part.generation > claim.generation:
                return Refused(
                    f"{self.path} has chunk {claim.dataid!r} of generation {part.generation}, and "
                    f"this claim's is {claim.generation}: a newer one isn't replaced by an older.",
                    code="INVALID_LOCATION",
                )
        try:
            return head.lines(frame, self.path)
        except Exception as error:
            return fault(error, frame, self.path)

    def _write(self, head: Head, texts: dict[Claim, bytes], known: Known) -> None:
        found: dict[Claim, Part] = {}
        if known:
            with suppress(FileNotFoundError), open(self.path, "rb") as file:
                found = _found(file, texts, known)
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
        again = [old for claim, old in found.items() if old.digest != digest(texts[claim])]
        write = self._replaced if again else self._appended
        write(head, texts, found, batch, [each for each in known])

    def _appended(
        self,
        head: Head,
        texts: dict[Claim, bytes],
        found: dict[Claim, Part],
        batch: Batch,
        known: Sequence[str],
    ) -> None:
        """Write at the end what isn't there; what is there already, the same, becomes theirs."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            at = os.fstat(handle).st_size
            new = b"".join(text for claim, text in texts.items() if claim not in found)
            lead = head.lead if new or not at else b""
            parts, end = [], at + len(lead)
            for claim, text in texts.items():
                if old := found.get(claim):
                    parts.append(old._replace(generation=claim.generation))
                    continue
                parts.append(part_of(claim, end, text))
                end += len(text)
            before = os.pread(handle, min(at, NEAR), max(0, at - NEAR))
            self._journal.begin(
                batch._replace(at=at, before=digest(before), end=end, digest=digest(lead + new))
            )
            write_at(handle, lead + new, at)
            os.fsync(handle)
        finally:
            os.close(handle)
        if not at:
            sync_folder(self.path)
        self._commit(texts, Committed(end, batch.token), parts, known)

    def _replaced(
        self,
        head: Head,
        texts: dict[Claim, bytes],
        found: dict[Claim, Part],
        batch: Batch,
        known: Sequence[str],
    ) -> None:
        """Write the file anew, with other bytes in the place of what the same chunks had."""
        with open(self.path, "rb") as file:
            data = file.read()
        pieces, parts, moves, at, end = [], [], [], 0, 0
        for claim, old in sorted(found.items(), key=lambda item: item[1].start):
            pieces += [data[at : old.start], texts[claim]]
            end += old.start - at
            parts.append(part_of(claim, end, texts[claim]))
            end += len(texts[claim])
            moves.append((old.end, len(texts[claim]) - old.length))
            at = old.end
        pieces.append(data[at:])
        end += len(data) - at
        new = {claim: text for claim, text in texts.items() if claim not in found}
        if new:
            pieces.append(head.lead)
            end += len(head.lead)
        for claim, text in new.items():
            pieces.append(text)
            parts.append(part_of(claim, end, text))
            end += len(text)
        with _aside(self.path, pieces) as show:
            # The rename is one step: whichever file is there then, its parts are known.
            self._ledger.expect(self._journal.number, next(iter(texts)).jobid, parts)
            self._journal.begin(batch._replace(at=end, end=end, digest=digest(b"")))
            show()
        self._commit(texts, Committed(end, batch.token), parts, known, moves[::-1])

    def _commit(
        self,
        texts: dict[Claim, bytes],
        last: Committed,
        parts: Sequence[Part],
        known: Sequence[str],
        moves: Sequence[tuple[int, int]] = (),
    ) -> None:
        jobid = next(iter(texts)).jobid
        self._ledger.commit(self._journal.number, self.path, jobid, last, parts, known, moves)
        self._journal.done()


def _found(file: Any, texts: dict[Claim, bytes], known: Known) -> dict[Claim, Part]:
    """What there is in the file of the same chunks, where it is now."""
    found: dict[Claim, Part] = {}
    for claim in texts:
        for part in reversed(known.get(claim.dataid, ())):
            there = where(file, part, list(found.values()))
            if there is not None:
                found[claim] = part._replace(start=there)
                break
    return found


def _changed(path: str, size: int | None, length: int) -> str:
    """The line about a file that isn't as long as what was committed to it."""
    if size is None:
        return f"{path} was taken away since it was appended to: a new file begins"
    by = f"{abs(size - length):,} bytes {'shorter' if size < length else 'longer'}"
    return (
        f"{path} is {by} than what was appended to it: something else has changed it. It stays so, "
        "and new rows come at its end. If it was a mistake, stop `odf serve` and put a copy back"
    )


@contextmanager
def _aside(path: str, pieces: Iterable[bytes]) -> Iterator[Callable[[], None]]:
    """Write a file that isn't seen until the function is called: it takes the place of `path`."""
    aside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}-{os.urandom(4).hex()}")
    try:
        with open(aside, "xb") as file:
            with suppress(FileNotFoundError):
                told = os.stat(path)
                os.fchmod(file.fileno(), told.st_mode & 0o7777)
                with suppress(OSError):  # only root gives files away
                    os.fchown(file.fileno(), told.st_uid, told.st_gid)
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
