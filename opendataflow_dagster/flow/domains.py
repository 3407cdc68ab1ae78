"""Whether a flow names its domains as the tables do: Dagster's partitions are called by them.

Without a database at hand, definitions take the name from the flow, and sensors the one of the
tables. A domain that has chunks keeps the name that it has.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from ..store.catalog import Catalog, CatalogDataset
from ..util.text import typed
from .catalog import catalog_of
from .flow import Flow
from .registered import DATASET, JOB, Registrations, links_of


class OtherName(NamedTuple):
    """A domain of a flow that is called otherwise in the tables."""

    kind: str
    name: str
    """The dataset or job of the flow that it is told of."""
    text: str


def other_names(
    flow: Flow, registered: Registrations, gone: Iterable[tuple[str, str]]
) -> Iterator[OtherName]:
    """The domains whose names differ, each with the line that the flow lacks.

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
        recorded = {of for item in whole if (of := before.domains.get(item)) in used}
        recorded -= {of for of in after.domains.values() if of != now}  # a part that split off
        if now == name and (not recorded or name in recorded):
            continue
        yield _other_name(flow, datasets, name, _kept(flow, after, whole, recorded))


def _kept(flow: Flow, after: Catalog, whole: Iterable[str], recorded: set[str]) -> str:
    """The name that a domain has to have: the one that others tell, or that its chunks have."""
    own = {dataset.datasetid for dataset in flow.datasets}
    told = {after.datasets[item].columns.get("domain") for item in {*whole} - own} - {None}
    return min(told or recorded or {after.domains[next(iter(whole))]}, key=str) or ""


def _other_name(flow: Flow, datasets: Iterable[str], name: str, kept: str) -> OtherName:
    names = f"partitions are called {kept!r} in the tables, and {name!r} by this flow"
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
    datasets = {
        name: rows[0].get("domain") if rows else None for name, rows in registered.datasets.items()
    }
    datasets = dict.fromkeys(registered.produced) | datasets
    after = {name: domain for name, domain in datasets.items() if (DATASET, name) not in gone}
    after |= {dataset.datasetid: dataset.domain for dataset in flow.datasets}
    links = {job: found for job, found in registered.links.items() if (JOB, job) not in gone}
    links |= {job.jobid: links_of(job) for job in flow.jobs}
    return _catalog(datasets, registered.links), _catalog(after, links)


def _catalog(
    domains: Mapping[str, str | None], links: Mapping[str, Iterable[tuple[str, str]]]
) -> Catalog:
    datasets = {name: CatalogDataset(name, {"domain": of}) for name, of in domains.items()}
    items = [(job, kind, item, None) for job, found in links.items() for kind, item in found]
    return Catalog.of(datasets, items, {})
