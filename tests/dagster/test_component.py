"""The YAML component: what its attributes do, its state, and what its scaffolder writes."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from traceback import format_exception

import dagster as dg
import pytest
import yaml

from opendataflow_dagster import DataflowResource, OpenDataFlowComponent
from opendataflow_dagster.dagster.component import Scaffolder
from opendataflow_dagster.errors import NoDatabase
from opendataflow_dagster.store.registry import add_dataset
from tests.support.dagster_instances import tick_of_reconcile as ticked
from tests.support.store_fixtures import register

SENSORS = ["opendataflow_catch_up", "opendataflow_reconcile", "opendataflow_settle"]
TYPE = "opendataflow_dagster.OpenDataFlowComponent"
Load = Callable[..., dg.Definitions]

_numbers = count(1)

# Dagster's own loading of a project uses what it warns of itself, and what pydantic does.
pytestmark = [
    pytest.mark.filterwarnings("ignore::dagster.BetaWarning"),
    pytest.mark.filterwarnings("ignore::dagster.PreviewWarning"),
    pytest.mark.filterwarnings("ignore:`parse_obj_as` is deprecated"),
    pytest.mark.filterwarnings("ignore:Multiple components have the same defs state key"),
]


@pytest.fixture
def dataflow(sqlite_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataflowResource]:
    """Tables with bobin → loadbob → bobout, which the environment names."""
    monkeypatch.setenv("BOB_URL", sqlite_url)
    made = DataflowResource(url=sqlite_url)
    made.store.init()
    add_dataset(made.store, "bobin", hostname="/data/in")
    register(made.store, "loadbob", ["bobin"], ["bobout"])
    yield made
    for store in (made.store, made.patient_store(0.0)):
        store.close()
    vars(made.store)["person"].close()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty dg project, importable."""
    name = f"project_{next(_numbers)}"
    root = tmp_path / "project"
    folder = root / name / "defs" / "bob"
    folder.mkdir(parents=True)
    (root / name / "__init__.py").touch()
    (root / name / "defs" / "__init__.py").touch()
    (root / "pyproject.toml").write_text(
        f'[project]\nname = "{name}"\n[tool.dg]\ndirectory_type = "project"\n'
        f'[tool.dg.project]\nroot_module = "{name}"\n'
    )
    monkeypatch.syspath_prepend(str(root))
    return folder


@pytest.fixture
def load(project: Path) -> Load:
    """A function that loads the project with a component of some attributes."""

    def loaded(text: str | None = None, **attributes: object) -> dg.Definitions:
        attributes = {"url": "{{ env.BOB_URL }}", **attributes}
        text = text or yaml.safe_dump({"type": TYPE, "attributes": attributes})
        (project / "defs.yaml").write_text(text)
        tree = dg.ComponentTree.for_project(project.parents[2])
        return tree.build_defs()

    return loaded


@pytest.fixture
def in_dev(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like `dg dev` and `dagster dev` start code locations."""
    monkeypatch.setenv("DAGSTER_IS_DEV_CLI", "1")


def specs(defs: dg.Definitions) -> dict[str, dg.AssetSpec]:
    return {each.key.to_user_string(): each for each in defs.resolve_all_asset_specs()}


def states(project: Path) -> list[Path]:
    return list(project.parent.glob(".local_defs_state/*/state"))


def test_without_attributes_it_shows_what_odf_would_use_here(
    dataflow: DataflowResource, load: Load, monkeypatch: pytest.MonkeyPatch, sqlite_url: str
) -> None:
    monkeypatch.setenv("DATAFLOW_URL", sqlite_url)
    for text in (f"type: {TYPE}\n", f"type: {TYPE}\nattributes: {{}}\n"):
        assert set(specs(load(text))) == {"bobin", "bobout"}


def test_scripts_and_functions_run_jobs(
    dataflow: DataflowResource, load: Load, project: Path
) -> None:
    register(dataflow.store, "report", ["bobout"], ["reported"])
    register(dataflow.store, "sums", ["bobout"], ["summed"])
    (project / "made.py").write_text("def sums(chunk):\n    pass\n")
    (project / "jobs").mkdir()
    for path in (project / "loadbob.sh", project / "jobs" / "report.sh"):
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)

    def made(**attributes: object) -> set[str]:
        graph = load(**attributes).resolve_asset_graph()
        return {key.to_user_string() for key in graph.materializable_asset_keys}

    assert made() == set()
    assert made(scripts={"loadbob": "./loadbob.sh"}) == {"bobout"}
    assert made(scripts={"loadbob": ["./loadbob.sh", "-v"]}) == {"bobout"}
    assert made(scripts={"loadbob": "true"}) == {"bobout"}  # by PATH
    assert made(scripts="jobs") == {"reported"}
    module = f"{project.parents[1].name}.defs.bob.made"
    assert made(functions={"sums": f"{module}.sums"}) == {"summed"}
    assert made(functions={"sums": ".made.sums"}, scripts="./jobs") == {"summed", "reported"}


def test_options_apply_to_their_job(dataflow: DataflowResource, load: Load) -> None:
    retries = {"max_retries": 2, "delay": 3, "backoff": "exponential", "jitter": "full"}
    options = {"pool": "few", "op_tags": {"a": "b"}, "code_version": 3, "kinds": ["shell"]}
    defs = load(
        scripts={"loadbob": "true"}, options={"loadbob": options | {"retry_policy": retries}}
    )
    made = defs.resolve_assets_def("bobout")
    assert (made.op.pool, made.op.tags) == ("few", {"a": "b"})
    assert made.op.retry_policy == dg.RetryPolicy(2, 3, dg.Backoff.EXPONENTIAL, dg.Jitter.FULL)
    [spec] = made.specs
    assert (spec.code_version, spec.kinds >= {"shell"}) == ("3", True)
    with pytest.raises(Exception, match="Error while"):
        load(scripts={"loadbob": "true"}, options={"loadbob": {"poool": "few"}})


@pytest.mark.parametrize("dev", [False, True])
def test_a_flow_needs_no_tables(
    load: Load, project: Path, monkeypatch: pytest.MonkeyPatch, dev: bool
) -> None:
    if dev:
        monkeypatch.setenv("DAGSTER_IS_DEV_CLI", "1")
    (project.parent / "flow.yml").write_text(
        "flow: bob\njobs:\n  loadbob: {in: [bobin], out: [bobout], run: ./bob/loadbob.sh}\n"
    )
    (project / "loadbob.sh").touch(0o755)
    found = load(url="postgresql://nowhere.invalid/etl", flow="../flow.yml").resolve_asset_graph()
    assert {key.to_user_string() for key in found.materializable_asset_keys} == {"bobout"}


def test_the_pipelines_of_a_project_are_assets_and_need_no_tables_to_load(
    dataflow: DataflowResource, load: Load, project: Path, sqlite_url: str
) -> None:
    for name in ("shop", "market"):
        folder = project / name / "pipelines" / f"{name}_daily"
        folder.mkdir(parents=True)
        (folder / "tidy.py").write_text("def run(df):\n    return df\n")
        (project / name / "project.yml").write_text(
            f"name: {name}\npipelines:\n  - slug: {name}_daily\n    sources: [bobout]\n"
            "    transformations: [tidy]\n"
        )
    (project / "shop" / "project.yml").write_text(
        (project / "shop" / "project.yml").read_text() + "  - slug: broken\n"
    )

    defs = load(project="./shop")
    made = defs.resolve_assets_def(dg.AssetKey("shop_daily"))
    assert made.asset_deps[dg.AssetKey("shop_daily")] == {dg.AssetKey("bobout")}
    assert defs.executor is dg.in_process_executor
    both = load(project=["shop", "market"]).resolve_asset_graph()
    assert {key.to_user_string() for key in both.materializable_asset_keys} == {
        "shop_daily",
        "market_daily",
    }
    jobs = {plan for plan in dataflow.catalog().jobs if plan.endswith("_daily")}
    assert jobs == {"shop_daily", "market_daily"}  # the state is written once they are

    Path(sqlite_url.removeprefix("sqlite:///")).unlink()
    assert "shop_daily" in specs(load(project="./shop"))


def test_the_example_of_the_page_of_pipelines(load: Load, project: Path) -> None:
    page = Path(__file__).parents[1] / "projects" / "pipelines_page"
    shutil.copytree(page / "shop", project.parents[2] / "shop")
    assert "daily_sales_clean" in specs(load((page / "defs.yaml").read_text()))


@pytest.mark.parametrize("named", [".summing.sums", ".summing:sums", "./summing.py:sums"])
def test_a_function_of_spark_is_named_by_its_module_or_its_file(
    dataflow: DataflowResource, load: Load, project: Path, named: str
) -> None:
    register(dataflow.store, "sums", ["bobout"], ["summed"])
    (project / "summing.py").write_text(
        "from pyspark.sql import DataFrame\n"
        "def sums(bobout: DataFrame) -> DataFrame:\n    return bobout.groupBy().sum()\n"
    )

    defs = load(functions={"sums": named}, spark={"spark.master": "local[3]"})

    made = defs.resolve_assets_def(dg.AssetKey("summed"))
    assert {"spark"} <= made.specs_by_key[dg.AssetKey("summed")].kinds
    assert "pyspark" in made.required_resource_keys
    resource = (defs.resources or {})["pyspark"]
    assert resource.spark_config == {"spark.master": "local[3]"}
    with pytest.raises(Exception) as raised:
        load(functions={"sums": "./gone.py:sums"})
    assert f"There is no file {project}/./gone.py" in "".join(format_exception(raised.value))


def test_a_translation_sets_names_and_looks_of_datasets(
    dataflow: DataflowResource, load: Load
) -> None:
    found = specs(
        load(
            scripts={"loadbob": "true"},
            translation={
                "key_prefix": ["flow", "bob"],
                "group_name": "{{ data.datasetid }}_group",
                "description": "in {{ data.columns.hostname }}",
                "tags": {"team": "data", "size": 3},
                "owners": ["team:data"],
                "kinds": ["csv"],
                "metadata": {"seen": "{{ spec.group_name }}"},
            },
        )
    )
    bobin, bobout = found["flow/bob/bobin"], found["flow/bob/bobout"]
    assert [dep.asset_key for dep in bobout.deps] == [bobin.key]
    assert (bobin.group_name, bobin.description) == ("bobin_group", "in /data/in")
    assert bobin.tags == {"team": "data", "size": "3", "dagster/kind/csv": ""}
    assert bobout.tags["opendataflow/job"] == "loadbob"
    assert list(bobin.owners) == ["team:data"]
    assert bobin.metadata["seen"] == "bobin"
    assert bobin.metadata["opendataflow/dataset"] == "bobin"
    assert set(specs(load(translation={"key": "x/{{ data.datasetid }}"}))) == {
        "x/bobin",
        "x/bobout",
    }


def test_switches_are_passed_to_build_definitions(dataflow: DataflowResource, load: Load) -> None:
    register(dataflow.store, "daily", ["today"], ["made_daily"])
    given = {"scripts": {"daily": "true"}}

    assert not load(**given, sensors=False, schedules=False).sensors
    assert not load(**given, sensors=False, schedules=False).schedules
    [schedule] = load(**given, automatic=True).schedules or ()
    assert schedule.default_status.name == "RUNNING"  # type: ignore[union-attr]
    assert set(specs(load(jobs=["daily"]))) == {"made_daily"}


@pytest.mark.parametrize("first", ["bob", "zoe"])
@pytest.mark.parametrize("with_flow", [False, True])
def test_components_of_the_same_tables_are_one_location(
    dataflow: DataflowResource, project: Path, first: str, with_flow: bool
) -> None:
    register(dataflow.store, "report", ["bobout"], ["reported"])
    register(dataflow.store, "sums", ["bobout"], ["summed"])
    bob, other = project.parent / first, project.parent / "sums"
    project.rename(bob)
    other.mkdir()
    (other / "flow.yml").write_text(
        "flow: sums\ndatasets: {bobout: {domain: bobin}}\n"
        "jobs: {sums: {in: [bobout], out: [summed], run: 'true'}}\n"
    )
    own = {"flow": "./flow.yml", "elsewhere": ["bobout"]} if with_flow else {}
    for folder, attributes in (
        (bob, {"scripts": {"loadbob": "true", "report": "true"}}),
        (other, own or {"scripts": {"sums": "true"}}),
    ):
        text = {"type": TYPE, "attributes": {"url": "{{ env.BOB_URL }}", **attributes}}
        (folder / "defs.yaml").write_text(yaml.safe_dump(text))

    defs = dg.ComponentTree.for_project(bob.parents[2]).build_defs()

    graph = defs.resolve_asset_graph()
    made = {key.to_user_string() for key in graph.materializable_asset_keys}
    assert made == {"bobout", "reported", "summed"}
    assert {key.to_user_string() for key in graph.external_asset_keys} == {"bobin"}
    names = [sensor.name for sensor in defs.get_repository_def().sensor_defs]
    assert sorted(names) == SENSORS
    if with_flow:
        with dg.DagsterInstance.ephemeral() as instance:
            assert "The tables differ from flow 'sums'" in ticked(defs, instance)


def test_components_of_different_tables_are_refused_in_a_line(
    dataflow: DataflowResource, load: Load, project: Path
) -> None:
    (project.parent / "other").mkdir()
    (project.parent / "other" / "defs.yaml").write_text(
        yaml.safe_dump({"type": TYPE, "attributes": {"url": "sqlite:///other.db"}})
    )
    with pytest.raises(Exception, match="Error while") as raised:
        load()
    assert "A code location uses one database: put the others" in "".join(
        format_exception(raised.value)
    )


# --- the state ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("in_dev")
def test_in_dev_each_start_reads_the_registrations(
    dataflow: DataflowResource, load: Load, project: Path
) -> None:
    assert set(specs(load())) == {"bobin", "bobout"}
    assert len(states(project)) == 1
    register(dataflow.store, "report", ["bobout"], ["reported"])
    assert set(specs(load())) == {"bobin", "bobout", "reported"}


def test_a_deployment_loads_from_the_state_without_the_database(
    dataflow: DataflowResource, load: Load, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as dev:
        dev.setenv("DAGSTER_IS_DEV_CLI", "1")
        load(scripts={"loadbob": "true"})
    register(dataflow.store, "report", ["bobout"], ["reported"])
    read = []
    monkeypatch.setattr(DataflowResource, "catalog", lambda self: read.append(self))

    assert set(specs(load(scripts={"loadbob": "true"}))) == {"bobin", "bobout"}
    assert read == []


@pytest.mark.usefixtures("in_dev")
def test_with_the_database_away_the_last_registrations_stay(
    dataflow: DataflowResource,
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = set(specs(load()))

    def away(self: DataflowResource) -> None:
        raise NoDatabase("It is away. Run `odf doctor`.")

    monkeypatch.setattr(DataflowResource, "catalog", away)
    assert set(specs(load())) == before
    assert "Showing what was registered before: It is away" in caplog.text


@pytest.mark.usefixtures("in_dev")
def test_without_any_database_other_components_load_and_a_line_says_what_to_do(
    load: Load,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("BOB_URL", "sqlite:////nowhere/to/be/found.db")
    assert specs(load(scripts={"loadbob": "true"})) == {}
    assert "Run `odf init` to create it" in caplog.text
    monkeypatch.delenv("DAGSTER_IS_DEV_CLI")
    component = OpenDataFlowComponent(url="sqlite:////nowhere/to/be/found.db")
    with pytest.raises(NoDatabase, match="Run `odf init`"):  # as `dg utils refresh-defs-state`
        component.write_state_to_path(tmp_path / "state")


def test_the_states_key_holds_no_password_and_no_folder_of_one_machine() -> None:
    def key(**attributes: str) -> str:
        return OpenDataFlowComponent(**attributes).defs_state_config.key

    assert key() == "OpenDataFlowComponent[here]"
    assert "secret" not in key(url="postgresql://me:secret@db1/flow")
    assert key(url="postgresql://me@db1/flow") != key(url="postgresql://me@db2/flow")
    assert key(config="/a/b/c/d.properties") == key(config="/x/c/d.properties")
    assert key(schema_name="one") != key(schema_name="two")


# --- what `dg` says -----------------------------------------------------------------------------


def dg_command(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `dg` in a project, as a person would; it finds the component by its entry point."""
    return subprocess.run(
        [Path(sys.executable).parent / "dg", *words],
        cwd=root,
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"DAGSTER_HOME": str(root.parent)},
    )


def test_the_scaffolded_file_is_explained_and_valid(
    dataflow: DataflowResource, project: Path, monkeypatch: pytest.MonkeyPatch, sqlite_url: str
) -> None:
    monkeypatch.setenv("DATAFLOW_URL", sqlite_url)
    root = project.parents[2]

    made = dg_command(root, "scaffold", "defs", TYPE, "flow")
    assert made.returncode == 0, made.stderr
    text = (project.parent / "flow" / "defs.yaml").read_text()
    assert "# What runs the jobs" in text
    project.rmdir()

    checked = dg_command(root, "check", "yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr

    (project.parent / "flow" / "defs.yaml").write_text(f"type: {TYPE}\nattributes:\n  script: x\n")
    checked = dg_command(root, "check", "yaml")
    assert checked.returncode == 1
    assert "'script' was unexpected" in checked.stdout + checked.stderr


def test_every_commented_line_of_the_scaffold_is_valid(
    dataflow: DataflowResource, load: Load, project: Path
) -> None:
    request = dg.ScaffoldRequest(
        type_name=TYPE, target_path=project, scaffold_format="yaml", project_root=None, params=None
    )
    Scaffolder().scaffold(request)
    text = (project / "defs.yaml").read_text()
    uncommented = re.sub(r"^  # ( *\w+: ?.*)$", r"  \1", text, flags=re.MULTILINE)
    attributes = yaml.safe_load(uncommented)["attributes"]

    assert set(attributes) == {
        "url",
        "config",
        "flow",
        "scripts",
        "functions",
        "options",
        "project",
        "spark",
        "translation",
        "sensors",
        "schedules",
        "operators",
        "automatic",
    }
    assert set(attributes) <= set(OpenDataFlowComponent.model_fields)
    OpenDataFlowComponent.model().model_validate(attributes)
