"""Each example does what its README says."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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


def test_every_example_is_played_here() -> None:
    played = re.findall(r'play\("(\w+)"', Path(__file__).read_text())
    assert sorted(played) == sorted(each.name for each in EXAMPLES.iterdir() if each.is_dir())
