"""The project as it was: an asset, and a schedule that makes it every morning."""

import dagster as dg


@dg.asset
def shops() -> list[str]:
    """The shops that there are."""
    return ["harbour", "north", "south"]


defs = dg.Definitions(
    assets=[shops],
    schedules=[dg.ScheduleDefinition(name="morning", target=[shops], cron_schedule="0 6 * * *")],
)
