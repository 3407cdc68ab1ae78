"""Names of jobs and datasets, as a shell completes them: `odf why lo<TAB>`."""

import os

import click
from click.shell_completion import CompletionItem

from ..config.settings import load_settings
from ..errors import DataflowError
from ..store import open_from
from ..store.operations import dataset_names
from ..store.store import job_names
from .fast_run import choose_target


class Name(click.ParamType):
    """The name of a job or a dataset; what the tables have of them completes it."""

    name = "text"

    def __init__(self, *, jobs: bool = False, datasets: bool = False) -> None:
        self.jobs, self.datasets = jobs, datasets

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        options = ctx.find_root().params
        try:
            names = self._names(options.get("config"), options.get("target"))
        except (DataflowError, OSError):  # a TAB prints no error
            return []
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    def _names(self, config: str | None, target: str | None) -> list[str]:
        choose_target(config, target)
        settings = load_settings(config)
        is_file = settings.url.startswith("sqlite:///")
        if is_file and not os.path.isfile(settings.url.removeprefix("sqlite:///")):
            return []
        store = open_from(settings)
        try:
            found = [
                *(job_names(store) if self.jobs else []),
                *(dataset_names(store) if self.datasets else []),
            ]
        finally:
            store.close()
        return sorted(set(found))


JOB, DATASET, ANY = Name(jobs=True), Name(datasets=True), Name(jobs=True, datasets=True)
