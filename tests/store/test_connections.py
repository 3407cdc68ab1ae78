"""Connections that nobody closes explicitly end in order, without warnings of the drivers."""

import gc
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from opendataflow_dagster.errors import NoDatabase
from opendataflow_dagster.runner import catch_up
from opendataflow_dagster.runner.run import Outcome, run_job
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import close, connect, put, register, sql, statuses, take


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Errors raised where nobody can catch them, as by a connection that is deleted while open."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda hint: found.append(hint.exc_value))
    yield found
    gc.collect()
    assert not found


def is_open(connection: Any) -> bool:
    try:
        connection.execute("select 1")
    except (sqlite3.ProgrammingError, psycopg.OperationalError):
        return False
    return True


def test_a_connection_ends_with_its_thread(store: Store, warnings: list[Any]) -> None:
    connections = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: connections.append(store.db.connect()))
        thread.start()
        thread.join()
    assert [is_open(connection) for connection in connections] == [False] * 3
    assert is_open(store.db.connect())


def test_the_server_has_no_session_of_a_thread_that_ended(
    postgres_url: str, warnings: list[Any]
) -> None:
    store = open_store(postgres_url)
    store.init()
    thread = threading.Thread(target=store.db.connect)
    thread.start()
    thread.join()
    sessions = "select count(*) from pg_stat_activity where application_name = 'odf'"
    deadline = time.monotonic() + 20
    while sql(store, sessions) != [(1,)]:  # ours
        assert time.monotonic() < deadline, "the session of a thread outlives it"
        time.sleep(0.02)
    close(store)


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_store_that_is_dropped_closes_its_connections(
    url: str, warnings: list[Any], in_a_cycle: bool
) -> None:
    store = open_store(url)
    store.init()
    connection = store.db.connect()
    if in_a_cycle:  # then the order in which its parts are deleted is anybody's guess
        vars(store)["myself"] = [store]
    del store
    gc.collect()
    assert not is_open(connection)


def test_a_fork_leaves_the_connections_of_other_threads_to_its_parent(
    store: Store, warnings: list[Any]
) -> None:
    opened, over = threading.Event(), threading.Event()
    alive = []

    def work() -> None:
        store.db.connect()
        opened.set()
        over.wait(60)
        alive.append(is_open(store.db.connect()))

    thread = threading.Thread(target=work)
    thread.start()
    opened.wait(60)
    child = os.fork()
    if child == 0:
        gc.collect()
        os._exit(len(warnings))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    over.set()
    thread.join()
    assert alive == [True]
    person = connect(store)
    assert is_open(person)
    person.close()


# --- no connection is free ---

Few = Callable[[int], str]


@pytest.fixture
def owner(postgres_url: str) -> Iterator[Store]:
    """A store without a limit on its connections."""
    made = open_store(postgres_url)
    made.init()
    register(made, "job", ["a"], ["b"])
    yield made
    close(made)


@pytest.fixture
def few(owner: Store, postgres_url: str) -> Iterator[Few]:
    """Creates the URL of a role with a limited number of connections."""
    name = f"few_{conninfo_to_dict(postgres_url)['dbname']}"

    def make(count: int) -> str:
        sql(owner, f"create role {name} login connection limit {count}")
        for what in ("all tables", "all sequences", "all functions"):
            sql(owner, f"grant all on {what} in schema dataflow to {name}")
        sql(owner, f"grant usage on schema dataflow to {name}")
        return postgres_url.replace("postgres@", f"{name}@")

    yield make
    sql(owner, f"drop owned by {name}")
    sql(owner, f"drop role {name}")


def run_all(url: str, said: list[str], **more: Any) -> Outcome:
    store = open_store(url)
    store.db.patience = 10.0
    try:
        return run_job(store, "job", ["true"], say=said.append, all_chunks=True, **more)
    finally:
        store.close()


def waits(said: list[str]) -> list[str]:
    return [line for line in said if "Waiting for one, " in line]


def test_workers_without_a_connection_hold_up_none_that_have_one(owner: Store, few: Few) -> None:
    for each in range(40):
        put(owner, "a", str(each))
    url, said = few(3), list[str]()
    began = time.monotonic()
    assert run_all(url, said, workers=6) == Outcome(0, done=40)
    assert time.monotonic() - began < 9
    [line] = waits(said)
    assert "too many connections for role" in line
    assert "raise max_connections" in line


def test_processes_wait_for_a_free_connection_and_continue(owner: Store, few: Few) -> None:
    for each in range(8):
        put(owner, "a", str(each))
    words = [sys.executable, "-m", "opendataflow_dagster.cli", "run", "--all", "--job", "job"]
    environ = os.environ | {"DATAFLOW_URL": few(1)}
    running = [
        subprocess.Popen([*words, "/bin/true"], env=environ, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        told = [each.communicate(timeout=60)[1] for each in running]
    finally:
        for each in running:
            each.kill()
    assert [each.returncode for each in running] == [0] * 4, told
    assert any(waits(each.splitlines()) for each in told)
    done = [key for key, row in statuses(owner).items() if row == ("OUT", "READY")]
    assert len([key for key in done if key[0] == "b"]) == 8


def test_an_idle_worker_gives_back_its_connection(
    owner: Store, few: Few, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catch_up, "IDLE_CONNECTION_SECONDS", 0.1)
    monkeypatch.setattr(catch_up, "LOOK_SECONDS", 0.7)
    put(owner, "a", "1")
    [claim] = take(owner, "job", owner="another")
    url, said = few(1), list[str]()
    run = threading.Thread(target=lambda: said.append(str(run_all(url, said).code)))
    run.start()
    another = open_store(url)
    another.db.patience, another.db.say = 10.0, print
    deadline = time.monotonic() + 20
    while not any("1 of other workers" in line for line in said):
        assert time.monotonic() < deadline, said
        time.sleep(0.01)
    another.finish(claim)
    another.close()
    run.join(20)
    assert said[-1] == "0", said


def test_a_process_without_a_connection_ends_after_its_timeout(few: Few) -> None:
    url, said = few(0), list[str]()
    store = open_store(url)
    store.db.patience, store.db.say = 0.5, said.append
    began = time.monotonic()
    with pytest.raises(NoDatabase, match=r"is free: .*too many connections for role"):
        store.plan("job")
    assert 0.5 <= time.monotonic() - began < 5
    assert len(waits(said)) == 1
    assert NoDatabase.exit_code == 1


def test_waiting_for_a_connection_can_be_stopped(few: Few) -> None:
    words = [sys.executable, "-m", "opendataflow_dagster.cli", "run", "--job", "job", "/bin/true"]
    environ = os.environ | {"DATAFLOW_URL": few(0)}
    run = subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    try:
        assert waits([run.stderr.readline()])
        run.send_signal(signal.SIGTERM)
        _, told = run.communicate(timeout=20)
    finally:
        run.kill()
    assert (run.returncode, "Stopped" in told) == (128 + signal.SIGTERM, True), told
