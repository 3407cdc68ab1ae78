"""What a flow declares, as the catalog that the tables would have of it: no database is asked."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import FlowError
from ..model import DIALS
from ..store.catalog import SECRET, Catalog, CatalogDataset
from ..store.registry import dial_value
from .flow import Dataset, Flow, Job


def catalog_of(
    flow: Flow, command: str = "odf apply", environ: Mapping[str, str] = os.environ
) -> Catalog:
    """The catalog of what a flow declares.

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
    """A dataset of the catalog; what isn't said of it is what is said of the job that writes it."""
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
