"""Why a chunk may run or not: the five questions, answered from rows."""

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from .answers import five_answers
from .folding import fold_of
from .hindrances import IN_A_CIRCLE, advice, hindrances
from .model import BLOCKING, Plan
from .names import check_id, typed
from .refusals import flaw_of
from .store import Store
from .times import from_table, shown
from .whystate import Answer, Reason, State, read_state

CODES = (
    "NOT_REGISTERED", "FOLDED", *BLOCKING, "PAUSED", "AT_CONCURRENCY", "INVALID_LOCATION",
    "NOT_VALIDATED",
)  # fmt: skip
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
) -> Explanation:
    """Answer for one chunk, or for a job as a whole; for now, or for a moment in the past.

    Of a job of many chunks, only examples are looked at, unless `everything` is to be.

    The past is known of statuses and facts. Registrations, dials and claims are today's.
    """
    check_id("jobid", jobid)
    if dataid is not None:
        check_id("dataid", dataid)
    with store.db.reading():
        if dataid is None:
            from .whyjob import explain_job

            return explain_job(store, jobid, at, everything)
        return explain_chunk(store, jobid, dataid, at)


def explain_chunk(
    store: Store, jobid: str, dataid: str, at: datetime | None, asked: frozenset[str] = frozenset()
) -> Explanation:
    """The same within a transaction; `asked` are the consumers for whom a producer is asked."""
    state = read_state(store, store.read_plan(jobid), dataid, at)
    if state.plan.flaw:
        return unregistered(store, state.plan, dataid, at)

    if at is None and (fold := fold_of(store, jobid, dataid)):
        text = f"{dataid!r} lies within what was folded: {fold}; no row tells of a single one"
        return Explanation(jobid, dataid, at, False, [Reason("FOLDED", text)], [], [], {})

    def above(producer: str) -> Reason | None:
        if producer in asked or producer == jobid:
            return Reason(IN_A_CIRCLE, "")
        found = explain_chunk(store, producer, dataid, at, asked | {jobid})
        return None if found.may_run else found.reasons[0]._replace(action=found.action)

    reasons = list(hindrances(state, above))
    if at is None:
        reasons += dial_reasons(store, jobid, state.now)
    return Explanation(
        jobid, dataid, at, not reasons, in_order([*reasons, *advice(state)]), five_answers(state),
        _notes(store, state), {},
    )  # fmt: skip


def unregistered(
    store: Store, plan: Plan, dataid: str | None, at: datetime | None
) -> Explanation:  # fmt: skip
    action = f"odf job add {typed(plan.jobid)} --in DATASET --out DATASET"
    reason = Reason("NOT_REGISTERED", flaw_of(store, plan).rstrip("."), action)
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
            reasons.append(Reason("PAUSED", text, f"odf policy {typed(jobid)} paused_until=no"))
        [(live, owner)] = store.db.run("why.live", jobid=jobid)
        if concurrency is not None and live >= concurrency:
            text = f"{jobid!r} may run {concurrency} chunks at once, and {live} are running"
            text += f": {owner} holds one" if owner else ""
            action = f"odf policy {typed(jobid)} concurrency={live + 1}"
            reasons.append(Reason("AT_CONCURRENCY", text, action))
    return reasons


def in_order(reasons: Iterable[Reason]) -> list[Reason]:
    """The most telling reason first, none twice."""
    return sorted(dict.fromkeys(reasons), key=lambda reason: CODES.index(reason.code))


def _notes(store: Store, state: State) -> list[str]:
    if state.at is None:
        return []
    notes = ["Registrations and places are today's; claims and dials of the past aren't kept."]
    since = from_table(store, next((at for (at,) in store.db.run("why.since")), None))
    if since is None or since > state.at:
        notes.append(f"History begins at {shown(since)}: nothing is known of the time before.")
    return notes
