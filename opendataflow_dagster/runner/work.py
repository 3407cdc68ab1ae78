"""Shares the workers of a host among jobs, and stays: through pauses, retries and outages.

Each worker is a thread that claims for one job after another, as the workers of `odf run --all` do.
This thread alone looks at the tables for all of them, by one statement: when somebody tells that
chunks have become claimable, when a worker has nothing to do, and once a second whatever happens.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from traceback import format_exception
from typing import Any, Protocol

from ..errors import DataflowError
from ..model import GIVEN_BACK, LEASE_SECONDS, LOST, READY, ChunkOutcome, Outcome, new_owner
from ..store.claims import Outlook, Watcher, look
from ..store.database import BRIEF_WAIT_SECONDS
from ..store.store import Store
from ..util.text import first_line
from .catch_up import (
    ALONE_SECONDS,
    HELD_BACK_CODE,
    NOTICE_SECONDS,
    REST_SECONDS,
    SIGNAL_CHECK_SECONDS,
    ChunksFailed,
    HostJob,
    JobState,
    WorkerThreads,
)
from .script import NO_START, Scripts, stop_code

POLL_SECONDS = 1.0
"""Seconds between two looks at the tables, at most: polling is the truth, notices are hints."""

LOOK_SPACING_SECONDS = 0.01
"""Seconds between two looks, at least; and as long as the last one took."""

CLOCK_SECONDS = 30.0
"""Seconds after which the database's clock is read again."""

FOLLOW_SECONDS = 2 * NOTICE_SECONDS
"""Seconds after a notice for which looks follow it, for the notices that weren't sent."""

IDLE_CONNECTION_SECONDS = 30.0
"""Seconds after which an idle worker gives back its connection."""

RECOVER_SECONDS = 30.0
"""Seconds after which the lost claims of all jobs are recovered."""

DUE_SECONDS = 5.0
"""Seconds after which it is checked whether a pipeline should start a run."""

STEADY_SECONDS = LEASE_SECONDS / 3 + 5
"""Seconds after an outage for which no claim is taken for lost: its owner is about to renew it."""

OUTAGE_SECONDS = 86400.0
"""Seconds for which the result of a script waits for a database that is away."""

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 5.0
"""Seconds until a retry while the database is down: at first, and at most."""


class Listener(Protocol):
    """Receives the events of the work."""

    def event(self, name: str, **fields: Any) -> None: ...
    def draw(self, jobs: Sequence[JobState], line: str) -> None: ...


class Workshop(WorkerThreads):
    """The workers of this host, and the jobs that they run.

    Args:
        store: The tables.
        scripts: Runs scripts, and knows of signals; it drains.
        listener: Is told what happens.
        workers: How many chunks run at once.
        until_idle: Whether it ends when nothing can be claimed any more.
        drain_seconds: How long scripts may run on after the first signal; None: to their ends.
        reload: Gives the jobs anew if they have changed, now and then.
    """

    def __init__(
        self,
        store: Store,
        scripts: Scripts,
        listener: Listener,
        *,
        workers: int,
        until_idle: bool = False,
        drain_seconds: float | None = None,
        reload: Callable[[], Sequence[HostJob] | None] = lambda: None,
    ) -> None:
        super().__init__(store)
        self.scripts, self.listener = scripts, listener
        self.workers, self.until_idle = workers, until_idle
        self.drain_seconds, self._reload = drain_seconds, reload
        self.jobs: dict[str, JobState] = {}
        self._idle, self._alive = 0, workers
        self._looks = self._ended_at_look = 0
        self._look_at = self._free_at = 0.0
        self._follow_until = 0.0
        self._clock, self._clock_at = 0.0, float("-inf")
        self._away_since: float | None = None
        self._back_at = float("-inf")
        self._pause = FIRST_PAUSE_SECONDS
        self._said_trouble = ""
        self._draining_at: float | None = None
        self._stopping_at: float | None = None
        self._recovery = threading.Event()
        self._recover_at = 0.0
        self._bell, self._doorbell = os.pipe()
        # Workers ring, and the main thread hears it while it waits for the database's notices, too:
        # a condition variable can't be waited for together with a connection.
        os.set_blocking(self._bell, False)
        os.set_blocking(self._doorbell, False)

    def run(self, jobs: Sequence[HostJob]) -> Outcome:
        """Work until a signal comes, or with `until_idle` until nothing can be claimed any more."""
        self.store.db.patience = OUTAGE_SECONDS
        self.set_jobs(jobs)
        self._start(self.workers)
        threading.Thread(target=self._keep, daemon=True).start()
        try:
            with Watcher(self.store) as watcher:
                self._watch(watcher)
        finally:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            self._recovery.set()
        if self._error is not None:
            raise self._error
        return self._outcome()

    def set_jobs(self, jobs: Sequence[HostJob]) -> None:
        """Run these jobs from now on; what runs of others is finished."""
        named = {job.jobid: job for job in jobs}
        with self._changed:
            for jobid, state in self.jobs.items():
                state.is_gone = jobid not in named
            for jobid, job in named.items():
                state = self.jobs.setdefault(jobid, JobState(job))
                if state.job is not job:
                    state.job, state.step, state.trouble, state.rest_until = job, None, "", 0.0
            self._look_at = 0.0

    # --- the main thread: looks, signals, and the end ---

    def _watch(self, watcher: Watcher) -> None:
        while not self._is_over():
            self._heed_signals()
            now = time.monotonic()
            if now >= self._due() and self._draining_at is None:
                self._look(now)
            self.listener.draw([job for job in self.jobs.values() if not job.is_gone], self._line())
            left = min(max(0.0, self._due() - time.monotonic()), SIGNAL_CHECK_SECONDS)
            if self._draining_at is not None:
                left = NOTICE_SECONDS
            if watcher.wait(left, [self._bell]):
                self._follow_until = time.monotonic() + FOLLOW_SECONDS
                self._ask_for_look()
            self._hear_bell()
            if self._draining_at is None and self._away_since is None:
                self._read_jobs_again()

    def _read_jobs_again(self) -> None:
        if (jobs := self._reload()) is not None:
            self.set_jobs(jobs)

    def _due(self) -> float:
        with self._changed:
            return max(self._look_at, self._free_at)

    def _is_over(self) -> bool:
        with self._changed:
            if self._over:
                return True
            if self._draining_at is not None:
                return not self._alive or self._is_too_late()
            return self.until_idle and self._is_finished()

    def _is_finished(self) -> bool:
        is_fresh = self._ended_at_look == self._ended and self._away_since is None and self._looks
        return bool(is_fresh) and all(
            job.is_finished for job in self.jobs.values() if not job.is_gone
        )

    def _is_too_late(self) -> bool:
        """Whether workers that were to stop at once wait for something that doesn't come."""
        if self._stopping_at is None:
            return False
        left = self._stopping_at + self.scripts.stop_grace + BRIEF_WAIT_SECONDS - time.monotonic()
        if left > 0:
            return False
        self.listener.event("left", workers=self._alive)
        return True

    def _heed_signals(self) -> None:
        now = time.monotonic()
        if self._draining_at is None and (why := self.scripts.why_no_more()):
            self._draining_at = now
            with self._changed:
                self._changed.notify_all()
            self.listener.event("draining", why=why, running=self._running())
        if self._draining_at is None:
            return
        limit = self.drain_seconds
        if limit is not None and now > self._draining_at + limit:
            self.scripts.stop(self.scripts.draining or 15)
        if self._stopping_at is None and (why := self.scripts.why_stopping()):
            self._stopping_at = now
            self.listener.event("stopping", why=why, running=self._running())

    def _running(self) -> int:
        with self._changed:
            return sum(job.busy for job in self.jobs.values())

    def _look(self, now: float) -> None:
        """See what every job could claim, and offer it to the workers."""
        with self._changed:
            self._look_at = now + POLL_SECONDS
            if now < self._follow_until:
                self._look_at = now + NOTICE_SECONDS
            ended = self._ended
            jobs = {jobid: job for jobid, job in self.jobs.items() if not job.is_gone}
        db = self.store.db
        try:
            self._leave_replaced_file()
            clock = self._read_clock(now)
            today = self.store.today(clock)
            asked = {jobid: today if job.job.reads_today else None for jobid, job in jobs.items()}
            found = look(db, asked)
        except Exception as error:
            self._miss(error)
            return
        self._note_back()
        took = time.monotonic() - now
        # A look takes at most half of the time, however slow the database is.
        self._free_at = now + took + max(LOOK_SPACING_SECONDS, took)
        with self._changed:
            self._looks += 1
            self._ended_at_look = ended
            local = clock + self._zone_offset(clock)
            for jobid, job in jobs.items():
                look_in = job.offer(found[jobid], today, None if self.until_idle else local)
                self._look_at = min(self._look_at, time.monotonic() + look_in)
            offered = sum(job.offered for job in jobs.values())
            if offered and self._idle:
                self._changed.notify(min(offered, self._idle))
        self._ask_to_recover(found)

    def _leave_replaced_file(self) -> None:
        """Reopen the database if its file was replaced: an open connection would never see that."""
        if self.store.db.is_replaced():
            self.store.db.drop()

    def _read_clock(self, now: float) -> float:
        """The database's clock, read now and then."""
        if now - self._clock_at > CLOCK_SECONDS:
            self._clock, self._clock_at = float(self.store.db.run("claims.now")[0][0]), now
        return self._clock + now - self._clock_at

    def _zone_offset(self, clock: float) -> float:
        """Return how many seconds the configured time zone is ahead of UTC."""
        if not self.store.timezone:
            return time.localtime(clock).tm_gmtoff
        from datetime import datetime

        from ..util.times import zone_called

        offset = datetime.fromtimestamp(clock, zone_called(self.store.timezone)).utcoffset()
        return offset.total_seconds() if offset else 0.0

    def _miss(self, error: Exception) -> None:
        """The tables can't be read: say so once, and try again ever later."""
        db = self.store.db
        trouble = db.trouble(error)
        if not (trouble or isinstance(error, (DataflowError, *db.failures))):
            raise error
        if trouble in ("race", "locked"):
            return
        if trouble == "gone":
            db.drop()
        if self._away_since is None:
            self._away_since = time.monotonic()
            self.listener.event("away", why=first_line(error))
        with self._changed:
            for job in self.jobs.values():
                job.offered = 0
            self._look_at = time.monotonic() + self._pause
        self._pause = min(LONGEST_PAUSE_SECONDS, self._pause * 2)

    def _note_back(self) -> None:
        if self._away_since is None:
            return
        self._back_at = time.monotonic()
        self.listener.event("back", seconds=round(self._back_at - self._away_since, 1))
        self._away_since, self._pause = None, FIRST_PAUSE_SECONDS

    def _ask_to_recover(self, found: Mapping[str, Outlook]) -> None:
        """Let lost claims be settled, and retries be granted, if any are due."""
        now = time.monotonic()
        is_steady = now - self._back_at > STEADY_SECONDS
        is_due = any(
            (job.retry_in is not None and job.retry_in <= 0)
            or (is_steady and job.lease_in is not None and job.lease_in <= 0)
            or job.is_queued
            for job in found.values()
        ) or (now >= self._recover_at - RECOVER_SECONDS + DUE_SECONDS and self._has_due_runs())
        if is_due or (is_steady and now >= self._recover_at):
            self._recover_at = now + RECOVER_SECONDS
            self._recovery.set()

    def _has_due_runs(self) -> bool:
        """Whether a pipeline may have to start a run: it has the dial, and nothing runs."""
        return any(
            job.job.begins_runs and job.outlook and job.outlook.every_minutes and job.is_finished
            for job in self.jobs.values()
        )

    def _keep(self) -> None:
        """The thread that recovers: it may wait for locks, and fill queues for seconds."""
        while self._recovery.wait() and not self._over:
            self._recovery.clear()
            try:
                self._leave_replaced_file()
                self._begin_runs()
                for chunk in self.store.recover(who=f"odf work on {os.uname().nodename}"):
                    self.listener.event(
                        "recovered",
                        job=chunk.jobid,
                        dataid=chunk.dataid,
                        status=str(chunk.status),
                        why=chunk.reason,
                    )
            except Exception as error:
                if self.store.db.trouble(error) == "gone":
                    self.store.db.drop()
                else:
                    self._say_trouble(f"Can't check for lost claims: {first_line(error)}")
            self._ask_for_look()
            time.sleep(NOTICE_SECONDS)
        self.store.db.drop()

    def _begin_runs(self) -> None:
        """Begin the runs that are due of pipelines that wait for no other."""
        jobids = [
            jobid
            for jobid, job in list(self.jobs.items())
            if job.job.begins_runs and not job.is_gone
            if job.outlook and job.outlook.every_minutes and not self.store.plan(jobid).reads
        ]
        if not jobids or self.until_idle:
            return
        from ..store.items import begin_due_runs

        begin_due_runs(self.store, jobids)

    def _say_trouble(self, line: str) -> None:
        if line != self._said_trouble:
            self._said_trouble = line
            self.listener.event("message", text=line)

    def _line(self) -> str:
        """How the whole stands, for a person."""
        if self._away_since is not None:
            return "the database is down"
        if self._stopping_at is not None:
            return "stopping"
        if self._draining_at is not None:
            return "draining: running scripts finish; a second signal stops them"
        return ""

    def _ask_for_look(self) -> None:
        """Let the main thread look as soon as it may."""
        with self._changed:
            if self._away_since is None:
                self._look_at = 0.0
        with suppress(BlockingIOError):  # it has been rung often enough
            os.write(self._doorbell, b".")

    def _hear_bell(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._bell, 65536)

    def _outcome(self) -> Outcome:
        jobs = [job for job in self.jobs.values() if not job.is_gone]
        done, failed = (sum(getattr(job, name) for job in jobs) for name in ("done", "failed"))
        code = stop_code(self.scripts)
        if not code and self.until_idle and self._draining_at is None:
            held = any(job.outlook and job.outlook.held and job.outlook.claimable for job in jobs)
            if failed or any(job.trouble for job in jobs):
                code = 1
            elif held:
                code = HELD_BACK_CODE
        return Outcome(code, done, failed)

    # --- the workers ---

    def _guarded(self) -> None:
        try:
            super()._guarded()
        finally:
            with self._changed:
                self._alive -= 1
            self._ask_for_look()

    def _work(self) -> None:
        owner = new_owner()
        while (job := self._next_job()) is not None:
            looks = self._looks
            took: bool | None = None
            try:
                took = self._take_step(job, owner)
            except ChunksFailed as error:
                self._count_program(job, error)
            except Exception as error:
                self._meet(job, error)
            with self._changed:
                job.busy -= 1
                if took:
                    job.vain = 0
                    if job.job.is_alone:
                        job.rest_until = time.monotonic() + ALONE_SECONDS
                elif looks == self._looks:
                    job.offered = 0
                if took is False:
                    job.trouble = ""
                    if job.outlook and job.outlook.free:
                        job.rest_in_vain()

    def _count_program(self, job: JobState, error: ChunksFailed) -> None:
        with self._changed:
            job.rest_after_failures()
        self.listener.event("message", job=job.job.jobid, text=str(error))

    def _next_job(self) -> JobState | None:
        """Return the next job that has something to claim; None if there is none."""
        with self._changed:
            has_asked = False
            while not self._over and self.scripts.why_no_more() is None:
                if job := self._choose():
                    job.busy += 1
                    job.offered -= 1
                    job.served_at = time.monotonic()
                    return job
                self._idle += 1
                if not has_asked:
                    has_asked = True
                    self._ask_for_look()
                rested = self._changed.wait(IDLE_CONNECTION_SECONDS)
                self._idle -= 1
                if not rested:
                    self.store.db.drop()
        return None

    def _choose(self) -> JobState | None:
        """Of the jobs that may claim, the one with the fewest workers, and then the longest wait.

        So a job with few chunks doesn't wait behind one with thousands.
        """
        now = time.monotonic()
        ready = [
            job
            for job in self.jobs.values()
            if job.offered > 0
            and not job.is_gone
            and job.rest_until <= now
            and not (job.job.is_alone and job.busy)
        ]
        return min(ready, key=lambda job: (job.busy, job.served_at), default=None)

    def _take_step(self, job: JobState, owner: str) -> bool:
        self._leave_replaced_file()
        if job.job.reads_today:
            job.today, job.today_at = self.store.today(), time.monotonic()
        step = job.step
        if step is None:
            step = job.job.step()
            with self._changed:
                job.step = step

        def claimed(dataids: Sequence[str], at: float) -> None:
            with self._changed:
                job.offered = max(0, job.offered - (len(dataids) - 1))
                job.running |= dict.fromkeys(dataids, at)
            self.listener.event("claimed", job=job.job.jobid, dataids=list(dataids))

        def ended(dataid: str, result: ChunkOutcome, at: float) -> None:
            self._count(job, dataid, result, at)

        return step(owner, self.scripts, claimed, ended)

    def _count(self, job: JobState, dataid: str, result: ChunkOutcome, at: float) -> None:
        with self._changed:
            since = job.running.pop(dataid, None)
            if result.status == GIVEN_BACK:
                return
            self._ended += 1
            if result.status == READY:
                job.done += 1
                job.trouble = ""
            elif result.interrupted:
                job.interrupted += 1
            else:
                job.failed += 1
            has_idle = self._idle > 0
            if self._away_since is not None:  # it has been settled: the database is back
                self._look_at = 0.0
            if result.reason.startswith(NO_START):  # it would cost the other chunks too
                job.trouble, job.rest_until = result.reason, time.monotonic() + REST_SECONDS
        if has_idle:
            self._ask_for_look()
        told = {"seconds": round(at - since, 3)} if since else {}
        told |= {"why": result.reason} if result.reason else {}
        told |= {"retry_in": result.retry_in} if result.retry_in is not None else {}
        status = "LOST" if result.status == LOST else str(result.status)
        self.listener.event("ended", job=job.job.jobid, dataid=dataid, status=status, **told)

    def _meet(self, job: JobState, error: Exception) -> None:
        """Report a job's error once, and continue with the other jobs."""
        db = self.store.db
        if db.trouble(error) == "gone":
            db.drop()
            self._ask_for_look()
            return
        why, more = str(error), {}
        if not isinstance(error, (DataflowError, *db.failures)):
            why = f"{type(error).__name__}: {why}"
            more["trace"] = "".join(format_exception(error))
        with self._changed:
            before, job.trouble = job.trouble, why
            job.rest_until = time.monotonic() + REST_SECONDS
            job.step = None
            job.running.clear()
        if why != before:
            self.listener.event("trouble", job=job.job.jobid, why=why, **more)
