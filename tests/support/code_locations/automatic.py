"""Jobs that automation conditions launch; each chunk that is produced adds a line to a file."""

import os
from pathlib import Path

import dagster as dg

from opendataflow_dagster import (
    Chunk,
    DataflowResource,
    Result,
    build_definitions,
    dataflow_assets,
)

folder = Path(os.environ["FLOW_FOLDER"])
dataflow = DataflowResource(url=os.environ["DATAFLOW_URL"])

condition = dg.AutomationCondition
on_new_data = condition.eager().replace(
    "any_deps_updated", condition.any_deps_match(condition.data_version_changed())
)

CONDITIONS = {
    "clean": condition.eager(),
    "report": condition.eager(),
    "changes": on_new_data,
    "first": condition.on_missing(),
    "minutely": condition.on_cron("* * * * *"),
}


def make(chunk: Chunk) -> Result:
    """Write `content` for `orders`, and for all other datasets what they were produced from."""
    with (folder / "produced").open("a") as file:
        file.write(f"{chunk.jobid} {chunk.dataid}\n")
    if chunk.jobid == "clean":
        return Result(fingerprint=(folder / "content").read_text())
    return Result()


defs = build_definitions(
    dataflow,
    assets=[
        dataflow_assets(job=job, dataflow=dataflow, automation_condition=each)(make)
        for job, each in CONDITIONS.items()
    ],
    executor=dg.in_process_executor,
)
defs = dg.Definitions.merge(
    defs,
    dg.Definitions(
        sensors=[
            dg.AutomationConditionSensorDefinition(
                "automation",
                target="*",
                default_status=dg.DefaultSensorStatus.RUNNING,
                minimum_interval_seconds=1,
            )
        ]
    ),
)
