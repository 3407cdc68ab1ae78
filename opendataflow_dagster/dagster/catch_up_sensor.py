"""Runs for what the tables offer: the sensor that launches them, and what a run is told."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import dagster as dg

from ..errors import DataflowError, WrongUse
from ..store.claimable import MOST, NOTHING, Offer, offer, told
from ..store.runs import runs_at_work
from ..store.store import Store
from ..util.text import first_line
from .pipeline_assets import Projects
from .resources import DataflowResource
from .step import BATCH, CATCH_UP
from .translator import DataflowTranslator

Target = dg.AssetsDefinition | dg.AssetSelection

JOB, OFFER = f"{CATCH_UP}-job", "opendataflow/offer"
"""The tags that tell whose run it is, and what there was to claim when it was launched."""

PATIENCE = 5.0
"""Seconds that a tick waits for a database that went away."""

LONGEST_WAIT = 3600.0
"""Seconds at most between two runs that change nothing."""

SLACK = 30.0
"""Seconds by which a launch may be early, so that a late tick doesn't delay all after it."""

UNHEARD = 60.0
"""Seconds after which a run that should be at work, but has no worker, holds up no other one."""

REMEMBERED = 10
"""Ended runs of a job that are looked at: doubling as often leads to the longest wait."""

ENDED = (
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
)
AT_WORK = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
"""NOT_STARTED isn't: Dagster launches a run that it failed to, when it sees its run key again."""


class Assets(NamedTuple):
    """The assets that run a job, and under which name their partitions are kept."""

    keys: list[dg.AssetKey]
    partitions: str | None

    @classmethod
    def of(cls, target: Target, repository: dg.RepositoryDefinition | None) -> "Assets":
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
            wanted = dg.RunsFilter(statuses=AT_WORK, tags={JOB: list(found)})
            records = self.instance.get_run_records(filters=wanted)
            busy = set(runs_at_work(store)) if any(map(_is_unheard, records)) else set()
            for record in records:
                if not _is_unheard(record) or record.dagster_run.run_id in busy:
                    found[record.dagster_run.tags[JOB]].append(record)
        return found

    def ended(self, jobid: str) -> Sequence[dg.RunRecord]:
        """The last runs of a job that have ended, the newest first."""
        wanted = dg.RunsFilter(statuses=ENDED, tags={JOB: jobid})
        return self.instance.get_run_records(filters=wanted, limit=REMEMBERED)

    def early(self, found: Offer, launched: Sequence[dg.RunRecord]) -> str:
        """How long ago the last launch was, of a job that is launched every so often only."""
        if not (found.every_minutes and launched):
            return ""
        ago = time.time() - max(each.create_timestamp.timestamp() for each in launched)
        if ago >= found.every_minutes * 60 - SLACK:
            return ""
        return f"every {found.every_minutes} minutes, launched {_duration(ago)} ago"

    def in_vain(self, found: Offer, ended: Sequence[dg.RunRecord]) -> str:
        """What a job waits for whose runs change nothing.

        A run that left the first chunk of the queue as it was has done nothing, be it for a broken
        code location or a chunk that can't be claimed: the next one comes after twice the time.
        """
        useless = 0
        for record in ended:
            if record.dagster_run.tags.get(OFFER) != self._offered(found):
                break
            useless += 1
        if not useless:
            return ""
        last = ended[0]
        since = time.time() - (last.end_time or last.update_timestamp.timestamp())
        left = min(LONGEST_WAIT, self.shortest_wait * 2**useless) - since
        if left <= 0:
            return ""
        runs = "last run" if useless == 1 else f"last {useless} runs"
        return (
            f"its {runs} changed nothing ({last.dagster_run.run_id[:8]}: "
            f"{last.dagster_run.status.value}), the next comes in {_duration(left)}"
        )

    def request(
        self, found: Offer, assets: Assets, ended: Sequence[dg.RunRecord], number: int = 1
    ) -> dg.RunRequest:
        """A run that claims what its job may claim.

        The key names the first chunk, that chunk's last change, and the run before: it is another
        one after a RESUBMIT or a killed run, and the same for a second look at the same.
        """
        before = ended[0].dagster_run.run_id if ended else "none"
        key = f"{found.jobid}: {self._offered(found)} after {before}"
        return dg.RunRequest(
            run_key=key if number == 1 else f"{key}, number {number}",
            asset_selection=assets.keys,
            tags={
                CATCH_UP: "true",
                JOB: found.jobid,
                BATCH: str(self.batch),
                OFFER: self._offered(found),
                **self._partition(found, assets),
            },
        )

    def _offered(self, found: Offer) -> str:
        return f"{self._key(found)}@{found.event}"

    def _key(self, found: Offer) -> str:
        return self.translator.partition_key(found.first or "")

    def _partition(self, found: Offer, assets: Assets) -> dict[str, str]:
        """The tags without which Dagster doesn't run partitioned assets.

        It launches a run without a partition, but the step fails before the body when an input is
        partitioned too and has been materialized: Dagster looks up which of its partitions the run
        is about. So the run names one that is there. No event is planned for it and none follows
        from an output: the body logs what it has made.
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
    minimum_interval_seconds: int = 10,
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
    most = max(MOST, runs_per_job * batch)

    def found_by(store: Store, jobid: str) -> Offer:
        found = offer(store, jobid, most=most)
        return found if projects is None else projects.offered(store, found)

    @dg.sensor(
        name=name,
        asset_selection=selection(jobs.values()),
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Launches runs of the jobs that may claim chunks, within their dials.",
    )
    def catch_up(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        launcher = Launcher(
            context.instance,
            translator=translator,
            batch=batch,
            shortest_wait=minimum_interval_seconds,
        )
        store = None
        try:
            store = dataflow.patient_store(PATIENCE)
            if refusal := store.db.insist(lambda: store.unclaimable(now=True))[0]:
                return dg.SkipReason(f"{refusal} Nothing is launched.")
            if projects is not None:
                for jobid, dataid in projects.begin_due_runs(store):
                    context.log.info(f"{jobid}: a run is due, {dataid}")
            offers = [found_by(store, jobid) for jobid in jobs]
            at_work = launcher.at_work(jobs, store)
        except Exception as error:
            return dg.SkipReason(away(store, error))
        requests: list[dg.RunRequest] = []
        idle, lines = [], []
        for found in offers:
            running = at_work[found.jobid]
            size = 1 if projects is not None and found.jobid in projects.shown else batch
            room = _room(found, len(running), runs_per_job, size)
            ended, waits = launcher.ended(found.jobid) if room else [], ""
            if room:
                waits = launcher.early(found, [*running, *ended]) or launcher.in_vain(found, ended)
            if room and not waits:
                assets = Assets.of(jobs[found.jobid], context.repository_def)
                requests += [
                    launcher.request(found, assets, ended, len(running) + number)
                    for number in range(1, room + 1)
                ]
            if found.obstacle == NOTHING and not running:
                idle.append(found.jobid)
            else:
                runs = f"{len(running)} run{'s' * (len(running) > 1)} at work" if running else ""
                said = [told(found, most=most), runs, waits]
                lines.append(f"{found.jobid}: {', '.join(filter(None, said))}")
        report = _report(lines, idle)
        if not requests:
            return dg.SkipReason(report)
        context.log.info(report)
        return dg.SensorResult(run_requests=requests)

    return catch_up


def selection(targets: Iterable[Target]) -> dg.AssetSelection:
    """All assets of some targets."""
    chosen = dg.AssetSelection.assets()
    for target in targets:
        if isinstance(target, dg.AssetsDefinition):
            target = dg.AssetSelection.assets(target)
        chosen = chosen | target
    return chosen


def away(store: Store | None, error: Exception, then: str = "Nothing is launched.") -> str:
    """One line about tables that can't be read; what is no such trouble is raised again."""
    if store is not None and store.db.trouble(error) == "gone":
        store.db.drop()
    known = (DataflowError, *(store.db.failures if store is not None else ()))
    if not isinstance(error, known):
        raise error
    return f"The tables of OpenDataFlow can't be read: {first_line(error)}. {then}"


def _is_unheard(record: dg.RunRecord) -> bool:
    """Whether a run has been said to be at work for so long that it should have a worker."""
    since = time.time() - (record.start_time or record.create_timestamp.timestamp())
    return record.dagster_run.status == dg.DagsterRunStatus.STARTED and since > UNHEARD


def _room(found: Offer, running: int, runs_per_job: int, batch: int) -> int:
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
        lines = [*lines, f"{NOTHING}: {', '.join(idle[:5])}{more}"]
    return "; ".join(lines) + "." if lines else "There is no job to launch."


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
