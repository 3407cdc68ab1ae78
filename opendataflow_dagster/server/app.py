"""The application: takes items of pipelines by POST, and tells how they stand."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..errors import DataflowError, Refused
from ..model import Say
from ..pipelines.deployment import Deploys
from ..pipelines.jobs import register
from ..pipelines.live_project import Current
from ..pipelines.project import Project
from ..store.item_folding import Fold, fold_of
from ..store.item_posts import Accepted, Post
from ..store.items import backlog, item_status
from ..store.store import Store
from ..util.text import first_line, printable, typed
from .auth import CLOSED, OPEN, Guard, bearer
from .commit_queue import Committer, Overfull
from .database_threads import Threads
from .disk_space import DATABASE, Disks
from .limits import Limits, Rates
from .metrics import Numbers, Sparing
from .metrics import page as metrics_page
from .openapi import openapi, page
from .payload import Unfit, items_of
from .request import body_of, key_of
from .responses import Counted, Undisturbed, after, as_error, as_trouble, public_status

T = TypeVar("T")

UNKNOWN = (
    "The database doesn't answer: whether this was accepted isn't known. Send it again with the "
    "same Idempotency-Key; without one, it may be there twice then."
)

REFUSED = "The project's files as they are now can't be served; the log of odf serve tells why."

LOOK = 0.5
"""Seconds between two looks at the project's files."""

QUERIES = 4
"""Threads that ask about tokens and statuses."""

INLINE = 64 * 1024
"""Bytes of a body that is parsed at once; a larger one doesn't hold up the others."""


class Worker(Protocol):
    """What consumes the items: the application only tells it of new ones."""

    state: str

    def poke(self, slug: str) -> None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def make_app(
    store: Store,
    project: Project,
    *,
    limits: Limits | None = None,
    worker: Worker | None = None,
    deploys: Deploys | None = None,
    say: Say = lambda _: None,
) -> Counted:
    """The application for a project's pipelines; it registers them when it starts."""
    deploys = deploys or Deploys(project, say=say)
    served = _Served(store, project, limits or Limits(), worker, deploys, say)
    routes = [
        Route("/stream/{slug}", served.post, methods=["POST"]),
        Route("/status/{slug}/{dataid}", served.status),
        Route("/openapi.json", served.openapi),
        Route("/docs", served.docs),
        Route("/health", served.health),
        Route("/metrics", served.metrics),
    ]
    handlers: dict[Any, Any] = {HTTPException: as_error, Exception: as_trouble}
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=served.lifespan)
    app.router.redirect_slashes = False
    app.add_middleware(Undisturbed)
    return Counted(app, served.numbers)  # outside of all that answers for an error of our own


class _Served:
    """One project's pipelines, and who is at the doors."""

    def __init__(
        self,
        store: Store,
        project: Project,
        limits: Limits,
        worker: Worker | None,
        deploys: Deploys,
        say: Say,
    ) -> None:
        store.db.patience = limits.patience
        self.store, self.limits, self.worker, self.say = store, limits, worker, say
        self.deploys = deploys
        self.current = Current(store, project, say=say, folder=deploys.folder)
        self._disks = Disks(store, project.root, say)
        self.guard, self.rates, self.numbers = Guard(store), Rates(limits.rate), Numbers()
        self._backlog = Sparing(lambda: backlog(store))
        self._threads = Threads(store, QUERIES, "ask")
        self._committer: Committer | None = None
        self._away = False

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._threads.run(self.current.refresh)
        async with Committer(self.store, self.limits.waiting) as self._committer:
            looking = asyncio.create_task(self._look())
            if self.worker:
                await self.worker.start()
            yield
            looking.cancel()
        if self.worker:
            await self.worker.stop()
        await self._threads.close()
        self.deploys.close()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            try:
                await self._threads.run(self._refresh)
            except Exception as error:
                self._told(error)

    def _refresh(self) -> None:
        self.deploys.refresh(self._register)
        self.current.refresh()

    def _register(self, project: Project) -> None:
        try:
            register(self.store, project)
        except DataflowError as error:
            if self.store.db.trouble(error):
                raise RuntimeError(first_line(error)) from error  # it's no fault of the project
            raise

    # --- items ---

    async def post(self, request: Request) -> Response:
        started = time.perf_counter()
        slug = await self._admitted(request)
        key = key_of(request, self.limits)
        body = await body_of(request, self.limits)
        try:
            if len(body) <= INLINE:
                texts, many = items_of(body, self.limits)
            else:
                texts, many = await asyncio.to_thread(items_of, body, self.limits)
        except Unfit as error:
            raise HTTPException(422, str(error)) from None
        if wait := self.rates.take(slug, len(texts)):
            raise HTTPException(
                429,
                f"Pipeline {slug!r} takes {self.limits.rate:g} items a second. Send it later.",
                headers=after(wait),
            )
        accepted = await self._accept(Post(slug, tuple(texts), key))
        if self.worker:
            self.worker.poke(slug)
        seconds = time.perf_counter() - started
        self.numbers.acknowledged(slug, len(texts), seconds, accepted.again)
        made = [
            {
                "dataid": dataid,
                "generation": generation,
                "status": f"/status/{quote(slug, safe='')}/{dataid}",
            }
            for dataid, generation in zip(accepted.dataids, accepted.generations, strict=True)
        ]
        return JSONResponse({"items": made} if many else made[0], 202)

    async def _accept(self, post: Post) -> Accepted:
        if self._committer is None:
            raise RuntimeError("the application hasn't started")
        try:
            verdict = await self._committer.accept(post)
        except Overfull:
            line = "Too much waits for the database. Send it again."
            raise HTTPException(503, line, headers=after(1)) from None
        except Exception as error:
            self._told(error)  # the answer to the commit may be all that was lost
            raise HTTPException(503, UNKNOWN, headers=after(1)) from error
        if isinstance(verdict, Refused):
            if verdict.code == "KEY_REUSED":
                raise HTTPException(422, str(verdict))
            raise HTTPException(503, str(verdict), headers=after(10))
        self._away = False
        return verdict

    async def status(self, request: Request) -> Response:
        slug = await self._admitted(request)
        dataid = request.path_params["dataid"]
        found = None
        if dataid.isascii() and dataid.isdigit() and len(dataid) < 20:
            found = await self._asked(lambda: item_status(self.store, slug, dataid))
            if found is None and (fold := await self._asked(lambda: self._fold(slug, dataid))):
                line = f"Item {dataid} lies within what was folded: {fold}."
                raise HTTPException(410, line)
        if found is None:
            raise HTTPException(404, f"Pipeline {slug!r} has no item {printable(dataid)[:40]!r}.")
        return JSONResponse(public_status(found))

    def _fold(self, slug: str, dataid: str) -> Fold | None:
        return self.store.db.insist(lambda: fold_of(self.store, slug, dataid))[0]

    async def _admitted(self, request: Request) -> str:
        """The pipeline of a request, whose token it has."""
        slug = request.path_params["slug"]
        if slug not in self.current.taking:
            why = self.current.others.get(slug)
            line = f"Pipeline {slug!r} {why}" if why else "There is no such pipeline here."
            raise HTTPException(404, line)
        token = bearer(request.headers.get("authorization", ""))
        if token and self.guard.knows(slug, token):
            return slug
        verdict = await self._asked(lambda: self.guard.ask(slug, token))
        if verdict == OPEN:
            return slug
        if verdict == CLOSED:
            line = f"Pipeline {slug!r} takes no items yet: it has no token. Run: odf token"
            raise HTTPException(403, f"{line} {typed(slug)}")
        challenge = 'Bearer realm="odf"' + (', error="invalid_token"' if token else "")
        line = (
            "The token is wrong." if token else "Send the pipeline's token: Authorization: Bearer …"
        )
        raise HTTPException(401, line, headers={"WWW-Authenticate": challenge})

    # --- about the server ---

    async def openapi(self, _: Request) -> Response:
        return JSONResponse(openapi(self.current.project.name, self.current.taking, self.limits))

    async def docs(self, request: Request) -> Response:
        text = page(self.current.project.name, self.current.taking, str(request.base_url))
        policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    async def health(self, _: Request) -> Response:
        more: dict[str, Any] = self._worker()
        if self.deploys.refused:
            more["refused"] = REFUSED
        if full := await self._threads.run(self._disks.full):
            more["full"] = full
        there = True
        try:
            await self._threads.run(self._is_there)
        except Exception as error:
            self._told(error)
            there = False
        if there and DATABASE not in full:
            return JSONResponse({"status": "ok", "database": True} | more)
        told = {"status": "unavailable", "database": there}
        return JSONResponse(told | more, 503, headers=after(1))

    async def metrics(self, _: Request) -> Response:
        try:
            rows = await self._threads.run(self._backlog)
        except Exception as error:
            self._told(error)
            rows = None
        ready = bool(self.worker and self.worker.state == "ready")
        text = metrics_page(
            self.numbers, rows, sorted(self.current.taking), ready, bool(self.deploys.refused)
        )
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _worker(self) -> dict[str, str]:
        return {"worker": self.worker.state if self.worker else "off"}

    # --- the database ---

    async def _asked(self, work: Callable[[], T]) -> T:
        try:
            return await self._threads.run(work)
        except Exception as error:
            raise self._unavailable(error) from error

    def _is_there(self) -> None:
        """Ask the database anything; a connection that it has ended isn't asked twice."""
        db = self.store.db
        try:
            db.run("claims.now")
        except Exception as error:
            if db.trouble(error) == "gone":
                db.drop()
            raise

    def _unavailable(self, error: Exception) -> HTTPException:
        self._told(error)
        line = "The database doesn't answer: nothing was accepted. Send it again."
        return HTTPException(503, line, headers=after(1))

    def _told(self, error: Exception) -> None:
        if not self._away:
            self.say(f"The database can't be used: {first_line(error)}")
        self._away = True
