"""Runs transformations: on Spark, or without it in processes of this machine."""

import math
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast

from ..errors import DataflowError
from ..spark.progress import Watch
from ..spark.session import has_ended, how_ended, in_a_line
from .frames import as_pandas, as_spark, kind_of
from .project import LOCAL, Project
from .sandbox import OURS, TIME_LIMIT_REASON, forget, surroundings
from .task import (
    Item,
    ItemDone,
    Loads,
    ProcessDied,
    Sent,
    StepRan,
    ask,
    loaded,
    many,
    one,
    processes,
)
from .task_data import ProjectSnapshot, ProjectSnapshots, Shipper, SparkShipper
from .transformation import NO_STREAM, PANDAS, SPARK, TransformationError, load, supported_engine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class WorkerDied(TransformationError):
    """The process of a transformation ended before the transformation did."""


def worker_died(which: str) -> WorkerDied:
    """Return the error for a transformation whose process ended."""
    return WorkerDied(
        f"The process of {which} ended while it ran: it ran out of memory, or ended itself."
    )


class Stopped(DataflowError):
    """The work was ended from outside, before it was done."""


class Ran(NamedTuple):
    """The result of a transformation: a frame of its own engine."""

    frame: Any
    printed: str
    seconds: float
    rows: int
    engine: str


class ItemRan(NamedTuple):
    """How an item ended; if chained, only the last good one has its frame."""

    frame: Any
    steps: tuple[StepRan, ...]

    @property
    def ok(self) -> bool:
        return all(step.ok for step in self.steps)


class Engine:
    """Runs the transformations of one project in one session, which starts with the first.

    Several threads may use it. `stopping` returns what requests an end, if anything does.
    """

    def __init__(
        self,
        project: Project,
        session: Callable[[], "SparkSession"],
        *,
        say: Callable[[str], Any] = lambda line: None,
        stopping: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._project, self._session = project, session
        self._served = project.root
        self._pinned = threading.local()
        self._watch = Watch(say, stopping)
        self._lock = threading.RLock()
        self._spark: SparkSession | None = None
        self._loads: Loads | None = None
        self._snapshots: ProjectSnapshots | None = None
        self._kept: dict[int, tuple[Any, Callable[[], Any]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def project(self) -> Project:
        """The project whose code runs."""
        return getattr(self._pinned, "project", self._project)

    @contextmanager
    def serving(self, project: Project) -> Iterator[None]:
        """Let this thread run one version of the project, from its own folder."""
        if project.root != self._served:
            forget(project.root)  # what other versions imported on the driver
            self._served = project.root
        self._pinned.project = project
        try:
            yield
        finally:
            del self._pinned.project

    def engine_of(self, slug: str, name: str) -> str:
        return supported_engine(self.project, slug, name)

    def run(
        self,
        slug: str,
        name: str,
        frames: Sequence[Any],
        stream: Any = NO_STREAM,
        *,
        due: float = math.inf,
    ) -> Ran:
        """Run one transformation on frames of any engine, or on sources that are read now.

        It can't change its inputs. When this returns, the result is computed; a Spark frame stays
        cached until `release`. Spark's work is ended when it is `due`, by
        `time.monotonic`.
        """
        start = time.perf_counter()
        engine = self.engine_of(slug, name)
        item: Item = () if stream is NO_STREAM else (stream,)
        given = frames or [_empty()]
        if engine == PANDAS:
            frame, printed = self._on_pandas(slug, name, given, item, due)
            return Ran(frame, printed, time.perf_counter() - start, len(frame), engine)
        with self.watched(f"{slug}.{name}", due) as spark:
            frame, printed = on_driver(spark, self.project, slug, name, given, item)
            if time.monotonic() > due:  # nothing can end Python code in a thread safely
                raise TransformationError(TIME_LIMIT_REASON, printed=printed)
            try:
                frame, rows = self._computed(frame)
            except Exception as error:
                if self._ended(due) or (reason := self._reason(error)) is None:
                    raise
                trace = str(error) if "Traceback" in str(error) else ""
                raise TransformationError(reason, trace=trace, printed=printed) from error
        return Ran(frame, printed, time.perf_counter() - start, rows, engine)

    def run_items(
        self,
        slug: str,
        names: Sequence[str],
        sources: Sequence[Any],
        items: Sequence[Any],
        *,
        chained: bool = False,
        limit: float | None = None,
    ) -> list[ItemRan]:
        """Run a pipeline on items, in order, in one task; an item that fails, fails alone.

        If chained, an item's result is the first frame of the next, and only the last good item has
        its frame. If the process dies, the items are run again in halves, until the one that
        crashes it has failed alone. `limit` is the time in seconds that each item may take.
        """
        batch = ItemBatch(slug, names, items, chained, limit)
        return run_items(self, batch, sources or [_empty()])

    def start(self) -> None:
        """Start the session now."""
        self._session()

    def warm(self) -> None:
        """Load in advance, in Java and in a Python worker, what the first item would wait for."""

        def load(batches: Any) -> Iterator[Any]:
            import pandas  # noqa: F401

            yield from batches

        self._session().range(1).mapInArrow(load, "id long").collect()

    def is_alive(self) -> bool:
        """Whether the session answers."""
        try:
            return self._session().range(1).count() == 1
        except Exception:
            return False

    def end(self) -> None:
        """End the session."""
        with suppress(Exception):
            self._session().stop()

    def release(self, *frames: Any) -> None:
        """Let Spark drop frames that `run` returned; without arguments, all of them."""
        for key in [id(frame) for frame in frames] if frames else list(self._kept):
            if kept := self._kept.pop(key, None):
                with suppress(Exception):  # the session may have ended
                    kept[1]()

    def interrupt(self) -> None:
        """End, from any thread, what is running; nothing can be run afterwards."""
        self._watch.interrupt()

    stop = interrupt

    def close(self) -> None:
        """Remove what was sent to the tasks, and drop their results."""
        self._watch.close()
        self.release()
        with self._lock:
            if self._loads is not None:
                self._loads.close()

    # --- a task ---

    def ask(self, session: Any, what: Any, sent: Sequence[Sent], *args: Any) -> Any:
        """Return what `what(root, sent, *args)` returns, in the project's surroundings."""
        with self._lock:
            root = self.project.root
            if self._snapshots is None or self._snapshots.root != root:
                self._snapshots = ProjectSnapshots(root, self.loads(session).shipper)
            snapshot = self._snapshots.now()
        return self._answer(session, snapshot, pickle.dumps((what, args), 5), sent)

    def loads(self, session: Any) -> Loads:
        with self._lock:
            if self._loads is None:
                self._loads = Loads(self.project.root, self._shipper(session))
            self._loads.root = self.project.root
            return self._loads

    def _shipper(self, session: Any) -> Shipper:
        return SparkShipper(session)

    def _answer(
        self, session: Any, snapshot: ProjectSnapshot, wanted: bytes, sent: Sequence[Sent]
    ) -> Any:
        """Return what `compute` answers, in a process that user code may crash."""
        shipper = cast(SparkShipper, self.loads(session).shipper)
        return ask(session, shipper.exchange, snapshot, wanted, sent)

    def _on_pandas(
        self, slug: str, name: str, frames: Sequence[Any], item: Item, due: float
    ) -> tuple[Any, str]:
        sent: list[Sent] = []
        with self.watched(f"{slug}.{name}", due) as spark:
            try:
                for frame in frames:
                    sent.append(self.loads(spark).once(as_pandas(frame)))
                done = self.ask(spark, one, sent, slug, name, item)
            finally:
                for frame in sent:
                    frame.parcel.drop()
        step = done.steps[-1]
        if done.frame is None:
            raise TransformationError(step.reason, trace=step.trace, printed=step.printed)
        return loaded(done.frame, self.project.root), step.printed

    def _computed(self, frame: Any) -> tuple[Any, int]:
        """Cache the frame where it is computed: then a failure is this transformation's."""
        frame = frame.persist()
        self._kept[id(frame)] = frame, frame.unpersist
        try:
            return frame, frame.count()
        except BaseException:
            self.release(frame)
            raise

    # --- interruption from outside ---

    @contextmanager
    def watched(self, which: str, due: float = math.inf) -> Iterator["SparkSession"]:
        """Yield the session, whose jobs can be ended from outside; errors say what ended them."""
        self._refuse_when_over()
        with self._lock:
            spark = self._spark = self._session()
        try:
            with self._watch.block(spark, which, lambda: self._ended(due)):
                self._refuse_when_over()
                yield spark
        except TransformationError as error:
            if has_ended(spark):  # whatever error its code got then
                why = how_ended(spark)
                raise TransformationError(why, trace=error.trace, printed=error.printed) from error
            raise
        except DataflowError:
            raise
        except Exception as error:
            if why := self._watch.ended():
                raise Stopped(why) from None
            if self._ended(due):
                raise TransformationError(TIME_LIMIT_REASON) from None
            if "Python worker exited unexpectedly" in str(error):
                raise worker_died(which) from error
            if (reason := self._reason(error)) is None:
                raise
            raise DataflowError(reason) from error
        finally:
            if self._watch.idle and self._loads is not None:
                self._loads.tidy()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Report in a line why Spark fails while its frames are published."""
        try:
            yield
        except DataflowError:
            raise
        except Exception as error:
            if (reason := self._reason(error)) is None:
                raise
            raise DataflowError(reason) from error

    def _reason(self, error: Exception) -> str | None:
        """Return a Spark error's message as one line; if Java has ended, the reason for that."""
        if self._spark is not None and has_ended(self._spark):
            return how_ended(self._spark)
        return in_a_line(error)

    def _ended(self, due: float) -> bool:
        return self._watch.ended() is not None or time.monotonic() > due

    def _refuse_when_over(self) -> None:
        if why := self._watch.ended():
            raise Stopped(why)


def _empty() -> Any:
    import pandas

    return pandas.DataFrame()


# --- items: a batch in one task, or one by one ---


class ItemBatch(NamedTuple):
    """Items to run a pipeline's transformations on, in order."""

    slug: str
    names: Sequence[str]
    items: Sequence[Any]
    chained: bool
    limit: float | None
    """Seconds that each item may take in transformations of pandas."""


def run_items(engine: Engine, batch: ItemBatch, sources: Sequence[Any]) -> list[ItemRan]:
    """Return how each item ended, in order."""
    if not batch.items:
        return []
    if any(engine.engine_of(batch.slug, name) != PANDAS for name in batch.names):
        return _one_by_one(engine, batch, sources)
    return _in_task(engine, batch, sources)


def _in_task(engine: Engine, batch: ItemBatch, sources: Sequence[Any]) -> list[ItemRan]:
    slug, names, items, chained, limit = batch
    stream_values: list[Item] = [(item,) for item in items]
    first: list[Sent] = []
    try:
        with engine.watched(slug) as spark:
            loads = engine.loads(spark)
            if chained:  # the first frame differs in each batch
                first = [loads.once(as_pandas(sources[0]))]
            sent = first + loads.sources(slug, sources[len(first) :])
            done: list[ItemDone] = engine.ask(
                spark, many, sent, slug, names, stream_values, chained, limit
            )
    except WorkerDied:
        if len(items) == 1:  # to find the transformation
            return _one_by_one(engine, batch, sources)
        half = len(items) // 2
        start = _in_task(engine, batch._replace(items=items[:half]), sources)
        if chained:
            sources = [_last(start, sources[0]), *sources[1:]]
        rest = _in_task(engine, batch._replace(items=items[half:]), sources)
        if chained and any(item.ok for item in rest):
            start = [item._replace(frame=None) for item in start]
        return start + rest
    finally:
        for frame in first:
            frame.parcel.drop()
    return [
        ItemRan(None if item.frame is None else loaded(item.frame, engine.project.root), item.steps)
        for item in done
    ]


def _one_by_one(engine: Engine, batch: ItemBatch, sources: Sequence[Any]) -> list[ItemRan]:
    with engine.watched(batch.slug):
        first, *rest = [as_pandas(source) for source in sources]
    ran: list[ItemRan] = []
    for item in batch.items:
        result = _run_item(engine, batch, item, [first, *rest])
        if batch.chained and result.ok:
            first, ran = result.frame, [before._replace(frame=None) for before in ran]
        ran.append(result)
    return ran


def _run_item(engine: Engine, batch: ItemBatch, item: Any, frames: Sequence[Any]) -> ItemRan:
    """Run the transformations on one item, each in its own task or on the driver."""
    buffer, *rest = frames
    steps: list[StepRan] = []
    outputs: list[Any] = []
    due = time.monotonic() + batch.limit if batch.limit else math.inf
    for name in batch.names:
        start = time.perf_counter()
        try:
            done = engine.run(batch.slug, name, [buffer, *rest], item, due=due)
        except TransformationError as error:
            seconds = time.perf_counter() - start
            steps.append(StepRan(name, str(error), error.printed, error.trace, None, seconds))
            break
        buffer = done.frame
        outputs.append(buffer)
        steps.append(StepRan(name, "", done.printed, "", done.rows, done.seconds))
    result = ItemRan(None, tuple(steps))
    if result.ok:
        with engine.watched(batch.slug):
            result = result._replace(frame=as_pandas(buffer))
    if outputs:
        engine.release(*outputs)
    return result


def _last(ran: Sequence[ItemRan], before: Any) -> Any:
    """Return the frame of the last good item; if there is none, the previous one."""
    return next((item.frame for item in ran if item.frame is not None), before)


# --- transformations of Spark's own frames: called here, computed by the cluster ---


def on_driver(
    spark: "SparkSession",
    project: Project,
    slug: str,
    name: str,
    frames: Sequence[Any],
    item: tuple[()] | tuple[Any],
) -> tuple[Any, str]:
    """Return a transformation's frame, not computed yet, and what it printed."""
    transformation = load(project, slug, name)
    printed = transformation.printed
    given = [as_spark(frame, spark) for frame in frames[: transformation.shape.most]]
    stream = item[0] if item and transformation.shape.stream else NO_STREAM
    with surroundings(project.root), _by_value(project.root):
        try:
            returned, said = transformation.call(given, stream)
        except TransformationError as error:
            error.printed = printed + error.printed
            raise
    printed += said
    if kind_of(returned) != SPARK:
        kind = type(returned)
        what = "nothing" if returned is None else f"a {kind.__module__}.{kind.__name__}"
        raise TransformationError(
            f"`run` returns {what}, but it must return a {SPARK} DataFrame, like its "
            "first parameter.",
            printed=printed,
        )
    return returned, printed


@contextmanager
def _by_value(root: Path) -> Iterator[None]:
    """Send functions of the project's modules to the workers, which can't import them."""
    from pyspark.cloudpickle import cloudpickle

    names = {path.stem for path in root.iterdir() if path.suffix == ".py" or path.is_dir()}
    names = {name for name in names if name.isidentifier()} - {OURS, *sys.stdlib_module_names}
    registered = []
    for name in sorted(names - cloudpickle.list_registry_pickle_by_value()):
        new = name not in sys.modules
        module = sys.modules.setdefault(name, ModuleType(name))
        cloudpickle.register_pickle_by_value(module)
        registered.append(module)
        if new:
            del sys.modules[name]
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


# Runs pandas transformations without Spark: the engine that a small project may choose.


def engine_for(project: Project, session: Callable[[], "SparkSession"], **how: Any) -> Engine:
    """Return the engine that a project names; Spark's starts its session when it is needed."""
    return (
        LocalEngine(project, **how) if project.engine == LOCAL else Engine(project, session, **how)
    )


class LocalEngine(Engine):
    """Runs the transformations of one project in processes of this machine, all of pandas."""

    def __init__(self, project: Project, **how: Any) -> None:
        super().__init__(project, _no_session, **how)
        self._blocks = 0

    def engine_of(self, slug: str, name: str) -> str:
        return supported_engine(self.project._replace(engine=LOCAL), slug, name)

    def start(self) -> None:
        processes.start()

    warm = start

    def is_alive(self) -> bool:
        return True  # one that has ended is replaced

    def end(self) -> None:
        processes.end()

    @contextmanager
    def watched(self, which: str, due: float = math.inf) -> Iterator[Any]:
        """Yield what may end the work on `which`; errors say what ended it."""
        self._refuse_when_over()
        with self._lock:
            self._blocks += 1
        try:
            yield _Limits(lambda: self._ended(due))
        except ProcessDied as error:
            if why := self._watch.ended():
                raise Stopped(why) from None
            if self._ended(due):
                raise TransformationError(TIME_LIMIT_REASON) from None
            raise worker_died(which) from error
        finally:
            with self._lock:
                self._blocks -= 1
                if not self._blocks and self._loads is not None:
                    self._loads.tidy()

    def _shipper(self, session: Any) -> Shipper:
        return Shipper()

    def _answer(
        self, session: Any, snapshot: ProjectSnapshot, wanted: bytes, sent: Sequence[Sent]
    ) -> Any:
        with processes.one() as process:
            return process.ask((snapshot, wanted, sent), session.why_not)


class _Limits(NamedTuple):
    """Replaces a session: nothing is kept open for a block of work."""

    why_not: Callable[[], object]


def _no_session() -> "SparkSession":
    raise AssertionError("the local engine has no Spark session")
