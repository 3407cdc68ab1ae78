"""Items over HTTP: `python benchmarks/stream.py [--quick] [--database postgres|sqlite] [--only …]`.

A warm `odf serve` on a small project, with its worker beside it. Eight client processes post items
for a minute, 50 a second in all, then 50 a second each: how long until an item is acknowledged, and
from then until it is READY; and that none is lost or there twice. The limit, in the same run: the
same clients at the same pace, each with a bare INSERT and commit per item. Then server and worker
are killed in the middle and started again. Exit code 0 if every target is met.
"""

import argparse
import contextlib
import csv
import http.client
import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
import psycopg  # noqa: E402
from measure import Report, concluded, progress  # noqa: E402

from opendataflow_dagster.dataflow.store import Store, open_store  # noqa: E402
from opendataflow_dagster.dataflow.tokens import new_token  # noqa: E402
from tests.postgres import Server, _free_port  # noqa: E402

ODF = Path(sys.executable).with_name("odf")
CLIENTS = 8

YML = """
name: bench
pipelines:
  - slug: live
    sources: [products]
    destination: sold
    transformations: [price, total]
"""
PRICE = """
import pandas as pd

def run(products, stream=None):
    sold = pd.DataFrame([stream])
    return sold.merge(products, on="product", how="left")
"""
TOTAL = """
def run(df, stream=None):
    df["total"] = df["price"] * df["pieces"]
    return df
"""
PRODUCTS = 200


class Sent(NamedTuple):
    """An item that was acknowledged: when, after how long, and as which chunk."""

    name: str
    dataid: str
    at: float
    seconds: float


class Serving:
    """A project, its database, and `odf serve` on it."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.root, self.port = url, folder / "bench", _free_port()
        self._project()
        self.log = folder / "log"
        self.store: Store = open_store(url)
        self.store.init()
        self.token = new_token(self.store, "live")
        self.process: subprocess.Popen[bytes] | None = None

    def _project(self) -> None:
        files = {
            "project.yml": YML, "pipelines/live/price.py": PRICE, "pipelines/live/total.py": TOTAL,
            "sources/products.csv": "product,price\n"
            + "".join(f"{number},{number / 4}\n" for number in range(PRODUCTS)),
        }  # fmt: skip
        for name, text in files.items():
            file = self.root / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def start(self) -> None:
        """Start the server, and wait until its worker is warm."""
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "DATAFLOW", "PASSKEY"))
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [ODF, "serve", "--port", str(self.port), "--rate", "100000"],
                cwd=self.root, env=env | {"DATAFLOW_URL": self.url}, stderr=log,
            )  # fmt: skip

    def wait_until_warm(self, seconds: float = 90.0) -> None:
        deadline = time.monotonic() + seconds
        while self.health().get("worker") != "ready":
            if time.monotonic() > deadline or (self.process and self.process.poll() is not None):
                raise RuntimeError(f"odf serve isn't ready: {self.log.read_text()[-2000:]}")
            time.sleep(0.2)

    def health(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                return json.loads(connection.getresponse().read())
        return {}

    def kill(self) -> None:
        """Kill the server, its worker and all that they have started."""
        assert self.process is not None
        for each in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def ready(self) -> dict[str, float]:
        """When each item became READY, by dataid, in seconds since 1970."""
        at = (
            "extract(epoch from at)"
            if self.url.startswith("p")
            else "(julianday(at) - 2440587.5) * 86400.0"
        )
        rows = self.store.db.query(
            f"select dataid, {at} as at from dataevent "
            "where jobid = 'live' and status_after = 'READY'"
        )
        return {row["dataid"]: float(row["at"]) for row in rows}

    def wait_until_done(self, sent: Sequence[Sent], seconds: float = 120.0) -> dict[str, float]:
        deadline = time.monotonic() + seconds
        wanted = {each.dataid for each in sent}
        while True:
            ready = self.ready()
            if wanted <= ready.keys() or time.monotonic() > deadline:
                return ready
            time.sleep(0.5)

    def written(self) -> Counter[str]:
        """How often each item is in the destination."""
        with (self.root / "output" / "live.csv").open(newline="") as file:
            return Counter(row["name"] for row in csv.DictReader(file))


# --- clients ---


def post(port: int, token: str, names: Sequence[str], start: float, pace: float) -> list[Sent]:
    """Post items, each at its moment; one that isn't acknowledged is sent again with its key."""
    sent: list[Sent] = []
    connection: http.client.HTTPConnection | None = None
    for number, name in enumerate(names):
        time.sleep(max(0.0, start + number * pace - time.time()))
        item = {"name": name, "product": number % PRODUCTS, "pieces": 3, "note": 'say "hi"\n\'; --'}
        headers = {
            "Authorization": f"Bearer {token}", "Content-Type": "application/json",
            "Idempotency-Key": name,
        }  # fmt: skip
        while True:
            began = time.perf_counter()
            try:
                if connection is None:
                    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                    connection.connect()
                    connection.sock.setsockopt(6, 1, 1)  # TCP_NODELAY
                connection.request("POST", "/stream/live", json.dumps(item), headers)
                answer = connection.getresponse()
                told = json.loads(answer.read())
            except (OSError, http.client.HTTPException, ValueError):
                connection = None
                time.sleep(0.05)
                continue
            if answer.status == 202:
                break
            time.sleep(0.05)
        seconds = time.perf_counter() - began
        sent.append(Sent(name, told["dataid"], time.time(), seconds))
    return sent


def insert(url: str, names: Sequence[str], start: float, pace: float) -> list[Sent]:
    """A bare INSERT and commit per item, each at its moment."""
    if url.startswith("postgres"):
        connection: Any = psycopg.connect(url, autocommit=True)
        text = "insert into bare (name, payload) values (%s, %s)"
    else:
        path = url.removeprefix("sqlite:///") + "-bare"
        connection = sqlite3.connect(path, timeout=60, isolation_level=None)
        connection.execute("pragma synchronous = full")
        text = "insert into bare (name, payload) values (?, ?)"
    sent = []
    for number, name in enumerate(names):
        time.sleep(max(0.0, start + number * pace - time.time()))
        payload = json.dumps({"name": name, "product": number % PRODUCTS, "pieces": 3})
        began = time.perf_counter()
        connection.execute(text, (name, payload))
        sent.append(Sent(name, "", time.time(), time.perf_counter() - began))
    connection.close()
    return sent


def make_bare(url: str) -> None:
    table = "create table bare (name text primary key, payload text)"
    if url.startswith("postgres"):
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(table)
        return
    connection = sqlite3.connect(url.removeprefix("sqlite:///") + "-bare")
    connection.execute("pragma journal_mode = wal")
    connection.execute(table)
    connection.close()


def all_at_once(
    pool: Any, work: Callable[..., list[Sent]], start_of: tuple, name: str, rate: float,
    seconds: float,
) -> list[Sent]:  # fmt: skip
    """What all clients have sent, so many a second in all, evenly spread."""
    pace, start = CLIENTS / rate, time.time() + 1.0
    count = int(rate * seconds / CLIENTS)
    jobs = [
        (*start_of, [f"{name}-{client}-{each}" for each in range(count)],
         start + pace * client / CLIENTS, pace)
        for client in range(CLIENTS)
    ]  # fmt: skip
    return [each for found in pool.starmap(work, jobs) for each in found]


# --- the parts ---


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="ten seconds instead of a minute")
    parser.add_argument("--database", choices=["postgres", "sqlite"], help="one of them")
    parser.add_argument("--only", choices=["pace", "kill"], help="a part of it")
    options = parser.parse_args()
    seconds = 10.0 if options.quick else 60.0
    report = Report()
    folder = Path(tempfile.mkdtemp(prefix="odf-stream-"))
    context = multiprocessing.get_context("spawn")
    try:
        with context.Pool(CLIENTS) as pool, contextlib.ExitStack() as stack:
            for name in ("postgres", "sqlite"):
                if options.database not in (None, name):
                    continue
                if name == "postgres":
                    url = stack.enter_context(Server()).create_database("bench")
                else:
                    url = f"sqlite:///{folder / 'dataflow.db'}"
                (folder / name).mkdir()
                serving = Serving(url, folder / name)
                stack.callback(serving.store.close)
                stack.callback(serving.stop)
                serving.start()
                serving.wait_until_warm()
                all_at_once(pool, post, (serving.port, serving.token), "warm", 50, 3)
                if options.only != "kill":
                    paces(pool, serving, name, seconds, report)
                if options.only != "pace":
                    killed(pool, serving, name, min(seconds, 30.0), report)
                serving.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report.verdict()


def paces(pool: Any, serving: Serving, name: str, seconds: float, report: Report) -> None:
    """50 a second in all, and 50 a second each; and the limit."""
    make_bare(serving.url)
    columns, rows = [], []
    for rate in (50, 50 * CLIENTS):
        progress(f"{name}: {rate} items a second for {seconds:g} s")
        address = (serving.port, serving.token)
        sent = all_at_once(pool, post, address, f"{rate}", rate, seconds)
        ready = serving.wait_until_done(sent)
        progress(f"{name}: bare INSERTs, {rate} a second")
        bare = all_at_once(pool, insert, (serving.url,), f"{rate}", rate, seconds / 3)
        acknowledged = [each.seconds * 1000 for each in sent]
        until = [max(0.0, ready[each.dataid] - each.at) for each in sent if each.dataid in ready]
        lost, twice = _wrong(serving, sent, ready)
        columns.append(f"{rate} a second")
        rows.append([
            f"{len(sent):,}", str(lost), str(twice), *_both(acknowledged, "ms"),
            *_both([each.seconds * 1000 for each in bare], "ms"), *_both(until, "s"),
        ])  # fmt: skip
        report.require(f"lost or twice, {rate} a second, {name}", [lost + twice], most=0)
        if rate == 50:
            report.require(f"p95 until acknowledged, {name}", [_p95(acknowledged)], most=30,
                           unit=" ms")  # fmt: skip
            report.require(f"p95 from there to READY, {name}", [_p95(until)], most=2, unit=" s")
    progress("")
    what = ["items", "lost", "twice", "acknowledged, p50", "p95", "bare INSERT + commit, p50",
            "p95", "acknowledged → READY, p50", "p95"]  # fmt: skip
    table = [[what[at], *(row[at] for row in rows)] for at in range(len(what))]
    report.table(f"{name}: {CLIENTS} clients, {seconds:g} s", columns, table)


def killed(pool: Any, serving: Serving, name: str, seconds: float, report: Report) -> None:
    """Server and worker are killed in the middle, and started again."""
    progress(f"{name}: kill -9 in the middle of {seconds:g} s")
    pace, start = CLIENTS / 50, time.time() + 1.0
    count = int(50 * seconds / CLIENTS)
    jobs = [
        (serving.port, serving.token, [f"kill-{client}-{each}" for each in range(count)],
         start + pace * client / CLIENTS, pace)
        for client in range(CLIENTS)
    ]  # fmt: skip
    result = pool.starmap_async(post, jobs)
    time.sleep(max(0.0, start + seconds / 2 - time.time()))
    serving.kill()
    began = time.time()
    serving.start()
    sent = [each for found in result.get(seconds + 180) for each in found]
    ready = serving.wait_until_done(sent)
    lost, twice = _wrong(serving, sent, ready)
    before = [each for each in sent if each.at < began and each.dataid in ready]
    late = max((ready[each.dataid] - began for each in before), default=0.0)
    again = min((each.at - began for each in sent if each.at > began), default=0.0)
    progress("")
    report.table(
        f"{name}: killed after {seconds / 2:g} s at 50 a second", ["all"],
        [
            ["items", f"{len(sent):,}"], ["lost", str(lost)], ["twice", str(twice)],
            ["first acknowledged after", f"{again:.1f} s"],
            ["last of those before is READY after", f"{max(0.0, late):.1f} s"],
        ],
    )  # fmt: skip
    report.require(f"lost or twice by kill -9, {name}", [lost + twice], most=0)


def _wrong(serving: Serving, sent: Sequence[Sent], ready: dict[str, float]) -> tuple[int, int]:
    """How many acknowledged items are lost, and how many are there twice."""
    written = serving.written()
    lost = sum(each.dataid not in ready or not written[each.name] for each in sent)
    chunks = Counter(each.dataid for each in sent)
    twice = sum(written[each.name] > 1 or chunks[each.dataid] > 1 for each in sent)
    return lost, twice


def _both(numbers: Sequence[float], unit: str) -> list[str]:
    if not numbers:
        return ["-", "-"]
    return [f"{statistics.median(numbers):.2f} {unit}", f"{_p95(numbers):.2f} {unit}"]


def _p95(numbers: Sequence[float]) -> float:
    return sorted(numbers)[min(len(numbers) - 1, int(len(numbers) * 0.95))]


if __name__ == "__main__":
    sys.exit(concluded(main))
