"""Modules beside a job's function reach the executors: classic sessions, Spark Connect."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.find_spark_home import _find_spark_home

from opendataflow_dagster.store import open_store
from tests.support.spark_cluster import Cluster
from tests.support.store_fixtures import close, put, register, sql, status

JOBS = """
from helper import twice
from pyspark.sql import functions as F


def double(numbers):
    @F.udf("long")
    def one(n):
        from texts.words import WORD  # imported on the executor only

        return twice(n) + len(WORD)

    return numbers.select(one("n").alias("n"), F.udf(twice, "long")("n").alias("m"))
"""

EXAMPLES = Path(__file__).resolve().parents[1] / "projects" / "spark_page"

Odf = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def odf(tmp_path: Path) -> Odf:
    """Run a command with tables and a folder of jobs, from another folder."""
    jobs, here = tmp_path / "jobs", tmp_path / "elsewhere"
    for folder in (jobs / "texts", here, tmp_path / "numbers"):
        folder.mkdir(parents=True)
    (jobs / "jobs.py").write_text(JOBS)
    (jobs / "helper.py").write_text("def twice(n):\n    return 2 * n\n")
    (jobs / "texts" / "words.py").write_text('WORD = "four"\n')
    (jobs / "data").mkdir()
    (jobs / "data" / "large.bin").write_bytes(os.urandom(1 << 20))
    (tmp_path / "numbers" / "1.csv").write_text("n\n17\n")
    store = open_store(f"sqlite:///{tmp_path}/odf.db")
    store.init()
    for datasetid, folder in (("numbers", "numbers"), ("doubled", "out")):
        sql(
            store,
            "insert into dataset (datasetid, hostname, format) values (:d, :h, 'csv')",
            d=datasetid,
            h=f"{tmp_path}/{folder}",
        )
    register(store, "double", ["numbers"], ["doubled"])
    put(store, "numbers", "1")
    close(store)

    def run(*words: str | Path, **conf: str) -> subprocess.CompletedProcess[str]:
        named = {f"DATAFLOW_{key.upper().replace('.', '_')}": value for key, value in conf.items()}
        environ = os.environ | named | {"DATAFLOW_URL": f"sqlite:///{tmp_path}/odf.db"}
        environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
        return subprocess.run(
            words, cwd=here, env=environ, capture_output=True, text=True, timeout=150
        )

    return run


def made(tmp_path: Path) -> str:
    store = open_store(f"sqlite:///{tmp_path}/odf.db")
    try:
        assert status(store, "doubled", "1", "double") == "READY"
    finally:
        close(store)
    [file] = (tmp_path / "out" / "dataid=1").glob("*.csv")
    return file.read_text()


def test_here_from_another_folder(odf: Odf, tmp_path: Path) -> None:
    function = f"{tmp_path}/jobs/jobs.py:double"
    done = odf("odf", "run", "--spark", function, **{"spark.master": "local[1]"})

    assert done.returncode == 0, done.stderr
    assert made(tmp_path) == "n,m\n38,34\n"


@pytest.mark.timeout(240)
def test_on_a_cluster(odf: Odf, tmp_path: Path, spark_cluster: Cluster) -> None:
    function = f"{tmp_path}/jobs/jobs.py:double"
    done = odf("odf", "run", "--spark", function, **spark_cluster.conf)

    assert done.returncode == 0, done.stderr
    assert made(tmp_path) == "n,m\n38,34\n"


@pytest.mark.timeout(240)
def test_spark_submit_in_client_mode(odf: Odf, tmp_path: Path, spark_cluster: Cluster) -> None:
    """The entry file of docs/spark.md; the exit code is ours."""
    shutil.copy(EXAMPLES / "entry.py", tmp_path)
    conf = [
        word for key, value in spark_cluster.conf.items() for word in ("--conf", f"{key}={value}")
    ]
    submit = [Path(_find_spark_home()) / "bin" / "spark-submit", *conf, tmp_path / "entry.py"]
    words = ["run", "--strict", "--spark", f"{tmp_path}/jobs/jobs.py:double"]

    done = odf(*submit, *words)

    assert done.returncode == 0, done.stderr
    assert made(tmp_path) == "n,m\n38,34\n"
    assert odf(*submit, *words).returncode == 3  # nothing is left


@pytest.mark.parametrize("deploy", ["cluster", "CLUSTER"])
def test_cluster_mode_is_refused_in_a_line(odf: Odf, tmp_path: Path, deploy: str) -> None:
    function = f"{tmp_path}/jobs/jobs.py:double"
    conf = {"spark.master": "spark://127.0.0.1:9", "spark.submit.deployMode": deploy}
    (tmp_path / "elsewhere" / "dataflow.properties").write_text(
        "".join(f"{key}={value}\n" for key, value in conf.items())
    )
    done = odf("odf", "run", "--spark", function)

    assert done.returncode != 0
    [line] = [line for line in done.stderr.splitlines() if "deployMode" in line]
    assert "client" in line
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(240)
def test_on_a_server_of_spark_connect(odf: Odf, tmp_path: Path, connect_url: str) -> None:
    function = f"{tmp_path}/jobs/jobs.py:double"
    done = odf("odf", "run", "--spark", function, **{"spark.remote": connect_url})

    assert done.returncode == 0, done.stderr
    assert made(tmp_path) == "n,m\n38,34\n"
