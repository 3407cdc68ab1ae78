"""The worker process beside the server: starts it, restarts it, notifies it of new items."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from ..config.credentials import handed_on
from ..model import Say
from ..util.text import first_line

STARTING, READY, RESTARTING, OFF = "starting", "ready", "restarting", "off"

FINISH_SECONDS = 15.0
"""Seconds that a worker has to finish its items at the end; then it must give them back."""

GIVE_BACK_SECONDS = 10.0
"""Seconds that it has to give them back; then it is killed."""

STABLE_SECONDS = 60.0
"""A worker that dies after so many seconds is restarted at once; a younger one, ever later."""

MAX_PAUSE_SECONDS = 30.0
"""Seconds between two starts, at most, however often the worker dies."""

READ_BYTES = 65536
"""Bytes that are read at once; a longer line can't be a state."""


class WorkerProcess:
    """Starts the worker, restarts it whenever it ends, and stops it with the server.

    Each line of its standard input names a pipeline with new items. The end of that input tells it
    to stop, so that it also stops when the server is killed. Each line of its standard output is
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
        """Notify the worker of new items: a hint, since it looks itself every second."""
        stdin = self._process.stdin if self._process else None
        if stdin is None or stdin.is_closing() or self.state != READY:
            return
        # A worker that doesn't read must not fill the memory of the server.
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
            except Exception as error:  # too many open files, no memory: it may pass
                ending = f"The worker can't be run: {first_line(error)}"
                await self._kill()
            if self._over.is_set():
                break
            stable = time.monotonic() - began > STABLE_SECONDS
            pause = 0.1 if stable else min(MAX_PAUSE_SECONDS, max(0.5, pause * 2))
            self._say(f"{ending}. It is started again in {pause:g} s")
            self.state = RESTARTING
        self.state = OFF

    async def _run(self) -> int:
        """Run one worker to its end."""
        self.state = STARTING if not self.starts else RESTARTING
        self.starts += 1
        # A session of its own: Ctrl-C at the terminal is for the server, which then ends it.
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
    """Pass on what code of a user, or a library, has printed."""
    with suppress(OSError, ValueError):  # nobody reads it any more
        sys.stderr.buffer.write(printed)
        sys.stderr.flush()
