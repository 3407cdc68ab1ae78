"""One claimed chunk: computed, checked, published, settled; and its claim kept alive meanwhile."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from opendataflow_dagster.config.credentials import encrypt, for_dataset
from opendataflow_dagster.errors import Refused, SessionError, StaleClaim
from opendataflow_dagster.model import FAILED, READY, RESUBMIT, Claim
from opendataflow_dagster.runner.environment import job_environment
from opendataflow_dagster.runner.heartbeat import Pulse
from opendataflow_dagster.runner.produce import (
    Checked,
    Chunk,
    ChunkFailed,
    Produced,
    Result,
    evidence_of,
    produce,
    reason_of,
)
from opendataflow_dagster.runner.run import LOST
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.postgres import Server
from tests.support.store_fixtures import expire, policy, put, register, sql, status, take

Make = Callable[..., Produced]


@pytest.fixture
def claim(store: Store) -> Claim:
    """A claim of chunk 1 of `loadbob`, which produces `bobout` from `bobin`."""
    add_dataset(store, "bobin", hostname="here", tablename="orders")
    add_dataset(store, "bobout", hostname="there", tablename="sums")
    register(store, "loadbob", ["bobin"], ["bobout"], COLOR="red")
    put(store, "bobin", "1")
    return take(store, "loadbob")[0]


@pytest.fixture
def make(store: Store, claim: Claim) -> Iterator[Make]:
    """Produce the claimed chunk with a function."""
    with Pulse(store, claim.owner) as pulse:

        def made(compute: Callable[[Chunk], Any] = lambda _: None, **more: Any) -> Produced:
            environment = job_environment(store, store.read_plan("loadbob"), secrets=False)
            return produce(store, claim, environment, compute, pulse=pulse, **more)

        yield made


def facts(store: Store) -> list[tuple]:
    return sql(
        store,
        "select datasetid, dataid, location, rows, bytes, fingerprint, validated, checks "
        "from chunkfact where jobid <> 'loader' order by 1, 2",
    )


def test_a_chunk_is_produced_and_its_facts_are_recorded(
    store: Store, claim: Claim, make: Make
) -> None:
    seen: list[Chunk] = []

    def compute(chunk: Chunk) -> Result:
        seen.append(chunk)
        assert status(store, "bobout", "1", "loadbob") == "RUNNING"
        return Result(3, 100, "abc", "there/sums/1", {"mood": "good"})

    produced = make(compute)

    [chunk] = seen
    assert (chunk.jobid, chunk.dataid, chunk.attempts) == ("loadbob", "1", 1)
    assert chunk.generation == claim.generation
    assert chunk.inputs["bobin"].location == "here/orders"
    assert chunk.inputs["bobin"].columns["tablename"] == "orders"
    assert chunk.environment["COLOR"] == "red"
    assert chunk.environment["bobout_tablename"] == "sums"
    assert chunk.alive()
    assert (produced.status, produced.reason) == (READY, "")
    assert produced.results["bobout"].metadata == {"mood": "good"}
    assert facts(store) == [("bobout", "1", "there/sums/1", 3, 100, "abc", None, None)]
    assert status(store, "bobout", "1", "loadbob") == READY


def test_inputs_are_those_that_the_claim_locked(store: Store, make: Make) -> None:
    register(store, "sum", ["bobout"], ["total"])
    first = make(lambda _: Result(7, fingerprint="f"))
    [claim] = take(store, "sum")
    with Pulse(store, claim.owner) as pulse:
        plan = job_environment(store, store.read_plan("sum"))
        produced = produce(store, claim, plan, lambda _: None, pulse=pulse)

    assert produced.chunk is not None
    place = produced.chunk.inputs["bobout"]
    assert (place.generation, place.rows, place.fingerprint) == (first.claim.generation, 7, "f")
    answers = evidence_of(produced, "total").answers()
    assert answers["ready"] == "bobout READY"
    assert answers["right"] == f"bobout: generation {place.generation}, 7 rows, fingerprint f"
    assert answers["validated"] == "no checks"


def test_an_exception_fails_the_chunk_with_what_it_says(store: Store, make: Make) -> None:
    def compute(_: Chunk) -> None:
        raise ValueError("first\nsecond \x1b[31m\0 " + "x" * 1000)

    produced = make(compute)

    assert produced.status == FAILED
    assert produced.reason.startswith("ValueError: first second \\x1b[31m\\x00")
    assert len(produced.reason) == 500
    assert isinstance(produced.error, ValueError)
    assert status(store, "bobout", "1", "loadbob") == FAILED
    [(why,)] = sql(store, "select why from dataevent where status_after = 'FAILED'")
    assert why == produced.reason


def test_a_reason_of_its_own_is_kept_as_it_is() -> None:
    assert reason_of(ChunkFailed("exit code 3")) == "exit code 3"
    assert reason_of(KeyError("a")) == "KeyError: 'a'"
    assert reason_of(ValueError()) == "ValueError"
    told = "Totals differ:\n  expected 5\n  got 6"
    assert reason_of(ValueError(told)) == "ValueError: Totals differ: expected 5 got 6"
    assert reason_of(ChunkFailed(told)) == "Totals differ: expected 5 got 6"
    assert reason_of(Refused("it is LOCKED")) == "it is LOCKED"
    with pytest.raises(SyntaxError) as caught:
        compile("a = = 1", "job.py", "exec")
    assert reason_of(caught.value) == "SyntaxError: invalid syntax"


def test_a_claim_without_a_session_is_given_back(store: Store, claim: Claim, make: Make) -> None:
    policy(store, "loadbob", max_attempts=2)

    def compute(_: Chunk) -> None:
        raise SessionError("there is no Java")

    for _ in range(3):
        with pytest.raises(SessionError, match="there is no Java"):
            make(compute)
        assert status(store, "bobout", "1", "loadbob") == RESUBMIT
        assert sql(store, "select owner, attempts, losses from claim") == [(None, 0, 0)]
        assert status(store, "bobin", "1", "loadbob") is None
        sql(store, "update claim set owner = :o", o=claim.owner)
        sql(
            store,
            "update datastatus set status = 'RUNNING', generation = :g where datasetid = 'bobout'",
            g=claim.generation,
        )
        sql(store, "update claim set attempts = 1")
    sql(store, "update claim set owner = 'thief', generation = generation + 1")
    with pytest.raises(SessionError):
        make(compute)
    assert sql(store, "select owner, attempts from claim") == [("thief", 1)]
    [why] = {
        row[0]
        for row in sql(store, "select why from dataevent where status_after = :s", s=RESUBMIT)
    }
    assert why == "there is no Java"


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (17, "a int"),
        ({"bobin": Result()}, "'bobin'"),
        ({"bobout": 17}, "with a int"),
    ],
)
def test_invalid_results_of_a_function_are_refused(make: Make, returned: Any, reason: str) -> None:
    produced = make(lambda _: returned)
    assert produced.status == FAILED
    assert reason in produced.reason
    assert "'bobout' → Result" in produced.reason


@pytest.mark.parametrize("returned", [None, Result(1), {"bobout": Result(1)}, {}, {"bobout": None}])
def test_valid_results_of_a_function_are_accepted(make: Make, returned: Any) -> None:
    assert make(lambda _: returned).status == READY


def test_the_policy_grants_another_attempt(store: Store, make: Make) -> None:
    policy(store, "loadbob", max_attempts=2)
    produced = make(lambda _: 1 / 0)
    assert (produced.status, produced.retry_in) == (RESUBMIT, 0.0)


def test_a_delayed_retry_is_reported_not_waited_for(store: Store, make: Make) -> None:
    policy(store, "loadbob", max_attempts=2, retry_delay=30)
    produced = make(lambda _: 1 / 0)
    assert (produced.status, produced.retry_in) == (FAILED, 30.0)


def test_a_check_that_fails_keeps_a_chunk_from_being_ready(store: Store, make: Make) -> None:
    published: list[Chunk] = []
    produced = make(
        lambda _: Result(0, location="there/1"),
        checks=[
            lambda chunk: Checked("rows", "bobout", bool(chunk.results["bobout"].rows), "no rows"),
            lambda _: Checked("fresh", "bobout", True),
        ],
        publish=published.append,
    )

    assert produced.status == FAILED
    assert produced.reason == "NOT_VALIDATED: rows: no rows"
    assert not published
    [row] = facts(store)
    assert row[:4] == ("bobout", "1", "there/1", 0)
    assert not row[6]
    assert row[7] == "rows failed: no rows; fresh passed"


def test_a_warning_lets_a_chunk_be_ready(store: Store, make: Make) -> None:
    produced = make(checks=[lambda _: Checked("old", "bobout", False, "stale", {}, "WARN")])
    assert produced.status == READY
    [row] = facts(store)
    assert row[6]
    assert row[7] == "old failed: stale"


def test_publishing_comes_last_and_may_set_the_location(store: Store, make: Make) -> None:
    order: list[str] = []

    def publish(chunk: Chunk) -> Result:
        order.append("publish")
        assert status(store, "bobout", "1", "loadbob") == "RUNNING"
        return chunk.results["bobout"]._replace(location="there/final")

    def check(_: Chunk) -> Checked:
        order.append("check")
        return Checked("fine", "bobout", True)

    produced = make(lambda _: order.append("compute"), checks=[check], publish=publish)

    assert order == ["compute", "check", "publish"]
    assert produced.status == READY
    assert facts(store)[0][2] == "there/final"


def test_a_recovered_chunk_is_neither_published_nor_settled(
    store: Store, claim: Claim, make: Make
) -> None:
    published: list[Chunk] = []

    def compute(_: Chunk) -> None:
        expire(store)
        store.recover("loadbob")
        [(other)] = take(store, "loadbob", "other")
        assert other.generation > claim.generation

    produced = make(compute, publish=published.append)

    assert produced.status == LOST
    assert "another worker" in produced.reason
    assert not published
    assert status(store, "bobout", "1", "loadbob") == "RUNNING"


def test_an_error_of_a_zombie_fails_nothing(store: Store, make: Make) -> None:
    def compute(chunk: Chunk) -> None:
        sql(store, "update datastatus set status = 'RESUBMIT' where datasetid = 'bobout'")
        chunk._pulse.beat()  # type: ignore[union-attr]
        assert not chunk.alive()
        chunk.check()

    assert make(compute).status == LOST
    assert status(store, "bobout", "1", "loadbob") == RESUBMIT


def test_an_interruption_isnt_a_failure_and_propagates(store: Store, make: Make) -> None:
    policy(store, "loadbob", max_attempts=5)

    def compute(_: Chunk) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(compute)

    assert status(store, "bobout", "1", "loadbob") == RESUBMIT
    [(why,)] = sql(store, "select why from dataevent where status_after = 'RESUBMIT'")
    assert why == "interrupted: KeyboardInterrupt"
    assert take(store, "loadbob")[0].attempts == 1


def test_a_password_is_decrypted_on_access(
    store: Store, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = encrypt("geheim", "key", purpose=for_dataset("bobin"))
    add_dataset(store, "bobin", encryptedpass=secret)
    seen: list[Any] = []

    def compute(chunk: Chunk) -> None:
        assert "geheim" not in str(chunk.environment)
        assert "encryptedpass" not in chunk.inputs["bobin"].columns
        monkeypatch.setenv("PASSKEY", "key")
        seen.extend([chunk.password("bobin"), chunk.password("bobout")])
        assert "geheim" not in repr(chunk)

    assert make(compute).status == READY
    assert seen == ["geheim", None]


def test_a_pulse_renews_leases_during_the_work(store: Store, make: Make) -> None:
    sql(store, "insert into jobpolicy (jobid, lease_seconds) values ('brief', 3)")
    register(store, "brief", ["bobin"], ["quick"])
    [claim] = take(store, "brief")
    with Pulse(store, "worker", runid="run 1", jobid="brief") as pulse:
        assert sql(store, "select owner, runid, jobid from worker") == [
            ("worker", "run 1", "brief")
        ]
        pulse.hold(claim)
        time.sleep(4)
        assert not store.recover()
        assert not pulse.lost(claim)
        pulse.let_go(claim)
        store.finish(claim)
    assert sql(store, "select * from worker") == []


def test_a_pulse_notices_a_lost_claim(store: Store, claim: Claim) -> None:
    with Pulse(store, claim.owner) as pulse:
        pulse.hold(claim._replace(lease=0.3))
        sql(store, "update datastatus set status = 'RESUBMIT' where datasetid = 'bobout'")
        deadline = time.monotonic() + 20
        while not pulse.lost(claim) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert pulse.lost(claim)


def test_many_threads_share_a_pulse(store: Store) -> None:
    register(store, "copy", ["bobin"], ["bobout"])
    for number in range(40):
        put(store, "bobin", str(number))
    environment = job_environment(store, store.read_plan("copy"))
    done: list[Produced] = []

    def work(pulse: Pulse, owner: str) -> None:
        while claims := store.claim("copy", owner=owner):
            done.append(produce(store, claims[0], environment, lambda _: None, pulse=pulse))
        store.db.drop()

    with Pulse(store, lease=0.03) as pulse:
        threads = [threading.Thread(target=work, args=(pulse, f"w{n}")) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(each.status for each in done) == [READY] * 40


def test_an_outage_is_reported_once_and_fails_no_chunk(postgres_server: Server) -> None:
    from opendataflow_dagster.store import open_store

    store = open_store(postgres_server.create_database("outage"))
    store.init()
    register(store, "loadbob", ["bobin"], ["bobout"])
    put(store, "bobin", "1")
    vars(store).pop("person").close()
    [claim] = take(store, "loadbob")
    claim = claim._replace(lease=0.6)
    environment = job_environment(store, store.read_plan("loadbob"))
    said: list[str] = []

    def compute(_: Chunk) -> None:
        postgres_server.stop()
        deadline = time.monotonic() + 20
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.6)
        postgres_server.start()
        while len(said) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)

    with Pulse(store, claim.owner, say=said.append) as pulse:
        produced = produce(store, claim, environment, compute, pulse=pulse)

    assert produced.status == READY
    assert pulse.is_steady(0)
    assert not pulse.is_steady(60)
    assert len(said) == 2
    assert "Can't renew the claim" in said[0]
    assert "is back" in said[1]
    store.close()
    postgres_server.drop_database("outage")


def test_a_database_that_stays_away_is_an_error_not_a_failed_chunk(
    postgres_server: Server,
) -> None:
    from opendataflow_dagster.store import open_store

    store = open_store(postgres_server.create_database("away"))
    store.init()
    register(store, "loadbob", ["bobin"], ["bobout"])
    put(store, "bobin", "1")
    vars(store).pop("person").close()
    [claim] = take(store, "loadbob")
    environment = job_environment(store, store.read_plan("loadbob"))
    store.db.patience = 0.5
    with pytest.raises(Exception) as caught, Pulse(store, claim.owner) as pulse:
        produce(store, claim, environment, lambda _: postgres_server.stop(), pulse=pulse)

    assert store.db.trouble(caught.value) == "gone"
    postgres_server.start()
    assert status(store, "bobout", "1", "loadbob") == "RUNNING"
    vars(store).pop("person").close()
    store.close()
    postgres_server.drop_database("away")


def test_check_raises_stale_claim_for_a_lost_claim(store: Store, claim: Claim) -> None:
    pulse = Pulse(store, claim.owner)
    pulse._lost.add((claim.jobid, claim.dataid, claim.generation))
    with pytest.raises(StaleClaim):
        Chunk(claim, {}, {}, {}, _pulse=pulse).check()
