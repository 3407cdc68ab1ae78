"""A real standalone cluster of Spark for tests: a master and two workers, each to be killed."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pytest

from tests.support.postgres import _free_port
from tests.support.process_guard import NAME, kill_marked, marked

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = "org.apache.spark.deploy"
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


class Cluster:
    """A master and workers on the loopback, in a folder of their own, each in its own group.

    `url` is what spark.master has to be, `conf` is that and small executors that start fast. A
    worker's executors live and die apart from it.
    """

    def __init__(self, workers: int = 2, cores: int = 1, memory: str = "1g") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="odf-spark-"))
        self.port = _free_port()
        self.url = f"spark://127.0.0.1:{self.port}"
        self.conf = {
            "spark.master": self.url,
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        }
        self._cores, self._memory = cores, memory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
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
            self._spawn(
                "master",
                f"{DEPLOY}.master.Master",
                "--host",
                "127.0.0.1",
                "--port",
                self.port,
                "--webui-port",
                0,
            )
            self._wait("master", "New state: ALIVE")
            names = [f"worker{number}" for number in range(1, workers + 1)]
            for name in names:
                self._start_worker(name)
            for name in names:
                self._wait(name, "Successfully registered")
        except BaseException as error:
            error.add_note(self.logs())
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
        if error is not None:
            error.add_note(self.logs())
        self.close()

    @property
    def workers(self) -> list[str]:
        """The names of the workers that live."""
        return [
            name
            for name, process in self._processes.items()
            if name != "master" and process.poll() is None
        ]

    def start_worker(self, name: str) -> None:
        """Start a worker, also one that was killed, and wait until the master knows it."""
        self._start_worker(name)
        self._wait(name, "Successfully registered")

    def kill_worker(self, name: str = "worker1") -> None:
        """SIGKILL a worker; its executors notice it and end by themselves."""
        self._processes[name].kill()
        self._processes[name].wait()

    def executors(self) -> list[psutil.Process]:
        """Return the processes that run tasks, of all applications."""
        found = []
        for process in marked(self.folder.name):
            with suppress(psutil.Error):
                if EXECUTOR in process.cmdline():
                    found.append(process)
        return found

    def kill_executor(self, timeout: float = 60) -> int:
        """SIGKILL an executor, waiting for one if there is none yet, and return its pid."""
        end = time.monotonic() + timeout
        while not (found := self.executors()):
            assert time.monotonic() < end, f"no executor after {timeout} s"
            time.sleep(0.05)
        found[0].kill()
        found[0].wait(10)
        return found[0].pid

    def close(self) -> None:
        """Kill everything and delete the folder; nothing is left running."""
        kill_marked(self.folder.name)
        for process in self._processes.values():
            process.wait()
        self._guard.kill()
        self._guard.wait()
        left = marked(self.folder.name)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not left, f"still running: {left}"

    def log(self, name: str) -> str:
        """What the master or a worker wrote since its last start."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def logs(self, lines: int = 20) -> str:
        """The last lines of each, for the report of a test that fails."""
        return "\n".join(
            f"--- {name}\n" + "\n".join(self.log(name).splitlines()[-lines:])
            for name in self._processes
        )

    def _start_worker(self, name: str) -> None:
        self._spawn(
            name,
            f"{DEPLOY}.worker.Worker",
            "--host",
            "127.0.0.1",
            "--port",
            0,
            "--webui-port",
            0,
            "--cores",
            self._cores,
            "--memory",
            self._memory,
            "--work-dir",
            self.folder / f"{name}-work",
            self.url,
        )

    def _spawn(self, name: str, *words: object) -> None:
        from pyspark.find_spark_home import _find_spark_home

        from opendataflow_dagster.spark.settings import needed_java

        home = _find_spark_home()
        scratch = self.folder / "scratch"
        scratch.mkdir(exist_ok=True)
        environ = os.environ | {
            NAME: self.folder.name,
            "JAVA_HOME": needed_java(),
            "SPARK_HOME": home,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(scratch),
            "SPARK_LOG_DIR": str(self.folder),
            "SPARK_PID_DIR": str(self.folder),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [os.path.join(home, "bin", "spark-class"), *map(str, words)],
                cwd=self.folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self, name: str, words: str, timeout: float = 60) -> None:
        end = time.monotonic() + timeout
        while words not in self.log(name):
            dead = self._processes[name].poll() is not None
            if dead or time.monotonic() > end:
                raise RuntimeError(
                    f"{name} {'ended' if dead else 'took too long'}: {self.log(name)[-2000:]}"
                )
            time.sleep(0.05)


@pytest.fixture(scope="module")
def spark_cluster() -> Iterator[Cluster]:
    """A cluster for the tests of a module; whoever kills a part of it starts it again."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def start_cluster() -> Iterator[Callable[..., Cluster]]:
    """A function that starts a cluster for one test, which may kill all of it."""
    started: list[Cluster] = []

    def start(**more: int | str) -> Cluster:
        started.append(Cluster(**more))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for cluster in started:
        cluster.close()
