"""All chunks of a folder as one source: those that are READY, or all files if nobody tracks it."""

import os
from collections.abc import Iterator
from functools import reduce
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from ..chunk import Place
from ..errors import Refused
from ..ids import natural_key
from ..location import Folder
from ..spark.read import read_chunk_frame, read_files
from ..storage import files
from ..storage.publish import read
from ..storage.read import Reading
from ..store.csv_options import CsvOptions, csv_options
from ..store.store import Store
from ..util.text import typed
from .sources import Source

if TYPE_CHECKING:
    from pandas import DataFrame as PandasFrame
    from pyspark.sql import DataFrame, SparkSession


class Ready(NamedTuple):
    """A chunk that is READY, the job that made it, and whether it is an item."""

    dataid: str
    generation: int | None
    location: str | None
    jobid: str
    is_item: bool


class FolderSource(Source):
    """A folder as it stands, chunk after chunk in their natural order."""

    def __init__(self, store: Store, where: Folder) -> None:
        self._store, self._where, self.location = store, where, where.root

    def pandas(self) -> "PandasFrame":
        chunks = self._chunks()
        if chunks is None:
            return files.read_frame(self._there(), self._where.format, None, self._options())
        frames = [read(self._reading(*each), self._where) for each in chunks]
        return files.need("pandas").concat(frames, ignore_index=True)

    def spark(self, spark: "SparkSession") -> "DataFrame":
        chunks = self._chunks()
        if chunks is None:
            return read_files(spark, self._there(), {}, self._where.format, self._options())
        where = self._where
        columns = {"hostname": where.root, "format": where.format, "options": where.options}
        frames = [
            read_chunk_frame(
                spark,
                Place(self._where.datasetid, columns, location, generation, store=self._store.id),
                dataid,
                lambda: None,
                lambda: None,
            )
            for dataid, generation, location in chunks
        ]
        return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), frames)

    def version(self) -> str | None:
        chunks = self._chunks(insist=False)
        return None if chunks is None else sha256(repr(chunks).encode()).hexdigest()

    def _chunks(self, *, insist: bool = True) -> list[tuple[str, int | None, str | None]] | None:
        """dataid, generation and location of what is READY; None if the tables tell nothing."""
        rows, _ = self._store.db.insist(
            lambda: self._store.db.run("places.chunks", datasetid=self._where.datasetid)
        )
        folded = list(self._folded({row[0] for row in rows}))
        if not rows and not folded:
            return None
        ready = [Ready(*row[:3], *row[4:]) for row in rows if row[3] == "READY"]
        ready = self._chosen([*ready, *folded])
        if insist and not ready:
            raise Refused(
                f"Source {self._where.datasetid!r} has no chunk that is READY. "
                f"Run: odf status {typed(self._where.datasetid)}",
                code="DATA_NOT_READY",
            )
        return [each[:3] for each in sorted(ready, key=lambda each: natural_key(each.dataid))]

    def _chosen(self, ready: list[Ready]) -> list[Ready]:
        return ready

    def _folded(self, known: set[str]) -> Iterator[Ready]:
        """The chunks of items that were folded: their directories are all that tells of them."""
        datasetid, root = self._where.datasetid, self._where.root
        rows, _ = self._store.db.insist(
            lambda: self._store.db.run("folding.of_dataset", datasetid=datasetid)
        )
        [(first, last)] = rows
        if first is None or not os.path.isdir(root):
            return
        for name in os.listdir(root):
            number = name.removeprefix("dataid=")
            if number.isdecimal() and number not in known and first <= int(number) <= last:
                yield Ready(number, None, os.path.join(root, name), "", is_item=True)

    def _reading(self, dataid: str, generation: int | None, location: str | None) -> Reading:
        fact: dict[str, Any] = {"location": location}
        return Reading(self._where.datasetid, dataid, {}, None, [], [], [], generation, fact=fact)

    def _options(self) -> CsvOptions:
        return csv_options(self._where.datasetid, self._where.options)

    def _there(self) -> str:
        if not os.path.exists(self.location):
            raise Refused(
                f"Source {self._where.datasetid!r} is {self.location}, which doesn't exist. Run: "
                f"odf dataset add {typed(self._where.datasetid)} --hostname /FOLDER",
                code="INVALID_LOCATION",
            )
        return self.location


class NewestSource(FolderSource):
    """What pipelines have made last in a folder of theirs: the newest run of each, and all items.

    That is what the rest of the world sees of them: each run takes the place of the one before.
    """

    def is_there(self) -> bool:
        """Whether there is such a chunk."""
        return bool(self._chunks(insist=False))

    def _chosen(self, ready: list[Ready]) -> list[Ready]:
        root = self._where.root + os.sep
        mine = [each for each in ready if (each.location or "").startswith(root)]
        runs = [each for each in mine if not each.is_item]
        newest = {each.jobid: each for each in sorted(runs, key=lambda x: natural_key(x.dataid))}
        return [*newest.values(), *(each for each in mine if each.is_item)]
