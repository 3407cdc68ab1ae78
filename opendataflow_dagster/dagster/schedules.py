"""Schedules for the jobs that read `today`: a chunk a day, soon after the day has begun."""

import os
from collections.abc import Mapping

import dagster as dg

from ..errors import WrongUse
from ..store.catalog import Catalog
from ..store.claimable import offer, offer_line
from ..util.times import zone_called
from .catch_up_sensor import DATABASE_WAIT_SECONDS, JobAssets, Launcher, Target, unreadable
from .resources import DataflowResource
from .translator import DataflowTranslator

CRON_PERIODS_MINUTES = (
    1,
    2,
    3,
    4,
    5,
    6,
    10,
    12,
    15,
    20,
    30,
    60,
    120,
    180,
    240,
    360,
    480,
    720,
    1440,
)
"""Minutes after which a cron expression can come round, in every day the same."""


def today_schedules(
    dataflow: DataflowResource,
    jobs: Mapping[str, Target],
    *,
    catalog: Catalog,
    translator: DataflowTranslator | None = None,
    batch: int = 500,
    default_status: dg.DefaultScheduleStatus = dg.DefaultScheduleStatus.STOPPED,
) -> list[dg.ScheduleDefinition]:
    """A schedule for each job that reads `today`: daily, or every so many minutes by its policy.

    `jobs` tells which assets run a job. A job that waits for other inputs too, later in the day,
    is launched by the catch-up sensor, or by its `every_minutes`.
    """
    translator = translator or DataflowTranslator()
    zone = zone_name(dataflow.settings.timezone)
    return [
        _schedule(
            dataflow,
            jobid,
            target,
            translator,
            batch,
            default_status,
            cron(catalog.policies.get(jobid, {}).get("every_minutes"), zone),
            zone or "UTC",
        )
        for jobid, target in jobs.items()
        if jobid in catalog.jobs and catalog.jobs[jobid].today
    ]


def cron(every_minutes: int | None, zone: str | None = "UTC") -> str:
    """When to look: a minute past midnight, or as often as it takes to be exact to the minute.

    Where the day begins isn't known, it is looked for every hour.
    """
    minutes = every_minutes or (1440 if zone else 60)
    period = max(period for period in CRON_PERIODS_MINUTES if minutes % period == 0)
    if period < 60:
        return f"*/{period} * * * *"
    # Not on the hour: by the database's clock it may still be yesterday.
    hours = period // 60
    return f"1 {'0' if hours == 24 else f'*/{hours}'} * * *"


def zone_name(configured: str | None) -> str | None:
    """The name of the time zone in which days begin: the configured one, or the machine's."""
    if configured:
        zone_called(configured)
        return configured
    name = os.environ.get("TZ", "").lstrip(":")
    name = name or os.path.realpath("/etc/localtime").partition("/zoneinfo/")[2]
    try:
        zone_called(name)
    except WrongUse:
        return None
    return name


def _schedule(
    dataflow: DataflowResource,
    jobid: str,
    target: Target,
    translator: DataflowTranslator,
    batch: int,
    default_status: dg.DefaultScheduleStatus,
    cron_schedule: str,
    zone: str,
) -> dg.ScheduleDefinition:
    @dg.schedule(
        name=f"opendataflow_today_{translator.op_name(jobid)}",
        cron_schedule=cron_schedule,
        execution_timezone=zone,
        target=target,
        default_status=default_status,
        description=f"Launches job {jobid} for today's chunk.",
    )
    def today(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        store = None
        try:
            store = dataflow.patient_store(DATABASE_WAIT_SECONDS)
            found = offer(store, jobid)
            launcher = Launcher(context.instance, translator=translator, batch=batch)
            running = launcher.at_work([jobid], store)[jobid]
        except Exception as error:
            return dg.SkipReason(unreadable(store, error))
        if found.obstacle:
            return dg.SkipReason(f"{jobid}: {offer_line(found)}.")
        ended = launcher.ended(jobid)
        if waits := launcher.early(found, [*running, *ended]):
            return dg.SkipReason(f"{jobid}: {offer_line(found)}, {waits}.")
        if running:
            return dg.SkipReason(f"{jobid}: {offer_line(found)}, {len(running)} run at work.")
        assets = JobAssets.of(target, context.repository_def)
        return launcher.request(found, assets, ended)

    return today
