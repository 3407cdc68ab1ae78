"""Tests of the functions on one day of data, without tables."""

from pathlib import Path

import pytest
from jobs import check, report

from opendataflow_dagster import Chunk, Flow


def test_the_flow_is_valid() -> None:
    flow = Flow.load(Path(__file__).parents[1] / "flow.yml")
    assert {"check", "report"} <= {job.jobid for job in flow.jobs}


def test_lines_without_an_amount_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("shop,cents\nnorth,5\nsouth,\nnorth,7\n")
    checked = check(Chunk.sample("1", inputs={"sales": str(tmp_path)}))
    assert checked == b"shop,cents\nnorth,5\nnorth,7\n"

    (tmp_path / "1.csv").write_bytes(checked)
    made = report(Chunk.sample("1", inputs={"checked": str(tmp_path)}))
    assert made == b"shop,cents\nnorth,12\n"


def test_a_day_without_an_amount_is_refused(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("shop,cents\nsouth,\n")
    with pytest.raises(ValueError, match="no line with an amount"):
        check(Chunk.sample("1", inputs={"sales": str(tmp_path)}))
