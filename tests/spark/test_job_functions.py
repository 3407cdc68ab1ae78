"""What a function of DataFrames receives, and how one is named on a command line."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from opendataflow_dagster.chunk import Chunk
from opendataflow_dagster.errors import WrongUse
from opendataflow_dagster.model import Plan
from opendataflow_dagster.spark.job import (
    Argument,
    SparkJob,
    arguments,
    is_spark_function,
    load_job,
    spark_job,
)


def plan(*inputs: str) -> Plan:
    return Plan("job", inputs, ("out",), (), (), False)


def test_frames_are_given_by_the_names_of_datasets() -> None:
    def fn(orders: DataFrame, customers: DataFrame) -> Any: ...

    found = arguments(fn, plan("customers", "orders", "today"))

    assert found == {
        "orders": Argument("frame", "orders"),
        "customers": Argument("frame", "customers"),
    }


def test_a_name_that_no_parameter_can_have_is_written_with_underscores() -> None:
    def fn(raw_orders_2: DataFrame) -> Any: ...

    assert arguments(fn, plan("Raw-Orders.2", "x"))["raw_orders_2"].datasetid == "Raw-Orders.2"


def test_the_only_input_may_be_called_anything() -> None:
    def fn(df, spark, chunk): ...

    found = arguments(fn, plan("orders"))

    assert found == {
        "df": Argument("frame", "orders"),
        "spark": Argument("spark"),
        "chunk": Argument("chunk"),
    }


def test_annotations_beat_names() -> None:
    def fn(session: SparkSession, c: Chunk, chunk: DataFrame): ...

    found = arguments(fn, plan("chunk"))

    assert found == {
        "session": Argument("spark"),
        "c": Argument("chunk"),
        "chunk": Argument("frame", "chunk"),
    }


def test_what_has_a_default_is_left_alone() -> None:
    def fn(orders, factor=2, *rest, **more): ...

    assert list(arguments(fn, plan("orders"))) == ["orders"]


def test_a_parameter_that_is_no_input_is_refused_with_those_that_are() -> None:
    def fn(ordr, x): ...

    with pytest.raises(WrongUse, match=r"parameter 'ordr'.*it reads: a, b"):
        arguments(fn, plan("a", "b"))


def test_the_only_input_that_is_left_may_be_called_anything() -> None:
    def fn(order, customers): ...

    assert arguments(fn, plan("customers", "orders"))["order"].datasetid == "orders"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch": 0}, "batch=0"),
        ({"batch": "many"}, "batch='many'"),
        ({"threads": 10_000}, "threads=10000"),
        ({"batch": 2, "threads": 2}, "both batch and threads"),
        ({"schema": "free"}, "choose from same, merge, any"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongUse, match=said):
        spark_job(**options)(print)


def test_a_decorated_function_can_still_be_called() -> None:
    @spark_job
    def double(x):
        return 2 * x

    assert isinstance(double, SparkJob)
    assert double(4) == 8
    assert is_spark_function(double)
    assert not is_spark_function(lambda chunk: None)
    assert not is_spark_function(5)


def test_a_job_is_loaded_from_a_module_or_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "some where"
    folder.mkdir()
    (folder / "beside.py").write_text("FACTOR = 3\n")
    (folder / "jobs_of_a_file.py").write_text(
        "from beside import FACTOR\ndef triple(df): return FACTOR\n"
    )
    job, name = load_job(f"{folder}/jobs_of_a_file.py:triple")
    assert (job(None), name) == (3, "triple")

    (tmp_path / "jobs_of_here.py").write_text("def one(df): return 1\n")
    assert load_job("jobs_of_here:one")[0](None) == 1


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("nothing", "names no function"),
        ("nowhere:fn", "no module 'nowhere' here"),
        ("gone.py:fn", "there is no file"),
        ("broken_job:fn", "in line 1"),
        ("lost_job:fn", "imports 'not_here'"),
        ("plain_job:missing", r"no function 'missing' \(it has: plain, there\)"),
        ("plain_job:NUMBER", "is of type int, not a function"),
        ("plain_job:Some", "is a class, not a function"),
        ("plain_job:plain", "is of type AssetsDefinition, not a function. Name a function of"),
        ("raising_job:fn", r"can't be imported: raising_job.py:4: KeyError: 'HOME_OF_DATA'$"),
        ("leaving_job:fn", r"can't be imported: leaving_job.py:2: SystemExit: 3$"),
        ("sub/deep_job.py:fn", r"can't be imported: raising_job.py:4: KeyError: "),
    ],
)
def test_a_job_that_cant_be_loaded_is_one_clear_line(named: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "broken_job.py").write_text("def fn(:\n")
    (tmp_path / "lost_job.py").write_text("import not_here\n")
    (tmp_path / "plain_job.py").write_text(
        "import dagster as _dg\nNUMBER = 1\nclass Some: ...\ndef there(df): ...\n"
        "def _plain(): ...\nplain = _dg.asset(_plain)\n"
    )
    (tmp_path / "raising_job.py").write_text(
        "import json, os\n\ndef home():\n    return json.loads(os.environ['HOME_OF_DATA'])\n\n"
        "HOME = home()\n"
    )
    (tmp_path / "leaving_job.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep_job.py").write_text(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport raising_job\n"
    )

    with pytest.raises(WrongUse, match=said) as refused:
        load_job(named)

    assert "\n" not in str(refused.value)
