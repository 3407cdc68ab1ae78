"""Checks of a chunk: they gate READY, and Dagster has their result for each chunk."""

from collections.abc import Callable, Iterator
from typing import Any

import dagster as dg
import pytest

from opendataflow_dagster import Checked, Chunk, DataflowResource, Result, dataflow_check
from opendataflow_dagster.chunk import Place
from opendataflow_dagster.dagster.assets import dataflow_assets
from opendataflow_dagster.dagster.checks import ChunkCheck
from opendataflow_dagster.dagster.versions import STALE_CHECK
from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import policy, put, register, sql, status, take


@pytest.fixture
def dataflow(url: str) -> Iterator[DataflowResource]:
    made = DataflowResource(url=url)
    made.store.init()
    register(made.store, "loadbob", ["bobin"], ["bobout"])
    for number in range(1, 4):
        put(made.store, "bobin", str(number))
    yield made
    made.store.close()
    vars(made.store).pop("person").close()


@pytest.fixture
def store(dataflow: DataflowResource) -> Store:
    return dataflow.store


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        made.add_dynamic_partitions("dataflow/bobin", ["1", "2", "3"])
        yield made


Run = Callable[..., dg.ExecuteInProcessResult]


@pytest.fixture
def run(dataflow: DataflowResource, instance: dg.DagsterInstance) -> Run:
    """Produce chunks 1 to 3, or one of them, with these checks."""

    def ran(
        *checks: ChunkCheck, key: str | None = None, fn: Callable[[Chunk], Any] | None = None
    ) -> dg.ExecuteInProcessResult:
        assets = dataflow_assets(job="loadbob", dataflow=dataflow, checks=checks)(
            fn or (lambda chunk: Result(int(chunk.dataid)))
        )
        span = (
            {}
            if key
            else {
                "dagster/asset_partition_range_start": "1",
                "dagster/asset_partition_range_end": "3",
            }
        )
        return dg.materialize(
            [assets],
            instance=instance,
            resources={"dataflow": dataflow},
            partition_key=key,
            tags=span,
            raise_on_error=False,
        )

    return ran


@dataflow_check()
def not_two(chunk: Chunk) -> str:
    """There are never two."""
    return "two" if chunk.results["bobout"].rows == 2 else ""


@dataflow_check(blocking=False)
def odd(chunk: Chunk) -> bool:
    return chunk.results["bobout"].rows != 2


def answers(result: dg.ExecuteInProcessResult) -> dict[tuple[str, str | None], bool]:
    return {
        (each.check_name, each.partition): each.passed
        for each in result.get_asset_check_evaluations()
        if each.check_name != STALE_CHECK
    }


def test_a_failing_check_fails_only_its_chunk(
    store: Store, run: Run, instance: dg.DagsterInstance
) -> None:
    result = run(not_two)

    assert not result.success
    assert answers(result) == {
        ("not_two", "1"): True,
        ("not_two", "2"): False,
        ("not_two", "3"): True,
    }
    assert [status(store, "bobout", each, "loadbob") for each in "123"] == [
        "READY",
        "FAILED",
        "READY",
    ]
    [failure] = result.get_step_failure_events()
    told = failure.step_failure_data.user_failure_data.description
    assert "2: NOT_VALIDATED: not_two: two" in told
    rows = sql(
        store,
        "select dataid, validated, checks from chunkfact where jobid = 'loadbob' order by dataid",
    )
    assert [(dataid, bool(valid), checks) for dataid, valid, checks in rows] == [
        ("1", True, "not_two passed"),
        ("2", False, "not_two failed: two"),
        ("3", True, "not_two passed"),
    ]
    key = dg.AssetCheckKey(dg.AssetKey("bobout"), "not_two")
    kept = instance.event_log_storage.get_asset_check_execution_history(key, limit=10)
    assert {
        (each.partition, each.status.value) for each in kept if each.status.value != "PLANNED"
    } == {("1", "SUCCEEDED"), ("2", "FAILED"), ("3", "SUCCEEDED")}
    made = {each.partition for each in result.asset_materializations_for_node("loadbob")}
    assert made == {"1", "3"}


def test_a_warning_lets_a_chunk_be_ready(store: Store, run: Run) -> None:
    result = run(odd)
    assert result.success
    assert answers(result)["odd", "2"] is False
    [warned] = [e for e in result.get_asset_check_evaluations() if not e.passed]
    assert warned.severity == dg.AssetCheckSeverity.WARN
    assert status(store, "bobout", "2", "loadbob") == "READY"


def test_a_retry_that_passes_makes_the_chunk_ready(store: Store, run: Run) -> None:
    policy(store, "loadbob", max_attempts=2)
    check = dataflow_check(name="second")(lambda chunk: chunk.attempts == 2)
    assert run(check, key="1").success
    assert status(store, "bobout", "1", "loadbob") == "READY"


def test_a_chunk_whose_function_failed_is_not_checked(run: Run) -> None:
    result = run(not_two, key="1", fn=lambda _: 1 / 0)
    assert not result.success
    assert answers(result) == {}


def test_a_check_is_an_asset_check_of_its_dataset(dataflow: DataflowResource) -> None:
    assets = dataflow_assets(job="loadbob", dataflow=dataflow, checks=[not_two, odd])(print)
    specs = {spec.name: spec for spec in assets.check_specs}
    assert specs["not_two"].blocking
    assert specs["not_two"].description == "There are never two."
    assert not specs["odd"].blocking
    assert specs["odd"].asset_key == dg.AssetKey("bobout")


def test_a_check_has_to_name_its_dataset_if_there_are_several(
    dataflow: DataflowResource, store: Store
) -> None:
    register(store, "both", ["bobin"], ["one", "two"])
    with pytest.raises(WrongUse, match=r"Check 'not_two' names no dataset"):
        dataflow_assets(job="both", dataflow=dataflow, checks=[not_two])(print)
    wrong = dataflow_check(dataset="three")(print)
    with pytest.raises(WrongUse, match="doesn't write"):
        dataflow_assets(job="both", dataflow=dataflow, checks=[wrong])(print)
    right = [dataflow_check(dataset=each, name="same")(print) for each in ("one", "two")]
    assets = dataflow_assets(job="both", dataflow=dataflow, checks=right)(print)
    ours = [(each, STALE_CHECK) for each in ("one", "two")]
    theirs = [(each, "same") for each in ("one", "two")]
    found = [(each.asset_key.to_user_string(), each.name) for each in assets.check_specs]
    assert sorted(found) == sorted(ours + theirs)


class NumpyLike:
    def __bool__(self) -> bool:
        return True


NumpyLike.__name__ = "bool_"


@pytest.mark.parametrize(
    ("returned", "passed", "message"),
    [
        (True, True, ""),
        (False, False, ""),
        ("", True, ""),
        ("too few", False, "too few"),
        (NumpyLike(), True, ""),
        (None, False, "the check returned a NoneType: return True, False, or what is wrong"),
        (Checked("x", "y", False, "told"), False, "told"),
        (dg.AssetCheckResult(passed=False, description="told"), False, "told"),
    ],
)
def test_a_check_may_return_a_bool_a_text_or_a_result(
    dataflow: DataflowResource, store: Store, returned: Any, passed: bool, message: str
) -> None:
    chunk = Chunk(take(store, "loadbob")[0], {}, {"bobout": Place("bobout", {})}, {})
    checked = dataflow_check(name="named")(lambda _: returned).run(chunk)
    assert checked[:4] == ("named", "bobout", passed, message)
    assert checked.severity == "ERROR"


def test_a_check_that_raises_fails_with_its_error(
    dataflow: DataflowResource, store: Store, run: Run
) -> None:
    result = run(dataflow_check(name="broken")(lambda _: 1 / 0), key="1")
    [evaluation] = [
        each for each in result.get_asset_check_evaluations() if each.check_name == "broken"
    ]
    assert evaluation.description == "ZeroDivisionError: division by zero"
    assert "Traceback" in str(evaluation.metadata["opendataflow/traceback"].value)
    assert status(store, "bobout", "1", "loadbob") == "FAILED"
