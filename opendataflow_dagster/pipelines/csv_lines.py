"""The lines of a CSV file: its header as it stands, and frames as more of them."""

import csv
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from io import StringIO
from typing import Any, NamedTuple

from ..errors import Refused
from .spill import Spill
from .write_errors import column_to_blame


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
