"""Kills of each process of Dagster, and outages of the tables, in the middle of 50 chunks."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import dagster as dg
import psutil
import pytest

from opendataflow_dagster.dagster.drift import drift
from opendataflow_dagster.dagster.grid import VERSION_TAG, Mirror
from opendataflow_dagster.dagster.reconcile import reconcile
from opendataflow_dagster.dagster.sensors import settle
from opendataflow_dagster.dagster.translator import DataflowTranslator
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.claims import begin_work
from opendataflow_dagster.store.store import Store
from tests.support.dagster_servers import Dagster
from tests.support.graphql_client import wait_for
from tests.support.postgres import Server
from tests.support.store_fixtures import close, expire, policy, put, register, sql, status, take

LEASE = 3
RECONCILE, CATCH_UP = "opendataflow_reconcile", "opendataflow_catch_up"
AGREES = "The grid agrees with the tables."
UNFINISHED = ("NOT_STARTED", "QUEUED", "STARTING", "STARTED", "CANCELING")
NAMES = DataflowTranslator()


class Kill(NamedTuple):
    """When a kill began, and when the killed processes were dead."""

    began: float
    done: float


class World:
    """The tables, a Dagster that runs their job `slow`, and the file that records its work."""

    def __init__(self, store: Store, dagster: Dagster, folder: Path, server: Server | None) -> None:
        self.store, self.dagster, self.folder, self.server = store, dagster, folder, server
        self.client = dagster.client

    def arrive(self, prefix: str, count: int = 50) -> list[str]:
        """Add claimable chunks, and wait until Dagster knows them."""
        keys = [f"{prefix}{number:02}" for number in range(count)]
        for each in keys:
            put(self.store, "slowin", each)
        wait_for(
            lambda: set(keys) - set(self.client.partitions("slowout")),
            lambda left: not left,
            60,
            "the partition keys are there",
        )
        return keys

    def in_the_middle(self, prefix: str, count: int = 50) -> tuple[list[str], str]:
        """Start a run of 50 chunks that has produced some, with the catch-up sensor on."""
        keys = self.arrive(prefix, count)
        run = self.client.launch(["slowout"], keys[0], through=keys[-1])
        wait_for(lambda: len(self.made(prefix)) >= count // 10, bool, 60, "the run is at work")
        self.client.start_sensor(CATCH_UP)
        wait_for(lambda: len(self.made(prefix)) >= count // 3, bool, 60, "it is in the middle")
        assert len(self.made(prefix)) < count * 0.8
        return keys, run

    def made(self, prefix: str) -> list[str]:
        """Return the dataid of each production, in order."""
        path = self.folder / "made"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split()[0] for line in lines if line.startswith(prefix)]

    def kill(self, *which: str) -> Kill:
        """Kill servers, or runs."""
        began = time.time()
        self.dagster.kill(*which)
        return Kill(began, time.time())

    def events(self, dataid: str) -> list[tuple[str | None, int | None, float]]:
        """Return status, generation and time of each change of a chunk's output."""
        at = "(julianday(at) - 2440587.5) * 86400.0"
        if self.store.db.dialect == "postgres":
            at = "extract(epoch from at)"
        found = sql(
            self.store,
            f"select status_after, generation, {at} from dataevent where datasetid = 'slowout' "
            "and dataid = :d and locktype = 'OUT' order by seq",
            d=dataid,
        )
        return [(word, generation, float(when)) for word, generation, when in found]

    def left(self, keys: Sequence[str]) -> dict[str, str | None]:
        """Return the chunks, of those given, that aren't READY."""
        found = dict(
            sql(self.store, "select dataid, status from datastatus where datasetid = 'slowout'")
        )
        return {each: found.get(each) for each in keys if found.get(each) != "READY"}

    def ends_well(self, keys: Sequence[str], kill: Kill | None = None) -> None:
        """Every chunk became READY once, nothing waited for long, and the grid agrees."""
        wait_for(lambda: self.left(keys), lambda left: not left, 90, "all chunks are READY")
        wait_for(lambda: self.client.runs(*UNFINISHED), lambda runs: not runs, 60, "runs end")
        made = Counter(self.made(""))
        for each in keys:
            events = self.events(each)
            words = [word for word, _, _ in events]
            held = [] if kill is None else in_hand(events, kill)
            assert (words.count("READY"), words[-1]) == (1, "READY"), (each, words)
            assert words.count("RUNNING") <= 1 + len(held), (each, words)
            assert made[each] <= 1 + len(held), (each, made[each])
            for settled in held:
                self.was_in_time(each, settled, kill)
        self.agrees()

    def was_in_time(self, dataid: str, settled: float, kill: Kill | None) -> None:
        """Unfinished claims were settled by the end of the first tick after their leases ended."""
        assert kill is not None
        over = kill.done + LEASE
        ends = [
            tick["endTimestamp"]
            for tick in self.client.ticks(RECONCILE, 500)
            if tick["timestamp"] >= over and tick["status"] == "SKIPPED"
        ]
        assert settled <= max(over, min(ends)) + 0.1, (dataid, settled, kill, sorted(ends))

    def ticks_since(self, sensor: str, since: float) -> list[dict[str, Any]]:
        """Return the ticks of a sensor that began after a given time and have ended, in order."""
        ticks = reversed(self.client.ticks(sensor, 100))
        return [
            each for each in ticks if each["timestamp"] >= since and each["status"] != "STARTED"
        ]

    def tick_since(self, sensor: str, since: float) -> dict[str, Any]:
        """The first of them."""
        return wait_for(lambda: self.ticks_since(sensor, since), bool, 60, f"{sensor} ticks")[0]

    def agrees(self) -> None:
        """The grid agrees with the tables, and a further tick writes nothing."""
        wait_for(
            lambda: self.client.next_tick(RECONCILE)["skipReason"], AGREES.__eq__, 60, "it agrees"
        )
        assert drift(self.store, Mirror(self.dagster.instance)) == []
        assert self.client.next_tick(RECONCILE)["skipReason"] == AGREES


def in_hand(events: Sequence[tuple[str | None, int | None, float]], kill: Kill) -> list[float]:
    """Return when the claims held at a kill were settled."""
    return [
        after[2]
        for before, after in pairwise(events)
        if before[0] == "RUNNING" and before[2] <= kill.done and after[2] >= kill.began
    ]


@pytest.fixture(scope="module", params=[pytest.param("sqlite", marks=pytest.mark.soak), "postgres"])
def storage(request: pytest.FixtureRequest) -> str:
    """As everywhere, except that the slow case on SQLite is a soak test."""
    return request.param


@pytest.fixture(scope="module")
def world(
    start_dagster: Callable[..., Dagster], storage: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """The tables are where Dagster's storage is: in SQLite files, or on PostgreSQL.

    There they have a server of their own, which can go away.
    """
    folder = tmp_path_factory.mktemp("slow")
    with ExitStack() as stack:
        server = stack.enter_context(Server()) if storage == "postgres" else None
        url = server.create_database("tables") if server else f"sqlite:///{folder}/tables.db"
        store = open_store(url)
        store.init()
        stack.callback(close, store)
        register(store, "slow", ["slowin"], ["slowout"])
        # The sensor's runs and a person's take turns, else one refuses what the other has in hand.
        policy(store, "slow", lease_seconds=LEASE, concurrency=1, max_attempts=50)
        dagster = start_dagster(
            Path(__file__).parents[1] / "support" / "code_locations" / "slow.py",
            name="slow",
            env={"DATAFLOW_URL": url, "SLOW_FOLDER": str(folder)},
            forking=False,  # what is killed here is as it is for users
        )
        yield World(store, dagster, folder, server)


@pytest.fixture(autouse=True)
def quiet(request: pytest.FixtureRequest) -> Iterator[None]:
    """The catch-up sensor is off again after each test."""
    yield
    if "world" in request.fixturenames:
        world: World = request.getfixturevalue("world")
        world.client.stop_sensor(CATCH_UP)


def only_on(storage: str, wanted: str, why: str) -> None:
    if storage != wanted:
        pytest.skip(why)


def test_after_a_kill_of_the_run_worker_all_chunks_are_ready(world: World, storage: str) -> None:
    keys, run = world.in_the_middle("a")
    kill = world.kill("run_workers")
    assert world.client.finished(run) == "FAILURE"
    world.ends_well(keys, kill)


def test_after_a_kill_of_the_run_worker_its_live_step_finishes(world: World, storage: str) -> None:
    only_on(storage, "sqlite", "the same on every storage")
    keys, run = world.in_the_middle("b")
    workers = world.dagster.run_workers()
    parents = {worker.ppid() for worker in workers}
    killed = [worker for worker in workers if worker.pid in parents]
    orphans = [worker for worker in workers if worker not in killed]
    assert killed
    assert orphans
    for worker in killed:
        worker.kill()
    assert world.client.finished(run) == "FAILURE"
    gone, _ = psutil.wait_procs(orphans, timeout=30)
    assert set(gone) == set(orphans)
    wait_for(lambda: world.left(keys), lambda left: not left, 90, "all chunks are READY")
    for each in keys:
        words = [word for word, _, _ in world.events(each)]
        assert (words.count("READY"), words[-1]) == (1, "READY"), (each, words)
        assert "HOLD" not in words
        assert words.count("RUNNING") <= 3
    world.ends_well([])


def test_after_a_kill_of_the_daemon_all_chunks_are_ready(world: World, storage: str) -> None:
    only_on(storage, "sqlite", "the daemon is killed with everything")
    keys, run = world.in_the_middle("c")
    kill = world.kill("daemon")
    time.sleep(1)
    world.dagster.start("daemon")
    assert world.client.finished(run) == "SUCCESS"
    world.ends_well(keys, kill)


def test_after_a_kill_of_the_code_server_all_chunks_are_ready(world: World, storage: str) -> None:
    only_on(storage, "sqlite", "the code server is killed with everything")
    keys, run = world.in_the_middle("d")
    kill = world.kill("code_server")
    world.dagster.start("code_server")
    assert world.client.finished(run) == "SUCCESS"
    world.ends_well(keys, kill)


def test_after_a_kill_of_everything_all_chunks_are_ready(world: World) -> None:
    keys, run = world.in_the_middle("e")
    kill = world.kill("everything")
    assert world.dagster.processes() == []
    world.dagster.start()
    world.ends_well(keys, kill)
    assert world.client.run_status(run) == "FAILURE"
    assert any("OpenDataFlow ended this run" in line for line in world.client.messages(run))


def test_a_stopped_worker_that_wakes_late_changes_nothing(world: World, storage: str) -> None:
    only_on(storage, "postgres", "whoever is stopped while he writes to SQLite stops all others")
    keys, run = world.in_the_middle("g", 20)
    zombies, began = world.dagster.run_workers(), time.time()
    for zombie in zombies:
        zombie.suspend()
    kill = Kill(began, time.time())
    try:
        assert world.client.finished(run) == "FAILURE"
        wait_for(lambda: world.left(keys), lambda left: not left, 60, "others make all of it")
        before = {each: world.events(each) for each in keys}
    finally:
        for zombie in zombies:
            zombie.resume()
    gone, _ = psutil.wait_procs(zombies, timeout=30)
    assert set(gone) == set(zombies)
    assert {each: world.events(each) for each in keys} == before
    world.ends_well(keys, kill)
    assert world.client.run_status(run) == "FAILURE"
    told = world.client.messages(run)
    assert any("OpenDataFlow ended this run" in line for line in told)
    assert any("Dagster ended run" in line or "claimed by" in line for line in told), told


def test_kills_of_the_code_server_while_a_tick_writes(world: World, storage: str) -> None:
    only_on(storage, "sqlite", "on PostgreSQL a tick is over too soon")
    dagster = world.dagster
    chance, mirror = random.Random(5), Mirror(dagster.instance)
    every = [NAMES.partition_key(f"h{number}") for number in range(2000)]
    cut_short = 0

    def shown() -> int:
        return len(mirror.shown(dg.AssetKey("slowin"), every))

    def keys() -> int:
        return len(mirror.existing("dataflow/slowin", every))

    policy(world.store, "slow", paused_until="2099-01-01 00:00:00")
    for first in range(0, 2000, 400):
        sql(
            world.store,
            "with recursive n(i) as (select :first union all select i + 1 from n where i < :last) "
            "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
            "select 'slowin', 'loader', 'h' || i, 'OUT', 'READY' from n",
            first=first,
            last=first + 399,
        )
        # The keys come first: from then on the tick has the rest to write.
        wait_for(keys, (first + 400).__le__, 60, "a tick writes", 0.002)
        time.sleep(chance.uniform(0, 0.02))
        dagster.kill("code_server")
        cut_short += shown() < first + 400
        dagster.start("code_server")
    assert cut_short
    wait_for(shown, (2000).__eq__, 60, "all are shown")
    world.agrees()
    policy(world.store, "slow", paused_until=None)


# The last: after an outage, a tick lets workers renew their leases for a minute before it recovers.
def test_the_tables_are_away_for_longer_than_a_lease(world: World, storage: str) -> None:
    only_on(storage, "postgres", "a file isn't away")
    assert world.server is not None
    client = world.client
    keys, run = world.in_the_middle("f")
    world.server.stop("immediate")
    began = time.monotonic()
    vars(world.store).pop("person").close()
    world.store.close()
    try:
        away = time.time()
        for sensor in (RECONCILE, CATCH_UP):
            tick = world.tick_since(sensor, away)
            assert tick["status"] == "SKIPPED", tick
            assert tick["skipReason"].startswith("The tables of OpenDataFlow can't be read: ")
            assert "\n" not in tick["skipReason"]
        client.reload_location()
        assert client.location_problem() is None
        assert client.page("/assets/slowout") == 200
        assert "slowout" in client.assets()
        assert client.grid("slowout").green
        time.sleep(max(0.0, 20 - (time.monotonic() - began)))
        assert {tick["status"] for tick in world.ticks_since(RECONCILE, away)} == {"SKIPPED"}
        assert client.run_status(run) == "STARTED"
    finally:
        world.server.start()

    assert client.finished(run) == "SUCCESS"
    world.ends_well(keys)
    assert client.runs("FAILURE", tags={"dagster/asset_partition_range_start": keys[0]}) == []
    for each in keys:
        assert [word for word, _, _ in world.events(each)] == ["RUNNING", "READY"]
    assert sorted(world.made("f")) == keys


def test_two_dagsters_on_the_same_tables(store: Store, tmp_path: Path) -> None:
    @dg.job
    def anything() -> None:
        """A job whose runs alone matter."""

    register(store, "slow", ["slowin"], ["slowout"])
    for number in range(8):
        put(store, "slowin", str(number))
    with ExitStack() as stack:
        both = [
            stack.enter_context(dg.DagsterInstance.local_temp(str(tmp_path / name)))
            for name in ("one", "two")
            if not (tmp_path / name).mkdir()
        ]
        cursors: list[str | None] = [None, None]

        def tick() -> list[Any]:
            settled = []
            for at, instance in enumerate(both):
                settled += settle(store, instance)
                cursors[at] = reconcile(store, Mirror(instance), NAMES, cursors[at]).cursor
            return settled

        def agree() -> None:
            for at, instance in enumerate(both):
                assert drift(store, Mirror(instance)) == []
                again = reconcile(store, Mirror(instance), NAMES, cursors[at])
                assert (again.writes, again.more) == (0, False)
            key, partitions = dg.AssetKey("slowout"), NAMES.partitions_def("slowin")
            one, two = (Mirror(instance).grid(key, partitions) for instance in both)
            assert one == two

        runs, claims = [], []
        for at, instance in enumerate(both):
            run = instance.create_run_for_job(anything, status=dg.DagsterRunStatus.STARTED)
            owner = f"w{at} of run {run.run_id}"
            begin_work(store, owner, run.run_id, "slow", 60)
            claims.append(take(store, "slow", owner, k=3, runid=run.run_id))
            runs.append(run)
        before = sql(store, "select * from claim order by dataid")
        assert tick() == []
        assert sql(store, "select * from claim order by dataid") == before
        agree()

        done = claims[0][0]
        store.finish(done)
        both[0].report_runless_asset_event(  # the run logs it, chunk by chunk
            dg.AssetMaterialization(
                "slowout", partition="0", tags={VERSION_TAG: str(done.generation)}
            )
        )
        store.fail(claims[1][0], "it is bad")
        assert tick() == []
        agree()

        both[0].report_run_failed(runs[0])
        assert sorted(each.dataid for each in tick()) == ["1", "2"]
        assert [status(store, "slowout", each, "slow") for each in "45"] == ["RUNNING"] * 2
        tick()
        agree()

        expire(store)
        begin_work(store, f"w1 of run {runs[1].run_id}", runs[1].run_id, "slow", 0)
        # Whoever comes first recovers the claims; the run is ended by the Dagster that knows it.
        assert sorted(each.dataid for each in tick()) == ["4", "5"]
        found = both[1].get_run_by_id(runs[1].run_id)
        assert found is not None
        assert found.status == dg.DagsterRunStatus.FAILURE
        tick()
        agree()
