"""Why a chunk, or a job as a whole, may run or not: the five questions, answered from rows."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import NamedTuple

from ..errors import WrongUse
from ..ids import check_id
from ..location import keeps_versions
from ..model import BLOCKING, Plan
from ..store.item_folding import fold_of
from ..store.registration_history import Past
from ..store.store import Store, flaw_of
from ..util.text import typed
from ..util.times import from_table, shown, to_table
from .answers import five_answers
from .reasons import IN_A_CIRCLE, advice, hindrances
from .state import Answer, Look, Reason, State, datasets_at, producers_at, read_plan, read_state

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


LookAt = Callable[[Store, State], dict[str, Look]]
"""Looks at the places of a chunk: dataset → whether its data is there now."""


def explain(
    store: Store,
    jobid: str,
    dataid: str | None = None,
    at: datetime | None = None,
    *,
    everything: bool = False,
    look: LookAt | None = None,
) -> Explanation:
    """Answer for one chunk, or for a job as a whole; for now, or for a moment in the past.

    Of a job of many chunks, only examples are looked at, unless `everything` is to be.

    `look` says whether the data of the chunk is in its place now; `storage.presence.look_at` does.

    Of the past, statuses, facts and what was registered are known, but not the leases of claims.
    """
    check_id("jobid", jobid)
    if dataid is not None:
        check_id("dataid", dataid)
    look = look if at is None else None  # what was in a place in the past can't be seen now
    with store.db.reading():
        if dataid is None:
            return explain_job(store, jobid, at, everything, look=look)
        return explain_chunk(store, jobid, dataid, at, look=look)


def explain_chunk(
    store: Store,
    jobid: str,
    dataid: str,
    at: datetime | None,
    asked: frozenset[str] = frozenset(),
    *,
    look: LookAt | None = None,
) -> Explanation:
    """The same within a transaction; `asked` are the consumers for whom a producer is asked."""
    state = read_state(store, read_plan(store, jobid, at), dataid, at)
    if state.plan.flaw:
        return unregistered(store, state.plan, dataid, at)

    if at is None and (fold := fold_of(store, jobid, dataid)):
        text = f"{dataid!r} lies within what was folded: {fold}; no row tells of a single one"
        return Explanation(jobid, dataid, at, False, [Reason("FOLDED", text)], [], [], {})

    if look:
        state = state._replace(looks=look(store, state))

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


# --- a job as a whole: its registration, its policy, what its chunks wait for ---


FEW = 3
"""Blocked chunks of one kind that are looked at closely."""


HINDERING = tuple(code for code in BLOCKING if code != "ALREADY_DONE")
"""What keeps chunks back, also while others of the job may run."""

MANY = 100_000
"""Rows of a job's datasets above which its chunks are judged only if all are asked for."""


def explain_job(
    store: Store,
    jobid: str,
    at: datetime | None,
    everything: bool = False,
    asked: frozenset[str] = frozenset(),
    *,
    look: LookAt | None = None,
) -> Explanation:
    """What may be claimed next and how much of it; if nothing, what the first chunks wait for.

    `asked` are the consumers for whom a producer is asked.
    """
    plan = read_plan(store, jobid, at)
    if plan.flaw:
        return unregistered(store, plan, None, at)
    if plan.today:
        now = from_table(store, datetime.fromtimestamp(store.now()).astimezone())
        today = at.astimezone(now.tzinfo).strftime("%Y-%m-%d") if at and now else store.today()
        found = explain_chunk(store, jobid, today, at, look=look)
        counts = {"" if found.may_run else found.code: 1}
        return found._replace(counts=counts, next_chunk=today if found.may_run else None)

    counts: dict[str, int] = {}
    queue: list[str] = []
    firsts: dict[str, list[str]] = {}
    size = {"jobid": jobid, "now": int(at is None), "most": MANY + 1}
    judged = everything or store.db.run("why.size", **size) <= [(MANY,)]
    if judged:
        for code, chunks, dataid in judge_chunks(store, plan, at, FEW):
            counts[code] = chunks
            firsts.setdefault(code, []).append(dataid)
    elif at is not None:
        raise WrongUse(
            f"{jobid!r} has more than {MANY:,} chunks, and what each was at that time takes long "
            f"to tell. Name a chunk: `odf why {typed(jobid)} DATAID --at TIME`, or use --all."
        )
    if at is None:
        [(claimable,)] = store.db.run("why.claimable", jobid=jobid)
        upcoming = [dataid for (dataid,) in store.db.run("why.next", jobid=jobid)]
        if not judged:
            queue.append(
                f"{jobid!r} has more than {MANY:,} chunks: those that can't run aren't counted. "
                f"`odf why {typed(jobid)} --all` does."
            )
            for (dataid,) in store.db.run("why.examples", jobid=jobid, few=FEW):
                firsts.setdefault(explain_chunk(store, jobid, dataid, None).code, []).append(dataid)
        elif claimable != counts.get("", 0):
            mending = "run `odf init` to mend it."
            if store.db.run("fill.queued", jobid=jobid):
                mending = "it is still being filled, by idle workers and `odf recover`."
            queue.append(
                f"{counts.get('', 0)} chunks could run, but the queue has {claimable}: {mending}"
            )
        counts = ({"": claimable} if claimable else {}) | {
            code: n for code, n in counts.items() if code
        }
    else:
        upcoming = firsts.get("", [])[:1]

    now = from_table(store, datetime.fromtimestamp(store.now()).astimezone())
    dials = dial_reasons(store, jobid, now, at)
    reasons, answers, notes = list(dials), list[Answer](), notes_of(store, at)
    if upcoming:
        first = explain_chunk(store, jobid, upcoming[0], at, look=look)
        reasons += [reason for reason in first.reasons if reason.code in ADVICE]
        answers = first.answers
    blocked = list[Reason]()
    for code in (code for code in CODES if code in firsts):
        if upcoming and code not in HINDERING:
            continue  # no news where something may run
        first = explain_chunk(store, jobid, firsts[code][0], at)
        cause = next((each for each in first.reasons if each.code == code), first.reasons[0])
        text = f"{_of(counts.get(code), firsts[code])}: {cause.text}"
        action = "" if code == "ALREADY_DONE" else cause.action  # what is done needs nothing
        blocked.append(Reason(code, text, action))
    if not (upcoming or firsts):
        blocked.append(_nothing_yet(store, plan, at, asked | {jobid}))
    # What concerns the next chunk comes before what keeps others back.
    found = [*in_order(reasons), *blocked] if upcoming else in_order([*reasons, *blocked])
    may_run = bool(upcoming) and not dials
    return Explanation(
        jobid,
        None,
        at,
        may_run,
        found,
        answers,
        notes + queue,
        counts,
        upcoming[0] if upcoming else None,
    )


def judge_chunks(
    store: Store, plan: Plan, at: datetime | None = None, few: int = 1
) -> list[tuple[str, int, str]]:
    """What stands in the way of a job's chunks: of each code how many, and the first of them."""
    places = {each: datasets_at(store, each, at) for each in (*plan.reads, *plan.outputs)}
    versioned = [each for each, rows in places.items() if any(map(keeps_versions, rows))]
    return store.db.run(
        "why.chunks",
        jobid=plan.jobid,
        now=int(at is None),
        at=to_table(store, at),
        few=few,
        versioned="".join(f"={each}=" for each in versioned),
    )


def _of(count: int | None, firsts: list[str]) -> str:
    if count is None:
        return f"chunk {firsts[0]!r}, for one"
    names = ", ".join(map(repr, firsts[:FEW]))
    return (
        f"{count} chunks ({names}{', …' if count > FEW else ''})"
        if count > 1
        else f"1 chunk ({names})"
    )


def _nothing_yet(store: Store, plan: Plan, at: datetime | None, asked: frozenset[str]) -> Reason:
    """What is missing for a job that has no chunk: it may be far upstream."""
    if not plan.reads:
        return Reason(
            "DATA_NOT_READY",
            f"{plan.jobid!r} reads nothing, and no row says which chunks there are",
            f"odf hold {typed(plan.jobid)} DATAID && odf release {typed(plan.jobid)} DATAID",
        )
    datasetid = plan.reads[0]
    text, ready = f"No chunk of {datasetid!r} is known yet", f"odf ready {typed(datasetid)} DATAID"
    makers = producers_at(store, datasetid, at)
    if not makers:
        text += ", and no job is registered that makes it"
        return Reason("DATA_NOT_READY", text, ready)
    maker = next((each for each in makers if each not in asked), None)
    if maker is None:
        text += f", and {makers[0]!r}, which makes it, waits for this in turn"
        return Reason("DATA_NOT_READY", text, ready)
    above = explain_job(store, maker, at, asked=asked)
    if above.may_run:
        text += f": {maker!r} makes it, and may run"
        return Reason("DATA_NOT_READY", text, f"odf run --job {typed(maker)} SCRIPT")
    text += f": {maker!r} makes it, and may not run: {above.reasons[0].text}"
    return Reason("DATA_NOT_READY", text, above.action)
