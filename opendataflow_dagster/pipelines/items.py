"""The loop of items: claim, decode, transform, record, publish, settle.

Items come from the queue (`worker.py`) or from a file (`--stream FILE`): each is a `Feeder` for
this one loop.
"""

import json
import math
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..chunk import Result, open_chunk, reason_of
from ..errors import DataflowError, Refused, StaleClaim, WrongUse
from ..formats.csv_options import UNDECLARED, read_pandas
from ..model import LEASE_SECONDS, RUNNING, Claim, Fact, Say, Stop, new_owner
from ..runner.environment import JobEnvironment
from ..runner.heartbeat import Pulse
from ..runner.run import Outcome, stop_code
from ..runner.script import Scripts
from ..spark.progress import working_on
from ..storage import folder
from ..storage.chunks import failing
from ..store.claims import NOTHING_CLAIMABLE, interrupt_soon, offer
from ..store.database import briefly
from ..store.history import Step, record
from ..store.items import cleaned_away
from ..store.moves import Move, add_rows, generations
from ..store.store import Store
from ..util.text import first_line, printable, tidy, typed
from .destinations import publish_result
from .engine import Engine, ItemRan, StepRan, Stopped
from .frames import Source, Verdict
from .jobs import takes_items, why_no_items
from .project import Pipeline
from .runner import CLEANED, PipelineRunner, open_sources, reason_of_item, steps_of
from .transformation import TransformationError

T = TypeVar("T")

PAGE_ROWS = 1000
"""Rows that one statement writes."""


class ItemResult(NamedTuple):
    """How the transformations of an item ended; `reason` says why they weren't run, if so."""

    claim: Claim
    ran: ItemRan | None
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.ran is not None and self.ran.ok

    @property
    def why_failed(self) -> str:
        return tidy(self.reason or (reason_of_item(self.ran) if self.ran else "it has no result"))


class Feeder:
    """Where items come from, and how that changes running, publishing and settling them."""

    chained = False
    """Whether an item's result is the first frame of the next: then only the last is published."""

    may_retry = True
    """Whether the job's policy may grant a failed item another attempt."""

    def __init__(
        self, store: Store, pipeline: Pipeline, engine: Engine, pulse: Pulse, say: Say
    ) -> None:
        self.store, self.pipeline, self.engine = store, pipeline, engine
        self.pulse, self.say = pulse, say

    @property
    def output(self) -> str:
        """The dataset that the pipeline writes."""
        raise NotImplementedError

    def claim(self) -> list[Claim]:
        """Claim the next batch, in the order of the items."""
        raise NotImplementedError

    def decode(self, claims: Sequence[Claim]) -> Mapping[str, Any]:
        """Return the items by dataid; one that is missing has no payload."""
        raise NotImplementedError

    def sources(self, claims: Sequence[Claim]) -> Sequence[Source]:
        """Return the pipeline's sources, opened for a batch."""
        raise NotImplementedError

    def after_transform(self, results: Sequence[ItemResult], seconds: float) -> None:
        """Record how the transformations of a batch ended, before anything is published."""

    def stopping(self) -> str | None:
        """Return why nothing more may be published, if there is a reason."""

    def publish(self, results: Sequence[ItemResult]) -> Mapping[Claim, Verdict]:
        """Publish good results; an item without a verdict belongs to another worker now."""
        raise NotImplementedError

    def report_failure(self, claim: Claim, reason: str) -> None:
        """Report an item that was settled as failed."""

    def raise_if_engine_died(self, why: str) -> None:
        """Raise `EngineGone` if Spark's end may have caused a failure, and not an item."""

    def raise_if_blameless(self, error: Exception, *, publishing: bool) -> None:
        """Raise the error of a whole batch, unless one of its items may have caused it.

        If this returns, the items are tried one by one, so that one fails alone. Chained items
        can't
        be: each needs the result of the one before.
        """
        raise error

    def interruption(self, error: BaseException) -> Stop | None:
        """Return why a batch was interrupted, if `error` is an interruption."""
        raise NotImplementedError

    def give_up(self, error: BaseException, claims: Sequence[Claim]) -> None:
        """Settle what another error left unsettled; raise what ends the worker."""
        raise NotImplementedError


class EngineGone(Exception):
    """Spark has ended: this worker can't run anything, and its claims are lost with it."""


class ItemLoop:
    """Runs the items of one feeder, and settles each of them."""

    def __init__(self, feeder: Feeder) -> None:
        self.feeder, self.store = feeder, feeder.store
        self.unsettled: dict[int, Claim] = {}
        """By generation."""
        self.done = self.interrupted = 0
        self.stop: Stop | None = None
        """Why items were interrupted, if they were."""

    def run_batch(self) -> int:
        """Claim the next batch and process it; return the number of items, 0 if given back."""
        claims = self.feeder.claim()
        return self.work(claims) if claims else 0

    def work(self, claims: Sequence[Claim]) -> int:
        """Transform, publish and settle claimed items; return their number, 0 if given back.

        An interruption settles what is left as interrupted; any other error is the feeder's.
        """
        feeder, pulse = self.feeder, self.feeder.pulse
        self.unsettled = {claim.generation: claim for claim in claims}
        for claim in claims:
            pulse.hold(claim)
        try:
            with working_on(claims):
                self._run(claims)
        except BaseException as error:
            left = list(self.unsettled.values())
            self.stop = feeder.interruption(error)
            if self.stop:
                self.interrupted = len(left)
                with suppress(Exception):  # what can't be settled now, its lease settles
                    interrupt_soon(self.store, left, self.stop)
                raise
            feeder.give_up(error, left)
            return 0
        finally:
            for claim in claims:
                pulse.let_go(claim)
        return len(claims)

    # --- transformations ---

    def _run(self, claims: Sequence[Claim]) -> None:
        feeder = self.feeder
        items = feeder.decode(claims)
        with_payload = [claim for claim in claims if claim.dataid in items]
        results = [
            ItemResult(claim, None, _why_no_payload(self.store, claim))
            for claim in claims
            if claim.dataid not in items
        ]
        sources = feeder.sources(with_payload) if with_payload else ()
        # Only now: opening the sources may start Spark, which isn't a transformation's time.
        began, clock = self.store.now(), time.monotonic()
        if with_payload:
            ran = self._transform(with_payload, items, sources)
            feeder.after_transform(ran, time.monotonic() - clock)
            results += ran
        if why := feeder.stopping():
            raise Stopped(why)
        self._record(results, began)
        self._publish(results)

    def _transform(
        self, claims: Sequence[Claim], items: Mapping[str, Any], sources: Sequence[Source]
    ) -> list[ItemResult]:
        """Run all items in one task; if that fails as a whole, one by one."""
        feeder = self.feeder
        try:
            ran = feeder.engine.run_items(
                feeder.pipeline.slug,
                feeder.pipeline.transformations,
                sources,
                [items[claim.dataid] for claim in claims],
                chained=feeder.chained,
                # Chained items share the limit of one chunk: they are one task.
                limit=None if feeder.chained else claims[0].time_limit,
            )
        except Exception as error:
            feeder.raise_if_blameless(error, publishing=False)
            if len(claims) == 1:
                return [_failed(claims[0], feeder.pipeline, error)]
        else:
            # Code that uses Spark fails when Spark ends: that looks like the item's own failure.
            if failed := next((item for item in ran if not item.ok), None):
                feeder.raise_if_engine_died(reason_of_item(failed))
            return [ItemResult(*pair) for pair in zip(claims, ran, strict=True)]
        return [result for claim in claims for result in self._transform([claim], items, sources)]

    def _record(self, results: Sequence[ItemResult], began: float) -> None:
        history: list[Step] = []
        for result in results:
            if result.ran is not None:
                steps = steps_of(result.claim, result.ran, began)
                began = steps[-1].ended or began if steps else began
                history += steps
        for page in pages(history):
            record(self.store, page)

    # --- results ---

    def _publish(self, results: Sequence[ItemResult]) -> None:
        """Publish the good results, and settle all."""
        good = [result for result in results if result.ok]
        verdicts: Mapping[Claim, Verdict] = {}
        if good:
            try:
                verdicts = self.feeder.publish(good)
            except Exception as error:
                self.feeder.raise_if_blameless(error, publishing=True)
                if len(results) > 1:
                    for result in results:
                        self._publish([result])
                    return
                verdicts = {good[0].claim: DataflowError(reason_of(error))}
        self._settle(results, verdicts)

    def _settle(self, results: Sequence[ItemResult], verdicts: Mapping[Claim, Verdict]) -> None:
        finished: list[tuple[Claim, Fact]] = []
        reasons = {result.claim: result.why_failed for result in results if not result.ok}
        for claim, verdict in verdicts.items():
            if isinstance(verdict, DataflowError):
                reasons[claim] = tidy(first_line(verdict))
            else:
                finished.append((claim, self._fact(claim, verdict)))
        for page in pages(finished):
            self._finish(page)
        for claim, reason in reasons.items():
            self._fail(claim, reason)
        for result in results:  # without a verdict: another worker has the claim, or it is held
            self._let_go(result.claim)

    def _finish(self, page: Sequence[tuple[Claim, Fact]]) -> None:
        try:
            self.store.finish([claim for claim, _ in page], [fact for _, fact in page])
            self.done += len(page)
        except StaleClaim as error:
            self.feeder.say(str(error))
        for claim, _ in page:
            self._let_go(claim)

    def _fail(self, claim: Claim, reason: str) -> None:
        try:
            self.store.fail(claim, reason, may_retry=self.feeder.may_retry)
        except StaleClaim as error:
            self.feeder.say(str(error))
        else:
            self.feeder.report_failure(claim, reason)
        self._let_go(claim)

    def _let_go(self, claim: Claim) -> None:
        self.unsettled.pop(claim.generation, None)
        self.feeder.pulse.let_go(claim)

    def _fact(self, claim: Claim, result: Result) -> Fact:
        return Fact(
            self.feeder.output,
            claim.dataid,
            result.location,
            result.rows,
            result.bytes,
            result.fingerprint,
            schema=result.schema,
            replaces=result.replaces,
        )


def pages(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield rows in batches of the size that one statement writes."""
    return (rows[start : start + PAGE_ROWS] for start in range(0, len(rows), PAGE_ROWS))


def _why_no_payload(store: Store, claim: Claim) -> str:
    cleaned = cleaned_away(store, claim.jobid, [claim.dataid])
    return CLEANED if cleaned else "it has no payload"


def _failed(claim: Claim, pipeline: Pipeline, error: Exception) -> ItemResult:
    """Return the result of an item that crashed its task."""
    reason = str(error) if isinstance(error, TransformationError) else reason_of(error)
    printed, trace = getattr(error, "printed", ""), getattr(error, "trace", "")
    step = StepRan(pipeline.transformations[0], reason, printed, trace, None, 0)
    return ItemResult(claim, ItemRan(None, (step,)))


# Items from a file: `odf pipeline run --stream FILE` runs each row of a CSV file as an item. The
# sources are read once, and the result of one item is the first frame of the next: the last frame
# has the rows of all. It is published before any of them is READY.


def run_file(runner: PipelineRunner, file: Path) -> Outcome:
    """Run a pipeline for each row of a CSV file; an item that fails is FAILED alone."""
    work = runner.work
    if not takes_items(work.project, work.pipeline):
        raise WrongUse(
            printable(
                f"Pipeline {runner.jobid!r} accepts no items: "
                f"{why_no_items(work.project, work.pipeline)}, or run it without --stream."
            )
        )
    items = read_items(file)
    if not items:
        runner.tell(f"{printable(str(file))} has no rows: nothing to run")
        return Outcome(0)
    work.refuse_loss()
    with Scripts() as scripts:
        runner.scripts, scripts.works_here = scripts, True
        environment = runner.environment()
        obstacle = offer(runner.store, runner.jobid).obstacle
        if obstacle not in ("", NOTHING_CLAIMABLE):
            raise Refused(
                f"Pipeline {runner.jobid!r} can't run now: {obstacle}. "
                f"See `odf policy {typed(runner.jobid)}`."
            )
        with Pulse(runner.store, new_owner(), say=runner.tell) as pulse:
            feeder = FileItems(runner, environment, pulse, items, file.name)
            return _run(ItemLoop(feeder), feeder.claim(), runner, scripts)


def _run(
    loop: ItemLoop, claims: Sequence[Claim], runner: PipelineRunner, scripts: Scripts
) -> Outcome:
    """Run all items as one batch; return how they ended."""
    try:
        loop.work(claims)
    except BaseException as error:
        if loop.stop:
            runner.tell(f"Reason: {printable(loop.stop.why)}")
        if not isinstance(error, Exception):
            if not isinstance(error, KeyboardInterrupt) or scripts.stopping is None:
                raise
        elif runner.store.db.trouble(error):
            raise
    failed = len(claims) - loop.done - loop.interrupted
    more = f", interrupted {loop.interrupted}" if loop.interrupted else ""
    runner.tell(f"done {loop.done}, failed {failed}{more}")
    return Outcome(stop_code(scripts) or int(bool(failed)), loop.done, failed)


class FileItems(Feeder):
    """All items of a file as one batch: the last frame is published like that of a run."""

    chained = True
    may_retry = False  # the published frame already includes the items after it

    def __init__(
        self,
        runner: PipelineRunner,
        environment: JobEnvironment,
        pulse: Pulse,
        items: Sequence[dict[str, Any]],
        file_name: str,
    ) -> None:
        work = runner.work
        super().__init__(runner.store, work.pipeline, work.engine, pulse, runner.tell)
        self._runner, self._environment = runner, environment
        self._items, self._file_name = items, file_name
        self._reasons: dict[Claim, str] = {}
        """Why items failed by themselves."""

    @property
    def output(self) -> str:
        return self._runner.work.plan.outputs[0]

    def claim(self) -> list[Claim]:
        slug = self._runner.jobid
        texts = [json.dumps(item) for item in self._items]
        claims = claim_new_items(self.store, slug, texts, self.pulse.owner)
        file_name = printable(self._file_name)
        self.say(f"Launching {printable(slug)} for {len(claims)} items of {file_name}")
        return claims

    def decode(self, claims: Sequence[Claim]) -> Mapping[str, Any]:
        return {claim.dataid: item for claim, item in zip(claims, self._items, strict=True)}

    def sources(self, claims: Sequence[Claim]) -> Sequence[Source]:
        work = self._runner.work
        chunk = open_chunk(self.store, claims[0], self._environment, self.pulse)
        work.begin(chunk)
        return open_sources(self.store, work.project, work.pipeline, chunk)

    def after_transform(self, results: Sequence[ItemResult], seconds: float) -> None:
        for result in results:
            if result.ran and not result.ok:
                reason = self._reasons[result.claim] = reason_of_item(result.ran)
                self.say(f"Item {result.claim.dataid} failed: {printable(reason)}")

    def publish(self, results: Sequence[ItemResult]) -> Mapping[Claim, Verdict]:
        """Publish the last good frame, which holds the rows of all."""
        work, last = self._runner.work, results[-1].claim
        frames = [result.ran.frame for result in results if result.ran]
        frame = next((frame for frame in reversed(frames) if frame is not None), None)
        chunk = open_chunk(self.store, last, self._environment, self.pulse)
        with failing(), self.engine.telling():
            published = publish_result(
                self.store,
                work.project,
                work.pipeline,
                work.destination,
                frame,
                chunk,
                is_item=False,
                say=self.say,
            )
        location = published.location or self._environment.locations.get(self.output)
        verdicts = {result.claim: Result(_rows_of(result), location=location) for result in results}
        return verdicts | {last: published._replace(location=location)}

    def interruption(self, error: BaseException) -> Stop | None:
        is_interrupted = self._runner.stopping() or not isinstance(error, Exception)
        return self._runner.interruption(error) if is_interrupted else None

    def give_up(self, error: BaseException, claims: Sequence[Claim]) -> None:
        """Fail what isn't settled: none of it was published."""
        reason = reason_of(error)
        self.say(f"Reason: {printable(reason)}")
        for claim in claims:
            why = self._reasons.get(claim, reason)
            with suppress(StaleClaim):
                briefly(self.store.db, lambda c=claim, w=why: self.store._fail(c, w, False))
        if not isinstance(error, Exception) or self.store.db.trouble(error):
            raise error
        if not isinstance(error, DataflowError):
            for line in "".join(traceback.format_exception(error)).splitlines():
                self._runner._say(line)

    def raise_if_blameless(self, error: Exception, *, publishing: bool) -> None:
        if publishing:
            raise error
        with failing():
            raise error


def _rows_of(result: ItemResult) -> int | None:
    """Return the number of rows of the frame after an item."""
    return result.ran.steps[-1].rows if result.ran and result.ran.steps else None


# --- the rows of a file as items ---


def read_items(file: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file with the values that JSON would have: None for a missing one."""
    folder.need("pandas")
    shown = printable(str(file))
    try:
        frame = read_pandas(str(file), UNDECLARED)
    except FileNotFoundError:
        raise WrongUse(f"There is no file {shown}. Name a CSV file with a row per item.") from None
    except (OSError, ValueError) as error:  # errors of pandas and of Unicode are ValueErrors
        raise WrongUse(f"{shown} can't be read as CSV: {first_line(error)}. Correct it.") from None
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    for number, row in enumerate(rows, 1):
        for name, value in row.items():
            if isinstance(value, float) and math.isinf(value):
                raise WrongUse(
                    f"{shown}: {name!r} of row {number} is infinite, which an item can't be."
                )
    return [{str(name): value for name, value in row.items()} for row in rows]


def claim_new_items(store: Store, jobid: str, payloads: Sequence[str], owner: str) -> list[Claim]:
    """Add items as RUNNING chunks of a job, so that no other worker can claim them."""
    db = store.db
    numbers, _ = db.insist(lambda: generations(store, len(payloads)))

    def work() -> list[Claim]:
        with db.transaction(who=owner, why="odf pipeline run --stream", act="claim"):
            [(lease, time_limit)] = db.run("forcing.dial", jobid=jobid, lease=LEASE_SECONDS)
            claims = [
                Claim(jobid, str(number), number, owner, 1, float(lease), time_limit)
                for number in numbers
            ]
            if db.run("items.is_accepted", jobid=jobid, dataid=claims[0].dataid):
                return claims  # the connection broke after the commit
            store.refuse_unclaimable(now=True)
            outputs = store.read_plan(jobid).outputs
            for page, texts in zip(pages(claims), pages(payloads), strict=True):
                items = [
                    {"jobid": jobid, "dataid": claim.dataid, "payload": text, "idempotency": None}
                    for claim, text in zip(page, texts, strict=True)
                ]
                held = [{"dataid": claim.dataid, "generation": claim.generation} for claim in page]
                moves = [
                    Move(jobid, output, claim.dataid, None, RUNNING)
                    for claim in page
                    for output in outputs
                ]
                db.change("items.add", items=json.dumps(items))
                db.change(
                    "pipelines.claim_items",
                    jobid=jobid,
                    owner=owner,
                    lease=float(lease),
                    rows=json.dumps(held),
                )
                add_rows(store, moves, {claim.dataid: claim.generation for claim in page})
            return claims

    return db.insist(work)[0]
