"""The migration example on a real standalone cluster whose parts are killed: exact rows."""

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from opendataflow_dagster.config.settings import load_settings
from opendataflow_dagster.spark.job import load_job
from opendataflow_dagster.spark.worker import run_spark_job
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.store import Store
from tests.e2e.test_examples import EXAMPLES
from tests.support.spark_cluster import Cluster
from tests.support.store_fixtures import check, close, expire, sql
from tests.support.work_host import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROWS, CHUNKS = 20_000, 20
RUN = ("odf", "run", "--spark", "migrate.py:extract", "--all")


class Migration:
    """The example in its own folder, with its table in PostgreSQL."""

    def __init__(self, folder: Path, url: str, **environ: str) -> None:
        self.folder, self.url = folder, url
        shutil.copytree(EXAMPLES / "06_spark_migration", folder)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        sizes = {"ROWS": str(ROWS), "CHUNKS": str(CHUNKS)}
        self._environ = os.environ | {"PATH": path} | sizes | environ
        self._log = (folder / "log").open("w+")

    def do(self, *words: str) -> int:
        done = self.start(*words)
        try:
            return done.wait(120)
        finally:
            if done.returncode is None:
                os.killpg(done.pid, signal.SIGKILL)
                done.wait()

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command in its own process group, which includes the driver's Java."""
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env=self._environ,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def set_up(self) -> None:
        where = urlsplit(self.url)
        words = f"{where.hostname}:{where.port}", where.path.lstrip("/"), where.username or ""
        assert self.do("./setup.sh", *words) == 0, self.said()
        self.store: Store = open_store(f"sqlite:///{self.folder}/.dataflow/dataflow.db")

    def said(self) -> str:
        return (self.folder / "log").read_text()

    def done(self) -> int:
        counted = "select count(*) from datastatus where datasetid = 'lake' and status = 'READY'"
        return sql(self.store, counted)[0][0]

    def fingerprints(self) -> dict[str, str]:
        facts = (
            "select dataid, fingerprint from chunkfact where datasetid = 'lake' order by generation"
        )
        return dict(sql(self.store, facts))

    def close(self) -> None:
        if "store" in vars(self):
            close(self.store)
        self._log.close()


@pytest.fixture
def migrations() -> Iterator[Callable[..., Migration]]:
    made: list[Migration] = []

    def make(folder: Path, url: str, **environ: str) -> Migration:
        made.append(Migration(folder, url, **environ))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.timeout(240)
def test_a_migration_loses_an_executor_and_then_its_driver(
    spark_cluster: Cluster,
    spark: "SparkSession",
    postgres_url: str,
    tmp_path: Path,
    migrations: Callable[..., Migration],
) -> None:
    conf = {key.upper().replace(".", "_"): value for key, value in spark_cluster.conf.items()}
    there = migrations(
        tmp_path / "cluster",
        postgres_url,
        **{f"DATAFLOW_{key}": value for key, value in conf.items()},
    )
    assert there.do("python", "make_table.py", postgres_url) == 0, there.said()
    there.set_up()

    driver = there.start(*RUN)
    try:
        wait_until(lambda: there.done() >= 3 or driver.poll() is not None, 120, there.said)
        spark_cluster.kill_executor()
        after = there.done()
        wait_until(lambda: there.done() >= after + 4 or driver.poll() is not None, 60, there.said)
        assert driver.poll() is None, there.said()
    finally:
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    assert there.done() < CHUNKS
    assert sql(there.store, "select count(*) from claim where owner is not null") != [(0,)]
    wait_until(lambda: not spark_cluster.executors(), 60)  # they notice that their driver is gone

    expire(there.store)
    assert there.do("python", "repair.py", postgres_url) == 0, there.said()
    assert there.do("odf", "resubmit", "extract", "--failed") == 0, there.said()
    assert there.do(*RUN) == 0, there.said()

    exact(there)
    here = migrations(tmp_path / "here", postgres_url)
    here.set_up()
    job, function = load_job(str(here.folder / "migrate.py:extract"))
    outcome = run_spark_job(
        here.store,
        function,
        function,
        job,
        load_settings(),
        say=print,
        environ=os.environ,
        all_chunks=True,
        session=lambda: spark,
    )
    assert outcome.done == CHUNKS
    assert there.fingerprints() == here.fingerprints()


def exact(migration: Migration) -> None:
    """Every row exists once, and nothing else does."""
    import pyarrow.dataset

    lake = pyarrow.dataset.dataset(str(migration.folder / "lake"), partitioning="hive").to_table()
    assert sorted(lake["id"].to_pylist()) == list(range(ROWS))
    assert sum(lake["amount"].to_pylist()) == sum(number % 1009 for number in range(ROWS))
    names = sorted(each.name for each in (migration.folder / "lake").iterdir())
    assert names == sorted(f"dataid={at}" for at in range(0, ROWS, ROWS // CHUNKS))
    for each in (migration.folder / "lake").iterdir():
        assert [one.name for one in each.iterdir() if one.suffix != ".parquet"] == ["_odf.json"]
    ends = Counter(
        sql(
            migration.store,
            "select dataid, generation from dataevent where datasetid = 'lake' "
            "and status_after = 'READY'",
        )
    )
    assert set(ends.values()) == {1}
    assert len({dataid for dataid, _ in ends}) == migration.done() == CHUNKS
    assert sql(migration.store, "select count(*) from claim where owner is not null") == [(0,)]
    check(migration.store)
