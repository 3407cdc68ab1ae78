"""The processes of `odf serve`: an HTTP/1.1 server that limits every wait, and its worker."""

import asyncio
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..config.credentials import handed_on
from ..model import Say
from ..util.text import first_line
from .request import DRAIN_FACTOR, Limits

OPEN_FILES = 4096
"""Open files that the process requests; the machine may allow fewer."""

RESERVED_FILES = 100
"""How many of those aren't connections, and how many are kept to answer 503 on."""

LINGER_SECONDS = 1.0
"""Seconds in which a client over the limit may read its 503."""

_FULL = json.dumps({"error": "Too many connections are open. Send it again."}).encode()
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_FULL), _FULL)
)


def make_server(app: Any, limits: Limits, *, log_level: str = "warning") -> uvicorn.Server:
    """Create the server of an application, with the limits for connections."""
    most = max(1, min(limits.connections, _files() - 2 * RESERVED_FILES))

    # uvicorn creates the protocol itself, without our arguments: a class carries the limits.
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
    """Return how many files may be open, after requesting enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES if soft == resource.RLIM_INFINITY else soft


class _Strict(h11.Connection):
    """Refuses a request with two lengths: a proxy may have used the other one.

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
    """A connection with time limits for the client to send its request and to read the answer.

    If there are too many connections, the server closes the one that it has waited for longest, so
    that slow clients don't lock out others. It never closes one whose request is being
    handled.

    It is based on h11, since h11 reads a body whatever the `Upgrade` header offers; httptools would
    treat the body as another protocol.
    """

    bounds = Limits()
    waiting: ClassVar[dict["Connection", None]] = {}
    """The connections on which the server waits for a client, the longest wait first."""
    _timer: asyncio.TimerHandle | None = None
    _drained: int | None = None
    """Bytes read from the body of a request that is already answered."""
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
        elif self._timer is None:  # the next request has begun, but is incomplete
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
        except h11.LocalProtocolError:  # already answered, and what follows isn't HTTP
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
            self.transport.abort()  # unsent data would keep it open
        self.transport.close()

    def _stop_waiting(self) -> None:
        self.waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _should_upgrade(self) -> bool:
        return False  # uvicorn would log a warning for each request to upgrade


# The worker process beside the server: starts it, restarts it, notifies it of new items.


STARTING, READY, RESTARTING, OFF = "starting", "ready", "restarting", "off"

FINISH_SECONDS = 15.0
"""Seconds that a worker has to finish its items at the end; then it must give them back."""

GIVE_BACK_SECONDS = 10.0
"""Seconds that it has to give them back; then it is killed."""

STABLE_SECONDS = 60.0
"""Seconds after which a worker that dies is restarted at once; earlier, with growing pauses."""

MAX_PAUSE_SECONDS = 30.0
"""The longest pause, in seconds, between two starts of a worker that keeps dying."""

READ_BYTES = 65536
"""Bytes read at a time; a longer line can't be a state."""


class WorkerProcess:
    """Starts the worker, restarts it whenever it ends, and stops it with the server.

    Each line of its standard input names a pipeline with new items. The end of that input tells it
    to stop, even if the server is killed. Each line of its standard output is
    its state.
    """

    def __init__(self, line: Sequence[str], *, say: Say) -> None:
        self._line, self._say = list(line), say
        self.state = OFF
        self.starts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def poke(self, slug: str) -> None:
        """Notify the worker of new items: a hint, since it checks by itself every second."""
        stdin = self._process.stdin if self._process else None
        if stdin is None or stdin.is_closing() or self.state != READY:
            return
        # If the worker doesn't read, its input must not fill the server's memory.
        if stdin.transport.get_write_buffer_size() < 4096:
            stdin.write(slug.encode() + b"\n")

    async def start(self) -> None:
        self._task = asyncio.create_task(self._keep_alive())

    async def stop(self) -> None:
        """Let the worker finish its items, or give them back."""
        self._over.set()
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        for seconds, number in (
            (FINISH_SECONDS, signal.SIGTERM),
            (GIVE_BACK_SECONDS, signal.SIGKILL),
        ):
            if self._task is None or self._task.done():
                break
            await asyncio.wait([self._task], timeout=seconds)
            if not self._task.done() and self._process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
        if self._task is not None:
            await self._task

    async def _keep_alive(self) -> None:
        pause = 0.0
        while not self._over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), pause)
            if self._over.is_set():
                break
            began = time.monotonic()
            try:
                ending = f"The worker ended with code {await self._run()}"
            except Exception as error:  # too many open files, no memory: that may pass
                ending = f"The worker can't be run: {first_line(error)}"
                await self._kill()
            if self._over.is_set():
                break
            stable = time.monotonic() - began > STABLE_SECONDS
            pause = 0.1 if stable else min(MAX_PAUSE_SECONDS, max(0.5, pause * 2))
            self._say(f"{ending}. It restarts in {pause:g} s")
            self.state = RESTARTING
        self.state = OFF

    async def _run(self) -> int:
        """Run one worker to its end."""
        self.state = STARTING if not self.starts else RESTARTING
        self.starts += 1
        # A session of its own: Ctrl-C at the terminal reaches only the server, which then ends it.
        with handed_on() as (environ, descriptors):
            process = self._process = await asyncio.create_subprocess_exec(
                *self._line,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
                env=environ,
                pass_fds=descriptors,
            )
        if self._over.is_set() and process.stdin:
            process.stdin.close()
        assert process.stdout is not None
        rest = b""
        while data := await process.stdout.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._read_line(line + b"\n")
            if len(rest) > READ_BYTES:
                _pass_on(rest)
                rest = b""
        self._read_line(rest)
        return await process.wait()

    async def _kill(self) -> None:
        """Kill a worker that nobody listens to any more."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GIVE_BACK_SECONDS)

    def _read_line(self, line: bytes) -> None:
        with suppress(ValueError, AttributeError):
            state = json.loads(line).get("state")
            if state == READY and self.state != READY:
                self.state = READY
                return
        _pass_on(line)


def _pass_on(printed: bytes) -> None:
    """Pass on what user code, or a library, has printed."""
    with suppress(OSError, ValueError):  # nobody reads it any more
        sys.stderr.buffer.write(printed)
        sys.stderr.flush()
