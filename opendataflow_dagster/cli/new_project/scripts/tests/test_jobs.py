"""Tests of the scripts on one day of data, without tables."""

import os
import subprocess
from pathlib import Path

from opendataflow_dagster import Flow

HERE = Path(__file__).parents[1]


def run(script: str, **variables: object) -> int:
    """Run a script with the variables that `odf run` would set."""
    given = {name: str(value) for name, value in variables.items()}
    return subprocess.run([HERE / "jobs" / script], env={**os.environ, **given}).returncode


def test_the_flow_is_valid() -> None:
    assert {"check", "report"} <= {job.jobid for job in Flow.load(HERE / "flow.yml").jobs}


def test_lines_without_an_amount_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("shop,cents\nnorth,5\nsouth,\nnorth,7\n")
    assert run("check.sh", dataid=1, sales_hostname=tmp_path, checked_hostname=tmp_path / "c") == 0
    assert (tmp_path / "c" / "1.csv").read_text() == "shop,cents\nnorth,5\nnorth,7\n"

    assert (
        run("report.sh", dataid=1, checked_hostname=tmp_path / "c", report_hostname=tmp_path) == 0
    )
    assert (tmp_path / "1.csv").read_text() == "shop,cents\nnorth,12\n"


def test_a_day_without_an_amount_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("shop,cents\nsouth,\n")
    assert run("check.sh", dataid=1, sales_hostname=tmp_path, checked_hostname=tmp_path / "c") != 0
    assert not (tmp_path / "c" / "1.csv").exists()
