"""How much a client may send, and how fast."""

import time
from collections.abc import Callable
from typing import NamedTuple


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
    """A bucket of tokens per pipeline: it holds a second's worth, and may go into debt once.

    So an array that is larger than the bucket gets through, and what follows it waits.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, slug: str, items: int) -> float:
        """Take so many tokens, or tell after how many seconds there will be some."""
        now = self._clock()
        level, since = self._levels.get(slug, (self._rate, now))
        level = min(self._rate, level + (now - since) * self._rate)
        least = min(1.0, self._rate)
        wait = (least - level) / self._rate if level < least else 0.0
        self._levels[slug] = (level if wait else level - items, now)
        return wait
