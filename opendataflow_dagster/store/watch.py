"""Hears within milliseconds that chunks may have become claimable, where the database can tell.

What is heard is a hint, and the tables are asked at least once a second whatever was heard: behind
a pooler, or while a connection is broken, a watcher hears nothing, and its host works by that.
"""

import json
import select
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from ..errors import NoDatabase
from .store import Store

FILE_CHECK_SECONDS = 0.05
"""Seconds after which a file of SQLite is asked whether somebody has written to it."""

LISTEN_AGAIN_SECONDS = 5.0
"""Seconds until who lost its connection, or got none, tries to listen again."""

MAX_OFFERED_CHUNKS = 100
"""Up to how many claimable chunks of a job are counted at one look."""


class Outlook(NamedTuple):
    """What one job could claim now, and what it waits for."""

    jobid: str
    claimable: int
    is_queued: bool
    """Whether some of what it may claim is still to be judged."""
    live: int
    """Its claims, whoever holds them."""
    of_runs: int
    """Those of them that runs of Dagster hold."""
    of_work: int
    """Those that `odf work` holds, on any host."""
    retry_in: float | None
    lease_in: float | None
    is_paused: bool
    concurrency: int | None
    every_minutes: int | None

    @property
    def free(self) -> int:
        """How many chunks its dials let it claim."""
        if self.is_paused:
            return 0
        room = self.claimable if self.concurrency is None else self.concurrency - self.live
        return max(0, min(self.claimable, room))

    @property
    def held(self) -> str:
        """The dial that keeps it from claiming until somebody turns it, in words."""
        if self.is_paused:
            return "paused"
        return "concurrency 0" if self.concurrency == 0 else ""


def look(db: Any, jobs: Mapping[str, str | None]) -> dict[str, Outlook]:
    """How some jobs stand, by one statement that doesn't wait for a database that is away.

    Args:
        db: The database.
        jobs: The jobs; of each that reads `today`, the date.
    """
    asked = json.dumps([{"jobid": jobid, "today": today} for jobid, today in jobs.items()])
    rows = db.run("work.outlook", jobs=asked, most=MAX_OFFERED_CHUNKS)
    found = [Outlook(*row) for row in rows]
    # SQLite has numbers for what is true.
    return {
        job.jobid: job._replace(is_queued=bool(job.is_queued), is_paused=bool(job.is_paused))
        for job in found
    }


class Watcher:
    """Waits until something may have become claimable; used by one thread.

    On PostgreSQL it listens, by a connection of its own, unless a pooler is in between. On SQLite
    it asks whether the file has changed.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._connection: Any = None
        self._again = 0.0
        self._version: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def listens(self) -> bool:
        """Whether notices come by themselves."""
        return self._connection is not None

    def wait(self, seconds: float, wakeups: Iterable[int]) -> bool:
        """Wait so long, or until one of the files of `wakeups` can be read; whether to look.

        True means that somebody has changed what may be claimed.
        """
        if self.store.db.path:
            return self._watch_file(seconds, wakeups)
        self._listen()
        return self._hear(seconds, wakeups)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _listen(self) -> None:
        """Open a connection that listens, unless there is one or it was tried just now."""
        db, now = self.store.db, time.monotonic()
        if self._connection is not None or now < self._again or db.pooled:
            return
        self._again = now + LISTEN_AGAIN_SECONDS
        try:
            self._connection = db.listen()
        except (NoDatabase, *db.failures):
            return  # the looks tell of an outage

    def _hear(self, seconds: float, wakeups: Iterable[int]) -> bool:
        files = list(wakeups)
        if self._connection is not None:
            files.append(self._connection.fileno())
        ready = _readable(files, seconds)
        if self._connection is None or self._connection.fileno() not in ready:
            return False
        try:
            notices = list(self._connection.notifies(timeout=0))
        except self.store.db.failures:
            self.close()  # the server has gone
            return True
        return any(notice.payload == self.store.db.schema for notice in notices)

    def _watch_file(self, seconds: float, wakeups: Iterable[int]) -> bool:
        until = time.monotonic() + seconds
        files = list(wakeups)
        while True:
            if self._has_changed():
                return True
            left = until - time.monotonic()
            if left <= 0 or _readable(files, min(left, FILE_CHECK_SECONDS)):
                return False

    def _has_changed(self) -> bool:
        """Whether another connection has written to the file since this one looked last."""
        try:
            [(version,)] = self.store.db.run("work.changes")
        except Exception:  # the looks tell of it
            return False
        before, self._version = self._version, version
        return before != version


def _readable(files: list[int], seconds: float) -> list[int]:
    """Which of some files can be read, at the latest after so many seconds."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(max(0.0, seconds) * 1000)]
