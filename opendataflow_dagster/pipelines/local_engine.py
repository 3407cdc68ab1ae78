"""Runs transformations of pandas without Spark: the engine that a small project may choose."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from .engine import Engine, Stopped, worker_died
from .local_process import ProcessDied, processes
from .project import LOCAL, Project
from .sandbox import TIME_LIMIT_REASON
from .task import Sent
from .task_data import ProjectSnapshot, Shipper
from .transformation import TransformationError, supported_engine

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def engine_for(project: Project, session: Callable[[], "SparkSession"], **how: Any) -> Engine:
    """The engine that a project names; Spark's has a session, which starts when it is needed."""
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
        """What may end the work on `which`; errors say what ended it."""
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
    """What stands in the place of a session: nothing is kept open for a block of work."""

    why_not: Callable[[], object]


def _no_session() -> "SparkSession":
    raise AssertionError("the engine local has no session of Spark")
