"""Every row that decides about one chunk of one job, now or at a moment in the past."""

from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

from .model import READY, Plan
from .places import location
from .store import Store
from .times import from_table, to_table


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

    def told(self) -> dict[str, Any]:
        return self._asdict()


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

    def outputs_of(self, datasetid: str) -> list[Row]:
        return [row for row in self.rows if row.datasetid == datasetid and row.locktype == "OUT"]

    def mine(self, datasetid: str) -> list[Row]:
        return [
            row for row in self.rows if row.datasetid == datasetid and row.jobid == self.plan.jobid
        ]

    def fact(self, row: Row) -> dict[str, Any]:
        return self.facts.get((row.datasetid, row.generation or 0), {})

    def inputs(self) -> Iterator[tuple[Row, dict[str, Any]]]:
        """The READY rows of the inputs, and what is known of them."""
        for datasetid in self.plan.reads:
            ready = [row for row in self.outputs_of(datasetid) if row.status == READY]
            if ready:
                row = max(ready, key=lambda row: row.generation or 0)
                yield row, self.fact(row)

    def input_places(self) -> Iterator[tuple[str, str | None, str | None]]:
        """Of each input that is there: where it is registered, and where this chunk was made."""
        for row, fact in self.inputs():
            yield row.datasetid, self.places.get(row.datasetid), fact.get("location")


def read_state(store: Store, jobid: str, dataid: str, at: datetime | None) -> State:
    """Read the rows, within a transaction."""
    db = store.db
    known = {"jobid": jobid, "dataid": dataid}
    then = {"now": int(at is None), "at": to_table(store, at)}
    last = {(event[0], event[1]): event for event in db.run("why.events", **known, **then)}
    rows = []
    if at is None:
        for datasetid, job, locktype, status, modified, generation in db.run("why.rows", **known):
            event = last.get((datasetid, job))
            if event and (event[2], event[3]) != (locktype, status):
                event = None
            since, who, why = (event[4], event[6], event[7]) if event else (modified, None, None)
            rows.append(
                Row(
                    datasetid, job, locktype, status, generation, from_table(store, since), who, why
                )
            )
    else:
        rows = [
            Row(datasetid, job, locktype, status, generation, from_table(store, since), who, why)
            for datasetid, job, locktype, status, since, generation, who, why in last.values()
            if status is not None
        ]
    facts = {
        (fact["datasetid"], fact["generation"]): fact | {"at": from_table(store, fact["at"])}
        for fact in db.records("why.facts", **known, **then)
    }
    claims = (
        {} if at else {claim["jobid"]: claim for claim in db.records("why.claims", dataid=dataid)}
    )
    times = ("started", "heartbeat", "lease_end", "retry_at")
    producers: dict[str, list[str]] = {}
    for datasetid, producer in db.run("why.producers", jobid=jobid):
        producers.setdefault(datasetid, []).append(producer)
    now = from_table(store, datetime.fromtimestamp(store.now()).astimezone())
    return State(
        store.read_plan(jobid), dataid, at, now,
        (at.astimezone(now.tzinfo).strftime("%Y-%m-%d") if at and now else store.today()),
        rows, facts,
        {
            job: claim | {name: from_table(store, claim[name]) for name in times}
            for job, claim in claims.items()
        },
        {row["datasetid"]: location(row) for row in db.records("why.datasets", jobid=jobid)},
        producers,
    )  # fmt: skip
