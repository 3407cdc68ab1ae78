"""How Dagster stores runs and their logs, for runs that it never launched: see `outside.py`.

The internals of Dagster used here and in `grid.py` are listed in `internals.py`.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache, cached_property
from typing import Any, NamedTuple

import dagster as dg
import sqlalchemy as sql
from dagster._core.storage.event_log.schema import SqlEventLogStorageTable
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._core.storage.runs.schema import RunsTable, RunTagsTable
from dagster._serdes import deserialize_value, serialize_value
from sqlalchemy.dialects import postgresql, sqlite

from . import internals
from .grid import NO_RUN, Mirror, insert_events
from .public_grid import FINISHED_STATUSES, STEP_KEY, in_batches

_EVENTS = SqlEventLogStorageTable.c
_MATERIALIZED = dg.DagsterEventType.ASSET_MATERIALIZATION.value


RUN_STARTED = "PIPELINE_START"
RUN_ENDS = {
    "PIPELINE_SUCCESS": "succeeded",
    "PIPELINE_FAILURE": "failed",
    "PIPELINE_CANCELED": "left nothing",
}
"""The ends of a run, by which its page draws when its step was at work."""


class ShownRun(NamedTuple):
    """A run to be stored, and the log that its page shows."""

    run: dg.DagsterRun
    began: float
    ended: float | None
    """When it ended, if it has."""
    lines: list[tuple[float, int, str]]
    """Time, level and text of each line."""
    error: str
    """Why it failed; "": it succeeded, or is at work."""


class RunStorage:
    """Our runs in one Dagster instance."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror

    def put(self, shown: Iterable[ShownRun]) -> None:
        """Store runs with the given statuses and times, and write their logs."""
        # In one order, so that two processes don't wait for each other's locks.
        in_order = sorted(shown, key=lambda each: each.run.run_id)
        for some in in_batches(in_order):
            self._put(some)
            self._tell(some)

    def _put(self, shown: Sequence[ShownRun]) -> None:
        """Store runs in one transaction: Dagster's own call takes ten connections for each."""
        rows = {each.run.run_id: _row(each) for each in shown}
        tags = {each.run.run_id: each.run.tags for each in shown}
        with self.mirror.runs.connect() as db:
            if not db.in_transaction():  # on PostgreSQL, each statement would commit by itself
                db = db.execution_options(isolation_level="READ COMMITTED")
            with nullcontext() if db.in_transaction() else db.begin():
                kind = postgresql if db.dialect.name == "postgresql" else sqlite
                added = kind.insert(RunsTable).values(list(rows.values())).on_conflict_do_nothing()
                new = set(db.execute(added.returning(RunsTable.c.run_id)).scalars())
                told = [
                    {"run_id": run_id, "key": key, "value": value}
                    for run_id in new
                    for key, value in tags[run_id].items()
                ]
                if told:
                    db.execute(RunTagsTable.insert(), told)
                for run_id in rows.keys() - new:
                    there = RunsTable.update().where(RunsTable.c.run_id == run_id)
                    db.execute(there.values(rows[run_id]))

    def ended(self, tag: str) -> list[tuple[str, float | None]]:
        """Return the ended runs with a tag, and when they ended, the newest first."""
        runs, tags = RunsTable.c, RunTagsTable.c
        query = (
            sql.select(runs.run_id, runs.end_time)
            .join(RunTagsTable, sql.and_(tags.run_id == runs.run_id, tags.key == tag))
            .where(runs.status.in_([status.value for status in FINISHED_STATUSES]))
            .order_by(runs.end_time.desc())
        )
        with self.mirror.runs.connect() as db:
            return [(row[0], row[1]) for row in db.execute(query)]

    def disown(self, run_id: str) -> None:
        """Detach materializations from a run before it is deleted, so that they stay."""
        theirs = sql.and_(_EVENTS.run_id == run_id, _EVENTS.dagster_event_type == _MATERIALIZED)
        with self.mirror.events.index_transaction() as db:
            rows = db.execute(sql.select(_EVENTS.id, _EVENTS.event).where(theirs)).fetchall()
            for number, text in rows:
                entry = deserialize_value(text, dg.EventLogEntry)._replace(
                    run_id=NO_RUN, job_name=NO_RUN
                )
                db.execute(
                    SqlEventLogStorageTable.update()
                    .where(_EVENTS.id == number)
                    .values(run_id=NO_RUN, event=serialize_value(entry))
                )

    @cached_property
    def snapshots(self) -> tuple[str, str] | tuple[None, None]:
        """Return the one-step plan that the pages of all these runs show."""
        if internals.flaws(internals.PAGES):
            return None, None
        from dagster._core.snap.execution_plan_snapshot import create_execution_plan_snapshot_id

        runs, (job, plan) = self.mirror.runs, _snapshots()
        if not runs.has_job_snapshot(job.snapshot_id):
            runs.add_job_snapshot(job)
        plan_id = create_execution_plan_snapshot_id(plan)
        if not runs.has_execution_plan_snapshot(plan_id):
            runs.add_execution_plan_snapshot(plan)
        return job.snapshot_id, plan_id

    def _tell(self, shown: Sequence[ShownRun]) -> None:
        """Rewrite the logs of runs, each in one transaction; repeating this changes nothing."""
        events, kind = self.mirror.events, _EVENTS.dagster_event_type
        on_sqlite = isinstance(events, SqliteEventLogStorage)  # each log is a file of its own
        for some in [[each] for each in shown] if on_sqlite else [shown]:
            entries = [entry for each in some for entry in _log(each)]
            old = sql.and_(
                _EVENTS.run_id.in_([each.run.run_id for each in some]),
                _EVENTS.step_key == STEP_KEY,
                sql.or_(kind.is_(None), kind.like("STEP_%")),
            )
            log = events.run_connection(some[0].run.run_id) if on_sqlite else None
            with log or events.index_transaction() as db:
                db.execute(SqlEventLogStorageTable.delete().where(old))
                for batch in in_batches(entries):
                    insert_events(db, batch)

    def alert(self, run: dg.DagsterRun, at: float, message: str, error: str) -> None:
        """Notify Dagster's run failure sensors."""
        from dagster._core.events import JobFailureData, RunFailureReason

        data = JobFailureData(_error(error), RunFailureReason.UNKNOWN)
        kind = dg.DagsterEventType.RUN_FAILURE.value
        event = dg.DagsterEvent(
            kind, run.job_name, step_key=STEP_KEY, event_specific_data=data, message=message
        )
        self.mirror.events.store_event(_entry(run, event, at))


def _row(shown: ShownRun) -> dict[str, Any]:
    run = shown.run
    return {
        "run_id": run.run_id,
        "pipeline_name": run.job_name,
        "snapshot_id": run.job_snapshot_id,
        "status": run.status.value,
        "run_body": serialize_value(run),
        "start_time": shown.began,
        "end_time": shown.ended,
    }


def _log(shown: ShownRun) -> list[dg.EventLogEntry]:
    """Return what a run's page shows, in the order of time."""
    entries = [_line(shown.run, *line) for line in shown.lines]
    if not internals.flaws(internals.PAGES):
        start, *others = _steps(shown.run, shown.began, shown.ended, shown.error)
        entries = [start, *entries, *others]
    return sorted(entries, key=lambda entry: entry.timestamp)


def _line(run: dg.DagsterRun, at: float, level: int, text: str) -> dg.EventLogEntry:
    return dg.EventLogEntry(
        error_info=None,
        level=level,
        user_message=text,
        run_id=run.run_id,
        timestamp=at,
        step_key=STEP_KEY,
        job_name=run.job_name,
        dagster_event=None,
    )


def _steps(
    run: dg.DagsterRun, began: float, ended: float | None, error: str
) -> Iterable[dg.EventLogEntry]:
    """Return the start and the end of the run and of its single step."""
    from dagster._core.execution.plan.objects import StepFailureData, StepSuccessData

    def entry(kind: str, at: float, data: Any = None) -> dg.EventLogEntry:
        message = f"{run.job_name}: {words[kind]} outside Dagster" if kind in words else None
        event = dg.DagsterEvent(
            kind, run.job_name, step_key=STEP_KEY, event_specific_data=data, message=message
        )
        return _entry(run, event, at)

    words = {RUN_STARTED: "began", **RUN_ENDS}
    yield entry(RUN_STARTED, began)
    yield entry("STEP_START", began)
    if ended is not None and error:
        data = StepFailureData(error=_error(error), user_failure_data=None)
        yield entry("STEP_FAILURE", ended, data)
    elif ended is not None:
        data = StepSuccessData(duration_ms=(ended - began) * 1000)
        yield entry("STEP_SUCCESS", ended, data)
    if ended is not None:
        yield entry(f"PIPELINE_{run.status.value}", ended)


def _error(text: str) -> Any:
    from dagster_shared.error import SerializableErrorInfo

    return SerializableErrorInfo(f"{text}\n", [], "Outside")


def _entry(run: dg.DagsterRun, event: dg.DagsterEvent, at: float) -> dg.EventLogEntry:
    failed = event.event_type_value.endswith("FAILURE")
    return dg.EventLogEntry(
        error_info=None,
        level=logging.ERROR if failed else logging.DEBUG,
        user_message="",
        run_id=run.run_id,
        timestamp=at,
        step_key=STEP_KEY,
        job_name=run.job_name,
        dagster_event=event,
    )


@cache
def _snapshots() -> tuple[Any, Any]:
    from dagster._core.execution.api import create_execution_plan
    from dagster._core.snap.execution_plan_snapshot import snapshot_from_execution_plan

    @dg.op(name=STEP_KEY, description="Executed outside Dagster; this step only shows it.")
    def work() -> None: ...

    @dg.job(name="outside")
    def outside() -> None:
        work()

    job = outside.get_job_snapshot()
    return job, snapshot_from_execution_plan(create_execution_plan(outside), job.snapshot_id)
