"""The materialization that Dagster gets for a READY chunk: its generation, and the evidence."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import quote

import dagster as dg

from ..errors import DataflowError
from ..explain.answers import ChunkEvidence, recorded_evidence
from ..model import Fact
from ..runner.produce import Produced, Result, evidence_of
from ..spark.schema import columns_of
from ..store.catalog import TODAY
from ..store.operations import EXTERNAL
from ..store.overview import Truth
from ..util.text import typed
from .translator import DataflowTranslator

VERSION_TAG = "dagster/data_version"
"""The tag by which Dagster compares data: see `data_version`."""

GENERATION_ENTRY = "opendataflow/generation"
"""The metadata that tells productions of a chunk apart; 0 for a row that was written by hand.
Dagster indexes no tag except the data version."""

CODE_TAG = "dagster/code_version"
"""The tag without which Dagster ignores the tags about inputs."""

INPUT_TAG, EVENT_TAG = "dagster/input_data_version", "dagster/input_event_pointer"
"""The prefixes of tags about an input, before its key: its version, and its event."""

UNKNOWN, NO_POINTER = "UNKNOWN", "NULL"
"""The version and the event of an input if nobody knows what was consumed: Dagster then calls no
other version newer."""

RESUBMIT_TAG = "opendataflow/resubmit"
"""The tag of a run that produces READY and FAILED chunks again."""

MAX_VALUE_CHARACTERS = 500
"""The length to which values are cut that Dagster can't show as they are."""

RECORDED = (
    "location",
    "rows",
    "bytes",
    "fingerprint",
    "inputs",
    "schema",
    "validated",
    "checks",
    "metadata",
    "code",
)
"""The columns of a chunk's record in a row of `produce.outputs`, after its status."""

METADATA_TYPES = {
    "text": dg.MetadataValue.text,
    "url": dg.MetadataValue.url,
    "path": dg.MetadataValue.path,
    "notebook": dg.MetadataValue.notebook,
    "json": dg.MetadataValue.json,
    "md": dg.MetadataValue.md,
    "float": dg.MetadataValue.float,
    "int": dg.MetadataValue.int,
    "bool": dg.MetadataValue.bool,
    "asset": dg.MetadataValue.asset,
    "timestamp": dg.MetadataValue.timestamp,
}
"""How Dagster shows the entries to which Dagster Pipes gives a type."""

Log = dg.UrlMetadataValue


class EventSource(NamedTuple):
    """An input of a chunk: the data version that was consumed, and the number of its event."""

    key: dg.AssetKey
    version: str = UNKNOWN
    event: int | None = None

    def tags(self) -> dict[str, str]:
        name = self.key.to_user_string()
        event = NO_POINTER if self.event is None else str(self.event)
        return {f"{INPUT_TAG}/{name}": self.version, f"{EVENT_TAG}/{name}": event}


def data_version(fingerprint: str | None, generation: int | None) -> str:
    """Return what identifies the data of a chunk: its fingerprint, or else its generation.

    A version that is a number is a generation.
    """
    if fingerprint and fingerprint.isdecimal():
        return f"fingerprint {fingerprint}"
    return fingerprint or str(generation or 0)


class OutsideOptions(NamedTuple):
    """What happens to the runs that show work done outside Dagster.

    Example:
        build_definitions(flow="flow.yml", outside=OutsideOptions(alerts=True, keep_days=7))
    """

    alerts: bool = False
    """Whether run failure sensors are notified of chunks that failed outside."""
    keep_days: float = 30
    """How long these runs are kept."""
    keep_runs: int = 10_000
    """How many of them are kept."""


def page_of(asset: dg.AssetKey, partition: str) -> str:
    """Return the address of a partition's page in Dagster's UI."""
    path = "/".join(quote(part, safe="") for part in asset.path)
    return f"/assets/{path}?view=partitions&partition={quote(partition, safe='')}"


def run_log(runid: str) -> Log:
    """Return a link to the log of a run."""
    return dg.MetadataValue.url(f"/runs/{runid}")


def produced_event(
    produced: Produced,
    fact: Fact,
    partition: str,
    translator: DataflowTranslator,
    log: Log,
    sources: Sequence[EventSource] | None = None,
    code_version: str | None = None,
) -> dg.AssetMaterialization:
    """Return the event of a dataset's chunk that this run has just produced."""
    evidence = evidence_of(produced, fact.datasetid)
    entries = evidence.metadata() | {"seconds": round(produced.seconds, 3), "log": log}
    entries |= _ask_why(produced.claim.jobid, fact.dataid)
    of_function = produced.results.get(fact.datasetid, Result()).metadata
    tags = _tags(evidence, sources, code_version)
    return _materialization(evidence, partition, translator, entries, tags, of_function)


def skipped_event(
    row: tuple,
    dataid: str,
    partition: str,
    translator: DataflowTranslator,
    log: Log,
    sources: Sequence[EventSource] | None = None,
    code_version: str | None = None,
    stale: str = "",
) -> dg.AssetMaterialization:
    """Return the event of a dataset's chunk that was READY already, from its `produce.outputs` row.

    A skipped chunk is logged as materialized too: Dagster planned a materialization for it when the
    run started. Without the event, the partition turns red at the end of the run, and a backfill
    doesn't launch downstream of it. The event has the versions of the chunk's production, so a
    stale chunk stays stale in Dagster; `stale` says why.
    """
    datasetid, jobid, _, generation, record = read_output(row)
    evidence = recorded_evidence(datasetid, jobid, generation, record)
    entries = {
        "skipped": True,
        "force": "READY already, so it wasn't produced again. To force it, launch with the tag "
        f'{RESUBMIT_TAG}: "true", or run `odf resubmit {typed(jobid, dataid)}`.',
        "seconds": 0.0,
        "log": log,
    }
    entries |= evidence.metadata() | _ask_why(jobid, dataid)
    if stale:
        entries |= {"stale": True, "right": stale}
    tags = _tags(evidence, sources, code_version)
    told = _recorded_metadata(record)
    return _materialization(evidence, partition, translator, entries, tags, told)


def read_output(row: tuple) -> tuple[str, str, str, int | None, dict[str, Any]]:
    """Return dataset, job, status, generation and record of a row of `produce.outputs`."""
    datasetid, jobid, word, generation, *recorded = row
    return datasetid, jobid, word, generation, dict(zip(RECORDED, recorded, strict=True))


def recorded_event(
    datasetid: str,
    dataid: str,
    truth: Truth,
    record: Mapping[str, Any] | None,
    translator: DataflowTranslator,
    sources: Sequence[EventSource] | None = None,
    code_version: str | None = None,
) -> dg.AssetMaterialization:
    """Return the event of a READY chunk that no Dagster run produced, from its record."""
    record = record or {}
    evidence = recorded_evidence(datasetid, truth.jobid, truth.generation, record)
    entries = {"job": truth.jobid, "at": _moment(record.get("at"))} | evidence.metadata()
    entries |= _ask_why(truth.jobid, dataid)
    return _materialization(
        evidence,
        translator.partition_key(dataid),
        translator,
        entries,
        _tags(evidence, sources, code_version),
        _recorded_metadata(record),
    )


def _moment(at: Any) -> Any:
    """Return a time of the tables that Dagster shows in the reader's time zone."""
    if isinstance(at, str):
        with suppress(ValueError):
            at = datetime.fromisoformat(at)
    if not isinstance(at, datetime):
        return at
    return dg.MetadataValue.timestamp(at if at.tzinfo else at.replace(tzinfo=UTC))


def _ask_why(jobid: str, dataid: str) -> dict[str, str]:
    """Return the command that explains a chunk; a chunk that no job produced has none."""
    return {"why": f"odf why {typed(jobid, dataid)}"} if jobid not in ("", EXTERNAL) else {}


def _upstream(
    evidence: ChunkEvidence, partition: str, translator: DataflowTranslator
) -> dict[str, dg.UrlMetadataValue]:
    """Return a link for each input, to the page of the chunk that was consumed."""
    return {
        f"upstream {source.datasetid}": dg.MetadataValue.url(
            page_of(translator.asset_key(source.datasetid), partition)
        )
        for source in evidence.consumed
        if source.datasetid != TODAY
    }


def _tags(
    evidence: ChunkEvidence, sources: Sequence[EventSource] | None, code_version: str | None
) -> dict[str, str]:
    """Return the versions of a chunk and its inputs; without `sources`, of the chunk alone."""
    generation = evidence.generation
    tags = {VERSION_TAG: data_version(evidence.fingerprint, generation)}
    if sources is None:
        return tags
    tags[CODE_TAG] = code_version or evidence.code or UNKNOWN
    for source in sources:
        tags |= source.tags()
    return tags


def _recorded_metadata(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata that a job reported for a chunk, from its record."""
    with suppress(ValueError):  # other programs may have written invalid JSON
        found = json.loads(record.get("metadata") or "{}")
        return found if isinstance(found, dict) else {}
    return {}


def _dagster_value(value: Any) -> Any:
    """Convert an entry of metadata; one that Dagster Pipes wrote with a type gets that type."""
    if isinstance(value, dict) and set(value) == {"type", "raw_value"}:
        with suppress(Exception):
            return METADATA_TYPES[value["type"]](value["raw_value"])
        return value["raw_value"]
    return value


def prefixed(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return metadata under our prefix, so that it can't collide with a function's own."""
    return {f"opendataflow/{name}": value for name, value in entries.items()}


def _materialization(
    evidence: ChunkEvidence,
    partition: str,
    translator: DataflowTranslator,
    entries: Mapping[str, Any],
    tags: Mapping[str, str],
    of_function: Mapping[str, Any] | None = None,
) -> dg.AssetMaterialization:
    asset = translator.asset_key(evidence.datasetid)
    links = _upstream(evidence, partition, translator)
    # What isn't known is left out: a page would say "null".
    ours = prefixed(
        {name: value for name, value in {**entries, **links}.items() if value is not None}
    )
    if evidence.rows is not None:
        ours["dagster/row_count"] = evidence.rows
    with suppress(DataflowError):  # other programs may have recorded an invalid schema
        if evidence.schema:
            columns = [dg.TableColumn(name, kind) for name, kind in columns_of(evidence.schema)]
            ours["dagster/column_schema"] = dg.TableSchema(columns)
    theirs = {name: _dagster_value(value) for name, value in (of_function or {}).items()}
    try:
        return dg.AssetMaterialization(
            asset, metadata={**theirs, **ours}, partition=partition, tags=tags
        )
    except Exception:
        # The function returned a value that Dagster can't show. The chunk is READY regardless, and
        # an error here would turn its partition red.
        texts = {str(name): str(value)[:MAX_VALUE_CHARACTERS] for name, value in theirs.items()}
        return dg.AssetMaterialization(
            asset, metadata={**texts, **ours}, partition=partition, tags=tags
        )
