"""What the package offers to the tests of projects."""

import os
from pathlib import Path

import dagster as dg
import pytest

from opendataflow_dagster import Chunk, DataflowResource, Dataset, Flow, Job, dataflow_assets
from opendataflow_dagster.store.registry import datasets, policy
from tests.support.store_fixtures import status, statuses

SALES = Dataset("sales", hostname="/of/production", format="csv")


def total(chunk: Chunk) -> bytes:
    """The sum of a day."""
    day = Path(chunk.inputs["sales"].location or "", f"{chunk.dataid}.csv")
    return str(sum(map(int, day.read_text().split()))).encode()


TOTALS = dataflow_assets(
    job="total",
    inputs=[SALES],
    outputs=[Dataset("totals", format="csv")],
    policy={"max_attempts": 2},
)(total)


def test_a_function_is_tested_with_a_sample_chunk(tmp_path: Path) -> None:
    (tmp_path / "2026-11-01.csv").write_text("1 2 3")
    chunk = Chunk.sample("2026-11-01", inputs={"sales": str(tmp_path)}, environment={"A": "b"})
    assert total(chunk) == b"6"
    assert (chunk.jobid, chunk.environment["A"], chunk.alive(), chunk.password("sales")) == (
        "sample",
        "b",
        True,
        None,
    )


def test_an_asset_is_materialized_in_ephemeral_tables(tmp_path: Path) -> None:
    (tmp_path / "2026-11-01.csv").write_text("1 2 3")
    dataflow = DataflowResource.ephemeral(
        ready={"sales": ["2026-11-01", "2026-11-02"]}, places={"sales": tmp_path}
    )

    done = dataflow.materialize([TOTALS], "2026-11-01")

    [event] = done.asset_materializations_for_node("total")
    assert event.partition == "2026-11-01"
    [file] = Path(place(dataflow, "totals")).glob("dataid=2026-11-01/part-*")
    assert file.read_bytes() == b"6"
    failed = dataflow.materialize([TOTALS], "2026-11-02", raise_on_error=False)  # without a file
    assert not failed.success
    assert policy(dataflow.store, "total")["max_attempts"] == 2
    assert status(dataflow.store, "totals", "2026-11-01", "total") == "READY"


def place(dataflow: DataflowResource, datasetid: str) -> str:
    [row] = [row for row in datasets(dataflow.store) if row["datasetid"] == datasetid]
    return row["hostname"]


def test_a_flow_is_registered_without_its_places(tmp_path: Path) -> None:
    flow = Flow("shop", datasets=[SALES], jobs=[Job("total", inputs=["sales"], outputs=["totals"])])
    one, two = DataflowResource.ephemeral(flow), DataflowResource.ephemeral(flow)
    assert one.store is not two.store
    assert os.path.isdir(place(one, "sales"))
    assert place(one, "sales") != place(two, "sales")
    assert not place(one, "sales").startswith("/of/production")
    assert statuses(one.store) == {}


def test_without_a_partition_all_claimable_chunks_are_produced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dataflow = DataflowResource.ephemeral()
    assert dataflow.materialize([TOTALS]).success
    assert "no suitable data available for job. Not running it" in capfd.readouterr().err


def test_dagster_itself_takes_the_resource_with_an_instance_that_knows_the_partition(
    tmp_path: Path,
) -> None:
    (tmp_path / "1.csv").write_text("7")
    dataflow = DataflowResource.ephemeral(ready={"sales": ["1"]}, places={"sales": tmp_path})
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("dataflow/sales", ["1"])
        assert dg.materialize(
            [TOTALS], instance=instance, partition_key="1", resources={"dataflow": dataflow}
        ).success
