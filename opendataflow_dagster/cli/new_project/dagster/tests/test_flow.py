"""Tests of the flow and of its functions on one day of data, without tables."""

from pathlib import Path

import pytest
from flow_jobs import check, report

from opendataflow_dagster import Chunk, Flow, build_definitions

FLOW = Path(__file__).parents[1] / "flow.yml"


def test_dagster_can_load_the_flow() -> None:
    assert [job.jobid for job in Flow.load(FLOW).jobs] == ["check", "report"]
    keys = build_definitions(flow=FLOW).resolve_all_asset_keys()
    assert {key.to_user_string() for key in keys} == {"sales", "checked", "report"}


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
