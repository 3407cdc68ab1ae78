"""A shop: days of sales arrive from outside, and a Python job checks them, in the run's process.

The file SHOP_BROKEN lists days that fail, SHOP_SLOW those that take until they are struck off.
"""

import os
import time
from pathlib import Path

import dagster as dg

from opendataflow_dagster import (
    Chunk,
    DataflowResource,
    Result,
    build_definitions,
    dataflow_assets,
)

dataflow = DataflowResource()


def listed(name: str) -> set[str]:
    """Return the days that a file lists, if any."""
    path = Path(os.environ[name])
    return set(path.read_text().split()) if path.exists() else set()


@dataflow_assets(job="check", dataflow=dataflow)
def check(chunk: Chunk) -> Result:
    """Count the sales of a day."""
    while chunk.dataid in listed("SHOP_SLOW"):
        chunk.check()
        time.sleep(0.05)
    if chunk.dataid in listed("SHOP_BROKEN"):
        raise ValueError(f"{chunk.dataid}: line 7 has no price")
    day = int(chunk.dataid[-2:])
    return Result(rows=1000 + day, location=f"s3://shop/checked/{chunk.dataid}.csv")


defs = build_definitions(dataflow, assets=[check], executor=dg.in_process_executor)
