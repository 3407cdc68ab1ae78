"""A user's location in a real code server, webserver and daemon: tables and grid agree.

The tests share one running Dagster for each storage; each has a month of its own.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from opendataflow_dagster.store import operations
from tests.support.dagster_project import CATCH_UP, RECONCILE, SCRIPT, Flow, days
from tests.support.dagster_servers import Dagster
from tests.support.graphql_client import Counts, wait_for
from tests.support.postgres import Server
from tests.support.store_fixtures import put, sql, take

pytestmark = pytest.mark.timeout(300)  # in each test several runs, of several processes each

MOST_TO_SETTLE = 15
"""Seconds after which the chunk of a terminated run must be FAILED in the tables."""


@pytest.fixture(scope="module")
def flow(
    storage: str,
    start_dagster: Callable[..., Dagster],
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Flow]:
    """The tables on the kind of database that Dagster's storage is on."""
    folder = tmp_path_factory.mktemp("flow")
    url, more = f"sqlite:///{folder / 'dataflow.db'}", {}
    if storage == "postgres":
        server: Server = request.getfixturevalue("postgres_server")
        url = server.create_database("flow")
        more = {"FLOW_IN_PROCESS": "1"}  # on SQLite each step is a process, as it is by default
    flow = Flow(url, folder)
    flow.dagster = start_dagster(
        "tests.support.code_locations.cleaning", name="flow", env=flow.env | more
    )
    yield flow
    flow.dagster.close()
    flow.close()
    if storage == "postgres":
        server.drop_database("flow")


@pytest.fixture(autouse=True)
def calm(flow: Flow) -> Iterator[None]:
    """Make nothing bad, slow or invalid, and launch nothing automatically."""
    yield
    for name in ("bad", "slow", "invalid"):
        (flow.folder / name).unlink(missing_ok=True)
    if flow.client.sensors()[CATCH_UP] == "RUNNING":
        flow.client.stop_sensor(CATCH_UP)


def made(flow: Flow, *chunks: str) -> None:
    """Let the script produce what is offered, like a cron line; each chunk exactly once."""
    flow.odf("run", "--job", "clean", "--all", SCRIPT)
    assert flow.produced(*chunks) == dict.fromkeys(chunks, 1)


def test_the_location_shows_every_dataset(flow: Flow) -> None:
    client = flow.client
    flow.arrive("2026-01-10", "2026-01-09")

    assert client.location_problem() is None
    assert client.assets() == ["cleaned", "counted", "orders", "report", "visits"]
    for dataset in ("cleaned", "orders", "report"):
        assert client.partitions(dataset) == ["2026-01-09", "2026-01-10"]
    assert client.sensors() == {
        RECONCILE: "RUNNING",
        CATCH_UP: "STOPPED",
        "opendataflow_settle": "RUNNING",
    }
    flow.turns("orders", "green", "2026-01-09", "2026-01-10")
    assert flow.squares("cleaned", ["2026-01-09"]) == {"2026-01-09": "missing"}
    flow.agrees()


def test_a_chunk_is_materialized_with_its_evidence(flow: Flow) -> None:
    [day] = days(2, 1, 1)
    flow.arrive(day)

    run = flow.client.launch(["cleaned"], day)

    assert flow.client.finished(run) == "SUCCESS"
    assert flow.status("clean", day) == "READY"
    assert flow.squares("cleaned", [day]) == {day: "green"}
    facts = sql(
        flow.store,
        "select datasetid, generation, rows, validated from chunkfact where dataid = :day",
        day=day,
    )
    [(generation, rows, validated)] = [row[1:] for row in facts if row[0] == "cleaned"]
    [given] = [row[1] for row in facts if row[0] == "orders"]
    assert (rows, bool(validated)) == (2, True)
    found = flow.client.told_by(run, "cleaned", day)
    assert found.tags["dagster/data_version"] == str(generation)
    told = {name.partition("/")[2]: value for name, value in found.metadata.items()}
    assert told["generation"] == generation
    assert told["rows"] == told["row_count"] == 2
    assert told["seconds"] >= 0
    assert told["location"] == str(flow.folder / "cleaned")
    assert json.loads(told["inputs"]) == {"orders": given}
    assert told["ready"] == "orders READY"
    assert told["right"].startswith(f"orders: generation {given}")
    assert told["validated"] == "adds_up passed"
    assert run in told["safe"]
    assert told["log"] == f"/runs/{run}"
    flow.agrees()


def test_a_backfill_of_chunks_of_all_kinds(flow: Flow) -> None:
    """Some are READY, some have inputs that aren't, some fail; then all become READY."""
    client = flow.client
    ready, early, bad, good = days(3, 1, 3), days(3, 4, 5), days(3, 6, 7), days(3, 8, 10)
    every = [*ready, *early, *bad, *good]
    flow.arrive(*ready)
    assert client.finished(client.launch(["cleaned"], ready[0], through=ready[1])) == "SUCCESS"
    made(flow, *(f"clean {day}" for day in ready))
    for day in early:
        put(flow.store, "orders", day, "FAILED")
    flow.arrive(*early, status="FAILED")
    flow.arrive(*bad, *good)
    flow.steer("bad", *(f"clean {day}" for day in bad))

    backfill = client.backfill(["cleaned"], every)

    assert client.backfill_finished(backfill, 120) == "COMPLETED_FAILED"
    assert client.backfill_counts(backfill) == {"cleaned": Counts(10, 0, 6, 4)}
    assert {day: flow.status("clean", day) for day in every} == {
        **dict.fromkeys([*ready, *good], "READY"),
        **dict.fromkeys(early, None),
        **dict.fromkeys(bad, "FAILED"),
    }
    assert flow.produced(*(f"clean {day}" for day in every)) == {
        f"clean {day}": 1 for day in (*ready, *good)
    }
    flow.agrees()
    assert flow.squares("cleaned", every) == {
        **dict.fromkeys([*ready, *good], "green"),
        **dict.fromkeys(early, "missing"),
        **dict.fromkeys(bad, "red"),
    }

    flow.steer("bad")
    client.start_sensor(CATCH_UP)
    flow.odf("resubmit", "clean", "--failed")
    flow.turns("cleaned", "green", *bad)
    flow.odf("ready", "orders", *early)
    flow.turns("cleaned", "green", *early)

    flow.turns("report", "green", *every)  # it launches the job below, too
    assert {flow.status("clean", day) for day in every} == {"READY"}
    wait_for(lambda: client.runs("QUEUED", "STARTING", "STARTED"), lambda found: not found, 60)
    chunks = [f"{job} {day}" for job in ("clean", "report") for day in every]
    assert flow.produced(*chunks) == dict.fromkeys(chunks, 1)
    client.stop_sensor(CATCH_UP)
    flow.agrees()


def test_one_bad_chunk_stops_nothing_below_the_others(flow: Flow) -> None:
    client = flow.client
    every = days(4, 1, 6)
    bad, good = every[2], [*every[:2], *every[3:]]
    flow.arrive(*every)
    flow.steer("bad", f"clean {bad}")

    backfill = client.backfill(["cleaned", "report"], every)

    assert client.backfill_finished(backfill, 120) == "COMPLETED_FAILED"
    counts = client.backfill_counts(backfill)
    assert counts == {"cleaned": Counts(6, 0, 5, 1), "report": Counts(6, 0, 5, 1)}
    assert {flow.status("report", day) for day in good} == {"READY"}
    assert flow.produced(*(f"{job} {day}" for job in ("clean", "report") for day in every)) == {
        f"{job} {day}": 1 for job in ("clean", "report") for day in good
    }
    flow.agrees()
    assert flow.squares("cleaned", every) == dict.fromkeys(good, "green") | {bad: "red"}
    assert flow.squares("report", every) == dict.fromkeys(good, "green") | {bad: "missing"}


def test_terminating_a_run_settles_its_chunk(flow: Flow) -> None:
    client = flow.client
    done, slow, later = every = days(5, 1, 3)
    flow.arrive(*every)
    made(flow, *(f"clean {day}" for day in every))
    flow.steer("slow", f"report {slow}")
    child = flow.folder / "child"
    run = client.launch(["report"], done, through=later)
    wait_for(child.exists, what="the script is at work")
    flow.turns("report", "blue", slow)
    assert (flow.status("report", done), flow.status("report", slow)) == ("READY", "RUNNING")

    began = time.monotonic()
    client.terminate(run)
    wait_for(lambda: flow.status("report", slow), "HOLD".__eq__, MOST_TO_SETTLE)

    assert time.monotonic() - began < MOST_TO_SETTLE
    assert client.finished(run) == "CANCELED"
    wait_for(lambda: not psutil.pid_exists(int(child.read_text())), what="the script is gone")
    assert [flow.status("report", day) for day in every] == ["READY", "HOLD", None]
    flow.agrees()
    assert flow.squares("report", every) == {done: "green", slow: "red", later: "missing"}
    [(why,)] = sql(
        flow.store,
        "select why from dataevent where datasetid = 'report' and dataid = :day "
        "and status_after = 'HOLD'",
        day=slow,
    )
    assert why == f"terminated by a person in Dagster: run {run}"


def test_a_ready_chunk_is_produced_again_only_by_the_tag(flow: Flow) -> None:
    client = flow.client
    [day] = days(6, 1, 1)
    flow.arrive(day)
    assert client.finished(client.launch(["cleaned"], day)) == "SUCCESS"
    first = client.latest("cleaned")[day].metadata["opendataflow/generation"]

    again = client.launch(["cleaned"], day)
    assert client.finished(again) == "SUCCESS"
    shown = client.told_by(again, "cleaned", day)
    assert shown.metadata["opendataflow/skipped"] is True
    assert shown.metadata["opendataflow/generation"] == first
    assert flow.produced(f"clean {day}") == {f"clean {day}": 1}

    forced = client.launch(["cleaned"], day, tags={"opendataflow/resubmit": "true"})
    assert client.finished(forced) == "SUCCESS"
    shown = client.told_by(forced, "cleaned", day)
    assert "opendataflow/skipped" not in shown.metadata
    assert shown.metadata["opendataflow/generation"] > first
    assert flow.produced(f"clean {day}") == {f"clean {day}": 2}
    flow.agrees()


def test_the_grid_shows_what_others_do(flow: Flow) -> None:
    """`odf run`, SQL by hand, chunks that are deleted and renamed."""
    slow, bad, good, hand, renamed, gone = days(7, 1, 6)
    new = "2026-07-07"
    flow.arrive(slow)
    flow.steer("slow", f"clean {slow}")
    flow.steer("bad", f"clean {bad}")
    with flow.odf("run", "--job", "clean", "--all", SCRIPT, wait=False) as at_work:
        flow.turns("cleaned", "blue", slow)
        flow.arrive(bad, good)
        for code in (1, 0):
            with flow.odf("run", "--job", "clean", SCRIPT, wait=False) as other:
                assert other.wait(60) == code
        flow.turns("cleaned", "red", bad)
        flow.turns("cleaned", "green", good)
        flow.turns("cleaned", "blue", slow)
        flow.steer("slow")
        assert at_work.wait(60) == 0
    flow.turns("cleaned", "green", slow)

    for day in (hand, renamed, gone):
        (flow.folder / "cleaned" / f"{day}.csv").touch()
        put(flow.store, "cleaned", day, jobid="clean")
    flow.turns("cleaned", "green", hand, renamed, gone)
    flow.agrees()

    sql(flow.store, "delete from datastatus where dataid = :gone", gone=gone)
    (flow.folder / "cleaned" / f"{gone}.csv").unlink()
    sql(flow.store, "update datastatus set dataid = :new where dataid = :old", new=new, old=renamed)
    (flow.folder / "cleaned" / f"{renamed}.csv").rename(flow.folder / "cleaned" / f"{new}.csv")
    flow.turns("cleaned", "green", new, hand)
    wait_for(
        lambda: {gone, renamed} & set(flow.client.partitions("cleaned")),
        lambda left: not left,
        what="keys without a chunk are gone",
    )
    flow.agrees()


def test_a_sensor_is_switched_on_and_off(flow: Flow) -> None:
    client = flow.client
    hand, at_work = days(8, 1, 2)
    flow.arrive(hand, at_work)
    flow.agrees()

    client.stop_sensor(RECONCILE)
    for _ in range(2):  # the first may belong to a round of the daemon that began before the stop
        client.next_tick("opendataflow_settle")
    before = client.ticks(RECONCILE, 1)[0]["tickId"]
    (flow.folder / "cleaned" / f"{hand}.csv").touch()
    put(flow.store, "cleaned", hand, jobid="clean")
    [claim] = take(flow.store, "clean", only=at_work)
    for _ in range(2):  # the daemon goes on, and leaves this one out
        client.next_tick("opendataflow_settle")
    assert client.ticks(RECONCILE, 1)[0]["tickId"] == before
    assert flow.squares("cleaned", [hand, at_work]) == dict.fromkeys([hand, at_work], "missing")
    assert {each.dataid for each in flow.drift()} == {hand, at_work}

    client.start_sensor(RECONCILE)
    flow.turns("cleaned", "green", hand)
    flow.turns("cleaned", "blue", at_work)
    (flow.folder / "cleaned" / f"{at_work}.csv").touch()
    flow.store.finish(claim, [])
    flow.turns("cleaned", "green", at_work)
    flow.agrees()
    wait_for(
        lambda: client.ticks(RECONCILE, 1)[0],
        lambda tick: tick["skipReason"] == "The grid agrees with the tables.",
    )


def test_a_check_that_fails_gates_the_chunk(flow: Flow) -> None:
    client = flow.client
    good, wrong = days(9, 1, 2)
    flow.arrive(good, wrong)
    flow.steer("invalid", f"clean {wrong}")

    run = client.launch(["cleaned"], good, through=wrong)

    assert client.finished(run) == "FAILURE"
    assert [flow.status("clean", day) for day in (good, wrong)] == ["READY", "FAILED"]
    told: dict[str, Any] = {
        each["partition"]: each["evaluation"]
        for each in client.checks("cleaned", "adds_up")
        if each["runId"] == run and each["partition"]  # Dagster keeps its plan too, without one
    }
    assert {day: each["success"] for day, each in told.items()} == {good: True, wrong: False}
    assert told[wrong]["severity"] == "ERROR"
    assert told[wrong]["description"] == "an amount is negative"
    judged = sql(
        flow.store,
        "select dataid, validated from chunkfact where datasetid = 'cleaned' "
        "and dataid in (:good, :wrong)",
        good=good,
        wrong=wrong,
    )
    assert {day: bool(validated) for day, validated in judged} == {good: True, wrong: False}
    [(why,)] = sql(
        flow.store,
        "select why from dataevent where datasetid = 'cleaned' and dataid = :day "
        "and status_after = 'FAILED'",
        day=wrong,
    )
    assert "NOT_VALIDATED: adds_up: an amount is negative" in why
    assert any("NOT_VALIDATED" in line for line in client.messages(run))
    flow.agrees()
    assert flow.squares("cleaned", [good, wrong]) == {good: "green", wrong: "red"}


def test_days_of_dagsters_own(flow: Flow) -> None:
    """Backfilled, and launched by the catch-up sensor, which also makes a chunk that is no day."""
    client, dates, late = flow.client, days(10, 1, 4), ["2025-12-31", *days(10, 30, 31)]
    for day in (*dates, *late):
        (flow.folder / "visits" / f"{day}.csv").write_text("1\n")

    def shown(dataset: str, dates: list[str]) -> None:
        wait_for(
            lambda: {*client.latest(dataset, dates)}, {*dates}.__eq__, 60, f"{dataset} is green"
        )

    operations.ready(flow.store, "visits", dates)
    shown("visits", dates)
    backfill = client.backfill(["counted"], dates)
    assert client.backfill_finished(backfill, 120) == "COMPLETED_SUCCESS"
    assert client.backfill_counts(backfill) == {"counted": Counts(4, 0, 4, 0)}
    assert {*client.latest("counted", dates)} == {*dates}

    operations.ready(flow.store, "visits", late)
    shown("visits", late[1:])
    client.start_sensor(CATCH_UP)
    wait_for(
        lambda: {flow.status("count", day) for day in late},
        {"READY"}.__eq__,
        120,
        "all are counted",
    )
    shown("counted", late[1:])
    assert client.partitions("counted")[-1] == "2026-10-31"
    assert flow.produced(*(f"count {day}" for day in (*dates, *late))) == {
        f"count {day}": 1 for day in (*dates, *late)
    }
    wait_for(
        lambda: {(each.dataid, each.run) for each in flow.drift()},
        {(late[0], "")}.__eq__,
        60,
        "grid",
    )


def test_nothing_was_produced_twice(flow: Flow) -> None:
    """Covers everything above, except the chunk that was forced."""
    twice = {chunk for chunk, times in flow.produced().items() if times > 1}
    assert twice == {"clean 2026-06-01"}
