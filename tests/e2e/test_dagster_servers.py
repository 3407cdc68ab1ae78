"""The harness: a real Dagster that is launched, killed and looked at, on both storages."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import UI
from tests.support.dagster_servers import ROOT, Dagster, Ticker
from tests.support.graphql_client import Counts, wait_for
from tests.support.process_guard import marked

names = count(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the toys look for the files `mended` and `arrived`."""
    return tmp_path_factory.mktemp("toys")


@pytest.fixture(scope="module")
def dagster(start_dagster: Callable[..., Dagster], folder: Path) -> Dagster:
    """The toys, served for all tests of this module."""
    return start_dagster("tests.support.code_locations.toy", env={"TOY_FOLDER": str(folder)})


@pytest.fixture(autouse=True)
def clean(dagster: Dagster, folder: Path) -> Iterator[None]:
    """Nothing is mended or has arrived, no key exists, and no sensor is on."""
    for name in ("mended", "arrived"):
        (folder / name).unlink(missing_ok=True)
    for key in dagster.instance.get_dynamic_partitions("keys"):
        dagster.instance.delete_dynamic_partition("keys", key)
    yield
    (folder / "mended").touch()


def add(dagster: Dagster, *keys: str) -> list[str]:
    """Add keys that no test had before, and return them."""
    made = [f"{key}{next(names):03}" for key in keys]
    dagster.instance.add_dynamic_partitions("keys", made)
    return made


def started(dagster: Dagster, key: str) -> str:
    """Launch the run of a slow key, and wait until its body is running."""
    run = dagster.client.launch(["made"], key)
    log = "STEP_START"
    wait_for(lambda: any(log in line for line in dagster.client.messages(run)), what="step starts")
    return run


def test_runs_and_what_the_grid_shows(dagster: Dagster) -> None:
    good, bad, missing = add(dagster, "good", "bad", "missing")
    client = dagster.client
    assert client.assets() == ["after", "made"]
    assert client.partitions("made") == [good, bad, missing]

    run = client.launch(["made"], good, through=bad, tags={"who": "me"})

    assert client.finished(run) == "FAILURE"
    assert client.run(run)["tags"]["who"] == "me"
    grid = client.grid("made")
    assert (grid.green, grid.red, grid.missing) == ({good}, {bad}, {missing})
    assert grid.failed_and_missing == [bad, missing]
    assert client.latest("made")[good].metadata == {"rows": len(good)}
    client.report("made", [missing])
    client.add_partition("keys", "typed")
    assert client.grid("made").missing == {"typed"}
    client.wipe("made")
    assert client.grid("made").green == set()


def test_a_backfill_of_ten_of_which_three_fail(dagster: Dagster, folder: Path) -> None:
    keys = add(dagster, *["good"] * 4, *["bad"] * 3, *["good"] * 3)
    client = dagster.client

    first = client.backfill(["made"], keys)
    assert client.backfill_finished(first) == "COMPLETED_FAILED"
    assert client.backfill_counts(first) == {"made": Counts(10, 0, 7, 3)}
    assert client.grid("made").red == set(keys[4:7])

    (folder / "mended").touch()
    again = client.backfill(["made"], client.grid("made").failed_and_missing)
    assert client.backfill_finished(again) == "COMPLETED_SUCCESS"
    assert client.backfill_counts(again) == {"made": Counts(3, 0, 3, 0)}
    assert client.grid("made").green == set(keys)


def test_a_run_is_terminated(dagster: Dagster) -> None:
    [slow] = add(dagster, "slow")
    run = started(dagster, slow)
    assert dagster.client.grid("made").blue == {slow}

    dagster.client.terminate(run)

    assert dagster.client.finished(run) == "CANCELED"
    assert dagster.client.grid("made").missing == {slow}


def test_a_sensor_is_switched_on_and_off(dagster: Dagster, folder: Path) -> None:
    key = f"new{next(names)}"
    client = dagster.client
    assert client.sensors() == {"arrivals": "STOPPED"}
    client.start_sensor("arrivals")
    assert client.next_tick("arrivals")["skipReason"] == "nothing arrived"

    (folder / "arrived").write_text(key)

    wait_for(lambda: key in client.grid("made").green, what="the run of the sensor ends")
    [run] = client.runs(tags={"from": "arrivals", "dagster/partition": key})
    assert run["id"] in {each for tick in client.ticks("arrivals") for each in tick["runIds"]}
    client.stop_sensor("arrivals")
    assert client.sensors() == {"arrivals": "STOPPED"}


@pytest.mark.filterwarnings("ignore:Parameter `backfill_policy`")
def test_a_sensor_ticks_here_and_now(
    dagster: Dagster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.code_locations import toy

    monkeypatch.setenv("TOY_FOLDER", str(folder))
    ticker = Ticker(toy.arrivals, dagster.instance, toy.defs)
    assert ticker.tick().skip_message == "nothing arrived"
    (folder / "arrived").write_text("here")

    said = ticker.tick()

    assert [request.partition_key for request in said.run_requests] == ["here"]
    assert dagster.client.partitions("made") == ["here"]
    assert ticker.tick().skip_message == "nothing arrived"


def test_what_is_killed_and_started_again(dagster: Dagster, folder: Path) -> None:
    doomed, slow = add(dagster, "slow", "slow")
    client = dagster.client

    run = started(dagster, doomed)
    dagster.kill("run_workers")
    assert client.finished(run) == "FAILURE"
    assert client.grid("made").red == {doomed}

    # A run outlives all three servers; nobody but itself says how it ends.
    run = started(dagster, slow)
    dagster.kill("code_server", "daemon", "webserver")
    assert len(dagster.run_workers()) == 1
    dagster.start()
    assert client.run_status(run) == "STARTED"
    (folder / "mended").touch()
    assert client.finished(run) == "SUCCESS"
    (folder / "mended").unlink()

    # Killed with all of them, it stays "started": only max_runtime_seconds ends it, or a person.
    run = started(dagster, doomed)
    dagster.kill("everything")
    assert dagster.processes() == []
    dagster.start()
    assert client.run_status(run) == "STARTED"
    client.terminate(run, now=True)
    assert client.run_status(run) == "CANCELED"


def test_the_ui(dagster: Dagster, folder: Path, page: Any, storage: str) -> None:
    if storage == "postgres":
        pytest.skip("its pages ask by the same GraphQL as the tests above, which run on both")
    slow, other, good, bad, last = add(dagster, "slow", "other", "good", "bad", "last")
    client = dagster.client
    ui = UI(page, dagster.url)
    client.finished(client.launch(["made"], good, through=bad))
    started(dagster, slow)

    ui.open_partitions("made")
    wanted = {good: "green", bad: "red", slow: "blue", other: "missing", last: "missing"}
    ui.see(lambda squares: squares == wanted, "one of each colour")
    assert ui.counts() == {"green": 1, "red": 1, "blue": 1, "missing": 2}
    ui.shoot(f"servers_{storage}_grid")

    ui.materialize("made", other)
    ui.see(lambda squares: squares[other] == "green", "the run makes one green")

    (folder / "mended").touch()
    wait_for(lambda: slow in client.grid("made").green, what="the slow one is made")
    assert ui.backfill("made", "Failed and missing") == 2
    ui.see(lambda squares: set(squares.values()) == {"green"}, "the backfill makes all green")

    ui.switch_sensor("toy", "arrivals", on=True)
    wait_for(lambda: client.sensors() == {"arrivals": "RUNNING"}, what="the sensor is on")
    ui.shoot(f"servers_{storage}_sensor")
    ui.switch_sensor("toy", "arrivals", on=False)
    wait_for(lambda: client.sensors() == {"arrivals": "STOPPED"}, what="the sensor is off")


def test_nothing_is_left_when_the_tests_are_killed(tmp_path: Path, storage: str) -> None:
    if storage == "postgres":
        pytest.skip("the same on every storage")
    code = """
import os, signal
from tests.support.dagster_servers import Dagster

dagster = Dagster("tests.support.code_locations.toy", servers=["code_server"])
print(dagster.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TOY_FOLDER": str(tmp_path)},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = Path(killed.stdout.strip())
    wait_for(lambda: not left.exists(), what="its folder is deleted")
    assert marked(left.name) == []
