"""The project before OpenDataFlow: an asset, and a schedule that materializes it every morning."""

import dagster as dg


@dg.asset
def shops() -> list[str]:
    """The list of shops."""
    return ["harbour", "north", "south"]


defs = dg.Definitions(
    assets=[shops],
    schedules=[dg.ScheduleDefinition(name="morning", target=[shops], cron_schedule="0 6 * * *")],
)
