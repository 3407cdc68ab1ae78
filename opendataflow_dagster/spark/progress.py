"""The Spark jobs of a thread: their progress, their labels, and how to stop them."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from ..model import Claim
from ..util.text import printable
from .session import is_remote

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


PROGRESS_SECONDS = 10.0
"""Seconds between two lines about a Spark job that takes long."""

MAX_GAP_FACTOR = 6
"""The longest gap between two lines, as a multiple of `every`: a long job reports less often."""


class StageProgress(NamedTuple):
    """The progress of the running job."""

    stage: int
    stages: int
    done: int
    tasks: int

    def __str__(self) -> str:
        return f"stage {self.stage} of {self.stages}: {self.done} of {self.tasks} tasks"


class SparkProgress:
    """Reports, while its block runs, the progress of this thread's Spark jobs.

    `say` gets a line when a block takes longer than `every` seconds; its errors don't affect the
    work.
    """

    def __init__(
        self,
        session: "SparkSession",
        say: Callable[[str], object],
        *,
        every: float | None = None,
    ) -> None:
        self._session, self._say, self._every = session, say, every or PROGRESS_SECONDS
        self._over = threading.Event()
        self._state: StageProgress | None = None
        self._close: Callable[[], object] = lambda: None

    def __enter__(self) -> Self:
        with suppress(Exception):
            self._open()
            threading.Thread(target=self._watch, name="odf-spark-progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with suppress(Exception):
            self._close()

    def _open(self) -> None:
        session: Any = self._session
        if is_remote(session):
            here = threading.get_ident()

            def on_progress(
                stages: Any, inflight_tasks: int, operation_id: Any, done: bool
            ) -> None:
                if threading.get_ident() == here:  # other threads have blocks of their own
                    self._state = _of_connect(list(stages or ()))

            session.registerProgressHandler(on_progress)
            self._close = lambda: session.removeProgressHandler(on_progress)
        else:
            context, tag = session.sparkContext, _new_tag()
            context.addJobTag(tag)
            self._close = lambda: context.removeJobTag(tag)
            self._look = lambda: _of_classic(context, tag)

    def _look(self) -> StageProgress | None:
        return self._state

    def _watch(self) -> None:
        start = time.monotonic()
        gap, due, said = self._every, start + self._every, None
        with suppress(Exception):
            while not self._over.wait(due - _now()):
                state = self._look()
                if state and state != said and not self._over.is_set():
                    self._say(f"{state}, after {_now() - start:.0f} s")
                    said, gap = state, min(gap * 2, MAX_GAP_FACTOR * self._every)
                due = _now() + gap


_now = time.monotonic


def _new_tag() -> str:
    from uuid import uuid4

    return f"odf-{uuid4().hex}"


def _of_classic(context: Any, tag: str) -> StageProgress | None:
    tracker = context._jsc.sc().statusTracker()
    python = context.statusTracker()
    stages = {
        stage: python.getStageInfo(stage)
        for job in tracker.getJobIdsForTag(tag)
        if (job_info := python.getJobInfo(job)) and job_info.status == "RUNNING"
        for stage in job_info.stageIds
    }
    known = [info for _, info in sorted(stages.items()) if info]
    return _first_of(
        [(info.numCompletedTasks, info.numTasks, info.numActiveTasks > 0) for info in known]
    )


def _of_connect(stages: list[Any]) -> StageProgress | None:
    """The server doesn't say which stages it skips: one that others overtook isn't running."""
    found = sorted(stages, key=lambda stage: stage.stage_id)
    last = max((at for at, stage in enumerate(found) if stage.num_completed_tasks), default=0)
    return _first_of(
        [
            (stage.num_completed_tasks, stage.num_tasks, at >= last and not stage.done)
            for at, stage in enumerate(found)
        ]
    )


def _first_of(stages: list[tuple[int, int, bool]]) -> StageProgress | None:
    """Return the first running stage, given (done, tasks, running) of each."""
    for number, (done, tasks, at_work) in enumerate(stages, 1):
        if at_work:
            return StageProgress(number, len(stages), done, tasks)
    return None


_here = threading.local()
"""The tag and the label of this thread's jobs, kept here because an interrupt loses Java's copy."""

_LABEL_PROPERTIES = "spark.jobGroup.id", "spark.job.description"
"""The properties of a Java thread that Spark's UI shows for each job."""


def describe_chunks(claims: Sequence[Claim]) -> str:
    """Describe the chunk of a claim; for several claims, the first and how many more."""
    more = f" and {len(claims) - 1} more" if len(claims) > 1 else ""
    return printable(claims[0].dataid) + more


@contextmanager
def working_on(claims: Sequence[Claim]) -> Iterator[None]:
    """Let Spark's UI show, for each job of this thread, which chunks it is for.

    If a session starts only within the block, `label_jobs` labels it.
    """
    jobid, which = printable(claims[0].jobid), describe_chunks(claims)
    outer = getattr(_here, "label", None)
    before = _shown_label()
    _here.label = f"{jobid} {which}", f"odf {jobid}: chunk {which}"
    label_jobs()
    try:
        yield
    finally:
        _show_label(before)
        _here.label = outer


def label_jobs() -> None:
    """Label this thread's jobs, if a session is running and the thread works on chunks."""
    if values := getattr(_here, "label", None):
        _show_label(values)


def _shown_label() -> tuple[str | None, ...]:
    with suppress(Exception):  # Java may be gone
        if context := _context():
            return tuple(context.getLocalProperty(name) for name in _LABEL_PROPERTIES)
    return (None,) * len(_LABEL_PROPERTIES)


def _show_label(values: Sequence[str | None]) -> None:
    with suppress(Exception):
        if context := _context():
            for name, value in zip(_LABEL_PROPERTIES, values, strict=True):
                context.setLocalProperty(name, value)


def _context() -> Any:
    """Return the context of this process's classic session; Spark Connect names jobs by itself."""
    pyspark = sys.modules.get("pyspark")
    return pyspark.SparkContext._active_spark_context if pyspark else None


JOB_END_SECONDS = 10.0
"""Seconds to wait for canceled jobs to end."""

QUIET_SECONDS = 0.5
"""Seconds without a job after which no further one is expected."""


@contextmanager
def ending(session: "SparkSession") -> Iterator[None]:
    """Delay what ended a job (a canceled run, a failed task) until all its tasks have ended.

    Tasks outlive the call that started them: they could write again after our cleanup.
    """
    try:
        yield
    except Exception:
        with suppress(Exception):
            _end_jobs(session, getattr(_here, "tag", None), 0)
        raise
    except BaseException:
        with suppress(Exception):
            if not is_remote(session):
                # Java's answer to the interrupted call is still on its way on this connection.
                context: Any = session.sparkContext
                _hang_up(context._gateway._gateway_client)
            _end_jobs(session, getattr(_here, "tag", None), QUIET_SECONDS)
        raise


def _end_jobs(session: Any, tag: str | None, calm: float) -> None:
    """End the jobs of a tag, and wait until there was none for so many seconds."""
    if tag is None:
        return
    if is_remote(session):
        session.interruptTag(tag)
        return
    context = session.sparkContext
    until, quiet = _now() + JOB_END_SECONDS, _now() + calm
    while _now() < until:
        context.cancelJobsWithTag(tag)
        if _is_running(context, tag):
            quiet = _now() + calm
        elif _now() >= quiet:
            return
        time.sleep(0.05)


def _hang_up(client: Any) -> None:
    """Close the connection of an interrupted call: the next call would receive its answer.

    Py4j itself does this only for a KeyboardInterrupt.
    """
    connection = client.get_thread_connection()
    if connection is not None and connection not in client.deque:
        connection.close()


def _is_running(context: Any, tag: str) -> bool:
    tracker = context.statusTracker()
    for job in context._jsc.sc().statusTracker().getJobIdsForTag(tag):
        if job_info := tracker.getJobInfo(job):
            stages = map(tracker.getStageInfo, job_info.stageIds)
            if job_info.status == "RUNNING" or any(
                stage and stage.numActiveTasks for stage in stages
            ):
                return True
    return False


@contextmanager
def interrupting(session: "SparkSession") -> Iterator[Callable[[], None]]:
    """Yield a function that ends, from any thread, the Spark jobs of this thread's block.

    This includes jobs that the block starts later; it returns at once, and may be called twice.
    """
    target: Any = session if is_remote(session) else session.sparkContext
    remote, tag = is_remote(session), _new_tag()
    over, called = threading.Event(), threading.Lock()

    # Jobs are canceled by a tag, which also stops those that the block starts later. A thread has
    # only one job group, and we need that for the description in Spark's UI.
    def end() -> None:
        while True:  # at least once: the block may have ended, but not its job
            with suppress(Exception):
                target.interruptTag(tag) if remote else target.cancelJobsWithTag(tag)
            if over.wait(0.5):
                return

    def cancel() -> None:
        if called.acquire(blocking=False):
            threading.Thread(target=end, name="odf-spark-cancel", daemon=True).start()

    target.addTag(tag) if remote else target.addJobTag(tag)
    label_jobs()
    before = getattr(_here, "tag", None)
    _here.tag = tag
    try:
        with ending(session):
            yield cancel
    finally:
        over.set()
        _here.tag = before
        with suppress(Exception):
            target.removeTag(tag) if remote else target.removeJobTag(tag)


# --- stopping the jobs of several threads from outside ---


WATCH_SECONDS = 0.5
"""Seconds between two checks whether a block has to stop."""


class Watch:
    """Watches the Spark work of several threads: reports its progress, and stops it when due.

    `stopping` returns the reason why all of it has to stop, or None.
    """

    def __init__(self, say: Callable[[str], Any], stopping: Callable[[], str | None]) -> None:
        self._say, self._stopping = say, stopping
        self._blocks: dict[Callable[[], object], Callable[[], object]] = {}
        self._lock = threading.Lock()
        self._watcher: threading.Thread | None = None
        self._closed = threading.Event()
        self.interrupted = False

    @contextmanager
    def block(
        self, spark: "SparkSession", which: str, over: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """Watch the Spark jobs of this thread's block, and end them when `over` gives a reason.

        Raises what interrupted a Spark call, not the error that followed from it during cleanup.
        """
        with self._lock:
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="watch", daemon=True)
                self._watcher.start()

        def say(line: str) -> None:
            self._say(f"{which}: {line}")

        with interrupting(spark) as stop, SparkProgress(spark, say):
            self._blocks[stop] = over
            try:
                yield
            except Exception as error:
                if interruption := _interruption(error):
                    stop()
                    raise interruption from None
                raise
            except BaseException:
                stop()  # a canceled run: its Spark job would continue without it
                raise
            finally:
                del self._blocks[stop]

    @property
    def idle(self) -> bool:
        return not self._blocks

    def ended(self) -> str | None:
        """Return why everything has to end, in a line."""
        if self.interrupted:
            return "stopped"
        return f"stopped by {name}" if (name := self._stopping()) else None

    def interrupt(self) -> None:
        """End, from any thread, what is running."""
        self.interrupted = True
        for stop in list(self._blocks):
            stop()

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            for stop, over in list(self._blocks.items()):
                if self.ended() or over():
                    stop()


def _interruption(error: BaseException | None) -> BaseException | None:
    """Return what interrupted a Spark call, if its own cleanup then failed because of that."""
    while error is not None and isinstance(error, Exception):
        error = error.__context__
    return error
