"""Transformations on Spark: the same rows whatever the engine, and each in its own process."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest

from opendataflow_dagster.pipelines.annotation import engine_of
from opendataflow_dagster.pipelines.converting import as_pandas
from opendataflow_dagster.pipelines.engines import Engine, Stopped, WorkerDied
from opendataflow_dagster.pipelines.project import Project, read_project
from opendataflow_dagster.pipelines.transformation import TransformationError, load

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROJECTS = Path(__file__).parent / "projects"
WAYS = ["orders", "orders_spark", "orders_on_spark"]

Made = Callable[..., Engine]


@pytest.fixture
def made(spark: "SparkSession", tmp_path: Path) -> Iterator[Made]:
    """Make an engine for a project, or for one whose pipeline `p` has these transformations."""
    engines: list[Engine] = []

    def make(project: str | None = None, /, **code: str) -> Engine:
        root = tmp_path / (project or "given")
        if project:
            shutil.copytree(PROJECTS / project, root)
        else:
            (root / "pipelines" / "p").mkdir(parents=True)
            names = [name for name in code if not name.startswith("utils_")]
            text = f"pipelines: [{{slug: p, transformations: [{', '.join(names)}]}}]"
            (root / "project.yml").write_text(text)
            for name, each in code.items():
                path = root / "pipelines" / "p" / f"{name}.py"
                if name.startswith("utils_"):
                    path = root / "utils" / f"{name[6:]}.py"
                    path.parent.mkdir(exist_ok=True)
                path.write_text(dedent(each))
        engines.append(Engine(read_project(root), lambda: spark))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


def sources(project: Project, slug: str) -> list[Any]:
    return [pd.read_csv(project.source_file(each)) for each in project.pipeline(slug).sources]


def plainly(project: Project, slug: str) -> Any:
    """What a pipeline makes in this process."""
    frames = sources(project, slug)
    for name in project.pipeline(slug).transformations:
        frames[0], _ = load(project, slug, name)(frames)
    return frames[0]


def through(engine: Engine, slug: str) -> Any:
    frames = sources(engine.project, slug)
    for name in engine.project.pipeline(slug).transformations:
        frames[0] = engine.run(slug, name, frames).frame
    return as_pandas(frames[0])


# --- the same rows ---


def test_an_existing_project_makes_what_plain_pandas_makes(made: Made) -> None:
    engine = made("old_style")
    expected = plainly(engine.project, "clean_rentals")
    ran = through(engine, "clean_rentals")
    pd.testing.assert_frame_equal(ran, expected)
    assert len(ran) == 3


@pytest.mark.filterwarnings("ignore::pyspark.pandas.utils.PandasAPIOnSparkAdviceWarning")
def test_three_engines_make_the_same_rows(made: Made) -> None:
    engine = made("three_ways")
    expected = plainly(engine.project, "orders").reset_index(drop=True)
    for slug in WAYS:
        ran = through(engine, slug)
        pd.testing.assert_frame_equal(ran.sort_values("name").reset_index(drop=True), expected)
        first = engine.run(slug, "price", sources(engine.project, slug))
        assert first.printed == "4 orders have a price\n"
        assert first.rows == 4
        assert first.engine == engine.engine_of(slug, "price")
    assert [engine.engine_of(slug, "price") for slug in WAYS] == ["pandas", "spark",
                                                                  "pandas-on-spark"]  # fmt: skip


def test_engines_may_follow_each_other(made: Made) -> None:
    engine = made("three_ways")
    frames = sources(engine.project, "orders")
    priced = engine.run("orders_spark", "price", frames).frame
    ran = engine.run("orders", "by_customer", [priced, frames[1]])
    expected = plainly(engine.project, "orders")
    pd.testing.assert_frame_equal(ran.frame, expected)
    back = engine.run("orders_spark", "by_customer",
                      [engine.run("orders", "price", frames).frame, frames[1]])  # fmt: skip
    pd.testing.assert_frame_equal(as_pandas(back.frame), expected.reset_index(drop=True))


def test_index_and_dtypes_survive(made: Made) -> None:
    engine = made(same="def run(df):\n    return df")
    index = pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["k", None])
    given = pd.DataFrame({
        "c": pd.Categorical(["x", None]), "t": pd.to_datetime(["2026-01-01", None], utc=True),
        "d": pd.to_timedelta([1, 2], "s"), "i": pd.array([1, None], "Int64"), 5: [[1], {"a": 2}],
        "s": pd.array(["a", None], "string"), "f": pd.Series([1, 2], dtype="float32").array,
    }, index=index)  # fmt: skip
    pd.testing.assert_frame_equal(engine.run("p", "same", [given]).frame, given)
    empty = engine.run("p", "same", []).frame
    assert empty.shape == (0, 0)


def test_types_on_their_way_to_spark_and_back(made: Made) -> None:
    engine = made(
        same="from pyspark.sql import DataFrame\ndef run(df: DataFrame):\n    return df",
    )
    given = pd.DataFrame({
        "i": [1, 2], "f": [0.5, None], "s": ["a", None], "b": [True, False], "n": [None, None],
        "t": pd.to_datetime(["2026-01-01 08:00:00.123456", None]),
        "d": pd.to_timedelta([1, 2], "s"), "c": pd.Categorical(["x", "y"]), "u": [1, 2],
    }).astype({"u": "uint8"})  # fmt: skip
    back = as_pandas(engine.run("p", "same", [given]).frame)
    pd.testing.assert_frame_equal(
        back, given.astype({"c": object, "u": "int16"}), check_dtype=False
    )
    with pytest.raises(TransformationError, match="'x' can't go to Spark: it has int, str"):
        engine.run("p", "same", [pd.DataFrame({"x": [1, "a"]})])


def test_a_large_frame_comes_and_goes(made: Made) -> None:
    engine = made(twice="def run(df):\n    df['b'] = df['a'] * 2\n    return df")
    given = pd.DataFrame({"a": range(10_000_000)})
    ran = engine.run("p", "twice", [given])
    assert ran.frame["b"].sum() == given["a"].sum() * 2
    assert list(given) == ["a"]
    from opendataflow_dagster.pipelines.shipping import _folder

    assert os.listdir(_folder()[0]) == ["word"]


# --- what a transformation sees ---


def test_it_runs_elsewhere_in_the_projects_surroundings(made: Made) -> None:
    engine = made(
        where="""
            import os, sys, warnings
            from utils.helper import NAME

            print("loaded")

            def run(df):
                import utils.helper
                print("out")
                print("err", file=sys.stderr)
                warnings.warn("careful")
                df["pid"], df["cwd"], df["name"] = os.getpid(), os.getcwd(), NAME
                return df
        """,
        utils_helper="NAME = 'one'",
    )
    given = pd.DataFrame({"a": [1]})
    ran = engine.run("p", "where", [given])
    assert ran.frame["pid"][0] != os.getpid()
    assert ran.frame["cwd"][0] == str(engine.project.root)
    assert ran.printed.startswith("loaded\nout\nerr\n")
    assert "careful" in ran.printed

    (engine.project.root / "utils" / "helper.py").write_text("NAME = 'two, changed'")
    assert engine.run("p", "where", [given]).frame["name"][0] == "two, changed"


def test_what_one_changes_the_next_does_not_see(made: Made) -> None:
    engine = made(
        spoil="def run(df, other):\n    other['x'] = 0\n    other['l'][0].append(9)\n    return df",
        look="def run(df, other, stream=None):\n    df['seen'] = [str(other.to_dict('list'))]\n"
        "    df['item'] = [str(stream)]\n    return df",
    )
    frames = [pd.DataFrame({"a": [1]}), pd.DataFrame({"x": [5], "l": [[1]]})]
    engine.run("p", "spoil", frames)
    assert engine.run("p", "look", frames).frame["seen"][0] == "{'x': [5], 'l': [[1]]}"
    for chained in (False, True):
        ran = engine.run_items("p", ["spoil", "look"], frames, [{"n": 1}, {"n": 2}],
                               chained=chained)  # fmt: skip
        assert ran[1].frame["seen"][0] == "{'x': [5], 'l': [[1]]}"
        assert ran[1].frame["item"][0] == "{'n': 2}"


ODD = [
    'it\'s "x"\n',
    "__import__('os')._exit(1)",
    "{stream}",
    "\\\0\ud800é😀",
    None,
    [1, {"a": []}],
]


@pytest.mark.parametrize("item", ODD, ids=repr)
def test_an_item_arrives_as_itself(made: Made, item: Any) -> None:
    engine = made(
        take="""
        import pandas as pd
        def run(df, stream):
            return pd.DataFrame({"item": [stream]})
    """
    )
    assert engine.run("p", "take", [], {"v": item}).frame["item"][0] == {"v": item}
    [ran] = engine.run_items("p", ["take"], [], [{"v": item}])
    assert ran.frame["item"][0] == {"v": item}


# --- what goes wrong ---

WRONG = [
    ("def run(df):\n    print('before')\n    return df['x']", "KeyError: 'x'", "before\n"),
    ("def run(df):\n    return 1 +", "SyntaxError", ""),
    ("print('top')\nraise ValueError('no')", "ValueError: no", "top\n"),
    ("def run(df):\n    raise SystemExit(3)", "SystemExit: 3", ""),
    ("def run(df):\n    print(1)", "`run` returns nothing", "1\n"),
    ("import pandas\ndef run(df):\n    return pandas.DataFrame({'a': [lambda: 1]})",
     "can't leave its task", ""),
]  # fmt: skip


@pytest.mark.parametrize(("code", "message", "printed"), WRONG)
def test_a_failure_is_told_with_what_was_printed(
    made: Made, code: str, message: str, printed: str
) -> None:
    engine = made(bad=code)
    with pytest.raises(TransformationError, match=message) as raised:
        engine.run("p", "bad", [pd.DataFrame({"a": [1]})])
    assert raised.value.printed == printed
    assert "\n" not in str(raised.value)
    if "KeyError" in message:
        assert str(raised.value) == "KeyError: 'x' (pipelines/p/bad.py:3)"
        assert "return df['x']" in raised.value.trace
    [ran] = engine.run_items("p", ["bad"], [pd.DataFrame({"a": [1]})], [1])
    assert message in ran.steps[0].reason
    assert ran.steps[0].printed == printed


def test_a_failure_inside_spark_is_the_transformations(made: Made) -> None:
    engine = made(
        bad="""
            from pyspark.sql import DataFrame, functions as F
            @F.udf
            def odd(value):
                raise ValueError("odd value")
            def run(df: DataFrame):
                print("planned")
                return df.withColumn("b", odd("a"))
        """,
        column="from pyspark.sql import DataFrame\ndef run(df: DataFrame):\n    return df.nope",
        kind="from pyspark.sql import DataFrame\ndef run(df: DataFrame):\n    return df.toPandas()",
    )
    given = [pd.DataFrame({"a": [1]})]
    with pytest.raises(TransformationError, match=r"^ValueError: odd value$") as raised:
        engine.run("p", "bad", given)
    assert raised.value.printed == "planned\n"
    assert "in odd" in raised.value.trace
    with pytest.raises(TransformationError, match=r"AttributeError|UNRESOLVED"):
        engine.run("p", "column", given)
    with pytest.raises(TransformationError, match="is a spark DataFrame, and so must be"):
        engine.run("p", "kind", given)


DIE = """
    import os, signal
    def run(df, stream=None):
        if stream is None or stream.get("die"):
            os.kill(os.getpid(), signal.SIGKILL) if stream else os._exit(1)
        df.loc[len(df)] = [stream["n"]]
        return df
"""


def test_a_worker_that_dies_is_told_in_a_line(made: Made) -> None:
    engine = made(die=DIE)
    with pytest.raises(
        WorkerDied, match=r"The process that ran p\.die ended in the middle"
    ) as told:
        engine.run("p", "die", [pd.DataFrame({"n": [1]})])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("chained", [False, True])
def test_an_item_that_kills_its_worker_fails_alone(made: Made, chained: bool) -> None:
    engine = made(die=DIE)
    items = [{"n": n, "die": n == 3} for n in range(6)]
    ran = engine.run_items("p", ["die"], [pd.DataFrame({"n": [9]})], items, chained=chained)
    assert [each.ok for each in ran] == [True, True, True, False, True, True]
    assert "ended in the middle" in ran[3].steps[0].reason
    if chained:
        assert [each.frame is None for each in ran] == [True] * 5 + [False]
        assert list(ran[-1].frame["n"]) == [9, 0, 1, 2, 4, 5]
    else:
        assert [list(each.frame["n"]) for each in ran if each.ok] == [[9, n] for n in
                                                                      (0, 1, 2, 4, 5)]  # fmt: skip


@pytest.mark.parametrize("spark_engine", [False, True])
@pytest.mark.parametrize("chained", [False, True])
def test_an_item_that_fails_fails_alone(made: Made, chained: bool, spark_engine: bool) -> None:
    add = """
        def run(df, stream=None):
            df.loc[len(df)] = [stream["n"], "x"]
            print("added", stream["n"])
            return df
    """
    if spark_engine:
        add = """
            from pyspark.sql import DataFrame
            def run(df: DataFrame, stream=None):
                print("added", stream["n"])
                more = df.sparkSession.createDataFrame([(stream["n"], "x")], "n long, t string")
                return df.union(more)
        """
    check = """
        def run(df, stream=None):
            if stream["n"] == 2:
                raise ValueError("two")
            return df
    """
    engine = made(add=add, check=check)
    first = pd.DataFrame({"n": [0], "t": ["first"]})
    ran = engine.run_items("p", ["add", "check"], [first], [{"n": n} for n in (1, 2, 3)],
                           chained=chained)  # fmt: skip
    assert [each.ok for each in ran] == [True, False, True]
    assert [step.transformation for step in ran[1].steps] == ["add", "check"]
    assert ran[1].steps[0].printed == "added 2\n"
    assert ran[1].steps[1].reason.startswith("ValueError: two")
    assert list(ran[2].frame["n"]) == ([0, 1, 3] if chained else [0, 3])
    assert (ran[0].frame is None) == chained
    assert ran[0].steps[1].rows == 2


def test_a_source_is_sent_again_only_when_it_has_changed(made: Made) -> None:
    class Counted:
        location, kind, reads = "here", "a", 0

        def version(self) -> str:
            return self.kind

        def pandas(self) -> Any:
            self.reads += 1
            return pd.DataFrame({"kind": [self.kind] * 100_000})

    engine = made(take="def run(df, stream=None):\n    return df.head(1)")
    source = Counted()
    for kind in ("a", "a", "b", "b", "a"):
        source.kind = kind
        [ran] = engine.run_items("p", ["take"], [source], [{}])
        assert ran.frame["kind"][0] == kind
    assert source.reads == 3


# --- ends ---


def test_it_can_be_stopped(made: Made) -> None:
    engine = made(loop="def run(df):\n    while True: pass")
    threading.Timer(1.5, engine.interrupt).start()
    start = time.monotonic()
    with pytest.raises(Stopped):
        engine.run("p", "loop", [pd.DataFrame()])
    assert time.monotonic() - start < 15
    with pytest.raises(Stopped):
        engine.run("p", "loop", [])


def test_who_asks_for_an_end_is_named(spark: "SparkSession", made: Made) -> None:
    project = made(loop="def run(df):\n    while True: pass").project
    end = time.monotonic() + 1.5

    def stopping() -> str | None:
        return "SIGTERM" if time.monotonic() > end else None

    engine = Engine(project, lambda: spark, stopping=stopping)
    with engine, pytest.raises(Stopped, match="stopped by SIGTERM"):
        engine.run("p", "loop", [])


def test_an_interrupt_ends_the_task(made: Made) -> None:
    engine = made(
        loop="import time\ndef run(df):\n    time.sleep(60)",
        same="def run(df):\n    return df",
    )
    engine.run("p", "same", [])
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        engine.run("p", "loop", [])
    assert time.monotonic() - start < 30
    assert engine.run("p", "same", [pd.DataFrame({"a": [1]})]).rows == 1


# --- annotations ---

ANNOTATED = [
    ("def run(df): ...", "pandas"),
    ("def run(): ...", "pandas"),
    ("x = 1", "pandas"),
    ("def run(df: DataFrame: ...", "pandas"),
    ("import pandas as pd\ndef run(df: pd.DataFrame): ...", "pandas"),
    ("from pandas import DataFrame\ndef run(df: DataFrame): ...", "pandas"),
    ("from pyspark.sql import DataFrame\ndef run(df: DataFrame): ...", "spark"),
    ("from pyspark.sql import DataFrame as D\ndef run(df: 'D'): ...", "spark"),
    ("import pyspark.sql\ndef run(df: pyspark.sql.DataFrame, b=1): ...", "spark"),
    ("import pyspark.sql.dataframe as d\ndef run(df: d.DataFrame, /): ...", "spark"),
    ("from pyspark import sql\nF = sql.DataFrame\ndef run(df: F): ...", "spark"),
    ("from pyspark.sql.connect.dataframe import DataFrame\ndef run(df: DataFrame): ...", "spark"),
    ("from typing import *\nfrom pyspark.sql import DataFrame\ndef run(a: Optional[DataFrame]):\n"
     "  ...", "spark"),
    ("from pyspark.sql import DataFrame\ndef run(df: DataFrame | None): ...", "spark"),
    ("if TYPE_CHECKING:\n  from pyspark.sql import DataFrame\ndef run(d: 'DataFrame'): ...",
     "spark"),
    ("import pyspark.pandas as ps\ndef run(df: ps.DataFrame): ...", "pandas-on-spark"),
    ("from pyspark import pandas as pd\ndef run(df: 'pd.DataFrame[int]'): ...", "pandas-on-spark"),
    ("import pandas as pd\nfrom pyspark.sql import DataFrame\n"
     "def run(a: pd.DataFrame, b: DataFrame): ...", "pandas"),
    ("from __future__ import annotations\nfrom pyspark.sql import DataFrame\n"
     "def run(df: DataFrame): ...", "spark"),
    ("F = F\ndef run(df: F): ...", "pandas"),
]  # fmt: skip


@pytest.mark.parametrize(("code", "engine"), ANNOTATED)
def test_the_first_parameter_says_the_engine(code: str, engine: str, tmp_path: Path) -> None:
    path = tmp_path / "t.py"
    path.write_text(code)
    assert engine_of(path) == engine


# --- a cluster, and Spark Connect ---

ELSEWHERE = """
import shutil, sys
from pathlib import Path
import pandas as pd
from opendataflow_dagster.pipelines import homes
from opendataflow_dagster.pipelines.engines import Engine
from opendataflow_dagster.pipelines.project import read_project
from opendataflow_dagster.spark.session import spark_session

spark = spark_session({sys.argv[1]: sys.argv[2]})
project = read_project(Path(sys.argv[3]))
given = pd.DataFrame({"a": range(300_000)})  # more than goes with a task
with Engine(project, lambda: spark) as engine:
    engine.run("p", "where", [given.head(1)])
    # From here on the files at their place aren't those that are sent.
    home = engine._homes.now()
    engine._homes.now = lambda: home
    (project.root / "utils" / "helper.py").write_text("NAME = 'changed'")
    made = engine.run("p", "where", [given]).frame
    [ran] = engine.run_items("p", ["where"], [given], [{}])
    print(made["cwd"][0], made["name"][0], len(made), len(ran.frame))
spark.stop()
"""


@pytest.mark.parametrize("way", ["spark.master", "spark.remote"])
def test_where_the_files_are_not_there_they_are_sent(
    way: str, made: Made, request: pytest.FixtureRequest
) -> None:
    address = (
        request.getfixturevalue("spark_cluster").url
        if way == "spark.master"
        else request.getfixturevalue("connect_url")
    )
    root = made(
        where="""
            import os
            from utils.helper import NAME
            def run(df, stream=None):
                df["cwd"], df["name"] = os.getcwd(), NAME
                return df
        """,
        utils_helper="NAME = 'sent'",
    ).project.root
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, way, address, str(root)],
                          capture_output=True, text=True, timeout=110,
                          env=os.environ | {"PYTHONPATH": str(PROJECTS.parents[1])})  # fmt: skip
    assert done.returncode == 0, done.stderr
    cwd, name, rows, items = done.stdout.split()
    assert name == "sent"
    assert cwd != str(root)
    assert "odf-project-" in cwd
    assert int(rows) == int(items) == 300_000
