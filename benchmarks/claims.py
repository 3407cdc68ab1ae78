"""Claims per second, ours and others': `python benchmarks/claims.py [--quick] [--only PART]`.

One cycle is claim + finish, on a job with one input and one output, with history, fencing, facts
and triggers as in production. All contenders are measured in the same run, in alternating slices,
and each required ratio is the median of the rounds' own ratios. Exit code 0 if all are met.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from lite import LiteBare, LiteLean, LiteOurs  # noqa: E402
from measure import WARM_UP, Clients, Samples, concluded, progress  # noqa: E402
from product import Store, new_owner, open_store  # noqa: E402
from report import FULL, QUICK, SLICE, TINY, Report, amount, options, spread  # noqa: E402
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

from tests.support.postgres import Server  # noqa: E402

Mode = tuple[int, int]
"""Clients, and the size of a batch."""

Contenders = Sequence[tuple[Any, Sequence[Mode]]]


class Setting(NamedTuple):
    """How long to measure, and on how many chunks."""

    rounds: int
    seconds: float
    sizes: tuple[tuple[int, int], ...]
    """Chunks, and how many of them are done before the first cycle."""

    crowd: int = 8
    """The number of clients, where there are many."""

    batches: tuple[int, ...] = (10, 100)
    batches_on: int = 100_000
    """The number of chunks for the comparison with pgqueuer's batches."""

    warm_up: float = WARM_UP
    polls: int = 3000


SETTINGS = {
    FULL: Setting(5, 0.4, ((10_000, 0), (100_000, 50_000), (1_000_000, 900_000))),
    QUICK: Setting(3, 0.25, ((10_000, 0), (100_000, 50_000))),
    SLICE: Setting(5, 0.3, ((10_000, 0),)),
    TINY: Setting(1, 0.04, ((2000, 0),), 2, (10,), 2000, 0.01, 20),
}

ONE: Mode = (1, 1)


def main(arguments: Sequence[str] | None = None) -> int:
    given = options(__doc__, arguments, only=("postgres", "sqlite", "poll"))
    setting = SETTINGS[given.scale]
    report = Report("claims", given, ("PostgreSQL", "procrastinate", "pgqueuer"))
    if given.only != "sqlite":
        with Server() as server:
            if given.scale in (SLICE, TINY):
                slice_of_postgres(server, setting, report)
            if given.scale != SLICE and given.only != "poll":
                postgres(server, setting, report)
            if given.scale != SLICE:
                poll_postgres(server.create_database("poll"), setting, report)
    if given.only in (None, "sqlite", "poll"):
        with tempfile.TemporaryDirectory(prefix="odf-claims-") as folder:
            if given.scale in (SLICE, TINY):
                slice_of_sqlite(Path(folder), setting, report)
            if given.scale != SLICE and given.only != "poll":
                sqlite(Path(folder), setting, report)
            if given.scale != SLICE:
                poll_sqlite(Path(folder, "poll.db"), setting, report)
    return report.verdict()


def rivals_on_postgres(setting: Setting, report: Report) -> Contenders:
    """Return the contenders and their modes."""
    crowd = (setting.crowd, 1)
    batches = [(setting.crowd, k) for k in setting.batches]
    all_modes = [ONE, crowd, (1, setting.batches[-1]), *batches]
    contenders = [
        (Ours, all_modes),
        (Bare, all_modes),
        (BareTake, [ONE, crowd]),
        (Procrastinate, [ONE, crowd]),
        (PgQueuer, batches),
        (PgQueuerLimited, batches),
    ]
    lacking = {
        package
        for contender, _ in contenders
        if (package := getattr(contender, "package", "")) and not find_spec(package)
    }
    for package in sorted(lacking):
        report.absent(f"{package} isn't installed: run `make install`")
    return [pair for pair in contenders if getattr(pair[0], "package", "") not in lacking]


def slice_of_postgres(server: Server, setting: Setting, report: Report) -> None:
    """Measure ours and the bare loop, for compare.py."""
    [(chunks, done)] = setting.sizes
    url, samples = server.create_database("slice"), Samples()
    modes = [(setting.crowd, 1), ONE]
    with Clients(setting.crowd, setting.warm_up) as clients:
        contests = [
            Contest(contender, url, chunks, done, modes, clients, setting)
            for contender in (Ours, Bare)
        ]
        compare(contests, setting, samples)
    for mode in modes:
        ratios = samples.ratios((Ours, chunks, mode), (Bare, chunks, mode))
        report.compare(f"PostgreSQL, {clients_of(mode)}: ours / bare loop", ratios, better="more")


def slice_of_sqlite(folder: Path, setting: Setting, report: Report) -> None:
    """Measure ours and a lean loop that changes of our tables don't affect, for compare.py."""
    [(chunks, done)] = setting.sizes
    samples = Samples()
    with Clients(1, setting.warm_up) as clients:
        contests = [
            Contest(contender, folder / f"{name}.db", chunks, done, [ONE], clients, setting)
            for name, contender in (("ours", LiteOurs), ("lean", LiteLean))
        ]
        compare(contests, setting, samples)
    ratios = samples.ratios((LiteOurs, chunks, ONE), (LiteLean, chunks, ONE))
    report.compare(f"SQLite, {clients_of(ONE)}: ours / lean loop", ratios, better="more")


def clients_of(mode: Mode) -> str:
    clients, k = mode
    return f"{clients} client{'s' * (clients > 1)}, k={k}"


def postgres(server: Server, setting: Setting, report: Report) -> None:
    urls = {chunks: server.create_database(f"bench_{chunks}") for chunks, _ in setting.sizes}
    samples, contenders = Samples(), rivals_on_postgres(setting, report)
    with Clients(setting.crowd, setting.warm_up) as clients:
        contests = [
            Contest(contender, urls[chunks], chunks, done, modes, clients, setting)
            for contender, modes in contenders
            for chunks, done in setting.sizes
            if chunks == setting.batches_on or not issubclass(contender, PgQueuer)
        ]
        compare(contests, setting, samples)
    for chunks, done in setting.sizes:
        title = f"PostgreSQL, {amount(chunks)} chunks, {done / chunks:.0%} done"
        show(title, contenders, chunks, samples, setting, report)

    present = {contender for contender, _ in contenders}
    small, large = setting.sizes[0][0], setting.sizes[-1][0]
    crowd = (setting.crowd, 1)
    for chunks, _ in setting.sizes:
        for other, least, aim in (
            (Bare, 0.25, "0.4"),
            (BareTake, 0.25, "0.4"),
            (Procrastinate, 1.3, "2"),
        ):
            if other in present:
                ratios = samples.ratios((Ours, chunks, crowd), (other, chunks, crowd))
                what = f"{clients_of(crowd)}, {amount(chunks)}: ours / {other.title}"
                report.require(what, ratios, least=least, aim=aim)
    # Like for like: our claim always checks the job's dial; pgqueuer's counterpart is a limit.
    chunks, most = setting.batches_on, (setting.crowd, setting.batches[-1])
    if PgQueuer in present:
        ratios = samples.ratios((Ours, chunks, most), (PgQueuerLimited, chunks, most))
        what = f"{clients_of(most)}, {amount(chunks)}: ours / pgqueuer's batches, with a limit"
        report.require(what, ratios, least=1)
        ratios = samples.ratios((Ours, chunks, most), (PgQueuer, chunks, most))
        report.say(f"For the record: ours / pgqueuer's batches without any limit: {spread(ratios)}")
    for mode in (crowd, ONE):
        ratios = samples.ratios((Ours, large, mode), (Ours, small, mode))
        what = f"flat, {clients_of(mode)}: {amount(large)} / {amount(small)}"
        report.require(what, ratios, least=0.8)


def sqlite(folder: Path, setting: Setting, report: Report) -> None:
    samples, crowd = Samples(), min(4, setting.crowd)
    modes = [ONE, (crowd, 1), (1, setting.batches[-1])]
    contenders: Contenders = [(LiteOurs, modes), (LiteBare, modes)]
    with Clients(crowd, setting.warm_up) as clients:
        contests = [
            Contest(
                contender, folder / f"{name}_{chunks}.db", chunks, done, modes, clients, setting
            )
            for chunks, done in setting.sizes
            for name, (contender, modes) in zip(("ours", "bare"), contenders, strict=True)
        ]
        compare(contests, setting, samples)
    for chunks, done in setting.sizes:
        title = f"SQLite (WAL, synchronous=FULL), {amount(chunks)} chunks, {done / chunks:.0%} done"
        show(title, contenders, chunks, samples, setting, report)
    for chunks, _ in setting.sizes:
        ratios = samples.ratios((LiteOurs, chunks, ONE), (LiteBare, chunks, ONE))
        report.require(f"SQLite, k=1, {amount(chunks)}: ours / bare loop", ratios, least=0.5)
    small, large = setting.sizes[0][0], setting.sizes[-1][0]
    ratios = samples.ratios((LiteOurs, large, ONE), (LiteOurs, small, ONE))
    report.require(f"SQLite flat, k=1: {amount(large)} / {amount(small)}", ratios, least=0.8)


class Contest:
    """One contender on tables of one size, loaded again when too few chunks are left."""

    def __init__(
        self,
        contender: Any,
        where: Any,
        chunks: int,
        done: int,
        modes: Sequence[Mode],
        clients: Clients,
        setting: Setting,
    ) -> None:
        self.contender, self.where, self.chunks = contender, where, chunks
        # A small table is empty before batches with the limit can be counted.
        self.modes = [
            mode
            for mode in modes
            if chunks >= setting.batches_on or mode[1] == 1 or contender is Ours
        ]
        self._done, self._clients, self._warm_up = done, clients, setting.warm_up
        self._name = f"{contender.__name__}, {amount(chunks)} chunks"
        self._fastest: dict[Mode, float] = {}
        self._loaded = False

    def load(self) -> None:
        self.check()
        progress(f"loading {amount(self.chunks)} chunks for {self.contender.title}")
        self.contender.load(self.where, self.chunks, self._done)
        self._clients.open(self._name, self.contender, self.where)
        self._loaded = True

    def check(self) -> None:
        """Fail if one of our chunks was lost, or finished twice."""
        if self._loaded and hasattr(self.contender, "check"):
            self.contender.check(self.where, self.chunks)

    def rate(self, mode: Mode, seconds: float) -> float:
        """Return the chunks per second of one slice."""
        clients, k = mode
        if k > 1:
            seconds /= 2  # batches soon use up the remaining chunks
        need = (
            1.5 * (seconds + self._warm_up) * self._fastest.get(mode, 100_000 if k > 1 else 5_000)
        )
        left = self.contender.left(self.where)
        if left < need and left < 0.9 * (self.chunks - self._done):
            self.load()
        rate = self._clients.rate(self._name, k, clients, seconds)
        self._fastest[mode] = max(rate, self._fastest.get(mode, 0.0))
        return rate


def compare(contests: list[Contest], setting: Setting, samples: Samples) -> None:
    """Run slices of all contenders in turn; every other round in the opposite order."""
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
    for contest in contests:
        contest.check()
    progress("")


def show(
    title: str,
    contenders: Contenders,
    chunks: int,
    samples: Samples,
    setting: Setting,
    report: Report,
) -> None:
    modes = list(dict.fromkeys(mode for _, modes in contenders for mode in modes))
    columns = [clients_of(mode) for mode in modes]
    rows = []
    for contender, _ in contenders:
        measured = [samples.get((contender, chunks, mode)) for mode in modes]
        if any(measured):
            rows.append([contender.title, *map(spread, measured)])
    report.table(
        f"{title}: chunks per second, median (least–most) of {setting.rounds} rounds", columns, rows
    )


def poll_postgres(url: str, setting: Setting, report: Report) -> None:
    """Compare an idle worker's claim with `select 1`: a job without chunks, and a drained one."""
    chunks = setting.sizes[0][0]
    Ours.load(url, chunks, chunks * 4 // 5)
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
        polls, asks = alternate(poller(store, jobid), ask, setting.polls)
        report.require(
            f"empty poll / select 1, a job that {what} "
            f"({statistics.median(polls):.0f} / {statistics.median(asks):.0f} µs)",
            [statistics.median(polls[i::5]) / statistics.median(asks[i::5]) for i in range(5)],
            most=2,
        )
    store.close()


def poll_sqlite(path: Path, setting: Setting, report: Report) -> None:
    """For the record: without a server, a `select 1` costs next to nothing."""
    LiteOurs.load(path, 1000, 999)
    store = open_store(f"sqlite:///{path}")
    plain = store.db.connect()
    ask = lambda: plain.execute("select 1").fetchall()  # noqa: E731
    polls, asks = alternate(poller(store, "bench"), ask, setting.polls)
    report.say(
        "",
        f"SQLite: an empty poll takes {statistics.median(polls):.0f} µs, "
        f"a `select 1` {statistics.median(asks):.1f} µs (for the record, not required)",
    )
    store.close()


def poller(store: Store, jobid: str) -> Callable[[], object]:
    owner = new_owner()

    def poll() -> None:
        assert not store.claim(jobid, owner=owner)

    return poll


def alternate(
    one: Callable[[], object], other: Callable[[], object], times: int
) -> tuple[list[float], list[float]]:
    """Return the microseconds of each call of two functions that alternate."""
    spent: tuple[list[float], list[float]] = ([], [])
    for _ in range(times):
        for work, record in zip((one, other), spent, strict=True):
            start = time.perf_counter()
            work()
            record.append((time.perf_counter() - start) * 1e6)
    return spent


if __name__ == "__main__":
    sys.exit(concluded(main))
