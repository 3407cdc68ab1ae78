"""Runs transformations on Spark, each by the engine that its first parameter asks for."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ..errors import DataflowError
from ..spark.progress import Watch
from ..spark.session import has_ended, how_ended, in_a_line
from .convert import as_pandas, as_spark, kind_of
from .parcels import Shipper
from .project import Project
from .project_files import Homes
from .sandbox import OURS, TOLD, forget, surroundings
from .task import Item, ItemDone, Loads, Sent, StepRan, ask, loaded, many, one
from .transformation import NO_STREAM, PANDAS, SPARK, TransformationError, load, supported_engine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class WorkerDied(TransformationError):
    """The process that ran a transformation ended before it."""


class Stopped(DataflowError):
    """The work was ended from outside, before it was done."""


class Ran(NamedTuple):
    """What a transformation made: a frame of its own engine."""

    frame: Any
    printed: str
    seconds: float
    rows: int
    engine: str


class ItemRan(NamedTuple):
    """What became of an item; chained, only the last good one has its frame."""

    frame: Any
    steps: tuple[StepRan, ...]

    @property
    def ok(self) -> bool:
        return all(each.ok for each in self.steps)


class Engine:
    """Runs the transformations of one project with one session, which starts with the first.

    Several threads may use it. `stopping` tells what asks for an end, if something does.
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
        self._homes: Homes | None = None
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
        """Let what this thread runs be one version of the project, from its own folder."""
        if project.root != self._served:
            forget(project.root)  # what other versions have imported on the driver
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

        It can't change what it is given. When this returns, what it made is computed; a frame of
        Spark stays so until `release`. What Spark is at is ended when it is `due`, by
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
                raise TransformationError(TOLD, printed=printed)
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
        """Run a pipeline on items, in order, by one task; an item that fails, fails alone.

        Chained, an item's result is the first frame of the next, and only the last good item has
        its frame. Should the process that works on them die, the items are done again in halves,
        until the one that it dies of has failed alone. `limit` are the seconds that each item
        may take.
        """
        return run_items(self, slug, names, sources or [_empty()], items, chained, limit)

    def release(self, *frames: Any) -> None:
        """Let Spark forget frames that `run` has made; without any, all of them."""
        for each in [id(frame) for frame in frames] if frames else list(self._kept):
            if kept := self._kept.pop(each, None):
                with suppress(Exception):  # the session may be over
                    kept[1]()

    def interrupt(self) -> None:
        """End, from any thread, what is at work; nothing can be run afterwards."""
        self._watch.interrupt()

    stop = interrupt

    def close(self) -> None:
        """Remove what was sent to the tasks, and forget what they made."""
        self._watch.close()
        self.release()
        with self._lock:
            if self._loads is not None:
                self._loads.close()

    # --- a task ---

    def ask(self, spark: "SparkSession", what: Any, sent: Sequence[Sent], *args: Any) -> Any:
        """What one task answers, in the project's surroundings."""
        with self._lock:
            root = self.project.root
            if self._homes is None or self._homes.root != root:
                self._homes = Homes(root, self.loads(spark).shipper)
            home = self._homes.now()
        return ask(spark, self.loads(spark).shipper, home, what, sent, *args)

    def loads(self, spark: "SparkSession") -> Loads:
        with self._lock:
            if self._loads is None:
                self._loads = Loads(self.project.root, Shipper(spark))
            self._loads.root = self.project.root
            return self._loads

    def _on_pandas(
        self, slug: str, name: str, frames: Sequence[Any], item: Item, due: float
    ) -> tuple[Any, str]:
        sent: list[Sent] = []
        with self.watched(f"{slug}.{name}", due) as spark:
            try:
                for each in frames:
                    sent.append(self.loads(spark).once(as_pandas(each)))
                done = self.ask(spark, one, sent, slug, name, item)
            finally:
                for each in sent:
                    each.parcel.drop()
        step = done.steps[-1]
        if done.frame is None:
            raise TransformationError(step.reason, trace=step.trace, printed=step.printed)
        return loaded(done.frame, self.project.root), step.printed

    def _computed(self, frame: Any) -> tuple[Any, int]:
        """The frame, kept where it is computed: a failure is then this transformation's."""
        frame = frame.persist()
        self._kept[id(frame)] = frame, frame.unpersist
        try:
            return frame, frame.count()
        except BaseException:
            self.release(frame)
            raise

    # --- from outside ---

    @contextmanager
    def watched(self, which: str, due: float = math.inf) -> Iterator["SparkSession"]:
        """The session, whose jobs can be ended from outside; what ended them is told in a line."""
        self._refuse_when_over()
        with self._lock:
            spark = self._spark = self._session()
        try:
            with self._watch.block(spark, which, lambda: self._ended(due)):
                self._refuse_when_over()
                yield spark
        except TransformationError as error:
            if has_ended(spark):  # whatever its code has met then
                told = how_ended(spark)
                raise TransformationError(told, trace=error.trace, printed=error.printed) from error
            raise
        except DataflowError:
            raise
        except Exception as error:
            if told := self._watch.ended():
                raise Stopped(told) from None
            if self._ended(due):
                raise TransformationError(TOLD) from None
            if _died(error):
                raise WorkerDied(
                    f"The process that ran {which} ended in the middle of it: it took more "
                    "memory than there is, or ended itself."
                ) from error
            if (reason := self._reason(error)) is None:
                raise
            raise DataflowError(reason) from error
        finally:
            if self._watch.idle and self._loads is not None:
                self._loads.tidy()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell in a line what Spark fails of while its frames are published."""
        try:
            yield
        except DataflowError:
            raise
        except Exception as error:
            if (reason := self._reason(error)) is None:
                raise
            raise DataflowError(reason) from error

    def _reason(self, error: Exception) -> str | None:
        """What an error of Spark's says, in a line; if Java is gone, how that came."""
        if self._spark is not None and has_ended(self._spark):
            return how_ended(self._spark)
        return in_a_line(error)

    def _ended(self, due: float) -> bool:
        return self._watch.ended() is not None or time.monotonic() > due

    def _refuse_when_over(self) -> None:
        if told := self._watch.ended():
            raise Stopped(told)


def _died(error: Exception) -> bool:
    return "Python worker exited unexpectedly" in str(error)


def _empty() -> Any:
    import pandas

    return pandas.DataFrame()


# --- items: a batch in one task, or one by one ---


def run_items(
    engine: "Engine",
    slug: str,
    names: Sequence[str],
    sources: Sequence[Any],
    items: Sequence[Any],
    chained: bool,
    limit: float | None = None,
) -> list[ItemRan]:
    """What became of each item, in order; of pandas' transformations, within so many seconds."""
    if not items:
        return []
    if any(engine.engine_of(slug, name) != PANDAS for name in names):
        return _one_by_one(engine, slug, names, sources, items, chained, limit)
    return _in_task(engine, slug, names, sources, items, chained, limit)


def _in_task(
    engine: "Engine",
    slug: str,
    names: Sequence[str],
    sources: Sequence[Any],
    items: Sequence[Any],
    chained: bool,
    limit: float | None,
) -> list[ItemRan]:

    given: list[Item] = [(each,) for each in items]
    first: list[Sent] = []
    try:
        with engine.watched(slug) as spark:
            loads = engine.loads(spark)
            if chained:  # the first frame is another one in each batch
                first = [loads.once(as_pandas(sources[0]))]
            sent = first + loads.sources(slug, sources[len(first) :])
            done: list[ItemDone] = engine.ask(spark, many, sent, slug, names, given, chained, limit)
    except WorkerDied:
        if len(items) == 1:  # to find the transformation
            return _one_by_one(engine, slug, names, sources, items, chained, limit)
        half = len(items) // 2
        start = _in_task(engine, slug, names, sources, items[:half], chained, limit)
        if chained:
            sources = [_last(start, sources[0]), *sources[1:]]
        rest = _in_task(engine, slug, names, sources, items[half:], chained, limit)
        if chained and any(each.ok for each in rest):
            start = [each._replace(frame=None) for each in start]
        return start + rest
    finally:
        for each in first:
            each.parcel.drop()
    return [_ran(each, engine) for each in done]


def _one_by_one(
    engine: "Engine",
    slug: str,
    names: Sequence[str],
    sources: Sequence[Any],
    items: Sequence[Any],
    chained: bool,
    limit: float | None,
) -> list[ItemRan]:
    with engine.watched(slug):
        first, *rest = [as_pandas(each) for each in sources]
    ran: list[ItemRan] = []
    for item in items:
        buffer, steps, made = first, [], []
        due = time.monotonic() + limit if limit else math.inf
        for name in names:
            start = time.perf_counter()
            try:
                done = engine.run(slug, name, [buffer, *rest], item, due=due)
            except TransformationError as error:
                seconds = time.perf_counter() - start
                steps.append(StepRan(name, str(error), error.printed, error.trace, None, seconds))
                break
            buffer = done.frame
            made.append(buffer)
            steps.append(StepRan(name, "", done.printed, "", done.rows, done.seconds))
        one = ItemRan(None, tuple(steps))
        if one.ok:
            with engine.watched(slug):
                frame = as_pandas(buffer)
            if chained:
                first, ran = frame, [each._replace(frame=None) for each in ran]
            one = one._replace(frame=frame)
        if made:
            engine.release(*made)
        ran.append(one)
    return ran


def _ran(done: ItemDone, engine: "Engine") -> ItemRan:
    frame = None if done.frame is None else loaded(done.frame, engine.project.root)
    return ItemRan(frame, done.steps)


def _last(ran: Sequence[ItemRan], before: Any) -> Any:
    """The frame of the last good item; where there is none, the one before."""
    return next((each.frame for each in ran if each.frame is not None), before)


# --- transformations of Spark's own frames: called here, computed by the cluster ---


def on_driver(
    spark: "SparkSession",
    project: Project,
    slug: str,
    name: str,
    frames: Sequence[Any],
    item: tuple[()] | tuple[Any],
) -> tuple[Any, str]:
    """The frame that a transformation makes, not computed yet, and what it printed."""
    transformation = load(project, slug, name)
    printed = transformation.printed
    given = [as_spark(frame, spark) for frame in frames[: transformation.shape.most]]
    stream = item[0] if item and transformation.shape.stream else NO_STREAM
    with surroundings(project.root), _by_value(project.root):
        try:
            made, said = transformation.call(given, stream)
        except TransformationError as error:
            error.printed = printed + error.printed
            raise
    printed += said
    if kind_of(made) != SPARK:
        what = "nothing" if made is None else f"a {type(made).__module__}.{type(made).__name__}"
        raise TransformationError(
            f"`run` returns {what}, but its first parameter is a {SPARK} DataFrame, and so "
            "must be what it returns.",
            printed=printed,
        )
    return made, printed


@contextmanager
def _by_value(root: Path) -> Iterator[None]:
    """Send functions of the project's modules to the workers, which can't import them."""
    from pyspark.cloudpickle import cloudpickle

    names = {each.stem for each in root.iterdir() if each.suffix == ".py" or each.is_dir()}
    names = {each for each in names if each.isidentifier()} - {OURS, *sys.stdlib_module_names}
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
