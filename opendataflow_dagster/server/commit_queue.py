"""Posts that arrive within a moment, made durable in one transaction."""

import asyncio
from typing import TypeAlias

from ..errors import Refused
from ..store.item_posts import Accepted, Post, accept
from ..store.store import Store
from .database_threads import Threads

Verdict: TypeAlias = Accepted | Refused
Waiting: TypeAlias = tuple[Post, "asyncio.Future[Verdict]"]

AT_ONCE = 200
"""Posts of one transaction."""

ITEMS = 2_000
"""Items of one transaction, if they come in more than one post."""


class Overfull(Exception):
    """More waits for the database than is kept in memory."""


class Committer:
    """Gives posts to the database: while one transaction is on its way, the next one gathers."""

    def __init__(self, store: Store, most: int) -> None:
        self._store, self._most = store, most
        self._waiting: list[Waiting] = []
        self._size = 0
        self._came = asyncio.Event()
        self._thread = Threads(store, 1, "accept")
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Committer":
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
        """What became of a post, once it is durable; raises what the database does."""
        size = sum(map(len, post.payloads))
        if self._size and self._size + size > self._most:
            raise Overfull
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting.append((post, verdict))
        self._size += size
        self._came.set()
        try:
            return await verdict
        finally:
            self._size -= size

    async def _run(self) -> None:
        while True:
            await self._came.wait()
            batch = self._next()
            if not self._waiting:
                self._came.clear()
            await self._commit(batch)

    def _next(self) -> list[Waiting]:
        count = items = 0
        for post, _ in self._waiting[:AT_ONCE]:
            items += len(post.payloads)
            if count and items > ITEMS:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _commit(self, batch: list[Waiting]) -> None:
        try:
            posts = [post for post, _ in batch]
            verdicts = await self._thread.run(lambda: accept(self._store, posts))
        except Exception as error:
            if len(batch) > 1 and not self._store.db.trouble(error):
                for each in batch:  # one of them may be what the database can't take
                    await self._commit([each])
                return
            for _, verdict in batch:
                if not verdict.done():
                    verdict.set_exception(error)
            return
        for (_, verdict), told in zip(batch, verdicts, strict=True):
            if not verdict.done():  # its client has gone away
                verdict.set_result(told)
