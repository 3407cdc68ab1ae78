"""The loop of items: claim, decode, transform, record, publish, settle.

Items come from the queue (`item_queue.py`) or from a file (`item_file.py`): each is a `Feeder` of
this one loop.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from ..chunk import Result, reason_of
from ..errors import DataflowError, StaleClaim
from ..model import Claim, Fact, Say, Stop
from ..runner.heartbeat import Pulse
from ..spark.progress import working_on
from ..store.claims import interrupt_soon
from ..store.items import cleaned_away
from ..store.step_log import Step, record
from ..store.store import Store
from ..util.text import first_line, tidy
from .endpoints import Source, Verdict
from .engine import Engine, ItemRan, StepRan, Stopped
from .project import Pipeline
from .runner import CLEANED, reason_of_item, steps_of
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
    """Where items come from; and what differs by that when they are run, published and settled."""

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
        """The items by dataid; one that is missing has no payload."""
        raise NotImplementedError

    def sources(self, claims: Sequence[Claim]) -> Sequence[Source]:
        """The pipeline's sources, opened for a batch."""
        raise NotImplementedError

    def after_transform(self, results: Sequence[ItemResult], seconds: float) -> None:
        """Note how the transformations of a batch ended, before anything is published."""

    def stopping(self) -> str | None:
        """Why nothing more may be published, if something says so."""

    def publish(self, results: Sequence[ItemResult]) -> Mapping[Claim, Verdict]:
        """Publish good results; an item without a verdict isn't this worker's any more."""
        raise NotImplementedError

    def report_failure(self, claim: Claim, reason: str) -> None:
        """Tell that an item was settled as failed."""

    def raise_if_engine_died(self, why: str) -> None:
        """Raise `EngineGone` if a failure may be Spark's end, and no item's fault."""

    def raise_if_blameless(self, error: Exception, *, publishing: bool) -> None:
        """Raise the error of a whole batch, unless one of its items may have caused it.

        If it returns, the items are tried one by one, so that one fails alone. Chained items can't
        be: each needs the result of the one before.
        """
        raise error

    def interruption(self, error: BaseException) -> Stop | None:
        """Why a batch was interrupted, if `error` means that."""
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
        """Claim the next batch and work on it; the number of items, 0 if they were given back."""
        claims = self.feeder.claim()
        return self.work(claims) if claims else 0

    def work(self, claims: Sequence[Claim]) -> int:
        """Transform, publish and settle claimed items; their number, 0 if they were given back.

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
        # Only now: opening the sources may start Spark, which is no transformation's time.
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
        """Run all items by one task; if that fails as a whole, one by one."""
        feeder = self.feeder
        try:
            ran = feeder.engine.run_items(
                feeder.pipeline.slug,
                feeder.pipeline.transformations,
                sources,
                [items[claim.dataid] for claim in claims],
                chained=feeder.chained,
                # Of chained items, all have the limit of one chunk: they are one task.
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
    """As many rows at a time as one statement writes."""
    return (rows[start : start + PAGE_ROWS] for start in range(0, len(rows), PAGE_ROWS))


def _why_no_payload(store: Store, claim: Claim) -> str:
    cleaned = cleaned_away(store, claim.jobid, [claim.dataid])
    return CLEANED if cleaned else "it has no payload"


def _failed(claim: Claim, pipeline: Pipeline, error: Exception) -> ItemResult:
    """The result of an item that ended the task that ran it."""
    reason = str(error) if isinstance(error, TransformationError) else reason_of(error)
    printed, trace = getattr(error, "printed", ""), getattr(error, "trace", "")
    step = StepRan(pipeline.transformations[0], reason, printed, trace, None, 0)
    return ItemResult(claim, ItemRan(None, (step,)))
