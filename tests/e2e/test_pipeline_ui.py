"""The pipelines of a project in a real Dagster: launched, viewed, aborted."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.history import steps
from opendataflow_dagster.store.sqlite import SqliteStore
from opendataflow_dagster.store.store import Store
from tests.pipelines.test_pipeline_run import Shop
from tests.support.browser import UI
from tests.support.dagster_servers import Dagster
from tests.support.graphql_client import wait_for
from tests.support.store_fixtures import close, policy, sql, status

ONE, TWO = "2026-11-18T190000.000Z", "2026-11-18T200000.000Z"


@pytest.fixture(scope="module")
def storage() -> str:
    return "sqlite"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    made = open_store(f"sqlite:///{tmp_path_factory.mktemp('tables')}/dataflow.db")
    made.init()
    yield made
    close(made)


@pytest.fixture(scope="module")
def shop(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Shop:
    made = Shop(tmp_path_factory.mktemp("shop"), store, None)
    assert isinstance(store, SqliteStore)
    made.write(
        "definitions.py",
        f"""
        from opendataflow_dagster import DataflowResource, build_definitions

        url = "sqlite:///{store.db.path}"
        defs = build_definitions(DataflowResource(url=url), projects=[{str(made.root)!r}])
    """,
    )
    return made


@pytest.fixture(scope="module")
def dagster(shop: Shop, start_dagster: Callable[..., Dagster]) -> Dagster:
    return start_dagster(shop.root / "definitions.py", name="shop")


def step_keys(dagster: Dagster, run: str) -> dict[str, str]:
    """The steps of a run, as its page lists them, and how each ended."""
    found = dagster.client.ask(
        "query($run: ID!) { runOrError(runId: $run) { __typename ... on Run "
        "{ stepStats { stepKey status } } } }",
        run=run,
    )
    return {each["stepKey"]: each["status"] for each in found["stepStats"]}


def test_an_added_partition_is_produced_and_shown(
    dagster: Dagster, shop: Shop, store: Store
) -> None:
    client = dagster.client
    client.add_partition("dataflow/sales", ONE)
    run = client.launch(["sales", "report"], ONE)
    assert client.finished(run) == "SUCCESS", client.messages(run)
    assert step_keys(dagster, run) == dict.fromkeys(
        [
            "daily.begin",
            "daily.clean",
            "daily.total",
            "daily.publish",
            "report.begin",
            "report.summary",
            "report.publish",
        ],
        "SUCCESS",
    )
    assert client.grid("sales").green == {ONE}
    assert client.grid("report").green == {ONE}
    assert any("clean printed:\ncleaning 2" in each for each in client.messages(run))
    assert shop.output("report").splitlines() == ["rows,total", "2,20"]


def test_an_abort_ends_the_transformation_and_settles_the_chunk(
    dagster: Dagster, shop: Shop, store: Store
) -> None:
    client = dagster.client
    began = shop.root / "began"
    shop.write(
        "pipelines/daily/total.py",
        f"""
        import pathlib
        import time

        def run(df):
            pathlib.Path({str(began)!r}).touch()
            time.sleep(100)
            return df
    """,
    )
    client.add_partition("dataflow/sales", TWO)
    run = client.launch(["sales"], TWO)
    wait_for(began.exists, bool, 60, "the transformation is at work")
    client.terminate(run)
    assert client.finished(run, timeout=30) == "CANCELED"
    wait_for(lambda: status(store, "sales", TWO, "daily"), "HOLD".__eq__, 10, "it is settled")
    [(why,)] = sql(store, "select why from dataevent where status_after = 'HOLD'")
    assert why == f"terminated by a person in Dagster: run {run}"
    [clean, total] = sorted(steps(store, "daily", TWO), key=lambda row: row["step"])
    assert (clean["status"], total["status"]) == ("READY", "FAILED")
    assert not list(shop.root.glob(".dataflow/work/*/*"))


def test_a_due_run_is_launched_by_the_sensor_and_the_page_shows_its_steps(
    dagster: Dagster, shop: Shop, store: Store, page: Any
) -> None:
    shop.write("pipelines/daily/total.py", "def run(df):\n    return df.assign(total=1)\n")
    policy(store, "daily", every_minutes=1)
    client = dagster.client
    client.start_sensor("opendataflow_catch_up")
    wait_for(
        lambda: client.grid("report").green - {ONE},
        bool,
        90,
        "the run that is due and the one that reads it",
    )
    client.stop_sensor("opendataflow_catch_up")
    policy(store, "daily", every_minutes=None)
    [last, *_] = client.runs("SUCCESS", tags={"opendataflow/catch-up-job": "daily"})

    ui = UI(page, dagster.url)
    ui.open(f"/runs/{last['id']}")
    page.get_by_text("daily.clean", exact=True).first.wait_for()
    assert ui.shoot("pipeline_run").exists()
