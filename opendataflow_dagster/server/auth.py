"""Bearer tokens: a client that has the token of a pipeline may post to it."""

import time
from collections.abc import Callable
from hashlib import sha256

from ..store.items import check_token, has_token
from ..store.store import Store

TOKEN_CACHE_SECONDS = 1.0
"""Seconds until a right token is checked again: a dropped one works no longer than that."""

MAX_TOKEN_CHARACTERS = 200

OPEN, WRONG, CLOSED = "open", "wrong", "closed"


class Guard:
    """Checks tokens in the tables, and remembers right ones for a moment."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._cache: dict[tuple[str, bytes], float] = {}

    def knows(self, slug: str, token: str) -> bool:
        """Whether a token was right just now: no need for a query."""
        return self._cache.get(_key(slug, token), 0.0) > self._clock()

    def ask(self, slug: str, token: str) -> str:
        """OPEN for this token, WRONG, or CLOSED: the pipeline has none."""
        if token and len(token) <= MAX_TOKEN_CHARACTERS and token.isascii() and token.isprintable():
            now = self._clock()
            if check_token(self._store, slug, token):
                if len(self._cache) > 1_000:
                    self._cache = {key: at for key, at in self._cache.items() if at > now}
                self._cache[_key(slug, token)] = now + TOKEN_CACHE_SECONDS
                return OPEN
        return WRONG if has_token(self._store, slug) else CLOSED


def bearer(header: str) -> str:
    """The token of an Authorization header; nothing if there is none."""
    scheme, _, token = header.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _key(slug: str, token: str) -> tuple[str, bytes]:
    return slug, sha256(token.encode()).digest()
