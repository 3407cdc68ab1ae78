"""Metrics of the server, for Prometheus."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

BUCKET_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Bounds of the histogram of acknowledgements."""

CACHE_FACTOR = 20
"""How many times as long as a query took its result is kept."""

T = TypeVar("T")

# A series `…_created` beside each counter would double the page, and nobody reads it.
disable_created_metrics()


class CostlyQuery(Generic[T]):
    """Keeps the result of a slow query, so that queries never take a large part of the time.

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
        # Not the global registry: it brings metrics of the process, and is shared by all servers.
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
            "odf_items_repeated_total", "Items that were known by their key.", "pipeline"
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
            "odf_project_refused", "Whether the project's files, as they are now, are refused."
        )
        self._backlog = {
            column: gauge(name, text, "pipeline")
            for column, name, text in (
                ("waiting", "odf_items_waiting", "Items that wait to be worked on."),
                ("failed", "odf_items_failed", "Items that have failed."),
                (
                    "held",
                    "odf_items_held",
                    "Items on HOLD, since they have cost too many workers.",
                ),
                (
                    "oldest_seconds",
                    "odf_oldest_item_seconds",
                    "Age of the oldest item that waits.",
                ),
            )
        }

    def families(self) -> list[Metric]:
        """What there is to count: names, texts and types."""
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
        """All metrics as text; `backlog` is None while the database is away."""
        self._database.set(backlog is not None)
        self._worker.set(worker_ready)
        self._refused.set(project_refused)
        rows = {row["jobid"]: row for row in backlog or ()}
        for column, gauge in self._backlog.items():
            gauge.clear()  # a pipeline that is gone has no number; nor has any, without a database
            for slug in sorted(slugs) if backlog is not None else ():
                gauge.labels(slug).set(rows.get(slug, {}).get(column) or 0)
        return generate_latest(self._registry)
