"""A project's pipelines as jobs: what each waits for, what it writes, and their registration."""

import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ..errors import Refused
from ..model import Plan
from ..store.catalog import read_jobs
from ..store.registry import add_job, datasets
from ..store.store import Store
from ..util.text import printable, typed
from .project import Pipeline, Project, ProjectError
from .transformation import takes_stream

MARK = "project"
"""The item of a job that names the project of its pipeline."""


def output_of(pipeline: Pipeline) -> str:
    """Return the dataset that a pipeline writes."""
    return pipeline.destination or pipeline.slug


class Known(NamedTuple):
    """The registered datasets and the other jobs around a project."""

    jobs: Mapping[str, Plan] = MappingProxyType({})
    """The jobs that aren't pipelines of the project."""
    placed: Collection[str] = ()
    """The datasets that are registered with a place."""
    written: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Pipeline → what it writes, if it is a job already."""

    @property
    def used(self) -> set[str]:
        """The datasets that are registered with a place, or read by other jobs."""
        return {*self.placed, *(source for plan in self.jobs.values() for source in plan.reads)}

    @property
    def produced(self) -> set[str]:
        """The datasets that other jobs write."""
        return {output for plan in self.jobs.values() for output in plan.outputs}


_NOTHING = Known()


def known_from(jobs: Mapping[str, Plan], placed: Collection[str], own: Collection[str]) -> Known:
    """Return what is registered around a project whose pipelines are its `own` jobs."""
    others = {jobid: plan for jobid, plan in jobs.items() if jobid not in own}
    return Known(others, placed, {slug: jobs[slug].outputs for slug in own if slug in jobs})


def plans_of(project: Project, known: Known = _NOTHING) -> dict[str, Plan]:
    """Return what each pipeline waits for and writes.

    A source that a pipeline or job produces is an input, with two exceptions: one produced from
    what the pipeline itself writes, since each would wait for the other, and one that items are
    appended to. A run reads the chunks of its own name: if the chunks of the inputs are named by
    different runs, a pipeline waits for none of them. All other sources are read as they are.
    """
    dependencies = _Dependencies(project, known)
    plans = {}
    for pipeline in project.pipelines:
        slug = pipeline.slug
        output = dependencies.written[slug]
        is_shared = bool(dependencies.writers.get(output, set()) - {slug})
        plans[slug] = Plan(
            slug,
            dependencies.inputs(slug),
            (output,),
            ((MARK, project.name),),
            (output,) if is_shared else (),
            False,
        )
    return plans


class _Dependencies:
    """Who writes and who reads which dataset, among a project's pipelines and the other jobs."""

    def __init__(self, project: Project, known: Known) -> None:
        item_pipelines = {
            pipeline.slug for pipeline in project.pipelines if takes_items(project, pipeline)
        }
        self.written = _written(project, known)
        """Pipeline → the dataset that it writes."""
        self.writers = _writers(project, self.written)
        """Dataset → the jobs that write it."""
        self._appended = {
            dataset for dataset, slugs in self.writers.items() if slugs & item_pipelines
        }
        self._reads: dict[str, Collection[str]] = {
            pipeline.slug: dict.fromkeys(pipeline.sources) for pipeline in project.pipelines
        }
        self._reads.update(dict.fromkeys(item_pipelines, ()))
        self._inputs: dict[str, tuple[str, ...]] = {}
        self._pipelines = set(self.written)
        for jobid, plan in known.jobs.items():
            self._reads[jobid] = self._inputs[jobid] = plan.reads
            for dataset in plan.outputs:
                self.writers.setdefault(dataset, set()).add(jobid)
            if MARK in dict(plan.environment):
                self._pipelines.add(jobid)

    def inputs(self, slug: str) -> tuple[str, ...]:
        """Return the sources that a pipeline or job waits for."""
        if slug not in self._inputs:
            sources = sorted(source for source in self._reads[slug] if self._may_wait(slug, source))
            namings = {frozenset(self._named_by(source)) for source in sources}
            self._inputs[slug] = tuple(sources) if len(namings) == 1 else ()
        return self._inputs[slug]

    def _may_wait(self, slug: str, source: str) -> bool:
        return (
            source in self.writers
            and source not in self._appended
            and source != self.written[slug]
            and not self._is_made_from(source, slug)
        )

    def _is_made_from(self, source: str, slug: str) -> bool:
        """Whether a pipeline contributes to a source, directly or through others."""
        seen: set[str] = set()
        todo = [source]
        while todo:
            writers = self.writers.get(todo.pop(), set()) - seen
            if slug in writers:
                return True
            seen |= writers
            todo += [dataset for writer in writers for dataset in self._reads[writer]]
        return False

    def _named_by(self, dataset: str) -> set[str]:
        """Return the pipelines whose runs name the chunks of a dataset; "" if people name them."""
        names: set[str] = set()
        seen: set[str] = set()
        todo = [dataset]
        while todo:
            writers = self.writers.get(todo.pop(), set())
            if not writers:
                names.add("")
            for writer in writers - seen:
                inputs = self.inputs(writer)
                seen.add(writer)
                todo += inputs
                if not inputs:
                    names.add(writer if writer in self._pipelines else "")
        return names


def is_read(project: Project, plans: Mapping[str, Plan], slug: str) -> bool:
    """Whether the chunks that a pipeline writes are read one by one.

    That is so if another pipeline waits for them, or reads what several pipelines write.
    """
    plan = plans[slug]
    [output] = plan.outputs
    return any(output in other.inputs for other in plans.values()) or (
        output in plan.rivals and any(output in pipeline.sources for pipeline in project.pipelines)
    )


def makers_of(project: Project, source: str) -> list[str]:
    """Return the pipelines that write what others read as `source`."""
    declared = {pipeline.slug: output_of(pipeline) for pipeline in project.pipelines}
    return sorted(_writers(project, declared).get(source, ()))


def in_order(project: Project) -> list[Pipeline]:
    """Sort pipelines after those that write their sources; within a cycle, as declared."""
    by_slug = {pipeline.slug: pipeline for pipeline in project.pipelines}
    ordered: dict[str, Pipeline] = {}
    visited: set[str] = set()

    def add(pipeline: Pipeline) -> None:
        if pipeline.slug not in visited:
            visited.add(pipeline.slug)
            for source in pipeline.sources:
                for maker in makers_of(project, source):
                    add(by_slug[maker])
            ordered[pipeline.slug] = pipeline

    for pipeline in project.pipelines:
        add(pipeline)
    return list(ordered.values())


def takes_items(project: Project, pipeline: Pipeline) -> bool:
    """Whether a transformation of a pipeline has a parameter `stream`; no file is executed."""
    return any(takes_stream(file, project.root) for file in _files(project, pipeline))


def why_no_items(project: Project, pipeline: Pipeline) -> str:
    """Return why a pipeline takes no items, and how to change that."""
    for file in _files(project, pipeline):
        if file.is_file() and takes_stream(file, project.root) is None:
            return (
                f"{file.relative_to(project.root)} would have to be executed to find its `run`. "
                "Write `def run(df, stream=None)` in the file"
            )
    return "none of its transformations has a parameter `stream`. Add it as the last one of `run`"


def _files(project: Project, pipeline: Pipeline) -> list[Path]:
    return [project.transformation_file(pipeline.slug, name) for name in pipeline.transformations]


def register(store: Store, project: Project, slug: str | None = None) -> dict[str, Plan]:
    """Register the pipelines of a project as jobs, or only `slug`; return the plans of all.

    What is registered already is neither written nor locked. A pipeline with an invalid declaration
    is left out, except `slug`: its error is raised.
    """
    wanted = project.pipelines if slug is None else (project.pipeline(slug),)
    if slug is not None and wanted[0].trouble:
        raise ProjectError(wanted[0].trouble)
    own = {pipeline.slug for pipeline in project.pipelines}
    plans = plans_of(project, known_of(store, own))
    for pipeline in wanted:
        if not pipeline.trouble:
            _register(store, project, plans[pipeline.slug], plans)
    return {
        pipeline.slug: plans[pipeline.slug]
        for pipeline in project.pipelines
        if not pipeline.trouble
    }


def known_of(store: Store, own: Collection[str]) -> Known:
    """Return what the tables have around a project whose pipelines are its `own` jobs."""
    rows, _ = store.db.insist(lambda: datasets(store))
    placed = {row["datasetid"] for row in rows if is_placed(row)}
    return known_from(read_jobs(store), placed, own)


def is_placed(columns: Mapping[str, str | None]) -> bool:
    """Whether a registration says where the data is."""
    return any(columns.get(name) for name in ("hostname", "database", "tablename"))


def _register(store: Store, project: Project, plan: Plan, plans: Mapping[str, Plan]) -> None:
    registered, _ = store.db.insist(lambda: store.read_plan(plan.jobid))
    items = dict(registered.environment)
    owner = items.get(MARK)
    is_same = (registered.inputs, registered.outputs) == (plan.inputs, plan.outputs)
    if is_same and owner == project.name:
        return
    if (registered.inputs or registered.outputs) and not is_same and owner != project.name:
        raise _another(project, registered, owner)
    add_job(
        store,
        plan.jobid,
        plan.inputs,
        plan.outputs,
        items | {MARK: project.name},
        replace=True,
        beside=plans.values(),
        origin=f"{MARK}:{project.name}",
    )


def _another(project: Project, registered: Plan, owner: str | None) -> Refused:
    reads = f"reads {', '.join(registered.inputs)} and " if registered.inputs else ""
    whose = f"of project {owner!r}" if owner else "that isn't a pipeline"
    return Refused(
        printable(
            f"Pipeline {registered.jobid!r} of {project.name!r} can't be a job: a job "
            f"{whose} has that name; it {reads}writes "
            f"{', '.join(registered.outputs) or 'nothing'}. Give the pipeline another slug; "
            f"`odf job list {typed(registered.jobid)}` shows that job."
        ),
        code="LOCKED",
    )


def _written(project: Project, known: Known) -> dict[str, str]:
    """Return what each pipeline writes: its destination, unless only several pipelines share it.

    Then each has its own file in `output/`, and its own dataset. A pipeline that has run keeps its
    own.
    """
    declared = {pipeline.slug: output_of(pipeline) for pipeline in project.pipelines}
    shared = Counter(declared.values())
    sources = {source for pipeline in project.pipelines for source in pipeline.sources}

    def own(slug: str, output: str) -> bool:
        if output in sources or output in known.produced or output in known.used:
            return False
        free = slug not in sources and slug not in shared and slug not in known.produced
        return shared[output] > 1 and free and known.written.get(slug) != (output,)

    return {slug: slug if own(slug, output) else output for slug, output in declared.items()}


def _writers(project: Project, written: Mapping[str, str]) -> dict[str, set[str]]:
    """Return which pipelines write a dataset that others may wait for."""
    writers: dict[str, set[str]] = {}
    for pipeline in project.pipelines:
        # A file in sources/ is older than the convention of naming an output like its pipeline.
        if pipeline.destination or not os.path.isfile(project.source_file(pipeline.slug)):
            writers.setdefault(written[pipeline.slug], set()).add(pipeline.slug)
    return writers
