"""Answers: each error is a line of JSON, and all are counted."""

from contextlib import suppress
from datetime import datetime
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from ..model import FAILED, PENDING, READY, RESUBMIT, RUNNING, read_status
from ..util.text import printable
from .metrics import Numbers

REASONS = TRANSFORMATION, RESULT, AGAIN, HELD = (
    "transformation failed",
    "result can't be kept",
    "to be made again",
    "held by the operator",
)
"""Why an item isn't READY, as a sender is told; `odf history` has the rest."""


class Counted:
    """Counts the answers by their status code."""

    def __init__(self, app: Any, numbers: Numbers) -> None:
        self._app, self._numbers = app, numbers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                self._numbers.answers[message["status"]] += 1
            await send(message)

        await self._app(scope, receive, sent)


class Undisturbed:
    """Takes it for no error that a client has gone away."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with suppress(ClientDisconnect):
            await self._app(scope, receive, send)


def as_error(_: Request, error: HTTPException) -> Response:
    return JSONResponse(
        {"error": printable(error.detail)}, error.status_code, headers=error.headers
    )


def as_trouble(_: Request, __: Exception) -> Response:
    told = {"error": "The server met an error of its own; its log tells more."}
    return JSONResponse(told, 500, headers={"Connection": "close"})  # uvicorn closes it


def after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, round(seconds + 0.49)))}


def public_status(row: dict[str, Any]) -> dict[str, Any]:
    """The status of an item for who sent it: no place on this machine, and no text of an error."""
    shown = {name: _plain(value) for name, value in row.items() if name != "location"}
    return shown | {"reason": _reason(read_status(row["status"]), row["transformation"])}


def _reason(status: str, transformation: str | None) -> str | None:
    if status in (READY, RUNNING, PENDING):
        return None
    if status == FAILED:
        return TRANSFORMATION if transformation else RESULT
    return AGAIN if status == RESUBMIT else HELD


def _plain(value: Any) -> Any:
    return value.isoformat(timespec="milliseconds") if isinstance(value, datetime) else value
