"""The sensors that follow the tables: they mirror statuses to the grid and settle ended runs."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple

import dagster as dg

from ..errors import LostRace
from ..model import READY, Recovered
from ..store.claims import lost_runs, runs_at_work, settle_run
from ..store.history import unread
from ..store.store import Store
from ..util.text import count_of, first_of, printable
from .events import OutsideOptions
from .internals import degraded
from .launch import DATABASE_WAIT_SECONDS, unreadable
from .resources import DataflowResource, LocationRegistration
from .step import CATCH_UP_TAG, LEASE_RENEWAL_SECONDS, terminated
from .translator import DataflowTranslator

if TYPE_CHECKING:
    from .reconcile import Reconciled


SILENCE_SECONDS = 600.0
"""Seconds without a worker after which a run that Dagster calls started counts as dead."""

LAUNCHED_STATUSES = (
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)
"""The statuses of a run that should have a worker. A QUEUED run may wait for long."""

MAX_NAMED_JOBS = 3
"""Jobs that a tick's line names for each status."""

WIPE_HINT = "`odf drift --repair` wipes their assets, and shows their READY chunks again"
"""What to do about squares that this Dagster can't correct one by one."""

RUNS_PER_QUERY = 500
"""Runs per query."""

_renewal_ends: dict[str, float] = {}
"""Database → until when, after an outage, its workers have time to renew their leases."""

_lock = threading.Lock()


class Mirrored(NamedTuple):
    """What the reconcile sensor uses of all that a code location has for some tables."""

    translator: DataflowTranslator
    registrations: Sequence[LocationRegistration] = ()
    outside: OutsideOptions | None = None


def reconcile_sensor(
    dataflow: DataflowResource | None = None,
    *,
    translator: DataflowTranslator | None = None,
    name: str = "opendataflow_reconcile",
    minimum_interval_seconds: int = 10,
    seconds: float = 15.0,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
    outside: OutsideOptions | None = None,
    mirrored: Callable[[dg.RepositoryDefinition | None], Mirrored] | None = None,
) -> dg.SensorDefinition:
    """Mirror changes of the tables in Dagster, settle chunks of dead runs, recover lost claims.

    A tick takes about `seconds`; the next one continues where it stopped. To compare everything
    again, reset the sensor's cursor in the UI, or run `odf drift --repair`.

    Args:
        dataflow: The tables.
        translator: Names datasets, chunks and jobs in Dagster.
        name: The sensor's name.
        minimum_interval_seconds: Seconds between two ticks.
        seconds: About how long a tick may take.
        default_status: Whether the sensor is on from the start.
        outside: What happens to the runs that show work done outside Dagster.
        mirrored: Finds translator, outside and what to register by the code location instead.

    Example:
        defs = dg.Definitions(assets=assets, sensors=[reconcile_sensor(dataflow)])
    """
    dataflow = dataflow or DataflowResource()
    alone = Mirrored(translator or DataflowTranslator(), outside=outside)

    @dg.sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Mirrors the tables of OpenDataFlow in Dagster's grid, and settles the chunks "
        "of dead runs.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        return _reconcile(context, dataflow, mirrored or (lambda _: alone), seconds)

    return sensor


def _reconcile(
    context: dg.SensorEvaluationContext,
    dataflow: DataflowResource,
    mirrored: Callable[[dg.RepositoryDefinition | None], Mirrored],
    seconds: float,
) -> dg.SkipReason:
    """One tick: what it did; the next one continues from the cursor that it leaves."""
    # Imported here: runs load the location too, and don't need Dagster's SQL storage.
    from .outside import OutsideRuns
    from .reconcile import open_mirror, reconcile

    store = None
    try:
        store = dataflow.patient_store(DATABASE_WAIT_SECONDS)
        here = mirrored(context.repository_def)
        lacking = [part.bring_up(dataflow, store) for part in here.registrations]
        settled = settle(store, context.instance)
        mirror = open_mirror(context.instance)
        done = reconcile(
            store,
            mirror,
            here.translator,
            context.cursor,
            seconds=seconds,
            made_here=_made_here(context.repository_def),
            runs=OutsideRuns(store, mirror, options=here.outside),
            partitions_here=_partitions_here(context.repository_def),
        )
    except Exception as error:
        return dg.SkipReason(_unreadable(store, error))
    context.update_cursor(done.cursor)
    for note in done.notes:
        context.log.warning(note)
    _log_settled(context, settled)
    lines = [*lacking, *done.standing, *done.notes, _summary(done, settled)]
    lines += [unread(store), degraded()]
    return dg.SkipReason(" ".join(filter(None, lines)))


def _made_here(
    repository: dg.RepositoryDefinition | None,
) -> dict[dg.AssetKey, str | None] | None:
    """The assets that a code location produces, each with its code version; None: no location."""
    if repository is None:
        return None
    graph = repository.asset_graph
    return {key: graph.get(key).code_version for key in graph.materializable_asset_keys}


def _partitions_here(
    repository: dg.RepositoryDefinition | None,
) -> dict[dg.AssetKey, dg.PartitionsDefinition]:
    """The partitions that assets of a code location have."""
    if repository is None:
        return {}
    graph = repository.asset_graph
    found = {key: graph.get(key).partitions_def for key in graph.get_all_asset_keys()}
    return {key: definition for key, definition in found.items() if definition}


def settle(store: Store, instance: dg.DagsterInstance) -> list[Recovered]:
    """Settle the chunks of runs that ended or died, and all other claims with an expired lease."""
    done = list(settle_ended_runs(store, instance))
    # While the database was away, no worker could renew its lease: none counts as lost yet.
    with _lock:
        is_renewing = time.monotonic() < _renewal_ends.get(store.db.where, 0.0)
    if not is_renewing:
        done += end_lost_runs(store, instance)
        done += store.recover(who="dagster")
    return done


def _summary(done: "Reconciled", settled: Sequence[Recovered]) -> str:
    """A pass in one line: `12 chunks mirrored: 10 ready, 2 failed (check), grid agrees.`"""
    parts = _mirrored(done)
    if done.keys:
        parts.append(f"{count_of(done.keys, 'partition key')} changed")
    if settled:
        parts.append(f"{count_of(len(settled), 'chunk')} settled")
    if done.runs and not parts:
        parts.append(f"{count_of(done.runs, 'run')} from outside Dagster corrected")
    if not (parts or done.more or done.stuck):
        return "The grid agrees with the tables."
    if done.stuck:
        parts.append(f"{count_of(done.stuck, 'square')} can't be corrected ({WIPE_HINT})")
    if done.more or not done.stuck:
        parts.append("the next tick continues" if done.more else "grid agrees")
    return ", ".join(parts) + "."


def _mirrored(done: "Reconciled") -> list[str]:
    """Count the chunks that a pass mirrored, by status, and name the jobs of those not READY."""
    counts, jobs = Counter({"missing": done.cleared}), dict[str, list[str]]()
    for (status, jobid), count in sorted(done.chunks.items()):
        word = status.lower()
        counts[word] += count
        jobs.setdefault(word, []).append(printable(jobid))
    if not counts.total():
        return []
    parts = [
        f"{count} {word}" + (f" ({', '.join(first_of(names, MAX_NAMED_JOBS))})" if names else "")
        for word, count in sorted(counts.items(), key=lambda item: item[0] != READY.lower())
        if count
        for names in [list(filter(None, jobs.get(word, ())))]
    ]
    return [f"{count_of(counts.total(), 'chunk')} mirrored: {parts[0]}", *parts[1:]]


def _unreadable(store: Store | None, error: Exception) -> str:
    """Report tables that can't be read, in one line; after it, workers get time to renew leases."""
    line = unreadable(store, error, "Nothing is mirrored or settled until then. See `odf doctor`.")
    if store is not None:
        with _lock:
            _renewal_ends[store.db.where] = time.monotonic() + LEASE_RENEWAL_SECONDS
    return line


def settle_ended_runs(store: Store, instance: dg.DagsterInstance) -> list[Recovered]:
    """Settle the chunks of Dagster runs that have ended: HOLD after a cancellation, else RESUBMIT.

    A run that this Dagster doesn't know may be another Dagster's: its leases decide.
    """
    settled: list[Recovered] = []
    for run in _runs_here(instance, runs_at_work(store)):
        if run.is_finished:
            settled += _settle_ended(store, run)
    return settled


def end_lost_runs(
    store: Store, instance: dg.DagsterInstance, grace: float = 0.0, *, silence: float | None = None
) -> list[Recovered]:
    """End the Dagster runs whose workers are all lost, and settle their chunks.

    A run that was killed with its code server would stay STARTED forever. It counts as lost once
    its leases have been expired for `grace` seconds, or if it has no worker at all, `silence`
    seconds after its last sign. A run that this Dagster doesn't know belongs to another Dagster,
    which for `silence` seconds may end it itself. After that, its claims are recovered by their
    leases.
    """
    settled: list[Recovered] = []
    silence = SILENCE_SECONDS if silence is None else silence
    lost = lost_runs(store, grace)
    # Runs first: if this is killed in between, the next tick settles their claims as those of
    # ended runs.
    for run in _runs_here(instance, lost):
        if not run.is_finished:
            _end(instance, run, "its workers are gone: none has renewed its lease")
    known = {run.run_id: run for run in _runs_here(instance, lost)}
    strangers = set(lost) - set(known)
    forgotten = strangers & set(lost_runs(store, max(grace, silence)) if strangers else ())
    for runid in [runid for runid in lost if runid in known or runid in forgotten]:
        canceled = runid in known and known[runid].status == dg.DagsterRunStatus.CANCELED
        why = terminated(runid) if canceled else f"the workers of run {runid} are gone"
        settled += _settle_run(store, runid, why, canceled)
    for run in _runs_without_worker(store, instance, silence):
        _end(instance, run, "it has had no worker for too long")
    return settled


def settlement_sensor(
    dataflow: DataflowResource,
    *,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
    minimum_interval_seconds: int = 30,
) -> dg.SensorDefinition:
    """Settle the chunks of runs that failed or were canceled.

    The reconcile sensor does this too, and more often; this one works while that one is off. It is
    no run status sensor: Dagster would need one for each status, and would call each for all runs
    of the code location.
    """

    @dg.sensor(
        name="opendataflow_settle",
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Settles the chunks of runs that failed or were canceled, even while "
        "the sensor that mirrors the tables is off.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        store = None
        try:
            store = dataflow.patient_store(DATABASE_WAIT_SECONDS)
            settled = settle_ended_runs(store, context.instance)
        except Exception as error:
            return dg.SkipReason(unreadable(store, error, "Nothing is settled."))
        _log_settled(context, settled)
        if not settled:
            return dg.SkipReason("No ended run holds a chunk.")
        return dg.SkipReason(f"{count_of(len(settled), 'chunk')} of ended runs settled.")

    return sensor


def _log_settled(context: dg.SensorEvaluationContext, settled: Iterable[Recovered]) -> None:
    for chunk in settled:
        context.log.info(f"{chunk.jobid} {chunk.dataid}: settled as {chunk.status}, {chunk.reason}")


def _runs_here(instance: dg.DagsterInstance, runids: Iterable[str]) -> list[dg.DagsterRun]:
    """Return the runs that Dagster knows; no query for an empty list."""
    wanted, found = list(runids), []
    for start in range(0, len(wanted), RUNS_PER_QUERY):
        runs = dg.RunsFilter(run_ids=wanted[start : start + RUNS_PER_QUERY])
        found += instance.get_runs(filters=runs)
    return found


def _settle_ended(store: Store, run: dg.DagsterRun) -> list[Recovered]:
    canceled = run.status == dg.DagsterRunStatus.CANCELED
    failed = run.status == dg.DagsterRunStatus.FAILURE
    how = "failed" if failed else "ended without settling its chunks"
    why = terminated(run.run_id) if canceled else f"run {run.run_id} {how}"
    return _settle_run(store, run.run_id, why, canceled)


def _settle_run(store: Store, runid: str, why: str, canceled: bool) -> list[Recovered]:
    """Settle a run's chunks; a run whose rows are locked doesn't hold up the others."""
    try:
        return settle_run(store, runid, why=why, canceled=canceled)
    except LostRace:
        return []  # its claims remain: the next tick tries again


def _end(instance: dg.DagsterInstance, run: dg.DagsterRun, why: str) -> None:
    if run.status == dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, message=f"OpenDataFlow ended this run: {why}.")
    else:
        instance.report_run_failed(run, message=f"OpenDataFlow ended this run: {why}.")


def _runs_without_worker(
    store: Store, instance: dg.DagsterInstance, silence: float
) -> list[dg.DagsterRun]:
    """Runs of the catch-up sensor that Dagster calls started and that have no worker."""
    before = datetime.fromtimestamp(time.time() - silence, UTC)
    wanted = dg.RunsFilter(
        statuses=LAUNCHED_STATUSES, tags={CATCH_UP_TAG: "true"}, updated_before=before
    )
    found = instance.get_runs(filters=wanted)
    if not found:
        return []
    busy = set(runs_at_work(store))
    return [run for run in found if run.run_id not in busy]
