"""What some code prints, whichever way it does: kept, and not shown."""

import fcntl
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import RawIOBase, TextIOWrapper
from typing import IO, Any

STDOUT = 1

_files: list[IO[bytes]] = []
"""Where what is printed goes; the last one counts."""


class _Bytes(RawIOBase):
    """What is printed goes into the file of now, or else to standard error."""

    def __init__(self, name: str) -> None:
        self.name = name

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            _files[-1].write(data)
        except (IndexError, ValueError):  # a thread, or a log at the very end
            shown = sys.__stderr__ if isinstance(sys.stderr, _Stream) else sys.stderr
            with suppress(Exception):
                shown.write(bytes(data).decode(errors="replace"))  # pyright: ignore
        return len(data)

    def close(self) -> None:
        """Stay open: `TextIOWrapper(sys.stdout.buffer)` closes what it was given."""


class _Stream(TextIOWrapper):
    """`sys.stdout` or `sys.stderr` of all code whose prints are kept.

    They are always the same two, since a handler of `logging` keeps the one it was made with.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            _Bytes(f"<{name}>"), "utf-8", "backslashreplace", newline="", write_through=True
        )
        self._called = name

    def close(self) -> None:
        """Stay open, for those that come after."""

    def detach(self) -> Any:
        return self.buffer

    def reconfigure(self, **_: Any) -> None:
        """Stay UTF-8, which is what those who call this mostly ask for."""

    def __reduce__(self) -> Any:
        return getattr, (sys, self._called)


_out, _err = _Stream("stdout"), _Stream("stderr")


class Prints:
    """What some code prints: on standard output and error, as warnings, as logs.

    Also what other processes write on standard output that it starts. Their standard error is
    left to them: threads of ours may be writing there.
    """

    text = ""
    """All of it, once the code is over."""

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Keep what the code prints. Whatever it asks standard input for, that is at its end."""

        def show(message, category, filename, lineno, file=None, line=None) -> None:
            _err.write(warnings.formatwarning(message, category, filename, lineno, line))

        before = sys.stdin, sys.stdout, sys.stderr
        _flush(sys.stdout, sys.__stdout__)
        with _file() as file, open(os.devnull) as nothing, warnings.catch_warnings():
            # A warning of the user's is told, and never an error, whatever `-W` or pytest say.
            warnings.simplefilter("default")
            warnings.showwarning = show
            _files.append(file)
            try:
                with _instead_of_stdout(file.fileno()):
                    try:
                        sys.stdin, sys.stdout, sys.stderr = nothing, _out, _err
                        yield
                    finally:
                        # The code may have put others in their place.
                        _flush(sys.stdout, sys.stderr, sys.__stdout__)
                        sys.stdin, sys.stdout, sys.stderr = before
            finally:
                _files.remove(file)
                file.seek(0)
                self.text = file.read().decode(errors="replace")


@contextmanager
def _file() -> Iterator[IO[bytes]]:
    """A file that has no name, in memory where that can be."""
    try:
        handle = os.memfd_create("printed")
    except (AttributeError, OSError):
        opened = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 - closed below
    else:
        opened = os.fdopen(handle, "w+b", buffering=0)
    with opened as file:
        # A process that opens /dev/stdout anew would else write over what is there.
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
        yield file


@contextmanager
def _instead_of_stdout(file: int) -> Iterator[None]:
    """Let this process, and those it starts, have a file as their standard output."""
    try:
        ours = os.dup(STDOUT)
    except OSError:  # closed: nobody sees what is written there
        yield
        return
    try:
        os.dup2(file, STDOUT)
        yield
    finally:
        os.dup2(ours, STDOUT)
        os.close(ours)


def _flush(*streams: Any) -> None:
    for each in streams:
        with suppress(Exception):  # None, or closed
            each.flush()
