"""What operators do in Dagster's launchpad: the same as by commands, signed by the run."""

from typing import Any

import dagster as dg
import pytest

from opendataflow_dagster import DataflowResource
from opendataflow_dagster.dagster.operator_jobs import operator_jobs
from opendataflow_dagster.store.registry import policy
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import expire, put, register, sql, status, take

JOBS = {job.name.removeprefix("opendataflow_"): job for job in operator_jobs()}


@pytest.fixture(autouse=True)
def chain(store: Store) -> None:
    register(store, "load", ["raw"], ["sales"])
    register(store, "sum", ["sales"], ["sums"])
    put(store, "sales", "1", "READY", jobid="load")
    put(store, "sums", "1", "READY", jobid="sum")


def launch(store: Store, name: str, url: str, *, ok: bool = True, **config: Any) -> Any:
    """Run a job; return the metadata of its op, or the message of its failure."""
    job = JOBS[name]
    [op] = job.nodes
    done = job.execute_in_process(
        run_config={"ops": {op.name: {"config": config}}},
        resources={"dataflow": DataflowResource(url=url)},
        raise_on_error=False,
        tags={"user": "ada"},
    )
    assert done.success is ok
    if not ok:
        [event] = [event for event in done.all_events if event.is_step_failure]
        return event.step_failure_data.error.message + str(
            event.step_failure_data.user_failure_data.description  # type: ignore[union-attr]
        )
    [event] = [event for event in done.all_events if event.is_successful_output]
    found = event.step_output_data.metadata
    return {key: value.value for key, value in found.items()}, done.run_id


def test_a_dry_run_lists_and_a_run_moves_and_signs(
    store: Store, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = {"job": "load", "chunks": ["1"], "downstream": True}
    shown, _ = launch(store, "resubmit", url, **asked, dry_run=True)
    assert (shown["dry run"], shown["chunks"]) == (True, 2)
    assert "| load | sales | 1 | READY | RESUBMIT |\n| sum | sums | 1 |" in shown["would change"]
    log = capfd.readouterr().err
    assert "dry run, nothing is changed · chunks: 2" in log
    assert "load  sales  1  READY  RESUBMIT\nsum  sums  1  READY  RESUBMIT" in log
    assert status(store, "sales", "1", "load") == "READY"

    shown, run_id = launch(store, "resubmit", url, **asked, reason="the source was wrong")

    assert "| sum | sums | 1 | READY | RESUBMIT |" in shown["changed"]
    assert status(store, "sales", "1", "load") == status(store, "sums", "1", "sum") == "RESUBMIT"
    signed = sql(store, "select distinct who, why from dataevent where status_after = 'RESUBMIT'")
    assert signed == [(f"ada by Dagster run {run_id}", "the source was wrong")]


def test_chunks_are_held_released_and_marked_ready(store: Store, url: str) -> None:
    launch(store, "hold", url, job="load", chunks=["1"])
    assert status(store, "sales", "1", "load") == "HOLD"
    launch(store, "release", url, job="load", chunks=["1"])
    assert status(store, "sales", "1", "load") == "READY"
    launch(store, "ready", url, dataset="raw", chunks=["%2C"])
    assert status(store, "raw", ",", "external") == "READY"  # as the grid writes a comma


def test_failed_chunks_of_all_jobs_are_resubmitted(store: Store, url: str) -> None:
    put(store, "sales", "2", "FAILED", jobid="load")
    put(store, "sums", "3", "FAILED", jobid="sum")
    shown, _ = launch(store, "resubmit", url, failed=True)
    assert shown["chunks"] == 2


def test_dials_are_listed_and_set(store: Store, url: str) -> None:
    shown, _ = launch(store, "policy", url, job="load")
    assert shown["concurrency"] == "default"
    shown, _ = launch(store, "policy", url, job="load", dials={"concurrency": "4"})
    assert shown["concurrency"] == "4"
    assert policy(store, "load")["concurrency"] == 4
    assert "The dials are" in launch(store, "policy", url, ok=False, job="load", dials={"x": "4"})


def test_lost_claims_are_recovered(store: Store, url: str) -> None:
    put(store, "raw", "7", "READY")
    [claim] = take(store, "load")
    expire(store, claim)
    put(store, "sales", "8", "RUNNING", jobid="load")
    asked = {"job": "load", "older_than": "0s"}
    shown, _ = launch(store, "recover", url, **asked, dry_run=True)
    assert shown["chunks"] == 2
    assert status(store, "sales", "7", "load") == "RUNNING"
    launch(store, "recover", url, **asked)
    assert status(store, "sales", "7", "load") != "RUNNING"
    assert status(store, "sales", "8", "load") == "RESUBMIT"


def test_a_refusal_is_the_failure_of_the_run(store: Store, url: str) -> None:
    assert "Did you mean 'load'" in launch(store, "hold", url, ok=False, job="laod", chunks=["1"])
    both = {"stale": True, "failed": True}
    assert "Use `stale` alone" in launch(store, "resubmit", url, ok=False, **both)


def test_two_calls_in_one_location_share_the_operator_jobs() -> None:
    definitions = dg.Definitions.merge(
        dg.Definitions(jobs=operator_jobs()), dg.Definitions(jobs=operator_jobs())
    )
    resources = {"dataflow": DataflowResource()}
    merged = dg.Definitions.merge(definitions, dg.Definitions(resources=resources))
    assert merged.resolve_job_def("opendataflow_hold").description
