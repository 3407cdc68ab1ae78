"""What Dagster is told of a chunk that is READY: its generation, and the evidence."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import dagster as dg

from ..errors import DataflowError
from ..explain.answers import Consumed, answers_of_chunk
from ..model import Fact
from ..runner.produce import Produced, Result, five_answers
from ..spark.schema import columns_of
from ..store.overview import Truth
from ..util.text import typed
from .translator import DataflowTranslator

VERSION_TAG = "dagster/data_version"
"""What tells one production of a chunk from another: its generation, or 0 for a hand-made row."""

AGAIN = "opendataflow/resubmit"
"""The tag of a run that makes again what is READY or has failed."""

Log = dg.UrlMetadataValue

ALWAYS = ("rows", "location")
"""What is shown also when it isn't known."""


def made(
    produced: Produced, fact: Fact, partition: str, translator: DataflowTranslator, log: Log
) -> dg.AssetMaterialization:
    """A dataset's chunk that a run has just made."""
    claim = produced.claim
    inputs = produced.chunk.inputs if produced.chunk else {}
    told: dict[str, Any] = {
        "generation": claim.generation,
        "rows": fact.rows,
        "bytes": fact.bytes,
        "seconds": round(produced.seconds, 3),
        "fingerprint": fact.fingerprint,
        "inputs": {each: place.generation for each, place in inputs.items()},
        **five_answers(produced, fact.datasetid),
        "log": log,
    }
    more = produced.results.get(fact.datasetid, Result()).metadata
    return _materialization(
        translator.asset_key(fact.datasetid), partition, claim.generation, told, more, fact.schema
    )


def skipped(
    row: tuple, dataid: str, partition: str, translator: DataflowTranslator, log: Log
) -> dg.AssetMaterialization:
    """A dataset's chunk that was READY already, by its row of `produce.outputs`.

    A row that no claim has made is of generation 0.
    """
    datasetid, maker, _, generation, *recorded = row
    names = ("location", "rows", "bytes", "fingerprint", "inputs", "schema", "validated", "checks")
    more = {
        "skipped": True,
        "force": "READY already, so it wasn't made again. To force it, launch with the tag "
        f'{AGAIN}: "true", or run `odf resubmit {typed(maker, dataid)}`.',
        "seconds": 0.0,
        "log": log,
    }
    known: dict[str, Any] = dict(zip(names, recorded, strict=True))
    return _recorded(datasetid, partition, maker, generation, known, translator, more)


def elsewhere(
    datasetid: str,
    dataid: str,
    truth: Truth,
    fact: Mapping[str, Any] | None,
    translator: DataflowTranslator,
) -> dg.AssetMaterialization:
    """A dataset's READY chunk that no Dagster run has told of, with what the tables know of it."""
    known = dict(fact or {})
    more = {"job": truth.jobid, "at": known.get("at")}
    partition = translator.partition_key(dataid)
    return _recorded(datasetid, partition, truth.jobid, truth.generation, known, translator, more)


def _recorded(
    datasetid: str,
    partition: str,
    maker: str,
    generation: int | None,
    known: Mapping[str, Any],
    translator: DataflowTranslator,
    more: Mapping[str, Any],
) -> dg.AssetMaterialization:
    """A READY chunk by what was recorded when it was made."""
    inputs: dict[str, int | None] = json.loads(known["inputs"]) if known.get("inputs") else {}
    judged = known.get("validated")
    told = {
        **more,
        "generation": generation or 0,
        "rows": known.get("rows"),
        "bytes": known.get("bytes"),
        "fingerprint": known.get("fingerprint"),
        "inputs": inputs,
        **answers_of_chunk(
            f"{datasetid} is READY, made by {maker}",
            [Consumed(each, number) for each, number in inputs.items()],
            validated=None if judged is None else bool(judged),
            checks=known.get("checks"),
            location=known.get("location"),
        ),
    }
    return _materialization(
        translator.asset_key(datasetid), partition, generation or 0, told, {}, known.get("schema")
    )


def _materialization(
    asset: dg.AssetKey,
    partition: str,
    generation: int,
    told: Mapping[str, Any],
    more: Mapping[str, Any],
    schema: str | None,
) -> dg.AssetMaterialization:
    ours = {
        f"opendataflow/{name}": value
        for name, value in told.items()
        if value is not None or name in ALWAYS
    }
    if told["rows"] is not None:
        ours["dagster/row_count"] = told["rows"]
    with suppress(DataflowError):  # what others have recorded may be no schema
        if schema:
            columns = [dg.TableColumn(name, kind) for name, kind in columns_of(schema)]
            ours["dagster/column_schema"] = dg.TableSchema(columns)
    tags = {VERSION_TAG: str(generation)}
    try:
        return dg.AssetMaterialization(
            asset, metadata={**more, **ours}, partition=partition, tags=tags
        )
    except Exception:  # what the function told can't be shown; the chunk is READY all the same
        texts = {str(name): str(value)[:500] for name, value in dict(more).items()}
        return dg.AssetMaterialization(
            asset, metadata={**texts, **ours}, partition=partition, tags=tags
        )
