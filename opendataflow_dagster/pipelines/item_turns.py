"""Turns of the pipelines: batches at once, or one item with nothing else in hand."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition

LOOK = 0.2
"""Seconds in which who waits notices that it is all over."""


class Turns:
    """Lets batches of several pipelines be worked on at once, and a suspect alone.

    Who waits to be alone goes before those that come later. Nobody waits once it is `over`.
    """

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over
        self._changed = Condition()
        self._at_work = self._waiting = 0
        self._alone = False

    @contextmanager
    def taken(self, *, alone: bool) -> Iterator[bool]:
        """A turn, once it has come; False if it is over before that."""
        with self._changed:
            ours = self._wait(alone)
        try:
            yield ours
        finally:
            with self._changed:
                if ours:
                    self._at_work -= 1
                    self._alone = False
                self._changed.notify_all()

    def _wait(self, alone: bool) -> bool:
        self._waiting += alone
        try:
            while self._alone or (self._at_work if alone else self._waiting):
                if self._over():
                    return False
                self._changed.wait(LOOK)
        finally:
            self._waiting -= alone
        self._at_work += 1
        self._alone = alone
        return True
