"""How far a run is, in one line of the terminal that is drawn over and over."""

import os
import threading
import time
from typing import TextIO

from ..dataflow.dials import chunks_left
from ..dataflow.store import Store

REDRAW, RECOUNT = 0.1, 5.0
ROUTINE = ("Launching ", "is complete. Updating status", "rows updated to READY for ")
"""What needn't be said of each chunk where the line shows it."""


class Progress:
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
            if now - self._drawn < REDRAW:
                return
            self._drawn = now
            if now - self._counted > RECOUNT:
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
        except Exception:  # the run itself waits for the database to come back, not its picture
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
