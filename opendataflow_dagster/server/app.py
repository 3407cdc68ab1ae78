"""The HTTP application: takes items for pipelines, and reports their status."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ..errors import DataflowError, Refused
from ..model import FAILED, PENDING, READY, RESUBMIT, RUNNING, Say, read_status
from ..pipelines.deployment import Current, Deploys
from ..pipelines.jobs import register
from ..pipelines.project import Project
from ..store.item_folding import Fold, fold_of
from ..store.items import Accepted, Post, backlog, item_status
from ..store.store import Store
from ..util.text import first_line, printable, typed
from .commit_queue import CommitQueue, DatabaseThreads, QueueFull
from .pages import CONTENT_TYPE, CostlyQuery, ServerMetrics, docs_page, openapi, read_paths
from .request import (
    CLOSED,
    DATABASE,
    OPEN,
    BadBody,
    Disks,
    Guard,
    Limits,
    Rates,
    bearer,
    idempotency_key,
    parse_items,
    read_body,
)

T = TypeVar("T")

COMMIT_UNKNOWN = (
    "The database doesn't answer, so it isn't known whether this was accepted. Send it again with "
    "the same Idempotency-Key; without a key, it may then be stored twice."
)

REFUSED = "The project's current files can't be served; the log of odf serve says why."

REFRESH_SECONDS = 0.5
"""Seconds between two checks of the project's files."""

QUERY_THREADS = 4
"""Threads that look up tokens and statuses."""

INLINE_BYTES = 64 * 1024
"""Bytes of a body that is parsed on the event loop; a larger one would hold up other clients."""

REASONS = TRANSFORMATION, RESULT, AGAIN, HELD = (
    "transformation failed",
    "result can't be kept",
    "to be made again",
    "held by the operator",
)
"""Why an item isn't READY, in words fit for its sender; `odf history` has the rest."""


class ItemConsumer(Protocol):
    """What consumes the items: the application only notifies it of new ones."""

    state: str

    def poke(self, slug: str) -> None: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


def make_app(
    store: Store,
    project: Project,
    *,
    limits: Limits | None = None,
    worker: ItemConsumer | None = None,
    deploys: Deploys | None = None,
    say: Say = lambda _: None,
) -> "_AnswerCounter":
    """Create the application for a project's pipelines; it registers them when it starts.

    Args:
        store: The tables that keep the items.
        project: The project whose pipelines take items.
        limits: What clients may send.
        worker: What consumes the items, if it runs beside this server.
        deploys: The copies of the project that workers run.
        say: Where lines for the operator go.
    """
    deploys = deploys or Deploys(project, say=say)
    endpoints = _Endpoints(store, project, limits or Limits(), worker, deploys, say)
    handlers: dict[Any, Any] = {HTTPException: _answer_error, Exception: _answer_crash}
    app = Starlette(
        routes=endpoints.routes, exception_handlers=handlers, lifespan=endpoints.lifespan
    )
    app.router.redirect_slashes = False
    app.add_middleware(_DisconnectFilter)
    # Outside of Starlette's own middleware, which answers 500 for an error of ours.
    return _AnswerCounter(app, endpoints.server_metrics)


class _AnswerCounter:
    """ASGI middleware that counts answers by their status code."""

    def __init__(self, app: Any, metrics: ServerMetrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def count_and_send(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._metrics.count_answer(message["status"])
            await send(message)

        await self._app(scope, receive, count_and_send)


class _DisconnectFilter:
    """ASGI middleware that keeps clients who hang up out of the error log."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with suppress(ClientDisconnect):
            await self._app(scope, receive, send)


class _Endpoints:
    """The endpoints of one project, and what their handlers share.

    `routes` is the only list of them. The docstring of a handler ends in its OpenAPI operation, and
    /openapi.json and /docs come from those.
    """

    def __init__(
        self,
        store: Store,
        project: Project,
        limits: Limits,
        worker: ItemConsumer | None,
        deploys: Deploys,
        say: Say,
    ) -> None:
        store.db.patience = limits.patience
        self.store, self.limits, self.worker, self.say = store, limits, worker, say
        self.deploys = deploys
        self.current = Current(store, project, say=say, folder=deploys.folder)
        self.guard, self.rates = Guard(store), Rates(limits.rate)
        self.server_metrics = ServerMetrics()
        self.routes = [
            Route("/stream/{slug}", self.post, methods=["POST"]),
            Route("/status/{slug}/{dataid}", self.status),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/openapi.json", self.openapi),
            Route("/docs", self.docs),
        ]
        self._paths = read_paths(self.routes)
        self._disks = Disks(store, project.root, say)
        self._backlog = CostlyQuery(lambda: backlog(store))
        self._threads = DatabaseThreads(store, QUERY_THREADS, "ask")
        self._queue: CommitQueue | None = None
        self._away = False

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await self._threads.run(self.current.refresh)
        async with CommitQueue(self.store, self.limits.waiting) as self._queue:
            refreshing = asyncio.create_task(self._keep_fresh())
            if self.worker:
                await self.worker.start()
            yield
            refreshing.cancel()
        if self.worker:
            await self.worker.stop()
        await self._threads.close()
        self.deploys.close()

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self._threads.run(self._refresh)
            except Exception as error:
                self._report_outage(error)

    def _refresh(self) -> None:
        self.deploys.refresh(self._register)
        self.current.refresh()

    def _register(self, project: Project) -> None:
        try:
            register(self.store, project)
        except DataflowError as error:
            if self.store.db.trouble(error):
                raise RuntimeError(first_line(error)) from error  # not the project's fault
            raise

    # --- items ---

    async def post(self, request: Request) -> Response:
        """Accept an item or an array of items.

        ---
        summary: Send one item, or several
        description: An item is durable when it is acknowledged.
        security: [token: []]
        parameters:
          - $ref: "#/components/parameters/slug"
          - name: Idempotency-Key
            in: header
            required: false
            description: A post repeated byte for byte with its key gets the first answer again.
            schema: {$ref: "#/components/schemas/IdempotencyKey"}
        requestBody:
          required: true
          content: {application/json: {schema: {$ref: "#/components/schemas/Items"}}}
        responses:
          202:
            description: Durable.
            content: {application/json: {schema: {$ref: "#/components/schemas/AcceptedItems"}}}
        errors: [401, 403, 404, 405, 408, 413, 415, 422, 429, 503]
        """
        started = time.perf_counter()
        slug = await self._authorized_pipeline(request)
        key = idempotency_key(request, self.limits)
        texts, is_array = await self._read_items(request)
        if wait := self.rates.take(slug, len(texts)):
            raise HTTPException(
                429,
                f"Pipeline {slug!r} takes {self.limits.rate:g} items a second. Send it later.",
                headers=_retry_after(wait),
            )
        accepted = await self._accept(Post(slug, tuple(texts), key))
        # After the commit: a worker that looks earlier would find nothing, and keep sleeping.
        if self.worker:
            self.worker.poke(slug)
        seconds = time.perf_counter() - started
        self.server_metrics.count_items(slug, len(texts), seconds, repeated=accepted.again)
        items = [
            {
                "dataid": dataid,
                "generation": generation,
                "status": f"/status/{quote(slug, safe='')}/{dataid}",
            }
            for dataid, generation in zip(accepted.dataids, accepted.generations, strict=True)
        ]
        return JSONResponse({"items": items} if is_array else items[0], 202)

    async def _read_items(self, request: Request) -> tuple[list[str], bool]:
        """The items of a body as texts, and whether they came as an array."""
        body = await read_body(request, self.limits)
        try:
            if len(body) <= INLINE_BYTES:
                return parse_items(body, self.limits)
            return await asyncio.to_thread(parse_items, body, self.limits)
        except BadBody as error:
            raise HTTPException(422, str(error)) from None

    async def _accept(self, post: Post) -> Accepted:
        if self._queue is None:
            raise RuntimeError("the application hasn't started")
        try:
            verdict = await self._queue.accept(post)
        except QueueFull:
            line = "Too many posts wait for the database. Send it again."
            raise HTTPException(503, line, headers=_retry_after(1)) from None
        except Exception as error:
            self._report_outage(error)  # perhaps only the answer to the commit was lost
            raise HTTPException(503, COMMIT_UNKNOWN, headers=_retry_after(1)) from error
        if isinstance(verdict, Refused):
            if verdict.code == "KEY_REUSED":
                raise HTTPException(422, str(verdict))
            raise HTTPException(503, str(verdict), headers=_retry_after(10))
        self._away = False
        return verdict

    async def status(self, request: Request) -> Response:
        """Report the status of an item.

        ---
        summary: Status of an item
        security: [token: []]
        parameters:
          - $ref: "#/components/parameters/slug"
          - {name: dataid, in: path, required: true, schema: {type: string}}
        responses:
          200:
            description: Its status.
            content:
              application/json:
                schema:
                  type: object
                  properties:
                    jobid: {type: string}
                    dataid: {type: string}
                    status: {type: string}
                    generation: {type: [integer, "null"]}
                    received: {type: [string, "null"]}
                    modified: {type: [string, "null"]}
                    rows: {type: [integer, "null"]}
                    reason: {$ref: "#/components/schemas/Reason"}
                    transformation: {type: [string, "null"]}
                  required: [jobid, dataid, status, generation, received, modified, rows, reason,
                    transformation]
        errors: [401, 403, 404, 405, 410, 503]
        """
        slug = await self._authorized_pipeline(request)
        dataid = request.path_params["dataid"]
        row = None
        if dataid.isascii() and dataid.isdigit() and len(dataid) < 20:
            row = await self._query(lambda: item_status(self.store, slug, dataid))
            if row is None and (fold := await self._query(lambda: self._fold(slug, dataid))):
                line = f"Item {dataid} was folded with others: {fold}."
                raise HTTPException(410, line)
        if row is None:
            raise HTTPException(404, f"Pipeline {slug!r} has no item {printable(dataid)[:40]!r}.")
        return JSONResponse(_public_status(row))

    def _fold(self, slug: str, dataid: str) -> Fold | None:
        return self.store.db.insist(lambda: fold_of(self.store, slug, dataid))[0]

    async def _authorized_pipeline(self, request: Request) -> str:
        """Return the pipeline that a request names, if it has the pipeline's token."""
        slug = request.path_params["slug"]
        if slug not in self.current.taking:
            why = self.current.others.get(slug)
            line = f"Pipeline {slug!r} {why}" if why else "There is no such pipeline here."
            raise HTTPException(404, line)
        token = bearer(request.headers.get("authorization", ""))
        if token and self.guard.knows(slug, token):
            return slug
        verdict = await self._query(lambda: self.guard.ask(slug, token))
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

    async def health(self, _: Request) -> Response:
        """Report whether items can be taken: 200, or 503.

        ---
        summary: Whether items can be taken
        responses:
          200:
            description: They can.
            content: &health
              application/json:
                schema:
                  type: object
                  properties:
                    status: {type: string}
                    database: {type: boolean}
                    worker: {type: string}
                    refused:
                      type: string
                      description: The project's current files aren't served. The last valid
                        ones are. The log says why. Absent if the current ones are.
                    full:
                      type: array
                      items: {type: string}
                      description: Which disks are full. Absent if none is.
                  required: [status, database, worker]
          503:
            description: The database doesn't answer, or its disk is full.
            content: *health
            headers: {Retry-After: {description: Seconds to wait., schema: {type: integer}}}
        """
        details: dict[str, Any] = {"worker": self.worker.state if self.worker else "off"}
        if self.deploys.refused:
            details["refused"] = REFUSED
        if full := await self._threads.run(self._disks.full):
            details["full"] = full
        database = True
        try:
            await self._threads.run(self._ping)
        except Exception as error:
            self._report_outage(error)
            database = False
        if database and DATABASE not in full:
            return JSONResponse({"status": "ok", "database": True} | details)
        answer = {"status": "unavailable", "database": database} | details
        return JSONResponse(answer, 503, headers=_retry_after(1))

    async def metrics(self, _: Request) -> Response:
        """Report the server's metrics.

        ---
        summary: Metrics for Prometheus
        responses:
          200:
            description: Prometheus' text format.
            content: {text/plain: {schema: {type: string}}}
        """
        try:
            rows = await self._threads.run(self._backlog)
        except Exception as error:
            self._report_outage(error)
            rows = None
        text = self.server_metrics.render(
            rows,
            self.current.taking,
            worker_ready=bool(self.worker and self.worker.state == "ready"),
            project_refused=bool(self.deploys.refused),
        )
        return Response(text, media_type=CONTENT_TYPE)

    async def openapi(self, _: Request) -> Response:
        """Describe all endpoints for programs.

        ---
        summary: This API, for programs
        responses:
          200:
            description: The OpenAPI document.
            content: {application/json: {schema: {type: object}}}
        """
        name, slugs = self.current.project.name, self.current.taking
        return JSONResponse(openapi(self._paths, name, slugs, self.limits, REASONS))

    async def docs(self, request: Request) -> Response:
        """Describe all endpoints for people.

        ---
        summary: This API, for people
        responses:
          200:
            description: This page.
            content: {text/html: {schema: {type: string}}}
        """
        name, slugs = self.current.project.name, self.current.taking
        text = docs_page(self._paths, name, slugs, str(request.base_url))
        policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    # --- the database ---

    async def _query(self, work: Callable[[], T]) -> T:
        try:
            return await self._threads.run(work)
        except Exception as error:
            raise self._unavailable(error) from error

    def _ping(self) -> None:
        """Run a query; a connection that the database has ended isn't used again."""
        db = self.store.db
        try:
            db.run("claims.now")
        except Exception as error:
            if db.trouble(error) == "gone":
                db.drop()
            raise

    def _unavailable(self, error: Exception) -> HTTPException:
        self._report_outage(error)
        line = "The database doesn't answer: nothing was accepted. Send it again."
        return HTTPException(503, line, headers=_retry_after(1))

    def _report_outage(self, error: Exception) -> None:
        if not self._away:
            self.say(f"The database can't be used: {first_line(error)}")
        self._away = True


# --- answers ---


def _answer_error(_: Request, error: HTTPException) -> Response:
    return JSONResponse(
        {"error": printable(error.detail)}, error.status_code, headers=error.headers
    )


def _answer_crash(_: Request, __: Exception) -> Response:
    text = "The server failed with an internal error; its log has the details."
    return JSONResponse({"error": text}, 500, headers={"Connection": "close"})  # uvicorn closes it


def _retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, round(seconds + 0.49)))}


def _public_status(row: dict[str, Any]) -> dict[str, Any]:
    """Return an item's status for its sender: no path of this machine, and no error texts."""
    public = {
        name: value.isoformat(timespec="milliseconds") if isinstance(value, datetime) else value
        for name, value in row.items()
        if name != "location"
    }
    return public | {"reason": _reason(read_status(row["status"]), row["transformation"])}


def _reason(status: str, transformation: str | None) -> str | None:
    if status in (READY, RUNNING, PENDING):
        return None
    if status == FAILED:
        return TRANSFORMATION if transformation else RESULT
    return AGAIN if status == RESUBMIT else HELD
