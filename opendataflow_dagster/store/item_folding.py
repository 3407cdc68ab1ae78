"""Finished items are folded: a count, a range and a digest stay of them, and no other row."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, NamedTuple

from ..errors import DataflowError, LostRace
from ..location import is_packed
from ..model import FOLD_AFTER_SECONDS
from ..util.times import from_table, shown, to_table
from .claims import dial
from .history import KEY_LIFETIME
from .store import Store

FOLD_PAGE_ITEMS = 1000
"""Items that one transaction looks at, so that workers never wait for long."""

SHRINK_BYTES = 8 * 1024 * 1024
"""Bytes that must be free in a SQLite file, and more than are in use, before a rewrite."""

TABLES = (
    "datastatus",
    "dataevent",
    "chunkfact",
    "claim",
    "pending",
    "pipelinestep",
    "streamitem",
    "streamkey",
    "csvpart",
)
"""The tables that rows of items leave."""


class Fold(NamedTuple):
    """What was folded of a job: how many items, between which numbers, and when it was last."""

    jobid: str
    items: int
    first: int
    last: int
    folded: datetime | None

    def __str__(self) -> str:
        items = "1 item" if self.items == 1 else f"{self.items:,} items"
        return (
            f"{items} of {self.jobid!r} from {self.first} to {self.last}, all of them READY, "
            f"folded until {shown(self.folded)}"
        )


class _Chain(NamedTuple):
    """What a job that takes items writes, and so do those that read it: jobs and datasets."""

    outputs: tuple[tuple[str, str], ...]

    def parameters(self, store: Store, dataids: Sequence[str]) -> dict[str, Any]:
        lists = {
            "dataids": list(dataids),
            "jobids": sorted({jobid for jobid, _ in self.outputs}),
            "datasetids": sorted({datasetid for _, datasetid in self.outputs}),
        }
        if store.db.dialect == "sqlite":
            return {name: json.dumps(values) for name, values in lists.items()}
        return lists

    def pairs(self) -> str:
        return json.dumps(
            [dict(zip(("jobid", "datasetid"), output, strict=True)) for output in self.outputs]
        )


def fold_items(store: Store) -> int:
    """Fold all items that are old enough, and forget keys; how many items were folded.

    An item is folded once its job and all that read what it has made are READY for it, for as long
    as the dial `fold_after` says. One that failed, waits, is held, or is read late stays.
    """
    jobs = store.db.fetch("items.jobs")
    folded = sum(fold(store, jobid) for (jobid,) in jobs)
    now = datetime.fromtimestamp(store.now(), UTC)
    forgotten = to_table(store, now - KEY_LIFETIME)
    store.db.insist(lambda: store.db.change("folding.forget_keys", forgotten=forgotten))
    return folded


def fold_age(store: Store, jobid: str) -> float:
    """After how many seconds a finished item of a job is folded."""
    return float(dial(store, jobid, "fold_after") or FOLD_AFTER_SECONDS)


def fold(store: Store, jobid: str) -> int:
    """Fold the items of one job that are old enough; how many."""
    store.db.insist(store.refuse_unclaimable)
    now = datetime.fromtimestamp(store.now(), UTC)
    before = to_table(store, now - timedelta(seconds=fold_age(store, jobid)))
    links = store.db.fetch("folding.links")
    chain = _chain(links, jobid)
    if not chain.outputs:
        return 0
    last: dict[str, Any] = {
        "received": to_table(store, datetime(1, 1, 2, tzinfo=UTC)),
        "dataid": "",
    }
    folded = 0
    while True:
        page, _ = store.db.insist(
            lambda last=last: store.db.run(
                "folding.page", jobid=jobid, before=before, size=FOLD_PAGE_ITEMS, **last
            )
        )
        if page:
            dataids = [dataid for _, dataid in page]
            folded += store.db.insist(
                lambda dataids=dataids: _fold_page(store, jobid, chain, dataids, before)
            )[0]
            last = dict(zip(("received", "dataid"), page[-1], strict=True))
        if len(page) < FOLD_PAGE_ITEMS:
            return folded


def reclaim_room(store: Store) -> bool:
    """Free the space of deleted rows; return whether nothing is left to free.

    It waits for nobody: what another session uses, or may still see, is left for the next call.
    """
    db = store.db
    if db.dialect == "postgres":
        for table in TABLES:  # whoever isn't their owner leaves it to autovacuum
            _vacuum(store, table)
        for (table,) in _bloated(store):
            _vacuum(store, table, "full, ")
        return not _bloated(store)
    [(used, free)] = db.fetch("folding.free")
    if free > max(SHRINK_BYTES, used):
        try:
            db.run("folding.shrink")
            db.run("folding.cut_log")
        except DataflowError:  # somebody reads or writes
            return False
    return True


def _vacuum(store: Store, table: str, how: str = "") -> None:
    text = store.db.statement("folding.tidy")
    text = text.replace("datastatus", table).replace("vacuum (", f"vacuum ({how}")
    store.db.insist(lambda: store.db.execute(text, {}))


def _bloated(store: Store) -> list[tuple]:
    return store.db.fetch("folding.bloated")


def folds(store: Store, which: str | None = None) -> list[Fold]:
    """What was folded of each job; of one, or of those that write a dataset, by its name."""
    rows = store.db.run("folding.of_jobs", which=which)
    return [
        Fold(jobid, items, first, last, from_table(store, folded))
        for jobid, items, first, last, folded in rows
    ]


def fold_marks(store: Store) -> dict[str, int]:
    """How many items were folded of each dataset: a number that grows with each."""
    marks: dict[str, int] = {}
    for _, items, datasetid in store.db.run("folding.marks"):
        marks[datasetid] = marks.get(datasetid, 0) + items
    return marks


def fold_of(store: Store, jobid: str, dataid: str) -> Fold | None:
    """What was folded of a job, if a chunk lies within it: it has no row of its own any more."""
    if not (dataid.isascii() and dataid.isdigit() and len(dataid) < 19):
        return None
    rows = store.db.run("folding.within", jobid=jobid, dataid=dataid, number=int(dataid))
    for items, first, last, folded in rows:
        return Fold(jobid, items, first, last, from_table(store, folded))
    return None


def _fold_page(store: Store, jobid: str, chain: _Chain, dataids: Sequence[str], before: Any) -> int:
    db, parameters = store.db, chain.parameters(store, dataids)
    with db.transaction(who="odf serve", why="folded", act="fold"):
        # One at a time: a job's digest is chained over what was folded before, so that two pages
        # at once would both continue from the same one, and one of them would be lost.
        db.run("folding.turn")
        left = {dataid for (dataid,) in db.run("folding.unsettled", **parameters)}
        outputs: dict[str, list[tuple]] = {}
        # Parameters that a statement doesn't name are no trouble to either driver.
        for row in db.run("folding.outputs", pairs=chain.pairs(), before=before, **parameters):
            outputs.setdefault(row[0], []).append(row)
        whole = [
            dataid
            for dataid in dataids
            if dataid not in left
            and len(outputs.get(dataid, ())) == len(chain.outputs)
            and not any(is_packed(row[-1]) for row in outputs[dataid])
        ]
        if not whole:
            return 0
        parameters = chain.parameters(store, whole)
        gone = db.change("folding.remove_outputs", **parameters)
        items = db.change("folding.remove_items", jobid=jobid, **parameters)
        if gone < len(whole) * len(chain.outputs) or items < len(whole):
            raise LostRace("An item changed while it was folded.")
        for name in ("reads", "facts", "steps", "parts"):
            db.change(f"folding.remove_{name}", **parameters)
        for writer in sorted({job for job, _ in chain.outputs}):
            rows = [row for dataid in whole for row in outputs[dataid] if row[1] == writer]
            _note(store, writer, rows)
    return len(whole)


def _note(store: Store, jobid: str, rows: Sequence[tuple]) -> None:
    """Add folded items to a job's fold; the digest continues from the previous one."""
    numbers = [int(dataid) for dataid in dict.fromkeys(row[0] for row in rows)]
    known = store.db.run("folding.known", jobid=jobid)
    items, first, last, digest = known[0] if known else (0, numbers[0], numbers[0], "")
    lines = "".join(json.dumps([row[0], *row[2:7]], default=str) + "\n" for row in rows)
    store.db.change(
        "folding.note",
        jobid=jobid,
        items=items + len(numbers),
        first=min(first, *numbers),
        last=max(last, *numbers),
        digest=sha256(f"{digest}\n{lines}".encode()).hexdigest(),
    )


def _chain(links: Iterable[tuple[str, str, str]], jobid: str) -> _Chain:
    links = list(links)
    jobs, todo = {jobid}, [jobid]
    while todo:
        job = todo.pop()
        written = {datasetid for writer, kind, datasetid in links if (writer, kind) == (job, "OUT")}
        readers = {
            reader for reader, kind, datasetid in links if kind == "IN" and datasetid in written
        }
        todo += readers - jobs
        jobs |= readers
    return _Chain(
        tuple(
            sorted(
                (writer, datasetid)
                for writer, kind, datasetid in links
                if kind == "OUT" and writer in jobs
            )
        )
    )
