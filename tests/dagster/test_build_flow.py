"""Definitions from a flow need no database; missing registrations are reported or added."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from click.testing import CliRunner

from opendataflow_dagster import (
    Chunk,
    DataflowResource,
    Dataset,
    Flow,
    Job,
    Result,
    build_definitions,
    dataflow_assets,
    dataflow_check,
)
from opendataflow_dagster.cli.app import app
from opendataflow_dagster.dagster.versions import STALE_CHECK
from opendataflow_dagster.errors import FlowError, WrongUse
from opendataflow_dagster.flow.apply import apply_flow
from opendataflow_dagster.flow.plan import plan_flow
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.store import Store
from tests.support.dagster_instances import shown_assets as assets
from tests.support.dagster_instances import tick_of_reconcile as tick
from tests.support.store_fixtures import close, put, register, status
from tests.support.transcripts import BLOCK, commands

NOWHERE = "postgresql://etl@nowhere.invalid/etl"

FLOW = """\
flow: shop
datasets:
  sales:
    hostname: ${SALES_ROOT}/sales
    format: csv
    description: What the tills send
    owners: [ada@example.com, bob]
    tags: {team: tills, "not a tag": x}
  checked: {hostname: ./checked}
jobs:
  check:
    in: [sales]
    out: [checked]
    run: ./check.sh --strict
    description: Drops broken lines
    owners: [team:data]
    tags: {kind: qa, team: data}
    policy: {max_attempts: 3}
  sum: {in: [checked], out: [sums], python: jobs.py:total}
  daily: {in: [today], out: [days], python: "jobs.py:total", policy: {every_minutes: 60}}
  elsewhere: {in: [checked], out: [mailed], description: By cron on another host}
  load: {in: [checked], out: [loaded], run: ./check.sh, runs_in: cron}
"""

JOBS = '''\
def total(chunk):
    """Sum a chunk."""
    return chunk.dataid.encode()
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project: flow.yml, a script, a module."""
    found = tmp_path / "project"
    found.mkdir()
    (found / "flow.yml").write_text(FLOW)
    (found / "jobs.py").write_text(JOBS)
    (found / "check.sh").write_text('#!/bin/sh\necho "$1 $dataid" > made.txt\n')
    (found / "check.sh").chmod(0o755)
    monkeypatch.chdir(found)
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    return found


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without network, whose DATAFLOW_URL points nowhere."""

    def refuse(*words: Any, **more: Any) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setenv("DATAFLOW_URL", NOWHERE)


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def tables(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The tables that `odf` and the definitions use: there, and empty."""
    monkeypatch.setenv("DATAFLOW_URL", url)
    monkeypatch.setenv("SALES_ROOT", "/data")
    made = open_store(url)
    made.init()
    yield made
    close(made)


def partitions(defs: dg.Definitions, *names: str) -> set[str | None]:
    """Return the names of the partitions definitions of some assets."""
    graph = defs.resolve_asset_graph()
    found = [graph.get(dg.AssetKey(name)).partitions_def for name in names]
    return {each.name for each in found if isinstance(each, dg.DynamicPartitionsDefinition)}


def run(
    defs: dg.Definitions, instance: dg.DagsterInstance, asset: str, partition: str
) -> tuple[bool, str]:
    """Materialize a partition; return whether it succeeded, and what the run says."""
    key, [name] = dg.AssetKey(asset), partitions(defs, asset)
    instance.add_dynamic_partitions(str(name), [partition])
    job = defs.resolve_implicit_global_asset_job_def()
    done = job.execute_in_process(
        instance=instance, asset_selection=[key], partition_key=partition, raise_on_error=False
    )
    failures = [
        event.step_failure_data.user_failure_data.description or ""
        for event in done.all_events
        if event.is_step_failure and event.step_failure_data.user_failure_data
    ]
    return done.success, " ".join(failures)


# --- no database is read --------------------------------------------------------------------------


def test_a_flow_is_assets_without_a_database(folder: Path, no_network: None) -> None:
    defs = build_definitions(flow="flow.yml")
    dg.Definitions.validate_loadable(defs)

    assert assets(defs) == {
        "sales": False,
        "checked": True,
        "sums": True,
        "days": True,
        "mailed": False,
        "loaded": True,
    }
    graph = defs.resolve_asset_graph()
    sales, checked, mailed = (graph.get(dg.AssetKey(key)) for key in ("sales", "checked", "mailed"))
    assert sales.description == "What the tills send"
    assert sales.owners == ["ada@example.com"]
    assert sales.tags == {"team": "tills", "dagster/kind/csv": ""}
    assert sales.metadata["opendataflow/location"] == "${SALES_ROOT}/sales"
    assert (checked.description or "").startswith("Drops broken lines\n\nJob `check` runs script `")
    assert (graph.get(dg.AssetKey("loaded")).description or "").endswith(
        "check.sh`. Neither Dagster nor `odf work` starts it."
    )
    assert "\n\nJob `sum` runs function `" in (graph.get(dg.AssetKey("sums")).description or "")
    assert checked.owners == ["team:data"]
    assert {**checked.tags, "kind": "qa", "team": "data"} == dict(checked.tags)
    assert {key.to_user_string() for key in mailed.parent_keys} == {"checked"}
    assert partitions(defs, "sales", "checked", "mailed") == {"dataflow/sales"}
    assert defs.resolve_schedule_def("opendataflow_today_daily").cron_schedule == "1 */1 * * *"


def test_without_its_properties_file_it_loads_and_the_sensor_says_so(
    folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATAFLOW_PROPERTIES", "/nowhere/dataflow.properties")
    defs = build_definitions(flow="flow.yml")
    dg.Definitions.validate_loadable(defs)
    assert "/nowhere/dataflow.properties" in tick(defs, instance)
    succeeded, why = run(defs, instance, "checked", "1")
    assert not succeeded
    assert "/nowhere/dataflow.properties" in why


def test_flow_in_python_and_jobs_of_decorators_share_their_domain(no_network: None) -> None:
    @dataflow_assets(inputs=["checked"], outputs=[Dataset("sums", hostname="/data/sums")])
    def total(chunk: Chunk) -> None:
        """Sum a chunk."""

    @dataflow_check(dataset="sums")
    def is_good(chunk: Chunk) -> bool:
        return True

    @dataflow_assets(
        job="report", inputs=["sums", "today"], outputs=["reported"], policy={"max_attempts": 2}
    )
    def anything(chunk: Chunk) -> None: ...

    @dg.asset
    def own() -> None: ...

    flow = Flow(
        "shop",
        datasets=[Dataset("sales", hostname="/data/sales")],
        jobs=[Job("check", inputs=["sales"], outputs=["checked"])],
    )
    defs = build_definitions(flow=flow, assets=[total, anything, own])

    assert assets(defs) == {
        "sales": False,
        "checked": False,
        "sums": True,
        "reported": True,
        "own": True,
    }
    assert partitions(defs, "sales", "reported") == {"dataflow/sales"}
    assert defs.resolve_assets_def("sums").op.name == "total"

    alone = build_definitions(assets=[total, anything])
    assert assets(alone) == {"checked": False, "sums": True, "reported": True}
    assert partitions(alone, "reported") == {"dataflow/checked"}


def test_the_decorator_builds_assets_from_a_flow_alone(no_network: None) -> None:
    flow = Flow("shop", jobs=[Job("check", inputs=["sales"], outputs=["checked"])])

    @dataflow_assets(job="check", dataflow=flow)
    def check(chunk: Chunk) -> None: ...

    defs = dg.Definitions(assets=[check], resources={"dataflow": DataflowResource()})
    assert assets(defs) == {"checked": True, "sales": False}


def test_functions_of_frames_are_named_by_the_flow(folder: Path, no_network: None) -> None:
    (folder / "frames.py").write_text("def enrich(sales):\n    return sales\n")
    (folder / "flow.yml").write_text(
        "flow: shop\njobs:\n  enrich: {in: [sales], out: [enriched], spark: frames.py:enrich}\n"
    )
    defs = build_definitions(flow="flow.yml")
    assert defs.resolve_asset_graph().get(dg.AssetKey("enriched")).kinds == {"spark"}


def test_jobs_declared_in_python_are_added_to_those_of_the_tables(
    tables: Store, instance: dg.DagsterInstance
) -> None:
    register(tables, "check", ["sales"], ["checked"])

    @dataflow_assets(inputs=["checked"], outputs=[Dataset("sums", domain="sales")])
    def total(chunk: Chunk) -> None: ...

    defs = build_definitions(DataflowResource(), assets=[total])
    assert assets(defs) == {"sales": False, "checked": False, "sums": True}
    assert partitions(defs, "sums") == {"dataflow/sales"}
    lacking = tick(defs, instance)
    assert "2 to add (dataset sums, job total). Run: odf apply --file " in lacking
    assert f"{Path(__file__).name}:defs." in lacking
    succeeded, why = run(defs, instance, "sums", "1")
    assert not succeeded
    assert why.startswith("Job 'total' isn't registered in ")


def test_dg_check_defs_passes_with_the_database_away(folder: Path, tmp_path: Path) -> None:
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "project"\nversion = "1"\n\n[tool.dg]\ndirectory_type = "project"\n\n'
        '[tool.dg.project]\nroot_module = "project"\ncode_location_target_module = "locations"\n'
    )
    (folder / "project").mkdir()
    (folder / "project" / "__init__.py").write_text("")
    (folder / "locations.py").write_text(
        "import socket\n"
        "socket.getaddrinfo = socket.socket.connect = None\n"
        "from opendataflow_dagster import build_definitions\n"
        "defs = build_definitions(flow='flow.yml')\n"
    )
    done = subprocess.run(
        [Path(sys.executable).with_name("dg"), "check", "defs", "--no-check-yaml"],
        cwd=folder,
        env={
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "DATAFLOW_URL": NOWHERE,
            "PYTHONPATH": str(folder),
            "HOME": str(tmp_path),
        },
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# --- what the tables lack -------------------------------------------------------------------------


def test_the_sensor_and_a_run_report_what_the_tables_lack(
    folder: Path, tables: Store, instance: dg.DagsterInstance
) -> None:
    defs = build_definitions(flow="flow.yml")

    lacking = tick(defs, instance)
    assert lacking.startswith(
        "The tables differ from flow 'shop': 7 to add (dataset sales, dataset checked, "
        "job check, job sum, job daily and 2 more). Run: odf apply."
    )
    succeeded, why = run(defs, instance, "checked", "1")
    assert not succeeded
    assert why == f"Job 'check' isn't registered in {tables.db.where}. Run: odf apply"

    applied = CliRunner().invoke(app, ["apply", "--yes"], prog_name="odf")
    assert applied.exit_code == 0, applied.output
    put(tables, "sales", "2")
    assert " mirrored: 1 ready, " in tick(defs, instance)
    assert run(defs, instance, "checked", "2") == (True, "")
    assert Path("made.txt").read_text() == "--strict 2\n"
    assert status(tables, "checked", "2", "check") == "READY"


def test_expectations_of_the_flow_are_checks_that_gate_each_chunk(
    folder: Path, tables: Store, instance: dg.DagsterInstance
) -> None:
    (folder / "flow.yml").write_text(
        "flow: shop\ndatasets:\n"
        "  checked: {hostname: ./checked, expect: {exists: true}}\n"
        "  sums: {hostname: ./sums, format: csv, expect: {exists: true}}\n"
        "  more: {expect: {rows: {min: 2}}}\n"
        "jobs:\n"
        "  check: {in: [sales], out: [checked], run: ./check.sh x}\n"
        "  sum: {in: [sales], out: [sums], python: jobs.py:total}\n"
        "  given: {in: [sales], out: [more], python: jobs.py:total}\n"
    )
    apply_flow(tables, Flow.load("flow.yml"))
    tables.fill()
    for dataid in "12":
        put(tables, "sales", dataid)
    defs = build_definitions(
        flow="flow.yml", functions={"given": lambda chunk: Result(rows=int(chunk.dataid))}
    )

    graph = defs.resolve_asset_graph()
    checks = {(key.asset_key.to_user_string(), key.name) for key in graph.asset_check_keys}
    expected = {("checked", "exists"), ("sums", "exists"), ("more", "rows")}
    assert checks == expected | {(datasetid, STALE_CHECK) for datasetid, _ in expected}
    ok, why = run(defs, instance, "checked", "1")
    assert (ok, status(tables, "checked", "1", "check")) == (False, "FAILED")
    assert f"NOT_VALIDATED: exists: there is no folder {folder}/checked" in why
    (folder / "checked").mkdir()
    (folder / "checked" / "2.csv").touch()
    assert run(defs, instance, "checked", "2") == (True, "")
    assert run(defs, instance, "sums", "1") == (True, "")
    assert "rows: 1, where at least 2 are expected" in run(defs, instance, "more", "1")[1]
    assert run(defs, instance, "more", "2") == (True, "")
    assert status(tables, "more", "2", "given") == "READY"


def test_with_apply_the_first_tick_registers_but_changes_nothing(
    folder: Path, tables: Store, instance: dg.DagsterInstance
) -> None:
    register(tables, "sum", ["sales"], ["sums"])
    defs = build_definitions(flow="flow.yml", apply=True)

    lines = tick(defs, instance)
    assert "job check, job daily, job elsewhere and 1 more registered." in lines
    assert "1 conflict (job sum). Run: odf plan." in lines
    assert tables.read_plan("sum").inputs == ("sales",)
    assert tables.read_plan("check").outputs == ("checked",)
    assert "registered" not in tick(defs, instance)

    put(tables, "sales", "1")
    succeeded, why = run(defs, instance, "sums", "1")
    assert not succeeded
    assert "Job 'sum' is registered with in sales and out sums in " in why
    assert "and its flow says in checked and out sums. Run: odf apply" in why


def test_the_first_tick_creates_the_embedded_tables(
    folder: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SALES_ROOT", "/data")
    defs = build_definitions(flow="flow.yml")

    succeeded, why = run(defs, instance, "checked", "1")
    assert not succeeded
    assert why.startswith("Job 'check' isn't registered: SQLite file ")
    assert why.endswith("dataflow.db has no tables yet. Run: odf apply")
    (folder / ".dataflow").mkdir(exist_ok=True)
    (folder / ".dataflow" / "dataflow.db").touch()  # as a tick leaves it that was killed early
    asked = build_definitions(flow="flow.yml", apply=False)
    assert "dataflow.db has no tables yet. Run: odf apply. Nothing is mirrored" in tick(
        asked, instance
    )
    assert "dataset sales, dataset checked, job check" in tick(defs, instance)
    store = DataflowResource().store
    assert plan_flow(store, Flow.load("flow.yml")).changes == ()
    assert tick(defs, instance) == "The grid agrees with the tables."
    store.close()


def test_a_domain_with_another_name_is_reported_and_nothing_is_registered(
    folder: Path, tables: Store, instance: dg.DagsterInstance
) -> None:
    register(tables, "sums_of", ["archive", "checked"], ["all"])
    lines = tick(build_definitions(flow="flow.yml", apply=True), instance)
    assert (
        "Flow 'shop' isn't applied: Dataset 'sales' can't be applied: its partitions have" in lines
    )
    assert "add `domain: archive` to it at flow.yml:3" in lines
    assert tables.read_plan("check").flaw

    text = FLOW.replace("format: csv", "format: csv\n    domain: archive")
    (folder / "flow.yml").write_text(text)
    defs = build_definitions(flow="flow.yml", apply=True)
    assert partitions(defs, "sales", "sums") == {"dataflow/archive"}
    assert "registered. The grid agrees with the tables." in tick(defs, instance)
    assert not tables.read_plan("check").flaw


def test_a_pipeline_of_the_flow_is_an_asset_and_runs(
    tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(app, ["new", "shop", "--kind", "pipeline"])
    assert made.exit_code == 0, made.output
    (tmp_path / "flow.yml").write_text(
        "flow: shop\njobs:\n  clean_contacts: {out: [contacts_clean], pipeline: ./shop, "
        "engine: local, description: Contacts, policy: {every_minutes: 60}}\n"
    )
    defs = build_definitions(flow="flow.yml", automatic=True)
    assert assets(defs) == {"contacts_clean": True}
    node = defs.resolve_asset_graph().get(dg.AssetKey("contacts_clean"))
    assert (node.description or "").startswith(
        "Contacts\n\nJob `clean_contacts` runs pipeline `clean_contacts`: "
    )

    assert "job clean_contacts registered" in tick(defs, instance)
    repository = defs.get_repository_def()
    catch_up = repository.get_sensor_def("opendataflow_catch_up")
    with dg.build_sensor_context(instance=instance, repository_def=repository) as context:
        [request] = catch_up.evaluate_tick(context).run_requests or []
    job = defs.resolve_implicit_global_asset_job_def()
    done = job.execute_in_process(
        instance=instance, asset_selection=request.asset_selection, tags=request.tags
    )
    assert done.success
    assert (tmp_path / "shop/output/clean_contacts.csv").read_text().count("\n") == 4
    DataflowResource().store.close()


def test_an_unset_variable_is_reported_and_stops_no_tick(
    folder: Path, tables: Store, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SALES_ROOT")
    put(tables, "other", "1")
    lines = tick(build_definitions(flow="flow.yml", apply=True), instance)
    assert lines.startswith("Flow 'shop' isn't applied: flow.yml:3: The environment has no SALES")
    assert lines.endswith("1 chunk mirrored: 1 ready, 1 partition key changed, grid agrees.")


def test_jobs_of_python_are_applied_by_their_file(
    tables: Store, instance: dg.DagsterInstance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "our_definitions.py").write_text(
        "import dagster as dg\n"
        "from opendataflow_dagster import build_definitions, dataflow_assets\n\n\n"
        "@dataflow_assets(inputs=['sales'], outputs=['checked'], policy={'max_attempts': 2})\n"
        "def check(chunk): ...\n\n\n"
        "ours = build_definitions(assets=[check])\n"
        "defs = dg.Definitions.merge(dg.Definitions(), ours)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "our_definitions", raising=False)
    from our_definitions import defs, ours  # type: ignore[import-not-found]

    assert "Run: odf apply --file our_definitions.py:defs." in tick(ours, instance)
    for _ in range(2):
        done = CliRunner().invoke(app, ["apply", "--yes", "--file", "our_definitions.py:defs"])
        assert done.exit_code == 0, done.output
    assert tables.read_plan("check").inputs == ("sales",)
    assert tick(defs, instance) == "The grid agrees with the tables."


def test_dagster_launches_only_its_own_jobs(folder: Path, tables: Store) -> None:
    defs = build_definitions(flow="flow.yml", automatic=True)
    catch_up = defs.resolve_sensor_def("opendataflow_catch_up")
    selected = catch_up.asset_selection
    assert selected is not None
    keys = selected.resolve(defs.resolve_asset_graph())
    assert {key.to_user_string() for key in keys} == {"checked", "sums", "days"}


def test_arguments_of_the_call_override_the_flow(folder: Path, no_network: None) -> None:
    def other(chunk: Chunk) -> None: ...

    defs = build_definitions(flow="flow.yml", functions={"check": other}, jobs=["check", "gone"])
    assert assets(defs) == {"sales": False, "checked": True}
    assert "check.sh" not in (defs.resolve_assets_def("checked").op.description or "")


# --- what is refused, in one line -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("run: ./gone.sh", r"flow.yml:\d+: The script of job 'check' cannot start: \S+gone.sh"),
        ("python: gone.py:fn", r"flow.yml:\d+: Job 'check' names gone.py:fn, but there is no file"),
        ("python: jobs.py:totl", r"jobs.py has no function 'totl'. Did you mean 'total'\?"),
        ("spark: jobs.py:nothing", r"jobs.py has no function 'nothing'"),
        (
            "python: lacking.py:fn",
            r"lacking.py:fn, but that can't be imported: This needs starlette",
        ),
    ],
)
def test_a_fault_in_the_flow_is_reported_with_its_line(
    folder: Path, no_network: None, line: str, message: str
) -> None:
    (folder / "flow.yml").write_text(FLOW.replace("run: ./check.sh --strict", line))
    (folder / "lacking.py").write_text("raise ModuleNotFoundError('no', name='starlette')\n")
    with pytest.raises(FlowError, match=message) as refusal:
        build_definitions(flow="flow.yml")
    assert len(str(refusal.value).splitlines()) == 1


def test_bad_calls_get_one_clear_line(no_network: None) -> None:
    @dataflow_assets(inputs=["a"], outputs=[Dataset("b", hostname="/b")])
    def one(chunk: Chunk) -> None: ...

    flow = Flow(
        "shop",
        datasets=[Dataset("b", hostname="/other")],
        jobs=[Job("two", inputs=["a"], outputs=["c"])],
    )
    with pytest.raises(WrongUse, match="Dataset 'b' is declared twice, with different values"):
        build_definitions(flow=flow, assets=[one])

    @dataflow_assets(inputs=["a"], outputs=["c"])
    def two(chunk: Chunk) -> None: ...

    with pytest.raises(WrongUse, match=r"Job 'two' is declared twice: by @dataflow_assets\("):
        build_definitions(flow=flow, assets=[two])
    with pytest.raises(WrongUse, match="@dataflow_assets needs either a registered job"):
        dataflow_assets(job="check")
    with pytest.raises(WrongUse, match="Leave out `dataflow`, or `inputs` and `outputs`"):
        dataflow_assets(job="check", dataflow=flow, outputs=["c"])
    with pytest.raises(FlowError, match=r"gone\.yml"):
        build_definitions(flow="gone.yml")


def test_if_two_jobs_write_one_dataset_one_is_its_asset(
    folder: Path, no_network: None, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "flow.yml").write_text(
        f"{FLOW}  again: {{in: [sales], out: [checked], run: ./check.sh}}\n"
    )
    defs = build_definitions(flow="flow.yml")
    assert defs.resolve_assets_def("checked").op.name == "check"
    assert "Jobs 'check' and 'again' both write 'checked'" in caplog.text


def test_the_tutorial_makes_a_green_square(
    tmp_path: Path, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    page = (Path(__file__).parents[2] / "docs" / "dagster_tutorial.md").read_text()
    before, start, _ = page.partition("Start Dagster by `dagster dev -f definitions.py`")
    assert start
    for block in BLOCK.findall(before):
        for command, _ in commands(block):
            subprocess.run(["sh", "-ec", command], check=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "definitions", raising=False)
    from definitions import defs

    assert (
        tick(defs, instance) == "1 chunk mirrored: 1 ready, 1 partition key changed, grid agrees."
    )
    for asset in ("checked", "report"):
        assert run(defs, instance, asset, "2026-03-01") == (True, "")
    assert (tmp_path / "data/checked/2026-03-01.csv").read_text() == "north,12\nwest,30\n"
    [made] = (tmp_path / "data/report/dataid=2026-03-01").glob("part-*")
    assert made.read_text() == "total,42\n"
    monkeypatch.delitem(sys.modules, "definitions")
    DataflowResource().store.close()


def test_the_tables_of_a_target_are_used_in_dagster_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (folder / "flow.yml").open("a") as file:
        file.write("targets: {dev: {url: 'sqlite:///dev.db'}}\n")
    monkeypatch.setenv("DATAFLOW_TARGET", "dev")
    monkeypatch.setenv("DATAFLOW_URL", NOWHERE)
    assert DataflowResource().settings.url == f"sqlite:///{folder}/dev.db"
    assert DataflowResource(url=NOWHERE).settings.url == NOWHERE
    with (folder / "flow.yml").open("a") as file:
        file.write("# changed\n")
    monkeypatch.setenv("DATAFLOW_TARGET", "dve")
    with pytest.raises(FlowError, match=r"no target 'dve'\. Did you mean 'dev'"):
        _ = DataflowResource().settings
    (folder / "flow.yml").unlink()
    with pytest.raises(FlowError, match=r"There is no flow\.yml in this folder"):
        _ = DataflowResource().settings
