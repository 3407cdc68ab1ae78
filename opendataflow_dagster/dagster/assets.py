"""Assets from a Python function, a script, or a function of DataFrames."""

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
"""Seconds between two checks whether a running script has lost its claim; then it is ended."""


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
    """Turn a function that produces one chunk, `fn(chunk)`, into assets.

    The function may also take Dagster's `context`, a `config` and resources: `fn(chunk, context:
    dg.AssetExecutionContext, config: OurConfig, api: OurResource)`. It returns None, a `Result`, or
    the data to publish as the chunk: a frame, an Arrow table, bytes, or a Path. If the job writes
    several datasets, it returns a dict: dataset → one of these. A function of `@spark_job`, or with
    a parameter that is a Spark DataFrame, receives the chunks of its inputs as frames.

    Without `dataflow`, the job is declared here, by `outputs`, and no database is read. Pass its
    assets to `build_definitions`, which knows the jobs around it.

    Args:
        job: The job; by default, a job declared here is named like the function.
        dataflow: Where the job is registered: the tables, or a `Flow`.
        inputs: The datasets that the job reads, by id or as a `Dataset`; `today` is the date.
        outputs: The datasets that it writes.
        policy: The dials that it sets, such as `{"max_attempts": 3}`.
        environment: Variables for the function, in `chunk.environment`.
        translator: Names datasets, chunks and jobs in Dagster.
        checks: Functions that check a chunk before it becomes READY.
        options: Dagster's options for the step, such as `pool`, `retry_policy` or `group_name`;
            and `pyspark=True`, which takes the Spark session from the resource `pyspark`.

    Raises:
        WrongUse: The arguments name no job or two, or nothing provides a parameter of the function.

    Example:
        @dataflow_assets(inputs=["sales"], outputs=["checked"])
        def check(chunk: Chunk) -> Result:
            rows = copy_valid_rows(chunk.inputs["sales"].location,
            chunk.outputs["checked"].location) return Result(rows=rows)
    """
    links = list(inputs), list(outputs)
    _refuse_unclear(job, dataflow, *links)

    def assets_of_function(fn: Callable[..., Any]) -> dg.AssetsDefinition:
        inner = getattr(fn, "fn", fn)  # a SparkJob wraps its function
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
    """Refuse arguments that name no job, or name one twice."""
    if (dataflow is None or job is None) and not outputs:
        raise WrongUse(
            "@dataflow_assets needs either a registered job (job=…, dataflow=…), or what the job "
            "reads and writes (inputs=[…], outputs=[…])."
        )
    if dataflow is not None and (inputs or outputs):
        raise WrongUse(
            "@dataflow_assets has `dataflow`, which already defines what the job reads and writes, "
            "and also `inputs` or `outputs`. Leave out `dataflow`, or `inputs` and `outputs`."
        )


class DeclaredAssets(NamedTuple):
    """What a job declares in Python, and how to build its assets among other jobs.

    On its own, a job doesn't know its domain's name: that depends on the datasets around it.
    """

    flow: Flow
    assets_in: Callable[[Catalog, DataflowTranslator | None], dg.AssetsDefinition]
    translator: DataflowTranslator | None


def _name_of(fn: Callable[..., Any]) -> str:
    inner = getattr(fn, "fn", fn)  # a SparkJob wraps its function
    return getattr(inner, "__name__", type(inner).__name__)


def _declared(
    jobid: str,
    inputs: Iterable[str | Dataset],
    outputs: Iterable[str | Dataset],
    policy: Mapping[str, Any],
    environment: Mapping[str, str],
) -> Flow:
    """Return a flow of one job."""
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
    """Return the assets of a function that takes a `Chunk` and whose result is published."""
    if pyspark:
        name = getattr(fn, "__name__", fn)
        raise WrongUse(
            f"pyspark=True is for functions of DataFrames, which {name} of job {jobid!r} isn't. "
            "Annotate its inputs as DataFrame, or decorate it with @spark_job."
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
    """Turn a script into assets: a program, or a program and its arguments. No shell is involved.

    The script gets the environment of `odf run`, and its output goes to the step's log. Its exit
    code says how the chunk ended.

    Args:
        job: The job that the script runs.
        script: The program, or the program and its arguments.
        dataflow: Where the job is registered: the tables, or a `Flow`.
        translator: Names datasets, chunks and jobs in Dagster.
        checks: Functions that check a chunk before it becomes READY.
        stop_grace: Seconds that the script has to end when its run is terminated.
        options: Dagster's options for the step, such as `pool`, `retry_policy` or `group_name`.

    Raises:
        WrongUse: The options include `config_schema`, which a script can't receive.

    Example:
        assets = script_assets("loadbob", "./loadbob.sh", dataflow=DataflowResource())
    """
    argv = [script] if isinstance(script, str) else list(script)
    if "config_schema" in options:
        raise WrongUse(
            f"The script of job {job!r} can't receive a config. Leave out config_schema."
        )

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
    """Return what runs a script for a chunk."""

    def compute(chunk: Chunk) -> dict[str, Result]:
        env = dict(chunk.environment)
        look_every = min(LOST_CLAIM_POLL_SECONDS, chunk.claim.lease / 3)
        with AnswerFiles(chunk.claim, tuple(chunk.outputs), env) as files:

            def beat() -> bool:
                files.heed(chunk.holds(look_every))
                return chunk.alive()

            # The script's own handlers replace Dagster's while it runs: they end its whole process
            # tree.
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
    """Return the assets of a function of DataFrames; its expectations are checks of the assets.

    `pyspark` takes the session from the resource of that name, a `SparkResource` or a
    `LazyPySparkResource`, instead of a session with the settings of `dataflow.properties`.
    """
    job = as_spark_job(function)
    catalog = catalog_in(dataflow)
    if flaw := why_unregistered(catalog, jobid):
        return no_assets(jobid, flaw)
    plan = catalog.jobs[jobid]
    by_dagster = filled_by_dagster(job.fn, jobid)
    # Report a fault in the function when the location loads, not in tonight's run.
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
    """Return a function that gives the Spark session when the first chunk needs it."""

    def from_resource() -> "SparkSession":
        from ..spark.session import has_ended

        session = getattr(context.resources, PYSPARK_KEY).spark_session
        if has_ended(session):
            raise SessionError(
                f"The Spark session of resource {PYSPARK_KEY!r} has ended. Launch the run again."
            )
        return session

    def from_settings() -> "SparkSession":
        from ..spark.session import spark_session

        settings = getattr(context.resources, RESOURCE_KEY).settings
        return spark_session(app=f"odf {jobid}", settings=settings)

    return from_resource if pyspark else from_settings


def _about(rule: Rule) -> str | None:
    """Describe a rule for the page of its asset check."""
    if says := getattr(rule, "says", ""):
        return f"Rows that {says} fail it."
    if columns := rule.columns:
        return f"{', '.join(columns)}: no two rows have the same values."
    return inspect.getdoc(getattr(rule, "fn", None)) if hasattr(rule, "fn") else None
