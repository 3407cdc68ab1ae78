"""Spark jobs killed at each point of publishing, with readers in a loop: old or new, never mixed.

By default 4 runs are killed at each point, with `soak` 20, as forks that share one Java, which
outlives them (see spark_crash_worker.py). Of runs whose own Java dies too, two are killed by
default, and with `soak` 20 at each point, which takes an hour. A worker that is stopped past its
lease has a Java of its own, which stops with it.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from opendataflow_dagster.errors import Refused
from opendataflow_dagster.storage.chunks import read, read_chunk
from opendataflow_dagster.storage.folder import NOTE, chunk_path
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.registry import add_dataset
from tests.e2e.test_worker_crashes import wait_until
from tests.support.spark_crash_worker import ROWS, Zygote, real
from tests.support.store_fixtures import (
    check,
    close,
    everything,
    expire,
    put,
    register,
    sql,
    status,
)

often = pytest.mark.parametrize("times", [4, pytest.param(20, marks=pytest.mark.soak)])

DATAIDS = ("1", "2", "3")

HIDDEN = ("before write", "during write", "after write", "after verify", "before show")
"""The points where a killed run has changed nothing that a reader sees."""

SHOWN = ("during show", "before READY", "after READY")
BATCHED = ("batch's write", "between staging", "between shows")


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("zygote")) as made:
        yield made


@pytest.fixture(scope="module")
def copies(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The input of all tests: three chunks written by Spark, each with two files."""
    folder = tmp_path_factory.mktemp("input")
    url = f"sqlite:///{folder}/tables.db"
    store = open_store(url)
    store.init()
    for datasetid in ("numbers", "copies"):
        add_dataset(store, datasetid, hostname=str(folder / datasetid))
    register(store, "copy", ["numbers"], ["copies"])
    for dataid in DATAIDS:
        zygote.numbers(chunk_path(str(folder / "numbers"), dataid), ROWS + 100)
        put(store, "numbers", dataid)
    assert zygote.run(url=url, jobid="copy", version=100, all_chunks=True) == 0
    close(store)
    return folder / "copies"


class Site:
    """A store and a folder in which `job` produces chunks whose rows identify their version."""

    def __init__(self, zygote: Zygote, url: str, copies: Path, folder: Path) -> None:
        self.zygote, self.url, self.folder = zygote, url, folder
        self.store = open_store(url)
        self.store.init()
        add_dataset(self.store, "numbers", hostname=str(copies))
        add_dataset(self.store, "out", hostname=str(folder))
        register(self.store, "job", ["numbers"], ["out"])
        for dataid in DATAIDS:
            put(self.store, "numbers", dataid)
        assert zygote.run(**self.work(0), all_chunks=True) == 0, zygote.log.read_text()

    def work(self, version: int, point: str = "", batch: int = 1) -> dict[str, Any]:
        """Return the command for a run that produces a version, and dies at a point."""
        slow = 2 if point in ("during write", "batch's write") else 0
        longest = 0.05 if slow else 0.3 * batch**0.5
        return {
            "url": self.url,
            "jobid": "job",
            "version": version,
            "point": point,
            "slow": slow,
            "batch": batch,
            "delay": random.uniform(0, longest),
        }

    def again(self, *dataids: str) -> None:
        """Resubmit chunks, even if their last run was lost."""
        expire(self.store)
        self.store.recover()
        for dataid in dataids:
            sql(
                self.store,
                "update datastatus set status = 'RESUBMIT' where datasetid = 'out' "
                "and dataid = :d and status = 'READY'",
                d=dataid,
            )
        sql(self.store, "update claim set losses = 0")  # else nobody would try a tenth time

    def path(self, dataid: str) -> str:
        return chunk_path(str(self.folder), dataid)

    def visible(self) -> dict[str, int]:
        """Return dataid → the version that plain pyarrow reads."""
        return {each: one_version(chunk_alone(self.path(each))) for each in DATAIDS}

    def exact(self, versions: dict[str, int]) -> None:
        """Each chunk is complete and settled once, and nothing else exists."""
        assert self.visible() == versions
        assert sorted(os.listdir(self.folder)) == [f"dataid={each}" for each in DATAIDS]
        for each in DATAIDS:
            names = os.listdir(self.path(each))
            assert [name for name in names if not name.endswith(".parquet")] == [NOTE]
        facts = sql(
            self.store,
            "select dataid, rows from chunkfact where datasetid = 'out' order by generation",
        )
        assert dict(facts) == {each: ROWS + version for each, version in versions.items()}
        assert {status(self.store, "out", each, "job") for each in DATAIDS} == {"READY"}
        ends = Counter(
            sql(
                self.store,
                "select dataid, generation from dataevent where datasetid = "
                "'out' and status_after = 'READY'",
            )
        )
        assert set(ends.values()) == {1}
        assert sql(self.store, "select count(*) from claim where owner is not null") == [(0,)]
        check(self.store)


@pytest.fixture
def site(zygote: Zygote, sqlite_url: str, copies: Path, tmp_path: Path) -> Iterator[Site]:
    made = Site(zygote, sqlite_url, copies, tmp_path / "out")
    yield made
    close(made.store)


def chunk_alone(path: str) -> Any:
    import pyarrow.dataset

    return pyarrow.dataset.dataset(path).to_table()


def one_version(table: Any) -> int:
    """Return the version of a chunk's rows, which must be complete and of one version."""
    [version] = set(table["version"].to_pylist())
    assert sorted(table["n"].to_pylist()) == list(range(ROWS + version))
    return version


class Vanished(Exception):
    """A chunk was replaced while pyarrow listed it; pyarrow skips missing files."""


class Readers:
    """Threads that read all the while, as anybody may: what they see is whole and gets no older.

    A plain reader that comes between the two finds no file of what it has listed: it fails, or,
    since pyarrow looks at each name again and leaves out what is gone, finds nothing of the chunk.
    """

    def __init__(self, site: Site, times: int) -> None:
        self._site, self._times, self._over = site, times, threading.Event()
        self.reads: Counter[str] = Counter()
        self.troubles: list[BaseException] = []
        self._seen: dict[tuple[str, str], int] = {}

    def chunk(self) -> None:
        import pandas

        for each in DATAIDS:
            assert os.path.exists(os.path.join(self._site.path(each), NOTE))  # at any moment
            frame = pandas.read_parquet(self._site.path(each))
            if not len(frame.columns):
                raise Vanished
            self._saw("chunk", each, frame)

    def root(self) -> None:
        import pyarrow.dataset

        data = pyarrow.dataset.dataset(str(self._site.folder), partitioning="hive")
        frame = data.to_table().to_pandas()
        there = set(map(str, frame["dataid"].unique()))
        for each in there:
            self._saw("root", each, frame[frame["dataid"] == int(each)])
        if there != set(DATAIDS):
            raise Vanished

    def tables(self) -> None:
        for each in DATAIDS:
            try:
                frame, found = read_chunk(
                    self._site.store,
                    "out",
                    each,
                    lambda found: read(found, found.target("parquet")),
                    format="parquet",
                )
            except Refused:  # it isn't READY
                self.reads["refused"] += 1
                continue
            assert len(frame) == found.fact["rows"]
            self._saw("tables", each, frame)

    def _saw(self, how: str, dataid: str, frame: Any) -> None:
        [version] = frame["version"].unique()
        assert sorted(frame["n"]) == list(range(ROWS + version)), (how, dataid, version)
        assert version >= self._seen.get((how, dataid), 0), (how, dataid, version, self._seen)
        self._seen[how, dataid] = version
        self.reads[how] += 1

    def _loop(self, how: str) -> None:
        while not self._over.is_set():
            try:
                getattr(self, how)()
            except (FileNotFoundError, Vanished):
                self.reads[f"{how} again"] += 1
            except BaseException as error:
                self.troubles.append(error)
                break
            time.sleep(0.03)
        self._site.store.db.drop()

    @contextmanager
    def reading(self) -> Iterator[None]:
        threads = [
            threading.Thread(target=self._loop, args=[how]) for how in ("chunk", "root", "tables")
        ]
        for each in threads:
            each.start()
        try:
            yield
        finally:
            self._over.set()
            for each in threads:
                each.join()
        for trouble in self.troubles:
            raise trouble
        self.tables()  # meanwhile it may never have been READY when it was asked
        assert self.reads["tables"] > 0, self.reads
        asked = self.reads + Counter(tables=self.reads["refused"])
        assert min(asked[how] for how in ("chunk", "root", "tables")) >= self._times, self.reads
        missed = self.reads["chunk again"] + self.reads["root again"]
        assert missed < max(10, self._times), self.reads  # once for a replacement, at most


@often
@pytest.mark.parametrize("point", [*HIDDEN, *SHOWN, "any"])
def test_a_run_killed_repeatedly_at_a_point_leaves_old_or_new(
    site: Site, point: str, times: int
) -> None:
    now = 0
    with Readers(site, times).reading():
        for version in range(1, times + 1):
            site.again("1")
            code = site.zygote.run(**site.work(version, point))
            assert code == -signal.SIGKILL or (point == "any" and code == 0)
            seen = site.visible()
            if point == "any":
                assert seen["1"] in (now, version)
                now = seen["1"]
            elif point in SHOWN:
                now = version
            assert seen == {"1": now, "2": 0, "3": 0}
        site.zygote.quiet()
        site.again("1")
        assert site.zygote.run(**site.work(times + 1)) == 0, site.zygote.log.read_text()
    site.exact({"1": times + 1, "2": 0, "3": 0})


@often
@pytest.mark.parametrize("point", [*BATCHED, "any"])
def test_a_batch_killed_repeatedly_at_a_point_leaves_old_or_new(
    site: Site, point: str, times: int
) -> None:
    now = site.visible()
    with Readers(site, times).reading():
        for version in range(1, times + 1):
            site.again(*DATAIDS)
            code = site.zygote.run(**site.work(version, point, len(DATAIDS)))
            assert code == -signal.SIGKILL or (point == "any" and code == 0)
            was, now = now, site.visible()
            new = [each for each in DATAIDS if now[each] == version]
            assert {now[each] for each in new} <= {version}
            assert {each: was[each] for each in DATAIDS if each not in new}.items() <= now.items()
            if point != "any":
                assert len(new) == (2 if point == "between shows" else 0)
        site.zygote.quiet()
        site.again(*DATAIDS)
        work = site.work(times + 1, batch=len(DATAIDS))
        assert site.zygote.run(**work) == 0, site.zygote.log.read_text()
    site.exact(dict.fromkeys(DATAIDS, times + 1))


def killed_with_its_java(site: Site, version: int, point: str, log: Path, group: bool) -> None:
    """Kill a run that has a Java of its own: with it, or so that it has to notice by itself."""
    child = real({**site.work(version, point), "group": group}, log)
    assert child.wait(60) == -signal.SIGKILL, log.read_text()
    wait_until(lambda: not is_alive(child.pid), 30)


def is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("point", "group"), [("during write", False), ("before READY", True)])
def test_a_driver_killed_with_its_java(site: Site, tmp_path: Path, point: str, group: bool) -> None:
    with Readers(site, 1).reading():
        site.again("1")
        killed_with_its_java(site, 1, point, tmp_path / "log", group)
        assert site.visible()["1"] == (1 if point in SHOWN else 0)
        site.again("1")
        assert site.zygote.run(**site.work(2)) == 0
    site.exact({"1": 2, "2": 0, "3": 0})


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("group", [True, False])
@pytest.mark.parametrize("point", [*HIDDEN, *SHOWN])
def test_a_driver_killed_20_times_with_its_java(
    site: Site, tmp_path: Path, point: str, group: bool
) -> None:
    now = 0
    with Readers(site, 20).reading():
        for version in range(1, 20 + 1):
            site.again("1")
            killed_with_its_java(site, version, point, tmp_path / "log", group)
            now = version if point in SHOWN else now
            assert site.visible() == {"1": now, "2": 0, "3": 0}
        site.again("1")
        assert site.zygote.run(**site.work(20 + 1)) == 0
    site.exact({"1": 20 + 1, "2": 0, "3": 0})


def test_a_worker_stopped_while_writing_changes_nothing_when_it_wakes(
    site: Site, tmp_path: Path
) -> None:
    """The worker and its Java stop together, as on a suspended machine."""
    site.again("1")
    log = tmp_path / "log"
    child = real({**site.work(1, "during write"), "stop": True, "group": True}, log)
    try:
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
        before, there = overtaken(site)
        os.killpg(child.pid, signal.SIGCONT)
        assert child.wait(60) == 1, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    unchanged(site, before, there)


@pytest.mark.parametrize("point", ["before write", "after write", "after verify"])
def test_a_worker_stopped_at_a_point_changes_nothing_when_it_wakes(site: Site, point: str) -> None:
    site.again("1")
    pid = site.zygote.start(**site.work(1, point), stop=True)
    assert site.zygote.stopped(pid)
    before, there = overtaken(site)
    os.kill(pid, signal.SIGCONT)
    assert site.zygote.wait(pid) == 1
    unchanged(site, before, there)


def overtaken(site: Site) -> tuple[Any, Any]:
    """Let a worker's lease expire and another produce its chunk; return what exists then."""
    site.again("1")
    assert site.zygote.run(**site.work(2)) == 0
    return everything(site.store), listing(site.path("1"))


def unchanged(site: Site, before: Any, there: Any) -> None:
    assert everything(site.store) == before
    assert listing(site.path("1")) == there
    site.exact({"1": 2, "2": 0, "3": 0})


def listing(path: str) -> dict[str, tuple[int, int]]:
    return {each.name: (each.inode(), each.stat().st_mtime_ns) for each in os.scandir(path)}
