from pyspark.sql import DataFrame
from opendataflow_dagster import spark_job

def looks_right(df: DataFrame) -> bool | str:
    return df.where("amount = 0").isEmpty() or "a sale of nothing"

@spark_job(
    expect={
        "not_null": ["id", "shop"],
        "unique": ["id", ["shop", "day"]],          # id by itself; shop and day together
        "range": {"amount": (0, 10_000)},
        "rows": {"min": 1, "change": 0.5},          # at most 50% fewer or more than the last five chunks
        "sql": {"dated": "day <= current_date()"},
        "function": [looks_right],                  # fn(df) or fn(df, chunk): True, False, or what is wrong
        "warn": {"not_null": ["comment"]},          # a warning: the chunk is published
    },
    schema="merge",
    batch=20,
)
def checked(sales: DataFrame) -> DataFrame:
    return sales.dropDuplicates()
