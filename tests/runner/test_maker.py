"""Several claimed chunks at once: prepared together, in threads, each settled by itself."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from opendataflow_dagster.chunk import Chunk, ChunkFailed, Result
from opendataflow_dagster.errors import SessionError
from opendataflow_dagster.model import FAILED, READY, RESUBMIT, Claim, Stop
from opendataflow_dagster.runner.environment import job_environment
from opendataflow_dagster.runner.heartbeat import Pulse
from opendataflow_dagster.runner.produce import Maker, Produced, make
from opendataflow_dagster.runner.run import LOST
from opendataflow_dagster.store.operations import release
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import expire, put, register, sql, statuses, take

Make = Callable[..., list[Produced]]


@pytest.fixture
def claims(store: Store) -> list[Claim]:
    """The claims of chunks 1 to 4."""
    register(store, "loadbob", ["bobin"], ["bobout"])
    for dataid in "1234":
        put(store, "bobin", dataid)
    return take(store, "loadbob", k=4)


def made(store: Store, claims: Sequence[Claim], maker: Maker) -> list[Produced]:
    environment = job_environment(store, store.read_plan("loadbob"), secrets=False)
    with Pulse(store, claims[0].owner) as pulse:
        return list(make(store, claims, environment, maker, pulse=pulse))


def outputs(store: Store) -> dict[str, str]:
    return {key[2]: word for key, (_, word) in statuses(store).items() if key[0] == "bobout"}


class Together(Maker):
    """Prepares all chunks at once."""

    batch = 4

    def __init__(self) -> None:
        super().__init__(self._one)
        self.prepared: dict[int, int] = {}
        self.forgotten: list[str] = []

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        self.prepared = {each.generation: 10 * int(each.dataid) for each in chunks}

    def forget(self, claim: Claim) -> None:
        self.forgotten.append(claim.dataid)

    def _one(self, chunk: Chunk) -> Result:
        if chunk.dataid == "3":
            raise ChunkFailed("the third is bad")
        return Result(rows=self.prepared[chunk.generation])


def test_chunks_prepared_together_are_settled_one_by_one(store: Store, claims: list[Claim]) -> None:
    maker = Together()

    produced = made(store, claims, maker)

    assert [each.status for each in produced] == [READY, READY, FAILED, READY]
    assert [each.results["bobout"].rows for each in produced if each.results] == [10, 20, 40]
    assert outputs(store) == {"1": READY, "2": READY, "3": FAILED, "4": READY}
    assert maker.forgotten == ["1", "2", "3", "4"]


def test_a_recovered_chunk_is_lost_and_the_others_are_produced(
    store: Store, claims: list[Claim]
) -> None:
    expire(store, claims[1])
    store.recover("loadbob")

    produced = made(store, claims, Together())

    assert [each.status for each in produced] == [READY, LOST, FAILED, READY]
    assert outputs(store)["2"] == "RESUBMIT"


@pytest.mark.parametrize("at_once", [1, 2])
def test_an_interruption_gives_back_all_chunks(
    store: Store, claims: list[Claim], at_once: int
) -> None:
    class Canceled(BaseException):
        pass

    def cancel(chunk: Chunk) -> None:
        if chunk.dataid == "2":
            raise Canceled("the run was canceled")
        time.sleep(0.2)

    maker = Maker(cancel)
    maker.threads = at_once

    with pytest.raises(Canceled):
        made(store, claims, maker)

    words = outputs(store)
    assert words["2"] == RESUBMIT
    assert set(words.values()) <= {READY, RESUBMIT}
    assert words["1"] == READY
    back = sql(store, "select dataid, why from dataevent where status_after = 'RESUBMIT'")
    assert back
    assert all("the run was canceled" in why for _, why in back)
    assert {each.attempts for each in take(store, "loadbob", k=4)} == {1}


def test_a_termination_by_a_person_puts_all_chunks_on_hold(
    store: Store, claims: list[Claim]
) -> None:
    def cancel(chunk: Chunk) -> None:
        raise KeyboardInterrupt

    environment = job_environment(store, store.read_plan("loadbob"), secrets=False)
    with Pulse(store, claims[0].owner) as pulse, pytest.raises(KeyboardInterrupt):
        list(
            make(
                store,
                claims,
                environment,
                Maker(cancel),
                pulse=pulse,
                interrupted=lambda _: Stop("terminated by a person", hold=True),
            )
        )

    assert outputs(store) == dict.fromkeys("1234", "HOLD")
    assert take(store, "loadbob", k=4) == []
    release(store, "loadbob", list("1234"))
    assert {each.attempts for each in take(store, "loadbob", k=4)} == {1}


def test_a_consumer_that_stops_early_gives_the_rest_back(store: Store, claims: list[Claim]) -> None:
    environment = job_environment(store, store.read_plan("loadbob"), secrets=False)
    with Pulse(store, claims[0].owner) as pulse:
        one_by_one: Any = make(store, claims, environment, Maker(lambda chunk: None), pulse=pulse)
        next(one_by_one)
        one_by_one.close()

    assert outputs(store) == {"1": READY, "2": RESUBMIT, "3": RESUBMIT, "4": RESUBMIT}
    assert {each.attempts for each in take(store, "loadbob", k=4)} == {1}


def test_a_maker_that_is_to_stop_gives_the_rest_back(store: Store, claims: list[Claim]) -> None:
    maker = Maker(lambda chunk: stops.append("stopped by SIGTERM"))
    stops: list[str] = []
    maker.why_stopping = lambda: stops[0] if stops else None

    assert [each.status for each in made(store, claims, maker)] == [READY]
    assert outputs(store) == {"1": READY, "2": RESUBMIT, "3": RESUBMIT, "4": RESUBMIT}


def test_threads_run_in_parallel_up_to_the_limit(store: Store, claims: list[Claim]) -> None:
    now, most, lock, two = 0, 0, threading.Lock(), threading.Barrier(2)

    def work(chunk: Chunk) -> Any:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        two.wait(60)
        with lock:
            now -= 1

    maker = Maker(work)
    maker.threads = 2

    produced = made(store, claims, maker)

    assert most == 2
    assert maker.at_once() == 4
    assert sorted(each.claim.dataid for each in produced) == ["1", "2", "3", "4"]
    assert set(outputs(store).values()) == {READY}


@pytest.mark.parametrize("threads", [1, 2])
def test_without_a_session_the_remaining_chunks_are_given_back(
    store: Store, claims: list[Claim], threads: int
) -> None:
    def compute(chunk: Chunk) -> Result:
        if chunk.dataid != "1":
            time.sleep(0.2)
            raise SessionError("no Java")
        return Result()

    maker = Maker(compute)
    maker.threads = threads
    with pytest.raises(SessionError, match="no Java"):
        made(store, claims, maker)

    assert outputs(store) == {"1": READY, "2": RESUBMIT, "3": RESUBMIT, "4": RESUBMIT}
    assert {each.attempts for each in take(store, "loadbob", k=4)} == {1}
