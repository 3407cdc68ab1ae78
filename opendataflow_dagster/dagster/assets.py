"""What makes assets of a job: a Python function, a script, a function of DataFrames."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import dagster as dg

from ..chunk import ERROR
from ..errors import SessionError, WrongUse
from ..flow.flow import Dataset, Flow, Job
from ..runner.environment import AnswerFiles
from ..runner.produce import Chunk, ChunkFailed, Maker, Result
from ..runner.script import CannotStart, CodeVersion, Scripts, check, code_of_function
from ..spark.expectations import rules_of
from ..spark.job import FUNCTION, as_spark_job, is_spark_function
from ..spark.rules import Rule
from ..storage.chunks import publishing
from ..store.catalog import Catalog
from ..util.text import typed
from .checks import ChunkCheck
from .job_assets import Source, assets_of_job, catalog_in, no_assets, why_unregistered
from .parameters import filled, filled_by_dagster, given_to, without
from .resources import PYSPARK_KEY, RESOURCE_KEY
from .step import ScriptStopped
from .translator import DataflowTranslator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DECLARED = "dataflow_declared"
"""The attribute of assets whose job is declared in Python: its `DeclaredAssets`."""

LOST_CLAIM_POLL_SECONDS = 1.0
"""Seconds between two looks at whether a running script has lost its claim; then it is ended."""


def dataflow_assets(
    *,
    job: str | None = None,
    dataflow: Source | None = None,
    inputs: Iterable[str | Dataset] = (),
    outputs: Iterable[str | Dataset] = (),
    policy: Mapping[str, Any] = MappingProxyType({}),
    environment: Mapping[str, str] = MappingProxyType({}),
    translator: DataflowTranslator | None = None,
    checks: Iterable[ChunkCheck] = (),
    **options: Any,
) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
    """Make assets of a function that makes one chunk: `fn(chunk)`.

    It may also take Dagster's `context`, a `config` and resources: `fn(chunk, context:
    dg.AssetExecutionContext, config: OurConfig, api: OurResource)`. It returns None, a `Result`, or
    what is to be published as the chunk: a frame, an Arrow table, bytes, a Path. For several
    datasets, a dict: dataset → one of these. One of `@spark_job`, or with a parameter that is a
    DataFrame of Spark, is given the chunks of its inputs; with `pyspark=True`, the resource of that
    name has its session. The other options are those of `assets_of_job`.

    The job is one of `dataflow`; or, with `outputs`, it is declared here, and no database is read.
    Give the assets of such a job to `build_definitions`, which knows the jobs around it.

    Args:
        job: The job. One that is declared here is called like the function by itself.
        dataflow: The tables, or the `Flow`, that have the job.
        inputs: The datasets that the job reads, by id or as a `Dataset`; `today` is the date.
        outputs: The datasets that it writes.
        policy: The dials that it sets, such as `{"max_attempts": 3}`.
        environment: Variables that it gets, in `chunk.environment`.
        translator: How datasets, chunks and jobs are called in Dagster.
        checks: Functions that look at a chunk before it becomes READY.

    Example:
        @dataflow_assets(inputs=["sales"], outputs=["checked"])
        def check(chunk: Chunk): ...
    """
    links = list(inputs), list(outputs)
    _refuse_unclear(job, dataflow, *links)

    def assets_of_function(fn: Callable[..., Any]) -> dg.AssetsDefinition:
        inner = getattr(fn, "fn", fn)  # of a SparkJob
        described: dict[str, Any] = {"description": inspect.getdoc(inner)} | options
        described["runs"] = f"function `{inner.__module__}.{_name_of(fn)}`"
        build = spark_assets if is_spark_function(fn) else _python_assets
        jobid = job or _name_of(fn)

        def assets_in(source: Source, names: DataflowTranslator | None) -> dg.AssetsDefinition:
            assets = build(jobid, source, fn, translator=names, checks=checks, **described)
            setattr(assets, FUNCTION, fn)  # for `odf run --spark`
            return assets

        if dataflow is not None:
            return assets_in(dataflow, translator)
        declared = _declared(jobid, *links, policy, environment)
        assets = assets_in(declared, translator)
        setattr(assets, DECLARED, DeclaredAssets(declared, assets_in, translator))
        return assets

    return assets_of_function


def _refuse_unclear(
    job: str | None, dataflow: Source | None, inputs: Sequence[Any], outputs: Sequence[Any]
) -> None:
    """Refuse what doesn't say which job it is, or says so twice."""
    if (dataflow is None or job is None) and not outputs:
        raise WrongUse(
            "@dataflow_assets needs the job and what knows it (job=…, dataflow=…), or what the job "
            "reads and writes (inputs=[…], outputs=[…])."
        )
    if dataflow is not None and (inputs or outputs):
        raise WrongUse(
            "@dataflow_assets has both `dataflow`, which knows the job, and what it reads and "
            "writes. Leave out `dataflow`; or `inputs` and `outputs`."
        )


class DeclaredAssets(NamedTuple):
    """What a job declares in Python, and how its assets are made among other jobs.

    Alone, a job doesn't know the name of its domain, which the datasets around it tell.
    """

    flow: Flow
    assets_in: Callable[[Catalog, DataflowTranslator | None], dg.AssetsDefinition]
    translator: DataflowTranslator | None


def _name_of(fn: Callable[..., Any]) -> str:
    inner = getattr(fn, "fn", fn)  # of a SparkJob
    return getattr(inner, "__name__", type(inner).__name__)


def _declared(
    jobid: str,
    inputs: Iterable[str | Dataset],
    outputs: Iterable[str | Dataset],
    policy: Mapping[str, Any],
    environment: Mapping[str, str],
) -> Flow:
    """A flow of one job."""
    datasets: dict[str, Dataset] = {}

    def named(items: Iterable[str | Dataset]) -> list[str]:
        datasets.update({item.datasetid: item for item in items if isinstance(item, Dataset)})
        return [item.datasetid if isinstance(item, Dataset) else item for item in items]

    job = Job(
        jobid,
        inputs=named(inputs),
        outputs=named(outputs),
        policy=policy,
        environment=environment,
    )
    return Flow(jobid, datasets=list(datasets.values()), jobs=[job])


def _python_assets(
    jobid: str,
    dataflow: Source,
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
    given, code = given_to(fn, jobid), code_of_function(fn)

    def prepare(context: dg.AssetExecutionContext, values: Mapping[str, Any]) -> Maker:
        store = getattr(context.resources, RESOURCE_KEY).store
        maker = Maker(*publishing(store, given.bind(context, values)))
        maker.code = code
        return maker

    return assets_of_job(jobid, dataflow, prepare, parameters=given.parameters, **options)


# --- scripts: the program that `odf run` would start, once for each chunk ---


def script_assets(
    job: str,
    script: str | Sequence[str],
    *,
    dataflow: Source,
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
    if "config_schema" in options:
        raise WrongUse(f"The script of job {job!r} can't see a config. Leave out config_schema.")

    def prepare(context: dg.AssetExecutionContext, values: Mapping[str, Any]) -> Maker:
        try:
            check(argv[0], os.environ.get("PATH", os.defpath))
        except CannotStart as refusal:
            raise dg.Failure(f"{refusal}. Nothing was claimed.", allow_retries=False) from None
        maker = Maker(script_compute(argv, stop_grace=stop_grace))
        maker.code = CodeVersion(argv).text()
        return maker

    return assets_of_job(
        job,
        dataflow,
        prepare,
        translator=translator,
        checks=checks,
        secrets=True,
        runs=f"script `{typed(*argv)}`",
        **options,
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
    dataflow: Source,
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
    catalog = catalog_in(dataflow)
    if flaw := why_unregistered(catalog, jobid):
        return no_assets(jobid, flaw)
    plan = catalog.jobs[jobid]
    by_dagster = filled_by_dagster(job.fn, jobid)
    # A fault in the function is reported at load, not in tonight's run.
    replace(job, fn=without(job.fn, by_dagster)).arguments(plan)
    if pyspark:
        options["required_resource_keys"] = {
            *options.get("required_resource_keys", ()),
            PYSPARK_KEY,
        }

    def prepare(context: dg.AssetExecutionContext, values: Mapping[str, Any]) -> Any:
        from ..spark.worker import SparkWork

        store = getattr(context.resources, RESOURCE_KEY).store
        session = _session_of(context, jobid, pyspark)
        mine = {each.name: values[each.name] for each in by_dagster}
        work = replace(job, fn=filled(job.fn, mine))
        return SparkWork(
            store, store.plan(jobid), work, session, context=context, say=context.log.info
        )

    promised = [
        ChunkCheck(rule.name, bool, rule.datasetid, rule.severity == ERROR, _about(rule))
        for rule in rules_of(job.expect, plan.outputs)
    ]
    options["kinds"] = {*options.get("kinds", ()), "spark"}
    return assets_of_job(
        jobid, catalog, prepare, promised=promised, parameters=by_dagster, **options
    )


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
