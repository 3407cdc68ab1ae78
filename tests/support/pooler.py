"""A real pgbouncer for tests, in front of the PostgreSQL of `postgres_server`."""

import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.postgres import Server, _free_port, _unprivileged

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

needs_pgbouncer = pytest.mark.skipif(
    PROGRAM is None, reason="there is no pgbouncer here: apt-get install pgbouncer"
)

SETTINGS = """\
[databases]
* = host=127.0.0.1 port={port} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = {mode}
default_pool_size = {size}
query_wait_timeout = 20
ignore_startup_parameters = extra_float_digits
logfile = {folder}/log
"""


class Pooler:
    """A pgbouncer whose clients share a few sessions of the server."""

    def __init__(
        self, server: Server, size: int, mode: str = "transaction", user: str = "postgres"
    ) -> None:
        assert PROGRAM is not None
        self.port, self.folder = _free_port(), Path(tempfile.mkdtemp(prefix="odf-pooler-"))
        settings = self.folder / "pgbouncer.ini"
        settings.write_text(
            SETTINGS.format(
                port=server.port,
                listen=self.port,
                mode=mode,
                size=size,
                user=user,
                folder=self.folder,
            )
        )
        who = _unprivileged()  # it refuses root, as PostgreSQL does
        if who:
            os.chown(self.folder, who["user"], who["group"])
        self._process = subprocess.Popen(
            [PROGRAM, "-q", str(settings)],
            cwd=self.folder,
            stderr=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,
            **who,
        )
        self._wait()

    def url(self, direct: str) -> str:
        """Return the URL through the pool for a direct URL."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{direct.rpartition('/')[2]}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait(self) -> None:
        deadline = time.monotonic() + 20
        while True:
            try:
                psycopg.connect(self.url("/postgres"), connect_timeout=5).close()
                return
            except psycopg.OperationalError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.close()
                    raise RuntimeError(f"pgbouncer doesn't start: {error}") from None
                time.sleep(0.05)


def _end_with_parent() -> None:
    """It must not outlive tests that are killed: Linux has a signal for that."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@pytest.fixture
def pool(postgres_server: Server) -> Iterator[Callable[..., Pooler]]:
    """Starts poolers, and ends them with the test."""
    started: list[Pooler] = []

    def start(size: int = 1, **settings: str) -> Pooler:
        started.append(Pooler(postgres_server, size, **settings))
        return started[-1]

    yield start
    for pooler in started:
        pooler.close()
