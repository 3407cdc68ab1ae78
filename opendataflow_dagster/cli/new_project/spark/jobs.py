"""The jobs: each function produces chunks, here days, and returns the data to publish."""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from opendataflow_dagster import spark_job


@spark_job(expect={"rows": {"min": 1}, "range": {"cents": (0, 10_000_000)}})
def check(sales: DataFrame) -> DataFrame:
    """Leave out the lines without an amount; refuse a day in which no line has one."""
    return sales.where(F.col("cents").isNotNull())


def report(checked: DataFrame) -> DataFrame:
    """Add up what each shop has sold."""
    return checked.groupBy("shop").agg(F.sum("cents").alias("cents"))
