"""Jobs as assets: one for each dataset that they write, with a partition for each chunk."""

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import dagster as dg

from ..chunk import ERROR
from ..errors import SessionError, WrongUse
from ..runner.produce import Chunk, ChunkFailed, Maker
from ..runner.script import CannotStart, Scripts, check
from ..spark.expectations import Rule, rules_of
from ..spark.job import FUNCTION, as_spark_job, is_spark_function
from ..storage.publish import publishing
from ..store.catalog import Catalog
from ..util.text import typed
from .checks import ChunkCheck, bound
from .resources import DataflowResource
from .step import Body, Event, Stopped, run_chunks
from .translator import DataflowTranslator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


SILENT = "__source_asset_observation__"
"""On an output, it keeps Dagster from reporting the asset for every partition of the run, made or
not. It is a word of Dagster's own: `tests/dagster/test_assets.py` fails once it means nothing."""

RESOURCE = "dataflow"
"""The key of the resource by which a step finds the tables."""

warnings.filterwarnings(
    "ignore", "Asset job .* materializes assets with varying BackfillPolicies", UserWarning
)  # they vary on purpose: see `_policy`

MOST_PARTITIONS = 500
"""Chunks of a backfill that one run makes, unless told otherwise."""


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
    made: dict[str, str] = {}
    for jobid in sorted(named):
        if jobs is not None or not catalog.jobs[jobid].flaw:
            for datasetid in registered(catalog, jobid).outputs:
                made.setdefault(datasetid, jobid)
    return [translator.spec(catalog, datasetid, made[datasetid]) for datasetid in sorted(made)]


def external_assets(
    catalog: Catalog,
    produced: Iterable[str],
    translator: DataflowTranslator | None = None,
) -> list[dg.AssetSpec]:
    """The assets of the datasets that nothing here produces."""
    translator, here = translator or DataflowTranslator(), set(produced)
    return [translator.spec(catalog, each, None) for each in catalog.datasets if each not in here]


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

    def made(fn: Callable[..., Any]) -> dg.AssetsDefinition:
        assets = made_of(fn)
        setattr(assets, FUNCTION, fn)  # for `odf run --spark`
        return assets

    def made_of(fn: Callable[..., Any]) -> dg.AssetsDefinition:
        described: dict[str, Any] = {"description": inspect.getdoc(getattr(fn, "fn", fn))} | options
        if is_spark_function(fn):
            return assets_of_function(
                job, dataflow, fn, translator=translator, checks=checks, **described
            )
        if described.pop("pyspark", False):
            name = getattr(fn, "__name__", fn)
            raise WrongUse(
                f"pyspark=True is for functions of DataFrames, and {name} of job {job!r} is none. "
                "Annotate its inputs as DataFrame, or put @spark_job on it."
            )
        takes_context = len(inspect.signature(fn).parameters) > 1

        def prepare(context: dg.AssetExecutionContext) -> Maker:
            store = getattr(context.resources, RESOURCE).store
            compute = (lambda chunk: fn(chunk, context)) if takes_context else fn
            return Maker(*publishing(store, compute))

        return assets_of_job(
            job, dataflow, prepare, translator=translator, checks=checks, **described
        )

    return made


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
    """One step that makes all datasets of a job; `prepare` gives what makes a chunk.

    Dagster proposes partitions; the tables decide which of them may run. `promised` are checks
    whose answers the maker itself gives.
    """
    catalog = dataflow if isinstance(dataflow, Catalog) else dataflow.catalog()
    translator = translator or DataflowTranslator()
    plan = registered(catalog, jobid)
    promised, checks = bound(promised, plan), bound(checks, plan)
    _named_once([*promised, *checks], jobid)
    specs = [
        _with(spec, group_name, code_version, kinds, automation_condition)
        for spec in dataflow_specs(catalog, translator=translator, jobs=[jobid])
    ]

    def body(context: dg.AssetExecutionContext) -> Iterator[Event]:
        resource = getattr(context.resources, RESOURCE)
        return run_chunks(
            context, resource, jobid, translator, prepare(context), checks, secrets=secrets
        )

    # The names are ours: a dataset's own may be no identifier, or two may look the same as one.
    ins = {
        f"input_{at}": dep.asset_key
        for at, dep in enumerate({dep.asset_key: dep for s in specs for dep in s.deps}.values())
    }
    outs = {f"output_{at}": spec for at, spec in enumerate(specs)}
    judged = {
        f"check_{at}": check.spec(translator) for at, check in enumerate([*promised, *checks])
    }
    op = dg.op(
        name=name or translator.op_name(jobid),
        description=description,
        ins={each: dg.In(dg.Nothing) for each in ins},
        # None is required: what a chunk has made is said chunk by chunk.
        out={each: dg.Out(dg.Nothing, is_required=False) for each in (*outs, *judged)},
        required_resource_keys={RESOURCE, *required_resource_keys},
        config_schema=config_schema,
        tags=op_tags,
        retry_policy=retry_policy,
        pool=pool or translator.pool(jobid),
    )(_generator(body, outs, judged))
    return dg.AssetsDefinition(
        keys_by_input_name=ins,
        keys_by_output_name={each: spec.key for each, spec in outs.items()},
        node_def=op,
        specs=specs,
        check_specs_by_output_name=judged,
        can_subset=False,
        backfill_policy=backfill_policy or _policy(catalog, jobid),
        resource_defs=resource_defs,
        hook_defs=hooks,
    )


def _named_once(checks: Iterable[ChunkCheck], jobid: str) -> None:
    """Refuse two checks of one name: Dagster would say so in the words of its steps."""
    seen = set()
    for each in checks:
        if (each.dataset, each.name) in seen:
            raise WrongUse(
                f"Two checks of dataset {each.dataset!r}, which job {jobid!r} writes, are called "
                f"{each.name!r}: rules of `expect` are checks too. Give one another name."
            )
        seen.add((each.dataset, each.name))


def _policy(catalog: Catalog, jobid: str) -> dg.BackfillPolicy:
    """Runs of many chunks; of each job its own, so that a backfill goes on below what was made.

    Dagster would else put jobs with equal policies into one run, where one bad chunk of the upper
    job keeps all chunks of the lower from being made. Its warning is ignored above.
    """
    return dg.BackfillPolicy.multi_run(max(1, MOST_PARTITIONS - catalog.depth(jobid)))


def registered(catalog: Catalog, jobid: str) -> Any:
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
        for datasetid in registered(catalog, jobid).outputs:
            other = maker.setdefault(datasetid, jobid)
            if other != jobid:
                raise WrongUse(
                    f"Jobs {other!r} and {jobid!r} both write {datasetid!r}: an asset can be made "
                    "by one of them in a code location. Leave out the other, or put it in a "
                    "location of its own; its chunks are shown all the same."
                )


def _with(
    spec: dg.AssetSpec,
    group_name: str | None,
    code_version: str | None,
    kinds: Set[str],
    automation_condition: dg.AutomationCondition | None,
) -> dg.AssetSpec:
    """A spec with what the user told of this very job."""
    told = {
        "group_name": group_name,
        "code_version": code_version,
        "automation_condition": automation_condition,
    }
    given = {name: value for name, value in told.items() if value is not None}
    return spec.replace_attributes(**given, kinds={*spec.kinds, *kinds})


def _generator(body: Body, outs: Iterable[str], judged: Iterable[str]) -> Callable[..., Any]:
    """What Dagster calls: it tells of each chunk, and at the end lets the steps below go on."""

    def run(context):
        yield from body(context)
        for each in outs:
            yield dg.Output(None, each, metadata={SILENT: True})
        for each in judged:
            yield dg.Output(None, each)

    return run


__all__: Sequence[str] = (
    "Chunk",
    "assets_of_job",
    "dataflow_assets",
    "dataflow_specs",
    "external_assets",
    "one_producer_each",
)


# Scripts as assets: the program that `odf run` would start, once for each chunk.


HEARING = 1.0
"""Seconds at most until a script whose chunk was taken over is ended, once that is known."""


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
        return Maker(script_compute(argv, stop_grace=stop_grace))

    described: dict[str, Any] = {
        "description": f"Runs `{' '.join(argv)}` for each chunk."
    } | options
    return assets_of_job(
        job, dataflow, prepare, translator=translator, checks=checks, secrets=True, **described
    )


def script_compute(argv: list[str], *, stop_grace: float = 10.0) -> Callable[[Chunk], None]:
    """What runs a script for a chunk."""

    def compute(chunk: Chunk) -> None:
        # Its own handlers stand in for Dagster's while a script runs: they end the whole script.
        with Scripts(stop_grace=stop_grace) as scripts:
            ended = scripts.run(
                argv,
                dict(chunk.environment),
                time_limit=chunk.claim.time_limit,
                beat=chunk.alive,
                beat_every=min(HEARING, chunk.claim.lease / 3),
                stdin_null=True,
            )
        if scripts.stopping is not None:
            raise Stopped(scripts.stopping)
        if ended.code:
            raise ChunkFailed(ended.reason)

    return compute


# Functions of DataFrames as assets: chunks read and published by Spark.


PYSPARK = "pyspark"
"""The key of the resource that gives the session, where a project has one."""


def assets_of_function(
    jobid: str,
    dataflow: DataflowResource | Catalog,
    function: Callable[..., Any],
    *,
    translator: DataflowTranslator | None = None,
    checks: Iterable[ChunkCheck] = (),
    pyspark: bool = False,
    **options: Any,
) -> dg.AssetsDefinition:
    """Make assets of a function of DataFrames; what it expects are checks of the assets.

    `pyspark` takes the session from the resource of that name, a `SparkResource` or a
    `LazyPySparkResource`, instead of one with what `dataflow.properties` says of Spark.
    """

    job = as_spark_job(function)
    catalog = dataflow if isinstance(dataflow, Catalog) else dataflow.catalog()
    plan = registered(catalog, jobid)
    job.arguments(plan)  # what is wrong with the function is said now, not at three in the morning
    if pyspark:
        options["required_resource_keys"] = {*options.get("required_resource_keys", ()), PYSPARK}

    def prepare(context: dg.AssetExecutionContext) -> Any:
        from ..spark.session import has_ended
        from ..spark.worker import SparkWork

        resource = getattr(context.resources, RESOURCE)

        def session() -> "SparkSession":
            if pyspark:
                found = getattr(context.resources, PYSPARK).spark_session
                if has_ended(found):
                    raise SessionError(
                        f"The session of resource {PYSPARK!r} has ended. Launch the run again."
                    )
                return found
            from ..spark.session import spark_session

            return spark_session(app=f"odf {jobid}", settings=resource.settings)

        return SparkWork(
            resource.store,
            resource.store.plan(jobid),
            job,
            session,
            context=context,
            say=context.log.info,
        )

    promised = [
        ChunkCheck(rule.name, bool, rule.datasetid, rule.severity == ERROR, _about(rule))
        for rule in rules_of(job.expect, plan.outputs)
    ]
    options["kinds"] = {*options.get("kinds", ()), "spark"}
    return assets_of_job(
        jobid, catalog, prepare, translator=translator, checks=checks, promised=promised, **options
    )


def _about(rule: Rule) -> str | None:
    """What a rule asks, for the page of its asset check."""
    if says := getattr(rule, "says", ""):
        return f"Rows that {says} fail it."
    if columns := rule.columns:
        return f"{', '.join(columns)}: no two rows have the same."
    return inspect.getdoc(getattr(rule, "fn", None)) if hasattr(rule, "fn") else None
