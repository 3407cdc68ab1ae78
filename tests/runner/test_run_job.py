"""Running a job's script: real scripts, on both databases; and what the original gets wrong."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from opendataflow_dagster.errors import DataflowError, Refused, StaleClaim, WrongUse
from opendataflow_dagster.runner.run import Outcome, end, force_job, run_job, start
from opendataflow_dagster.store.claims import force
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import (
    check,
    expire,
    policy,
    put,
    register,
    sql,
    status,
    statuses,
    take,
)

WAITING = "touch began; while [ ! -e go ]; do sleep 0.01; done"
DONE, FAILED, IDLE = Outcome(0, done=1), Outcome(1, failed=1), Outcome(0)


@pytest.fixture
def loadbob(store: Store) -> Iterator[Store]:
    """A store in which `loadbob` produces `bobout` from `bobin`; its tables end up right."""
    register(store, "loadbob", ["bobin"], ["bobout"])
    yield store
    check(store)


def script(body: str, name: str = "loadbob.sh") -> list[str]:
    path = Path(name)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return [f"./{name}"]


def run(
    store: Store, body: str = "true", jobid: str = "loadbob", say: Callable = print, **more
) -> Outcome:
    store._plans.clear()
    return run_job(store, jobid, script(body, f"{jobid}.sh"), say=say, **more)


def elsewhere(store: Store, *arguments, **more) -> Outcome:
    """`run` for a thread of its own, whose connection ends with it."""
    try:
        return run(store, *arguments, **more)
    finally:
        store.db.drop()


def ran() -> list[str]:
    """The lines that scripts have left in `ran`."""
    return Path("ran").read_text().splitlines() if Path("ran").exists() else []


def wait_for(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_the_output_is_the_originals(loadbob: Store) -> None:
    put(loadbob, "bobin", "1.0")
    put(loadbob, "bobin", "2.0")
    said: list[str] = []

    assert run(loadbob, say=said.append) == DONE
    assert run(loadbob, "exit 3", say=said.append) == Outcome(3, failed=1)
    assert run(loadbob, say=said.append) == IDLE

    date = r"[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \w+ \d{4}: "
    dated = [re.match(date, line) is not None for line in said]
    assert dated == [True, True, False, True, True, True, False, True]
    assert [re.sub(date, "", line) for line in said] == [
        "Launching ./loadbob.sh with dataid 1.0",
        "Job ./loadbob.sh is complete. Updating status",
        "1 rows updated to READY for loadbob and 1.0 1 IN file-local locks released",
        "Launching ./loadbob.sh with dataid 2.0",
        "Job ./loadbob.sh has failed. Updating status",
        "Reason: exit code 3",
        "1 rows updated to FAILED for loadbob and 2.0 1 IN file-local locks released",
        "no suitable data available for job. Not running it: "
        "blocked: 1 FAILED or on HOLD, 1 done; details: `odf why loadbob`",
    ]


def test_with_nothing_to_do_it_says_whether_all_is_done_or_what_blocks(
    loadbob: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def why() -> str:
        said: list[str] = []
        assert run(loadbob, say=said.append) == IDLE
        return said[0].partition("no suitable data available for job. Not running it: ")[2]

    more = "; details: `odf why loadbob`"
    assert why() == f"no chunk is known yet{more}"
    for number in range(4):
        put(loadbob, "bobin", str(number))
    [claim] = loadbob.claim("loadbob", owner="me", only="0")
    policy(loadbob, "loadbob", paused_until="2999-01-01")
    assert why().startswith("paused until 2999-01-01")
    policy(loadbob, "loadbob", paused_until=None, concurrency=1)
    assert why() == f"3 claimable, at its concurrency of 1{more}"
    policy(loadbob, "loadbob", concurrency=None)
    loadbob.finish(claim)
    assert run(loadbob, all_chunks=True) == Outcome(0, done=3)
    assert why() == "all done (4 chunks)"
    monkeypatch.setattr("opendataflow_dagster.explain.explain.MAX_IDLE_JUDGED_ROWS", 2)
    assert why() == "the 4 chunks that changed last are done; all of them: `odf status loadbob`"

    sql(loadbob, "update datastatus set status = 'FAILED' where jobid = 'loadbob' and dataid = '1'")
    sql(loadbob, "update datastatus set status = 'HOLD' where jobid = 'loadbob' and dataid = '2'")
    sql(loadbob, "update datastatus set status = 'FAILED' where datasetid = 'bobin'")
    put(loadbob, "bobin", "5", status="RUNNING")
    blocked = "blocked: 2 FAILED or on HOLD, 1 waiting for inputs, 2 done"
    assert why() == f"{blocked}, of the 5 chunks checked{more}"
    monkeypatch.setattr("opendataflow_dagster.explain.explain.MAX_IDLE_JUDGED_ROWS", 100)
    assert why() == blocked + more


def test_rows_are_locked_while_it_runs_and_settled_after(loadbob: Store) -> None:
    put(loadbob, "bobin", "1")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(elsewhere, loadbob, WAITING + "; exit 1")
        wait_for(lambda: Path("began").exists())
        assert status(loadbob, "bobin", "1", "loadbob") == "RUNNING"
        assert status(loadbob, "bobout", "1", "loadbob") == "RUNNING"
        Path("go").touch()
        assert running.result() == FAILED

    assert status(loadbob, "bobin", "1", "loadbob") is None
    assert status(loadbob, "bobout", "1", "loadbob") == "FAILED"
    assert run(loadbob) == IDLE

    sql(loadbob, "update datastatus set status = 'RESUBMIT' where status = 'FAILED'")
    assert run(loadbob) == DONE


def test_values_for_a_script_are_never_evaluated(loadbob: Store) -> None:
    """COMPAT 2 and 3: no shell sees a column or a dataid; odd datasetids keep their variables."""
    evil = "$(touch hacked); 'x' \"y\" `touch hacked`\nz"
    register(loadbob, "loadbob", ["my-data.x"])
    sql(loadbob, "insert into dataset (datasetid, hostname) values ('my-data.x', :evil)", evil=evil)
    put(loadbob, "bobin", evil)
    put(loadbob, "my-data.x", evil)
    said: list[str] = []

    assert (
        run(
            loadbob, 'printf %s "$dataid" > a; printf %s "$my_data_x_hostname" > b', say=said.append
        )
        == DONE
    )

    assert Path("a").read_text() == Path("b").read_text() == evil
    assert not Path("hacked").exists()
    assert all("\n" not in line for line in said)


def test_no_stale_dataid_is_run(loadbob: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """COMPAT 1."""
    monkeypatch.setenv("dataid", "999")
    assert run(loadbob, "echo $dataid >> ran") == IDLE
    assert ran() == []


def test_jobs_share_an_input(loadbob: Store) -> None:
    """COMPAT 4: the IN lock is the job's own."""
    register(loadbob, "other", ["bobin"], ["otherout"])
    put(loadbob, "bobin", "1")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(elsewhere, loadbob, WAITING)
        wait_for(lambda: Path("began").exists())
        assert run(loadbob, jobid="other") == DONE
        Path("go").touch()
        assert first.result() == DONE


def test_settling_is_atomic(loadbob: Store) -> None:
    """COMPAT 6: without room for everything, nothing begins; the lease gives the chunk back."""
    put(loadbob, "bobin", "1")
    sql(loadbob, "alter table chunkfact rename to elsewhere")
    with pytest.raises(DataflowError):
        run(loadbob)
    assert status(loadbob, "bobin", "1", "loadbob") == "RUNNING"
    assert status(loadbob, "bobout", "1", "loadbob") == "RUNNING"

    sql(loadbob, "alter table elsewhere rename to chunkfact")
    assert run(loadbob) == IDLE
    expire(loadbob)
    assert run(loadbob) == DONE


def test_two_jobs_never_produce_one_chunk_at_once(loadbob: Store) -> None:
    """COMPAT 8."""
    register(loadbob, "rival", ["bobin"], ["bobout"])
    put(loadbob, "bobin", "1")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(elsewhere, loadbob, WAITING)
        wait_for(lambda: Path("began").exists())
        assert run(loadbob, jobid="rival") == IDLE
        Path("go").touch()
        assert first.result() == DONE
    assert run(loadbob, jobid="rival") == IDLE


def test_a_chunk_is_run_once_though_its_output_is_not_registered(loadbob: Store) -> None:
    """COMPAT 9: datasets missing from `dataset` are tracked, too."""
    put(loadbob, "bobin", "1")

    assert [run(loadbob), run(loadbob)] == [DONE, IDLE]


@pytest.mark.parametrize(("ins", "outs"), [([], []), (["bobin"], []), (["bobin"], ["bobin", "x"])])
def test_a_job_that_would_run_for_ever_is_refused(
    store: Store, ins: list[str], outs: list[str]
) -> None:
    """COMPAT 9 and 10; registered by hand, since `odf job add` refuses it."""
    register(store, "loadbob", ins, outs)
    put(store, "bobin", "1")

    with pytest.raises(Refused) as refusal:
        run(store, "echo x >> ran")

    assert refusal.value.code == "NOT_REGISTERED"
    assert ran() == []


def test_nine_comes_before_ten(loadbob: Store) -> None:
    """COMPAT 11."""
    for dataid in ("10", "9", "100"):
        put(loadbob, "bobin", dataid)
    put(loadbob, "bobout", "100", "RESUBMIT", jobid="loadbob")

    assert run(loadbob, "echo $dataid >> ran", all_chunks=True) == Outcome(0, done=3)

    assert ran() == ["100", "9", "10"]


def test_modified_is_when_a_status_was_reached(loadbob: Store) -> None:
    """COMPAT 15."""
    modified = "select modified from datastatus where datasetid = 'bobout'"
    put(loadbob, "bobin", "1")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(elsewhere, loadbob, WAITING)
        wait_for(lambda: Path("began").exists())
        [(claimed,)] = sql(loadbob, modified)
        Path("go").touch()
        running.result()
    [(ready,)] = sql(loadbob, modified)

    assert str(claimed) < str(ready)


def test_one_output_in_resubmit_is_enough_to_run_again(loadbob: Store) -> None:
    """COMPAT 17."""
    register(loadbob, "loadbob", outs=["second"])
    put(loadbob, "bobin", "1")
    run(loadbob)

    sql(loadbob, "update datastatus set status = 'RESUBMIT' where datasetid = 'second'")

    assert run(loadbob) == DONE
    assert (
        status(loadbob, "bobout", "1", "loadbob")
        == status(loadbob, "second", "1", "loadbob")
        == "READY"
    )


def test_outputs_are_recorded_with_their_place(loadbob: Store) -> None:
    sql(loadbob, "insert into dataset (datasetid, hostname, tablename) values ('bobout', 'h', 't')")
    put(loadbob, "bobin", "1")
    run(loadbob)

    assert sql(
        loadbob, "select datasetid, dataid, location from chunkfact where jobid = 'loadbob'"
    ) == [("bobout", "1", "h/t")]


def test_a_script_past_its_time_limit_is_ended(loadbob: Store) -> None:
    policy(loadbob, "loadbob", time_limit=1)
    put(loadbob, "bobin", "1")

    assert run(loadbob, "sleep 60") == Outcome(143, failed=1)

    assert ("time limit of 1 s",) in sql(
        loadbob, "select why from dataevent where status_after = 'FAILED'"
    )


@pytest.mark.parametrize(
    ("argv", "code"), [(["./nowhere.sh"], 127), (["./plain"], 126), (["no-such-program"], 127)]
)
def test_a_script_that_cannot_start_costs_no_chunk(
    loadbob: Store, argv: list[str], code: int
) -> None:
    Path("plain").touch()
    put(loadbob, "bobin", "1")

    with pytest.raises(WrongUse, match=re.escape(argv[0])) as refusal:
        run_job(loadbob, "loadbob", argv, say=print, all_chunks=True)

    assert refusal.value.exit_code == code
    assert status(loadbob, "bobout", "1", "loadbob") is None


def test_a_heartbeat_renews_the_lease_while_the_script_runs(loadbob: Store) -> None:
    policy(loadbob, "loadbob", lease_seconds=1)
    put(loadbob, "bobin", "1")
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(elsewhere, loadbob, "while [ ! -e go ]; do sleep 0.01; done")
        wait_for(lambda: sql(loadbob, "select 1 from claim where heartbeat > started"))
        Path("go").touch()
        assert running.result() == DONE


def test_a_failing_heartbeat_is_reported_once_and_ends_nothing(
    loadbob: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy(loadbob, "loadbob", lease_seconds=1)
    put(loadbob, "bobin", "1")
    beats = []

    def heartbeat(claims: object) -> list:
        beats.append(claims)
        if len(beats) > 1:
            Path("go").touch()
        raise DataflowError("the server is down.")

    monkeypatch.setattr(loadbob, "heartbeat", heartbeat)
    said: list[str] = []

    assert run(loadbob, "while [ ! -e go ]; do sleep 0.01; done", say=said.append) == DONE
    assert len([line for line in said if "Can't renew the claim: the server is down." in line]) == 1


def test_a_run_that_loses_its_claim_stops_and_changes_nothing(loadbob: Store) -> None:
    policy(loadbob, "loadbob", lease_seconds=1)
    put(loadbob, "bobin", "1")
    said: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(elsewhere, loadbob, "touch began; exec sleep 60", say=said.append)
        wait_for(lambda: Path("began").exists())
        sql(loadbob, "update datastatus set status = 'RESUBMIT' where datasetid = 'bobout'")
        assert running.result().failed == 1

    assert "claimed by" in said[-1]
    assert status(loadbob, "bobout", "1", "loadbob") == "RESUBMIT"


def test_a_script_that_ends_well_after_its_claim_was_lost_changes_nothing(loadbob: Store) -> None:
    put(loadbob, "bobin", "1")
    with ThreadPoolExecutor(1) as pool:
        zombie = pool.submit(elsewhere, loadbob, WAITING)
        wait_for(lambda: Path("began").exists())
        expire(loadbob)
        assert run(loadbob, jobid="loadbob", body="exit 1") == FAILED  # its own script: a new file
        Path("go").touch()
        assert zombie.result() == FAILED

    assert status(loadbob, "bobout", "1", "loadbob") == "FAILED"


def test_all_with_workers_continues_after_failures(loadbob: Store) -> None:
    for number in range(40):
        put(loadbob, "bobin", str(number))
    said: list[str] = []
    body = 'echo $dataid >> ran; [ "$(cat)" = "" ] && case $dataid in *7) exit 1;; esac'

    outcome = run(loadbob, body, say=said.append, all_chunks=True, workers=4)

    assert outcome == Outcome(1, done=36, failed=4)
    assert sorted(ran(), key=int) == [str(number) for number in range(40)]
    assert said[-1].endswith(": done 36, failed 4; next: odf status loadbob")
    words = [
        word for (datasetid, *_), (_, word) in statuses(loadbob).items() if datasetid == "bobout"
    ]
    assert (words.count("READY"), words.count("FAILED")) == (36, 4)


def test_all_waits_for_retries_that_are_due(loadbob: Store) -> None:
    policy(loadbob, "loadbob", max_attempts=2, retry_delay=1)
    for number in range(3):
        put(loadbob, "bobin", str(number))
    body = "[ -e tried$dataid ] || { touch tried$dataid; exit 1; }"

    assert run(loadbob, body, all_chunks=True, workers=2) == Outcome(0, done=3)


@pytest.mark.parametrize("how", ["others", "lease", "reader"])
def test_all_waits_for_the_claims_of_others(
    loadbob: Store, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opendataflow_dagster.runner.catch_up.LOOK_SECONDS", 0.1)
    policy(loadbob, "loadbob", concurrency=2)
    for number in range(3):
        put(loadbob, "bobin", str(number))
    if how == "reader":
        register(loadbob, "report", ["bobout"], ["reports"])
        put(loadbob, "bobout", "0", "READY", jobid="loadbob")
        [held] = take(loadbob, "report")
        put(loadbob, "bobout", "0", "RESUBMIT", jobid="loadbob")
    else:
        [held] = take(loadbob, "loadbob", "somebody else")
    said: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            elsewhere, loadbob, "echo $dataid >> ran", say=said.append, all_chunks=True, workers=2
        )
        wait_for(lambda: any("Waiting for chunks" in line for line in said))
        assert len(ran()) == 2
        if how == "lease":
            expire(loadbob, held)
        else:
            loadbob.finish(held)
        outcome = running.result()

    done = 2 if how == "others" else 3
    assert outcome == Outcome(0, done=done)
    assert len(ran()) == done
    assert "left" not in said[-1]


@pytest.mark.parametrize("dial", ["concurrency", "paused_until"])
def test_all_ends_with_3_when_a_dial_blocks_the_rest(loadbob: Store, dial: str) -> None:
    for number in range(3):
        put(loadbob, "bobin", str(number))
    turned = {"concurrency": 0, "paused_until": "2999-01-01 00:00:00"}
    policy(loadbob, "loadbob", **{dial: turned[dial]})
    said: list[str] = []
    assert run(loadbob, say=said.append, all_chunks=True) == Outcome(3)
    assert re.search(r"done 0, failed 0, left 3: .*, and --wait isn't given", said[-1])

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            elsewhere, loadbob, say=said.append, all_chunks=True, workers=2, wait=True
        )
        wait_for(lambda: any(line.endswith("3 left") for line in said))
        policy(loadbob, "loadbob", **{dial: None})
        assert running.result() == Outcome(0, done=3)

    policy(loadbob, "loadbob", **{dial: turned[dial]})
    assert run(loadbob, all_chunks=True) == IDLE, "nothing is left that it could hold back"


def test_all_with_nothing_to_do_says_so(loadbob: Store) -> None:
    said: list[str] = []
    assert run(loadbob, say=said.append, all_chunks=True, workers=2) == IDLE
    nothing = ": no suitable data available for job. Not running it: "
    assert said[0].endswith(f"{nothing}no chunk is known yet; details: `odf why loadbob`")


def test_an_error_in_a_worker_ends_the_run_with_it(loadbob: Store) -> None:
    before = threading.active_count()  # a session of Spark that other tests share has its own
    for number in range(4):
        put(loadbob, "bobin", str(number))
    sql(loadbob, "alter table chunkfact rename to elsewhere")

    with pytest.raises(DataflowError):
        run(loadbob, all_chunks=True, workers=2)

    sql(loadbob, "alter table elsewhere rename to chunkfact")
    assert threading.active_count() == before


def test_force_runs_without_the_checks_and_is_recorded(loadbob: Store) -> None:
    argv = script("echo $dataid $dataflow_generation >> ran")

    assert force_job(loadbob, "loadbob", "1", argv, say=print) == DONE  # no input
    put(loadbob, "bobout", "1", "HOLD", jobid="loadbob")
    assert force_job(loadbob, "loadbob", "1", argv, say=print) == DONE

    assert len(set(ran())) == 2
    assert status(loadbob, "bobout", "1", "loadbob") == "READY"
    why = "select distinct status_after from dataevent where why = 'forced' and locktype = 'OUT'"
    assert sql(loadbob, why) == [("RUNNING",)]
    check(loadbob)


def test_force_takes_a_chunk_out_of_the_queue(loadbob: Store) -> None:
    register(loadbob, "reader", ["bobout"], ["end"])
    put(loadbob, "bobin", "1")
    put(loadbob, "bobout", "2", jobid="loadbob")
    for dataid in ("1", "2"):
        force(loadbob, "loadbob", dataid, owner="me")

    check(loadbob)
    assert take(loadbob, "loadbob") == take(loadbob, "reader") == []


def test_force_leaves_a_chunk_alone_that_is_being_produced(loadbob: Store) -> None:
    register(loadbob, "rival", ["bobin"], ["bobout"])
    put(loadbob, "bobin", "1")
    [claim] = take(loadbob, "loadbob", "alice")
    put(loadbob, "bobout", "2", "RUNNING", jobid="java")
    holders = {("loadbob", "1"): "alice since 20", ("rival", "1"): "job loadbob since 20"}
    holders["loadbob", "2"] = "job java"

    for (jobid, dataid), holder in holders.items():
        with pytest.raises(Refused, match=f"produced by {holder}") as refusal:
            force(loadbob, jobid, dataid, owner="bob")
        assert refusal.value.code == "LOCKED"
    loadbob.finish(claim)


def test_of_a_force_and_a_claim_one_wins(loadbob: Store) -> None:
    for number in range(20):
        put(loadbob, "bobin", str(number))
    begin = threading.Barrier(2)

    def claims() -> set[str]:
        begin.wait()
        won = set()
        while claimed := loadbob.claim("loadbob", owner="claimer"):
            won |= {claim.dataid for claim in claimed}
        loadbob.db.drop()
        return won

    def forces() -> set[str]:
        begin.wait()
        won = set()
        for number in range(20):
            try:
                won.add(force(loadbob, "loadbob", str(number), owner="forcer").dataid)
            except Refused:
                continue
        loadbob.db.drop()
        return won

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(claims), pool.submit(forces)

    assert first.result().isdisjoint(second.result())
    assert len(first.result() | second.result()) == 20


def test_start_and_end_for_another_language(loadbob: Store) -> None:
    sql(loadbob, "insert into dataset (datasetid, hostname) values ('bobin', 'h'), ('bobout', 'o')")
    policy(loadbob, "loadbob", lease_seconds=5)
    put(loadbob, "bobin", "1")

    started = start(loadbob, "loadbob")

    assert started
    claim, context = started
    assert context[0] == {"dataid": "1"}
    assert {"bobin_hostname": "h"} in context
    assert {"dataflow_generation": str(claim.generation)} in context
    assert json.loads(json.dumps(context)) == context
    [(lease_end,)] = sql(loadbob, "select lease_end from claim")
    [(started_at,)] = sql(loadbob, "select started from claim")
    assert str(lease_end)[:10] > str(started_at)[:10]  # tomorrow, whatever the policy of scripts
    assert start(loadbob, "loadbob") is None

    line = end(loadbob, "loadbob", "1", "READY")

    assert line == "1 rows updated to READY for loadbob and 1 1 IN file-local locks released"
    assert status(loadbob, "bobout", "1", "loadbob") == "READY"
    assert sql(loadbob, "select location from chunkfact where jobid = 'loadbob'") == [("o",)]


def test_end_is_only_for_what_was_started(loadbob: Store) -> None:
    """COMPAT 19."""
    put(loadbob, "bobin", "1")
    with pytest.raises(Refused, match="isn't claimed"):
        end(loadbob, "loadbob", "1", "READY")
    claim, _ = start(loadbob, "loadbob") or pytest.fail("nothing was started")

    for word in ("DONE", "ready", ""):
        with pytest.raises(WrongUse, match="READY, FAILED or RESUBMIT"):
            end(loadbob, "loadbob", "1", word)
    with pytest.raises(StaleClaim):
        end(loadbob, "loadbob", "1", "READY", generation=claim.generation + 1)
    assert status(loadbob, "bobout", "1", "loadbob") == "RUNNING"

    assert "updated to FAILED" in end(
        loadbob, "loadbob", "1", "FAILED", generation=claim.generation
    )
    with pytest.raises(Refused):
        end(loadbob, "loadbob", "1", "READY")


def test_end_does_not_end_a_running_script_unawares(loadbob: Store) -> None:
    put(loadbob, "bobin", "1")
    [claim] = take(loadbob, "loadbob")

    with pytest.raises(Refused, match=f"--generation {claim.generation}"):
        end(loadbob, "loadbob", "1", "READY")

    assert "READY" in end(loadbob, "loadbob", "1", "READY", generation=claim.generation)
