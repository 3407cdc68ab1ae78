"""Items over HTTP: `python benchmarks/stream.py [--quick] [--database postgres|sqlite] [--only …]`.

A warm `odf serve` on a small project, with its worker. Eight client processes post items for 20
seconds, 50 a second in total, then 50 each. Measured: how long until an item is acknowledged, how
long from then until it is READY, and that none is lost or duplicated. The limit, in the same run:
the same clients at the same pace, each with a bare INSERT and commit per item. Then server and
worker are killed halfway and restarted. Finally, 200,000 items (with `--full` 1,000,000) go through
the pipeline in order, and are folded a minute after they are finished: measured are the memory of
server and worker, and the size of the tables. Exit code 0 if every target is met.
"""

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

import product  # noqa: E402
import psutil  # noqa: E402
import psycopg  # noqa: E402
from measure import concluded, progress  # noqa: E402
from product import Store, new_token, open_store  # noqa: E402
from report import FULL, QUICK, SLICE, TINY, Report, options  # noqa: E402

from tests.support.postgres import Server, _free_port  # noqa: E402

ODF = Path(sys.executable).with_name("odf")


class Setting(NamedTuple):
    """How many clients, for how long, and how many items a second in total."""

    clients: int
    seconds: float
    kill: float
    """Seconds of items; server and worker are killed halfway."""

    rates: tuple[int, ...] = (50, 400)
    long: int = 0
    """Items that go through one pipeline until all are folded."""


SETTINGS = {
    FULL: Setting(8, 20, 15, long=200_000),
    QUICK: Setting(8, 10, 10, long=20_000),
    SLICE: Setting(8, 10, 0, (50,)),
    TINY: Setting(2, 0.5, 1, (20,), long=250),
}
TINY_PARTS = {"postgres": ("kill",), "sqlite": ("pace", "long")}

MOST_LONG = 1_000_000
"""Items of the last part with `--full`."""

POST = 100
"""Items per post in the last part."""

BACKLOG = 3_000
"""Waiting items at which the sender of the last part waits, too."""

FOLD_AFTER = 60
"""Seconds after which items are folded in the last part."""

LARGEST = 20
"""The most megabytes of the tables once all items are folded."""

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
    """An acknowledged item: when, after how long, and as which chunk."""

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
            "project.yml": YML,
            "pipelines/live/price.py": PRICE,
            "pipelines/live/total.py": TOTAL,
            "sources/products.csv": "product,price\n"
            + "".join(f"{number},{number / 4}\n" for number in range(PRODUCTS)),
        }
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
                cwd=self.root,
                env=env | {"DATAFLOW_URL": self.url},
                stderr=log,
            )

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
        """Kill the server, its worker, and all processes that they started."""
        assert self.process is not None
        tree = [*psutil.Process(self.process.pid).children(recursive=True), self.process]
        for process in tree:
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def ready(self) -> dict[str, float]:
        """Return when each item became READY, by dataid, in seconds since 1970."""
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
        wanted = {item.dataid for item in sent}
        while True:
            ready = self.ready()
            if wanted <= ready.keys() or time.monotonic() > deadline:
                return ready
            time.sleep(0.5)

    def memory(self) -> tuple[float, float]:
        """The MB of the server and of its worker's Python process; Java has its own limit."""
        assert self.process is not None
        server = psutil.Process(self.process.pid)
        worker = [each for each in server.children() if "java" not in each.name()]
        return (
            server.memory_info().rss / 1e6,
            sum(each.memory_info().rss for each in worker) / 1e6,
        )

    def megabytes(self) -> float:
        """Return the size of the tables, with their indexes."""
        if self.url.startswith("p"):
            text = (
                "select sum(pg_total_relation_size(c.oid)) as size from pg_class c "
                "where c.relkind = 'r' and c.relnamespace = cast('dataflow' as regnamespace)"
            )
            return float(self.store.db.query(text)[0]["size"]) / 1e6
        path = Path(self.url.removeprefix("sqlite:///"))
        return (
            sum(each.stat().st_size for each in path.parent.glob(f"{path.name}*") if each.is_file())
            / 1e6
        )

    def written(self) -> Counter[str]:
        """Return how often each item is in the destination."""
        with (self.root / "output" / "live.csv").open(newline="") as file:
            return Counter(row["name"] for row in csv.DictReader(file))


# --- clients ---


def post(port: int, token: str, names: Sequence[str], start: float, pace: float) -> list[Sent]:
    """Post items, each at its time; one that isn't acknowledged is sent again with its key."""
    sent: list[Sent] = []
    connection: http.client.HTTPConnection | None = None
    for number, name in enumerate(names):
        time.sleep(max(0.0, start + number * pace - time.time()))
        item = {"name": name, "product": number % PRODUCTS, "pieces": 3, "note": 'say "hi"\n\'; --'}
        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            "Idempotency-Key": name,
        }
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
    """Run a bare INSERT and commit per item, each at its time."""
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
    pool: Any,
    work: Callable[..., list[Sent]],
    address: tuple,
    name: str,
    rate: float,
    seconds: float,
    clients: int,
) -> Any:
    """Send from all clients at an even pace; return a result to wait for."""
    pace, start = clients / rate, time.time() + 0.5
    count = max(1, int(rate * seconds / clients))
    jobs = [
        (
            *address,
            [f"{name}-{client}-{number}" for number in range(count)],
            start + pace * client / clients,
            pace,
        )
        for client in range(clients)
    ]
    return pool.starmap_async(work, jobs)


def together(result: Any, seconds: float) -> list[Sent]:
    return [item for items in result.get(seconds + 180) for item in items]


def stream(port: int, token: str, name: str, first: int, count: int) -> int:
    """Post items in order, many at a time, as fast as they are accepted; return how many."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    for start in range(first, first + count, POST):
        numbers = range(start, min(start + POST, first + count))
        items = [
            {"name": f"{name}-{number}", "product": number % PRODUCTS, "pieces": 3}
            for number in numbers
        ]
        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            "Idempotency-Key": f"{name}-{start}",
        }
        while True:
            try:
                connection.request("POST", "/stream/live", json.dumps(items), headers)
                answer = connection.getresponse()
                answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
            else:
                if answer.status == 202:
                    break
            time.sleep(0.2)
    return count


# --- the parts ---


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    most = MOST_LONG if "--full" in words else 0
    words = [word for word in words if word != "--full"]
    given = options(__doc__, words, database=("postgres", "sqlite"), only=("pace", "kill", "long"))
    setting, report = SETTINGS[given.scale], Report("stream", given, ("PostgreSQL", "pyspark"))
    folder = Path(tempfile.mkdtemp(prefix="odf-stream-"))
    context = multiprocessing.get_context("spawn")
    try:
        with context.Pool(setting.clients) as pool, contextlib.ExitStack() as stack:
            for name in [given.database] if given.database else ("postgres", "sqlite"):
                if name == "postgres":
                    url = stack.enter_context(Server()).create_database("bench")
                else:
                    url = f"sqlite:///{folder / 'dataflow.db'}"
                (folder / name).mkdir()
                serving = Serving(url, folder / name)
                stack.callback(serving.store.close)
                stack.callback(serving.stop)
                # The tiny form starts Spark three times, not six.
                parts = ("pace", "kill", "long") if given.scale != TINY else TINY_PARTS[name]
                parts = [part for part in parts if given.only in (None, part)]
                if {"pace", "kill"} & {*parts}:
                    serving.start()
                    serving.wait_until_warm()
                    address = (serving.port, serving.token)
                    together(all_at_once(pool, post, address, "warm", 50, 2, setting.clients), 2)
                if "pace" in parts:
                    paces(pool, serving, name, setting, report)
                if "kill" in parts and setting.kill:
                    killed(pool, serving, name, setting, report)
                if "long" in parts and setting.long:
                    long(pool, serving, name, most or setting.long, report)
                serving.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report.verdict()


def paces(pool: Any, serving: Serving, name: str, setting: Setting, report: Report) -> None:
    """Measure 50 a second in total, 50 a second per client, and the limit."""
    make_bare(serving.url)
    columns, rows = [], []
    seconds, clients = setting.seconds, setting.clients
    for rate in setting.rates:
        progress(f"{name}: {rate} items a second for {seconds:g} s")
        address = (serving.port, serving.token)
        sent = together(
            all_at_once(pool, post, address, f"{rate}", rate, seconds, clients), seconds
        )
        ready = serving.wait_until_done(sent)
        progress(f"{name}: bare INSERTs, {rate} a second")
        inserts = all_at_once(pool, insert, (serving.url,), f"{rate}", rate, seconds / 3, clients)
        bare = [item.seconds * 1000 for item in together(inserts, seconds)]
        acknowledged = [item.seconds * 1000 for item in sent]
        until = [max(0.0, ready[item.dataid] - item.at) for item in sent if item.dataid in ready]
        lost, twice = _wrong(serving, sent, ready, report)
        columns.append(f"{rate} a second")
        rows.append(
            [
                f"{len(sent):,}",
                str(lost),
                str(twice),
                *_both(acknowledged, "ms"),
                *_both(bare, "ms"),
                *_both(until, "s"),
            ]
        )
        report.require(f"lost or twice, {rate} a second, {name}", [lost + twice], most=0)
        if rate == setting.rates[0]:
            what = f"{name}: p95 until acknowledged / a bare INSERT and commit"
            report.compare(what, [_p95(acknowledged) / _p95(bare)], better="less")
            what = f"p95 until acknowledged, {name}"
            report.require(what, [_p95(acknowledged)], most=30, unit=" ms")
            report.require(f"p95 from there to READY, {name}", [_p95(until)], most=2, unit=" s")
    progress("")
    what = [
        "items",
        "lost",
        "twice",
        "acknowledged, p50",
        "p95",
        "bare INSERT + commit, p50",
        "p95",
        "acknowledged → READY, p50",
        "p95",
    ]
    table = [[what[at], *(row[at] for row in rows)] for at in range(len(what))]
    report.table(f"{name}: {clients} clients, {seconds:g} s", columns, table)


def killed(pool: Any, serving: Serving, name: str, setting: Setting, report: Report) -> None:
    """Kill server and worker halfway, and restart them."""
    rate, seconds = setting.rates[0], setting.kill
    progress(f"{name}: kill -9 in the middle of {seconds:g} s")
    address = (serving.port, serving.token)
    result = all_at_once(pool, post, address, "kill", rate, seconds, setting.clients)
    time.sleep(0.5 + seconds / 2)
    serving.kill()
    began = time.time()
    serving.start()
    sent = together(result, seconds)
    ready = serving.wait_until_done(sent)
    lost, twice = _wrong(serving, sent, ready, report)
    before = [item for item in sent if item.at < began and item.dataid in ready]
    late = max((ready[item.dataid] - began for item in before), default=0.0)
    again = min((item.at - began for item in sent if item.at > began), default=0.0)
    progress("")
    report.table(
        f"{name}: killed after {seconds / 2:g} s at {rate} a second",
        ["all"],
        [
            ["items", f"{len(sent):,}"],
            ["lost", str(lost)],
            ["twice", str(twice)],
            ["first acknowledged after", f"{again:.1f} s"],
            ["last of those before is READY after", f"{max(0.0, late):.1f} s"],
        ],
    )
    report.require(f"lost or twice by kill -9, {name}", [lost + twice], most=0)


def long(pool: Any, serving: Serving, name: str, count: int, report: Report) -> None:
    """Send many items through one pipeline, in order, until all of them are folded."""
    if report.judges:  # the earlier parts have checked the items' history, which is deleted here
        if serving.process is None:  # starting it registers the pipeline
            serving.start()
            serving.wait_until_warm()
        serving.stop()
        product.set_policy(serving.store, "live", {"fold_after": str(FOLD_AFTER)})
        serving.start()
        serving.wait_until_warm()
    elif serving.process is None or serving.process.poll() is not None:
        serving.start()
        serving.wait_until_warm()
    file = serving.root / "output" / "live.csv"
    done = Lines(file)
    before, began = done.count(), time.monotonic()
    samples: list[tuple[int, float, float]] = []
    sent, sending = 0, None
    while (here := done.count() - before) < count:
        if (sending is None or sending.ready()) and sent < count and sent - here < BACKLOG:
            if sending is not None:
                sending.get()
            some = min(BACKLOG, count - sent)
            address = (serving.port, serving.token)
            sending = pool.apply_async(stream, (*address, "long", sent, some))
            sent += some
        samples.append((here, *serving.memory()))
        progress(f"{name}: {here:,} of {count:,} items, {samples[-1][2]:.0f} MB")
        if time.monotonic() - began > 600 + count / 20:
            raise RuntimeError(f"Only {here:,} of {count:,} items are done: see {serving.log}")
        time.sleep(0.5 if report.judges else 0.05)
    seconds = time.monotonic() - began
    largest = serving.megabytes()
    _fold_all(serving, report)
    in_order = done.names("long-")
    wrong = sum(each != f"long-{number}" for number, each in enumerate(in_order)) + abs(
        count - len(in_order)
    )
    if wrong and not report.judges:
        raise RuntimeError(f"{wrong} of {count} items are lost, twice or in another order")
    progress("")
    tenths = {
        what: [_tenth(samples, count, tenth, at) for tenth in (1, 9)]
        for at, what in ((1, "server"), (2, "worker"))
    }
    report.table(
        f"{name}: {count:,} items through one pipeline, folded after {FOLD_AFTER} s",
        ["all"],
        [
            ["items a second", f"{count / seconds:,.0f}"],
            ["lost, twice, or in another order", str(wrong)],
            *(
                [f"memory of the {what}, second and last tenth", f"{two:.0f}, {last:.0f} MB"]
                for what, (two, last) in tenths.items()
            ),
            ["tables when the last item is done", f"{largest:.1f} MB"],
            ["tables when all are folded", f"{serving.megabytes():.1f} MB"],
        ],
    )
    report.require(f"lost, twice or in another order, {count:,}, {name}", [wrong], most=0)
    for what, (two, last) in tenths.items():
        report.require(f"memory of the {what}, last / second tenth, {name}", [last / two], most=1.1)
    size = serving.megabytes()
    report.require(f"tables after folding, {name}", [size], most=LARGEST, unit=" MB")


class Lines:
    """The rows of a growing CSV file; only new ones are read, to count them."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._count = path, 0, 0

    def count(self) -> int:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                while data := file.read(1 << 20):
                    self._count += data.count(b"\n")
                    self._at += len(data)
        return max(0, self._count - 1)

    def names(self, begin: str) -> list[str]:
        with self._path.open(newline="") as file:
            return [row["name"] for row in csv.DictReader(file) if row["name"].startswith(begin)]


def _fold_all(serving: Serving, report: Report) -> None:
    """Wait until every item is folded; in the tiny form, age them and fold them here.

    The worker folds in parallel: what it has locked isn't counted here.
    """
    store, deadline = serving.store, time.monotonic() + (600 if report.judges else 30)
    while store.db.query("select 1 from streamitem limit 1"):
        if time.monotonic() > deadline:
            if report.judges:
                break  # the size of the tables shows it
            raise RuntimeError("Not all items were folded")
        if not report.judges:
            for table, column in (("streamitem", "received"), ("chunkfact", "at")):
                store.db.execute(f"update {table} set {column} = '2026-01-01 00:00:00'", None)
            product.fold_items(store)
        time.sleep(1 if report.judges else 0.1)
    if not report.judges:
        product.reclaim_room(store)
        return
    time.sleep(15)  # the last fold is followed by a cleanup


def _tenth(samples: Sequence[tuple[int, float, float]], count: int, tenth: int, at: int) -> float:
    """Return the median of the samples within a tenth of the items."""
    found = [each[at] for each in samples if tenth * count <= each[0] * 10 < (tenth + 1) * count]
    return statistics.median(found or [samples[-1][at]])


def _wrong(
    serving: Serving, sent: Sequence[Sent], ready: dict[str, float], report: Report
) -> tuple[int, int]:
    """Return how many acknowledged items are lost, and how many are duplicated."""
    written = serving.written()
    lost = sum(item.dataid not in ready or not written[item.name] for item in sent)
    chunks = Counter(item.dataid for item in sent)
    twice = sum(written[item.name] > 1 or chunks[item.dataid] > 1 for item in sent)
    if (lost or twice) and not report.judges:
        raise RuntimeError(f"Of {len(sent)} items {lost} are lost and {twice} are there twice")
    return lost, twice


def _both(numbers: Sequence[float], unit: str) -> list[str]:
    if not numbers:
        return ["-", "-"]
    return [f"{statistics.median(numbers):.2f} {unit}", f"{_p95(numbers):.2f} {unit}"]


def _p95(numbers: Sequence[float]) -> float:
    return sorted(numbers)[min(len(numbers) - 1, int(len(numbers) * 0.95))]


if __name__ == "__main__":
    sys.exit(concluded(main))
