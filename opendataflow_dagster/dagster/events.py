"""The materialization that Dagster gets of a READY chunk: its generation, and the evidence."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import dagster as dg

from ..errors import DataflowError
from ..explain.answers import ChunkEvidence, recorded_evidence
from ..model import Fact
from ..runner.produce import Produced, Result, evidence_of
from ..spark.schema import columns_of
from ..store.overview import Truth
from ..util.text import typed
from .translator import DataflowTranslator

VERSION_TAG = "dagster/data_version"
"""The tag that tells one production of a chunk from another: its generation, or 0 for a row that
somebody wrote by hand."""

RESUBMIT_TAG = "opendataflow/resubmit"
"""The tag of a run that produces again what is READY or has failed."""

SHOWN_WHEN_UNKNOWN = ("rows", "location")
"""Entries that a materialization has also when their value is unknown."""

MAX_VALUE_CHARACTERS = 500
"""Length to which a value is cut that Dagster can't take as it is."""

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


def run_log(runid: str) -> Log:
    """A link to the log of a run."""
    return dg.MetadataValue.url(f"/runs/{runid}")


def produced_event(
    produced: Produced, fact: Fact, partition: str, translator: DataflowTranslator, log: Log
) -> dg.AssetMaterialization:
    """The event of a dataset's chunk that this run has just produced."""
    evidence = evidence_of(produced, fact.datasetid)
    entries = evidence.metadata() | {"seconds": round(produced.seconds, 3), "log": log}
    of_function = produced.results.get(fact.datasetid, Result()).metadata
    return _materialization(evidence, partition, translator, entries, of_function)


def skipped_event(
    row: tuple, dataid: str, partition: str, translator: DataflowTranslator, log: Log
) -> dg.AssetMaterialization:
    """The event of a dataset's chunk that was READY already, by its row of `produce.outputs`.

    A skipped chunk is logged as materialized too: Dagster planned a materialization for it when the
    run started. Without the event the partition turns red at the end of the run, and a backfill
    doesn't launch what is downstream of it.
    """
    datasetid, jobid, _, generation, *recorded = row
    record: dict[str, Any] = dict(zip(RECORDED, recorded, strict=True))
    evidence = recorded_evidence(datasetid, jobid, generation, record)
    entries = {
        "skipped": True,
        "force": "READY already, so it wasn't made again. To force it, launch with the tag "
        f'{RESUBMIT_TAG}: "true", or run `odf resubmit {typed(jobid, dataid)}`.',
        "seconds": 0.0,
        "log": log,
    }
    entries |= evidence.metadata()
    return _materialization(evidence, partition, translator, entries, _recorded_metadata(record))


def recorded_event(
    datasetid: str,
    dataid: str,
    truth: Truth,
    record: Mapping[str, Any] | None,
    translator: DataflowTranslator,
) -> dg.AssetMaterialization:
    """The event of a READY chunk that no run in Dagster produced, by its record in the tables."""
    record = record or {}
    evidence = recorded_evidence(datasetid, truth.jobid, truth.generation, record)
    entries = {"job": truth.jobid, "at": record.get("at")} | evidence.metadata()
    return _materialization(
        evidence,
        translator.partition_key(dataid),
        translator,
        entries,
        _recorded_metadata(record),
    )


def _recorded_metadata(record: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata that a job told of a chunk, as its record has it."""
    with suppress(ValueError):  # other programs may have written what is no JSON
        found = json.loads(record.get("metadata") or "{}")
        return found if isinstance(found, dict) else {}
    return {}


def _dagster_value(value: Any) -> Any:
    """An entry of metadata; one that Dagster Pipes wrote with its type becomes of that type."""
    if isinstance(value, dict) and set(value) == {"type", "raw_value"}:
        with suppress(Exception):
            return METADATA_TYPES[value["type"]](value["raw_value"])
        return value["raw_value"]
    return value


def prefixed(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata under our prefix, so that it can't collide with what a function returns."""
    return {f"opendataflow/{name}": value for name, value in entries.items()}


def _materialization(
    evidence: ChunkEvidence,
    partition: str,
    translator: DataflowTranslator,
    entries: Mapping[str, Any],
    of_function: Mapping[str, Any] | None = None,
) -> dg.AssetMaterialization:
    asset = translator.asset_key(evidence.datasetid)
    ours = prefixed(
        {
            name: value
            for name, value in entries.items()
            if value is not None or name in SHOWN_WHEN_UNKNOWN
        }
    )
    if evidence.rows is not None:
        ours["dagster/row_count"] = evidence.rows
    with suppress(DataflowError):  # other programs may have recorded what is no schema
        if evidence.schema:
            columns = [dg.TableColumn(name, kind) for name, kind in columns_of(evidence.schema)]
            ours["dagster/column_schema"] = dg.TableSchema(columns)
    theirs = {name: _dagster_value(value) for name, value in (of_function or {}).items()}
    tags = {VERSION_TAG: str(evidence.generation)}
    try:
        return dg.AssetMaterialization(
            asset, metadata={**theirs, **ours}, partition=partition, tags=tags
        )
    except Exception:
        # The function returned a value that Dagster can't show. The chunk is READY all the same,
        # and an error here would make its partition red.
        texts = {str(name): str(value)[:MAX_VALUE_CHARACTERS] for name, value in theirs.items()}
        return dg.AssetMaterialization(
            asset, metadata={**texts, **ours}, partition=partition, tags=tags
        )
