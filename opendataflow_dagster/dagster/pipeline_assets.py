"""The pipelines of a project as assets: a graph each, with a step per transformation."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from os import PathLike
from types import MappingProxyType
from typing import Any, NamedTuple

import dagster as dg

from ..config.settings import BUILT_IN, FILE_NAME
from ..errors import DataflowError, WrongUse
from ..model import Plan
from ..pipelines.jobs import is_placed, known_from, plans_of, register, takes_items
from ..pipelines.project import (
    Pipeline,
    Project,
    find_project,
    open_project,
    project_settings,
    read_project,
)
from ..pipelines.transformation import engine_of
from ..store.catalog import Catalog
from ..store.claims import Offer
from ..store.items import begin_due_runs, without_items
from ..store.store import Store
from ..util.text import first_line, printable
from .job_assets import described, silent_outputs
from .pipeline_steps import CLAIM, OVER, StepFlow, begin, publish, tell_stale, transform
from .resources import PYSPARK_KEY, RESOURCE_KEY, DataflowResource
from .translator import DataflowTranslator
from .versions import STALE_CHECK, stale_check

_log = logging.getLogger("opendataflow_dagster")

ProjectFolder = str | PathLike[str]


class PipelineJob(NamedTuple):
    """A pipeline that is an asset here."""

    project: Project
    pipeline: Pipeline
    plan: Plan
    items: bool


class Projects:
    """The projects of a code location, as of its loading."""

    def __init__(
        self,
        folders: Iterable[ProjectFolder],
        engines: Mapping[str, str | None] = MappingProxyType({}),
    ) -> None:
        """Read the projects; `engines` sets the engine of some pipelines."""
        self._engines = engines
        self._projects = [read_project(find_project(str(folder))) for folder in folders]
        self._registered = False
        self.shown: dict[str, PipelineJob] = {}
        for project in self._projects:
            for pipeline in project.pipelines:
                if pipeline.trouble:
                    _log.warning("%s: %s It is left out.", project.root, pipeline.trouble)

    def known_to(self, catalog: Catalog) -> Catalog:
        """Return a catalog that includes the pipelines as jobs."""
        plans: dict[str, Plan] = {}
        own = {pipeline.slug for project in self._projects for pipeline in _without_faults(project)}
        placed = {
            datasetid for datasetid, found in catalog.datasets.items() if is_placed(found.columns)
        }
        known = known_from(catalog.jobs, placed, own)
        alone = [plans_of(project, known) for project in self._projects]
        for project, mine in zip(self._projects, alone, strict=True):
            jobs = {**known.jobs}
            for others in alone:
                jobs |= {} if others is mine else others
            found = plans_of(project, known._replace(jobs=jobs))
            for pipeline in _without_faults(project):
                if pipeline.slug in plans:
                    raise WrongUse(
                        f"Pipeline {pipeline.slug!r} of {project.root} has the slug of a pipeline "
                        "in another project, but a job runs one pipeline. Rename one slug, or put "
                        "one project in its own code location."
                    )
                plans[pipeline.slug] = found[pipeline.slug]
        self._choose(plans)
        return catalog.with_jobs(plans)

    @property
    def roots(self) -> frozenset[str]:
        """The pipelines without upstream datasets: their runs are started, not claimed."""
        return frozenset(slug for slug, job in self.shown.items() if not job.plan.reads)

    @property
    def taking_items(self) -> frozenset[str]:
        """The pipelines whose items are left to `odf serve`."""
        return frozenset(slug for slug, job in self.shown.items() if job.items)

    def begin_due_runs(self, store: Store) -> list[tuple[str, str]]:
        """Start the runs that are due of pipelines without upstream datasets: (jobid, dataid)."""
        self.register_in(store)
        return begin_due_runs(store, self.roots)

    def offered(self, store: Store, found: Offer) -> Offer:
        """Return what to launch of what a job offers: of a pipeline's chunks, not its items."""
        if found.jobid in self.taking_items:
            found = without_items(store, found)
        if found.jobid in self.roots:  # a run starts only when it is due, so it is never early
            found = found._replace(every_minutes=None)
        return found

    def register(self, dataflow: DataflowResource) -> None:
        """Register the pipelines as jobs if the tables can be reached; otherwise a run does so."""
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
        """Register the pipelines as jobs, once; log and leave out those that are refused."""
        if self._registered:
            return
        for project in self._projects:
            for pipeline in _without_faults(project):
                try:
                    register(store, project, pipeline.slug)
                except DataflowError as error:
                    if store.db.trouble(error) or not hasattr(error, "code"):
                        raise
                    _log.warning("%s", first_line(error))
        self._registered = True

    def _choose(self, plans: Mapping[str, Plan]) -> None:
        """Choose the asset of datasets with several pipelines, preferably one without items."""
        maker: dict[str, str] = {}
        found: dict[str, PipelineJob] = {}
        for project in self._projects:
            for pipeline in _without_faults(project):
                items = takes_items(project, pipeline)
                found[pipeline.slug] = PipelineJob(
                    project.on(self._engines.get(pipeline.slug)),
                    pipeline,
                    plans[pipeline.slug],
                    items,
                )
        for slug in sorted(found, key=lambda slug: found[slug].items):
            output = plans[slug].outputs[0]
            if (other := maker.setdefault(output, slug)) != slug:
                _log.warning(
                    "Pipelines %r and %r both write %r. One of them produces the asset, so Dagster "
                    "doesn't run %r. Its chunks are shown all the same.",
                    other,
                    slug,
                    output,
                    slug,
                )
        self.shown = {slug: found[slug] for slug in found if slug in maker.values()}


def tables_of(
    folder: ProjectFolder, *, make: bool = True, timezone: str | None = None
) -> DataflowResource:
    """Return the tables that `odf pipeline` uses for a project.

    If nothing is configured, they are in the project; `make=False` doesn't create them.
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


def _without_faults(project: Project) -> list[Pipeline]:
    return [pipeline for pipeline in project.pipelines if not pipeline.trouble]


HANDOVER_KEY = "opendataflow_handover"
"""The key of the IO manager between steps: the project's own may accept only frames."""

_FILES = dg.FilesystemIOManager()  # shared: Dagster refuses two objects with one key


def pipeline_assets(
    project_dir: ProjectFolder,
    dataflow: DataflowResource | Catalog | None = None,
    *,
    translator: DataflowTranslator | None = None,
    pyspark: bool = False,
) -> list[dg.AssetsDefinition]:
    """Return an asset for each pipeline of a project: a graph of one step per transformation.

    The step `begin` claims a chunk; `publish` publishes and settles it. A pipeline with a fault in
    project.yml is left out, with a warning. `build_definitions(projects=[…])` adds the sensors.

    Args:
        project_dir: The folder of project.yml.
        dataflow: The tables, or a catalog read from them; by default the tables that
            `odf pipeline` uses for the project. The assets bring these tables, unless the
            definitions have a resource named `dataflow`.
        translator: Names datasets, chunks and jobs in Dagster.
        pyspark: Whether to take the Spark session from the resource `pyspark`.

    Raises:
        DataflowError: The folder has no project.yml, or one that can't be read.

    Example:
        defs = dg.Definitions(assets=pipeline_assets("shop"))
    """
    dataflow = dataflow or tables_of(project_dir)
    projects = Projects([project_dir])
    if isinstance(dataflow, Catalog):
        return assets_of(projects, projects.known_to(dataflow), translator, pyspark=pyspark)
    catalog = dataflow.catalog()
    projects.register(dataflow)
    return assets_of(
        projects, projects.known_to(catalog), translator, pyspark=pyspark, tables=dataflow
    )


def assets_of(
    projects: Projects,
    catalog: Catalog,
    translator: DataflowTranslator | None = None,
    *,
    pyspark: bool = False,
    tables: DataflowResource | None = None,
) -> list[dg.AssetsDefinition]:
    """Return the assets of projects that the catalog knows, in the order of their declaration.

    They bring `tables` with them, or else use the resource `dataflow`.
    """
    translator = translator or DataflowTranslator()
    definitions: list[dg.AssetsDefinition] = []
    for job in projects.shown.values():
        flow = StepFlow(job.project, job.pipeline, translator, pyspark)
        asset = _asset(flow, catalog, job)
        if tables is not None:
            key, bare = _key_of(tables), asset
            asset = _asset(flow._replace(tables=key), catalog, job, {key: _tables[key]})
            asset.bare = bare
        definitions.append(asset)
    return definitions


class _Asset(dg.AssetsDefinition):
    """A pipeline's asset; a resource of the definitions overrides the tables that it brings."""

    bare: dg.AssetsDefinition | None = None
    """The same asset without its tables, if it brings some."""

    def with_resources(
        self, resource_defs: Mapping[str, dg.ResourceDefinition]
    ) -> dg.AssetsDefinition:
        """Dagster calls this to hand out the resources of the definitions."""
        if self.bare is not None and RESOURCE_KEY in resource_defs:
            return self.bare.with_resources(resource_defs)
        return super().with_resources(resource_defs)


_tables: dict[str, DataflowResource] = {}


def _key_of(tables: DataflowResource) -> str:
    """Return a key for tables that an asset brings: Dagster refuses two objects with one key."""
    fields = (tables.url, tables.schema_, tables.user, tables.config, tables.timezone)
    text = repr([(type(field).__name__, field) for field in fields])  # an EnvVar is a str, too
    key = f"opendataflow_{sha256(text.encode()).hexdigest()[:12]}"
    _tables.setdefault(key, tables)
    return key


def _asset(
    flow: StepFlow,
    catalog: Catalog,
    shown: PipelineJob,
    brought: Mapping[str, Any] = MappingProxyType({}),
) -> _Asset:
    """Return the asset that a pipeline writes, with its graph."""
    translator, pipeline = flow.translator, flow.pipeline
    spec = translator.spec(catalog, shown.plan.outputs[0], flow.slug)
    engines = [
        engine_of(flow.project.transformation_file(flow.slug, name))
        for name in pipeline.transformations
    ]
    about = {"opendataflow/project": str(flow.project.root)}
    if pipeline.sources:
        about["opendataflow/sources"] = ", ".join(pipeline.sources)
    spec = spec.replace_attributes(
        kinds={*spec.kinds, *engines}, metadata={**about, **spec.metadata}
    )
    steps = ", ".join(f"`{printable(name)}`" for name in pipeline.transformations)
    spec = described(spec, catalog, flow.slug, f"pipeline `{printable(flow.slug)}`: {steps}")
    ins = {f"input_{at}": dep.asset_key for at, dep in enumerate(spec.deps)}
    checks = {}
    if shown.plan.reads:
        checks[STALE_CHECK] = stale_check(shown.plan.outputs[0]).spec(translator)
    return _Asset(
        keys_by_input_name=ins,
        keys_by_output_name={"chunk": spec.key},
        node_def=_graph(flow, list(ins), ["chunk", *checks], engines),
        specs=[spec],
        check_specs_by_output_name=checks,
        can_subset=False,
        backfill_policy=dg.BackfillPolicy.multi_run(1),
        resource_defs={HANDOVER_KEY: _FILES, **brought},
    )


def _graph(
    flow: StepFlow, ins: list[str], outs: list[str], engines: list[str]
) -> dg.GraphDefinition:
    """Chain `begin`, the transformations, and `publish`.

    `begin` may find nothing to do, for example because the chunk is READY. Then the transformations
    are skipped, but `publish` runs: without its output, Dagster would skip downstream steps too.
    """
    names = _unique_names([flow.translator.op_name(name) for name in flow.pipeline.transformations])
    first, last = _unused_name("begin", names), _unused_name("publish", names)
    ops = [
        _begin_op(flow, first, ins),
        *(
            _transform_op(flow, name, number, engine)
            for number, (name, engine) in enumerate(zip(names, engines, strict=True), 1)
        ),
        _publish_op(flow, last, outs),
    ]
    return _wire(flow.translator.op_name(flow.slug), ops, [first, *names, last], ins, outs)


def _op(flow: StepFlow, name: str, function: Callable[..., Any], **options: Any) -> dg.OpDefinition:
    """Return an op of a pipeline; its name is unique among the ops of the code location."""
    return dg.op(
        name=f"{flow.translator.op_name(flow.slug)}__{name}",
        required_resource_keys={flow.tables, *([PYSPARK_KEY] if flow.pyspark else [])},
        pool=flow.translator.pool(flow.slug),
        **options,
    )(function)


def _begin_op(flow: StepFlow, name: str, ins: list[str]) -> dg.OpDefinition:
    def run(context) -> Iterator[dg.Output]:
        yield from begin(context, flow)

    out = dg.Out(dict, is_required=False, io_manager_key=HANDOVER_KEY)
    return _op(
        flow,
        name,
        run,
        description=f"Claims a chunk of pipeline {flow.slug}.",
        ins=dict.fromkeys(ins, dg.In(dg.Nothing)),
        out={CLAIM: out, OVER: out},
    )


def _transform_op(flow: StepFlow, name: str, number: int, engine: str) -> dg.OpDefinition:
    transformation = flow.pipeline.transformations[number - 1]
    file = flow.project.transformation_file(flow.slug, transformation)

    def run(context, handed):
        transform(context, flow, number, transformation, handed)
        return handed

    path = file.relative_to(flow.project.root)
    return _op(
        flow,
        name,
        run,
        description=(f"Transformation {printable(transformation)} of pipeline {flow.slug}: {path}"),
        ins={"handed": dg.In(dict)},
        out={CLAIM: dg.Out(dict, io_manager_key=HANDOVER_KEY)},
        tags={"dagster/compute_kind": engine},
    )


def _publish_op(flow: StepFlow, name: str, outs: list[str]) -> dg.OpDefinition:
    def run(context, handed):
        for claim in handed:
            if claim:
                publish(context, flow, claim)
        yield from silent_outputs(context, ["chunk"])
        if STALE_CHECK in outs:
            yield from tell_stale(context, flow)
            yield dg.Output(None, STALE_CHECK)

    return _op(
        flow,
        name,
        run,
        description=f"Publishes and settles the chunk of pipeline {flow.slug}.",
        ins={"handed": dg.In(list)},
        # Not required: the step logs an event for the chunk that it published.
        out=dict.fromkeys(outs, dg.Out(dg.Nothing, is_required=False)),
    )


def _wire(
    graph: str, ops: list[dg.OpDefinition], names: list[str], ins: list[str], outs: list[str]
) -> dg.GraphDefinition:
    """Connect the ops in a row; the last one runs even if the first had nothing to do."""
    first, last = names[0], names[-1]
    wires: dict[Any, Mapping[str, Any]] = {dg.NodeInvocation(ops[0].name, alias=first): {}}
    before = dg.DependencyDefinition(first, CLAIM)
    for op, name in zip(ops[1:-1], names[1:-1], strict=True):
        wires[dg.NodeInvocation(op.name, alias=name)] = {"handed": before}
        before = dg.DependencyDefinition(name, CLAIM)
    wires[dg.NodeInvocation(ops[-1].name, alias=last)] = {
        "handed": dg.MultiDependencyDefinition([before, dg.DependencyDefinition(first, OVER)])
    }
    return dg.GraphDefinition(
        name=graph,
        node_defs=ops,
        dependencies=wires,
        input_mappings=[
            dg.InputMapping(
                graph_input_name=name, mapped_node_name=first, mapped_node_input_name=name
            )
            for name in ins
        ],
        output_mappings=[
            dg.OutputMapping(
                graph_output_name=name, mapped_node_name=last, mapped_node_output_name=name
            )
            for name in outs
        ],
    )


def _unique_names(names: list[str]) -> list[str]:
    """Return the names with a number appended to repeated ones: a file may be used twice."""
    unique: list[str] = []
    for name in names:
        unique.append(_unused_name(name, unique))
    return unique


def _unused_name(name: str, taken: Iterable[str]) -> str:
    at, free, taken = 1, name, set(taken)
    while free in taken:
        at += 1
        free = f"{name}_{at}"
    return free
