"""The worker beside the server: a process of its own, kept alive, and told of new items."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from ..config.passkey import handed_on
from ..model import Say
from ..util.text import first_line

STARTING, READY, RESTARTING, OFF = "starting", "ready", "restarting", "off"

PATIENCE = 15.0
"""Seconds that a worker may take for what it has in hand; then it has to give it back."""

GRACE = 10.0
"""Seconds for giving it back."""

LASTED = 60.0
"""Seconds after which a worker that dies is started again at once; else later each time."""

LONGEST = 30.0

MOST = 65536
"""Bytes that are read at once, and of a line that may be a state."""


class WorkerProcess:
    """Starts the worker, again whenever it ends, and ends it with the server.

    Its standard input tells it of pipelines with new items, and its end tells it to stop, so that
    it stops too when the server is killed. Each line of its standard output is its state.
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
        """Tell the worker of new items: a hint, since it looks itself every second."""
        stdin = self._process.stdin if self._process else None
        if stdin is None or stdin.is_closing() or self.state != READY:
            return
        if stdin.transport.get_write_buffer_size() < 4096:
            stdin.write(slug.encode() + b"\n")

    async def start(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Let the worker finish what it has in hand, or give it back."""
        self._over.set()
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        for seconds, number in ((PATIENCE, signal.SIGTERM), (GRACE, signal.SIGKILL)):
            if self._task is None or self._task.done():
                break
            await asyncio.wait([self._task], timeout=seconds)
            if not self._task.done() and self._process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
        if self._task is not None:
            await self._task

    async def _keep(self) -> None:
        pause = 0.0
        while not self._over.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), pause)
            if self._over.is_set():
                break
            began = time.monotonic()
            try:
                told = f"The worker ended with code {await self._run()}"
            except Exception as error:  # too many open files, no memory: whatever it is, go on
                told = f"The worker can't be run: {first_line(error)}"
                await self._end()
            if self._over.is_set():
                break
            lasted = time.monotonic() - began > LASTED
            pause = 0.1 if lasted else min(LONGEST, max(0.5, pause * 2))
            self._say(f"{told}. It is started again in {pause:g} s")
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
        while data := await process.stdout.read(MOST):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                self._heard(line + b"\n")
            if len(rest) > MOST:
                _show(rest)
                rest = b""
        self._heard(rest)
        return await process.wait()

    async def _end(self) -> None:
        """End a worker that nobody listens to any more."""
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), GRACE)

    def _heard(self, line: bytes) -> None:
        with suppress(ValueError, AttributeError):
            told = json.loads(line).get("state")
            if told == READY and self.state != READY:
                self.state = READY
                return
        _show(line)


def _show(printed: bytes) -> None:
    """Pass on what something else than the worker has printed."""
    with suppress(OSError, ValueError):  # nobody reads it any more
        sys.stderr.buffer.write(printed)
        sys.stderr.flush()
