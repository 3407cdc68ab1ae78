"""A source as one run sees it: as it was when it was first read, whichever steps read it."""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from ..errors import DataflowError, Refused
from .annotation import PANDAS, SPARK
from .convert import as_pandas
from .csv_on_spark import from_pandas
from .sources import Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Shelf(Protocol):
    """Where a run keeps what it has read of one source, for the steps that come."""

    @property
    def version(self) -> str | None:
        """That of the source when it was first read."""

    @version.setter
    def version(self, version: str | None) -> None: ...

    def has(self, kind: str) -> bool:
        """Whether there is a frame of this engine."""
        ...

    def frame(self, kind: str) -> Any:
        """The frame of this engine that is there."""
        ...

    def keep(self, kind: str, frame: Any) -> Any:
        """Keep a frame, if a later step may ask for it; the one to go on with."""
        ...


class InMemory:
    """The shelf of a run whose steps are all in this process."""

    def __init__(self, *, again: bool) -> None:
        self.version: str | None = None
        self._again = again
        self._frames: dict[str, Any] = {}

    def has(self, kind: str) -> bool:
        return kind in self._frames

    def frame(self, kind: str) -> Any:
        return self._frames[kind]

    def keep(self, kind: str, frame: Any) -> Any:
        if not self._again:
            return frame
        if kind == SPARK:  # which is lazy: it is read now, and not once more for each that asks
            frame = frame.persist()
            frame.count()
        self._frames[kind] = frame
        return frame

    def clear(self) -> None:
        """Let Spark forget what is kept."""
        if SPARK in self._frames:
            with suppress(Exception):  # the session may be over
                self._frames[SPARK].unpersist()
        self._frames.clear()


class Once(Source):
    """A source of which all steps of a run see one version.

    What was read as a frame of pandas is kept, and so are rows that nothing tells the version of.
    Files that Spark reads are large: they stay where they are, and are refused once they change.
    """

    def __init__(self, source: Source, shelf: Shelf) -> None:
        self._source, self._shelf, self.location = source, shelf, source.location
        self._converted: Any = None
        self._lazy: Any = None

    def pandas(self) -> Any:
        if self._shelf.has(PANDAS):
            return self._shelf.frame(PANDAS)
        if self._shelf.has(SPARK):
            return as_pandas(self._shelf.frame(SPARK))
        return self._shelf.keep(PANDAS, self._of_one_version(self._source.pandas))

    def spark(self, spark: "SparkSession") -> "DataFrame":
        if self._shelf.has(SPARK):
            return self._shelf.frame(SPARK)
        if self._source.by_pandas() or (self._shelf.has(PANDAS) and not self._is_the_same()):
            if self._converted is None:
                self._converted = from_pandas(spark, self.pandas())
            return self._converted
        if self._lazy is None:
            self._lazy = self._source.spark(spark)
        frame = self._of_one_version(lambda: self._lazy)
        return frame if self._shelf.version else self._shelf.keep(SPARK, frame)

    def version(self) -> str | None:
        return self._source.version()

    def by_pandas(self) -> bool:
        return self._source.by_pandas()

    def _of_one_version(self, read: Callable[[], Any]) -> Any:
        """What is read; `Refused` if it isn't what the steps before have seen."""
        if self._shelf.version is None:
            self._shelf.version = self._source.version()
            return read()
        frame = read()
        if not self._is_the_same():
            raise Refused(
                f"{self.location} has changed since this run began to read it, and is too large to "
                "be kept. Nothing is published; make the run again when nobody writes there.",
                code="INVALID_LOCATION",
            )
        return frame

    def _is_the_same(self) -> bool:
        try:
            now = self._source.version()
        except DataflowError:  # it is gone
            return False
        return now is not None and now == self._shelf.version
