"""Numbers for Prometheus, in its text format."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 1.0, 5.0)
"""Seconds until an item is acknowledged."""

SPARING = 20
"""How many times as long as a question took its answer is good for."""

Labels = Mapping[str, str]
T = TypeVar("T")


class Sparing(Generic[T]):
    """Asks what costs the more the more there is, so that it never takes a large part of the time.

    The backlog of a pipeline with 100,000 failures takes 60 ms, and anybody may ask for numbers.
    """

    def __init__(self, ask: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._clock = ask, clock
        self._known: tuple[float, T] | None = None

    def __call__(self) -> T:
        began = self._clock()
        if self._known is None or began >= self._known[0]:
            answer, now = self._ask(), self._clock()
            self._known = now + SPARING * (now - began), answer
        return self._known[1]


class Numbers:
    """What the server counts itself."""

    def __init__(self) -> None:
        self.answers: Counter[int] = Counter()
        self.accepted: Counter[str] = Counter()
        self.repeated: Counter[str] = Counter()
        self._times: Counter[float] = Counter()
        self._sum = 0.0

    def acknowledged(self, slug: str, items: int, seconds: float, again: bool) -> None:
        (self.repeated if again else self.accepted)[slug] += items
        self._sum += seconds
        self._times[next((each for each in BUCKETS if seconds <= each), float("inf"))] += 1

    def lines(self) -> Iterable[str]:
        yield from _metric(
            "odf_http_responses_total",
            "counter",
            "Answers by status code.",
            [({"code": str(code)}, count) for code, count in sorted(self.answers.items())],
        )
        for name, text, counted in (
            ("odf_items_accepted_total", "Items made durable and acknowledged.", self.accepted),
            ("odf_items_repeated_total", "Items that were known by their key.", self.repeated),
        ):
            found = [({"pipeline": slug}, count) for slug, count in sorted(counted.items())]
            yield from _metric(name, "counter", text, found)
        name = "odf_acknowledge_seconds"
        yield from _head(name, "histogram", "Seconds from a post to its acknowledgement.")
        total = 0
        for each in (*BUCKETS, float("inf")):
            total += self._times[each]
            bound = "+Inf" if each == float("inf") else f"{each:g}"
            yield _line(f"{name}_bucket", {"le": bound}, total)
        yield _line(f"{name}_sum", {}, round(self._sum, 6))
        yield _line(f"{name}_count", {}, total)


def page(
    numbers: Numbers,
    backlog: Sequence[Mapping] | None,
    slugs: Iterable[str],
    worker: bool,
    refused: bool,
) -> str:
    """All numbers; `backlog` is None while the database is away."""
    lines = list(numbers.lines())
    lines += _metric(
        "odf_database_up", "gauge", "Whether the database answers.", [({}, backlog is not None)]
    )
    lines += _metric("odf_worker_up", "gauge", "Whether the worker is ready.", [({}, worker)])
    text = "Whether the project's files, as they are now, are refused."
    lines += _metric("odf_project_refused", "gauge", text, [({}, refused)])
    if backlog is not None:
        rows = {row["jobid"]: row for row in backlog}
        for name, key, text in (
            ("odf_items_waiting", "waiting", "Items that wait to be worked on."),
            ("odf_items_failed", "failed", "Items that have failed."),
            ("odf_items_held", "held", "Items on HOLD, since they have cost too many workers."),
            ("odf_oldest_item_seconds", "oldest_seconds", "Age of the oldest item that waits."),
        ):
            found = [({"pipeline": slug}, rows.get(slug, {}).get(key) or 0) for slug in slugs]
            lines += _metric(name, "gauge", text, found)
    return "\n".join(lines) + "\n"


def _metric(
    name: str, kind: str, text: str, found: Iterable[tuple[Labels, float]]
) -> Iterable[str]:
    yield from _head(name, kind, text)
    for labels, value in found:
        yield _line(name, labels, value)


def _head(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _line(name: str, labels: Labels, value: float) -> str:
    inner = ",".join(f'{key}="{_quoted(text)}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {value + 0}" if inner else f"{name} {value + 0}"


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
