"""The process that consumes items: one Spark session, warm, for all pipelines of a project."""

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
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config.settings import Settings
from ..model import HOLD, Say
from ..runner.heartbeat import Pulse
from ..store.item_folding import fold_age, fold_items, tidy
from ..store.items import has_token
from ..store.runs import settle_run
from ..store.store import Store, new_owner
from ..util.system import try_lock
from ..util.text import first_line, printable, typed
from .deployment import Current
from .engine import Engine, Stopped
from .items import LEASE, Consumer, EngineGone
from .project import Project, open_project

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TICK = 1.0
"""Seconds between two looks at all pipelines, if nobody tells of new items."""

RECOVER = 5.0
"""Seconds between two looks for items whose worker is gone, or whose retry is due."""

YIELD = 5
"""How much the worker is nicer than the server: an item is acknowledged first, then worked on."""

THREADS = 4
"""Pipelines that are worked on at once."""

FOLDS = 5.0, 600.0
"""Seconds between two looks for items to fold: a fiftieth of their age, but within these."""

LOSSES = 3
"""Workers that an item may cost, unless its policy says more: once in company, and twice alone."""


class Bell:
    """Tells which pipelines have new items: by standard input, or from our own threads."""

    def __init__(self, told: int = 0) -> None:
        self._ours, self._ring = os.pipe()
        os.set_blocking(self._ring, False)
        self._ends = {told: b"", self._ours: b""}
        self.over = False

    def ring(self, slug: str = "") -> None:
        with suppress(BlockingIOError):  # full: it is heard anyway
            os.write(self._ring, slug.encode() + b"\n")

    def wait(self, seconds: float) -> set[str]:
        """The pipelines that were told within so many seconds; `over` once standard input ends."""
        ready, _, _ = select.select([each for each in self._ends], [], [], seconds)
        told: set[str] = set()
        for end in ready:
            data = os.read(end, 65536)
            if not data:
                self.over = True
                self._ends.pop(end)
            *whole, rest = (self._ends.get(end, b"") + data).split(b"\n")
            if end in self._ends:
                self._ends[end] = rest
            told.update(each.decode(errors="replace") for each in whole if each)
        return told


class ItemWorker:
    """Gives each pipeline's items to a thread, as long as there are any."""

    def __init__(self, consumer: Consumer, bell: Bell, *, say: Say) -> None:
        self.consumer, self.bell, self._say = consumer, bell, say
        self.code = 0
        self.lost = ""
        """Why what is in hand is lost, if it is."""
        self._busy: set[str] = set()
        self._folding: Future[None] | None = None
        self._fold_at = 0.0
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
                due = self.bell.wait(TICK)
                now = time.monotonic()
                if now - looked >= TICK:
                    looked = now
                    recover = now - recovered >= RECOVER
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
            self._told(error)
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
            self._told(error)
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
        store, began, pause = self.consumer.store, time.monotonic(), FOLDS[1]
        try:
            ages = [fold_age(store, slug) for slug in self.consumer.current.taking]
            pause = min([pause, *(age / 50 for age in ages)])
            if fold_items(store):
                tidy(store)
            self._unfolded = ""
        except Exception as error:
            if self._unfolded != (why := first_line(error)):
                self._say(f"Finished items can't be folded: {why}")
            self._unfolded = why
            store.db.drop()
        took = time.monotonic() - began
        self._fold_at = time.monotonic() + max(FOLDS[0], pause, 10 * took)

    def _told(self, error: Exception) -> None:
        if not self._away:
            self._say(f"The items wait: {first_line(error)}")
        self._away = True


def serve_items(settings: Settings, project: Project, folder: Path, *, say: Say) -> int:
    """Consume the items of a project until standard input ends; the exit code.

    The batch in hand is finished then; on TERM it is given back. `folder` has the code, as the
    server has last found it good.
    """
    from ..spark.session import spark_session

    os.nice(YIELD)
    heard = sys.stdout.buffer.fileno()
    store, bell = open_project(settings), Bell()
    runid = f"items {os.uname().nodename} {_digest(project.root)}"
    ended: list[int] = []

    def end(number: int, _: Any = None) -> None:
        ended.append(number)
        consumer.ending = True
        bell.ring()

    session = spark_session(
        slots(settings), app=f"odf serve {project.name}", settings=settings, short=True
    )
    engine = Engine(
        project, lambda: session, say=say, stopping=lambda: "the server's end" if ended else None
    )
    current = Current(store, project, say=say, folder=folder)
    with Pulse(store, new_owner(), lease=LEASE, say=say) as pulse:
        consumer = Consumer(
            store, current, engine, pulse, runid=runid, is_alive=lambda: _is_alive(session), say=say
        )
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, end)
        with alone(project.root, bell, say) as ours:
            if not ours:
                return 0
            settle_lost(store, runid, "the worker ended", say=say)
            current.refresh()
            _warm(session)
            os.write(heard, json.dumps({"state": "ready"}).encode() + b"\n")
            say(_readiness(store, current))
            worker = ItemWorker(consumer, bell, say=say)
            code = worker.run()
            if worker.lost:
                with suppress(Exception):  # else the next worker does it
                    settle_lost(store, runid, worker.lost, say=say)
    engine.close()
    with suppress(Exception):
        session.stop()
    store.close()
    return code


def runs_here(settings: Settings) -> bool:
    """Whether the tasks of a project run on this machine, with the packages that are here."""
    from ..spark.settings import MASTER, REMOTE, given_conf, is_local

    given = given_conf(settings, None)
    return REMOTE not in given and is_local(given.get(MASTER, "local"))


def slots(settings: Settings) -> dict[str, str]:
    """What lets each pipeline have a task of Spark at once, unless somebody has said where it runs.

    With fewer cores than busy pipelines, one would wait for a slow item of another.
    """
    from ..spark.settings import MASTER, REMOTE, given_conf

    if given_conf(settings, None).keys() & {MASTER, REMOTE}:
        return {}
    return {MASTER: f"local[{max(THREADS, os.cpu_count() or 1)}]"}


def settle_lost(store: Store, runid: str, why: str, *, say: Say) -> None:
    """Settle what a worker had in hand when it ended: all of it may be tried again, each alone.

    An item that ends its worker alone, and again, is held; no other is, and it needs no policy.
    """
    for each in settle_run(
        store,
        runid,
        why=why,
        canceled=False,
        who="odf serve",
        max_losses=LOSSES,
        blame_together=False,
    ):
        if each.status == HOLD:
            say(
                f"{each.jobid}: item {each.dataid} is held: {each.reason}. Once it is mended, "
                f"run: odf resubmit {typed(each.jobid)} {each.dataid}"
            )


@contextmanager
def alone(root: Path, bell: Bell, say: Say) -> Iterator[bool]:
    """Wait until no other worker of this machine consumes the project's items; False: it is over.

    So they stay in order; and whoever goes on knows that the claims of the one before are lost.
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


def _warm(session: "SparkSession") -> None:
    """Let Java and a worker of Python load what the first item would wait for."""

    def load(batches: Any) -> Iterator[Any]:
        import pandas  # noqa: F401

        yield from batches

    session.range(1).mapInArrow(load, "id long").collect()


def _is_alive(session: "SparkSession") -> bool:
    try:
        return session.range(1).count() == 1
    except Exception:
        return False


def _readiness(store: Store, current: Current) -> str:
    """What is worked on from now, and who can't send anything to it yet."""
    if not (taking := sorted(current.taking)):
        return "No pipeline takes items: none has a transformation with a parameter `stream`"
    shut = [slug for slug in taking if not has_token(store, slug)]
    more = "".join(f"; {printable(slug)} needs `odf token {typed(slug)}` first" for slug in shut)
    return f"Ready: items of {printable(', '.join(taking))} are worked on as they come{more}"


def _digest(root: Path) -> str:
    return sha256(str(root).encode()).hexdigest()[:12]
