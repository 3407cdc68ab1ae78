"""A passkey and a password pass through every way of running, at DEBUG: nothing shows them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.e2e.test_serve import ODF, Served
from tests.server.test_app import wait_until
from tests.support import secret_canary
from tests.support.postgres import Server
from tests.support.secret_canary import PASSKEY, PASSWORD, Canary, places
from tests.support.spark_cluster import Cluster

pytestmark = pytest.mark.timeout(300)

JAR = Path(os.environ.get("JDBC_JAR", "/usr/share/java/postgresql.jar"))
LOOKS = (
    ["history", "--json"],
    ["status", "--json"],
    ["runs", "--json"],
    ["doctor", "--json"],
    ["dataset", "list", "--json"],
    ["sql", "--json", "select * from dataset"],
)


class Ways:
    """Three datasets in a database that asks for the password, and `odf` with the passkey."""

    def __init__(self, folder: Path, person: psycopg.Connection) -> None:
        self.canary, self.person = Canary(folder), person
        self.env = {"DATAFLOW_URL": f"sqlite:///{folder / 'dataflow.db'}"}
        self.odf("init")
        info = person.info
        host = f"{info.host}:{info.port}"
        for name in ("places", "copies"):
            self.add(
                name,
                "--hostname",
                host,
                "--database",
                info.dbname,
                "--format",
                "postgres",
                "--chunkcolumn",
                "day",
            )
        self.add(
            "byjava",
            "--hostname",
            f"jdbc:postgresql://{host}/{info.dbname}",
            "--format",
            "jdbc",
            "--chunkcolumn",
            "day",
        )

    def add(self, name: str, *words: str) -> None:
        self.odf(
            "dataset",
            "add",
            name,
            *words,
            "--tablename",
            name,
            "--username",
            secret_canary.USER,
            "--password",
            stdin=PASSWORD,
        )

    def job(self, jobid: str, *ins: str, chunk: str = "mon") -> None:
        inputs = [word for each in ins for word in ("--in", each)]
        self.odf("job", "add", jobid, *inputs, "--out", "copies")
        for each in ins:
            self.person.execute(f"insert into {each} values (%s, 1), (%s, 2)", (chunk, chunk))
            self.odf("ready", each, chunk)

    def odf(self, *words: str, code: int | None = 0, stdin: str = "", **more: str) -> str:
        done = subprocess.run(
            [ODF, *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=200,
            env=os.environ | self.env | {"PASSKEY": PASSKEY} | more,
        )
        self.canary.said += done.stdout + done.stderr
        why = [line for line in done.stderr.splitlines() if "Reason: " in line or "odf: " in line]
        assert code is None or done.returncode == code, why or done.stderr[-3000:]
        return done.stdout

    def look(self) -> None:
        for words in LOOKS:
            self.odf(*words, code=None)


@pytest.fixture
def ways(postgres_server: Server, postgres_url: str, tmp_path: Path) -> Iterator[Ways]:
    with places(postgres_server, postgres_url, ["places", "copies", "byjava"]) as person:
        yield Ways(tmp_path, person)


def test_the_search_finds_a_planted_secret(tmp_path: Path) -> None:
    """Otherwise the other tests would prove nothing."""
    import base64
    import sqlite3

    def write(name: str, data: bytes) -> None:
        (tmp_path / name).write_bytes(data)

    write("plain", f"xx{PASSKEY}yy".encode())
    write("wide", f"x{PASSWORD}".encode("utf-16"))
    for shift in range(4):
        write(f"coded{shift}", base64.b64encode(b"." * shift + PASSWORD.encode() + b"..."))
    with sqlite3.connect(tmp_path / "db") as connection:
        connection.execute("create table t (c)")
        connection.execute("insert into t values (?)", (PASSKEY,))
    connection.close()
    write("clean", PASSKEY[:-1].encode())
    assert {Path(each).name for each in secret_canary.found_in(tmp_path)} == {
        "plain",
        "wide",
        "coded0",
        "coded1",
        "coded2",
        "coded3",
        "db",
    }


def test_the_spy_finds_a_planted_secret(tmp_path: Path) -> None:
    found = Canary(tmp_path)
    spy = found.spy(tmp_path / "spy")
    subprocess.run(
        [spy],
        env=os.environ | {"PASSKEY": PASSKEY, "places_password": PASSWORD},
        check=True,
        capture_output=True,
        timeout=60,
    )
    assert "passkey in environ of" in found.report.read_text()
    assert "passkey in os.environ" in found.report.read_text()
    with pytest.raises(AssertionError):
        found.check()


def test_a_script(ways: Ways) -> None:
    ways.job("copy", "places")
    program = ways.canary.spy(Path("copy"))
    ways.person.execute("insert into places values ('tue', 1)")

    done = ways.odf("run", f"./{program.name}", code=0)

    assert PASSWORD in done, "a script gets the password, and this one prints it"
    ways.canary.said = ways.canary.said.replace(PASSWORD, "***", done.count(PASSWORD))
    for words in (["resubmit", "copy", "mon"], ["run", "./nowhere"], ["why", "copy", "mon"]):
        ways.odf(*words, code=None)
    ways.odf("run", "./copy", code=4, PASSKEY="another")
    ways.look()
    ways.canary.check()


FUNCTION = """
import sys
sys.path.insert(0, {folder!r})
import spy

def copy(places{more}):
    spy.look()
    places.explain(True)

    def each(frames):
        import sys
        sys.path.insert(0, {folder!r})
        import spy
        spy.look()
        yield from frames

    rows = places.mapInPandas(each, places.schema)
    for other in [{others}]:
        rows = rows.unionByName(other)
    return rows
"""


def spark(ways: Ways, **conf: str) -> None:
    ways.canary.spy(Path("spy.py"))
    java = JAR.exists() and "spark.remote" not in conf
    ways.job("copy", "places", *(["byjava"] if java else []))
    more, others = (", byjava", "byjava") if java else ("", "")
    Path("jobs.py").write_text(FUNCTION.format(folder=os.getcwd(), more=more, others=others))
    if java:
        conf["spark.jars"] = str(JAR)
    if "spark.remote" not in conf:
        events = ways.canary.folder / "events"
        events.mkdir()
        conf |= {
            "spark.log.level": "DEBUG",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": f"file://{events}",
            "spark.eventLog.compress": "false",
        }
    Path("dataflow.properties").write_text(
        "".join(f"{name}={value}\n" for name, value in conf.items())
    )
    ways.odf("run", "--spark", "jobs.py:copy", SPARK_CONNECT_LOG_LEVEL="DEBUG")
    assert ways.person.execute("select count(*) from copies").fetchone() == (4 if java else 2,)
    if "spark.remote" not in conf:
        assert " DEBUG " in ways.canary.said
    ways.look()


def test_a_function_in_sparks_own_process(ways: Ways) -> None:
    spark(ways, **{"spark.master": "local[2]"})
    ways.canary.check()


@pytest.mark.soak
def test_a_function_on_a_cluster(ways: Ways, spark_cluster: Cluster) -> None:
    spark(ways, **spark_cluster.conf)
    ways.canary.check(spark_cluster.folder)


def test_a_function_by_spark_connect(ways: Ways, connect_url: str) -> None:
    spark(ways, **{"spark.remote": connect_url, "spark.sql.shuffle.partitions": "2"})
    assert "ExecuteAndFetchAsIterator" in ways.canary.said
    ways.canary.check()


TRANSFORMATION = """
import os
import pandas as pd
import spy
spy.look()
expected_inputs = [{"day": "mon", "n": 1}]
expected_output = [{"day": "mon", "n": 1, "m": 2}]
stream = {"day": "mon", "n": 1}

def run(df, stream=None):
    spy.look()
    if stream and stream.get("bad"):
        raise ValueError(sorted(os.environ.items()))
    rows = pd.DataFrame([{"day": stream["day"], "n": stream["n"]}]) if stream else df
    return rows.assign(m=2)
"""

PROJECT = """
pipelines:
  - slug: live
    sources: [places]
    destination: kept
    transformations: [add]
"""


def project(ways: Ways) -> Path:
    root = ways.canary.folder / "project"
    (root / "pipelines" / "live").mkdir(parents=True, exist_ok=True)
    (root / "pipelines" / "live" / "add.py").write_text(TRANSFORMATION)
    (root / "project.yml").write_text(PROJECT)
    ways.canary.spy(root / "spy.py")
    info = ways.person.info
    ways.add(
        "kept",
        "--hostname",
        f"{info.host}:{info.port}",
        "--database",
        info.dbname,
        "--format",
        "postgres",
        "--writemode",
        "append",
    )
    ways.person.execute("insert into places values ('mon', 1)")
    ways.person.execute("create table kept (day text, n bigint, m bigint)")
    ways.person.execute("alter table kept owner to canary")
    ways.env["PYTHONPATH"] = str(root)
    return root


@pytest.mark.soak
def test_a_pipeline_and_validate(ways: Ways) -> None:
    root = project(ways)
    os.chdir(root)

    ways.odf("validate", "--json", code=None)
    assert "the spy says" in ways.canary.said
    ways.odf("pipeline", "run", "live", DATAFLOW_SPARK_LOG_LEVEL="DEBUG")

    assert ways.person.execute("select * from kept").fetchall() == [("mon", 1, 2)]
    ways.look()
    ways.canary.check()


def test_items_over_http(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(ways.canary.folder / "project")
    project(ways)
    for name, value in (ways.env | {"DATAFLOW_SPARK_LOG_LEVEL": "DEBUG"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PASSKEY", PASSKEY)
    try:
        served.start()
        served.warm()
        bodies = ({"day": "tue", "n": 1}, {"day": "wed", "n": 1, "bad": True})
        for number, body in enumerate(bodies):
            served.http.post(
                "/stream/live",
                json=body,
                headers={"Authorization": f"Bearer {served.token}", "Idempotency-Key": str(number)},
            )
        wait_until(lambda: ways.person.execute("select 1 from kept").fetchall() != [], 60)
        # The spy may be at work: it would see the passkey of a command that has just been started.
        wait_until(lambda: "FAILED" in ways.odf("status", "--json", PASSKEY=""), 60)
        for path in ("/health", "/metrics", "/openapi.json", "/docs"):
            ways.canary.said += served.http.get(path).text
    finally:
        served.close()
    assert "ValueError" in served.said() + ways.odf("history", "--json")
    ways.canary.said += served.said()
    ways.look()
    ways.canary.check()


LOCATION = """
import dagster as dg
from opendataflow_dagster import Chunk
from opendataflow_dagster import DataflowResource
from opendataflow_dagster import Result
from opendataflow_dagster import build_definitions
from opendataflow_dagster import dataflow_assets
import sys
sys.path.insert(0, {folder!r})
import spy

dataflow = DataflowResource()

@dataflow_assets(job="copy", dataflow=dataflow)
def copy(chunk: Chunk) -> Result:
    spy.look()
    assert chunk.password("places") == spy.WORDS["password"]
    return Result(rows=1)

@dataflow_assets(job="fails", dataflow=dataflow)
def fails(chunk: Chunk) -> Result:
    raise ValueError(chunk)

defs = build_definitions(dataflow, assets=[copy, fails], scripts={{"shell": {script!r}}})
"""


@pytest.mark.soak
def test_runs_of_dagster(ways: Ways) -> None:
    from tests.support.dagster_servers import Dagster

    ways.job("copy", "places")
    for jobid, output in (("fails", "wrong"), ("shell", "printed")):
        ways.odf("dataset", "add", output, "--hostname", str(ways.canary.folder / output))
        ways.odf("job", "add", jobid, "--in", "places", "--out", output)
    ways.canary.spy(ways.canary.folder / "spy.py")
    script = ways.canary.folder / "shell"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {ways.canary.folder}/spy.py > /dev/null\n")
    script.chmod(0o755)
    location = ways.canary.folder / "location.py"
    location.write_text(LOCATION.format(folder=str(ways.canary.folder), script=str(script)))
    env = ways.env | {"PASSKEY": PASSKEY, "DAGSTER_CANARY": "1"}
    with Dagster(location, name="canary", env=env, servers=["code_server"]) as dagster:
        del dagster.env["PASSKEY"]
        dagster.start("webserver", "daemon")
        for asset, outcome in (("copies", "SUCCESS"), ("wrong", "FAILURE"), ("printed", "SUCCESS")):
            run = dagster.client.launch([asset], "mon")
            assert dagster.client.finished(run) == outcome, dagster.client.messages(run)
        ways.canary.said += dagster.logs(100_000)
        ways.look()
        ways.canary.check(dagster.folder)
