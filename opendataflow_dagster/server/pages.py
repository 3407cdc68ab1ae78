"""How the server describes itself: OpenAPI for programs, a page for people, and metrics.

The first two come from the routes. The docstring of a handler ends in its OpenAPI operation, as
YAML; parts that depend on the project or the limits are components that operations refer to.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from shlex import quote as shell
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)
from starlette.routing import BaseRoute
from starlette.schemas import SchemaGenerator

from .. import __version__
from .request import Limits

Paths = Mapping[str, Mapping[str, Any]]

ERRORS = {
    "401": "The token is missing or wrong.",
    "403": "The pipeline has no token, so it takes no items.",
    "404": "There is no such pipeline here, or it takes no items.",
    "405": "This address has another method.",
    "408": "The body didn't arrive in time.",
    "410": "The item was folded: it was READY, and has no row of its own any more.",
    "413": "The body is too large.",
    "415": "The body isn't JSON by its Content-Type, or it is compressed.",
    "422": "The body isn't valid JSON or not an item, or its Idempotency-Key isn't valid.",
    "429": "The pipeline takes no more items in this second.",
    "503": "The database doesn't answer. If the error says that it isn't known whether a post was "
    "accepted, send the post again with its Idempotency-Key.",
}
RETRY_AFTER = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
ERROR_HEADERS = {
    "401": {"WWW-Authenticate": {"schema": {"type": "string"}}},
    "429": {"Retry-After": RETRY_AFTER},
    "503": {"Retry-After": RETRY_AFTER},
}


def read_paths(routes: Sequence[BaseRoute]) -> Paths:
    """Read the OpenAPI paths from the docstrings of the routes' handlers.

    `errors` of an operation become references to the answers with those codes. Parsing YAML takes
    milliseconds, and anybody may request the document: do it once.
    """
    paths = SchemaGenerator({}).get_schema(list(routes))["paths"]
    for operations in paths.values():
        for operation in operations.values():
            for code in operation.pop("errors", ()):
                operation["responses"][code] = {"$ref": f"#/components/responses/{code}"}
    return paths


def openapi(
    paths: Paths, name: str, slugs: Collection[str], limits: Limits, reasons: Collection[str]
) -> dict[str, Any]:
    """Return the OpenAPI document of a project whose pipelines `slugs` accept items."""
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Items of {name}", "version": __version__},
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "parameters": {
                "slug": {
                    "name": "slug",
                    "in": "path",
                    "required": True,
                    "description": "The pipeline.",
                    "schema": {"type": "string"} | ({"enum": sorted(slugs)} if slugs else {}),
                }
            },
            "schemas": _schemas(limits, reasons),
            "responses": {code: _error(code) for code in ERRORS},
        },
    }


def _schemas(limits: Limits, reasons: Collection[str]) -> dict[str, Any]:
    item, accepted = ({"$ref": f"#/components/schemas/{name}"} for name in ("Item", "Accepted"))
    array = {"type": "array", "items": item, "minItems": 1, "maxItems": limits.items}
    return {
        "Item": {"type": "object"},
        "Items": {"anyOf": [item, array]},
        "Accepted": _object(
            {
                "dataid": {"type": "string"},
                "generation": {"type": "integer"},
                "status": {"type": "string", "description": "Where its status is."},
            }
        ),
        "AcceptedItems": {
            "anyOf": [accepted, _object({"items": {"type": "array", "items": accepted}})]
        },
        "IdempotencyKey": {
            "type": "string",
            "minLength": 1,
            "maxLength": limits.key,
            "pattern": "^[!-~]+$",
        },
        "Reason": {"enum": [*reasons, None]},
        "Error": _object({"error": {"type": "string"}}),
    }


def _error(code: str) -> dict[str, Any]:
    return {
        "description": ERRORS[code],
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    } | ({"headers": ERROR_HEADERS[code]} if code in ERROR_HEADERS else {})


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def docs_page(paths: Paths, name: str, slugs: Collection[str], base: str) -> str:
    """Return the page for people; it loads nothing from other sites.

    Args:
        paths: The OpenAPI paths, for the table of addresses.
        name: The project.
        slugs: Its pipelines that take items.
        base: The address of the server, with a slash at the end.
    """
    pipelines = [
        _PIPELINE.format(slug=escape(slug), line=escape(_curl_line(base, slug))) for slug in slugs
    ]
    none = "<p>No pipeline of this project has a parameter <code>stream</code>.</p>"
    addresses = [
        _row(method, path, operation["summary"])
        for path, operations in paths.items()
        for method, operation in operations.items()
    ]
    return _PAGE.format(
        name=escape(name), pipelines="".join(pipelines) or none, addresses="\n".join(addresses)
    )


def _curl_line(base: str, slug: str) -> str:
    address = shell(f"{base}stream/{quote(slug, safe='')}")
    return (
        f'curl {address} -H "Authorization: Bearer $TOKEN" '
        "-H 'Content-Type: application/json' -d '{\"name\": \"value\"}'"
    )


def _row(method: str, path: str, summary: str) -> str:
    address = f"{method.upper()} {escape(path)}"
    if method == "get" and "{" not in path:
        address = f'<a href="{escape(path[1:])}">{address}</a>'
    return f"<tr><th>{address}</th><td>{escape(summary)}</td></tr>"


_PIPELINE = "<h2>{slug}</h2><pre>{line}</pre>"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Items of {name}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem}}
pre{{background:#8882;padding:.8rem;overflow:auto}}
td,th{{padding:.2rem .8rem .2rem 0;text-align:left}}
:root{{color-scheme:light dark}}</style></head><body>
<h1>Items of {name}</h1>
<p>Send a JSON object, or an array of objects, to a pipeline. The answer 202 means that the items
are durable; it has each item's <code>dataid</code> and the address of its status.
A pipeline takes items once it has a token: <code>odf token PIPELINE</code> prints a new one.
Give each post a header <code>Idempotency-Key</code>: after a timeout or a 503, send the post again
byte for byte, with the same key. If it was already accepted, it gets its first answer.</p>
{pipelines}
<h2>Addresses</h2>
<table>
{addresses}
</table></body></html>
"""


# Metrics of the server, for Prometheus.


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

BUCKET_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Upper bounds of the acknowledgements' histogram."""

CACHE_FACTOR = 20
"""How long a query's result is kept, as a multiple of the time that it took."""

T = TypeVar("T")

# A series `…_created` beside each counter would double the page, and nobody reads it.
disable_created_metrics()


class CostlyQuery(Generic[T]):
    """Caches the result of a slow query, so that queries never use a large part of the time.

    The backlog of a pipeline with 100,000 failures takes 60 ms, and /metrics is open to anybody.
    """

    def __init__(self, ask: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._kept: tuple[float, T] | None = None

    def __call__(self) -> T:
        began = self._clock()
        if self._kept is None or began >= self._kept[0]:
            answer, now = self._ask(), self._clock()
            self._kept = now + CACHE_FACTOR * (now - began), answer
        return self._kept[1]


class ServerMetrics:
    """What the server counts itself, and the gauges that it fills for each scrape."""

    def __init__(self) -> None:
        # Not the global registry: it adds metrics of the process, and all servers share it.
        registry = self._registry = CollectorRegistry()

        def counter(name: str, text: str, label: str) -> Counter:
            return Counter(name, text, [label], registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        self._answers = counter("odf_http_responses_total", "Answers by status code.", "code")
        self._accepted = counter(
            "odf_items_accepted_total", "Items made durable and acknowledged.", "pipeline"
        )
        self._repeated = counter(
            "odf_items_repeated_total", "Items already known by their key.", "pipeline"
        )
        self._seconds = Histogram(
            "odf_acknowledge_seconds",
            "Seconds from a post to its acknowledgement.",
            buckets=BUCKET_SECONDS,
            registry=registry,
        )
        self._database = gauge("odf_database_up", "Whether the database answers.")
        self._worker = gauge("odf_worker_up", "Whether the worker is ready.")
        self._refused = gauge(
            "odf_project_refused", "Whether the project's current files are refused."
        )
        self._backlog = {
            column: gauge(name, text, "pipeline")
            for column, name, text in (
                ("waiting", "odf_items_waiting", "Items that wait for the worker."),
                ("failed", "odf_items_failed", "Items that failed."),
                (
                    "held",
                    "odf_items_held",
                    "Items on HOLD because they crashed too many workers.",
                ),
                (
                    "oldest_seconds",
                    "odf_oldest_item_seconds",
                    "Age of the oldest waiting item.",
                ),
            )
        }

    def families(self) -> list[Metric]:
        """Return the metrics: names, texts and types."""
        return list(self._registry.collect())

    def count_answer(self, code: int) -> None:
        self._answers.labels(str(code)).inc()

    def count_items(self, slug: str, items: int, seconds: float, *, repeated: bool) -> None:
        (self._repeated if repeated else self._accepted).labels(slug).inc(items)
        self._seconds.observe(seconds)

    def render(
        self,
        backlog: Sequence[Mapping] | None,
        slugs: Collection[str],
        *,
        worker_ready: bool,
        project_refused: bool,
    ) -> bytes:
        """Return all metrics as text; `backlog` is None while the database is away."""
        self._database.set(backlog is not None)
        self._worker.set(worker_ready)
        self._refused.set(project_refused)
        rows = {row["jobid"]: row for row in backlog or ()}
        for column, gauge in self._backlog.items():
            gauge.clear()  # a removed pipeline has no number; without a database, none has
            for slug in sorted(slugs) if backlog is not None else ():
                gauge.labels(slug).set(rows.get(slug, {}).get(column) or 0)
        return generate_latest(self._registry)
