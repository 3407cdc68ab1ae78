"""Assets for a job: one per dataset that it writes, with a partition per chunk."""

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypedDict, Unpack

import dagster as dg

from ..errors import NoDatabase, WrongUse
from ..flow.catalog import catalog_of
from ..flow.flow import Flow
from ..model import Plan
from ..runner.produce import Maker
from ..store.catalog import Catalog
from ..util.text import did_you_mean, first_line, printable, typed
from . import internals
from .checks import ChunkCheck, bind_checks
from .parameters import SIGNATURE, as_keywords
from .resources import RESOURCE_KEY, DataflowResource, refuse_unapplied
from .step import Body, Event, run_chunks
from .translator import DataflowTranslator
from .versions import stale_check

_log = logging.getLogger("opendataflow_dagster")

OBSERVATION_METADATA = "__source_asset_observation__"
"""A metadata key on an output: Dagster logs no materialization for such an output.

Without it, every partition of the run would turn green at the end of the step, even those whose
chunk failed. `internals.py` checks that Dagster knows the key, and `tests/dagster/test_assets.py`
that Dagster respects it."""

warnings.filterwarnings(
    "ignore", "Asset job .* materializes assets with varying BackfillPolicies", UserWarning
)  # the policies vary on purpose: see `_backfill_policy`

MAX_PARTITIONS_PER_RUN = 500
"""Chunks of a backfill that one run produces, unless a policy of yours says otherwise."""

Source = DataflowResource | Catalog | Flow
"""Where the jobs behind the assets are found: the tables, a catalog read from them, or a flow."""

Prepare = Callable[[dg.AssetExecutionContext, Mapping[str, Any]], Maker]
"""Builds the maker of chunks from the context and the values of the parameters it declares."""

UNREGISTERED = "dataflow_unregistered"
"""The attribute of an empty definition that names the job it would run if it were registered."""


def catalog_in(source: Source) -> Catalog:
    """Return what is registered in the tables, or what a flow declares."""
    if isinstance(source, Catalog):
        return source
    return catalog_of(source) if isinstance(source, Flow) else readable_catalog(source)


def readable_catalog(dataflow: DataflowResource) -> Catalog:
    """Return what is registered; if the tables were never readable, an empty catalog and why.

    The code location loads either way: it may have assets that don't need these tables.
    """
    try:
        return dataflow.catalog()
    except Exception as error:
        store = dataflow.patient_store(0.0)
        if not (isinstance(error, NoDatabase) or store.db.trouble(error)):
            raise
        unread = f"what is registered in {store.db.where} can't be read: {first_line(error)}"
    _log.warning("%s. The assets of its datasets and jobs are left out until it can.", unread)
    return Catalog({}, {}, {}, {}, unread=unread)


def dataflow_specs(
    catalog: Catalog,
    *,
    translator: DataflowTranslator | None = None,
    jobs: Iterable[str] | None = None,
) -> list[dg.AssetSpec]:
    """Return the asset specs of the datasets that jobs write: of the given jobs, or of all.

    Args:
        catalog: The registered datasets and jobs.
        translator: Names datasets, chunks and jobs in Dagster.
        jobs: The jobs; by default all that can run. If several jobs write the same dataset, name
            only one of them here; by default, the first counts.

    Raises:
        WrongUse: Two of the given jobs write the same dataset, or one isn't registered.

    Example:
        specs = dataflow_specs(DataflowResource().catalog())
    """
    translator = translator or DataflowTranslator()
    named = list(catalog.jobs) if jobs is None else list(jobs)
    if jobs is not None:
        one_producer_each(catalog, named)
    producers: dict[str, str] = {}
    for jobid in sorted(named):
        if jobs is not None or not catalog.jobs[jobid].flaw:
            for datasetid in registered_plan(catalog, jobid).outputs:
                producers.setdefault(datasetid, jobid)
    return [
        translator.spec(catalog, datasetid, producers[datasetid]) for datasetid in sorted(producers)
    ]


def external_assets(
    catalog: Catalog,
    produced: Iterable[str],
    translator: DataflowTranslator | None = None,
) -> list[dg.AssetSpec]:
    """Return specs for the datasets that nothing here produces.

    Args:
        catalog: The registered datasets and jobs.
        produced: The datasets that assets of this code location produce; they are left out.
        translator: Names datasets, chunks and jobs in Dagster.

    Example:
        specs = external_assets(catalog, produced=["checked"])
    """
    translator, here = translator or DataflowTranslator(), set(produced)
    return [
        translator.spec(catalog, datasetid, None)
        for datasetid in catalog.datasets
        if datasetid not in here
    ]


class JobOptions(TypedDict, total=False):
    """Options of Dagster for a job's step and its assets."""

    name: str | None
    description: str | None
    group_name: str | None
    code_version: str | None
    kinds: Set[str]
    automation_condition: dg.AutomationCondition | None
    backfill_policy: dg.BackfillPolicy | None
    pool: str | None
    op_tags: Mapping[str, Any] | None
    retry_policy: dg.RetryPolicy | None
    hooks: Set[dg.HookDefinition] | None
    config_schema: Any
    required_resource_keys: Set[str]
    resource_defs: Mapping[str, object] | None


SETS = frozenset({"hooks", "kinds", "required_resource_keys"})
"""The options that are sets: a plain string would be read as the set of its letters."""


def refuse_unknown_options(jobid: str, options: Mapping[str, Any]) -> None:
    """Refuse unknown options of a job's assets, with a line that lists the known ones."""
    for name in options:
        if name not in JobOptions.__annotations__:
            known = sorted(JobOptions.__annotations__)
            like = did_you_mean(name, known)
            raise WrongUse(
                f"There is no option {name!r} for the assets of job {jobid!r}{like or '.'} "
                f"Known: {', '.join(known)}."
            )
        if isinstance(options[name], str) and name in SETS:
            raise WrongUse(
                f"Option {name!r} for the assets of job {jobid!r} must be a set of names: "
                f"{{{options[name]!r}}}."
            )


def assets_of_job(
    jobid: str,
    dataflow: Source,
    prepare: Prepare,
    *,
    parameters: Sequence[inspect.Parameter] = (),
    translator: DataflowTranslator | None = None,
    checks: Iterable[ChunkCheck] = (),
    promised: Iterable[ChunkCheck] = (),
    secrets: bool = False,
    runs: str = "",
    **options: Unpack[JobOptions],
) -> dg.AssetsDefinition:
    """Return one step that produces all datasets of a job, partition by partition.

    Dagster proposes partitions; the tables decide which of them may run.

    Args:
        jobid: The job. If it isn't registered, a warning is logged and there are no assets.
        dataflow: The tables, a catalog read from them, or a flow.
        prepare: Builds, at the start of a step, the maker that produces its chunks.
        parameters: The `config` and the resources that `prepare` needs, by name.
        translator: Names datasets, chunks and jobs in Dagster.
        checks: Functions that check a chunk before it becomes READY.
        promised: Checks whose results the maker itself reports.
        secrets: Add passwords to the environment, as scripts expect.
        runs: What runs the job, for the assets' description: "function shop.check".
        options: Options of Dagster for the step and its assets.
    """
    refuse_unknown_options(jobid, options)
    catalog = catalog_in(dataflow)
    if flaw := why_unregistered(catalog, jobid):
        return no_assets(jobid, flaw)
    translator = translator or DataflowTranslator()
    promised, checks = (bind_checks(some, catalog.jobs[jobid]) for some in (promised, checks))
    all_checks = [*promised, *checks, *_stale_checks(catalog.jobs[jobid])]
    _refuse_doubled_names(all_checks, jobid)
    specs = [
        described(_with_options(spec, options), catalog, jobid, runs, options.get("description"))
        for spec in dataflow_specs(catalog, translator=translator, jobs=[jobid])
    ]
    ports = _ports(specs, [check.spec(translator) for check in all_checks])
    body = _job_body(
        catalog, jobid, translator, prepare, checks, secrets, options.get("code_version")
    )
    return dg.AssetsDefinition(
        keys_by_input_name=ports.ins,
        keys_by_output_name=ports.outs,
        node_def=_job_op(jobid, translator, body, ports, runs, options, parameters),
        specs=specs,
        check_specs_by_output_name=ports.checks,
        can_subset=False,
        backfill_policy=options.get("backfill_policy") or _backfill_policy(catalog, jobid),
        resource_defs=options.get("resource_defs"),
        hook_defs=options.get("hooks"),
    )


def _stale_checks(plan: Plan) -> list[ChunkCheck]:
    """Return a staleness check per dataset of a job that reads inputs which can be replaced."""
    return [stale_check(datasetid) for datasetid in plan.outputs if plan.reads]


def no_assets(jobid: str, flaw: str) -> dg.AssetsDefinition:
    """Return an empty definition: an unregistered job mustn't break the project's other assets.

    The page of the sensor of `build_definitions` shows the reason, too.
    """
    _log.warning("%s. Its assets are left out until it is.", flaw)
    nothing = dg.AssetsDefinition(specs=[])
    setattr(nothing, UNREGISTERED, jobid)
    return nothing


def _job_op(
    jobid: str,
    translator: DataflowTranslator,
    body: Body,
    ports: "_Ports",
    runs: str,
    options: JobOptions,
    parameters: Sequence[inspect.Parameter],
) -> dg.OpDefinition:
    """Return the op of a job."""
    resources = {RESOURCE_KEY, *options.get("required_resource_keys", ())}
    keywords = as_keywords(parameters, resources)
    if options.get("config_schema") and any(each.name == "config" for each in keywords):
        raise WrongUse(
            f"The function of job {jobid!r} takes `config`, whose class defines the config. Leave "
            "out config_schema."
        )
    if resources <= {each.name for each in keywords}:
        resources = set()
    return dg.op(
        name=options.get("name") or translator.op_name(jobid),
        description=options.get("description")
        or (f"Runs {runs} for each chunk." if runs else None),
        ins=dict.fromkeys(ports.ins, dg.In(dg.Nothing)),
        # No output is required: the step logs an event for each chunk instead.
        out=dict.fromkeys([*ports.outs, *ports.checks], dg.Out(dg.Nothing, is_required=False)),
        required_resource_keys=resources,
        config_schema=options.get("config_schema"),
        tags=options.get("op_tags"),
        retry_policy=options.get("retry_policy"),
        pool=options.get("pool") or translator.pool(jobid),
    )(_step_function(body, ports, keywords))


def _job_body(
    catalog: Catalog,
    jobid: str,
    translator: DataflowTranslator,
    prepare: Prepare,
    checks: Sequence[ChunkCheck],
    secrets: bool,
    code_version: str | None,
) -> Body:
    """Return the body of a job's step.

    Dagster calls it again for each retry of the step, so nothing is prepared when the location is
    loaded: a maker that outlived an attempt would keep using claims that are already settled.
    """

    def body(context: dg.AssetExecutionContext, values: Mapping[str, Any]) -> Iterator[Event]:
        resource = getattr(context.resources, RESOURCE_KEY)
        refuse_unapplied(resource, catalog, jobid)
        maker = prepare(context, values)
        if code_version:
            maker.code = " ".join(filter(None, [f"version:{code_version}", maker.code]))
        return run_chunks(context, resource, jobid, translator, maker, checks, secrets=secrets)

    return body


class _Ports(NamedTuple):
    """The inputs and outputs of an op, by name, with their datasets."""

    ins: dict[str, dg.AssetKey]
    outs: dict[str, dg.AssetKey]
    checks: dict[str, dg.AssetCheckSpec]


def _ports(specs: Sequence[dg.AssetSpec], checks: Sequence[dg.AssetCheckSpec]) -> _Ports:
    """Number the names: a dataset's own may not be an identifier, or two may collide."""
    upstream = dict.fromkeys(dep.asset_key for spec in specs for dep in spec.deps)
    return _Ports(
        {f"input_{number}": key for number, key in enumerate(upstream)},
        {f"output_{number}": spec.key for number, spec in enumerate(specs)},
        {f"check_{number}": check for number, check in enumerate(checks)},
    )


def _refuse_doubled_names(checks: Iterable[ChunkCheck], jobid: str) -> None:
    """Refuse two checks with the same name: Dagster's own error wouldn't say which ones."""
    seen = set()
    for rule in checks:
        if (rule.dataset, rule.name) in seen:
            raise WrongUse(
                f"Dataset {rule.dataset!r}, which job {jobid!r} writes, has two checks named "
                f"{rule.name!r}. Rules of `expect` are checks too. Rename one of them."
            )
        seen.add((rule.dataset, rule.name))


def _backfill_policy(catalog: Catalog, jobid: str) -> dg.BackfillPolicy:
    """Runs of many chunks, with a size that depends on the job's depth in the graph.

    Dagster puts jobs with equal policies into one run. In such a run, one bad chunk of the upstream
    job would keep all chunks of the downstream job from running. With different sizes, each job
    gets its own runs, and the backfill launches downstream the chunks that are READY upstream.
    Dagster's warning about it is ignored above.
    """
    return dg.BackfillPolicy.multi_run(max(1, MAX_PARTITIONS_PER_RUN - catalog.depth(jobid)))


def registered_plan(catalog: Catalog, jobid: str) -> Plan:
    """Return the plan of a job that can run."""
    if flaw := why_unregistered(catalog, jobid):
        raise WrongUse(flaw)
    return catalog.jobs[jobid]


def why_unregistered(catalog: Catalog, jobid: str) -> str:
    """Return why a job can't run at all, with the command that registers it; "" if it can."""
    plan = catalog.jobs.get(jobid)
    if plan is not None and not plan.flaw:
        return ""
    if plan is None and catalog.unread:
        return f"Job {jobid!r} can't be an asset: {catalog.unread}"
    flaw = plan.flaw if plan else f"Job {jobid!r} isn't registered"
    like = "" if plan else did_you_mean(jobid, catalog.jobs)
    return f"{flaw}, so it can't be an asset{like or '.'} {what_registers(catalog, jobid)}"


def what_registers(catalog: Catalog, jobid: str) -> str:
    """Return how to register a job: in the flow of these definitions, or in the tables."""
    if catalog.registered_by:
        return "Declare it in the flow"
    return f"Run: odf job add {typed(jobid)} --in DATASET --out DATASET"


def one_producer_each(catalog: Catalog, jobs: Iterable[str]) -> None:
    """Refuse two jobs that write the same dataset: an asset has one definition in a location."""
    maker: dict[str, str] = {}
    for jobid in sorted(set(jobs)):
        for datasetid in registered_plan(catalog, jobid).outputs:
            other = maker.setdefault(datasetid, jobid)
            if other != jobid:
                raise WrongUse(
                    f"Jobs {other!r} and {jobid!r} both write {datasetid!r}, but within a code "
                    "location one job produces an asset. Leave out the other, or put it in a "
                    "location of its own; its chunks are shown either way."
                )


STARTS = {
    "work": "`odf work` starts it; Dagster doesn't.",
    "cron": "Neither Dagster nor `odf work` starts it.",
    "dagster": "Dagster starts it; `odf work` doesn't.",
}
"""Job's key `runs_in` in a flow → the sentence of the asset's description."""


def described(
    spec: dg.AssetSpec, catalog: Catalog, jobid: str, runs: str, about: str | None = None
) -> dg.AssetSpec:
    """Extend a spec's description: what runs the job, what starts it, and the runner's own text."""
    sentence = f"Job `{printable(jobid)}` runs {runs}." if runs else ""
    starts = STARTS.get(catalog.runs_in.get(jobid, ""), "")
    paragraphs = [spec.description, " ".join(filter(None, [sentence, starts])), about]
    return spec.replace_attributes(description="\n\n".join(filter(None, paragraphs)) or None)


def _with_options(spec: dg.AssetSpec, options: JobOptions) -> dg.AssetSpec:
    """Return a spec with the options that the user set for this job."""
    given = {
        name: value
        for name in ("group_name", "code_version", "automation_condition")
        if (value := options.get(name)) is not None
    }
    return spec.replace_attributes(**given, kinds={*spec.kinds, *options.get("kinds", ())})


def silent_outputs(context: Any, names: Iterable[str]) -> Iterator[dg.Output]:
    """Yield outputs that start the steps downstream and that Dagster doesn't log as materialized.

    Yields none on a Dagster that would log them: a partition whose chunk failed would turn green.
    """
    if missing := internals.degraded([internals.STEPS]):
        context.log.warning(missing)
        return
    for name in names:
        yield dg.Output(None, name, metadata={OBSERVATION_METADATA: True})


def _step_function(
    body: Body, ports: _Ports, keywords: Sequence[inspect.Parameter]
) -> Callable[..., Any]:
    """Return the generator that Dagster calls: an event for each chunk, then the outputs.

    The outputs let downstream steps of the same run start. Its parameters tell Dagster which config
    and which resources to pass.
    """

    # No return annotation: Dagster would check it against the op's outputs.
    def run(context, **values):
        yield from body(context, values)
        yield from silent_outputs(context, ports.outs)
        for name in ports.checks:
            yield dg.Output(None, name)

    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    setattr(run, SIGNATURE, inspect.Signature([context, *keywords]))
    run.__annotations__ = {each.name: each.annotation for each in keywords}
    return run
