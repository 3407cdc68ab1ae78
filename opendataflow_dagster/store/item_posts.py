"""A post of items becomes chunks of its job, on disk before it is answered, and never twice."""

import json
from collections.abc import Collection, Sequence
from hashlib import sha256
from typing import NamedTuple

from ..errors import LostRace, Refused
from ..model import PENDING
from ..util.text import typed
from .output_rows import Move, add_rows, generations
from .store import Store

ACCEPT = "accept"
"""The act of our own transactions that bring chunks: the triggers look for nobody to interrupt."""


MOST_PASSED = 10_000
"""Numbers in a row that chunks may have already; more than that is no accident."""


class Post(NamedTuple):
    """What a client sent at once: JSON texts in ASCII, and the key by which it repeats itself."""

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
    """The refusal of a job that writes nothing, as far as the tables know."""
    return Refused(
        f"Pipeline {jobid!r} isn't registered, so nothing can be kept for it. "
        f"Run `odf pipeline list`, then `odf pipeline run {typed(jobid)}`.",
        code="NOT_REGISTERED",
    )


def links(store: Store, jobids: Collection[str]) -> list[tuple[str, str]]:
    """What jobs write: pairs of a job and a dataset, in order."""
    return store.db.run("items.links", jobids=json.dumps(sorted(jobids)))


class _Attempt:
    """The posts of one call, and the numbers drawn for them: another attempt uses those again."""

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
        made: dict[int, Accepted] = {}
        for at in news:
            mine = tuple(next(numbers) for _ in self.posts[at].payloads)
            made[at] = Accepted(tuple(map(str, mine)), mine, False)
            if (key := self.posts[at].key) is not None:
                known[self.posts[at].jobid, key] = (self.digests[at], made[at].dataids)
        answered = [
            made.get(at) or self._answer(at, outputs, known) for at in range(len(self.posts))
        ]
        if made:
            self.last = next(
                ((self.posts[at], answered) for at in news if self.posts[at].payloads), None
            )
            self._write(made, outputs)
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
        seen: set[tuple[str, str]] = set()
        firsts = []
        for at in news:
            post = self.posts[at]
            if post.key is None or (post.jobid, post.key) not in seen:
                firsts.append(at)
            if post.key is not None:
                seen.add((post.jobid, post.key))
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
                f"The Idempotency-Key {post.key!r} came before with other items: nothing was "
                "accepted. Send them with a key of their own.",
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
                    Move(post.jobid, each, dataid, None, PENDING) for each in outputs[post.jobid]
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
            self.beyond = min(2 * self.beyond + len(self.numbers), MOST_PASSED)
            self.numbers, self.last = [], None
            raise LostRace("A chunk has the number that an item was to get.")


def _digest(post: Post) -> str:
    return sha256(json.dumps(post.payloads).encode()).hexdigest()
