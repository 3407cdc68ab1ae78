"""A thread that keeps claims alive while the work for them goes on."""

import time
from threading import Condition, Thread
from typing import TypeVar

from ..model import LEASE_SECONDS, Claim, Say
from ..store.database import BRIEF_WAIT_SECONDS, briefly
from ..store.store import Store, new_owner
from ..util.text import first_line

T = TypeVar("T")


RETRY_SECONDS = 1.0
"""Seconds after which a heartbeat that met trouble is tried again, at the latest."""


class Pulse:
    """Renews the leases of one worker's claims, and its own row as part of a run, until the end.

    It begins to count on `with`. A claim that another has taken over is in `lost` from then on. A
    database that is away is said once for each outage: the work goes on, whose fault it isn't.
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
        """Whether somebody has settled the run that this worker is part of: it should stop."""
        self._thread: Thread | None = None

    def __enter__(self) -> "Pulse":
        if self.runid and self.jobid:
            from ..store.runs import begin_work

            self._granted = begin_work(self.store, self.owner, self.runid, self.jobid, self.lease)
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
                self._say(f"The worker's row stays until its lease is over: {first_line(error)}")

    def hold(self, claim: Claim) -> None:
        """Keep a claim alive from now on."""
        with self._changed:
            self._held[_key(claim)] = claim
            # It may have waited since it was claimed, for a third of its lease at most.
            self._renewed[_key(claim)] = time.monotonic() - claim.lease / 3
            if time.monotonic() + claim.lease / 3 < self._due:
                self._changed.notify()

    def let_go(self, claim: Claim) -> None:
        """Leave a claim to its lease: it is settled, or not ours."""
        with self._changed:
            self._held.pop(_key(claim), None)
            self._renewed.pop(_key(claim), None)

    def lost(self, claim: Claim) -> bool:
        """Whether somebody else has taken the claim over, as far as was heard."""
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
            from ..store.runs import beat

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
            if self.store.db.trouble(error) == "gone":
                self.store.db.drop()
            if not self._away:
                self._say(f"The claim can't be renewed: {first_line(error)}. The work goes on")
            self._away = True
        else:
            if self._away:
                self._back = time.monotonic()
                self._say("The database is back, and the claim renewed")
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
