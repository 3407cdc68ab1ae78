"""Why a move by hand is refused: what is known, who holds it, and what to run."""

from collections.abc import Iterable, Sequence

from ..errors import Refused
from ..model import HOLD, RUNNING, Plan
from ..util.text import meant, typed
from .item_folding import fold_of
from .output_rows import Move, status
from .store import Store, job_names, refuse_flawed


def refuse_unknown_job(store: Store, jobid: str) -> None:
    """Refuse a job that isn't registered and has no rows."""
    if not store.db.run("moves.is_known", jobid=jobid):
        refuse_flawed(store, Plan(jobid, (), (), (), (), False))


def refuse_unknown_name(store: Store, name: str) -> None:
    """Refuse what is neither a job nor a dataset, registered or with rows."""
    if not store.db.run("look.known", which=name):
        like = meant(name, [*job_names(store), *dataset_names(store)]) or "."
        raise Refused(
            f"There is no job or dataset {name!r}{like} "
            "`odf job list` and `odf dataset list` tell what there is.",
            code="NOT_REGISTERED",
        )


def unknown_dataset(store: Store, datasetid: str, todo: str) -> Refused:
    """The refusal of a dataset that isn't registered; `todo` says what to run."""
    like = meant(datasetid, dataset_names(store)) or "."
    return Refused(f"Dataset {datasetid!r} isn't registered{like} {todo}", code="NOT_REGISTERED")


def dataset_names(store: Store) -> list[str]:
    return [name for (name,) in store.db.run("moves.dataset_names")]


def refuse_unknown(store: Store, jobid: str, asked: Sequence[str], rows: Iterable[Move]) -> None:
    """Refuse chunks of which the job has no row."""
    known = {row.dataid for row in rows}
    missing = [dataid for dataid in asked if dataid not in known]
    if missing:
        refuse_unknown_job(store, jobid)
        refuse_folded(store, jobid, missing)
        raise Refused(
            f"Job {jobid!r} has no chunk {_listed(missing)}: nothing was changed. "
            f"See `odf runs {typed(jobid)}`.",
            code="UNKNOWN_CHUNK",
        )


def refuse_folded(store: Store, jobid: str, dataids: Iterable[str]) -> None:
    """Refuse chunks that were folded: nothing is left of which they could be made again."""
    for dataid in dataids:
        if fold := fold_of(store, jobid, dataid):
            raise Refused(
                f"Chunk {dataid!r} of {jobid!r} lies within what was folded ({fold}): nothing was "
                f"changed. To have its rows made again, send the item again.",
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
                f"Chunk {row.dataid!r} of {row.datasetid!r} is {row.status_before}: a person holds "
                f"it. Run `odf release {typed(row.jobid, row.dataid)}` first.",
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
            cure = f"The lease ran out: run {recover}`"
        else:
            cure = f"Wait, or end that process and run {recover}` when the lease is over"
    return Refused(
        f"Chunk {dataid!r} of {jobid!r} is RUNNING, {by}{also}: nothing was changed. {cure}.",
        code="LOCKED",
    )


def _listed(dataids: Sequence[str]) -> str:
    more = f" and {len(dataids) - 5} more" if len(dataids) > 5 else ""
    return ", ".join(map(repr, dataids[:5])) + more
