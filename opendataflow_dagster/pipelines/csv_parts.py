"""The parts of a CSV file: where they are, and what a killed process has left."""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..errors import Refused
from ..model import Claim
from .csv_journal import Batch, Journal, Part, digest, path_of

NEAR = 4096
"""Bytes in front of a batch by which it is seen that nobody has changed the file since."""


def refuse_loss(path: str, instead: str) -> None:
    """Refuse to replace a file that holds what claims have appended; `instead` is what to do."""
    path = os.path.realpath(path)
    if os.path.exists(path) and os.path.exists(path_of(path)):
        journal = Journal(path)
        with suppress(PermissionError), journal.held(make=False):  # to replace it will tell
            refuse_to_lose(path, journal, instead)


def refuse_to_lose(path: str, journal: Journal, instead: str) -> None:
    """The same with the journal in hand; what a killed process has left doesn't count."""
    mend(path, journal)
    if not os.path.exists(path) or not os.path.getsize(path):
        return
    # A whole batch of which nobody has told the journal may be committed.
    if held := max(journal.held_items, journal.batch.items if journal.batch else 0):
        who = "1 item has" if held == 1 else f"{held} items have"
        raise Refused(f"{path} holds what {who} appended, and this run would replace it. {instead}")


def mend(path: str, journal: Journal, is_committed: Callable[[Batch], bool] | None = None) -> None:
    """Cut off what a killed process has left at the end of the file, if nobody has touched it.

    Without tables that tell whether a batch was committed, one that is whole stays.
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
        file.seek(max(0, batch.at - NEAR))
        untouched = digest(file.read(min(batch.at, NEAR))) == batch.before
        if (untouched and batch.at < size <= batch.end) or (is_whole and size > batch.end):
            file.seek(batch.end)
            more = file.read()  # somebody has added to it since
            file.seek(batch.at)
            file.write(more)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
            size = batch.at
        journal.undone(never=untouched and size == batch.at)


def where(file: Any, part: Part, taken: Sequence[Part]) -> int | None:
    """Where the bytes of a part are: where they were written, or where an edit has moved them.

    Of two chunks with the same rows each has its own: what is `taken` is another's.
    """
    if not part.length:
        return None

    def is_free(start: int) -> bool:
        return all(start >= each.end or start + part.length <= each.start for each in taken)

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


def is_at(file: Any, part: Part, start: int) -> bool:
    """Whether the bytes of a part are at a place of the file."""
    file.seek(start)
    return digest(file.read(part.length)) == part.digest


def part_of(claim: Claim, start: int, text: bytes) -> Part:
    """The part that some bytes of a claim are."""
    return Part(claim.dataid, claim.generation, start, len(text), digest(text))
