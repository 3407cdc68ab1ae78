"""The queue of posts before the database: posts that arrive together share a transaction."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeAlias, TypeVar

from ..errors import Refused
from ..store.items import Accepted, Post, accept
from ..store.store import Store

T = TypeVar("T")
Verdict: TypeAlias = Accepted | Refused
QueuedPost: TypeAlias = tuple[Post, "asyncio.Future[Verdict]"]

BATCH_POSTS = 200
"""The most posts per transaction."""

BATCH_ITEMS = 2_000
"""The most items per transaction, unless a single post has more."""


class QueueFull(Exception):
    """More posts wait for the database than are kept in memory."""


class DatabaseThreads:
    """A few threads that query the database, so that the event loop doesn't wait for it.

    Each thread has its own connection; `close` closes them.
    """

    def __init__(self, store: Store, count: int, name: str) -> None:
        self._store, self._count = store, count
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        # A connection belongs to its thread, so each thread has to drop its own. The barrier
        # keeps a thread that is faster than the others from taking two of these calls.
        together = Barrier(self._count)

        def drop_connection() -> None:
            together.wait()
            self._store.db.drop()

        for _ in range(self._count):
            self._pool.submit(drop_connection)
        self._pool.shutdown()


class CommitQueue:
    """Commits posts in batches: while one transaction runs, the next batch gathers.

    Making data durable costs a disk write per transaction, whatever its size. Without batches,
    the disk would limit the server to some hundred posts per second. A post that comes alone
    doesn't wait for others: an idle queue commits it at once.
    """

    def __init__(self, store: Store, capacity: int) -> None:
        """Create a queue that holds `capacity` characters of items; a single post may have more."""
        self._store, self._capacity = store, capacity
        self._waiting: list[QueuedPost] = []
        self._size = 0
        self._arrival = asyncio.Event()
        # One thread, so that there is one transaction at a time: two would compete for the lock
        # of SQLite, and make batches smaller on PostgreSQL.
        self._thread = DatabaseThreads(store, 1, "accept")
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "CommitQueue":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Commit what waits, then end."""
        while self._waiting:
            await asyncio.sleep(0.01)
        if self._task:
            self._task.cancel()
        await self._thread.close()

    async def accept(self, post: Post) -> Verdict:
        """Return the verdict on a post once it is durable; raise what the database raises."""
        size = sum(map(len, post.payloads))
        if self._size and self._size + size > self._capacity:
            raise QueueFull
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting.append((post, verdict))
        self._size += size
        self._arrival.set()
        try:
            return await verdict
        finally:
            self._size -= size

    async def _run(self) -> None:
        while True:
            await self._arrival.wait()
            batch = self._next_batch()
            if not self._waiting:
                self._arrival.clear()
            await self._commit(batch)

    def _next_batch(self) -> list[QueuedPost]:
        count = items = 0
        for post, _ in self._waiting[:BATCH_POSTS]:
            items += len(post.payloads)
            if count and items > BATCH_ITEMS:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _commit(self, batch: list[QueuedPost]) -> None:
        try:
            posts = [post for post, _ in batch]
            verdicts = await self._thread.run(lambda: accept(self._store, posts))
        except Exception as error:
            # One post may hold what the database refuses: commit each alone, so that the others
            # don't fail with it. If the database itself is in trouble, that would only repeat the
            # error.
            if len(batch) > 1 and not self._store.db.trouble(error):
                for queued in batch:
                    await self._commit([queued])
                return
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), verdict in zip(batch, verdicts, strict=True):
            if not future.done():  # its client has gone away
                future.set_result(verdict)
