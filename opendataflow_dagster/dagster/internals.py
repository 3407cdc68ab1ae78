"""Which internals of Dagster the mirror uses, and what remains without them.

Dagster may change these names in any release, and has done so within 1.13. When a process first
needs a part, each name is compared with how it is called here. If a name of the part is gone or
takes other parameters, the mirror works without that part, and says so.
"""

import inspect
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any, NamedTuple

from ..errors import WrongUse

GRID, BATCHES, CACHES, PAGES, CHECKS, ALERTS, BACKFILLS, STEPS = (
    "grid",
    "batches",
    "caches",
    "pages",
    "checks",
    "alerts",
    "backfills",
    "steps",
)

LOST = {
    GRID: "only READY chunks are shown, but nothing that runs or fails outside Dagster",
    BATCHES: "events are stored one by one, which takes longer",
    CACHES: "a chunk that becomes READY while its page is drawn may stay missing on it",
    PAGES: "the page of a run outside Dagster has its log, but no step",
    CHECKS: "a check evaluated together with its chunk may appear as not evaluated",
    ALERTS: "run failure sensors don't hear of what fails outside Dagster",
    BACKFILLS: "a red square may be cleared while a backfill still counts it",
    STEPS: "a run doesn't start the steps downstream of those that produced chunks",
}
"""Part → what is lost without it, in the words of the sensor's page and `odf doctor`."""

INSTALL_COMMAND = "pip install --upgrade 'opendataflow-dagster[dagster]'"
"""The command that installs a tested Dagster."""


class Use(NamedTuple):
    """An internal name: its part, its place, how it is called, and the attributes it must have."""

    part: str
    path: str
    call: str = ""
    """The parameters passed to it: by position, or with `=` by name."""
    has: str = ""
    """Attributes of it that are used."""
    value: str = ""
    """Its type."""


_LOG = "dagster._core.storage.event_log"
_EVENT_STORAGE = f"{_LOG}.sql_event_log:SqlEventLogStorage"
_RUN_STORAGE = "dagster._core.storage.runs.sql_run_storage:SqlRunStorage"
_CACHE = "dagster._core.storage.partition_status_cache:AssetStatusCacheValue"
_PLAN = "dagster._core.snap.execution_plan_snapshot"

USES = (
    Use(GRID, "dagster:DagsterInstance.event_log_storage"),
    Use(GRID, "dagster:DagsterInstance.run_storage"),
    Use(
        GRID,
        "dagster:EventLogEntry",
        "error_info=, level=, user_message=, run_id=, timestamp=, step_key=, job_name=, "
        "dagster_event=",
        "_replace",
    ),
    Use(
        GRID,
        "dagster:DagsterEvent",
        "event_type_value, job_name, step_key=, event_specific_data=, message=",
        "asset_key partition",
    ),
    Use(GRID, "dagster._core.events:AssetMaterializationPlannedData", "asset_key, partition"),
    Use(GRID, "dagster._core.events:AssetObservationData", "asset_observation"),
    Use(GRID, "dagster._core.events:StepMaterializationData", "materialization"),
    Use(
        GRID,
        f"{_LOG}.schema:SqlEventLogStorageTable",
        has="c.id c.run_id c.event c.dagster_event_type c.timestamp c.step_key c.asset_key "
        "c.partition",
    ),
    Use(GRID, f"{_LOG}.schema:AssetEventTagsTable", has="c.event_id c.key c.value"),
    Use(
        GRID,
        f"{_LOG}.schema:AssetKeyTable",
        has="c.id c.asset_key c.wipe_timestamp c.cached_status_data",
    ),
    Use(
        GRID,
        f"{_LOG}.schema:DynamicPartitionsTable",
        has="c.id c.partitions_def_name c.partition",
    ),
    Use(GRID, f"{_LOG}.sqlite.sqlite_event_log:SqliteEventLogStorage"),
    Use(GRID, f"{_EVENT_STORAGE}", has="store_event_batch"),
    Use(GRID, f"{_EVENT_STORAGE}.index_connection", "self"),
    Use(GRID, f"{_EVENT_STORAGE}.index_transaction", "self"),
    Use(GRID, f"{_EVENT_STORAGE}.run_connection", "self, run_id"),
    Use(GRID, f"{_EVENT_STORAGE}.store_event", "self, event"),
    Use(
        GRID,
        "dagster._core.storage.runs.schema:RunsTable",
        has="c.id c.run_id c.pipeline_name c.snapshot_id c.status c.run_body c.start_time "
        "c.end_time",
    ),
    Use(GRID, "dagster._core.storage.runs.schema:BulkActionsTable", has="c.status"),
    Use(GRID, "dagster._core.storage.runs.schema:RunTagsTable", has="c.run_id c.key c.value"),
    Use(GRID, f"{_RUN_STORAGE}.connect", "self"),
    Use(GRID, "dagster._serdes:serialize_value", "val"),
    Use(GRID, "dagster._serdes:deserialize_value", "val, as_type"),
    Use(BATCHES, f"{_EVENT_STORAGE}.store_asset_event", "self, event, event_id"),
    Use(BATCHES, f"{_EVENT_STORAGE}.store_asset_event_tags", "self, events, event_ids"),
    Use(GRID, f"{_CACHE}.from_db_string", "db_string"),
    Use(CACHES, f"{_CACHE}.deserialize_materialized_partition_subsets", "self, partitions_def"),
    Use(CACHES, _CACHE, has="latest_storage_id"),
    Use(PAGES, f"{_RUN_STORAGE}.has_job_snapshot", "self, job_snapshot_id"),
    Use(PAGES, f"{_RUN_STORAGE}.add_job_snapshot", "self, job_snapshot"),
    Use(PAGES, f"{_RUN_STORAGE}.has_execution_plan_snapshot", "self, execution_plan_snapshot_id"),
    Use(PAGES, f"{_RUN_STORAGE}.add_execution_plan_snapshot", "self, execution_plan_snapshot"),
    Use(PAGES, "dagster:JobDefinition.get_job_snapshot", "self"),
    Use(PAGES, "dagster._core.execution.api:create_execution_plan", "job"),
    Use(PAGES, f"{_PLAN}:create_execution_plan_snapshot_id", "execution_plan_snapshot"),
    Use(PAGES, f"{_PLAN}:snapshot_from_execution_plan", "execution_plan, pipeline_snapshot_id"),
    Use(PAGES, "dagster._core.execution.plan.objects:StepSuccessData", "duration_ms="),
    Use(
        PAGES,
        "dagster._core.execution.plan.objects:StepFailureData",
        "error=, user_failure_data=",
    ),
    Use(PAGES, "dagster_shared.error:SerializableErrorInfo", "message, stack, cls_name"),
    Use(
        CHECKS,
        "dagster._core.definitions.asset_checks.asset_check_evaluation:"
        "AssetCheckEvaluationTargetMaterializationData",
        "storage_id=, run_id=, timestamp=",
    ),
    Use(
        CHECKS,
        "dagster:DagsterInstance.get_latest_asset_check_evaluation_record",
        "self, asset_check_key",
    ),
    Use(CHECKS, "dagster_shared.record:replace", "obj, target_materialization_data="),
    Use(ALERTS, "dagster_shared.error:SerializableErrorInfo", "message, stack, cls_name"),
    Use(ALERTS, "dagster._core.events:JobFailureData", "error, failure_reason"),
    Use(ALERTS, "dagster._core.events:RunFailureReason", has="UNKNOWN"),
    Use(BACKFILLS, "dagster:DagsterInstance.get_backfill", "self, backfill_id"),
    Use(
        STEPS,
        "dagster._core.execution.plan.execute_step:SYSTEM_METADATA_KEY_SOURCE_ASSET_OBSERVATION",
        value="__source_asset_observation__",
    ),
)
"""All names in use; `tests/dagster/test_internals.py` compares them with the imports."""


@cache
def flaws(part: str) -> tuple[str, ...]:
    """Return what is wrong with a part in the installed Dagster; empty: it can be used."""
    return tuple(flaw for use in USES if use.part == part and (flaw := _flaw(use)))


def what_is_lost(parts: Iterable[str] = LOST) -> str:
    """Return what the installed Dagster lacks, and what is lost without it; "" if nothing."""
    lacking = {part: found for part in parts if (found := flaws(part))}
    if not lacking:
        return ""
    names = ", ".join(dict.fromkeys(name for found in lacking.values() for name in found))
    lost = "; ".join(LOST[part] for part in lacking)
    return f"This mirror wasn't built for Dagster {version('dagster')} ({names}): {lost}"


def degraded(parts: Iterable[str] = LOST) -> str:
    """Return the same with the command that helps."""
    lost = what_is_lost(parts)
    return f"{lost}. Run: {INSTALL_COMMAND}" if lost else ""


def unwrapped(storage: Any, name: str, kind: type) -> Any:
    """Return the storage inside the wrapper that `storage:` in dagster.yaml puts around it."""
    while not isinstance(storage, kind) and hasattr(storage, "_storage"):
        storage = getattr(storage._storage, name)
    if not isinstance(storage, kind):
        raise WrongUse(
            f"Dagster keeps its {name} in {type(storage).__name__}, which can't show statuses of "
            "work outside Dagster. Use SQLite or dagster-postgres in dagster.yaml."
        )
    return storage


def _flaw(use: Use) -> str:
    """Return what is wrong with one name; "" if nothing."""
    name = use.path.partition(":")[2]
    try:
        found = _find(use.path)
    except (ImportError, AttributeError):
        return f"no {name}"
    for attribute in use.has.split():
        try:
            _attribute(found, attribute)
        except (AttributeError, KeyError):
            return f"no {name}.{attribute}"
    if use.value and found != use.value:
        return f"{name} is {found!r}"
    if use.call and not _takes(found, use.call):
        return f"{name} takes other parameters"
    return ""


def _takes(found: Any, call: str) -> bool:
    """Whether a callable has these parameters: the same names in the same places, and no others."""
    given = call.split(", ")
    by_position = [name for name in given if not name.endswith("=")]
    try:
        signature = inspect.signature(found)
        signature.bind(*by_position, **{name[:-1]: None for name in given if name.endswith("=")})
    except (TypeError, ValueError):
        return False
    return list(signature.parameters)[: len(by_position)] == by_position


def _find(path: str) -> Any:
    module, _, name = path.partition(":")
    return _attribute(import_module(module), name)


def _attribute(found: Any, names: str) -> Any:
    for name in names.split("."):
        found = getattr(found, name)
    return found
