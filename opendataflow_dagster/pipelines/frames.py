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
    """Return the engine that a frame belongs to; None if it is something else."""
    module, name = type(frame).__module__, type(frame).__name__
    if module.startswith("pyspark.sql."):
        return SPARK if name == "DataFrame" else None
    import pandas

    return PANDAS if isinstance(frame, pandas.DataFrame) else None


def as_pandas(frame: Any) -> Any:
    """Return a pandas frame with all rows; a pandas frame is returned unchanged."""
    kind = kind_of(frame)
    if kind == PANDAS:
        return frame
    if kind == SPARK:
        return by_the_clock(frame).toPandas()
    return frame.pandas()


def as_spark(frame: Any, spark: Any = None) -> Any:
    """Return a Spark frame; an index isn't a column, and is left out.

    A frame of another kind needs the session.
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
    """Return a Spark frame whose timestamps have become times in the session's time zone.

    Spark casts them, since it has read them: Spark and pandas know different zones, and different
    offsets before 1900. Columns named in `but` stay unchanged.
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
"""What Arrow raises, besides its own errors, for values that it can't convert."""


def sent(spark: "SparkSession", names: Sequence[str], columns: Sequence[Any], rows: int) -> Any:
    """Return a Spark frame with these Arrow columns; a time without a zone stays one."""
    import pyarrow
    from pyspark.sql.pandas.types import from_arrow_schema
    from pyspark.sql.types import StructType

    if not columns:
        return spark.createDataFrame([()] * rows, StructType())
    table = pyarrow.table(list(columns), names=list(names))
    return spark.createDataFrame(table, from_arrow_schema(table.schema))


def arrow(column: Any) -> Any:
    """Convert a pandas column to Arrow, with a type that Spark has; TypeError: there is none."""
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
    """Convert a pandas frame to Spark; values without a Spark type become strings."""
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
    """Convert a column to Arrow, or raise an error that names the column and its types."""
    try:
        return arrow(column)
    except TypeError:
        kinds = ", ".join(sorted({type(cell).__name__ for cell in column}))
        raise TransformationError(
            f"Column {name!r} can't be sent to Spark: it has {kinds}. Convert its values to "
            "one type that Spark has, in the previous transformation."
        ) from None


def _known_to_spark(column: Any) -> Any:
    """Return the column with a type that Spark has."""
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
    if pyarrow.types.is_decimal256(kind):  # the cast fails beyond Spark's 38 digits
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
    """The rows of a frame that Spark has written as Parquet, for this process to read.

    Java passes none of them on, and this process holds only one piece in memory.
    """

    def __init__(self, folder: str, names: list[str], schema: Any) -> None:
        self.columns = names
        self._files, self._schema = data_files(folder), schema
        self._rows = sum(self._opened(path).metadata.num_rows for path in self._files)

    def __len__(self) -> int:
        return self._rows

    def pieces(self) -> Iterator[Any]:
        """Yield the rows in order, as pandas frames with the same types."""
        for path in self._files:
            for batch in self._opened(path).iter_batches(batch_size=MAX_COLLECTED_ROWS):
                yield self._frame(need("pyarrow").Table.from_batches([batch]))

    def pandas(self) -> Any:
        """Return all rows in memory."""
        pieces = list(self.pieces()) or [self.typical()]
        return need("pandas").concat(pieces, ignore_index=True)

    def typical(self) -> Any:
        """A frame of at most one row, with the same types, and values where columns have any."""
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
        """Return how many decimals of a second each column of times has; -1 if all are days.

        pandas writes times like that: it considers all times of a frame together.
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
    """Convert a Spark table to a pandas frame in which integers stay integers beside NULL."""
    pandas, pyarrow = need("pandas"), need("pyarrow")
    whole = {
        pyarrow.int8(): pandas.Int8Dtype(),
        pyarrow.int16(): pandas.Int16Dtype(),
        pyarrow.int32(): pandas.Int32Dtype(),
        pyarrow.int64(): pandas.Int64Dtype(),
    }
    return table.to_pandas(types_mapper=whole.get)


def _digits(times: Any) -> int:
    """Return how many decimals of a second the times have; -1 if all are midnights."""
    compute = need("pyarrow.compute")
    micros = times.cast(need("pyarrow").int64()).drop_null()
    for digits, size in ((-1, 86_400_000_000), (0, 1_000_000), (3, 1000)):
        whole = compute.multiply(compute.divide(micros, size), size)
        if compute.all(compute.equal(whole, micros), min_count=0).as_py():
            return digits
    return 6


def pieces_of(frame: Any) -> Iterable[Any]:
    """Yield a pandas frame whole, or a spill piece by piece."""
    return frame.pieces() if isinstance(frame, Spill) else [frame]


def is_large(frame: "DataFrame") -> bool:
    """Whether a frame has more rows than are collected, of types that Parquet keeps."""
    plain = (field.dataType.typeName().partition("(")[0] in _PLAIN for field in frame.schema)
    return bool(frame.columns) and all(plain) and frame.count() > MAX_COLLECTED_ROWS


@contextmanager
def spilled(frame: "DataFrame", folder: str, moments: Container[str] = ()) -> Iterator[Spill]:
    """Let Spark write a frame into a folder that its executors share with this process.

    Times are in the session's time zone, but the columns `moments` have a zone.
    """
    names = frame.columns
    plain = by_the_clock(frame, moments).toDF(*(f"c{at}" for at in range(len(names))))
    try:
        plain.write.mode("overwrite").parquet(f"file://{folder}")
        found = Spill(folder, names, folders.arrow_schema(plain.schema.jsonValue()))
        if len(found) != (rows := frame.count()):
            raise DataflowError(
                f"Spark wrote {rows:,} rows into {folder}, but this process finds {len(found):,}: "
                "the executors don't share that folder. Register the destination by chunks, in a "
                "location that the executors can reach."
            )
        yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # others are working beside it
            os.rmdir(os.path.dirname(folder))


# What a pipeline reads and writes: base classes, and the verdict on a frame that can't be written.


Confirm = Callable[[], None]
Parts = Sequence[tuple[Claim, Any]]
Verdict = Result | DataflowError

_BLAMELESS = (StaleClaim, Unreachable, NoDatabase, CredentialError, SessionError)


class Source:
    """A source of a pipeline, read on demand."""

    location = ""
    """Where it is, for people."""

    def pandas(self) -> "PandasFrame":
        """Return all rows as a pandas frame that the caller may change."""
        raise NotImplementedError

    def spark(self, spark: "SparkSession") -> "DataFrame":
        """Return all rows as a Spark frame."""
        raise NotImplementedError

    def version(self) -> str | None:
        """Return what changes when the data does; None if only reading it again can tell."""
        return None

    def by_pandas(self) -> bool:
        """Whether the Spark frame is converted from pandas; otherwise Spark reads it, and later."""
        return False


class Destination:
    """What a pipeline writes to; a frame's index is always left out."""

    location = ""
    """Where it is, for people."""
    work = ""
    """A folder for data on its way, which Spark's executors share with this process."""

    @contextmanager
    def rows(self, frame: Any, chunk: Chunk, moments: Container[str] = ()) -> Iterator[Any]:
        """Yield a frame in memory, as pandas; a large Spark frame as a `Spill`."""
        if not is_spark_frame(frame):
            yield whole_pandas(frame)
        elif is_large(frame):
            folder = os.path.join(self.work, str(chunk.generation), "publish.parquet")
            with spilled(frame, folder, moments) as found:
                yield found
        else:
            yield from_spark(frame, moments)

    def refuse_loss(self) -> None:
        """Refuse a batch run that would delete what items produced."""

    def replaces(self, *, items: bool = False) -> bool:
        """Whether a run, or each of some items, replaces everything in the destination."""
        return False

    def publish(self, frame: Any, chunk: Chunk, confirm: Confirm) -> Result:
        """Publish the result of a batch run. `confirm` raises if the claim is lost."""
        raise NotImplementedError

    def append(self, parts: Parts, confirm: Confirm) -> list[Verdict]:
        """Publish the results of items, each as its own chunk; a bad one fails alone.

        Raises only what isn't one item's fault: a lost claim, or a place that can't be used now.
        """
        raise NotImplementedError


def whole_pandas(frame: Any) -> Any:
    """Convert a pandas frame, a Spark frame, or a source to a pandas frame."""
    return from_spark(frame) if is_spark_frame(frame) else as_pandas(frame)


def from_spark(frame: Any, moments: Container[str] = ()) -> Any:
    """Convert a Spark frame to pandas; integers stay integers beside NULLs.

    Times are in the session's time zone, but the columns `moments` have a zone.
    """
    return as_frame(by_the_clock(frame, moments).toArrow())


def one(verdicts: list[Verdict]) -> Result:
    """Return the result of the only claim, or raise its error."""
    [verdict] = verdicts
    if isinstance(verdict, DataflowError):
        raise verdict
    return verdict


def judged(work: Callable[[], Result], frame: Any, where: str) -> Verdict:
    """Return the verdict on writing a frame; raises only what other frames would meet, too."""
    try:
        return work()
    except Exception as error:
        if not is_to_blame(error):
            raise
        return fault(error, frame, where)


def is_to_blame(error: Exception) -> bool:
    """Whether what is written is at fault, and not the claim, the place or our tables."""
    import sqlite3

    import psycopg

    if isinstance(error, OSError):
        return error.errno is None  # not a system error
    if error.__cause__ is not None and is_outage(error.__cause__):
        return False  # our tables' error, reported in a line
    return not isinstance(error, (*_BLAMELESS, psycopg.Error, sqlite3.Error))


def fault(error: Exception, frame: Any, where: str) -> DataflowError:
    """Return the verdict on a frame that can't be written: which column, and why."""
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
    """Return what is wrong with the first column that can cause this error, or ""."""
    names = [str(name) for name in frame.columns]
    for at, name in enumerate(names):
        if oddity := _odd(name, error):
            return f"the name of column {name!r} is {oddity}"
        if names.count(name) > 1:
            return f"two columns are called {name!r}"
        column = frame.iloc[:, at]
        if column.dtype.kind not in "bfimM":
            oddity = next(filter(None, (_odd(value, error) for value in column)), "")
            if oddity:
                return f"column {name!r} has {oddity}"
    return ""


def _odd(value: Any, error: BaseException) -> str:
    """Return what is wrong with a value, or one inside it, that can cause this error, or ""."""
    if isinstance(value, str):
        return (
            "a string that isn't Unicode"
            if isinstance(error, UnicodeError) and _half(value)
            else ""
        )
    if isinstance(error, OverflowError) and isinstance(value, int):
        return "" if -(2**63) <= value < 2**63 else "an integer of more than 64 bits"
    if isinstance(value, dict):
        if not isinstance(error, UnicodeError | OverflowError):
            if not value:
                return "an empty dict"
            if not all(isinstance(key, str) for key in value):
                return "a dict with a key that isn't a string"
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
        """Return a column's value; "" if it has none, or the table lacks the column."""
        return self.columns.get(column) or ""

    def password(self, environ: Mapping[str, str] = os.environ) -> str | None:
        """Return the password, decrypted now."""
        from ..config.credentials import password_of

        return password_of(self.datasetid, self.encrypted, environ)


def registered(store: Store, datasetid: str, root: Path) -> DatasetRow | None:
    """Return the row that a dataset is registered with; relative places start at `root`.

    So everybody who runs a pipeline, from any folder, reads and writes the same files.
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
    """Return `append` or `replace`, if the dataset's row says so; else ""."""
    mode = row.value("writemode").lower() if row else ""
    if row and mode not in ("", APPEND, REPLACE):
        raise Refused(
            f"{row.datasetid!r} has the writemode {mode!r}, but it must be append or replace. "
            f"Run: odf dataset add {typed(row.datasetid)} --writemode append",
            code="INVALID_LOCATION",
        )
    return mode
