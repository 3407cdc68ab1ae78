"""The process that consumes items from the queue, with one engine for all pipelines."""

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any

from ..chunk import Result
from ..config.settings import Settings
from ..errors import CredentialError, NoDatabase, Overtaken, Refused, StaleClaim, WrongUse
from ..model import HOLD, ITEM_WORKER, Claim, Say, Stop, new_owner
from ..runner.heartbeat import Pulse
from ..store.claims import give_back, interrupt, settle_run
from ..store.item_folding import fold_age, fold_items, reclaim_room
from ..store.items import QueueHead, claim_items, has_token, payloads, queue_head
from ..store.moves import refuse_older
from ..store.store import Store, stale_claim
from ..util.system import try_lock
from ..util.text import first_line, printable, tidy, typed
from .deployment import Current
from .destinations import destination_of
from .engine import Engine, Stopped, engine_for
from .frames import Destination, Source, Verdict, is_to_blame
from .items import EngineGone, Feeder, ItemLoop, ItemResult
from .jobs import is_read
from .project import Pipeline, Project, open_project
from .sources import source_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


# Items from the queue are claimed in order, in batches that grow with the pipeline's speed.


LEASE_SECONDS = 30.0
"""Seconds after which another worker may claim an item, if this one and its machine are gone."""

FIRST_BATCH_ITEMS, MAX_BATCH_ITEMS = 20, 500
"""Items of a pipeline's first batch, and of its largest."""

BATCH_SECONDS = 0.5
"""Seconds that the transformations of a batch should take: its items become READY together."""

MAX_PAUSE_SECONDS = 30.0
"""The longest wait, in seconds, between two tries to reach a destination that is away."""

POLL_SECONDS = 0.2
"""Seconds within which a waiting thread notices that the worker ends."""

ENDING = "the server is being stopped"


class Consumer:
    """Works on the items of a project's pipelines; one thread at a time per pipeline."""

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
        """Whether to start no further batch."""
        self.ending = False
        """Whether to give back the current batches."""
        self._paces: dict[str, Pace] = {}
        self._turns = Turns(lambda: self.stopping or self.ending)

    def consume(self, slug: str) -> int:
        """Work on the next items of a pipeline; return their number."""
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
        self, consumer: Consumer, pipeline: Pipeline, head: QueueHead, pace: "Pace"
    ) -> None:
        super().__init__(consumer.store, pipeline, consumer.engine, consumer.pulse, consumer.say)
        self._consumer, self._head, self._pace = consumer, head, pace
        self.given_back = False
        """Whether the items wait because something they need can't be reached."""

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
        """Append the result of each item; verdicts only for claims that this worker still holds."""
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
        """Let the items wait, unless the worker itself can't continue."""
        if isinstance(error, EngineGone):
            # One of the items may have caused it: `settle_lost` counts that, and each is retried
            # alone.
            self._consumer.stopping = True
            raise error
        if not isinstance(error, Exception) or self.store.db.trouble(error):
            raise error  # the claims come back by their leases, or with the worker's lock
        pause = self._pace.back_off()
        reason = tidy(first_line(error))
        if reason != self._pace.reason:
            self._pace.reason = reason
            slug = self.pipeline.slug
            self.say(f"{slug}: {reason}. Its items are retried in {pause:g} s, then later")
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
        """Return the destination of the pipeline's items, as registered now."""
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
        """Put an item that would replace a newer one on HOLD; return whether it did."""
        try:
            refuse_older(self.store, self.output, claim.jobid, claim.dataid)
        except Overtaken as error:
            with suppress(StaleClaim):
                interrupt(self.store, claim, Stop(str(error), hold=True))
            self.say(f"{claim.jobid}: item {claim.dataid} is held: {error}")
            return True
        return False


class Pace:
    """How many items of a pipeline to claim per batch, and how long they wait after a failure."""

    def __init__(self) -> None:
        self.size = FIRST_BATCH_ITEMS
        self.pause = self.until = 0.0
        self.reason = ""
        """The reason for waiting that was reported last."""

    def adapt(self, items: int, seconds: float) -> None:
        """Fit the size of the next batch to how long this one took."""
        fit = int(BATCH_SECONDS * items / max(seconds, 0.001))
        self.size = max(1, min(MAX_BATCH_ITEMS, fit, self.size * 2))

    def back_off(self) -> float:
        """Wait before the next try, with one item; return the seconds."""
        self.size = 1
        self.pause = min(MAX_PAUSE_SECONDS, max(1.0, self.pause * 2))
        self.until = time.monotonic() + self.pause
        return self.pause

    def recover(self) -> None:
        """Start over with short pauses, and report the next reason to wait."""
        self.pause, self.reason = 0.0, ""


class Turns:
    """Lets batches of several pipelines run in parallel, and a suspect item alone.

    A waiting suspect goes before those that come later. Nobody waits once `over` is set.
    """

    def __init__(self, over: Callable[[], bool]) -> None:
        self._over = over
        self._changed = Condition()
        self._running = self._suspects_waiting = 0
        self._alone = False

    @contextmanager
    def take(self, *, alone: bool) -> Iterator[bool]:
        """Wait for a turn; False if `over` is set first."""
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


LOOK_SECONDS = 1.0
"""Seconds between two checks of all pipelines, if the server announces no new items."""

RECOVER_SECONDS = 5.0
"""Seconds between two checks for items whose worker is gone, or whose retry is due."""

NICENESS = 5
"""The worker's niceness above the server's: acknowledging items goes before working on them."""

THREADS = 4
"""Pipelines that are worked on in parallel."""

MIN_FOLD_SECONDS, MAX_FOLD_SECONDS = 5.0, 600.0
"""Seconds between two checks for items to fold: a fiftieth of their age, within these limits."""

MAX_LOSSES = 3
"""Workers that an item may crash, unless its policy allows more: one with others, two alone."""


class Bell:
    """Receives the names of pipelines with new items: from standard input, or from our threads."""

    def __init__(self, stdin: int = 0) -> None:
        self._ours, self._ring = os.pipe()
        os.set_blocking(self._ring, False)
        self._ends = {stdin: b"", self._ours: b""}
        self.over = False

    def ring(self, slug: str = "") -> None:
        with suppress(BlockingIOError):  # full: the reader wakes up anyway
            os.write(self._ring, slug.encode() + b"\n")

    def wait(self, seconds: float) -> set[str]:
        """Return the pipelines named within so many seconds; `over` once standard input ends."""
        ready, _, _ = select.select(list(self._ends), [], [], seconds)
        slugs: set[str] = set()
        for end in ready:
            data = os.read(end, 65536)
            if not data:
                self.over = True
                self._ends.pop(end)
            *lines, rest = (self._ends.get(end, b"") + data).split(b"\n")
            if end in self._ends:
                self._ends[end] = rest
            slugs.update(line.decode(errors="replace") for line in lines if line)
        return slugs


class ItemWorker:
    """Gives each pipeline's items to a thread, as long as there are any."""

    def __init__(self, consumer: Consumer, bell: Bell, *, say: Say) -> None:
        self.consumer, self.bell, self._say = consumer, bell, say
        self.code = 0
        self.lost = ""
        """Why the current batches are lost, if they are."""
        self._busy: set[str] = set()
        self._folding: Future[None] | None = None
        self._fold_at = 0.0
        self._tidied = False
        self._unfolded = ""
        """Why items weren't folded the last time."""
        self._again: set[str] = set()
        self._lock = threading.Lock()
        self._away = False

    def run(self) -> int:
        """Work until the bell is over; return the exit code."""
        consumer = self.consumer
        looked = recovered = 0.0
        with ThreadPoolExecutor(THREADS + 1, thread_name_prefix="items") as pool:
            while not (self.bell.over or consumer.ending or self.code):
                due = self.bell.wait(LOOK_SECONDS)
                now = time.monotonic()
                if now - looked >= LOOK_SECONDS:
                    looked = now
                    recover = now - recovered >= RECOVER_SECONDS
                    recovered = now if recover else recovered
                    due |= self._look(recover)
                for slug in due & consumer.current.taking.keys():
                    self._submit(pool, slug)
                if now >= self._fold_at and (self._folding is None or self._folding.done()):
                    self._folding = pool.submit(self._fold)
            consumer.stopping = True
        return self.code

    def _look(self, recover: bool) -> set[str]:
        store, current = self.consumer.store, self.consumer.current
        try:
            current.refresh()
            for slug in current.taking if recover else ():
                store.recover(slug)
        except Exception as error:
            self._say_away(error)
        return set(current.taking)

    def _submit(self, pool: ThreadPoolExecutor, slug: str) -> None:
        with self._lock:
            if slug in self._busy:
                self._again.add(slug)
                return
            self._busy.add(slug)
        pool.submit(self._consume, slug)

    def _consume(self, slug: str) -> None:
        more = 0
        try:
            more = self.consumer.consume(slug)
            self._away = False
        except Stopped:
            pass
        except EngineGone as error:
            self._say(str(error))
            self.code, self.lost = 1, str(error)
        except Exception as error:
            self._say_away(error)
            self.consumer.store.db.drop()
        finally:
            with self._lock:
                self._busy.discard(slug)
                again = slug in self._again
                self._again.discard(slug)
            if more or again or self.code:
                self.bell.ring(slug)

    def _fold(self) -> None:
        """Fold what is old enough; the longer that takes, the later it is done again."""
        store, began, pause = self.consumer.store, time.monotonic(), MAX_FOLD_SECONDS
        try:
            ages = [fold_age(store, slug) for slug in self.consumer.current.taking]
            pause = min([pause, *(age / 50 for age in ages)])
            self._tidied = not fold_items(store) and self._tidied
            # Once more, until all is given back: after the last item, no fold would be requested.
            self._tidied = self._tidied or reclaim_room(store)
            self._unfolded = ""
        except Exception as error:
            if self._unfolded != (why := first_line(error)):
                self._say(f"Finished items can't be folded: {why}")
            self._unfolded = why
            store.db.drop()
        took = time.monotonic() - began
        self._fold_at = time.monotonic() + max(MIN_FOLD_SECONDS, pause, 10 * took)

    def _say_away(self, error: Exception) -> None:
        if not self._away:
            self._say(f"The items wait: {first_line(error)}")
        self._away = True


def serve_items(settings: Settings, project: Project, folder: Path, *, say: Say) -> int:
    """Consume the items of a project until standard input ends; return the exit code.

    At that point, the current batches are finished; on TERM, they are given back. `folder` has the
    last code that the server found valid.
    """
    from ..spark.session import spark_session

    os.nice(NICENESS)
    store, bell = open_project(settings), Bell()
    runid = f"items {os.uname().nodename} {_digest(project.root)}"
    ended: list[int] = []

    def end(number: int, _: Any = None) -> None:
        ended.append(number)
        consumer.ending = True
        bell.ring()

    @cache
    def session() -> "SparkSession":
        return spark_session(
            slots(settings), app=f"odf serve {project.name}", settings=settings, short=True
        )

    engine = engine_for(
        project, session, say=say, stopping=lambda: "the server's end" if ended else None
    )
    engine.start()
    current = Current(store, project, say=say, folder=folder)
    with Pulse(store, new_owner() + ITEM_WORKER, lease=LEASE_SECONDS, say=say) as pulse:
        consumer = Consumer(
            store, current, engine, pulse, runid=runid, is_alive=engine.is_alive, say=say
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, end)
        with alone(project.root, bell, say) as is_ours:
            if not is_ours:
                return 0
            code = _consume_all(consumer, bell, say)
    engine.close()
    engine.end()
    store.close()
    return code


def _consume_all(consumer: Consumer, bell: Bell, say: Say) -> int:
    """Settle what the previous worker left, get ready, and work until the server ends."""
    store, current = consumer.store, consumer.current
    settle_lost(store, consumer.runid, "the worker ended", say=say)
    current.refresh()
    consumer.engine.warm()
    os.write(sys.stdout.buffer.fileno(), json.dumps({"state": "ready"}).encode() + b"\n")
    say(_readiness(store, current))
    worker = ItemWorker(consumer, bell, say=say)
    code = worker.run()
    if worker.lost:
        with suppress(Exception):  # otherwise the next worker does it
            settle_lost(store, consumer.runid, worker.lost, say=say)
    return code


def runs_here(settings: Settings) -> bool:
    """Whether the tasks of a project run on this machine, with the packages installed here."""
    from ..spark.settings import MASTER, REMOTE, given_conf, is_local

    given = given_conf(settings, None)
    return REMOTE not in given and is_local(given.get(MASTER, "local"))


def slots(settings: Settings) -> dict[str, str]:
    """Return the setting that gives each pipeline a Spark task, unless a master is set.

    With fewer cores than busy pipelines, one would wait for a slow item of another.
    """
    from ..spark.settings import MASTER, REMOTE, given_conf

    if given_conf(settings, None).keys() & {MASTER, REMOTE}:
        return {}
    return {MASTER: f"local[{max(THREADS, os.cpu_count() or 1)}]"}


def settle_lost(store: Store, runid: str, why: str, *, say: Say) -> None:
    """Settle the items of a worker that ended: all may be retried, each alone.

    An item that crashes its worker twice when alone is held, even without a policy; no other is.
    """
    for chunk in settle_run(
        store,
        runid,
        why=why,
        canceled=False,
        who="odf serve",
        max_losses=MAX_LOSSES,
        blame_together=False,
    ):
        if chunk.status == HOLD:
            say(
                f"{chunk.jobid}: item {chunk.dataid} is held: {chunk.reason}. Once it is fixed, "
                f"run: odf resubmit {typed(chunk.jobid)} {chunk.dataid}"
            )


@contextmanager
def alone(root: Path, bell: Bell, say: Say) -> Iterator[bool]:
    """Wait until no other worker of this machine consumes the project's items; False: it is over.

    This keeps items in order, and tells the next worker that the previous one's claims are lost.
    """
    folder, said = os.open(root, os.O_RDONLY | os.O_DIRECTORY), False
    try:
        while not try_lock(folder):
            if not said:
                say("Another worker consumes this project's items: this one is on standby")
            said = True
            bell.wait(0.2)
            if bell.over:
                yield False
                return
        yield True
    finally:
        os.close(folder)


def _readiness(store: Store, current: Current) -> str:
    """Describe which pipelines accept items now, and which of them lack a token."""
    if not (taking := sorted(current.taking)):
        return "No pipeline takes items: no transformation has a parameter `stream`"
    shut = [slug for slug in taking if not has_token(store, slug)]
    more = "".join(f"; {printable(slug)} needs `odf token {typed(slug)}` first" for slug in shut)
    return f"Ready: items of {printable(', '.join(taking))} are processed as they arrive{more}"


def _digest(root: Path) -> str:
    return sha256(str(root).encode()).hexdigest()[:12]
