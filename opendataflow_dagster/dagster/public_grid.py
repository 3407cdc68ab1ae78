"""The partition grid of a Dagster instance, as far as Dagster's public API goes.

`grid.py` does more, with Dagster's internals. If Dagster has changed those, this is what remains:
READY chunks are reported one by one; nothing shows what is running or has failed outside Dagster,
and only a wipe of an asset clears squares.
"""

import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import dagster as dg

from ..model import FAILED, READY, RUNNING
from . import internals
from .events import GENERATION_ENTRY, VERSION_TAG
from .translator import DataflowTranslator
from .versions import RunLog, observation

STEP_KEY = "opendataflow"
"""The step key of events that the mirror writes, so that it skips its own when it reads news."""

FINISHED_STATUSES = (
    dg.DagsterRunStatus.SUCCESS,
    dg.DagsterRunStatus.FAILURE,
    dg.DagsterRunStatus.CANCELED,
)
"""The statuses of runs that have ended."""

PARTITIONS_ONE_BY_ONE = 50
"""Partitions between two checks of the time, where each event is stored by itself."""

PARTITIONS_PER_STATEMENT = 1000
"""Partitions per statement: SQLite takes 32,766 parameters, and an event has seven."""

RunAndJob = tuple[str, str]
"""The id of a run, and the name of its job."""

_STATES = {"MATERIALIZED": READY, "IN_PROGRESS": RUNNING, "FAILED": FAILED}
_OURS = uuid.uuid5(uuid.NAMESPACE_DNS, "opendataflow")


def our_run(*names: str) -> str:
    """Return the id of one of our runs: the same names give the same id."""
    return str(uuid.uuid5(_OURS, "\n".join(names)))


def is_ours(run_id: str) -> bool:
    """Whether a run only shows something; the ids of Dagster's own runs are random."""
    return run_id[14:15] == "5"


class Square(NamedTuple):
    """What the grid shows of one partition, and why.

    `state` is READY, RUNNING, FAILED or "". `version` is the generation of the newest
    materialization, or else its data version. `run_id` is the run that is in progress or failed:
    one of Dagster's, or one of ours that shows work done outside. `live` means that Dagster itself
    is at work.
    """

    state: str = ""
    version: str | None = None
    run_id: str = ""
    live: bool = False


class News(NamedTuple):
    """What others wrote since a cursor: partitions by asset key as stored, and the next cursor."""

    touched: dict[str, set[str]]
    cursor: int
    more: bool


class PublicMirror:
    """One Dagster instance's grid, by public API alone."""

    shows_runs = False
    """Whether our runs show what is running or has failed, and squares can be cleared."""

    def __init__(self, instance: dg.DagsterInstance) -> None:
        self.instance = instance
        self._known: tuple[DataflowTranslator | None, Mapping[str, str]] = None, {}

    def learn_partitions(self, translator: DataflowTranslator, domains: Mapping[str, str]) -> None:
        """Set the partitions that datasets have: what Dagster's runs show is looked up by them."""
        self._known = translator, domains

    @property
    def batch(self) -> int:
        """How many events are written between two checks of the time."""
        return PARTITIONS_ONE_BY_ONE

    # --- what the grid shows ---

    def shown(self, key: dg.AssetKey, partitions: Sequence[str] | None = None) -> dict[str, Square]:
        """What is stored of partitions of an asset (all: None), for those that have events."""
        found: dict[str, Square] = {}
        for some in in_batches(partitions):
            found |= {part: Square(READY, version) for part, version in self._versions(key, some)}
        states = self._states(key, partitions)
        return found | {
            part: Square(state, found.get(part, Square()).version, live=state == RUNNING)
            for part, state in states.items()
        }

    def grid(self, key: dg.AssetKey, partitions: dg.PartitionsDefinition) -> dict[str, str]:
        """The state of each partition as the UI shows it, cache included; omits missing ones."""
        keys = partitions.get_partition_keys(dynamic_partitions_store=self.instance)
        found = self.instance.get_status_by_partition(key, keys, partitions) or {}
        return {part: _STATES[state.name] for part, state in found.items() if state}

    # --- how the grid is changed ---

    def make(
        self,
        materializations: Sequence[dg.AssetMaterialization],
        by: Mapping[str, RunAndJob] = {},
        *,
        observed: bool = True,
    ) -> None:
        """Show partitions of one asset as materialized: by our runs, or without a run.

        Args:
            materializations: The events to log.
            by: The run of ours that shows a partition, if there is one.
            observed: Log an observation first, for assets that Dagster doesn't produce itself:
                only observations tell Dagster what is stale downstream of them.
        """
        for event in materializations:
            if observed:
                self.instance.report_runless_asset_event(observation(event))
            self.instance.report_runless_asset_event(event)

    def report(self, materializations: Sequence[dg.AssetMaterialization]) -> None:
        """Show partitions of an asset as materialized, whether or not Dagster produces it."""
        self.make(materializations)

    def report_checks(self, evaluations: Iterable[dg.AssetCheckEvaluation]) -> None:
        """Report check results."""
        for evaluation in evaluations:
            self.instance.report_runless_asset_event(evaluation)

    def is_evaluated(self, evaluation: dg.AssetCheckEvaluation) -> bool:
        """Whether Dagster takes a check's last answer for one about the asset's newest chunk."""
        return True

    def numbers(self, key: dg.AssetKey, versions: Mapping[str, str]) -> dict[str, int]:
        """Return the newest materialization of each partition that has the given data version."""
        return RunLog(self.instance, list(versions)).numbers(key, versions)

    def plan(self, key: dg.AssetKey, by: Mapping[str, RunAndJob]) -> None:
        """Show each partition with the status of its run."""
        raise NotImplementedError("Dagster's public API can't show planned partitions.")

    def clear(self, key: dg.AssetKey, partitions: Sequence[str]) -> None:
        """Show partitions as missing: their materializations and plans no longer count."""
        raise NotImplementedError("Dagster's public API can't clear a square.")

    def remove_run(self, run_id: str) -> None:
        """Remove one of our runs, with its events."""
        self.instance.delete_run(run_id)

    def end_runs(self) -> None:
        """End our running runs: otherwise their squares would stay in progress forever."""
        at_work = dg.RunsFilter(statuses=[dg.DagsterRunStatus.MANAGED])
        for run in self.instance.get_runs(at_work):
            if is_ours(run.run_id):
                why = "This Dagster doesn't show what is executed outside it."
                self.instance.report_run_canceled(run, message=why)

    def forget_cache(self, key: dg.AssetKey) -> None:
        """Make the UI recount an asset's partitions: its cache never removes any."""

    def cached_since(self, after: int) -> list[tuple[str, Any, dict[str, int]]]:
        """Return assets with materializations since a number, their caches, and the numbers."""
        return []

    def wrong_caches(self, after: int, datasets: Mapping[str, str]) -> list[str]:
        """Return the datasets whose caches missed one of the materializations since a number.

        Dagster reads an asset's newest materialization and then its newest plan. If both are
        written between the two, its cache takes the plan for the newest event, and never looks for
        the materialization.

        Args:
            after: The number of an event.
            datasets: Asset key as stored → dataset.
        """
        translator, domains = self._known
        if translator is None or internals.flaws(internals.CACHES):
            return []
        return [
            datasets[key]
            for key, cache, made in self.cached_since(after)
            if key in datasets
            if _lacks(cache, translator.partitions_def(domains[datasets[key]]), made)
        ]

    # --- the partition keys ---

    def keys(self, name: str) -> list[str]:
        """Return all keys of a partitions definition, in the order of the grid."""
        return list(self.instance.get_dynamic_partitions(name))

    def existing(self, name: str, keys: Sequence[str]) -> set[str]:
        return set(self.keys(name)).intersection(keys)

    def last_keys(self, name: str, count: int) -> list[str]:
        """Return the last keys of a partitions definition, in the order of the grid."""
        return self.keys(name)[-count:]

    def replace_keys(self, name: str, old: Sequence[str], new: Sequence[str]) -> None:
        """Remove keys, and append others."""
        for key in old:
            self.instance.delete_dynamic_partition(name, key)
        for some in in_batches(new):
            self.instance.add_dynamic_partitions(name, some)

    # --- what others did ---

    def news(self, after: int, keys: Iterable[dg.AssetKey], limit: int = 5000) -> News:
        """Return nothing: the tables know what changed, and `marks` shows what was wiped."""
        return News({}, after, False)

    def newest(self) -> int:
        """Return a cursor for `news` after what is settled now."""
        return 0

    def marks(self, keys: Iterable[dg.AssetKey], names: Iterable[str]) -> dict[str, Any]:
        """Marks that change when events vanish without a trace: wipes, deleted runs and keys."""
        records = self.instance.get_asset_records(list(keys))
        return {
            "assets": {
                record.asset_entry.asset_key.to_string(): f"{record.storage_id} {_wiped(record)}"
                for record in records
            },
            "partitions": {
                name: [len(found), found[-1]] for name in names if (found := self.keys(name))
            },
            "runs": [0, "", 0],
            "events": sys.maxsize,
        }

    def runs_were_deleted(self, number: int, run_id: str, count: int) -> bool:
        """Whether runs were deleted since a mark."""
        return False

    def statuses(self, run_ids: set[str]) -> dict[str, dg.DagsterRunStatus]:
        found = {}
        for some in in_batches(sorted(run_ids)):
            runs = self.instance.get_runs(dg.RunsFilter(run_ids=some)) if some else ()
            found |= {run.run_id: run.status for run in runs}
        return found

    def unfinished(self, run_ids: set[str]) -> set[str]:
        """Return the runs, of those given, that haven't ended."""
        return {
            run_id
            for run_id, status in self.statuses(run_ids).items()
            if status not in FINISHED_STATUSES
        }

    def planned_by(self, *run_ids: str) -> list[tuple[str, str]]:
        """Return the partitions that runs planned, with the asset key as stored."""
        return []

    def backfill_of(self, run_id: str) -> str | None:
        """Return the backfill of a run, if Dagster still waits for it."""
        return None

    def is_open(self, backfill_id: str) -> bool:
        return False

    def has_open_backfills(self) -> bool:
        """Whether Dagster is working on any backfill."""
        return False

    def planned_by_backfill(self, backfill_id: str) -> dict[str, set[str]]:
        """Return the partitions that a backfill's runs planned, by asset key as stored."""
        return {}

    def _versions(
        self, key: dg.AssetKey, partitions: Sequence[str] | None
    ) -> Iterator[tuple[str, str | None]]:
        """The newest materialization of each partition: its generation, or else its version."""
        wanted = dg.AssetRecordsFilter(key, asset_partitions=partitions)
        found: set[str] = set()
        cursor = None
        while partitions is None or len(found) < len(partitions):
            page = self.instance.fetch_materializations(wanted, PARTITIONS_PER_STATEMENT, cursor)
            for record in page.records:
                event = record.asset_materialization
                if event and event.partition is not None and event.partition not in found:
                    found.add(event.partition)
                    yield event.partition, _version(event)
            if not page.has_more:
                return
            cursor = page.cursor

    def _states(self, key: dg.AssetKey, partitions: Sequence[str] | None) -> dict[str, str]:
        """Return what Dagster's own runs show of partitions."""
        translator, domains = self._known
        for datasetid, domain in domains.items():
            if translator and translator.asset_key(datasetid) == key:
                states = self.grid(key, translator.partitions_def(domain))
                wanted = states if partitions is None else partitions
                return {part: states[part] for part in wanted if part in states}
        return {}


def _lacks(cache: Any, definition: dg.PartitionsDefinition, made: Mapping[str, int]) -> bool:
    """Whether Dagster's cache is newer than a materialization, and doesn't count it."""
    try:
        counted = cache.deserialize_materialized_partition_subsets(definition)
    except (AttributeError, dg.DagsterError, LookupError, TypeError, ValueError):
        return False  # the asset had other partitions: Dagster will count again
    return any(
        number <= cache.latest_storage_id and part is not None and part not in counted
        for part, number in made.items()
    )


def in_batches(items: Sequence[Any] | None) -> Iterator[Any]:
    """Yield pieces of a list that fit a statement; for None, None."""
    if items is None:
        yield None
        return
    for start in range(0, len(items), PARTITIONS_PER_STATEMENT):
        yield items[start : start + PARTITIONS_PER_STATEMENT]


def _version(event: dg.AssetMaterialization) -> str | None:
    """Return the generation of a materialization, or else its data version."""
    version = (event.tags or {}).get(VERSION_TAG)
    if version is None or version.isdecimal():
        return version
    told = event.metadata.get(GENERATION_ENTRY)
    return version if told is None else str(told.value)


def _wiped(record: Any) -> str:
    details = getattr(record.asset_entry, "asset_details", None)
    return str(getattr(details, "last_wipe_timestamp", ""))
