"""The frame that goes from one step of a run to the next, which may be another process."""

import json
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.settings import make_folder
from ..errors import DataflowError
from ..storage.folder import is_frame
from .project import Project
from .task import dumped, loaded
from .transformation import PANDAS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WORK_FOLDER = ".dataflow/work"
MAX_ORDERED_PARTS = 200
"""Parts of a frame whose order is kept: it takes a plan that is as long."""


class Buffer:
    """The folder of one claim in which the steps of its run leave what they have made.

    A frame of pandas is pickled, with its index and types exactly; one of Spark is Parquet, which
    its executors write and read: on a cluster they share the folder. Its columns are called 0, 1, …
    there, since Parquet can't hold every name; their names are beside it.
    """

    def __init__(self, project: Project, slug: str, generation: int) -> None:
        self._project = project
        self.home = project.root / WORK_FOLDER / slug
        self.folder = self.home / str(generation)

    def keep(self, number: int | str, frame: Any) -> None:
        """Leave the frame that step `number` has made."""
        if is_frame(frame):
            self.write(f"{number}.pickle", dumped(frame, self._project.root))
            return
        rows = frame.toDF(*map(str, range(len(frame.columns))))
        rows.write.mode("overwrite").parquet(f"file://{self.folder / f'{number}.parquet'}")
        self.write(f"{number}.columns", json.dumps(frame.columns).encode())

    def frame(self, number: int | str, session: Callable[[], "SparkSession"]) -> Any:
        """The frame that step `number` has left."""
        pickled = self.folder / f"{number}.pickle"
        if pickled.exists():
            return loaded(pickled.read_bytes(), self._project.root)
        columns = json.loads((self.folder / f"{number}.columns").read_bytes())
        return _in_order(session(), self.folder / f"{number}.parquet").toDF(*columns)

    def write(self, name: str, data: bytes) -> None:
        """Leave something else for the steps that come."""
        try:
            make_folder(self.folder)
            (self.folder / name).write_bytes(data)
        except OSError as error:
            raise DataflowError(
                f"The frame between two steps can't be kept in {self.folder}: {error.strerror}. "
                "Make room there, or make that folder writable."
            ) from None

    def drop(self, number: int) -> None:
        """Remove what the steps before the next one have no more need of."""
        for path in self.folder.glob(f"{number}.*"):
            _remove(path)

    def clear(self) -> None:
        """Remove all of this claim's; the run is over."""
        _remove(self.folder)

    def sweep(self, alive: Collection[int]) -> None:
        """Remove what runs have left that were killed: of claims that aren't `alive`."""
        with suppress(OSError):
            for name in os.listdir(self.home):
                if name.isdigit() and int(name) not in alive:
                    _remove(self.home / name)


class InBuffer:
    """The shelf of one source, in the folder of a claim: the steps that come find it there."""

    def __init__(
        self, buffer: Buffer, at: int, session: Callable[[], "SparkSession"], *, again: bool
    ) -> None:
        self._buffer, self._session, self._again = buffer, session, again
        self._name = f"source {at}"

    @property
    def version(self) -> str | None:
        with suppress(FileNotFoundError):
            return self._path("version").read_text(encoding="utf-8")
        return None

    @version.setter
    def version(self, version: str | None) -> None:
        if version is not None:
            self._buffer.write(f"{self._name}.version", version.encode())

    def has(self, kind: str) -> bool:
        return self._path("pickle" if kind == PANDAS else "columns").exists()

    def frame(self, kind: str) -> Any:
        return self._buffer.frame(self._name, self._session)

    def keep(self, kind: str, frame: Any) -> Any:
        if not self._again:
            return frame
        self._buffer.keep(self._name, frame)
        return frame if kind == PANDAS else self.frame(kind)

    def _path(self, ending: str) -> Path:
        return self._buffer.folder / f"{self._name}.{ending}"


def _in_order(spark: "SparkSession", place: Path) -> Any:
    """What was written, in the order of its parts: Spark itself begins with the largest one."""
    parts = sorted(place.glob("part-*.parquet"))
    if not 1 < len(parts) <= MAX_ORDERED_PARTS:
        return spark.read.parquet(f"file://{place}")
    df = spark.read.parquet(f"file://{parts[0]}")
    for part in parts[1:]:
        df = df.union(spark.read.parquet(f"file://{part}"))
    return df


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
