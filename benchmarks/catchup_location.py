"""The code location of benchmarks/catchup.py: our job, and the same in plain Dagster."""

import sys
from pathlib import Path

import dagster as dg

sys.path.insert(0, str(Path(__file__).resolve().parent))

from product import Chunk, DataflowResource, build_definitions, dataflow_assets

dataflow = DataflowResource()


@dataflow_assets(job="copy", dataflow=dataflow)
def copy(chunk: Chunk) -> None:
    """Do nothing, like the rival."""


@dg.asset(
    partitions_def=dg.DynamicPartitionsDefinition(name="rival"),
    backfill_policy=dg.BackfillPolicy.multi_run(1),
)
def rival() -> None:
    """Do nothing, in one run per partition."""


defs = dg.Definitions.merge(
    build_definitions(dataflow, assets=[copy], batch=1000), dg.Definitions(assets=[rival])
)
