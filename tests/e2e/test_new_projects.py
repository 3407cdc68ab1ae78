"""`odf new`: the kinds that start Spark or Dagster do what their READMEs say."""

import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import dagster as dg
import pytest

from opendataflow_dagster import DataflowResource
from tests.support.new_projects import play


def odf(*words: str, cwd: str = ".") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "opendataflow_dagster.cli", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def ready_chunks(folder: str) -> str:
    return odf(
        "sql",
        "select datasetid, count(*) from datastatus where status = 'READY' group by datasetid "
        "order by datasetid",
        cwd=folder,
    )


def test_the_kind_spark() -> None:
    odf("new", "my shop", "--kind", "spark")
    play(Path("my shop"))
    assert ready_chunks("my shop").split()[-6:] == ["checked", "3", "report", "3", "sales", "3"]
    assert list(Path("my shop/data/report").rglob("*.parquet"))
    asked = odf("sql", "select checks from chunkfact where datasetid = 'report'", cwd="my shop")
    assert asked.splitlines()[1:] == ["rows passed"] * 3


def test_the_kind_pipeline() -> None:
    odf("new", "my shop")
    play(Path("my shop"))
    assert Path("my shop/output/clean_contacts.csv").exists()


DEVELOP = "dagster dev"
MODULES = ("definitions", "flow_jobs", "mine")


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of a new project are imported from its folder, and forgotten."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] in MODULES]:
            del sys.modules[name]

    monkeypatch.setattr(sys, "path", list(sys.path))
    forget()
    yield
    forget()


@pytest.mark.usefixtures("imports")
def test_the_kind_dagster(monkeypatch: pytest.MonkeyPatch) -> None:
    odf("new", "my shop", "--kind", "dagster")
    lines = play(Path("my shop"), skip=lambda line: line == DEVELOP)
    # `odf new`, `cd`, and these: five commands from an empty folder to a green square.
    assert lines.index(DEVELOP) == 2
    monkeypatch.chdir("my shop")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    defs = import_module("definitions").defs
    with dg.DagsterInstance.ephemeral() as instance:
        requests = launched(defs, instance)
        assert [request.asset_selection for request in requests] == [[dg.AssetKey("checked")]]
        for asset in ("checked", "report"):
            done = defs.resolve_implicit_global_asset_job_def().execute_in_process(
                instance=instance,
                asset_selection=[dg.AssetKey(asset)],
                partition_key="2026-03-02",
            )
            assert done.success
    [report] = Path("data/report/dataid=2026-03-02").glob("*.csv")
    assert report.read_text() == "shop,cents\nnorth,875\nsouth,1120\n"
    assert "report" in ready_chunks(".")
    DataflowResource().store.close()


def launched(defs: dg.Definitions, instance: dg.DagsterInstance) -> list[dg.RunRequest]:
    """What the sensors launch that are on from the start."""
    repository, requests = defs.get_repository_def(), []
    for sensor in repository.sensor_defs:
        if sensor.name not in ("opendataflow_reconcile", "opendataflow_catch_up"):
            continue
        assert sensor.default_status is dg.DefaultSensorStatus.RUNNING
        with dg.build_sensor_context(instance=instance, repository_def=repository) as context:
            requests += sensor.evaluate_tick(context).run_requests or []
    return requests


PYPROJECT = """\
[project]
name = "mine"
version = "0"
[tool.dg]
directory_type = "project"
[tool.dg.project]
root_module = "mine"
"""

DEFINITIONS = """\
from pathlib import Path

import dagster as dg

@dg.definitions
def defs():
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
"""


@pytest.mark.usefixtures("imports")
def test_a_project_of_dg_finds_the_flow_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path("my project/src/mine")
    (package / "defs").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "definitions.py").write_text(DEFINITIONS)
    (package / "defs" / "own.py").write_text("import dagster as dg\n\n@dg.asset\ndef own(): ...\n")
    Path("my project/pyproject.toml").write_text(PYPROJECT)
    odf("new", ".", cwd="my project")
    odf("apply", cwd="my project")
    monkeypatch.chdir("my project")
    monkeypatch.syspath_prepend(str(Path("src").resolve()))
    keys = import_module("mine.definitions").defs().resolve_asset_graph().get_all_asset_keys()
    assert {key.to_user_string() for key in keys} == {"own", "sales", "checked", "report"}
    DataflowResource().store.close()
