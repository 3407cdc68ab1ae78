"""Several calls of `build_definitions` in one code location: one resource, one of each sensor."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from opendataflow_dagster import DataflowResource, Flow, Job, build_definitions
from opendataflow_dagster.cli.app import app
from opendataflow_dagster.dagster.translator import DataflowTranslator
from tests.support.dagster_instances import tick_of_reconcile as ticked
from tests.support.store_fixtures import put, register, status

SENSORS = ["opendataflow_catch_up", "opendataflow_reconcile", "opendataflow_settle"]


@pytest.fixture
def url(sqlite_url: str) -> Iterator[str]:
    made = DataflowResource(url=sqlite_url)
    made.store.init()
    yield sqlite_url
    made.store.close()
    if person := vars(made.store).pop("person", None):
        person.close()


def flow(name: str, inputs: list[str], outputs: list[str]) -> Flow:
    return Flow(name, jobs=[Job(name, inputs=inputs, outputs=outputs, run="true")])


def sensors(defs: dg.Definitions) -> list[str]:
    return sorted(sensor.name for sensor in defs.get_repository_def().sensor_defs)


def assets(defs: dg.Definitions) -> dict[str, bool]:
    graph = defs.resolve_asset_graph()
    return {
        key.to_user_string(): key in graph.materializable_asset_keys
        for key in graph.get_all_asset_keys()
    }


class Prefixed(DataflowTranslator):
    def asset_key(self, datasetid: str) -> dg.AssetKey:
        return dg.AssetKey(["ours", datasetid])


@pytest.mark.parametrize("translator", [None, Prefixed()])
def test_two_calls_on_the_same_tables_are_one_location(
    url: str, translator: DataflowTranslator | None
) -> None:
    defs = dg.Definitions.merge(
        build_definitions(DataflowResource(url=url), flow=flow("one", ["a"], ["b"]), apply=True),
        build_definitions(
            DataflowResource(url=url),
            flow=flow("two", ["p"], ["q"]),
            apply=True,
            translator=translator,
        ),
        dg.Definitions(assets=[dg.AssetSpec("plain")]),
    )
    prefix = "ours/" if translator else ""
    assert assets(defs) == {
        "a": False,
        "b": True,
        f"{prefix}p": False,
        f"{prefix}q": True,
        "plain": False,
    }
    assert sensors(defs) == SENSORS

    store = DataflowResource(url=url).store
    with dg.DagsterInstance.ephemeral() as instance:
        first = ticked(defs, instance)
        assert "Flow 'one': " in first
        assert "Flow 'two': " in first
        put(store, "a", "1")
        put(store, "p", "2")
        assert "2 chunks mirrored: 2 ready" in ticked(defs, instance)
        shown = instance.get_materialized_partitions(dg.AssetKey(["ours", "p"] if prefix else "p"))
        assert shown == {"2"}

        repository = defs.get_repository_def()
        catch_up = repository.get_sensor_def("opendataflow_catch_up")
        selected = catch_up.asset_selection
        assert selected is not None
        keys = selected.resolve(defs.resolve_asset_graph())
        assert {key.to_user_string() for key in keys} == {"b", f"{prefix}q"}
        with dg.build_sensor_context(instance=instance, repository_def=repository) as context:
            requests = catch_up.evaluate_tick(context).run_requests or []
        job = defs.resolve_implicit_global_asset_job_def()
        for request in requests:
            done = job.execute_in_process(
                instance=instance, asset_selection=request.asset_selection, tags=request.tags
            )
            assert done.success
        assert status(store, "b", "1", "one") == status(store, "q", "2", "two") == "READY"


def test_a_part_that_isnt_merged_has_no_effect(url: str) -> None:
    one = build_definitions(DataflowResource(url=url), flow=flow("one", ["a"], ["b"]), apply=True)
    two = build_definitions(DataflowResource(url=url), flow=flow("two", ["p"], ["q"]), apply=True)
    assert set(assets(one)) == {"a", "b"}
    with dg.DagsterInstance.ephemeral() as instance:
        assert "Flow 'two'" not in ticked(one, instance)
        assert "Flow 'two'" in ticked(two, instance)


def test_datasets_that_another_call_produces_are_left_to_it(url: str) -> None:
    dataflow = DataflowResource(url=url)
    register(dataflow.store, "load", ["raw"], ["loaded"])
    register(dataflow.store, "sum", ["loaded"], ["total"])
    calls: list[dict[str, Any]] = [
        {"scripts": {"load": "true"}, "elsewhere": ["sum"]},
        {"functions": {"sum": lambda chunk: None}, "elsewhere": ["loaded"]},
    ]
    defs = dg.Definitions.merge(*(build_definitions(dataflow, **each) for each in calls))
    assert assets(defs) == {"raw": False, "loaded": True, "total": True}
    assert sensors(defs) == SENSORS


def test_an_io_manager_may_be_shared(url: str) -> None:
    manager = dg.FilesystemIOManager()
    defs = dg.Definitions.merge(
        build_definitions(flow=flow("one", ["a"], ["b"]), io_manager=manager),
        build_definitions(flow=flow("two", ["p"], ["q"]), io_manager=manager),
    )
    assert (defs.resources or {})["dataflow_io_manager"] is manager
    assert len(assets(defs)) == 4


def test_with_several_merged_flows_apply_asks_which(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "several_flows.py").write_text(
        "import dagster as dg\n"
        "from opendataflow_dagster import Flow, Job, build_definitions\n"
        "def of(name):\n"
        "    job = Job(name, inputs=[name + '_in'], outputs=[name + '_out'], run='true')\n"
        "    return build_definitions(flow=Flow(name, jobs=[job]))\n"
        "one = of('one')\n"
        "other = dg.Definitions.merge(dg.Definitions(), one)\n"
        "both = dg.Definitions.merge(one, of('two'))\n"
    )
    monkeypatch.setenv("DATAFLOW_URL", url)
    for name in ("one", "other"):
        done = CliRunner().invoke(app, ["plan", "--file", f"several_flows.py:{name}"])
        assert "+ job      one" in done.output, done.output
    done = CliRunner().invoke(app, ["plan", "--file", "several_flows.py:both"])
    assert done.exit_code != 0
    assert "These definitions are merged from several flows: 'one', 'two'." in done.output


def test_a_file_named_like_another_module_is_refused_without_importing_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "installed" / "same_name").mkdir(parents=True)
    (tmp_path / "installed" / "same_name" / "__init__.py").write_text(
        "raise SystemExit('imported')"
    )
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "same_name.py").write_text("")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "installed"), *sys.path, str(Path.cwd())])
    done = CliRunner().invoke(app, ["plan", "--file", "same_name.py:defs"])
    assert "same_name.py has the same name as the module " in done.output
    assert "Rename the file." in done.output
