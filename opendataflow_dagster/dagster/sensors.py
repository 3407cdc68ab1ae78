"""The sensors that follow the tables: the grid shows their statuses, ended runs are settled."""

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
"""The statuses of a run that should have a worker. A QUEUED one may wait for long."""

MAX_NAMED_JOBS = 3
"""Jobs that a tick's line names for each status."""

WIPE_HINT = "`odf drift --repair` wipes their assets, and shows anew what is READY"
"""What to do about squares that this Dagster can't take back one by one."""

RUNS_PER_QUERY = 500
"""Runs that one query asks for."""

_renewal_ends: dict[str, float] = {}
"""Database → until when its workers have time to renew their leases, after an outage."""

_lock = threading.Lock()


class Mirrored(NamedTuple):
    """What the reconcile sensor goes by, of all that a code location has of some tables."""

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
    registration: LocationRegistration | None = None,
    outside: OutsideOptions | None = None,
    mirrored: Callable[[dg.RepositoryDefinition | None], Mirrored] | None = None,
) -> dg.SensorDefinition:
    """Mirror what changed in the tables, settle what dead runs left, recover lost claims.

    A tick takes about `seconds` at most, and the next one continues there. To have everything
    compared again, reset the sensor's cursor in the UI, or run `odf drift --repair`.

    Args:
        dataflow: The tables.
        translator: The names and looks of the assets.
        name: What the sensor is called.
        minimum_interval_seconds: How often it looks.
        seconds: How long a tick may take, about.
        default_status: Whether it is on from the start.
        registration: What the code location needs in the tables: what they lack is added, or told.
        outside: What becomes of the runs that show what was executed outside Dagster.
        mirrored: Tells translator, registration and outside by the code location instead.
    """
    dataflow = dataflow or DataflowResource()
    alone = Mirrored(
        translator or DataflowTranslator(), [registration] if registration else [], outside
    )

    @dg.sensor(
        name=name,
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Shows in Dagster's grid what the tables of OpenDataFlow say, and settles "
        "what dead runs left.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        # Here, since runs load the location too, and have no use for Dagster's storage in SQL.
        from .outside import OutsideRuns
        from .reconcile import open_mirror, reconcile

        store = None
        try:
            store = dataflow.patient_store(DATABASE_WAIT_SECONDS)
            here = mirrored(context.repository_def) if mirrored else alone
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
            )
        except Exception as error:
            return dg.SkipReason(_unreadable(store, error))
        context.update_cursor(done.cursor)
        _log_settled(context, settled)
        lines = [*lacking, _summary(done, settled), unread(store), degraded()]
        return dg.SkipReason(" ".join(filter(None, lines)))

    return sensor


def _made_here(
    repository: dg.RepositoryDefinition | None,
) -> dict[dg.AssetKey, str | None] | None:
    """The assets that a code location makes, each with its code version; None: no location."""
    if repository is None:
        return None
    graph = repository.asset_graph
    return {key: graph.get(key).code_version for key in graph.materializable_asset_keys}


def settle(store: Store, instance: dg.DagsterInstance) -> list[Recovered]:
    """Settle the chunks of runs that ended or died, and all other claims whose lease is over."""
    done = list(settle_ended_runs(store, instance))
    # While the database was away, no worker could renew its lease: none of them counts as lost yet.
    with _lock:
        is_renewing = time.monotonic() < _renewal_ends.get(store.db.where, 0.0)
    if not is_renewing:
        done += end_lost_runs(store, instance)
        done += store.recover(who="dagster")
    return done


def _summary(done: "Reconciled", settled: Sequence[Recovered]) -> str:
    """One line about a pass: `12 chunks mirrored: 10 ready, 2 failed (check), grid agrees.`"""
    parts = _mirrored(done)
    if done.keys:
        parts.append(f"{count_of(done.keys, 'partition key')} changed")
    if settled:
        parts.append(f"{count_of(len(settled), 'chunk')} settled")
    if done.runs and not parts:
        parts.append(f"{count_of(done.runs, 'run')} of what was executed outside put right")
    if not (parts or done.more or done.stuck):
        return "The grid agrees with the tables."
    if done.stuck:
        parts.append(f"{count_of(done.stuck, 'square')} can't be taken back ({WIPE_HINT})")
    if done.more or not done.stuck:
        parts.append("the next tick goes on" if done.more else "grid agrees")
    return ", ".join(parts) + "."


def _mirrored(done: "Reconciled") -> list[str]:
    """How many chunks a pass has mirrored: by status, with the jobs of those that aren't READY."""
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
    """One line about tables that can't be read; workers get time to renew their leases after it."""
    line = unreadable(store, error, "Nothing is shown or settled until they can. See `odf doctor`.")
    if store is not None:
        with _lock:
            _renewal_ends[store.db.where] = time.monotonic() + LEASE_RENEWAL_SECONDS
    return line


def settle_ended_runs(store: Store, instance: dg.DagsterInstance) -> list[Recovered]:
    """Settle the chunks of Dagster runs that have ended: HOLD after a cancellation, else RESUBMIT.

    A run that this Dagster doesn't know may be another's: its leases decide.
    """
    settled: list[Recovered] = []
    for run in _runs_here(instance, runs_at_work(store)):
        if run.is_finished:
            settled += _settle_ended(store, run)
    return settled


def end_lost_runs(
    store: Store, instance: dg.DagsterInstance, grace: float = 0.0, *, silence: float | None = None
) -> list[Recovered]:
    """End the Dagster runs whose workers are all lost, and settle what they hold.

    A run that was killed with its code server would stay STARTED for ever. It counts as lost once
    its leases have been over for `grace` seconds; one without any worker, `silence` seconds after
    its last sign. A run that this Dagster doesn't know is another Dagster's: for `silence` seconds
    it is left to that one, which finds it by its workers. Its claims are recovered by their leases.
    """
    settled: list[Recovered] = []
    silence = SILENCE_SECONDS if silence is None else silence
    lost = lost_runs(store, grace)
    # First the runs: if this is killed in between, the next tick finds their claims as those of
    # ended runs.
    for run in _runs_here(instance, lost):
        if not run.is_finished:
            _end(instance, run, "its workers are gone, none has renewed its lease")
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
    """A sensor that settles the chunks of runs that have failed or were canceled.

    The reconcile sensor does so too, and more often. This one does while that is switched off. It
    is no run status sensor: of these, Dagster has one for each status, and tells it of all runs of
    the code location.
    """

    @dg.sensor(
        name="opendataflow_settle",
        minimum_interval_seconds=minimum_interval_seconds,
        default_status=default_status,
        description="Settles the chunks of runs that failed or were canceled, also while "
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
            return dg.SkipReason("No run that has ended holds a chunk.")
        return dg.SkipReason(f"{count_of(len(settled), 'chunk')} of ended runs settled.")

    return sensor


def _log_settled(context: dg.SensorEvaluationContext, settled: Iterable[Recovered]) -> None:
    for chunk in settled:
        context.log.info(f"{chunk.jobid} {chunk.dataid}: settled as {chunk.status}, {chunk.reason}")


def _runs_here(instance: dg.DagsterInstance, runids: Iterable[str]) -> list[dg.DagsterRun]:
    """Those of some runs that Dagster knows; no query if there are none."""
    wanted, found = list(runids), []
    for start in range(0, len(wanted), RUNS_PER_QUERY):
        runs = dg.RunsFilter(run_ids=wanted[start : start + RUNS_PER_QUERY])
        found += instance.get_runs(filters=runs)
    return found


def _settle_ended(store: Store, run: dg.DagsterRun) -> list[Recovered]:
    canceled = run.status == dg.DagsterRunStatus.CANCELED
    failed = run.status == dg.DagsterRunStatus.FAILURE
    how = "failed" if failed else "ended without settling it"
    why = terminated(run.run_id) if canceled else f"run {run.run_id} {how}"
    return _settle_run(store, run.run_id, why, canceled)


def _settle_run(store: Store, runid: str, why: str, canceled: bool) -> list[Recovered]:
    """What was settled; a run whose rows somebody keeps locked doesn't hold up the others."""
    try:
        return settle_run(store, runid, why=why, canceled=canceled)
    except LostRace:
        return []  # its claims are still there: the next tick tries again


def _end(instance: dg.DagsterInstance, run: dg.DagsterRun, why: str) -> None:
    if run.status == dg.DagsterRunStatus.CANCELING:
        instance.report_run_canceled(run, message=f"OpenDataFlow ended this run: {why}.")
    else:
        instance.report_run_failed(run, message=f"OpenDataFlow ended this run: {why}.")


def _runs_without_worker(
    store: Store, instance: dg.DagsterInstance, silence: float
) -> list[dg.DagsterRun]:
    """Runs of the catch-up sensor that Dagster calls started, and that have no worker."""
    before = datetime.fromtimestamp(time.time() - silence, UTC)
    wanted = dg.RunsFilter(
        statuses=LAUNCHED_STATUSES, tags={CATCH_UP_TAG: "true"}, updated_before=before
    )
    found = instance.get_runs(filters=wanted)
    if not found:
        return []
    busy = set(runs_at_work(store))
    return [run for run in found if run.run_id not in busy]
