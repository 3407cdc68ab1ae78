"""The tour that `odf demo` gives: with Spark and Dagster, with scripts, and interrupted."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from click.testing import CliRunner

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.cli.demo import INSTALL
from tests.support.graphql_client import Client, wait_for
from tests.support.postgres import _free_port
from tests.support.process_guard import NAME, kill_marked, marked

pytestmark = pytest.mark.timeout(400)  # a machine may have other things to do

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
DAYS = [f"2026-10-{day:02d}" for day in range(1, 32)]
STATUSES = """{ assetNodes { assetKey { path } assetPartitionStatuses {
  ... on DefaultPartitionStatuses { materializedPartitions failedPartitions }
} } }"""


class Tour(NamedTuple):
    """A demo that ran, and what it printed."""

    folder: Path
    said: str


class Marked:
    """Environments that mark everything a demo starts."""

    def __init__(self) -> None:
        self.mark = f"demo-{os.urandom(8).hex()}"
        self.environ = os.environ | {NAME: self.mark}

    def running(self) -> list[list[str]]:
        found = []
        for process in marked(self.mark):
            try:
                found.append(process.cmdline())
            except psutil.Error:
                continue
        return found


@pytest.fixture(scope="module")
def watched() -> Iterator[Marked]:
    """An environment whose processes are counted; none outlives the test."""
    found = Marked()
    yield found
    kill_marked(found.mark)


@pytest.fixture(scope="module")
def taken(watched: Marked, tmp_path_factory: pytest.TempPathFactory) -> Tour:
    """The whole tour, once: in a folder with an odd name, on a machine without Java."""
    folder = tmp_path_factory.mktemp("tour") / "it's 100% a demo"
    java = {"JAVA_HOME", "MASTER"}
    environ = {name: value for name, value in watched.environ.items() if name not in java}
    environ["DATAFLOW_URL"] = "postgresql://nowhere.invalid/x"
    environ["PATH"] = _without_java(folder.parent / "bin")
    done = subprocess.run(
        [BIN / "odf", "demo", folder],
        env=environ,
        check=False,
        timeout=300,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return Tour(folder, done.stdout)


def _without_java(folder: Path) -> str:
    """A PATH with everything on this machine except Java."""
    folder.mkdir()
    for path in (Path(each) for each in os.environ["PATH"].split(os.pathsep)):
        for each in path.iterdir() if path.is_dir() else ():
            if not each.name.startswith("java") and not os.path.lexists(folder / each.name):
                (folder / each.name).symlink_to(each)
    return str(folder)


def odf(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [BIN / "odf", *words],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"DAGSTER_HOME": str(folder / "dagster")},
    )
    return done.stdout


def statuses(folder: Path) -> dict[str, Counter]:
    """Return dataset → how many chunks have which status."""
    found: dict[str, Counter] = {}
    for row in json.loads(odf(folder, "runs", "--json", "--limit", "1000")):
        found.setdefault(row["datasetid"], Counter())[row["status"]] += 1
    return found


def revenue(folder: Path, day: str) -> dict[str, Decimal]:
    """Return what a day's report has to say, given the file that arrived."""
    sums: dict[str, Decimal] = {}
    with (folder / "sales" / f"{day}.csv").open() as file:
        for row in csv.DictReader(file):
            sums[row["shop"]] = sums.get(row["shop"], Decimal()) + Decimal(row["amount"])
    return sums


def test_a_month_goes_through_spark_and_dagster(taken: Tour, watched: Marked) -> None:
    import pyarrow.parquet

    said = taken.said
    assert "not_null_amount: 1 of 200 rows have no amount" in said
    assert "written='12.5O'" in said
    assert said.count("SUCCESS") == 1  # one run of the backfill made all days
    assert "No drift." in said.splitlines()[-20:]
    assert "Traceback" not in said
    assert watched.running() == []
    for name in ("checked", "report"):
        assert len(list((taken.folder / name).glob("dataid=*"))) == len(DAYS)
    table = pyarrow.parquet.read_table(taken.folder / "report")
    found = {(row["dataid"], row["shop"]): row["revenue"] for row in table.to_pylist()}
    wanted = {
        (day, shop): amount for day in DAYS for shop, amount in revenue(taken.folder, day).items()
    }
    assert found == wanted


def test_dagster_produced_what_the_outage_missed(taken: Tour) -> None:
    rows = json.loads(odf(taken.folder, "history", "report", "--json", "--limit", "5000"))
    by_run = {row["dataid"] for row in rows if " of run " in (row["who"] or "")}
    assert sorted(by_run) == DAYS[10:]


def test_this_repositorys_location_shows_the_same(taken: Tour, tmp_path: Path) -> None:
    home, answer = taken.folder / "dagster", tmp_path / "answer"
    subprocess.run(
        [BIN / "dagster-graphql", "-w", "workspace.yaml", "-t", STATUSES, "-o", answer],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"ODF_DEMO": str(taken.folder), "DAGSTER_HOME": str(home)},
    )
    nodes = json.loads(answer.read_text())["data"]["assetNodes"]
    shown = {each["assetKey"]["path"][0]: each["assetPartitionStatuses"] for each in nodes}
    assert sorted(shown) == ["checked", "report", "sales"]
    for each in shown.values():
        assert each == {"materializedPartitions": DAYS, "failedPartitions": []}


def test_a_second_tour_starts_afresh_and_leaves_a_persons_files_alone(taken: Tour) -> None:
    folder = taken.folder
    (folder / "jobs.py").write_text("mine = 1\n")
    (folder / "mine.txt").write_text("mine")
    odf(folder.parent, "demo", "--scripts", str(folder))
    assert (folder / "jobs.py~").read_text() == "mine = 1\n"
    assert (folder / "mine.txt").read_text() == "mine"
    for gone in ("jobs.py", "definitions.py", "dagster", "report/dataid=2026-10-01"):
        assert not (folder / gone).exists(), gone
    lines = (folder / "report" / "2026-10-07.csv").read_text().split()
    assert lines == [
        f"{shop},{amount}" for shop, amount in sorted(revenue(folder, DAYS[6]).items())
    ]


def test_where_spark_isnt_installed_the_tour_has_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    done = CliRunner().invoke(app, ["demo", str(tmp_path / "here")], prog_name="odf")
    assert done.exit_code == 0, done.output
    [told] = [line for line in done.output.splitlines() if "installed" in line]
    assert told.startswith("pyspark isn't installed, so this is the tour with shell scripts.")
    assert told.endswith(INSTALL)
    assert "./check.sh" in done.output
    assert len(list((tmp_path / "here" / "report").iterdir())) == len(DAYS)


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = subprocess.run(
        [BIN / "odf", "demo", tmp_path], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == (
        f"odf: {tmp_path} has files that `odf demo` didn't create. Name another: odf demo FOLDER\n"
    )
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def interrupt(folder: Path, watched: Marked, until: str, number: int, to_all: bool) -> str:
    """Interrupt a demo some time after it has printed something; return its output."""
    process = subprocess.Popen(
        [BIN / "odf", "demo", folder],
        env=watched.environ,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdout
    said = ""
    for line in process.stdout:
        said += line
        if until in line:
            break
    else:
        raise AssertionError(said)
    time.sleep(2)
    (os.killpg if to_all else os.kill)(process.pid, number)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, None), said + rest
    wait_for(watched.running, lambda left: not left, 20, "all of it ends")
    return said + rest


def test_ctrl_c_ends_a_job_of_spark(tmp_path: Path, watched: Marked) -> None:
    said = interrupt(tmp_path / "d", watched, "run --spark", signal.SIGINT, to_all=True)
    assert "Traceback" not in said


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_of_an_interrupted_dagster(
    tmp_path: Path, watched: Marked, number: signal.Signals
) -> None:
    """Ctrl-C reaches everything that the terminal started, a kill only `odf demo`."""
    folder = tmp_path / "d"
    to_all = number == signal.SIGINT
    said = interrupt(folder, watched, "dagster-daemon run", number, to_all=to_all)
    assert "Traceback" not in said
    assert "RUNNING" not in statuses(folder)["report"]


@pytest.mark.soak
def test_the_ui_shows_the_demo_and_november_and_produces_a_day(
    tmp_path: Path, watched: Marked
) -> None:
    port = _free_port()
    folder = tmp_path / "demo"
    environ = watched.environ | {"PORT": str(port), "ODF_DEMO": str(folder)}
    server = subprocess.Popen(
        [ROOT / "definitions" / "ui.sh"],
        env=environ,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        with Client(f"http://127.0.0.1:{port}", "demo") as client:
            wait_for(client.location_problem, lambda problem: problem is None, 240, "it serves")
            november = [f"2026-11-0{day}" for day in range(1, 5)]
            wait_for(lambda: client.partitions("checked"), (DAYS + november).__eq__, 60, "keys")
            wait_for(lambda: client.grid("checked").red, {november[1]}.__eq__, 60, "red")
            grid = client.grid("checked")
            assert grid.green == {*DAYS, november[0]}
            assert grid.missing == set(november[2:])
            sales = folder / "sales" / f"{november[1]}.csv"
            sales.write_text(sales.read_text().replace("12.5O", "12.50"))
            odf(folder, "resubmit", "check", november[1])
            run = client.launch(["checked"], november[1], through=november[3])
            assert client.finished(run, 120) == "SUCCESS"
            wait_for(lambda: client.grid("checked").green, {*DAYS, *november}.__eq__, 30, "green")
    finally:
        os.killpg(server.pid, signal.SIGINT)
        server.wait(60)
    wait_for(watched.running, lambda left: not left, 30, "all of it ends")
