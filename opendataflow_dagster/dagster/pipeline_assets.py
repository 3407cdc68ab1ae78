"""The pipelines of a project as assets: a graph each, with a step for each transformation."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import dagster as dg

from ..pipelines.annotation import engine_of
from ..store.catalog import Catalog
from ..util.text import printable
from .assets import SILENT
from .pipeline_projects import Folder, Projects, Shown, tables_of
from .pipeline_run import PYSPARK, RESOURCE
from .pipeline_steps import CLAIM, OVER, Flow, begin, publish, transform
from .resources import DataflowResource
from .translator import DataflowTranslator

HANDOVER = "opendataflow_handover"
"""The key of the IO manager between steps: a project's own may keep frames only."""

_FILES = dg.FilesystemIOManager()  # one for all: Dagster refuses two objects by one key


def pipeline_assets(
    project_dir: Folder,
    dataflow: DataflowResource | Catalog | None = None,
    *,
    translator: DataflowTranslator | None = None,
    pyspark: bool = False,
) -> list[dg.AssetsDefinition]:
    """An asset for each pipeline of a project: a graph of one step per transformation.

    Its step `begin` claims a chunk, and `publish` publishes and settles it. A pipeline with a fault
    in project.yml is left out, with a warning. Without `dataflow`, the tables are those that
    `odf pipeline` uses for the project. The assets bring them, unless there is a resource called
    `dataflow`. `pyspark` takes the session from the resource of that name.
    `build_definitions(projects=[…])` has the sensors too.
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
    """The assets of projects that the catalog knows, in the order of their declaration.

    They bring `tables` along, or else take the resource `dataflow`.
    """
    translator = translator or DataflowTranslator()
    made: list[dg.AssetsDefinition] = []
    for each in projects.shown.values():
        flow = Flow(each.project, each.pipeline, translator, pyspark)
        asset = _asset(flow, catalog, each)
        if tables is not None:
            key, bare = _key_of(tables), asset
            asset = _asset(flow._replace(tables=key), catalog, each, {key: _tables[key]})
            asset.bare = bare
        made.append(asset)
    return made


class _Asset(dg.AssetsDefinition):
    """A pipeline's asset; one that brings its tables leaves them for those of the definitions."""

    bare: dg.AssetsDefinition | None = None
    """The same without tables, if it brings some."""

    def with_resources(
        self, resource_defs: Mapping[str, dg.ResourceDefinition]
    ) -> dg.AssetsDefinition:
        """What Dagster calls to hand out the resources of the definitions."""
        if self.bare is not None and RESOURCE in resource_defs:
            return self.bare.with_resources(resource_defs)
        return super().with_resources(resource_defs)


_tables: dict[str, DataflowResource] = {}


def _key_of(tables: DataflowResource) -> str:
    """The key of tables that are brought: Dagster refuses two objects by one key."""
    fields = (tables.url, tables.schema_, tables.user, tables.config, tables.timezone)
    told = repr([(type(each).__name__, each) for each in fields])  # an EnvVar is a text, too
    key = f"opendataflow_{sha256(told.encode()).hexdigest()[:12]}"
    _tables.setdefault(key, tables)
    return key


def _asset(
    flow: Flow, catalog: Catalog, shown: Shown, brought: Mapping[str, Any] = MappingProxyType({})
) -> _Asset:
    """The asset of what a pipeline writes, with its graph."""
    translator, pipeline = flow.translator, flow.pipeline
    spec = translator.spec(catalog, shown.plan.outputs[0], flow.slug)
    engines = [
        engine_of(flow.project.transformation_file(flow.slug, name))
        for name in pipeline.transformations
    ]
    told = {"opendataflow/project": str(flow.project.root)}
    if pipeline.sources:
        told["opendataflow/sources"] = ", ".join(pipeline.sources)
    spec = spec.replace_attributes(
        kinds={*spec.kinds, *engines}, metadata={**told, **spec.metadata}
    )
    ins = {f"input_{at}": dep.asset_key for at, dep in enumerate(spec.deps)}
    return _Asset(
        keys_by_input_name=ins,
        keys_by_output_name={"chunk": spec.key},
        node_def=_graph(flow, list(ins), engines),
        specs=[spec],
        can_subset=False,
        backfill_policy=dg.BackfillPolicy.multi_run(1),
        resource_defs={HANDOVER: _FILES, **brought},
    )


def _graph(flow: Flow, ins: list[str], engines: list[str]) -> dg.GraphDefinition:
    """`begin`, then the transformations one after the other, then `publish`.

    What begins may find nothing to do, be it that the chunk is READY: the transformations are
    skipped then, but `publish` isn't, so that what is below goes on.
    """
    graph, slug = flow.translator.op_name(flow.slug), flow.slug
    named = _once([flow.translator.op_name(each) for each in flow.pipeline.transformations])
    first, last = _free("begin", named), _free("publish", named)
    more = {
        "required_resource_keys": {flow.tables, *([PYSPARK] if flow.pyspark else [])},
        "pool": flow.translator.pool(slug),
    }

    def beginning(context) -> Iterator[dg.Output]:
        yield from begin(context, flow)

    def step(number: int, name: str) -> Callable[..., Any]:
        def run(context, handed):
            transform(context, flow, number, name, handed)
            return handed

        return run

    def ending(context, handed):
        for each in handed:
            if each:
                publish(context, flow, each)
        yield dg.Output(None, "chunk", metadata={SILENT: True})

    ops = [
        dg.op(
            name=f"{graph}__{first}",
            description=f"Claims a chunk of pipeline {slug}.",
            ins={each: dg.In(dg.Nothing) for each in ins},
            out={
                each: dg.Out(dict, is_required=False, io_manager_key=HANDOVER)
                for each in (CLAIM, OVER)
            },
            **more,
        )(beginning)
    ]
    for number, name in enumerate(flow.pipeline.transformations, 1):
        shown = flow.project.transformation_file(slug, name).relative_to(flow.project.root)
        ops.append(
            dg.op(
                name=f"{graph}__{named[number - 1]}",
                description=f"Transformation {printable(name)} of pipeline {slug}: {shown}",
                ins={"handed": dg.In(dict)},
                out={CLAIM: dg.Out(dict, io_manager_key=HANDOVER)},
                tags={"dagster/compute_kind": engines[number - 1]},
                **more,
            )(step(number, name))
        )
    ops.append(
        dg.op(
            name=f"{graph}__{last}",
            description=f"Publishes and settles the chunk of pipeline {slug}.",
            ins={"handed": dg.In(list)},
            # None is required: what was published is said of the chunk.
            out={"chunk": dg.Out(dg.Nothing, is_required=False)},
            **more,
        )(ending)
    )
    return _wired(graph, ops, [first, *named, last], ins)


def _wired(
    graph: str, ops: list[dg.OpDefinition], names: list[str], ins: list[str]
) -> dg.GraphDefinition:
    """The ops in a row; the last one is also told when the first has nothing to do."""
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
                graph_input_name=each, mapped_node_name=first, mapped_node_input_name=each
            )
            for each in ins
        ],
        output_mappings=[
            dg.OutputMapping(
                graph_output_name="chunk", mapped_node_name=last, mapped_node_output_name="chunk"
            )
        ],
    )


def _once(names: list[str]) -> list[str]:
    """The names, with a number behind one that is there already: a file may be used twice."""
    found: list[str] = []
    for each in names:
        found.append(_free(each, found))
    return found


def _free(name: str, taken: Iterable[str]) -> str:
    at, free, taken = 1, name, set(taken)
    while free in taken:
        at += 1
        free = f"{name}_{at}"
    return free
