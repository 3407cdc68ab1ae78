"""Runs of Spark jobs that die at a named point, cheaply: forks of a process with one session.

Usage: python -m tests.support.spark_crash_worker, which reads commands from its standard input (see
`Zygote`); or python -m tests.support.spark_crash_worker WORK, which is one run with its own Java.

A fork has a connection of its own to the common Java, which therefore outlives it: what it was
writing for a killed run goes on until it is done, as on a server of Spark Connect.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).resolve().parents[2]
CONF = {
    "spark.master": "local[2]",
    "spark.driver.memory": "700m",
    "spark.sql.session.timeZone": "UTC",
}

ROWS = 200
"""Rows of a chunk's version 0; each version has one more."""


# --- in the test ---


class Zygote:
    """The process that is forked for each run; its Java starts once."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "zygote.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.spark_crash_worker"],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self.log = folder / "run.log"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def start(self, **work: Any) -> int:
        """Start a run (see `run`), and return its pid."""
        return self._ask("start", log=str(self.log), **work)

    def wait(self, pid: int) -> int:
        """Wait for a run's end; return its exit code, or the negative number of a signal."""
        return self._ask("wait", pid=pid)

    def run(self, **work: Any) -> int:
        return self.wait(self.start(**work))

    def stopped(self, pid: int) -> bool:
        """Wait until a run has been stopped, or has ended."""
        return self._ask("stopped", pid=pid)

    def quiet(self) -> None:
        """Wait until Java has finished what it did for killed runs."""
        self._ask("quiet")

    def numbers(self, path: str, rows: int) -> None:
        """Write the numbers from 0 on, in two files."""
        self._ask("numbers", path=path, rows=rows)

    def _ask(self, what: str, **more: Any) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps({"do": what, **more}), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the process that is forked has died; see zygote.log"
        return json.loads(answer)


def real(work: Mapping[str, Any], log: Path) -> subprocess.Popen[bytes]:
    """A run with its own Java, both in their own process group."""
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.spark_crash_worker", json.dumps(work)],
            cwd=ROOT,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


# --- in a run ---


def doom(point: str, delay: float, act: Callable[[], None]) -> None:
    """Let `act` happen at a point of publishing, or at any time."""
    from opendataflow_dagster.spark import batch as batches
    from opendataflow_dagster.spark import chunks
    from opendataflow_dagster.storage import folder as folders
    from opendataflow_dagster.store.store import Store

    def before(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def watched(*args: Any, **more: Any) -> Any:
            act()
            return plain(*args, **more)

        setattr(owner, name, watched)

    def after(owner: Any, name: str, times: int = 1) -> None:
        plain, seen = getattr(owner, name), 0

        def watched(*args: Any, **more: Any) -> Any:
            nonlocal seen
            returned = plain(*args, **more)
            seen += 1
            if seen == times:
                act()
            return returned

        setattr(owner, name, watched)

    def while_written(owner: Any) -> None:
        """Act when the first file exists, and before the write has finished."""
        plain = owner.write_files

        def watched(df: Any, path: str, *args: Any, **more: Any) -> None:
            def look() -> None:
                while not any(names for _, _, names in os.walk(path)):
                    time.sleep(0.001)
                time.sleep(delay)
                act()

            looking = threading.Thread(target=look)
            looking.start()
            plain(df, path, *args, **more)
            looking.join()

        owner.write_files = watched

    if point == "before write":
        before(chunks, "write_files")
    elif point == "during write":
        while_written(chunks)
    elif point == "after write":
        after(chunks, "write_files")
    elif point == "after verify":
        after(folders.Staged, "tell")
    elif point == "before show":
        before(folders, "_swap")
    elif point == "during show":
        after(folders, "_swap")
    elif point == "before READY":
        after(folders.Staged, "show")
    elif point == "after READY":
        after(Store, "finish")
    elif point == "batch's write":
        while_written(batches)
    elif point == "between staging":
        after(batches.ChunkBatch, "_stage", times=2)
    elif point == "between shows":
        after(folders.Staged, "show", times=2)
    elif point == "any":
        threading.Timer(delay, act).start()
    elif point:
        raise ValueError(point)


def versioned(version: int, slow: int, batch: int) -> Any:
    """A job whose chunk's rows identify its version; `slow` is the ms of every 4th."""
    from opendataflow_dagster.spark.job import spark_job

    def make(numbers: "DataFrame") -> "DataFrame":
        df = numbers.where(f"n < {ROWS + version}").withColumn("version", _literal(version))
        if slow:
            df = df.where(
                f"n % 4 > 0 or java_method('java.lang.Thread', 'sleep', {slow}L) is not null"
            )
        return df

    return spark_job(make, batch=batch)


def _literal(version: int) -> Any:
    from pyspark.sql.functions import lit

    return lit(version).cast("long")


def run(
    session: Callable[[], "SparkSession"],
    url: str,
    jobid: str,
    version: int = 0,
    point: str = "",
    delay: float = 0.0,
    slow: int = 0,
    batch: int = 1,
    stop: bool = False,
    group: bool = False,
    all_chunks: bool = False,
) -> int:
    """Run a job; at `point` it is killed (with `group`, its Java too), or stopped if `stop`."""
    from opendataflow_dagster.config.settings import load_settings
    from opendataflow_dagster.spark.worker import run_spark_job
    from opendataflow_dagster.store import open_store

    number = signal.SIGSTOP if stop else signal.SIGKILL

    def act() -> None:
        (os.killpg if group else os.kill)(os.getpid(), number)

    store = open_store(url)
    doom(point, delay, act)
    outcome = run_spark_job(
        store,
        jobid,
        jobid,
        versioned(version, slow, batch),
        load_settings(),
        say=lambda line: print(line, flush=True),
        environ=os.environ,
        all_chunks=all_chunks or batch > 1,
        session=session,
    )
    store.close()
    return outcome.code


# --- the process that is forked ---


class _Server:
    def __init__(self) -> None:
        # What a run imports is there for all of them.
        import pandas  # noqa: F401
        import pyarrow.parquet  # noqa: F401

        from opendataflow_dagster.config import settings  # noqa: F401
        from opendataflow_dagster.spark import worker as runs  # noqa: F401
        from opendataflow_dagster.spark.session import spark_session
        from opendataflow_dagster.store import store  # noqa: F401

        self.spark = spark_session(CONF, app="doomed", short=True)
        self.spark.range(10).count()

    def serve(self) -> None:
        for line in sys.stdin:
            told = json.loads(line)
            print(json.dumps(getattr(self, told.pop("do"))(**told)), flush=True)

    def start(self, log: str, **work: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 70
        try:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            self._connect_anew()
            code = run(lambda: self.spark, **work)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def wait(self, pid: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def stopped(self, pid: int) -> bool:
        return os.WIFSTOPPED(os.waitpid(pid, os.WUNTRACED)[1])

    def quiet(self) -> None:
        tracker = self.spark.sparkContext.statusTracker()
        while tracker.getActiveJobsIds():
            time.sleep(0.01)

    def numbers(self, path: str, rows: int) -> None:
        self.spark.range(0, rows, numPartitions=2).selectExpr("id as n").write.parquet(path)

    def _connect_anew(self) -> None:
        """Leave the parent's connection to Java to the parent."""
        gateway: Any = self.spark.sparkContext._gateway
        client = gateway._gateway_client
        self._kept = client.thread_connection, client.deque  # closing them would be heard there
        client.thread_connection = threading.local()
        client.deque = type(client.deque)()


def main(words: list[str]) -> int:
    if not words:
        _Server().serve()
        return 0
    from opendataflow_dagster.spark.session import spark_session

    return run(lambda: spark_session(CONF, short=True), **json.loads(words[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
