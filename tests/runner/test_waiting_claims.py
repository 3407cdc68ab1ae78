"""Chunks that a worker claims together and runs one after another: the dial `batch_size`."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from opendataflow_dagster.runner import heartbeat
from opendataflow_dagster.runner.run import Outcome, run_job
from opendataflow_dagster.store.store import PLAN_AGE_SECONDS, Store
from tests.cli.test_run_command import BIN
from tests.support.store_fixtures import check, expire, policy, put, register, sql, statuses, take

LIVE = "select count(*) from claim where owner is not null"
TOGETHER = "select count(distinct owner), count(*) from claim where owner is not null"


@pytest.fixture
def loadbob(store: Store) -> Iterator[Store]:
    """A store in which `loadbob` produces `bobout` from ten chunks of `bobin`, four at a time."""
    register(store, "loadbob", ["bobin"], ["bobout"])
    for number in range(10):
        put(store, "bobin", str(number))
    policy(store, "loadbob", batch_size=4)
    yield store
    check(store)


def script(body: str) -> list[str]:
    Path("loadbob.sh").write_text(f"#!/bin/sh\n{body}\n")
    Path("loadbob.sh").chmod(0o755)
    return ["./loadbob.sh"]


def run(store: Store, body: str, say: Callable = print, **more) -> Outcome:
    return run_job(store, "loadbob", script(body), say=say, **{"all_chunks": True} | more)


def elsewhere(store: Store, *arguments, **more) -> Outcome:
    """`run` for a thread of its own, whose connection ends with it."""
    try:
        return run(store, *arguments, **more)
    finally:
        store.db.drop()


def outputs(store: Store) -> dict[str, str]:
    return {key[2]: word for key, (_, word) in statuses(store).items() if key[0] == "bobout"}


def live(store: Store) -> int:
    return sql(store, LIVE)[0][0]


def attempts(store: Store) -> set[int]:
    """The attempts of all chunks that may be claimed now, the next one included."""
    return {claim.attempts for claim in take(store, "loadbob", owner="another", k=100)}


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


WAITING = "touch began$dataid; while [ ! -e go ]; do sleep 0.01; done"


def test_chunks_are_claimed_in_batches_and_settled_one_by_one(loadbob: Store) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            elsewhere, loadbob, "touch began$dataid; while [ ! -e go$dataid ]; do sleep 0.01; done"
        )
        wait_for(lambda: Path("began0").exists())
        assert sql(loadbob, TOGETHER) == [(1, 4)]
        assert outputs(loadbob) == dict.fromkeys("0123", "RUNNING")
        Path("go0").touch()
        wait_for(lambda: Path("began1").exists())
        assert outputs(loadbob) == {"0": "READY"} | dict.fromkeys("123", "RUNNING")
        for number in range(1, 10):
            Path(f"go{number}").touch()
        assert running.result() == Outcome(0, done=10)

    starts = "select count(distinct started) from claim"
    assert sql(loadbob, starts) == [(0,)]
    assert set(outputs(loadbob).values()) == {"READY"}


@pytest.mark.parametrize("workers", [1, 3])
def test_a_bad_chunk_fails_alone(loadbob: Store, workers: int) -> None:
    body = "echo $dataid >> ran; case $dataid in 1|6) exit 1;; esac"

    assert run(loadbob, body, workers=workers) == Outcome(1, done=8, failed=2)

    assert sorted(Path("ran").read_text().split()) == list("0123456789")
    assert {key for key, word in outputs(loadbob).items() if word == "FAILED"} == {"1", "6"}


def test_a_changed_dial_takes_effect_a_second_later(loadbob: Store) -> None:
    """Set by somebody else during the run: the second claim takes two chunks, the third one."""
    with ThreadPoolExecutor(1) as pool:
        body = "touch began$dataid; while [ ! -e go$dataid ]; do sleep 0.01; done"
        running = pool.submit(elsewhere, loadbob, body)
        found = {}
        sizes = {0: 2, 4: None}
        for number in range(10):
            wait_for(lambda number=number: Path(f"began{number}").exists())
            found[number] = live(loadbob)
            if number in sizes:
                sql(loadbob, "update jobpolicy set batch_size = :k", k=sizes[number])
                time.sleep(PLAN_AGE_SECONDS + 0.1)
            Path(f"go{number}").touch()
        assert running.result().done == 10

    assert found == {0: 4, 1: 3, 2: 2, 3: 1, 4: 2, 5: 1, 6: 1, 7: 1, 8: 1, 9: 1}


def test_without_all_one_chunk_is_claimed(loadbob: Store) -> None:
    body = "touch began; while [ ! -e go ]; do sleep 0.01; done"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(elsewhere, loadbob, body, all_chunks=False)
        wait_for(lambda: Path("began").exists())
        assert live(loadbob) == 1
        Path("go").touch()
        assert running.result() == Outcome(0, done=1)


def test_concurrency_counts_all_that_are_held(loadbob: Store) -> None:
    policy(loadbob, "loadbob", concurrency=3)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(elsewhere, loadbob, WAITING, workers=3)
        wait_for(lambda: list(Path().glob("began*")))
        assert live(loadbob) == 3
        assert len(list(Path().glob("began*"))) == 1, "one worker holds all that the dial allows"
        Path("go").touch()
        assert running.result() == Outcome(0, done=10)


@pytest.mark.parametrize(
    ("turn", "left", "why"),
    [
        ("paused_until = '2100-01-01'", 1, "the job is paused"),
        ("concurrency = 0", 1, "the job's concurrency was lowered"),
        ("concurrency = 2", 2, "the job's concurrency was lowered"),
    ],
)
@pytest.mark.parametrize("when", ["while it works", "between two"])
def test_claimed_chunks_that_the_dials_forbid_are_given_back(
    loadbob: Store, monkeypatch: pytest.MonkeyPatch, turn: str, left: int, why: str, when: str
) -> None:
    monkeypatch.setattr(heartbeat, "RENEW_SECONDS", 0.1 if when == "while it works" else 60.0)
    said: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(elsewhere, loadbob, WAITING, say=said.append)
        wait_for(lambda: Path("began0").exists())
        sql(loadbob, f"update jobpolicy set {turn}")
        if when == "while it works":
            wait_for(lambda: live(loadbob) == left)
        Path("go").touch()
        running.result()

    back = [line for line in said if "given back" in line]
    assert any(why in line for line in back), said
    whys = [
        row[0]
        for row in sql(
            loadbob, "select distinct why from dataevent where status_after = 'RESUBMIT'"
        )
    ]
    assert whys == [f"given back before it started: {why}"]
    if left == 1:
        assert outputs(loadbob) == {"0": "READY"} | dict.fromkeys("123", "RESUBMIT")
        sql(loadbob, "update jobpolicy set concurrency = null, paused_until = null")
        assert attempts(loadbob) == {1}
    else:
        assert set(outputs(loadbob).values()) == {"READY"}


def test_a_script_that_vanishes_costs_one_chunk(loadbob: Store) -> None:
    said: list[str] = []

    assert run(loadbob, "rm ./loadbob.sh", say=said.append) == Outcome(1, done=1, failed=1)

    assert outputs(loadbob) == {"0": "READY", "1": "FAILED", "2": "RESUBMIT", "3": "RESUBMIT"}
    assert said[-1].endswith(": done 1, failed 1, left 8; next: odf status loadbob")
    assert attempts(loadbob) == {1}


def test_leases_are_renewed_however_short_the_scripts_are(loadbob: Store) -> None:
    policy(loadbob, "loadbob", batch_size=10, lease_seconds=1)

    assert run(loadbob, "echo $dataid >> ran; sleep 0.3") == Outcome(0, done=10)

    assert Path("ran").read_text().split() == list("0123456789")
    assert sql(loadbob, "select count(*) from dataevent where status_after = 'RESUBMIT'") == [(0,)]


def test_the_time_limit_counts_from_the_start_of_each_script(loadbob: Store) -> None:
    policy(loadbob, "loadbob", batch_size=10, time_limit=1)

    assert run(loadbob, "sleep 0.25; [ $dataid != 5 ] || exec sleep 60") == Outcome(
        1, done=9, failed=1
    )

    assert {key for key, word in outputs(loadbob).items() if word == "FAILED"} == {"5"}


def test_a_waiting_chunk_that_another_recovered_is_left_to_it(
    loadbob: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "RENEW_SECONDS", 0.1)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(elsewhere, loadbob, f"echo $dataid >> ran; {WAITING}")
        wait_for(lambda: Path("began0").exists())
        mine = "jobid = 'loadbob' and dataid = '2'"
        sql(loadbob, f"update claim set lease_end = '2001-01-01', owner = 'dead' where {mine}")
        loadbob.recover("loadbob")
        [claim] = take(loadbob, "loadbob", owner="another", only="2")
        time.sleep(0.5)
        Path("go").touch()
        loadbob.finish(claim)  # which the run waits for
        assert running.result() == Outcome(0, done=9)

    assert "2" not in Path("ran").read_text().split()


def test_an_error_in_odf_itself_gives_back_what_waits(
    loadbob: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    before = threading.active_count()
    monkeypatch.setattr(loadbob, "finish", broken)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        run(loadbob, "true")

    assert outputs(loadbob) == {"0": "RUNNING"} | dict.fromkeys("123", "RESUBMIT")
    assert threading.active_count() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_stop_gives_back_what_runs_and_what_waits(
    loadbob: Store, url: str, number: signal.Signals, workers: str
) -> None:
    body = "echo $$ > began$dataid; exec sleep 60"
    process = subprocess.Popen(
        [BIN / "odf", "run", "--all", "--workers", workers, *script(body)],
        env=os.environ | {"DATAFLOW_URL": url},
    )
    with process:
        wait_for(lambda: sum(map(bool, map(Path.read_text, Path().glob("began*")))) == int(workers))
        wait_for(lambda: live(loadbob) == 4 * int(workers))
        running = {path.name.removeprefix("began") for path in Path().glob("began*")}
        process.send_signal(number)
        process.wait(20)

    words = outputs(loadbob)
    if number == signal.SIGKILL:
        assert set(words.values()) == {"RUNNING"}
        for path in Path().glob("began*"):
            os.killpg(int(path.read_text()), signal.SIGKILL)
        expire(loadbob)
        loadbob.recover("loadbob")
        assert set(outputs(loadbob).values()) == {"RESUBMIT"}
        return
    assert process.returncode == 128 + number
    assert set(words.values()) == {"RESUBMIT"}
    counted = sql(loadbob, "select dataid from claim where interruptions > 0")
    assert {dataid for (dataid,) in counted} == running
    assert live(loadbob) == 0
    assert attempts(loadbob) == {1}


def test_a_stop_takes_effect_before_a_script_that_ignores_it_ends(loadbob: Store, url: str) -> None:
    """A service manager kills after some seconds: by then the others are given back."""
    process = subprocess.Popen(
        [BIN / "odf", "run", "--all", *script("trap '' TERM; touch began; sleep 60 & wait; wait")],
        env=os.environ | {"DATAFLOW_URL": url},
    )
    with process:
        wait_for(lambda: Path("began").exists())
        process.terminate()
        wait_for(lambda: live(loadbob) == 1)
        assert process.poll() is None
        process.terminate()
        process.wait(20)

    assert outputs(loadbob) == dict.fromkeys("0123", "RESUBMIT")


def test_a_job_that_reads_today_has_one_chunk_at_most(store: Store) -> None:
    register(store, "loadbob", ["today", "bobin"], ["bobout"])
    policy(store, "loadbob", batch_size=4)
    put(store, "bobin", "1")
    put(store, "bobin", store.today())

    assert run(store, "echo $dataid >> ran") == Outcome(0, done=1)
    assert Path("ran").read_text().split() == [store.today()]
