"""The steps of a pipeline's run in Dagster: claim, transform once or more, publish."""

import json
import time
import traceback
from collections.abc import Iterator
from typing import Any

import dagster as dg

from ..chunk import Chunk, Result
from ..model import READY, Claim
from ..pipelines.destinations import (
    Destination,
    destination_of,
    publish_result,
    refuse_loss,
    refuse_older,
)
from ..pipelines.jobs import is_read, register, takes_items
from ..pipelines.run import check, open_sources
from ..pipelines.run_steps import Stepping
from ..pipelines.source_snapshot import Once
from ..pipelines.step_frames import Buffer, InBuffer
from ..pipelines.transformation import NO_STREAM, TransformationError
from ..runner.heartbeat import Pulse
from ..runner.produce import Produced, produce
from ..runner.run import nothing_to_do
from ..storage.read import failing
from ..store.periodic_runs import live_generations, next_runs, offer_run
from ..store.step_log import excerpt
from ..store.store import Store
from ..util.text import printable
from .events import made
from .pipeline_run import Flow, Handed, failure, held, told
from .step_claim import DIAL_POLL, Claimer, Context, asked, interrupted

CLAIM, OVER = "claim", "over"
"""The outputs of the step that claims: what the next ones need, or that there is nothing to do."""


# --- the first step ---


def begin(context: Context, flow: Flow) -> Iterator[dg.Output]:
    """Claim the chunk of the run's partition, or else the next one, as the tables allow."""
    store = flow.store(context)
    try:
        plans = register(store, flow.project, flow.slug)
        check(store, flow.project, flow.pipeline, plans[flow.slug])
        claimer = Claimer(context, store, flow.slug, flow.translator)
        root = not plans[flow.slug].reads
    except Exception as error:
        raise told(store, error) from None
    try:
        with Pulse(
            store, claimer.owner, runid=claimer.runid, jobid=flow.slug, say=claimer.say
        ) as claimer.pulse:
            claimer.environment()
            keys = asked(context)
            if keys is not None and len(keys) > 1:
                raise dg.Failure(
                    f"A run of pipeline {flow.slug!r} makes one chunk, and this one names "
                    f"{len(keys)} partitions. Launch them as a backfill: it has a run for each.",
                    allow_retries=False,
                )
            taken = _next(claimer, flow) if keys is None else _asked(claimer, keys[0], root)
            if taken is not None:
                Buffer(flow.project, flow.slug, taken[0].generation).sweep(
                    live_generations(store, flow.slug)
                )
    except dg.Failure:
        raise
    except Exception as error:
        raise told(store, error) from None
    except BaseException as error:
        claimer.give_up(error)
        raise
    if taken is None:
        yield dg.Output({}, OVER)
        return
    claim, key = taken
    context.log.info(f"Claimed {printable(claim.dataid)}, generation {claim.generation}")
    yield dg.Output({"claim": dict(claim._asdict()), "partition": key, "began": store.now()}, CLAIM)


def _next(claimer: Claimer, flow: Flow) -> tuple[Claim, str] | None:
    """The next chunk that the tables offer; items are left to `odf serve`."""
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


def _asked(claimer: Claimer, key: str, root: bool) -> tuple[Claim, str] | None:
    """The chunk of a partition; nothing if it is READY already, which is told."""
    dataid = claimer.translator.dataid(key)
    if root:
        offer_run(claimer.store, claimer.jobid, dataid, who=f"dagster run {claimer.runid}")
    if claimer.again:
        claimer.send_back(dataid)
    while True:
        if claims := claimer.claim(dataid):
            return claims[0], key
        if events := claimer.ready_already(dataid, key):
            for each in events:
                claimer.context.log_event(each)
            claimer.context.log.info(f"{printable(dataid)} is READY already: it isn't made again")
            return None
        refused = claimer.refuse(dataid)
        if refused:
            return refused[0], key
        if refused is not None:
            raise dg.Failure(claimer.refused[dataid], allow_retries=False)
        time.sleep(DIAL_POLL)


# --- one transformation ---


def transform(context: Context, flow: Flow, number: int, name: str, handed: Handed) -> None:
    """Run one transformation on what the step before has left, and leave what it returns."""
    with held(context, flow, handed) as work:
        frames: list[Any] = [
            Once(each, InBuffer(work.buffer, at, work.session, again=_again(flow, number, at)))
            for at, each in enumerate(
                open_sources(work.store, flow.project, flow.pipeline, work.chunk)
            )
        ]
        stepping = Stepping(work.store, work.claim, work.engine, flow.pipeline)
        item = stepping.item()
        if number == 1 and item is None:
            with failing():
                destination = _destination(work.store, flow)
                refuse_older(work.store, destination, work.chunk)
                refuse_loss(flow.project, flow.pipeline, destination)
        if number > 1:
            frames[:1] = [work.buffer.frame(number - 1, work.session)]
        try:
            ran = stepping.step(
                number,
                name,
                frames,
                NO_STREAM if item is None else json.loads(item),
                keep=lambda frame: work.buffer.keep(number, frame),
            )
            _show(context, name, ran.printed)
        except Exception as error:
            cause = error.__cause__
            if isinstance(cause, TransformationError):
                _show(context, name, cause.printed)
                if cause.trace:
                    context.log.error(cause.trace)
            raise
        work.buffer.drop(number - 1)
        context.log.info(f"{name}: {ran.rows} rows, {ran.seconds:.1f} s")


def _again(flow: Flow, number: int, at: int) -> bool:
    """Whether a step behind this one may read a source: the first one is the first step's alone."""
    return at > 0 and number < len(flow.pipeline.transformations)


def _show(context: Context, name: str, text: str) -> None:
    """Print what a transformation has printed, and log it.

    Steps that share a process share what Dagster keeps of its output; the log is each one's own.
    """
    if text.strip():
        print(text, end="" if text.endswith("\n") else "\n", flush=True)
        context.log.info(f"{name} printed:\n{excerpt(text)}")


# --- the last step ---


def publish(context: Context, flow: Flow, handed: Handed) -> None:
    """Publish what the last transformation has left, settle the chunk, and tell Dagster of it."""
    with held(context, flow, handed) as work:
        store, claim = work.store, work.claim
        is_item = Stepping(store, claim, work.engine, flow.pipeline).item() is not None
        last = len(flow.pipeline.transformations)

        def show(chunk: Chunk) -> Result:
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

        work.settled = True
        produced = produce(
            store,
            claim,
            work.environment,
            lambda chunk: None,
            publish=show,
            pulse=work.pulse,
            interrupted=lambda error: interrupted(context.instance, context.run.run_id, error),
        )
        work.buffer.clear()
        produced = produced._replace(seconds=store.now() - handed["began"])
        if produced.status != READY:
            raise _not_made(context, produced)
        log = dg.MetadataValue.url(f"/runs/{context.run.run_id}")
        for fact in produced.facts:
            context.log_event(made(produced, fact, handed["partition"], flow.translator, log))


def _destination(store: Store, flow: Flow) -> Destination:
    plans = register(store, flow.project, flow.slug)
    return destination_of(
        store,
        flow.project,
        flow.pipeline,
        plans[flow.slug],
        read_by_others=is_read(flow.project, plans, flow.slug),
    )


def _not_made(context: Context, produced: Produced) -> dg.Failure:
    claim, reason = produced.claim, produced.reason
    if produced.error:
        trace = "".join(traceback.format_exception(produced.error))
        context.log.error(f"{printable(claim.dataid)}: {reason}\n{trace}")
    return failure(claim, produced.status, reason, produced.retry_in)
