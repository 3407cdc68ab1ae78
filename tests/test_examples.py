"""Each example does what its README says."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def play(name: str, folder: Path) -> list[subprocess.CompletedProcess[str]]:
    """Run the first block of commands of an example's README, in a copy of it."""
    shutil.copytree(EXAMPLES / name, folder, dirs_exist_ok=True)
    block = re.findall(r"```\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[0]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return [
        subprocess.run(
            ["sh", "-c", line], cwd=folder, env=os.environ | {"PATH": path}, check=False,
            capture_output=True, text=True, timeout=100,
        )
        for line in block.splitlines()
    ]  # fmt: skip


def test_a_daily_job(tmp_path: Path) -> None:
    setup, run, status = play("01_daily_job", tmp_path / "here")
    assert setup.returncode == 0, setup.stderr
    assert run.returncode == 0, run.stderr
    assert "  RRR" in status.stdout.splitlines()
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
    assert "1 of 1 chunks of job 'check' weren't made:" in broken.stderr
    assert "FAILED" in why.stdout
    assert [line.strip() for line in status.stdout.splitlines()[1:6:2]] == ["RRR", ".RF", "R"]

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
    assert [line.strip() for line in status.stdout.splitlines()[1:6:2]] == ["RRR", ".R.", "R"]


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


def test_a_project_of_pipelines(tmp_path: Path) -> None:
    validated, one = play("07_project", tmp_path / "here")
    assert validated.returncode == 0, validated.stdout + validated.stderr
    assert len(validated.stdout.splitlines()) == 3
    assert [each["status"] for each in json.loads(one.stdout)] == ["passed"] * 3, one.stderr


def test_every_example_is_played_here() -> None:
    played = re.findall(r'play\("(\w+)"', Path(__file__).read_text())
    assert sorted(played) == sorted(each.name for each in EXAMPLES.iterdir() if each.is_dir())
