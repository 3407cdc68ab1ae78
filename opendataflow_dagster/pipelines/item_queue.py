"""Items from the queue: claimed in their order, in batches as large as the pipeline is fast."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from threading import Condition
from typing import Any, NamedTuple

from ..chunk import Result
from ..errors import (
    CredentialError,
    NoDatabase,
    Overtaken,
    Refused,
    StaleClaim,
    WrongUse,
)
from ..model import Claim, Say, Stop
from ..runner.heartbeat import Pulse
from ..store.claims import give_back, interrupt
from ..store.items import payloads
from ..store.moves import refuse_older
from ..store.store import Store, stale_claim
from ..util.text import first_line, tidy
from .deployment import Current
from .destinations import destination_of
from .endpoints import Destination, Source, Verdict, is_to_blame
from .engine import Engine, Stopped
from .items import EngineGone, Feeder, ItemLoop, ItemResult
from .jobs import is_read
from .project import Pipeline
from .sources import source_of

LEASE_SECONDS = 30.0
"""Seconds after which another worker may claim an item, if this one and its machine are gone."""

FIRST_BATCH_ITEMS, MAX_BATCH_ITEMS = 20, 500
"""Items of a pipeline's first batch, and of any."""

BATCH_SECONDS = 0.5
"""Seconds that the transformations of a batch should take: its items are READY together."""

MAX_PAUSE_SECONDS = 30.0
"""Seconds between two tries to reach a destination that is away, at most."""

POLL_SECONDS = 0.2
"""Seconds in which a waiting thread notices that the worker ends."""

ENDING = "the server is being stopped"


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
        self.runid, self.is_alive, self.say = runid, is_alive, say
        self.stopping = False
        """Whether no other batch may begin."""
        self.ending = False
        """Whether the current batches are to be given back."""
        self._paces: dict[str, Pace] = {}
        self._turns = Turns(lambda: self.stopping or self.ending)

    def consume(self, slug: str) -> int:
        """Work on the next items of a pipeline; their number."""
        pace = self._paces.setdefault(slug, Pace())
        pipeline, code = self.current.serving(slug)
        if self.stopping or pipeline is None or time.monotonic() < pace.until:
            return 0
        head = queue_head(self.store, slug, pace.size)
        with self._turns.take(alone=head.alone) as is_ours:
            if not is_ours or self.stopping:
                return 0
            with self.engine.serving(code):
                feeder = QueuedItems(self, pipeline, head, pace)
                count = ItemLoop(feeder).run_batch()
                if not feeder.given_back:
                    pace.recover()
                return count


class QueuedItems(Feeder):
    """One batch of items from the queue: each is published and settled by itself."""

    def __init__(
        self, consumer: Consumer, pipeline: Pipeline, head: "QueueHead", pace: "Pace"
    ) -> None:
        super().__init__(consumer.store, pipeline, consumer.engine, consumer.pulse, consumer.say)
        self._consumer, self._head, self._pace = consumer, head, pace
        self.given_back = False
        """Whether the items wait, since something that they need can't be reached."""

    @property
    def output(self) -> str:
        [output] = self._consumer.current.plans[self.pipeline.slug].outputs
        return output

    def claim(self) -> list[Claim]:
        return claim_items(
            self.store,
            self.pipeline.slug,
            self._head,
            owner=self.pulse.owner,
            lease=LEASE_SECONDS,
            runid=self._consumer.runid,
        )

    def decode(self, claims: Sequence[Claim]) -> Mapping[str, Any]:
        texts = payloads(self.store, self.pipeline.slug, [claim.dataid for claim in claims])
        return {dataid: json.loads(text) for dataid, text in texts.items()}

    def sources(self, claims: Sequence[Claim]) -> Sequence[Source]:
        project = self._consumer.current.project
        return [source_of(self.store, project, slug) for slug in self.pipeline.sources]

    def publish(self, results: Sequence[ItemResult]) -> Mapping[Claim, Verdict]:
        """Append what each item made; verdicts on those whose claims this worker still has."""
        frames = {result.claim: result.ran.frame for result in results if result.ran}
        for claim in self.store.heartbeat(list(frames)):
            del frames[claim]
        destination = self.destination()
        replaces = destination.replaces(items=True) or None
        if replaces:
            for claim in list(frames):
                if self._is_held_back(claim):
                    del frames[claim]
        if not frames:
            return {}

        def confirm() -> None:
            if lost := self.store.heartbeat(list(frames)):
                raise stale_claim(lost)

        verdicts = destination.append(list(frames.items()), confirm)
        return {
            claim: verdict._replace(
                location=verdict.location or destination.location, replaces=replaces
            )
            if isinstance(verdict, Result)
            else verdict
            for claim, verdict in zip(frames, verdicts, strict=True)
        }

    def interruption(self, error: BaseException) -> Stop | None:
        return Stop(str(error)) if isinstance(error, Stopped) else None

    def give_up(self, error: BaseException, claims: Sequence[Claim]) -> None:
        """Let the items wait, unless the worker itself can't work any more."""
        if isinstance(error, EngineGone):
            # One of the items may have ended it: `settle_lost` counts that, and each goes alone.
            self._consumer.stopping = True
            raise error
        if not isinstance(error, Exception) or self.store.db.trouble(error):
            raise error  # the claims come back by their leases, or with the worker's lock
        pause = self._pace.back_off()
        reason = tidy(first_line(error))
        if reason != self._pace.reason:
            self._pace.reason = reason
            slug = self.pipeline.slug
            self.say(f"{slug}: {reason}. Its items are tried again in {pause:g} s, then later")
        self.given_back = True
        give_back(self.store, claims, reason)

    def stopping(self) -> str | None:
        return ENDING if self._consumer.ending else None

    def after_transform(self, results: Sequence[ItemResult], seconds: float) -> None:
        self._pace.adapt(len(results), seconds)

    def raise_if_engine_died(self, why: str) -> None:
        if not self._consumer.is_alive():
            raise EngineGone(f"Spark has ended: {why}")

    def raise_if_blameless(self, error: Exception, *, publishing: bool) -> None:
        if not publishing and (self._consumer.ending or isinstance(error, Stopped)):
            raise Stopped(ENDING) from error
        self.raise_if_engine_died(first_line(error))
        if publishing:
            is_blameless = isinstance(error, Refused | WrongUse) or not is_to_blame(error)
        else:  # a source can't be read
            is_blameless = isinstance(error, Refused | NoDatabase | CredentialError)
        if is_blameless:
            raise error

    def report_failure(self, claim: Claim, reason: str) -> None:
        self.say(f"{claim.jobid}: item {claim.dataid} failed: {reason}")

    def destination(self) -> Destination:
        """Where the pipeline's items go, as it is registered now."""
        current, slug = self._consumer.current, self.pipeline.slug
        return destination_of(
            self.store,
            current.project,
            self.pipeline,
            current.plans[slug],
            read_by_others=is_read(current.project, current.plans, slug),
            say=self.say,
        )

    def _is_held_back(self, claim: Claim) -> bool:
        """Put an item on HOLD that would replace a newer one; whether that was so."""
        try:
            refuse_older(self.store, self.output, claim.jobid, claim.dataid)
        except Overtaken as error:
            with suppress(StaleClaim):
                interrupt(self.store, claim, Stop(str(error), hold=True))
            self.say(f"{claim.jobid}: item {claim.dataid} is held: {error}")
            return True
        return False


# --- which items come next ---


class QueueHead(NamedTuple):
    """The items at the head of a queue, and whether something that is no item is among them.

    An item that was RUNNING when a worker was lost is a suspect, and goes `alone`.
    """

    dataids: tuple[str, ...]
    has_runs: bool
    alone: bool = False


def queue_head(store: Store, slug: str, count: int) -> QueueHead:
    """The next items, at most so many; a chunk that is no item is for `odf pipeline run`."""
    db = store.db
    db.insist(lambda: db.run("consuming.sort", jobid=slug))
    rows, _ = db.insist(lambda: db.run("consuming.heads", jobid=slug, k=count))
    has_runs = bool(rows and rows[0][2])
    not_lost = tuple(row[0] for row in takewhile(lambda row: not row[1], rows))
    if rows and not not_lost:
        return QueueHead((rows[0][0],), has_runs, alone=True)
    return QueueHead(not_lost, has_runs)


def claim_items(store: Store, slug: str, head: QueueHead, **how: Any) -> list[Claim]:
    """Claim the items at the head of the queue."""
    dataids = head.dataids
    if not (head.has_runs or head.alone):
        claims = store.claim(slug, k=len(dataids), **how) if dataids else []
    else:  # by name, so that neither another item nor a run comes in their place
        claims = [claim for dataid in dataids for claim in store.claim(slug, only=dataid, **how)]
    items = {*dataids, *payloads(store, slug, [claim.dataid for claim in claims])}
    runs = [claim for claim in claims if claim.dataid not in items]
    if runs:
        give_back(store, runs, "it is for `odf pipeline run`")
    return [claim for claim in claims if claim.dataid in items]


class Pace:
    """How many items of a pipeline to claim at once, and how long they wait after a failure."""

    def __init__(self) -> None:
        self.size = FIRST_BATCH_ITEMS
        self.pause = self.until = 0.0
        self.reason = ""
        """Why its items wait, as it was said last."""

    def adapt(self, items: int, seconds: float) -> None:
        """Fit the next batch to how long this one took."""
        fit = int(BATCH_SECONDS * items / max(seconds, 0.001))
        self.size = max(1, min(MAX_BATCH_ITEMS, fit, self.size * 2))

    def back_off(self) -> float:
        """Try again later, with one item; after how many seconds."""
        self.size = 1
        self.pause = min(MAX_PAUSE_SECONDS, max(1.0, self.pause * 2))
        self.until = time.monotonic() + self.pause
        return self.pause

    def recover(self) -> None:
        """Begin with short pauses again, and say the next reason to wait."""
        self.pause, self.reason = 0.0, ""


class Turns:
    """Lets batches of several pipelines run at once, and a suspect alone.

    A suspect that waits goes before those that come later. Nobody waits once it is `over`.
    """

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over
        self._changed = Condition()
        self._running = self._suspects_waiting = 0
        self._alone = False

    @contextmanager
    def take(self, *, alone: bool) -> Iterator[bool]:
        """A turn, once it has come; False if it is over before that."""
        with self._changed:
            is_ours = self._wait(alone)
        try:
            yield is_ours
        finally:
            with self._changed:
                if is_ours:
                    self._running -= 1
                    self._alone = False
                self._changed.notify_all()

    def _wait(self, alone: bool) -> bool:
        self._suspects_waiting += alone
        try:
            while self._alone or (self._running if alone else self._suspects_waiting):
                if self._over():
                    return False
                self._changed.wait(POLL_SECONDS)
        finally:
            self._suspects_waiting -= alone
        self._running += 1
        self._alone = alone
        return True
