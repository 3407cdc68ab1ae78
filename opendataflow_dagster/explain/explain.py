"""Why a chunk, or a job as a whole, may run or not: the five questions, answered from rows."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from ..errors import WrongUse
from ..location import keeps_versions
from ..model import BLOCKING, Effect, Plan, check_id
from ..store.claims import NOTHING_CLAIMABLE, offer, offer_line
from ..store.history import Registration
from ..store.item_folding import fold_of
from ..store.store import Store, flaw_of, is_registered
from ..util.text import count_of, typed
from ..util.times import from_table, shown, to_table
from .answers import Answer, Look, Reason, State, five_answers, has_inputs, read_state, stale_line
from .reasons import IN_A_CIRCLE, advice, hindrances

REFUSALS = {
    "NOT_REGISTERED": "The job isn't registered, or writes nothing.",
    "FOLDED": "The item is finished, and so old that its rows have left the tables.",
    Effect.LOCKED: "Another worker is producing the chunk, or is reading what the job would write.",
    Effect.HELD: "The output has FAILED, or a person put it on HOLD: a person decides.",
    Effect.ALREADY_DONE: "The output is READY.",
    Effect.DATA_NOT_READY: "An input isn't READY.",
    "PAUSED": "The job is paused until a time that its policy names.",
    "AT_CONCURRENCY": "As many chunks of the job are running as its policy allows.",
    "INVALID_LOCATION": "The data of an input isn't where the tables say.",
    "NOT_VALIDATED": "An input's last check has failed.",
}
"""What stands in the way, the most telling first. A claim looks at statuses, not at places and
checks: it doesn't refuse for the last two, but whoever reads the data should."""

CODES = tuple(REFUSALS)

ADVICE = ("INVALID_LOCATION", "NOT_VALIDATED")
"""The codes that don't keep a claim from the chunk."""

LookAt = Callable[[Store, State], Mapping[str, Look]]


class Explanation(NamedTuple):
    """Whether a claim would get the chunk (or any chunk of a job), and why."""

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
    look: LookAt | None = None,
) -> Explanation:
    """Explain one chunk, or a job as a whole, now or at a moment in the past.

    Of a job with many chunks, only examples are checked, unless `everything` is given. With `look`
    (`storage.presence.look_at`), the answer also says whether the chunk's data exists now; it is an
    argument because storage is a layer above. Of the past, statuses, facts and registrations are
    known, but not leases.
    """
    check_id("jobid", jobid)
    if dataid is not None:
        check_id("dataid", dataid)
    with store.db.reading():
        if dataid is None:
            return explain_job(store, jobid, at, everything, look=None if at else look)
        return explain_chunk(store, jobid, dataid, at, look=None if at else look)


class Staleness(NamedTuple):
    """The inputs that were replaced since a chunk was produced, and whether it can run now."""

    line: str
    may_be_made: bool


def staleness(store: Store, jobid: str, dataid: str) -> Staleness:
    """Whether a chunk is stale, as `explain` tells it."""
    with store.db.reading():
        state = read_state(store, Registration(store, None).plan(jobid), dataid)
    return Staleness(stale_line(state), has_inputs(state))


def explain_chunk(
    store: Store,
    jobid: str,
    dataid: str,
    at: datetime | None,
    consumers: frozenset[str] = frozenset(),
    *,
    look: LookAt | None = None,
) -> Explanation:
    """Explain one chunk within a transaction; `consumers` are the jobs that wait for this one."""
    state = read_state(store, Registration(store, at).plan(jobid), dataid, at)
    if state.plan.flaw:
        return unregistered(store, state.plan, dataid, at)

    if at is None and (fold := fold_of(store, jobid, dataid)):
        text = f"{dataid!r} is among the folded items: {fold}; no row is left of a single one"
        return Explanation(jobid, dataid, at, False, [Reason("FOLDED", text)], [], [], {})

    if look:
        state = state._replace(looks=look(store, state))

    def above(producer: str) -> Reason | None:
        if producer in consumers or producer == jobid:
            return Reason(IN_A_CIRCLE, "")
        found = explain_chunk(store, producer, dataid, at, consumers | {jobid})
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
        if plan.outputs:  # it reads what it writes
            action += " --replace"
        elif is_registered(store, plan.jobid):
            action = "odf job list"
    reason = Reason("NOT_REGISTERED", flaw, action)
    return Explanation(plan.jobid, dataid, at, False, [reason], [], notes_of(store, at), {})


def dial_reasons(
    store: Store, jobid: str, now: datetime | None, at: datetime | None
) -> list[Reason]:
    """What a job's policy has against any claim at all, now or at a moment in the past."""
    if at:
        dials, now = [Registration(store, at).dials(jobid)], at
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
            text = (
                f"{jobid!r} may run {count_of(concurrency, 'chunk')} at once, and {live} "
                f"{'is' if live == 1 else 'are'} running"
            )
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
        notes.append(f"History begins at {shown(since)}: nothing is known before that.")
    if since := Registration(store, at).unknown_until():
        notes.append(
            f"Registrations are recorded since {shown(since)}: for the time before, those "
            "of that moment are shown."
        )
    return notes


# --- a job as a whole: its registration, its policy, what its chunks wait for ---


EXAMPLE_CHUNKS = 3
"""Blocked chunks of one kind that are looked at closely."""


HINDERING = tuple(code for code in BLOCKING if code != "ALREADY_DONE")
"""What keeps chunks back, even while others of the job may run."""

MAX_JUDGED_ROWS = 100_000
"""Rows of a job's datasets above which its chunks are judged only if all are asked for."""


def explain_job(
    store: Store,
    jobid: str,
    at: datetime | None,
    everything: bool = False,
    consumers: frozenset[str] = frozenset(),
    *,
    look: LookAt | None = None,
) -> Explanation:
    """What may be claimed next and how much of it; if nothing, what the first chunks wait for.

    `consumers` are the jobs that wait for this one: it can't wait for them in turn.
    """
    plan = Registration(store, at).plan(jobid)
    if plan.flaw:
        return unregistered(store, plan, None, at)
    if plan.today:
        return _explain_today(store, jobid, at, look)

    queue = _judge_queue(store, plan, at, everything)
    now = from_table(store, datetime.fromtimestamp(store.now()).astimezone())
    dials = dial_reasons(store, jobid, now, at)
    reasons, answers = list(dials), list[Answer]()
    if queue.upcoming:
        first = explain_chunk(store, jobid, queue.upcoming, at, look=look)
        reasons += [reason for reason in first.reasons if reason.code in ADVICE]
        answers = first.answers
    blocked = _blocked_reasons(store, jobid, at, queue)
    if not (queue.upcoming or queue.firsts):
        blocked.append(_nothing_yet(store, plan, at, consumers | {jobid}))
    # What concerns the next chunk comes before what keeps others back.
    ordered = [*in_order(reasons), *blocked] if queue.upcoming else in_order([*reasons, *blocked])
    return Explanation(
        jobid,
        None,
        at,
        queue.upcoming is not None and not dials,
        ordered,
        answers,
        notes_of(store, at) + queue.notes,
        queue.counts,
        queue.upcoming,
    )


def _explain_today(
    store: Store, jobid: str, at: datetime | None, look: LookAt | None
) -> Explanation:
    """A job that reads `today` has one chunk: the date."""
    now = from_table(store, datetime.fromtimestamp(store.now()).astimezone())
    today = at.astimezone(now.tzinfo).strftime("%Y-%m-%d") if at and now else store.today()
    found = explain_chunk(store, jobid, today, at, look=look)
    counts = {"" if found.may_run else found.code: 1}
    return found._replace(counts=counts, next_chunk=today if found.may_run else None)


class _Queue(NamedTuple):
    """How the chunks of a job stand."""

    counts: dict[str, int]
    """Code → chunks; those that may be claimed have none."""
    firsts: dict[str, list[str]]
    """Code → the first few of these chunks."""
    upcoming: str | None
    """The chunk that the next claim gets."""
    notes: list[str]


def _judge_queue(store: Store, plan: Plan, at: datetime | None, everything: bool) -> _Queue:
    """Judge the chunks of a job: all of them, or of a job with too many rows, examples."""
    counts: dict[str, int] = {}
    firsts: dict[str, list[str]] = {}
    size = {"jobid": plan.jobid, "now": int(at is None), "most": MAX_JUDGED_ROWS + 1}
    is_judged = everything or store.db.run("why.size", **size) <= [(MAX_JUDGED_ROWS,)]
    if is_judged:
        for code, chunks, dataid in judge_chunks(store, plan, at, EXAMPLE_CHUNKS):
            counts[code] = chunks
            firsts.setdefault(code, []).append(dataid)
    elif at is not None:
        raise WrongUse(
            f"{plan.jobid!r} has more than {MAX_JUDGED_ROWS:,} chunks, so their state at "
            f"that time takes long to compute. Name a chunk: `odf why {typed(plan.jobid)} "
            "DATAID --at TIME`, or use --all."
        )
    if at is not None:
        return _Queue(counts, firsts, next(iter(firsts.get("", [])), None), [])

    # The queue decides what is claimed next, so ask it even if every chunk was judged.
    [(claimable,)] = store.db.run("why.claimable", jobid=plan.jobid)
    upcoming = next((dataid for (dataid,) in store.db.run("why.next", jobid=plan.jobid)), None)
    notes = []
    if not is_judged:
        notes.append(
            f"{plan.jobid!r} has more than {MAX_JUDGED_ROWS:,} chunks, so those that can't "
            f"run aren't counted. To count them: odf why {typed(plan.jobid)} --all"
        )
        for (dataid,) in store.db.run("why.examples", jobid=plan.jobid, few=EXAMPLE_CHUNKS):
            code = explain_chunk(store, plan.jobid, dataid, None).code
            firsts.setdefault(code, []).append(dataid)
    elif claimable != counts.get("", 0):
        notes.append(_unfilled_queue(store, plan.jobid, counts.get("", 0), claimable))
    blocked = {code: chunks for code, chunks in counts.items() if code}
    return _Queue(({"": claimable} if claimable else {}) | blocked, firsts, upcoming, notes)


def _unfilled_queue(store: Store, jobid: str, judged: int, queued: int) -> str:
    mending = "to repair it, run `odf init`."
    if store.db.run("fill.queued", jobid=jobid):
        mending = "idle workers and `odf recover` are still filling it."
    return f"{count_of(judged, 'chunk')} could run, but the queue has {queued}: {mending}"


def _blocked_reasons(store: Store, jobid: str, at: datetime | None, queue: _Queue) -> list[Reason]:
    """For each code, what blocks the first of its chunks, and how many chunks there are."""
    blocked = []
    for code in (code for code in CODES if code in queue.firsts):
        if queue.upcoming and code not in HINDERING:
            continue  # no news where something may run
        chunks = queue.firsts[code]
        first = explain_chunk(store, jobid, chunks[0], at)
        cause = next((reason for reason in first.reasons if reason.code == code), first.reasons[0])
        text = f"{_of(queue.counts.get(code), chunks)}: {cause.text}"
        action = "" if code == "ALREADY_DONE" else cause.action  # what is done needs nothing
        blocked.append(Reason(code, text, action))
    return blocked


def judge_chunks(
    store: Store, plan: Plan, at: datetime | None = None, few: int = 1
) -> list[tuple[str, int, str]]:
    """What stands in the way of a job's chunks: of each code how many, and the first of them."""
    registered = Registration(store, at)
    places = {
        datasetid: registered.datasets(datasetid) for datasetid in (*plan.reads, *plan.outputs)
    }
    versioned = [datasetid for datasetid, rows in places.items() if any(map(keeps_versions, rows))]
    return store.db.run(
        "why.chunks",
        jobid=plan.jobid,
        now=int(at is None),
        at=to_table(store, at),
        few=few,
        versioned="".join(f"={column}=" for column in versioned),
    )


def _of(count: int | None, firsts: list[str]) -> str:
    if count is None:
        return f"chunk {firsts[0]!r}, for one"
    names = ", ".join(map(repr, firsts[:EXAMPLE_CHUNKS]))
    return (
        f"{count} chunks ({names}{', …' if count > EXAMPLE_CHUNKS else ''})"
        if count > 1
        else f"1 chunk ({names})"
    )


def _nothing_yet(
    store: Store, plan: Plan, at: datetime | None, consumers: frozenset[str]
) -> Reason:
    """What is missing for a job that has no chunk: it may be far upstream."""
    if not plan.reads:
        return Reason(
            "DATA_NOT_READY",
            f"{plan.jobid!r} reads nothing, and no row says which chunks it has",
            f"odf hold {typed(plan.jobid)} DATAID && odf release {typed(plan.jobid)} DATAID",
        )
    datasetid = plan.reads[0]
    text, ready = f"No chunk of {datasetid!r} is known yet", f"odf ready {typed(datasetid)} DATAID"
    makers = Registration(store, at).producers(datasetid)
    if not makers:
        text += ", and no registered job produces it"
        return Reason("DATA_NOT_READY", text, ready)
    maker = next((jobid for jobid in makers if jobid not in consumers), None)
    if maker is None:
        text += f", and {makers[0]!r}, which produces it, waits for this job in turn"
        return Reason("DATA_NOT_READY", text, ready)
    above = explain_job(store, maker, at, consumers=consumers)
    if above.may_run:
        text += f": {maker!r} produces it, and may run"
        return Reason("DATA_NOT_READY", text, f"odf run --job {typed(maker)} SCRIPT")
    text += f": {maker!r} produces it, and may not run: {above.reasons[0].text}"
    return Reason("DATA_NOT_READY", text, above.action)


MAX_IDLE_JUDGED_ROWS = 5_000
"""Rows of a job's datasets up to which all of its chunks are judged when none is claimable."""

RECENT_CHUNKS = 10
"""Chunks that are judged of a larger job: so many that changed last, and so many that failed."""

BLOCKED = {
    Effect.HELD: "FAILED or on HOLD",
    Effect.LOCKED: "running or being read",
    Effect.DATA_NOT_READY: "waiting for inputs",
    "": "not in the queue",
}
"""What keeps chunks from being claimed, in a few words."""


def why_nothing(store: Store, jobid: str) -> str:
    """Say in a few words why a job has nothing to claim: all is done, or what blocks its chunks.

    The cost doesn't depend on the number of chunks.
    """
    found = offer(store, jobid)
    more = f"details: `odf why {typed(jobid)}`"
    if found.obstacle not in ("", NOTHING_CLAIMABLE):
        return f"{found.obstacle}; {more}"
    if not found.obstacle:
        return f"{offer_line(found)} by now"
    counts, is_whole = store.db.insist(lambda: _codes(store, jobid))[0]
    done = counts[Effect.ALREADY_DONE]
    parts = [f"{counts[code]} {words}" for code, words in BLOCKED.items() if counts[code]]
    if parts:
        parts += [f"{done} done"] if done else []
        looked = "" if is_whole else f", of the {count_of(counts.total(), 'chunk')} checked"
        return f"blocked: {', '.join(parts)}{looked}; {more}"
    if not done:
        return f"{'no chunk is known yet' if is_whole else 'no chunk changed lately'}; {more}"
    if not is_whole:
        return (
            f"the {count_of(done, 'chunk')} that changed last are done; all of them: `odf "
            f"status {typed(jobid)}`"
        )
    return f"all done ({count_of(done, 'chunk')})"


def _codes(store: Store, jobid: str) -> tuple[Counter[str], bool]:
    """How many chunks of a job have which code of `odf why`; and whether these are all."""
    counts: Counter[str] = Counter()
    with store.db.reading():
        if store.db.run("why.size", jobid=jobid, now=1, most=MAX_IDLE_JUDGED_ROWS + 1) <= [
            (MAX_IDLE_JUDGED_ROWS,)
        ]:
            rows = judge_chunks(store, store.read_plan(jobid))
            counts.update({code: chunks for code, chunks, _ in rows})
            return counts, True
        for (dataid,) in store.db.run("offers.some", jobid=jobid, last=RECENT_CHUNKS):
            counts[explain_chunk(store, jobid, dataid, None).code] += 1
    return counts, False
