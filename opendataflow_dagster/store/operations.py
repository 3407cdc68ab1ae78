"""What a person moves by hand: resubmit, hold, release, ready, delete and recover.

Each move is one transaction without an act, so the triggers treat it like any change by a person:
they void claims and locks, resubmit the job's other outputs, and decide which chunks may run.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from typing import Any, Literal, NamedTuple

from ..errors import DataflowError, NoDatabase, Refused, WrongUse
from ..model import (
    ABSENT,
    HOLD,
    PENDING,
    READY,
    RESUBMIT,
    RUNNING,
    TRANSITIONS,
    WORDS,
    Plan,
    Recovered,
    check_id,
    read_status,
)
from ..util.text import did_you_mean, typed
from ..util.times import to_table
from .catalog import depths
from .item_folding import fold_of
from .moves import (
    Move,
    Moved,
    as_json,
    as_moves,
    carry_out,
    in_transaction,
    moves_to,
    outputs_of,
    outputs_of_dataset,
    refuse_overtaken,
    replaced_by_newer,
    status,
)
from .store import DELAY_OVER, Store, job_names, refuse_flawed

NO_LIMIT = 2**62
"""More chunks than there are."""

EXTERNAL = "external"
"""The job id of chunks that were produced outside."""


def resubmit(
    store: Store,
    jobid: str | None,
    dataids: Sequence[str] = (),
    *,
    failed: bool = False,
    stale: bool = False,
    since: datetime | None = None,
    downstream: bool = False,
    plan: bool = False,
    most: int | None = None,
    who: str | None = None,
    why: str | None = None,
) -> Moved:
    """Resubmit chunks of a job: the named ones, or all that FAILED or are stale.

    If a location has a newer chunk, a named chunk is refused and any other is skipped. Moves are
    ordered upstream first.
    """
    if jobid is None and not (failed or stale):
        raise WrongUse("Which job? Name it, or use --failed or --stale for the chunks of all jobs.")
    wanted = list(dict.fromkeys(dataids)) if jobid is None else _checked_dataids(jobid, dataids)
    if not (wanted or failed or stale):
        raise WrongUse(
            f"Which chunks of {jobid!r}? Name them, or use --failed for all that failed."
        )
    statement = "moves.stale" if stale else "moves.failed" if failed else None
    limit = most + 1 if plan and most and not dataids else NO_LIMIT

    def work() -> Moved:
        chosen, cut = {jobid or "": wanted}, False
        if statement:
            if jobid is not None:
                refuse_unknown_job(store, jobid)
            chosen, cut = _found(store, statement, jobid, wanted, since, limit)
        edges = store.db.run("moves.edges") if downstream or len(chosen) > 1 else []
        depth = depths(_job_pairs(edges))
        in_order = sorted(chosen.items(), key=lambda item: (depth.get(item[0], 0), item[0]))
        moves, left = _all_again(
            store, in_order, edges if downstream else None, found=bool(statement)
        )
        moved = carry_out(store, moves, left=left, wanted=[] if statement else wanted, plan=plan)
        ordered = sorted(moved.moves, key=lambda move: depth.get(move.jobid, 0))
        return moved._replace(moves=ordered, cut=cut)

    return in_transaction(store, work, who, why or f"odf resubmit{' --stale' * stale}")


def _all_again(
    store: Store,
    chosen: Iterable[tuple[str, Sequence[str]]],
    edges: Sequence[tuple] | None,
    *,
    found: bool,
) -> tuple[list[Move], list[Move]]:
    """Return the moves that resubmit chunks, with `edges` also downstream; and what is left out.

    Chunks that were not `found`, but named, are refused if they can't be made again.
    """
    moves: list[Move] = []
    left: list[Move] = []
    for job, dataids in chosen:
        again, stays = _again(store, job, dataids, named=not found)
        moves += again
        left += stays
        if edges is not None:
            again, stays = _below(store, _readers(edges, job), dataids, stays)
            moves += again
            left += stays
    # A chunk that failed may also lie below another one: it is moved once, and isn't left.
    moving = {(move.jobid, move.dataid) for move in moves}
    rows = [row for row in dict.fromkeys(left) if (row.jobid, row.dataid) not in moving]
    return list(dict.fromkeys(moves)), rows


def _found(
    store: Store,
    statement: str,
    jobid: str | None,
    wanted: Sequence[str],
    since: datetime | None,
    limit: int,
) -> tuple[dict[str, list[str]], bool]:
    """The chunks by job that a statement finds, limited to the named ones; and whether these are
    all.
    """
    chunks = store.db.run(statement, jobid=jobid, since=to_table(store, since), most=limit)
    found: dict[str, list[str]] = {}
    for job, dataid in chunks[: limit - 1]:
        if not wanted or dataid in wanted:
            found.setdefault(job, []).append(dataid)
    return found, len(chunks) == limit


def _again(
    store: Store, jobid: str, dataids: Sequence[str], *, named: bool
) -> tuple[list[Move], list[Move]]:
    """The moves that resubmit chunks of a job, and what is skipped; a named one is refused."""
    rows = outputs_of(store, [jobid], dataids)
    if named:
        refuse_unknown(store, jobid, dataids, rows)
        refuse_running(store, rows)
    left = [row for row in rows if status(row) == RUNNING]
    old = replaced_by_newer(store, [row for row in rows if row not in left])
    if named:
        refuse_overtaken(old)
    left += [row for row, _ in old]
    return _apart(rows, left), left


def _below(
    store: Store, readers: Iterable[str], dataids: Sequence[str], left: Sequence[Move]
) -> tuple[list[Move], list[Move]]:
    """The moves that resubmit what `readers` produced from chunks, but for `left`; what stays."""
    busy = {row.dataid for row in left}
    rows = outputs_of(store, readers, [dataid for dataid in dataids if dataid not in busy])
    stays = [row for row in rows if status(row) in (RUNNING, HOLD)]
    stays += [row for row, _ in replaced_by_newer(store, [row for row in rows if row not in stays])]
    return _apart(rows, stays), stays


def set_hold(
    store: Store,
    jobid: str,
    dataids: Sequence[str],
    *,
    act: Literal["hold", "release"],
    plan: bool = False,
    who: str | None = None,
    why: str | None = None,
) -> Moved:
    """Hold chunks of a job, so that they are neither run nor read; or release them."""
    wanted = _checked_dataids(jobid, dataids, needed=True)
    moves_of = _moves_of_hold if act == "hold" else _moves_of_release

    def work() -> Moved:
        moves, new = moves_of(store, jobid, wanted)
        return carry_out(store, moves, new=new, wanted=wanted, plan=plan)

    return in_transaction(store, work, who, why or f"odf {act}")


hold = partial(set_hold, act="hold")
release = partial(set_hold, act="release")


def _moves_of_hold(
    store: Store, jobid: str, dataids: Sequence[str]
) -> tuple[list[Move], list[Move]]:
    """What holds chunks: moves of the rows that are there, and new rows for the others."""
    outputs = store.read_plan(jobid).outputs
    rows = outputs_of(store, [jobid], dataids)
    refuse_running(store, rows)
    if not outputs:
        refuse_unknown(store, jobid, dataids, rows)
    there = {(row.datasetid, row.dataid) for row in rows}
    refuse_folded(store, jobid, {*dataids} - {row.dataid for row in rows})
    new = [
        Move(jobid, datasetid, dataid, None, HOLD)
        for dataid in dataids
        for datasetid in outputs
        if (datasetid, dataid) not in there
    ]
    return moves_to(HOLD, rows, "hold"), new


def _moves_of_release(
    store: Store, jobid: str, dataids: Sequence[str]
) -> tuple[list[Move], list[Move]]:
    """What releases chunks: each row becomes what history says that it was before the hold."""
    rows = outputs_of(store, [jobid], dataids)
    refuse_unknown(store, jobid, dataids, rows)
    held = [row for row in rows if status(row) == HOLD]
    words = json.dumps([word for word in WORDS if word != HOLD])
    history = store.db.run("moves.before_hold", rows=as_json(held), words=words)
    before = {(row[0], row[1], row[2]): row[3] for row in history}
    return [row._replace(status_after=_released(before[row[:3]])) for row in held], []


def ready(
    store: Store,
    datasetid: str,
    dataids: Sequence[str],
    *,
    new: bool = True,
    plan: bool = False,
    who: str | None = None,
    why: str | None = None,
) -> Moved:
    """Mark chunks of a dataset as produced elsewhere, so that the jobs that read them may run.

    Without `new`, an unknown dataset is refused.
    """
    check_id("datasetid", datasetid)
    if datasetid == "today":
        raise WrongUse("'today' is READY by itself, every day. Name the dataset that was produced.")
    wanted = [check_id("dataid", dataid) for dataid in dict.fromkeys(dataids)]
    if not wanted:
        raise WrongUse(f"Which chunks of {datasetid!r} are ready? Name them.")

    def work() -> Moved:
        if not new and not store.db.run("moves.is_dataset", datasetid=datasetid):
            raise unknown_dataset(
                store,
                datasetid,
                f"If it is a new dataset, run: odf ready --new {typed(datasetid)} DATAID",
            )
        rows = outputs_of_dataset(store, datasetid, wanted)
        refuse_running(store, rows)
        refuse_held(rows)
        ready_already = {row.dataid for row in rows if status(row) == READY}
        there = {row.dataid for row in rows}
        for jobid in writers(store, datasetid):
            refuse_folded(store, jobid, [dataid for dataid in wanted if dataid not in there])
        moves = moves_to(READY, [row for row in rows if row.dataid not in ready_already], "ready")
        first = [
            Move(EXTERNAL, datasetid, dataid, None, READY)
            for dataid in wanted
            if dataid not in there
        ]
        return carry_out(store, moves, new=first, wanted=wanted, plan=plan)

    return in_transaction(store, work, who, why or "odf ready")


def delete_run(
    store: Store, jobid: str, dataid: str, *, who: str | None = None, why: str | None = None
) -> int:
    """Delete only a job's own rows for a chunk; return their number."""
    [dataid] = _checked_dataids(jobid, [dataid])

    def work() -> int:
        refuse_running(store, outputs_of(store, [jobid], [dataid]))
        if store.db.run("moves.holder", jobid=jobid, dataid=dataid):
            raise locked(store, jobid, dataid)
        gone = store.db.change("moves.delete_run", jobid=jobid, dataid=dataid)
        if not store.db.change("moves.forget_claim", jobid=jobid, dataid=dataid) and not gone:
            refuse_unknown(store, jobid, [dataid], [])
        return gone

    return in_transaction(store, work, who, why or "odf delete-run")


def due(store: Store, jobid: str | None = None) -> list[Recovered]:
    """What `Store.recover` would settle now."""
    found = [
        Recovered(claim.jobid, claim.dataid, *claim.verdict()) for claim in store.lost_claims(jobid)
    ]
    for job, dataid, _ in store.db.run("claims.due_retries", jobid=jobid):
        found.append(Recovered(job, dataid, RESUBMIT, DELAY_OVER))
    return found


class Unclaimed(NamedTuple):
    """A RUNNING output without a claim: of the Java program, or set by a person."""

    jobid: str
    datasetid: str
    dataid: str
    status: str
    since: str | None
    due: bool


def unclaimed(
    store: Store, jobid: str | None = None, *, older_than: float = 0.0
) -> list[Unclaimed]:
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
) -> Moved:
    """Resubmit chunks that have been RUNNING without a claim for longer than this many seconds."""
    if older_than < 0:
        raise WrongUse("An age can't be negative.")

    def work() -> Moved:
        found = store.db.run("moves.unclaimed", jobid=jobid, age=older_than)
        late = as_moves(row[:4] for row in found if row[5])
        return carry_out(store, moves_to(RESUBMIT, late, "recover"), plan=plan)

    return in_transaction(store, work, who, "RUNNING without a claim for too long")


def writers(store: Store, datasetid: str) -> list[str]:
    """The jobs that write a dataset."""
    edges = store.db.run("moves.edges")
    return sorted({job for job, kind, written in edges if (kind, written) == ("OUT", datasetid)})


def _checked_dataids(jobid: str, dataids: Sequence[str], *, needed: bool = False) -> list[str]:
    check_id("jobid", jobid)
    if needed and not dataids:
        raise WrongUse(f"Which chunks of {jobid!r}? Name them.")
    return [check_id("dataid", dataid) for dataid in dict.fromkeys(dataids)]


def _apart(rows: Sequence[Move], stays: Sequence[Move]) -> list[Move]:
    """The resubmission of rows, except of a chunk of which one row stays as it is."""
    stuck = {(row.jobid, row.dataid) for row in stays}
    return moves_to(
        RESUBMIT, [row for row in rows if (row.jobid, row.dataid) not in stuck], "resubmit"
    )


def _released(before: str) -> str:
    """The status of a released row: PENDING if it didn't exist, RESUBMIT if it is unknown."""
    if before == ABSENT:
        return PENDING
    was = read_status(before)
    return was if was in TRANSITIONS["release"] else RESUBMIT


def _job_pairs(edges: Iterable[tuple]) -> list[tuple[str, str]]:
    """Which job writes what which other one reads."""
    writers: dict[str, set[str]] = {}
    for job, itemtype, datasetid in edges:
        if itemtype == "OUT":
            writers.setdefault(datasetid, set()).add(job)
    return [
        (writer, job)
        for job, itemtype, datasetid in edges
        if itemtype == "IN"
        for writer in writers.get(datasetid, ())
        if writer != job
    ]


def _readers(edges: Iterable[tuple], jobid: str) -> set[str]:
    """The jobs that read what a job writes, and those that read what they write, and so on."""
    reads: dict[str, set[str]] = {}
    writes: dict[str, set[str]] = {}
    for job, itemtype, datasetid in edges:
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


# Why a move by hand is refused: what is known, who holds it, and what to run.


def refuse_unknown_job(store: Store, jobid: str) -> None:
    """Refuse a job that isn't registered and has no rows."""
    if not store.db.run("moves.is_known", jobid=jobid):
        refuse_flawed(store, Plan(jobid, (), (), (), (), False))


def refuse_unknown_name(store: Store, name: str) -> None:
    """Refuse what is neither a job nor a dataset, registered or with rows."""
    if not store.db.run("look.known", which=name):
        like = did_you_mean(name, [*job_names(store), *dataset_names(store)]) or "."
        raise Refused(
            f"There is no job or dataset {name!r}{like} `odf job list` and `odf dataset "
            "list` show all names.",
            code="NOT_REGISTERED",
        )


def unknown_dataset(store: Store, datasetid: str, todo: str = "See `odf dataset list`.") -> Refused:
    """The refusal of a dataset that isn't registered; `todo` says what to run."""
    like = did_you_mean(datasetid, dataset_names(store)) or "."
    return Refused(f"Dataset {datasetid!r} isn't registered{like} {todo}", code="NOT_REGISTERED")


def dataset_names(store: Store) -> list[str]:
    return [name for (name,) in store.db.run("moves.dataset_names")]


def refuse_unknown(store: Store, jobid: str, wanted: Sequence[str], rows: Iterable[Move]) -> None:
    """Refuse chunks of which the job has no row."""
    known = {row.dataid for row in rows}
    missing = [dataid for dataid in wanted if dataid not in known]
    if missing:
        refuse_unknown_job(store, jobid)
        refuse_folded(store, jobid, missing)
        raise Refused(
            f"Job {jobid!r} has no chunk {_listed(missing)}: nothing was changed. See `odf "
            f"runs {typed(jobid)}`.",
            code="UNKNOWN_CHUNK",
        )


def refuse_folded(store: Store, jobid: str, dataids: Iterable[str]) -> None:
    """Refuse folded chunks: nothing is left from which they could be produced again."""
    for dataid in dataids:
        if fold := fold_of(store, jobid, dataid):
            raise Refused(
                f"Chunk {dataid!r} of {jobid!r} is among the folded items ({fold}): nothing was "
                "changed. To produce its rows again, send the item again.",
                code="FOLDED",
            )


def refuse_running(store: Store, rows: Iterable[Move]) -> None:
    """Refuse chunks that are being produced, and name the first one's holder."""
    running = [row for row in rows if row.status_before == RUNNING]
    if running:
        others = list(dict.fromkeys(row.dataid for row in running))[1:]
        raise locked(store, running[0].jobid, running[0].dataid, others)


def refuse_held(rows: Iterable[Move]) -> None:
    """Refuse chunks that a person holds."""
    for row in rows:
        if status(row) == HOLD:
            raise Refused(
                f"Chunk {row.dataid!r} of {row.datasetid!r} is {row.status_before}: a person "
                f"holds it. First run: odf release {typed(row.jobid, row.dataid)}",
                code="HELD",
            )


def locked(store: Store, jobid: str, dataid: str, others: Sequence[str] = ()) -> Refused:
    """The refusal of a chunk that is RUNNING: held by whom, since when, until when."""
    also = f" (and so are {_listed(others)})" if others else ""
    recover = f"`odf recover --job {typed(jobid)}"
    held = store.db.run("moves.holder", jobid=jobid, dataid=dataid)
    if not held:
        found = store.db.run("moves.unclaimed", jobid=jobid, age=0)
        since = next((row[4] for row in found if row[2] == dataid), None) or "an unknown time"
        by = f"without a claim of ours (the Java program's?), since {since}"
        cure = f"If that program is gone, run {recover} --older-than 2h`"
    else:
        [(owner, started, lease_end, late)] = held
        by = f"by {owner} since {started}, with a lease until {lease_end}"
        if late:
            cure = f"The lease has expired: run {recover}`"
        else:
            cure = f"Wait; or end that process and, when the lease has expired, run {recover}`"
    return Refused(
        f"Chunk {dataid!r} of {jobid!r} is RUNNING, {by}{also}: nothing was changed. {cure}.",
        code="LOCKED",
    )


def _listed(dataids: Sequence[str]) -> str:
    more = f" and {len(dataids) - 5} more" if len(dataids) > 5 else ""
    return ", ".join(map(repr, dataids[:5])) + more


# A person's own SQL: the original's `sql` and `dml`.


def select_rows(store: Store, text: str) -> list[dict[str, Any]]:
    """The rows of a query; it can't change anything."""
    with _in_one_line(store), store.db.reading():
        rows, cursor = store.db.one(text)
        names = _distinct([column[0] for column in cursor.description or ()])
    return [dict(zip(names, row, strict=True)) for row in rows]


def change_rows(store: Store, text: str, *, who: str) -> int:
    """How many rows a statement changed; history is signed with `who`."""
    with _in_one_line(store), store.db.transaction(who=who, why="odf dml"):
        _, cursor = store.db.one(text)
        return max(0, cursor.rowcount)


@contextmanager
def _in_one_line(store: Store) -> Iterator[None]:
    try:
        yield
    except (DataflowError, *store.db.failures) as error:
        cause = error.__cause__ if isinstance(error, DataflowError) else error
        if cause is None or "locked" in str(cause):
            raise
        line = str(cause).strip().partition("\n")[0].rstrip(".")
        raise DataflowError(
            f"The database refused the statement: {line}. {_advice(error, line)}"
        ) from None


def _advice(error: BaseException, line: str) -> str:
    if "readonly" in line or "read-only" in line:
        return "`odf sql` only reads. To change rows, use `odf dml`."
    if isinstance(error, NoDatabase):
        return "Correct the statement; if tables are missing, run `odf init`."
    return "Correct the statement, and try again."


def _distinct(names: list[str]) -> list[str]:
    """Column names as keys: `id`, and `id_2` for another `id`."""
    return [
        name if name not in names[:at] else f"{name}_{names[:at].count(name) + 1}"
        for at, name in enumerate(names)
    ]
