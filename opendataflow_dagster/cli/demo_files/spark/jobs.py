"""The demo's jobs. Where the data lies, and which day is next, isn't their business.

Change them, and have a day produced again:

    odf resubmit check 2026-10-05 --downstream
    odf run --spark jobs.py:check && odf run --spark jobs.py:report

To look at what they made: python -c "import pandas; print(pandas.read_parquet('report'))"
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from opendataflow_dagster import spark_job


# A day with a row that breaks an expectation is FAILED, and none of it is published.
@spark_job(expect={"not_null": ["shop", "amount"], "range": {"amount": (0, 1000)}})
def check(sales: DataFrame) -> DataFrame:
    """A day of sales, with amounts that are numbers."""
    return sales.select(
        "day",
        "shop",
        F.col("amount").try_cast("decimal(10, 2)").alias("amount"),
        F.col("amount").cast("string").alias("written"),
    )


# Small days go through Spark together; each is published, and may fail, by itself.
@spark_job(batch=31)
def report(checked: DataFrame) -> DataFrame:
    """Revenue per shop."""
    return checked.groupBy("dataid", "shop").agg(F.sum("amount").alias("revenue"))
