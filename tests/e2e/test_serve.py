"""`odf serve` as people run it: it takes items, its worker consumes them, and both end well."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.test_app import make_project, wait_until
from tests.support.postgres import _free_port

ODF = Path(sys.executable).with_name("odf")

ROW = """
import time
import pandas as pd

def run(df, stream=None):
    time.sleep(stream.get("seconds", 0))
    return pd.DataFrame([{"name": stream["name"], "orders": len(df)}])
"""


class Served:
    """A project with the embedded database, and `odf serve` on it."""

    def __init__(self, root: Path) -> None:
        self.root, self.port = make_project(root), _free_port()
        (root / "pipelines" / "live" / "add.py").write_text(ROW)
        self.log = root.parent / "log"
        self.processes: list[subprocess.Popen[bytes]] = []
        self.http = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=30, trust_env=False
        )
        self.token = ""

    def odf(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ODF, *words], cwd=self.root, capture_output=True, text=True, check=False, timeout=100
        )

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [ODF, "serve", "--port", str(self.port), *words], cwd=self.root, stderr=log
            )
        self.processes.append(process)
        wait_until(lambda: self.health() != {} or process.poll() is not None, 60)
        self.token = self.token or self.odf("token", "live").stdout.strip()
        return process

    def warm(self) -> None:
        wait_until(lambda: self.health().get("worker") == "ready", 100)

    def health(self) -> dict[str, Any]:
        with suppress(httpx.HTTPError):
            return self.http.get("/health").json()
        return {}

    def post(self, name: str, **more: Any) -> httpx.Response:
        return self.http.post(
            "/stream/live",
            json={"name": name, **more},
            headers={"Authorization": f"Bearer {self.token}", "Idempotency-Key": name},
        )

    def status(self, dataid: str) -> str:
        found = self.http.get(
            f"/status/live/{dataid}", headers={"Authorization": f"Bearer {self.token}"}
        )
        return found.json()["status"]

    def statuses(self) -> Counter[str]:
        file = self.root / ".dataflow" / "dataflow.db"
        with closing(sqlite3.connect(file, timeout=60)) as connection:
            return Counter(
                status for (status,) in connection.execute("select status from datastatus")
            )

    def names(self) -> list[str]:
        with suppress(FileNotFoundError):
            lines = (self.root / "output" / "live.csv").read_text().splitlines()[1:]
            return [line.partition(",")[0] for line in lines]
        return []

    def worker(self) -> psutil.Process:
        [worker] = [
            each
            for each in psutil.Process(self.processes[-1].pid).children()
            if "--as-worker" in each.cmdline()
        ]
        return worker

    def said(self) -> str:
        return self.log.read_text()

    def close(self) -> None:
        self.http.close()
        for each in self.processes:
            kill(each)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a server and all that it started; stop it first, since it restarts its worker."""
    tree: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        server = psutil.Process(process.pid)
        while new := {server, *server.children(recursive=True)} - set(tree):
            tree += new
            for each in new:
                with suppress(psutil.NoSuchProcess):
                    each.suspend()
    for each in tree:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.kill()
    process.wait()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "shop")
    yield made
    made.close()


def until(happened: Callable[[], bool]) -> None:
    wait_until(happened, 60)


def test_items_are_consumed_and_a_dead_worker_is_restarted(served: Served) -> None:
    process = served.start()
    first = served.post("first").json()["dataid"]
    served.warm()
    until(lambda: served.status(first) == "READY")
    began = time.monotonic()
    second = served.post("second").json()["dataid"]
    until(lambda: served.status(second) == "READY")
    assert time.monotonic() - began < 20

    ready = (
        "Ready: items of live, quiet are processed as they arrive; quiet needs `odf token quiet`"
    )
    assert served.said().count(ready) == 1

    old = served.worker()
    old.kill()
    third = served.post("third").json()["dataid"]
    until(lambda: served.health().get("worker") == "restarting")
    served.warm()
    until(lambda: served.status(third) == "READY")
    assert served.names() == ["first", "second", "third"]
    assert "The worker ended with code -9" in served.said()

    # What is in hand is finished, or given back: it isn't RUNNING, nor FAILED.
    slow = [served.post(f"slow {each}", seconds=0.2).json()["dataid"] for each in range(3)]
    until(lambda: served.status(slow[0]) == "RUNNING")
    worker = served.worker()
    process.send_signal(signal.SIGINT)
    process.wait(60)
    until(lambda: not worker.is_running())
    found = served.statuses()
    assert found["READY"] >= 4
    assert found.keys() <= {"READY", "PENDING", "RESUBMIT"}
    assert "Traceback" not in served.said()


def test_kill_9_of_server_and_worker_loses_nothing_that_was_acknowledged(served: Served) -> None:
    process = served.start()
    served.warm()
    acknowledged: list[str] = []
    over = threading.Event()

    def client(number: int) -> None:
        for each in range(10_000):
            name = f"{number}-{each}"
            while not over.is_set():
                with suppress(httpx.HTTPError):
                    if served.post(name).status_code == 202:
                        acknowledged.append(name)
                        break
                time.sleep(0.02)
            if over.is_set():
                return
            time.sleep(0.05)

    clients = [threading.Thread(target=client, args=(each,)) for each in range(4)]
    for each in clients:
        each.start()
    until(lambda: len(served.names()) > 20)
    kill(process)
    before = len(acknowledged)
    served.start()
    until(lambda: len(acknowledged) > before + 20)
    over.set()
    for each in clients:
        each.join()
    until(lambda: served.statuses().keys() == {"READY"})
    names = Counter(served.names())
    assert set(acknowledged) <= names.keys()
    assert max(names.values()) == 1


NATIVE = """
import os
from pyspark.sql import DataFrame, functions as F

def run(df: DataFrame, stream=None) -> DataFrame:
    if stream["name"] == "exits":
        os._exit(3)
    if stream["name"] == "halts":
        df.sparkSession._jvm.java.lang.Runtime.getRuntime().halt(3)
    return df.limit(1).select(F.lit(stream["name"]).alias("name"))
"""


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("bad", ["exits", "halts"])
def test_an_item_that_ends_the_worker_is_held_alone(served: Served, bad: str) -> None:
    (served.root / "pipelines" / "live" / "add.py").write_text(NATIVE)
    served.start()
    names = ["a", "b", bad, "d", "e"]
    ids = [served.post(name).json()["dataid"] for name in names]
    wait_until(lambda: served.statuses() == {"READY": 4, "HOLD": 1}, 300)
    assert served.status(ids[2]) == "HOLD"
    assert sorted(served.names()) == ["a", "b", "d", "e"]
    assert served.said().count("is held: ") == 1
    assert 'odf_items_held{pipeline="live"} 1' in served.http.get("/metrics").text


def test_without_a_worker_the_items_wait(served: Served) -> None:
    process = served.start("--no-worker")
    assert served.health() == {"status": "ok", "database": True, "worker": "off"}
    assert served.post("a").status_code == 202
    assert served.statuses() == {"PENDING": 1}
    again = served.odf("serve", "--no-worker", "--port", str(served.port))
    assert again.returncode == 2
    assert "in use" in again.stderr
    assert "Choose another with --host or --port" in again.stderr
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert "takes items at http://127.0.0.1" in served.said()
    assert "Traceback" not in served.said()


def test_it_listens_on_this_machine_alone(served: Served) -> None:
    process = served.start("--no-worker")
    found = [
        each.laddr.ip
        for each in psutil.Process(process.pid).net_connections()
        if each.status == psutil.CONN_LISTEN
    ]
    assert found == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["--project", "nowhere"], 2, "has no project.yml"),
        (["--host", "256.0.0.1"], 2, "Can't listen at 256.0.0.1"),
        (["--rate", "0"], 2, "0"),
        (["--rate", "nan"], 2, "nan isn't a number of items"),
        (["--rate", "inf"], 2, "inf isn't a number of items"),
        (["--rate", "-1"], 2, "-1"),
    ],
)
def test_wrong_use_is_refused_in_one_line(
    served: Served, words: list[str], code: int, line: str
) -> None:
    ran = served.odf("serve", "--no-worker", *words)
    assert ran.returncode == code, ran.stderr
    assert line in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("postgresql://nobody@127.0.0.1:{port}/gone", "Cannot connect to postgresql://"),
        ("sqlite:///empty.db", "Run `odf init`"),
    ],
)
def test_without_its_tables_it_does_not_begin(served: Served, url: str, line: str) -> None:
    address = url.format(port=_free_port())
    (served.root / "dataflow.properties").write_text(f"url={address}\n")
    ran = served.odf("serve", "--no-worker", "--port", str(served.port))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert line in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_second_worker_of_the_project_is_on_standby(tmp_path: Path) -> None:
    from opendataflow_dagster.pipelines.worker import Bell, alone

    said: list[str] = []
    ours, theirs = os.pipe()
    bell = Bell(ours)
    with alone(tmp_path, bell, said.append) as first:
        assert first
        os.close(theirs)
        with alone(tmp_path, bell, said.append) as second:
            assert not second
    assert bell.over
    assert said == ["Another worker consumes this project's items: this one is on standby"]


def test_each_running_pipeline_has_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    from opendataflow_dagster.config.settings import load_settings
    from opendataflow_dagster.pipelines.worker import slots

    for name in ("MASTER", "SPARK_REMOTE", "SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    for cores, master in ((1, "local[4]"), (2, "local[4]"), (16, "local[16]")):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert slots(load_settings()) == {"spark.master": master}
    monkeypatch.setenv("MASTER", "local[1]")
    assert slots(load_settings()) == {}
    monkeypatch.delenv("MASTER")
    Path("dataflow.properties").write_text("spark.master=spark://here:7077\n")
    assert slots(load_settings()) == {}


def test_the_bell_names_pipelines_and_announces_the_end() -> None:
    from opendataflow_dagster.pipelines.worker import Bell

    ours, theirs = os.pipe()
    bell = Bell(ours)
    assert bell.wait(0) == set()
    os.write(theirs, b"one\ntw")
    assert bell.wait(1) == {"one"}
    os.write(theirs, "o\nü b\n".encode())
    bell.ring("mine")
    assert bell.wait(1) == {"two", "ü b", "mine"}
    os.close(theirs)
    assert bell.wait(1) == set()
    assert bell.over
    assert bell.wait(0) == set()
