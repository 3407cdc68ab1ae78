"""The inputs of chunks, as the data versions with which Dagster detects stale data.

Dagster compares the data version of an input's newest event with that of the event to which a
materialization points. So each materialization of ours points to the events of its inputs. The
check of a dataset says how many of its chunks are stale.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import dagster as dg

from ..explain.answers import recorded_inputs
from ..model import READY, Fact
from ..runner.produce import Produced
from ..store.catalog import Catalog, read_catalog
from ..store.overview import Truth, facts, truths
from ..store.store import Store
from ..util.text import first_of, printable, typed
from .checks import ChunkCheck
from .events import (
    CODE_TAG,
    GENERATION_ENTRY,
    VERSION_TAG,
    EventSource,
    data_version,
    produced_event,
    read_output,
    recorded_event,
    run_log,
    skipped_event,
)
from .translator import DataflowTranslator, described, partition_keys

NO_SUCH_EVENT = -1
"""Points before all events: any version that Dagster finds later differs from it."""

RECENT_EVENTS = 20
"""How many of the newest events of an input's chunk a run searches for the version it consumed."""

STALE_CHECK = "not_stale"
"""The check that says how many chunks of a dataset are stale, as `odf resubmit --stale` finds."""

MAX_COUNTED_CHUNKS = 1000
"""The most stale chunks that are counted."""

MAX_NAMED_CHUNKS = 10
"""The most stale chunks that are named."""

Context = dg.AssetExecutionContext | dg.OpExecutionContext

Generations = Mapping[str, int | None]
"""The generation of each input that a chunk was produced from."""


class EventLog(Protocol):
    """Where Dagster keeps the materializations of chunks."""

    def numbers(self, key: dg.AssetKey, versions: Mapping[str, str]) -> dict[str, int]:
        """Return the newest materialization of each partition that has the given data version."""
        ...

    def report(self, materializations: Sequence[dg.AssetMaterialization]) -> None:
        """Store materializations of one asset that no run logs."""
        ...


class RunLog:
    """The events of a Dagster instance, as a run may read and write them.

    The newest events of the run's own partitions are read in one query.
    """

    def __init__(self, instance: dg.DagsterInstance, partitions: Sequence[str] = ()) -> None:
        self.instance, self.partitions = instance, partitions
        self._read: dict[dg.AssetKey, dict[tuple[str, str], int]] = {}

    def numbers(self, key: dg.AssetKey, versions: Mapping[str, str]) -> dict[str, int]:
        if key not in self._read:
            self._read[key] = self._newest(key)
        known, found = self._read[key], {}
        for part, version in versions.items():
            number = known.get((part, version)) or self._number(key, part, version)
            if number is not None:
                found[part] = number
        return found

    def _newest(self, key: dg.AssetKey) -> dict[tuple[str, str], int]:
        """Return the newest events of the run's partitions, by partition and version."""
        found: dict[tuple[str, str], int] = {}
        if len(self.partitions) > 1:
            wanted = dg.AssetRecordsFilter(key, asset_partitions=list(self.partitions))
            limit = 2 * len(self.partitions)
            for record in self.instance.fetch_materializations(wanted, limit).records:
                event = record.asset_materialization
                if event and event.partition and (version := (event.tags or {}).get(VERSION_TAG)):
                    found.setdefault((event.partition, version), record.storage_id)
        return found

    def _number(self, key: dg.AssetKey, partition: str, version: str) -> int | None:
        wanted = dg.AssetRecordsFilter(key, asset_partitions=[partition])
        for limit in (1, RECENT_EVENTS):  # it is nearly always the newest one
            for record in self.instance.fetch_materializations(wanted, limit).records:
                event = record.asset_materialization
                if event and (event.tags or {}).get(VERSION_TAG) == version:
                    return record.storage_id
        return None

    def report(self, materializations: Sequence[dg.AssetMaterialization]) -> None:
        for event in materializations:
            self.instance.report_runless_asset_event(observation(event))
            self.instance.report_runless_asset_event(event)


class Lineage:
    """Finds the events of the inputs that chunks were produced from."""

    def __init__(
        self,
        store: Store,
        translator: DataflowTranslator,
        log: EventLog,
        catalog: Catalog | None = None,
    ) -> None:
        self.store, self.translator, self.log = store, translator, log
        self._given = catalog

    @cached_property
    def catalog(self) -> Catalog:
        return self._given or read_catalog(self.store)

    def sources(
        self, reads: Iterable[str], chunks: Mapping[str, Generations | None]
    ) -> dict[str, list[EventSource]]:
        """Return the inputs of chunks, by dataid; None if they are unknown.

        Inputs that the job reads only since then are omitted, so that Dagster calls them new.
        """
        found: dict[str, list[EventSource]] = {dataid: [] for dataid in chunks}
        for datasetid in reads:
            key = self.translator.asset_key(datasetid)
            consumed: dict[str, int] = {}
            for dataid, generations in chunks.items():
                if generations is None:
                    found[dataid].append(EventSource(key))
                elif datasetid in generations:
                    consumed[dataid] = generations[datasetid] or 0
            for dataid, source in self._of_input(datasetid, key, consumed):
                found[dataid].append(source)
        return found

    def events(
        self,
        datasetid: str,
        chunks: Mapping[str, Truth],
        code_version: str | None = None,
        records: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> list[dg.AssetMaterialization]:
        """Return the events of READY chunks of a dataset, by their records in the tables."""
        if records is None:
            records = facts(self.store, datasetid, chunks)
        maker, reads = self.flow(datasetid)
        sources = self.sources(
            reads,
            {
                dataid: recorded_inputs(records.get(dataid, {})) if truth.jobid == maker else None
                for dataid, truth in chunks.items()
            },
        )
        return [
            recorded_event(
                datasetid,
                dataid,
                truth,
                records.get(dataid),
                self.translator,
                sources[dataid],
                code_version,
            )
            for dataid, truth in chunks.items()
        ]

    def flow(self, datasetid: str) -> tuple[str, list[str]]:
        """Return the job of a dataset's asset, and the inputs that Dagster draws for it."""
        for jobid in sorted(self.catalog.producers(datasetid)):
            plan = self.catalog.jobs[jobid]
            if not plan.flaw:
                return jobid, [
                    source for source in plan.reads if not self.catalog.in_circle(jobid, source)
                ]
        return "", []

    def _of_input(
        self, datasetid: str, key: dg.AssetKey, consumed: Mapping[str, int]
    ) -> Iterator[tuple[str, EventSource]]:
        """Return the events of one input of chunks, by dataid."""
        if not consumed:
            return
        were = {dataid: Truth(READY, "", number) for dataid, number in consumed.items()}
        records = facts(self.store, datasetid, were)
        parts = {dataid: self.translator.partition_key(dataid) for dataid in consumed}
        versions = {
            parts[dataid]: data_version(records.get(dataid, {}).get("fingerprint"), number)
            for dataid, number in consumed.items()
        }
        numbers = self.log.numbers(key, versions)
        unknown = {
            dataid: consumed[dataid] for dataid, part in parts.items() if part not in numbers
        }
        if unknown and self._tell(datasetid, unknown):
            numbers = self.log.numbers(key, versions)
        for dataid, part in parts.items():
            yield dataid, EventSource(key, versions[part], numbers.get(part, NO_SUCH_EVENT))

    def _tell(self, datasetid: str, consumed: Mapping[str, int]) -> bool:
        """Report those chunks that are still as consumed; return whether there are any.

        They became READY a moment ago, and Dagster has no event of them yet. An event later than
        that of a chunk produced from them would make that chunk stale.
        """
        current = {
            dataid: truth
            for dataid, truth in truths(self.store, datasetid, consumed).items()
            if truth.status == READY and (truth.generation or 0) == consumed[dataid]
        }
        if current:
            self.log.report(self.events(datasetid, current))
        return bool(current)


class ChunkEvents:
    """The events that a step logs for its chunks, with the versions of their inputs."""

    def __init__(self, context: Context, store: Store, translator: DataflowTranslator) -> None:
        self.context, self.store, self.translator = context, store, translator
        self.log = run_log(context.run.run_id)
        partitions = context.partition_keys if context.has_partition_key_range else ()
        self.lineage = Lineage(store, translator, RunLog(context.instance, partitions))

    def is_shown(self, dataid: str, key: str) -> bool:
        """Whether a chunk has a partition: else Dagster could count its event to another one."""
        definition = self.context.assets_def.partitions_def
        if isinstance(definition, dg.DynamicPartitionsDefinition | None):
            return True
        if not (found := key in partition_keys(definition)):
            self.context.log.warning(
                f"{printable(dataid)} has no partition in {described(definition)}: it isn't shown."
            )
        return found

    def produced(self, produced: Produced, fact: Fact, key: str) -> dg.AssetMaterialization:
        """Return the event of a dataset's chunk that this run has just produced."""
        inputs = produced.chunk.inputs.values() if produced.chunk else None
        consumed = None if inputs is None else {each.datasetid: each.generation for each in inputs}
        spec = self._spec(fact.datasetid)
        sources = self._sources(produced.claim.jobid, fact.dataid, consumed, spec)
        return produced_event(
            produced, fact, key, self.translator, self.log, sources, spec.code_version
        )

    def skipped(
        self, rows: Iterable[tuple], jobid: str, dataid: str, key: str, stale: str
    ) -> Iterator[dg.AssetMaterialization]:
        """The events of a chunk that is READY already, from its rows of `produce.outputs`."""
        for row in rows:
            datasetid, maker, _, generation, record = read_output(row)
            consumed = recorded_inputs(record) if maker == jobid else None
            spec = self._spec(datasetid)
            sources = self._sources(jobid, dataid, consumed, spec)
            code = spec.code_version and self._code(spec.key, key, generation, spec.code_version)
            yield skipped_event(row, dataid, key, self.translator, self.log, sources, code, stale)

    def _sources(
        self, jobid: str, dataid: str, consumed: Generations | None, spec: dg.AssetSpec
    ) -> list[EventSource]:
        """Return the inputs that Dagster draws, as a chunk consumed them."""
        drawn = {dep.asset_key for dep in spec.deps}
        reads = [
            datasetid
            for datasetid in self.store.plan(jobid).reads
            if self.translator.asset_key(datasetid) in drawn
        ]
        find = partial(self.lineage.sources, reads, {dataid: consumed})
        return self.store.db.insist(find)[0][dataid]

    def _code(self, asset: dg.AssetKey, key: str, generation: int | None, version: str) -> str:
        """The code version that an earlier run reported for a generation; else the asset's."""
        wanted = dg.AssetRecordsFilter(asset, asset_partitions=[key])
        for record in self.context.instance.fetch_materializations(wanted, 1).records:
            event = record.asset_materialization
            told = event.metadata.get(GENERATION_ENTRY) if event else None
            if event and told and told.value == (generation or 0):
                return (event.tags or {}).get(CODE_TAG, version)
        return version

    def _spec(self, datasetid: str) -> dg.AssetSpec:
        """Return the asset of a dataset that this step produces."""
        return self.context.assets_def.get_asset_spec(self.translator.asset_key(datasetid))


def observation(event: dg.AssetMaterialization) -> dg.AssetObservation:
    """An observation: for assets that nothing here produces, Dagster compares observations."""
    return dg.AssetObservation(
        event.asset_key,
        description="Lets Dagster tell which downstream chunks are stale.",
        partition=event.partition,
        tags={VERSION_TAG: (event.tags or {})[VERSION_TAG]},
    )


def stale_check(datasetid: str) -> ChunkCheck:
    """Return the check of an asset; the sensor and the runs of its job report its result."""
    about = "No chunk was produced from data that was replaced since. See `odf why`."
    return ChunkCheck(STALE_CHECK, bool, datasetid, blocking=False, description=about)


def stale_evaluations(
    store: Store, jobid: str, translator: DataflowTranslator
) -> Iterator[dg.AssetCheckEvaluation]:
    """Return the result for each dataset that a job writes."""
    rows = store.db.run("moves.stale", jobid=jobid, most=MAX_COUNTED_CHUNKS)
    for datasetid in store.plan(jobid).outputs:
        yield _evaluation(
            jobid, datasetid, _stale(store, jobid, datasetid, [row[1] for row in rows]), translator
        )


def _stale(store: Store, jobid: str, datasetid: str, dataids: Iterable[str]) -> list[str]:
    """Return the chunks whose inputs are known: others can't be recognized as stale."""
    mine = {
        dataid: truth
        for dataid, truth in truths(store, datasetid, dataids).items()
        if truth.status == READY and truth.jobid == jobid
    }
    records = facts(store, datasetid, mine) if mine else {}
    return sorted(dataid for dataid in mine if recorded_inputs(records.get(dataid, {})) is not None)


def _evaluation(
    jobid: str, datasetid: str, stale: list[str], translator: DataflowTranslator
) -> dg.AssetCheckEvaluation:
    count = len(stale)
    number = f"{count}{' or more' if count >= MAX_COUNTED_CHUNKS else ''}"
    named = ", ".join(first_of([printable(dataid) for dataid in stale], MAX_NAMED_CHUNKS))
    chunks = f"{number} chunk{'s are' if count > 1 else ' is'} stale: {named}"
    line = f"{chunks}. Run: odf resubmit {typed(jobid)} --stale" if stale else "No chunk is stale."
    return dg.AssetCheckEvaluation(
        asset_key=translator.asset_key(datasetid),
        check_name=STALE_CHECK,
        passed=not stale,
        severity=dg.AssetCheckSeverity.WARN,
        description=line,
        metadata={"opendataflow/stale": count},
        blocking=False,
    )
