"""Lets what Spark is at for several threads be ended from outside."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .chunk_publish import PROGRESS
from .progress import Progress, interrupting

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOK = 0.5
"""Seconds in which work that Spark does notices that it is to stop."""


class Watch:
    """Looks after the blocks of several threads: tells how far they are, and ends what must end.

    `stopping` tells what asks all of them to end, if something does.
    """

    def __init__(self, say: Callable[[str], Any], stopping: Callable[[], str | None]) -> None:
        self._say, self._stopping = say, stopping
        self._blocks: dict[Callable[[], object], Callable[[], object]] = {}
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()
        self.interrupted = False

    @contextmanager
    def block(
        self, spark: "SparkSession", which: str, over: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """Watch the jobs of Spark of this thread's block, and end them when it is `over`.

        What interrupted a call of Spark is raised, not the error that came of it in cleaning up.
        """
        with self._lock:
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
                self._watcher.start()

        def say(line: str) -> None:
            self._say(f"{which}: {line}")

        with interrupting(spark) as stop, Progress(spark, say, every=PROGRESS):
            self._blocks[stop] = over
            try:
                yield
            except Exception as error:
                if interruption := _interruption(error):
                    stop()
                    raise interruption from None
                raise
            except BaseException:
                stop()  # whoever was canceled: the job would go on without us
                raise
            finally:
                del self._blocks[stop]

    @property
    def idle(self) -> bool:
        return not self._blocks

    def ended(self) -> str | None:
        """Why everything is to end, in a line."""
        if self.interrupted:
            return "stopped"
        return f"stopped by {name}" if (name := self._stopping()) else None

    def interrupt(self) -> None:
        """End, from any thread, what is at work."""
        self.interrupted = True
        for stop in list(self._blocks):
            stop()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(LOOK):
            for stop, over in list(self._blocks.items()):
                if self.ended() or over():
                    stop()


def _interruption(error: BaseException | None) -> BaseException | None:
    """What interrupted a call of Spark, whose own cleaning up then failed over it."""
    while error is not None and isinstance(error, Exception):
        error = error.__context__
    return error
