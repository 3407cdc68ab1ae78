"""The same jobs in Dagster: datasets are assets, days are partitions."""

from pathlib import Path

import dagster as dg
import jobs

from opendataflow_dagster import DataflowResource, build_definitions

here = Path(__file__).parent

catch_up = dg.define_asset_job("catch_up", selection=["checked", "report"])

defs = dg.Definitions.merge(
    dg.Definitions(jobs=[catch_up]),
    build_definitions(
        DataflowResource(config=str(here / "dataflow.properties")),
        functions={"check": jobs.check, "report": jobs.report},
        executor=dg.in_process_executor,  # both jobs in one process: Spark starts once
    ),
)
