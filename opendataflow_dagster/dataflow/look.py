"""How things stand: rows, counts, and who runs what."""

from collections.abc import Iterable
from datetime import datetime
from typing import Any, NamedTuple

from .errors import WrongUse
from .folding import folds
from .model import ABSENT, PENDING, URGENCY, Status, read_status
from .names import natural_key
from .store import Store
from .times import from_table, shown

STATUSES = (*(each for each in Status if each != PENDING), PENDING)
"""The columns of a summary: what nobody has begun comes last."""

TIMES = ("modified", "started", "heartbeat", "lease_end", "paused_until")


class Strip(NamedTuple):
    """The chunks of one output of one job in natural order, `each` of them to a square."""

    jobid: str
    datasetid: str
    chunks: int
    each: int
    squares: list[str | None]
    """None where this output has no chunk that others have."""


def status(store: Store, name: str | None = None) -> list[dict[str, Any]]:
    """The rows of a job or a dataset, in natural order of dataid."""
    with store.db.reading():
        rows = store.db.records("look.rows", which=name)
        if not rows and name is not None and not store.db.run("look.known", which=name):
            raise WrongUse(
                f"There is no job or dataset {name!r}. "
                "`odf job list` and `odf dataset list` tell what there is."
            )
    rows.sort(
        key=lambda row: (
            natural_key(row["dataid"] or ""),
            row["dataid"] or "",
            row["datasetid"],
            row["jobid"],
        )
    )
    return [_timed(store, row) for row in rows]


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


def grid(store: Store, name: str | None = None, *, most: int = 2000) -> list[Strip]:
    """A square for each chunk, also for those to be claimed; at most `most` in a strip."""
    with store.db.reading():
        rows = store.db.run("look.squares", which=name, today=store.today())
        depth = _depths(store.db.run("look.flows"))
    strips: dict[tuple[str, str], dict[str, str]] = {}
    for jobid, datasetid, dataid, word in rows:
        words = strips.setdefault((jobid, datasetid), {})
        words[dataid or ""] = read_status(word) if word != "" else ABSENT
    ordered = sorted(strips, key=lambda key: (depth.get(key[1], 0), key))
    union = _natural({dataid for words in strips.values() for dataid in words})
    return [_strip(*key, strips[key], union, most) for key in ordered]


def _strip(jobid: str, datasetid: str, words: dict[str, str], union: list[str], most: int) -> Strip:
    """Draw over one another what has much the same chunks, so that gaps are seen."""
    aligned = len(union) <= min(most, 2 * len(words))
    chunks = union if aligned else _natural(words)
    each = -(-len(chunks) // most)
    squares = [
        max((words[dataid] for dataid in chunks[at : at + each] if dataid in words),
            key=URGENCY.index, default=None)
        for at in range(0, len(chunks), each)
    ]  # fmt: skip
    return Strip(jobid, datasetid, len(words), each, squares)


def _natural(dataids: Iterable[str]) -> list[str]:
    return sorted(dataids, key=lambda dataid: (natural_key(dataid), dataid))


def _depths(flows: Iterable[tuple[str, str]]) -> dict[str, int]:
    """How many jobs lie before each dataset: what is upstream comes first."""
    flows = list(flows)
    depth: dict[str, int] = {}
    for _ in flows:  # a path is no longer than that, and a circle goes no further
        deeper = {
            output: depth.get(source, 0) + 1
            for source, output in flows
            if depth.get(source, 0) + 1 > depth.get(output, 0)
        }
        if not deeper:
            break
        depth |= deeper
    return depth


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
