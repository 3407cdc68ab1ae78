"""The body of a request, and its headers: refused before anything is parsed."""

import asyncio
import re

from starlette.exceptions import HTTPException
from starlette.requests import Request

from .limits import Limits

DRAINED = 8
"""How many times a body's limit is read of a larger one, so that its client gets to the answer."""

_JSON = re.compile(
    r'application/(?:[\w.+-]+\+)?json\s*(?:;\s*charset="?utf-?8"?\s*)?', re.IGNORECASE
)


def key_of(request: Request, limits: Limits) -> str | None:
    """The Idempotency-Key of a request, if there is one."""
    keys = request.headers.getlist("idempotency-key")
    if not keys:
        return None
    key = keys[0].strip()
    if len(keys) > 1 or not key or len(key) > limits.key or not key.isascii():
        raise HTTPException(
            422, f"An Idempotency-Key is one of 1 to {limits.key} ASCII characters."
        )
    if not key.isprintable():
        raise HTTPException(422, "The Idempotency-Key has a control character.")
    return key


async def body_of(request: Request, limits: Limits) -> bytes:
    """The body of a request, which has to be JSON by its header, and small enough."""
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
    parts, size, told = [], 0, request.headers.get("content-length", "")
    too_large = told.isascii() and told.isdigit() and (len(told) > 15 or int(told) > most)
    if too_large and (len(told) > 15 or int(told) > DRAINED * most):
        raise _too_large(most)
    async for part in request.stream():
        size += len(part)
        if size > most:
            parts.clear()
            if size > DRAINED * most:
                raise _too_large(most)
        else:
            parts.append(part)
    if size > most:
        raise _too_large(most)
    return b"".join(parts)


def _too_large(most: int) -> HTTPException:
    return HTTPException(
        413,
        f"The body has more than {most} bytes. Send less at once.",
        headers={"Connection": "close"},
    )
