"""What launches runs: a sensor for the chunks that jobs may claim, schedules for `today`."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import dagster as dg

from ..errors import DataflowError, WrongUse
from ..store.catalog import Catalog, read_catalog
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
from .translator import DataflowTranslator, is_kept, partition_keys

_log = logging.getLogger("opendataflow_dagster")

Target = dg.AssetsDefinition | dg.AssetSelection

JOB_TAG, OFFER_TAG = f"{CATCH_UP_TAG}-job", "opendataflow/offer"
"""The tags that name a run's job, and what could be claimed when it was launched."""

DATABASE_WAIT_SECONDS = 5.0
"""Seconds that a tick waits for a database that went away."""

CATCH_UP_SECONDS = 10
"""Seconds between two checks for chunks to claim."""

MAX_WAIT_SECONDS = 3600.0
"""The longest wait, in seconds, between two runs that change nothing."""

EARLY_LAUNCH_SECONDS = 30.0
"""Seconds by which a launch may be early, so that a late tick doesn't delay all later ones."""

WORKER_START_SECONDS = 60.0
"""Seconds after which a started run without a worker no longer holds up the next run."""

MAX_ENDED_RUNS = 10
"""Ended runs of a job to look at: a wait doubled that often is the longest one."""

CRON_PERIODS_MINUTES = [
    *(minutes for minutes in range(1, 61) if 60 % minutes == 0),
    *(60 * hours for hours in range(2, 25) if 24 % hours == 0),
]
"""Periods that a cron expression can have: it starts over with each hour and each day."""

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
"""NOT_STARTED is missing on purpose: a run that Dagster failed to launch must not hold up the
next one, and Dagster launches it when the sensor requests its run key again."""


class JobAssets(NamedTuple):
    """The assets that run a job, and their partitions."""

    keys: list[dg.AssetKey]
    partitions: dg.PartitionsDefinition | None

    @classmethod
    def of(cls, target: Target, repository: dg.RepositoryDefinition | None) -> "JobAssets":
        """Return the assets of a target; a selection is resolved within the code location."""
        if isinstance(target, dg.AssetsDefinition):
            return cls(sorted(target.keys), target.partitions_def)
        if repository is None:
            raise WrongUse("A selection of assets needs the definitions that it selects from.")
        keys = sorted(target.resolve(repository.asset_graph))
        return cls(keys, repository.assets_defs_by_key[keys[0]].partitions_def if keys else None)


class Launcher:
    """Our runs, as Dagster knows them, and the requests for more of them."""

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
        """Return the runs of jobs that haven't ended, by job.

        A run that was killed before it began stays "started" until a sensor ends it. It mustn't
        delay the next launch. If it is alive after all, the claims decide.
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
        """Return the last ended runs of a job, the newest first."""
        wanted = dg.RunsFilter(statuses=ENDED_STATUSES, tags={JOB_TAG: jobid})
        return self.instance.get_run_records(filters=wanted, limit=MAX_ENDED_RUNS)

    def early(self, found: Offer, launched: Sequence[dg.RunRecord]) -> str:
        """Return how long ago a job with `every_minutes` was launched, if it isn't due; else ""."""
        if not (found.every_minutes and launched):
            return ""
        ago = time.time() - max(record.create_timestamp.timestamp() for record in launched)
        if ago >= found.every_minutes * 60 - EARLY_LAUNCH_SECONDS:
            return ""
        return f"every {found.every_minutes} minutes, launched {_duration(ago)} ago"

    def in_vain(self, found: Offer, ended: Sequence[dg.RunRecord]) -> str:
        """Return what a job waits for if its last runs changed nothing; else "".

        A run that left the first chunk of the queue as it was has done nothing, for example because
        of a broken code location or a chunk that can't be claimed. The wait doubles after each such
        run.
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
        self,
        store: Store,
        found: Offer,
        assets: JobAssets,
        ended: Sequence[dg.RunRecord],
        number: int = 1,
    ) -> dg.RunRequest:
        """Return a request for a run that claims what its job may claim.

        Dagster launches a run key only once. So the key names the first chunk, that chunk's last
        change and the run before: two ticks that see the same state request one run, and after a
        RESUBMIT or a killed run the key differs. A key of the chunk alone would never launch a
        resubmitted chunk.
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
                **self._partition(store, found, assets),
            },
        )

    def _offered(self, found: Offer) -> str:
        return f"{self._key(found)}@{found.event}"

    def _key(self, found: Offer) -> str:
        return self.translator.partition_key(found.first or "")

    def _partition(self, store: Store, found: Offer, assets: JobAssets) -> dict[str, str]:
        """Return the tags without which Dagster doesn't run partitioned assets.

        It launches a run without a partition, but the step fails before its body when an input is
        partitioned too and has been materialized: Dagster looks up which of the input's partitions
        the run needs. So the run names the first chunk of the queue. It may claim other chunks
        instead; `defer_asset_events` keeps Dagster from planning a materialization of the named
        one, which would turn that partition red when this run fails for another chunk. The step
        logs an event for each chunk that it produces.
        """
        definition = assets.partitions
        key = self._partition_key(store, found, definition) if definition else None
        if key is None:
            return {}
        return {
            "dagster/asset_partition_range_start": key,
            "dagster/asset_partition_range_end": key,
            "dagster/defer_asset_events": "true",
        }

    def _partition_key(
        self, store: Store, found: Offer, definition: dg.PartitionsDefinition
    ) -> str | None:
        """Return the first chunk's partition; if the project defines none for it, the last one."""
        key = self._key(found)
        if not (isinstance(definition, dg.DynamicPartitionsDefinition) and definition.name):
            there = key in partition_keys(definition)
            return key if there else definition.get_last_partition_key()
        name = definition.name
        if self.instance.has_dynamic_partition(name, key):
            return key
        domains = set(read_catalog(store).domains.values())
        if not any(is_kept(self.translator, domain, definition) for domain in domains):
            return next(iter(self.instance.get_dynamic_partitions(name)[-1:]), None)
        try:
            self.instance.add_dynamic_partitions(name, [key])
        except Exception:  # if two processes add the same key, one of them fails
            if not self.instance.has_dynamic_partition(name, key):
                raise
        return key


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

    `odf policy` sets the dials: how many chunks a job may claim at a time, how often it is
    launched, and until when it is paused.

    Args:
        dataflow: The tables.
        jobs: By job, the assets that run it.
        translator: Names datasets, chunks and jobs in Dagster.
        name: The sensor's name.
        runs_per_job: How many runs a job has at a time.
        batch: How many chunks a run claims.
        minimum_interval_seconds: Seconds between two ticks.
        default_status: Whether the sensor is on from the start.
        projects: Projects with pipelines among the jobs. A run of a pipeline produces one chunk. A
            pipeline without upstream datasets starts a run whenever `every_minutes` says so.

    Example:
        sensor = catch_up_sensor(dataflow, {"check": check_assets})
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
    """Return the sensor that launches runs of the assets that it finds in its code location."""

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
    """One evaluation of the catch-up sensor: read what can be claimed, and request runs."""

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
            # The daemon kills a tick that waits for minutes, and the UI shows an error.
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
                waits = f"`odf work` is working on {in_hand}"
            else:
                waits = self._request(context, store, launcher, found, running, requests)
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
        """Return the most chunks to count: no more than all runs of a job could claim now."""
        return max(MAX_COUNTED_CHUNKS, self.runs_per_job * self.batch)

    def _offer(self, store: Store, jobid: str) -> Offer:
        found = offer(store, jobid, most=self._max_claims)
        return found if self.projects is None else self.projects.offered(store, found)

    def _request(
        self,
        context: dg.SensorEvaluationContext,
        store: Store,
        launcher: Launcher,
        found: Offer,
        running: Sequence[dg.RunRecord],
        requests: list[dg.RunRequest],
    ) -> str:
        """Request the runs that a job has room for, or say why it waits although it has room."""
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
            launcher.request(store, found, assets, ended, len(running) + number)
            for number in range(1, free + 1)
        ]
        return ""

    def _line(self, found: Offer, running: int, waits: str) -> str:
        runs = f"{running} run{'s' * (running > 1)} at work" if running else ""
        parts = [offer_line(found, most=self._max_claims), runs, waits]
        return f"{found.jobid}: {', '.join(filter(None, parts))}"


def selection(targets: Iterable[Target]) -> dg.AssetSelection:
    """Return all assets of some targets."""
    chosen = dg.AssetSelection.assets()
    for target in targets:
        if isinstance(target, dg.AssetsDefinition):
            target = dg.AssetSelection.assets(target)
        chosen = chosen | target
    return chosen


def unreadable(store: Store | None, error: Exception, then: str = "Nothing is launched.") -> str:
    """Describe tables that can't be read, in one line; any other error is raised again."""
    if store is not None and store.db.trouble(error) == "gone":
        store.db.drop()
    known = (DataflowError, *(store.db.failures if store is not None else ()))
    if not isinstance(error, known):
        raise error
    return f"The tables of OpenDataFlow can't be read: {first_line(error)}. {then}"


def _lacks_worker(record: dg.RunRecord) -> bool:
    """Whether a run has been started for so long that it should have a worker."""
    since = time.time() - (record.start_time or record.create_timestamp.timestamp())
    return record.dagster_run.status == dg.DagsterRunStatus.STARTED and since > WORKER_START_SECONDS


def _free_runs(found: Offer, running: int, runs_per_job: int, batch: int) -> int:
    """Return how many more runs a job may get."""
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
    """Return a schedule for each job that reads `today`: daily, or by its dial `every_minutes`.

    If a job also waits for inputs that become READY later in the day, the catch-up sensor launches
    it, or its `every_minutes` does.

    Args:
        dataflow: The tables.
        jobs: By job, the assets that run it.
        catalog: The registered datasets and jobs.
        translator: Names datasets, chunks and jobs in Dagster.
        batch: How many chunks a run claims.
        default_status: Whether the schedules are on from the start.

    Example:
        schedules = today_schedules(dataflow, {"check": check_assets}, catalog=dataflow.catalog())
    """
    translator = translator or DataflowTranslator()
    daily = [
        jobid for jobid in jobs if (plan := catalog.jobs.get(jobid)) is not None and plan.today
    ]
    if not daily:
        return []
    try:
        timezone = dataflow.settings.timezone
    except DataflowError as error:  # in CI there may be no properties file: the sensors report it
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
    """Return when to check: just after midnight, or as often as needed to be exact to the minute.

    If it isn't known when the day begins, check every hour.
    """
    minutes = every_minutes or (1440 if zone else 60)
    period = max(period for period in CRON_PERIODS_MINUTES if minutes % period == 0)
    if period < 60:
        return f"*/{period} * * * *"
    # Not on the hour: the database's clock may still say yesterday.
    hours = period // 60
    return f"1 {'0' if hours == 24 else f'*/{hours}'} * * *"


def zone_name(configured: str | None) -> str | None:
    """Return the time zone in which days begin: the configured one, or the machine's."""
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
        return launcher.request(store, found, assets, ended)

    return today
