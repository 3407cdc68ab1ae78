"""Tests of the functions on one day of data, without tables."""

from pathlib import Path

from jobs import check, report
from pyspark.sql import SparkSession

from opendataflow_dagster import Flow


def test_the_flow_is_valid() -> None:
    flow = Flow.load(Path(__file__).parents[1] / "flow.yml")
    assert {"check", "report"} <= {job.jobid for job in flow.jobs}


def test_lines_without_an_amount_are_left_out() -> None:
    spark = SparkSession.builder.master("local[1]").getOrCreate()
    sales = spark.createDataFrame(
        [("north", 5), ("south", None), ("north", 7)], "shop string, cents bigint"
    )
    assert [tuple(row) for row in check(sales).collect()] == [("north", 5), ("north", 7)]
    assert [tuple(row) for row in report(check(sales)).collect()] == [("north", 12)]
