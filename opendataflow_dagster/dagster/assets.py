"""Jobs as assets: one for each dataset that they write, with a partition for each chunk."""

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import dagster as dg

from ..chunk import ERROR
from ..errors import SessionError, WrongUse
from ..runner.answer import AnswerFiles
from ..runner.code_version import CodeVersion, code_of_function
from ..runner.produce import Chunk, ChunkFailed, Maker, Result
from ..runner.script import CannotStart, Scripts, check
from ..spark.expectations import rules_of
from ..spark.job import FUNCTION, as_spark_job, is_spark_function
from ..spark.rules import Rule
from ..storage.publish import publishing
from ..store.catalog import Catalog
from ..util.text import typed
from .checks import ChunkCheck, bind_checks
from .resources import PYSPARK_KEY, RESOURCE_KEY, DataflowResource
from .step import Body, Event, ScriptStopped, run_chunks
from .translator import DataflowTranslator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


OBSERVATION_METADATA = "__source_asset_observation__"
"""A metadata key on an output with which Dagster doesn't log a materialization for it.

Without it, every partition of the run would turn green at the end of the step, also those whose
chunk has failed. It is the one internal name outside of `grid.py`, whose import takes 0.4 s that a
run has no use for. `tests/dagster/test_assets.py` fails once Dagster stops
reading it."""

warnings.filterwarnings(
    "ignore", "Asset job .* materializes assets with varying BackfillPolicies", UserWarning
)  # they vary on purpose: see `_backfill_policy`

MAX_PARTITIONS_PER_RUN = 500
"""How many chunks of a backfill one run produces, if no policy of yours says otherwise."""

LOST_CLAIM_POLL_SECONDS = 1.0
"""Seconds between two looks at whether a running script has lost its claim; then it is ended."""


def dataflow_specs(
    catalog: Catalog,
    *,
    translator: DataflowTranslator | None = None,
    jobs: Iterable[str] | None = None,
) -> list[dg.AssetSpec]:
    """The assets of what jobs write: of those named, or else of all that can run.

    Of several jobs that write the same dataset, only one may be named; of all, the first counts.
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
    """The assets of the datasets that nothing here produces."""
    translator, here = translator or DataflowTranslator(), set(produced)
    return [
        translator.spec(catalog, datasetid, None)
        for datasetid in catalog.datasets
        if datasetid not in here
    ]


def dataflow_assets(
    *,
    job: str,
    dataflow: DataflowResource | Catalog,
    translator: DataflowTranslator | None = None,
    checks: Iterable[ChunkCheck] = (),
    **options: Any,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Make assets of a function that makes one chunk: `fn(chunk)`, or `fn(chunk, context)`.

    It returns None, a `Result`, or what is to be published as the chunk: a frame, an Arrow table,
    bytes, a Path. For several datasets, a dict: dataset → one of these. One of `@spark_job`, or
    with a parameter that is a DataFrame of Spark, is given the chunks of its inputs; with
    `pyspark=True`, the resource of that name has its session. The other options are those of
    `assets_of_job`.
    """

    def assets_of_function(fn: Callable[..., Any]) -> dg.AssetsDefinition:
        described: dict[str, Any] = {"description": inspect.getdoc(getattr(fn, "fn", fn))} | options
        build = spark_assets if is_spark_function(fn) else _python_assets
        assets = build(job, dataflow, fn, translator=translator, checks=checks, **described)
        setattr(assets, FUNCTION, fn)  # for `odf run --spark`
        return assets

    return assets_of_function


def _python_assets(
    jobid: str,
    dataflow: DataflowResource | Catalog,
    fn: Callable[..., Any],
    *,
    pyspark: bool = False,
    **options: Any,
) -> dg.AssetsDefinition:
    """The assets of a function that takes a `Chunk`, and publishes what it returns."""
    if pyspark:
        name = getattr(fn, "__name__", fn)
        raise WrongUse(
            f"pyspark=True is for functions of DataFrames, and {name} of job {jobid!r} is none. "
            "Annotate its inputs as DataFrame, or put @spark_job on it."
        )
    takes_context = len(inspect.signature(fn).parameters) > 1
    code = code_of_function(fn)

    def prepare(context: dg.AssetExecutionContext) -> Maker:
        store = getattr(context.resources, RESOURCE_KEY).store
        compute = (lambda chunk: fn(chunk, context)) if takes_context else fn
        maker = Maker(*publishing(store, compute))
        maker.code = code
        return maker

    return assets_of_job(jobid, dataflow, prepare, **options)


def assets_of_job(
    jobid: str,
    dataflow: DataflowResource | Catalog,
    prepare: Callable[[dg.AssetExecutionContext], Maker],
    *,
    translator: DataflowTranslator | None = None,
    checks: Iterable[ChunkCheck] = (),
    promised: Iterable[ChunkCheck] = (),
    secrets: bool = False,
    name: str | None = None,
    description: str | None = None,
    group_name: str | None = None,
    code_version: str | None = None,
    kinds: Set[str] = frozenset(),
    automation_condition: dg.AutomationCondition | None = None,
    backfill_policy: dg.BackfillPolicy | None = None,
    pool: str | None = None,
    op_tags: Mapping[str, Any] | None = None,
    retry_policy: dg.RetryPolicy | None = None,
    hooks: Set[dg.HookDefinition] | None = None,
    config_schema: Any = None,
    required_resource_keys: Set[str] = frozenset(),
    resource_defs: Mapping[str, object] | None = None,
) -> dg.AssetsDefinition:
    """One step that produces all datasets of a job, partition by partition.

    Dagster proposes partitions; the tables decide which of them may run.

    Args:
        jobid: The job, which has to be registered.
        dataflow: The tables, or what is registered in them.
        prepare: Gives, at the start of a step, what produces its chunks.
        translator: How datasets, chunks and jobs are called in Dagster.
        checks: Functions that look at a chunk before it becomes READY.
        promised: Checks whose answers the maker itself gives.
        secrets: Put the passwords into the environment, as scripts expect them.
    """
    catalog = dataflow if isinstance(dataflow, Catalog) else dataflow.catalog()
    translator = translator or DataflowTranslator()
    plan = registered_plan(catalog, jobid)
    promised, checks = bind_checks(promised, plan), bind_checks(checks, plan)
    all_checks = [*promised, *checks]
    _refuse_doubled_names(all_checks, jobid)
    specs = [
        _with_options(spec, group_name, code_version, kinds, automation_condition)
        for spec in dataflow_specs(catalog, translator=translator, jobs=[jobid])
    ]
    ports = _ports(specs, [check.spec(translator) for check in all_checks])
    body = _job_body(jobid, translator, prepare, checks, secrets)
    op = dg.op(
        name=name or translator.op_name(jobid),
        description=description,
        ins=dict.fromkeys(ports.ins, dg.In(dg.Nothing)),
        # No output is required: the step logs an event for each chunk instead.
        out=dict.fromkeys([*ports.outs, *ports.checks], dg.Out(dg.Nothing, is_required=False)),
        required_resource_keys={RESOURCE_KEY, *required_resource_keys},
        config_schema=config_schema,
        tags=op_tags,
        retry_policy=retry_policy,
        pool=pool or translator.pool(jobid),
    )(_step_function(body, ports))
    return dg.AssetsDefinition(
        keys_by_input_name=ports.ins,
        keys_by_output_name=ports.outs,
        node_def=op,
        specs=specs,
        check_specs_by_output_name=ports.checks,
        can_subset=False,
        backfill_policy=backfill_policy or _backfill_policy(catalog, jobid),
        resource_defs=resource_defs,
        hook_defs=hooks,
    )


def _job_body(
    jobid: str,
    translator: DataflowTranslator,
    prepare: Callable[[dg.AssetExecutionContext], Maker],
    checks: Sequence[ChunkCheck],
    secrets: bool,
) -> Body:
    """What the step of a job does.

    Dagster calls it again for each retry of the step. So nothing is prepared when the location is
    loaded: a maker that outlived an attempt would go on with its claims, which are settled by then.
    """

    def body(context: dg.AssetExecutionContext) -> Iterator[Event]:
        resource = getattr(context.resources, RESOURCE_KEY)
        return run_chunks(
            context, resource, jobid, translator, prepare(context), checks, secrets=secrets
        )

    return body


class _Ports(NamedTuple):
    """The inputs and outputs of an op, by their names, and what they stand for."""

    ins: dict[str, dg.AssetKey]
    outs: dict[str, dg.AssetKey]
    checks: dict[str, dg.AssetCheckSpec]


def _ports(specs: Sequence[dg.AssetSpec], checks: Sequence[dg.AssetCheckSpec]) -> _Ports:
    """Numbered names: a dataset's own may be no identifier, or two may look the same as one."""
    upstream = dict.fromkeys(dep.asset_key for spec in specs for dep in spec.deps)
    return _Ports(
        {f"input_{number}": key for number, key in enumerate(upstream)},
        {f"output_{number}": spec.key for number, spec in enumerate(specs)},
        {f"check_{number}": check for number, check in enumerate(checks)},
    )


def _refuse_doubled_names(checks: Iterable[ChunkCheck], jobid: str) -> None:
    """Refuse two checks of one name: Dagster would say so in the words of its steps."""
    seen = set()
    for rule in checks:
        if (rule.dataset, rule.name) in seen:
            raise WrongUse(
                f"Two checks of dataset {rule.dataset!r}, which job {jobid!r} writes, are called "
                f"{rule.name!r}: rules of `expect` are checks too. Give one another name."
            )
        seen.add((rule.dataset, rule.name))


def _backfill_policy(catalog: Catalog, jobid: str) -> dg.BackfillPolicy:
    """Runs of many chunks, and a size that differs by the job's depth in the graph.

    Dagster puts jobs with equal policies into one run. There, one bad chunk of the upstream job
    would keep all chunks of the downstream job from running. With sizes that differ, each job gets
    runs of its own, and the backfill launches downstream what is READY upstream. Dagster's warning
    about it is ignored above.
    """
    return dg.BackfillPolicy.multi_run(max(1, MAX_PARTITIONS_PER_RUN - catalog.depth(jobid)))


def registered_plan(catalog: Catalog, jobid: str) -> Any:
    """The plan of a job that can run."""
    plan = catalog.jobs.get(jobid)
    if plan is None or plan.flaw:
        flaw = plan.flaw if plan else f"Job {jobid!r} isn't registered"
        raise WrongUse(
            f"{flaw}, so it can't be an asset. "
            f"Run: odf job add {typed(jobid)} --in DATASET --out DATASET"
        )
    return plan


def one_producer_each(catalog: Catalog, jobs: Iterable[str]) -> None:
    """Refuse two jobs that write the same dataset: an asset has one definition in a location."""
    maker: dict[str, str] = {}
    for jobid in sorted(set(jobs)):
        for datasetid in registered_plan(catalog, jobid).outputs:
            other = maker.setdefault(datasetid, jobid)
            if other != jobid:
                raise WrongUse(
                    f"Jobs {other!r} and {jobid!r} both write {datasetid!r}: an asset can be made "
                    "by one of them in a code location. Leave out the other, or put it in a "
                    "location of its own; its chunks are shown all the same."
                )


def _with_options(
    spec: dg.AssetSpec,
    group_name: str | None,
    code_version: str | None,
    kinds: Set[str],
    automation_condition: dg.AutomationCondition | None,
) -> dg.AssetSpec:
    """A spec with the options that the user gave for this job."""
    options = {
        "group_name": group_name,
        "code_version": code_version,
        "automation_condition": automation_condition,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return spec.replace_attributes(**given, kinds={*spec.kinds, *kinds})


def _step_function(body: Body, ports: _Ports) -> Callable[..., Any]:
    """The generator that Dagster calls: an event for each chunk, then the outputs.

    The outputs let the steps downstream in the same run start.
    """

    # Without annotations: Dagster would check them against the op's outputs.
    def run(context):
        yield from body(context)
        for name in ports.outs:
            yield dg.Output(None, name, metadata={OBSERVATION_METADATA: True})
        for name in ports.checks:
            yield dg.Output(None, name)

    return run


# --- scripts: the program that `odf run` would start, once for each chunk ---


def script_assets(
    job: str,
    script: str | Sequence[str],
    *,
    dataflow: DataflowResource | Catalog,
    translator: DataflowTranslator | None = None,
    checks: Iterable[ChunkCheck] = (),
    stop_grace: float = 10.0,
    **options: Any,
) -> dg.AssetsDefinition:
    """Make assets of a script: a program, or a program and its arguments; no shell is involved.

    It gets the environment of `odf run`, and what it prints is in the step's log. Its exit code
    says how the chunk ended. When the run is terminated it has `stop_grace` seconds to end. The
    options are those of `assets_of_job`.
    """
    argv = [script] if isinstance(script, str) else list(script)

    def prepare(context: dg.AssetExecutionContext) -> Maker:
        try:
            check(argv[0], os.environ.get("PATH", os.defpath))
        except CannotStart as refusal:
            raise dg.Failure(f"{refusal}. Nothing was claimed.", allow_retries=False) from None
        maker = Maker(script_compute(argv, stop_grace=stop_grace))
        maker.code = CodeVersion(argv).text()
        return maker

    described: dict[str, Any] = {
        "description": f"Runs `{' '.join(argv)}` for each chunk."
    } | options
    return assets_of_job(
        job, dataflow, prepare, translator=translator, checks=checks, secrets=True, **described
    )


def script_compute(
    argv: list[str], *, stop_grace: float = 10.0
) -> Callable[[Chunk], dict[str, Result]]:
    """What runs a script for a chunk."""

    def compute(chunk: Chunk) -> dict[str, Result]:
        env = dict(chunk.environment)
        look_every = min(LOST_CLAIM_POLL_SECONDS, chunk.claim.lease / 3)
        with AnswerFiles(chunk.claim, tuple(chunk.outputs), env) as files:

            def beat() -> bool:
                files.heed(chunk.holds(look_every))
                return chunk.alive()

            # Its own handlers stand in for Dagster's while it runs: they end the whole script.
            with Scripts(stop_grace=stop_grace) as scripts:
                ended = scripts.run(
                    argv,
                    env,
                    time_limit=chunk.claim.time_limit,
                    beat=beat,
                    beat_every=look_every,
                    stdin_null=True,
                )
            if scripts.stopping is not None:
                raise ScriptStopped(scripts.stopping)
            if ended.code:
                raise ChunkFailed(ended.reason)
            answer = files.read()
            for line in answer.log:
                print(line)
            return answer.by_dataset()

    return compute


# --- functions of DataFrames: chunks that Spark reads and publishes ---


def spark_assets(
    jobid: str,
    dataflow: DataflowResource | Catalog,
    function: Callable[..., Any],
    *,
    pyspark: bool = False,
    **options: Any,
) -> dg.AssetsDefinition:
    """The assets of a function of DataFrames; what it expects are checks of the assets.

    `pyspark` takes the session from the resource of that name, a `SparkResource` or a
    `LazyPySparkResource`, instead of one with what `dataflow.properties` says of Spark.
    """
    job = as_spark_job(function)
    catalog = dataflow if isinstance(dataflow, Catalog) else dataflow.catalog()
    plan = registered_plan(catalog, jobid)
    job.arguments(plan)  # a fault in the function is reported at load, not in tonight's run
    if pyspark:
        options["required_resource_keys"] = {
            *options.get("required_resource_keys", ()),
            PYSPARK_KEY,
        }

    def prepare(context: dg.AssetExecutionContext) -> Any:
        from ..spark.worker import SparkWork

        store = getattr(context.resources, RESOURCE_KEY).store
        session = _session_of(context, jobid, pyspark)
        return SparkWork(
            store, store.plan(jobid), job, session, context=context, say=context.log.info
        )

    promised = [
        ChunkCheck(rule.name, bool, rule.datasetid, rule.severity == ERROR, _about(rule))
        for rule in rules_of(job.expect, plan.outputs)
    ]
    options["kinds"] = {*options.get("kinds", ()), "spark"}
    return assets_of_job(jobid, catalog, prepare, promised=promised, **options)


def _session_of(
    context: dg.AssetExecutionContext, jobid: str, pyspark: bool
) -> Callable[[], "SparkSession"]:
    """What gives the session of Spark when the first chunk needs it."""

    def from_resource() -> "SparkSession":
        from ..spark.session import has_ended

        session = getattr(context.resources, PYSPARK_KEY).spark_session
        if has_ended(session):
            raise SessionError(
                f"The session of resource {PYSPARK_KEY!r} has ended. Launch the run again."
            )
        return session

    def from_settings() -> "SparkSession":
        from ..spark.session import spark_session

        settings = getattr(context.resources, RESOURCE_KEY).settings
        return spark_session(app=f"odf {jobid}", settings=settings)

    return from_resource if pyspark else from_settings


def _about(rule: Rule) -> str | None:
    """What a rule asks, for the page of its asset check."""
    if says := getattr(rule, "says", ""):
        return f"Rows that {says} fail it."
    if columns := rule.columns:
        return f"{', '.join(columns)}: no two rows have the same."
    return inspect.getdoc(getattr(rule, "fn", None)) if hasattr(rule, "fn") else None
