"""Each example does what its README says."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
import yaml

EXAMPLES = Path(__file__).parents[2] / "examples"


Done = subprocess.CompletedProcess[str]


def play(name: str, folder: Path) -> list[Done]:
    """Run the first block of commands of an example's README, in a copy of it."""
    return [run(line, folder) for line in lines_of(name, folder)]


def lines_of(name: str, folder: Path) -> list[str]:
    """Return the first block of commands of an example's README, for a copy of it in `folder`."""
    shutil.copytree(EXAMPLES / name, folder, dirs_exist_ok=True)
    blocks = re.findall(r"```\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return blocks[0].splitlines()


def run(line: str, folder: Path) -> Done:
    """Run one line as typed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-c", line],
        cwd=folder,
        env=os.environ | {"PATH": path},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )


def strips(grid: str) -> list[str]:
    """Return the squares of each dataset that `odf status --grid` printed."""
    return re.findall(r"  ([A-Z.]+)$", grid, re.MULTILINE)


def test_a_daily_job(tmp_path: Path) -> None:
    setup, run, status = play("01_daily_job", tmp_path / "here")
    assert setup.returncode == 0, setup.stderr
    assert run.returncode == 0, run.stderr
    assert status.stdout.count("  RRR\n") == 2
    copied = (tmp_path / "here" / "out" / "2026-11-02.csv").read_text()
    assert copied == "2026-11-02,1000\n"


def test_a_migration_with_failures(tmp_path: Path) -> None:
    make, setup, first, _, resubmit, second = play("02_migration", tmp_path / "here")
    assert (make.returncode, setup.returncode) == (0, 0), setup.stderr
    assert first.returncode == 1
    assert "done 198, failed 2" in first.stderr
    assert "2 chunks became RESUBMIT" in resubmit.stdout + resubmit.stderr
    assert second.returncode == 0, second.stderr
    rows = [
        line
        for file in (tmp_path / "here" / "lake").glob("*.csv")
        for line in file.read_text().splitlines()
    ]
    assert len(rows) == len(set(rows)) == 20_000


def test_dagster_on_postgresql(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    url = urlsplit(postgres_url)
    monkeypatch.setenv("DAGSTER_POSTGRES_PORT", str(url.port))
    monkeypatch.setenv("DAGSTER_POSTGRES_DB", url.path.lstrip("/"))
    monkeypatch.setenv("DAGSTER_POSTGRES_USER", "postgres")
    monkeypatch.delenv("DAGSTER_HOME", raising=False)

    migrate, info = play("03_dagster_postgres", tmp_path / "here")

    assert migrate.returncode == 0, migrate.stderr
    assert info.returncode == 0, info.stderr
    assert "max_runtime_seconds: 86400" in info.stdout
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("select count(*) from runs").fetchall() == [(0,)]


def test_an_existing_project_adds_opendataflow_in_ten_lines(tmp_path: Path) -> None:
    here = tmp_path / "here"
    setup, grid, both, broken, why, status = play("04_existing_project", here)
    assert (setup.returncode, grid.returncode) == (0, 0), setup.stderr + grid.stderr
    assert both.returncode == 0, both.stderr
    assert (here / "report" / "2026-11-02.csv").read_text().split() == ["north,1550", "south,990"]
    assert broken.returncode == 1
    assert "The chunk of job 'check' wasn't produced:" in broken.stderr
    assert "FAILED" in why.stdout
    assert strips(status.stdout) == ["RRR", ".RF", "R"]

    lines = (here / "definitions.py").read_text().splitlines()
    assert len([line for line in lines if line]) <= 10


def test_a_project_in_yaml(tmp_path: Path) -> None:
    here = tmp_path / "here"
    setup, check_yaml, check_defs, grid, launched, status = play("05_yaml_component", here)
    assert (setup.returncode, grid.returncode) == (0, 0), setup.stderr + grid.stderr
    assert check_yaml.returncode == 0, check_yaml.stdout + check_yaml.stderr
    assert check_defs.returncode == 0, check_defs.stdout + check_defs.stderr
    assert launched.returncode == 0, launched.stderr
    assert (here / "data" / "counted" / "2026-11-02").read_text() == "2\n"
    assert strips(status.stdout) == ["RRR", ".R.", "R"]


def test_a_migration_by_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWS", "20000")
    monkeypatch.setenv("CHUNKS", "20")
    here = tmp_path / "here"
    done = play("06_spark_migration", here)
    make, setup, first, why, repair, resubmit, second, grid, look = done
    assert (make.returncode, setup.returncode) == (0, 0), make.stderr + setup.stderr
    assert first.returncode == 1
    assert "done 19, failed 1" in first.stderr, first.stderr
    assert "NOT_VALIDATED: range_amount: 1 of 1,000 rows" in why.stdout
    assert (repair.returncode, resubmit.returncode) == (0, 0), resubmit.stderr
    assert second.returncode == 0, second.stderr
    assert "R" * 20 in grid.stdout
    total = sum(number % 1009 for number in range(20_000))
    assert look.stdout == f"20000 rows, {total} in all\n"
    assert not list((here / "lake").glob("_*"))


@pytest.mark.timeout(300)
def test_a_project_of_pipelines(tmp_path: Path) -> None:
    here = tmp_path / "here"
    done = play("07_project", here)
    validated, one, first, output, steps, _, broken, failed, _, resubmit, mended, grid = done

    assert validated.returncode == 0, validated.stdout + validated.stderr
    assert len(validated.stdout.splitlines()) == 3
    assert [each["status"] for each in json.loads(one.stdout)] == ["passed"] * 3, one.stderr

    assert first.returncode == 0, first.stderr
    assert "1 orders of unknown products" in first.stderr
    assert output.stdout in (EXAMPLES / "07_project" / "README.md").read_text()
    assert [line.split()[3:5] for line in steps.stdout.splitlines()[1:]] == [
        ["clean_orders", "READY"],
        ["add_products", "READY"],
        ["sum_by_day", "READY"],
    ]

    assert broken.returncode == 1
    assert "Reason: add_products: TypeError" in broken.stderr
    assert "pipelines/daily_sales/add_products.py:" in failed.stdout
    assert [line.split()[3:5] for line in failed.stdout.splitlines()[1:]] == [
        ["clean_orders", "READY"],
        ["add_products", "FAILED"],
    ]

    assert resubmit.returncode == 0, resubmit.stderr
    assert mended.returncode == 0, mended.stderr
    assert failed.stdout.splitlines()[1].split()[0] in mended.stderr  # the same run
    assert (here / "output" / "daily_sales.csv").read_text().endswith("2026-03-02,1,140.0\n")
    assert "RR" in strips(grid.stdout)


@pytest.mark.timeout(300)
def test_a_stream_of_items(tmp_path: Path) -> None:
    here = tmp_path / "here"
    port = free_port()
    done: dict[str, list[Done]] = {}
    try:
        for line in lines_of("08_stream", here):
            line = re.sub("odf serve", f"odf serve --port {port}", line)
            line = re.sub(":8000", f":{port}", line)
            found = run_until_settled(line, here) if "/status/" in line else run(line, here)
            done.setdefault(" ".join(line.split()[:3]), []).append(found)
    finally:
        ended = end_of_server(here)

    assert done["odf validate"][0].returncode == 0
    [stream] = done["odf pipeline run"]
    assert stream.returncode == 1
    assert "done 2, failed 1" in stream.stderr
    assert "there is no freezer 'F-9'" in stream.stderr

    [health] = done["curl -s --retry"]
    assert json.loads(health.stdout)["database"] is True
    *posts, third = [json.loads(each.stdout) for each in done["curl -s -H"]]
    plain, keyed, again, both = posts
    assert plain["dataid"] == "4"
    assert again == keyed
    assert len(both["items"]) == 2

    [listed] = done["for item in"]
    statuses = [json.loads(each) for each in listed.stdout.splitlines()]
    assert [each["status"] for each in statuses] == ["READY", "READY", "READY", "FAILED", "READY"]
    assert statuses[3]["transformation"] == "take_reading"
    assert statuses[3]["reason"] == "transformation failed"
    assert third["status"] == "READY"

    before, after = done["cat output/cold_chain.csv"]
    assert len(before.stdout.splitlines()) == 3
    assert after.stdout.splitlines() == [
        *before.stdout.splitlines(),
        "F-1,2026-03-02 07:00,-17.5,kitchen,True",
        "F-2,2026-03-02 07:00,-16.0,shop,False",
        "F-1,2026-03-02 09:00,-20.0,kitchen,False",
        "F-9,2026-03-02 06:00,-20.0,cellar,False",
    ]
    [plan] = done["odf history clean"]
    assert "6 payloads and 0 keys would be removed" in plan.stderr
    assert "FAILED" in done["odf history --pipeline"][1].stdout
    assert ended


def run_until_settled(line: str, folder: Path) -> Done:
    """Poll the statuses of items until each has been processed."""
    until = time.monotonic() + 90
    while True:
        found = run(line, folder)
        waiting = re.search('"status":"(PENDING|RUNNING|RESUBMIT)"', found.stdout)
        if not waiting or time.monotonic() > until:
            return found
        time.sleep(0.5)


def end_of_server(folder: Path) -> bool:
    """Whether a server that was told to end has ended; it is ended in any case."""
    file = folder / "serve.pid"
    if not file.is_file():
        return False
    pid = int(file.read_text())
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)  # its worker ends with it
    return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_a_host_that_works(tmp_path: Path) -> None:
    here = tmp_path / "here"
    apply, ready, work, grid = play("09_work", here)
    assert apply.returncode == ready.returncode == work.returncode == 0, work.stderr
    events = [json.loads(line) for line in work.stdout.splitlines()]
    assert (events[-1]["event"], events[-1]["done"]) == ("finished", 4)
    assert sorted((here / "data/report/report.txt").read_text().splitlines()) == [
        "2026-11-01: 15",
        "2026-11-02: 7",
    ]
    assert grid.stdout.count("  RR") == 3
    services = yaml.safe_load((here / "compose.yaml").read_text())["services"]
    assert services["work"]["command"][:2] == ["odf", "work"]
    if shutil.which("systemd-analyze"):
        unit = here / "odf-work.service"
        command = str(Path(sys.executable).parent / "odf")
        unit.write_text(unit.read_text().replace("/srv/shop/.venv/bin/odf", command))
        done = run(f"systemd-analyze verify {unit}", here)
        assert (done.returncode, done.stderr) == (0, "")


def test_every_example_is_played_here() -> None:
    played = re.findall(r'(?:play|lines_of)\("(\w+)"', Path(__file__).read_text())
    assert sorted(played) == sorted(each.name for each in EXAMPLES.iterdir() if each.is_dir())
