"""A worker that dies at a named point of its work, or stops there until it is told to go on.

Usage: python -m tests.support.crash_worker URL POINT
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from opendataflow_dagster.errors import StaleClaim
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import expire

POINTS = [
    "before claim",
    "claim begun",
    "claim written",
    "after claim",
    "heartbeat written",
    "before finish",
    "finish begun",
    "finish written",
    "after finish",
    "before fail",
    "fail begun",
    "fail written",
    "after fail",
    "recover begun",
    "recover written",
]


def doom(store: Store, point: str) -> None:
    """Let this process be killed inside the transaction that `point` names."""
    db: Any = store.db
    doing = ""
    plain = db.transaction

    @contextmanager
    def transaction(**signed: str) -> Iterator[None]:
        with plain(**signed):
            if point == f"{doing} begun":
                die()
            yield
            if point == f"{doing} written":
                die()

    def wrap(name: str, act: str) -> None:
        work: Callable[..., Any] = getattr(store, name)

        def watched(*args: Any, **more: Any) -> Any:
            nonlocal doing
            doing = act
            if db.dialect == "sqlite":
                return work(*args, **more)
            with transaction():  # one statement: the transaction that it would have been alone
                return work(*args, **more)

        setattr(store, name, watched)

    db.transaction = transaction
    for name, act in (
        ("_take", "claim"),
        ("_beat", "heartbeat"),
        ("_finish", "finish"),
        ("_fail", "fail"),
        ("_recover", "recover"),
    ):
        wrap(name, act)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(url: str, point: str) -> None:
    store = open_store(url)
    doom(store, point)

    def reach(here: str) -> None:
        if here == point:
            die()

    reach("before claim")
    [claim] = store.claim("job", owner="doomed")
    reach("after claim")
    store.heartbeat([claim])
    if point == "stop":
        print("claimed", flush=True)
        sys.stdin.readline()
        try:
            store.finish(claim)
        except StaleClaim:
            print("stale", flush=True)
        else:
            print("settled", flush=True)
        store.close()
        return
    if point.startswith("recover"):
        expire(store)
        store.recover()
    if "fail" in point:
        reach("before fail")
        store.fail(claim, "no")
    else:
        reach("before finish")
        store.finish(claim)
    reach("after finish")
    reach("after fail")
    raise SystemExit(f"{point!r} was never reached")


if __name__ == "__main__":
    main(*sys.argv[1:])
