"""Dagster calls stale what the tables call stale, for chunks of any producer."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.loader import LoadingContextForTest

from opendataflow_dagster import Chunk, DataflowResource, Result, build_definitions
from opendataflow_dagster.dagster.reconcile import reconcile
from opendataflow_dagster.dagster.versions import STALE_CHECK
from opendataflow_dagster.explain.explain import staleness
from opendataflow_dagster.model import READY, Fact, new_owner
from opendataflow_dagster.store import operations, registry
from opendataflow_dagster.store.overview import truths
from tests.support.dagster_instances import NAMES, Grid
from tests.support.store_fixtures import sql

JOBS = {"copies": "copy", "sums": "sum"}
DAYS = ["2026-11-01", "2026-11-02", "2026-11-03"]


def nothing() -> None:
    pass


class Flow:
    """`orders` come from outside, `copy` produces `copies` from them, and `sum` produces `sums`.

    What the jobs tell as the fingerprint of what they make is `print_of`.
    """

    def __init__(self, grid: Grid, dataflow: DataflowResource) -> None:
        self.grid, self.store, self.instance = grid, grid.store, grid.instance
        self.dataflow = dataflow
        self.print_of: dict[str, str | None] = {"copies": None, "sums": None}
        self.made: list[tuple[str, str]] = []
        self.meanwhile = nothing
        registry.add_job(self.store, "sum", ["copies"], ["sums"])
        self.defs = build_definitions(
            dataflow, functions={"copy": self._make, "sum": self._make}, translator=NAMES
        )
        self.graph = self.defs.resolve_asset_graph()
        self.codes = {key: None for key in self.graph.materializable_asset_keys}

    def _make(self, chunk: Chunk) -> Result:
        [datasetid] = chunk.outputs
        self.made.append((datasetid, chunk.dataid))
        self.meanwhile()
        return Result(fingerprint=self.print_of[datasetid])

    def arrive(self, day: str) -> None:
        """Write orders, for the first time or again."""
        if day in truths(self.store, "orders"):
            operations.resubmit(self.store, operations.EXTERNAL, [day])
        operations.ready(self.store, "orders", [day])

    def make(self, datasetid: str, day: str) -> None:
        """Produce a chunk outside of Dagster, again if it exists."""
        jobid = JOBS[datasetid]
        if truths(self.store, datasetid).get(day):
            operations.resubmit(self.store, jobid, [day])
        for claim in self.store.claim(jobid, owner=new_owner(), only=day):
            fact = Fact(datasetid, day, fingerprint=self.print_of[datasetid])
            self.store.finish(claim, [fact])

    def run(self, datasetid: str, *days: str, **tags: str) -> dg.ExecuteInProcessResult:
        """Produce chunks in Dagster."""
        self.tick()
        key = NAMES.asset_key(datasetid)
        job = self.defs.resolve_implicit_job_def_def_for_assets([key])
        assert job is not None
        told = {name.replace("__", "/"): value for name, value in tags.items()}
        bounds = ("dagster/asset_partition_range_start", "dagster/asset_partition_range_end")
        if len(days) > 1:
            told |= dict(zip(bounds, (days[0], days[-1]), strict=True))
        return job.execute_in_process(
            instance=self.instance,
            asset_selection=[key],
            partition_key=days[0] if len(days) == 1 else None,
            tags=told,
            raise_on_error=False,
        )

    def tick(self) -> None:
        done = reconcile(
            self.store, self.grid.mirror, NAMES, self.grid.cursor, made_here=self.codes
        )
        self.grid.cursor = done.cursor

    def in_dagster(self) -> dict[tuple[str, str], bool]:
        """Whether Dagster calls materialized chunks stale."""
        context = LoadingContextForTest(self.instance)
        resolver = CachingStaleStatusResolver(self.instance, self.graph, context)
        return {
            (datasetid, day): resolver.get_status(NAMES.asset_key(datasetid), day).value == "STALE"
            for datasetid, day in self.in_tables()
        }

    def in_tables(self) -> dict[tuple[str, str], bool]:
        """Whether `odf why` calls READY chunks stale."""
        return {
            (datasetid, day): bool(staleness(self.store, jobid, day).line)
            for datasetid, jobid in JOBS.items()
            for day, truth in truths(self.store, datasetid).items()
            if truth.status == READY
        }

    def event(self, datasetid: str, day: str) -> dg.AssetMaterialization:
        """Return the newest event of a chunk."""
        wanted = dg.AssetRecordsFilter(NAMES.asset_key(datasetid), asset_partitions=[day])
        [record] = self.instance.fetch_materializations(wanted, limit=1).records
        assert record.asset_materialization
        return record.asset_materialization

    def answers(self, datasetid: str) -> int:
        """Count the evaluations of the check."""
        check = dg.AssetCheckKey(NAMES.asset_key(datasetid), STALE_CHECK)
        history = self.instance.event_log_storage.get_asset_check_execution_history
        return len(history(check, limit=100))

    def check(self, datasetid: str) -> dg.AssetCheckEvaluation:
        """Return the last result of the check that counts stale chunks."""
        key = dg.AssetCheckKey(NAMES.asset_key(datasetid), STALE_CHECK)
        storage = self.instance.event_log_storage
        kept = storage.get_asset_check_execution_history(key, limit=5)
        found = [each.event.get_dagster_event().event_specific_data for each in kept if each.event]
        return next(each for each in found if isinstance(each, dg.AssetCheckEvaluation))

    def is_evaluated(self, datasetid: str) -> bool:
        """Whether the check's page shows its last answer, not "Not evaluated"."""
        key = dg.AssetCheckKey(NAMES.asset_key(datasetid), STALE_CHECK)
        [last] = self.instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
        return asyncio.run(
            last.targets_latest_materialization(LoadingContextForTest(self.instance))
        )

    def agrees(self) -> dict[tuple[str, str], bool]:
        """Return what is stale, after checking that Dagster and its checks agree."""
        self.tick()
        stale = self.in_tables()
        assert self.in_dagster() == stale
        for datasetid in {name for name, _ in stale}:
            count = sum(is_stale for (name, _), is_stale in stale.items() if name == datasetid)
            told = self.check(datasetid)
            assert (told.passed, told.metadata["opendataflow/stale"].value) == (not count, count)
        return stale


@pytest.fixture
def flow(grid: Grid, kind: str, request: pytest.FixtureRequest) -> Iterator[Flow]:
    dataflow = DataflowResource(url=request.getfixturevalue(f"{kind}_url"))
    yield Flow(grid, dataflow)
    dataflow.store.close()


def told(event: dg.AssetMaterialization) -> dict[str, Any]:
    return {name.removeprefix("opendataflow/"): each.value for name, each in event.metadata.items()}


def test_a_chunk_of_replaced_data_is_stale_in_dagster_too(flow: Flow) -> None:
    day = DAYS[0]
    flow.arrive(day)
    flow.make("copies", day)
    flow.make("sums", day)
    assert flow.agrees() == {("copies", day): False, ("sums", day): False}
    flow.arrive(day)
    assert flow.agrees() == {("copies", day): True, ("sums", day): False}
    assert flow.run("copies", day).success
    assert flow.agrees() == {("copies", day): False, ("sums", day): True}
    flow.make("sums", day)
    assert not any(flow.agrees().values())


def test_producing_the_same_data_again_makes_nothing_stale(flow: Flow) -> None:
    day = DAYS[0]
    flow.print_of["copies"] = "the same"
    flow.arrive(day)
    flow.run("copies", day)
    flow.make("sums", day)
    flow.arrive(day)
    flow.make("copies", day)
    assert flow.agrees() == {("copies", day): False, ("sums", day): False}
    flow.run("copies", day, opendataflow__resubmit="true")
    assert flow.agrees() == {("copies", day): False, ("sums", day): False}
    tags = flow.event("copies", day).tags or {}
    assert tags["dagster/data_version"] == "the same"
    [(generation,)] = sql(
        flow.store,
        "select generation from datastatus where datasetid = 'copies' and locktype = 'OUT'",
    )
    assert told(flow.event("copies", day))["generation"] == generation


def test_a_run_right_after_its_input_became_ready_is_not_stale(flow: Flow) -> None:
    """Dagster learns of the input only afterwards."""
    day = DAYS[0]
    flow.arrive(day)
    flow.tick()
    flow.make("copies", day)
    key = NAMES.asset_key("sums")
    job = flow.defs.resolve_implicit_job_def_def_for_assets([key])
    assert job
    ran = job.execute_in_process(instance=flow.instance, asset_selection=[key], partition_key=day)
    assert ran.success
    assert flow.agrees() == {("copies", day): False, ("sums", day): False}


def test_the_check_is_evaluated_even_if_the_sensor_reported_it_during_a_run(flow: Flow) -> None:
    """The check result of the run has its plan's position, before that of the sensor."""
    for day in DAYS[:3]:
        flow.arrive(day)
    flow.make("copies", DAYS[2])

    def outside() -> None:
        flow.tick()  # the run has planned its answer, and hasn't given it
        flow.make("copies", DAYS[1])
        flow.tick()

    flow.meanwhile = outside
    assert flow.run("copies", DAYS[0]).success
    flow.tick()
    assert flow.is_evaluated("copies")
    answers = flow.answers("copies")
    flow.tick()
    assert flow.answers("copies") == answers


def test_a_stale_chunk_in_a_backfill_of_several_stays_stale(flow: Flow) -> None:
    for day in DAYS[:2]:
        flow.arrive(day)
        flow.make("copies", day)
    flow.arrive(DAYS[0])
    flow.made.clear()
    assert flow.run("copies", *DAYS[:2]).success
    assert flow.made == []
    stale, fresh = (told(flow.event("copies", day)) for day in DAYS[:2])
    assert (stale["skipped"], stale["stale"]) == (True, True)
    assert "it is stale" in stale["right"]
    assert (fresh["skipped"], fresh.get("stale")) == (True, None)
    assert flow.agrees() == {("copies", DAYS[0]): True, ("copies", DAYS[1]): False}


AUTOMATION = {"dagster__from_automation_condition": "true"}
BACKFILL = {"dagster__backfill": "gone"}


@pytest.mark.parametrize(
    ("dial", "days", "tags", "is_made"),
    [
        ("none", 1, {}, True),
        ("auto", 1, {}, True),
        ("auto", 2, {}, False),
        ("auto", 1, BACKFILL, False),
        ("auto", 2, AUTOMATION, True),
        ("auto", 1, BACKFILL | AUTOMATION, True),
        ("auto", 1, {"dagster__sensor_name": "theirs"}, True),
        ("skip", 1, {}, False),
        ("skip", 1, AUTOMATION, False),
        ("remake", 2, {}, True),
        ("remake", 1, BACKFILL, True),
    ],
)
def test_the_dial_says_whether_stale_chunks_are_produced_again(
    flow: Flow, dial: str, days: int, tags: dict[str, str], is_made: bool
) -> None:
    registry.set_policy(flow.store, "copy", {"on_stale": dial})
    for day in DAYS[:2]:
        flow.arrive(day)
        flow.make("copies", day)
    flow.arrive(DAYS[0])
    ran = flow.run("copies", *DAYS[:days], **tags)
    assert ran.success
    assert flow.made == ([("copies", DAYS[0])] if is_made else [])
    assert flow.agrees()["copies", DAYS[0]] is not is_made


def test_stale_chunks_that_cannot_be_claimed_stay_unchanged(flow: Flow) -> None:
    """A READY chunk isn't given up if it can't be produced again: its readers continue."""
    day = DAYS[0]
    registry.add_job(flow.store, "copy", ["orders", "rates"], ["copies"])
    flow.arrive(day)
    operations.ready(flow.store, "rates", [day])
    flow.make("copies", day)
    flow.arrive(day)
    operations.resubmit(flow.store, operations.EXTERNAL, [day])
    operations.ready(flow.store, "orders", [day])
    assert flow.run("copies", day).success
    assert flow.made == []
    assert truths(flow.store, "copies")[day].status == READY


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))]


@pytest.mark.parametrize("seed", SEEDS)
def test_dagster_and_the_tables_agree_after_random_changes(flow: Flow, seed: int) -> None:
    chance = random.Random(seed)
    for day in DAYS:
        flow.arrive(day)
    for _ in range(25):
        day, datasetid = chance.choice(DAYS), chance.choice(list(JOBS))
        flow.print_of[datasetid] = chance.choice([None, "one", "2"])
        act = chance.choice(["arrive", "make", "run", "run all"])
        if act == "arrive":
            flow.arrive(day)
        elif act == "make":
            flow.make(datasetid, day)
        else:
            flow.run(datasetid, *([day] if act == "run" else DAYS))
        if chance.random() < 0.7:
            flow.agrees()
    flow.agrees()


def test_the_first_tick_on_old_tables_finds_stale_chunks(flow: Flow) -> None:
    """Dagster has no event of what was consumed then."""
    for day in DAYS[:2]:
        flow.arrive(day)
        flow.make("copies", day)
        flow.make("sums", day)
    flow.arrive(DAYS[0])
    flow.make("copies", DAYS[1])
    assert flow.agrees() == {
        ("copies", DAYS[0]): True,
        ("copies", DAYS[1]): False,
        ("sums", DAYS[0]): False,
        ("sums", DAYS[1]): True,
    }
