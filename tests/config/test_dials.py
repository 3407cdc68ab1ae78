"""Every dial, setting, limit and error class is used somewhere."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import opendataflow_dagster
from opendataflow_dagster.config.settings import Settings, load_settings
from opendataflow_dagster.errors import EXIT_CODES, DataflowError
from opendataflow_dagster.runner.run import run_job
from opendataflow_dagster.server.request import Limits
from opendataflow_dagster.spark.settings import MASTER, spark_conf
from opendataflow_dagster.store import registry
from opendataflow_dagster.store.item_folding import fold_items
from opendataflow_dagster.store.items import Post, accept, begin_due_runs
from opendataflow_dagster.store.store import Store
from opendataflow_dagster.util.times import to_table
from tests.support.store_fixtures import close, expire, put, register, sql, take

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "opendataflow_dagster"


# --- dials: each one changes what happens ---


def claims_at_once(store: Store) -> int:
    return len(take(store, "loadbob", k=5))


def after_a_failure(store: Store) -> Any:
    return store.fail(take(store, "loadbob")[0], "it failed").status


def after_a_loss(store: Store) -> Any:
    take(store, "loadbob")
    expire(store)
    return store.recover("loadbob")[0].status


def retry_in(store: Store) -> Any:
    sql(store, "update jobpolicy set max_attempts = 2")
    return store.fail(take(store, "loadbob")[0], "it failed").retry_in


def seconds_of_a_lease(store: Store) -> Any:
    text = {
        "sqlite": "select (julianday(lease_end) - julianday(started)) * 86400 from claim",
        "postgres": "select extract(epoch from lease_end - started) from claim",
    }
    take(store, "loadbob")
    return round(float(sql(store, text[store.db.dialect])[0][0]))


def most_that_one_run_holds(store: Store) -> int:
    held: list[int] = []

    def say(_: str) -> None:
        held.extend(row[0] for row in sql(store, "select count(*) from claim"))

    assert run_job(store, "loadbob", script("true"), say=say, all_chunks=True).done == 5
    return max(held)


def outcome_of_a_slow_script(store: Store) -> str:
    outcome = run_job(store, "loadbob", script("sleep 1.5"), say=print)
    return "done" if outcome.done else "failed"


def runs_that_are_due(store: Store) -> int:
    return len(begin_due_runs(store, ["daily"]))


def items_that_are_folded(store: Store) -> int:
    accept(store, [Post("daily", ("1",))])
    store.finish(store.claim("daily", owner="w", k=9))
    hour_ago = to_table(store, datetime.fromtimestamp(store.now() - 3600, UTC))
    for table, column in (("streamitem", "received"), ("chunkfact", "at")):
        sql(store, f"update {table} set {column} = :at", at=hour_ago)
    return fold_items(store)


def fate_of_a_stale_chunk(store: Store) -> str:
    """Return what a Dagster run does that a person launches for it."""
    import dagster as dg

    from opendataflow_dagster import DataflowResource, dataflow_assets

    store.finish(take(store, "loadbob"))
    put(store, "bobin", "0", "RESUBMIT")
    put(store, "bobin", "0")
    made: list[str] = []
    dataflow = DataflowResource()
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("dataflow/bobin", ["0"])
        assets = dataflow_assets(job="loadbob", dataflow=dataflow)(lambda chunk: made.append("it"))
        given = {"dataflow": dataflow}
        dg.materialize([assets], instance=instance, resources=given, partition_key="0")
    close(dataflow.store)
    return "made again" if made else "left"


def script(body: str) -> list[str]:
    Path("loadbob.sh").write_text(f"#!/bin/sh\n{body}\n")
    Path("loadbob.sh").chmod(0o755)
    return ["./loadbob.sh"]


# What a dial is turned to, what is looked at, and how it is without and with the dial.
Turn = tuple[str, Callable[[Store], Any], Any, Any]
TURNS: dict[str, Turn] = {
    "concurrency": ("2", claims_at_once, 5, 2),
    "max_attempts": ("2", after_a_failure, "FAILED", "RESUBMIT"),
    "max_losses": ("1", after_a_loss, "RESUBMIT", "HOLD"),
    "retry_delay": ("60", retry_in, 0.0, 60.0),
    "lease_seconds": ("7", seconds_of_a_lease, 120, 7),
    "batch_size": ("3", most_that_one_run_holds, 1, 3),
    "time_limit": ("1", outcome_of_a_slow_script, "done", "failed"),
    "paused_until": ("forever", claims_at_once, 5, 0),
    "every_minutes": ("5", runs_that_are_due, 0, 1),
    "fold_after": ("30m", items_that_are_folded, 0, 1),
    "on_stale": ("skip", fate_of_a_stale_chunk, "made again", "left"),
}


@pytest.fixture
def turned(store: Store, url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store with five chunks for `loadbob`, and a pipeline `daily` without upstream inputs."""
    monkeypatch.setenv("DATAFLOW_URL", url)
    register(store, "loadbob", ["bobin"], ["bobout"])
    register(store, "daily", [], ["sums"])
    for number in range(5):
        put(store, "bobin", str(number))
    return store


def test_every_dial_is_here_and_a_column() -> None:
    """A new dial needs a line in TURNS, which proves that it does something."""
    assert set(TURNS) == set(registry.DIALS)
    for dialect in ("sqlite", "postgres"):
        text = (ROOT / "sql" / dialect / "schema.sql").read_text()
        found = re.search(r"create table if not exists jobpolicy \((.*?)\n\);", text, re.DOTALL)
        assert found, dialect
        columns = re.findall(r"^    (\w+) ", found[1], re.MULTILINE)
        assert set(columns) - {"primary", "check"} == {"jobid", *registry.DIALS, "modified"}
        assert [name for name in columns if name in registry.DIALS] == list(registry.DIALS)


@pytest.mark.parametrize("dial", TURNS)
def test_setting_a_dial_changes_what_happens(turned: Store, dial: str) -> None:
    value, look, _, after = TURNS[dial]
    for jobid in ("loadbob", "daily"):
        registry.set_policy(turned, jobid, {dial: value})

    assert look(turned) == after


@pytest.mark.parametrize("dial", TURNS)
def test_resetting_a_dial_restores_the_default(turned: Store, dial: str) -> None:
    value, look, before, _ = TURNS[dial]
    for jobid in ("loadbob", "daily"):
        registry.set_policy(turned, jobid, {dial: value})
        registry.set_policy(turned, jobid, {dial: "none"})

    assert look(turned) == before


def test_every_dial_is_documented() -> None:
    page = (ROOT / "docs" / "tables.md").read_text().partition("## The dials")[2]
    assert {dial for dial in registry.DIALS if f"| `{dial}` |" not in page} == set()


# --- settings ---

KEYS = {
    "url": "sqlite:////elsewhere/x.db",
    "user": "etl",
    "encrypted": "odf1.scrypt.x",
    "schema": "other",
    "timezone": "Asia/Tokyo",
}
OTHER_VARIABLES = {
    "DATAFLOW_PROPERTIES": "config/test_settings.py",
    "DATAFLOW_TRANSLATOR": "dagster/test_drift.py",
    "DATAFLOW_TARGET": "flow/test_plan.py",
    "DATAFLOW_RESULT": "runner/test_answer.py",
    "DATAFLOW_FENCE": "runner/test_answer.py",
    "DATAFLOW_WORK": "store/test_executions.py",
}
"""Variables that aren't keys of the properties, and the tests of their effects."""


def test_the_keys_that_the_page_names_are_the_settings() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    table = page.partition("| key |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(KEYS)
    assert set(KEYS) <= set(Settings._fields)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("by", ["file", "environment"])
def test_a_key_changes_its_setting(tmp_path: Path, key: str, by: str) -> None:
    file = tmp_path / "dataflow.properties"
    file.write_text(f"{key}={KEYS[key]}\n" if by == "file" else "")
    environ = {f"DATAFLOW_{key.upper()}": KEYS[key]} if by == "environment" else {}
    file_of_others = tmp_path / "others.properties"
    file_of_others.write_text("")

    settings = load_settings(file, environ)

    assert getattr(settings, key) == KEYS[key]
    assert getattr(load_settings(file_of_others, {}), key) != KEYS[key]


@pytest.mark.parametrize("field", Settings._fields)
def test_a_setting_is_read_outside_of_the_settings(field: str) -> None:
    assert readers(field, "config.py", ("settings", "found", "told")), f"nobody reads {field}"


@pytest.mark.parametrize("field", Limits._fields)
def test_a_limit_of_odf_serve_is_read(field: str) -> None:
    assert readers(field, "limits.py", ("limits", "bounds")), f"nobody reads {field}"


def test_every_variable_that_is_named_anywhere_is_read() -> None:
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *PACKAGE.rglob("*.py")]
    named = {
        name for page in pages for name in re.findall(r"\bDATAFLOW_[A-Z]+\b", page.read_text())
    }

    keys = {f"DATAFLOW_{key.upper()}" for key in KEYS}
    assert named - keys - set(OTHER_VARIABLES) <= {"DATAFLOW_SPARK"}
    assert set(OTHER_VARIABLES) <= named
    for name, test in OTHER_VARIABLES.items():
        assert name in (ROOT / "tests" / test).read_text(), f"{test} doesn't try {name}"
    for name in ("PASSKEY", "PASSKEY_FILE", "NEW_PASSKEY"):
        assert f'"{name}"' in "".join(file.read_text() for file in PACKAGE.rglob("*.py")), name


def test_keys_of_spark_reach_the_session(tmp_path: Path) -> None:
    file = tmp_path / "dataflow.properties"
    file.write_text("spark.master=local[3]\nspark.executor.memory=8g\n")
    environ = {"DATAFLOW_SPARK_EXECUTOR_MEMORY": "9g"}

    told = spark_conf(load_settings(file, {}), environ={})
    assert (told[MASTER], told["spark.executor.memory"]) == ("local[3]", "8g")
    told = spark_conf(load_settings(file, environ), environ=environ)
    assert told["spark.executor.memory"] == "9g"


# --- error classes ---


@cache
def trees() -> dict[Path, ast.Module]:
    return {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}


def readers(field: str, but: str, owners: tuple[str, ...]) -> list[str]:
    """Return the modules that read an attribute of an owner of this name, with exceptions."""
    return [
        file.name
        for file, tree in trees().items()
        if file.name != but
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == field
        and ast.unparse(node.value).rpartition(".")[2] in owners
    ]


def error_classes() -> list[type[BaseException]]:
    """Return every exception that the package defines."""
    for module in pkgutil.walk_packages([str(PACKAGE)], "opendataflow_dagster."):
        if not module.name.endswith("__main__") and "demo_files" not in module.name:
            importlib.import_module(module.name)
    found: dict[str, type[BaseException]] = {}
    left: list[type[BaseException]] = [BaseException]
    while left:
        for below in left.pop().__subclasses__():
            left.append(below)
            if below.__module__.partition(".")[0] == opendataflow_dagster.__name__:
                found[f"{below.__module__}.{below.__qualname__}"] = below
    return [found[name] for name in sorted(found)]


def names_in(file: Path, tree: ast.Module) -> dict[str, str]:
    """Return the classes that a module names, its own and imported ones, by their full names."""
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    found = {
        node.name: f"{module}.{node.name}" for node in tree.body if isinstance(node, ast.ClassDef)
    }
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            source = ".".join(part for part in (base, node.module or "") if part)
            found |= {each.asname or each.name: f"{source}.{each.name}" for each in node.names}
    return found


def names_below(nodes: list[ast.expr]) -> Iterator[str]:
    for node in nodes:
        for below in ast.walk(node):
            if isinstance(below, ast.Name):
                yield below.id


@cache
def uses() -> tuple[frozenset[str], frozenset[str]]:
    """Return the classes that are raised or created, and those that are caught or tested for."""
    made, caught = set[str](), set[str]()
    for file, tree in trees().items():
        names = names_in(file, tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Name):
                made.add(names.get(node.exc.id, ""))
            elif isinstance(node, ast.ExceptHandler) and node.type:
                caught |= {names.get(name, "") for name in names_below([node.type])}
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                made.add(names.get(node.func.id, ""))
                if node.func.id in ("isinstance", "issubclass", "suppress"):
                    caught |= {names.get(name, "") for name in names_below(node.args)}
    return frozenset(made), frozenset(caught)


def test_every_error_class_is_raised_and_read() -> None:
    """Ours are used through their exit code, others by those who catch them by name."""
    classes = error_classes()
    made, caught = uses()

    assert DataflowError in classes
    assert len(classes) > 20
    for error in classes:
        name = f"{error.__module__}.{error.__qualname__}"
        assert name in made, f"{name} is raised nowhere"
        if issubclass(error, DataflowError):
            assert error.exit_code in EXIT_CODES, name
        elif name not in CAUGHT_BY_A_BASE:
            assert name in caught, f"{name} is caught nowhere"


CAUGHT_BY_A_BASE = {
    "opendataflow_dagster.spark.worker.RunInterrupted": "ends a thread's work; `make` raises why",
}
