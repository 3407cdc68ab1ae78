"""Runs a job until nothing is left: several workers, retries, and what came of it."""

import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Protocol

from ..model import GIVEN_BACK, LOST, READY, ChunkOutcome, Claim, Outcome, Stop, Tell
from ..store.claimable import chunks_left, dial_at_zero
from ..store.claims import interrupt_soon
from ..store.store import Store
from ..store.workers import new_owner
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
"""Seconds in which a signal is noticed by who waits."""


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
) -> Outcome:
    """Claim and run until nothing is left or a signal comes; failures don't stop the others.

    It waits for chunks of other workers and for retries. It waits for the end of a pause, or of a
    concurrency of 0, only if the runner `waits`.
    """
    runner.environment()  # what forbids to claim is said once, not by each worker
    crew = _Crew(runner, scripts, workers, progress)
    crew.work()
    if not (crew.done or crew.failed or crew.lost or crew.held or scripts.stopping):
        runner.tell_nothing()
        return Outcome(stop_code(scripts))
    runner.tell(crew.summary())
    code = stop_code(scripts) or int(bool(crew.failed or crew.lost))
    if crew.held and not code:
        code = HELD_BACK_CODE
    return Outcome(code, crew.done, len(crew.failed) + crew.lost)


class _Crew:
    """The workers of one run: each has its own name and its own connection."""

    def __init__(
        self,
        runner: ChunkRunner,
        scripts: Scripts,
        workers: int,
        progress: Tell | None,
    ) -> None:
        self.runner, self.scripts, self.workers, self.progress = runner, scripts, workers, progress
        self.done = 0
        self.lost = self.interrupted = 0
        self.failed: set[str] = set()
        self._owners: list[str] = []
        self.held = ""
        """The dial that ended the run, if one did."""
        self._ended = 0
        self._busy = workers
        self._last_message = ""
        self._over = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def work(self) -> None:
        if self.workers == 1:
            self._work()
            return
        self.runner.store.db.drop()  # this thread only waits: a worker may need its connection
        # Daemons: a second Ctrl-C waits for none of them, nor does the end of Python.
        threads = [threading.Thread(target=self._guarded, daemon=True) for _ in range(self.workers)]
        for thread in threads:
            thread.start()
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
            parts.append(f"taken over by others {self.lost}")
        if self.scripts.stopping is not None:
            parts.append("stopped by a signal")
        jobid = self.runner.jobid
        if left := chunks_left(self.runner.store, jobid):
            parts.append(f"left {left}" + (f": {self.held}" if self.held else ""))
        following = f"; next: odf status {typed(jobid)}" if self.failed or self.lost or left else ""
        return ", ".join(parts) + following

    def _leave(self) -> None:
        """Give back the workers' claims, without waiting for the workers."""
        store, jobid = self.runner.store, self.runner.jobid
        stop = Stop(self.scripts.why_stopping() or "stopped")
        for owner in self._owners:
            interrupt_soon(store, store._adopt(jobid, owner, 0.0), stop)

    def _guarded(self) -> None:
        """A worker's thread; an error of one ends all, each after its chunk."""
        try:
            self._work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._over = True
                self._changed.notify_all()
        finally:
            self.runner.store.db.drop()

    def _work(self) -> None:
        owner = new_owner()
        self._owners.append(owner)
        while not self._over and self.scripts.stopping is None:
            ended = self._ended
            taken = self.runner.claim(owner, self.runner.at_once())
            if taken:
                results = self.runner.run(*taken, self.scripts, stdin_null=self.workers > 1)
                with closing(results):  # what wasn't begun is given back
                    for claim, result in results:
                        self._count(claim.dataid, result)
                        if self._over:
                            break
            elif not self._wait(ended, self.runner.store.next_change(self.runner.jobid)):
                return

    def _count(self, dataid: str, result: ChunkOutcome) -> None:
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
            while not self._over and self.scripts.stopping is None and ended == self._ended:
                now = time.monotonic()
                if now >= until:
                    break
                if now >= rest_at:
                    self.runner.store.db.drop()
                self._changed.wait(min(until - now, SIGNAL_CHECK_SECONDS))
            self._busy += 1
            return not self._over

    def _is_worth_waiting(self, retry_in: float | None) -> bool:
        """Whether a chunk may become claimable that none of us works on; it says why, once."""
        store, jobid = self.runner.store, self.runner.jobid
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
        [(taken, retries, read)] = store.db.insist(
            lambda: store.db.run("runjob.awaited", jobid=jobid)
        )[0]
        parts = [
            f"{count} {what}"
            for count, what in (
                (taken, "in other hands"),
                (retries, "to be retried"),
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
