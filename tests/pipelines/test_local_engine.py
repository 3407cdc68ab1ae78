"""The local engine: Spark's bytes without Spark, and a refusal of what it can't do."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pandas as pd
import psutil
import pytest
from click.testing import CliRunner

from opendataflow_dagster.cli.app import app
from opendataflow_dagster.config.settings import Settings
from opendataflow_dagster.errors import DataflowError
from opendataflow_dagster.pipelines.engine import LocalEngine
from opendataflow_dagster.pipelines.jobs import in_order, takes_items
from opendataflow_dagster.pipelines.project import LOCAL, TEMPLATE, Project, read_project
from opendataflow_dagster.pipelines.run import run_pipeline
from opendataflow_dagster.pipelines.task import PROGRAM, LocalProcesses, processes
from opendataflow_dagster.pipelines.task_data import ProjectSnapshot
from opendataflow_dagster.pipelines.transformation import PANDAS, engine_of
from opendataflow_dagster.store import open_store
from opendataflow_dagster.store.registry import add_dataset
from opendataflow_dagster.store.store import Store
from tests.support.store_fixtures import statuses

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TESTS = Path(__file__).parents[1]

NATIVE = "from pyspark.sql import DataFrame\ndef run(df: DataFrame):\n    return df\n"

KINDS = """
    from datetime import date, datetime, time, timedelta, timezone
    from decimal import Decimal
    import numpy as np
    import pandas as pd

    def run(df, odd):
        words = set("the order of a set of texts is another in each process".split())
        n = 40
        matrix = np.sin(np.arange(250_000, dtype=float)).reshape(500, 500)
        frame = pd.DataFrame({
            "whole": pd.array([1, None] * (n // 2), "Int64"),
            "small": np.arange(n, dtype="uint8"),
            "float": (matrix @ matrix.T)[:n, 0],
            "part": np.where(np.arange(n) % 7 == 0, np.nan, np.arange(n) / 3).astype("float32"),
            "truth": pd.array([True, None] * (n // 2), "boolean"),
            "text": [" ".join(words), "ä\\n;\\"'", None, ""] * (n // 4),
            "day": [date(2026, 3, 29), None] * (n // 2),
            "time": pd.date_range("1899-12-31 23:59:59.123456", periods=n, freq="1h"),
            "moment": pd.date_range("2026-03-28", periods=n, freq="1h", tz="Europe/Berlin"),
            "money": [Decimal("1.10"), Decimal("-2")] * (n // 2),
            "kind": pd.Categorical(["b", "a"] * (n // 2)),
            "where": odd["ort"].tolist() * (n // 2),
        }, index=np.arange(n)[::-1])
        NESTED
        return frame
"""

NESTED = """frame["list"] = [[1, 2], None] * (n // 2)
        frame["dict"] = [{"a": 1, "b": ["x"]}, {"a": None, "b": []}] * (n // 2)"""


@pytest.fixture(autouse=True)
def _no_process_stays() -> Iterator[None]:
    yield
    processes.end()


@pytest.fixture
def lite(sqlite_url: str) -> Iterator[Store]:
    store = open_store(sqlite_url)
    store.init()
    yield store
    store.close()


def write(root: Path, files: dict[str, str]) -> Project:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        encoding = "latin-1" if path.suffix == ".csv" else "utf-8"
        path.write_text(dedent(text).lstrip("\n"), encoding=encoding)
    return read_project(root)


def run(store: Store, project: Project, slug: str, session: Any = None, **more: Any) -> Any:
    return run_pipeline(
        store,
        project,
        slug,
        Settings(""),
        say=lambda line: None,
        environ=os.environ,
        session=session,
        **more,
    )


def files_of(root: Path) -> dict[str, list[bytes]]:
    """Return what the data files of each folder contain, of any run."""
    found: dict[str, list[bytes]] = {}
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.name.startswith((".", "_")):
            place = str(path.relative_to(root)).partition("dataid=")[0] + path.suffix
            found.setdefault(place, []).append(path.read_bytes())
    return found


# --- the same bytes ---


def of_pandas(project: Project, slug: str) -> bool:
    return all(
        engine_of(project.transformation_file(slug, name)) == PANDAS
        for name in project.pipeline(slug).transformations
    )


PROJECTS = sorted(
    file.parent
    for folder in (TESTS / "projects", TESTS.parent / "examples", TEMPLATE)
    for file in folder.rglob("project.yml")
)


@pytest.mark.parametrize("root", PROJECTS, ids=lambda root: root.name)
def test_each_project_writes_the_same_bytes_as_on_spark(
    root: Path, tmp_path: Path, lite: Store, spark: "SparkSession"
) -> None:
    made, ended = [], []
    for engine in ("spark", LOCAL):
        shutil.copytree(root, here := tmp_path / engine)
        project = read_project(here).on(engine)
        slugs = [each.slug for each in in_order(project) if of_pandas(project, each.slug)]
        for slug in slugs:
            items = (
                sorted(here.glob("*.csv")) if takes_items(project, project.pipeline(slug)) else []
            )
            for stream in items or [None]:
                session = None if engine == LOCAL else lambda: spark
                outcome = run(lite, project, slug, session, stream_file=stream)
                assert outcome.done
                ended.append((engine, slug, outcome[:3]))
        made.append(files_of(here / "output"))
    assert len(made[0]) >= len(slugs) > 0
    assert made[0] == made[1]
    half = len(ended) // 2
    assert [each[1:] for each in ended[:half]] == [each[1:] for each in ended[half:]]


@pytest.mark.parametrize("kind", ["file", "csv", "json", "parquet", "sqlite"])
def test_all_types_are_the_same_bytes_in_every_place(
    kind: str, tmp_path: Path, lite: Store, spark: "SparkSession"
) -> None:
    nested = NESTED if kind in ("file", "csv", "parquet", "json") else ""
    made = []
    for engine in ("spark", LOCAL):
        here = tmp_path / engine
        project = write(
            here,
            {
                "project.yml": """
                    pipelines:
                      - {slug: p, sources: [one, odd], destination: d, transformations: [t, empty]}
                      - {slug: none, sources: [one, odd], transformations: [none]}
                """,
                "pipelines/p/t.py": KINDS.replace("NESTED", nested),
                "pipelines/p/empty.py": "def run(df):\n    return df.iloc[1:]\n",
                "pipelines/none/none.py": "def run(df):\n    return df.iloc[:0]\n",
                "sources/one.csv": "a,b\n1,x\n",
                "odd/file.csv": "ort;n\nKöln;1,5\nÜberlingen;2\n",
            },
        ).on(engine)
        add_dataset(
            lite,
            "odd",
            hostname=str(here / "odd" / "file.csv"),
            options='{"delimiter": ";", "encoding": "latin-1", "strings": ["n"]}',
        )
        if kind == "sqlite":
            add_dataset(lite, "d", format=kind, database=str(here / "d.db"), tablename="t")
        elif kind != "file":
            add_dataset(lite, "d", hostname=str(here / "data"), format=kind)
        for slug in ("p", "none"):
            outcome = run(lite, project, slug, None if engine == LOCAL else lambda: spark)
            assert outcome.done
        rows: Any = files_of(here / "output")
        if kind == "sqlite":
            with closing(sqlite3.connect(here / "d.db")) as connection:
                rows["table"] = connection.execute("select * from t").fetchall()
        elif kind != "file":
            rows |= files_of(here / "data")
        assert len(rows) >= 2
        made.append(rows)
    assert made[0] == made[1]


# --- what it refuses ---


def refusal(*words: str, **environ: str) -> str:
    done = CliRunner().invoke(app, list(words), env=environ)
    assert done.exit_code in (1, 2)
    [line] = done.stderr.splitlines()
    return line.removeprefix("odf: ")


def test_work_that_needs_spark_is_refused_before_anything_is_claimed(
    tmp_path: Path, lite: Store
) -> None:
    project = write(
        tmp_path,
        {
            "project.yml": """
                engine: local
                pipelines:
                  - {slug: native, transformations: [same, own]}
                  - {slug: orc, destination: flakes, transformations: [same]}
                  - {slug: far, sources: [bucket], transformations: [same]}
            """,
            "pipelines/native/same.py": "def run(df):\n    return df\n",
            "pipelines/orc/same.py": "def run(df):\n    return df\n",
            "pipelines/far/same.py": "def run(df):\n    return df\n",
            "pipelines/native/own.py": NATIVE,
        },
    )
    assert project.engine == LOCAL
    add_dataset(lite, "flakes", hostname=str(tmp_path / "flakes"), format="orc")
    add_dataset(lite, "bucket", hostname="s3a://shop/bucket")
    for slug, why in (
        ("native", "pipelines/native/own.py: `run` takes pyspark.sql.DataFrame, but the local"),
        ("orc", "'flakes' is in the format 'orc', which only Spark can read and write"),
        ("far", "'bucket' is in an object store, which only Spark can read and write"),
    ):
        with pytest.raises(DataflowError) as told:
            run(lite, project, slug)
        assert str(told.value).startswith(why)
        assert "\n" not in str(told.value)
        assert "engine: local" in str(told.value)
    assert statuses(lite) == {}


def test_contradicting_settings_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = {"project.yml": "pipelines: [{slug: p, transformations: [own]}]"}
    write(tmp_path, project | {"pipelines/p/own.py": NATIVE})
    monkeypatch.chdir(tmp_path)
    run_words = ("pipeline", "run", "p", "--engine", LOCAL)
    assert "spark.master is spark://far:1, but the local engine" in refusal(
        *run_words, MASTER="spark://far:1"
    )
    assert "spark.remote is sc://far" in refusal(*run_words, SPARK_REMOTE="sc://far")
    assert "own.py: `run` takes pyspark.sql.DataFrame" in refusal(*run_words, MASTER="local[2]")
    done = CliRunner().invoke(app, ["validate", "--engine", LOCAL])
    assert done.exit_code == 1
    assert "FAILED  p.own: pipelines/p/own.py: `run` takes pyspark.sql.DataFrame" in done.stdout
    (tmp_path / "project.yml").write_text("engine: lokal\n" + project["project.yml"])
    assert refusal("validate") == "project.yml:1: `engine` must be spark or local, not 'lokal'."


# --- its processes ---

LOOK = """
    import os
    import pandas as pd
    def run(df):
        seen = dict(os.environ) | {"pid": str(os.getpid())}
        with open("/proc/self/environ") as file:
            seen["proc"] = file.read()
        return pd.DataFrame([seen])
"""


def engine_of_p(root: Path, **code: str) -> LocalEngine:
    names = ", ".join(code)
    files = {"project.yml": f"pipelines: [{{slug: p, transformations: [{names}]}}]"}
    return LocalEngine(
        write(root, files | {f"pipelines/p/{name}.py": text for name, text in code.items()})
    )


def test_users_code_sees_no_secret_and_the_process_is_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSKEY", "sesam")
    monkeypatch.setenv("DATAFLOW_URL", "postgresql://u:sesam@h/d")
    monkeypatch.setenv("OTHER", "seen")
    with engine_of_p(tmp_path, look=LOOK, other=LOOK) as engine:
        first, second = (engine.run("p", name, []).frame for name in ("look", "other"))
    assert first["pid"][0] == second["pid"][0] != str(os.getpid())
    assert "sesam" not in first.to_csv()
    assert first["OTHER"][0] == "seen"
    assert first["PYTHONHASHSEED"][0] == "0"


def test_forks_of_user_code_do_not_disturb_others(tmp_path: Path) -> None:
    back = "import os\ndef run(df):\n    os.fork()\n    return df.assign(x=1)\n"
    stays = """
        import os, time
        def run(df):
            if not os.fork():
                time.sleep(600)
            os._exit(1)
    """
    given = pd.DataFrame({"a": [1]})
    with engine_of_p(tmp_path, back=back, stays=stays) as engine:
        for _ in range(3):
            assert list(engine.run("p", "back", [given]).frame) == ["a", "x"]
        begun = time.monotonic()
        with pytest.raises(DataflowError, match=r"process of p\.stays ended while it ran"):
            engine.run("p", "stays", [given])
        assert time.monotonic() - begun < 10
        assert engine.run("p", "back", [given]).rows == 1
    processes.end()
    children = psutil.Process().children()
    assert [child for child in children if PROGRAM in child.cmdline()] == []


def test_errors_outside_transformations_are_reported_in_one_line(tmp_path: Path) -> None:
    pool = LocalProcesses()
    with pool.one() as process:
        with pytest.raises(DataflowError, match=r"^UnpicklingError: [^\n]+$"):
            process.ask((ProjectSnapshot(str(tmp_path), ""), b"no pickle", ()), lambda: None)
        assert process.is_usable
    pool.end()


KILLED = """
import sys, time
from pathlib import Path
from opendataflow_dagster.pipelines.engine import LocalEngine
from opendataflow_dagster.pipelines.project import read_project
LocalEngine(read_project(Path(sys.argv[1]))).run("p", "loop", [])
"""


def test_it_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    loop = """
        import os
        def run(df):
            open("pid", "w").write(str(os.getpid()))
            os.rename("pid", "ready")
            while True: pass
    """
    engine_of_p(tmp_path, loop=loop).close()
    parent = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    ready, until = tmp_path / "ready", time.monotonic() + 60
    while not ready.exists() and time.monotonic() < until:
        time.sleep(0.05)
    child = psutil.Process(int(ready.read_text()))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    child.wait(10)


def test_concurrent_threads_have_a_process_each() -> None:
    pool = LocalProcesses()
    with pool.one() as one, pool.one() as other:
        assert one is not other
    with pool.one() as again:
        assert again in (one, other)
    pool.end()
    assert not one.is_usable
    assert not other.is_usable
