"""What a flow declares and what the tables have, as catalogs, and how their domains are named.

Without a database at hand, definitions in Dagster take a domain's name from the flow, and sensors
take it from the tables: partitions are called by it, so both have to agree. A domain that has
chunks keeps its name.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from typing import Any, NamedTuple

from ..errors import FlowError
from ..model import DATASET_COLUMNS, DIALS
from ..store.catalog import SECRET, Catalog, CatalogDataset, likeliest, produced_datasets
from ..store.registry import FOREVER, dial_value
from ..store.store import Store
from ..util.text import typed
from ..util.times import parse_time
from .flow import Dataset, Flow, Job


def catalog_of(
    flow: Flow, command: str = "odf apply", environ: Mapping[str, str] = os.environ
) -> Catalog:
    """Return the catalog of what a flow declares.

    Args:
        flow: The datasets and jobs.
        command: What registers them.
        environ: Where `${NAME}` is looked up. A place with a variable that isn't set stays as it is
            written: where definitions are only checked, nobody has it.
    """
    items = [
        (job.jobid, kind, datasetid, value)
        for job in flow.jobs
        for kind, datasetid, value in sorted(job.items, key=repr)
    ]
    makers = {datasetid: job for job in reversed(flow.jobs) for datasetid in job.outputs}
    datasets = {
        dataset.datasetid: _described(dataset, makers.get(dataset.datasetid), environ)
        for dataset in flow.datasets
    }
    for datasetid in makers.keys() - datasets.keys():
        datasets[datasetid] = _described(Dataset(datasetid), makers[datasetid], environ)
    policies = {job.jobid: dials for job in flow.jobs if (dials := _dials(job))}
    runs_in = {job.jobid: job.runs_in for job in flow.jobs if job.runs_in}
    return Catalog.of(datasets, items, policies)._replace(registered_by=command, runs_in=runs_in)


def _described(dataset: Dataset, maker: Job | None, environ: Mapping[str, str]) -> CatalogDataset:
    """A dataset of the catalog; it inherits missing descriptions from the job that writes it."""
    columns = {"datasetid": dataset.datasetid, **_columns(dataset, environ)}
    columns.pop(SECRET)
    owners: Sequence[str] = dataset.owners or (maker.owners if maker else ())
    tags = {**(maker.tags if maker else {}), **dataset.tags}
    description = dataset.description or (maker.description if maker else None)
    return CatalogDataset(dataset.datasetid, columns, description, owners, tags)


def _columns(dataset: Dataset, environ: Mapping[str, str]) -> dict[str, str | None]:
    try:
        return dataset.columns(environ)
    except FlowError:
        return dataset.raw_columns()


def _dials(job: Job) -> dict[str, Any]:
    """The dials that are no moments, as the tables would have them."""
    numbers = {
        name: dial_value(name, text.strip())
        for name, text in job.policy.items()
        if DIALS[name].unit != "time"
    }
    return {name: number for name, number in numbers.items() if number is not None}


# What the tables have: datasets, jobs, dials, and who declared them.


DATASET, JOB = "dataset", "job"

PROJECT_ITEM = "project"
"""The item by which a pipeline's project marks a job as its own."""

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
    names: Mapping[str, str] = {}
    """Dataset → the name that its domain had when it was first seen."""

    def origins(self, kind: str, name: str) -> set[str]:
        """Who declares a dataset or a job; if no row says it, a pipeline's mark does."""
        found = set(self.declared.get((kind, name), ()))
        if kind == JOB:
            marks = [value for item, value in self.variables.get(name, ()) if item == PROJECT_ITEM]
            found |= {f"{PROJECT_ITEM}:{mark}" for mark in marks}
        return found

    def has(self, kind: str, name: str) -> bool:
        return name in (self.datasets if kind == DATASET else self.links)

    def catalog(self, *, recorded: bool = True) -> Catalog:
        """The same as a catalog; its domains named as they were once, or as they would be now."""
        datasets: dict[str, str | None] = dict.fromkeys(self.produced)
        datasets |= {name: rows[0].get("domain") for name, rows in self.datasets.items() if rows}
        return _catalog(datasets, self.links, self.names if recorded else {})

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
        frozenset(produced_datasets(store.db)),
        dict(store.db.run("catalog.names")),
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


# Whether a flow names its domains as the tables do: Dagster's partitions are called by them.


class OtherName(NamedTuple):
    """A domain of a flow that has another name in the tables."""

    kind: str
    name: str
    """The dataset or job of the flow that the line is for."""
    text: str


def other_names(
    flow: Flow, registered: Registrations, gone: Iterable[tuple[str, str]]
) -> Iterator[OtherName]:
    """The domains whose names differ, each with the missing line of the flow.

    Args:
        flow: The flow.
        registered: What the tables have.
        gone: The kinds and names of what the flow takes away.
    """
    before, after = _catalogs(flow, registered, set(gone))
    used = {before.domains[name] for name in registered.produced if name in before.domains}
    members: dict[str, list[str]] = {}
    for datasetid, name in catalog_of(flow).domains.items():
        members.setdefault(name, []).append(datasetid)
    for name, datasets in members.items():
        now = after.domains[datasets[0]]
        whole = [item for item, of in after.domains.items() if of == now]
        recorded = [of for item in whole if (of := before.domains.get(item)) in used]
        elsewhere = {of for of in after.domains.values() if of != now}  # a part that split off
        recorded = [of for of in recorded if of not in elsewhere]
        if not any(after.datasets[item].columns.get("domain") for item in whole):
            now = likeliest(recorded) or now
        if now == name and (not recorded or name in recorded):
            continue
        yield _other_name(flow, datasets, name, _kept(flow, after, whole, recorded) or now)


def _kept(flow: Flow, after: Catalog, whole: Iterable[str], recorded: Iterable[str]) -> str | None:
    """The name that a domain must have: the recorded one, or the one of its chunks."""
    own = {dataset.datasetid for dataset in flow.datasets}
    told = {after.datasets[item].columns.get("domain") for item in {*whole} - own} - {None}
    return min(told, key=str) if told else likeliest(recorded)


def _other_name(flow: Flow, datasets: Iterable[str], name: str, kept: str) -> OtherName:
    names = f"partitions have the name {kept!r} in the tables, and {name!r} in this flow"
    line = f"domain: {typed(kept)}"
    declared = {dataset.datasetid: dataset for dataset in flow.datasets}
    told = [declared[item] for item in datasets if item in declared]
    if told:
        first = max(
            told,
            key=lambda item: (bool(item.domain), item.datasetid == kept, item.datasetid == name),
        )
        where = f" to it at {first.where}" if first.where else " to it"
        return OtherName(DATASET, first.datasetid, f"its {names}: add `{line}`{where}")
    job = next(job for job in flow.jobs if {*job.inputs, *job.outputs} & {*datasets})
    dataset = next(iter(datasets))
    return OtherName(JOB, job.jobid, f"its {names}: declare dataset {dataset!r} with `{line}`")


def _catalogs(
    flow: Flow, registered: Registrations, gone: set[tuple[str, str]]
) -> tuple[Catalog, Catalog]:
    """What the tables have, and what they would have with the flow applied."""
    before = registered.catalog()
    after = {
        name: dataset.columns.get("domain")
        for name, dataset in before.datasets.items()
        if (DATASET, name) not in gone
        and (name in registered.produced or name in registered.datasets)
    }
    after |= {dataset.datasetid: dataset.domain for dataset in flow.datasets}
    links = {job: found for job, found in registered.links.items() if (JOB, job) not in gone}
    links |= {job.jobid: links_of(job) for job in flow.jobs}
    return before, _catalog(after, links)


def _catalog(
    domains: Mapping[str, str | None],
    links: Mapping[str, Iterable[tuple[str, str]]],
    names: Mapping[str, str] = {},
) -> Catalog:
    datasets = {name: CatalogDataset(name, {"domain": of}) for name, of in domains.items()}
    items = [(job, kind, item, None) for job, found in links.items() for kind, item in found]
    return Catalog.of(datasets, items, {}, names)
