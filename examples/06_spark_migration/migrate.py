"""Migrate a chunk of `orders` to the lake; the tables know both places, and which rows it has."""

from pyspark.sql import DataFrame

from opendataflow_dagster import spark_job


@spark_job(threads=4, expect={"not_null": ["shop", "amount"], "range": {"amount": (0, None)}})
def extract(orders: DataFrame) -> DataFrame:
    return orders.selectExpr("*", "cast(amount / 100 as decimal(10, 2)) as price").repartition(2)
