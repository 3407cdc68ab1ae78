"""Plays what `odf new` has written: the lines of its README, the steps of its workflow."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml


def lines_of(folder: Path) -> list[str]:
    """The commands of all blocks of a README, without the remarks behind them."""
    blocks = re.findall(r"```\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    return [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]


def play(folder: Path, skip: Callable[[str], bool] = lambda line: False) -> list[str]:
    """Run each line of a README in its folder, as it is typed; the lines."""
    lines = lines_of(folder)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in lines:
        if skip(line):
            continue
        done = subprocess.run(
            ["sh", "-c", line],
            cwd=folder,
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=150,
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return lines


def steps_of_workflow(file: Path) -> list[str]:
    """What a workflow runs, in order."""
    [job] = yaml.safe_load(file.read_text())["jobs"].values()
    return [step["run"] for step in job["steps"] if "run" in step]
