"""Who may post to a pipeline: whoever has its token."""

import time
from collections.abc import Callable
from hashlib import sha256

from ..store.item_tokens import check_token, has_token
from ..store.store import Store

BELIEVED = 1.0
"""Seconds for which a token that was right is taken for right: one that is dropped, no longer."""

LONGEST = 200

OPEN, WRONG, CLOSED = "open", "wrong", "closed"


class Guard:
    """Asks the tables about tokens, and remembers for a moment those that were right."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._clock = store, clock
        self._right: dict[tuple[str, bytes], float] = {}

    def knows(self, slug: str, token: str) -> bool:
        """Whether a token was right just now: no need to ask."""
        return self._right.get(_key(slug, token), 0.0) > self._clock()

    def ask(self, slug: str, token: str) -> str:
        """OPEN for this token, WRONG, or CLOSED: the pipeline has none."""
        if token and len(token) <= LONGEST and token.isascii() and token.isprintable():
            now = self._clock()
            if check_token(self._store, slug, token):
                if len(self._right) > 1_000:
                    self._right = {key: at for key, at in self._right.items() if at > now}
                self._right[_key(slug, token)] = now + BELIEVED
                return OPEN
        return WRONG if has_token(self._store, slug) else CLOSED


def bearer(header: str) -> str:
    """The token of an Authorization header; nothing if there is none."""
    scheme, _, token = header.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _key(slug: str, token: str) -> tuple[str, bytes]:
    return slug, sha256(token.encode()).digest()
