"""What the tables have: datasets, jobs, dials, and who declared them."""

import json
from collections.abc import Iterable, Mapping
from datetime import UTC
from typing import Any, NamedTuple

from ..model import DATASET_COLUMNS, DIALS
from ..store.registry import FOREVER, dial_value
from ..store.store import Store
from ..util.times import parse_time
from .flow import Job

DATASET, JOB = "dataset", "job"

PROJECT_ITEM = "project"
"""The item of a job by which a pipeline's project marks it as its own."""

Columns = Mapping[str, str | None]
Links = frozenset[tuple[str, str]]
Variables = frozenset[tuple[str, str]]


class Registrations(NamedTuple):
    """The rows of `dataset`, `job`, `jobpolicy` and `origin`."""

    store: str = ""
    """Which store it is; nothing if it has no tables yet."""
    datasets: Mapping[str, list[Columns]] = {}
    """Usually one row each: the table has no key."""
    links: Mapping[str, Links] = {}
    """Of each job, (IN or OUT, dataset)."""
    variables: Mapping[str, Variables] = {}
    dials: Mapping[str, Mapping[str, Any]] = {}
    declared: Mapping[tuple[str, str], Mapping[str, tuple[str, ...]]] = {}
    """By kind and name: origin → the dials that it sets."""
    produced: frozenset[str] = frozenset()
    """The datasets that have chunks."""

    def origins(self, kind: str, name: str) -> set[str]:
        """Who declares a dataset or a job; a pipeline's mark tells it where no row does."""
        found = set(self.declared.get((kind, name), ()))
        if kind == JOB:
            marks = [value for item, value in self.variables.get(name, ()) if item == PROJECT_ITEM]
            found |= {f"{PROJECT_ITEM}:{mark}" for mark in marks}
        return found

    def has(self, kind: str, name: str) -> bool:
        return name in (self.datasets if kind == DATASET else self.links)

    def users(self, datasetid: str) -> list[str]:
        """The jobs that read or write a dataset."""
        return [
            job for job, links in self.links.items() if datasetid in {item for _, item in links}
        ]


def read_registered(store: Store) -> Registrations:
    """Read all of it, within a transaction."""
    datasets: dict[str, list[Columns]] = {}
    for row in store.db.records("registry.datasets"):
        columns = {name: _text(row[name]) for name in DATASET_COLUMNS}
        if row["datasetid"] is not None:
            datasets.setdefault(row["datasetid"], []).append(columns)
    links: dict[str, set[tuple[str, str]]] = {}
    variables: dict[str, set[tuple[str, str]]] = {}
    for jobid, itemtype, datasetid, value, _ in store.db.run("registry.jobs", jobid=None):
        if jobid is None:
            continue
        links.setdefault(jobid, set())
        if itemtype in ("IN", "OUT"):
            if datasetid:
                links[jobid].add((itemtype, datasetid))
        elif itemtype:
            variables.setdefault(jobid, set()).add((itemtype, value or ""))
    dials = {
        row["jobid"]: {name: row[name] for name in DIALS} | {"paused_until": row["pause"]}
        for row in store.db.records("flow.dials")
    }
    declared: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {}
    for kind, name, origin, set_dials in store.db.run("flow.origins"):
        declared.setdefault((kind, name), {})[origin] = tuple(json.loads(set_dials or "[]"))
    return Registrations(
        store.id,
        datasets,
        {jobid: frozenset(found) for jobid, found in links.items()},
        {jobid: frozenset(found) for jobid, found in variables.items()},
        dials,
        declared,
        frozenset(datasetid for (datasetid,) in store.db.run("catalog.produced")),
    )


def links_of(job: Job) -> Links:
    return frozenset((kind, item) for kind, item, _ in job.items if item)


def variables_of(job: Job) -> Variables:
    return frozenset((kind, value or "") for kind, item, value in job.items if not item)


def dials_of(store: Store, job: Job) -> dict[str, Any]:
    """The dials that a flow sets for a job, as `read_registered` has them."""
    found = {}
    for name, text in job.policy.items():
        if DIALS[name].unit != "time":
            found[name] = dial_value(name, text.strip())
        else:
            found[name] = _moment(store, text.strip())
    return found


def edges(links: Mapping[str, Iterable[tuple[str, str]]]) -> list[tuple[str, str, str]]:
    return [(jobid, kind, item) for jobid, found in links.items() for kind, item in found]


def _moment(store: Store, text: str) -> str | None:
    if text.lower() in ("", "none", "no"):
        return None
    if text.lower() == "forever":
        return "forever"
    moment = min(parse_time(store, text), FOREVER)
    return "forever" if moment == FOREVER else moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _text(value: Any) -> str | None:
    return None if value is None or value == "" else str(value)
