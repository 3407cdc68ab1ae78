from pyspark.sql import DataFrame
from opendataflow_dagster import SparkResource, build_definitions, spark_job

@spark_job(expect={"not_null": ["id"], "warn": {"rows": {"change": 0.5}}}, batch=20)
def enrich(sales: DataFrame) -> DataFrame:
    return sales.selectExpr("*", "amount * 1.19 as total")

defs = build_definitions(
    functions={"enrich": enrich},
    pyspark=SparkResource(spark_config={"spark.master": "local[4]"}),
)
