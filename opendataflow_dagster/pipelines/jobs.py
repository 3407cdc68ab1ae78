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
"""The item of a job that names the project whose pipeline it is."""


def output_of(pipeline: Pipeline) -> str:
    """The dataset that a pipeline writes."""
    return pipeline.destination or pipeline.slug


class Known(NamedTuple):
    """What the tables tell of the datasets and the other jobs around a project."""

    jobs: Mapping[str, Plan] = MappingProxyType({})
    """The jobs that aren't pipelines of the project."""
    placed: Collection[str] = ()
    """What is registered with a place."""
    written: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Pipeline → what it writes, if it is a job already."""

    @property
    def used(self) -> set[str]:
        """What is registered with a place, or read by other jobs."""
        return {*self.placed, *(each for plan in self.jobs.values() for each in plan.reads)}

    @property
    def produced(self) -> set[str]:
        """What other jobs write."""
        return {each for plan in self.jobs.values() for each in plan.outputs}


_NOTHING = Known()


def known_from(jobs: Mapping[str, Plan], placed: Collection[str], own: Collection[str]) -> Known:
    """What registrations tell to a project whose pipelines are its `own` jobs."""
    others = {jobid: plan for jobid, plan in jobs.items() if jobid not in own}
    return Known(others, placed, {slug: jobs[slug].outputs for slug in own if slug in jobs})


def plans_of(project: Project, known: Known = _NOTHING) -> dict[str, Plan]:
    """What each pipeline waits for and writes.

    A source that somebody produces is an input, except for one that is made from what the pipeline
    itself writes, since each would wait for the other, and one that items are appended to. A run
    reads the chunks of its own name: a pipeline waits for none of its inputs if their chunks are
    named by different runs. All other sources are read as they stand.
    """
    written = _written(project, known)
    items = {each.slug for each in project.pipelines if takes_items(project, each)}
    writers = {each: set(slugs) for each, slugs in _writers(project, written).items()}
    appended = {each for each, slugs in writers.items() if slugs & items}
    reads: dict[str, Collection[str]] = {
        each.slug: () if each.slug in items else dict.fromkeys(each.sources)
        for each in project.pipelines
    }
    for jobid, plan in known.jobs.items():
        reads[jobid] = plan.reads
        for each in plan.outputs:
            writers.setdefault(each, set()).add(jobid)
    pipelines = set(written)
    pipelines |= {jobid for jobid, plan in known.jobs.items() if MARK in dict(plan.environment)}
    waits: dict[str, tuple[str, ...]] = {jobid: plan.reads for jobid, plan in known.jobs.items()}

    def depends(source: str, slug: str) -> bool:
        seen, todo = set(), [source]
        while todo:
            made_by = writers.get(todo.pop(), set()) - seen
            if slug in made_by:
                return True
            seen |= made_by
            todo += [each for writer in made_by for each in reads[writer]]
        return False

    def waits_for(slug: str) -> tuple[str, ...]:
        if slug not in waits:
            found = sorted(
                source
                for source in reads[slug]
                if source in writers
                and source not in appended
                and source != written[slug]
                and not depends(source, slug)
            )
            named = {frozenset(named_by(each)) for each in found}
            waits[slug] = tuple(found) if len(named) == 1 else ()
        return waits[slug]

    def named_by(dataset: str) -> set[str]:
        """The pipelines whose runs name the chunks of a dataset; "" if people do."""
        seen, todo, found = set(), [dataset], set()
        while todo:
            source = todo.pop()
            made_by = writers.get(source, set())
            if not made_by:
                found.add("")
            for writer in made_by - seen:
                above = waits_for(writer)
                seen.add(writer)
                todo += above
                if not above:
                    found.add(writer if writer in pipelines else "")
        return found

    found = {}
    for each in project.pipelines:
        output = written[each.slug]
        shared = bool(writers.get(output, set()) - {each.slug})
        found[each.slug] = Plan(
            each.slug,
            waits_for(each.slug),
            (output,),
            ((MARK, project.name),),
            (output,) if shared else (),
            False,
        )
    return found


def is_read(project: Project, plans: Mapping[str, Plan], slug: str) -> bool:
    """Whether the chunks of what a pipeline writes are read one by one.

    Another pipeline waits for them, or reads what several pipelines write.
    """
    plan = plans[slug]
    [output] = plan.outputs
    return any(output in each.inputs for each in plans.values()) or (
        output in plan.rivals and any(output in each.sources for each in project.pipelines)
    )


def makers_of(project: Project, source: str) -> list[str]:
    """The pipelines that write what others read as `source`."""
    declared = {each.slug: output_of(each) for each in project.pipelines}
    return sorted(_writers(project, declared).get(source, ()))


def in_order(project: Project) -> list[Pipeline]:
    """The pipelines, each after those that write its sources; in a circle, as they are declared."""
    named = {each.slug: each for each in project.pipelines}
    found: dict[str, Pipeline] = {}
    begun: set[str] = set()

    def add(pipeline: Pipeline) -> None:
        if pipeline.slug not in begun:
            begun.add(pipeline.slug)
            for source in pipeline.sources:
                for maker in makers_of(project, source):
                    add(named[maker])
            found[pipeline.slug] = pipeline

    for each in project.pipelines:
        add(each)
    return list(found.values())


def takes_items(project: Project, pipeline: Pipeline) -> bool:
    """Whether a transformation of a pipeline has a parameter `stream`; none of them is run."""
    return any(takes_stream(file, project.root) for file in _files(project, pipeline))


def why_no_items(project: Project, pipeline: Pipeline) -> str:
    """Why a pipeline takes no items, and what would have it take some."""
    for file in _files(project, pipeline):
        if file.is_file() and takes_stream(file, project.root) is None:
            return (
                f"how `run` is defined in {file.relative_to(project.root)} can't be read without "
                "running it. Write `def run(df, stream=None)` in the file"
            )
    return "none of its transformations has a parameter `stream`. Add it as the last one of `run`"


def _files(project: Project, pipeline: Pipeline) -> list[Path]:
    return [project.transformation_file(pipeline.slug, name) for name in pipeline.transformations]


def register(store: Store, project: Project, slug: str | None = None) -> dict[str, Plan]:
    """Make the pipelines of a project jobs, or only the one called `slug`; the plans of all.

    What is registered already is neither written nor locked. Pipelines whose declaration is wrong
    are left out; if it is the one asked for, that is raised.
    """
    wanted = project.pipelines if slug is None else (project.pipeline(slug),)
    if slug is not None and wanted[0].trouble:
        raise ProjectError(wanted[0].trouble)
    own = {each.slug for each in project.pipelines}
    plans = plans_of(project, known_of(store, own))
    for each in wanted:
        if not each.trouble:
            _register(store, project, plans[each.slug], plans)
    return {each.slug: plans[each.slug] for each in project.pipelines if not each.trouble}


def known_of(store: Store, own: Collection[str]) -> Known:
    """The same as the tables have it."""
    rows, _ = store.db.insist(lambda: datasets(store))
    placed = {row["datasetid"] for row in rows if is_placed(row)}
    return known_from(read_jobs(store), placed, own)


def is_placed(columns: Mapping[str, str | None]) -> bool:
    """Whether a registration says where the data is."""
    return any(columns.get(name) for name in ("hostname", "database", "tablename"))


def _register(store: Store, project: Project, plan: Plan, plans: Mapping[str, Plan]) -> None:
    there, _ = store.db.insist(lambda: store.read_plan(plan.jobid))
    items = dict(there.environment)
    marked = items.get(MARK)
    same = (there.inputs, there.outputs) == (plan.inputs, plan.outputs)
    if same and marked == project.name:
        return
    if (there.inputs or there.outputs) and not same and marked != project.name:
        raise _another(project, there, marked)
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


def _another(project: Project, there: Plan, marked: str | None) -> Refused:
    reads = f"reads {', '.join(there.inputs)} and " if there.inputs else ""
    whose = f"of the project {marked!r}" if marked else "of another kind"
    return Refused(
        printable(
            f"Pipeline {there.jobid!r} of {project.name!r} can't be a job: there is one {whose} by "
            f"that name, which {reads}writes {', '.join(there.outputs) or 'nothing'}. Give the "
            f"pipeline another slug; `odf job list {typed(there.jobid)}` shows that job."
        ),
        code="LOCKED",
    )


def _written(project: Project, known: Known) -> dict[str, str]:
    """What each pipeline writes: its destination, unless several have that and nobody else.

    They have a file each then, in `output/`, and so a dataset each. What has run stays what it is.
    """
    declared = {each.slug: output_of(each) for each in project.pipelines}
    shared = Counter(declared.values())
    sources = {source for each in project.pipelines for source in each.sources}

    def own(slug: str, output: str) -> bool:
        if output in sources or output in known.produced or output in known.used:
            return False
        free = slug not in sources and slug not in shared and slug not in known.produced
        return shared[output] > 1 and free and known.written.get(slug) != (output,)

    return {slug: slug if own(slug, output) else output for slug, output in declared.items()}


def _writers(project: Project, written: Mapping[str, str]) -> dict[str, set[str]]:
    """Which pipelines write a dataset that others may wait for."""
    found: dict[str, set[str]] = {}
    for each in project.pipelines:
        # A file in sources/ is older than the habit of calling an output like its pipeline.
        if each.destination or not os.path.isfile(project.source_file(each.slug)):
            found.setdefault(written[each.slug], set()).add(each.slug)
    return found
