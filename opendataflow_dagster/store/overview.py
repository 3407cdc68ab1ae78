"""The state of things: rows, counts, and who runs what."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple

from ..model import (
    ABSENT,
    PENDING,
    READY,
    RUNNING,
    STRENGTH,
    URGENCY,
    WORDS,
    Status,
    natural_key,
    read_status,
)
from ..util.times import from_table, shown, to_table
from .catalog import depths
from .history import words_text
from .item_folding import folds
from .operations import refuse_unknown_name
from .store import Store

STATUSES = (*(status for status in Status if status != PENDING), PENDING)
"""The columns of a summary: chunks that nobody has started come last."""

COLUMNS: tuple[str, ...] = (
    "datasetid",
    "jobid",
    "dataid",
    "locktype",
    "status",
    "modified",
    "generation",
)
"""The columns of a listing of rows."""

FAILURES = ("jobid", "dataid", "modified", "why", "retry_at")
"""The columns of a listing of FAILED chunks."""

SAMPLED_ABOVE_CHUNKS = 100_000
"""Chunks above which a grid is drawn from a sample."""

SAMPLE_CHUNKS = 20_000
"""Chunks that a grid is drawn from at most, but for those of rare statuses."""

SORTED_ROWS = 1000
"""Rows of a listing that are sorted in natural order here."""

DATE = re.compile(r"\d{4}-\d\d(-\d\d)?")
"""How a dataid begins that is a date."""

TIMES = ("modified", "started", "heartbeat", "lease_end", "paused_until", "retry_at")


class Strip(NamedTuple):
    """The chunks of one output of one job in natural order, `each` of them to a square."""

    jobid: str
    datasetid: str
    chunks: int
    each: int
    squares: list[str | None]
    """None where this output has no chunk that others have."""
    starts: Sequence[str] = ()
    """The first dataid of each square; equal in strips that are drawn below one another."""


def status(
    store: Store,
    name: str | None = None,
    *,
    statuses: Collection[str] = (),
    since: datetime | None = None,
    limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The rows of a job or a dataset, in natural order; in a longer listing, shorter ids first.

    Args:
        name: The job or dataset; None takes all.
        statuses: Only rows that are read as one of these.
        since: Only rows modified since then.
        limit: At most so many rows; None reads on to the end, row by row.
    """
    with store.db.reading():
        rows = store.db.stream(
            "look.rows",
            which=name,
            words=words_text(statuses),
            since=to_table(store, since),
            limit=None if limit is None else max(limit, SORTED_ROWS + 1),
        )
        with closing(rows):
            found = (dict(zip(COLUMNS, row, strict=True)) for row in rows)
            head = list(islice(found, SORTED_ROWS + 1))
            if not head and name is not None:
                refuse_unknown_name(store, name)
            if len(head) <= SORTED_ROWS:
                head.sort(key=_natural_place)
            for row in islice(chain(head, found), limit):
                yield _timed(store, row)


def _natural_place(row: dict[str, Any]) -> tuple[str, ...]:
    dataid = row["dataid"] or ""
    return natural_key(dataid), dataid, row["datasetid"], row["jobid"]


def summary(store: Store, name: str | None = None) -> list[dict[str, Any]]:
    """A row for each output of each job: what may be claimed now, and the chunks by status.

    `stale` are those READY chunks whose inputs have been replaced since they were made.

    The database counts, so that a million chunks are as good as ten.
    """
    today = store.today()
    with store.db.reading():
        claimable = dict(store.db.run("look.claimable", which=name, today=today))
        outputs = set(store.db.run("look.outputs", which=name))
        counts = store.db.run("look.counts", which=name)
        stale = {row[:2]: row[2] for row in store.db.run("look.stale", which=name)}
        folded = {fold.jobid: fold.items for fold in folds(store, name)}
        policies = {row["jobid"]: _timed(store, row) for row in store.db.records("look.policies")}
        now = from_table(store, datetime.fromtimestamp(store.now()).astimezone())
    found: dict[tuple[str, str], dict[str, int]] = {
        key: dict.fromkeys(STATUSES, 0) for key in outputs
    }
    for jobid, datasetid, word, chunks in counts:
        read = read_status(word or "?")
        found.setdefault((jobid, datasetid), dict.fromkeys(STATUSES, 0))[read] += chunks
    return [
        {"jobid": jobid, "datasetid": datasetid}
        | {"claimable": claimable.get(jobid, 0) if (jobid, datasetid) in outputs else 0}
        | {word.lower(): chunks for word, chunks in found[jobid, datasetid].items()}
        | {"stale": stale.get((jobid, datasetid), 0)}
        | {"note": _note(policies.get(jobid), now, folded.get(jobid, 0))}
        for jobid, datasetid in sorted(found, key=lambda key: (key[0] or "", key[1] or ""))
    ]


def running(store: Store, name: str | None = None) -> list[dict[str, Any]]:
    """The live claims, the oldest first."""
    with store.db.reading():
        return [_timed(store, row) for row in store.db.records("look.claims", which=name)]


def failures(
    store: Store,
    name: str | None = None,
    *,
    since: datetime | None = None,
    limit: int | None = None,
) -> Iterator[dict[str, Any]]:
    """The chunks that failed, the last first: since when, why, and when a retry is due, if any is.

    Args:
        name: A job or dataset; None takes all.
        since: Only chunks that failed since then.
        limit: At most so many chunks; None reads on to the end, row by row.
    """
    chosen = {"which": name, "since": to_table(store, since), "limit": limit}
    with store.db.reading(), closing(store.db.stream("look.failures", **chosen)) as rows:
        for row in rows:
            yield _timed(store, dict(zip(FAILURES, row, strict=True)))


def grid(store: Store, name: str | None = None, *, most: int = 2000) -> list[Strip]:
    """A square for each chunk, also for those to be claimed; at most `most` in a strip.

    Above `SAMPLED_ABOVE_CHUNKS` chunks, strips are drawn from a sample that has every chunk of a
    rare status: one that failed among a million READY ones is seen.
    """
    today = store.today()
    with store.db.reading():
        depth = depths(store.db.run("look.flows"))
        sizes, rare = _sizes(store, name, today)
        part = max(most, SAMPLE_CHUNKS // max(len(sizes), 1))
        if sizes.total() > SAMPLED_ABOVE_CHUNKS:
            rates = [
                {"jobid": jobid, "datasetid": datasetid, "rate": part / chunks}
                for (jobid, datasetid), chunks in sizes.items()
                if chunks
            ]
            rows = store.db.run(
                "look.sample", rates=json.dumps(rates), rare=json.dumps(rare), today=today
            )
        else:
            rows = store.db.run("look.squares", which=name, today=today)
    found: dict[tuple[str, str], dict[str, str]] = {}
    for jobid, datasetid, dataid, word in rows:
        words = found.setdefault((jobid, datasetid), {})
        words[dataid or ""] = read_status(word) if word != "" else ABSENT
    ordered = sorted(found, key=lambda key: (depth.get(key[1], 0), key))
    union = _natural({dataid for words in found.values() for dataid in words})
    strips = [_strip(*key, found[key], union, most) for key in ordered]
    if sizes.total() <= SAMPLED_ABOVE_CHUNKS:
        return strips
    return [_whole(strip, sizes[strip[:2]], part) for strip in strips]


def _sizes(
    store: Store, name: str | None, today: str
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """How many squares each strip has (RESUBMIT may count twice), and which statuses are rare."""
    sizes: Counter[tuple[str, str]] = Counter()
    words: Counter[str] = Counter()
    for jobid, datasetid, word, chunks in store.db.run("look.counts", which=name):
        sizes[jobid, datasetid] += chunks
        words[word] += chunks
    claimable = dict(store.db.run("look.claimable", which=name, today=today))
    for jobid, datasetid in store.db.run("look.outputs", which=name):
        sizes[jobid, datasetid] += claimable.get(jobid, 0)
    rare, room = [], SAMPLED_ABOVE_CHUNKS
    for word, chunks in sorted(words.items(), key=itemgetter(1)):
        if word and chunks <= room and read_status(word) not in (READY, PENDING):
            rare.append(word)
            room -= chunks
    return sizes, rare


def _whole(strip: Strip, chunks: int, part: int) -> Strip:
    """A strip with the numbers of all its chunks, if it was drawn from a sample."""
    if chunks <= part:
        return strip
    return strip._replace(chunks=chunks, each=-(-chunks // len(strip.squares)))


def _strip(jobid: str, datasetid: str, words: dict[str, str], union: list[str], most: int) -> Strip:
    """Draw below one another what has much the same chunks, or dates, so that gaps are seen."""
    are_dates = all(map(DATE.match, union))
    aligned = len(union) <= min(most, 2 * len(words) if not are_dates else most)
    chunks = union if aligned else _natural(words)
    each = -(-len(chunks) // most)
    squares = [
        max(
            (words[dataid] for dataid in chunks[at : at + each] if dataid in words),
            key=URGENCY.index,
            default=None,
        )
        for at in range(0, len(chunks), each)
    ]
    return Strip(jobid, datasetid, len(words), each, squares, chunks[::each])


def _natural(dataids: Iterable[str]) -> list[str]:
    return sorted(dataids, key=lambda dataid: (natural_key(dataid), dataid))


def _timed(store: Store, row: dict[str, Any]) -> dict[str, Any]:
    return row | {name: from_table(store, row[name]) for name in TIMES if name in row}


def _note(policy: dict[str, Any] | None, now: datetime | None, folded: int) -> str:
    notes = []
    until = policy["paused_until"] if policy else None
    if until and now and until > now:
        notes.append(f"paused until {shown(until)}")
    elif policy and policy["concurrency"] is not None:
        notes.append(f"at most {policy['concurrency']} at once")
    if folded:
        notes.append(f"{folded:,} item{'s' * (folded > 1)} folded")
    return ", ".join(notes)


# --- the status of each chunk of a dataset, whichever job wrote it ---


PAGE_CHUNKS = 1000
"""Chunks that are looked at together where all of a dataset are."""


class Truth(NamedTuple):
    """The status of one chunk of a dataset, and which job and generation it comes from."""

    status: str
    jobid: str
    generation: int | None

    @property
    def version(self) -> str:
        """Tells one production of a chunk from another; rows written by hand have no generation."""
        return str(self.generation or 0)


def truths(store: Store, datasetid: str, dataids: Iterable[str] | None = None) -> dict[str, Truth]:
    """Every chunk of a dataset, or those of some that it has; by dataid."""
    if dataids is None:
        rows = store.db.run("truth.all", datasetid=datasetid)
    else:
        rows = store.db.run("truth.some", datasetid=datasetid, dataids=json.dumps(list(dataids)))
    found: dict[str, Truth] = {}
    for dataid, jobid, word, generation in rows:
        truth = Truth(read_status(word or "?"), jobid, generation)
        other = found.get(dataid)
        if other is None or _rank(truth) > _rank(other):
            found[dataid] = truth
    return found


def undone(store: Store, datasets: Collection[str], dataids: Iterable[str]) -> set[str]:
    """Those of some chunks that aren't READY in one of some datasets, or can be claimed for one."""
    names, wanted, found = json.dumps(list(datasets)), sorted(dataids), set[str]()
    for start in range(0, len(wanted), PAGE_CHUNKS):
        some = json.dumps(wanted[start : start + PAGE_CHUNKS])
        found |= {row[0] for row in store.db.run("truth.undone", datasetids=names, dataids=some)}
    return found


def pages(store: Store, datasetid: str) -> Iterator[list[str]]:
    """All chunks of a dataset, some at a time, so that memory doesn't grow with them."""
    after = ""

    def page() -> list[str]:
        rows = store.db.run("truth.page", datasetid=datasetid, after=after, most=PAGE_CHUNKS)
        return [dataid for (dataid,) in rows]

    while dataids := store.db.insist(page)[0]:
        yield dataids
        after = dataids[-1]


def newest(store: Store, datasetid: str, limit: int) -> list[str]:
    """The chunks of a dataset that changed last."""
    rows = store.db.run("truth.newest", datasetid=datasetid, limit=limit)
    return list(dict.fromkeys(dataid for (dataid,) in rows))


def is_larger(store: Store, datasetid: str, rows: int) -> bool:
    """Whether a dataset has more rows than that."""
    [(count,)] = store.db.run("truth.size", datasetid=datasetid, most=rows + 1)
    return count > rows


def known(store: Store, datasetids: Iterable[str], dataids: Iterable[str]) -> set[str]:
    """Which of some chunks any of some datasets has a row for."""
    rows = store.db.run(
        "truth.known", datasetids=json.dumps(list(datasetids)), dataids=json.dumps(list(dataids))
    )
    return {dataid for (dataid,) in rows}


def facts(store: Store, datasetid: str, chunks: Mapping[str, Truth]) -> dict[str, dict[str, Any]]:
    """The facts recorded when those chunks were produced, by dataid."""
    keys = [{"dataid": dataid, "generation": truth.generation} for dataid, truth in chunks.items()]
    rows = store.db.records("truth.facts", datasetid=datasetid, chunks=json.dumps(keys))
    return {row.pop("dataid"): row for row in rows}


def holders(store: Store, chunks: Mapping[str, Truth]) -> dict[str, str]:
    """The run that holds each of those chunks, where its claim names one; by dataid."""
    keys = [{"dataid": dataid, "jobid": truth.jobid} for dataid, truth in chunks.items()]
    rows = store.db.run("truth.holders", chunks=json.dumps(keys))
    return {dataid: runid for dataid, _, runid in rows}


def _rank(truth: Truth) -> tuple[int, int]:
    return STRENGTH.index(truth.status), truth.generation or 0


# --- executions: each of one process, one transaction, or some items ---


EARLIER = "earlier"
"""The execution of changes from before the log recorded executions."""


MAX_CHANGES = 50_000
"""Changes of an execution that are looked at, the newest: a person may write millions at once."""


class Execution(NamedTuple):
    """What one process, transaction or other origin did to the chunks of one job."""

    name: str
    jobid: str


class Origin(NamedTuple):
    """Where the status of a chunk comes from."""

    execution: Execution
    who: str
    why: str


class ExecutionOutcome(NamedTuple):
    """How an execution left one chunk of a dataset; no status: the chunk was deleted."""

    datasetid: str
    dataid: str
    status: str | None
    generation: int | None
    began: float
    """When the execution changed it first, in seconds since 1970."""
    at: float
    """When it changed it last."""
    who: str
    why: str
    acted: bool
    """Whether the execution had it at another status than PENDING."""


def origins(store: Store, datasetid: str, chunks: Mapping[str, Truth]) -> dict[str, Origin]:
    """What brought some chunks of a dataset to their status; by dataid."""
    keys = [{"dataid": dataid, "jobid": truth.jobid} for dataid, truth in chunks.items()]
    rows = store.db.run("executions.latest", datasetid=datasetid, chunks=json.dumps(keys))
    return {
        dataid: Origin(Execution(execution or EARLIER, jobid), who or "", why or "")
        for dataid, jobid, execution, who, why in rows
    }


def outcomes(store: Store, execution: Execution) -> list[ExecutionOutcome]:
    """How an execution left each chunk that it changed, in the order of the last changes."""
    name, jobid = execution
    if name == EARLIER:
        rows = store.db.run("executions.earlier", jobid=jobid)
    else:
        rows = store.db.run("executions.changes", execution=name, jobid=jobid, most=MAX_CHANGES)
        rows.reverse()
    found: dict[tuple[str, str], ExecutionOutcome] = {}
    for datasetid, dataid, before, after, generation, at, who, why in rows:
        earlier = found.pop((datasetid, dataid), None)
        status = None if after is None else read_status(after)
        acted = (
            status not in (None, PENDING) or before == RUNNING or bool(earlier and earlier.acted)
        )
        began = earlier.began if earlier else float(at)
        found[datasetid, dataid] = ExecutionOutcome(
            datasetid, dataid, status, generation, began, float(at), who or "", why or "", acted
        )
    return list(found.values())


def recent(store: Store, days: float, most: int) -> list[Execution]:
    """The newest executions that did more than to announce or to remove chunks."""
    words = json.dumps([word for word, read in WORDS.items() if read != PENDING])
    rows = store.db.run("executions.recent", days=days, most=most, words=words)
    return [Execution(name, jobid) for name, jobid, _ in rows]
