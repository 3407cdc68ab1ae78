"""Claims per second, of ours and of others: `python benchmarks/claims.py [--quick] [--only PART]`.

One cycle is claim + finish, on a job with one input and one output: history, fencing, facts and
triggers as in production. All that is compared is measured in the same run, in slices that take
turns, and each required ratio is the median of the rounds' own ratios. Exit code 0 if all are met.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lite import LiteBare, LiteOurs  # noqa: E402
from measure import WARM_UP, Clients, Report, Samples, amount, concluded, progress, spread  # noqa: E402
from rivals import (  # noqa: E402
    Bare,
    BareTake,
    Ours,
    PgQueuer,
    PgQueuerLimited,
    Procrastinate,
    connect,
    register,
    settle,
)

from opendataflow_dagster.dataflow.store import Store, new_owner, open_store  # noqa: E402
from tests.postgres import Server  # noqa: E402


class Setting(NamedTuple):
    """How long and how large."""

    rounds: int
    seconds: float
    sizes: tuple[tuple[int, int], ...]
    """Chunks, and how many of them are done before the first cycle."""


FULL = Setting(7, 0.4, ((10_000, 0), (100_000, 50_000), (1_000_000, 900_000)))
QUICK = Setting(3, 0.25, ((10_000, 0), (100_000, 50_000)))

ONE, EIGHT, TENS, HUNDREDS, ONE_HUNDREDS = (1, 1), (8, 1), (8, 10), (8, 100), (1, 100)
"""Clients, and the size of a batch."""

POSTGRES: tuple[tuple[Any, tuple], ...] = (
    (Ours, (ONE, EIGHT, ONE_HUNDREDS, TENS, HUNDREDS)),
    (Bare, (ONE, EIGHT, ONE_HUNDREDS, TENS, HUNDREDS)),
    (BareTake, (ONE, EIGHT)),
    (Procrastinate, (ONE, EIGHT)),
    (PgQueuer, (TENS, HUNDREDS)),
    (PgQueuerLimited, (TENS, HUNDREDS)),
)

SQLITE: tuple[tuple[Any, tuple], ...] = (
    (LiteOurs, (ONE, (4, 1), ONE_HUNDREDS)),
    (LiteBare, (ONE, (4, 1), ONE_HUNDREDS)),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a minute: up to 100k chunks, three rounds"
    )
    parser.add_argument("--only", choices=["postgres", "sqlite", "poll"], help="a part of it")
    options = parser.parse_args()
    setting, report = QUICK if options.quick else FULL, Report()
    if options.only != "sqlite":
        with Server() as server:
            print("PostgreSQL of", server.url(), "fsync and synchronous_commit on")
            if options.only != "poll":
                postgres(server, setting, report)
            poll_postgres(server.create_database("poll"), report)
    if options.only in (None, "sqlite", "poll"):
        with tempfile.TemporaryDirectory(prefix="odf-claims-") as folder:
            if options.only != "poll":
                sqlite(Path(folder), setting, report)
            poll_sqlite(Path(folder, "poll.db"))
    return report.verdict()


def postgres(server: Server, setting: Setting, report: Report) -> None:
    urls = {chunks: server.create_database(f"bench_{chunks}") for chunks, _ in setting.sizes}
    samples = Samples()
    with Clients(8) as clients:
        contests = [
            Contest(contender, urls[chunks], chunks, done, modes, clients)
            for contender, modes in POSTGRES
            for chunks, done in setting.sizes
            if chunks == 100_000 or not issubclass(contender, PgQueuer)
        ]
        compare(contests, setting, samples)
    for chunks, done in setting.sizes:
        show(
            f"PostgreSQL, {amount(chunks)} chunks, {done / chunks:.0%} done",
            POSTGRES,
            chunks,
            samples,
            setting,
            report,
        )

    small, large = setting.sizes[0][0], setting.sizes[-1][0]
    for chunks, _ in setting.sizes:
        for other, least, aim in (
            (Bare, 0.25, "0.4"),
            (BareTake, 0.25, "0.4"),
            (Procrastinate, 1.3, "2"),
        ):
            ratios = samples.ratios((Ours, chunks, EIGHT), (other, chunks, EIGHT))
            report.require(
                f"8 clients, k=1, {amount(chunks)}: ours / {other.title}",
                ratios,
                least=least,
                aim=aim,
            )
    # Like for like: our claim always minds the job's dial, pgqueuer's is a limit of concurrency.
    ratios = samples.ratios((Ours, 100_000, HUNDREDS), (PgQueuerLimited, 100_000, HUNDREDS))
    report.require("8 clients, k=100, 100k: ours / pgqueuer's batches of 100", ratios, least=1)
    ratios = samples.ratios((Ours, 100_000, HUNDREDS), (PgQueuer, 100_000, HUNDREDS))
    print(f"For the record: ours / pgqueuer's batches of 100 without any limit: {spread(ratios)}")
    for clients, k in (EIGHT, ONE):
        ratios = samples.ratios((Ours, large, (clients, k)), (Ours, small, (clients, k)))
        what = (
            f"flat, {clients} client{'s' * (clients > 1)}, k=1: {amount(large)} / {amount(small)}"
        )
        report.require(what, ratios, least=0.8)


def sqlite(folder: Path, setting: Setting, report: Report) -> None:
    samples = Samples()
    with Clients(4) as clients:
        contests = [
            Contest(contender, folder / f"{name}_{chunks}.db", chunks, done, modes, clients)
            for chunks, done in setting.sizes
            for name, (contender, modes) in zip(("ours", "bare"), SQLITE, strict=True)
        ]
        compare(contests, setting, samples)
    for chunks, done in setting.sizes:
        title = f"SQLite (WAL, synchronous=FULL), {amount(chunks)} chunks, {done / chunks:.0%} done"
        show(title, SQLITE, chunks, samples, setting, report)
    for chunks, _ in setting.sizes:
        ratios = samples.ratios((LiteOurs, chunks, ONE), (LiteBare, chunks, ONE))
        report.require(f"SQLite, k=1, {amount(chunks)}: ours / bare loop", ratios, least=0.5)
    small, large = setting.sizes[0][0], setting.sizes[-1][0]
    ratios = samples.ratios((LiteOurs, large, ONE), (LiteOurs, small, ONE))
    report.require(f"SQLite flat, k=1: {amount(large)} / {amount(small)}", ratios, least=0.8)


class Contest:
    """One contender on tables of one size, loaded again when too few chunks are left."""

    def __init__(
        self, contender: Any, where: Any, chunks: int, done: int, modes: tuple, clients: Clients
    ) -> None:
        self.contender, self.where, self.chunks = contender, where, chunks
        # What is small is gone before batches at the limit can be counted.
        self.modes = [
            mode for mode in modes if chunks > 10_000 or mode[1] == 1 or contender is Ours
        ]
        self._done, self._clients = done, clients
        self._name = f"{contender.__name__}, {amount(chunks)} chunks"
        self._fastest: dict[tuple[int, int], float] = {}

    def load(self) -> None:
        progress(f"loading {amount(self.chunks)} chunks for {self.contender.title}")
        self.contender.load(self.where, self.chunks, self._done)
        self._clients.open(self._name, self.contender, self.where)

    def rate(self, mode: tuple[int, int], seconds: float) -> float:
        """Chunks per second of one slice."""
        clients, k = mode
        if k > 1:
            seconds /= 2  # batches are soon through with what is left
        need = 1.5 * (seconds + WARM_UP) * self._fastest.get(mode, 100_000 if k > 1 else 5_000)
        left = self.contender.left(self.where)
        if left < need and left < 0.9 * (self.chunks - self._done):
            self.load()
        rate = self._clients.rate(self._name, k, clients, seconds)
        self._fastest[mode] = max(rate, self._fastest.get(mode, 0.0))
        return rate


def compare(contests: list[Contest], setting: Setting, samples: Samples) -> None:
    """Slices of all, in turns; every other round in the opposite order."""
    for contest in contests:
        contest.load()
    modes = list(dict.fromkeys(mode for contest in contests for mode in contest.modes))
    for number in range(setting.rounds):
        for mode in modes:
            progress(f"round {number + 1} of {setting.rounds}: {mode[0]} clients, k={mode[1]}")
            for contest in contests[:: 1 if number % 2 else -1]:
                if mode in contest.modes:
                    rate = contest.rate(mode, setting.seconds)
                    samples.add((contest.contender, contest.chunks, mode), rate)
    progress("")


def show(
    title: str, contenders: tuple, chunks: int, samples: Samples, setting: Setting, report: Report
) -> None:
    modes = list(dict.fromkeys(mode for _, modes in contenders for mode in modes))
    columns = [f"{clients} client{'s' * (clients > 1)}, k={k}" for clients, k in modes]
    rows = []
    for contender, _ in contenders:
        measured = [samples.get((contender, chunks, mode)) for mode in modes]
        if any(measured):
            rows.append([contender.title, *map(spread, measured)])
    report.table(
        f"{title}: chunks per second, median (least–most) of {setting.rounds} rounds", columns, rows
    )


def poll_postgres(url: str, report: Report) -> None:
    """An idle worker's claim against `select 1`: a job that has none, and one just drained."""
    Ours.load(url, 10_000, 8_000)
    with connect(url, "dataflow") as connection:
        register(connection, "idle", "nothing", "idle_out")
        settle(connection)
    store = open_store(url)
    ours = Ours(url)
    while ours.cycle(100):
        pass
    ours.close()
    plain = store.db.connect()
    for what, jobid in (("had nothing ever", "idle"), ("has just been drained", "bench")):
        ask = lambda: plain.execute("select 1").fetchall()  # noqa: E731
        polls, asks = alternate(poller(store, jobid), ask)
        report.require(
            f"empty poll / select 1, a job that {what} "
            f"({statistics.median(polls):.0f} / {statistics.median(asks):.0f} µs)",
            [statistics.median(polls[i::5]) / statistics.median(asks[i::5]) for i in range(5)],
            most=2,
        )
    store.close()


def poll_sqlite(path: Path) -> None:
    """For the record: there is no server here, so a `select 1` costs next to nothing."""
    LiteOurs.load(path, 1000, 999)
    store = open_store(f"sqlite:///{path}")
    plain = store.db.connect()
    polls, asks = alternate(poller(store, "bench"), lambda: plain.execute("select 1").fetchall())
    print(
        f"\nSQLite: an empty poll takes {statistics.median(polls):.0f} µs, "
        f"a `select 1` {statistics.median(asks):.1f} µs (for the record, not required)"
    )
    store.close()


def poller(store: Store, jobid: str) -> Callable[[], object]:
    owner = new_owner()

    def poll() -> None:
        assert not store.claim(jobid, owner=owner)

    return poll


def alternate(
    one: Callable[[], object], other: Callable[[], object], times: int = 3000
) -> tuple[list[float], list[float]]:
    """Microseconds of each call of two functions that take turns."""
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(times):
        for work, record in zip((one, other), spent, strict=True):
            start = time.perf_counter()
            work()
            record.append((time.perf_counter() - start) * 1e6)
    return spent


if __name__ == "__main__":
    sys.exit(concluded(main))
