"""A project's pipelines as jobs: what each waits for, what it writes, and their registration."""

import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ..dataflow.errors import Refused
from ..dataflow.model import Plan
from ..dataflow.names import printable, typed
from ..dataflow.registry import add_job, datasets
from ..dataflow.store import Store
from .annotation import takes_stream
from .project import Pipeline, Project, ProjectError

MARK = "project"
"""The item of a job that names the project whose pipeline it is."""


def output_of(pipeline: Pipeline) -> str:
    """The dataset that a pipeline writes."""
    return pipeline.destination or pipeline.slug


class Known(NamedTuple):
    """What the tables tell of the datasets of a project."""

    produced: Collection[str] = ()
    """What other jobs write."""
    used: Collection[str] = ()
    """What is registered with a place, or read by other jobs."""
    written: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """Pipeline → what it writes, if it is a job already."""


_NOTHING = Known()


def plans_of(project: Project, known: Known = _NOTHING) -> dict[str, Plan]:
    """What each pipeline waits for and writes.

    A source that somebody produces is an input, except for one that is made from what the pipeline
    itself writes, since each would wait for the other. All other sources are read as they stand.
    """
    written, produced = _written(project, known), known.produced
    items = {each.slug for each in project.pipelines if takes_items(project, each)}
    writers = _writers(project, written)
    reads = {
        each.slug: [] if each.slug in items else list(dict.fromkeys(each.sources))
        for each in project.pipelines
    }

    def depends(source: str, slug: str) -> bool:
        seen, todo = set(), [source]
        while todo:
            made_by = writers.get(todo.pop(), set()) - seen
            if slug in made_by:
                return True
            seen |= made_by
            todo += [each for writer in made_by for each in reads[writer]]
        return False

    found = {}
    for each in project.pipelines:
        output = written[each.slug]
        inputs = sorted(
            source
            for source in reads[each.slug]
            if source != output
            and (source in writers or source in produced)
            and not depends(source, each.slug)
        )
        shared = output in produced or len(writers.get(output, ())) > 1
        found[each.slug] = Plan(
            each.slug, tuple(inputs), (output,), ((MARK, project.name),),
            (output,) if shared else (), False,
        )  # fmt: skip
    return found


def is_read(plans: Mapping[str, Plan], slug: str) -> bool:
    """Whether another pipeline of the project waits for what this one writes."""
    output = plans[slug].outputs[0]
    return any(output in each.inputs for each in plans.values())


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
            _register(store, project, plans[each.slug])
    return {each.slug: plans[each.slug] for each in project.pipelines if not each.trouble}


def known_of(store: Store, own: Collection[str]) -> Known:
    """What the tables tell of the datasets of a project, whose pipelines are its `own` jobs."""
    edges, _ = store.db.insist(lambda: store.db.run("moves.edges"))
    rows, _ = store.db.insist(lambda: datasets(store))
    produced, used = set[str](), {row["datasetid"] for row in rows if is_placed(row)}
    written: dict[str, tuple[str, ...]] = {}
    for job, kind, datasetid in edges:
        if job in own:
            if kind == "OUT":
                written[job] = (*written.get(job, ()), datasetid)
        else:
            (produced if kind == "OUT" else used).add(datasetid)
    return Known(produced, used, written)


def is_placed(columns: Mapping[str, str | None]) -> bool:
    """Whether a registration says where the data is."""
    return any(columns.get(name) for name in ("hostname", "database", "tablename"))


def _register(store: Store, project: Project, plan: Plan) -> None:
    there, _ = store.db.insist(lambda: store.read_plan(plan.jobid))
    items = dict(there.environment)
    marked = items.get(MARK)
    same = (there.inputs, there.outputs) == (plan.inputs, plan.outputs)
    if same and marked == project.name:
        return
    if (there.inputs or there.outputs) and not same and marked != project.name:
        raise _another(project, there, marked)
    add_job(
        store, plan.jobid, plan.inputs, plan.outputs, items | {MARK: project.name}, replace=True
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
