"""The house: what is built, installed, listed and checked, and the server that tests use."""

import os
import re
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil
import psycopg
import pytest

import opendataflow_dagster
from opendataflow_dagster.store.database import named_statements
from tests.support.postgres import Server

ROOT = Path(__file__).parents[2]
TARGETS = {
    "install",
    "demo",
    "test",
    "test-fast",
    "check",
    "ui",
    "soak",
    "bench",
    "compat",
    "diagrams",
    "pictures",
    "docs",
    "clean",
    "help",
}


def run(*command: object) -> str:
    """Run a command at the root of the repository and return its standard output."""
    # A make above us would hand down its flags and its level, which makes ours more talkative.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    line = [str(word) for word in command]
    done = subprocess.run(line, cwd=ROOT, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
    return done.stdout


def test_a_wheel_built_from_the_sdist_carries_the_sql_and_the_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [commands] = [archive.read(name).decode() for name in names if "entry_points" in name]

    files = {str(path.relative_to(ROOT)) for path in ROOT.glob("sql/**/*.sql")}
    assert files, "sql/ is empty"
    assert {f"opendataflow_dagster/{name}" for name in files} <= names
    templates = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "opendataflow_dagster" / "cli" / "new_project").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert len(templates) > 20
    assert templates <= names
    assert "opendataflow_dagster/py.typed" in names
    assert not [name for name in names if name.startswith(("tests/", "sql/", "benchmarks/"))]
    assert {line.split(" = ")[0] for line in commands.splitlines()} >= {"odf", "RunJob", "ForceJob"}


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import opendataflow_dagster;"
        "print(*set(sys.modules) - before)"
    )

    assert run(sys.executable, "-c", code).split() == ["opendataflow_dagster"]


def test_the_version_is_the_same_in_the_package_and_the_metadata() -> None:
    import opendataflow_dagster

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == opendataflow_dagster.__version__


def test_constraints_are_versions_and_name_no_address() -> None:
    text = (ROOT / "constraints.txt").read_text()
    pins = [line for line in text.splitlines() if not line.startswith("#")]

    assert pins
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin)] == []


def test_help_lists_every_target_and_each_can_be_made() -> None:
    listed = {line.split()[0] for line in run("make").splitlines()}

    assert listed == TARGETS
    for target in listed:
        run("make", "--dry-run", target)


def test_imports_point_inwards() -> None:
    run(Path(sys.executable).parent / "lint-imports", "--no-cache")


def test_the_environment_of_the_test_runner_is_removed() -> None:
    assert not [name for name in os.environ if name.startswith(("DATAFLOW_", "PASSKEY"))]
    assert list(Path.cwd().iterdir()) == []


def test_the_server_is_postgresql_18_and_commits_durably(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        [version] = connection.execute("select version()").fetchone() or [""]
        durable = connection.execute(
            "select current_setting('fsync'), current_setting('synchronous_commit')"
        ).fetchone()

    assert version.startswith("PostgreSQL 18.")
    assert durable == ("on", "on")


def test_a_crash_keeps_committed_rows(postgres_server: Server, postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("create table kept as select 1 as n")
        connection.commit()
        connection.execute("insert into kept values (2)")
        postgres_server.stop("immediate")
        with pytest.raises(psycopg.OperationalError):
            connection.commit()

    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(postgres_url)
    postgres_server.start()
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("select n from kept").fetchall() == [(1,)]


def test_a_database_is_dropped_though_a_test_left_a_connection_open(
    postgres_server: Server, postgres_url: str
) -> None:
    left_open = psycopg.connect(postgres_server.create_database("other"))
    postgres_server.drop_database("other")

    with psycopg.connect(postgres_url) as connection:
        names = connection.execute("select datname from pg_database").fetchall()
    assert ("other",) not in names
    left_open.close()


def test_nothing_is_left_when_the_tests_are_killed() -> None:
    code = """
import os, signal
from tests.support.postgres import Server

server = Server()
print(server.folder, server.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    folder, pid = killed.stdout.split()

    wait_until(lambda: not Path(folder).exists())
    wait_until(lambda: not psutil.pid_exists(int(pid)))


def wait_until(done: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until `done` returns true; fail after `seconds`."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"nothing after {seconds} s"
        time.sleep(0.1)


def test_every_public_name_is_there_without_pandas_and_spark() -> None:
    told = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['pandas', 'pyarrow', 'pyspark', 'numpy']))\n"
        "import opendataflow_dagster as odf\n"
        "print(len([getattr(odf, name) for name in odf.__all__]))\n"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10


def test_type_checkers_know_every_public_name() -> None:
    text = (ROOT / "opendataflow_dagster" / "__init__.py").read_text()

    told = set(re.findall(r" (\w+) as \1", text))

    assert told == set(opendataflow_dagster.__all__)


def test_every_sql_statement_that_the_code_names_exists() -> None:
    """A missing statement might otherwise be noticed only where errors are ignored."""
    run_by = r"""\.(?:run|change|records|stream|statement)\(\s*"(\w+)\.(\w+)\""""
    package = Path(opendataflow_dagster.__file__).parent
    named = {
        found for file in package.rglob("*.py") for found in re.findall(run_by, file.read_text())
    }
    known = {
        topic: {
            **named_statements("sqlite", topic),
            **named_statements("postgres", topic),
        }
        for topic, _ in named
    }
    assert len(named) > 200
    assert [f"{topic}.{name}" for topic, name in named if name not in known[topic]] == []
