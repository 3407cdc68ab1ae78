"""Interrupted isn't failed: TERM, Ctrl-C and evictions give chunks back, and count no attempt."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opendataflow_dagster.errors import StaleClaim
from opendataflow_dagster.model import Stop
from opendataflow_dagster.store.claims import MAX_INTERRUPTIONS, interrupt
from opendataflow_dagster.store.operations import release
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, expire, policy, put, register, sql, status, take

BIN = Path(sys.executable).parent
TERM = Stop("stopped by SIGTERM")


@pytest.fixture
def loadbob(store: Store) -> Iterator[Store]:
    """A store in which `loadbob` produces chunk 1 of `bobout`; its tables are right at the end."""
    register(store, "loadbob", ["bobin"], ["bobout"])
    put(store, "bobin", "1")
    yield store
    check(store)


@pytest.fixture
def odf(url: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start `odf run` with a script, in its own process group; nothing of it is left."""
    started: list[subprocess.Popen[str]] = []

    def start(body: str, *words: str) -> subprocess.Popen[str]:
        Path("loadbob.sh").write_text(f"#!/bin/sh\n{body}\n")
        Path("loadbob.sh").chmod(0o755)
        Path("began").unlink(missing_ok=True)
        process = subprocess.Popen(
            [BIN / "odf", "run", *words, "./loadbob.sh"],
            env=os.environ | {"DATAFLOW_URL": url},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        started.append(process)
        wait_for(lambda: Path("began").exists())
        return process

    yield start
    for process in started:
        with process:
            process.kill()


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def output(store: Store) -> str | None:
    return status(store, "bobout", "1", "loadbob")


def stopped(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> str:
    process.send_signal(number)
    said, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    return said


def test_after_five_interruptions_in_a_row_a_chunk_is_held(
    loadbob: Store, odf: Callable[..., subprocess.Popen[str]]
) -> None:
    for number in range(1, MAX_INTERRUPTIONS + 1):
        said = stopped(odf("touch began; exec sleep 60"))
        assert output(loadbob) == ("HOLD" if number == MAX_INTERRUPTIONS else "RESUBMIT")
    assert "HOLD" in said
    [(why,)] = sql(loadbob, "select why from dataevent where status_after = 'HOLD'")
    assert why == "stopped by SIGTERM: interrupted 5 times in a row, so it is on HOLD"
    assert take(loadbob, "loadbob") == []

    release(loadbob, "loadbob", ["1"])
    [claim] = take(loadbob, "loadbob")
    assert claim.attempts == 1
    assert interrupt(loadbob, claim, TERM) == "RESUBMIT"


@pytest.mark.parametrize("between", ["a failure", "a loss", "a person"])
def test_anything_else_between_interruptions_resets_their_count(
    loadbob: Store, between: str
) -> None:
    policy(loadbob, "loadbob", max_attempts=9)
    for _ in range(MAX_INTERRUPTIONS - 1):
        assert interrupt(loadbob, take(loadbob, "loadbob")[0], TERM) == "RESUBMIT"
    [claim] = take(loadbob, "loadbob")
    if between == "a failure":
        loadbob.fail(claim, "exit code 1")
    elif between == "a loss":
        expire(loadbob, claim)
        loadbob.recover("loadbob")
    else:
        sql(loadbob, "update datastatus set status = 'RESUBMIT' where datasetid = 'bobout'")

    assert interrupt(loadbob, take(loadbob, "loadbob")[0], TERM) == "RESUBMIT"


def test_interruptions_cost_no_attempt(loadbob: Store) -> None:
    policy(loadbob, "loadbob", max_attempts=2)
    for _ in range(3):
        [claim] = take(loadbob, "loadbob")
        assert claim.attempts == 1
        interrupt(loadbob, claim, TERM)
    assert loadbob.fail(take(loadbob, "loadbob")[0], "exit code 1").status == "RESUBMIT"
    assert loadbob.fail(take(loadbob, "loadbob")[0], "exit code 1").status == "FAILED"


def test_a_worker_that_lost_its_claim_interrupts_nothing(loadbob: Store) -> None:
    [claim] = take(loadbob, "loadbob", "slow")
    expire(loadbob)
    loadbob.recover("loadbob")
    [other] = take(loadbob, "loadbob", "quick")
    with pytest.raises(StaleClaim):
        interrupt(loadbob, claim, TERM)
    assert output(loadbob) == "RUNNING"
    loadbob.finish(other)


@pytest.mark.parametrize("first", ["the script", "odf"])
@pytest.mark.parametrize("body", ["exec sleep 60", "trap 'exit 143' TERM; sleep 60 & wait"])
def test_a_stop_that_every_process_gets_is_no_failure(
    loadbob: Store, odf: Callable[..., subprocess.Popen[str]], first: str, body: str
) -> None:
    """A service manager signals all processes of a service, in any order."""
    process = odf(f"echo $$ > new; mv new began; {body}")
    script = int(Path("began").read_text())
    for pid in (script, process.pid) if first == "the script" else (process.pid, script):
        with contextlib.suppress(ProcessLookupError):  # odf may have ended the script already
            os.kill(pid, signal.SIGTERM)
    said, _ = process.communicate(timeout=30)

    assert process.returncode == 128 + signal.SIGTERM, said
    assert output(loadbob) == "RESUBMIT"


def test_a_script_killed_from_outside_has_failed(
    loadbob: Store, odf: Callable[..., subprocess.Popen[str]]
) -> None:
    process = odf("echo $$ > new; mv new began; exec sleep 60")
    os.kill(int(Path("began").read_text()), signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert output(loadbob) == "FAILED"


def test_a_script_that_fails_by_itself_before_a_stop_has_failed(
    loadbob: Store, odf: Callable[..., subprocess.Popen[str]]
) -> None:
    process = odf("touch began; exit 3")
    assert process.wait(30) == 3
    assert output(loadbob) == "FAILED"


def test_a_second_ctrl_c_kills_at_once_and_the_chunk_is_given_back(
    loadbob: Store, odf: Callable[..., subprocess.Popen[str]]
) -> None:
    process = odf("trap '' INT TERM; touch began; while :; do sleep 0.1; done", "--all")
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert time.monotonic() - began < 5
    assert process.returncode == 128 + signal.SIGINT
    assert output(loadbob) == "RESUBMIT"
