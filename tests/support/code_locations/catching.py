"""A job, the schedule of another, and the sensors that launch and settle: nothing else is on."""

import time

import dagster as dg

from opendataflow_dagster.dagster.assets import dataflow_assets
from opendataflow_dagster.dagster.job_assets import external_assets
from opendataflow_dagster.dagster.launch import catch_up_sensor
from opendataflow_dagster.dagster.resources import DataflowResource
from opendataflow_dagster.dagster.sensors import settlement_sensor

dataflow = DataflowResource()
catalog = dataflow.catalog()


@dataflow_assets(job="loadbob", dataflow=catalog)
def loadbob(chunk) -> None:
    """Take a minute for what is slow."""
    time.sleep(60 if chunk.dataid.startswith("slow") else 0)


defs = dg.Definitions(
    assets=[loadbob, *external_assets(catalog, {"bobout"})],
    sensors=[
        catch_up_sensor(
            dataflow,
            {"loadbob": loadbob},
            minimum_interval_seconds=1,
            default_status=dg.DefaultSensorStatus.RUNNING,
        ),
        settlement_sensor(dataflow, minimum_interval_seconds=1),
    ],
    resources={"dataflow": dataflow},
    executor=dg.in_process_executor,
)
