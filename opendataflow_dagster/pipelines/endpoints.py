"""What a pipeline reads and writes: base classes, and the verdict on a frame that can't be kept."""

import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from ..spark.session import is_spark_frame
from ..storage.table import is_outage
from ..store.store import Store
from ..util.text import typed
from . import convert

if TYPE_CHECKING:
    from pandas import DataFrame as PandasFrame
    from pyspark.sql import DataFrame, SparkSession


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
            yield as_pandas(frame)
        elif convert.is_large(frame):
            folder = os.path.join(self.work, str(chunk.generation), "publish.parquet")
            with convert.spilled(frame, folder, moments) as found:
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


def as_pandas(frame: Any) -> Any:
    """A frame of pandas, a frame of Spark, or a source, as a frame of pandas."""
    return from_spark(frame) if is_spark_frame(frame) else convert.as_pandas(frame)


def from_spark(frame: Any, moments: Container[str] = ()) -> Any:
    """A frame of Spark as one of pandas, in which whole numbers stay whole beside NULLs.

    Times are those that the session's clock shows, but the columns `moments` have a zone.
    """
    return convert.as_frame(convert.by_the_clock(frame, moments).toArrow())


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
    rows, _ = store.db.insist(lambda: store.db.records("state.dataset", datasetid=datasetid))
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
