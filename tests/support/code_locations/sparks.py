"""The same function of DataFrames as jobs of several kinds, and as a plain asset."""

import dagster as dg
from pyspark.sql import DataFrame

from opendataflow_dagster import (
    DataflowResource,
    DataflowTranslator,
    SparkResource,
    build_definitions,
)
from opendataflow_dagster.spark import progress
from tests.support.code_locations.spark_jobs import batched, checked, enrich, threaded

dataflow = DataflowResource()
progress.PROGRESS_SECONDS = 1.0  # what a test can't wait for


@dg.asset(
    partitions_def=DataflowTranslator().partitions_def(dataflow.catalog().domains["sales"]),
    ins={"sales": dg.AssetIn(input_manager_key="dataflow_io_manager")},
    io_manager_key="dataflow_io_manager",
)
def by_value(sales: DataFrame) -> DataFrame:
    """Return the frame of a chunk, for another one."""
    return enrich(sales)


defs = build_definitions(
    dataflow,
    assets=[by_value],
    functions={
        "materialize": checked,
        "backfill": enrich,
        "batch": batched,
        "threads": threaded,
        "stop_batch": batched,
        "stop_threads": threaded,
    },
    pyspark=SparkResource(spark_config={"spark.master": "local[2]"}),
    executor=dg.in_process_executor,
)
