"""Many processes at once: nothing is claimed twice, nothing is missed, nobody sees a deadlock."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.store import Store
from tests.support import stress_worker
from tests.support.pooler import Pooler, needs_pgbouncer
from tests.support.store_fixtures import check, close, connect, policy, register, sql

ROOT = Path(__file__).parents[2]
INPUTS = [*(pytest.param(number, marks=pytest.mark.soak) for number in (1, 2)), 3]


class Crowd:
    """Processes of `stress_worker` around one database, and what they report afterwards."""

    def __init__(self, url: str, folder: Path, total: int, jobs: list[str], seconds: float) -> None:
        self.url, self.folder, self.total, self.jobs = url, folder, total, jobs
        self.seconds = seconds
        self.processes: list[subprocess.Popen[bytes]] = []
        (folder / "running").mkdir(parents=True)
        (folder / "data").mkdir()

    def add(self, role: str, number: int, url: str = "") -> None:
        for _ in range(number):
            name = f"{role}-{len(self.processes)}"
            numbers = map(str, (self.seconds, len(self.processes), self.total))
            line = [
                sys.executable,
                "-m",
                "tests.support.stress_worker",
                role,
                url or self.url,
                str(self.folder),
                name,
            ]
            line += [*numbers, *self.jobs]
            with (self.folder / f"{name}.err").open("wb") as err:
                self.processes.append(
                    subprocess.Popen(
                        line, cwd=ROOT, stderr=err, env={**os.environ, "PYTHONPATH": str(ROOT)}
                    )
                )

    def wait(self, done: str) -> float:
        """Wait until the query `done` returns true and nobody is working, or the time is over."""
        store = open_store(self.url)
        started = time.monotonic()
        hands = [each for each in self.processes if {"person", "rude", "forcer"} & {*each.args}]  # type: ignore[operator]
        while time.monotonic() - started < self.seconds:
            time.sleep(0.1)
            if any(each.poll() for each in self.processes):
                break  # one died: its diary tells why
            if any(each.poll() is None for each in hands):
                continue
            if sql(store, done)[0][0]:
                break
        spent = time.monotonic() - started
        (self.folder / "over").touch()
        for process in self.processes:
            process.wait(60)
        close(store)
        return spent


def fill(store: Store, total: int, *datasets: str) -> None:
    for datasetid in datasets:
        sql(
            store,
            "with recursive n(i) as (select 0 union all select i + 1 from n where i < :last) "
            "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
            "select :datasetid, 'hand', cast(i as varchar(9)), 'OUT', 'READY' from n",
            last=total - 1,
            datasetid=datasetid,
        )


def prepare(url: str, inputs: int, total: int) -> tuple[Store, list[str]]:
    """`join` reads `inputs` datasets that other jobs make at the same time, and writes two."""
    store = open_store(url)
    store.init()
    for number in range(inputs):
        register(store, f"make{number}", ["raw"], [f"in{number}1"])
    register(store, "join", [f"in{number}1" for number in range(inputs)], ["out1", "out2"])
    sql(store, "insert into dataset (datasetid) select distinct datasetid from job")
    fill(store, total, "raw")
    return store, ["join", *(f"make{number}" for number in range(inputs))]


DONE = "select count(*) = {wanted} from datastatus where locktype = 'OUT' and status = 'READY'"


def verdict(store: Store, gathered: Crowd, wanted: int) -> None:
    """Nobody had an error; each chunk was produced as often as requested."""
    told = stress_worker.read(gathered.folder)
    assert told.errors == []
    assert told.home == told.people == len(gathered.processes)
    assert told.doubles == []
    assert told.stale == 0
    assert told.torn == []
    asked = {(jobid, str(n)): 1 for jobid in gathered.jobs for n in range(gathered.total)}
    for chunk, times in (told.back + told.changed).items():
        asked[chunk] += times
    assert {chunk: n for chunk, n in told.made.items() if n != asked.pop(chunk, 0)} == {}
    assert asked == {}
    assert sql(store, DONE.format(wanted=wanted)) in ([(True,)], [(1,)])
    assert sql(store, "select count(*) from claim") == [(0,)]
    assert sql(store, "select count(*) from datastatus where locktype = 'IN'") == [(0,)]
    check(store)
    [(claims,)] = sql(
        store,
        "select count(distinct generation) from dataevent where status_after = 'RUNNING' "
        "and generation is not null and locktype = 'OUT'",
    )
    print(
        f"made {told.made.total()}, sent back {told.back.total()}, "
        f"{claims} claims, {told.raced} races"
    )


@pytest.mark.parametrize("inputs", INPUTS)
def test_16_processes_on_postgresql_claim_each_chunk_once(
    postgres_url: str, tmp_path: Path, inputs: int
) -> None:
    total = 1000
    store, jobs = prepare(postgres_url, inputs, total)
    gathered = Crowd(postgres_url, tmp_path / "crowd", total, jobs, 100)
    gathered.add("worker", 16)
    wanted = total * (1 + inputs + 2)
    print(f"{gathered.wait(DONE.format(wanted=wanted)):.1f} s")
    verdict(store, gathered, wanted)
    close(store)


@pytest.mark.parametrize("inputs", INPUTS)
def test_4_processes_on_sqlite_claim_each_chunk_once(
    sqlite_url: str, tmp_path: Path, inputs: int
) -> None:
    total = 500
    store, jobs = prepare(sqlite_url, inputs, total)
    gathered = Crowd(sqlite_url, tmp_path / "crowd", total, jobs, 100)
    gathered.add("worker", 4)
    wanted = total * (1 + inputs + 2)
    print(f"{gathered.wait(DONE.format(wanted=wanted)):.1f} s")
    verdict(store, gathered, wanted)
    close(store)


def test_rival_producers_share_the_chunks(postgres_url: str, tmp_path: Path) -> None:
    """Three jobs write one dataset; each chunk is produced by one of them."""
    total, jobs = 600, ["one", "two", "three"]
    store = open_store(postgres_url)
    store.init()
    for jobid in jobs:
        register(store, jobid, ["raw"], ["out"])
    fill(store, total, "raw")
    gathered = Crowd(postgres_url, tmp_path / "crowd", total, jobs, 60)
    gathered.add("worker", 8)
    gathered.wait(DONE.format(wanted=2 * total))
    told = stress_worker.read(gathered.folder)
    assert told.errors == []
    assert sorted(dataid for _, dataid in told.made.elements()) == sorted(map(str, range(total)))
    check(store)
    close(store)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_the_concurrency_dial_is_never_exceeded(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = request.getfixturevalue(f"{kind}_url")
    total = 150
    store, jobs = prepare(url, 1, total)
    policy(store, "make0", concurrency=2)
    gathered = Crowd(url, tmp_path / "crowd", total, jobs, 60)
    gathered.add("worker", 6)
    watcher, most = connect(store), 0
    while not sql(store, DONE.format(wanted=total * 4))[0][0] and all(
        each.poll() is None for each in gathered.processes
    ):
        [(now,)] = watcher.execute(
            "select count(*) from datastatus where jobid = 'make0' and locktype = 'OUT' "
            "and status = 'RUNNING'"
        ).fetchall()
        most = max(most, now)
    watcher.close()
    gathered.wait(DONE.format(wanted=total * 4))
    verdict(store, gathered, total * 4)
    assert most <= 2
    close(store)


def mixed(url: str, tmp_path: Path, total: int, seconds: float) -> None:
    store, jobs = prepare(url, 2, total)
    gathered = Crowd(url, tmp_path / "crowd", total, jobs, seconds)
    gathered.add("worker", 8)
    gathered.add("person", 2)
    if store.db.dialect == "postgres":
        gathered.add("java", 3)
    wanted = total * (1 + 2 + 2)
    gathered.wait(DONE.format(wanted=wanted))
    verdict(store, gathered, wanted)
    close(store)


def test_with_people_and_the_original_on_postgresql(postgres_url: str, tmp_path: Path) -> None:
    mixed(postgres_url, tmp_path, 400, 45)


def test_with_people_on_sqlite(sqlite_url: str, tmp_path: Path) -> None:
    mixed(sqlite_url, tmp_path, 200, 30)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_people_who_resubmit_running_chunks_see_no_deadlock(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Few chunks, wanted by everybody: if one has to give way, it is one of ours."""
    url = request.getfixturevalue(f"{kind}_url")
    total = 15
    store, jobs = prepare(url, 2, total)
    gathered = Crowd(url, tmp_path / "crowd", total, jobs, 45)
    gathered.add("worker", 4)
    gathered.add("rude", 1)
    gathered.wait(DONE.format(wanted=total * 5))
    told = stress_worker.read(gathered.folder)
    print(f"sent back {told.back.total()}, {told.stale} stale, {told.raced} races")
    assert told.errors == []
    assert told.home == told.people
    assert sql(store, DONE.format(wanted=total * 5)) in ([(True,)], [(1,)])
    check(store)
    close(store)


def readers(url: str, tmp_path: Path, seconds: float, pooled: str = "") -> None:
    """Chunks are resubmitted and forced while they are read: no torn read ends READY.

    `pooled` is the way of our programs, if it isn't a person's.
    """
    total = 25
    store, jobs = prepare(url, 2, total)
    for jobid in jobs:
        policy(store, jobid, max_losses=1_000_000)  # however often an input changes
    gathered = Crowd(url, tmp_path / "crowd", total, jobs, seconds)
    gathered.add("worker", 12, pooled)
    gathered.add("person", 2)
    gathered.add("forcer", 2, pooled)
    gathered.wait(DONE.format(wanted=total * 5))
    told = stress_worker.read(gathered.folder)
    print(f"sent back {told.back.total()}, forced {told.forced}, changed {told.changed.total()}")
    assert told.errors == []
    assert told.home == told.people == 16
    assert told.torn == told.doubles == []
    assert told.forced
    assert told.changed
    assert sql(store, DONE.format(wanted=total * 5)) in ([(True,)], [(1,)]), "somebody waits"
    assert sql(store, "select count(*) from claim") == [(0,)]
    check(store)
    close(store)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_no_torn_read_ends_ready(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    readers(request.getfixturevalue(f"{kind}_url"), tmp_path, 30)


@needs_pgbouncer
def test_no_torn_read_ends_ready_through_a_pooler(
    postgres_url: str, tmp_path: Path, pool: Callable[..., Pooler]
) -> None:
    readers(postgres_url, tmp_path, 30, pool(3).url(postgres_url))


@needs_pgbouncer
@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_torn_read_ends_ready_through_a_pooler_for_long(
    postgres_url: str, tmp_path: Path, pool: Callable[..., Pooler]
) -> None:
    readers(postgres_url, tmp_path, 360, pool(3).url(postgres_url))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_no_torn_read_ends_ready_for_long(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    readers(request.getfixturevalue(f"{kind}_url"), tmp_path, 360)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_with_people_and_the_original_for_long(postgres_url: str, tmp_path: Path) -> None:
    mixed(postgres_url, tmp_path, 2000, 600)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_16_processes_with_2000_chunks_each(postgres_url: str, tmp_path: Path) -> None:
    total = 32_000
    store, jobs = prepare(postgres_url, 3, total)
    gathered = Crowd(postgres_url, tmp_path / "crowd", total, jobs, 1500)
    gathered.add("worker", 16)
    gathered.wait(DONE.format(wanted=total * 6))
    verdict(store, gathered, total * 6)
    close(store)
