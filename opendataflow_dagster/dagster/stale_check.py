"""The asset check that says how many chunks of a dataset are stale, as `odf resubmit --stale` finds
them."""

from collections.abc import Iterable, Iterator

import dagster as dg

from ..explain.answers import recorded_inputs
from ..model import READY
from ..store.overview import facts, truths
from ..store.store import Store
from ..util.text import first_of, printable, typed
from .checks import ChunkCheck
from .translator import DataflowTranslator

STALE_CHECK = "not_stale"
"""The name of the check."""

MAX_COUNTED_CHUNKS = 1000
"""Up to how many stale chunks are counted."""

MAX_NAMED_CHUNKS = 10
"""How many of them are named."""


def stale_check(datasetid: str) -> ChunkCheck:
    """The check as an asset shows it: the sensor and the runs of its job tell its answer."""
    about = "No chunk was made from data that has been replaced since, see `odf why`."
    return ChunkCheck(STALE_CHECK, bool, datasetid, blocking=False, description=about)


def stale_evaluations(
    store: Store, jobid: str, translator: DataflowTranslator
) -> Iterator[dg.AssetCheckEvaluation]:
    """The answer for each dataset that a job writes."""
    rows = store.db.run("moves.stale", jobid=jobid, most=MAX_COUNTED_CHUNKS)
    for datasetid in store.plan(jobid).outputs:
        yield _evaluation(
            jobid, datasetid, _stale(store, jobid, datasetid, [row[1] for row in rows]), translator
        )


def _stale(store: Store, jobid: str, datasetid: str, dataids: Iterable[str]) -> list[str]:
    """Those chunks that the job made of something known: of others nobody can tell."""
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
    told = f"{count}{' or more' if count >= MAX_COUNTED_CHUNKS else ''}"
    named = ", ".join(first_of([printable(dataid) for dataid in stale], MAX_NAMED_CHUNKS))
    chunks = f"{told} chunk{'s are' if count > 1 else ' is'} stale: {named}"
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
