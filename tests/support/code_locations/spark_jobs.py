"""Functions of DataFrames, apart from the location: Python workers of Spark import this module."""

import os
import time
from pathlib import Path

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType

from opendataflow_dagster import spark_job


@F.udf(StringType(), useArrow=False)
def slug(shop: str | None) -> str | None:
    """A shop as it may be written in a URL; it takes as long as a file `slow` is there."""
    folder = Path(os.environ["FLOW_FOLDER"])
    while (folder / "slow").exists():
        (folder / "at_work").touch()
        time.sleep(0.1)
    return shop and shop.lower().replace(" ", "-")


def load(raw: DataFrame) -> DataFrame:
    """Take the rows as they come, in Spark's own files."""
    return raw


def enrich(sales: DataFrame) -> DataFrame:
    """Totals with tax, and names for URLs."""
    taxed = sales.withColumn("total", F.expr("cast(amount * 1.19 as decimal(12, 2))"))
    return taxed.withColumn("slug", slug("shop"))


checked = spark_job(enrich, expect={"not_null": ["total"], "warn": {"rows": {"min": 4}}})
batched = spark_job(enrich, batch=4)
threaded = spark_job(enrich, threads=2)
