"""The partition grid of a Dagster instance, read and written as Dagster itself stores it.

Dagster has no public way to show a partition as in progress, failed or missing for work that it
didn't do. So this module and `run_storage.py` use internals of Dagster, which `internals.py` lists
and checks. On a Dagster that lacks some of them, `public_grid.py` takes over.

A partition is in progress or failed when its newest planned materialization belongs to a run that
is unfinished or failed. For work outside Dagster, we store runs of our own: see `outside.py`.
"""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg
import sqlalchemy as sql
from dagster._core.events import (
    AssetMaterializationPlannedData,
    AssetObservationData,
    StepMaterializationData,
)
from dagster._core.storage.event_log.schema import (
    AssetEventTagsTable,
    AssetKeyTable,
    DynamicPartitionsTable,
    SqlEventLogStorageTable,
)
from dagster._core.storage.event_log.sql_event_log import SqlEventLogStorage
from dagster._core.storage.event_log.sqlite.sqlite_event_log import SqliteEventLogStorage
from dagster._core.storage.partition_status_cache import AssetStatusCacheValue
from dagster._core.storage.runs.schema import BulkActionsTable, RunsTable
from dagster._core.storage.runs.sql_run_storage import SqlRunStorage
from dagster._serdes import serialize_value
from sqlalchemy.dialects import postgresql, sqlite

from ..model import FAILED, READY, RUNNING
from . import internals
from .events import GENERATION_ENTRY, VERSION_TAG
from .public_grid import (
    FINISHED_STATUSES,
    PARTITIONS_ONE_BY_ONE,
    PARTITIONS_PER_STATEMENT,
    STEP_KEY,
    News,
    PublicMirror,
    RunAndJob,
    Square,
    in_batches,
    is_ours,
)
from .step import BACKFILL_TAG
from .versions import observation

NO_RUN = ""
"""The run and the job of events that no run has logged."""

OPEN_BACKFILLS = ("REQUESTED", "CANCELING", "FAILING")
"""The statuses of backfills that Dagster hasn't finished with."""

LONGEST_ENTRY = 40
"""Characters of a stored event that hold the value of a number in its metadata."""

_REMOVED = "opendataflow_removed"
"""The step key of the event that keeps the number of a deleted event from being reused."""

VISIBLE_AFTER_SECONDS = 10.0
"""Seconds after which no older event can become visible any more."""

_EVENTS, _KEYS, _TAGS = SqlEventLogStorageTable.c, AssetKeyTable.c, AssetEventTagsTable.c
_MATERIALIZED = dg.DagsterEventType.ASSET_MATERIALIZATION.value
_OBSERVED = dg.DagsterEventType.ASSET_OBSERVATION.value
_PLANNED = dg.DagsterEventType.ASSET_MATERIALIZATION_PLANNED.value
_ENDS = [
    dg.DagsterEventType.RUN_SUCCESS.value,
    dg.DagsterEventType.RUN_FAILURE.value,
    dg.DagsterEventType.RUN_CANCELED.value,
]


class Mirror(PublicMirror):
    """A Dagster instance's grid, as Dagster's SQL storage keeps it."""

    shows_runs = True

    def __init__(self, instance: dg.DagsterInstance) -> None:
        super().__init__(instance)
        self.events: SqlEventLogStorage = internals.unwrapped(
            instance.event_log_storage, "event_log_storage", SqlEventLogStorage
        )
        self.runs: SqlRunStorage = internals.unwrapped(
            instance.run_storage, "run_storage", SqlRunStorage
        )

    @property
    def batch(self) -> int:
        one_by_one = internals.flaws(internals.BATCHES)
        return PARTITIONS_ONE_BY_ONE if one_by_one else PARTITIONS_PER_STATEMENT

    # --- what the grid shows ---

    def shown(self, key: dg.AssetKey, partitions: Sequence[str] | None = None) -> dict[str, Square]:
        found: dict[str, Square] = {}
        for some in in_batches(partitions):
            found |= self._squares(key, some)
        return found

    # --- how the grid is changed ---

    def make(
        self,
        materializations: Sequence[dg.AssetMaterialization],
        by: Mapping[str, RunAndJob] = {},
        *,
        observed: bool = True,
    ) -> None:
        """Write the events in transactions of a thousand."""
        for some in in_batches(materializations):
            if observed:
                seen = [AssetObservationData(observation(event)) for event in some]
                self._write([_entry(NO_RUN, NO_RUN, _OBSERVED, data) for data in seen])
            runs = [by.get(event.partition or "", (NO_RUN, NO_RUN)) for event in some]
            made = [StepMaterializationData(event) for event in some]
            self._write(
                [_entry(*run, _MATERIALIZED, data) for run, data in zip(runs, made, strict=True)]
            )

    def report_checks(self, evaluations: Iterable[dg.AssetCheckEvaluation]) -> None:
        """Attach the results to the newest materialization of the chunk, or of the asset.

        Dagster would compare times, which SQLite rounds to seconds: a check evaluated in the same
        second as the materialization would stay "not evaluated".
        """
        if internals.flaws(internals.CHECKS):
            return super().report_checks(evaluations)
        from dagster._core.definitions.asset_checks.asset_check_evaluation import (
            AssetCheckEvaluationTargetMaterializationData,
        )
        from dagster_shared.record import replace

        for evaluation in evaluations:
            parts = [evaluation.partition] if evaluation.partition else None
            newest = dg.AssetRecordsFilter(evaluation.asset_key, asset_partitions=parts)
            for record in self.instance.fetch_materializations(newest, limit=1).records:
                about = AssetCheckEvaluationTargetMaterializationData(
                    storage_id=record.storage_id, run_id=record.run_id, timestamp=record.timestamp
                )
                evaluation = replace(evaluation, target_materialization_data=about)
            self.instance.report_runless_asset_event(evaluation)

    def is_evaluated(self, evaluation: dg.AssetCheckEvaluation) -> bool:
        """Whether Dagster takes a check's last answer for one about the asset's newest chunk.

        A run answers in the place of its plan: before all that was answered while it was at work.
        """
        if internals.flaws(internals.CHECKS):
            return super().is_evaluated(evaluation)
        newest = self.instance.fetch_materializations(evaluation.asset_key, limit=1).records
        last = self.instance.get_latest_asset_check_evaluation_record(evaluation.asset_check_key)
        if not newest or last is None:
            return not newest
        if not isinstance(last.evaluation, dg.AssetCheckEvaluation):  # planned by a run
            run = self.instance.get_run_by_id(last.run_id)
            return run is not None and not run.is_finished
        about = last.evaluation.target_materialization_data
        is_of_its_run = last.run_id == newest[0].run_id
        return is_of_its_run or (bool(about) and about.storage_id == newest[0].storage_id)

    def numbers(self, key: dg.AssetKey, versions: Mapping[str, str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for some in in_batches(list(versions)):
            query = (
                sql.select(_EVENTS.partition, _TAGS.value, sql.func.max(_EVENTS.id))
                .select_from(
                    SqlEventLogStorageTable.join(
                        AssetEventTagsTable,
                        sql.and_(_TAGS.event_id == _EVENTS.id, _TAGS.key == VERSION_TAG),
                    )
                )
                .where(
                    _EVENTS.asset_key == key.to_string(),
                    _EVENTS.partition.in_(some),
                    _EVENTS.dagster_event_type == _MATERIALIZED,
                )
                .group_by(_EVENTS.partition, _TAGS.value)
            )
            with self.events.index_connection() as db:
                rows = db.execute(query).fetchall()
            found |= {part: number for part, version, number in rows if versions[part] == version}
        return found

    def plan(self, key: dg.AssetKey, by: Mapping[str, RunAndJob]) -> None:
        for some in in_batches(list(by)):
            self._write(
                [
                    _entry(*by[part], _PLANNED, AssetMaterializationPlannedData(key, part))
                    for part in some
                ]
            )

    def remove_run(self, run_id: str) -> None:
        if isinstance(self.events, SqliteEventLogStorage):
            # When the newest event is deleted, SQLite gives its number to the next event, which
            # Dagster's cache would skip as known, and never show its partition. So an event of no
            # asset becomes the newest one; it replaces that of the removal before.
            newest = dg.EventLogEntry(
                error_info=None,
                level="debug",
                user_message=f"run {run_id} was removed",
                run_id=NO_RUN,
                timestamp=time.time(),
                step_key=_REMOVED,
                job_name=NO_RUN,
            )
            with self.events.index_transaction() as db:
                [number] = insert_events(db, [newest])
                before = sql.and_(_EVENTS.step_key == _REMOVED, _EVENTS.id < number)
                db.execute(SqlEventLogStorageTable.delete().where(before))
        self.instance.delete_run(run_id)

    def clear(self, key: dg.AssetKey, partitions: Sequence[str]) -> None:
        # The events stay in the logs of their runs. SQLite would reuse the numbers of deleted ones,
        # and Dagster's cache, and our cursor, would skip the new events as known.
        for some in in_batches(partitions):
            with self.events.index_transaction() as db:
                theirs = sql.and_(
                    _EVENTS.asset_key == key.to_string(),
                    _EVENTS.partition.in_(some),
                    _EVENTS.dagster_event_type.in_([_MATERIALIZED, _PLANNED, _OBSERVED]),
                )
                # The tags first: the subselect finds the events by the key that is deleted next.
                ids = sql.select(_EVENTS.id).where(theirs)
                db.execute(AssetEventTagsTable.delete().where(_TAGS.event_id.in_(ids)))
                nobodys = SqlEventLogStorageTable.update().where(theirs)
                db.execute(nobodys.values(asset_key=None, partition=None))
        self.forget_cache(key)

    def forget_cache(self, key: dg.AssetKey) -> None:
        with self.events.index_transaction() as db:
            nothing = AssetKeyTable.update().values(cached_status_data=None)
            db.execute(nothing.where(_KEYS.asset_key == key.to_string()))

    def cached_since(self, after: int) -> list[tuple[str, Any, dict[str, int]]]:
        query = (
            sql.select(_EVENTS.asset_key, _EVENTS.partition, _EVENTS.id)
            .where(_EVENTS.id > after, _EVENTS.dagster_event_type == _MATERIALIZED)
            .order_by(_EVENTS.id.desc())
            .limit(20 * PARTITIONS_PER_STATEMENT)  # more than ticks write meanwhile
        )
        made: dict[str, dict[str, int]] = {}
        with self.events.index_connection() as db:
            for key, partition, number in db.execute(query):
                made.setdefault(key, {})[partition] = number
            query = sql.select(_KEYS.asset_key, _KEYS.cached_status_data)
            query = query.where(_KEYS.asset_key.in_(made), _KEYS.cached_status_data.is_not(None))
            rows = db.execute(query).fetchall() if made else ()
        return [(key, AssetStatusCacheValue.from_db_string(text), made[key]) for key, text in rows]

    # --- the partition keys ---

    def existing(self, name: str, keys: Sequence[str]) -> set[str]:
        table, found = DynamicPartitionsTable.c, set()
        for some in in_batches(keys):
            query = sql.select(table.partition).where(
                table.partitions_def_name == name, table.partition.in_(some)
            )
            with self.events.index_connection() as db:
                found |= set(db.execute(query).scalars())
        return found

    def last_keys(self, name: str, count: int) -> list[str]:
        table = DynamicPartitionsTable.c
        query = sql.select(table.partition).where(table.partitions_def_name == name)
        with self.events.index_connection() as db:
            found = db.execute(query.order_by(table.id.desc()).limit(count)).scalars()
            return list(found)[::-1]

    def replace_keys(self, name: str, old: Sequence[str], new: Sequence[str]) -> None:
        """The same, in one transaction."""
        table = DynamicPartitionsTable
        # Dagster's own calls commit each key by itself. A tick killed in between would leave the
        # grid without the keys that only move to the end.
        with self.events.index_transaction() as db:
            for some in in_batches(old):
                db.execute(
                    table.delete().where(
                        table.c.partitions_def_name == name, table.c.partition.in_(some)
                    )
                )
            for some in in_batches(new):
                rows = [{"partitions_def_name": name, "partition": partition} for partition in some]
                kind = postgresql if db.dialect.name == "postgresql" else sqlite
                # A person, or another code location, may have added the same key.
                db.execute(kind.insert(table).values(rows).on_conflict_do_nothing())

    # --- what others did ---

    def news(self, after: int, keys: Iterable[dg.AssetKey], limit: int = 5000) -> News:
        """Return the partitions that others changed, and those of runs that ended, since a cursor.

        The next call repeats the events of the last seconds: otherwise one whose transaction
        commits late would be missed.
        """
        ours = {key.to_string() for key in keys}
        query = (
            sql.select(
                _EVENTS.id,
                _EVENTS.asset_key,
                _EVENTS.partition,
                _EVENTS.run_id,
                _EVENTS.dagster_event_type,
                _EVENTS.timestamp,
            )
            .where(
                _EVENTS.id > after,
                sql.or_(_EVENTS.step_key.is_(None), _EVENTS.step_key != STEP_KEY),
                _EVENTS.dagster_event_type.in_([_MATERIALIZED, _PLANNED, *_ENDS]),
            )
            .order_by(_EVENTS.id)
            .limit(limit)
        )
        with self.events.index_connection() as db:
            rows = db.execute(query).fetchall()
            settled = after if rows else self._newest(db)
        touched: dict[str, set[str]] = {}
        ended = set()
        for _, key, partition, run_id, kind, _ in rows:
            if kind in _ENDS:
                ended.add(run_id)
            elif key in ours and partition is not None:
                touched.setdefault(key, set()).add(partition)
        # The end of a run turns the partitions that it planned but didn't materialize red or
        # missing, without an event for them.
        for key, partition in self.planned_by(*ended):
            if key in ours:
                touched.setdefault(key, set()).add(partition)
        return News(touched, _settled_cursor(settled, rows), len(rows) == limit)

    def newest(self) -> int:
        with self.events.index_connection() as db:
            return self._newest(db)

    def _newest(self, db: sql.Connection) -> int:
        early = datetime.fromtimestamp(time.time() - VISIBLE_AFTER_SECONDS, UTC).replace(
            tzinfo=None
        )
        last = sql.select(_EVENTS.id, _EVENTS.timestamp).order_by(_EVENTS.id.desc()).limit(1)
        row = db.execute(last).fetchone()
        if row is None or row[1] < early:
            return row[0] if row else 0
        settled = sql.select(sql.func.max(_EVENTS.id)).where(_EVENTS.timestamp < early)
        return db.execute(settled).scalar() or 0

    def marks(self, keys: Iterable[dg.AssetKey], names: Iterable[str]) -> dict[str, Any]:
        wanted, table = [key.to_string() for key in keys], DynamicPartitionsTable.c
        assets: dict[str, str] = {}
        with self.events.index_connection() as db:
            for some in in_batches(wanted):
                query = sql.select(_KEYS.asset_key, _KEYS.id, _KEYS.wipe_timestamp)
                for key, number, wiped in db.execute(query.where(_KEYS.asset_key.in_(some))):
                    assets[key] = f"{number} {wiped or ''}"
            counts = sql.select(
                table.partitions_def_name, sql.func.count(), sql.func.max(table.id)
            ).group_by(table.partitions_def_name)
            ours = set(names)
            found = {row[0]: (row[1], row[2]) for row in db.execute(counts) if row[0] in ours}
            last = sql.select(table.partitions_def_name, table.partition).where(
                table.id.in_([number for _, number in found.values()])
            )
            partitions = {row[0]: [*found[row[0]], row[1]] for row in db.execute(last)}
            events = db.execute(sql.select(sql.func.max(_EVENTS.id))).scalar() or 0
        with self.runs.connect() as db:
            query = sql.select(RunsTable.c.id, RunsTable.c.run_id)
            newest = db.execute(query.order_by(RunsTable.c.id.desc()).limit(1)).fetchone()
            count = db.execute(sql.select(sql.func.count()).select_from(RunsTable)).scalar_one()
        runs = [*newest, count] if newest else [0, "", 0]
        return {"assets": assets, "partitions": partitions, "runs": runs, "events": events}

    def runs_were_deleted(self, number: int, run_id: str, count: int) -> bool:
        """Whether runs were deleted since a mark; SQLite reuses the number of a deleted run."""
        with self.runs.connect() as db:
            runs = RunsTable.c
            left = sql.select(sql.func.count()).where(runs.id <= number)
            same = sql.select(runs.run_id).where(runs.id == number)
            return (
                db.execute(left).scalar_one() < count or (db.execute(same).scalar() or "") != run_id
            )

    def backfill_of(self, run_id: str) -> str | None:
        run = self.instance.get_run_by_id(run_id)
        backfill_id = run.tags.get(BACKFILL_TAG) if run else None
        return backfill_id if backfill_id and self.is_open(backfill_id) else None

    def is_open(self, backfill_id: str) -> bool:
        if internals.flaws(internals.BACKFILLS):
            return False
        backfill = self.instance.get_backfill(backfill_id)
        return backfill is not None and backfill.status.name in OPEN_BACKFILLS

    def has_open_backfills(self) -> bool:
        query = sql.select(sql.literal(1)).where(BulkActionsTable.c.status.in_(OPEN_BACKFILLS))
        with self.runs.connect() as db:
            return db.execute(query.limit(1)).first() is not None

    def planned_by_backfill(self, backfill_id: str) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        filters = dg.RunsFilter(tags={BACKFILL_TAG: backfill_id})
        records = self.instance.get_run_records(filters)
        for key, partition in self.planned_by(*(each.dagster_run.run_id for each in records)):
            found.setdefault(key, set()).add(partition)
        return found

    def planned_by(self, *run_ids: str) -> list[tuple[str, str]]:
        found = []
        for some in in_batches(run_ids):
            query = sql.select(_EVENTS.asset_key, _EVENTS.partition).where(
                _EVENTS.run_id.in_(some),
                _EVENTS.dagster_event_type == _PLANNED,
                _EVENTS.partition.is_not(None),
            )
            with self.events.index_connection() as db:
                found += [(row[0], row[1]) for row in db.execute(query)]
        return found

    def _squares(self, key: dg.AssetKey, partitions: Sequence[str] | None) -> dict[str, Square]:
        events = self._newest_events(key.to_string(), partitions)
        materialized = {row[0]: (row[2], row[4]) for row in events if row[1] == _MATERIALIZED}
        materialized = self._with_generations(materialized)
        planned = {row[0]: (row[2], row[3]) for row in events if row[1] == _PLANNED}
        # A plan counts until a materialization follows it.
        open_plans = {
            part: run_id
            for part, (number, run_id) in planned.items()
            if part not in materialized or number > materialized[part][0]
        }
        statuses = self.statuses(set(open_plans.values()))
        squares = {part: Square(READY, version) for part, (_, version) in materialized.items()}
        for part, run_id in open_plans.items():
            status = statuses.get(run_id)
            version = materialized[part][1] if part in materialized else None
            if status is not None and status not in FINISHED_STATUSES:
                squares[part] = Square(RUNNING, version, run_id, live=not is_ours(run_id))
            elif status == dg.DagsterRunStatus.FAILURE:
                squares[part] = Square(FAILED, version, run_id)
            elif part not in materialized:
                squares[part] = Square()
        return squares

    def _newest_events(self, asset: str, partitions: Sequence[str] | None) -> Sequence[Any]:
        """Return, by partition, the newest materialization and the newest plan: partition, kind,
        number, run and data version."""
        newest = (
            sql.select(
                _EVENTS.partition, _EVENTS.dagster_event_type, sql.func.max(_EVENTS.id).label("id")
            )
            .where(
                _EVENTS.asset_key == asset,
                _EVENTS.partition.is_not(None),
                _EVENTS.dagster_event_type.in_([_MATERIALIZED, _PLANNED]),
            )
            .group_by(_EVENTS.partition, _EVENTS.dagster_event_type)
        )
        if partitions is not None:
            newest = newest.where(_EVENTS.partition.in_(partitions))
        with self.events.index_connection() as db:
            # A wipe of an asset keeps its events; Dagster ignores those from before the wipe.
            wiped = db.execute(
                sql.select(_KEYS.wipe_timestamp).where(_KEYS.asset_key == asset)
            ).scalar()
            if wiped is not None:
                newest = newest.where(_EVENTS.timestamp > wiped)
            latest = newest.subquery()
            query = sql.select(
                latest.c.partition,
                latest.c.dagster_event_type,
                latest.c.id,
                _EVENTS.run_id,
                _TAGS.value,
            ).select_from(
                latest.join(SqlEventLogStorageTable, _EVENTS.id == latest.c.id).outerjoin(
                    AssetEventTagsTable,
                    sql.and_(_TAGS.event_id == latest.c.id, _TAGS.key == VERSION_TAG),
                )
            )
            return db.execute(query).fetchall()

    def _with_generations(
        self, materialized: dict[str, tuple[int, str | None]]
    ) -> dict[str, tuple[int, str | None]]:
        """Return materializations by partition, with generations instead of fingerprints."""
        printed = {
            number: part
            for part, (number, version) in materialized.items()
            if version and not version.isdecimal()
        }
        # Where the data version is a fingerprint, the generation stands only inside of the event.
        # The database cuts it out: whole events would have to be fetched and deserialized for 40
        # characters.
        label = f'}}, "label": "{GENERATION_ENTRY}"'
        found = dict(materialized)
        for some in in_batches(sorted(printed)):
            with self.events.index_connection() as db:
                is_postgres = db.dialect.name == "postgresql"
                position = sql.func.strpos if is_postgres else sql.func.instr
                at = position(_EVENTS.event, label)
                before = sql.func.substr(_EVENTS.event, at - LONGEST_ENTRY, LONGEST_ENTRY)
                query = sql.select(_EVENTS.id, before)
                query = query.where(_EVENTS.id.in_(some), at > LONGEST_ENTRY)
                for number, text in db.execute(query):
                    if match := re.search(r'"value": (\d+)$', text):
                        found[printed[number]] = number, match[1]
        return found

    def statuses(self, run_ids: set[str]) -> dict[str, dg.DagsterRunStatus]:
        found = {}
        for some in in_batches(sorted(run_ids)):
            query = sql.select(RunsTable.c.run_id, RunsTable.c.status).where(
                RunsTable.c.run_id.in_(some)
            )
            with self.runs.connect() as db:
                found |= {row[0]: dg.DagsterRunStatus(row[1]) for row in db.execute(query)}
        return found

    def _write(self, entries: Sequence[dg.EventLogEntry]) -> None:
        """Store events of one asset and kind in one transaction.

        Dagster's own call on SQLite commits each event by itself, which takes minutes for a grid of
        10,000 chunks. A batch is stored whole or not at all; a tick that was killed is repeated.
        """
        storage = self.events
        if internals.flaws(internals.BATCHES):
            storage.store_event_batch(entries)
            return
        with storage.index_transaction() as db:
            ids = insert_events(db, entries)
        # A transaction of its own. A tick killed before it leaves events without a data version,
        # which the next tick writes again.
        storage.store_asset_event_tags(entries, ids)
        storage.store_asset_event(entries[-1], ids[-1])
        # On SQLite, a run's page reads a file of its own.
        if isinstance(storage, SqliteEventLogStorage):
            by_run: dict[str, list[dg.EventLogEntry]] = {}
            for entry in entries:
                by_run.setdefault(entry.run_id, []).append(entry)
            by_run.pop(NO_RUN, None)
            for run_id, own in by_run.items():
                with storage.run_connection(run_id) as db:
                    insert_events(db, own)


def insert_events(db: sql.Connection, entries: Sequence[dg.EventLogEntry]) -> list[int]:
    """Store events, without updating their assets; return their numbers.

    SQLAlchemy names each value of a batch, and compiling such a statement for 1,000 events takes a
    second. This statement is compiled once.
    """
    insert = SqlEventLogStorageTable.insert()
    numbers = insert.returning(_EVENTS.id, sort_by_parameter_order=True)
    return list(db.execute(numbers, [_row(entry) for entry in entries]).scalars())


def _row(entry: dg.EventLogEntry) -> dict[str, Any]:
    event = entry.dagster_event
    asset, kind = (event.asset_key, event.event_type_value) if event else (None, "PIPELINE_")
    return {
        "run_id": entry.run_id,
        "event": serialize_value(entry),
        # Sensors of run statuses find their events by this: a run's page needs some all the same.
        "dagster_event_type": None if kind.startswith("PIPELINE_") else kind,
        "timestamp": datetime.fromtimestamp(entry.timestamp, UTC).replace(tzinfo=None),
        "step_key": entry.step_key,
        "asset_key": asset.to_string() if asset else None,
        "partition": event.partition if event else None,
    }


def _settled_cursor(after: int, rows: Sequence[Any]) -> int:
    """Return the last event before which no other can appear any more."""
    horizon = time.time() - VISIBLE_AFTER_SECONDS
    for number, *_, stamp in rows:
        if stamp.replace(tzinfo=UTC).timestamp() > horizon:
            return number - 1
    return rows[-1][0] if rows else after


def _entry(run_id: str, job_name: str, kind: str, data: Any) -> dg.EventLogEntry:
    event = dg.DagsterEvent(
        event_type_value=kind, job_name=job_name, event_specific_data=data, step_key=STEP_KEY
    )
    return dg.EventLogEntry(
        error_info=None,
        level="debug",
        user_message="",
        run_id=run_id,
        timestamp=time.time(),
        step_key=STEP_KEY,
        job_name=job_name,
        dagster_event=event,
    )
