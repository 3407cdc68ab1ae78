"""Why a chunk may run or not: the five questions, answered from rows."""

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from ..ids import check_id
from ..model import BLOCKING, Plan
from ..store.item_folding import fold_of
from ..store.refusals import flaw_of
from ..store.registration_history import Past
from ..store.store import Store
from ..util.text import typed
from ..util.times import from_table, shown, to_table
from .answers import five_answers
from .reasons import IN_A_CIRCLE, advice, hindrances
from .state import Answer, Reason, read_plan, read_state

CODES = (
    "NOT_REGISTERED",
    "FOLDED",
    *BLOCKING,
    "PAUSED",
    "AT_CONCURRENCY",
    "INVALID_LOCATION",
    "NOT_VALIDATED",
)
"""What stands in the way, the first thing first. A claim looks at statuses, not at places and
checks: it doesn't refuse for the last two, but whoever reads the data should."""

ADVICE = ("INVALID_LOCATION", "NOT_VALIDATED")


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


def explain(
    store: Store,
    jobid: str,
    dataid: str | None = None,
    at: datetime | None = None,
    *,
    everything: bool = False,
    look: bool = False,
) -> Explanation:
    """Answer for one chunk, or for a job as a whole; for now, or for a moment in the past.

    Of a job of many chunks, only examples are looked at, unless `everything` is to be.

    With `look`, the places of the chunk are looked at, too: whether its data is there now.

    Of the past, statuses, facts and what was registered are known, but not the leases of claims.
    """
    check_id("jobid", jobid)
    if dataid is not None:
        check_id("dataid", dataid)
    with store.db.reading():
        if dataid is None:
            from .explain_job import explain_job

            return explain_job(store, jobid, at, everything, look=look and at is None)
        return explain_chunk(store, jobid, dataid, at, look=look and at is None)


def explain_chunk(
    store: Store,
    jobid: str,
    dataid: str,
    at: datetime | None,
    asked: frozenset[str] = frozenset(),
    *,
    look: bool = False,
) -> Explanation:
    """The same within a transaction; `asked` are the consumers for whom a producer is asked."""
    state = read_state(store, read_plan(store, jobid, at), dataid, at)
    if state.plan.flaw:
        return unregistered(store, state.plan, dataid, at)

    if at is None and (fold := fold_of(store, jobid, dataid)):
        text = f"{dataid!r} lies within what was folded: {fold}; no row tells of a single one"
        return Explanation(jobid, dataid, at, False, [Reason("FOLDED", text)], [], [], {})

    if look:
        from ..storage.presence import (
            look_at,  # imported late: only a person waits for what it finds
        )

        state = state._replace(looks=look_at(store, state))

    def above(producer: str) -> Reason | None:
        if producer in asked or producer == jobid:
            return Reason(IN_A_CIRCLE, "")
        found = explain_chunk(store, producer, dataid, at, asked | {jobid})
        return None if found.may_run else found.reasons[0]._replace(action=found.action)

    reasons = [*hindrances(state, above), *dial_reasons(store, jobid, state.now, at)]
    return Explanation(
        jobid,
        dataid,
        at,
        not reasons,
        in_order([*reasons, *advice(state)]),
        five_answers(state),
        notes_of(store, at),
        {},
    )


def unregistered(store: Store, plan: Plan, dataid: str | None, at: datetime | None) -> Explanation:
    if at:
        flaw, action = plan.flaw.replace("isn't registered", "wasn't registered then"), ""
    else:
        flaw = flaw_of(store, plan).rstrip(".")
        action = f"odf job add {typed(plan.jobid)} --in DATASET --out DATASET"
        action += " --replace" if plan.outputs else ""  # it reads what it writes
    reason = Reason("NOT_REGISTERED", flaw, action)
    return Explanation(plan.jobid, dataid, at, False, [reason], [], notes_of(store, at), {})


def dial_reasons(
    store: Store, jobid: str, now: datetime | None, at: datetime | None
) -> list[Reason]:
    """What a job's policy has against any claim at all, now or at a moment in the past."""
    if at:
        dials, now = [Past(store, at).dials(jobid)], at
    else:
        dials = [
            (concurrency, from_table(store, until))
            for concurrency, until in store.db.run("why.dial", jobid=jobid)
        ]
    reasons = []
    for concurrency, until in dials:
        if until and now and until > now:
            text = f"{jobid!r} is paused until {shown(until)}"
            reasons.append(Reason("PAUSED", text, f"odf policy {typed(jobid)} paused_until=no"))
        if concurrency is None:
            continue
        if at:
            [(live, owner)] = store.db.run("why.live_then", jobid=jobid, at=to_table(store, at))
        else:
            [(live, owner)] = store.db.run("why.live", jobid=jobid)
        if live >= concurrency:
            text = f"{jobid!r} may run {concurrency} chunks at once, and {live} are running"
            text += f": {owner} holds one" if owner else ""
            action = f"odf policy {typed(jobid)} concurrency={live + 1}"
            reasons.append(Reason("AT_CONCURRENCY", text, action))
    return reasons


def in_order(reasons: Iterable[Reason]) -> list[Reason]:
    """The most telling reason first, none twice."""
    return sorted(dict.fromkeys(reasons), key=lambda reason: CODES.index(reason.code))


def notes_of(store: Store, at: datetime | None) -> list[str]:
    """What isn't known of a moment in the past."""
    if at is None:
        return []
    notes = ["The leases of the past aren't kept."]
    since = from_table(store, next((since for (since,) in store.db.run("why.since")), None))
    if since is None or since > at:
        notes.append(f"History begins at {shown(since)}: nothing is known of the time before.")
    if since := Past(store, at).unknown_until():
        notes.append(
            f"What was registered is known since {shown(since)}: of the time before, what was "
            "there then is told."
        )
    return notes
