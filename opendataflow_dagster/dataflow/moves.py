"""What a person moves by hand: resubmit, hold, release, ready; and clearing up after what was killed.

Each move is one transaction without an act, so that the triggers do what they do for any person: void
claims and locks, send a job's other outputs back, judge who may run now.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from .errors import LostRace, Refused, WrongUse
from .model import (
    ABSENT, FAILED, HOLD, PENDING, READY, RESUBMIT, RUNNING, SAME_AS, TRANSITIONS, read_status,
)  # fmt: skip
from .names import check_id, natural_key
from .store import Store

_Done = TypeVar("_Done")

EXTERNAL = "external"
"""The job id of chunks that were produced outside."""

WORDS = (PENDING, RUNNING, READY, FAILED, RESUBMIT, *SAME_AS)
"""Every word that doesn't hold a chunk."""


class Move(NamedTuple):
    """An OUT row, and what it became, would become, or stays."""

    jobid: str
    datasetid: str
    dataid: str
    status_before: str | None
    status_after: str | None


class Moved(NamedTuple):
    """What a move changed; which rows it left alone though they matter; which chunks needed nothing."""

    moves: list[Move]
    left: list[Move]
    same: list[str]

    @property
    def chunks(self) -> int:
        return len({(move.jobid, move.dataid) for move in self.moves})


def person() -> str:
    """Who signs what is done by hand: the user, and the machine."""
    return f"{os.environ.get('USER') or os.getuid()}@{os.uname().nodename}"


def resubmit(
    store: Store,
    jobid: str,
    dataids: Sequence[str] = (),
    *,
    failed: bool = False,
    downstream: bool = False,
    plan: bool = False,
    who: str | None = None,
    why: str | None = None,
) -> Moved:
    """Let a job make chunks again: those named, or (with `failed`) those of them, or of all, that failed.

    With `downstream`, what other jobs made of them is made again too; what runs there, or is held, is left.
    """
    asked = _asked(jobid, dataids)
    if not asked and not failed:
        raise WrongUse(f"Which chunks of {jobid!r}? Name them, or use --failed for all that failed.")

    def work() -> Moved:
        chosen = asked
        if failed:
            found = {dataid for (dataid,) in store.db.run("moves.failed", jobid=jobid)}
            chosen = [dataid for dataid in asked if dataid in found] if asked else sorted(found, key=natural_key)
        rows = _outputs(store, [jobid], chosen)
        running = [row for row in rows if row.status_before == RUNNING]
        if failed:
            _refuse_unknown_job(store, jobid)
        else:
            _refuse_unknown(store, jobid, chosen, rows)
            _refuse_running(store, running)
        busy = {row.dataid for row in running}
        moves = [row._replace(status_after=RESUBMIT) for row in rows
                 if row.dataid not in busy and _legal("resubmit", RESUBMIT, row)]  # fmt: skip
        left = running
        if downstream:
            below = _outputs(store, _readers(store, jobid), [each for each in chosen if each not in busy])
            stays = [row for row in below if read_status(row.status_before) in (RUNNING, HOLD)]
            stuck = {(row.jobid, row.dataid) for row in stays}
            moves += [row._replace(status_after=RESUBMIT) for row in below
                      if (row.jobid, row.dataid) not in stuck and _legal("resubmit", RESUBMIT, row)]  # fmt: skip
            left = left + stays
        return _carry_out(store, moves, left, chosen, plan=plan)

    return _through(store, work, who, why or "odf resubmit")


def hold(
    store: Store, jobid: str, dataids: Sequence[str], *,
    plan: bool = False, who: str | None = None, why: str | None = None,
) -> Moved:  # fmt: skip
    """Keep a job from making chunks, and others from reading what it made of them, until release."""
    asked = _asked(jobid, dataids, needed=True)

    def work() -> Moved:
        outputs = store.read_plan(jobid).outputs
        rows = _outputs(store, [jobid], asked)
        _refuse_running(store, [row for row in rows if row.status_before == RUNNING])
        if not outputs:
            _refuse_unknown(store, jobid, asked, rows)
        moves = [row._replace(status_after=HOLD) for row in rows if _legal("hold", HOLD, row)]
        there = {(row.datasetid, row.dataid) for row in rows}
        new = [Move(jobid, datasetid, dataid, None, HOLD)
               for dataid in asked for datasetid in outputs if (datasetid, dataid) not in there]  # fmt: skip
        return _carry_out(store, moves + new, [], asked, plan=plan)

    return _through(store, work, who, why or "odf hold")


def release(
    store: Store, jobid: str, dataids: Sequence[str], *,
    plan: bool = False, who: str | None = None, why: str | None = None,
) -> Moved:  # fmt: skip
    """Make held chunks what they were: PENDING if they weren't there, RESUBMIT if that can't be told."""
    asked = _asked(jobid, dataids, needed=True)

    def work() -> Moved:
        rows = _outputs(store, [jobid], asked)
        _refuse_unknown(store, jobid, asked, rows)
        held = [row for row in rows if read_status(row.status_before) == HOLD]
        were = {
            (row[0], row[1], row[2]): row[3]
            for row in store.db.run("moves.before_hold", rows=_json(held), words=json.dumps(WORDS))
        }
        moves = [row._replace(status_after=_released(were[row[:3]])) for row in held]
        return _carry_out(store, moves, [], asked, plan=plan)

    return _through(store, work, who, why or "odf release")


def ready(
    store: Store, datasetid: str, dataids: Sequence[str], *,
    plan: bool = False, who: str | None = None, why: str | None = None,
) -> Moved:  # fmt: skip
    """Mark chunks of a dataset as produced outside: who reads them may run."""
    check_id("datasetid", datasetid)
    if datasetid == "today":
        raise WrongUse("'today' is READY by itself, on each date. Name the dataset that was produced.")
    asked = [check_id("dataid", each) for each in dict.fromkeys(dataids)]
    if not asked:
        raise WrongUse(f"Which chunks of {datasetid!r} are ready? Name them.")

    def work() -> Moved:
        found = store.db.run("moves.produced", datasetid=datasetid, dataids=json.dumps(asked))
        rows = _in_order(Move(*row, None) for row in found)
        _refuse_running(store, [row for row in rows if row.status_before == RUNNING])
        for row in rows:
            if read_status(row.status_before) == HOLD:
                raise Refused(
                    f"Chunk {row.dataid!r} of {datasetid!r} is {row.status_before}: a person holds it. "
                    f"Run `odf release {row.jobid} {row.dataid}` first.",
                    code="HELD",
                )
        made = {row.dataid for row in rows if row.status_before == READY}
        numbers = dict(zip(asked, generations(store, len(asked)), strict=True)) if not plan else {}
        moves = [row._replace(status_after=READY) for row in rows
                 if row.dataid not in made and _legal("ready", READY, row)]  # fmt: skip
        there = {row.dataid for row in rows}
        moves += [Move(EXTERNAL, datasetid, dataid, None, READY) for dataid in asked if dataid not in there]
        done = _carry_out(store, moves, [], asked, plan=plan, numbers=numbers)
        if not plan:
            store.db.change("moves.note", rows=_json(moves, numbers))
        return done

    return _through(store, work, who, why or "odf ready")


def delete_run(store: Store, jobid: str, dataid: str, *, who: str | None = None, why: str | None = None) -> int:
    """Forget that a job ran a chunk: its own rows go, nobody else's; how many."""
    [dataid] = _asked(jobid, [dataid])

    def work() -> int:
        db = store.db
        rows = _outputs(store, [jobid], [dataid])
        _refuse_running(store, [row for row in rows if row.status_before == RUNNING])
        if db.run("moves.holder", jobid=jobid, dataid=dataid):
            raise _locked(store, jobid, dataid)
        gone = db.change("moves.delete_run", jobid=jobid, dataid=dataid)
        gone_claims = db.change("moves.forget_claim", jobid=jobid, dataid=dataid)
        if not (gone or gone_claims):
            raise _unknown(store, jobid, [dataid])
        return gone

    return _through(store, work, who, why or "odf delete-run")


class Unclaimed(NamedTuple):
    """A RUNNING output that no claim of ours stands for: the Java program's, or a person's."""

    jobid: str
    datasetid: str
    dataid: str
    status: str
    since: str | None
    due: bool


def unclaimed(store: Store, jobid: str | None = None, *, older_than: float = 0.0) -> list[Unclaimed]:
    """The RUNNING outputs without a claim; `due` are those that have been so for longer."""
    with store.db.reading():
        rows = store.db.run("moves.unclaimed", jobid=jobid, age=older_than)
    return [Unclaimed(*row[:5], due=bool(row[5])) for row in rows]


def recover_abandoned(
    store: Store,
    older_than: float,
    *,
    jobid: str | None = None,
    plan: bool = False,
    who: str | None = None,
    why: str | None = None,
) -> Moved:
    """Send back what has been RUNNING for longer than so many seconds without a claim of ours."""
    if older_than < 0:
        raise WrongUse("An age is at least 0 seconds.")

    def work() -> Moved:
        found = store.db.run("moves.unclaimed", jobid=jobid, age=older_than)
        moves = _in_order(Move(*row[:4], RESUBMIT) for row in found if row[5])
        return _carry_out(store, moves, [], [], plan=plan)

    return _through(store, work, who, why or "RUNNING without a claim for too long")


def generations(store: Store, count: int) -> list[int]:
    """As many fresh generations, growing."""
    return sorted(json.loads(store.db.run("moves.generations", count=count)[0][0])) if count else []


def add_rows(store: Store, rows: Sequence[Move], numbers: dict[str, int] | None = None) -> int:
    """Write OUT rows that aren't there yet; `numbers` are the generations, by dataid."""
    return store.db.change("moves.add", rows=_json(rows, numbers)) if rows else 0


def is_registered(store: Store, datasetid: str) -> bool:
    """Whether a dataset has a row of its own."""
    return bool(store.db.run("moves.is_registered", datasetid=datasetid))


def _through(store: Store, work: Callable[[], _Done], who: str | None, why: str) -> _Done:
    def once() -> _Done:
        with store.db.transaction(who=who or person(), why=why):
            return work()

    return store.db.insist(once)[0]


def _carry_out(
    store: Store,
    moves: list[Move],
    left: list[Move],
    asked: Sequence[str],
    *,
    plan: bool,
    numbers: dict[str, int] | None = None,
) -> Moved:
    if not plan:
        old = [move for move in moves if move.status_before is not None or move.status_after is None]
        changed = store.db.change("moves.move", rows=_json(old, numbers)) if old else 0
        added = add_rows(store, [move for move in moves if move.status_before is None], numbers)
        if changed + added < len(moves):
            raise LostRace("A row changed under this move.")
    touched = {move.dataid for move in moves} | {move.dataid for move in left}
    return Moved(moves, left, [dataid for dataid in asked if dataid not in touched])


def _outputs(store: Store, jobids: Iterable[str], dataids: Sequence[str]) -> list[Move]:
    jobids = sorted(jobids)
    if not (jobids and dataids):
        return []
    found = store.db.run("moves.outputs", jobids=json.dumps(jobids), dataids=json.dumps(list(dataids)))
    return _in_order(Move(*row, None) for row in found)


def _in_order(rows: Iterable[Move]) -> list[Move]:
    return sorted(rows, key=lambda row: (row.jobid, natural_key(row.dataid), row.dataid, row.datasetid))


def _legal(act: str, after: str, row: Move) -> bool:
    return read_status(row.status_before) in TRANSITIONS[act][after]


def _released(before: str) -> str:
    """What a held row becomes that was `before`."""
    if before == ABSENT:
        return PENDING
    status = read_status(before)
    return status if HOLD in TRANSITIONS["release"].get(status, ()) else RESUBMIT


def _readers(store: Store, jobid: str) -> set[str]:
    """The jobs that read what a job writes, and those that read what they write, and so on."""
    reads: dict[str, set[str]] = {}
    writes: dict[str, set[str]] = {}
    for job, itemtype, datasetid in store.db.run("moves.edges"):
        if itemtype == "IN":
            reads.setdefault(datasetid, set()).add(job)
        else:
            writes.setdefault(job, set()).add(datasetid)
    found: set[str] = set()
    todo = [jobid]
    while todo:
        for datasetid in writes.get(todo.pop(), ()):
            new = reads.get(datasetid, set()) - found - {jobid}
            found |= new
            todo += new
    return found


def _asked(jobid: str, dataids: Sequence[str], *, needed: bool = False) -> list[str]:
    check_id("jobid", jobid)
    if needed and not dataids:
        raise WrongUse(f"Which chunks of {jobid!r}? Name them.")
    return [check_id("dataid", each) for each in dict.fromkeys(dataids)]


def _json(rows: Iterable[Move], numbers: dict[str, int] | None = None) -> str:
    numbers = numbers or {}
    return json.dumps([row._asdict() | {"generation": numbers.get(row.dataid)} for row in rows])


def _refuse_unknown_job(store: Store, jobid: str) -> None:
    if not store.db.run("moves.is_known", jobid=jobid):
        raise Refused(
            f"Job {jobid!r} isn't registered and has never run. See `odf job list`.", code="NOT_REGISTERED"
        )


def _refuse_unknown(store: Store, jobid: str, asked: Sequence[str], rows: Iterable[Move]) -> None:
    known = {row.dataid for row in rows}
    missing = [dataid for dataid in asked if dataid not in known]
    if missing:
        raise _unknown(store, jobid, missing)


def _unknown(store: Store, jobid: str, missing: Sequence[str]) -> Refused:
    _refuse_unknown_job(store, jobid)
    return Refused(
        f"Job {jobid!r} has no chunk {_listed(missing)}: nothing was changed. See `odf runs {jobid}`.",
        code="UNKNOWN_CHUNK",
    )


def _refuse_running(store: Store, running: Sequence[Move]) -> None:
    if running:
        others = list(dict.fromkeys(row.dataid for row in running))[1:]
        raise _locked(store, running[0].jobid, running[0].dataid, others)


def _locked(store: Store, jobid: str, dataid: str, others: Sequence[str] = ()) -> Refused:
    also = f" (and so are {_listed(others)})" if others else ""
    held = store.db.run("moves.holder", jobid=jobid, dataid=dataid)
    if not held:
        found = store.db.run("moves.unclaimed", jobid=jobid, age=0)
        since = next((row[4] for row in found if row[2] == dataid), None)
        by = f"without a claim of ours (the Java program's?), since {since or 'an unknown time'}"
        cure = f"If that program is gone, run `odf recover --job {jobid} --older-than 2h`"
    else:
        [(owner, started, lease_end, late)] = held
        by = f"by {owner} since {started}, with a lease until {lease_end}"
        if late:
            cure = f"The lease ran out: run `odf recover --job {jobid}`"
        else:
            cure = f"Wait, or end that process and run `odf recover --job {jobid}` when the lease is over"
    return Refused(
        f"Chunk {dataid!r} of {jobid!r} is RUNNING, {by}{also}: nothing was changed. {cure}.", code="LOCKED"
    )


def _listed(dataids: Sequence[str]) -> str:
    more = f" and {len(dataids) - 5} more" if len(dataids) > 5 else ""
    return ", ".join(map(repr, dataids[:5])) + more
