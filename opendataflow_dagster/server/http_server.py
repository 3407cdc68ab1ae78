"""The HTTP/1.1 server, with a time limit on every wait for a client."""

import asyncio
import json
import resource
from contextlib import suppress
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .limits import Limits
from .request import DRAIN_FACTOR

OPEN_FILES = 4096
"""Files that the process asks to have open; the machine may allow fewer."""

RESERVED_FILES = 100
"""Of those, files that aren't connections; and as many connections to answer 503 on."""

LINGER_SECONDS = 1.0
"""Seconds in which a client that is one too many may read its 503."""

_FULL = json.dumps({"error": "Too many connections are open. Send it again."}).encode()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_FULL), _FULL)
)


def make_server(app: Any, limits: Limits, *, log_level: str = "warning") -> uvicorn.Server:
    """Create the server of an application, with the limits for connections."""
    most = max(1, min(limits.connections, _files() - 2 * RESERVED_FILES))

    # uvicorn creates the protocol itself, without arguments of ours: a class carries the limits.
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
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


class _Strict(h11.Connection):
    """Refuses a request with two lengths: a proxy may have gone by the other one.

    Then the rest of the body would be read as the next request (request smuggling).
    """

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("Content-Length beside Transfer-Encoding")
        return event


class Connection(H11Protocol):
    """A connection whose client has to send its request in time, and to read the answer in time.

    When there are too many connections, the server closes the one for whose client it has waited
    longest, so that slow clients don't keep out others. It never closes one whose request is being
    handled.

    It is based on h11, since h11 reads a body whatever the `Upgrade` header offers; httptools would
    take the body for another protocol.
    """

    bounds = Limits()
    waiting: ClassVar[dict["Connection", None]] = {}
    """The connections on which the server waits for a client, the longest wait first."""
    _timer: asyncio.TimerHandle | None = None
    _drained: int | None = None
    """Bytes read of the body of a request that is answered already."""
    _refused = False

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.conn = _Strict(h11.SERVER)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            self._make_room()
        count = len(self.connections)
        if count > self.bounds.connections + RESERVED_FILES:
            transport.abort()
        elif count > self.bounds.connections:
            self._refused = True
            transport.write(_REFUSAL)
            self._close_after(LINGER_SECONDS)
        else:
            self._close_after(self.bounds.head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._drained is not None:
            self._drained += len(data)
            if self._drained > DRAIN_FACTOR * self.bounds.body:
                self.transport.close()
                return
        super().data_received(data)
        if self._drained is not None and self.conn.their_state is h11.SEND_BODY:
            return
        self._drained = None
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
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
            self._stop_waiting()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # it has its answer, and what comes after that isn't HTTP
            self.transport.close()

    def _make_room(self) -> None:
        """Close the connection with the longest wait, if there is one."""
        if slowest := next(iter(self.waiting), None):
            slowest._stop_waiting()
            self.connections.discard(slowest)
            slowest.transport.abort()

    def _close_after(self, seconds: float) -> None:
        self._stop_waiting()
        self.waiting[self] = None
        self._timer = self.loop.call_later(seconds, self._close)

    def _close(self) -> None:
        if self.flow.write_paused:
            self.transport.abort()  # what is left to write would keep it open
        self.transport.close()

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _should_upgrade(self) -> bool:
        return False  # uvicorn would log a warning for each that asks
