"""Two hosts of `odf work`: killed, drained, paused, without a database; nothing lost or twice."""

import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from opendataflow_dagster.flow.apply import apply_flow
from opendataflow_dagster.flow.flow import Flow
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.operations import ready
from opendataflow_dagster.store.store import Store
from tests.support.postgres import Server
from tests.support.store_fixtures import check, close, policy, sql
from tests.support.work_host import WorkHost, wait_until

CHAINS, LENGTH, LEASE_SECONDS = 10, 3, 6

SCRIPT = """#!/bin/sh
mark="running/$dataflow_jobid~$dataid"
trap 'rmdir "$mark"; exit 143' TERM
mkdir "$mark" || echo "$dataflow_jobid $dataid" >> double
sleep 0.1
rmdir "$mark"
echo "$dataflow_jobid $dataid $(hostname)" >> made
"""


def prepare(server: Server, chunks: int) -> Store:
    """Thirty jobs in ten chains, and so many chunks for the first job of each."""
    store = open_store(server.create_database(f"work{time.monotonic_ns()}"))
    store.init()
    jobs = [
        f"  j{chain}_{step}: {{in: d{chain}_{step}, out: d{chain}_{step + 1}, run: ./make.sh}}\n"
        for chain in range(CHAINS)
        for step in range(LENGTH)
    ]
    head = f"flow: hosts\ndefaults: {{policy: {{lease_seconds: {LEASE_SECONDS}}}}}\njobs:\n"
    Path("flow.yml").write_text(head + "".join(jobs))
    Path("make.sh").write_text(SCRIPT)
    Path("make.sh").chmod(0o755)
    Path("running").mkdir()
    apply_flow(store, Flow.load())
    store.fill()
    for chain in range(CHAINS):
        ready(store, f"d{chain}_0", [str(number) for number in range(chunks)])
    return store


def host(store: Store, name: str, *words: str) -> WorkHost:
    """A host with its own name, where this machine allows that."""
    before: list[str] = []
    line = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]
    if shutil.which("unshare") and not subprocess.run([*line, "true"], check=False).returncode:
        before = line
    url = store.db.url  # type: ignore[attr-defined]
    return WorkHost(url, "--workers", "6", *words, before=before)


def made() -> list[str]:
    path = Path("made")
    return path.read_text().splitlines() if path.exists() else []


def running(store: Store) -> int:
    [(count,)] = sql(store, "select count(*) from claim where owner is not null")
    return count


def trial(server: Server, chunks: int, narrate: bool = False) -> None:
    """Let two hosts do the work while everything that can happen to them happens."""
    store = prepare(server, chunks)
    total = CHAINS * LENGTH * chunks
    began = time.monotonic()

    def come_to(share: float) -> None:
        wait_until(lambda: len(made()) >= share * total, 600)

    def say(line: str) -> None:
        if narrate:
            print(f"{time.monotonic() - began:6.1f} s, {len(made())} of {total} made: {line}")

    with host(store, "host-a") as a, host(store, "host-b", "--drain", "0") as b:
        come_to(0.1)
        policy(store, "j0_0", concurrency=0)
        policy(store, "j1_0", paused_until="9999-01-01")
        policy(store, "j2_0", concurrency=2)
        say("dials of three jobs turned")
        come_to(0.25)
        a.signal(signal.SIGKILL)
        say("host-a is killed")
        with host(store, "host-a2") as again:
            come_to(0.45)
            server.restart("immediate")
            say("the database has crashed and is back")
            vars(store).pop("person").close()
            store.db.drop()
            come_to(0.6)
            for jobid in ("j0_0", "j1_0", "j2_0"):
                policy(store, jobid, concurrency=None, paused_until=None)
            say("dials turned back")
            come_to(0.7)
            b.signal(signal.SIGTERM)
            drained = time.monotonic()
            assert b.ended() == 128 + signal.SIGTERM
            took = time.monotonic() - drained
            sent_back = b.events("ended", status="RESUBMIT")
            [(left,)] = sql(store, "select count(*) from claim where owner like '%@host-b:%'")
            say(f"host-b is drained in {took:.2f} s: {len(sent_back)} RESUBMIT, {left} left")
            assert took < 3
            assert sent_back
            assert left == 0
            with host(store, "host-c", "--until-idle") as c:
                assert c.ended(600) == 0, c.errors
            say("host-c has nothing left to claim")
            again.signal(signal.SIGTERM)
            assert again.ended() == 0
            outages = again.events("away"), again.events("back")
    judge(store, total)
    assert [len(found) for found in outages] == [1, 1]
    say(f"nothing lost, nothing twice: {len(made())} executions for {total} chunks")
    close(store)


def judge(store: Store, total: int) -> None:
    """Each chunk is READY, and became so once; no two scripts worked on one chunk at once."""
    ready_rows = "select count(*) from datastatus where jobid like 'j%' and status = 'READY'"
    assert sql(store, ready_rows) == [(total,)]
    assert sql(store, "select count(*) from datastatus where status <> 'READY'") == [(0,)]
    twice = (
        "select datasetid, dataid from chunkfact where jobid like 'j%' "
        "group by datasetid, dataid having count(*) <> 1"
    )
    assert sql(store, twice) == []
    assert running(store) == 0
    assert not Path("double").exists()
    assert {" ".join(line.split()[:2]) for line in made()} == {
        f"j{chain}_{step} {number}"
        for chain in range(CHAINS)
        for step in range(LENGTH)
        for number in range(total // CHAINS // LENGTH)
    }
    check(store)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_hosts_lose_nothing_and_do_nothing_twice(postgres_server: Server) -> None:
    trial(postgres_server, 167, narrate=True)
