"""Why a job as a whole may run or not: its registration, its dials, what its chunks wait for."""

from datetime import datetime

from ..errors import WrongUse
from ..location import keeps_versions
from ..model import BLOCKING, Plan
from ..store.store import Store
from ..util.text import typed
from ..util.times import from_table, to_table
from .explain import (
    ADVICE,
    CODES,
    Explanation,
    dial_reasons,
    explain_chunk,
    in_order,
    notes_of,
    unregistered,
)
from .state import Answer, Reason, datasets_at, producers_at, read_plan

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
    look: bool = False,
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
