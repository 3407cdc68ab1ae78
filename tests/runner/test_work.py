"""The workers of a host, in this process."""

import re
import signal
from collections.abc import Sequence
from typing import Any

import pytest

from opendataflow_dagster.runner.catch_up import (
    ChunksFailed,
    HostJob,
    JobState,
    JobStep,
    TellClaimed,
    TellEnded,
)
from opendataflow_dagster.runner.script import Scripts
from opendataflow_dagster.runner.work import Workshop
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import policy, put, register


class Diary:
    """Records what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []

    def event(self, name: str, **fields: Any) -> None:
        self.told.append((name, fields))

    def draw(self, jobs: Sequence[JobState], line: str) -> None:
        pass


def claimer(store: Store, jobid: str, made: list[str]) -> JobStep:
    """Claims a chunk and reports it as produced."""

    def step(owner: str, scripts: Scripts, claimed: TellClaimed, ended: TellEnded) -> bool:
        claims = store.claim(jobid, owner=owner)
        if claims:
            store.finish(claims)
            made.append(claims[0].dataid)
        return bool(claims)

    return step


def test_a_pipeline_with_every_minutes_begins_a_run_of_its_own(store: Store) -> None:
    register(store, "pipeline", [], ["out"])
    policy(store, "pipeline", every_minutes=5)
    store.fill()
    made: list[str] = []
    with Scripts(drains=True) as scripts:
        make = claimer(store, "pipeline", made)

        def step(*words: Any) -> bool:
            took = make(*words)
            if took:
                scripts.stop(signal.SIGTERM)
            return took

        jobs = [HostJob("pipeline", lambda: step, is_alone=True, begins_runs=True)]
        outcome = Workshop(store, scripts, Diary(), workers=2).run(jobs)
    assert outcome.code == 128 + signal.SIGTERM
    assert len(made) == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d{6}\.\d{3}Z", made[0])


def test_errors_of_one_job_are_reported_once_and_affect_no_other(store: Store) -> None:
    for jobid in ("broken", "failing", "sound"):
        register(store, jobid, ["raw"], [f"out of {jobid}"])
    store.fill()
    put(store, "raw", "1")
    put(store, "raw", "2")
    made: list[str] = []

    def broken(*_: Any) -> bool:
        raise RuntimeError("what nobody foresaw")

    def failing(*_: Any) -> bool:
        raise ChunksFailed("chunks failed")

    steps = {"broken": broken, "failing": failing, "sound": claimer(store, "sound", made)}
    jobs = [
        HostJob(jobid, lambda step=step: step, is_alone=jobid == "failing")
        for jobid, step in steps.items()
    ]
    diary = Diary()
    with Scripts(drains=True) as scripts:
        shop = Workshop(store, scripts, diary, workers=2, until_idle=True)
        policy(store, "failing", concurrency=0)
        outcome = shop.run(jobs)
    assert sorted(made) == ["1", "2"]
    assert outcome.code == 1
    [told] = [fields for name, fields in diary.told if name == "trouble"]
    assert (told["job"], told["why"]) == ("broken", "RuntimeError: what nobody foresaw")
    assert told["trace"].startswith("Traceback")


def test_the_end_of_the_process_isnt_an_error_of_a_job(store: Store) -> None:
    register(store, "job", ["raw"], ["out"])
    store.fill()
    put(store, "raw", "1")

    def ends(*_: Any) -> bool:
        raise SystemExit(7)

    with Scripts(drains=True) as scripts, pytest.raises(SystemExit):
        Workshop(store, scripts, Diary(), workers=2).run([HostJob("job", lambda: ends)])
