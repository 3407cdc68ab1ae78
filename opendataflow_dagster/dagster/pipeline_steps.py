"""The steps of a pipeline's run in Dagster: claim, one or more transformations, publish."""

import json
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import dagster as dg

from ..chunk import Chunk, Result, open_chunk, reason_of
from ..errors import Overtaken, SessionError, StaleClaim
from ..model import FAILED, READY, RESUBMIT, RUN_SIGNATURE, Claim, Stop
from ..pipelines.destinations import (
    destination_of,
    publish_result,
    refuse_loss,
    refuse_older,
)
from ..pipelines.engine import engine_for
from ..pipelines.frames import Destination
from ..pipelines.jobs import is_read, register, takes_items
from ..pipelines.project import LOCAL, Pipeline, Project
from ..pipelines.run import check, refuse_master
from ..pipelines.runner import CLEANED, Buffer, InBuffer, StepRunner, code_of_pipeline, open_sources
from ..pipelines.sources import Once
from ..pipelines.transformation import NO_STREAM, TransformationError
from ..runner.environment import JobEnvironment, job_environment
from ..runner.heartbeat import Pulse
from ..runner.produce import Produced, produce
from ..runner.run import LOST, nothing_to_do
from ..spark.progress import label_jobs, working_on
from ..storage.chunks import failing
from ..store.claims import give_back, interrupt, interrupt_soon
from ..store.history import excerpt
from ..store.items import live_generations, next_runs, offer_run
from ..store.store import Store
from ..util.text import printable, typed
from .resources import PYSPARK_KEY, RESOURCE_KEY
from .step import (
    DIAL_POLL_SECONDS,
    Claimer,
    Context,
    failure_reason,
    interrupted,
    requested_partitions,
)
from .translator import DataflowTranslator
from .versions import ChunkEvents, stale_evaluations

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


Handed = Mapping[str, Any]
"""What steps pass on: plain values, which any IO manager can carry into any process."""


class StepFlow(NamedTuple):
    """A pipeline of a project, as its steps see it."""

    project: Project
    pipeline: Pipeline
    translator: DataflowTranslator
    pyspark: bool
    tables: str = RESOURCE_KEY
    """The key of the resource with the tables."""

    @property
    def slug(self) -> str:
        return self.pipeline.slug

    def store(self, context: Context) -> Store:
        return getattr(context.resources, self.tables).store

    def session(self, context: Context) -> Callable[[], "SparkSession"]:
        """Return a function that gives the session: all steps of a process share one."""

        def given() -> "SparkSession":
            if self.pyspark:
                session = getattr(context.resources, PYSPARK_KEY).spark_session
            else:
                from ..spark.session import spark_session

                settings = getattr(context.resources, self.tables).settings
                session = spark_session(app=f"odf {self.slug}", settings=settings)
            label_jobs()
            return session

        return given


def failure(claim: Claim, status: str, reason: str, retry_in: float | None) -> dg.Failure:
    """Return the failure that ends the run of a chunk that wasn't produced."""
    if status == LOST:
        return dg.Failure(reason, allow_retries=False)
    text = f"{printable(claim.dataid)} of pipeline {claim.jobid!r} is {status}: {reason}"
    if status == RESUBMIT:
        text += " (another attempt is granted: the next run makes it)"
    elif retry_in:
        text += f" (the next attempt is due in {retry_in:g} s)"
    elif status == FAILED and not reason.endswith(CLEANED):
        text = text.rstrip(".") + f". Then run: odf resubmit {typed(claim.jobid, claim.dataid)}"
    return dg.Failure(
        text,
        allow_retries=False,
        metadata={
            "opendataflow/dataid": claim.dataid,
            "opendataflow/generation": claim.generation,
            "opendataflow/status": str(status),
        },
    )


class StepWork:
    """A claim that one step works on."""

    def __init__(
        self,
        context: Context,
        flow: StepFlow,
        claim: Claim,
        pulse: Pulse,
        store: Store,
        began: float,
    ) -> None:
        self.store, self.claim, self.pulse = store, claim, pulse
        self._began = time.monotonic() - (store.now() - began)
        self.session = flow.session(context)
        self.engine = engine_for(
            flow.project, self.session, say=context.log.info, stopping=self._stopping
        )
        self.environment: JobEnvironment = store.db.insist(
            lambda: job_environment(store, store.plan(flow.slug), secrets=False)
        )[0]
        self.chunk = open_chunk(store, claim, self.environment, pulse)
        self.buffer = Buffer(flow.project, flow.slug, claim.generation)
        self.settled = False
        """Whether somebody else settles the claim in any case."""

        self.interrupt: BaseException | None = None
        """What Dagster ended this step with: Spark may answer it with an error of its own."""

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let an interrupt cancel what Spark is doing, instead of waiting for it."""
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
            for number in (signal.SIGINT, signal.SIGTERM):
                handler = signal.getsignal(number)
                if callable(handler):
                    before[number] = handler
                    signal.signal(number, notice)
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
def holding_claim(context: Context, flow: StepFlow, handed: Handed) -> Iterator[StepWork]:
    """Keep a run's claim alive during one step; if the step fails, settle the claim at once."""
    store, claim = flow.store(context), Claim(**handed["claim"])
    buffer, work = Buffer(flow.project, flow.slug, claim.generation), None

    def say(message: str) -> None:
        with suppress(Exception):
            context.log.warning(message)

    try:
        with Pulse(store, claim.owner, runid=context.run.run_id, jobid=flow.slug, say=say) as pulse:
            pulse.hold(claim)
            store.confirm(claim)
            work = StepWork(context, flow, claim, pulse, store, handed["began"])
            with work.engine, work.interruptible(), working_on([claim]):
                yield work
    except StaleClaim as error:
        buffer.clear()
        _raise_interrupt(work)
        raise dg.Failure(
            f"{error} A run can't resume in the middle: launch the whole partition.",
            allow_retries=False,
        ) from None
    except dg.Failure:
        buffer.clear()
        _raise_interrupt(work)
        raise
    except SessionError as error:  # not the fault of any chunk
        buffer.clear()
        if work is None or not work.settled:
            give_back(store, [claim], str(error))
        raise as_failure(store, error) from None
    except Exception as error:
        if work and work.interrupt and not work.settled:
            buffer.clear()
            _cancel(context, store, claim, work.interrupt)
        _raise_interrupt(work)
        if store.db.trouble(error) == "gone" or (work and work.settled):
            raise as_failure(store, error) from None
        buffer.clear()
        raise _fail_chunk(store, claim, error) from None
    except BaseException as error:
        buffer.clear()
        if work is None or not work.settled:
            _cancel(context, store, claim, error)
        raise


def _raise_interrupt(work: StepWork | None) -> None:
    """Raise the interrupt of a step that ended with another error because of it."""
    if work and work.interrupt:
        raise work.interrupt from None


def _cancel(context: Context, store: Store, claim: Claim, error: BaseException) -> None:
    """Settle a chunk whose step was interrupted."""
    with suppress(Exception):  # the sensors settle it too, or its lease runs out
        interrupt_soon(store, [claim], interrupted(context.instance, context.run.run_id, error))


def _fail_chunk(store: Store, claim: Claim, error: Exception) -> dg.Failure:
    """Settle a chunk whose work failed; return the failure to raise."""
    reason = reason_of(error)
    try:
        if isinstance(error, Overtaken):
            return failure(claim, interrupt(store, claim, Stop(reason, hold=True)), reason, None)
        status, retry_in = store.fail(claim, reason)
    except StaleClaim as stale:
        return dg.Failure(str(stale), allow_retries=False)
    except Exception as trouble:
        return as_failure(store, trouble)
    return failure(claim, status, reason, retry_in)


def as_failure(store: Store, error: Exception) -> dg.Failure:
    """The failure that reports an error in a line; errors that aren't ours are raised again."""
    reason = failure_reason(store, error)
    if reason is None:
        raise error
    return dg.Failure(reason, allow_retries=False)


CLAIM, OVER = "claim", "over"
"""The outputs of the step that claims: what the next steps need, or that nothing is to do."""


# --- the first step ---


def begin(context: Context, flow: StepFlow) -> Iterator[dg.Output]:
    """Claim the chunk of the run's partition, or else the next one, as the tables allow."""
    store = flow.store(context)
    try:
        if flow.project.engine == LOCAL:
            refuse_master(getattr(context.resources, flow.tables).settings)
        plans = register(store, flow.project, flow.slug)
        check(store, flow.project, flow.pipeline, plans[flow.slug])
        claimer = Claimer(context, store, flow.slug, flow.translator)
        root = not plans[flow.slug].reads
    except Exception as error:
        raise as_failure(store, error) from None
    try:
        with Pulse(
            store, claimer.owner, runid=claimer.runid, jobid=flow.slug, say=claimer.say
        ) as claimer.pulse:
            claimer.environment()
            keys = requested_partitions(context)
            if keys is not None and len(keys) > 1:
                raise dg.Failure(
                    f"A run of pipeline {flow.slug!r} produces one chunk, but this run has "
                    f"{len(keys)} partitions. Launch a backfill, which starts a run for each.",
                    allow_retries=False,
                )
            taken = (
                _claim_next(claimer, flow)
                if keys is None
                else _claim_requested(claimer, keys[0], root)
            )
            if taken is not None:
                Buffer(flow.project, flow.slug, taken[0].generation).sweep(
                    live_generations(store, flow.slug)
                )
    except dg.Failure:
        raise
    except Exception as error:
        raise as_failure(store, error) from None
    except BaseException as error:
        claimer.give_up(error)
        raise
    if taken is None:
        yield dg.Output({}, OVER)
        return
    claim, key = taken
    context.log.info(f"Claimed {printable(claim.dataid)}, generation {claim.generation}")
    yield dg.Output({"claim": dict(claim._asdict()), "partition": key, "began": store.now()}, CLAIM)


def _claim_next(claimer: Claimer, flow: StepFlow) -> tuple[Claim, str] | None:
    """Claim the next chunk that the tables offer; items are left to `odf serve`."""
    claims: list[Claim] = []
    if takes_items(flow.project, flow.pipeline):
        for dataid in next_runs(claimer.store, flow.slug):
            if claims := claimer.claim(dataid):
                break
    else:
        claims = claimer.claim(None)
    if not claims:
        claimer.context.log.info(f"{flow.slug}: {nothing_to_do(claimer.store, flow.slug)}")
        return None
    return claims[0], flow.translator.partition_key(claims[0].dataid)


def _claim_requested(claimer: Claimer, key: str, root: bool) -> tuple[Claim, str] | None:
    """Claim the chunk of a partition; None if it is READY already, which is logged."""
    dataid = claimer.translator.dataid(key)
    if root:
        offer_run(claimer.store, claimer.jobid, dataid, who=RUN_SIGNATURE + claimer.runid)
    if claimer.resubmits:
        claimer.send_back(dataid)
    while True:
        if claims := claimer.claim(dataid):
            return claims[0], key
        if rows := claimer.ready_already(dataid):
            stale = claimer.staleness(dataid)
            if not claimer.is_made_again(stale):
                for event in claimer.events.skipped(rows, claimer.jobid, dataid, key, stale.line):
                    claimer.context.log_event(event)
                say = claimer.context.log.info
                say(f"{printable(dataid)} is READY already: it isn't produced again")
                return None
            if claims := claimer.make_again(dataid, stale):
                return claims[0], key
        refused = claimer.refuse(dataid)
        if refused:
            return refused[0], key
        if refused is not None:
            raise dg.Failure(claimer.refused[dataid], allow_retries=False)
        time.sleep(DIAL_POLL_SECONDS)


# --- one transformation ---


def transform(context: Context, flow: StepFlow, number: int, name: str, handed: Handed) -> None:
    """Run one transformation on the previous step's result, and store its own result."""
    with holding_claim(context, flow, handed) as work:
        frames: list[Any] = [
            Once(
                source,
                InBuffer(work.buffer, at, work.session, again=_is_read_again(flow, number, at)),
            )
            for at, source in enumerate(
                open_sources(work.store, flow.project, flow.pipeline, work.chunk)
            )
        ]
        steps = StepRunner(work.store, work.claim, work.engine, flow.pipeline)
        item = steps.item()
        if number == 1 and item is None:
            with failing():
                destination = _destination(work.store, flow)
                refuse_older(work.store, destination, work.chunk)
                refuse_loss(flow.project, flow.pipeline, destination)
        if number > 1:
            frames[:1] = [work.buffer.frame(number - 1, work.session)]
        try:
            ran = steps.step(
                number,
                name,
                frames,
                NO_STREAM if item is None else json.loads(item),
                keep=lambda frame: work.buffer.keep(number, frame),
            )
            _log_printed(context, name, ran.printed)
        except Exception as error:
            cause = error.__cause__
            if isinstance(cause, TransformationError):
                _log_printed(context, name, cause.printed)
                if cause.trace:
                    context.log.error(cause.trace)
            raise
        work.buffer.drop(number - 1)
        context.log.info(f"{name}: {ran.rows} rows, {ran.seconds:.1f} s")


def _is_read_again(flow: StepFlow, number: int, at: int) -> bool:
    """Whether a later step reads this source; only the first step reads the first source."""
    return at > 0 and number < len(flow.pipeline.transformations)


def _log_printed(context: Context, name: str, text: str) -> None:
    """Print what a transformation has printed, and log it.

    Steps in one process share the output that Dagster keeps; the log belongs to each step alone.
    """
    if text.strip():
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
        context.log.info(f"{name} printed:\n{excerpt(text)}")


# --- the last step ---


def publish(context: Context, flow: StepFlow, handed: Handed) -> None:
    """Publish the result of the last transformation, settle the chunk, and report it to Dagster."""
    with holding_claim(context, flow, handed) as work:
        store, claim = work.store, work.claim
        is_item = StepRunner(store, claim, work.engine, flow.pipeline).item() is not None
        last = len(flow.pipeline.transformations)

        def publish_frame(chunk: Chunk) -> Result:
            with failing(), work.engine.telling():
                return publish_result(
                    store,
                    flow.project,
                    flow.pipeline,
                    _destination(store, flow),
                    work.buffer.frame(last, work.session),
                    chunk,
                    is_item=is_item,
                    say=context.log.warning,
                )

        # From here on, `produce` settles the claim, even if it raises: `holding_claim` must not.
        work.settled = True
        produced = produce(
            store,
            claim,
            work.environment,
            lambda chunk: None,
            publish=publish_frame,
            pulse=work.pulse,
            interrupted=lambda error: interrupted(context.instance, context.run.run_id, error),
            code=code_of_pipeline(flow.project, flow.pipeline),
        )
        work.buffer.clear()
        produced = produced._replace(seconds=store.now() - handed["began"])
        if produced.status != READY:
            raise _settled_failure(context, produced)
        events = ChunkEvents(context, store, flow.translator)
        for fact in produced.facts:
            if events.is_shown(produced.claim.dataid, handed["partition"]):
                context.log_event(events.produced(produced, fact, handed["partition"]))


def tell_stale(context: Context, flow: StepFlow) -> list[dg.AssetCheckEvaluation]:
    """Return how many chunks of the pipeline are stale now."""
    store = getattr(context.resources, flow.tables).store
    return store.db.insist(lambda: list(stale_evaluations(store, flow.slug, flow.translator)))[0]


def _destination(store: Store, flow: StepFlow) -> Destination:
    plans = register(store, flow.project, flow.slug)
    return destination_of(
        store,
        flow.project,
        flow.pipeline,
        plans[flow.slug],
        read_by_others=is_read(flow.project, plans, flow.slug),
    )


def _settled_failure(context: Context, produced: Produced) -> dg.Failure:
    claim, reason = produced.claim, produced.reason
    if produced.error:
        trace = "".join(traceback.format_exception(produced.error))
        context.log.error(f"{printable(claim.dataid)}: {reason}\n{trace}")
    return failure(claim, produced.status, reason, produced.retry_in)
