"""What a client may send and how fast, and whether a disk has room for it."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..model import Say
from ..store.store import Store


class Limits(NamedTuple):
    """What is refused before it costs anything."""

    body: int = 1024 * 1024
    """Bytes of a body."""
    items: int = 1_000
    """Items of an array."""
    depth: int = 64
    """Levels of an item."""
    key: int = 200
    """Characters of an Idempotency-Key."""
    rate: float = 1_000.0
    """Items per second of a pipeline."""
    waiting: int = 64 * 1024 * 1024
    """Characters of items that wait for the database."""
    connections: int = 900
    """Connections at once."""
    head: float = 30.0
    """Seconds in which a request has to begin, with all of its headers."""
    upload: float = 30.0
    """Seconds in which a body has to arrive."""
    patience: float = 3.0
    """Seconds that a client waits for a database that is away."""


class Rates:
    """A token bucket per pipeline: it holds the tokens of one second, and may go into debt.

    So an array that is larger than the bucket gets through, and posts after it wait for the debt.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, slug: str, items: int) -> float:
        """Take a token per item; return the seconds to wait if there are none, else 0."""
        now = self._clock()
        level, since = self._levels.get(slug, (self._rate, now))
        level = min(self._rate, level + (now - since) * self._rate)
        least = min(1.0, self._rate)
        wait = (least - level) / self._rate if level < least else 0.0
        self._levels[slug] = (level if wait else level - items, now)
        return wait


FULL_BELOW_BYTES = 1024 * 1024
"""Free bytes under which a disk counts as full."""

DATABASE, PROJECT, TEMPORARY = "database", "project", "temporary files"


class Disks:
    """The disks of the tables, of the project with its results, and of temporary files."""

    def __init__(self, store: Store, root: Path, say: Say) -> None:
        self._folders = {PROJECT: str(root), TEMPORARY: tempfile.gettempdir()}
        if file := store.db.path:  # else the database is on a server
            self._folders = {DATABASE: os.path.dirname(os.path.abspath(file)), **self._folders}
        self._say, self._reported = say, list[str]()

    def full(self) -> list[str]:
        """Which of them are full; each is reported once."""
        found = [name for name, folder in self._folders.items() if _is_full(folder)]
        for name in found:
            if name not in self._reported:
                self._say(f"The disk of {self._folders[name]} is full ({name}): make room there")
        self._reported = found
        return found


def _is_full(folder: str) -> bool:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    no_bytes = disk.f_bavail * disk.f_frsize < FULL_BELOW_BYTES
    no_inodes = disk.f_files > 0 and disk.f_favail == 0  # some file systems count none
    return no_bytes or no_inodes
