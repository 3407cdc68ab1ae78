"""Chunks of pipelines without upstream: items that came over HTTP, and runs started by hand."""

import hmac
import json
import secrets
from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from itertools import takewhile
from typing import Any, NamedTuple

from ..errors import LostRace, Refused
from ..model import PENDING, Claim, check_id
from ..util.text import typed
from ..util.times import from_table
from .claims import MAX_COUNTED_CHUNKS, Offer, give_back, last_event
from .moves import Move, add_rows, generations
from .store import Store


def payloads(store: Store, jobid: str, dataids: Sequence[str]) -> dict[str, str]:
    """The payloads of those chunks that are items and haven't been cleaned, by dataid."""
    return {dataid: text for dataid, text in _items(store, jobid, dataids) if text is not None}


def cleaned_away(store: Store, jobid: str, dataids: Sequence[str]) -> set[str]:
    """Those chunks that were items, and whose payload `odf history clean` has removed."""
    return {dataid for dataid, text in _items(store, jobid, dataids) if text is None}


def is_item(store: Store, jobid: str, dataid: str) -> bool:
    """Whether a chunk came over HTTP, be its payload there or cleaned away."""
    return bool(_items(store, jobid, [dataid]))


def item_status(store: Store, jobid: str, dataid: str) -> dict[str, Any] | None:
    """The state of a pipeline's chunk: status, times, and its result or its failure."""
    found = store.db.fetch_records("items.status", jobid=jobid, dataid=dataid)
    if not found:
        return None
    [row] = found
    return row | {name: from_table(store, row[name]) for name in ("received", "modified")}


def backlog(store: Store) -> list[dict[str, Any]]:
    """Of each job that takes items: how many wait and for how long, run, failed and are held."""
    db = store.db

    def work() -> list[dict[str, Any]]:
        rows = []
        for (jobid,) in db.run("items.jobs"):
            [(waiting, oldest)] = db.run("items.waiting", jobid=jobid)
            [(running,)] = db.run("items.running", jobid=jobid)
            [(failed,)] = db.run("items.failed", jobid=jobid)
            [(held,)] = db.run("items.held", jobid=jobid)
            rows.append(
                {
                    "jobid": jobid,
                    "waiting": waiting,
                    "oldest_seconds": max(0.0, float(oldest or 0)),
                    "running": running,
                    "failed": failed,
                    "held": held,
                }
            )
        return rows

    return db.insist(work)[0]


def new_run(store: Store, jobid: str) -> str:
    """Offer a new run of a job that waits for no other; its dataid is the moment, in milliseconds.

    No two runs on one dataset get the same, whichever processes begin them.
    """

    def work() -> str:
        with store.db.transaction(who="odf pipeline run", act=ACCEPT):
            return begin_run(store, jobid)

    return store.db.insist(work)[0]


def begin_run(store: Store, jobid: str) -> str:
    """What `new_run` does, as a part of the caller's transaction."""
    outputs = [datasetid for _, datasetid in links(store, [jobid])]
    if not outputs:
        raise unregistered(jobid)
    store.refuse_unclaimable(now=True)  # a run that can't be claimed isn't begun
    for datasetid in outputs:
        store.db.run("items.turn", datasetid=datasetid)
    moment = datetime.fromtimestamp(float(store.db.run("claims.now")[0][0]), UTC)
    named = json.dumps(outputs)
    while store.db.run("items.taken", dataid=_named(moment), datasetids=named):
        moment += timedelta(milliseconds=1)
    add_rows(
        store, [Move(jobid, datasetid, _named(moment), None, PENDING) for datasetid in outputs]
    )
    return _named(moment)


def _items(store: Store, jobid: str, dataids: Sequence[str]) -> list[tuple[str, str | None]]:
    if not dataids:
        return []
    names = json.dumps(list(dataids))
    return store.db.fetch("items.payloads", jobid=jobid, dataids=names)


def _named(moment: datetime) -> str:
    return f"{moment:%Y-%m-%dT%H%M%S}.{moment.microsecond // 1000:03d}Z"


# --- posts: items become chunks, on disk before the client gets its answer, and never twice ---


ACCEPT = "accept"
"""The act of our own transactions that add chunks: the triggers then interrupt nobody."""


MAX_NUMBERS_SKIPPED = 10_000
"""Numbers in a row that chunks may have already; more than that is no accident."""


class Post(NamedTuple):
    """What a client sent at once: JSON texts in ASCII, and its idempotency key."""

    jobid: str
    payloads: tuple[str, ...]
    key: str | None = None


class Accepted(NamedTuple):
    """The items that a post became, in its order; `again` if an earlier one had brought them."""

    dataids: tuple[str, ...]
    generations: tuple[int, ...]
    again: bool


def accept(store: Store, posts: Sequence[Post]) -> list[Accepted | Refused]:
    """Keep the items of some posts and offer them to workers: one answer for each post, in order.

    It is one transaction, on disk when this returns. A post with a key that was given before is
    answered as then, if it brings the same payloads, and else refused.
    """
    attempt = _Attempt(store, posts)

    def work() -> list[Accepted | Refused]:
        with store.db.transaction(who="odf serve", act=ACCEPT):
            store.db.run("items.durable")
            return attempt.answers()

    return store.db.insist(work)[0]


def unregistered(jobid: str) -> Refused:
    """Return the error for a job that has no outputs in the tables."""
    return Refused(
        f"Pipeline {jobid!r} isn't registered, so it can't accept items. "
        f"Run `odf pipeline list`, then `odf pipeline run {typed(jobid)}`.",
        code="NOT_REGISTERED",
    )


def links(store: Store, jobids: Collection[str]) -> list[tuple[str, str]]:
    """What jobs write: pairs of a job and a dataset, in order."""
    return store.db.run("items.links", jobids=json.dumps(sorted(jobids)))


class _Attempt:
    """The posts of one call, and their numbers: a retry uses the same numbers."""

    def __init__(self, store: Store, posts: Sequence[Post]) -> None:
        self.store, self.posts = store, posts
        self.digests = [_digest(post) if post.key is not None else "" for post in posts]
        self.numbers: list[int] = []
        self.beyond = 0  # how many numbers to pass over, since chunks have them already
        self.last: tuple[Post, list[Accepted | Refused]] | None = None

    def answers(self) -> list[Accepted | Refused]:
        db = self.store.db
        if self.last is not None:
            post, answered = self.last
            first = str(self.numbers[0])
            if db.run("items.is_accepted", jobid=post.jobid, dataid=first):
                return answered  # the connection was lost after the commit

        outputs: dict[str, list[str]] = {}
        for jobid, datasetid in links(self.store, {post.jobid for post in self.posts}):
            outputs.setdefault(jobid, []).append(datasetid)
        known = self._known()
        news = [
            at
            for at, post in enumerate(self.posts)
            if post.jobid in outputs and (post.key is None or (post.jobid, post.key) not in known)
        ]
        news = self._firsts(news)
        count = sum(len(self.posts[at].payloads) for at in news)
        if len(self.numbers) < count:
            self.numbers = generations(self.store, self.beyond + count)[self.beyond :]
        numbers = iter(self.numbers)
        accepted: dict[int, Accepted] = {}
        for at in news:
            mine = tuple(next(numbers) for _ in self.posts[at].payloads)
            accepted[at] = Accepted(tuple(map(str, mine)), mine, False)
            if (key := self.posts[at].key) is not None:
                known[self.posts[at].jobid, key] = (self.digests[at], accepted[at].dataids)
        answered = [
            accepted.get(at) or self._answer(at, outputs, known) for at in range(len(self.posts))
        ]
        if accepted:
            self.last = next(
                ((self.posts[at], answered) for at in news if self.posts[at].payloads), None
            )
            self._write(accepted, outputs)
        return answered

    def _known(self) -> dict[tuple[str, str], tuple[str, tuple[str, ...]]]:
        """What the keys of these posts were answered before: digest and dataids."""
        keys = [
            {"jobid": post.jobid, "idempotency": post.key}
            for post in self.posts
            if post.key is not None
        ]
        if not keys:
            return {}
        rows = self.store.db.run("items.keys", keys=json.dumps(keys))
        return {(row[0], row[1]): (row[2], tuple(json.loads(row[3]))) for row in rows}

    def _firsts(self, news: list[int]) -> list[int]:
        """Of posts with one key, the first."""
        keys: set[tuple[str, str]] = set()
        firsts = []
        for at in news:
            post = self.posts[at]
            if post.key is None or (post.jobid, post.key) not in keys:
                firsts.append(at)
            if post.key is not None:
                keys.add((post.jobid, post.key))
        return firsts

    def _answer(
        self,
        at: int,
        outputs: dict[str, list[str]],
        known: dict[tuple[str, str], tuple[str, tuple[str, ...]]],
    ) -> Accepted | Refused:
        """The answer to a post that brings nothing new."""
        post = self.posts[at]
        if post.jobid not in outputs or post.key is None:
            return unregistered(post.jobid)
        digest, dataids = known[post.jobid, post.key]
        if digest != self.digests[at]:
            return Refused(
                f"The Idempotency-Key {post.key!r} was already used for other items: nothing was "
                "accepted. Send these with a new key.",
                code="KEY_REUSED",
            )
        return Accepted(dataids, tuple(map(int, dataids)), True)

    def _write(self, made: dict[int, Accepted], outputs: dict[str, list[str]]) -> None:
        db, items, rows, keys = self.store.db, [], [], []
        for at, accepted in made.items():
            post = self.posts[at]
            for dataid, payload in zip(accepted.dataids, post.payloads, strict=True):
                items.append(
                    {
                        "jobid": post.jobid,
                        "dataid": dataid,
                        "payload": payload,
                        "idempotency": post.key,
                    }
                )
                rows += [
                    Move(post.jobid, datasetid, dataid, None, PENDING)
                    for datasetid in outputs[post.jobid]
                ]
            if post.key is not None:
                keys.append(
                    {
                        "jobid": post.jobid,
                        "idempotency": post.key,
                        "digest": self.digests[at],
                        "dataids": json.dumps(accepted.dataids),
                    }
                )
        keys.sort(key=lambda key: (key["jobid"], key["idempotency"]))
        if keys and db.change("items.remember", keys=json.dumps(keys)) < len(keys):
            raise LostRace("Another server was just given the same Idempotency-Key.")
        if db.change("items.add", items=json.dumps(items)) < len(items):
            raise LostRace("These items are being accepted by a connection that was lost.")
        numbers = {str(number): number for number in self.numbers}
        if add_rows(self.store, rows, numbers) < len(rows):
            self.beyond = min(2 * self.beyond + len(self.numbers), MAX_NUMBERS_SKIPPED)
            self.numbers, self.last = [], None
            raise LostRace("A chunk has the number that an item was to get.")


def _digest(post: Post) -> str:
    return sha256(json.dumps(post.payloads).encode()).hexdigest()


# --- tokens: who may send items to a pipeline; only their hashes are kept ---


TOKEN_BYTES = 32
"""Random bytes of a token: too many to be guessed, so that a plain hash is enough."""


def new_token(store: Store, jobid: str) -> str:
    """Create the token of a pipeline, replacing any earlier one."""
    check_id("pipeline", jobid)
    token = secrets.token_urlsafe(TOKEN_BYTES)
    store.db.insist(lambda: store.db.change("tokens.put", jobid=jobid, hash=_hash(token)))
    return token


def check_token(store: Store, jobid: str, given: str) -> bool:
    """Whether this is the pipeline's token; it takes as long whether or not there is one."""
    kept = _kept(store, jobid)
    same = hmac.compare_digest(_hash(given), kept or _hash(""))
    return same and kept is not None


def has_token(store: Store, jobid: str) -> bool:
    """Whether a pipeline takes items at all."""
    return _kept(store, jobid) is not None


def drop_token(store: Store, jobid: str) -> bool:
    """Stop accepting items for a pipeline; return whether it accepted any."""
    changed, lost = store.db.insist(lambda: store.db.change("tokens.drop", jobid=jobid))
    return changed > 0 or lost


def _kept(store: Store, jobid: str) -> str | None:
    rows = store.db.fetch("tokens.hash", jobid=jobid)
    return rows[0][0] if rows else None


def _hash(token: str) -> str:
    return sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


# --- runs of pipelines without upstream inputs: started every so many minutes, or by name ---


RUN_NAME_FORMAT = "%Y-%m-%dT%H%M%S.%fZ"
"""How the dataid of a run says when it started."""

ITEMS_ONLY = "nothing claimable but items, which `odf serve` runs"


def begin_due_runs(
    store: Store, jobids: Collection[str], *, who: str = "every_minutes"
) -> list[tuple[str, str]]:
    """Start a run of each job whose last one is older than its `every_minutes`: (jobid, dataid).

    A job without that dial, one that is paused, and one of which a run waits or is at work, begins
    none. Of several processes that ask at once, one begins it.
    """
    db = store.db
    dials = db.fetch("periodic.dials")
    jobs = [row for row in dials if row[0] in jobids]
    if not jobs:
        return []
    now = datetime.fromtimestamp(store.now(), UTC)
    begun = []
    for jobid, every_minutes, paused_until in jobs:
        until = from_table(store, paused_until)
        if until is None or until <= now:
            dataid, _ = db.insist(lambda job=jobid, n=every_minutes: _begin(store, job, n, who))
            begun += [(jobid, dataid)] if dataid else []
    return begun


def offer_run(store: Store, jobid: str, dataid: str, *, who: str) -> bool:
    """Offer one chunk of a job, unless it is there: what a job that waits for nothing may claim."""

    def work() -> bool:
        with store.db.transaction(who=who, act=ACCEPT):
            outputs = store.read_plan(jobid).outputs
            for datasetid in outputs:
                store.db.run("items.turn", datasetid=datasetid)
            if store.db.run("items.taken", dataid=dataid, datasetids=json.dumps(outputs)):
                return False
            rows = [Move(jobid, datasetid, dataid, None, PENDING) for datasetid in outputs]
            return add_rows(store, rows) > 0

    return store.db.insist(work)[0]


def next_runs(store: Store, jobid: str) -> list[str]:
    """The chunks of a job that may be claimed and are no items, the first ones first."""
    rows = store.db.fetch("periodic.next", jobid=jobid, most=MAX_COUNTED_CHUNKS)
    return [dataid for (dataid,) in rows]


def without_items(store: Store, found: Offer) -> Offer:
    """What a job offers beside its items."""
    if found.first is None:
        return found
    runs = next_runs(store, found.jobid)
    if not runs:
        return found._replace(claimable=0, first=None, event=0, obstacle=ITEMS_ONLY)
    if runs[0] == found.first:
        return found._replace(claimable=len(runs))
    return found._replace(
        claimable=len(runs), first=runs[0], event=last_event(store, found.jobid, runs[0])
    )


def _begin(store: Store, jobid: str, every_minutes: int, who: str) -> str | None:
    """Start a run if it is due, on the data of this moment."""
    db = store.db
    with db.transaction(who=who, act=ACCEPT):
        outputs = store.read_plan(jobid).outputs
        for datasetid in outputs:
            db.run("items.turn", datasetid=datasetid)
        if not outputs or db.run("periodic.unfinished", jobid=jobid):
            return None
        last = [
            dataid
            for datasetid in outputs
            for (dataid,) in db.run("periodic.newest", jobid=jobid, datasetid=datasetid)
        ]
        if last:
            began = datetime.strptime(max(last), RUN_NAME_FORMAT).replace(tzinfo=UTC)
            if store.now() - began.timestamp() < every_minutes * 60:
                return None
        return begin_run(store, jobid)


def live_generations(store: Store, jobid: str) -> set[int]:
    """The generations of a job that have live claims."""
    rows = store.db.fetch("periodic.live", jobid=jobid)
    return {generation for (generation,) in rows}


# --- the queue: which items come next ---


class QueueHead(NamedTuple):
    """The items at the head of a queue, and whether something that is no item is among them.

    An item that was RUNNING when a worker was lost is a suspect, and goes `alone`.
    """

    dataids: tuple[str, ...]
    has_runs: bool
    alone: bool = False


def queue_head(store: Store, slug: str, count: int) -> QueueHead:
    """The next items, at most so many; a chunk that is no item is for `odf pipeline run`."""
    db = store.db
    db.insist(lambda: db.run("consuming.sort", jobid=slug))
    rows = db.fetch("consuming.heads", jobid=slug, k=count)
    has_runs = bool(rows and rows[0][2])
    not_lost = tuple(row[0] for row in takewhile(lambda row: not row[1], rows))
    if rows and not not_lost:
        return QueueHead((rows[0][0],), has_runs, alone=True)
    return QueueHead(not_lost, has_runs)


def claim_items(store: Store, slug: str, head: QueueHead, **how: Any) -> list[Claim]:
    """Claim the items at the head of the queue."""
    dataids = head.dataids
    if not (head.has_runs or head.alone):
        claims = store.claim(slug, k=len(dataids), **how) if dataids else []
    else:  # by name, so that neither another item nor a run comes in their place
        claims = [claim for dataid in dataids for claim in store.claim(slug, only=dataid, **how)]
    items = {*dataids, *payloads(store, slug, [claim.dataid for claim in claims])}
    runs = [claim for claim in claims if claim.dataid not in items]
    if runs:
        give_back(store, runs, "it is for `odf pipeline run`")
    return [claim for claim in claims if claim.dataid in items]
