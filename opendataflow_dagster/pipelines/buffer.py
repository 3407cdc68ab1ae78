"""The frame that goes from one step of a run to the next, which may be another process."""

import json
import os
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..dataflow.errors import DataflowError
from ..dataflow.files import is_frame
from .isolation import surroundings
from .project import Project

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FOLDER = ".dataflow/work"
MOST_PARTS = 200
"""Parts of a frame whose order is kept: it takes a plan that is as long."""

INDEX = "__index_{}__"


class Buffer:
    """The folder of one claim in which the steps of its run leave what they have made.

    A frame of pandas is pickled, with its index and types exactly; one of Spark is Parquet, which
    its executors write and read: on a cluster they share the folder.
    """

    def __init__(self, project: Project, slug: str, generation: int) -> None:
        self._project = project
        self.home = project.root / FOLDER / slug
        self.folder = self.home / str(generation)

    def keep(self, number: int, frame: Any) -> None:
        """Leave the frame that step `number` has made."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if is_frame(frame):
                frame.to_pickle(self.folder / f"{number}.pickle", protocol=5)
                return
        except OSError as error:
            raise DataflowError(
                f"The frame between two steps can't be kept in {self.folder}: {error.strerror}. "
                "Make room there, or make that folder writable."
            ) from None
        place = str(self.folder / f"{number}.parquet")
        if type(frame).__module__.startswith("pyspark.pandas"):
            names = [INDEX.format(at) for at in range(frame.index.nlevels)]
            told = {"names": [list(each) if isinstance(each, tuple) else each
                              for each in frame.index.names], "columns": names}  # fmt: skip
            (self.folder / f"{number}.json").write_text(json.dumps(told), encoding="utf-8")
            frame = frame.to_spark(index_col=names)
        frame.write.mode("overwrite").parquet(f"file://{place}")

    def frame(self, number: int, session: Callable[[], "SparkSession"]) -> Any:
        """The frame that step `number` has left."""
        pickled = self.folder / f"{number}.pickle"
        if pickled.exists():
            import pandas

            with surroundings(self._project.root):  # a column may hold objects of the project's
                return pandas.read_pickle(pickled)
        df = _in_order(session(), self.folder / f"{number}.parquet")
        index = self.folder / f"{number}.json"
        if not index.exists():
            return df
        told = json.loads(index.read_text(encoding="utf-8"))
        frame = df.pandas_api(index_col=told["columns"])
        frame.index.names = [tuple(each) if isinstance(each, list) else each
                             for each in told["names"]]  # fmt: skip
        return frame

    def drop(self, number: int) -> None:
        """Remove what the steps before the next one have no more need of."""
        for each in self.folder.glob(f"{number}.*"):
            _remove(each)

    def clear(self) -> None:
        """Remove all of this claim's; the run is over."""
        _remove(self.folder)

    def sweep(self, alive: Collection[int]) -> None:
        """Remove what runs have left that were killed: of claims that aren't `alive`."""
        with suppress(OSError):
            for each in os.listdir(self.home):
                if each.isdigit() and int(each) not in alive:
                    _remove(self.home / each)


def _in_order(spark: "SparkSession", place: Path) -> Any:
    """What was written, in the order of its parts: Spark itself begins with the largest one."""
    parts = sorted(place.glob("part-*.parquet"))
    if not 1 < len(parts) <= MOST_PARTS:
        return spark.read.parquet(f"file://{place}")
    df = spark.read.parquet(f"file://{parts[0]}")
    for each in parts[1:]:
        df = df.union(spark.read.parquet(f"file://{each}"))
    return df


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
