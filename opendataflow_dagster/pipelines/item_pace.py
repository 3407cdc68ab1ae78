"""How many items are worked on at once, and how long a pipeline in trouble waits."""

import time

FIRST, MOST = 20, 500
"""Items of a pipeline's first batch, and of any."""

AIM = 0.5
"""Seconds that the transformations of a batch should take: its items are READY together."""

LONGEST_PAUSE = 30.0
"""Seconds between two tries to reach a destination that is away."""


class Pace:
    """How many items to take at once: as many as are done in a moment."""

    def __init__(self) -> None:
        self.size = FIRST
        self.pause = self.until = 0.0
        self.reason = ""
        """Why its items wait, as it was said last."""

    def took(self, items: int, seconds: float) -> None:
        fit = int(AIM * items / max(seconds, 0.001))
        self.size = max(1, min(MOST, fit, self.size * 2))

    def failed(self) -> float:
        """Try again later, with one item; after how many seconds."""
        self.size = 1
        self.pause = min(LONGEST_PAUSE, max(1.0, self.pause * 2))
        self.until = time.monotonic() + self.pause
        return self.pause
