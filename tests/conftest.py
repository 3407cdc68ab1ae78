"""Fixtures for every test: a clean environment, and an empty database of either kind."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from opendataflow_dagster.config import passkey
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
LONG_FILES = ("e2e", "spark", "pipelines", "dagster")  # folders, the slowest first

_numbers = count(1)

if threading.current_thread() is threading.main_thread() and (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell's background job: what the tests start would be deaf to Ctrl-C, too
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run the files in an order drawn from SEED")


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed = config.getoption("shuffle")
    return [f"files shuffled: make test SHUFFLE={seed}"] if seed else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the folders of long files, or shuffle; all workers of xdist need one order."""
    files = sorted({item.path for item in items}, key=lambda path: (_folder_rank(path), path))
    if seed := config.getoption("shuffle"):
        random.Random(seed).shuffle(files)
    turns = {path: turn for turn, path in enumerate(files)}
    items.sort(key=lambda item: turns[item.path])


def _folder_rank(path: Path) -> int:
    """A worker that begins a long file last keeps the run going while the others are idle."""
    folder = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    return LONG_FILES.index(folder) if folder in LONG_FILES else len(LONG_FILES)


class Failures:
    """Tells each failure at once: a run that is cut short never prints what went wrong."""

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
    """Run each test in an empty folder, without the configuration of whoever runs it."""
    for name in list(os.environ):
        if name.startswith("DATAFLOW_") or name in ("PASSKEY", "PASSKEY_FILE"):
            monkeypatch.delenv(name)
    passkey._kept.clear()  # of a test that began to use Dagster with one
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """A PostgreSQL 18 for this session; a test may stop it, the next `postgres_url` starts it."""
    with Server() as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: Server) -> Iterator[str]:
    """The URL of an empty PostgreSQL database, for one test."""
    name = f"test_{next(_numbers)}"
    yield postgres_server.create_database(name)
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
