"""Everything in one call: what `build_definitions` builds, merges and refuses."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from opendataflow_dagster import (
    Chunk,
    DataflowIOManager,
    DataflowResource,
    DataflowTranslator,
    build_definitions,
    dataflow_assets,
    dataflow_check,
)
from opendataflow_dagster.dagster.versions import STALE_CHECK
from opendataflow_dagster.errors import DataflowError, WrongUse
from tests.support.dagster_instances import shown_assets as shown
from tests.support.dagster_instances import tick_of_reconcile as ticked
from tests.support.postgres import Server
from tests.support.store_fixtures import put, register, status

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def dataflow(sqlite_url: str) -> Iterator[DataflowResource]:
    """Tables with two jobs in a row: bobin → loadbob → bobout → report → reported."""
    made = DataflowResource(url=sqlite_url)
    made.store.init()
    register(made.store, "loadbob", ["bobin"], ["bobout"])
    register(made.store, "report", ["bobout"], ["reported"])
    yield made
    for store in (made.store, made.patient_store(0.0)):
        store.close()
    if "person" in vars(made.store):
        vars(made.store)["person"].close()


def script(name: str, text: str = "exit 0", mode: int = 0o755) -> Path:
    """A script in the test's folder."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(mode)
    return path


def make(chunk: Chunk) -> None:
    """Produce nothing for a chunk."""


def test_all_datasets_are_assets_and_those_of_jobs_here_can_be_materialized(
    dataflow: DataflowResource,
) -> None:
    defs = build_definitions(
        dataflow, functions={"report": make}, scripts={"loadbob": script("loadbob.sh")}
    )

    assert shown(defs) == {"bobin": False, "bobout": True, "reported": True}
    assert {each.name for each in defs.sensors or ()} == {
        "opendataflow_reconcile",
        "opendataflow_catch_up",
        "opendataflow_settle",
    }
    resources = defs.resources or {}
    assert resources["dataflow"] is dataflow
    assert isinstance(resources["dataflow_io_manager"], DataflowIOManager)
    dg.Definitions.validate_loadable(defs)


def test_sensors_that_launch_runs_are_off_by_default(
    dataflow: DataflowResource,
) -> None:
    register(dataflow.store, "daily", ["today", "bobin"], ["made_daily"])

    def running(automatic: bool) -> set[str]:
        defs = build_definitions(dataflow, functions={"daily": make}, automatic=automatic)
        return {
            each.name
            for each in [*(defs.sensors or ()), *(defs.schedules or ())]
            if getattr(each, "default_status", None).name == "RUNNING"  # type: ignore[union-attr]
        }

    always = {
        "opendataflow_reconcile",
        "opendataflow_settle",
    }
    assert running(False) == always
    assert running(True) == always | {"opendataflow_catch_up", "opendataflow_today_daily"}


def test_a_run_produces_the_chunk_with_the_script(dataflow: DataflowResource) -> None:
    put(dataflow.store, "bobin", "7")
    made = script("jobs/loadbob.sh", 'echo "$dataid" > made.txt')
    defs = build_definitions(dataflow, scripts=str(made.parent))
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("dataflow/bobin", ["7"])
        job = defs.resolve_implicit_global_asset_job_def()
        selected = [dg.AssetKey("bobout")]
        done = job.execute_in_process(
            instance=instance, asset_selection=selected, partition_key="7"
        )

    assert done.success
    assert Path("made.txt").read_text() == "7\n"
    assert status(dataflow.store, "bobout", "7", "loadbob") == "READY"


def test_in_a_folder_executables_named_like_a_job_run_it(
    dataflow: DataflowResource,
) -> None:
    for name in ("loadbob.py", "loadbob.sh~", "setup.sh", ".hidden"):
        script(f"jobs/{name}")
    script("jobs/report.sql", mode=0o644)
    Path("jobs/report").mkdir()

    assert shown(build_definitions(dataflow, scripts="jobs")) == {
        "bobin": False,
        "bobout": True,
        "reported": False,
    }

    script("jobs/loadbob.sh")
    with pytest.raises(WrongUse, match=r"Job 'loadbob' is given twice: by script \S+loadbob.py"):
        build_definitions(dataflow, scripts=Path("jobs"))


def test_a_relative_script_is_found_from_another_folder_later(
    dataflow: DataflowResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(dataflow.store, "bobin", "7")
    script("loadbob.sh", 'echo "$1" > told.txt')
    defs = build_definitions(dataflow, scripts={"loadbob": ["./loadbob.sh", "told"]})
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("dataflow/bobin", ["7"])
        job = defs.resolve_implicit_global_asset_job_def()
        job.execute_in_process(
            instance=instance, asset_selection=[dg.AssetKey("bobout")], partition_key="7"
        )

    assert Path("told.txt").read_text() == "told\n"


def test_the_argument_jobs_leaves_out_unrelated_datasets(dataflow: DataflowResource) -> None:
    register(dataflow.store, "third", ["reported"], ["thrice"])

    assert shown(build_definitions(dataflow, jobs=["report"])) == {
        "bobout": False,
        "reported": False,
    }
    assert set(shown(build_definitions(dataflow, jobs=["third"], functions={"report": make}))) == {
        "bobout",
        "reported",
        "thrice",
    }


def test_a_location_on_an_empty_database_loads() -> None:
    made = DataflowResource(url="sqlite:///empty.db")
    made.store.init()

    assert shown(build_definitions(made)) == {}
    dg.Definitions.validate_loadable(build_definitions(made, scripts="."))


# --- a project that has been there before -------------------------------------------------------


def test_it_merges_with_a_projects_own_definitions(dataflow: DataflowResource) -> None:
    @dg.asset
    def mine(dataflow: DataflowResource) -> int:
        return len(dataflow.catalog().jobs)

    @dataflow_assets(job="report", dataflow=dataflow)
    def report(chunk: Chunk) -> None: ...

    own = dg.Definitions(
        assets=[mine],
        schedules=[dg.ScheduleDefinition(name="own", target=[mine], cron_schedule="0 6 * * *")],
        resources={"dataflow": dataflow, "io_manager": dg.mem_io_manager},
        executor=dg.in_process_executor,
    )
    merged = dg.Definitions.merge(own, build_definitions(dataflow, assets=[report]))

    dg.Definitions.validate_loadable(merged)
    assert shown(merged) == {"mine": True, "bobin": False, "bobout": False, "reported": True}
    with dg.DagsterInstance.ephemeral() as instance:
        job = merged.resolve_implicit_global_asset_job_def()
        done = job.execute_in_process(
            instance=instance, asset_selection=[dg.AssetKey("mine")], raise_on_error=True
        )
    assert done.output_for_node("mine") == 2


def test_a_projects_other_assets_are_kept(dataflow: DataflowResource) -> None:
    partitions = DataflowTranslator().partitions_def("bobin")

    @dg.asset(name="bobout", partitions_def=partitions, io_manager_key="dataflow_io_manager")
    def plain() -> bytes:
        return b""

    defs = build_definitions(
        dataflow, assets=[plain, dg.AssetSpec("another")], functions={"report": make}
    )

    assert shown(defs) == {"another": False, "bobin": False, "bobout": True, "reported": True}
    dg.Definitions.validate_loadable(defs)


def test_a_translators_names_are_used_everywhere(dataflow: DataflowResource) -> None:
    class Prefixed(DataflowTranslator):
        def asset_key(self, datasetid: str) -> dg.AssetKey:
            return super().asset_key(datasetid).with_prefix("flow")

        def metadata(self, dataset, jobid):
            return {}

    @dataflow_assets(job="report", dataflow=dataflow, translator=Prefixed())
    def report(chunk: Chunk) -> None: ...

    defs = build_definitions(dataflow, assets=[report], translator=Prefixed())
    assert shown(defs) == {"flow/bobin": False, "flow/bobout": False, "flow/reported": True}
    with pytest.raises(WrongUse, match="Job 'report' is given twice"):
        build_definitions(
            dataflow, assets=[report], translator=Prefixed(), functions={"report": make}
        )


def test_checks_go_to_the_job_that_writes_their_dataset(dataflow: DataflowResource) -> None:
    @dataflow_check(dataset="bobout")
    def has_rows(chunk: Chunk) -> bool:
        return True

    given = {"loadbob": script("loadbob.sh")}
    defs = build_definitions(dataflow, scripts=given, functions={"report": make}, checks=[has_rows])
    keys = defs.resolve_asset_graph().asset_check_keys
    assert {(each.asset_key.to_user_string(), each.name) for each in keys} == {
        ("bobout", "has_rows"),
        ("bobout", STALE_CHECK),
        ("reported", STALE_CHECK),
    }
    with pytest.raises(WrongUse, match="Check 'has_rows' is for dataset 'bobout', which"):
        build_definitions(dataflow, functions={"report": make}, checks=[has_rows])

    @dataflow_assets(job="loadbob", dataflow=dataflow)
    def loadbob(chunk: Chunk) -> None: ...

    with pytest.raises(WrongUse, match=r"or give it to @dataflow_assets\(checks=…\)"):
        build_definitions(dataflow, assets=[loadbob], checks=[has_rows])


# --- what is refused, in one line ---------------------------------------------------------------


def test_bad_input_gets_one_clear_line(dataflow: DataflowResource) -> None:
    good = script("loadbob.sh")
    script("plain.sh", mode=0o644)
    register(dataflow.store, "again", ["bobin"], ["bobout"])

    @dataflow_assets(job="loadbob", dataflow=dataflow)
    def loadbob(chunk: Chunk) -> None: ...

    class Other(DataflowTranslator):
        def asset_key(self, datasetid: str) -> dg.AssetKey:
            return dg.AssetKey(["other", datasetid])

    class Same(DataflowTranslator):
        def asset_key(self, datasetid: str) -> dg.AssetKey:
            return dg.AssetKey("same")

    @dg.asset(name="bobout")
    def mine() -> None: ...

    refused = {
        r"The script of job 'loadbob' cannot start: \S+/gone.sh: not found.": {
            "scripts": {"loadbob": "./gone.sh"}
        },
        r"The script of job 'loadbob' cannot start: \S+plain.sh: not executable: run `chmod": {
            "scripts": {"loadbob": ["./plain.sh", "-x"]}
        },
        r"The script of job 'loadbob' cannot start: loadbob.sh: not found in PATH; for the file "
        r"in this folder write ./loadbob.sh": {"scripts": {"loadbob": "loadbob.sh"}},
        r"The script of job 'loadbob' is empty": {"scripts": {"loadbob": []}},
        r"The folder of scripts 'nowhere' can't be read: No such file": {"scripts": "nowhere"},
        r"Job 'loadbob' is given twice: by the assets of @dataflow_assets and by script": {
            "assets": [loadbob],
            "scripts": {"loadbob": good},
        },
        r"Job 'loadbob' is given twice: by function make and by script": {
            "functions": {"loadbob": make},
            "scripts": {"loadbob": good},
        },
        r"Jobs 'again' and 'loadbob' both write 'bobout'": {
            "functions": {"loadbob": make, "again": make}
        },
        r"Asset 'bobout' is defined twice": {"assets": [mine], "functions": {"loadbob": make}},
        r"The translator names the asset of dataset 'bobout' 'other/bobout', but it is 'bobout'": {
            "assets": [loadbob],
            "translator": Other(),
        },
        r"The translator gives datasets 'bobin' and 'bobout' the same asset key, 'same'": {
            "translator": Same()
        },
        r"Job 'loadbob' needs a function, but got: AssetsDefinition": {
            "functions": {"loadbob": loadbob}
        },
    }
    for message, given in refused.items():
        with pytest.raises(DataflowError, match=message) as refusal:
            build_definitions(dataflow, **given)
        assert len(str(refusal.value).splitlines()) == 1


def test_a_job_that_isnt_registered_costs_a_warning(
    dataflow: DataflowResource, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(30):
        register(dataflow.store, f"job{number}", ["bobin"], [f"made{number}"])

    @dataflow_assets(job="unknown", dataflow=dataflow)
    def mine(chunk: Chunk) -> None: ...

    @dataflow_check(dataset="never")
    def is_good(chunk: Chunk) -> bool:
        return True

    ours = build_definitions(
        dataflow,
        assets=[mine],
        functions={"report": make, "nope": make},
        scripts={"lodbob": script("loadbob.sh")},
        checks=[is_good],
        jobs=["report", "gone"],
    )

    @dg.asset
    def shops() -> list[str]:
        return ["north"]

    merged = dg.Definitions.merge(dg.Definitions(assets=[shops, mine]), ours)
    dg.Definitions.validate_loadable(merged)
    assert shown(merged) == {"shops": True, "reported": True, "bobout": False}
    told = [record.getMessage() for record in caplog.records]
    for line in (
        "Job 'unknown' isn't registered, so it can't be an asset. Run: odf job add unknown --in",
        "Job 'nope' isn't registered, but function make is for it. Registered: job0, ",
        "Job 'lodbob' isn't registered, but script ",
        " is for it. Did you mean 'loadbob'? Registered: job0, job1,",
        "Job 'gone' isn't registered, but `jobs` is for it.",
        "Check 'is_good' is for dataset 'never', which no function or script here writes.",
    ):
        assert any(line in message for message in told), (line, told)
    assert any(" and 22 more. Run: odf job add nope" in message for message in told)


def test_the_sensor_names_the_jobs_that_were_left_out(dataflow: DataflowResource) -> None:
    defs = build_definitions(dataflow, functions={"report": make, "late": make})

    with dg.DagsterInstance.ephemeral() as instance:
        left_out = ticked(defs, instance)
        register(dataflow.store, "late", ["bobin"], ["made_late"])
        assert "Job 'late' isn't registered, but function make is for it." in left_out
        assert "Run: odf job add late --in DATASET --out DATASET" in left_out
        assert "'late': registered meanwhile. Reload this code location." in ticked(defs, instance)


def test_with_the_database_away_pages_show_the_last_known_catalog(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # Not the server that all tests share: Dagster may still ask it for the state of definitions.
    with Server() as server:
        dataflow = DataflowResource(url=server.url())
        dataflow.store.init()
        register(dataflow.store, "loadbob", ["bobin"], ["bobout"])
        before = shown(build_definitions(dataflow, functions={"loadbob": make}))
        vars(dataflow.store).pop("person").close()
        dataflow.store.close()
        server.stop("immediate")

        assert shown(build_definitions(dataflow, functions={"loadbob": make})) == before
        assert "can't be read" in caplog.text

        unseen = DataflowResource(url=server.url(), schema_="never_seen")
        defs = build_definitions(
            unseen, assets=[dg.AssetSpec("plain")], functions={"loadbob": make}
        )
        assert set(shown(defs)) == {"plain"}
        assert "Job 'loadbob' can't be an asset: what is registered in" in caplog.text
        dataflow.patient_store(0.0).close()


def test_tables_that_cant_be_read_cost_their_own_assets_and_a_line(tmp_path: Path) -> None:
    dataflow = DataflowResource(url=f"sqlite:///{tmp_path}/later.db")
    defs = build_definitions(dataflow, assets=[dg.AssetSpec("plain")], scripts={"loadbob": "true"})
    assert set(shown(defs)) == {"plain"}
    with dg.DagsterInstance.ephemeral() as instance:
        assert "There is no database at" in ticked(defs, instance)
        dataflow.store.init()
        assert "When this code location was loaded, what is registered in" in ticked(defs, instance)
        assert "Reload it." in ticked(defs, instance)
    dataflow.store.close()
    dataflow.patient_store(0.0).close()


# --- this repository's own location -------------------------------------------------------------


def test_this_repositorys_location_shows_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = tmp_path / "demo"
    monkeypatch.setenv("ODF_DEMO", str(demo))
    environ = os.environ | {"DATAFLOW_URL": f"sqlite:///{demo}/.dataflow/dataflow.db"}

    def odf(*words: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "opendataflow_dagster.cli", *words],
            env=environ,
            check=True,
            capture_output=True,
        )

    demo.mkdir()
    odf("init")
    odf("job", "add", "check", "--in", "sales", "--out", "checked")
    odf("job", "add", "report", "--in", "checked", "--out", "report")
    for name in ("check", "report"):
        script(f"{demo}/{name}.sh")

    dagster = Path(sys.executable).parent / "dagster"
    done = subprocess.run(
        [dagster, "definitions", "validate", "-w", "workspace.yaml"],
        cwd=ROOT,
        env=os.environ | {"DAGSTER_HOME": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(str(ROOT))
    from definitions import defs

    assert shown(defs) == {"sales": False, "checked": True, "report": True}


def test_the_ui_doesnt_start_on_a_port_that_is_taken(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for told, message in {
            str(port): f"Port {port} is taken by another program. Choose another: make ui PORT=",
            "http": "PORT=http is no port. Give a number",
        }.items():
            done = subprocess.run(
                [ROOT / "definitions" / "ui.sh"],
                check=False,
                capture_output=True,
                text=True,
                env=os.environ | {"PORT": told, "ODF_DEMO": str(tmp_path / "demo")},
            )
            assert done.returncode == 1
            assert message in done.stderr
    assert not (tmp_path / "demo").exists()
