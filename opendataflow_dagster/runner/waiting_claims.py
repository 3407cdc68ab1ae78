"""Claims of one worker that wait for their turn while it works on another one."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread

from ..model import Claim, Say, Stop
from ..store.claimable import held_back
from ..store.claims import GiveBack, give_back_soon, interrupt_soon, try_to_give_back
from ..store.database import BRIEF_WAIT_SECONDS
from ..store.store import Store
from ..util.text import first_line

RENEW_SECONDS = 5.0
"""Seconds after which the leases are renewed and the dials are read, at the latest."""

STOP_CHECK_SECONDS = 0.5
"""Seconds in which a stop is noticed."""


class WaitingClaims:
    """Keeps claimed chunks alive until `next` hands them out, and gives back the others.

    Chunks are given back, as if they had never been claimed, when the work is to stop, when their
    job is paused or its concurrency lowered, and when the `with` ends. A chunk that somebody else
    has taken over meanwhile is left out.

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
            self._say(f"{count} given back when their leases are over: {first_line(trouble)}")

    def next(self) -> Claim | None:
        """The claim whose turn it is, which is the caller's from now on; None: none is left."""
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
            how(self.store, back, f"given back before it was begun: {why}")
        except BaseException:
            with self._changed:
                self._returning += back
            raise
        self._say(f"{_counted(len(back))} given back: {why}")


def _counted(number: int) -> str:
    return (
        "1 chunk that was claimed is" if number == 1 else f"{number} chunks that were claimed are"
    )
