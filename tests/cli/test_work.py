"""`odf work`: a host that runs the jobs of a flow, and stays."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from opendataflow_dagster.flow.apply import apply_flow
from opendataflow_dagster.flow.flow import Flow
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.operations import resubmit
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import check, close, policy, put, sql, status, take
from tests.support.work_host import WorkHost, wait_until

FLOW = """
flow: shop
datasets: {raw: {}, a: {}, b: {}, c: {}}
jobs:
  third: {in: [a, b], out: c, run: log.sh 3}
  second: {in: a, out: b, run: ./log.sh 2 'two words'}
  first: {in: raw, out: a, run: ./log.sh 1}
  by_cron: {in: raw, out: d, run: ./log.sh cron, runs_in: cron}
  by_hand: {in: raw, out: e}
"""

SCRIPT = """#!/bin/sh
echo "$1 $dataid ${2:-}" >> log
echo "printed by $1"
while [ -e "wait-$1" ]; do sleep 0.02; done
[ ! -e "fail-$1-$dataid" ]
"""

Write = Callable[[str], None]


@pytest.fixture
def write_flow(store: Store) -> Write:
    """Write and apply a flow in the working folder, beside the script that it names."""
    Path("log.sh").write_text(SCRIPT)
    Path("log.sh").chmod(0o755)

    def write(text: str) -> None:
        Path("flow.new").write_text(text)
        apply_flow(store, Flow.load("flow.new"))
        store.fill()
        Path("flow.new").rename("flow.yml")

    write(FLOW)
    return write


def log() -> list[str]:
    path = Path("log")
    return [line.strip() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.usefixtures("write_flow")
def test_it_runs_all_claimable_chunks_except_jobs_that_others_start(url: str, store: Store) -> None:
    for dataid in "123":
        put(store, "raw", dataid)
    Path("fail-2-2").touch()
    with WorkHost(url, "--until-idle", "--workers", "2") as host:
        assert host.ended() == 1, host.errors
        [finished] = host.events("finished")
        assert (finished["done"], finished["failed"]) == (7, 1)
        left_out = {event["job"]: event["why"] for event in host.events("left_out")}
        [failed] = host.events("ended", status="FAILED")
        assert host.errors.splitlines().count("printed by 1") == 3
    assert left_out["by_cron"] == "runs_in is cron"
    assert "odf run --job by_hand SCRIPT" in left_out["by_hand"]
    assert (failed["job"], failed["dataid"], failed["why"]) == ("second", "2", "exit code 1")
    assert sorted(log()) == [
        "1 1",
        "1 2",
        "1 3",
        *(f"2 {n} two words" for n in "123"),
        "3 1",
        "3 3",
    ]

    Path("fail-2-2").unlink()
    resubmit(store, "second", ["2"])
    with WorkHost(url, "--until-idle") as host:
        assert host.ended() == 0, host.errors
    assert log()[-2:] == ["2 2 two words", "3 2"]
    check(store)


def test_a_job_with_one_chunk_does_not_wait_behind_one_with_many(
    url: str, store: Store, write_flow: Write
) -> None:
    write_flow(FLOW + "  small: {in: alone, out: z, run: ./log.sh small}\n")
    for number in range(30):
        put(store, "raw", f"many{number}")
    put(store, "alone", "one")
    with WorkHost(url, "--until-idle", "--workers", "1") as host:
        assert host.ended() == 0, host.errors
    assert log().index("small one") < 4
    assert len(log()) == 30 * 3 + 1


@pytest.mark.usefixtures("write_flow")
def test_a_signal_drains_and_a_second_one_gives_chunks_back(url: str, store: Store) -> None:
    Path("wait-1").touch()
    for dataid in "12":
        put(store, "raw", dataid)
    with WorkHost(url, "--workers", "2") as host:
        wait_until(lambda: len(log()) == 2)
        host.signal(signal.SIGTERM)
        host.wait_for("draining", running=2)
        put(store, "raw", "3")
        time.sleep(0.3)
        assert host.process.poll() is None
        Path("wait-1").unlink()
        assert host.ended() == 0, host.errors
    assert len(log()) == 2  # neither the third chunk nor what became claimable by these two
    assert [status(store, "a", dataid, "first") for dataid in "123"] == ["READY", "READY", None]

    Path("wait-1").touch()
    with WorkHost(url, "--workers", "1") as host:
        wait_until(lambda: "1 3" in log())
        host.signal(signal.SIGTERM)
        host.wait_for("draining")
        time.sleep(0.3)  # within 0.2 s, two are taken for one
        host.signal(signal.SIGTERM)
        assert host.ended() == 128 + signal.SIGTERM
        [ended] = host.events("ended", dataid="3")
    assert (ended["status"], ended["why"]) == ("RESUBMIT", "stopped by SIGTERM")
    assert status(store, "a", "3", "first") == "RESUBMIT"
    with WorkHost(url, "--workers", "3", "--drain", "0.3") as host:
        wait_until(lambda: log().count("1 3") == 2)
        host.signal(signal.SIGTERM)
        assert host.ended() == 128 + signal.SIGTERM
    assert status(store, "a", "3", "first") == "RESUBMIT"
    check(store)


@pytest.mark.usefixtures("write_flow")
def test_it_waits_through_pauses_and_notices_new_chunks(url: str, store: Store) -> None:
    policy(store, "first", paused_until="9999-01-01 00:00:00")
    policy(store, "second", concurrency=0)
    put(store, "raw", "1")
    with WorkHost(url, "--until-idle") as held:
        assert held.ended() == 3, held.errors
    with WorkHost(url, "--workers", "2") as host:
        host.wait_for("started")
        time.sleep(0.5)
        assert log() == []
        policy(store, "first", paused_until=None)
        wait_until(lambda: log() == ["1 1"])
        host.wait_for("ended", job="first")
        policy(store, "second", concurrency=1)
        host.wait_for("ended", job="third")
        since = time.monotonic()
        put(store, "raw", "2")
        wait_until(lambda: "1 2" in log())
        assert time.monotonic() - since < 0.9  # it doesn't wait for the next poll


def test_retries_are_granted_and_lost_claims_recovered(
    url: str, store: Store, write_flow: Write
) -> None:
    write_flow(
        FLOW.replace(
            "run: ./log.sh 1}", "run: ./log.sh 1, policy: {max_attempts: 2, retry_delay: 1}}"
        )
    )
    put(store, "raw", "1")
    put(store, "raw", "2")
    [lost] = take(store, "first", "dead")
    sql(store, "update claim set lease_end = heartbeat")
    Path("fail-1-2").touch()
    with WorkHost(url, "--until-idle") as host:
        wait_until(lambda: "1 2" in log())
        Path("fail-1-2").unlink()
        assert host.ended() in (0, 1), host.errors
        assert host.events("recovered", dataid=lost.dataid)
    assert log().count("1 2") == 2
    assert [status(store, "c", dataid, "third") for dataid in "12"] == ["READY", "READY"]


def test_the_flow_is_read_again_when_it_changes(url: str, store: Store, write_flow: Write) -> None:
    with WorkHost(url) as host:
        host.wait_for("started")
        write_flow(FLOW + "  more: {in: raw, out: f, run: ./log.sh more}\n")
        host.wait_for("reloaded")
        put(store, "raw", "1")
        host.wait_for("ended", job="more")
        Path("flow.yml").write_text("flow: shop\njobs: {p: {}}\n")
        host.wait_for("message")
        assert "Job 'p' has no output" in host.events("message")[-1]["text"]
        put(store, "raw", "2")
        host.wait_for("ended", job="more", dataid="2")


def test_expectations_of_the_flow_are_checked_and_reread(
    url: str, store: Store, write_flow: Write
) -> None:
    expecting = (
        "flow: shop\ndatasets: {raw: {}, a: {hostname: ./made, expect: {exists: true}}}\n"
        "jobs: {first: {in: raw, out: a, run: ./log.sh 1}}\n"
    )
    Path("made").mkdir()
    write_flow(expecting)
    put(store, "raw", "1")
    with WorkHost(url) as host:
        host.wait_for("ended", job="first", dataid="1")
        assert status(store, "a", "1", "first") == "FAILED"
        write_flow(expecting.replace(", expect: {exists: true}", ""))
        host.wait_for("reloaded")
        put(store, "raw", "2")
        host.wait_for("ended", job="first", dataid="2")
    assert status(store, "a", "2", "first") == "READY"


def test_a_missing_script_affects_only_its_own_job(
    url: str, store: Store, write_flow: Write
) -> None:
    write_flow(FLOW.replace("./log.sh 1", "./none.sh"))
    put(store, "raw", "1")
    put(store, "a", "2")
    with WorkHost(url, "--until-idle") as host:
        assert host.ended() == 1
        [trouble] = host.events("trouble")
    assert trouble["job"] == "first"
    assert "not found" in trouble["why"]
    assert log() == ["2 2 two words", "3 2"]


def test_a_job_that_dagster_runs_is_left_to_dagster(
    url: str, store: Store, write_flow: Write
) -> None:
    own = "  own: {in: raw, out: f, run: ./log.sh own, runs_in: work}\n"
    write_flow(FLOW + own)
    for dataid in "12":
        put(store, "raw", dataid)
    for jobid in ("first", "own"):
        [mine] = take(store, jobid, "step", runid="a run of Dagster", lease=600)
        assert mine.dataid == "1"
    with WorkHost(url) as host:
        host.wait_for("ended", job="own", dataid="2")
        time.sleep(0.5)
        assert log() == ["own 2"]
        sql(store, "delete from claim where jobid = 'first'")
        wait_until(lambda: "1 2" in log())
    assert "own 1" not in log()


@pytest.mark.usefixtures("store")
def test_what_is_missing_is_reported_in_one_line(url: str) -> None:
    def refused(*words: str) -> str:
        line = [sys.executable, "-m", "opendataflow_dagster.cli", "work", *words]
        env = {**os.environ, "DATAFLOW_URL": url}
        done = subprocess.run(line, capture_output=True, text=True, env=env, timeout=60)
        assert (done.returncode in (1, 2), done.stdout) == (True, "")
        assert len(done.stderr.splitlines()) == 1
        return done.stderr

    assert "There is no flow.yml" in refused()
    Path("flow.yml").write_text(FLOW)
    with WorkHost(url, "--until-idle") as host:  # the flow isn't applied
        assert host.ended() == 0
        assert "odf apply" in host.events("trouble", job="first")[0]["why"]


@pytest.mark.usefixtures("write_flow")
def test_a_terminal_shows_a_line_for_each_job(url: str, store: Store) -> None:
    put(store, "raw", "1")
    Path("fail-2-1").touch()
    ours, theirs = pty.openpty()
    line = [sys.executable, "-m", "opendataflow_dagster.cli", "work"]
    env = {**os.environ, "DATAFLOW_URL": url, "TERM": "xterm"}
    process = subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = ""
    until = time.monotonic() + 20
    while "1 failed" not in shown and time.monotonic() < until:
        if select.select([ours], [], [], 0.5)[0]:
            shown += os.read(ours, 65536).decode()
    process.send_signal(signal.SIGTERM)
    with suppress(OSError):  # that is the end of a terminal
        while more := os.read(ours, 65536):
            shown += more.decode()
    assert process.wait() == 0
    os.close(ours)
    assert "printed by 1\r\n" in shown
    assert "second 1 FAILED: exit code 1" in shown
    lines = [line.split() for line in shown.splitlines()]
    assert ["first", "0", "1", "0", "0"] in lines
    assert ["second", "0", "0", "1", "0"] in lines


def test_a_function_runs_in_a_process_of_its_own(url: str, store: Store, write_flow: Write) -> None:
    Path("jobs.py").write_text(
        "import os\n\n\ndef make(chunk):\n    print('made', chunk.dataid, 'by', os.getpid())\n"
        "    if chunk.dataid == '2':\n        raise ValueError('no luck')\n"
    )
    write_flow(FLOW + "  function: {in: raw, out: h, python: 'jobs.py:make', runs_in: work}\n")
    for dataid in "12":
        put(store, "raw", dataid)
    with WorkHost(url, "--until-idle") as host:
        assert host.ended() == 1
        assert host.events("message", job="function")
        made = [line for line in host.errors.splitlines() if line.startswith("made ")]
        done = len(host.events("ended", status="READY"))
        assert host.events("finished", done=done)
        assert host.events("ended", job="function", dataid="1", status="READY")
        assert host.events("ended", job="function", dataid="2", why="ValueError: no luck")
    assert [line.split()[1] for line in made] == ["1", "2"]
    assert str(host.process.pid) not in made[0]
    assert status(store, "h", "1", "function") == "READY"
    assert status(store, "h", "2", "function") == "FAILED"
    owners = sql(store, "select distinct who from dataevent where datasetid = 'h'")
    assert owners
    assert all(owner.endswith(" of odf work") for (owner,) in owners)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_function_ends_its_chunk_on_the_first_signal_and_gives_it_back_on_the_second(
    url: str, store: Store, write_flow: Write, signals: int
) -> None:
    Path("jobs.py").write_text(
        "import time\nfrom pathlib import Path\n\n\ndef make(chunk):\n"
        "    Path('begun').touch()\n    until = time.monotonic() + 20\n"
        "    while not Path('finish').exists() and time.monotonic() < until:\n"
        "        time.sleep(0.02)\n"
    )
    write_flow(FLOW + "  function: {in: raw, out: h, python: 'jobs.py:make', runs_in: work}\n")
    for dataid in "12":
        put(store, "raw", dataid)
    with WorkHost(url, "--workers", "4") as host:
        host.wait_for("claimed", job="function")
        wait_until(Path("begun").exists)
        host.signal(signal.SIGTERM)
        host.wait_for("draining")
        time.sleep(1)
        assert status(store, "h", "1", "function") == "RUNNING"
        if signals == 1:
            Path("finish").touch()
        else:
            host.signal(signal.SIGTERM)
        assert host.ended() == (0 if signals == 1 else 143)
    assert status(store, "h", "1", "function") == ("READY" if signals == 1 else "RESUBMIT")
    assert status(store, "h", "2", "function") is None


@pytest.mark.usefixtures("write_flow")
def test_two_hosts_share_the_chunks(url: str, store: Store) -> None:
    for number in range(40):
        put(store, "raw", str(number))
    with WorkHost(url, "--until-idle") as one, WorkHost(url, "--until-idle") as other:
        assert one.ended() == other.ended() == 0
        shares = [host.events("finished")[0]["done"] for host in (one, other)]
    assert sum(shares) == 40 * 3
    assert min(shares) > 0
    assert sorted(log()) == sorted(set(log()))
    check(store)


def test_a_replaced_database_file_is_reopened(sqlite_url: str) -> None:
    def make(path: Path) -> Store:
        made = open_store(f"sqlite:///{path}")
        made.init()
        apply_flow(made, Flow.load())
        made.fill()
        return made

    Path("log.sh").write_text(SCRIPT)
    Path("log.sh").chmod(0o755)
    Path("flow.yml").write_text(FLOW)
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    store = make(path)
    put(store, "raw", "1")
    with WorkHost(sqlite_url, "--workers", "1") as host:
        host.wait_for("ended", job="third")
        close(store)
        for file in path.parent.glob(path.name + "*"):
            file.unlink()
        host.wait_for("away")
        store = make(Path("new.db"))
        close(store)
        Path("new.db").rename(path)
        store = open_store(sqlite_url)
        put(store, "raw", "2")
        host.wait_for("ended", job="third", dataid="2")
        assert len(host.events("back")) == 1
    close(store)
