"""One CSV file as a destination: replaced whole, or appended to, each chunk once."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any

from ..dataflow.chunk import Result
from ..dataflow.errors import DataflowError, Refused
from ..dataflow.model import Claim
from .csvjournal import Batch, Journal, Part, digest, path_of, sync_folder, write_at
from .csvlines import Head, all_lines_of, head_of
from .csvparts import NEAR, mend, part_of, refuse_to_lose, shifted, where
from .verdicts import fault

Confirm = Callable[[], None]


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
                if journal.parts:
                    journal.rewrite()
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
    """Appends the frames of claims to a file; what a claim of the same chunk appended goes."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        self._journal = Journal(self.path)

    def append(
        self, parts: Sequence[tuple[Claim, Any]], confirm: Confirm
    ) -> list[Result | DataflowError]:
        """Append each claim's frame, or tell why it can't be; when this returns, it is on the disk.

        Killed at any moment, the file has all of it or none; what comes again isn't there twice.
        """
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        journal = self._journal
        with journal.held():
            mend(self.path, journal)
            head = head_of(self.path, [frame for _, frame in parts])
            made = [self._made(head, claim, frame) for claim, frame in parts]
            texts = {i: each for i, each in enumerate(made) if isinstance(each, bytes)}
            confirm()
            if texts:
                self._write(head, {parts[i][0]: text for i, text in texts.items()})
        return [
            Result(len(frame), len(each), location=self.path) if isinstance(each, bytes) else each
            for each, (_, frame) in zip(made, parts, strict=True)
        ]

    def _made(self, head: Head, claim: Claim, frame: Any) -> bytes | DataflowError:
        for part in self._journal.parts.get(claim.dataid, ()):
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

    def _write(self, head: Head, texts: dict[Claim, bytes]) -> None:
        found = {}
        with suppress(FileNotFoundError), open(self.path, "rb") as file:
            found = self._found(file, texts)
        again = [old for claim, old in found.items() if old.digest != digest(texts[claim])]
        if again:
            self._replaced(head, texts, found)
        else:
            self._appended(head, texts, found)

    def _found(self, file: Any, texts: dict[Claim, bytes]) -> dict[Claim, Part]:
        """What there is in the file of the same chunks, where it is now."""
        found = {}
        for claim in texts:
            for part in reversed(self._journal.parts.get(claim.dataid, ())):
                there = where(file, part, list(found.values()))
                if there is not None:
                    found[claim] = part._replace(start=there)
                    break
        return found

    def _appended(self, head: Head, texts: dict[Claim, bytes], found: dict[Claim, Part]) -> None:
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
            self._journal.begin(Batch(at, digest(before), end, tuple(parts)))
            write_at(handle, lead + new, at)
            os.fsync(handle)
        finally:
            os.close(handle)
        if not at:
            sync_folder(self.path)
        self._journal.done()

    def _replaced(self, head: Head, texts: dict[Claim, bytes], found: dict[Claim, Part]) -> None:
        """Write the file anew, with other bytes in the place of what the same chunks had."""
        with open(self.path, "rb") as file:
            data = file.read()
        pieces, parts, moved, at, end = [], [], [], 0, 0
        for claim, old in sorted(found.items(), key=lambda item: item[1].start):
            pieces += [data[at : old.start], texts[claim]]
            end += old.start - at
            parts.append(part_of(claim, end, texts[claim]))
            end += len(texts[claim])
            moved.append((old.end, end - old.end))
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
            kept = (shifted(part, moved) for each in self._journal.parts.values() for part in each)
            self._journal.rewrite(list(kept))
            # The rename is one step: there is nothing to cut off if it doesn't come to it.
            self._journal.begin(Batch(end, "", end, tuple(parts)))
            show()
        self._journal.done()


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
