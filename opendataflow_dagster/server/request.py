"""Reads a request: its token, headers, body and items, and the limits on all of them."""

import asyncio
import json
import math
import os
import re
import tempfile
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from starlette.exceptions import HTTPException
from starlette.requests import Request

from ..model import Say
from ..store.items import check_token, has_token
from ..store.store import Store

# What a client may send and how fast, and whether a disk has room for it.


class Limits(NamedTuple):
    """Limits that are checked before a request costs anything."""

    body: int = 1024 * 1024
    """The most bytes of a body."""
    items: int = 1_000
    """The most items of an array."""
    depth: int = 64
    """The most levels of an item."""
    key: int = 200
    """The most characters of an Idempotency-Key."""
    rate: float = 1_000.0
    """The most items per second of a pipeline."""
    waiting: int = 64 * 1024 * 1024
    """The most characters of items that wait for the database."""
    connections: int = 900
    """The most connections at a time."""
    head: float = 30.0
    """Seconds in which a request has to begin, with all of its headers."""
    upload: float = 30.0
    """Seconds in which a body has to arrive."""
    patience: float = 3.0
    """Seconds that a client waits for a database that is away."""


class Rates:
    """A token bucket per pipeline: it holds the tokens of one second, and may go into debt.

    So an array larger than the bucket gets through, and later posts wait for the debt.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._clock = rate, clock
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, slug: str, items: int) -> float:
        """Take a token per item; return the seconds to wait if there are none, else 0."""
        now = self._clock()
        level, since = self._levels.get(slug, (self._rate, now))
        level = min(self._rate, level + (now - since) * self._rate)
        least = min(1.0, self._rate)
        wait = (least - level) / self._rate if level < least else 0.0
        self._levels[slug] = (level if wait else level - items, now)
        return wait


FULL_BELOW_BYTES = 1024 * 1024
"""Free bytes below which a disk counts as full."""

DATABASE, PROJECT, TEMPORARY = "database", "project", "temporary files"


class Disks:
    """The disks of the tables, of the project with its results, and of temporary files."""

    def __init__(self, store: Store, root: Path, say: Say) -> None:
        self._folders = {PROJECT: str(root), TEMPORARY: tempfile.gettempdir()}
        if file := store.db.path:  # otherwise the database is on a server
            self._folders = {DATABASE: os.path.dirname(os.path.abspath(file)), **self._folders}
        self._say, self._reported = say, list[str]()

    def full(self) -> list[str]:
        """Return the full disks; each is reported once."""
        found = [name for name, folder in self._folders.items() if _is_full(folder)]
        for name in found:
            if name not in self._reported:
                self._say(f"The disk of {self._folders[name]} is full ({name}): make room there")
        self._reported = found
        return found


def _is_full(folder: str) -> bool:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    no_bytes = disk.f_bavail * disk.f_frsize < FULL_BELOW_BYTES
    no_inodes = disk.f_files > 0 and disk.f_favail == 0  # some file systems count none
    return no_bytes or no_inodes


DRAIN_FACTOR = 8
"""How much of a body that is too large is read, as a multiple of the limit.

Many clients send their whole body before they read. Without this, they would see a broken
connection instead of the answer.
"""

_JSON = re.compile(
    r'application/(?:[\w.+-]+\+)?json\s*(?:;\s*charset="?utf-?8"?\s*)?', re.IGNORECASE
)


def idempotency_key(request: Request, limits: Limits) -> str | None:
    """Return the Idempotency-Key of a request, or None."""
    keys = request.headers.getlist("idempotency-key")
    if not keys:
        return None
    key = keys[0].strip()
    if len(keys) > 1 or not key or len(key) > limits.key or not key.isascii():
        raise HTTPException(
            422, f"An Idempotency-Key must have 1 to {limits.key} ASCII characters."
        )
    if not key.isprintable():
        raise HTTPException(422, "The Idempotency-Key has a control character.")
    return key


async def read_body(request: Request, limits: Limits) -> bytes:
    """Read the body of a request, which has to be JSON by its header, and small enough."""
    kind = request.headers.get("content-type", "")
    if not _JSON.fullmatch(kind.strip()):
        raise HTTPException(415, "Send JSON in UTF-8, with Content-Type: application/json.")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HTTPException(415, "Send the body as it is, without a Content-Encoding.")
    try:
        async with asyncio.timeout(limits.upload):
            return await _read(request, limits.body)
    except TimeoutError:
        line = f"The body didn't arrive in {limits.upload:g} s."
        raise HTTPException(408, line, headers={"Connection": "close"}) from None


async def _read(request: Request, most: int) -> bytes:
    parts, size, length = [], 0, request.headers.get("content-length", "")
    too_large = length.isascii() and length.isdigit() and (len(length) > 15 or int(length) > most)
    if too_large and (len(length) > 15 or int(length) > DRAIN_FACTOR * most):
        raise _too_large(most)
    async for part in request.stream():
        size += len(part)
        if size > most:
            parts.clear()
            if size > DRAIN_FACTOR * most:
                raise _too_large(most)
        else:
            parts.append(part)
    if size > most:
        raise _too_large(most)
    return b"".join(parts)


def _too_large(most: int) -> HTTPException:
    return HTTPException(
        413,
        f"The body has more than {most} bytes. Send it in parts.",
        headers={"Connection": "close"},
    )


_SPACE = re.compile(r"[ \t\r\n]*")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


class BadBody(Exception):
    """A body that is refused; the message says in a line what is wrong with it."""


def parse_items(body: bytes, limits: Limits) -> tuple[list[str], bool]:
    """Return the items of a body as ASCII JSON texts, and whether they came as an array.

    An item is the text that the client sent, with `\\u` escapes for characters beyond ASCII: no
    number is rounded, and no database has to store a NUL or half of a surrogate pair.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadBody(f"The body isn't UTF-8: byte {error.start + 1} is wrong.") from None
    try:
        return _split_items(text, limits)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise BadBody(f"The body isn't valid JSON: {error.msg.rstrip(' :')} at {where}.") from None
    except RecursionError:
        raise _too_deep(limits) from None
    except ValueError:  # of int(): too many digits in a number
        raise BadBody("A number in the body has too many digits.") from None


def _split_items(text: str, limits: Limits) -> tuple[list[str], bool]:
    at = _after_space(text, 0)
    is_array = text.startswith("[", at)
    items: list[str] = []
    end = at
    if is_array:
        end = _after_space(text, at + 1)
        if text.startswith("]", end):
            raise BadBody("The array has no items.")
        while True:
            start = end
            end = _item(text, start, items, limits)
            if len(items) > limits.items:
                raise BadBody(f"The array has more than {limits.items} items. Send it in parts.")
            end = _after_space(text, end)
            if not text.startswith(",", end):
                break
            end = _after_space(text, end + 1)
        if not text.startswith("]", end):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, end)
        end += 1
    else:
        end = _item(text, at, items, limits)
    if (end := _after_space(text, end)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return items, is_array


def _item(text: str, start: int, items: list[str], limits: Limits) -> int:
    """Add the item that begins at `start`, and return where it ends."""
    value, end = _DECODER.raw_decode(text, start)
    if not isinstance(value, dict):
        raise BadBody(f"An item must be a JSON object, not {_KINDS[type(value)]}.")
    if _is_deeper(value, limits.depth):
        raise _too_deep(limits)
    items.append(_NOT_ASCII.sub(_escaped, text[start:end]))
    return end


def _after_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    return space.end() if space else at


def _escaped(letters: re.Match[str]) -> str:
    return json.dumps(letters[0])[1:-1]


def _is_deeper(value: Any, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def _too_deep(limits: Limits) -> BadBody:
    return BadBody(f"The item is nested more than {limits.depth} levels deep.")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        known: set[str] = set()
        twice = next(name for name, _ in pairs if name in known or known.add(name))
        raise BadBody(f"The name {twice[:40]!a} is repeated in an object.")
    return unique


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise BadBody(f"The number {digits[:40]} is too large.")
    return number


def _constant(word: str) -> Any:
    raise BadBody(f"The body isn't valid JSON: {word} isn't a JSON number.")


_DECODER = json.JSONDecoder(
    object_pairs_hook=_unique_names, parse_float=_finite, parse_constant=_constant
)
_KINDS = {
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "a boolean",
    type(None): "null",
}


TOKEN_CACHE_SECONDS = 1.0
"""Seconds until a valid token is checked again: a revoked one works no longer than that."""

MAX_TOKEN_CHARACTERS = 200

OPEN, WRONG, CLOSED = "open", "wrong", "closed"


class Guard:
    """Checks tokens in the tables, and remembers valid ones for a moment."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cache: dict[tuple[str, bytes], float] = {}

    def knows(self, slug: str, token: str) -> bool:
        """Whether a token was found valid so recently that it needs no query."""
        return self._cache.get(_key(slug, token), 0.0) > time.monotonic()

    def ask(self, slug: str, token: str) -> str:
        """Return OPEN for this token, WRONG, or CLOSED if the pipeline has none."""
        if token and len(token) <= MAX_TOKEN_CHARACTERS and token.isascii() and token.isprintable():
            now = time.monotonic()
            if check_token(self._store, slug, token):
                if len(self._cache) > 1_000:
                    self._cache = {key: at for key, at in self._cache.items() if at > now}
                self._cache[_key(slug, token)] = now + TOKEN_CACHE_SECONDS
                return OPEN
        return WRONG if has_token(self._store, slug) else CLOSED


def bearer(header: str) -> str:
    """Return the token of an Authorization header, or ""."""
    scheme, _, token = header.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _key(slug: str, token: str) -> tuple[str, bytes]:
    return slug, sha256(token.encode()).digest()
