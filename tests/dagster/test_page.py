"""The examples of docs/dagster.md do what the page says; test_spark_assets has that of Spark."""

import runpy
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import dagster as dg
import pandas as pd
import pytest
import yaml

from opendataflow_dagster import (
    DataflowIOManager,
    DataflowResource,
    DataflowTranslator,
    build_definitions,
    dataflow_assets,
)
from opendataflow_dagster.dagster.operator_jobs import operator_jobs
from opendataflow_dagster.model import FAILED, READY
from opendataflow_dagster.store import operations
from opendataflow_dagster.store.registry import add_dataset, policy
from tests.support.dagster_instances import shown_assets, tick_of_reconcile
from tests.support.store_fixtures import put, register, status

EXAMPLES = Path(__file__).parents[1] / "projects" / "dagster_page"
DAY = "2026-11-01"

pytestmark = pytest.mark.filterwarnings(  # of Dagster itself
    "ignore:InitResourceContext.dagster_run is deprecated"
)

Load = Callable[[str], dict[str, Any]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a module of the page, in a copy of its folder with a day of sales."""
    folder = tmp_path / "project"
    shutil.copytree(EXAMPLES, folder)
    (folder / "data" / "sales").mkdir(parents=True)
    (folder / "data" / "sales" / f"{DAY}.csv").write_text("shop,amount\na,1\nb,\na,2\n")
    monkeypatch.chdir(folder)
    return lambda name: runpy.run_path(str(folder / f"{name}.py"))


@pytest.fixture
def dataflow(load: Load) -> DataflowResource:
    sales = Path("data", "sales").absolute()
    return DataflowResource.ephemeral(ready={"sales": [DAY]}, places={"sales": sales})


def test_the_jobs_of_a_flow(load: Load) -> None:
    defs = load("definitions")["defs"]
    with dg.DagsterInstance.ephemeral() as instance, closing(DataflowResource().store) as store:
        assert "job count registered" in tick_of_reconcile(defs, instance)
        operations.ready(store, "sales", [DAY])
        tick_of_reconcile(defs, instance)
        done = defs.resolve_implicit_global_asset_job_def().execute_in_process(
            instance=instance, asset_selection=[dg.AssetKey("counts")], partition_key=DAY
        )
        assert done.success
    assert Path("data", "counts", f"{DAY}.txt").read_text() == "4\n"


def test_a_job_in_python_is_added_to_those_of_the_flow(
    load: Load, dataflow: DataflowResource
) -> None:
    module = load("in_python")
    assert dataflow.materialize([module["check"]], DAY).success
    assert status(dataflow.store, "checked", DAY, "check") == READY
    assert policy(dataflow.store, "check")["max_attempts"] == 3
    jobs = {module["defs"].resolve_assets_def(name).op.name for name in ("checked", "counts")}
    assert jobs == {"check", "count"}


@pytest.mark.parametrize(("rows", "then"), [(1, READY), (0, FAILED)])
def test_a_check(load: Load, dataflow: DataflowResource, rows: int, then: str) -> None:
    check = dataflow_assets(
        inputs=["sales"], outputs=["checked"], checks=[load("checks")["has_rows"]]
    )(lambda chunk: pd.DataFrame({"id": range(rows)}))
    done = dataflow.materialize([check], DAY, raise_on_error=False)
    assert done.success is (then == READY)


def test_the_example_of_the_readme(load: Load) -> None:
    dataflow = DataflowResource.ephemeral(
        ready={"checked": [DAY]}, places={"checked": Path("data", "sales").absolute()}
    )
    module = load("total")
    assert dataflow.materialize([module["total"]], DAY).success
    assert status(dataflow.store, "total", DAY, "total") == READY
    assert shown_assets(module["defs"])["counts"]


def test_names_and_looks(load: Load) -> None:
    defs = build_definitions(flow="flow.yml", translator=load("names")["Ours"]())
    counts = defs.resolve_assets_def(dg.AssetKey(["flow", "counts"]))
    assert set(counts.group_names_by_key.values()) == {"warehouse"}


def test_partitions_of_a_project(load: Load) -> None:
    names = load("days")["Ours"]()
    copy = dataflow_assets(job="copy", inputs=["sales"], outputs=["copies"], translator=names)(
        lambda chunk: chunk.dataid.encode()
    )
    dataflow = DataflowResource.ephemeral(ready={"sales": ["2026-11-01", "2026-11-02"]})
    assert dataflow.materialize([copy], "2026-11-01").success
    assert status(dataflow.store, "copies", "2026-11-01", "copy") == READY
    done = dataflow.materialize([copy])
    assert [event.partition for event in done.asset_materializations_for_node("copy")] == [
        "2026-11-02"
    ]
    today = dataflow.store.today()
    assert names.partitions_def("sales").has_partition_key(today)
    assert names.partitions_def("other").name == "dataflow/other"


def test_a_window(load: Load) -> None:
    names = load("newest")["Ours"]()
    assert names.window == 10_000 != DataflowTranslator().window
    assert build_definitions(flow="flow.yml", translator=names).resolve_assets_def("counts")


def test_frames_instead_of_places(load: Load, dataflow: DataflowResource) -> None:
    report, checked = load("frames")["report"], load("in_python")["check"]
    register(dataflow.store, "report", ["checked"], ["report"])
    add_dataset(dataflow.store, "report", hostname=str(Path("data").absolute()))
    manager = DataflowIOManager(dataflow=dataflow)
    done = dataflow.materialize([checked, report], DAY, resources={"dataflow_io_manager": manager})
    assert done.output_for_node("report").to_dict("list") == {"shop": ["a"], "amount": [3]}


def test_two_flows_in_one_location(load: Load) -> None:
    defs = load("two_flows")["defs"]
    dg.Definitions.validate_loadable(defs)
    names = {str(defs.resolve_assets_def(name).partitions_def) for name in ("checked", "counts")}
    assert len(names) == 1


def test_an_operator_asks_what_a_resubmission_would_change(load: Load) -> None:
    dataflow = DataflowResource.ephemeral()
    register(dataflow.store, "check", ["sales"], ["checked"])
    put(dataflow.store, "checked", DAY, READY, jobid="check")
    [job] = [job for job in operator_jobs() if job.name == "opendataflow_resubmit"]
    done = job.execute_in_process(
        run_config=yaml.safe_load(Path("resubmit.yaml").read_text()),
        resources={"dataflow": dataflow},
    )
    assert done.success
    assert status(dataflow.store, "checked", DAY, "check") == READY


def test_the_pipelines_of_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of docs/pipelines.md."""
    page = shutil.copytree(EXAMPLES.parent / "pipelines_page", tmp_path / "page")
    monkeypatch.chdir(page)
    defs = runpy.run_path("definitions.py")["defs"]
    assert shown_assets(defs)["daily_sales_clean"]
