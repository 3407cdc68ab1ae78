"""The worker beside the server is restarted, whatever ends it and whatever it prints."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opendataflow_dagster.server.http_server import OFF, READY, RESTARTING, WorkerProcess

WORKER = """
import sys
print("x" * 200_000, flush=True)
print('{"state": "ready"}', flush=True)
print("bytes without an end " * 5_000, end="", flush=True)
sys.stdin.read()
"""


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.02)


def test_a_line_of_any_length_ends_nothing(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    said: list[str] = []

    async def run() -> None:
        worker = WorkerProcess([sys.executable, "-c", WORKER], say=said.append)
        await worker.start()
        await until(lambda: worker.state == READY)
        await worker.stop()
        assert (worker.state, worker.starts) == (OFF, 1)

    asyncio.run(run())
    assert said == []
    printed = capfdbinary.readouterr().err
    assert printed == b"x" * 200_000 + b"\n" + b"bytes without an end " * 5_000


def test_a_failed_start_is_reported_and_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, tries, said = asyncio.create_subprocess_exec, [], []

    async def refused(*words: Any, **how: Any) -> Any:
        tries.append(words)
        if len(tries) < 3:
            raise OSError(24, "Too many open files")
        return await real(*words, **how)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
    monkeypatch.setattr("opendataflow_dagster.server.http_server.MAX_PAUSE_SECONDS", 0.5)

    async def run() -> None:
        worker = WorkerProcess([sys.executable, "-c", WORKER], say=said.append)
        await worker.start()
        await until(lambda: worker.state == RESTARTING and len(tries) == 1)
        await until(lambda: worker.state == READY)
        await worker.stop()

    asyncio.run(run())
    assert len(tries) == 3
    assert said == 2 * [
        "The worker can't be run: [Errno 24] Too many open files. It restarts in 0.5 s"
    ]


def test_a_worker_whose_output_fails_is_restarted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    read_line = WorkerProcess._read_line
    pids: list[Any] = []

    def fails_once(worker: WorkerProcess, line: bytes) -> None:
        if not pids:
            pids.append(worker.pid)
            raise RuntimeError("no good")
        read_line(worker, line)

    monkeypatch.setattr(WorkerProcess, "_read_line", fails_once)

    async def run() -> None:
        worker = WorkerProcess([sys.executable, "-c", WORKER], say=said.append)
        await worker.start()
        await until(lambda: worker.state == READY)
        assert not Path(f"/proc/{pids[0]}").exists()
        await worker.stop()

    asyncio.run(run())
    assert said == ["The worker can't be run: no good. It restarts in 0.5 s"]
