"""A large frame of Spark on its way into a file or table: on disk, and read piece by piece."""

import os
import shutil
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from ..errors import DataflowError
from ..storage import files
from ..storage.files import data_files, need
from .convert import by_the_clock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LARGE = 10_000
"""Rows that this process and Java may hold at once."""

_PLAIN = (
    "byte",
    "short",
    "integer",
    "long",
    "float",
    "double",
    "string",
    "boolean",
    "binary",
    "date",
    "decimal",
    "timestamp",
    "timestamp_ntz",
)


class Spill:
    """The rows of a frame that Spark has written as Parquet, where this process reads them.

    Java hands over none of them, and of this process none but a piece is in memory.
    """

    def __init__(self, folder: str, names: list[str], schema: Any) -> None:
        self.columns = names
        self._files, self._schema = data_files(folder), schema
        self._rows = sum(self._opened(each).metadata.num_rows for each in self._files)

    def __len__(self) -> int:
        return self._rows

    def pieces(self) -> Iterator[Any]:
        """The rows in their order, as frames of pandas with the same types each."""
        for each in self._files:
            for batch in self._opened(each).iter_batches(batch_size=LARGE):
                yield self._frame(need("pyarrow").Table.from_batches([batch]))

    def pandas(self) -> Any:
        """All of it in memory."""
        pieces = list(self.pieces()) or [self.typical()]
        return need("pandas").concat(pieces, ignore_index=True)

    def typical(self) -> Any:
        """A frame of one row at most, of the same types, with a value wherever a column has one."""
        pyarrow = need("pyarrow")
        found: dict[str, Any] = {}
        for each in self._files if len(self) else ():
            file = self._opened(each)
            for name in [name for name in self._schema.names if name not in found]:
                for batch in file.iter_batches(batch_size=LARGE, columns=[name]):
                    if values := [value for value in batch.column(0) if value.is_valid]:
                        found[name] = pyarrow.array([values[0].as_py()], values[0].type)
                        break
        if not len(self):
            return self._frame(self._schema.empty_table())
        columns = [found.get(each.name, pyarrow.nulls(1, each.type)) for each in self._schema]
        return self._frame(pyarrow.table(columns, names=self._schema.names))

    def times(self) -> dict[int, int]:
        """Of each column of times, the digits of a second that all have; -1 if all are days.

        So pandas writes them: it looks at all times of a frame at once.
        """
        pyarrow = need("pyarrow")
        found = {}
        for at, field in enumerate(self._schema):
            if pyarrow.types.is_timestamp(field.type):
                found[at] = max(
                    (
                        _digits(batch.column(0))
                        for each in self._files
                        for batch in self._opened(each).iter_batches(LARGE, columns=[field.name])
                    ),
                    default=-1,
                )
        return found

    def _opened(self, path: str) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(path, coerce_int96_timestamp_unit="us")

    def _frame(self, table: Any) -> Any:
        return as_frame(files.conform(table, self._schema).rename_columns(self.columns))


def as_frame(table: Any) -> Any:
    """A table of Spark's as a frame of pandas, in which whole numbers stay whole beside NULL."""
    pandas, pyarrow = need("pandas"), need("pyarrow")
    whole = {
        pyarrow.int8(): pandas.Int8Dtype(),
        pyarrow.int16(): pandas.Int16Dtype(),
        pyarrow.int32(): pandas.Int32Dtype(),
        pyarrow.int64(): pandas.Int64Dtype(),
    }
    return table.to_pandas(types_mapper=whole.get)


def _digits(times: Any) -> int:
    """How many digits of a second the times have; -1 if all are midnights."""
    compute = need("pyarrow.compute")
    micros = times.cast(need("pyarrow").int64()).drop_null()
    for digits, size in ((-1, 86_400_000_000), (0, 1_000_000), (3, 1000)):
        whole = compute.multiply(compute.divide(micros, size), size)
        if compute.all(compute.equal(whole, micros), min_count=0).as_py():
            return digits
    return 6


def pieces_of(frame: Any) -> Iterable[Any]:
    """A frame of pandas as it is, or a spill piece by piece."""
    return frame.pieces() if isinstance(frame, Spill) else [frame]


def is_large(frame: "DataFrame") -> bool:
    """Whether a frame has more rows than are collected, of types that Parquet keeps."""
    plain = (each.dataType.typeName().partition("(")[0] in _PLAIN for each in frame.schema)
    return bool(frame.columns) and all(plain) and frame.count() > LARGE


@contextmanager
def spilled(frame: "DataFrame", folder: str, moments: Container[str] = ()) -> Iterator[Spill]:
    """Let Spark write a frame into a folder that its executors share with this process.

    Times are those that the session's clock shows, but the columns `moments` have a zone.
    """
    names = frame.columns
    plain = by_the_clock(frame, moments).toDF(*(f"c{at}" for at in range(len(names))))
    try:
        plain.write.mode("overwrite").parquet(f"file://{folder}")
        found = Spill(folder, names, files.arrow_schema(plain.schema.jsonValue()))
        if len(found) != (rows := frame.count()):
            raise DataflowError(
                f"Spark has written {rows:,} rows into {folder}, and {len(found):,} are there: its "
                "executors don't share that folder. Register the destination with a place that "
                "they reach, by chunks."
            )
        yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # others are at work beside it
            os.rmdir(os.path.dirname(folder))
