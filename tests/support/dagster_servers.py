"""A real Dagster for tests: code server, webserver, daemon, each a process that can be killed."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import dagster as dg
import psutil
import requests
import yaml

from tests.support.graphql_client import Client, wait_for
from tests.support.postgres import _free_port
from tests.support.process_guard import NAME, kill_marked, marked

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
BASE = ROOT / "examples" / "03_dagster_postgres" / "dagster.yaml"
SERVERS = ("code_server", "webserver", "daemon")

# What a test can't wait for, over what the example recommends.
HURRIED: dict[str, Any] = {
    "run_coordinator": {"config": {"dequeue_interval_seconds": 1}},
    "run_monitoring": {
        "poll_interval_seconds": 1,
        "start_timeout_seconds": 30,
        "cancel_timeout_seconds": 10,
    },
    "nux": {"enabled": False},
}


class Dagster:
    """Dagster's servers around one code location, in a folder of their own.

    `location` is a Python file or a module of this repository, `database` the URL of an empty
    PostgreSQL database for Dagster's storage; None is SQLite. `settings` are laid over the
    dagster.yaml of examples/03_dagster_postgres. `hurry` lets the daemon's loops turn every second,
    and `forking` forks runs from a process that has imported Dagster: see fast_dagster.py.
    """

    alive: list["Dagster"] = []  # noqa: RUF012

    def __init__(
        self,
        location: Path | str,
        *,
        name: str = "toy",
        database: str | None = None,
        env: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        hurry: bool = True,
        forking: bool = True,
        servers: Sequence[str] = SERVERS,
    ) -> None:
        self.location, self.name, self.hurry, self.forking = location, name, hurry, forking
        # Not pytest's folder: a socket's path has at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="odf-dagster-"))
        self.home = self.folder / "home"
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.storage = _storage(database)
        self.env = {**self.storage, **(env or {}), "DAGSTER_HOME": str(self.home)}
        self.env[NAME] = self.folder.name
        self.times: dict[str, float] = {}
        self._servers, self._started = servers, 0
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}
        self._write_settings(database, settings or {})
        self._guard = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.process_guard",
                str(os.getpid()),
                self.folder.name,
                str(self.folder),
            ],
            cwd=ROOT,
            start_new_session=True,
        )
        try:
            with _environment(self.env):
                began = time.monotonic()
                self.instance = dg.DagsterInstance.from_config(str(self.home))
                self.times["instance"] = time.monotonic() - began
            self.client = Client(self.url, name)
            self.start(*servers)
        except BaseException as error:
            error.add_note(self.logs())
            self.close()
            raise
        Dagster.alive.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # start, kill, restart

    def start(self, *servers: str) -> None:
        """Start servers, all by default, and wait until they serve and see the location."""
        began = time.monotonic()
        servers = servers or self._servers
        # A daemon that finds no code server looks for it again only a minute later.
        first = [server for server in servers if server == "code_server"]
        for together in (first, [server for server in servers if server not in first]):
            for server in together:
                if not self.is_running(server):
                    self._spawn(server)
            for server in together:
                self._wait(server)
                self.times[server] = time.monotonic() - began
        if self.is_running("webserver") and self.is_running("code_server"):
            self.wait_for_location()

    def kill(self, *which: str) -> None:
        """SIGKILL: servers by name, "run_workers", or "everything" with whatever runs below."""
        for each in which:
            if each == "everything":
                kill_marked(self.folder.name)
            elif each == "run_workers":
                workers = self.run_workers()
                for worker in workers:
                    worker.kill()
                psutil.wait_procs(workers, timeout=10)
            else:
                self._processes[each].kill()
        self._reap()

    def stop(self, server: str, timeout: float = 40) -> None:
        """SIGTERM, as systemd or Kubernetes would, and wait for the end."""
        self._processes[server].send_signal(signal.SIGTERM)
        self._processes[server].wait(timeout)

    def restart(self, *servers: str) -> None:
        """Kill servers and start them again."""
        self.kill(*servers)
        self.start(*servers)

    def is_running(self, server: str) -> bool:
        """Tell whether a server's process lives."""
        process = self._processes.get(server)
        return process is not None and process.poll() is None

    def run_workers(self) -> list[psutil.Process]:
        """Python processes of runs and their steps, also those whose code server is dead."""
        found = self.processes()
        words = {process.pid: " ".join(_words(process)) for process in found}
        # The fork server and what it forked have the same command line.
        forks = {pid for pid, line in words.items() if "forkserver" in line}
        return [
            process
            for process in found
            if "spawn_main" in words[process.pid]
            or (process.pid in forks and _parent(process) in forks)
        ]

    def processes(self) -> list[psutil.Process]:
        """All processes that live because of this."""
        return marked(self.folder.name)

    def wait_for_location(self, timeout: float = 30) -> None:
        """Wait until the webserver has loaded the location from the running code server."""
        wait_for(
            self.client.location_problem,
            lambda problem: problem is None,
            timeout,
            "location loads",
        )

    def close(self) -> None:
        """Kill everything and delete the folder; nothing is left running."""
        if self in Dagster.alive:
            Dagster.alive.remove(self)
        if hasattr(self, "client"):
            self.client.close()
        for process in self._processes.values():
            process.kill()  # the mark of one that has a passkey can't be read
        kill_marked(self.folder.name)
        for process in self._processes.values():
            process.wait(10)
        if hasattr(self, "instance"):
            self.instance.dispose()
        self._guard.kill()
        self._guard.wait()
        left = self.processes()
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not left, f"still running: {left}"

    # logs

    def log(self, server: str) -> str:
        """What a server wrote since its last start."""
        path = self._logs.get(server)
        return path.read_text(errors="replace") if path else ""

    def logs(self, lines: int = 40) -> str:
        """The last lines of every server, for the report of a test that fails."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            parts.append("\n".join([f"--- {path.name}", *tail]))
        return "\n".join(parts)

    def _spawn(self, server: str) -> None:
        self._started += 1
        log = self.folder / f"{self._started:02}_{server}.log"
        self._logs[server] = log
        with log.open("wb") as out:
            self._processes[server] = subprocess.Popen(
                [str(word) for word in self._command(server)],
                cwd=ROOT,
                env=_clean(os.environ) | self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _command(self, server: str) -> list[object]:
        workspace = ["--workspace", self.home / "workspace.yaml"]
        if server == "code_server":
            where = "-f" if isinstance(self.location, Path) else "-m"
            socket = self.folder / "grpc"
            return [
                sys.executable,
                "-m",
                "tests.support.fast_dagster",
                "forking" if self.forking else "spawning",
                "api",
                "grpc",
                where,
                self.location,
                "-d",
                ROOT,
                "--socket",
                socket,
            ]
        if server == "webserver":
            return [
                BIN / "dagster-webserver",
                "--host",
                "127.0.0.1",
                "--port",
                self.port,
                *workspace,
            ]
        if self.hurry:
            return [sys.executable, "-m", "tests.support.fast_dagster", "daemon", "run", *workspace]
        return [BIN / "dagster-daemon", "run", *workspace]

    def _wait(self, server: str) -> None:
        ready = {
            "code_server": lambda: "Started Dagster code server" in self.log(server),
            "webserver": self._serves,
            "daemon": lambda: "Instance is configured with" in self.log(server),
        }[server]
        wait_for(lambda: ready() or not self.is_running(server), bool, 60, f"{server} starts", 0.03)
        if not self.is_running(server):
            raise RuntimeError(f"{server} ended at its start:\n{self.log(server)[-6000:]}")

    def _serves(self) -> bool:
        return requests.get(f"{self.url}/server_info", timeout=10).ok

    def _reap(self) -> None:
        for process in self._processes.values():
            if process.poll() is None and psutil.pid_exists(process.pid):
                try:
                    process.wait(0.5)
                except subprocess.TimeoutExpired:
                    continue

    def _write_settings(self, database: str | None, settings: Mapping[str, Any]) -> None:
        self.home.mkdir()
        base = yaml.safe_load(BASE.read_text())
        if database is None:
            del base["storage"]
        whole = laid_over(laid_over(base, HURRIED if self.hurry else {}), settings)
        (self.home / "dagster.yaml").write_text(yaml.safe_dump(whole))
        server = {"socket": str(self.folder / "grpc"), "location_name": self.name}
        workspace = {"load_from": [{"grpc_server": server}]}
        (self.home / "workspace.yaml").write_text(yaml.safe_dump(workspace))


class Ticker:
    """Evaluate a sensor here and now, like the daemon, but without launching its runs."""

    def __init__(
        self, sensor: dg.SensorDefinition, instance: dg.DagsterInstance, definitions: dg.Definitions
    ) -> None:
        self.sensor, self.instance, self.definitions = sensor, instance, definitions
        self.cursor: str | None = None

    def tick(self) -> Any:
        """Apply a tick's results: asset events, partition keys, cursor. Return all of them."""
        # Without `instance_ref`, a run of a key that the same tick adds would be refused.
        with dg.build_sensor_context(
            instance=self.instance,
            instance_ref=self.instance.get_ref(),
            cursor=self.cursor,
            definitions=self.definitions,
            sensor_name=self.sensor.name,
        ) as context:
            said = self.sensor.evaluate_tick(context)
        # The daemon's order: what is applied first is there, if it is killed before the next.
        for found in said.asset_events:
            self.instance.report_runless_asset_event(found)
        for request in said.dynamic_partitions_requests or ():
            if isinstance(request, dg.AddDynamicPartitionsRequest):
                self.instance.add_dynamic_partitions(
                    request.partitions_def_name, list(request.partition_keys)
                )
            else:
                for partition in request.partition_keys:
                    self.instance.delete_dynamic_partition(request.partitions_def_name, partition)
        self.cursor = said.cursor
        return said


def laid_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with others laid over them; a value of None takes a setting away."""
    whole = dict(base)
    for name, value in over.items():
        if value is None:
            whole.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(whole.get(name), Mapping):
            whole[name] = laid_over(whole[name], value)
        else:
            whole[name] = value
    return whole


def _storage(database: str | None) -> dict[str, str]:
    if database is None:
        return {}
    url = urlsplit(database)
    return {
        "DAGSTER_POSTGRES_HOST": url.hostname or "",
        "DAGSTER_POSTGRES_PORT": str(url.port),
        "DAGSTER_POSTGRES_DB": url.path.lstrip("/"),
        "DAGSTER_POSTGRES_USER": url.username or "",
        "DAGSTER_POSTGRES_PASSWORD": url.password or "none",
    }


def _clean(environ: Mapping[str, str]) -> dict[str, str]:
    ours = ("DATAFLOW_", "DAGSTER_", "PASSKEY", "PYTEST_")
    return {name: value for name, value in environ.items() if not name.startswith(ours)}


@contextmanager
def _environment(env: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _parent(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.Error:
        return None


def _words(process: psutil.Process) -> Iterable[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return ()
