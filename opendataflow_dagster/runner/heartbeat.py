"""Threads that renew claims: of the running chunk, and of chunks that wait for their turn."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import TypeVar

from ..model import LEASE_SECONDS, Claim, Say, Stop, new_owner
from ..store.claims import (
    GiveBack,
    beat,
    begin_work,
    give_back_soon,
    held_back,
    interrupt_soon,
    try_to_give_back,
)
from ..store.database import BRIEF_WAIT_SECONDS, briefly
from ..store.store import Store
from ..util.text import first_line

T = TypeVar("T")


RETRY_SECONDS = 1.0
"""Seconds after which a heartbeat that met trouble is tried again, at the latest."""


class Pulse:
    """Renews the leases of one worker's claims, and its own row as part of a run, until the end.

    It starts with the `with` block. Claims that another worker has recovered are in `lost`. An
    outage of the database is logged once; the work continues.
    """

    def __init__(
        self,
        store: Store,
        owner: str | None = None,
        *,
        runid: str | None = None,
        jobid: str | None = None,
        lease: float = LEASE_SECONDS,
        say: Say | None = None,
    ) -> None:
        self.store, self.owner = store, owner or new_owner()
        self.runid, self.jobid, self.lease = runid, jobid, lease
        self._granted = lease  # the worker's own: what the job's policy says comes first
        self._say = say or (lambda _: None)
        self._held: dict[tuple[str, str, int], Claim] = {}
        self._lost: set[tuple[str, str, int]] = set()
        self._renewed: dict[tuple[str, str, int], float] = {}
        self._changed = Condition()
        self._due = 0.0
        self._over = self._away = False
        self._back = float("-inf")
        self.dismissed = False
        """Whether another process settled the run of this worker: then the worker should stop."""
        self._thread: Thread | None = None

    def __enter__(self) -> "Pulse":
        if self.runid and self.jobid:
            self._granted = begin_work(self.store, self.owner, self.runid, self.jobid, self.lease)
        # A daemon: a beat may hang in a network that is gone, and must not keep Python from ending.
        self._thread = Thread(target=self._run, name=f"pulse of {self.owner}", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify()
        if self._thread:
            self._thread.join(BRIEF_WAIT_SECONDS)  # at most: it may hang in a network that is gone
        if self.runid and self.jobid:
            db = self.store.db
            try:
                briefly(db, lambda: db.change("workers.end", owner=self.owner))
            except Exception as error:
                self._say(f"The worker's row stays until its lease expires: {first_line(error)}")

    def hold(self, claim: Claim) -> None:
        """Keep a claim alive from now on."""
        with self._changed:
            self._held[_key(claim)] = claim
            # It may have waited since it was claimed, for a third of its lease at most.
            self._renewed[_key(claim)] = time.monotonic() - claim.lease / 3
            # The thread may sleep through this lease: its pause was computed for longer ones.
            if time.monotonic() + claim.lease / 3 < self._due:
                self._changed.notify()

    def let_go(self, claim: Claim) -> None:
        """Leave a claim to its lease: it is settled, or not ours."""
        with self._changed:
            self._held.pop(_key(claim), None)
            self._renewed.pop(_key(claim), None)

    def lost(self, claim: Claim) -> bool:
        """Whether another worker has claimed the chunk, as of the last heartbeat."""
        return _key(claim) in self._lost

    def holds(self, claim: Claim, seconds: float) -> bool:
        """Whether a claim's lease lasts for so many seconds, though the tables may be away."""
        renewed = self._renewed.get(_key(claim), float("-inf"))
        left = renewed + claim.lease - time.monotonic()
        return not self.lost(claim) and left > seconds

    def is_steady(self, grace: float) -> bool:
        """Whether the database was there all the last `grace` seconds, as far as was heard.

        After an outage, leases are over of workers that are alive and about to renew them.
        """
        return not self._away and time.monotonic() - self._back > grace

    def beat(self) -> None:
        """Renew everything now; what isn't ours any more is lost."""
        with self._changed:
            held = list(self._held.values())
        for jobid in {claim.jobid for claim in held}:
            mine = [claim for claim in held if claim.jobid == jobid]
            asked = time.monotonic()
            lost = self.store.heartbeat(mine)
            with self._changed:
                self._renewed |= {
                    _key(claim): asked for claim in mine if _key(claim) in self._renewed
                }
            for claim in lost:
                with self._changed:
                    # A claim that the worker settled while the database answered isn't lost.
                    if self._held.pop(_key(claim), None) is not None:
                        self._lost.add(_key(claim))
        if self.runid and self.jobid:
            granted = beat(self.store, self.owner, self.lease)
            self.dismissed = granted is None
            self._granted = granted or self._granted

    def _run(self) -> None:
        try:
            while self._wait():
                self._try()
        finally:
            self.store.db.drop()

    def _try(self) -> None:
        try:
            self.beat()
        except Exception as error:
            # The connection is this thread's own. A broken one would fail every further beat.
            if self.store.db.trouble(error) == "gone":
                self.store.db.drop()
            if not self._away:
                self._say(f"Can't renew the claim: {first_line(error)}. The work continues")
            self._away = True
        else:
            if self._away:
                self._back = time.monotonic()
                self._say("The database is back, and the claim is renewed")
            self._away = False

    def _pause(self) -> float:
        """Seconds between two beats: of the shortest lease, a third.

        One beat may fail, and the next one still comes before another worker takes the chunk.
        """
        leases = [claim.lease for claim in self._held.values()]
        pause = min([*leases, self._granted]) / 3
        return min(pause, RETRY_SECONDS) if self._away else pause

    def _wait(self) -> bool:
        """Wait until the next beat is due, sooner if a shorter lease comes; False: it is over."""
        with self._changed:
            since = time.monotonic()
            while not self._over:
                self._due = since + self._pause()
                left = self._due - time.monotonic()
                if left <= 0:
                    return True
                self._changed.wait(left)
            return False


def _key(claim: Claim) -> tuple[str, str, int]:
    return claim.jobid, claim.dataid, claim.generation


# A worker that claims several chunks at once works on one; the others must not lose their leases.

RENEW_SECONDS = 5.0
"""Seconds after which the leases are renewed and the dials are read, at the latest."""

STOP_CHECK_SECONDS = 0.5
"""Seconds in which a stop is noticed."""


class WaitingClaims:
    """Keeps claimed chunks alive until `next` hands them out, and gives back the others.

    Chunks are given back, as if they had never been claimed, when the work is to stop, when their
    job is paused or its concurrency lowered, and when the `with` ends. A chunk that somebody else
    has claimed meanwhile is left out.

    Args:
        store: The tables.
        claims: Claims of one owner and one job, in the order of their turns.
        stopping: Tells what ends the work, if something does.
        say: Is told what was given back.
        interrupted: Tells what a cancellation means; claims that a person wants on HOLD go there.
    """

    def __init__(
        self,
        store: Store,
        claims: Sequence[Claim],
        *,
        stopping: Callable[[], str | None],
        say: Say,
        interrupted: Callable[[BaseException], Stop] | None = None,
    ) -> None:
        self._interrupted = interrupted
        self.store, self._stopping, self._say = store, stopping, say
        self._jobid = claims[0].jobid
        self._waiting = deque(claims)
        self._returning: list[Claim] = []
        self._every = min(RENEW_SECONDS, claims[0].lease / 3)
        self._seen = time.monotonic()
        self._began = self._over = False
        self._changed = Condition()
        self._thread = Thread(target=self._watch, name="waiting claims", daemon=True)

    def __enter__(self) -> "WaitingClaims":
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join(BRIEF_WAIT_SECONDS)  # at most: it may hang in a network that is gone
        self._take_back(len(self._waiting))
        why = self._stopping() or "the run ended before their turn"
        try:
            if self._interrupted and error and not isinstance(error, Exception | GeneratorExit):
                self._hold(self._interrupted(error))
            self._give_back(why, give_back_soon)
        except Exception as trouble:
            count = _counted(len(self._returning))
            self._say(f"{count} will be given back when their leases expire: {first_line(trouble)}")

    def next(self) -> Claim | None:
        """Return the next claim, which the caller then owns; None if none is left."""
        if self._began:  # the first one was claimed just now
            self.store.db.insist(self._look)
        self._began = True
        if self._stopping():
            return None
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def _watch(self) -> None:
        """Renew, look, and notice a stop, also while the work on one chunk takes hours."""
        try:
            while self._wait():
                try:
                    self._heed_stop()
                    if time.monotonic() - self._seen > self._every:
                        self._look()
                except Exception as error:
                    # The worker meets the same trouble, and tells of it.
                    if self.store.db.trouble(error) == "gone":
                        self.store.db.drop()
        finally:
            self.store.db.drop()

    def _wait(self) -> bool:
        """Wait for the next tick; False: there is nothing left to look after."""
        with self._changed:
            if not self._over:
                self._changed.wait(min(STOP_CHECK_SECONDS, self._every))
            return not self._over and bool(self._waiting or self._returning)

    def _heed_stop(self) -> None:
        """Give everything back if the work is to stop."""
        if why := self._stopping():
            self._take_back(len(self._waiting))
            self._give_back(why)

    def _look(self) -> None:
        """Renew the leases if that is due, and give back what the dials forbid to begin with."""
        if time.monotonic() - self._seen > self._every:
            self._renew()
        number, why = held_back(self.store, self._jobid, len(self._waiting))
        self._take_back(number)
        self._give_back(why)

    def _renew(self) -> None:
        """Renew the leases; what isn't ours any more is left out."""
        # Not under the lock while the database answers: `next` hands out claims meanwhile.
        with self._changed:
            mine = list(self._waiting)
        lost = self.store.heartbeat(mine) if mine else []
        self._seen = time.monotonic()
        with self._changed:
            for claim in lost:
                if claim in self._waiting:  # else it is at work, and was settled while we asked
                    self._waiting.remove(claim)

    def _take_back(self, number: int) -> None:
        """Withdraw the last ones, so that their turn doesn't come."""
        with self._changed:
            for _ in range(min(number, len(self._waiting))):
                self._returning.append(self._waiting.pop())

    def _hold(self, stop: Stop) -> None:
        """Put the claims that go back on HOLD, if a person has terminated the work."""
        if stop.hold:
            interrupt_soon(self.store, self._returning, stop)
            self._returning = []

    def _give_back(self, why: str, how: GiveBack = try_to_give_back) -> None:
        with self._changed:
            back, self._returning = self._returning, []
        if not back:
            return
        try:
            how(self.store, back, f"given back before it started: {why}")
        except BaseException:
            with self._changed:
                self._returning += back
            raise
        self._say(f"{_counted(len(back))} given back: {why}")


def _counted(number: int) -> str:
    return "1 claimed chunk is" if number == 1 else f"{number} claimed chunks are"
