"""Why a chunk may run or not: the five questions, answered from rows."""

import json
import shlex
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from .model import FAILED, HOLD, PENDING, READY, RESUBMIT, RUNNING, Plan, read_status
from .names import check_id
from .places import is_missing, is_within, location
from .store import Store
from .times import from_table, shown, to_table

CODES = (
    "NOT_REGISTERED", "LOCKED", "HELD", "ALREADY_DONE", "DATA_NOT_READY", "PAUSED", "AT_CONCURRENCY",
    "INVALID_LOCATION", "NOT_VALIDATED",
)  # fmt: skip
"""What stands in the way, the first thing first. A claim looks at statuses, not at places and checks:
it doesn't refuse for the last two, but whoever reads the data should."""

ADVICE = ("INVALID_LOCATION", "NOT_VALIDATED")

NO_LOCK = ("DONE", "FAILED", "ERROR", "RESUBMIT", "RERUN")
"""IN rows of a job that don't keep it from claiming; DONE does, unless an output is sent back."""

AGAIN = ("PENDING", "RESUBMIT", "RERUN")
"""OUT rows that a claim may take over."""

OLD = "2h"
"""What `odf recover --older-than` is suggested with."""


class Reason(NamedTuple):
    """One thing that stands in the way, and the smallest command that removes it ('': to wait does)."""

    code: str
    text: str
    action: str = ""


class Answer(NamedTuple):
    """The answer to one of the five questions: yes, no, or (None) unknown; and the rows that say so."""

    question: str
    ok: bool | None
    text: str
    rows: list[dict[str, Any]]


class Explanation(NamedTuple):
    """Whether a claim would get the chunk (or, of a job, any chunk), and why."""

    jobid: str
    dataid: str | None
    at: datetime | None
    may_run: bool
    reasons: list[Reason]
    answers: list[Answer]
    notes: list[str]
    counts: dict[str, int]
    next_chunk: str | None = None

    @property
    def code(self) -> str:
        """The first refusal, or nothing."""
        return self.reasons[0].code if self.reasons else ""

    @property
    def action(self) -> str:
        """The command to run first, or nothing."""
        return next((reason.action for reason in self.reasons if reason.action), "")


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
        return [row for row in self.rows if row.datasetid == datasetid and row.jobid == self.plan.jobid]

    def fact(self, row: Row) -> dict[str, Any]:
        return self.facts.get((row.datasetid, row.generation or 0), {})


def explain(store: Store, jobid: str, dataid: str | None = None, at: datetime | None = None) -> Explanation:
    """Answer for one chunk, or for a job as a whole; for now, or for a moment in the past.

    The past is known of statuses and facts. Registrations, dials and claims are today's.
    """
    check_id("jobid", jobid)
    if dataid is not None:
        check_id("dataid", dataid)
    with store.db.reading():
        if dataid is None:
            from .whyjob import explain_job

            return explain_job(store, jobid, at)
        return explain_chunk(store, jobid, dataid, at)


def explain_chunk(
    store: Store, jobid: str, dataid: str, at: datetime | None, asked: frozenset[str] = frozenset()
) -> Explanation:
    """The same within a transaction; `asked` are the consumers on whose behalf a producer is explained."""
    state = _state(store, jobid, dataid, at)
    if state.plan.flaw:
        return unregistered(state.plan, dataid, at)
    reasons = [*_output_reasons(state), *_own_input_reasons(state)]
    for datasetid in state.plan.inputs:
        reasons += _input_reasons(store, state, datasetid, asked)
    if not state.plan.inputs and not any(
        row.locktype == "OUT" for out in state.plan.outputs for row in state.mine(out)
    ):
        reasons.append(_unheard_of(state))
    if at is None:
        reasons += dial_reasons(store, jobid, state.now)
    may_run = not reasons
    reasons += [*_location_reasons(state), *_validation_reasons(state)]
    return Explanation(
        jobid, dataid, at, may_run, in_order(reasons),
        [_ready(state), _right_data(state), _location(state), _validated(state), _safe(state)],
        _notes(store, state), {},
    )  # fmt: skip


def unregistered(plan: Plan, dataid: str | None, at: datetime | None) -> Explanation:
    reason = Reason("NOT_REGISTERED", plan.flaw, f"odf job add {quoted(plan.jobid)} --in DATASET --out DATASET")
    if plan.outputs:  # it reads what it writes
        reason = reason._replace(action=reason.action + " --replace")
    return Explanation(plan.jobid, dataid, at, False, [reason], [], [], {})


def dial_reasons(store: Store, jobid: str, now: datetime | None) -> list[Reason]:
    """What a job's policy has against any claim at all."""
    reasons = []
    for concurrency, paused_until in store.db.run("why.dial", jobid=jobid):
        until = from_table(store, paused_until)
        if until and now and until > now:
            text = f"{jobid!r} is paused until {shown(until)}"
            reasons.append(Reason("PAUSED", text, f"odf policy {quoted(jobid)} paused_until=no"))
        [(live, owner)] = store.db.run("why.live", jobid=jobid)
        if concurrency is not None and live >= concurrency:
            text = f"{jobid!r} may run {concurrency} chunks at once, and {live} are running"
            text += f": {owner} holds one" if owner else ""
            action = f"odf policy {quoted(jobid)} concurrency={live + 1}"
            reasons.append(Reason("AT_CONCURRENCY", text, action))
    return reasons


def in_order(reasons: Iterable[Reason]) -> list[Reason]:
    """The most telling reason first, none twice."""
    return sorted(dict.fromkeys(reasons), key=lambda reason: CODES.index(reason.code))


def quoted(*words: str) -> str:
    return shlex.join(words)


# --- what there is ---


def _state(store: Store, jobid: str, dataid: str, at: datetime | None) -> State:
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
            since, who, why = (event[4], *event[6:]) if event else (modified, None, None)
            rows.append(
                Row(datasetid, job, locktype, status, generation, from_table(store, since), who, why)
            )
    else:
        rows = [
            Row(*event[:4], event[5], from_table(store, event[4]), *event[6:])
            for event in last.values()
            if event[3] is not None
        ]
    facts = {
        (fact["datasetid"], fact["generation"]): fact | {"at": from_table(store, fact["at"])}
        for fact in db.records("why.facts", **known, **then)
    }
    claims = {} if at else {claim["jobid"]: claim for claim in db.records("why.claims", dataid=dataid)}
    times = ("started", "heartbeat", "lease_end", "retry_at")
    producers: dict[str, list[str]] = {}
    for datasetid, producer in db.run("why.producers", jobid=jobid):
        producers.setdefault(datasetid, []).append(producer)
    now = from_table(store, datetime.fromtimestamp(store.now()).astimezone())
    return State(
        store.read_plan(jobid), dataid, at, now,
        (at.astimezone(now.tzinfo).strftime("%Y-%m-%d") if at and now else store.today()),
        rows, facts,
        {job: claim | {name: from_table(store, claim[name]) for name in times} for job, claim in claims.items()},
        {row["datasetid"]: location(row) for row in db.records("why.datasets", jobid=jobid)},
        producers,
    )  # fmt: skip


# --- what stands in the way ---


def _output_reasons(state: State) -> Iterable[Reason]:
    dataid, jobid = state.dataid, state.plan.jobid
    for datasetid in state.plan.outputs:
        for row in state.outputs_of(datasetid):
            by = "" if row.jobid == jobid else f" by {row.jobid!r}"
            resubmit = f"odf resubmit {quoted(row.jobid, dataid)}"
            word = row.status if row.status is not None else "NULL"
            status = read_status(row.status)
            if row.status == RUNNING:
                yield _locked(state, row)
            elif row.status == READY:
                yield Reason("ALREADY_DONE", f"{datasetid!r} is READY{by} since {shown(row.since)}", resubmit)
            elif row.status in AGAIN:
                continue
            elif status == FAILED:
                text = f"{datasetid!r} is {word}{by} since {shown(row.since)}" + _because(row)
                retry_at = state.claims.get(row.jobid, {}).get("retry_at")
                text += f"; it will be tried again at {shown(retry_at)}" if retry_at else ""
                yield Reason("HELD", text, resubmit)
            else:
                text = f"{datasetid!r} is {word}{by} since {shown(row.since)}" + _because(row)
                yield Reason("HELD", text, f"odf release {quoted(row.jobid, dataid)}")
        for row in state.mine(datasetid):
            if row.locktype != "OUT" and row.status not in AGAIN:
                text = f"{jobid!r} has a row of locktype {row.locktype} on {datasetid!r}, which it writes"
                yield Reason("LOCKED", text, f"odf delete-run {quoted(jobid, dataid)}")


def _own_input_reasons(state: State) -> Iterable[Reason]:
    jobid, dataid = state.plan.jobid, state.dataid
    own = [row for datasetid in state.plan.outputs for row in state.mine(datasetid) if row.locktype == "OUT"]
    if any(row.status == RUNNING for row in own):
        return  # the output says it already
    again = any(read_status(row.status) == RESUBMIT for row in own)
    forget = f"odf delete-run {quoted(jobid, dataid)}"
    for datasetid in state.plan.reads:
        for row in state.mine(datasetid):
            since = f"since {shown(row.since)}"
            if row.locktype != "IN":
                if row.status not in ("RESUBMIT", "RERUN"):
                    yield _own_product(state, row)
            elif row.status == RUNNING:
                text = f"{jobid!r} has an IN lock on {datasetid!r} {since}, and no output RUNNING"
                yield Reason("LOCKED", text, forget)
            elif row.status == "DONE":
                if not again:
                    yield Reason("ALREADY_DONE", f"{jobid!r} has consumed {datasetid!r} {since}", forget)
            elif row.status not in NO_LOCK:
                text = f"the IN row of {jobid!r} on {datasetid!r} is {row.status} {since}"
                yield Reason("HELD", text, forget)


def _own_product(state: State, row: Row) -> Reason:
    """A job can't lock what it made itself when it was registered otherwise: both would be one row."""
    if row.status == RUNNING:
        return _locked(state, row)
    jobid, dataid = state.plan.jobid, state.dataid
    text = f"{jobid!r} has itself made {row.datasetid!r}, which it now reads: one row can't be both"
    action = f"odf delete-run {quoted(jobid, dataid)}"
    if row.status == READY and not any(each.jobid == "external" for each in state.outputs_of(row.datasetid)):
        action = (
            "odf dml \"update datastatus set jobid = 'external' where "
            f"jobid = {_literal(jobid)} and datasetid = {_literal(row.datasetid)} and dataid = {_literal(dataid)}\""
        )
    return Reason("LOCKED", text, action)


def _input_reasons(
    store: Store, state: State, datasetid: str, asked: frozenset[str]
) -> Iterable[Reason]:
    dataid = state.dataid
    if datasetid == "today":
        if dataid != state.today:
            yield Reason("DATA_NOT_READY", f"'today' is {state.today}, and this job runs on it only")
        return
    rows = state.outputs_of(datasetid)
    running = [row for row in rows if row.status == RUNNING]
    if running:
        lock = _locked(state, running[0])
        yield lock._replace(code="DATA_NOT_READY")
        return
    if any(row.status == READY for row in rows):
        return
    for row in sorted(rows, key=lambda row: read_status(row.status) != HOLD):
        status = read_status(row.status)
        text = f"{datasetid!r} is {row.status} by {row.jobid!r} since {shown(row.since)}" + _because(row)
        if status == FAILED:
            again = f"odf resubmit {quoted(row.jobid, dataid)}"
            if row.jobid not in state.producers.get(datasetid, []):
                again = f"odf ready {quoted(datasetid, dataid)}"  # nobody would make it again
            yield Reason("DATA_NOT_READY", text, again)
            return
        if status == HOLD:
            yield Reason("DATA_NOT_READY", text, f"odf release {quoted(row.jobid, dataid)}")
            return
    there = f"is {rows[0].status} by {rows[0].jobid!r}" if rows else "isn't there yet"
    text = f"{datasetid!r} {there}"
    producers = state.producers.get(datasetid, [])
    if not producers:
        text += ", and no job is registered that makes it"
        yield Reason("DATA_NOT_READY", text, f"odf ready {quoted(datasetid, dataid)}")
        return
    producer = next((row.jobid for row in rows if row.jobid in producers), producers[0])
    if producer in asked or producer == state.plan.jobid:
        text += f", and {producer!r}, which makes it, waits for this in turn"
        yield Reason("DATA_NOT_READY", text, f"odf ready {quoted(datasetid, dataid)}")
        return
    above = explain_chunk(store, producer, dataid, state.at, asked | {state.plan.jobid})
    if above.may_run:
        text += f": {producer!r} makes it, and may run"
        yield Reason("DATA_NOT_READY", text, f"odf run --job {quoted(producer)} SCRIPT")
    else:
        text += f": {producer!r} makes it, and may not run: {above.reasons[0].text}"
        yield Reason("DATA_NOT_READY", text, above.action)


def _unheard_of(state: State) -> Reason:
    this = quoted(state.plan.jobid, state.dataid)
    in_the_way = any(state.mine(out) for out in state.plan.outputs)
    return Reason(
        "DATA_NOT_READY",
        f"{state.plan.jobid!r} reads nothing, so a row has to say that chunk {state.dataid!r} exists",
        f"odf delete-run {this}" if in_the_way else f"odf hold {this} && odf release {this}",
    )


def _locked(state: State, row: Row) -> Reason:
    claim = state.claims.get(row.jobid, {})
    text = f"{row.datasetid!r} is being made by {row.jobid!r} since {shown(row.since)}"
    if state.at:
        return Reason("LOCKED", text + (f", by {row.who}" if row.who else ""))
    if not claim.get("owner"):
        text += ", without a claim of ours: if that program is gone, nothing takes the chunk back by itself"
        return Reason("LOCKED", text, f"odf recover --job {quoted(row.jobid)} --older-than {OLD}")
    lease_end = claim["lease_end"]
    text += f", by {claim['owner']}"
    if lease_end and state.now and lease_end < state.now:
        text += f", whose lease ended at {shown(lease_end)}"
        return Reason("LOCKED", text, f"odf recover --job {quoted(row.jobid)}")
    return Reason("LOCKED", text + f", with a lease until {shown(lease_end)}")


def _location_reasons(state: State) -> Iterable[Reason]:
    for datasetid, place, produced in _places(state):
        if place and is_missing(place):
            text = f"{datasetid!r} is registered at {place}, which doesn't exist here"
        elif place and produced and not is_within(produced, place):
            text = f"{datasetid!r} is registered at {place}, but this chunk was produced at {produced}"
        else:
            continue
        yield Reason("INVALID_LOCATION", text, f"odf dataset list  # and correct {datasetid}")


def _validation_reasons(state: State) -> Iterable[Reason]:
    for row, fact in _inputs(state):
        if fact.get("validated") in (False, 0):
            text = f"{row.datasetid!r} by {row.jobid!r} didn't pass its checks"
            text += f": {fact['checks']}" if fact.get("checks") else ""
            yield Reason("NOT_VALIDATED", text, f"odf resubmit {quoted(row.jobid, state.dataid)}")


def _because(row: Row) -> str:
    return f" ({row.why})" if row.why else ""


def _literal(text: str) -> str:
    """A text for SQL within double quotes of a shell."""
    text = text.replace("'", "''")
    for letter in '\\"$`':
        text = text.replace(letter, "\\" + letter)
    return f"'{text}'"


# --- the five answers ---


def _inputs(state: State) -> Iterable[tuple[Row, dict[str, Any]]]:
    """The READY rows of the inputs, and what is known of them."""
    for datasetid in state.plan.reads:
        ready = [row for row in state.outputs_of(datasetid) if row.status == READY]
        if ready:
            row = max(ready, key=lambda row: row.generation or 0)
            yield row, state.fact(row)


def _places(state: State) -> Iterable[tuple[str, str | None, str | None]]:
    """Of each input that is there: where it is registered, and where this chunk was produced."""
    for row, fact in _inputs(state):
        yield row.datasetid, state.places.get(row.datasetid), fact.get("location")


def _ready(state: State) -> Answer:
    found, parts, ok = [], [], True
    for datasetid in state.plan.inputs:
        if datasetid == "today":
            here = state.dataid == state.today
            parts.append(f"today is {state.today}")
            ok = ok and here
            continue
        rows = state.outputs_of(datasetid)
        found += [row.told() for row in rows]
        words = [f"{row.status} by {row.jobid} since {shown(row.since)}" for row in rows]
        parts.append(f"{datasetid}: {' and '.join(words) or 'nothing yet'}")
        statuses = [row.status for row in rows]
        ok = ok and READY in statuses and RUNNING not in statuses
    return Answer("ready", ok, "; ".join(parts) or "it reads nothing", found)


def _right_data(state: State) -> Answer:
    consumed, made = _consumed(state)
    found, parts, stale = [], [], False
    for row, fact in _inputs(state):
        then = consumed.get(row.datasetid)
        found.append(
            {"datasetid": row.datasetid, "dataid": state.dataid, "generation": row.generation,
             "rows": fact.get("rows"), "fingerprint": fact.get("fingerprint"), "consumed": then}
        )  # fmt: skip
        about = f"{row.datasetid}: generation {row.generation or 'unknown'}"
        about += f", {fact['rows']} rows" if fact.get("rows") is not None else ""
        about += f", fingerprint {fact['fingerprint']}" if fact.get("fingerprint") else ""
        if made and _made_again(row, then, made):
            stale = True
            about += f"; the output was made from generation {then or 'unknown'}: it is stale"
        parts.append(about)
    if stale:
        ok = False
    else:
        ok = True if parts and len(parts) == len(state.plan.reads) else None
    return Answer("right data", ok, "; ".join(parts) or "nothing to consume yet", found)


def _consumed(state: State) -> tuple[dict[str, int | None], datetime | None]:
    """The generations that the current output was made from, and when; nothing if that isn't known."""
    for datasetid in state.plan.outputs:
        for row in state.outputs_of(datasetid):
            fact = state.fact(row)
            if row.status == READY and row.jobid == state.plan.jobid and fact.get("inputs"):
                return json.loads(fact["inputs"]), fact["at"]
    return {}, None


def _made_again(row: Row, then: int | None, made: datetime) -> bool:
    if row.generation is None and then is None:  # neither was made by a claim: only times can tell
        return bool(row.since and row.since > made)
    return row.generation != then


def _location(state: State) -> Answer:
    found, parts = [], []
    ok: bool | None = None
    places = list(_places(state))
    for datasetid in (*state.plan.reads, *state.plan.outputs):
        place = state.places.get(datasetid)
        produced = next((each for name, _, each in places if name == datasetid), None)
        for row in state.outputs_of(datasetid) if datasetid in state.plan.outputs else ():
            produced = state.fact(row).get("location") if row.status == READY else produced
        missing = bool(place and is_missing(place))
        moved = bool(place and produced and not is_within(produced, place))
        found.append({"datasetid": datasetid, "registered": place, "produced": produced, "exists": not missing})
        about = place or ("registered without a place" if datasetid in state.places else "not registered")
        about += ", which doesn't exist here" if missing else ""
        about += f", but produced at {produced}" if moved else ""
        parts.append(f"{datasetid}: {about}")
        is_there = any(row.status == READY for row in state.outputs_of(datasetid))
        if moved or (missing and (is_there or datasetid in state.plan.reads)):
            ok = False
        elif place and not missing and ok is None:
            ok = True
    return Answer("location", ok, "; ".join(parts), found)


def _validated(state: State) -> Answer:
    found, parts = [], []
    words = {True: "passed its checks", False: "didn't pass its checks", None: "no checks known"}
    answers = []
    for row, fact in _inputs(state):
        known = fact.get("validated")
        answers.append(None if known is None else bool(known))
        checks = fact.get("checks")
        found.append({"datasetid": row.datasetid, "generation": row.generation, "validated": answers[-1], "checks": checks})
        parts.append(f"{row.datasetid}: {words[answers[-1]]}" + (f" ({checks})" if checks else ""))
    ok = False if False in answers else (True if answers and None not in answers else None)
    return Answer("validated", ok, "; ".join(parts) or "nothing to check", found)


def _safe(state: State) -> Answer:
    jobid = state.plan.jobid
    found, holders, beside = [], [], []
    for row in state.rows:
        if row.status != RUNNING:
            continue
        claim = state.claims.get(row.jobid, {})
        owner = claim.get("owner") or (row.who if state.at else None)
        found.append(
            row.told() | {"owner": owner, "started": claim.get("started"), "lease_end": claim.get("lease_end")}
        )
        who = f"{row.jobid}" + (f" ({owner})" if owner else "")
        if row.locktype == "IN" and row.jobid != jobid:
            beside.append(f"{who} reads {row.datasetid} too, which is no hindrance")
        elif row.locktype == "IN":
            holders.append(f"{who} reads {row.datasetid} since {shown(row.since)}")
        else:
            until = f" until {shown(claim['lease_end'])}" if claim.get("owner") else ""
            holders.append(f"{who} makes {row.datasetid} since {shown(row.since)}{until}")
    text = "; ".join(holders) or "nobody holds it"
    return Answer("safe", not holders, "; ".join([text, *beside]), found)


def _notes(store: Store, state: State) -> list[str]:
    if state.at is None:
        return []
    notes = ["Registrations and places are today's; claims and dials of the past aren't kept."]
    [(since,)] = store.db.run("why.since")
    since = from_table(store, since)
    if since is None or since > state.at:
        notes.append(f"History begins at {shown(since)}: nothing is known of the time before.")
    return notes
