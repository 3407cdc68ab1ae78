"""What launches runs: a sensor for the chunks that jobs may claim, schedules for `today`."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import dagster as dg

from ..errors import DataflowError, WrongUse
from ..store.catalog import Catalog
from ..store.claims import (
    MAX_COUNTED_CHUNKS,
    NOTHING_CLAIMABLE,
    Offer,
    look,
    offer,
    offer_line,
    runs_at_work,
)
from ..store.store import Store
from ..util.text import first_line
from ..util.times import zone_called
from .pipeline_assets import Projects
from .resources import DataflowResource
from .step import BATCH_TAG, CATCH_UP_TAG
from .translator import DataflowTranslator

_log = logging.getLogger("opendataflow_dagster")

Target = dg.AssetsDefinition | dg.AssetSelection

JOB_TAG, OFFER_TAG = f"{CATCH_UP_TAG}-job", "opendataflow/offer"
"""The tags that tell whose run it is, and what there was to claim when it was launched."""

DATABASE_WAIT_SECONDS = 5.0
"""Seconds that a tick waits for a database that went away."""

CATCH_UP_SECONDS = 10
"""Seconds between two looks at what can be claimed."""

MAX_WAIT_SECONDS = 3600.0
"""Seconds at most between two runs that change nothing."""

EARLY_LAUNCH_SECONDS = 30.0
"""Seconds by which a launch may be early, so that a late tick doesn't delay all after it."""

WORKER_START_SECONDS = 60.0
"""Seconds after which a run that should be at work, but has no worker, holds up no other one."""

MAX_ENDED_RUNS = 10
"""Ended runs of a job that are looked at: doubling as often leads to the longest wait."""

CRON_PERIODS_MINUTES = [
    *(minutes for minutes in range(1, 61) if 60 % minutes == 0),
    *(60 * hours for hours in range(2, 25) if 24 % hours == 0),
]
"""Periods that a cron expression can have: it begins again with each hour, and with each day."""

ENDED_STATUSES = (
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
)
AT_WORK_STATUSES = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
"""NOT_STARTED isn't among them: a run that Dagster failed to launch must not hold up the next one,
and Dagster launches it by itself when the sensor requests its run key again."""


class JobAssets(NamedTuple):
    """The assets that run a job, and under which name their partitions are kept."""

    keys: list[dg.AssetKey]
    partitions: str | None

    @classmethod
    def of(cls, target: Target, repository: dg.RepositoryDefinition | None) -> "JobAssets":
        """The assets of a target; a selection is resolved among those of the code location."""
        if isinstance(target, dg.AssetsDefinition):
            return cls(sorted(target.keys), _name(target))
        if repository is None:
            raise WrongUse("A selection of assets needs the definitions that it selects from.")
        keys = sorted(target.resolve(repository.asset_graph))
        return cls(keys, _name(repository.assets_defs_by_key[keys[0]]) if keys else None)


def _name(assets: dg.AssetsDefinition) -> str | None:
    partitions = assets.partitions_def
    return partitions.name if isinstance(partitions, dg.DynamicPartitionsDefinition) else None


class Launcher:
    """What Dagster knows of our runs, and the requests for more of them."""

    def __init__(
        self,
        instance: dg.DagsterInstance,
        *,
        translator: DataflowTranslator | None = None,
        batch: int = 500,
        shortest_wait: float = 10.0,
    ) -> None:
        self.instance, self.batch, self.shortest_wait = instance, batch, shortest_wait
        self.translator = translator or DataflowTranslator()

    def at_work(self, jobids: Iterable[str], store: Store) -> dict[str, list[dg.RunRecord]]:
        """The runs of jobs that haven't ended, by job.

        One that was killed before it began stays "started" for a while, until it is buried: it
        must not keep the next from being launched. Should it live after all, the claims decide.
        """
        found: dict[str, list[dg.RunRecord]] = {jobid: [] for jobid in jobids}
        if found:
            wanted = dg.RunsFilter(statuses=AT_WORK_STATUSES, tags={JOB_TAG: list(found)})
            records = self.instance.get_run_records(filters=wanted)
            busy = set(runs_at_work(store)) if any(map(_lacks_worker, records)) else set()
            for record in records:
                if not _lacks_worker(record) or record.dagster_run.run_id in busy:
                    found[record.dagster_run.tags[JOB_TAG]].append(record)
        return found

    def ended(self, jobid: str) -> Sequence[dg.RunRecord]:
        """The last runs of a job that have ended, the newest first."""
        wanted = dg.RunsFilter(statuses=ENDED_STATUSES, tags={JOB_TAG: jobid})
        return self.instance.get_run_records(filters=wanted, limit=MAX_ENDED_RUNS)

    def early(self, found: Offer, launched: Sequence[dg.RunRecord]) -> str:
        """How long ago the last launch was, of a job that is launched every so often only."""
        if not (found.every_minutes and launched):
            return ""
        ago = time.time() - max(record.create_timestamp.timestamp() for record in launched)
        if ago >= found.every_minutes * 60 - EARLY_LAUNCH_SECONDS:
            return ""
        return f"every {found.every_minutes} minutes, launched {_duration(ago)} ago"

    def in_vain(self, found: Offer, ended: Sequence[dg.RunRecord]) -> str:
        """What a job waits for whose runs change nothing.

        A run that left the first chunk of the queue as it was has done nothing, be it for a broken
        code location or a chunk that can't be claimed: the next one comes after twice the time.
        """
        useless = 0
        for record in ended:
            if record.dagster_run.tags.get(OFFER_TAG) != self._offered(found):
                break
            useless += 1
        if not useless:
            return ""
        last = ended[0]
        since = time.time() - (last.end_time or last.update_timestamp.timestamp())
        left = min(MAX_WAIT_SECONDS, self.shortest_wait * 2**useless) - since
        if left <= 0:
            return ""
        runs = "last run" if useless == 1 else f"last {useless} runs"
        return (
            f"its {runs} changed nothing ({last.dagster_run.run_id[:8]}: "
            f"{last.dagster_run.status.value}), the next comes in {_duration(left)}"
        )

    def request(
        self, found: Offer, assets: JobAssets, ended: Sequence[dg.RunRecord], number: int = 1
    ) -> dg.RunRequest:
        """A run that claims what its job may claim.

        Dagster launches a run key once and never again. So the key names the first chunk, that
        chunk's last change and the run before: two ticks that see the same request one run, and
        after a RESUBMIT or a killed run the key is another one. A key of the chunk alone would
        never launch a resubmitted chunk.
        """
        before = ended[0].dagster_run.run_id if ended else "none"
        key = f"{found.jobid}: {self._offered(found)} after {before}"
        return dg.RunRequest(
            run_key=key if number == 1 else f"{key}, number {number}",
            asset_selection=assets.keys,
            tags={
                CATCH_UP_TAG: "true",
                JOB_TAG: found.jobid,
                BATCH_TAG: str(self.batch),
                OFFER_TAG: self._offered(found),
                **self._partition(found, assets),
            },
        )

    def _offered(self, found: Offer) -> str:
        return f"{self._key(found)}@{found.event}"

    def _key(self, found: Offer) -> str:
        return self.translator.partition_key(found.first or "")

    def _partition(self, found: Offer, assets: JobAssets) -> dict[str, str]:
        """The tags without which Dagster doesn't run partitioned assets.

        It launches a run without a partition, but the step fails before its body when an input is
        partitioned too and has been materialized: Dagster looks up which of its partitions the run
        is about. So the run names the first chunk of the queue. It may claim other chunks than
        that one; `defer_asset_events` keeps Dagster from planning a materialization for it, which
        would make the partition red when this run fails for another chunk. The step logs an event
        for each chunk that it has produced.
        """
        if assets.partitions is None:
            return {}
        key, name = self._key(found), assets.partitions
        if not self.instance.has_dynamic_partition(name, key):
            try:
                self.instance.add_dynamic_partitions(name, [key])
            except Exception:  # of two who add the same one, one fails
                if not self.instance.has_dynamic_partition(name, key):
                    raise
        return {
            "dagster/asset_partition_range_start": key,
            "dagster/asset_partition_range_end": key,
            "dagster/defer_asset_events": "true",
        }


def catch_up_sensor(
    dataflow: DataflowResource,
    jobs: Mapping[str, Target],
    *,
    translator: DataflowTranslator | None = None,
    name: str = "opendataflow_catch_up",
    runs_per_job: int = 1,
    batch: int = 500,
    minimum_interval_seconds: int = CATCH_UP_SECONDS,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
    projects: Projects | None = None,
) -> dg.SensorDefinition:
    """Launch runs for the chunks that jobs may claim, within each job's dials.

    `jobs` tells which assets run a job. A run claims up to `batch` chunks, and a job has up to
    `runs_per_job` runs at a time. `odf policy` turns the dials: how many claims a job may hold, how
    often it is launched, until when it is paused.

    A run of a pipeline of `projects` makes one chunk. Of pipelines that wait for no other, a chunk
    is begun whenever one is due by `every_minutes`.
    """
    tick = CatchUp(
        dataflow, jobs, translator, runs_per_job, batch, minimum_interval_seconds, projects
    )

    return catch_up_of(
        lambda _: [tick],
        selection(jobs.values()),
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
    )


def catch_up_of(
    ticks: Callable[[dg.RepositoryDefinition | None], "list[CatchUp]"],
    selected: dg.AssetSelection,
    *,
    name: str = "opendataflow_catch_up",
    minimum_interval_seconds: int = CATCH_UP_SECONDS,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.STOPPED,
) -> dg.SensorDefinition:
    """The sensor that launches runs of some of the assets, by the parts of its code location."""

    @dg.sensor(
        name=name,
        asset_selection=selected,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Launches runs of the jobs that may claim chunks, within their dials.",
    )
    def catch_up(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        results = [tick.evaluate(context) for tick in ticks(context.repository_def)]
        requests = [
            request
            for result in results
            if isinstance(result, dg.SensorResult)
            for request in result.run_requests or ()
        ]
        if requests:
            return dg.SensorResult(run_requests=requests)
        reasons = [result.skip_message for result in results if isinstance(result, dg.SkipReason)]
        return dg.SkipReason(" ".join(filter(None, reasons)))

    return catch_up


class CatchUp(NamedTuple):
    """What each evaluation of the catch-up sensor does: read what can be claimed, request runs."""

    dataflow: DataflowResource
    jobs: Mapping[str, Target]
    translator: DataflowTranslator | None
    runs_per_job: int
    batch: int
    interval: int
    projects: Projects | None

    def evaluate(self, context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        launcher = Launcher(
            context.instance,
            translator=self.translator,
            batch=self.batch,
            shortest_wait=self.interval,
        )
        store = None
        try:
            # A tick that waits for minutes would be killed by the daemon, with an error in the UI.
            store = self.dataflow.patient_store(DATABASE_WAIT_SECONDS)
            if refusal := store.db.insist(lambda: store.unclaimable(now=True))[0]:
                return dg.SkipReason(f"{refusal} Nothing is launched.")
            if self.projects is not None:
                for jobid, dataid in self.projects.begin_due_runs(store):
                    context.log.info(f"{jobid}: a run is due, {dataid}")
            offers = [self._offer(store, jobid) for jobid in self.jobs]
            others = store.db.insist(lambda: look(store.db, dict.fromkeys(self.jobs)))[0]
            at_work = launcher.at_work(self.jobs, store)
        except Exception as error:
            return dg.SkipReason(unreadable(store, error))
        requests: list[dg.RunRequest] = []
        idle, lines = [], []
        for found in offers:
            running = at_work[found.jobid]
            if in_hand := others[found.jobid].of_work:
                waits = f"`odf work` has {in_hand} in hand"
            else:
                waits = self._request(context, launcher, found, running, requests)
            if found.obstacle == NOTHING_CLAIMABLE and not running:
                idle.append(found.jobid)
            else:
                lines.append(self._line(found, len(running), waits))
        report = _report(lines, idle)
        if not requests:
            return dg.SkipReason(report)
        context.log.info(report)
        return dg.SensorResult(run_requests=requests)

    @property
    def _max_claims(self) -> int:
        """Chunks to count at most: no more than what all runs of a job could claim now."""
        return max(MAX_COUNTED_CHUNKS, self.runs_per_job * self.batch)

    def _offer(self, store: Store, jobid: str) -> Offer:
        found = offer(store, jobid, most=self._max_claims)
        return found if self.projects is None else self.projects.offered(store, found)

    def _request(
        self,
        context: dg.SensorEvaluationContext,
        launcher: Launcher,
        found: Offer,
        running: Sequence[dg.RunRecord],
        requests: list[dg.RunRequest],
    ) -> str:
        """Request the runs that a job has room for; or say why it waits although it has room."""
        is_pipeline = self.projects is not None and found.jobid in self.projects.shown
        chunks = 1 if is_pipeline else self.batch
        free = _free_runs(found, len(running), self.runs_per_job, chunks)
        if not free:
            return ""
        ended = launcher.ended(found.jobid)
        if waits := launcher.early(found, [*running, *ended]) or launcher.in_vain(found, ended):
            return waits
        assets = JobAssets.of(self.jobs[found.jobid], context.repository_def)
        requests += [
            launcher.request(found, assets, ended, len(running) + number)
            for number in range(1, free + 1)
        ]
        return ""

    def _line(self, found: Offer, running: int, waits: str) -> str:
        runs = f"{running} run{'s' * (running > 1)} at work" if running else ""
        parts = [offer_line(found, most=self._max_claims), runs, waits]
        return f"{found.jobid}: {', '.join(filter(None, parts))}"


def selection(targets: Iterable[Target]) -> dg.AssetSelection:
    """All assets of some targets."""
    chosen = dg.AssetSelection.assets()
    for target in targets:
        if isinstance(target, dg.AssetsDefinition):
            target = dg.AssetSelection.assets(target)
        chosen = chosen | target
    return chosen


def unreadable(store: Store | None, error: Exception, then: str = "Nothing is launched.") -> str:
    """One line about tables that can't be read; what is no such trouble is raised again."""
    if store is not None and store.db.trouble(error) == "gone":
        store.db.drop()
    known = (DataflowError, *(store.db.failures if store is not None else ()))
    if not isinstance(error, known):
        raise error
    return f"The tables of OpenDataFlow can't be read: {first_line(error)}. {then}"


def _lacks_worker(record: dg.RunRecord) -> bool:
    """Whether a run has been said to be at work for so long that it should have a worker."""
    since = time.time() - (record.start_time or record.create_timestamp.timestamp())
    return record.dagster_run.status == dg.DagsterRunStatus.STARTED and since > WORKER_START_SECONDS


def _free_runs(found: Offer, running: int, runs_per_job: int, batch: int) -> int:
    """How many more runs a job may get."""
    if found.obstacle:
        return 0
    limits = [runs_per_job - running, -(-found.claimable // batch)]
    if found.concurrency is not None and found.free is not None:
        limits += [found.concurrency - running, found.free]
    return max(0, min(limits))


def _report(lines: Sequence[str], idle: Sequence[str]) -> str:
    if idle:
        more = f" and {len(idle) - 5} more" if len(idle) > 5 else ""
        lines = [*lines, f"{NOTHING_CLAIMABLE}: {', '.join(idle[:5])}{more}"]
    return "; ".join(lines) + "." if lines else "There is no job to launch."


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


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
    daily = [
        jobid for jobid in jobs if (plan := catalog.jobs.get(jobid)) is not None and plan.today
    ]
    if not daily:
        return []
    try:
        timezone = dataflow.settings.timezone
    except DataflowError as error:  # in CI there may be no properties file: the sensors will tell
        _log.warning("The time zone of `today` isn't known: %s", first_line(error))
        timezone = None
    zone = zone_name(timezone)
    return [
        _schedule(
            dataflow,
            jobid,
            jobs[jobid],
            translator,
            batch,
            default_status,
            cron(catalog.policies.get(jobid, {}).get("every_minutes"), zone),
            zone or "UTC",
        )
        for jobid in daily
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
