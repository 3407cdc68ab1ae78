"""The projects of a code location: which of their pipelines are assets, and as which jobs."""

import logging
from collections.abc import Iterable, Mapping
from os import PathLike
from typing import NamedTuple

from ..config.settings import BUILT_IN, FILE_NAME
from ..errors import DataflowError, WrongUse
from ..model import Plan
from ..pipelines.jobs import is_placed, known_from, plans_of, register, takes_items
from ..pipelines.project import Pipeline, Project, find_project, read_project
from ..pipelines.project_settings import open_project, project_settings
from ..store.catalog import Catalog
from ..store.claimable import Offer
from ..store.periodic_runs import begin_due_runs, without_items
from ..store.store import Store
from ..util.text import first_line
from .resources import DataflowResource

_log = logging.getLogger("opendataflow_dagster")

Folder = str | PathLike[str]


class Shown(NamedTuple):
    """A pipeline that is an asset here."""

    project: Project
    pipeline: Pipeline
    plan: Plan
    items: bool


class Projects:
    """The projects of a code location, as they are when it is loaded."""

    def __init__(self, folders: Iterable[Folder]) -> None:
        self._projects = [read_project(find_project(str(each))) for each in folders]
        self._registered = False
        self.shown: dict[str, Shown] = {}
        for project in self._projects:
            for each in project.pipelines:
                if each.trouble:
                    _log.warning("%s: %s It is left out.", project.root, each.trouble)

    def known_to(self, catalog: Catalog) -> Catalog:
        """A catalog with the jobs that the pipelines are."""
        plans: dict[str, Plan] = {}
        own = {each.slug for project in self._projects for each in _sound(project)}
        placed = {each for each, found in catalog.datasets.items() if is_placed(found.columns)}
        known = known_from(catalog.jobs, placed, own)
        alone = [plans_of(project, known) for project in self._projects]
        for project, mine in zip(self._projects, alone, strict=True):
            jobs = {**known.jobs}
            for others in alone:
                jobs |= {} if others is mine else others
            found = plans_of(project, known._replace(jobs=jobs))
            for each in _sound(project):
                if each.slug in plans:
                    raise WrongUse(
                        f"Pipeline {each.slug!r} of {project.root} is in another project too, but "
                        "a job has one of them. Give one another slug, or a location of its own."
                    )
                plans[each.slug] = found[each.slug]
        self._choose(plans)
        return catalog.with_jobs(plans)

    @property
    def roots(self) -> frozenset[str]:
        """Those that wait for no other: their runs are begun, not claimed."""
        return frozenset(slug for slug, each in self.shown.items() if not each.plan.reads)

    @property
    def taking_items(self) -> frozenset[str]:
        """Those whose items are left to `odf serve`."""
        return frozenset(slug for slug, each in self.shown.items() if each.items)

    def begin_due_runs(self, store: Store) -> list[tuple[str, str]]:
        """Begin the runs that are due of pipelines that wait for no other: (jobid, dataid)."""
        self.register_in(store)
        return begin_due_runs(store, self.roots)

    def offered(self, store: Store, found: Offer) -> Offer:
        """What there is to launch of what a job offers: of a pipeline's chunks not its items."""
        if found.jobid in self.taking_items:
            found = without_items(store, found)
        if found.jobid in self.roots:  # a run is begun when it is due, so it isn't early
            found = found._replace(every_minutes=None)
        return found

    def register(self, dataflow: DataflowResource) -> None:
        """Make the pipelines jobs, if the tables can be reached; else a run does so itself."""
        store = dataflow.patient_store(0.0)
        try:
            self.register_in(store)
        except Exception as error:
            if not (isinstance(error, DataflowError) or store.db.trouble(error)):
                raise
            _log.warning("The pipelines aren't registered yet: %s", first_line(error))
        finally:
            store.db.drop()

    def register_in(self, store: Store) -> None:
        """Make the pipelines jobs, once; one that can't be is told, and the others are."""
        if self._registered:
            return
        for project in self._projects:
            for each in _sound(project):
                try:
                    register(store, project, each.slug)
                except DataflowError as error:
                    if store.db.trouble(error) or not hasattr(error, "code"):
                        raise
                    _log.warning("%s", first_line(error))
        self._registered = True

    def _choose(self, plans: Mapping[str, Plan]) -> None:
        """Of the pipelines that write one dataset, one is its asset: one without items rather."""
        maker: dict[str, str] = {}
        found: dict[str, Shown] = {}
        for project in self._projects:
            for each in _sound(project):
                items = takes_items(project, each)
                found[each.slug] = Shown(project, each, plans[each.slug], items)
        for slug in sorted(found, key=lambda slug: found[slug].items):
            output = plans[slug].outputs[0]
            if (other := maker.setdefault(output, slug)) != slug:
                _log.warning(
                    "Pipelines %r and %r both write %r: an asset can be made by one of them, so "
                    "Dagster doesn't run %r. Its chunks are shown all the same.",
                    other,
                    slug,
                    output,
                    slug,
                )
        self.shown = {slug: found[slug] for slug in found if slug in maker.values()}


def tables_of(
    folder: Folder, *, make: bool = True, timezone: str | None = None
) -> DataflowResource:
    """The tables that `odf pipeline` uses for a project.

    If nothing is configured they are in the project, and made there unless `make` is off.
    """
    root = find_project(str(folder))
    settings = project_settings(root)
    if settings.origin == BUILT_IN:
        if make:
            open_project(settings).close()
        return DataflowResource(url=settings.url, timezone=timezone)
    own = root / FILE_NAME
    config = str(own) if settings.origin == str(own) else None
    return DataflowResource(config=config, timezone=timezone)


def _sound(project: Project) -> list[Pipeline]:
    return [each for each in project.pipelines if not each.trouble]
