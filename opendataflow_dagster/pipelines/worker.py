"""The process that consumes items: one engine, warm, for all pipelines of a project."""

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.settings import Settings
from ..model import HOLD, Say
from ..runner.heartbeat import Pulse
from ..store.claims import settle_run
from ..store.item_folding import fold_age, fold_items, tidy
from ..store.items import has_token
from ..store.store import Store
from ..store.workers import ITEM_WORKER, new_owner
from ..util.system import try_lock
from ..util.text import first_line, printable, typed
from .deployment import Current
from .engine import Stopped, engine_for
from .item_queue import LEASE_SECONDS, Consumer
from .items import EngineGone
from .project import Project, open_project

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POLL_SECONDS = 1.0
"""Seconds between two looks at all pipelines, if the server announces no new items."""

RECOVER_SECONDS = 5.0
"""Seconds between two looks for items whose worker is gone, or whose retry is due."""

NICENESS = 5
"""How much nicer the worker is than the server: an item is acknowledged first, then worked on."""

THREADS = 4
"""Pipelines that are worked on at once."""

MIN_FOLD_SECONDS, MAX_FOLD_SECONDS = 5.0, 600.0
"""Seconds between two looks for items to fold: a fiftieth of their age, but within these."""

MAX_LOSSES = 3
"""Workers that an item may cost, unless its policy says more: once with others, and twice alone."""


class Bell:
    """Hears which pipelines have new items: by standard input, or from our own threads."""

    def __init__(self, stdin: int = 0) -> None:
        self._ours, self._ring = os.pipe()
        os.set_blocking(self._ring, False)
        self._ends = {stdin: b"", self._ours: b""}
        self.over = False

    def ring(self, slug: str = "") -> None:
        with suppress(BlockingIOError):  # full: it is heard anyway
            os.write(self._ring, slug.encode() + b"\n")

    def wait(self, seconds: float) -> set[str]:
        """The pipelines that were named within so many seconds; `over` once standard input ends."""
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
        """Work until the bell is over; the exit code."""
        consumer = self.consumer
        looked = recovered = 0.0
        with ThreadPoolExecutor(THREADS + 1, thread_name_prefix="items") as pool:
            while not (self.bell.over or consumer.ending or self.code):
                due = self.bell.wait(POLL_SECONDS)
                now = time.monotonic()
                if now - looked >= POLL_SECONDS:
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
        """Fold what is old enough; the longer that takes, the later the next time."""
        store, began, pause = self.consumer.store, time.monotonic(), MAX_FOLD_SECONDS
        try:
            ages = [fold_age(store, slug) for slug in self.consumer.current.taking]
            pause = min([pause, *(age / 50 for age in ages)])
            self._tidied = not fold_items(store) and self._tidied
            # Once more, until all is given back: after the last item, no fold would ask for it.
            self._tidied = self._tidied or tidy(store)
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
    """Consume the items of a project until standard input ends; the exit code.

    The current batches are finished then; on TERM they are given back. `folder` has the last code
    that the server found good.
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
    """Settle what the worker before left, get ready, and work until the bell is over."""
    store, current = consumer.store, consumer.current
    settle_lost(store, consumer.runid, "the worker ended", say=say)
    current.refresh()
    consumer.engine.warm()
    os.write(sys.stdout.buffer.fileno(), json.dumps({"state": "ready"}).encode() + b"\n")
    say(_readiness(store, current))
    worker = ItemWorker(consumer, bell, say=say)
    code = worker.run()
    if worker.lost:
        with suppress(Exception):  # else the next worker does it
            settle_lost(store, consumer.runid, worker.lost, say=say)
    return code


def runs_here(settings: Settings) -> bool:
    """Whether the tasks of a project run on this machine, with the packages that are here."""
    from ..spark.settings import MASTER, REMOTE, given_conf, is_local

    given = given_conf(settings, None)
    return REMOTE not in given and is_local(given.get(MASTER, "local"))


def slots(settings: Settings) -> dict[str, str]:
    """The setting by which each pipeline has a task of Spark at once, unless a master is set.

    With fewer cores than busy pipelines, one would wait for a slow item of another.
    """
    from ..spark.settings import MASTER, REMOTE, given_conf

    if given_conf(settings, None).keys() & {MASTER, REMOTE}:
        return {}
    return {MASTER: f"local[{max(THREADS, os.cpu_count() or 1)}]"}


def settle_lost(store: Store, runid: str, why: str, *, say: Say) -> None:
    """Settle the items of a worker that ended: all may be tried again, each alone.

    An item that ends its worker alone, and again, is held, without any policy; no other is.
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
                f"{chunk.jobid}: item {chunk.dataid} is held: {chunk.reason}. Once it is mended, "
                f"run: odf resubmit {typed(chunk.jobid)} {chunk.dataid}"
            )


@contextmanager
def alone(root: Path, bell: Bell, say: Say) -> Iterator[bool]:
    """Wait until no other worker of this machine consumes the project's items; False: it is over.

    So items stay in order; and the next worker knows that the claims of the one before are lost.
    """
    folder, said = os.open(root, os.O_RDONLY | os.O_DIRECTORY), False
    try:
        while not try_lock(folder):
            if not said:
                say("Another worker consumes this project's items: this one stands by")
            said = True
            bell.wait(0.2)
            if bell.over:
                yield False
                return
        yield True
    finally:
        os.close(folder)


def _readiness(store: Store, current: Current) -> str:
    """Which pipelines take items from now on, and which of them lack a token."""
    if not (taking := sorted(current.taking)):
        return "No pipeline takes items: none has a transformation with a parameter `stream`"
    shut = [slug for slug in taking if not has_token(store, slug)]
    more = "".join(f"; {printable(slug)} needs `odf token {typed(slug)}` first" for slug in shut)
    return f"Ready: items of {printable(', '.join(taking))} are worked on as they come{more}"


def _digest(root: Path) -> str:
    return sha256(str(root).encode()).hexdigest()[:12]
