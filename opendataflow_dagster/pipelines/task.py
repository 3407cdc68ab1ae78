"""Runs pandas transformations in another process: a Spark task, or a process of this machine."""

import atexit
import fcntl
import hashlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from datetime import date, datetime, timedelta
from datetime import time as time_of_day
from decimal import Decimal
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from ..config.settings import redact
from ..errors import DataflowError, SessionError
from ..runner.environment import SECRETS
from ..util.text import printable
from .frames import as_pandas
from .project import Project
from .sandbox import OverTime, forget, surroundings, within
from .task_data import MAX_INLINE_BYTES, Exchange, OnDisk, Parcel, ProjectSnapshot, Shipper
from .transformation import NO_STREAM, Transformation, TransformationError, load

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# --- copies of one frame ---


class Master:
    """A frame that is copied without sharing anything, not even the lists in its cells."""

    def __init__(self, frame: Any) -> None:
        self.frame = frame
        kinds = [str(kind) for kind in frame.dtypes]
        self._deep = [
            at
            for at, kind in enumerate(kinds)
            if kind == "object" and not set(map(type, frame.iloc[:, at].array)) <= _plain()
        ]

    def copy(self) -> Any:
        import pandas

        copied = self.frame.copy(deep=True)
        for at in self._deep:
            cells = [deepcopy(cell) for cell in copied.iloc[:, at]]
            copied.isetitem(at, pandas.Series(cells, index=copied.index, dtype=object))
        return copied


_known: set[type] = set()


def _plain() -> set[type]:
    """Return the types of immutable cells."""
    if not _known:
        import pandas

        _known.update(
            (
                str,
                bytes,
                int,
                float,
                bool,
                complex,
                type(None),
                date,
                datetime,
                time_of_day,
                timedelta,
                Decimal,
                pandas.Timestamp,
                pandas.Timedelta,
                type(pandas.NaT),
                type(pandas.NA),
            )
        )
    return _known


MAX_PART_BYTES = 32 * 2**20
"""The most bytes per row: a result is pickled, and cut into rows."""

MAX_KEPT_SOURCES = 16
"""Sources that a worker keeps for the next batches."""


Item = tuple[()] | tuple[Any]
"""The value of `stream` without an item: None may be an item, too."""


class Sent(NamedTuple):
    """A pickled frame to send; if it has a `key`, the worker keeps it under that key."""

    parcel: Parcel
    key: str | None = None


LEFT, TOO_LARGE = -1, -2
"""The number of a row that isn't a part: it names a file in the exchange, or a size."""


class StepRan(NamedTuple):
    """How one transformation ended."""

    transformation: str
    reason: str
    """Why it failed, in one line; empty if it didn't."""
    printed: str
    trace: str
    rows: int | None
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.reason


class ItemDone(NamedTuple):
    """How one item ended: its frame is pickled, and absent if it failed or wasn't requested."""

    frame: bytes | None
    steps: tuple[StepRan, ...]


def ask(
    spark: "SparkSession",
    exchange: Exchange,
    snapshot: ProjectSnapshot,
    wanted: bytes,
    sent: Sequence[Sent],
) -> Any:
    """Run `compute` in one task, and return its answer."""
    from pyspark.sql.types import BinaryType, LongType, StructType

    def task(batches: Any) -> Iterator[Any]:
        for _ in batches:  # a worker that leaves input unread isn't used again
            pass
        yield from answer(snapshot, wanted, sent, exchange)

    schema = StructType().add("part", LongType()).add("data", BinaryType())
    rows = spark.range(0, 1, 1, 1).mapInArrow(task, schema).toArrow()
    parts = sorted(zip(*(column.to_pylist() for column in rows.columns), strict=True))
    number, first = parts[0]
    if number == TOO_LARGE:
        raise DataflowError(
            f"A result has {int(first) >> 20} MB, but Java has room for only "
            f"{exchange.room >> 20} MB. Raise spark.driver.memory, or annotate `run` "
            "with pyspark.sql.DataFrame."
        )
    if number == LEFT:
        left = OnDisk(os.path.join(exchange.folder, os.path.basename(first.decode())))
        try:
            return pickle.loads(left.open())
        finally:
            left.drop()
    return pickle.loads(b"".join(data for _, data in parts))


def answer(
    snapshot: ProjectSnapshot, wanted: bytes, sent: Sequence[Sent], exchange: Exchange
) -> Iterator[Any]:
    """Return the rows of a task: the parts of the pickled result, or where it is."""
    data = compute(snapshot, wanted, sent)
    import pyarrow

    def row(number: int, cut: Any) -> Any:
        columns = [pyarrow.array([number], pyarrow.int64()), pyarrow.array([cut], pyarrow.binary())]
        return pyarrow.RecordBatch.from_arrays(columns, names=["part", "data"])

    if len(data) > MAX_INLINE_BYTES and exchange.shared():
        handle, path = tempfile.mkstemp(dir=exchange.folder)
        with open(handle, "wb") as file:
            file.write(data)
        yield row(LEFT, os.path.basename(path).encode())
    elif len(data) > exchange.room:
        yield row(TOO_LARGE, str(len(data)).encode())
    else:
        for number, start in enumerate(range(0, len(data), MAX_PART_BYTES)):
            yield row(number, data[start : start + MAX_PART_BYTES])


def compute(snapshot: ProjectSnapshot, wanted: bytes, sent: Sequence[Sent]) -> bytes:
    """Return the pickled result of what is wanted, computed in the project's surroundings."""
    import pandas  # noqa: F401 - the real one, before the project's folder is on the path

    root = snapshot.settle()
    if _Kept.stamps.get(root) != snapshot.stamp:
        forget(root)
        _Kept.loaded.clear()
        _Kept.stamps[root] = snapshot.stamp
    what, args = pickle.loads(wanted)
    with surroundings(root):
        return pickle.dumps(what(root, sent, *args), 5)


class _Kept:
    """What this worker keeps; it runs one task at a time."""

    stamps: ClassVar[dict[Path, str]] = {}
    loaded: ClassVar[dict[tuple[Path, str, str], Transformation]] = {}
    masters: ClassVar[OrderedDict[str, Master]] = OrderedDict()


def one(root: Path, sent: Sequence[Sent], slug: str, name: str, item: Item) -> ItemDone:
    """Run one transformation on frames of its own."""
    frames = [pickle.loads(frame.parcel.open()) for frame in sent]
    _Kept.loaded.pop((root, slug, name), None)
    return _finished(*_step(root, slug, name, frames, item))


def many(
    root: Path,
    sent: Sequence[Sent],
    slug: str,
    names: Sequence[str],
    items: Sequence[Item],
    chained: bool,
    limit: float | None,
) -> list[ItemDone]:
    """Run a pipeline on items, one after the other, on copies of its sources.

    If chained, one item's result is the first frame of the next, and only the last good one is
    returned. `limit` is the time in seconds that each may take.
    """
    first, *rest = [_master(source) for source in sent]
    done: list[ItemDone] = []
    good = None
    for item in items:
        buffer: Any = first.copy()
        steps: list[StepRan] = []
        due = time.monotonic() + limit if limit else None
        for name in names:
            frames = [buffer, *(source.copy() for source in rest)]
            left = max(due - time.monotonic(), 0.001) if due else None
            buffer, step = _step(root, slug, name, frames, deepcopy(item), left)
            steps.append(step)
            if not step.ok:
                break
        if not chained:
            done.append(_finished(buffer, *steps))
            continue
        if buffer is not None:
            good, first = len(done), Master(buffer)
        done.append(ItemDone(None, tuple(steps)))
    if good is not None:
        done[good] = _finished(first.frame, *done[good].steps)
    return done


def _step(
    root: Path,
    slug: str,
    name: str,
    frames: list[Any],
    item: Item,
    limit: float | None = None,
) -> tuple[Any, StepRan]:
    begun = time.perf_counter()
    frame, reason, printed, trace = None, "", "", ""
    try:
        transformation = _Kept.loaded.get((root, slug, name))
        if transformation is None:
            transformation = load(Project(root, "", (), {}), slug, name)
            printed = transformation.printed
            _Kept.loaded[root, slug, name] = transformation
        stream = item[0] if item and transformation.shape.stream else NO_STREAM
        with within(limit, root):
            frame, said = transformation(frames, stream)
        printed += said
    except TransformationError as error:
        reason, trace = str(error), error.trace
        printed += error.printed
    except OverTime as error:
        frame, reason = None, str(error)
    rows = None if frame is None else len(frame)
    return frame, StepRan(name, reason, printed, trace, rows, time.perf_counter() - begun)


def _finished(frame: Any, *steps: StepRan) -> ItemDone:
    """Pickle an item's result by itself: if that fails, so does the item."""
    if frame is None:
        return ItemDone(None, steps)
    try:
        return ItemDone(pickle.dumps(frame, 5), steps)
    except Exception as error:
        reason = f"The frame has a value that can't leave its task: {in_one_line(error)}"
        return ItemDone(None, (*steps[:-1], steps[-1]._replace(reason=reason, rows=None)))


def in_one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return printable(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)


def _master(sent: Sent) -> Master:
    if sent.key is None:
        return Master(pickle.loads(sent.parcel.open()))
    master = _Kept.masters.pop(sent.key, None)
    if master is None:
        master = Master(pickle.loads(sent.parcel.open()))
    _Kept.masters[sent.key] = master
    while len(_Kept.masters) > MAX_KEPT_SOURCES:
        _Kept.masters.popitem(last=False)
    return master


# --- frames that are sent to the tasks: a source that many batches read is sent once ---


class Loads:
    """What was sent to the tasks of one session, for one project."""

    def __init__(self, root: Path, shipper: Shipper) -> None:
        self.root, self.shipper = root, shipper
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int], tuple[Any, Sent]] = {}
        self._retired: list[Sent] = []

    def once(self, frame: Any) -> Sent:
        """Send a frame for one task; the caller drops it."""
        return Sent(self.shipper.send(dumped(frame, self.root)))

    def sources(self, slug: str, sources: Sequence[Any]) -> list[Sent]:
        """Send a pipeline's sources, unless the tasks have the current version."""
        return [self._source((slug, at), source) for at, source in enumerate(sources)]

    def _source(self, place: tuple[str, int], source: Any) -> Sent:
        version = source.version() if hasattr(source, "version") else None
        place_and_version = None if version is None else (source.location, version)
        with self._lock:
            known = self._known.get(place)
        if known and place_and_version is not None and known[0] == place_and_version:
            return known[1]
        data = dumped(as_pandas(source), self.root)
        digest = hashlib.sha256(data).hexdigest()
        with self._lock:
            if known and known[1].key == digest:
                sent = known[1]
            else:
                sent = Sent(self.shipper.send(data), digest)
                if known:  # a batch may be reading it
                    self._retired.append(known[1])
            self._known[place] = place_and_version, sent
        return sent

    def tidy(self) -> None:
        """Remove what has a newer version, while no task is running."""
        with self._lock:
            while self._retired:
                self._retired.pop().parcel.drop()

    def close(self) -> None:
        self.tidy()
        with self._lock:
            while self._known:
                _, (_, sent) = self._known.popitem()
                sent.parcel.drop()


def dumped(frame: Any, root: Path) -> bytes:
    """Pickle a frame, with its index and types; its cells may have classes of the project."""
    try:
        return pickle.dumps(frame, 5)
    except Exception:
        try:
            with surroundings(root):
                return pickle.dumps(frame, 5)
        except Exception as error:
            raise TransformationError(
                f"A frame has a value that can't be sent to another process: {in_one_line(error)}"
            ) from error


def loaded(data: bytes, root: Path) -> Any:
    try:
        return pickle.loads(data)
    except (ImportError, AttributeError):
        with surroundings(root):
            return pickle.loads(data)


# Processes of this machine that run transformations without Spark, one request after the other.


POLL_SECONDS = 0.5
"""Seconds between two checks whether a process has ended, or its work has to be ended."""

PROGRAM = f"import sys; from {__name__} import serve; serve(*map(int, sys.argv[1:]))"

STDERR = 2

SPARK_DEFAULTS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "YES"}
"""What Spark sets for its workers by default: without the first, sets of strings have a different
order each time; without the second, sums of floats may differ in the last digits."""


class ProcessDied(Exception):
    """The process ended before it answered."""


class LocalProcess:
    """One process with the environment of a Spark worker, which answers requests."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        # The kernel ends the process once this one is gone, whatever it is doing then.
        listens, self._lifeline = os.pipe()
        # -P: a file in the working folder isn't imported as a module.
        words = [sys.executable, "-P", "-c", PROGRAM, str(theirs.fileno()), str(listens)]
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=_standard_error(),
                pass_fds=(theirs.fileno(), listens),
                env=public_environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            self._connection.close()
            os.close(self._lifeline)
            raise SessionError(
                f"No process can be started for transformations: {error.strerror}. Free memory, or "
                "end other processes on this machine, then run it again."
            ) from None
        finally:
            theirs.close()
            os.close(listens)

    def ask(self, request: tuple, why_not: Callable[[], object]) -> Any:
        """What `compute` answers to a request; once `why_not` gives a reason, end the process.

        Anything else that ends the wait ends the process, too: nobody would read its answer.
        """
        try:
            self._connection.send_bytes(pickle.dumps(request, 5))
            while not self._connection.poll(POLL_SECONDS):
                if why_not() or (self._has_ended() and not self._connection.poll()):
                    raise ProcessDied
            reason, answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):  # of the connection
            self.end()
            raise ProcessDied from None
        except BaseException:
            self.end()
            raise
        if reason:
            raise DataflowError(reason)
        return pickle.loads(answer)

    @property
    def is_usable(self) -> bool:
        return not self._connection.closed and not self._has_ended()

    def end(self) -> None:
        """End the process, and those it started."""
        if self._connection.closed:
            return
        self._connection.close()
        # Not waited for earlier, so that its group id isn't reused yet.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._lifeline)

    def _has_ended(self) -> bool:
        """Whether it has ended: a process that it forked may keep its connection open."""
        if not hasattr(os, "waitid"):  # macOS before Python 3.13
            return self._process.poll() is not None
        with suppress(ChildProcessError):
            options = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        return True


class LocalProcesses:
    """The processes of this one, which are reused: as many as there are concurrent threads.

    They are for this engine what the session is for Spark.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[LocalProcess] = []
        self._owner = os.getpid()

    def start(self) -> None:
        """Start one process in advance."""
        with self.one():
            pass

    @contextmanager
    def one(self) -> Iterator[LocalProcess]:
        """Yield a process that no other thread uses."""
        with self._lock:
            if (
                self._owner != os.getpid()
            ):  # they belong to the process that this one was forked from
                self._owner, self._idle = os.getpid(), []
            while self._idle and not self._idle[-1].is_usable:
                self._idle.pop().end()
            process = self._idle.pop() if self._idle else LocalProcess()
        try:
            yield process
        finally:
            if process.is_usable:
                self._idle.append(process)
            else:
                process.end()

    def end(self) -> None:
        """End the idle processes."""
        with self._lock:
            while self._idle and self._owner == os.getpid():
                self._idle.pop().end()


processes = LocalProcesses()
"""The processes of this one, shared by all engines, like its one Spark session."""

atexit.register(processes.end)


def _standard_error() -> int:
    """Return where user code may write past us: never into the data that a command prints."""
    try:
        os.fstat(STDERR)
    except OSError:
        return subprocess.DEVNULL
    return STDERR


def public_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a Spark worker: without any of our secrets."""
    found = {name: value for name, value in environ.items() if name not in SECRETS}
    if redact(url := found.get("DATAFLOW_URL", "")) != url:
        del found["DATAFLOW_URL"]
    return SPARK_DEFAULTS | found


# --- the process itself ---


def serve(handle: int, lifeline: int) -> NoReturn:
    """Answer requests until the other side closes the connection."""
    _end_with(lifeline)
    connection = Connection(handle)
    here = os.getpid()
    import pandas  # noqa: F401 - while the parent does something else

    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        reason, answer = "", b""
        try:
            answer = compute(*pickle.loads(request))
        except Exception as error:  # not the transformation's
            reason = in_one_line(error)
        if os.getpid() != here:  # a process forked by user code, which returned here
            os._exit(0)
        connection.send_bytes(pickle.dumps((reason, answer), 5))


def _end_with(lifeline: int) -> None:
    """Let the kernel end this process, and those it started, when the lifeline is cut.

    Not with a thread that watches: processes forked by user code would have copies of its locks.
    Where there are no such signals, the process ends after its current work.
    """
    with suppress(AttributeError, OSError):
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
