"""What the steps of a pipeline's run have in common: its pipeline, its claim, how it fails."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import dagster as dg

from ..chunk import open_chunk, reason_of
from ..errors import Overtaken, SessionError, StaleClaim
from ..model import FAILED, RESUBMIT, Claim, Stop
from ..pipelines.engine import Engine
from ..pipelines.project import Pipeline, Project
from ..pipelines.run_steps import CLEANED
from ..pipelines.step_frames import Buffer
from ..runner.environment import JobEnvironment, job_environment
from ..runner.heartbeat import Pulse
from ..runner.run import LOST
from ..spark.progress import label, working_on
from ..store.claim_return import give_back, interrupt, interrupt_soon
from ..store.store import Store
from ..util.text import printable, typed
from .step_claim import Context, explained, interrupted
from .translator import DataflowTranslator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RESOURCE, PYSPARK = "dataflow", "pyspark"
"""The keys of the resources that have the tables, and the session where a project has its own."""

Handed = Mapping[str, Any]
"""What goes from step to step: plain values, by any IO manager, into any process."""


class Flow(NamedTuple):
    """A pipeline of a project, as its steps know it."""

    project: Project
    pipeline: Pipeline
    translator: DataflowTranslator
    pyspark: bool
    tables: str = RESOURCE
    """The key of the resource that has the tables."""

    @property
    def slug(self) -> str:
        return self.pipeline.slug

    def store(self, context: Context) -> Store:
        return getattr(context.resources, self.tables).store

    def session(self, context: Context) -> Callable[[], "SparkSession"]:
        """What gives the session: all steps of a process have the same."""

        def given() -> "SparkSession":
            if self.pyspark:
                session = getattr(context.resources, PYSPARK).spark_session
            else:
                from ..spark.session import spark_session

                settings = getattr(context.resources, self.tables).settings
                session = spark_session(app=f"odf {self.slug}", settings=settings)
            label()
            return session

        return given


def failure(claim: Claim, status: str, reason: str, retry_in: float | None) -> dg.Failure:
    """What ends the run of a chunk that wasn't made."""
    if status == LOST:
        return dg.Failure(reason, allow_retries=False)
    told = f"{printable(claim.dataid)} of pipeline {claim.jobid!r} is {status}: {reason}"
    if status == RESUBMIT:
        told += " (another attempt is granted: the next run makes it)"
    elif retry_in:
        told += f" (the next attempt is due in {retry_in:g} s)"
    elif status == FAILED and not reason.endswith(CLEANED):
        told = told.rstrip(".") + f". Then run: odf resubmit {typed(claim.jobid, claim.dataid)}"
    return dg.Failure(
        told,
        allow_retries=False,
        metadata={
            "opendataflow/dataid": claim.dataid,
            "opendataflow/generation": claim.generation,
            "opendataflow/status": str(status),
        },
    )


class Work:
    """A claim in the hands of one step."""

    def __init__(
        self, context: Context, flow: Flow, claim: Claim, pulse: Pulse, store: Store, began: float
    ) -> None:
        self.store, self.claim, self.pulse = store, claim, pulse
        self._began = time.monotonic() - (store.now() - began)
        self.session = flow.session(context)
        self.engine = Engine(
            flow.project, self.session, say=context.log.info, stopping=self._stopping
        )
        self.environment: JobEnvironment = store.db.insist(
            lambda: job_environment(store, store.plan(flow.slug), secrets=False)
        )[0]
        self.chunk = open_chunk(store, claim, self.environment, pulse)
        self.buffer = Buffer(flow.project, flow.slug, claim.generation)
        self.settled = False
        """Whether somebody else settles the claim, whatever happens."""

        self.interrupt: BaseException | None = None
        """What Dagster has ended this step with: Spark may answer with an error of its own."""

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let an interrupt end what Spark is doing, which would else be waited for."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {}

        def notice(number: int, frame: FrameType | None) -> None:
            try:
                before[number](number, frame)
            except BaseException as error:
                self.interrupt = error
                raise

        try:
            for each in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(each)
                if callable(handler):
                    before[each] = handler
                    signal.signal(each, notice)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stopping(self) -> str | None:
        if self.interrupt is not None:
            return "an interrupt"
        limit = self.claim.time_limit
        if limit is not None and time.monotonic() - self._began > limit:
            return f"its time limit of {limit:g} s"
        if self.pulse.lost(self.claim):
            return "a claim that was lost"
        return "a run that was ended" if self.pulse.dismissed else None


@contextmanager
def held(context: Context, flow: Flow, handed: Handed) -> Iterator[Work]:
    """Keep a run's claim alive during one step; what ends the step badly settles it at once."""
    store, claim = flow.store(context), Claim(**handed["claim"])
    buffer, work = Buffer(flow.project, flow.slug, claim.generation), None

    def say(message: str) -> None:
        with suppress(Exception):
            context.log.warning(message)

    try:
        with Pulse(store, claim.owner, runid=context.run.run_id, jobid=flow.slug, say=say) as pulse:
            pulse.hold(claim)
            store.confirm(claim)
            work = Work(context, flow, claim, pulse, store, handed["began"])
            with work.engine, work.interruptible(), working_on([claim]):
                yield work
    except StaleClaim as error:
        buffer.clear()
        _raise_interrupt(work)
        raise dg.Failure(
            f"{error} A run can't go on in the middle: launch the partition as a whole.",
            allow_retries=False,
        ) from None
    except dg.Failure:
        buffer.clear()
        _raise_interrupt(work)
        raise
    except SessionError as error:  # no chunk is to blame
        buffer.clear()
        if work is None or not work.settled:
            give_back(store, [claim], str(error))
        raise told(store, error) from None
    except Exception as error:
        if work and work.interrupt and not work.settled:
            buffer.clear()
            _cancel(context, store, claim, work.interrupt)
        _raise_interrupt(work)
        if store.db.trouble(error) == "gone" or (work and work.settled):
            raise told(store, error) from None
        buffer.clear()
        raise _settled(store, claim, error) from None
    except BaseException as error:
        buffer.clear()
        if work is None or not work.settled:
            _cancel(context, store, claim, error)
        raise


def _raise_interrupt(work: Work | None) -> None:
    """Go on with the interrupt of a step that has ended with another error on its account."""
    if work and work.interrupt:
        raise work.interrupt from None


def _cancel(context: Context, store: Store, claim: Claim, error: BaseException) -> None:
    """Settle a chunk whose step was interrupted."""
    with suppress(Exception):  # the sensors settle it too, or else its lease
        interrupt_soon(store, [claim], interrupted(context.instance, context.run.run_id, error))


def _settled(store: Store, claim: Claim, error: Exception) -> dg.Failure:
    """Settle a chunk whose work failed; what to tell of it."""
    reason = reason_of(error)
    try:
        if isinstance(error, Overtaken):
            return failure(claim, interrupt(store, claim, Stop(reason, hold=True)), reason, None)
        status, retry_in = store.fail(claim, reason)
    except StaleClaim as stale:
        return dg.Failure(str(stale), allow_retries=False)
    except Exception as trouble:
        return told(store, trouble)
    return failure(claim, status, reason, retry_in)


def told(store: Store, error: Exception) -> dg.Failure:
    """The failure that tells of an error in a line; what is none of ours is raised as it is."""
    reason = explained(store, error)
    if reason is None:
        raise error
    return dg.Failure(reason, allow_retries=False)
