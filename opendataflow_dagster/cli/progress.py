"""The progress of a run, in one line of the terminal.

Drawn by hand: `odf run --all` starts without click and rich, which take longer to load than many a
job to run.
"""

import os
import sys
import threading
import time
from typing import TextIO

from ..store.claims import chunks_left
from ..store.store import Store
from ..util.text import printable

REDRAW_SECONDS = 0.1

RECOUNT_SECONDS = 5.0
"""Seconds between two queries of what is left."""

REPRINT_SECONDS = 10.0
"""Seconds between two lines where there is no terminal."""

ROUTINE = ("Launching ", "is complete. Updating status", "rows updated to READY for ")
"""Messages of each chunk that the line replaces."""


class StatusLine:
    """Shows the latest message on one line of a terminal; elsewhere, prints one now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, stream.isatty()
        self._due = time.monotonic() + (0.0 if self._terminal else REPRINT_SECONDS)

    def __call__(self, line: str) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + (REDRAW_SECONDS if self._terminal else REPRINT_SECONDS)
            self._stream.write(
                f"\r\x1b[K{printable(line)[:119]}" if self._terminal else f"{line}\n"
            )
            self._stream.flush()

    def end(self) -> None:
        """Leave the terminal with the cursor at the start of an empty line."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class RunProgress:
    """Draws done, failed, left and the rate; the threads of a run share it."""

    def __init__(self, stream: TextIO, store: Store, jobid: str) -> None:
        self._stream, self._store, self._jobid = stream, store, jobid
        self._started = time.monotonic()
        self._drawn = self._counted = 0.0
        self._left = 0
        self._ended = 0
        self._line = ""
        self._lock = threading.Lock()

    def __call__(self, done: int, failed: int) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._drawn < REDRAW_SECONDS:
                return
            self._drawn = now
            if now - self._counted > RECOUNT_SECONDS:
                self._counted = now
                self._count(done + failed)
            left = max(0, self._left - (done + failed - self._ended))
            rate = (done + failed) / (now - self._started)
            line = f"done {done}, failed {failed}, left {left}, {rate:.1f} per second"
            self._line = line[: self._width() - 1]
            self._show(self._line)

    def say(self, line: str) -> None:
        """Print a line above the progress, unless the progress tells the same."""
        if any(phrase in line for phrase in ROUTINE):
            return
        with self._lock:
            self._show(f"{line}\n{self._line}")

    def _count(self, ended: int) -> None:
        try:
            self._left = chunks_left(self._store, self._jobid)
            self._ended = ended
        except Exception:  # the run itself waits for the database; its picture doesn't
            return

    def end(self) -> None:
        """Leave the terminal with the cursor at the start of a line."""
        with self._lock:
            self._show("")

    def _width(self) -> int:
        """The terminal's width: a line that folds couldn't be drawn over."""
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def _show(self, text: str) -> None:
        try:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()
        except (OSError, ValueError):
            return


def fill_queues(store: Store, jobid: str | None = None) -> None:
    """Judge what jobs may claim and show how far it is; if it can't end now, workers go on."""
    line = StatusLine(sys.stderr)
    try:
        queued = store.fill(jobid, narrate=line)
    finally:
        line.end()
    if queued:
        sys.stderr.write(
            f"The queue of {', '.join(queued)} isn't complete yet: open transactions are waited "
            "for, which `odf doctor` lists. Idle workers and `odf recover` go on with it.\n"
        )
