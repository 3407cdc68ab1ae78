"""Every row that decides about one chunk of one job, now or at a moment in the past."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple

from ..location import keeps_versions, place_of
from ..model import READY, RUNNING, Plan
from ..store.history import Registration
from ..store.store import Store
from ..util.times import from_table, to_table

TIMES = ("started", "heartbeat", "lease_end", "retry_at")
"""The columns of a claim that tell a time."""


class Reason(NamedTuple):
    """One thing in the way, and the smallest command that removes it ('': to wait does)."""

    code: str
    text: str
    action: str = ""


class Answer(NamedTuple):
    """The answer to one of the five questions: yes, no, or (None) unknown; and the rows."""

    question: str
    ok: bool | None
    text: str
    rows: list[dict[str, Any]]


class Look(NamedTuple):
    """Whether the data of a READY chunk is in its place: None if that can't be told from here."""

    there: bool | None
    text: str = ""


class Row(NamedTuple):
    """A row of datastatus for the chunk in question, and its last change."""

    datasetid: str
    jobid: str
    locktype: str | None
    status: str | None
    generation: int | None
    since: datetime | None
    who: str | None
    why: str | None


class State(NamedTuple):
    """Every row that decides about one chunk of one job, now or at a moment in the past."""

    plan: Plan
    dataid: str
    at: datetime | None
    now: datetime | None
    today: str
    rows: list[Row]
    facts: dict[tuple[str, int], dict[str, Any]]
    claims: dict[str, dict[str, Any]]
    places: dict[str, str | None]
    producers: dict[str, list[str]]
    making: frozenset[str] = frozenset()
    """The jobs that make something of the chunk: what they read they lock."""
    versioned: frozenset[str] = frozenset()
    """The datasets whose places keep a version for their readers."""
    looks: Mapping[str, Look] = MappingProxyType({})
    """What was found where the chunks are, if somebody looked."""

    def outputs_of(self, datasetid: str) -> list[Row]:
        return [row for row in self.rows if row.datasetid == datasetid and row.locktype == "OUT"]

    def readers_of(self, datasetid: str) -> list[Row]:
        """The rows of the other jobs that read a chunk, which isn't made again meanwhile."""
        if datasetid in self.versioned:
            return []
        return [
            row
            for row in self.rows
            if row.datasetid == datasetid
            and row.jobid != self.plan.jobid
            and row.locktype == "IN"
            and row.status == RUNNING
            and row.jobid in self.making
        ]

    def mine(self, datasetid: str) -> list[Row]:
        return [
            row for row in self.rows if row.datasetid == datasetid and row.jobid == self.plan.jobid
        ]

    def fact(self, row: Row) -> dict[str, Any]:
        return self.facts.get((row.datasetid, row.generation or 0), {})

    def ready_row(self, datasetid: str) -> Row | None:
        """The row of a dataset whose data is there, if it is READY."""
        ready = [row for row in self.outputs_of(datasetid) if row.status == READY]
        return max(ready, key=lambda row: row.generation or 0, default=None)

    def inputs(self) -> Iterator[tuple[Row, dict[str, Any]]]:
        """The READY rows of the inputs, and what is known of them."""
        for datasetid in self.plan.reads:
            if row := self.ready_row(datasetid):
                yield row, self.fact(row)

    def input_places(self) -> Iterator[tuple[str, str | None, str | None]]:
        """Of each input that is there: where it is registered, and where this chunk was made."""
        for row, fact in self.inputs():
            yield row.datasetid, self.places.get(row.datasetid), fact.get("location")


def read_state(store: Store, plan: Plan, dataid: str, at: datetime | None = None) -> State:
    """Read what decides about one chunk for a job with this plan, within a transaction."""
    datasets = dict.fromkeys((*plan.reads, *plan.outputs))
    chunks = [_read_chunk(store, datasetid, dataid, at) for datasetid in datasets]
    claims = (
        {}
        if at
        else {
            claim["jobid"]: claim | {name: from_table(store, claim[name]) for name in TIMES}
            for claim in store.db.records("state.claims", dataid=dataid)
        }
    )
    registered = Registration(store, at)
    places, producers, versioned = {}, {}, set()
    for datasetid in datasets:
        for row in registered.datasets(datasetid):
            places[datasetid] = place_of(row)
            if keeps_versions(row):
                versioned.add(datasetid)
        if makers := registered.producers(datasetid):
            producers[datasetid] = makers
    now = from_table(store, datetime.fromtimestamp(store.now()).astimezone())
    today = at.astimezone(now.tzinfo).strftime("%Y-%m-%d") if at and now else store.today()
    rows = [row for found, _ in chunks for row in found]
    facts = {key: fact for _, known in chunks for key, fact in known.items()}
    moment = {"now": int(at is None), "at": to_table(store, at)}
    making = store.db.run("state.making", dataid=dataid, **moment)
    return State(
        plan,
        dataid,
        at,
        now,
        today,
        rows,
        facts,
        claims,
        places,
        producers,
        frozenset(jobid for (jobid,) in making),
        frozenset(versioned),
    )


def _read_chunk(
    store: Store, datasetid: str, dataid: str, at: datetime | None
) -> tuple[list[Row], dict[tuple[str, int], dict[str, Any]]]:
    """The rows of one dataset's chunk with their last changes, and its facts by generation."""
    chunk = {"datasetid": datasetid, "dataid": dataid}
    until = chunk | {"now": int(at is None), "at": to_table(store, at)}
    last = {event[1]: event for event in store.db.run("state.events", **until)}
    rows = []
    if at is None:
        for _, jobid, locktype, status, modified, generation in store.db.run("state.rows", **chunk):
            since, who, why = modified, None, None
            event = last.get(jobid)
            if event and (event[2], event[3]) == (locktype, status):
                since, who, why = event[4], event[6], event[7]
            moment = from_table(store, since)
            rows.append(Row(datasetid, jobid, locktype, status, generation, moment, who, why))
    else:
        for _, jobid, locktype, status, since, generation, who, why in last.values():
            if status is not None:
                moment = from_table(store, since)
                rows.append(Row(datasetid, jobid, locktype, status, generation, moment, who, why))
    facts = {
        (datasetid, fact["generation"]): fact | {"at": from_table(store, fact["at"])}
        for fact in store.db.records("state.facts", **until)
    }
    return rows, facts
