"""Runs a job until nothing is left: several workers, retries; and the jobs that a host shares."""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Protocol

from ..errors import DataflowError
from ..model import GIVEN_BACK, LOST, READY, ChunkOutcome, Claim, Outcome, Stop, Tell, new_owner
from ..store.claims import Outlook, chunks_left, dial_at_zero, interrupt_soon
from ..store.store import Store
from ..util.text import typed
from .environment import JobEnvironment
from .script import NO_START, Scripts, stop_code

LOOK_SECONDS = 5.0
"""Seconds after which an idle worker looks for new chunks while somebody still works."""

HELD_BACK_CODE = 3
"""The exit code when a pause, or a concurrency of 0, keeps a job from claiming what is left."""

IDLE_CONNECTION_SECONDS = 1.0
"""Seconds after which an idle worker gives back its connection: others may wait for one."""

SIGNAL_CHECK_SECONDS = 0.2
"""Seconds within which a waiting thread notices a signal."""


class ChunkRunner(Protocol):
    """What the workers of a run need of a `Runner`."""

    store: Store
    jobid: str
    awaits_others: bool
    waits: bool

    def environment(self) -> JobEnvironment: ...
    def at_once(self) -> int: ...
    def claim(self, owner: str, k: int = 1) -> tuple[list[Claim], JobEnvironment] | None: ...
    def run(
        self,
        claims: Sequence[Claim],
        environment: JobEnvironment,
        scripts: Scripts,
        *,
        stdin_null: bool = False,
    ) -> Generator[tuple[Claim, ChunkOutcome]]: ...
    def tell(self, message: str) -> None: ...
    def tell_nothing(self) -> None: ...


def catch_up(
    runner: ChunkRunner,
    scripts: Scripts,
    *,
    workers: int,
    progress: Tell | None,
    events: str | None = None,
) -> Outcome:
    """Claim and run until nothing is left or a signal comes; failures don't stop the others.

    It waits for chunks of other workers and for retries. It waits for the end of a pause, or of a
    concurrency of 0, only if the runner `waits`. To the file `events` it appends a line of JSON for
    each claim and for each chunk that ended.
    """
    runner.environment()  # what forbids to claim is said once, not by each worker
    crew = _Crew(runner, scripts, workers, progress, events)
    crew.work()
    if not (crew.done or crew.failed or crew.lost or crew.held or scripts.why_no_more()):
        runner.tell_nothing()
        return Outcome(stop_code(scripts))
    runner.tell(crew.summary())
    code = stop_code(scripts) or int(bool(crew.failed or crew.lost))
    if crew.held and not code:
        code = HELD_BACK_CODE
    return Outcome(code, crew.done, len(crew.failed) + crew.lost)


class WorkerThreads:
    """Threads that claim chunks and run them; an error of one ends all, each after its chunk."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._changed = threading.Condition()
        self._over = False
        self._error: BaseException | None = None
        self._ended = 0
        """How many chunks have ended."""

    def _start(self, workers: int) -> list[threading.Thread]:
        # Daemons: a second Ctrl-C waits for none of them, nor does the end of Python.
        threads = [threading.Thread(target=self._guarded, daemon=True) for _ in range(workers)]
        for thread in threads:
            thread.start()
        return threads

    def _guarded(self) -> None:
        try:
            self._work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._over = True
                self._changed.notify_all()
        finally:
            self.store.db.drop()

    def _work(self) -> None:
        """What one thread does."""
        raise NotImplementedError


class _Crew(WorkerThreads):
    """The workers of one run: each has its own name and its own connection."""

    def __init__(
        self,
        runner: ChunkRunner,
        scripts: Scripts,
        workers: int,
        progress: Tell | None,
        events: str | None,
    ) -> None:
        super().__init__(runner.store)
        self.runner, self.scripts, self.workers, self.progress = runner, scripts, workers, progress
        self._events = events
        self.done = 0
        self.lost = self.interrupted = 0
        self.failed: set[str] = set()
        self._owners: list[str] = []
        self.held = ""
        """The dial that ended the run, if one did."""
        self._busy = workers
        self._last_message = ""

    def work(self) -> None:
        if self.workers == 1:
            self._work()
            return
        self.store.db.drop()  # this thread only waits: a worker may need its connection
        threads = self._start(self.workers)
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:
            self._over = True
            if isinstance(error, KeyboardInterrupt) and self.scripts.stopping is not None:
                self._leave()
            else:  # something unforeseen: no chunk is left unsettled
                for thread in threads:
                    thread.join()
            raise
        if self._error is not None:
            raise self._error

    def summary(self) -> str:
        parts = [f"done {self.done}"]
        if self.failed or not self.interrupted:
            parts.append(f"failed {len(self.failed)}")
        if self.interrupted:
            parts.append(f"interrupted {self.interrupted}")
        if self.lost:
            parts.append(f"claimed by others {self.lost}")
        if self.scripts.stopping is not None:
            parts.append("stopped by a signal")
        jobid = self.runner.jobid
        if left := chunks_left(self.store, jobid):
            parts.append(f"left {left}" + (f": {self.held}" if self.held else ""))
        following = f"; next: odf status {typed(jobid)}" if self.failed or self.lost or left else ""
        return ", ".join(parts) + following

    def _leave(self) -> None:
        """Give back the workers' claims, without waiting for the workers."""
        store, jobid = self.store, self.runner.jobid
        stop = Stop(self.scripts.why_stopping() or "stopped")
        for owner in self._owners:
            interrupt_soon(store, store._adopt(jobid, owner, 0.0), stop)

    def _work(self) -> None:
        owner = new_owner()
        self._owners.append(owner)
        while not self._over and self.scripts.why_no_more() is None:
            ended = self._ended
            taken = self.runner.claim(owner, self.runner.at_once())
            if taken:
                self._report(claimed=[claim.dataid for claim in taken[0]])
                results = self.runner.run(*taken, self.scripts, stdin_null=self.workers > 1)
                with closing(results):  # what wasn't begun is given back
                    for claim, result in results:
                        self._count(claim.dataid, result)
                        if self._over:
                            break
            # `ended` was read before the claim: a chunk that ends in between may free another one,
            # and then nobody waits.
            elif not self._wait(ended, self.store.next_change(self.runner.jobid)):
                return

    def _report(self, **event: object) -> None:
        """Append a line to the file of events, if there is one: in one write, whole or not."""
        if self._events is None:
            return
        import json

        line = json.dumps({"at": time.monotonic(), **event}) + "\n"
        with suppress(OSError), open(self._events, "ab", buffering=0) as file:  # a full disk
            file.write(line.encode())

    def _count(self, dataid: str, result: ChunkOutcome) -> None:
        self._report(ended=dataid, result=result)
        if result.status == GIVEN_BACK:
            return
        with self._changed:
            self._ended += 1
            self.failed.discard(dataid)
            if result.status == READY:
                self.done += 1
            elif result.status == LOST:
                self.lost += 1
            elif result.interrupted:
                self.interrupted += 1
            else:
                self.failed.add(dataid)
                if result.reason.startswith(NO_START):
                    self._over = True  # it would cost the other chunks too
            if self.progress:
                self.progress(self.done, len(self.failed) + self.lost)
            self._changed.notify_all()

    def _wait(self, ended: int, retry_in: float | None) -> bool:
        """Wait until a claim may succeed again; False: nothing is left."""
        with self._changed:
            self._busy -= 1
            if not self._busy and ended == self._ended and not self._is_worth_waiting(retry_in):
                self._over = True
                self._changed.notify_all()
            patience = LOOK_SECONDS
            if retry_in is not None:
                patience = min(patience, max(retry_in, SIGNAL_CHECK_SECONDS / 4))
            now = time.monotonic()
            until, rest_at = now + patience, now + IDLE_CONNECTION_SECONDS
            while not (self._over or self.scripts.why_no_more()) and ended == self._ended:
                now = time.monotonic()
                if now >= until:
                    break
                # A server has only so many connections: a worker that waits long leaves its own to
                # others.
                if now >= rest_at:
                    self.store.db.drop()
                self._changed.wait(min(until - now, SIGNAL_CHECK_SECONDS))
            self._busy += 1
            return not self._over

    def _is_worth_waiting(self, retry_in: float | None) -> bool:
        """Whether a chunk may become claimable that none of us works on; it says why, once."""
        store, jobid = self.store, self.runner.jobid
        if dial := dial_at_zero(store, jobid):
            left = chunks_left(store, jobid)
            if not left and retry_in is None:
                return False
            if not self.runner.waits:
                self.held = f"{dial}, and --wait isn't given"
                return False
            self._tell(f"Waiting: {dial}, {left} left")
            return True
        if not self.runner.awaits_others:
            return retry_in is not None
        [(taken, retries, read)] = store.db.fetch("runjob.awaited", jobid=jobid)
        parts = [
            f"{count} {what}"
            for count, what in (
                (taken, "of other workers"),
                (retries, "to retry"),
                (read, "being read"),
            )
            if count
        ]
        if parts:
            self._tell(f"Waiting for chunks: {', '.join(parts)}")
        return bool(parts)

    def _tell(self, message: str) -> None:
        if message != self._last_message:
            self._last_message = message
            self.runner.tell(message)


# The jobs that a host may run, how each stands, and when it is offered to the workers.


NOTICE_SECONDS = 0.05
"""Seconds in which the database sends at most one notice: what came later is looked for."""

REST_SECONDS = 30.0
"""Seconds for which a job that can't be run is left alone."""

LONGEST_VAIN_SECONDS = 5.0
"""Seconds, at most, until a job is tried again whose claims got nothing, though they should."""

ALONE_SECONDS = 1.0
"""Seconds between two starts of what does all of a job by itself: it takes seconds to begin."""

TODAY_SECONDS = 60.0
"""Seconds after which a job that reads `today` is tried, though nothing says that it may run."""


TellClaimed = Callable[[Sequence[str], float], object]
"""Hears which chunks were claimed, and when by `time.monotonic()`."""

TellEnded = Callable[[str, ChunkOutcome, float], object]
"""Hears how a chunk ended, and when by `time.monotonic()`."""


class ChunksFailed(DataflowError):
    """A program that runs all chunks of a job has ended, and some of them have failed."""


class JobStep(Protocol):
    """What a worker does for a job: claim something and run it; whether there was anything."""

    def __call__(
        self,
        owner: str,
        scripts: Scripts,
        claimed: TellClaimed,
        ended: TellEnded,
    ) -> bool: ...


@dataclass
class HostJob:
    """A job that this host may run.

    Args:
        jobid: Its id.
        step: Makes what a worker does for it, the first time that there is something to do.
        reads_today: Whether it reads `today`.
        is_shared: Whether Dagster may start it, too: then it waits while a run of Dagster does.
        is_alone: Whether one worker at a time does all that there is.
        begins_runs: Whether `every_minutes` begins new chunks, as of a pipeline.
    """

    jobid: str
    step: Callable[[], JobStep]
    reads_today: bool = False
    is_shared: bool = False
    is_alone: bool = False
    begins_runs: bool = False


@dataclass
class JobState:
    """How a job stands on this host."""

    job: HostJob
    outlook: Outlook | None = None
    offered: int = 0
    """How many chunks workers may still try to claim before the next look."""
    busy: int = 0
    done: int = 0
    failed: int = 0
    interrupted: int = 0
    trouble: str = ""
    """Why it can't be run, if so."""
    served_at: float = 0.0
    rest_until: float = 0.0
    vain: int = 0
    """Claims in a row that got nothing."""
    today: str | None = None
    today_at: float = 0.0
    closed_period: int | None = None
    """The period of `every_minutes` in which all has been done."""
    opens_in: float | None = None
    """Seconds until the next one, if that is waited for."""
    step: JobStep | None = None
    is_gone: bool = False
    running: dict[str, float] = field(default_factory=dict)

    @property
    def waits_for_runs(self) -> bool:
        """Whether Dagster runs hold it, and nothing says who starts it."""
        return bool(self.job.is_shared and self.outlook and self.outlook.of_runs)

    @property
    def is_finished(self) -> bool:
        """Whether nothing of it can be claimed, now or later, unless somebody acts."""
        if self.trouble:
            return not self.busy
        found = self.outlook
        if found is None or self.busy or self.offered:
            return False
        waits = found.is_queued or found.live or found.retry_in is not None
        return not waits and (bool(found.held) or not found.claimable)

    def offer(self, found: Outlook, today: str, local: float | None) -> float:
        """Offer to the workers what may be claimed; seconds until the next look at the latest.

        Args:
            found: How the job stands.
            today: The date.
            local: Seconds since 1970 by the clock on the wall; None if `every_minutes` is ignored.
        """
        now = time.monotonic()
        self.outlook, self.offered, self.opens_in = found, found.free, None
        if self.job.reads_today and not (found.claimable or found.live or found.held):
            # Nobody has judged today's chunk of a job that reads nothing else: a claim does.
            self.offered = int(self.today != today or now >= self.today_at + TODAY_SECONDS)
        if found.every_minutes and local is not None and not self.job.begins_runs:
            self._start_period(found.every_minutes * 60, local)
        if self.waits_for_runs or (self.job.is_alone and self.busy):
            self.offered = 0
        look_in = float("inf") if self.opens_in is None else self.opens_in
        if self.offered and self.rest_until > now:
            self.offered = 0
            look_in = self.rest_until - now
        if found.retry_in is not None:
            look_in = min(look_in, max(found.retry_in, NOTICE_SECONDS))
        return look_in

    def _start_period(self, seconds: float, local: float) -> None:
        """Offer chunks only until each has been done once in the period."""
        period = int(local // seconds)
        if self.closed_period == period:
            if self.offered:
                self.offered, self.opens_in = 0, (period + 1) * seconds - local
        elif not (self.offered or self.busy or (self.outlook and self.outlook.live)):
            self.closed_period = period

    def rest_in_vain(self) -> None:
        """Others were faster, or something is locked: try again, ever later."""
        self.vain += 1
        self._rest(min(LONGEST_VAIN_SECONDS, NOTICE_SECONDS * 2 ** min(self.vain, 10)))

    def rest_after_failures(self) -> None:
        """Delay the next start of a program whose chunks failed, longer after each failure."""
        self.vain += 1
        self._rest(min(REST_SECONDS, ALONE_SECONDS * 2 ** min(self.vain, 10)))

    def _rest(self, seconds: float) -> None:
        self.rest_until = time.monotonic() + seconds
