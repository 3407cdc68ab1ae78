"""Functions of DataFrames as assets: chunks read and published by Spark."""

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import dagster as dg

from ..chunk import ERROR
from ..errors import SessionError
from ..spark.expectations import Rule, rules_of
from ..spark.job import as_spark_job
from ..store.catalog import Catalog
from .checks import ChunkCheck
from .resources import DataflowResource
from .translator import DataflowTranslator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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
    from .assets import RESOURCE, assets_of_job, registered

    job = as_spark_job(function)
    catalog = dataflow if isinstance(dataflow, Catalog) else dataflow.catalog()
    plan = registered(catalog, jobid)
    job.arguments(plan)  # what is wrong with the function is said now, not at three in the morning
    if pyspark:
        options["required_resource_keys"] = {*options.get("required_resource_keys", ()), PYSPARK}

    def prepare(context: dg.AssetExecutionContext) -> Any:
        from ..spark.session_health import has_ended
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
