"""Threads that ask the database, so that nobody else waits for it; each has its connection."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

from ..store.store import Store

T = TypeVar("T")


class Threads:
    """A few threads; `close` closes their connections."""

    def __init__(self, store: Store, count: int, name: str) -> None:
        self._store, self._count = store, count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        together = Barrier(self._count)

        def leave() -> None:
            together.wait()  # so that each thread gets one of these
            self._store.db.drop()

        for _ in range(self._count):
            self._pool.submit(leave)
        self._pool.shutdown()
