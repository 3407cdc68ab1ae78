"""Connections that nobody closes by hand: they end in order, and no driver warns of them."""

import gc
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from opendataflow_dagster.dataflow.store import Store, open_store
from tests.stores import close, connect, sql


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is raised where nobody can catch it, as by a connection that is deleted while open."""
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
