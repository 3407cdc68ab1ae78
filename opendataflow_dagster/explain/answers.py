"""Every row that decides about one chunk of a job, and the five answers from these rows."""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import Any, NamedTuple

from ..location import (
    is_missing,
    is_within,
    keeps_versions,
    obstacle,
    path_of,
    place_of,
    place_to_look,
)
from ..model import READY, RUNNING, Plan
from ..store.history import Registration
from ..store.store import Store
from ..util.text import count_of
from ..util.times import from_table, shown, to_table

# Every row that decides about one chunk of one job, now or at a moment in the past.


TIMES = ("started", "heartbeat", "lease_end", "retry_at")
"""The columns of a claim that are times."""


class Reason(NamedTuple):
    """One thing in the way, and the smallest command that removes it; '' if only waiting helps."""

    code: str
    text: str
    action: str = ""


class Answer(NamedTuple):
    """The answer to one of the five questions: yes, no, or None for unknown; and its rows."""

    question: str
    ok: bool | None
    text: str
    rows: list[dict[str, Any]]


class Look(NamedTuple):
    """Whether the data of a READY chunk is in its location; None if that can't be checked here."""

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
    """What was found in the locations of the chunks, if somebody looked."""

    def outputs_of(self, datasetid: str) -> list[Row]:
        return [row for row in self.rows if row.datasetid == datasetid and row.locktype == "OUT"]

    def readers_of(self, datasetid: str) -> list[Row]:
        """The rows of other jobs that read a chunk; meanwhile it isn't produced again."""
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
        """For each existing input: where it is registered, and where this chunk was produced."""
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


UNCLAIMED = "nobody holds it"

ASSUMED_THERE = Look(True)
"""What is assumed of a place that wasn't looked at."""

UNPLACED = "registered without a place"


class Consumed(NamedTuple):
    """What a chunk was computed from: the generation of one input, and what is known of it."""

    datasetid: str
    generation: int | None
    rows: int | None = None
    fingerprint: str | None = None


class ChunkEvidence(NamedTuple):
    """What is known of one READY chunk of a dataset, measured just now or read from its record."""

    datasetid: str
    generation: int
    ready: str
    """Why it could be claimed, or who produced it."""

    consumed: Sequence[Consumed] = ()
    rows: int | None = None
    bytes: int | None = None
    fingerprint: str | None = None
    location: str | None = None
    validated: bool | None = None
    checks: str | None = None
    schema: str | None = None
    safe: str = UNCLAIMED
    code: str | None = None

    def answers(self) -> dict[str, str | None]:
        """One answer to each of the five questions, by the question's first word."""
        return {
            "ready": self.ready,
            "right": "; ".join(_consumed_line(*source) for source in self.consumed) or "unknown",
            "location": self.location,
            "validated": self.checks or _checks_line(self.validated, "no checks"),
            "safe": self.safe,
        }

    def metadata(self) -> dict[str, Any]:
        """All that a person sees of the chunk: its figures, its inputs and the five answers."""
        return {
            "generation": self.generation,
            "rows": self.rows,
            "bytes": self.bytes,
            "fingerprint": self.fingerprint,
            "code": self.code,
            "inputs": {source.datasetid: source.generation for source in self.consumed},
            **self.answers(),
        }


def by_question(answers: Sequence[Answer]) -> dict[str, str]:
    """The texts of five answers by the question's first word, as `ChunkEvidence` has them."""
    return {answer.question.partition(" ")[0]: answer.text for answer in answers}


def recorded_evidence(
    datasetid: str, jobid: str, generation: int | None, record: Mapping[str, Any]
) -> ChunkEvidence:
    """The evidence in a READY chunk's record; a row that no claim wrote is of generation 0."""
    inputs = recorded_inputs(record) or {}
    validated = record.get("validated")
    return ChunkEvidence(
        datasetid,
        generation or 0,
        f"{datasetid} is READY, made by {jobid}",
        [Consumed(source, number) for source, number in inputs.items()],
        rows=record.get("rows"),
        bytes=record.get("bytes"),
        fingerprint=record.get("fingerprint"),
        location=record.get("location"),
        validated=None if validated is None else bool(validated),
        checks=record.get("checks"),
        schema=record.get("schema"),
        code=record.get("code"),
    )


def recorded_inputs(record: Mapping[str, Any]) -> dict[str, int | None] | None:
    """The generation of each input that a chunk was produced from; None if unknown."""
    return json.loads(record["inputs"]) if record.get("inputs") else None


def stale_line(state: State) -> str:
    """Return the inputs that were replaced since a chunk was produced from them."""
    answer = _right_data(state)
    return answer.text if answer.ok is False else ""


def has_inputs(state: State) -> bool:
    """Whether all inputs of a chunk are there."""
    return bool(_ready(state).ok)


def five_answers(state: State) -> list[Answer]:
    """Answer each question about a chunk that a job may claim or has produced."""
    return [_ready(state), _right_data(state), _location(state), _validated(state), _safe(state)]


def place_line(produced: str | None, registered: str | None) -> str:
    """Where a chunk was produced, and whether its dataset is registered there."""
    about = produced or UNPLACED
    if produced and registered and not is_within(produced, registered):
        about += f"; registered as {registered}"
    if produced and is_missing(produced):
        about += ", which doesn't exist here"
    return about


def _consumed_line(
    datasetid: str, generation: int | None, rows: int | None, fingerprint: str | None
) -> str:
    about = f"{datasetid}: generation {generation or 'unknown'}"
    about += f", {count_of(rows, 'row')}" if rows is not None else ""
    return about + (f", fingerprint {fingerprint}" if fingerprint else "")


def _checks_line(validated: bool | None, unknown: str = "no checks known") -> str:
    if validated is None:
        return unknown
    return "passed its checks" if validated else "failed its checks"


def _ready(state: State) -> Answer:
    found, parts, ok = [], [], True
    for datasetid in state.plan.inputs:
        if datasetid == "today":
            here = state.dataid == state.today
            parts.append(f"today is {state.today}")
            ok = ok and here
            continue
        rows = state.outputs_of(datasetid)
        found += [row._asdict() for row in rows]
        words = [f"{row.status} by {row.jobid} since {shown(row.since)}" for row in rows]
        parts.append(f"{datasetid}: {' and '.join(words) or 'nothing yet'}")
        statuses = [row.status for row in rows]
        ok = ok and READY in statuses and RUNNING not in statuses
    return Answer("ready", ok, "; ".join(parts) or "it reads nothing", found)


def _right_data(state: State) -> Answer:
    consumed, made = _consumed(state)
    found, parts, stale = [], [], False
    for row, fact in state.inputs():
        then = consumed.get(row.datasetid)
        found.append(
            {
                "datasetid": row.datasetid,
                "dataid": state.dataid,
                "generation": row.generation,
                "rows": fact.get("rows"),
                "fingerprint": fact.get("fingerprint"),
                "consumed": then,
            }
        )
        about = _consumed_line(
            row.datasetid, row.generation, fact.get("rows"), fact.get("fingerprint")
        )
        if made and _was_replaced(state, row, then, made):
            stale = True
            about += f"; the output was made from generation {then or 'unknown'}: it is stale"
        parts.append(about)
    if stale:
        ok = False
    else:
        ok = True if parts and len(parts) == len(state.plan.reads) else None
    return Answer("right data", ok, "; ".join(parts) or "nothing to consume yet", found)


def _consumed(state: State) -> tuple[dict[str, int | None], datetime | None]:
    """The generations that the current output was produced from, and when, if known."""
    for datasetid in state.plan.outputs:
        for row in state.outputs_of(datasetid):
            fact = state.fact(row)
            if row.status == READY and row.jobid == state.plan.jobid and fact.get("inputs"):
                return json.loads(fact["inputs"]), fact["at"]
    return {}, None


def _was_replaced(state: State, row: Row, then: int | None, made: datetime) -> bool:
    """Whether an input has, or may have, other data than what the output was produced from."""
    if row.generation is None and then is None:  # neither has a number: only times can tell
        return bool(row.since and row.since > made)
    before = state.facts.get((row.datasetid, then or 0), {}).get("fingerprint")
    same = before is not None and before == state.fact(row).get("fingerprint")
    return row.generation != then and not same


def _location(state: State) -> Answer:
    found, parts = [], []
    ok: bool | None = None
    untold = False
    places = list(state.input_places())
    for datasetid in (*state.plan.reads, *state.plan.outputs):
        place = state.places.get(datasetid)
        produced = next((location for name, _, location in places if name == datasetid), None)
        for row in state.outputs_of(datasetid) if datasetid in state.plan.outputs else ():
            produced = state.fact(row).get("location") if row.status == READY else produced
        where = place_to_look(place, produced)
        missing = bool(where and is_missing(where))
        moved = bool(place and produced and not is_within(produced, place))
        look = state.looks.get(datasetid, ASSUMED_THERE)
        found.append(
            {
                "datasetid": datasetid,
                "registered": place,
                "produced": produced,
                "exists": not missing and look.there is not False,
            }
        )
        about = place or (UNPLACED if datasetid in state.places else "not registered")
        about += f", made at {produced}" if produced and not place else ""
        blocked = obstacle(path_of(where) or where) if where and missing else None
        about += ", which doesn't exist here" if missing else ""
        about += f" and can't be made: {blocked}" if blocked else ""
        about += f", but produced at {produced}" if moved else ""
        about += f"; {look.text}" if look.text and not missing else ""
        parts.append(f"{datasetid}: {about}")
        untold = untold or look.there is None
        is_there = any(row.status == READY for row in state.outputs_of(datasetid))
        if (
            moved
            or blocked
            or look.there is False
            or (missing and (is_there or datasetid in state.plan.reads))
        ):
            ok = False
        elif where and not missing and ok is None:
            ok = True
    if ok and untold:
        ok = None
    return Answer("location", ok, "; ".join(parts), found)


def _validated(state: State) -> Answer:
    found, parts = [], []
    answers = []
    for row, fact in state.inputs():
        known = fact.get("validated")
        answers.append(None if known is None else bool(known))
        checks = fact.get("checks")
        found.append(
            {
                "datasetid": row.datasetid,
                "generation": row.generation,
                "validated": answers[-1],
                "checks": checks,
            }
        )
        told = _checks_line(answers[-1])
        parts.append(f"{row.datasetid}: {told}" + (f" ({checks})" if checks else ""))
    ok = False if False in answers else (True if answers and None not in answers else None)
    return Answer("validated", ok, "; ".join(parts) or "nothing to check", found)


def _safe(state: State) -> Answer:
    jobid = state.plan.jobid
    found, holders, beside = [], [], []
    readers = [row for datasetid in state.plan.outputs for row in state.readers_of(datasetid)]
    for row in state.rows:
        if row.status != RUNNING:
            continue
        claim = state.claims.get(row.jobid, {})
        owner = claim.get("owner") or (row.who if state.at else None)
        found.append(
            row._asdict()
            | {"owner": owner, "started": claim.get("started"), "lease_end": claim.get("lease_end")}
        )
        who = f"{row.jobid}" + (f" ({owner})" if owner else "")
        if row.locktype == "IN" and row.jobid != jobid and row not in readers:
            beside.append(f"{who} reads {row.datasetid} too, which doesn't matter")
        else:
            does = "reads" if row.locktype == "IN" else "makes"
            until = f" until {shown(claim['lease_end'])}" if claim.get("owner") else ""
            holders.append(f"{who} {does} {row.datasetid} since {shown(row.since)}{until}")
    text = "; ".join(holders) or UNCLAIMED
    return Answer("safe", not holders, "; ".join([text, *beside]), found)
