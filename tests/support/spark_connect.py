"""A real server of Spark Connect for tests."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgres import _free_port
from tests.support.process_guard import NAME, kill_marked

SERVER = "org.apache.spark.sql.connect.service.SparkConnectServer"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def connect_url() -> Iterator[str]:
    """Return spark.remote for a server on local[2] that ends with the module."""
    from pyspark.find_spark_home import _find_spark_home

    from opendataflow_dagster.spark.settings import needed_java

    home, port = _find_spark_home(), _free_port()
    folder = Path(tempfile.mkdtemp(prefix="odf-connect-"))
    conf = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": port,
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        "spark.local.dir": folder,
        "spark.ui.enabled": "false",
    }
    words = [word for key, value in conf.items() for word in ("--conf", f"{key}={value}")]
    guard = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.support.process_guard",
            str(os.getpid()),
            folder.name,
            str(folder),
        ],
        cwd=ROOT,
        start_new_session=True,
    )
    environ = os.environ | {
        NAME: folder.name,
        "JAVA_HOME": needed_java(),
        "SPARK_HOME": home,
        "PYSPARK_PYTHON": sys.executable,
    }
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            [
                os.path.join(home, "bin", "spark-submit"),
                "--master",
                "local[2]",
                *words,
                "--class",
                SERVER,
                "spark-internal",
            ],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        _wait(port, server, folder / "log")
        yield f"sc://127.0.0.1:{port}"
    finally:
        kill_marked(folder.name)
        server.wait()
        guard.kill()
        guard.wait()
        shutil.rmtree(folder, ignore_errors=True)


def _wait(port: int, server: subprocess.Popen[bytes], log: Path, timeout: float = 90) -> None:
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"no server: {log.read_text()[-2000:]}") from None
            time.sleep(0.1)
