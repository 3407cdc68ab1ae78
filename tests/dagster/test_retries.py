"""Retries by Dagster: a chunk is claimed again for each, and FAILED only after the last."""

import os
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import dagster as dg
import pytest
from dagster._core.execution.plan import active

from opendataflow_dagster import Chunk, DataflowResource, dataflow_assets, dataflow_check
from opendataflow_dagster.dagster.sensors import settle_ended_runs
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, policy, put, register, sql, status

RANGE = "dagster/asset_partition_range_start", "dagster/asset_partition_range_end"

Run = Callable[..., dg.ExecuteInProcessResult]


@pytest.fixture
def dataflow(url: str) -> Iterator[DataflowResource]:
    """The tables, with a job `loadbob` that produces `bobout` from `bobin`, with chunks 1 to 3."""
    made = DataflowResource(url=url)
    made.store.init()
    register(made.store, "loadbob", ["bobin"], ["bobout"])
    for dataid in "123":
        put(made.store, "bobin", dataid)
    yield made
    made.store.close()
    vars(made.store).pop("person").close()


@pytest.fixture
def store(dataflow: DataflowResource) -> Store:
    return dataflow.store


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        made.add_dynamic_partitions("dataflow/bobin", list("123"))
        yield made


@pytest.fixture
def run(dataflow: DataflowResource, instance: dg.DagsterInstance) -> Run:
    """Run a function as `loadbob` for some partitions, or for what the tables offer."""

    def ran(fn: Callable[..., Any], *keys: str, resubmit: bool = False, **options: Any) -> Any:
        assets = dataflow_assets(job="loadbob", dataflow=dataflow, **options)(fn)
        tags = dict(zip(RANGE, (keys[0], keys[-1]), strict=True)) if keys else {}
        return dg.materialize(
            [assets],
            instance=instance,
            resources={"dataflow": dataflow},
            tags=tags | {"opendataflow/resubmit": str(resubmit).lower()},
            raise_on_error=False,
        )

    return ran


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What happens while Dagster waits for a retry: one of these each time."""
    happenings: list[Callable[[], None]] = []

    def sleep(_: float) -> None:
        happenings.pop(0)() if happenings else None

    # Each look at the clock is a minute later, so that no test waits.
    times = iter(range(0, 10**9, 60))
    clock = SimpleNamespace(time=lambda: float(next(times)), sleep=sleep)
    monkeypatch.setattr(active, "time", clock)
    return happenings


def moves(store: Store, dataid: str = "1") -> list[str]:
    """Return the statuses that a chunk of `bobout` has had, in order."""
    rows = sql(
        store,
        "select status_after from dataevent where datasetid = 'bobout' and dataid = :d "
        "order by seq",
        d=dataid,
    )
    return [each for (each,) in rows]


def why_failed(result: dg.ExecuteInProcessResult) -> str:
    [event] = result.get_step_failure_events()
    failure = event.step_failure_data.user_failure_data
    return str(failure and failure.description)


def test_a_chunk_is_claimed_again_for_each_retry_and_the_others_are_left_alone(
    store: Store, run: Run, waits: list[Any]
) -> None:
    tries: list[tuple[str, int, int]] = []
    generations = set()

    def make(chunk: Chunk, context: dg.AssetExecutionContext) -> None:
        tries.append((chunk.dataid, context.retry_number, chunk.attempts))
        generations.add(chunk.generation)
        if chunk.dataid == "2" and context.retry_number < 2:
            raise ValueError("not yet")

    result = run(make, *"123", retry_policy=dg.RetryPolicy(max_retries=2, delay=30))

    assert result.success
    assert tries == [("1", 0, 1), ("2", 0, 1), ("3", 0, 1), ("2", 1, 2), ("2", 2, 3)]
    assert len(generations) == 5
    assert result.retry_attempts_for_node("loadbob") == 2
    told = [event.partition for event in result.get_asset_materialization_events()]
    assert told == ["1", "3", "2"]
    assert "FAILED" not in moves(store, "2")
    [why] = sql(
        store,
        "select why from dataevent where datasetid = 'bobout' and why like 'ValueError%1 of 2%'",
    )
    assert why == ("ValueError: not yet (retry 1 of 2 by Dagster in 30 s)",)
    assert sql(store, "select * from claim") == []
    check(store)


def request(_: Any) -> None:
    raise dg.RetryRequested(max_retries=1, seconds_to_wait=5) from OSError("flaky")


class Api(dg.ConfigurableResource):
    """A service that requests a retry itself."""

    url: str = "http://nowhere.invalid"

    def call(self) -> None:
        request(None)


@pytest.mark.parametrize("how", ["function", "check", "warning", "resource"])
def test_after_the_last_retry_the_chunk_is_failed(
    store: Store, run: Run, waits: list[Any], how: str
) -> None:
    options: dict[str, Any] = {}
    if how in ("check", "warning"):
        options["checks"] = [dataflow_check(blocking=how == "check", name="fine")(request)]
    elif how == "resource":
        options["resource_defs"] = {"api": Api()}
        options["required_resource_keys"] = {"api"}

    def make(chunk: Chunk, context: dg.AssetExecutionContext) -> None:
        if how == "function":
            request(chunk)
        if how == "resource":
            context.resources.api.call()

    result = run(make, "1", **options)

    assert result.retry_attempts_for_node("loadbob") == 1
    assert moves(store)[-1] == "FAILED"
    assert moves(store).count("FAILED") == 1
    assert why_failed(result).endswith("1: OSError: flaky")
    check(store)


def test_between_two_tries_the_run_keeps_its_chunk(
    store: Store, run: Run, waits: list[Any]
) -> None:
    found = []

    def look() -> None:
        found.append(status(store, "bobout", "1", "loadbob"))
        found.append((store.next_change("loadbob", leases=True) or 0) > 590)
        found.append(store.claim("loadbob", owner="another", only="1"))

    waits.append(look)
    policy(store, "loadbob", lease_seconds=30)

    def make(chunk: Chunk, context: dg.AssetExecutionContext) -> None:
        assert context.retry_number

    assert run(make, "1", retry_policy=dg.RetryPolicy(delay=600)).success
    assert found == ["RUNNING", True, []]


def test_a_failure_that_allows_no_retries_is_final_at_once(
    store: Store, run: Run, waits: list[Any]
) -> None:
    policy(store, "loadbob", max_attempts=5)
    tries = []

    def make(chunk: Chunk) -> None:
        tries.append(chunk.dataid)
        raise dg.Failure("it is hopeless", allow_retries=chunk.dataid != "1")

    result = run(make, *"12", retry_policy=dg.RetryPolicy(max_retries=1), resubmit=True)

    assert tries == ["1", *"22222"]  # one by Dagster, the others by the job's policy
    assert moves(store, "1") == ["RUNNING", "FAILED"]
    assert "2: Failure: it is hopeless" in why_failed(result)
    assert "1: HELD: 'bobout' is FAILED" in why_failed(result)
    check(store)


def test_a_check_that_fails_is_retried_by_the_policy(
    store: Store, run: Run, waits: list[Any]
) -> None:
    @dataflow_check()
    def complete(chunk: Chunk) -> str:
        return "" if chunk.attempts == 2 else "a part is missing"

    result = run(lambda chunk: None, "1", checks=[complete], retry_policy=dg.RetryPolicy())

    assert result.success
    assert [each.passed for each in result.get_asset_check_evaluations()[:2]] == [False, True]
    rows = sql(
        store, "select validated from chunkfact where datasetid = 'bobout' order by generation"
    )
    assert [bool(validated) for (validated,) in rows] == [False, True]


def test_a_retry_without_partitions_keeps_earlier_failures(
    store: Store, run: Run, waits: list[Any]
) -> None:
    policy(store, "loadbob", concurrency=1)
    tries = []

    def make(chunk: Chunk, context: dg.AssetExecutionContext) -> None:
        tries.append(chunk.dataid)
        if chunk.dataid == "1":
            raise dg.Failure("hopeless", allow_retries=False)
        if chunk.dataid == "2" and not context.retry_number:
            raise ValueError("not yet")

    result = run(make, retry_policy=dg.RetryPolicy())

    assert tries == ["1", "2", "2"]  # what it keeps takes up the dial: 3 is for another run
    assert status(store, "bobout", "2", "loadbob") == "READY"
    assert "1 more failed in an earlier try" in why_failed(result)
    assert run(make, retry_policy=dg.RetryPolicy()).success
    assert tries[-1] == "3"
    check(store)


def test_kept_claims_give_way_to_other_chunks_of_the_run(
    store: Store, run: Run, waits: list[Any]
) -> None:
    policy(store, "loadbob", concurrency=1)
    tries = []

    def make(chunk: Chunk, context: dg.AssetExecutionContext) -> None:
        tries.append(chunk.dataid)
        assert context.retry_number

    assert run(make, *"123", retry_policy=dg.RetryPolicy()).success
    assert tries == [*"123", *"123"]
    check(store)


def test_a_forced_chunk_isnt_produced_again_by_the_retry_of_another(
    store: Store, run: Run, waits: list[Any]
) -> None:
    assert run(lambda chunk: None, *"12").success
    tries = []

    def make(chunk: Chunk, context: dg.AssetExecutionContext) -> None:
        tries.append(chunk.dataid)
        assert chunk.dataid == "1" or context.retry_number

    assert run(make, *"12", resubmit=True, retry_policy=dg.RetryPolicy()).success
    assert tries == ["1", "2", "2"]


def end_as(kind: str) -> Callable[[dg.DagsterInstance], None]:
    def end(instance: dg.DagsterInstance) -> None:
        [record] = instance.get_run_records(limit=1)
        run = record.dagster_run
        instance.report_run_canceling(run)
        (instance.report_run_canceled if kind == "canceled" else instance.report_run_failed)(run)

    return end


@pytest.mark.parametrize(("kind", "then"), [("canceled", "HOLD"), ("failed", "RESUBMIT")])
def test_a_run_that_ends_while_it_waits_for_a_retry_leaves_nothing_behind(
    store: Store,
    run: Run,
    instance: dg.DagsterInstance,
    waits: list[Any],
    kind: str,
    then: str,
) -> None:
    def end() -> None:
        end_as(kind)(instance)
        settle_ended_runs(store, instance)
        raise KeyboardInterrupt

    waits.append(end)

    def make(chunk: Chunk) -> None:
        assert chunk.dataid != "1"

    assert not run(make, *"12", retry_policy=dg.RetryPolicy(delay=600)).success
    assert status(store, "bobout", "1", "loadbob") == then
    assert status(store, "bobout", "2", "loadbob") == "READY"
    assert sql(store, "select * from claim where owner is not null") == []
    check(store)


def test_a_run_that_is_terminated_while_its_retry_works_holds_the_chunk(
    store: Store, run: Run, instance: dg.DagsterInstance, waits: list[Any]
) -> None:
    def make(chunk: Chunk, context: dg.AssetExecutionContext) -> None:
        assert context.retry_number
        instance.report_run_canceling(context.run)
        os.kill(os.getpid(), signal.SIGINT)

    assert not run(make, "1", retry_policy=dg.RetryPolicy(max_retries=3)).success
    assert status(store, "bobout", "1", "loadbob") == "HOLD"
    check(store)
