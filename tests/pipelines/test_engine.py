"""Transformations on Spark: the same rows on every engine, and each in its own process."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pandas as pd
import pytest
from dateutil.tz import tzlocal

from opendataflow_dagster.pipelines import sources as pipeline_sources
from opendataflow_dagster.pipelines.engine import Engine, LocalEngine, Stopped, WorkerDied
from opendataflow_dagster.pipelines.frames import as_pandas, as_spark, from_pandas, from_spark
from opendataflow_dagster.pipelines.project import ENGINES, LOCAL, Project, read_project
from opendataflow_dagster.pipelines.sources import CsvSource
from opendataflow_dagster.pipelines.task import processes
from opendataflow_dagster.pipelines.transformation import TransformationError, engine_of, load
from opendataflow_dagster.pipelines.validate import validate

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PROJECTS = Path(__file__).parents[1] / "projects"
WAYS = ["orders", "orders_spark"]

NATIVE = "from pyspark.sql import DataFrame\ndef run(df: DataFrame):\n    return df"
PANDAS_ON_SPARK = "import pyspark.pandas as ps\ndef run(df: ps.DataFrame):\n    return df"

Made = Callable[..., Engine]


@pytest.fixture
def made(spark: "SparkSession", tmp_path: Path) -> Iterator[Made]:
    """Create an engine for a project, or for one whose pipeline `p` has these transformations."""
    yield from _engines(tmp_path, lambda project: Engine(project, lambda: spark))


@pytest.fixture(params=ENGINES)
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Made]:
    """Create Spark's engine or the local one: for pandas they do the same."""
    if request.param == LOCAL:
        yield from _engines(tmp_path, LocalEngine)
        processes.end()
    else:
        yield request.getfixturevalue("made")


def _engines(tmp_path: Path, new: Callable[[Project], Engine]) -> Iterator[Made]:
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
        engines.append(new(read_project(root)))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


def sources(project: Project, slug: str) -> list[Any]:
    return [pd.read_csv(project.source_file(each)) for each in project.pipeline(slug).sources]


def plainly(project: Project, slug: str) -> Any:
    """Return the result of a pipeline in this process."""
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


def test_an_existing_project_gives_the_same_rows_as_plain_pandas(either: Made) -> None:
    engine = either("old_style")
    expected = plainly(engine.project, "clean_rentals")
    ran = through(engine, "clean_rentals")
    pd.testing.assert_frame_equal(ran, expected)
    assert len(ran) == 3


def test_both_engines_give_the_same_rows(made: Made) -> None:
    engine = made("two_ways")
    expected = plainly(engine.project, "orders").reset_index(drop=True)
    for slug in WAYS:
        ran = through(engine, slug)
        pd.testing.assert_frame_equal(ran.sort_values("name").reset_index(drop=True), expected)
        first = engine.run(slug, "price", sources(engine.project, slug))
        assert first.printed == "4 orders have a price\n"
        assert first.rows == 4
        assert first.engine == engine.engine_of(slug, "price")
    assert [engine.engine_of(slug, "price") for slug in WAYS] == ["pandas", "spark"]


def test_the_example_of_the_page_has_the_same_rows_in_spark(made: Made) -> None:
    engine = made("pipelines_page/shop")
    assert [(each.name, each.message) for each in validate(engine.project)] == [
        ("daily_sales.clean_orders", ""),
        ("daily_sales.add_products", ""),
        ("daily_sales_spark.add_products", ""),
    ]
    frames = sources(engine.project, "daily_sales")
    both = [
        as_pandas(engine.run(slug, "add_products", frames).frame)
        for slug in ("daily_sales", "daily_sales_spark")
    ]
    pd.testing.assert_frame_equal(*both)


def test_pandas_on_spark_is_refused_and_the_engines_are_named(made: Made) -> None:
    engine = made(own=PANDAS_ON_SPARK, same="def run(df):\n    return df")
    line = (
        r"^pipelines/p/own.py: `run` takes pyspark.pandas.DataFrame, and pandas-on-Spark isn't "
        r"supported any more. Annotate its first parameter as pandas.DataFrame or as "
        r"pyspark.sql.DataFrame.$"
    )
    frame = pd.DataFrame({"a": [1]})
    with pytest.raises(TransformationError, match=line):
        engine.run("p", "own", [frame])
    with pytest.raises(TransformationError, match=line):
        engine.run_items("p", ["same", "own"], [frame], [1])


def test_engines_may_follow_each_other(made: Made) -> None:
    engine = made("two_ways")
    frames = sources(engine.project, "orders")
    priced = engine.run("orders_spark", "price", frames).frame
    ran = engine.run("orders", "by_customer", [priced, frames[1]])
    expected = plainly(engine.project, "orders")
    pd.testing.assert_frame_equal(ran.frame, expected)
    back = engine.run(
        "orders_spark", "by_customer", [engine.run("orders", "price", frames).frame, frames[1]]
    )
    pd.testing.assert_frame_equal(as_pandas(back.frame), expected.reset_index(drop=True))


def test_index_and_dtypes_survive(either: Made) -> None:
    engine = either(same="def run(df):\n    return df")
    index = pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["k", None])
    given = pd.DataFrame(
        {
            "c": pd.Categorical(["x", None]),
            "t": pd.to_datetime(["2026-01-01", None], utc=True),
            "d": pd.to_timedelta([1, 2], "s"),
            "i": pd.array([1, None], "Int64"),
            5: [[1], {"a": 2}],
            "s": pd.array(["a", None], "string"),
            "f": pd.Series([1, 2], dtype="float32").array,
        },
        index=index,
    )
    pd.testing.assert_frame_equal(engine.run("p", "same", [given]).frame, given)
    empty = engine.run("p", "same", []).frame
    assert empty.shape == (0, 0)


def test_types_on_their_way_to_spark_and_back(made: Made) -> None:
    engine = made(
        same="from pyspark.sql import DataFrame\ndef run(df: DataFrame):\n    return df",
    )
    given = pd.DataFrame(
        {
            "i": [1, 2],
            "f": [0.5, None],
            "s": ["a", None],
            "b": [True, False],
            "n": [None, None],
            "t": pd.to_datetime(["2026-01-01 08:00:00.123456", None]),
            "d": pd.to_timedelta([1, 2], "s"),
            "c": pd.Categorical(["x", "y"]),
            "u": [1, 2],
        }
    ).astype({"u": "uint8"})
    back = as_pandas(engine.run("p", "same", [given]).frame)
    pd.testing.assert_frame_equal(
        back, given.astype({"c": object, "u": "int16"}), check_dtype=False
    )
    with pytest.raises(TransformationError, match="'x' can't be sent to Spark: it has int, str"):
        engine.run("p", "same", [pd.DataFrame({"x": [1, "a"]})])


def test_times_that_a_clock_shows_twice_or_never_cross_unchanged(
    made: Made, spark: "SparkSession"
) -> None:
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    engine = made(native=NATIVE)
    texts = ["2020-11-01 01:30", "2020-03-08 02:30:00.123456", None, "1800-01-01"]
    times: Any = pd.to_datetime(texts, format="ISO8601")
    given = pd.DataFrame(
        {
            "at": times,
            "texts": ["a"] * 4,
            "seconds": times.astype("datetime64[s]"),
            "objects": times.astype(object),
            "list": [[each] for each in times],
            "dict": [{"at": each} for each in times],
        },
        index=times,
    )
    ran = engine.run("p", "native", [given]).frame
    assert [kind for _, kind in ran.dtypes] == [
        "timestamp_ntz",
        "string",
        "timestamp_ntz",
        "timestamp_ntz",
        "array<timestamp_ntz>",
        "struct<at:timestamp_ntz>",
    ]
    for back in (as_pandas(ran), from_spark(ran)):
        for name in ("at", "seconds", "objects"):
            expected = times.floor("s") if name == "seconds" else times
            assert list(map(str, pd.to_datetime(back[name]))) == list(map(str, expected))
        assert pd.Timestamp(back["list"].iloc[1][0]) == times[1]
        assert pd.Timestamp(back["dict"].iloc[0]["at"]) == times[0]


@pytest.mark.parametrize("zone", ["America/New_York", "+05:30"])
def test_moments_of_spark_become_what_the_sessions_clock_shows(
    made: Made, spark: "SparkSession", zone: str
) -> None:
    spark.conf.set("spark.sql.session.timeZone", zone)
    engine = made(
        parse="""
            from pyspark.sql import DataFrame, functions as F
            def run(df: DataFrame):
                at = F.to_timestamp("at")
                return df.select(
                    at.alias("at"), F.array(at).alias("list"), F.struct(at).alias("dict"),
                    F.create_map(at, at).alias("map"), F.to_date("at").alias("day"),
                    at.cast("timestamp_ntz").alias("plain"), F.lit(1).alias("a.b"),
                )
        """,
        same="def run(df):\n    return df",
    )
    texts = ["2020-01-01 10:00:00", "1800-07-01 00:00:01"]
    times = pd.to_datetime(texts)
    ran = engine.run("p", "parse", [pd.DataFrame({"at": texts})]).frame
    assert dict(ran.dtypes)["at"] == "timestamp"
    for back in (as_pandas(ran), from_spark(ran), engine.run("p", "same", [ran]).frame):
        assert back["at"].tolist() == back["plain"].tolist() == times.tolist()
        for row in (0, 1):
            cells = [*back["list"][row], *back["dict"][row].values()]
            cells += [cell for pair in dict(back["map"][row]).items() for cell in pair]
            assert [pd.Timestamp(cell) for cell in cells] == [times[row]] * 4
        assert [str(each) for each in back["day"]] == ["2020-01-01", "1800-07-01"]


ZONES = ["UTC", "Europe/Berlin", "+02:30", "dateutil/Europe/Berlin", "tzlocal"]


@pytest.mark.parametrize("zone", ZONES)
def test_a_time_with_a_zone_is_the_same_moment_in_spark(
    made: Made, spark: "SparkSession", zone: str
) -> None:
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    at = pd.Series(pd.to_datetime(["2020-07-01 08:00", None])).dt
    given = pd.DataFrame({"at": at.tz_localize(tzlocal() if zone == "tzlocal" else zone)})
    ran = made(native=NATIVE).run("p", "native", [given]).frame
    back = as_pandas(ran)["at"]
    assert back[0] == given["at"].dt.tz_convert("America/New_York").dt.tz_localize(None)[0]
    assert back.isna().tolist() == [False, True]


def test_types_that_spark_lacks_are_widened_or_refused(made: Made) -> None:
    ran = made(native=NATIVE)
    given = pd.DataFrame(
        {
            "u": pd.Series([2**64 - 1, 1], dtype="uint64"),
            "n": pd.array([2**63, None], "UInt64"),
            "small": pd.Series([1, 255], dtype="uint8"),
            "half": pd.Series([0.5, 1], dtype="float16"),
            "kind": pd.Categorical(["b", None], categories=["a", "b"]),
            "number": pd.Categorical([7, 5]),
        }
    )
    frame = ran.run("p", "native", [given]).frame
    rows = [tuple(each) for each in as_spark(frame, None).collect()]
    assert rows == [(2**64 - 1, 2**63, 1, 0.5, "b", 7), (1, None, 255, 1.0, None, 5)]
    assert [int(each) for each in as_pandas(frame)["u"]] == given["u"].tolist()
    unknown = {
        "Period": pd.Series(pd.period_range("2020", periods=2, freq="M")),
        "Interval": pd.Series(pd.interval_range(0, 2)),
        "UUID": pd.Series([uuid4()]),
        "int": pd.Series([2**70]),
        "Decimal": pd.Series([Decimal("1e40")]),
        "complex": pd.Series([1j]),
        "NaTType, Period": pd.Series(pd.PeriodIndex(["2020", None], freq="M")),
    }
    for kinds, column in unknown.items():
        with pytest.raises(
            TransformationError, match=f"^Column 'x' can't .*: it has {kinds}. Convert"
        ):
            ran.run("p", "native", [pd.DataFrame({"a": 1, "x": column})])


@pytest.mark.parametrize("whole", [True, False])
def test_large_numbers_of_a_source_reach_spark(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    if not whole:
        monkeypatch.setattr(pipeline_sources, "WHOLE_FILE_BYTES", 0)
        monkeypatch.setattr(pipeline_sources, "INFERENCE_ROWS", 1)
    (tmp_path / "n.csv").write_text("n,m\n18446744073709551615,1\n1,2\n")
    source = CsvSource(str(tmp_path / "n.csv"), "n")
    frame = made(native=NATIVE).run("p", "native", [source]).frame
    assert [tuple(each) for each in as_spark(frame, None).collect()] == [(2**64 - 1, 1), (1, 2)]


def test_what_spark_has_no_type_for_is_a_text_in_a_source(spark: "SparkSession") -> None:
    period = pd.Series(pd.PeriodIndex(["2020-01", None], freq="M"))
    given = pd.DataFrame({"p": period, "x": [1, "a"], "n": [None, None], "big": [2**70, 1]})
    rows = from_pandas(spark, given).collect()
    assert [tuple(each) for each in rows] == [
        ("2020-01", "1", None, str(2**70)),
        (None, "a", None, "1"),
    ]


def test_a_run_in_another_zone_writes_the_times_that_it_has_read(tmp_path: Path) -> None:
    lines = "1,2020-01-01 10:00:00\n2,2020-11-01 01:30:00\n3,2020-03-08 03:30:00\n"
    root = tmp_path / "zones"
    (root / "sources").mkdir(parents=True)
    (root / "sources" / "times.csv").write_text(f"id,at\n{lines}")
    (root / "project.yml").write_text(
        "pipelines:\n"
        "  - {slug: all, sources: [times], transformations: [parse, pandas, native, same]}\n"
        "  - {slug: last, sources: [all], transformations: [parse]}\n"
    )
    parse = "from pyspark.sql import DataFrame, functions as F\ndef run(df: DataFrame):\n"
    parse += "    return df.withColumn('at', F.to_timestamp('at'))"
    pandas = "import pandas as pd\ndef run(df):\n    return df.assign(at=pd.to_datetime(df['at']))"
    code = {
        "parse": parse,
        "pandas": pandas,
        "native": NATIVE,
        "same": "def run(df):\n    return df",
    }
    for slug, names in {"all": list(code), "last": ["parse"]}.items():
        (root / "pipelines" / slug).mkdir(parents=True)
        for name in names:
            (root / "pipelines" / slug / f"{name}.py").write_text(code[name])
    for slug in ("all", "last"):
        done = subprocess.run(
            [sys.executable, "-m", "opendataflow_dagster.cli", "pipeline", "run", slug],
            cwd=root,
            env=os.environ | {"TZ": "America/New_York"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert (root / "output" / f"{slug}.csv").read_text() == f"id,at\n{lines}"


def test_a_large_frame_comes_and_goes(either: Made) -> None:
    engine = either(twice="def run(df):\n    df['b'] = df['a'] * 2\n    return df")
    given = pd.DataFrame({"a": range(10_000_000)})
    ran = engine.run("p", "twice", [given])
    assert ran.frame["b"].sum() == given["a"].sum() * 2
    assert list(given) == ["a"]
    from opendataflow_dagster.pipelines.task_data import _folder

    assert os.listdir(_folder()[0]) == ["word"]


# --- what a transformation sees ---


def test_it_runs_elsewhere_in_the_projects_surroundings(either: Made) -> None:
    engine = either(
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


def test_changes_of_one_transformation_stay_invisible_to_the_next(either: Made) -> None:
    engine = either(
        spoil="def run(df, other):\n    other['x'] = 0\n    other['l'][0].append(9)\n    return df",
        look="def run(df, other, stream=None):\n    df['seen'] = [str(other.to_dict('list'))]\n"
        "    df['item'] = [str(stream)]\n    return df",
    )
    frames = [pd.DataFrame({"a": [1]}), pd.DataFrame({"x": [5], "l": [[1]]})]
    engine.run("p", "spoil", frames)
    assert engine.run("p", "look", frames).frame["seen"][0] == "{'x': [5], 'l': [[1]]}"
    for chained in (False, True):
        ran = engine.run_items(
            "p", ["spoil", "look"], frames, [{"n": 1}, {"n": 2}], chained=chained
        )
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
def test_an_item_arrives_as_itself(either: Made, item: Any) -> None:
    engine = either(
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
    (
        "import pandas\ndef run(df):\n    return pandas.DataFrame({'a': [lambda: 1]})",
        "can't leave its task",
        "",
    ),
]


@pytest.mark.parametrize(("code", "message", "printed"), WRONG)
def test_a_failure_is_reported_with_what_was_printed(
    either: Made, code: str, message: str, printed: str
) -> None:
    engine = either(bad=code)
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
    with pytest.raises(TransformationError, match=r"it must return a spark DataFrame, like its"):
        engine.run("p", "kind", given)


DIE = """
    import os, signal
    def run(df, stream=None):
        if stream is None or stream.get("die"):
            os.kill(os.getpid(), signal.SIGKILL) if stream else os._exit(1)
        df.loc[len(df)] = [stream["n"]]
        return df
"""


def test_a_dead_worker_is_reported_in_one_line(either: Made) -> None:
    engine = either(die=DIE)
    with pytest.raises(WorkerDied, match=r"The process of p\.die ended while it ran") as told:
        engine.run("p", "die", [pd.DataFrame({"n": [1]})])
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("chained", [False, True])
def test_an_item_that_kills_its_worker_fails_alone(either: Made, chained: bool) -> None:
    engine = either(die=DIE)
    items = [{"n": n, "die": n == 3} for n in range(6)]
    ran = engine.run_items("p", ["die"], [pd.DataFrame({"n": [9]})], items, chained=chained)
    assert [each.ok for each in ran] == [True, True, True, False, True, True]
    assert "ended while it ran" in ran[3].steps[0].reason
    if chained:
        assert [each.frame is None for each in ran] == [True] * 5 + [False]
        assert list(ran[-1].frame["n"]) == [9, 0, 1, 2, 4, 5]
    else:
        assert [list(each.frame["n"]) for each in ran if each.ok] == [
            [9, n] for n in (0, 1, 2, 4, 5)
        ]


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
    ran = engine.run_items(
        "p", ["add", "check"], [first], [{"n": n} for n in (1, 2, 3)], chained=chained
    )
    assert [each.ok for each in ran] == [True, False, True]
    assert [step.transformation for step in ran[1].steps] == ["add", "check"]
    assert ran[1].steps[0].printed == "added 2\n"
    assert ran[1].steps[1].reason.startswith("ValueError: two")
    assert list(ran[2].frame["n"]) == ([0, 1, 3] if chained else [0, 3])
    assert (ran[0].frame is None) == chained
    assert ran[0].steps[1].rows == 2


def test_a_source_is_sent_again_only_when_it_has_changed(either: Made) -> None:
    class Counted:
        location, kind, reads = "here", "a", 0

        def version(self) -> str:
            return self.kind

        def pandas(self) -> Any:
            self.reads += 1
            return pd.DataFrame({"kind": [self.kind] * 100_000})

    engine = either(take="def run(df, stream=None):\n    return df.head(1)")
    source = Counted()
    for kind in ("a", "a", "b", "b", "a"):
        source.kind = kind
        [ran] = engine.run_items("p", ["take"], [source], [{}])
        assert ran.frame["kind"][0] == kind
    assert source.reads == 3


# --- ends ---


def test_it_can_be_stopped(either: Made) -> None:
    engine = either(loop="def run(df):\n    while True: pass")
    threading.Timer(1.5, engine.interrupt).start()
    start = time.monotonic()
    with pytest.raises(Stopped):
        engine.run("p", "loop", [pd.DataFrame()])
    assert time.monotonic() - start < 15
    with pytest.raises(Stopped):
        engine.run("p", "loop", [])


def test_the_reason_for_an_end_is_named(spark: "SparkSession", made: Made) -> None:
    project = made(loop="def run(df):\n    while True: pass").project
    end = time.monotonic() + 1.5

    def stopping() -> str | None:
        return "SIGTERM" if time.monotonic() > end else None

    engine = Engine(project, lambda: spark, stopping=stopping)
    with engine, pytest.raises(Stopped, match="stopped by SIGTERM"):
        engine.run("p", "loop", [])


def test_an_interrupt_ends_the_task(either: Made) -> None:
    engine = either(
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
    (
        "from typing import *\nfrom pyspark.sql import DataFrame\n"
        "def run(a: Optional[DataFrame]):\n  ...",
        "spark",
    ),
    ("from pyspark.sql import DataFrame\ndef run(df: DataFrame | None): ...", "spark"),
    (
        "if TYPE_CHECKING:\n  from pyspark.sql import DataFrame\ndef run(d: 'DataFrame'): ...",
        "spark",
    ),
    ("import pyspark.pandas as ps\ndef run(df: ps.DataFrame): ...", "pandas-on-spark"),
    ("from pyspark import pandas as pd\ndef run(df: 'pd.DataFrame[int]'): ...", "pandas-on-spark"),
    (
        "import pandas as pd\nfrom pyspark.sql import DataFrame\n"
        "def run(a: pd.DataFrame, b: DataFrame): ...",
        "pandas",
    ),
    (
        "from __future__ import annotations\nfrom pyspark.sql import DataFrame\n"
        "def run(df: DataFrame): ...",
        "spark",
    ),
    ("F = F\ndef run(df: F): ...", "pandas"),
]


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
from opendataflow_dagster.pipelines import task_data as homes
from opendataflow_dagster.pipelines.frames import whole_pandas as as_pandas
from opendataflow_dagster.pipelines.engine import Engine
from opendataflow_dagster.pipelines.project import read_project
from opendataflow_dagster.spark.session import spark_session

spark = spark_session({sys.argv[1]: sys.argv[2]})
project = read_project(Path(sys.argv[3]))
given = pd.DataFrame({"a": range(300_000)})  # more than goes with a task
with Engine(project, lambda: spark) as engine:
    engine.run("p", "where", [given.head(1)])
    # From here on the files at their place aren't those that are sent.
    snapshot = engine._snapshots.now()
    engine._snapshots.now = lambda: snapshot
    (project.root / "utils" / "helper.py").write_text("NAME = 'changed'")
    made = engine.run("p", "where", [given]).frame
    [ran] = engine.run_items("p", ["where"], [given], [{}])
    print(made["cwd"][0], made["name"][0], len(made), len(ran.frame))
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    times = pd.DataFrame({"at": pd.to_datetime(["2020-11-01 01:30", "2020-03-08 02:30"])})
    back = as_pandas(engine.run("p", "native", [times]).frame)
    assert back["at"].tolist() == times["at"].tolist(), back
    assert [str(each) for each in back["ten"]] == ["2020-01-01 10:00:00"] * 2, back
spark.stop()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["spark.master", "spark.remote"])
def test_missing_project_files_are_sent_to_the_worker(
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
        native="""
            from pyspark.sql import DataFrame, functions as F
            def run(df: DataFrame):
                return df.withColumn("ten", F.to_timestamp(F.lit("2020-01-01 10:00:00")))
        """,
    ).project.root
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, way, address, str(root)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(PROJECTS.parents[1])},
    )
    assert done.returncode == 0, done.stderr
    cwd, name, rows, items = done.stdout.split()
    assert name == "sent"
    assert cwd != str(root)
    assert "odf-project-" in cwd
    assert int(rows) == int(items) == 300_000


# --- what the first leaves to the next ---


def test_each_transformation_has_its_own_logs_in_a_reused_worker(either: Made) -> None:
    log = """
        import logging, os
        logging.basicConfig(level=logging.INFO)
        def run(df, stream=None):
            logging.info("log of {} %s", stream)
            os.system("echo child")
            return df
    """
    engine = either(a=log.format("a"), b=log.format("b"))
    for name in "abab":
        printed = engine.run("p", name, [pd.DataFrame({"n": [1]})]).printed
        assert printed == f"INFO:root:log of {name} None\nchild\n"
    ran = engine.run_items("p", ["a", "b"], [pd.DataFrame({"n": [1]})], [1, 2])
    ran += engine.run_items("p", ["a", "b"], [pd.DataFrame({"n": [1]})], [3])
    assert [step.printed for each in ran for step in each.steps] == [
        f"INFO:root:log of {name} {item}\nchild\n" for item in (1, 2, 3) for name in "ab"
    ]


def test_a_log_of_sparks_own_frames_is_kept(made: Made) -> None:
    log = """
        import logging, os
        from pyspark.sql import DataFrame
        out = logging.StreamHandler()
        def run(df: DataFrame):
            out.emit(logging.makeLogRecord({"msg": "log"}))
            os.system("echo child")
            return df
    """
    engine = made(a=log, b=log)
    for name in "ab":
        assert engine.run("p", name, [pd.DataFrame({"n": [1]})]).printed == "log\nchild\n"


def test_a_change_of_the_working_folder_doesnt_affect_the_next(either: Made) -> None:
    engine = either(
        away="import os\ndef run(df, stream=None):\n    os.chdir('/')\n    return df",
        reads="def run(df):\n    open('project.yml').close()\n    return df",
    )
    for chained in (False, True):
        ran = engine.run_items(
            "p", ["away", "reads"], [pd.DataFrame({"n": [1]})], [1, 2], chained=chained
        )
        assert [step.reason for each in ran for step in each.steps] == [""] * 4


@pytest.mark.parametrize("error", ["GeneratorExit('g')", "KeyboardInterrupt", "SystemExit"])
def test_any_exception_fails_the_item(either: Made, error: str) -> None:
    engine = either(
        bad=f"def run(df, stream=None):\n    if stream == 2:\n        raise {error}\n    return df"
    )
    ran = engine.run_items("p", ["bad"], [pd.DataFrame({"n": [1]})], [1, 2, 3])
    assert [each.ok for each in ran] == [True, False, True]
    told = error.replace("('g')", ": g")
    assert ran[1].steps[0].reason == f"{told} (pipelines/p/bad.py:3)"
    with pytest.raises(TransformationError, match=told):
        engine.run("p", "bad", [pd.DataFrame({"n": [1]})], 2)


@pytest.mark.parametrize(
    ("code", "engine"),
    [
        ("from pyspark.sql import *\ndef run(df: DataFrame): ...", "spark"),
        ("from pyspark.pandas import *\ndef run(df: DataFrame): ...", "pandas-on-spark"),
        (
            "from pyspark.sql.functions import *\nfrom pandas import *\n"
            "def run(df: DataFrame): ...",
            "pandas",
        ),
        ("from pyspark.sql import DataFrame\ndef run(*dfs: DataFrame): ...", "spark"),
        ("from pyspark.sql import DataFrame\ndef run(df, *dfs: DataFrame): ...", "pandas"),
        ("from pyspark.sql import DataFrame\nif 1:\n  def run(df: DataFrame): ...", "spark"),
        (
            "from pyspark.sql import DataFrame\nif x: pass\nelse:\n  def run(df: DataFrame): ...",
            "spark",
        ),
        (
            "try:\n  from pyspark.sql import DataFrame\n  def run(df: DataFrame): ...\n"
            "except ImportError:\n  def run(df): ...",
            "spark",
        ),
        (
            "from pyspark.sql import DataFrame\ndef run(df: DataFrame): ...\n"
            "if __name__ == '__main__':\n  def run(df): ...",
            "spark",
        ),
        ("from pyspark.sql import DataFrame\ndef go(df: DataFrame): ...\nrun = go", "spark"),
        (
            "from pyspark.sql import DataFrame\ndef go(df: DataFrame): ...\nto = go\nrun: F = to",
            "spark",
        ),
        (
            "from pyspark.sql import DataFrame\ndef run(df: DataFrame): ...\nrun = timed(run)",
            "spark",
        ),
        ("from pyspark.sql import DataFrame\nrun = run", "pandas"),
        ("from pyspark.sql import DataFrame\nclass A:\n  def run(df: DataFrame): ...", "pandas"),
        (
            "from pyspark.sql import DataFrame\ndef run(df: DataFrame): ...\ndef go(df): ...\n"
            "run = go",
            "pandas",
        ),
    ],
)
def test_the_engine_of_a_run_that_is_not_plain(code: str, engine: str, tmp_path: Path) -> None:
    path = tmp_path / "t.py"
    path.write_text(code)
    assert engine_of(path) == engine
