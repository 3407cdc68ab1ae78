"""Plain Dagster, nothing of ours: for testing the servers themselves."""

import os
import time
from pathlib import Path

import dagster as dg

keys = dg.DynamicPartitionsDefinition(name="keys")


@dg.asset(partitions_def=keys, backfill_policy=dg.BackfillPolicy.multi_run(50))
def made(context: dg.AssetExecutionContext) -> None:
    """Make key after key: `bad…` fails and `slow…` waits, until the file `mended` is there."""
    mended = Path(os.environ["TOY_FOLDER"]) / "mended"
    failed = []
    for key in context.partition_keys:
        while key.startswith("slow") and not mended.exists():
            time.sleep(0.05)
        if key.startswith("bad") and not mended.exists():
            failed.append(key)
            continue
        context.log_event(
            dg.AssetMaterialization(context.asset_key, partition=key, metadata={"rows": len(key)})
        )
    if failed:
        raise dg.Failure(f"not mended yet: {', '.join(failed)}", allow_retries=False)


@dg.asset(partitions_def=keys, deps=[made], backfill_policy=dg.BackfillPolicy.multi_run(50))
def after() -> None:
    """Succeed."""


@dg.sensor(target=[made], minimum_interval_seconds=30)
def arrivals(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
    """Add the key that the file `arrived` names, and launch its run."""
    arrived = Path(os.environ["TOY_FOLDER"]) / "arrived"
    key = arrived.read_text() if arrived.exists() else ""
    if key in ("", context.cursor):
        return dg.SkipReason("nothing arrived")
    return dg.SensorResult(
        run_requests=[dg.RunRequest(run_key=key, partition_key=key, tags={"from": "arrivals"})],
        dynamic_partitions_requests=[keys.build_add_request([key])],
        cursor=key,
    )


defs = dg.Definitions(assets=[made, after], sensors=[arrivals], executor=dg.in_process_executor)
