"""The server that listens: HTTP/1.1, with an end to connections that keep it waiting."""

import asyncio
import json
import resource
from contextlib import suppress
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import Limits
from .request import DRAINED

FILES = 4096
"""Files that the process may have open, if the machine lets it."""

OTHERS = 100
"""Of those, what isn't a connection of a client; and connections that are told to come later."""

LINGER = 1.0
"""Seconds in which a client that is one too many may read so."""

_FULL = json.dumps({"error": "Too many connections are open. Send it again."}).encode()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_FULL), _FULL)
)


def make_server(app: Any, limits: Limits, *, log_level: str = "warning") -> uvicorn.Server:
    """The server of an application; it keeps to the limits for connections."""
    most = max(1, min(limits.connections, _files() - 2 * OTHERS))

    class Limited(Connection):
        bounds = limits._replace(connections=most)
        waiting: ClassVar[dict[Connection, None]] = {}

    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=Limited,
            ws="none",
            lifespan="on",
            log_level=log_level,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=10,
        )
    )


def _files() -> int:
    """How many files may be open, after asking for enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return FILES if soft == resource.RLIM_INFINITY else soft


class _Strict(h11.Connection):
    """Takes no request with two lengths: a proxy may have gone by the other one."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding")
        return event


class Connection(H11Protocol):
    """A connection on which a request has to begin in time, and to end once it is answered.

    When there are too many, the one goes for which the server has waited longest: slow clients
    can't keep out others. One whose request is being worked on stays.

    h11 reads a body whatever the `Upgrade` header offers; httptools takes it for another protocol.
    """

    bounds = Limits()
    waiting: ClassVar[dict["Connection", None]] = {}
    """The connections of this server on which a client is waited for, the longest first."""
    _timer: asyncio.TimerHandle | None = None
    _drained: int | None = None
    """Bytes read of a request that is answered already."""
    _refused = False

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.conn = _Strict(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            self._make_room()
        count = len(self.connections)
        if count > self.bounds.connections + OTHERS:
            transport.abort()
        elif count > self.bounds.connections:
            self._refused = True
            transport.write(_REFUSAL)
            self._close_after(LINGER)
        else:
            self._close_after(self.bounds.head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stay()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._drained is not None:
            self._drained += len(data)
            if self._drained > DRAINED * self.bounds.body:
                self.transport.close()
                return
        super().data_received(data)
        if self._drained is not None and self.conn.their_state is h11.SEND_BODY:
            return
        self._drained = None
        if self.conn.their_state is not h11.IDLE:
            self._stay()
        elif self._timer is None:  # the next request has begun, and isn't whole
            self._close_after(self.bounds.head)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.conn.their_state is h11.SEND_BODY:
            self._drained = 0
            self._close_after(self.bounds.upload)
        elif self.conn.their_state is h11.IDLE and self._timer is None:
            self.waiting[self] = None  # uvicorn closes it if no other request comes

    def pause_writing(self) -> None:
        super().pause_writing()
        self._close_after(self.bounds.upload)  # the client doesn't read its answers

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._drained is None:
            self._stay()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # it has its answer, and what comes after that isn't HTTP
            self.transport.close()

    def _make_room(self) -> None:
        """End the connection for which was waited longest, if any is waited for."""
        if slowest := next(iter(self.waiting), None):
            slowest._stay()
            self.connections.discard(slowest)
            slowest.transport.abort()

    def _close_after(self, seconds: float) -> None:
        self._stay()
        self.waiting[self] = None
        self._timer = self.loop.call_later(seconds, self._close)

    def _close(self) -> None:
        if self.flow.write_paused:
            self.transport.abort()  # what is left to write would keep it open
        self.transport.close()

    def _stay(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _should_upgrade(self) -> bool:
        return False  # nor does a line of the log tell that
