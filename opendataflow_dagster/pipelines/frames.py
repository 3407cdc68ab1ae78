"""Frames of pandas and Spark, and what pipelines read them from and write them to."""

import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..chunk import Chunk, Result, reason_of
from ..errors import (
    CredentialError,
    DataflowError,
    NoDatabase,
    Refused,
    SessionError,
    StaleClaim,
    Unreachable,
    WrongUse,
)
from ..location import columns_of, is_relative
from ..model import Claim
from ..spark.chunk_files import retyped
from ..spark.session import is_spark_frame
from ..storage import folder as folders
from ..storage.folder import data_files, need
from ..storage.table import is_outage
from ..store.store import Store
from ..util.text import typed
from .transformation import PANDAS, SPARK, TransformationError

if TYPE_CHECKING:
    from pandas import DataFrame as PandasFrame
    from pyspark.sql import DataFrame, SparkSession


def kind_of(frame: Any) -> str | None:
    """The engine whose frame this is; None if it is something else."""
    module, name = type(frame).__module__, type(frame).__name__
    if module.startswith("pyspark.sql."):
        return SPARK if name == "DataFrame" else None
    import pandas

    return PANDAS if isinstance(frame, pandas.DataFrame) else None


def as_pandas(frame: Any) -> Any:
    """A frame of pandas with all the rows; what is one already stays the same object."""
    kind = kind_of(frame)
    if kind == PANDAS:
        return frame
    if kind == SPARK:
        return by_the_clock(frame).toPandas()
    return frame.pandas()


def as_spark(frame: Any, spark: Any = None) -> Any:
    """A frame of Spark; an index isn't a column, and is left out.

    One that isn't Spark's already needs the session.
    """
    kind = kind_of(frame)
    if kind == SPARK:
        return frame
    if kind == PANDAS:
        names = [str(name) for name in frame.columns]
        columns = [_as_arrow(name, frame.iloc[:, at]) for at, name in enumerate(names)]
        return sent(spark, names, columns, len(frame))
    return frame.spark(spark)


def by_the_clock(frame: Any, but: Container[str] = ()) -> Any:
    """A frame of Spark whose moments have become the times that the session's clock shows.

    Spark casts them, as it has read them: the zones that it knows and those of pandas differ, and
    what they say of times before 1900. Columns called as in `but` stay as they are.
    """
    fields = frame.schema.fields
    plain = frame.toDF(*(str(at) for at in range(len(fields))))  # two may have one name
    columns, changed = [], False
    for at, field in enumerate(fields):
        column, kind = plain[str(at)], _without_zone(field.dataType)
        if kind != field.dataType and field.name not in but:
            column, changed = column.cast(kind), True
        columns.append(column.alias(field.name))
    return plain.select(*columns) if changed else frame


def _without_zone(kind: Any) -> Any:
    from pyspark.sql import types

    return retyped(
        kind,
        lambda leaf: types.TimestampNTZType() if isinstance(leaf, types.TimestampType) else leaf,
    )


# --- from pandas to Spark ---

_REFUSALS = (ValueError, TypeError, OverflowError, AttributeError)
"""What Arrow raises, besides its own, for values that it doesn't know what to do with."""


def sent(spark: "SparkSession", names: Sequence[str], columns: Sequence[Any], rows: int) -> Any:
    """A frame of Spark with such columns of Arrow; a time without a zone stays one."""
    import pyarrow
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructType

    if not columns:
        return spark.createDataFrame([()] * rows, StructType())
    table = pyarrow.table(list(columns), names=list(names))
    return spark.createDataFrame(table, from_arrow_schema(table.schema))


def arrow(column: Any) -> Any:
    """A column of pandas as one of Arrow, of a type that Spark has; TypeError: there is none."""
    import pyarrow
    from pyspark.errors import PySparkException
    from pyspark.sql.pandas.types import from_arrow_type

    if str(getattr(column.dtype, "tz", None) or "UTC") != "UTC":  # Arrow doesn't know all zones
        column = column.dt.tz_convert("UTC")
    try:
        converted = _known_to_spark(pyarrow.Array.from_pandas(column))
        from_arrow_type(converted.type)
    except (pyarrow.ArrowException, PySparkException, *_REFUSALS) as error:
        raise TypeError(str(error)) from None
    return converted


def from_pandas(spark: "SparkSession", frame: Any) -> "DataFrame":
    """A frame of pandas as one of Spark; what Spark has no type for becomes texts."""
    import pyarrow

    columns = []
    for _, column in frame.items():
        try:
            columns.append(arrow(column))
        except TypeError:
            texts = column.map(str, na_action="ignore")
            columns.append(pyarrow.array(texts, pyarrow.string(), from_pandas=True))
    return sent(spark, [str(name) for name in frame.columns], columns, len(frame))


def _as_arrow(name: str, column: Any) -> Any:
    """The column as one of Arrow, or an error that names the column and its types."""
    try:
        return arrow(column)
    except TypeError:
        kinds = ", ".join(sorted({type(cell).__name__ for cell in column}))
        raise TransformationError(
            f"Column {name!r} can't go to Spark: it has {kinds}. Give its values one type, which "
            "Spark has, in the transformation before."
        ) from None


def _known_to_spark(column: Any) -> Any:
    """The column with a type that Spark has."""
    import pyarrow

    kind = column.type
    if pyarrow.types.is_dictionary(kind):
        return _known_to_spark(column.cast(kind.value_type))
    if pyarrow.types.is_null(kind):
        return column.cast(pyarrow.string())
    if pyarrow.types.is_timestamp(kind) and kind.unit != "us":
        return column.cast(pyarrow.timestamp("us", kind.tz), safe=False)
    if pyarrow.types.is_duration(kind) and kind.unit != "us":
        return column.cast(pyarrow.duration("us"), safe=False)
    if pyarrow.types.is_float16(kind):
        return column.cast(pyarrow.float32())
    if pyarrow.types.is_decimal256(kind):  # which fails beyond the 38 digits that Spark has
        return column.cast(pyarrow.decimal128(kind.precision, kind.scale))
    if pyarrow.types.is_unsigned_integer(kind):
        wider = {8: pyarrow.int16(), 16: pyarrow.int32(), 32: pyarrow.int64()}
        return column.cast(wider.get(kind.bit_width, pyarrow.decimal128(20, 0)))
    return column


# --- a large frame of Spark: written to disk, and read piece by piece ---


MAX_COLLECTED_ROWS = 10_000
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
        self._rows = sum(self._opened(path).metadata.num_rows for path in self._files)

    def __len__(self) -> int:
        return self._rows

    def pieces(self) -> Iterator[Any]:
        """The rows in their order, as frames of pandas with the same types each."""
        for path in self._files:
            for batch in self._opened(path).iter_batches(batch_size=MAX_COLLECTED_ROWS):
                yield self._frame(need("pyarrow").Table.from_batches([batch]))

    def pandas(self) -> Any:
        """All of it in memory."""
        pieces = list(self.pieces()) or [self.typical()]
        return need("pandas").concat(pieces, ignore_index=True)

    def typical(self) -> Any:
        """A frame of one row at most, of the same types, with a value wherever a column has one."""
        pyarrow = need("pyarrow")
        found: dict[str, Any] = {}
        for path in self._files if len(self) else ():
            file = self._opened(path)
            for name in [name for name in self._schema.names if name not in found]:
                for batch in file.iter_batches(batch_size=MAX_COLLECTED_ROWS, columns=[name]):
                    if values := [value for value in batch.column(0) if value.is_valid]:
                        found[name] = pyarrow.array([values[0].as_py()], values[0].type)
                        break
        if not len(self):
            return self._frame(self._schema.empty_table())
        columns = [found.get(field.name, pyarrow.nulls(1, field.type)) for field in self._schema]
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
                        for path in self._files
                        for batch in self._opened(path).iter_batches(
                            MAX_COLLECTED_ROWS, columns=[field.name]
                        )
                    ),
                    default=-1,
                )
        return found

    def _opened(self, path: str) -> Any:
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(path, coerce_int96_timestamp_unit="us")

    def _frame(self, table: Any) -> Any:
        return as_frame(folders.conform(table, self._schema).rename_columns(self.columns))


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
    plain = (field.dataType.typeName().partition("(")[0] in _PLAIN for field in frame.schema)
    return bool(frame.columns) and all(plain) and frame.count() > MAX_COLLECTED_ROWS


@contextmanager
def spilled(frame: "DataFrame", folder: str, moments: Container[str] = ()) -> Iterator[Spill]:
    """Let Spark write a frame into a folder that its executors share with this process.

    Times are those that the session's clock shows, but the columns `moments` have a zone.
    """
    names = frame.columns
    plain = by_the_clock(frame, moments).toDF(*(f"c{at}" for at in range(len(names))))
    try:
        plain.write.mode("overwrite").parquet(f"file://{folder}")
        found = Spill(folder, names, folders.arrow_schema(plain.schema.jsonValue()))
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


# What a pipeline reads and writes: base classes, and the verdict on a frame that can't be kept.


Confirm = Callable[[], None]
Parts = Sequence[tuple[Claim, Any]]
Verdict = Result | DataflowError

_BLAMELESS = (StaleClaim, Unreachable, NoDatabase, CredentialError, SessionError)


class Source:
    """A source of a pipeline, which is read when it is asked for."""

    location = ""
    """Where it is, for people."""

    def pandas(self) -> "PandasFrame":
        """All of it as a frame of pandas, which is the caller's own."""
        raise NotImplementedError

    def spark(self, spark: "SparkSession") -> "DataFrame":
        """All of it as a frame of Spark."""
        raise NotImplementedError

    def version(self) -> str | None:
        """What changes when the data does; None if only reading it again can tell."""
        return None

    def by_pandas(self) -> bool:
        """Whether the frame of Spark is that of pandas, converted; else Spark reads, and later."""
        return False


class Destination:
    """What a pipeline writes to; a frame's index is left out everywhere."""

    location = ""
    """Where it is, for people."""
    work = ""
    """A folder for what is on its way, which Spark's executors share with this process."""

    @contextmanager
    def rows(self, frame: Any, chunk: Chunk, moments: Container[str] = ()) -> Iterator[Any]:
        """A frame in memory, as one of pandas; a large one of Spark as a `Spill`."""
        if not is_spark_frame(frame):
            yield whole_pandas(frame)
        elif is_large(frame):
            folder = os.path.join(self.work, str(chunk.generation), "publish.parquet")
            with spilled(frame, folder, moments) as found:
                yield found
        else:
            yield from_spark(frame, moments)

    def refuse_loss(self) -> None:
        """Refuse a batch run that would take away what items have made."""

    def replaces(self, *, items: bool = False) -> bool:
        """Whether a run, or each of some items, takes the place of all that is there."""
        return False

    def publish(self, frame: Any, chunk: Chunk, confirm: Confirm) -> Result:
        """Publish what a batch run has made. `confirm` raises if the claim isn't ours any more."""
        raise NotImplementedError

    def append(self, parts: Parts, confirm: Confirm) -> list[Verdict]:
        """Publish what items have made, each as its own chunk; a bad one fails alone.

        It raises what isn't about one of them: a claim is lost, or the place can't be used now.
        """
        raise NotImplementedError


def whole_pandas(frame: Any) -> Any:
    """A frame of pandas, a frame of Spark, or a source, as a frame of pandas."""
    return from_spark(frame) if is_spark_frame(frame) else as_pandas(frame)


def from_spark(frame: Any, moments: Container[str] = ()) -> Any:
    """A frame of Spark as one of pandas, in which whole numbers stay whole beside NULLs.

    Times are those that the session's clock shows, but the columns `moments` have a zone.
    """
    return as_frame(by_the_clock(frame, moments).toArrow())


def one(verdicts: list[Verdict]) -> Result:
    """The result of the only claim, or its error."""
    [verdict] = verdicts
    if isinstance(verdict, DataflowError):
        raise verdict
    return verdict


def judged(work: Callable[[], Result], frame: Any, where: str) -> Verdict:
    """What writing a frame has come to; it raises only what others would meet there, too."""
    try:
        return work()
    except Exception as error:
        if not is_to_blame(error):
            raise
        return fault(error, frame, where)


def is_to_blame(error: Exception) -> bool:
    """Whether what is written is wrong, and not the claim, the place or the tables of ours."""
    import sqlite3

    import psycopg

    if isinstance(error, OSError):
        return error.errno is None  # it isn't the system's
    if error.__cause__ is not None and is_outage(error.__cause__):
        return False  # of our tables, told in a line
    return not isinstance(error, (*_BLAMELESS, psycopg.Error, sqlite3.Error))


def fault(error: Exception, frame: Any, where: str) -> DataflowError:
    """The verdict on a frame that can't be written: which column it is about, and why."""
    cause = error.__context__ if isinstance(error, WrongUse) else error
    if isinstance(error, DataflowError) and not isinstance(cause, UnicodeError):
        return error
    cause = cause or error
    found = column_to_blame(cause, frame)
    what = f"{found}, which" if found else "the frame"
    return DataflowError(
        f"{where}: {what} can't be written there ({reason_of(cause)}). "
        "Correct it in the transformation."
    )


def column_to_blame(error: BaseException, frame: Any) -> str:
    """What is odd about the first column that can have made such an error; or nothing."""
    names = [str(name) for name in frame.columns]
    for at, name in enumerate(names):
        if oddity := _odd(name, error):
            return f"column {name!r} is called by {oddity}"
        if names.count(name) > 1:
            return f"two columns are called {name!r}"
        column = frame.iloc[:, at]
        if column.dtype.kind not in "bfimM":
            oddity = next(filter(None, (_odd(value, error) for value in column)), "")
            if oddity:
                return f"column {name!r} has {oddity}"
    return ""


def _odd(value: Any, error: BaseException) -> str:
    """What is odd about a value, or about one in it, and makes such errors; or nothing."""
    if isinstance(value, str):
        return (
            "a text that isn't Unicode" if isinstance(error, UnicodeError) and _half(value) else ""
        )
    if isinstance(error, OverflowError) and isinstance(value, int):
        return "" if -(2**63) <= value < 2**63 else "a whole number of more than 64 bits"
    if isinstance(value, dict):
        if not isinstance(error, UnicodeError | OverflowError):
            if not value:
                return "an empty dict"
            if not all(isinstance(key, str) for key in value):
                return "a dict with a key that is no text"
        inner = [*value, *value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = list(value)
    else:
        return ""
    return next(filter(None, (_odd(part, error) for part in inner)), "")


def _half(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


# --- the row that a dataset is registered with ---


APPEND, REPLACE = "append", "replace"


class DatasetRow(NamedTuple):
    """The row of a registered dataset; its password stays encrypted until it is needed."""

    datasetid: str
    columns: Mapping[str, str | None]
    encrypted: str | None

    def value(self, column: str) -> str:
        """A column's value; nothing if there is none, or no such column yet."""
        return self.columns.get(column) or ""

    def password(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """The password, decrypted now."""
        from ..config.credentials import password_of

        return password_of(self.datasetid, self.encrypted, environ)


def registered(store: Store, datasetid: str, root: Path) -> DatasetRow | None:
    """The row that a dataset is registered with; a relative place of it is in the folder `root`.

    So whoever runs a pipeline, from wherever, reads and writes the same files.
    """
    rows = store.db.fetch_records("state.dataset", datasetid=datasetid)
    if not rows:
        return None
    columns = columns_of(rows[0])
    encrypted = columns.pop("encryptedpass", None)
    for column in ("hostname", "database"):
        if place := columns.get(column):
            if is_relative(place):
                columns[column] = os.path.normpath(root / place)
            break
    return DatasetRow(datasetid, columns, encrypted)


def write_mode(row: DatasetRow | None) -> str:
    """`append` or `replace`, if the dataset's row says so; else nothing."""
    mode = row.value("writemode").lower() if row else ""
    if row and mode not in ("", APPEND, REPLACE):
        raise Refused(
            f"{row.datasetid!r} has the writemode {mode!r}: it is append or replace. "
            f"Run: odf dataset add {typed(row.datasetid)} --writemode append",
            code="INVALID_LOCATION",
        )
    return mode
