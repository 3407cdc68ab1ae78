"""Items of pipelines, worked on in batches: claimed in order, transformed, appended, settled."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from ..chunk import reason_of
from ..errors import (
    CredentialError,
    DataflowError,
    NoDatabase,
    Overtaken,
    Refused,
    StaleClaim,
    WrongUse,
)
from ..model import Claim, Fact, Say, Stop
from ..runner.heartbeat import Pulse
from ..spark.progress import working_on
from ..store.claims import give_back, interrupt, interrupt_soon
from ..store.items import cleaned_away, payloads
from ..store.moves import refuse_older
from ..store.step_log import Step, record
from ..store.store import Store, stale_claim
from ..util.text import first_line, tidy
from .deployment import Current
from .destinations import destination_of
from .endpoints import Destination, Verdict, is_to_blame
from .engine import Engine, ItemRan, StepRan, Stopped
from .item_claims import Heads, claim_items, heads
from .item_pace import Pace
from .item_turns import Turns
from .jobs import is_read
from .project import Pipeline
from .run_steps import CLEANED, reason_of_item, steps_of
from .sources import source_of
from .transformation import TransformationError

LEASE = 30.0
"""Seconds after which another worker goes on, if this one and its machine are gone."""


ENDING = "the server is being stopped"


class EngineGone(Exception):
    """Spark has ended: this worker can't go on, and what it has in hand is lost with it."""


class Done(NamedTuple):
    """What an item became."""

    claim: Claim
    ran: ItemRan | None
    reason: str = ""


class Consumer:
    """Works on the items of a project's pipelines; one thread at a time on those of one."""

    def __init__(
        self,
        store: Store,
        current: Current,
        engine: Engine,
        pulse: Pulse,
        *,
        runid: str,
        is_alive: Callable[[], bool],
        say: Say,
    ) -> None:
        self.store, self.current, self.engine, self.pulse = store, current, engine, pulse
        self.runid, self._is_alive, self._say = runid, is_alive, say
        self.stopping = False
        """Whether nothing more is to be begun."""
        self.ending = False
        """Whether what is in hand is to be given back."""
        self._paces: dict[str, Pace] = {}
        self._turns = Turns(lambda: self.stopping or self.ending)

    def consume(self, slug: str) -> int:
        """Work on the next items of a pipeline; how many there were."""
        pace = self._paces.setdefault(slug, Pace())
        pipeline, code = self.current.serving(slug)
        if self.stopping or pipeline is None or time.monotonic() < pace.until:
            return 0
        found = heads(self.store, slug, pace.size)
        with self._turns.taken(alone=found.alone) as ours:
            if not ours or self.stopping:
                return 0
            with self.engine.serving(code):
                return self._consume(pipeline, found, pace)

    def _consume(self, pipeline: Pipeline, found: Heads, pace: Pace) -> int:
        slug = pipeline.slug
        claims = self._claim(slug, found)
        for claim in claims:
            self.pulse.hold(claim)
        left = {claim.generation: claim for claim in claims}
        try:
            if claims:
                with working_on(claims):
                    self._work(pipeline, claims, left, pace)
        except Stopped as error:
            interrupt_soon(self.store, list(left.values()), Stop(str(error)))
            raise
        except EngineGone:  # one of them may have ended it: what is left is settled as lost
            self.stopping = True
            raise
        except Exception as error:
            if self.store.db.trouble(error):
                raise  # the claims come back by their leases, or with the lock
            pause = pace.failed()
            reason = tidy(first_line(error))
            if reason != pace.reason:
                pace.reason = reason
                self._say(f"{slug}: {reason}. Its items are tried again in {pause:g} s, then later")
            give_back(self.store, list(left.values()), reason)
            return 0
        finally:
            for claim in claims:
                self.pulse.let_go(claim)
        pace.pause, pace.reason = 0.0, ""
        return len(claims)

    # --- claims ---

    def _claim(self, slug: str, found: Heads) -> list[Claim]:
        return claim_items(
            self.store, slug, found, owner=self.pulse.owner, lease=LEASE, runid=self.runid
        )

    # --- one batch ---

    def _work(
        self, pipeline: Pipeline, claims: Sequence[Claim], left: dict[int, Claim], pace: Pace
    ) -> None:
        store, slug = self.store, pipeline.slug
        kept = payloads(store, slug, [claim.dataid for claim in claims])
        done = [self._without_payload(claim) for claim in claims if claim.dataid not in kept]
        todo = [claim for claim in claims if claim.dataid in kept]
        began, clock = store.now(), time.monotonic()
        if todo:
            project = self.current.project
            sources = [source_of(store, project, each) for each in pipeline.sources]
            done += self._transform(pipeline, sources, todo, kept)
            pace.took(len(todo), time.monotonic() - clock)
        if self.ending:
            raise Stopped(ENDING)
        self._record(done, began)
        self._publish(pipeline, done, left)

    def _without_payload(self, claim: Claim) -> Done:
        if cleaned_away(self.store, claim.jobid, [claim.dataid]):
            return Done(claim, None, CLEANED)
        return Done(claim, None, "it has no payload")

    def _transform(
        self,
        pipeline: Pipeline,
        sources: Sequence[Any],
        claims: Sequence[Claim],
        kept: dict[str, str],
    ) -> list[Done]:
        """All items in one go; if that fails as a whole, one by one, so that one fails alone."""
        items = [json.loads(kept[claim.dataid]) for claim in claims]
        try:
            ran = list(
                self.engine.run_items(
                    pipeline.slug,
                    pipeline.transformations,
                    sources,
                    items,
                    chained=False,
                    limit=claims[0].time_limit,
                )
            )
            failed = next((each for each in ran if not each.ok), None)
            if failed and not self._is_alive():  # whoever uses Spark fails then
                raise EngineGone(f"Spark has ended: {reason_of_item(failed)}")
            return [Done(claim, each) for claim, each in zip(claims, ran, strict=True)]
        except EngineGone:
            raise
        except Exception as error:
            if self.ending or isinstance(error, Stopped):
                raise Stopped(ENDING) from error
            if not self._is_alive():
                raise EngineGone(f"Spark has ended: {first_line(error)}") from error
            if isinstance(error, Refused | NoDatabase | CredentialError):
                raise  # a source can't be read: that is no item's fault
            if len(claims) == 1:
                return [_broken(claims[0], pipeline, error)]
        return [
            each for claim in claims for each in self._transform(pipeline, sources, [claim], kept)
        ]

    def _record(self, done: Sequence[Done], began: float) -> None:
        steps: list[Step] = []
        for each in done:
            if each.ran is not None:
                found = steps_of(each.claim, each.ran, began)
                began = found[-1].ended or began if found else began
                steps += found
        record(self.store, steps)

    # --- results ---

    def _publish(self, pipeline: Pipeline, done: Sequence[Done], left: dict[int, Claim]) -> None:
        """Append what the good items made, and settle all."""
        store = self.store
        good = {
            each.claim: each.ran.frame
            for each in done
            if each.ran is not None and each.ran.frame is not None
        }
        for claim in store.heartbeat(list(good)) if good else ():
            good.pop(claim)
            left.pop(claim.generation, None)
        destination = self._destination(pipeline)
        [output] = self.current.plans[pipeline.slug].outputs

        def confirm() -> None:
            if lost := store.heartbeat(list(good)):
                raise stale_claim(lost)

        replaces = destination.replaces(items=True) or None
        if replaces:
            self._hold_back_older(output, good, left)
        verdicts: Sequence[Verdict] = ()
        if good:
            try:
                verdicts = destination.append(list(good.items()), confirm)
            except Exception as error:
                if self._is_nobodys_fault(error):
                    raise
                if len(done) > 1:  # each by itself, so that one fails alone
                    for each in done:
                        self._publish(pipeline, [each], left)
                    return
                verdicts = [DataflowError(reason_of(error))]
        facts, finished = [], []
        reasons = {each.claim: _reason(each) for each in done if each.claim not in good}
        for claim, verdict in zip(good, verdicts, strict=True):
            if isinstance(verdict, DataflowError):
                reasons[claim] = tidy(first_line(verdict))
                continue
            finished.append(claim)
            facts.append(
                Fact(
                    output,
                    claim.dataid,
                    verdict.location or destination.location,
                    verdict.rows,
                    verdict.bytes,
                    verdict.fingerprint,
                    schema=verdict.schema,
                    replaces=replaces,
                )
            )
        self._settle(finished, facts, reasons, left)

    def _hold_back_older(self, output: str, good: dict[Claim, Any], left: dict[int, Claim]) -> None:
        """Put those items on HOLD that would take the place of a newer one."""
        for claim in list(good):
            try:
                refuse_older(self.store, output, claim.jobid, claim.dataid)
            except Overtaken as error:
                good.pop(claim)
                left.pop(claim.generation, None)
                with suppress(StaleClaim):
                    interrupt(self.store, claim, Stop(str(error), hold=True))
                self._say(f"{claim.jobid}: item {claim.dataid} is held: {error}")

    def _is_nobodys_fault(self, error: Exception) -> bool:
        """Whether what kept items from being published is no item: then they wait."""
        if not self._is_alive():
            raise EngineGone(f"Spark has ended: {first_line(error)}") from error
        return isinstance(error, Refused | WrongUse) or not is_to_blame(error)

    def _destination(self, pipeline: Pipeline) -> Destination:
        plans, slug = self.current.plans, pipeline.slug
        return destination_of(
            self.store,
            self.current.project,
            pipeline,
            plans[slug],
            read_by_others=is_read(self.current.project, plans, slug),
            say=self._say,
        )

    def _settle(
        self,
        finished: Sequence[Claim],
        facts: Sequence[Fact],
        reasons: dict[Claim, str],
        left: dict[int, Claim],
    ) -> None:
        try:
            if finished:
                self.store.finish(finished, facts)
        except StaleClaim as error:
            self._say(str(error))
        for claim in finished:
            left.pop(claim.generation, None)
        for claim, reason in reasons.items():
            if left.pop(claim.generation, None) is None:
                continue
            try:
                self.store.fail(claim, reason)
            except StaleClaim as error:
                self._say(str(error))
            else:
                self._say(f"{claim.jobid}: item {claim.dataid} failed: {reason}")


def _reason(done: Done) -> str:
    return tidy(done.reason or (reason_of_item(done.ran) if done.ran else "it has no result"))


def _broken(claim: Claim, pipeline: Pipeline, error: Exception) -> Done:
    """An item that ended the task that worked on it."""
    reason = str(error) if isinstance(error, TransformationError) else reason_of(error)
    printed, trace = getattr(error, "printed", ""), getattr(error, "trace", "")
    name = pipeline.transformations[0]
    return Done(claim, ItemRan(None, (StepRan(name, reason, printed, trace, None, 0),)))
