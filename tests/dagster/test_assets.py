"""Jobs as assets: the chunks of a run, one by one, as the tables allow."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest

from opendataflow_dagster import (
    Chunk,
    DataflowResource,
    Result,
    dataflow_assets,
    dataflow_check,
    dataflow_specs,
    external_assets,
    script_assets,
)
from opendataflow_dagster.dagster.events import recorded_event
from opendataflow_dagster.dagster.translator import DataflowTranslator
from opendataflow_dagster.dagster.versions import STALE_CHECK
from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.store.operations import release
from opendataflow_dagster.store.overview import facts, truths
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.postgres import Server
from tests.support.store_fixtures import (
    check,
    expire,
    policy,
    put,
    register,
    sql,
    status,
    statuses,
    take,
)

RANGE = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"


@pytest.fixture
def dataflow(url: str) -> Iterator[DataflowResource]:
    """The tables, with a job `loadbob` that produces `bobout` from `bobin`."""
    made = DataflowResource(url=url)
    made.store.init()
    register(made.store, "loadbob", ["bobin"], ["bobout"])
    yield made
    made.store.close()
    vars(made.store).pop("person").close()


@pytest.fixture
def store(dataflow: DataflowResource) -> Store:
    return dataflow.store


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    """A Dagster with storage of its own."""
    with dg.DagsterInstance.ephemeral() as made:
        yield made


class Ran:
    """The result of a run, as Dagster has it."""

    def __init__(self, result: dg.ExecuteInProcessResult) -> None:
        self.result = result
        self.success = result.success
        self.made = {
            (event.asset_key.to_user_string(), event.partition): event
            for event in (
                each.step_materialization_data.materialization
                for each in result.get_asset_materialization_events()
            )
        }

    @property
    def failure(self) -> Any:
        [event] = self.result.get_step_failure_events()
        return event.step_failure_data

    @property
    def reason(self) -> str:
        return self.failure.user_failure_data.description

    @property
    def counts(self) -> dict[str, Any]:
        found = self.failure.user_failure_data.metadata
        return {name.removeprefix("opendataflow/"): each.value for name, each in found.items()}


@pytest.fixture
def run(dataflow: DataflowResource, instance: dg.DagsterInstance) -> Callable[..., Ran]:
    """Run assets for a partition, a range of partitions, or what the tables offer."""

    def ran(assets: dg.AssetsDefinition, *keys: str, domain: str = "bobin", **tags: str) -> Ran:
        instance.add_dynamic_partitions(f"dataflow/{domain}", list(keys))
        told = {f"opendataflow/{name.replace('_', '-')}": each for name, each in tags.items()}
        if len(keys) > 1:
            told |= dict(zip(RANGE, (keys[0], keys[-1]), strict=True))
        return Ran(
            dg.materialize(
                [assets],
                instance=instance,
                resources={"dataflow": dataflow},
                tags=told,
                partition_key=keys[0] if len(keys) == 1 else None,
                raise_on_error=False,
            )
        )

    return ran


def job_of(
    dataflow: DataflowResource,
    fn: Callable[..., Any] = lambda chunk: None,
    job: str = "loadbob",
    **more: Any,
) -> dg.AssetsDefinition:
    return dataflow_assets(job=job, dataflow=dataflow, **more)(fn)


@dataflow_check()
def FINE(chunk: Chunk) -> bool:
    return chunk.alive()


def keys(count: int) -> list[str]:
    return [f"2026-01-{day:02}" for day in range(1, count + 1)]


def metadata(event: dg.AssetMaterialization) -> dict[str, Any]:
    return {name.removeprefix("opendataflow/"): each.value for name, each in event.metadata.items()}


def test_a_chunk_is_claimed_produced_and_reported(
    dataflow: DataflowResource,
    store: Store,
    run: Callable[..., Ran],
    instance: dg.DagsterInstance,
) -> None:
    add_dataset(store, "bobout", hostname="there", tablename="sums")
    put(store, "bobin", "1")

    def make(chunk: Chunk, context: dg.AssetExecutionContext) -> Result:
        claims = sql(store, "select runid from claim where owner is not null")
        assert claims == [(context.run.run_id,)]
        assert sql(store, "select runid, jobid from worker") == [(context.run.run_id, "loadbob")]
        return Result(5, 10, "abc", metadata={"mood": "good"})

    ran = run(job_of(dataflow, make), "1")

    assert ran.success
    event = ran.made["bobout", "1"]
    [(generation,)] = sql(store, "select generation from datastatus where datasetid = 'bobout'")
    told = metadata(event)
    [came] = instance.fetch_materializations(dg.AssetKey("bobin"), limit=5).records
    assert event.tags == {
        "dagster/data_version": "abc",
        "dagster/code_version": told["code"],
        "dagster/input_data_version/bobin": "1",
        "dagster/input_event_pointer/bobin": str(came.storage_id),
    }
    assert told["generation"] == generation
    assert (told["rows"], told["bytes"], told["fingerprint"]) == (5, 10, "abc")
    assert told["dagster/row_count"] == 5
    assert told["location"] == "there/sums"
    assert told["inputs"] == {"bobin": 1}
    assert told["mood"] == "good"
    assert told["seconds"] >= 0
    assert told["ready"] == "bobin READY"
    assert told["right"] == "bobin: generation 1"
    assert told["validated"] == "no checks"
    assert "attempt 1" in told["safe"]
    assert told["log"] == f"/runs/{ran.result.run_id}"
    assert told["upstream bobin"] == "/assets/bobin?view=partitions&partition=1"
    assert told["why"] == "odf why loadbob 1"
    assert sql(store, "select * from worker") == []
    check(store)


def test_a_range_is_produced_chunk_by_chunk_and_a_bad_chunk_fails_alone(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    days = keys(30)
    for day in days[:25]:
        put(store, "bobin", day)
    for day in days[:10]:
        put(store, "bobout", day, jobid="loadbob")
    made: list[str] = []

    def make(chunk: Chunk) -> None:
        made.append(chunk.dataid)
        if chunk.dataid in days[12:15]:
            raise ValueError(f"bad {chunk.dataid}")

    ran = run(job_of(dataflow, make), *days)

    assert not ran.success
    assert made == days[10:25]
    assert ran.counts == {"made": 12, "skipped": 10, "refused": 5, "failed": 3, "lost": 0}
    assert ran.reason.startswith("8 of 30 chunks of job 'loadbob' weren't produced:\n")
    assert "2026-01-13: ValueError: bad 2026-01-13" in ran.reason
    assert "2026-01-30: DATA_NOT_READY" in ran.reason
    good = {day for day in days if status(store, "bobout", day, "loadbob") == "READY"}
    assert {day for _, day in ran.made} == good
    assert len(good) == 22
    check(store)


def test_a_long_list_of_failures_is_cut(
    dataflow: DataflowResource, run: Callable[..., Ran]
) -> None:
    ran = run(job_of(dataflow), *keys(13))
    assert ran.counts["refused"] == 13
    assert ran.reason.count("DATA_NOT_READY") == 10
    assert ran.reason.endswith("and 3 more")


def test_a_ready_chunk_is_skipped_and_produced_again_only_by_the_tag(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    put(store, "bobin", "1")
    put(store, "byhand", "1", jobid="nobody")
    assets = job_of(dataflow, lambda _: Result(5))
    first = run(assets, "1").made["bobout", "1"]

    again = run(assets, "1")

    assert again.success
    told = metadata(again.made["bobout", "1"])
    assert told["skipped"] is True
    assert "odf resubmit loadbob 1" in told["force"]
    assert again.made["bobout", "1"].tags == first.tags
    assert told["rows"] == 5

    forced = run(assets, "1", resubmit="true")
    assert forced.success
    told = metadata(forced.made["bobout", "1"])
    assert "skipped" not in told
    assert told["generation"] > int(first.tags["dagster/data_version"])
    [(who, why)] = sql(
        store, "select who, why from dataevent where status_after = 'RESUBMIT' and locktype = 'OUT'"
    )
    assert who == f"dagster run {forced.result.run_id}"
    assert "opendataflow/resubmit" in why


def test_a_ready_row_of_before_the_triggers_has_generation_0(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    put(store, "bobout", "1", jobid="external")
    sql(store, "update datastatus set generation = null")
    ran = run(job_of(dataflow), "1")
    assert ran.success
    assert ran.made["bobout", "1"].tags["dagster/data_version"] == "0"


def test_the_tag_resubmits_failed_chunks_but_not_held_ones(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    for day in keys(3):
        put(store, "bobin", day)
    put(store, "bobout", "2026-01-01", "FAILED", jobid="loadbob")
    put(store, "bobout", "2026-01-02", "HOLD", jobid="loadbob")

    assert run(job_of(dataflow), *keys(3)).counts["refused"] == 2
    ran = run(job_of(dataflow), *keys(3), resubmit="true")

    assert ran.counts == {"made": 2, "skipped": 0, "refused": 1, "failed": 0, "lost": 0}
    assert "2026-01-02: HELD" in ran.reason


def test_an_attempt_granted_without_delay_runs_in_the_same_run(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    put(store, "bobin", "1")
    policy(store, "loadbob", max_attempts=3)
    attempts: list[int] = []

    def make(chunk: Chunk) -> None:
        attempts.append(chunk.attempts)
        assert chunk.attempts == 3

    assert run(job_of(dataflow, make), "1").success
    assert attempts == [1, 2, 3]
    attempts.clear()
    put(store, "bobin", "2")
    policy(store, "loadbob", retry_delay=60)
    ran = run(job_of(dataflow, make), "2")
    assert attempts == [1]
    assert "the next attempt is due in 60 s" in ran.reason


def test_a_run_without_partitions_produces_what_the_tables_offer(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    for number in range(1, 6):
        put(store, "bobin", str(number))
    assets = job_of(dataflow)

    assert list(run(assets, batch="2").made) == [("bobout", "1"), ("bobout", "2")]
    ran = run(assets, "1", catch_up="true")
    assert [key for _, key in ran.made] == ["3", "4", "5"]
    assert run(assets).success


def test_several_outputs_with_odd_names_are_kept_apart(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    register(store, "load-bob 2", ["a-b", "a_b", "a.b"], ["input", "out/1", "out 1", "größe"])
    for each in ("a-b", "a_b", "a.b"):
        put(store, each, "x, y")

    assets = job_of(dataflow, lambda _: {"out/1": Result(1), "größe": Result(2)}, "load-bob 2")
    ran = run(assets, "x%2C y", domain="a-b")

    assert ran.success
    assert {name: metadata(event).get("rows") for (name, _), event in ran.made.items()} == {
        "input": None,
        "out_x2F_1": 1,
        "out 1": None,
        "größe": 2,
    }
    assert {key for _, key in ran.made} == {"x%2C y"}


@pytest.mark.parametrize("days", [1, 3])
def test_downstream_jobs_run_in_the_same_run(
    dataflow: DataflowResource, store: Store, instance: dg.DagsterInstance, days: int
) -> None:
    register(store, "sum", ["bobout"], ["total"])
    for day in keys(days):
        put(store, "bobin", day)
    assets = [job_of(dataflow, job=each, checks=[FINE]) for each in ("loadbob", "sum")]
    instance.add_dynamic_partitions("dataflow/bobin", keys(days))

    result = dg.materialize(
        assets,
        instance=instance,
        resources={"dataflow": dataflow},
        partition_key=keys(1)[0] if days == 1 else None,
        tags=dict(zip(RANGE, (keys(days)[0], keys(days)[-1]), strict=True)) if days > 1 else None,
    )

    made = [
        (found.asset_key.to_user_string(), found.partition)
        for each in result.get_asset_materialization_events()
        if (found := each.step_materialization_data.materialization)
    ]
    assert sorted(made) == [(name, day) for name in ("bobout", "total") for day in keys(days)]
    assert status(store, "total", keys(days)[-1], "sum") == "READY"
    told = [each.check_name for each in result.get_asset_check_evaluations()]
    assert (told.count("FINE"), told.count(STALE_CHECK)) == (2 * days, 2)
    assert not [
        each.user_message
        for each in instance.all_logs(result.run_id)
        if "did not yield" in each.user_message or each.level >= logging.WARNING
    ]


def test_a_backfill_keeps_the_jobs_apart(dataflow: DataflowResource, store: Store) -> None:
    register(store, "sum", ["bobout"], ["total"])
    policies = [job_of(dataflow, job=each).backfill_policy for each in ("loadbob", "sum")]
    assert policies == [dg.BackfillPolicy.multi_run(500), dg.BackfillPolicy.multi_run(499)]


def test_today_is_a_chunk(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    register(store, "daily", ["today"], ["report"])
    today = store.today()
    assets = job_of(dataflow, job="daily")

    assert list(run(assets, domain="report").made) == [("report", today)]
    assert metadata(run(assets, today, domain="report").made["report", today])["skipped"] is True
    ran = run(assets, "2001-01-01", domain="report")
    assert "2001-01-01: DATA_NOT_READY" in ran.reason


def test_a_chunk_that_another_worker_recovered_is_lost(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    put(store, "bobin", "1")

    def make(_: Chunk) -> None:
        expire(store)
        store.recover("loadbob")
        assert take(store, "loadbob", "other")

    ran = run(job_of(dataflow, make), "1")

    assert ran.counts["lost"] == 1
    assert not ran.made
    assert status(store, "bobout", "1", "loadbob") == "RUNNING"


def test_metadata_that_dagster_cant_show_is_shown_as_text(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    put(store, "bobin", "1")
    ran = run(job_of(dataflow, lambda _: Result(metadata={"odd": object})), "1")
    assert ran.success
    assert "object" in metadata(ran.made["bobout", "1"])["odd"]


def test_a_job_that_may_not_run_fails_in_one_line(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    assets = job_of(dataflow)
    sql(store, "insert into job (jobid, itemtype, itemvalue) values ('loadbob', 'LD_PRELOAD', 'x')")
    store._plans.clear()
    ran = run(assets, "1")
    assert "LD_PRELOAD" in ran.reason
    assert "\n" not in ran.reason


def test_a_traceback_is_in_the_log_of_the_run(
    dataflow: DataflowResource,
    store: Store,
    run: Callable[..., Ran],
    instance: dg.DagsterInstance,
) -> None:
    put(store, "bobin", "1")

    def make(_: Chunk) -> None:
        raise LookupError("the cause")

    ran = run(job_of(dataflow, make), "1")
    [entry] = [
        each for each in instance.all_logs(ran.result.run_id) if "FAILED" in each.user_message
    ]
    assert "FAILED: LookupError: the cause\nTraceback" in entry.user_message
    assert ", in make\n" in entry.user_message


def test_a_database_that_is_away_ends_the_run_and_fails_no_chunk(
    dataflow: DataflowResource, run: Callable[..., Ran], tmp_path: Path
) -> None:
    if dataflow.store.db.dialect != "sqlite":
        pytest.skip("the same for PostgreSQL, with a server stopped, is in test_produce")
    assets = job_of(dataflow)
    dataflow.store.close()
    (tmp_path / "dataflow.db").rename(tmp_path / "away.db")
    ran = run(assets, "1")
    (tmp_path / "away.db").rename(tmp_path / "dataflow.db")
    assert "There is no database" in ran.reason
    assert statuses(dataflow.store) == {}


def test_a_server_that_stays_away_ends_the_run_in_one_line(
    postgres_server: Server, instance: dg.DagsterInstance
) -> None:
    dataflow = DataflowResource(url=postgres_server.create_database("gone"))
    store = dataflow.store
    store.init()
    register(store, "loadbob", ["bobin"], ["bobout"])
    put(store, "bobin", "1")
    vars(store).pop("person").close()
    assets = job_of(dataflow, lambda _: postgres_server.stop())
    instance.add_dynamic_partitions("dataflow/bobin", ["1"])
    store.db.patience = 0.5
    ran = Ran(
        dg.materialize(
            [assets],
            instance=instance,
            resources={"dataflow": dataflow},
            partition_key="1",
            raise_on_error=False,
        )
    )
    postgres_server.start()

    assert ran.reason.startswith("The database of OpenDataFlow is away: ")
    assert "\n" not in ran.reason
    assert status(store, "bobout", "1", "loadbob") == "RUNNING"
    vars(store).pop("person").close()
    store.close()
    postgres_server.drop_database("gone")


def test_a_claim_whose_reply_was_cut_off_is_settled(
    dataflow: DataflowResource,
    store: Store,
    run: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put(store, "bobin", "1")
    claim = store.claim

    def interrupted(*given: Any, **told: Any) -> None:
        claim(*given, **told)
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "claim", interrupted)
    assert not run(job_of(dataflow), "1").success
    assert status(store, "bobout", "1", "loadbob") == "RESUBMIT"


def test_specs_cover_the_datasets_that_jobs_write_and_the_rest_is_external(
    dataflow: DataflowResource, store: Store
) -> None:
    register(store, "sum", ["bobout"], ["total"])
    register(store, "other", ["bobin"], ["total"])
    register(store, "self", ["x"], ["x"])
    catalog = dataflow.catalog()

    specs = {spec.key.to_user_string(): spec for spec in dataflow_specs(catalog)}
    assert sorted(specs) == ["bobout", "total"]
    assert specs["total"].metadata["opendataflow/job"] == "other"
    assert [s.key.to_user_string() for s in dataflow_specs(catalog, jobs=["sum"])] == ["total"]
    with pytest.raises(WrongUse, match="both write 'total'"):
        dataflow_specs(catalog, jobs=["sum", "other"])
    for flawed in ("nothing", "self"):  # a warning, and no asset
        assert not dataflow_assets(job=flawed, dataflow=catalog)(print).keys
    rest = external_assets(catalog, {"bobout", "total"})
    assert [spec.key.to_user_string() for spec in rest] == ["bobin", "x"]
    dg.Definitions.validate_loadable(
        dg.Definitions(
            [job_of(dataflow), *external_assets(catalog, {"bobout"})],
            resources={"dataflow": dataflow},
        )
    )


def test_the_definition_is_one_step_with_its_options(dataflow: DataflowResource) -> None:
    assets = job_of(
        dataflow,
        group_name="sales",
        pool="few",
        kinds={"python"},
        op_tags={"a": "b"},
        backfill_policy=dg.BackfillPolicy.single_run(),
        code_version="3",
        required_resource_keys={"more"},
    )
    assert not assets.can_subset
    assert assets.op.name == "loadbob"
    assert assets.op.pool == "few"
    assert assets.required_resource_keys >= {"dataflow", "more"}
    [spec] = assets.specs
    assert (spec.group_name, spec.code_version, spec.kinds) == ("sales", "3", {"python"})
    assert assets.partitions_def == dg.DynamicPartitionsDefinition(name="dataflow/bobin")
    policy = job_of(dataflow).backfill_policy
    assert policy is not None
    assert policy.max_partitions_per_run == 500


SCRIPT = """#!/bin/sh
echo "made $dataid of $bobin_tablename by $dataflow_jobid"
echo "careful" >&2
test "$dataid" != 2 || exit 3
"""


def script(tmp_path: Path, text: str = SCRIPT) -> str:
    path = tmp_path / "loadbob.sh"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def test_a_script_is_run_for_each_chunk_and_its_code_counts(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran], tmp_path: Path
) -> None:
    add_dataset(store, "bobin", tablename="orders")
    for number in "123":
        put(store, "bobin", number)
    assets = script_assets("loadbob", script(tmp_path), dataflow=dataflow)

    ran = run(assets, *"123")

    assert ran.counts == {"made": 2, "skipped": 0, "refused": 0, "failed": 1, "lost": 0}
    assert "2: exit code 3" in ran.reason
    assert [key for _, key in ran.made] == ["1", "3"]


ANSWERING = """#!/bin/sh
exec {python} - <<'EOF'
from dagster_pipes import open_dagster_pipes
with open_dagster_pipes() as pipes:
    pipes.log.info("hello")
    pipes.report_asset_materialization(
        metadata={{"dagster/row_count": 7, "page": {{"type": "url", "raw_value": "https://x.org"}}}}
    )
    pipes.report_asset_check(check_name="sum", passed=pipes.partition_key != "2", severity="ERROR")
EOF
"""


def test_a_script_reports_through_dagster_pipes(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran], tmp_path: Path
) -> None:
    for number in "12":
        put(store, "bobin", number)
    text = ANSWERING.format(python=sys.executable)
    assets = script_assets("loadbob", script(tmp_path, text), dataflow=dataflow)

    ran = run(assets, *"12")
    assert "2: NOT_VALIDATED: sum" in ran.reason
    [entries] = [event.metadata for event in ran.made.values()]
    assert entries["dagster/row_count"].value == 7
    assert entries["page"] == dg.MetadataValue.url("https://x.org")
    assert entries["opendataflow/validated"].value == "sum passed"
    assert str(entries["opendataflow/code"].value).startswith(("git:", "file:"))
    checks = {each.partition: each.passed for each in ran.result.get_asset_check_evaluations()}
    assert checks == {"1": True, "2": False, None: True}, "None: whether any chunk is stale"

    # The same from its record, as it is mirrored when it was made outside.
    truth = truths(store, "bobout", ["1"])["1"]
    [record] = facts(store, "bobout", {"1": truth}).values()
    mirrored = recorded_event("bobout", "1", truth, record, DataflowTranslator())
    for name in ("page", "dagster/row_count", "opendataflow/code"):
        assert mirrored.metadata[name] == entries[name]


def test_a_missing_script_claims_nothing(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    put(store, "bobin", "1")
    ran = run(script_assets("loadbob", "./nothing", dataflow=dataflow), "1")
    assert ran.reason == "cannot start: ./nothing: not found. Nothing was claimed."
    assert status(store, "bobout", "1", "loadbob") is None


LOCATION = """
import time
from pathlib import Path
from types import SimpleNamespace
import dagster as dg
from opendataflow_dagster import DataflowResource, dataflow_assets, script_assets

dataflow = DataflowResource()

def make(chunk):
    Path("at_work").touch()
    time.sleep(60)

kind = Path("kind").read_text()
told = {"dataflow": dataflow, "backfill_policy": dg.BackfillPolicy.single_run()}  # for the CLI
if kind == "script":
    assets = script_assets("loadbob", "./loadbob.sh", stop_grace=3, **told)
else:
    assets = dataflow_assets(job="loadbob", **told)(make)
defs = dg.Definitions(
    [assets], resources={"dataflow": dataflow},
    executor=dg.in_process_executor if kind != "multiprocess" else dg.multiprocess_executor,
)
"""
SLEEPS = """#!/bin/sh
trap 'echo cleaned >cleaned; exit 0' TERM INT
touch at_work
sleep 60 &
wait
"""


class Worker:
    """Start a run of `loadbob` for chunks 1 and 2 in its own process, with its own Dagster."""

    def __init__(self, url: str, folder: Path, kind: str, text: str = SCRIPT) -> None:
        self.dataflow = DataflowResource(url=url)
        self.store = self.dataflow.store
        self.store.init()
        register(self.store, "loadbob", ["bobin"], ["bobout"])
        put(self.store, "bobin", "1")
        put(self.store, "bobin", "2")
        (folder / "location.py").write_text(LOCATION)
        (folder / "kind").write_text(kind)
        script(folder, text)
        self.home = folder / "home"
        self.home.mkdir()
        (self.home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
        self.printed = folder / "printed"
        environ = {**os.environ, "DAGSTER_HOME": str(self.home), "DATAFLOW_URL": url}
        environ.pop("PYTEST_CURRENT_TEST")  # with it, Dagster captures no output of steps
        with dg.DagsterInstance.local_temp(str(self.home)) as instance:
            instance.add_dynamic_partitions("dataflow/bobin", ["1", "2"])
        with self.printed.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "dagster",
                    "asset",
                    "materialize",
                    "-f",
                    "location.py",
                    "--select",
                    "*",
                    "--partition-range",
                    "1...2",
                ],
                env=environ,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        vars(self.store).pop("person").close()
        self.store.close()

    def wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + 60
        while not path.exists():
            assert self.process.poll() is None, self.printed.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def run(self, *, canceling: bool = False) -> dg.DagsterRun:
        """The run as Dagster has it; `canceling` records first that a person terminated it."""
        with dg.DagsterInstance.local_temp(str(self.home)) as instance:
            [found] = instance.get_runs()
            if canceling:
                instance.report_run_canceling(found)
        return found


@pytest.mark.parametrize(
    ("kind", "number", "asked"),
    [
        ("function", signal.SIGTERM, True),
        ("multiprocess", signal.SIGINT, True),
        ("script", signal.SIGTERM, True),
        ("script", signal.SIGINT, False),
    ],
)
def test_terminating_a_run_settles_its_chunk(
    sqlite_url: str, tmp_path: Path, kind: str, number: int, asked: bool
) -> None:
    with Worker(sqlite_url, tmp_path, kind, SLEEPS) as worker:
        worker.wait_for(tmp_path / "at_work")
        worker.run(canceling=asked)
        worker.process.send_signal(number)
        worker.process.wait(30)

        found = worker.run()
        ended = dg.DagsterRunStatus.CANCELED if asked else dg.DagsterRunStatus.FAILURE
        assert found.status == ended, worker.printed.read_text()
        store = worker.store
        assert statuses(store) == {
            ("bobin", "loader", "1"): ("OUT", "READY"),
            ("bobin", "loader", "2"): ("OUT", "READY"),
            ("bobout", "loadbob", "1"): ("OUT", "HOLD" if asked else "RESUBMIT"),
        }
        [(why,)] = sql(
            store, "select why from dataevent where status_before = 'RUNNING' and locktype = 'OUT'"
        )
        if asked:
            assert why == f"terminated by a person in Dagster: run {found.run_id}"
        else:
            assert why.startswith(f"run {found.run_id} was interrupted (")
        assert sql(store, "select * from worker") == []
        assert (kind == "script") == (tmp_path / "cleaned").exists()


def test_what_a_script_prints_is_in_the_compute_log(sqlite_url: str, tmp_path: Path) -> None:
    with Worker(sqlite_url, tmp_path, "script") as worker:
        assert worker.process.wait(60) == 1, worker.printed.read_text()  # chunk 2 fails
        folder = worker.home / "storage" / worker.run().run_id / "compute_logs"
        out = "".join(path.read_text() for path in folder.glob("*.out"))
        err = "".join(path.read_text() for path in folder.glob("*.err"))
        assert "made 1 of" in out
        assert "made 2 of" in out
        assert err.count("careful") == 2
        assert status(worker.store, "bobout", "1", "loadbob") == "READY"


def test_trivial_chunks_take_milliseconds(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    count = 200
    sql(
        store,
        "with recursive n(i) as (select 1 union all select i + 1 from n where i < :count) "
        "insert into datastatus (datasetid, jobid, dataid, locktype, status) "
        "select 'bobin', 'loader', cast(i as varchar), 'OUT', 'READY' from n",
        count=count,
    )
    assets = job_of(dataflow)
    began = time.process_time()

    ran = run(assets)

    each = (time.process_time() - began) / count
    assert len(ran.made) == count
    assert each < 0.03, f"{each * 1000:.1f} ms of work"  # 5 ms, of which 2 are ours
    size = len(json.dumps({k: str(v.value) for k, v in ran.made["bobout", "1"].metadata.items()}))
    assert size < 1000


def test_chunks_that_a_dial_holds_back_wait(
    dataflow: DataflowResource,
    store: Store,
    run: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key in keys(4):
        put(store, "bobin", key)
    [other] = store.claim("loadbob", owner="somebody else", only=keys(4)[3])
    policy(store, "loadbob", concurrency=1)
    looks: list[float] = []

    def look(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            store.finish(other)

    clock = SimpleNamespace(sleep=look, monotonic=time.monotonic)
    monkeypatch.setattr("opendataflow_dagster.dagster.step.time", clock)
    ran = run(job_of(dataflow), *keys(3))
    assert ran.success
    assert len(looks) >= 3
    assert {row[1] for row in statuses(store).values()} == {"READY"}


@pytest.mark.parametrize(("dial", "most"), [(None, 1), (3, 3)])
def test_a_run_without_partitions_claims_batches_by_the_dial(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran], dial: int | None, most: int
) -> None:
    for number in range(1, 6):
        put(store, "bobin", str(number))
    policy(store, "loadbob", batch_size=dial)
    held = []

    def work(chunk: Chunk) -> None:
        held.append(sql(store, "select count(*) from claim where owner is not null")[0][0])
        if chunk.dataid == "2":
            raise ValueError("the second is bad")

    ran = run(job_of(dataflow, work), "1", catch_up="true")

    assert [key for _, key in ran.made] == ["1", "3", "4", "5"]
    assert max(held) == most
    assert ran.counts["failed"] == 1


def test_a_run_for_named_partitions_claims_them_one_by_one(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    for key in keys(3):
        put(store, "bobin", key)
    policy(store, "loadbob", batch_size=3)
    held = []

    def work(chunk: Chunk) -> None:
        held.append(sql(store, "select count(*) from claim where owner is not null")[0][0])

    assert run(job_of(dataflow, work), *keys(3)).success
    assert held == [1, 1, 1]


def test_a_pause_gives_back_claimed_chunks_that_havent_begun(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    for number in range(1, 6):
        put(store, "bobin", str(number))
    policy(store, "loadbob", batch_size=4, max_attempts=2)
    tried = []

    def work(chunk: Chunk) -> None:
        tried.append(chunk.dataid)
        if tried == ["1"]:
            raise ValueError("it is tried again at once")
        if chunk.dataid == "2":
            sql(store, "update jobpolicy set paused_until = '2100-01-01'")

    ran = run(job_of(dataflow, work), "1", catch_up="true")

    assert ran.success
    assert tried == ["1", "1", "2"]
    words = {key[2]: word for key, (_, word) in statuses(store).items() if key[0] == "bobout"}
    assert words == {"1": "READY", "2": "READY", "3": "RESUBMIT", "4": "RESUBMIT"}
    check(store)


def test_an_interrupt_gives_back_claimed_chunks_that_havent_begun(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    for number in range(1, 5):
        put(store, "bobin", str(number))
    policy(store, "loadbob", batch_size=4)

    def work(chunk: Chunk) -> None:
        if chunk.dataid == "2":
            raise dg.DagsterExecutionInterruptedError("canceled")

    with suppress(BaseException):
        run(job_of(dataflow, work), "1", catch_up="true")

    words = {key[2]: word for key, (_, word) in statuses(store).items() if key[0] == "bobout"}
    assert words == {"1": "READY", "2": "RESUBMIT", "3": "RESUBMIT", "4": "RESUBMIT"}
    assert {claim.attempts for claim in take(store, "loadbob", k=4)} == {1}


def test_terminating_a_run_puts_its_claimed_chunks_on_hold(
    dataflow: DataflowResource,
    store: Store,
    run: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for number in range(1, 5):
        put(store, "bobin", str(number))
    policy(store, "loadbob", batch_size=3)

    def work(chunk: Chunk, context: dg.AssetExecutionContext) -> None:
        if chunk.dataid == "2":
            context.instance.report_run_canceling(context.run)
            raise dg.DagsterExecutionInterruptedError("canceled")

    with suppress(BaseException):
        run(job_of(dataflow, work), "1", catch_up="true")

    words = {key[2]: word for key, (_, word) in statuses(store).items() if key[0] == "bobout"}
    assert words == {"1": "READY", "2": "HOLD", "3": "HOLD"}
    release(store, "loadbob", ["2", "3"])
    assert [claim.dataid for claim in take(store, "loadbob", k=4)] == ["2", "3", "4"]


def test_what_a_function_returns_is_published_as_the_chunk(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran], tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")

    add_dataset(store, "bobout", hostname=str(tmp_path / "out"), format="csv")
    for key in keys(2):
        put(store, "bobin", key)

    def frame(chunk: Chunk) -> Any:
        return pandas.DataFrame({"day": [chunk.dataid], "amount": [17]})

    ran = run(job_of(dataflow, frame), *keys(2))
    assert ran.success
    for key in keys(2):
        told = metadata(ran.made["bobout", key])
        assert told["rows"] == 1
        assert told["location"].startswith(str(tmp_path / "out"))
        assert "registered as" not in told["location"]
        [file] = Path(told["location"]).glob("*.csv")
        assert pandas.read_csv(file).to_dict("records") == [{"day": key, "amount": 17}]


def test_a_run_ended_from_outside_produces_no_more_chunks(
    dataflow: DataflowResource, store: Store, run: Callable[..., Ran]
) -> None:
    from opendataflow_dagster.store.claims import runs_at_work, settle_run

    for key in keys(3):
        put(store, "bobin", key)
    made = []

    def ended_from_outside(chunk: Chunk) -> None:
        made.append(chunk.dataid)
        [runid] = runs_at_work(store)
        settle_run(store, runid, why="forced to its end", canceled=True)

    ran = run(job_of(dataflow, ended_from_outside), *keys(3))
    assert not ran.success
    assert made == keys(3)[:1]
    assert {row[1] for row in statuses(store).values()} == {"READY", "HOLD"}


def test_a_chunk_claimed_by_another_worker_is_retried_shortly(
    dataflow: DataflowResource,
    store: Store,
    run: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key in keys(2):
        put(store, "bobin", key)
    [other] = store.claim("loadbob", owner="somebody else", only=keys(2)[0])
    clock = SimpleNamespace(  # ours, not other threads'
        sleep=lambda seconds: store.finish(other), monotonic=time.monotonic
    )
    monkeypatch.setattr("opendataflow_dagster.dagster.step.time", clock)
    assert run(job_of(dataflow), *keys(2)).success
    [again] = store.claim("loadbob", owner="somebody else", only=keys(2)[0]) or [None]
    assert again is None
    assert {row[1] for row in statuses(store).values()} == {"READY"}


def test_a_chunk_that_another_worker_keeps_is_refused(
    dataflow: DataflowResource,
    store: Store,
    run: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("opendataflow_dagster.dagster.step.LOCK_WAIT_SECONDS", 0.0)
    put(store, "bobin", keys(1)[0])
    store.claim("loadbob", owner="somebody else")
    assert not run(job_of(dataflow), *keys(1)).success
    assert statuses(store)["bobout", "loadbob", keys(1)[0]] == ("OUT", "RUNNING")
