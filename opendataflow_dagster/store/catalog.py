"""What there is, in one look: datasets, the jobs between them, their dials, and their domains."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Protocol

from ..model import Plan
from ..util.text import typed
from ..util.times import StoreClock, from_table
from .database import Database

SECRET = "encryptedpass"
TODAY = "today"
"""A date, not data: it links no datasets."""


class CatalogDataset(NamedTuple):
    """A dataset with the columns of its registration, except the password."""

    datasetid: str
    columns: Mapping[str, str | None]
    description: str | None = None
    """What a flow says of it for people; so do the next two."""
    owners: Sequence[str] = ()
    tags: Mapping[str, str] = {}


class Catalog(NamedTuple):
    """Everything that is registered, or has chunks without being registered.

    Attributes:
        datasets: Dataset → its registration.
        jobs: Job → its inputs and outputs.
        policies: Job → its dials.
        domains: Dataset → the name of its domain: datasets that jobs link share their dataids.
        registered_by: The command that registers all this, if it comes from a flow.
        runs_in: Job → who starts it, where a flow says so.
        unread: Why the tables couldn't be read, if they couldn't.

    Example:
        catalog = DataflowResource().catalog()
        print(sorted(catalog.datasets), sorted(catalog.jobs))
    """

    datasets: Mapping[str, CatalogDataset]
    jobs: Mapping[str, Plan]
    policies: Mapping[str, Mapping[str, Any]]
    domains: Mapping[str, str]
    """Dataset → the name of its domain: those that jobs link share their dataids."""
    names: Mapping[str, str] = {}
    """Dataset → the name that its domain had when it was first seen."""
    registered_by: str = ""
    """The command that registers all this, if it comes from a flow instead of the tables."""
    runs_in: Mapping[str, str] = {}
    """Job → who starts it by itself, where a flow says so."""
    unread: str = ""
    """Why nothing is known of the tables, if they couldn't be read."""

    @classmethod
    def of(
        cls,
        datasets: Mapping[str, CatalogDataset],
        items: Iterable[tuple],
        policies: Mapping[str, Mapping[str, Any]],
        names: Mapping[str, str] = {},
    ) -> "Catalog":
        """Return the catalog of datasets and rows of jobs (jobid, itemtype, datasetid, itemvalue).

        Datasets that only jobs name are included, without columns.
        """
        jobs = _plans(items, policies)
        found = _with_named(datasets, jobs.values())
        return cls(found, jobs, policies, _domains(found, jobs, names), names)

    def with_jobs(self, plans: Mapping[str, Plan]) -> "Catalog":
        """Return the catalog as it would be with these jobs registered."""
        jobs = {**self.jobs, **plans}
        datasets = _with_named(self.datasets, plans.values())
        domains = _domains(datasets, jobs, self.names)
        return self._replace(datasets=datasets, jobs=jobs, domains=domains)

    def joined(self, other: "Catalog") -> "Catalog":
        """Return the catalog extended by what another one has."""
        datasets = dict(sorted({**other.datasets, **self.datasets}.items()))
        jobs, names = {**self.jobs, **other.jobs}, {**other.names, **self.names}
        return self._replace(
            datasets=datasets,
            jobs=jobs,
            policies={**self.policies, **other.policies},
            runs_in={**self.runs_in, **other.runs_in},
            domains=_domains(datasets, jobs, names),
            names=names,
        )

    def merged(self) -> dict[str, list[str]]:
        """Return the domains that jobs have joined: the name in use → the earlier names.

        Domains with an explicit `domain` aren't included: those were joined on purpose.
        """
        had: dict[str, set[str]] = {}
        named = set[str]()
        for datasetid, name in self.domains.items():
            had.setdefault(name, {name}).add(self.names.get(datasetid, name))
            if self.datasets[datasetid].columns.get("domain"):
                named.add(name)
        return {
            name: sorted(names - {name})
            for name, names in had.items()
            if len(names) > 1 and name not in named
        }

    def merge_lines(self) -> list[str]:
        """Return a line for each domain that jobs have joined: its name now, and what to do."""
        lines = []
        for name, others in self.merged().items():
            members = [item for item, domain in self.domains.items() if domain == name]
            first = min(members, key=lambda item: (self.names.get(item) != name, item))
            lines.append(
                f"Jobs have joined domain {name!r} with {', '.join(map(repr, others))}: the "
                f"partitions of all their assets are called {name!r} now. Reload the code "
                "location, give assets of your own these partitions, and say that it is meant: "
                f"`odf dataset add {typed(first, '--domain', name)}`, or `domain:` in flow.yml."
            )
        return lines

    def producers(self, datasetid: str) -> tuple[str, ...]:
        """The jobs that write a dataset."""
        return tuple(jobid for jobid, plan in self.jobs.items() if datasetid in plan.outputs)

    def in_circle(self, jobid: str, datasetid: str) -> bool:
        """Whether an input of a job depends, directly or indirectly, on its own output."""
        below: dict[str, set[str]] = {}
        for plan in self.jobs.values():
            for source in plan.reads:
                below.setdefault(source, set()).update(plan.outputs)
        reached: set[str] = set()
        ahead = list(self.jobs[jobid].outputs)
        while ahead:
            found = ahead.pop()
            if found not in reached:
                reached.add(found)
                ahead += below.get(found, ())
        return datasetid in reached

    def depth(self, jobid: str) -> int:
        """Return the length of the longest chain of upstream jobs, ignoring circles."""
        makers: dict[str, list[str]] = {}
        for plan in self.jobs.values():
            for datasetid in plan.outputs:
                makers.setdefault(datasetid, []).append(plan.jobid)
        known: dict[str, int] = {}
        ahead = [jobid]
        while ahead:
            last = ahead[-1]
            known.setdefault(last, -1)  # being asked: who meets it again has gone in a circle
            above = {
                maker for datasetid in self.jobs[last].reads for maker in makers.get(datasetid, ())
            }
            if unknown := above - set(known):
                ahead.append(min(unknown))
            else:
                known[last] = 1 + max((known[job] for job in above), default=-1)
                ahead.pop()
        return known[jobid]

    def to_json(self) -> str:
        return json.dumps(
            {
                "datasets": {
                    datasetid: found.columns for datasetid, found in self.datasets.items()
                },
                "jobs": [plan._asdict() for plan in self.jobs.values()],
                "policies": self.policies,
                "domains": self.domains,
                "names": self.names,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Catalog":
        read = json.loads(text)
        plans = [
            Plan(
                **(
                    row
                    | {
                        "inputs": tuple(row["inputs"]),
                        "outputs": tuple(row["outputs"]),
                        "rivals": tuple(row["rivals"]),
                        "environment": tuple((name, value) for name, value in row["environment"]),
                    }
                )
            )
            for row in read["jobs"]
        ]
        return cls(
            {
                datasetid: CatalogDataset(datasetid, columns)
                for datasetid, columns in read["datasets"].items()
            },
            {plan.jobid: plan for plan in plans},
            read["policies"],
            read["domains"],
            read.get("names", {}),
        )


class CatalogStore(StoreClock, Protocol):
    """What of a store is needed here, which itself needs this module."""

    db: Database


def read_catalog(store: CatalogStore) -> Catalog:
    """Read what is registered now, and which datasets have chunks."""
    with store.db.reading():
        return _read_catalog(store)


def keep_names(store: CatalogStore, catalog: Catalog | None = None) -> None:
    """Record the names of domains that have none recorded; all of a catalog, or those with chunks.

    Whoever changes what links datasets does it before, in the same transaction: else the change
    would give a domain another name.
    """
    db = store.db
    if catalog is not None:
        domains, names = catalog.domains, catalog.names
    elif used := produced_datasets(db) - dict(db.run("catalog.names")).keys():
        found = _read_catalog(store)
        there = {found.domains[datasetid] for datasetid in used}
        domains = {item: name for item, name in found.domains.items() if name in there}
        names = found.names
    else:
        return
    for datasetid in sorted(domains.keys() - names.keys()):
        db.change("catalog.keep_name", datasetid=datasetid, name=domains[datasetid])


def record_names(store: CatalogStore, catalog: Catalog | None = None) -> None:
    """The same, in a transaction of its own."""

    def work() -> None:
        with store.db.transaction(who="odf"):
            keep_names(store, catalog)

    if catalog is None or catalog.domains.keys() - catalog.names.keys():
        store.db.insist(work)


def produced_datasets(db: Database) -> set[str]:
    """The datasets that have chunks."""
    return {datasetid for (datasetid,) in db.run("catalog.produced")}


def _read_catalog(store: CatalogStore) -> Catalog:
    """The same, in the transaction that there is."""
    db = store.db
    rows, cursor = db.execute(db.statement("catalog.datasets"), {})
    names = [column[0].lower() for column in cursor.description]
    items = db.run("catalog.jobs")
    dials = db.records("catalog.policies")
    produced = produced_datasets(db)
    recorded = dict(db.run("catalog.names"))

    registered: dict[str, dict[str, str | None]] = {}
    for row in rows:
        columns = {
            name: _text(value) for name, value in zip(names, row, strict=True) if name != SECRET
        }
        if columns["datasetid"] is not None:  # of a table with duplicates, the first
            registered.setdefault(columns["datasetid"], columns)
    policies = {
        row["jobid"]: {
            name: _plain(store, name, value)
            for name, value in row.items()
            if name not in ("jobid", "modified")
        }
        for row in dials
    }
    linked = {datasetid for _, kind, datasetid, _ in items if kind in ("IN", "OUT") and datasetid}
    unknown = dict.fromkeys(name for name in names if name != SECRET)
    datasets = {
        datasetid: CatalogDataset(datasetid, registered.get(datasetid, unknown))
        for datasetid in {*registered, *produced, *linked} - {TODAY}
    }
    return Catalog.of(datasets, items, policies, recorded)


def read_jobs(store: CatalogStore) -> dict[str, Plan]:
    """Read the jobs alone, without their dials."""
    items = store.db.fetch("catalog.jobs")
    return _plans(items, {})


def depths(pairs: Iterable[tuple[str, str]]) -> dict[str, int]:
    """How many steps lie before the second of each pair at most: what is upstream has fewer."""
    pairs = list(pairs)
    depth: dict[str, int] = {}
    for _ in pairs:  # a path is no longer than that, and a circle goes no further
        deeper = {
            after: depth.get(before, 0) + 1
            for before, after in pairs
            if depth.get(before, 0) + 1 > depth.get(after, 0)
        }
        if not deeper:
            break
        depth |= deeper
    return depth


def _with_named(
    datasets: Mapping[str, CatalogDataset], plans: Iterable[Plan]
) -> dict[str, CatalogDataset]:
    """Some datasets and those that jobs read or write, in the order of their names."""
    unknown = dict.fromkeys(
        sorted({name for dataset in datasets.values() for name in dataset.columns})
    )
    named = {datasetid for plan in plans for datasetid in (*plan.reads, *plan.outputs)}
    new = {datasetid: CatalogDataset(datasetid, unknown) for datasetid in named - set(datasets)}
    return dict(sorted({**datasets, **new}.items()))


def _plans(items: Iterable[tuple], policies: Mapping[str, Mapping[str, Any]]) -> dict[str, Plan]:
    rows: dict[str, list[tuple]] = {}
    producers: dict[str, set[str]] = {}
    for jobid, itemtype, datasetid, value in items:
        rows.setdefault(jobid, []).append((itemtype, datasetid, value))
        if itemtype == "OUT" and datasetid:
            producers.setdefault(datasetid, set()).add(jobid)
    plans = {}
    for jobid, mine in rows.items():
        plan = Plan.of_rows(jobid, mine)
        plans[jobid] = plan._replace(
            rivals=tuple(datasetid for datasetid in plan.outputs if len(producers[datasetid]) > 1),
            limited=policies.get(jobid, {}).get("concurrency") is not None,
        )
    return plans


def likeliest(names: Iterable[str]) -> str | None:
    """Return the earlier name that a domain keeps: the one most of its datasets had."""
    counts = Counter(names)
    return min(counts, key=lambda name: (-counts[name], name), default=None)


def _domains(
    datasets: Mapping[str, CatalogDataset], jobs: Mapping[str, Plan], recorded: Mapping[str, str]
) -> dict[str, str]:
    """Name each connected component: as `domain` says, as it was called, or by its smallest root.

    Roots are datasets that no job writes, or else those produced from nothing.
    """
    leader = {datasetid: datasetid for datasetid in datasets}

    def find(member: str) -> str:
        while leader[member] != member:
            leader[member] = leader[leader[member]]
            member = leader[member]
        return member

    for plan in jobs.values():
        linked = [*plan.reads, *plan.outputs]
        for datasetid in linked[1:]:
            leader[find(datasetid)] = find(linked[0])
    members: dict[str, list[str]] = {}
    for datasetid in datasets:
        members.setdefault(find(datasetid), []).append(datasetid)

    written = {datasetid for plan in jobs.values() for datasetid in plan.outputs}
    begun = {datasetid for plan in jobs.values() if not plan.reads for datasetid in plan.outputs}
    names: dict[str, str] = {}
    for component in members.values():
        domains = [
            name for datasetid in component if (name := datasets[datasetid].columns.get("domain"))
        ]
        had = likeliest(recorded[datasetid] for datasetid in component if datasetid in recorded)
        roots = [datasetid for datasetid in component if datasetid not in written]
        roots = roots or [datasetid for datasetid in component if datasetid in begun]
        name = min(domains) if domains else had or min(roots or component)
        names |= dict.fromkeys(component, name)
    return dict(sorted(names.items()))


def _plain(store: CatalogStore, name: str, value: Any) -> Any:
    """A dial as JSON can hold it; a moment with its time zone."""
    if name == "paused_until":
        value = from_table(store, value)
    return value.isoformat() if isinstance(value, datetime) else value


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
