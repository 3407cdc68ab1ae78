"""The pipelines of a project in Dagster: an asset each, with a step for each transformation."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from pyspark.sql import SparkSession

from opendataflow_dagster import (
    DataflowResource,
    Flow,
    Job,
    build_definitions,
    pipeline_assets,
)
from opendataflow_dagster.dagster import resources
from opendataflow_dagster.dagster.pipeline_assets import tables_of
from opendataflow_dagster.dagster.versions import STALE_CHECK
from opendataflow_dagster.pipelines.task import processes
from opendataflow_dagster.store.history import steps
from opendataflow_dagster.store.items import Post, accept, new_run
from opendataflow_dagster.store.store import Store
from tests.dagster.test_assets import Ran, metadata
from tests.pipelines.test_pipeline_run import Shop
from tests.support.dagster_servers import Ticker
from tests.support.spark_line import labels_of_jobs
from tests.support.store_fixtures import check, expire, policy, put, register, sql, status, statuses

ONE = "2026-11-18T190000.000Z"
TAG = "opendataflow/"


class Line(Shop):
    """A shop with its pipelines as assets, and a Dagster that runs them."""

    def define(self, url: str, instance: dg.DagsterInstance, **options: Any) -> None:
        self.url, self.instance = url, instance
        self.dataflow = DataflowResource(url=url)
        self.definitions = build_definitions(
            self.dataflow, projects=[self.root], **{"sensors": False, **options}
        )
        self.assets = {
            each.key.to_user_string(): each
            for each in self.definitions.assets or ()
            if isinstance(each, dg.AssetsDefinition)
        }

    def define_by_flow(self, flow: Flow) -> None:
        """The same through a flow whose jobs are the pipelines."""
        self.definitions = build_definitions(self.dataflow, flow=flow, sensors=False)
        self.assets = {
            asset.key.to_user_string(): asset
            for asset in self.definitions.assets or ()
            if isinstance(asset, dg.AssetsDefinition)
        }

    def materialize(self, *names: str, key: str | None = ONE, domain: str = "sales", **tags: str):
        if key is not None:
            self.instance.add_dynamic_partitions(f"dataflow/{domain}", [key])
        told = {f"{TAG}{name.replace('_', '-')}": each for name, each in tags.items()}
        self.ran = Ran(
            dg.materialize(
                [self.assets[name] for name in names],
                instance=self.instance,
                partition_key=key,
                resources={"dataflow": self.dataflow},
                tags=told,
                raise_on_error=False,
            )
        )
        return self.ran

    def outcomes(self) -> dict[str, str]:
        """Return how each step of the last run ended."""
        words = {"STEP_SUCCESS": "success", "STEP_FAILURE": "failure", "STEP_SKIPPED": "skipped"}
        return {
            event.step_key: words[event.event_type_value]
            for event in self.ran.result.all_events
            if event.event_type_value in words and event.step_key
        }

    def left(self) -> list[Path]:
        """Return what is left of the frames between steps."""
        return [each for each in self.root.glob(".dataflow/work/*/*")]

    def history(self, slug: str) -> list[tuple[str, str, int | None]]:
        return [
            (row["transformation"], row["status"], row["rows"])
            for row in sorted(steps(self.store, slug), key=lambda row: row["step"])
        ]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.local_temp(str(tmp_path_factory.mktemp("dagster"))) as made:
        yield made


@pytest.fixture
def instance(storage: dg.DagsterInstance) -> Iterator[dg.DagsterInstance]:
    yield storage
    storage.wipe()


@pytest.fixture
def line(
    store: Store, url: str, instance: dg.DagsterInstance, spark: SparkSession, tmp_path: Path
) -> Iterator[Line]:
    made = Line(tmp_path / "shop", store, spark)
    made.define(url, instance)
    yield made
    check(store)
    for opened in resources._stores.values():
        opened.close()
    resources._stores.clear()


one_store = pytest.mark.parametrize("url", ["sqlite"], indirect=True)
"""For tests about Dagster, not the store."""


def test_an_added_partition_is_produced_step_by_step(line: Line, capfd: Any) -> None:
    ran = line.materialize("sales")
    assert ran.success, ran.reason
    assert line.outcomes() == {
        "daily.begin": "success",
        "daily.clean": "success",
        "daily.total": "success",
        "daily.publish": "success",
    }
    assert "cleaning 2\n" in capfd.readouterr().out
    told = metadata(ran.made["sales", ONE])
    assert (told["rows"], told["validated"], told["ready"]) == (2, "no checks", "it reads nothing")
    assert {"right", "location", "safe", "log", "seconds", "generation"} <= set(told)
    assert status(line.store, "sales", ONE, "daily") == "READY"
    assert line.history("daily") == [("clean", "READY", 2), ("total", "READY", 2)]
    assert line.output("daily").splitlines()[1:] == ["A,2,10,20", "B,0,5,0"]
    assert line.left() == []
    assert sql(line.store, "select * from worker") == []


@one_store
def test_without_spark_the_result_is_the_same(
    line: Line, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance
) -> None:
    assert line.materialize("sales", "report").success
    expected = line.output("daily"), line.output("report")
    file = line.root / "project.yml"
    line.write("project.yml", "engine: local\n" + file.read_text())
    line.define(line.url, instance)
    monkeypatch.setattr("opendataflow_dagster.spark.session.spark_session", None)
    shutil.rmtree(line.root / "output")
    monkeypatch.setenv("MASTER", "spark://far:1")
    assert "the local engine" in line.materialize("sales", "report", key="local").reason
    monkeypatch.delenv("MASTER")
    ran = line.materialize("sales", "report", key="local")
    assert ran.success, ran.reason
    assert (line.output("daily"), line.output("report")) == expected
    assert line.left() == []

    file.write_text(file.read_text().removeprefix("engine: local\n"))
    job = Job("daily", outputs=["sales"], pipeline=str(line.root), engine="local")
    line.define_by_flow(Flow("shop", jobs=[job]))
    ran = line.materialize("sales", key="by flow", domain=domain_of(line.assets["sales"]))
    assert ran.success, ran.reason
    assert line.output("daily") == expected[0]
    processes.end()


def domain_of(asset: dg.AssetsDefinition) -> str:
    partitions = asset.partitions_def
    assert isinstance(partitions, dg.DynamicPartitionsDefinition)
    return str(partitions.name).removeprefix("dataflow/")


def test_downstream_pipelines_run_in_the_same_run(line: Line) -> None:
    graph = line.definitions.resolve_asset_graph()
    assert graph.get(dg.AssetKey("report")).parent_keys == {dg.AssetKey("sales")}
    ran = line.materialize("sales", "report")
    assert ran.success, ran.reason
    told = metadata(ran.made["report", ONE])
    made = metadata(ran.made["sales", ONE])["generation"]
    assert told["inputs"] == {"sales": made}
    assert line.output("report").splitlines() == ["rows,total", "2,20"]


@one_store
def test_ready_chunks_are_skipped_and_downstream_steps_run(line: Line) -> None:
    assert line.materialize("sales").success
    ran = line.materialize("sales", "report")
    assert ran.success
    assert metadata(ran.made["sales", ONE])["skipped"] is True
    outcomes = line.outcomes()
    assert [outcomes[f"daily.{each}"] for each in ("clean", "total")] == ["skipped", "skipped"]
    assert outcomes["daily.publish"] == "success"
    assert "skipped" not in metadata(ran.made["report", ONE])

    line.write("sources/orders.csv", "product,qty\nA,3\n")
    again = line.materialize("sales", resubmit="true")
    assert again.success
    assert "skipped" not in metadata(again.made["sales", ONE])

    policy(line.store, "report", on_stale="skip")
    stale = line.materialize("report")
    assert stale.success, stale.reason
    assert metadata(stale.made["report", ONE])["stale"] is True
    [told] = stale.result.get_asset_check_evaluations()
    assert (told.check_name, told.passed) == (STALE_CHECK, False)
    assert told.description == f"1 chunk is stale: {ONE}. Run: odf resubmit report --stale"
    policy(line.store, "report", on_stale="remake")
    [told] = line.materialize("report").result.get_asset_check_evaluations()
    assert (told.passed, told.description) == (True, "No chunk is stale.")
    assert not line.assets["sales"].check_specs, "it reads nothing that could be replaced"


def test_a_failing_transformation_is_named_and_settles_the_chunk(line: Line, capfd: Any) -> None:
    line.write(
        "pipelines/daily/total.py",
        """
        def run(df):
            print("so far so good")
            return df["nothing"]
    """,
    )
    ran = line.materialize("sales", "report")
    assert not ran.success
    assert ran.failure.user_failure_data.metadata["opendataflow/status"].value == "FAILED"
    assert ran.reason.startswith(f"{ONE} of pipeline 'daily' is FAILED: total: KeyError: 'nothing'")
    assert "odf resubmit daily" in ran.reason
    assert line.outcomes() == {
        "daily.begin": "success",
        "daily.clean": "success",
        "daily.total": "failure",
    }
    said = capfd.readouterr()
    assert "so far so good\n" in said.out
    assert 'return df["nothing"]' in said.err
    assert status(line.store, "sales", ONE, "daily") == "FAILED"
    assert line.history("daily") == [("clean", "READY", 2), ("total", "FAILED", None)]
    assert line.left() == []
    assert not ran.made

    refused = line.materialize("sales")
    assert "FAILED" in refused.reason
    assert line.outcomes() == {"daily.begin": "failure"}


@one_store
def test_a_missing_source_fails_before_anything_is_claimed(line: Line) -> None:
    (line.root / "sources/products.csv").unlink()
    ran = line.materialize("sales")
    assert "products.csv, which doesn't exist" in ran.reason
    assert statuses(line.store) == {}


def test_a_run_without_partition_produces_the_next_chunk(line: Line) -> None:
    assert line.materialize("sales", key=None, catch_up="true").success
    assert line.outcomes() == {
        "daily.begin": "success",
        "daily.clean": "skipped",
        "daily.total": "skipped",
        "daily.publish": "success",
    }
    first, second = new_run(line.store, "daily"), new_run(line.store, "daily")
    assert list(line.materialize("sales", key=None, catch_up="true").made) == [("sales", first)]
    assert list(line.materialize("sales", key=None, catch_up="true").made) == [("sales", second)]


def test_items_are_left_to_odf_serve_unless_a_run_names_one(line: Line) -> None:
    [accepted] = accept(line.store, [Post("signups", ('{"name": "Bob \\"x\\""}',))])
    [item] = accepted.dataids  # type: ignore[union-attr]
    assert line.materialize("signups", key=None, catch_up="true").made == {}
    run = new_run(line.store, "signups")
    assert list(line.materialize("signups", key=None, catch_up="true").made) == [("signups", run)]

    ran = line.materialize("signups", key=item, domain="signups")
    assert ran.success, ran.reason
    assert status(line.store, "signups", item, "signups") == "READY"
    assert line.output("signups").splitlines()[-1] == '"Bob ""x""",2'


@one_store
def test_a_run_that_would_lose_items_ends_before_its_transformations(line: Line) -> None:
    [accepted] = accept(line.store, [Post("signups", ('{"name": "Bob"}',))])
    [item] = accepted.dataids  # type: ignore[union-attr]
    assert line.materialize("signups", key=item, domain="signups").success
    before = line.output("signups")

    ran = line.materialize("signups", domain="signups")
    assert "has rows that 1 item has appended, and this run would replace them" in ran.reason
    assert line.outcomes() == {"signups.begin": "success", "signups.join": "failure"}
    assert status(line.store, "signups", ONE, "signups") == "FAILED"
    assert not [each for each in steps(line.store, "signups", ONE) if each["transformation"]]
    assert line.output("signups") == before


def test_an_older_run_is_held_before_its_transformations(line: Line) -> None:
    newer = "2026-11-18T200000.000Z"
    for key in (ONE, newer):
        assert line.materialize("sales", "report", key=key).success
    before = line.output("report")

    ran = line.materialize("report", resubmit="true")
    assert f"holds the newer chunk '{newer}'" in ran.reason
    assert status(line.store, "report", ONE, "report") == "READY"

    put(line.store, "report", ONE, "RESUBMIT", jobid="report")
    ran = line.materialize("report")
    assert f"{ONE} of pipeline 'report' is HOLD: " in ran.reason
    assert f"odf hold report {newer}" in ran.reason
    assert status(line.store, "report", ONE, "report") == "HOLD"
    assert line.outcomes() == {"report.begin": "success", "report.summary": "failure"}
    assert line.output("report") == before


@one_store
def test_a_claim_recovered_by_another_worker_ends_the_run_in_one_line(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opendataflow_dagster.pipelines.engine import Engine

    run = Engine.run

    def slow(self: Engine, *args: Any, **more: Any) -> Any:
        made = run(self, *args, **more)
        expire(line.store)
        line.store.recover("daily")
        return made

    monkeypatch.setattr(Engine, "run", slow)
    ran = line.materialize("sales")
    assert line.outcomes() == {
        "daily.begin": "success",
        "daily.clean": "success",
        "daily.total": "failure",
    }
    assert "was claimed by another worker" in ran.reason
    assert "launch the whole partition" in ran.reason
    assert status(line.store, "sales", ONE, "daily") == "RESUBMIT"
    assert line.left() == []


@one_store
def test_an_interrupt_settles_the_chunk_at_once(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    from opendataflow_dagster.pipelines.engine import Engine

    def interrupted(*args: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "run", interrupted)
    assert not line.materialize("sales").success
    assert status(line.store, "sales", ONE, "daily") == "RESUBMIT"
    [(why,)] = sql(line.store, "select why from dataevent where status_after = 'RESUBMIT'")
    assert "was interrupted" in why
    assert line.left() == []


@one_store
def test_another_attempt_is_granted_by_the_policy(line: Line) -> None:
    line.write("pipelines/daily/total.py", "def run(df):\n    raise OSError('away')\n")
    line.materialize("sales", key=None)
    policy(line.store, "daily", max_attempts=2)
    ran = line.materialize("sales")
    assert "another attempt is granted" in ran.reason
    assert status(line.store, "sales", ONE, "daily") == "RESUBMIT"
    assert "FAILED" in line.materialize("sales").reason


@one_store
def test_frames_keep_index_and_types_between_steps_and_engines(line: Line, url: str) -> None:
    line.write(
        "project.yml",
        """
        name: Shop
        pipelines:
          - slug: mixed
            sources: [orders]
            transformations: [typed, native, typed]
    """,
    )
    line.write(
        "pipelines/mixed/typed.py",
        """
        import pandas as pd

        def run(df):
            print(dict(df.dtypes.astype(str)), list(df.index))
            df["when"] = pd.Timestamp("2026-01-01", tz="UTC")
            df["kind"] = df["product"].astype("category")
            return df.drop(columns=["when"]).set_index("product", drop=False)
    """,
    )
    line.write(
        "pipelines/mixed/native.py",
        """
        from pyspark.sql import DataFrame
        from pyspark.sql import functions as F

        def run(df: DataFrame) -> DataFrame:
            return df.withColumn("qty", F.col("qty") + 1)
    """,
    )
    line.define(url, line.instance)
    with labels_of_jobs(line.spark) as labels:
        ran = line.materialize("mixed", domain="mixed")
    assert ran.success, ran.reason
    assert {each for _, each in labels} == {f"odf mixed: chunk {ONE}"}
    assert sorted(line.outcomes()) == [
        "mixed.begin",
        "mixed.native",
        "mixed.publish",
        "mixed.typed",
        "mixed.typed_2",
    ]
    assert {"pandas", "spark"} <= set(
        line.definitions.resolve_asset_graph().get(dg.AssetKey("mixed")).kinds
    )
    last = steps(line.store, "mixed")[-1]
    assert last["stdout"].endswith("[0, 1]\n")


# --- launching ---


class Ticking:
    """The catch-up sensor of a line's definitions, and the runs that it requests."""

    def __init__(self, line: Line, **options: Any) -> None:
        line.define(line.url, line.instance, sensors=True, **options)
        self.line = line
        [sensor] = [
            each for each in line.definitions.sensors or () if each.name == "opendataflow_catch_up"
        ]
        self.ticker = Ticker(sensor, line.instance, line.definitions)  # type: ignore[arg-type]

    def tick(self) -> list[dg.RunRequest]:
        for opened in resources._stores.values():
            opened._plans.clear()
        self.said = self.ticker.tick()
        return list(self.said.run_requests or ())

    def run(self, request: dg.RunRequest) -> set[str]:
        """Execute what was requested; return the datasets that it produced."""
        job = self.line.definitions.resolve_implicit_global_asset_job_def()
        ran = Ran(
            job.execute_in_process(
                instance=self.line.instance,
                asset_selection=list(request.asset_selection or ()),
                tags={**request.tags, "dagster/run_key": request.run_key or ""},
                raise_on_error=False,
            )
        )
        assert ran.success, ran.reason
        return {name for name, _ in ran.made}


def test_a_due_run_is_started_and_downstream_runs_follow(line: Line) -> None:
    ticking = Ticking(line)
    assert ticking.tick() == []
    assert "nothing claimable: daily, report" in ticking.said.skip_message

    policy(line.store, "daily", every_minutes=5)
    [request] = ticking.tick()
    assert request.tags["opendataflow/catch-up-job"] == "daily"
    [again] = ticking.tick()
    assert again.run_key == request.run_key
    assert ticking.run(request) == {"sales"}

    [request] = ticking.tick()
    assert request.tags["opendataflow/catch-up-job"] == "report"
    assert ticking.run(request) == {"report"}
    assert ticking.tick() == []
    assert line.output("report").splitlines() == ["rows,total", "2,20"]

    sql(line.store, "delete from datastatus")
    put(line.store, "sales", "2020-01-01T000000.000Z", "FAILED", jobid="daily")
    policy(line.store, "daily", paused_until="2999-01-01 00:00:00")
    assert ticking.tick() == []
    policy(line.store, "daily", paused_until=None)
    assert len(ticking.tick()) == 1


@one_store
def test_a_resubmitted_run_is_launched_at_once(line: Line) -> None:
    ticking = Ticking(line)
    policy(line.store, "daily", every_minutes=1440)
    [request] = ticking.tick()
    ticking.run(request)
    put(
        line.store,
        "sales",
        request.tags["dagster/asset_partition_range_start"],
        "RESUBMIT",
        jobid="daily",
    )
    assert len(ticking.tick()) == 1


@one_store
def test_each_waiting_chunk_gets_a_run_and_items_get_none(line: Line) -> None:
    ticking = Ticking(line, runs_per_job=2)
    for _ in range(3):
        new_run(line.store, "daily")
    accept(line.store, [Post("signups", ("{}", "{}"))])
    requests = ticking.tick()
    assert [each.tags["opendataflow/catch-up-job"] for each in requests] == ["daily", "daily"]
    policy(line.store, "daily", paused_until="2999-01-01 00:00:00")
    assert ticking.tick() == []
    assert "signups: nothing claimable but items" in ticking.said.skip_message


@one_store
def test_steps_in_separate_processes_pass_on_the_claim(line: Line, tmp_path: Path) -> None:
    file = line.write(
        "definitions.py",
        f"""
        import dagster as dg
        from opendataflow_dagster import DataflowResource, build_definitions

        defs = build_definitions(
            DataflowResource(url={line.url!r}), projects=[{str(line.root)!r}],
            executor=dg.multiprocess_executor,
        )
    """,
    )
    home = tmp_path / "home"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    with dg.DagsterInstance.from_config(str(home)) as instance:
        instance.add_dynamic_partitions("dataflow/sales", [ONE])
    ended = subprocess.run(
        [
            Path(sys.executable).with_name("dagster"),
            "asset",
            "materialize",
            "-f",
            file,
            "--select",
            "sales",
            "--partition",
            ONE,
        ],
        env={**os.environ, "DAGSTER_HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert status(line.store, "sales", ONE, "daily") == "READY"
    assert line.history("daily") == [("clean", "READY", 2), ("total", "READY", 2)]
    assert line.left() == []
    with dg.DagsterInstance.from_config(str(home)) as instance:
        assert instance.get_materialized_partitions(dg.AssetKey("sales")) == {ONE}


# --- the definitions ---


@one_store
def test_a_faulty_pipeline_is_left_out_with_a_warning(
    line: Line, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    line.write(
        "project.yml",
        """
        name: Shop
        pipelines:
          - slug: daily
            sources: [orders, products]
            destination: sales
            transformations: [clean]
          - slug: broken
            destination: [one, two]
            transformations: [clean]
          - slug: twin
            destination: sales
            transformations: [clean]
          - slug: reader
            sources: [sales]
            transformations: [clean]
    """,
    )
    line.define(url, line.instance)
    assert list(line.assets) == ["sales", "reader"]
    assert "`destination` is a list" in caplog.text
    assert "'daily' and 'twin' both write 'sales'" in caplog.text


@one_store
def test_pipelines_that_share_an_unread_destination_are_separate_assets(
    line: Line, url: str
) -> None:
    line.write(
        "project.yml",
        """
        name: Shop
        pipelines:
          - {slug: one, sources: [orders], destination: shared, transformations: [step]}
          - {slug: two, sources: [people], destination: shared, transformations: [step]}
    """,
    )
    for slug in ("one", "two"):
        line.write(f"pipelines/{slug}/step.py", "def run(df):\n    return df\n")
    line.define(url, line.instance)
    assert list(line.assets) == ["one", "two"]
    for slug, head in (("one", "product,qty"), ("two", "name")):
        ran = line.materialize(slug, domain=slug)
        assert ran.success, ran.reason
        assert line.output(slug).splitlines()[0] == head
    line.define(url, line.instance)
    assert list(line.assets) == ["one", "two"]


@one_store
def test_taken_and_odd_names_become_valid_step_names(line: Line, url: str) -> None:
    line.write(
        "project.yml",
        """
        name: Shop
        pipelines:
          - slug: odd-one
            sources: [orders]
            transformations: [begin, step-1, begin]
    """,
    )
    line.write("pipelines/odd-one/begin.py", "def run(df):\n    return df\n")
    line.write("pipelines/odd-one/step-1.py", "def run(df):\n    return df\n")
    line.define(url, line.instance)
    assert line.materialize("odd-one", domain="odd-one").success
    assert list(line.outcomes()) == [
        f"odd_x2D_one.{each}" for each in ("begin_3", "begin", "step_x2D_1", "begin_2", "publish")
    ]


@one_store
def test_the_pipelines_are_registered_when_the_definitions_load(line: Line, url: str) -> None:
    jobs = {row[0] for row in sql(line.store, "select jobid from job")}
    assert jobs == {"daily", "report", "signups"}
    sql(line.store, "delete from job")
    line.store._plans.clear()
    line.dataflow.store._plans.clear()
    assert line.materialize("sales").success  # the run does so, if need be

    register(line.store, "other", ["x"], ["daily"])
    [*assets] = pipeline_assets(line.root, line.dataflow)
    assert [each.key.to_user_string() for each in assets] == ["sales", "report", "signups"]


@one_store
def test_a_project_alone_finds_its_tables(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_definitions(projects=[line.root])
    assert (line.root / ".dataflow/dataflow.db").exists()
    assert made.executor is dg.in_process_executor
    assert build_definitions(projects=[line.root], executor=dg.multiprocess_executor).executor is (
        dg.multiprocess_executor
    )
    made.get_repository_def()


def _run_one(definitions: dg.Definitions, instance: dg.DagsterInstance, which: str) -> bool:
    dg.Definitions.validate_loadable(definitions)
    instance.add_dynamic_partitions("dataflow/sales", [which])
    job = definitions.resolve_implicit_global_asset_job_def()
    return job.execute_in_process(
        instance=instance,
        asset_selection=[dg.AssetKey("sales")],
        partition_key=which,
    ).success


@one_store
def test_assets_without_a_resource_bring_their_projects_tables(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store = tables_of(line.root).store

    line.instance.add_dynamic_partitions("dataflow/sales", ["one"])
    assets = pipeline_assets(line.root)
    assert dg.materialize(assets[:1], instance=line.instance, partition_key="one").success
    assert _run_one(dg.Definitions(assets=assets), line.instance, "two")
    named = pipeline_assets(str(line.root), tables_of(line.root))
    assert _run_one(dg.Definitions(assets=named), line.instance, "three")
    assert [status(store, "sales", each, "daily") for each in ("one", "two", "three")] == (
        ["READY"] * 3
    )
    assert not (tmp_path / "elsewhere/.dataflow/dataflow.db").exists()
    assert statuses(line.store) == {}


@one_store
def test_a_resource_of_the_definitions_wins_over_the_tables_that_assets_bring(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"dataflow": line.dataflow}
    for number, assets in enumerate(
        (pipeline_assets(line.root), pipeline_assets(line.root, line.dataflow))
    ):
        assert _run_one(dg.Definitions(assets=assets, resources=given), line.instance, f"{number}")
        line.instance.add_dynamic_partitions("dataflow/sales", [f"more-{number}"])
        assert dg.materialize(
            assets[:1], instance=line.instance, partition_key=f"more-{number}", resources=given
        ).success
    made = {dataid for _, _, dataid in statuses(line.store)}
    assert made == {"0", "more-0", "1", "more-1"}


@one_store
def test_two_projects_bring_their_tables_into_one_location(line: Line, tmp_path: Path) -> None:
    other = Shop(tmp_path / "other", line.store, None)
    other.write(
        "project.yml",
        """
        pipelines:
          - slug: weekly
            sources: [orders, products]
            transformations: [clean, total]
    """,
    )
    for name in ("clean", "total"):
        text = (other.root / f"pipelines/daily/{name}.py").read_text()
        other.write(f"pipelines/weekly/{name}.py", text)
    assets = [*pipeline_assets(line.root), *pipeline_assets(other.root)]
    assert _run_one(dg.Definitions(assets=assets), line.instance, "one")
    assert status(tables_of(line.root).store, "sales", "one", "daily") == "READY"
