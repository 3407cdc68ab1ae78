"""What made the changes of chunks: executions, each of one process, one transaction, some items."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from ..model import PENDING, RUNNING, WORDS, read_status
from .overview import Truth
from .store import Store

EARLIER = "earlier"
"""The execution of a job's changes from before the log told executions."""


MAX_CHANGES = 50_000
"""Changes of an execution that are looked at, the newest: a person may write millions at once."""


class Execution(NamedTuple):
    """What one process, transaction or other origin did to the chunks of one job."""

    name: str
    jobid: str


class Origin(NamedTuple):
    """Where the status of a chunk comes from."""

    execution: Execution
    who: str
    why: str


class ExecutionOutcome(NamedTuple):
    """How an execution left one chunk of a dataset; no status: the chunk is gone."""

    datasetid: str
    dataid: str
    status: str | None
    generation: int | None
    at: float
    who: str
    why: str
    acted: bool
    """Whether the execution had it at another status than PENDING."""


def origins(store: Store, datasetid: str, chunks: Mapping[str, Truth]) -> dict[str, Origin]:
    """What brought some chunks of a dataset to their status; by dataid."""
    keys = [{"dataid": dataid, "jobid": truth.jobid} for dataid, truth in chunks.items()]
    rows = store.db.run("executions.latest", datasetid=datasetid, chunks=json.dumps(keys))
    return {
        dataid: Origin(Execution(execution or EARLIER, jobid), who or "", why or "")
        for dataid, jobid, execution, who, why in rows
    }


def outcomes(store: Store, execution: Execution) -> list[ExecutionOutcome]:
    """How an execution left each chunk that it changed, in the order of the last changes."""
    name, jobid = execution
    if name == EARLIER:
        rows = store.db.run("executions.earlier", jobid=jobid)
    else:
        rows = store.db.run("executions.changes", execution=name, jobid=jobid, most=MAX_CHANGES)
        rows.reverse()
    found: dict[tuple[str, str], ExecutionOutcome] = {}
    for datasetid, dataid, before, after, generation, at, who, why in rows:
        earlier = found.pop((datasetid, dataid), None)
        status = None if after is None else read_status(after)
        acted = (
            status not in (None, PENDING) or before == RUNNING or bool(earlier and earlier.acted)
        )
        found[datasetid, dataid] = ExecutionOutcome(
            datasetid, dataid, status, generation, float(at), who or "", why or "", acted
        )
    return list(found.values())


def recent(store: Store, days: float, most: int) -> list[Execution]:
    """The newest executions that did more than to announce or to remove chunks."""
    words = json.dumps([word for word, read in WORDS.items() if read != PENDING])
    rows = store.db.run("executions.recent", days=days, most=most, words=words)
    return [Execution(name, jobid) for name, jobid, _ in rows]
