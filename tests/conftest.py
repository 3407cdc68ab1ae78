"""Fixtures for every test: a clean environment, and an empty database of either kind."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from opendataflow_dagster.config import credentials
from opendataflow_dagster.store import open_store
from tests.support import spark_archive
from tests.support.postgres import Server

os.environ.setdefault("SPARK_SUBMIT_OPTS", spark_archive.options())

pytest_plugins = [
    "tests.support.store_fixtures",
    "tests.support.pooler",
    "tests.support.dagster_fixtures",
    "tests.support.dagster_instances",
    "tests.support.spark_fixtures",
    "tests.support.spark_cluster",
    "tests.support.spark_connect",
    "tests.support.spark_line",
]

TESTS = Path(__file__).parent
SERVERS = {
    "chromium",
    "connect_url",
    "postgres_server",
    "spark_cluster",
    "spark_for_all",
    "start_cluster",
    "start_dagster",
    "wheel",
}
"""Fixtures that take seconds to start: `make test-fast` leaves out the tests that use one."""

SERVER_CLASSES = {"Cluster", "Dagster", "Server"}
"""What tests/support/ starts for a test that names its class, without a fixture."""

LONG_FILES = ("e2e", "spark", "pipelines", "dagster")  # folders, the slowest first

_numbers = count(1)

# In a shell's background job, or under nohup, what the tests start would be deaf to these, too.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(number) is signal.SIG_IGN
    ):
        signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run the files in an order drawn from SEED")


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption("shuffle")
    return [f"files shuffled: make test SHUFFLE={seed}"] if seed else []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip importing files of which `make test-fast` runs no test."""
    if "not servers" not in config.getoption("markexpr") or collection_path.suffix != ".py":
        return None
    return _folder(collection_path) == "e2e" or _mentions_spark(collection_path) or None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses by the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests that need servers, and sort long files first, or shuffle the files.

    All workers of xdist need the same order.
    """
    for item in items:
        if _needs_servers(item):
            item.add_marker(pytest.mark.servers)
    files = sorted({item.path for item in items}, key=lambda path: (_folder_rank(path), path))
    if seed := config.getoption("shuffle"):
        random.Random(seed).shuffle(files)
    turns = {path: turn for turn, path in enumerate(files)}
    items.sort(key=lambda item: turns[item.path])
    if "dagster" in sys.modules:
        from tests.support.fast_dagster import keep_what_instances_need

        keep_what_instances_need()


def _needs_servers(item: pytest.Item) -> bool:
    """Whether a test starts Spark, PostgreSQL, Dagster's processes, or another slow program."""
    if _folder(item.path) == "e2e" or SERVERS & set(getattr(item, "fixturenames", ())):
        return True
    code = getattr(getattr(item, "function", None), "__code__", None)
    if code and SERVER_CLASSES & set(code.co_names):
        return True
    variant = getattr(item, "callspec", None)
    if variant and "postgres" in map(str, variant.params.values()):
        return True
    return _mentions_spark(item.path)  # it starts Spark in a process of its own


@cache
def _mentions_spark(path: Path) -> bool:
    return "pyspark" in path.read_text()


def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


def _folder_rank(path: Path) -> int:
    """A worker that starts a long file last keeps the run going while the others are idle."""
    folder = _folder(path)
    return LONG_FILES.index(folder) if folder in LONG_FILES else len(LONG_FILES)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the garbage collector from what is imported and collected: all of it stays.

    Each of its rounds would visit that again, which takes a quarter of the time of small tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


class Failures:
    """Reports each failure at once: a run that is cut short never prints its summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            said = report.longreprtext.splitlines()
            error = next((line for line in said if line.startswith("E  ")), "E  ")
            line = f"\nFAILED {report.nodeid} ({report.when}): {error[1:].strip()}"
            self._plugins.getplugin("terminalreporter").write_line(line)  # type: ignore[union-attr]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):  # the one that speaks for all workers
        config.pluginmanager.register(Failures(config))


@pytest.fixture(autouse=True)
def isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run each test in an empty folder, without the user's own configuration."""
    for name in list(os.environ):
        if name.startswith("DATAFLOW_") or name in ("PASSKEY", "PASSKEY_FILE"):
            monkeypatch.delenv(name)
    credentials._kept.clear()  # of a test that began to use Dagster with one
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """A PostgreSQL 18 for this session; a test may stop it, the next `postgres_url` starts it."""
    with Server() as server:
        yield server


@pytest.fixture(scope="session")
def postgres_template(postgres_server: Server) -> str:
    """Return the name of a database with our tables: copying it takes half the time of `init`."""
    store = open_store(postgres_server.create_database("template_of_tables"))
    store.init()
    store.close()
    return "template_of_tables"


@pytest.fixture
def postgres_url(postgres_server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a PostgreSQL database for one test: empty, or with our tables for a `store`."""
    name = f"test_{next(_numbers)}"
    if {"store", "url"} <= set(request.fixturenames):
        url = postgres_server.create_database(name, request.getfixturevalue("postgres_template"))
        with psycopg.connect(url) as connection:  # a store of its own, not one of many copies
            naming = "update dataflow.dataflow_meta set value = %s where name = 'store'"
            connection.execute(naming, [uuid4().hex])
    else:
        url = postgres_server.create_database(name)
    yield url
    postgres_server.drop_database(name)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built from its sdist."""
    folder, root = tmp_path_factory.mktemp("wheel"), Path(__file__).parents[1]
    line = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(root)]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a SQLite database that doesn't exist yet, for one test."""
    return f"sqlite:///{tmp_path / 'dataflow.db'}"
